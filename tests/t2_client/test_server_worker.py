"""The worker's port over real sockets: streams, short circuit, rewriting, and what it refuses."""

from __future__ import annotations

import errno
import os
import threading
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import trio
from raw_client import BLOCK, Raw, RawBlock, commit_of, connected

from curvfs.errors import BlockNotFound, RemoteError
from curvfs.server.blockstore import BlockStore
from curvfs.server.service import Server, run_server
from curvfs.wire.codes import RequestStatus, RpcCode
from curvfs.wire.frame import MAX_DATA_BYTES
from curvfs.wire.messages import encode, pb
from curvfs.world import RealDisk, World


class Pair:
    """A master and a worker connection."""

    def __init__(self, server: Server, master: Raw, worker: Raw) -> None:
        self.server = server
        self.master = master
        self.worker = worker
        self.root = Path(server.directory) / "data" / "curvine"

    async def new_block(self, path: str = "/f", *, block_size: int = BLOCK) -> tuple[Any, RawBlock]:
        await self.master.create(path, block_size=block_size)
        located = await self.master.add_block(path)
        return located, RawBlock(self.worker, located.block, capacity=block_size)

    async def written(self, content: bytes, path: str = "/f", *, block_size: int = BLOCK) -> Any:
        """A complete one-block file; its located block."""
        located, stream = await self.new_block(path, block_size=block_size)
        await stream.open_write()
        for start in range(0, len(content), MAX_DATA_BYTES):
            await stream.write(content[start : start + MAX_DATA_BYTES])
        await stream.complete(len(content))
        await self.master.complete(path, len(content), [commit_of(located, len(content))])
        return (await self.master.locate(path)).block_locs[0]

    async def content(self, path: str = "/f") -> bytes:
        found = b""
        for located in (await self.master.locate(path)).block_locs:
            if not located.locs:
                found += bytes(located.block.block_size)  # a hole
                continue
            stream = RawBlock(self.worker, located.block)
            await stream.open_read(located.block.block_size, chunk=BLOCK)
            found += await stream.read()
            await stream.complete_read()
        return found

    def active(self, block: Any) -> Path:
        number = block.block.id
        return self.root / "active" / f"b{(number >> 48) & 31}" / f"b{(number >> 32) & 31}" / f"blk_{number}"

    def staging(self, block: Any) -> Path:
        return self.root / "staging" / f"blk_{block.block.id}"


@asynccontextmanager
async def paired(server: Server) -> AsyncIterator[Pair]:
    async with (
        connected(server.host, server.master_port) as master,
        connected(server.host, server.worker_port) as worker,
    ):
        yield Pair(server, master, worker)


@pytest.fixture
async def pair(server: Server) -> AsyncIterator[Pair]:
    async with paired(server) as made:
        yield made


async def refused(kind: int, call: Any, text: str = "") -> None:
    with pytest.raises(RemoteError) as caught:
        await call
    assert caught.value.kind == kind, caught.value
    assert text in caught.value.text


async def gone(path: Path) -> None:
    with trio.fail_after(5):
        while path.exists():
            await trio.sleep(0.01)


async def test_files_lie_where_a_curvine_worker_has_them(pair: Pair) -> None:
    located, stream = await pair.new_block()
    reply = await stream.open_write()
    assert (reply.id, reply.off, reply.block_size, reply.HasField("path")) == (located.block.id, 0, BLOCK, False)
    assert pair.staging(located).stat().st_size == 0 and not pair.active(located).exists()
    await stream.write(b"hello")
    await stream.complete(5)
    assert pair.active(located).read_bytes() == b"hello" and not pair.staging(located).exists()
    for path in (pair.active(located), pair.root / "version", Path(pair.server.directory) / "meta.db"):
        assert path.stat().st_mode & 0o777 == 0o600
    for parent in pair.active(located).parents[:5]:
        assert parent.stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize("size", [1, 65_536, 65_537, 300_000, BLOCK])
async def test_content_comes_back(pair: Pair, size: int) -> None:
    content = os.urandom(size)
    await pair.written(content)
    assert await pair.content() == content


