"""LMCache's real storage manager of its multiprocess mode: ``python storage.py store|load ADAPTER.json``.

``store`` writes five objects through L1 to the L2 adapter, waits until that has them, says so and waits to be killed.
``load`` prefetches them, and a key that nobody stored, and prints how many were found and whether their bits are equal.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from pathlib import Path

os.environ["LMCACHE_TRACK_USAGE"] = "false"

import torch
from lmcache.v1.distributed.api import GroupedObjectKeys, MemoryLayoutDesc, ObjectKey, PrefetchTaskSpec
from lmcache.v1.distributed.config import (
    EvictionConfig,
    L1ManagerConfig,
    L1MemoryManagerConfig,
    StorageManagerConfig,
)
from lmcache.v1.distributed.l2_adapters.config import add_l2_adapters_args, parse_args_to_l2_adapters_config
from lmcache.v1.distributed.storage_manager import StorageManager

OBJECTS = 5
SHAPE = torch.Size([2, 4, 64, 64])
LAYOUT = MemoryLayoutDesc([SHAPE], [torch.bfloat16])
L1_BYTES = 64 << 20


def manager(adapter: dict[str, object]) -> StorageManager:
    parser = argparse.ArgumentParser()
    add_l2_adapters_args(parser)
    adapters = parse_args_to_l2_adapters_config(parser.parse_args(["--l2-adapter", json.dumps(adapter)]))
    memory = L1MemoryManagerConfig(size_in_bytes=L1_BYTES, use_lazy=False, shm_name="", align_bytes=4096)
    return StorageManager(
        StorageManagerConfig(
            l1_manager_config=L1ManagerConfig(memory_config=memory),
            eviction_config=EvictionConfig(eviction_policy="LRU"),
            l2_adapter_config=adapters,
        )
    )


def objects(model: str) -> tuple[list[ObjectKey], list[torch.Tensor]]:
    rank = ObjectKey.ComputeKVRank(1, 0, 1, 0)
    keys = [
        ObjectKey(chunk_hash=bytes([number]) * 32, model_name=model, kv_rank=rank, cache_salt="tenant" * (number % 2))
        for number in range(OBJECTS + 1)
    ]
    torch.manual_seed(1)
    return keys, [torch.randn(SHAPE).to(torch.bfloat16) for _ in range(OBJECTS)]


def store(storage: StorageManager, model: str) -> None:
    keys, values = objects(model)
    reserved = storage.reserve_write(keys[:OBJECTS], LAYOUT)
    for key, value in zip(keys, values, strict=False):
        reserved[key].tensor.copy_(value)
    storage.finish_write(keys[:OBJECTS])
    (adapter,) = storage._l2_adapters.values()
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        task = adapter.submit_lookup_and_lock_task(keys[:OBJECTS], {0: LAYOUT})
        while (found := adapter.query_lookup_and_lock_result(task)) is None:
            time.sleep(0.01)
        adapter.submit_unlock(keys[:OBJECTS])
        if found.popcount() == OBJECTS:
            break
    print(json.dumps({"found": found.popcount()}), flush=True)
    time.sleep(120)


def load(storage: StorageManager, model: str) -> None:
    keys, values = objects(model)
    row = GroupedObjectKeys(keys=keys, object_group_id=0, layout_desc=LAYOUT, sliding_window_size=-1)
    handle = storage.submit_prefetch_task(PrefetchTaskSpec([row]))
    storage.wait_prefetch_status(handle, 30)
    status = storage.query_prefetch_status(handle)
    hits = status.hit_cells[0].count_leading_ones()
    equal = False
    if hits:
        with storage.read_prefetched_results(keys[:hits]) as got:
            equal = all(torch.equal(one.tensor, value) for one, value in zip(got, values, strict=False))
        storage.finish_read_prefetched(keys[:hits])
    (adapter,) = storage._l2_adapters.values()
    print(json.dumps({"found": hits, "equal": equal, "status": adapter.report_status()}, default=str), flush=True)
    storage.close()


def main() -> None:
    what, path = sys.argv[1:]
    given = json.loads(Path(path).read_text())
    action = {"store": store, "load": load}[what]
    action(manager(given["adapter"]), given.get("model", "org/model"))


if __name__ == "__main__":
    main()
