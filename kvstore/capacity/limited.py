"""Room within limits: what is used is known, what does not fit is evicted for, or refused.

Two locks. ``_lock`` guards the books and is never held while the store is asked for something. ``_admitting`` lets one
put at a time look for room, so that the order of evictions is that of the puts; whoever waits for it has a deadline.
"""

from __future__ import annotations

import logging
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence

from curvfs.errors import CurvfsError
from curvfs.units import format_size
from curvfs.world import World
from kvstore.backends.base import Backend
from kvstore.backends.staging import HEARTBEAT_S
from kvstore.capacity.index import NEWS_S, Index, Resident
from kvstore.capacity.ledger import Ledger
from kvstore.capacity.room import CapacityStats, Room
from kvstore.capacity.settings import Capacity
from kvstore.page import Page
from kvstore.results import Miss, Refused

logger = logging.getLogger("kvstore")

#: Objects evicted in one go in the background, before it is looked again whether that is enough.
_BATCH = 32
#: Objects admitted and not stored yet, at most, where they are more than a chunk. More could not be evicted for others.
_PENDING = 32
#: Failures in a row after which a round of evictions ends.
_FAILURES = 8
#: The pool is counted anew when others put this part of the quota, and at most this part of the time.
_OTHERS_PART = 8
_COUNTING_PART = 20
#: What the pool has free, and what others did, is asked for again after so long when room is short.
_FRESH_S = 1.0
#: Evictions that are remembered for puts under way.
_REMEMBERED = 1 << 14
#: A store's clock that moves by more than this against ours has been set.
_STEP_S = 60.0


