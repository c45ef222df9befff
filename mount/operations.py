"""The kernel's requests: thin handlers between pyfuse3 and the rooms that do the work.

No handler may raise anything but ``FUSEError``: one other exception would end the mount for everybody. :func:`_handler`
sees to that: a CurvfsError becomes its errno, a deadline ETIMEDOUT, and what nobody expected is logged with its
traceback and answered EIO.
"""

from __future__ import annotations

import dataclasses
import errno
import functools
import logging
import os
import stat as statmod
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, Concatenate, ParamSpec, TypeVar, cast

import pyfuse3
import trio

from curvfs.api import CurvineFileSystem, FileStatus, FilesystemInfo
from curvfs.errors import CurvfsError, InvalidRequest, TransportError
from mount.attributes import Attributes
from mount.control import FIRST_ID, ControlDirectory
from mount.handles import Handles
from mount.inodes import Node, NodeTable
from mount.listing import DirectoryHandle
from mount.naming import Caller, Naming, decode_name
from mount.opening import Opening
from mount.options import MountOptions
from mount.publish import KernelSide, Publisher
from mount.readers import Readers, stale
from mount.seal import NAMESPACES, is_hidden_xattr, is_system_xattr
from mount.statistics import Statistics

log = logging.getLogger("curvfs.mount")

P = ParamSpec("P")
T = TypeVar("T")

_STATFS_LIFE_S = 1.0
_STATFS_BLOCK_BYTES = 4096
#: Curvine has no limit; this is what its own mount reports.
_MAX_FILES = 0xFFFFFFFF
_NS_PER_MS = 1_000_000
#: Milliseconds that every layer can hold; about the year 287,000.
_MAX_TIME_MS = 2**53
_ROOT_PATIENCE_S = 0.5
#: Entries "." and ".." take the first two offsets of a directory.
_DOTS = 2


class _NotNow:
    """What a quick handler answers when something must be waited for."""


_NOT_NOW = _NotNow()


def _handler(
    method: Callable[Concatenate[Operations, P], Coroutine[Any, Any, T]],
) -> Callable[Concatenate[Operations, P], Coroutine[Any, Any, T]]:
    """Answer a request within its deadline, with a value or an errno. A method ``_NAME_now`` beside ``NAME`` is asked
    first: it waits for nothing, so that neither deadline nor another task is needed."""
    name = method.__name__.lstrip("_")
    quick_name = f"_{name}_now"

    @functools.wraps(method)
    async def guarded(self: Operations, /, *args: P.args, **kwargs: P.kwargs) -> T:
        statistics = self.statistics
        began_s = statistics.clock.monotonic_s()
        statistics.under_way += 1
        number = 0
        try:
            controlled = self.control is not None and bool(args) and self.control.owns(args[0])
            quick = None if controlled else getattr(self, quick_name, None)
            found = _NOT_NOW if quick is None else quick(*args)
            if not isinstance(found, _NotNow):
                return cast("T", found)
            self.pass_on()
            with trio.CancelScope(deadline=trio.current_time() + self.options.op_timeout_s) as scope:
                if controlled:
                    return cast("T", await self._controlled(name)(*args, **kwargs))
                return await method(self, *args, **kwargs)
            assert scope.cancelled_caught
            number = errno.ETIMEDOUT
            log.warning("%s took longer than %g s and was given up.", name, self.options.op_timeout_s)
        except pyfuse3.FUSEError as error:
            number = error.errno
            raise
        except trio.TooSlowError:
            number = errno.ETIMEDOUT
        except Exception as error:
            number = self.errno_of(name, error)
        finally:
            statistics.under_way -= 1
            statistics.finished(name, began_s, number, args)
        raise pyfuse3.FUSEError(number)

    return guarded


