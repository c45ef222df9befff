"""Is it worth asking? Breakers for what fails, break-even for what is slow, a budget for what is tried again.

A *place* is a worker's host name; a directory is one place without a name. Besides these there are two calls of the
store as a whole: *asking* what is there, and *putting*. Workers that are written to are in kvstore.health.writers: a
failure of one of them, while others take what is stored, is not one of putting.

**Break-even.** With the model's prefill rate known, given or observed, a prefix of n pages is worth loading when that
takes less time than computing it. What places have delivered lately, and what they have under way, tells how long it
takes. :meth:`Health.worth` answers with the n that saves the most time: pages of a slow place at the end of a prefix
are left out, a slow place at its beginning leaves nothing. What is left out is measured again by reads in the
background, for which nobody waits.

**Stalls.** A place that has been reading one object for :data:`STALLED_S` is not asked for more until it is through.

**Retries.** A read that failed is tried once more, as long as that is rare: every tenth success pays for one.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from curvfs.errors import UsageError
from curvfs.world import World
from kvstore.health.breaker import FAILURES, Breaker, State
from kvstore.health.meter import Meter, Reading
from kvstore.health.writers import STALLED_S, PlaceStats, Writers
from kvstore.results import WORKER_FAILURES, Miss, Result

#: Retries saved up, and what a success adds.
_RETRIES = 10.0
_EARNED = 0.1
#: Weight of the newest observation of the prefill rate.
_NEWEST = 0.3
#: The same place is measured in the background no more often than this.
_MEASURE_EVERY_S = 0.3

#: Who has waited so long in vain is the last one to wait.
_LONG_S = 0.5
#: A read that fails at once holds nobody up: there may be many before the place is left alone.
_IO_WEIGHT = 0.1
#: Misses that say something about storing.
_PUT_FAILURES = frozenset({Miss.UNREACHABLE, Miss.DEADLINE})


@dataclass(frozen=True, eq=False)
class HealthStats:
    """One moment of a store's health. ``places``: what is read from; ``writers``: what is written to.

    ``withheld_pages``: stored pages that lookups left out because loading them would take longer than computing them,
    or their place does not answer; ``withheld_lookups``: how many did so. ``rejected``: pages that were not even tried
    because a breaker was open. ``probes``: pages read in the background to see whether a place is well again.
    ``retries``, ``retries_refused``: reads tried once more, and those for which the budget was spent. ``opened``: how
    often breakers opened."""

    prefill_tokens_per_s: float = 0.0
    asking: str = "closed"
    putting: str = "closed"
    places: dict[str, PlaceStats] = field(default_factory=dict)
    writers: dict[str, PlaceStats] = field(default_factory=dict)
    withheld_pages: int = 0
    withheld_lookups: int = 0
    rejected: int = 0
    probes: int = 0
    retries: int = 0
    retries_refused: int = 0
    opened: int = 0


class _Place:
    def __init__(self, world: World, page_bytes: int) -> None:
        self.meter = Meter(page_bytes)
        self.breaker = Breaker(world.random)
        self.measured_s = -1e9
        self.measuring = False
        #: Pages that wait for their turn to be read.
        self.waiting = 0


class Health:
    """What is known of all places. Callable from any thread; never waits."""

    def __init__(
        self,
        world: World,
        *,
        page_bytes: int,
        page_tokens: int,
        prefill_tokens_per_s: float | None,
        writers: Writers | None = None,
    ) -> None:
        self._world = world
        self.writers = writers or Writers(world, None, page_bytes=page_bytes, at_once=1)
        self._clock = world.clock
        self._page_bytes = page_bytes
        self._page_tokens = page_tokens
        self._prefill = prefill_tokens_per_s
        self._given = prefill_tokens_per_s is not None
        self._lock = world.threads.lock()
        self._places: dict[str, _Place] = {}
        self._asking = Breaker(world.random)
        self._putting = Breaker(world.random)
        self._budget = _RETRIES
        self.withheld_pages = self.withheld_lookups = self.rejected = self.probes = 0
        self.retries = self.retries_refused = 0

    def _place(self, name: str) -> _Place:
        place = self._places.get(name)
        if place is None:
            place = self._places[name] = _Place(self._world, self._page_bytes)
        return place

    # --------------------------------------------------------------------------------------------------------- reading

    def waits(self, place: str, pages: int) -> None:
        """So many more pages wait for their turn to be read from this place; fewer, if negative."""
        with self._lock:
            self._place(place).waiting += pages

    def began(self, place: str, *, parts: int = 1) -> Reading:
        """A page, or one of its ``parts``, is being read from this place; :meth:`ended` must follow, however late."""
        reading = Reading(place, self._page_bytes // parts, self._clock.monotonic_s())
        with self._lock:
            self._place(place).meter.began(reading)
        return reading

    def ended(self, reading: Reading, result: Result | None) -> None:
        """What became of it; None: nobody wanted it any more."""
        now_s = self._clock.monotonic_s()
        with self._lock:
            place = self._place(reading.place)
            place.meter.ended(reading, now_s, delivered=not isinstance(result, Miss))
            if isinstance(result, Miss) and result in WORKER_FAILURES:
                place.breaker.failed(now_s, _IO_WEIGHT if result is Miss.IO else 1.0)
            elif result is None:
                place.breaker.gave_up()
            else:
                place.breaker.succeeded()
                self._budget = min(_RETRIES, self._budget + _EARNED)

    def admits(self, place: str) -> bool:
        """May a page be read from this place?"""
        now_s = self._clock.monotonic_s()
        with self._lock:
            known = self._places.get(place)
            if known is None or self._answers(known, now_s):
                return True
            self.rejected += 1
            return False

    @staticmethod
    def _answers(place: _Place, now_s: float) -> bool:
        return place.breaker.state(now_s) is State.CLOSED and place.meter.oldest_s(now_s) < STALLED_S

    def may_retry(self) -> bool:
        """Is a read that failed worth a second try?"""
        with self._lock:
            if self._budget < 1:
                self.retries_refused += 1
                return False
            self._budget -= 1
            self.retries += 1
            return True

    # --------------------------------------------------------------------------------------------- asking and putting

    def may_ask(self) -> bool:
        """Is the store to be asked, and waited for? Else see :meth:`may_probe`."""
        with self._lock:
            return self._asking.state(self._clock.monotonic_s()) is State.CLOSED

    def may_probe(self) -> bool:
        """Is it to be asked without waiting for the answer? Then :meth:`asked` must follow."""
        with self._lock:
            return self._asking.allows(self._clock.monotonic_s())

    def asked(self, *, answered: bool, waited_s: float = 0.0) -> None:
        """Whether the store told what is there, in time, and how long that was waited for."""
        with self._lock:
            if answered:
                self._asking.succeeded()
            else:
                self._asking.failed(self._clock.monotonic_s(), FAILURES if waited_s >= _LONG_S else 1.0)

    def may_put(self) -> bool:
        """Is a page to be stored? Then :meth:`put_ended` must follow."""
        with self._lock:
            if self._putting.allows(self._clock.monotonic_s()):
                return True
            self.rejected += 1
            return False

    def put_ended(self, result: Result | None) -> None:
        """What became of a page to be stored."""
        others_well = self.writers.others_well
        with self._lock:
            if isinstance(result, Miss) and result in _PUT_FAILURES and not others_well:
                self._putting.failed(self._clock.monotonic_s())
            elif isinstance(result, int):
                self._putting.succeeded()
            else:
                self._putting.gave_up()

    # ------------------------------------------------------------------------------------------------------ break-even

    def observe_prefill(self, tokens: int, seconds: float) -> None:
        """The model computed so many tokens in that time. Passed over where the rate was given. Raises UsageError."""
        if tokens <= 0 or seconds <= 0:
            raise UsageError(f"{tokens} tokens in {seconds} s are no prefill; give positive numbers.")
        if self._given:
            return
        with self._lock:
            rate = tokens / seconds
            self._prefill = rate if self._prefill is None else self._prefill + _NEWEST * (rate - self._prefill)

    def compute_s(self, pages: int) -> float | None:
        """How long the model takes to compute so many pages, where that is known."""
        rate = self._prefill
        return None if rate is None else pages * self._page_tokens / rate

    @property
    def choosy(self) -> bool:
        """Can :meth:`worth` leave anything out?"""
        if self._prefill is not None:
            return True
        now_s = self._clock.monotonic_s()
        with self._lock:
            return not all(self._answers(place, now_s) for place in self._places.values())

    def worth(self, places: Sequence[str | None]) -> int:
        """How many of these pages are worth loading, each from its place (None: it lies in memory)."""
        now_s = self._clock.monotonic_s()
        with self._lock:
            best = self._best(places, now_s)
            if best < len(places):
                self.withheld_pages += len(places) - best
                self.withheld_lookups += 1
            return best

    def _best(self, places: Sequence[str | None], now_s: float) -> int:
        compute_s = None if self._prefill is None else self._page_tokens / self._prefill
        best, most_s = 0, 0.0
        for number, load_s in enumerate(self._loads(places, now_s), 1):
            saved_s = number * compute_s - load_s if compute_s is not None else float(number)
            if saved_s > most_s:
                best, most_s = number, saved_s
        return best

    def load_s(self, places: Sequence[str | None]) -> float | None:
        """How long it should take to load these pages, each from its place. None: one of them was never measured."""
        now_s = self._clock.monotonic_s()
        with self._lock:
            for name in set(places) - {None}:
                place = self._places.get(name or "")
                if place is None or place.meter.seconds_per_byte(now_s) is None:
                    return None
            return max(self._loads(places, now_s), default=0.0)

    def _loads(self, places: Sequence[str | None], now_s: float) -> Iterator[float]:
        """When the first page, the first two, ... should be there; up to the first whose place does not answer."""
        known = {name: self._places[name] for name in set(places) if name is not None and name in self._places}
        answering = {name for name, place in known.items() if self._answers(place, now_s)}
        cost_s: dict[str, float] = {}
        until_s: dict[str, float] = {}
        for known_name, place in known.items():
            each = place.meter.seconds_per_byte(now_s) or 0.0
            cost_s[known_name] = each * self._page_bytes
            until_s[known_name] = each * (place.meter.flying_bytes + place.waiting * self._page_bytes)
        load_s = 0.0
        for name in places:
            if name is not None and name in known:
                if name not in answering:
                    return
                until_s[name] += cost_s[name]
                load_s = max(load_s, until_s[name])
            yield load_s

    def to_measure(self, place: str) -> bool:
        """Is it time to read from this place in the background? Then :meth:`measured` must follow."""
        now_s = self._clock.monotonic_s()
        with self._lock:
            known = self._place(place)
            if known.measuring or now_s - known.measured_s < _MEASURE_EVERY_S:
                return False
            if known.breaker.state(now_s) is not State.CLOSED and not known.breaker.allows(now_s):
                return False
            known.measuring, known.measured_s = True, now_s
            return True

    def measured(self, place: str, pages: int) -> None:
        """It was read in the background."""
        with self._lock:
            known = self._place(place)
            known.measuring, known.measured_s = False, self._clock.monotonic_s()
            self.probes += pages

    def stats(self) -> HealthStats:
        now_s = self._clock.monotonic_s()
        with self._lock:
            places = {}
            for name, place in self._places.items():
                stalled = place.meter.oldest_s(now_s) >= STALLED_S
                each = place.meter.seconds_per_byte(now_s)
                places[name] = PlaceStats(
                    state="stalled" if stalled else place.breaker.state(now_s).value,
                    bytes_per_s=1 / each if each else 0.0,
                    in_flight=place.meter.flying + place.waiting,
                    oldest_s=place.meter.oldest_s(now_s),
                    opened=place.breaker.opened,
                )
            breakers = [self._asking, self._putting, *(place.breaker for place in self._places.values())]
            writers = self.writers.stats()
            return HealthStats(
                prefill_tokens_per_s=self._prefill or 0.0,
                asking=self._asking.state(now_s).value,
                putting=self._putting.state(now_s).value,
                places=places,
                writers=writers,
                withheld_pages=self.withheld_pages,
                withheld_lookups=self.withheld_lookups,
                rejected=self.rejected,
                probes=self.probes,
                retries=self.retries,
                retries_refused=self.retries_refused,
                opened=sum(breaker.opened for breaker in breakers) + sum(one.opened for one in writers.values()),
            )
