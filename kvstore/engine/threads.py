"""The engine that is always there: plain threads with ``preadv`` and ``pwritev``."""

from __future__ import annotations

import errno
from collections.abc import Callable, Sequence

from curvfs.units import align_down
from curvfs.world import World
from kvstore.engine.base import Engine, OpenFile

#: Calls in a row that may come back without progress (interrupted, or shorter than the alignment) before we give up.
FRUITLESS_LIMIT = 100
#: Pieces of memory that one call takes.
_IOV_MAX = 1024
#: Writing threads beyond ``depth``, which no single worker can keep busy.
SPARE = 2


class ThreadsEngine(Engine):
    name = "threads"

    def __init__(self, world: World, *, depth: int) -> None:
        self.depth = depth
        self._disk = world.disk
        self._world = world
        self._reading = world.threads.pool(depth, name="kvstore")
        self._writing = world.threads.pool(depth + SPARE, name="kvstore-put")

    def submit(self, job: Callable[[], None], *, writing: bool = False) -> None:
        (self._writing if writing else self._reading).submit(job)

    def readv(self, file: OpenFile, views: Sequence[memoryview], offset_bytes: int) -> int:
        wanted = sum(map(len, views))
        done = fruitless = 0
        while done < wanted:
            try:
                count = self._disk.preadv(file.fd, _rest(views, done), offset_bytes + done)
            except (InterruptedError, BlockingIOError):
                count = None
            if count == 0:
                break
            # After a short direct read the next one must begin on the alignment again: the odd rest is read twice.
            reached = done if count is None else done + count
            step = reached if reached == wanted else align_down(reached, file.alignment_bytes)
            fruitless = 0 if step > done else fruitless + 1
            if fruitless > FRUITLESS_LIMIT:
                if count is None:
                    raise OSError(errno.EAGAIN, "the read was interrupted again and again", file.path)
                return reached
            done = step
        return done

    def write(self, file: OpenFile, view: memoryview) -> None:
        done = fruitless = 0
        while done < len(view):
            try:
                count = self._disk.pwritev(file.fd, [view[done:]], done)
            except (InterruptedError, BlockingIOError):
                count = 0
            reached = done + count
            step = reached if reached == len(view) else align_down(reached, file.alignment_bytes)
            fruitless = 0 if step > done else fruitless + 1
            if fruitless > FRUITLESS_LIMIT:
                raise OSError(errno.EIO, "writes make no progress", file.path)
            done = step

    def close(self, timeout_s: float) -> bool:
        until_s = self._world.clock.monotonic_s() + timeout_s
        written = self._writing.close(timeout_s)
        return self._reading.close(max(0.0, until_s - self._world.clock.monotonic_s())) and written


def _rest(views: Sequence[memoryview], done: int) -> list[memoryview]:
    """What is left of ``views`` after ``done`` bytes, as much as one call takes."""
    rest = []
    for view in views:
        if done < len(view):
            rest.append(view[done:])
            if len(rest) == _IOV_MAX:
                break
        done = max(0, done - len(view))
    return rest
