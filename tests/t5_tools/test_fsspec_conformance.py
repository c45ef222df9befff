"""fsspec's own conformance suite on the ``curvine`` file system, over a real server."""

from __future__ import annotations

import uuid
from collections.abc import Iterator

import fsspec
import pytest
from fsspec.implementations.local import LocalFileSystem
from fsspec.tests import abstract

from curvfs.fsspec import CurvineFsspec
from tests.t5_tools.conftest import ServerProcess


@pytest.fixture(scope="module")
def connected(server: ServerProcess) -> Iterator[CurvineFsspec]:
    masters = server.url.removeprefix("curvine://").rstrip("/")
    fs = fsspec.filesystem("curvine", masters=masters, skip_instance_cache=True)
    yield fs
    fs.client.close()


class CurvineFixtures(abstract.AbstractFixtures):  # type: ignore[misc]
    @pytest.fixture
    def fs(self, connected: CurvineFsspec) -> CurvineFsspec:
        return connected

    @pytest.fixture
    def fs_path(self, connected: CurvineFsspec) -> str:
        path = f"/{uuid.uuid4().hex}"
        connected.mkdir(path)
        return path

    @pytest.fixture
    def local_fs(self) -> LocalFileSystem:
        return LocalFileSystem(auto_mkdir=True)


class TestCopy(abstract.AbstractCopyTests, CurvineFixtures):  # type: ignore[misc]
    pass


class TestGet(abstract.AbstractGetTests, CurvineFixtures):  # type: ignore[misc]
    pass


class TestPut(abstract.AbstractPutTests, CurvineFixtures):  # type: ignore[misc]
    pass


class TestOpen(abstract.AbstractOpenTests, CurvineFixtures):  # type: ignore[misc]
    pass


class TestPipe(abstract.AbstractPipeTests, CurvineFixtures):  # type: ignore[misc]
    pass
