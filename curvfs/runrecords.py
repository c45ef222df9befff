"""Who runs on this host: each process with a mount, a store or a server keeps a small record, and tools read them.

A record is a JSON file in the run directory beside a lock file that its process holds, so a record whose process is
gone is known by its free lock, whatever became of its process id, and is removed by whoever looks. The directory is
``$CURVFS_RUN_DIR``, else ``/run/curvfs`` for root, else ``$XDG_RUNTIME_DIR/curvfs``, else ``/tmp/curvfs-<uid>``.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
from collections.abc import Mapping
from typing import Any, Literal

from curvfs.world import World

logger = logging.getLogger("curvfs")

Kind = Literal["mount", "kvstore", "server"]

_SUFFIX = ".json"


def run_directory() -> str:
    """Where the records of this user's processes are."""
    if chosen := os.environ.get("CURVFS_RUN_DIR"):
        return chosen
    if os.geteuid() == 0:
        return "/run/curvfs"
    if private := os.environ.get("XDG_RUNTIME_DIR"):
        return f"{private}/curvfs"
    return f"/tmp/curvfs-{os.geteuid()}"


class RunRecord:
    """The record of this process. What goes wrong with it is logged once and never raised: it is only for onlookers.

    ``kind``: what runs here. ``fields`` of :meth:`write` must be JSON; ``kind``, ``pid``, ``since_ms`` and
    ``written_ms`` (both since the Unix epoch) are added. Write it again when there is news, about once a second.
    """

    def __init__(self, world: World, kind: Kind, *, directory: str | None = None) -> None:
        self._world = world
        self._kind = kind
        self._since_ms = world.clock.time_ms()
        self._fd = -1
        self._warned = False
        self._base = f"{directory or run_directory()}/{kind}-{os.getpid()}-{world.random.uuid()[:8]}"
        try:
            _prepare(world, os.path.dirname(self._base))
            self._fd = world.disk.open(f"{self._base}.lock", os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
            world.disk.lock(self._fd)
        except OSError as error:
            self._warn(error)

    def write(self, fields: Mapping[str, Any]) -> None:
        """Replace the record. Callable from any thread, but from one at a time."""
        if self._fd < 0:
            return
        stamps = {"since_ms": self._since_ms, "written_ms": self._world.clock.time_ms()}
        record = {"kind": self._kind, "pid": os.getpid(), **stamps, **fields}
        try:
            self._world.disk.write_file(self._base + _SUFFIX, json.dumps(record).encode())
        except OSError as error:
            self._warn(error)

    def close(self) -> None:
        """Remove the record. Twice is fine."""
        if self._fd < 0:
            return
        _remove(self._world, self._base)
        self._world.disk.close(self._fd)
        self._fd = -1

    def _warn(self, error: OSError) -> None:
        if not self._warned:
            self._warned = True
            logger.warning(
                "no record of this process can be kept at %s (%s); lists of running processes will lack it",
                self._base,
                error.strerror or error,
            )


def running(world: World, kind: Kind | None = None, *, directory: str | None = None) -> list[dict[str, Any]]:
    """The records of the processes that live, oldest first; the records of dead ones are removed.

    A process that has not written its record yet is left out. Never raises for a missing or unreadable directory.
    """
    directory = directory or run_directory()
    try:
        names = world.disk.listdir(directory)
    except OSError:
        return []
    found = []
    for name in names:
        if not name.endswith(_SUFFIX) or (kind is not None and not name.startswith(f"{kind}-")):
            continue
        base = f"{directory}/{name.removesuffix(_SUFFIX)}"
        with contextlib.suppress(OSError, ValueError):
            if _alive(world, base):
                record = json.loads(world.disk.read_file(base + _SUFFIX))
                if isinstance(record, dict):
                    found.append(record)
            else:
                _remove(world, base)
    return sorted(found, key=lambda record: (record.get("since_ms", 0), record.get("pid", 0)))


def _prepare(world: World, directory: str) -> None:
    world.disk.makedirs(directory, 0o700)
    owner = world.disk.stat(directory, follow_symlinks=False).st_uid
    if owner not in (0, os.geteuid()):
        raise PermissionError(1, f"{directory} belongs to user {owner}")


def _alive(world: World, base: str) -> bool:
    try:
        fd = world.disk.open(f"{base}.lock", os.O_RDWR)
    except FileNotFoundError:
        return False
    try:
        return not world.disk.lock(fd, shared=True)
    finally:
        world.disk.close(fd)


def _remove(world: World, base: str) -> None:
    for suffix in (_SUFFIX, ".lock"):
        with contextlib.suppress(OSError):
            world.disk.unlink(base + suffix)
