"""Two masters, one of which leads: real servers, real sockets, and a lead that changes while files are written."""

from __future__ import annotations

import os
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import trio

from curvfs.api import CurvineFileSystem, FileKind, open_filesystem
from curvfs.errors import CurvfsError, NoAvailableWorker, NotLeader, OutOfSpace
from curvfs.net import cluster
from curvfs.server.service import Server, run_server
from curvfs.units import MIB
from curvfs.wire.codes import RpcCode
from curvfs.wire.messages import pb
from tests.t2_client.conftest import WORKER_HOSTNAME
from tests.t2_client.fakes import Close, Fake, Refuse, addresses, located, once, status

CONTENT = os.urandom(3 * MIB + 17)


class Pair:
    """A cluster of two masters on fixed ports. :meth:`change_leader` stops it and lets the other one lead."""

    def __init__(self, directory: str, nursery: trio.Nursery) -> None:
        self._directory = directory
        self._nursery = nursery
        self._ports = [0, 0]
        self._worker_port = 0
        self._scope = trio.CancelScope()
        self._gone = trio.Event()

    @property
    def url(self) -> str:
        return "curvine://" + ",".join(f"127.0.0.1:{port}" for port in sorted(self._ports)) + "/"

    async def start(self) -> None:
        async def serve(task_status: Any) -> None:
            with trio.CancelScope() as self._scope:
                await run_server(
                    self._directory,
                    master_port=self._ports[0],
                    standby_port=self._ports[1],
                    worker_port=self._worker_port,
                    hostname=WORKER_HOSTNAME,
                    task_status=task_status,
                )
            self._gone.set()

        self._gone = trio.Event()

        async def begin(task_status: trio.TaskStatus[Server] = trio.TASK_STATUS_IGNORED) -> None:
            await serve(task_status)

        server: Server = await self._nursery.start(begin)
        assert server.standby_port is not None
        self._ports = [server.master_port, server.standby_port]
        self._worker_port = server.worker_port

    async def stop(self) -> None:
        self._scope.cancel()
        await self._gone.wait()

    async def change_leader(self, *, pause_s: float = 0.0) -> None:
        await self.stop()
        await trio.sleep(pause_s)
        self._ports.reverse()
        await self.start()


@asynccontextmanager
async def pair(tmp_path: Path, **settings: Any) -> AsyncIterator[tuple[Pair, CurvineFileSystem]]:
    async with trio.open_nursery() as nursery:
        masters = Pair(str(tmp_path / "pool"), nursery)
        await masters.start()
        chosen = {"block_size": "1MB", "client_hostname": "elsewhere", "retry_min_sleep": "10ms"} | settings
        async with open_filesystem(masters.url, **chosen) as fs:
            yield masters, fs
        nursery.cancel_scope.cancel()


@pytest.mark.parametrize("hostname", ["elsewhere", WORKER_HOSTNAME])
async def test_the_lead_changes_between_the_blocks_of_a_file(tmp_path: Path, hostname: str) -> None:
    async with pair(tmp_path, client_hostname=hostname) as (masters, fs):
        writer = await fs.create("/f")
        for start in range(0, len(CONTENT), MIB):
            await writer.write(CONTENT[start : start + MIB])
            await writer.flush()
            await masters.change_leader()
        await writer.close()
        async with await fs.open("/f") as reader:
            await masters.change_leader()
            assert await reader.read_at(0, 10**9) == CONTENT
        assert fs.stats()["master_retries"] >= 3


async def test_every_kind_of_call_survives_a_change_of_the_lead(tmp_path: Path) -> None:
    async with pair(tmp_path) as (masters, fs):
        await fs.mkdir("/d")
        calls: list[Any] = [
            partial(fs.mkdir, "/d/e"),
            partial(fs.mknod, "/d/n", FileKind.FIFO),
            partial(fs.symlink, "target", "/d/s"),
            partial(fs.rename, "/d/s", "/d/t"),
            partial(fs.set_attr, "/d", mode=0o700),
            partial(fs.list, "/d"),
            partial(fs.statfs),
            partial(fs.delete, "/d", recursive=True),
        ]
        for call in calls:
            await masters.change_leader()
            await call()
        assert not await fs.exists("/d")


async def test_calls_wait_while_nobody_is_up_and_then_go_on(tmp_path: Path) -> None:
    async with pair(tmp_path) as (masters, fs), trio.open_nursery() as nursery:
        nursery.start_soon(partial(masters.change_leader, pause_s=0.5))
        await trio.sleep(0.1)
        started = time.monotonic()
        assert (await fs.mkdir("/d")).is_dir
        assert 0.2 < time.monotonic() - started < 5


