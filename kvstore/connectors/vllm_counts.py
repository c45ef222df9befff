"""What vLLM's metrics say of a store, beside what vLLM itself counts of every tier."""

from __future__ import annotations

from collections import Counter

from vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics import OffloadingConnectorStats
from vllm.v1.kv_offload.base import OffloadingCounterMetadata, OffloadingGaugeMetadata, OffloadingMetricMetadata

from kvstore.stats import Stats

_MISSES = "vllm:kv_offload_curvfs_load_misses"
_FAILURES = "vllm:kv_offload_curvfs_store_failures"
_EXISTING = "vllm:kv_offload_curvfs_stores_existing"
_UNDER_WAY = "vllm:kv_offload_curvfs_chunks_under_way"


def definitions() -> dict[str, OffloadingMetricMetadata]:
    return {
        _MISSES: OffloadingCounterMetadata("Chunks that the pool did not deliver, by cause.", ("tier", "cause")),
        _FAILURES: OffloadingCounterMetadata("Chunks that were not stored, by cause.", ("tier", "cause")),
        _EXISTING: OffloadingCounterMetadata("Chunks offered that the pool had already.", ("tier",)),
        _UNDER_WAY: OffloadingGaugeMetadata("Chunks on their way to or from the pool.", ("tier",)),
    }


#: A counter and its label values.
_Count = tuple[str, tuple[str, ...]]


class Counts:
    """Of one tier: what was not told to vLLM yet."""

    def __init__(self, tier_type: str) -> None:
        self._tier = tier_type
        self._told: Counter[_Count] = Counter()

    def new(self, now: Stats) -> OffloadingConnectorStats | None:
        """What has happened since the last call; None for nothing."""
        counts: Counter[_Count] = Counter({(_EXISTING, (self._tier,)): now.puts_existing})
        for name, causes in ((_MISSES, now.get_misses), (_FAILURES, now.put_failures)):
            counts.update({(name, (self._tier, cause)): number for cause, number in causes.items()})
        new = counts - self._told
        self._told = counts
        if not new and not now.in_flight:
            return None
        stats = OffloadingConnectorStats()
        for (name, labels), number in new.items():
            stats.increase_counter(name, number, labels)
        stats.set_gauge(_UNDER_WAY, now.in_flight, (self._tier,))
        return stats
