"""Counters of one store, and the record that shows them."""

from __future__ import annotations

import logging
from collections import Counter, deque
from dataclasses import dataclass
from typing import Any

from curvfs.errors import CurvfsError
from curvfs.histogram import Histogram
from curvfs.world import World
from kvstore.capacity.room import CapacityStats
from kvstore.health.health import HealthStats
from kvstore.results import TROUBLE, Miss, Result
from kvstore.tiers.memory import MemoryStats
from kvstore.tiers.stats import BehindStats

logger = logging.getLogger("kvstore")

#: The same kind of trouble is written to the log at most this often.
_LOG_EVERY_S = 10.0
#: A page or a lookup that took longer is a slow call; so many of the latest are kept.
SLOW_CALL_S = 1.0
_SLOW_CALLS = 5


@dataclass(frozen=True, slots=True)
class Stats:
    """One moment of a store. Byte counts are payload. ``get_misses`` and ``put_failures`` are by cause.

    ``direct`` and ``direct_reason`` say how bytes move, ``fallbacks`` how many objects moved otherwise.
    ``page_cache_reads``: objects read from the page cache, where they lay. ``engine`` and ``engine_reason`` say what
    moves bytes, and why that. ``resharded``: pages put together from objects of other shards. ``loans_copied``: pages
    whose memory could not be read into, and were copied. ``read_again``: objects that looked damaged and were sound
    when they were read by another path; ``quarantined``: those that were not. ``failing_puts``: how many puts in a row
    have failed up to now (0: healthy). ``last_error``: the last trouble. ``latencies``: of ``put`` and ``get`` per page
    that was stored or delivered, from the call to its result, and of ``lookup`` per call
    (:meth:`curvfs.histogram.Histogram.summary`).
    """

    backend: str
    direct: bool
    direct_reason: str
    alignment_bytes: int
    fallbacks: int
    page_cache_reads: int
    engine: str
    engine_reason: str
    depth: int
    slab_bytes: int
    slabs_in_use: int
    in_flight: int
    puts: int
    puts_existing: int
    put_bytes: int
    put_failures: dict[str, int]
    failing_puts: int
    gets: int
    get_bytes: int
    get_misses: dict[str, int]
    lookups: int
    lookup_pages: int
    swept: int
    evicted: int
    resharded: int
    loans_copied: int
    views_out: int
    read_again: int
    quarantined: int
    last_error: str
    latencies: dict[str, dict[str, float]]
    capacity: CapacityStats
    health: HealthStats
    memory: MemoryStats
    behind: BehindStats


def _end_of(result: Result) -> str:
    """How a page ended, for people."""
    return result.value if isinstance(result, Miss) else f"{result} bytes"


class Counters:
    """What a store counts. Callable from any thread."""

    def __init__(self, world: World) -> None:
        self._clock = world.clock
        self._lock = world.threads.lock()
        self._logged_s: dict[tuple[str, Miss], float] = {}
        self.puts = self.puts_existing = self.put_bytes = self.failing_puts = 0
        self.gets = self.get_bytes = 0
        self.lookups = self.lookup_pages = self.swept = 0
        self.resharded = self.loans_copied = self.evictions = self.sound_again = self.quarantined = 0
        self.put_failures: Counter[str] = Counter()
        self.get_misses: Counter[str] = Counter()
        self.last_error = ""
        self._latencies = {"put": Histogram(), "get": Histogram(), "lookup": Histogram()}
        self._slow_calls: deque[dict[str, Any]] = deque(maxlen=_SLOW_CALLS)

    def put_done(self, result: Result, error: CurvfsError | None, elapsed_s: float) -> None:
        with self._lock:
            if isinstance(result, Miss):
                self.put_failures[result.value] += 1
                self.failing_puts += 1
            else:
                self.puts += 1
                self.put_bytes += result
                self.failing_puts = 0
                self._latencies["put"].record_s(elapsed_s)
            self._slow("put", elapsed_s, _end_of(result))
        self._note("put", result, error)

    def _slow(self, operation: str, elapsed_s: float, about: str) -> None:
        """Keep a call that took long; with the lock."""
        if elapsed_s >= SLOW_CALL_S:
            began_ms = self._clock.time_ms() - round(elapsed_s * 1000)
            self._slow_calls.append(
                {"operation": operation, "about": about, "began_ms": began_ms, "took_s": round(elapsed_s, 3)}
            )

    def slow_calls(self) -> list[dict[str, Any]]:
        """The latest slow calls, newest first: what was called, how it ended, when, and for how long."""
        with self._lock:
            return list(reversed(self._slow_calls))

    def put_accepted(self, result: Result, error: CurvfsError | None, elapsed_s: float) -> None:
        """Write-behind has copied a page, or not; what becomes of the copy comes later."""
        if isinstance(result, Miss):
            self.put_done(result, error, elapsed_s)

    def get_done(self, result: Result, error: CurvfsError | None, elapsed_s: float) -> None:
        with self._lock:
            if isinstance(result, Miss):
                self.get_misses[result.value] += 1
            else:
                self.gets += 1
                self.get_bytes += result
                self._latencies["get"].record_s(elapsed_s)
            self._slow("get", elapsed_s, _end_of(result))
        self._note("get", result, error)

    def existed(self) -> None:
        with self._lock:
            self.puts_existing += 1

    def looked_up(self, pages: int, elapsed_s: float) -> None:
        with self._lock:
            self.lookups += 1
            self.lookup_pages += pages
            self._latencies["lookup"].record_s(elapsed_s)
            self._slow("lookup", elapsed_s, f"{pages} pages")

    def latencies(self) -> dict[str, Histogram]:
        """Copies, by call, that no longer change."""
        copies = {name: Histogram() for name in self._latencies}
        with self._lock:
            for name, copy in copies.items():
                copy.add(self._latencies[name])
        return copies

    def swept_some(self, count: int) -> None:
        with self._lock:
            self.swept += count

    def put_together(self) -> None:
        with self._lock:
            self.resharded += 1

    def copied_loan(self) -> None:
        with self._lock:
            self.loans_copied += 1

    def evicted_some(self, count: int) -> None:
        with self._lock:
            self.evictions += count

    def read_again(self, *, quarantined: bool) -> None:
        with self._lock:
            if quarantined:
                self.quarantined += 1
            else:
                self.sound_again += 1

    def _note(self, what: str, result: Result, error: CurvfsError | None) -> None:
        if error is None or not isinstance(result, Miss) or result not in TROUBLE:
            return
        now_s = self._clock.monotonic_s()
        with self._lock:
            self.last_error = str(error)
            loud = now_s - self._logged_s.get((what, result), -_LOG_EVERY_S) >= _LOG_EVERY_S
            if loud:
                self._logged_s[what, result] = now_s
        logger.log(logging.WARNING if loud else logging.DEBUG, "kvstore %s: %s (%s)", what, error, result.value)
