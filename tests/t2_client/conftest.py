"""Fixtures of the client and server tests: an embedded server in this process."""

from __future__ import annotations

import os
import socket
import uuid
from collections.abc import AsyncIterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import pytest
import trio

from curvfs.api import CurvineFileSystem, open_filesystem
from curvfs.server.service import Server, run_server

#: What the worker of :func:`server` goes by; a client of the same name takes the short circuit.
WORKER_HOSTNAME = "worker-host"


@pytest.fixture
async def server(tmp_path: Path) -> AsyncIterator[Server]:
    """A server on free loopback ports over a fresh directory: ``.url``, ``.host``, ``.master_port``, ``.worker_port``,
    ``.hostname``, ``.directory``."""
    async with trio.open_nursery() as nursery:
        yield await nursery.start(
            partial(run_server, str(tmp_path / "pool"), master_port=0, worker_port=0, hostname=WORKER_HOSTNAME)
        )
        nursery.cancel_scope.cancel()


@dataclass(frozen=True)
class Target:
    """Where the client tests work: a server and a fresh directory in it."""

    url: str
    hostname: str


if os.environ.get("CURVFS_TEST_MASTER"):

    @pytest.fixture
    def whole() -> Target:
        """The server that ``CURVFS_TEST_MASTER=host:port`` names; its nearest worker goes by ``CURVFS_TEST_HOSTNAME``,
        which defaults to this machine's name."""
        hostname = os.environ.get("CURVFS_TEST_HOSTNAME", socket.gethostname())
        return Target(f"curvine://{os.environ['CURVFS_TEST_MASTER']}/", hostname)

else:

    @pytest.fixture
    def whole(server: Server) -> Target:
        """The embedded server of this test."""
        return Target(server.url, server.hostname)


@pytest.fixture
async def target(whole: Target) -> Target:
    """A fresh directory in the server that the tests are about."""
    root = f"curvfs-test-{uuid.uuid4().hex}"
    async with open_filesystem(whole.url) as client:
        await client.mkdir(f"/{root}")
    return Target(whole.url + root, whole.hostname)


@pytest.fixture(params=["remote", "local"])
async def fs(request: pytest.FixtureRequest, target: Target) -> AsyncIterator[CurvineFileSystem]:
    """A client with blocks of 1 MiB: one for which all is remote, and one that takes the short circuit."""
    hostname = target.hostname if request.param == "local" else "elsewhere"
    async with open_filesystem(target.url, client_hostname=hostname, block_size="1MB", chunk_size="256KB") as client:
        yield client
