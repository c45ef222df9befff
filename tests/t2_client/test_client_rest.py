"""File objects, locks that are kept, under stores, full disks, several workers, files that must not be touched."""

from __future__ import annotations

import errno
import io
import os
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import trio

from curvfs.api import CurvineFileSystem, FileLock, LockKind, SyncFileSystem, open_filesystem
from curvfs.errors import (
    CurvfsError,
    InProgress,
    InvalidRequest,
    NotFound,
    OutOfSpace,
    ReadOnly,
    RemoteError,
    Unsupported,
)
from curvfs.server.service import Server, run_server
from curvfs.units import MIB
from curvfs.wire.codes import RpcCode
from curvfs.wire.messages import pb
from tests.t2_client.conftest import WORKER_HOSTNAME
from tests.t2_client.fakes import Fake, Refuse, always, once, status


@asynccontextmanager
async def serving(tmp_path: Path, **options: Any) -> AsyncIterator[Server]:
    async with trio.open_nursery() as nursery:
        yield await nursery.start(
            partial(
                run_server, str(tmp_path / "own"), master_port=0, worker_port=0, hostname=WORKER_HOSTNAME, **options
            )
        )
        nursery.cancel_scope.cancel()


# -------------------------------------------------------------------------------------------------------- file objects


async def test_file_objects_behave_like_pythons(server: Server) -> None:
    await trio.to_thread.run_sync(_use_file_objects, server.url)


def _use_file_objects(url: str) -> None:
    content = os.urandom(2 * MIB + 7)
    with SyncFileSystem.connect(url, block_size="1MB") as fs:
        with fs.open_file("/f", "wb") as raw:
            assert (raw.writable(), raw.readable(), raw.seekable()) == (True, False, True)
            assert raw.write(content) == len(content) == raw.tell()
            raw.seek(5)
            raw.write(b"!!")
            assert raw.seek(0, os.SEEK_END) == len(content)
            with pytest.raises(io.UnsupportedOperation):
                raw.read(1)
        content = content[:5] + b"!!" + content[7:]
        with fs.open_file("/f") as raw, io.BufferedReader(raw) as file:
            assert file.read(10) == content[:10]
            assert file.seek(-4, os.SEEK_END) == len(content) - 4
            assert file.read() == content[-4:]
            assert file.read() == b""
            buffer = bytearray(100)
            file.seek(MIB - 50)
            assert file.readinto(buffer) == 100
            assert buffer == content[MIB - 50 : MIB + 50]
            for offset, whence in ((-1, os.SEEK_SET), (0, 9)):
                with pytest.raises(OSError, match="Cannot seek in /f") as nowhere:
                    raw.seek(offset, whence)
                assert isinstance(nowhere.value, CurvfsError) and nowhere.value.errno == errno.EINVAL
            with pytest.raises(TypeError):
                raw.seek(1.5)  # type: ignore[arg-type]
            with pytest.raises(io.UnsupportedOperation):
                raw.write(b"x")
        with pytest.raises(ValueError, match="closed"):
            raw.tell()
        with fs.open_file("/f", "ab") as raw:
            raw.seek(0)
            raw.write(b"end")
            assert raw.truncate(len(content) + 2) == len(content) + 2
        with fs.open_file("/f") as raw:
            assert raw.readall() == content + b"en"
        with fs.open_file("/new", "ab") as raw, io.TextIOWrapper(io.BufferedWriter(raw)) as text:
            text.write("one\ntwo\n")
        with fs.open_file("/new") as raw, io.TextIOWrapper(io.BufferedReader(raw)) as text:
            assert list(text) == ["one\n", "two\n"]
        with fs.hold_lock("/new", FileLock(LockKind.WRITE, owner_id=1)):
            assert fs.get_lock("/new", FileLock(LockKind.WRITE, owner_id=2)) is not None
        assert fs.get_lock("/new", FileLock(LockKind.WRITE, owner_id=2)) is None
        with pytest.raises(CurvfsError):
            fs.open_file("/new", "xb")
        with pytest.raises(CurvfsError, match="modes are"):
            fs.open_file("/new", "r+")


