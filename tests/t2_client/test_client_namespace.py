"""Names, listings, attributes: what the master keeps, and the hazards that never reach it."""

from __future__ import annotations

import errno
from functools import partial

import pytest
import trio

from curvfs.api import CurvineFileSystem, FileKind, FileLock, Located, LockKind, open_filesystem
from curvfs.errors import (
    CurvfsError,
    DirectoryNotEmpty,
    FileExists_,
    InvalidPath,
    InvalidRequest,
    IsADirectory,
    NameTooLong,
    NotADirectory,
    NotFound,
)
from tests.t2_client.conftest import Target


async def put(fs: CurvineFileSystem, path: str, content: bytes = b"x") -> None:
    async with await fs.create(path) as writer:
        await writer.write(content)


async def names(fs: CurvineFileSystem, path: str) -> list[str]:
    return [status.name for status in await fs.list(path)]


async def test_mkdir_and_stat(fs: CurvineFileSystem) -> None:
    made = await fs.mkdir("/a", mode=0o750, owner="me", group="us", xattrs={"user.k": b"\0v"})
    assert (made.path, made.name, made.kind, made.mode) == ("/a", "a", FileKind.DIRECTORY, 0o750)
    assert (made.owner, made.group, made.xattrs) == ("me", "us", {"user.k": b"\0v"})
    assert await fs.stat("//a/./") == made
    deep = await fs.mkdir("/a/b/c/d", parents=True)
    assert (await fs.stat("/a/b/c/d")).id == deep.id
    assert (await fs.mkdir("/a/b", parents=True)).is_dir
    with pytest.raises(FileExists_):
        await fs.mkdir("/a")
    with pytest.raises(NotFound):
        await fs.mkdir("/missing/b")
    assert (await fs.stat("/a")).children == 1
    root = await fs.stat("/")
    assert root.is_dir
    assert root.path == "/"


async def test_names_that_must_not_reach_the_master(fs: CurvineFileSystem) -> None:
    for bad in ("relative", "/a\0", "/\udcff"):
        with pytest.raises(InvalidPath):
            await fs.mkdir(bad)
    with pytest.raises(NameTooLong):
        await fs.create("/" + "n" * 256)
    await fs.mkdir("/d/..//e/./")
    assert await names(fs, "/") == ["e"]


async def test_exists_and_delete(fs: CurvineFileSystem) -> None:
    await fs.mkdir("/d")
    await put(fs, "/d/f")
    assert await fs.exists("/d/f")
    with pytest.raises(DirectoryNotEmpty):
        await fs.delete("/d")
    await fs.delete("/d", recursive=True)
    assert not await fs.exists("/d/f")
    with pytest.raises(NotFound):
        await fs.delete("/d")
    with pytest.raises(InvalidRequest) as caught:
        await fs.delete("/", recursive=True)
    assert caught.value.errno_ == errno.EBUSY


async def test_listing_in_pages(fs: CurvineFileSystem) -> None:
    await fs.mkdir("/many")
    wanted = [f"n{index:03}" for index in range(25)]
    async with trio.open_nursery() as nursery:
        for name in wanted:
            nursery.start_soon(fs.mkdir, f"/many/{name}")
    assert await names(fs, "/many") == wanted
    pages = [[entry.name for entry in page] async for page in fs.list_iter("/many", 10)]
    assert pages == [wanted[:10], wanted[10:20], wanted[20:]]
    assert [entry.name for entry in await fs.list("/many", start_after="n021")] == wanted[22:]
    assert [entry.name for entry in await fs.list("/many", limit=3)] == wanted[:3]
    assert await fs.list("/many", limit=0) == []
    assert (await fs.list("/many", limit=1))[0].path == "/many/n000"
    assert await fs.list("/many/n000") == []
    await put(fs, "/file")
    with pytest.raises(NotADirectory):
        await fs.list("/file")
    with pytest.raises(NotFound):
        await fs.list("/missing")


@pytest.mark.parametrize("name", ["a*", "a?c", "[ab]", "{x,y}", "back\\slash", "a[", "*"])
async def test_a_directory_whose_name_looks_like_a_pattern(fs: CurvineFileSystem, name: str) -> None:
    await fs.mkdir(f"/{name}")
    for decoy in ("/ab", "/abc", "/a", "/x"):
        await fs.mkdir(decoy)
        await fs.mkdir(f"{decoy}/decoy")
    for inner in ("p", "q", "z*"):
        await fs.mkdir(f"/{name}/{inner}")
    found = await fs.list(f"/{name}")
    assert [entry.name for entry in found] == ["p", "q", "z*"]
    assert [entry.path for entry in found] == [f"/{name}/{inner}" for inner in ("p", "q", "z*")]
    assert [entry.name for entry in await fs.list(f"/{name}", start_after="p", limit=1)] == ["q"]
    assert [len(page) async for page in fs.list_iter(f"/{name}", 2)] == [2, 1]
    assert await fs.list(f"/{name}/z*") == []


