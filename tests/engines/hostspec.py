"""Only for tests: vLLM's tiering offload on its CPU platform, where the worker that copies to a GPU refuses to work."""

from __future__ import annotations

from typing import Any

import torch
from vllm.v1.kv_offload.base import OffloadingWorker, TransferResult
from vllm.v1.kv_offload.cpu.shared_offload_region import SharedOffloadRegion
from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec


class CopyingWorker(OffloadingWorker):
    """Between the engine's cache, which is in host memory, and the primary tier."""

    def __init__(self, caches: Any, region: Any) -> None:
        self._tensors = [
            (one.tensor.view(torch.int8).reshape(one.tensor.shape[0], -1), one.page_size_bytes)
            for one in caches.tensors
        ]
        view = region.create_kv_memoryview()
        self._rows = torch.frombuffer(view.cast("B"), dtype=torch.int8).reshape(-1, view.strides[0])
        self._done: list[Any] = []

    def _copy(self, job_id: int, blocks: Any, chunks: Any, *, storing: bool) -> bool:
        size_bytes = 0
        for block, chunk in zip(blocks.block_ids.tolist(), chunks.chunk_ids.tolist(), strict=True):
            at = 0
            for tensor, page_bytes in self._tensors:
                here, there = tensor[block, :page_bytes], self._rows[chunk, at : at + page_bytes]
                there.copy_(here) if storing else here.copy_(there)
                at += page_bytes
            size_bytes += at
        self._done.append(TransferResult(job_id, True, size_bytes, 0.001))
        return True

    def submit_store(self, job_id: int, src_spec: Any, dst_spec: Any) -> bool:
        return self._copy(job_id, src_spec, dst_spec, storing=True)

    def submit_load(self, job_id: int, src_spec: Any, dst_spec: Any, expedited: bool = False) -> bool:
        return self._copy(job_id, dst_spec, src_spec, storing=False)

    def get_finished(self) -> list[Any]:
        done, self._done = self._done, []
        return done

    def wait(self, job_ids: set[int]) -> None:
        """Nothing is under way."""


class HostTieringSpec(TieringOffloadingSpec):
    def get_worker(self, kv_caches: Any) -> Any:
        if not self._worker:
            region = SharedOffloadRegion(
                engine_id=self._engine_id,
                num_chunks=self.num_chunks,
                rank=self.config.parallel.rank,
                kv_bytes_per_chunk=self.kv_bytes_per_chunk,
                cpu_page_size=self.cpu_page_size_per_worker,
            )
            self._worker = CopyingWorker(kv_caches, region)
        return self._worker
