"""LMCache, multiprocess: an L2 adapter on a shared pool.

::

    lmcache server ... --l2-adapter '{"type": "plugin", "module_path": "kvstore.connectors.lmcache_l2",
        "class_name": "KvstoreL2Adapter", "adapter_params": {"url": "curvine://m1:8995/pool"}}'

The number format is taken from the layouts that LMCache tells with lookups, and from the objects that it hands over.
With a ``serde`` in between those are bytes of its own making: then ``"dtype"`` must be given.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from lmcache.lmcache_native import Bitmap
from lmcache.v1.distributed.api import KeyEntry, KeyListPage, MemoryLayoutDesc, ObjectKey
from lmcache.v1.distributed.internal_api import L2StoreResult
from lmcache.v1.distributed.l2_adapters.base import L2AdapterInterface
from lmcache.v1.platform import create_event_notifier

from kvstore.backends.base import Found
from kvstore.connectors.lmcache_native import LAYOUT, WHERE
from kvstore.connectors.lmcache_shelf import Item, Shelf

_SERIALIZED = "uint8"


class KvstoreL2Adapter(L2AdapterInterface):  # type: ignore[misc]
    """``params``: ``url``, and where it cannot be found out ``revision``; ``dtype`` under a serde; ``max_capacity_gb``
    is what LMCache's own eviction works against, on what this server stored. Everything else is a setting of
    :func:`kvstore.open`. Callable from any thread; nothing waits but ``delete``, ``list_l2_keys`` and ``close``.

    Raises ConfigError.
    """

    def __init__(self, params: Mapping[str, Any], **_: Any) -> None:
        settings = dict(params)
        super().__init__(max_capacity_bytes=int(float(settings.pop("max_capacity_gb", 0)) * (1 << 30)))
        self._shelf = Shelf(settings, where=WHERE, layout=LAYOUT)
        self._lock = self._shelf.lock
        self._closed = False
        self._stored, self._looked, self._loaded = (create_event_notifier() for _ in range(3))
        self._results: dict[int, Any] = {}
        self._stores: dict[int, L2StoreResult] = {}
        #: (model, object group) -> number format.
        self._dtypes: dict[tuple[str, int], str] = {}
        #: Bytes of every object stored from here.
        self._sizes: dict[ObjectKey, int] = {}
        #: Object -> how many lookups hold it, and what the last one found.
        self._leases: dict[ObjectKey, tuple[int, Found]] = {}

    def get_store_event_fd(self) -> int:
        return int(self._stored.fileno())

    def get_lookup_and_lock_event_fd(self) -> int:
        return int(self._looked.fileno())

    def get_load_event_fd(self) -> int:
        return int(self._loaded.fileno())

    # -------------------------------------------------------------------------------------------------------- tasks

    def submit_store_task(self, keys: list[ObjectKey], objects: list[Any]) -> int:
        self._learn(keys, [str(item.get_dtype()) for item in objects])
        items = self._items(keys, objects)

        def store(until_s: float) -> L2StoreResult:
            results = self._shelf.put(items, until_s)
            stored = [key for key, result in zip(keys, results, strict=True) if result]
            with self._lock:
                sizes = [0 if key in self._sizes else item.buffer.nbytes for key, item in zip(keys, items, strict=True)]
                new = {key: size for key, size, result in zip(keys, sizes, results, strict=True) if result}
                self._sizes |= {key: size for key, size in new.items() if size}
            self._notify_keys_stored(stored, [new[key] for key in stored])
            return L2StoreResult(all(results), sum(new.values()))

        return self._submit(store, L2StoreResult(False, 0), self._stores, self._stored)

    def pop_completed_store_tasks(self) -> dict[int, L2StoreResult]:
        with self._lock:
            done = dict(self._stores)
            self._stores.clear()
        return done

    def submit_lookup_and_lock_task(
        self, keys: list[ObjectKey], group_layout_descs: dict[int, MemoryLayoutDesc]
    ) -> int:
        told = [group_layout_descs.get(key.object_group_id) for key in keys]
        self._learn(keys, [str(desc.dtypes[0]) if desc is not None and desc.dtypes else "" for desc in told])
        items = self._items(keys)

        def look(until_s: float) -> Any:
            found = self._shelf.look(items, until_s)
            with self._lock:
                for key, one in zip(keys, found, strict=True):
                    if one is not None:
                        self._leases[key] = (self._leases.get(key, (0, one))[0] + 1, one)
            return _bits([one is not None for one in found])

        return self._submit(look, Bitmap(len(keys)), self._results, self._looked)

    def query_lookup_and_lock_result(self, task_id: int) -> Any:
        with self._lock:
            return self._results.pop(task_id, None)

    def submit_unlock(self, keys: list[ObjectKey]) -> None:
        with self._lock:
            for key in keys:
                count, found = self._leases.pop(key, (1, None))
                if found is not None and count > 1:
                    self._leases[key] = (count - 1, found)

    def submit_load_task(self, keys: list[ObjectKey], objects: list[Any]) -> int:
        self._learn(keys, [str(item.get_dtype()) for item in objects])
        items = self._items(keys, objects)
        with self._lock:
            promised = [self._leases.get(key, (0, None))[1] for key in keys]

        def load(until_s: float) -> Any:
            loaded = [bool(result) for result in self._shelf.get(items, until_s, promised)]
            self._notify_keys_accessed([key for key, there in zip(keys, loaded, strict=True) if there])
            return _bits(loaded)

        return self._submit(load, Bitmap(len(keys)), self._results, self._loaded)

    def query_load_result(self, task_id: int) -> Any:
        return self.query_lookup_and_lock_result(task_id)

    # ----------------------------------------------------------------------------------------------- administration

    def delete(self, keys: list[ObjectKey]) -> None:
        """Take objects away; who holds a lease can still load them for a while."""
        gone = [key for key, there in zip(keys, self._shelf.evict(self._items(keys)), strict=True) if there]
        with self._lock:
            sizes = [self._sizes.pop(key, 0) for key in gone]
        if gone:
            self._notify_keys_deleted(gone, sizes)

    def list_l2_keys(self, model_name: str | None = None, page_size: int = 500, cursor: str | None = None) -> Any:
        """What this server stored and the pool still has, in order of the keys. Raises ValueError."""
        if page_size < 1:
            raise ValueError(f"A page of {page_size} keys is none; give at least 1.")
        with self._lock:
            known = [(_text(key), key, size) for key, size in self._sizes.items()]
        known = sorted(entry for entry in known if model_name in (None, entry[1].model_name))
        page = [entry for entry in known if entry[0] > (cursor or "")][: page_size + 1]
        more, page = len(page) > page_size, page[:page_size]
        until_s = self._shelf.until_s()
        there = self._shelf.look(self._items([key for _, key, _ in page]), until_s)
        entries = [
            KeyEntry(key.to_encoded_object_key(), size)
            for (_, key, size), found in zip(page, there, strict=True)
            if found is not None
        ]
        return KeyListPage(entries=tuple(entries), next_page_token=page[-1][0] if more else None)

    def report_status(self) -> dict[str, Any]:
        with self._lock:
            counts = {"leases": len(self._leases), "keys": len(self._sizes)}
        return {"is_healthy": not self._closed, "type": "curvfs", **counts, **self._shelf.status()}

    def close(self) -> None:
        """Within a bound; idempotent."""
        with self._lock:
            closed, self._closed = self._closed, True
        if not closed:
            self._shelf.close()
            with self._lock:
                for notifier in (self._stored, self._looked, self._loaded):
                    notifier.close()

    # ------------------------------------------------------------------------------------------------------- inside

    def _learn(self, keys: Sequence[ObjectKey], dtypes: Sequence[str]) -> None:
        """Remember the number formats of what is not a serde's."""
        with self._lock:
            for key, dtype in zip(keys, dtypes, strict=True):
                name = dtype.removeprefix("torch.")
                if name not in ("", "None", _SERIALIZED):
                    self._dtypes[key.model_name, key.object_group_id] = name

    def _items(self, keys: Sequence[ObjectKey], objects: Sequence[Any] | None = None) -> list[Item]:
        buffers = [None] * len(keys) if objects is None else [memoryview(item.byte_array) for item in objects]
        with self._lock:
            dtypes = [self._shelf.dtype or self._dtypes.get((key.model_name, key.object_group_id), "") for key in keys]
        return [
            Item(key.model_name, dtype, _text(key), buffer)
            for key, dtype, buffer in zip(keys, dtypes, buffers, strict=True)
        ]

    def _submit(self, call: Callable[[float], Any], failed: Any, results: dict[int, Any], notifier: Any) -> int:
        """Run a task in a thread; whatever happens, it gets a result."""

        def deliver(number: int, result: Any) -> None:
            results[number] = result
            if not self._closed:
                notifier.notify()

        return self._shelf.submit(call, failed, deliver)


def _text(key: ObjectKey) -> str:
    """As LMCache writes keys for native clients, so that both kinds of adapter share objects."""
    salt = f"@{key.cache_salt}" if key.cache_salt else ""
    return f"{key.model_name}@{key.kv_rank:08x}@{key.object_group_id:x}@{key.chunk_hash.hex()}{salt}"


def _bits(flags: Sequence[bool]) -> Any:
    bitmap = Bitmap(len(flags))
    for index, flag in enumerate(flags):
        if flag:
            bitmap.set(index)
    return bitmap