@pytest.mark.parametrize("mode", ["r+b", "rb+", "w+b", "wb+", "x+b", "a+b", "ab+"])
async def test_files_for_reading_and_writing_do_what_pythons_do(server: Server, tmp_path: Path, mode: str) -> None:
    """Each step has the same outcome on a Curvine file and on a local one."""
    await trio.to_thread.run_sync(_compare_with_python, server.url, tmp_path / "local", mode)


def _compare_with_python(url: str, local: Path, mode: str) -> None:
    with SyncFileSystem.connect(url, block_size="1MB") as fs:
        if not mode.startswith("x"):
            local.write_bytes(b"0123456789" * 10)
            with fs.open_file("/f", "wb") as raw:
                raw.write(local.read_bytes())
        steps: list[Callable[[Any], Any]] = [
            lambda file: (file.readable(), file.writable(), file.seekable()),
            lambda file: file.tell(),
            lambda file: file.read(5),
            lambda file: file.write(b"abc"),
            lambda file: file.tell(),
            lambda file: file.read(3),
            lambda file: file.seek(-4, os.SEEK_END) if file.seek(0, os.SEEK_END) > 4 else file.seek(0),
            lambda file: file.readall(),
            lambda file: file.seek(2),
            lambda file: file.readinto(bytearray(4)),
            lambda file: file.write(bytes(MIB + 5)),
            lambda file: file.truncate(7),
            lambda file: file.seek(0),
            lambda file: file.read(),
            lambda file: file.seek(9),
            lambda file: file.write(b"behind a hole"),
        ]
        with fs.open_file("/f", mode) as ours, open(local, mode, buffering=0) as pythons:
            for number, step in enumerate(steps):
                assert step(ours) == step(pythons), f"step {number}"
        with fs.open_file("/f") as raw:
            assert raw.readall() == local.read_bytes()
        with fs.open_file("/f", "r+b") as raw, io.BufferedRandom(raw) as file:
            file.seek(1)
            file.write(b"!")
            assert file.read(2) == local.read_bytes()[2:4]


async def test_file_objects_raise_what_pythons_do(server: Server) -> None:
    await trio.to_thread.run_sync(_fail_with_file_objects, server)


def _fail_with_file_objects(server: Server) -> None:
    with SyncFileSystem.connect(server.url, block_size="1MB", client_hostname="elsewhere") as fs:
        with pytest.raises(FileNotFoundError) as missing:
            fs.open_file("/missing")
        assert isinstance(missing.value, NotFound) and missing.value.errno == errno.ENOENT
        fs.mkdir("/d")
        for mode in ("rb", "wb", "ab"):
            with pytest.raises(IsADirectoryError):
                fs.open_file("/d", mode)
        with fs.open_file("/f", "wb") as raw:
            raw.write(bytes(3 * MIB))
        with pytest.raises(FileExistsError):
            fs.open_file("/f", "xb")
        for mode in ("r", "r+", "rwb", "b", "+", "", "rbU"):
            with pytest.raises(OSError, match="modes are") as wrong, fs.open_file("/f", mode):
                pass
            assert wrong.value.errno == errno.EINVAL

        # In the middle of a file: seek and readinto, plain and through a buffer.
        with fs.open_file("/f") as raw, io.BufferedReader(raw) as file:
            fs.delete("/f")
            wait_for(lambda: not list(Path(server.directory).glob("data/*/active/*/*/blk_*")))
            file.seek(2 * MIB)
            buffer = bytearray(100)
            for read in (partial(file.readinto, buffer), partial(raw.readinto, buffer), raw.readall):
                with pytest.raises(OSError) as gone:
                    read()
                assert isinstance(gone.value, CurvfsError) and gone.value.errno == gone.value.errno_ == errno.ESTALE

        # At the end: the file cannot be published any more, and says so where Python's do.
        for end in ("flush", "close"):
            raw = fs.open_file("/g", "wb")
            raw.write(bytes(10))
            fs.delete("/g")
            with pytest.raises(FileNotFoundError) as unpublished:
                getattr(raw, end)()
            assert isinstance(unpublished.value, NotFound)
            if end == "flush":
                with pytest.raises(FileNotFoundError):
                    raw.close()
            assert raw.closed
        with pytest.raises(FileNotFoundError), fs.open_file("/g", "wb") as raw:
            raw.write(b"x")
            fs.delete("/g")


def wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 20
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.02)
    assert condition()


# -------------------------------------------------------------------------------------------------------------- locks


async def test_a_lock_is_kept_and_given_back(server: Server) -> None:
    lock = FileLock(LockKind.WRITE, owner_id=1, start=0, end=99)
    async with open_filesystem(server.url) as fs, open_filesystem(server.url) as other:
        await (await fs.create("/f")).close()
        async with fs.hold_lock("/f", lock, renew_s=0.02) as held:
            first = await other.get_lock("/f", lock)
            assert first is not None
            await trio.sleep(0.1)
            later = await other.get_lock("/f", lock)
            assert later is not None
            assert later.acquired_ms > first.acquired_ms  # set again, and so it does not lapse
            with pytest.raises(InProgress) as caught:
                async with other.hold_lock("/f", lock, wait_s=0.1):
                    pass
            assert caught.value.errno_ == errno.EAGAIN
            assert not held.lost
        async with other.hold_lock("/f", lock, wait_s=1):
            assert await fs.get_lock("/f", lock) is not None
        assert await fs.get_lock("/f", lock) is None


async def test_a_lock_that_somebody_else_got_is_lost() -> None:
    taken = pb.SetLockResponse(conflict=pb.FileLockProto(client_id="other", pid=7))
    master = Fake({RpcCode.SET_LOCK: once(pb.SetLockResponse(), then=taken)})
    async with master.serving(), open_filesystem(master.url) as fs:
        lock = FileLock(LockKind.WRITE, owner_id=1)
        async with fs.hold_lock("/f", lock, renew_s=0.01) as held:
            with trio.fail_after(5):
                while not held.lost:
                    await trio.sleep(0.01)


# -------------------------------------------------------------------------------------------------------- under stores


def mount(path: str, *, cache: bool, writable: bool = False) -> pb.MountInfoProto:
    mode = pb.WRITE_TYPE_PROTO_CACHE_MODE if cache else pb.WRITE_TYPE_PROTO_FS_MODE
    access = pb.ACCESS_MODE_PROTO_READ_WRITE if writable else pb.ACCESS_MODE_PROTO_READ_ONLY
    return pb.MountInfoProto(cv_path=path, ufs_path="s3://bucket", write_type=mode, access_mode=access)


@asynccontextmanager
async def mounted() -> AsyncIterator[tuple[CurvineFileSystem, Fake]]:
    """/cache is a cache of a store, /ro and /rw belong to the master and a store."""
    table = [mount("/cache", cache=True), mount("/ro", cache=False), mount("/rw", cache=False, writable=True)]
    table.append(mount("/above/deep/m", cache=False, writable=True))

    def stat(request: Any, message: Any) -> pb.GetFileStatusResponse:
        return pb.GetFileStatusResponse(status=status(message.path, directory=message.path in ("/", "/ro", "/rw")))

    master = Fake(
        {
            RpcCode.GET_MOUNT_TABLE: always(pb.GetMountTableResponse(mount_table=table)),
            RpcCode.FILE_STATUS: stat,
            RpcCode.DELETE: always(pb.DeleteResponse()),
            RpcCode.RENAME: always(pb.RenameResponse(result=True)),
            RpcCode.SET_ATTR: lambda request, message: pb.SetAttrResponse(status=status(message.path)),
        }
    )
    async with master.serving(), open_filesystem(master.url) as fs:
        yield fs, master


