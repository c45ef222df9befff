"""Workers that die, lie or hang: correct bytes, or a typed error in time, and no file that reads wrong."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import trio

from curvfs.api import CurvineFileSystem, open_filesystem
from curvfs.errors import (
    BlockNotFound,
    ConnectionLost,
    CurvfsError,
    DeadlineExceeded,
    InProgress,
    NoAvailableWorker,
    OutOfSpace,
    RemoteError,
    RemoteProtocolError,
    TransportError,
    Unsupported,
)
from curvfs.units import KIB, MIB
from curvfs.wire.codes import RequestStatus, ResponseStatus, RpcCode
from curvfs.wire.frame import Frame
from curvfs.wire.messages import pb
from tests.t2_client.fakes import Close, Fake, Hang, Raw, Refuse, addresses, always, located, once, status

CHUNK = 64 * KIB
CONTENT = os.urandom(10 * CHUNK + 123)
BLOCK = 1001 << 24
IO, BLOCK_NOT_FOUND, COMMON = 1, 29, 10000


class ReadingWorker(Fake):
    """Serves CONTENT as its one block. ``spoil(frame number, data)`` may change, raise, or delay a Running reply."""

    def __init__(self, spoil: Callable[[int, bytes], bytes] = lambda number, data: data, **fields: Any) -> None:
        super().__init__(**fields)
        self.spoil = spoil
        self.handle[RpcCode.READ_BLOCK] = self.read
        #: Per stream: position, frames so far, bytes per frame.
        self._streams: dict[int, list[int]] = {}

    def read(self, request: Any, message: Any) -> Any:
        if request.status is RequestStatus.OPEN:
            self._streams[request.req_id] = [message.off, 0, message.chunk_size]
            return pb.BlockReadResponse(id=message.id, len=message.len)
        if request.status is RequestStatus.COMPLETE:
            return None
        stream = self._streams[request.req_id]
        if message is not None:
            stream[0] = message.offset
        if stream[0] >= len(CONTENT):
            raise Refuse(IO, "read past the end")
        data = CONTENT[stream[0] : stream[0] + stream[2]]
        stream[0] += len(data)
        stream[1] += 1
        return None, self.spoil(stream[1], data)

    @property
    def opens(self) -> int:
        return sum(request.status is RequestStatus.OPEN for request in self.requests(RpcCode.READ_BLOCK))


def raising(error: Exception, at: int) -> Callable[[int, bytes], bytes]:
    def spoil(number: int, data: bytes) -> bytes:
        if number == at:
            raise error
        return data

    return spoil


@asynccontextmanager
async def reading(
    *workers: Fake, answers: Any = None, **settings: Any
) -> AsyncIterator[tuple[CurvineFileSystem, Fake]]:
    """A client of a master that locates /f on these workers."""
    async with trio.open_nursery() as nursery:

        async def serve(fake: Fake, task_status: Any = trio.TASK_STATUS_IGNORED) -> None:
            async with fake.serving():
                task_status.started()
                await trio.sleep_forever()

        for worker in workers:
            await nursery.start(serve, worker)
        locate = always(located(len(CONTENT), *workers)) if answers is None else answers(*workers)
        master = Fake({RpcCode.GET_BLOCK_LOCATIONS: locate})
        await nursery.start(serve, master)
        chosen = {
            "chunk_size_bytes": CHUNK,
            "retry_max_s": 1.0,
            "data_timeout_s": 0.3,
            "connect_timeout_s": 1.0,
            "client_hostname": "here",
        }
        async with open_filesystem(master.url, **(chosen | settings)) as fs:
            yield fs, master
        nursery.cancel_scope.cancel()


async def read(fs: CurvineFileSystem) -> bytes:
    async with await fs.open("/f") as reader:
        return await reader.read_at(0, len(CONTENT))


async def read_until_opened(fs: CurvineFileSystem, worker: ReadingWorker) -> int:
    """Replicas are taken in random order: read until this one was asked; how often that was."""
    for count in range(1, 100):
        assert await read(fs) == CONTENT
        if worker.opens:
            return count
    raise AssertionError("it was never asked")


FAULTS = {
    "closes": Close(),
    "in-frame": Close(
        Frame.make(81, RequestStatus.RUNNING, ResponseStatus.SUCCESS, 1, 3, b"", b"x" * 100).encode()[:50]
    ),
    "other-stream": Raw(Frame.make(81, RequestStatus.RUNNING, ResponseStatus.SUCCESS, 1, 3, b"", b"x").encode()),
    "garbage": Raw(b"\0" * 4096),
    "hangs": Hang(),
    "refuses": Refuse(IO, "disk on fire"),
    "block-gone": Refuse(BLOCK_NOT_FOUND),
}


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("at", [1, 4])
async def test_another_replica_goes_on_where_the_first_failed(fault: str, at: int) -> None:
    bad, good = ReadingWorker(raising(FAULTS[fault], at)), ReadingWorker()
    async with reading(bad, good) as (fs, master):
        reads = await read_until_opened(fs, bad)
        assert len(master.requests(RpcCode.GET_BLOCK_LOCATIONS)) == reads
        assert fs.stats()["bytes_read_remote"] == reads * len(CONTENT)  # nothing was read twice


@pytest.mark.parametrize(
    ("fault", "expected"),
    [
        ("closes", ConnectionLost),
        ("in-frame", RemoteProtocolError),
        ("other-stream", RemoteProtocolError),
        ("hangs", DeadlineExceeded),
        ("refuses", RemoteError),
        ("block-gone", BlockNotFound),
    ],
)
async def test_no_replica_is_left(fault: str, expected: type[CurvfsError]) -> None:
    """The master is asked once more, then a typed error comes, in time."""
    worker = ReadingWorker(raising(FAULTS[fault], 2))
    worker.handle[RpcCode.READ_BLOCK] = _only_open_once(worker, FAULTS[fault])
    async with reading(worker) as (fs, master):
        started = time.monotonic()
        with pytest.raises(expected, match=r"block 16793993216"):
            await read(fs)
        assert time.monotonic() - started < 2
        assert len(master.requests(RpcCode.GET_BLOCK_LOCATIONS)) == 2


def _only_open_once(worker: ReadingWorker, fault: Exception) -> Any:
    opened = 0

    def handler(request: Any, message: Any) -> Any:
        nonlocal opened
        if request.status is RequestStatus.OPEN:
            opened += 1
            if opened > 1:
                raise fault
        return worker.read(request, message)

    return handler


async def test_a_short_frame_is_not_taken_for_the_end() -> None:
    bad = ReadingWorker(lambda number, data: data[:-1] if number == 3 else data)
    good = ReadingWorker()
    async with reading(bad, good) as (fs, _):
        await read_until_opened(fs, bad)
    async with reading(bad) as (fs, _):
        with pytest.raises(RemoteError, match="were due"):
            await read(fs)


async def test_a_worker_that_sends_more_than_the_block_holds() -> None:
    """v0.3.2-alpha does not stop at the logical length (section 12)."""
    worker = ReadingWorker()
    wanted = CONTENT[: len(CONTENT) - 1000]
    answers = lambda *workers: always(located(len(wanted), *workers))  # noqa: E731
    async with reading(worker, answers=answers) as (fs, _), await fs.open("/f") as reader:
        assert await reader.read_at(0, 10**9) == wanted
        assert await reader.read_at(5, 10) == CONTENT[5:15]


async def test_the_physical_end_of_an_extended_block() -> None:
    """v0.3.2-alpha tells the physical length and sends no zeros (8.4); a block with a pending resize reads as zeros
    there, any other one is damaged."""

    def locate(resized: bool) -> Any:
        def answer(*workers: Fake) -> Any:
            found = located(len(CONTENT) + 5000, *workers)
            if resized:
                found.blocks.block_locs[0].block.alloc_opts.len = len(CONTENT) + 5000
            return always(found)

        return answer

    class Old(ReadingWorker):
        def read(self, request: Any, message: Any) -> Any:
            answer = super().read(request, message)
            if request.status is RequestStatus.OPEN:
                answer.len = len(CONTENT)
            return answer

    async with reading(Old(), answers=locate(True)) as (fs, _), await fs.open("/f") as reader:
        assert await reader.read_at(0, 10**9) == CONTENT + bytes(5000)
        assert await reader.read_at(len(CONTENT) + 100, 10) == bytes(10)
    async with reading(Old(), answers=locate(False)) as (fs, _), await fs.open("/f") as reader:
        with pytest.raises(RemoteError, match="it has"):
            await reader.read_at(0, 10)


async def test_the_block_moved_to_another_worker() -> None:
    dead, alive = ReadingWorker(raising(Close(), 1)), ReadingWorker()

    def answers(*workers: Fake) -> Any:
        moved = located(len(CONTENT), alive)
        moved.blocks.block_locs[0].locs[0].worker_id = 9
        return once(located(len(CONTENT), dead), then=moved)

    async with reading(dead, alive, answers=answers) as (fs, _):
        assert await read(fs) == CONTENT


@pytest.mark.parametrize("change", ["other-file", "other-block", "shorter", "deleted"])
async def test_the_file_changed_while_it_was_read(change: str) -> None:
    worker = ReadingWorker(raising(Refuse(BLOCK_NOT_FOUND), 2))

    def answers(*workers: Fake) -> Any:
        now: Any = {
            "other-file": located(len(CONTENT), *workers, inode_id=77),
            "other-block": located(len(CONTENT), *workers, block_id=BLOCK + 1),
            "shorter": located(5, *workers),
            "deleted": Refuse(8),
        }[change]
        return once(located(len(CONTENT), *workers), then=now)

    async with reading(worker, answers=answers) as (fs, _):
        with pytest.raises(BlockNotFound, match="deleted or rewritten"):
            await read(fs)


async def test_lost_blocks_and_under_store_files() -> None:
    async with reading(answers=lambda: always(located(100))) as (fs, _), await fs.open("/f") as reader:
        with pytest.raises(NoAvailableWorker, match="replicas are lost"):
            await reader.read_at(0, 1)
    truncated = located(100)
    del truncated.blocks.block_locs[:]
    async with reading(answers=lambda: always(truncated)) as (fs, _), await fs.open("/f") as reader:
        with pytest.raises(NoAvailableWorker, match="no block holds"):
            await reader.read_at(0, 1)
    elsewhere = located(100)
    elsewhere.blocks.status.storage_policy.state = pb.STORAGE_STATE_PROTO_UFS
    async with reading(answers=lambda: always(elsewhere)) as (fs, _):
        with pytest.raises(Unsupported, match="under store"):
            await fs.open("/f")


async def test_a_pooled_connection_that_went_stale_costs_one_try() -> None:
    worker = ReadingWorker()
    async with reading(worker) as (fs, _):
        assert await read(fs) == CONTENT
        worker.replies_per_connection = 0
        assert worker.connections == 1
    worker = ReadingWorker(replies_per_connection=13)
    async with reading(worker, window=1) as (fs, _):
        for _ in range(3):
            assert await read(fs) == CONTENT
        assert fs.stats().get("replica_failures", 0) == 0
        assert worker.connections == 3


async def test_many_stale_streams_cost_one_try() -> None:
    worker = ReadingWorker()
    async with reading(worker) as (fs, _), await fs.open("/f") as reader:

        async def part(offset: int) -> None:
            assert await reader.read_at(offset, 1000) == CONTENT[offset : offset + 1000]

        async with trio.open_nursery() as nursery:
            for offset in range(0, 6 * CHUNK, CHUNK):
                nursery.start_soon(part, offset)
        assert len(reader._remote) >= 4
        for _, stream in reader._remote:
            await stream._channel._frames.aclose()
        await part(3 * CHUNK)
        assert not any(stream._channel._broken for _, stream in reader._remote)


# ------------------------------------------------------------------------------------------------------------ writing


class WritingWorker(Fake):
    """Takes one block; ``fault(frame number)`` may raise for a Running frame."""

    def __init__(self, fault: Callable[[RequestStatus, int], None] = lambda status, number: None) -> None:
        super().__init__()
        self.fault = fault
        self.handle[RpcCode.WRITE_BLOCK] = self.write
        self.content = bytearray()
        self.cancelled = self.completed = False
        self._number = 0
        self._position = 0

    def write(self, request: Any, message: Any) -> Any:
        if request.status is RequestStatus.RUNNING:
            self._number += 1
        self.fault(request.status, self._number)
        if request.status is RequestStatus.OPEN:
            self._position = message.off
            return pb.BlockWriteResponse(id=message.block.id, off=message.off, block_size=message.block_size)
        if request.status is RequestStatus.RUNNING:
            if message is not None:
                self._position = message.offset
            self.content[self._position : self._position + len(request.data)] = request.data
            self._position += len(request.data)
        elif request.status is RequestStatus.COMPLETE:
            if message.block.block_size != len(self.content):
                raise Refuse(COMMON, "length mismatch")
            self.completed = True
        else:
            self.cancelled = True
        return None


def fail(error: Exception, *, at: RequestStatus, number: int = 0) -> Callable[[RequestStatus, int], None]:
    def fault(status: RequestStatus, frame: int) -> None:
        if status is at and frame >= number:
            raise error

    return fault


@asynccontextmanager
async def writing(*workers: Fake, **handlers: Any) -> AsyncIterator[tuple[CurvineFileSystem, Fake]]:
    def add_block(request: Any, message: Any) -> pb.LocatedBlockProto:
        chosen = [entry for entry in addresses(*workers) if entry.worker_id not in message.exclude_workers]
        return pb.LocatedBlockProto(block=pb.ExtendedBlockProto(id=BLOCK), locs=chosen)

    async with reading(*workers) as (fs, master):
        master.handle |= {
            RpcCode.CREATE_FILE: always(
                pb.CreateFileResponse(file_status=status(block_size=fs.config.block_size_bytes))
            ),
            RpcCode.ADD_BLOCK: add_block,
            RpcCode.COMPLETE_FILE: always(pb.CompleteFileResponse(result=True)),
        }
        master.handle |= {RpcCode[name.upper()]: handler for name, handler in handlers.items()}
        yield fs, master


def last_commit(master: Fake) -> tuple[int, list[tuple[int, int, list[int]]]]:
    message: Any = master.messages(RpcCode.COMPLETE_FILE)[-1]
    commits = [
        (commit.block_id, commit.block_len, [entry.worker_id for entry in commit.locations])
        for commit in message.commit_blocks
    ]
    return message.len, commits


async def test_replicas_get_the_same_bytes() -> None:
    workers = [WritingWorker(), WritingWorker()]
    async with writing(*workers) as (fs, master):
        async with await fs.create("/f", replicas=2) as writer:
            await writer.write(CONTENT)
            await writer.write_at(b"seek", 1000)
        wanted = CONTENT[:1000] + b"seek" + CONTENT[1004:]
        assert [worker.content for worker in workers] == [wanted, wanted]
        assert last_commit(master) == (len(CONTENT), [(BLOCK, len(CONTENT), [1, 2])])


@pytest.mark.parametrize(
    "fault",
    [
        fail(Refuse(COMMON, "Not enough space in storage dir"), at=RequestStatus.OPEN),
        fail(Close(), at=RequestStatus.OPEN),
        fail(Refuse(IO), at=RequestStatus.RUNNING, number=2),
        fail(Close(), at=RequestStatus.RUNNING, number=2),
        fail(Hang(), at=RequestStatus.RUNNING, number=2),
        fail(Refuse(COMMON, "length mismatch"), at=RequestStatus.COMPLETE),
        fail(Close(), at=RequestStatus.COMPLETE),
    ],
)
async def test_a_replica_that_fails_is_left_out_of_the_commit(fault: Any) -> None:
    good = WritingWorker()
    async with writing(WritingWorker(fault), good) as (fs, master):
        async with await fs.create("/f", replicas=2) as writer:
            await writer.write(CONTENT)
        assert good.content == CONTENT
        assert last_commit(master) == (len(CONTENT), [(BLOCK, len(CONTENT), [2])])
        assert fs.stats()["replica_failures"] == 1


@pytest.mark.parametrize(
    ("fault", "expected"),
    [
        (fail(Refuse(COMMON, "Not enough space in storage dir"), at=RequestStatus.RUNNING, number=2), OutOfSpace),
        (fail(Close(), at=RequestStatus.RUNNING, number=2), ConnectionLost),
        (fail(Hang(), at=RequestStatus.RUNNING, number=2), DeadlineExceeded),
        (fail(Refuse(COMMON, "length mismatch"), at=RequestStatus.COMPLETE), RemoteError),
    ],
)
async def test_a_write_that_failed_is_never_committed(fault: Any, expected: type[CurvfsError]) -> None:
    worker = WritingWorker(fault)
    async with writing(worker) as (fs, master):
        started = time.monotonic()
        with pytest.raises(expected):
            async with await fs.create("/f") as writer:
                await writer.write(CONTENT)
                await writer.close()
        assert time.monotonic() - started < 3
        assert not worker.completed
        assert last_commit(master) == (0, [])


async def test_after_a_failed_write_nothing_of_its_block_is_published() -> None:
    """Frames behind the one that failed were written at the wrong place (1.5)."""
    worker = WritingWorker(fail(Refuse(IO), at=RequestStatus.RUNNING, number=2))
    async with writing(worker) as (fs, master):
        writer = await fs.create("/f")
        with pytest.raises(RemoteError):
            await writer.write(CONTENT)
        for call in (writer.flush, writer.close, lambda: writer.write(b"more")):
            with pytest.raises(CurvfsError):
                await call()
        await writer.abort()
        assert worker.cancelled
        assert not worker.completed
        assert last_commit(master) == (0, [])


async def test_a_new_block_that_no_worker_takes_is_placed_anew() -> None:
    bad, good = WritingWorker(fail(Close(), at=RequestStatus.OPEN)), WritingWorker()

    def assign(request: Any, message: Any) -> pb.AssignWorkerResponse:
        chosen = [entry for entry in addresses(bad, good) if entry.worker_id not in message.exclude_workers]
        return pb.AssignWorkerResponse(block=pb.LocatedBlockProto(block=message.block, locs=chosen))

    def add_block(request: Any, message: Any) -> pb.LocatedBlockProto:
        return pb.LocatedBlockProto(block=pb.ExtendedBlockProto(id=BLOCK), locs=addresses(bad))

    async with writing(bad, good, assign_worker=assign, add_block=add_block) as (fs, master):
        async with await fs.create("/f") as writer:
            await writer.write(CONTENT)
        assert good.content == CONTENT
        assert last_commit(master) == (len(CONTENT), [(BLOCK, len(CONTENT), [2])])


SMALL = CONTENT[:5000]


async def test_a_small_file_goes_to_each_replica_in_one_exchange() -> None:
    workers = [WritingWorker(), WritingWorker()]
    async with writing(*workers) as (fs, master):
        async with await fs.create("/f", replicas=2) as writer:
            assert writer.takes_whole
            await writer.write_whole(SMALL)
            assert not writer.takes_whole and writer.length_bytes == len(SMALL)
        assert [bytes(worker.content) for worker in workers] == [SMALL, SMALL]
        assert all(worker.completed for worker in workers)
        assert last_commit(master) == (len(SMALL), [(BLOCK, len(SMALL), [1, 2])])


@pytest.mark.parametrize("status_", [RequestStatus.OPEN, RequestStatus.RUNNING, RequestStatus.COMPLETE])
@pytest.mark.parametrize("error", [Refuse(COMMON, "Not enough space"), Close()], ids=["refused", "closed"])
async def test_a_small_file_leaves_a_replica_behind_that_fails(status_: RequestStatus, error: Exception) -> None:
    bad, good = WritingWorker(fail(error, at=status_)), WritingWorker()
    async with writing(bad, good) as (fs, master):
        async with await fs.create("/f", replicas=2) as writer:
            await writer.write_whole(SMALL)
        assert good.content == SMALL
        assert last_commit(master) == (len(SMALL), [(BLOCK, len(SMALL), [2])])


async def test_a_small_file_that_no_worker_takes_is_placed_anew_or_fails() -> None:
    bad, good = WritingWorker(fail(Close(), at=RequestStatus.OPEN)), WritingWorker()
    others: list[Fake] = [good]

    def assign(request: Any, message: Any) -> pb.AssignWorkerResponse:
        chosen = [entry for entry in addresses(bad, *others) if entry.worker_id not in message.exclude_workers]
        return pb.AssignWorkerResponse(block=pb.LocatedBlockProto(block=message.block, locs=chosen))

    def add_block(request: Any, message: Any) -> pb.LocatedBlockProto:
        return pb.LocatedBlockProto(block=pb.ExtendedBlockProto(id=BLOCK), locs=addresses(bad))

    async with writing(bad, good, assign_worker=assign, add_block=add_block) as (fs, master):
        async with await fs.create("/f") as writer:
            await writer.write_whole(SMALL)
        assert good.content == SMALL
        assert last_commit(master) == (len(SMALL), [(BLOCK, len(SMALL), [2])])
        others.clear()
        writer = await fs.create("/g")
        with pytest.raises(CurvfsError):
            await writer.write_whole(SMALL)
        await writer.abort()
        assert last_commit(master) == (0, [])


async def test_commits_are_kept_until_a_complete_file_has_carried_them() -> None:
    worker = WritingWorker()
    complete = once(Refuse(COMMON, "not now"), then=pb.CompleteFileResponse(result=True))
    async with writing(worker, complete_file=complete) as (fs, master):
        writer = await fs.create("/f")
        await writer.write(CONTENT)
        with pytest.raises(RemoteError):
            await writer.close()
        await writer.close()
        assert last_commit(master) == (len(CONTENT), [(BLOCK, len(CONTENT), [1])])
        assert not worker.cancelled


async def test_an_add_block_whose_answer_was_lost() -> None:
    """Repeated, it answers without workers (4.5 rule 2): ours, so they are asked for."""
    worker = WritingWorker()
    add_block = once(Close(), then=pb.LocatedBlockProto(block=pb.ExtendedBlockProto(id=BLOCK)))

    def assign(request: Any, message: Any) -> pb.AssignWorkerResponse:
        return pb.AssignWorkerResponse(block=pb.LocatedBlockProto(block=message.block, locs=addresses(worker)))

    async with writing(worker, add_block=add_block, assign_worker=assign) as (fs, master):
        async with await fs.create("/f") as writer:
            await writer.write(CONTENT)
        assert last_commit(master) == (len(CONTENT), [(BLOCK, len(CONTENT), [1])])


async def test_a_block_without_workers_is_never_committed() -> None:
    """Hazard 3: it is somebody else's."""
    unplaced = pb.LocatedBlockProto(block=pb.ExtendedBlockProto(id=BLOCK))
    async with writing(add_block=always(unplaced)) as (fs, master):
        with pytest.raises(InProgress, match="another client"):
            async with await fs.create("/f") as writer:
                await writer.write(b"x")
        assert last_commit(master) == (0, [])
        with pytest.raises(InProgress):
            await fs.create_extent("/f", 100)