class LimitedRoom(Room):
    """``on_deleted(name)`` is called for objects that are gone at once, not by way of the trash. ``writes``: puts may
    come; else it evicts only."""

    def __init__(
        self,
        world: World,
        backend: Backend,
        settings: Capacity,
        namespace: str,
        *,
        object_bytes: int,
        lease_s: float,
        on_deleted: Callable[[str], None],
        writes: bool = True,
    ) -> None:
        super().__init__(world, backend, flush_s=settings.flush_s)
        self._clock = world.clock
        self._backend = backend
        self._settings = settings
        self._namespace = namespace
        self._lease_s = lease_s
        self._on_deleted = on_deleted
        self._chunk_bytes = settings.chunk_bytes(object_bytes)
        self._most_pending_bytes = max(self._chunk_bytes, _PENDING * object_bytes)
        self._ledger = Ledger(world, backend, namespace, chunk_bytes=self._chunk_bytes if writes else 0)
        self._ledger.evicts = settings.evictor == "inside"
        self._lock = world.threads.lock()
        self._admitting = world.threads.lock()
        self._tidying = world.threads.lock()
        self._index = Index()
        self._objects_bytes = self._trash_bytes = self._staged_bytes = self._free_bytes = 0
        self._counted = world.threads.event()
        self._count_error: CurvfsError | None = None
        self._counted_s = self._tried_s = self._freed_s = self._told_s = -1e9
        self._trashed_bytes = 0
        self._recount = True
        self._missing = 0
        self._count_took_s = 0.0
        self._alone = False
        self._others = self._trashed_by_others = 0
        #: Staging directories of the dead that are not empty.
        self._left_behind: set[str] = set()
        self._evictions: OrderedDict[str, int] = OrderedDict()
        self._moment = 0
        #: What we deleted that the place may not show as free yet: when, and how much.
        self._deletions: deque[tuple[float, int]] = deque()
        self._stopped = False
        self._offset_s: float | None = None
        self._no_ttl_before_s = 0.0
        self.evicted = self.evicted_bytes = self.expired = self.refused = self.counts = 0

    # ------------------------------------------------------------------------------------------------- what is used

    @property
    def _used_bytes(self) -> int:
        return self._objects_bytes + self._trash_bytes + self._staged_bytes + self._ledger.others_bytes

    def touch(self, names: Sequence[str]) -> None:
        now_s = self._now.now_s()
        with self._lock:
            for name in names:
                self._index.touch(name, now_s)
        self._accesses.note(names, now_s)

    def gone(self, name: str) -> None:
        """Somebody else took it, which their record tells, or the next count."""
        with self._lock:
            known = self._index.get(name)
            if known is None or known.pending:
                return
            self._index.pop(name)
            self._recount |= self._alone  # nobody is there who would write it down

    def moment(self) -> int:
        return self._moment

    def still_there(self, name: str, moment: int) -> bool:
        with self._lock:
            if self._evictions.get(name, 0) > moment:
                return False
        self.touch([name])
        return True

    # ---------------------------------------------------------------------------------------------------- room for one

    def admit(self, page: Page, size_bytes: int) -> bool:
        quota = self._settings.quota_bytes
        if quota is not None and size_bytes > quota:
            self._refuse(f"{page.name} takes {format_size(size_bytes)}, more than the quota of {format_size(quota)}.")
        if not self._counted.is_set():
            self._counted.wait(max(0.0, page.transfer.left_s()))
        if not self._admitting.acquire(timeout=max(0.0, page.transfer.left_s())):
            raise Refused(Miss.DEADLINE, f"No room was found for {page.name} in time.")
        try:
            if self._count_error is not None:
                raise self._count_error
            if self._ledger.pending_bytes >= self._most_pending_bytes or not self._make_room(page, size_bytes):
                return False
            with self._lock:
                self._ledger.spent_bytes += size_bytes
                self._objects_bytes += size_bytes
                self._free_bytes -= size_bytes
                self._ledger.pending_bytes += size_bytes
                self._index.add(page.name, size_bytes, self._now.now_s(), pending=True)
            page.reserved_bytes = size_bytes
            return True
        finally:
            self._admitting.release()

    def _refuse(self, why: str) -> None:
        with self._lock:
            self.refused += 1
        raise Refused(Miss.NO_SPACE, why)

    def _make_room(self, page: Page, size_bytes: int) -> bool:
        """Until an object of this size fits, or there is no way. False: there is none yet."""
        if self._ledger.left_bytes < size_bytes:
            self._exchange()
        failures = 0
        while self._lacks(size_bytes):
            if page.transfer.left_s() <= 0:
                raise Refused(Miss.DEADLINE, f"No room was found for {page.name} in time.")
            if self._is_old(self._told_s) and (not self._alone or self._settings.evictor == "off"):
                self._exchange()
            elif self._trash_bytes > 0 and self._yield_trash():
                pass
            elif self._settings.evictor == "off" or failures > _FAILURES or self._missing > _FAILURES:
                self._recount |= self._missing > _FAILURES
                if self._unsure:
                    self.on_due()
                self._refuse(self._why(page, size_bytes))
            else:
                with self._lock:
                    if self._index.oldest_is_pending():
                        return False
                victims = self._victims(1)
                if not victims:
                    failures = _FAILURES + 1
                    # Who has ended may have left more behind in our sums than in the pool.
                    self._recount |= not self._alone or self._ledger.others_bytes > 0
                for name, entry in victims:
                    failures = 0 if self._evict(name, entry, at_once=True) else failures + 1
        return True

    def _why(self, page: Page, size_bytes: int) -> str:
        settings = self._settings
        used = f"{settings.describe()} has {format_size(max(0, self._used_bytes))} in use"
        free = f", the pool {format_size(max(0, self._free_bytes))} free" if settings.min_free_bytes else ""
        return f"{page.name} takes {format_size(size_bytes)}; {used}{free}, and nothing could be evicted for it."

    def _lacks(self, size_bytes: int) -> bool:
        """Is there too little room for so many bytes?"""
        quota, floor = self._settings.quota_bytes, self._settings.min_free_bytes
        if quota is not None and self._used_bytes + size_bytes > quota:
            return True
        if not floor:
            return False
        if self._is_old(self._freed_s) or self._free_bytes - size_bytes < floor:
            self._ask_free()
        return self._free_bytes - size_bytes < floor

    def _is_old(self, when_s: float) -> bool:
        return self._clock.monotonic_s() - when_s > _FRESH_S

    def _ask_free(self) -> None:
        self._freed_s = self._clock.monotonic_s()
        late_s = self._freed_s - self._backend.frees_after_s
        with self._lock:
            while self._deletions and self._deletions[0][0] < late_s:
                self._deletions.popleft()
        late_bytes = sum(size for _, size in list(self._deletions))
        self._free_bytes = self._backend.free_bytes() + late_bytes - self._ledger.pending_bytes

    def _yield_trash(self) -> bool:
        """The oldest trash goes early: of this namespace, or of all where the pool itself is full."""
        floor = self._settings.min_free_bytes
        everybodys = floor > 0 and self._free_bytes < floor
        removed = self._backend.empty_trash(early=True, namespace="" if everybodys else self._namespace)
        self._measure_trash()
        return removed > 0

    def published(self, page: Page, size_bytes: int) -> None:
        with self._lock:
            saved = self._index.published(page.name, size_bytes, self._now.now_s())
            self._objects_bytes -= saved
            self._ledger.spent_bytes -= saved
            self._ledger.pending_bytes -= page.reserved_bytes
        page.reserved_bytes = 0
        if self._ledger.pending_bytes == 0 and self._ledger.said_pending_bytes:
            self._say()  # should we be killed now, nobody takes it for under way
        if self._above(self._settings.high):
            self.on_due()

    def withdraw(self, page: Page) -> None:
        size_bytes, page.reserved_bytes = page.reserved_bytes, 0
        if not size_bytes:
            return
        with self._lock:
            entry = self._index.get(page.name)
            if entry is not None and entry.pending:
                self._index.pop(page.name)
            self._ledger.spent_bytes -= size_bytes
            self._objects_bytes -= size_bytes
            self._free_bytes += size_bytes
            self._ledger.pending_bytes -= size_bytes

    def doubt(self, page: Page) -> None:
        self.published(page, page.reserved_bytes)
        with self._lock:
            self._recount = True

    def removing(self) -> None:
        if self._ledger.silent or not self._ledger.evicts:
            self._ledger.evicts = True
            self._ledger.say()

    def removed(self, name: str, *, to_trash: bool) -> None:
        with self._lock:
            entry = self._index.pop(name)
            if entry is not None:
                self._count_out(entry, to_trash=to_trash)

    def _count_out(self, entry: Resident, *, to_trash: bool) -> None:
        """We took it away."""
        self._objects_bytes -= entry.size_bytes
        self._ledger.freed_bytes += entry.size_bytes
        if to_trash:
            self._trash_bytes += entry.size_bytes
            self._trashed_bytes += entry.size_bytes
        else:
            self._free_bytes += entry.size_bytes
            if self._backend.frees_after_s:
                self._deletions.append((self._clock.monotonic_s(), entry.size_bytes))

    def cleared(self, size_bytes: int) -> None:
        with self._lock:
            self._ledger.freed_bytes += size_bytes
            self._recount = True
            self._tried_s = -1e9

    # -------------------------------------------------------------------------------------------------------- eviction

    def _victims(self, number: int) -> list[tuple[str, Resident]]:
        """Those used longest ago, by anybody."""
        with self._lock:
            oldest = self._index.pop_oldest(number)
        if self._alone or not oldest:
            return oldest
        try:
            used_s = self._backend.accessed_s([name for name, _ in oldest])
        except CurvfsError:
            return oldest
        victims = []
        for (name, entry), when_s in zip(oldest, used_s, strict=True):
            if when_s is not None and when_s > entry.used_s + NEWS_S:
                entry.used_s = when_s
                with self._lock:
                    self._index.put_back(name, entry)
            else:
                victims.append((name, entry))
        return victims or self._victims(number)

    def _evict(self, name: str, entry: Resident, *, at_once: bool) -> bool:
        """Take one object away; False when the store failed to."""
        at_once = at_once or self._lease_s == 0
        try:
            self.removing()
            done = self._backend.delete(name) if at_once else self._backend.evict(name)
        except CurvfsError as error:
            logger.warning("kvstore could not evict %s: %s", name, error)
            with self._lock:
                self._index.put_back(name, entry)
            return False
        with self._lock:
            self._moment += 1
            self._evictions[name] = self._moment
            self._index.resolved(name)
            while len(self._evictions) > _REMEMBERED:
                self._evictions.popitem(last=False)
            if done:
                self._count_out(entry, to_trash=not at_once)
                self._missing = 0
                self.evicted += 1
                self.evicted_bytes += entry.size_bytes
            else:  # its evictor's record tells, unless somebody removed it who keeps none, or it was us after all
                self._missing += 1
                self._recount |= self._alone or done is None
        if at_once:
            self._on_deleted(name)
        if self._ledger.unsaid_bytes >= self._chunk_bytes and not self._alone:
            self._say()
        return True

    def _say(self) -> None:
        try:
            self._ledger.say()
        except CurvfsError as error:
            logger.warning("kvstore could not write down what it evicted: %s", error)

    @property
    def _resting_bytes(self) -> int:
        """What is used, without what goes by itself."""
        return self._used_bytes - self._trash_bytes

    def _above(self, mark: float) -> bool:
        quota = self._settings.quota_bytes
        return bool(quota) and self._resting_bytes > (quota or 0) * mark  # 0: nothing is put, and nothing evicted

    def _round(self) -> None:
        """From above the high watermark to the low one, and until the pool has its free room."""
        settings = self._settings
        if settings.evictor == "off":
            return
        if self._above(settings.high):
            self._evict_while(lambda: self._above(settings.low), at_once=False)
        if settings.min_free_bytes and self._lacks_free():
            while self._lacks_free() and self._yield_trash():
                pass
            self._evict_while(self._lacks_free, at_once=True)

    def _lacks_free(self) -> bool:
        self._ask_free()
        return self._free_bytes < self._settings.min_free_bytes

    def _evict_while(self, needed: Callable[[], bool], *, at_once: bool) -> None:
        """Evict what was used longest ago, as long as that is needed."""
        failures = 0
        while needed() and failures <= _FAILURES and not self._stopped:
            victims = self._victims(_BATCH)
            if not victims:
                return
            for position, (name, entry) in enumerate(victims):
                if self._stopped or not needed():
                    self._spare(victims[position:])
                    return
                failures = 0 if self._evict(name, entry, at_once=at_once) else failures + 1
            if self._missing > _FAILURES:
                self._recount = True
                return
            if not self._alone:
                self._exchange()

    def _spare(self, victims: Sequence[tuple[str, Resident]]) -> None:
        """These stay after all, in their old places."""
        with self._lock:
            for name, entry in reversed(victims):
                self._index.put_first(name, entry)

    def _expire(self) -> None:
        """What is older than the time to live goes. A store whose clock was set keeps it for one such time more."""
        ttl_s = self._settings.ttl_s
        if ttl_s is None or self._settings.evictor == "off":
            return
        now_s = self._now.now_s()
        offset_s = now_s - self._clock.monotonic_s()
        if self._offset_s is not None and abs(offset_s - self._offset_s) > _STEP_S:
            self._no_ttl_before_s = self._clock.monotonic_s() + ttl_s
        self._offset_s = offset_s
        if self._clock.monotonic_s() < self._no_ttl_before_s:
            return
        with self._lock:
            old = self._index.pop_written_before(now_s - ttl_s)
        for position, (name, entry) in enumerate(old):
            if self._stopped:
                self._spare(old[position:])
                return
            if self._evict(name, entry, at_once=False):
                self.expired += 1

    # ---------------------------------------------------------------------------------------------------- housekeeping

    def _measure_trash(self) -> None:
        """Look what is in the trash; what goes there meanwhile may count twice, not never."""
        before_bytes = self._trashed_bytes
        found_bytes = self._backend.trash_bytes(self._namespace)
        with self._lock:
            self._trash_bytes = found_bytes + self._trashed_bytes - before_bytes

    def _exchange(self) -> None:
        """Say what we have, hear what the others have. Raises CurvfsError."""
        if self._settings.quota_bytes is None:
            return
        self._ledger.exchange()
        self._alone &= self._ledger.living == 0
        freed_bytes = self._ledger.others_freed_bytes
        if freed_bytes != self._trashed_by_others:  # what they took away may have gone to the trash
            self._measure_trash()
            self._trashed_by_others = freed_bytes
        self._told_s = self._clock.monotonic_s()

    def _look(self) -> None:
        """Who else is there, and what do the dead leave lying about? Raises CurvfsError."""
        staging = self._backend.staging
        others, dead_bytes, left_behind = 0, 0, set()
        dead = self._ledger.dead_places
        for directory in staging.others():
            if directory.silent_s > 2 * HEARTBEAT_S or directory.name in dead:
                dead_bytes += directory.length_bytes
                if directory.length_bytes:
                    left_behind.add(directory.name)
            else:
                others += 1
        self._staged_bytes, self._left_behind = dead_bytes, left_behind
        self._measure_trash()
        self._others = others
        self._alone = others == 0 and self._ledger.living == 0

    def count(self) -> None:
        """Count what is in the pool. Puts wait for the first time. Raises CurvfsError."""
        try:
            self._count()
        except CurvfsError as error:
            with self._lock:
                self._index.drop_count()
            if not self._counted.is_set() or self._count_error is not None:
                self._count_error = error
            raise
        else:
            self._count_error = None
        finally:
            self._counted.set()

    def _count(self) -> None:
        self._tried_s = self._clock.monotonic_s()
        before = self._ledger.begin_count()
        self._look()
        with self._lock:
            self._index.begin_count()
        found = []
        for entry in self._backend.walk(self._namespace):
            if self._stopped:
                raise CurvfsError("The store is being closed.")
            found.append(entry)
        self._measure_trash()  # after the walk: what went there meanwhile was not found by it
        self._ledger.end_count(before)
        with self._lock:
            self._objects_bytes = self._index.end_count(found)
        self._counted_s = self._clock.monotonic_s()
        self._count_took_s = self._counted_s - self._tried_s
        self._recount, self._missing = False, 0
        self.counts += 1

    @property
    def due(self) -> bool:
        above = self._settings.evictor == "inside" and self._above(self._settings.high)
        return super().due or above or (self._unsure and self._is_old(self._tried_s))

    @property
    def _unsure(self) -> bool:
        """Is the pool to be counted anew?"""
        return self._recount or self._ledger.stale

    def tidy(self) -> None:
        if self._stopped or not self._tidying.acquire(blocking=False):
            return
        try:
            self._now.look()
            if self._accesses.due:
                self._accesses.flush()
                self._look()
                self._exchange()
                self._ledger.remove_old(self._left_behind)
                self._backend.empty_trash()
                self._measure_trash()
            if self._unsure or (not self._alone and self._is_outdated()):
                self.count()
            self._expire()
            self._round()
        finally:
            self._tidying.release()

    def _is_outdated(self) -> bool:
        """Have others put so much that our order of use says little? What they put is not in it before we count."""
        since_s = self._clock.monotonic_s() - self._counted_s
        quota = self._settings.quota_bytes
        much = quota is not None and self._ledger.others_spent_bytes * _OTHERS_PART > quota
        return since_s > self._settings.rescan_s or (much and since_s > _COUNTING_PART * self._count_took_s + _FRESH_S)

    def stop(self) -> None:
        self._stopped = True

    def close(self) -> None:
        self._accesses.flush()
        if self._settings.quota_bytes is not None:
            self._ledger.say(closed=True)

    def stats(self) -> CapacityStats:
        settings = self._settings
        with self._lock:
            return CapacityStats(
                counted=self._counted.is_set() and self._count_error is None,
                quota_bytes=settings.quota_bytes,
                used_bytes=self._used_bytes,
                trash_bytes=self._trash_bytes,
                staged_bytes=self._staged_bytes,
                others_bytes=self._ledger.others_bytes,
                objects=len(self._index),
                chunk_bytes=self._chunk_bytes,
                processes=self._others,
                writers=self._ledger.living,
                free_bytes=self._free_bytes,
                min_free_bytes=settings.min_free_bytes,
                evicted=self.evicted,
                evicted_bytes=self.evicted_bytes,
                expired=self.expired,
                refused=self.refused,
                counts=self.counts,
                accesses_flushed=self._accesses.flushed,
                accesses_dropped=self._accesses.dropped,
            )
