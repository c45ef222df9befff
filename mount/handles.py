"""Open files: the writer that all handles of a file share, and the handles.

What one descriptor writes, another reads at once: reads of a file with an open writer go through the writer, without
anything being published in between.
"""

from __future__ import annotations

import errno
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import trio

from curvfs.api import CurvineFileSystem, FileWriter
from curvfs.errors import CurvfsError, FileTooLarge
from curvfs.quicklock import QuickLock
from curvfs.units import KIB, MIB, PIB
from mount.inodes import Node, NodeTable
from mount.readers import MAX_REQUEST_BYTES, Readers
from mount.seal import is_sealed

MAX_FILE_BYTES = PIB
#: How much of a file may be taken and not yet written: the request that goes to the disk, and the next one.
BEHIND_BYTES = 2 * MIB
#: A file of at most so many bytes is written in one exchange; and so many may be held back for that in one mount.
SMALL_BYTES = 64 * KIB
HELD_BYTES = 16 * MIB


class NodeWriter:
    """The one writer that all handles of a file share. The store's writer behind it is opened at the first write.

    Writes are taken at once and done behind, in order, at most :data:`BEHIND_BYTES` of them, so that the kernel brings
    the next bytes while the last ones go to the disk, and small ones that follow each other become one. Everything
    else waits for them. The first bytes of a new file are held back until there are more than few of them, or somebody
    wants them: a small file goes to the store whole, in one exchange, when it is flushed. ``failed`` keeps the first
    error: bytes that had been taken may be lost with it, so that every later write, flush and sync through this node
    reports it, and a private file with it is never published.
    """

    def __init__(self, fs: CurvineFileSystem, table: NodeTable, readers: Readers, node: Node) -> None:
        self._fs = fs
        self._table = table
        self._readers = readers
        self._node = node
        self._stream: FileWriter | None = None
        self._lock = QuickLock()
        #: The bytes of a new file that were taken and that nothing has been done with yet.
        self._held = bytearray()
        self._behind: deque[tuple[int, bytes]] = deque()
        self._behind_bytes = 0
        #: With what is behind.
        self._length = 0
        self._at_work = False
        #: The work is that of :meth:`deliver`.
        self._closing = False
        self._work_scope = trio.CancelScope()
        #: Set, and replaced, whenever some of it is done.
        self._progress = trio.Event()
        self.is_dirty = False
        self.failed: CurvfsError | None = None

    def adopt(self, stream: FileWriter) -> None:
        """Take over the writer of a file that has just been created."""
        self._stream = stream

    @property
    def is_open(self) -> bool:
        return self._stream is not None

    async def settle_attributes(self) -> None:
        """See to it that the store's attributes are the file's own, before they are asked for or changed."""
        stream = self._stream
        if stream is not None and stream.has_attributes:
            async with self._lock:
                await self._closed()
                if not stream.closed:
                    self._node.refresh(await stream.settle_attributes())

    @property
    def is_idle(self) -> bool:
        """Nothing is open, and nothing that was taken can be lost or has to be reported."""
        return self._stream is None and self.failed is None and not (self._behind or self._lock.locked())

    @property
    def is_closing(self) -> bool:
        """What :meth:`deliver` left to be done is under way."""
        return self._closing

    def write_now(self, data: bytes, offset_bytes: int) -> bool:
        """:meth:`write`, if nothing has to be waited for: the bytes are held back."""
        stream = self._stream
        return (
            stream is not None
            and self.failed is None
            and not self._lock.locked()
            and self._hold(stream, data, offset_bytes)
        )

    async def write(self, data: bytes, offset_bytes: int) -> int:
        """Take all of ``data``; a failure is reported here, or by whatever comes next."""
        if offset_bytes + len(data) > MAX_FILE_BYTES:
            raise FileTooLarge("A file cannot be longer than 1 PiB.", kind=9)
        async with self._lock:
            await self._closed()
            self._check()
            stream = self._stream
            if stream is None:
                stream = self._stream = await self._fs.open_for_write(self._table.path(self._node))
            if self._hold(stream, data, offset_bytes):
                return len(data)
            self._release_held()
            if not self._at_work:
                self._length = stream.length_bytes
            await self._wait(lambda: self._behind_bytes == 0 or self._behind_bytes + len(data) <= BEHIND_BYTES)
            self._check()
            self.is_dirty = True
            self._append(stream, data, offset_bytes)
        return len(data)

    def _append(self, stream: FileWriter, data: bytes, offset_bytes: int) -> None:
        self._behind.append((offset_bytes, data))
        self._behind_bytes += len(data)
        self._length = max(self._length, offset_bytes + len(data))
        self._sized(self._length)
        if not self._at_work:
            self._at_work = True
            # Not below the request that brings it: that one has been answered by then.
            trio.lowlevel.spawn_system_task(self._work, stream)

    def _hold(self, stream: FileWriter, data: bytes, offset_bytes: int) -> bool:
        """Hold bytes back, if they are the next of a new file that is small as yet."""
        table, held = self._table, self._held
        if (
            self._at_work
            or offset_bytes != len(held)
            or len(held) + len(data) > SMALL_BYTES
            or table.held_bytes + len(data) > HELD_BYTES
            or not stream.takes_whole
        ):
            return False
        held += data
        table.held_bytes += len(data)
        self.is_dirty = True
        self._sized(len(held))
        return True

    def _take_held(self) -> bytearray:
        held, self._held = self._held, bytearray()
        self._table.held_bytes -= len(held)
        return held

    def _release_held(self) -> None:
        """The file is not that small, or not written like that: go on as with any other."""
        if self._held:
            assert self._stream is not None
            self._length = 0
            self._append(self._stream, bytes(self._take_held()), 0)

    async def _work(self, stream: FileWriter) -> None:
        """Do the writes that were taken, or close what was delivered."""
        try:
            with trio.CancelScope() as self._work_scope:
                while self._behind and self.failed is None:
                    offset_bytes, data = self._next_behind()
                    await stream.write_at(data, offset_bytes)
                    self._behind_bytes -= len(data)
                    self._tell_progress()
                if self._closing:
                    await self._close(stream)
            if self._work_scope.cancelled_caught:
                self._fail(trio.TooSlowError())
        except BaseException as error:
            self._fail(error)
            if self._closing:  # nobody is waiting who would give it up
                await stream.abort()
                self._stream = None
            if isinstance(error, trio.Cancelled):
                raise
        finally:
            self._behind.clear()
            self._behind_bytes = 0
            self._at_work = self._closing = False
            self._tell_progress()

    async def _close(self, stream: FileWriter) -> None:
        await stream.close()
        self._stream = None
        self.is_dirty = False
        self._sized(stream.length_bytes)
        await self._readers.drop(self._node)

    def _next_behind(self) -> tuple[int, bytes]:
        """The oldest write, with those that follow it without a gap, up to a request's size."""
        offset_bytes, data = self._behind.popleft()
        if not self._behind or len(data) >= MAX_REQUEST_BYTES:
            return offset_bytes, data
        pieces, size_bytes = [data], len(data)
        while self._behind and self._behind[0][0] == offset_bytes + size_bytes:
            if size_bytes + len(self._behind[0][1]) > MAX_REQUEST_BYTES:
                break
            pieces.append(self._behind.popleft()[1])
            size_bytes += len(pieces[-1])
        return offset_bytes, b"".join(pieces)

    def _tell_progress(self) -> None:
        self._progress.set()
        self._progress = trio.Event()

    async def _wait(self, done: Callable[[], bool]) -> None:
        """Wait for the writes behind. Whoever gives up waiting for them must not count on the file."""
        try:
            while self._at_work and not done():
                await self._progress.wait()
        except BaseException as error:
            self._fail(error)
            raise

    async def _closed(self) -> None:
        """Wait for what :meth:`deliver` left to be done."""
        if self._closing:
            await self._wait(lambda: False)

    async def _catch_up(self) -> None:
        self._release_held()
        await self._wait(lambda: False)

    async def deliver(self) -> None:
        """:meth:`publish` with ``close``, for a file that nobody else can see yet: a small one is closed behind, once
        its workers have all its bytes. Whatever comes next waits for that, and reports what it failed with."""
        if not self._held or self._lock.locked():
            await self.publish(close=True)
            return
        async with self._lock:
            self._check()
            stream = self._stream
            assert stream is not None
            try:
                await stream.write_whole(self._take_held())
            except BaseException as error:
                self._fail(error)
                raise
            self._at_work = self._closing = True
            trio.lowlevel.spawn_system_task(self._work, stream)

    async def publish(self, *, close: bool) -> None:
        """Make what was written visible to everybody; ``close`` also lets go of the store's writer."""
        async with self._lock:
            held = self._take_held()
            await self._catch_up()
            stream = self._stream
            if stream is not None and (self.is_dirty or close):
                try:
                    if self.is_dirty:
                        await self._refuse_published()
                    if held:
                        await stream.write_whole(held)
                    if close:
                        await self._close(stream)
                    else:
                        await stream.flush()
                        self.is_dirty = False
                        self._sized(stream.length_bytes)
                        await self._readers.drop(self._node)
                except BaseException as error:
                    self._fail(error)
                    raise
            self._check()

    async def _refuse_published(self) -> None:
        """What was written in place below a KV prefix must not reach the store when the file has been published under
        another name meanwhile, through another mount. Raises EPERM then, or NotFound."""
        node, place = self._node, self._node.place
        if node.private is not None or node.away is not None:
            return
        if not node.detached and place is not None and self._table.prefix_of(place[0]) is not None:
            status = await self._fs.stat(self._table.path_of(*place))
            if status.id == node.file_id and not is_sealed(status.xattrs, place[0].file_id, place[1]):
                return
        elif not node.detached:
            return
        message = "The file was published while this descriptor was open; it is sealed now."
        raise CurvfsError(message, errno_=errno.EPERM)

    async def truncate(self, length_bytes: int) -> None:
        """Cut or extend the file."""
        async with self._lock:
            await self._catch_up()
            self._check()
            stream = self._stream
            if stream is None:
                path = self._table.path(self._node)
                self._node.refresh(await self._fs.truncate(path, length_bytes))
            else:
                self.is_dirty = True
                try:
                    await stream.truncate(length_bytes)
                except BaseException as error:
                    self._fail(error)
                    raise
                self._sized(length_bytes)
            await self._readers.drop(self._node)

    async def read(self, offset_bytes: int, size_bytes: int) -> bytes | None:
        """Bytes as written so far; None when no store's writer is open: then the store has them all."""
        async with self._lock:
            if self._held:
                return bytes(self._held[offset_bytes : offset_bytes + size_bytes])
            await self._catch_up()
            stream = self._stream
            if stream is None:
                return None
            size_bytes = min(size_bytes, stream.length_bytes - offset_bytes)
            return await stream.read_at(offset_bytes, size_bytes) if size_bytes > 0 else b""

    async def discard(self) -> None:
        """Drop what was not published, writes under way with it. Never raises a CurvfsError."""
        self._behind.clear()
        self._work_scope.cancel()
        async with self._lock:
            self._take_held()
            await self._catch_up()
            stream, self._stream = self._stream, None
            self.is_dirty = False
            if stream is not None:
                await stream.abort()

    def _check(self) -> None:
        if self.failed is not None:
            raise CurvfsError(
                f"An earlier write to this file failed ({self.failed}); close it and write it again.",
                errno_=self.failed.errno_,
            )

    def _fail(self, error: BaseException) -> None:
        if self.failed is None:
            cut_off = CurvfsError("it took too long and was cut off", errno_=errno.ETIMEDOUT)
            self.failed = error if isinstance(error, CurvfsError) else cut_off

    def _sized(self, length_bytes: int) -> None:
        self._node.written = length_bytes, self._fs.world.clock.time_ms()


