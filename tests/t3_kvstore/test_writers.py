"""Two workers, one of which dies, falls silent or gets slow: what is stored goes to the other one, the store as a whole
is not given up, and the bad one gets objects again once it is well."""

from __future__ import annotations

import errno
import json
import random
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

import kvstore
from curvfs.api import SyncFileSystem
from curvfs.disk import RealDisk
from curvfs.world import World
from kvstore import Geometry, Identity, KVStore
from kvstore.backends import curvine
from kvstore.backends.base import Target, Targets
from kvstore.health import writers
from kvstore.health.writers import STALLED_S, Writers
from tests.t3_kvstore.test_health import SetClock
from tests.t4_mount.relay import Gate, marked

MIB = 1 << 20
PAGE = Geometry.raw(MIB, page_tokens=64)
WHOSE = Identity.of(PAGE, model="m", revision="r1")

SERVER = """
import json, sys, trio
from functools import partial
from curvfs.server.service import run_server

async def main():
    async with trio.open_nursery() as nursery:
        server = await nursery.start(partial(
            run_server, sys.argv[1], master_port=0, worker_port=0, hostname="one", more_workers=["two"]))
        print(json.dumps([server.master_port, server.worker_port, *server.more_worker_ports]), flush=True)

trio.run(main)
"""


@contextmanager
def two_workers(tmp_path: Path) -> Iterator[tuple[str, list[Gate]]]:
    """A server of two workers, ``one`` and ``two``, each behind a gate, and its master's address."""
    command = [sys.executable, "-c", SERVER, str(tmp_path / "pool")]
    gates: list[Gate] = []
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            master, *workers = json.loads(process.stdout.readline())
            gates += [Gate(port) for port in workers]
            exchange = [(marked(port), marked(gate.port)) for port, gate in zip(workers, gates, strict=True)]
            gates.append(Gate(master, exchange))
            yield f"127.0.0.1:{gates[-1].port}", gates[:-1]
        finally:
            for gate in gates:
                gate.close()
            process.terminate()


def opened(url: str, **settings: Any) -> KVStore:
    return kvstore.open(url, WHOSE, geometry=PAGE, engine="threads", **settings)


class Putter:
    """Stores pages that were never stored before."""

    def __init__(self, store: KVStore) -> None:
        self.store = store
        self.count = 0
        self._content = bytearray(random.Random(1).randbytes(MIB))

    def put(self, number: int = 8, **settings: Any) -> list[Any]:
        keys = [self.store.foreign_key((self.count + index).to_bytes(8, "little")) for index in range(number)]
        self.count += number
        return self.store.put(keys, [self._content] * number, **settings).result()


def state(store: KVStore, name: str) -> str:
    return store.stats().health.writers[name].state


def wait_for(condition: Callable[[], object], what: str, limit_s: float = 40.0) -> None:
    until_s = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < until_s, f"waited in vain: {what}"
        time.sleep(0.05)


