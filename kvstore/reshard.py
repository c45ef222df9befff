"""Pages that were written under another tensor-parallel split: read from the objects of those shards.

A rank's heads are a slice of every tensor. Where heads come first (``hnd``) that slice is one piece of the object, and
only its units are read; where tokens come first it is a piece for every token, and all between is read, too.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod

from kvstore.asking import Ask
from kvstore.backends.base import Found
from kvstore.geometry import Shard, TensorSpec
from kvstore.header import ObjectLayout
from kvstore.keys import PageKey

#: Pieces closer than this are read together with what lies between.
_GAP_BYTES = 64 << 10

_memmove = ctypes.memmove



@dataclass(frozen=True, slots=True)
class Source:
    """One object that holds some of a page's heads."""

    shard: Shard
    name: str
    found: Found


@dataclass(frozen=True, slots=True)
class Resharded:
    """What stands in :attr:`Found.located` of a page that is put together from others' objects."""

    sources: tuple[Source, ...]


@dataclass(frozen=True, slots=True)
class Stretch:
    """A stretch of an object's data to be read at once, and the copies to make: (offset from its start, offset in our
    own data, bytes)."""

    low: int
    high: int
    copies: tuple[tuple[int, int, int], ...]


class Resharder:
    """Knows the other splits. ``name_of``: the object's name for a key and shard."""

    def __init__(
        self,
        layout: ObjectLayout,
        tp_sizes: Sequence[int],
        name_of: Callable[[PageKey, Shard], str],
        *,
        most_bytes: int,
    ) -> None:
        self._layout = layout
        self._name_of = name_of
        self._most_bytes = most_bytes
        own = layout.geometry.shard
        self.splits = [size for size in dict.fromkeys(tp_sizes) if size != own.tp_size]
        self._layouts: dict[Shard, ObjectLayout] = {}
        self._stretches: dict[Shard, list[Stretch]] = {}
        for size in self.splits:
            for rank in range(size):
                other = layout.geometry.resplit(rank, size)
                self._layouts[other.shard] = ObjectLayout(other)

    def layout_of(self, shard: Shard) -> ObjectLayout:
        """What that shard's object looks like."""
        return self._layouts[shard]

    def resolve(
        self, keys: Sequence[PageKey], confirm: Ask, *, every_shard: bool = False
    ) -> list[Found | None]:
        """For each key the objects of another split that together hold this rank's heads, where all are there."""
        found: list[Found | None] = [None] * len(keys)
        for size in self.splits:
            missing = [index for index, one in enumerate(found) if one is None]
            needed = self._needed(size)
            own = self._layout.geometry.shard
            asked = Shard(0, size, own.pp_rank, own.pp_size).all() if every_shard else needed
            answers = iter(confirm([self._name_of(keys[index], shard) for index in missing for shard in asked]))
            for index in missing:
                there = {shard: next(answers) for shard in asked}
                sources = [
                    Source(shard, self._name_of(keys[index], shard), answer)
                    for shard, answer in there.items()
                    if isinstance(answer, Found) and answer.length_bytes > 0
                ]
                if len(sources) == len(asked):
                    wanted = tuple(source for source in sources if source.shard in needed)
                    found[index] = Found(self._layout.object_bytes, Resharded(wanted))
        return found

    def _needed(self, size: int) -> list[Shard]:
        """The shards of a split that hold any of our heads."""
        own = self._layout.geometry.shard
        return [
            Shard(rank, size, own.pp_rank, own.pp_size)
            for rank in range(size)
            if rank * own.tp_size < (own.tp_rank + 1) * size and own.tp_rank * size < (rank + 1) * own.tp_size
        ]

    def stretches(self, shard: Shard) -> list[Stretch]:
        """What to read of that shard's object, in file order."""
        found = self._stretches.get(shard)
        if found is None:
            found = self._stretches[shard] = self._plan(shard)
        return found

    def _plan(self, shard: Shard) -> list[Stretch]:
        source = self._layouts[shard]
        copies: list[tuple[int, int, int]] = []
        for (theirs, from_offset), (ours, to_offset) in zip(source.tensors, self._layout.tensors, strict=True):
            copies += _slices(theirs, shard, from_offset, ours, self._layout.geometry.shard, to_offset)
        groups: list[list[tuple[int, int, int]]] = []
        for copy in sorted(copies):
            if groups:
                first, last = groups[-1][0], groups[-1][-1]
                gap, span = copy[0] - last[0] - last[2], copy[0] + copy[2] - first[0]
                if gap <= _GAP_BYTES and span <= self._most_bytes:
                    groups[-1].append(copy)
                    continue
            groups.append([copy])
        return [
            Stretch(
                group[0][0],
                group[-1][0] + group[-1][2],
                tuple((start - group[0][0], target, size) for start, target, size in group),
            )
            for group in groups
        ]


def _slices(
    theirs: TensorSpec, their_shard: Shard, from_offset: int, ours: TensorSpec, our_shard: Shard, to_offset: int
) -> list[tuple[int, int, int]]:
    """The copies of one tensor's common heads: (offset in their data, offset in ours, bytes)."""
    axis = ours.head_axis
    if axis < 0:
        return [(from_offset, to_offset, ours.size_bytes)] if ours.size_bytes else []
    their_heads, our_heads = theirs.shape[axis], ours.shape[axis]
    their_first, our_first = their_shard.tp_rank * their_heads, our_shard.tp_rank * our_heads
    begin, end = max(their_first, our_first), min(their_first + their_heads, our_first + our_heads)
    head_bytes = prod(ours.shape[axis + 1 :]) * ours.dtype.size_bytes
    if begin >= end or head_bytes == 0:
        return []
    return [
        (
            from_offset + (row * their_heads + begin - their_first) * head_bytes,
            to_offset + (row * our_heads + begin - our_first) * head_bytes,
            (end - begin) * head_bytes,
        )
        for row in range(prod(ours.shape[:axis]))
    ]


def copy_stretch(stretch: Stretch, source_address: int, target_address: int) -> None:
    """Make a stretch's copies; ``source_address`` is where its ``low`` lies, ``target_address`` our data's start."""
    for start, target, size in stretch.copies:
        _memmove(target_address + target, source_address + start, size)
