"""Pools and mounts for the engines' tests: real servers and mounts, each a process of this checkout's environment."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
CURVFS = ROOT / ".venv" / "bin" / "curvfs"
SOURCES = ROOT / ".engines" / "sources"


class Server:
    """An embedded server that can be killed and started again on the same directory."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._ports = ("0", "0")
        self.start()

    def start(self) -> None:
        command = [CURVFS, "serve", self.directory, "--master-port", self._ports[0], "--worker-port", self._ports[1]]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        words = [word.strip(".,") for word in line.split() if word.startswith("curvine://")]
        assert words, f"curvfs serve said {line!r}"
        self.url = words[0].rstrip("/")
        self._ports = (self.url.rpartition(":")[2].partition("/")[0], "0")

    def kill(self, number: int = signal.SIGKILL) -> None:
        self.process.send_signal(number)
        self.process.wait(20)
        if self.process.stdout is not None:
            self.process.stdout.close()


@contextmanager
def served(directory: Path) -> Iterator[Server]:
    server = Server(directory)
    try:
        yield server
    finally:
        if server.process.poll() is None:
            server.kill(signal.SIGTERM)


@contextmanager
def mounted(where: Path, *arguments: str | Path) -> Iterator[Path]:
    """A mount at ``where`` of what the arguments say (``--embedded DIR`` or a URL); gone afterwards in any case."""
    skip_without_fuse()
    where.mkdir(parents=True, exist_ok=True)
    subprocess.run([CURVFS, "mount", *arguments, where, "--background"], check=True, timeout=60)
    try:
        yield where
    finally:
        subprocess.run(["fusermount3", "-u", where], check=False, timeout=60)
        if os.path.ismount(where):
            subprocess.run(["umount", "-l", where], check=True, timeout=60)


@contextmanager
def nothing_left(names: str) -> Iterator[None]:
    """Removes from /dev/shm what comes there meanwhile under such names and nobody uses in the end."""
    memory = Path("/dev/shm")
    before = set(memory.glob(names))
    try:
        yield
    finally:
        used = "".join(_maps(process) for process in Path("/proc").glob("[0-9]*"))
        for left in set(memory.glob(names)) - before:
            if str(left) not in used:
                left.unlink(missing_ok=True)


def _maps(process: Path) -> str:
    try:
        return (process / "maps").read_text()
    except OSError:  # it has ended
        return ""


def skip_without_fuse() -> None:
    if os.geteuid() != 0 or not os.access("/dev/fuse", os.R_OK | os.W_OK):
        pytest.skip("real mounts are not tested: they need root and /dev/fuse")
