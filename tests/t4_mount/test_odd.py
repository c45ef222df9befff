"""Odd requests: each gets success or an errno, and the mount goes on serving everybody."""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import shutil
import socket
import stat
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.t4_mount.mounts import Mount, mounted_at

UNSUPPORTED = {errno.EOPNOTSUPP, errno.EPERM, errno.ENOSYS, errno.EINVAL, errno.ENOTTY}


def outcome(action: Callable[..., object], *arguments: object) -> int:
    """0, or the errno, of calling ``action(*arguments)``."""
    try:
        action(*arguments)
    except OSError as error:
        return error.errno or 0
    return 0


def open_and_close(path: Path | bytes, flags: int) -> None:
    os.close(os.open(path, flags, 0o600))


@pytest.fixture(autouse=True)
def _still_alive(mount: Mount) -> object:
    yield
    assert mount.process.poll() is None
    assert mounted_at(mount.path) == ["fuse.curvfs"]
    (mount.path / "alive").write_bytes(b"yes")
    assert (mount.path / "alive").read_bytes() == b"yes"
    assert "nobody expected" not in mount.log_text()


def test_special_files(place: Path, kv: Path) -> None:
    for kind in (stat.S_IFIFO, stat.S_IFCHR, stat.S_IFBLK, stat.S_IFSOCK):
        path = place / f"n{kind:o}"
        os.mknod(path, kind | 0o640, os.makedev(1, 3))
        found = path.lstat()
        assert (stat.S_IFMT(found.st_mode), stat.S_IMODE(found.st_mode)) == (kind, 0o640)
        if kind in (stat.S_IFCHR, stat.S_IFBLK):
            assert (os.major(found.st_rdev), os.minor(found.st_rdev)) == (1, 3)
        assert outcome(os.mknod, path, kind | 0o600) == errno.EEXIST
        path.rename(place / "moved")
        (place / "moved").unlink()
        assert outcome(os.mknod, kv / "n", kind | 0o600, os.makedev(1, 3)) == errno.EPERM
    os.mknod(place / "r", stat.S_IFREG | 0o600)
    os.mknod(kv / "r", stat.S_IFREG | 0o600)
    assert (place / "r").stat().st_size == (kv / "r").stat().st_size == 0
    assert os.listdir(place) == ["r"]


def test_a_fifo_and_a_socket_work(place: Path) -> None:
    os.mkfifo(place / "f", 0o600)
    reader = os.open(place / "f", os.O_RDONLY | os.O_NONBLOCK)
    writer = os.open(place / "f", os.O_WRONLY)
    os.write(writer, b"through the pipe")
    assert os.read(reader, 100) == b"through the pipe"
    os.close(writer)
    os.close(reader)
    with socket.socket(socket.AF_UNIX) as server, socket.socket(socket.AF_UNIX) as client:
        server.bind(str(place / "s"))
        server.listen(1)
        client.connect(str(place / "s"))
    assert stat.S_ISSOCK((place / "s").lstat().st_mode)


def test_ioctl_fallocate_seek_copy(place: Path) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    (place / "a").write_bytes(b"x" * 10_000)
    with open(place / "a", "r+b") as file:
        fd = file.fileno()
        assert outcome(fcntl.ioctl, fd, 0x80086601, bytes(8)) in UNSUPPORTED
        for mode in (0, 1, 2, 3, 8, 16, 32, 64):
            libc.fallocate(fd, mode, ctypes.c_long(0), ctypes.c_long(4096))
        assert outcome(os.posix_fallocate, fd, 0, 20_000) in (0, *UNSUPPORTED)
        assert outcome(os.lseek, fd, 0, os.SEEK_DATA) in (0, errno.ENXIO, *UNSUPPORTED)
        assert outcome(os.lseek, fd, 0, os.SEEK_HOLE) in (0, errno.ENXIO, *UNSUPPORTED)
        with open(place / "b", "wb") as target:
            assert outcome(os.copy_file_range, fd, target.fileno(), 5000) in (0, errno.EXDEV, *UNSUPPORTED)
            assert outcome(os.sendfile, target.fileno(), fd, 0, 5000) == 0
        fcntl.flock(fd, fcntl.LOCK_EX)
        fcntl.lockf(fd, fcntl.LOCK_UN)
    assert (place / "a").read_bytes()[:10_000] == b"x" * 10_000
    assert outcome(open_and_close, place, os.O_TMPFILE | os.O_RDWR) in (*UNSUPPORTED, errno.ENOTSUP)


