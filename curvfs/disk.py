"""The disk of the one world (:mod:`curvfs.world`): what it is, and the real one.

Raises ``OSError`` as ``os`` does, to be mapped at the edge that knows what was being done.
"""

from __future__ import annotations

import abc
import contextlib
import ctypes
import errno
import fcntl
import itertools
import os
import stat
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from curvfs.buffers import Buffer, bytes_of
from curvfs.errors import EnvironmentError_
from curvfs.ring import Ring, kernel_ring


@dataclass(frozen=True, slots=True)
class DirectIo:
    """What ``statx`` says about direct I/O on a file. Zero means: refused, or unknown to the kernel."""

    memory_alignment_bytes: int
    offset_alignment_bytes: int


#: For :meth:`Disk.open` alone: follow no link anywhere in the path (ELOOP). ENOSYS, or EPERM, where that cannot be had.
NO_LINKS = 1 << 40


class Disk(abc.ABC):
    """Files of the local machine. Blocking calls with the meaning and the ``OSError`` of the ``os`` functions of the
    same name; run them through :meth:`Threads.run` where a trio task must not wait."""

    @abc.abstractmethod
    def open(self, path: str, flags: int, mode: int = 0o600) -> int: ...

    @abc.abstractmethod
    def close(self, fd: int) -> None: ...

    @abc.abstractmethod
    def preadv(self, fd: int, buffers: Sequence[Any], offset_bytes: int, flags: int = 0) -> int: ...

    @abc.abstractmethod
    def pwritev(self, fd: int, buffers: Sequence[Any], offset_bytes: int, flags: int = 0) -> int: ...

    @abc.abstractmethod
    def ftruncate(self, fd: int, length_bytes: int) -> None: ...

    @abc.abstractmethod
    def fdatasync(self, fd: int) -> None: ...

    @abc.abstractmethod
    def fsync(self, fd: int) -> None: ...

    @abc.abstractmethod
    def fstat(self, fd: int) -> os.stat_result: ...

    @abc.abstractmethod
    def stat(self, path: str, *, follow_symlinks: bool = True) -> os.stat_result: ...

    @abc.abstractmethod
    def statvfs(self, path: str) -> os.statvfs_result: ...

    @abc.abstractmethod
    def rename(self, source: str, target: str) -> None: ...

    @abc.abstractmethod
    def link(self, source: str, target: str) -> None: ...

    @abc.abstractmethod
    def unlink(self, path: str) -> None: ...

    @abc.abstractmethod
    def mkdir(self, path: str, mode: int = 0o700) -> None: ...

    @abc.abstractmethod
    def rmdir(self, path: str) -> None: ...

    @abc.abstractmethod
    def listdir(self, path: str) -> list[str]: ...

    @abc.abstractmethod
    def utime_now(self, path: str) -> None:
        """Set both times of a file to the file system's own now."""

    @abc.abstractmethod
    def set_access_time(self, path: str, atime_ns: int) -> None:
        """Set when a file was last used, and leave when it was written."""

    @abc.abstractmethod
    def lock(self, fd: int, *, shared: bool = False, wait: bool = False) -> bool:
        """``flock``; False when somebody else holds it. The lock goes with the last descriptor, or the process."""

    @abc.abstractmethod
    def direct_io(self, fd: int) -> DirectIo:
        """Alignment that ``O_DIRECT`` needs on this file, as the kernel tells it."""

    @abc.abstractmethod
    def forget(self, fd: int, offset_bytes: int, length_bytes: int) -> None:
        """Give back what the page cache holds of a range and has written. Advice, which cannot fail."""

    def resident_bytes(self, fd: int, offset_bytes: int, length_bytes: int) -> int:
        """How much of a range lies in the page cache, in whole pages (``cachestat``); 0 where nobody tells."""
        return 0

    def ring(self, entries: int) -> Ring:
        """An io_uring. Raises EnvironmentError_ with the reason where there is none."""
        raise EnvironmentError_("This disk has no io_uring; use the threads engine.")

    # What follows is made of the above.

    def rename_noreplace(self, source: str, target: str) -> None:
        """Move a file to a name that must be free: FileExistsError when it is not. Atomic for readers of ``target``;
        where the file system has no such rename, the file has both names for a moment."""
        self.link(source, target)
        self.unlink(source)

    def rename_into(self, directory: int, source: str, name: str) -> None:
        """The same to a name in a directory that was opened (with ``NO_LINKS``), wherever that is by now."""
        raise OSError(errno.ENOSYS, "this disk opens no directories", source)

    def makedirs(self, path: str, mode: int = 0o700) -> None:
        """Create a directory and its parents; one that exists is fine, a file in its place is not."""
        try:
            self.mkdir(path, mode)
        except FileExistsError:
            if not stat.S_ISDIR(self.stat(path).st_mode):
                raise
        except FileNotFoundError:
            parent = os.path.dirname(path.rstrip("/"))
            if parent in ("", path):
                raise
            self.makedirs(parent, mode)
            try:
                self.mkdir(path, mode)
            except FileExistsError:
                pass

    def exists(self, path: str) -> bool:
        try:
            self.stat(path, follow_symlinks=False)
        except (FileNotFoundError, NotADirectoryError):
            return False
        return True

    def pread_full(self, fd: int, buffer: memoryview, offset_bytes: int) -> int:
        """Fill ``buffer``, going on after short reads; less than its size only at end of file."""
        buffer = bytes_of(buffer)
        done = 0
        while done < len(buffer):
            try:
                count = self.preadv(fd, [buffer[done:]], offset_bytes + done)
            except InterruptedError:
                continue
            if count == 0:
                break
            done += count
        return done

    def pwrite_full(self, fd: int, buffer: Buffer, offset_bytes: int) -> None:
        """Write all of ``buffer``, going on after short writes."""
        view = bytes_of(buffer)
        while len(view):
            try:
                count = self.pwritev(fd, [view], offset_bytes)
            except InterruptedError:
                continue
            if count == 0:
                raise OSError(errno.EIO, "write returned 0")
            view = view[count:]
            offset_bytes += count

    def read_file(self, path: str) -> bytes:
        """The whole content of a small file."""
        fd = self.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            content = bytearray(self.fstat(fd).st_size)
            return bytes(content[: self.pread_full(fd, memoryview(content), 0)])
        finally:
            self.close(fd)

    def write_file(self, path: str, content: bytes, mode: int = 0o600, *, durable: bool = False) -> None:
        """Replace a small file atomically: a reader, and whoever comes after our death, sees the old or the new one
        whole. After a power cut it may be torn, unless it was written ``durable``: then it is the old or the new one
        whole, and once this has returned the new one."""
        for attempt in itertools.count():
            staging = f"{path}.{attempt}.tmp"  # nobody else's: two writers of one path must not share it
            try:
                fd = self.open(staging, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode)
            except FileExistsError:
                continue
            break
        try:
            try:
                self.pwrite_full(fd, content, 0)
                if durable:
                    self.fdatasync(fd)
            finally:
                self.close(fd)
            self.rename(staging, path)
        except BaseException:
            with contextlib.suppress(OSError):
                self.unlink(staging)
            raise
        if durable:
            self.sync_names(os.path.dirname(path) or ".")

    def sync_names(self, directory: str) -> None:
        """Make what was created, renamed and removed in a directory durable."""
        fd = self.open(directory, os.O_RDONLY | os.O_DIRECTORY)
        try:
            self.fsync(fd)
        finally:
            self.close(fd)