async def test_nobody_leads_within_the_budget(tmp_path: Path) -> None:
    async with pair(tmp_path, retry_max="1s") as (masters, fs):
        await masters.stop()
        standbys = [Fake(dict.fromkeys(RpcCode, once(then=Refuse(2)))) for _ in range(2)]
        for standby, port in zip(standbys, masters._ports, strict=True):
            standby.port = port
        async with standbys[0].serving(), standbys[1].serving():
            started = time.monotonic()
            with pytest.raises(NotLeader, match="none of the masters"):
                await fs.stat("/")
            assert time.monotonic() - started < 2


async def test_a_master_restarts_between_add_block_and_complete_file(tmp_path: Path) -> None:
    async with pair(tmp_path) as (masters, fs):
        extent = await fs.create_extent("/x", 1000)
        await extent.write(b"x" * 1000, 0)
        await extent.complete_block()
        await masters.change_leader()
        await extent.commit()
        async with await fs.open("/x") as reader:
            assert await reader.read_at(0, 2000) == b"x" * 1000


# ------------------------------------------------------------------- a leader that has not heard of every block yet


@asynccontextmanager
async def changed(*workers: Fake, leader: Fake) -> AsyncIterator[CurvineFileSystem]:
    """A client whose leader just took over."""
    follower = Fake(dict.fromkeys(RpcCode, once(then=Refuse(2))))
    async with trio.open_nursery() as nursery:
        for fake in (*workers, leader, follower):
            await nursery.start(_serve, fake)
        async with open_filesystem(
            f"curvine://{leader.address},{follower.address}/", client_hostname="here", block_size="1MB"
        ) as fs:
            leader.handle[RpcCode.FILE_STATUS] = once(
                Close(), then=pb.GetFileStatusResponse(status=status(length=len(CONTENT[:1000])))
            )
            await fs.stat("/f")
            yield fs
        nursery.cancel_scope.cancel()


async def _serve(fake: Fake, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
    async with fake.serving():
        task_status.started()
        await trio.sleep_forever()


def reading_worker() -> Fake:
    def read(request: Any, message: Any) -> Any:
        if message is not None and hasattr(message, "chunk_size") and request.status.name == "OPEN":
            return pb.BlockReadResponse(id=message.id, len=message.len)
        return (None, CONTENT[:1000]) if request.status.name == "RUNNING" else None

    return Fake({RpcCode.READ_BLOCK: read})


async def test_a_block_that_looks_lost_after_a_change_is_waited_for() -> None:
    worker, leader = reading_worker(), Fake()
    async with changed(worker, leader=leader) as fs:
        lost = located(1000)
        leader.handle[RpcCode.GET_BLOCK_LOCATIONS] = once(lost, lost, lost, then=located(1000, worker))
        async with await fs.open("/f") as reader:
            assert await reader.read_at(0, 1000) == CONTENT[:1000]
        assert len(leader.requests(RpcCode.GET_BLOCK_LOCATIONS)) == 4


async def test_a_block_that_is_lost_when_the_lead_is_settled_is_lost() -> None:
    leader = Fake()
    async with changed(leader=leader) as fs:
        leader.handle[RpcCode.GET_BLOCK_LOCATIONS] = once(then=located(1000))
        fs._session.masters._unsettled_until_s = fs.world.clock.monotonic_s() + 0.6
        started = time.monotonic()
        async with await fs.open("/f") as reader:
            with pytest.raises(NoAvailableWorker):
                await reader.read_at(0, 1000)
        assert time.monotonic() - started < 2


async def test_all_replicas_lost_after_a_change_is_asked_again() -> None:
    worker, leader = reading_worker(), Fake()
    async with changed(worker, leader=leader) as fs:
        text = "block 1001 all replicas has been lost"
        leader.handle[RpcCode.GET_BLOCK_LOCATIONS] = once(Refuse(10000, text), then=located(1000, worker))
        assert (await fs.locate("/f")).blocks[0].workers


async def test_no_available_worker_after_a_change_is_asked_again() -> None:
    worker, leader = reading_worker(), Fake()
    async with changed(worker, leader=leader) as fs:
        made = pb.LocatedBlockProto(block=pb.ExtendedBlockProto(id=1001 << 24), locs=addresses(worker))
        leader.handle |= {
            RpcCode.CREATE_FILE: once(then=pb.CreateFileResponse(file_status=status())),
            RpcCode.ADD_BLOCK: once(Refuse(10000, "No available worker found"), then=made),
            RpcCode.COMPLETE_FILE: once(then=pb.CompleteFileResponse(result=True)),
            RpcCode.DELETE: once(then=pb.DeleteResponse()),
        }
        worker.handle[RpcCode.WRITE_BLOCK] = once(then=Refuse(1, "enough of that"))
        with pytest.raises(Exception, match="enough of that"):
            await fs.create_extent("/f", 10)
        assert len(leader.requests(RpcCode.ADD_BLOCK)) == 2


@asynccontextmanager
async def fresh(leader: Fake, *workers: Fake, followers: int = 1) -> AsyncIterator[CurvineFileSystem]:
    """A client that has just come to a cluster, and so cannot know when the lead changed last."""
    standbys = [Fake(dict.fromkeys(RpcCode, once(then=Refuse(2)))) for _ in range(followers)]
    async with trio.open_nursery() as nursery:
        for fake in (*workers, *standbys, leader):
            await nursery.start(_serve, fake)
        url = "curvine://" + ",".join(fake.address for fake in (*standbys, leader))
        async with open_filesystem(url, client_hostname="here", block_size="1MB", retry_min_sleep="10ms") as fs:
            yield fs
        nursery.cancel_scope.cancel()


async def test_a_fresh_client_waits_for_a_leader_that_knows_no_workers_yet() -> None:
    leader = Fake({RpcCode.DELETE: once(*[Refuse(10000, "No available worker found")] * 3, then=pb.DeleteResponse())})
    async with fresh(leader) as fs:
        await fs.delete("/f")
        assert len(leader.requests(RpcCode.DELETE)) == 4


async def test_a_fresh_client_waits_for_blocks_that_look_lost() -> None:
    worker, lost = reading_worker(), Refuse(10000, "block 1001 all replicas has been lost")
    leader = Fake()
    async with fresh(leader, worker) as fs:
        leader.handle[RpcCode.GET_BLOCK_LOCATIONS] = once(lost, located(1000), then=located(1000, worker))
        async with await fs.open("/f") as reader:
            assert await reader.read_at(0, 1000) == CONTENT[:1000]


async def test_a_fresh_client_waits_no_longer_than_a_leader_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cluster, "_UNSETTLED_S", 0.4)
    leader = Fake({RpcCode.DELETE: once(then=Refuse(10000, "No available worker found"))})
    async with fresh(leader) as fs:
        with pytest.raises(OutOfSpace):
            await fs.delete("/f")
        asked = len(leader.requests(RpcCode.DELETE))
        assert asked > 1
        with pytest.raises(OutOfSpace):  # the lead is settled by now
            await fs.delete("/f")
        assert len(leader.requests(RpcCode.DELETE)) == asked + 1


