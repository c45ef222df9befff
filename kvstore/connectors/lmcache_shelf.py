"""Objects of any length under an engine's own keys, for engines that tell sizes and models only with each call.

A store has one identity and one page size. LMCache's server serves any model, and says how long an object is when it
hands the memory over; so here stores are opened as they are needed, one for each model, number format and length, and
one for each model and format that only asks, whatever the length.
"""

from __future__ import annotations

import logging
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from curvfs.errors import ConfigError, CurvfsError
from curvfs.world import World
from kvstore.backends.base import Found
from kvstore.connectors.identity import EnginePages, model_name, open_for_engine, weights_revision
from kvstore.geometry import MAX_PAGE_BYTES, dtype_named
from kvstore.keys import PageKey
from kvstore.results import TROUBLE, Miss, Result
from kvstore.store import KVStore, Lookup
from kvstore.transfer import Transfer

logger = logging.getLogger("kvstore")

#: Calls under way at once; what is submitted beyond that waits for its turn, in its own time.
_CALLS = 8
#: Stores kept open; the one that was not used for longest goes.
_MOST_STORES = 32
#: How long a store that could not be opened is not tried again.
_RETRY_S = 10.0


class Item(NamedTuple):
    """One object of one call. ``key``: the engine's own, with everything that tells objects of a model apart.
    ``dtype``: empty where nobody has told it yet, which is a miss. ``buffer``: bytes to store, or to fill."""

    model: str
    dtype: str
    key: str
    buffer: Any = None


class _Place(NamedTuple):
    model: str
    dtype: str
    size_bytes: int


class _Room:
    def __init__(self, world: World) -> None:
        self.lock = world.threads.lock()
        self.store: KVStore | None = None
        self.retry_s = 0.0


