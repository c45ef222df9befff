"""The engine for kernels with io_uring: a large object moves as several pieces at once, from each of the I/O threads.

Only direct transfers go through a ring. What goes through the page cache is copied by the kernel while it takes the
request, and Python would stand still meanwhile; plain calls do not have that.
"""

from __future__ import annotations

import errno
import os
import tempfile
from collections.abc import Sequence

from curvfs.errors import CurvfsError, EnvironmentError_
from curvfs.ring import Ring, RingCall
from curvfs.units import MIB, align_down
from curvfs.world import Disk, World
from kvstore.engine.base import OpenFile
from kvstore.engine.threads import FRUITLESS_LIMIT, ThreadsEngine

#: Bytes of one piece, the last of which may have half as many more; and pieces under way in one ring.
_PIECE_BYTES = MIB
_ENTRIES = 16


class _Piece:
    """A contiguous part of a transfer."""

    __slots__ = ("at", "done", "fruitless", "view")

    def __init__(self, view: memoryview, at: int) -> None:
        self.view = view
        self.at = at
        self.done = 0
        self.fruitless = 0


class UringEngine(ThreadsEngine):
    """Raises EnvironmentError_ with the reason where io_uring is not to be had, or does not prove itself."""

    name = "uring"

    def __init__(self, world: World, *, depth: int) -> None:
        first = world.disk.ring(_ENTRIES)
        try:
            _prove(world.disk, first)
        except BaseException:
            first.close()
            raise
        super().__init__(world, depth=depth)
        self._lock = world.threads.lock()
        self._rings = [first]

    def readv(self, file: OpenFile, views: Sequence[memoryview], offset_bytes: int) -> int:
        if file.alignment_bytes == 1:
            return super().readv(file, views, offset_bytes)
        pieces = _pieces(views, offset_bytes)
        self._move(file, pieces, write=False)
        done = 0
        for piece in pieces:
            done += piece.done
            if piece.done < len(piece.view):
                break
        return done

    def write(self, file: OpenFile, view: memoryview) -> None:
        if file.alignment_bytes == 1:
            super().write(file, view)
        else:
            self._move(file, _pieces([view], 0), write=True)

    def _move(self, file: OpenFile, pieces: list[_Piece], *, write: bool) -> None:
        ring = self._take()
        try:
            left = pieces
            while left:
                now, later = left[: ring.entries], left[ring.entries :]
                calls = [RingCall(file.fd, piece.view[piece.done :], piece.at + piece.done, write) for piece in now]
                results = ring.run(calls)
                again = [piece for piece, result in zip(now, results, strict=True) if _more(file, piece, result, write)]
                left = again + later
        finally:
            with self._lock:
                self._rings.append(ring)

    def _take(self) -> Ring:
        with self._lock:
            if self._rings:
                return self._rings.pop()
        return self._disk.ring(_ENTRIES)

    def close(self, timeout_s: float) -> bool:
        clean = super().close(timeout_s)
        with self._lock:
            rings, self._rings = self._rings, []
        for ring in rings:
            ring.close()
        return clean


def _pieces(views: Sequence[memoryview], offset_bytes: int) -> list[_Piece]:
    pieces = []
    for view in views:
        while len(view):
            # A short rest goes with the piece before it: a page of 1 MiB and its header are one request, not two.
            size = _PIECE_BYTES if len(view) >= _PIECE_BYTES + _PIECE_BYTES // 2 else len(view)
            pieces.append(_Piece(view[:size], offset_bytes))
            offset_bytes += size
            view = view[size:]
    return pieces


def _more(file: OpenFile, piece: _Piece, result: int, write: bool) -> bool:
    """Book what one call moved; whether the piece needs another one. Raises OSError."""
    if result < 0 and -result not in (errno.EINTR, errno.EAGAIN):
        raise OSError(-result, os.strerror(-result), file.path)
    if result == 0 and not write:
        return False  # the end of the file
    reached = piece.done + max(0, result)
    # After a short direct call the next one must begin on the alignment again: the odd rest is moved twice.
    step = reached if reached == len(piece.view) else align_down(reached, file.alignment_bytes)
    piece.fruitless = 0 if step > piece.done else piece.fruitless + 1
    piece.done = step
    if piece.fruitless > FRUITLESS_LIMIT:
        if result < 0 or write:
            raise OSError(errno.EIO if write else errno.EAGAIN, "calls make no progress", file.path)
        piece.done = reached
        return False
    return step < len(piece.view)


def _prove(disk: Disk, ring: Ring) -> None:
    """Write and read a file by the ring, and look at it by plain calls. Raises EnvironmentError_."""
    directory = tempfile.gettempdir()
    wanted = bytes(range(256)) * 32
    got = bytearray(len(wanted))
    try:
        fd = disk.open(directory, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC)
        try:
            view, half = memoryview(bytearray(wanted)), len(wanted) // 2
            for write, target in ((True, view), (False, memoryview(got))):
                calls = [RingCall(fd, target[at : at + half], at, write) for at in (half, 0)]
                if ring.run(calls) != [half, half]:
                    raise EnvironmentError_("io_uring moved fewer bytes than asked in its self-test; use threads.")
            plain = bytearray(len(wanted))
            if disk.pread_full(fd, memoryview(plain), 0) != len(wanted) or not plain == got == wanted:
                raise EnvironmentError_("io_uring moved other bytes than asked in its self-test; use threads.")
        finally:
            disk.close(fd)
    except OSError as error:
        raise EnvironmentError_(f"io_uring cannot be tested in {directory}: {error.strerror}; use threads.") from error


def probed_engine(world: World, wanted: str, *, depth: int) -> tuple[ThreadsEngine, str]:
    """The engine asked for, or for ``auto`` the best that proves itself, and why it is that one."""
    if wanted == "threads":
        return ThreadsEngine(world, depth=depth), "asked for"
    try:
        return UringEngine(world, depth=depth), "asked for" if wanted == "uring" else "proven by its self-test"
    except CurvfsError as error:
        if wanted == "uring":
            raise
        return ThreadsEngine(world, depth=depth), str(error)
