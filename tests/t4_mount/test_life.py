"""The life of a mount: ready, ended by every signal, killed and cleared, in the background, with nothing left."""

from __future__ import annotations

import errno
import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from tests.t4_mount.mounts import (
    curvfs,
    mounted,
    mounted_at,
    refused,
    server_pid,
    skip_without_fuse,
    start_mount,
    wait_for,
)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_signals_unmount_cleanly(tmp_path: Path, number: signal.Signals) -> None:
    with mounted(tmp_path, "--embedded", tmp_path / "pool") as mount:
        (mount.path / "a").write_bytes(b"content")
        assert mount.stop(number) == 0
        assert mounted_at(mount.path) == []
        assert os.listdir(mount.path) == []
    with mounted(tmp_path, "--embedded", tmp_path / "pool") as mount:
        assert (mount.path / "a").read_bytes() == b"content"


def test_a_mount_started_with_nohup_outlives_the_terminal(tmp_path: Path) -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        mount = start_mount(tmp_path, "--embedded", tmp_path / "pool")
    finally:
        signal.signal(signal.SIGHUP, before)
    try:
        mount.process.send_signal(signal.SIGHUP)
        (mount.kv / "a.tmp").write_bytes(b"content")
        time.sleep(0.5)
        os.rename(mount.kv / "a.tmp", mount.kv / "a")
        assert mount.stop(signal.SIGTERM) == 0
    finally:
        mount.remove()


def test_signal_while_a_copy_runs(tmp_path: Path) -> None:
    with mounted(tmp_path, "--embedded", tmp_path / "pool") as mount:
        with open(mount.path / "synced", "wb") as file:
            file.write(b"safe")
            file.flush()
            os.fsync(file.fileno())
        command = ["dd", "if=/dev/zero", f"of={mount.kv}/big.tmp", "bs=1M", "count=4000"]
        copy = subprocess.Popen(command, stderr=subprocess.DEVNULL)
        time.sleep(0.5)
        started = time.monotonic()
        assert mount.stop() == 0
        assert time.monotonic() - started < 10
        assert mounted_at(mount.path) == []
        copy.wait(20)
    with mounted(tmp_path, "--embedded", tmp_path / "pool") as mount:
        assert (mount.path / "synced").read_bytes() == b"safe"
        assert os.listdir(mount.kv) == []


def test_unmounted_from_outside(tmp_path: Path) -> None:
    for command in (["umount"], ["fusermount3", "-u"]):
        with mounted(tmp_path, "--embedded", tmp_path / "pool") as mount:
            (mount.kv / "closed").write_bytes(b"content")
            subprocess.run([*command, str(mount.path)], check=True)
            assert mount.process.wait(10) == 0
        with mounted(tmp_path, "--embedded", tmp_path / "pool") as mount:
            assert (mount.kv / "closed").read_bytes() == b"content"


def test_the_umount_command(tmp_path: Path) -> None:
    with mounted(tmp_path, "--embedded", tmp_path / "pool") as mount:
        (mount.path / "a").write_bytes(b"content")
        with open(mount.path / "a"):
            done = curvfs("umount", mount.path)
            assert done.returncode != 0
            assert f"({os.getpid()})" in done.stderr and "--lazy" in done.stderr, done.stderr
            assert mounted_at(mount.path) == ["fuse.curvfs"]
        done = curvfs("umount", mount.path)
        assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
        assert mount.process.wait(10) == 0
        assert mounted_at(mount.path) == []
        done = curvfs("umount", mount.path)
        assert done.returncode == 2
        assert "is not a curvfs mount" in done.stderr


def test_lazy_umount(tmp_path: Path) -> None:
    with mounted(tmp_path, "--embedded", tmp_path / "pool") as mount:
        (mount.path / "a").write_bytes(b"content")
        with open(mount.path / "a", "rb", buffering=0) as file:
            assert curvfs("umount", "--lazy", mount.path).returncode == 0
            assert mounted_at(mount.path) == []
            assert file.read() == b"content"
        assert mount.process.wait(10) == 0


