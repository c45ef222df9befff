"""Who takes what is stored: a breaker for each worker that objects are written to.

A worker is *left alone*, which is to say that new objects go to the others, when a write to it failed, when one has
been under way for :data:`STALLED_S`, and when it is slow: a page takes it :data:`_SLOW_S` and :data:`_MUCH_SLOWER`
times as long as the fastest other one. From then on it is tried in the background, with an object that nobody wants,
after half a second, then up to four, until one is written as it should be. Where nobody else has room the client asks
it all the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from curvfs.world import World
from kvstore.backends.base import Target, Targets
from kvstore.health.breaker import FAILURES, Breaker, State
from kvstore.health.meter import Meter, Reading

#: Whoever has been at one object for so long is asked for no more until it is through.
STALLED_S = 3.0
_SLOW_S = 1.0
_MUCH_SLOWER = 10.0
#: Weight of the newest page in the average.
_NEWEST = 0.3


@dataclass(frozen=True, eq=False)
class PlaceStats:
    """``state`` of its breaker, or ``stalled``. ``bytes_per_s``: 0 where nothing was measured."""

    state: str
    bytes_per_s: float
    in_flight: int
    oldest_s: float
    opened: int


class _Writer:
    def __init__(self, world: World, target: Target, page_bytes: int) -> None:
        self.target = target
        self.meter = Meter(page_bytes)
        self.breaker = Breaker(world.random)
        #: How long a page takes, averaged.
        self.page_s: float | None = None
        #: Pages that threads are at.
        self.taken = 0


class Write:
    """A page on its way to its workers."""

    __slots__ = ("parts",)

    def __init__(self, parts: list[tuple[_Writer, Reading]]) -> None:
        self.parts = parts


class Writers:
    """What is known of all of them. Callable from any thread; never waits."""

    def __init__(self, world: World, targets: Targets | None, *, page_bytes: int, at_once: int) -> None:
        """``at_once``: writes to one worker at the same time, so that one that hangs does not keep all threads."""
        self._world = world
        self._targets = targets
        self._page_bytes = page_bytes
        self.at_once = at_once
        self._lock = world.threads.lock()
        self._writers: dict[int, _Writer] = {}

    @property
    def choosing(self) -> bool:
        """Can new objects go elsewhere?"""
        return self._targets is not None

    def _writer(self, target: Target) -> _Writer:
        writer = self._writers.get(target.worker_id)
        if writer is None:
            writer = self._writers[target.worker_id] = _Writer(self._world, target, self._page_bytes)
        elif target.name:
            writer.target = target
        return writer

    # ---------------------------------------------------------------------------------------------------------- writing

    def takes(self, targets: Sequence[Target]) -> bool:
        """May one more page be written to these now? Then :meth:`let_go` must follow. Always yes where objects cannot
        go elsewhere."""
        if self._targets is None:
            return True
        with self._lock:
            known = [self._writer(one) for one in targets]
            if any(writer.taken >= self.at_once for writer in known):
                return False
            for writer in known:
                writer.taken += 1
            return True

    def let_go(self, targets: Sequence[Target]) -> None:
        """The page is over with."""
        if self._targets is not None:
            with self._lock:
                for one in targets:
                    self._writer(one).taken -= 1

    def left_alone(self, targets: Sequence[Target]) -> bool:
        """Does one of these get no new objects?"""
        now_s = self._world.clock.monotonic_s()
        with self._lock:
            return any(self._writer(one).breaker.state(now_s) is not State.CLOSED for one in targets)

    def began(self, targets: Sequence[Target]) -> Write:
        """A page is being written to these; :meth:`ended` must follow, however late."""
        now_s = self._world.clock.monotonic_s()
        with self._lock:
            parts = [(self._writer(one), Reading(one.name, self._page_bytes, now_s)) for one in targets]
            for writer, reading in parts:
                writer.meter.began(reading)
        return Write(parts)

    def ended(self, write: Write, *, failed: bool, stored: bool) -> None:
        """What became of it; neither: nothing that says something about the workers."""
        now_s = self._world.clock.monotonic_s()
        with self._lock:
            for writer, reading in write.parts:
                writer.meter.ended(reading, now_s, delivered=stored)
                if stored:
                    took_s = now_s - reading.started_s
                    before_s = took_s if writer.page_s is None else writer.page_s
                    writer.page_s = before_s + _NEWEST * (took_s - before_s)
                if failed:
                    self._leave_alone(writer, now_s)
                elif stored and writer.breaker.state(now_s) is State.CLOSED:
                    writer.breaker.succeeded()

    # ---------------------------------------------------------------------------------------------------- leaving alone

    def review(self) -> list[Target]:
        """Leave alone who has to be; those of them whom it is time to try, each of which :meth:`tried` must follow."""
        if self._targets is None:
            return []
        now_s = self._world.clock.monotonic_s()
        avoided = self._targets.avoided()
        with self._lock:
            for worker_id in avoided:  # whose writes failed in the client
                self._writer(Target(worker_id))
            for writer in self._writers.values():
                left = writer.breaker.state(now_s) is not State.CLOSED
                if left or writer.target.worker_id in avoided or self._hangs(writer, now_s):
                    self._leave_alone(writer, now_s, again=left)
            return [writer.target for writer in self._writers.values() if self._due(writer, now_s)]

    @staticmethod
    def _due(writer: _Writer, now_s: float) -> bool:
        return writer.breaker.state(now_s) is not State.CLOSED and writer.breaker.allows(now_s)

    def _hangs(self, writer: _Writer, now_s: float) -> bool:
        return writer.meter.oldest_s(now_s) >= STALLED_S or self._is_slow(writer, writer.page_s, now_s)

    def _is_slow(self, writer: _Writer, page_s: float | None, now_s: float) -> bool:
        others = [
            other.page_s
            for other in self._writers.values()
            if other is not writer and other.page_s is not None and other.breaker.state(now_s) is State.CLOSED
        ]
        if page_s is None or not others:
            return False
        return page_s >= _SLOW_S and page_s >= _MUCH_SLOWER * min(others)

    def _leave_alone(self, writer: _Writer, now_s: float, *, again: bool = False) -> None:
        """``again``: the client may have been made to ask it, because no other one had room."""
        if self._targets is not None:
            if not again:
                writer.breaker.failed(now_s, FAILURES)
            self._targets.avoid(writer.target.worker_id)

    def tried(self, target: Target, took_s: float | None) -> None:
        """A page was written there in the background in so many seconds; None: it was not."""
        now_s = self._world.clock.monotonic_s()
        with self._lock:
            writer = self._writer(target)
            well = took_s is not None and not self._is_slow(writer, took_s, now_s)
            if well and self._targets is not None and writer.meter.oldest_s(now_s) < STALLED_S:
                writer.breaker.succeeded()
                writer.page_s = None  # what was measured is of another time
                self._targets.readmit(target.worker_id)
            else:
                self._leave_alone(writer, now_s)

    # ---------------------------------------------------------------------------------------------------------- telling

    @property
    def others_well(self) -> bool:
        """Somebody is left alone, and somebody else takes what is stored: failures are that one's, not the store's."""
        now_s = self._world.clock.monotonic_s()
        with self._lock:
            closed = [writer.breaker.state(now_s) is State.CLOSED for writer in self._writers.values()]
            return any(closed) and not all(closed)

    def stats(self) -> dict[str, PlaceStats]:
        now_s = self._world.clock.monotonic_s()
        with self._lock:
            names = [writer.target.name for writer in self._writers.values()]
            found = {}
            for writer in self._writers.values():
                name, each = writer.target.name, writer.meter.seconds_per_byte(now_s)
                if self.choosing and (not name or names.count(name) > 1):
                    name = f"{name} {writer.target.worker_id}".strip()
                oldest_s = writer.meter.oldest_s(now_s)
                found[name] = PlaceStats(
                    state="stalled" if oldest_s >= STALLED_S else writer.breaker.state(now_s).value,
                    bytes_per_s=1 / each if each else 0.0,
                    in_flight=writer.meter.flying,
                    oldest_s=oldest_s,
                    opened=writer.breaker.opened,
                )
            return found
