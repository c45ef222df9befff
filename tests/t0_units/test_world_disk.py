"""What the real and the simulated disk must both do."""

from __future__ import annotations

import array
import errno
import os
import stat
from collections.abc import Callable
from pathlib import Path

import pytest

from curvfs.world import NO_LINKS, RealDisk, World
from tests.t0_units.conftest import Play
from tests.t0_units.worlds import Stage, aligned

RW = os.O_RDWR


def errno_of(function: Callable[..., object], *args: object) -> str:
    """The name of the errno that the call fails with."""
    with pytest.raises(OSError) as caught:
        function(*args)
    assert caught.value.errno is not None
    return errno.errorcode[caught.value.errno]


def _scene(stage: Stage) -> None:
    """A file, a directory with something in it, an empty one, and a symbolic link to the file."""
    stage.file("file", b"content")
    stage.world.disk.mkdir(stage.path("full"))
    stage.file("full/inner", b"inner")
    stage.world.disk.mkdir(stage.path("empty"))
    if isinstance(stage.world.disk, type(World.real().disk)):
        os.symlink("file", stage.path("link"))
    else:
        stage.world.disk.symlink("file", stage.path("link"))  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("name", "flags", "expected"),
    [
        ("none", os.O_RDONLY, "ENOENT"),
        ("none/x", os.O_RDONLY | os.O_CREAT, "ENOENT"),
        ("none", RW, "ENOENT"),
        ("file", RW | os.O_CREAT | os.O_EXCL, "EEXIST"),
        ("link", RW | os.O_CREAT | os.O_EXCL, "EEXIST"),
        ("full", RW | os.O_CREAT | os.O_EXCL, "EEXIST"),
        ("file/x", os.O_RDONLY, "ENOTDIR"),
        ("file/", os.O_RDONLY, "ENOTDIR"),
        ("file", os.O_RDONLY | os.O_DIRECTORY, "ENOTDIR"),
        ("full", RW, "EISDIR"),
        ("full", os.O_WRONLY, "EISDIR"),
        ("full", os.O_RDONLY | os.O_CREAT, "EISDIR"),
        ("new/", RW | os.O_CREAT, "EISDIR"),
        ("link", os.O_RDONLY | os.O_NOFOLLOW, "ELOOP"),
        ("n" * 256, RW | os.O_CREAT, "ENAMETOOLONG"),
        ("ä" * 128, RW | os.O_CREAT, "ENAMETOOLONG"),
        ("", os.O_WRONLY, "EISDIR"),
    ],
)
def test_open_is_refused_with_the_errno_of_linux(play: Play, name: str, flags: int, expected: str) -> None:
    async def main(stage: Stage) -> None:
        _scene(stage)
        assert errno_of(stage.world.disk.open, stage.path(name), flags) == expected

    play(main)


def test_open_flags_create_truncate_append_and_follow(play: Play) -> None:
    async def main(stage: Stage) -> None:
        _scene(stage)
        disk = stage.world.disk
        fd = disk.open(stage.path("new"), RW | os.O_CREAT | os.O_EXCL, 0o640)
        assert stat.S_IMODE(disk.fstat(fd).st_mode) == 0o640
        assert disk.fstat(fd).st_size == 0
        disk.close(fd)
        disk.close(disk.open(stage.path("file"), RW | os.O_CREAT))
        assert disk.read_file(stage.path("link")) == b"content"
        fd = disk.open(stage.path("file"), os.O_WRONLY | os.O_APPEND)
        disk.pwritev(fd, [b"!"], 0)  # Linux appends wherever it is told to write
        disk.close(fd)
        assert disk.read_file(stage.path("file")) == b"content!"
        disk.close(disk.open(stage.path("link"), os.O_WRONLY | os.O_TRUNC))
        assert disk.stat(stage.path("file")).st_size == 0

    play(main)


