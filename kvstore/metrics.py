"""What stores count, for Prometheus.

:func:`register` once in a process joins the registry that an engine shows at its own ``/metrics``; :func:`serve` opens
an endpoint where there is none. Either shows every store that is open at the moment of a scrape.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from operator import attrgetter
from typing import Any, Literal, Protocol
from weakref import WeakSet

from curvfs.histogram import Histogram
from curvfs.metrics import Exporter, Family, Sample
from kvstore.stats import Stats


class Measured(Protocol):
    """What has metrics: an open store."""

    def metrics(self) -> list[Family]: ...


#: The stores that are open in this process.
OPEN: WeakSet[Measured] = WeakSet()

_Kind = Literal["counter", "gauge"]

#: Field of :class:`kvstore.Stats`, or of a part of it: metric, kind and help.
_NUMBERS: dict[str, tuple[str, _Kind, str]] = {
    "direct": ("direct", "gauge", "1 where bytes move by direct I/O, 0 where they go through the page cache."),
    "alignment_bytes": ("alignment_bytes", "gauge", "Alignment that direct I/O needs here."),
    "fallbacks": ("fallbacks", "counter", "Objects moved otherwise than the store's mode says."),
    "page_cache_reads": ("page_cache_reads", "counter", "Objects read from the page cache, where they lay."),
    "depth": ("depth", "gauge", "Objects moved at once, at most."),
    "slabs_in_use": ("slabs_in_use", "gauge", "Buffers of the store in use."),
    "in_flight": ("in_flight_pages", "gauge", "Pages under way."),
    "puts": ("puts", "counter", "Pages stored."),
    "puts_existing": ("puts_existing", "counter", "Pages that were there already when they were put."),
    "put_bytes": ("put_bytes", "counter", "Payload stored."),
    "failing_puts": ("failing_puts", "gauge", "Puts in a row that failed up to now."),
    "gets": ("gets", "counter", "Pages delivered."),
    "get_bytes": ("get_bytes", "counter", "Payload delivered."),
    "lookups": ("lookups", "counter", "Prefixes looked up."),
    "lookup_pages": ("lookup_pages", "counter", "Pages that lookups promised."),
    "swept": ("swept", "counter", "Staging directories of dead processes removed."),
    "evicted": ("evicted", "counter", "Pages moved to the trash by this process."),
    "resharded": ("resharded", "counter", "Pages put together from objects of other shards."),
    "loans_copied": ("loans_copied", "counter", "Pages whose lent memory could not be read into, and were copied."),
    "views_out": ("views_out", "gauge", "Views that are lent out."),
    "read_again": ("read_again", "counter", "Objects that looked damaged and were sound by another path."),
    "quarantined": ("quarantined", "counter", "Objects that were damaged and put aside."),
    "memory.size_bytes": ("memory_size_bytes", "gauge", "Host memory that pages may take; 0 where there is none."),
    "memory.used_bytes": ("memory_used_bytes", "gauge", "Host memory that pages take."),
    "memory.evicted": ("memory_evicted", "counter", "Pages that made room for others in host memory."),
    "behind.queued": ("behind_queued", "gauge", "Pages accepted and not stored yet."),
    "behind.dropped": ("behind_dropped", "counter", "Pages not accepted, because all buffers were full."),
    "behind.failed": ("behind_failed", "counter", "Pages accepted that could not be stored then."),
    "capacity.used_bytes": ("pool_used_bytes", "gauge", "What counts against the quota; 0 before it was counted."),
    "capacity.trash_bytes": ("pool_trash_bytes", "gauge", "What lies in the trash."),
    "capacity.evicted_bytes": ("evicted_bytes", "counter", "Bytes moved to the trash by this process."),
    "capacity.expired": ("expired", "counter", "Pages moved to the trash by this process because of their age."),
    "capacity.refused": ("no_room", "counter", "Puts that found no room."),
    "health.withheld_pages": ("withheld_pages", "counter", "Stored pages that lookups left out as not worth loading."),
    "health.rejected": ("rejected", "counter", "Pages that were not tried because a breaker was open."),
    "health.retries": ("retries", "counter", "Reads that were tried once more."),
    "health.retries_refused": ("retries_refused", "counter", "Reads that were not, because there were too many."),
    "health.opened": ("breakers_opened", "counter", "How often breakers opened."),
}
#: What a breaker's state is as a number.
_BREAKERS = {"closed": 0.0, "half-open": 0.5}
_CAUSES: dict[str, tuple[str, str]] = {
    "put_failures": ("put_failures", "Pages that were not stored, by cause."),
    "get_misses": ("get_misses", "Pages that were not delivered, by cause."),
}


def families(stats: Stats, latencies: Mapping[str, Histogram], labels: Mapping[str, str]) -> list[Family]:
    """One store's record as families, every series with ``labels``."""
    found = [
        Family(f"curvfs_kv_{name}", kind, help_, [Sample(float(attrgetter(field)(stats)), labels)])
        for field, (name, kind, help_) in _NUMBERS.items()
    ]
    for field, (name, help_) in _CAUSES.items():
        counts: dict[str, int] = getattr(stats, field)
        samples = [Sample(count, {**labels, "cause": cause}) for cause, count in sorted(counts.items())]
        found.append(Family(f"curvfs_kv_{name}", "counter", help_, samples))
    found += [_quota(stats, labels), _hits(stats, labels), _breakers(stats, labels)]
    waits = [Sample(histogram, {**labels, "call": call}) for call, histogram in sorted(latencies.items())]
    found.append(Family("curvfs_kv_latency_seconds", "histogram", "From a call to its result, by call.", waits))
    return found


