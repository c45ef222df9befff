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
from collections.abc import Iterable, Sequence
from typing import Any, ClassVar

import numpy as np
from vllm.v1.kv_offload.base import (
    Locality,
    LookupResult,
    Medium,
    OffloadingEvent,
    OffloadingMetricMetadata,
    RequestOffloadingContext,
)
from vllm.v1.kv_offload.tiering.async_lookup import AsyncLookupManager
from vllm.v1.kv_offload.tiering.base import JobResult, SecondaryTierManager, TransferJob
from vllm.v1.metrics.cache_hit_source import CacheHitSource

from curvfs.errors import CurvfsError
from curvfs.world import World
from kvstore.connectors.identity import open_for_engine
from kvstore.connectors.serving import keys_of, log_opened, wait_returned
from kvstore.connectors.vllm_counts import Counts, definitions
from kvstore.connectors.vllm_identity import WHERE, facts_of, pages_of
from kvstore.results import Miss, Result
from kvstore.store import KVStore
from kvstore.transfer import Transfer

logger = logging.getLogger("vllm.curvfs")

#: After these a chunk that the pool was said to hold is not to be had from it any more.
_GONE = frozenset({Miss.ABSENT, Miss.DAMAGED, Miss.FOREIGN, Miss.COLLISION, Miss.MISMATCH, Miss.NEWER})


class _Lookups(AsyncLookupManager):  # type: ignore[misc]
    """Asks the store in a thread of its own, a batch for each request and step."""

    def __init__(self, store: KVStore, tier_type: str) -> None:
        self._store = store
        super().__init__(tier_type=tier_type)

    def batch_lookup(self, keys: list[bytes], req_context: Any) -> Iterable[bool]:
        return self._store.exists(keys_of(self._store, keys))


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
        self._counts = Counts(tier_type)
        self._events: list[OffloadingEvent] | None = None
        if enable_kv_events and offloading_spec.kv_events_config.enable_kv_cache_events:
            self._events = []
        self._lookups = _Lookups(self._store, tier_type)
        log_opened(logger, "tier", "chunk", pages, self._store)

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
        keys = keys_of(self._store, job.keys)
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
            wait_returned(transfer, logger)

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
        return definitions()

    def get_stats(self) -> Any:
        return self._counts.new(self._store.stats())

    def shutdown(self) -> None:
        self._lookups.shutdown()
        clean = self._store.close()
        self._completions.close()
        if not clean and any(transfer.lent for transfer in self._jobs):
            raise CurvfsError("The storage still writes to the primary tier's memory; it must not be unmapped.")


def _total(results: Sequence[Result]) -> int:
    return sum(result for result in results if not isinstance(result, Miss))
