"""kvstore: LLM KV-cache pages, keyed by token prefix, between inference workers and a shared pool.

::

    geometry = kvstore.Geometry.attention(layers=32, kv_heads=8, head_dim=128, dtype="bfloat16", page_tokens=64)
    identity = kvstore.Identity.of(geometry, model="llama-3-8b", revision="8cde5ca")
    with kvstore.open("curvine://m1:8995/pool", identity, geometry=geometry) as store:
        keys = store.keys(tokens)
        hit = store.lookup(keys)
        loaded = store.get(hit.keys, segments[: hit.pages], lookup=hit).result()
        stored = store.put(keys[hit.pages :], more_segments).result()

Every result is a number of bytes or a :class:`Miss`. A miss is always safe: nothing of the caller's was touched.
"""

from kvstore.capacity.room import CapacityStats
from kvstore.capacity.settings import Capacity
from kvstore.completions import Completions
from kvstore.geometry import Geometry, Shard, TensorSpec
from kvstore.health.health import HealthStats
from kvstore.health.writers import PlaceStats
from kvstore.inventory import Listing, StoredPage, Usage
from kvstore.keys import Extra, Identity, PageKey
from kvstore.opening import open
from kvstore.results import Miss, Result
from kvstore.stats import Stats
from kvstore.store import KVStore, Lookup
from kvstore.tiers.memory import MemoryStats
from kvstore.tiers.stats import BehindStats
from kvstore.transfer import Layer, Transfer
from kvstore.views import PageView

__all__ = [
    "BehindStats",
    "Capacity",
    "CapacityStats",
    "Completions",
    "Extra",
    "Geometry",
    "HealthStats",
    "Identity",
    "KVStore",
    "Layer",
    "Listing",
    "Lookup",
    "MemoryStats",
    "Miss",
    "PageKey",
    "PageView",
    "PlaceStats",
    "Result",
    "Shard",
    "Stats",
    "StoredPage",
    "TensorSpec",
    "Transfer",
    "Usage",
    "open",
]
