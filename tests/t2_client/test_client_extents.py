"""Extents: block files lent to whoever moves the bytes, verified first (specification 4.12)."""

from __future__ import annotations

import gc
import os
from collections.abc import AsyncIterator, Callable
from functools import partial
from pathlib import Path

import pytest
import trio

from curvfs.api import CurvineFileSystem, LocalExtent, ReadExtents, RemoteExtent, open_filesystem
from curvfs.errors import CurvfsError, FileExists_, InvalidRequest, NotFound
from curvfs.server.service import Server, run_server
from curvfs.units import MIB
from tests.t2_client.conftest import WORKER_HOSTNAME, Target


@pytest.fixture
async def here(server: Server) -> AsyncIterator[CurvineFileSystem]:
    """A client on the worker's machine."""
    async with open_filesystem(server.url, client_hostname=WORKER_HOSTNAME, block_size="1MB") as client:
        yield client


async def put(fs: CurvineFileSystem, path: str, content: bytes) -> None:
    async with await fs.create(path) as writer:
        await writer.write(content)


def block_files(server: Server) -> list[Path]:
    return sorted(Path(server.directory).glob("data/*/active/*/*/blk_*"))


async def test_extents_cover_the_file(fs: CurvineFileSystem, target: Target) -> None:
    content = os.urandom(2 * MIB + 5)
    async with await fs.create("/f") as writer:
        await writer.write(content)
        await writer.write_at(b"!", 4 * MIB + 9)
    wanted = content + bytes(2 * MIB + 4) + b"!"
    async with await fs.open_extents("/f") as found:
        assert found.length_bytes == sum(extent.length_bytes for extent in found.extents) == len(wanted)
        position = 0
        for extent in found.extents:
            assert extent.file_offset_bytes == position
            position += extent.length_bytes
            if isinstance(extent, LocalExtent):
                part = os.pread(extent.fd, extent.length_bytes, 0).ljust(extent.length_bytes, b"\0")
                assert part == wanted[extent.file_offset_bytes : position]
            else:
                assert extent.reason in ("other_host", "hole", "not_granted")
        buffer = bytearray(len(wanted))
        assert await found.readinto(buffer, 0) == len(wanted)
        assert buffer == wanted
        assert not found.is_local  # there is a hole
        assert fs.hostname != target.hostname or isinstance(found.extents[0], LocalExtent)


async def test_direct_descriptors(here: CurvineFileSystem) -> None:
    await put(here, "/f", os.urandom(8192))
    async with await here.open_extents("/f", direct=True) as found:
        (extent,) = found.extents
        assert isinstance(extent, LocalExtent)
        if extent.direct:
            assert os.get_blocking(extent.fd) is not None
            import fcntl

            assert fcntl.fcntl(extent.fd, fcntl.F_GETFL) & os.O_DIRECT
        else:
            assert here.stats()["direct_io_refused"] == 1


async def test_descriptors_outlive_deletion(here: CurvineFileSystem) -> None:
    await put(here, "/f", b"still here")
    async with await here.open_extents("/f") as found:
        await here.delete("/f")
        await trio.sleep(0.2)
        (extent,) = found.extents
        assert isinstance(extent, LocalExtent)
        assert os.pread(extent.fd, 100, 0) == b"still here"
    with pytest.raises(OSError):
        os.fstat(extent.fd)
    await found.aclose()
    with pytest.raises(NotFound):
        await here.open_extents("/f")


async def test_many_at_once(here: CurvineFileSystem) -> None:
    await here.mkdir("/d")
    for index in range(10):
        await put(here, f"/f{index}", bytes([index]) * 100)
    located = await here.locate("/f3")
    found = await here.open_extents_many(["/f0", "/missing", located, "/d", "/f0"])
    opened = [entry for entry in found if isinstance(entry, ReadExtents)]
    assert [isinstance(entry, CurvfsError) for entry in found] == [False, True, False, True, False]
    first = [extent.fd for entry in opened for extent in entry.extents if isinstance(extent, LocalExtent)]
    assert len(set(first)) == 3  # descriptors are nobody else's, even for the same file
    assert [os.pread(fd, 1, 0) for fd in first] == [b"\0", b"\3", b"\0"]
    for entry in opened:
        await entry.aclose()
    assert await here.open_extents_many([]) == []


