"""Section 4.11: a worker's read stream."""

from __future__ import annotations

import pytest
from conformance.probe import BLOCK_NOT_FOUND, COMMON, IO, Probe, pattern, refused
from conformance.rules import ALPHA, HEAD, V041, rule

from curvfs.units import MIB
from curvfs.wire.codes import RequestStatus
from curvfs.wire.messages import pb

DATA = pattern(300_000)


async def block(probe: Probe, data: bytes = DATA) -> pb.LocatedBlockProto:
    return (await probe.put(probe.at("f"), data)).block_locs[0]


@rule("4.11")
async def test_chunks_until_the_end(probe: Probe) -> None:
    stream = await probe.reader(await block(probe), chunk_size=131072)
    assert [len(await stream.read()) for _ in range(3)] == [131072, 131072, 37856]
    async with refused(IO):
        await stream.read()
    await stream.complete_read()


@rule("4.11")
async def test_open_echoes(probe: Probe) -> None:
    located = await block(probe)
    stream = await probe.worker(located.locs[0])
    reply = await stream.open_read(located.block.id, len(DATA))
    assert (reply.id, reply.len) == (located.block.id, len(DATA))
    assert reply.storage_type == pb.STORAGE_TYPE_PROTO_DISK
    assert not reply.HasField("path")


@rule("4.11")
@pytest.mark.parametrize("chunk_size", [1, 4096, 65537, MIB, 16 * MIB])
async def test_chunk_sizes(probe: Probe, chunk_size: int) -> None:
    stream = await probe.reader(await block(probe), off=100, chunk_size=chunk_size)
    assert await stream.read() == DATA[100 : 100 + chunk_size]
    await stream.complete_read()


@rule("4.11")
@pytest.mark.parametrize("chunk_size", [0, -1])
async def test_impossible_chunk_sizes(probe: Probe, chunk_size: int) -> None:
    async with refused(COMMON):
        await probe.reader(await block(probe), chunk_size=chunk_size)


@rule("4.11", "12")
async def test_chunks_over_16_mib(probe: Probe) -> None:
    """v0.3.2-alpha takes them."""
    located = await block(probe)
    if probe.version is ALPHA:
        stream = await probe.reader(located, chunk_size=16 * MIB + 1)
        assert await stream.read() == DATA
        return
    async with refused(COMMON, text="exceeds maximum allowed value"):
        await probe.reader(located, chunk_size=16 * MIB + 1)


@rule("4.11")
async def test_read_ahead_over_16_mib(probe: Probe) -> None:
    located = await block(probe)
    stream = await probe.reader(located, read_ahead_len=17 * MIB, enable_read_ahead=False)
    assert (await stream.read())[:5] == DATA[:5]


@rule("4.11", only=[V041, HEAD])
async def test_read_ahead_over_16_mib_is_refused_when_enabled(probe: Probe) -> None:
    async with refused(COMMON):
        await probe.reader(await block(probe), read_ahead_len=17 * MIB)


@rule("4.11")
async def test_seeks(probe: Probe) -> None:
    stream = await probe.reader(await block(probe), chunk_size=1000)
    assert await stream.read(seek=200_000) == DATA[200_000:201_000]
    assert await stream.read() == DATA[201_000:202_000]
    assert await stream.read(seek=0) == DATA[:1000]
    assert await stream.read(seek=len(DATA) - 1) == DATA[-1:]


@rule("4.11")
@pytest.mark.parametrize("seek", [len(DATA), len(DATA) + 1, -1])
async def test_reading_at_or_past_the_end_is_an_error(probe: Probe, seek: int) -> None:
    stream = await probe.reader(await block(probe))
    async with refused(IO, COMMON) as errors:
        await stream.read(seek=seek)
    if seek >= 0:
        assert errors[0].kind == IO
    assert (await stream.read(seek=0))[:4] == DATA[:4]


@rule("4.11")
async def test_open_at_the_end_then_read(probe: Probe) -> None:
    stream = await probe.reader(await block(probe), off=len(DATA))
    async with refused(IO):
        await stream.read()


