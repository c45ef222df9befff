"""Metadata in one SQLite file, read through bounded caches.

Durability: write-ahead log with ``synchronous=NORMAL``. Every change is one transaction. After the process dies,
however it dies, every change that was answered is there. After a power loss the newest changes may be missing, but
always as a suffix: the store is then consistent as of some earlier moment, and block files that no file of that moment
owns are removed at the next start.

The file grows with the namespace (about 450 bytes per one-block file); memory does not: SQLite's page cache and the
record caches have fixed bounds. Checkpoints, which wait for the disk, run on a connection of their own in a worker
thread, so that no request waits for ``fsync``.
"""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing, contextmanager
from itertools import islice
from typing import Any, Generic, TypeVar

from curvfs.errors import CurvfsError, EnvironmentError_, RemoteError
from curvfs.server.metastore import EXPIRED_AT_ONCE, MetaStore
from curvfs.server.records import (
    BLOCK_BITS,
    DEFAULT_POLICY,
    TTL_DELETE,
    AllocOptions,
    Block,
    Change,
    FileLock,
    Inode,
    Kind,
    Location,
    Policy,
    Totals,
    root_inode,
)
from curvfs.server.refusals import OUT_OF_SPACE, refusal
from curvfs.server.reserve import Reserve

SCHEMA_VERSION = 1

_SCHEMA = """
CREATE TABLE inode (
    id INTEGER PRIMARY KEY, kind INTEGER NOT NULL, mode INTEGER NOT NULL, owner TEXT NOT NULL, grp TEXT NOT NULL,
    mtime_ms INTEGER NOT NULL, atime_ms INTEGER NOT NULL, ctime_ms INTEGER, nlink INTEGER NOT NULL,
    children INTEGER NOT NULL, length INTEGER NOT NULL, block_size INTEGER NOT NULL, replicas INTEGER NOT NULL,
    next_block INTEGER NOT NULL, blocks_bytes INTEGER NOT NULL, writers TEXT, policy TEXT, xattrs TEXT, target TEXT
);
CREATE TABLE entry (
    directory INTEGER NOT NULL, name TEXT NOT NULL, inode INTEGER NOT NULL, PRIMARY KEY (directory, name)
) WITHOUT ROWID;
CREATE TABLE block (id INTEGER PRIMARY KEY, length INTEGER NOT NULL, alloc TEXT, planned TEXT, locations TEXT);
CREATE TABLE file_lock (inode INTEGER PRIMARY KEY, locks TEXT NOT NULL);
CREATE TABLE doomed (directory INTEGER PRIMARY KEY);
CREATE TABLE totals (
    one INTEGER PRIMARY KEY CHECK (one = 1), next_inode INTEGER NOT NULL, directories INTEGER NOT NULL,
    files INTEGER NOT NULL, blocks INTEGER NOT NULL
);
"""

#: Few files have a policy of their own. Made at every start, for databases that are older than it.
_POLICY_INDEX = "CREATE INDEX IF NOT EXISTS inode_policy ON inode (id) WHERE policy IS NOT NULL"

#: Files whose TTL has passed. Policies are JSON, [storage type, ttl_ms, action]; CAST stops at the second comma.
_EXPIRED = f"""
SELECT id FROM inode WHERE policy IS NOT NULL AND policy LIKE '%,{TTL_DELETE}]' AND kind <> 0
    AND CAST(substr(policy, instr(policy, ',') + 1) AS INTEGER) > 0
    AND mtime_ms + CAST(substr(policy, instr(policy, ',') + 1) AS INTEGER) <= ?
"""
_EXPIRED_ENTRIES = f"SELECT directory, name, inode FROM entry WHERE inode IN ({_EXPIRED}) LIMIT {EXPIRED_AT_ONCE}"

_PUT_INODE = "INSERT OR REPLACE INTO inode VALUES (?,?,?,?,?,?,?,?,?,?,?,?,?,?,?,?,?,?,?)"
_PUT_TOTALS = "INSERT OR REPLACE INTO totals VALUES (1,?,?,?,?)"

#: Counting what a deletion frees stops here, because all other requests wait for it.
_WEIGHED_ENTRIES = 100_000

