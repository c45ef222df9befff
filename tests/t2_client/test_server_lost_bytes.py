"""A block file that has become too short: bytes that were lost are an error, zeros that nobody wrote are zeros."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path

import pytest
import trio

from curvfs.api import CurvineFileSystem, open_filesystem
from curvfs.errors import BlockNotFound
from curvfs.server.behaviour import BEHAVIOURS, Behaviour
from curvfs.server.service import Server, run_server
from curvfs.units import MIB


@asynccontextmanager
async def client_of(directory: Path, behaviour: Behaviour, hostname: str) -> AsyncIterator[CurvineFileSystem]:
    """A client of a server that runs as long as it does."""
    async with trio.open_nursery() as nursery:
        run = partial(run_server, str(directory), master_port=0, worker_port=0, hostname="here", behaviour=behaviour)
        server: Server = await nursery.start(run)
        async with open_filesystem(server.url, client_hostname=hostname, block_size="1MB") as fs:
            yield fs
        nursery.cancel_scope.cancel()


async def content_of(fs: CurvineFileSystem, path: str) -> bytes:
    async with await fs.open(path) as reader:
        return await reader.read_at(0, 4 * MIB)


@pytest.mark.parametrize("hostname", ["here", "elsewhere"], ids=["local", "remote"])
@pytest.mark.parametrize("behaviour", BEHAVIOURS.values(), ids=list(BEHAVIOURS))
async def test_lost_bytes_are_an_error_and_holes_are_zeros(tmp_path: Path, behaviour: Behaviour, hostname: str) -> None:
    whole, grown = os.urandom(MIB + 300_000), os.urandom(1000)
    async with client_of(tmp_path, behaviour, hostname) as fs:
        for path, content in (("/whole", whole), ("/grown", grown)):
            async with await fs.create(path) as writer:
                await writer.write(content)
        await fs.truncate("/grown", 500)
        await fs.truncate("/grown", 3 * MIB)
        assert await content_of(fs, "/grown") == grown[:500] + bytes(3 * MIB - 500)
    async with client_of(tmp_path, behaviour, hostname) as fs:  # what is a hole is known after a restart, too
        assert await content_of(fs, "/grown") == grown[:500] + bytes(3 * MIB - 500)
        assert await content_of(fs, "/whole") == whole
        for path in (tmp_path / "data").rglob("blk_*"):
            if path.stat().st_size:
                os.truncate(path, path.stat().st_size - 1)
        for name in ("/whole", "/grown"):
            with pytest.raises(BlockNotFound):
                await content_of(fs, name)
