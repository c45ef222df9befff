"""Errno by errno on a real mount: attributes, permissions, removed files and directories, limits, counts."""

from __future__ import annotations

import ctypes
import errno
import json
import os
import shutil
import stat
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import pytest

from tests.t4_mount.mounts import Mount, curvfs, mounted, refused, wait_for

_LIBC = ctypes.CDLL(None, use_errno=True)
_NOREPLACE, _EXCHANGE, _WHITEOUT = 1, 2, 4
_FOLLOW = 0x400
SOMEBODY, OTHERS = 54321, 54322


def _call(function: str, *arguments: object) -> int:
    """The result of a function of the C library; raises OSError."""
    found = int(getattr(_LIBC, function)(*arguments))
    if found < 0:
        raise OSError(ctypes.get_errno(), function)
    return found


def _rename(directory: int, old: str, new: str, flags: int) -> None:
    _call("renameat2", directory, old.encode(), directory, new.encode(), flags)


@contextmanager
def opened(path: Path, flags: int = os.O_RDONLY) -> Iterator[int]:
    fd = os.open(path, flags, 0o644)
    try:
        yield fd
    finally:
        os.close(fd)


@contextmanager
def acting_as(uid: int, gid: int) -> Iterator[None]:
    """File system calls of this thread are those of an ordinary user, without the rights of root over files."""
    _LIBC.setfsgid(gid)
    _LIBC.setfsuid(uid)
    try:
        yield
    finally:
        _LIBC.setfsuid(0)
        _LIBC.setfsgid(0)


# ------------------------------------------------------------------------------------------------ extended attributes


def test_sizes_of_attributes(place: Path) -> None:
    path = place / "a"
    path.touch()
    os.setxattr(path, "user.big", b"x" * 65536)
    assert os.getxattr(path, "user.big") == b"x" * 65536
    refused(errno.E2BIG, lambda: os.setxattr(path, "user.big", b"x" * 65537))
    os.setxattr(path, "user." + "n" * 250, b"")
    assert os.getxattr(path, "user." + "n" * 250) == b""
    refused(errno.ERANGE, lambda: os.setxattr(path, "user." + "n" * 251, b""))
    buffer = ctypes.create_string_buffer(100)
    raw = os.fsencode(path)
    refused(errno.ERANGE, lambda: _call("getxattr", raw, b"user.big", buffer, 100))
    refused(errno.ERANGE, lambda: _call("listxattr", raw, buffer, 100))
    assert _call("getxattr", raw, b"user.big", None, 0) == 65536
    assert _call("listxattr", raw, None, 0) == len("user.big") + 1 + 255 + 1
    for index in range(260):
        os.setxattr(path, f"user.{index:03}" + "m" * 247, b"")
    refused(errno.E2BIG, lambda: os.listxattr(path))


def test_name_spaces_of_attributes(place: Path) -> None:
    path = place / "a"
    path.touch()
    for name in ("user.a", "trusted.a", "security.a"):
        os.setxattr(path, name, b"1")
        assert os.getxattr(path, name) == b"1"
    refused(errno.EOPNOTSUPP, lambda: os.setxattr(path, "nowhere", b"1"))
    refused(errno.EOPNOTSUPP, lambda: os.setxattr(path, "elsewhere.a", b"1"))
    refused(errno.EINVAL, lambda: os.setxattr(path, "user.", b"1"))
    refused(errno.EOPNOTSUPP, lambda: os.setxattr(path, "curvine.i_flags", b"1"))
    for call in (os.getxattr, os.removexattr):
        refused(errno.ENODATA, lambda call=call: call(path, "user.absent"))  # type: ignore[misc]
        refused(errno.EOPNOTSUPP, lambda call=call: call(path, "nowhere"))  # type: ignore[misc]
        refused(errno.EOPNOTSUPP, lambda call=call: call(path, "system.none"))  # type: ignore[misc]
        refused(errno.EINVAL, lambda call=call: call(path, "user."))  # type: ignore[misc]
    (place / "link").symlink_to("a")
    refused(errno.EPERM, lambda: os.setxattr(place / "link", "user.a", b"1", follow_symlinks=False))
    os.mkfifo(place / "fifo")
    refused(errno.EPERM, lambda: os.setxattr(place / "fifo", "user.a", b"1"))
    os.setxattr(place, "user.of-a-directory", b"1")
    os.rename(path, place / "b")
    os.link(place / "b", place / "c")
    assert os.getxattr(place / "c", "user.a") == b"1"
    assert os.listxattr(place) == ["user.of-a-directory"]


