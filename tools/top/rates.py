"""Counters of two moments, and what they say about the time between."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

Record = Mapping[str, Any]


def key(record: Record) -> tuple[Any, ...]:
    """What tells one process's record from another's, and from that of a later process with the same number."""
    return (record.get("kind"), record.get("pid"), record.get("since_ms"), record.get("namespace"), record.get("shard"))


class Delta:
    """One record now, and the one before of the same process; None: there was none."""

    def __init__(self, now: Record, before: Record | None) -> None:
        self.now = now
        self._before = before

    @property
    def elapsed_s(self) -> float:
        """Seconds between the two; 0 where there is one only."""
        if self._before is None:
            return 0.0
        return max(0.0, number(self.now, "written_ms") - number(self._before, "written_ms")) / 1000

    def rate(self, *path: str) -> float:
        """Growth per second of the counter at ``path`` (nested keys); 0 where that cannot be told."""
        if self._before is None or self.elapsed_s <= 0:
            return 0.0
        return max(0.0, number(self.now, *path) - number(self._before, *path)) / self.elapsed_s

    def grown(self, *path: str) -> dict[str, int]:
        """For a table of counters at ``path``: what was added since, without the zeros; all of it the first time."""
        now, before = _table(self.now, *path), _table(self._before or {}, *path)
        grown = {name: int(count - before.get(name, 0)) for name, count in now.items()}
        return {name: count for name, count in grown.items() if count > 0}


def number(record: Record, *path: str) -> float:
    """The number at a path of keys; 0 where there is none. A table of numbers counts as its sum."""
    found: Any = record
    for step in path:
        found = found.get(step) if isinstance(found, Mapping) else None
    if isinstance(found, Mapping):
        return float(sum(value for value in found.values() if isinstance(value, (int, float))))
    return float(found) if isinstance(found, (int, float)) else 0.0


def _table(record: Record, *path: str) -> dict[str, float]:
    found: Any = record
    for step in path:
        found = found.get(step) if isinstance(found, Mapping) else None
    if not isinstance(found, Mapping):
        return {}
    return {name: float(value) for name, value in found.items() if isinstance(value, (int, float))}
