"""Section 4.7: a worker's write stream."""

from __future__ import annotations

import pytest
import trio
from conformance.probe import (
    BLOCK_NOT_FOUND,
    COMMON,
    IO,
    WRONLY,
    BlockStream,
    Probe,
    commit,
    pattern,
    refused,
)
from conformance.rules import ALPHA, HEAD, V041, rule

from curvfs.errors import RemoteError
from curvfs.units import MIB
from curvfs.wire.codes import RequestStatus
from curvfs.wire.messages import pb


async def new_block(probe: Probe, name: str = "f", block_size: int = MIB) -> pb.LocatedBlockProto:
    await probe.create(probe.at(name), block_size=block_size)
    located: pb.LocatedBlockProto = await probe.add_block(probe.at(name))
    return located


async def content(probe: Probe, located: pb.LocatedBlockProto, length: int) -> bytes:
    """What a reader gets from the block now."""
    stream = await probe.worker(located.locs[0])
    await stream.open_read(located.block.id, length)
    return (await stream.read())[:length]


@rule("4.7")
async def test_open_echoes_id_offset_and_block_size(probe: Probe) -> None:
    located = await new_block(probe)
    stream = await probe.worker(located.locs[0])
    reply = await stream.open_write(located.block, off=0)
    assert (reply.id, reply.off, reply.block_size) == (located.block.id, 0, MIB)
    assert reply.storage_type == pb.STORAGE_TYPE_PROTO_DISK
    assert not reply.HasField("path")
    assert not reply.HasField("pipeline_status")


@rule("4.7")
@pytest.mark.parametrize("off", [-1, MIB + 1])
async def test_open_at_an_impossible_position(probe: Probe, off: int) -> None:
    located = await new_block(probe)
    stream = await probe.worker(located.locs[0])
    async with refused(COMMON, IO):
        await stream.open_write(located.block, off=off)


@rule("4.7")
async def test_data_goes_on_from_the_position(probe: Probe) -> None:
    located = await new_block(probe)
    stream = await probe.writer(located)
    for piece in (b"ab", b"", b"cde"):
        await stream.write(piece)
    await stream.write(b"X", seek=1)
    await stream.write(b"Y")
    await stream.complete(5)
    assert await content(probe, located, 5) == b"aXYde"


@rule("4.7")
@pytest.mark.parametrize("seek", [-1, MIB])
async def test_seeks_stay_inside_the_block(probe: Probe, seek: int) -> None:
    stream = await probe.writer(await new_block(probe))
    async with refused(COMMON, IO):
        await stream.write(b"x", seek=seek)


@rule("4.7", "1.8", "8.4")
async def test_writing_past_the_block_is_refused(probe: Probe) -> None:
    located = await new_block(probe)
    stream = await probe.writer(located)
    await stream.write(pattern(MIB))
    async with refused(COMMON if probe.version is ALPHA else IO):
        await stream.write(b"x")
    await stream.complete(MIB)
    assert await content(probe, located, 10) == pattern(10)


@rule("4.7")
async def test_a_frame_with_another_request_id_is_refused(probe: Probe) -> None:
    stream = await probe.writer(await new_block(probe))
    async with refused(COMMON, text="Request id mismatch"):
        await stream.frame(RequestStatus.RUNNING, None, b"x", req_id=stream.req_id + 1)
    async with refused(COMMON, text="Request id mismatch"):
        await stream.frame(RequestStatus.COMPLETE, stream.final(0), req_id=stream.req_id + 1)


@rule("4.7")
async def test_running_without_an_open(probe: Probe) -> None:
    stream = await probe.worker((await probe.info()).live_workers[0].address)
    async with refused(COMMON, text="Uninitialized"):
        await stream.write(b"x")


@rule("4.7")
@pytest.mark.parametrize("length", [500, 2000])
async def test_complete_must_name_the_exact_length(probe: Probe, length: int) -> None:
    located = await new_block(probe)
    stream = await probe.writer(located)
    await stream.write(b"x" * 1000)
    async with refused(COMMON, text="length mismatch"):
        await stream.complete(length)


@rule("4.7")
async def test_complete_over_the_block_size_aborts(probe: Probe) -> None:
    located = await new_block(probe)
    stream = await probe.writer(located)
    await stream.write(b"x")
    async with refused(COMMON, IO):
        await stream.complete(MIB + 1)


