"""Calls into the back end that a caller waits for only so long."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

from curvfs.world import ThreadPool, World

T = TypeVar("T")
U = TypeVar("U")


class Errands:
    """Does them in a thread of its own, which may hang where the caller does not. Callable from any thread."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._lock = world.threads.lock()
        self._pool: ThreadPool | None = None

    def each(self, function: Callable[[U], T], items: Sequence[U], *, timeout_s: float, late: T) -> list[T]:
        """What ``function``, which raises nothing, says of every item; ``late`` for those not done with in time, which
        are not begun any more. Raises CurvfsError once this is closed."""
        until_s = self._world.clock.monotonic_s() + timeout_s
        done: list[T] = []
        ended = self._world.threads.event()

        def job() -> None:
            try:
                for item in items:
                    if self._world.clock.monotonic_s() >= until_s:
                        break
                    done.append(function(item))
            finally:
                ended.set()

        with self._lock:
            if self._pool is None:
                self._pool = self._world.threads.pool(1, name="kvstore-errand")
            pool = self._pool
        pool.submit(job)
        ended.wait(timeout_s)
        told = done[: len(items)]
        return told + [late] * (len(items) - len(told))

    def close(self) -> None:
        """Take no more; a thread that hangs ends with the process."""
        with self._lock:
            if self._pool is not None:
                self._pool.close(0.0)
