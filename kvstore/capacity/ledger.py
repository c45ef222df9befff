"""Who has put how much into a namespace: small records in the pool, so that writers on many hosts keep one quota.

::

    .quota/<namespace>/<writer>.<number>.<spent>.<freed>.<pending>.<chunk>.<flags>      an empty file

Every writer counts the bytes that it put (``spent``: reserved before they are staged; ``pending`` of them have no name
yet) and that it took away (``freed``), since its record began. It may spend one *chunk* more than its last record says.
Before it spends more than that it writes the next record, then reads everybody's, and goes on only while the sum fits
the quota:

1. The record comes before the reading, so of two writers that do this at once at least one sees the other.
2. So when a record was let pass, all records let pass before it were in the sum: what is in the pool exceeds the quota
   by at most what no record tells yet, one chunk for each living writer.
3. A writer counts its own bytes exactly, and others' as their records say. One that falls silent for
   :data:`SILENT_S` counts with its whole chunk until the pool is counted anew.

Silence is proven by watching: the newest record of a writer is the same for so long on our own clock, between two
listings. Only who was silent in this way before a count began has all its bytes in that count. The store's clock, which
somebody may set, is a second witness, believed where that makes us count more: who is silent by it alone counts with
its chunk, too, and from the next count on with what was pending, until the proof and one more count.

What others had put before we counted the pool is in that count, so only what they put and took since then is added.
Where it is not certain on which side of the count something falls, it counts as used: records are read before and
after the count; what was pending before it counts as put after it; what an evicting writer freed counts only from its
first record that is newer than both. The next count puts that right. So a record must say that its writer evicts before
it does.

A writer's last records are kept, as long as it writes: who lists a directory while names come and go may miss the
newest. Files last touched long ago are removed once their writer has closed or is silent on our own clock, too, and
whoever missed that counts anew.
"""

from __future__ import annotations

import errno
from collections.abc import Collection
from dataclasses import dataclass

from curvfs.errors import CurvfsError
from curvfs.world import World
from kvstore.backends.base import Backend

QUOTA = ".quota"
#: A writer gives a sign of life every ``flush_s`` (30 s) while it has something to do.
SILENT_S = 120.0
#: After so long without a record of its own a writer begins a new one: the old one may have been removed.
_BEGIN_ANEW_S = 300.0
_RECORDS_KEPT = 6
#: How often a listing is repeated that misses a writer.
_LISTED_AGAIN = 3
#: Records not renewed for so long are removed.
_REMOVE_S = 900.0


@dataclass(frozen=True, slots=True)
class Record:
    """What one writer says of itself. ``evicts``: it takes objects away, too. ``closed``: it has ended well."""

    writer: str
    number: int
    spent_bytes: int
    freed_bytes: int
    pending_bytes: int
    chunk_bytes: int
    evicts: bool
    closed: bool
    mtime_s: float = 0.0

    @property
    def name(self) -> str:
        flags = ("e" if self.evicts else "w") + ("c" if self.closed else "")
        bytes_ = f"{self.spent_bytes}.{self.freed_bytes}.{self.pending_bytes}.{self.chunk_bytes}"
        return f"{self.writer}.{self.number}.{bytes_}.{flags}"

    @property
    def place(self) -> str:
        """The name of the directory in which its writer stages; empty where the record does not tell."""
        return self.writer.partition("_")[2]

    @property
    def named_bytes(self) -> int:
        """What it had put for certain, under names that a count can find."""
        return self.spent_bytes - self.pending_bytes

    @classmethod
    def of(cls, name: str, mtime_s: float) -> Record | None:
        """The record of this name; None for anything else."""
        parts = name.split(".")
        if len(parts) != 7 or not all(part.isascii() and part.isdigit() for part in parts[1:6]):
            return None
        number, spent, freed, pending, chunk = map(int, parts[1:6])
        flags = parts[6]
        return cls(parts[0], number, spent, freed, pending, chunk, flags[:1] == "e", flags.endswith("c"), mtime_s)


@dataclass(slots=True)
class _Other:
    """Another writer since our last count: where it stood then, and what it says now."""

    record: Record
    spent_before: int = 0
    #: None: not known before its first record numbered above ``unsure_until``.
    freed_before: int | None = 0
    unsure_until: int = -1
    #: Proven silent before the pool was counted: all it did is in that count, until it speaks again.
    counted_dead: bool = False
    #: Silent by the store's clock when the pool was counted: if so, no chunk of it is missing in that count.
    supposed_dead: bool = False
    #: By our own clock.
    silent: bool = False
    gone: bool = False

    def update(self, record: Record) -> None:
        if record != self.record:
            self.counted_dead = self.supposed_dead = False
        self.record = record
        if self.freed_before is None and record.number > self.unsure_until:
            self.freed_before = record.freed_bytes

    def fell_silent(self, now_s: float) -> bool:
        """Has it ended without a word, so that a count would tell more than its record does?"""
        if self.record.closed or self.counted_dead:
            return False
        return self.gone or self.silent or (_is_old(self.record, now_s) and not self.supposed_dead)

    def bytes(self, now_s: float) -> int:
        """What it added since our count, as far as is certain to be gone again."""
        if self.counted_dead:
            return 0
        record = self.record
        freed = 0 if self.freed_before is None else max(0, record.freed_bytes - self.freed_before)
        unsaid = record.chunk_bytes if self.fell_silent(now_s) and not self.supposed_dead else 0
        return record.spent_bytes - self.spent_before - freed + unsaid


