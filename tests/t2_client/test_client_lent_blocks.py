"""New blocks of one worker on this machine: opened together, completed together (specification 4.7, 4.12)."""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
import trio

from curvfs.api import CurvineFileSystem, NewExtent, WriteExtent, open_filesystem
from curvfs.errors import CurvfsError, InvalidRequest
from curvfs.server import worker as worker_module
from curvfs.server.refusals import common
from curvfs.server.service import Server, run_server
from curvfs.units import MIB
from curvfs.wire.codes import RequestStatus, RpcCode
from curvfs.world import RealDisk, World
from tests.t2_client.conftest import WORKER_HOSTNAME
from tests.t2_client.tap import Tap

COUNT = 6
SIZE = 8192


@asynccontextmanager
async def client(server: Server, tap: Tap, **settings: Any) -> AsyncIterator[CurvineFileSystem]:
    async with open_filesystem(
        server.url, world=World(net=tap, disk=settings.pop("disk", RealDisk())), client_hostname=WORKER_HOSTNAME
    ) as fs:
        yield fs


async def created(fs: CurvineFileSystem, count: int = COUNT) -> list[WriteExtent]:
    made = await fs.create_extents_many([NewExtent(f"/{index}", SIZE, {}) for index in range(count)])
    assert all(isinstance(extent, WriteExtent) for extent in made), made
    return [extent for extent in made if isinstance(extent, WriteExtent)]


def write(extent: WriteExtent, content: bytes) -> None:
    assert extent.local is not None
    os.pwrite(extent.local.fd, content, 0)


def frames(tap: Tap) -> Counter[RequestStatus]:
    return Counter(frame.status for frame in tap.sent if frame.code is RpcCode.WRITE_BLOCK)


def open_files() -> list[str]:
    links = []
    for entry in os.scandir("/proc/self/fd"):
        with suppress(FileNotFoundError):  # that of the listing itself
            links.append(os.readlink(entry.path))
    return links


async def reserved_bytes(fs: CurvineFileSystem) -> int:
    return int((await fs._calls.info()).reserved_bytes)


async def contents_of(fs: CurvineFileSystem) -> list[bytes]:
    found = []
    for index in range(COUNT):
        async with await fs.open(f"/{index}") as reader:
            found.append(await reader.read_at(0, SIZE))
    return found


async def test_many_blocks_take_two_exchanges(server: Server) -> None:
    tap = Tap()
    contents = [os.urandom(SIZE) for _ in range(COUNT)]
    async with client(server, tap) as fs:
        extents = await created(fs)
        assert await reserved_bytes(fs) == COUNT * MIB  # each has its space until it is complete
        for extent, content in zip(extents, contents, strict=True):
            write(extent, content)
        statuses = await fs.commit_extents_many(extents)
        assert not any(isinstance(status, CurvfsError) for status in statuses)
        assert await reserved_bytes(fs) == 0
        assert await contents_of(fs) == contents
    assert frames(tap) == {RequestStatus.OPEN: COUNT, RequestStatus.COMPLETE: COUNT}
    sent = [frame.status for frame in tap.sent if frame.code is RpcCode.WRITE_BLOCK]
    assert sent == [RequestStatus.OPEN] * COUNT + [RequestStatus.COMPLETE] * COUNT


async def test_what_is_not_whole_is_not_completed_and_the_others_are(server: Server) -> None:
    async with client(server, Tap()) as fs:
        extents = await created(fs)
        for extent in extents[1:]:
            write(extent, b"x" * SIZE)
        statuses = await fs.commit_extents_many(extents)
        assert isinstance(statuses[0], InvalidRequest)
        assert not any(isinstance(status, CurvfsError) for status in statuses[1:])
        await extents[0].abort()
        assert await reserved_bytes(fs) == 0
        assert not await fs.exists("/0")
        assert [status.name for status in await fs.list("/") if status.is_complete] == list("12345")


async def test_aborted_ones_give_their_space_back(server: Server) -> None:
    async with client(server, Tap()) as fs:
        for extent in await created(fs):
            write(extent, b"x" * SIZE)
            await extent.abort()
        assert await reserved_bytes(fs) == 0
        assert await fs.list("/") == []
    assert not list(Path(server.directory).rglob("blk_*"))