# ----------------------------------------------------------------------------------------------------- permissions


def test_what_an_ordinary_user_may_do(place: Path) -> None:
    """As on a local file system: the kernel checks modes and owners (default_permissions)."""
    (place / "roots").write_text("secret")
    (place / "roots").chmod(0o640)
    (place / "closed").mkdir(mode=0o700)
    (place / "open").mkdir()
    (place / "open").chmod(0o1777)
    (place / "open" / "roots").touch()
    with opened(place) as at, opened(place / "open") as within, acting_as(SOMEBODY, SOMEBODY):
        refused(errno.EACCES, lambda: os.open("roots", os.O_RDONLY, dir_fd=at))
        refused(errno.EACCES, lambda: os.open("roots", os.O_WRONLY, dir_fd=at))
        refused(errno.EPERM, lambda: os.chmod("roots", 0o666, dir_fd=at))
        refused(errno.EPERM, lambda: os.chown("roots", SOMEBODY, -1, dir_fd=at))
        refused(errno.EPERM, lambda: os.utime("roots", (1, 1), dir_fd=at))
        refused(errno.EACCES, lambda: os.unlink("roots", dir_fd=at))
        refused(errno.EACCES, lambda: os.mkdir("new", dir_fd=at))
        refused(errno.EACCES, lambda: os.open("new", os.O_CREAT | os.O_WRONLY, dir_fd=at))
        refused(errno.EACCES, lambda: os.rename("roots", "mine", src_dir_fd=at, dst_dir_fd=at))
        refused(errno.EACCES, lambda: os.stat("closed/any", dir_fd=at))
        refused(errno.EPERM, lambda: os.unlink("roots", dir_fd=within))  # sticky
        refused(errno.EPERM, lambda: os.mknod("disk", stat.S_IFBLK | 0o600, 0, dir_fd=within))
        os.close(os.open("mine", os.O_CREAT | os.O_WRONLY, 0o600, dir_fd=within))
        os.chmod("mine", 0o644, dir_fd=within)
        refused(errno.EPERM, lambda: os.chown("mine", 0, -1, dir_fd=within))
        refused(errno.EPERM, lambda: os.chown("mine", -1, OTHERS, dir_fd=within))
        os.utime("mine", (1, 1), dir_fd=within)
        found = os.stat("mine", dir_fd=within)
        assert (found.st_uid, found.st_gid, stat.S_IMODE(found.st_mode)) == (SOMEBODY, SOMEBODY, 0o644)
    with opened(place / "open") as within, acting_as(OTHERS, OTHERS):
        os.close(os.open("mine", os.O_RDONLY, dir_fd=within))
        refused(errno.EACCES, lambda: os.open("mine", os.O_RDWR, dir_fd=within))
        refused(errno.EACCES, lambda: os.utime("mine", dir_fd=within))


def test_bits_that_go_with_a_new_owner_or_a_write(place: Path) -> None:
    path = place / "a"
    path.touch()
    path.chmod(0o6755)
    with opened(place) as at, acting_as(SOMEBODY, SOMEBODY):
        refused(errno.EACCES, lambda: os.open("a", os.O_WRONLY, dir_fd=at))
    os.chown(path, SOMEBODY, SOMEBODY)
    assert stat.S_IMODE(path.stat().st_mode) == 0o755
    path.chmod(0o4777)
    with opened(place) as at, acting_as(OTHERS, OTHERS):
        fd = os.open("a", os.O_WRONLY, dir_fd=at)
        os.write(fd, b"x")
        os.close(fd)
    assert stat.S_IMODE(path.stat().st_mode) == 0o777


