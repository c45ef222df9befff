"""Our HiCache backend beside SGLang's file backend, called as its threads call them, on its host pools:
``.engines/sglang/bin/python tests/engines/bench_sglang.py``.
"""

from __future__ import annotations

import itertools
import time
from pathlib import Path
from typing import Any

import hicache
import torch
from benching import Measure, run
from places import Server
from sglang.srt.mem_cache.hicache_storage import HiCacheFile

from kvstore.connectors.sglang import KvstoreHiCache

PAGE_TOKENS, PAGES, HEADS, HEAD_DIM = 64, 96, 8, 128  # 3 layers of K and V: 768 KiB a page
_numbers = itertools.count()


def pool() -> Any:
    hicache.CAPACITY_TOKENS = PAGE_TOKENS * (PAGES // 2 + 1)  # host memory is twice that
    return hicache.mha_pool("page_first_direct", page_tokens=PAGE_TOKENS, heads=HEADS, head_dim=HEAD_DIM)


def measured(make: Any, interface_v1: bool) -> Measure:
    def measure() -> tuple[float, float]:
        host, backend = pool(), make()
        backend.register_mem_pool_host(host)
        indices, want = hicache.fill(host, PAGES, page_tokens=PAGE_TOKENS)
        keys = [f"{next(_numbers):064x}" for _ in range(PAGES)]
        firsts = indices[::PAGE_TOKENS].tolist()
        begin = time.monotonic()
        if interface_v1:
            assert all(backend.batch_set_v1(keys, indices))
        else:
            assert backend.batch_set(keys, [host.get_data_page(first) for first in firsts])
        stored_s = time.monotonic() - begin
        host.kv_buffer.zero_()
        begin = time.monotonic()
        assert backend.batch_exists(keys) == PAGES
        if interface_v1:
            assert all(backend.batch_get_v1(keys, indices))
        else:
            pages = backend.batch_get(keys, [host.get_dummy_flat_data_page() for _ in keys])
            for first, page in zip(firsts, pages, strict=True):
                host.set_from_flat_data_page(first, page)
        loaded_s = time.monotonic() - begin
        assert all(map(torch.equal, hicache.read(host, indices, page_tokens=PAGE_TOKENS), want))
        if isinstance(backend, KvstoreHiCache):
            backend.close()
        return stored_s, loaded_s

    return measure


def variants(work: Path, mount: Path, server: Server) -> dict[str, Measure]:
    def ours(url: str, **more: Any) -> Any:
        return lambda: KvstoreHiCache(hicache.storage_config({"url": url, "revision": "1", "interface_v1": 1, **more}))

    def theirs(path: Path) -> Any:
        def make() -> Any:
            path.mkdir(parents=True, exist_ok=True)
            return HiCacheFile(hicache.storage_config({"file_storage_path": str(path)}), str(path))

        return make

    return {
        "curvfs, curvine://, in place": measured(ours(server.url), True),
        "curvfs, curvine://, in place, on loan": measured(ours(server.url, loan=True), True),
        "curvfs, curvine://, flat": measured(ours(server.url), False),
        "curvfs, file:// on the disk, in place": measured(ours(f"file://{work}/ours"), True),
        "HiCacheFile on the disk (page cache)": measured(theirs(work / "theirs"), False),
        "HiCacheFile on the mount": measured(theirs(mount / "plain"), False),
        "HiCacheFile on the mount, in the KV prefix": measured(theirs(mount / "kv" / "files"), False),
    }


if __name__ == "__main__":
    size_bytes = PAGES * PAGE_TOKENS * hicache.LAYERS * 2 * HEADS * HEAD_DIM * 2
    run(f"SGLang 0.5.23, {PAGES} pages of 768 KiB", size_bytes, variants)
