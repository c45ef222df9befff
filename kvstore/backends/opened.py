"""Blocks that stay open for a while after they were read: hot pages cost no question to the worker.

A descriptor goes on reading the same bytes whatever happens to its file, so an entry is good for as long as it is kept.
It also keeps a deleted file's space, so at most ``count`` are kept, none unused for longer than ``keep_s`` when the
next one comes.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

from curvfs.api import LocalExtent, SyncReadExtents
from curvfs.world import World
from kvstore.backends.base import cached_descriptor


@dataclass(slots=True)
class Opened:
    """An open object and how many readers use it now. ``through_cache``: a second descriptor, without O_DIRECT."""

    key: tuple[int, ...]
    extents: SyncReadExtents
    users: int = 1
    used_s: float = 0.0
    kept: bool = False
    through_cache: int = -1


class OpenedBlocks:
    """A bounded cache, least recently used goes first. Callable from any thread."""

    def __init__(self, world: World, *, count: int, keep_s: float) -> None:
        self._clock = world.clock
        self._disk = world.disk
        self._lock = world.threads.lock()
        self._count = count
        self._keep_s = keep_s
        self._kept: OrderedDict[tuple[int, ...], Opened] = OrderedDict()
        self.hits = 0

    def take(self, key: tuple[int, ...]) -> Opened | None:
        """An entry to use until it is given back."""
        with self._lock:
            entry = self._kept.get(key)
            if entry is not None:
                entry.users += 1
                self.hits += 1
                self._kept.move_to_end(key)
            return entry

    def through_cache(self, entry: Opened, local: LocalExtent) -> int:
        """A descriptor of the same file without O_DIRECT when all of it lies in the page cache now, else -1."""
        if entry.through_cache < 0:
            fd = cached_descriptor(self._disk, local.fd, local.length_bytes)
            with self._lock:
                if entry.through_cache < 0:
                    entry.through_cache, fd = fd, -1
            if fd >= 0:
                self._disk.close(fd)
            return entry.through_cache
        resident = self._disk.resident_bytes(local.fd, 0, local.length_bytes) >= local.length_bytes
        return entry.through_cache if resident else -1

    def give_back(self, entry: Opened, *, keep: bool) -> None:
        """Done with an entry; ``keep``: it may be used again."""
        now_s = self._clock.monotonic_s()
        with self._lock:
            entry.users -= 1
            entry.used_s = now_s
            if keep and not entry.kept and entry.key not in self._kept and self._count:
                entry.kept = True
                self._kept[entry.key] = entry
            elif not keep and entry.kept:
                entry.kept = False
                del self._kept[entry.key]
            gone = self._surplus(lambda one: now_s - one.used_s > self._keep_s)
            if not entry.kept and entry.users == 0:
                gone.append(entry)
        self._close(gone)

    def _surplus(self, stale: Callable[[Opened], bool]) -> list[Opened]:
        gone = []
        for key, entry in list(self._kept.items()):
            if len(self._kept) <= self._count and not stale(entry):
                break
            if entry.users == 0:
                entry.kept = False
                del self._kept[key]
                gone.append(entry)
        return gone

    def _close(self, entries: list[Opened]) -> None:
        for entry in entries:
            if entry.through_cache >= 0:
                self._disk.close(entry.through_cache)
                entry.through_cache = -1
            entry.extents.close()

    def close(self) -> None:
        """Close what nobody uses; the rest is closed when it is given back."""
        with self._lock:
            self._count = 0
            gone = self._surplus(lambda one: True)
        self._close(gone)