def test_bits_that_go_with_a_truncating_open(place: Path, kv: Path) -> None:
    """The kernel leaves these to the daemon."""
    for directory in (place, kv):
        path = directory / "program"
        for mode, left in ((0o6777, 0o777), (0o2767, 0o2767), (0o777, 0o777)):
            path.touch()
            with opened(directory) as at:
                path.chmod(mode)
                os.close(os.open(path, os.O_WRONLY | os.O_TRUNC))
                assert path.stat().st_mode & 0o7777 == mode  # root keeps them
                with acting_as(SOMEBODY, SOMEBODY):
                    os.close(os.open("program", os.O_WRONLY | os.O_TRUNC, dir_fd=at))
            assert path.stat().st_mode & 0o7777 == left


def test_the_group_of_a_directory_with_setgid(place: Path) -> None:
    os.chown(place, 0, OTHERS)
    place.chmod(0o2755)
    (place / "file").touch()
    (place / "directory").mkdir()
    assert (place / "file").stat().st_gid == (place / "directory").stat().st_gid == OTHERS
    assert (place / "directory").stat().st_mode & stat.S_ISGID


# ---------------------------------------------------------------------------------------------- names that went away


def test_how_many_names_a_removed_file_has(place: Path) -> None:
    for name, flags in (("read", os.O_RDONLY), ("written", os.O_RDWR)):
        (place / name).write_text("content")
        with opened(place / name, flags) as fd:
            os.link(place / name, place / "second")
            assert os.fstat(fd).st_nlink == 2
            (place / name).unlink()
            assert os.fstat(fd).st_nlink == (place / "second").stat().st_nlink == 1
            (place / "second").unlink()
            assert os.fstat(fd).st_nlink == 0
            os.fchmod(fd, 0o600)
            os.setxattr(fd, "user.late", b"1")
            assert os.getxattr(fd, "user.late") == b"1"
            assert (os.fstat(fd).st_nlink, stat.S_IMODE(os.fstat(fd).st_mode)) == (0, 0o600)
            assert os.pread(fd, 10, 0) == b"content"
            source, target = os.fsencode(f"/proc/self/fd/{fd}"), os.fsencode(place / "again")
            refused(errno.ENOENT, partial(_call, "linkat", -100, source, -100, target, _FOLLOW))
    with opened(place / "new", os.O_CREAT | os.O_RDWR) as fd:
        (place / "other").touch()
        os.rename(place / "other", place / "new")
        assert os.fstat(fd).st_nlink == 0
    (place / "d").mkdir()
    with opened(place / "d") as fd:
        (place / "d").rmdir()
        assert os.fstat(fd).st_nlink == 0
        assert os.listdir(fd) == []
        refused(errno.ENOENT, lambda: os.open("x", os.O_CREAT | os.O_WRONLY, dir_fd=fd))
        refused(errno.ENOENT, lambda: os.mkdir("x", dir_fd=fd))


def test_removed_while_only_descriptors_lead_to_it(place: Path) -> None:
    """The kernel opens these without the daemon: a FIFO, what O_PATH opens, a working directory."""
    os.mkfifo(place / "fifo")
    (place / "file").write_bytes(b"content")
    (place / "d").mkdir()
    with (
        opened(place / "fifo", os.O_RDWR | os.O_NONBLOCK) as fifo,
        opened(place / "file", os.O_PATH) as file,
        opened(place / "d", os.O_PATH) as directory,
    ):
        os.unlink(place / "fifo")
        os.unlink(place / "file")
        os.rmdir(place / "d")
        time.sleep(1.1)  # what the kernel was told is not believed any longer
        os.fchmod(fifo, 0o600)
        os.utime(fifo, (5, 5))
        found = os.fstat(fifo)
        assert (found.st_nlink, found.st_mode, found.st_mtime) == (0, stat.S_IFIFO | 0o600, 5)
        assert (os.fstat(file).st_nlink, os.fstat(file).st_size) == (0, 7)
        assert os.fstat(directory).st_nlink == 0
        refused(errno.ENOENT, lambda: os.open("x", os.O_CREAT | os.O_WRONLY, dir_fd=directory))


