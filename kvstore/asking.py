"""Questions with a deadline: a lookup stands in a request's way, so a store that hangs must not hold it up."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Protocol

from curvfs.errors import ConnectFailed, CurvfsError, DeadlineExceeded, TransportError
from curvfs.world import ThreadPool, World
from kvstore.backends.base import Found
from kvstore.health.health import Health

Answer = Found | CurvfsError | None
Ask = Callable[[Sequence[str]], list[Answer]]


class Confirm(Protocol):
    """Asks the back end; ``timeout_s`` holds where that can keep a time."""

    def __call__(self, names: Sequence[str], timeout_s: float | None = None) -> list[Answer]: ...


def _told(answers: Sequence[Answer]) -> bool:
    """Did the store say anything?"""
    return not answers or any(not isinstance(one, TransportError) for one in answers)


#: Questions under way at once; while as many hang, further ones run out of time too.
_THREADS = 2


class Asker:
    """Asks in threads of its own, which may hang where the caller does not; in the caller's where ``ends_in_time`` says
    that nothing hangs, which spares turns of the interpreter. Callable from any thread."""

    def __init__(self, world: World, ask: Confirm, health: Health, *, ends_in_time: bool) -> None:
        self._world = world
        self._health = health
        self._ask = ask
        self._ends_in_time = ends_in_time
        self._lock = world.threads.lock()
        self._pool: ThreadPool | None = None

    def ask(self, names: Sequence[str], *, until_s: float) -> list[Answer]:
        """What is there under each name, or why that cannot be told by ``until_s`` on the monotonic clock; a store that
        did not answer a moment ago is not waited for."""
        if not self._health.may_ask():
            if self._health.may_probe():
                self._probe(names[:1])
            gone = ConnectFailed(f"The store did not answer a moment ago; {len(names)} objects were not asked for.")
            return [gone] * len(names)
        started_s = self._world.clock.monotonic_s()
        answers = self._asked(names, until_s=until_s)
        waited_s = self._world.clock.monotonic_s() - started_s
        self._health.asked(answered=_told(answers), waited_s=waited_s)
        return answers

    def _probe(self, names: Sequence[str]) -> None:
        """Ask, and let nobody wait for it."""

        def job() -> None:
            answered = False
            try:
                answered = _told(self._ask(names))
            finally:
                self._health.asked(answered=answered)

        try:
            self._threads().submit(job)
        except CurvfsError:  # closed meanwhile
            self._health.asked(answered=False)

    def _asked(self, names: Sequence[str], *, until_s: float) -> list[Answer]:
        left_s = until_s - self._world.clock.monotonic_s()
        if self._ends_in_time and left_s > 0:
            return self._ask(names, left_s)
        answers: list[Answer] = []
        answered = self._world.threads.event()

        def job() -> None:
            if self._world.clock.monotonic_s() < until_s:
                answers.extend(self._ask(names))
                answered.set()

        if left_s > 0:
            try:
                self._threads().submit(job)
            except CurvfsError as error:  # closed meanwhile
                return [error] * len(names)
            if answered.wait(left_s):
                return answers
        late = DeadlineExceeded(f"The store did not tell in time whether {len(names)} objects are there.")
        return [late] * len(names)

    def _threads(self) -> ThreadPool:
        with self._lock:
            if self._pool is None:
                self._pool = self._world.threads.pool(_THREADS, name="kvstore-ask")
            return self._pool

    def within(self, timeout_s: float) -> Ask:
        """:meth:`ask` with one deadline, ``timeout_s`` from now, for all questions."""
        return functools.partial(self.ask, until_s=self._world.clock.monotonic_s() + timeout_s)

    def close(self) -> None:
        """Take no further question; threads that hang end with the process."""
        with self._lock:
            if self._pool is not None:
                self._pool.close(0.0)
