"""LMCache's own contract tests of L2 adapters, from its release, on both of ours."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from places import SOURCES, Server

TESTS = SOURCES / "lmcache-0.5.6" / "tests"
NOT_OURS = "test_store_completion_is_delayed_by_bandwidth"
WHY = f"{NOT_OURS} is left out: it measures the bandwidth that LMCache's mock pretends to have"


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("kind", "where"),
    [
        ("plugin", "curvine"),
        ("native", "directory"),
        pytest.param("plugin", "directory", marks=pytest.mark.full),
        pytest.param("native", "curvine", marks=pytest.mark.full),
    ],
)
def test_lmcaches_contract(kind: str, where: str, server: Server, tmp_path: Path, tell: Callable[[str], None]) -> None:
    tell(WHY)
    file = "v1/distributed/test_mock_l2_adapter.py"
    (tmp_path / "tests").symlink_to(TESTS)  # away from the package's own folder
    pool = f"file://{tmp_path}" if where == "directory" else f"{server.url}/contract-{kind}"
    environ = {
        **os.environ,
        "CONTRACT": kind,
        "CONTRACT_POOL": pool,
        "LMCACHE_TRACK_USAGE": "false",
        "PYTHONPATH": str(Path(__file__).parent),
        "PYTHONDONTWRITEBYTECODE": "1",
    }
    options = ["-q", "-p", "contract", "-p", "no:cacheprovider", "-k", f"not {NOT_OURS}"]
    run = subprocess.run(
        [sys.executable, "-m", "pytest", *options, f"tests/{file}"],
        cwd=tmp_path,
        env=environ,
        capture_output=True,
        text=True,
        timeout=580,
        check=False,
    )
    assert run.returncode == 0, run.stdout[-4000:] + run.stderr[-4000:]
    assert re.search(r"\b43 passed, 1 deselected", run.stdout), run.stdout[-1000:]
    tell(f"LMCache's contract, {kind} adapter, {where}: {run.stdout.strip().splitlines()[-1].strip('= ')}")
