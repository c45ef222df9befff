"""``python -m tests.soak replay|run``; see ``make soak``."""

from __future__ import annotations

import argparse
import datetime
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from tests.soak.replay import made_up, read_trace, through_lru, through_store
from tests.soak.run import soak

_CAPACITIES = (1_000, 10_000, 50_000)
_MADE_UP = 3_000
_REPLAY_HEAD = """# Replayed traces

One line per trace and capacity of `make soak`: requests through a store in one process, with real objects of 8 KiB in a
directory, `lease_s=0`, and quota and both watermarks at so many objects, beside an exact LRU that knows nothing of the
store. A hit is a block of the longest prefix that is resident. Every hit was loaded and compared.

"""
_SOAK_HEAD = """# Soak of kvstore

One entry per run of `make soak-kvstore`; what runs is described at the head of [run.py](../../tests/soak/run.py).

"""


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.soak", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    replay = commands.add_parser("replay", help="a trace through a store, beside an exact LRU")
    replay.add_argument("--trace", type=Path, help="in the format of the Mooncake traces (default: a made-up one)")
    replay.add_argument("--directory", type=Path, help="where the objects go meanwhile (default: a temporary one)")
    replay.add_argument("--record", type=Path, help="append the results to this file")
    run = commands.add_parser("run", help="many clients, bad days, and whether memory and descriptors stay flat")
    run.add_argument("--seconds", type=float, default=600.0)
    run.add_argument("--stop-seconds", type=float, default=10.0, help="how long the server stands still each time")
    run.add_argument("--record", type=Path, help="append the results to this file")
    run.add_argument("--plot", type=Path, help="draw memory, descriptors and the pool's bytes here")
    arguments = parser.parse_args()
    return _replay(arguments) if arguments.command == "replay" else _run(arguments)


def _replay(arguments: argparse.Namespace) -> int:
    wrong = 0
    for capacity in _CAPACITIES:
        trace: Path | None = arguments.trace
        twice = [read_trace(trace) if trace is not None else made_up(1, _MADE_UP) for _ in range(2)]
        expected = through_lru(twice[0], capacity)
        directory = Path(tempfile.mkdtemp(prefix="curvfs-replay-", dir=arguments.directory))
        try:
            found = through_store(twice[1], capacity, directory)
        finally:
            shutil.rmtree(directory)
        equal = found.hits == expected.hits
        wrong += not equal
        name = "made up" if trace is None else trace.name
        line = (
            f"{name}, room for {capacity}: {found.requests} requests, {found.blocks} blocks, {found.hits} hits, the"
            f" exact LRU {expected.hits}: {'equal' if equal else 'NOT EQUAL'}; {found.seconds:.0f} s"
        )
        print(line, flush=True)
        if arguments.record is not None:
            _append(arguments.record, _REPLAY_HEAD, f"- {_when()}: {line}.\n")
    return 1 if wrong else 0


def _run(arguments: argparse.Namespace) -> int:
    record: Path | None = arguments.record
    plot: Path | None = arguments.plot
    lines, problems = soak(arguments.seconds, plot, stop_s=arguments.stop_seconds)
    print("\n".join(lines))
    if record is not None:
        picture = "" if plot is None else f"\n![memory, descriptors and bytes in the pool]({plot.name})\n"
        body = "".join(f"* {line}\n" for line in lines)
        _append(record, _SOAK_HEAD, f"## {_when()}\n\n{body}{picture}\n")
    for problem in problems:
        print(f"PROBLEM: {problem}", file=sys.stderr)
    return 1 if problems else 0


def _when() -> str:
    commit = subprocess.run(
        ["git", "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"],
        cwd=Path(__file__).parent,
        capture_output=True,
        text=True,
        check=True,
    ).stdout.strip()
    return f"{datetime.datetime.now(datetime.UTC):%Y-%m-%d %H:%M} UTC, commit {commit}"


def _append(path: Path, head: str, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    if not path.exists():
        path.write_text(head, encoding="utf-8")
    with path.open("a", encoding="utf-8") as file:
        file.write(text)


if __name__ == "__main__":
    sys.exit(main())
