"""Runs of the simulated world that are not drawn from a seed alone, and that runs repeat."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import trio

from curvfs.simworld import SimWorld, run
from tests.sim.scenario import run_seed
from tests.sim.stage import SERVER, SimServer, client_config, connected


@pytest.mark.parametrize("seed", [3, 11])
def test_a_run_repeats_in_another_process(seed: int) -> None:
    """Not even the order of a set of strings may differ, or a seed is worth nothing."""
    program = (
        "import sys; sys.path.insert(0, sys.argv[1])\n"
        "from tests.sim.scenario import run_seed\n"
        "print(run_seed(int(sys.argv[2])).digest)"
    )
    root = str(Path(__file__).parents[2])
    environment = {**os.environ, "PYTHONHASHSEED": "7"}
    found = subprocess.run(
        [sys.executable, "-c", program, root, str(seed)], env=environment, capture_output=True, text=True, check=True
    )
    assert found.stdout.strip() == run_seed(seed).digest


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