async def test_a_worker_that_completes_only_what_is_open(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    final = worker_module._Connection._final

    def strict(self: Any, request: Any) -> Any:
        if self._open is None:
            raise common("Uninitialized")
        return final(self, request)

    monkeypatch.setattr(worker_module._Connection, "_final", strict)
    tap = Tap()
    async with client(server, tap) as fs:
        extents = await created(fs)
        for extent in extents:
            write(extent, b"y" * SIZE)
        statuses = await fs.commit_extents_many(extents)
        assert not any(isinstance(status, CurvfsError) for status in statuses)
        assert await contents_of(fs) == [b"y" * SIZE] * COUNT
        assert await reserved_bytes(fs) == 0
    assert frames(tap) == {RequestStatus.OPEN: 2 * COUNT, RequestStatus.COMPLETE: 2 * COUNT}


async def test_a_file_that_cannot_be_opened_is_written_over_the_wire(server: Server) -> None:
    refused: set[str] = set()

    class Refusing(RealDisk):
        def open(self, path: str, flags: int, mode: int = 0o600) -> int:
            if "/staging/blk_" in path and flags & os.O_RDWR and (path in refused or len(refused) < 2):
                refused.add(path)
                raise PermissionError(13, "Permission denied", path)
            return super().open(path, flags, mode)

    async with client(server, Tap(), disk=Refusing()) as fs:
        extents = await created(fs)
        assert [extent.local is None for extent in extents] == [True, True, False, False, False, False]
        for extent in extents:
            if extent.local is None:
                await extent.write(b"z" * SIZE, 0)
            else:
                write(extent, b"z" * SIZE)
        assert not any(isinstance(status, CurvfsError) for status in await fs.commit_extents_many(extents))
        assert await contents_of(fs) == [b"z" * SIZE] * COUNT


@pytest.mark.parametrize("when", ["opened", "written"])
async def test_a_worker_that_is_restarted_meanwhile(tmp_path: Path, when: str) -> None:
    """Every connection breaks between the two exchanges; blocks in writing state are there afterwards."""
    scopes: list[trio.CancelScope] = []

    async def serving(master_port: int, worker_port: int, *, task_status: Any) -> None:
        with trio.CancelScope() as scope:
            scopes.append(scope)
            await run_server(
                str(tmp_path / "pool"),
                master_port=master_port,
                worker_port=worker_port,
                hostname=WORKER_HOSTNAME,
                task_status=task_status,
            )

    async with trio.open_nursery() as nursery:
        server = await nursery.start(serving, 0, 0)
        async with client(server, Tap()) as fs:
            extents = await created(fs)
            if when == "written":
                for extent in extents:
                    write(extent, b"a" * SIZE)
            scopes[0].cancel()
            await nursery.start(serving, server.master_port, server.worker_port)
            for extent in extents:
                write(extent, b"a" * SIZE)
            assert not any(isinstance(one, CurvfsError) for one in await fs.commit_extents_many(extents))
            assert await contents_of(fs) == [b"a" * SIZE] * COUNT
        nursery.cancel_scope.cancel()


async def test_a_caller_that_gives_up_leaves_nothing_open(server: Server) -> None:
    """Cancelled while the files are being opened: descriptors and connections go, and so do the files."""

    class Slow(RealDisk):
        def open(self, path: str, flags: int, mode: int = 0o600) -> int:
            if "/staging/blk_" in path and flags & os.O_RDWR:
                time.sleep(0.05)
            return super().open(path, flags, mode)

    async with client(server, Tap(), disk=Slow()) as fs:
        with trio.move_on_after(0.1) as scope:
            await created(fs)
        assert scope.cancelled_caught
        with trio.fail_after(10):
            while await reserved_bytes(fs) or await fs.list("/"):
                await trio.sleep(0.05)
    with trio.fail_after(10):
        while any("blk_" in link for link in open_files()):
            await trio.sleep(0.05)
