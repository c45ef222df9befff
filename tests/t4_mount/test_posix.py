"""Ordinary files, directories and attributes on a real mount."""

from __future__ import annotations

import errno
import mmap
import os
import random
import shutil
import stat
import subprocess
import time
from pathlib import Path

import pytest

from tests.t4_mount.mounts import Mount, refused, wait_for


def test_write_read_list_remove(place: Path) -> None:
    content = os.urandom(3_000_001)
    (place / "a").write_bytes(content)
    assert (place / "a").read_bytes() == content
    assert sorted(os.listdir(place)) == ["a"]
    assert (place / "a").stat().st_size == len(content)
    (place / "a").unlink()
    assert os.listdir(place) == []
    refused(errno.ENOENT, (place / "a").stat)


def test_the_empty_file(place: Path) -> None:
    (place / "a").touch()
    assert (place / "a").read_bytes() == b""
    assert (place / "a").stat().st_size == 0


@pytest.mark.parametrize("size", [1, 4095, 4096, 4097, (1 << 20) - 1, 5000])
def test_odd_sizes_are_exact(place: Path, size: int) -> None:
    content = os.urandom(size)
    (place / "a").write_bytes(content)
    os.sync()
    assert (place / "a").read_bytes() == content
    source = place / "a"
    for tool in (["cp", "--sparse=always"], ["dd", "bs=4096", "oflag=direct", "status=none"]):
        target = place / "b"
        command = [*tool, str(source), str(target)] if tool[0] == "cp" else [*tool, f"if={source}", f"of={target}"]
        subprocess.run(command, check=True)
        assert target.read_bytes() == content
        assert target.stat().st_size == size


def test_directories(place: Path) -> None:
    (place / "d").mkdir(mode=0o750)
    assert stat.S_IMODE((place / "d").stat().st_mode) == 0o750
    refused(errno.EEXIST, (place / "d").mkdir)
    (place / "d" / "f").touch()
    refused(errno.ENOTEMPTY, (place / "d").rmdir)
    refused(errno.ENOTDIR, (place / "d" / "f" / "x").touch)
    refused(errno.EISDIR, lambda: os.unlink(place / "d"))
    refused(errno.ENOTDIR, lambda: os.rmdir(place / "d" / "f"))
    (place / "d" / "f").unlink()
    (place / "d").rmdir()
    refused(errno.ENOENT, (place / "d").rmdir)


def test_rename(place: Path) -> None:
    (place / "a").write_text("a")
    (place / "b").write_text("b")
    os.rename(place / "a", place / "b")
    assert os.listdir(place) == ["b"]
    assert (place / "b").read_text() == "a"
    (place / "d" / "e").mkdir(parents=True)
    (place / "d" / "e" / "f").write_text("f")
    os.rename(place / "d", place / "g")
    assert (place / "g" / "e" / "f").read_text() == "f"
    refused(errno.EISDIR, lambda: os.rename(place / "b", place / "g"))
    refused(errno.ENOTDIR, lambda: os.rename(place / "g", place / "b"))
    refused(errno.EINVAL, lambda: os.rename(place / "g", place / "g" / "e" / "h"))
    refused(errno.ENOENT, lambda: os.rename(place / "none", place / "b"))
    subprocess.run(["mv", "-n", str(place / "b"), str(place / "c")], check=True)
    assert (place / "c").read_text() == "a"


def test_rename_flags(place: Path) -> None:
    import ctypes

    libc = ctypes.CDLL(None, use_errno=True)

    def renameat2(old: Path, new: Path, flags: int) -> int:
        done = libc.renameat2(-100, os.fsencode(old), -100, os.fsencode(new), flags)
        return 0 if done == 0 else ctypes.get_errno()

    (place / "a").write_text("a")
    (place / "b").write_text("b")
    assert renameat2(place / "a", place / "b", 1) == errno.EEXIST
    assert renameat2(place / "a", place / "b", 2) == 0
    assert ((place / "a").read_text(), (place / "b").read_text()) == ("b", "a")
    assert renameat2(place / "a", place / "c", 1) == 0
    assert renameat2(place / "c", place / "d", 4) == errno.EINVAL


