"""The simulated world: one seed is one run, of the very code that runs on the real one.

::

    async def main(world):                       # a process on the machine "client"
        server = world.host("server")            # another process, on another machine
        async with trio.open_nursery() as nursery:
            nursery.start_soon(server.run, serve, server)
            world.faults.reset = 0.01            # one send in a hundred is cut off
            ...
            server.kill()                        # its ports, connections, descriptors and locks go, its files stay
            server.power_cut()                   # ... and what was not synced goes too, as the seed has it

    run(main, seed=7)

Time is trio's mock clock, which jumps when everybody waits. Scheduling, delays, splits and faults are drawn from the
seed. Blocking functions run inline: :meth:`SimThreads.run` lets virtual time pass around them, and a thread that is
started runs to its end at once. What a run did is in ``world.trace`` (equal digests: equal runs), which faults struck
in ``world.faults.fired``; an error that leaves :func:`run` carries the seed and the last events as notes.

The parts: :mod:`curvfs.simnet`, :mod:`curvfs.simdisk` over :mod:`curvfs.simfs`, and :mod:`curvfs.simcore`.

Runs repeat in another process of the same Python if the code under test does not depend on the order of sets of
strings; set ``PYTHONHASHSEED`` to find out.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, TypeVar, TypeVarTuple, cast

import trio
import trio.testing

from curvfs.errors import CurvfsError
from curvfs.simcore import Faults, ProcessKilled, SimClock, SimProcess, Trace, Universe
from curvfs.simdisk import SimDisk, SimMachineDisk
from curvfs.simnet import SimInternet, SimMachineNet, SimNetwork
from curvfs.world import ThreadHandle, ThreadPool, Threads, World

T = TypeVar("T")
Ts = TypeVarTuple("Ts")

__all__ = ["Faults", "ProcessKilled", "SimThreads", "SimWorld", "run", "simulated_world"]

#: The events shown with a failure.
_SHOWN_EVENTS = 30


class SimThreads(Threads):
    """Worker threads that are none: everything runs inline."""

    inline = True

    def __init__(self, process: SimProcess) -> None:
        self._process = process
        self._random = process.universe.rng(f"threads/{process!r}")

    async def run(self, function: Callable[[*Ts], T], *args: *Ts, abandon_on_cancel: bool = False) -> T:
        """As in life the call cannot be cancelled once it has begun; abandoned, it still runs to its end."""
        self._process.enter("thread", getattr(function, "__qualname__", ""))
        await self._process.turn()
        ran = False
        try:
            with trio.CancelScope(shield=not abandon_on_cancel):
                await trio.sleep_until(trio.current_time() + self._random.uniform(0, 5e-5))
                self._process.check_alive()
                ran = True
                result, error, owed_s = self._process.in_thread(lambda: function(*args))
                await trio.sleep_until(trio.current_time() + owed_s)
                self._process.check_alive()
        except trio.Cancelled:
            if not ran and self._process.alive:
                self._process.in_thread(lambda: function(*args))
            raise
        _raise(error)
        return cast(T, result)

    def start(self, function: Callable[[], None], *, name: str) -> ThreadHandle:
        self._process.enter("start", name)
        _raise(self._process.in_thread(function)[1])
        return _EndedThread()

    def pool(self, size: int, *, name: str) -> ThreadPool:
        return _InlinePool(self._process)


def _raise(error: BaseException | None) -> None:
    if error is not None:
        raise error


class _EndedThread:
    def join(self, timeout: float | None = None) -> None:
        return

    def is_alive(self) -> bool:
        return False


class _InlinePool(ThreadPool):
    def __init__(self, process: SimProcess) -> None:
        self._process = process
        self._closed = False

    def submit(self, job: Callable[[], None]) -> None:
        if self._closed:
            raise CurvfsError("The thread pool is closed; no more work is taken.")
        self._process.enter("job")
        _raise(self._process.in_thread(job)[1])

    def close(self, timeout_s: float | None = None) -> bool:
        self._closed = True
        return True


@dataclass
class _Shared:
    """One per run: the machines."""

    universe: Universe
    internet: SimInternet
    disks: dict[str, SimMachineDisk] = field(default_factory=dict)
    offsets_ms: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class SimWorld(World):
    """The world of one process, and the hand that moves it."""

    clock: SimClock
    net: SimNetwork
    disk: SimDisk
    threads: SimThreads
    process: SimProcess
    _shared: _Shared

    def process_id(self) -> int:
        return self.process.pid

    @property
    def seed(self) -> int:
        return self._shared.universe.seed

    @property
    def faults(self) -> Faults:
        """The fault plan of the run, for all its machines."""
        return self._shared.universe.faults

    @property
    def trace(self) -> Trace:
        return self._shared.universe.trace

    @property
    def alive(self) -> bool:
        return self.process.alive

    def host(self, name: str) -> SimWorld:
        """A new process on the machine of this name, which comes into being, or back to power, if need be."""
        return _process_world(self._shared, name)

    def sibling(self) -> SimWorld:
        """A new process on the same machine."""
        return self.host(self.process.machine)

    async def run(self, function: Callable[..., Awaitable[object]], *args: object) -> None:
        """Run the program of this process to its end, or until the process is killed: that is no error."""
        with trio.CancelScope() as scope:
            self.process.scopes.append(scope)
            try:
                self.process.check_alive()
                await function(*args)
            except BaseException as error:
                if self.alive or isinstance(error, trio.Cancelled | KeyboardInterrupt):
                    raise
                if isinstance(error, BaseExceptionGroup):  # of a dead process only its being cancelled counts
                    cancelled = error.split((trio.Cancelled, KeyboardInterrupt))[0]
                    if cancelled is not None:
                        raise cancelled from None
            finally:
                self.process.scopes.remove(scope)

    def kill(self) -> None:
        """Kill this process, now. Its tasks (below :meth:`run`) end at their next step; files stay as they are."""
        self.process.die(silently=False)

    def kill_at(self, call: int) -> None:
        """Kill this process at its ``call``-th call into the world from now, instead of that call."""
        self.process.kill_at_call = self.process.calls + call

    def power_cut(self) -> None:
        """Cut the power of this machine: all its processes go without a word, unsynced data as the seed has it.
        :meth:`host` switches it on again."""
        machine = self.process.machine
        self._shared.universe.note(f"{machine} power cut")
        for process in self._shared.universe.processes:
            if process.machine == machine:
                process.die(silently=True)
        self._shared.internet.power(machine, on=False)
        self._shared.disks[machine].tree.cut_power()
        self.faults.fired["power_cut"] += 1

    def partition(self, one: str, other: str) -> None:
        """Cut the link between two machines: bytes and connects wait for :meth:`heal`, without an error."""
        self._shared.internet.set_cut(one, other, True)

    def heal(self, one: str, other: str) -> None:
        self._shared.internet.set_cut(one, other, False)


def _process_world(shared: _Shared, machine: str) -> SimWorld:
    process = SimProcess(shared.universe, machine)
    if machine not in shared.disks:
        shared.disks[machine] = SimMachineDisk(process, shared.offsets_ms)
        shared.internet.machines[machine] = SimMachineNet(machine)
    if not shared.internet.machines[machine].powered:
        shared.internet.power(machine, on=True)
    disk = SimDisk(process, shared.disks[machine])
    return SimWorld(
        clock=SimClock(process, shared.offsets_ms),
        random=shared.universe.rng(f"process/{process!r}"),
        net=SimNetwork(process, disk, shared.internet, shared.internet.machines[machine]),
        disk=disk,
        threads=SimThreads(process),
        process=process,
        _shared=shared,
    )


def simulated_world(seed: int, *, machine: str = "client") -> SimWorld:
    """A fresh world: one process on one machine with an empty disk. Calls that wait need trio;
    only under :func:`run` is the scheduling the seed's as well."""
    universe = Universe(seed)
    return _process_world(_Shared(universe, SimInternet(universe)), machine)


