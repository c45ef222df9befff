"""Writing one block to all its replicas (specification 4.7, 4.12, 4.17).

The client sends every replica the same bytes. A replica that fails is left behind and its worker avoided for a while;
the block is committed with the ones that hold it all. Only when none is left does the write fail.
"""

from __future__ import annotations

import abc
import errno
from collections.abc import Awaitable, Callable
from functools import partial

import trio

from curvfs.client.convert import storage_type, worker_address
from curvfs.client.diskcalls import CALL_BYTES, SharedFile, read_into, write_from
from curvfs.client.localfiles import LocalFile, Refused
from curvfs.client.records import WorkerAddress
from curvfs.client.session import Session, worker_key
from curvfs.errors import (
    CurvfsError,
    DeadlineExceeded,
    LocalProtocolError,
    NoAvailableWorker,
    ProtocolError,
    RemoteError,
    RemoteProtocolError,
    TransportError,
    from_os_error,
)
from curvfs.net.workers import BlockChannel, WorkerKey
from curvfs.wire.codes import RpcCode
from curvfs.wire.messages import decode, encode, pb


class Replica(abc.ABC):
    """One worker's copy of a block that is being written. One task at a time."""

    def __init__(self, session: Session, channel: BlockChannel, block_id: int, storage: int) -> None:
        self._session = session
        self._channel = channel
        self._block_id = block_id
        self._block_kept = True
        #: What the worker said it stores the block on; goes into the commit.
        self.storage_type = storage

    @property
    def worker_id(self) -> int:
        return self._channel.worker.worker_id

    @abc.abstractmethod
    async def write(self, view: memoryview, offset_bytes: int) -> None:
        """Take bytes for that offset in the block."""

    @abc.abstractmethod
    async def settle(self) -> None:
        """Wait until the worker has taken everything."""

    async def complete(self, header: bytes) -> None:
        """Publish the block on the worker and give the connection back. Raises RemoteError, TransportError."""
        await (await self._stream()).finish(header)
        self._block_kept = False
        await self.drop()

    async def cancel(self, header: bytes) -> None:
        """Forget the block on the worker; never raises, and only for blocks that were never committed."""
        try:
            with trio.move_on_after(self._session.config.close_timeout_s, shield=True):
                await (await self._stream()).cancel(header)
                self._block_kept = False
        except CurvfsError:
            pass  # the connection is dropped; the worker keeps the block until it is opened again or deleted
        finally:
            await self.drop()

    async def drop(self) -> None:
        """Let go of the connection; never raises. What was sent and neither completed nor cancelled stays on the
        worker: it is remembered, to be cancelled before the block is written again (4.7)."""
        if self._block_kept:
            self._session.dropped_streams.add((self.worker_id, self._block_id))
        await self._let_go()

    async def _stream(self) -> BlockChannel:
        """Where the block is open."""
        return self._channel

    async def _let_go(self) -> None:
        await self._channel.release()


class RemoteReplica(Replica):
    """Bytes go over the wire: Running frames of up to ``chunk_size_bytes``, ``window`` of them unanswered."""

    def __init__(self, session: Session, channel: BlockChannel, block_id: int, storage: int, offset_bytes: int) -> None:
        super().__init__(session, channel, block_id, storage)
        self._position = offset_bytes

    async def write(self, view: memoryview, offset_bytes: int) -> None:
        chunk, window = self._session.config.chunk_size_bytes, self._session.config.window
        while len(view):
            while self._channel.outstanding >= window:
                await self._channel.reply()
            header = b""
            if self._position != offset_bytes:
                header = encode(pb.DataHeaderProto(offset=offset_bytes, flush=False, is_last=False))
            piece = view[:chunk]
            await self._channel.running(header, piece)
            offset_bytes += len(piece)
            self._position = offset_bytes
            view = view[chunk:]
            self._session.stats["bytes_written_remote"] += len(piece)

    async def settle(self) -> None:
        while self._channel.outstanding:
            await self._channel.reply()