def test_killed_and_mounted_again(tmp_path: Path) -> None:
    with mounted(tmp_path, "--embedded", tmp_path / "pool") as mount:
        (mount.path / "a").write_bytes(b"content")
        (mount.kv / "o.tmp").write_bytes(b"published")
        os.rename(mount.kv / "o.tmp", mount.kv / "o")
        (mount.kv / "half.tmp").write_bytes(b"never published")
        mount.process.kill()
        mount.process.wait()
        refused(errno.ENOTCONN, lambda: os.listdir(mount.path))
        assert mounted_at(mount.path) == ["fuse.curvfs"]
        with mounted(tmp_path, "--embedded", tmp_path / "pool") as again:
            assert mounted_at(again.path) == ["fuse.curvfs"]
            assert (again.path / "a").read_bytes() == b"content"
            assert (again.kv / "o").read_bytes() == b"published"
            assert os.listdir(again.kv) == ["o"]
            refused(errno.EPERM, lambda: os.open(again.kv / "o", os.O_WRONLY))


def test_killed_with_readers_and_writers(tmp_path: Path) -> None:
    """Whoever waits for the mount gets an error, at once."""
    with mounted(tmp_path, "--embedded", tmp_path / "pool") as mount:
        ended = threading.Event()

        def work() -> None:
            try:
                while True:
                    (mount.path / "w").write_bytes(os.urandom(100_000))
                    (mount.path / "w").read_bytes()
            except OSError:
                ended.set()

        thread = threading.Thread(target=work)
        thread.start()
        time.sleep(0.5)
        mount.process.kill()
        assert ended.wait(5)
        thread.join()


def test_background(tmp_path: Path) -> None:
    skip_without_fuse()
    path = tmp_path / "mnt"
    path.mkdir()
    try:
        done = curvfs("mount", "--embedded", tmp_path / "pool", "--background", "--log-file", tmp_path / "log", path)
        assert done.returncode == 0, done.stderr
        assert done.stdout.startswith("Mounted curvine://") and "pid" in done.stdout
        pid = int(done.stdout.rpartition("pid ")[2].rstrip(").\n"))
        (path / "a").write_bytes(b"content")
        second = curvfs("mount", "--embedded", tmp_path / "pool", "--background", path)
        assert second.returncode == 2
        assert "is mounted already" in second.stderr and "umount" in second.stderr
        assert (path / "a").read_bytes() == b"content"
        os.kill(pid, signal.SIGTERM)
        wait_for(lambda: not Path(f"/proc/{pid}").exists(), what="the end of the process")
        assert mounted_at(path) == []
        assert "Mounted" in (tmp_path / "log").read_text()
        assert (tmp_path / "log").stat().st_mode & 0o777 == 0o600
    finally:
        while mounted_at(path):
            subprocess.run(["umount", "-l", str(path)], check=True)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGHUP])
def test_signals_end_a_mount_in_the_background(tmp_path: Path, number: signal.Signals) -> None:
    skip_without_fuse()
    path = tmp_path / "mnt"
    path.mkdir()
    try:
        done = curvfs("mount", "--embedded", tmp_path / "pool", "--background", "--json", path)
        assert done.returncode == 0, done.stderr
        told = json.loads(done.stdout)
        assert told["url"].startswith("curvine://") and told["mountpoint"] == str(path)
        pid = told["pid"]
        (path / "kv" / "o").write_bytes(b"closed")
        os.kill(pid, number)
        wait_for(lambda: not Path(f"/proc/{pid}").exists(), 20, "the end of the process")
        assert mounted_at(path) == []
        with mounted(tmp_path, "--embedded", tmp_path / "pool") as again:
            assert (again.kv / "o").read_bytes() == b"closed"
            ended = curvfs("umount", "--json", again.path)
            assert json.loads(ended.stdout) == {"mountpoint": str(path), "unmounted": True}
    finally:
        while mounted_at(path):
            subprocess.run(["umount", "-l", str(path)], check=True)


