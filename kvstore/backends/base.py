"""What a place must be able to do to hold objects: write-once files with names, published whole or not at all.

Names are relative to the KV prefix, such as ``<namespace>/ab/cd/<digest>.safetensors``. Every call may come from any
thread and blocks; every error is a :class:`~curvfs.errors.CurvfsError` whose ``errno_`` says what kind it is.
"""

from __future__ import annotations

import abc
import functools
import logging
import os
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

from curvfs.errors import CurvfsError, EnvironmentError_
from curvfs.world import DirectIo, Disk
from kvstore.backends.staging import Staging, StagingStore
from kvstore.engine.base import OpenFile
from kvstore.header import ALIGNMENT_BYTES

#: What callers ask for: direct where possible, never, or not at all otherwise.
Direct = bool | Literal["required"]

logger = logging.getLogger("kvstore")

T = TypeVar("T")


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


@dataclass(frozen=True, slots=True)
class ObjectEntry:
    """One object as a directory tells of it; ``name`` counts from the prefix. ``atime_s``: when it was last used, as
    far as that was told to the store; never before it was written."""

    name: str
    length_bytes: int
    mtime_s: float
    atime_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Target:
    """Who stores an object that is being written: a worker, or the place itself. ``name`` is the worker's host name."""

    worker_id: int = 0
    name: str = ""


class Targets(abc.ABC):
    """Which workers new objects go to, where there may be several. Callable from any thread."""

    @abc.abstractmethod
    def avoided(self) -> tuple[int, ...]:
        """Workers that get no new objects for now."""

    @abc.abstractmethod
    def avoid(self, worker_id: int) -> None:
        """Let no new object go there, as long as others have room."""

    @abc.abstractmethod
    def readmit(self, worker_id: int) -> None: ...

    @abc.abstractmethod
    def attempt(self, worker_id: int, view: memoryview) -> None:
        """Write an object (slab memory) there, and remove it. Raises CurvfsError."""


class ObjectReader(abc.ABC):
    """An object open for reading; a context manager. It stays readable when it is deleted meanwhile, where the store
    can do that."""

    length_bytes: int
    #: What tells this very file from another one under the same name.
    identity: Hashable
    #: The last read went well.
    well: bool = False

    @abc.abstractmethod
    def read(self, view: memoryview, offset_bytes: int = 0) -> int:
        """Fill ``view`` (slab memory) from an offset that is a multiple of 4096; less than its length only at the end
        of the object."""

    def readv(self, views: Sequence[memoryview], offset_bytes: int) -> int:
        """The same into several pieces of memory, one after the other; see :attr:`alignment_bytes`."""
        done = 0
        for view in views:
            count = self.read(view, offset_bytes + done)
            done += count
            if count < len(view):
                break
        return done

    #: What the address and length of every piece of memory must be multiples of.
    alignment_bytes: int = 1

    @property
    def file(self) -> OpenFile | None:
        """What the engine reads, also together with others. None: there is only :meth:`readv`."""
        return None

    @abc.abstractmethod
    def close(self) -> None: ...

    def __enter__(self) -> ObjectReader:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


class ObjectWriter(abc.ABC):
    """An object being written under a staging name that nobody else uses."""

    #: Who gets its bytes.
    targets: tuple[Target, ...] = (Target(),)

    @abc.abstractmethod
    def write(self, view: memoryview) -> None:
        """Write the whole object (slab memory)."""

    @abc.abstractmethod
    def publish(self) -> bool:
        """Give it its name. False when the name is taken; the staged file is gone then."""

    @abc.abstractmethod
    def abort(self) -> None:
        """Remove what was staged; idempotent, never raises."""

    def abandon(self) -> None:
        """The same, without waiting where that could take long."""
        self.abort()