class LocalReplica(Replica):
    """Bytes go straight into the file that the worker named; no Running frames."""

    def __init__(self, session: Session, channel: BlockChannel, block_id: int, storage: int, file: LocalFile) -> None:
        super().__init__(session, channel, block_id, storage)
        self._lendable: LocalFile | None = file
        self._file: SharedFile | None = None

    async def write(self, view: memoryview, offset_bytes: int) -> None:
        doing = "Cannot write the local file of a block"
        for start in range(0, len(view), CALL_BYTES):
            piece = view[start : start + CALL_BYTES]
            file = self._take()
            file.use()
            write = partial(write_from, self._session.world.disk, file.fd, piece, offset_bytes + start)
            try:
                await self._session.local.disk.call(self.worker_id, write, release=file.close)
            except OSError as error:
                raise from_os_error(error, doing=doing) from error
            except DeadlineExceeded as error:
                # The write may still happen, whenever that is: nobody must take the block for its own until then.
                self._session.hung_blocks.add(self._block_id)
                raise CurvfsError(f"{doing}: {error}", errno_=errno.ETIMEDOUT) from error
            self._session.stats["bytes_written_local"] += len(piece)

    async def read(self, view: memoryview, offset_bytes: int) -> None:
        """Fill ``view``, which holds zeros, with what was written so far. Raises CurvfsError."""
        file = self._take()
        file.use()
        read = partial(read_into, self._session.world.disk, file.fd, view, offset_bytes)
        try:
            await self._session.local.disk.call(self.worker_id, read, release=file.close)
        except OSError as error:
            raise from_os_error(error, doing="Cannot read the local file of a block") from error

    def _take(self) -> SharedFile:
        if self._file is None:
            self._file = SharedFile(self._session.world, self.lend().fd)
        return self._file

    async def settle(self) -> None:
        pass

    def lend(self) -> LocalFile:
        """Hand the open file over to the caller, who closes it."""
        file, self._lendable = self._lendable, None
        assert file is not None
        return file

    async def drop(self) -> None:
        if self._lendable is not None:
            self._session.world.disk.close(self.lend().fd)
        file, self._file = self._file, None
        if file is not None:
            file.close()
        await super().drop()


def write_request(
    session: Session,
    block: pb.ExtendedBlockProto,
    *,
    length_bytes: int,
    offset_bytes: int,
    capacity_bytes: int,
    short_circuit: bool = False,
    chunk_size: int = 0,
) -> bytes:
    """BlockWriteRequest: in Open with the block's current length, in Complete and Cancel with its final one (3.5).

    The block's pending resize, if any, goes along in all of them, as the Rust client does.
    """
    described = pb.ExtendedBlockProto()
    described.CopyFrom(block)
    described.block_size = length_bytes
    return encode(
        pb.BlockWriteRequest(
            block=described,
            off=offset_bytes,
            block_size=capacity_bytes,
            short_circuit=short_circuit,
            client_name=session.client_name,
            chunk_size=chunk_size,
            component_info=session.component_info,
        )
    )


async def open_replica(
    session: Session,
    worker: WorkerAddress,
    block: pb.ExtendedBlockProto,
    *,
    offset_bytes: int,
    capacity_bytes: int,
    direct: bool = False,
    local: bool = True,
    discard: bool = False,
    timeout_s: float | None = None,
) -> Replica:
    """Open a block for writing on one worker: as a local file where that can be trusted, else over the wire.

    ``direct`` asks for a local file open with O_DIRECT, which only somebody who takes it over can use. ``discard``
    throws away what a stream before this one left on the worker: Open, Cancel, Open again (4.7). ``timeout_s`` bounds
    each exchange with the worker, where that is less than ``data_timeout_s``.

    Raises RemoteError and TransportError.
    """
    reason = session.local.candidate(worker)
    short_circuit = local and not reason and not discard
    doing = f"write block {block.id}"
    if block.id in session.hung_blocks:
        raise CurvfsError(
            f"Cannot {doing}: an earlier write to its local file hangs and may still happen; write to a new file.",
            errno_=errno.ETIMEDOUT,
        )
    request = write_request(
        session,
        block,
        length_bytes=block.block_size,
        offset_bytes=offset_bytes,
        capacity_bytes=capacity_bytes,
        short_circuit=short_circuit,
        chunk_size=session.config.chunk_size_bytes,
    )
    channel, header = await session.workers.open(
        worker_key(worker), RpcCode.WRITE_BLOCK, request, doing=doing, timeout_s=timeout_s
    )
    try:
        answer = decode(pb.BlockWriteResponse, header)
        check_opened(answer, block, channel.worker, doing, capacity_bytes=capacity_bytes, offset_bytes=offset_bytes)
        if discard:
            await channel.cancel(request)
            session.dropped_streams.discard((worker.worker_id, block.id))
            await channel.release()
            return await open_replica(
                session,
                worker,
                block,
                offset_bytes=offset_bytes,
                capacity_bytes=capacity_bytes,
                direct=direct,
                local=local,
                timeout_s=timeout_s,
            )
        storage = int(storage_type(answer.storage_type))
        if not (short_circuit and answer.path):
            if short_circuit:
                session.local.count("not_granted")
            return RemoteReplica(session, channel, block.id, storage, offset_bytes)
        size_bytes = block.alloc_opts.len if block.HasField("alloc_opts") else block.block_size
        try:
            file = await session.local.disk.call(
                worker.worker_id,
                lambda _: session.local.open(
                    answer.path, block.id, worker.worker_id, size_bytes=size_bytes, write=True, direct=direct
                ),
                undo=lambda file: session.world.disk.close(file.fd),
            )
        except (Refused, DeadlineExceeded):
            # The block stays in writing state: a fresh Open without short circuit takes over (4.12).
            await channel.release()
            return await open_replica(
                session,
                worker,
                block,
                offset_bytes=offset_bytes,
                capacity_bytes=capacity_bytes,
                local=False,
                timeout_s=timeout_s,
            )
        return LocalReplica(session, channel, block.id, storage, file)
    except BaseException:
        await channel.release()
        raise