def test_written_after_one_of_its_names_went_to_another(place: Path) -> None:
    """A writer goes on under the name that is left, whichever it knew."""
    for number, way in enumerate((os.rename, os.unlink)):
        for gone, left in (("first", "second"), ("second", "first")):
            directory = place / f"{number}-{gone}"
            directory.mkdir()
            with opened(directory / "first", os.O_RDWR | os.O_CREAT) as fd:
                os.link(directory / "first", directory / "second")
                os.write(fd, b"before")
                if way is os.unlink:
                    os.unlink(directory / gone)
                    os.mkfifo(directory / gone)
                else:
                    (directory / "other").write_bytes(b"the other's")
                    os.rename(directory / "other", directory / gone)
                os.ftruncate(fd, 3)
                os.pwrite(fd, b"after", 3)
                os.fsync(fd)
            assert (directory / left).read_bytes() == b"befafter"
            if way is os.rename:
                assert (directory / gone).read_bytes() == b"the other's"
            else:
                assert stat.S_ISFIFO((directory / gone).stat().st_mode)


def test_a_directory_takes_the_place_of_an_empty_one_that_is_open(place: Path) -> None:
    (place / "full").mkdir()
    (place / "full" / "file").touch()
    (place / "empty").mkdir()
    with opened(place / "empty") as fd:
        os.listdir(fd)
        os.rename(place / "full", place / "empty")
        assert os.listdir(place / "empty") == ["file"]
        assert os.fstat(fd).st_nlink == 0


def test_what_is_left_of_two_names_has_changed(place: Path) -> None:
    """POSIX: removing a name changes the file's status; Curvine's Delete and Rename leave it alone."""
    for name in ("a", "b", "other"):
        (place / name).touch()
    os.link(place / "a", place / "a2")
    os.link(place / "b", place / "b2")
    before = [(place / name).stat().st_ctime_ns for name in ("a2", "b2")]
    time.sleep(0.02)
    (place / "a").unlink()
    os.rename(place / "other", place / "b")
    after = [(place / name).stat().st_ctime_ns for name in ("a2", "b2")]
    assert all(late > early for early, late in zip(before, after, strict=True))
    assert [(place / name).stat().st_nlink for name in ("a2", "b2")] == [1, 1]


def test_rename_flags_and_kinds(place: Path) -> None:
    (place / "f").write_text("f")
    (place / "g").write_text("g")
    (place / "d" / "e").mkdir(parents=True)
    (place / "empty").mkdir()
    with opened(place) as at:
        refused(errno.EEXIST, lambda: _rename(at, "f", "g", _NOREPLACE))
        refused(errno.EEXIST, lambda: _rename(at, "f", "d", _NOREPLACE))
        refused(errno.EINVAL, lambda: _rename(at, "f", "h", _WHITEOUT))
        refused(errno.EINVAL, lambda: _rename(at, "f", "g", _NOREPLACE | _EXCHANGE))
        refused(errno.ENOENT, lambda: _rename(at, "f", "none", _EXCHANGE))
        refused(errno.ENOENT, lambda: _rename(at, "none", "f", _NOREPLACE))
        refused(errno.ENOTEMPTY, lambda: _rename(at, "empty", "d", 0))
        refused(errno.ENOTDIR, lambda: _rename(at, "d", "f", 0))
        refused(errno.EISDIR, lambda: _rename(at, "f", "empty", 0))
        refused(errno.EINVAL, lambda: _rename(at, "d", "d/e/x", 0))
        _rename(at, "d", "empty", 0)
        _rename(at, "f", "empty", _EXCHANGE)
        assert (place / "empty").read_text() == "f"
        assert os.listdir(place / "f") == ["e"]
        _rename(at, "g", "h", _NOREPLACE)
        os.link(place / "h", place / "i")
        _rename(at, "h", "i", 0)  # two names of one file: nothing happens
    assert sorted(os.listdir(place)) == ["empty", "f", "h", "i"]