def test_a_descriptor_is_good_for_what_it_was_opened_for(play: Play) -> None:
    async def main(stage: Stage) -> None:
        _scene(stage)
        disk = stage.world.disk
        reader, writer = disk.open(stage.path("file"), os.O_RDONLY), disk.open(stage.path("file"), os.O_WRONLY)
        directory = disk.open(stage.path("full"), os.O_RDONLY | os.O_DIRECTORY)
        assert errno_of(disk.pwritev, reader, [b"x"], 0) == "EBADF"
        assert errno_of(disk.preadv, writer, [bytearray(1)], 0) == "EBADF"
        assert errno_of(disk.preadv, directory, [bytearray(1)], 0) == "EISDIR"
        assert errno_of(disk.ftruncate, reader, 0) == "EINVAL"
        assert errno_of(disk.ftruncate, writer, -1) == "EINVAL"
        assert errno_of(disk.preadv, reader, [bytearray(1)], -2) == "EINVAL"
        assert errno_of(disk.pwritev, writer, [b"x"], -2) == "EINVAL"
        for fd in (reader, writer, directory):
            disk.close(fd)
        for call in (disk.close, disk.fstat, disk.fsync, disk.fdatasync, disk.lock):
            assert errno_of(call, reader) == "EBADF"
        assert errno_of(disk.preadv, reader, [bytearray(1)], 0) == "EBADF"
        assert errno_of(disk.pwritev, writer, [b"x"], 0) == "EBADF"

    play(main)


def test_vectors_are_filled_and_emptied_in_order(play: Play) -> None:
    async def main(stage: Stage) -> None:
        disk = stage.world.disk
        fd = disk.open(stage.path("f"), RW | os.O_CREAT)
        assert disk.pwritev(fd, [b"abc", b"", bytearray(b"de"), memoryview(array.array("i", [1, 2]))], 5) == 13
        assert disk.fstat(fd).st_size == 18
        pieces = [bytearray(4), bytearray(0), bytearray(4), bytearray(20)]
        assert disk.preadv(fd, pieces, 1) == 17
        assert pieces[0] + pieces[2] == b"\0\0\0\0abcd"
        assert pieces[3] == b"e" + array.array("i", [1, 2]).tobytes() + bytes(11)
        assert disk.preadv(fd, [bytearray(3)], 18) == 0
        assert disk.preadv(fd, [bytearray(3)], 1000) == 0
        assert disk.preadv(fd, [bytearray(3)], 16) == 2
        disk.close(fd)

    play(main)


def test_full_reads_and_writes_take_items_of_any_size(play: Play) -> None:
    async def main(stage: Stage) -> None:
        disk = stage.world.disk
        fd = disk.open(stage.path("f"), RW | os.O_CREAT)
        numbers = array.array("q", range(10_000))
        disk.pwrite_full(fd, memoryview(numbers), 3)
        again = array.array("q", bytes(80_000))
        assert disk.pread_full(fd, memoryview(again), 3) == 80_000
        assert again == numbers
        assert disk.pread_full(fd, memoryview(again), 80_000) == 3
        disk.close(fd)

    play(main)


def test_truncation_cuts_and_extends_with_zeros(play: Play) -> None:
    async def main(stage: Stage) -> None:
        disk = stage.world.disk
        fd = disk.open(stage.path("f"), RW | os.O_CREAT)
        disk.pwrite_full(fd, b"x" * 10_000, 0)
        disk.ftruncate(fd, 5000)
        disk.ftruncate(fd, 9000)
        content = bytearray(10_000)
        assert disk.pread_full(fd, memoryview(content), 0) == 9000
        assert content[:9000] == b"x" * 5000 + bytes(4000)
        disk.close(fd)

    play(main)


@pytest.mark.parametrize(
    ("source", "target", "expected"),
    [
        ("none", "x", "ENOENT"),
        ("file", "none/x", "ENOENT"),
        ("file", "file/x", "ENOTDIR"),
        ("file", "empty", "EISDIR"),
        ("file", "full", "EISDIR"),
        ("empty", "file", "ENOTDIR"),
        ("empty", "full", "ENOTEMPTY"),
        ("full", "full/sub", "EINVAL"),
        ("file", "new/", "ENOTDIR"),
        ("file", "n" * 256, "ENAMETOOLONG"),
    ],
)
def test_rename_is_refused_with_the_errno_of_linux(play: Play, source: str, target: str, expected: str) -> None:
    async def main(stage: Stage) -> None:
        _scene(stage)
        assert errno_of(stage.world.disk.rename, stage.path(source), stage.path(target)) == expected

    play(main)


