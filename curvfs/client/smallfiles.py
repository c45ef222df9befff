"""Many small files at once: one WriteBlocksBatch stream to each worker (specification 4.16).

The stream saves round trips, nothing else: a file whose block could not go that way is written through a stream of its
own, and one that was written to some of its workers is committed with those.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence

import trio

from curvfs.client import convert
from curvfs.client.blockwrite import BlockWriter
from curvfs.client.extents import WriteExtent
from curvfs.client.mastercalls import MasterCalls
from curvfs.client.newextents import (
    Added,
    Made,
    Plan,
    add_first_blocks,
    commit_extents,
    create_files,
    each,
    extent_of,
    placed,
)
from curvfs.client.records import FileStatus, WorkerAddress
from curvfs.client.session import Session, worker_key
from curvfs.config import MIN_BLOCK_SIZE_BYTES
from curvfs.errors import CurvfsError, ProtocolError, RemoteError, RemoteProtocolError, TransportError
from curvfs.net.workers import BlockChannel
from curvfs.units import MIB
from curvfs.wire.codes import RpcCode
from curvfs.wire.messages import decode, encode, pb

#: Of one stream: contents travel inside a header, and each block takes the room of a whole one until it is complete.
_BATCH_BYTES = 4 * MIB
_BATCH_FILES = 64


class _Small:
    """One file on its way: its block and what is to be in it."""

    __slots__ = ("block", "content", "full_path", "workers")

    def __init__(self, made: Made, located: pb.LocatedBlockProto, content: memoryview) -> None:
        self.full_path = made.plan.full_path
        self.content = content
        self.block = located.block
        self.workers = [convert.worker_address(worker) for worker in located.locs]


async def write_files(
    session: Session,
    calls: MasterCalls,
    plans: Sequence[Plan | CurvfsError],
    contents: Sequence[memoryview],
    *,
    unique_names: bool,
) -> list[FileStatus | CurvfsError]:
    """Make, write and commit files of one block each. A file's own failure stands in its place, and leaves nothing; nor
    does a cancellation before the commit."""
    made = await create_files(session, calls, plans, unique_names)
    handles = [extent_of(session, calls, entry, None, "") if isinstance(entry, Made) else entry for entry in made]
    try:
        extents = await _write(session, calls, made, handles, contents)
    except BaseException:
        await _abort(handles)
        raise
    statuses = iter(
        await commit_extents(session, calls, [found for found in extents if isinstance(found, WriteExtent)])
    )
    results = [next(statuses) if isinstance(extent, WriteExtent) else extent for extent in extents]
    await _abort([handle for handle, result in zip(handles, results, strict=True) if isinstance(result, CurvfsError)])
    return results


async def _abort(handles: Sequence[WriteExtent | CurvfsError]) -> None:
    """Remove files that came to nothing; whoever is cancelled does that, too."""
    with trio.CancelScope(shield=True):
        async with trio.open_nursery() as nursery:
            for handle in handles:
                if isinstance(handle, WriteExtent):
                    nursery.start_soon(handle.abort)  # takes close_timeout_s at most


async def _write(
    session: Session,
    calls: MasterCalls,
    made: Sequence[Made | CurvfsError],
    handles: Sequence[WriteExtent | CurvfsError],
    contents: Sequence[memoryview],
) -> list[WriteExtent | CurvfsError]:
    """Write the blocks of the files that were made; the handles of those that can be committed."""
    blocks = await add_first_blocks(session, calls, made)
    commits = await _write_batches(session, made, blocks, contents)

    async def finish(index: int) -> WriteExtent:
        entry, handle, added = made[index], handles[index], blocks[index]
        assert isinstance(entry, Made) and isinstance(handle, WriteExtent)
        if isinstance(added, CurvfsError):
            raise added
        if added is not None:
            handle.adopt(commits.get(index) or await _write_one(session, calls, entry, added, contents[index]))
        return handle

    return await each(finish, [i if isinstance(entry, Made) else entry for i, entry in enumerate(made)])


async def _write_one(
    session: Session, calls: MasterCalls, made: Made, added: Added, content: memoryview
) -> pb.CommitBlockProto:
    """Write a block through a stream of its own."""
    located, capacity_bytes = await placed(calls, made, added), made.plan.options.block_size
    writer = await BlockWriter.open(session, located, offset_bytes=0, capacity_bytes=capacity_bytes, new=True)
    try:
        await writer.write(content, 0)
        return await writer.complete()
    except BaseException:
        with trio.move_on_after(session.config.close_timeout_s, shield=True):
            await writer.abandon()
        raise


async def _write_batches(
    session: Session,
    made: Sequence[Made | CurvfsError],
    blocks: Sequence[Added | CurvfsError | None],
    contents: Sequence[memoryview],
) -> dict[int, pb.CommitBlockProto]:
    """Write what fits into batches; the commits of the blocks that some worker holds whole, by the file's index."""
    by_worker: dict[WorkerAddress, list[tuple[int, _Small]]] = defaultdict(list)
    for index, (entry, added) in enumerate(zip(made, blocks, strict=True)):
        if not isinstance(entry, Made) or not isinstance(added, tuple):
            continue
        if entry.plan.options.block_size == MIN_BLOCK_SIZE_BYTES:
            small = _Small(entry, added[0], contents[index])
            for worker in small.workers:
                by_worker[worker].append((index, small))
    commits: dict[int, pb.CommitBlockProto] = {}

    async def write(worker: WorkerAddress, files: Sequence[tuple[int, _Small]]) -> None:
        for batch in _batches(files):
            for (index, small), location in zip(batch, await _write_batch(session, worker, batch), strict=False):
                commit = commits.setdefault(
                    index, pb.CommitBlockProto(block_id=small.block.id, block_len=len(small.content))
                )
                commit.locations.append(location)

    async with trio.open_nursery() as nursery:
        for worker, files in by_worker.items():
            if len(files) > 1:
                nursery.start_soon(write, worker, files)
    return commits


