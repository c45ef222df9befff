"""What a job writes, and whether what it reads is that.

``pattern``: the pattern of ``verify_pattern`` again and again, from the start of the file. A checksum: every block is a
head (mark, length, offset, seed, digest) and content from the seed, so blocks that were torn, lost, or put elsewhere
are told apart. Without verify the content is random bytes that differ from call to call.
"""

from __future__ import annotations

import hashlib
import struct
import zlib
from typing import Protocol

from curvfs.errors import CurvfsError
from curvfs.units import MIB
from curvfs.world import Random
from tools.bench.jobfile import Job

_HEAD = struct.Struct("<4sIQQ")
_MARK = b"CVFB"
_BASE_BYTES = 4 * MIB


class Mismatch(CurvfsError):
    """What was read is not what was written."""


class Content(Protocol):
    """Fills and checks blocks. Callable from any thread."""

    def fill(self, view: memoryview, name: str, offset_bytes: int) -> None: ...

    def check(self, view: memoryview, name: str, offset_bytes: int) -> None:
        """Raises Mismatch."""
        ...


def content_of(job: Job) -> Content:
    """The content that a job asks for."""
    if job["verify"] == "pattern":
        return _Pattern(job["verify_pattern"])
    if job["verify"]:
        return _Summed(job["verify"], job["randseed"])
    return _Noise(job["randseed"])


class _Noise:
    def __init__(self, seed: int) -> None:
        self._base = Random(seed).randbytes(1 << 16)
        self._calls = 0

    def fill(self, view: memoryview, name: str, offset_bytes: int) -> None:
        """The whole once, afterwards only a stamp in front: what costs time is the storage's, not ours."""
        self._calls += 1
        if bytes(view[8:16]) != self._base[8 : 8 + len(view[8:16])]:
            for at in range(0, len(view), len(self._base)):
                piece = view[at : at + len(self._base)]
                piece[:] = self._base[: len(piece)]
        stamp = self._calls.to_bytes(8, "little")
        view[:8] = stamp[: len(view)]

    def check(self, view: memoryview, name: str, offset_bytes: int) -> None:
        """Nothing to hold it against."""


class _Pattern:
    def __init__(self, pattern: bytes) -> None:
        self._pattern = pattern
        self._repeated = pattern * (_BASE_BYTES // len(pattern) + 2)

    def _expected(self, length: int, offset_bytes: int) -> memoryview | bytes:
        phase = offset_bytes % len(self._pattern)
        if phase + length <= len(self._repeated):
            return memoryview(self._repeated)[phase : phase + length]
        return (self._pattern * ((phase + length) // len(self._pattern) + 1))[phase : phase + length]

    def fill(self, view: memoryview, name: str, offset_bytes: int) -> None:
        view[:] = self._expected(len(view), offset_bytes)

    def check(self, view: memoryview, name: str, offset_bytes: int) -> None:
        expected = self._expected(len(view), offset_bytes)
        if bytes(view) != bytes(expected):
            at = first_difference(view, memoryview(expected))
            raise Mismatch(
                f"{name}: byte {offset_bytes + at} is 0x{view[at]:02x}, and 0x{expected[at]:02x} was written."
            )


class _Summed:
    def __init__(self, name: str, seed: int) -> None:
        self._name = name
        self._seed = seed & (2**64 - 1)
        self._base = Random(seed).randbytes(_BASE_BYTES)

    def _digest(self, data: memoryview) -> bytes:
        if self._name == "crc32":
            return zlib.crc32(data).to_bytes(4, "little")
        return hashlib.new(self._name, data, usedforsecurity=False).digest()

    def _layout(self, view: memoryview) -> tuple[int, memoryview]:
        start = _HEAD.size + len(self._digest(view[:0]))
        return start, view[start:]

    def fill(self, view: memoryview, name: str, offset_bytes: int) -> None:
        start, body = self._layout(view)
        phase = (offset_bytes * 31 + zlib.crc32(name.encode())) % (_BASE_BYTES // 2)
        done = 0
        while done < len(body):
            piece = self._base[phase : phase + len(body) - done]
            body[done : done + len(piece)] = piece
            done, phase = done + len(piece), 0
        _HEAD.pack_into(view, 0, _MARK, len(view), offset_bytes, self._seed)
        view[_HEAD.size : start] = self._digest(body)

    def check(self, view: memoryview, name: str, offset_bytes: int) -> None:
        start, body = self._layout(view)
        mark, length, offset, seed = _HEAD.unpack_from(view)
        where = f"{name}: the block at {offset_bytes}"
        if mark != _MARK:
            raise Mismatch(f"{where} does not begin as a written block does (0x{bytes(view[:8]).hex()}).")
        if (length, offset, seed) != (len(view), offset_bytes, self._seed):
            raise Mismatch(f"{where} is that of offset {offset}, length {length}, seed {seed}.")
        if self._digest(body) != bytes(view[_HEAD.size : start]):
            raise Mismatch(f"{where} does not match its {self._name} checksum.")


def first_difference(got: memoryview, expected: memoryview) -> int:
    """Index of the first byte in which two unequal pieces of one length differ."""
    low, high = 0, len(got)
    while high - low > 1:
        middle = (low + high) // 2
        if got[low:middle] == expected[low:middle]:
            low = middle
        else:
            high = middle
    return low