async def test_a_client_of_one_master_is_told_at_once() -> None:
    leader = Fake({RpcCode.DELETE: once(then=Refuse(10000, "No available worker found"))})
    async with fresh(leader, followers=0) as fs:
        with pytest.raises(OutOfSpace):
            await fs.delete("/f")
        assert len(leader.requests(RpcCode.DELETE)) == 1


async def test_a_client_that_comes_right_after_a_change(tmp_path: Path) -> None:
    """Real servers: whichever of its masters leads now, a newcomer finds files and room."""
    async with pair(tmp_path) as (masters, fs):
        async with await fs.create("/f") as writer:
            await writer.write(CONTENT)
        await masters.change_leader()
        async with open_filesystem(masters.url, block_size="1MB", client_hostname="elsewhere") as late:
            async with await late.open("/f") as reader:
                assert await reader.read_at(0, 10**9) == CONTENT
            async with await late.create("/g") as writer:
                await writer.write(CONTENT)
            assert (await late.stat("/g")).length_bytes == len(CONTENT)


async def make(client: CurvineFileSystem, path: str, letter: bytes, outcomes: list[str]) -> None:
    try:
        async with await client.create(path) as writer:
            await writer.write(letter * 1000)
        outcomes.append(letter.decode())
    except CurvfsError as error:
        outcomes.append(type(error).__name__)


async def test_two_clients_race_for_one_name_through_a_change(tmp_path: Path) -> None:
    """Whoever is told that the name is taken writes nothing; at most one of them writes."""
    async with pair(tmp_path) as (masters, fs), open_filesystem(masters.url, block_size="1MB") as other:
        for number in range(4):
            outcomes: list[str] = []
            path = f"/race{number}"
            async with trio.open_nursery() as nursery:
                nursery.start_soon(make, fs, path, b"a", outcomes)
                nursery.start_soon(make, other, path, b"b", outcomes)
                await trio.sleep(0.002 * number)
                await masters.change_leader()
            won = [outcome for outcome in outcomes if len(outcome) == 1]
            assert len(won) <= 1, outcomes
            if won:
                async with await fs.open(path) as reader:
                    assert await reader.read_at(0, 2000) == won[0].encode() * 1000
