"""File contents: many blocks, any offset, holes, append, truncate, over the wire and through local files.

A plain bytearray is the model. Blocks are 1 MiB and frames 256 KiB (see the ``fs`` fixture).
"""

from __future__ import annotations

import errno
import random
from functools import partial
from typing import Any

import pytest
import trio

from curvfs.api import CurvineFileSystem, open_filesystem
from curvfs.errors import (
    BlockNotFound,
    CurvfsError,
    FileExists_,
    FileTooLarge,
    InProgress,
    InvalidRequest,
    IsADirectory,
    NotADirectory,
    NotFound,
)
from curvfs.units import KIB, MIB
from tests.t2_client.conftest import Target


def noise(size_bytes: int, seed: int = 1) -> bytes:
    return random.Random(seed).randbytes(size_bytes)


async def put(fs: CurvineFileSystem, path: str, content: bytes, **options: Any) -> None:
    async with await fs.create(path, **options) as writer:
        assert await writer.write(content) == len(content)


async def content_of(fs: CurvineFileSystem, path: str) -> bytes:
    async with await fs.open(path) as reader:
        return await reader.read_at(0, reader.length_bytes + 100)


@pytest.mark.parametrize("size_bytes", [0, 1, 4096, MIB - 1, MIB, MIB + 1, 3 * MIB + 777])
async def test_write_and_read_back(fs: CurvineFileSystem, size_bytes: int) -> None:
    content = noise(size_bytes)
    await put(fs, "/f", content, mode=0o600, owner="o", xattrs={"k": b"v"})
    status = await fs.stat("/f")
    assert (status.length_bytes, status.is_complete, status.mode, status.owner) == (size_bytes, True, 0o600, "o")
    assert status.xattrs == {"k": b"v"}
    assert status.block_size_bytes == MIB
    assert await content_of(fs, "/f") == content


async def test_many_small_writes(fs: CurvineFileSystem) -> None:
    content = noise(2 * MIB + 100)
    async with await fs.create("/f") as writer:
        for start in range(0, len(content), 70_001):
            await writer.write(content[start : start + 70_001])
        assert writer.position == writer.length_bytes == len(content)
    assert await content_of(fs, "/f") == content


async def test_any_buffer_is_taken(fs: CurvineFileSystem) -> None:
    async with await fs.create("/f") as writer:
        for piece in (b"bytes", bytearray(b"array"), memoryview(b"view"), memoryview(bytes(8)).cast("Q")):
            await writer.write(piece)
    async with await fs.open("/f") as reader:
        buffer = bytearray(22)
        assert await reader.readinto(buffer, 0) == 22
        assert buffer == b"bytesarrayview" + bytes(8)
        words = memoryview(bytearray(16)).cast("I")
        assert await reader.readinto(words, 0) == 16
        assert bytes(words) == b"bytesarrayview" + bytes(2)


async def test_random_reads(fs: CurvineFileSystem) -> None:
    content = noise(3 * MIB + 12_345)
    await put(fs, "/f", content)
    choose = random.Random(7)
    async with await fs.open("/f") as reader:
        for _ in range(200):
            offset = choose.randrange(len(content) + 10)
            size = choose.choice([1, 100, 4096, 65_536, 300_000, 2 * MIB])
            assert await reader.read_at(offset, size) == content[offset : offset + size]
        assert await reader.read_at(len(content), 1) == b""
        assert await reader.readinto(bytearray(0), 5) == 0
        with pytest.raises(InvalidRequest):
            await reader.read_at(-1, 5)
    with pytest.raises(CurvfsError) as caught:
        await reader.read_at(0, 1)
    assert caught.value.errno_ == errno.EBADF


async def test_sequential_reads_of_odd_sizes(fs: CurvineFileSystem) -> None:
    content = noise(2 * MIB + 5_000)
    await put(fs, "/f", content)
    async with await fs.open("/f") as reader:
        found = bytearray()
        while piece := await reader.read_at(len(found), 33_333):
            found += piece
    assert found == content


async def test_reads_from_several_tasks(fs: CurvineFileSystem) -> None:
    content = noise(3 * MIB)
    await put(fs, "/f", content)
    async with await fs.open("/f") as reader:

        async def check(offset: int) -> None:
            assert await reader.read_at(offset, 50_000) == content[offset : offset + 50_000]

        async with trio.open_nursery() as nursery:
            for offset in range(0, len(content), 150_000):
                nursery.start_soon(check, offset)


