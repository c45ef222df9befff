"""One seed, one run: what it is about is drawn from the seed, and so is everything that happens in it.

Most runs are short, some are long. In all of them real clients work against the real server under faults, and at the
end the faults stop and everything must serve again, without a restart of anybody who lives, and nothing may be left:
see :func:`check_the_end`. The kinds of runs:

* *work*: every client does all sorts of things in a directory of its own, and reads what others wrote;
* *race*: all clients publish to the same names at once;
* *power cut*: like work, but the clients are cancelled in the middle and the server's machine loses power.

The server can be killed at any of its calls into the world, and so can one of the clients (the *victim*). In some runs
there are several masters, of which the leader changes; in some the blocks on the server's disk rot.
"""

from __future__ import annotations

import stat
from collections import Counter
from collections.abc import Iterator
from contextlib import AsyncExitStack
from dataclasses import dataclass

import trio

from curvfs.errors import CurvfsError
from curvfs.server.layout import block_id_of
from curvfs.simfs import Inode
from curvfs.simworld import SimWorld, run
from curvfs.world import Random
from tests.sim.model import Published
from tests.sim.stage import DIRECTORY, SERVER, SimServer, client_config, connected
from tests.sim.workload import PUBLISHED, Client, everybody_publishes, everybody_works

#: Where clients run, and whether they may use local files.
_PLACES = (("one", True), ("two", True), (SERVER, True), (SERVER, False))
#: ... when the server's machine loses power.
_ELSEWHERE = (("one", True), ("two", True), ("one", False), ("two", False))
_MACHINES = ("one", "two")
_CAPACITY_BYTES = 1 << 40


@dataclass(frozen=True, slots=True)
class Plan:
    """What a run is about."""

    kind: str
    turns: int
    places: tuple[tuple[str, bool], ...]
    masters: int
    victim: bool
    rots: bool
    #: Seconds between the things that happen to machines and processes, on average.
    pause_s: float

    @classmethod
    def of(cls, seed: int) -> Plan:
        random = Random(f"{seed}/plan")
        kind = random.choices(("work", "race", "power cut"), (6, 2, 2))[0]
        places = _ELSEWHERE if kind == "power cut" else _PLACES
        return cls(
            kind=kind,
            turns=random.choices((2, 4, 6, 12), (6, 6, 3, 1))[0],
            places=tuple(random.sample(places, random.choice((2, 2, 3, 4)))),
            masters=random.choice((1, 1, 2, 3)),
            victim=random.random() < 0.3,
            rots=random.random() < 0.1,
            pause_s=random.choice((0.2, 1.0, 3.0)),
        )


@dataclass(frozen=True, slots=True)
class Outcome:
    """What came of a run that passed: equal digests mean equal runs; which faults struck; how calls ended."""

    digest: str
    fired: Counter[str]
    calls: Counter[str]
    simulated_s: float


def run_seed(seed: int) -> Outcome:
    """Run one seed. An exception says what went wrong, and carries notes with the seed and the last events."""
    return run(one_run, Plan.of(seed), seed=seed)


async def one_run(world: SimWorld, plan: Plan) -> Outcome:
    server = SimServer(world, masters=plan.masters)
    calls: Counter[str] = Counter()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(server.run)
        await server.wait_up()
        tasks = count_tasks()
        if plan.kind == "power cut":
            await _lose_power(world, server, plan, calls)
        else:
            await _work_under_faults(world, server, plan, calls)
        await check_the_end(world, server, tasks)
        nursery.cancel_scope.cancel()
    return Outcome(world.trace.digest, world.faults.fired, calls, world.clock.monotonic_s())


# ------------------------------------------------------------------------------------------------------- what happens