async def test_pipelined_frames_are_answered_in_order(pair: Pair) -> None:
    content = os.urandom(64 * 4096)
    located, stream = await pair.new_block()
    await stream.open_write()
    for index in range(64):
        piece = content[index * 4096 :][:4096]
        await pair.worker.send(
            RpcCode.WRITE_BLOCK, RequestStatus.RUNNING, data=piece, req_id=stream.req_id, seq_id=index + 1
        )
    for index in range(64):
        answer = await pair.worker.receive()
        assert answer is not None and answer.error is None and answer.head.seq_id == index + 1
    stream.seq_id = 65
    await stream.complete(len(content))
    reader = RawBlock(pair.worker, located.block)
    await reader.open_read(len(content), chunk=4096)
    for index in range(64):
        await pair.worker.send(RpcCode.READ_BLOCK, RequestStatus.RUNNING, req_id=reader.req_id, seq_id=index + 1)
    found = b""
    for _ in range(64):
        answer = await pair.worker.receive()
        assert answer is not None
        found += answer.data
    assert found == content


async def test_the_largest_frame(pair: Pair) -> None:
    content = os.urandom(MAX_DATA_BYTES)
    located = await pair.written(content, block_size=MAX_DATA_BYTES)
    stream = RawBlock(pair.worker, located.block)
    await stream.open_read(len(content), chunk=MAX_DATA_BYTES)
    assert await stream.read() == content
    await refused(
        10000,
        RawBlock(pair.worker, located.block).open_read(5, chunk=MAX_DATA_BYTES + 1),
        "chunk_size 16777217 exceeds maximum allowed value 16777216",
    )


async def test_seeking_in_a_write(pair: Pair) -> None:
    located, stream = await pair.new_block()
    await stream.open_write(3)
    await stream.write(b"def")
    await stream.write(b"abc", 0)
    await stream.write(b"xyz", 100)
    await stream.write(b"", 103, flush=True)
    await stream.complete(103)
    assert pair.active(located).read_bytes() == b"abcdef" + bytes(94) + b"xyz"


async def test_writes_stay_inside_the_block(pair: Pair) -> None:
    located, stream = await pair.new_block()
    await refused(10000, RawBlock(pair.worker, located.block).open_write(BLOCK + 1), "Invalid write offset")
    await stream.open_write(BLOCK - 1)
    await refused(1, stream.write(b"xy"), "Write range [1048575, 1048577) exceeds block size 1048576")
    await refused(10000, stream.write(b"x", BLOCK), "Invalid seek offset")
    await refused(10000, stream.write(b"x", -1), "Invalid seek offset")
    await stream.write(b"x")
    await stream.complete(BLOCK)
    assert pair.active(located).stat().st_size == BLOCK


async def test_complete_names_the_exact_length(pair: Pair) -> None:
    located, stream = await pair.new_block()
    await stream.open_write()
    await stream.write(b"x" * 1000)
    await refused(10000, stream.complete(500), "length mismatch, expected: 500, actual: 1000")
    await refused(10000, stream.complete(2000), "length mismatch, expected: 2000, actual: 1000")
    await stream.complete(1000)
    await stream.complete(1000)
    await refused(10000, stream.complete(999), "length mismatch")
    assert pair.active(located).stat().st_size == 1000
    _, stream = await pair.new_block("/g")
    await stream.open_write()
    await refused(10000, stream.complete(BLOCK + 1), "exceeds block size")
    await refused(29, stream.complete(5), "not found")