class _StatxBuffer(ctypes.Structure):
    # The head of struct statx up to the direct I/O fields (Linux 6.1), padded to its full 256 bytes.
    _fields_ = (
        ("stx_mask", ctypes.c_uint32),
        ("_before", ctypes.c_uint8 * 148),
        ("stx_dio_mem_align", ctypes.c_uint32),
        ("stx_dio_offset_align", ctypes.c_uint32),
        ("_after", ctypes.c_uint8 * 96),
    )


class _CachestatRange(ctypes.Structure):
    _fields_ = (("off", ctypes.c_uint64), ("len", ctypes.c_uint64))


class _Cachestat(ctypes.Structure):
    _fields_ = tuple(
        (name, ctypes.c_uint64) for name in ("cached", "dirty", "writeback", "evicted", "recently_evicted")
    )


class _OpenHow(ctypes.Structure):
    _fields_ = (("flags", ctypes.c_uint64), ("mode", ctypes.c_uint64), ("resolve", ctypes.c_uint64))


#: The same numbers on every architecture (Linux 6.5, Linux 5.6).
_SYS_CACHESTAT = 451
_SYS_OPENAT2 = 437
_RESOLVE_NO_SYMLINKS = 4
_PAGE_BYTES = os.sysconf("SC_PAGESIZE")
_AT_FDCWD = -100
_RENAME_NOREPLACE = 1
_STATX_DIOALIGN = 0x2000
_AT_EMPTY_PATH = 0x1000