async def test_a_worker_that_opens_something_else() -> None:
    worker = WritingWorker()
    worker.handle[RpcCode.WRITE_BLOCK] = always(pb.BlockWriteResponse(id=5, off=0, block_size=1))
    async with writing(worker) as (fs, master):
        with pytest.raises(RemoteProtocolError, match="opened block 5"):
            async with await fs.create("/f") as writer:
                await writer.write(b"x")
        assert last_commit(master) == (0, [])


# ---------------------------------------------------------------------------------------------------- a real process


@pytest.fixture
def pool(tmp_path: Path) -> AsyncIterator[Callable[[], tuple[subprocess.Popen[str], str]]]:
    """Starts a server process over one directory, always on the ports that the first one got."""
    running: list[subprocess.Popen[str]] = []

    def start() -> tuple[subprocess.Popen[str], str]:
        import json

        record = tmp_path / "pool" / "server.json"
        known = json.loads(record.read_text()) if record.exists() else {"master_port": 0, "worker_port": 0}
        command = [sys.executable, "-m", "curvfs.server", str(tmp_path / "pool"), "--hostname", "worker-host"]
        ports = ["--master-port", str(known["master_port"]), "--worker-port", str(known["worker_port"])]
        process = subprocess.Popen([*command, *ports], stdout=subprocess.PIPE, text=True)
        running.append(process)
        assert process.stdout is not None
        return process, process.stdout.readline().split()[-1]

    yield start  # type: ignore[misc]
    for process in running:
        process.kill()
        process.communicate()


