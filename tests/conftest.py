"""What holds for the whole suite: nothing that a test started or mounted outlives the run."""

from __future__ import annotations

import os
import signal
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

_MARK = "CURVFS_TEST_RUN"
#: An embedded server stops a few seconds after its last user.
_GRACE_S = 20.0


@pytest.fixture(scope="session", autouse=True)
def nothing_is_left_behind(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Every process started by the tests carries a mark in its environment, however it detached itself."""
    mark = str(uuid.uuid4())
    os.environ[_MARK] = mark
    os.environ["CURVFS_RUN_DIR"] = str(tmp_path_factory.mktemp("run"))
    # Run under nohup or in the background of a script, what the tests start hears these two.
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    mounted = [point for point in _mountpoints() if point.startswith(str(tmp_path_factory.getbasetemp()))]
    deadline = time.monotonic() + _GRACE_S
    while (running := _marked_processes(mark)) and time.monotonic() < deadline:
        time.sleep(0.2)
    for pid in running:
        os.kill(pid, signal.SIGKILL)
    assert not mounted, f"tests left these mounted: {mounted}"
    assert not running, f"tests left these processes running: {list(running.values())}"


def _mountpoints() -> list[str]:
    lines = Path("/proc/self/mounts").read_text(encoding="utf-8").splitlines()
    return [line.split(" ")[1].encode().decode("unicode_escape") for line in lines]


def _marked_processes(mark: str) -> dict[int, str]:
    """pid -> command line of every other process of this test run."""
    found = {}
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit() or int(entry.name) == os.getpid():
            continue
        try:
            if f"{_MARK}={mark}".encode() in (entry / "environ").read_bytes().split(b"\0"):
                command = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
                if command:  # a zombie has none
                    found[int(entry.name)] = command
        except OSError:
            continue  # it has ended, or it is somebody else's
    return found