async def test_stream_discipline(pair: Pair) -> None:
    located, stream = await pair.new_block()
    await refused(10000, stream.write(b"x"), "Uninitialized")
    await refused(10000, stream.read(), "Uninitialized")
    await stream.open_write()
    right = stream.req_id
    stream.req_id += 1
    await refused(10000, stream.write(b"x"), f"Request id mismatch, expected {right}, actual {right + 1}")
    await refused(10000, stream.complete(0), "Request id mismatch")
    stream.req_id = right
    await stream.write(b"x")
    other = pb.LocatedBlockProto(block=pb.ExtendedBlockProto(id=located.block.id + 1))
    wrong = RawBlock(pair.worker, other.block)
    wrong.req_id = right
    await refused(10000, wrong.complete(1), "Block id mismatch")
    await stream.complete(1)
    unary = await pair.worker.exchange(RpcCode.MKDIR, RequestStatus.RPC, req_id=5)
    assert unary.error is not None and "Unsupported request type: Mkdir" in unary.error.text
    batch = await pair.worker.exchange(RpcCode.WRITE_BLOCKS_BATCH, RequestStatus.OPEN, req_id=5, seq_id=0)
    assert batch.error is not None and batch.error.kind == 10000
    negative = RawBlock(pair.worker, pb.ExtendedBlockProto(id=-5))
    await refused(28, negative.open_write())
    await refused(28, negative.open_read(5))


async def test_reading(pair: Pair) -> None:
    content = os.urandom(300_000)
    located = await pair.written(content)
    stream = RawBlock(pair.worker, located.block)
    reply = await stream.open_read(300_000, 10, chunk=100_000)
    assert (reply.id, reply.len, reply.HasField("path")) == (located.block.id, 300_000, False)
    assert await stream.read() == content[10:100_010]
    assert await stream.read(250_000) == content[250_000:]
    await refused(1, stream.read(), "offset exceeds block length, length=300000, offset=300000")
    await refused(1, stream.read(300_001), "Invalid seek offset: 300001, block length: 300000")
    assert await stream.read(299_999) == content[-1:]
    cancelled = await pair.worker.exchange(RpcCode.READ_BLOCK, RequestStatus.CANCEL, req_id=stream.req_id, seq_id=9)
    assert cancelled.error is not None and "Unsupported request type" in cancelled.error.text
    await stream.complete_read()
    await refused(10000, stream.complete_read(), "Uninitialized")


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"offset": 6}, "Invalid read offset"),
        ({"offset": -1}, "Invalid read offset"),
        ({"length": 0, "offset": 1}, "Invalid read offset"),
        ({"chunk": 0}, "must be greater than 0"),
        ({"chunk": -5}, "must be greater than 0"),
        ({"enable_read_ahead": True, "read_ahead_len": MAX_DATA_BYTES + 1}, "exceeds maximum allowed value"),
    ],
)
async def test_read_open_checks_its_fields(pair: Pair, fields: dict[str, Any], text: str) -> None:
    located = await pair.written(b"hello")
    await refused(10000, RawBlock(pair.worker, located.block).open_read(**({"length": 5} | fields)), text)


async def test_reads_are_bounded_by_the_asked_length_and_filled_with_zeros(pair: Pair) -> None:
    located = await pair.written(b"x" * 1000)
    stream = RawBlock(pair.worker, located.block)
    await stream.open_read(100, chunk=5000)
    assert await stream.read() == b"x" * 100
    await stream.open_read(3_000_000, chunk=3_000_000)
    assert await stream.read() == b"x" * 1000 + bytes(2_999_000)
    assert await stream.read(2000) == bytes(2_998_000)
    big = await pair.written(b"y" * 70_000, "/g")
    stream = RawBlock(pair.worker, big.block)
    await stream.open_read(100_000, chunk=100_000)
    assert await stream.read() == b"y" * 70_000 + bytes(30_000)


async def test_an_unknown_block(pair: Pair) -> None:
    with pytest.raises(BlockNotFound) as caught:
        await RawBlock(pair.worker, pb.ExtendedBlockProto(id=12345678901)).open_read(5)
    assert (caught.value.kind, caught.value.text) == (29, "Block 12345678901 not found")


@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir])
async def test_what_is_no_file_in_place_of_a_block_is_an_error_and_keeps_nobody_waiting(pair: Pair, make: Any) -> None:
    located = await pair.written(b"content")
    pair.active(located).unlink()
    make(pair.active(located))
    with trio.fail_after(10):
        await refused(1, RawBlock(pair.worker, located.block).open_read(7), "is no regular file")
        await pair.written(b"another", "/g")
        assert await pair.content("/g") == b"another"


