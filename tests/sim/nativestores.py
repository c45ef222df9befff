"""Seeds for kvstore over the protocol: several processes, on the server's machine and on others, with stores on its
native back end, in the world of tests/sim/scenario.py.

Their threads really wait (tests/sim/green.py), so pages of one store are under way side by side. Meanwhile the server
is killed and started again, connections break, stall and fall silent, links are cut, its disk is slow or fails, and
processes are killed at any call into the world. Then the faults stop. As in tests/sim/kvstores.py even seeds are about
*leases* and odd ones about a *quota*; a third of both meets no fault but delays. In all of them:

* a get returns the exact bytes of its key, or a miss that touched nothing;
* a lookup promises nothing that nobody ever put; without faults what it promised is delivered;
* an object that is there is never replaced by another file, looked at after every change of the master's metadata;
* what objects, trash and staged files take keeps its bound, looked at in the same way;
* every call ends by its deadline;
* once the faults have stopped every store works again, without being opened anew; and in the end no page, buffer,
  descriptor, connection or task is left, and no block without a file.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable
from functools import partial
from typing import Any
from unittest.mock import patch

import trio

import curvfs.client.sync
import kvstore
from curvfs.errors import CurvfsError
from curvfs.server.records import ROOT_ID, Change
from curvfs.simworld import SimWorld, run
from kvstore import Capacity, KVStore, Miss
from tests.sim.green import GreenPortal, GreenThreads
from tests.sim.kvstores import CONTENTS, KEYS, LEASE_S, OBJECT_BYTES, PAGE, QUOTA_OBJECTS, WHOSE, Outcome, Violation
from tests.sim.scenario import check_the_end, count_tasks
from tests.sim.stage import MASTER_PORT, SERVER, Metadata, SimServer

TIMEOUT_S = 15.0
LOOKUP_TIMEOUT_S = 3.0
#: What killed writers left counts as used for so long.
STAGING_EXPIRY_S = 40.0
_MACHINES = (SERVER, "near", "far")
_STEPS = 14
#: Of write-behind: buffers for the pages of one call, each of which takes more than an object.
_BEHIND_BYTES = 8 * (OBJECT_BYTES + (1 << 17))
#: What a call may take beyond its deadline: giving up a call into the client, and what a killed server leaves to wait.
_GRACE_S = 2.0
#: What a store writes to find out how to, when it is opened.
_PROBE_BYTES = 4096
#: How long nobody may have made room for what a writer left that ended.
_FORGOTTEN_S = 150.0
#: The same where the clock was set: its last record must first be seen, in a flush, and is then watched for 120 s.
_FORGOTTEN_STEPPED_S = 300.0
_FILL = b"\xee"
#: Misses that say that an object is not what it should be.
_WRONG = frozenset({Miss.DAMAGED, Miss.FOREIGN, Miss.COLLISION, Miss.MISMATCH, Miss.NEWER})


class Watched(Metadata):
    """The master's metadata, looked at after every change."""

    def __init__(self, look: Callable[[Watched], None]) -> None:
        self._look = look
        super().__init__()

    def apply(self, change: Change) -> None:
        super().apply(change)
        self._look(self)

    def files(self) -> list[tuple[str, int]]:
        """Paths and inode ids of all files."""
        found = []
        pending = [("", ROOT_ID)]
        for path, directory_id in pending:  # grows as it goes
            for name, inode_id in self.children(directory_id):
                inode = self.inode(inode_id)
                if inode is not None and inode.is_dir:
                    pending.append((f"{path}/{name}", inode_id))
                else:
                    found.append((f"{path}/{name}", inode_id))
        return found