async def test_what_only_an_under_store_knows_is_refused() -> None:
    async with mounted() as (fs, master):
        for call in (fs.stat, fs.list, fs.open, fs.open_for_write, fs.delete, fs.mkdir, fs.create, fs.locate):
            for path in ("/cache", "/cache/x"):
                with pytest.raises(Unsupported) as caught:
                    await call(path)
                assert caught.value.errno_ == errno.EOPNOTSUPP
        (failure,) = await fs.locate_many(["/cache/x"])
        assert isinstance(failure, Unsupported)
        seen = {message.path for message in master.messages(RpcCode.FILE_STATUS)}  # type: ignore[attr-defined]
        assert not any(path.startswith("/cache") for path in seen)
        assert (await fs.stat("/cached")).path == "/cached"  # another name


async def test_mounts_that_the_master_knows() -> None:
    async with mounted() as (fs, master):
        await fs.stat("/ro/x")
        for call in (fs.delete, fs.mkdir, fs.create, fs.open_for_write, partial(fs.set_attr, mode=0o600)):
            with pytest.raises(ReadOnly) as caught:
                await call("/ro/x")  # type: ignore[operator]
            assert (caught.value.errno_, caught.value.kind) == (errno.EROFS, 30)
        await fs.delete("/rw/x")
        for path in ("/rw", "/ro"):
            with pytest.raises(CurvfsError) as caught:
                await fs.delete(path)
            assert caught.value.errno_ in (errno.EBUSY, errno.EROFS)
        for target in ("/elsewhere", "/x"):
            with pytest.raises(CurvfsError) as caught:
                await fs.rename("/rw/x", target)
            assert caught.value.errno_ == errno.EXDEV
        with pytest.raises(CurvfsError) as caught:
            await fs.rename("/rw", "/moved")
        assert caught.value.errno_ == errno.EBUSY
        # A mount's directory goes with the directories above it.
        for call in (fs.delete("/above", recursive=True), fs.delete("/above"), fs.rename("/above", "/moved")):
            with pytest.raises(InProgress, match="mounted at /above/deep/m"):
                await call
        assert not master.requests(RpcCode.RENAME)
        assert [message.path for message in master.messages(RpcCode.DELETE)] == ["/rw/x"]  # type: ignore[attr-defined]


async def test_writing_a_part_of_what_an_under_store_holds_alone_is_refused() -> None:
    """OpenFile would cut the file off from its store, and its bytes would be nowhere (4.5)."""
    async with mounted() as (fs, master):
        there = status("/rw/x", length=100)
        there.storage_policy.state = pb.STORAGE_STATE_PROTO_UFS
        master.handle[RpcCode.FILE_STATUS] = always(pb.GetFileStatusResponse(status=there))
        for call in (
            fs.open_for_write("/rw/x"),
            fs.open_for_write("/rw/x", append=True),
            fs.truncate("/rw/x", 10),
            fs.fallocate("/rw/x", 0, 1000),
        ):
            with pytest.raises(Unsupported, match="under store only") as caught:
                await call
            assert (caught.value.errno_, caught.value.kind) == (errno.EOPNOTSUPP, 22)
        assert not master.requests(RpcCode.OPEN_FILE) and not master.requests(RpcCode.RESIZE_FILE)
        opened = pb.OpenFileResponse(file_blocks=pb.FileBlocksProto(status=status("/rw/x")))
        master.handle |= {
            RpcCode.OPEN_FILE: always(opened),
            RpcCode.COMPLETE_FILE: always(pb.CompleteFileResponse(result=True)),
        }
        await (await fs.open_for_write("/rw/x", truncate=True)).close()  # all of it is replaced


# -------------------------------------------------------------------------------------------------------- hazards, room


async def test_files_that_would_hang_a_master_are_not_touched() -> None:
    """Block size 0 (hazard 2): opening for write, cutting, overwriting never reach it."""
    odd = status("/f", block_size=0)
    master = Fake({RpcCode.FILE_STATUS: always(pb.GetFileStatusResponse(status=odd))})
    async with master.serving(), open_filesystem(master.url) as fs:
        for call in (
            partial(fs.truncate, "/f", 10),
            partial(fs.open_for_write, "/f", truncate=True),
            partial(fs.fallocate, "/f", 0, 10),
            partial(fs.create, "/f", overwrite=True),
        ):
            with pytest.raises(InvalidRequest, match="block size"):
                await call()
        for code in (RpcCode.OPEN_FILE, RpcCode.RESIZE_FILE, RpcCode.CREATE_FILE):
            assert not master.requests(code)