def test_a_writer_survives_the_renames_around_it(place: Path) -> None:
    (place / "d").mkdir()
    with open(place / "d" / "a", "wb", buffering=0) as file:
        file.write(b"one")
        os.rename(place / "d" / "a", place / "d" / "b")
        file.write(b"two")
        os.rename(place / "d", place / "e")
        file.write(b"three")
        file.truncate(20)
    assert (place / "e" / "b").read_bytes() == b"onetwothree".ljust(20, b"\0")


def test_unlink_while_open(place: Path) -> None:
    content = os.urandom(200_000)
    (place / "a").write_bytes(content)
    with open(place / "a", "r+b", buffering=0) as file:
        os.unlink(place / "a")
        assert os.listdir(place) == []
        (place / "a").write_text("another")
        assert os.pread(file.fileno(), len(content), 0) == content
        os.pwrite(file.fileno(), b"tail", len(content))
        assert os.pread(file.fileno(), 10, len(content) - 2) == content[-2:] + b"tail"
        assert os.fstat(file.fileno()).st_size == len(content) + 4
    assert (place / "a").read_text() == "another"
    (place / "a").unlink()
    place.rmdir()


def test_replaced_while_open(place: Path) -> None:
    (place / "a").write_text("old")
    (place / "b").write_text("new")
    with open(place / "a") as reader, open(place / "a", "r+b", buffering=0) as writer:
        os.rename(place / "b", place / "a")
        assert reader.read() == "old"
        writer.write(b"OLD!")
        assert os.pread(writer.fileno(), 4, 0) == b"OLD!"
    assert (place / "a").read_text() == "new"


def test_one_descriptor_reads_what_another_has_written(place: Path) -> None:
    with open(place / "a", "w+b", buffering=0) as first, open(place / "a", "rb", buffering=0) as second:
        os.pwrite(first.fileno(), b"x" * 4096, 0)
        assert os.fstat(first.fileno()).st_size == os.fstat(second.fileno()).st_size == 4096
        assert os.pread(second.fileno(), 4096, 0) == b"x" * 4096
        os.pwrite(first.fileno(), b"y" * 4096, 1 << 20)
        assert os.fstat(second.fileno()).st_size == (1 << 20) + 4096
        assert os.lseek(second.fileno(), 0, os.SEEK_END) == (1 << 20) + 4096
        assert os.pread(second.fileno(), 4096, 8192) == bytes(4096)
        assert os.pread(second.fileno(), 4096, 1 << 20) == b"y" * 4096


def test_append_and_rewrite_in_place(place: Path) -> None:
    for piece in (b"one", b"two", b"three"):
        with open(place / "log", "ab") as file:
            file.write(piece)
    assert (place / "log").read_bytes() == b"onetwothree"
    with open(place / "log", "r+b") as file:
        file.seek(3)
        file.write(b"TWO")
    assert (place / "log").read_bytes() == b"oneTWOthree"
    (place / "log").write_bytes(b"short")
    assert (place / "log").read_bytes() == b"short"


def test_truncate(place: Path) -> None:
    path = place / "a"
    path.write_bytes(b"0123456789")
    os.truncate(path, 4)
    assert path.read_bytes() == b"0123"
    os.truncate(path, 8)
    assert path.read_bytes() == b"0123\0\0\0\0"
    with open(path, "r+b", buffering=0) as file:
        file.write(b"ab")
        os.ftruncate(file.fileno(), 3)
        assert os.pread(file.fileno(), 10, 0) == b"ab2"
        os.ftruncate(file.fileno(), 5)
        file.write(b"z")
    assert path.read_bytes() == b"abz\0\0"


