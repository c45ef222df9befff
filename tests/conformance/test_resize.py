"""Section 4.10: truncate, extend, allocate, holes, AssignWorker."""

from __future__ import annotations

from typing import Any

import pytest
from conformance.probe import COMMON, FILE_SIZE, WRONLY, Probe, commit, pattern, refused
from conformance.rules import ALPHA, rule

from curvfs.units import MIB
from curvfs.wire.messages import pb

OUT_OF_SPACE = 17


def shape(blocks: Any) -> list[tuple[int, bool, int | None]]:
    """Per block: length, whether it has locations, length of its alloc_opts."""
    return [
        (
            each.block.block_size,
            len(each.locs) > 0,
            each.block.alloc_opts.len if each.block.HasField("alloc_opts") else None,
        )
        for each in blocks.block_locs
    ]


async def worker_step(probe: Probe, blocks: Any) -> list[Any]:
    """Open and Complete every block with locations and alloc_opts, as 4.10 asks; returns the commits."""
    commits = []
    for located in blocks.block_locs:
        if located.locs and located.block.HasField("alloc_opts"):
            for address in located.locs:
                stream = await probe.worker(address)
                await stream.open_write(located.block, block_size=blocks.status.block_size)
                await stream.complete(located.block.block_size)
            commits.append(commit(located, located.block.block_size))
    return commits


async def truncate(probe: Probe, path: str, length: int) -> None:
    """The whole protocol of a caller on a closed file."""
    await probe.open(path, WRONLY)
    commits = await worker_step(probe, await probe.resize(path, length))
    await probe.complete(path, length, *commits, only_flush=True)
    await probe.complete(path, length)


@rule("4.10")
async def test_the_same_length_changes_nothing(probe: Probe) -> None:
    before = await probe.put(probe.at("f"), b"abc")
    after = await probe.resize(probe.at("f"), 3)
    assert after.block_locs == before.block_locs


