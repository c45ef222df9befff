"""Jobs as processes: started together, told to begin together, ended in order; what they found, put together.

Every process of a job is a child of its own (see :mod:`tools.bench.child`). A first SIGINT or SIGTERM ends the run
early: what was measured is reported as partial, and what the run made is removed. A second one kills what still runs.
"""

from __future__ import annotations

import errno
import json
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import trio

from curvfs.errors import CurvfsError, EnvironmentError_, RemoteError, TransportError, UsageError
from curvfs.world import World
from tools.bench.jobfile import Job
from tools.bench.latency import Latency

#: Time for a child to remove what it made before it is killed.
_END_TIMEOUT_S = 120.0
_BY_EXIT_CODE: dict[int, type[CurvfsError]] = {
    cls.exit_code: cls for cls in (CurvfsError, UsageError, EnvironmentError_, TransportError, RemoteError)
}


@dataclass
class Kind:
    """Calls of one kind: their latencies from when they were meant to begin, and from when they did."""

    latency: Latency = field(default_factory=Latency)
    service: Latency = field(default_factory=Latency)
    bytes: int = 0
    ios: int = 0
    #: Half-second -> bytes and calls.
    buckets: dict[int, list[int]] = field(default_factory=dict)

    def add(self, message: dict[str, Any]) -> None:
        self.latency.add(Latency.from_message(message["latency"]))
        self.service.add(Latency.from_message(message["service"]))
        self.bytes += message["bytes"]
        self.ios += message["ios"]
        for number, size, calls in message["buckets"]:
            bucket = self.buckets.setdefault(number, [0, 0])
            bucket[0] += size
            bucket[1] += calls


@dataclass
class Outcome:
    """What one report line of the run is about: a process of a job, or all of a group."""

    job: Job
    group: int
    pids: list[int] = field(default_factory=list)
    kinds: dict[str, Kind] = field(default_factory=dict)
    runtime_ms: int = 0
    usr_cpu: float = 0.0
    sys_cpu: float = 0.0
    ctx: int = 0
    majf: int = 0
    minf: int = 0
    iodepth_level: dict[str, float] = field(default_factory=dict)
    proofs: list[dict[str, Any]] = field(default_factory=list)
    verified_blocks: int = 0
    error: int = 0
    message: str = ""

    def add(self, message: dict[str, Any]) -> None:
        """Take in what a process found. CPU and depths are means over the processes."""
        share = 1 / len(self.pids)
        for kind, found in message["kinds"].items():
            self.kinds.setdefault(kind, Kind()).add(found)
        self.runtime_ms = max(self.runtime_ms, message["runtime_ms"])
        self.usr_cpu += (message["usr_cpu"] - self.usr_cpu) * share
        self.sys_cpu += (message["sys_cpu"] - self.sys_cpu) * share
        for name in ("ctx", "majf", "minf", "verified_blocks"):
            setattr(self, name, getattr(self, name) + message[name])
        for name, percent in message["iodepth_level"].items():
            before = self.iodepth_level.get(name, 0.0)
            self.iodepth_level[name] = before + (percent - before) * share
        if message["proof"]:
            self.proofs.append(message["proof"])
        if message["error"] and not self.error:
            self.error, self.message = message["error"], message["message"]


@dataclass
class Run:
    """A finished run, or as far as it got."""

    outcomes: list[Outcome] = field(default_factory=list)
    interrupted: bool = False

    @property
    def failed(self) -> Outcome | None:
        return next((outcome for outcome in self.outcomes if outcome.error), None)


#: Called with the share that is done (0 to 1, None: unknown), bytes moved up to now, and what is going on.
Progress = Callable[[float | None, int, str], None]


class _Process:
    """One child and what it said."""

    def __init__(self, job: Job, group: int, number: int, process: trio.Process) -> None:
        self.job = job
        self.group = group
        self.number = number
        self.process = process
        self.total_bytes = 0
        self.moved_bytes = 0
        self.seconds = 0.0
        self.ready = trio.Event()
        self.ended = trio.Event()
        self.result: dict[str, Any] | None = None
        self.failure: CurvfsError | None = None

    async def tell(self, word: str) -> None:
        assert self.process.stdin is not None
        try:
            await self.process.stdin.send_all(word.encode() + b"\n")
        except (trio.BrokenResourceError, trio.ClosedResourceError):
            pass

    async def hear(self) -> None:
        """Read what it says, to the end."""
        assert self.process.stdout is not None
        received = bytearray()
        async for chunk in self.process.stdout:
            received += chunk
            while (end := received.find(b"\n")) >= 0:
                self._take(json.loads(bytes(received[:end])))
                del received[: end + 1]
        if self.result is None and self.failure is None:
            code = await self.process.wait()
            self.failure = CurvfsError(
                f"A process of job {self.job.name} ended without a result (exit code {code}); its output is above."
            )
        self.ready.set()
        self.ended.set()

    def _take(self, message: dict[str, Any]) -> None:
        kind = message["type"]
        if kind == "ready":
            self.total_bytes = message["bytes"]
            self.ready.set()
        elif kind == "progress":
            self.moved_bytes, self.seconds = message["bytes"], message["seconds"]
        elif kind == "failed":
            self.failure = _BY_EXIT_CODE.get(message["exit_code"], CurvfsError)(message["message"])
            self.ready.set()
            self.ended.set()
        else:
            self.result = message
            self.ended.set()