@dataclass(slots=True, eq=False)
class FileHandle:
    """One open file description of some process. ``unflushed``: written through it since its last flush or sync."""

    id: int
    node: Node
    readable: bool
    writable: bool
    unflushed: bool = False


class Handles:
    """Open file descriptions by the number that the kernel knows."""

    def __init__(self) -> None:
        self._by_id: dict[int, FileHandle] = {}
        self._next = 0

    def __len__(self) -> int:
        return len(self._by_id)

    def __getitem__(self, handle_id: int) -> FileHandle:
        handle = self._by_id.get(handle_id)
        if handle is None:
            raise CurvfsError(f"There is no open file {handle_id}.", errno_=errno.EBADF)
        return handle

    def open(self, node: Node, *, readable: bool, writable: bool) -> FileHandle:
        self._next += 1
        handle = FileHandle(self._next, node, readable, writable)
        self._by_id[handle.id] = handle
        node.handles += 1
        node.writers += writable
        return handle

    def close(self, handle_id: int) -> FileHandle:
        handle = self[handle_id]
        del self._by_id[handle_id]
        handle.node.handles -= 1
        handle.node.writers -= handle.writable
        return handle

    def all(self) -> list[FileHandle]:
        return list(self._by_id.values())

    def of(self, node: Node) -> list[FileHandle]:
        if node.handles == 0:
            return []
        return [handle for handle in self._by_id.values() if handle.node is node]
