"""Open files, as the kernel asks for them and as KV prefixes want them: open, read, write, flush, release, truncate.

Works on nodes and handles; knows nothing of pyfuse3. Errors are CurvfsErrors, whose errno the kernel gets. ESTALE from
:meth:`Opening.open` makes the kernel look the name up again, once, and open what it finds.
"""

from __future__ import annotations

import errno
import logging
import os
import stat
from typing import Any

import trio

from curvfs.api import CurvineFileSystem
from curvfs.errors import CurvfsError, InvalidRequest
from mount.handles import FileHandle, Handles, NodeWriter
from mount.inodes import Node, NodeTable
from mount.naming import Caller, permission
from mount.private import Place
from mount.publish import Publisher
from mount.readers import Readers, stale, stamp
from mount.statistics import Statistics

log = logging.getLogger("curvfs.mount")

#: How long an open for write of a sealed object is remembered as refused once: the second time it is EPERM.
_SECOND_CHANCE_S = 1.0


class Opening:
    """The open files of one mount."""

    def __init__(
        self,
        fs: CurvineFileSystem,
        table: NodeTable,
        handles: Handles,
        readers: Readers,
        publisher: Publisher,
        statistics: Statistics,
    ) -> None:
        self._fs = fs
        self._clock = fs.world.clock
        self._table = table
        self._handles = handles
        self._readers = readers
        self._publisher = publisher
        self._statistics = statistics
        #: (thread, node id) -> when an open for write was answered ESTALE.
        self._refused: dict[tuple[int, int], float] = {}

    # ------------------------------------------------------------------------------------------------------- open

    async def open(self, node: Node, flags: int, caller: Caller) -> tuple[FileHandle, bool]:
        """Open a file; the handle, and whether the kernel's cached pages of it are still good."""
        if not node.status.is_file:
            raise InvalidRequest("Only regular files can be opened here.", kind=28, errno_=errno.EOPNOTSUPP)
        access = flags & os.O_ACCMODE
        writable = access != os.O_RDONLY
        readable = access != os.O_WRONLY
        truncate = bool(flags & os.O_TRUNC)
        self._table.judge(node)
        if truncate and (node.sealed or node.detached):
            await self._begin_anew(node, caller)
        if node.sealed and (writable or truncate):
            self._refuse_sealed(node, caller)
        if node.detached:
            raise stale()
        private = node.private
        if private is not None and private.reserved_for is not None:
            if private.reserved_for != caller.thread_id:
                raise stale()
            private.reserved_for = None
            private.place[0].changes += 1
            self._publisher.supersede(private)
        elif truncate and self._in_prefix(node):
            place = private.place if private is not None else node.place
            assert place is not None
            await self._fresh_private(node, caller, place)
            raise stale()
        elif truncate:
            await self._drop_setid(node, caller)
            await self._writer(node).truncate(0)
        handle = self._handles.open(node, readable=readable, writable=writable)
        if private is not None:
            private.closed_s = None
            if writable:
                private.openers.add(caller.thread_id)
        try:
            keep = await self._prepare(node, readable, truncate)
            if readable:
                self._statistics.opens["kept" if keep else "dropped"] += 1
            return handle, keep
        except BaseException:
            await self._closed(self._handles.close(handle.id))
            raise

    async def _prepare(self, node: Node, readable: bool, truncated: bool) -> bool:
        """Open the blocks if they will be read; whether the kernel may keep the pages it has."""
        if node.private is not None:
            return not truncated
        if not readable or (node.writer is not None and node.writer.is_open):
            return False
        if node.place is not None:
            # A rename that began before we had the file open does not know that its blocks will be read.
            await self._publisher.locks.wait_free(node.place)
        reader = await self._readers.fresh(node)
        if node.sealed:
            return True
        status = reader.located.status
        found = stamp(status)
        keep = node.known_stamp == found
        node.known_stamp = found if self._readers.is_settled(status) else None
        return keep

    async def _begin_anew(self, node: Node, caller: Caller) -> None:
        """A file was published between a thread's lookup of its staging name and the open: have one of its own ready
        there when it looks that name up again, for it is asked to only once."""
        place = self._publisher.place_before(node)
        if place is not None and (caller.thread_id, node.id) not in self._refused:
            await self._fresh_private(node, caller, place)

    def _refuse_sealed(self, node: Node, caller: Caller) -> None:
        """Published objects are not written. The first time a thread hears ESTALE: it may have looked the name up
        before somebody else's rename put this object there."""
        now_s = self._clock.monotonic_s()
        key = caller.thread_id, node.id
        for old in [old for old, when_s in self._refused.items() if now_s - when_s > _SECOND_CHANCE_S]:
            del self._refused[old]
        if self._refused.pop(key, None) is None:
            self._refused[key] = now_s
            raise stale()
        raise permission("A published object is not written to; write a new file and rename it here.")

    async def _drop_setid(self, node: Node, caller: Caller) -> None:
        """The kernel leaves to us what goes with a truncating open, as it sees to it with every other write."""
        mode = _written_by(caller, node.status.mode)
        if mode != node.status.mode:
            node.refresh(await self._fs.set_attr(self._table.path(node), mode=mode))

    def _in_prefix(self, node: Node) -> bool:
        place = node.private.place if node.private is not None else node.place
        return place is not None and self._table.prefix_of(place[0]) is not None

    async def _fresh_private(self, node: Node, caller: Caller, place: Place) -> None:
        """A truncating open of a file below a KV prefix that is not sealed, or was not when it was looked up: a new
        file under the same name, for this thread."""
        status = node.status
        mode = _written_by(caller, status.mode)
        like: dict[str, Any] = {"mode": mode, "owner": status.owner, "group": status.group}
        made = self._publisher.make_now(*place, **like, reserved_for=caller.thread_id)
        if made is None:
            made = await self._publisher.make(*place, **like, reserved_for=caller.thread_id)
        if node.private is None and node.place == place:
            made.supersedes = status

    def created(self, node: Node, flags: int, caller: Caller) -> FileHandle:
        """The handle of a file that :meth:`Naming.create` has just made or found."""
        access = flags & os.O_ACCMODE
        writable = access != os.O_RDONLY
        if node.private is not None:
            node.private.closed_s = None
            if writable:
                node.private.openers.add(caller.thread_id)
        return self._handles.open(node, readable=access != os.O_WRONLY, writable=writable)

    async def settle_unwritable(self, handle: FileHandle) -> None:
        """A file created by an open for reading only has nobody to complete it: do it now."""
        if not handle.writable and handle.node.writer is not None and handle.node.writers == 0:
            await handle.node.writer.publish(close=True)

    def _writer(self, node: Node) -> NodeWriter:
        if node.writer is None:
            node.writer = NodeWriter(self._fs, self._table, self._readers, node)
        return node.writer

    # ------------------------------------------------------------------------------------------------------- data

    def read_inline(self, handle_id: int, offset_bytes: int, size_bytes: int) -> memoryview | None:
        """The bytes, when they can be had at once; valid until the next call."""
        node = self._handles[handle_id].node
        if node.reader is None or (node.writer is not None and node.writer.is_open):
            return None
        if offset_bytes + size_bytes > node.reader.length_bytes < node.known_size:
            return None
        return node.reader.read_inline(offset_bytes, size_bytes)

    async def read(self, handle_id: int, offset_bytes: int, size_bytes: int) -> bytes | memoryview:
        """Less than asked only at the end of the file."""
        node = self._handles[handle_id].node
        if node.writer is not None:
            found = await node.writer.read(offset_bytes, size_bytes)
            if found is not None:
                self._statistics.reads["writer"] += 1
                return found
        self._statistics.reads["store"] += 1
        return await self._readers.read(node, offset_bytes, size_bytes)

    def write_now(self, handle_id: int, offset_bytes: int, data: bytes) -> bool:
        """:meth:`write`, if nothing has to be waited for."""
        handle = self._handles[handle_id]
        writer = handle.node.writer
        if handle.node.detached or writer is None or not writer.write_now(data, offset_bytes):
            return False
        handle.unflushed = True
        return True

    async def write(self, handle_id: int, offset_bytes: int, data: bytes) -> int:
        """Always the whole of ``data``."""
        handle = self._handles[handle_id]
        node = handle.node
        if node.detached:
            raise permission("This descriptor was open while its file was published; the object is sealed now.")
        handle.unflushed = True
        return await self._writer(node).write(data, offset_bytes)

    def has_to_flush(self, handle_id: int) -> bool:
        """Can there be anything that a close(2) through this handle has to bring about, or to report?"""
        handle = self._handles[handle_id]
        node = handle.node
        return handle.writable and node.writer is not None and (node.writer.is_dirty or not node.detached)

    async def flush(self, handle_id: int) -> None:
        """A close(2): report what failed, and let everybody see what was written."""
        handle = self._handles[handle_id]
        writer = handle.node.writer
        if self.has_to_flush(handle_id) and writer is not None:
            private = handle.node.private
            if private is None:
                await writer.publish(close=True)
            else:
                await writer.deliver()
                private.was_flushed |= handle.unflushed
            handle.unflushed = False

    async def fsync(self, handle_id: int) -> None:
        handle = self._handles[handle_id]
        writer = handle.node.writer
        if writer is not None and (writer.is_dirty or not handle.node.detached):
            await writer.publish(close=False)
            handle.unflushed = False
            if handle.node.private is not None:
                handle.node.private.was_synced = True

    def release_now(self, handle_id: int) -> bool:
        """:meth:`release`, if nothing has to be waited for."""
        handle = self._handles[handle_id]
        node, writer = handle.node, handle.node.writer
        last_writer = handle.writable and node.writers == 1 and writer is not None
        if last_writer and writer is not None and not (writer.is_idle or (node.private and writer.is_closing)):
            return False
        last = node.handles == 1
        if last and ((node.away is not None and node.private is None) or not self._readers.keeps_now(node)):
            return False
        self._handles.close(handle_id)
        self._book_close(handle)
        if last_writer and node.private is None:
            node.writer = None
        if last:
            self._readers.keep(node)
        self._table.drop_unused(node)
        return True

    async def release(self, handle_id: int) -> None:
        """The last descriptor of a handle is gone. What a rename looks at is booked before anything is awaited."""
        await self._closed(self._handles.close(handle_id))

    def _book_close(self, handle: FileHandle) -> None:
        private = handle.node.private
        if private is not None:
            if handle.node.handles == 0:
                private.closed_s = self._clock.monotonic_s()
            if handle.writable:
                private.released.set()
                private.released = type(private.released)()

    async def _closed(self, handle: FileHandle) -> None:
        node = handle.node
        self._book_close(handle)
        try:
            if handle.writable and node.writers == 0 and node.writer is not None:
                await self._last_writer_gone(node)
            if node.handles == 0:
                if node.away is not None and node.private is None:
                    await self._publisher.delete_away(node)
                else:
                    await self._readers.last_handle_gone(node)
        finally:
            self._table.drop_unused(node)

    async def _last_writer_gone(self, node: Node) -> None:
        writer = node.writer
        assert writer is not None
        try:
            await writer.publish(close=True)
        except CurvfsError as error:
            # Whoever wrote was told: by write, by flush, or by fsync.
            log.warning("%r was closed with an error: %s", node, error)
        finally:
            if writer.is_open:  # what could not be published within its time is given up
                with trio.CancelScope(shield=True):
                    await writer.discard()
            if node.private is None and node.writers == 0 and node.writer is writer:
                node.writer = None

    # ------------------------------------------------------------------------------------------------------- size

    async def truncate(self, node: Node, length_bytes: int, handle_id: int | None) -> None:
        """truncate(2), or ftruncate(2) through a handle."""
        self._table.judge(node)
        if node.sealed or node.detached:
            raise permission("A published object keeps its length.")
        if not node.status.is_file:
            raise InvalidRequest("Only regular files have a length that can be set.", kind=28)
        if handle_id is not None:
            self._handles[handle_id].unflushed = True
        await self._writer(node).truncate(length_bytes)
        if node.handles == 0 and node.private is None:
            node.writer = None

    async def settle_times(self, node: Node) -> None:
        """Times are about to be set: publish first, because publishing sets the modification time."""
        if node.writer is not None and not node.detached:
            await node.writer.publish(close=True)


def _written_by(caller: Caller, mode: int) -> int:
    """A file's mode after somebody has written to it: setuid and setgid go, unless that was root."""
    if caller.uid == 0:
        return mode
    return mode & ~(stat.S_ISUID | (stat.S_ISGID if mode & stat.S_IXGRP else 0))