@rule("4.7", "8.4")
async def test_complete_repeated(probe: Probe) -> None:
    """Fine with the same length, except on v0.3.2-alpha."""
    located = await new_block(probe)
    stream = await probe.writer(located)
    await stream.write(b"abc")
    await stream.complete(3)
    if probe.version is ALPHA:
        async with refused(COMMON, text="status incorrect"):
            await stream.complete(3)
    else:
        await stream.complete(3)
    assert await content(probe, located, 3) == b"abc"


@rule("4.7", "12")
async def test_complete_of_an_unfinished_block_without_an_open(probe: Probe) -> None:
    located = await new_block(probe)
    stream = await probe.writer(located)
    await stream.write(b"abc")
    await stream.aclose()
    other = await probe.worker(located.locs[0])
    other.opened = stream.opened
    await other.complete(3)
    assert await content(probe, located, 3) == b"abc"


@rule("4.7", "8.4", "12")
async def test_complete_of_a_finished_block_without_an_open(probe: Probe) -> None:
    located = (await probe.put(probe.at("f"), b"abc")).block_locs[0]
    other = await probe.worker(located.locs[0])
    other.opened = pb.BlockWriteRequest(block=located.block, block_size=MIB)
    if probe.version is ALPHA:
        async with refused(COMMON):
            await other.complete(3)
    else:
        await other.complete(3)


@rule("4.7")
async def test_cancel_removes_a_new_block(probe: Probe) -> None:
    located = await new_block(probe)
    stream = await probe.writer(located)
    await stream.write(b"abc")
    await stream.cancel()
    async with refused(COMMON if probe.version is ALPHA else BLOCK_NOT_FOUND):
        await content(probe, located, 3)


@rule("4.7", "12")
async def test_open_cancel_open_starts_over(probe: Probe) -> None:
    located = await new_block(probe)
    first = await probe.writer(located)
    await first.write(b"aaaaaaaaaa")
    await first.aclose()
    second = await probe.writer(located)
    await second.cancel()
    third = await probe.writer(located)
    await third.write(b"bbbbb")
    await third.complete(5)
    assert await content(probe, located, 5) == b"bbbbb"


@rule("4.7")
async def test_a_connection_that_ends_leaves_the_bytes(probe: Probe) -> None:
    """... and a reopened stream that ends shorter fails."""
    located = await new_block(probe)
    first = await probe.writer(located)
    await first.write(b"aaaaaaaaaa")
    await first.aclose()
    second = await probe.writer(located)
    await second.write(b"bbbbb")
    async with refused(COMMON, text="length mismatch"):
        await second.complete(5)
    await second.complete(10)
    assert await content(probe, located, 10) == b"bbbbbaaaaa"


@rule("4.7")
async def test_another_open_on_the_connection_leaves_the_bytes(probe: Probe) -> None:
    one = await new_block(probe, "one")
    two = await new_block(probe, "two")
    two.locs[0].CopyFrom(one.locs[0])
    stream = await probe.worker(one.locs[0])
    await stream.open_write(one.block)
    await stream.write(b"abc")
    await stream.open_write(two.block)
    await stream.write(b"def")
    await stream.complete(3)
    await stream.open_write(one.block, off=3)
    await stream.complete(3)
    assert (await content(probe, one, 3), await content(probe, two, 3)) == (b"abc", b"def")


@rule("4.7")
async def test_bytes_of_a_new_block_are_readable_before_complete(probe: Probe) -> None:
    located = await new_block(probe)
    stream = await probe.writer(located)
    await stream.write(b"abc")
    assert await content(probe, located, 3) == b"abc"


@rule("4.7", "8.4", "12")
async def test_two_streams_on_one_unfinished_block_write_into_one_file(probe: Probe) -> None:
    located = await new_block(probe)
    one, two = await probe.writer(located), await probe.writer(located)
    await one.write(b"aaaaaaaaaa")
    await two.write(b"bbbbbbbbbb")
    await two.complete(10)
    if probe.version is ALPHA:
        async with refused(COMMON, text="status incorrect"):
            await one.complete(10)
    else:
        await one.complete(10)
    assert await content(probe, located, 10) == b"bbbbbbbbbb"


