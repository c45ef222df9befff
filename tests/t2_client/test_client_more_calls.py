"""What a client is seldom asked for: special files, allocation, policies, batches, Free, metrics, exclusive names."""

from __future__ import annotations

import errno
import os
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import trio

from curvfs.api import (
    CurvineFileSystem,
    FileKind,
    FileStatus,
    NewExtent,
    StoragePolicy,
    StorageType,
    TtlAction,
    WriteExtent,
    open_filesystem,
)
from curvfs.client.filesystem import CurvineFileSystem as Client
from curvfs.errors import CurvfsError, FileExists_, FileTooLarge, InvalidRequest, NotADirectory, NotFound, Unsupported
from curvfs.net.transport import FrameStream
from curvfs.server.behaviour import BEHAVIOURS
from curvfs.server.service import Server, run_server
from curvfs.units import MIB
from curvfs.wire.codes import RpcCode
from curvfs.wire.frame import Frame
from curvfs.wire.messages import pb
from curvfs.world import World
from tests.t2_client.conftest import Target
from tests.t2_client.fakes import Close, Fake, Refuse, always, once, status

EXISTS, COMMON = 7, 10000


# ------------------------------------------------------------------------------------------------------ special files


@pytest.mark.parametrize(
    ("kind", "number"),
    [
        (FileKind.FIFO, 0),
        (FileKind.SOCKET, 0),
        (FileKind.CHARACTER_DEVICE, os.makedev(10, 229)),
        (FileKind.BLOCK_DEVICE, os.makedev(8, 1)),
    ],
)
async def test_special_files(fs: CurvineFileSystem, kind: FileKind, number: int) -> None:
    made = await fs.mknod("/n", kind, 0o640, number, owner="me", group="us")
    found = await fs.stat("/n")
    assert (found.id, found.kind, found.mode, found.device) == (made.id, kind, 0o640, number)
    assert (found.owner, found.group, found.xattrs) == ("me", "us", {})
    with pytest.raises(FileExists_):
        await fs.mknod("/n", kind)
    with pytest.raises(InvalidRequest) as caught:
        await fs.open_for_write("/n")
    assert caught.value.errno_ == errno.ENXIO


async def test_mknod_makes_regular_files_and_refuses_the_rest(fs: CurvineFileSystem) -> None:
    made = await fs.mknod("/f", FileKind.FILE, 0o600)
    assert (made.kind, made.mode, made.is_complete) == (FileKind.FILE, 0o600, True)
    for kind, number in ((FileKind.DIRECTORY, 0), (FileKind.SYMLINK, 0), (FileKind.FIFO, 1 << 32)):
        with pytest.raises(InvalidRequest):
            await fs.mknod("/x", kind, 0o600, number)
    with pytest.raises(NotFound):
        await fs.mknod("/missing/x", FileKind.FIFO)
    with pytest.raises(NotADirectory):
        await fs.mknod("/f/x", FileKind.FIFO)
    assert not await fs.exists("/x")


async def test_a_version_without_special_files_keeps_none(tmp_path: Path) -> None:
    async with old_server(tmp_path) as fs:
        with pytest.raises(Unsupported) as caught:
            await fs.mknod("/n", FileKind.FIFO)
        assert caught.value.errno_ == errno.EPERM
        assert not await fs.exists("/n")


def old_server(tmp_path: Path, **settings: Any) -> Any:
    """A client of a server that behaves as v0.3.2-alpha."""

    @asynccontextmanager
    async def serving() -> Any:
        async with trio.open_nursery() as nursery:
            server: Server = await nursery.start(
                partial(
                    run_server,
                    str(tmp_path / "old"),
                    master_port=0,
                    worker_port=0,
                    hostname="worker-host",
                    behaviour=BEHAVIOURS["v0.3.2-alpha"],
                )
            )
            async with open_filesystem(server.url, block_size="1MB", **settings) as fs:
                yield fs
            nursery.cancel_scope.cancel()

    return serving()


# --------------------------------------------------------------------------------------------------------- allocation


