"""vLLM's real tiering manager without an engine: chunks in, a restart, chunks out."""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Callable, Iterable
from typing import Any

from vllm.v1.kv_offload.base import LookupResult, OffloadKey, ReqContext, ScheduleEndContext, make_offload_key
from vllm.v1.kv_offload.config import (
    OffloadingCacheConfig,
    OffloadingConfig,
    OffloadingGroupConfig,
    OffloadingModelConfig,
    OffloadingParallelConfig,
)
from vllm.v1.kv_offload.factory import OffloadingSpecFactory

CHUNK_BYTES = 64 * 1024
CHUNKS = 16


def offloading_config(tier: dict[str, Any], engine_id: str, **changes: Any) -> OffloadingConfig:
    """What vLLM makes of ``--kv-transfer-config``. ``changes``: of the model's name, its dtype, tp_size, ..."""
    tp_size, chunk_bytes = changes.get("tp_size", 1), changes.get("chunk_bytes", CHUNK_BYTES)
    host_bytes = changes.get("chunks", CHUNKS) * chunk_bytes * tp_size
    extra = {"spec_name": "TieringOffloadingSpec", "cpu_bytes_to_use": host_bytes}
    parallel = {"rank": 0, "world_size": tp_size, "tp_size": tp_size, "pp_size": 1, "pcp_size": 1, "dcp_size": 1}
    replica = {"data_parallel_index": 0, "data_parallel_size": 1, "data_parallel_rank_local": None}
    return OffloadingConfig(
        groups=(OffloadingGroupConfig(16, changes.get("layers", ("layer0", "layer1")), 0),),
        worker_kv_bytes_per_block=chunk_bytes,
        enable_kv_cache_events=changes.get("events", False),
        extra_config={**extra, "secondary_tiers": [dict(tier)]},
        engine_id=engine_id,
        model=OffloadingModelConfig(changes.get("model", "org/model"), changes.get("dtype", "bfloat16"), 4096),
        cache=OffloadingCacheConfig(tokens_per_hash=16, blocks_per_chunk=1),
        parallel=OffloadingParallelConfig(
            **parallel, **replica, is_parallelism_agnostic=changes.get("is_parallelism_agnostic", False)
        ),
    )


def keys_of(numbers: Iterable[int]) -> list[OffloadKey]:
    return [make_offload_key(hashlib.sha256(b"%d" % number).digest(), 0) for number in numbers]


class Tiering:
    """One engine's manager, stepped by hand as its scheduler does. ``calls``: how long each call of a tier took."""

    def __init__(self, tier: dict[str, Any], **changes: Any) -> None:
        engine_id = f"curvfs-test-{os.getpid()}-{time.monotonic_ns()}"
        self.spec = OffloadingSpecFactory.create_spec(offloading_config(tier, engine_id, **changes))
        self.manager: Any = self.spec.get_manager()
        self.calls: list[float] = []
        self._requests = 0

    @property
    def tier(self) -> Any:
        return self.manager.secondary_tiers[0]

    def time_calls(self) -> None:
        """From now on, note how long the scheduler is in each call of the tier."""
        names = ("lookup", "submit_store", "submit_load", "get_finished_jobs", "on_schedule_end", "on_request_finished")
        for name in (*names, "get_stats", "take_events"):
            setattr(self.tier, name, self._timed(getattr(self.tier, name)))

    def _timed(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*arguments: Any, **named: Any) -> Any:
            begin = time.monotonic()
            try:
                return function(*arguments, **named)
            finally:
                self.calls.append(time.monotonic() - begin)

        return timed

    def step(self) -> None:
        self.manager.on_schedule_end(ScheduleEndContext(new_req_ids=[], preempted_req_ids=[]))

    def request(self) -> ReqContext:
        self._requests += 1
        context = ReqContext(f"request-{self._requests}")
        self.manager.on_new_request(context)
        return context

    def until(self, done: Callable[[], bool], timeout_s: float = 60) -> None:
        begin = time.monotonic()
        while not done():
            assert time.monotonic() - begin < timeout_s, "the tiers did not get there in time"
            with self.manager.lock:
                self.step()
            time.sleep(0.002)

    def submit(self, contents: dict[OffloadKey, bytes]) -> None:
        """Chunks as from a GPU; the manager hands them on to the tier."""
        with self.manager.lock:
            context = self.request()
            prepared = self.manager.prepare_store(list(contents), context)
            assert prepared is not None
            view = self.manager.primary_tier.get_kv_memoryview()
            for key, chunk in zip(prepared.keys_to_store, prepared.store_spec.chunk_ids.tolist(), strict=True):
                view[chunk : chunk + 1].cast("B")[:] = contents[key]
            self.manager.complete_store(list(contents), context, True)
            self.manager.on_request_finished(context)

    def store(self, contents: dict[OffloadKey, bytes]) -> None:
        self.submit(contents)
        self.until(lambda: not self.manager._transfer_jobs)

    def look_up(self, keys: list[OffloadKey], timeout_s: float = 60) -> list[list[str]]:
        """For each key what its lookups answered until all were told, in order, without repetitions."""
        told: list[list[str]] = [[] for _ in keys]
        final = (LookupResult.HIT, LookupResult.MISS)
        with self.manager.lock:
            context = self.request()

        def done() -> bool:
            with self.manager.lock:
                answers = [self.manager.lookup(key, context) for key in keys]
            for words, answer in zip(told, answers, strict=True):
                if not words or words[-1] != answer.name:
                    words.append(answer.name)
            return all(answer in final for answer in answers)

        self.until(done, timeout_s)
        with self.manager.lock:
            self.manager.on_request_finished(context)
        return told

    def found_in_tier(self, key: OffloadKey, timeout_s: float = 60) -> ReqContext:
        """A request that asks for a chunk until the tier has answered that it has it; the load begins when the manager
        is asked next."""
        context = self.request()
        assert self.tier.lookup(key, context) is LookupResult.RETRY
        self.tier.on_schedule_end(None)
        begin = time.monotonic()
        while (answer := self.tier.lookup(key, context)) is LookupResult.RETRY:
            assert time.monotonic() - begin < timeout_s, "the tier did not answer in time"
            self.tier.on_schedule_end(None)
            time.sleep(0.002)
        assert answer is LookupResult.HIT
        return context

    def finish(self, context: ReqContext) -> None:
        with self.manager.lock:
            self.manager.on_request_finished(context)

    def read(self, keys: list[OffloadKey]) -> list[bytes]:
        """Chunks that are hits, as a GPU would get them."""
        with self.manager.lock:
            context = self.request()
            found = self.manager.prepare_load(keys, context)
            view = self.manager.primary_tier.get_kv_memoryview()
            chunks = [bytes(view[chunk : chunk + 1].cast("B")) for chunk in found.chunk_ids.tolist()]
            self.manager.complete_load(keys, context)
            self.manager.on_request_finished(context)
        return chunks

    def close(self) -> None:
        self.manager.shutdown()

    def __enter__(self) -> Tiering:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()
