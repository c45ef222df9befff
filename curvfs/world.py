"""The one world: clock, random numbers, network, disk and threads, injected into every layer.

Nothing else in the product imports ``time``, ``random``, ``socket`` or ``threading``, or calls ``os.pread`` and
friends (ruff's banned-api rule holds that). What needs one of them takes a :class:`World` and uses its five parts, so
that the seeded simulation (``World.simulated(seed)``, see :mod:`curvfs.simworld`) runs the very same code on a virtual
clock, a lossy network and a disk that loses power.

trio itself may be imported anywhere: its timeouts follow trio's clock, which the simulation replaces.

Errors: :class:`Network` raises :class:`~curvfs.errors.TransportError` only; :class:`Disk` raises ``OSError`` as ``os``
does, to be mapped at the edge that knows what was being done.
"""

from __future__ import annotations

import abc
import contextlib
import ctypes
import errno
import fcntl
import itertools
import os
import queue
import random
import socket
import stat
import threading
import time
import uuid
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar, TypeVarTuple

import trio

from curvfs.errors import ConnectFailed, ConnectionLost, CurvfsError, EnvironmentError_
from curvfs.ring import Ring, kernel_ring

T = TypeVar("T")
Ts = TypeVarTuple("Ts")

#: Anything that holds contiguous bytes.
Buffer = bytes | bytearray | memoryview


def bytes_of(buffer: Buffer) -> memoryview:
    """The same memory seen as single bytes, whatever the buffer's items are; no copy."""
    view = memoryview(buffer)
    return view.cast("B") if view.nbytes else memoryview(bytearray())


# ---------------------------------------------------------------------------------------------------------- clock


class Clock(abc.ABC):
    """Time. Durations come from :meth:`monotonic_s`, stamps from :meth:`time_ms`."""

    @abc.abstractmethod
    def monotonic_s(self) -> float:
        """Seconds on a clock that never steps. Callable from any thread."""

    @abc.abstractmethod
    def time_ms(self) -> int:
        """Milliseconds since the Unix epoch; may step. Callable from any thread."""

    async def sleep(self, duration_s: float) -> None:
        """Sleep in a trio task, on trio's clock, which the simulation replaces."""
        await trio.sleep(duration_s)

    @abc.abstractmethod
    def block(self, duration_s: float) -> None:
        """Sleep in a plain thread."""


class RealClock(Clock):
    def monotonic_s(self) -> float:
        return time.monotonic()

    def time_ms(self) -> int:
        return time.time_ns() // 1_000_000

    def block(self, duration_s: float) -> None:
        time.sleep(duration_s)


# --------------------------------------------------------------------------------------------------------- random


class Random(random.Random):
    """Random numbers: ``random.Random`` plus the two shapes that the product needs."""

    def uuid(self) -> str:
        """A version 4 UUID as text."""
        return str(uuid.UUID(int=self.getrandbits(128), version=4))

    def request_id(self) -> int:
        """A positive 63-bit id with room to add an index (batch calls do)."""
        return self.getrandbits(62) + 1


# -------------------------------------------------------------------------------------------------------- network


class Stream(abc.ABC):
    """A connected byte stream. One task may send while another receives; two senders need a lock."""

    #: ``host:port`` of the other end, for messages.
    peer: str = "?"

    @abc.abstractmethod
    async def send(self, *buffers: Buffer) -> None:
        """Send all bytes of all buffers, gathered, without joining them. Raises ConnectionLost."""

    @abc.abstractmethod
    async def recv_into(self, buffer: memoryview) -> int:
        """Receive at least one byte into ``buffer``; 0 means that the peer closed. Raises ConnectionLost."""

    @abc.abstractmethod
    async def send_file(self, fd: int, offset_bytes: int, count_bytes: int) -> None:
        """Send bytes of an open file without copying them. The file must hold them all: a file that ends early
        raises ConnectionLost, because the frame under way can no longer be finished."""

    @abc.abstractmethod
    async def aclose(self) -> None:
        """Close; never raises."""

    async def recv_exactly(self, buffer: memoryview) -> int:
        """Fill ``buffer``; returns the number of bytes received, less than its size only at end of stream."""
        buffer = bytes_of(buffer)
        done = 0
        while done < len(buffer):
            count = await self.recv_into(buffer[done:])
            if count == 0:
                break
            done += count
        return done