async def trouble(world: SimWorld, server: SimServer, plan: Plan) -> None:
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
        faults.read_error *= 3  # reads are few
        await world.clock.sleep(random.expovariate(1 / plan.pause_s))
        what = random.randrange(6)
        if what == 0:
            server.kill()
        elif what == 1:
            server.process.kill_at(random.randint(1, 200))
        elif what == 2:
            machine = random.choice(_MACHINES)
            world.partition(machine, SERVER)
            await world.clock.sleep(random.expovariate(1 / 4))
            world.heal(machine, SERVER)
        elif what == 3:
            server.process.clock.step(random.uniform(-100_000, 100_000))
            faults.fired["clock_step"] += 1
        elif what == 4 and plan.rots:
            paths = [path for path, inode in _block_files(server) if inode.length_bytes]
            if paths:
                server.process.disk.rot(random.choice(paths))
        elif what == 5:
            disk = server.process.disk
            disk.set_capacity(disk.tree.used_bytes() + random.choice((0, 300_000, 3_000_000)))
            faults.fired["disk_full"] += 1
            await world.clock.sleep(random.expovariate(1 / 2))
            disk.set_capacity(_CAPACITY_BYTES)


def calm(world: SimWorld, server: SimServer) -> None:
    """No faults from here on."""
    world.faults.stop()
    for machine in _MACHINES:
        world.heal(machine, SERVER)
    server.process.process.kill_at_call = None
    server.process.disk.set_capacity(_CAPACITY_BYTES)


async def _work_under_faults(world: SimWorld, server: SimServer, plan: Plan, calls: Counter[str]) -> None:
    async with AsyncExitStack() as stack:
        clients = await _clients(world, server, plan, stack, "")
        alive = list(clients)
        async with trio.open_nursery() as troubles:
            if plan.victim:
                clients.append(await troubles.start(_victim, world, server, clients))
            troubles.start_soon(trouble, world, server, plan)
            if plan.kind == "race":
                await everybody_publishes(alive, plan.turns)
            else:
                await everybody_works(alive, plan.turns)
            troubles.cancel_scope.cancel()
        calm(world, server)
        await server.wait_up()
        await world.clock.sleep(30)  # what the last faults left behind runs into its deadlines
        for client in clients:
            client.calm = True
        for client in alive:
            await client.check_all()
        for victim in clients[len(alive) :]:
            for name in victim.names.values():
                await alive[0].check(name)
        await everybody_works(alive, 2)
        for client in alive:
            await client.check_all()
            calls.update(client.outcomes)
    await world.clock.sleep(5)
    _check_clients_left_nothing(alive)


async def _lose_power(world: SimWorld, server: SimServer, plan: Plan, calls: Counter[str]) -> None:
    """Nothing that the server does is synced, so files may be torn or gone after a cut. But the server starts and
    serves, what is listed can be asked for, and new files are whole."""
    for cut in range(world.random.randint(1, 2)):
        async with AsyncExitStack() as stack:
            clients = await _clients(world, server, plan, stack, f"-{cut}")
            world.faults.active = True
            async with trio.open_nursery() as nursery:
                nursery.start_soon(trouble, world, server, plan)
                nursery.start_soon(everybody_works, clients, plan.turns)
                await world.clock.sleep(world.random.uniform(0, 2 * plan.turns))
                world.faults.fired["cancelled_calls"] += 1
                nursery.cancel_scope.cancel()
            calm(world, server)
            if world.random.random() < 0.5:
                server.metadata.checkpoint()
            server.power_cut()
            await world.clock.sleep(30)
            await server.wait_up()
            await _sweep(clients[0])
            for client in clients:
                calls.update(client.outcomes)
        await world.clock.sleep(5)
        _check_clients_left_nothing(clients)
    async with AsyncExitStack() as stack:
        clients = await _clients(world, server, plan, stack, "-after")
        for client in clients:
            client.calm = True
        await everybody_works(clients, 2)
        for client in clients:
            await client.check_all()
            calls.update(client.outcomes)


async def _sweep(client: Client) -> None:
    """Look at everything there is, and delete it. Contents may be lost; that is said with an error of ours."""
    filesystem = client.filesystem
    for directory in await filesystem.list("/"):
        for found in await filesystem.list(directory.path):
            try:
                async with await filesystem.open(found.path) as reader:
                    await reader.read_at(0, reader.length_bytes)
            except CurvfsError:
                pass
            await filesystem.delete(found.path)


