"""The same store in the simulated world: killed between any two calls, without power, on a disk that does its worst."""

from __future__ import annotations

import errno
import os
import stat
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest

import kvstore
from curvfs.errors import CurvfsError
from curvfs.simworld import ProcessKilled, SimWorld, simulated_world
from curvfs.world import DirectIo, World
from kvstore import Geometry, Identity, KVStore, Miss
from tests.t3_kvstore.places import empty, pages, untouched

PAGE = Geometry.of({"a": ("float16", (3000,)), "b": ("uint8", (9000,))}, page_tokens=4)
WHOSE = Identity.of(PAGE, model="m", revision="r")
COUNT = 4
CONTENT = pages(PAGE, COUNT)


def opened(world: World, *, depth: int = 2, **settings: Any) -> KVStore:
    return kvstore.open("file:///pool", WHOSE, geometry=PAGE, world=world, depth=depth, **settings)


def fresh(seed: int) -> SimWorld:
    world = simulated_world(seed)
    world.disk.mkdir("/pool")
    fd = world.disk.open("/", 0)
    world.disk.fsync(fd)
    world.disk.close(fd)
    return world


def whole_or_nothing(store: KVStore, allowed: set[Miss]) -> list[bool]:
    """Every page is there with all its bytes, or a miss that touched nothing."""
    keys, got = store.keys(range(4 * COUNT)), empty(PAGE, COUNT)
    results = store.get(keys, got).result()
    for result, page, content in zip(results, got, CONTENT, strict=True):
        if result:
            assert page == content
        else:
            assert result in allowed, result
            assert untouched([page])
    return [bool(result) for result in results]


def put_all(world: SimWorld) -> None:
    with opened(world) as store:
        store.put(store.keys(range(4 * COUNT)), CONTENT).result()


def sync_names(world: SimWorld, directory: str) -> None:
    """Make all names durable, and no data."""
    fd = world.disk.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    world.disk.fsync(fd)
    world.disk.close(fd)
    for name in world.disk.listdir(directory):
        if stat.S_ISDIR(world.disk.stat(f"{directory}/{name}").st_mode):
            sync_names(world, f"{directory}/{name}")


@pytest.mark.parametrize("direct", [DirectIo(512, 512), None], ids=["direct", "buffered"])
@pytest.mark.parametrize("names_are_durable", [True, False])
def test_power_cuts_leave_whole_objects_or_misses(direct: DirectIo | None, names_are_durable: bool) -> None:
    causes: Counter[str] = Counter()
    for seed in range(40):
        world = fresh(seed)
        world.disk.set_direct_io(direct)
        put_all(world)
        if names_are_durable:
            sync_names(world, "/pool")
        world.power_cut()
        with opened(world.sibling()) as store:
            there = whole_or_nothing(store, {Miss.ABSENT, Miss.DAMAGED})
            causes.update({"there": sum(there)} | store.stats().get_misses)
    # It is a cache: data were not synced. What is torn is seen by its checksums.
    assert causes["damaged"] if names_are_durable else causes["absent"]


@pytest.mark.parametrize("direct", [DirectIo(512, 512), None], ids=["direct", "buffered"])
def test_durable_objects_survive_power_cuts(direct: DirectIo | None) -> None:
    for seed in range(30):
        world = fresh(seed)
        world.disk.set_direct_io(direct)
        with opened(world, durability="publish") as store:
            keys = store.keys(range(4 * COUNT))
            assert all(store.put(keys[:3], CONTENT[:3]).result())
            store.delete(keys[2:3])
            assert all(store.put(keys[2:], CONTENT[2:]).result())
        world.power_cut()
        with opened(world.sibling()) as store:
            assert all(whole_or_nothing(store, set()))


@pytest.mark.parametrize("fault", ["fdatasync", "fsync"])
def test_what_could_not_be_synced_is_not_stored(fault: str) -> None:
    world = fresh(1)
    with opened(world, durability="publish") as store:
        keys = store.keys(range(4 * COUNT))

        def fail(fd: int) -> None:
            raise OSError(errno.EIO, "a broken medium")

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(type(world.disk), fault, lambda disk, fd: fail(fd))
            assert store.put(keys, CONTENT).result() == [Miss.IO] * COUNT
        assert store.exists(keys) == [False] * COUNT
        assert all(store.put(keys, CONTENT).result())
    world.power_cut()
    with opened(world.sibling()) as store:
        assert all(whole_or_nothing(store, set()))


def test_killed_at_any_call_it_leaves_whole_objects_or_none() -> None:
    world = fresh(0)
    before = world.process.calls
    put_all(world)
    calls = world.process.calls - before
    assert calls > 60
    for call in range(1, calls + 1):
        world = fresh(call)
        world.kill_at(call)
        with pytest.raises(ProcessKilled):
            put_all(world)
        after = world.sibling()
        with opened(after) as store:
            there = whole_or_nothing(store, {Miss.ABSENT})
            assert store.exists(store.keys(range(4 * COUNT))) == there
            assert all(store.put(store.keys(range(4 * COUNT)), CONTENT).result())
            assert all(whole_or_nothing(store, set()))
            after.clock.block(1200)
            store.sweep()
            staged = after.disk.listdir("/pool/kv/.staging")
            assert len(staged) == 1  # ours
        assert after.disk.listdir("/pool/kv/.staging") == []
        assert after.disk.open_paths() == []