class Listener(abc.ABC):
    """A listening socket."""

    host: str
    port: int

    @abc.abstractmethod
    async def accept(self) -> Stream: ...

    @abc.abstractmethod
    async def aclose(self) -> None: ...


class Network(abc.ABC):
    """TCP."""

    @abc.abstractmethod
    async def connect(self, host: str, port: int) -> Stream:
        """Connect (no timeout of its own: use a trio cancel scope). Raises ConnectFailed."""

    @abc.abstractmethod
    async def listen(self, host: str, port: int) -> Listener:
        """Listen; ``port`` 0 picks a free one. Raises EnvironmentError_ when the address cannot be had."""

    @abc.abstractmethod
    def hostname(self) -> str:
        """This machine's own name."""


_PORT_MAX = 65535


def cannot_connect(host: str, port: int, reason: str) -> ConnectFailed:
    """The error of every network for a connect that failed."""
    return ConnectFailed(f"Cannot connect to {host}:{port}: {reason}.")


def cannot_resolve(host: str, reason: str) -> ConnectFailed:
    """The error of every network for a name that leads nowhere."""
    return ConnectFailed(f"The host name {host!r} cannot be resolved: {reason}.")


def cannot_listen(host: str, port: int, reason: str, errno_: int) -> EnvironmentError_:
    """The error of every network for an address that cannot be had."""
    return EnvironmentError_(f"Cannot listen on {host}:{port}: {reason}.", errno_=errno_)


def check_connect_port(host: str, port: int) -> None:
    if not 0 < port <= _PORT_MAX:
        raise cannot_connect(host, port, f"a port is a number from 1 to {_PORT_MAX}")


def check_listen_port(host: str, port: int) -> None:
    if not 0 <= port <= _PORT_MAX:
        raise cannot_listen(host, port, f"a port is a number from 0 to {_PORT_MAX}", errno.EINVAL)


#: sendmsg takes at most IOV_MAX pieces.
_IOV_MAX = 1024


def _reason(error: OSError | UnicodeError) -> str:
    """What went wrong, in the system's words alone."""
    if isinstance(error, UnicodeError):
        return "it is no host name"
    if isinstance(error, socket.gaierror) or not error.errno:
        return error.strerror or str(error)
    return os.strerror(error.errno)


#: A receiver of more than this waits for that many bytes at a time (SO_RCVLOWAT).
_PATIENT_BYTES = 256 * 1024
_WAKE_BYTES = 2 << 20
#: What is copied at once from a file to a socket of this machine, and how many buffers for that are kept.
_COPY_BYTES = 4 << 20
_SPARE_COPIES = 4
#: After so many bytes other tasks have their turn, even if nothing had to be waited for.
_TURN_BYTES = 4 << 20
_spare_copies: list[memoryview] = []


