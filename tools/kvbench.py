"""How fast the store moves pages, as a ratio to fio on the same disk: ``python -m tools.kvbench DIRECTORY``.

For each size and depth, every round runs fio (io_uring, O_DIRECT, one file of that size per object) and then the store
(checksums on) on the same file system: write and read, copied and loaned. Disks and neighbours are noisy, so rounds are
interleaved, and each ratio is the median of its rounds with the smallest and largest one behind it. ``first put``
makes the directories that objects are fanned out over, two for each of the first ones in a pool; ``put`` finds them.
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
from collections.abc import Callable
from pathlib import Path
from typing import Any

import kvstore
from curvfs import __version__
from curvfs.errors import CurvfsError, EnvironmentError_
from curvfs.units import format_size, parse_size
from curvfs.world import World
from tools.bench.fio import run_fio, speeds

WORLD = World.real()


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
    """Ratios to fio, and CPU seconds per GiB of the reads."""
    files = directory / "fio"
    files.mkdir(exist_ok=True)
    fio_write = fio(files, "write", size_bytes=size_bytes, count=count, depth=depth)
    fio_read = fio(files, "read", size_bytes=size_bytes, count=count, depth=depth)
    shutil.rmtree(files)
    page = kvstore.Geometry.raw(size_bytes, page_tokens=16)
    identity = kvstore.Identity.of(page, model="kvbench", revision="1")
    room = [mmap.mmap(-1, size_bytes) for _ in range(count)]
    for number, memory in enumerate(room):
        memory.write(number.to_bytes(8, "little") * (size_bytes // 8))
    total = size_bytes * count
    with kvstore.open(
        directory.as_uri(), identity, geometry=page, direct="required", depth=depth, engine=engine
    ) as store:
        warm_up = store.keys(range(1 << 24, (1 << 24) + 16 * depth))  # fio makes its buffers before its clock starts
        must(store.put(warm_up, [room[0]] * depth))
        must(store.get(warm_up, [room[0]] * depth))
        keys = store.keys(range(16 * count))
        first_s, _ = timed(lambda: must(store.put(keys, room)))
        store.delete(keys)
        put_s, put_cpu_s = timed(lambda: must(store.put(keys, room)))
        get_s, get_cpu_s = timed(lambda: must(store.get(keys, room)))
        loan_s, loan_cpu_s = timed(lambda: must(store.get(keys, room, loan=True)))
        store.clear()
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
    }


def bench(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """One record per size and depth: median, smallest and largest of each figure."""
    parent = Path(arguments.directory).resolve()
    if not parent.is_dir():
        raise EnvironmentError_(f"{parent} is not a directory; name one on the file system to measure.")
    directory = parent / f".kvbench-{os.getpid()}"
    directory.mkdir()
    shapes = [
        (parse_size(size), int(depth)) for size in arguments.sizes.split(",") for depth in arguments.depths.split(",")
    ]
    found: dict[tuple[int, int], list[dict[str, float]]] = {shape: [] for shape in shapes}
    try:
        for _ in range(arguments.rounds):
            for size_bytes, depth in shapes:
                count = max(4, parse_size(arguments.bytes) // size_bytes)
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


def main(argv: list[str] | None = None) -> int:
    """Measure and print; 0 when it could be done."""
    parser = argparse.ArgumentParser(prog="python -m tools.kvbench", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("directory", help="on the file system to measure")
    parser.add_argument("--sizes", default="1MiB,4MiB,14MiB", help="of an object's payload (default: %(default)s)")
    parser.add_argument("--depths", default="8", help="objects under way (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=7, help="(default: %(default)s)")
    parser.add_argument("--bytes", default="256MiB", help="moved in one round (default: %(default)s)")
    parser.add_argument("--engine", default="auto", choices=["auto", "threads", "uring"])
    parser.add_argument("--json", action="store_true", help="print the records instead of a table")
    arguments = parser.parse_args(argv)
    try:
        records = bench(arguments)
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
            print(f"  {name:<16} {median:8.{digits}f}   ({low:.{digits}f} to {high:.{digits}f})")
    return 0


if __name__ == "__main__":
    sys.exit(main())
