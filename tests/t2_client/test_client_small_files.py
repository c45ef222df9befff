"""Many small files at once (specification 4.16): right bytes, whatever becomes of the stream that carries them."""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import AsyncExitStack
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import trio

from curvfs.api import CurvineFileSystem, FileStatus, NewFile, SyncFileSystem, open_filesystem
from curvfs.errors import CurvfsError, FileExists_, InvalidPath, NotFound
from curvfs.server import worker
from curvfs.server.behaviour import BEHAVIOURS
from curvfs.server.service import Server, run_server
from curvfs.units import KIB, MIB
from curvfs.wire.codes import RequestStatus, RpcCode
from curvfs.wire.messages import pb
from tests.t2_client.conftest import WORKER_HOSTNAME
from tests.t2_client.fakes import Close, Fake, Refuse, addresses, status

SIZES = (1, 0, 4 * KIB, 100 * KIB, MIB, MIB + 1, 3 * MIB, 7)


def files(sizes: Sequence[int] = SIZES, directory: str = "") -> list[NewFile]:
    return [NewFile(f"{directory}/f{i:03}", os.urandom(size), {"user.n": b"%d" % i}) for i, size in enumerate(sizes)]


async def check(fs: CurvineFileSystem, wanted: Sequence[NewFile]) -> None:
    for file in wanted:
        found = await fs.stat(file.path)
        assert (found.is_complete, found.xattrs) == (True, file.xattrs)
        async with await fs.open(file.path) as reader:
            assert await reader.read_at(0, 10 * MIB) == file.content


async def test_small_and_large_ones_together(fs: CurvineFileSystem) -> None:
    wanted = files()
    before = fs.stats()["master_calls"]
    done = await fs.write_files(wanted, mode=0o640)
    assert fs.stats()["master_calls"] - before == 3
    assert [entry.path for entry in done if isinstance(entry, FileStatus)] == [file.path for file in wanted]
    assert (await fs.stat("/f000")).mode == 0o640
    await check(fs, wanted)


async def test_more_than_one_stream_holds(fs: CurvineFileSystem) -> None:
    wanted = files([1000] * 150 + [700 * KIB] * 9)
    assert all(isinstance(entry, FileStatus) for entry in await fs.write_files(wanted))
    await check(fs, wanted)


async def test_a_failure_is_one_files_own(fs: CurvineFileSystem) -> None:
    wanted = files([10] * 4)
    await (await fs.create("/f001")).close()
    done = await fs.write_files([*wanted, NewFile("/missing/f", b"x"), NewFile("relative", b"x")])
    kinds = [type(entry) for entry in done]
    assert kinds == [FileStatus, FileExists_, FileStatus, FileStatus, NotFound, InvalidPath]
    await check(fs, [wanted[0], *wanted[2:]])
    assert (await fs.stat("/f001")).length_bytes == 0
    assert await fs.write_files([]) == []


@pytest.mark.parametrize("version", BEHAVIOURS)
async def test_every_version(tmp_path: Path, version: str) -> None:
    start = partial(run_server, str(tmp_path), master_port=0, worker_port=0, behaviour=BEHAVIOURS[version])
    async with trio.open_nursery() as nursery:
        server = await nursery.start(start)
        async with open_filesystem(server.url, client_hostname="elsewhere") as fs:
            wanted = files([10, 20 * KIB, 0])
            assert all(isinstance(entry, FileStatus) for entry in await fs.write_files(wanted))
            assert fs.stats().get("batches_split", 0) == 0
            await check(fs, wanted)
        nursery.cancel_scope.cancel()


async def test_blocking(server: Server) -> None:
    def use() -> None:
        with SyncFileSystem.connect(server.url) as fs:
            wanted = files([10, 20])
            assert all(isinstance(entry, FileStatus) for entry in fs.write_files(wanted))
            with fs.open_file("/f001") as file:
                assert file.read() == wanted[1].content

    await trio.to_thread.run_sync(use)


async def test_two_replicas(tmp_path: Path) -> None:
    async with trio.open_nursery() as nursery:
        server = await nursery.start(
            partial(run_server, str(tmp_path), master_port=0, worker_port=0, more_workers=["second"])
        )
        async with open_filesystem(server.url, client_hostname="elsewhere", replicas=2) as fs:
            wanted = files([10, 20, 30])
            assert all(isinstance(entry, FileStatus) for entry in await fs.write_files(wanted))
            assert [len((await fs.locate(file.path)).blocks[0].workers) for file in wanted] == [2, 2, 2]
            await check(fs, wanted)
        nursery.cancel_scope.cancel()