def test_far_offsets(place: Path) -> None:
    (place / "a").write_bytes(b"x")
    with open(place / "a", "r+b", buffering=0) as file:
        assert os.pread(file.fileno(), 10, 2**62) == b""
        assert outcome(os.pwrite, file.fileno(), b"y", 2**62) == errno.EFBIG
        assert outcome(os.ftruncate, file.fileno(), 2**62) == errno.EFBIG
    assert (place / "a").read_bytes() == b"x"


def test_every_mix_of_open_flags(place: Path, kv: Path) -> None:
    bits = [os.O_CREAT, os.O_EXCL, os.O_TRUNC, os.O_APPEND, os.O_DIRECT, os.O_NOFOLLOW, os.O_SYNC, os.O_NOATIME]
    for directory in (place, kv):
        for number in range(256):
            flags = sum(bit for index, bit in enumerate(bits) if number >> index & 1)
            for access in (os.O_RDONLY, os.O_WRONLY, os.O_RDWR):
                found = outcome(open_and_close, directory / "f", flags | access)
                assert found in (0, errno.EEXIST, errno.ENOENT), (flags, os.strerror(found))
                if number % 16 == 0:
                    (directory / "f").unlink(missing_ok=True)


def test_extreme_attributes(place: Path) -> None:
    path = place / "a"
    path.touch()
    for mode in (0, 0o7777, 0o6000):
        os.chmod(path, mode)
        assert stat.S_IMODE(path.stat().st_mode) == mode
    for owner in (0, 1, 65534, 2**31, 2**32 - 2):
        os.chown(path, owner, owner)
        assert (path.stat().st_uid, path.stat().st_gid) == (owner, owner)
    for seconds in (0, 1, -1, 2**31, 2**33, 2**40, 2**50, 2**60, -(2**40), -(2**60)):
        found = outcome(os.utime, path, (seconds, seconds))
        assert found in (0, errno.EOVERFLOW, errno.EINVAL), (seconds, os.strerror(found))
        path.stat()


def test_odd_attributes(place: Path) -> None:
    path = place / "a"
    path.touch()
    for name in ("user.x" * 30, "user." + "ü" * 50, "security.capability", "system.posix_acl_access", "trusted.x"):
        for value in (b"", b"x" * 65536, b"\0" * 10):
            outcome(os.setxattr, path, name, value)
            outcome(os.getxattr, path, name)
    outcome(os.setxattr, path, b"user.\xff", b"x")
    for name in os.listxattr(path):
        outcome(os.removexattr, path, name)
    assert os.listxattr(path) == []


def test_odd_names(place: Path) -> None:
    raw = os.fsencode(place)
    for name in (b"\xff", b"a\xc3", b"..", b".", b"x" * 256, b"\x01\x02", b"~", b"*", b"-rf"):
        path = raw + b"/" + name
        outcome(open_and_close, path, os.O_CREAT | os.O_WRONLY)
        outcome(os.stat, path)
        outcome(os.symlink, b"\xff\xfe", path + b"l")
        outcome(os.rename, path, path + b"2")
        outcome(os.unlink, path + b"2")
        outcome(os.mkdir, path)
        outcome(os.rmdir, path)
    assert outcome(os.mkdir, raw + b"/\xff") == errno.EILSEQ
    assert outcome(os.mkdir, raw + b"/" + b"x" * 256) == errno.ENAMETOOLONG
    deep = place
    for _ in range(60):
        deep = deep / ("d" * 60)
        if outcome(deep.mkdir) != 0:
            break
    os.chdir(place)
    try:
        shutil.rmtree(place / ("d" * 60))
    finally:
        os.chdir("/")


def test_blocks_that_went_away(mount: Mount, pool: Path, place: Path) -> None:
    """Somebody removes the block files behind the server's back."""
    content = os.urandom(200_000)
    (place / "a").write_bytes(content)
    (place / "b").write_bytes(content)
    inode = (place / "a").stat().st_ino
    blocks = [path for path in (pool / "data").rglob("blk_*") if int(path.name[4:]) >> 24 == inode]
    assert len(blocks) == 1
    blocks[0].unlink()
    assert outcome((place / "a").read_bytes) not in (0, errno.ENOSYS)
    assert (place / "b").read_bytes() == content
    (place / "a").unlink()
