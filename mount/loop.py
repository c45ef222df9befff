"""How requests of the kernel are waited for: pyfuse3's loop with fewer turns of the event loop.

pyfuse3 has several tasks of which one at a time waits for the next request, under a lock. Its own lock goes to the
next task whenever a request has come, which costs a turn of the event loop for each request, and another one to get it
back. Here the task that has answered a request without waiting for anything goes on waiting for the next one; another
takes its place only when the handler of a request says, through :meth:`Turns.pass_on`, that it is going to wait.

pyfuse3 lets its trio be replaced, as its own asyncio mode does: :func:`enter` hands it one whose lock is this one.
"""

from __future__ import annotations

from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any

import trio


class Turns:
    """The lock: held by the task that waits for the next request."""

    def __init__(self) -> None:
        self._held = False
        self._parked: deque[trio.lowlevel.Task] = deque()

    async def __aenter__(self) -> None:
        if not self._held:
            self._held = True
            return
        task = trio.lowlevel.current_task()
        self._parked.append(task)

        def abort(_: object) -> trio.lowlevel.Abort:
            if task not in self._parked:
                return trio.lowlevel.Abort.FAILED  # it is its turn already
            self._parked.remove(task)
            return trio.lowlevel.Abort.SUCCEEDED

        await trio.lowlevel.wait_task_rescheduled(abort)

    async def __aexit__(self, *exc: object) -> None:
        self._held = False

    def pass_on(self) -> None:
        """Let another task wait for the next request, if none does."""
        if self._parked and not self._held:
            self._held = True
            trio.lowlevel.reschedule(self._parked.popleft())


class _Nursery:
    """A nursery whose tasks pass their turn on when they end."""

    def __init__(self, nursery: trio.Nursery, turns: Turns) -> None:
        self._nursery = nursery
        self._turns = turns

    def start_soon(self, function: Callable[..., Awaitable[Any]], *args: Any, name: str | None = None) -> None:
        async def run() -> None:
            try:
                await function(*args)
            finally:
                self._turns.pass_on()

        self._nursery.start_soon(run, name=name)


def enter(pyfuse3: Any) -> Turns:
    """Have pyfuse3 wait for requests like this from its next ``main`` on."""
    turns = Turns()

    @asynccontextmanager
    async def open_nursery() -> AsyncIterator[_Nursery]:
        async with trio.open_nursery() as nursery:
            yield _Nursery(nursery, turns)

    pyfuse3.trio = SimpleNamespace(
        Lock=lambda: turns,
        ClosedResourceError=trio.ClosedResourceError,
        open_nursery=open_nursery,
        lowlevel=trio.lowlevel,
        from_thread=trio.from_thread,
    )
    return turns