async def test_fallocate_extends_and_never_cuts(fs: CurvineFileSystem) -> None:
    content = os.urandom(MIB + 100)
    async with await fs.create("/f") as writer:
        await writer.write(content)
    assert (await fs.fallocate("/f", 10, 100)).length_bytes == len(content)
    assert (await fs.fallocate("/f", 2 * MIB, MIB)).length_bytes == 3 * MIB
    async with await fs.open("/f") as reader:
        assert await reader.read_at(0, 4 * MIB) == content.ljust(3 * MIB, b"\0")
    async with await fs.open_for_write("/f", append=True) as writer:
        await writer.write(b"behind")
        await writer.allocate(5)
        await writer.allocate(3 * MIB + 10)
    async with await fs.open("/f") as reader:
        assert await reader.read_at(3 * MIB - 2, 100) == b"\0\0behind\0\0\0\0"
    for bad in ((-1, 5), (0, 0), (0, -1)):
        with pytest.raises(InvalidRequest):
            await fs.fallocate("/f", *bad)
    with pytest.raises(FileTooLarge) as caught:
        await fs.fallocate("/f", 1 << 50, 1)
    assert caught.value.errno_ == errno.EFBIG


async def test_fallocate_on_the_oldest_version(tmp_path: Path) -> None:
    async with old_server(tmp_path) as fs:
        async with await fs.create("/f") as writer:
            await writer.write(b"x" * 1000)
        assert (await fs.fallocate("/f", 0, MIB + 5)).length_bytes == MIB + 5
        async with await fs.open("/f") as reader:
            assert await reader.read_at(0, 2 * MIB) == (b"x" * 1000).ljust(MIB + 5, b"\0")


# ----------------------------------------------------------------------------------------------------------- policies


async def test_storage_policy_at_create(fs: CurvineFileSystem) -> None:
    policy = StoragePolicy(StorageType.SSD, 3_600_000, TtlAction.DELETE)
    await (await fs.create("/f", policy=policy)).close()
    await fs.mkdir("/d", policy=policy)
    async with await fs.create_extent("/x", 10, policy=policy) as extent:
        for name in ("/f", "/d", "/x"):
            found = await fs.stat(name)
            assert (found.storage_type, found.ttl_ms, found.ttl_action) == (*_fields(policy),)
        await extent.abort()
    await (await fs.create("/plain")).close()
    assert (await fs.stat("/plain")).ttl_action is TtlAction.NONE


def _fields(policy: StoragePolicy) -> tuple[StorageType, int, TtlAction]:
    return policy.storage_type, policy.ttl_ms, policy.ttl_action


async def test_storage_policy_of_the_settings(target: Target) -> None:
    async with open_filesystem(target.url, storage_type="mem", ttl="2h", ttl_action="free") as fs:
        await (await fs.create("/f")).close()
        found = await fs.stat("/f")
        assert (found.storage_type, found.ttl_ms, found.ttl_action) == (StorageType.MEM, 7_200_000, TtlAction.FREE)


async def test_free_leaves_alone_what_is_in_curvine_only(fs: CurvineFileSystem) -> None:
    async with await fs.create("/f") as writer:
        await writer.write(b"content")
    freed = await fs.free("/f")
    assert (freed.inodes, freed.size_bytes) == (0, 0)
    async with await fs.open("/f") as reader:
        assert await reader.read_at(0, 10) == b"content"
    with pytest.raises(NotFound):
        await fs.free("/missing", recursive=True)


async def test_metrics_are_reported_when_asked_for() -> None:
    reports = trio.Event()

    def report(request: Any, message: Any) -> pb.MetricsReportResponse:
        if len(master.messages(RpcCode.METRICS_REPORT)) == 2:
            reports.set()
        return pb.MetricsReportResponse()

    master = Fake({RpcCode.METRICS_REPORT: report})
    async with master.serving():
        async with open_filesystem(master.url):
            await trio.sleep(0.1)
        assert not master.messages(RpcCode.METRICS_REPORT)
        async with open_filesystem(master.url, metrics_report=True, metrics_interval=0.02, client_hostname="me"):
            with trio.fail_after(5):
                await reports.wait()
    message: Any = master.messages(RpcCode.METRICS_REPORT)[-1]
    assert message.instance.startswith("me/")
    assert {metric.name: metric.value for metric in message.metrics}["client_master_calls"] >= 3


# ------------------------------------------------------------------------------------------------------------- batches


def contents(count: int) -> dict[str, bytes]:
    return {f"/f{index:02}": os.urandom(index * 1000) for index in range(count)}


