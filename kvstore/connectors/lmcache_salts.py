"""What each of LMCache's salts takes of a pool, whoever stored it, also after a restart.

A salt is part of LMCache's key, and objects of all salts of a model lie in one namespace. So that they can be told
apart by name, without opening them, a digest of 32 bytes ends with 8 that are the salt's::

    SHA-256(field("curvfs.lmcache.salt", "1") | field("model", model) | field("salt", salt))[:8]

Which salt that is, only those can tell who know it.
"""

from __future__ import annotations

import hashlib
import logging
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from curvfs.errors import CurvfsError
from curvfs.world import World
from kvstore.keys import PageKey, tagged
from kvstore.store import KVStore

logger = logging.getLogger("kvstore")

_MARK_BYTES = 8
_DIGEST_BYTES = 32
#: Salts whose bytes are told; of more than these only that they take room.
_MOST_SALTS = 100_000
#: A count is as good as new for so long, and for so many times as long as it took.
_FRESH_S = 60.0
_REST = 20


class Salts:
    """Callable from any thread. ``stores``: of each model, by its name in the pool, a store that is open now."""

    def __init__(self, world: World, stores: Callable[[], Mapping[str, KVStore]]) -> None:
        self._world = world
        self._stores = stores
        self._lock = world.threads.lock()
        #: (model, salt) -> its mark, of those seen here.
        self._marks: dict[tuple[str, str], bytes] = {}
        #: Of the models counted: last 16 digits of an object's name -> bytes.
        self._counted: Counter[str] = Counter()
        self._models: frozenset[str] = frozenset()
        self._counted_s = self._due_s = world.clock.monotonic_s()
        self._counting = self._closed = False
        self._counter = world.threads.pool(1, name="kvstore-lmcache-count")

    def marked(self, key: PageKey, model: str, salt: str) -> PageKey:
        """The key under whose name the salt can be told. A chain hash of fewer than 32 bytes has no room for that."""
        if len(key.digest) != _DIGEST_BYTES:
            return key
        mark = self._marks.get((model, salt))
        if mark is None:
            named = tagged("model", model.encode()) + tagged("salt", salt.encode())
            mark = hashlib.sha256(tagged("curvfs.lmcache.salt", b"1") + named).digest()[:_MARK_BYTES]
            with self._lock:
                if len(self._marks) < _MOST_SALTS:
                    self._marks[model, salt] = mark
        return replace(key, digest=key.digest[:-_MARK_BYTES] + mark)

    def report(self) -> dict[str, Any]:
        """What the last count found, empty before the first: bytes of files of the models seen here, those of each salt
        seen here, and how old that is. Begins another count when it is time; waits for none."""
        models = self._stores().keys()
        with self._lock:
            now_s = self._world.clock.monotonic_s()
            begin = not self._counting and not self._closed and (now_s >= self._due_s or not models <= self._models)
            if begin and models:
                self._counting = True
                self._counter.submit(self._count)
            if not self._models:
                return {}
            told: Counter[str] = Counter()
            for (_, salt), mark in self._marks.items():
                told[salt] += self._counted[mark.hex()]
            return {
                "pool_bytes": self._counted.total(),
                "pool_bytes_by_cache_salt": {salt: size for salt, size in told.items() if size},
                "pool_counted_s_ago": round(now_s - self._counted_s, 1),
            }

    def close(self, timeout_s: float) -> None:
        """End a count within a bound; idempotent."""
        with self._lock:
            self._closed = True
        self._counter.close(timeout_s)

    def _count(self) -> None:
        began_s = self._world.clock.monotonic_s()
        counted: Counter[str] = Counter()
        stores = self._stores()
        try:
            for store in stores.values():
                self._add(store, counted)
            whole = not self._closed
        except CurvfsError as error:
            logger.warning("What LMCache's objects take of the pool could not be counted: %s", error)
            whole = False
        with self._lock:
            ended_s = self._world.clock.monotonic_s()
            if whole:
                self._counted, self._models, self._counted_s = counted, frozenset(stores), ended_s
            self._due_s = ended_s + max(_FRESH_S, _REST * (ended_s - began_s))
            self._counting = False

    def _add(self, store: KVStore, counted: Counter[str]) -> None:
        cursor = ""
        while not self._closed:
            listing = store.list(cursor)
            for page in listing.pages:
                counted[page.key[-2 * _MARK_BYTES :]] += page.length_bytes
            cursor = listing.cursor
            if not cursor:
                return
