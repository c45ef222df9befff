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

    __slots__ = ("at", "done", "error", "file", "fruitless", "view")

    def __init__(self, file: OpenFile, view: memoryview, at: int) -> None:
        self.file = file
        self.error: OSError | None = None
        self.view = view
        self.at = at
        self.done = 0
        self.fruitless = 0


class UringEngine(ThreadsEngine):
    """Raises EnvironmentError_ with the reason where io_uring is not to be had, or does not prove itself."""

    name = "uring"
    together = 8

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
        pieces = _pieces(file, views, offset_bytes)
        self._move(pieces, write=False)
        return _done(pieces)

    def read_many(self, reads: Sequence[tuple[OpenFile, Sequence[memoryview]]]) -> list[int | OSError]:
        ahead = [[] if file.alignment_bytes == 1 else _pieces(file, views, 0) for file, views in reads]
        self._move([piece for pieces in ahead for piece in pieces], write=False)
        counts: list[int | OSError] = []
        for pieces, read in zip(ahead, reads, strict=True):
            try:
                counts.append(_done(pieces) if pieces else super().readv(*read, 0))
            except OSError as error:
                counts.append(error)
        return counts

    def write(self, file: OpenFile, view: memoryview) -> None:
        if file.alignment_bytes == 1:
            super().write(file, view)
            return
        pieces = _pieces(file, [view], 0)
        self._move(pieces, write=True)
        _done(pieces)

    def _move(self, pieces: list[_Piece], *, write: bool) -> None:
        """Move all pieces; what failed is noted in each."""
        ring = self._take()
        try:
            left = pieces
            while left:
                now, later = left[: ring.entries], left[ring.entries :]
                calls = [
                    RingCall(piece.file.fd, piece.view[piece.done :], piece.at + piece.done, write) for piece in now
                ]
                results = ring.run(calls)
                again = [piece for piece, result in zip(now, results, strict=True) if _more(piece, result, write)]
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


def _pieces(file: OpenFile, views: Sequence[memoryview], offset_bytes: int) -> list[_Piece]:
    pieces = []
    for view in views:
        while len(view):
            # A short rest goes with the piece before it: a page of 1 MiB and its header are one request, not two.
            size = _PIECE_BYTES if len(view) >= _PIECE_BYTES + _PIECE_BYTES // 2 else len(view)
            pieces.append(_Piece(file, view[:size], offset_bytes))
            offset_bytes += size
            view = view[size:]
    return pieces


def _done(pieces: Sequence[_Piece]) -> int:
    """The bytes that a transfer moved. Raises OSError."""
    for piece in pieces:
        if piece.error is not None:
            raise piece.error
    done = 0
    for piece in pieces:
        done += piece.done
        if piece.done < len(piece.view):
            break
    return done


def _more(piece: _Piece, result: int, write: bool) -> bool:
    """Book what one call moved, or that it failed; whether the piece needs another one."""
    file = piece.file
    if result < 0 and -result not in (errno.EINTR, errno.EAGAIN):
        piece.error = OSError(-result, os.strerror(-result), file.path)
        return False
    if result == 0 and not write:
        return False  # the end of the file
    reached = piece.done + max(0, result)
    # After a short direct call the next one must begin on the alignment again: the odd rest is moved twice.
    step = reached if reached == len(piece.view) else align_down(reached, file.alignment_bytes)
    piece.fruitless = 0 if step > piece.done else piece.fruitless + 1
    piece.done = step
    if piece.fruitless > FRUITLESS_LIMIT:
        if result < 0 or write:
            piece.error = OSError(errno.EIO if write else errno.EAGAIN, "calls make no progress", file.path)
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
