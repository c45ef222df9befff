"""The server as a process: ready line, signals, kill -9, left-overs, and sentences for what cannot be."""

from __future__ import annotations

import json
import os
import signal
import socket
import sqlite3
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path

import pytest
import trio
from raw_client import BLOCK, Raw, RawBlock, commit_of, connected

from curvfs.errors import CurvfsError
from curvfs.server.service import run_server
from curvfs.wire.codes import RpcCode
from curvfs.wire.messages import pb


class Process:
    """A ``python -m curvfs.server`` over one directory."""

    def __init__(self, directory: Path, *options: str, umask: int = -1) -> None:
        self.directory = directory
        self.running = subprocess.Popen(
            [
                sys.executable,
                "-m",
                "curvfs.server",
                str(directory),
                "--master-port",
                "0",
                "--worker-port",
                "0",
                *options,
            ],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            umask=umask,
        )

    def ready(self) -> str:
        """The URL, once the server says it."""
        assert self.running.stdout is not None
        return self.running.stdout.readline().strip()

    @property
    def record(self) -> dict[str, int]:
        found: dict[str, int] = json.loads((self.directory / "server.json").read_text())
        return found

    def end(self, number: signal.Signals = signal.SIGKILL) -> tuple[int, str, str]:
        """Exit code and what else it said, after a signal."""
        self.running.send_signal(number)
        out, err = self.running.communicate(timeout=20)
        return self.running.returncode, out, err


@contextmanager
def serving(directory: Path, *options: str, umask: int = -1) -> Iterator[Process]:
    process = Process(directory, *options, umask=umask)
    try:
        assert process.ready().startswith("curvine://")
        yield process
    finally:
        if process.running.poll() is None:
            process.running.kill()
        process.running.communicate(timeout=20)


def fails(directory: Path, *options: str) -> tuple[int, str]:
    """Exit code and the one line that a server says that cannot start."""
    done = subprocess.run(
        [sys.executable, "-m", "curvfs.server", str(directory), *options], capture_output=True, text=True, timeout=30
    )
    assert done.stdout == "" and done.returncode != 0
    assert done.stderr.count("\n") == 1 and "Traceback" not in done.stderr, done.stderr
    return done.returncode, done.stderr


@asynccontextmanager
async def master_of(process: Process) -> AsyncIterator[Raw]:
    async with connected("127.0.0.1", process.record["master_port"]) as raw:
        yield raw


@asynccontextmanager
async def worker_of(process: Process) -> AsyncIterator[Raw]:
    async with connected("127.0.0.1", process.record["worker_port"]) as raw:
        yield raw


async def put(master: Raw, worker: Raw, path: str, content: bytes) -> None:
    made = await master.create(path)
    located = await master.add_block(path, inode_id=made.id)
    stream = RawBlock(worker, located.block)
    await stream.open_write()
    await stream.write(content)
    await stream.complete(len(content))
    await master.complete(path, len(content), [commit_of(located, len(content))], inode_id=made.id)


async def get(master: Raw, worker: Raw, path: str) -> bytes:
    (located,) = (await master.locate(path)).block_locs
    stream = RawBlock(worker, located.block)
    await stream.open_read(located.block.block_size, chunk=BLOCK)
    content = await stream.read()
    await stream.complete_read()
    return content


def block_files(directory: Path) -> set[str]:
    return {path.name for path in (directory / "data").rglob("blk_*")}


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_one_line_when_ready_and_exit_0_when_told_to_stop(tmp_path: Path, number: signal.Signals) -> None:
    process = Process(tmp_path / "deep" / "pool")
    url = process.ready()
    record = process.record
    assert url == record["url"] == f"curvine://127.0.0.1:{record['master_port']}/"
    assert record["pid"] == process.running.pid and record["host"] == "127.0.0.1"
    with socket.create_connection(("127.0.0.1", record["master_port"])) as idle:
        started = time.monotonic()
        code, out, err = process.end(number)
        assert time.monotonic() - started < 5
        idle.settimeout(5)
        assert idle.recv(1) == b""
    assert (code, out) == (0, "") and "Traceback" not in err


