"""Health: what is slow, stuck or gone costs a request no more than computing it would, and comes back by itself."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from curvfs.errors import ConfigError, UsageError
from curvfs.world import Random, RealDisk, World
from kvstore import Geometry, KVStore, Miss
from kvstore.health.breaker import FAILURES, Breaker, State
from kvstore.health.health import STALLED_S, Health
from kvstore.health.meter import Meter, Reading
from tests.t3_kvstore.places import Directory, empty, is_root, pages
from tests.t3_kvstore.test_capacity import keys_of, put, wait_for
from tests.t3_kvstore.test_posix import mounted

PAGE = Geometry.raw(1 << 20, page_tokens=64)
MIB = 1 << 20


class SetClock:
    """A clock that stands until it is set."""

    def __init__(self) -> None:
        self.now_s = 100.0

    def monotonic_s(self) -> float:
        return self.now_s

    def time_ms(self) -> int:
        return int(self.now_s * 1000)

    def block(self, duration_s: float) -> None:
        self.now_s += duration_s


def health(clock: SetClock, prefill: float | None = None) -> Health:
    world = World(clock=clock, random=Random(1))  # type: ignore[arg-type]
    return Health(world, page_bytes=MIB, page_tokens=64, prefill_tokens_per_s=prefill)


def read(one: Health, clock: SetClock, place: str, seconds: float, result: int | Miss | None = MIB) -> None:
    reading = one.began(place)
    clock.now_s += seconds
    one.ended(reading, result)


# ---------------------------------------------------------------------------------------------------------- the parts


def test_a_breaker_opens_tries_one_call_and_waits_longer_each_time() -> None:
    breaker = Breaker(Random(1))
    for _ in range(FAILURES - 1):
        breaker.failed(0.0)
    assert breaker.allows(0.0)
    breaker.succeeded()
    for _ in range(FAILURES):
        breaker.failed(0.0)
    waits, now_s = [], 0.0
    for _ in range(5):
        assert not breaker.allows(now_s)
        begun_s = now_s
        while breaker.state(now_s) is State.OPEN:
            now_s += 0.01
        waits.append(now_s - begun_s)
        assert breaker.allows(now_s)
        assert not breaker.allows(now_s)  # one call, not two
        breaker.failed(now_s)
    assert waits[0] < 0.7
    assert waits[0] < waits[1] < waits[2]
    assert max(waits) < 5
    now_s += 5
    assert breaker.allows(now_s)
    breaker.succeeded()
    assert breaker.state(now_s) is State.CLOSED
    assert breaker.opened == 1


def test_a_meter_learns_slowness_at_once_and_speed_soon() -> None:
    meter, now_s = Meter(MIB), 0.0

    def one(seconds: float) -> None:
        nonlocal now_s
        reading = Reading("", MIB, now_s)
        meter.began(reading)
        now_s += seconds
        meter.ended(reading, now_s, delivered=True)

    assert meter.seconds_per_byte(0.0) is None
    for _ in range(20):
        one(0.001)
    assert meter.seconds_per_byte(now_s) == pytest.approx(0.001 / MIB)
    one(0.1)
    assert (meter.seconds_per_byte(now_s) or 0) * MIB > 0.02
    for _ in range(25):
        one(0.001)
    assert (meter.seconds_per_byte(now_s) or 0) * MIB < 0.0015
    # What has not come yet tells, too.
    stuck = Reading("", MIB, now_s)
    meter.began(stuck)
    assert (meter.seconds_per_byte(now_s + 2.0) or 0) * MIB == pytest.approx(2.0)
    assert meter.oldest_s(now_s + 2.0) == pytest.approx(2.0)


def test_idle_time_between_reads_does_not_count() -> None:
    meter = Meter(MIB)
    for second in range(10):
        reading = Reading("", MIB, float(second))
        meter.began(reading)
        meter.ended(reading, second + 0.01, delivered=True)
    assert (meter.seconds_per_byte(10.0) or 0) * MIB == pytest.approx(0.01)


def test_worth_is_the_prefix_that_saves_most() -> None:
    clock = SetClock()
    one = health(clock, prefill=6400.0)  # 10 ms a page
    assert one.worth(["a"] * 10) == 10  # nothing is known to be slow
    for _ in range(10):
        read(one, clock, "fast", 0.001)
        read(one, clock, "slow", 0.1)
    assert one.worth(["fast"] * 10) == 10
    assert one.worth(["slow"] * 10) == 0
    assert one.worth(["fast"] * 4 + ["slow"] * 6) == 4
    # One slow page among many is worth it: 32 pages save 320 ms.
    assert one.worth(["fast", "slow"] + ["fast"] * 30) == 32
    assert one.worth([None] * 3 + ["slow"] * 3) == 3
    assert one.stats().withheld_pages == 10 + 6 + 3


def test_how_long_loading_should_take_is_known_once_it_was_measured() -> None:
    clock = SetClock()
    one = health(clock, prefill=6400.0)
    assert one.load_s(["a"]) is None
    for _ in range(10):
        read(one, clock, "a", 0.01)
    assert one.load_s(["a"] * 10) == pytest.approx(0.1)
    assert one.load_s([None, "a"]) == pytest.approx(0.01)
    assert one.load_s(["a", "b"]) is None
    assert one.load_s([]) == 0.0
    one.waits("a", 10)
    assert one.load_s(["a"] * 10) == pytest.approx(0.2)


def test_pages_that_wait_for_their_turn_count_as_under_way() -> None:
    clock = SetClock()
    one = health(clock, prefill=6400.0)  # 10 ms a page
    for _ in range(10):
        read(one, clock, "a", 0.001)
    one.waits("a", 200)
    assert one.worth(["a"] * 10) == 0  # the others take 200 ms before it is their turn
    assert one.worth(["a"] * 40) == 40
    assert one.stats().places["a"].in_flight == 200
    one.waits("a", -200)
    assert one.worth(["a"] * 10) == 10


def test_a_prefill_rate_that_was_given_is_not_learned() -> None:
    clock = SetClock()
    given, learned = health(clock, prefill=1000.0), health(clock)
    assert learned.compute_s(1) is None
    for one in (given, learned):
        one.observe_prefill(640, 0.1)
    assert given.stats().prefill_tokens_per_s == 1000.0
    assert learned.compute_s(1) == pytest.approx(0.01)
    for tokens, seconds in ((0, 1.0), (1, 0.0), (-1, 1.0)):
        with pytest.raises(UsageError):
            learned.observe_prefill(tokens, seconds)


def test_a_worker_that_is_gone_is_left_alone_and_tried_again() -> None:
    clock = SetClock()
    one = health(clock)
    read(one, clock, "well", 0.001)
    for _ in range(FAILURES):
        assert one.admits("gone")
        read(one, clock, "gone", 0.001, Miss.UNREACHABLE)
    assert not one.admits("gone")
    assert one.admits("well")
    assert one.worth(["well", "well", "gone", "well"]) == 2
    assert not one.to_measure("gone")
    clock.now_s += 1.0
    assert not one.admits("gone")  # requests wait until a read in the background has worked
    assert one.to_measure("gone")
    assert not one.to_measure("gone")
    read(one, clock, "gone", 0.001)
    one.measured("gone", 1)
    assert one.admits("gone")
    stats = one.stats()
    assert (stats.opened, stats.probes, stats.rejected) == (1, 1, 2)


def test_a_place_that_reads_one_object_for_long_is_asked_for_no_more() -> None:
    clock = SetClock()
    one = health(clock)
    reading = one.began("")
    assert one.admits("")
    clock.now_s += STALLED_S
    assert not one.admits("")
    assert one.worth([""] * 3) == 0
    assert one.stats().places[""].state == "stalled"
    one.ended(reading, None)
    assert one.admits("")


# ---------------------------------------------------------------------------------------------------------- the store


def test_a_rate_that_cannot_be_is_refused(directory: Directory) -> None:
    for rate in (0.0, -1.0, float("inf"), float("nan")):
        with pytest.raises(ConfigError, match="prefill_tokens_per_s"):
            directory.open(PAGE, prefill_tokens_per_s=rate)


class SlowDisk(RealDisk):
    """Reads of objects take ``slow_s`` each, one after the other; or hang until ``go`` is set."""

    def __init__(self) -> None:
        super().__init__()
        self.slow_s = 0.0
        self.go = threading.Event()
        self.go.set()
        self._one = threading.Lock()

    def preadv(self, fd: int, buffers: Any, offset_bytes: int, flags: int = 0) -> int:
        if self.slow_s and sum(map(len, buffers)) > 4096:
            with self._one:
                time.sleep(self.slow_s)
        self.go.wait(30)
        return super().preadv(fd, buffers, offset_bytes, flags)


def served(store: KVStore, count: int) -> tuple[int, float]:
    """One request: look up, load what was promised; the pages that came, and the seconds it took."""
    begun_s = time.monotonic()
    keys = keys_of(store, *range(count))
    hit = store.lookup(keys)
    room = empty(store.geometry, hit.pages)
    results = store.get(hit.keys, room, lookup=hit).result()
    return sum(map(bool, results)), time.monotonic() - begun_s


def test_a_slow_store_shortens_lookups_and_comes_back(directory: Directory) -> None:
    disk = SlowDisk()
    store = directory.open(
        PAGE, world=World(disk=disk), engine="threads", direct=False, depth=4, prefill_tokens_per_s=6400.0
    )
    assert all(put(store, *range(16)))
    wait_for(lambda: served(store, 16)[0] == 16)
    disk.slow_s = 0.1  # ten times what computing takes
    begun_s = time.monotonic()
    wait_for(lambda: store.lookup(keys_of(store, *range(16))).pages == 0 or served(store, 16) is None)
    assert time.monotonic() - begun_s < 5
    # From now on nobody is held up, whatever is tried in the background.
    took = []
    for _ in range(11):
        pages_served, took_s = served(store, 16)
        assert pages_served == 0
        took.append(took_s)
        time.sleep(0.05)
    assert sorted(took)[5] < 16 * 0.01  # the machine may hold up some
    hit = store.lookup(keys_of(store, *range(16)))
    assert (hit.pages, hit.withheld_pages) == (0, 16)
    assert store.stats().health.withheld_lookups > 5
    disk.slow_s = 0.0
    begun_s = time.monotonic()
    wait_for(lambda: served(store, 16)[0] == 16)
    assert time.monotonic() - begun_s < 8
    assert store.stats().health.probes > 0


def test_a_crowd_is_not_promised_more_than_the_disk_delivers(directory: Directory) -> None:
    disk = SlowDisk()
    store = directory.open(
        PAGE, world=World(disk=disk), engine="threads", direct=False, depth=2, prefill_tokens_per_s=1600.0
    )
    assert all(put(store, *range(16)))
    disk.slow_s = 0.024  # somewhat faster than computing: worth it for one, not for six at once
    wait_for(lambda: served(store, 16)[0] == 16)
    keys = keys_of(store, *range(16))
    crowd = [store.get(keys, empty(PAGE, 16)) for _ in range(6)]
    assert store.lookup(keys).pages == 0
    for one in crowd:
        assert all(one.result())
    assert store.stats().health.places[""].in_flight == 0
    wait_for(lambda: served(store, 16)[0] == 16)


def test_a_get_ends_when_computing_would_be_done(directory: Directory) -> None:
    disk = SlowDisk()
    store = directory.open(
        PAGE, world=World(disk=disk), engine="threads", direct=False, prefill_tokens_per_s=6400.0, timeout_s=30
    )
    assert all(put(store, *range(16)))
    hit = store.lookup(keys_of(store, *range(16)))
    disk.go.clear()
    begun_s = time.monotonic()
    room = empty(PAGE, 16)
    assert store.get(hit.keys, room, lookup=hit).result() == [Miss.DEADLINE] * 16
    assert time.monotonic() - begun_s < 3  # computing takes 160 ms
    disk.go.set()


def test_a_get_that_outlasts_what_it_should_take_does_not_wait_as_long_as_computing(directory: Directory) -> None:
    disk = SlowDisk()
    store = directory.open(
        PAGE, world=World(disk=disk), engine="threads", direct=False, prefill_tokens_per_s=16.0, timeout_s=120
    )
    assert all(put(store, *range(16)))
    wait_for(lambda: served(store, 16)[0] == 16)
    hit = store.lookup(keys_of(store, *range(16)))
    assert hit.pages == 16
    assert hit.load_s is not None
    assert hit.load_s < 1
    disk.go.clear()
    begun_s = time.monotonic()
    assert store.get(hit.keys, empty(PAGE, 16), lookup=hit).result() == [Miss.DEADLINE] * 16
    assert time.monotonic() - begun_s < 16  # computing takes 64 s
    disk.go.set()


def test_what_a_lookup_took_is_taken_from_its_get(directory: Directory) -> None:
    disk = SlowDisk()
    store = directory.open(
        PAGE, world=World(disk=disk), engine="threads", direct=False, prefill_tokens_per_s=64.0, timeout_s=60
    )
    assert all(put(store, *range(16)))
    hit = store.lookup(keys_of(store, *range(16)))
    assert hit.took_s > 0
    disk.go.clear()
    begun_s = time.monotonic()
    slow = dataclasses.replace(hit, took_s=15.9)  # computing takes 16 s
    assert store.get(slow.keys, empty(PAGE, 16), lookup=slow).result() == [Miss.DEADLINE] * 16
    assert time.monotonic() - begun_s < 8
    disk.go.set()


def test_a_disk_that_stalls_holds_nobody_up_and_is_used_again(directory: Directory) -> None:
    disk = SlowDisk()
    store = directory.open(PAGE, world=World(disk=disk), engine="threads", direct=False, depth=2)
    assert all(put(store, *range(8)))
    disk.go.clear()
    store.get(keys_of(store, 0), empty(PAGE, 1), timeout_s=0.1).result()
    wait_for(lambda: store.stats().health.places[""].state == "stalled")
    outcomes: list[tuple[list[Any], float]] = []

    def call() -> None:
        begun_s = time.monotonic()
        results = store.get(keys_of(store, *range(8)), empty(PAGE, 8), timeout_s=10).result()
        outcomes.append((results, time.monotonic() - begun_s))

    callers = [threading.Thread(target=call) for _ in range(32)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join(20)
    assert len(outcomes) == 32
    assert all(results == [Miss.UNREACHABLE] * 8 and took_s < 5 for results, took_s in outcomes)
    assert store.lookup(keys_of(store, *range(8))).pages == 0
    disk.go.set()
    wait_for(lambda: served(store, 8)[0] == 8)


def test_a_store_that_does_not_answer_is_waited_for_once(directory: Directory) -> None:
    class Deaf(RealDisk):
        go = threading.Event()

        def stat(self, path: str, *, follow_symlinks: bool = True) -> os.stat_result:
            if path.endswith(".safetensors"):
                self.go.wait(30)
            return super().stat(path, follow_symlinks=follow_symlinks)

    disk = Deaf()
    disk.go.set()
    store = directory.open(PAGE, world=World(disk=disk), lookup_timeout_s=0.6, lease_s=0)
    keys = keys_of(store, *range(4))
    assert all(put(store, *range(4)))
    disk.go.clear()
    begun_s = time.monotonic()
    assert store.lookup(keys).pages == 0
    first_s = time.monotonic() - begun_s
    assert first_s >= 0.5
    begun_s = time.monotonic()
    for _ in range(20):
        assert store.lookup(keys).pages == 0
        assert store.exists(keys) == [False] * 4
    assert time.monotonic() - begun_s < first_s
    assert store.stats().health.asking in ("open", "half-open")
    disk.go.set()
    wait_for(lambda: store.lookup(keys).pages == 4)
    assert store.stats().health.asking == "closed"


def test_deleting_from_a_store_that_hangs_ends_in_time(directory: Directory) -> None:
    class Hanging(RealDisk):
        go = threading.Event()

        def unlink(self, path: str) -> None:
            if path.endswith(".safetensors"):
                self.go.wait(30)
            super().unlink(path)

    disk = Hanging()
    store = directory.open(PAGE, world=World(disk=disk))
    assert all(put(store, 1, 2))
    begun_s = time.monotonic()
    assert store.delete(keys_of(store, 1, 2), timeout_s=0.2) == [Miss.DEADLINE] * 2
    assert time.monotonic() - begun_s < 5
    disk.go.set()
    wait_for(lambda: store.exists(keys_of(store, 1, 2)) == [False, True])  # what was not begun is not done
    assert store.delete(keys_of(store, 1, 2)) == [False, True]


# ------------------------------------------------------------------------------------------------- a disk that is slow

_BLKIO = Path("/sys/fs/cgroup/blkio")
_READS = "blkio.throttle.read_bps_device"

#: Requests for 32 pages, again and again: argument 1 is the URL. Prints pages served, withheld, and milliseconds.
READER = """
import sys, time, kvstore
page = kvstore.Geometry.raw(1 << 20, page_tokens=64)
whose = kvstore.Identity.of(page, model="m", revision="r1")
store = kvstore.open(sys.argv[1], whose, geometry=page, lease_s=0.001, prefill_tokens_per_s=16000, direct="required")
keys = [store.foreign_key(n.to_bytes(8, "little")) for n in range(32)]
room = [bytearray(1 << 20) for _ in keys]
while True:
    begun = time.monotonic()
    hit = store.lookup(keys)
    served = sum(map(bool, store.get(hit.keys, room[:hit.pages], lookup=hit).result()))
    print(served, hit.withheld_pages, int(1000 * (time.monotonic() - begun)), flush=True)
    time.sleep(0.05)
