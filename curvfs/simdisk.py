"""The disk of a simulated process: descriptors over the machine's :class:`~curvfs.simfs.FileTree`.

Calls answer with the errnos of Linux, and meet the faults of the plan: EIO, ENOSPC, short reads and writes, slowness,
bit rot. Descriptors and locks go with the process. What is not there: permissions (everything is root's), sparse-file
calls, and waiting for a lock (nobody could release it meanwhile: EDEADLK).
"""

from __future__ import annotations

import ctypes
import errno
import os
import stat
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from curvfs.buffers import bytes_of
from curvfs.simcore import EPOCH_MS, SimProcess
from curvfs.simfs import SECTOR_BYTES, FileTree, Inode, fail
from curvfs.world import NO_LINKS, DirectIo, Disk

#: Simulated descriptors start here, where no real one is: mixing them up fails at once.
_FIRST_FD = 1 << 20

_RWF_NOWAIT = 8


@dataclass(eq=False, slots=True)
class _OpenFile:
    inode: Inode
    flags: int
    path: str

    @property
    def readable(self) -> bool:
        return self.flags & os.O_ACCMODE != os.O_WRONLY

    @property
    def writable(self) -> bool:
        return self.flags & os.O_ACCMODE != os.O_RDONLY


class _PyBuffer(ctypes.Structure):
    # The head of CPython's Py_buffer, padded well beyond its size.
    _fields_ = (("buf", ctypes.c_void_p), ("_rest", ctypes.c_uint8 * 248))


def _address(buffer: Any) -> int:
    """Where the bytes of a buffer, writable or not, lie in memory."""
    view = _PyBuffer()
    ctypes.pythonapi.PyObject_GetBuffer(ctypes.py_object(buffer), ctypes.byref(view), 0)
    try:
        return view.buf or 0
    finally:
        ctypes.pythonapi.PyBuffer_Release(ctypes.byref(view))


class SimMachineDisk:
    """What the processes of one machine share: the tree and the properties of the medium."""

    def __init__(self, process: SimProcess, offsets_ms: dict[str, int]) -> None:
        universe = process.universe
        self.random = universe.rng(f"disk/{process.machine}")
        self.tree = FileTree(self.random, capacity_bytes=1 << 40)
        self.direct = DirectIo(self.random.choice((4, 512)), self.random.choice((512, 4096)))
        self.direct_refused = False
        self.offsets_ms = offsets_ms