@pytest.mark.parametrize("at", [RequestStatus.OPEN, RequestStatus.RUNNING, RequestStatus.COMPLETE])
@pytest.mark.parametrize("how", ["refuses", "dies", "does half"])
async def test_a_batch_stream_that_fails_is_made_up_for(
    server: Server, monkeypatch: pytest.MonkeyPatch, at: RequestStatus, how: str
) -> None:
    """Each file goes through a stream of its own then, over whatever the batch left behind."""
    original = worker._HANDLERS[RpcCode.WRITE_BLOCKS_BATCH][at]

    async def failing(connection: Any, request: Any, payload: Any) -> Any:
        if how == "does half":
            await original(connection, request, payload)
        if how == "dies":
            await original(connection, request, payload)
            await connection._raw.aclose()
        raise Refuse(1, "made up") if how == "dies" else worker.refusal(1, "made up")

    monkeypatch.setitem(worker._HANDLERS[RpcCode.WRITE_BLOCKS_BATCH], at, failing)
    for hostname in ("elsewhere", WORKER_HOSTNAME):
        async with open_filesystem(server.url, client_hostname=hostname) as fs:
            wanted = files([10, 30 * KIB, 5], directory=f"/{hostname}")
            await fs.mkdir(f"/{hostname}")
            done = await fs.write_files(wanted)
            assert all(isinstance(entry, FileStatus) for entry in done), done
            assert fs.stats()["batches_split"] == 1
            await check(fs, wanted)


async def test_a_worker_that_takes_nothing_leaves_no_file() -> None:
    dead = Fake({code: lambda request, message: (_ for _ in ()).throw(Close()) for code in RpcCode})
    made: list[str] = []

    def create(request: Any, message: Any) -> Any:
        made.extend(each.path for each in message.requests)
        return pb.CreateFilesBatchResponse(file_statuses=[found(path) for path in made])

    def found(path: str) -> pb.FileStatusProto:
        return status(path, block_size=MIB, inode_id=1001 + made.index(path))

    def add(request: Any, message: Any) -> Any:
        blocks = [
            pb.LocatedBlockProto(
                block=pb.ExtendedBlockProto(id=(1001 + made.index(each.path)) << 24), locs=addresses(dead)
            )
            for each in message.requests
        ]
        return pb.AddBlocksBatchResponse(blocks=blocks)

    def delete(request: Any, message: Any) -> Any:
        deleted.append(message.path)
        return pb.DeleteResponse()

    deleted: list[str] = []
    master = Fake(
        {
            RpcCode.CREATE_FILES_BATCH: create,
            RpcCode.ADD_BLOCKS_BATCH: add,
            RpcCode.FILE_STATUS: lambda request, message: pb.GetFileStatusResponse(status=found(message.path)),
            RpcCode.DELETE: delete,
        }
    )
    async with AsyncExitStack() as stack:
        for fake in (dead, master):
            await stack.enter_async_context(fake.serving())
        fs = await stack.enter_async_context(open_filesystem(master.url, retry_min_sleep="10ms"))
        done = await fs.write_files([NewFile("/a", b"1"), NewFile("/b", b"2")])
        assert all(isinstance(entry, CurvfsError) for entry in done)
        assert sorted(deleted) == ["/a", "/b"]
        assert not master.requests(RpcCode.COMPLETE_FILE) and not master.requests(RpcCode.COMPLETE_FILES_BATCH)


async def test_a_cancelled_call_leaves_no_file(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    begun = trio.Event()

    async def hang(connection: Any, request: Any, payload: Any) -> Any:
        begun.set()
        await trio.sleep_forever()

    monkeypatch.setitem(worker._HANDLERS[RpcCode.WRITE_BLOCKS_BATCH], RequestStatus.RUNNING, hang)
    async with open_filesystem(server.url, client_hostname="elsewhere") as fs:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(fs.write_files, files([10, 20, 0]))
            await begun.wait()
            assert len(await fs.list("/")) == 3
            nursery.cancel_scope.cancel()
        assert await fs.list("/") == []
