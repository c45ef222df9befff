"""A worker's blocks on disk: create, rewrite, publish, read, remove; and how much room there is.

A block is written under ``staging/`` and renamed to ``active/`` when its writer completes it, so whoever opens it in
``active/`` has a whole generation and keeps it, whatever happens later. Rewriting a published block works on a copy.

What is only in memory: which blocks are being written and the space reserved for them. After a restart a new block's
staging file can be completed all the same (its length says whether it is whole); an unfinished rewrite is dropped and
the published generation stays. Block files that no file of the namespace owns are removed at start.

Nothing here is synced to the disk: after a power loss, unlike after a kill, a block may be torn or shorter than its
file says (what is missing reads as zeros), or gone.

The methods block; those named in their docstring as slow belong into a worker thread. None is reentrant for one block:
:meth:`BlockStore.begin` and :meth:`BlockStore.complete` refuse a block that is busy.

Specification sections 4.7, 4.10, 4.11 and 4.12.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass

from curvfs.errors import CurvfsError, from_os_error
from curvfs.server.behaviour import Behaviour, ReadLength
from curvfs.server.layout import Layout, StorageVersion
from curvfs.server.metastore import MetaStore
from curvfs.server.records import AllocOptions, Block
from curvfs.server.refusals import COMMON, IO, OUT_OF_SPACE, common, refusal
from curvfs.units import MIB
from curvfs.world import World

_COPY_BYTES = MIB


@dataclass(slots=True)
class _Writing:
    """A block that is being written."""

    #: Length of the published block that is being rewritten; None for a new one.
    published_bytes: int | None = None
    #: What its writers may fill.
    capacity_bytes: int = 0
    #: Length of its writers' file, as far as we know: what local writers do is seen when they are done.
    size_bytes: int = 0
    #: Being opened, completed or cancelled right now.
    busy: bool = False
    streams: int = 0

    @property
    def reserved_bytes(self) -> int:
        """Space promised to its writers and not used yet."""
        return max(0, self.capacity_bytes - self.size_bytes) if self.streams else 0


@dataclass(frozen=True, slots=True)
class OpenWrite:
    """A block open for writing: the file to fill, a descriptor of it when one was asked for, and what
    :meth:`BlockStore.writing` wants to see."""

    path: str
    fd: int | None
    generation: object


@dataclass(frozen=True, slots=True)
class OpenBlock:
    """A block open for reading. ``path`` is the published file, None while only its writer's file exists;
    ``announced_bytes`` is what a version says that goes by its files."""

    fd: int
    path: str | None
    length_bytes: int
    announced_bytes: int


@dataclass(frozen=True, slots=True)
class Space:
    """Figures of one storage directory, in bytes (StorageInfoProto). Used are the lengths of all its block files."""

    capacity_bytes: int
    available_bytes: int
    used_bytes: int
    other_used_bytes: int
    reserved_bytes: int


class BlockStore:
    """The blocks below one data directory. ``owner_of`` finds a block in the namespace; ``capacity_bytes`` bounds what
    the blocks may take, None means: as much as the file system gives."""

    def __init__(
        self,
        layout: Layout,
        owner_of: Callable[[int], Block | None],
        world: World,
        behaviour: Behaviour,
        *,
        capacity_bytes: int | None = None,
    ) -> None:
        self.layout = layout
        self._owner_of = owner_of
        self._world = world
        self._behaviour = behaviour
        self._disk = world.disk
        self._capacity_bytes = capacity_bytes
        self._writing: dict[int, _Writing] = {}
        self._made_dirs: set[str] = set()
        self._used_bytes = 0

    def start(self, metadata: MetaStore) -> StorageVersion:
        """Make the layout, drop what is left over, count what is there. Slow; before anything else is called."""
        version = self.layout.prepare(self._world)
        self._sweep(metadata)
        for paths in self.layout.committed(self._disk):
            known = metadata.known_blocks(paths)
            for block_id, path in paths.items():
                if block_id in known:
                    self._used_bytes += self._counted_bytes(block_id, self._size(path) or 0)
                else:
                    self.unlink(path)
        return version

    def _sweep(self, metadata: MetaStore) -> None:
        staged = list(self.layout.staged(self._disk))
        known = metadata.known_blocks([block_id for _, block_id in staged if block_id is not None])
        for path, block_id in staged:
            if block_id not in known or self._disk.exists(self.layout.active(block_id)):
                self.unlink(path)
            else:
                self._note_writing(block_id, self._size(path) or 0)

    def _note_writing(self, block_id: int, size_bytes: int) -> _Writing:
        """Take a block for one that is being written, until it is completed or cancelled."""
        return self._writing.setdefault(block_id, _Writing(size_bytes=size_bytes))

    # ------------------------------------------------------------------------------------------------------- space

    def space(self) -> Space:
        found = self._disk.statvfs(self.layout.root)
        total = found.f_blocks * found.f_frsize
        free = found.f_bavail * found.f_frsize
        writing = list(self._writing.values())  # threads open blocks
        reserved = sum(one.reserved_bytes for one in writing)
        used = self._used_bytes + sum(map(self._unfinished_bytes, writing))
        capacity = total
        if self._capacity_bytes is not None:
            capacity = min(total, self._capacity_bytes)
            free = min(free, capacity - used)
        other = total - found.f_bfree * found.f_frsize - used
        return Space(capacity, max(0, free - reserved), used, max(0, other), reserved)

    def _unfinished_bytes(self, writing: _Writing) -> int:
        """What the file of a block's writers counts as used, beside the published one."""
        return writing.size_bytes

    def held_bytes(self, block_id: int) -> int | None:
        """Physical length of a block, published or being written; None when there is none."""
        for path in (self.layout.active(block_id), self.layout.staging(block_id)):
            size_bytes = self._size(path)
            if size_bytes is not None:
                return size_bytes
        return None

    # ----------------------------------------------------------------------------------------------------- writing

    def needs_copy(self, block_id: int) -> bool:
        """Whether :meth:`begin` has to copy a published block."""
        return block_id not in self._writing and self._disk.exists(self.layout.active(block_id))

    def writer_path(self, block_id: int) -> str:
        """The file that a block's writer fills."""
        return self.layout.staging(block_id)

    def begin(self, block_id: int, capacity_bytes: int, alloc: AllocOptions | None, *, lend: bool) -> OpenWrite:
        """Open a block for a writer: make or find its file, reserve space, apply a pending allocation. ``lend`` a
        descriptor of it, which the caller closes.

        Slow where a published block has to be copied.
        """
        writing = self._writing.get(block_id)
        added = capacity_bytes - (writing.size_bytes + writing.reserved_bytes if writing else 0)
        if added > 0 and self.space().available_bytes < added:
            raise common(f"Not enough space in storage dir for block {block_id}: {capacity_bytes} bytes are needed")
        path = self.writer_path(block_id)
        fd: int | None = None
        try:
            if writing is None:
                writing = self._writing[block_id] = _Writing(busy=True)
                try:
                    fd = self._make_writer_file(block_id, path, alloc, writing)
                except BaseException:
                    del self._writing[block_id]
                    raise
                writing.busy = False
            with self._busy(block_id, writing):
                if alloc is not None:
                    self._allocate(path, capacity_bytes, alloc)
                    writing.size_bytes = alloc.length_bytes
            if lend and fd is None:
                fd = self._open_staging(block_id)
        except BaseException:
            if fd is not None:
                self._disk.close(fd)
            raise
        if fd is not None and not lend:
            self._disk.close(fd)
        writing.streams += 1
        writing.capacity_bytes = capacity_bytes
        return OpenWrite(path, fd if lend else None, writing)

    def _make_writer_file(self, block_id: int, path: str, alloc: AllocOptions | None, writing: _Writing) -> int | None:
        """Create the staging file and note how long it is; its descriptor, when it is an empty one, else it starts as
        a copy of the published block."""
        source = self.layout.active(block_id)
        with os_errors(f"opening block {block_id}"):
            try:
                published = self._disk.open(source, os.O_RDONLY)
            except FileNotFoundError:
                return self._disk.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL)
            try:
                published_bytes = length_bytes = self._disk.fstat(published).st_size
                if alloc is not None and alloc.truncate:
                    length_bytes = min(length_bytes, alloc.length_bytes)
                copy = self.layout.copy(block_id)
                try:
                    self._copy(published, copy, length_bytes)
                    self._disk.rename(copy, path)
                except BaseException:
                    self.unlink(copy)  # it may be what filled the disk
                    raise
            finally:
                self._disk.close(published)
        writing.published_bytes, writing.size_bytes = published_bytes, self._size(path) or 0
        return None

    def _copy(self, source: int, target_path: str, length_bytes: int) -> None:
        """Copy; where the source has a whole piece of zeros, the target has a hole."""
        target = self._disk.open(target_path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        try:
            buffer = bytearray(min(_COPY_BYTES, length_bytes))
            zeros = bytes(len(buffer))
            view = memoryview(buffer)
            done = 0
            while done < length_bytes:
                part = view[: length_bytes - done]
                count = self._disk.pread_full(source, part, done)
                if count == 0:
                    break
                if count < len(zeros) or buffer != zeros:
                    self._disk.pwrite_full(target, part[:count], done)
                done += count
            self._disk.ftruncate(target, done)
        finally:
            self._disk.close(target)

    def _allocate(self, path: str, capacity_bytes: int, alloc: AllocOptions) -> None:
        if not 0 <= alloc.length_bytes <= capacity_bytes:
            raise common(f"allocation of {alloc.length_bytes} bytes exceeds block size {capacity_bytes}")
        with os_errors(f"resizing {path}"):
            fd = self._disk.open(path, os.O_WRONLY)
            try:
                size_bytes = self._disk.fstat(fd).st_size
                if not alloc.truncate and size_bytes > alloc.length_bytes:
                    raise common(f"Block length mismatch, expected: {alloc.length_bytes}, actual: {size_bytes}")
                if size_bytes != alloc.length_bytes:
                    self._disk.ftruncate(fd, alloc.length_bytes)
            finally:
                self._disk.close(fd)

    def _open_staging(self, block_id: int) -> int:
        """A descriptor of the file that a block's writers fill."""
        with os_errors(f"opening block {block_id}"):
            return self._disk.open(self.writer_path(block_id), os.O_WRONLY)

    @contextmanager
    def writing(self, block_id: int, generation: object) -> Iterator[None]:
        """Around writes through a descriptor that :meth:`begin` lent: OSError becomes an error to answer with. Refuses
        writers whose block another one has finished, for readers have it now."""
        if self._writing.get(block_id) is not generation and self._owner_of(block_id) is not None:
            raise common(f"Block {block_id} was completed or cancelled by another stream; open it again")
        with os_errors(f"writing block {block_id}"):
            yield

    def wrote(self, block_id: int, end_bytes: int) -> None:
        """A writer has filled the block up to ``end_bytes``: that much is no longer reserved but used."""
        writing = self._writing.get(block_id)
        if writing is not None:
            writing.size_bytes = max(writing.size_bytes, end_bytes)

    def detach(self, block_id: int, generation: object) -> None:
        """A writer is gone without completing. The bytes stay for whoever opens the block next; the space that was
        kept for it does not."""
        writing = self._writing.get(block_id)
        if writing is not None and writing is generation:
            writing.streams -= 1
            if writing.streams == 0:
                with suppress(OSError):  # what was known last counts on; what was to go goes with the next start
                    writing.size_bytes = self._size(self.writer_path(block_id)) or 0
                    self.remove_if_unowned(block_id)

    def remove_if_unowned(self, block_id: int) -> None:
        """Remove a block that nobody is writing if no file owns it: :meth:`retire` leaves it to its writers."""
        writing = self._writing.get(block_id)
        if (writing is None or not (writing.streams or writing.busy)) and self._owner_of(block_id) is None:
            self.remove(block_id)

    def complete(self, block_id: int, length_bytes: int, capacity_bytes: int) -> None:
        """Publish a block whose file must be whole. Repeating it with the same length is fine."""
        if self._owner_of(block_id) is None:
            # Its file was deleted or truncated meanwhile; the writer hears of it from the master.
            self.remove(block_id)
            return
        staging, active = self.layout.staging(block_id), self.layout.active(block_id)
        size_bytes = self._size(staging)
        known = self._writing.get(block_id)
        published_bytes = self._size(active) if known is None or size_bytes is None else known.published_bytes
        if size_bytes is None:
            if published_bytes is None:
                raise self._not_found(block_id)
            if published_bytes != length_bytes:
                raise mismatch(block_id, length_bytes, published_bytes)
            return
        writing = self._note_writing(block_id, size_bytes)
        with self._busy(block_id, writing), os_errors(f"completing block {block_id}"):
            if not 0 <= length_bytes <= capacity_bytes:
                self._forget(block_id)
                self.unlink(staging)
                raise common(f"Block {block_id} of {length_bytes} bytes exceeds block size {capacity_bytes}")
            if size_bytes < length_bytes and published_bytes is not None:
                fd = self._open_staging(block_id)
                try:
                    self._disk.ftruncate(fd, length_bytes)
                finally:
                    self._disk.close(fd)
            elif size_bytes != length_bytes:
                raise mismatch(block_id, length_bytes, size_bytes)
            self._make_parent(block_id)
            self._disk.rename(staging, active)
            self._used_bytes += length_bytes - (published_bytes or 0)
            self._forget(block_id)

    def _make_parent(self, block_id: int) -> None:
        parent = self.layout.active_parent(block_id)
        if parent not in self._made_dirs:
            self._disk.makedirs(parent)
            self._made_dirs.add(parent)

    def cancel(self, block_id: int) -> None:
        """Drop what is being written. A published generation stays, unless no file of the namespace has taken it over
        yet (HEAD deletes it in either case when no rewrite is under way)."""
        writing = self._writing.get(block_id)
        if writing is not None:
            with self._busy(block_id, writing):
                self._forget(block_id)
                self.unlink(self.layout.staging(block_id))
            if self._owner_of(block_id) is None:
                self.remove(block_id)
            return
        owner = self._owner_of(block_id)
        if owner is None or not owner.locations:
            self.remove(block_id)

    def retire(self, block_id: int) -> list[str]:
        """Take a block that no file owns any more out of sight; whoever has it open keeps it. Returns the files to
        unlink, which is slow for large ones. A block that is being opened goes when its writer does."""
        writing = self._writing.get(block_id)
        if writing is not None and writing.busy:
            return []
        return self._take_away(block_id)

    def remove(self, block_id: int) -> None:
        """Remove a block that no file owns any more, at once."""
        for path in self._take_away(block_id):
            self.unlink(path)

    def _take_away(self, block_id: int) -> list[str]:
        active = self.layout.active(block_id)
        size_bytes = self._size(active)
        if size_bytes is not None:
            self._used_bytes = max(0, self._used_bytes - self._counted_bytes(block_id, size_bytes))
        self._forget(block_id)
        gone: list[str] = []
        for path in (self.layout.staging(block_id), active):
            target = self.layout.gone(block_id, len(gone))
            try:
                self._disk.rename(path, target)
            except FileNotFoundError:
                continue
            gone.append(target)
        return gone

    def _counted_bytes(self, block_id: int, size_bytes: int) -> int:
        """What a published file of this length counts as used."""
        return size_bytes

    def _forget(self, block_id: int) -> None:
        self._writing.pop(block_id, None)

    @contextmanager
    def _busy(self, block_id: int, writing: _Writing) -> Iterator[None]:
        if writing.busy:
            raise common(f"Block {block_id} is being opened or finalized by another stream")
        writing.busy = True
        try:
            yield
        finally:
            writing.busy = False

    # ----------------------------------------------------------------------------------------------------- reading

    def open_read(self, block_id: int) -> OpenBlock:
        """Open a block for reading: the published generation, or the bytes so far of one that never was."""
        for path, published in ((self.layout.active(block_id), True), (self.layout.staging(block_id), False)):
            with os_errors(f"opening block {block_id}"):
                try:
                    fd = self._disk.open(path, os.O_RDONLY | os.O_NONBLOCK)  # a FIFO would keep everybody waiting
                except FileNotFoundError:
                    continue
                status = self._disk.fstat(fd)
                if not stat.S_ISREG(status.st_mode):
                    self._disk.close(fd)
                    raise refusal(IO, f"opening block {block_id}: {path} is no regular file")
                if published and status.st_size < self._committed_bytes(block_id):
                    self._disk.close(fd)
                    raise self._not_found(block_id, f" any more: its file has {status.st_size} bytes")
                return OpenBlock(fd, path if published else None, status.st_size, status.st_size)
        raise self._not_found(block_id)

    def _committed_bytes(self, block_id: int) -> int:
        """How long the published file must be, so that zeros are never taken for bytes that were lost; 0 where it may
        be shorter: it is being written, or was resized and does not know yet, or the version leaves that to clients."""
        if self._behaviour.read_length is ReadLength.PHYSICAL or block_id in self._writing:
            return 0
        owner = self._owner_of(block_id)
        return 0 if owner is None else owner.least_bytes

    # ------------------------------------------------------------------------------------------------------- files

    def _not_found(self, block_id: int, about: str = "") -> CurvfsError:
        kind = self._behaviour.block_not_found_kind
        # Clients know the untyped error by its words.
        words = f"block {block_id} not exists" if kind == COMMON else f"Block {block_id} not found"
        return refusal(kind, words + about)

    def _size(self, path: str) -> int | None:
        try:
            return self._disk.stat(path).st_size
        except FileNotFoundError:
            return None

    def unlink(self, path: str) -> None:
        """Unlink a file, if it is there."""
        with suppress(FileNotFoundError):
            self._disk.unlink(path)


def mismatch(block_id: int, expected: int, actual: int) -> CurvfsError:
    return common(f"Block {block_id} length mismatch, expected: {expected}, actual: {actual}")


@contextmanager
def os_errors(doing: str) -> Iterator[None]:
    """OSError becomes an error reply: no space with its own kind, the rest with its reason."""
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise refusal(OUT_OF_SPACE, f"{doing}: no space left on the worker's disk") from error
        raise from_os_error(error, doing=doing) from error
