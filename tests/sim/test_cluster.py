"""The real client against the real server in the simulated world: delays, resets, half-open connections, a slow disk,
partitions and kills of the server at any moment.

A completed file reads back exactly or gives a typed error; every call ends by its deadline; once the faults have
stopped everything serves again, without a restart of any client; nothing leaks.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from pathlib import Path

import pytest
import trio

from curvfs.errors import CurvfsError
from curvfs.simworld import SimWorld, run
from tests.sim.model import Published
from tests.sim.stage import SERVER, SimServer, client_config, connected
from tests.sim.workload import PUBLISHED, Client, everybody_publishes, everybody_works

#: The clients: on which machine, and whether they may use local files.
_CLIENTS = (("one", True), ("two", True), (SERVER, True), (SERVER, False))

Work = Callable[[list[Client]], Awaitable[None]]


async def trouble(world: SimWorld, server: SimServer) -> None:
    """Faults of every kind, until cancelled."""
    faults, random = world.faults, world.random
    faults.machines = frozenset({SERVER})
    while True:
        faults.reset = random.choice((0, 0, 0.01, 0.05))
        faults.half_open = random.choice((0, 0, 0, 0.01))
        faults.stall = random.choice((0, 0, 0.1))
        faults.refuse = random.choice((0, 0, 0.2))
        faults.slow_disk = random.choice((0, 0, 0.2))
        faults.short_read = faults.short_write = random.choice((0, 0.5))
        for name in ("read_error", "write_error", "no_space", "name_error"):
            setattr(faults, name, random.choice((0, 0, 0, 0.02)))
        await world.clock.sleep(random.expovariate(1 / 3))
        what = random.randrange(5)
        if what == 0:
            server.kill()
        elif what == 1:
            server.process.kill_at(random.randint(1, 200))
        elif what == 2:
            machine = random.choice(("one", "two"))
            world.partition(machine, SERVER)
            await world.clock.sleep(random.expovariate(1 / 4))
            world.heal(machine, SERVER)
        elif what == 3:
            server.process.clock.step(random.uniform(-100_000, 100_000))


async def cluster_run(world: SimWorld, work: Work) -> str:
    server = SimServer(world)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(server.run)
        await server.wait_up()
        async with AsyncExitStack() as stack:
            clients: list[Client] = []
            published = Published()
            for index, (machine, short_circuit) in enumerate(_CLIENTS):
                process = world.host(machine)
                filesystem = await stack.enter_async_context(
                    connected(process, client_config(short_circuit=short_circuit))
                )
                clients.append(Client(process, filesystem, f"/client-{index}", published))
                await filesystem.mkdir(f"/client-{index}")
            await clients[0].filesystem.mkdir(PUBLISHED)
            for client in clients:
                client.others = [other for other in clients if other is not client]

            async with trio.open_nursery() as troubles:
                troubles.start_soon(trouble, world, server)
                await work(clients)
                troubles.cancel_scope.cancel()

            world.faults.stop()
            for machine in ("one", "two"):
                world.heal(machine, SERVER)
            server.process.process.kill_at_call = None
            await server.wait_up()
            await world.clock.sleep(30)  # what the last faults left behind runs into its deadlines
            for client in clients:
                client.calm = True
                await client.check_all()
            await everybody_works(clients, 6)
            for client in clients:
                await client.check_all()

        await world.clock.sleep(5)
        for client in clients:
            assert not client.world.net.open_streams()
            assert not client.world.disk.open_paths()
        nursery.cancel_scope.cancel()
    return world.trace.digest


async def everything(clients: list[Client]) -> None:
    await everybody_works(clients, 12)


async def races(clients: list[Client]) -> None:
    await everybody_publishes(clients, 8)


@pytest.mark.parametrize("seed", range(10))
def test_files_are_whole_and_calls_end_under_faults(seed: int) -> None:
    run(cluster_run, everything, seed=seed)


@pytest.mark.parametrize("seed", range(5))
def test_one_of_many_publishers_wins_under_faults(seed: int) -> None:
    run(cluster_run, races, seed=seed)


def test_a_cluster_run_repeats_in_another_process() -> None:
    """Not even the order of a set of strings may differ, or a seed is worth nothing."""
    program = (
        "import sys; sys.path.insert(0, sys.argv[1])\n"
        "from tests.sim.test_cluster import cluster_run, everything, run\n"
        "print(run(cluster_run, everything, seed=3))"
    )
    root = str(Path(__file__).parents[2])
    environment = {**os.environ, "PYTHONHASHSEED": "7"}
    found = subprocess.run(
        [sys.executable, "-c", program, root], env=environment, capture_output=True, text=True, check=True
    )
    assert found.stdout.strip() == run(cluster_run, everything, seed=3)


@pytest.mark.parametrize("seed", range(5))
def test_a_server_serves_after_a_power_cut(seed: int) -> None:
    """Nothing is synced, so files may be torn or gone. (Readers that must notice have checksums.) But the server starts
    and serves, what is listed can be asked for, and new files are whole."""

    async def main(world: SimWorld) -> None:
        server = SimServer(world)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(server.run)
            await server.wait_up()
            process = world.host("one")
            async with connected(process, client_config()) as filesystem:
                for cut in range(3):
                    directory = f"/client-{cut}"
                    for path in (PUBLISHED, directory):  # the last cut may have taken them
                        await filesystem.mkdir(path, parents=True)
                    client = Client(process, filesystem, directory, Published())
                    client.others = [client]
                    await client.work(15)
                    client.calm = True
                    await client.check_all()
                    if world.random.random() < 0.5:
                        server.metadata.checkpoint()
                    server.power_cut()
                    await world.clock.sleep(30)
                    await server.wait_up()
                    for status in await filesystem.list("/"):
                        for found in await filesystem.list(status.path):
                            try:
                                reader = await filesystem.open(found.path)
                                async with reader:
                                    await reader.read_at(0, reader.length_bytes)
                            except CurvfsError:
                                pass
                            await filesystem.delete(found.path)
            nursery.cancel_scope.cancel()

    run(main, seed=seed)


@pytest.mark.parametrize("down", ["killed", "partitioned"])
@pytest.mark.parametrize("seed", range(3))
def test_a_cancelled_client_ends_soon_though_the_server_is_gone(down: str, seed: int) -> None:
    async def main(world: SimWorld) -> None:
        server = SimServer(world)
        server.down_s = 1000
        config = client_config(short_circuit=False)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(server.run)
            await server.wait_up()
            with trio.CancelScope() as scope:
                async with connected(world, config) as filesystem:

                    async def write_for_ever(name: str) -> None:
                        async with await filesystem.create(name) as writer:
                            while True:
                                await writer.write(bytes(100_000))
                                await world.clock.sleep(0.1)

                    async with trio.open_nursery() as writers:
                        for index in range(3):
                            writers.start_soon(write_for_ever, f"/{index}")
                        await world.clock.sleep(1 + world.random.random())
                        if down == "killed":
                            server.kill()
                        else:
                            world.partition("client", SERVER)
                        await world.clock.sleep(world.random.random() / 10)
                        cancelled_s = world.clock.monotonic_s()
                        scope.cancel()
            assert world.clock.monotonic_s() - cancelled_s <= 2 * config.close_timeout_s + 0.1
            assert not world.net.open_streams()
            nursery.cancel_scope.cancel()

    run(main, seed=seed)