class Stage:
    """What all processes of a run share."""

    def __init__(self, world: SimWorld) -> None:
        self.world = world
        self.random = random.Random(f"native/{world.seed}")
        self.leases = world.seed % 2 == 0
        self.faulty = world.seed % 3 != 0
        self.server = SimServer(world)
        self.server.metadata = Watched(self.look)
        self.outcome = Outcome()
        self.attempted: set[int] = set()
        #: When objects were removed for good by somebody who may.
        self.deleted_s: dict[int, float] = {}
        self.calm = False
        #: The server's clock was set.
        self.clock_set = False
        self.sets_clock = self.random.random() < 0.3
        self.writers = 0
        self._ended_s: list[float] = []
        self._objects: dict[str, int] = {}
        self.violation: Violation | None = None

    @property
    def now_s(self) -> float:
        return self.world.clock.monotonic_s()

    def look(self, metadata: Watched) -> None:
        objects: dict[str, int] = {}
        total = 0
        for path, inode_id in metadata.files():
            total += sum(block.length_bytes for block in metadata.blocks(inode_id))
            if path.endswith(".safetensors") and "/." not in path:
                objects[path] = inode_id
        for name, inode_id in objects.items():
            if self._objects.get(name, inode_id) != inode_id:
                self.violation = self.violation or Violation(f"{name} was replaced while it was there")
        self._objects = objects
        self.outcome.worst_bytes = max(self.outcome.worst_bytes, total)
        forgotten_s = _FORGOTTEN_S if not self.clock_set else _FORGOTTEN_STEPPED_S
        ended = sum(self.now_s - when_s < forgotten_s for when_s in self._ended_s)
        bound = (QUOTA_OBJECTS + self.writers + ended) * OBJECT_BYTES + len(_MACHINES) * _PROBE_BYTES
        if not self.leases and total > bound:
            self.violation = self.violation or Violation(
                f"{total / OBJECT_BYTES:.1f} objects' worth is in the pool: quota {QUOTA_OBJECTS}, {self.writers}"
                f" writers, {ended} that ended lately"
            )

    def ended(self) -> None:
        """A writer died or was closed."""
        self.writers -= 1
        self._ended_s.append(self.now_s)


