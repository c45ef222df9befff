"""Section 4.16: small files written in batches."""

from __future__ import annotations

from typing import Any

import pytest
from conformance.probe import (
    BLOCK_NOT_FOUND,
    CLIENT_NAME,
    COMMON,
    CREATE_NEW,
    IO,
    Probe,
    client_address,
    commit,
    file_options,
    refused,
)
from conformance.rules import rule

from curvfs.errors import RemoteError
from curvfs.units import MIB
from curvfs.wire.codes import RequestStatus, RpcCode
from curvfs.wire.messages import pb
from curvfs.world import World

CONTENT = {"a": b"first", "b": b"", "c": b"x" * 5000}


def creations(probe: Probe, names: list[str]) -> Any:
    return pb.CreateFilesBatchRequest(
        requests=[
            pb.CreateFileRequest(path=probe.at(name), opts=file_options(), flags=CREATE_NEW | 0x80) for name in names
        ]
    )


async def create_all(probe: Probe, names: list[str], req_id: int | None = None) -> list[Any]:
    reply = await probe.call(RpcCode.CREATE_FILES_BATCH, creations(probe, names), req_id=req_id)
    return list(reply.file_statuses)


async def add_all(probe: Probe, names: list[str]) -> list[Any]:
    requests = [
        pb.AddBlockRequest(path=probe.at(name), located=True, client_address=client_address("nowhere"), file_len=0)
        for name in names
    ]
    return list((await probe.call(RpcCode.ADD_BLOCKS_BATCH, pb.AddBlocksBatchRequest(requests=requests))).blocks)


async def open_all(probe: Probe, blocks: list[Any]) -> Any:
    """A batch stream for the blocks, and its Open reply."""
    stream = await probe.worker(blocks[0].locs[0])
    request = pb.BlocksBatchWriteRequest(
        blocks=[located.block for located in blocks],
        off=0,
        block_size=MIB,
        req_id=1,
        seq_id=131072,
        chunk_size=131072,
        short_circuit=False,
        client_name=CLIENT_NAME,
    )
    return stream, await stream.open(RpcCode.WRITE_BLOCKS_BATCH, request)


def final(blocks: list[Any], lengths: list[int], *, cancel: bool = False) -> Any:
    changed = []
    for located, length in zip(blocks, lengths, strict=True):
        block = pb.ExtendedBlockProto()
        block.CopyFrom(located.block)
        block.block_size = length
        changed.append(block)
    return pb.BlocksBatchCommitRequest(blocks=changed, off=0, block_size=MIB, req_id=1, seq_id=2, cancel=cancel)


@rule("4.16", "2.1")
async def test_creating_many(probe: Probe) -> None:
    statuses = await create_all(probe, ["a", "b", "c"])
    assert [status.path for status in statuses] == [probe.at(name) for name in ("a", "b", "c")]
    assert not any(status.is_complete for status in statuses)


@rule("4.16", "12")
async def test_a_failing_element_fails_the_request_and_keeps_the_earlier_ones(probe: Probe) -> None:
    with pytest.raises(RemoteError):
        await create_all(probe, ["a", "missing/b", "c"])
    assert [status.name for status in await probe.list(probe.directory)] == ["a"]


@rule("4.16", "4.2")
async def test_a_repeated_batch_passes_over_what_it_made(probe: Probe) -> None:
    """Element i is protected by the id of the request plus i."""
    req_id = World.real().random.request_id() >> 8
    first = await create_all(probe, ["a", "b"], req_id)
    again = await create_all(probe, ["a", "b"], req_id)
    assert [status.id for status in again] == [status.id for status in first]