SHORT = {"retry_max_s": 1.0, "data_timeout_s": 1.0, "rpc_timeout_s": 1.0, "block_size": "1MB"}


@pytest.mark.parametrize("hostname", ["worker-host", "elsewhere"])
async def test_the_server_is_killed_in_the_middle_of_a_write(pool: Any, hostname: str) -> None:
    process, url = pool()
    async with open_filesystem(url, client_hostname=hostname, **SHORT) as fs:
        async with await fs.create("/whole") as writer:
            await writer.write(CONTENT)
        started = 0.0
        with pytest.raises(TransportError):
            async with await fs.create("/torn") as writer:
                for _ in range(5):
                    await writer.write(os.urandom(300_000))
                process.send_signal(signal.SIGKILL)
                process.wait()
                started = time.monotonic()
                for _ in range(50):
                    await writer.write(os.urandom(300_000))
        assert time.monotonic() - started < 8
        pool()
        async with await fs.open("/whole") as reader:
            assert await reader.read_at(0, 10**9) == CONTENT
        torn = await fs.stat("/torn")
        assert torn.length_bytes <= MIB  # what was published, nothing half-written
        async with await fs.create("/torn", overwrite=True) as writer:
            await writer.write(CONTENT)
        async with await fs.open("/torn") as reader:
            assert await reader.read_at(0, 10**9) == CONTENT


