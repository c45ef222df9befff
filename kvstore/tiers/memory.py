"""L1: pages in host memory, above the pool that all share.

One piece of memory, cut into frames of a page each, so its size is its bound to the byte. A page comes in once it was
verified, when it was read, or once it was stored; the one used longest ago makes room. A frame that is being read or
filled is *pinned*: it keeps its bytes until that is over, whatever becomes of its page.
"""

from __future__ import annotations

import ctypes
from collections import OrderedDict
from dataclasses import dataclass

from curvfs.errors import ConfigError
from curvfs.units import align_up, format_size
from curvfs.world import World
from kvstore.header import ALIGNMENT_BYTES
from kvstore.keys import PageKey
from kvstore.slabs import Slab


@dataclass(frozen=True, eq=False)
class MemoryStats:
    """One moment of the pages in host memory. ``hits``: pages delivered from there; ``admitted``, ``evicted``: pages
    that came and went; ``passed_by``: pages that found all frames pinned."""

    size_bytes: int = 0
    used_bytes: int = 0
    pages: int = 0
    hits: int = 0
    admitted: int = 0
    evicted: int = 0
    passed_by: int = 0


class Frame:
    """Room for one page. ``start``: where its data begin in the memory. ``digests``: of the tokens it was made from."""

    __slots__ = ("digests", "name", "pins", "resident", "start")

    def __init__(self, start: int) -> None:
        self.start = start
        self.name = ""
        self.digests = (b"", b"")
        self.pins = 0
        self.resident = False


class Memory:
    """Callable from any thread; nothing waits. ``size_bytes`` 0: there is none."""

    def __init__(self, world: World, *, size_bytes: int, data_bytes: int) -> None:
        """Raises ConfigError when it would not hold a single page."""
        self._data_bytes = data_bytes
        self._frame_bytes = align_up(max(data_bytes, 1), ALIGNMENT_BYTES)
        self._count = size_bytes // self._frame_bytes
        if size_bytes and not self._count:
            raise ConfigError(
                f"{format_size(size_bytes)} of memory hold no page of {format_size(self._frame_bytes)}; give more,"
                " or 0."
            )
        self._lock = world.threads.lock()
        self._slab: Slab | None = None
        self._free: list[Frame] = []
        self._made = 0
        self._frames: OrderedDict[str, Frame] = OrderedDict()
        self.hits = self.admitted = self.evicted = self.passed_by = 0

    @property
    def on(self) -> bool:
        return self._count > 0

    @property
    def slab(self) -> Slab:
        """All of it; made when the first page comes."""
        assert self._slab is not None
        return self._slab

    def __contains__(self, name: str) -> bool:
        return name in self._frames

    def pin(self, key: PageKey, name: str) -> Frame | None:
        """The page, if it is there and was made from the key's tokens; :meth:`unpin` must follow."""
        if not self._count:
            return None
        with self._lock:
            frame = self._frames.get(name)
            digests = (key.token_digest, key.extra_digest)
            if frame is None or (key.token_digest and frame.digests != digests):
                return None
            self._frames.move_to_end(name)
            frame.pins += 1
            self.hits += 1
            return frame

    def unpin(self, frame: Frame) -> None:
        with self._lock:
            frame.pins -= 1
            if not frame.pins and not frame.resident:
                self._free.append(frame)

    def fill(self, key: PageKey, name: str, source: Slab, start: int) -> Frame | None:
        """Copy a page's data into a frame that nobody sees yet; :meth:`admit` or :meth:`unpin` must follow. None where
        there is no room, or the page is there."""
        if not self._count:
            return None
        with self._lock:
            if name in self._frames:
                return None
            frame = self._room()
            if frame is None:
                self.passed_by += 1
                return None
            frame.pins, frame.name = 1, name
            frame.digests = (key.token_digest, key.extra_digest)
        ctypes.memmove(self.slab.address + frame.start, source.address + start, self._data_bytes)
        return frame

    def _room(self) -> Frame | None:
        if self._slab is None:
            self._slab = Slab(self._count * self._frame_bytes)
        if self._free:
            return self._free.pop()
        if self._made < self._count:
            self._made += 1
            return Frame((self._made - 1) * self._frame_bytes)
        for name, frame in self._frames.items():
            if not frame.pins:
                del self._frames[name]
                frame.resident = False
                self.evicted += 1
                return frame
        return None

    def admit(self, frame: Frame) -> None:
        """What was filled is sound, and in the pool: let it be found."""
        with self._lock:
            if frame.name not in self._frames:
                frame.resident = True
                self._frames[frame.name] = frame
                self.admitted += 1
        self.unpin(frame)

    def forget(self, name: str) -> None:
        """It is not to be delivered any more."""
        with self._lock:
            self._drop(name)

    def _drop(self, name: str) -> None:
        frame = self._frames.pop(name, None)
        if frame is not None:
            frame.resident = False
            if not frame.pins:
                self._free.append(frame)

    def clear(self) -> None:
        with self._lock:
            for name in list(self._frames):
                self._drop(name)

    def stats(self) -> MemoryStats:
        with self._lock:
            return MemoryStats(
                size_bytes=self._count * self._frame_bytes,
                used_bytes=len(self._frames) * self._frame_bytes,
                pages=len(self._frames),
                hits=self.hits,
                admitted=self.admitted,
                evicted=self.evicted,
                passed_by=self.passed_by,
            )
