"""When objects were last used. The pool does not record reads, so each process tells it from time to time."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable

from curvfs.errors import CurvfsError
from curvfs.world import World
from kvstore.backends.base import Backend

#: Names remembered between two flushes; the ones used longest ago are not told.
_KEPT = 1 << 16
#: Objects marked in one turn of the client.
_BATCH = 256


class StoreClock:
    """The store's own time without asking it: callable from any thread, never waits. Set anew by :meth:`look`."""

    def __init__(self, world: World, backend: Backend) -> None:
        self._clock = world.clock
        self._staging = backend.staging
        self.look()

    def look(self) -> None:
        """Set it by the last sign of life, which may wait for one that is being given."""
        self._offset_s = self._staging.now_s() - self._clock.monotonic_s()

    def now_s(self) -> float:
        return self._clock.monotonic_s() + self._offset_s


class Accesses:
    """Uses of objects since the last flush. Callable from any thread; only :meth:`flush` waits for the store."""

    def __init__(self, world: World, backend: Backend, *, every_s: float) -> None:
        self._clock = world.clock
        self._backend = backend
        self._every_s = every_s
        self._lock = world.threads.lock()
        self._seen: OrderedDict[str, float] = OrderedDict()
        self._flushed_s = world.clock.monotonic_s()
        self.flushed = self.dropped = 0

    def note(self, names: Iterable[str], when_s: float) -> None:
        """These were used at ``when_s`` on the store's clock."""
        with self._lock:
            for name in names:
                self._seen[name] = when_s
                self._seen.move_to_end(name)
            while len(self._seen) > _KEPT:
                self._seen.popitem(last=False)
                self.dropped += 1

    @property
    def due(self) -> bool:
        return self._clock.monotonic_s() - self._flushed_s >= self._every_s

    def flush(self) -> None:
        """Tell the store. What it does not take is dropped and counted. Raises CurvfsError."""
        with self._lock:
            seen, self._seen = self._seen, OrderedDict()
            self._flushed_s = self._clock.monotonic_s()
        entries = list(seen.items())
        for start in range(0, len(entries), _BATCH):
            batch = entries[start : start + _BATCH]
            try:
                self._backend.mark_accessed(batch)
            except CurvfsError:
                with self._lock:
                    self.dropped += len(entries) - start
                raise
            with self._lock:
                self.flushed += len(batch)
