"""The error record: what the data section of an error reply holds.

::

    i32  error kind
    u32  length n of the message
         n bytes of UTF-8
    u32  length of the extra data (ours: 0; a peer's is ignored)

Source: specification section 1.7. What the kinds mean: :data:`curvfs.errors.KINDS`.
"""

from __future__ import annotations

import struct

from curvfs.errors import KIND_COMMON, KINDS

_KIND_AND_LENGTH = struct.Struct(">iI")
_NO_EXTRA = b"\0\0\0\0"

#: Longer messages are cut when encoded, so that a record always fits a frame.
MAX_TEXT_BYTES = 64 * 1024

#: Timeout, PBDecode and PBEncode of a peer are I/O errors to us, as they are to the Rust client.
_FOLDED_INTO_IO = frozenset((4, 5, 6))
_KIND_IO = 1


def encode_error(kind: int, text: str) -> bytes:
    """The record for an error reply; ``text`` is cut at 64 KiB, characters that have no UTF-8 become ``?``."""
    message = text.encode("utf-8", "replace")
    if len(message) > MAX_TEXT_BYTES:
        message = message[:MAX_TEXT_BYTES].decode("utf-8", "ignore").encode()
    return _KIND_AND_LENGTH.pack(kind, len(message)) + message + _NO_EXTRA


def decode_error(data: bytes | bytearray | memoryview) -> tuple[int, str]:
    """Kind and message of an error record; never fails, whatever the bytes are.

    Fewer than 8 bytes are a message of kind Common, a length beyond the end takes what is there, and kinds nobody
    knows are Common.
    """
    raw = bytes(data)
    if len(raw) < _KIND_AND_LENGTH.size:
        return KIND_COMMON, raw.decode("utf-8", "replace")
    kind, length = _KIND_AND_LENGTH.unpack_from(raw)
    text = raw[_KIND_AND_LENGTH.size : _KIND_AND_LENGTH.size + length].decode("utf-8", "replace")
    if kind in _FOLDED_INTO_IO:
        kind = _KIND_IO
    return (kind if kind in KINDS else KIND_COMMON), text