def run(
    function: Callable[[SimWorld, *Ts], Awaitable[T]],
    *args: *Ts,
    seed: int,
    limit_s: float = 24 * 3600.0,
) -> T:
    """Run ``function(world, *args)`` in a fresh world and return its result.

    A run that has not ended after ``limit_s`` simulated seconds is stuck (everybody waits for somebody) and raises
    CurvfsError. Whatever is raised carries notes with the seed and the last events.
    """
    world = simulated_world(seed)

    async def main() -> T:
        world.clock.monotonic_s()  # the run begins now
        with trio.CancelScope() as scope:
            waiting: list[str] = []
            trio.lowlevel.spawn_system_task(_give_up, scope, limit_s, waiting)
            return await function(world, *args)
        error = CurvfsError(f"The run did not end within {limit_s:g} simulated seconds: somebody waits forever.")
        for task in waiting:
            error.add_note(f"waiting: {task}")
        raise error

    try:
        with _seeded_scheduling(seed):
            return trio.run(main, clock=trio.testing.MockClock(autojump_threshold=0), strict_exception_groups=True)
    except BaseException as error:
        error.add_note(f"simulation seed {seed}; faults that struck: {dict(world.faults.fired)}; the last events:")
        for event in list(world.trace.tail)[-_SHOWN_EVENTS:]:
            error.add_note(f"  {event}")
        raise


async def _give_up(scope: trio.CancelScope, limit_s: float, waiting: list[str]) -> None:
    """Cancel a run that takes too long, and say where its tasks wait."""
    await trio.sleep_until(trio.current_time() + limit_s)
    root = trio.lowlevel.current_root_task()
    tasks = [root] if root is not None else []
    for task in tasks:  # grows as it goes
        tasks += [child for nursery in task.child_nurseries for child in nursery.child_tasks]
        waiting.append(" > ".join(_frames(task)) or task.name)
    scope.cancel()


def _frames(task: trio.lowlevel.Task) -> list[str]:
    """Where a task waits, from the outside in."""
    found = []
    waiting: Any = task.coro
    while waiting is not None:
        frame = getattr(waiting, "cr_frame", None)
        if frame is not None:
            found.append(f"{frame.f_code.co_name} {frame.f_code.co_filename.rpartition('/')[2]}:{frame.f_lineno}")
        waiting = getattr(waiting, "cr_await", None)
    return found


#: trio's switch, there for Hypothesis.
_SWITCH = "_ALLOW_DETERMINISTIC_SCHEDULING"


@contextlib.contextmanager
def _seeded_scheduling(seed: int) -> Iterator[None]:
    """Make trio's choice among runnable tasks the seed's. The only place that touches trio's inside: the switch and
    the generator that trio keeps there for Hypothesis. Garbage collection waits, for finalizers run when it pleases."""
    scheduler = vars(trio._core._run)
    before, generator = scheduler[_SWITCH], scheduler["_r"]
    state = generator.getstate()
    collecting = gc.isenabled()
    gc.disable()
    scheduler[_SWITCH] = True
    generator.seed(seed)
    try:
        yield
    finally:
        scheduler[_SWITCH] = before
        generator.setstate(state)
        if collecting:
            gc.enable()
