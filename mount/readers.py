"""Reading: one reader per file, shared by its handles, and the quick way for what the page cache holds.

Reads of blocks that lie on this machine and in the page cache are answered inline, into one slab that every reply
shares: ``preadv(RWF_NOWAIT)``. What is not in the page cache goes to a thread. A file system that does not know the
flag (tmpfs) is remembered, and read inline without it.
"""

from __future__ import annotations

import errno
import mmap
import os
from bisect import bisect_right
from collections.abc import Iterator

import trio

from curvfs.api import CurvineFileSystem, FileStatus, LocalExtent, Located, ReadExtents
from curvfs.errors import CurvfsError, from_os_error
from curvfs.units import MIB
from curvfs.world import Disk, Threads
from mount.behind import LEAST_BYTES, Behind
from mount.inodes import Node, NodeTable

#: READ and WRITE requests reach this size.
MAX_REQUEST_BYTES = MIB
#: A file that changed this recently may change again within the same tick of the store's clock, or of a host whose
#: clock is a little off.
_RACY_MS = 2000
#: Descriptors that stay open for the next open of their files: so many, of those that a process usually may have, and
#: for so long, because a file that is removed elsewhere takes its space meanwhile.
_KEPT_DESCRIPTORS = 512
KEPT_S = 30.0
#: Buffers that are kept for requests that have to wait.
_SPARE_BUFFERS = 8
#: An ordinary file is kept open only when it is that small.
_KEPT_ORDINARY_BYTES = MIB


class Slab:
    """The buffers that reads are answered from. What :attr:`view` holds is valid until the next inline read."""

    def __init__(self, disk: Disk, size_bytes: int = MAX_REQUEST_BYTES) -> None:
        self.disk = disk
        self.view = memoryview(mmap.mmap(-1, size_bytes))
        self._free: list[memoryview] = []
        #: Devices whose file system does not know RWF_NOWAIT.
        self.without_nowait: set[int] = set()

    def take(self) -> memoryview:
        """A buffer for one request that has to wait; the memory of a new one costs more than reading into it."""
        return self._free.pop() if self._free else memoryview(mmap.mmap(-1, MAX_REQUEST_BYTES))

    def give(self, buffer: memoryview) -> None:
        """What was in it has been sent, or is sent before anybody else has a turn."""
        if len(self._free) < _SPARE_BUFFERS:
            self._free.append(buffer)


