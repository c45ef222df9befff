"""What moves bytes between slabs and files. One small interface, so that engines can be exchanged and compared."""

from __future__ import annotations

import abc
from collections.abc import Callable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class OpenFile:
    """A descriptor to read or write from its beginning. ``alignment_bytes`` is what offsets, lengths and memory must
    be multiples of; 1 when the descriptor is not a direct one."""

    fd: int
    path: str
    alignment_bytes: int = 1


class Engine(abc.ABC):
    """Runs jobs on ``depth`` workers for reading and as many for writing, so that neither waits for the other; and the
    transfers that the jobs ask for.

    :meth:`read` and :meth:`write` are called from inside a job and come back when the kernel is done with the memory,
    never earlier: whoever owns the buffer may reuse it then. They raise ``OSError``.
    """

    name: str
    depth: int
    #: How many small reads one thread best begins together; 1 where it can only do one after the other.
    together: int = 1

    @abc.abstractmethod
    def submit(self, job: Callable[[], None], *, writing: bool = False) -> None:
        """Queue a job, which reports its own outcome; ``writing``: no request waits for it. Raises CurvfsError once the
        engine is closed."""

    def read(self, file: OpenFile, view: memoryview, offset_bytes: int = 0) -> int:
        """Fill ``view`` from an offset in the file, going on after short reads and interruptions; the bytes read, less
        than asked only at the end of the file."""
        return self.readv(file, [view], offset_bytes)

    @abc.abstractmethod
    def readv(self, file: OpenFile, views: Sequence[memoryview], offset_bytes: int) -> int:
        """The same into several pieces of memory, one after the other."""

    @abc.abstractmethod
    def write(self, file: OpenFile, view: memoryview) -> None:
        """Write all of ``view`` at the start of the file, going on after short writes and interruptions."""

    def read_many(self, reads: Sequence[tuple[OpenFile, Sequence[memoryview]]]) -> list[int | OSError]:
        """:meth:`readv` of several files from their beginnings; a file's own failure stands in its place."""
        counts: list[int | OSError] = []
        for file, views in reads:
            try:
                counts.append(self.readv(file, views, 0))
            except OSError as error:
                counts.append(error)
        return counts

    @abc.abstractmethod
    def close(self, timeout_s: float) -> bool:
        """Run what is queued and stop; False when a worker was still busy after ``timeout_s``."""
