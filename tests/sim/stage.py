"""A simulated cluster: the real server on a machine of its own that can be killed and started again; real clients."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import trio

from curvfs.api import CurvineFileSystem, open_filesystem
from curvfs.config import ClientConfig
from curvfs.errors import CurvfsError
from curvfs.server.connection import accept
from curvfs.server.metastore import MemoryMetaStore
from curvfs.server.oplog import Log
from curvfs.server.records import Change
from curvfs.server.service import run_server
from curvfs.server.standby import serve_standby
from curvfs.simworld import SimWorld
from curvfs.world import Random

SERVER = "server"
DIRECTORY = "/srv/pool"
MASTER_PORT, OTHER_MASTER_PORT, WORKER_PORT = 8995, 8996, 8997
#: The machine of a master that never leads.
STANDBY = "standby"


class Metadata(MemoryMetaStore):
    """The metadata of a server that outlives its processes, as a database file does: SQLite's write-ahead log with
    ``synchronous=NORMAL`` keeps every change when a process dies; when the power is cut, those up to the last
    checkpoint and the first so many of the later ones."""

    def __init__(self) -> None:
        super().__init__()
        self._changes: list[Change] = []
        self._durable = 0

    def apply(self, change: Change) -> None:
        super().apply(change)
        self._changes.append(change)

    def checkpoint(self) -> bool:
        self._durable = len(self._changes)
        return True

    def after_power_cut(self, random: Random) -> Metadata:
        """What is there when the power is back."""
        kept = Metadata()
        for change in self._changes[: random.randint(self._durable, len(self._changes))]:
            kept.apply(change)
        kept.checkpoint()
        return kept

    def close(self) -> None:
        """The process ends; the data stays."""


class SimServer:
    """The server: run :meth:`run` in a nursery; kill it as you like, it is started again after a while.

    With two ``masters``, one of the server's ports belongs to the leader and the other to a standby, and which is which
    may change with every start. A third one never leads, runs on a machine of its own, and says so even while the
    server is down.
    """

    def __init__(self, world: SimWorld, *, masters: int = 1) -> None:
        self._world = world
        self.metadata = Metadata()
        self.process = world.host(SERVER)
        self.log: list[str] = []
        self._failed_starts = 0
        self.down_s = 0.5
        self._up = trio.Event()
        self.ports = (MASTER_PORT, OTHER_MASTER_PORT)[: min(masters, 2)]
        self.standby = world.host(STANDBY) if masters > 2 else None

    @property
    def masters(self) -> tuple[tuple[str, int], ...]:
        """What clients are told."""
        addresses = [(SERVER, port) for port in sorted(self.ports)]
        return (*addresses, (STANDBY, MASTER_PORT)) if self.standby else tuple(addresses)

    async def run(self) -> None:
        """Keep a server running until cancelled."""
        async with trio.open_nursery() as nursery:
            if self.standby is not None:
                nursery.start_soon(self._stand_by, self.standby)
            while True:
                self.process = self._world.host(SERVER)
                await self.process.run(self._serve, self.process)
                if self._up.is_set():
                    self._up = trio.Event()
                self._world.faults.fired["server_down"] += 1
                await self._world.clock.sleep(self.down_s * self._world.random.uniform(0.1, 2))
                if len(self.ports) > 1 and self._world.random.random() < 0.5:
                    self.ports = self.ports[::-1]
                    self._world.faults.fired["leader_change"] += 1

    async def _stand_by(self, world: SimWorld) -> None:
        listener = await world.net.listen("0.0.0.0", MASTER_PORT)
        await accept(listener, serve_standby, Log(world, self.log.append))

    async def _serve(self, world: SimWorld) -> None:
        async with trio.open_nursery() as nursery:
            try:
                await nursery.start(self._start, world)
            except CurvfsError as error:  # a fault of its disk, at start: whoever watches it starts it again
                self.log.append(f"the server did not start: {error}")
                self._failed_starts += 1
                assert self._failed_starts < 100, self.log[-1]
                return
            self._failed_starts = 0
            self._up.set()

    async def _start(self, world: SimWorld, task_status: trio.TaskStatus[object]) -> None:
        await run_server(
            DIRECTORY,
            host="0.0.0.0",
            master_port=self.ports[0],
            standby_port=self.ports[1] if len(self.ports) > 1 else None,
            worker_port=WORKER_PORT,
            world=world,
            open_metadata=lambda path: self.metadata,
            log=self.log.append,
            task_status=task_status,
        )

    async def wait_up(self) -> None:
        """Wait until a server is there."""
        while not self._up.is_set():
            await self._up.wait()

    def kill(self) -> None:
        self.process.kill()

    def power_cut(self) -> None:
        """The server's machine loses power, and with it what was not synced."""
        self.process.power_cut()
        self.metadata = self.metadata.after_power_cut(self._world.random)


def client_config(**settings: object) -> ClientConfig:
    """Short deadlines, so that a run meets many of them; blocks and chunks that make several of each per file."""
    config = ClientConfig(
        masters=((SERVER, MASTER_PORT),),
        connect_timeout_s=2.0,
        rpc_timeout_s=3.0,
        data_timeout_s=3.0,
        retry_max_s=10.0,
        chunk_size_bytes=64 * 1024,
        block_size_bytes=1024 * 1024,
        close_timeout_s=2.0,
    )
    return config.with_overrides(**settings)


@asynccontextmanager
async def connected(world: SimWorld, config: ClientConfig) -> AsyncIterator[CurvineFileSystem]:
    """A connected client; connecting is tried until it works, a full disk of the server notwithstanding."""
    for _ in range(60):
        manager = open_filesystem(config, world=world)
        try:
            filesystem = await manager.__aenter__()
        except CurvfsError:
            await world.clock.sleep(1)
            continue
        break
    else:
        raise AssertionError("no connection came about in 60 attempts")
    try:
        yield filesystem
    finally:
        await manager.__aexit__(None, None, None)