def test_rename_replaces_and_leaves_open_files_alone(play: Play) -> None:
    async def main(stage: Stage) -> None:
        _scene(stage)
        disk = stage.world.disk
        old = disk.open(stage.path("full/inner"), os.O_RDONLY)
        disk.rename(stage.path("file"), stage.path("full/inner"))
        assert disk.read_file(stage.path("full/inner")) == b"content"
        assert not disk.exists(stage.path("file"))
        content = bytearray(5)
        disk.pread_full(old, memoryview(content), 0)
        assert content == b"inner"
        assert disk.fstat(old).st_nlink == 0
        disk.close(old)
        disk.rename(stage.path("full"), stage.path("empty"))
        assert disk.listdir(stage.path("empty")) == ["inner"]
        disk.rename(stage.path("link"), stage.path("link2"))
        assert stat.S_ISLNK(disk.stat(stage.path("link2"), follow_symlinks=False).st_mode)

    play(main)


def test_rename_noreplace_takes_only_a_free_name(play: Play) -> None:
    async def main(stage: Stage) -> None:
        _scene(stage)
        disk = stage.world.disk
        for taken in ("full/inner", "empty", "link"):
            assert errno_of(disk.rename_noreplace, stage.path("file"), stage.path(taken)) == "EEXIST"
        assert errno_of(disk.rename_noreplace, stage.path("none"), stage.path("x")) == "ENOENT"
        assert errno_of(disk.rename_noreplace, stage.path("file"), stage.path("none/x")) == "ENOENT"
        disk.rename_noreplace(stage.path("file"), stage.path("full/new"))
        assert disk.read_file(stage.path("full/new")) == b"content"
        assert disk.stat(stage.path("full/new")).st_nlink == 1
        assert not disk.exists(stage.path("file"))

    play(main)


def test_nothing_is_reached_by_links_where_none_are_wanted(tmp_path: Path) -> None:
    disk = RealDisk()
    (tmp_path / "real" / "below").mkdir(parents=True)
    (tmp_path / "link").symlink_to("real")
    (tmp_path / "real" / "file").write_bytes(b"content")
    (tmp_path / "real" / "other").symlink_to("file")
    try:
        fd = disk.open(f"{tmp_path}/real/file", os.O_RDONLY | NO_LINKS)
    except OSError as error:
        pytest.skip(f"this kernel does not open without links ({error})")
    content = bytearray(7)
    assert disk.pread_full(fd, memoryview(content), 0) == 7
    assert content == b"content"
    assert not os.get_inheritable(fd)
    disk.close(fd)
    for name, wanted in (("link/file", "ELOOP"), ("real/other", "ELOOP"), ("real/none", "ENOENT")):
        assert errno_of(disk.open, f"{tmp_path}/{name}", os.O_RDONLY | NO_LINKS) == wanted
    directory = disk.open(f"{tmp_path}/real/below", os.O_PATH | os.O_DIRECTORY | NO_LINKS)
    (tmp_path / "real" / "below").rename(tmp_path / "elsewhere")  # the descriptor leads to it all the same
    disk.rename_into(directory, f"{tmp_path}/real/file", "new")
    assert (tmp_path / "elsewhere" / "new").read_bytes() == b"content"
    assert errno_of(disk.rename_into, directory, f"{tmp_path}/real/other", "new") == "EEXIST"
    disk._renameat2 = None
    assert errno_of(disk.rename_into, directory, f"{tmp_path}/real/other", "new") == "EEXIST"
    disk.rename_into(directory, f"{tmp_path}/real/other", "linked")
    assert (tmp_path / "elsewhere" / "linked").is_symlink()
    disk.close(directory)


