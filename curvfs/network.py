"""What the network of the one world (:mod:`curvfs.world`) is; :mod:`curvfs.sockets` is the real one.

Raises :class:`~curvfs.errors.TransportError` only.
"""

from __future__ import annotations

import abc
import errno

from curvfs.buffers import Buffer, bytes_of
from curvfs.errors import ConnectFailed, EnvironmentError_


class Stream(abc.ABC):
    """A connected byte stream. One task may send while another receives; two senders need a lock."""

    #: ``host:port`` of the other end, for messages.
    peer: str = "?"

    @abc.abstractmethod
    async def send(self, *buffers: Buffer) -> None:
        """Send all bytes of all buffers, gathered, without joining them. Raises ConnectionLost."""

    def send_now(self, data: Buffer) -> int:
        """Send as much as goes without waiting, while nobody else is sending: how many bytes that were. A failure shows
        with what is sent or received next."""
        return 0

    @abc.abstractmethod
    async def recv_into(self, buffer: memoryview) -> int:
        """Receive at least one byte into ``buffer``; 0 means that the peer closed. Raises ConnectionLost."""

    @abc.abstractmethod
    async def send_file(self, fd: int, offset_bytes: int, count_bytes: int, prefix: Buffer = b"") -> None:
        """Send ``prefix``, and behind it, in the same segment, bytes of an open file without copying them. The file
        must hold them all: a file that ends early raises ConnectionLost, because the frame under way can no longer be
        finished."""

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

    def send_datagram(self, address: str, content: bytes) -> None:
        """One datagram to a Unix socket of this machine; ``@name`` is an abstract one. Raises ConnectFailed."""
        raise ConnectFailed(f"There is no socket {address} here.")


_PORT_MAX = 65535


def host_port(host: str, port: int) -> str:
    """``host:port`` for messages and URLs; an IPv6 address stands in brackets."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def cannot_connect(host: str, port: int, reason: str) -> ConnectFailed:
    """The error of every network for a connect that failed."""
    return ConnectFailed(f"Cannot connect to {host_port(host, port)}: {reason}.")


def cannot_resolve(host: str, reason: str) -> ConnectFailed:
    """The error of every network for a name that leads nowhere."""
    return ConnectFailed(f"The host name {host!r} cannot be resolved: {reason}.")


_LISTEN_HINTS = {
    errno.EADDRINUSE: "stop the program that has the port, or choose another port (0 picks a free one)",
    errno.EACCES: "choose a port from 1024 up, or run with the right to use this one",
    errno.EINVAL: "choose another port (0 picks a free one)",
}


def cannot_listen(host: str, port: int, reason: str, errno_: int) -> EnvironmentError_:
    """The error of every network for an address that cannot be had."""
    hint = _LISTEN_HINTS.get(errno_, "choose an address of this machine, such as 127.0.0.1, or 0.0.0.0 for all of them")
    return EnvironmentError_(f"Cannot listen on {host_port(host, port)}: {reason}; {hint}.", errno_=errno_)


def check_connect_port(host: str, port: int) -> None:
    if not 0 < port <= _PORT_MAX:
        raise cannot_connect(host, port, f"a port is a number from 1 to {_PORT_MAX}")


def check_listen_port(host: str, port: int) -> None:
    if not 0 <= port <= _PORT_MAX:
        raise cannot_listen(host, port, f"a port is a number from 0 to {_PORT_MAX}", errno.EINVAL)