async def test_a_second_open_replaces_the_stream(pair: Pair) -> None:
    one, two = await pair.written(b"one", "/1"), await pair.written(b"two", "/2")
    first, second = RawBlock(pair.worker, one.block), RawBlock(pair.worker, two.block)
    await first.open_read(3)
    await second.open_read(3)
    assert await second.read() == b"two"
    await second.complete_read()


async def test_short_circuit(pair: Pair) -> None:
    located, stream = await pair.new_block()
    reply = await stream.open_write(short_circuit=True)
    assert reply.path == str(pair.staging(located)) and Path(reply.path).stat().st_size == 0
    await refused(10000, stream.write(b"x"), "Uninitialized")
    Path(reply.path).write_bytes(b"local")
    await stream.complete(5)
    await pair.master.complete("/f", 5, [commit_of(located, 5)])
    assert not Path(reply.path).exists()
    reader = RawBlock(pair.worker, located.block)
    granted = await reader.open_read(5, short_circuit=True)
    assert granted.path == str(pair.active(located)) and Path(granted.path).read_bytes() == b"local"
    await refused(10000, reader.read(), "Uninitialized")
    await reader.complete_read()
    longer = await reader.open_read(6, short_circuit=True)
    assert not longer.HasField("path"), "the file does not hold it all"
    assert await reader.read() == b"local\0"


async def test_a_local_writer_may_fall_back_to_the_wire(pair: Pair) -> None:
    located, stream = await pair.new_block()
    await stream.open_write(short_circuit=True)
    again = RawBlock(pair.worker, located.block)
    await again.open_write()
    await again.write(b"remote")
    await again.complete(6)
    assert pair.active(located).read_bytes() == b"remote"


async def test_a_rewrite_is_invisible_until_complete(pair: Pair) -> None:
    located = await pair.written(b"a" * 10)
    stream = RawBlock(pair.worker, located.block)
    await stream.open_write(2)
    await stream.write(b"QQ")
    async with connected(pair.server.host, pair.server.worker_port) as other:
        reader = RawBlock(other, located.block)
        await reader.open_read(10)
        assert await reader.read() == b"a" * 10
        await stream.complete(10)
        assert await reader.read(0) == b"a" * 10, "who has it open keeps the old generation"
        await reader.open_read(10)
        assert await reader.read() == b"aaQQaaaaaa"


async def test_a_rewrite_may_be_extended_but_not_cut(pair: Pair) -> None:
    located = await pair.written(b"a" * 10)
    stream = RawBlock(pair.worker, located.block)
    await stream.open_write()
    await refused(10000, stream.complete(5), "length mismatch, expected: 5, actual: 10")
    await stream.complete(12)
    assert pair.active(located).read_bytes() == b"a" * 10 + b"\0\0"


async def test_cancel(pair: Pair) -> None:
    located, stream = await pair.new_block()
    await stream.open_write()
    await stream.write(b"x")
    await stream.cancel()
    assert not pair.staging(located).exists()
    await stream.open_write()
    await stream.write(b"yy")
    await stream.complete(2)
    await pair.master.complete("/f", 2, [commit_of(located, 2)])
    stream.block = (await pair.master.locate("/f")).block_locs[0].block
    await stream.open_write()
    await stream.write(b"zz")
    await stream.cancel()
    assert await pair.content() == b"yy", "the old generation stays"
    await stream.cancel()
    assert await pair.content() == b"yy", "and no cancel takes a committed block away"


async def test_a_published_block_that_was_never_committed_can_be_cancelled(pair: Pair) -> None:
    located, stream = await pair.new_block()
    await stream.open_write()
    await stream.complete(0)
    assert pair.active(located).exists()
    await stream.cancel()
    assert not pair.active(located).exists()


