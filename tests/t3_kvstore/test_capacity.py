"""Room: quotas that hold, victims used longest ago, floors, times to live, and processes that share one pool."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import kvstore
from curvfs.errors import ConfigError
from curvfs.simworld import SimWorld, simulated_world
from curvfs.world import RealDisk, World
from kvstore import Capacity, Geometry, Identity, KVStore, Miss
from kvstore.capacity.ledger import Ledger
from tests.t3_kvstore.places import Directory, Namespace, Place, empty, is_root, pages
from tests.t3_kvstore.test_posix import mounted

PAGE = Geometry.raw(5000, page_tokens=4)
OBJECT_BYTES = 12288
LARGE = Geometry.raw((1 << 20) - 4096, page_tokens=4)
MIB = 1 << 20


def keys_of(store: KVStore, *numbers: int) -> list[Any]:
    return [store.foreign_key(number.to_bytes(8, "little")) for number in numbers]


def put(store: KVStore, *numbers: int) -> list[Any]:
    contents = [page for number in numbers for page in pages(store.geometry, 1, seed=number)]
    return store.put(keys_of(store, *numbers), contents).result()


def there(store: KVStore, *numbers: int) -> list[int]:
    """Those that are stored."""
    return [number for number, found in zip(numbers, store.exists(keys_of(store, *numbers)), strict=True) if found]


def used(store: KVStore, *numbers: int) -> None:
    """Load them, which must be there, and compare."""
    room = empty(store.geometry, len(numbers))
    assert all(store.get(keys_of(store, *numbers), room).result())
    assert room == [page for number in numbers for page in pages(store.geometry, 1, seed=number)]


def wait_for(what: Callable[[], bool], seconds: float = 20.0) -> None:
    until_s = time.monotonic() + seconds
    while not what():
        assert time.monotonic() < until_s, "it did not come about"
        time.sleep(0.02)


def real_bytes(directory: Directory) -> int:
    """Objects, trash and staged files, as the file system has them."""
    total = 0
    for path, _, names in os.walk(directory.root / "kv"):
        for name in names:
            try:
                total += os.stat(f"{path}/{name}").st_size
            except FileNotFoundError:
                continue
    return total


def quota(objects: int, **settings: Any) -> Capacity:
    return Capacity(quota_bytes=objects * OBJECT_BYTES, **{"high": 1.0, "low": 1.0, **settings})


# ------------------------------------------------------------------------------------------------------- one process


@pytest.mark.parametrize(
    ("settings", "names"),
    [
        ({"high": 0.5, "low": 0.6}, "high=0.5 and low=0.6"),
        ({"high": 1.5}, "high=1.5"),
        ({"low": 0.0}, "low=0.0"),
        ({"quota_bytes": -1}, "-1 bytes"),
        ({"min_free_bytes": -1}, "min_free_bytes is -1"),
        ({"ttl_s": 0}, "ttl_s is 0"),
        ({"flush_s": float("inf")}, "flush_s is inf"),
        ({"evictor": "maybe"}, "'maybe'"),
    ],
)
def test_limits_that_contradict_themselves_are_refused(settings: dict[str, Any], names: str) -> None:
    with pytest.raises(ConfigError, match=names):
        Capacity(**settings)


def test_the_least_recently_used_goes_first(place: Place) -> None:
    store = place.open(PAGE, lease_s=0, capacity=quota(4))
    assert all(put(store, 1, 2, 3, 4))
    used(store, 1)
    assert all(put(store, 2))  # there already: used, too
    assert all(put(store, 5, 6))
    assert there(store, 1, 2, 3, 4, 5, 6) == [1, 2, 5, 6]
    stats = store.stats().capacity
    assert (stats.evicted, stats.used_bytes, stats.objects) == (2, 4 * OBJECT_BYTES, 4)
    assert store.usage().used_bytes == 4 * OBJECT_BYTES


def test_what_a_put_evicts_is_not_taken_for_there(directory: Directory) -> None:
    """The third page of one put is the victim of the second one, after it was seen to be there."""
    store = directory.open(PAGE, lease_s=0, capacity=quota(3))
    assert all(put(store, 3, 1, 2))
    assert all(put(store, 1, 9, 3))
    assert there(store, 1, 2, 3, 9) == [1, 3, 9]


def test_order_and_use_survive_a_restart(place: Place) -> None:
    store = place.open(PAGE, lease_s=0, capacity=quota(4))
    assert all(put(store, 1, 2, 3, 4))
    time.sleep(1.1)  # what the store keeps of a use is not finer than that everywhere
    used(store, 2)
    store.close()
    again = place.open(PAGE, lease_s=0, capacity=quota(4))
    wait_for(lambda: again.stats().capacity.counted)
    assert again.stats().capacity.used_bytes == 4 * OBJECT_BYTES
    assert all(put(again, 5, 6, 7))
    assert there(again, 1, 2, 3, 4, 5, 6, 7) == [2, 5, 6, 7]


def test_killed_and_restarted_it_knows_what_is_used(directory: Directory) -> None:
    program = (
        "import sys, kvstore, time\n"
        "page = kvstore.Geometry.raw((1 << 20) - 4096, page_tokens=4)\n"
        "whose = kvstore.Identity.of(page, model='m', revision='r1')\n"
        "store = kvstore.open(sys.argv[1], whose, geometry=page, capacity=kvstore.Capacity(quota_bytes=100 << 20))\n"
        "keys = [store.foreign_key(n.to_bytes(8, 'little')) for n in range(90)]\n"
        "assert all(store.put(keys, [bytes([n]) * page.size_bytes for n in range(90)]).result())\n"
        "print('done', flush=True)\n"
        "time.sleep(60)\n"
    )
    process = subprocess.Popen([sys.executable, "-c", program, directory.url], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "done\n"
    process.kill()
    process.wait()
    process.stdout.close()
    store = directory.open(LARGE, capacity=Capacity(quota_bytes=100 * MIB))
    assert store.usage().used_bytes >= 90 * MIB
    assert there(store, *range(90)) == list(range(90))
    room = empty(LARGE, 90)
    assert all(store.get(keys_of(store, *range(90)), room).result())
    assert [page[0] for page in room] == list(range(90))
    wait_for(lambda: store.stats().capacity.counted)
    assert store.stats().capacity.used_bytes >= 90 * MIB
    assert all(put(store, *range(100, 130)))
    assert real_bytes(directory) <= 100 * MIB + store.stats().capacity.chunk_bytes


def test_a_cap_is_kept_whatever_is_put(directory: Directory) -> None:
    store = directory.open(LARGE, capacity=Capacity(quota_bytes=32 * MIB))
    for start in range(0, 200, 20):
        assert all(put(store, *range(start, start + 20)))
        assert real_bytes(directory) <= 32 * MIB + store.stats().capacity.chunk_bytes
    assert store.stats().capacity.used_bytes <= 32 * MIB


def test_what_no_quota_holds_is_refused_and_evicts_nothing(directory: Directory) -> None:
    store = directory.open(PAGE, capacity=Capacity(quota_bytes=32 * MIB))
    assert all(put(store, *range(20)))
    huge = Geometry.raw(64 * MIB, page_tokens=4)
    other = directory.open(huge, depth=1, capacity=Capacity(quota_bytes=32 * MIB))
    refused = other.put(keys_of(other, 99), [bytes(64 * MIB)])
    assert refused.result() == [Miss.NO_SPACE]
    assert "more than the quota of 32.0 MiB" in str(refused.error(0))
    assert there(store, *range(20)) == list(range(20))
    raised = directory.open(huge, depth=1, capacity=Capacity(quota_bytes=256 * MIB))
    assert raised.put(keys_of(raised, 99), [bytes(64 * MIB)]).result() == [64 * MIB]


def test_a_quota_of_nothing_stores_nothing_and_loads_what_is_there(place: Place) -> None:
    assert all(put(place.open(PAGE), 1, 2))
    store = place.open(PAGE, capacity=Capacity(quota_bytes=0))
    assert put(store, 3, 4) == [Miss.NO_SPACE, Miss.NO_SPACE]
    assert put(store, 1) == [5000]  # it is there
    used(store, 1, 2)
    assert there(store, 1, 2, 3, 4) == [1, 2]


def test_watermarks_are_kept_in_the_background(directory: Directory) -> None:
    store = directory.open(PAGE, lease_s=30, capacity=quota(20, high=0.8, low=0.4))
    hit_keys = keys_of(store, 1, 2)
    assert all(put(store, *range(1, 17)))
    promised = store.lookup(hit_keys)
    assert promised.pages == 2
    assert all(put(store, 17))
    wait_for(lambda: len(there(store, *range(1, 18))) == 8)
    assert there(store, *range(1, 18)) == list(range(10, 18))
    # Nine went to the trash, where they count, and where those find them who were promised them.
    stats = store.stats().capacity
    assert (stats.trash_bytes, stats.used_bytes) == (9 * OBJECT_BYTES, 17 * OBJECT_BYTES)
    assert len(directory.trashed()) == 9
    room = empty(PAGE, 2)
    assert all(store.get(hit_keys, room, lookup=promised).result())
    # A put that needs the room gets it from the trash, before anything else goes.
    assert all(put(store, 21, 22, 23, 24))
    assert directory.trashed() == []
    assert there(store, *range(10, 18)) == list(range(10, 18))


def test_failed_puts_give_their_room_back(directory: Directory) -> None:
    class FailingDisk(RealDisk):
        fails = True

        def pwritev(self, fd: int, buffers: Any, offset_bytes: int, flags: int = 0) -> int:
            if self.fails and sum(map(len, buffers)) > 4096:
                raise OSError(5, "Input/output error")
            return super().pwritev(fd, buffers, offset_bytes, flags)

    disk = FailingDisk()
    store = directory.open(PAGE, world=World(disk=disk), direct=False, lease_s=0, capacity=quota(4))
    for _ in range(3):
        assert put(store, 1, 2, 3, 4) == [Miss.IO] * 4
    assert store.stats().capacity.used_bytes == 0
    disk.fails = False
    assert all(put(store, 1, 2, 3, 4))
    assert there(store, 1, 2, 3, 4) == [1, 2, 3, 4]
    assert store.stats().capacity.evicted == 0


def test_deletions_and_clearing_are_counted(place: Place) -> None:
    store = place.open(PAGE, capacity=quota(4))
    assert all(put(store, 1, 2, 3, 4))
    assert store.delete(keys_of(store, 1)) == [True]
    assert store.evict(keys_of(store, 2)) == [True]
    stats = store.stats().capacity
    assert (stats.used_bytes, stats.trash_bytes) == (3 * OBJECT_BYTES, OBJECT_BYTES)
    assert store.clear() == 2
    wait_for(lambda: store.stats().capacity.used_bytes == OBJECT_BYTES)
    assert all(put(store, 5, 6, 7))


def test_old_objects_expire_by_the_stores_clock(directory: Directory) -> None:
    store = directory.open(PAGE, lease_s=0, capacity=Capacity(ttl_s=1000, flush_s=0.05))
    assert all(put(store, 1, 2, 3))
    for number in (1, 2):
        path = directory.block_file(store, keys_of(store, number)[0])
        os.utime(path, (time.time(), time.time() - 2000))
    again = directory.open(PAGE, lease_s=0, capacity=Capacity(ttl_s=1000, flush_s=0.05))
    wait_for(lambda: there(again, 1, 2, 3) == [3])
    wait_for(lambda: again.stats().capacity.expired + store.stats().capacity.expired == 2)  # counted once they are gone


def test_without_an_evictor_puts_are_refused_until_somebody_evicts(directory: Directory) -> None:
    store = directory.open(PAGE, lease_s=0, capacity=quota(4, evictor="off"))
    assert all(put(store, 1, 2, 3, 4))
    assert put(store, 5) == [Miss.NO_SPACE]
    assert store.stats().capacity.refused == 1
    assert "nothing could be evicted" in store.stats().last_error
    evictor = directory.open(PAGE, lease_s=0, capacity=quota(4, high=0.9, low=0.5))
    wait_for(lambda: len(there(store, 1, 2, 3, 4)) == 2)
    evictor.close()

    def stored() -> bool:
        return put(store, 5) == [5000]

    wait_for(stored)


@pytest.mark.skipif(not is_root(), reason="mounting a file system needs root")
def test_the_pool_keeps_its_free_room(tmp_path: Path) -> None:
    with mounted(tmp_path / "small", "-t", "tmpfs", "-o", "size=4m", "tmpfs") as place:
        store = place.open(PAGE, lease_s=0, capacity=Capacity(min_free_bytes=2 * MIB))
        for start in range(0, 400, 20):
            assert all(put(store, *range(start, start + 20)))
            found = os.statvfs(place.root)
            assert found.f_bavail * found.f_frsize >= 2 * MIB - 64 * 1024  # directories take some, too
        assert store.stats().capacity.evicted > 150
        assert there(store, 399) == [399]


@pytest.mark.skipif(not is_root(), reason="mounting a file system needs root")
def test_a_full_pool_is_a_counted_miss_and_heals(tmp_path: Path) -> None:
    with mounted(tmp_path / "small", "-t", "tmpfs", "-o", "size=4m", "tmpfs") as place:
        store = place.open(PAGE, lease_s=0, capacity=Capacity(quota_bytes=1 << 30))
        results = [result for start in range(0, 400, 20) for result in put(store, *range(start, start + 20))]
        assert results[0] == 5000
        assert results[-1] is Miss.NO_SPACE
        assert store.stats().put_failures["no space"] == results.count(Miss.NO_SPACE)
        stored = [number for number, result in enumerate(results) if result]
        used(store, *stored[:50])
        assert store.stats().capacity.used_bytes == len(stored) * OBJECT_BYTES
        assert all(store.delete(keys_of(store, *stored[::2])))
        assert all(put(store, *range(1000, 1000 + len(stored) // 3)))
        assert place.staged() == []


@pytest.mark.parametrize("step_s", [7 * 86400.0, -7 * 86400.0])
def test_a_clock_that_is_set_expires_nothing_and_keeps_the_order(step_s: float) -> None:
    world = simulated_world(1)
    world.disk.mkdir("/pool")
    whose = Identity.of(PAGE, model="m", revision="r1")
    capacity = quota(4, ttl_s=86400.0, high=1.0, low=1.0)
    with kvstore.open("file:///pool", whose, geometry=PAGE, world=world, lease_s=0, capacity=capacity) as store:
        assert all(put(store, 1, 2, 3))
        world.clock.block(40)
        used(store, 1)
        world.clock.step(step_s)
        world.clock.block(70)
        assert all(put(store, 4))
        world.clock.block(40)
        used(store, 4)
        assert there(store, 1, 2, 3, 4) == [1, 2, 3, 4]
        assert store.stats().capacity.expired == 0
        assert all(put(store, 5, 6))
        assert there(store, 1, 2, 3, 4, 5, 6) == [1, 4, 5, 6]
        # Later what is old goes; what was written before the clock went back is from the future, and stays.
        world.clock.block(2 * 86400.0)
        store.get(keys_of(store, 6), empty(PAGE, 1)).result()
        world.clock.block(40)
        store.get(keys_of(store, 6), empty(PAGE, 1)).result()
        assert there(store, 1, 4, 5, 6) == ([] if step_s > 0 else [1])


# -------------------------------------------------------------------------------------------------- several processes

#: Writes as fast as it can; argument 1 is the URL, 2 the quota, 3 its number.
WRITER = """
import sys, kvstore
page = kvstore.Geometry.raw(60000, page_tokens=4)
whose = kvstore.Identity.of(page, model="m", revision="r1")
capacity = kvstore.Capacity(quota_bytes=int(sys.argv[2]), high=0.9, low=0.7, flush_s=0.2, rescan_s=1.0)
store = kvstore.open(sys.argv[1], whose, geometry=page, engine="threads", lease_s=0.1, capacity=capacity)
print("ready", flush=True)
number = int(sys.argv[3]) << 32
content = bytes(page.size_bytes)
while True:
    keys = [store.foreign_key((number + place).to_bytes(8, "little")) for place in range(10)]
    store.put(keys, [content] * 10).result()
    number += 10
    print(number & 0xFFFFFFFF, flush=True)
