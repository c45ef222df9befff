"""Mounts of under stores and load jobs: what the master is asked, and what is refused before it is (3.6, 3.8, 4.19)."""

from __future__ import annotations

import errno
import struct
from typing import Any

import pytest
import trio

from curvfs.api import (
    JobState,
    LoadJob,
    MountOptions,
    StorageType,
    SyncFileSystem,
    TtlAction,
    open_filesystem,
)
from curvfs.client.convert import load_command
from curvfs.errors import InvalidRequest, NotFound, RemoteError, Unsupported
from curvfs.server.service import Server
from curvfs.wire.codes import RpcCode
from curvfs.wire.messages import pb
from tests.t2_client.fakes import Close, Fake, Refuse, always, once

JOB_NOT_FOUND = 23


class Store:
    """A master with a mount table."""

    def __init__(self) -> None:
        self.table: dict[str, pb.MountInfoProto] = {}
        self.fake = Fake(
            {
                RpcCode.GET_MOUNT_TABLE: lambda request, message: pb.GetMountTableResponse(
                    mount_table=self.table.values()
                ),
                RpcCode.GET_MOUNT_INFO: self._info,
                RpcCode.MOUNT: self._mount,
                RpcCode.UNMOUNT: self._unmount,
            }
        )
        #: Do what is asked, then close the connection instead of answering, once.
        self.lose_answer = False

    def _info(self, request: Any, message: Any) -> Any:
        found = [info for path, info in self.table.items() if (message.path + "/").startswith(path + "/")]
        return pb.GetMountInfoResponse(mount_info=found[0] if found else None)

    def _mount(self, request: Any, message: Any) -> Any:
        options = message.mount_options
        if message.cv_path in self.table and not options.update:
            raise Refuse(10000, f"{message.cv_path} is already mounted")
        self.table[message.cv_path] = pb.MountInfoProto(
            cv_path=message.cv_path,
            ufs_path=message.ufs_path,
            mount_id=len(self.table) + 1,
            write_type=options.write_type,
            access_mode=options.access_mode,
            properties=dict(options.add_properties),
        )
        return self._answer(pb.MountResponse())

    def _unmount(self, request: Any, message: Any) -> Any:
        if self.table.pop(message.cv_path, None) is None:
            raise Refuse(10000, f"{message.cv_path} is not mounted")
        return self._answer(pb.UnMountResponse())

    def _answer(self, answer: Any) -> Any:
        if self.lose_answer:
            self.lose_answer = False
            raise Close()
        return answer


FS_MODE = MountOptions(cache_mode=False, read_only=False, properties={"s3.secret": "hush"})


async def test_mount_look_update_unmount() -> None:
    store = Store()
    async with store.fake.serving(), open_filesystem(f"{store.fake.url}root") as fs:
        stores = fs.under_stores
        made = await stores.mount("/m", "s3://bucket/x", FS_MODE)
        assert (made.path, made.ufs_path, made.cache_mode, made.read_only) == ("/root/m", "s3://bucket/x", False, False)
        assert made.properties == {"s3.secret": "hush"} and "hush" not in repr(made) + repr(FS_MODE)
        (asked,) = store.fake.messages(RpcCode.MOUNT)
        options: Any = asked.mount_options  # type: ignore[attr-defined]
        assert (options.update, options.write_type) == (False, pb.WRITE_TYPE_PROTO_FS_MODE)
        assert not any(options.HasField(name) for name in ("ttl_ms", "replicas", "auto_cache", "storage_type"))
        assert await stores.table() == (made,)
        assert await stores.find("/m/deep/file") == made
        assert await stores.find("/elsewhere") is None
        # What it allows holds at once: its own directory stays, and renames do not cross its edge.
        with pytest.raises(RemoteError) as caught:
            await fs.delete("/m", recursive=True)
        assert caught.value.errno_ == errno.EBUSY
        updated = await stores.mount("/m", "s3://bucket/x", MountOptions(cache_mode=True), update=True)
        assert updated.cache_mode
        with pytest.raises(Unsupported) as refused:
            await fs.stat("/m/file")
        assert refused.value.errno_ == errno.EOPNOTSUPP
        await stores.unmount("/m")
        assert await stores.table() == ()
        with pytest.raises(NotFound):
            await stores.unmount("/m")


@pytest.mark.parametrize("path", ["/m", "/m/inside", "/"])
async def test_mounts_do_not_nest(path: str) -> None:
    store = Store()
    async with store.fake.serving(), open_filesystem(store.fake.url) as fs:
        await fs.under_stores.mount("/m", "s3://bucket/x", FS_MODE)
        with pytest.raises(InvalidRequest):
            await fs.under_stores.mount(path, "s3://other", FS_MODE)
        if path == "/m/inside":
            await fs.under_stores.unmount("/m")
            await fs.under_stores.mount("/m/inside", "s3://bucket/x", FS_MODE)
            with pytest.raises(InvalidRequest, match="do not nest") as caught:
                await fs.under_stores.mount("/m", "s3://other", FS_MODE)
            assert caught.value.errno_ == errno.EBUSY
        assert len(store.table) == 1


