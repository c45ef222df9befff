"""vLLM: a secondary tier of its KV offloading that keeps chunks in a shared pool.

::

    --kv-transfer-config '{"kv_connector": "OffloadingConnector", "kv_role": "kv_both", "kv_connector_extra_config": {
      "spec_name": "TieringOffloadingSpec", "cpu_bytes_to_use": 8589934592,
      "secondary_tiers": [{"type": "KvstoreTier", "module_path": "kvstore.connectors.vllm",
                           "url": "curvine://m1:8995/pool"}]}}'

Where the package is installed, ``{"type": "curvfs", "url": ...}`` does the same: see
:mod:`kvstore.connectors.vllm_plugin`.
All methods are called by the scheduler under its lock, so none of them waits: lookups are asked in a thread, transfers
are handed to the store and collected from its queue. Only ``drain_jobs`` waits, as it must.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any, ClassVar

import numpy as np
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics import OffloadingConnectorStats
from vllm.v1.kv_offload.base import (
    Locality,
    LookupResult,
    Medium,
    OffloadingCounterMetadata,
    OffloadingEvent,
    OffloadingGaugeMetadata,
    OffloadingMetricMetadata,
    RequestOffloadingContext,
)
from vllm.v1.kv_offload.tiering.async_lookup import AsyncLookupManager
from vllm.v1.kv_offload.tiering.base import JobResult, SecondaryTierManager, TransferJob
from vllm.v1.metrics.cache_hit_source import CacheHitSource

from curvfs.errors import CurvfsError
from curvfs.world import World
from kvstore.connectors.identity import open_for_engine
from kvstore.connectors.vllm_identity import WHERE, facts_of, pages_of
from kvstore.results import Miss, Result
from kvstore.store import KVStore
from kvstore.transfer import Transfer

logger = logging.getLogger("vllm.curvfs")

_MISSES = "vllm:kv_offload_curvfs_load_misses"
_FAILURES = "vllm:kv_offload_curvfs_store_failures"
_EXISTING = "vllm:kv_offload_curvfs_stores_existing"
_UNDER_WAY = "vllm:kv_offload_curvfs_chunks_under_way"

#: A counter and its label values.
_Count = tuple[str, tuple[str, ...]]

#: After these a chunk that the pool was said to hold is not to be had from it any more.
_GONE = frozenset({Miss.ABSENT, Miss.DAMAGED, Miss.FOREIGN, Miss.COLLISION, Miss.MISMATCH, Miss.NEWER})


class _Lookups(AsyncLookupManager):  # type: ignore[misc]
    """Asks the store in a thread of its own, a batch for each request and step."""

    def __init__(self, store: KVStore, tier_type: str) -> None:
        self._store = store
        super().__init__(tier_type=tier_type)

    def batch_lookup(self, keys: list[bytes], req_context: Any) -> Iterable[bool]:
        return self._store.exists([self._store.foreign_key(bytes(key)) for key in keys])


class KvstoreTier(SecondaryTierManager):  # type: ignore[misc]
    """Chunks of one model in a pool.

    ``settings``: ``url``; ``model``, ``revision``, ``lora`` and ``salt`` where they are to be other than found out;
    ``loan`` reads straight into the primary tier (a load then ends when the storage ends it, not at the deadline);
    ``enable_kv_events``, ``locality`` (LOCAL or REMOTE); and the options of :func:`kvstore.open`.
    Raises ConfigError, EnvironmentError_, TransportError.
    """

    medium: ClassVar[Medium] = Medium.STORAGE
    #: What vLLM calls a store that may be on another machine.
    cache_hit_source: ClassVar[CacheHitSource] = CacheHitSource.EXTERNAL_UNSPECIFIED

    def __init__(
        self,
        offloading_spec: Any,
        primary_kv_view: memoryview,
        tier_type: str,
        backpressure_detector: Any = None,
        *,
        loan: bool = False,
        enable_kv_events: bool = False,
        locality: str | None = None,
        **settings: Any,
    ) -> None:
        super().__init__(offloading_spec, primary_kv_view, tier_type, backpressure_detector)
        self.locality = Locality(locality) if locality is not None else None
        self._loan = loan
        self._base = int(np.asarray(primary_kv_view).ctypes.data)
        world = World.real()
        self._clock = world.clock
        config = offloading_spec.config
        pages = pages_of(config, self.block_size_bytes, facts_of(config.engine_id), settings, world.disk)
        self._store = open_for_engine(pages, settings, where=WHERE, world=world)
        self._completions = self._store.completions()
        self._jobs: dict[Transfer, TransferJob] = {}
        self._refused: list[JobResult] = []
        self._lent: list[Transfer] = []
        self._counted: Counter[_Count] = Counter()
        self._events: list[OffloadingEvent] | None = None
        if enable_kv_events and offloading_spec.kv_events_config.enable_kv_cache_events:
            self._events = []
        self._lookups = _Lookups(self._store, tier_type)
        stats = self._store.stats()
        logger.info(
            "curvfs tier: model %s, weights %s, %d bytes a chunk, %s (%s).",
            *(settings.get("model") or pages.model, settings.get("revision") or pages.revision, pages.size_bytes),
            *(stats.backend, stats.direct_reason),
        )

    # What the scheduler asks.

    def on_new_request(self, req_context: Any) -> RequestOffloadingContext:
        return RequestOffloadingContext()

    def lookup(self, key: bytes, req_context: Any) -> LookupResult:
        found = self._lookups.lookup(key, req_context)
        if found is None:
            return LookupResult.RETRY
        return LookupResult.HIT if found else LookupResult.MISS

    def on_schedule_end(self, context: Any) -> None:
        self._lookups.flush()

    def on_request_finished(self, req_context: Any) -> None:
        self._lookups.cleanup(req_context.req_id)

    # Transfers.

    def submit_store(self, job_metadata: TransferJob) -> None:
        self._submit(job_metadata)

    def submit_load(self, job_metadata: TransferJob) -> None:
        self._submit(job_metadata)

    def _submit(self, job: TransferJob) -> None:
        keys = [self._store.foreign_key(bytes(key)) for key in job.keys]
        size_bytes = self.block_size_bytes
        segments = [(self._base + int(chunk) * size_bytes, size_bytes) for chunk in job.chunk_ids]
        try:
            if job.is_promotion:
                transfer = self._store.get(keys, segments, loan=self._loan)
            else:
                transfer = self._store.put(keys, segments)
        except CurvfsError as error:
            logger.warning("The curvfs tier did not take a job: %s", error)
            self._refused.append(JobResult(job.job_id, False))
            return
        self._jobs[transfer] = job
        self._completions.watch(transfer)

    def get_finished_jobs(self) -> Iterable[JobResult]:
        finished, self._refused = self._refused, []
        ended = self._lent + self._completions.drain()
        self._lent = [transfer for transfer in ended if transfer.lent]
        finished.extend(self._finish(transfer) for transfer in ended if not transfer.lent)
        return finished

    def _finish(self, transfer: Transfer) -> JobResult:
        job = self._jobs.pop(transfer)
        keys, results = list(job.keys), transfer.result(0)
        done = [key for key, result in zip(keys, results, strict=True) if result]
        failed = [key for key, result in zip(keys, results, strict=True) if not result]
        if job.is_promotion:
            self._lookups.mark_miss(failed)
            self._tell([key for key, result in zip(keys, results, strict=True) if result in _GONE], removed=True)
        else:
            self._tell(done, removed=False)
        return JobResult(
            job_id=job.job_id,
            success=not failed,
            successful_keys=tuple(done) if job.is_promotion and failed and done else None,
            transfer_time=self._clock.monotonic_s() - job.submit_time,
            transfer_bytes=_total(results),
        )

    def drain_jobs(self) -> None:
        for transfer in list(self._jobs):
            transfer.result()
            while not transfer.wait_returned(10.0):
                logger.warning("The storage still writes to the primary tier's memory; waiting for it.")

    # What is told.

    def _tell(self, keys: Sequence[bytes], *, removed: bool) -> None:
        if keys and self._events is not None:
            event = OffloadingEvent(keys=list(keys), medium=self.medium, removed=removed, locality=self.locality)
            self._events.append(event)

    def take_events(self) -> Iterable[OffloadingEvent]:
        events, self._events = self._events or [], None if self._events is None else []
        return events

    @classmethod
    def build_metric_definitions(cls, extra_config: dict[str, Any]) -> dict[str, OffloadingMetricMetadata]:
        return {
            _MISSES: OffloadingCounterMetadata("Chunks that the pool did not deliver, by cause.", ("tier", "cause")),
            _FAILURES: OffloadingCounterMetadata("Chunks that were not stored, by cause.", ("tier", "cause")),
            _EXISTING: OffloadingCounterMetadata("Chunks offered that the pool had already.", ("tier",)),
            _UNDER_WAY: OffloadingGaugeMetadata("Chunks on their way to or from the pool.", ("tier",)),
        }

    def get_stats(self) -> OffloadingConnectorStats | None:
        now = self._store.stats()
        counts: Counter[_Count] = Counter({(_EXISTING, (self.tier_type,)): now.puts_existing})
        for name, causes in ((_MISSES, now.get_misses), (_FAILURES, now.put_failures)):
            counts.update({(name, (self.tier_type, cause)): number for cause, number in causes.items()})
        new = counts - self._counted
        self._counted = counts
        if not new and not now.in_flight:
            return None
        stats = OffloadingConnectorStats()
        for (name, labels), number in new.items():
            stats.increase_counter(name, number, labels)
        stats.set_gauge(_UNDER_WAY, now.in_flight, (self.tier_type,))
        return stats

    def shutdown(self) -> None:
        self._lookups.shutdown()
        clean = self._store.close()
        self._completions.close()
        if not clean and any(transfer.lent for transfer in self._jobs):
            raise CurvfsError("The storage still writes to the primary tier's memory; it must not be unmapped.")


def _total(results: Sequence[Result]) -> int:
    return sum(result for result in results if not isinstance(result, Miss))
