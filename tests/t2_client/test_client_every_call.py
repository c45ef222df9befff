"""Every RPC code of the specification (section 2): a public call of the client that sends it, or the reason why not."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from curvfs.api import (
    CurvineFileSystem,
    FileLock,
    LoadJob,
    LockKind,
    MountOptions,
    NewExtent,
    NewFile,
    WriteExtent,
    open_filesystem,
)
from curvfs.errors import RemoteError
from curvfs.server.service import Server
from curvfs.units import MIB
from curvfs.wire.codes import RpcCode
from curvfs.world import World
from tests.t2_client.tap import Tap

Call = Callable[[CurvineFileSystem], Awaitable[Any]]

#: Not a client's: why.
NO_CLIENT_CALLS = {
    "a number that no request has": [RpcCode.UNDEFINED],
    "heartbeats use the status byte, and keep nothing alive": [RpcCode.HEARTBEAT],
    "no server has a handler for it": [
        RpcCode.APPEND_FILE,  # OpenFile appends
        RpcCode.LIST_LOCK,
        RpcCode.UPDATE_MOUNT,  # Mount with update
        RpcCode.REQUEST_REPLACEMENT_WORKER,
        RpcCode.REPORT_UNDER_REPLICATED_BLOCKS,
        RpcCode.WRITE_COMMITS_BATCH,
    ],
    "servers and other components call it": [
        RpcCode.GET_CV_METADATA_SNAPSHOT_PAGE,
        RpcCode.GET_CV_METADATA_DELTA_PAGE,
        RpcCode.REPORT_TASK,
        RpcCode.SUBMIT_TASK,
        RpcCode.WORKER_HEARTBEAT,
        RpcCode.WORKER_BLOCK_REPORT,
        RpcCode.SUBMIT_BLOCK_REPLICATION_JOB,
        RpcCode.REPORT_BLOCK_REPLICATION_RESULT,
    ],
    "it belongs to the transfer service, which is a server of its own": [
        RpcCode.SUBMIT_TRANSFER,
        RpcCode.GET_TRANSFER_STATUS,
        RpcCode.CANCEL_TRANSFER,
        RpcCode.REPORT_TRANSFER_TASK,
        RpcCode.QUERY_TRANSFER_TASK,
        RpcCode.WATCH_TRANSFER,
        RpcCode.LIST_TRANSFERS,
        RpcCode.LIST_TRANSFER_TENANTS,
        RpcCode.RETRY_TRANSFER,
    ],
}


async def put(fs: CurvineFileSystem, path: str = "/f", size: int = 3 * MIB) -> None:
    async with await fs.create(path, overwrite=True) as writer:
        await writer.write(bytes(size))


async def open_file(fs: CurvineFileSystem) -> None:
    await put(fs)
    async with await fs.open_for_write("/f", append=True) as writer:
        await writer.write(b"x")


async def read(fs: CurvineFileSystem) -> None:
    await put(fs)
    async with await fs.open("/f") as reader:
        assert len(await reader.read_at(0, 4 * MIB)) == 3 * MIB


async def rename(fs: CurvineFileSystem) -> None:
    await put(fs, "/a")
    await fs.rename("/a", "/b")


async def link(fs: CurvineFileSystem) -> None:
    await put(fs, "/a")
    await fs.link("/a", "/b")


async def resize(fs: CurvineFileSystem) -> None:
    await put(fs)
    await fs.truncate("/f", 5)


async def write_into_a_hole(fs: CurvineFileSystem) -> None:
    await put(fs, size=1)
    await fs.truncate("/f", 3 * MIB)
    async with await fs.open_for_write("/f") as writer:
        await writer.write_at(b"x", 2 * MIB)


async def lock(fs: CurvineFileSystem) -> None:
    await put(fs)
    async with fs.hold_lock("/f", FileLock(LockKind.WRITE, owner_id=1)):
        await fs.get_lock("/f", FileLock(LockKind.WRITE, owner_id=2))


async def extents(fs: CurvineFileSystem) -> None:
    made = await fs.create_extents_many([NewExtent("/a", 1), NewExtent("/b", 1)])
    ready = [extent for extent in made if isinstance(extent, WriteExtent)]
    for extent in ready:
        await extent.write(b"x", 0)
    await fs.commit_extents_many(ready)


async def free(fs: CurvineFileSystem) -> None:
    await put(fs)
    await fs.free("/f")


async def quoted_list(fs: CurvineFileSystem) -> None:
    await fs.mkdir("/a*b")
    await fs.list("/a*b")


async def report_metrics(fs: CurvineFileSystem) -> None:
    await fs._calls.report_metrics("test", fs.stats())  # the reporting task itself is tested with a fake


async def mount(fs: CurvineFileSystem) -> None:
    await fs.mkdir("/m")
    await fs.under_stores.mount("/m", "s3://bucket/x", MountOptions(cache_mode=False))


SMALL = [NewFile(f"/small{number}", b"x") for number in range(3)]

#: What sends each code; a refusal of the server's is fine.
CLIENT_CALLS: dict[RpcCode, Call] = {
    RpcCode.MKDIR: lambda fs: fs.mkdir("/d/e", parents=True),
    RpcCode.DELETE: lambda fs: fs.delete("/d", recursive=True),
    RpcCode.CREATE_FILE: put,
    RpcCode.OPEN_FILE: open_file,
    RpcCode.FILE_STATUS: lambda fs: fs.stat("/"),
    RpcCode.LIST_STATUS: quoted_list,
    RpcCode.EXISTS: lambda fs: fs.exists("/d"),
    RpcCode.RENAME: rename,
    RpcCode.ADD_BLOCK: put,
    RpcCode.COMPLETE_FILE: put,
    RpcCode.GET_BLOCK_LOCATIONS: read,
    RpcCode.GET_FILESYSTEM_INFO: lambda fs: fs.statfs(),
    RpcCode.SET_ATTR: lambda fs: fs.set_attr("/", mode=0o755),
    RpcCode.SYMLINK: lambda fs: fs.symlink("target", "/s"),
    RpcCode.LINK: link,
    RpcCode.RESIZE_FILE: resize,
    RpcCode.ASSIGN_WORKER: write_into_a_hole,
    RpcCode.GET_LOCK: lock,
    RpcCode.SET_LOCK: lock,
    RpcCode.CREATE_FILES_BATCH: extents,
    RpcCode.ADD_BLOCKS_BATCH: extents,
    RpcCode.COMPLETE_FILES_BATCH: extents,
    RpcCode.FREE: free,
    RpcCode.LIST_OPTIONS: lambda fs: fs.list("/"),
    RpcCode.MOUNT: mount,
    RpcCode.UNMOUNT: lambda fs: fs.under_stores.unmount("/m"),
    RpcCode.GET_MOUNT_TABLE: lambda fs: fs.under_stores.table(),
    RpcCode.GET_MOUNT_INFO: lambda fs: fs.under_stores.find("/d"),
    RpcCode.SUBMIT_JOB: lambda fs: fs.under_stores.submit_load(LoadJob("s3://bucket/x")),
    RpcCode.GET_JOB_STATUS: lambda fs: fs.under_stores.job_status("job_1"),
    RpcCode.CANCEL_JOB: lambda fs: fs.under_stores.cancel_job("job_1"),
    RpcCode.METRICS_REPORT: report_metrics,
    RpcCode.WRITE_BLOCK: put,
    RpcCode.READ_BLOCK: read,
    RpcCode.WRITE_BLOCKS_BATCH: lambda fs: fs.write_files(SMALL),
}
#: The client asks the mount table first, so an embedded server never hears of it: see test_client_understores.
ANSWERED_HERE = {RpcCode.UNMOUNT}


def test_every_code_is_either_sent_or_not_a_clients() -> None:
    others = [code for codes in NO_CLIENT_CALLS.values() for code in codes]
    assert sorted([*CLIENT_CALLS, *others]) == sorted(RpcCode)


@pytest.mark.parametrize("code", CLIENT_CALLS, ids=lambda code: code.wire_name)
async def test_a_public_call_sends_it(server: Server, code: RpcCode) -> None:
    tap = Tap()
    async with open_filesystem(server.url, world=World(net=tap), client_hostname="elsewhere", block_size="1MB") as fs:
        tap.sent.clear()
        try:
            await CLIENT_CALLS[code](fs)
        except RemoteError as error:
            assert "Cannot" in str(error)
        assert (code in tap.codes) != (code in ANSWERED_HERE)
