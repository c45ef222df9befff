"""Request traces through a store with a quota, beside an exact LRU that knows nothing of it.

A trace has one request a line, in the format of the Mooncake traces: ``{"timestamp": ms, "hash_ids": [...], ...}``;
equal ids are equal blocks with equal prefixes. A hit is a block of the longest prefix that is resident when the request
comes. Afterwards all its blocks are resident, used in their order.
"""

from __future__ import annotations

import json
import random
import time
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import kvstore
from kvstore import Capacity, Geometry, Identity

Request = Sequence[int]

PAGE = Geometry.raw(256, page_tokens=512)
#: What one of them takes: a header and one aligned piece of data.
OBJECT_BYTES = 8192
WHOSE = Identity.of(PAGE, model="replay", revision="1")


@dataclass(frozen=True, slots=True)
class Outcome:
    requests: int
    blocks: int
    hits: int
    seconds: float = 0.0


def read_trace(path: Path) -> Iterator[Request]:
    """The requests of a trace file."""
    with path.open(encoding="utf-8") as lines:
        for line in lines:
            yield json.loads(line)["hash_ids"]


def made_up(seed: int, requests: int) -> Iterator[Request]:
    """Conversations that go on: their prefixes grow, some are left, few documents are shared by many."""
    rng = random.Random(seed)
    fresh = iter(range(1 << 40))
    documents = [[next(fresh) for _ in range(rng.randint(1, 30))] for _ in range(20)]
    open_ones: list[list[int]] = []
    for _ in range(requests):
        if open_ones and rng.random() < 0.6:
            blocks = open_ones.pop(rng.randrange(len(open_ones)))
        else:
            blocks = list(documents[min(int(rng.expovariate(0.3)), len(documents) - 1)])
        blocks = blocks + [next(fresh) for _ in range(rng.randint(0, 6))]
        if len(blocks) < 150:
            open_ones.append(blocks)
        yield blocks


def through_lru(trace: Iterable[Request], capacity_blocks: int) -> Outcome:
    """What an exact LRU of so many blocks hits."""
    resident: OrderedDict[int, None] = OrderedDict()
    requests = blocks = hits = 0
    for request in trace:
        requests += 1
        blocks += len(request)
        for block in request:
            if block not in resident:
                break
            hits += 1
        for block in request:
            resident[block] = None
            resident.move_to_end(block)
            if len(resident) > capacity_blocks:
                resident.popitem(last=False)
    return Outcome(requests, blocks, hits)


def content(block: int) -> bytes:
    return block.to_bytes(8, "little") * (PAGE.size_bytes // 8)


def through_store(trace: Iterable[Request], capacity_blocks: int, directory: Path) -> Outcome:
    """What a store in ``directory`` with room for so many objects hits. Every hit is loaded and compared."""
    requests = blocks = hits = 0
    began_s = time.monotonic()
    capacity = Capacity(quota_bytes=capacity_blocks * OBJECT_BYTES, high=1.0, low=1.0)
    with kvstore.open(
        directory.as_uri(), WHOSE, geometry=PAGE, direct=False, lease_s=0, depth=2, capacity=capacity
    ) as store:
        for request in trace:
            requests += 1
            blocks += len(request)
            keys = [store.foreign_key(block.to_bytes(8, "little")) for block in request]
            hit = store.lookup(keys)
            hits += hit.pages
            room = [bytearray(PAGE.size_bytes) for _ in hit.keys]
            assert all(store.get(hit.keys, room, lookup=hit).result()), "a promised block was not delivered"
            assert all(map(bytes.__eq__, map(bytes, room), map(content, request))), "a block has other bytes"
            rest = request[hit.pages :]
            assert all(store.put(keys[hit.pages :], [content(block) for block in rest]).result()), "a put failed"
        used_bytes = store.stats().capacity.used_bytes
        assert used_bytes == store.usage().used_bytes <= capacity_blocks * OBJECT_BYTES
    return Outcome(requests, blocks, hits, time.monotonic() - began_s)
