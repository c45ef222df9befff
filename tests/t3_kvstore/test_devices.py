"""Tensors on a device, staged by the very code that stages those of a GPU: here the device is made of threads, whose
copies end late, in any order, or not at all."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from curvfs.errors import CurvfsError, UsageError  # noqa: E402
from kvstore import Geometry, KVStore, Miss  # noqa: E402
from kvstore.devices import CudaDevices, Device, Devices, Event  # noqa: E402
from kvstore.engine.threads import SPARE  # noqa: E402
from kvstore.slabs import Slab  # noqa: E402
from tests.device_contract import PAGE, DeviceContract, Harness, is_untouched, page_of, room, same, stored  # noqa: E402
from tests.t3_kvstore.places import Directory, Place  # noqa: E402
from tests.t3_kvstore.test_faults import until  # noqa: E402


class Flag(Event):
    def __init__(self) -> None:
        self.set = False
        self.error: CurvfsError | None = None

    def reached(self) -> bool:
        if self.error is not None:
            raise self.error
        return self.set


class StandIn(Device):
    """Copies run in threads of their own, each after a time of its own, unless ``stuck``; ``fail`` makes them fail."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.stream = [Flag()]
        self.stream[0].set = True
        self.slabs: set[int] = set()
        self.gate = threading.Event()
        self.gate.set()
        self.begun = threading.Semaphore(0)
        self.fail: Callable[[int], bool] = lambda number: False
        self.refuse = False
        self.copies = 0
        self._random = random.Random(3)

    def mark(self) -> Event:
        return self.stream[-1]

    def pin(self, slab: Slab) -> None:
        slab.pinned = True
        self.slabs.add(slab.address)

    def copy(self, pairs: Sequence[tuple[Any, Any]], *, to_host: bool) -> Event:
        if self.refuse:
            raise CurvfsError(f"{self.name} failed: no copy today.")
        self.copies += 1
        event, failing, pause_s = Flag(), self.fail(self.copies), self._random.random() * 0.01

        def run() -> None:
            assert self.gate.wait(30)
            time.sleep(pause_s)
            for target, source in pairs:
                target.copy_(source)
            if failing:
                event.error = CurvfsError(f"{self.name} failed: an illegal memory access. Restart this process.")
            event.set = True

        self.begun.release()
        threading.Thread(target=run, daemon=True).start()
        return event

    def later(self, work: Callable[[], None], *, after: threading.Event | None = None) -> Flag:
        event, before = Flag(), self.stream[-1]

        def run() -> None:
            assert after is None or after.wait(30)
            until(before.reached)
            time.sleep(0.1)
            work()
            event.set = True

        self.stream.append(event)
        threading.Thread(target=run, daemon=True).start()
        return event


class StandIns(Devices, Harness):
    """Two devices; a tensor lies on one when its memory was given out by it."""

    def __init__(self, place: Place) -> None:
        self._place = place
        self.first, self.second = StandIn("standin:0"), StandIn("standin:1")
        self._owners: dict[int, StandIn] = {}
        self._kept: list[Any] = []

    def of(self, tensor: Any) -> Device | None:
        return self._owners.get(tensor.untyped_storage().data_ptr())

    def upload(self, tensor: Any, device: StandIn | None = None) -> Any:
        copy = tensor.clone()
        self._kept.append(copy)
        self._owners[copy.untyped_storage().data_ptr()] = device or self.first
        return copy

    def later(self, work: Callable[[], None]) -> Callable[[], bool]:
        return self.first.later(work).reached

    def open(self, geometry: Geometry, **settings: Any) -> KVStore:
        return self._place.open(geometry, devices=self, **settings)


@pytest.fixture
def devices(directory: Directory) -> Iterator[StandIns]:
    made = StandIns(directory)
    yield made
    made.first.gate.set()


class TestStandIn(DeviceContract):
    @pytest.fixture
    def harness(self, devices: StandIns) -> Harness:
        return devices


def test_on_every_back_end(place: Place) -> None:
    devices = StandIns(place)
    store = devices.open(PAGE)
    keys, content = stored(store, devices, 40)
    got = room(devices, 40)
    assert all(store.get(keys, got, lookup=store.lookup(keys)).result())
    assert all(map(same, got[39], content[39]))
    assert 1 <= len(devices.first.slabs) <= 2 * store.stats().depth + SPARE  # puts have slabs of their own


def test_a_slab_is_not_used_again_before_its_copy_is_over(devices: StandIns) -> None:
    store = devices.open(PAGE, depth=2)
    keys, content = stored(store, devices, 6)
    first, second = room(devices, 2), room(devices, 2)
    devices.first.gate.clear()
    held = store.get(keys[:2], first)
    assert devices.first.begun.acquire(timeout=10)
    until(lambda: devices.first.copies == 8)
    other = store.get(keys[2:4], second)
    time.sleep(0.1)
    assert store.stats().slabs_in_use == 2
    assert not held.done()
    assert is_untouched(second[0])
    devices.first.gate.set()
    assert all(held.result())
    assert all(other.result())
    for got, wanted in zip(first + second, content, strict=False):
        assert all(map(same, got, wanted))


def test_a_copy_under_way_at_the_deadline_is_waited_for(devices: StandIns) -> None:
    store = devices.open(PAGE)
    keys, _ = stored(store, devices, 1)
    got = room(devices, 1)
    while devices.first.begun.acquire(blocking=False):
        pass
    devices.first.gate.clear()
    transfer = store.get(keys, got, timeout_s=0.3)
    assert devices.first.begun.acquire(timeout=10)
    threading.Timer(0.6, devices.first.gate.set).start()
    assert transfer.result() in ([PAGE.size_bytes], [Miss.DEADLINE])
    before = [one.clone() for one in got[0]]
    time.sleep(0.1)
    assert all(map(same, got[0], before))  # nobody touches it any more


