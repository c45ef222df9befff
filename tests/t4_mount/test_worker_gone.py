"""A worker that goes away, or falls silent, while its master lives on: every call gets an errno within the deadline,
nothing is half written, and all of it works again when the worker does."""

from __future__ import annotations

import errno
import os
import signal
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.t4_mount.mounts import Mount, mounted, wait_for
from tests.t4_mount.relay import relayed

OP_TIMEOUT_S = 2.0
#: Of a caller, on a machine that is busy with other things.
PATIENCE_S = 15.0
GONE = {errno.ECONNRESET, errno.ECONNREFUSED, errno.ETIMEDOUT, errno.EPIPE}


def outcome(call: Callable[[], Any]) -> int:
    """errno of a call, 0 when it did what it should."""
    try:
        call()
    except OSError as error:
        return error.errno or -1
    return 0


def publish(mount: Mount, name: str, content: bytes) -> None:
    (mount.kv / f"{name}.tmp").write_bytes(content)
    os.rename(mount.kv / f"{name}.tmp", mount.kv / name)


def write_on(fd: int, content: bytes) -> None:
    for _ in range(4):
        os.write(fd, content)


def read_directly(path: Path) -> bytes:
    """Not from the pages that the kernel has."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECT)
    try:
        return os.pread(fd, 1 << 20, 0)
    finally:
        os.close(fd)


def overwrite(path: Path, content: bytes) -> None:
    with path.open("r+b") as file:
        file.write(content)


def reads(path: Path, content: bytes) -> bool:
    try:
        return path.read_bytes() == content
    except OSError:
        return False


@pytest.mark.parametrize("how", ["cut", "hold"])
def test_a_worker_that_is_gone(tmp_path: Path, how: str) -> None:
    content = os.urandom(2 << 20)
    options = ("--client-hostname", "elsewhere", "-o", f"op_timeout={OP_TIMEOUT_S:g}")
    with relayed(tmp_path / "pool") as (url, worker, _), mounted(tmp_path, *options, url) as mount:
        kv = mount.kv
        (mount.path / "ordinary").write_bytes(content)
        publish(mount, "object", content)
        reader = os.open(mount.path / "ordinary", os.O_RDONLY | os.O_DIRECT)
        writer = os.open(mount.path / "written", os.O_RDWR | os.O_CREAT)
        private = os.open(kv / "private.tmp", os.O_RDWR | os.O_CREAT)
        assert os.write(writer, content) == os.write(private, content) == len(content)
        getattr(worker, how)()

        calls: dict[str, Callable[[], Any]] = {
            "read through an open descriptor": lambda: os.pread(reader, 4096, 0),
            "read": lambda: read_directly(mount.path / "ordinary"),
            "read an object": lambda: read_directly(kv / "object"),
            "sync": lambda: os.fsync(writer),
            "publish": lambda: [os.fsync(private), os.rename(kv / "private.tmp", kv / "private")],
            "write anew": lambda: (mount.path / "anew").write_bytes(content * 3),
            "write in place": lambda: overwrite(mount.path / "ordinary", content),
        }
        lives: dict[str, Callable[[], Any]] = {
            "stat": (mount.path / "ordinary").stat,
            "list": lambda: os.listdir(mount.path),
            "make a directory": (mount.path / "d").mkdir,
            "rename": lambda: os.rename(mount.path / "d", mount.path / "e"),
        }
        with ThreadPoolExecutor(len(calls)) as pool:
            began_s = time.monotonic()
            waiting = {name: pool.submit(outcome, call) for name, call in calls.items()}
            assert {name: outcome(call) for name, call in lives.items()} == dict.fromkeys(lives, 0)
            found = {name: future.result(PATIENCE_S * OP_TIMEOUT_S) for name, future in waiting.items()}
        assert time.monotonic() - began_s < PATIENCE_S
        assert {name: number for name, number in found.items() if number not in GONE} == {}
        # What was lost is said again, with the same reason, and never becomes a success.
        assert outcome(lambda: os.fsync(writer)) in GONE
        assert outcome(lambda: os.rename(kv / "private.tmp", kv / "private")) in GONE
        assert outcome(lambda: os.close(writer)) in GONE
        assert outcome(lambda: os.close(private)) in GONE

        worker.mend()
        wait_for(lambda: reads(kv / "object", content), 20, "the object")
        assert os.pread(reader, 4096, 0) == content[:4096]
        os.close(reader)
        assert not (kv / "private").exists()
        for name in ("written", "anew", "again"):
            (mount.path / name).write_bytes(content)
            assert (mount.path / name).read_bytes() == content
        publish(mount, "private", content)
        assert (kv / "private").read_bytes() == content
        assert mount.stop() == 0


@pytest.mark.parametrize("how", ["server", "worker"])
def test_the_end_of_a_mount_whose_store_is_silent(tmp_path: Path, how: str) -> None:
    """SIGTERM ends it in time, with writes under way to a worker on another machine."""
    content = os.urandom(1 << 20)
    with (
        relayed(tmp_path / "pool") as (url, worker, server),
        mounted(tmp_path, "--client-hostname", "elsewhere", "-o", "shutdown_timeout=4", url) as mount,
    ):
        files = [os.open(mount.path / f"f{index}", os.O_RDWR | os.O_CREAT) for index in range(4)]
        for fd in files:
            os.write(fd, content)
            assert os.pread(fd, 10, 0) == content[:10]
        if how == "server":
            server.send_signal(signal.SIGSTOP)
        else:
            worker.hold()
        try:
            with ThreadPoolExecutor(len(files)) as pool:
                # The first two are taken, the third waits for them.
                waiting = [pool.submit(outcome, partial(write_on, fd, content)) for fd in files]
                wait_for(lambda: any(future.running() for future in waiting), 10, "a writer")
                time.sleep(0.3)
                began_s = time.monotonic()
                assert mount.stop(timeout_s=60) == 0
                assert time.monotonic() - began_s < 10
                for future in waiting:
                    future.result(20)
        finally:
            server.send_signal(signal.SIGCONT)
            worker.mend()
            for fd in files:
                outcome(partial(os.close, fd))