async def test_a_dropped_connection_leaves_the_bytes(pair: Pair) -> None:
    located = (await pair.new_block())[0]
    async with connected(pair.server.host, pair.server.worker_port) as other:
        stream = RawBlock(other, located.block)
        await stream.open_write()
        await stream.write(b"0123456789")
    stream = RawBlock(pair.worker, located.block)
    await stream.open_write()
    await stream.write(b"abcde")
    await refused(10000, stream.complete(5), "length mismatch, expected: 5, actual: 10")
    reader = RawBlock(pair.worker, located.block)
    await reader.open_read(10)
    assert await reader.read() == b"abcde56789", "what was never published can be read"
    await reader.complete_read()
    await RawBlock(pair.worker, located.block).complete(10)
    assert pair.active(located).read_bytes() == b"abcde56789", "complete works without an open"


async def test_start_over_after_a_drop(pair: Pair) -> None:
    located = (await pair.new_block())[0]
    async with connected(pair.server.host, pair.server.worker_port) as other:
        stream = RawBlock(other, located.block)
        await stream.open_write()
        await stream.write(b"0123456789")
    stream = RawBlock(pair.worker, located.block)
    await stream.open_write()
    await stream.cancel()
    await stream.open_write()
    await stream.write(b"abcde")
    await stream.complete(5)
    assert pair.active(located).read_bytes() == b"abcde"


async def test_truncation_and_holes_reach_the_file(pair: Pair) -> None:
    await pair.written(b"x" * 1000)
    shrunk = (await pair.master.resize("/f", 10)).block_locs[0]
    assert shrunk.block.alloc_opts.len == 10
    await refused(28, pair.master.resize("/f", 500), "truncated to 10 bytes")
    stream = RawBlock(pair.worker, shrunk.block)
    await stream.open_write()
    await stream.complete(10)
    await pair.master.complete("/f", 10, [commit_of(shrunk, 10)], only_flush=True)
    blocks = (await pair.master.resize("/f", BLOCK + 100)).block_locs
    assert await pair.content() == b"x" * 10 + bytes(BLOCK - 10 + 100)
    request = pb.AssignWorkerRequest(path="/f", block=blocks[1].block)
    placed = (await pair.master.call(RpcCode.ASSIGN_WORKER, request)).block
    stream = RawBlock(pair.worker, placed.block)
    await stream.open_write(50)
    await stream.write(b"hole")
    await stream.complete(100)
    await pair.master.complete("/f", BLOCK + 100, [commit_of(placed, 100)])
    assert (await pair.content())[BLOCK:] == bytes(50) + b"hole" + bytes(46)


async def test_alloc_options_are_checked(pair: Pair) -> None:
    located = await pair.written(b"x" * 1000)
    for length, truncate, text in ((BLOCK + 1, True, "exceeds block size"), (10, False, "length mismatch")):
        block = pb.ExtendedBlockProto(id=located.block.id, block_size=1000)
        block.alloc_opts.SetInParent()
        block.alloc_opts.len, block.alloc_opts.truncate = length, truncate
        await refused(10000, RawBlock(pair.worker, block).open_write(), text)
    assert await pair.content() == b"x" * 1000


# --------------------------------------------------------------------------------------------------- deleting, space


async def test_deleted_blocks_go_soon_and_open_readers_go_on(pair: Pair) -> None:
    content = os.urandom(200_000)
    located = await pair.written(content)
    stream = RawBlock(pair.worker, located.block)
    await stream.open_read(len(content), chunk=100_000)
    assert await stream.read() == content[:100_000]
    await pair.master.delete("/f")
    await gone(pair.active(located))
    assert await stream.read() == content[100_000:]
    await refused(29, RawBlock(pair.worker, located.block).open_read(len(content)))


async def test_overwrite_and_rename_over_free_the_old_block(pair: Pair) -> None:
    first = await pair.written(b"one", "/a")
    second = await pair.written(b"two", "/b")
    await pair.master.rename("/b", "/a")
    await gone(pair.active(first))
    await pair.master.create("/a")
    await gone(pair.active(second))


async def test_a_writer_of_a_deleted_file_leaves_nothing(pair: Pair) -> None:
    located, stream = await pair.new_block()
    await stream.open_write()
    await stream.write(b"x" * 10)
    await pair.master.delete("/f")
    await gone(pair.staging(located))
    await stream.complete(10)
    assert not pair.active(located).exists()
    await refused(8, pair.master.complete("/f", 10, [commit_of(located, 10)]))


