"""New blocks whose files lie on this machine, opened many at a time in one exchange with their worker, and completed
many at a time in another (specification 4.7, 4.12).

A block stays in writing state when its stream is left, and Complete works without an Open: so one connection is enough
for all, where a stream of its own for each costs two exchanges a block. What does not go as it should is left to
streams of their own: ``BlockWriter.open`` opens the block once more, and so does
:class:`LentReplica` before it completes or cancels it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import trio

from curvfs.client.blockwrite import BlockWriter, LocalReplica, check_opened, write_request
from curvfs.client.convert import storage_type, worker_address
from curvfs.client.localfiles import LocalFile, Refused
from curvfs.client.records import WorkerAddress
from curvfs.client.session import Session, worker_key
from curvfs.errors import DeadlineExceeded, ProtocolError, RemoteError, TransportError
from curvfs.net.workers import BlockChannel, WorkerKey
from curvfs.wire.codes import RpcCode
from curvfs.wire.messages import decode, pb

#: Blocks in one exchange.
_AT_ONCE = 64


class _Held:
    """The connection that blocks were opened on: they keep their space while it is there."""

    def __init__(self, channel: BlockChannel, blocks: int) -> None:
        self.channel = channel
        self._left = blocks

    @property
    def empty(self) -> bool:
        return self._left == 0

    async def let_go(self) -> None:
        self._left -= 1
        if self._left == 0:
            await self.channel.close()


class LentReplica(LocalReplica):
    """A block without a stream of its own."""

    def __init__(
        self,
        session: Session,
        held: _Held,
        worker: WorkerAddress,
        block_id: int,
        storage: int,
        file: LocalFile,
        opening: bytes,
    ) -> None:
        super().__init__(session, held.channel, block_id, storage, file)
        self.worker = worker
        #: What bounds each exchange with it, as it did the one that opened the block.
        self.timeout_s = held.channel.timeout_s
        self._opening = opening
        self._held: _Held | None = held

    async def completed(self) -> None:
        """It was completed together with others."""
        self._block_kept = False
        await self.drop()

    async def _stream(self) -> BlockChannel:
        if self._held is not None and self._channel is not self._held.channel:
            await self._channel.release()  # the one before failed
        doing = f"write block {self._block_id}"
        key = worker_key(self.worker)
        self._channel, _ = await self._session.workers.open(
            key, RpcCode.WRITE_BLOCK, self._opening, doing=doing, timeout_s=self.timeout_s
        )
        return self._channel

    async def _let_go(self) -> None:
        held, self._held = self._held, None
        if held is not None:
            if self._channel is not held.channel:
                await self._channel.release()
            await held.let_go()


def lent_worker(session: Session, located: pb.LocatedBlockProto) -> WorkerAddress | None:
    """The worker of a new block that may be opened together with others."""
    if len(located.locs) != 1 or located.block.id in session.hung_blocks:
        return None
    worker = worker_address(located.locs[0])
    if session.local.candidate(worker) or (worker.worker_id, located.block.id) in session.dropped_streams:
        return None
    return worker


async def open_lent(
    session: Session,
    worker: WorkerAddress,
    blocks: Sequence[tuple[pb.ExtendedBlockProto, int]],
    *,
    direct: bool,
    timeout_s: float | None,
) -> list[BlockWriter | None]:
    """Open new blocks (and what each may hold) of one worker; None for what must be tried by itself, which tells why.

    ``direct`` asks for files open with O_DIRECT; ``timeout_s`` bounds the exchange. Raises nothing of its own.
    """
    writers: list[BlockWriter | None] = []
    for start in range(0, len(blocks), _AT_ONCE):
        writers += await _open(session, worker, blocks[start : start + _AT_ONCE], direct=direct, timeout_s=timeout_s)
    return writers


@dataclass(frozen=True, slots=True)
class _Granted:
    block: pb.ExtendedBlockProto
    capacity_bytes: int
    path: str
    storage: int
    opening: bytes


async def _open(
    session: Session,
    worker: WorkerAddress,
    blocks: Sequence[tuple[pb.ExtendedBlockProto, int]],
    *,
    direct: bool,
    timeout_s: float | None,
) -> list[BlockWriter | None]:
    openings = [
        write_request(
            session,
            block,
            length_bytes=block.block_size,
            offset_bytes=0,
            capacity_bytes=capacity_bytes,
            short_circuit=True,
            chunk_size=session.config.chunk_size_bytes,
        )
        for block, capacity_bytes in blocks
    ]
    doing, key = f"write {len(blocks)} blocks", worker_key(worker)
    try:
        channel, answers = await session.workers.open_many(
            key, RpcCode.WRITE_BLOCK, openings, doing=doing, timeout_s=timeout_s
        )
    except (TransportError, ProtocolError):
        return [None] * len(blocks)
    granted = [
        _granted(block, capacity_bytes, answer, opening, key, doing)
        for (block, capacity_bytes), answer, opening in zip(blocks, answers, openings, strict=True)
    ]
    files: list[LocalFile | None] = [None] * len(blocks)
    try:
        if any(granted):
            files = await session.local.disk.call(
                worker.worker_id,
                lambda _: [_open_file(session, worker, one, direct=direct) for one in granted],
                undo=lambda files: _close(session, files),
            )
    except DeadlineExceeded:
        session.local.count("stuck")
    except BaseException:
        await channel.close()
        raise
    held = _Held(channel, sum(file is not None for file in files))
    if held.empty:
        await channel.close()
    return [
        None
        if one is None or file is None
        else BlockWriter(
            session,
            one.block,
            one.capacity_bytes,
            [LentReplica(session, held, worker, one.block.id, one.storage, file, one.opening)],
            new=True,
        )
        for one, file in zip(granted, files, strict=True)
    ]


def _granted(
    block: pb.ExtendedBlockProto,
    capacity_bytes: int,
    answer: bytes | RemoteError,
    opening: bytes,
    key: WorkerKey,
    doing: str,
) -> _Granted | None:
    if isinstance(answer, RemoteError):
        return None
    try:
        opened = decode(pb.BlockWriteResponse, answer)
        check_opened(opened, block, key, doing, capacity_bytes=capacity_bytes, offset_bytes=0)
    except ProtocolError:
        return None
    if not opened.path:
        return None
    return _Granted(block, capacity_bytes, opened.path, int(storage_type(opened.storage_type)), opening)


def _open_file(session: Session, worker: WorkerAddress, one: _Granted | None, *, direct: bool) -> LocalFile | None:
    if one is None:
        return None
    block = one.block
    size_bytes = block.alloc_opts.len if block.HasField("alloc_opts") else block.block_size
    try:
        return session.local.open(
            one.path, block.id, worker.worker_id, size_bytes=size_bytes, write=True, direct=direct
        )
    except Refused:
        return None


def _close(session: Session, files: Sequence[LocalFile | None]) -> None:
    for file in files:
        if file is not None:
            session.world.disk.close(file.fd)


async def complete_lent(session: Session, writers: Sequence[BlockWriter]) -> list[pb.CommitBlockProto | None]:
    """Complete blocks that were opened together and are whole; None for what must be tried by itself."""
    commits: list[pb.CommitBlockProto | None] = [None] * len(writers)
    by_worker: dict[WorkerKey, list[tuple[int, LentReplica]]] = {}
    for index, writer in enumerate(writers):
        replica = writer.local
        if isinstance(replica, LentReplica):
            by_worker.setdefault(worker_key(replica.worker), []).append((index, replica))

    async def one(key: WorkerKey, mine: Sequence[tuple[int, LentReplica]]) -> None:
        headers = [writers[index].final_request() for index, _ in mine]
        try:
            answers = await session.workers.complete_many(
                key,
                RpcCode.WRITE_BLOCK,
                headers,
                doing=f"write {len(mine)} blocks",
                timeout_s=max(replica.timeout_s for _, replica in mine),
            )
        except (TransportError, ProtocolError):
            return
        for (index, replica), answer in zip(mine, answers, strict=True):
            if not isinstance(answer, RemoteError):
                commits[index] = writers[index].commit_record()
                await replica.completed()

    async with trio.open_nursery() as nursery:
        for key, mine in by_worker.items():
            for start in range(0, len(mine), _AT_ONCE):
                nursery.start_soon(one, key, mine[start : start + _AT_ONCE])
    return commits
