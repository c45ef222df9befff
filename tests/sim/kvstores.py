"""Seeds for kvstore: several processes on one simulated disk, and another one goes on at any call into the world.

Each process runs its program in a thread of its own, one of them at a time: at every call into the world the seed may
let another one go on. So two writers meet between any two disk calls, a reader comes between the write and the rename,
and an evictor is killed between the rename and its record. After every call the whole tree is looked at.

Even seeds are about *leases*: no quota, objects are evicted, swept and deleted, and what a lookup promised must be
delivered. Odd seeds are about a *quota* that is much too small, with writers that are killed. In both:

* a get returns the exact bytes of its key, or a miss that touched nothing; nothing looks damaged, unless the disk rots;
* a lookup promises nothing that nobody ever put;
* an object that is there is never replaced by another file;
* what objects, trash and staged files take keeps its bound: the quota and a chunk for each writer that lives, or ended
  so lately that nobody may have made room since;
* every call ends by its deadline; and in the end no buffer, descriptor, page or staged file is left.
"""

from __future__ import annotations

import random
import threading
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import kvstore
from curvfs.errors import CurvfsError
from curvfs.simcore import ProcessKilled, SimProcess
from curvfs.simfs import Inode
from curvfs.simworld import SimWorld, simulated_world
from kvstore import Capacity, Geometry, Identity, KVStore, Miss
from kvstore.header import ObjectLayout

PAGE = Geometry.of({"a": ("float16", (3000,)), "b": ("uint8", (9000,))}, page_tokens=4)
WHOSE = Identity.of(PAGE, model="m", revision="r")
OBJECT_BYTES = ObjectLayout(PAGE).object_bytes
KEYS = 48
QUOTA_OBJECTS = 12
LEASE_S = 5.0
TIMEOUT_S = 30.0
ACTORS = 3
#: What a store writes to find out how to, when it is opened.
_PROBE_BYTES = 4096
_STEPS = 14
#: How often another process goes on, of all calls into the world.
_SWITCHES = 0.3
#: How long nobody may have made room for what a writer left that ended.
_FORGOTTEN_S = 150.0
#: The same where the clock was set: its last record must first be seen, in a flush, and is then watched for 120 s.
_FORGOTTEN_STEPPED_S = 300.0
#: Misses that say that an object is not what it should be.
_WRONG = frozenset({Miss.DAMAGED, Miss.FOREIGN, Miss.COLLISION, Miss.MISMATCH, Miss.NEWER})


class Violation(BaseException):
    """A rule did not hold. Not an ``Exception``: it is found in the middle of the product, which handles those."""


def content(number: int) -> bytes:
    return random.Random(number).randbytes(PAGE.size_bytes)


CONTENTS = [content(number) for number in range(KEYS)]


@dataclass(slots=True)
class Outcome:
    calls: Counter[str] = field(default_factory=Counter)
    fired: Counter[str] = field(default_factory=Counter)
    simulated_s: float = 0.0
    worst_bytes: int = 0
    promised: int = 0
    delivered: int = 0


