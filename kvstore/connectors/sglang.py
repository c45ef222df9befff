"""SGLang: a HiCache storage backend that keeps pages in a shared pool.

::

    --enable-hierarchical-cache --hicache-storage-backend dynamic --hicache-storage-backend-extra-config
      '{"backend_name": "curvfs", "module_path": "kvstore.connectors.sglang", "class_name": "KvstoreHiCache",
        "interface_v1": 1, "url": "curvine://m1:8995/pool"}'

SGLang's page keys name tokens only; model, weights, number format, layout and ranks are added here, taken from the host
pools as they are registered, because flags do not say what layout was chosen in the end. Every method runs in one of
HiCache's own threads, waits no longer than the store's deadlines, and answers failures as misses. When a get has
returned nothing writes to the host pool any more, so that SGLang may free the pages of a prefetch it gave up.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import torch
from sglang.srt.mem_cache.hicache_storage import HiCacheStorage, PoolHitPolicy, PoolName, PoolTransferResult

from curvfs.errors import CurvfsError
from curvfs.world import World
from kvstore.connectors.identity import open_for_engine
from kvstore.connectors.serving import keys_of, log_opened, wait_returned
from kvstore.connectors.sglang_counts import Speeds
from kvstore.connectors.sglang_pools import WHERE, Pieces, addresses, pages_of, piece_of, settings_of
from kvstore.results import Miss
from kvstore.store import KVStore

logger = logging.getLogger("sglang.curvfs")

_MAIN = str(PoolName.KV)


class KvstoreHiCache(HiCacheStorage):  # type: ignore[misc]
    """Pages of one rank: a store for each of its host pools.

    Settings, in the extra configuration: ``url``; ``model``, ``revision``, ``lora`` and ``salt`` where they are to be
    other than found out; ``loan`` reads straight into the host pool (a get then ends when the storage ends it, not at
    the deadline); and the options of :func:`kvstore.open`.
    """

    def __init__(self, storage_config: Any, kwargs: Any = None) -> None:
        self._config = storage_config
        self._settings = settings_of(storage_config.extra_config or {})
        self._loan = bool(self._settings.pop("loan", False))
        self._world = World.real()
        self._pools: dict[str, Any] = {}
        self._stores: dict[str, KVStore] = {}
        self._speeds = Speeds()

    # Host pools. Raise ConfigError, EnvironmentError_ and TransportError, which fails the attachment.

    def register_mem_pool_host(self, mem_pool_host: Any) -> None:
        super().register_mem_pool_host(mem_pool_host)
        group = getattr(mem_pool_host, "anchor_entry", None)
        self._register(_MAIN, mem_pool_host if group is None else group.host_pool)

    def register_mem_host_pool_v2(self, host_pool: Any, host_pool_name: Any) -> None:
        super().register_mem_host_pool_v2(host_pool, host_pool_name)
        self._register(str(host_pool_name), host_pool)

    def _register(self, name: str, pool: Any) -> None:
        if self._pools.get(name) is pool:
            return
        pages = pages_of(name, pool, self._config, self._settings, self._world.disk)
        if name in self._stores:
            self._stores.pop(name).close()
        store = self._stores[name] = open_for_engine(pages, self._settings, where=WHERE, world=self._world)
        self._pools[name] = pool
        log_opened(logger, f"HiCache, pool {name}, {pool.layout}", "page", pages, store)

    # Transfers.

    def _move(self, name: str, keys: Sequence[str], pieces: Sequence[Pieces], *, put: bool) -> list[bool]:
        """For each page whether it was moved."""
        try:
            store = self._stores[name]
            page_keys = keys_of(store, keys)
            begin_s = self._world.clock.monotonic_s()
            transfer = store.put(page_keys, pieces) if put else store.get(page_keys, pieces, loan=self._loan)
            results = transfer.result()
            wait_returned(transfer, logger)
        except (CurvfsError, KeyError) as error:
            logger.warning("curvfs HiCache: pages of pool %s were not moved: %s", name, error)
            return [False] * len(keys)
        moved = [bool(result) for result in results]
        took_s = self._world.clock.monotonic_s() - begin_s
        if any(moved):
            size_bytes = sum(int(result) for result in results if not isinstance(result, Miss))
            self._speeds.add(sum(moved), size_bytes, took_s, put=put)
        return moved

    def batch_get(
        self, keys: list[str], target_locations: Any = None, target_sizes: Any = None
    ) -> list[torch.Tensor | None]:
        moved = self._move(_MAIN, keys, [piece_of(tensor) for tensor in target_locations], put=False)
        return [tensor if done else None for tensor, done in zip(target_locations, moved, strict=True)]

    def batch_set(
        self, keys: list[str], values: Any = None, target_locations: Any = None, target_sizes: Any = None
    ) -> bool:
        flat = [tensor.contiguous() for tensor in values]
        return all(self._move(_MAIN, keys, [piece_of(tensor) for tensor in flat], put=True))

    def get(self, key: str, target_location: Any = None, target_sizes: Any = None) -> torch.Tensor | None:
        return self.batch_get([key], [target_location])[0]

    def set(self, key: str, value: Any = None, target_location: Any = None, target_sizes: Any = None) -> bool:
        return self.batch_set([key], [value])

    def batch_get_v1(self, keys: list[str], host_indices: torch.Tensor, extra_info: Any = None) -> list[bool]:
        return self._move_indexed(_MAIN, keys, host_indices, put=False)

    def batch_set_v1(self, keys: list[str], host_indices: torch.Tensor, extra_info: Any = None) -> list[bool]:
        return self._move_indexed(_MAIN, keys, host_indices, put=True)

    def batch_get_v2(self, transfers: list[Any], extra_info: Any = None) -> dict[Any, list[bool]]:
        return {
            entry.name: self._move_indexed(str(entry.name), entry.keys or [], entry.host_indices, put=False)
            for entry in transfers
        }

    def batch_set_v2(self, transfers: list[Any], extra_info: Any = None) -> dict[Any, list[bool]]:
        return {
            entry.name: self._move_indexed(str(entry.name), entry.keys or [], entry.host_indices, put=True)
            for entry in transfers
        }

    def _move_indexed(self, name: str, keys: Sequence[str], indices: torch.Tensor | None, *, put: bool) -> list[bool]:
        """Pages of a pool, in place where it tells its addresses, else as flat copies."""
        pool = self._pools.get(name)
        if pool is None or indices is None or not keys or len(indices) % len(keys):
            return [False] * len(keys)
        pieces = addresses(pool, indices, len(keys))
        if pieces is not None:
            return self._move(name, keys, pieces, put=put)
        firsts = indices[:: len(indices) // len(keys)].tolist()
        if put:
            pages = [pool.get_data_page(first).contiguous() for first in firsts]
            return self._move(name, keys, [piece_of(page) for page in pages], put=True)
        pages = [pool.get_dummy_flat_data_page() for _ in firsts]
        moved = self._move(name, keys, [piece_of(page) for page in pages], put=False)
        for first, page, done in zip(firsts, pages, moved, strict=True):
            if done:
                pool.set_from_flat_data_page(first, page)
        return moved

    # What is there.

    def exists(self, key: str) -> bool:
        return self.batch_exists([key]) == 1

    def batch_exists(self, keys: list[str], extra_info: Any = None) -> int:
        try:
            store = self._stores[_MAIN]
            return store.lookup(keys_of(store, keys)).pages
        except (CurvfsError, KeyError) as error:
            logger.warning("curvfs HiCache: the pool was not asked for %d pages: %s", len(keys), error)
            return 0

    def batch_exists_v2(
        self, keys: list[str], pool_transfers: list[Any] | None = None, extra_info: Any = None
    ) -> PoolTransferResult:
        prefix = self.batch_exists(keys)
        hits: dict[Any, int] = {PoolName.KV: prefix} if prefix else {}
        restorable = list(range(1, prefix + 1))
        for entry in pool_transfers or []:
            if entry.hit_policy not in (PoolHitPolicy.ALL_PAGES, PoolHitPolicy.TRAILING_PAGES):
                continue  # no verdict
            there = self._there(str(entry.name), keys[:prefix])
            every = entry.hit_policy == PoolHitPolicy.ALL_PAGES
            window = prefix if every else max(1, len(entry.keys or ()))
            good = {end for end in range(1, prefix + 1) if all(there[max(0, end - window) : end])}
            if good:
                hits[entry.name] = max(good)
            restorable = [end for end in restorable if end in good]
        return PoolTransferResult(max(restorable, default=0), hits, restorable)

    def _there(self, name: str, keys: Sequence[str]) -> list[bool]:
        try:
            return self._stores[name].exists(keys_of(self._stores[name], keys))
        except (CurvfsError, KeyError):
            return [False] * len(keys)

    # Administration.

    def clear(self) -> bool:
        """Remove this model's pages, of every revision and rank."""
        try:
            for store in self._stores.values():
                store.clear()
        except CurvfsError as error:
            logger.warning("curvfs HiCache: the pool was not cleared: %s", error)
            return False
        return True

    def get_stats(self) -> Any:
        """SGLang's record of what was moved since the last call."""
        return self._speeds.taken()

    def close(self) -> None:
        for store in self._stores.values():
            store.close()
