"""Staging of CUDA tensors, on a real device: the contract that the stand-in keeps, and what only a GPU shows."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import kvstore
from curvfs.errors import UsageError
from kvstore import Geometry, Identity, KVStore
from kvstore.devices import CudaDevices
from tests.device_contract import PAGE, SHAPE, TENSORS, DeviceContract, Harness, page_of, room, same_page, stored

#: Cycles that keep any GPU of these years busy for a tenth of a second or more.
BUSY_CYCLES = 400_000_000


class Cuda(Harness):
    def __init__(self, root: Path) -> None:
        self._url = root.as_uri()
        self.stores: list[KVStore] = []

    def upload(self, tensor: Any) -> Any:
        copy = tensor.to("cuda:0")
        torch.cuda.synchronize()
        return copy

    def later(self, work: Callable[[], None]) -> Callable[[], bool]:
        torch.cuda._sleep(BUSY_CYCLES)
        work()
        event = torch.cuda.Event()
        event.record()
        done: Callable[[], bool] = event.query
        return done

    def open(self, geometry: Geometry, **settings: Any) -> KVStore:
        whose = Identity.of(geometry, model="m", revision="r")
        store = kvstore.open(self._url, whose, geometry=geometry, **settings)
        self.stores.append(store)
        return store


@pytest.fixture
def cuda(tmp_path: Path) -> Iterator[Cuda]:
    harness = Cuda(tmp_path)
    yield harness
    for store in harness.stores:
        store.close()


class TestCuda(DeviceContract):
    @pytest.fixture
    def harness(self, cuda: Cuda) -> Harness:
        return cuda


def test_slabs_are_page_locked(cuda: Cuda) -> None:
    store = cuda.open(PAGE)
    stored(store, cuda, 4)
    slabs = store._pages.slabs._free
    assert slabs
    assert all(slab.pinned for slab in slabs)
    assert all(torch.frombuffer(slab.view, dtype=torch.uint8).is_pinned() for slab in slabs)


def test_page_locked_tensors_of_the_caller(cuda: Cuda) -> None:
    store = cuda.open(PAGE)
    key, content = store.keys(list(range(16))), page_of(5)
    assert all(store.put(key, [[one.pin_memory() for one in content]]).result())
    got = [torch.zeros(SHAPE, dtype=torch.float16).pin_memory() for _ in range(TENSORS)]
    assert all(store.get(key, [got]).result())
    assert same_page(got, content)


def test_a_stream_of_the_callers_own(cuda: Cuda) -> None:
    store = cuda.open(PAGE)
    key, content = store.keys(list(range(16))), [cuda.upload(one) for one in page_of(6)]
    source = room(cuda, 1)[0]
    with torch.cuda.stream(torch.cuda.Stream()):
        torch.cuda._sleep(BUSY_CYCLES)
        for one, other in zip(source, content, strict=True):
            one.copy_(other)
        storing = store.put(key, [source])
    assert all(storing.result())
    got = room(cuda, 1)
    assert all(store.get(key, got).result())
    assert same_page(got[0], content)


def test_calls_do_not_hold_the_stream_up(cuda: Cuda) -> None:
    """A kernel that follows a get on the caller's stream runs before the get is done."""
    large = Geometry.raw(64 << 20, page_tokens=16)
    store = cuda.open(large, depth=1)
    keys = store.keys(list(range(16 * 8)))
    source = [[torch.full((64 << 20,), number, dtype=torch.uint8, device="cuda:0")] for number in range(8)]
    assert all(store.put(keys, source).result())
    target = [[torch.zeros(64 << 20, dtype=torch.uint8, device="cuda:0")] for _ in keys]
    torch.cuda.synchronize()
    loading = store.get(keys, target)
    torch.ones(1, device="cuda:0").sum().item()  # waits for the caller's stream
    assert not loading.done()
    assert all(loading.result())
    assert all(bool((one[0] == number).all()) for number, one in enumerate(target))


def test_a_second_gpu_is_refused_within_a_page(cuda: Cuda) -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("one GPU only")
    store = cuda.open(PAGE)
    page = [one.to(f"cuda:{number % 2}") for number, one in enumerate(page_of(1))]
    with pytest.raises(UsageError, match="cuda:1"):
        store.put(store.keys(list(range(16))), [page])


def test_speed_is_shown(cuda: Cuda, capsys: pytest.CaptureFixture[str]) -> None:
    size = 14 << 20
    store = cuda.open(Geometry.raw(size, page_tokens=16), depth=8)
    keys = store.keys(list(range(16 * 64)))
    pages = [[torch.randint(0, 256, (size,), dtype=torch.uint8, device="cuda:0")] for _ in keys]
    assert CudaDevices(store._world).of(pages[0][0]) is not None
    begun = time.monotonic()
    assert all(store.put(keys, pages).result())
    stored_s = time.monotonic() - begun
    got = [[torch.zeros_like(page[0])] for page in pages]
    begun = time.monotonic()
    assert all(store.get(keys, got).result())
    loaded_s = time.monotonic() - begun
    assert all(torch.equal(one[0], page[0]) for one, page in zip(got, pages, strict=True))
    gib = size * len(keys) / (1 << 30)
    with capsys.disabled():
        print(f"\nput {gib / stored_s:.2f} GiB/s, get {gib / loaded_s:.2f} GiB/s of CUDA tensors, 64 pages of 14 MiB")
