"""What the tests of the tools share, where a fixture does not do."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass


def wait_for(condition: Callable[[], bool], timeout_s: float = 30.0, what: str = "it") -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"{what} did not come within {timeout_s:g} s"
        time.sleep(0.01)


@dataclass(frozen=True)
class Done:
    """What a command did."""

    code: int
    out: str
    err: str


def run(*words: object) -> Done:
    """Run a command to its end, as a process."""
    done = subprocess.run(
        [sys.executable, "-P", "-m", "tools", *map(str, words)], capture_output=True, text=True, timeout=90, check=False
    )
    return Done(done.returncode, done.stdout, done.stderr)


def started(*words: object) -> subprocess.Popen[str]:
    """Start a command; whoever does so waits for its end."""
    return subprocess.Popen(
        # Run in the background, we may have been told to ignore Ctrl-C; what is tested is not.
        ["env", "--default-signal=INT", sys.executable, "-P", "-m", "tools", *map(str, words)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def why_no_mount() -> str | None:
    """Why real mounts cannot be had here, or None."""
    if os.geteuid() != 0:
        return "mounting in the tests needs root"
    try:
        os.close(os.open("/dev/fuse", os.O_RDWR))
    except OSError as error:
        return f"/dev/fuse cannot be opened: {error.strerror}"
    return None
