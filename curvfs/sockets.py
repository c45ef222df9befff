"""The real network of the one world (:mod:`curvfs.world`): TCP on trio.

A module of its own because trio takes as long to import as all the rest that a store of a directory needs.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
import socket
from collections import deque

import trio

from curvfs.buffers import Buffer, bytes_of
from curvfs.errors import ConnectionLost
from curvfs.network import (
    Listener,
    Stream,
    cannot_connect,
    cannot_listen,
    cannot_resolve,
    check_connect_port,
    check_listen_port,
    host_port,
)

#: What is sent at once, without giving others their turn first.
_SMALL_BYTES = 64 * 1024
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
_WAKE_BYTES = 512 * 1024
#: What may be under way on this very machine: more only makes both sides work on memory that no cache holds any more.
_LOCAL_SEND_BYTES = 512 * 1024
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
            if self._is_local:
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _LOCAL_SEND_BYTES)
        except OSError:  # lost before it was begun with
            self._is_local = False

    def _lost(self, error: OSError | trio.ClosedResourceError) -> ConnectionLost:
        if isinstance(error, trio.ClosedResourceError) or error.errno == errno.EBADF:
            return ConnectionLost(f"The connection to {self.peer} was lost: it was closed on this side.")
        return ConnectionLost(f"The connection to {self.peer} was lost: {error.strerror or error}.")

    def send_now(self, data: Buffer) -> int:
        try:
            return os.write(self._sock.fileno(), data)
        except OSError:
            return 0

    async def send(self, *buffers: Buffer) -> None:
        pending = deque(view for view in map(bytes_of, buffers) if view)
        try:
            if sum(map(len, pending)) <= _SMALL_BYTES and len(pending) <= _IOV_MAX:
                await trio.lowlevel.checkpoint_if_cancelled()
                with contextlib.suppress(BlockingIOError):
                    # Mostly there is room, and an answer is waited for next: no turn of the others is missed.
                    self._sent(pending, os.writev(self._sock.fileno(), pending))
            while pending:
                self._sent(pending, await self._sock.sendmsg(list(itertools.islice(pending, _IOV_MAX))))
        except (OSError, trio.ClosedResourceError) as error:
            raise self._lost(error) from error

    @staticmethod
    def _sent(pending: deque[memoryview], count_bytes: int) -> None:
        while pending and count_bytes >= len(pending[0]):
            count_bytes -= len(pending.popleft())
        if count_bytes:
            pending[0] = pending[0][count_bytes:]

    async def recv_into(self, buffer: memoryview) -> int:
        try:
            return await self._sock.recv_into(buffer)
        except (OSError, trio.ClosedResourceError) as error:
            raise self._lost(error) from error

    async def recv_exactly(self, buffer: memoryview) -> int:
        """Large pieces are waited for in parts of some size: taking every segment as it comes would cost too much."""
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

    async def send_file(self, fd: int, offset_bytes: int, count_bytes: int, prefix: Buffer = b"") -> None:
        head = bytes_of(prefix)
        try:
            if self._is_local:
                await self._send_copies(head, fd, offset_bytes, count_bytes)
                return
            while head:
                head = head[await self._sock.send(head, socket.MSG_MORE if count_bytes else 0) :]
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

    async def _send_copies(self, head: memoryview, fd: int, offset_bytes: int, count_bytes: int) -> None:
        """On this very machine the receiver is handed what was just copied, and still in the processor's cache, at
        less cost than the pages of the file one by one."""
        buffer = _spare_copies.pop() if _spare_copies else memoryview(bytearray(_COPY_BYTES))
        sent = 0  # since others had their turn
        try:
            while count_bytes or head:
                piece = (
                    buffer[: await self._read(fd, buffer[:count_bytes], offset_bytes)] if count_bytes else buffer[:0]
                )
                if count_bytes and not piece:
                    raise self._ended_early(count_bytes)
                offset_bytes += len(piece)
                count_bytes -= len(piece)
                while piece or head:
                    try:
                        written = os.writev(self._sock.fileno(), [head, piece])
                    except BlockingIOError:
                        await trio.lowlevel.wait_writable(self._sock)
                        sent = 0
                        continue
                    sent += written
                    of_head = min(written, len(head))
                    head, piece = head[of_head:], piece[written - of_head :]
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
        self._name = f"The listener on {host_port(self.host, self.port)}"

    async def accept(self) -> Stream:
        while True:
            try:
                sock, address = await self._sock.accept()
            except trio.ClosedResourceError as error:
                raise ConnectionLost(f"{self._name} failed: it was closed.") from error
            except OSError as error:
                if error.errno in (errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOBUFS):
                    await trio.sleep(0.1)  # out of descriptors for now: clients wait in the backlog
                    continue
                if error.errno in (errno.ECONNABORTED, errno.EINTR, errno.EPROTO):
                    continue
                reason = "it was closed" if error.errno == errno.EBADF else error.strerror or str(error)
                raise ConnectionLost(f"{self._name} failed: {reason}.") from error
            return SocketStream(sock, host_port(*address[:2]))

    async def aclose(self) -> None:
        self._sock.close()
        await trio.lowlevel.checkpoint()


async def connect(host: str, port: int) -> Stream:
    """See :meth:`curvfs.network.Network.connect`."""
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
            return SocketStream(sock, host_port(host, port))
    raise cannot_connect(host, port, _reason(last) if last else "no address") from last


async def listen(host: str, port: int) -> Listener:
    """See :meth:`curvfs.network.Network.listen`."""
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