async def test_space_is_reserved_used_and_given_back(tmp_path: Path) -> None:
    async with trio.open_nursery() as nursery:
        server = await nursery.start(
            partial(run_server, str(tmp_path / "p"), master_port=0, worker_port=0, capacity_bytes=4 * BLOCK)
        )
        async with paired(server) as pair:

            async def available() -> int:
                info = await pair.master.call(RpcCode.GET_FILESYSTEM_INFO)
                assert info.capacity == info.allocatable_capacity == 4 * BLOCK
                assert info.available == info.live_workers[0].available
                return int(info.available)

            located, stream = await pair.new_block("/a", block_size=2 * BLOCK)
            await stream.open_write()
            assert await available() == 2 * BLOCK
            await stream.write(b"x" * 1000)
            await stream.complete(1000)
            await pair.master.complete("/a", 1000, [commit_of(located, 1000)])
            assert await available() == 4 * BLOCK - 1000
            _, one = await pair.new_block("/b", block_size=3 * BLOCK)
            async with connected(server.host, server.worker_port) as other:
                one.raw = other
                await one.open_write()
                await pair.master.create("/c")
                await refused(10000, pair.master.add_block("/c"), "No available worker found")
                small = RawBlock(pair.worker, pb.ExtendedBlockProto(id=7), capacity=BLOCK)
                await refused(10000, small.open_write(), "Not enough space")
            with trio.fail_after(5):
                while await available() != 4 * BLOCK - 1000:
                    await trio.sleep(0.01)
            await pair.master.delete("/a")
            with trio.fail_after(5):
                while await available() != 4 * BLOCK:
                    await trio.sleep(0.01)
        nursery.cancel_scope.cancel()


async def used(pair: Pair) -> int:
    return int((await pair.master.call(RpcCode.GET_FILESYSTEM_INFO)).fs_used)


def held(pair: Pair) -> int:
    """Sum of the lengths of all block files, also of unfinished ones."""
    return sum(path.stat().st_size for path in pair.root.rglob("blk_*"))


async def test_used_bytes_are_those_of_all_block_files(pair: Pair) -> None:
    """Whatever becomes of a block: unfinished, dropped, local, rewritten, truncated, refused, cancelled, deleted."""

    async def check(size: int) -> None:
        assert (await used(pair), held(pair)) == (size, size)

    await pair.written(b"x" * 1000, "/whole")
    located, stream = await pair.new_block("/dropped")
    await stream.open_write()
    await stream.write(b"y" * 300)
    await stream.write(b"y" * 10, 0)
    await check(1300)
    _, local = await pair.new_block("/local")
    path = (await local.open_write(short_circuit=True)).path
    Path(path).write_bytes(b"z" * 50)  # drops the stream of /dropped
    await pair.written(b"w" * 7, "/other")  # and that of /local
    await check(1357)
    rewritten = RawBlock(pair.worker, (await pair.master.locate("/whole")).block_locs[0].block)
    await rewritten.open_write()
    await check(2357)
    await rewritten.write(b"r" * 1200)
    await check(2557)
    await refused(10000, rewritten.complete(3), "length mismatch")
    await rewritten.complete(1200)
    await check(1557)
    await rewritten.open_write()
    await rewritten.cancel()
    await check(1557)
    again = RawBlock(pair.worker, located.block)
    await again.open_write()
    await again.cancel()
    await check(1257)
    for name in ("/whole", "/local", "/other", "/dropped"):
        await pair.master.delete(name)
    with trio.fail_after(5):
        while held(pair):
            await trio.sleep(0.01)
    await check(0)