async def write_all(extents: list[WriteExtent | CurvfsError], wanted: list[bytes]) -> list[WriteExtent]:
    written = []
    for extent, content in zip(extents, wanted, strict=True):
        if isinstance(extent, CurvfsError):
            continue
        if extent.local is not None:
            os.pwrite(extent.local.fd, content, 0)
        elif content:
            await extent.write(content, 0)
        written.append(extent)
    return written


def calls_to(fs: CurvineFileSystem) -> int:
    return fs.stats()["master_calls"]


async def test_many_extents_in_three_calls(fs: CurvineFileSystem) -> None:
    wanted = contents(20)
    before = calls_to(fs)
    extents = await fs.create_extents_many(
        [NewExtent(path, len(content), {"user.n": path.encode()}) for path, content in wanted.items()], mode=0o640
    )
    ready = await write_all(extents, list(wanted.values()))
    statuses = await fs.commit_extents_many(ready)
    assert calls_to(fs) - before == 3
    assert [status.path for status in statuses if isinstance(status, FileStatus)] == list(wanted)
    for path, content in wanted.items():
        found = await fs.stat(path)
        assert (found.is_complete, found.length_bytes, found.mode) == (True, len(content), 0o640)
        assert found.xattrs == {"user.n": path.encode()}
        async with await fs.open(path) as reader:
            assert await reader.read_at(0, 10**6) == content


async def test_a_failure_in_a_batch_is_one_files_own(fs: CurvineFileSystem) -> None:
    await (await fs.create("/f02")).close()
    wanted = [NewExtent(path, len(content)) for path, content in contents(5).items()]
    wanted += [NewExtent("/missing/f", 10), NewExtent("relative", 10), NewExtent("/big", 1 << 40)]
    extents = await fs.create_extents_many(wanted)
    refused = [type(extent).__name__ for extent in extents if isinstance(extent, CurvfsError)]
    assert refused == ["FileExists_", "NotFound", "InvalidPath", "InvalidRequest"]
    ready = await write_all(extents, [bytes(entry.size_bytes % MIB) for entry in wanted])
    await ready[1].abort()
    done = await fs.commit_extents_many(ready)
    assert [isinstance(entry, FileStatus) for entry in done] == [True, False, True, True]
    assert [entry.name for entry in await fs.list("/")] == ["f00", "f02", "f03", "f04"]
    assert (await fs.stat("/f02")).length_bytes == 0


async def test_a_batch_whose_answers_are_lost(target: Target, server: Server) -> None:
    """Each call is executed and its answer dropped: nothing is made twice, nothing is lost."""
    async with relay(server, drop={RpcCode.CREATE_FILES_BATCH, RpcCode.ADD_BLOCKS_BATCH}) as (url, dropped):
        root = target.url.rpartition("/")[2]
        async with open_filesystem(f"{url}{root}", client_hostname="elsewhere") as fs:
            wanted = contents(6)
            extents = await fs.create_extents_many([NewExtent(path, len(data)) for path, data in wanted.items()])
            ready = await write_all(extents, list(wanted.values()))
            assert len(ready) == 6
            assert all(isinstance(done, FileStatus) for done in await fs.commit_extents_many(ready))
            assert dropped == {RpcCode.CREATE_FILES_BATCH, RpcCode.ADD_BLOCKS_BATCH}
            for path, content in wanted.items():
                async with await fs.open(path) as reader:
                    assert await reader.read_at(0, 10**6) == content


def relay(server: Server, drop: set[RpcCode]) -> Any:
    """A master that passes everything on, but closes the connection instead of the first answer to some codes."""

    dropped: set[RpcCode] = set()

    @asynccontextmanager
    async def serving() -> Any:
        net = World.real().net
        listener = await net.listen("127.0.0.1", 0)

        async def one(stream: Any) -> None:
            near, far = FrameStream(stream), FrameStream(await net.connect(server.host, server.master_port))
            try:
                while (head := await near.recv_head()) is not None:
                    header, data = await near.recv_header(head), await near.recv_data(head)
                    assert isinstance(data, bytes)
                    await far.send(Frame(head, header, data).encode())
                    answer = await far.recv_head()
                    assert answer is not None
                    header, data = await far.recv_header(answer), await far.recv_data(answer)
                    code = RpcCode.of(head.code)
                    if code in drop and code not in dropped:
                        dropped.add(code)
                        return
                    assert isinstance(data, bytes)
                    await near.send(Frame(answer, header, data).encode())
            except CurvfsError:
                pass
            finally:
                with trio.CancelScope(shield=True):
                    await near.aclose()
                    await far.aclose()

        async def accept() -> None:
            while True:
                nursery.start_soon(one, await listener.accept())

        async with trio.open_nursery() as nursery:
            nursery.start_soon(accept)
            yield f"curvine://127.0.0.1:{listener.port}/", dropped
            nursery.cancel_scope.cancel()
        await listener.aclose()

    return serving()


