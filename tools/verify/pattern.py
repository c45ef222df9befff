"""Bytes that say where they belong.

A file is cut into blocks of 4096 bytes. Each begins with a stamp (mark, seed, file, generation, offset); the rest is
random bytes from the seed, from another place for every piece of 1 MiB. So a wrong byte is found wherever it is, and a
block that was lost, torn, stale or put elsewhere says itself what it is.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

from curvfs.units import MIB
from curvfs.world import Random

BLOCK_BYTES = 4096
#: Files are filled and checked in pieces of this size.
PIECE_BYTES = MIB

_STAMP = struct.Struct("<8sQIIQ")
_MARK = b"curvfsVP"
_SHOWN = 16


@dataclass(frozen=True, slots=True)
class Wrong:
    """The first wrong byte of a piece. ``meaning``: what the block that it is in looks like."""

    offset_bytes: int
    expected: bytes
    got: bytes
    wrong_blocks: int
    meaning: str

    def sentence(self) -> str:
        return (
            f"first wrong byte at offset {self.offset_bytes}: expected 0x{self.expected[0]:02x}, got "
            f"0x{self.got[0]:02x} ({self.wrong_blocks} of the blocks from there to the end of its MiB differ; "
            f"{self.meaning})"
        )


class Pattern:
    """The content of all files of one seed."""

    def __init__(self, seed: int) -> None:
        self._seed = seed & (2**64 - 1)
        self._base = Random(seed).randbytes(2 * PIECE_BYTES)

    def piece(self, file: int, generation: int, offset_bytes: int, length_bytes: int) -> bytearray:
        """Content of a file from ``offset_bytes``, a multiple of :data:`PIECE_BYTES`; at most that long."""
        number = offset_bytes // PIECE_BYTES
        start = (file * 7919 + generation * 104_729 + number * 31_337 + 1) % PIECE_BYTES
        content = bytearray(memoryview(self._base)[start : start + length_bytes])
        for at in range(0, length_bytes - _STAMP.size + 1, BLOCK_BYTES):
            _STAMP.pack_into(content, at, _MARK, self._seed, file, generation, offset_bytes + at)
        return content

    def wrong(self, got: memoryview, file: int, generation: int, offset_bytes: int) -> Wrong | None:
        """The first byte of ``got`` that is not as :meth:`piece` made it, or None."""
        expected = self.piece(file, generation, offset_bytes, len(got))
        if bytes(got) == expected:
            return None
        blocks = [
            at
            for at in range(0, len(got), BLOCK_BYTES)
            if bytes(got[at : at + BLOCK_BYTES]) != expected[at : at + BLOCK_BYTES]
        ]
        block = bytes(got[blocks[0] : blocks[0] + BLOCK_BYTES])
        should_be = bytes(expected[blocks[0] : blocks[0] + BLOCK_BYTES])
        inside = next(index for index, (one, other) in enumerate(zip(block, should_be, strict=True)) if one != other)
        return Wrong(
            offset_bytes + blocks[0] + inside,
            should_be[inside : inside + _SHOWN],
            block[inside : inside + _SHOWN],
            len(blocks),
            self._meaning(block, should_be, file, generation, offset_bytes + blocks[0]),
        )

    def _meaning(self, block: bytes, should_be: bytes, file: int, generation: int, offset_bytes: int) -> str:
        if not any(block):
            return "the block is zeros: never written, or lost"
        if len(block) < _STAMP.size:
            return "the bytes are others"
        mark, seed, its_file, its_generation, its_offset = _STAMP.unpack_from(block)
        if mark != _MARK:
            return "the block is none that was ever written"
        if seed != self._seed:
            return f"the block was written with seed {seed}"
        if (its_file, its_offset) != (file, offset_bytes):
            return f"the block is that of file {its_file} at offset {its_offset}"
        if its_generation != generation:
            return f"the block is of round {its_generation}, not of round {generation}"
        differing = sum(one != other for one, other in zip(block, should_be, strict=True))
        return f"{differing} bytes of the block were changed"