async def test_the_server_restarts_between_two_calls(pool: Any) -> None:
    process, url = pool()
    async with open_filesystem(url, client_hostname="elsewhere", **(SHORT | {"retry_max_s": 20.0})) as fs:
        writer = await fs.create("/f")
        await writer.write(CONTENT[:1000])
        await writer.flush()
        process.send_signal(signal.SIGKILL)
        process.wait()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(trio.to_thread.run_sync, pool)
            await writer.write(CONTENT[1000:])  # a fresh stream: the flush ended the one before
            await writer.close()
        async with await fs.open("/f") as reader:
            assert await reader.read_at(0, 10**9) == CONTENT


async def test_the_server_is_killed_while_a_file_is_read(pool: Any) -> None:
    process, url = pool()
    async with open_filesystem(url, client_hostname="elsewhere", chunk_size_bytes=64 * KIB, **SHORT) as fs:
        async with await fs.create("/f") as writer:
            await writer.write(CONTENT * 10)
        async with await fs.open("/f") as reader:
            assert await reader.read_at(0, 1000) == CONTENT[:1000]
            process.send_signal(signal.SIGKILL)
            process.wait()
            started = time.monotonic()
            with pytest.raises(TransportError):
                await reader.read_at(0, 10**9)
            assert time.monotonic() - started < 5
            pool()
            assert await reader.read_at(0, 10**9) == CONTENT * 10


async def test_a_server_stopped_and_continued(pool: Any) -> None:
    """Half-open for a while: a deadline passes, and things go on afterwards."""
    process, url = pool()
    async with open_filesystem(url, client_hostname="elsewhere", **SHORT) as fs:
        process.send_signal(signal.SIGSTOP)
        try:
            started = time.monotonic()
            with pytest.raises(DeadlineExceeded):
                await fs.stat("/")
            assert time.monotonic() - started < 2
        finally:
            process.send_signal(signal.SIGCONT)
        assert (await fs.stat("/")).is_dir