def test_times_and_modes_stay(place: Path) -> None:
    path = place / "a"
    with open(path, "wb", buffering=0) as file:
        file.write(b"x")
        os.utime(file.fileno(), ns=(1_000_000_000, 2_000_000_000))
        os.fchmod(file.fileno(), 0o640)
        os.fchown(file.fileno(), 12, 34)
    found = path.stat()
    assert (found.st_atime_ns, found.st_mtime_ns) == (1_000_000_000, 2_000_000_000)
    assert (stat.S_IMODE(found.st_mode), found.st_uid, found.st_gid) == (0o640, 12, 34)
    with open(path, "rb"):
        pass
    assert path.stat().st_mtime_ns == 2_000_000_000
    os.utime(path)
    assert abs(path.stat().st_mtime - time.time()) < 10
    shutil.copy2(path, place / "b")
    assert (place / "b").stat().st_mtime_ns == path.stat().st_mtime_ns


def test_symbolic_and_hard_links(place: Path) -> None:
    (place / "a").write_text("a")
    (place / "s").symlink_to("a")
    assert os.readlink(place / "s") == "a"
    assert (place / "s").read_text() == "a"
    assert (place / "s").lstat().st_size == 1
    os.link(place / "a", place / "h")
    assert (place / "h").stat().st_ino == (place / "a").stat().st_ino
    assert (place / "h").stat().st_nlink == 2
    (place / "h").write_text("through the other name")
    assert (place / "a").read_text() == "through the other name"
    (place / "a").unlink()
    assert (place / "h").read_text() == "through the other name"
    assert (place / "h").stat().st_nlink == 1
    refused(errno.EEXIST, lambda: os.link(place / "h", place / "s"))
    refused(errno.EPERM, lambda: os.link(place, place / "loop"))


def test_extended_attributes(place: Path) -> None:
    path = place / "a"
    path.touch()
    os.setxattr(path, "user.one", b"1")
    os.setxattr(path, "user.two", b"\0\xff" * 100)
    assert sorted(os.listxattr(path)) == ["user.one", "user.two"]
    assert os.getxattr(path, "user.two") == b"\0\xff" * 100
    refused(errno.EEXIST, lambda: os.setxattr(path, "user.one", b"2", os.XATTR_CREATE))
    refused(errno.ENODATA, lambda: os.setxattr(path, "user.three", b"2", os.XATTR_REPLACE))
    os.removexattr(path, "user.one")
    refused(errno.ENODATA, lambda: os.getxattr(path, "user.one"))
    refused(errno.ENODATA, lambda: os.removexattr(path, "user.one"))
    refused(errno.EOPNOTSUPP, lambda: os.setxattr(path, "curvfs.born", b"x"))


def test_internal_attributes_are_hidden(mount: Mount, kv: Path) -> None:
    assert os.listxattr(mount.kv) == []
    (kv / "a.tmp").write_text("a")
    os.rename(kv / "a.tmp", kv / "a")
    assert os.listxattr(kv / "a") == []
    refused(errno.ENODATA, lambda: os.getxattr(kv / "a", "curvfs.born"))


def test_names(place: Path) -> None:
    for name in ("x" * 255, "-leading", "@%-.,[]*?{}\\", "ü" * 127, " ", "\n", "..."):
        (place / name).write_text(name)
        assert (place / name).read_text() == name
        assert name in os.listdir(place)
        (place / name).unlink()
    refused(errno.ENAMETOOLONG, (place / ("x" * 256)).touch)
    refused(errno.EILSEQ, lambda: os.close(os.open(os.fsencode(place) + b"/\xff", os.O_CREAT | os.O_WRONLY)))


def test_a_directory_named_like_a_pattern(place: Path) -> None:
    (place / "[ab]*").mkdir()
    (place / "[ab]*" / "f").write_text("f")
    assert os.listdir(place / "[ab]*") == ["f"]
    (place / "[ab]*" / "f").unlink()
    assert os.listdir(place / "[ab]*") == []


def test_a_large_directory_listed_while_it_changes(place: Path) -> None:
    names = {f"n{index:05}" for index in range(1300)}
    for name in names:
        os.mkdir(place / name)
    assert set(os.listdir(place)) == names
    seen = []
    with os.scandir(place) as entries:
        for number, entry in enumerate(entries):
            seen.append(entry.name)
            if number % 2 == 0:
                os.rmdir(place / entry.name)
    assert sorted(seen) == sorted(names)
    assert len(os.listdir(place)) == 650
    subprocess.run(["rm", "-r", str(place)], check=True)


