"""The store: pages in and out, keyed by token prefix, verified on every read."""

from __future__ import annotations

import atexit
import builtins
import functools
import itertools
import logging
import os
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from types import TracebackType
from typing import TYPE_CHECKING, Any
from weakref import WeakSet

from curvfs import __version__
from curvfs.errors import CurvfsError, UsageError
from curvfs.metrics import Family
from curvfs.world import World
from kvstore.asking import Answer, Ask, Asker
from kvstore.backends.base import Backend, Found
from kvstore.capacity.chores import Chores
from kvstore.capacity.room import room_for
from kvstore.capacity.settings import Capacity
from kvstore.codecs import Zstd
from kvstore.completions import Completions
from kvstore.devices import Device, Devices
from kvstore.engine.base import Engine
from kvstore.errands import Errands
from kvstore.geometry import Geometry, Shard
from kvstore.header import OBJECT_SUFFIX, ObjectLayout
from kvstore.health.health import Health
from kvstore.health.probing import Prober
from kvstore.health.writers import Writers
from kvstore.inventory import Inventory, Listing, Usage
from kvstore.jobs import Jobs
from kvstore.keys import Extra, KeyChain, PageKey
from kvstore.known import KnownPages
from kvstore.metrics import OPEN, families
from kvstore.page import Form, Page
from kvstore.pageio import PageIO
from kvstore.reshard import Resharded, Resharder
from kvstore.results import UNFIT, Miss, miss_of
from kvstore.segments import PagePlan, plan_page
from kvstore.stats import Counters, Stats
from kvstore.tiers.memory import Memory
from kvstore.tiers.stats import BehindStats
from kvstore.transfer import Transfer
from kvstore.watch import Watch

if TYPE_CHECKING:
    from kvstore.tiers.behind import WriteBehind

logger = logging.getLogger("kvstore")

#: Pages asked for in the first round of a lookup; every further round asks for so many times as many. A round costs
#: several turns of the interpreter, which are long when another thread computes; an answer costs little.
_FIRST_ROUND = 64
_GROWTH = 8
_LAST_ROUND = 2048
#: What requests under way get when the interpreter ends.
_EXIT_S = 2.0
#: No wait is shorter than this for being compared with computing.
_SHORTEST_S = 0.02
#: A get that takes so many times as long as it should, and no less than this, is given up: its store has become slow
#: since the lookup, and its pages can be computed.
_OUTLASTED = 8.0
_PATIENCE_S = 0.25
_NOTHING: Mapping[str, Found] = {}


@dataclass(frozen=True, slots=True)
class Lookup:
    """What a lookup promises: the longest prefix whose every page was there a moment ago.

    Hand it to ``get`` with (some of) its ``keys``: where the store was asked for locations they are used again.
    """

    pages: int
    tokens: int
    keys: tuple[PageKey, ...]
    found: dict[str, Found] = field(default_factory=dict, repr=False)
    #: Stored pages behind these that would take longer to load than to compute, or whose worker does not answer.
    withheld_pages: int = 0
    #: How long it took: a ``get`` with it gets less time, so that both together take no longer than computing would.
    took_s: float = field(default=0.0, compare=False, repr=False)
    #: How long loading the pages should take; where the prefill rate is known a ``get`` does not wait for much longer.
    load_s: float | None = field(default=None, compare=False, repr=False)


