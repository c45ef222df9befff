"""Disks that hang and streams that were dropped: bounded time, and never somebody else's bytes."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import AsyncIterator, Sequence
from functools import partial
from typing import Any

import pytest
import trio

from curvfs.api import CurvineFileSystem, open_filesystem
from curvfs.client.session import Session
from curvfs.errors import CurvfsError, TransportError
from curvfs.server.behaviour import BEHAVIOURS
from curvfs.server.service import Server, run_server
from curvfs.units import MIB
from curvfs.world import RealDisk, World
from tests.t2_client.conftest import WORKER_HOSTNAME


class HangingDisk(RealDisk):
    """Reads past the page cache, writes and opens of block files hang while they are told to."""

    def __init__(self) -> None:
        super().__init__()
        self.reads = self.writes = self.opens = False
        self.go_on = threading.Event()
        self.closed: list[int] = []
        self.hung = 0

    def _hang(self, wanted: bool) -> None:
        if wanted:
            self.hung += 1
            self.go_on.wait(30)

    def preadv(self, fd: int, buffers: Sequence[Any], offset_bytes: int, flags: int = 0) -> int:
        if flags & os.RWF_NOWAIT and self.reads:
            raise BlockingIOError(11, "not in the page cache")
        self._hang(self.reads)
        return super().preadv(fd, buffers, offset_bytes, flags)

    def pwritev(self, fd: int, buffers: Sequence[Any], offset_bytes: int, flags: int = 0) -> int:
        self._hang(self.writes)
        return super().pwritev(fd, buffers, offset_bytes, flags)

    def open(self, path: str, flags: int, mode: int = 0o600) -> int:
        self._hang(self.opens and "blk_" in path)
        return super().open(path, flags, mode)

    def close(self, fd: int) -> None:
        self.closed.append(fd)
        super().close(fd)


@pytest.fixture
def disk() -> Any:
    disk = HangingDisk()
    yield disk
    disk.go_on.set()


@pytest.fixture
async def here(server: Server, disk: HangingDisk) -> AsyncIterator[CurvineFileSystem]:
    async with open_filesystem(
        server.url, world=World(disk=disk), client_hostname=WORKER_HOSTNAME, block_size="1MB", data_timeout="300ms"
    ) as fs:
        yield fs


CONTENT = os.urandom(2 * MIB + 99)


async def put(fs: CurvineFileSystem, path: str, content: bytes = CONTENT) -> None:
    async with await fs.create(path) as writer:
        await writer.write(content)


async def ended(disk: HangingDisk) -> None:
    disk.reads = disk.writes = disk.opens = False
    disk.go_on.set()
    await trio.sleep(0.1)


async def test_a_read_goes_over_the_wire_when_the_local_disk_hangs(here: CurvineFileSystem, disk: HangingDisk) -> None:
    await put(here, "/f")
    async with await here.open("/f") as reader:
        assert await reader.read_at(0, 100) == CONTENT[:100]
        disk.reads = True
        buffer = bytearray(len(CONTENT))
        started = time.monotonic()
        assert await reader.readinto(buffer, 0) == len(CONTENT)
        assert time.monotonic() - started < 2
        assert buffer == CONTENT
        assert disk.hung
        hung, before = disk.hung, here.stats()
        assert before["local_disk_hangs"] >= 1
        assert (await reader.read_at(5, 50)) == CONTENT[5:55]  # the wire at once: that disk is not asked again
        assert disk.hung == hung
        # The reads that hang must not touch the buffer any more, however late they end.
        buffer[:] = bytes(len(buffer))
        await ended(disk)
        assert buffer == bytes(len(buffer))
    async with await here.open("/f") as reader:  # and now it is believed again
        local = here.stats()["bytes_read_local"]
        assert await reader.read_at(0, 1000) == CONTENT[:1000]
        assert here.stats()["bytes_read_local"] == local + 1000


async def test_a_cancelled_local_read_ends_at_once_and_leaves_its_buffer_alone(
    here: CurvineFileSystem, disk: HangingDisk
) -> None:
    await put(here, "/f")
    async with await here.open("/f") as reader:
        await reader.read_at(0, 10)
        disk.reads = True
        buffer = bytearray(1000)
        started = time.monotonic()
        with trio.move_on_after(0.05):
            await reader.readinto(buffer, 0)
        assert time.monotonic() - started < 0.25
    await ended(disk)
    assert buffer == bytes(1000)
    assert not here._session.local.disk.hangs(1)


async def test_descriptors_of_hanging_reads_are_closed_when_they_end(
    here: CurvineFileSystem, disk: HangingDisk
) -> None:
    await put(here, "/f", CONTENT[:1000])
    reader = await here.open("/f")
    await reader.read_at(0, 10)
    (fd,) = [local._file.fd for local in reader._local.values()]
    disk.reads = True
    assert await reader.read_at(0, 1000) == CONTENT[:1000]
    disk.closed.clear()
    await reader.aclose()
    assert fd not in disk.closed  # a thread is in it: another file must not get its number
    await ended(disk)
    assert disk.closed.count(fd) == 1


async def test_an_open_that_hangs(here: CurvineFileSystem, disk: HangingDisk) -> None:
    await put(here, "/f")
    disk.opens = True
    started = time.monotonic()
    async with await here.open("/f") as reader:
        assert await reader.read_at(0, 10**7) == CONTENT
    async with await here.open_extents("/f") as extents:
        assert not extents.is_local
        assert {extent.reason for extent in extents.extents} == {"stuck"}  # type: ignore[union-attr]
    await put(here, "/g")
    assert time.monotonic() - started < 3
    opened = len(os.listdir("/proc/self/fd"))
    await ended(disk)
    assert len(os.listdir("/proc/self/fd")) <= opened  # what was opened too late is closed


async def test_a_local_write_that_hangs_never_opens_its_block_again(here: CurvineFileSystem, disk: HangingDisk) -> None:
    writer = await here.create("/f")
    disk.writes = True
    started = time.monotonic()
    with pytest.raises(CurvfsError, match="did not answer within") as caught:
        await writer.write(b"x" * 1000)
    assert caught.value.errno_ == 110
    with pytest.raises(CurvfsError):
        await writer.write(b"y")
    with pytest.raises(CurvfsError):
        await writer.close()
    await writer.abort()
    assert time.monotonic() - started < 3
    assert (await here.stat("/f")).length_bytes == 0
    with pytest.raises(CurvfsError, match="may still happen"):
        async with await here.open_for_write("/f") as again:
            await again.write(b"z")
    await put(here, "/other", b"fine")  # over the wire
    await ended(disk)
    assert (await here.stat("/f")).length_bytes == 0
    async with await here.open("/other") as reader:
        assert await reader.read_at(0, 10) == b"fine"


# ------------------------------------------------------------------------------------------------- dropped streams


async def break_streams(session: Session, writer: Any) -> None:
    """The connections of a writer's open blocks go, as when a switch fails; its worker has what was sent."""
    for block in writer._open.values():
        for replica in block._replicas:
            await replica.settle()
            await replica._channel._frames.aclose()


