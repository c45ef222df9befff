"""LMCache's own tests of its file back ends, from its release, with their temporary directories on our mount."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from places import SOURCES

TESTS = SOURCES / "lmcache-0.5.6" / "tests"
FILES = (
    "v1/storage_backend/test_fs_connector.py",
    "v1/storage_backend/test_fs_native_connector.py",
    "v1/storage_backend/test_local_disk_backend.py",
    "v1/distributed/test_fs_l2_adapter_keys.py",
    "v1/distributed/test_fs_l2_adapter_delete.py",
)


@pytest.mark.full
@pytest.mark.timeout(600)
@pytest.mark.parametrize("place", ["kv", "plain"])
def test_lmcaches_tests_of_files(place: str, mount: Path, tmp_path: Path) -> None:
    """All 93 pass, inside the KV prefix as well as outside."""
    temporary = mount / place / "lmcache-tests"
    temporary.mkdir(parents=True)
    (tmp_path / "tests").symlink_to(TESTS)
    run = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *(f"tests/{file}" for file in FILES)],
        cwd=tmp_path,
        env={**os.environ, "TMPDIR": str(temporary), "LMCACHE_TRACK_USAGE": "false", "PYTHONDONTWRITEBYTECODE": "1"},
        capture_output=True,
        text=True,
        timeout=580,
        check=False,
    )
    assert run.returncode == 0, run.stdout[-6000:] + run.stderr[-2000:]
    assert re.search(r"^93 passed", run.stdout, re.MULTILINE), run.stdout[-1000:]
