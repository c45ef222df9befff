"""How fast the store moves pages, as a ratio to fio on the same disk: ``python -m tools.kvbench DIRECTORY``.

For each size and depth, every round runs fio (io_uring, O_DIRECT, one file of that size per object) and then the store
(checksums on) on the same file system: write and read, copied and loaned. Disks and neighbours are noisy, so rounds are
interleaved, and each ratio is the median of its rounds with the smallest and largest one behind it. ``first put``
makes the directories that objects are fanned out over, two for each of the first ones in a pool; ``put`` finds them.
Both sides create their files while the clock runs (fio with create_on_open), in a directory of their own that lies
apart from those where the last round was deleted: without a journal ext4 passes over every inode that was freed in the
last minutes, which makes a new file twenty times as dear. Only the store closes and renames its files.
Percentiles are of single pages, of all rounds. What has a budget is judged by its median: ``met``, or ``MISSED``.

The last figures are of a pool of the embedded server: the longest prefix of 512 pages, asked four times a second,
of pages never asked for before (cold) and of the same ones within their lease (recent), alone and beside a main thread
that spins in Python.
"""

from __future__ import annotations

import argparse
import json
import mmap
import os
import resource
import shutil
import statistics
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import kvstore
from curvfs import __version__
from curvfs.errors import CurvfsError, EnvironmentError_
from curvfs.units import MIB, format_size, parse_size
from curvfs.world import World
from tools.bench.fio import run_fio, speeds
from tools.bench.spread import settle, spread
from tools.kvscale import serving

WORLD = World.real()
#: Lookups of one kind in a round, and how often they come.
ASKED = 24
PAUSE_S = 0.25


def fio(directory: Path, action: str, *, size_bytes: int, count: int, depth: int) -> float:
    """Bytes per second of fio writing or reading ``count`` files."""
    words = [
        "--name=kvbench",
        f"--directory={directory}",
        f"--rw={action}",
        f"--bs={size_bytes}",
        f"--filesize={size_bytes}",
        f"--nrfiles={count}",
        "--file_service_type=sequential",
        f"--iodepth={depth}",
        "--ioengine=io_uring",
        "--direct=1",
        "--fallocate=none",
        *(["--create_on_open=1"] if action == "write" else []),
    ]
    return speeds(run_fio(words))[action]


def timed(function: Callable[[], object]) -> tuple[float, float]:
    """Seconds of the clock and of this process's CPUs."""

    def cpu_s() -> float:
        used = resource.getrusage(resource.RUSAGE_SELF)
        return used.ru_utime + used.ru_stime

    begun_s, cpu_begun_s = WORLD.clock.monotonic_s(), cpu_s()
    function()
    return WORLD.clock.monotonic_s() - begun_s, cpu_s() - cpu_begun_s


def must(transfer: kvstore.Transfer) -> None:
    results = transfer.result()
    if not all(results):
        raise CurvfsError(f"A page of the benchmark was a miss ({next(one for one in results if not one)}).")


