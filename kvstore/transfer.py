"""The handle of a running put or get.

Every page is in one of four states. Only a job that holds a page's *claim* touches the caller's memory::

    pending ──claim──> claimed ──(get: copied out)───────────────> settled
       │                  └─────(put: copied in) ──> detached ───> settled
       └────────────── deadline, cancel ────────────────┴────────> settled

1. A page settles once; what a job finds out later is dropped.
2. When a caller's time is up, pending and detached pages settle at once. A claimed one is being copied this moment:
   the caller waits for that copy, which touches no storage.
3. So when ``result`` has returned, nobody touches the caller's memory any more, however late the storage answers.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

from curvfs.errors import CurvfsError
from curvfs.world import World
from kvstore.results import Miss, Result

logger = logging.getLogger("kvstore")

_PENDING, _CLAIMED, _DETACHED, _SETTLED = range(4)


class Transfer:
    """Pages on their way. Made by ``put`` and ``get``; callable from any thread."""

    def __init__(
        self,
        world: World,
        count: int,
        *,
        timeout_s: float,
        on_result: Callable[[Result, CurvfsError | None], None],
        on_miss: Callable[[int], None] | None = None,
    ) -> None:
        self._clock = world.clock
        self._deadline_s = world.clock.monotonic_s() + timeout_s
        self._changed = world.threads.condition()
        self._states = bytearray(count)
        self._results: list[Result] = [Miss.CANCELLED] * count
        self._errors: dict[int, CurvfsError] = {}
        self._open = count
        self._given_up: Miss | None = None
        self._callbacks: list[Callable[[Transfer], None]] = []
        self._on_result = on_result
        self._on_miss = on_miss

    # The caller's side.

    def done(self) -> bool:
        """Every page has its result."""
        return self._open == 0

    def result(self, timeout_s: float | None = None) -> list[Result]:
        """Wait, at most ``timeout_s`` and at most until the call's own deadline; per key the payload bytes or a Miss.

        Pages not done by then are given up and are ``Miss.DEADLINE``. Never raises for a page.
        """
        until_s = self._deadline_s
        if timeout_s is not None:
            until_s = min(until_s, self._clock.monotonic_s() + timeout_s)
        with self._changed:
            while self._open:
                left_s = until_s - self._clock.monotonic_s()
                if left_s <= 0:
                    break
                self._changed.wait(left_s)
        self._give_up(Miss.DEADLINE)
        with self._changed:
            while self._open:
                self._changed.wait(1.0)
            return list(self._results)

    def cancel(self) -> None:
        """Give up what is not done; returns at once. ``result`` then waits for copies under way only."""
        self._give_up(Miss.CANCELLED)

    def error(self, index: int) -> CurvfsError | None:
        """What went wrong with the page at ``index``, in words, where something did."""
        return self._errors.get(index)

    def add_callback(self, function: Callable[[Transfer], None]) -> None:
        """Call ``function(self)`` once, when every page has its result: from an I/O thread, or at once. It must be
        quick; what it raises is logged."""
        with self._changed:
            if self._open:
                self._callbacks.append(function)
                return
        self._call(function)

    def _call(self, function: Callable[[Transfer], None]) -> None:
        try:
            function(self)
        except Exception:
            logger.exception("A callback of a kvstore transfer failed.")

    def _give_up(self, cause: Miss) -> None:
        with self._changed:
            if self._open == 0:
                return
            self._given_up = cause if self._given_up is None else self._given_up
            waiting = [index for index, state in enumerate(self._states) if state in (_PENDING, _DETACHED)]
        for index in waiting:
            self.settle(index, cause)

    # The job's side.

    def left_s(self) -> float:
        """Seconds until the deadline; 0 or less when nobody waits any longer."""
        return 0.0 if self._given_up is not None else self._deadline_s - self._clock.monotonic_s()

    def claim(self, index: int) -> bool:
        """May the caller's memory of this page be touched? Then :meth:`settle` or :meth:`detach` must follow."""
        with self._changed:
            late = self.left_s() <= 0
            if self._states[index] == _PENDING and not late:
                self._states[index] = _CLAIMED
                return True
        if late:
            self.settle(index, Miss.DEADLINE if self._given_up is None else self._given_up)
        return False

    def detach(self, index: int) -> None:
        """The caller's memory is done with; the page has no result yet."""
        with self._changed:
            self._states[index] = _DETACHED
            given_up = self._given_up
        if given_up is not None:
            self.settle(index, given_up)

    def settle(self, index: int, result: Result, error: CurvfsError | None = None) -> None:
        """Give a page its result, unless it has one."""
        with self._changed:
            if self._states[index] == _SETTLED:
                return
            self._states[index] = _SETTLED
            self._results[index] = result
            if error is not None:
                self._errors[index] = error
            self._on_result(result, error)
            if self._on_miss is not None and isinstance(result, Miss):
                self._on_miss(index)
            self._open -= 1
            if self._open:
                return
            callbacks, self._callbacks = self._callbacks, []
            self._changed.notify_all()
        for function in callbacks:
            self._call(function)
