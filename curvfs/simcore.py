"""What the parts of the simulated world share: the seed, the fault plan, the trace, processes and time.

A :class:`Universe` is one run. On it stand *machines* (a file tree, a network name, a wall clock) and on machines
*processes* (descriptors, locks, listeners, connections). Every call into the world passes :meth:`SimProcess.enter`,
which writes the trace and is where a process can be killed between any two calls.
"""

from __future__ import annotations

import hashlib
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field

import trio

from curvfs.world import Clock, Random

#: The simulated runs begin here on the wall clock: 2026-01-01T00:00:00Z.
EPOCH_MS = 1_767_225_600_000

#: So many events at one instant are a livelock.
_EVENTS_PER_INSTANT = 200_000
#: How many events a trace keeps in full; all of them go into its digest.
_TRACE_TAIL = 4000


class ProcessKilled(BaseException):
    """Raised out of every call into the world that a killed process still makes.

    Not an ``Exception``: a process that is gone handles no errors and cleans nothing up.
    """


class Livelock(BaseException):
    """Somebody is busy without end: thousands of calls into the world, and no time passes."""


class Trace:
    """All that happened, in order: a digest of everything and the last events in full."""

    def __init__(self) -> None:
        self._hash = hashlib.blake2b(digest_size=16)
        self.count = 0
        self.tail: deque[str] = deque(maxlen=_TRACE_TAIL)

    def add(self, event: str) -> None:
        self._hash.update(event.encode(errors="surrogateescape"))
        self._hash.update(b"\n")
        self.count += 1
        self.tail.append(event)

    @property
    def digest(self) -> str:
        """Equal digests mean equal runs."""
        return self._hash.hexdigest()


@dataclass(slots=True)
class PlannedError:
    """An error that a chosen call shall meet; see :meth:`Faults.plan`."""

    call: str
    errno: int
    path: str
    skip: int
    times: int


@dataclass(slots=True)
class Faults:
    """The fault plan of one run. Probabilities are per call, from 0 (never) to 1; delays in seconds.

    Everything is off in a fresh plan except delays and splits, which are no faults. :attr:`fired` counts, by the name
    of the field, the faults that really happened: a run proves only what it met.
    """

    #: Machines that faults strike; empty: all.
    machines: frozenset[str] = frozenset()

    # Network.
    refuse: float = 0.0
    """A connect is refused."""
    reset: float = 0.0
    """A send is cut off: a random part goes out, then both ends see a reset."""
    half_open: float = 0.0
    """From this send on the bytes of the connection vanish, both ways, and nobody is told."""
    stall: float = 0.0
    """A send arrives up to ``stall_s`` late."""
    stall_s: float = 5.0

    # Disk.
    read_error: float = 0.0
    """EIO from a read."""
    write_error: float = 0.0
    """EIO from a write; a part of it may be in the file."""
    sync_error: float = 0.0
    """EIO from fsync or fdatasync: what was dirty is lost for good, and the next sync succeeds."""
    name_error: float = 0.0
    """EIO from a call that changes or reads a directory."""
    no_space: float = 0.0
    """ENOSPC from a write or a call that creates a name."""
    short_read: float = 0.0
    """A read delivers less than it could."""
    short_write: float = 0.0
    """A write takes less than it was given."""
    slow_disk: float = 0.0
    """A disk call takes up to ``slow_disk_s`` longer."""
    slow_disk_s: float = 2.0
    bit_rot: float = 0.0
    """One bit of what is read flips on the medium, and stays flipped."""

    fired: Counter[str] = field(default_factory=Counter)
    planned: list[PlannedError] = field(default_factory=list)
    active: bool = True
    random: Random = field(default_factory=Random)

    def strikes(self, name: str, probability: float, machine: str) -> bool:
        """Whether the fault of this name happens now; counts it when it does."""
        if not self.active or probability <= 0 or (self.machines and machine not in self.machines):
            return False
        if self.random.random() >= probability:
            return False
        self.fired[name] += 1
        return True

    def plan(self, call: str, errno: int, *, path: str = "", skip: int = 0, times: int = 1) -> None:
        """Let a disk call (by its method's name) fail with ``errno`` on paths that contain ``path``, after it was let
        through ``skip`` times, ``times`` times over. Counted in :attr:`fired` under the call's name."""
        self.planned.append(PlannedError(call, errno, path, skip, times))

    def planned_error(self, call: str, path: str) -> int:
        """The errno that this call shall meet, or 0."""
        if not self.active:
            return 0
        for plan in self.planned:
            if plan.call == call and plan.path in path and plan.times > 0:
                if plan.skip > 0:
                    plan.skip -= 1
                    continue
                plan.times -= 1
                self.fired[call] += 1
                return plan.errno
        return 0

    def stop(self) -> None:
        """No faults from here on. (Partitions are healed, and half-open connections stay so, as in life.)"""
        self.active = False