class Stage:
    """The processes, whose turn it is, and what the tree looks like after every call."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(f"kv/{seed}")
        self.leases = seed % 2 == 0
        #: The disk's clock is set while others go on.
        self.clock = random.Random(f"kv clock/{seed}")
        self.sets_clock = not self.leases and self.clock.random() < 0.4
        self.world = simulated_world(seed)
        self.world.disk.mkdir("/pool")
        self.outcome = Outcome()
        self.attempted: set[int] = set()
        #: When objects were removed for good by somebody who may: a delete, a clear.
        self.deleted_s: dict[int, float] = {}
        self.now_s = 0.0
        self.jumped_s = 0.0
        self._turns: dict[int, threading.Semaphore] = {}
        self._running: list[int] = []
        self._failure: BaseException | None = None
        self._objects: dict[str, int] = {}
        self._ended_s: list[float] = []
        self.writers = 0

    # ----------------------------------------------------------------------------------------------------------- turns

    def play(self, programs: list[Callable[[], None]]) -> None:
        """Run all programs to their end. Raises what the first one raised."""
        threads = []
        for number, program in enumerate(programs):
            self._turns[number] = threading.Semaphore(0)
            self._running.append(number)
            threads.append(threading.Thread(target=self._act, args=(number, program), daemon=True))
        for thread in threads:
            thread.start()
        self._turns[self.random.choice(self._running)].release()
        for thread in threads:
            thread.join(120)
            if thread.is_alive():
                raise Violation("a program does not end") from self._failure
        if self._failure is not None:
            raise self._failure

    def _act(self, number: int, program: Callable[[], None]) -> None:
        self._turns[number].acquire()
        try:
            program()
        except BaseException as error:
            self._failure = self._failure or error
        self._running.remove(number)
        if self._running:
            self._turns[self.random.choice(self._running)].release()

    def join(self, number: int, world: SimWorld) -> None:
        """This process takes part: at its calls others may go on."""
        process = world.process
        enter = process.enter

        def hooked(call: str, detail: str = "") -> None:
            try:
                self._after_a_call()
            except Violation as error:
                self._failure = self._failure or error
            self._switch(number)
            self.step_clock()
            self.set_clock(process)
            enter(call, detail)
            self.now_s = max(self.now_s, process.now_s())

        process.enter = hooked  # type: ignore[method-assign]

    def _switch(self, number: int) -> None:
        if self._failure is not None:
            raise ProcessKilled
        if self.random.random() < _SWITCHES:
            self.let_others(number)

    def let_others(self, number: int) -> None:
        """Somebody else goes on, if there is anybody."""
        if len(self._running) < 2:
            return
        other = self.random.choice(self._running)
        if other != number:
            self._turns[other].release()
            self._turns[number].acquire()
            if self._failure is not None:
                raise ProcessKilled

    def step_clock(self) -> None:
        """Set the clock of the disk, in some of the seeds; time does not pass by that."""
        if self.sets_clock and self.clock.random() < 0.005:
            self.world.clock.step(self.clock.choice((-3600.0, -400.0, 400.0, 3600.0)))
            self.outcome.fired["clock_step"] += 1

    def set_clock(self, process: SimProcess) -> None:
        """One time for all of them."""
        if process.now_s() < self.now_s:
            process.busy_until_s += self.now_s - process.now_s()

    def pass_time(self, world: SimWorld, seconds: float) -> None:
        world.clock.block(seconds)
        self.jumped_s += seconds
        self.now_s = max(self.now_s, world.process.now_s())

    # ----------------------------------------------------------------------------------------------------------- rules

    def _after_a_call(self) -> None:
        objects: dict[str, int] = {}
        total = self._measure(self.world.disk.tree.root, "", objects)
        for name, inode in objects.items():
            if self._objects.get(name, inode) != inode:
                raise Violation(f"{name} was replaced while it was there")
        self._objects = objects
        self.outcome.worst_bytes = max(self.outcome.worst_bytes, total)
        if self.leases:
            return
        forgotten_s = _FORGOTTEN_STEPPED_S if self.outcome.fired["clock_step"] else _FORGOTTEN_S
        ended = sum(self.now_s - when_s < forgotten_s for when_s in self._ended_s)
        bound = (QUOTA_OBJECTS + self.writers + ended) * OBJECT_BYTES + ACTORS * _PROBE_BYTES
        if total > bound:
            raise Violation(
                f"{total // OBJECT_BYTES} objects' worth is in the pool: quota {QUOTA_OBJECTS}, {self.writers} writers,"
                f" {ended} that ended lately"
            )

    def _measure(self, directory: Inode, path: str, objects: dict[str, int]) -> int:
        total = 0
        for name, inode in directory.entries.items():
            if inode.is_directory:
                total += self._measure(inode, f"{path}/{name}", objects)
            else:
                total += inode.length_bytes
                if name.endswith(".safetensors") and "/." not in path:
                    objects[f"{path}/{name}"] = inode.number
        return total

    def ended(self) -> None:
        """A writer died or was closed."""
        self.writers -= 1
        self._ended_s.append(self.now_s)


class Actor:
    """One process after the other on one machine, with a store; killed now and then."""

    def __init__(self, stage: Stage, number: int, *, faults: bool) -> None:
        self._stage = stage
        self._number = number
        self._faults = faults
        self._random = random.Random(f"{stage.world.seed}/{number}")
        self._world: SimWorld | None = None
        self._store: KVStore | None = None

    def program(self) -> None:
        stage = self._stage
        for _ in range(_STEPS):
            try:
                if self._store is None:
                    self._open()
                self._step()
            except CurvfsError:
                # A clock that is set has the directory of a store swept that is just being opened.
                if not self._faults and (self._store is not None or not stage.sets_clock):
                    raise
            except ProcessKilled:
                if stage._failure is not None or self._world is None or self._world.alive:
                    raise
                self._store = None
                stage.ended()
        try:
            if self._store is not None:
                self._close()
        except ProcessKilled:
            if stage._failure is not None or self._world is None or self._world.alive:
                raise
            stage.ended()

    def _open(self) -> None:
        stage = self._stage
        self._world = stage.world.sibling()
        stage.join(self._number, self._world)
        capacity = None
        if not stage.leases:
            stage.writers += 1
            high = self._random.choice((1.0, 0.9))
            capacity = Capacity(quota_bytes=QUOTA_OBJECTS * OBJECT_BYTES, high=high, low=high - 0.1, rescan_s=60.0)
            if self._random.random() < 0.4:
                self._world.kill_at(self._random.randrange(50, 1500))
        try:
            self._store = kvstore.open(
                "file:///pool",
                WHOSE,
                geometry=PAGE,
                world=self._world,
                depth=2,
                lease_s=LEASE_S,
                timeout_s=TIMEOUT_S,
                memory_bytes=self._random.choice((0, 0, 3 * OBJECT_BYTES)) if not stage.leases else 0,
                capacity=capacity,
            )
        except CurvfsError:
            stage.writers -= not stage.leases
            raise

    def _close(self) -> None:
        store, world = self._store, self._world
        assert store is not None
        assert world is not None
        stats = store.stats()
        if stats.in_flight or stats.slabs_in_use or stats.views_out:
            raise Violation(f"pages or buffers are left: {stats}")
        if stats.quarantined or stats.read_again:
            raise Violation("an object looked damaged on a sound disk")
        store.close()
        self._store = None
        if world.disk.open_paths():
            raise Violation(f"left open: {world.disk.open_paths()}")
        if not self._stage.leases:
            self._stage.ended()

    def _now(self) -> None:
        """Others have let time pass: a call that begins here begins now."""
        assert self._world is not None
        self._stage.set_clock(self._world.process)

    def _step(self) -> None:
        self._now()
        kind = self._random.choices(
            ("put", "load", "evict", "wait", "sweep", "delete", "reopen"),
            (8, 8, 3, 3, 2, 1, 1) if self._stage.leases else (12, 6, 0, 2, 1, 1, 1),
        )[0]
        self._stage.outcome.calls[kind] += 1
        getattr(self, f"_{kind}")()

    def _some(self) -> list[int]:
        first = self._random.randrange((12 if self._stage.leases else KEYS) - 6)
        return list(range(first, first + self._random.randint(1, 6)))

    def _keys(self, numbers: list[int]) -> list[Any]:
        assert self._store is not None
        return [self._store.foreign_key(number.to_bytes(8, "little")) for number in numbers]

    def _timed(self, function: Callable[[], Any]) -> Any:
        """Call, and see that it ends by its deadline; what others made of the time does not count."""
        assert self._world is not None
        begun_s, jumped_s = self._stage.now_s, self._stage.jumped_s
        result = function()
        took_s = self._stage.now_s - begun_s - (self._stage.jumped_s - jumped_s)
        if took_s > TIMEOUT_S + 1 and not self._faults:
            raise Violation(f"a call took {took_s:.1f} s")
        return result

    def _put(self) -> None:
        assert self._store is not None
        numbers = self._some()
        self._stage.attempted.update(numbers)
        transfer = self._store.put(self._keys(numbers), [bytearray(CONTENTS[number]) for number in numbers])
        results = self._timed(transfer.result)
        for result in results:
            if result in _WRONG:
                raise Violation(f"a put met what is not what it should be: {result}")

    def _load(self) -> None:
        assert self._store is not None
        assert self._world is not None
        store, stage, numbers = self._store, self._stage, self._some()
        keys = self._keys(numbers)
        hit = self._timed(lambda: store.lookup(keys))
        promised_s = stage.now_s
        for number in numbers[: hit.pages]:
            if number not in stage.attempted:
                raise Violation(f"a lookup promised page {number}, which nobody ever put")
        stage.outcome.promised += hit.pages
        if self._random.random() < 0.5:
            stage.pass_time(self._world, self._random.uniform(0, LEASE_S * 0.9))
            for _ in range(self._random.randrange(60)):
                stage.let_others(self._number)
        self._now()
        wanted = keys if self._random.random() < 0.5 else keys[: hit.pages]
        rooms = [bytearray(b"\xee" * PAGE.size_bytes) for _ in wanted]
        results = self._timed(store.get(wanted, rooms, lookup=hit).result)
        late = stage.now_s - promised_s >= LEASE_S
        for place, (number, result, room) in enumerate(zip(numbers, results, rooms, strict=False)):
            if isinstance(result, int):
                stage.outcome.delivered += 1
                if room != CONTENTS[number]:
                    raise Violation(f"page {number} has other bytes")
                continue
            if room != b"\xee" * PAGE.size_bytes:
                raise Violation(f"page {number} is a miss ({result}), and its memory was touched")
            if result in _WRONG:
                raise Violation(f"page {number} is {result} on a sound disk")
            deleted = stage.deleted_s.get(number, -1e9) >= promised_s - 2 * LEASE_S
            if place < hit.pages and stage.leases and not (late or deleted or self._faults):
                raise Violation(f"page {number} was promised and is {result}, {stage.now_s - promised_s:.1f} s later")

    def _evict(self) -> None:
        assert self._store is not None
        self._store.evict(self._keys(self._some()))

    def _delete(self) -> None:
        assert self._store is not None
        numbers = self._some()
        for number in numbers:  # from before the call on: it may be gone at any moment of it
            self._stage.deleted_s[number] = float("inf")
        self._store.delete(self._keys(numbers))
        for number in numbers:
            self._stage.deleted_s[number] = self._stage.now_s

    def _sweep(self) -> None:
        assert self._store is not None
        self._store.sweep()

    def _wait(self) -> None:
        assert self._world is not None
        self._stage.pass_time(self._world, self._random.choice((0.5, 5.0, 40.0, 100.0)))

    def _reopen(self) -> None:
        self._close()
        self._open()


def run_kv_seed(seed: int) -> Outcome:
    """Play one seed. Raises what went wrong, with the seed in its notes."""
    stage = Stage(seed)
    faults = stage.random.random() < 0.3
    if faults:
        for name in ("short_read", "short_write", "read_error", "write_error", "name_error", "slow_disk"):
            setattr(stage.world.faults, name, stage.random.choice((0.0, 0.01)))
    else:
        stage.world.faults.slow_disk = 0.02
        stage.world.faults.slow_disk_s = 0.05
    actors = [Actor(stage, number, faults=faults) for number in range(ACTORS)]
    try:
        stage.play([actor.program for actor in actors])
    except BaseException as error:
        note = f"kvstore seed {seed}; {'faulty' if faults else 'sound'} disk; {dict(stage.outcome.calls)}"
        if isinstance(error, Violation):
            raise AssertionError(f"{error} ({note})") from error
        error.add_note(note)
        raise
    stage.outcome.fired += stage.world.faults.fired
    stage.outcome.simulated_s = stage.now_s
    return stage.outcome