class SimDisk(Disk):
    """See :class:`~curvfs.world.Disk`. Beyond it: what a test does to the medium."""

    def __init__(self, process: SimProcess, machine: SimMachineDisk) -> None:
        self._process = process
        self._machine = machine
        self._tree = machine.tree
        self._random = machine.random
        self._faults = process.universe.faults
        self._files: dict[int, _OpenFile] = {}
        self.descriptors_max = 1 << 16
        process.on_death.append(self._die)

    # ------------------------------------------------------------------------------------------ what tests do to it

    @property
    def tree(self) -> FileTree:
        """The machine's files."""
        return self._tree

    def open_paths(self) -> list[str]:
        """The paths that this process holds open, under the names they were opened by: a leak check."""
        return [file.path for file in self._files.values()]

    def set_capacity(self, capacity_bytes: int) -> None:
        """The size of the medium; a write that needs more gets ENOSPC."""
        self._tree.capacity_bytes = capacity_bytes

    def set_direct_io(self, direct: DirectIo | None) -> None:
        """The alignment that O_DIRECT asks for; None: the file system refuses O_DIRECT."""
        self._machine.direct_refused = direct is None
        self._machine.direct = direct or DirectIo(0, 0)

    def symlink(self, target: str, path: str) -> None:
        """Create a symbolic link."""
        directory, name, found = self._tree.find(path, follow=False)
        if found is not None:
            raise fail(errno.EEXIST, target, path)
        inode = self._tree.new_inode(stat.S_IFLNK | 0o777, self._now_ns())
        inode.target = target
        self._tree.change((directory, name, inode), now_ns=self._now_ns())

    def rot(self, path: str, *, bits: int = 1) -> list[int]:
        """Flip random bits of a file on the medium; returns their bytes' offsets."""
        inode = self._tree.walk(path)
        places = [self._random.randrange(inode.length_bytes * 8) for _ in range(bits)]
        for bit in places:
            inode.flip(bit)
        self._process.universe.faults.fired["rot"] += bits
        return [bit // 8 for bit in places]

    # ---------------------------------------------------------------------------------------------------- machinery

    def _die(self, silently: bool) -> None:
        for fd in list(self._files):
            self._release(fd)

    def _release(self, fd: int) -> None:
        file = self._files.pop(fd)
        file.inode.locks.pop(file, None)
        file.inode.open_count -= 1
        self._tree.drop_if_unused(file.inode)

    def _now_ns(self) -> int:
        offset_ms = self._machine.offsets_ms.get(self._process.machine, 0)
        return (EPOCH_MS + offset_ms) * 1_000_000 + int(self._process.now_s() * 1e9)

    def _enter(self, call: str, path: str, detail: str = "") -> None:
        """Every call begins here: trace, death, planned errors, slowness."""
        self._process.enter(call, f"{path} {detail}" if detail else path)
        number = self._faults.planned_error(call, path)
        if self._strikes("slow_disk", self._faults.slow_disk):
            self._process.spend(self._random.uniform(0, self._faults.slow_disk_s))
        if number:
            raise fail(number, path)

    def _strikes(self, name: str, probability: float) -> bool:
        return self._faults.strikes(name, probability, self._process.machine)

    def _enter_names(self, call: str, path: str, *, creates: bool = False, detail: str = "") -> None:
        self._enter(call, path, detail)
        if self._strikes("name_error", self._faults.name_error):
            raise fail(errno.EIO, path)
        if creates and self._strikes("no_space", self._faults.no_space):
            raise fail(errno.ENOSPC, path)

    def _file(self, fd: int, call: str, detail: str = "") -> _OpenFile:
        file = self._files.get(fd)
        if file is None:
            self._process.enter(call, f"bad descriptor {fd}")
            raise fail(errno.EBADF)
        self._enter(call, file.path, detail)
        return file

    def _check_alignment(self, file: _OpenFile, views: Sequence[memoryview], offset_bytes: int) -> None:
        if not file.flags & os.O_DIRECT:
            return
        direct = self._machine.direct
        for view in views:
            if len(view) % direct.offset_alignment_bytes or _address(view) % direct.memory_alignment_bytes:
                raise fail(errno.EINVAL)
        if offset_bytes % direct.offset_alignment_bytes:
            raise fail(errno.EINVAL)

    def _shorten(self, file: _OpenFile, count_bytes: int, name: str, probability: float) -> int:
        """A count that a fault may have shortened; never to nothing, and aligned where that is asked for."""
        step = self._machine.direct.offset_alignment_bytes if file.flags & os.O_DIRECT else 1
        if count_bytes <= step or not self._strikes(name, probability):
            return count_bytes
        return max(step, self._random.randrange(count_bytes) // step * step)

    # -------------------------------------------------------------------------------------------------- descriptors

    def open(self, path: str, flags: int, mode: int = 0o600) -> int:
        if flags & NO_LINKS:
            raise fail(errno.ENOSYS, path)
        self._enter_names("open", path, creates=bool(flags & os.O_CREAT), detail=f"{flags:#o}")
        follow = not flags & os.O_NOFOLLOW and flags & (os.O_CREAT | os.O_EXCL) != os.O_CREAT | os.O_EXCL
        directory, name, inode = self._tree.find(path, follow=follow)
        if flags & os.O_CREAT and (path.endswith("/") or (inode is not None and inode.is_directory)):
            if inode is not None and flags & os.O_EXCL:
                raise fail(errno.EEXIST, path)
            raise fail(errno.EISDIR, path)
        if inode is None:
            if not flags & os.O_CREAT:
                raise fail(errno.ENOENT, path)
            if path.endswith("/"):
                raise fail(errno.EISDIR, path)
        elif flags & os.O_CREAT and flags & os.O_EXCL:
            raise fail(errno.EEXIST, path)
        elif flags & os.O_DIRECTORY and not inode.is_directory:
            raise fail(errno.ENOTDIR, path)
        elif inode.is_symlink:
            raise fail(errno.ELOOP, path)
        elif inode.is_directory and flags & os.O_ACCMODE != os.O_RDONLY:
            raise fail(errno.EISDIR, path)
        if flags & os.O_DIRECT and self._machine.direct_refused:
            raise fail(errno.EINVAL, path)
        if len(self._files) >= self.descriptors_max:
            raise fail(errno.EMFILE, path)
        if inode is None:
            inode = self._tree.new_inode(stat.S_IFREG | mode & 0o7777, self._now_ns())
            self._tree.change((directory, name, inode), now_ns=self._now_ns())
        elif flags & os.O_TRUNC and inode.length_bytes:
            inode.truncate(0)
            inode.mtime_ns = inode.ctime_ns = self._now_ns()
        fd = _FIRST_FD
        while fd in self._files:
            fd += 1
        self._files[fd] = _OpenFile(inode, flags, path)
        inode.open_count += 1
        return fd

    def close(self, fd: int) -> None:
        if not self._process.alive:
            return  # its descriptors are closed
        if fd not in self._files:
            raise fail(errno.EBADF)
        self._process.enter("close", self._files[fd].path)
        self._release(fd)

    def preadv(self, fd: int, buffers: Sequence[Any], offset_bytes: int, flags: int = 0) -> int:
        views = [bytes_of(buffer) for buffer in buffers]
        wanted = sum(map(len, views))
        file = self._file(fd, "preadv", f"{wanted} @{offset_bytes}")
        if not file.readable:
            raise fail(errno.EBADF)
        if file.inode.is_directory:
            raise fail(errno.EISDIR)
        if offset_bytes < 0:
            raise fail(errno.EINVAL)
        self._check_alignment(file, views, offset_bytes)
        if flags & _RWF_NOWAIT and self._random.random() < 0.5:
            raise fail(errno.EAGAIN)
        if self._strikes("read_error", self._faults.read_error):
            raise fail(errno.EIO)
        count = min(wanted, max(0, file.inode.length_bytes - offset_bytes))
        if count and self._strikes("bit_rot", self._faults.bit_rot):
            file.inode.flip(self._random.randrange(offset_bytes * 8, (offset_bytes + count) * 8))
        count = self._shorten(file, count, "short_read", self._faults.short_read)
        data = memoryview(file.inode.read(offset_bytes, count))
        for view in views:
            piece, data = data[: len(view)], data[len(view) :]
            view[: len(piece)] = piece
        return count

    def pwritev(self, fd: int, buffers: Sequence[Any], offset_bytes: int, flags: int = 0) -> int:
        views = [bytes_of(buffer) for buffer in buffers]
        wanted = sum(map(len, views))
        file = self._file(fd, "pwritev", f"{wanted} @{offset_bytes}")
        if not file.writable:
            raise fail(errno.EBADF)
        if offset_bytes < 0:
            raise fail(errno.EINVAL)
        self._check_alignment(file, views, offset_bytes)
        inode = file.inode
        if file.flags & os.O_APPEND:
            offset_bytes = inode.length_bytes
        data = memoryview(b"".join(views))
        count = self._shorten(file, wanted, "short_write", self._faults.short_write)
        broken = self._strikes("write_error", self._faults.write_error)
        if broken:
            count = self._random.randint(0, count)
        elif self._strikes("no_space", self._faults.no_space):
            raise fail(errno.ENOSPC)
        fits = self._fitting(inode, offset_bytes, count)
        inode.write(data[:fits], offset_bytes, self._random)
        inode.mtime_ns = inode.ctime_ns = self._now_ns()
        if broken:
            raise fail(errno.EIO)
        if count and not fits:
            raise fail(errno.ENOSPC)
        return fits

    def _fitting(self, inode: Inode, offset_bytes: int, count_bytes: int) -> int:
        """How many of these bytes the medium has room for."""
        free = self._tree.free_bytes() // SECTOR_BYTES
        first, last = offset_bytes // SECTOR_BYTES, (offset_bytes + count_bytes - 1) // SECTOR_BYTES
        if last - first < free:
            return count_bytes
        for index in range(first, last + 1):
            if index not in inode.sectors:
                if free == 0:
                    return max(0, index * SECTOR_BYTES - offset_bytes)
                free -= 1
        return count_bytes

    def ftruncate(self, fd: int, length_bytes: int) -> None:
        file = self._file(fd, "ftruncate", str(length_bytes))
        if not file.writable or length_bytes < 0:
            raise fail(errno.EINVAL)
        file.inode.truncate(length_bytes)
        file.inode.mtime_ns = file.inode.ctime_ns = self._now_ns()

    def fdatasync(self, fd: int) -> None:
        self._sync(self._file(fd, "fdatasync"))

    def fsync(self, fd: int) -> None:
        self._sync(self._file(fd, "fsync"))

    def _sync(self, file: _OpenFile) -> None:
        if self._strikes("sync_error", self._faults.sync_error):
            file.inode.lose_dirty()
            raise fail(errno.EIO)
        if file.inode.is_directory:
            self._tree.sync_names(file.inode)
        else:
            file.inode.sync()

    def lock(self, fd: int, *, shared: bool = False, wait: bool = False) -> bool:
        file = self._file(fd, "lock", "shared" if shared else "exclusive")
        others = [is_shared for holder, is_shared in file.inode.locks.items() if holder is not file]
        if others and not (shared and all(others)):
            if wait:
                raise fail(errno.EDEADLK)
            return False
        file.inode.locks[file] = shared
        return True

    def direct_io(self, fd: int) -> DirectIo:
        self._file(fd, "direct_io")
        return self._machine.direct

    def forget(self, fd: int, offset_bytes: int, length_bytes: int) -> None:
        self._file(fd, "forget")  # no page cache here tells what it holds, or forgets it before the power goes

    # -------------------------------------------------------------------------------------------------------- names

    def fstat(self, fd: int) -> os.stat_result:
        return self._stat_of(self._file(fd, "fstat").inode)

    def stat(self, path: str, *, follow_symlinks: bool = True) -> os.stat_result:
        self._enter_names("stat", path)
        return self._stat_of(self._tree.walk(path, follow=follow_symlinks))

    def _stat_of(self, inode: Inode) -> os.stat_result:
        size = len(inode.target) if inode.is_symlink else inode.length_bytes
        if inode.is_directory:
            size = SECTOR_BYTES
        times_ns = {"st_atime_ns": inode.atime_ns, "st_mtime_ns": inode.mtime_ns, "st_ctime_ns": inode.ctime_ns}
        times_s = {name.removesuffix("_ns"): value / 1e9 for name, value in times_ns.items()}
        blocks = len(inode.sectors) * (SECTOR_BYTES // 512)
        return os.stat_result(
            (inode.mode, inode.number, 1, inode.links, 0, 0, size, *(ns // 1_000_000_000 for ns in times_ns.values())),
            {**times_s, **times_ns, "st_blksize": SECTOR_BYTES, "st_blocks": blocks, "st_rdev": 0},
        )

    def statvfs(self, path: str) -> os.statvfs_result:
        self._enter_names("statvfs", path)
        self._tree.walk(path)
        blocks = self._tree.capacity_bytes // SECTOR_BYTES
        free = self._tree.free_bytes() // SECTOR_BYTES
        inodes = 1 << 32
        inodes_free = inodes - len(self._tree.inodes)
        return os.statvfs_result(
            (SECTOR_BYTES, SECTOR_BYTES, blocks, free, free, inodes, inodes_free, inodes_free, 0, _NAME_MAX, 1)
        )

    def rename(self, source: str, target: str) -> None:
        self._enter_names("rename", source, creates=True, detail=target)
        self._rename(source, target, replace=True)

    def rename_noreplace(self, source: str, target: str) -> None:
        self._enter_names("rename_noreplace", source, creates=True, detail=target)
        self._rename(source, target, replace=False)

    def _rename(self, source: str, target: str, *, replace: bool) -> None:
        source_dir, source_name, inode = self._tree.find(source, follow=False)
        if inode is None:
            raise fail(errno.ENOENT, source, target)
        target_dir, target_name, found = self._tree.find(target, follow=False)
        if not source_name or (found is not None and not target_name):
            raise fail(errno.EBUSY, source, target)
        if found is None and target.endswith("/") and not inode.is_directory:
            raise fail(errno.ENOTDIR, source, target)
        if found is not None and not replace:
            raise fail(errno.EEXIST, source, target)
        ancestor = target_dir
        while ancestor is not self._tree.root:
            if ancestor is inode:
                raise fail(errno.EINVAL, source, target)
            ancestor = ancestor.parent
        if found is inode:
            return
        if found is not None:
            if inode.is_directory and not found.is_directory:
                raise fail(errno.ENOTDIR, source, target)
            if found.is_directory and not inode.is_directory:
                raise fail(errno.EISDIR, source, target)
            if found.entries:
                raise fail(errno.ENOTEMPTY, source, target)
        self._tree.change((source_dir, source_name, None), (target_dir, target_name, inode), now_ns=self._now_ns())

    def link(self, source: str, target: str) -> None:
        self._enter_names("link", source, creates=True, detail=target)
        inode = self._tree.walk(source, follow=False)
        directory, name, found = self._tree.find(target, follow=False)
        if found is not None:
            raise fail(errno.EEXIST, source, target)
        if inode.is_directory:
            raise fail(errno.EPERM, source, target)
        self._tree.change((directory, name, inode), now_ns=self._now_ns())

    def unlink(self, path: str) -> None:
        self._enter_names("unlink", path)
        directory, name, inode = self._tree.find(path, follow=False)
        if inode is None:
            raise fail(errno.ENOENT, path)
        if inode.is_directory:
            raise fail(errno.EISDIR, path)
        self._tree.change((directory, name, None), now_ns=self._now_ns())

    def mkdir(self, path: str, mode: int = 0o700) -> None:
        self._enter_names("mkdir", path, creates=True)
        directory, name, found = self._tree.find(path, follow=False)
        if found is not None:
            raise fail(errno.EEXIST, path)
        inode = self._tree.new_inode(stat.S_IFDIR | mode & 0o7777, self._now_ns())
        self._tree.change((directory, name, inode), now_ns=self._now_ns())

    def rmdir(self, path: str) -> None:
        self._enter_names("rmdir", path)
        directory, name, inode = self._tree.find(path, follow=False)
        if inode is None:
            raise fail(errno.ENOENT, path)
        if not inode.is_directory:
            raise fail(errno.ENOTDIR, path)
        if not name:
            raise fail(errno.EBUSY if inode is self._tree.root else errno.ENOTEMPTY, path)
        if inode.entries:
            raise fail(errno.ENOTEMPTY, path)
        self._tree.change((directory, name, None), now_ns=self._now_ns())

    def listdir(self, path: str) -> list[str]:
        self._enter_names("listdir", path)
        inode = self._tree.walk(path)
        if not inode.is_directory:
            raise fail(errno.ENOTDIR, path)
        names = list(inode.entries)
        self._random.shuffle(names)  # no order is promised
        return names

    def utime_now(self, path: str) -> None:
        self._enter_names("utime_now", path)
        inode = self._tree.walk(path, follow=False)
        inode.atime_ns = inode.mtime_ns = inode.ctime_ns = self._now_ns()

    def set_access_time(self, path: str, atime_ns: int) -> None:
        self._enter_names("set_access_time", path)
        inode = self._tree.walk(path, follow=False)
        inode.atime_ns, inode.ctime_ns = atime_ns, self._now_ns()


_NAME_MAX = 255
