"""Work in the background: one thread, made when there is something to do for it."""

from __future__ import annotations

import logging

from curvfs.errors import CurvfsError
from curvfs.world import ThreadPool, World
from kvstore.capacity.room import Room

logger = logging.getLogger("kvstore")


class Chores:
    """Has :meth:`Room.tidy` done, once at a time. Callable from any thread; nothing here waits."""

    def __init__(self, world: World, room: Room) -> None:
        self._world = world
        self._room = room
        self._lock = world.threads.lock()
        self._pool: ThreadPool | None = None
        self._running = self._closed = False
        room.on_due = self.poke

    def poke(self) -> None:
        """Do what is due, if anything is."""
        if not self._room.due:
            return
        with self._lock:
            if self._running or self._closed:
                return
            self._running = True
            if self._pool is None:
                self._pool = self._world.threads.pool(1, name="kvstore-tidy")
            pool = self._pool
        try:
            pool.submit(self._tidy)
        except CurvfsError:  # closed meanwhile
            self._running = False

    def _tidy(self) -> None:
        try:
            self._room.tidy()
        except CurvfsError as error:
            logger.log(logging.DEBUG if self._closed else logging.WARNING, "kvstore could not tidy up: %s", error)
        except Exception:
            logger.exception("kvstore failed to tidy up.")
        finally:
            self._running = False

    def close(self, timeout_s: float) -> bool:
        """Let what is under way end soon; False when it was still busy after ``timeout_s``."""
        with self._lock:
            self._closed = True
            pool = self._pool
        self._room.stop()
        return pool is None or pool.close(timeout_s)
