"""Calls to the local disk that may hang: made in a thread, waited for ``data_timeout_s`` at most.

A thread that hangs in the kernel cannot be stopped, so it is abandoned: nobody waits for it, what it used is given back
by itself when it ends, and it never touches the caller's memory again. While one of a worker's disk hangs, that
worker's files are not used at all.
"""

from __future__ import annotations

import errno
import os
from collections import Counter
from collections.abc import Callable
from typing import Generic, TypeVar

import trio

from curvfs.errors import CurvfsError, DeadlineExceeded
from curvfs.units import MIB, format_duration
from curvfs.world import Buffer, Disk, World

T = TypeVar("T")

#: Bytes that one call moves at most, so that a slow disk is not taken for one that hangs.
CALL_BYTES = 64 * MIB
#: Bytes that are read at once past the page cache, and that are taken from it at once.
_PIECE_BYTES = MIB
_CACHED_PIECE_BYTES = 4 * MIB


class Abandoned(Exception):
    """Raised inside the thread: nobody wants its result any more."""


class DiskCall(Generic[T]):
    """One function on its way through a thread. ``release`` is called exactly once, when the function has ended or is
    known never to begin; ``undo`` gets a result that nobody waited for."""

    def __init__(
        self,
        world: World,
        function: Callable[[DiskCall[T]], T],
        *,
        release: Callable[[], None] = lambda: None,
        undo: Callable[[T], None] = lambda result: None,
    ) -> None:
        self._world = world
        self._function = function
        self._release = release
        self._undo = undo
        #: Held while the caller's memory is touched.
        self.lock = world.threads.lock()
        self._abandoned = self._begun = self._ended = False
        self._result: T | None = None

    def check_wanted(self) -> None:
        """Call with ``lock`` held, before the caller's memory is touched."""
        if self._abandoned:
            raise Abandoned

    @property
    def hangs(self) -> bool:
        return self._abandoned and self._begun and not self._ended

    async def run(self, timeout_s: float) -> T:
        """Raises what the function raises, and DeadlineExceeded."""
        received = False
        try:
            with trio.fail_after(timeout_s):
                result = await self._world.threads.run(self._work, abandon_on_cancel=True)
                received = True
        except trio.TooSlowError:
            raise DeadlineExceeded(f"The local disk did not answer within {format_duration(timeout_s)}.") from None
        finally:
            if not received:
                self._abandon()
        return result

    def _work(self) -> T:
        with self.lock:
            self.check_wanted()
            self._begun = True
        try:
            result = self._function(self)
        except BaseException:
            with self.lock:
                self._ended = True
            self._release()
            raise
        with self.lock:
            self._ended = True
            self._result = result
            late = self._abandoned
        self._release()
        if late:
            self._undo(result)
        return result

    def _abandon(self) -> None:
        with self.lock:
            self._abandoned = True
            begun, ended = self._begun, self._ended
        if not begun:
            self._release()
        elif ended and self._result is not None:
            self._undo(self._result)


class LocalDisk:
    """The disk calls of one client: counts those that hang, by worker."""

    def __init__(self, world: World, timeout_s: float, stats: Counter[str]) -> None:
        self._world = world
        self._timeout_s = timeout_s
        self._stats = stats
        self._hanging: dict[int, list[DiskCall[object]]] = {}

    def hangs(self, worker_id: int) -> bool:
        """Whether a call to this worker's disk was given up and has not ended yet."""
        calls = [call for call in self._hanging.get(worker_id, ()) if call.hangs]
        if calls:
            self._hanging[worker_id] = calls
        else:
            self._hanging.pop(worker_id, None)
        return bool(calls)

    async def call(
        self,
        worker_id: int,
        function: Callable[[DiskCall[T]], T],
        *,
        release: Callable[[], None] = lambda: None,
        undo: Callable[[T], None] = lambda result: None,
    ) -> T:
        """Run a function that touches a worker's files, see :class:`DiskCall`. Raises DeadlineExceeded."""
        call = DiskCall(self._world, function, release=release, undo=undo)
        try:
            return await call.run(self._timeout_s)
        finally:
            if call.hangs:
                self._stats["local_disk_hangs"] += 1
                self._hanging.setdefault(worker_id, []).append(call)  # type: ignore[arg-type]


def read_into(disk: Disk, fd: int, view: memoryview, offset_bytes: int, call: DiskCall[int]) -> int:
    """Fill ``view`` from a file; less only at its end.

    What is in the page cache is taken from there straight into ``view``, which takes no time. The rest may take for
    ever, and then ``view`` may be somebody else's: it is read aside first.
    """
    aside: memoryview | None = None
    done = 0
    while done < len(view):
        with call.lock:
            call.check_wanted()
            count = _read_cached(disk, fd, view[done : done + _CACHED_PIECE_BYTES], offset_bytes + done)
        if count is None:
            if aside is None:
                aside = memoryview(bytearray(min(_PIECE_BYTES, len(view) - done)))
            piece = aside[: min(len(aside), len(view) - done)]
            count = disk.pread_full(fd, piece, offset_bytes + done)
            with call.lock:
                call.check_wanted()
                view[done : done + count] = piece[:count]
        if count == 0:
            break
        done += count
    return done


def _read_cached(disk: Disk, fd: int, view: memoryview, offset_bytes: int) -> int | None:
    """None when the disk must be asked."""
    try:
        return disk.preadv(fd, [view], offset_bytes, os.RWF_NOWAIT)
    except OSError as error:
        if error.errno in (errno.EAGAIN, errno.EOPNOTSUPP):
            return None
        raise


def write_from(disk: Disk, fd: int, buffer: Buffer, offset_bytes: int, call: DiskCall[None]) -> None:
    """Write all of ``buffer`` to a file."""
    view = memoryview(buffer).cast("B")
    for start in range(0, len(view), _CACHED_PIECE_BYTES):
        with call.lock:
            call.check_wanted()
        disk.pwrite_full(fd, view[start : start + _CACHED_PIECE_BYTES], offset_bytes + start)


class SharedFile:
    """An open descriptor with several users, threads that hang among them: the last to let go closes it."""

    def __init__(self, world: World, fd: int) -> None:
        self._disk = world.disk
        self._lock = world.threads.lock()
        self._users = 1
        self.fd = fd

    def use(self) -> None:
        with self._lock:
            if not self._users:
                raise CurvfsError("The local file of a block was closed.", errno_=errno.EBADF)
            self._users += 1

    def close(self) -> None:
        """Let go; once for whoever opened it, and once for every :meth:`use`."""
        with self._lock:
            self._users -= 1
            last = self._users == 0
        if last:
            self._disk.close(self.fd)
