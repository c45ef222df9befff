"""The one world: clock, random numbers, network, disk and threads, injected into every layer.

Nothing but this module, :mod:`curvfs.sockets` and :mod:`curvfs.disk` imports ``time``, ``random``, ``socket`` or
``threading``, or calls ``os.pread`` and friends (ruff's banned-api rule holds that). What needs one of them takes a
:class:`World` and uses its five parts, so that the seeded simulation (``World.simulated(seed)``, see
:mod:`curvfs.simworld`) runs the very same code on a virtual clock, a lossy network and a disk that loses power.

trio itself may be imported anywhere: its timeouts follow trio's clock, which the simulation replaces. Here it is
imported when it is used: a store of a directory never does, and takes half as long to import.

Errors: :class:`Network` raises :class:`~curvfs.errors.TransportError` only; :class:`Disk` raises ``OSError`` as ``os``
does, to be mapped at the edge that knows what was being done.
"""

from __future__ import annotations

import abc
import os
import queue
import random
import socket
import threading
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol, TypeVar, TypeVarTuple

from curvfs.buffers import Buffer
from curvfs.disk import NO_LINKS, DirectIo, Disk, RealDisk
from curvfs.errors import ConnectFailed, CurvfsError
from curvfs.network import Listener, Network, Stream

__all__ = [
    "NO_LINKS",
    "Buffer",
    "Clock",
    "DirectIo",
    "Disk",
    "Listener",
    "Network",
    "Random",
    "RealClock",
    "RealDisk",
    "RealNetwork",
    "RealThreads",
    "Stream",
    "ThreadHandle",
    "ThreadPool",
    "Threads",
    "World",
]

T = TypeVar("T")
Ts = TypeVarTuple("Ts")

# ---------------------------------------------------------------------------------------------------------- clock


class Clock(abc.ABC):
    """Time. Durations come from :meth:`monotonic_s`, stamps from :meth:`time_ms`."""

    @abc.abstractmethod
    def monotonic_s(self) -> float:
        """Seconds on a clock that never steps. Callable from any thread."""

    @abc.abstractmethod
    def time_ms(self) -> int:
        """Milliseconds since the Unix epoch; may step. Callable from any thread."""

    async def sleep(self, duration_s: float) -> None:
        """Sleep in a trio task, on trio's clock, which the simulation replaces."""
        import trio

        await trio.sleep(duration_s)

    @abc.abstractmethod
    def block(self, duration_s: float) -> None:
        """Sleep in a plain thread."""


class RealClock(Clock):
    def monotonic_s(self) -> float:
        return time.monotonic()

    def time_ms(self) -> int:
        return time.time_ns() // 1_000_000

    def block(self, duration_s: float) -> None:
        time.sleep(duration_s)


# --------------------------------------------------------------------------------------------------------- random


class Random(random.Random):
    """Random numbers: ``random.Random`` plus the two shapes that the product needs."""

    def uuid(self) -> str:
        """A version 4 UUID as text."""
        return str(uuid.UUID(int=self.getrandbits(128), version=4))

    def request_id(self) -> int:
        """A positive 63-bit id with room to add an index (batch calls do)."""
        return self.getrandbits(62) + 1


# -------------------------------------------------------------------------------------------------------- threads


class ThreadHandle(Protocol):
    """A running plain thread."""

    def join(self, timeout: float | None = None) -> None: ...

    def is_alive(self) -> bool: ...


class Threads(abc.ABC):
    """Worker threads, and the primitives that plain threads meet at.

    In the simulation a started thread runs to its end at once and :meth:`run` runs inline, so code that hands work
    to a pool through :meth:`pool` behaves the same, only in one order per seed.
    """

    #: Whether :meth:`start` runs a function to its end at once, so that one without an end must not be started.
    inline = False

    @abc.abstractmethod
    async def run(self, function: Callable[[*Ts], T], *args: *Ts, abandon_on_cancel: bool = False) -> T:
        """Run a blocking function in a worker thread and wait for it in a trio task."""

    @abc.abstractmethod
    def start(self, function: Callable[[], None], *, name: str) -> ThreadHandle:
        """Start a daemon thread."""

    @abc.abstractmethod
    def pool(self, size: int, *, name: str) -> ThreadPool:
        """A pool of ``size`` threads that serve one queue; whoever submits bounds what is in flight."""

    def lock(self) -> threading.Lock:
        return threading.Lock()

    def condition(self) -> threading.Condition:
        return threading.Condition()

    def event(self) -> threading.Event:
        return threading.Event()


