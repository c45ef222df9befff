"""Sections 4.4 to 4.6 and 4.8: blocks of a file on the master, OpenFile, AddBlock, CompleteFile, flush."""

from __future__ import annotations

import pytest
from conformance.probe import (
    APPEND,
    COMMON,
    CREAT,
    EXCL,
    NOT_FOUND,
    OTHER_CLIENT,
    RDONLY,
    RDWR,
    TRUNC,
    WRONLY,
    Probe,
    commit,
    pattern,
    refused,
)
from conformance.rules import ALPHA, HEAD, V041, rule

from curvfs.units import MIB
from curvfs.wire.messages import pb

# ------------------------------------------------------------------------------------------------------------ 4.4


@rule("4.4")
async def test_block_ids_hold_the_inode_id_and_ascend(probe: Probe) -> None:
    blocks = await probe.put(probe.at("f"), bytes(2 * MIB + 1))
    ids = [located.block.id for located in blocks.block_locs]
    assert ids == [(blocks.status.id << 24) | seq for seq in (0, 1, 2)]


@rule("4.4")
async def test_block_numbers_are_never_used_again(probe: Probe) -> None:
    first = (await probe.put(probe.at("f"), b"abc")).block_locs[0]
    second = (await probe.put(probe.at("f"), b"abcd")).block_locs[0]
    assert second.block.id == first.block.id + 1


@rule("4.4", "12")
async def test_a_short_block_that_is_not_the_last_makes_the_file_unreadable(probe: Probe) -> None:
    await probe.create(probe.at("f"))
    first = await probe.add_block(probe.at("f"))
    made = await probe.fill(first, b"x" * 100)
    second = await probe.add_block(probe.at("f"), last=first, file_len=100, commits=[made])
    await probe.complete(probe.at("f"), 103, await probe.fill(second, b"abc"))
    async with refused(COMMON, text="block status abnormal"):
        await probe.locate(probe.at("f"))
    async with refused(COMMON, text="block status abnormal"):
        await probe.open(probe.at("f"), WRONLY)
    assert (await probe.stat(probe.at("f"))).len == 103
    await probe.create(probe.at("f"))  # repaired by TRUNC
    assert list((await probe.locate(probe.at("f"))).block_locs) == []


@rule("4.4", "4.5")
@pytest.mark.parametrize("length", [150, 101])
async def test_length_and_blocks_must_agree(probe: Probe, length: int) -> None:
    await probe.create(probe.at("f"))
    located = await probe.add_block(probe.at("f"))
    made = await probe.fill(located, b"x" * 100)
    async with refused(COMMON, text="Complete len is not equal to file len"):
        await probe.complete(probe.at("f"), length, made)
    async with refused(COMMON, text="Complete len is not equal to file len"):
        await probe.add_block(probe.at("f"), last=located, file_len=length, commits=[made])
    status = await probe.stat(probe.at("f"))
    assert (status.len, status.is_complete) == (0, False)  # nothing of a failed request is kept
    assert [each.block.block_size for each in (await probe.locate(probe.at("f"))).block_locs] == [0]
    await probe.complete(probe.at("f"), 100, made)
    assert await probe.get(probe.at("f")) == b"x" * 100


@rule("4.4")
async def test_a_length_shorter_than_the_blocks_is_refused_or_raised(probe: Probe) -> None:
    """``max(old length, sent length)`` has to equal the sum of the blocks."""
    await probe.put(probe.at("f"), b"x" * 100)
    assert (await probe.complete(probe.at("f"), 50)).result
    assert (await probe.stat(probe.at("f"))).len == 100


@rule("4.4")
async def test_an_allocated_block_shows_no_locations_before_its_commit(probe: Probe) -> None:
    await probe.create(probe.at("f"))
    located = await probe.add_block(probe.at("f"))
    assert len(located.locs) == 1
    shown = (await probe.locate(probe.at("f"))).block_locs[0]
    assert (shown.block.id, shown.block.block_size, list(shown.locs)) == (located.block.id, 0, [])
    assert not shown.block.HasField("alloc_opts")
    made = await probe.fill(located, b"abc")
    await probe.complete(probe.at("f"), 3, made, only_flush=True)
    shown = (await probe.locate(probe.at("f"))).block_locs[0]
    assert [worker.worker_id for worker in shown.locs] == [located.locs[0].worker_id]


# ----------------------------------------------------------------------------------------------- 4.5: OpenFile


@rule("4.5")
async def test_open_read_only_is_get_block_locations(probe: Probe) -> None:
    blocks = await probe.put(probe.at("f"), b"abc")
    assert await probe.open(probe.at("f"), RDONLY) == blocks
    async with refused(NOT_FOUND):
        await probe.open(probe.at("missing"), RDONLY)
    async with refused(COMMON, text="Not a file"):
        await probe.open(probe.directory, RDONLY)


