"""The contract of an engine: where the calls of one process of a job go."""

from __future__ import annotations

import abc
import mmap
from collections.abc import Callable, Sequence
from typing import Any

from curvfs.units import align_up
from curvfs.world import World
from tools.bench.checker import Content
from tools.bench.jobfile import Job
from tools.bench.source import Call, File

#: Files are laid out in calls of about this size.
LAYOUT_BYTES = 1 << 20


class Slot:
    """What one thread has: page-aligned memory, and a place for measurements beside the call's own."""

    def __init__(self, size_bytes: int, note: Callable[[str, float, int], None]) -> None:
        self.view = memoryview(mmap.mmap(-1, align_up(size_bytes, mmap.PAGESIZE)))
        touched = self.view[:: mmap.PAGESIZE]
        touched[:] = bytes(len(touched))  # the kernel gives the memory now, not in the first call
        #: Kind, seconds, bytes of something that was part of the call.
        self.note = note


class Target(abc.ABC):
    """Made, then :meth:`prepare`, any number of :meth:`perform` from many threads, :meth:`finish`, :meth:`close`.

    Errors are CurvfsErrors or OSErrors."""

    def __init__(self, world: World, job: Job, number: int, files: Sequence[File], content: Content) -> None:
        self.world = world
        self.job = job
        self.number = number
        self.files = list(files)
        self.content = content
        #: Set from outside: give up what takes long.
        self.stopped = False

    def buffer_bytes(self) -> int:
        """How much memory a thread needs."""
        return max(size for split in self.job.sizes for size, _ in split)

    @abc.abstractmethod
    def prepare(self) -> None:
        """Make what the job reads, open everything."""

    @abc.abstractmethod
    def perform(self, call: Call, slot: Slot) -> int:
        """Do one call; the bytes moved."""

    def after(self, call: Call) -> None:  # noqa: B027 (most have nothing to do)
        """What belongs to a call and is not measured."""

    def finish(self) -> None:  # noqa: B027 (most have nothing to do)
        """At the end of the measured time, and part of it: what was written is handed over."""

    def proof(self) -> dict[str, Any]:
        """How the bytes really moved: ``direct`` (True, False or None: not known), ``verdict``, and figures."""
        return {}

    @abc.abstractmethod
    def close(self, *, remove: bool) -> None:
        """Let go of everything; ``remove``: also of what :meth:`prepare` and the calls made."""

    def layout_step(self) -> int:
        """Bytes of one call when a file is laid out: whole blocks, so that they can be verified."""
        block = self.job.sizes[0][0][0]
        return block if self.job["verify"] or block > LAYOUT_BYTES else LAYOUT_BYTES // block * block