def test_hard_links_share_one_file(play: Play) -> None:
    async def main(stage: Stage) -> None:
        _scene(stage)
        disk = stage.world.disk
        one, other = stage.path("file"), stage.path("other")
        disk.link(one, other)
        assert disk.stat(one).st_ino == disk.stat(other).st_ino
        assert disk.stat(one).st_nlink == 2
        disk.rename(one, other)  # the same file: nothing happens
        assert disk.exists(one)
        disk.unlink(one)
        assert (disk.read_file(other), disk.stat(other).st_nlink) == (b"content", 1)
        assert errno_of(disk.link, stage.path("none"), stage.path("x")) == "ENOENT"
        assert errno_of(disk.link, other, stage.path("empty")) == "EEXIST"
        assert errno_of(disk.link, stage.path("empty"), stage.path("x")) == "EPERM"
        assert errno_of(disk.link, other, stage.path("none/x")) == "ENOENT"

    play(main)


def test_names_are_made_listed_and_removed(play: Play) -> None:
    async def main(stage: Stage) -> None:
        _scene(stage)
        disk = stage.world.disk
        assert sorted(disk.listdir(stage.root)) == ["empty", "file", "full", "link"]
        assert errno_of(disk.listdir, stage.path("file")) == "ENOTDIR"
        assert errno_of(disk.listdir, stage.path("none")) == "ENOENT"
        assert errno_of(disk.mkdir, stage.path("file")) == "EEXIST"
        assert errno_of(disk.mkdir, stage.path("none/x")) == "ENOENT"
        assert errno_of(disk.mkdir, stage.path("file/x")) == "ENOTDIR"
        assert errno_of(disk.rmdir, stage.path("file")) == "ENOTDIR"
        assert errno_of(disk.rmdir, stage.path("full")) == "ENOTEMPTY"
        assert errno_of(disk.rmdir, stage.path("none")) == "ENOENT"
        assert errno_of(disk.unlink, stage.path("full")) == "EISDIR"
        assert errno_of(disk.unlink, stage.path("none")) == "ENOENT"
        assert errno_of(disk.stat, stage.path("none")) == "ENOENT"
        assert errno_of(disk.stat, stage.path("file/x")) == "ENOTDIR"
        assert errno_of(disk.statvfs, stage.path("none")) == "ENOENT"
        assert disk.stat(stage.root).st_nlink == 4
        disk.rmdir(stage.path("empty"))
        disk.unlink(stage.path("link"))
        disk.unlink(stage.path("full/inner"))
        assert sorted(disk.listdir(stage.root)) == ["file", "full"]
        assert disk.stat(stage.path("full/../file")).st_size == 7
        with pytest.raises(ValueError, match="null"):
            disk.open(stage.path("a\0b"), os.O_RDONLY)

    play(main)


def test_makedirs_takes_what_is_there_but_no_file_for_a_directory(play: Play) -> None:
    async def main(stage: Stage) -> None:
        _scene(stage)
        disk = stage.world.disk
        disk.makedirs(stage.path("a/b/c"), 0o755)
        disk.makedirs(stage.path("a/b/c/"))
        assert disk.listdir(stage.path("a/b")) == ["c"]
        assert errno_of(disk.makedirs, stage.path("file")) == "EEXIST"
        assert errno_of(disk.makedirs, stage.path("file/x/y")) == "ENOTDIR"

    play(main)


def test_exists_sees_dangling_links_and_nothing_below_files(play: Play) -> None:
    async def main(stage: Stage) -> None:
        _scene(stage)
        disk = stage.world.disk
        disk.unlink(stage.path("file"))
        assert disk.exists(stage.path("link"))
        assert not disk.exists(stage.path("none"))
        stage.file("file")
        assert not disk.exists(stage.path("file/x"))

    play(main)


