"""Waiting for threads from asynchronous code: the same call under asyncio and under trio."""

from __future__ import annotations

import sys
from collections.abc import Callable


def _in_trio() -> bool:
    trio = sys.modules.get("trio")
    if trio is None:
        return False
    try:
        trio.lowlevel.current_task()
    except RuntimeError:
        return False
    return True


async def called(subscribe: Callable[[Callable[[], None]], None], timeout_s: float) -> None:
    """Wait until the function handed to ``subscribe`` was called, from whatever thread, or ``timeout_s`` are over."""
    if _in_trio():
        import trio

        token, event = trio.lowlevel.current_trio_token(), trio.Event()

        def wake_trio() -> None:
            try:
                token.run_sync_soon(event.set)
            except trio.RunFinishedError:
                pass

        subscribe(wake_trio)
        with trio.move_on_after(timeout_s):
            await event.wait()
        return
    import asyncio

    loop = asyncio.get_running_loop()
    future: asyncio.Future[None] = loop.create_future()

    def finish() -> None:
        if not future.done():
            future.set_result(None)

    def wake_asyncio() -> None:
        try:
            loop.call_soon_threadsafe(finish)
        except RuntimeError:  # the loop is closed
            pass

    subscribe(wake_asyncio)
    await asyncio.wait([future], timeout=timeout_s)