def test_thirty_cycles_in_one_process_leave_nothing() -> None:
    """``make soak`` runs 1,000 of them."""
    skip_without_fuse()
    command = [sys.executable, "-m", "tests.t4_mount.cycles", "--number", "30"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=110, cwd=Path(__file__).parents[2])
    assert done.returncode == 0, done.stdout + done.stderr


def test_ten_cycles_leave_nothing(tmp_path: Path) -> None:
    pool = tmp_path / "pool"
    with mounted(tmp_path, "--embedded", pool, name="keeper"):
        for number in range(10):
            with mounted(tmp_path, "--embedded", pool) as mount:
                (mount.kv / "o.tmp").write_bytes(b"%d" % number)
                os.rename(mount.kv / "o.tmp", mount.kv / f"o{number}")
                assert len(os.listdir(mount.kv)) == number + 1
                descriptors = len(os.listdir(f"/proc/{mount.process.pid}/fd"))
                for _ in range(20):
                    (mount.kv / "o0").read_bytes()
                assert len(os.listdir(f"/proc/{mount.process.pid}/fd")) <= descriptors + 3
                assert mount.stop() == 0
            assert mounted_at(mount.path) == []
        with mounted(tmp_path, "--embedded", pool) as mount:
            assert not (mount.kv / ".staging").exists()


def test_a_second_process_attaches_to_the_running_server(tmp_path: Path) -> None:
    pool = tmp_path / "pool"
    with mounted(tmp_path, "--embedded", pool, name="a") as first:
        pid = server_pid(pool)
        with mounted(tmp_path, "--embedded", pool, name="b") as second:
            assert server_pid(pool) == pid
            (first.path / "x").write_bytes(b"content")
            assert (second.path / "x").read_bytes() == b"content"


def test_by_url_and_below_a_directory(tmp_path: Path) -> None:
    with mounted(tmp_path, "--embedded", tmp_path / "pool", name="a") as first:
        url = json.loads((tmp_path / "pool" / "server.json").read_text())["url"].rstrip("/")
        with mounted(tmp_path, f"{url}/deep/down", name="b") as second:
            (second.path / "x").write_bytes(b"content")
            assert sorted(os.listdir(second.path)) == ["kv", "x"]
            assert (first.path / "deep" / "down" / "x").read_bytes() == b"content"
            # Below a KV prefix, whatever directory is mounted, its rules hold.
        (first.kv / "team").mkdir()
        with mounted(tmp_path, f"{url}/kv/team", name="b") as second:
            (second.path / "o.tmp").write_bytes(b"content")
            os.rename(second.path / "o.tmp", second.path / "o")
            for path in (second.path / "o", first.kv / "team" / "o"):
                refused(errno.EPERM, lambda path=path: os.open(path, os.O_WRONLY))
            assert os.listdir(second.path) == ["o"]


def test_read_only(tmp_path: Path) -> None:
    with mounted(tmp_path, "--embedded", tmp_path / "pool", name="a") as first:
        (first.path / "x").write_bytes(b"content")
        with mounted(tmp_path, "--embedded", tmp_path / "pool", "--read-only", name="b") as second:
            assert (second.path / "x").read_bytes() == b"content"
            refused(errno.EROFS, lambda: (second.path / "x").write_bytes(b""))
            refused(errno.EROFS, (second.path / "d").mkdir)
            refused(errno.EROFS, (second.path / "x").unlink)


def test_a_start_that_is_interrupted_leaves_nothing(tmp_path: Path) -> None:
    mount = start_mount(tmp_path, "--embedded", tmp_path / "pool")
    mount.remove()
    assert mounted_at(mount.path) == []