def test_modes_do_not_depend_on_the_umask(tmp_path: Path) -> None:
    for umask in (0, 0o177):
        directory = tmp_path / f"{umask:o}"
        with serving(directory, umask=umask):
            for path in directory.rglob("*"):
                assert path.stat().st_mode & 0o777 == (0o700 if path.is_dir() else 0o600), path
            assert directory.stat().st_mode & 0o777 == 0o700


def test_listening_elsewhere_is_said_to_be_open_to_all(tmp_path: Path) -> None:
    process = Process(tmp_path, "--host", "0.0.0.0")
    assert process.ready().startswith("curvine://")
    code, _, err = process.end(signal.SIGTERM)
    assert code == 0 and "no authentication" in err


def test_a_second_server_on_the_directory(tmp_path: Path) -> None:
    with serving(tmp_path) as first:
        code, said = fails(tmp_path, "--master-port", "0", "--worker-port", "0")
        assert code == 75 and f"Another server serves {tmp_path}" in said and str(first.record["url"]) in said


def test_a_port_that_is_taken(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        code, said = fails(tmp_path, "--master-port", str(port), "--worker-port", "0")
        assert code == 3 and f"Port {port} on 127.0.0.1 is taken" in said and "--master-port" in said
        code, said = fails(tmp_path, "--master-port", "0", "--worker-port", str(port))
        assert code == 3 and "--worker-port" in said
        with serving(tmp_path, "--master-port", str(port), "--any-free-port") as process:
            assert process.record["master_port"] != port


@pytest.mark.parametrize(
    "options", [("--master-port", "70000"), ("--worker-port", "-1"), ("--capacity", "much"), ("--capacity", "0")]
)
def test_options_that_mean_nothing(tmp_path: Path, options: tuple[str, str]) -> None:
    code, _ = fails(tmp_path, *options)
    assert code == 2


def test_directories_that_cannot_be_served(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    code, said = fails(tmp_path / "file")
    assert code == 2 and "is not a directory" in said
    code, said = fails(tmp_path / "file" / "below")
    assert code == 2 and "is not a directory" in said
    code, said = fails(Path("/proc/curvfs"))
    assert code == 3 and "cannot be used to store anything" in said
    broken = tmp_path / "broken"
    broken.mkdir()
    (broken / "meta.db").write_bytes(b"no database" * 1000)
    code, said = fails(broken)
    assert code == 3 and "cannot be used" in said and "meta.db" in said
    code, said = fails(tmp_path / "host", "--host", "203.0.113.1", "--master-port", "0")
    assert code == 3 and "Cannot listen on 203.0.113.1" in said


def test_metadata_of_another_format(tmp_path: Path) -> None:
    with serving(tmp_path):
        pass
    with sqlite3.connect(tmp_path / "meta.db") as db:
        db.execute("PRAGMA user_version = 99")
    db.close()
    code, said = fails(tmp_path)
    assert code == 3 and "format 99" in said


def test_a_data_directory_of_another_cluster(tmp_path: Path) -> None:
    with serving(tmp_path):
        pass
    version = tmp_path / "data" / "curvine" / "version"
    whole = version.read_text()
    version.write_text(whole.replace('"curvine"', '"other"'))
    assert "belongs to the cluster 'other'" in fails(tmp_path)[1]
    version.write_text(whole[:20])
    assert "cannot be understood" in fails(tmp_path)[1]


async def test_everything_survives_kill_9(tmp_path: Path) -> None:
    with serving(tmp_path) as process:
        version = (tmp_path / "data" / "curvine" / "version").read_text()
        async with master_of(process) as master, worker_of(process) as worker:
            for index in range(20):
                await put(master, worker, f"/d/{index}", bytes([index]) * (index * 1000 + 1))
            unfinished = await master.create("/open")
            located = await master.add_block("/open", inode_id=unfinished.id)
            stream = RawBlock(worker, located.block)
            await stream.open_write()
            await stream.write(b"x" * 70_000)
            process.end()
    with serving(tmp_path) as process:
        assert (tmp_path / "data" / "curvine" / "version").read_text() == version
        async with master_of(process) as master, worker_of(process) as worker:
            for index in range(20):
                assert await get(master, worker, f"/d/{index}") == bytes([index]) * (index * 1000 + 1)
            found = await master.stat("/open")
            assert (found.len, found.is_complete) == (0, False)
            stream = RawBlock(worker, located.block)
            await stream.complete(70_000)
            await master.complete("/open", 70_000, [commit_of(located, 70_000)], inode_id=unfinished.id)
            assert await get(master, worker, "/open") == b"x" * 70_000


async def test_kill_9_in_the_middle_of_everything(tmp_path: Path) -> None:
    """Writers as fast as they can, killed at three moments: what was answered is there, whole, and nothing that
    was not asked for; no block file is left over."""
    answered: dict[str, bytes] = {}
    deleted: set[str] = set()

    async def write_until_killed(process: Process, name: str) -> None:
        try:
            async with master_of(process) as master, worker_of(process) as worker:
                for index in range(100_000):
                    path = f"/{name}/{index}"
                    content = os.urandom(3) * (1 + index * 700 % 30_000)
                    await put(master, worker, path, content)
                    answered[path] = content
                    if index % 3 == 0:
                        deleted.add(path)
                        await master.delete(path)
        except (CurvfsError, AssertionError):
            pass

    for life in range(3):
        with serving(tmp_path) as process:
            async with trio.open_nursery() as nursery:
                for writer in range(2):
                    nursery.start_soon(write_until_killed, process, f"{life}-{writer}")
                await trio.sleep(0.15 + 0.1 * life)
                process.running.kill()
                nursery.start_soon(trio.to_thread.run_sync, process.running.wait)
    assert len(answered) > 20
    with serving(tmp_path) as process:
        async with master_of(process) as master, worker_of(process) as worker:
            for path, content in answered.items():
                if path not in deleted:
                    assert await get(master, worker, path) == content, path
            owned = set()
            for life in range(3):
                for writer in range(2):
                    for found in await _listed(master, f"/{life}-{writer}"):
                        owned |= {f"blk_{one.block.id}" for one in (await master.locate(found)).block_locs}
            assert await figures(master) == (block_bytes(tmp_path), 0)
        assert block_files(tmp_path) <= owned


async def test_used_bytes_under_load_and_after_kill_9(tmp_path: Path) -> None:
    """Writers that complete, cancel, delete, rewrite, hang up and fail at once: what is used is what lies there."""

    async def load(process: Process, name: str) -> None:
        async with master_of(process) as master:
            for index in range(24):
                path = f"/{name}/{index}"
                async with worker_of(process) as worker:
                    await put(master, worker, path, b"x" * (100 + 3000 * index))
                    stream = RawBlock(worker, (await master.locate(path)).block_locs[0].block)
                    if index % 6:
                        await stream.open_write()
                        await stream.write(b"y" * 90_000, index)
                    if index % 6 == 2:
                        await stream.cancel()
                    elif index % 6 == 3:
                        await stream.complete(90_000 + index)
                    elif index % 6 == 4:
                        with pytest.raises(CurvfsError):
                            await stream.complete(1)
                    if index % 4 == 1:
                        await master.delete(path)

    with serving(tmp_path) as process:
        async with master_of(process) as master:
            async with trio.open_nursery() as nursery:
                for writer in range(3):
                    nursery.start_soon(load, process, str(writer))
            with trio.fail_after(10):
                while await figures(master) != (block_bytes(tmp_path), 0):
                    await trio.sleep(0.02)
            async with worker_of(process) as worker:
                located = await master.add_block("/0/open", inode_id=(await master.create("/0/open")).id)
                stream = RawBlock(worker, located.block)
                await stream.open_write()
                await stream.write(b"x" * 1000)
                assert await figures(master) == (block_bytes(tmp_path), BLOCK - 1000)
                process.end()
    with serving(tmp_path) as process:
        async with master_of(process) as master:
            assert await figures(master) == (block_bytes(tmp_path), 0)
            await master.delete("/0", recursive=True)
            await master.delete("/1", recursive=True)
            await master.delete("/2", recursive=True)
            with trio.fail_after(10):
                while await figures(master) != (0, 0) or block_files(tmp_path):
                    await trio.sleep(0.02)


async def figures(master: Raw) -> tuple[int, int]:
    """Bytes used and reserved."""
    info = await master.call(RpcCode.GET_FILESYSTEM_INFO)
    return int(info.fs_used), int(info.reserved_bytes)


def block_bytes(directory: Path) -> int:
    """Sum of the lengths of all block files."""
    return sum(path.stat().st_size for path in (directory / "data").rglob("blk_*"))


async def _listed(master: Raw, path: str) -> list[str]:
    if not (await master.call(RpcCode.EXISTS, pb.ExistsRequest(path=path))).exists:
        return []
    found = await master.call(RpcCode.LIST_STATUS, pb.ListStatusRequest(path=path))
    return [one.path for one in found.statuses]


async def test_block_files_that_nobody_owns_are_removed_at_start(tmp_path: Path) -> None:
    with serving(tmp_path) as process:
        async with master_of(process) as master, worker_of(process) as worker:
            await put(master, worker, "/kept", b"kept")
            await put(master, worker, "/rewritten", b"first")
            located = (await master.locate("/rewritten")).block_locs[0]
            stream = RawBlock(worker, located.block)
            await stream.open_write()
            await stream.write(b"second")
            process.end()
    root = tmp_path / "data" / "curvine"
    (root / "staging" / "blk_5").write_bytes(b"x")
    (root / "staging" / "copy_6").write_bytes(b"x")
    (root / "active" / "b0" / "b3" / "blk_7").write_bytes(b"x")
    (root / "active" / "b0" / "b3" / "README").write_bytes(b"not ours")
    assert (root / "staging" / f"blk_{located.block.id}").exists()
    with serving(tmp_path) as process:
        async with master_of(process) as master, worker_of(process) as worker:
            assert await get(master, worker, "/kept") == b"kept"
            assert await get(master, worker, "/rewritten") == b"first"
    assert list((root / "staging").iterdir()) == []
    assert not (root / "active" / "b0" / "b3" / "blk_7").exists()
    assert (root / "active" / "b0" / "b3" / "README").exists()


async def test_a_directory_that_was_being_deleted_when_killed_goes_at_the_next_start(tmp_path: Path) -> None:
    with serving(tmp_path) as process:
        async with master_of(process) as master, worker_of(process) as worker:
            for index in range(40):
                await put(master, worker, f"/d/{index % 4}/{index}", b"x")
            await put(master, worker, "/kept", b"x")
            await master.delete("/d", recursive=True)
            process.end()
    with serving(tmp_path) as process:
        async with master_of(process) as master:
            with trio.fail_after(10):
                while (info := await master.call(RpcCode.GET_FILESYSTEM_INFO)).inode_file_num > 1:
                    await trio.sleep(0.02)
            assert (info.inode_dir_num, info.block_num) == (0, 1)
            with trio.fail_after(10):
                while len(block_files(tmp_path)) > 1:
                    await trio.sleep(0.02)


async def test_stopping_in_this_process_gives_everything_back(tmp_path: Path) -> None:
    for _ in range(2):
        async with trio.open_nursery() as nursery:
            server = await nursery.start(
                lambda task_status: run_server(str(tmp_path), master_port=0, worker_port=0, task_status=task_status)
            )
            async with connected(server.host, server.master_port) as raw:
                await raw.create("/f")
            nursery.cancel_scope.cancel()
    assert not (tmp_path / "meta.db-wal").exists()
