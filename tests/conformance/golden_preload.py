"""What a captured scenario presupposes and no captured scenario before it made.

Some of what the captures' clients did was not kept. Where the same was kept for the other mount (``fuse_true_``,
``fuse_false_``), that scenario is replayed with other paths; the rest is made directly.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from conformance.probe import Probe, pattern
from conformance.rules import HEAD

from curvfs.units import MIB

#: Scenario -> (scenario to replay before it, path there, path here).
TWINS = {
    "fuse_true_fallocate_keep": ("fuse_false_fallocate", "/f_false", "/f_true"),
    "fuse_true_link": ("fuse_false_rename_exchange", "/f_false", "/f_true"),
    "fuse_false_fsync": ("fuse_true_append", "/f_true", "/f_false"),
    "fuse_false_truncate_zero": ("fuse_true_write_in_hole", "/f_true", "/f_false"),
}

OWNER = {"owner": "root", "group": "root"}
#: Goes on writing the files that were left open.
WRITER = {"client_name": "11111111-2222-4333-8444-555555555555"}


async def _list_directory(probe: Probe) -> None:
    for name in ("b", "a", "é", "B", "*x", "[q]"):
        await probe.create(f"/raw/l/{name}", block_size=4 * MIB, create_parent=True, **OWNER, **WRITER)
    if probe.version is HEAD:  # kept for v0.3.2-alpha only
        await probe.create("/raw/ttl2", **OWNER, **WRITER)


async def _more_entries(probe: Probe) -> None:
    """Files that only show in the number of entries."""
    for name in ("more1", "more2", "more3"):
        await probe.create(f"/raw/{name}", **OWNER, **WRITER)


async def _more_bytes(probe: Probe) -> None:
    """Files that only show in what deleting all of them frees."""
    await probe.put("/raw/more4", pattern(MIB), **OWNER)
    await probe.put("/raw/more5", pattern(17), **OWNER)


async def _second_directory(probe: Probe) -> None:
    await probe.mkdir("/raw2", **OWNER)
    await probe.put("/raw2/m", pattern(5000), hostname="localhost", **OWNER)


async def _unfinished_file(probe: Probe) -> None:
    await probe.create("/raw2/del", **OWNER, **WRITER)


async def _replaced_file(probe: Probe) -> None:
    for name in ("o1", "o2"):
        await probe.put(f"/raw2/{name}", pattern(300), block_size=4 * MIB, **OWNER)
    await probe.rename("/raw2/o2", "/raw2/o1")


async def _one_more_file(probe: Probe) -> None:
    await probe.create("/raw3/more", **OWNER, **WRITER)


#: Scenario -> what is done before it.
PRELOADS: dict[str, Callable[[Probe], Awaitable[None]]] = {
    "raw_list_order": _list_directory,
    "raw_heartbeat_frame": _more_entries,
    "raw_delete_block_gone": _more_bytes,
    "raw_link": _second_directory,
    "raw_create_unfinished_visible": _unfinished_file,
    "raw_rename_over_open_reader": _replaced_file,
    "raw_rm": _one_more_file,
}
