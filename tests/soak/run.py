"""Many clients of one server, for minutes, through bad days.

32 stores in one process, each with a thread that looks prefixes up, loads what was promised and stores the rest, all of
one model under one quota, with memory and (every second one) write-behind before the pool. Every 45 s something happens
to the server: it is killed and started again, or it stands still for a while (10 s, unless told otherwise). Every few
seconds the process's memory, descriptors and threads are measured, and what the blocks take on the server's disk.

It is a problem when bytes were wrong, a call took longer than its deadline and a second, the quota was not kept, a
client did not recover, or memory or descriptors of the last third of the run are above those of the third before.
"""

from __future__ import annotations

import os
import random
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import kvstore
from kvstore import Capacity, Geometry, Identity, KVStore, Miss

CLIENTS = 32
PAGE = Geometry.raw(60_000, page_tokens=64)
WHOSE = Identity.of(PAGE, model="soak", revision="1")
OBJECT_BYTES = 65536
QUOTA_BYTES = 24 << 20
TIMEOUT_S = 5.0
LOOKUP_TIMEOUT_S = 2.0
#: What a busy machine may add to a deadline.
GRACE_S = 1.0
_SAMPLE_S = 2.0
_KILL_EVERY_S = 45.0
#: Prefixes that are asked for, at most; few enough that what every client remembers of them is soon complete.
_PREFIXES = 40
#: Between two requests of a client.
_THINK_S = (6.0, 12.0)
_HOSTNAME = "soak"


@dataclass(slots=True)
class Sample:
    at_s: float
    resident_mib: float
    descriptors: int
    threads: int
    pool_mib: float


@dataclass(slots=True)
class Tally:
    """What happened, counted by all threads."""

    lock: threading.Lock = field(default_factory=threading.Lock)
    calls: Counter[str] = field(default_factory=Counter)
    misses: Counter[str] = field(default_factory=Counter)
    problems: list[str] = field(default_factory=list)
    slowest_s: dict[str, float] = field(default_factory=dict)
    delivered_s: float = 0.0

    def call(self, what: str, took_s: float, limit_s: float) -> None:
        with self.lock:
            self.calls[what] += 1
            self.slowest_s[what] = max(took_s, self.slowest_s.get(what, 0.0))
            if took_s > limit_s + GRACE_S:
                self.problems.append(f"a {what} took {took_s:.2f} s, its deadline was {limit_s} s")