def _is_old(record: Record, now_s: float) -> bool:
    """Is its writer silent by the store's clock?"""
    return now_s - record.mtime_s > SILENT_S


@dataclass(slots=True)
class _Count:
    """A count of the pool that is under way."""

    before: dict[str, Record]
    #: Writers proven silent before it began.
    dead: frozenset[str]


class Ledger:
    """Our records of one namespace, and everybody else's. Callable from any thread; its owner guards the numbers."""

    def __init__(self, world: World, backend: Backend, namespace: str, *, chunk_bytes: int) -> None:
        self._world = world
        self._records = backend.records
        self._staging = backend.staging
        self._directory = f"{backend.root}/{QUOTA}/{namespace}"
        self.chunk_bytes = chunk_bytes
        self._lock = world.threads.lock()
        self._others: dict[str, _Other] = {}
        #: The newest record of every writer in the last listing, and since when (by our own clock) we know it.
        self._sightings: dict[str, tuple[Record, float]] = {}
        #: Whose newest record was the same for :data:`SILENT_S`.
        self._silent: frozenset[str] = frozenset()
        self._written: list[Record] = []
        self._number = 0
        self.spent_bytes = self.freed_bytes = self.pending_bytes = 0
        self.evicts = False
        #: A record vanished: what its writer did last is not known.
        self.stale = False
        self._begin()

    def _begin(self) -> None:
        """A new record, from nothing."""
        self._writer = f"{self._world.random.uuid()}_{self._staging.directory.rpartition('/')[2]}"
        self.spent_bytes = self.freed_bytes = 0
        self._permitted_bytes = self._said_freed = self.said_pending_bytes = 0
        self._said_s: float | None = None
        self._touched_s = 0.0
        self._written = []

    # ------------------------------------------------------------------------------------------------------------ ours

    @property
    def left_bytes(self) -> int:
        """What may be spent before the next :meth:`exchange`."""
        if self._said_s is None or self._age_s() > _BEGIN_ANEW_S:
            return 0
        return self._permitted_bytes - self.spent_bytes

    @property
    def silent(self) -> bool:
        """Has it no record yet? One must be there before anything is taken away, see :meth:`_read`."""
        return self._said_s is None

    @property
    def unsaid_bytes(self) -> int:
        """What was freed since the last record."""
        return self.freed_bytes - self._said_freed

    def _age_s(self) -> float:
        return self._world.clock.monotonic_s() - (self._said_s or 0.0)

    def now_s(self) -> float:
        """The store's own time, by our last record."""
        return self._staging.now_s() if self._said_s is None else self._touched_s + self._age_s()

    def say(self, *, closed: bool = False) -> None:
        """Write our next record, which permits nothing. Raises CurvfsError."""
        with self._lock:
            self._say(closed)

    def exchange(self) -> None:
        """Write our next record, then read the others': a chunk more may be spent, as far as the quota has room by what
        they say. Raises CurvfsError."""
        with self._lock:
            spent_bytes = self._say(False)
            self._read()
            self._permitted_bytes = spent_bytes + self.chunk_bytes

    def _say(self, closed: bool) -> int:
        if self._said_s is not None and self._age_s() > _BEGIN_ANEW_S:
            if closed:
                return 0
            self._begin()
        self._number += 1
        record = Record(
            self._writer,
            self._number,
            max(0, self.spent_bytes),
            self.freed_bytes,
            self.pending_bytes,
            self.chunk_bytes,
            self.evicts,
            closed,
        )
        self._touched_s = self._touch(record)
        self._said_s = self._world.clock.monotonic_s()
        self._said_freed = record.freed_bytes
        self.said_pending_bytes = record.pending_bytes
        # What was withdrawn since is not spent: others count on less by now, so less may be spent unsaid.
        self._permitted_bytes = min(self._permitted_bytes, record.spent_bytes + self.chunk_bytes)
        self._written.append(record)
        while len(self._written) > (1 if closed else _RECORDS_KEPT):
            self._records.remove_file(f"{self._directory}/{self._written.pop(0).name}")
        return record.spent_bytes

    def _touch(self, record: Record) -> float:
        path = f"{self._directory}/{record.name}"
        try:
            return self._records.touch(path)
        except CurvfsError as error:
            if error.errno_ != errno.ENOENT:
                raise
        self._records.make_directory(self._directory)
        return self._records.touch(path)

    # ---------------------------------------------------------------------------------------------------------- others

    def _list(self) -> dict[str, Record]:
        """The newest record of every other writer. Whoever was there and seems to be gone is looked for again: records
        that come and go while a directory is listed may be missed."""
        begun_s = self._world.clock.monotonic_s()
        known = {writer for writer, other in self._others.items() if not other.gone and not other.record.closed}
        newest = self._list_once()
        for _ in range(_LISTED_AGAIN):
            if known <= newest.keys():
                break
            for writer, record in self._list_once().items():
                if writer not in newest or newest[writer].number < record.number:
                    newest[writer] = record
        self._watch(newest, begun_s)
        return newest

    def _watch(self, newest: dict[str, Record], begun_s: float) -> None:
        """Remember what a listing found that was begun then. A record known since before that was unchanged in
        between; what happened after it is not known."""
        found_s = self._world.clock.monotonic_s()
        sightings = {}
        for writer, record in newest.items():
            known = self._sightings.get(writer)
            sightings[writer] = known if known is not None and known[0] == record else (record, found_s)
        self._sightings = sightings
        self._silent = frozenset(writer for writer, (_, since_s) in sightings.items() if begun_s - since_s > SILENT_S)

    def _list_once(self) -> dict[str, Record]:
        newest: dict[str, Record] = {}
        try:
            entries = self._records.entries(self._directory)
        except CurvfsError as error:
            if error.errno_ == errno.ENOENT:
                return newest
            raise
        for entry in entries:
            record = Record.of(entry.name, entry.mtime_s)
            if record is None or record.writer == self._writer:
                continue
            known = newest.get(record.writer)
            if known is None or known.number < record.number:
                newest[record.writer] = record
        return newest

    def _read(self) -> None:
        """Look what the others say by now."""
        found = self._list()
        others = dict(self._others)
        for writer, record in found.items():
            if writer in others:
                others[writer].update(record)
            elif record.number <= _RECORDS_KEPT:  # it removed none yet, so none was missed: it is new
                others[writer] = _Other(record)
            else:  # what it freed before may be in our count
                others[writer] = _Other(record, freed_before=None, unsure_until=record.number)
                self.stale = True
        for writer, other in others.items():
            other.gone |= writer not in found
            other.silent = writer in self._silent
            self.stale |= other.fell_silent(self.now_s())
        self._others = others

    @property
    def others_bytes(self) -> int:
        """What the others added to the pool since it was counted (negative: took away)."""
        now_s = self.now_s()
        return sum(other.bytes(now_s) for other in self._others.values())

    @property
    def others_spent_bytes(self) -> int:
        """What the others put since the pool was counted, whatever became of it."""
        return sum(other.record.spent_bytes - other.spent_before for other in self._others.values())

    @property
    def others_freed_bytes(self) -> int:
        """What the others took away, ever."""
        return sum(other.record.freed_bytes for other in self._others.values())

    @property
    def living(self) -> int:
        """Other writers that gave a sign of life lately, or that we do not know for long enough to tell."""
        return sum(not (other.gone or other.silent or other.record.closed) for other in self._others.values())

    @property
    def dead_places(self) -> set[str]:
        """Names of the staging directories of writers that were silent or closed when we last looked."""
        dead: set[str] = set()
        living = {""}
        for writer, (record, _) in self._sightings.items():
            (dead if record.closed or writer in self._silent else living).add(record.place)
        return dead - living

    def begin_count(self) -> _Count:
        """Before the pool is counted. Raises CurvfsError."""
        with self._lock:
            before = self._list()
            return _Count(before, self._silent)

    def end_count(self, count: _Count) -> None:
        """After it: what the others do from here on is added to that. Raises CurvfsError."""
        with self._lock:
            after = self._list()
            self._others = {writer: self._other(record, count) for writer, record in after.items()}
            self.stale = False

    def _other(self, record: Record, count: _Count) -> _Other:
        """A writer as it stands when the pool has been counted."""
        before = count.before.get(record.writer)
        return _Other(
            record,
            spent_before=0 if before is None else before.named_bytes,
            freed_before=None if record.evicts else record.freed_bytes,
            unsure_until=record.number,
            counted_dead=record.writer in count.dead and record == before,
            supposed_dead=before is not None and record == before and _is_old(record, self.now_s()),
            silent=record.writer in self._silent,
        )

    def remove_old(self, left_behind: Collection[str] = ()) -> int:
        """Remove records that nobody renews, by the store's clock and by ours; how many. Those stay that tell whose
        what was ``left_behind`` in staging directories of these names is. Raises CurvfsError."""
        removed = 0
        now_s = self.now_s()
        for entry in self._records.entries(self._directory):
            record = Record.of(entry.name, entry.mtime_s)
            if record is None or record.writer not in self._sightings or now_s - entry.mtime_s <= _REMOVE_S:
                continue
            newest, _ = self._sightings[record.writer]
            ended = newest.closed or record.writer in self._silent
            if ended and record.place not in left_behind:
                self._records.remove_file(f"{self._directory}/{entry.name}")
                removed += 1
        return removed