@rule("4.11")
@pytest.mark.parametrize("off", [-1, len(DATA) + 1])
async def test_open_at_an_impossible_position(probe: Probe, off: int) -> None:
    async with refused(COMMON, IO):
        await probe.reader(await block(probe), off=off)


@rule("4.11", "1.8", "8.4")
async def test_an_unknown_block(probe: Probe) -> None:
    stream = await probe.worker((await probe.info()).live_workers[0].address)
    async with refused(COMMON if probe.version is ALPHA else BLOCK_NOT_FOUND):
        await stream.open_read(12345678901, 100)


@rule("4.11")
async def test_running_without_an_open(probe: Probe) -> None:
    stream = await probe.worker((await probe.info()).live_workers[0].address)
    stream.code = 81
    async with refused(COMMON, text="Uninitialized"):
        await stream.read()


@rule("4.7", "12")
async def test_request_ids_of_a_read_stream(probe: Probe) -> None:
    """Running frames are not checked; Complete is, except on v0.3.2-alpha."""
    stream = await probe.reader(await block(probe))
    _, data = await stream.frame(RequestStatus.RUNNING, req_id=stream.req_id + 1)
    assert data == DATA[:131072]
    if probe.version is ALPHA:
        await stream.frame(RequestStatus.COMPLETE, stream.opened, req_id=stream.req_id + 1)
        return
    async with refused(COMMON, text="Request id mismatch"):
        await stream.frame(RequestStatus.COMPLETE, stream.opened, req_id=stream.req_id + 1)


# ------------------------------------------------------------------------------------- the len field, by version


@rule("4.11", "8.4", only=[V041, HEAD])
async def test_len_bounds_what_is_sent(probe: Probe) -> None:
    located = await block(probe)
    stream = await probe.worker(located.locs[0])
    reply = await stream.open_read(located.block.id, 100)
    assert reply.len == (100 if probe.version is HEAD else len(DATA))
    if probe.version is HEAD:
        assert await stream.read() == DATA[:100]


@rule("4.11", "8.4", only=[V041, HEAD])
async def test_beyond_the_physical_end_are_zeros(probe: Probe) -> None:
    located = await block(probe, b"abc")
    stream = await probe.worker(located.locs[0])
    reply = await stream.open_read(located.block.id, 10)
    assert reply.len == 10
    assert await stream.read() == b"abc" + bytes(7)
    assert await stream.read(seek=7) == bytes(3)


@rule("8.4", only=[HEAD])
async def test_len_0_with_an_offset_is_refused(probe: Probe) -> None:
    located = await block(probe, b"abc")
    stream = await probe.worker(located.locs[0])
    async with refused(COMMON, IO):
        await stream.open_read(located.block.id, 0, off=1)


@rule("8.4", "12", only=[ALPHA])
async def test_old_workers_ignore_len(probe: Probe) -> None:
    """They answer the physical length, send whole chunks, and stop at the physical end."""
    located = await block(probe)
    stream = await probe.worker(located.locs[0])
    reply = await stream.open_read(located.block.id, 100)
    assert reply.len == len(DATA)
    assert await stream.read() == DATA[:131072]
    await stream.open_read(located.block.id, len(DATA) + 500)
    assert await stream.read(seek=len(DATA) - 10) == DATA[-10:]
    async with refused(IO):
        await stream.read()
    async with refused(COMMON, IO):
        await stream.open_read(located.block.id, len(DATA) + 500, off=len(DATA) + 1)
        await stream.read()


@rule("8.4", only=[ALPHA])
async def test_an_old_worker_answers_the_capacity_of_an_unfinished_block(probe: Probe) -> None:
    await probe.create(probe.at("f"))
    located = await probe.add_block(probe.at("f"))
    writer = await probe.writer(located)
    await writer.write(b"abc")
    stream = await probe.worker(located.locs[0])
    assert (await stream.open_read(located.block.id, 3)).len == MIB
    assert await stream.read() == b"abc"