async def test_reserved_space_ends_with_every_way_that_a_stream_can(pair: Pair) -> None:
    async def reserved() -> int:
        return int((await pair.master.call(RpcCode.GET_FILESYSTEM_INFO)).reserved_bytes)

    assert await reserved() == 0
    for index, end in enumerate(("complete", "cancel", "other open", "connection", "refused")):
        async with connected(pair.server.host, pair.server.worker_port) as other:
            _, stream = await pair.new_block(f"/{index}")
            stream.raw = other
            await stream.open_write()
            await stream.write(b"x" * 1000)
            assert await reserved() == BLOCK - 1000, end
            if end == "complete":
                await stream.complete(1000)
            elif end == "cancel":
                await stream.cancel()
            elif end == "other open":
                done = await pair.written(b"done", "/done")
                await RawBlock(other, done.block).open_read(4)
            elif end == "refused":
                with pytest.raises(RemoteError):
                    await stream.complete(BLOCK + 1)
        with trio.fail_after(5):
            while await reserved():
                await trio.sleep(0.01)


async def test_a_batch_that_ends_gives_back_what_it_did_not_name(pair: Pair) -> None:
    blocks = [(await pair.new_block(f"/{index}"))[0].block for index in range(2)]
    opened = pb.BlocksBatchWriteRequest(blocks=blocks, block_size=BLOCK, client_name="me")
    code = RpcCode.WRITE_BLOCKS_BATCH
    await pair.worker.exchange(code, RequestStatus.OPEN, encode(opened), req_id=9, seq_id=0)
    assert (await pair.master.call(RpcCode.GET_FILESYSTEM_INFO)).reserved_bytes == 2 * BLOCK
    ended = pb.BlocksBatchCommitRequest(blocks=blocks[:1], block_size=BLOCK, cancel=True)
    await pair.worker.exchange(code, RequestStatus.COMPLETE, encode(ended), req_id=9, seq_id=1)
    assert (await pair.master.call(RpcCode.GET_FILESYSTEM_INFO)).reserved_bytes == 0


class FailingDisk(RealDisk):
    """A disk that says nothing of the files that writers fill, and moves none of them, once it is told to fail."""

    failing = False

    def stat(self, path: str, *, follow_symlinks: bool = True) -> os.stat_result:
        self._refuse(path)
        return super().stat(path, follow_symlinks=follow_symlinks)

    def rename(self, source: str, target: str) -> None:
        self._refuse(source)
        super().rename(source, target)

    def _refuse(self, path: str) -> None:
        if self.failing and "/staging/" in path:
            raise OSError(errno.EIO, "broken")


@pytest.mark.parametrize("deleted", [False, True], ids=["kept", "deleted"])
async def test_all_streams_of_a_connection_end_with_it_on_a_disk_that_fails(tmp_path: Path, deleted: bool) -> None:
    disk = FailingDisk()
    run = partial(run_server, str(tmp_path / "p"), master_port=0, worker_port=0, world=replace(World.real(), disk=disk))
    async with trio.open_nursery() as nursery:
        server = await nursery.start(run)
        async with paired(server) as pair:

            async def reserved() -> int:
                return int((await pair.master.call(RpcCode.GET_FILESYSTEM_INFO)).reserved_bytes)

            async with connected(server.host, server.worker_port) as other:
                blocks = [(await pair.new_block(f"/{index}"))[0].block for index in range(3)]
                opened = pb.BlocksBatchWriteRequest(blocks=blocks, block_size=BLOCK, client_name="me")
                code = RpcCode.WRITE_BLOCKS_BATCH
                await other.exchange(code, RequestStatus.OPEN, encode(opened), req_id=9, seq_id=0)
                assert await reserved() == 3 * BLOCK
                if deleted:
                    for index in range(3):
                        await pair.master.delete(f"/{index}")
                disk.failing = True
            with trio.fail_after(5):
                while await reserved():
                    await trio.sleep(0.01)
            disk.failing = False
            await pair.written(b"served", "/after")
        nursery.cancel_scope.cancel()


async def test_a_stream_whose_block_another_has_finished_cannot_change_it(pair: Pair) -> None:
    """A stream of a connection that its client has given up must not write into what readers have."""
    located, late = await pair.new_block()
    await late.open_write()
    await late.write(b"old")
    async with connected(pair.server.host, pair.server.worker_port) as other:
        stream = RawBlock(other, located.block)
        await stream.open_write()
        await stream.write(b"new!")
        await stream.complete(4)
        await pair.master.complete("/f", 4, [commit_of(located, 4)])
        await refused(10000, late.write(b"old", 0), "was completed or cancelled by another stream")
        await stream.open_write()
        await refused(10000, late.write(b"old", 0), "was completed or cancelled by another stream")
        assert pair.active(located).read_bytes() == b"new!"
        await stream.complete(4)
    assert await used(pair) == 4