def test_failed_copies_are_misses_and_their_slabs_are_not_used_again(devices: StandIns) -> None:
    store = devices.open(PAGE, depth=1)
    keys, content = stored(store, devices, 4)
    devices.first.fail = lambda number: number == 6
    got = room(devices, 4)
    transfer = store.get(keys, got)
    results = transfer.result()
    assert results.count(Miss.IO) == 1
    failed = results.index(Miss.IO)
    assert "illegal memory access" in str(transfer.error(failed))
    assert all(map(same, got[3 - failed], content[3 - failed]))
    until(lambda: store.stats().in_flight == 0)
    assert store.stats().slabs_in_use == 0
    slabs = store._pages.slabs
    assert len(slabs._lost) == 1
    assert slabs._lost[0] not in slabs._free
    devices.first.fail = lambda number: True
    fresh = store.keys(list(range(1000, 1064)))
    assert store.put(fresh, room(devices, 4)).result() == [Miss.IO] * 4
    assert store.exists(fresh) == [False] * 4
    devices.first.fail = lambda number: False
    devices.first.refuse = True
    assert store.put(fresh, room(devices, 4)).result() == [Miss.IO] * 4
    devices.first.refuse = False
    assert all(store.put(fresh, room(devices, 4)).result())
    assert all(store.get(keys, got).result())
    assert all(map(same, got[failed], content[failed]))


def test_a_copy_that_never_ends_is_given_up(devices: StandIns, monkeypatch: pytest.MonkeyPatch) -> None:
    store = devices.open(PAGE)
    keys, _ = stored(store, devices, 1)
    monkeypatch.setattr("kvstore.devices._COPY_LIMIT_S", 0.2)
    devices.first.gate.clear()
    transfer = store.get(keys, room(devices, 1))
    assert transfer.result() == [Miss.DEADLINE]
    assert "did not end a copy" in str(transfer.error(0))
    assert len(store._pages.slabs._lost) == 1


def test_a_stream_that_is_busy_for_too_long_is_a_deadline(devices: StandIns) -> None:
    store = devices.open(PAGE, depth=2)
    keys, content = stored(store, devices, 2)
    go, got = threading.Event(), room(devices, 2)
    done = devices.first.later(lambda: None, after=go)
    fresh = store.keys(list(range(1000, 1032)))
    storing = store.put(fresh, room(devices, 2), timeout_s=0.3)
    loading = store.get(keys, got, timeout_s=0.3)
    assert storing.result() == loading.result() == [Miss.DEADLINE] * 2
    until(lambda: store.stats().in_flight == 0)
    go.set()
    until(done.reached)
    assert all(map(is_untouched, got))
    assert store.exists(fresh) == [False] * 2
    assert all(store.get(keys, got).result())
    assert all(map(same, got[1], content[1]))


def test_pages_that_are_still_computed_hold_nobody_up(devices: StandIns) -> None:
    store = devices.open(PAGE, depth=2)
    keys, _ = stored(store, devices, 4)
    go = threading.Event()
    devices.first.later(lambda: None, after=go)
    storing = store.put(store.keys(list(range(1000, 1000 + 16 * 12))), room(devices, 12))
    on_host = [[torch.empty(4, 16, 64, dtype=torch.float16) for _ in range(6)] for _ in range(4)]
    assert all(store.get(keys, on_host, timeout_s=10).result())
    assert not storing.done()
    go.set()
    assert all(storing.result())


def test_closing_while_the_device_computes(devices: StandIns) -> None:
    store = devices.open(PAGE, depth=2)
    go = threading.Event()
    devices.first.later(lambda: None, after=go)
    storing = store.put(store.keys(list(range(64))), room(devices, 4))
    begun = time.monotonic()
    assert store.close(timeout_s=5)
    assert time.monotonic() - begun < 5
    assert storing.result() == [Miss.CANCELLED] * 4
    go.set()


def test_wrong_devices_are_refused_before_a_byte_moves(devices: StandIns, directory: Directory) -> None:
    store = devices.open(PAGE)
    key, page = store.keys(list(range(16))), page_of(1)
    mixed = [devices.upload(one, devices.second if number == 3 else None) for number, one in enumerate(page)]
    with pytest.raises(UsageError, match=r"standin:0 and on standin:1"):
        store.put(key, [mixed])
    with pytest.raises(UsageError, match="strided one"):
        store.get(key, [[one.to("meta") for one in page]])
    assert devices.first.copies == devices.second.copies == 0

    class Elsewhere:
        class device:
            type, index = "xpu", 0

            def __str__(self) -> str:
                return "xpu:0"

        device = device()  # type: ignore[assignment]

    with pytest.raises(UsageError, match="xpu:0"):
        CudaDevices(store._world).of(Elsewhere())
    assert CudaDevices(store._world).of(page[0]) is None
    assert directory.objects() == []


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
def test_without_a_gpu_its_tests_say_so_and_fail(capsys: pytest.CaptureFixture[str]) -> None:
    from tests.gpu.__main__ import main

    assert main() == 1
    said = capsys.readouterr().err
    assert said.startswith("There is no GPU to test with here")
    assert said.count("\n") == 1