class SocketStream(Stream):
    """A :class:`Stream` over a connected trio socket."""

    def __init__(self, sock: trio.socket.SocketType, peer: str) -> None:
        self._sock = sock
        self.peer = peer
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        try:
            self._is_local = sock.getsockname()[0] == sock.getpeername()[0]
        except OSError:  # lost before it was begun with
            self._is_local = False

    def _lost(self, error: OSError | trio.ClosedResourceError) -> ConnectionLost:
        if isinstance(error, trio.ClosedResourceError) or error.errno == errno.EBADF:
            return ConnectionLost(f"The connection to {self.peer} was lost: it was closed on this side.")
        return ConnectionLost(f"The connection to {self.peer} was lost: {error.strerror or error}.")

    async def send(self, *buffers: Buffer) -> None:
        pending = deque(view for view in map(bytes_of, buffers) if view)
        try:
            while pending:
                sent = await self._sock.sendmsg(list(itertools.islice(pending, _IOV_MAX)))
                while pending and sent >= len(pending[0]):
                    sent -= len(pending.popleft())
                if sent:
                    pending[0] = pending[0][sent:]
        except (OSError, trio.ClosedResourceError) as error:
            raise self._lost(error) from error

    async def recv_into(self, buffer: memoryview) -> int:
        try:
            return await self._sock.recv_into(buffer)
        except (OSError, trio.ClosedResourceError) as error:
            raise self._lost(error) from error

    async def recv_exactly(self, buffer: memoryview) -> int:
        """Large pieces are waited for by the mebibyte: taking every segment as it comes would cost more than it is."""
        buffer = bytes_of(buffer)
        if len(buffer) < _PATIENT_BYTES:
            return await super().recv_exactly(buffer)
        done = lowest = 0
        try:
            while True:
                with contextlib.suppress(BlockingIOError):
                    count = os.readv(self._sock.fileno(), [buffer[done:]])
                    done += count
                    if count == 0 or done == len(buffer):
                        break
                if lowest != min(len(buffer) - done, _WAKE_BYTES):
                    lowest = min(len(buffer) - done, _WAKE_BYTES)
                    self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, lowest)
                await trio.lowlevel.wait_readable(self._sock)
        except (OSError, trio.ClosedResourceError) as error:
            raise self._lost(error) from error
        finally:
            if lowest:
                with contextlib.suppress(OSError):
                    self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, 1)
        if not lowest:
            await trio.lowlevel.checkpoint()
        return done

    async def send_file(self, fd: int, offset_bytes: int, count_bytes: int) -> None:
        try:
            if self._is_local:
                await self._send_copies(fd, offset_bytes, count_bytes)
                return
            while count_bytes:
                try:  # the descriptor is asked for each time: another task may have closed the socket meanwhile
                    sent = os.sendfile(self._sock.fileno(), fd, offset_bytes, count_bytes)
                except BlockingIOError:
                    await trio.lowlevel.wait_writable(self._sock)
                    continue
                if sent == 0:
                    raise self._ended_early(count_bytes)
                offset_bytes += sent
                count_bytes -= sent
                await trio.lowlevel.checkpoint()
        except (OSError, trio.ClosedResourceError) as error:
            raise self._lost(error) from error

    async def _send_copies(self, fd: int, offset_bytes: int, count_bytes: int) -> None:
        """On this very machine the receiver is handed what was just copied, and still in the processor's cache, at
        less cost than the pages of the file one by one."""
        buffer = _spare_copies.pop() if _spare_copies else memoryview(bytearray(_COPY_BYTES))
        sent = 0  # since others had their turn
        try:
            while count_bytes:
                piece = buffer[: await self._read(fd, buffer[:count_bytes], offset_bytes)]
                if not piece:
                    raise self._ended_early(count_bytes)
                offset_bytes += len(piece)
                count_bytes -= len(piece)
                while piece:
                    try:
                        written = os.write(self._sock.fileno(), piece)
                    except BlockingIOError:
                        await trio.lowlevel.wait_writable(self._sock)
                        sent = 0
                    else:
                        piece = piece[written:]
                        sent += written
                if sent >= _TURN_BYTES:
                    await trio.lowlevel.checkpoint()
                    sent = 0
            await trio.lowlevel.checkpoint()
        finally:
            if len(_spare_copies) < _SPARE_COPIES:
                _spare_copies.append(buffer)

    async def _read(self, fd: int, buffer: memoryview, offset_bytes: int) -> int:
        try:
            return os.preadv(fd, [buffer], offset_bytes, os.RWF_NOWAIT)
        except OSError as error:
            if error.errno not in (errno.EAGAIN, errno.EOPNOTSUPP):
                raise
        return await trio.to_thread.run_sync(os.preadv, fd, [buffer], offset_bytes)

    def _ended_early(self, missing_bytes: int) -> ConnectionLost:
        return ConnectionLost(f"A file ended {missing_bytes} bytes early while it was sent to {self.peer}.")

    async def aclose(self) -> None:
        self._sock.close()
        await trio.lowlevel.checkpoint()