@pytest.mark.parametrize("url", ["/local/path", "bucket", "s3:/bucket", "s3://", ""])
async def test_what_is_no_under_store(url: str) -> None:
    store = Store()
    async with store.fake.serving(), open_filesystem(store.fake.url) as fs:
        with pytest.raises(InvalidRequest, match="s3://bucket"):
            await fs.under_stores.mount("/m", url, FS_MODE)
        with pytest.raises(InvalidRequest, match="s3://bucket"):
            await fs.under_stores.submit_load(LoadJob(url))
        assert not store.fake.requests(RpcCode.MOUNT) and not store.fake.requests(RpcCode.SUBMIT_JOB)


async def test_answers_that_are_lost() -> None:
    """Mount and UnMount are executed again when they are repeated (4.2): what they find then is their own work."""
    store = Store()
    async with store.fake.serving(), open_filesystem(store.fake.url, retry_min_sleep="10ms") as fs:
        store.lose_answer = True
        assert (await fs.under_stores.mount("/m", "s3://bucket/x", FS_MODE)).path == "/m"
        assert len(store.fake.requests(RpcCode.MOUNT)) == 2
        store.lose_answer = True
        await fs.under_stores.unmount("/m")
        assert len(store.fake.requests(RpcCode.UNMOUNT)) == 2
        store.fake.handle[RpcCode.MOUNT] = once(Close(), then=Refuse(10000, "no such bucket"))
        with pytest.raises(RemoteError, match="no such bucket"):
            await fs.under_stores.mount("/m", "s3://bucket/x", FS_MODE)


def test_a_load_command_is_bincode() -> None:
    source = "s3://b/é"
    assert load_command(LoadJob(source)) == struct.pack("<Q", 9) + source.encode() + bytes(7)
    full = LoadJob(source, "/t", 2, 1 << 20, StorageType.SSD, 5, TtlAction.DELETE, True)
    expected = struct.pack("<Q", 9) + source.encode() + b"\1" + struct.pack("<Q", 2) + b"/t"
    expected += struct.pack("<BiBqBIBqBIBB", 1, 2, 1, 1 << 20, 1, 1, 1, 5, 1, 1, 1, 1)
    assert load_command(full) == expected


async def test_jobs() -> None:
    progress = pb.JobTaskProgressProto(loaded_size=5, total_size=9, update_time=7, state=2, message="on it")
    seen = pb.GetJobStatusResponse(
        job_id="job_1", state=pb.LOADING, source_path="s3://b/x", target_path="/x", progress=progress
    )
    master = Fake(
        {
            RpcCode.SUBMIT_JOB: always(pb.SubmitJobResponse(job_id="job_1", target_path="/x", state=pb.PENDING)),
            RpcCode.GET_JOB_STATUS: once(seen, then=Refuse(JOB_NOT_FOUND, "Job job_1 not found")),
            RpcCode.CANCEL_JOB: once(pb.CancelJobResponse(), then=Refuse(JOB_NOT_FOUND)),
        }
    )
    async with master.serving(), open_filesystem(master.url) as fs:
        job = await fs.under_stores.submit_load(LoadJob("s3://b/x", replicas=2))
        assert (job.job_id, job.state, job.target_path) == ("job_1", JobState.PENDING, "/x")
        (asked,) = master.messages(RpcCode.SUBMIT_JOB)
        assert asked.job_type == pb.LOAD  # type: ignore[attr-defined]
        status = await fs.under_stores.job_status("job_1", verbose=True)
        assert (status.state, status.loaded_bytes, status.total_bytes, status.message) == (
            JobState.LOADING,
            5,
            9,
            "on it",
        )
        await fs.under_stores.cancel_job("job_1")
        for call in (fs.under_stores.job_status, fs.under_stores.cancel_job):
            with pytest.raises(RemoteError, match="job_1") as caught:
                await call("job_1")
            assert caught.value.kind == JOB_NOT_FOUND


async def test_a_server_without_under_stores(server: Server) -> None:
    """The embedded server has none, and says so; blocking calls, too."""

    def use() -> None:
        with SyncFileSystem.connect(server.url) as fs:
            stores = fs.under_stores
            fs.mkdir("/m")
            for call in (
                lambda: stores.mount("/m", "s3://user:hush@bucket/x", FS_MODE),
                lambda: stores.submit_load(LoadJob("s3://user:hush@bucket/x")),
            ):
                with pytest.raises(Unsupported, match="no under stores") as caught:
                    call()
                assert "hush" not in str(caught.value)
            with pytest.raises(NotFound):
                stores.unmount("/m")
            assert stores.table() == () and stores.find("/m") is None
            for missing in (stores.job_status, stores.cancel_job):
                with pytest.raises(RemoteError) as unknown:
                    missing("job_1")
                assert unknown.value.kind == JOB_NOT_FOUND

    await trio.to_thread.run_sync(use)
