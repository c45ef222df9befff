"""Many seeds, over several processes: what failed and how to repeat it, which faults struck, how long it took."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import count, islice

from tests.sim.scenario import Outcome, Plan, run_seed

#: Real seconds that one seed may take; the slowest take two or three.
_SEED_LIMIT_S = 120
#: Seeds handed to a process at once.
_BATCH = 10


class Stuck(BaseException):
    """A seed uses the processor without end."""


@dataclass(slots=True)
class Summary:
    """What came of some seeds."""

    seeds: int = 0
    calls: int = 0
    failed_calls: int = 0
    simulated_s: float = 0.0
    wall_s: float = 0.0
    fired: Counter[str] = field(default_factory=Counter)
    #: Seed -> what went wrong.
    failures: dict[int, str] = field(default_factory=dict)

    def add(self, other: Summary) -> None:
        self.seeds += other.seeds
        self.calls += other.calls
        self.failed_calls += other.failed_calls
        self.simulated_s += other.simulated_s
        self.fired.update(other.fired)
        self.failures.update(other.failures)

    def describe(self) -> str:
        return (
            f"{self.seeds} seeds, {len(self.failures)} failures, {self.wall_s:.0f} s; {self.simulated_s / 3600:.1f} "
            f"simulated hours; {self.calls} calls, {self.failed_calls} of which failed with an error of ours"
        )


def try_seeds(seeds: range, one: Callable[[int], Outcome] = run_seed) -> Summary:
    """Run these seeds, one after the other, in this process; ``one`` runs a seed."""
    summary = Summary()
    for seed in seeds:
        summary.seeds += 1
        signal.alarm(_SEED_LIMIT_S)
        try:
            outcome = one(seed)
        except KeyboardInterrupt:
            raise
        except BaseException as error:
            summary.failures[seed] = f"{_plan_of(seed, one)}{''.join(traceback.format_exception(error))}"
        else:
            summary.fired.update(outcome.fired)
            summary.simulated_s += outcome.simulated_s
            summary.calls += outcome.calls.total()
            summary.failed_calls += sum(number for what, number in outcome.calls.items() if ":" in what)
        finally:
            signal.alarm(0)
    return summary


def _plan_of(seed: int, one: Callable[[int], Outcome]) -> str:
    return f"{Plan.of(seed)}\n" if one is run_seed else ""


def _stuck(signum: int, frame: object) -> None:
    raise Stuck(f"The seed runs for {_SEED_LIMIT_S} s already.")


def _start_process() -> None:
    signal.signal(signal.SIGALRM, _stuck)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent process ends the pool,
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # like this


def run_seeds(
    first: int,
    number: int | None,
    *,
    limit_s: float | None,
    jobs: int | None = None,
    one: Callable[[int], Outcome] = run_seed,
    report: Callable[[Summary], None] = lambda summary: None,
) -> Summary:
    """Run ``number`` seeds from ``first`` (None: as many as there is time for), or fewer when ``limit_s`` is over or
    the run is interrupted. ``report`` hears of every batch: its argument is the sum so far."""
    began_s = time.monotonic()
    total = Summary()
    jobs = jobs or os.cpu_count() or 1

    def batches() -> Iterator[range]:
        last = None if number is None else first + number
        for start in count(first, _BATCH) if last is None else range(first, last, _BATCH):
            if limit_s is not None and time.monotonic() - began_s > limit_s:
                return
            yield range(start, start + _BATCH if last is None else min(start + _BATCH, last))

    context = multiprocessing.get_context("fork")
    with context.Pool(jobs, _start_process) as pool:
        try:
            waiting = batches()
            running = [pool.apply_async(try_seeds, (batch, one)) for batch in islice(waiting, 2 * jobs)]
            while running:
                summary = running.pop(0).get()
                total.add(summary)
                total.wall_s = time.monotonic() - began_s
                report(total)
                running += [pool.apply_async(try_seeds, (batch, one)) for batch in islice(waiting, 1)]
        except KeyboardInterrupt:
            print("interrupted: these are the seeds that were run")
    total.wall_s = time.monotonic() - began_s
    return total
