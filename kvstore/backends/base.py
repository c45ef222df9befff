"""What a place must be able to do to hold objects: write-once files with names, published whole or not at all.

Names are relative to the KV prefix, such as ``<namespace>/ab/cd/<digest>.safetensors``. Every call may come from any
thread and blocks; every error is a :class:`~curvfs.errors.CurvfsError` whose ``errno_`` says what kind it is.
"""

from __future__ import annotations

import abc
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from curvfs.errors import CurvfsError, EnvironmentError_
from curvfs.world import DirectIo
from kvstore.header import ALIGNMENT_BYTES

#: What callers ask for: direct where possible, never, or not at all otherwise.
Direct = bool | Literal["required"]

logger = logging.getLogger("kvstore")


@dataclass(frozen=True, slots=True)
class Mode:
    """How bytes really move. ``reason`` says why not direct, or what is special about it; may be empty."""

    direct: bool
    alignment_bytes: int
    reason: str = ""


@dataclass(frozen=True, slots=True)
class Found:
    """An object that was there when asked. ``located`` spares a following :meth:`Backend.open` a question."""

    length_bytes: int
    located: Any = None


class ObjectReader(abc.ABC):
    """An object open for reading; a context manager. It stays readable when it is deleted meanwhile, where the store
    can do that."""

    length_bytes: int

    @abc.abstractmethod
    def read(self, view: memoryview) -> int:
        """Fill ``view`` (slab memory) from the start of the object; less than its length only at the end."""

    @abc.abstractmethod
    def close(self) -> None: ...

    def __enter__(self) -> ObjectReader:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


class ObjectWriter(abc.ABC):
    """An object being written under a staging name that nobody else uses."""

    @abc.abstractmethod
    def write(self, view: memoryview) -> None:
        """Write the whole object (slab memory)."""

    @abc.abstractmethod
    def publish(self) -> bool:
        """Give it its name. False when the name is taken; the staged file is gone then."""

    @abc.abstractmethod
    def abort(self) -> None:
        """Remove what was staged; idempotent, never raises."""


class Backend(abc.ABC):
    """One KV prefix of one place."""

    #: Short name for ``stats()``.
    name: str
    mode: Mode
    #: Objects that moved otherwise than ``mode`` says: buffered, or over the network.
    fallbacks: int = 0
    #: Asking first, for many objects at once, makes a following :meth:`open` cheaper.
    locates: bool

    @abc.abstractmethod
    def confirm(self, names: Sequence[str]) -> list[Found | CurvfsError | None]:
        """For each name: what is there, None when nothing is, or why that cannot be told."""

    @abc.abstractmethod
    def open(self, name: str, found: Found | None = None) -> ObjectReader: ...

    @abc.abstractmethod
    def create(self, name: str, size_bytes: int) -> ObjectWriter:
        """Stage an object of exactly ``size_bytes``."""

    @abc.abstractmethod
    def delete(self, name: str) -> bool:
        """False when it was not there."""

    @abc.abstractmethod
    def sweep(self) -> int:
        """Remove what dead processes left in staging; the number of staging directories removed."""

    @abc.abstractmethod
    def close(self) -> None:
        """Remove our staging directory, let go of everything; idempotent, never raises."""


def alignment_of(found: DirectIo) -> int | None:
    """What direct I/O must be multiples of, from what ``statx`` says; None when our objects and slabs are not."""
    alignment = max(found.memory_alignment_bytes, found.offset_alignment_bytes) or ALIGNMENT_BYTES
    return alignment if ALIGNMENT_BYTES % alignment == 0 else None


def settle_mode(where: str, wanted: Direct, alignment_bytes: int | None, reason: str) -> Mode:
    """The effective mode, said aloud where it is not the one wanted. Raises EnvironmentError_ when it is required."""
    if wanted is False:
        return Mode(False, 1, "direct I/O was not asked for")
    if alignment_bytes is not None:
        return Mode(True, alignment_bytes, reason)
    if wanted == "required":
        raise EnvironmentError_(
            f"{where} does not take direct I/O ({reason}), and it is required; use another file system, or open the"
            " store with direct=True to fall back to buffered I/O."
        )
    logger.warning("%s does not take direct I/O (%s); kvstore uses buffered I/O there.", where, reason)
    return Mode(False, 1, reason)
