"""Fixtures of the client and server tests: an embedded server in this process."""

from __future__ import annotations

from collections.abc import AsyncIterator
from functools import partial
from pathlib import Path

import pytest
import trio

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
