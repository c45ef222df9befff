"""SGLang's HiCache on a CPU: its real host pools and its real controller, without the parts that want a GPU."""

from __future__ import annotations

import importlib.machinery
import importlib.util
import sys
import types
from types import SimpleNamespace
from typing import Any, ClassVar

import torch


def _without_cuda_wheels() -> None:
    """Make ``sglang.srt`` importable without ``sglang/__init__.py`` and without torchvision, which want them."""
    spec = importlib.util.find_spec("sglang")
    assert spec is not None and spec.submodule_search_locations is not None
    package = types.ModuleType("sglang")
    package.__path__ = list(spec.submodule_search_locations)
    package.__spec__, package.__file__ = spec, spec.origin
    sys.modules["sglang"] = package
    from transformers import AutoProcessor  # noqa: F401

    class Anything(types.ModuleType):
        __path__: ClassVar[list[str]] = []

        def __getattr__(self, name: str) -> Any:
            if name.startswith("__"):
                raise AttributeError(name)
            return type(name, (), {})

    for name in ("", ".io", ".transforms", ".transforms.v2", ".transforms.functional", ".transforms.v2.functional"):
        module = Anything(f"torchvision{name}")
        module.__spec__ = importlib.machinery.ModuleSpec(f"torchvision{name}", None)
        sys.modules[f"torchvision{name}"] = module


_without_cuda_wheels()

import sglang.srt.managers.cache_controller as controllers  # noqa: E402
import torch.distributed as dist  # noqa: E402
from sglang.srt.mem_cache.device_pool_info import KVBufferLayout, KVBuffers, MHABufferInfo, MLABufferInfo  # noqa: E402
from sglang.srt.mem_cache.hicache_storage import HiCacheStorageConfig  # noqa: E402
from sglang.srt.mem_cache.pool_host.mha import MHATokenToKVPoolHost  # noqa: E402
from sglang.srt.mem_cache.pool_host.mla import MLATokenToKVPoolHost  # noqa: E402

LAYERS, HEADS, HEAD_DIM, LATENT, ROPE = 3, 2, 8, 24, 8
PAGE_TOKENS = 4
CAPACITY_TOKENS = 64
PAGES = 5


def _pointers(tensors: tuple[torch.Tensor, ...]) -> torch.Tensor:
    return torch.tensor([tensor.data_ptr() for tensor in tensors], dtype=torch.uint64)


def mha_pool(layout: str, *, page_tokens: int = PAGE_TOKENS, heads: int = HEADS, head_dim: int = HEAD_DIM) -> Any:
    shape = (CAPACITY_TOKENS + page_tokens, heads, head_dim)
    k, v = (tuple(torch.zeros(shape, dtype=torch.bfloat16) for _ in range(LAYERS)) for _ in "kv")
    buffers = KVBuffers(k=k, v=v, k_data_ptrs=_pointers(k), v_data_ptrs=_pointers(v), layout=KVBufferLayout.NHD)
    info = MHABufferInfo(
        buffers=buffers,
        page_size=page_tokens,
        head_num=heads,
        head_dim=head_dim,
        v_head_dim=head_dim,
        dtype=torch.bfloat16,
        device=torch.device("cpu"),
    )
    common = {"pin_memory": False, "device": "cpu", "device_capacity_tokens": CAPACITY_TOKENS}
    return MHATokenToKVPoolHost(info, 2.0, 0, page_tokens, layout, start_layer=0, end_layer=LAYERS, **common)


def mla_pool(layout: str) -> Any:
    rows = tuple(
        torch.zeros((CAPACITY_TOKENS + PAGE_TOKENS, 1, LATENT + ROPE), dtype=torch.bfloat16) for _ in range(LAYERS)
    )
    info = MLABufferInfo(
        buffers=rows,
        data_ptrs=_pointers(rows),
        layer_indices=tuple(range(LAYERS)),
        device_layer_num=LAYERS,
        page_size=PAGE_TOKENS,
        kv_lora_rank=LATENT,
        qk_rope_head_dim=ROPE,
        kv_cache_dim=LATENT + ROPE,
        dtype=torch.bfloat16,
        device=torch.device("cpu"),
    )
    common = {"pin_memory": False, "device": "cpu", "device_capacity_tokens": CAPACITY_TOKENS}
    layers = {"start_layer": 0, "end_layer": LAYERS, "target_layer_num": LAYERS}
    return MLATokenToKVPoolHost(info, 2.0, 0, PAGE_TOKENS, layout, **layers, **common)


