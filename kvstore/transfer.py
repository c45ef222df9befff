"""The handle of a running put or get.

Every page is in one of five states. Only a job that holds its *claim*, or its *loan*, touches the caller's memory::

    pending ──claim──> claimed ──(get: copied out)───────────────> settled
       │ ▲                │ └────(put: copied in) ──> detached ──> settled
       │ └──(a layer)─────┘                              │
       ├──lend──> lent ──────────────────────────────────┤
       └──────────────── deadline, cancel ───────────────┴───────> settled

1. A page settles once; what a job finds out later is dropped.
2. When a caller's time is up, pending, detached and lent pages settle at once. A claimed one is being copied this
   moment: the caller waits for that copy, which touches no storage.
3. So when ``result`` has returned, nobody touches the caller's memory any more, however late the storage answers.
4. Except memory on loan, which the storage itself writes to: it stays on loan until :attr:`Transfer.lent` is 0.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Generator
from typing import TYPE_CHECKING, Any

from curvfs.errors import CurvfsError, UsageError
from curvfs.world import World
from kvstore.faces import called
from kvstore.results import Miss, Result

if TYPE_CHECKING:
    from kvstore.views import PageView

logger = logging.getLogger("kvstore")

_PENDING, _CLAIMED, _DETACHED, _LENT, _SETTLED = range(5)


class Transfer:
    """Pages on their way. Made by ``put`` and ``get``; callable from any thread.

    Wait with :meth:`result`, with ``await transfer`` under asyncio or trio, by a callback, by asking :meth:`done`, or
    with :class:`kvstore.Completions`. A cancelled ``await`` cancels the transfer.
    """

    def __init__(
        self,
        world: World,
        count: int,
        *,
        timeout_s: float,
        on_result: Callable[[Result, CurvfsError | None], None],
        on_miss: Callable[[int, Miss], None] | None = None,
        layers: int = 0,
    ) -> None:
        self._clock = world.clock
        self._process_id, self._pid = world.process_id, world.process_id()
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
        self._lent = 0
        self._layers = layers
        self._arrived = [0] * count
        self._layer_callbacks: list[tuple[int, Callable[[], None]]] = []
        #: With ``get_view``: the view of each page that was delivered.
        self.views: list[PageView | None] = [None] * count

    # The caller's side.

    def done(self) -> bool:
        """Every page has its result."""
        return self._open == 0

    @property
    def lent(self) -> int:
        """Pages whose memory, given with ``loan=True``, the storage may still write to."""
        return self._lent

    def result(self, timeout_s: float | None = None) -> list[Result]:
        """Wait, at most ``timeout_s`` and at most until the call's own deadline; per key the payload bytes or a Miss.

        Pages not done by then are given up and are ``Miss.DEADLINE``. Never raises for a page; UsageError in a forked
        child, as all that follows here.
        """
        self._check_process()
        until_s = self._until_s(timeout_s)
        with self._changed:
            while self._open:
                left_s = until_s - self._clock.monotonic_s()
                if left_s <= 0:
                    break
                self._changed.wait(left_s)
        return self._end(Miss.DEADLINE)

    def _check_process(self) -> None:
        """Nobody is at work on it in a forked child, and its lock may be held for ever."""
        if self._process_id() != self._pid:
            raise UsageError("This transfer was begun before a fork and goes on in the parent only; ask there.")

    def _until_s(self, timeout_s: float | None) -> float:
        if timeout_s is None:
            return self._deadline_s
        return min(self._deadline_s, self._clock.monotonic_s() + timeout_s)

    def _end(self, cause: Miss) -> list[Result]:
        """Give up what is not done, and wait for copies under way."""
        self._give_up(cause)
        with self._changed:
            while self._open:
                self._changed.wait(1.0)
            return list(self._results)

    def __await__(self) -> Generator[Any, Any, list[Result]]:
        return self._wait().__await__()

    async def _wait(self) -> list[Result]:
        self._check_process()
        try:
            await called(lambda wake: self.add_callback(lambda _: wake()), max(0.0, self.left_s()))
        except BaseException:
            self._end(Miss.CANCELLED)
            for view in self.views:
                if view is not None:
                    view.release()
            raise
        return self._end(Miss.DEADLINE)

    def wait_returned(self, timeout_s: float) -> bool:
        """Wait until no memory is on loan any more; False when some still is."""
        self._check_process()
        until_s = self._clock.monotonic_s() + timeout_s
        with self._changed:
            while self._lent:
                left_s = until_s - self._clock.monotonic_s()
                if left_s <= 0:
                    return False
                self._changed.wait(left_s)
        return True

    def layer(self, number: int) -> Layer:
        """With ``get(..., layerwise=True)``: what has arrived of one layer (counted from 0) of every page."""
        return Layer(self, number)

    def cancel(self) -> None:
        """Give up what is not done; returns at once. ``result`` then waits for copies under way only."""
        self._check_process()
        self._give_up(Miss.CANCELLED)

    def error(self, index: int) -> CurvfsError | None:
        """What went wrong with the page at ``index``, in words, where something did."""
        return self._errors.get(index)

    def add_callback(self, function: Callable[[Transfer], None]) -> None:
        """Call ``function(self)`` once, when every page has its result: from an I/O thread, or at once. It must be
        quick; what it raises is logged."""
        self._check_process()
        with self._changed:
            if self._open:
                self._callbacks.append(function)
                return
        self._call(function, self)

    @staticmethod
    def _call(function: Callable[..., None], *args: object) -> None:
        try:
            function(*args)
        except Exception:
            logger.exception("A callback of a kvstore transfer failed.")

    def _give_up(self, cause: Miss) -> None:
        with self._changed:
            if self._open == 0:
                return
            self._given_up = cause if self._given_up is None else self._given_up
            waiting = [index for index, state in enumerate(self._states) if state in (_PENDING, _DETACHED, _LENT)]
        for index in waiting:
            self.settle(index, cause)

    # The job's side.

    def left_s(self) -> float:
        """Seconds until the deadline; 0 or less when nobody waits any longer."""
        return 0.0 if self._given_up is not None else self._deadline_s - self._clock.monotonic_s()

    def claim(self, index: int) -> bool:
        """May the caller's memory of this page be touched? Then :meth:`settle`, :meth:`detach` or :meth:`deliver` must
        follow."""
        return self._take(index, _CLAIMED)

    def lend(self, index: int) -> bool:
        """May the storage write to the caller's memory of this page? Then :meth:`give_back` must follow."""
        return self._take(index, _LENT)

    def is_pending(self, index: int) -> bool:
        """Nobody has touched, or may touch, the caller's memory of this page, and it has no result."""
        return self._states[index] == _PENDING

    def _take(self, index: int, state: int) -> bool:
        with self._changed:
            late = self.left_s() <= 0
            if self._states[index] == _PENDING and not late:
                self._states[index] = state
                self._lent += state == _LENT
                return True
        if late:
            self.settle(index, Miss.DEADLINE if self._given_up is None else self._given_up)
        return False

    def give_back(self) -> None:
        """One page's loan is over."""
        with self._changed:
            self._lent -= 1
            self._changed.notify_all()

    def detach(self, index: int) -> None:
        """The caller's memory is done with; the page has no result yet."""
        self._release(index, _DETACHED)

    def deliver(self, index: int) -> None:
        """One more layer of the page was copied out."""
        with self._changed:
            self._arrived[index] += 1
        self._release(index, _PENDING)
        self._layers_changed()

    def _release(self, index: int, state: int) -> None:
        with self._changed:
            self._states[index] = state
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
            if isinstance(result, Miss):
                if self._on_miss is not None:
                    self._on_miss(index, result)
            else:
                self._arrived[index] = self._layers
            self._open -= 1
            callbacks: list[Callable[[Transfer], None]] = []
            if self._open == 0:
                callbacks, self._callbacks = self._callbacks, []
                self._changed.notify_all()
        if self._layers:
            self._layers_changed()
        for function in callbacks:
            self._call(function, self)

    # Layers.

    def _layers_changed(self) -> None:
        with self._changed:
            self._changed.notify_all()
            ready = [entry for entry in self._layer_callbacks if self._layer_ready(entry[0])]
            self._layer_callbacks = [entry for entry in self._layer_callbacks if entry not in ready]
        for _, function in ready:
            self._call(function)

    def _layer_ready(self, number: int) -> bool:
        return all(
            arrived > number or state == _SETTLED for arrived, state in zip(self._arrived, self._states, strict=True)
        )

    def layer_result(self, number: int, timeout_s: float | None) -> list[bool]:
        """See :meth:`Layer.result`."""
        self._check_process()
        until_s = self._until_s(timeout_s)
        with self._changed:
            while not self._layer_ready(number):
                left_s = until_s - self._clock.monotonic_s()
                if left_s <= 0:
                    break
                self._changed.wait(left_s)
            return [arrived > number for arrived in self._arrived]

    def add_layer_callback(self, number: int, function: Callable[[], None]) -> None:
        """Call ``function()`` once, when every page has this layer, or a result."""
        self._check_process()
        with self._changed:
            if not self._layer_ready(number):
                self._layer_callbacks.append((number, function))
                return
        self._call(function)


class Layer:
    """One layer of every page of a transfer: wait with :meth:`result` or ``await``."""

    def __init__(self, transfer: Transfer, number: int) -> None:
        self._transfer = transfer
        self._number = number

    def result(self, timeout_s: float | None = None) -> list[bool]:
        """Wait, at most ``timeout_s`` and the call's deadline, until every page has the layer or will not get it: for
        each page whether it is there. Nothing is given up."""
        return self._transfer.layer_result(self._number, timeout_s)

    def __await__(self) -> Generator[Any, Any, list[bool]]:
        return self._wait().__await__()

    async def _wait(self) -> list[bool]:
        transfer, number = self._transfer, self._number
        await called(lambda wake: transfer.add_layer_callback(number, wake), max(0.0, transfer.left_s()))
        return transfer.layer_result(number, 0)