async def write_whole(
    session: Session, located: pb.LocatedBlockProto, payload: memoryview, *, capacity_bytes: int
) -> pb.CommitBlockProto:
    """Write a new block and complete it, in one exchange with each of its workers; those that fail are left behind.

    For few bytes: they go over the wire in one frame, whoever the worker is. Raises RemoteError or TransportError, what
    the last one said, when none took them; what may lie on a worker is remembered, to be cancelled before the block is
    written again.
    """
    block = located.block
    doing = f"write block {block.id}"
    request = partial(write_request, session, block, capacity_bytes=capacity_bytes)
    opening, final = (
        request(length_bytes=0, offset_bytes=0),
        request(length_bytes=len(payload), offset_bytes=len(payload)),
    )
    locations: dict[int, pb.BlockLocationProto] = {}
    failures: list[CurvfsError] = []

    async def one(worker: WorkerAddress) -> None:
        try:
            answer = decode(
                pb.BlockWriteResponse,
                await session.workers.put(
                    worker_key(worker), RpcCode.WRITE_BLOCK, opening, payload, final, doing=doing
                ),
            )
            check_opened(answer, block, worker_key(worker), doing, capacity_bytes=capacity_bytes, offset_bytes=0)
        except (RemoteError, TransportError, ProtocolError) as error:
            session.exclude(worker.worker_id)
            session.stats["replica_failures"] += 1
            session.dropped_streams.add((worker.worker_id, block.id))
            failures.append(error)
            return
        locations[worker.worker_id] = pb.BlockLocationProto(
            worker_id=worker.worker_id,
            storage_type=storage_type(answer.storage_type),  # type: ignore[arg-type]
        )
        session.stats["bytes_written_remote"] += len(payload)

    workers = [worker_address(worker) for worker in located.locs]
    if len(workers) == 1:
        await one(workers[0])
    else:
        async with trio.open_nursery() as nursery:
            for worker in workers:
                nursery.start_soon(one, worker)
    if not locations:
        raise failures[0] if failures else NoAvailableWorker(f"Block {block.id} has no worker to be written to.")
    return pb.CommitBlockProto(
        block_id=block.id,
        block_len=len(payload),
        locations=[locations[worker.worker_id] for worker in workers if worker.worker_id in locations],
    )


def check_opened(
    answer: pb.BlockWriteResponse,
    block: pb.ExtendedBlockProto,
    worker: WorkerKey,
    doing: str,
    *,
    capacity_bytes: int,
    offset_bytes: int,
) -> None:
    """Raises RemoteProtocolError unless a worker opened what it was asked to."""
    if answer.id != block.id or answer.block_size != capacity_bytes or answer.off != offset_bytes:
        raise RemoteProtocolError(
            f"Cannot {doing}: {worker} opened block {answer.id} of {answer.block_size} bytes at {answer.off}; block "
            f"{block.id} of {capacity_bytes} bytes at {offset_bytes} was asked for."
        )


