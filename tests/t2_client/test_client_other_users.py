"""A client that runs as an ordinary user beside a worker of root's: its files are there, and closed to it."""

from __future__ import annotations

import hashlib
import json
import os
import stat
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import trio

from curvfs.api import open_filesystem
from curvfs.server.service import Server
from curvfs.units import MIB
from tests.t2_client.conftest import WORKER_HOSTNAME

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="only root can become somebody else")

NOBODY = 65534

#: Everything is imported before the rights are dropped: the interpreter may lie where others cannot go.
CLIENT = f"""
import encodings.idna, hashlib, json, os, sys
from curvfs.api import LocalExtent, SyncFileSystem
from curvfs.errors import CurvfsError
url, path = sys.argv[1:]
os.setgroups([])
os.setresgid({NOBODY}, {NOBODY}, {NOBODY})
os.setresuid({NOBODY}, {NOBODY}, {NOBODY})
try:
    open(path, "rb").close()
    raise SystemExit("the block file can be read, so nothing is tried here")
except PermissionError:
    pass
told = {{}}
with SyncFileSystem.connect(url, client_hostname={WORKER_HOSTNAME!r}, block_size="1MB") as fs:
    with fs.open("/f") as reader:
        told["read"] = hashlib.sha256(reader.read_at(0, reader.length_bytes)).hexdigest()
    with fs.open_extents("/f", direct=True) as extents:
        told["reasons"] = sorted({{getattr(extent, "reason", "local") for extent in extents.extents}})
    with fs.create("/g") as writer:
        writer.write(b"g" * (2 << 20))
    with fs.create_extent("/x", 10) as extent:
        told["extent"] = extent.remote_reason
        extent.write(b"x" * 10, 0)
        extent.commit()
    told["stats"] = fs.stats()
print(json.dumps(told))
"""


@pytest.mark.parametrize("closed", ["everything", "block files"])
async def test_block_files_of_another_user_are_read_over_the_wire(server: Server, closed: str) -> None:
    content = os.urandom(2 * MIB + 7)
    async with open_filesystem(server.url, client_hostname=WORKER_HOSTNAME, block_size="1MB") as fs:
        async with await fs.create("/f") as writer:
            await writer.write(content)
        paths = sorted(Path(server.directory).glob("data/*/active/*/*/blk_*"))
        data = paths[0].parents[3]
        # With open ways to the block files, and to what says whose they are, these alone are closed.
        opened = [*paths[0].parents, data / "staging", data / "version"] if closed == "block files" else []
        with others_may_enter(opened):
            told = await as_nobody(server.url, str(paths[0]))
        assert told["read"] == hashlib.sha256(content).hexdigest()
        assert told["reasons"] == ["no_permission"]
        assert told["extent"] == "refused"
        stats = told["stats"]
        assert stats["short_circuit_refused_no_permission"] >= 3 + 3 + 2 + 1  # read, extents, written blocks, extent
        assert stats["bytes_read_remote"] >= len(content) and "bytes_read_local" not in stats
        assert stats["bytes_written_remote"] == 2 * MIB + 10 and "bytes_written_local" not in stats
        for path, expected in (("/g", b"g" * 2 * MIB), ("/x", b"x" * 10)):
            async with await fs.open(path) as reader:
                assert await reader.read_at(0, 4 * MIB) == expected


@contextmanager
def others_may_enter(paths: Sequence[Path]) -> Iterator[None]:
    modes = [(path, stat.S_IMODE(path.stat().st_mode)) for path in paths]
    changed = [(path, mode) for path, mode in modes if mode & 0o005 != 0o005]
    try:
        for path, mode in changed:
            path.chmod(mode | 0o005)
        yield
    finally:
        for path, mode in changed:
            path.chmod(mode)


async def as_nobody(*arguments: str) -> Any:
    done = await trio.run_process(
        [sys.executable, "-c", CLIENT, *arguments], capture_stdout=True, stderr=subprocess.STDOUT, check=False
    )
    assert done.returncode == 0, done.stdout.decode()
    return json.loads(done.stdout.decode().splitlines()[-1])