class KVStore:
    """Pages of one identity and geometry in one place. Made by :func:`kvstore.open`; callable from any thread.

    Not usable in a forked child (open it there); a spawned child is fine.
    """

    def __init__(
        self,
        world: World,
        backend: Backend,
        engine: Engine,
        chain: KeyChain,
        geometry: Geometry,
        *,
        url: str,
        timeout_s: float,
        lookup_timeout_s: float,
        max_queued: int,
        staging_expiry_s: float,
        lease_s: float,
        engine_reason: str,
        reshard_from: Sequence[int],
        codec: Zstd | None,
        devices: Devices,
        capacity: Capacity,
        prefill_tokens_per_s: float | None,
        memory_bytes: int,
        write_behind_bytes: int,
    ) -> None:
        self._world = world
        self._url = url
        self._backend = backend
        self._engine = engine
        self._engine_reason = engine_reason
        self._devices = devices
        self._chain = chain
        self._timeout_s = timeout_s
        self._lookup_timeout_s = lookup_timeout_s
        self._sweep_every_s = min(staging_expiry_s, max(lease_s, 1.0))
        self._fingerprint = chain.fingerprint
        self._namespace = chain.identity.namespace()
        self._name_end = _name_end(geometry.shard)
        self._layout = ObjectLayout(geometry)
        writer = f"curvfs/{__version__} {world.net.hostname()}/{os.getpid()}"
        self._counters = Counters(world)
        self._resharder = Resharder(self._layout, reshard_from, self.object_name, most_bytes=self._layout.object_bytes)
        #: What a page in host memory is found as.
        self._in_memory = Found(self._layout.object_bytes)
        self._memory = Memory(world, size_bytes=memory_bytes, data_bytes=self._layout.data_bytes)
        writers = Writers(world, backend.targets, page_bytes=geometry.size_bytes, at_once=engine.depth)
        self._pages = PageIO(
            world,
            backend,
            engine,
            self._layout,
            self._counters,
            self._resharder,
            writer=writer,
            codec=codec,
            memory=self._memory,
            writers=writers,
        )
        self._known = KnownPages(world, lease_s=lease_s)
        self._room = room_for(
            world,
            backend,
            capacity,
            self._namespace,
            object_bytes=self._layout.object_bytes,
            lease_s=lease_s,
            on_deleted=self._known.forget,
        )
        self._chores = Chores(world, self._room)
        self._errands = Errands(world)
        self._health = Health(
            world,
            page_bytes=geometry.size_bytes,
            page_tokens=geometry.page_tokens,
            prefill_tokens_per_s=prefill_tokens_per_s,
            writers=writers,
        )
        self._prober = Prober(
            world,
            backend,
            self._health,
            self._pages.slabs,
            self._pages.outgoing,
            object_bytes=self._layout.object_bytes,
        )
        self._jobs = Jobs(
            world,
            backend,
            engine,
            self._pages,
            self._resharder,
            self._counters,
            self._room,
            self._health,
            self._prober,
            max_queued=max_queued,
        )
        self._behind: WriteBehind | None = None
        if write_behind_bytes:
            from kvstore.tiers.behind import WriteBehind

            self._behind = WriteBehind(
                world,
                self._jobs,
                self._pages.slabs_for(write_behind_bytes),
                header_bytes=self._layout.header_bytes,
                page_bytes=geometry.size_bytes,
                timeout_s=timeout_s,
                on_result=self._counters.put_done,
            )
        self._asker = Asker(world, self._jobs.confirm, self._health, ends_in_time=backend.ends_in_time)
        self._inventory = Inventory(backend, self._namespace)
        self._pid = os.getpid()
        self._lock = world.threads.lock()
        self._transfers: WeakSet[Transfer] = WeakSet()
        self._swept_s = world.clock.monotonic_s()
        self.geometry = geometry
        engine.submit(self._sweep_quietly, writing=True)
        self._chores.poke()
        OPEN.add(self)
        self._watch = Watch(world, self._described)
        self._at_exit = functools.partial(_close_at_exit, weakref.ref(self))
        if not world.threads.inline:
            atexit.register(self._at_exit)  # before the client's own end, which came first

    # ------------------------------------------------------------------------------------------------------- keys

    @property
    def page_tokens(self) -> int:
        return self.geometry.page_tokens

    def keys(self, tokens: Any, *, extras: Iterable[Extra] | None = None) -> builtins.list[PageKey]:
        """Keys of all full pages of a prompt; see :meth:`kvstore.keys.KeyChain.keys`."""
        return self._chain.keys(tokens, extras=extras)

    def foreign_key(self, key: bytes) -> PageKey:
        """The key of a page that an engine names by its own opaque bytes."""
        return self._chain.foreign(key)

    def object_name(self, key: PageKey, shard: Shard | None = None) -> str:
        """Where a page's object lies below the KV prefix: bounded, and telling nothing but that it exists."""
        digits = key.hex
        end = self._name_end if shard is None else _name_end(shard)
        return f"{self._namespace}/{digits[:2]}/{digits[2:4]}/{digits}{end}"

    def _names(self, keys: Sequence[PageKey]) -> builtins.list[str]:
        for key in keys:
            if key.fingerprint != self._fingerprint or len(key.digest) != self._chain.digest_bytes:
                raise UsageError(
                    f"Key {key.hex} was made for another identity or hash than this store's; make it with store.keys()."
                )
        return [self.object_name(key) for key in keys]

    # ----------------------------------------------------------------------------------------------------- asking

    def exists(self, keys: Sequence[PageKey], *, timeout_s: float | None = None) -> builtins.list[bool]:
        """For each key whether its object is there; False where that cannot be told within ``timeout_s`` (default: the
        store's ``lookup_timeout_s``). Raises UsageError."""
        self._guard()
        ask = self._asker.within(self._lookup_timeout_s if timeout_s is None else timeout_s)
        return [self._pages.plausible(found) for found in ask(self._names(keys))]

    def lookup(self, keys: Sequence[PageKey], *, every_shard: bool = False, timeout_s: float | None = None) -> Lookup:
        """The longest prefix of ``keys`` that is stored, every page of it confirmed now or less than a lease ago.

        ``every_shard``: a page counts only when the objects of all shards of this split are there, so that every rank
        gets the same answer. What the store has not told within ``timeout_s`` (default: its ``lookup_timeout_s``) is
        not promised. Raises UsageError.
        """
        self._guard()
        names = self._names(keys)
        started_s = self._world.clock.monotonic_s()
        ask = self._asker.within(self._worth_waiting_s(len(keys), self._lookup_timeout_s, timeout_s))
        own = self.geometry.shard
        shards = own.all() if every_shard else [own]
        promised: dict[str, Found] = {}
        pages, step = 0, _FIRST_ROUND
        while pages < len(keys):
            batch, asked = keys[pages : pages + step], names[pages : pages + step]
            for name, found in zip(asked, self._found(batch, asked, shards, ask, every_shard=every_shard), strict=True):
                if found is None:
                    step = 0
                    break
                promised[name] = found
                pages += 1
            if step == 0:
                break
            step = min(_GROWTH * step, _LAST_ROUND)
        worth, load_s = self._worth(promised)
        withheld, pages = pages - worth, worth
        if withheld:
            promised = {name: promised[name] for name in names[:pages]}
        took_s = self._world.clock.monotonic_s() - started_s
        self._counters.looked_up(pages, took_s)
        return Lookup(pages, pages * self.page_tokens, tuple(keys[:pages]), promised, withheld, took_s, load_s)

    def observe_prefill(self, tokens: int, seconds: float) -> None:
        """Tell that the model computed so many tokens in that time: lookups leave out what would take longer to load.
        Passed over where the store was opened with a rate. Raises UsageError."""
        self._health.observe_prefill(tokens, seconds)

    def _worth_waiting_s(
        self,
        pages: int,
        limit_s: float,
        timeout_s: float | None,
        *,
        waited_s: float = 0.0,
        load_s: float | None = None,
    ) -> float:
        """A deadline: as the caller has it, else the limit, but no longer than it takes to compute the pages, less what
        was waited already, nor than many times what loading them should take."""
        if timeout_s is not None:
            return timeout_s
        compute_s = self._health.compute_s(pages)
        if compute_s is None:
            return limit_s
        if load_s is not None:
            limit_s = min(limit_s, max(_OUTLASTED * load_s, _PATIENCE_S))
        return min(limit_s, max(compute_s - waited_s, _SHORTEST_S))

    def _worth(self, promised: Mapping[str, Found]) -> tuple[int, float | None]:
        """How many of these pages to promise, and how long loading them should take, where that may matter. Places that
        would be too slow are measured again in the background."""
        if not self._health.choosy:
            return len(promised), None
        places = [None if found is self._in_memory else self._backend.place(found) for found in promised.values()]
        worth = self._health.worth(places)
        left_out: dict[str, builtins.list[tuple[str, Found]]] = {}
        for place, item in itertools.islice(zip(places, promised.items(), strict=True), worth, None):
            if place is not None and not isinstance(item[1].located, Resharded):
                left_out.setdefault(place, []).append(item)
        for place, items in left_out.items():
            self._prober.measure(place, items)
        return worth, self._health.load_s(places[:worth])

    def _found(
        self, keys: Sequence[PageKey], names: Sequence[str], shards: Sequence[Shard], ask: Ask, *, every_shard: bool
    ) -> builtins.list[Found | None]:
        """For each key this shard's object (``names``), when those of all ``shards`` are there, else those of another
        split."""

        def recalled(names: Sequence[str]) -> builtins.list[Answer]:
            if not self._memory.on:
                return self._known.confirm(names, ask)
            answers: builtins.list[Answer] = [self._in_memory if name in self._memory else None for name in names]
            missing = [index for index, answer in enumerate(answers) if answer is None]
            asked = self._known.confirm([names[index] for index in missing], ask) if missing else []
            for index, answer in zip(missing, asked, strict=True):
                answers[index] = answer
            return answers

        own, width = shards.index(self.geometry.shard), len(shards)
        answers = recalled([self.object_name(key, shard) for key in keys for shard in shards] if width > 1 else names)
        found: builtins.list[Found | None] = []
        for index in range(len(keys)):
            there = answers[index * width : (index + 1) * width]
            mine = there[own]
            whole = isinstance(mine, Found) and self._pages.plausible(mine) and all(map(_is_file, there))
            found.append(mine if isinstance(mine, Found) and whole else None)
        missing = [index for index, one in enumerate(found) if one is None]
        if missing and self._resharder.splits:
            asked = [keys[index] for index in missing]
            others = self._resharder.resolve(asked, recalled, every_shard=every_shard)
            for index, other in zip(missing, others, strict=True):
                found[index] = other
        return found

    # -------------------------------------------------------------------------------------------------- transfers

    def put(self, keys: Sequence[PageKey], segments: Sequence[Any], *, timeout_s: float | None = None) -> Transfer:
        """Store pages; returns at once. ``segments[i]`` is the segment list of ``keys[i]`` (see kvstore.segments).

        The memory must stay as it is until the handle is done or its ``result`` has returned. A key that is stored
        already costs one question. With write-behind a result says that a page was copied, to be stored later, or
        ``Miss.BUSY``: dropped. Raises UsageError before any byte moves.
        """
        transfer, pages = self._begin(keys, self._plans(keys, segments, writable=False), timeout_s, Form.PUT)
        (self._jobs if self._behind is None else self._behind).put(pages)
        self._housekeep()
        return transfer

    def get(
        self,
        keys: Sequence[PageKey],
        segments: Sequence[Any],
        *,
        lookup: Lookup | None = None,
        loan: bool = False,
        layerwise: bool = False,
        timeout_s: float | None = None,
    ) -> Transfer:
        """Load pages into the callers' memory; returns at once. ``lookup`` spares asking again.

        Each page is read into a buffer of the store, verified, and only then copied: memory of a page that is a miss
        is untouched. Two forms give that up:

        ``loan``: read straight into the memory given, where it is contiguous and aligned. It stays on loan while
        ``transfer.lent`` is not 0, also after a deadline, and is undefined where the result is a miss.

        ``layerwise``: verified and copied layer by layer, the first ones of all pages first; ``transfer.layer(i)``
        waits for one. A page that turns out to be a miss may have got some layers. Raises UsageError before any byte
        moves.
        """
        if loan and layerwise:
            raise UsageError("loan and layerwise exclude each other; ask for one of them.")
        form = Form.LOAN if loan else Form.LAYERS if layerwise else Form.COPY
        return self._get(keys, self._plans(keys, segments, writable=True), lookup, timeout_s, form)

    def get_view(
        self, keys: Sequence[PageKey], *, lookup: Lookup | None = None, timeout_s: float | None = None
    ) -> Transfer:
        """Load pages into buffers of the store; returns at once. ``transfer.views[i]`` is the page, once it has its
        result: verified, read-only, and to be released. At most ``depth`` views
        can be out; more are ``Miss.BUSY``. Raises UsageError."""
        return self._get(keys, [PagePlan(self._world.clock) for _ in keys], lookup, timeout_s, Form.VIEW)

    def flush(self, timeout_s: float | None = None) -> bool:
        """Wait, at most ``timeout_s`` (default: the store's), until what write-behind accepted is stored or has failed;
        False when it was not in time. Raises UsageError."""
        self._guard()
        return self._behind is None or self._behind.flush(self._timeout_s if timeout_s is None else timeout_s)

    def completions(self) -> Completions:
        """A queue of finished transfers with a file descriptor to poll."""
        return Completions(self._world)

    def _get(
        self,
        keys: Sequence[PageKey],
        plans: Sequence[PagePlan],
        lookup: Lookup | None,
        timeout_s: float | None,
        form: Form,
    ) -> Transfer:
        promised = {} if lookup is None else lookup.found
        if lookup is not None:
            timeout_s = self._worth_waiting_s(
                len(keys), self._timeout_s, timeout_s, waited_s=lookup.took_s, load_s=lookup.load_s
            )
        transfer, pages = self._begin(keys, plans, timeout_s, form, promised)
        for page in pages:
            page.found = promised.get(page.name)
        self._room.touch([page.name for page in pages])
        self._jobs.get(pages)
        self._chores.poke()
        return transfer

    def _plans(self, keys: Sequence[PageKey], segments: Sequence[Any], *, writable: bool) -> builtins.list[PagePlan]:
        """The callers' memory, checked."""
        self._guard()
        if len(keys) != len(segments):
            raise UsageError(f"{len(keys)} keys came with {len(segments)} segment lists; pass one list for each key.")
        where: dict[str, Any] = {"writable": writable, "clock": self._world.clock, "devices": self._devices}
        plans = [plan_page(pieces, self._layout, **where) for pieces in segments]
        marked: dict[Device, builtins.list[PagePlan]] = {}
        for plan in plans:
            if plan.device is not None:
                marked.setdefault(plan.device, []).append(plan)
        for device, pages in marked.items():
            mark = device.mark()
            for plan in pages:
                plan.marked(mark)
        return plans

    def _begin(
        self,
        keys: Sequence[PageKey],
        plans: Sequence[PagePlan],
        timeout_s: float | None,
        form: Form,
        promised: Mapping[str, Found] = _NOTHING,
    ) -> tuple[Transfer, builtins.list[Page]]:
        """Book in as many pages as there is room for."""
        self._guard()
        names = self._names(keys)
        storing = form is Form.PUT
        clock, counted = self._world.clock, self._counters.put_done if storing else self._counters.get_done
        if storing and self._behind is not None:
            counted = self._counters.put_accepted
        started_s = clock.monotonic_s()
        transfer = Transfer(
            self._world,
            len(keys),
            timeout_s=self._timeout_s if timeout_s is None else timeout_s,
            on_result=lambda result, error: counted(result, error, clock.monotonic_s() - started_s),
            on_miss=None if storing else lambda index, miss: self._forget(names[index], promised, miss),
            layers=self._pages.loader.layers if form is Form.LAYERS else 0,
        )
        admitted = self._jobs.admit(len(keys))
        with self._lock:
            self._transfers.add(transfer)
        for index in range(admitted, len(keys)):
            transfer.settle(index, Miss.BUSY)
        return transfer, [
            Page(transfer, index, keys[index], names[index], plans[index], form) for index in range(admitted)
        ]

    def _forget(self, name: str, promised: Mapping[str, Found], miss: Miss) -> None:
        """A page was not delivered: what was known of it is asked for again, or not believed for a while."""
        if miss in UNFIT:
            self._known.refuse(name)
        else:
            self._known.forget(name)
        found = promised.get(name)
        if found is not None and isinstance(found.located, Resharded):
            for source in found.located.sources:
                self._known.forget(source.name)

    # ------------------------------------------------------------------------------------------------ housekeeping

    def delete(self, keys: Sequence[PageKey], *, timeout_s: float | None = None) -> builtins.list[bool | Miss]:
        """Remove this shard's objects at once: True where one was removed, False where none was; ``Miss.DEADLINE``
        where that is not known within ``timeout_s`` (default: the store's). Raises UsageError."""
        return self._remove(keys, self._backend.delete, timeout_s, to_trash=False)

    def evict(self, keys: Sequence[PageKey], *, timeout_s: float | None = None) -> builtins.list[bool | Miss]:
        """Move this shard's objects to the trash, from where a ``get`` whose ``lookup`` promised them within the lease
        still gets them: True where one was moved, False where none was; ``Miss.DEADLINE`` as above. Raises
        UsageError."""
        return self._remove(keys, self._backend.evict, timeout_s, to_trash=True)

    def forget(self, keys: Sequence[PageKey]) -> None:
        """Do not repeat what a lookup found of these less than a lease ago: the next one asks. A ``get`` of this store
        that misses does so itself. Raises UsageError."""
        for name in self._names(keys):
            self._known.forget(name)

    def _remove(
        self,
        keys: Sequence[PageKey],
        remove: Callable[[str], bool | None],
        timeout_s: float | None,
        *,
        to_trash: bool,
    ) -> builtins.list[bool | Miss]:
        self._guard()
        names = self._names(keys)
        for name in names:
            self._known.forget(name)
            self._memory.forget(name)

        def one(name: str) -> bool | Miss:
            try:
                self._room.removing()
                removed = remove(name)
            except CurvfsError as error:
                return miss_of(error, storing=True)
            except Exception:
                logger.exception("kvstore failed to remove %s.", name)
                return Miss.IO
            if removed:
                self._room.removed(name, to_trash=to_trash)
            elif removed is None:
                self._room.cleared(0)
            return removed is not False

        limit_s = self._timeout_s if timeout_s is None else timeout_s
        return self._errands.each(one, names, timeout_s=limit_s, late=Miss.DEADLINE)

    def clear(self) -> int:
        """Remove every object of this model and tenant at once, whatever its revision, geometry and shard; how many.
        Raises UsageError, CurvfsError."""
        self._guard()
        self._known.clear()
        self._memory.clear()
        self._room.removing()
        count, size_bytes = self._inventory.clear()
        self._room.cleared(size_bytes)
        self._chores.poke()
        return count

    def list(self, cursor: str = "", limit: int = 1000) -> Listing:
        """Objects of this model and tenant, of every revision, geometry and shard, in order of their names. Go on with
        ``listing.cursor`` until it is empty. Raises UsageError, CurvfsError."""
        self._guard()
        if limit < 1:
            raise UsageError(f"A list of {limit} objects is none; give a limit of at least 1.")
        return self._inventory.list(cursor, limit)

    def usage(self) -> Usage:
        """What is there, counted in the store itself. Raises UsageError, CurvfsError."""
        self._guard()
        return self._inventory.usage()

    def locate(self, keys: Sequence[PageKey]) -> dict[str, int]:
        """For each host how many pages of the stored prefix of ``keys`` lie on it, most first: a hint where a request
        runs best. Empty on a directory, which does not tell. Raises UsageError."""
        hit = self.lookup(keys)
        held: Counter[str] = Counter()
        for found in hit.found.values():
            parts = [source.found for source in found.located.sources] if _is_resharded(found) else [found]
            for host in {host for part in parts for host in self._backend.hosts(part)}:
                held[host] += 1
        return dict(held.most_common())

    def sweep(self) -> int:
        """Remove what dead writers left in staging, and the trash that nobody was promised any more; how many staging
        directories went. Raises CurvfsError."""
        self._guard()
        return self._sweep()

    def _sweep(self) -> int:
        count = self._backend.sweep()
        self._counters.swept_some(count)
        self._backend.empty_trash()
        return count

    def _housekeep(self) -> None:
        """From time to time, sweep in an I/O thread."""
        self._chores.poke()
        now_s = self._world.clock.monotonic_s()
        if now_s - self._swept_s >= self._sweep_every_s:
            self._swept_s = now_s
            try:
                self._engine.submit(self._sweep_quietly, writing=True)
            except CurvfsError:  # closed meanwhile
                pass

    def _sweep_quietly(self) -> None:
        try:
            if not self._jobs.closed:
                self._sweep()
        except CurvfsError as error:
            logger.warning("kvstore could not sweep its staging directories: %s", error)

    def stats(self) -> Stats:
        """Counters and the effective mode, at this moment."""
        counters, mode, slabs = self._counters, self._backend.mode, self._pages.slabs
        return Stats(
            backend=self._backend.name,
            direct=mode.direct,
            direct_reason=mode.reason,
            alignment_bytes=mode.alignment_bytes,
            fallbacks=self._backend.fallbacks,
            page_cache_reads=self._backend.page_cache_reads,
            engine=self._engine.name,
            engine_reason=self._engine_reason,
            depth=self._engine.depth,
            slab_bytes=slabs.size_bytes,
            slabs_in_use=self._pages.slabs_in_use,
            in_flight=self._jobs.in_flight,
            puts=counters.puts,
            puts_existing=counters.puts_existing,
            put_bytes=counters.put_bytes,
            put_failures=dict(counters.put_failures),
            failing_puts=counters.failing_puts,
            gets=counters.gets,
            get_bytes=counters.get_bytes,
            get_misses=dict(counters.get_misses),
            lookups=counters.lookups,
            lookup_pages=counters.lookup_pages,
            swept=counters.swept,
            evicted=counters.evictions,
            resharded=counters.resharded,
            loans_copied=counters.loans_copied,
            views_out=self._pages.loader.views_out,
            read_again=counters.sound_again,
            quarantined=counters.quarantined,
            last_error=counters.last_error,
            latencies={name: histogram.summary() for name, histogram in counters.latencies().items()},
            capacity=self._room.stats(),
            health=self._health.stats(),
            memory=self._memory.stats(),
            behind=BehindStats() if self._behind is None else self._behind.stats(),
        )

    def metrics(self) -> builtins.list[Family]:
        """The same for Prometheus; :mod:`kvstore.metrics` shows all stores of a process."""
        labels = {"store": self._namespace, "backend": self._backend.name, "shard": self.geometry.shard.label}
        return families(self.stats(), self._counters.latencies(), labels)

    def _described(self) -> dict[str, Any]:
        """What the record of this process says of the store."""
        identity = self._chain.identity
        return {
            "url": self._url,
            "model": identity.model,
            "namespace": self._namespace,
            "fingerprint": self._fingerprint.hex(),
            "identity": {name: value for name, value in asdict(identity).items() if name != "salt"},
            "salted": bool(identity.salt),
            "chain_hash": self._chain.chain_hash,
            "shard": self.geometry.shard.label,
            "stats": asdict(self.stats()),
            "slow_calls": self._counters.slow_calls(),
        }

    def _guard(self) -> None:
        if self._pid != os.getpid():
            raise UsageError("This store was opened before a fork and cannot be used in the child; open it again here.")
        if self._jobs.closed:
            raise UsageError("The store is closed; open it again.")

    def close(self, timeout_s: float = 5.0) -> bool:
        """Give up what has not begun, wait at most ``timeout_s`` for what has, and remove our staging directory.

        Idempotent. False when the storage still held a thread then; that thread ends with the process.
        """
        if self._jobs.closed or self._pid != os.getpid():
            return True
        if self._behind is not None:
            self._behind.flush(0.8 * timeout_s)
            self._behind.close()
        self._jobs.closed = True
        atexit.unregister(self._at_exit)
        self._watch.close()
        OPEN.discard(self)
        until_s = self._world.clock.monotonic_s() + timeout_s
        clean = self._engine.close(timeout_s)
        with self._lock:
            transfers = list(self._transfers)
        for transfer in transfers:
            transfer.cancel()
        clean &= self._chores.close(max(0.1, until_s - self._world.clock.monotonic_s()))
        closing = self._world.threads.start(self._say_goodbye, name="kvstore-close")
        closing.join(max(0.1, until_s - self._world.clock.monotonic_s()))
        self._asker.close()
        self._prober.close()
        self._errands.close()
        self._pages.close()
        return clean and not closing.is_alive()

    def _say_goodbye(self) -> None:
        try:
            self._room.close()
        except CurvfsError as error:
            logger.warning("kvstore could not tell the store what it used last: %s", error)
        self._backend.close()

    def __enter__(self) -> KVStore:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _close_at_exit(store: weakref.ref[KVStore]) -> None:
    """The interpreter ends: what has begun gets a moment."""
    open_store = store()
    if open_store is not None:
        open_store.close(_EXIT_S)


def _name_end(shard: Shard) -> str:
    return f"-{shard.label}{OBJECT_SUFFIX}" if shard.label else OBJECT_SUFFIX


def _is_resharded(found: Found) -> bool:
    return isinstance(found.located, Resharded)


def _is_file(found: Found | CurvfsError | None) -> bool:
    return isinstance(found, Found) and found.length_bytes > 0
