"""Small files of a KV prefix: made ahead, held back until they are flushed, written in one exchange.

Each test makes a few files first, so that the mount has some ready (:mod:`mount.stock`); what must not change with
that is everything that programs see.
"""

from __future__ import annotations

import errno
import json
import mmap
import os
import signal
import stat
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.t4_mount.mounts import Mount, mounted, refused, server_pid, start_mount, wait_for
from tests.t4_mount.relay import Gate, relayed

NO_ANSWER = {errno.ETIMEDOUT, errno.ECONNREFUSED, errno.ECONNRESET, errno.EIO, errno.EAGAIN}


def publish(directory: Path, name: str, content: bytes) -> Path:
    staging = directory / f"{name}.tmp"
    staging.write_bytes(content)
    os.replace(staging, directory / name)
    return directory / name


def ready(kv: Path) -> int:
    """How many files lie in staging: those that were made ahead are among them."""
    staging = kv / ".staging"
    return sum(len(os.listdir(staging / own)) for own in os.listdir(staging))


def warm(mount: Mount) -> None:
    """Publish until some files are ready."""
    for number in range(200):
        publish(mount.kv, "warm", b"%d" % number)
        if number >= 8 and ready(mount.kv) > 8:
            return
        time.sleep(0.01)
    raise AssertionError("no files are made ahead")


def calls(mount: Mount) -> dict[str, int]:
    found = json.loads((mount.path / ".curvfs" / "stats.json").read_bytes())["operations"]
    return {name: int(each["count"]) for name, each in found.items()}


def test_files_made_ahead_are_like_any_other(mount: Mount, kv: Path) -> None:
    """Owner, mode, times, size and attributes, before and after publishing and after the daemon has forgotten."""
    warm(mount)
    os.umask(0o022)
    before_s = time.time()
    fd = os.open(kv / "a.tmp", os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o664)
    made = os.fstat(fd)
    assert (stat.S_IMODE(made.st_mode), made.st_uid, made.st_size, made.st_nlink) == (0o644, os.getuid(), 0, 1)
    assert abs(made.st_mtime - before_s) < 1.5 and abs(made.st_ctime - before_s) < 1.5
    assert os.listxattr(fd) == []
    os.write(fd, b"content")
    assert os.pread(fd, 100, 0) == b"content" and os.pread(fd, 100, 3) == b"tent" and os.pread(fd, 1, 7) == b""
    assert os.fstat(fd).st_size == 7
    os.setxattr(fd, "user.tag", b"x")
    os.fchmod(fd, 0o600)
    os.close(fd)
    os.rename(kv / "a.tmp", kv / "a")
    refused(errno.EPERM, lambda: os.open(kv / "a", os.O_WRONLY))
    found = (kv / "a").stat()
    assert (stat.S_IMODE(found.st_mode), found.st_uid, found.st_size, found.st_ino) == (
        0o600,
        os.getuid(),
        7,
        made.st_ino,
    )
    assert os.getxattr(kv / "a", "user.tag") == b"x" and os.listxattr(kv / "a") == ["user.tag"]
    assert (kv / "a").read_bytes() == b"content"