@rule("4.5")
@pytest.mark.parametrize("access", [WRONLY, RDWR])
async def test_open_for_write_with_creat_makes_the_file(probe: Probe, access: int) -> None:
    opened = await probe.open(probe.at("f"), access | CREAT, mode=0o600, x_attr={"user.k": b"v"})
    assert (opened.status.len, opened.status.mode, opened.status.is_complete) == (0, 0o600, False)
    assert list(opened.block_locs) == []
    assert dict(opened.status.x_attr) == {"user.k": b"v"}


@rule("4.5")
async def test_open_for_write_of_what_is_missing_or_a_directory(probe: Probe) -> None:
    async with refused(NOT_FOUND):
        await probe.open(probe.at("missing"), WRONLY)
    async with refused(COMMON, text="is a directory"):
        await probe.open(probe.directory, WRONLY)
    async with refused(COMMON, text="Parent directory doesn't exist"):
        await probe.open(probe.at("a/f"), WRONLY | CREAT)


@rule("4.5")
async def test_open_for_write_returns_the_blocks(probe: Probe) -> None:
    blocks = await probe.put(probe.at("f"), b"abc")
    for flags in (WRONLY, RDWR, WRONLY | APPEND, WRONLY | CREAT):
        opened = await probe.open(probe.at("f"), flags)
        assert opened.block_locs == blocks.block_locs
        assert not opened.status.is_complete


@rule("4.5")
async def test_open_with_trunc(probe: Probe) -> None:
    before = await probe.put(probe.at("f"), b"abc", mode=0o600)
    opened = await probe.open(probe.at("f"), WRONLY | TRUNC, block_size=2 * MIB)
    status = opened.status
    assert (status.id, status.len, status.mode, status.block_size) == (before.status.id, 0, 0o600, 2 * MIB)
    assert list(opened.block_locs) == []


@rule("4.5")
@pytest.mark.parametrize("flags", [RDONLY | CREAT, RDONLY | TRUNC, RDONLY | CREAT | EXCL])
async def test_open_read_only_makes_and_cuts_nothing(probe: Probe, flags: int) -> None:
    blocks = await probe.put(probe.at("f"), b"abc")
    assert await probe.open(probe.at("f"), flags) == blocks
    async with refused(NOT_FOUND):
        await probe.open(probe.at("missing"), flags)


@rule("4.5")
async def test_open_does_not_look_at_excl(probe: Probe) -> None:
    await probe.put(probe.at("f"), b"abc")
    assert (await probe.open(probe.at("f"), WRONLY | CREAT | EXCL)).status.len == 3


@rule("4.11")
async def test_locations_of_what_has_none(probe: Probe) -> None:
    async with refused(NOT_FOUND):
        await probe.locate(probe.at("missing"))
    async with refused(COMMON, text="Not a file"):
        await probe.locate(probe.directory)
    await probe.create(probe.at("f"))
    await probe.complete(probe.at("f"), 0)
    blocks = await probe.locate(probe.at("f"))
    assert (blocks.status.len, blocks.status.is_complete, list(blocks.block_locs)) == (0, True, [])


# ----------------------------------------------------------------------------------------------- 4.5: AddBlock


@rule("4.5")
async def test_add_block_repeated_returns_the_block_without_locations(probe: Probe) -> None:
    await probe.create(probe.at("f"))
    first = await probe.add_block(probe.at("f"))
    again = await probe.add_block(probe.at("f"))
    assert (again.block.id, list(again.locs)) == (first.block.id, [])


@rule("4.5")
async def test_add_block_with_an_older_last_block_ignores_commits_and_length(probe: Probe) -> None:
    await probe.create(probe.at("f"))
    first = await probe.add_block(probe.at("f"))
    made = await probe.fill(first, pattern(MIB))
    second = await probe.add_block(probe.at("f"), last=first, file_len=MIB, commits=[made])
    wrong = commit(second, 77)
    again = await probe.add_block(probe.at("f"), last=first, file_len=12345, commits=[wrong])
    assert again.block.id == second.block.id
    none = await probe.add_block(probe.at("f"), file_len=12345, commits=[wrong])
    assert none.block.id == first.block.id
    assert [worker.worker_id for worker in none.locs] == [first.locs[0].worker_id]  # committed meanwhile
    assert (await probe.stat(probe.at("f"))).len == MIB


@rule("4.5", "8.4")
async def test_add_block_and_complete_on_a_missing_file(probe: Probe) -> None:
    kinds = (NOT_FOUND,) if probe.version is HEAD else (COMMON,)
    async with refused(*kinds):
        await probe.add_block(probe.at("missing"))
    async with refused(*kinds):
        await probe.complete(probe.at("missing"), 0)


