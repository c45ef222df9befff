"""Frames over a byte stream: heads, headers and payload, each received where it is wanted, none copied twice.

One task receives and one sends (several senders need a lock: the callers here have one). Every method raises
ConnectionLost when the connection goes in mid-frame and RemoteProtocolError for bytes that are no frame; after either
the stream must be closed. Deadlines are the caller's cancel scopes.
"""

from __future__ import annotations

from curvfs.errors import ConnectionLost, ProtocolError
from curvfs.units import MIB
from curvfs.wire.frame import FIXED_BYTES, MAX_HEADER_BYTES, FrameHead, decode_head
from curvfs.world import Buffer, Stream


class FrameStream:
    """A stream of frames.

    ``read_ahead_bytes`` is how much may be received beyond the frame at hand: worth it where many small frames come
    back to back (a master connection), and zero where payload must land in the caller's buffer (a block stream).
    A header may be far above 16 MiB (specification 1.1), so its bound is apart: ``max_header_bytes``.
    """

    def __init__(self, stream: Stream, *, read_ahead_bytes: int = 0, max_header_bytes: int = MAX_HEADER_BYTES) -> None:
        self._stream = stream
        self._max_header_bytes = max_header_bytes
        self._start = 0
        self._end = 0
        self._buffer = memoryview(b"")
        self.read_ahead(read_ahead_bytes)

    @property
    def peer(self) -> str:
        """``host:port`` of the other end."""
        return self._stream.peer

    def read_ahead(self, size_bytes: int) -> None:
        """From now on so many bytes may be received beyond the frame at hand."""
        self._ahead_bytes = max(FIXED_BYTES, size_bytes)
        if self._ahead_bytes > len(self._buffer):
            buffer = memoryview(bytearray(self._ahead_bytes))
            buffer[: self._end] = self._buffer[: self._end]
            self._buffer = buffer

    @property
    def has_more(self) -> bool:
        """Head and header of another frame, which is no heartbeat, have come already."""
        received = self._end - self._start
        if received < FIXED_BYTES:
            return False
        try:
            head = decode_head(
                self._buffer[self._start : self._start + FIXED_BYTES], max_header_bytes=self._max_header_bytes
            )
        except ProtocolError:
            return False  # whoever receives it says so
        return received >= FIXED_BYTES + head.header_len and not (head.is_heartbeat or head.is_empty)

    async def send(self, prefix: Buffer, *payload: Buffer) -> None:
        """Send a frame whose head and header are ``prefix``."""
        await self._stream.send(prefix, *payload)

    def send_now(self, prefix: Buffer) -> int:
        """Send as much of a frame without payload as goes without waiting; see :meth:`Stream.send_now`."""
        return self._stream.send_now(prefix)

    async def aclose(self) -> None:
        """Close; never raises."""
        await self._stream.aclose()

    async def recv_head(self) -> FrameHead | None:
        """The next frame's head, or None when the peer closed: between frames, inside a head, or by the empty message
        (specification 1.1 and 1.2). Heartbeats are dropped (1.4)."""
        while True:
            while self._end - self._start < FIXED_BYTES:
                if not await self._receive_more():
                    return None
            fixed = self._buffer[self._start : self._start + FIXED_BYTES]
            head = decode_head(fixed, max_header_bytes=self._max_header_bytes)
            self._start += FIXED_BYTES
            if head.is_empty:
                return None
            if not head.is_heartbeat:
                return head
            await self.discard(head.header_len + head.data_len)

    async def recv_header(self, head: FrameHead) -> bytes:
        """The header of the frame whose head was just received."""
        return await self._receive_bytes(head.header_len)

    async def recv_data(self, head: FrameHead, into: memoryview | None = None) -> bytes | int:
        """The data of that frame, after its header: as bytes, or into ``into``, which must hold ``head.data_len``."""
        if into is None:
            return await self._receive_bytes(head.data_len)
        await self.recv_exactly(into[: head.data_len])
        return head.data_len

    async def recv_exactly(self, buffer: memoryview) -> None:
        """Fill ``buffer`` with the next bytes of the frame."""
        buffered = min(len(buffer), self._end - self._start)
        if buffered:
            buffer[:buffered] = self._buffer[self._start : self._start + buffered]
            self._start += buffered
            buffer = buffer[buffered:]
        if len(buffer) and await self._stream.recv_exactly(buffer) < len(buffer):
            raise ConnectionLost(f"{self.peer} closed the connection in the middle of a frame.")

    async def discard(self, count_bytes: int) -> None:
        """Receive bytes of the frame and forget them."""
        scratch: memoryview | None = None
        while count_bytes:
            if scratch is None:
                scratch = memoryview(bytearray(min(count_bytes, MIB)))
            part = scratch[:count_bytes]
            await self.recv_exactly(part)
            count_bytes -= len(part)

    async def _receive_bytes(self, length_bytes: int) -> bytes:
        if length_bytes <= 0:
            return b""
        if length_bytes <= self._end - self._start:
            found = bytes(self._buffer[self._start : self._start + length_bytes])
            self._start += length_bytes
            return found
        # What a peer announces is allocated only as it arrives.
        received = bytearray()
        while len(received) < length_bytes:
            done = len(received)
            received.extend(bytes(min(length_bytes - done, max(MIB, done))))
            with memoryview(received) as view:
                await self.recv_exactly(view[done:])
        return bytes(received)

    async def _receive_more(self) -> bool:
        if self._start:
            rest = self._end - self._start
            if rest:
                self._buffer[:rest] = bytes(self._buffer[self._start : self._end])
            self._start, self._end = 0, rest
        count = await self._stream.recv_into(self._buffer[self._end : self._ahead_bytes])
        self._end += count
        return count > 0