def storage_config(settings: dict[str, Any], **changes: Any) -> Any:
    """What SGLang hands to a backend."""
    words = {
        "tp_rank": 0,
        "tp_size": 1,
        "pp_rank": 0,
        "pp_size": 1,
        "attn_cp_rank": 0,
        "attn_cp_size": 1,
        "is_mla_model": False,
        "enable_storage_metrics": True,
        "is_page_first_layout": False,
        "model_name": "org/model",
        "extra_config": settings,
    }
    return HiCacheStorageConfig(**{**words, **changes})


def fill(pool: Any, pages: int = PAGES, *, page_tokens: int = PAGE_TOKENS) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Random pages in a pool: where, and what."""
    indices = pool.alloc(pages * page_tokens)
    for start in indices[::page_tokens].tolist():
        page = torch.randn(pool.get_dummy_flat_data_page().shape).to(torch.bfloat16)
        pool.set_from_flat_data_page(start, page)
    return indices, read(pool, indices, page_tokens=page_tokens)


def read(pool: Any, indices: torch.Tensor, *, page_tokens: int = PAGE_TOKENS) -> list[torch.Tensor]:
    return [pool.get_data_page(start).clone() for start in indices[::page_tokens].tolist()]


def equal(pages: list[torch.Tensor], others: list[torch.Tensor]) -> bool:
    return len(pages) == len(others) and all(map(torch.equal, pages, others))


class Controller:
    """SGLang's controller with its four storage threads, on one host pool and one backend."""

    def __init__(self, pool: Any, backend: str, settings: dict[str, Any], *, model: str = "org/model") -> None:
        if not dist.is_initialized():
            dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        ranks = {"attn_dcp_size": 1, "attn_dcp_rank": 0, "tp_rank": 0, "tp_size": 1, "pp_rank": 0, "pp_size": 1}
        parallel = SimpleNamespace(**ranks, launch_world_size=1, nnodes=1)
        controllers.get_parallel = lambda: parallel
        controllers.is_dp_attention_enabled = lambda: False
        device = SimpleNamespace(device="cpu", layer_num=LAYERS, register_layer_transfer_counter=lambda counter: None)
        self.pool = pool
        self.controller = controllers.HiCacheController(
            SimpleNamespace(get_kvcache=lambda: device),
            pool,
            pool.page_size,
            dist.group.WORLD,
            None,
            storage_backend=backend,
            prefetch_threshold=pool.page_size,
            model_name=model,
            storage_backend_extra_config=settings,
        )

    @property
    def backend(self) -> Any:
        return self.controller.storage_backend

    def back_up(self, tokens: list[int], indices: torch.Tensor) -> int:
        """Pages out, through SGLang's own hashes and backup thread; how many tokens were stored."""
        hashes = self.controller.get_hash_str(tokens, None, page_size=self.pool.page_size)
        self.controller.write_storage(indices, tokens, hash_value=hashes)
        return int(self.controller.ack_backup_queue.get(timeout=30).completed_tokens)

    def prefetch(self, tokens: list[int]) -> tuple[int, int, torch.Tensor]:
        """Pages in, as the scheduler asks for them: tokens found, tokens read, and where."""
        operation = self.controller.prefetch("request", tokens)
        operation = self.controller.prefetch_hit_queue.get(timeout=30)
        if operation.storage_hit_count == 0:
            return 0, 0, torch.empty(0, dtype=torch.int64)
        operation.host_indices = self.pool.alloc(operation.storage_hit_count)
        self.controller.prefetch_buffer.put(operation)
        read_tokens = 0
        while True:
            ack = self.controller.ack_prefetch_queue.get(timeout=60)
            if ack.completed_tokens is not None:
                read_tokens = ack.completed_tokens
            if ack.completed_req:
                return operation.storage_hit_count, read_tokens, operation.host_indices

    def close(self) -> None:
        self.controller.detach_storage_backend()
