"""Block files lent to callers that move the bytes themselves, in threads of their own.

Payload then never passes through the trio thread: the caller reads and writes verified descriptors, and comes here
only to open, to commit, and for what is not on this machine.
"""

from __future__ import annotations

import dataclasses
import errno
from collections.abc import Sequence
from contextlib import suppress
from typing import Self

import trio

from curvfs.client.blockread import open_local
from curvfs.client.blockwrite import BlockWriter
from curvfs.client.localfiles import LocalFile, Refused
from curvfs.client.mastercalls import MasterCalls
from curvfs.client.reader import FileReader
from curvfs.client.records import BlockLocation, Extent, FileStatus, LocalExtent, Located, RemoteExtent, WorkerAddress
from curvfs.client.session import Session
from curvfs.errors import CurvfsError, InvalidRequest
from curvfs.wire.messages import pb
from curvfs.world import Buffer


class ReadExtents:
    """A file open for reading by extents: local ones as descriptors, anything through :meth:`readinto`.

    Opened descriptors go on reading the same bytes when the file is deleted or replaced. An async context manager.
    """

    def __init__(self, session: Session, reader: FileReader, extents: tuple[Extent, ...]) -> None:
        self._session = session
        self._reader = reader
        self._extents = extents
        self._descriptors = [extent.fd for extent in extents if isinstance(extent, LocalExtent)]

    @property
    def status(self) -> FileStatus:
        """As it was when the file was located."""
        return self._reader.status

    @property
    def length_bytes(self) -> int:
        """Length of the file as it was located."""
        return self._reader.length_bytes

    @property
    def extents(self) -> tuple[Extent, ...]:
        """In file order, without gaps, covering [0, length)."""
        return self._extents

    @property
    def is_local(self) -> bool:
        """Every extent is a :class:`LocalExtent`."""
        return all(isinstance(extent, LocalExtent) for extent in self._extents)

    async def readinto(self, buffer: bytearray | memoryview, offset_bytes: int) -> int:
        """Read any range of the file, local or not; as :meth:`FileReader.readinto`."""
        return await self._reader.readinto(buffer, offset_bytes)

    async def aclose(self) -> None:
        """Close the descriptors; idempotent, never raises. Nobody may be using them any more."""
        self.close_descriptors()
        await self._reader.aclose()

    def close_descriptors(self) -> None:
        """The part of :meth:`aclose` that needs no trio thread; idempotent, from any thread."""
        while self._descriptors:
            self._session.world.disk.close(self._descriptors.pop())

    def __del__(self) -> None:
        if getattr(self, "_descriptors", None):
            with suppress(OSError):
                self.close_descriptors()

    @property
    def closed(self) -> bool:
        """Nothing is open any more."""
        return not self._descriptors and self._reader.idle

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.aclose()


async def open_extents(
    session: Session, calls: MasterCalls, files: Sequence[tuple[str, Located]], *, direct: bool
) -> list[ReadExtents | CurvfsError]:
    """Open files (full path and location) by extents. All blocks that one worker may serve locally are asked for in
    one round trip. A file's own failure stands in its place."""
    results: list[ReadExtents | CurvfsError] = []
    wanted: dict[WorkerAddress, list[tuple[int, BlockLocation]]] = {}
    #: (number of the file, block id) -> the open file, or why there is none
    opened: dict[tuple[int, int], LocalFile | str] = {}
    for number, (_, located) in enumerate(files):
        for block in located.blocks:
            if block.length_bytes:
                worker, reason = _local_worker(session, block)
                opened[number, block.block_id] = reason
                if worker is not None:
                    wanted.setdefault(worker, []).append((number, block))

    async def ask(worker: WorkerAddress, asked: list[tuple[int, BlockLocation]]) -> None:
        found = await open_local(session, worker, [block for _, block in asked], direct=direct)
        for (number, block), file in zip(asked, found, strict=True):
            opened[number, block.block_id] = file.reason if isinstance(file, Refused) else file

    try:
        async with trio.open_nursery() as nursery:
            for worker, asked in wanted.items():
                nursery.start_soon(ask, worker, asked)
        for number, (path, located) in enumerate(files):
            try:
                reader = FileReader(session, calls, path, located)
            except CurvfsError as error:
                results.append(error)
                continue
            extents = tuple(
                _extent(block, opened.pop((number, block.block_id))) for block in located.blocks if block.length_bytes
            )
            results.append(ReadExtents(session, reader, extents))
        return results
    finally:
        for file in opened.values():  # of files that could not be opened, or all when this was cancelled
            if isinstance(file, LocalFile):
                session.world.disk.close(file.fd)


def _local_worker(session: Session, block: BlockLocation) -> tuple[WorkerAddress | None, str]:
    """A worker of the block that may be on this machine, else the reason why there is none."""
    reason = "hole" if block.is_hole else "lost"
    for worker in block.workers:
        reason = session.local.candidate(worker)
        if not reason:
            return worker, ""
    return None, reason


def _extent(block: BlockLocation, file: LocalFile | str) -> Extent:
    if isinstance(file, str):
        return RemoteExtent(block.file_offset_bytes, block.length_bytes, file, block.block_id)
    return LocalExtent(file.fd, block.file_offset_bytes, block.length_bytes, file.direct, block.block_id)