def run_jobs(jobs: Sequence[Job], world: World, progress: Progress) -> Run:
    """Run jobs to their end. Raises the CurvfsError of a process that could not even begin."""
    return trio.run(_Runner(jobs, world, progress).run, strict_exception_groups=True)


class _Runner:
    def __init__(self, jobs: Sequence[Job], world: World, progress: Progress) -> None:
        self._clock = world.clock
        self._stages: list[list[Job]] = []
        for job in jobs:
            if job["stonewall"] or not self._stages:
                self._stages.append([])
            self._stages[-1].append(job)
        self._progress = progress
        self._processes: list[_Process] = []
        self._stop = trio.Event()
        self._interrupted = False

    async def run(self) -> Run:
        run = Run()
        async with trio.open_nursery() as nursery:
            await nursery.start(self._watch_signals)
            try:
                for group, stage in enumerate(self._stages):
                    if self._interrupted:
                        break
                    async with self._started(stage, group, nursery) as processes:
                        await self._stage(processes, nursery)
                        self._collect(run, processes)
            finally:
                with trio.CancelScope(shield=True):
                    await self._end_all(run)
            nursery.cancel_scope.cancel()
        run.interrupted = self._interrupted
        if not self._interrupted:
            for process in self._processes:
                if process.failure is not None:
                    raise process.failure
        return run

    async def _watch_signals(self, task_status: trio.TaskStatus[None]) -> None:
        wanted = [one for one in (signal.SIGINT, signal.SIGTERM) if signal.getsignal(one) is not signal.SIG_IGN]
        if not wanted:  # whoever started us has both ignored
            task_status.started()
            return
        with trio.open_signal_receiver(*wanted) as signals:
            task_status.started()
            async for _ in signals:
                if self._interrupted:
                    for process in self._processes:
                        process.process.kill()
                self._interrupted = True
                self._stop.set()
                for process in self._processes:
                    await process.tell("stop")

    @asynccontextmanager
    async def _started(self, stage: Sequence[Job], group: int, nursery: trio.Nursery) -> AsyncIterator[list[_Process]]:
        processes = []
        for job in stage:
            for number in range(job["numjobs"]):
                process = await trio.lowlevel.open_process(
                    [sys.executable, "-P", "-m", "tools.bench.child"],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    start_new_session=True,
                )
                one = _Process(job, group, number, process)
                processes.append(one)
                self._processes.append(one)
                await one.tell(json.dumps({"job": job.message(), "number": number}))
                nursery.start_soon(one.hear)
        yield processes

    async def _stage(self, processes: Sequence[_Process], nursery: trio.Nursery) -> None:
        with trio.CancelScope() as scope:

            async def show() -> None:
                while True:
                    self._show(processes)
                    await self._clock.sleep(0.5)

            async with trio.open_nursery() as inner:
                inner.start_soon(show)
                for process in processes:
                    await process.ready.wait()
                if any(process.failure is not None for process in processes):
                    scope.cancel()
                    return
                for process in processes:
                    await process.tell("stop" if self._interrupted else "go")
                for process in processes:
                    await process.ended.wait()
                scope.cancel()

    def _show(self, processes: Sequence[_Process]) -> None:
        moved = sum(process.moved_bytes for process in processes)
        if not all(process.ready.is_set() for process in processes):
            self._progress(None, moved, "laying out files")
            return
        shares = []
        for process in processes:
            job = process.job
            if job["runtime"] is not None and (job["time_based"] or not process.total_bytes):
                shares.append(process.seconds / (job["runtime"] + job["ramp_time"]))
            elif process.total_bytes:
                shares.append(process.moved_bytes / process.total_bytes)
        names = ", ".join(dict.fromkeys(process.job.name for process in processes))
        self._progress(min(1.0, *shares) if shares else None, moved, names)

    def _collect(self, run: Run, processes: Sequence[_Process]) -> None:
        grouped: dict[int, Outcome] = {}
        for process in processes:
            if process.result is None:
                continue
            outcome = grouped.get(process.group) if process.job["group_reporting"] else None
            if outcome is None:
                outcome = Outcome(process.job, process.group)
                run.outcomes.append(outcome)
                if process.job["group_reporting"]:
                    grouped[process.group] = outcome
            outcome.pids.append(process.process.pid)
            outcome.add(process.result)

    async def _end_all(self, run: Run) -> None:
        """Every child lets go, and removes what it made where its job, an interruption, a failure or a full disk
        asks for it. What was not what was written stays, to be looked at."""
        failed = self._interrupted or any(
            process.failure is not None or (process.result or {}).get("error") in (errno.ENOSPC, errno.EDQUOT)
            for process in self._processes
        )
        for process in self._processes:
            await process.tell("remove" if failed or process.job["unlink"] else "keep")
            assert process.process.stdin is not None
            await process.process.stdin.aclose()
        with trio.move_on_after(_END_TIMEOUT_S):
            for process in self._processes:
                await process.process.wait()
        for process in self._processes:
            if process.process.returncode is None:
                process.process.kill()
                await process.process.wait()