@rule("4.5")
async def test_add_block_on_a_directory(probe: Probe) -> None:
    async with refused(COMMON, text="Not a file"):
        await probe.add_block(probe.directory)


@rule("4.5", "8.3", only=[V041, HEAD])
async def test_inode_id_goes_before_path(probe: Probe) -> None:
    made = await probe.create(probe.at("old"))
    located = await probe.add_block(probe.at("old"))
    written = await probe.fill(located, b"published")
    assert await probe.rename(probe.at("old"), probe.at("new"))
    again = await probe.add_block(probe.at("old"), inode_id=made.id)
    assert again.block.id == located.block.id
    await probe.complete(probe.at("old"), 9, written, inode_id=made.id)
    assert await probe.get(probe.at("new")) == b"published"
    assert (await probe.stat(probe.at("new"))).is_complete


@rule("8.3", "12", only=[ALPHA])
async def test_old_masters_ignore_inode_id(probe: Probe) -> None:
    made = await probe.create(probe.at("old"))
    located = await probe.add_block(probe.at("old"))
    written = await probe.fill(located, b"abc")
    assert await probe.rename(probe.at("old"), probe.at("new"))
    async with refused(COMMON):
        await probe.add_block(probe.at("old"), inode_id=made.id)
    async with refused(COMMON):
        await probe.complete(probe.at("old"), 3, written, inode_id=made.id)
    await probe.complete(probe.at("new"), 3, written, inode_id=1)
    assert await probe.get(probe.at("new")) == b"abc"


# ------------------------------------------------------------------------------------------- 4.5: CompleteFile


@rule("4.5")
async def test_commits_of_foreign_blocks_are_refused(probe: Probe) -> None:
    other = (await probe.put(probe.at("other"), b"abc")).block_locs[0]
    await probe.create(probe.at("f"))
    async with refused(COMMON, text="Not found block"):
        await probe.complete(probe.at("f"), 3, commit(other, 3))
    assert (await probe.stat(probe.at("f"))).len == 0


@rule("4.5")
async def test_a_commit_never_makes_a_block_shorter(probe: Probe) -> None:
    located = (await probe.put(probe.at("f"), b"x" * 100)).block_locs[0]
    await probe.complete(probe.at("f"), 100, commit(located, 40))
    assert (await probe.locate(probe.at("f"))).block_locs[0].block.block_size == 100


@rule("4.5", "4.17", "12", needs="two workers")
async def test_a_commit_adds_its_locations(probe: Probe) -> None:
    """Also of a worker that AddBlock did not choose."""
    workers = (await probe.info()).live_workers
    await probe.create(probe.at("f"))
    located = await probe.add_block(probe.at("f"))
    chosen = located.locs[0].worker_id
    other = next(worker.address for worker in workers if worker.address.worker_id != chosen)
    elsewhere = pb.LocatedBlockProto(block=located.block, locs=[other])
    made = await probe.fill(elsewhere, b"elsewhere")
    await probe.complete(probe.at("f"), 9, made, only_flush=True)
    shown = (await probe.locate(probe.at("f"))).block_locs[0]
    assert [worker.worker_id for worker in shown.locs] == [other.worker_id]
    assert await probe.get(probe.at("f")) == b"elsewhere"
    await probe.complete(probe.at("f"), 9, await probe.fill(located, b"elsewhere"))
    shown = (await probe.locate(probe.at("f"))).block_locs[0]
    assert {worker.worker_id for worker in shown.locs} == {other.worker_id, chosen}


@rule("4.5", "4.8")
async def test_flush_publishes_and_keeps_the_writer(probe: Probe) -> None:
    await probe.create(probe.at("f"))
    located = await probe.add_block(probe.at("f"))
    made = await probe.fill(located, b"abc")
    reply = await probe.complete(probe.at("f"), 3, made, only_flush=True)
    assert reply.result
    assert reply.file_blocks == await probe.locate(probe.at("f"))
    status = await probe.stat(probe.at("f"))
    assert (status.len, status.is_complete) == (3, False)
    assert await probe.get(probe.at("f")) == b"abc"
    reply = await probe.complete(probe.at("f"), 3)
    assert not reply.HasField("file_blocks")
    assert (await probe.stat(probe.at("f"))).is_complete


@rule("4.5", "8.3")
async def test_flush_without_file_blocks(probe: Probe) -> None:
    """v0.3.2-alpha returns them all the same."""
    await probe.create(probe.at("f"))
    reply = await probe.complete(probe.at("f"), 0, only_flush=True, return_file_blocks=False)
    assert reply.HasField("file_blocks") == (probe.version is ALPHA)
    assert (await probe.complete(probe.at("f"), 0, only_flush=True, return_file_blocks=True)).HasField("file_blocks")


