"""Frames: the unit of everything that crosses a Curvine connection, in both directions.

All numbers big-endian; there is no magic, no version and no checksum::

    offset  size  type  field
         0     4  i32   total_len    bytes after this field = 18 + header_len + data_len
         4     4  i32   header_len   bytes of the protobuf header, 0 = absent
         8     1  i8    code         RPC code
         9     1  u8    status       request status (low nibble), response status (high nibble)
        10     8  i64   req_id
        18     4  i32   seq_id
        22              header       header_len bytes
        22+header_len   data         data_len bytes: block data, or the error record

Source: specification section 1.1.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

from curvfs.errors import LocalProtocolError, RemoteProtocolError
from curvfs.units import GIB, MIB
from curvfs.wire.codes import (
    NO_REQ_ID,
    UNARY_SEQ_ID,
    RequestStatus,
    ResponseStatus,
    decode_status,
    encode_status,
)

#: Size of the fixed part in front of header and data.
FIXED_BYTES = 22
#: What total_len counts besides header and data: the fixed part without total_len itself.
_COUNTED_BYTES = FIXED_BYTES - 4
#: Largest data section, inclusive.
MAX_DATA_BYTES = 16 * MIB
#: Largest header that we accept. The protocol has no limit: listings travel in the header and pass 16 MiB.
MAX_HEADER_BYTES = GIB
#: Largest header of a request: our servers take no more, and nothing that a client asks for needs as much.
MAX_REQUEST_HEADER_BYTES = 64 * MIB

_MAX_TOTAL = (1 << 31) - 1
_HEAD = struct.Struct(">iibBqi")


@dataclass(frozen=True, slots=True)
class FrameHead:
    """The fixed part of a frame. ``header_len`` and ``data_len`` count the bytes that follow it."""

    code: int
    request: RequestStatus
    response: ResponseStatus
    req_id: int
    seq_id: int
    header_len: int
    data_len: int

    @property
    def is_heartbeat(self) -> bool:
        """Keep-alive: read it, drop it, never answer it."""
        return self.request is RequestStatus.HEARTBEAT

    @property
    def is_empty(self) -> bool:
        """Both statuses undefined: whoever receives this treats the connection as closed."""
        return self.request is RequestStatus.UNDEFINED and self.response is ResponseStatus.UNDEFINED

    @property
    def is_request(self) -> bool:
        return self.response is ResponseStatus.UNDEFINED


def decode_head(buffer: bytes | bytearray | memoryview, *, max_header_bytes: int = MAX_HEADER_BYTES) -> FrameHead:
    """The head at the start of ``buffer`` (at least 22 bytes; more is ignored).

    Raises :class:`RemoteProtocolError` on negative lengths, on a data section over 16 MiB and on a header over
    ``max_header_bytes``: the connection cannot be used any further, and the peer gets no answer.
    """
    if len(buffer) < FIXED_BYTES:
        raise RemoteProtocolError(f"A frame starts with {FIXED_BYTES} bytes, but only {len(buffer)} came.")
    total_len, header_len, code, status, req_id, seq_id = _HEAD.unpack_from(buffer)
    data_len = total_len - header_len - _COUNTED_BYTES
    if header_len < 0 or data_len < 0:
        raise RemoteProtocolError(
            f"The peer sent a frame with impossible lengths (total {total_len}, header {header_len}); "
            "is this a Curvine port?"
        )
    if header_len > max_header_bytes:
        raise RemoteProtocolError(
            f"The peer announces a header of {header_len} bytes; at most {max_header_bytes} are accepted."
        )
    if data_len > MAX_DATA_BYTES:
        raise RemoteProtocolError(f"The peer announces {data_len} bytes of data; the protocol allows {MAX_DATA_BYTES}.")
    request, response = decode_status(status)
    return FrameHead(code, request, response, req_id, seq_id, header_len, data_len)


def encode_head(
    code: int,
    request: RequestStatus,
    response: ResponseStatus,
    req_id: int,
    seq_id: int,
    header_len: int,
    data_len: int,
) -> bytes:
    """The 22 bytes in front of a header of ``header_len`` and data of ``data_len`` bytes.

    Raises :class:`LocalProtocolError` for numbers that do not fit a frame.
    """
    total_len = _COUNTED_BYTES + header_len + data_len
    if header_len < 0 or not 0 <= data_len <= MAX_DATA_BYTES or total_len > _MAX_TOTAL:
        raise LocalProtocolError(
            f"A frame cannot carry {header_len} bytes of header and {data_len} bytes of data; "
            f"split the data into pieces of at most {MAX_DATA_BYTES} bytes."
        )
    try:
        return _HEAD.pack(total_len, header_len, code, encode_status(request, response), req_id, seq_id)
    except struct.error as error:
        raise LocalProtocolError(
            f"A frame cannot carry code {code}, req_id {req_id}, seq_id {seq_id}: {error}"
        ) from error


@dataclass(frozen=True, slots=True)
class Frame:
    """A whole frame: head, protobuf header and data section."""

    head: FrameHead
    header: bytes = b""
    data: bytes = b""

    @classmethod
    def make(
        cls,
        code: int,
        request: RequestStatus,
        response: ResponseStatus,
        req_id: int,
        seq_id: int,
        header: bytes = b"",
        data: bytes = b"",
    ) -> Frame:
        """A frame whose lengths follow from ``header`` and ``data``."""
        return cls(FrameHead(code, request, response, req_id, seq_id, len(header), len(data)), header, data)

    def encode(self) -> bytes:
        """The bytes of the frame, joined. (Payload that matters is sent beside its prefix instead.)"""
        head = self.head
        prefix = encode_head(
            head.code,
            head.request,
            head.response,
            head.req_id,
            head.seq_id,
            len(self.header),
            len(self.data),
        )
        return b"".join((prefix, self.header, self.data))


#: A heartbeat. Both sides drop it; it keeps no master connection alive (section 1.4).
HEARTBEAT = Frame.make(0, RequestStatus.HEARTBEAT, ResponseStatus.UNDEFINED, NO_REQ_ID, UNARY_SEQ_ID).encode()


class FrameDecoder:
    """Cuts one direction of a byte stream into frames, however the bytes are split.

    Lengths are checked as soon as the 22 bytes of a head are there, so a hostile peer cannot make it collect more
    than one frame of ``max_header_bytes`` + 16 MiB beyond what one ``feed`` brings.
    """

    def __init__(self, *, max_header_bytes: int = MAX_HEADER_BYTES) -> None:
        self._buffer = bytearray()
        self._head: FrameHead | None = None
        self._max_header_bytes = max_header_bytes

    @property
    def pending_bytes(self) -> int:
        """Bytes fed and not yet given out; not 0 at the end of a stream means that it ends inside a frame."""
        return len(self._buffer)

    def feed(self, data: bytes | bytearray | memoryview) -> None:
        """Take bytes that came; call :meth:`next_frame` until it returns None before feeding more."""
        self._buffer += data

    def next_frame(self) -> Frame | None:
        """The next whole frame, None while it is incomplete (heartbeats are given out like any other).

        Raises :class:`RemoteProtocolError` as :func:`decode_head` does, on every call from then on.
        """
        head = self._head
        if head is None:
            if len(self._buffer) < FIXED_BYTES:
                return None
            head = self._head = decode_head(self._buffer, max_header_bytes=self._max_header_bytes)
        data_start = FIXED_BYTES + head.header_len
        end = data_start + head.data_len
        if len(self._buffer) < end:
            return None
        with memoryview(self._buffer) as view:
            frame = Frame(head, bytes(view[FIXED_BYTES:data_start]), bytes(view[data_start:end]))
        del self._buffer[:end]
        self._head = None
        return frame
