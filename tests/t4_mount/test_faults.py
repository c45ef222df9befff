"""Servers that die or hang: callers get an errno within the deadline, and everything works again afterwards."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import threading
import time
from pathlib import Path

import pytest

from tests.t4_mount.mounts import Mount, mounted, server_pid, wait_for

OP_TIMEOUT_S = 3.0
OPTIONS = ("-o", f"op_timeout={OP_TIMEOUT_S:g}")
NO_ANSWER = {errno.ETIMEDOUT, errno.ECONNREFUSED, errno.ECONNRESET, errno.EIO, errno.EAGAIN}


def answers(mount: Mount) -> bool:
    try:
        os.listdir(mount.path)
        os.close(os.open(mount.path / "probe", os.O_WRONLY | os.O_CREAT))
    except OSError:
        return False
    return True


def test_a_killed_server_comes_back(tmp_path: Path) -> None:
    pool = tmp_path / "pool"
    with mounted(tmp_path, "--embedded", pool, *OPTIONS) as mount:
        (mount.path / "before").write_bytes(b"content")
        (mount.kv / "o.tmp").write_bytes(b"object")
        os.rename(mount.kv / "o.tmp", mount.kv / "o")
        reader = os.open(mount.path / "before", os.O_RDONLY)
        for _ in range(3):
            dead = server_pid(pool)
            os.kill(dead, signal.SIGKILL)
            wait_for(lambda: answers(mount), 25.0, "the server")
            assert server_pid(pool) != dead
            assert os.pread(reader, 100, 0) == b"content"
            assert (mount.path / "before").read_bytes() == b"content"
            assert (mount.kv / "o").read_bytes() == b"object"
            (mount.path / "after").write_bytes(b"new")
            assert (mount.path / "after").read_bytes() == b"new"
        os.close(reader)
        assert mount.stop() == 0


def test_a_server_that_hangs(tmp_path: Path) -> None:
    """Every call ends within the deadline, whatever it was; nothing is half written afterwards."""
    pool = tmp_path / "pool"
    with mounted(tmp_path, "--embedded", pool, *OPTIONS) as mount:
        (mount.path / "a").write_bytes(b"content")
        # Names of one directory are looked up one after the other, each within its own deadline.
        for name in ("stat", "open", "create", "mkdir", "rename", "unlink"):
            (mount.path / name).mkdir()
            (mount.path / name / "a").write_bytes(b"content")
        fd = os.open(mount.path / "w", os.O_RDWR | os.O_CREAT)
        os.write(fd, b"x")
        pid = server_pid(pool)
        os.kill(pid, signal.SIGSTOP)
        try:
            calls = {
                "stat": lambda: os.stat(mount.path / "stat" / "a"),
                "open": lambda: os.open(mount.path / "open" / "a", os.O_RDONLY),
                "create": lambda: os.open(mount.path / "create" / "new", os.O_WRONLY | os.O_CREAT),
                "mkdir": lambda: os.mkdir(mount.path / "mkdir" / "d"),
                "rename": lambda: os.rename(mount.path / "rename" / "a", mount.path / "rename" / "b"),
                "unlink": lambda: os.unlink(mount.path / "unlink" / "a"),
                "fsync": lambda: os.fsync(fd),
                "statfs": lambda: os.statvfs(mount.path),
                "private": lambda: os.open(mount.kv / "p.tmp", os.O_WRONLY | os.O_CREAT),
            }
            results: dict[str, tuple[object, float]] = {}

            def attempt(name: str) -> None:
                started = time.monotonic()
                try:
                    calls[name]()
                    outcome: object = None
                except OSError as error:
                    outcome = error.errno
                results[name] = outcome, time.monotonic() - started

            threads = [threading.Thread(target=attempt, args=(name,)) for name in calls]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join(60)
            assert set(results) == set(calls)
            for name, (outcome, took_s) in results.items():
                assert outcome in NO_ANSWER, (name, outcome)
                # The directories' own names, and what they hold: one deadline after the other.
                assert took_s < OP_TIMEOUT_S * 6, (name, took_s)
        finally:
            os.kill(pid, signal.SIGCONT)
        wait_for(lambda: answers(mount), 25.0, "the server")
        with pytest.raises(OSError) as caught:  # what was written may be lost: the last to hear of it is close
            os.close(fd)
        assert caught.value.errno in NO_ANSWER
        assert (mount.path / "rename" / "a").exists() != (mount.path / "rename" / "b").exists()
        assert mount.stop() == 0


def test_a_write_that_failed_is_never_published(tmp_path: Path) -> None:
    """The pool is full in mid-write: some call says so, the object does not appear, the next one works."""
    pool = tmp_path / "pool"
    pool.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=300m", "none", str(pool)], check=True)
    try:
        with mounted(tmp_path, "--embedded", pool, "-o", "op_timeout=10,block_size=16MB") as mount:
            told: list[int | None] = []
            fd = os.open(mount.kv / "big.tmp", os.O_WRONLY | os.O_CREAT)
            piece = os.urandom(1 << 20)
            try:
                for _ in range(600):
                    os.write(fd, piece)
            except OSError as error:
                told.append(error.errno)
            for action in (lambda: os.fsync(fd), lambda: os.fsync(fd), lambda: os.close(fd)):
                try:
                    action()
                except OSError as error:
                    told.append(error.errno)
            assert told and set(told) <= {errno.ENOSPC, errno.EIO}, told
            assert len(told) == 4, "later syncs forgot the failure"
            with pytest.raises(OSError) as caught:
                os.rename(mount.kv / "big.tmp", mount.kv / "big")
            assert caught.value.errno == told[0]
            assert not (mount.kv / "big").exists()
            (mount.kv / "big.tmp").unlink()
            wait_for(lambda: _put(mount, piece), 20.0, "room for the next object")
            assert (mount.kv / "next").read_bytes() == piece
    finally:
        wait_for(lambda: subprocess.run(["umount", str(pool)], capture_output=True).returncode == 0, 20.0, "the end")


def _put(mount: Mount, content: bytes) -> bool:
    try:
        (mount.kv / "next.tmp").write_bytes(content)
        os.rename(mount.kv / "next.tmp", mount.kv / "next")
    except OSError:
        return False
    return True


def test_killed_between_write_and_rename(tmp_path: Path) -> None:
    """kill -9 of the daemon again and again while objects are published: whole or absent, and no stuck names."""
    pool = tmp_path / "pool"
    content = os.urandom(300_000)
    for number in range(3):
        with mounted(tmp_path, "--embedded", pool) as mount:
            for name in os.listdir(mount.kv):
                assert (mount.kv / name).read_bytes() == content, name
            ended = threading.Event()

            def put() -> None:
                index = 0
                try:
                    while True:
                        index += 1
                        (mount.kv / f"{number}-{index}.tmp").write_bytes(content)  # noqa: B023
                        os.rename(mount.kv / f"{number}-{index}.tmp", mount.kv / f"{number}-{index}")  # noqa: B023
                except OSError:
                    ended.set()  # noqa: B023

            thread = threading.Thread(target=put)
            thread.start()
            time.sleep(0.4)
            mount.process.kill()
            assert ended.wait(10)
            thread.join()
    with mounted(tmp_path, "--embedded", pool) as mount:
        names = os.listdir(mount.kv)
        assert names and not [name for name in names if name.endswith(".tmp")]
        for name in names:
            assert (mount.kv / name).read_bytes() == content
