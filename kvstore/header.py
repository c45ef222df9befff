"""The object format: a safetensors file whose every tensor can be read by direct I/O, and that proves itself.

::

    offset 0     u64 little-endian N                  8 + N is a multiple of 4096
    offset 8     JSON header, ASCII, padded to N with spaces:
                 {"__metadata__":{"header_sum":"<32 digits>",...},"<tensor>":{...},...}
    8 + N        data: every tensor at a multiple of 4096; the gaps are U8 tensors ".pad.<i>" of zeros;
                 the file's length is a multiple of 4096

``header_sum`` comes first, so its digits lie at bytes 39 to 70 of every object. It is the xxh3_128 of the bytes before
the data, computed with those digits as ``0``. ``unit_sums`` holds the xxh3_128 of every unit (padding included),
``units`` their lengths in file order as ``length*count,...``; together they cover the data without a gap. A dtype that
safetensors lacks is stored as ``U8`` of the true shape; ``dtypes`` names the true one. See ``docs/formats.md``.

Nothing here trusts a byte: lengths are bounded before they are used, and nothing is allocated from what a file says.
"""

from __future__ import annotations

import json
import re
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import xxhash

from curvfs.errors import ConfigError, CurvfsError
from curvfs.units import align_up
from kvstore.geometry import DTYPES, MAX_DIMENSIONS, MAX_PAGE_BYTES, MAX_TENSORS, MAX_UNIT_BYTES, Geometry, TensorSpec
from kvstore.keys import PageKey

FORMAT_VERSION = 1
ALIGNMENT_BYTES = 4096
OBJECT_SUFFIX = ".safetensors"
#: A header larger than this is refused unread.
MAX_HEADER_BYTES = 4 << 20
MAX_FILE_BYTES = MAX_PAGE_BYTES + MAX_HEADER_BYTES + MAX_TENSORS * ALIGNMENT_BYTES
MAX_WRITER_CHARS = 96

_OPENING = b'{"__metadata__":{"header_sum":"'
_SUM_AT = 8 + len(_OPENING)
_SUM_DIGITS = 32
_NO_SUM = b"0" * _SUM_DIGITS
_HEX = frozenset("0123456789abcdef")
_STORED_BYTES = {dtype.stored: dtype.size_bytes for dtype in DTYPES.values()}
_PAD_PREFIX = ".pad."
#: What a writer's name is cleaned of, so that it takes one byte a character.
_UNPLAIN = re.compile(r"[^ !#-\[\]-~]")
#: Digits of a millisecond stamp and of token numbers that room is kept for.
_STAMP_ROOM = 64


class BadObject(CurvfsError):
    """The bytes are not a sound object: damaged, cut off, or something else altogether."""


class NewerFormat(CurvfsError):
    """An object of a later format version than this code knows: sound perhaps, but not for us."""


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor as an object describes it; ``offset_bytes`` counts from the start of the data."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset_bytes: int
    size_bytes: int


@dataclass(frozen=True, slots=True)
class ObjectHeader:
    """A header that was read and found sound. ``table`` is the raw JSON of the tensors, ``metadata`` all strings."""

    header_bytes: int
    metadata: dict[str, str]
    table: bytes
    unit_lengths: tuple[int, ...]
    unit_sums: bytes

    @property
    def data_bytes(self) -> int:
        return sum(self.unit_lengths)