# ------------------------------------------------------------------------------------- rewriting committed blocks


async def rewriting(probe: Probe, data: bytes = b"aaaaaaaaaa") -> tuple[pb.LocatedBlockProto, BlockStream]:
    """A committed block, and a stream that rewrites it."""
    located = (await probe.put(probe.at("f"), data)).block_locs[0]
    await probe.open(probe.at("f"), WRONLY)
    return located, await probe.writer(located)


@rule("4.7", "8.4", "12")
async def test_a_rewrite_is_seen_at_complete(probe: Probe) -> None:
    """On v0.3.2-alpha readers see it while it happens."""
    located, stream = await rewriting(probe)
    await stream.write(b"QQQ")
    during = await content(probe, located, 10)
    assert during == (b"QQQaaaaaaa" if probe.version is ALPHA else b"aaaaaaaaaa")
    await stream.complete(10)
    assert await content(probe, located, 10) == b"QQQaaaaaaa"


@rule("4.7", "7.4", only=[V041, HEAD])
async def test_an_open_reader_keeps_its_generation(probe: Probe) -> None:
    located, stream = await rewriting(probe)
    reader = await probe.reader(located)
    await stream.write(b"QQQ")
    await stream.complete(10)
    assert await reader.read() == b"aaaaaaaaaa"


@rule("4.7", "8.4")
async def test_a_rewrite_may_be_extended_by_complete(probe: Probe) -> None:
    """With zeros; v0.3.2-alpha wants the exact length there too."""
    located, stream = await rewriting(probe)
    if probe.version is ALPHA:
        async with refused(COMMON, text="length mismatch"):
            await stream.complete(20)
        await stream.complete(10)
        return
    await stream.complete(20)
    await probe.complete(probe.at("f"), 20, commit(located, 20))
    assert await probe.get(probe.at("f")) == b"aaaaaaaaaa" + bytes(10)


@rule("4.7")
async def test_a_rewrite_cannot_end_shorter_than_its_file(probe: Probe) -> None:
    _, stream = await rewriting(probe)
    async with refused(COMMON, text="length mismatch"):
        await stream.complete(5)


@rule("4.7", "8.4", only=[V041, HEAD])
async def test_cancel_of_a_rewrite_keeps_the_committed_generation(probe: Probe) -> None:
    located, stream = await rewriting(probe)
    await stream.write(b"QQQ")
    await stream.cancel(10)
    assert await content(probe, located, 10) == b"aaaaaaaaaa"


@rule("8.4", "13", only=[ALPHA])
async def test_cancel_of_a_rewrite_deletes_the_block_on_an_old_worker(probe: Probe) -> None:
    located, stream = await rewriting(probe)
    await stream.cancel(10)
    async with refused(COMMON):
        await content(probe, located, 10)


@rule("4.7", only=[V041, HEAD])
async def test_bytes_of_a_dropped_rewrite_reappear_at_the_next_complete(probe: Probe) -> None:
    located, stream = await rewriting(probe)
    await stream.write(b"QQQ")
    await stream.aclose()
    assert await content(probe, located, 10) == b"aaaaaaaaaa"
    again = await probe.writer(located)
    await again.write(b"ZZ", seek=8)
    await again.complete(10)
    assert await content(probe, located, 10) == b"QQQaaaaaZZ"


@rule("8.4")
async def test_cancel_of_a_block_that_the_worker_does_not_have(probe: Probe) -> None:
    located = await new_block(probe)
    stream = await probe.worker(located.locs[0])
    stream.opened = pb.BlockWriteRequest(block=located.block, block_size=MIB)
    if probe.version is ALPHA:
        async with refused(COMMON):
            await stream.cancel()
    else:
        await stream.cancel()


# -------------------------------------------------------------------------------------------------- alloc_opts, space


@rule("4.7", "4.10")
async def test_alloc_opts_set_the_size_of_a_block(probe: Probe) -> None:
    located = await new_block(probe)
    block = pb.ExtendedBlockProto()
    block.CopyFrom(located.block)
    block.alloc_opts.CopyFrom(pb.FileAllocOptsProto(truncate=True, off=0, len=5000, mode=0))
    block.block_size = 5000
    stream = await probe.worker(located.locs[0])
    await stream.open_write(block)
    await stream.write(b"abc")
    await stream.complete(5000)
    assert await content(probe, located, 5000) == b"abc" + bytes(4997)