class Shelf:
    """Callable from any thread. Everything but :meth:`run` and :meth:`close` blocks, at most until its deadline, and
    answers misses where anything goes wrong. Raises ConfigError for settings that cannot be."""

    def __init__(self, settings: Mapping[str, Any], *, where: str, layout: str, world: World | None = None) -> None:
        self._world = world or World.real()
        self._settings = {"chain_hash": "sha256", **settings}
        self._where = where
        self._layout = layout
        self.dtype = ""
        if settings.get("dtype"):
            self.dtype = dtype_named(self._settings.pop("dtype")).name
        self.timeout_s = float(settings.get("timeout_s", 30.0))
        self._lock = self._world.threads.lock()
        self._rooms: OrderedDict[_Place, _Room] = OrderedDict()
        self._revisions: dict[str, str] = {}
        self._closed = False
        self.last_error = ""
        self._logged_s = 0.0
        try:  # what is wrong with the settings is said now, not when the first request comes
            self._open(_Place("settings", "uint8", 1), revision="none").close()
        except ConfigError:
            raise
        except CurvfsError as error:
            self._failed("The pool cannot be used yet: %s", error)
        self._calls = self._world.threads.pool(_CALLS, name="kvstore-lmcache")

    def lock(self) -> Any:
        """A lock of this world's, for whoever shares state with jobs."""
        return self._world.threads.lock()

    def until_s(self) -> float:
        """The deadline of a call that begins now."""
        return self._world.clock.monotonic_s() + self.timeout_s

    def run(self, job: Callable[[float], None]) -> None:
        """Call ``job(until_s)`` soon, in a thread of ours, with the call's deadline. Raises CurvfsError when closed."""
        until_s = self.until_s()

        def guarded() -> None:
            try:
                job(until_s)
            except Exception:
                logger.exception("A call of LMCache failed in curvfs.")

        self._calls.submit(guarded)

    # ------------------------------------------------------------------------------------------------------ objects

    def look(self, items: Sequence[Item], until_s: float) -> list[Found | None]:
        """What is there of each; where something is, the lease that it stays readable begins now."""
        found: list[Found | None] = [None] * len(items)
        for place, indexes in self._places(items, asking=True).items():
            store = self._store(place)
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
            self._failed("LMCache's objects could not all be stored: %s", result)
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
            store = self._store(place)
            if store is not None:
                store.forget(self._keys(store, missed, indexes))
        return results

    def evict(self, items: Sequence[Item]) -> list[bool]:
        """Take them away, but not from readers who hold a lease; per item whether it was there."""
        gone = [False] * len(items)
        for place, indexes in self._places(items, asking=True).items():
            store = self._store(place)
            if store is not None:
                for index, result in zip(indexes, store.evict(self._keys(store, items, indexes)), strict=True):
                    gone[index] = result is True
        return gone

    def status(self) -> dict[str, Any]:
        """What happened so far, and the last thing that went wrong."""
        with self._lock:
            stores = [room.store for room in self._rooms.values() if room.store is not None]
        counts: dict[str, Any] = defaultdict(int)
        for stats in (store.stats() for store in stores):
            for name in ("puts", "puts_existing", "put_bytes", "gets", "get_bytes", "quarantined", "in_flight"):
                counts[name] += getattr(stats, name)
            for miss, count in stats.get_misses.items():
                counts[f"get_misses.{getattr(miss, 'value', miss)}"] += count
        return {"url": self._settings.get("url"), "stores": len(stores), "last_error": self.last_error, **counts}

    def close(self) -> None:
        """End the calls, within a bound, and close the stores; idempotent."""
        self._calls.close(self.timeout_s)
        with self._lock:
            self._closed = True
            rooms, self._rooms = list(self._rooms.values()), OrderedDict()
        for room in rooms:
            if room.store is not None:
                room.store.close()

    # ------------------------------------------------------------------------------------------------------- stores

    def _move(
        self, items: Sequence[Item], begin: Callable[[KVStore, list[PageKey], list[int]], Transfer]
    ) -> list[Result]:
        results: list[Result] = [Miss.UNREACHABLE if item.dtype else Miss.ABSENT for item in items]
        running = []
        if not all(item.dtype for item in items):
            self._failed('The number format of LMCache\'s pages cannot be told; set "dtype" in %s.', self._where)
        for place, indexes in self._places(items, asking=False).items():
            store = self._store(place)
            if store is None:
                continue
            try:
                running.append((indexes, begin(store, self._keys(store, items, indexes), indexes)))
            except CurvfsError as error:
                self._failed("LMCache's call cannot be served: %s", error)
        for indexes, transfer in running:
            for index, result in zip(indexes, transfer.result(), strict=True):
                results[index] = result
        return results

    @staticmethod
    def _keys(store: KVStore, items: Sequence[Item], indexes: Sequence[int]) -> list[PageKey]:
        return [store.foreign_key(items[index].key.encode()) for index in indexes]

    @staticmethod
    def _places(items: Sequence[Item], *, asking: bool) -> dict[_Place, list[int]]:
        """Which items belong to which store."""
        places: defaultdict[_Place, list[int]] = defaultdict(list)
        for index, item in enumerate(items):
            if item.dtype:
                size_bytes = MAX_PAGE_BYTES if asking else memoryview(item.buffer).nbytes
                places[_Place(item.model, item.dtype, size_bytes)].append(index)
        return places

    def _store(self, place: _Place) -> KVStore | None:
        """The store of one place, opened if need be; None while that does not work."""
        dropped: list[_Room] = []
        with self._lock:
            if self._closed:
                return None
            room = self._rooms.get(place)
            if room is None:
                room = self._rooms[place] = _Room(self._world)
            self._rooms.move_to_end(place)
            while len(self._rooms) > _MOST_STORES:
                dropped.append(self._rooms.popitem(last=False)[1])
        for old in dropped:
            if old.store is not None:
                old.store.close()
        with room.lock:
            if room.store is None and self._world.clock.monotonic_s() >= room.retry_s:
                try:
                    room.store = self._open(place)
                except CurvfsError as error:
                    self._failed(f"KV pages of {place.model} are neither stored nor found: %s", error)
                    room.retry_s = self._world.clock.monotonic_s() + _RETRY_S
            return room.store

    def _open(self, place: _Place, revision: str = "") -> KVStore:
        pages = EnginePages(
            model=model_name(place.model),
            revision=revision or self._revision(place.model),
            size_bytes=place.size_bytes,
            page_tokens=1,
            dtype=place.dtype,
            layout=self._layout,
        )
        return open_for_engine(pages, self._settings, where=self._where, world=self._world)

    def _revision(self, model: str) -> str:
        with self._lock:
            known = self._revisions.get(model)
        if known is None:
            known = weights_revision(model, self._settings, where=self._where, disk=self._world.disk)
            with self._lock:
                self._revisions[model] = known
        return known

    def _left_s(self, until_s: float) -> float:
        return max(0.001, until_s - self._world.clock.monotonic_s())

    def _failed(self, message: str, what: object) -> None:
        """Remember what went wrong, and say it, but not over and over."""
        text, now_s = message % what, self._world.clock.monotonic_s()
        if text != self.last_error or now_s >= self._logged_s + _RETRY_S:
            self.last_error, self._logged_s = text, now_s
            logger.error("%s", text)
