"""What is in a store: for people, for evictors and for routers. Nothing here is needed to put or get a page."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

from kvstore.backends.base import Backend
from kvstore.header import OBJECT_SUFFIX


@dataclass(frozen=True, slots=True)
class StoredPage:
    """One object of the store's namespace. ``key``: its page's key in hex; ``shard``: as in its name, may be empty."""

    name: str
    key: str
    shard: str
    length_bytes: int
    mtime_s: float


@dataclass(frozen=True, slots=True)
class Listing:
    """Objects in order of their names. ``cursor``: where the next call goes on; empty when this was all."""

    pages: tuple[StoredPage, ...]
    cursor: str


@dataclass(frozen=True, slots=True)
class Usage:
    """Objects of this namespace and their bytes as files. ``trash_bytes`` and ``staged_bytes`` (left-overs of the dead
    among them) are the whole prefix's; they count as used, too."""

    objects: int
    object_bytes: int
    trash_bytes: int
    staged_bytes: int

    @property
    def used_bytes(self) -> int:
        return self.object_bytes + self.trash_bytes + self.staged_bytes


class Inventory:
    """One namespace of a back end. Every call walks directories; errors are CurvfsErrors."""

    def __init__(self, backend: Backend, namespace: str) -> None:
        self._backend = backend
        self._namespace = namespace

    def list(self, cursor: str, limit: int) -> Listing:
        """The first ``limit`` objects behind ``cursor``."""
        entries = itertools.islice(self._backend.walk(self._namespace, cursor), limit + 1)
        pages = []
        for entry in entries:
            stem = entry.name.rpartition("/")[2].removesuffix(OBJECT_SUFFIX)
            key, _, shard = stem.partition("-")
            pages.append(StoredPage(entry.name, key, shard, entry.length_bytes, entry.mtime_s))
        more = len(pages) > limit
        return Listing(tuple(pages[:limit]), pages[limit - 1].name if more else "")

    def usage(self) -> Usage:
        """Count everything."""
        objects = object_bytes = 0
        for entry in self._backend.walk(self._namespace):
            objects += 1
            object_bytes += entry.length_bytes
        return Usage(objects, object_bytes, self._backend.trash_bytes(), self._backend.staged_bytes())

    def clear(self) -> tuple[int, int]:
        """Remove every object; how many, and their bytes."""
        count = size_bytes = 0
        for entry in self._backend.walk(self._namespace):
            if self._backend.delete(entry.name):
                count += 1
                size_bytes += entry.length_bytes
        return count, size_bytes