async def test_create_extent(fs: CurvineFileSystem, target: Target) -> None:
    content = os.urandom(3 * MIB + 4096)
    async with await fs.create_extent("/x", len(content), xattrs={"k": b"v"}, mode=0o640) as extent:
        assert extent.path == "/x"
        assert not (await fs.stat("/x")).is_complete
        if fs.hostname == target.hostname:
            assert extent.local is not None
            assert extent.remote_reason == ""
            os.pwrite(extent.local.fd, content, 0)
            with pytest.raises(InvalidRequest):
                await extent.write(b"x", 0)
        else:
            assert extent.local is None
            assert extent.remote_reason == "other_host"
            await extent.write(content[MIB:], MIB)
            await extent.write(memoryview(content)[:MIB], 0)
        status = await extent.commit()
    assert (status.length_bytes, status.is_complete, status.mode, status.xattrs) == (
        len(content),
        True,
        0o640,
        {"k": b"v"},
    )
    located = await fs.locate("/x")
    assert len(located.blocks) == 1
    assert located.status.block_size_bytes == 3 * MIB + 4096
    async with await fs.open("/x") as reader:
        assert await reader.read_at(0, len(content)) == content
    with pytest.raises(FileExists_):
        await fs.create_extent("/x", 10)
    with pytest.raises(CurvfsError):
        await extent.commit()
    assert await fs.exists("/x")


async def test_an_extent_not_committed_leaves_nothing(fs: CurvineFileSystem, target: Target) -> None:
    async with await fs.create_extent("/x", 100) as extent:
        local = extent.local
    assert not await fs.exists("/x")
    if local is not None:
        with pytest.raises(OSError):
            os.fstat(local.fd)
    await extent.abort()
    with pytest.raises(NotFound):
        await fs.create_extent("/missing/x", 100)
    with pytest.raises(InvalidRequest):
        await fs.create_extent("/x", -1)
    async with await fs.create_extent("/y/z", 0, parents=True) as empty:
        assert (empty.local, empty.remote_reason) == (None, "empty")
        assert (await empty.commit()).length_bytes == 0


async def test_a_short_extent_is_not_committed(fs: CurvineFileSystem) -> None:
    async with await fs.create_extent("/x", 8192) as extent:
        if extent.local is not None:
            os.pwrite(extent.local.fd, b"x" * 4096, 0)
        else:
            await extent.write(b"x" * 4096, 4096)
            with pytest.raises(InvalidRequest):
                await extent.write(b"x", 8192)
        with pytest.raises(InvalidRequest, match=r"Cannot commit"):
            await extent.commit()
    assert not await fs.exists("/x")


def _delete(path: Path) -> None:
    path.unlink()


def _symlink(path: Path) -> None:
    path.rename(path.with_name("elsewhere"))
    path.symlink_to("elsewhere")


def _truncate(path: Path) -> None:
    os.truncate(path, 10)


def _other_worker(path: Path) -> None:
    version = path.parents[3] / "version"
    lines = version.read_text().splitlines()
    version.write_text("\n".join("worker_id = 7" if line.startswith("worker_id") else line for line in lines))


def _no_version(path: Path) -> None:
    (path.parents[3] / "version").unlink()


def _garbage_version(path: Path) -> None:
    (path.parents[3] / "version").write_bytes(b"\xff\xfe not toml")


def _directory(path: Path) -> None:
    path.unlink()
    path.mkdir()


@pytest.mark.parametrize(
    ("spoil", "reason"),
    [
        (_symlink, "symlink"),
        (_other_worker, "other_worker"),
        (_no_version, "no_version_file"),
        (_garbage_version, "no_version_file"),
    ],
)
async def test_what_cannot_be_believed_is_read_over_the_wire(
    here: CurvineFileSystem, server: Server, spoil: Callable[[Path], None], reason: str
) -> None:
    content = os.urandom(MIB - 3)
    await put(here, "/f", content)
    (path,) = block_files(server)
    spoil(path)
    async with await here.open_extents("/f") as found:
        (extent,) = found.extents
        assert isinstance(extent, RemoteExtent)
        assert extent.reason == reason
        if reason != "symlink":
            buffer = bytearray(len(content))
            assert await found.readinto(buffer, 0) == len(content)
            assert buffer == content
    assert here.stats()[f"short_circuit_refused_{reason}"] >= 1


@pytest.mark.parametrize("spoil", [_delete, _truncate, _directory])
async def test_a_spoilt_block_file_is_never_read_as_data(
    here: CurvineFileSystem, server: Server, spoil: Callable[[Path], None]
) -> None:
    await put(here, "/f", os.urandom(MIB - 3))
    (path,) = block_files(server)
    spoil(path)
    async with await here.open_extents("/f") as found:
        assert isinstance(found.extents[0], RemoteExtent)
        with pytest.raises(CurvfsError):
            await found.readinto(bytearray(MIB), 0)
    async with await here.open("/f") as reader:
        with pytest.raises(CurvfsError):
            await reader.read_at(0, MIB)


