"""LMCache's own tests of its file back ends, from its release, with their temporary directories on our mount."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from places import SOURCES
from suites import ran

TESTS = SOURCES / "lmcache-0.5.6" / "tests"
FILES = (
    "v1/storage_backend/test_fs_connector.py",
    "v1/storage_backend/test_fs_native_connector.py",
    "v1/storage_backend/test_local_disk_backend.py",
    "v1/distributed/test_fs_l2_adapter_keys.py",
    "v1/distributed/test_fs_l2_adapter_delete.py",
)


@pytest.mark.full
@pytest.mark.timeout(1500)
@pytest.mark.parametrize("place", ["kv", "plain"])
def test_lmcaches_tests_of_files(place: str, mount: Path, tmp_path: Path, tell: Callable[[str], None]) -> None:
    """All 93 pass, inside the KV prefix as well as outside."""
    temporary = mount / place / "lmcache-tests"
    temporary.mkdir(parents=True)
    (tmp_path / "tests").symlink_to(TESTS)
    environment = {"TMPDIR": str(temporary), "LMCACHE_TRACK_USAGE": "false"}
    files = [f"tests/{file}" for file in FILES]
    side = "inside" if place == "kv" else "outside"
    what = f"LMCache's tests of its file back ends, on the mount, {side} its KV prefix"
    counts = ran(what, files, where=tmp_path, environment=environment, timeout_s=580, tell=tell)
    assert counts["passed"] + counts.get("failed", 0) == 93
