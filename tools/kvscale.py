"""What the store costs as its pool grows: ``python -m tools.kvscale DIRECTORY``.

A pool of each size, with a server of its own, is filled with small files that lie where objects lie, fanned out as
objects are; then rounds of fresh processes, one for each pool in turn, open the store, look up a prompt cold, put pages
and look it up again. The last lines give each median as a multiple of that at the smallest size.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path

import kvstore
from curvfs import __version__
from curvfs.api import SyncFileSystem
from curvfs.client.records import NewFile
from curvfs.errors import CurvfsError
from curvfs.units import MIB
from curvfs.world import World

WORLD = World.real()
_PAGE_BYTES = 64 * 1024
_PAGES = 64
_FILLER = bytes(512)
_AT_ONCE = 512
_GEOMETRY = kvstore.Geometry.raw(_PAGE_BYTES, page_tokens=16)
_MEASURED = ("open_s", "lookup_cold_s", "put_s", "lookup_warm_s", "memory_mib", "server_memory_mib")


def identity(round_: int) -> kvstore.Identity:
    """The rounds share a namespace, and no page."""
    return kvstore.Identity.of(_GEOMETRY, model="kvscale", revision=f"{round_}-{WORLD.random.uuid()}")


@contextmanager
def serving(directory: Path) -> Iterator[tuple[str, int]]:
    """URL and process id of a server over ``directory``."""
    words = [sys.executable, "-m", "curvfs.server", str(directory), "--master-port", "0", "--worker-port", "0"]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            yield process.stdout.readline().strip(), process.pid
        finally:
            process.terminate()


def fill(url: str, want: int) -> float:
    """Fill a pool with so many objects; files a second."""
    namespace = identity(0).namespace()
    began_s = WORLD.clock.monotonic_s()
    made: set[str] = set()
    with SyncFileSystem.connect(url) as client:
        for start in range(0, want, _AT_ONCE):
            names = [WORLD.random.randbytes(16).hex() for _ in range(min(_AT_ONCE, want - start))]
            # Two levels of the fan-out, as the store makes them; the second one is made with its first object.
            missing = {f"/kv/{namespace}/{name[:2]}/{name[2:4]}" for name in names} - made
            for answer in client.run_many([partial(client.filesystem.mkdir, path, parents=True) for path in missing]):
                if isinstance(answer, CurvfsError):
                    raise answer
            made |= missing
            files = [
                NewFile(f"/kv/{namespace}/{name[:2]}/{name[2:4]}/{name}.safetensors", _FILLER) for name in names
            ]
            for result in client.write_files(files, unique_names=True):
                if isinstance(result, CurvfsError):
                    raise result
    return want / max(WORLD.clock.monotonic_s() - began_s, 1e-9)


def memory_mib(pid: int | str = "self") -> float:
    """Resident memory of a process."""
    for line in Path(f"/proc/{pid}/status").read_text(encoding="ascii").splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) * 1024 / MIB
    return 0.0


def one_round(url: str, round_: int) -> dict[str, float]:
    """What a fresh process sees."""
    clock, found = WORLD.clock, {}

    def timed(name: str, began_s: float) -> None:
        found[name] = clock.monotonic_s() - began_s

    began_s = clock.monotonic_s()
    with kvstore.open(url, identity(round_), geometry=_GEOMETRY) as store:
        timed("open_s", began_s)
        keys = store.keys(range(16 * _PAGES))
        began_s = clock.monotonic_s()
        if store.lookup(keys).pages:
            raise CurvfsError("Pages that nobody stored were found.")
        timed("lookup_cold_s", began_s)
        began_s = clock.monotonic_s()
        if not all(store.put(keys, [[bytes(_PAGE_BYTES)] for _ in keys]).result()):
            raise CurvfsError("A page was not stored; is the file system full?")
        timed("put_s", began_s)
        began_s = clock.monotonic_s()
        if store.lookup(keys).pages != _PAGES:
            raise CurvfsError("Pages that were stored were not found.")
        timed("lookup_warm_s", began_s)
        found["memory_mib"] = memory_mib()
        store.delete(keys)
    return found


def measured(pools: dict[int, tuple[str, int]], rounds: int) -> dict[int, dict[str, list[float]]]:
    """Every figure of every round at every size, each in a process of its own. The sizes take turns, so that what else
    the machine does strikes all."""
    figures: dict[int, dict[str, list[float]]] = {size: {name: [] for name in _MEASURED} for size in pools}
    for round_ in range(rounds):
        for size, (url, server) in pools.items():
            words = [sys.executable, "-m", "tools.kvscale", "--round", url, str(round_)]
            found = json.loads(subprocess.run(words, stdout=subprocess.PIPE, text=True, check=True).stdout)
            found["server_memory_mib"] = memory_mib(server)
            for name in _MEASURED:
                figures[size][name].append(found[name])
    return figures


def shown(values: list[float]) -> str:
    return f"{statistics.median(values):.4g} ({min(values):.4g}-{max(values):.4g})"


def main(arguments: list[str] | None = None) -> int:
    """Run it; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m tools.kvscale", description=__doc__)
    parser.add_argument("directory", nargs="?", type=Path, help="where to serve; a directory in it is made and removed")
    parser.add_argument("--objects", default="1000,100000,1000000", help="sizes of the pool, ascending")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--round", nargs=2, metavar=("URL", "NUMBER"), help=argparse.SUPPRESS)
    found = parser.parse_args(arguments)
    if found.round:
        print(json.dumps(one_round(found.round[0], int(found.round[1]))))
        return 0
    if found.directory is None:
        parser.error("name a directory")
    sizes: list[int] = sorted(int(word) for word in found.objects.split(","))
    place = found.directory / f"kvscale-{WORLD.random.uuid()}"
    pools: dict[int, tuple[str, int]] = {}
    print(f"curvfs {__version__}; {_PAGES} pages of {_PAGE_BYTES // 1024} KiB; medians (least-most) of {found.rounds}.")
    try:
        with ExitStack() as servers:
            for size in sizes:
                pools[size] = servers.enter_context(serving(place / str(size)))
                print(f"{size:,} objects: filled at {fill(pools[size][0], size):,.0f} a second", flush=True)
            results = measured(pools, found.rounds)
    finally:
        shutil.rmtree(place, ignore_errors=True)
    for size in sizes:
        figures = ", ".join(f"{name} {shown(values)}" for name, values in results[size].items())
        print(f"{size:,} objects: {figures}")
    first = results[sizes[0]]
    for size in sizes[1:]:
        now = results[size]
        growth = {name: statistics.median(now[name]) / statistics.median(first[name]) for name in _MEASURED}
        shown_growth = ", ".join(f"{name} {factor:.2f}" for name, factor in growth.items())
        print(f"{size:,} objects against {sizes[0]:,}: {shown_growth}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
