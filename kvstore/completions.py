"""Completions as a file descriptor: for engines that poll, or that have an event loop of their own."""

from __future__ import annotations

import os

from curvfs.world import World
from kvstore.transfer import Transfer


class Completions:
    """A queue of finished transfers with an eventfd: readable while something is in it. A context manager.

    ::

        queue = store.completions()
        queue.watch(store.put(keys, segments))
        select.select([queue], [], [], timeout)
        for transfer in queue.drain():
            transfer.result()
    """

    def __init__(self, world: World) -> None:
        self._lock = world.threads.lock()
        self._done: list[Transfer] = []
        self._watched: set[Transfer] = set()
        self._fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)

    def fileno(self) -> int:
        return self._fd

    def watch(self, transfer: Transfer) -> None:
        """Queue it here once every page of it has its result."""
        with self._lock:
            self._watched.add(transfer)
        transfer.add_callback(self._finished)

    def _finished(self, transfer: Transfer) -> None:
        with self._lock:
            self._watched.discard(transfer)
            self._done.append(transfer)
            if self._fd >= 0:
                os.eventfd_write(self._fd, 1)

    def next_deadline_s(self) -> float | None:
        """Seconds until the first deadline of those watched, None without any: how long to poll at most. ``drain``
        gives up what is over its deadline."""
        with self._lock:
            return min((max(0.0, transfer.left_s()) for transfer in self._watched), default=None)

    def drain(self) -> list[Transfer]:
        """Those that are done, each once; returns at once."""
        with self._lock:
            late = [transfer for transfer in self._watched if transfer.left_s() <= 0]
        for transfer in late:
            transfer.result(0)
        with self._lock:
            try:
                os.eventfd_read(self._fd)
            except BlockingIOError:
                pass
            done, self._done = self._done, []
            return done

    def close(self) -> None:
        """Close the descriptor; idempotent."""
        with self._lock:
            if self._fd >= 0:
                fd, self._fd = self._fd, -1
                os.close(fd)  # noqa: TID251

    def __enter__(self) -> Completions:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()
