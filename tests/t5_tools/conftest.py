"""A cluster for the commands: an embedded server in a process of its own, and a fresh directory of it for each test."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from curvfs.api import SyncFileSystem
from tools.__main__ import main

COMMAND = (sys.executable, "-P", "-m", "tools")


def wait_for(condition: Callable[[], bool], timeout_s: float = 30.0, what: str = "it") -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"{what} did not come within {timeout_s:g} s"
        time.sleep(0.002)


class ServerProcess:
    """``curvfs.server`` over a directory. ``url`` ends in a slash."""

    def __init__(self, directory: Path, *options: str) -> None:
        self.directory = directory
        self._process = subprocess.Popen(
            [
                sys.executable,
                "-m",
                "curvfs.server",
                str(directory),
                *("--master-port", "0", "--worker-port", "0"),
                *options,
            ],
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        assert self._process.stdout is not None
        self.url = self._process.stdout.readline().split()[-1]

    def send(self, number: int) -> None:
        self._process.send_signal(number)

    def end(self) -> None:
        self._process.send_signal(signal.SIGCONT)
        self._process.kill()
        self._process.communicate()


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    process = ServerProcess(tmp_path_factory.mktemp("pool"))
    yield process
    process.end()


@dataclass(frozen=True)
class Place:
    """A fresh directory of a cluster; plain paths of commands are below it."""

    url: str
    fs: SyncFileSystem
    server: ServerProcess

    def write(self, path: str, content: bytes = b"") -> None:
        with self.fs.create(path, overwrite=True) as writer:
            writer.write(content)

    def read(self, path: str) -> bytes:
        with self.fs.open(path) as reader:
            return reader.read_at(0, reader.length_bytes)

    def names(self, path: str = "/") -> list[str]:
        return [status.name for status in self.fs.list(path)]


def make_place(server: ServerProcess, conf: Path) -> Place:
    """``conf`` becomes the cluster file that has this place as its root."""
    root = f"t-{uuid.uuid4().hex}"
    with SyncFileSystem.connect(server.url) as whole:
        whole.mkdir(f"/{root}")
    masters = server.url.removeprefix("curvine://").rstrip("/")
    host, _, port = masters.rpartition(":")
    conf.write_text(
        f'[client]\nmaster_addrs = [{{ hostname = "{host}", port = {port} }}]\nblock_size = "1MB"\n'
        f'[curvfs]\nroot = "/{root}"\n'
    )
    return Place(server.url + root, SyncFileSystem.connect(server.url + root, block_size="1MB"), server)


@pytest.fixture
def place(server: ServerProcess, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Place]:
    conf = tmp_path / "curvine-cluster.toml"
    found = make_place(server, conf)
    monkeypatch.setenv("CURVINE_CONF_FILE", str(conf))
    yield found
    found.fs.close()


@dataclass(frozen=True)
class Done:
    """What a command did. ``documents``: stdout as one JSON object a line."""

    code: int
    out: str
    err: str

    @property
    def documents(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.out.splitlines()]


Curvfs = Callable[..., Done]


@pytest.fixture
def curvfs(capfd: pytest.CaptureFixture[str]) -> Curvfs:
    """Runs a command in this process."""

    def run(*words: str | Path) -> Done:
        capfd.readouterr()
        code = main([str(word) for word in words])
        sys.stdout.flush()
        sys.stdout.buffer.flush()
        captured = capfd.readouterr()
        assert "Traceback" not in captured.err
        assert code == 0 or captured.err.startswith("curvfs: "), captured.err
        return Done(code, captured.out, captured.err)

    return run