def holders(address: str) -> Counter[str]:
    """How many objects each worker has."""
    found: Counter[str] = Counter()
    with SyncFileSystem.connect(f"curvine://{address}/pool?client_hostname=elsewhere") as fs:
        pending = ["/kv"]
        while pending:
            for status in fs.list(pending.pop()):
                if status.is_dir and not status.name.startswith("."):
                    pending.append(status.path)
                elif status.name.endswith(".safetensors"):
                    found.update(worker.hostname for worker in fs.locate(status.path).blocks[0].workers)
    return found


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Waits that are seconds in life."""
    monkeypatch.setattr(curvine, "_WORKER_TIMEOUT_S", 1.5)
    monkeypatch.setattr(writers, "STALLED_S", 1.0)


@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize("how", ["dead", "silent", "slow"])
def test_puts_go_on_through_the_other_worker(tmp_path: Path, how: str) -> None:
    with (
        two_workers(tmp_path) as (address, gates),
        opened(f"curvine://{address}/pool?client_hostname=elsewhere", depth=4) as store,
    ):
        putter = Putter(store)
        assert all(putter.put(16))
        before = holders(address)
        assert min(before["one"], before["two"]) > 0
        bad = gates[1]
        {"dead": bad.cut, "silent": bad.hold, "slow": lambda: setattr(bad, "slow_s", 0.35)}[how]()
        lost = [result for result in putter.put(8) if not result]
        assert len(lost) <= 4, lost  # what was on its way to it at that moment
        wait_for(lambda: all(putter.put(4)) and state(store, "two") in ("open", "half-open"), "it is left alone")
        took = []
        for _ in range(5):
            begun_s = time.monotonic()
            assert all(putter.put(8)), store.stats().health
            took.append(time.monotonic() - begun_s)
        assert sorted(took)[2] < 2  # it costs nobody anything any more
        health = store.stats().health
        assert health.putting == "closed"
        assert state(store, "one") == "closed"
        assert health.writers["two"].opened == 1
        breakers = next(family for family in store.metrics() if family.name == "curvfs_kv_breaker")
        assert {one.labels["place"]: one.value > 0 for one in breakers.samples if one.labels["of"] == "writing"} == {
            "one": False,
            "two": True,
        }

        bad.mend()
        wait_for(lambda: all(putter.put(2)) and state(store, "two") == "closed", "it is tried again")
        before = holders(address)
        assert all(putter.put(16))
        assert holders(address)["two"] > before["two"]
        assert store.stats().slabs_in_use == 0


class HangingDisk(RealDisk):
    """Writes to the files of the first worker hang, or fail."""

    def __init__(self) -> None:
        super().__init__()
        self.go = threading.Event()
        self.go.set()
        self.fails = False

    def pwritev(self, fd: int, buffers: Any, offset_bytes: int, flags: int = 0) -> int:
        if sum(map(len, buffers)) > 4096:
            self.go.wait(60)
            if self.fails:
                raise OSError(errno.EIO, "the disk is broken")
        return super().pwritev(fd, buffers, offset_bytes, flags)


@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize("how", ["hangs", "fails"])
def test_a_local_disk_that_takes_no_writes_leaves_them_to_the_other_worker(tmp_path: Path, how: str) -> None:
    disk = HangingDisk()
    with (
        two_workers(tmp_path) as (address, _),
        opened(f"curvine://{address}/pool?client_hostname=one", depth=2, world=World(disk=disk), timeout_s=60) as store,
    ):
        putter = Putter(store)
        assert all(putter.put(8))
        assert holders(address) == {"one": 8}  # the near one is preferred
        stuck: list[Any] = []
        waiting = threading.Thread(target=lambda: stuck.extend(putter.put(6)))
        if how == "hangs":
            disk.go.clear()
            waiting.start()
            wait_for(lambda: store.stats().health.writers["one"].in_flight == 2, "writes hang")
        else:
            disk.fails = True
        wait_for(lambda: all(putter.put(2, timeout_s=10)), "puts go on")
        assert holders(address)["two"] >= 2
        assert state(store, "one") in ("open", "half-open", "stalled")
        assert store.stats().health.putting == "closed"
        disk.fails = False
        disk.go.set()
        if how == "hangs":
            waiting.join(60)
            assert all(stuck)
        wait_for(lambda: all(putter.put(2)) and state(store, "one") == "closed", "it is tried again")
        before = holders(address)
        assert all(putter.put(4))
        assert holders(address)["one"] > before["one"]


# ----------------------------------------------------------------------------------------------------------- one by one


class NoTargets(Targets):
    def __init__(self) -> None:
        self.left: set[int] = set()

    def avoided(self) -> tuple[int, ...]:
        return tuple(self.left)

    def avoid(self, worker_id: int) -> None:
        self.left.add(worker_id)

    def readmit(self, worker_id: int) -> None:
        self.left.discard(worker_id)

    def attempt(self, worker_id: int, view: memoryview) -> None:
        raise AssertionError("nobody is asked here")


ONE, TWO = Target(1, "one"), Target(2, "two")


def written(some: Writers, clock: SetClock, target: Target, seconds: float, *, failed: bool = False) -> None:
    write = some.began([target])
    clock.now_s += seconds
    some.ended(write, failed=failed, stored=not failed)


def test_a_writer_that_failed_is_left_alone_until_an_attempt_succeeds() -> None:
    clock, targets = SetClock(), NoTargets()
    some = Writers(World(clock=clock), targets, page_bytes=MIB, at_once=2)
    written(some, clock, ONE, 0.01)
    written(some, clock, TWO, 0.01)
    assert not some.others_well
    written(some, clock, TWO, 0.01, failed=True)
    assert targets.left == {2}
    assert some.others_well
    assert some.left_alone([TWO])
    assert some.review() == []  # not yet
    clock.now_s += 1
    assert some.review() == [TWO]
    assert some.review() == []  # one at a time
    some.tried(TWO, None)
    clock.now_s += 0.6
    assert some.review() == []  # twice as long as before
    clock.now_s += 1
    assert some.review() == [TWO]
    some.tried(TWO, 0.01)
    assert targets.left == set()
    assert some.stats()["two"].state == "closed"
    written(some, clock, ONE, 0.01, failed=True)
    written(some, clock, TWO, 0.01, failed=True)
    assert not some.others_well  # it is the store then


def test_who_is_slow_or_hangs_is_left_alone() -> None:
    clock, targets = SetClock(), NoTargets()
    some = Writers(World(clock=clock), targets, page_bytes=MIB, at_once=2)
    for _ in range(6):
        written(some, clock, ONE, 0.01)
        written(some, clock, TWO, 0.9)
    some.review()
    assert targets.left == set()  # ninety times as slow, and still not worth it
    for _ in range(6):
        written(some, clock, TWO, 2.0)
    some.review()
    assert targets.left == {2}
    clock.now_s += 1
    assert some.review() == [TWO]
    some.tried(TWO, 2.0)  # as slow as before
    assert targets.left == {2}
    hanging = some.began([ONE])
    clock.now_s += STALLED_S
    some.review()
    assert targets.left == {1, 2}
    assert some.stats()["one"].state == "stalled"
    some.ended(hanging, failed=False, stored=True)


def test_one_worker_gets_so_many_pages_at_once() -> None:
    clock = SetClock()
    some = Writers(World(clock=clock), NoTargets(), page_bytes=MIB, at_once=2)
    assert some.takes([ONE])
    assert some.takes([ONE, TWO])
    assert not some.takes([TWO, ONE])
    assert some.takes([TWO])
    some.let_go([ONE])
    assert not some.takes([ONE, TWO])
    assert some.takes([ONE])
    only = Writers(World(clock=clock), None, page_bytes=MIB, at_once=1)
    assert only.takes([Target()])
    assert only.takes([Target()])
    assert not only.choosing
