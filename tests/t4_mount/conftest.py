"""Fixtures: a pool with one mount for the tests of a file, and a fresh directory on it for each test."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.t4_mount.mounts import Mount, mounted


@pytest.fixture(scope="module")
def pool(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Directory of an embedded server."""
    return tmp_path_factory.mktemp("mount") / "pool"


@pytest.fixture(scope="module")
def mount(pool: Path) -> Iterator[Mount]:
    """One mount of the pool for a whole file of tests."""
    with mounted(pool.parent, "--embedded", pool, "-o", "op_timeout=10") as one:
        yield one


@pytest.fixture
def place(mount: Mount, request: pytest.FixtureRequest) -> Path:
    """A fresh ordinary directory on the mount."""
    directory = mount.path / f"t-{abs(hash(request.node.nodeid)):x}"
    directory.mkdir()
    return directory


@pytest.fixture
def kv(mount: Mount, request: pytest.FixtureRequest) -> Path:
    """A fresh directory below the mount's KV prefix."""
    directory = mount.kv / f"t-{abs(hash(request.node.nodeid)):x}"
    directory.mkdir()
    return directory