class NodeReader:
    """The blocks of one file, open for reading. Closed when it is retired and nobody is in the middle of a read."""

    def __init__(self, located: Located, extents: ReadExtents, slab: Slab, threads: Threads) -> None:
        self.located = located
        self.length_bytes = extents.status.length_bytes
        self._extents = extents
        self._slab = slab
        self._threads = threads
        self._users = 0
        self._retired = False
        self._local = [extent for extent in extents.extents if isinstance(extent, LocalExtent)]
        self._starts = [extent.file_offset_bytes for extent in self._local]
        self._device = slab.disk.fstat(self._local[0].fd).st_dev if self._local else 0
        self._behind = Behind(slab.disk, self._places) if self.length_bytes > LEAST_BYTES else None

    @property
    def descriptors(self) -> int:
        return len(self._local)

    @property
    def is_local(self) -> bool:
        """Every byte is open on a local descriptor, so that the file can be removed and still be read."""
        return self._extents.is_local

    def same_as(self, located: Located) -> bool:
        """Are these still the blocks of the file as the store shows it now?"""
        ours, theirs = self.located.status, located.status
        return (
            ours.id == theirs.id
            and stamp(ours) == stamp(theirs)
            and [block.block_id for block in self.located.blocks] == [block.block_id for block in located.blocks]
        )

    def read_inline(self, offset_bytes: int, size_bytes: int) -> memoryview | None:
        """The bytes, if they lie in one local block and in the page cache; valid until the next call."""
        size_bytes = min(size_bytes, self.length_bytes - offset_bytes)
        if size_bytes <= 0:
            return self._slab.view[:0]
        index = bisect_right(self._starts, offset_bytes) - 1
        if index < 0 or size_bytes > MAX_REQUEST_BYTES:
            return None
        extent = self._local[index]
        within = offset_bytes - extent.file_offset_bytes
        if within + size_bytes > extent.length_bytes:
            return None
        slab = self._slab
        view = slab.view[:size_bytes]
        flags = 0 if self._device in slab.without_nowait else os.RWF_NOWAIT
        try:
            count = slab.disk.preadv(extent.fd, [view], within, flags)
        except BlockingIOError:
            return None
        except OSError as error:
            if error.errno == errno.EOPNOTSUPP and flags:
                slab.without_nowait.add(self._device)
                return self.read_inline(offset_bytes, size_bytes)
            return None  # the other way of reading reports it
        # A short count is a page that is not there, or a block file that ends early and reads as zeros.
        if count != size_bytes:
            return None
        if self._behind is not None:
            self._behind.read(offset_bytes, size_bytes)
        return view

    async def read(self, offset_bytes: int, size_bytes: int) -> bytes | memoryview:
        """The bytes, wherever they are; less than asked only at the end of the file. Valid until somebody else has a
        turn."""
        size_bytes = min(size_bytes, self.length_bytes - offset_bytes)
        if size_bytes <= 0:
            return b""
        whole = self._slab.take() if size_bytes <= MAX_REQUEST_BYTES else memoryview(bytearray(size_bytes))
        buffer = whole[:size_bytes]
        self._users += 1
        try:
            await self._fill(buffer, offset_bytes)
            if self._behind is not None:
                self._behind.read(offset_bytes, size_bytes)
        finally:
            await self._let_go()
        # Not when that failed: a thread that was given up may still write to it.
        self._slab.give(whole)
        return buffer

    async def _fill(self, buffer: memoryview, offset_bytes: int) -> None:
        """Read all of a range within the file: local blocks through the descriptors that were opened with it, so that
        it can be removed meanwhile; the rest through the client."""
        done = 0
        while done < len(buffer):
            position = offset_bytes + done
            index = bisect_right(self._starts, position) - 1
            extent = self._local[index] if index >= 0 else None
            if extent is not None and position < extent.file_offset_bytes + extent.length_bytes:
                within = position - extent.file_offset_bytes
                piece = buffer[done : done + extent.length_bytes - within]
                try:
                    count = await self._threads.run(
                        self._slab.disk.pread_full, extent.fd, piece, within, abandon_on_cancel=True
                    )
                except OSError as error:
                    raise from_os_error(error, doing="Reading the local file of a block") from error
                if count < len(piece):  # what the block file does not hold are zeros
                    piece[count:] = bytes(len(piece) - count)
            else:
                after = self._starts[index + 1] if index + 1 < len(self._starts) else self.length_bytes
                piece = buffer[done : done + after - position]
                count = await self._extents.readinto(piece, position)
                if count != len(piece):
                    raise CurvfsError(f"Only {count} of {len(piece)} bytes came at offset {position}.")
            done += len(piece)

    def _places(self, offset_bytes: int, size_bytes: int) -> Iterator[tuple[int, int, int]]:
        """Descriptors, and the ranges in them, of what of a range lies in local blocks."""
        end_bytes = offset_bytes + size_bytes
        for extent in self._local[max(0, bisect_right(self._starts, offset_bytes) - 1) :]:
            start_bytes = max(offset_bytes, extent.file_offset_bytes)
            length_bytes = min(end_bytes, extent.file_offset_bytes + extent.length_bytes) - start_bytes
            if length_bytes > 0:
                yield extent.fd, start_bytes - extent.file_offset_bytes, length_bytes
            elif start_bytes >= end_bytes:
                return

    async def retire(self) -> None:
        """Close as soon as nobody is reading."""
        if not self._retired:
            self._retired = True
            self._users += 1
            await self._let_go()

    async def _let_go(self) -> None:
        self._users -= 1
        if self._retired and self._users == 0:
            with trio.CancelScope(shield=True):
                await self._extents.aclose()


