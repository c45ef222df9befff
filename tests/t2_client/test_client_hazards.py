"""The requests that lose data or hang a server (specification section 13): each is answered here, and none is sent.

What is asserted is what went over the wire to a real server, beside what the caller was told. The embedded server
refuses these requests, too (tests/conformance/test_hazards.py); a real one does not.
"""

from __future__ import annotations

import errno
import os
from collections.abc import AsyncIterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import trio

from curvfs.api import CurvineFileSystem, NewFile, StoragePolicy, TtlAction, open_filesystem
from curvfs.errors import CurvfsError, FileExists_, InvalidPath, NameTooLong
from curvfs.server.behaviour import BEHAVIOURS
from curvfs.server.service import Server, run_server
from curvfs.units import GIB, MIB
from curvfs.wire.codes import RequestStatus, RpcCode
from curvfs.wire.messages import pb
from curvfs.world import World
from tests.t2_client.conftest import WORKER_HOSTNAME
from tests.t2_client.fakes import Fake, always, status
from tests.t2_client.tap import Tap

CREATE_EXCLUSIVE = 0x80
CONTENT = os.urandom(2 * MIB + 99)


@pytest.fixture
def tap() -> Tap:
    return Tap()


@pytest.fixture(params=["head", "v0.3.2-alpha"])
async def fs(tmp_path: Path, tap: Tap, request: pytest.FixtureRequest) -> AsyncIterator[CurvineFileSystem]:
    async with trio.open_nursery() as nursery:
        server: Server = await nursery.start(
            partial(
                run_server,
                str(tmp_path / "pool"),
                master_port=0,
                worker_port=0,
                hostname=WORKER_HOSTNAME,
                behaviour=BEHAVIOURS[request.param],
            )
        )
        async with open_filesystem(
            server.url, world=World(net=tap), client_hostname="elsewhere", block_size="1MB"
        ) as client:
            yield client
        nursery.cancel_scope.cancel()


async def put(fs: CurvineFileSystem, path: str, content: bytes = CONTENT) -> None:
    async with await fs.create(path) as writer:
        await writer.write(content)


async def get(fs: CurvineFileSystem, path: str) -> bytes:
    async with await fs.open(path) as reader:
        return await reader.read_at(0, 10 * MIB)


async def refused(call: Any, number: int) -> None:
    with pytest.raises(CurvfsError) as caught:
        await call
    assert caught.value.errno_ == number, caught.value


async def test_1_a_rename_below_a_file(fs: CurvineFileSystem, tap: Tap) -> None:
    await put(fs, "/tree")
    await put(fs, "/file")
    for target in ("/file/x", "/file/deep/x"):
        await refused(fs.rename("/tree", target), errno.ENOTDIR if target == "/file/x" else errno.ENOENT)
        await refused(fs.rename("/tree", target, replace=False), errno.ENOTDIR if target == "/file/x" else errno.ENOENT)
    assert RpcCode.RENAME not in tap.codes
    assert await get(fs, "/tree") == CONTENT


async def test_2_writing_what_is_no_file(fs: CurvineFileSystem, tap: Tap) -> None:
    await fs.symlink("/nowhere", "/link")
    tap.sent.clear()
    for call in (
        fs.open_for_write("/link"),
        fs.open_for_write("/link", truncate=True),
        fs.open_for_write("/link", append=True),
        fs.create("/link", overwrite=True),
        fs.truncate("/link", 0),
        fs.truncate("/link", 100),
        fs.fallocate("/link", 0, 100),
    ):
        await refused(call, errno.ELOOP)
    for size in (4 * GIB, 8 * GIB, 0, 1):
        await refused(fs.create("/f", block_size_bytes=size), errno.EINVAL)
    await refused(fs.create_extent("/f", 4 * GIB), errno.EINVAL)
    assert not tap.codes & {RpcCode.OPEN_FILE, RpcCode.CREATE_FILE, RpcCode.CREATE_FILES_BATCH, RpcCode.RESIZE_FILE}


async def test_2_files_without_a_block_size() -> None:
    odd = status("/f", block_size=0)
    master = Fake({RpcCode.FILE_STATUS: always(pb.GetFileStatusResponse(status=odd))})
    async with master.serving(), open_filesystem(master.url) as fs:
        for call in (
            fs.open_for_write("/f"),
            fs.open_for_write("/f", truncate=True),
            fs.create("/f", overwrite=True),
            fs.truncate("/f", 1),
            fs.fallocate("/f", 0, 1),
        ):
            await refused(call, errno.EINVAL)
        assert not any(master.requests(code) for code in (RpcCode.OPEN_FILE, RpcCode.CREATE_FILE, RpcCode.RESIZE_FILE))