class Universe:
    """One run: the seed and what all machines share."""

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.trace = Trace()
        self.faults = Faults(random=self.rng("faults"))
        self.processes: list[SimProcess] = []
        self._base_s: float | None = None
        self._instant_s = 0.0
        self._instant_start = 0

    def rng(self, name: str) -> Random:
        """A stream of random numbers of its own, so that one part's draws do not shift another's."""
        return Random(f"{self.seed}/{name}")

    def note(self, event: str) -> None:
        """Write to the trace, with the time."""
        now_s = self.now_s()
        if now_s != self._instant_s:
            self._instant_s, self._instant_start = now_s, self.trace.count
        elif self.trace.count - self._instant_start > _EVENTS_PER_INSTANT:
            raise Livelock(f"{_EVENTS_PER_INSTANT} events at {now_s:.9f} s; the last: {event}")
        self.trace.add(f"{now_s:.9f} {event}")

    def now_s(self) -> float:
        """Seconds since the run began."""
        try:
            current_s = trio.current_time()
        except RuntimeError:  # before the run begins, or after its end
            return 0.0
        if self._base_s is None:
            self._base_s = current_s
        return current_s - self._base_s


class SimProcess:
    """A process of a machine: what goes when it is killed registers with :attr:`on_death`.

    Blocking calls take time in one of two ways. In a worker thread (:meth:`in_thread`) the time is owed by the thread
    alone. On the event loop the whole process stands still: all its tasks, at their next call into the world, wait
    until :attr:`busy_until_s`.
    """

    def __init__(self, universe: Universe, machine: str) -> None:
        self.universe = universe
        self.machine = machine
        self.pid = len(universe.processes) + 1
        self.alive = True
        self.calls = 0
        self.kill_at_call: int | None = None
        self.on_death: list[Callable[[bool], None]] = []
        self.scopes: list[trio.CancelScope] = []
        self.busy_until_s = 0.0
        #: Seconds that blocking calls on the event loop have taken so far.
        self.stood_still_s = 0.0
        self._owed_s: float | None = None
        universe.processes.append(self)

    def __repr__(self) -> str:
        return f"{self.machine}.{self.pid}"

    def note(self, event: str) -> None:
        """Write to the trace."""
        self.universe.note(f"{self!r} {event}")

    def enter(self, call: str, detail: str = "") -> None:
        """Begin a call into the world. Raises :class:`ProcessKilled` in a process that is dead, or dies here."""
        self.check_alive()
        self.calls += 1
        self.note(f"{call} {detail}" if detail else call)
        if self.kill_at_call is not None and self.calls >= self.kill_at_call:
            self.die(silently=False)
            raise ProcessKilled

    def check_alive(self) -> None:
        """Raises :class:`ProcessKilled` in a process that died while it waited."""
        if not self.alive:
            raise ProcessKilled

    async def turn(self) -> None:
        """A checkpoint, and until the process is not blocked any more."""
        await trio.lowlevel.checkpoint()
        self.check_alive()
        while (wait_s := self.busy_until_s - self.universe.now_s()) > 0:
            await trio.sleep_until(trio.current_time() + wait_s)
            self.check_alive()

    def now_s(self) -> float:
        """Seconds since the run began, as this process sees them: what its blocking calls take has passed."""
        return max(self.universe.now_s(), self.busy_until_s) + (self._owed_s or 0.0)

    def spend(self, duration_s: float) -> None:
        """Let time pass in blocking code."""
        if self._owed_s is not None:
            self._owed_s += duration_s
        else:
            self.busy_until_s = self.now_s() + duration_s
            self.stood_still_s += duration_s

    def in_thread(self, function: Callable[[], object]) -> tuple[object, BaseException | None, float]:
        """Call a blocking function as a worker thread would. Returns its result, its error and the seconds it took."""
        outer, self._owed_s = self._owed_s, 0.0
        result: object = None
        error: BaseException | None = None
        try:
            result = function()
        except BaseException as caught:
            error = caught
        finally:
            owed_s, self._owed_s = self._owed_s, outer
        return result, error, owed_s

    def die(self, *, silently: bool) -> None:
        """End at once; ``silently`` when the whole machine went and no kernel is left to tell the peers."""
        if not self.alive:
            return
        self.alive = False
        self.note("dies silently" if silently else "is killed")
        for release in self.on_death:
            release(silently)
        for scope in self.scopes:
            scope.cancel()


class SimClock(Clock):
    """trio's clock, and a wall clock per machine that steps when told to."""

    def __init__(self, process: SimProcess, offsets_ms: dict[str, int]) -> None:
        self._process = process
        self._offsets_ms = offsets_ms

    def monotonic_s(self) -> float:
        return self._process.now_s()

    def time_ms(self) -> int:
        return EPOCH_MS + int(self._process.now_s() * 1000) + self._offsets_ms.get(self._process.machine, 0)

    def step(self, step_s: float) -> None:
        """Move this machine's wall clock by ``step_s`` (back if negative). The monotonic clock does not notice."""
        machine = self._process.machine
        self._offsets_ms[machine] = self._offsets_ms.get(machine, 0) + round(step_s * 1000)
        self._process.note(f"wall clock steps by {step_s} s")

    def block(self, duration_s: float) -> None:
        self._process.spend(duration_s)
