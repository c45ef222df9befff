"""Reads and writes for which nobody waits: is a place well again?"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from functools import partial

from curvfs.errors import CurvfsError
from curvfs.world import ThreadPool, World
from kvstore.backends.base import Backend, Found, Target
from kvstore.health.health import Health
from kvstore.results import Miss, miss_of
from kvstore.slabs import SlabPool

logger = logging.getLogger("kvstore")

#: Pages read at once to measure a place.
_PAGES = 4


class Prober:
    """Reads pages that a lookup left out, and writes to workers that are left alone. Callable from any thread; nothing
    here waits."""

    def __init__(
        self,
        world: World,
        backend: Backend,
        health: Health,
        slabs: SlabPool,
        outgoing: SlabPool,
        *,
        object_bytes: int,
    ) -> None:
        """``slabs`` are for what is read, ``outgoing`` for what is written: objects of ``object_bytes``."""
        self._world = world
        self._backend = backend
        self._health = health
        self._slabs = slabs
        self._outgoing = outgoing
        self._object_bytes = object_bytes
        self._lock = world.threads.lock()
        self._pool: ThreadPool | None = None
        self._closed = False

    def measure(self, place: str, pages: Sequence[tuple[str, Found]]) -> None:
        """Read some of these pages of a place, unless that was done a moment ago."""
        chosen = pages[:_PAGES]
        if not chosen or self._closed or not self._health.to_measure(place):
            return
        left = [len(chosen)]
        for name, found in chosen:
            try:
                self._threads().submit(partial(self._read, place, name, found, left, len(chosen)))
            except CurvfsError:  # closed meanwhile
                self._done(place, left, len(chosen))

    def _threads(self) -> ThreadPool:
        with self._lock:
            if self._pool is None:
                self._pool = self._world.threads.pool(_PAGES, name="kvstore-probe")
            return self._pool

    def attempt(self, target: Target) -> None:
        """Write an object that nobody wants to a worker, of which :meth:`Writers.tried` is told."""
        try:
            self._threads().submit(partial(self._write, target))
        except CurvfsError:  # closed meanwhile
            self._health.writers.tried(target, None)

    def _write(self, target: Target) -> None:
        took_s = None
        targets = self._backend.targets
        slab = self._outgoing.acquire(0.0)
        try:
            if slab is not None and targets is not None and not self._closed:
                started_s = self._world.clock.monotonic_s()
                targets.attempt(target.worker_id, slab.view[: self._object_bytes])
                took_s = self._world.clock.monotonic_s() - started_s
        except CurvfsError as error:
            logger.debug("kvstore tried worker %d in vain: %s", target.worker_id, error)
        except Exception:
            logger.exception("kvstore failed to try worker %d.", target.worker_id)
        finally:
            if slab is not None:
                self._outgoing.release(slab)
            self._health.writers.tried(target, took_s)

    def _read(self, place: str, name: str, found: Found, left: list[int], pages: int) -> None:
        slab = self._slabs.acquire(0.0)
        try:
            if slab is not None and not self._closed:
                reading = self._health.began(place)
                result: int | Miss = Miss.IO
                try:
                    with self._backend.open(name, found) as reader:
                        length = min(reader.length_bytes, slab.size_bytes)
                        result = reader.read(slab.view[:length])
                except CurvfsError as error:
                    result = miss_of(error)
                except Exception:
                    logger.exception("kvstore failed to read %s in the background.", name)
                finally:
                    self._health.ended(reading, result)
        finally:
            if slab is not None:
                self._slabs.release(slab)
            self._done(place, left, pages)

    def _done(self, place: str, left: list[int], pages: int) -> None:
        with self._lock:
            left[0] -= 1
            last = left[0] == 0
        if last:
            self._health.measured(place, pages)

    def close(self) -> None:
        """Take no further ones; threads that hang end with the process."""
        with self._lock:
            self._closed = True
            if self._pool is not None:
                self._pool.close(0.0)
