"""Engine ``kvstore``: puts, gets and lookups of real KV objects, and requests as an inference engine makes them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import kvstore
from curvfs.errors import CurvfsError
from kvstore import Miss, PageKey
from tools.bench.engines.base import Slot, Target
from tools.bench.source import Call

#: Pages of a request that are moved together.
_TOGETHER = 32
MODEL = "curvfs-bench"


class KvTarget(Target):
    """One store. Page ``i`` of a job lies at ``i * bs`` of its one file; a call of several pages is one request."""

    _store: kvstore.KVStore | None = None

    def prepare(self) -> None:
        job = self.job
        self._page_bytes: int = job["bs"][0]
        self._asks = job["rw"].startswith("kv")
        self._written: dict[int, int] = {}
        self._made: set[PageKey] = set()
        self._lock = self.world.threads.lock()
        self._total = sum(file.size_bytes for file in self.files) // self._page_bytes
        geometry = kvstore.Geometry.raw(self._page_bytes, page_tokens=16)
        # Content that is verified depends on the block; processes of one job share what requests stored.
        revision = f"{job['randseed']}/{job.sizes[0][0][0]}" if job["verify"] else f"{job['randseed']}"
        salt = "requests" if job.requests else f"{self.number}"
        identity = kvstore.Identity.of(geometry, model=MODEL, revision=revision, salt=salt)
        self._store = store = kvstore.open(
            job["url"],
            identity,
            geometry=geometry,
            prefix=job["kv_prefix"],
            direct="required" if job["direct"] else False,
            depth=job["iodepth"],
            engine=job["kv_engine"],
            page_cache=job["page_cache"],
            max_queued=max(4096, job["iodepth"] * job["kv_pages"]),
            world=self.world,
        )
        if job.requests:
            return
        if job.reads or job["rw"] == "kvlookup":
            self._lay_out(store)
        if job.writes:  # what is there already would cost a question and no write
            first = self._total if job.mixed else 0
            there = [self._key(page, 0) for page in range(first, first + self._total)]
            store.delete([key for key, found in zip(there, store.exists(there), strict=True) if found])

    def buffer_bytes(self) -> int:
        return self.job["bs"][0] * _TOGETHER if self.job.requests else super().buffer_bytes()

    def _key(self, page: int, generation: int) -> PageKey:
        assert self._store is not None
        return self._store.foreign_key(b"%d/%d" % (page, generation))

    def _lay_out(self, store: kvstore.KVStore) -> None:
        step = self.job.sizes[0][0][0]
        view = memoryview(bytearray(step))
        for at in range(0, self._total * self._page_bytes, step):
            if self.stopped:
                return
            first = at // self._page_bytes
            keys = [self._key(page, 0) for page in range(first, min(first + step // self._page_bytes, self._total))]
            filled = view[: len(keys) * self._page_bytes]
            self.content.fill(filled, "objects", at)
            pieces = self._pieces(filled)
            there = store.exists(keys)
            absent = [index for index, found in enumerate(there) if not found]
            self._made.update(keys[index] for index in absent)
            _must(store.put([keys[index] for index in absent], [pieces[index] for index in absent]).result())

    def _pieces(self, view: memoryview) -> list[memoryview]:
        """The memory of each page."""
        return [view[at : at + self._page_bytes] for at in range(0, len(view), self._page_bytes)]

    def _pages(self, call: Call, generation: int) -> list[PageKey]:
        first, count = call.offset_bytes // self._page_bytes, call.length_bytes // self._page_bytes
        if call.kind == "write" and self.job.mixed:
            first += self._total  # what is being read stays
        return [self._key(page, generation) for page in range(first, first + count)]

    def perform(self, call: Call, slot: Slot) -> int:
        assert self._store is not None
        if call.kind == "request":
            return self._request(call, slot)
        view = slot.view[: call.length_bytes]
        pieces = self._pieces(view)
        if call.kind == "write":
            keys = self._pages(call, self._written.get(call.offset_bytes, -1) + 1)
            _must(self._store.put(keys, pieces).result())
            with self._lock:
                self._made.update(keys)
            return call.length_bytes
        keys = self._pages(call, 0 if self.job.mixed else self._written.get(call.offset_bytes, 0))
        hit: kvstore.Lookup | None = None
        if self._asks:
            begun_s = self.world.clock.monotonic_s()
            hit = self._store.lookup(keys)
            if call.kind == "read":
                slot.note("lookup", self.world.clock.monotonic_s() - begun_s, 0)
            if hit.pages < len(keys):
                raise CurvfsError(f"A lookup found {hit.pages} of {len(keys)} pages that were put before.")
            if call.kind == "lookup":
                return 0
        return self._get(keys, pieces, hit)

    def _get(self, keys: Sequence[PageKey], pieces: Sequence[memoryview], hit: kvstore.Lookup | None) -> int:
        assert self._store is not None
        form = self.job["kv_form"]
        if form != "view":
            return _must(self._store.get(keys, pieces, lookup=hit, loan=form == "loan").result())
        transfer = self._store.get_view(keys, lookup=hit)
        results = transfer.result()
        for view in transfer.views:
            if view is not None:
                view.release()
        return _must(results)

    def after(self, call: Call) -> None:
        """Every write of a place makes another object; the one before it goes."""
        if call.kind != "write":
            return
        assert self._store is not None
        generation = self._written.get(call.offset_bytes, -1) + 1
        with self._lock:
            self._written[call.offset_bytes] = generation
        if generation:
            keys = self._pages(call, generation - 1)
            self._store.delete(keys)
            with self._lock:
                self._made.difference_update(keys)

    def _request(self, call: Call, slot: Slot) -> int:
        """What an engine does for one prompt: look up, load what is there, store what it computed."""
        assert self._store is not None
        store, clock = self._store, self.world.clock
        keys = [store.foreign_key(b"page/%d" % page) for page in call.pages]
        begun_s = clock.monotonic_s()
        hit = store.lookup(keys)
        looked_up_s = clock.monotonic_s()
        slot.note("lookup", looked_up_s - begun_s, hit.pages)
        room = [slot.view[at * self._page_bytes : (at + 1) * self._page_bytes] for at in range(_TOGETHER)]
        got = 0
        for first in range(0, hit.pages, _TOGETHER):
            some = keys[first : min(first + _TOGETHER, hit.pages)]
            got += self._get(some, room[: len(some)], hit)
        loaded_s = clock.monotonic_s()
        if got:
            slot.note("read", loaded_s - looked_up_s, got)
        put = 0
        for first in range(hit.pages, len(keys), _TOGETHER):
            some = keys[first : first + _TOGETHER]
            for index in range(len(some)):
                self.content.fill(room[index], "page", 0)
            put += _must(store.put(some, room[: len(some)]).result())
            with self._lock:
                self._made.update(some)
        if put:
            slot.note("write", clock.monotonic_s() - loaded_s, put)
        return got + put

    def proof(self) -> dict[str, Any]:
        if self._store is None:
            return {}
        stats = self._store.stats()
        whole = stats.direct and stats.fallbacks == 0
        if not self.job["direct"]:
            verdict = "buffered, as asked"
        elif not whole:
            verdict = f"{stats.fallbacks} objects moved otherwise"
        elif stats.page_cache_reads:
            verdict = f"{stats.page_cache_reads} objects lay in the page cache and were read from there"
        else:
            verdict = "every object moved with O_DIRECT"
        return {
            "direct": whole and not stats.page_cache_reads,
            "verdict": verdict,
            "reason": stats.direct_reason,
            "fallbacks": stats.fallbacks,
            "page_cache_reads": stats.page_cache_reads,
            "offset_alignment_bytes": stats.alignment_bytes,
            "engine": stats.engine,
            "engine_reason": stats.engine_reason,
            "objects_put": stats.puts,
            "objects_got": stats.gets,
            "lookups": stats.lookups,
            "lookup_pages": stats.lookup_pages,
            "get_misses": stats.get_misses,
            "put_failures": stats.put_failures,
        }

    def close(self, *, remove: bool) -> None:
        store, self._store = self._store, None
        if store is None:
            return
        try:
            if remove:
                store.delete(list(self._made))
        finally:
            store.close()


def _must(results: Sequence[int | Miss]) -> int:
    """The bytes of all pages. Raises CurvfsError when one is a miss."""
    moved = 0
    for result in results:
        if isinstance(result, Miss):
            raise CurvfsError(f"A page was a miss: {result.value}.")
        moved += result
    return moved
