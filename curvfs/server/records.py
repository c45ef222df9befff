"""What a master remembers, as values: inodes, blocks, locks, and the change that turns one state into the next.

Records are immutable. A :class:`Change` collects the new values of one mutation; a
:class:`~curvfs.server.metastore.MetaStore` applies it whole or not at all, so a request that is refused half-way leaves
nothing behind.

Specification sections 4.1, 4.4, 4.14, 4.15 and 11. All times are milliseconds since the Unix epoch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import IntEnum
from types import MappingProxyType
from typing import NamedTuple

ROOT_ID = 1000

#: Block id = (inode id << 24) | sequence number inside the file.
BLOCK_BITS = 24


class Kind(IntEnum):
    """What an inode is; the numbers of FileTypeProto."""

    DIR = 0
    FILE = 1
    LINK = 2
    STREAM = 3
    AGG = 4
    OBJECT = 5
    FIFO = 6
    CHAR = 7
    BLOCK = 8
    SOCKET = 9


#: Special nodes: made by CreateFile, never written (section 4.5).
SPECIAL_KINDS = frozenset({Kind.FIFO, Kind.CHAR, Kind.BLOCK, Kind.SOCKET})

STORAGE_DISK = 4
TTL_NONE = 0
TTL_DELETE = 1
TTL_FREE = 2
STATE_CV = 1


class Policy(NamedTuple):
    """StoragePolicyProto without the under-store part, which this server does not have."""

    storage_type: int = STORAGE_DISK
    ttl_ms: int = 0
    ttl_action: int = TTL_NONE


DEFAULT_POLICY = Policy()
_NO_XATTRS: Mapping[str, bytes] = MappingProxyType({})


class Inode(NamedTuple):
    """A file, directory, symlink or special node, without its names and blocks."""

    id: int
    kind: Kind
    mode: int
    owner: str
    group: str
    mtime_ms: int
    atime_ms: int
    #: Set by the first SetAttr, Rename or Link, and kept current from then on (section 3.3).
    ctime_ms: int | None = None
    nlink: int = 1
    #: Directories: number of entries.
    children: int = 0
    length_bytes: int = 0
    block_size_bytes: int = 0
    replicas: int = 0
    #: Sequence number of the next block of this file.
    next_block: int = 0
    #: Sum of the lengths of this file's blocks.
    blocks_bytes: int = 0
    writers: tuple[str, ...] = ()
    policy: Policy = DEFAULT_POLICY
    xattrs: Mapping[str, bytes] = _NO_XATTRS
    target: str = ""

    @property
    def is_dir(self) -> bool:
        return self.kind == Kind.DIR

    @property
    def is_complete(self) -> bool:
        """Whether no writer is registered; always false for directories."""
        return self.kind != Kind.DIR and not self.writers

    def has_expired(self, now_ms: int) -> bool:
        """Whether this file is due for deletion (section 4.20). FREE frees what lies in an under store too, so it does
        nothing here; directories, whose mtime says little of what is in them, do not expire."""
        policy = self.policy
        ends = not self.is_dir and policy.ttl_action == TTL_DELETE and policy.ttl_ms > 0
        return ends and self.mtime_ms + policy.ttl_ms <= now_ms


class AllocOptions(NamedTuple):
    """FileAllocOptsProto: how a worker has to size a block before it is used (offset is always 0)."""

    truncate: bool
    length_bytes: int
    mode: int = 0


class Location(NamedTuple):
    """Where a replica of a block lies."""

    worker_id: int
    storage_type: int = STORAGE_DISK


class Block(NamedTuple):
    """One block of a file. ``locations`` are committed; ``planned`` were chosen by AddBlock or AssignWorker and are
    not shown until the first commit (section 4.4). ``stored_bytes``: how much of it a worker was told of, where that is
    less than ``length_bytes``: the rest are zeros that no file need hold."""

    id: int
    length_bytes: int = 0
    alloc: AllocOptions | None = None
    planned: tuple[int, ...] = ()
    locations: tuple[Location, ...] = ()
    stored_bytes: int | None = None

    @property
    def least_bytes(self) -> int:
        """How long its file must be: what is missing below that was lost."""
        if self.alloc is not None:
            return 0
        return self.length_bytes if self.stored_bytes is None else self.stored_bytes

    def stored_to(self, stored_bytes: int) -> Block:
        """The same, of which workers have no more than that."""
        return self._replace(stored_bytes=stored_bytes if stored_bytes < self.length_bytes else None)

    @property
    def inode_id(self) -> int:
        return self.id >> BLOCK_BITS


@dataclass(frozen=True, slots=True)
class FileLock:
    """An advisory lock (section 4.15). ``end`` is inclusive; 2^64 - 1 means to the end of the file."""

    client_id: str
    owner_id: int
    pid: int
    acquired_ms: int
    #: LockTypeProto: READ 0, WRITE 1, UNLOCK 2.
    lock_type: int
    #: LockFlagsProto: PLOCK 0, FLOCK 1.
    lock_flags: int
    start: int
    end: int


class Totals(NamedTuple):
    """Counters of the whole namespace, the root not among them; a file with several names counts as often.
    ``next_inode`` is the id of the next new inode."""

    next_inode: int = ROOT_ID + 1
    directories: int = 0
    files: int = 0
    blocks: int = 0


@dataclass(slots=True)
class Change:
    """The new values of one mutation. None removes."""

    inodes: dict[int, Inode | None] = field(default_factory=dict)
    #: (directory id, name) -> inode id
    entries: dict[tuple[int, str], int | None] = field(default_factory=dict)
    blocks: dict[int, Block | None] = field(default_factory=dict)
    locks: dict[int, tuple[FileLock, ...]] = field(default_factory=dict)
    #: Directories cut out of the tree whose contents are still to be removed: id -> in (True) or out (False).
    doomed: dict[int, bool] = field(default_factory=dict)
    totals: Totals | None = None

    @property
    def records(self) -> int:
        """How many records are written."""
        return len(self.inodes) + len(self.entries) + len(self.blocks) + len(self.locks) + len(self.doomed) + 1

    @property
    def removes(self) -> bool:
        """Whether something goes away or moves, as when room is made."""
        return bool(self.doomed) or any(None in values for values in (self.inodes.values(), self.entries.values()))


def root_inode() -> Inode:
    """The root as a fresh store holds it."""
    return Inode(id=ROOT_ID, kind=Kind.DIR, mode=0o777, owner="", group="", mtime_ms=0, atime_ms=0, nlink=2)