class WriteExtent:
    """A new file of exactly one block of ``size_bytes``, written once and then committed.

    When ``local`` is there, the caller writes all of [0, size) through its descriptor, from any thread, and then calls
    :meth:`commit`; otherwise every byte goes through :meth:`write`. The descriptor belongs to this object: a commit
    that went well closes it, and so does :meth:`abort`. An async context manager: leaving it aborts what was not
    committed.
    """

    def __init__(
        self,
        session: Session,
        calls: MasterCalls,
        full_path: str,
        status: FileStatus,
        size_bytes: int,
        writer: BlockWriter | None,
        remote_reason: str,
        workers: tuple[WorkerAddress, ...] = (),
    ) -> None:
        """``writer`` is None for a file without bytes; ``remote_reason`` holds unless it turns out to be local."""
        self._session = session
        self._calls = calls
        self._full_path = full_path
        self._status = status
        self._size = size_bytes
        self._writer = writer
        self._reason = remote_reason
        self._workers = workers
        self._local: LocalExtent | None = None
        self._written: list[tuple[int, int]] = []
        self._commit: pb.CommitBlockProto | None = None
        self._ended = False
        replica = writer.local if writer is not None else None
        if replica is not None:
            file = replica.lend()
            self._local = LocalExtent(file.fd, 0, size_bytes, file.direct, writer.block_id if writer else 0)
            self._reason = ""

    @property
    def status(self) -> FileStatus:
        """As it was when the file was made."""
        return self._status

    @property
    def path(self) -> str:
        """The name it was made under."""
        return self._status.path

    @property
    def size_bytes(self) -> int:
        """Bytes that must be written before it can be committed."""
        return self._size

    @property
    def workers(self) -> tuple[WorkerAddress, ...]:
        """Who stores the block."""
        return self._workers

    @property
    def local(self) -> LocalExtent | None:
        """The verified block file, open for reading and writing, or None."""
        return self._local

    @property
    def remote_reason(self) -> str:
        """Why ``local`` is None: as in :class:`RemoteExtent`, or ``empty`` (no bytes, no block), or ``replicas``
        (several of them: each must get the bytes). Empty when it is there."""
        return self._reason

    async def write(self, buffer: Buffer, offset_bytes: int) -> None:
        """Send all of ``buffer`` to the worker(s). Only where ``local`` is None."""
        view = memoryview(buffer).cast("B")
        end = offset_bytes + len(view)
        if self._writer is None or self._local is not None or self._ended or offset_bytes < 0 or end > self._size:
            raise InvalidRequest(
                f"Cannot write bytes {offset_bytes} to {end} of {self._full_path} here: it has {self._size}, "
                f"and is {'done' if self._ended else 'written through its descriptor' if self._local else 'remote'}."
            )
        await self._writer.write(view, offset_bytes)
        self._written.append((offset_bytes, end))

    async def commit(self) -> FileStatus:
        """Complete the block and the file. May be called again when the master could not be reached. The status it
        answers with has the times of creation.

        Raises CurvfsError when not every byte was sent or the local file has not the right length: nothing is
        committed then.
        """
        await self.complete_block()
        path, inode_id, length_bytes, commits = self.completion()
        answer = await self._calls.complete_file(
            path, inode_id, length_bytes=length_bytes, commits=commits, only_flush=False
        )
        if not answer.result:
            raise CurvfsError(f"The master did not complete {self._full_path}; try again.")
        return self.completed()

    async def complete_block(self) -> None:
        """The part of :meth:`commit` that concerns the workers; nothing when that went well before."""
        writer = self.whole_block()
        if writer is not None:
            self._commit = await writer.complete()

    def whole_block(self) -> BlockWriter | None:
        """The block's writer when all is written and it is still to be completed. Raises CurvfsError as
        :meth:`complete_block` does."""
        if self._ended:
            raise CurvfsError(f"Cannot commit {self._full_path}: it was committed or aborted.", errno_=errno.EBADF)
        if self._writer is None or self._commit is not None:
            return None
        self._check_whole()
        self._writer.wrote_to(self._size)
        return self._writer

    def adopt(self, commit: pb.CommitBlockProto) -> None:
        """The block was written and completed in a stream with others: what is left is to tell the master."""
        self._commit = commit

    def completion(self) -> tuple[str, int, int, list[pb.CommitBlockProto]]:
        """What the master must be told then: full path, inode id, length, commits."""
        return self._full_path, self._status.id, self._size, [self._commit] if self._commit is not None else []

    def completed(self) -> FileStatus:
        """The part of :meth:`commit` after that: the master knows."""
        self._ended = True
        self.close_descriptor()
        return dataclasses.replace(self._status, length_bytes=self._size, is_complete=True)

    def _check_whole(self) -> None:
        if self._local is not None:
            there = self._session.world.disk.fstat(self._local.fd).st_size
            if there != self._size:
                raise InvalidRequest(f"Cannot commit {self._full_path}: {there} of {self._size} bytes were written.")
            return
        reached = 0
        for start, end in sorted(self._written):
            if start > reached:
                break
            reached = max(reached, end)
        if reached < self._size:
            raise InvalidRequest(f"Cannot commit {self._full_path}: byte {reached} of {self._size} was not written.")

    async def abort(self) -> None:
        """Cancel the block and delete the file; idempotent, never raises. Nobody may be writing any more."""
        if self._ended:
            return
        self._ended = True
        with trio.move_on_after(self._session.config.close_timeout_s, shield=True):
            if self._writer is not None and self._commit is None:
                await self._writer.abandon()
            self.close_descriptor()
            try:
                status = await self._calls.status_or_none(self._full_path)
                if status is not None and status.id == self._status.id:
                    await self._calls.delete(self._full_path, recursive=False)
            except CurvfsError:
                self._session.stats["aborts_unfinished"] += 1
        self.close_descriptor()

    def __del__(self) -> None:
        if getattr(self, "_local", None) is not None:
            with suppress(OSError):
                self.close_descriptor()

    def close_descriptor(self) -> None:
        """The part of :meth:`abort` that needs no trio thread; idempotent."""
        local, self._local = self._local, None
        if local is not None:
            self._session.world.disk.close(local.fd)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.abort()