class Readers:
    """Opens readers, and keeps those of sealed objects and of small files open for a while after the last handle is
    gone."""

    def __init__(self, fs: CurvineFileSystem, table: NodeTable) -> None:
        self._fs = fs
        self._table = table
        self._slab = Slab(fs.world.disk)
        #: Nodes whose reader is open though no handle is, oldest first: how many descriptors that has, and since when
        #: it is kept. Each is pinned.
        self._kept: dict[Node, tuple[int, float]] = {}
        self._kept_descriptors = 0

    @property
    def kept(self) -> int:
        """How many readers are kept open for the next open."""
        return len(self._kept)

    async def locate(self, node: Node) -> Located:
        """Where the blocks of a node are now. Raises ESTALE when its name leads to another file, or to none."""
        try:
            located = await self._fs.locate(self._table.path(node))
        except CurvfsError as error:
            if error.errno_ in (errno.ENOENT, errno.ENOTDIR, errno.EISDIR):
                raise stale() from error
            raise
        if located.status.id != node.file_id:
            raise stale()
        return located

    async def fresh(self, node: Node) -> NodeReader:
        """The reader for an open that begins now: what the store has now, whatever was read before."""
        located = await self.locate(node)
        node.checked_s = self._fs.world.clock.monotonic_s()
        reader = node.reader
        if reader is not None and reader.same_as(located) and (node.sealed or self.is_settled(located.status)):
            return reader
        return await self._open(node, located)

    def is_settled(self, status: FileStatus) -> bool:
        """Did the file change so long ago that its times tell it from the next version?"""
        return abs(self._fs.world.clock.time_ms() - max(status.mtime_ms, status.ctime_ms)) > _RACY_MS

    async def get(self, node: Node) -> NodeReader:
        """The reader there is, or a new one."""
        return node.reader if node.reader is not None else await self.fresh(node)

    async def _open(self, node: Node, located: Located) -> NodeReader:
        reader = NodeReader(located, await self._fs.open_extents(located), self._slab, self._fs.world.threads)
        if not node.sealed:
            node.refresh(located.status)
        try:
            while node.reader is not None:
                old, node.reader = node.reader, None
                await old.retire()
        except BaseException:
            await reader.retire()
            raise
        # From here to the caller's first read nobody else has a turn, who could retire it.
        node.reader = reader
        return reader

    async def read(self, node: Node, offset_bytes: int, size_bytes: int) -> bytes | memoryview:
        """Read from the store. A file that grew, or whose blocks were replaced, is looked at again once."""
        reader = await self.get(node)
        if offset_bytes + size_bytes > reader.length_bytes < node.known_size:
            reader = await self.fresh(node)
        found = reader.read_inline(offset_bytes, size_bytes)
        if found is not None:
            return found
        try:
            return await reader.read(offset_bytes, size_bytes)
        except CurvfsError:
            again = await self.fresh(node)
            if again is reader:
                raise
        return await again.read(offset_bytes, size_bytes)

    async def drop(self, node: Node) -> None:
        """The blocks may have changed through this mount: open them anew when they are next read."""
        self._unkeep(node)
        reader, node.reader = node.reader, None
        if reader is not None:
            await reader.retire()

    def _is_worth_keeping(self, node: Node, reader: NodeReader) -> bool:
        small = reader.length_bytes <= _KEPT_ORDINARY_BYTES
        return reader.is_local and bool(node.links) and (node.sealed or small)

    def keeps_now(self, node: Node) -> bool:
        """Is there no reader of a node, or can it be kept for the next open without anything being closed for it?"""
        reader = node.reader
        return reader is None or (
            self._is_worth_keeping(node, reader) and self._kept_descriptors + reader.descriptors < _KEPT_DESCRIPTORS
        )

    def keep(self, node: Node) -> None:
        """Keep a reader, if there is one, though the last handle is gone."""
        reader = node.reader
        if reader is None:
            return
        self._unkeep(node)
        node.pins += 1
        descriptors = max(1, reader.descriptors)
        self._kept[node] = descriptors, self._fs.world.clock.monotonic_s()
        self._kept_descriptors += descriptors

    async def last_handle_gone(self, node: Node) -> None:
        """Keep the reader of a sealed or small file that is local for the next open; let go of any other."""
        reader = node.reader
        if reader is None:
            return
        if not self._is_worth_keeping(node, reader):
            await self.drop(node)
            return
        self.keep(node)
        while self._kept_descriptors > _KEPT_DESCRIPTORS:
            await self._evict(next(iter(self._kept)))

    async def let_go(self) -> None:
        """Close what has been kept for :data:`KEPT_S`."""
        now_s = self._fs.world.clock.monotonic_s()
        while self._kept and now_s - next(iter(self._kept.values()))[1] >= KEPT_S:
            await self._evict(next(iter(self._kept)))

    async def _evict(self, node: Node) -> None:
        self._unkeep(node)
        if node.handles == 0:
            reader, node.reader = node.reader, None
            if reader is not None:
                await reader.retire()
        self._table.drop_unused(node)

    async def forgotten(self, node: Node) -> None:
        """The kernel forgot a node, or its file was removed: no reader is worth keeping for it."""
        if node in self._kept and node.handles == 0:
            await self._evict(node)

    def _unkeep(self, node: Node) -> None:
        kept = self._kept.pop(node, None)
        if kept is not None:
            self._kept_descriptors -= kept[0]
            node.pins -= 1

    async def close(self) -> None:
        for node in list(self._kept):
            await self._evict(node)


def stamp(status: FileStatus) -> tuple[int, int, int]:
    """What tells the bytes of a file from those before. The time of its last change is in it because whoever copies
    with times sets the modification time back."""
    return status.mtime_ms, status.ctime_ms, status.length_bytes


def stale() -> CurvfsError:
    """The name leads to another file than the kernel thinks: it looks the name up again."""
    return CurvfsError("The name leads to another file by now.", errno_=errno.ESTALE)
