"""Section 4.12: local files instead of payload, and where a worker keeps its blocks."""

from __future__ import annotations

import os
import tomllib
import zlib
from pathlib import Path

from conformance.probe import COMMON, WRONLY, Probe, commit, pattern, refused
from conformance.rules import ALPHA, HEAD, V041, rule

from curvfs.units import MIB
from curvfs.wire.messages import pb


def write_local(path: str, data: bytes, offset: int = 0) -> None:
    """As a client does: O_RDWR, nothing created, nothing cut off."""
    fd = os.open(path, os.O_RDWR)
    try:
        os.pwrite(fd, data, offset)
    finally:
        os.close(fd)


async def granted(probe: Probe, located: pb.LocatedBlockProto) -> str:
    """The path that a worker offers to a reader of the block."""
    stream = await probe.worker(located.locs[0])
    reply = await stream.open_read(located.block.id, located.block.block_size, short_circuit=True)
    await stream.complete_read()
    assert reply.HasField("path")
    return str(reply.path)


@rule("4.12")
async def test_paths_are_granted_only_when_asked_for(probe: Probe) -> None:
    located = (await probe.put(probe.at("f"), b"abc")).block_locs[0]
    stream = await probe.worker(located.locs[0])
    assert not (await stream.open_read(located.block.id, 3)).HasField("path")
    await probe.create(probe.at("g"))
    new = await probe.add_block(probe.at("g"))
    writer = await probe.worker(new.locs[0])
    assert not (await writer.open_write(new.block)).HasField("path")


@rule("4.12", "8.4", needs="local files")
async def test_the_layout_of_a_workers_directory(probe: Probe) -> None:
    """``active/b<d1>/b<d2>/blk_<id>`` when committed; while written ``staging/blk_<id>``, or the active file on
    v0.3.2-alpha."""
    await probe.create(probe.at("f"))
    located = await probe.add_block(probe.at("f"))
    block_id = located.block.id
    stream = await probe.worker(located.locs[0])
    reply = await stream.open_write(located.block, short_circuit=True)
    active = f"active/b{(block_id >> 48) & 31}/b{(block_id >> 32) & 31}/blk_{block_id}"
    assert reply.path.endswith(active if probe.version is ALPHA else f"staging/blk_{block_id}")
    assert reply.path.startswith("/")
    write_local(reply.path, b"abc")
    await stream.complete(3)
    assert os.path.exists(reply.path) == (probe.version is ALPHA)
    await probe.complete(probe.at("f"), 3, commit(located, 3))
    path = await granted(probe, (await probe.locate(probe.at("f"))).block_locs[0])
    assert path.endswith(active)
    assert Path(path).read_bytes() == b"abc"  # raw bytes, no header
    version = tomllib.loads(Path(path.removesuffix(active) + "version").read_text(encoding="utf-8"))
    assert version["worker_id"] == located.locs[0].worker_id
    assert version["dir_id"] == zlib.crc32(version["storage_id"].encode())
    assert version["cluster_id"] == Path(path.removesuffix("/" + active)).name


@rule("4.12", needs="local files")
async def test_a_local_write(probe: Probe) -> None:
    data = pattern(300_000)
    await probe.create(probe.at("f"))
    located = await probe.add_block(probe.at("f"))
    stream = await probe.writer(located, short_circuit=True)
    path = (await stream.open_write(located.block, short_circuit=True)).path
    assert Path(path).read_bytes() == b""
    write_local(path, data)
    await stream.complete(len(data))
    await probe.complete(probe.at("f"), len(data), commit(located, len(data)))
    assert await probe.get(probe.at("f")) == data


@rule("4.12", needs="local files")
async def test_a_local_write_must_have_the_length_it_says(probe: Probe) -> None:
    await probe.create(probe.at("f"))
    located = await probe.add_block(probe.at("f"))
    stream = await probe.worker(located.locs[0])
    write_local((await stream.open_write(located.block, short_circuit=True)).path, b"abc")
    async with refused(COMMON, text="length mismatch"):
        await stream.complete(4)


@rule("4.12", "4.7")
async def test_no_running_frames_after_a_short_circuit_open(probe: Probe) -> None:
    await probe.create(probe.at("f"))
    located = await probe.add_block(probe.at("f"))
    stream = await probe.writer(located, short_circuit=True)
    async with refused(COMMON, text="Uninitialized"):
        await stream.write(b"abc")


@rule("4.12")
async def test_a_write_goes_on_remotely_when_the_local_file_cannot_be_opened(probe: Probe) -> None:
    await probe.create(probe.at("f"))
    located = await probe.add_block(probe.at("f"))
    stream = await probe.writer(located, short_circuit=True)
    await stream.open_write(located.block, short_circuit=False)
    await stream.write(b"abc")
    await stream.complete(3)
    await probe.complete(probe.at("f"), 3, commit(located, 3))
    assert await probe.get(probe.at("f")) == b"abc"


@rule("4.12", only=[V041, HEAD], needs="local files")
async def test_a_local_rewrite_is_a_copy_until_complete(probe: Probe) -> None:
    located = (await probe.put(probe.at("f"), b"aaaaaaaaaa")).block_locs[0]
    published = Path(await granted(probe, located))
    old = os.open(published, os.O_RDONLY)
    try:
        await probe.open(probe.at("f"), WRONLY)
        stream = await probe.worker(located.locs[0])
        reply = await stream.open_write(located.block, short_circuit=True)
        assert reply.path != str(published)
        write_local(reply.path, b"QQQ")
        assert published.read_bytes() == b"aaaaaaaaaa"
        await stream.complete(10)
        assert published.read_bytes() == b"QQQaaaaaaa"
        assert os.read(old, 100) == b"aaaaaaaaaa"  # an open descriptor keeps its generation
    finally:
        os.close(old)


@rule("4.12", "8.4", only=[V041, HEAD], needs="local files")
async def test_no_path_where_the_file_is_shorter_than_the_block(probe: Probe) -> None:
    located = (await probe.put(probe.at("f"), b"abc")).block_locs[0]
    await granted(probe, located)
    stream = await probe.worker(located.locs[0])
    reply = await stream.open_read(located.block.id, 10, short_circuit=True)
    assert not reply.HasField("path")
    assert await stream.read() == b"abc" + bytes(7)  # the stream is open remotely instead


@rule("8.4", "12", only=[ALPHA], needs="local files")
async def test_old_workers_grant_the_path_of_a_shorter_file(probe: Probe) -> None:
    located = (await probe.put(probe.at("f"), b"abc")).block_locs[0]
    stream = await probe.worker(located.locs[0])
    reply = await stream.open_read(located.block.id, 10, short_circuit=True)
    assert Path(reply.path).read_bytes() == b"abc"


@rule("4.12", "4.10", needs="local files")
async def test_a_local_writer_gets_a_file_sized_by_alloc_opts(probe: Probe) -> None:
    await probe.create(probe.at("f"))
    hole = (await probe.resize(probe.at("f"), 5000)).block_locs[0]
    placed = await probe.assign(probe.at("f"), hole.block)
    stream = await probe.worker(placed.locs[0])
    path = (await stream.open_write(placed.block, block_size=MIB, short_circuit=True)).path
    assert Path(path).stat().st_size == 5000
    write_local(path, b"end", 4997)
    await stream.complete(5000)
    await probe.complete(probe.at("f"), 5000, commit(placed, 5000))
    assert await probe.get(probe.at("f")) == bytes(4997) + b"end"