def _quota(stats: Stats, labels: Mapping[str, str]) -> Family:
    quota = stats.capacity.quota_bytes
    samples = [] if quota is None else [Sample(float(quota), labels)]
    return Family("curvfs_kv_pool_quota_bytes", "gauge", "What the pool may take; none where it is not bound.", samples)


def _hits(stats: Stats, labels: Mapping[str, str]) -> Family:
    tiers = {"memory": stats.memory.hits, "pool": max(0, stats.gets - stats.memory.hits)}
    samples = [Sample(float(count), {**labels, "tier": tier}) for tier, count in tiers.items()]
    return Family("curvfs_kv_hits", "counter", "Pages delivered, by where they lay.", samples)


def _breakers(stats: Stats, labels: Mapping[str, str]) -> Family:
    """``of``: asking what is there, putting, reading from each place, and writing to each."""
    states = {("asking", ""): stats.health.asking, ("putting", ""): stats.health.putting}
    states |= {("reading", name): place.state for name, place in stats.health.places.items()}
    states |= {("writing", name): place.state for name, place in stats.health.writers.items()}
    samples = [
        Sample(_BREAKERS.get(state, 1.0), {**labels, "of": of, "place": place})
        for (of, place), state in sorted(states.items())
    ]
    help_ = "0 where calls are made, 0.5 where one is tried, 1 where none is made, or the place stalls."
    return Family("curvfs_kv_breaker", "gauge", help_, samples)


def collect(stores: Iterable[Measured] | None = None) -> list[Family]:
    """The families of several stores (None: all that are open in this process), each name once."""
    merged: dict[str, Family] = {}
    for store in list(OPEN if stores is None else stores):
        for family in store.metrics():
            before = merged.get(family.name)
            samples = [*(before.samples if before else ()), *family.samples]
            merged[family.name] = Family(family.name, family.kind, family.help, samples)
    return list(merged.values())


def register(registry: Any = None) -> Callable[[], None]:
    """Join a registry of prometheus-client (None: the process-wide one); the result leaves it again.

    Raises EnvironmentError_ where prometheus-client is missing.
    """
    return Exporter(collect).register(registry)


def serve(host: str, port: int) -> None:
    """Answer scrapes at ``http://host:port/metrics`` until the process ends. Raises EnvironmentError_."""
    Exporter(collect).serve(host, port)