class Operations(pyfuse3.Operations):
    """One mounted pool."""

    supports_dot_lookup = False
    enable_writeback_cache = False
    enable_acl = False

    def __init__(
        self,
        fs: CurvineFileSystem,
        table: NodeTable,
        kernel: KernelSide,
        options: MountOptions,
        *,
        on_init: Callable[[], None] = lambda: None,
    ) -> None:
        super().__init__()
        self.options = options
        self.statistics = Statistics(fs.world.clock, options.slow_call_s)
        #: The directory in which the mount tells of itself, once somebody has put it there.
        self.control: ControlDirectory | None = None
        self.table = table
        self.handles = Handles()
        self.readers = Readers(fs, table)
        self.publisher = Publisher(fs, table, self.handles, self.readers, kernel, grace_s=options.grace_s)
        self.naming = Naming(fs, table, self.readers, self.publisher)
        self.opening = Opening(fs, table, self.handles, self.readers, self.publisher, self.statistics)
        #: Called before anything is waited for: another request may be taken meanwhile (:mod:`mount.loop`).
        self.pass_on: Callable[[], None] = lambda: None
        self._fs = fs
        self._clock = fs.world.clock
        self._on_init = on_init
        self._attributes = Attributes(options)
        self._directories: dict[int, DirectoryHandle] = {}
        self._next_directory = 0
        self._statfs: tuple[float, FilesystemInfo] | None = None

    # ------------------------------------------------------------------------------------------------- housekeeping

    def init(self) -> None:
        self._on_init()

    def errno_of(self, name: str, error: Exception) -> int:
        """The errno for whatever a handler ran into. Never ENOSYS, which would switch an operation off for good."""
        if isinstance(error, ExceptionGroup):
            error = _first_known(error) or error
        if isinstance(error, CurvfsError):
            log.debug("%s: %s", name, error)
            number = error.errno_
        else:
            log.error("%s failed in a way that nobody expected.", name, exc_info=error)
            number = errno.EIO
        return errno.EOPNOTSUPP if number == errno.ENOSYS else number or errno.EIO

    def show_control(self, control: ControlDirectory) -> None:
        """Let the root have this directory; whatever comes to that name in the store meanwhile is hidden by it."""
        self.control = control
        self.naming.hidden_name = control.name

    def _controlled(self, name: str) -> Callable[..., Coroutine[Any, Any, Any]]:
        """The method that answers for the directory in which the mount tells of itself; nothing there changes."""
        method = getattr(self.control, name, None)
        if method is None:
            raise pyfuse3.FUSEError(errno.EPERM)
        return cast("Callable[..., Coroutine[Any, Any, Any]]", method)

    def _entry(self, node: Node) -> pyfuse3.EntryAttributes:
        """The attributes of a node for a reply that the kernel counts as one lookup."""
        entry = self._attributes.entry(node)
        self.table.looked_up(node)
        return entry

    @staticmethod
    def _caller(ctx: pyfuse3.RequestContext) -> Caller:
        return Caller(ctx.pid, ctx.uid, ctx.gid)

    def _refuse_control(self, directory_id: int) -> None:
        if self.control is not None and self.control.owns(directory_id):
            raise pyfuse3.FUSEError(errno.EPERM)

    async def forget(self, inode_list: Sequence[tuple[int, int]]) -> None:
        for node_id, count in inode_list:
            self.table.forget(node_id, count)

    # ------------------------------------------------------------------------------------------------------- names

    @_handler
    async def lookup(self, parent_inode: int, name: bytes, ctx: pyfuse3.RequestContext) -> pyfuse3.EntryAttributes:
        if self.control is not None and self.control.is_here(parent_inode, name):
            return self.control.entry(FIRST_ID)
        node = await self.naming.lookup(self.table[parent_inode], decode_name(name), self._caller(ctx))
        return self._entry(node)

    def _lookup_now(
        self, parent_inode: int, name: bytes, ctx: pyfuse3.RequestContext
    ) -> pyfuse3.EntryAttributes | _NotNow:
        node = self.naming.lookup_now(self.table[parent_inode], decode_name(name), self._caller(ctx))
        return _NOT_NOW if node is None else self._entry(node)

    def _create_now(
        self, parent_inode: int, name: bytes, mode: int, flags: int, ctx: pyfuse3.RequestContext
    ) -> tuple[pyfuse3.FileInfo, pyfuse3.EntryAttributes] | _NotNow:
        if flags & os.O_ACCMODE == os.O_RDONLY:
            return _NOT_NOW
        parent = self.table[parent_inode]
        node = self.naming.create_now(parent, decode_name(name), mode & 0o7777, self._caller(ctx))
        if node is None:
            return _NOT_NOW
        handle = self.opening.created(node, flags, self._caller(ctx))
        return pyfuse3.FileInfo(fh=handle.id, keep_cache=False), self._entry(node)

    @_handler
    async def create(
        self, parent_inode: int, name: bytes, mode: int, flags: int, ctx: pyfuse3.RequestContext
    ) -> tuple[pyfuse3.FileInfo, pyfuse3.EntryAttributes]:
        node = await self._create(parent_inode, name, mode, flags, ctx)
        handle = self.opening.created(node, flags, self._caller(ctx))
        try:
            await self.opening.settle_unwritable(handle)
        except BaseException:
            await self.opening.release(handle.id)
            raise
        return pyfuse3.FileInfo(fh=handle.id, keep_cache=False), self._entry(node)

    async def _create(self, parent_inode: int, name: bytes, mode: int, flags: int, ctx: pyfuse3.RequestContext) -> Node:
        return await self.naming.create(
            self.table[parent_inode],
            decode_name(name),
            mode & 0o7777,
            self._caller(ctx),
            exclusive=bool(flags & os.O_EXCL),
            truncate=bool(flags & os.O_TRUNC),
        )

    @_handler
    async def mknod(
        self, parent_inode: int, name: bytes, mode: int, rdev: int, ctx: pyfuse3.RequestContext
    ) -> pyfuse3.EntryAttributes:
        if not statmod.S_ISREG(mode):
            return self._entry(
                await self.naming.mknod(self.table[parent_inode], decode_name(name), mode, rdev, self._caller(ctx))
            )
        node = await self._create(parent_inode, name, mode, os.O_EXCL, ctx)
        handle = self.opening.created(node, os.O_RDONLY, self._caller(ctx))
        try:
            await self.opening.settle_unwritable(handle)
            return self._entry(node)
        finally:
            await self.opening.release(handle.id)

    @_handler
    async def mkdir(
        self, parent_inode: int, name: bytes, mode: int, ctx: pyfuse3.RequestContext
    ) -> pyfuse3.EntryAttributes:
        parent = self.table[parent_inode]
        return self._entry(await self.naming.mkdir(parent, decode_name(name), mode & 0o7777, self._caller(ctx)))

    @_handler
    async def symlink(
        self, parent_inode: int, name: bytes, target: bytes, ctx: pyfuse3.RequestContext
    ) -> pyfuse3.EntryAttributes:
        try:
            text = target.decode()
        except UnicodeDecodeError:
            raise InvalidRequest("The target of the link is not UTF-8.", kind=28, errno_=errno.EILSEQ) from None
        parent = self.table[parent_inode]
        return self._entry(await self.naming.symlink(parent, decode_name(name), text, self._caller(ctx)))

    @_handler
    async def readlink(self, inode: int, ctx: pyfuse3.RequestContext) -> bytes:
        target = self.table[inode].status.symlink_target
        if target is None:
            raise InvalidRequest("This is no symbolic link.", kind=28)
        return target.encode()

    @_handler
    async def unlink(self, parent_inode: int, name: bytes, ctx: pyfuse3.RequestContext) -> None:
        await self.naming.unlink(self.table[parent_inode], decode_name(name))

    @_handler
    async def rmdir(self, parent_inode: int, name: bytes, ctx: pyfuse3.RequestContext) -> None:
        await self.naming.rmdir(self.table[parent_inode], decode_name(name))

    @_handler
    async def rename(
        self,
        parent_inode_old: int,
        name_old: bytes,
        parent_inode_new: int,
        name_new: bytes,
        flags: int,
        ctx: pyfuse3.RequestContext,
    ) -> None:
        self._refuse_control(parent_inode_new)
        if flags not in (0, pyfuse3.RENAME_NOREPLACE, pyfuse3.RENAME_EXCHANGE):
            raise InvalidRequest(f"Rename flags {flags:#x} are not known here.", kind=28)
        await self.naming.rename(
            self.table[parent_inode_old],
            decode_name(name_old),
            self.table[parent_inode_new],
            decode_name(name_new),
            thread_id=ctx.pid,
            replace=flags != pyfuse3.RENAME_NOREPLACE,
            exchange=flags == pyfuse3.RENAME_EXCHANGE,
        )

    @_handler
    async def link(
        self, inode: int, new_parent_inode: int, new_name: bytes, ctx: pyfuse3.RequestContext
    ) -> pyfuse3.EntryAttributes:
        self._refuse_control(new_parent_inode)
        node = self.table[inode]
        return self._entry(await self.naming.link(node, self.table[new_parent_inode], decode_name(new_name)))

    # -------------------------------------------------------------------------------------------------- attributes

    def _getattr_now(self, inode: int, ctx: pyfuse3.RequestContext) -> pyfuse3.EntryAttributes | _NotNow:
        node = self.table[inode]
        return self._attributes.entry(node) if self._knows(node) else _NOT_NOW

    @_handler
    async def getattr(self, inode: int, ctx: pyfuse3.RequestContext) -> pyfuse3.EntryAttributes:
        node = self.table[inode]
        if node is self.table.root and self.control is not None:
            await self._root_status()
        else:
            await self._fresh_status(node)
        return self._attributes.entry(node)

    async def _root_status(self) -> None:
        """The way to the control directory leads over the root, also when the store is silent: then what is known."""
        try:
            with trio.move_on_after(_ROOT_PATIENCE_S):
                await self._fresh_status(self.table.root)
        except TransportError as error:
            log.debug("The root is as it was: %s", error)

    def _knows(self, node: Node) -> bool:
        """Are the attributes here the ones that count, without asking the store?"""
        if node.private is not None or node.away is not None or node.detached or node.is_nameless:
            return True
        if node.writer is not None and node.writer.is_dirty:
            return True
        age_s = self._clock.monotonic_s() - node.checked_s
        if node.status.is_dir:
            return age_s < self.options.directory_timeout_s and self._knows_directory(node)
        return node.sealed and age_s < self.options.sealed_attr_timeout_s

    def _knows_directory(self, node: Node) -> bool:
        """The kernel asks for a directory's attributes after every change in it. Below KV prefixes, where names come
        by the hundred, our own changes are told from here: the time of the last one is now."""
        if self.table.prefix_of(node) is None:
            return False
        if node.changes != node.changes_told:
            node.changes_told = node.changes
            node.status = dataclasses.replace(node.status, mtime_ms=self._clock.time_ms())
        return True

    async def _fresh_status(self, node: Node) -> FileStatus:
        """What the store says now. An open file whose name went to another keeps what was known of it."""
        if node.is_nameless:
            return node.status
        if node.writer is not None:
            await node.writer.settle_attributes()
        try:
            status = await self._fs.stat(self.table.path(node))
        except CurvfsError as error:
            if error.errno_ not in (errno.ENOENT, errno.ENOTDIR, errno.ESTALE):
                raise
            if node.handles == 0:
                raise stale() from error
            return node.status
        if status.id != node.file_id:
            if node.handles == 0:
                raise stale()
            return node.status
        node.refresh(status)
        node.checked_s = self._clock.monotonic_s()
        return status

    @_handler
    async def setattr(
        self,
        inode: int,
        attr: pyfuse3.EntryAttributes,
        fields: pyfuse3.SetattrFields,
        fh: int | None,
        ctx: pyfuse3.RequestContext,
    ) -> pyfuse3.EntryAttributes:
        node = self.table[inode]
        if fields.update_size:
            await self.opening.truncate(node, attr.st_size, fh)
        changes: dict[str, Any] = {}
        if fields.update_mode:
            changes["mode"] = attr.st_mode & 0o7777
        if fields.update_uid:
            changes["owner"] = str(attr.st_uid)
        if fields.update_gid:
            changes["group"] = str(attr.st_gid)
        if fields.update_atime:
            changes["atime_ms"] = _time_ms(attr.st_atime_ns)
        if fields.update_mtime:
            changes["mtime_ms"] = _time_ms(attr.st_mtime_ns)
            await self.opening.settle_times(node)
        if changes:
            await self._set_attr(node, **changes)
        return self._attributes.entry(node)

    async def _set_attr(self, node: Node, **changes: Any) -> None:
        """Change attributes in the store. Those of a file that was removed are nobody's but its open handles'."""
        if node.is_nameless and node.nlink == 0:
            removed = changes.pop("remove_xattrs", ())
            xattrs = {**node.status.xattrs, **changes.pop("xattrs", {})}
            changes["xattrs"] = {name: value for name, value in xattrs.items() if name not in removed}
            node.refresh(dataclasses.replace(node.status, ctime_ms=self._clock.time_ms(), **changes))
        else:
            if node.writer is not None:
                await node.writer.settle_attributes()
            node.refresh(await self._fs.set_attr(self.table.path(node), **changes))

    @_handler
    async def statfs(self, ctx: pyfuse3.RequestContext) -> pyfuse3.StatvfsData:
        now_s = self._clock.monotonic_s()
        if self._statfs is None or now_s - self._statfs[0] > _STATFS_LIFE_S:
            self._statfs = now_s, await self._fs.statfs()
        info = self._statfs[1]
        stats = pyfuse3.StatvfsData()
        stats.f_bsize = stats.f_frsize = _STATFS_BLOCK_BYTES
        stats.f_blocks = info.capacity_bytes // _STATFS_BLOCK_BYTES
        free = max(0, min(info.available_bytes // _STATFS_BLOCK_BYTES, stats.f_blocks))
        stats.f_bfree = stats.f_bavail = free
        stats.f_files = _MAX_FILES
        stats.f_ffree = stats.f_favail = max(0, _MAX_FILES - info.files - info.directories)
        stats.f_namemax = 255
        return stats

    def _getxattr_now(self, inode: int, name: bytes, ctx: pyfuse3.RequestContext) -> bytes | _NotNow:
        # The kernel asks for security.capability before every write: answered from here.
        text = _xattr_name(name)
        self.table[inode]
        if is_hidden_xattr(text):
            raise pyfuse3.FUSEError(pyfuse3.ENOATTR)
        _refuse_foreign(text)
        return _NOT_NOW

    @_handler
    async def getxattr(self, inode: int, name: bytes, ctx: pyfuse3.RequestContext) -> bytes:
        text = _xattr_name(name)
        node = self.table[inode]
        value = (await self._fresh_status(node)).xattrs.get(text)
        if value is None:
            raise pyfuse3.FUSEError(pyfuse3.ENOATTR)
        return value

    @_handler
    async def setxattr(self, inode: int, name: bytes, value: bytes, ctx: pyfuse3.RequestContext) -> None:
        text = _xattr_name(name)
        node = self.table[inode]
        _refuse_hidden(text)
        await self._set_attr(node, xattrs={text: value})

    @_handler
    async def listxattr(self, inode: int, ctx: pyfuse3.RequestContext) -> list[bytes]:
        status = await self._fresh_status(self.table[inode])
        return [name.encode() for name in sorted(status.xattrs) if not is_hidden_xattr(name)]

    @_handler
    async def removexattr(self, inode: int, name: bytes, ctx: pyfuse3.RequestContext) -> None:
        text = _xattr_name(name)
        node = self.table[inode]
        if is_hidden_xattr(text):
            raise pyfuse3.FUSEError(pyfuse3.ENOATTR)
        _refuse_foreign(text)
        if text not in (await self._fresh_status(node)).xattrs:
            raise pyfuse3.FUSEError(pyfuse3.ENOATTR)
        await self._set_attr(node, remove_xattrs=[text])

    # -------------------------------------------------------------------------------------------------------- files

    @_handler
    async def open(self, inode: int, flags: int, ctx: pyfuse3.RequestContext) -> pyfuse3.FileInfo:
        handle, keep_cache = await self.opening.open(self.table[inode], flags, self._caller(ctx))
        return pyfuse3.FileInfo(fh=handle.id, keep_cache=keep_cache)

    async def read(self, fh: int, off: int, size: int) -> bytes:
        statistics = self.statistics
        began_s = statistics.clock.monotonic_s()
        try:
            if self.control is not None and self.control.is_open(fh):
                return self.control.read(fh, off, size)
            found = self.opening.read_inline(fh, off, size)
        except Exception as error:
            number = self.errno_of("read", error)
            statistics.finished("read", began_s, number, (fh, off, size))
            raise pyfuse3.FUSEError(number) from None
        if found is not None:
            statistics.reads["page_cache"] += 1
            statistics.read_bytes += len(found)
            statistics.finished("read", began_s, 0)
            return cast("bytes", found)  # any buffer will do, and nothing is awaited before it is sent
        return await self._read(fh, off, size)

    @_handler
    async def _read(self, fh: int, off: int, size: int) -> bytes:
        found = await self.opening.read(fh, off, size)
        self.statistics.read_bytes += len(found)
        return cast("bytes", found)

    def _write_now(self, fh: int, off: int, buf: bytes) -> int | _NotNow:
        if not self.opening.write_now(fh, off, buf):
            return _NOT_NOW
        self.statistics.written_bytes += len(buf)
        return len(buf)

    @_handler
    async def write(self, fh: int, off: int, buf: bytes) -> int:
        count = await self.opening.write(fh, off, buf)
        self.statistics.written_bytes += count
        return count

    def _flush_now(self, fh: int) -> _NotNow | None:
        if self._is_control(fh) or not self.opening.has_to_flush(fh):
            return None
        return _NOT_NOW

    @_handler
    async def flush(self, fh: int) -> None:
        await self.opening.flush(fh)

    def _is_control(self, fh: int) -> bool:
        return self.control is not None and self.control.is_open(fh)

    @_handler
    async def fsync(self, fh: int, datasync: bool) -> None:
        await self.opening.fsync(fh)

    def _release_now(self, fh: int) -> _NotNow | None:
        if self.control is not None and self.control.is_open(fh):
            self.control.release(fh)
            return None
        return None if self.opening.release_now(fh) else _NOT_NOW

    @_handler
    async def release(self, fh: int) -> None:
        await self.opening.release(fh)

    # -------------------------------------------------------------------------------------------------- directories

    @_handler
    async def opendir(self, inode: int, ctx: pyfuse3.RequestContext) -> int:
        node = self.table[inode]
        node.handles += 1
        self._next_directory += 1
        self._directories[self._next_directory] = DirectoryHandle(
            self._fs, self.table, self.naming, self.publisher, node
        )
        return self._next_directory

    @_handler
    async def readdir(self, fh: int, start_id: int, token: pyfuse3.ReaddirToken) -> None:
        handle = self._directory(fh)
        directory = handle.directory
        dots = ((b".", directory), (b"..", directory.place[0] if directory.place else directory))
        for index, (name, node) in enumerate(dots, start=1):
            if start_id < index and not pyfuse3.readdir_reply(token, name, self._attributes.entry(node), index):
                return
        await handle.seek(max(0, start_id - _DOTS))
        while (listed := await handle.peek()) is not None:
            entry = self._attributes.entry(listed.node)
            if not pyfuse3.readdir_reply(token, listed.name.encode(), entry, listed.next_offset + _DOTS):
                self.table.drop_unused(listed.node)
                return
            self.table.looked_up(listed.node)
            handle.take(listed)

    @_handler
    async def releasedir(self, fh: int) -> None:
        directory = self._directory(fh).directory
        del self._directories[fh]
        directory.handles -= 1
        self.table.drop_unused(directory)

    @_handler
    async def fsyncdir(self, fh: int, datasync: bool) -> None:
        """Names are the master's as soon as it has answered."""

    def _directory(self, fh: int) -> DirectoryHandle:
        handle = self._directories.get(fh)
        if handle is None:
            raise CurvfsError(f"There is no open directory {fh}.", errno_=errno.EBADF)
        return handle


def _first_known(group: BaseExceptionGroup[Any]) -> CurvfsError | None:
    """The CurvfsError in a group of exceptions."""
    for error in group.exceptions:
        found = _first_known(error) if isinstance(error, BaseExceptionGroup) else error
        if isinstance(found, CurvfsError):
            return found
    return None


def _time_ms(time_ns: int) -> int:
    milliseconds = time_ns // _NS_PER_MS
    if abs(milliseconds) > _MAX_TIME_MS:
        raise InvalidRequest("The time lies outside of what can be stored.", kind=28, errno_=errno.EOVERFLOW)
    return milliseconds


def _xattr_name(name: bytes) -> str:
    try:
        return name.decode()
    except UnicodeDecodeError:
        raise InvalidRequest("The name of the attribute is not UTF-8.", kind=28, errno_=errno.EILSEQ) from None


def _refuse_hidden(name: str) -> None:
    if is_hidden_xattr(name):
        raise CurvfsError(f"{name} cannot be set here.", errno_=errno.EOPNOTSUPP)
    _refuse_foreign(name)


def _refuse_foreign(name: str) -> None:
    """Attributes have a name in one of the name spaces that are kept here."""
    if is_system_xattr(name):
        raise CurvfsError(f"{name} is not supported here.", errno_=errno.EOPNOTSUPP)
    if not name.startswith(NAMESPACES):
        raise CurvfsError(f"{name} lies in no name space: {', '.join(NAMESPACES)}.", errno_=errno.EOPNOTSUPP)
    if name in NAMESPACES:
        raise InvalidRequest(f"{name} is a name space without a name.", kind=28)