async def test_random_writes_against_a_model(fs: CurvineFileSystem) -> None:
    choose = random.Random(11)
    model = bytearray()
    writer = await fs.create("/f")
    for step in range(120):
        offset = choose.randrange(int(4.5 * MIB)) if step % 3 else choose.randrange(len(model) + 1)
        piece = choose.randbytes(choose.choice([1, 500, 70_000, 300_000, MIB + 5]))
        await writer.write_at(piece, offset)
        if len(model) < offset:
            model.extend(bytes(offset - len(model)))
        model[offset : offset + len(piece)] = piece
        action = choose.randrange(12)
        if action == 0:
            await writer.flush()
            assert await content_of(fs, "/f") == model
        elif action == 1:
            length = choose.randrange(len(model) + 2 * MIB)
            await writer.truncate(length)
            model = model[:length] + bytes(max(0, length - len(model)))
        elif action == 2:
            await writer.close()
            assert await content_of(fs, "/f") == model
            writer = await fs.open_for_write("/f")
        elif action == 3:
            start = choose.randrange(len(model) + 1)
            assert await writer.read_at(start, 200_000) == model[start : start + 200_000]
    await writer.close()
    assert (await fs.stat("/f")).length_bytes == len(model)
    assert await content_of(fs, "/f") == model


async def test_back_and_forth_between_full_blocks(fs: CurvineFileSystem) -> None:
    """A block that is full but not yet committed must be completed before the next one is added (4.6)."""
    writer = await fs.create("/f")
    await writer.write(b"a" * MIB)
    await writer.write(b"b" * MIB)
    await writer.write_at(b"c", 5)
    await writer.write_at(b"d" * 10, 2 * MIB)
    await writer.close()
    wanted = bytearray(b"a" * MIB + b"b" * MIB + b"d" * 10)
    wanted[5:6] = b"c"
    assert await content_of(fs, "/f") == wanted


async def test_more_open_blocks_than_are_kept(fs: CurvineFileSystem) -> None:
    blocks = 14
    await put(fs, "/f", b"\1" * (blocks * MIB))
    async with await fs.open_for_write("/f") as writer:
        for index in range(blocks):
            await writer.write_at(bytes([index + 2]) * 3, index * MIB + 7)
    found = await content_of(fs, "/f")
    for index in range(blocks):
        assert found[index * MIB + 6 : index * MIB + 11] == b"\1" + bytes([index + 2]) * 3 + b"\1"


async def test_sparse_files(fs: CurvineFileSystem) -> None:
    async with await fs.create("/f") as writer:
        await writer.write_at(b"end", 5 * MIB + 10)
        await writer.write_at(b"middle", 2 * MIB + 5)
    located = await fs.locate("/f")
    assert [block.is_hole for block in located.blocks] == [True, True, False, True, True, False]
    found = await content_of(fs, "/f")
    assert len(found) == 5 * MIB + 13
    assert found.rstrip(b"\0")[-3:] == b"end"
    assert found[2 * MIB + 5 : 2 * MIB + 11] == b"middle"
    assert found.count(0) == len(found) - 9


async def test_append(fs: CurvineFileSystem) -> None:
    await put(fs, "/f", noise(MIB - 3))
    async with await fs.open_for_write("/f", append=True) as writer:
        assert writer.position == MIB - 3
        await writer.write(b"12345")
        await writer.write_at(b"678", 0)  # as O_APPEND has it
    assert (await content_of(fs, "/f")) == noise(MIB - 3) + b"12345678"


async def test_truncate(fs: CurvineFileSystem) -> None:
    content = noise(3 * MIB + 9)
    await put(fs, "/f", content)
    for length in (2 * MIB + 5, 2 * MIB, MIB - 1, 3 * MIB, 100, 100, 0, 10):
        status = await fs.truncate("/f", length)
        assert (status.length_bytes, status.is_complete) == (length, True)
    assert await content_of(fs, "/f") == bytes(10)
    for length, error in ((-1, InvalidRequest), ((1 << 50) + 1, FileTooLarge)):
        with pytest.raises(error):
            await fs.truncate("/f", length)


async def test_bytes_cut_off_do_not_come_back(fs: CurvineFileSystem) -> None:
    """Hazard 5: a cut that no worker was told, then an extension."""
    await put(fs, "/f", b"s" * (MIB + 100))
    await fs.truncate("/f", 50)
    await fs.truncate("/f", MIB + 100)
    assert await content_of(fs, "/f") == b"s" * 50 + bytes(MIB + 50)