@pytest.mark.parametrize("size", [0, 1, 4096, 65536, 65537, 300_000])
@pytest.mark.parametrize("piece", [1000, 4096, 1 << 20])
def test_sizes_and_pieces(mount: Mount, kv: Path, size: int, piece: int) -> None:
    """Around what is held back; appended in pieces, with one that is written again."""
    warm(mount)
    content = os.urandom(size)
    fd = os.open(kv / "a.tmp", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    for start in range(0, size, piece):
        os.write(fd, content[start : start + piece])
    if size > 10:
        os.pwrite(fd, b"0123456789", 0)
        content = b"0123456789" + content[10:]
    os.close(fd)
    os.rename(kv / "a.tmp", kv / "a")
    assert (kv / "a").read_bytes() == content


def test_holes_truncation_and_mappings(mount: Mount, kv: Path) -> None:
    warm(mount)
    with open(kv / "hole.tmp", "wb", buffering=0) as file:
        file.seek(5000)
        file.write(b"end")
    os.rename(kv / "hole.tmp", kv / "hole")
    assert (kv / "hole").read_bytes() == bytes(5000) + b"end"
    with open(kv / "cut.tmp", "wb", buffering=0) as file:
        file.write(b"content")
        file.truncate(3)
        file.seek(0, os.SEEK_END)
        file.write(b"!")
    os.rename(kv / "cut.tmp", kv / "cut")
    assert (kv / "cut").read_bytes() == b"con!"
    fd = os.open(kv / "long.tmp", os.O_RDWR | os.O_CREAT)
    os.ftruncate(fd, 10_000)
    with mmap.mmap(fd, 10_000) as mapping:
        mapping[9_000:9_003] = b"abc"
    os.close(fd)
    os.rename(kv / "long.tmp", kv / "long")
    assert (kv / "long").read_bytes() == (bytes(9_000) + b"abc").ljust(10_000, b"\0")
    (kv / "empty.tmp").touch()
    os.rename(kv / "empty.tmp", kv / "empty")
    assert (kv / "empty").read_bytes() == b""


def test_two_writers_of_one_name(mount: Mount, kv: Path) -> None:
    """Both hold their bytes back; each publishes its own, in the order of the renames."""
    warm(mount)
    tmp = kv / "x.tmp"
    first = os.open(tmp, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    second = os.open(tmp, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.write(first, b"A" * 100)
    os.write(second, b"B" * 50)
    os.close(second)
    os.rename(tmp, kv / "x")
    assert (kv / "x").read_bytes() == b"B" * 50
    os.close(first)
    os.rename(tmp, kv / "y")
    assert (kv / "y").read_bytes() == b"A" * 100


def test_a_descriptor_held_across_the_rename(mount: Mount, kv: Path) -> None:
    warm(mount)
    tmp = kv / "o.tmp"
    fd = os.open(tmp, os.O_RDWR | os.O_CREAT | os.O_TRUNC)
    try:
        os.write(fd, b"held back")
        refused(errno.EBUSY, lambda: os.rename(tmp, kv / "o"))
        os.fsync(fd)
        os.write(fd, b", and more")
        refused(errno.EBUSY, lambda: os.rename(tmp, kv / "o"))
        os.close(os.dup(fd))
        os.rename(tmp, kv / "o")
        refused(errno.EPERM, lambda: os.write(fd, b"late"))
        assert os.pread(fd, 100, 0) == b"held back, and more"
    finally:
        os.close(fd)
    assert (kv / "o").read_bytes() == b"held back, and more"


def test_what_was_synced_is_in_the_store(mount: Mount, kv: Path, pool: Path) -> None:
    """After fsync the bytes are in a block, whatever becomes of the daemon."""
    warm(mount)
    content = b"synced" + os.urandom(50)

    def blocks() -> list[bytes]:
        return [path.read_bytes() for path in (pool / "data").rglob("blk_*") if path.stat().st_size == len(content)]

    fd = os.open(kv / "s.tmp", os.O_WRONLY | os.O_CREAT)
    os.write(fd, content)
    assert content not in blocks()
    os.fsync(fd)
    assert content in blocks()
    os.close(fd)
    os.unlink(kv / "s.tmp")


def test_few_requests_for_a_small_object(mount: Mount, kv: Path) -> None:
    """What the kernel asks for, publishing and reading objects of 4 KiB."""
    warm(mount)
    content = os.urandom(4096)
    before = calls(mount)
    for number in range(20):
        publish(kv, f"n{number}", content)
    spent = {name: count - before.get(name, 0) for name, count in calls(mount).items()}
    assert sum(spent.values()) <= 20 * 12 + 20, spent
    for number in range(20):
        assert (kv / f"n{number}").read_bytes() == content


def test_what_is_not_needed_any_more_is_removed(mount: Mount) -> None:
    warm(mount)
    wait_for(lambda: ready(mount.kv) == 1, 10.0, "an empty staging directory")


@contextmanager
def small_pool(tmp_path: Path, options: str) -> Iterator[Mount]:
    """A mount on a pool of 120 MiB."""
    pool = tmp_path / "pool"
    pool.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=120m", "none", str(pool)], check=True)
    try:
        with mounted(tmp_path, "--embedded", pool, "-o", options) as mount:
            yield mount
    finally:
        wait_for(lambda: subprocess.run(["umount", str(pool)], check=False).returncode == 0, 10.0, "the server's end")


def test_no_space_for_what_was_held_back(tmp_path: Path) -> None:
    """The write was taken; fsync says that there is no room, or close, or the rename, and nothing is published. With
    room again the next one works."""
    with small_pool(tmp_path, "op_timeout=10,block_size=16MB") as mount:
        warm(mount)
        fill = tmp_path / "pool" / "fill"
        with fill.open("wb") as file:
            os.posix_fallocate(file.fileno(), 0, 112 << 20)
        for name, ask in (("synced", os.fsync), ("closed", lambda fd: os.close(os.dup(fd)))):
            fd = os.open(mount.kv / f"{name}.tmp", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
            assert os.write(fd, b"x" * 4096) == 4096
            refused(errno.ENOSPC, lambda ask=ask, fd=fd: ask(fd))  # type: ignore[misc]
            refused(errno.ENOSPC, lambda fd=fd: os.write(fd, b"more"))  # type: ignore[misc]
            refused(errno.ENOSPC, lambda fd=fd: os.close(fd))  # type: ignore[misc]
            refused(errno.ENOSPC, lambda name=name: os.rename(mount.kv / f"{name}.tmp", mount.kv / name))  # type: ignore[misc]
            assert not (mount.kv / name).exists()
        fill.unlink()

        def works() -> bool:
            try:
                return publish(mount.kv, "after", b"content").read_bytes() == b"content"
            except OSError:
                return False

        wait_for(works, 15.0, "room")


def test_a_dead_server_is_heard_of_at_close(tmp_path: Path) -> None:
    """Bytes that were held back when the server died: close reports it, or the object is whole when it is back."""
    pool = tmp_path / "pool"
    with mounted(tmp_path, "--embedded", pool, "-o", "op_timeout=3") as mount:
        warm(mount)
        fds = {name: os.open(mount.kv / f"{name}.tmp", os.O_WRONLY | os.O_CREAT | os.O_TRUNC) for name in "abc"}
        for fd in fds.values():
            os.write(fd, b"held back")
        os.kill(server_pid(pool), signal.SIGKILL)
        published = []
        for name, fd in fds.items():
            try:
                os.close(fd)
                os.rename(mount.kv / f"{name}.tmp", mount.kv / name)
                published.append(name)
            except OSError as error:
                assert error.errno in NO_ANSWER, error

        def works() -> bool:
            try:
                return publish(mount.kv, "after", b"content").read_bytes() == b"content"
            except OSError:
                return False

        wait_for(works, 30.0, "the server")
        for name in fds:
            if name in published or (mount.kv / name).exists():
                assert (mount.kv / name).read_bytes() == b"held back"


@pytest.mark.parametrize("how", ["hold", "cut"])
def test_a_silent_master_after_the_bytes_are_written(tmp_path: Path, how: str) -> None:
    """close(2) waits for the workers, not for the master; whatever comes next does, and publishes all or nothing."""
    with relayed(tmp_path / "pool") as (url, _, _):
        master = Gate(int(url.rstrip("/").rpartition(":")[2]))
        try:
            with mounted(tmp_path, "-o", "op_timeout=2", f"curvine://127.0.0.1:{master.port}/") as mount:
                kv = mount.kv
                warm(mount)
                fd = os.open(kv / "a.tmp", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
                os.write(fd, b"content")
                getattr(master, how)()
                began_s = time.monotonic()
                os.close(fd)
                assert time.monotonic() - began_s < 1.5
                with pytest.raises(OSError) as caught:
                    os.rename(kv / "a.tmp", kv / "a")
                assert caught.value.errno in NO_ANSWER
                master.mend()

                def published() -> bool:
                    try:
                        return publish(kv, "a", b"again").read_bytes() == b"again"
                    except OSError:
                        return False

                wait_for(published, 20.0, "the master")
                # A try that came too early may have left a file that is dropped a second after the last one's rename.
                wait_for(lambda: sorted(os.listdir(kv)) == ["a", "warm"], 10.0, "an end of what was tried")
        finally:
            master.close()


def test_killed_between_close_and_rename(tmp_path: Path) -> None:
    """kill -9 of the daemon: what was not published is not there, what was is whole, and no name is stuck."""
    options = ("--embedded", tmp_path / "pool", "-o", "op_timeout=5")
    mount = start_mount(tmp_path, *options, name="a")
    try:
        warm(mount)
        publish(mount.kv, "published", b"whole")
        (mount.kv / "closed.tmp").write_bytes(b"closed, not renamed")
        fd = os.open(mount.kv / "open.tmp", os.O_WRONLY | os.O_CREAT)
        os.write(fd, b"held back")
        mount.process.kill()
        mount.process.communicate()
        refused(errno.ENOTCONN, lambda: os.close(fd))
        mount = start_mount(tmp_path, *options, name="a")
        assert (mount.kv / "published").read_bytes() == b"whole"
        assert sorted(os.listdir(mount.kv)) == ["published", "warm"]
        for name in ("closed", "open"):
            assert publish(mount.kv, name, b"again").read_bytes() == b"again"
        assert mount.stop() == 0
    finally:
        mount.remove()


def test_closed_files_are_there_on_another_mount(tmp_path: Path, mount: Mount, pool: Path) -> None:
    """Renamed here, read there at once; written in place here, whole there after the grace time."""
    warm(mount)
    with mounted(tmp_path, "--embedded", pool, name="other", environ=None) as other:
        for number in range(30):
            publish(mount.kv, "shared", b"%d" % number)
            assert (other.kv / "shared").read_bytes() == b"%d" % number
        (mount.kv / "in-place").write_bytes(b"content")
        wait_for((other.kv / "in-place").exists, 10.0, "the file under its name")
        assert (other.kv / "in-place").read_bytes() == b"content"
        os.unlink(other.kv / "in-place")


def test_many_at_once(mount: Mount, kv: Path) -> None:
    """Several threads publish and read beside each other."""
    problems: list[str] = []

    def work(number: int) -> None:
        try:
            for turn in range(25):
                content = b"%d/%d" % (number, turn) * (turn * 37 + 1)
                if publish(kv, f"t{number}-{turn}", content).read_bytes() != content:
                    problems.append(f"{number}/{turn} differs")
        except OSError as error:
            problems.append(f"{number}: {error}")

    threads = [threading.Thread(target=work, args=(number,)) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert problems == []
    assert len(os.listdir(kv)) == 6 * 25
