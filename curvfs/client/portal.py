"""A trio thread of its own for programs made of plain threads, and the way into it."""

from __future__ import annotations

import os
from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from typing import Any, Generic, TypeVar, TypeVarTuple

import trio

from curvfs.errors import CurvfsError, DeadlineExceeded, UsageError
from curvfs.units import format_duration
from curvfs.world import World

T = TypeVar("T")
R = TypeVar("R")
Ts = TypeVarTuple("Ts")


class _Job(Generic[T]):
    """One call on its way into the trio thread and back."""

    __slots__ = ("done", "error", "function", "result", "scope")

    def __init__(self, function: Callable[[], Awaitable[T]], done: Any) -> None:
        self.function = function
        self.done = done
        self.scope: trio.CancelScope | None = None
        self.result: T | None = None
        self.error: BaseException | None = None


class Portal(Generic[R]):
    """Runs one async context manager (``resource``) in a daemon thread, and calls in it from any plain thread.

    ``fork`` copies the memory but not the thread: in a child every call raises UsageError. When the thread ends, for
    whatever reason, waiting callers get CurvfsError; nobody waits for what cannot come.
    """

    def __init__(self, make_resource: Callable[[], AbstractAsyncContextManager[R]], world: World, *, name: str) -> None:
        """Start the thread and wait until the resource is there. Raises what making it raised."""
        self._make_resource = make_resource
        self._world = world
        self._pid = os.getpid()
        self._lock = world.threads.lock()
        self._jobs: set[_Job[Any]] = set()
        self._ended = False
        self._failure: BaseException | None = None
        self._token: trio.lowlevel.TrioToken | None = None
        self._nursery: trio.Nursery | None = None
        self._stop: trio.Event | None = None
        self._ready = world.threads.event()
        self._unwanted = False
        self._thread = world.threads.start(self._main, name=name)
        try:
            self._ready.wait()
        except BaseException:
            self._unwanted = True
            raise
        if self._token is None:
            failure, self._failure = self._failure, None
            raise failure or CurvfsError("The client's thread ended before it was ready.")

    @property
    def resource(self) -> R:
        """What the thread runs; to be used inside :meth:`run` only."""
        return self._resource

    def run(self, function: Callable[[*Ts], Awaitable[T]], *args: *Ts, timeout_s: float | None = None) -> T:
        """Run an async function in the trio thread, and wait for its result.

        After ``timeout_s`` it is cancelled there and DeadlineExceeded raised; an interrupt (Ctrl-C) cancels it, too.
        Raises UsageError in a forked child and inside the trio thread, CurvfsError once the portal is closed.
        """
        self._check_usable()
        job: _Job[T] = _Job(lambda: function(*args), self._world.threads.event())
        with self._lock:
            if self._ended or self._token is None:
                raise self._closed()
            self._jobs.add(job)
            try:
                self._token.run_sync_soon(self._start, job)
            except trio.RunFinishedError:
                self._jobs.discard(job)
                raise self._closed() from None
        try:
            finished = job.done.wait(timeout_s)
        except BaseException:
            self._cancel(job)
            raise
        if not finished:
            self._cancel(job)
            if not job.done.wait(_CANCEL_GRACE_S) or _is_cancelled(job.error):
                limit = format_duration(timeout_s or 0)
                raise DeadlineExceeded(f"The call was not done within {limit} and was given up.")
        if job.error is not None:
            try:
                raise job.error
            finally:
                del job  # the traceback holds this frame: break the cycle
        return job.result  # type: ignore[return-value]

    def post(self, function: Callable[[], Awaitable[object]]) -> bool:
        """Begin an async function that never raises in the trio thread, and do not wait for it; False when that thread
        is gone. For finalizers: takes no lock, because the garbage collector may come along in any thread."""
        if self._ended or self._token is None or os.getpid() != self._pid:
            return False
        try:
            self._token.run_sync_soon(self._begin, function)
        except trio.RunFinishedError:
            return False
        return True

    def close(self, timeout_s: float) -> bool:
        """Cancel what runs, end the thread, and wait for that up to ``timeout_s``; False when it was still busy then.
        Idempotent; in a forked child it does nothing."""
        if os.getpid() != self._pid:
            return True
        with self._lock:
            if not self._ended and self._token is not None:
                try:
                    self._token.run_sync_soon(self._stop_now)
                except trio.RunFinishedError:
                    pass
        if self._inside():  # the garbage collector may come along in any thread
            return False
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _check_usable(self) -> None:
        if os.getpid() != self._pid:
            raise UsageError(
                f"This client belongs to process {self._pid} and cannot be used in its forked child {os.getpid()}; "
                "connect anew in the child, or start it with the spawn method."
            )
        if self._inside():
            raise UsageError("A blocking call was made inside the client's own thread; await the asynchronous one.")

    def _inside(self) -> bool:
        try:
            return trio.lowlevel.current_trio_token() is self._token
        except RuntimeError:
            return False

    def _closed(self) -> CurvfsError:
        why = f" ({self._failure})" if self._failure is not None else ""
        return CurvfsError(f"The client is closed{why}; connect anew.")

    def _cancel(self, job: _Job[Any]) -> None:
        def cancel() -> None:
            if job.scope is not None:
                job.scope.cancel()

        try:
            if self._token is not None:
                self._token.run_sync_soon(cancel)
        except trio.RunFinishedError:
            pass

    # What follows runs in the trio thread.

    def _main(self) -> None:
        try:
            trio.run(self._serve)
        except BaseException as error:
            self._failure = error
        finally:
            with self._lock:
                self._ended = True
                jobs, self._jobs = self._jobs, set()
            for job in jobs:
                job.error = self._closed()
                job.done.set()
            self._ready.set()

    async def _serve(self) -> None:
        async with self._make_resource() as resource:
            if self._unwanted:
                return
            self._resource = resource
            self._stop = trio.Event()
            async with trio.open_nursery() as nursery:
                self._nursery = nursery
                self._token = trio.lowlevel.current_trio_token()
                self._ready.set()
                await self._stop.wait()
                nursery.cancel_scope.cancel()

    def _stop_now(self) -> None:
        if self._stop is not None:
            self._stop.set()

    def _start(self, job: _Job[Any]) -> None:
        if job in self._jobs:
            self._begin(self._do, job)

    def _begin(self, function: Callable[[*Ts], Awaitable[object]], *args: *Ts) -> None:
        try:
            if self._nursery is not None:
                self._nursery.start_soon(function, *args)
        except RuntimeError:
            pass  # it has just been closed: whoever waits is answered when the thread ends

    async def _do(self, job: _Job[Any]) -> None:
        with trio.CancelScope() as job.scope:
            try:
                job.result = await job.function()
            except BaseException as error:
                gone = _is_cancelled(error) and not job.scope.cancel_called
                job.error = self._closed() if gone else error
                if not isinstance(error, Exception):
                    raise
            finally:
                with self._lock:
                    self._jobs.discard(job)
                job.done.set()


def _is_cancelled(error: BaseException | None) -> bool:
    """Out of a nursery with several tasks a cancellation comes as a group."""
    if isinstance(error, BaseExceptionGroup):
        return error.split(trio.Cancelled)[1] is None
    return isinstance(error, trio.Cancelled)


#: How long a call that was given up may take to notice it.
_CANCEL_GRACE_S = 1.0
