"""Runs of a driver of an engine's own code: stored by a process that is then killed, read by another."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any


class Run:
    """What a driver printed, and its log."""

    def __init__(self, printed: str, log: Path) -> None:
        self.log = log.read_text(errors="replace")
        lines = [line for line in printed.splitlines() if line.startswith("{")]
        assert lines, f"nothing was printed; the log ends: {self.log[-3000:]}"
        self.answer: dict[str, Any] = json.loads(lines[-1])


def stored_and_killed(driver: Path, configuration: dict[str, Any], tmp_path: Path) -> Run:
    """Run ``store``, and kill it once it says that everything is there."""
    path, log = _written(configuration, tmp_path, "store")
    with log.open("w") as errors:
        process = subprocess.Popen(
            [sys.executable, driver, "store", path], stdout=subprocess.PIPE, stderr=errors, text=True
        )
        assert process.stdout is not None
        try:
            printed = ""
            for line in process.stdout:
                printed += line
                if line.startswith("{"):
                    break
        finally:
            process.send_signal(signal.SIGKILL)
            process.wait()
            process.stdout.close()
    return Run(printed, log)


def read(driver: Path, what: str, configuration: dict[str, Any], tmp_path: Path) -> Run:
    """Run ``retrieve`` or ``load`` to its end."""
    path, log = _written(configuration, tmp_path, what)
    with log.open("w") as errors:
        run = subprocess.run(
            [sys.executable, driver, what, path],
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            timeout=120,
            check=False,
        )
    return Run(run.stdout, log)


def _written(configuration: dict[str, Any], tmp_path: Path, what: str) -> tuple[Path, Path]:
    path = tmp_path / f"{what}.json"
    path.write_text(json.dumps(configuration))
    return path, tmp_path / f"{what}.log"
