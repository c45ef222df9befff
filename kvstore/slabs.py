"""Aligned buffers that direct I/O reads into and writes from: a bounded pool of anonymous mappings.

A slab belongs to whoever acquired it until it is released, and is released only by the thread that ran the I/O, after
the call into the kernel came back. So a completion that is late finds its slab still its own, whatever its caller has
given up on in the meantime.
"""

from __future__ import annotations

import ctypes
import mmap

from curvfs.errors import EnvironmentError_
from curvfs.units import align_up, format_size
from curvfs.world import World

#: Slabs of at least this size lie in huge pages: the kernel pins one page instead of 512 for a direct call, and makes
#: one request of it.
_WORTH_HUGE_BYTES = 256 << 10
_HUGE_BYTES = 2 << 20
#: Shared slabs take so many bytes together, and are so many at least, which keeps any disk busy: more of them would
#: only be touched for the first time, and push each other out of the processor's cache.
_SHARED_BYTES = 32 << 20
_SHARED_LEAST = 8
#: Lost slabs whose memory is kept, for a device that may yet write to it.
_LOST_KEPT = 64


class Slab:
    """``size_bytes`` bytes of page-aligned memory: ``view`` for Python, ``address`` for copies that release the GIL."""

    __slots__ = ("__weakref__", "_map", "address", "lost", "pinned", "size_bytes", "view")

    def __init__(self, size_bytes: int) -> None:
        #: Whether it is page-locked for copies to and from a device; None while nobody asked for that.
        self.pinned: bool | None = None
        #: A copy failed that may still write to it: not to be used again.
        self.lost = False
        self.size_bytes = align_up(size_bytes, mmap.PAGESIZE)
        huge = self.size_bytes >= _WORTH_HUGE_BYTES
        # Room to begin where a huge page does; what is not touched takes no memory.
        mapped_bytes = align_up(self.size_bytes, _HUGE_BYTES) + _HUGE_BYTES if huge else self.size_bytes
        try:
            self._map = mmap.mmap(-1, mapped_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        except OSError as error:
            raise EnvironmentError_(
                f"No memory for a buffer of {format_size(self.size_bytes)}: {error.strerror}. Open the store with a"
                " smaller depth, or a geometry with smaller pages.",
                errno_=error.errno,
            ) from error
        # A forked child must not share pages that the kernel is reading into.
        self._map.madvise(mmap.MADV_DONTFORK)
        if huge:
            try:
                self._map.madvise(mmap.MADV_HUGEPAGE)
            except OSError:  # a kernel built without them
                pass
        begin = ctypes.addressof(ctypes.c_char.from_buffer(self._map))
        self.address = align_up(begin, _HUGE_BYTES) if huge else begin
        start = self.address - begin
        self.view = memoryview(self._map)[start : start + self.size_bytes]


class SlabPool:
    """At most ``count`` slabs, made when first needed and kept. ``shared``: fewer where they are large, for whoever
    takes one soon gives it back. Callable from any thread."""

    def __init__(self, world: World, *, count: int, size_bytes: int, shared: bool = False) -> None:
        self.size_bytes = align_up(size_bytes, mmap.PAGESIZE)
        self.count = min(count, max(_SHARED_LEAST, _SHARED_BYTES // self.size_bytes)) if shared else count
        self.in_use = 0
        self._clock = world.clock
        self._free: list[Slab] = []
        self._lost: list[Slab] = []
        self._changed = world.threads.condition()

    def acquire(self, timeout_s: float) -> Slab | None:
        """A slab of unknown content, or None when none came free in time."""
        slabs = self.acquire_some(1, timeout_s)
        return slabs[0] if slabs else None

    def acquire_some(self, most: int, timeout_s: float) -> list[Slab]:
        """As many slabs as there are, at most ``most``; none when not one came free in time."""
        deadline_s = self._clock.monotonic_s() + timeout_s
        with self._changed:
            while self.in_use >= self.count:
                left_s = deadline_s - self._clock.monotonic_s()
                if left_s <= 0 or not self._changed.wait(left_s):
                    return []
            count = min(most, self.count - self.in_use)
            self.in_use += count
            slabs = [self._free.pop() for _ in range(min(count, len(self._free)))]
            if self.in_use < self.count:
                self._changed.notify()  # whoever released several told one only
        try:
            while len(slabs) < count:
                slabs.append(Slab(self.size_bytes))
        except BaseException:
            with self._changed:
                self.in_use -= count - len(slabs)
            self.release(*slabs)
            raise
        return slabs

    def release(self, *slabs: Slab) -> None:
        """Those that are released together go to one who waits, as far as he has use for them."""
        with self._changed:
            self.in_use -= len(slabs)
            for slab in slabs:
                (self._lost if slab.lost else self._free).append(slab)
            del self._lost[:-_LOST_KEPT]
            self._changed.notify()

    def close(self) -> None:
        """Let go of the free ones; the rest goes when its I/O is done."""
        with self._changed:
            self._free.clear()