def test_statfs_is_honest(mount: Mount) -> None:
    found = os.statvfs(mount.path)
    behind = os.statvfs(mount.path.parent)
    assert found.f_bsize == found.f_frsize == 4096
    assert found.f_namemax == 255
    assert 0 < found.f_bavail <= found.f_blocks
    assert abs(found.f_bavail * 4096 - behind.f_bavail * behind.f_frsize) < behind.f_blocks * behind.f_frsize * 0.2


def test_direct_io_of_any_size_and_offset(place: Path) -> None:
    content = bytearray(os.urandom(1 << 20))
    aligned = mmap.mmap(-1, 1 << 20)
    aligned[:] = bytes(content)
    fd = os.open(place / "a", os.O_RDWR | os.O_CREAT | os.O_DIRECT)
    try:
        assert os.pwritev(fd, [aligned], 0) == 1 << 20
        assert os.pread(fd, 4096, 0) == content[:4096]
        for size, offset in ((5000, 0), (32, 0), (4096, 100), (8192, (1 << 20) - 4096)):
            piece = os.urandom(size)
            assert os.pwrite(fd, piece, offset) == size
            content[offset : offset + size] = piece
        assert os.pread(fd, 8192, len(content) - 4096) == content[-4096:]
        assert os.pread(fd, 4096, len(content)) == b""
    finally:
        os.close(fd)
    assert (place / "a").read_bytes() == content


def test_mappings(place: Path) -> None:
    content = os.urandom(3 << 20)
    (place / "a").write_bytes(content)
    with open(place / "a", "rb") as file, mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as shared:
        assert shared[:] == content
    with open(place / "a", "r+b") as file, mmap.mmap(file.fileno(), 0) as shared:
        shared[100:105] = b"hello"
        shared.flush()
    assert (place / "a").read_bytes()[100:105] == b"hello"


def test_exclusive_and_other_open_flags(place: Path) -> None:
    flags = os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_TRUNC | os.O_DIRECT
    os.close(os.open(place / "a", flags))
    refused(errno.EEXIST, lambda: os.open(place / "a", flags))
    refused(errno.ENOENT, lambda: os.open(place / "none", os.O_RDONLY))
    refused(errno.EISDIR, lambda: os.open(place, os.O_WRONLY))
    os.close(os.open(place / "b", os.O_CREAT | os.O_RDONLY))
    assert (place / "b").stat().st_size == 0
    (place / "b").write_text("text")
    os.close(os.open(place / "b", os.O_WRONLY | os.O_TRUNC))
    assert (place / "b").stat().st_size == 0


def test_tools(place: Path) -> None:
    source = place / "source"
    (source / "deep" / "er").mkdir(parents=True)
    for index in range(20):
        (source / "deep" / f"f{index}").write_bytes(os.urandom(index * 1000))
    subprocess.run(["cp", "-a", source, place / "copy"], check=True)
    subprocess.run(["tar", "-C", place, "-cf", place / "a.tar", "source"], check=True)
    (place / "out").mkdir()
    subprocess.run(["tar", "-C", place / "out", "-xf", place / "a.tar"], check=True)
    for other in (place / "copy", place / "out" / "source"):
        subprocess.run(["diff", "-r", source, other], check=True)
    subprocess.run(["sed", "-i", "s/a/b/", place / "copy" / "deep" / "f0"], check=True)


@pytest.mark.skipif(shutil.which("fio") is None, reason="fio is not installed")
@pytest.mark.parametrize("direct", [0, 1])
def test_fio_writes_and_verifies(place: Path, tmp_path: Path, direct: int) -> None:
    common = [
        "--size=8m",
        "--verify=crc32c",
        "--do_verify=1",
        "--verify_fatal=1",
        f"--direct={direct}",
        "--group_reporting",
    ]
    for rw, bs in (("write", "1m"), ("write", "64k"), ("randwrite", "64k")):
        subprocess.run(
            ["fio", "--name=j", f"--directory={place}", f"--rw={rw}", f"--bs={bs}", *common],
            check=True,
            capture_output=True,
            timeout=60,
            cwd=tmp_path,
        )