class RealDisk(Disk):
    def __init__(self) -> None:
        libc = ctypes.CDLL(None, use_errno=True)
        self._statx = getattr(libc, "statx", None)
        self._renameat2 = getattr(libc, "renameat2", None)
        self._syscall = libc.syscall

    def open(self, path: str, flags: int, mode: int = 0o600) -> int:
        if flags & NO_LINKS:
            return self._open_without_links(path, flags & ~NO_LINKS | os.O_CLOEXEC, mode)
        return os.open(path, flags | os.O_CLOEXEC, mode)

    def _open_without_links(self, path: str, flags: int, mode: int) -> int:
        how = _OpenHow(flags, mode if flags & os.O_CREAT else 0, _RESOLVE_NO_SYMLINKS)
        arguments = (ctypes.c_long(_SYS_OPENAT2), ctypes.c_int(_AT_FDCWD), os.fsencode(path), ctypes.byref(how))
        while (fd := int(self._syscall(*arguments, ctypes.c_size_t(ctypes.sizeof(how))))) < 0:
            number = ctypes.get_errno()
            if number != errno.EINTR:
                raise OSError(number, os.strerror(number), path)
        return fd

    def close(self, fd: int) -> None:
        os.close(fd)

    def preadv(self, fd: int, buffers: Sequence[Any], offset_bytes: int, flags: int = 0) -> int:
        return os.preadv(fd, buffers, offset_bytes, flags)

    def pwritev(self, fd: int, buffers: Sequence[Any], offset_bytes: int, flags: int = 0) -> int:
        return os.pwritev(fd, buffers, offset_bytes, flags)

    def ftruncate(self, fd: int, length_bytes: int) -> None:
        os.ftruncate(fd, length_bytes)

    def fdatasync(self, fd: int) -> None:
        os.fdatasync(fd)

    def fsync(self, fd: int) -> None:
        os.fsync(fd)

    def fstat(self, fd: int) -> os.stat_result:
        return os.fstat(fd)

    def stat(self, path: str, *, follow_symlinks: bool = True) -> os.stat_result:
        return os.stat(path, follow_symlinks=follow_symlinks)

    def statvfs(self, path: str) -> os.statvfs_result:
        return os.statvfs(path)

    def rename(self, source: str, target: str) -> None:
        os.rename(source, target)

    def rename_noreplace(self, source: str, target: str) -> None:
        if not self._renamed_noreplace(source, _AT_FDCWD, target):
            super().rename_noreplace(source, target)

    def rename_into(self, directory: int, source: str, name: str) -> None:
        if not self._renamed_noreplace(source, directory, name):
            os.link(source, name, dst_dir_fd=directory, follow_symlinks=False)
            self.unlink(source)

    def _renamed_noreplace(self, source: str, directory: int, name: str) -> bool:
        """False where there is no such call, or the file system does not do it."""
        if self._renameat2 is None:
            return False
        names = (os.fsencode(source), os.fsencode(name))
        if self._renameat2(_AT_FDCWD, names[0], directory, names[1], _RENAME_NOREPLACE) == 0:
            return True
        number = ctypes.get_errno()
        if number in (errno.EINVAL, errno.ENOSYS):
            return False
        raise OSError(number, os.strerror(number), source, None, name)

    def link(self, source: str, target: str) -> None:
        os.link(source, target, follow_symlinks=False)

    def unlink(self, path: str) -> None:
        os.unlink(path)

    def mkdir(self, path: str, mode: int = 0o700) -> None:
        os.mkdir(path, mode)

    def rmdir(self, path: str) -> None:
        os.rmdir(path)

    def listdir(self, path: str) -> list[str]:
        return os.listdir(path)

    def utime_now(self, path: str) -> None:
        os.utime(path, None, follow_symlinks=False)

    def set_access_time(self, path: str, atime_ns: int) -> None:
        written_ns = os.stat(path, follow_symlinks=False).st_mtime_ns
        os.utime(path, ns=(atime_ns, written_ns), follow_symlinks=False)

    def lock(self, fd: int, *, shared: bool = False, wait: bool = False) -> bool:
        operation = (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | (0 if wait else fcntl.LOCK_NB)
        try:
            fcntl.flock(fd, operation)
        except BlockingIOError:
            return False
        return True

    def direct_io(self, fd: int) -> DirectIo:
        if self._statx is None:
            return DirectIo(0, 0)
        buffer = _StatxBuffer()
        if self._statx(fd, b"", _AT_EMPTY_PATH, _STATX_DIOALIGN, ctypes.byref(buffer)) != 0:
            return DirectIo(0, 0)
        if not buffer.stx_mask & _STATX_DIOALIGN:
            return DirectIo(0, 0)
        return DirectIo(buffer.stx_dio_mem_align, buffer.stx_dio_offset_align)

    def resident_bytes(self, fd: int, offset_bytes: int, length_bytes: int) -> int:
        asked, found = _CachestatRange(offset_bytes, length_bytes), _Cachestat()
        arguments = (ctypes.c_long(_SYS_CACHESTAT), ctypes.c_uint(fd), ctypes.byref(asked), ctypes.byref(found))
        if self._syscall(*arguments, ctypes.c_uint(0)) != 0:
            return 0
        return int(found.cached) * _PAGE_BYTES

    def forget(self, fd: int, offset_bytes: int, length_bytes: int) -> None:
        with contextlib.suppress(OSError):
            os.posix_fadvise(fd, offset_bytes, length_bytes, os.POSIX_FADV_DONTNEED)

    def ring(self, entries: int) -> Ring:
        return kernel_ring(entries)
