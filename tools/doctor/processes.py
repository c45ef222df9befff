"""Checks of what runs on this machine: stores that store and never hit, mounts and stores in trouble."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from curvfs.runrecords import running
from curvfs.world import World
from tools.doctor.findings import Finding, note, ok, warning

#: Calls before silence means something.
_ENOUGH = 20


def check_processes(world: World) -> Iterator[Finding]:
    """What the run records of this host say."""
    records = running(world)
    if not records:
        yield note("processes", "No mount, store or server of this user runs here.")
        return
    kinds = [record["kind"] for record in records]
    counts = ", ".join(f"{kinds.count(kind)} {kind}" for kind in sorted(set(kinds)))
    yield ok("processes", f"Running here: {counts}.")
    stores = [record for record in records if record["kind"] == "kvstore" and isinstance(record.get("stats"), dict)]
    for store in stores:
        yield from _store(store)
    yield from _identities(stores)


def _store(record: dict[str, Any]) -> Iterator[Finding]:
    stats, who = record["stats"], f"The store of process {record['pid']} ({record.get('model', '?')})"
    stored, asked = stats.get("puts", 0) + stats.get("puts_existing", 0), stats.get("lookups", 0)
    if stored >= _ENOUGH and asked >= _ENOUGH and not stats.get("lookup_pages"):
        yield warning(
            "no-hits",
            f"{who} stored {stored} pages and no lookup of {asked} found one.",
            "Prompts differ in the first page, or replicas hash differently: compare model, revision, page size, "
            "tokenizer and salt, and the engine's own hash seed (docs/kvstore.md).",
        )
    if stats.get("failing_puts", 0) >= _ENOUGH:
        yield warning(
            "failing-puts",
            f"{who} failed to store the last {stats['failing_puts']} pages: {stats.get('last_error', '')}",
            "Check space, permissions and the workers.",
        )
    if stats.get("quarantined"):
        yield warning(
            "damaged",
            f"{who} put {stats['quarantined']} damaged objects aside.",
            "Check the disks of the pool, and run curvfs scrub.",
        )
    if not stats.get("direct", True):
        yield note("buffered", f"{who} does not use direct I/O: {stats.get('direct_reason', '')}.")


def _identities(stores: list[dict[str, Any]]) -> Iterator[Finding]:
    """Stores of one model in one pool that can never hit each other's pages."""
    groups: dict[tuple[Any, Any], dict[Any, list[int]]] = {}
    for store in stores:
        identities = groups.setdefault((store.get("url"), store.get("model")), {})
        identities.setdefault(store.get("fingerprint"), []).append(store["pid"])
    for (_, model), identities in groups.items():
        if len(identities) > 1:
            pids = "; ".join(", ".join(map(str, group)) for group in identities.values())
            yield warning(
                "identities",
                f"Processes here store {model} under {len(identities)} identities ({pids}) and do not share pages.",
                "If they serve the same weights, make revision, dtype, page size, layout and salt equal.",
            )
