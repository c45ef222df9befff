"""A lock for tasks that gives no turn away when it is free."""

from __future__ import annotations

import trio


class QuickLock:
    """As :class:`trio.Lock` in ``async with``, first come first served, but taking a free one is no checkpoint: where
    an operation takes several locks and then waits for an answer anyway, the turns of the event loop in between are
    most of its cost."""

    __slots__ = ("__weakref__", "_lock")

    def __init__(self) -> None:
        self._lock = trio.Lock()

    def locked(self) -> bool:
        return self._lock.locked()

    async def __aenter__(self) -> None:
        try:
            self._lock.acquire_nowait()
        except trio.WouldBlock:
            await self._lock.acquire()

    async def __aexit__(self, *exc: object) -> None:
        self._lock.release()