@rule("4.5", "7.5", "8.3")
async def test_attributes_set_by_the_closing_complete(probe: Probe) -> None:
    """Not by a flush; and v0.3.2-alpha ignores them."""
    options = pb.SetAttrOptsProto(recursive=False, mtime=5000, mode=0o600)
    await probe.create(probe.at("f"))
    await probe.complete(probe.at("f"), 0, only_flush=True, set_attr_opts=options)
    assert (await probe.stat(probe.at("f"))).mtime > 5000
    await probe.complete(probe.at("f"), 0, set_attr_opts=options)
    status = await probe.stat(probe.at("f"))
    if probe.version is ALPHA:
        assert (status.mtime > 5000, status.mode) == (True, 0o644)
    else:
        assert (status.mtime, status.mode) == (5000, 0o600)


@rule("4.5", "12")
async def test_an_empty_file(probe: Probe) -> None:
    await probe.create(probe.at("f"))
    assert (await probe.complete(probe.at("f"), 0)).result
    status = await probe.stat(probe.at("f"))
    assert (status.len, status.is_complete) == (0, True)
    assert await probe.get(probe.at("f")) == b""


# ------------------------------------------------------------------------------------------------ 4.6, 4.8, 4.9


@rule("4.6")
@pytest.mark.parametrize("size_bytes", [1, MIB - 1, MIB, MIB + 1, 3 * MIB + 77])
async def test_write_and_read_a_file(probe: Probe, size_bytes: int) -> None:
    data = pattern(size_bytes)
    blocks = await probe.put(probe.at("f"), data)
    assert sum(located.block.block_size for located in blocks.block_locs) == size_bytes == blocks.status.len
    assert await probe.get(probe.at("f")) == data


@rule("4.6")
async def test_a_sparse_write_inside_a_slot_reads_back_as_zeros(probe: Probe) -> None:
    await probe.create(probe.at("f"))
    located = await probe.add_block(probe.at("f"))
    stream = await probe.writer(located)
    await stream.write(b"end", seek=5000)
    await stream.write(b"start", seek=0)
    await stream.complete(5003)
    await probe.complete(probe.at("f"), 5003, commit(located, 5003))
    assert await probe.get(probe.at("f")) == b"start" + bytes(4995) + b"end"


@rule("4.8", "4.7")
async def test_flush_frames_keep_the_stream_open(probe: Probe) -> None:
    await probe.create(probe.at("f"))
    located = await probe.add_block(probe.at("f"))
    stream = await probe.writer(located)
    await stream.write(b"abc")
    await stream.flush(3)
    await probe.complete(probe.at("f"), 3, commit(located, 3), only_flush=True)
    assert (await probe.get(probe.at("f")))[:3] == b"abc"
    await stream.write(b"def")
    await stream.complete(6)
    await probe.complete(probe.at("f"), 6, commit(located, 6))
    assert await probe.get(probe.at("f")) == b"abcdef"


@rule("4.9")
async def test_append(probe: Probe) -> None:
    await probe.put(probe.at("f"), pattern(MIB - 3))
    opened = await probe.open(probe.at("f"), WRONLY | APPEND)
    tail = opened.block_locs[-1]
    stream = await probe.writer(tail, off=tail.block.block_size)
    await stream.write(b"abc")
    await stream.complete(MIB)
    made = commit(tail, MIB)
    following = await probe.add_block(probe.at("f"), last=tail, file_len=MIB, commits=[made])
    await probe.complete(probe.at("f"), MIB + 3, await probe.fill(following, b"def"))
    assert await probe.get(probe.at("f")) == pattern(MIB - 3) + b"abcdef"


@rule("4.9", "4.7")
async def test_random_write_in_a_committed_block(probe: Probe) -> None:
    located = (await probe.put(probe.at("f"), pattern(5000))).block_locs[0]
    await probe.open(probe.at("f"), WRONLY)
    stream = await probe.writer(located)
    await stream.write(b"NEW", seek=1000)
    await stream.complete(5000)
    await probe.complete(probe.at("f"), 5000, commit(located, 5000))
    data = pattern(5000)
    assert await probe.get(probe.at("f")) == data[:1000] + b"NEW" + data[1003:]


@rule("4.8")
async def test_an_abandoned_write_keeps_its_writer_until_released(probe: Probe) -> None:
    await probe.create(probe.at("f"))
    located = await probe.add_block(probe.at("f"))
    stream = await probe.writer(located)
    await stream.write(b"abc")
    await stream.cancel()
    assert not (await probe.stat(probe.at("f"))).is_complete
    await probe.complete(probe.at("f"), 0, client_name=OTHER_CLIENT)
    assert not (await probe.stat(probe.at("f"))).is_complete
    await probe.complete(probe.at("f"), 0)
    assert (await probe.stat(probe.at("f"))).is_complete