async def test_overwrite_and_exclusive_create(fs: CurvineFileSystem) -> None:
    await put(fs, "/f", noise(2 * MIB))
    with pytest.raises(FileExists_):
        await fs.create("/f")
    before = await fs.stat("/f")
    await put(fs, "/f", b"new", overwrite=True)
    assert (await fs.stat("/f")).id == before.id
    assert await content_of(fs, "/f") == b"new"
    async with await fs.open_for_write("/f", truncate=True) as writer:
        await writer.write(b"newer")
    assert await content_of(fs, "/f") == b"newer"
    await put(fs, "/g/h/i", b"deep", parents=True)
    assert (await fs.stat("/g/h")).mode == 0o755
    with pytest.raises(NotFound):
        await fs.create("/missing/f")
    with pytest.raises(NotADirectory):
        await fs.create("/f/below")
    with pytest.raises(IsADirectory):
        await fs.create("/g", overwrite=True)
    with pytest.raises(IsADirectory):
        await fs.open_for_write("/g")
    with pytest.raises(IsADirectory):
        await fs.open("/g")
    with pytest.raises(NotFound):
        await fs.open_for_write("/missing")
    for options in ({"block_size_bytes": MIB - 1}, {"block_size_bytes": 4 * 1024 * MIB}, {"replicas": 0}):
        with pytest.raises(InvalidRequest):
            await fs.create("/x", **options)


async def test_flush_publishes(fs: CurvineFileSystem, target: Target) -> None:
    writer = await fs.create("/f")
    await writer.write(b"first")
    async with open_filesystem(target.url, client_hostname="elsewhere") as other:
        assert (await other.stat("/f")).length_bytes == 0
        await writer.flush()
        assert await content_of(other, "/f") == b"first"
        assert not (await other.stat("/f")).is_complete
        await writer.write(b" second")
        assert await content_of(other, "/f") == b"first"
        await writer.close()
        assert await content_of(other, "/f") == b"first second"
        assert (await other.stat("/f")).is_complete


async def test_abort_keeps_what_was_published(fs: CurvineFileSystem) -> None:
    writer = await fs.create("/f")
    await writer.write(b"kept")
    await writer.flush()
    await writer.close()
    writer = await fs.open_for_write("/f", append=True)
    await writer.write(bytes(2 * MIB))
    await writer.abort()
    await writer.abort()
    status = await fs.stat("/f")
    assert status.is_complete
    assert (await content_of(fs, "/f"))[:4] == b"kept"
    with pytest.raises(CurvfsError) as caught:
        await writer.write(b"more")
    assert caught.value.errno_ == errno.EBADF


async def test_an_error_in_the_body_aborts(fs: CurvineFileSystem) -> None:
    with pytest.raises(ZeroDivisionError):
        async with await fs.create("/f") as writer:
            await writer.write(b"x" * 1000)
            raise ZeroDivisionError
    status = await fs.stat("/f")
    assert (status.length_bytes, status.is_complete) == (0, True)
    async with await fs.open_for_write("/f") as writer:  # its block was given up: it may be used again
        await writer.write(b"again")
    assert await content_of(fs, "/f") == b"again"


async def test_a_block_that_somebody_else_is_writing(fs: CurvineFileSystem, target: Target) -> None:
    """Hazards 3 and 7: two writers of one name share a block; the second is told."""
    async with open_filesystem(target.url, client_hostname="elsewhere") as other:
        first = await fs.create("/f")
        await first.write(b"mine")
        second = await other.open_for_write("/f")
        with pytest.raises(InProgress):
            await second.write(b"theirs")
        await second.abort()
        await first.close()
    assert await content_of(fs, "/f") == b"mine"


async def test_a_file_renamed_while_it_is_written(fs: CurvineFileSystem) -> None:
    writer = await fs.create("/a")
    await writer.write(noise(MIB + 5))
    await fs.rename("/a", "/b")
    await writer.write(b"tail")
    writer.moved_to("/b")
    await writer.truncate(MIB + 8)
    await writer.close()
    assert writer.path == "/b"
    assert await content_of(fs, "/b") == noise(MIB + 5) + b"tai"


async def test_reading_what_was_deleted_meanwhile(fs: CurvineFileSystem) -> None:
    await put(fs, "/f", noise(2 * MIB))
    async with await fs.open("/f") as reader, await fs.open("/f") as pinned:
        await pinned.open_blocks()
        await fs.delete("/f")
        async with await fs.create("/f") as writer:
            await writer.write(b"other")
        await trio.sleep(0.3)
        assert await pinned.read_at(0, 2 * MIB) == noise(2 * MIB)
        try:
            found = await reader.read_at(0, 2 * MIB)
        except BlockNotFound as error:
            assert error.errno_ == errno.ESTALE
        else:  # its blocks were still there
            assert found == noise(2 * MIB)


async def test_a_location_got_earlier_opens_without_a_call(fs: CurvineFileSystem) -> None:
    await put(fs, "/f", noise(MIB + 1))
    located = await fs.locate("/f")
    assert [block.length_bytes for block in located.blocks] == [MIB, 1]
    assert [block.file_offset_bytes for block in located.blocks] == [0, MIB]
    calls = fs.stats()["master_calls"]
    async with await fs.open(located) as reader:
        assert await reader.read_at(MIB - 1, 2) == noise(MIB + 1)[-2:]
    assert fs.stats()["master_calls"] == calls