def one_round(directory: Path, engine: Any, *, size_bytes: int, count: int, depth: int) -> dict[str, float]:
    """Ratios to fio, and CPU seconds per GiB."""
    files, pool = (Path(tempfile.mkdtemp(prefix=f"{name}-", dir=directory)) for name in ("fio", "store"))
    fio_write = fio(files, "write", size_bytes=size_bytes, count=count, depth=depth)
    fio_read = fio(files, "read", size_bytes=size_bytes, count=count, depth=depth)
    page = kvstore.Geometry.raw(size_bytes, page_tokens=16)
    identity = kvstore.Identity.of(page, model="kvbench", revision="1")
    room = [mmap.mmap(-1, size_bytes) for _ in range(count)]
    for number, memory in enumerate(room):
        memory.write(number.to_bytes(8, "little") * (size_bytes // 8))
    total = size_bytes * count
    with kvstore.open(pool.as_uri(), identity, geometry=page, direct="required", depth=depth, engine=engine) as store:
        warm_up = store.keys(range(1 << 24, (1 << 24) + 16 * depth))  # fio makes its buffers before its clock starts
        must(store.put(warm_up, [room[0]] * depth))
        must(store.get(warm_up, [room[0]] * depth))
        first_keys, keys = (store.keys(range(first, first + 16 * count)) for first in (0, 1 << 25))
        first_s, _ = timed(lambda: must(store.put(first_keys, room)))
        for key in keys:
            (pool / "kv" / store.object_name(key)).parent.mkdir(parents=True, exist_ok=True)
        put_s, put_cpu_s = timed(lambda: must(store.put(keys, room)))
        get_s, get_cpu_s = timed(lambda: must(store.get(keys, room)))
        loan_s, loan_cpu_s = timed(lambda: must(store.get(keys, room, loan=True)))
        latencies = store.stats().latencies
    for used in (files, pool):
        shutil.rmtree(used)
    settle(directory)
    gib = total / (1 << 30)
    return {
        "fio write MB/s": fio_write / 1e6,
        "fio read MB/s": fio_read / 1e6,
        "first put / fio": total / first_s / fio_write,
        "put / fio": total / put_s / fio_write,
        "get / fio": total / get_s / fio_read,
        "loan / fio": total / loan_s / fio_read,
        "put CPU s/GiB": put_cpu_s / gib,
        "get CPU s/GiB": get_cpu_s / gib,
        "loan CPU s/GiB": loan_cpu_s / gib,
        **{
            f"{call} {name} ms": latencies[call][f"{name}_s"] * 1000
            for call in ("put", "get")
            for name in ("p50", "p99")
        },
    }


def budget_of(name: str, size_bytes: int, depth: int) -> float | None:
    """What docs/kvstore.md promises of a figure; negative where it is an upper bound."""
    if depth < 8 or size_bytes < MIB:
        return None
    if name in ("put / fio", "get / fio", "loan / fio"):
        return 0.95 if size_bytes >= 4 * MIB else 0.7
    return {"get CPU s/GiB": -0.40, "loan CPU s/GiB": -0.25}.get(name)


def verdict(figure: float, budget: float | None) -> str:
    if budget is None:
        return ""
    met = figure <= -budget if budget < 0 else figure >= budget
    return f"  {'at most' if budget < 0 else 'at least'} {abs(budget):g}: {'met' if met else 'MISSED'}"


@dataclass(frozen=True, slots=True)
class Lookups:
    """Milliseconds of lookups, sorted, and what a spinning thread got done meanwhile, in loops a second."""

    took_ms: list[float]
    spins_per_s: float

    def percentile(self, part: float) -> float:
        return self.took_ms[min(len(self.took_ms) - 1, int(part * len(self.took_ms)))]


def ask(store: kvstore.KVStore, prompts: list[Any], *, spin: bool) -> Lookups:
    """Look every prompt up, one after each pause, from another thread; this one spins, or waits."""
    took_ms: list[float] = []

    def work() -> None:
        due_s = WORLD.clock.monotonic_s()
        for keys in prompts:
            due_s += PAUSE_S
            WORLD.clock.block(max(0.0, due_s - WORLD.clock.monotonic_s()))
            seconds, _ = timed(lambda keys=keys: store.lookup(keys))  # type: ignore[misc]
            took_ms.append(seconds * 1000)

    thread = WORLD.threads.start(work, name="kvbench-lookup")
    begun_s, spins = WORLD.clock.monotonic_s(), 0
    while len(took_ms) < len(prompts):
        if spin:
            for _ in range(1000):
                spins += 1
        else:
            WORLD.clock.block(0.05)
    thread.join()
    return Lookups(sorted(took_ms), spins / (WORLD.clock.monotonic_s() - begun_s))


def spin_alone(seconds: float) -> float:
    """Loops a second of a thread that nobody disturbs."""
    begun_s, spins = WORLD.clock.monotonic_s(), 0
    while WORLD.clock.monotonic_s() - begun_s < seconds:
        for _ in range(1000):
            spins += 1
    return spins / (WORLD.clock.monotonic_s() - begun_s)


def lookups(directory: Path, rounds: int) -> list[str]:
    """Lines about lookups of 512 pages of the embedded server."""
    page = kvstore.Geometry.raw(4096, page_tokens=16)
    identity = kvstore.Identity.of(page, model="kvbench", revision="1")
    found: dict[tuple[str, bool], list[Lookups]] = {}
    alone: list[float] = []
    with serving(directory / "pool") as (url, _):
        with kvstore.open(url, identity, geometry=page) as store:
            prompts = [store.keys(range(first << 20, (first << 20) + 16 * 512)) for first in range(ASKED)]
            for keys in prompts:
                for start in range(0, 512, 64):
                    must(store.put(keys[start : start + 64], [bytes(4096)] * 64))
        for _ in range(rounds):
            for spin in (False, True):
                with kvstore.open(url, identity, geometry=page) as store:
                    store.lookup(prompts[0][:1])
                    for kind, asked in (("cold", prompts), ("recent", prompts[-1:] * ASKED)):
                        found.setdefault((kind, spin), []).append(ask(store, asked, spin=spin))
            alone.append(spin_alone(1.0))
    lines = []
    for kind, limit_ms in (("cold", 80.0), ("recent", 10.0)):
        idle, busy = found[kind, False], found[kind, True]
        middle = statistics.median(one.percentile(0.5) for one in idle)
        p99, p99_busy = (statistics.median(one.percentile(0.99) for one in each) for each in (idle, busy))
        kept = statistics.median(one.spins_per_s for one in busy) / statistics.median(alone)
        lines += [
            f"  {kind:<6} median   {middle:8.2f} ms{verdict(middle, -limit_ms)}",
            f"  {kind:<6} p99      {p99:8.2f} ms; beside a spinning thread {p99_busy:.2f} ms,"
            f" {p99_busy / p99:.2f} times{verdict(p99_busy / p99, -3.0)}",
            f"  {kind:<6} spinner  {(1 - kept) * 100:8.1f} % lost{verdict((1 - kept) * 100, -10.0)}",
        ]
    return lines


def bench(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """One record per size and depth: median, smallest and largest of each figure."""
    parent = Path(arguments.directory).resolve()
    if not parent.is_dir():
        raise EnvironmentError_(f"{parent} is not a directory; name one on the file system to measure.")
    directory = parent / f".kvbench-{os.getpid()}"
    directory.mkdir()
    spread(directory)
    shapes = [
        (parse_size(size), int(depth)) for size in arguments.sizes.split(",") for depth in arguments.depths.split(",")
    ]
    found: dict[tuple[int, int], list[dict[str, float]]] = {shape: [] for shape in shapes}
    try:
        for number in range(arguments.rounds):
            for size_bytes, depth in shapes:
                about = f"{format_size(size_bytes)} at depth {depth}"
                print(f"round {number + 1} of {arguments.rounds}: {about}", file=sys.stderr, flush=True)
                count = max(4, depth, parse_size(arguments.bytes) // size_bytes)
                figures = one_round(directory, arguments.engine, size_bytes=size_bytes, count=count, depth=depth)
                found[size_bytes, depth].append(figures)
    finally:
        shutil.rmtree(directory)
    return [
        {
            "size_bytes": size_bytes,
            "depth": depth,
            "rounds": len(rounds),
            "figures": {
                name: [statistics.median(values), min(values), max(values)]
                for name in rounds[0]
                for values in [[one[name] for one in rounds]]
            },
        }
        for (size_bytes, depth), rounds in found.items()
    ]


def measured_lookups(arguments: argparse.Namespace) -> list[str]:
    """The lines of :func:`lookups`, in a directory of their own below the one that is measured."""
    with tempfile.TemporaryDirectory(prefix=".kvbench-", dir=arguments.directory) as directory:
        return lookups(Path(directory), arguments.rounds)


def main(argv: list[str] | None = None) -> int:
    """Measure and print; 0 when it could be done."""
    parser = argparse.ArgumentParser(prog="python -m tools.kvbench", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("directory", help="on the file system to measure")
    parser.add_argument("--sizes", default="256KiB,1MiB,4MiB,16MiB", help="of an object (default: %(default)s)")
    parser.add_argument("--depths", default="1,8,32", help="objects under way (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=7, help="(default: %(default)s)")
    parser.add_argument("--bytes", default="256MiB", help="moved in one round (default: %(default)s)")
    parser.add_argument("--engine", default="auto", choices=["auto", "threads", "uring"])
    parser.add_argument("--json", action="store_true", help="print the records instead of a table")
    arguments = parser.parse_args(argv)
    try:
        records = bench(arguments)
        looked_up = [] if arguments.json else measured_lookups(arguments)
    except CurvfsError as error:
        print(f"kvbench: {error}", file=sys.stderr)
        return 1
    if arguments.json:
        print(json.dumps({"version": __version__, "command": sys.argv, "records": records}, indent=1))
        return 0
    for record in records:
        print(f"{format_size(record['size_bytes'])} at depth {record['depth']}, {record['rounds']} rounds:")
        for name, (median, low, high) in record["figures"].items():
            digits = 0 if name.startswith("fio") else 2
            judged = verdict(median, budget_of(name, record["size_bytes"], record["depth"]))
            print(f"  {name:<16} {median:8.{digits}f}   ({low:.{digits}f} to {high:.{digits}f}){judged}")
    print(f"Longest prefix of 512 pages, {ASKED} lookups a round, {arguments.rounds} rounds, medians:")
    for line in looked_up:
        print(line)
    return 0


if __name__ == "__main__":
    sys.exit(main())