class ThreadPool(abc.ABC):
    """Threads that run submitted jobs. A job is a function without arguments that reports its own outcome."""

    @abc.abstractmethod
    def submit(self, job: Callable[[], None]) -> None:
        """Queue a job. Raises CurvfsError once the pool is closed."""

    @abc.abstractmethod
    def close(self, timeout_s: float | None = None) -> bool:
        """Run what is queued, stop the threads; False when one was still busy after ``timeout_s``."""


class RealThreads(Threads):
    async def run(self, function: Callable[[*Ts], T], *args: *Ts, abandon_on_cancel: bool = False) -> T:
        import trio

        return await trio.to_thread.run_sync(function, *args, abandon_on_cancel=abandon_on_cancel)

    def start(self, function: Callable[[], None], *, name: str) -> ThreadHandle:
        thread = threading.Thread(target=function, name=name, daemon=True)
        thread.start()
        return thread

    def pool(self, size: int, *, name: str) -> ThreadPool:
        return RealThreadPool(self, size, name)


class RealThreadPool(ThreadPool):
    def __init__(self, threads: Threads, size: int, name: str) -> None:
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._closed = False
        self._lock = threading.Lock()
        self._workers = [threads.start(self._work, name=f"{name}-{index}") for index in range(size)]

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            job()

    def submit(self, job: Callable[[], None]) -> None:
        with self._lock:
            if self._closed:
                raise CurvfsError("The thread pool is closed; no more work is taken.")
            self._jobs.put(job)

    def close(self, timeout_s: float | None = None) -> bool:
        with self._lock:
            if not self._closed:
                self._closed = True
                for _ in self._workers:
                    self._jobs.put(None)
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        for worker in self._workers:
            worker.join(None if deadline is None else max(0.0, deadline - time.monotonic()))
        return not any(worker.is_alive() for worker in self._workers)


# -------------------------------------------------------------------------------------------------------- network


class RealNetwork(Network):
    async def connect(self, host: str, port: int) -> Stream:
        from curvfs import sockets

        return await sockets.connect(host, port)

    async def listen(self, host: str, port: int) -> Listener:
        from curvfs import sockets

        return await sockets.listen(host, port)

    def hostname(self) -> str:
        return socket.gethostname()

    def send_datagram(self, address: str, content: bytes) -> None:
        name = f"\0{address[1:]}" if address.startswith("@") else address
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as sock:
            try:
                sock.settimeout(1.0)
                sock.sendto(content, name)
            except OSError as error:
                raise ConnectFailed(f"Nobody takes datagrams at {address}: {error.strerror or error}.") from error


# ---------------------------------------------------------------------------------------------------------- world


@dataclass(frozen=True)
class World:
    """The five parts, handed down from whoever starts: a command, a daemon, a library's ``open``, or a test."""

    clock: Clock = field(default_factory=RealClock)
    random: Random = field(default_factory=Random)
    net: Network = field(default_factory=RealNetwork)
    disk: Disk = field(default_factory=RealDisk)
    threads: Threads = field(default_factory=RealThreads)

    @classmethod
    def real(cls) -> World:
        """The real machine, with random numbers seeded by the operating system."""
        return cls()

    def process_id(self) -> int:
        """The number of this process on its machine."""
        return os.getpid()

    @classmethod
    def simulated(cls, seed: int) -> World:
        """A world made of one seed; run it under :func:`curvfs.simworld.run`."""
        from curvfs.simworld import simulated_world

        return simulated_world(seed)