async def test_rename(fs: CurvineFileSystem) -> None:
    await put(fs, "/a", b"first")
    await put(fs, "/b", b"second")
    with pytest.raises(FileExists_):
        await fs.rename("/a", "/b", replace=False)
    await fs.rename("/a", "/b")
    async with await fs.open("/b") as reader:
        assert await reader.read_at(0, 100) == b"first"
    await fs.rename("/b", "/c", replace=False)
    assert await names(fs, "/") == ["c"]
    with pytest.raises(NotFound):
        await fs.rename("/missing", "/x")
    with pytest.raises(NotFound):
        await fs.rename("/c", "/missing/x")
    await fs.mkdir("/dir")
    with pytest.raises(IsADirectory):
        await fs.rename("/c", "/dir")
    with pytest.raises(NotADirectory):
        await fs.rename("/dir", "/c")
    with pytest.raises(InvalidRequest):
        await fs.rename("/dir", "/dir/inside")
    for src, dst in (("/", "/x"), ("/c", "/")):
        with pytest.raises(InvalidRequest):
            await fs.rename(src, dst)
    await fs.rename("/c", "/c")
    with pytest.raises(NotFound):
        await fs.rename("/missing", "/missing")


async def test_exchange(fs: CurvineFileSystem) -> None:
    await put(fs, "/a", b"A")
    await fs.mkdir("/d")
    before = (await fs.stat("/a")).id, (await fs.stat("/d")).id
    await fs.rename("/a", "/d", exchange=True)
    assert ((await fs.stat("/d")).id, (await fs.stat("/a")).id) == before
    with pytest.raises(NotFound):
        await fs.rename("/a", "/missing", exchange=True)


async def test_rename_below_a_file_keeps_the_source(fs: CurvineFileSystem) -> None:
    """Hazard 1: a server answers with an error and destroys the source."""
    await put(fs, "/file")
    await fs.mkdir("/tree/deep", parents=True)
    calls = fs.stats().get("master_calls", 0)
    with pytest.raises(NotADirectory) as caught:
        await fs.rename("/tree", "/file/tree")
    assert caught.value.errno_ == errno.ENOTDIR
    assert fs.stats()["master_calls"] - calls == 3  # it only looked
    assert await fs.exists("/tree/deep")


async def test_rename_onto_another_name_of_the_same_file_does_nothing(fs: CurvineFileSystem) -> None:
    """Hazard 6: a server drops one name and never frees the block."""
    await put(fs, "/a", b"shared")
    await fs.link("/a", "/b")
    await fs.rename("/a", "/b")
    assert await names(fs, "/") == ["a", "b"]
    assert (await fs.stat("/a")).nlink == 2
    with pytest.raises(FileExists_):
        await fs.rename("/a", "/b", replace=False)


async def test_links(fs: CurvineFileSystem) -> None:
    await put(fs, "/f", b"content")
    linked = await fs.link("/f", "/g")
    assert linked.nlink == 2
    assert linked.id == (await fs.stat("/f")).id
    await fs.delete("/f")
    async with await fs.open("/g") as reader:
        assert await reader.read_at(0, 10) == b"content"
    assert (await fs.stat("/g")).nlink == 1
    await fs.mkdir("/d")
    with pytest.raises(CurvfsError) as caught:
        await fs.link("/d", "/e")
    assert caught.value.errno_ == errno.EPERM
    with pytest.raises(FileExists_):
        await fs.link("/g", "/d")
    with pytest.raises(NotFound):  # the server would make /new, open to everybody
        await fs.link("/g", "/new/h")
    with pytest.raises(NotADirectory):
        await fs.link("/g", "/g/h")
    assert not await fs.exists("/new")


async def test_symlinks(fs: CurvineFileSystem) -> None:
    made = await fs.symlink("../any where", "/s", owner="o", group="g")
    assert (made.kind, made.symlink_target, made.owner, made.group) == (FileKind.SYMLINK, "../any where", "o", "g")
    with pytest.raises(FileExists_):
        await fs.symlink("other", "/s")
    assert (await fs.stat("/s")).symlink_target == "../any where"
    with pytest.raises(NotFound):
        await fs.symlink("t", "/missing/s")
    for call in (
        partial(fs.open_for_write, "/s"),
        partial(fs.truncate, "/s", 0),
        partial(fs.create, "/s", overwrite=True),
    ):  # hazard 2: these hang a master
        with pytest.raises(InvalidRequest) as caught:
            await call()
        assert caught.value.errno_ == errno.ELOOP


