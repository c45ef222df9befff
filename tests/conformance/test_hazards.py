"""Section 13: legal-looking requests that lose data or hang a real server. The embedded server refuses them, so they
are never sent to anything else."""

from __future__ import annotations

import pytest
from conformance.probe import (
    COMMON,
    CREATE_NEW,
    INVALID,
    NOT_DIR,
    WRONLY,
    Probe,
    commit,
    policy,
    refused,
)
from conformance.rules import rule

from curvfs.units import MIB
from curvfs.wire.messages import pb

HARM = "a real server does harm there"
PARENT_NOT_DIR, INVALID_PATH, UNSUPPORTED = 10, 16, 19


@rule("13", "4.13", embedded=HARM)
async def test_rename_below_a_file_keeps_the_source(probe: Probe) -> None:
    await probe.put(probe.at("src"), b"abc")
    await probe.mkdir(probe.at("tree/sub"), create_parent=True)
    await probe.create(probe.at("file"))
    for source in ("src", "tree"):
        async with refused(PARENT_NOT_DIR, NOT_DIR):
            await probe.rename(probe.at(source), probe.at("file/x"))
    assert await probe.get(probe.at("src")) == b"abc"
    assert await probe.exists(probe.at("tree/sub"))


@rule("13", embedded=HARM)
async def test_symlinks_and_special_nodes_are_no_files_to_write(probe: Probe) -> None:
    await probe.symlink("x", probe.at("l"))
    async with refused(INVALID):
        await probe.open(probe.at("l"), WRONLY)
    async with refused(INVALID):
        await probe.create(probe.at("l"), CREATE_NEW)
    async with refused(INVALID):
        await probe.resize(probe.at("l"), 10)
    async with refused(INVALID, COMMON):
        await probe.resize(probe.at("l"), 0)
    assert (await probe.stat(probe.at("l"))).target == "x"


@rule("13", embedded=HARM)
@pytest.mark.parametrize("block_size", [4 << 30, 5 << 30, 8 << 30])
async def test_block_sizes_that_do_not_fit_are_refused(probe: Probe, block_size: int) -> None:
    async with refused(INVALID):
        await probe.create(probe.at("f"), block_size=block_size)


@rule("13", "4.5", embedded=HARM)
async def test_commits_without_a_written_location_are_refused(probe: Probe) -> None:
    await probe.create(probe.at("f"))
    located = await probe.add_block(probe.at("f"))
    for made in (commit(located, 3, []), commit(located, 3, [1])):
        async with refused(INVALID):
            await probe.complete(probe.at("f"), 3, made)
    assert (await probe.stat(probe.at("f"))).len == 0


@rule("13", "4.10", embedded=HARM)
async def test_harmful_resize_modes_are_refused(probe: Probe) -> None:
    await probe.put(probe.at("f"), b"abcdef")
    async with refused(INVALID):
        await probe.resize(probe.at("f"), 10, truncate=False, mode=16)
    async with refused(INVALID):
        await probe.resize(probe.at("f"), 3, truncate=False)
    assert await probe.get(probe.at("f")) == b"abcdef"


@rule("13", "4.10", embedded="it is what the Rust mount sends, and harmful all the same")
async def test_keep_size_is_answered_as_curvine_does(probe: Probe) -> None:
    await probe.put(probe.at("f"), b"abc")
    assert (await probe.resize(probe.at("f"), 10, truncate=False, mode=1)).status.len == 10


@rule("13", "4.10", embedded=HARM)
async def test_shrinking_and_extending_without_the_worker_step_brings_nothing_back(probe: Probe) -> None:
    await probe.put(probe.at("f"), b"x" * 100)
    await probe.resize(probe.at("f"), 10)
    async with refused(INVALID):
        await probe.resize(probe.at("f"), 100)
    assert (await probe.stat(probe.at("f"))).len == 10


@rule("13", "4.13", embedded=HARM)
async def test_rename_onto_another_link_of_the_file_does_nothing(probe: Probe) -> None:
    await probe.put(probe.at("f"), b"abc")
    await probe.link(probe.at("f"), probe.at("g"))
    await probe.rename(probe.at("f"), probe.at("g"))
    assert [(await probe.stat(probe.at(name))).nlink for name in ("f", "g")] == [2, 2]
    await probe.delete(probe.at("f"))
    assert await probe.get(probe.at("g")) == b"abc"


@rule("13", "4.1", embedded=HARM)
@pytest.mark.parametrize("name", ["a/../b", "a/./b", "a//b", "..", ".", "n" * 256, "a\0b"])
async def test_names_that_nobody_can_reach_are_refused(probe: Probe, name: str) -> None:
    await probe.mkdir(probe.at("a"))
    for make in (probe.create, probe.mkdir):
        async with refused(INVALID_PATH):
            await make(probe.at(name), create_parent=True)
    async with refused(INVALID_PATH):
        await probe.rename(probe.at("a"), probe.at(name))
    assert [status.name for status in await probe.list(probe.directory)] == ["a"]


@rule("13", "4.14", embedded=HARM)
async def test_ufs_mtime_is_refused(probe: Probe) -> None:
    await probe.put(probe.at("f"), b"abc")
    async with refused(UNSUPPORTED):
        await probe.set_attr(probe.at("f"), ufs_mtime=1)
    async with refused(UNSUPPORTED):
        await probe.create(probe.at("g"), storage_policy=policy(ufs_mtime=1))
    assert (await probe.stat(probe.at("f"))).storage_policy.state == pb.STORAGE_STATE_PROTO_CV


@rule("13", "4.3", embedded="two writers of one path mix their bytes")
async def test_the_second_writer_of_a_block_cannot_publish_it(probe: Probe) -> None:
    """It got the block without locations; it has nothing to commit but what it did not write."""
    await probe.create(probe.at("f"))
    first = await probe.add_block(probe.at("f"))
    second = await probe.add_block(probe.at("f"))
    async with refused(INVALID):
        await probe.complete(probe.at("f"), 3, commit(second, 3))
    await probe.complete(probe.at("f"), MIB, await probe.fill(first, b"\1" * MIB))
    assert await probe.get(probe.at("f")) == b"\1" * MIB


@rule("13", "4.7", embedded="two streams on one block mix their bytes")
async def test_a_stream_whose_block_was_completed_by_another_writes_no_more(probe: Probe) -> None:
    """Frames of a connection that its client has given up do not change what readers have."""
    await probe.create(probe.at("f"))
    located = await probe.add_block(probe.at("f"))
    late = await probe.writer(located)
    await late.write(b"late")
    await probe.complete(probe.at("f"), 6, await probe.fill(located, b"prompt"))
    async with refused(COMMON, text="completed or cancelled by another stream"):
        await late.write(b"late", seek=0)
    assert await probe.get(probe.at("f")) == b"prompt"