async def test_3_every_commit_names_where_it_was_written(fs: CurvineFileSystem, tap: Tap) -> None:
    await put(fs, "/f")
    async with await fs.open_for_write("/f") as writer:
        await writer.write_at(b"x" * MIB, MIB // 2)
    await fs.truncate("/f", 5 * MIB)
    await fs.truncate("/f", MIB + 5)
    async with await fs.create_extent("/x", 10) as extent:
        await extent.write(b"x" * 10, 0)
        await extent.commit()
    await fs.write_files([NewFile("/a", b"1"), NewFile("/b", b"2")])
    completes = tap.messages(RpcCode.COMPLETE_FILE)
    completes += [each for message in tap.messages(RpcCode.COMPLETE_FILES_BATCH) for each in message.requests]
    commits = [commit for message in [*completes, *tap.messages(RpcCode.ADD_BLOCK)] for commit in message.commit_blocks]
    assert len(commits) >= 8
    (worker,) = (await fs.statfs()).live_workers
    for commit in commits:
        assert [location.worker_id for location in commit.locations] == [worker.address.worker_id]
        # ... and that block was completed there, with that length.
        assert commit.block_id in completed(tap)


def completed(tap: Tap) -> set[int]:
    done = {message.block.id for message in tap.messages(RpcCode.WRITE_BLOCK, RequestStatus.COMPLETE)}
    for message in tap.messages(RpcCode.WRITE_BLOCKS_BATCH, RequestStatus.COMPLETE):
        done.update(block.id for block in message.blocks)
    return done


async def test_4_resizes_have_the_one_mode_that_does_no_harm(fs: CurvineFileSystem, tap: Tap) -> None:
    await put(fs, "/f")
    await fs.fallocate("/f", 0, 10)  # shorter than the file: the master is not even asked
    assert RpcCode.RESIZE_FILE not in tap.codes
    lengths = [len(CONTENT)]
    for length in (3 * MIB, MIB, 0, 2 * MIB):
        await fs.truncate("/f", length)
        lengths.append(length)
    await fs.fallocate("/f", MIB, 3 * MIB)
    async with await fs.open_for_write("/f") as writer:
        await writer.write_at(b"end", 6 * MIB)
    options = [message.opts for message in tap.messages(RpcCode.RESIZE_FILE)]
    assert len(options) >= 6
    assert {(each.mode, each.off) for each in options} == {(0, 0)}
    assert [each.len for each in options if not each.truncate] == [4 * MIB]


async def test_5_a_cut_is_told_to_the_worker_before_the_next_resize(fs: CurvineFileSystem, tap: Tap) -> None:
    await put(fs, "/f")
    tap.sent.clear()
    await fs.truncate("/f", MIB + 7)
    await fs.truncate("/f", 2 * MIB)
    assert await get(fs, "/f") == CONTENT[: MIB + 7].ljust(2 * MIB, b"\0")
    codes = [(frame.code, frame.status) for frame in tap.sent]
    first = codes.index((RpcCode.RESIZE_FILE, RequestStatus.RPC))
    second = codes.index((RpcCode.RESIZE_FILE, RequestStatus.RPC), first + 1)
    between = [frame for frame in tap.sent[first:second] if frame.code is RpcCode.WRITE_BLOCK]
    (opened,) = (frame.message for frame in between if frame.status is RequestStatus.OPEN)
    assert (opened.block.alloc_opts.len, opened.off) == (7, 0)
    assert [frame.message.block.block_size for frame in between if frame.status is RequestStatus.COMPLETE] == [7]
    assert (RpcCode.COMPLETE_FILE, RequestStatus.RPC) in codes[first:second]


async def test_6_a_rename_onto_another_link_of_the_file(fs: CurvineFileSystem, tap: Tap) -> None:
    await put(fs, "/a")
    await fs.link("/a", "/b")
    for replace in (True, False):
        if replace:
            await fs.rename("/a", "/b")  # as rename(2): nothing
        else:
            await refused(fs.rename("/a", "/b", replace=False), errno.EEXIST)
    await fs.rename("/a", "/b", exchange=True)
    assert RpcCode.RENAME not in tap.codes
    assert (await fs.stat("/a")).nlink == (await fs.stat("/b")).nlink == 2


async def test_7_names_are_made_exclusively(fs: CurvineFileSystem, tap: Tap) -> None:
    """Two writers of one name would share a block: the second is told, and writes nothing."""
    writer = await fs.create("/f")
    for call in (fs.create("/f"), fs.create_extent("/f", 10)):
        with pytest.raises(FileExists_):
            await call
    (failure, other) = await fs.write_files([NewFile("/f", b"x"), NewFile("/g", b"x")])
    assert isinstance(failure, FileExists_) and not isinstance(other, CurvfsError)
    await writer.write(CONTENT)
    await writer.close()
    assert await get(fs, "/f") == CONTENT
    made = tap.messages(RpcCode.CREATE_FILE)
    made += [each for message in tap.messages(RpcCode.CREATE_FILES_BATCH) for each in message.requests]
    assert len(made) >= 4 and all(message.flags & CREATE_EXCLUSIVE for message in made)


async def test_8_paths_that_nobody_could_reach(fs: CurvineFileSystem, tap: Tap) -> None:
    await fs.mkdir("/d//./x/../y/", parents=True)
    await put(fs, "/d/../d/y/./f", b"abc")
    for path in ("relative", "", "/nul\0", "/\udcff", "/" + "x" * 256, "/" + "é" * 128):
        for call in (fs.mkdir(path), fs.stat(path), fs.create(path), fs.rename("/d", path), fs.symlink("t", path)):
            with pytest.raises(InvalidPath) as caught:
                await call
            assert isinstance(caught.value, NameTooLong) == (len(path) > 100)
    sent = {
        value
        for frame in tap.sent
        if frame.message is not None
        for field, value in frame.message.ListFields()
        if field.name in ("path", "src", "dst", "link", "src_path", "dst_path", "cv_path")
    }
    assert "/d/y/f" in sent
    assert all(path == os.path.normpath(path) and path.startswith("/") for path in sent), sent


async def test_9_no_file_is_marked_as_an_under_stores(fs: CurvineFileSystem, tap: Tap) -> None:
    policy = StoragePolicy(ttl_ms=10**9, ttl_action=TtlAction.DELETE)
    async with await fs.create("/f", policy=policy) as writer:
        await writer.write(b"x")
        await writer.close(mtime_ms=10**12, atime_ms=10**12)
    await fs.mkdir("/d", policy=policy)
    everything: dict[str, Any] = {
        "mode": 0o600,
        "owner": "o",
        "group": "g",
        "atime_ms": 1,
        "mtime_ms": 2,
        "ttl_ms": 3 * 10**9,
        "ttl_action": TtlAction.FREE,
        "xattrs": {"user.a": b"b"},
        "remove_xattrs": ["user.c"],
    }
    await fs.set_attr("/f", **everything)
    await fs.set_attr("/d", **everything, recursive=True)
    options = [message.opts for message in tap.messages(RpcCode.SET_ATTR)]
    options += [
        message.set_attr_opts for message in tap.messages(RpcCode.COMPLETE_FILE) if message.HasField("set_attr_opts")
    ]
    assert len(options) >= 2 and not any(each.HasField("ufs_mtime") for each in options)
    policies = [
        message.opts.storage_policy for code in (RpcCode.CREATE_FILE, RpcCode.MKDIR) for message in tap.messages(code)
    ]
    assert policies and all(each.ufs_mtime == 0 for each in policies)


async def test_10_committed_blocks_are_never_cancelled(fs: CurvineFileSystem, tap: Tap) -> None:
    """Not when a rewrite is given up, nor when its stream broke; on v0.3.2-alpha that would delete the block."""
    await put(fs, "/f")
    committed = {block.block_id for block in (await fs.locate("/f")).blocks}
    tap.sent.clear()
    writer = await fs.open_for_write("/f")
    await writer.write_at(b"x" * 1000, 5)
    await writer.abort()
    with pytest.raises(ZeroDivisionError):
        async with await fs.open_for_write("/f") as writer:
            await writer.write_at(b"y" * 1000, MIB)
            raise ZeroDivisionError
    with pytest.raises(ZeroDivisionError):  # what was never committed is cancelled
        async with await fs.create("/new") as writer:
            await writer.write(b"x" * 1000)
            raise ZeroDivisionError
    cancelled = [message.block.id for message in tap.messages(RpcCode.WRITE_BLOCK, RequestStatus.CANCEL)]
    assert cancelled and not committed & set(cancelled)
    assert len(await get(fs, "/f")) == len(CONTENT)
