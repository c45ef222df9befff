"""One object: what it says that it is, and whether its checksums hold."""

from __future__ import annotations

from itertools import accumulate
from typing import Any

from curvfs.errors import CurvfsError
from kvstore.header import (
    ALIGNMENT_BYTES,
    BadObject,
    NewerFormat,
    ObjectHeader,
    StoredTensor,
    damaged_unit_in,
    header_length,
    read_header,
    stored_tensors,
)
from tools.inspect.sources import Source

#: Checked at once, in whole units.
_STEP_BYTES = 16 << 20


def describe_object(source: Source, *, verify: bool) -> dict[str, Any]:
    """Everything about one object. ``verdict``: ``sound``, ``unverified``, ``damaged`` or ``newer``, with ``reason``.

    Raises CurvfsError when its bytes cannot be read.
    """
    report: dict[str, Any] = {**source.told(), "length_bytes": source.length_bytes}
    try:
        header = _header(source)
        tensors = stored_tensors(header)
    except NewerFormat as error:
        return report | {"verdict": "newer", "reason": str(error)}
    except BadObject as error:
        return report | {"verdict": "damaged", "reason": str(error)}
    report |= _said(header, tensors)
    if not verify:
        return report | {"verdict": "unverified", "reason": "its data were not read"}
    damaged = _first_damaged(source, header)
    if damaged is None:
        return report | {"verdict": "sound", "reason": ""}
    return report | {"verdict": "damaged", "reason": _place_of(header, tensors, damaged)}


def _header(source: Source) -> ObjectHeader:
    start = source.read(0, ALIGNMENT_BYTES)
    length = header_length(start, source.length_bytes)
    return read_header(memoryview(source.read(0, length)), source.length_bytes)


def _said(header: ObjectHeader, tensors: list[StoredTensor]) -> dict[str, Any]:
    said = header.metadata
    return {
        "format": said.get("format", ""),
        "key": said.get("key", ""),
        "identity": said.get("identity", ""),
        "shard": said.get("shard", ""),
        "tokens": said.get("tokens", ""),
        "token_digest": said.get("token_digest", ""),
        "codec": said.get("codec", ""),
        "writer": said.get("writer", ""),
        "created_ms": int(said["created_ms"]) if _is_time(said.get("created_ms", "")) else None,
        "header_bytes": header.header_bytes,
        "data_bytes": header.data_bytes,
        "units": len(header.unit_lengths),
        "tensors": [
            {
                "name": tensor.name,
                "dtype": tensor.dtype,
                "shape": list(tensor.shape),
                "offset_bytes": header.header_bytes + tensor.offset_bytes,
                "size_bytes": tensor.size_bytes,
            }
            for tensor in tensors
        ],
    }


def _is_time(text: str) -> bool:
    return text.isdecimal() and len(text) <= 20


def _first_damaged(source: Source, header: ObjectHeader) -> int | None:
    """Number of the first unit whose checksum does not hold."""
    first, at = 0, header.header_bytes
    while first < len(header.unit_lengths):
        count = size = 0
        while first + count < len(header.unit_lengths) and size < _STEP_BYTES:
            size += header.unit_lengths[first + count]
            count += 1
        content = source.read(at, size)
        if len(content) < size:
            raise CurvfsError(
                f"The object ended after {at + len(content)} bytes; it was replaced meanwhile, try again."
            )
        damaged = damaged_unit_in(header, [memoryview(content)], first, count)
        if damaged is not None:
            return damaged
        first, at = first + count, at + size
    return None


def _place_of(header: ObjectHeader, tensors: list[StoredTensor], unit: int) -> str:
    """Where a damaged unit lies, in words."""
    begin = [0, *accumulate(header.unit_lengths)][unit]
    end = begin + header.unit_lengths[unit]
    inside = [
        tensor.name
        for tensor in tensors
        if tensor.offset_bytes < end and begin < tensor.offset_bytes + tensor.size_bytes
    ]
    where = f"tensor {', '.join(inside)}" if inside else "padding"
    at = header.header_bytes + begin
    return f"the checksum of unit {unit} does not hold: bytes {at} to {at + header.unit_lengths[unit] - 1}, {where}"