class ObjectLayout:
    """Where everything of one geometry's objects lies. Offsets count from the start of the data."""

    def __init__(self, geometry: Geometry) -> None:
        self.geometry = geometry
        self.tensors: list[tuple[TensorSpec, int]] = []
        #: (offset, length) of every gap; they must hold zeros.
        self.pads: list[tuple[int, int]] = []
        units: list[int] = []
        entries: dict[str, Any] = {}
        true_dtypes: dict[str, str] = {}
        offset = 0
        for spec in geometry.tensors:
            end = offset + spec.size_bytes
            self.tensors.append((spec, offset))
            entries[spec.name] = _entry(spec.dtype.stored, spec.shape, offset, end)
            if spec.dtype.stored == "U8" and spec.dtype.name != "uint8":
                true_dtypes[spec.name] = spec.dtype.name
            after = align_up(end, ALIGNMENT_BYTES)
            if after > end:
                entries[f"{_PAD_PREFIX}{len(self.pads)}"] = _entry("U8", (after - end,), end, after)
                self.pads.append((end, after - end))
            units += _unit_lengths(spec, after - offset)
            offset = after
        self.data_bytes = offset
        self.unit_lengths = tuple(units)
        self.table = json.dumps(entries, separators=(",", ":")).encode()[1:]
        self._dtypes = json.dumps(true_dtypes, separators=(",", ":"), sort_keys=True) if true_dtypes else ""
        self._units = _encode_units(self.unit_lengths)
        digest = bytes(32)
        longest = self._metadata(PageKey(digest, digest, 0, 0, 0, digest, digest), "-" * MAX_WRITER_CHARS, 0)
        room = 8 + len(self._header(longest | {"unit_sums": "0" * 32 * len(units)}, self.table)) + _STAMP_ROOM
        self.header_bytes = align_up(room, ALIGNMENT_BYTES)
        if self.header_bytes > MAX_HEADER_BYTES:
            raise ConfigError(f"A page of {len(units)} units needs too large a header; make its units larger.")
        self.object_bytes = self.header_bytes + self.data_bytes
        _, coded_table, coded_units = _coded("zstd", self.data_bytes)
        longest |= {"codec": "zstd", "tensors": self.table.decode(), "unit_sums": "0" * 32 * len(coded_units)}
        room = 8 + len(self._header(longest, coded_table)) + _STAMP_ROOM
        #: Where the data of a compressed object begin.
        self.coded_header_bytes = align_up(room, ALIGNMENT_BYTES)

    def _metadata(self, key: PageKey, writer: str, created_ms: int) -> dict[str, str]:
        return {
            "header_sum": _NO_SUM.decode(),
            "format": str(FORMAT_VERSION),
            "key": key.hex,
            "identity": key.fingerprint.hex(),
            "shard": self.geometry.shard.label,
            "tokens": f"{key.token_start}+{key.token_count}",
            "token_digest": key.token_digest.hex(),
            "extra_digest": key.extra_digest.hex(),
            "codec": "none",
            "created_ms": str(created_ms),
            "writer": _UNPLAIN.sub("_", writer)[:MAX_WRITER_CHARS],
            "dtypes": self._dtypes,
            "units": self._units,
        }

    @staticmethod
    def _header(metadata: dict[str, str], table: bytes) -> bytes:
        text = json.dumps({"__metadata__": metadata}, separators=(",", ":")).encode()
        return text[:-1] + b"," + table

    def clear_pads(self, view: memoryview) -> None:
        """Put zeros between the tensors of ``view``, an object in the making."""
        for offset, length in self.pads:
            at = self.header_bytes + offset
            view[at : at + length] = bytes(length)

    def seal(self, view: memoryview, key: PageKey, *, writer: str, created_ms: int) -> None:
        """Turn ``view`` (``object_bytes`` long, payload in its places) into an object: padding, checksums, header."""
        self.clear_pads(view)
        metadata = self._metadata(key, writer, created_ms)
        self._finish(view, self.header_bytes, metadata, self.unit_lengths, self.table)

    def seal_coded(
        self, view: memoryview, packed: bytes, codec: str, key: PageKey, *, writer: str, created_ms: int
    ) -> int:
        """Turn ``view`` into an object that holds the data compressed; the object's length."""
        start = self.coded_header_bytes
        data_bytes, table, units = _coded(codec, len(packed))
        view[start : start + len(packed)] = packed
        view[start + len(packed) : start + data_bytes] = bytes(data_bytes - len(packed))
        metadata = self._metadata(key, writer, created_ms)
        metadata |= {"codec": codec, "tensors": self.table.decode(), "units": _encode_units(units)}
        self._finish(view, start, metadata, units, table)
        return start + data_bytes

    def _finish(
        self, view: memoryview, start: int, metadata: dict[str, str], units: tuple[int, ...], table: bytes
    ) -> None:
        """Checksums and header of an object whose data begin at ``start``."""
        sums = []
        at, digest = start, xxhash.xxh3_128_digest
        for length in units:
            sums.append(digest(view[at : at + length]))
            at += length
        text = self._header(metadata | {"unit_sums": b"".join(sums).hex()}, table)
        view[:8] = struct.pack("<Q", start - 8)
        view[8 : 8 + len(text)] = text
        view[8 + len(text) : start] = b" " * (start - 8 - len(text))
        view[_SUM_AT : _SUM_AT + _SUM_DIGITS] = digest(view[:start]).hex().encode()