async def _clients(world: SimWorld, server: SimServer, plan: Plan, stack: AsyncExitStack, suffix: str) -> list[Client]:
    """Connected clients, the last of which shares its connections with the first."""
    published = Published()
    clients: list[Client] = []
    for machine, short_circuit in plan.places:
        process = world.host(machine)
        config = client_config(short_circuit=short_circuit, masters=server.masters)
        filesystem = await stack.enter_async_context(connected(process, config))
        clients.append(Client(process, filesystem, f"/client{suffix}-{len(clients)}", published))
    first = clients[0]
    clients.append(Client(first.world, first.filesystem, f"/client{suffix}-{len(clients)}", published))
    await first.filesystem.mkdir(PUBLISHED, parents=True)
    for client in clients:
        await client.filesystem.mkdir(client.directory)
        client.others = [other for other in clients if other is not client]
    return clients


async def _victim(
    world: SimWorld, server: SimServer, others: list[Client], task_status: trio.TaskStatus[Client]
) -> None:
    """A client that is killed at one of its calls into the world. What it was sure of stays true."""
    process = world.host(world.random.choice(_MACHINES))

    async def life() -> None:
        async with connected(process, client_config(masters=server.masters)) as filesystem:
            victim = Client(process, filesystem, "/victim", others[0].published)
            victim.others = list(others)
            await filesystem.mkdir(victim.directory)
            task_status.started(victim)
            process.kill_at(world.random.randint(1, 150))
            while True:
                await victim.work(1)

    await process.run(life)
    world.faults.fired["client_kill"] += 1


# ----------------------------------------------------------------------------------------------------- what must hold


async def check_the_end(world: SimWorld, server: SimServer, tasks: int) -> None:
    """The faults have stopped and the clients are gone. The server holds nothing for them, and what is deleted leaves
    no block behind."""
    await world.clock.sleep(5)
    for process in (server.process, *([server.standby] if server.standby else [])):
        assert not process.net.open_streams(half_open=False), f"{process.process!r}: {process.net.open_streams()}"
    dead = sum(len(process.net.open_streams()) for process in (server.process, server.standby) if process is not None)
    assert count_tasks() <= tasks + dead, f"{count_tasks()} tasks are left, {tasks} were there before the clients"
    held = [path for path in server.process.disk.open_paths() if block_id_of(path.rpartition("/")[2]) is not None]
    assert len(held) <= dead, f"the server holds open {held}"

    async with connected(world, client_config(short_circuit=False, masters=server.masters)) as filesystem:
        for found in await filesystem.list("/"):
            await filesystem.delete(found.path, recursive=True)
        await world.clock.sleep(10)
        fired = world.faults.fired
        if fired["name_error"] or fired["no_space"] or fired["disk_full"]:
            # What could not be renamed or unlinked is left to the next start, as the log says.
            server.kill()
            await filesystem.list("/")
        left = [path for path, _ in _block_files(server)]
        assert not left, f"no file owns {left}"
        used_bytes = (await filesystem.statfs()).used_bytes
        assert used_bytes == 0, f"{used_bytes} bytes are said to be used by no file"
    # Errors of the disk that reach the log in this form are no surprise: they had nobody else to be told.
    unforeseen = [line for line in server.log if " failed: " in line and " failed: OSError: " not in line]
    assert not unforeseen, unforeseen[0]


def _check_clients_left_nothing(clients: list[Client]) -> None:
    for client in clients:
        assert not client.world.net.open_streams(), f"{client.directory}: {client.world.net.open_streams()}"
        assert not client.world.disk.open_paths(), f"{client.directory}: {client.world.disk.open_paths()}"


def _block_files(server: SimServer) -> Iterator[tuple[str, Inode]]:
    """Every file below the worker's staging and active directories."""
    waiting = [(f"{DIRECTORY}/data", server.process.disk.tree.walk(f"{DIRECTORY}/data"))]
    for path, inode in waiting:  # grows as it goes
        if stat.S_ISDIR(inode.mode):
            waiting += [(f"{path}/{name}", child) for name, child in inode.entries.items()]
        elif "/staging/" in path or "/active/" in path:
            yield path, inode


def count_tasks() -> int:
    root = trio.lowlevel.current_root_task()
    tasks = [root] if root is not None else []
    for task in tasks:  # grows as it goes
        tasks += [child for nursery in task.child_nurseries for child in nursery.child_tasks]
    return len(tasks)
