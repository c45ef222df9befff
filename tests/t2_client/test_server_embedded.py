"""Attaching to a directory's server: from several processes, after crashes, and when it cannot start."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest
import trio

from curvfs.api import EmbeddedServer
from curvfs.errors import DeadlineExceeded, EnvironmentError_, UsageError
from curvfs.server import service
from curvfs.world import World

_ATTACH = """
import sys
from curvfs.api import EmbeddedServer
with EmbeddedServer.attach(sys.argv[1]) as server:
    print(server.url, flush=True)
    sys.stdin.read()
"""


def attacher(directory: Path) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", _ATTACH, str(directory)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )


def pid_of(directory: Path) -> int:
    return int(json.loads((directory / "server.json").read_text())["pid"])


def servers_of(directory: Path) -> list[int]:
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                arguments = (entry / "cmdline").read_bytes().split(b"\0")
            except OSError:
                continue
            if b"curvfs.server" in arguments and str(directory).encode() in arguments:
                found.append(int(entry.name))
    return found


def wait_until(condition: object, timeout_s: float = 15) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():  # type: ignore[operator]
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.02)


def test_many_processes_attach_at_once_to_one_server(tmp_path: Path) -> None:
    directory = tmp_path / "pool"
    processes = [attacher(directory) for _ in range(4)]
    try:
        urls = {process.stdout.readline() for process in processes if process.stdout}
        assert len(urls) == 1 and urls.pop().startswith("curvine://127.0.0.1:")
        wait_until(lambda: len(servers_of(directory)) == 1)
        processes[0].communicate("")
        processes[1].kill()
        time.sleep(service._UNUSED_GRACE_S + 1.5)
        assert servers_of(directory) == [pid_of(directory)], "somebody is still attached"
    finally:
        for process in processes:
            if process.poll() is None:
                process.communicate("")
            elif process.stdout and process.stdin:
                process.stdout.close()
                process.stdin.close()
            process.wait()
    wait_until(lambda: not servers_of(directory))


def listening(port: int) -> socket.socket:
    """A listener where a server was killed: its sockets may outlive its command line for a moment."""
    found: list[socket.socket] = []

    def bound() -> bool:
        with suppress(OSError):
            found.append(socket.create_server(("127.0.0.1", port)))
        return bool(found)

    wait_until(bound)
    return found[0]


def test_the_server_comes_back_where_it_was(tmp_path: Path) -> None:
    with EmbeddedServer.attach(str(tmp_path)) as server:
        url, pid = server.url, pid_of(tmp_path)
        assert server.ensure_running() == url and pid_of(tmp_path) == pid
        os.kill(pid, signal.SIGKILL)
        wait_until(lambda: pid not in servers_of(tmp_path))
        assert server.ensure_running() == url, "on the same ports"
        assert pid_of(tmp_path) != pid
        os.kill(pid_of(tmp_path), signal.SIGKILL)
        wait_until(lambda: not servers_of(tmp_path))
    taken = int(url.rstrip("/").rpartition(":")[2])
    with listening(taken), EmbeddedServer.attach(str(tmp_path)) as server:
        assert server.url != url, "unless somebody has taken them"


def test_attaching_from_a_trio_task_and_by_another_name(tmp_path: Path) -> None:
    (tmp_path / "pool").mkdir()
    (tmp_path / "alias").symlink_to("pool")

    async def attach() -> EmbeddedServer:
        return EmbeddedServer.attach(str(tmp_path / "alias"), world=World.real())

    with trio.run(attach) as server, EmbeddedServer.attach(str(tmp_path / "pool")) as other:
        assert server.url == other.url


def test_a_server_that_somebody_runs_is_used(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "curvfs.server", str(tmp_path), "--master-port", "0", "--worker-port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as running:
        assert running.stdout is not None
        url = running.stdout.readline().strip()
        with EmbeddedServer.attach(str(tmp_path)) as server:
            assert server.url == url
        time.sleep(0.2)
        assert running.poll() is None
        running.terminate()
        assert running.wait(timeout=10) == 0


def test_directories_that_cannot_be_served_are_said_so(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match="is not a directory"):
        EmbeddedServer.attach(str(tmp_path / "file"))
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "meta.db").write_bytes(b"no database" * 1000)
    started = time.monotonic()
    with pytest.raises(EnvironmentError_, match=r"cannot start: .*meta\.db cannot be used"):
        EmbeddedServer.attach(str(tmp_path / "broken"))
    assert time.monotonic() - started < 5, "said at once, not after a timeout"


def test_a_server_that_hangs_is_said_so(tmp_path: Path) -> None:
    with EmbeddedServer.attach(str(tmp_path)) as server:
        pid = pid_of(tmp_path)
        os.kill(pid, signal.SIGSTOP)
        try:
            started = time.monotonic()
            with pytest.raises(DeadlineExceeded, match="does not answer"):
                server.ensure_running(timeout_s=1.0)
            assert time.monotonic() - started < 6
        finally:
            os.kill(pid, signal.SIGCONT)
        assert server.ensure_running() == server.url


def test_a_foreign_server_on_the_recorded_port_is_not_taken_for_ours(tmp_path: Path) -> None:
    with EmbeddedServer.attach(str(tmp_path / "a")) as one:
        record = json.loads((tmp_path / "a" / "server.json").read_text())
        (tmp_path / "b").mkdir()
        (tmp_path / "b" / "server.json").write_text(json.dumps(record))
        with EmbeddedServer.attach(str(tmp_path / "b")) as other:
            assert other.url != one.url