@rule("4.10", "12")
async def test_shrink_inside_a_block(probe: Probe) -> None:
    await probe.put(probe.at("f"), pattern(3 * MIB))
    length = MIB + MIB // 2
    blocks = await probe.resize(probe.at("f"), length)
    assert blocks.status.len == length
    assert shape(blocks) == [(MIB, True, None), (MIB // 2, True, MIB // 2)]
    assert blocks.block_locs[1].block.alloc_opts.truncate
    commits = await worker_step(probe, blocks)
    assert shape(await probe.locate(probe.at("f")))[1] == (MIB // 2, True, MIB // 2)  # the commit clears it
    await probe.complete(probe.at("f"), length, *commits, only_flush=True)
    assert shape(await probe.locate(probe.at("f")))[1] == (MIB // 2, True, None)
    assert await probe.get(probe.at("f")) == pattern(length)


@rule("4.10")
@pytest.mark.parametrize("length", [0, MIB, 2 * MIB])
async def test_shrink_to_a_block_boundary(probe: Probe, length: int) -> None:
    await probe.put(probe.at("f"), pattern(3 * MIB))
    blocks = await probe.resize(probe.at("f"), length)
    assert shape(blocks) == [(MIB, True, None)] * (length // MIB)
    assert await probe.get(probe.at("f")) == pattern(length)


@rule("4.10", "8.4", "12")
async def test_extend_fills_the_tail_and_appends_holes(probe: Probe) -> None:
    """On v0.3.2-alpha the tail block gets alloc_opts every time."""
    await probe.put(probe.at("f"), pattern(MIB + 5))
    length = 3 * MIB + MIB // 2
    blocks = await probe.resize(probe.at("f"), length)
    assert blocks.status.len == length
    tail_alloc = MIB if probe.version is ALPHA else None
    assert shape(blocks) == [
        (MIB, True, None),
        (MIB, True, tail_alloc),
        (MIB, False, MIB),
        (MIB // 2, False, MIB // 2),
    ]
    commits = await worker_step(probe, blocks)
    await probe.complete(probe.at("f"), length, *commits, only_flush=True)
    assert await probe.get(probe.at("f")) == pattern(MIB + 5) + bytes(length - MIB - 5)


@rule("4.10", "8.4")
async def test_extend_inside_the_tail_block(probe: Probe) -> None:
    await probe.put(probe.at("f"), b"abc")
    await truncate(probe, probe.at("f"), 10)
    status = await probe.stat(probe.at("f"))
    assert (status.len, status.is_complete) == (10, True)
    assert await probe.get(probe.at("f")) == b"abc" + bytes(7)


@rule("4.10")
async def test_shrink_then_extend_shows_zeros(probe: Probe) -> None:
    """With the worker step in between, as clients must."""
    await probe.put(probe.at("f"), b"x" * 1000)
    await truncate(probe, probe.at("f"), 10)
    await truncate(probe, probe.at("f"), 1000)
    assert await probe.get(probe.at("f")) == b"x" * 10 + bytes(990)


@rule("4.10")
async def test_extend_an_empty_file(probe: Probe) -> None:
    await probe.create(probe.at("f"))
    blocks = await probe.resize(probe.at("f"), MIB + 1)
    assert shape(blocks) == [(MIB, False, MIB), (1, False, 1)]
    assert await probe.get(probe.at("f")) == bytes(MIB + 1)


@rule("4.10")
async def test_fallocate(probe: Probe) -> None:
    await probe.put(probe.at("f"), b"abc")
    blocks = await probe.resize(probe.at("f"), MIB + 10, truncate=False)
    assert blocks.status.len == MIB + 10
    assert [each[:2] for each in shape(blocks)] == [(MIB, True), (10, False)]
    assert not blocks.block_locs[1].block.alloc_opts.truncate
    await probe.complete(probe.at("f"), MIB + 10, *(await worker_step(probe, blocks)))
    assert await probe.get(probe.at("f")) == b"abc" + bytes(MIB + 7)


@rule("4.10", "1.8")
async def test_lengths_out_of_range(probe: Probe) -> None:
    await probe.put(probe.at("f"), b"abc")
    async with refused(FILE_SIZE):
        await probe.resize(probe.at("f"), 1 << 51)
    async with refused(COMMON):
        await probe.resize(probe.at("f"), -1)
    async with refused(COMMON):
        await probe.resize(probe.at("f"), 10, off=1)
    assert (await probe.stat(probe.at("f"))).len == 3


@rule("4.10")
@pytest.mark.parametrize("mode", [2, 8, 32, 64])
async def test_modes_that_nobody_has(probe: Probe, mode: int) -> None:
    await probe.put(probe.at("f"), b"abc")
    async with refused(COMMON, text="mode must be"):
        await probe.resize(probe.at("f"), 10, truncate=False, mode=mode)


@rule("4.10")
async def test_truncate_does_not_look_at_mode(probe: Probe) -> None:
    await probe.put(probe.at("f"), b"abc")
    assert (await probe.resize(probe.at("f"), 0, mode=2)).status.len == 0


@rule("4.10", "1.8")
async def test_allocation_is_bounded_by_the_space_of_the_cluster(probe: Probe) -> None:
    await probe.create(probe.at("f"), block_size=1 << 30)
    async with refused(OUT_OF_SPACE):
        await probe.resize(probe.at("f"), 1 << 50, truncate=False)
    assert (await probe.stat(probe.at("f"))).len == 0


@rule("4.10", "8.4")
async def test_resize_of_what_is_no_file(probe: Probe) -> None:
    async with refused(COMMON, text="not exist"):
        await probe.resize(probe.at("missing"), 10)
    async with refused(COMMON, text="Not a file"):
        await probe.resize(probe.directory, 10)


@rule("4.10")
async def test_resize_sets_mtime(probe: Probe) -> None:
    await probe.put(probe.at("f"), b"abc")
    await probe.set_attr(probe.at("f"), mtime=1000)
    assert (await probe.resize(probe.at("f"), 0)).status.mtime > 1000


# -------------------------------------------------------------------------------------------------- AssignWorker


@rule("4.10", "4.4")
async def test_writing_into_a_hole(probe: Probe) -> None:
    await probe.put(probe.at("f"), pattern(MIB))
    hole = (await probe.resize(probe.at("f"), 2 * MIB)).block_locs[1]
    placed = await probe.assign(probe.at("f"), hole.block)
    assert (placed.block, len(placed.locs)) == (hole.block, 1)
    stream = await probe.writer(placed)
    await stream.write(b"in the hole", seek=1000)
    await stream.complete(MIB)
    await probe.complete(probe.at("f"), 2 * MIB, commit(placed, MIB))
    data = await probe.get(probe.at("f"))
    assert data == pattern(MIB) + bytes(1000) + b"in the hole" + bytes(MIB - 1011)
    assert shape(await probe.locate(probe.at("f")))[1] == (MIB, True, None)


@rule("4.10")
async def test_assigning_again_returns_the_same_block(probe: Probe) -> None:
    await probe.create(probe.at("f"))
    hole = (await probe.resize(probe.at("f"), 10)).block_locs[0]
    one = await probe.assign(probe.at("f"), hole.block)
    other = await probe.assign(probe.at("f"), hole.block)
    assert one.block == other.block
    assert len(other.locs) == 1
    assert shape(await probe.locate(probe.at("f"))) == [(10, False, 10)]


@rule("4.10", "8.4")
async def test_assign_of_what_is_no_block(probe: Probe) -> None:
    block = pb.ExtendedBlockProto(id=12345)
    async with refused(COMMON, text="not exist"):
        await probe.assign(probe.at("missing"), block)
    await probe.put(probe.at("f"), b"abc")
    async with refused(COMMON):
        await probe.assign(probe.at("f"), block)