class BlockWriter:
    """One block being written on all its replicas. One task at a time.

    ``length_bytes`` is its length so far, ``committed_bytes`` what the master knows of it. After a failure it can only
    be abandoned: frames that were under way behind the one that failed have been written at the wrong place.
    """

    def __init__(
        self, session: Session, block: pb.ExtendedBlockProto, capacity_bytes: int, replicas: list[Replica], new: bool
    ) -> None:
        self._session = session
        self._block = block
        self._capacity = capacity_bytes
        self._replicas = replicas
        self._position = 0
        self._failure: CurvfsError | None = None
        #: Never committed: it may be cancelled, and be committed with fewer replicas than it was opened on. (A
        #: committed block's other replicas would go on serving the old bytes.)
        self.new = new
        self.length_bytes = block.block_size
        self.committed_bytes = 0 if new else block.block_size

    @classmethod
    async def open(
        cls,
        session: Session,
        located: pb.LocatedBlockProto,
        *,
        offset_bytes: int,
        capacity_bytes: int,
        new: bool,
        direct: bool = False,
        timeout_s: float | None = None,
    ) -> BlockWriter:
        """Open every replica in ``located.locs``; those of a new block that refuse are left behind. ``timeout_s``: as
        in :func:`open_replica`.

        Raises RemoteError or TransportError: what the last one said.
        """
        replicas: list[Replica] = []
        last: CurvfsError | None = None
        try:
            for worker in map(worker_address, located.locs):
                try:
                    replica = await open_replica(
                        session,
                        worker,
                        located.block,
                        offset_bytes=offset_bytes,
                        capacity_bytes=capacity_bytes,
                        direct=direct,
                        discard=(worker.worker_id, located.block.id) in session.dropped_streams
                        and (new or session.rewrites_aside),
                        timeout_s=timeout_s,
                    )
                    replicas.append(replica)
                except (RemoteError, TransportError, ProtocolError) as error:
                    session.exclude(worker.worker_id)
                    session.stats["replica_failures"] += 1
                    if not new:
                        raise
                    last = error
            if not replicas:
                raise last or NoAvailableWorker(f"Block {located.block.id} has no worker to be written to.")
        except BaseException:
            for replica in replicas:
                await replica.drop()
            raise
        return cls(session, located.block, capacity_bytes, replicas, new)

    @property
    def local(self) -> LocalReplica | None:
        """The one replica, when it is the only one and a local file."""
        only = self._replicas[0] if len(self._replicas) == 1 else None
        return only if isinstance(only, LocalReplica) else None

    @property
    def block_id(self) -> int:
        return self._block.id

    @property
    def worker_ids(self) -> tuple[int, ...]:
        """Who is being written to."""
        return tuple(replica.worker_id for replica in self._replicas)

    @property
    def longer_than_committed(self) -> bool:
        return self.length_bytes > self.committed_bytes

    async def write(self, view: memoryview, offset_bytes: int) -> None:
        """Write to every replica. Raises RemoteError, TransportError, or CurvfsError for a local disk that fails."""
        end = offset_bytes + len(view)
        if end > self._capacity:
            raise LocalProtocolError(f"Block {self._block.id} cannot hold byte {end}: it has {self._capacity}.")
        await self._everywhere(lambda replica: replica.write(view, offset_bytes))
        self.wrote_to(end)

    def wrote_to(self, end_bytes: int) -> None:
        """Note that the block holds bytes up to here, written here or by somebody who had the file lent."""
        self._position = end_bytes
        self.length_bytes = max(self.length_bytes, end_bytes)

    async def complete(self) -> pb.CommitBlockProto:
        """Publish the block on its workers: the commit that the master must be told. The writer is done then."""
        header = self.final_request()
        await self._everywhere(lambda replica: replica.settle())
        await self._everywhere(lambda replica: replica.complete(header))
        return self.commit_record()

    def commit_record(self) -> pb.CommitBlockProto:
        """What the master must be told of a block that is complete on its workers."""
        return pb.CommitBlockProto(
            block_id=self._block.id,
            block_len=self.length_bytes,
            locations=[
                pb.BlockLocationProto(
                    worker_id=replica.worker_id,
                    storage_type=replica.storage_type,  # type: ignore[arg-type]
                )
                for replica in self._replicas
            ],
        )

    async def abandon(self) -> None:
        """Give up: cancel a block that was never committed, just let go of another one (4.7). Never raises."""
        for replica in self._replicas:
            await self._give_up(replica)

    async def _give_up(self, replica: Replica) -> None:
        if self.new:
            await replica.cancel(self.final_request())
        else:
            await replica.drop()

    def final_request(self) -> bytes:
        """What a Complete or a Cancel says."""
        return write_request(
            self._session,
            self._block,
            length_bytes=self.length_bytes,
            offset_bytes=self._position,
            capacity_bytes=self._capacity,
        )

    async def _everywhere(self, action: Callable[[Replica], Awaitable[None]]) -> None:
        """Do something on every replica, at once; those of a new block that fail are left behind, unless all do."""
        if self._failure is not None:
            raise self._failure
        try:
            if len(self._replicas) == 1:
                await action(self._replicas[0])
            else:
                await self._at_once(action)
        except CurvfsError as error:
            self._failure = error
            for replica in self._replicas:
                self._session.exclude(replica.worker_id)
            raise

    async def _at_once(self, action: Callable[[Replica], Awaitable[None]]) -> None:
        failures: dict[int, CurvfsError] = {}

        async def one(replica: Replica) -> None:
            try:
                await action(replica)
            except CurvfsError as error:
                failures[replica.worker_id] = error

        async with trio.open_nursery() as nursery:
            for replica in self._replicas:
                nursery.start_soon(one, replica)
        failed = [replica for replica in self._replicas if replica.worker_id in failures]
        if failed and (not self.new or len(failed) == len(self._replicas)):
            raise failures[failed[0].worker_id]
        for replica in failed:
            self._session.exclude(replica.worker_id)
            self._session.stats["replica_failures"] += 1
            await self._give_up(replica)
            self._replicas.remove(replica)
