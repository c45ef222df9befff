"""LMCache inside the engine's workers: a remote connector on a shared pool.

::

    # lmcache.yaml
    chunk_size: 256
    pre_caching_hash_algorithm: sha256_cbor
    remote_storage_plugins: ["curvfs"]
    extra_config:
      remote_storage_plugin.curvfs.module_path: kvstore.connectors.lmcache
      remote_storage_plugin.curvfs.class_name: KvstoreConnectorAdapter
      remote_storage_plugin.curvfs.url: curvine://m1:8995/pool

LMCache calls a connector on one event loop for all its storage, so nothing here blocks that: pages move in the store's
threads, questions are asked in the loop's. It frees memory when its patience is over, so pages are copied into it only
once they are there and verified.
"""

from __future__ import annotations

import asyncio
import builtins
import logging
import struct
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from lmcache.v1.storage_backend.connector import ConnectorAdapter, ConnectorContext, extract_plugin_type
from lmcache.v1.storage_backend.connector.base_connector import RemoteConnector

from curvfs.world import World
from kvstore.connectors.identity import open_for_engine
from kvstore.connectors.lmcache_config import check, pages_of, settings_of
from kvstore.connectors.serving import keys_of, log_opened
from kvstore.keys import PageKey
from kvstore.results import TROUBLE
from kvstore.store import KVStore

logger = logging.getLogger("kvstore")

_PLUGIN = "plugin://"
#: Behind a chunk's bytes: how many of them are its own. Chunks shorter than a whole one are filled up.
_LENGTH = struct.Struct("<Q")

T = TypeVar("T")


class KvstoreConnectorAdapter(ConnectorAdapter):  # type: ignore[misc]
    """Made by LMCache; answers to the plug-in name ``curvfs``, alone or with an instance (``curvfs.shared``)."""

    def __init__(self) -> None:
        super().__init__("curvfs://")

    def can_parse(self, url: str) -> bool:
        return url.startswith(_PLUGIN) and extract_plugin_type(url.removeprefix(_PLUGIN)) == "curvfs"

    def create_connector(self, context: ConnectorContext) -> RemoteConnector:
        """Raises ConfigError, EnvironmentError_, TransportError."""
        return KvstoreConnector(context)


class KvstoreConnector(RemoteConnector):  # type: ignore[misc]
    """Chunks of one worker in a pool, under LMCache's own keys, which tell model, ranks, tags and tokens."""

    def __init__(self, context: ConnectorContext) -> None:
        super().__init__(context.config, context.metadata)
        self._memory = context.local_cpu_backend
        settings, where = settings_of(context.config, context.plugin_name)
        check(context.config, logger)
        world = World.real()
        size_bytes = self.full_chunk_size_bytes + _LENGTH.size
        pages = pages_of(self, context.metadata, size_bytes, settings, where, world.disk)
        self._store = open_for_engine(pages, settings, where=where, world=world)
        log_opened(logger, "remote connector", "chunk", pages, self._store)

    # ------------------------------------------------------------------------------------------------------ asking

    async def exists(self, key: Any) -> bool:
        return await self._asked(lambda: self.exists_sync(key))

    def exists_sync(self, key: Any) -> bool:
        return self._store.exists(self._keys([key]))[0]

    def support_batched_contains(self) -> bool:
        return True

    def batched_contains(self, keys: builtins.list[Any]) -> int:
        """How many of the first keys are there without a gap."""
        return self._store.lookup(self._keys(keys)).pages

    async def batched_async_contains(self, lookup_id: str, keys: builtins.list[Any], pin: bool = False) -> int:
        return await self._asked(lambda: self.batched_contains(keys))

    async def list(self) -> list[str]:
        """Keys of the objects of this model, as the pool names them."""
        return await self._asked(lambda: _listed(self._store))

    # ------------------------------------------------------------------------------------------------------- moving

    async def put(self, key: Any, memory_obj: Any) -> None:
        await self.batched_put([key], [memory_obj])

    def support_batched_put(self) -> bool:
        return True

    async def batched_put(self, keys: Sequence[Any], memory_objs: Sequence[Any]) -> None:
        """Store chunks; what is there already costs a question. LMCache gives the memory back afterwards."""
        segments = []
        for memory in memory_objs:
            chunk = memoryview(memory.byte_array)
            if chunk.nbytes > self.full_chunk_size_bytes:
                logger.warning("A chunk of %d bytes is longer than a whole one; it is not stored.", chunk.nbytes)
                return
            fill = bytes(self.full_chunk_size_bytes - chunk.nbytes)
            segments.append([chunk, fill, _LENGTH.pack(chunk.nbytes)])
        results = await self._store.put(self._keys(keys), segments)
        for miss in set(results) & TROUBLE:
            logger.error("LMCache's chunks could not all be stored: %s.", miss)

    async def get(self, key: Any) -> Any:
        return (await self.batched_get([key]))[0]

    def support_batched_get(self) -> bool:
        return True

    async def batched_get(self, keys: Sequence[Any]) -> builtins.list[Any]:
        """For each key its chunk in memory of LMCache's, or None."""
        memories = [self._memory.allocate(self.meta_shapes, self.meta_dtypes, self.meta_fmt) for _ in keys]
        wanted = [index for index, memory in enumerate(memories) if memory is not None]
        lengths = [bytearray(_LENGTH.size) for _ in wanted]
        delivered: builtins.list[Any] = [None] * len(keys)
        try:
            segments = [
                [memoryview(memories[index].byte_array), length] for index, length in zip(wanted, lengths, strict=True)
            ]
            results = await self._store.get(self._keys([keys[index] for index in wanted]), segments)
            for index, length, result in zip(wanted, lengths, results, strict=True):
                if result:
                    delivered[index] = self._cut(memories[index], _LENGTH.unpack(length)[0])
        finally:
            for memory, chunk in zip(memories, delivered, strict=True):
                if memory is not None and chunk is None:
                    memory.ref_count_down()
        return delivered

    async def batched_get_non_blocking(self, lookup_id: str, keys: builtins.list[Any]) -> builtins.list[Any]:
        """The chunks up to the first that is not there."""
        chunks = await self.batched_get(keys)
        whole = chunks.index(None) if None in chunks else len(chunks)
        for chunk in chunks[whole:]:
            if chunk is not None:
                chunk.ref_count_down()
        return chunks[:whole]

    def remove_sync(self, key: Any) -> bool:
        return self._store.evict(self._keys([key]))[0] is True

    async def close(self) -> None:
        await self._asked(self._store.close)

    # ------------------------------------------------------------------------------------------------------- inside

    def _keys(self, keys: Sequence[Any]) -> builtins.list[PageKey]:
        return keys_of(self._store, [key.to_string() for key in keys])

    def _cut(self, memory: Any, size_bytes: int) -> Any:
        """A chunk's memory as long as the chunk is; None where it cannot be so long."""
        try:
            return self.reshape_partial_chunk(memory, size_bytes)
        except ValueError as error:
            logger.error("A chunk in the pool is not of whole tokens: %s", error)
            return None

    @staticmethod
    async def _asked(question: Callable[[], T]) -> T:
        """Ask in a thread of the loop's."""
        return await asyncio.get_running_loop().run_in_executor(None, question)


def _listed(store: KVStore) -> list[str]:
    keys: list[str] = []
    cursor = ""
    while True:
        listing = store.list(cursor)
        keys += [page.key for page in listing.pages]
        cursor = listing.cursor
        if not cursor:
            return keys
