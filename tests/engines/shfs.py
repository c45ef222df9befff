"""AIBrix's real cache manager on its back end for a shared file system: ``python shfs.py store|load WHERE.json``.

``store`` puts the blocks of a fixed prompt, waits until they are there, says so and waits to be killed. ``load``
acquires them into other memory and prints how many tokens came, and whether their bits are the same.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch

given: dict[str, Any] = json.loads(Path(sys.argv[2]).read_text())
_SETTINGS = {
    "L1_CACHE_ENABLED": "0",
    "L2_CACHE_BACKEND": "SHFS",
    "SHFS_ROOT": given["root"],
    "L2_CACHE_INGESTION_TYPE": "ALL",
    "L2_CACHE_INGESTION_MAX_INFLIGHT_TOKENS": "0",  # a put is over when it is stored
    "L2_CACHE_PER_TOKEN_TIMEOUT_MS": "1000",
    "DEVICE": "cpu",
    "PROFILING_ENABLED": "0",
}
os.environ.update({f"AIBRIX_KV_CACHE_OL_{name}": value for name, value in _SETTINGS.items()})

_empty = torch.empty


def _pageable(*sizes: Any, pin_memory: bool = False, **more: Any) -> torch.Tensor:
    """Memory as without a GPU, which ``pin_memory`` wants."""
    return _empty(*sizes, **more)


torch.empty = _pageable  # type: ignore[assignment]

from aibrix_kvcache import (  # noqa: E402
    BaseKVCacheManager,
    KVCacheBlockLayout,
    KVCacheBlockSpec,
    KVCacheConfig,
    KVCacheTensorSpec,
    ModelSpec,
    TokenListView,
)

BLOCK_TOKENS, BLOCKS = 16, 4


def manager() -> Any:
    tensors = KVCacheTensorSpec(heads=[0, 1], layers=[0, 1], head_size=32)
    layout = KVCacheBlockLayout.LCND
    spec = KVCacheBlockSpec(
        block_ntokens=BLOCK_TOKENS, block_dtype=torch.bfloat16, block_layout=layout, tensor_spec=tensors
    )
    return BaseKVCacheManager(KVCacheConfig(block_spec=spec, model_spec=ModelSpec(1024)))


def main() -> None:
    torch.manual_seed(1)
    cache, tokens = manager(), TokenListView(list(range(BLOCK_TOKENS * BLOCKS)))
    wanted = [torch.randn(2, 2, BLOCK_TOKENS, 2, 32).to(torch.bfloat16) for _ in range(BLOCKS)]
    if sys.argv[1] == "store":
        handle = cache.allocate_for(None, tokens).value
        for block, content in zip(handle.to_tensors(), wanted, strict=True):
            block.copy_(content.reshape(block.shape))
        stored = cache.put(None, tokens, handle)
        assert stored.is_ok(), stored
        print(json.dumps({"found": cache.exists(None, tokens).value}), flush=True)
        time.sleep(120)
        return
    acquired = cache.acquire(None, tokens)
    count, equal = 0, False
    if acquired.is_ok():
        count, handle = acquired.value
        got = handle.to_tensors()
        equal = all(
            torch.equal(block, content.reshape(block.shape)) for block, content in zip(got, wanted, strict=True)
        )
        handle.release()
    print(json.dumps({"found": count, "equal": equal}), flush=True)
    cache.close()


if __name__ == "__main__":
    main()