class SocketListener(Listener):
    """A :class:`Listener` over a trio socket."""

    def __init__(self, sock: trio.socket.SocketType) -> None:
        self._sock = sock
        self.host, self.port = sock.getsockname()[:2]

    async def accept(self) -> Stream:
        while True:
            try:
                sock, address = await self._sock.accept()
            except trio.ClosedResourceError as error:
                raise ConnectionLost(f"The listener on {self.host}:{self.port} failed: it was closed.") from error
            except OSError as error:
                if error.errno in (errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOBUFS):
                    await trio.sleep(0.1)  # out of descriptors for now: clients wait in the backlog
                    continue
                if error.errno in (errno.ECONNABORTED, errno.EINTR, errno.EPROTO):
                    continue
                reason = "it was closed" if error.errno == errno.EBADF else error.strerror or str(error)
                raise ConnectionLost(f"The listener on {self.host}:{self.port} failed: {reason}.") from error
            return SocketStream(sock, f"{address[0]}:{address[1]}")

    async def aclose(self) -> None:
        self._sock.close()
        await trio.lowlevel.checkpoint()


class RealNetwork(Network):
    async def connect(self, host: str, port: int) -> Stream:
        last: OSError | None = None
        check_connect_port(host, port)
        try:
            found = await trio.socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        except (OSError, UnicodeError) as error:
            raise cannot_resolve(host, _reason(error)) from error
        for family, kind, protocol, _, address in found:
            sock = trio.socket.socket(family, kind, protocol)
            try:
                await sock.connect(address)
            except OSError as error:
                sock.close()
                last = error
            except BaseException:
                sock.close()
                raise
            else:
                return SocketStream(sock, f"{host}:{port}")
        raise cannot_connect(host, port, _reason(last) if last else "no address") from last

    async def listen(self, host: str, port: int) -> Listener:
        sock = None
        check_listen_port(host, port)
        try:
            family, kind, protocol, _, address = (
                await trio.socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
            )[0]
            sock = trio.socket.socket(family, kind, protocol)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            await sock.bind(address)
            sock.listen(1024)
        except (OSError, UnicodeError) as error:
            if sock is not None:
                sock.close()
            number = error.errno if isinstance(error, OSError) and not isinstance(error, socket.gaierror) else None
            raise cannot_listen(host, port, _reason(error), number or errno.EADDRNOTAVAIL) from error
        return SocketListener(sock)

    def hostname(self) -> str:
        return socket.gethostname()


# ----------------------------------------------------------------------------------------------------------- disk


@dataclass(frozen=True, slots=True)
class DirectIo:
    """What ``statx`` says about direct I/O on a file. Zero means: refused, or unknown to the kernel."""

    memory_alignment_bytes: int
    offset_alignment_bytes: int


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
    def lock(self, fd: int, *, shared: bool = False, wait: bool = False) -> bool:
        """``flock``; False when somebody else holds it. The lock goes with the last descriptor, or the process."""

    @abc.abstractmethod
    def direct_io(self, fd: int) -> DirectIo:
        """Alignment that ``O_DIRECT`` needs on this file, as the kernel tells it."""

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


#: The same number on every architecture (Linux 6.5).
_SYS_CACHESTAT = 451
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
        return os.open(path, flags | os.O_CLOEXEC, mode)

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
        if self._renameat2 is not None:
            names = (os.fsencode(source), os.fsencode(target))
            if self._renameat2(_AT_FDCWD, names[0], _AT_FDCWD, names[1], _RENAME_NOREPLACE) == 0:
                return
            number = ctypes.get_errno()
            if number not in (errno.EINVAL, errno.ENOSYS):
                raise OSError(number, os.strerror(number), source, None, target)
        super().rename_noreplace(source, target)

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

    def ring(self, entries: int) -> Ring:
        return kernel_ring(entries)