# ---------------------------------------------------------------------------------------------------------- limits


def test_lengths_of_links_paths_and_files(place: Path) -> None:
    os.symlink("t" * 4095, place / "long")
    assert os.readlink(place / "long") == "t" * 4095
    assert (place / "long").lstat().st_size == 4095
    refused(errno.ENAMETOOLONG, lambda: os.symlink("t" * 4096, place / "longer"))
    refused(errno.ENOENT, lambda: os.symlink("", place / "empty"))
    refused(errno.ELOOP, lambda: (place / "self").symlink_to("self") or os.stat(place / "self"))  # type: ignore[func-returns-value]
    refused(errno.EINVAL, lambda: os.readlink(place))
    path = place / "a"
    path.write_text("content")
    refused(errno.EINVAL, lambda: os.truncate(path, -1))
    refused(errno.EFBIG, lambda: os.truncate(path, 2**50 + 1))
    refused(errno.EISDIR, lambda: os.truncate(place, 0))
    with opened(path) as fd:
        refused(errno.EBADF, lambda: os.write(fd, b"x"))
        refused(errno.EINVAL, lambda: os.ftruncate(fd, 0))
    with opened(path, os.O_WRONLY) as fd:
        refused(errno.EBADF, lambda: os.read(fd, 1))
    assert path.read_text() == "content"


def test_appending_from_several_descriptors(place: Path) -> None:
    fds = [os.open(place / "log", os.O_WRONLY | os.O_CREAT | os.O_APPEND) for _ in range(4)]
    expected = b""
    for number in range(80):
        line = f"{number:03} {'x' * (number * 7 % 90)}\n".encode()
        assert os.write(fds[number % 4], line) == len(line)
        expected += line
    os.pwrite(fds[0], b"appended all the same\n", 0)
    for fd in fds:
        os.close(fd)
    assert (place / "log").read_bytes() == expected + b"appended all the same\n"


def test_times_of_every_kind(place: Path) -> None:
    """What is set stays, through writes that are closed later, and is exact to the millisecond."""
    now, omit = (1 << 30) - 1, (1 << 30) - 2

    class Timespec(ctypes.Structure):
        _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))

    path = place / "a"
    with opened(path, os.O_CREAT | os.O_WRONLY) as fd:
        os.write(fd, b"x" * 5000)
        os.utime(fd, ns=(3_000_000_000, 4_567_000_000))
        found = os.fstat(fd)
        assert (found.st_atime_ns, found.st_mtime_ns) == (3_000_000_000, 4_567_000_000)
    assert path.stat().st_mtime_ns == 4_567_000_000
    raw = os.fsencode(path)
    _call("utimensat", -100, raw, (Timespec * 2)(Timespec(0, omit), Timespec(9, 0)), 0)
    assert (path.stat().st_atime_ns, path.stat().st_mtime_ns) == (3_000_000_000, 9_000_000_000)
    _call("utimensat", -100, raw, (Timespec * 2)(Timespec(0, now), Timespec(0, omit)), 0)
    assert abs(path.stat().st_atime - time.time()) < 10
    assert path.stat().st_mtime_ns == 9_000_000_000
    with opened(path, os.O_WRONLY) as fd:
        os.write(fd, b"y")
    assert abs(path.stat().st_mtime - time.time()) < 10
    (place / "link").symlink_to("a")
    os.utime(place / "link", ns=(5_000_000_000, 6_000_000_000), follow_symlinks=False)
    assert (place / "link").lstat().st_mtime_ns == 6_000_000_000
    before = place.stat().st_mtime_ns
    time.sleep(1.1)
    (place / "b").touch()
    assert place.stat().st_mtime_ns > before


