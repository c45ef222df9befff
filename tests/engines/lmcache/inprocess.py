"""LMCache's real in-process engine on CPU tensors: ``python inprocess.py store|retrieve CONFIGURATION.json``.

``store`` stores a fixed prompt's chunks, waits until they can be looked up, says so and waits to be killed.
``retrieve`` prints how many tokens were found, how many came back, and whether their bits are the same. Where a server
to ``stop`` is given, that stands still during a first try, whose outcome goes to standard error.
"""

from __future__ import annotations

import json
import os
import signal
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


def retrieve(cache: Any, tokens: torch.Tensor, want: torch.Tensor) -> tuple[int, bool]:
    """How many tokens came, and whether they are as wanted and the rest is untouched."""
    out = torch.zeros_like(want)
    retrieved = int(cache.retrieve(tokens, kv=out).sum())
    equal = torch.equal(out[:, :, :retrieved], want[:, :, :retrieved]) and not out[:, :, retrieved:].any()
    return retrieved, bool(equal)


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
    if "stop" in given:
        os.kill(given["stop"], signal.SIGSTOP)
        begin_s = time.monotonic()
        stopped, untouched = retrieve(cache, tokens, torch.zeros_like(kv))
        took_s = time.monotonic() - begin_s
        os.kill(given["stop"], signal.SIGCONT)
        print(json.dumps({"retrieved": stopped, "untouched": untouched, "took_s": took_s}), file=sys.stderr)
        deadline = time.monotonic() + 60
        while cache.lookup(tokens) < wanted and time.monotonic() < deadline:
            time.sleep(0.2)
    retrieved, equal = retrieve(cache, tokens, kv)
    print(json.dumps({"found": found, "retrieved": retrieved, "equal": equal}), flush=True)
    LMCacheEngineBuilder.destroy("test")


if __name__ == "__main__":
    main()
