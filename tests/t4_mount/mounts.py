"""Real mounts for the tests: started through the command line, always taken away again."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

COMMAND = [sys.executable, "-m", "tools"]
START_TIMEOUT_S = 30.0


def why_not() -> str | None:
    """Why real mounts cannot be had here, or None."""
    if os.geteuid() != 0:
        return "mounting in the tests needs root"
    try:
        os.close(os.open("/dev/fuse", os.O_RDWR))
    except OSError as error:
        return f"/dev/fuse cannot be opened: {error.strerror}"
    return None


def skip_without_fuse() -> None:
    reason = why_not()
    if reason is not None:
        pytest.skip(f"real mounts are not tested: {reason}")


def mounted_at(path: Path) -> list[str]:
    """File system types of what is mounted right there."""
    found = []
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        left, _, right = line.partition(" - ")
        if left.split(" ")[4] == str(path):
            found.append(right.split(" ")[0])
    return found


def curvfs(
    *arguments: str | Path, timeout_s: float = 60.0, environ: dict[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Run a command to its end."""
    return subprocess.run(
        [*COMMAND, *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
        env={**os.environ, **(environ or {})},
    )


def refused(number: int, action: Callable[[], object]) -> None:
    """The action fails with this errno."""
    with pytest.raises(OSError) as caught:
        action()
    assert caught.value.errno == number, os.strerror(caught.value.errno or 0)


def wait_for(condition: Callable[[], bool], timeout_s: float = 10.0, what: str = "it") -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"{what} did not come within {timeout_s:g} s"
        time.sleep(0.02)


class Mount:
    """One mount process in the foreground."""

    def __init__(self, path: Path, process: subprocess.Popen[str], log: Path) -> None:
        self.path = path
        self.process = process
        self.log = log

    @property
    def kv(self) -> Path:
        return self.path / "kv"

    def log_text(self) -> str:
        return self.log.read_text() if self.log.exists() else ""

    def stop(self, number: int = signal.SIGTERM, timeout_s: float = 20.0) -> int:
        """Send a signal and wait; the exit code."""
        self.process.send_signal(number)
        return self.process.wait(timeout_s)

    def remove(self) -> None:
        """Whatever happened, nothing is left."""
        if self.process.poll() is None:
            self.process.terminate()
            try:
                self.process.wait(20)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()
        if self.process.stdout is not None:
            self.process.stdout.close()
        while mounted_at(self.path):
            subprocess.run(["umount", "-l", str(self.path)], check=True)


def start_mount(
    directory: Path, *arguments: str | Path, name: str = "mnt", environ: dict[str, str] | None = None
) -> Mount:
    """Mount in the foreground below ``directory`` and wait until it says so."""
    skip_without_fuse()
    path = directory / name
    path.mkdir(exist_ok=True)
    log = directory / f"{name}.log"
    process = subprocess.Popen(
        [*COMMAND, "mount", "--log-file", str(log), *map(str, arguments), str(path)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, **(environ or {})},
    )
    mount = Mount(path, process, log)
    assert process.stdout is not None
    line = process.stdout.readline()
    if not line.startswith("Mounted "):
        rest = process.stdout.read()
        mount.remove()
        raise AssertionError(f"the mount did not start: {line}{rest}{mount.log_text()}")
    return mount


@contextmanager
def mounted(
    directory: Path, *arguments: str | Path, name: str = "mnt", environ: dict[str, str] | None = None
) -> Iterator[Mount]:
    mount = start_mount(directory, *arguments, name=name, environ=environ)
    try:
        yield mount
    finally:
        mount.remove()
        assert "nobody expected" not in mount.log_text(), mount.log_text()


def server_pid(pool: Path) -> int:
    return int(json.loads((pool / "server.json").read_text())["pid"])