async def test_a_short_block_before_the_last_is_not_written_on() -> None:
    blocks = [pb.LocatedBlockProto(block=pb.ExtendedBlockProto(id=index, block_size=10)) for index in (1, 2)]
    answer = pb.OpenFileResponse(file_blocks=pb.FileBlocksProto(status=status(length=20), block_locs=blocks))
    master = Fake({RpcCode.FILE_STATUS: always(pb.GetFileStatusResponse(status=status(length=20)))})
    master.handle |= {RpcCode.OPEN_FILE: always(answer), RpcCode.COMPLETE_FILE: always(pb.CompleteFileResponse())}
    async with master.serving(), open_filesystem(master.url) as fs:
        with pytest.raises(InvalidRequest, match="not full"):
            await fs.open_for_write("/f")
        assert not master.requests(RpcCode.RESIZE_FILE)


@pytest.mark.parametrize("hostname", ["elsewhere", WORKER_HOSTNAME])
async def test_a_full_worker_is_out_of_space_and_spoils_nothing(tmp_path: Path, hostname: str) -> None:
    content = os.urandom(3 * MIB)
    async with (
        serving(tmp_path, capacity_bytes=6 * MIB) as server,
        open_filesystem(server.url, client_hostname=hostname, block_size="1MB") as fs,
    ):
        async with await fs.create("/kept") as writer:
            await writer.write(content)
        with pytest.raises(OutOfSpace) as caught:
            async with await fs.create("/large") as writer:
                for _ in range(8):
                    await writer.write(os.urandom(MIB))
        assert caught.value.errno_ == errno.ENOSPC
        with pytest.raises(OutOfSpace):
            await fs.fallocate("/kept", 0, 100 * MIB)
        length = (await fs.stat("/large")).length_bytes
        async with await fs.open("/large") as reader:
            assert len(await reader.read_at(0, 100 * MIB)) == length
        async with await fs.open("/kept") as reader:
            assert await reader.read_at(0, 100 * MIB) == content
        await fs.delete("/large")


async def test_replicas_on_real_workers(tmp_path: Path) -> None:
    content = os.urandom(2 * MIB + 99)
    async with (
        serving(tmp_path, more_workers=["second-host"]) as server,
        open_filesystem(server.url, client_hostname="elsewhere", block_size="1MB", replicas=2) as fs,
    ):
        async with await fs.create("/f") as writer:
            await writer.write(content)
        located = await fs.locate("/f")
        assert [len(block.workers) for block in located.blocks] == [2, 2, 2]
        for hostname in (WORKER_HOSTNAME, "second-host"):
            async with open_filesystem(server.url, client_hostname=hostname) as near:
                async with await near.open("/f") as reader:
                    assert await reader.read_at(0, 10 * MIB) == content
                assert near.stats()["bytes_read_local"] == len(content)
        # One copy vanishes: the other one serves.
        for file in (Path(server.directory)).glob("data/*/active/*/*/blk_*"):
            file.unlink()
        async with await fs.open("/f") as reader:
            assert await reader.read_at(0, 10 * MIB) == content


@pytest.mark.parametrize("kind", [*range(1, 37), 10000, 4711])
async def test_an_error_reply_of_each_kind_is_typed(kind: int) -> None:
    master = Fake({RpcCode.FILE_STATUS: always(Refuse(kind, "made up"))})
    async with master.serving(), open_filesystem(master.url, retry_max="200ms", retry_min_sleep="10ms") as fs:
        with pytest.raises(RemoteError) as caught:
            await fs.stat("/f")
        assert "/f" in str(caught.value)
        assert caught.value.errno_
