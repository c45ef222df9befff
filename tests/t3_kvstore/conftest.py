"""Fixtures: places to keep objects."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.t3_kvstore.places import WORKER_HOSTNAME, Directory, Namespace, Place, serving


@pytest.fixture(scope="session")
def master(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, Path | None]]:
    """(host:port of a master, directory of its worker's blocks if that is here)."""
    given = os.environ.get("CURVFS_TEST_MASTER")
    if given:
        yield given, None
        return
    directory = tmp_path_factory.mktemp("server")
    with serving(directory) as address:
        yield address, directory


@pytest.fixture
def directory(tmp_path: Path) -> Iterator[Directory]:
    root = tmp_path / "pool"
    root.mkdir()
    place = Directory(root)
    yield place
    place.close()


@pytest.fixture(params=["directory", "curvine local", "curvine remote"])
def place(request: pytest.FixtureRequest) -> Iterator[Place]:
    """Every back end: what is asked of one is asked of all."""
    if request.param == "directory":
        yield request.getfixturevalue("directory")
        return
    address, blocks = request.getfixturevalue("master")
    hostname = WORKER_HOSTNAME if request.param == "curvine local" else "somewhere-else"
    namespace = Namespace(address, blocks, hostname)
    yield namespace
    namespace.close()