"""


class Writer:
    def __init__(self, url: str, quota_bytes: int, number: int) -> None:
        command = [sys.executable, "-c", WRITER, url, str(quota_bytes), str(number)]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        self.written = 0
        self._reading = threading.Thread(target=self._read, daemon=True)
        self._reading.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.strip().isdigit():
                self.written = int(line)

    def stop(self) -> None:
        self.process.kill()
        self.process.wait()
        self._reading.join(10)
        for pipe in (self.process.stdout, self.process.stderr):
            assert pipe is not None
            pipe.close()


@pytest.mark.skipif(not is_root(), reason="mounting a file system needs root")
def test_writers_of_several_processes_keep_one_quota(tmp_path: Path) -> None:
    """Within a chunk for each; also when one of them is killed in the middle, and another comes."""
    quota_bytes = 200 * 65536
    object_bytes = 65536
    chunk_bytes = max(object_bytes, quota_bytes // 64)
    with mounted(tmp_path / "pool", "-t", "tmpfs", "-o", "size=64m", "tmpfs") as place:

        def taken_bytes() -> int:
            """What all files take, at one moment."""
            found = os.statvfs(place.root)
            return (found.f_blocks - found.f_bfree) * found.f_frsize

        empty_bytes, worst_bytes = taken_bytes(), 0
        writers = [Writer(place.url, quota_bytes, number) for number in range(3)]
        try:

            def watched(enough: Callable[[], bool]) -> bool:
                nonlocal worst_bytes
                for _ in range(50):
                    worst_bytes = max(worst_bytes, taken_bytes() - empty_bytes)
                return enough()

            wait_for(lambda: watched(lambda: all(writer.written >= 200 for writer in writers)), 60)
            writers[0].process.send_signal(signal.SIGKILL)
            writers.append(Writer(place.url, quota_bytes, 7))
            wait_for(lambda: watched(lambda: writers[-1].written >= 200), 60)
        finally:
            for writer in writers:
                writer.stop()
        assert 0.6 * quota_bytes <= worst_bytes <= quota_bytes + 4 * chunk_bytes


def test_uses_by_other_processes_count(place: Place) -> None:
    evictor = place.open(PAGE, lease_s=0, capacity=quota(6, flush_s=0.1))
    reader = place.open(PAGE, capacity=Capacity(flush_s=0.1))
    assert all(put(evictor, 1, 2, 3, 4, 5, 6))
    wait_for(lambda: put(evictor, 6) == [5000] and evictor.stats().capacity.processes == 1)
    time.sleep(1.1)  # uses are kept to the second in some stores
    used(reader, 1, 3)
    time.sleep(0.15)
    wait_for(lambda: used(reader, 3) is None and reader.stats().capacity.accesses_flushed >= 2)
    assert all(put(evictor, 7, 8, 9))
    assert there(evictor, *range(1, 10)) == [1, 3, 6, 7, 8, 9]


def test_two_evictors_at_once_do_not_take_twice(directory: Directory) -> None:
    limits = quota(40, high=1.0, low=0.5, flush_s=0.1)
    first = directory.open(PAGE, lease_s=0, capacity=limits)
    second = directory.open(PAGE, lease_s=0, capacity=limits)
    wait_for(lambda: first.stats().capacity.counted and second.stats().capacity.counted)
    stored: list[int] = []

    def write(store: KVStore, base: int) -> None:
        for step in range(150):
            stored.extend(result for result in put(store, base + step) if result)

    threads = [threading.Thread(target=write, args=pair) for pair in ((first, 1000), (second, 2000))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    def evicted() -> int:
        return first.stats().capacity.evicted + second.stats().capacity.evicted

    wait_for(lambda: evicted() == len(stored) - len(directory.objects()))  # some may still be on their way
    assert 10 <= len(directory.objects()) <= 42
    assert len(stored) >= 80  # where it is not known yet what the other one put, there is nothing to evict


def test_an_evictor_killed_in_the_middle_leaves_sound_books(directory: Directory) -> None:
    writer = Writer(directory.url, 50 * 65536, 1)
    wait_for(lambda: writer.written >= 100, 60)
    writer.stop()
    page = Geometry.raw(60000, page_tokens=4)
    store = directory.open(page, lease_s=0.1, capacity=Capacity(quota_bytes=50 * 65536, flush_s=0.1))
    wait_for(lambda: store.stats().capacity.counted)
    assert store.stats().capacity.used_bytes >= real_bytes(directory) - store.stats().capacity.chunk_bytes
    assert all(put(store, *range(200)))
    assert real_bytes(directory) <= 50 * 65536 + 2 * store.stats().capacity.chunk_bytes


def test_what_was_removed_by_hand_is_noticed(directory: Directory) -> None:
    limits = quota(20, flush_s=0.05)
    other = directory.open(PAGE)  # somebody else is there, so not every loss is its own
    store = directory.open(PAGE, lease_s=0, capacity=limits)
    assert all(put(store, *range(20)))
    for number in range(20):
        directory.block_file(store, keys_of(store, number)[0]).unlink()

    def stored() -> bool:
        return all(put(store, 100, 101, 102))

    wait_for(stored)
    wait_for(lambda: put(store, 103) != [] and store.stats().capacity.used_bytes <= 5 * OBJECT_BYTES)
    assert store.stats().capacity.counts >= 2
    other.close()


def test_a_store_that_cannot_be_counted_refuses_and_recovers(directory: Directory) -> None:
    class Blind(RealDisk):
        blind = True

        def listdir(self, path: str) -> list[str]:
            if self.blind and not path.endswith((".staging", ".quota")):
                raise OSError(5, "Input/output error", path)
            return super().listdir(path)

    assert all(put(directory.open(PAGE), 1))
    disk = Blind()
    store = directory.open(PAGE, world=World(disk=disk), capacity=quota(4))
    assert put(store, 2) == [Miss.IO]
    used(store, 1)
    disk.blind = False

    def stored() -> bool:
        return put(store, 2) == [5000]

    wait_for(stored)
    assert store.stats().capacity.used_bytes == 2 * OBJECT_BYTES


def test_tenants_have_quotas_of_their_own(place: Place) -> None:
    first = place.open(PAGE, salt="a", capacity=quota(3))
    second = place.open(PAGE, salt="b", capacity=quota(3))
    assert all(put(first, 1, 2, 3))
    assert all(put(second, 1, 2, 3, 4))
    assert there(first, 1, 2, 3) == [1, 2, 3]
    assert there(second, 1, 2, 3, 4) == [2, 3, 4]


def test_the_server_forgets_and_the_books_follow(master: tuple[str, Path | None]) -> None:
    """What another client deletes behind our back costs a count, not the quota."""
    address, blocks = master
    place = Namespace(address, blocks, "somewhere-else")
    try:
        store = place.open(PAGE, lease_s=0, capacity=quota(5, flush_s=0.05))
        assert all(put(store, 1, 2, 3, 4, 5))
        place.fs.delete(f"/kv/{store.object_name(keys_of(store, 1)[0])}")
        room = empty(PAGE, 1)
        assert store.get(keys_of(store, 1), room).result() == [Miss.ABSENT]
        wait_for(lambda: used(store, 2) is None and store.stats().capacity.used_bytes == 4 * OBJECT_BYTES)
        assert all(put(store, 6))
        assert there(store, 2, 3, 4, 5, 6) == [2, 3, 4, 5, 6]
    finally:
        place.close()


def test_a_store_that_was_closed_leaves_one_record(place: Place) -> None:
    """Everybody reads all records, so what many short lives leave behind slows the living."""
    for number in range(3):
        store = place.open(PAGE, lease_s=0, capacity=quota(4))
        for step in range(4):
            assert all(put(store, 10 * number + step))
        assert store.close()
    assert len([name for name in place.names() if name.startswith(".quota/") and not name.endswith("/")]) == 3


def test_what_was_withdrawn_is_not_spent_unsaid() -> None:
    """Puts that lost their race give their room back. Once that was said, others may use it, so no more than one chunk
    may be spent before it is said again."""
    world = simulated_world(1)
    world.disk.mkdir("/pool")
    whose = Identity.of(PAGE, model="m", revision="r1")
    with kvstore.open("file:///pool", whose, geometry=PAGE, world=world) as store:
        ledger = Ledger(world, store._backend, "m", chunk_bytes=OBJECT_BYTES)
        for _ in range(4):
            ledger.exchange()
            assert ledger.left_bytes == OBJECT_BYTES
            ledger.spent_bytes += OBJECT_BYTES
        ledger.spent_bytes -= 3 * OBJECT_BYTES
        ledger.say()
        assert ledger.left_bytes == OBJECT_BYTES


def two_ledgers(world: SimWorld, first: KVStore, second: KVStore) -> tuple[Ledger, Ledger]:
    """A writer with one object stored and a chunk under way, and another one that is about to count the pool."""
    writer = Ledger(world, first._backend, "m", chunk_bytes=OBJECT_BYTES)
    writer.exchange()
    writer.spent_bytes, writer.pending_bytes = 2 * OBJECT_BYTES, OBJECT_BYTES
    writer.say()
    return writer, Ledger(world, second._backend, "m", chunk_bytes=OBJECT_BYTES)


def count(ledger: Ledger) -> None:
    ledger.end_count(ledger.begin_count())


def records_of(world: SimWorld, ledger: Ledger) -> list[str]:
    return [name for name in world.disk.listdir(ledger._directory) if name.startswith(ledger._writer)]


@pytest.mark.parametrize("step_s", [3600.0, -3600.0])
def test_a_clock_that_is_set_makes_no_writer_dead_and_keeps_none_alive(step_s: float) -> None:
    """What a writer has under way counts until it was silent for two minutes that passed; then it has ended."""
    world = simulated_world(1)
    world.disk.mkdir("/pool")
    whose = Identity.of(PAGE, model="m", revision="r1")
    with (
        kvstore.open("file:///pool", whose, geometry=PAGE, world=world) as first,
        kvstore.open("file:///pool", whose, geometry=PAGE, world=world) as second,
    ):
        writer, other = two_ledgers(world, first, second)
        world.clock.step(step_s)
        other.exchange()
        count(other)
        assert other.others_bytes == OBJECT_BYTES
        assert other.living == 1
        world.clock.block(60)
        other.exchange()
        assert other.remove_old() == 0
        count(other)
        assert (other.others_bytes, other.living, other.stale) == (OBJECT_BYTES, 1, False)
        # A sign of life, then none for two minutes in which nobody looked, and none in two minutes that were watched.
        writer.say()
        world.clock.block(121)
        other.exchange()
        count(other)
        assert (other.others_bytes, other.living, other.stale) == (OBJECT_BYTES, 1, False)
        world.clock.block(121)
        other.exchange()
        assert (other.living, other.stale) == (0, True)
        assert other.others_bytes >= OBJECT_BYTES
        # What it left in staging is used; its record tells where that is.
        assert other.dead_places == {first._backend.staging.directory.rpartition("/")[2]}
        count(other)
        assert (other.others_bytes, other.living, other.stale) == (0, 0, False)
        # It was only asleep.
        writer.say()
        other.exchange()
        assert (other.others_bytes, other.living) == (OBJECT_BYTES, 1)


def test_records_are_removed_once_their_writer_is_silent_on_our_own_clock() -> None:
    world = simulated_world(1)
    world.disk.mkdir("/pool")
    whose = Identity.of(PAGE, model="m", revision="r1")
    with (
        kvstore.open("file:///pool", whose, geometry=PAGE, world=world) as first,
        kvstore.open("file:///pool", whose, geometry=PAGE, world=world) as second,
    ):
        writer, other = two_ledgers(world, first, second)
        kept = len(records_of(world, writer))
        for passed_s, removed in ((0, 0), (100, 0), (21, kept)):
            world.clock.block(passed_s)
            world.clock.step(1000)
            other.exchange()
            assert other.remove_old([writer._written[0].place]) == 0  # what it left in staging is not swept yet
            assert other.remove_old() == removed
            assert len(records_of(world, writer)) == kept - removed


def test_evicting_into_a_trash_that_others_empty(directory: Directory, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever needs room removes the minute that another one has just made."""
    store = directory.open(PAGE)
    assert all(put(store, 1, 2))
    records = store._backend.records
    make, removed = records.make_directory, []

    def made(path: str) -> str:
        found = make(path)
        if "/.trash/" in path and len(removed) < 2:
            records.remove_directory(path)
            removed.append(path)
        return found

    monkeypatch.setattr(records, "make_directory", made)
    assert store.evict(keys_of(store, 1, 2)) == [True, True]
    assert len(removed) == 2