def test_a_file_of_many_blocks(mount: Mount, pool: Path, place: Path) -> None:
    """Sparse over several blocks of the default size: holes read as zeros."""
    path = place / "sparse"
    end = 3 * 128 * 1024 * 1024
    with open(path, "wb", buffering=0) as file:
        os.pwrite(file.fileno(), b"begin", 0)
        os.pwrite(file.fileno(), b"end", end)
    assert path.stat().st_size == end + 3
    with open(path, "rb", buffering=0) as file:
        assert os.pread(file.fileno(), 5, 0) == b"begin"
        assert os.pread(file.fileno(), 3, end) == b"end"
        assert os.pread(file.fileno(), 4096, 200 * 1024 * 1024) == bytes(4096)


def test_writes_of_every_kind_beside_a_plain_file(place: Path, kv: Path, tmp_path: Path) -> None:
    """Small and large, following each other, overlapping and with gaps, with reads, truncations and syncs between:
    what is taken and done later must never show."""
    chance = random.Random(7)
    for directory in (place, kv):
        with open(directory / "f", "wb+", buffering=0) as ours, open(tmp_path / "f", "wb+", buffering=0) as plain:
            files = (ours.fileno(), plain.fileno())
            position = 0
            for _ in range(400):
                what = chance.random()
                if what < 0.8:
                    position = chance.choice((position, position, position, chance.randrange(3 << 20)))
                    data = chance.randbytes(chance.choice((1, 100, 4096, 5000, 65536, 1 << 20)))
                    for fd in files:
                        assert os.pwrite(fd, data, position) == len(data)
                    position += len(data)
                elif what < 0.9:
                    start = chance.randrange(3 << 20)
                    assert os.pread(files[0], 70_000, start) == os.pread(files[1], 70_000, start)
                elif what < 0.95:
                    length = chance.randrange(4 << 20)
                    for fd in files:
                        os.ftruncate(fd, length)
                else:
                    os.fsync(files[0])
                assert os.fstat(files[0]).st_size == os.fstat(files[1]).st_size
        assert (directory / "f").read_bytes() == (tmp_path / "f").read_bytes()


def test_holes_stay_holes(pool: Path, place: Path) -> None:
    """A rewrite copies the block; what takes no space before takes none afterwards."""
    path = place / "sparse"
    with open(path, "wb", buffering=0) as file:
        os.pwrite(file.fileno(), b"begin", 0)
        os.pwrite(file.fileno(), b"end", 50 << 20)
    with open(path, "r+b", buffering=0) as file:
        os.pwrite(file.fileno(), b"middle", 20 << 20)
    number = path.stat().st_ino
    (block,) = (path for path in (pool / "data").rglob("blk_*") if int(path.name[4:]) >> 24 == number)
    assert block.stat().st_blocks * 512 <= 4 << 20
    with open(path, "rb", buffering=0) as file:
        assert [os.pread(file.fileno(), size, at) for size, at in ((5, 0), (6, 20 << 20), (3, 50 << 20))] == [
            b"begin",
            b"middle",
            b"end",
        ]
        assert not any(os.pread(file.fileno(), 1 << 20, 30 << 20))


def test_descriptors_that_stay_open_for_the_next_open(mount: Mount, place: Path) -> None:
    """They are bounded in number; a file that is removed, also while it is open, keeps none."""
    held = Path(f"/proc/{mount.process.pid}/fd")
    before = len(os.listdir(held))
    for index in range(530):
        (place / f"f{index}").write_bytes(b"x")
        (place / f"f{index}").read_bytes()
    assert 512 < len(os.listdir(held)) <= before + 512 + 20
    with open(place / "f529", "rb", buffering=0) as late:
        for index in range(530):
            (place / f"f{index}").unlink()
        assert late.read() == b"x"
    wait_for(lambda: len(os.listdir(held)) <= before + 5, what="the end of the descriptors")
