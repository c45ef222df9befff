"""LMCache's real in-process engine on CPU tensors: ``python inprocess.py store|retrieve CONFIGURATION.json``.

``store`` stores a fixed prompt's chunks, waits until they can be looked up, says so and waits to be killed.
``retrieve`` prints how many tokens were found, how many came back, and whether their bits are the same.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

os.environ["LMCACHE_TRACK_USAGE"] = "false"

import torch
from lmcache.v1.cache_engine import LMCacheEngineBuilder
from lmcache.v1.config import LMCacheEngineConfig
from lmcache.v1.gpu_connector.gpu_connectors import GPUConnectorInterface
from lmcache.v1.metadata import LMCacheMetadata

LAYERS, HEADS, HEAD_DIM, CHUNK_TOKENS = 4, 2, 16, 64
WIDTH = HEADS * HEAD_DIM
PROMPT_TOKENS = 5 * CHUNK_TOKENS + 7


class HostTensors(GPUConnectorInterface):
    """A tensor of shape (2, layers, tokens, width) on the host in the place of an engine's paged memory."""

    def get_shape(self, num_tokens: int) -> torch.Size:
        return torch.Size([2, LAYERS, num_tokens, WIDTH])

    def from_gpu(self, memory_obj: Any, start: int, end: int, **kwargs: Any) -> None:
        memory_obj.tensor.copy_(kwargs["kv"][:, :, start:end])

    def to_gpu(self, memory_obj: Any, start: int, end: int, **kwargs: Any) -> None:
        kwargs["kv"][:, :, start:end].copy_(memory_obj.tensor)

    def batched_from_gpu(self, memory_objs: Any, starts: Any, ends: Any, **kwargs: Any) -> None:
        for memory_obj, start, end in zip(memory_objs, starts, ends, strict=True):
            self.from_gpu(memory_obj, start, end, **kwargs)

    def batched_to_gpu(self, memory_objs: Any = None, starts: Any = None, ends: Any = None, **kwargs: Any) -> None:
        for memory_obj, start, end in zip(memory_objs, starts, ends, strict=True):
            self.to_gpu(memory_obj, start, end, **kwargs)


def engine(settings: dict[str, Any], model: str) -> Any:
    config = LMCacheEngineConfig.from_defaults(
        chunk_size=CHUNK_TOKENS, local_cpu=False, max_local_cpu_size=0.25, lmcache_instance_id="test", **settings
    )
    shape = (LAYERS, 2, CHUNK_TOKENS, HEADS, HEAD_DIM)
    metadata = LMCacheMetadata(model, 1, 1, 0, 0, torch.bfloat16, shape, chunk_size=CHUNK_TOKENS)
    made = LMCacheEngineBuilder.get_or_create(
        "test", config, metadata, HostTensors(), lambda tensor, source: None, lambda value, source: value
    )
    made.post_init()
    return made


def prompt() -> tuple[torch.Tensor, torch.Tensor]:
    """Token ids, and what a model would have made of them."""
    torch.manual_seed(1)
    tokens = torch.randint(0, 32000, (PROMPT_TOKENS,), dtype=torch.long)
    return tokens, torch.randn(2, LAYERS, PROMPT_TOKENS, WIDTH).to(torch.bfloat16)


def main() -> None:
    what, path = sys.argv[1:]
    given = json.loads(Path(path).read_text())
    tokens, kv = prompt()
    cache = engine(given["settings"], given.get("model", "org/model-1.0"))
    wanted = (
        PROMPT_TOKENS if given["settings"].get("save_unfull_chunk") else PROMPT_TOKENS // CHUNK_TOKENS * CHUNK_TOKENS
    )
    if what == "store":
        cache.store(tokens, kv=kv)
        deadline = time.monotonic() + 30
        while cache.lookup(tokens) < wanted and time.monotonic() < deadline:
            time.sleep(0.05)
        print(json.dumps({"found": cache.lookup(tokens)}), flush=True)
        time.sleep(120)
        return
    found = cache.lookup(tokens)
    out = torch.zeros_like(kv)
    mask = cache.retrieve(tokens, kv=out)
    retrieved = int(mask.sum())
    equal = torch.equal(out[:, :, :retrieved], kv[:, :, :retrieved])
    print(json.dumps({"found": found, "retrieved": retrieved, "equal": equal}), flush=True)
    LMCacheEngineBuilder.destroy("test")


if __name__ == "__main__":
    main()