def _coded(codec: str, coded_bytes: int) -> tuple[int, bytes, tuple[int, ...]]:
    """Bytes, tensor table and units of data that hold ``coded_bytes`` of compressed content."""
    data_bytes = align_up(coded_bytes, ALIGNMENT_BYTES)
    entries = {f"data.{codec}": _entry("U8", (coded_bytes,), 0, coded_bytes)}
    if data_bytes > coded_bytes:
        entries[f"{_PAD_PREFIX}0"] = _entry("U8", (data_bytes - coded_bytes,), coded_bytes, data_bytes)
    units = tuple(min(MAX_UNIT_BYTES, data_bytes - at) for at in range(0, data_bytes, MAX_UNIT_BYTES))
    return data_bytes, json.dumps(entries, separators=(",", ":")).encode()[1:], units


def _entry(dtype: str, shape: tuple[int, ...], start: int, end: int) -> dict[str, Any]:
    return {"dtype": dtype, "shape": list(shape), "data_offsets": [start, end]}


def _unit_lengths(spec: TensorSpec, padded_bytes: int) -> list[int]:
    """Units of one tensor: its groups, the last one with the padding, none longer than 1 MiB."""
    lengths = []
    left = padded_bytes
    groups = max(1, spec.size_bytes // spec.group_bytes) if spec.group_bytes else 1
    for group in range(groups):
        size = spec.group_bytes if group < groups - 1 else left
        left -= size
        while size > 0:
            lengths.append(min(size, MAX_UNIT_BYTES))
            size -= lengths[-1]
    return lengths


def _encode_units(lengths: tuple[int, ...]) -> str:
    runs: list[list[int]] = []
    for length in lengths:
        if runs and runs[-1][0] == length:
            runs[-1][1] += 1
        else:
            runs.append([length, 1])
    return ",".join(f"{length}*{count}" for length, count in runs)


def _decode_units(text: str, sums: str) -> tuple[tuple[int, ...], bytes]:
    """Lengths and checksums, one for the other; bounded by the number of checksums that really are there."""
    if len(sums) % 32 or not _HEX.issuperset(sums):
        raise BadObject("The unit checksums are not whole digests.")
    lengths: list[int] = []
    for run in text.split(",") if text else ():
        length, _, count = run.partition("*")
        if not (length.isascii() and length.isdigit() and count.isascii() and count.isdigit() and len(run) < 32):
            raise BadObject(f"{run[:40]!r} does not describe units.")
        if not 0 < int(length) <= MAX_UNIT_BYTES or int(count) + len(lengths) > len(sums) // 32:
            raise BadObject(f"{run!r} describes units out of bounds.")
        lengths += [int(length)] * int(count)
    if len(lengths) != len(sums) // 32:
        raise BadObject(f"{len(lengths)} units have {len(sums) // 32} checksums.")
    return tuple(lengths), bytes.fromhex(sums)


# --------------------------------------------------------------------------------------------------------- reading


def header_length(start: memoryview | bytes, file_bytes: int) -> int:
    """Bytes before the data, from the first 8 bytes of a file of ``file_bytes``. Raises BadObject."""
    if len(start) < 8 or file_bytes < ALIGNMENT_BYTES or file_bytes % ALIGNMENT_BYTES or file_bytes > MAX_FILE_BYTES:
        raise BadObject(f"A file of {file_bytes} bytes is no object.")
    length = 8 + int(struct.unpack("<Q", start[:8])[0])
    if length % ALIGNMENT_BYTES or not ALIGNMENT_BYTES <= length <= min(MAX_HEADER_BYTES, file_bytes):
        raise BadObject(f"A header of {length - 8} bytes cannot be in a file of {file_bytes} bytes.")
    return length


def read_header(view: memoryview, file_bytes: int) -> ObjectHeader:
    """The header at the start of ``view``, which holds at least the bytes before the data of a file of ``file_bytes``.

    Checks its own checksum and that its units cover the rest of the file; the tensors are not looked at (see
    :func:`stored_tensors`). Raises BadObject, and NewerFormat for an object that a later version wrote.
    """
    length = header_length(view, file_bytes)
    if len(view) < length:
        raise BadObject(f"Only {len(view)} of the {length} bytes before the data were read.")
    raw = bytes(view[:length])
    if not raw.startswith(_OPENING, 8):
        raise BadObject("The header does not begin as an object's does.")
    try:
        text = raw[8:].decode("ascii")
        metadata, end = json.JSONDecoder().raw_decode(text, len(b'{"__metadata__":'))
    except (ValueError, RecursionError) as error:
        raise BadObject(f"The header is not JSON: {str(error)[:80]}.") from None
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise BadObject("The metadata are not texts.")
    version = metadata.get("format", "")
    if not (version.isascii() and version.isdigit() and len(version) < 6) or int(version) < 1:
        raise BadObject(f"{version[:20]!r} is not a format version.")
    if int(version) > FORMAT_VERSION:
        raise NewerFormat(f"The object has format version {version}; this reads up to {FORMAT_VERSION}.")
    found = raw[_SUM_AT : _SUM_AT + _SUM_DIGITS]
    unsummed = b"".join((raw[:_SUM_AT], _NO_SUM, raw[_SUM_AT + _SUM_DIGITS :]))
    if xxhash.xxh3_128_hexdigest(unsummed).encode() != found:
        raise BadObject("The header's checksum does not match.")
    lengths, sums = _decode_units(metadata.get("units", ""), metadata.get("unit_sums", ""))
    if sum(lengths) != file_bytes - length:
        raise BadObject(f"Units of {sum(lengths)} bytes cannot fill the {file_bytes - length} bytes of data.")
    table = text[end + 1 :] if text[end : end + 1] == "," else text[end:]
    return ObjectHeader(length, metadata, table.rstrip(" ").encode(), lengths, sums)


def stored_tensors(header: ObjectHeader) -> list[StoredTensor]:
    """The tensors of an object, padding left out, every number checked against the others. Raises BadObject."""
    try:
        table = json.loads(b"{" + header.table)
        true_dtypes = json.loads(header.metadata.get("dtypes") or "{}")
    except (ValueError, RecursionError) as error:
        raise BadObject(f"The tensor table is not JSON: {str(error)[:80]}.") from None
    if not isinstance(table, dict) or len(table) > 2 * MAX_TENSORS:
        raise BadObject("The tensor table is not one.")
    if not isinstance(true_dtypes, dict) or not all(isinstance(name, str) for name in true_dtypes.values()):
        raise BadObject("The true dtypes are no texts.")
    entries = []
    for name, entry in table.items():
        if not isinstance(entry, dict) or set(entry) != {"dtype", "shape", "data_offsets"}:
            raise BadObject(f"Tensor {name[:80]!r} is not described.")
        shape, offsets, stored = entry["shape"], entry["data_offsets"], entry["dtype"]
        numbers = (shape if isinstance(shape, list) else [None]) + (offsets if isinstance(offsets, list) else [None])
        if not all(type(number) is int and 0 <= number <= MAX_FILE_BYTES for number in numbers):
            raise BadObject(f"Tensor {name[:80]!r} has a shape or offsets that cannot be.")
        if not isinstance(stored, str) or stored not in _STORED_BYTES:
            raise BadObject(f"Tensor {name[:80]!r} is of no known kind.")
        if len(offsets) != 2 or len(shape) > MAX_DIMENSIONS:
            raise BadObject(f"Tensor {name[:80]!r} has a shape or offsets that cannot be.")
        if prod(shape) * _STORED_BYTES[stored] != offsets[1] - offsets[0]:
            raise BadObject(f"Tensor {name[:80]!r} does not fill its offsets.")
        entries.append((offsets[0], offsets[1], name, stored, tuple(shape)))
    entries.sort(key=lambda entry: entry[:2])
    at, tensors = 0, []
    for start, end, name, stored, shape in entries:
        padding = name.startswith(_PAD_PREFIX)
        if start != at or not (padding or start % ALIGNMENT_BYTES == 0):
            raise BadObject(f"Tensor {name[:80]!r} lies at {start}, which leaves a gap or breaks the alignment.")
        at = end
        if not padding:
            dtype = true_dtypes.get(name) or _NAMES_BY_STORED[stored]
            if dtype not in DTYPES or DTYPES[dtype].stored != stored:
                raise BadObject(f"Tensor {name[:80]!r} cannot be of dtype {str(dtype)[:40]!r}.")
            tensors.append(StoredTensor(name, dtype, shape, start, end - start))
    if at != header.data_bytes:
        raise BadObject(f"The tensors end at {at}, the data at {header.data_bytes}.")
    return tensors


_NAMES_BY_STORED = {dtype.stored: dtype.name for dtype in DTYPES.values() if dtype.stored != "U8"} | {"U8": "uint8"}


def damaged_unit(header: ObjectHeader, view: memoryview) -> int | None:
    """Index of the first unit in ``view`` (the whole object) whose checksum does not match, or None."""
    return damaged_unit_in(header, [view[header.header_bytes :]])


def damaged_unit_in(
    header: ObjectHeader, pieces: Sequence[memoryview], first: int = 0, count: int | None = None
) -> int | None:
    """The same for units ``first`` to ``first + count`` whose bytes lie one after the other in ``pieces``."""
    digest, sums = xxhash.xxh3_128_digest, header.unit_sums
    rest = iter(pieces)
    piece, at = memoryview(b""), 0
    end = len(header.unit_lengths) if count is None else first + count
    for index in range(first, end):
        length = header.unit_lengths[index]
        while at == len(piece) and length:
            piece, at = next(rest), 0
        if at + length <= len(piece):
            found = digest(piece[at : at + length])
            at += length
        else:
            hasher = xxhash.xxh3_128()
            while length:
                while at == len(piece):
                    piece, at = next(rest), 0
                step = min(length, len(piece) - at)
                hasher.update(piece[at : at + step])
                at, length = at + step, length - step
            found = hasher.digest()
        if found != sums[16 * index : 16 * index + 16]:
            return index
    return None


def units_of(header: ObjectHeader, low: int, high: int) -> tuple[int, int, int, int]:
    """Which units cover the data from ``low`` to ``high``: number of the first, how many, and where they begin and
    end."""
    first, begin = 0, 0
    while first < len(header.unit_lengths) and begin + header.unit_lengths[first] <= low:
        begin += header.unit_lengths[first]
        first += 1
    count, end = 0, begin
    while end < high and first + count < len(header.unit_lengths):
        end += header.unit_lengths[first + count]
        count += 1
    return first, count, begin, end