async def test_a_staging_file_goes_with_its_file(pair: Pair) -> None:
    """Deleted before or after its connection died, and under a stream that goes on."""
    for when in ("before", "after", "open"):
        located = (await pair.new_block("/f"))[0]
        async with connected(pair.server.host, pair.server.worker_port) as other:
            stream = RawBlock(other, located.block)
            await stream.open_write()
            await stream.write(b"x" * 100)
            if when != "after":
                await pair.master.delete("/f")
                await gone(pair.staging(located))
            if when == "open":
                await stream.write(b"y" * 100)  # into what has no name any more
                await refused(29, RawBlock(pair.worker, located.block).open_read(100))
        if when == "after":
            await pair.master.delete("/f")
        await gone(pair.staging(located))
        with trio.fail_after(5):
            while await used(pair) or list((pair.root / "staging").iterdir()):  # renamed at once, unlinked afterwards
                await trio.sleep(0.01)
    assert held(pair) == 0


async def test_a_block_deleted_while_it_is_copied_goes_when_the_copy_fails(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    located = await pair.written(b"x" * 1000)
    copying, deleted = threading.Event(), threading.Event()

    def copy_nothing(self: BlockStore, source: int, target_path: str, length_bytes: int) -> None:
        copying.set()
        deleted.wait(5)
        raise OSError(errno.ENOSPC, "full")

    monkeypatch.setattr(BlockStore, "_copy", copy_nothing)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(refused, 17, RawBlock(pair.worker, located.block).open_write())
        await trio.to_thread.run_sync(copying.wait)
        await pair.master.delete("/f")
        await trio.sleep(0.05)
        deleted.set()
    await gone(pair.active(located))
    assert await used(pair) == 0


class SlowDisk(RealDisk):
    """A disk that has nothing in memory and takes its time."""

    delay_s = 0.3
    error: int | None = None

    def preadv(self, fd: int, buffers: Sequence[Any], offset_bytes: int, flags: int = 0) -> int:
        if flags & os.RWF_NOWAIT:
            raise BlockingIOError(errno.EAGAIN, "not in memory")
        time.sleep(self.delay_s)
        if self.error is not None:
            raise OSError(self.error, "broken")
        return super().preadv(fd, buffers, offset_bytes)


@pytest.mark.parametrize("size", [5000, 300_000, 2_500_000])
async def test_nobody_else_waits_for_a_slow_disk(tmp_path: Path, size: int) -> None:
    content = os.urandom(size)
    disk = SlowDisk()
    async with trio.open_nursery() as nursery:
        world = replace(World.real(), disk=disk)
        server = await nursery.start(
            partial(run_server, str(tmp_path / "p"), master_port=0, worker_port=0, world=world)
        )
        async with paired(server) as pair:
            located = await pair.written(content, block_size=4 * BLOCK)
            finished = trio.Event()

            async def read() -> None:
                stream = RawBlock(pair.worker, located.block)
                await stream.open_read(size + 10, chunk=4 * BLOCK)
                assert await stream.read() == content + bytes(10)
                finished.set()

            nursery.start_soon(read)
            slowest_s = 0.0
            with trio.fail_after(20):
                while not finished.is_set():
                    started_s = time.monotonic()
                    await pair.master.stat("/f")
                    slowest_s = max(slowest_s, time.monotonic() - started_s)
                    await trio.sleep(0.002)
            assert slowest_s < SlowDisk.delay_s / 2
            disk.error, disk.delay_s = errno.EIO, 0
            stream = RawBlock(pair.worker, located.block)
            await stream.open_read(size, chunk=4 * BLOCK)
            await refused(1, stream.read(), "reading block")
        nursery.cancel_scope.cancel()