def _batches(files: Sequence[tuple[int, _Small]]) -> Iterator[list[tuple[int, _Small]]]:
    batch: list[tuple[int, _Small]] = []
    size_bytes = 0
    for file in files:
        length_bytes = len(file[1].content)
        if batch and (len(batch) >= _BATCH_FILES or size_bytes + length_bytes > _BATCH_BYTES):
            yield batch
            batch, size_bytes = [], 0
        batch.append(file)
        size_bytes += length_bytes
    if batch:
        yield batch


async def _write_batch(
    session: Session, worker: WorkerAddress, batch: Sequence[tuple[int, _Small]]
) -> list[pb.BlockLocationProto]:
    """Where the blocks lie now, one entry for each; nothing at all when the worker did not take them."""
    files = [small for _, small in batch]
    req_id = session.world.random.request_id()
    doing = f"write {len(files)} small files"
    channel: BlockChannel | None = None
    try:
        channel, header = await session.workers.open(
            worker_key(worker),
            RpcCode.WRITE_BLOCKS_BATCH,
            _open_request(session, files, req_id),
            doing=doing,
            req_id=req_id,
        )
        opened = decode(pb.BlocksBatchWriteResponse, header).responses
        if [response.id for response in opened] != [small.block.id for small in files]:
            raise RemoteProtocolError(f"{channel.worker} opened other blocks than it was asked to.")
        await channel.running(
            encode(
                pb.FilesBatchWriteRequest(
                    files=[pb.FileWriteData(path=small.full_path, content=bytes(small.content)) for small in files],
                    req_id=req_id,
                    seq_id=1,
                    component_info=session.component_info,
                )
            )
        )
        _all(decode(pb.FilesBatchWriteResponse, (await channel.reply()).header).results, channel, len(files))
        done = await channel.finish(_commit_request(session, files, req_id))
        _all(decode(pb.BlocksBatchCommitResponse, done).results, channel, len(files))
    except (RemoteError, TransportError, ProtocolError) as error:
        session.stats["batches_split"] += 1
        if not isinstance(error, RemoteError):
            session.exclude(worker.worker_id)
        # Whatever it has of them is thrown away before they are written one by one.
        session.dropped_streams.update((worker.worker_id, small.block.id) for small in files)
        return []
    finally:
        if channel is not None:
            await channel.release()
    session.stats["bytes_written_remote"] += sum(len(small.content) for small in files)
    return [
        pb.BlockLocationProto(worker_id=worker.worker_id, storage_type=response.storage_type) for response in opened
    ]


def _open_request(session: Session, files: Sequence[_Small], req_id: int) -> bytes:
    return encode(
        pb.BlocksBatchWriteRequest(
            blocks=[small.block for small in files],
            off=0,
            block_size=MIN_BLOCK_SIZE_BYTES,
            req_id=req_id,
            seq_id=0,
            chunk_size=0,
            short_circuit=False,
            client_name=session.client_name,
            component_info=session.component_info,
        )
    )


def _commit_request(session: Session, files: Sequence[_Small], req_id: int) -> bytes:
    blocks = []
    for small in files:
        block = pb.ExtendedBlockProto()
        block.CopyFrom(small.block)
        block.block_size = len(small.content)
        blocks.append(block)
    return encode(
        pb.BlocksBatchCommitRequest(
            blocks=blocks,
            off=0,
            block_size=MIN_BLOCK_SIZE_BYTES,
            req_id=req_id,
            seq_id=2,
            cancel=False,
            component_info=session.component_info,
        )
    )


def _all(results: Sequence[bool], channel: BlockChannel, wanted: int) -> None:
    """Raises RemoteProtocolError unless every element of a batch was done."""
    if len(results) != wanted or not all(results):
        raise RemoteProtocolError(f"{channel.worker} did {sum(results)} of {wanted} writes.")
