# ruff: noqa: TID251  (a mount is measured as programs use it: with bare system calls)
"""``python -m tools.mountbench``: a mount on the embedded server beside a plain directory of the same file system.

Both sides run the same loops, interleaved round by round and each first in every other round, so that what else the
machine does strikes both. Small files that were made stay until all of them are: on ext4 without a journal a new file
beside recently deleted ones costs up to twenty times as much, on either side. Blocks lie in the page cache of the
machine; the pages that the kernel keeps for the mount itself are dropped before every buffered read, so that each byte
comes from the daemon. What the kernel's own pages do is shown apart, with the daemon's counters.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import mmap
import os
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from curvfs.units import GIB, KIB, MIB, parse_size
from tools.bench.spread import spread

ROUNDS = 7
SMALL_BYTES = 4 * KIB
RANDOM_BYTES = 128 * KIB
RANDOM_READS = 512
LISTED = 10_000
_COMMAND = (sys.executable, "-m", "tools")


@dataclass(frozen=True, slots=True)
class Measured:
    """One kind of load: what it does in a directory, the unit and least value of its result, how many operations a
    call of it does, or MiB it moves (what it tidies up comes on top), the least ratio to the plain side, and what else
    bounds that: a load of the mount without which nothing of the kind can be faster. ``tidy`` removes what the rounds
    have left."""

    name: str
    action: Callable[[Path, int], float]
    unit: str
    target: float | None
    operations: int
    least_ratio: float | None = None
    ceiling: Callable[[Path, int], float] | None = None
    tidy: Callable[[Path], None] = lambda directory: None


class Processes:
    """Processor time of the daemon and of the server, in seconds."""

    def __init__(self, daemon: int, server: int) -> None:
        self.daemon = daemon
        self._server = server
        self._tick = os.sysconf("SC_CLK_TCK")

    def cpu_s(self) -> tuple[float, float]:
        return self._of(self.daemon), self._of(self._server)

    def _of(self, pid: int) -> float:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / self._tick


class Loads:
    """The loops. Each returns operations a second, or GB (10^9 bytes) a second."""

    def __init__(self, files: int, size_bytes: int) -> None:
        self._files = files
        self._size_bytes = size_bytes
        self._small = os.urandom(SMALL_BYTES)
        self._buffer = mmap.mmap(-1, MIB)
        self._buffer.write(os.urandom(MIB))

    def prepare(self, directory: Path) -> None:
        """What the reading loads read: sealed small objects and a large one, ordinary ones, and a long list."""
        for index in range(self._files):
            self._put(directory, f"sealed-{index}")
        ordinary = _ordinary(directory)
        ordinary.mkdir()
        for index in range(self._files):
            (ordinary / f"o{index}").write_bytes(self._small)
        (ordinary / "listed").mkdir()
        for index in range(LISTED):
            os.close(os.open(ordinary / "listed" / f"n{index:05}", os.O_CREAT | os.O_WRONLY, 0o644))
        self._write(directory / "large.tmp", 0)
        os.rename(directory / "large.tmp", directory / "large")

    def _put(self, directory: Path, name: str) -> None:
        staging = directory / f"{name}.tmp"
        fd = os.open(staging, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
        os.write(fd, self._small)
        os.close(fd)
        os.rename(staging, directory / name)

    def create(self, directory: Path, number: int) -> float:
        """create + write 4 KiB + close"""
        names = [directory / f"c{number}-{index}" for index in range(self._files)]
        began_s = time.perf_counter()
        for name in names:
            fd = os.open(name, os.O_WRONLY | os.O_CREAT, 0o644)
            os.write(fd, self._small)
            os.close(fd)
        return self._files / (time.perf_counter() - began_s)

    def publish(self, directory: Path, number: int) -> float:
        """create + write 4 KiB + close + rename"""
        began_s = time.perf_counter()
        for index in range(self._files):
            self._put(directory, f"p{number}-{index}")
        return self._files / (time.perf_counter() - began_s)

    @staticmethod
    def remove_new(directory: Path) -> None:
        """What :meth:`create` and :meth:`publish` made."""
        for path in (*directory.glob("c*-*"), *directory.glob("p*-*")):
            path.unlink()

    def read_small(self, directory: Path, number: int) -> float:
        """open + read 4 KiB + close, sealed names"""
        buffer = bytearray(SMALL_BYTES)
        names = [str(directory / f"sealed-{index}") for index in range(self._files)]
        began_s = time.perf_counter()
        for name in names:
            fd = os.open(name, os.O_RDONLY)
            os.readv(fd, [buffer])
            os.close(fd)
        return len(names) / (time.perf_counter() - began_s)

    def read_ordinary(self, directory: Path, number: int) -> float:
        """open + read 4 KiB + close, ordinary names"""
        buffer = bytearray(SMALL_BYTES)
        names = [str(_ordinary(directory) / f"o{index}") for index in range(self._files)]
        began_s = time.perf_counter()
        for name in names:
            fd = os.open(name, os.O_RDONLY)
            os.readv(fd, [buffer])
            os.close(fd)
        return len(names) / (time.perf_counter() - began_s)

    def stat_sealed(self, directory: Path, number: int) -> float:
        return self._stat([directory / f"sealed-{index}" for index in range(self._files)])

    def stat_ordinary(self, directory: Path, number: int) -> float:
        return self._stat([_ordinary(directory) / f"o{index}" for index in range(self._files)])

    @staticmethod
    def _stat(names: list[Path]) -> float:
        began_s = time.perf_counter()
        for name in names:
            os.stat(name)
        return len(names) / (time.perf_counter() - began_s)

    def list_names(self, directory: Path, number: int) -> float:
        began_s = time.perf_counter()
        found = len(os.listdir(_ordinary(directory) / "listed"))
        took_s = time.perf_counter() - began_s
        if found != LISTED:
            raise SystemExit(f"{directory} lists {found} names of {LISTED}")
        return LISTED / took_s

    def unlink(self, directory: Path, number: int) -> float:
        names = [_ordinary(directory) / f"u{index}" for index in range(self._files)]
        for name in names:
            name.write_bytes(self._small)
        began_s = time.perf_counter()
        for name in names:
            os.unlink(name)
        return len(names) / (time.perf_counter() - began_s)

    def read_random(self, directory: Path, number: int) -> float:
        return self._random(directory / "large", number, 1)

    def read_random_deep(self, directory: Path, number: int) -> float:
        return self._random(directory / "large", number, 8)

    def _random(self, path: Path, number: int, depth: int) -> float:
        """128 KiB at a time from anywhere, past the kernel's pages where the daemon is in between."""
        chance = random.Random(number)
        reads = min(RANDOM_READS, self._size_bytes // RANDOM_BYTES)
        places = [chance.randrange(self._size_bytes // RANDOM_BYTES) * RANDOM_BYTES for _ in range(reads)]
        fd = os.open(path, os.O_RDONLY | (os.O_DIRECT if path.parent.name == "kv" else 0))

        def some(own: list[int]) -> None:
            buffer = mmap.mmap(-1, RANDOM_BYTES)
            for place in own:
                if os.preadv(fd, [buffer], place) != RANDOM_BYTES:
                    raise SystemExit(f"{path} gave less than was asked for")

        try:
            with ThreadPoolExecutor(depth) as pool:
                began_s = time.perf_counter()
                list(pool.map(some, [places[first::depth] for first in range(depth)]))
                return reads * RANDOM_BYTES / (time.perf_counter() - began_s) / 1e9
        finally:
            os.close(fd)

    def read_direct(self, directory: Path, number: int) -> float:
        return self._read(directory / "large", os.O_DIRECT if directory.name == "kv" else 0)

    def read_buffered(self, directory: Path, number: int) -> float:
        return self._read(directory / "large", 0, drop=directory.name == "kv")

    def _read(self, path: Path, flags: int, *, drop: bool = False) -> float:
        fd = os.open(path, os.O_RDONLY | flags)
        try:
            if drop:
                os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            began_s = time.perf_counter()
            for start in range(0, self._size_bytes, MIB):
                if os.preadv(fd, [self._buffer], start) != MIB:
                    raise SystemExit(f"{path} gave less than was asked for")
            return self._size_bytes / (time.perf_counter() - began_s) / 1e9
        finally:
            os.close(fd)

    def read_cold(self, directory: Path, number: int) -> float:
        return self._read_cold(directory, 0)

    def read_cold_direct(self, directory: Path, number: int) -> float:
        return self._read_cold(directory, os.O_DIRECT)

    def _read_cold(self, directory: Path, flags: int) -> float:
        """From the disk: the mount in 1 MiB reads, beside fio on the file system, direct, with eight under way."""
        large = directory / "large"
        if directory.name != "kv":
            return _fio_read(large, self._size_bytes)
        inode = large.stat().st_ino
        for block in (directory.parent.parent / "pool" / "data").rglob("blk_*"):
            if int(block.name[4:]) >> 24 == inode:
                fd = os.open(block, os.O_RDONLY)
                os.fsync(fd)
                os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
                os.close(fd)
        return self._read(large, flags, drop=True)

    def write_direct(self, directory: Path, number: int) -> float:
        return self._written(directory, os.O_DIRECT if directory.name == "kv" else 0)

    def write_buffered(self, directory: Path, number: int) -> float:
        return self._written(directory, 0)

    def _written(self, directory: Path, flags: int) -> float:
        path = directory / "written.tmp"
        took_s = self._write(path, flags)
        path.unlink()
        return self._size_bytes / took_s / 1e9

    def _write(self, path: Path, flags: int) -> float:
        began_s = time.perf_counter()
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | flags, 0o644)
        for start in range(0, self._size_bytes, MIB):
            os.pwritev(fd, [self._buffer], start)
        os.close(fd)
        return time.perf_counter() - began_s

    def all(self) -> list[Measured]:
        files, moved = self._files, self._size_bytes // MIB
        random_moved = min(RANDOM_READS * RANDOM_BYTES, self._size_bytes) // MIB
        return [
            Measured("create + write 4 KiB + close", self.create, "/s", None, files),
            Measured("create + write 4 KiB + close + rename", self.publish, "/s", 500, files, tidy=self.remove_new),
            Measured("open + read 4 KiB + close, sealed", self.read_small, "/s", 3000, files),
            Measured("open + read 4 KiB + close, ordinary", self.read_ordinary, "/s", None, files),
            Measured("stat, sealed", self.stat_sealed, "/s", None, files),
            Measured("stat, ordinary", self.stat_ordinary, "/s", None, files),
            Measured("readdir of 10,000, names", self.list_names, "/s", None, LISTED),
            Measured("unlink, ordinary", self.unlink, "/s", None, files),
            Measured("sequential 1 MiB reads, direct", self.read_direct, "GB/s", 2.0, moved),
            Measured("sequential 1 MiB reads, buffered", self.read_buffered, "GB/s", 1.2, moved),
            Measured("random 128 KiB reads, direct, depth 1", self.read_random, "GB/s", None, random_moved),
            Measured("random 128 KiB reads, direct, depth 8", self.read_random_deep, "GB/s", None, random_moved),
            # Where fio reads faster than a mount can hand out what lies in the page cache, the disk is not the limit.
            *(
                Measured(
                    f"sequential 1 MiB reads from the disk{how}, beside fio", cold, "GB/s", None, moved, 0.9, cached
                )
                for how, cold, cached in (
                    ("", self.read_cold, self.read_buffered),
                    (", direct", self.read_cold_direct, self.read_direct),
                )
            ),
            Measured("sequential 1 MiB writes, direct", self.write_direct, "GB/s", 0.9, moved),
            Measured("sequential 1 MiB writes, buffered", self.write_buffered, "GB/s", 0.9, moved),
        ]


def _ordinary(directory: Path) -> Path:
    """Where the files of no KV prefix lie that belong to a side."""
    return (directory.parent if directory.name == "kv" else directory) / "ordinary"


def _fio_read(path: Path, size_bytes: int) -> float:
    words = ["--name=j", f"--filename={path}", f"--size={size_bytes}", "--rw=read", "--bs=1m", "--direct=1"]
    words += ["--ioengine=libaio", "--iodepth=8", "--readonly", "--output-format=json"]
    done = subprocess.run(["fio", *words], cwd=path.parent, check=True, capture_output=True)
    return float(json.loads(done.stdout)["jobs"][0]["read"]["bw_bytes"]) / 1e9


def measure(mount: Path, plain: Path, loads: Loads, rounds: int, processes: Processes) -> None:
    """Print a row for each load. Processor time is per operation, or per MiB, of daemon and server."""
    print("| what | mount | spread | plain | ratio | target | | CPU, ms |\n|---|---|---|---|---|---|---|---|")
    for load in loads.all():
        load.action(mount, -1)  # everything is warm
        load.action(plain, -1)
        mine: list[float] = []
        theirs: list[float] = []
        bounds: list[float] = []
        took_s = [0.0, 0.0]
        for number in range(rounds):
            before = processes.cpu_s()
            for directory, found in ((mount, mine), (plain, theirs))[:: -1 if number % 2 else 1]:
                found.append(load.action(directory, number))
            took_s = [total + after - b for total, after, b in zip(took_s, processes.cpu_s(), before, strict=True)]
            if load.ceiling is not None:
                bounds.append(min(theirs[-1], load.ceiling(mount, number)))
        load.tidy(mount)
        load.tidy(plain)
        spent = [1000 * total_s / rounds / load.operations for total_s in took_s]
        ratio = statistics.median(own / other for own, other in zip(mine, bounds or theirs, strict=True))
        shown = ",.0f" if load.unit == "/s" else ".2f"
        median = statistics.median(mine)
        target, met = "", True
        if load.target is not None:
            target, met = f"{load.target:{shown}} {load.unit}", median >= load.target
        elif load.least_ratio is not None:
            target, met = f"ratio {load.least_ratio}", ratio >= load.least_ratio
        verdict = ("met" if met else "missed") if target else ""
        print(
            f"| {load.name} | {median:{shown}} {load.unit} | {min(mine):{shown}} to {max(mine):{shown}} | "
            f"{statistics.median(theirs):{shown}} {load.unit} | {ratio:.2f} | {target} | {verdict} | "
            f"{spent[0]:.2f} + {spent[1]:.2f} |",
            flush=True,
        )


def show_page_cache(mount: Path) -> None:
    """Print how many requests the daemon saw while a sealed object was read again and again."""
    stats = mount.parent / ".curvfs" / "stats.json"

    def reads() -> int:
        return int(json.loads(stats.read_bytes())["operations"].get("read", {"count": 0})["count"])

    large = mount / "large"
    with open(large, "rb", buffering=0) as file:
        while file.read(MIB):
            pass
        before = reads()
        for _ in range(10):
            file.seek(0)
            while file.read(MIB):
                pass
        within_one = reads() - before
    before = reads()
    began_s = time.perf_counter()
    for _ in range(10):
        with open(large, "rb", buffering=0) as file:
            while file.read(MIB):
                pass
    took_s = time.perf_counter() - began_s
    size_bytes = large.stat().st_size
    print(
        f"\nA sealed object of {size_bytes // MIB} MiB read 10 times: {within_one} reads reached the daemon "
        f"through one descriptor, {reads() - before} through 10 opens, at {10 * size_bytes / took_s / 1e9:.1f} GB/s."
    )


def show_memory(pid: int) -> None:
    status = Path(f"/proc/{pid}/status").read_text().splitlines()
    found = {line.split(":")[0]: int(line.split()[1]) for line in status if line.startswith(("VmHWM", "VmRSS"))}
    print(f"Memory of the daemon: {found['VmRSS'] / 1024:.0f} MiB now, {found['VmHWM'] / 1024:.0f} MiB at most.")


def _wait_for_the_server(pool: Path) -> None:
    """It goes by itself when nobody needs it, and would make anew what is removed before."""
    with contextlib.suppress(OSError):
        pid = json.loads((pool / "server.json").read_bytes())["pid"]
        for _ in range(200):
            os.kill(pid, 0)
            time.sleep(0.05)


def main() -> None:
    if shutil.which("fio") is None:
        raise SystemExit("fio is not installed; install the package fio.")
    parser = argparse.ArgumentParser(prog="python -m tools.mountbench", description="Measure a mount.")
    parser.add_argument("--size", default="512MB", help="bytes of a sequential read or write")
    parser.add_argument("--files", type=int, default=400, help="small files of a round")
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--directory", help="where the data lies; default: a temporary one")
    found = parser.parse_args()
    size_bytes = parse_size(found.size)
    print(
        f"{size_bytes / GIB:.2g} GiB per transfer, {found.files} small files, {found.rounds} interleaved rounds; "
        f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.1f} at the start.\n"
    )
    base = Path(tempfile.mkdtemp(dir=found.directory, prefix="curvfs-mountbench-"))
    plain, mountpoint = base / "plain", base / "mnt"
    spread(base)
    plain.mkdir()
    mountpoint.mkdir()
    try:
        subprocess.run(
            [*_COMMAND, "mount", "--background", "--embedded", str(base / "pool"), str(mountpoint)],
            check=True,
            stdout=subprocess.DEVNULL,
        )
        try:
            loads = Loads(found.files, size_bytes)
            loads.prepare(mountpoint / "kv")
            loads.prepare(plain)
            processes = Processes(
                json.loads((mountpoint / ".curvfs" / "stats.json").read_bytes())["pid"],
                json.loads((base / "pool" / "server.json").read_bytes())["pid"],
            )
            measure(mountpoint / "kv", plain, loads, found.rounds, processes)
            show_page_cache(mountpoint / "kv")
            show_memory(processes.daemon)
        finally:
            subprocess.run([*_COMMAND, "umount", str(mountpoint)], check=False, stdout=subprocess.DEVNULL)
            _wait_for_the_server(base / "pool")
    finally:
        shutil.rmtree(base, ignore_errors=True)


if __name__ == "__main__":
    main()