@pytest.mark.parametrize(
    "fault",
    ["read_error", "write_error", "name_error", "no_space", "short_read", "short_write", "slow_disk", "bit_rot"],
)
def test_a_disk_that_does_its_worst(fault: str) -> None:
    struck = 0
    outcomes: Counter[bool] = Counter()
    for seed in range(15):
        world = fresh(seed)
        store = opened(world)
        setattr(world.faults, fault, 0.15)
        for _ in range(4):
            store.put(store.keys(range(4 * COUNT)), CONTENT).result()
            allowed = {Miss.ABSENT, Miss.DAMAGED, Miss.IO, Miss.DEADLINE, Miss.FOREIGN, Miss.NEWER}
            outcomes.update(whole_or_nothing(store, allowed))
        struck += world.faults.fired[fault]
        world.faults.stop()
        if fault != "bit_rot":
            assert all(store.put(store.keys(range(4 * COUNT)), CONTENT).result())
            assert all(whole_or_nothing(store, set()))
        assert store.stats().in_flight == store.stats().slabs_in_use == 0
        store.close()
        assert world.disk.open_paths() == []
    assert struck > 5
    assert outcomes[True]


def test_opening_on_a_disk_that_fails_is_one_sentence_or_works() -> None:
    for call in ("mkdir", "open", "stat", "pwritev", "preadv", "utime_now", "unlink", "listdir"):
        for skip in range(4):
            world = fresh(1)
            world.faults.plan(call, 5, skip=skip)
            try:
                store = opened(world)
            except CurvfsError as error:
                assert "Input/output error" in str(error) or "EIO" in str(error)
            else:
                world.faults.stop()
                assert all(store.put(store.keys(range(4 * COUNT)), CONTENT).result())
                assert all(whole_or_nothing(store, set()))
                store.close()
            assert world.disk.open_paths() == []


def test_only_the_stores_own_times_decide_who_is_dead() -> None:
    world = fresh(3)
    living = opened(world)
    living.put(living.keys(range(8)), CONTENT[:2]).result()
    other = world.sibling()
    other.clock.step(7 * 24 * 3600)  # this machine's wall clock went wrong after the first came up
    world.clock.block(30)
    with opened(other) as sweeper:
        # On a local disk the store's clock is the machine's: the first looks old, and must come back from that.
        sweeper.sweep()
    assert all(living.put(living.keys(range(4 * COUNT)), CONTENT).result())
    assert all(whole_or_nothing(living, set()))
    living.close()


def test_a_run_is_its_seeds() -> None:
    def trace(seed: int) -> str:
        world = fresh(seed)
        world.faults.write_error = world.faults.name_error = 0.1
        try:
            put_all(world)
        except CurvfsError:
            pass
        return world.trace.digest

    assert trace(5) == trace(5)
    assert trace(5) != trace(6)


def test_rot_on_the_medium_is_seen() -> None:
    def play(world: SimWorld, spoil: Callable[[str], object]) -> list[bool]:
        put_all(world)
        with opened(world) as store:
            spoil(f"/pool/kv/{store.object_name(store.keys(range(4))[0])}")
            return whole_or_nothing(store, {Miss.DAMAGED, Miss.NEWER, Miss.FOREIGN})

    for seed in range(60):
        world = fresh(seed)
        assert play(world, world.disk.rot) == [False, True, True, True]


def test_the_trash_is_kept_as_long_as_somebody_may_have_been_promised_it() -> None:
    world = fresh(4)
    with opened(world) as store:
        keys = store.keys(range(4 * COUNT))
        store.put(keys, CONTENT).result()
        hit = store.lookup(keys)
        other = world.sibling()
        evictor = opened(other)
        assert evictor.evict(keys) == [True] * COUNT
        for _ in range(6):
            evictor.sweep()
            got = empty(PAGE, COUNT)
            assert all(store.get(keys, got, lookup=hit).result())
            assert got == CONTENT
            other.clock.block(10)
        other.clock.block(70)
        evictor.sweep()
        assert store.get(keys, empty(PAGE, COUNT), lookup=hit).result() == [Miss.ABSENT] * COUNT
        assert world.disk.listdir("/pool/kv/.trash") == []
        evictor.close()


def test_killed_while_evicting_it_leaves_whole_objects_or_none() -> None:
    def play(world: SimWorld) -> None:
        with opened(world) as store:
            store.evict(store.keys(range(4 * COUNT)))
            world.clock.block(200)
            store.sweep()

    calls = 0
    for call in range(1, 200):
        world = fresh(call)
        put_all(world)
        evictor = world.sibling()
        evictor.kill_at(call)
        try:
            play(evictor)
        except ProcessKilled:
            calls += 1
        else:
            break
        with opened(world.sibling()) as store:
            there = whole_or_nothing(store, {Miss.ABSENT})
            assert store.exists(store.keys(range(4 * COUNT))) == there
            assert all(store.put(store.keys(range(4 * COUNT)), CONTENT).result())
    assert calls > 40
