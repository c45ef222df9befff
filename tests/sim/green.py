"""Threads of the simulated world that wait: each is a greenlet that a trio task drives.

Blocking code (a kvstore with its I/O threads, locks and conditions) runs unchanged. Where it waits, its greenlet goes
to sleep and the task awaits in its place, so virtual time passes and everybody else goes on; a call into the world is
such a place, too, as often as the seed has it. One thing runs at a time, and which is next is the seed's choice.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from typing import Any

import greenlet
import trio

from curvfs.errors import CurvfsError, DeadlineExceeded
from curvfs.simworld import SimThreads, SimWorld
from curvfs.world import ThreadHandle, ThreadPool

#: How often another one goes on, of all calls into the world that a thread makes.
_SWITCHES = 0.1


class GreenThreads(SimThreads):
    """The threads of one process. :attr:`nursery` is where they run."""

    def __init__(self, world: SimWorld, nursery: trio.Nursery) -> None:
        super().__init__(world.process)
        self.nursery = nursery
        self._green: set[Any] = set()
        self._random = world.process.universe.rng(f"green/{world.process!r}")
        enter = world.process.enter

        def hooked(call: str, detail: str = "") -> None:
            if self.inside and self._random.random() < _SWITCHES:
                self.wait(trio.lowlevel.checkpoint)
            enter(call, detail)

        world.process.enter = hooked  # type: ignore[method-assign]

    @property
    def inside(self) -> bool:
        """Is this one of these threads?"""
        try:
            return greenlet.getcurrent() in self._green
        except RuntimeError:  # a finalizer, at the interpreter's end
            return False

    def wait(self, function: Callable[[], Awaitable[Any]]) -> Any:
        """Await in a blocking function: what it took of time so far has passed when ``function`` is called."""
        current = greenlet.getcurrent()
        if current not in self._green:
            raise RuntimeError("who is no thread cannot wait: a lock is held where only tasks run")
        owed_s, self._process._owed_s = self._process._owed_s or 0.0, None
        try:
            return current.parent.switch((function, owed_s))
        finally:
            self._process._owed_s = 0.0

    def wait_for(self, lot: trio.lowlevel.ParkingLot, timeout_s: float | None) -> bool:
        """Park until somebody unparks us; False when the time was up."""

        async def park() -> bool:
            with trio.move_on_after(math.inf if timeout_s is None else max(0.0, timeout_s)):
                await lot.park()
                return True
            return False

        return bool(self.wait(park))

    async def drive(self, function: Callable[[], object]) -> None:
        """Run a blocking function as a thread, to its end."""
        process = self._process

        def body() -> float:
            process._owed_s = 0.0
            try:
                function()
            finally:
                owed_s, process._owed_s = process._owed_s or 0.0, None
            return owed_s

        thread = greenlet.greenlet(body)
        self._green.add(thread)
        try:
            request = thread.switch()
            while not thread.dead:
                wanted, owed_s = request
                try:
                    await trio.sleep(owed_s)
                    process.check_alive()
                    value = await wanted()
                except BaseException as error:
                    request = thread.throw(error)
                else:
                    request = thread.switch(value)
            await trio.sleep(request)
        finally:
            self._green.discard(thread)

    def start(self, function: Callable[[], None], *, name: str) -> ThreadHandle:
        self._process.enter("start", name)
        return _GreenThread(self, function)

    def pool(self, size: int, *, name: str) -> ThreadPool:
        return _GreenPool(self, size)

    def lock(self) -> Any:
        return GreenLock(self)

    def condition(self) -> Any:
        return GreenCondition(self)

    def event(self) -> Any:
        return GreenEvent(self)


class _GreenThread:
    def __init__(self, threads: GreenThreads, function: Callable[[], None]) -> None:
        self._ended = GreenEvent(threads)
        self._function = function
        threads.nursery.start_soon(threads.drive, self._run)

    def _run(self) -> None:
        try:
            self._function()
        finally:
            self._ended.set()

    def join(self, timeout: float | None = None) -> None:
        self._ended.wait(timeout)

    def is_alive(self) -> bool:
        return not self._ended.is_set()


class _GreenPool(ThreadPool):
    def __init__(self, threads: GreenThreads, size: int) -> None:
        self._threads = threads
        self._jobs: deque[Callable[[], None]] = deque()
        self._lot = trio.lowlevel.ParkingLot()
        self._closed = False
        self._workers = [_GreenThread(threads, self._work) for _ in range(size)]

    def _work(self) -> None:
        while True:
            while self._jobs:
                self._jobs.popleft()()
                self._threads.wait(trio.lowlevel.checkpoint)  # what the job took of time passes
            if self._closed:
                return
            self._threads.wait_for(self._lot, None)

    def submit(self, job: Callable[[], None]) -> None:
        if self._closed:
            raise CurvfsError("The thread pool is closed; no more work is taken.")
        self._jobs.append(job)
        self._lot.unpark()

    def close(self, timeout_s: float | None = None) -> bool:
        self._closed = True
        self._lot.unpark_all()
        until_s = math.inf if timeout_s is None else trio.current_time() + timeout_s
        for worker in self._workers:
            if worker.is_alive() and (left_s := until_s - trio.current_time()) > 0:
                worker.join(left_s)
        return not any(worker.is_alive() for worker in self._workers)


class GreenLock:
    """As :class:`threading.Lock`; ``reentrant``: as :class:`threading.RLock`."""

    def __init__(self, threads: GreenThreads, *, reentrant: bool = False) -> None:
        self._threads = threads
        self._reentrant = reentrant
        self._owner: Any = None
        self._depth = 0
        self._lot = trio.lowlevel.ParkingLot()

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        me = greenlet.getcurrent()
        until_s = math.inf if timeout < 0 else trio.current_time() + timeout
        while self._owner is not None and not (self._reentrant and self._owner is me):
            if not blocking or trio.current_time() >= until_s:
                return False
            self._threads.wait_for(self._lot, until_s - trio.current_time())
        self._owner = me
        self._depth += 1
        return True

    def release(self) -> None:
        self._depth -= 1
        if not self._depth:
            self._owner = None
            self._lot.unpark()

    def locked(self) -> bool:
        return self._owner is not None

    def __enter__(self) -> bool:
        return self.acquire()

    def __exit__(self, *exc: object) -> None:
        self.release()


class GreenCondition(GreenLock):
    """As :class:`threading.Condition`."""

    def __init__(self, threads: GreenThreads) -> None:
        super().__init__(threads, reentrant=True)
        self._waiting = trio.lowlevel.ParkingLot()

    def wait(self, timeout: float | None = None) -> bool:
        depth, self._depth = self._depth, 1
        self.release()
        try:
            return self._threads.wait_for(self._waiting, timeout)
        finally:
            self.acquire()
            self._depth = depth

    def notify(self, n: int = 1) -> None:
        self._waiting.unpark(count=n)

    def notify_all(self) -> None:
        self._waiting.unpark_all()


class GreenEvent:
    """As :class:`threading.Event`."""

    def __init__(self, threads: GreenThreads) -> None:
        self._threads = threads
        self._set = False
        self._lot = trio.lowlevel.ParkingLot()

    def is_set(self) -> bool:
        return self._set

    def set(self) -> None:
        self._set = True
        self._lot.unpark_all()

    def clear(self) -> None:
        self._set = False

    def wait(self, timeout: float | None = None) -> bool:
        return self._set or (self._threads.wait_for(self._lot, timeout) and self._set)


class GreenPortal:
    """In the place of :class:`curvfs.client.portal.Portal`: no thread of its own, its calls are awaited where they are
    made."""

    def __init__(
        self, make_resource: Callable[[], AbstractAsyncContextManager[Any]], world: SimWorld, *, name: str
    ) -> None:
        assert isinstance(world.threads, GreenThreads)
        self._threads = world.threads
        self._stop = trio.Event()
        self._ended = GreenEvent(self._threads)
        self._ready = GreenEvent(self._threads)
        self._failure: BaseException | None = None
        self._calls: set[trio.CancelScope] = set()
        self._threads.nursery.start_soon(self._serve, make_resource)
        self._ready.wait()
        if self._failure is not None:
            raise self._failure

    async def _serve(self, make_resource: Callable[[], AbstractAsyncContextManager[Any]]) -> None:
        try:
            async with make_resource() as self.resource, trio.open_nursery() as self._nursery:
                self._ready.set()
                await self._stop.wait()
                self._nursery.cancel_scope.cancel()
        except CurvfsError as error:
            if self._ready.is_set():
                raise
            self._failure = error
        finally:
            self._ready.set()
            self._ended.set()

    def run(self, function: Callable[..., Awaitable[Any]], *args: Any, timeout_s: float | None = None) -> Any:
        async def call() -> Any:
            if self._stop.is_set():
                raise CurvfsError("The client is closed; connect anew.")
            with trio.CancelScope() as given_up:
                self._calls.add(given_up)
                try:
                    with trio.move_on_after(math.inf if timeout_s is None else max(0.0, timeout_s)):
                        return await function(*args)
                    raise DeadlineExceeded(f"The call was not done within {timeout_s} s and was given up.")
                finally:
                    self._calls.discard(given_up)
            raise CurvfsError("The client is closed; connect anew.")

        return self._threads.wait(call)

    def post(self, function: Callable[[], Awaitable[object]]) -> bool:
        if self._stop.is_set():
            return False
        self._nursery.start_soon(function)
        return True

    def close(self, timeout_s: float) -> bool:
        if not self._threads.inside:  # a finalizer
            self._stop.set()
            return False
        self._stop.set()
        for scope in list(self._calls):
            scope.cancel()
        return self._ended.wait(timeout_s)
