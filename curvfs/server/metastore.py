"""Where the master keeps its metadata: the seam, and the store in memory.

Reads are by key; writes are one :class:`~curvfs.server.records.Change` at a time, applied whole or not at all. That is
all that the namespace knows of storage, so a simulation can put a store of its own here and cut its power.

:class:`MemoryMetaStore` keeps everything in dictionaries and forgets it at exit: tests and simulations use it.
:class:`~curvfs.server.sqlitestore.SqliteMetaStore` is what a real server runs on. Both pass one test suite.
"""

from __future__ import annotations

import abc
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import islice

from curvfs.server.records import BLOCK_BITS, ROOT_ID, Block, Change, FileLock, Inode, Totals, root_inode

#: How many expired entries a store tells at a time.
EXPIRED_AT_ONCE = 10_000


class MetaStore(abc.ABC):
    """Inodes, directory entries, blocks, locks and totals. Not thread-safe: one task uses it, except where noted."""

    @property
    @abc.abstractmethod
    def totals(self) -> Totals: ...

    @abc.abstractmethod
    def inode(self, inode_id: int) -> Inode | None: ...

    @abc.abstractmethod
    def child(self, directory_id: int, name: str) -> int | None:
        """The inode id of an entry."""

    @abc.abstractmethod
    def children(self, directory_id: int, after: str = "", limit: int | None = None) -> list[tuple[str, int]]:
        """Entries (name, inode id) in byte order of their names, those after ``after``, at most ``limit``."""

    @abc.abstractmethod
    def blocks(self, inode_id: int) -> Sequence[Block]:
        """The blocks of a file in file order."""

    @abc.abstractmethod
    def block(self, block_id: int) -> Block | None: ...

    @abc.abstractmethod
    def block_after(self, inode_id: int, block_id: int | None) -> Block | None:
        """The first block of a file whose id is greater than ``block_id``; the first of all when that is None."""

    @abc.abstractmethod
    def locks(self, inode_id: int) -> tuple[FileLock, ...]: ...

    @abc.abstractmethod
    def doomed(self) -> int | None:
        """One directory that was cut out of the tree and waits to be emptied and removed."""

    @abc.abstractmethod
    def weigh(self, directory_id: int) -> tuple[int, int]:
        """(inodes, bytes) that removing everything below a directory frees: files with no other name, and the lengths
        of their blocks that lie on a worker. A store may stop counting at 100,000 entries: clients only show it."""

    @abc.abstractmethod
    def expired(self, now_ms: int) -> list[tuple[int, str, int]]:
        """Up to EXPIRED_AT_ONCE entries (directory id, name, inode id) of files that :meth:`Inode.has_expired`. For a
        worker thread: it looks at everything, and what it says may be out of date."""

    @abc.abstractmethod
    def known_blocks(self, block_ids: Iterable[int]) -> set[int]:
        """Which of these blocks some file owns."""

    @abc.abstractmethod
    def apply(self, change: Change) -> None:
        """Make a change, atomically: after an error, or a crash, all of it happened or none. Raises CurvfsError."""

    @contextmanager
    def together(self) -> Iterator[None]:
        """Changes applied inside may be kept with one write: all are when this ends, those before a failure too. Raises
        what keeping them raises: then none was made."""
        yield

    @property
    def pending_records(self) -> int:
        """Records changed since the last :meth:`checkpoint`."""
        return 0

    def checkpoint(self) -> bool:
        """Do housekeeping that waits for the disk; called from a worker thread now and then. False: it could not keep
        up, and mutations should pause while it is called once more."""
        return True

    @abc.abstractmethod
    def close(self) -> None: ...


def located_bytes(blocks: Iterable[Block]) -> int:
    """Sum of the lengths of those blocks that lie on a worker."""
    return sum(block.length_bytes for block in blocks if block.locations)


class MemoryMetaStore(MetaStore):
    """A store in dictionaries."""

    def __init__(self) -> None:
        self._totals = Totals()
        self._inodes: dict[int, Inode] = {ROOT_ID: root_inode()}
        self._entries: dict[int, dict[str, int]] = {}
        self._blocks: dict[int, dict[int, Block]] = {}
        self._locks: dict[int, tuple[FileLock, ...]] = {}
        self._doomed: dict[int, None] = {}

    @property
    def totals(self) -> Totals:
        return self._totals

    def inode(self, inode_id: int) -> Inode | None:
        return self._inodes.get(inode_id)

    def child(self, directory_id: int, name: str) -> int | None:
        return self._entries.get(directory_id, {}).get(name)

    def children(self, directory_id: int, after: str = "", limit: int | None = None) -> list[tuple[str, int]]:
        # Code points sort as their UTF-8 bytes do.
        entries = sorted(self._entries.get(directory_id, {}).items())
        start = bisect_right(entries, after, key=lambda entry: entry[0]) if after else 0
        return entries[start:] if limit is None else entries[start : start + limit]

    def blocks(self, inode_id: int) -> Sequence[Block]:
        return tuple(self._blocks.get(inode_id, {}).values())

    def block(self, block_id: int) -> Block | None:
        return self._blocks.get(block_id >> BLOCK_BITS, {}).get(block_id)

    def block_after(self, inode_id: int, block_id: int | None) -> Block | None:
        for found_id, block in self._blocks.get(inode_id, {}).items():
            if block_id is None or found_id > block_id:
                return block
        return None

    def locks(self, inode_id: int) -> tuple[FileLock, ...]:
        return self._locks.get(inode_id, ())

    def doomed(self) -> int | None:
        return next(iter(self._doomed), None)

    def weigh(self, directory_id: int) -> tuple[int, int]:
        inodes = size_bytes = 0
        pending = [directory_id]
        while pending:
            for inode_id in self._entries.get(pending.pop(), {}).values():
                inode = self._inodes[inode_id]
                if inode.is_dir:
                    pending.append(inode_id)
                elif inode.nlink == 1:
                    inodes += 1
                    size_bytes += located_bytes(self.blocks(inode_id))
        return inodes, size_bytes

    def expired(self, now_ms: int) -> list[tuple[int, str, int]]:
        due = {inode.id for inode in list(self._inodes.values()) if inode.has_expired(now_ms)}
        found = (
            (directory_id, name, inode_id)
            for directory_id, names in (list(self._entries.items()) if due else ())
            for name, inode_id in list(names.items())
            if inode_id in due
        )
        return list(islice(found, EXPIRED_AT_ONCE))

    def known_blocks(self, block_ids: Iterable[int]) -> set[int]:
        return {block_id for block_id in block_ids if self.block(block_id) is not None}

    def apply(self, change: Change) -> None:
        for inode_id, inode in change.inodes.items():
            if inode is None:
                self._inodes.pop(inode_id, None)
            else:
                self._inodes[inode_id] = inode
        for (directory_id, name), target in change.entries.items():
            names = self._entries.setdefault(directory_id, {})
            if target is None:
                names.pop(name, None)
            else:
                names[name] = target
        for block_id, block in change.blocks.items():
            owned = self._blocks.setdefault(block_id >> BLOCK_BITS, {})
            if block is None:
                owned.pop(block_id, None)
            else:
                owned[block_id] = block  # new ids ascend, so the dictionary stays in file order
        for inode_id, locks in change.locks.items():
            if locks:
                self._locks[inode_id] = locks
            else:
                self._locks.pop(inode_id, None)
        for inode_id, waiting in change.doomed.items():
            if waiting:
                self._doomed[inode_id] = None
            else:
                self._doomed.pop(inode_id, None)
        if change.totals is not None:
            self._totals = change.totals

    def close(self) -> None:
        pass