# -------------------------------------------------------------------------------------------------------- threads


class ThreadHandle(Protocol):
    """A running plain thread."""

    def join(self, timeout: float | None = None) -> None: ...

    def is_alive(self) -> bool: ...


class Threads(abc.ABC):
    """Worker threads, and the primitives that plain threads meet at.

    In the simulation a started thread runs to its end at once and :meth:`run` runs inline, so code that hands work
    to a pool through :meth:`pool` behaves the same, only in one order per seed.
    """

    @abc.abstractmethod
    async def run(self, function: Callable[[*Ts], T], *args: *Ts, abandon_on_cancel: bool = False) -> T:
        """Run a blocking function in a worker thread and wait for it in a trio task."""

    @abc.abstractmethod
    def start(self, function: Callable[[], None], *, name: str) -> ThreadHandle:
        """Start a daemon thread."""

    @abc.abstractmethod
    def pool(self, size: int, *, name: str) -> ThreadPool:
        """A pool of ``size`` threads that serve one queue; whoever submits bounds what is in flight."""

    def lock(self) -> threading.Lock:
        return threading.Lock()

    def condition(self) -> threading.Condition:
        return threading.Condition()

    def event(self) -> threading.Event:
        return threading.Event()


class ThreadPool(abc.ABC):
    """Threads that run submitted jobs. A job is a function without arguments that reports its own outcome."""

    @abc.abstractmethod
    def submit(self, job: Callable[[], None]) -> None:
        """Queue a job. Raises CurvfsError once the pool is closed."""

    @abc.abstractmethod
    def close(self, timeout_s: float | None = None) -> bool:
        """Run what is queued, stop the threads; False when one was still busy after ``timeout_s``."""


class RealThreads(Threads):
    async def run(self, function: Callable[[*Ts], T], *args: *Ts, abandon_on_cancel: bool = False) -> T:
        return await trio.to_thread.run_sync(function, *args, abandon_on_cancel=abandon_on_cancel)

    def start(self, function: Callable[[], None], *, name: str) -> ThreadHandle:
        thread = threading.Thread(target=function, name=name, daemon=True)
        thread.start()
        return thread

    def pool(self, size: int, *, name: str) -> ThreadPool:
        return RealThreadPool(self, size, name)


class RealThreadPool(ThreadPool):
    def __init__(self, threads: Threads, size: int, name: str) -> None:
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._closed = False
        self._lock = threading.Lock()
        self._workers = [threads.start(self._work, name=f"{name}-{index}") for index in range(size)]

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            job()

    def submit(self, job: Callable[[], None]) -> None:
        with self._lock:
            if self._closed:
                raise CurvfsError("The thread pool is closed; no more work is taken.")
            self._jobs.put(job)

    def close(self, timeout_s: float | None = None) -> bool:
        with self._lock:
            if not self._closed:
                self._closed = True
                for _ in self._workers:
                    self._jobs.put(None)
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        for worker in self._workers:
            worker.join(None if deadline is None else max(0.0, deadline - time.monotonic()))
        return not any(worker.is_alive() for worker in self._workers)


# ---------------------------------------------------------------------------------------------------------- world


@dataclass(frozen=True)
class World:
    """The five parts, handed down from whoever starts: a command, a daemon, a library's ``open``, or a test."""

    clock: Clock = field(default_factory=RealClock)
    random: Random = field(default_factory=Random)
    net: Network = field(default_factory=RealNetwork)
    disk: Disk = field(default_factory=RealDisk)
    threads: Threads = field(default_factory=RealThreads)

    @classmethod
    def real(cls) -> World:
        """The real machine, with random numbers seeded by the operating system."""
        return cls()

    def process_id(self) -> int:
        """The number of this process on its machine."""
        return os.getpid()

    @classmethod
    def simulated(cls, seed: int) -> World:
        """A world made of one seed; run it under :func:`curvfs.simworld.run`."""
        from curvfs.simworld import simulated_world

        return simulated_world(seed)
