"""A pool as a whole: what each namespace takes, and how old and how long unused its objects are."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from kvstore.backends.base import Backend, ObjectEntry
from kvstore.scrub import Scrubber

#: Upper bounds of the bars of a histogram, with their names.
AGES: tuple[tuple[str, float], ...] = (
    ("1 min", 60),
    ("10 min", 600),
    ("1 h", 3_600),
    ("6 h", 21_600),
    ("1 d", 86_400),
    ("7 d", 604_800),
    ("30 d", 2_592_000),
    ("more", float("inf")),
)


@dataclass(slots=True)
class Tally:
    """Objects of one namespace, or of all. Histograms count objects by the bounds of :data:`AGES`."""

    objects: int = 0
    size_bytes: int = 0
    shards: set[str] = field(default_factory=set)
    ages: list[int] = field(default_factory=lambda: [0] * len(AGES))
    unused: list[int] = field(default_factory=lambda: [0] * len(AGES))
    never_used: int = 0

    def add(self, entry: ObjectEntry, now_s: float) -> None:
        self.objects += 1
        self.size_bytes += entry.length_bytes
        self.shards.add(_shard(entry.name))
        self.ages[_bar(now_s - entry.mtime_s)] += 1
        if entry.atime_s > entry.mtime_s:
            self.unused[_bar(now_s - entry.atime_s)] += 1
        else:
            self.never_used += 1

    def document(self) -> dict[str, Any]:
        return {
            "objects": self.objects,
            "size_bytes": self.size_bytes,
            "shards": sorted(self.shards),
            "written_ago": dict(zip([name for name, _ in AGES], self.ages, strict=True)),
            "used_ago": dict(zip([name for name, _ in AGES], self.unused, strict=True)),
            "never_used": self.never_used,
        }


def _shard(name: str) -> str:
    return name.rpartition("/")[2].partition(".")[0].partition("-")[2]


def _bar(age_s: float) -> int:
    return next(number for number, (_, bound_s) in enumerate(AGES) if age_s < bound_s)


def describe_pool(backend: Backend, walker: Scrubber, entries: Iterable[ObjectEntry]) -> dict[str, Any]:
    """Count ``entries`` by namespace, by the store's own clock. Raises CurvfsError."""
    now_s = backend.staging.now_s()
    everything = Tally()
    namespaces: dict[str, Tally] = {}
    for entry in entries:
        everything.add(entry, now_s)
        namespaces.setdefault(entry.name.partition("/")[0], Tally()).add(entry, now_s)
    aside = {name: {"files": files, "size_bytes": size} for name, (files, size) in walker.aside_bytes().items()}
    return {
        **everything.document(),
        "namespaces": {name: tally.document() for name, tally in sorted(namespaces.items())},
        "aside": aside | {"staging": {"size_bytes": backend.staged_bytes()}},
    }
