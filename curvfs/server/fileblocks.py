"""Files' blocks on the master: open, allocate, commit, resize and place (specification sections 4.4, 4.5, 4.10).

Two rules hold a file together. Every block but the last is exactly ``block_size`` long, or the file cannot be read. And
after every commit the file's length equals the sum of its blocks' lengths, or the request is refused. What section 13
lists as harmful is refused: commits of bytes that nobody wrote, resize modes that damage a block, and growing a file
whose shrinking has not reached the worker yet.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from curvfs.server.behaviour import Behaviour
from curvfs.server.draft import Draft
from curvfs.server.namespace import ACCESS_MODE, CREATE, TRUNCATE, AttrChange, Namespace, NodeOptions, with_writer
from curvfs.server.records import BLOCK_BITS, AllocOptions, Block, Inode, Kind, Location
from curvfs.server.refusals import (
    COMMON,
    INVALID_ARGUMENT,
    INVALID_FILE_SIZE,
    OUT_OF_SPACE,
    common,
    not_found,
    refusal,
)
from curvfs.units import PIB

MAX_FILE_BYTES = PIB

#: Blocks that one ResizeFile may add; far beyond that the reply alone would not fit a frame.
MAX_RESIZE_BLOCKS = 65_536

# Allocation modes (section 3.2).
MODE_DEFAULT = 0
MODE_KEEP_SIZE = 1
MODE_ZERO_RANGE = 16


class Workers(Protocol):
    """What the master needs to know of its workers."""

    def place(self, size_bytes: int, hostname: str, exclude: Sequence[int], count: int) -> tuple[int, ...]:
        """Ids of up to ``count`` live workers with more than ``size_bytes`` free; the one on ``hostname`` first."""

    def knows(self, worker_id: int) -> bool: ...

    def available_bytes(self) -> int: ...

    def held_bytes(self, worker_id: int, block_id: int) -> int | None:
        """Physical length of a block on a worker, None where it has none."""


@dataclass(frozen=True, slots=True)
class Commit:
    """CommitBlockProto: a block that a writer has finished on its workers."""

    block_id: int
    length_bytes: int
    locations: tuple[Location, ...]


@dataclass(frozen=True, slots=True)
class Placed:
    """A block with the workers to show for it."""

    block: Block
    workers: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Resize:
    """FileAllocOptsProto as ResizeFile sends it."""

    truncate: bool
    offset_bytes: int
    length_bytes: int
    mode: int


class FileBlocks:
    """Block operations over a namespace."""

    def __init__(self, namespace: Namespace, workers: Workers, behaviour: Behaviour) -> None:
        self._behaviour = behaviour
        self._tree = namespace
        self._store = namespace.store
        self._workers = workers

    # ----------------------------------------------------------------------------------------------------- reading

    def locate(self, path: str) -> tuple[Inode, list[Placed]]:
        """GetBlockLocations: a file and its blocks with committed locations."""
        inode = self._tree.get(path)
        return inode, self.placed(inode)

    def placed(self, inode: Inode) -> list[Placed]:
        """All blocks of a file; refuses a file that cannot be read."""
        if inode.is_dir:
            raise common("Not a file")
        blocks = self._store.blocks(inode.id)
        for block in blocks[:-1]:
            if block.length_bytes != inode.block_size_bytes:
                raise common(
                    f"block status abnormal, block id {block.id}, block len {block.length_bytes}, "
                    f"expected block size {inode.block_size_bytes}"
                )
        return [self._committed(block) for block in blocks]

    def _committed(self, block: Block) -> Placed:
        knows = self._workers.knows
        workers = tuple(location.worker_id for location in block.locations if knows(location.worker_id))
        if block.locations and not workers:
            raise common(f"block {block.id}: all replicas has been lost")
        return Placed(block, workers)

    def _resolve(self, path: str, inode_id: int) -> Inode:
        """The file that AddBlock and CompleteFile mean: by inode id where given, so that renames do not matter."""
        inode = self._store.inode(inode_id) if inode_id > 0 else self._tree.find(path)
        if inode is None:
            kind = self._behaviour.missing_writer_file_kind
            raise common(f"File {path} not exists") if kind == COMMON else refusal(kind, f"File {path} not found")
        if inode.is_dir:
            raise common("Not a file")
        self._tree.need_regular(path, inode)
        return inode

    # ----------------------------------------------------------------------------------------------------- writing

    def open_file(self, path: str, options: NodeOptions, flags: int) -> tuple[Inode, list[Placed]]:
        """OpenFile. EXCL is not looked at where the file exists; CreateFile honours it."""
        if flags & ACCESS_MODE == 0:
            return self.locate(path)
        inode = self._tree.find(path)
        if inode is None:
            if flags & CREATE:
                return self._tree.create(path, options, flags), []
            raise not_found(path)
        if inode.is_dir:
            raise common(f"{path} is a directory")
        self._tree.need_regular(path, inode)
        draft = self._tree.draft()
        if flags & TRUNCATE:
            fresh = self._tree.overwrite(draft, path, inode, options)
            self._tree.commit(draft)
            return fresh, []
        placed = self.placed(inode)
        writers = with_writer(inode.writers, options.writer)
        if writers is not inode.writers:
            inode = inode._replace(writers=writers)
            draft.put(inode)
            self._tree.commit(draft)
        return inode, placed

    def add_block(
        self,
        path: str,
        inode_id: int,
        last_block: int | None,
        file_length_bytes: int,
        commits: Sequence[Commit],
        exclude: Sequence[int],
        hostname: str,
    ) -> tuple[Inode, Placed]:
        """AddBlock. Where a later block exists already, that one is the answer and nothing is committed."""
        inode = self._resolve(path, inode_id)
        existing = self._store.block_after(inode.id, last_block)
        if existing is not None:
            return inode, self._committed(existing)
        workers = self._place(inode, exclude, hostname)
        draft = self._tree.draft()
        inode = self._settle(draft, inode, file_length_bytes, commits)
        if inode.next_block >> BLOCK_BITS:
            raise refusal(INVALID_FILE_SIZE, f"{path} has no block number left; write a new file")
        block = Block(id=(inode.id << BLOCK_BITS) | inode.next_block, planned=workers)
        inode = draft.append_block(inode, block)
        self._tree.commit(draft)
        return inode, Placed(block, workers)

    def _place(self, inode: Inode, exclude: Sequence[int], hostname: str) -> tuple[int, ...]:
        workers = self._workers.place(inode.block_size_bytes, hostname, exclude, inode.replicas)
        if not workers:
            raise common("No available worker found")
        return workers

    def complete(
        self,
        path: str,
        inode_id: int,
        length_bytes: int,
        writer: str,
        commits: Sequence[Commit],
        only_flush: bool,
        attrs: AttrChange | None,
    ) -> Inode:
        """CompleteFile: publish commits and length; unless flushing, the writer is done."""
        inode = self._resolve(path, inode_id)
        draft = self._tree.draft()
        inode = draft.touch(self._settle(draft, inode, length_bytes, commits))
        if not only_flush:
            inode = inode._replace(writers=tuple(name for name in inode.writers if name != writer))
        draft.put(inode)
        if attrs is not None and not only_flush:
            inode = self._tree.with_attrs(draft, inode, attrs)
        self._tree.commit(draft)
        return inode

    def _settle(self, draft: Draft, inode: Inode, length_bytes: int, commits: Sequence[Commit]) -> Inode:
        """Apply commits and a length, and hold the length rule."""
        fresh: dict[int, Block] = {}
        total = inode.blocks_bytes
        for commit in commits:
            block = fresh.get(commit.block_id) or self._store.block(commit.block_id)
            if block is None or block.inode_id != inode.id:
                raise common(f"Not found block, block_id = {commit.block_id}")
            self._check_commit(inode, block, commit)
            grown = max(block.length_bytes, commit.length_bytes)
            total += grown - block.length_bytes
            locations = block.locations + tuple(one for one in commit.locations if one not in block.locations)
            stored = commit.length_bytes if commit.locations else block.least_bytes
            fresh[block.id] = Block(block.id, grown, None, (), locations).stored_to(stored)
        length_bytes = max(inode.length_bytes, length_bytes)
        if length_bytes != total:
            raise common(f"Complete len is not equal to file len, complete_len = {total}, file_len = {length_bytes}")
        for block in fresh.values():
            draft.put_block(block)
        return inode._replace(length_bytes=length_bytes, blocks_bytes=total)

    def _check_commit(self, inode: Inode, block: Block, commit: Commit) -> None:
        """Refuse commits of bytes that no worker can have (section 13, item 3)."""
        for location in commit.locations:
            if not self._workers.knows(location.worker_id):
                raise refusal(
                    INVALID_ARGUMENT, f"commit of block {block.id} names an unknown worker {location.worker_id}"
                )
        if not 0 <= commit.length_bytes <= inode.block_size_bytes:
            raise refusal(
                INVALID_ARGUMENT,
                f"commit of block {block.id} with {commit.length_bytes} bytes; its file has blocks of "
                f"{inode.block_size_bytes}",
            )
        if commit.locations:
            return
        if commit.length_bytes > block.length_bytes or (block.length_bytes and not block.locations):
            raise refusal(INVALID_ARGUMENT, f"commit of block {block.id} names no worker that holds its bytes")

    # ---------------------------------------------------------------------------------------------------- resizing

    def resize(self, path: str, options: Resize) -> tuple[Inode, list[Placed]]:
        """ResizeFile: truncate or extend; what grows is holes, what shrinks is applied by the caller at the worker."""
        inode = self._tree.find(path)
        if inode is None:
            raise common(f"File {path} not exists")
        if inode.is_dir:
            raise common("Not a file")
        self._tree.need_regular(path, inode)
        self._check_resize(inode, options)
        length_bytes = options.length_bytes
        if length_bytes != inode.length_bytes:
            draft = self._tree.draft()
            if length_bytes < inode.length_bytes:
                inode = self._shrink(draft, inode, options)
            else:
                inode = self._extend(draft, inode, options)
            inode = draft.touch(inode)._replace(length_bytes=length_bytes)
            draft.put(inode)
            self._tree.commit(draft)
        return inode, self.placed(inode)

    def _check_resize(self, inode: Inode, options: Resize) -> None:
        if options.offset_bytes != 0:
            raise common(f"off must be 0, got {options.offset_bytes}")
        if options.length_bytes < 0:
            raise common(f"len must be >= 0, got {options.length_bytes}")
        if options.length_bytes > MAX_FILE_BYTES:
            raise refusal(
                INVALID_FILE_SIZE,
                f"file size {options.length_bytes} exceeds maximum supported size {MAX_FILE_BYTES}",
            )
        if options.truncate:
            return
        if options.mode & ~(MODE_KEEP_SIZE | MODE_ZERO_RANGE):
            raise common(f"mode must be DEFAULT (0) or ZERO_RANGE (16) for allocate operation, got {options.mode}")
        # From here on HEAD does harm (section 13, item 4).
        if options.mode & MODE_ZERO_RANGE:
            raise refusal(INVALID_ARGUMENT, "ZERO_RANGE is not supported: write zeros instead")
        if options.length_bytes < inode.length_bytes:
            raise refusal(INVALID_ARGUMENT, "allocation cannot shrink a file: use truncate")
        if (options.length_bytes - inode.length_bytes) * inode.replicas > self._workers.available_bytes():
            raise refusal(OUT_OF_SPACE, f"No space for a file of {options.length_bytes} bytes")

    def _shrink(self, draft: Draft, inode: Inode, options: Resize) -> Inode:
        keep, rest = divmod(options.length_bytes, inode.block_size_bytes)
        blocks = self._store.blocks(inode.id)
        draft.drop_blocks(inode.id, first=keep + (1 if rest else 0))
        kept_bytes = sum(block.length_bytes for block in blocks[:keep])
        if rest and keep < len(blocks):
            tail = blocks[keep]
            alloc = AllocOptions(options.truncate, rest, options.mode)
            draft.put_block(tail._replace(length_bytes=rest, alloc=alloc, stored_bytes=None))
            kept_bytes += rest
        return inode._replace(blocks_bytes=kept_bytes)

    def _extend(self, draft: Draft, inode: Inode, options: Resize) -> Inode:
        length_bytes, block_size = options.length_bytes, inode.block_size_bytes
        blocks = self._store.blocks(inode.id)
        added = -(-length_bytes // block_size) - len(blocks)
        if added > MAX_RESIZE_BLOCKS or (inode.next_block + added) >> BLOCK_BITS:
            raise refusal(
                INVALID_FILE_SIZE,
                f"{length_bytes} bytes need {added} more blocks of {block_size}; make the file with larger blocks",
            )
        if blocks:
            start = (len(blocks) - 1) * block_size
            tail = blocks[-1]
            self._check_shrunk(tail)
            grown = min(block_size, length_bytes - start)
            waits = tail.alloc is not None or self._behaviour.grown_tail_waits
            alloc = AllocOptions(options.truncate, grown, options.mode) if waits else None
            longer = tail._replace(length_bytes=grown, alloc=alloc, stored_bytes=None)
            draft.put_block(longer if waits else longer.stored_to(tail.least_bytes))
            inode = inode._replace(blocks_bytes=inode.blocks_bytes + grown - tail.length_bytes)
        for index in range(len(blocks), len(blocks) + added):
            size_bytes = min(block_size, length_bytes - index * block_size)
            hole = Block(
                id=(inode.id << BLOCK_BITS) | inode.next_block,
                length_bytes=size_bytes,
                alloc=AllocOptions(options.truncate, size_bytes, options.mode),
            )
            inode = draft.append_block(inode, hole)
        return inode

    def _check_shrunk(self, block: Block) -> None:
        """Refuse to grow a block that still holds, on a worker, the bytes that a truncation cut off: they would come
        back (section 13, item 5)."""
        if block.alloc is None:
            return
        for location in block.locations:
            held = self._workers.held_bytes(location.worker_id, block.id)
            if held is not None and held > block.length_bytes:
                raise refusal(
                    INVALID_ARGUMENT,
                    f"block {block.id} was truncated to {block.length_bytes} bytes and worker {location.worker_id} "
                    "does not know it yet: open and complete the block there first",
                )

    # ----------------------------------------------------------------------------------------------------- placing

    def assign(self, path: str, block_id: int, exclude: Sequence[int], hostname: str) -> Placed:
        """AssignWorker: choose workers for a hole; what was chosen before stays the choice."""
        inode = self._tree.find(path)
        if inode is None:
            raise common(f"File {path} not exists")
        if inode.kind != Kind.FILE:
            raise common("Not a file")
        block = self._store.block(block_id)
        if block is None or block.inode_id != inode.id:
            raise common(f"Not found block, block_id = {block_id}")
        if block.locations:
            return self._committed(block)
        if block.planned and not set(block.planned).intersection(exclude):
            return Placed(block, block.planned)
        workers = self._place(inode, exclude, hostname)
        draft = self._tree.draft()
        block = block._replace(planned=workers)
        draft.put_block(block)
        self._tree.commit(draft)
        return Placed(block, workers)
