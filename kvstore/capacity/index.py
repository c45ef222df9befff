"""The objects of a namespace in the order of their last use, oldest first. About 300 bytes each."""

from __future__ import annotations

import itertools
from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass

from kvstore.backends.base import ObjectEntry

#: A time from the store is news when it is this much later than what we know; storage keeps milliseconds or less.
NEWS_S = 1.0


@dataclass(slots=True)
class Resident:
    """``used_s`` and ``written_s`` are times of the store. ``count``: after which count of the pool it came.
    ``pending``: not published yet."""

    size_bytes: int
    used_s: float
    written_s: float
    count: int
    pending: bool = False


class Index:
    """Not locked: its owner does that."""

    def __init__(self) -> None:
        self._entries: OrderedDict[str, Resident] = OrderedDict()
        self._count = 0
        self._removed: set[str] | None = None
        #: Taken out to be evicted, and not gone for certain yet: their bytes.
        self._taken: dict[str, int] = {}

    def __len__(self) -> int:
        return len(self._entries)

    def get(self, name: str) -> Resident | None:
        return self._entries.get(name)

    def add(self, name: str, size_bytes: int, now_s: float, *, pending: bool) -> None:
        """One more, used last."""
        self._entries[name] = Resident(size_bytes, now_s, now_s, self._count, pending)
        self._entries.move_to_end(name)

    def touch(self, name: str, now_s: float) -> None:
        """It was used just now."""
        entry = self._entries.get(name)
        if entry is not None:
            entry.used_s = now_s
            self._entries.move_to_end(name)

    def pop(self, name: str) -> Resident | None:
        """It is gone, or is about to be."""
        entry = self._entries.pop(name, None)
        if entry is not None and self._removed is not None:
            self._removed.add(name)
        return entry

    def published(self, name: str, size_bytes: int, now_s: float) -> int:
        """What was pending is there; by how many bytes it is smaller than it was thought to get."""
        entry = self._entries.get(name)
        if entry is None:
            self.add(name, size_bytes, now_s, pending=False)
            return 0
        saved, entry.size_bytes = entry.size_bytes - size_bytes, size_bytes
        entry.pending, entry.count = False, self._count
        return saved

    def put_back(self, name: str, entry: Resident) -> None:
        """It is not gone after all: it goes to the end of the line."""
        self._entries[name] = entry
        self._entries.move_to_end(name)
        self._taken.pop(name, None)
        if self._removed is not None:
            self._removed.discard(name)

    def resolved(self, name: str) -> None:
        """What was taken out is gone."""
        self._taken.pop(name, None)

    def put_first(self, name: str, entry: Resident) -> None:
        """It is not gone after all, and still the first to go."""
        self.put_back(name, entry)
        self._entries.move_to_end(name, last=False)

    def oldest_is_pending(self) -> bool:
        """Is the first to go not there yet?"""
        return any(entry.pending for entry in itertools.islice(self._entries.values(), 1))

    def pop_oldest(self, number: int) -> list[tuple[str, Resident]]:
        """Take out so many of those used longest ago."""
        names: list[str] = []
        for name, entry in self._entries.items():
            if len(names) >= number:
                break
            if not entry.pending:
                names.append(name)
        return self._pop_all(names)

    def pop_written_before(self, when_s: float) -> list[tuple[str, Resident]]:
        """Take out those written before ``when_s``."""
        names = [name for name, entry in self._entries.items() if entry.written_s < when_s and not entry.pending]
        return self._pop_all(names)

    def _pop_all(self, names: list[str]) -> list[tuple[str, Resident]]:
        taken = [(name, entry) for name in names if (entry := self.pop(name)) is not None]
        self._taken.update((name, entry.size_bytes) for name, entry in taken)
        return taken

    def begin_count(self) -> None:
        """The pool is about to be counted."""
        self._count += 1
        self._removed = set()

    def end_count(self, found: Iterable[ObjectEntry]) -> int:
        """Take over what was found; the bytes of all of it. What was added since the count began stays, what was taken
        out since then is left out, of the rest only what was found is kept."""
        removed, self._removed = self._removed or set(), None
        first = not self._entries
        entries: list[tuple[str, Resident]] = []
        seen: set[str] = set()
        for one in found:
            if one.name in removed or one.name in self._taken:
                continue
            seen.add(one.name)
            known = self._entries.get(one.name)
            if known is None:
                entries.append((one.name, Resident(one.length_bytes, one.atime_s, one.mtime_s, self._count)))
                continue
            known.written_s = one.mtime_s
            if not known.pending:
                known.size_bytes = one.length_bytes
            if one.atime_s > known.used_s + NEWS_S:
                known.used_s = one.atime_s
        if first:
            entries.sort(key=lambda item: item[1].used_s)
        else:
            kept = [
                (name, entry)
                for name, entry in self._entries.items()
                if name in seen or entry.pending or entry.count >= self._count
            ]
            entries = sorted([*kept, *entries], key=lambda item: item[1].used_s)
        self._entries = OrderedDict(entries)
        return sum(entry.size_bytes for entry in self._entries.values()) + sum(self._taken.values())

    def drop_count(self) -> None:
        """The count failed."""
        self._removed = None
