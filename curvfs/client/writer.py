"""Writing files (specification 4.6, 4.8 to 4.10).

Block i of a file holds bytes [i * block size, (i + 1) * block size), and every block but the last must be full before
the next one is added. What was completed on workers is *committed* with the next call to the master; commits are kept
and sent again until one has certainly taken them: an AddBlock that answers with a block that is there already does not
(4.5 rule 2).
"""

from __future__ import annotations

import errno
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Self

import trio

from curvfs.client import convert
from curvfs.client.blockwrite import BlockWriter, write_whole
from curvfs.client.convert import located as located_from_wire
from curvfs.client.mastercalls import MasterCalls
from curvfs.client.paths import normalize
from curvfs.client.reader import FileReader
from curvfs.client.records import FileStatus
from curvfs.client.session import Session
from curvfs.errors import (
    CurvfsError,
    FileTooLarge,
    InProgress,
    InvalidRequest,
    NoAvailableWorker,
    RemoteError,
    RemoteProtocolError,
    TransportError,
)
from curvfs.net.cluster import Progress
from curvfs.quicklock import QuickLock
from curvfs.units import KIB, PIB
from curvfs.wire.messages import pb
from curvfs.world import Buffer

#: Block streams kept open; the oldest is completed when another one is needed (4.8).
_MAX_OPEN_BLOCKS = 10
#: How often a new block that no worker takes is placed anew.
_PLACEMENTS = 3
#: A file that is written at once goes to its workers in one exchange when it has at most so many bytes.
SMALL_BYTES = 64 * KIB
#: No file is longer.
MAX_LENGTH_BYTES = PIB