#: What removing everything below a directory frees. (CROSS JOIN keeps SQLite from starting with all inodes.)
_WEIGH = f"""
WITH RECURSIVE below(id) AS (
    SELECT inode FROM entry WHERE directory = ?
    UNION SELECT entry.inode FROM below JOIN entry ON entry.directory = below.id LIMIT {_WEIGHED_ENTRIES}
)
SELECT COUNT(*), COALESCE(SUM((
    SELECT SUM(length) FROM block WHERE locations IS NOT NULL
        AND block.id >= below.id << {BLOCK_BITS} AND block.id < (below.id + 1) << {BLOCK_BITS}
)), 0) FROM below CROSS JOIN inode USING (id) WHERE kind <> 0 AND nlink = 1
"""

#: Records kept in each generation of a cache; two generations live at a time.
_CACHED_RECORDS = 32_768
#: Files with more blocks than this are read from the database each time.
_CACHED_BLOCKS_PER_FILE = 64
_PAGE_CACHE_KIB = 64 * 1024

#: A log of this many pages of 4 KiB has to be emptied before it grows further.
_HEAVY_LOG_PAGES = 16_384

K = TypeVar("K")
V = TypeVar("V")


class _Cache(Generic[K, V]):
    """A bounded map that forgets what was not used for a generation."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._young: dict[K, V] = {}
        self._old: dict[K, V] = {}

    def get(self, key: K) -> V | None:
        found = self._young.get(key)
        if found is None and (found := self._old.get(key)) is not None:
            self.put(key, found)
        return found

    def put(self, key: K, value: V) -> None:
        self._young[key] = value
        if len(self._young) >= self._size:
            self._old, self._young = self._young, {}

    def drop(self, key: K) -> None:
        self._young.pop(key, None)
        self._old.pop(key, None)


_encode = json.JSONEncoder(separators=(",", ":")).encode


def _dump(value: Any) -> str | None:
    """JSON of a non-empty list or map, None of an empty one."""
    return _encode(value) if value else None


def _alloc_text(block: Block) -> str | None:
    """What a worker was not told yet: the allocation that waits, or, alone, how much it has been told."""
    alloc = block.alloc
    if alloc is not None:
        return _dump([int(alloc.truncate), alloc.length_bytes, alloc.mode])
    return None if block.stored_bytes is None else _dump([block.stored_bytes])


class SqliteMetaStore(MetaStore):
    """A store in a file. ``path`` must be readable and writable by this process alone; it is made when missing."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._reserve = Reserve(path)
        self._pending_records = 0
        self._inodes: _Cache[int, Inode] = _Cache(_CACHED_RECORDS)
        self._entries: _Cache[tuple[int, str], int] = _Cache(_CACHED_RECORDS)
        self._file_blocks: _Cache[int, tuple[Block, ...]] = _Cache(_CACHED_RECORDS)
        self._blocks: _Cache[int, Block] = _Cache(_CACHED_RECORDS)
        self._location_sets: _Cache[str, tuple[Location, ...]] = _Cache(1_024)
        self._is_together = False
        #: What the changes that were to be kept together were undone for.
        self._undone: CurvfsError | None = None
        try:
            self._db = self._connect()
            self._checkpointer = self._connect()
            self._totals = self._prepare()
            self._reserve.keep()
        except sqlite3.Error as error:
            raise EnvironmentError_(
                f"The metadata in {path} cannot be used ({error}); restore it from a copy, or serve another directory."
            ) from error

    def _connect(self) -> sqlite3.Connection:
        # The checkpointing connection is used by one worker thread at a time.
        db = sqlite3.connect(self._path, isolation_level=None, check_same_thread=False, timeout=10)
        db.execute("PRAGMA journal_mode = WAL")
        db.execute("PRAGMA synchronous = NORMAL")
        db.execute("PRAGMA wal_autocheckpoint = 0")
        db.execute(f"PRAGMA cache_size = -{_PAGE_CACHE_KIB}")
        db.execute("PRAGMA temp_store = MEMORY")
        return db

    def _prepare(self) -> Totals:
        version = self._db.execute("PRAGMA user_version").fetchone()[0]
        if version == 0:
            self._db.executescript(f"BEGIN; {_SCHEMA} PRAGMA user_version = {SCHEMA_VERSION};")
            root = root_inode()
            self._db.execute(_PUT_INODE, self._inode_row(root))
            self._db.execute(_PUT_TOTALS, (Totals().next_inode, 0, 0, 0))
            self._db.execute("COMMIT")
        elif version != SCHEMA_VERSION:
            raise EnvironmentError_(
                f"The metadata in {self._path} has format {version} and this curvfs knows format {SCHEMA_VERSION}; "
                "use the version of curvfs that wrote it."
            )
        self._db.execute(_POLICY_INDEX)
        return self._read_totals()

    def _read_totals(self) -> Totals:
        return Totals(*self._db.execute("SELECT next_inode, directories, files, blocks FROM totals").fetchone())

    @property
    def totals(self) -> Totals:
        return self._totals

    # ---------------------------------------------------------------------------------------------------- reading

    def inode(self, inode_id: int) -> Inode | None:
        found = self._inodes.get(inode_id)
        if found is None:
            row = self._db.execute("SELECT * FROM inode WHERE id = ?", (inode_id,)).fetchone()
            if row is None:
                return None
            found = self._inode_of(row)
            self._inodes.put(inode_id, found)
        return found

    def child(self, directory_id: int, name: str) -> int | None:
        key = (directory_id, name)
        found = self._entries.get(key)
        if found is None:
            row = self._db.execute("SELECT inode FROM entry WHERE directory = ? AND name = ?", key).fetchone()
            if row is None:
                return None
            found = int(row[0])
            self._entries.put(key, found)
        return found

    def children(self, directory_id: int, after: str = "", limit: int | None = None) -> list[tuple[str, int]]:
        return self._db.execute(
            "SELECT name, inode FROM entry WHERE directory = ? AND name > ? ORDER BY name LIMIT ?",
            (directory_id, after, -1 if limit is None else limit),
        ).fetchall()

    def blocks(self, inode_id: int) -> Sequence[Block]:
        found = self._file_blocks.get(inode_id)
        if found is None:
            rows = self._db.execute(
                "SELECT * FROM block WHERE id >= ? AND id < ? ORDER BY id",
                (inode_id << BLOCK_BITS, (inode_id + 1) << BLOCK_BITS),
            ).fetchall()
            found = tuple(map(self._block_of, rows))
            if len(found) <= _CACHED_BLOCKS_PER_FILE:
                self._file_blocks.put(inode_id, found)
        return found

    def block(self, block_id: int) -> Block | None:
        found = self._blocks.get(block_id)
        if found is None:
            row = self._db.execute("SELECT * FROM block WHERE id = ?", (block_id,)).fetchone()
            found = None if row is None else self._block_of(row)
        return found

    def block_after(self, inode_id: int, block_id: int | None) -> Block | None:
        first = (inode_id << BLOCK_BITS) - 1
        row = self._db.execute(
            "SELECT * FROM block WHERE id > ? AND id < ? ORDER BY id LIMIT 1",
            (first if block_id is None else max(first, block_id), (inode_id + 1) << BLOCK_BITS),
        ).fetchone()
        return None if row is None else self._block_of(row)

    def locks(self, inode_id: int) -> tuple[FileLock, ...]:
        row = self._db.execute("SELECT locks FROM file_lock WHERE inode = ?", (inode_id,)).fetchone()
        return () if row is None else tuple(FileLock(*fields) for fields in json.loads(row[0]))

    def doomed(self) -> int | None:
        row = self._db.execute("SELECT directory FROM doomed LIMIT 1").fetchone()
        return None if row is None else int(row[0])

    def weigh(self, directory_id: int) -> tuple[int, int]:
        inodes, size_bytes = self._db.execute(_WEIGH, (directory_id,)).fetchone()
        return inodes, size_bytes

    def expired(self, now_ms: int) -> list[tuple[int, str, int]]:
        try:
            with closing(self._connect()) as db:
                if db.execute(f"{_EXPIRED} LIMIT 1", (now_ms,)).fetchone() is None:
                    return []
                return db.execute(_EXPIRED_ENTRIES, (now_ms,)).fetchall()
        except sqlite3.Error as error:
            raise CurvfsError(f"The metadata in {self._path} cannot be searched for expired files: {error}.") from error

    def known_blocks(self, block_ids: Iterable[int]) -> set[int]:
        remaining = iter(block_ids)
        known: set[int] = set()
        while some := list(islice(remaining, 500)):
            marks = ",".join("?" * len(some))
            known.update(row[0] for row in self._db.execute(f"SELECT id FROM block WHERE id IN ({marks})", some))
        return known

    # ---------------------------------------------------------------------------------------------------- writing

    def apply(self, change: Change) -> None:
        if self._reserve.spent and not change.removes:
            self._reserve.keep()
            if self._reserve.spent:
                raise refusal(OUT_OF_SPACE, "No space left for the metadata")
        try:
            self._commit(change)
        except RemoteError as error:
            # What is going to free some room gets what is kept for it.
            if error.kind != OUT_OF_SPACE or not change.removes or not self._reserve.give_up():
                raise
            self._commit(change)
        self._pending_records += change.records
        self._remember(change)

    def _commit(self, change: Change) -> None:
        try:
            if self._is_together:
                self._join(change)
                return
            self._db.execute("BEGIN IMMEDIATE")
            self._write(change)
            self._db.execute("COMMIT")
        except (sqlite3.Error, OverflowError) as error:
            if self._db.in_transaction and not self._is_together:
                self._db.execute("ROLLBACK")
            raise _refused(error) from error

    @contextmanager
    def together(self) -> Iterator[None]:
        self._is_together, self._undone = True, None
        try:
            yield
        finally:
            self._is_together = False
            if self._undone is not None:
                raise self._undone
            if self._db.in_transaction:
                try:
                    self._db.execute("COMMIT")
                except sqlite3.Error as error:
                    if self._db.in_transaction:
                        self._db.execute("ROLLBACK")
                    self._forget()
                    raise _refused(error) from error

    def _join(self, change: Change) -> None:
        """Write a change into the transaction of those that are kept together; one that fails leaves the others."""
        db = self._db
        if not db.in_transaction:
            db.execute("BEGIN IMMEDIATE")
        db.execute("SAVEPOINT one")
        try:
            self._write(change)
        except (sqlite3.Error, OverflowError) as error:
            if db.in_transaction:
                db.execute("ROLLBACK TO one")
                db.execute("RELEASE one")
            else:  # SQLite has undone them all
                self._forget()
                self._undone = _refused(error)
            raise
        db.execute("RELEASE one")

    def _forget(self) -> None:
        """Changes that the caches know were undone: go by the database."""
        self._inodes, self._entries = _Cache(_CACHED_RECORDS), _Cache(_CACHED_RECORDS)
        self._file_blocks, self._blocks = _Cache(_CACHED_RECORDS), _Cache(_CACHED_RECORDS)
        self._totals = self._read_totals()

    def _write(self, change: Change) -> None:
        db = self._db
        for inode_id, inode in change.inodes.items():
            if inode is None:
                db.execute("DELETE FROM inode WHERE id = ?", (inode_id,))
            else:
                db.execute(_PUT_INODE, self._inode_row(inode))
        for (directory_id, name), target in change.entries.items():
            if target is None:
                db.execute("DELETE FROM entry WHERE directory = ? AND name = ?", (directory_id, name))
            else:
                db.execute("INSERT OR REPLACE INTO entry VALUES (?,?,?)", (directory_id, name, target))
        for block_id, block in change.blocks.items():
            if block is None:
                db.execute("DELETE FROM block WHERE id = ?", (block_id,))
            else:
                db.execute("INSERT OR REPLACE INTO block VALUES (?,?,?,?,?)", self._block_row(block))
        for inode_id, locks in change.locks.items():
            if locks:
                text = _dump([
                    (lock.client_id, lock.owner_id, lock.pid, lock.acquired_ms, lock.lock_type, lock.lock_flags,
                     lock.start, lock.end)
                    for lock in locks
                ])  # fmt: skip
                db.execute("INSERT OR REPLACE INTO file_lock VALUES (?,?)", (inode_id, text))
            else:
                db.execute("DELETE FROM file_lock WHERE inode = ?", (inode_id,))
        for inode_id, waiting in change.doomed.items():
            if waiting:
                db.execute("INSERT OR REPLACE INTO doomed VALUES (?)", (inode_id,))
            else:
                db.execute("DELETE FROM doomed WHERE directory = ?", (inode_id,))
        if (totals := change.totals) is not None:
            db.execute(_PUT_TOTALS, (totals.next_inode, totals.directories, totals.files, totals.blocks))

    def _remember(self, change: Change) -> None:
        """Bring the caches up to date with a change that is in the database."""
        for inode_id, inode in change.inodes.items():
            self._inodes.drop(inode_id)
            if inode is not None:
                self._inodes.put(inode_id, inode)
        for key, target in change.entries.items():
            self._entries.drop(key)
            if target is not None:
                self._entries.put(key, target)
        for block_id, block in change.blocks.items():
            self._blocks.drop(block_id)
            if block is not None and block.planned:  # its writers' worker is going to ask for it
                self._blocks.put(block_id, block)
        for inode_id in {block_id >> BLOCK_BITS for block_id in change.blocks}:
            self._file_blocks.drop(inode_id)
        if change.totals is not None:
            self._totals = change.totals

    # ----------------------------------------------------------------------------------------------- housekeeping

    @property
    def pending_records(self) -> int:
        return self._pending_records

    def checkpoint(self) -> bool:
        self._pending_records = 0
        self._reserve.keep()
        try:
            _, log_pages, _ = self._checkpointer.execute("PRAGMA wal_checkpoint(PASSIVE)").fetchone()
        except sqlite3.Error as error:
            raise CurvfsError(f"The metadata log of {self._path} cannot be checkpointed: {error}.") from error
        # Changes made meanwhile keep the log from starting over; only a pause ends that.
        return int(log_pages) < _HEAVY_LOG_PAGES

    def close(self) -> None:
        self._checkpointer.close()
        self._db.close()

    # ---------------------------------------------------------------------------------------------- rows <-> records

    @staticmethod
    def _inode_row(inode: Inode) -> tuple[Any, ...]:
        policy = inode.policy
        return (
            inode.id, int(inode.kind), inode.mode, inode.owner, inode.group, inode.mtime_ms, inode.atime_ms,
            inode.ctime_ms, inode.nlink, inode.children, inode.length_bytes, inode.block_size_bytes, inode.replicas,
            inode.next_block, inode.blocks_bytes, _dump(inode.writers),
            None if policy is DEFAULT_POLICY else _dump([policy.storage_type, policy.ttl_ms, policy.ttl_action]),
            _dump({name: value.decode("latin-1") for name, value in inode.xattrs.items()}) if inode.xattrs else None,
            inode.target or None,
        )  # fmt: skip

    @staticmethod
    def _inode_of(row: tuple[Any, ...]) -> Inode:
        (inode_id, kind, mode, owner, group, mtime_ms, atime_ms, ctime_ms, nlink, children, length, block_size,
         replicas, next_block, blocks_bytes, writers, policy, xattrs, target) = row  # fmt: skip
        return Inode(
            inode_id, Kind(kind), mode, owner, group, mtime_ms, atime_ms, ctime_ms, nlink, children, length, block_size,
            replicas, next_block, blocks_bytes,
            tuple(json.loads(writers)) if writers else (),
            Policy(*json.loads(policy)) if policy else DEFAULT_POLICY,
            {name: value.encode("latin-1") for name, value in json.loads(xattrs).items()} if xattrs else {},
            target or "",
        )  # fmt: skip

    @staticmethod
    def _block_row(block: Block) -> tuple[Any, ...]:
        return (
            block.id,
            block.length_bytes,
            _alloc_text(block),
            _dump(block.planned),
            _dump([(location.worker_id, location.storage_type) for location in block.locations]),
        )

    def _block_of(self, row: tuple[Any, ...]) -> Block:
        block_id, length, alloc_text, planned, location_text = row
        alloc = stored_bytes = None
        if alloc_text:
            numbers = json.loads(alloc_text)
            if len(numbers) == 1:
                stored_bytes = numbers[0]
            else:
                alloc = AllocOptions(bool(numbers[0]), numbers[1], numbers[2])
        locations: tuple[Location, ...] = ()
        if location_text:
            known = self._location_sets.get(location_text)
            if known is None:
                known = tuple(Location(*fields) for fields in json.loads(location_text))
                self._location_sets.put(location_text, known)
            locations = known
        chosen = tuple(json.loads(planned)) if planned else ()
        return Block(block_id, length, alloc, chosen, locations, stored_bytes)


def _refused(error: Exception) -> CurvfsError:
    """What a change ends with that the database did not take."""
    if getattr(error, "sqlite_errorcode", None) == sqlite3.SQLITE_FULL:
        return refusal(OUT_OF_SPACE, "No space left for the metadata")
    return CurvfsError(f"The metadata store refused a change: {error}.")
