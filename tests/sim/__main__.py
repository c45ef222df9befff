"""``python -m tests.sim seeds|mutants``; see ``make sim`` and ``make sim-mutants``."""

from __future__ import annotations

import argparse
import datetime
import logging
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

from tests.sim.kvmutants import KV_MUTANTS, NATIVE_MUTANTS, find_kv
from tests.sim.kvstores import run_kv_seed
from tests.sim.mutants import MUTANTS, find
from tests.sim.scenario import run_seed
from tests.sim.seeds import Summary, run_seeds

_PROGRESS_S = 30.0
_SHOWN_FAILURES = 5

_HEAD = """# Simulated runs

One line per run of `make sim` that was kept: what is simulated, and what must hold, is in
[simulation.md](../simulation.md). The fault counts are of faults that really struck.

"""


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.sim", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    seeds = commands.add_parser("seeds", help="run many seeds")
    seeds.add_argument("--first", type=int, default=0)
    seeds.add_argument("--number", type=int, help="how many (default: as many as there is time for)")
    seeds.add_argument("--limit-s", type=float, help="start no more seeds after so many seconds")
    seeds.add_argument("--jobs", type=int, help="processes (default: one per core)")
    seeds.add_argument("--mounts", action="store_true", help="runs of two mounts (tests/sim/mounts.py)")
    seeds.add_argument("--stores", action="store_true", help="runs of several kvstores (tests/sim/kvstores.py)")
    seeds.add_argument(
        "--native-stores", action="store_true", help="runs of several kvstores on a server (tests/sim/nativestores.py)"
    )
    seeds.add_argument("--record", type=Path, help="append a line about the run to this file")
    commands.add_parser("mutants", help="find the planted bugs")
    arguments = parser.parse_args()
    if arguments.command == "mutants":
        return _mutants()
    if arguments.number is None and arguments.limit_s is None:
        parser.error("say --number or --limit-s, or it never ends")
    return _seeds(arguments)


def _seeds(arguments: argparse.Namespace) -> int:
    for number in (signal.SIGINT, signal.SIGTERM):  # ignored by default in the background: what ran is recorded
        signal.signal(number, signal.default_int_handler)
    shown_s = time.monotonic()
    shown: set[int] = set()

    def report(summary: Summary) -> None:
        nonlocal shown_s
        for seed in [seed for seed in summary.failures if seed not in shown]:
            shown.add(seed)
            if len(shown) <= _SHOWN_FAILURES:
                print(summary.failures[seed])
            print(f"seed {seed} FAILED; again with: make sim FROM={seed} SEEDS=1{_options(arguments)}", flush=True)
        if time.monotonic() - shown_s > _PROGRESS_S:
            shown_s = time.monotonic()
            print(summary.describe(), flush=True)

    began = datetime.datetime.now(datetime.UTC)
    if arguments.mounts:
        from tests.sim.mounts import run_mount_seed as one  # needs pyfuse3
    elif arguments.stores:
        logging.disable(logging.CRITICAL)  # what a failing disk makes a store say
        one = run_kv_seed
    elif arguments.native_stores:
        from tests.sim.nativestores import run_native_seed as one  # needs greenlet

        logging.disable(logging.CRITICAL)
    else:
        one = run_seed
    total = run_seeds(
        arguments.first, arguments.number, limit_s=arguments.limit_s, jobs=arguments.jobs, one=one, report=report
    )
    print(f"{total.describe()}\nfaults that struck: {_faults(total)}")
    if arguments.record is not None:
        options = _options(arguments)
        _record(arguments.record, began, arguments.first, total, options)
    return 1 if total.failures else 0


def _faults(total: Summary) -> str:
    return ", ".join(f"{name} {number}" for name, number in sorted(total.fired.items()))


def _record(path: Path, began: datetime.datetime, first: int, total: Summary, options: str) -> None:
    """Append one line about a run."""
    commit = subprocess.run(
        ["git", "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"],
        cwd=Path(__file__).parent,
        capture_output=True,
        text=True,
        check=True,
    ).stdout.strip()
    path.parent.mkdir(parents=True, exist_ok=True)
    if not path.exists():
        path.write_text(_HEAD, encoding="utf-8")
    failures = ", ".join(map(str, total.failures)) if total.failures else "none"
    with path.open("a", encoding="utf-8") as file:
        file.write(
            f"- {began:%Y-%m-%d %H:%M} UTC, commit {commit}, `make sim FROM={first} SEEDS={total.seeds}{options}`: "
            f"{total.describe()}. Failed seeds: {failures}. Faults that struck: {_faults(total)}.\n"
        )


def _options(arguments: argparse.Namespace) -> str:
    for name in ("mounts", "stores", "native_stores"):
        if getattr(arguments, name):
            return f" SIM_OPTIONS=--{name.replace('_', '-')}"
    return ""


def _mutants() -> int:
    missed = 0
    from tests.sim.nativestores import run_native_seed  # needs greenlet

    planted = [(mutant, bound, find) for mutant, bound in MUTANTS.items()]
    planted += [(mutant, bound, find_kv) for mutant, bound in KV_MUTANTS.items()]
    native = partial(find_kv, run_seed=run_native_seed)
    planted += [(mutant, bound, native) for mutant, bound in NATIVE_MUTANTS.items()]
    for mutant, bound, search in planted:
        began_s = time.monotonic()
        found = search(mutant, bound)
        took_s = time.monotonic() - began_s
        if found is None:
            missed += 1
            print(f"{mutant.__name__}: NOT FOUND in {bound} seeds ({took_s:.1f} s)", flush=True)
        else:
            print(f"{mutant.__name__}: found by seed {found.seed} ({took_s:.1f} s): {found.error}", flush=True)
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