async def test_set_attr(fs: CurvineFileSystem) -> None:
    await put(fs, "/f")
    changed = await fs.set_attr(
        "/f", mode=0o100640, owner="o", group="g", mtime_ms=1_000, atime_ms=2_000, xattrs={"user.a": b"1", "b": b""}
    )
    assert (changed.mode, changed.owner, changed.group) == (0o640, "o", "g")
    assert (changed.mtime_ms, changed.atime_ms) == (1_000, 2_000)
    assert changed.xattrs == {"user.a": b"1", "b": b""}
    assert changed.ctime_ms > 1_000_000
    left = await fs.set_attr("/f", remove_xattrs=["user.a"])
    assert left.xattrs == {"b": b""}
    assert (left.mode, left.owner, left.mtime_ms) == (0o640, "o", 1_000)
    assert await fs.stat("/f") == left
    with pytest.raises(NotFound):
        await fs.set_attr("/missing", mode=0)


async def test_set_attr_recursive(fs: CurvineFileSystem) -> None:
    await fs.mkdir("/d/e", parents=True)
    await put(fs, "/d/e/f")
    await fs.set_attr("/d", owner="new", recursive=True)
    assert [(await fs.stat(path)).owner for path in ("/d", "/d/e", "/d/e/f")] == ["new"] * 3


async def test_opening_for_writing_and_closing_keeps_the_times(fs: CurvineFileSystem) -> None:
    await put(fs, "/f")
    await fs.set_attr("/f", mtime_ms=5_000, atime_ms=6_000)
    async with await fs.open_for_write("/f"):
        pass
    status = await fs.stat("/f")
    assert (status.mtime_ms, status.atime_ms, status.is_complete) == (5_000, 6_000, True)
    writer = await fs.open_for_write("/f")
    await writer.write(b"y")
    await writer.close(mtime_ms=7_000)
    assert (await fs.stat("/f")).mtime_ms == 7_000


async def test_locks(fs: CurvineFileSystem, target: Target) -> None:
    await put(fs, "/f")
    mine = FileLock(LockKind.WRITE, owner_id=1, start=0, end=99, pid=4)
    assert await fs.set_lock("/f", mine) is None
    async with open_filesystem(target.url) as other:
        conflict = await other.get_lock("/f", FileLock(LockKind.READ, owner_id=1, start=50, end=60))
        assert conflict is not None
        assert (conflict.client_id, conflict.pid, conflict.end) == (fs.client_name, 4, 99)
        assert await other.set_lock("/f", FileLock(LockKind.READ, owner_id=1, start=50, end=60)) == conflict
        assert await fs.set_lock("/f", FileLock(LockKind.UNLOCK, owner_id=1)) is None
        assert await other.set_lock("/f", FileLock(LockKind.READ, owner_id=1, start=50, end=60)) is None


async def test_statfs_and_mount_table(fs: CurvineFileSystem) -> None:
    info = await fs.statfs()
    assert info.capacity_bytes >= info.available_bytes > 0
    assert info.live_workers
    assert await fs.mount_table() == ()


async def test_locate_many_puts_failures_in_their_places(fs: CurvineFileSystem) -> None:
    await put(fs, "/f", b"12345")
    await fs.mkdir("/d")
    found = await fs.locate_many(["/f", "/missing", "/d", "relative", "/f"])
    assert isinstance(found[0], Located)
    assert found[0].status.length_bytes == 5
    assert found[4] == found[0]
    assert [type(entry) for entry in found[1:4]] == [NotFound, IsADirectory, InvalidPath]


async def test_errors_say_what_where_and_why(fs: CurvineFileSystem) -> None:
    with pytest.raises(NotFound, match=r"Cannot stat /curvfs-test-\w+/missing on [\w.]+:\d+: "):
        await fs.stat("/missing")


async def test_many_calls_at_once(fs: CurvineFileSystem) -> None:
    await put(fs, "/f")
    found = []

    async def look() -> None:
        found.append((await fs.stat("/f")).length_bytes)

    async with trio.open_nursery() as nursery:
        for _ in range(3000):
            nursery.start_soon(look)
    assert found == [1] * 3000


async def test_a_given_up_call_does_no_harm_to_others(fs: CurvineFileSystem) -> None:
    await put(fs, "/f")
    for _ in range(20):
        with trio.move_on_after(0):
            await fs.stat("/f")
        with trio.move_on_after(0.0005):
            await fs.stat("/f")
        assert (await fs.stat("/f")).length_bytes == 1
