"""Links and peers that are slow or gone without a word, workers that refuse: right bytes, or a typed error in time.

Half-open connections are real ones: a server in a network name space whose answers, its last included, go nowhere.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import trio
import trio.lowlevel

from curvfs.api import FileLock, FileStatus, LockKind, NewFile, open_filesystem
from curvfs.errors import KINDS, CurvfsError, DeadlineExceeded, RemoteError, TransportError
from curvfs.server.service import Server
from curvfs.units import KIB, MIB
from curvfs.wire.codes import RequestStatus, RpcCode
from curvfs.world import Stream, World
from tests.t2_client.fakes import Fake, Refuse, located
from tests.t2_client.test_client_faults_worker import (
    CONTENT,
    ReadingWorker,
    WritingWorker,
    fail,
    last_commit,
    raising,
    read,
    reading,
    writing,
)
from tests.t2_client.test_client_more_calls import relay

SHORT = {"connect_timeout": "500ms", "rpc_timeout": "500ms", "data_timeout": "500ms", "retry_max": "500ms"}

# --------------------------------------------------------------------------------------------------------------- slow


def delayed(worker: Fake, code: RpcCode, delay_s: float) -> None:
    """Every answer comes late."""
    at_once = worker.handle[code]

    async def later(request: Any, message: Any) -> Any:
        await trio.sleep(delay_s)
        return at_once(request, message)

    worker.handle[code] = later


async def test_a_slow_worker_is_waited_for_while_it_answers() -> None:
    """The deadline is one exchange's, not the file's."""
    worker = ReadingWorker()
    delayed(worker, RpcCode.READ_BLOCK, 0.06)
    async with reading(worker, data_timeout_s=0.5) as (fs, master):
        started = time.monotonic()
        assert await read(fs) == CONTENT
        assert time.monotonic() - started > 0.5
        assert len(master.requests(RpcCode.GET_BLOCK_LOCATIONS)) == worker.opens == 1


async def test_a_worker_that_is_too_slow_is_left_for_another() -> None:
    slow, good = ReadingWorker(), ReadingWorker()
    delayed(slow, RpcCode.READ_BLOCK, 0.6)
    async with reading(slow, good) as (fs, _):
        for _ in range(20):
            assert await read(fs) == CONTENT
            if slow.opens:
                break
        assert slow.opens == 1


async def test_a_slow_writing_worker() -> None:
    worker = WritingWorker()
    delayed(worker, RpcCode.WRITE_BLOCK, 0.1)
    async with writing(worker) as (fs, master):
        async with await fs.create("/f") as writer:
            for start in range(0, len(CONTENT), 100 * KIB):
                await writer.write(CONTENT[start : start + 100 * KIB])
        assert worker.content == CONTENT
        assert last_commit(master)[0] == len(CONTENT)


async def test_a_writing_worker_that_is_too_slow_is_left_out() -> None:
    slow, good = WritingWorker(), WritingWorker()
    async with writing(slow, good) as (fs, master):
        async with await fs.create("/f", replicas=2) as writer:
            await writer.write(CONTENT[:1000])
            delayed(slow, RpcCode.WRITE_BLOCK, 5)
            await writer.write(CONTENT[1000:])
        assert good.content == CONTENT
        ((_, _, workers),) = last_commit(master)[1]
        assert workers == [2]


async def test_frames_that_come_byte_by_byte() -> None:
    """Segments end wherever the network likes."""
    worker = ReadingWorker()
    async with worker.serving(), trio.open_nursery() as nursery:
        near = await World.real().net.listen("127.0.0.1", 0)

        async def drip(source: Stream, target: Stream, sizes: Iterator[int]) -> None:
            buffer = memoryview(bytearray(8 * KIB))
            try:
                while count := await source.recv_into(buffer[: next(sizes)]):
                    await target.send(buffer[:count])
                    await trio.lowlevel.checkpoint()
            except CurvfsError:
                pass
            finally:
                with trio.CancelScope(shield=True):
                    await source.aclose()
                    await target.aclose()

        async def relay() -> None:
            while True:
                stream = await near.accept()
                far = await World.real().net.connect("127.0.0.1", worker.port)
                sizes = itertools.cycle((1, 2, 21, 7, 4096, 3, 1, 8192))
                nursery.start_soon(drip, stream, far, sizes)
                nursery.start_soon(drip, far, stream, sizes)

        nursery.start_soon(relay)
        master = Fake({RpcCode.GET_BLOCK_LOCATIONS: lambda request, message: located(len(CONTENT), through)})
        through = Fake(port=near.port)
        async with master.serving(), open_filesystem(master.url, chunk_size="64KB") as fs:
            assert await read(fs) == CONTENT
        nursery.cancel_scope.cancel()
        with trio.CancelScope(shield=True):
            await near.aclose()


# ------------------------------------------------------------------------------------------------------ error replies


@pytest.mark.parametrize("kind", [*KINDS, 4711])
async def test_a_workers_error_reply_of_each_kind(kind: int) -> None:
    """On a read another replica goes on; without one, and on a write, the error is typed and nothing is committed."""
    refusal = Refuse(kind, "made up")
    bad, good = ReadingWorker(raising(refusal, 2)), ReadingWorker()
    async with reading(bad, good) as (fs, _):
        for _ in range(20):
            assert await read(fs) == CONTENT
            if bad.opens:
                break
    async with reading(bad) as (fs, _):
        with pytest.raises(RemoteError, match="block 16793993216") as caught:
            await read(fs)
        # Kinds 4 to 6 are read as IO, unknown ones as Common (1.7).
        decoded = 1 if kind in (4, 5, 6) else kind if kind in KINDS else 10000
        expected = KINDS[decoded][1]
        assert isinstance(caught.value, expected) and caught.value.kind == decoded
    worker = WritingWorker(fail(refusal, at=RequestStatus.RUNNING, number=2))
    async with writing(worker) as (fs, master):
        with pytest.raises(RemoteError) as caught:
            async with await fs.create("/f") as writer:
                await writer.write(CONTENT)
                await writer.close()
        assert isinstance(caught.value, expected) and caught.value.kind == decoded
        assert last_commit(master) == (0, [])


async def test_a_file_with_a_short_block_before_its_last() -> None:
    """What a master says of it is told, not taken for a file (4.4)."""

    def refuse(request: Any, message: Any) -> Any:
        raise Refuse(10000, "[master] ERROR: block status abnormal, block 16793993216(fs.rs:1)")

    master = Fake({RpcCode.GET_BLOCK_LOCATIONS: refuse})
    async with master.serving(), open_filesystem(master.url) as fs:
        for call in (fs.open, fs.locate, fs.open_extents):
            with pytest.raises(RemoteError, match=r"/f .*block status abnormal"):
                await call("/f")  # type: ignore[operator]


# -------------------------------------------------------------------------------------------------------- lost answers

MUTATIONS = (
    RpcCode.MKDIR,
    RpcCode.CREATE_FILE,
    RpcCode.OPEN_FILE,
    RpcCode.ADD_BLOCK,
    RpcCode.COMPLETE_FILE,
    RpcCode.RENAME,
    RpcCode.DELETE,
    RpcCode.SET_ATTR,
    RpcCode.SYMLINK,
    RpcCode.LINK,
    RpcCode.RESIZE_FILE,
    RpcCode.ASSIGN_WORKER,
    RpcCode.SET_LOCK,
    RpcCode.CREATE_FILES_BATCH,
    RpcCode.ADD_BLOCKS_BATCH,
    RpcCode.COMPLETE_FILES_BATCH,
)


async def test_every_change_whose_answer_is_lost_is_made_once(server: Server) -> None:
    """A real master executes each kind of call and its first answer is dropped: a commit as well as a rename."""
    async with (
        relay(server, drop=set(MUTATIONS)) as (url, dropped),
        open_filesystem(url, client_hostname="elsewhere", block_size="1MB", retry_min_sleep="10ms") as fs,
    ):
        await fs.mkdir("/d")
        async with await fs.create("/d/f", unique_name=True) as writer:
            await writer.write(CONTENT * 4)
        await fs.truncate("/d/f", 6 * MIB)
        async with await fs.open_for_write("/d/f") as writer:
            await writer.write_at(b"in a hole", 5 * MIB)
        await fs.set_attr("/d/f", mode=0o600)
        await fs.symlink("f", "/d/s")
        await fs.link("/d/f", "/d/l")
        await fs.rename("/d/s", "/d/t")
        await fs.delete("/d/l")
        async with fs.hold_lock("/d/f", FileLock(LockKind.WRITE, owner_id=1)):
            pass
        done = await fs.write_files([NewFile("/d/a", b"1"), NewFile("/d/b", b"2")], unique_names=True)
        assert all(isinstance(entry, FileStatus) for entry in done), done
        assert dropped == set(MUTATIONS)
        assert [entry.name for entry in await fs.list("/d")] == ["a", "b", "f", "t"]
        expected = bytearray((CONTENT * 4).ljust(6 * MIB, b"\0"))
        expected[5 * MIB : 5 * MIB + 9] = b"in a hole"
        async with await fs.open("/d/f") as reader:
            assert await reader.read_at(0, 10 * MIB) == expected
        found = await fs.stat("/d/f")
        assert (found.mode, found.nlink, found.is_complete) == (0o600, 1, True)


# ---------------------------------------------------------------------------------------------------------- half-open


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True)


@pytest.fixture
def island() -> Iterator[tuple[str, str, Callable[[], None], Callable[[], None]]]:
    """A network name space of its own: its name, its address, and how to cut it off and to connect it again. Cut off,
    nothing comes out of it, not even a reset."""
    number = os.getpid() % 16384 * 4
    name, veth = f"curvfs-{os.getpid()}", f"cv{os.getpid()}"
    near, far = (f"198.18.{(number + i) >> 8 & 255}.{number + i & 255}" for i in (1, 2))
    try:
        try:
            ip("netns", "add", name)
            ip("link", "add", veth, "type", "veth", "peer", "name", "eth", "netns", name)
            ip("addr", "add", f"{near}/30", "dev", veth)
            ip("link", "set", veth, "up")
            ip("-n", name, "addr", "add", f"{far}/30", "dev", "eth")
            for device in ("lo", "eth"):
                ip("-n", name, "link", "set", device, "up")
            ip("netns", "exec", name, "true")
        except (OSError, subprocess.CalledProcessError) as error:
            pytest.skip(f"no network name spaces here: {error}")
        yield (
            name,
            far,
            lambda: ip("-n", name, "route", "add", "blackhole", f"{near}/32"),
            lambda: ip("-n", name, "route", "del", "blackhole", f"{near}/32"),
        )
    finally:
        with contextlib.suppress(OSError, subprocess.CalledProcessError):
            ip("netns", "del", name)


async def test_a_server_that_is_gone_without_a_word(tmp_path: Path, island: Any) -> None:
    name, address, cut, connect = island
    pool, ports = tmp_path / "pool", ["0", "0"]

    def start() -> tuple[subprocess.Popen[str], str]:
        command = [
            *("ip", "netns", "exec", name, sys.executable, "-m", "curvfs.server", str(pool), "--host", address),
            *("--master-port", ports[0], "--worker-port", ports[1], "--hostname", "island"),
        ]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert process.stdout is not None
        return process, process.stdout.readline().split()[-1]

    def kill(process: subprocess.Popen[str]) -> None:
        process.send_signal(signal.SIGKILL)
        process.communicate()

    process, url = start()
    try:
        record = json.loads((pool / "server.json").read_text())
        ports[:] = str(record["master_port"]), str(record["worker_port"])
        content = os.urandom(3 * MIB)
        async with open_filesystem(url, block_size="1MB", chunk_size="64KB", **SHORT) as fs:
            async with await fs.create("/f") as writer:
                await writer.write(content)
            reader = await fs.open("/f")
            assert await reader.read_at(0, 1000) == content[:1000]
            torn = await fs.create("/torn")
            await torn.write(content[: MIB // 2])
            cut()
            kill(process)
            for call in (lambda: reader.read_at(0, 3 * MIB), lambda: torn.write(content), lambda: fs.stat("/f")):
                started = time.monotonic()
                with pytest.raises(TransportError):
                    await call()  # type: ignore[no-untyped-call]
                assert time.monotonic() - started < 8
            with pytest.raises(DeadlineExceeded):
                await fs.stat("/f")
            connect()
            process, _ = start()
            assert await reader.read_at(0, 4 * MIB) == content
            await reader.aclose()
            with pytest.raises(CurvfsError):
                await torn.close()
            await torn.abort()
            assert (await fs.stat("/torn")).length_bytes == 0
            async with await fs.create("/torn", overwrite=True) as writer:
                await writer.write(content)
            async with await fs.open("/torn") as again:
                assert await again.read_at(0, 4 * MIB) == content
    finally:
        kill(process)