async def test_two_clusters_on_one_machine_do_not_mix(here: CurvineFileSystem, tmp_path: Path) -> None:
    """Equal block ids, equal host names: each client reads its own cluster's file."""
    await put(here, "/f", b"the first cluster")
    async with trio.open_nursery() as nursery:
        second: Server = await nursery.start(
            partial(run_server, str(tmp_path / "second"), master_port=0, worker_port=0, hostname=WORKER_HOSTNAME)
        )
        async with open_filesystem(second.url, client_hostname=WORKER_HOSTNAME) as other:
            await put(other, "/f", b"and the second one")
            mine, theirs = await here.open_extents("/f"), await other.open_extents("/f")
            assert isinstance(mine.extents[0], LocalExtent)
            assert isinstance(theirs.extents[0], LocalExtent)
            assert mine.extents[0].block_id == theirs.extents[0].block_id
            assert os.pread(mine.extents[0].fd, 100, 0) == b"the first cluster"
            assert os.pread(theirs.extents[0].fd, 100, 0) == b"and the second one"
            await mine.aclose()
            await theirs.aclose()
        nursery.cancel_scope.cancel()


async def test_a_file_with_other_bytes_than_the_worker_sends(here: CurvineFileSystem, server: Server) -> None:
    """Everything looks right, and yet the directory is a copy, or another machine's."""
    await put(here, "/f", b"what the worker has" * 1000)
    await put(here, "/g", b"another block" * 1000)
    path = block_files(server)[0]
    wrong = path.with_name("wrong")
    wrong.write_bytes(bytes(len(path.read_bytes())))
    located = await here.locate("/f")
    async with await here.open(located) as reader:
        await reader.open_blocks()  # proven: this worker's files are believed from here on
    assert here.stats()["bytes_read_remote"] == 4096
    async with open_filesystem(server.url, client_hostname=WORKER_HOSTNAME) as other:
        original = other._session.local.open

        def open_wrong(name: str, *arguments: object, **options: object) -> object:
            file = original(name, *arguments, **options)  # type: ignore[arg-type]
            if name == str(path):
                with open(wrong, "rb") as content:
                    os.dup2(content.fileno(), file.fd)
            return file

        other._session.local.open = open_wrong  # type: ignore[assignment, method-assign]
        for name in ("/f", "/g"):
            async with await other.open_extents(name) as extents, await other.open(name) as reader:
                assert [extent.reason for extent in extents.extents] == ["other_bytes"]  # type: ignore[union-attr]
                assert (await reader.read_at(0, 13)) in (b"what the work", b"another block")
        assert other.stats()["short_circuit_refused_other_bytes"] == 1


async def test_short_circuit_can_be_switched_off(server: Server) -> None:
    async with open_filesystem(server.url, client_hostname=WORKER_HOSTNAME, short_circuit=False) as fs:
        await put(fs, "/f", b"content")
        async with await fs.open_extents("/f") as found:
            assert [extent.reason for extent in found.extents if isinstance(extent, RemoteExtent)] == ["off"]
        async with await fs.create_extent("/x", 7) as extent:
            assert extent.remote_reason == "off"


async def test_another_cluster_id_than_asked_for(server: Server) -> None:
    async with open_filesystem(server.url, client_hostname=WORKER_HOSTNAME, cluster_id="prod") as fs:
        await put(fs, "/f", b"content")
        async with await fs.open("/f") as reader:
            assert await reader.read_at(0, 10) == b"content"
        assert fs.stats()["short_circuit_refused_other_cluster"] == 2


async def test_a_local_file_that_cannot_be_opened_for_writing(here: CurvineFileSystem, server: Server) -> None:
    """The block is opened once more without short circuit, and written over the wire."""
    await put(here, "/f", b"a" * 1000)
    version = block_files(server)[0].parents[3] / "version"
    version.unlink()
    async with await here.create_extent("/x", 100) as extent:
        assert (extent.local, extent.remote_reason) == (None, "refused")
        await extent.write(b"y" * 100, 0)
        await extent.commit()
    async with await here.open_for_write("/f") as writer:
        await writer.write_at(b"b", 500)
    async with await here.open("/f") as reader:
        assert await reader.read_at(0, 2000) == b"a" * 500 + b"b" + b"a" * 499


async def test_descriptors_that_nobody_closed(here: CurvineFileSystem) -> None:
    """They are given back when the last reference goes."""
    await put(here, "/f", b"content")
    extents = await here.open_extents("/f")
    assert isinstance(extents.extents[0], LocalExtent)
    fds = [extents.extents[0].fd]
    del extents
    gc.collect()
    extent = await here.create_extent("/g", MIB)
    assert extent.local is not None
    fds.append(extent.local.fd)
    extent.__del__()
    await extent.abort()  # what it has besides, a connection, is given back as ever
    for fd in fds:
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(fd)