class Server:
    """The embedded server in a process of its own, on the same ports whenever it is started."""

    def __init__(self, directory: Path) -> None:
        self._command = [sys.executable, "-m", "curvfs.server", str(directory), "--hostname", _HOSTNAME]
        ports = [_free_port() for _ in range(2)]
        self._command += ["--master-port", str(ports[0]), "--worker-port", str(ports[1])]
        self.url = f"curvine://127.0.0.1:{ports[0]}/?client_hostname={_HOSTNAME}"
        self.start()

    def start(self) -> None:
        self._process = subprocess.Popen(
            self._command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, start_new_session=True
        )
        assert self._process.stdout is not None
        self._process.stdout.readline()
        self._process.stdout.close()

    def signal(self, number: int) -> None:
        self._process.send_signal(number)

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _content(number: int) -> bytes:
    return number.to_bytes(8, "little") * (PAGE.size_bytes // 8)


def _client(store: KVStore, seed: int, stop: threading.Event, tally: Tally) -> None:
    rng = random.Random(seed)
    while not stop.is_set():
        prefix = min(int(rng.expovariate(0.02)), _PREFIXES - 1)
        numbers = [prefix << 16 | place for place in range(rng.randint(4, 16))]
        keys = [store.foreign_key(number.to_bytes(8, "little")) for number in numbers]
        begun_s = time.monotonic()
        hit = store.lookup(keys)
        tally.call("lookup", time.monotonic() - begun_s, LOOKUP_TIMEOUT_S)
        room = [bytearray(PAGE.size_bytes) for _ in hit.keys]
        begun_s = time.monotonic()
        results = store.get(hit.keys, room, lookup=hit).result()
        tally.call("get", time.monotonic() - begun_s, TIMEOUT_S)
        for number, result, page in zip(numbers, results, room, strict=False):
            if isinstance(result, Miss):
                with tally.lock:
                    tally.misses[f"get: {result.value}"] += 1
            elif page != _content(number):
                with tally.lock:
                    tally.problems.append(f"page {number} has other bytes")
            else:
                tally.delivered_s = time.monotonic()
        rest = numbers[hit.pages :]
        begun_s = time.monotonic()
        stored = store.put(keys[hit.pages :], [_content(number) for number in rest]).result()
        tally.call("put", time.monotonic() - begun_s, TIMEOUT_S)
        with tally.lock:
            tally.misses.update(f"put: {result.value}" for result in stored if isinstance(result, Miss))
        stop.wait(rng.uniform(*_THINK_S))


def _sample(began_s: float, blocks: Path) -> Sample:
    with open("/proc/self/statm", encoding="ascii") as file:
        resident = int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    pool = 0
    for path, _, names in os.walk(blocks):
        for name in names:
            if name.startswith("blk_"):
                try:
                    pool += os.stat(f"{path}/{name}").st_size
                except FileNotFoundError:
                    continue
    return Sample(
        time.monotonic() - began_s,
        resident / (1 << 20),
        len(os.listdir("/proc/self/fd")),
        len(os.listdir("/proc/self/task")),
        pool / (1 << 20),
    )


def soak(seconds: float, plot: Path | None, *, stop_s: float) -> tuple[list[str], list[str]]:
    """Run for so long, the server standing still for ``stop_s`` each time; what is to be told, and the problems."""
    directory = Path(tempfile.mkdtemp(prefix="curvfs-soak-"))
    server = Server(directory)
    tally, stop = Tally(), threading.Event()
    samples: list[Sample] = []
    kills = stops = 0
    recovered: list[float] = []
    capacity = Capacity(quota_bytes=QUOTA_BYTES, high=0.9, low=0.8, flush_s=5.0, rescan_s=120.0)
    stores = [
        kvstore.open(
            server.url,
            WHOSE,
            geometry=PAGE,
            depth=1,
            timeout_s=TIMEOUT_S,
            lookup_timeout_s=LOOKUP_TIMEOUT_S,
            lease_s=5.0,
            memory_bytes=1 << 20,
            write_behind_bytes=(2 << 20) if number % 2 else 0,
            capacity=capacity,
        )
        for number in range(CLIENTS)
    ]
    threads = [
        threading.Thread(target=_client, args=(store, seed, stop, tally), daemon=True)
        for seed, store in enumerate(stores)
    ]
    began_s = time.monotonic()
    for thread in threads:
        thread.start()
    try:
        next_s, killing = began_s + _KILL_EVERY_S, True
        while time.monotonic() - began_s < seconds:
            time.sleep(_SAMPLE_S)
            samples.append(_sample(began_s, directory))
            if time.monotonic() < next_s:
                continue
            next_s += _KILL_EVERY_S
            if killing:
                server.kill()
                time.sleep(2.0)
                server.start()
                kills += 1
            else:
                server.signal(signal.SIGSTOP)
                time.sleep(stop_s)
                server.signal(signal.SIGCONT)
                stops += 1
            killing = not killing
            again_s = time.monotonic()
            while tally.delivered_s < again_s and time.monotonic() - again_s < 30:
                time.sleep(0.05)
            recovered.append(tally.delivered_s - again_s)
            if tally.delivered_s < again_s:
                tally.problems.append("nothing was delivered for 30 s after the server was back")
    finally:
        stop.set()
        for thread in threads:
            thread.join(2 * TIMEOUT_S)
        if any(thread.is_alive() for thread in threads):
            tally.problems.append("a client did not end")
        _judge(samples, tally)
        lines = _tell(stores, tally, samples, kills, stops, recovered, time.monotonic() - began_s, stop_s)
        for store in stores:
            store.close()
        server.kill()
        shutil.rmtree(directory, ignore_errors=True)
    if plot is not None:
        _draw(samples, plot)
    return lines, tally.problems


def _thirds(samples: list[Sample], name: str) -> tuple[float, float]:
    """Medians of the second and of the last third."""
    third = len(samples) // 3
    values = [float(getattr(sample, name)) for sample in samples]
    return statistics.median(values[third : 2 * third]), statistics.median(values[2 * third :])


def _tell(
    stores: list[KVStore],
    tally: Tally,
    samples: list[Sample],
    kills: int,
    stops: int,
    recovered: list[float],
    seconds: float,
    stop_s: float,
) -> list[str]:
    calls = ", ".join(f"{count} {what}s" for what, count in sorted(tally.calls.items()))
    slowest = ", ".join(f"{what} {took_s:.2f} s" for what, took_s in sorted(tally.slowest_s.items()))
    misses = ", ".join(f"{what} {count}" for what, count in sorted(tally.misses.items()))
    all_stats = [store.stats() for store in stores]
    evicted = sum(stats.capacity.evicted for stats in all_stats)
    hits = sum(stats.memory.hits for stats in all_stats)
    dropped = sum(stats.behind.dropped for stats in all_stats)
    opened = sum(stats.health.opened for stats in all_stats)
    lines = [
        f"{CLIENTS} clients, {seconds:.0f} s; the server was killed and started again {kills} times, and stood still "
        f"for {stop_s:.0f} s {stops} times",
        f"{calls}; the slowest: {slowest} (deadlines: lookup {LOOKUP_TIMEOUT_S:g} s, the others {TIMEOUT_S:g} s)",
        f"pages not delivered or not stored: {misses or 'none'}",
        f"{evicted} objects evicted, {hits} pages delivered from memory, {dropped} puts dropped by write-behind, "
        f"breakers opened {opened} times",
        "seconds until the first page came after the server was back: "
        + (", ".join(f"{value:.1f}" for value in recovered) or "none"),
    ]
    for name, unit in (("resident_mib", "MiB of memory"), ("descriptors", "descriptors"), ("threads", "threads")):
        second, last = _thirds(samples, name)
        lines.append(f"{unit}, medians of the second and the last third: {second:.0f}, {last:.0f}")
    most = max(sample.pool_mib for sample in samples)
    lines.append(f"the pool took at most {most:.1f} MiB; the quota is {QUOTA_BYTES >> 20} MiB")
    lines.append("problems: " + ("; ".join(tally.problems[:5]) if tally.problems else "none"))
    return lines


def _judge(samples: list[Sample], tally: Tally) -> None:
    second, last = _thirds(samples, "resident_mib")
    if last > 1.05 * second + 8:
        tally.problems.append(f"memory grew from {second:.0f} to {last:.0f} MiB")
    second, last = _thirds(samples, "descriptors")
    if last > 1.05 * second + 8:
        tally.problems.append(f"descriptors grew from {second:.0f} to {last:.0f}")
    chunk_bytes = max(OBJECT_BYTES, QUOTA_BYTES // 64)
    most_mib = (QUOTA_BYTES + CLIENTS * chunk_bytes) / (1 << 20)
    most = max(sample.pool_mib for sample in samples)
    if most > most_mib:
        tally.problems.append(f"the pool took {most:.1f} MiB, more than {most_mib:.1f}")


def _draw(samples: list[Sample], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(3, 1, sharex=True, figsize=(9, 7))
    times = [sample.at_s for sample in samples]
    for axis, name, label in zip(
        axes,
        ("resident_mib", "descriptors", "pool_mib"),
        ("memory of the clients, MiB", "descriptors", "blocks in the pool, MiB"),
        strict=True,
    ):
        if name == "pool_mib":
            axis.axhline(QUOTA_BYTES / (1 << 20), color="tab:red", linewidth=1, label="quota")
            axis.legend(loc="lower right")
        axis.plot(times, [getattr(sample, name) for sample in samples], linewidth=1)
        axis.set_ylabel(label)
        axis.set_ylim(bottom=0)
        axis.grid(alpha=0.3)
    axes[2].set_xlabel("seconds")
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=100)
    pyplot.close(figure)