@rule("4.16", "2.2")
async def test_a_whole_batch(probe: Probe) -> None:
    names = list(CONTENT)
    await create_all(probe, names)
    blocks = await add_all(probe, names)
    assert len({located.block.id for located in blocks}) == 3
    # The server chooses workers per file; this client writes all to the first one's, as the Rust client does.
    stream, opened = await open_all(probe, blocks)
    assert [response.id for response in opened.responses] == [located.block.id for located in blocks]
    files = [pb.FileWriteData(path=probe.at(name), content=content) for name, content in CONTENT.items()]
    written, _ = await stream.frame(RequestStatus.RUNNING, pb.FilesBatchWriteRequest(files=files, req_id=1, seq_id=1))
    assert list(written.results) == [True] * 3
    lengths = [len(content) for content in CONTENT.values()]
    committed, _ = await stream.frame(RequestStatus.COMPLETE, final(blocks, lengths))
    assert list(committed.results) == [True] * 3
    worker_id = blocks[0].locs[0].worker_id
    requests = [
        pb.CompleteFileRequest(
            path=probe.at(name),
            len=len(content),
            client_name=CLIENT_NAME,
            commit_blocks=[commit(located, len(content), [worker_id])],
            only_flush=False,
        )
        for located, (name, content) in zip(blocks, CONTENT.items(), strict=True)
    ]
    reply = await probe.call(RpcCode.COMPLETE_FILES_BATCH, pb.CompleteFilesBatchRequest(requests=requests))
    assert list(reply.results) == [True] * 3
    for name, content in CONTENT.items():
        assert await probe.get(probe.at(name)) == content
        assert (await probe.stat(probe.at(name))).is_complete


@rule("4.16", "2.2")
async def test_a_batch_is_flushed_with_the_code_of_a_single_block(probe: Probe) -> None:
    await create_all(probe, ["a"])
    blocks = await add_all(probe, ["a"])
    stream, _ = await open_all(probe, blocks)
    files = [pb.FileWriteData(path=probe.at("a"), content=b"abc")]
    await stream.frame(RequestStatus.RUNNING, pb.FilesBatchWriteRequest(files=files, req_id=1, seq_id=1))
    stream.code = RpcCode.WRITE_BLOCK
    await stream.flush(3)
    stream.code = RpcCode.WRITE_BLOCKS_BATCH
    await stream.frame(RequestStatus.COMPLETE, final(blocks, [3]))
    reader = await probe.worker(blocks[0].locs[0])
    await reader.open_read(blocks[0].block.id, 3)
    assert await reader.read() == b"abc"


@rule("4.16", "2.2")
async def test_a_batch_is_cancelled(probe: Probe) -> None:
    await create_all(probe, ["a", "b"])
    blocks = await add_all(probe, ["a", "b"])
    stream, _ = await open_all(probe, blocks)
    await stream.frame(RequestStatus.CANCEL, final(blocks, [0, 0], cancel=True))
    reader = await probe.worker(blocks[0].locs[0])
    async with refused(BLOCK_NOT_FOUND, COMMON):
        await reader.open_read(blocks[0].block.id, 3)


@rule("4.16", "2.2")
async def test_a_batch_with_a_wrong_length_is_refused_or_says_so(probe: Probe) -> None:
    await create_all(probe, ["a"])
    blocks = await add_all(probe, ["a"])
    stream, _ = await open_all(probe, blocks)
    files = [pb.FileWriteData(path=probe.at("a"), content=b"abc")]
    await stream.frame(RequestStatus.RUNNING, pb.FilesBatchWriteRequest(files=files, req_id=1, seq_id=1))
    try:
        committed, _ = await stream.frame(RequestStatus.COMPLETE, final(blocks, [2]))
    except RemoteError as error:
        assert error.kind in (COMMON, IO)
    else:
        assert list(committed.results) == [False]


@rule("2.2")
async def test_a_worker_has_no_write_commits_batch(probe: Probe) -> None:
    stream = await probe.worker((await probe.info()).live_workers[0].address)
    async with refused(COMMON):
        await stream.open(RpcCode.WRITE_COMMITS_BATCH, pb.BlocksBatchCommitRequest())