class Actor:
    """One process after the other on one machine, with a store."""

    def __init__(self, stage: Stage, machine: str) -> None:
        self._stage = stage
        self._machine = machine
        self._random = random.Random(f"{stage.world.seed}/{machine}")
        self._world = stage.world
        self._store: KVStore | None = None
        self._steps = 0
        #: Set when the faults have stopped and the last steps were made.
        self.done = False

    async def live(self) -> None:
        """Until all steps are made, in as many processes as it takes."""
        stage = self._stage
        while not self.done:
            process = stage.world.host(self._machine)
            await process.run(self._process, process)
            if not process.alive:
                stage.outcome.fired["client_kill"] += 1
                stage.ended()
            if stage.violation is not None:
                raise stage.violation
            await stage.world.clock.sleep(self._random.uniform(0, 3))

    async def _process(self, process: SimWorld) -> None:
        async with trio.open_nursery() as nursery:
            threads = GreenThreads(process, nursery)
            self._world = dataclasses.replace(process, threads=threads)
            await threads.drive(self._program)
            nursery.cancel_scope.cancel()

    def _program(self) -> None:
        stage = self._stage
        stage.writers += 1
        self._store = None
        while self._store is None:
            try:
                self._open()
            except CurvfsError:
                if not stage.faulty:
                    raise
                self._sleep(1.0)
        if stage.faulty and not stage.calm and self._random.random() < 0.4:
            self._world.kill_at(self._random.randrange(50, 3000))
        while self._steps < _STEPS:
            self._steps += 1
            self._step()
        self._wait_for_calm()
        self._check_recovery()
        self._close()
        self.done = True

    def _open(self) -> None:
        stage = self._stage
        capacity = None
        if not stage.leases:
            high = self._random.choice((1.0, 0.9))
            capacity = Capacity(quota_bytes=QUOTA_OBJECTS * OBJECT_BYTES, high=high, low=high - 0.1, rescan_s=60.0)
        self._store = kvstore.open(
            f"curvine://{SERVER}:{MASTER_PORT}/pool?rpc_timeout=3s&retry_max=8s&data_timeout=6s&connect_timeout=2s"
            "&close_timeout=2s",
            WHOSE,
            geometry=PAGE,
            world=self._world,
            engine="threads",
            depth=2,
            lease_s=LEASE_S,
            timeout_s=TIMEOUT_S,
            lookup_timeout_s=LOOKUP_TIMEOUT_S,
            staging_expiry_s=STAGING_EXPIRY_S,
            memory_bytes=self._random.choice((0, 3 * OBJECT_BYTES)) if not stage.leases else 0,
            write_behind_bytes=self._random.choice((0, 0, _BEHIND_BYTES)),
            capacity=capacity,
        )

    @property
    def store(self) -> KVStore:
        assert self._store is not None
        return self._store

    def _sleep(self, seconds: float) -> None:
        threads = self._world.threads
        assert isinstance(threads, GreenThreads)
        threads.wait(partial(trio.sleep, seconds))

    def _wait_for_calm(self) -> None:
        while not self._stage.calm:
            self._sleep(1.0)
        self._world.process.kill_at_call = None
        self._sleep(30.0)  # what the last faults left behind runs into its deadlines, breakers are tried again

    def _check_recovery(self) -> None:
        """Everything works, in this very store."""
        for attempt in range(20):
            numbers = self._some()
            found = [self._put(numbers), self._load(numbers)]
            if all(map(all, found)):
                return
            self._sleep(1.0 + attempt)
        raise Violation(f"{self._machine} does not work again: {found} {self.store.stats()}")

    def _close(self) -> None:
        store = self.store
        store.flush(60.0)
        self._sleep(20.0)
        stats = store.stats()
        if stats.in_flight or stats.slabs_in_use or stats.views_out or stats.behind.queued:
            raise Violation(f"pages or buffers are left: {stats}")
        if stats.quarantined:
            raise Violation("an object looked damaged on a sound disk")
        store.close()
        self._sleep(5.0)
        if self._world.disk.open_paths() or self._world.net.open_streams():
            raise Violation(f"left open: {self._world.disk.open_paths()} {self._world.net.open_streams()}")
        self._stage.ended()

    def _step(self) -> None:
        kind = self._random.choices(
            ("put", "load", "evict", "wait", "sweep", "delete"),
            (8, 8, 3, 3, 2, 1) if self._stage.leases else (12, 6, 0, 2, 1, 1),
        )[0]
        self._stage.outcome.calls[kind] += 1
        if kind == "put":
            self._put(self._some())
        elif kind == "load":
            self._load(self._some())
        elif kind == "wait":
            self._sleep(self._random.choice((0.5, 5.0, 40.0)))
        else:
            try:
                self._tidy(kind)
            except CurvfsError:
                if not self._stage.faulty:
                    raise

    def _tidy(self, kind: str) -> None:
        if kind == "evict":
            self.store.evict(self._keys(self._some()))
        elif kind == "sweep":
            self.store.sweep()
        else:
            numbers = self._some()
            for number in numbers:  # from before the call on, and it may still be done after it
                self._stage.deleted_s[number] = float("inf")
            self.store.delete(self._keys(numbers))
            for number in numbers:
                self._stage.deleted_s[number] = self._stage.now_s + TIMEOUT_S

    def _some(self) -> list[int]:
        first = self._random.randrange((12 if self._stage.leases else KEYS) - 6)
        return list(range(first, first + self._random.randint(1, 6)))

    def _keys(self, numbers: list[int]) -> list[Any]:
        return [self.store.foreign_key(number.to_bytes(8, "little")) for number in numbers]

    def _timed(self, function: Callable[[], Any], limit_s: float) -> Any:
        """Call, and see that it ends by its deadline, but for what its process stood still."""
        process = self._world.process
        begun_s, stood_s = self._stage.now_s, process.stood_still_s
        result = function()
        took_s = self._stage.now_s - begun_s - (process.stood_still_s - stood_s)
        if took_s > limit_s + _GRACE_S:
            raise Violation(f"a call took {took_s:.1f} s, its deadline is after {limit_s} s")
        return result

    def _put(self, numbers: list[int]) -> list[Any]:
        self._stage.attempted.update(numbers)
        memory = [bytearray(CONTENTS[number]) for number in numbers]
        transfer = self.store.put(self._keys(numbers), memory)
        results = self._timed(transfer.result, TIMEOUT_S)
        for piece in memory:
            piece[:] = bytes(len(piece))  # it is the caller's again
        for result in results:
            if result in _WRONG:
                raise Violation(f"a put met what is not what it should be: {result}")
        self.store.flush(TIMEOUT_S)
        return list(results)

    def _load(self, numbers: list[int]) -> list[Any]:
        stage, keys = self._stage, self._keys(numbers)
        hit = self._timed(lambda: self.store.lookup(keys), LOOKUP_TIMEOUT_S)
        promised_s = stage.now_s
        for number in numbers[: hit.pages]:
            if number not in stage.attempted:
                raise Violation(f"a lookup promised page {number}, which nobody ever put")
        stage.outcome.promised += hit.pages
        if self._random.random() < 0.5:
            self._sleep(self._random.uniform(0, LEASE_S * 0.8))
        wanted = keys if self._random.random() < 0.5 else keys[: hit.pages]
        rooms = [bytearray(_FILL * PAGE.size_bytes) for _ in wanted]
        results = self._timed(self.store.get(wanted, rooms, lookup=hit).result, TIMEOUT_S)
        late = stage.now_s - promised_s >= LEASE_S
        for place, (number, result, room) in enumerate(zip(numbers, results, rooms, strict=False)):
            if isinstance(result, int):
                stage.outcome.delivered += 1
                if room != CONTENTS[number]:
                    raise Violation(f"page {number} has other bytes")
                continue
            if room != _FILL * PAGE.size_bytes:
                raise Violation(f"page {number} is a miss ({result}), and its memory was touched")
            if result in _WRONG:
                raise Violation(f"page {number} is {result} on a sound disk")
            deleted = stage.deleted_s.get(number, -1e9) >= promised_s - 2 * LEASE_S
            if place < hit.pages and stage.leases and not (late or deleted or stage.faulty):
                raise Violation(f"page {number} was promised and is {result}, {stage.now_s - promised_s:.1f} s later")
        return list(results)