async def test_a_master_without_batches_is_asked_one_by_one() -> None:
    def create(request: Any, message: Any) -> pb.CreateFileResponse:
        return pb.CreateFileResponse(file_status=status(message.path, block_size=MIB))

    master = Fake({RpcCode.CREATE_FILE: create, RpcCode.COMPLETE_FILE: always(pb.CompleteFileResponse(result=True))})
    async with master.serving(), open_filesystem(master.url) as fs:
        for _ in range(2):
            made = await fs.create_extents_many([NewExtent("/a", 0), NewExtent("/b", 0)])
            extents = [extent for extent in made if isinstance(extent, WriteExtent)]
            assert all(isinstance(done, FileStatus) for done in await fs.commit_extents_many(extents))
        assert len(master.requests(RpcCode.CREATE_FILES_BATCH)) == 1
        assert len(master.requests(RpcCode.CREATE_FILE)) == len(master.requests(RpcCode.COMPLETE_FILE)) == 4


# --------------------------------------------------------------------------------------------------- exclusive names


def lookalike(path: str, **fields: Any) -> pb.GetFileStatusResponse:
    found = status(path, block_size=MIB)
    found.is_complete = False
    for name, value in fields.items():
        setattr(found, name, value)
    return pb.GetFileStatusResponse(status=found)


async def test_an_exclusive_create_never_takes_anothers_file_for_its_own() -> None:
    """The first attempt is lost, the second finds a file that looks like ours: it may be another client's."""
    master = Fake(
        {RpcCode.CREATE_FILE: once(Close(), then=Refuse(EXISTS)), RpcCode.FILE_STATUS: always(lookalike("/f"))}
    )
    async with master.serving(), open_filesystem(master.url, block_size="1MB") as fs:
        with pytest.raises(FileExists_, match="may be this very call's"):
            await fs.create("/f")
        with pytest.raises(FileExists_) as caught:
            await fs.create("/f")
        assert "may be" not in str(caught.value)  # no attempt of this call was lost
        master.handle[RpcCode.CREATE_FILE] = once(Close(), then=Refuse(EXISTS))
        with pytest.raises(FileExists_, match="may be this very call's"):
            await fs.create_extent("/f", 0, unique_name=False)


@pytest.mark.parametrize("call", ["create", "create_extent"])
async def test_a_name_of_ones_own_is_taken_for_ones_own(call: str) -> None:
    wanted = lookalike("/s/unique", mode=0o644 if call == "create" else 0o600)

    async def make(fs: Client) -> FileStatus:
        if call == "create":
            return (await fs.create("/s/unique", unique_name=True)).status
        return (await fs.create_extent("/s/unique", 0)).status

    master = Fake({RpcCode.CREATE_FILE: once(Close(), then=Refuse(EXISTS)), RpcCode.FILE_STATUS: always(wanted)})
    master.handle[RpcCode.COMPLETE_FILE] = always(pb.CompleteFileResponse(result=True))
    async with master.serving(), open_filesystem(master.url, block_size="1MB") as fs:
        assert (await make(fs)).id == 1001
        with pytest.raises(FileExists_):  # no attempt was lost
            await make(fs)
        for other in ({"len": 1}, {"is_complete": True}, {"mode": 0o777}, {"block_size": 2 * MIB}):
            master.handle[RpcCode.CREATE_FILE] = once(Close(), then=Refuse(EXISTS))
            found: dict[str, Any] = other
            mode = wanted.status.mode
            master.handle[RpcCode.FILE_STATUS] = always(lookalike("/s/unique", **({"mode": mode} | found)))
            with pytest.raises(FileExists_, match="may be this very call's"):
                await make(fs)