def test_write_file_replaces_whole_and_leaves_no_staging_behind(play: Play) -> None:
    async def main(stage: Stage) -> None:
        disk = stage.world.disk
        disk.write_file(stage.path("f"), b"one", 0o640)
        disk.write_file(stage.path("f"), b"second", durable=True)
        assert disk.read_file(stage.path("f")) == b"second"
        assert errno_of(disk.write_file, stage.path("none/f"), b"x") == "ENOENT"
        disk.mkdir(stage.path("d"))
        assert errno_of(disk.write_file, stage.path("d"), b"x") == "EISDIR"
        stage.file("f.0.tmp", b"somebody else's")
        disk.write_file(stage.path("f"), b"third")
        assert sorted(disk.listdir(stage.root)) == ["d", "f", "f.0.tmp"]
        assert disk.read_file(stage.path("f.0.tmp")) == b"somebody else's"

    play(main)


def test_locks_belong_to_open_files(play: Play) -> None:
    async def main(stage: Stage) -> None:
        disk = stage.world.disk
        path = stage.file("lock")
        one, other, third = (disk.open(path, os.O_RDONLY) for _ in range(3))
        assert disk.lock(one)
        assert not disk.lock(other)
        assert not disk.lock(other, shared=True)
        assert disk.lock(one, shared=True)  # gives way to other readers
        assert disk.lock(other, shared=True)
        assert not disk.lock(third)
        assert not disk.lock(one)
        disk.close(other)
        disk.close(one)
        assert disk.lock(third)
        disk.close(third)

    play(main)


def test_direct_io_wants_its_alignment(play: Play) -> None:
    async def main(stage: Stage) -> None:
        disk = stage.world.disk
        fd = disk.open(stage.path("f"), RW | os.O_CREAT)
        direct = disk.direct_io(fd)
        disk.close(fd)
        if not direct.offset_alignment_bytes:
            pytest.skip("the file system of the test directory does not tell about direct I/O")
        fd = disk.open(stage.path("f"), RW | os.O_DIRECT)
        memory = aligned(1 << 16)
        step = direct.offset_alignment_bytes
        memory[:step] = b"a" * step
        assert disk.pwritev(fd, [memory[:step], memory[:step]], step) == 2 * step
        assert errno_of(disk.pwritev, fd, [memory[: step - 1]], 0) == "EINVAL"
        assert errno_of(disk.pwritev, fd, [memory[:step]], 1) == "EINVAL"
        assert errno_of(disk.preadv, fd, [memory[:step]], 1) == "EINVAL"
        disk.ftruncate(fd, 3 * step - 7)
        memory[:] = bytes(len(memory))
        assert disk.preadv(fd, [memory[: 4 * step]], 0) == 3 * step - 7
        assert bytes(memory[: 4 * step]) == bytes(step) + b"a" * (2 * step - 7) + bytes(step + 7)
        disk.close(fd)

    play(main)


def test_stat_tells_kinds_times_and_blocks(play: Play) -> None:
    async def main(stage: Stage) -> None:
        _scene(stage)
        disk, clock = stage.world.disk, stage.world.clock
        status = disk.stat(stage.path("file"))
        assert stat.S_ISREG(status.st_mode)
        assert status.st_size == 7
        assert status.st_blocks in range(1, 129)
        assert status.st_mtime_ns // 1_000_000_000 == int(status.st_mtime)
        assert abs(status.st_mtime - clock.time_ms() / 1000) < 10
        assert stat.S_ISDIR(disk.stat(stage.path("full")).st_mode)
        assert stat.S_ISLNK(disk.stat(stage.path("link"), follow_symlinks=False).st_mode)
        assert disk.stat(stage.path("link")).st_ino == status.st_ino
        await clock.sleep(0.02)
        disk.utime_now(stage.path("file"))
        assert disk.stat(stage.path("file")).st_mtime_ns > status.st_mtime_ns
        space = disk.statvfs(stage.root)
        assert space.f_frsize * space.f_blocks >= space.f_frsize * space.f_bavail > 0

    play(main)


def test_syncing_files_and_directories_is_allowed(play: Play) -> None:
    async def main(stage: Stage) -> None:
        _scene(stage)
        disk = stage.world.disk
        for name, flags in (("file", os.O_WRONLY), ("file", os.O_RDONLY), ("full", os.O_RDONLY | os.O_DIRECTORY)):
            fd = disk.open(stage.path(name), flags)
            disk.fdatasync(fd)
            disk.fsync(fd)
            disk.close(fd)

    play(main)