async def _trouble(stage: Stage) -> None:
    """Faults of every kind, until cancelled."""
    world, server, chance = stage.world, stage.server, stage.random
    faults = world.faults
    faults.machines = frozenset({SERVER})
    while True:
        faults.reset = chance.choice((0, 0, 0.01, 0.05))
        faults.half_open = chance.choice((0, 0, 0, 0.01))
        faults.stall = chance.choice((0, 0, 0.1))
        faults.refuse = chance.choice((0, 0, 0.2))
        faults.slow_disk = chance.choice((0, 0, 0.1))
        faults.slow_disk_s = 0.5
        faults.short_read = faults.short_write = chance.choice((0, 0.3))
        for name in ("read_error", "write_error", "no_space", "name_error"):
            setattr(faults, name, chance.choice((0, 0, 0, 0.01)))
        await world.clock.sleep(chance.expovariate(1 / 3))
        what = chance.randrange(5)
        if what == 0:
            server.down_s = chance.choice((0.5, 5.0))
            server.kill()
        elif what == 1:
            server.process.kill_at(chance.randint(1, 400))
        elif what == 2:
            machine = chance.choice(_MACHINES[1:])
            world.partition(machine, SERVER)
            await world.clock.sleep(chance.expovariate(1 / 4))
            world.heal(machine, SERVER)
        elif what == 3 and stage.sets_clock:
            server.process.clock.step(chance.uniform(-1000, 1000))
            stage.clock_set = True
            faults.fired["clock_step"] += 1


async def _native_run(world: SimWorld) -> Outcome:
    stage = Stage(world)
    actors = [Actor(stage, machine) for machine in stage.random.sample(_MACHINES, stage.random.choice((2, 3)))]
    async with trio.open_nursery() as nursery:
        nursery.start_soon(stage.server.run)
        await stage.server.wait_up()
        tasks = count_tasks()
        async with trio.open_nursery() as working:
            for actor in actors:
                working.start_soon(actor.live)
            if stage.faulty:
                with trio.move_on_after(stage.random.uniform(10, 90)):
                    await _trouble(stage)
            world.faults.stop()
            for machine in _MACHINES:
                world.heal(machine, SERVER)
            stage.server.process.process.kill_at_call = None
            stage.server.down_s = 0.5
            stage.calm = True
        if stage.violation is not None:
            raise stage.violation
        await check_the_end(world, stage.server, tasks)
        nursery.cancel_scope.cancel()
    stage.outcome.fired += world.faults.fired
    stage.outcome.simulated_s = world.clock.monotonic_s()
    return stage.outcome


def run_native_seed(seed: int) -> Outcome:
    """Play one seed. Raises what went wrong, with the seed in its notes."""
    with patch.object(curvfs.client.sync, "Portal", GreenPortal):
        return run(_native_run, seed=seed)