def test_files_come_and_go_in_statfs(place: Path, mount: Mount) -> None:
    """Numbers of the pool, in which files are counted."""

    def free_files() -> int:
        return os.statvfs(mount.path).f_ffree

    before, found = -1, free_files()
    while before != found:  # what the tests before have left is still being tidied up
        time.sleep(2.2)
        before, found = found, free_files()
    for index in range(25):
        (place / f"n{index}").touch()
    wait_for(lambda: free_files() == before - 25, 5.0, "the count of files")
    shutil.rmtree(place)
    wait_for(lambda: free_files() > before - 25, 5.0, "the count of files")


def test_exact_counts_of_what_the_kernel_knows(place: Path, mount: Mount) -> None:
    """Looked up, listed, linked, renamed, replaced and removed in every mix: nothing stays behind when all are gone."""
    stats = mount.path / ".curvfs" / "stats.json"

    def nodes() -> int:
        return int(json.loads(stats.read_bytes())["nodes"])

    before = nodes()
    for index in range(30):
        path = place / f"n{index}"
        path.write_bytes(b"x")
        path.stat()
        if index % 2:
            os.link(path, place / f"l{index}")
        if index % 3 == 0:
            path.rename(place / f"n{index + 1000}")
        if index % 5 == 0 and index:
            os.replace(place / f"n{index - 1 + (1000 if (index - 1) % 3 == 0 else 0)}", place / f"new{index}")
        (place / f"d{index}").mkdir()
        os.listdir(place)
        [entry.stat() for entry in os.scandir(place / f"d{index}")]
    assert nodes() > before + 30
    with opened(place / "new5") as fd:
        shutil.rmtree(place)
        assert os.pread(fd, 10, 0) == b"x"
        wait_for(lambda: nodes() <= before + 1, 10.0, "a table with what is open")
    wait_for(lambda: nodes() < before, 10.0, "an empty table")  # the directory itself is gone, too


# ----------------------------------------------------------------------------------------------------- cache times


def test_cache_times_are_options(tmp_path: Path) -> None:
    """With zeros the kernel asks every time; with the defaults it does not."""
    asked = {}
    for name, times in (("0", "sealed_entry_timeout=0,sealed_attr_timeout=0"), ("default", "grace=1")):
        with mounted(tmp_path, "--embedded", tmp_path / "pool", "-o", times, name=name) as mount:
            (mount.kv / "o.tmp").write_bytes(b"x")
            os.replace(mount.kv / "o.tmp", mount.kv / "o")
            os.stat(mount.kv / "o")
            with opened(mount.path / ".curvfs" / "stats.json") as fd:
                before = json.loads(os.read(fd, 1 << 20))["operations"]
            for _ in range(50):
                os.stat(mount.kv / "o")
            after = json.loads((mount.path / ".curvfs" / "stats.json").read_bytes())["operations"]
            asked[name] = sum(
                after.get(kind, {"count": 0})["count"] - before.get(kind, {"count": 0})["count"]
                for kind in ("lookup", "getattr")
            )
    assert asked["0"] >= 50
    assert asked["default"] <= 25


@pytest.mark.parametrize("words", ["attr_timeout=-1", "directory_timeout=2d", "sealed_attr_timeout=x"])
def test_cache_times_that_make_no_sense(tmp_path: Path, words: str) -> None:
    (tmp_path / "m").mkdir()
    done = curvfs("mount", "--embedded", tmp_path / "pool", "-o", words, tmp_path / "m")
    assert done.returncode == 2
    assert words.partition("=")[0] in done.stderr