@rule("4.7", "4.10")
async def test_alloc_opts_beyond_the_block_are_refused(probe: Probe) -> None:
    located = await new_block(probe)
    block = pb.ExtendedBlockProto()
    block.CopyFrom(located.block)
    block.alloc_opts.CopyFrom(pb.FileAllocOptsProto(truncate=True, off=0, len=MIB + 1, mode=0))
    stream = await probe.worker(located.locs[0])
    with pytest.raises(RemoteError):
        await stream.open_write(block)


@rule("4.7", "10", embedded="others use the space of a cluster at the same time")
async def test_an_open_stream_reserves_its_whole_block(probe: Probe) -> None:
    async def available(worker_id: int) -> int:
        for worker in (await probe.info()).live_workers:
            if worker.address.worker_id == worker_id:
                return int(worker.available)
        raise AssertionError("the worker is gone")

    located = await new_block(probe, block_size=1 << 30)
    worker_id = located.locs[0].worker_id
    before = await available(worker_id)
    stream = await probe.writer(located, block_size=1 << 30)
    assert before - await available(worker_id) >= (1 << 30) - (64 << 20)
    await stream.write(b"abc")
    await stream.complete(3)
    assert before - await available(worker_id) < 64 << 20


@rule("4.7", embedded="others use the space of a cluster at the same time")
@pytest.mark.parametrize("how", ["cancelled", "replaced", "disconnected"])
async def test_what_a_stream_reserved_is_free_when_it_ends(probe: Probe, how: str) -> None:
    async def reserved() -> int:
        return int((await probe.info()).reserved_bytes)

    async def nothing_reserved() -> None:
        with trio.fail_after(10):
            while await reserved():
                await trio.sleep(0.02)

    await nothing_reserved()  # by streams of earlier tests
    located = await new_block(probe, block_size=1 << 30)
    stream = await probe.writer(located, block_size=1 << 30)
    await stream.write(b"abc")
    assert await reserved() == (1 << 30) - 3
    if how == "cancelled":
        await stream.cancel()
    elif how == "replaced":
        await stream.open_read(located.block.id, 3)
    else:
        await stream.wire.aclose()
    await nothing_reserved()


@rule("4.13", "4.3", "12")
async def test_blocks_without_a_file_go_away(probe: Probe) -> None:
    """A new Open gets BlockNotFound; an open read stream goes on to the end."""
    located = (await probe.put(probe.at("f"), pattern(MIB))).block_locs[0]
    reader = await probe.reader(located, chunk_size=MIB // 2)
    first = await reader.read()
    await probe.delete(probe.at("f"))
    await gone(probe, located)
    assert first + await reader.read() == pattern(MIB)


@rule("4.5", "12")
async def test_blocks_of_an_overwritten_file_go_away(probe: Probe) -> None:
    located = (await probe.put(probe.at("f"), b"old")).block_locs[0]
    await probe.put(probe.at("f"), b"newer")
    await gone(probe, located)
    assert await probe.get(probe.at("f")) == b"newer"


@rule("4.13", "12")
async def test_blocks_of_a_replaced_file_go_away(probe: Probe) -> None:
    located = (await probe.put(probe.at("b"), b"old")).block_locs[0]
    await probe.put(probe.at("a"), b"new")
    await probe.rename(probe.at("a"), probe.at("b"))
    await gone(probe, located)
    assert await probe.get(probe.at("b")) == b"new"


async def gone(probe: Probe, located: pb.LocatedBlockProto) -> None:
    """Wait until the worker has dropped a block (at its next heartbeat, in a cluster)."""
    stream = await probe.worker(located.locs[0])
    for _ in range(200):
        try:
            await stream.open_read(located.block.id, located.block.block_size)
        except RemoteError as error:
            assert error.kind == (COMMON if probe.version is ALPHA else BLOCK_NOT_FOUND)
            return
        await stream.complete_read()
        await trio.sleep(0.1)
    raise AssertionError("the block is still there")