class Backend(abc.ABC):
    """One KV prefix of one place."""

    #: Short name for ``stats()``.
    name: str
    mode: Mode
    #: Objects that moved otherwise than ``mode`` says: buffered, or over the network.
    fallbacks: int = 0
    #: Objects that were read through the page cache because they lay there.
    page_cache_reads: int = 0
    #: Asking first, for many objects at once, makes a following :meth:`open` cheaper.
    locates: bool
    #: :meth:`confirm` comes back in the time it is given.
    ends_in_time: bool = False
    #: How many objects are best opened, created and published together; 1 where that saves nothing.
    batch: int = 1
    #: Opening takes no round trip for each: one thread may open several objects in a row.
    near: bool = False
    #: The few calls for small files of our own, by path; ``root`` is the prefix's path there.
    #: Seconds until what was deleted shows in :meth:`free_bytes`.
    frees_after_s: float = 0.0
    #: Where writers can be chosen.
    targets: Targets | None = None
    records: StagingStore
    root: str
    staging: Staging

    @abc.abstractmethod
    def confirm(self, names: Sequence[str], timeout_s: float | None = None) -> list[Found | CurvfsError | None]:
        """For each name: what is there, None when nothing is, or why that cannot be told. ``timeout_s`` holds where
        :attr:`ends_in_time`."""

    @abc.abstractmethod
    def open(self, name: str, found: Found | None = None) -> ObjectReader: ...

    @abc.abstractmethod
    def create(self, name: str, size_bytes: int) -> ObjectWriter:
        """Stage an object of exactly ``size_bytes``."""

    def open_many(self, wanted: Sequence[tuple[str, Found | None]]) -> list[ObjectReader | CurvfsError]:
        """:meth:`open` of many; an object's own failure stands in its place."""
        return [_caught(functools.partial(self.open, name, found)) for name, found in wanted]

    def create_many(self, names: Sequence[str], size_bytes: int) -> list[ObjectWriter | CurvfsError]:
        """:meth:`create` of many; an object's own failure stands in its place."""
        return [_caught(functools.partial(self.create, name, size_bytes)) for name in names]

    def publish_many(self, writers: Sequence[ObjectWriter]) -> list[bool | CurvfsError]:
        """:meth:`ObjectWriter.publish` of many; an object's own failure stands in its place."""
        return [_caught(writer.publish) for writer in writers]

    @abc.abstractmethod
    def open_otherwise(self, name: str) -> ObjectReader:
        """Open by another path than :meth:`open`: a fresh descriptor or connection, past or through the page cache the
        other way round, over the wire instead of from a local file. For judging an object that looks damaged."""

    @abc.abstractmethod
    def quarantine(self, name: str, identity: Hashable) -> bool:
        """Move a damaged object out of the way, to ``.quarantine``. False when the file there was another one than the
        one with this identity: that one was put back."""

    @abc.abstractmethod
    def evict(self, name: str) -> bool:
        """Move an object to the trash, from where readers who were promised it still get it. False when it was not
        there."""

    @abc.abstractmethod
    def empty_trash(self, *, early: bool = False, namespace: str = "") -> int:
        """Remove what has been in the trash for longer than its readers' leases; ``early``: the oldest part of it in
        any case, because room is needed. Only what is of one ``namespace``, if given. The number of objects removed."""

    @abc.abstractmethod
    def trash_bytes(self, namespace: str = "") -> int:
        """What the trash takes; of one ``namespace``, if given."""

    @abc.abstractmethod
    def free_bytes(self) -> int:
        """What the place still has room for, whoever uses it."""

    @abc.abstractmethod
    def mark_accessed(self, accesses: Sequence[tuple[str, float]]) -> None:
        """Tell the place when objects were last used, by its own clock; names that are gone are passed over."""

    @abc.abstractmethod
    def accessed_s(self, names: Sequence[str]) -> list[float | None]:
        """When objects were last used, as far as the place was told; None where one is not there."""

    @abc.abstractmethod
    def staged_bytes(self) -> int:
        """What all staging directories take, those of the dead among them."""

    @abc.abstractmethod
    def walk(self, directory: str, after: str = "") -> Iterator[ObjectEntry]:
        """Objects below a directory of the prefix in order of their names, from the first behind the name ``after``;
        nothing when there is no such directory."""

    def place(self, found: Found) -> str:
        """What an object is read from: a worker's host name; empty where the place is one."""
        return ""

    @abc.abstractmethod
    def hosts(self, found: Found) -> tuple[str, ...]:
        """Host names of the machines that hold an object; empty where the place does not tell."""

    @abc.abstractmethod
    def delete(self, name: str) -> bool | None:
        """False when it was not there; None when it is gone and nobody can tell whether by this call."""

    @abc.abstractmethod
    def sweep(self) -> int:
        """Remove what dead processes left in staging; the number of staging directories removed."""

    @abc.abstractmethod
    def close(self) -> None:
        """Remove our staging directory, let go of everything; idempotent, never raises."""


def cached_descriptor(disk: Disk, fd: int, length_bytes: int) -> int:
    """A second descriptor of a file open with O_DIRECT, without it, when all of the file lies in the page cache; else
    -1. Reading from memory beats any disk, and direct I/O would leave it there."""
    if length_bytes and disk.resident_bytes(fd, 0, length_bytes) >= length_bytes:
        try:
            return disk.open(f"/proc/self/fd/{fd}", os.O_RDONLY | os.O_CLOEXEC)
        except OSError:  # no /proc here
            pass
    return -1


def _caught(function: Callable[[], T]) -> T | CurvfsError:
    try:
        return function()
    except CurvfsError as error:
        return error


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
