"""Runs of the engines' own tests, from their releases."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

CALM_TIMEOUT_S = 180.0


def ran(
    what: str,
    options: Sequence[str],
    *,
    where: Path,
    environment: dict[str, str],
    timeout_s: float,
    tell: Callable[[str], None],
) -> dict[str, int]:
    """How many passed, failed and so on, by pytest's words, in a process of this interpreter that works in ``where``;
    told, too, of ``what``.

    Some of these tests wait a fixed time, which a busy machine may not keep: what failed is asked once more, alone and
    when the machine does little else, if that comes soon, and must pass then; that this was needed is told.
    """
    command = [sys.executable, "-m", "pytest", "-q", "-o", f"cache_dir={where / 'cache'}", *options]
    counts: dict[str, int] = {}
    for again in ([], ["--last-failed", "--last-failed-no-failures", "none"]):
        if again:
            _wait_for_calm()
        ended = subprocess.run(
            [*command, *again],
            cwd=where,
            env={**os.environ, "PYTHONDONTWRITEBYTECODE": "1", **environment},
            capture_output=True,
            text=True,
            timeout=timeout_s,
            check=False,
        )
        said = ended.stdout.strip().splitlines() or [ended.stderr[-2000:]]
        told = {word.rstrip("s"): int(number) for number, word in re.findall(r"(\d+) (\w+)", said[-1])}
        if not counts:
            counts = told
            tell(f"{what}: {said[-1].strip('= ')}")
        if told.get("passed", 0) and told.get("failed", 0) == 0:
            return counts
        failed = re.findall(r"^FAILED (\S+)", ended.stdout, re.MULTILINE)
        tell(f"asked once more, alone, because it failed at a load of {os.getloadavg()[0]:.0f}: {', '.join(failed)}")
    raise AssertionError(ended.stdout[-6000:] + ended.stderr[-2000:])


def _wait_for_calm() -> None:
    until_s = time.monotonic() + CALM_TIMEOUT_S
    while os.getloadavg()[0] > (os.cpu_count() or 1) and time.monotonic() < until_s:
        time.sleep(5)