class FileWriter:
    """A file open for writing. An async context manager: a clean exit closes, an error aborts.

    Calls from several tasks are done one after the other. After a failed write the bytes of the block at hand are
    undefined: abort, or close and look at what it raises.
    """

    def __init__(
        self,
        session: Session,
        calls: MasterCalls,
        full_path: str,
        status: FileStatus,
        blocks: Sequence[pb.LocatedBlockProto],
        *,
        created: bool,
        alone: bool,
        append: bool = False,
        ahead: bool = False,
    ) -> None:
        """``created``: by this call. ``alone``: nobody else had the file open for writing when it was opened.
        ``ahead``: the blocks were added with the file, and nothing has been written to them."""
        self._session = session
        self._calls = calls
        self._full_path = full_path
        self._path = status.path
        self._status = status
        self._block_size = status.block_size_bytes
        self._blocks: list[pb.LocatedBlockProto] = list(blocks)
        self._open: dict[int, BlockWriter] = {}
        #: Blocks that the master has no location of yet.
        self._uncommitted: set[int] = {located.block.id for located in blocks} if ahead else set()
        #: Of these, the ones that nothing has been tried with.
        self._unwritten = set(self._uncommitted)
        #: Blocks completed on workers that the master may not have been told of, by id.
        self._commits: dict[int, pb.CommitBlockProto] = {}
        self._length = status.length_bytes
        self._published_length = status.length_bytes
        self._position = self._length if append else 0
        self._append = append
        self._alone = alone
        self._touched = created
        self._reader: FileReader | None = None
        #: Attributes that the master has not been told of yet.
        self._attributes: pb.SetAttrOptsProto | None = None
        self._lock = QuickLock()
        self._closed = False

    # ------------------------------------------------------------------------------------------------------ state

    @property
    def status(self) -> FileStatus:
        """As it was when the file was opened."""
        return self._status

    @property
    def path(self) -> str:
        """The name the file goes by, for messages and resizing; see :meth:`moved_to`."""
        return self._path

    @property
    def position(self) -> int:
        """Where :meth:`write` goes on."""
        return self._position

    @property
    def length_bytes(self) -> int:
        """Length with everything written so far."""
        return self._length

    @property
    def closed(self) -> bool:
        """Closed or aborted: nothing can be written any more."""
        return self._closed

    @property
    def takes_whole(self) -> bool:
        """Nothing has been written yet to a file that was made for this writer: :meth:`write_whole` takes few bytes
        in one exchange."""
        return self._length == 0 and not (self._open or self._commits or len(self._blocks) > len(self._uncommitted))

    @property
    def has_attributes(self) -> bool:
        """Attributes given with :meth:`give_attributes` that the master has not been told of."""
        return self._attributes is not None

    def moved_to(self, path: str) -> None:
        """The file was renamed to ``path`` while it is open: resizing, and everything on v0.3.2-alpha, knows a file by
        its path alone."""
        root = self._full_path.removesuffix(self._path)
        self._path = normalize(path)
        self._full_path = root + self._path

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, kind: object, error: object, traceback: object) -> None:
        if error is not None:
            await self.abort()
            return
        try:
            await self.close()
        except BaseException:
            await self.abort()
            raise

    # ---------------------------------------------------------------------------------------------------- writing

    async def write(self, buffer: Buffer) -> int:
        """Write all of ``buffer`` at the position, or at the end in append mode; returns its length."""
        async with self._lock:
            await self._write(buffer, self._length if self._append else self._position)
        return memoryview(buffer).nbytes

    async def write_at(self, buffer: Buffer, offset_bytes: int) -> int:
        """Write all of ``buffer`` at ``offset_bytes``, and leave the position behind it. In append mode the offset
        is ignored, as ``O_APPEND`` has it."""
        if offset_bytes < 0:
            raise InvalidRequest(f"Cannot write {self._full_path} at offset {offset_bytes}: it is negative.")
        check_length(offset_bytes, self._full_path)
        async with self._lock:
            await self._write(buffer, self._length if self._append else offset_bytes)
        return memoryview(buffer).nbytes

    async def write_whole(self, buffer: Buffer) -> None:
        """Write to the beginning of a file that has no bytes yet. At most :data:`SMALL_BYTES` are written and completed
        in one exchange with each worker; what comes behind them later has the block copied, as after a flush."""
        async with self._lock:
            self._check_open()
            view = memoryview(buffer).cast("B")
            if not self.takes_whole or not 0 < len(view) <= min(SMALL_BYTES, self._block_size):
                await self._write(view, 0)
                return
            self._touched = True
            if not self._blocks:
                self._blocks.append(await self._new_block())
            located = self._blocks[0]
            block_id = located.block.id
            self._unwritten.discard(block_id)
            left = any((worker.worker_id, block_id) in self._session.dropped_streams for worker in located.locs)
            if left or not located.locs or block_id in self._session.hung_blocks:
                await self._write(view, 0)
                return
            try:
                commit = await write_whole(self._session, located, view, capacity_bytes=self._block_size)
            except (RemoteError, TransportError, RemoteProtocolError):
                await self._write(view, 0)  # other workers may take it, and else say why not
                return
            self._length = self._position = len(view)
            self._completed(located, commit)

    async def _write(self, buffer: Buffer, offset: int) -> None:
        self._check_open()
        view = memoryview(buffer).cast("B")
        check_length(offset + len(view), self._full_path)
        self._touched = True
        await self._forget_reader()
        if len(view) and offset > self._length and offset // self._block_size >= len(self._blocks):
            await self._resize(offset)  # beyond the last block: what lies between becomes holes
        while len(view):
            index, inside = divmod(offset, self._block_size)
            writer = self._open.get(index) or await self._open_block(index, inside)
            piece = view[: self._block_size - inside]
            await writer.write(piece, inside)
            self._blocks[index].block.block_size = writer.length_bytes
            offset += len(piece)
            self._length = max(self._length, offset)
            view = view[len(piece) :]
        self._position = offset

    async def _open_block(self, index: int, inside: int) -> BlockWriter:
        while len(self._open) >= _MAX_OPEN_BLOCKS:
            await self._complete(next(iter(self._open)))
        if index < len(self._blocks):
            located = self._blocks[index]
            if located.block.id in self._uncommitted and not located.block.block_size:
                writer = self._open[index] = await self._open_new(located)
                return writer
            if not located.locs:
                await self._place(located)
            try:
                writer = await self._open_placed(located, inside)
            except TransportError:
                # The server may be starting anew: its master answers when it has, and then so does its worker.
                await self._calls.status(self._full_path)
                writer = await self._open_placed(located, inside)
        else:
            await self._complete_longer()
            located = await self._new_block()
            self._blocks.append(located)
            writer = await self._open_new(located)
        self._open[index] = writer
        return writer

    async def _open_placed(self, located: pb.LocatedBlockProto, inside: int) -> BlockWriter:
        return await BlockWriter.open(
            self._session,
            located,
            offset_bytes=inside,
            capacity_bytes=self._block_size,
            new=located.block.id in self._uncommitted,
        )

    async def _place(self, located: pb.LocatedBlockProto) -> None:
        """Find workers for a block that has none (the table of 4.4)."""
        hole = located.block.HasField("alloc_opts")
        if not hole and located.block.block_size > 0:
            await self._find_lost(located)
            return
        block = located.block
        if not hole and not self._alone and block.id not in self._uncommitted:
            # Allocated by somebody who may be writing it: two writers of one block mix their bytes (hazard 3).
            raise InProgress(
                f"Cannot write {self._full_path}: another client is writing its block {block.id}; "
                "wait until it has closed the file."
            )
        abandoned = not hole and block.id not in self._uncommitted
        answer = await self._calls.assign_worker(self._full_path, block)
        if abandoned:  # whoever wrote it may have left bytes behind
            self._session.dropped_streams.update((worker.worker_id, block.id) for worker in answer.locs)
        # The first answer counts: a second one would name other workers (4.10).
        located.locs.extend(answer.locs)
        if not hole:
            self._uncommitted.add(block.id)

    async def _find_lost(self, located: pb.LocatedBlockProto) -> None:
        """Wait for a block that a new leader has not heard of from its workers yet (5.1)."""
        while await self._session.masters.wait_unsettled():
            for found in (await self._calls.block_locations(self._full_path)).block_locs:
                if found.block.id == located.block.id and found.locs:
                    located.CopyFrom(found)
                    return
        raise NoAvailableWorker(
            f"Cannot write {self._full_path}: all replicas of its block {located.block.id} are lost or not up."
        )

    async def _new_block(self) -> pb.LocatedBlockProto:
        """The next block, as the master placed it."""
        progress = Progress()
        located = await self._calls.add_block(
            self._full_path,
            self._status.id,
            file_length_bytes=self._length,
            last_block=self._blocks[-1].block if self._blocks else None,
            commits=list(self._commits.values()),
            progress=progress,
        )
        ours = bool(located.locs) or (progress.uncertain and self._alone)
        if not ours or located.block.block_size > 0:
            raise InProgress(
                f"Cannot write {self._full_path}: another client is writing its next block {located.block.id}; "
                "write to different names, or one after the other."
            )
        if located.locs:
            self._commits.clear()  # only a fresh block has workers, and then the commits sent along were taken
        self._uncommitted.add(located.block.id)
        return located

    async def _open_new(self, located: pb.LocatedBlockProto) -> BlockWriter:
        """Open a block that nothing was written to, wherever it is taken."""
        self._unwritten.discard(located.block.id)
        for attempt in range(_PLACEMENTS):
            if not located.locs or attempt:
                # Ours, though its workers were lost with the answer; or none of them would take it.
                answer = await self._calls.assign_worker(self._full_path, located.block)
                del located.locs[:]
                located.locs.extend(answer.locs)
            try:
                return await BlockWriter.open(
                    self._session, located, offset_bytes=0, capacity_bytes=self._block_size, new=True
                )
            except (RemoteError, TransportError):
                if attempt == _PLACEMENTS - 1:
                    raise
        raise AssertionError("unreachable")

    async def _complete_longer(self) -> None:
        """Publish every open block that is longer than the master knows: before a block is added, the lengths of all
        blocks must sum up to the file's (4.4)."""
        for index in [index for index, writer in self._open.items() if writer.longer_than_committed]:
            await self._complete(index)

    async def _complete(self, index: int) -> None:
        writer, located = self._open[index], self._blocks[index]
        commit = await writer.complete()
        del self._open[index]
        self._completed(located, commit)

    def _completed(self, located: pb.LocatedBlockProto, commit: pb.CommitBlockProto) -> None:
        """A block is complete on its workers: the master must be told."""
        self._commits[commit.block_id] = commit
        self._uncommitted.discard(commit.block_id)
        held = {location.worker_id for location in commit.locations}
        kept = [worker for worker in located.locs if worker.worker_id in held]
        del located.locs[:]
        located.locs.extend(kept)
        located.block.block_size = commit.block_len
        located.block.ClearField("alloc_opts")

    # ------------------------------------------------------------------------------------------------- publishing

    async def flush(self) -> None:
        """Publish what was written so far: other clients see it, the file stays open. (Nothing is synced to disk: no
        Curvine call does that.) The next write to a block that is not full copies it first (4.8)."""
        async with self._lock:
            self._check_open()
            await self._flush()

    async def _flush(self) -> None:
        for index in list(self._open):
            await self._complete(index)
        if self._commits or self._length != self._published_length:
            await self._publish()

    async def _publish(self) -> None:
        await self._settle_attributes()
        answer = await self._calls.complete_file(
            self._full_path,
            self._status.id,
            length_bytes=self._length,
            commits=list(self._commits.values()),
            only_flush=True,
        )
        self._commits.clear()
        self._published_length = self._length
        if answer.HasField("file_blocks"):
            self._take_blocks(answer.file_blocks)

    def _take_blocks(self, answer: pb.FileBlocksProto) -> None:
        if answer.status.id != self._status.id:
            raise RemoteProtocolError(
                f"The master answered for file {answer.status.id} where {self._full_path} is {self._status.id}."
            )
        self._blocks = list(answer.block_locs)
        self._length = self._published_length = answer.status.len

    async def close(self, *, mtime_ms: int | None = None, atime_ms: int | None = None) -> None:
        """Publish and close; idempotent once it went well. May be called again when it failed.

        Closing sets the modification time to the server's now; the times given are set in the same call instead, and
        a file that nothing was written to keeps its own.
        """
        async with self._lock:
            if self._closed:
                return
            await self._forget_reader()
            await self._open_unwritten()
            for index in list(self._open):
                await self._complete(index)
            if not self._touched and mtime_ms is None:
                mtime_ms, atime_ms = self._status.mtime_ms, atime_ms or self._status.atime_ms
            times = _times(mtime_ms, atime_ms)
            if not self._session.knows_set_attr_on_close:
                await self._settle_attributes()
            await self._calls.complete_file(
                self._full_path,
                self._status.id,
                length_bytes=self._length,
                commits=list(self._commits.values()),
                only_flush=False,
                set_attr=_merged(self._attributes, times),
            )
            self._closed = True
            self._attributes = None
            if times is not None and not self._session.knows_set_attr_on_close:
                await self._calls.set_attr(self._full_path, times)

    def give_attributes(
        self, *, mode: int, owner: str, group: str, xattrs: Mapping[str, bytes], now_ms: int
    ) -> FileStatus:
        """Attributes for a file that was made before anybody knew what it would be: the closing call takes them along.
        Until then only :attr:`status`, which is the answer, has them; its times are ``now_ms``."""
        with convert.sendable(f"set attributes of {self._full_path}"):
            self._attributes = pb.SetAttrOptsProto(
                recursive=False, mode=mode & 0o7777, owner=owner, group=group, add_x_attr=dict(xattrs)
            )
        self._status = replace(
            self._status,
            mode=mode & 0o7777,
            owner=owner,
            group=group,
            xattrs={**self._status.xattrs, **xattrs},
            mtime_ms=now_ms,
            atime_ms=now_ms,
            ctime_ms=now_ms,
        )
        return self._status

    async def settle_attributes(self) -> FileStatus:
        """Tell the master now of what :meth:`give_attributes` was given; the file as it is then."""
        async with self._lock:
            self._check_open()
            await self._settle_attributes()
            return self._status

    async def _settle_attributes(self) -> None:
        if self._attributes is not None:
            status = await self._calls.set_attr(self._full_path, self._attributes)
            self._attributes = None
            self._status = convert.file_status(status, self._path)

    async def abort(self) -> None:
        """Drop what was not published, keep what was, and release the writer's name. Idempotent, never raises.

        Bytes that overwrote published ones may stay. A file made by this writer stays, as long as what was published.
        """
        if self._closed:
            return
        self._closed = True
        with trio.move_on_after(self._session.config.close_timeout_s, shield=True):
            await self._forget_reader()
            for index, writer in list(self._open.items()):
                located = self._blocks[index]
                try:
                    if not writer.new:
                        await self._complete(index)
                        continue
                except CurvfsError:
                    pass  # what it overwrote is undefined; its length is not
                located.block.block_size = writer.committed_bytes
                await writer.abandon()
            try:
                await self._calls.complete_file(
                    self._full_path,
                    self._status.id,
                    length_bytes=sum(located.block.block_size for located in self._blocks),
                    commits=list(self._commits.values()),
                    only_flush=False,
                )
            except CurvfsError:
                self._session.stats["aborts_unfinished"] += 1  # the name stays registered; nothing depends on it

    # ------------------------------------------------------------------------------------------- reading, resizing

    async def read_at(self, offset_bytes: int, length_bytes: int) -> bytes:
        """Bytes as written so far. What lies in a local block that is being written is read from there; else what
        there is to be published is published first."""
        async with self._lock:
            self._check_open()
            found = await self._read_open(offset_bytes, min(length_bytes, self._length - offset_bytes))
            if found is not None:
                return found
            await self._flush()
            if self._reader is None:
                answer = await self._calls.block_locations(self._full_path)
                self._reader = FileReader(
                    self._session, self._calls, self._full_path, located_from_wire(answer, self.path)
                )
            return await self._reader.read_at(offset_bytes, length_bytes)

    async def _read_open(self, offset_bytes: int, length_bytes: int) -> bytes | None:
        """Bytes of one block that is being written as a local file; else None. Publishing a block for every
        read would have the worker copy it for every write that follows."""
        if offset_bytes < 0:
            return None
        if length_bytes <= 0:
            return b""
        index, inside = divmod(offset_bytes, self._block_size)
        if inside + length_bytes > self._block_size or index not in self._open:
            return None
        local = self._open[index].local
        if local is None:
            return None
        buffer = bytearray(length_bytes)
        await local.read(memoryview(buffer), inside)
        return bytes(buffer)

    async def _forget_reader(self) -> None:
        reader, self._reader = self._reader, None
        if reader is not None:
            await reader.aclose()

    async def truncate(self, length_bytes: int) -> None:
        """Cut or extend the file; what was written so far is published first. New bytes read as zeros."""
        if length_bytes < 0:
            raise InvalidRequest(f"Cannot resize {self._full_path} to {length_bytes} bytes: that is negative.")
        check_length(length_bytes, self._full_path)
        async with self._lock:
            self._check_open()
            self._touched = True
            await self._forget_reader()
            await self._resize(length_bytes)
            self._position = min(self._position, length_bytes)

    async def allocate(self, end_bytes: int) -> None:
        """Extend the file to ``end_bytes`` if it is shorter, and the cluster has room for that. Raises OutOfSpace."""
        async with self._lock:
            self._check_open()
            await self._flush()
            # A length below the master's would make workers refuse the file (hazard 4): others may have extended it.
            if end_bytes > max(self._length, (await self._calls.status(self._full_path)).len):
                self._touched = True
                await self._forget_reader()
                await self._resize(end_bytes, allocate=True)

    async def _resize(self, length_bytes: int, *, allocate: bool = False) -> None:
        """4.10. A pending cut that the workers were never told must be applied before anything else: extending after
        it would show old bytes again (hazard 5)."""
        await self._flush()
        await self._apply_resizes()
        if length_bytes == self._length:
            return
        await self._open_unwritten()
        await self._flush()
        self._take_blocks(await self._calls.resize(self._full_path, length_bytes, allocate=allocate))
        await self._apply_resizes()

    async def _open_unwritten(self) -> None:
        """A block that was added ahead and never written becomes one of no bytes: without a worker that has it readers
        would take it for lost."""
        for index, located in enumerate(self._blocks):
            if located.block.id in self._unwritten:
                self._open[index] = await self._open_new(located)

    async def _apply_resizes(self) -> None:
        """Tell the workers of every block with a pending resize, and the master that they know."""
        pending = [
            index for index, located in enumerate(self._blocks) if located.locs and located.block.HasField("alloc_opts")
        ]
        for index in pending:
            self._open[index] = await BlockWriter.open(
                self._session, self._blocks[index], offset_bytes=0, capacity_bytes=self._block_size, new=False
            )
            await self._complete(index)
        if pending:
            await self._publish()

    def _check_open(self) -> None:
        if self._closed:
            raise CurvfsError(f"Cannot use {self._full_path}: the writer is closed.", errno_=errno.EBADF)


def _merged(one: pb.SetAttrOptsProto | None, other: pb.SetAttrOptsProto | None) -> pb.SetAttrOptsProto | None:
    if one is None or other is None:
        return one or other
    both = pb.SetAttrOptsProto()
    both.CopyFrom(one)
    both.MergeFrom(other)
    return both


def _times(mtime_ms: int | None, atime_ms: int | None) -> pb.SetAttrOptsProto | None:
    if mtime_ms is None and atime_ms is None:
        return None
    options = pb.SetAttrOptsProto(recursive=False)
    if mtime_ms is not None:
        options.mtime = mtime_ms
    if atime_ms is not None:
        options.atime = atime_ms
    return options


def check_length(length_bytes: int, path: str) -> None:
    """Raises FileTooLarge for what no file can have."""
    if length_bytes > MAX_LENGTH_BYTES:
        raise FileTooLarge(
            f"{path} cannot have {length_bytes} bytes; {MAX_LENGTH_BYTES} are possible.", errno_=errno.EFBIG
        )
