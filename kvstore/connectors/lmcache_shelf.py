"""Objects of any length under an engine's own keys: calls that take a while, in threads of their own."""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

from curvfs.errors import CurvfsError
from curvfs.world import World
from kvstore.backends.base import Found
from kvstore.connectors.lmcache_salts import Salts
from kvstore.connectors.lmcache_stores import Place, Stores, Trouble
from kvstore.connectors.serving import keys_of
from kvstore.geometry import MAX_PAGE_BYTES, dtype_named
from kvstore.keys import PageKey
from kvstore.results import TROUBLE, Miss, Result
from kvstore.store import KVStore, Lookup
from kvstore.transfer import Transfer

logger = logging.getLogger("kvstore")

#: Calls under way at once; what is submitted beyond that waits for its turn, in its own time.
_CALLS = 8

T = TypeVar("T")


class Item(NamedTuple):
    """One object of one call. ``key``: ``model@rank@group@hash`` and perhaps ``@salt``, as LMCache writes it.
    ``dtype``: empty where nobody has told it yet, which is a miss. ``buffer``: bytes to store, or to fill."""

    model: str
    dtype: str
    key: str
    buffer: Any = None

    @property
    def salt(self) -> str:
        return "".join(self.key.split("@", 4)[4:])


class Shelf:
    """Callable from any thread. Everything but :meth:`submit` and :meth:`close` blocks, at most until its deadline, and
    answers misses where anything goes wrong. Raises ConfigError for settings that cannot be."""

    def __init__(self, settings: Mapping[str, Any], *, where: str, layout: str, world: World | None = None) -> None:
        self._world = world or World.real()
        options = {"chain_hash": "sha256", **settings}
        dtype = options.pop("dtype", None)
        #: That of every object, where it was set.
        self.dtype = dtype_named(dtype).name if dtype else ""
        self.timeout_s = float(settings.get("timeout_s", 30.0))
        self._where = where
        self._url = settings.get("url")
        #: For whoever shares state with what :meth:`submit` delivers.
        self.lock = self._world.threads.lock()
        self._last_id = 0
        self._trouble = Trouble(self._world)
        self._stores = Stores(options, where=where, layout=layout, world=self._world, trouble=self._trouble)
        self._stores.try_settings()
        self._salts = Salts(self._world, self._stores.of_models)
        self._calls = self._world.threads.pool(_CALLS, name="kvstore-lmcache")

    @property
    def last_error(self) -> str:
        return self._trouble.last

    def until_s(self) -> float:
        """The deadline of a call that begins now."""
        return self._world.clock.monotonic_s() + self.timeout_s

    def submit(self, call: Callable[[float], T], failed: T, deliver: Callable[[int, T], None]) -> int:
        """Run ``call(until_s)`` soon, in a thread of ours, with the call's deadline; its number.

        Whatever happens, ``deliver(number, result)`` is called once, under :attr:`lock`, with ``failed`` where there is
        no result. Raises CurvfsError when closed.
        """
        until_s = self.until_s()
        with self.lock:
            self._last_id += 1
            number = self._last_id

        def job() -> None:
            result = failed
            try:
                result = call(until_s)
            except Exception:
                logger.exception("A call of LMCache failed in curvfs.")
            finally:
                with self.lock:
                    deliver(number, result)

        self._calls.submit(job)
        return number

    # ------------------------------------------------------------------------------------------------------ objects

    def look(self, items: Sequence[Item], until_s: float) -> list[Found | None]:
        """What is there of each; where something is, the lease that it stays readable begins now."""
        found: list[Found | None] = [None] * len(items)
        for place, indexes in self._places(items, asking=True).items():
            store = self._stores.at(place)
            if store is None:
                continue
            rest = indexes
            while rest:
                keys = self._keys(store, items, rest)
                hit = store.lookup(keys, timeout_s=self._left_s(until_s))
                if hit.pages == 0 and rest is not indexes:  # what was there a moment ago is not promised
                    break
                for index, key in zip(rest, hit.keys, strict=False):
                    found[index] = hit.found[store.object_name(key)]
                after = hit.pages + 1  # the one that ended the prefix is not there
                there = store.exists(keys[after:], timeout_s=self._left_s(until_s)) if after < len(keys) else []
                rest = [index for index, stored in zip(rest[after:], there, strict=True) if stored]
        return found

    def put(self, items: Sequence[Item], until_s: float) -> list[Result]:
        """Store them; per item the bytes or why not."""

        def begin(store: KVStore, keys: list[PageKey], indexes: list[int]) -> Transfer:
            return store.put(keys, [items[index].buffer for index in indexes], timeout_s=self._left_s(until_s))

        results = self._move(items, begin)
        for result in set(results) & TROUBLE:
            self._trouble.say("LMCache's objects could not all be stored: %s", result)
        return results

    def get(self, items: Sequence[Item], until_s: float, promised: Sequence[Found | None] = ()) -> list[Result]:
        """Fill the buffers; per item the bytes or why not, the buffer untouched then. ``promised``: what :meth:`look`
        said less than a lease ago."""

        def begin(store: KVStore, keys: list[PageKey], indexes: list[int]) -> Transfer:
            found = {
                store.object_name(key): promise
                for key, index in zip(keys, indexes, strict=True)
                if promised and (promise := promised[index]) is not None
            }
            buffers = [items[index].buffer for index in indexes]
            lookup = Lookup(pages=len(keys), tokens=len(keys), keys=tuple(keys), found=found)
            return store.get(keys, buffers, lookup=lookup, timeout_s=self._left_s(until_s))

        results = self._move(items, begin)
        missed = [item for item, result in zip(items, results, strict=True) if isinstance(result, Miss)]
        for place, indexes in self._places(missed, asking=True).items():
            store = self._stores.at(place)
            if store is not None:
                store.forget(self._keys(store, missed, indexes))
        return results

    def evict(self, items: Sequence[Item]) -> list[bool]:
        """Take them away, but not from readers who hold a lease; per item whether it was there."""
        gone = [False] * len(items)
        for place, indexes in self._places(items, asking=True).items():
            store = self._stores.at(place)
            if store is not None:
                for index, result in zip(indexes, store.evict(self._keys(store, items, indexes)), strict=True):
                    gone[index] = result is True
        return gone

    def status(self) -> dict[str, Any]:
        """What happened so far, the last thing that went wrong, and, once counted, what is in the pool."""
        stores = self._stores.open_now()
        counts: dict[str, Any] = defaultdict(int)
        for stats in (store.stats() for store in stores):
            for name in ("puts", "puts_existing", "put_bytes", "gets", "get_bytes", "quarantined", "in_flight"):
                counts[name] += getattr(stats, name)
            for miss, count in stats.get_misses.items():
                counts[f"get_misses.{getattr(miss, 'value', miss)}"] += count
        pool = self._salts.report()
        return {"url": self._url, "stores": len(stores), "last_error": self.last_error, **counts, **pool}

    def close(self) -> None:
        """End the calls, within a bound, and close the stores; idempotent."""
        self._calls.close(self.timeout_s)
        self._salts.close(self.timeout_s)
        self._stores.close()

    def _move(
        self, items: Sequence[Item], begin: Callable[[KVStore, list[PageKey], list[int]], Transfer]
    ) -> list[Result]:
        results: list[Result] = [Miss.UNREACHABLE if item.dtype else Miss.ABSENT for item in items]
        running = []
        if not all(item.dtype for item in items):
            self._trouble.say('The number format of LMCache\'s pages cannot be told; set "dtype" in %s.', self._where)
        for place, indexes in self._places(items, asking=False).items():
            store = self._stores.at(place)
            if store is None:
                continue
            try:
                running.append((indexes, begin(store, self._keys(store, items, indexes), indexes)))
            except CurvfsError as error:
                self._trouble.say("LMCache's call cannot be served: %s", error)
        for indexes, transfer in running:
            for index, result in zip(indexes, transfer.result(), strict=True):
                results[index] = result
        return results

    @staticmethod
    def _places(items: Sequence[Item], *, asking: bool) -> dict[Place, list[int]]:
        """Which items belong to which store."""
        places: defaultdict[Place, list[int]] = defaultdict(list)
        for index, item in enumerate(items):
            if item.dtype:
                size_bytes = MAX_PAGE_BYTES if asking else memoryview(item.buffer).nbytes
                places[Place(item.model, item.dtype, size_bytes)].append(index)
        return places

    def _left_s(self, until_s: float) -> float:
        return max(0.001, until_s - self._world.clock.monotonic_s())

    def _keys(self, store: KVStore, items: Sequence[Item], indexes: Sequence[int]) -> list[PageKey]:
        keys = keys_of(store, [items[index].key for index in indexes])
        wanted = [items[index] for index in indexes]
        return [self._salts.marked(key, item.model, item.salt) for key, item in zip(keys, wanted, strict=True)]