@pytest.mark.parametrize("version", ["head", "v0.4.1", "v0.3.2-alpha"])
@pytest.mark.parametrize("hostname", ["elsewhere", WORKER_HOSTNAME])
async def test_a_dropped_rewrite_does_not_come_back(tmp_path: Any, version: str, hostname: str) -> None:
    """Bytes of a rewrite that was given up reappear at the next Complete, unless it is cancelled (4.7). The oldest
    version writes in place, and loses the block to a Cancel: there it stays rewritten."""
    behaviour = {name.lower(): value for name, value in BEHAVIOURS.items()}[version]
    async with trio.open_nursery() as nursery:
        server: Server = await nursery.start(
            partial(
                run_server,
                str(tmp_path / "pool"),
                master_port=0,
                worker_port=0,
                hostname=WORKER_HOSTNAME,
                behaviour=behaviour,
            )
        )
        async with open_filesystem(server.url, client_hostname=hostname, block_size="1MB") as fs:
            await put(fs, "/f", b"a" * 1000)
            await fs.set_attr("/f", mode=0o600)  # a status with ctime shows a version from v0.4 on
            writer = await fs.open_for_write("/f")
            await writer.write_at(b"b" * 500, 0)
            await break_streams(fs._session, writer)
            with pytest.raises(CurvfsError):
                await writer.close()
            await writer.abort()
            async with await fs.open_for_write("/f") as writer:
                await writer.write_at(b"c", 999)
            async with await fs.open("/f") as reader:
                found = await reader.read_at(0, 2000)
            start = b"b" * 500 if version == "v0.3.2-alpha" else b"a" * 500
            assert found == start + b"a" * 499 + b"c"
        nursery.cancel_scope.cancel()


async def test_what_an_abandoned_writer_left_is_thrown_away(server: Server) -> None:
    """A file that was never completed, by a client that is gone: its block is begun anew, not gone on with."""
    async with open_filesystem(server.url, client_hostname="elsewhere", block_size="1MB") as fs:
        writer = await fs.create("/f")
        await writer.write(b"left behind" * 1000)
        await break_streams(fs._session, writer)
        with pytest.raises(TransportError):
            await writer.close()
        await writer.abort()
        assert fs._session.dropped_streams
        async with await fs.open_for_write("/f") as again:
            await again.write(b"short")
        async with await fs.open("/f") as reader:
            assert await reader.read_at(0, 100) == b"short"
        assert not fs._session.dropped_streams