"""


@pytest.mark.skipif(not is_root() or not _BLKIO.is_dir(), reason="needs root and control groups of version 1")
def test_under_a_disk_of_10_mb_a_second_a_request_is_no_slower_than_computing(tmp_path: Path) -> None:
    image = tmp_path / "image"
    with image.open("wb") as file:
        file.truncate(200 * MIB)
    subprocess.run(["mkfs.ext4", "-q", "-F", str(image)], check=True)
    with mounted(tmp_path / "pool", "-o", "loop", str(image)) as place:
        store = place.open(PAGE)
        assert all(put(store, *range(32)))
        number = os.stat(place.root).st_dev
        group = _BLKIO / f"curvfs-{os.getpid()}"
        group.mkdir()
        reader = subprocess.Popen([sys.executable, "-c", READER, place.url], stdout=subprocess.PIPE, text=True)
        lines: list[tuple[int, int, int]] = []

        def collect() -> None:
            assert reader.stdout is not None
            for line in reader.stdout:
                served_, withheld, took_ms = map(int, line.split())
                lines.append((served_, withheld, took_ms))

        collecting = threading.Thread(target=collect, daemon=True)
        collecting.start()
        try:
            (group / "cgroup.procs").write_text(str(reader.pid))
            wait_for(lambda: bool(lines) and lines[-1][0] == 32)
            (group / _READS).write_text(f"{os.major(number)}:{os.minor(number)} {10 * MIB}")
            begun_s = time.monotonic()
            wait_for(lambda: lines[-1][1] > 0)
            assert time.monotonic() - begun_s < 8
            at = len(lines)
            wait_for(lambda: len(lines) > at + 20)
            # 2048 tokens at 16,000 a second: 128 ms. The load of the machine may double it.
            slow = sorted(took_ms for _, _, took_ms in lines[at:])
            assert slow[len(slow) // 2] < 128
            (group / _READS).write_text(f"{os.major(number)}:{os.minor(number)} 0")
            begun_s = time.monotonic()
            wait_for(lambda: lines[-1][0] == 32)
            assert time.monotonic() - begun_s < 15
        finally:
            reader.kill()
            reader.wait()
            collecting.join(10)
            assert reader.stdout is not None
            reader.stdout.close()
            wait_for(lambda: not (group / "cgroup.procs").read_text())
            group.rmdir()


def test_workers_and_stores_that_were_never_slow_are_not_choosy(directory: Directory) -> None:
    store = directory.open(PAGE)
    content = pages(PAGE, 4)
    assert all(store.put(keys_of(store, *range(4)), content).result())
    assert store.lookup(keys_of(store, *range(4))).pages == 4
    assert store.stats().health.withheld_lookups == 0


def test_a_disk_that_takes_no_writes_is_still_read_from(directory: Directory) -> None:
    class Frozen(RealDisk):
        go = threading.Event()

        def pwritev(self, fd: int, buffers: Any, offset_bytes: int, flags: int = 0) -> int:
            self.go.wait(30)
            return super().pwritev(fd, buffers, offset_bytes, flags)

    disk = Frozen()
    disk.go.set()
    store = directory.open(PAGE, world=World(disk=disk), engine="threads", depth=2, prefill_tokens_per_s=64.0)
    assert all(put(store, *range(4)))
    disk.go.clear()
    puts = [
        store.put(keys_of(store, number), pages(PAGE, 1, seed=number), timeout_s=0.2 if number < 12 else 20)
        for number in range(10, 20)
    ]
    assert puts[0].result() == [Miss.DEADLINE]
    for _ in range(3):
        assert served(store, 4)[0] == 4
    disk.go.set()
    assert all(all(one.result()) for one in puts[2:])