async def test_nothing_leaks(fs: CurvineFileSystem, target: Target) -> None:
    """Descriptors: after a round of everything there are as many as before it."""
    import os

    async def everything() -> None:
        async with open_filesystem(target.url, client_hostname=target.hostname, block_size="1MB") as client:
            await put(client, "/f", noise(3 * MIB), overwrite=True)
            await content_of(client, "/f")
            await client.truncate("/f", 100)
            async with await client.open_extents("/f"):
                pass
            async with await client.create_extent("/x", 10):
                pass
            await (await client.create("/y", overwrite=True)).abort()

    await everything()
    await trio.sleep(0.1)
    before = len(os.listdir("/proc/self/fd"))
    await everything()
    await trio.sleep(0.1)
    assert len(os.listdir("/proc/self/fd")) == before


async def test_what_moved_where(fs: CurvineFileSystem, request: pytest.FixtureRequest) -> None:
    await put(fs, "/f", noise(2 * MIB))
    await content_of(fs, "/f")
    stats = fs.stats()
    way, other = ("local", "remote") if "local" in request.node.name else ("remote", "local")
    assert stats[f"bytes_written_{way}"] == stats[f"bytes_read_{way}"] == 2 * MIB
    assert f"bytes_written_{other}" not in stats
    assert stats.get(f"bytes_read_{other}", 0) <= 2 * 4096  # once per worker its files are compared with what it sends


@pytest.mark.parametrize("chunk", [4 * KIB, 16 * MIB])
async def test_extreme_frames(target: Target, chunk: int) -> None:
    content = noise(17 * MIB if chunk > MIB else 300_000)
    async with open_filesystem(target.url, client_hostname="elsewhere", chunk_size_bytes=chunk) as fs:
        await put(fs, "/f", content)
        assert await content_of(fs, "/f") == content


async def test_reading_back_between_writes(fs: CurvineFileSystem) -> None:
    """Every read sees what was written before it: within a block, over two, beyond what the block's file holds, after
    a cut, and at the end. From a local file it costs the master nothing."""
    expected = bytearray()
    async with await fs.create("/f") as writer:
        for number in range(40):
            at = number * 77_777 % 1_300_000
            piece = random.Random(number).randbytes(9000)
            await writer.write_at(piece, at)
            expected.extend(bytes(max(0, at + len(piece) - len(expected))))
            expected[at : at + len(piece)] = piece
            for start, size in ((at - at % 4096, 20_000), (MIB - 100, 200), (number * 33_333, 10)):
                assert await writer.read_at(start, size) == expected[start : start + size], (number, start)
            if number == 20:
                del expected[600_000:]
                await writer.truncate(600_000)
        assert await writer.read_at(len(expected), 10) == b""
        await writer.write_at(b"one", 0)
        calls = fs.stats()["master_calls"]
        for number in range(10):
            await writer.write_at(b"two", number * 1000)
            assert await writer.read_at(number * 1000, 3) == b"two"
            expected[number * 1000 : number * 1000 + 3] = b"two"
        local = "short_circuit_opens" in fs.stats()
        assert (fs.stats()["master_calls"] == calls) == local
    assert await content_of(fs, "/f") == expected


async def test_lengths_that_no_file_has(fs: CurvineFileSystem) -> None:
    async with await fs.create("/f") as writer:
        await writer.write(b"content")
        for call in (
            partial(writer.write_at, b"x", 1 << 70),
            partial(writer.write_at, b"x", 1 << 50),
            partial(writer.write_at, b"", 1 << 70),
            partial(writer.truncate, 1 << 70),
        ):
            with pytest.raises(FileTooLarge):
                await call()
        with pytest.raises(InvalidRequest):
            await writer.truncate(-1)
    assert (await fs.stat("/f")).length_bytes == 7
    with pytest.raises(FileTooLarge):
        await fs.truncate("/f", 1 << 70)
    async with await fs.open("/f") as reader:
        assert await reader.read_at(1 << 70, 10) == b""


async def test_the_error_names_the_call(fs: CurvineFileSystem) -> None:
    with pytest.raises(NotFound, match=r"Cannot list .*/absent on"):
        await fs.list("/absent")


async def test_a_request_that_no_server_takes_is_refused_at_once(fs: CurvineFileSystem) -> None:
    await put(fs, "/f", b"")
    with trio.fail_after(10), pytest.raises(InvalidRequest, match=r"64\.0 MiB at most"):
        await fs.set_attr("/f", xattrs={"user.big": bytes(65 * MIB)})
    assert (await fs.stat("/f")).xattrs == {}
