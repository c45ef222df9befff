"""What staging of tensors on a device must do, whatever the device: run with a stand-in, and on a GPU."""

from __future__ import annotations

import abc
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from kvstore import Geometry, KVStore, PageKey

PAGE = Geometry.attention(layers=3, kv_heads=4, head_dim=64, dtype="float16", page_tokens=16)
SHAPE = (4, 16, 64)
TENSORS = 6


class Harness(abc.ABC):
    """A device, and a stream of work on it that the calling thread hands out."""

    @abc.abstractmethod
    def upload(self, tensor: Any) -> Any:
        """A copy of a tensor in the device's memory."""

    @abc.abstractmethod
    def later(self, work: Callable[[], None]) -> Callable[[], bool]:
        """Let the device do ``work`` after it was busy for a while; tells whether it is done."""

    @abc.abstractmethod
    def open(self, geometry: Geometry, **settings: Any) -> KVStore: ...


def bits(seed: int, shape: Sequence[int] = SHAPE, dtype: Any = torch.float16) -> Any:
    """A tensor in host memory of any bit patterns."""
    generator = torch.Generator().manual_seed(seed)
    size = dtype.itemsize
    count = size
    for length in shape:
        count *= length
    return torch.randint(0, 256, (count,), dtype=torch.uint8, generator=generator).view(dtype).view(*shape)


def same(one: Any, other: Any) -> bool:
    return bool(torch.equal(one.cpu().contiguous().view(torch.uint8), other.cpu().contiguous().view(torch.uint8)))


def same_page(page: Sequence[Any], other: Sequence[Any]) -> bool:
    return len(page) == len(other) and all(map(same, page, other))


def page_of(seed: int) -> list[Any]:
    return [bits(seed * 100 + number) for number in range(TENSORS)]


def stored(store: KVStore, harness: Harness, count: int) -> tuple[list[PageKey], list[list[Any]]]:
    keys, content = store.keys(list(range(16 * count))), [page_of(seed) for seed in range(count)]
    uploaded = [[harness.upload(one) for one in page] for page in content]
    assert store.put(keys, uploaded).result() == [PAGE.size_bytes] * count
    return keys, content


def room(harness: Harness, count: int) -> list[list[Any]]:
    return [[harness.upload(torch.full(SHAPE, 7.0, dtype=torch.float16)) for _ in range(TENSORS)] for _ in range(count)]


def is_untouched(page: Sequence[Any]) -> bool:
    return all(bool((one.cpu() == 7.0).all()) for one in page)


class DeviceContract:
    @pytest.fixture
    def harness(self) -> Harness:
        raise NotImplementedError

    @pytest.mark.parametrize("form", [{}, {"layerwise": True}, {"loan": True}], ids=["copied", "layerwise", "loan"])
    def test_pages_go_there_and_come_back(self, harness: Harness, form: dict[str, bool]) -> None:
        store = harness.open(PAGE, depth=3)
        keys, content = stored(store, harness, 20)
        got = room(harness, 20)
        transfer = store.get(keys, got, **form)
        assert transfer.result() == [PAGE.size_bytes] * 20
        assert all(map(same_page, got, content))
        on_host = [[torch.empty(SHAPE, dtype=torch.float16) for _ in range(TENSORS)] for _ in keys]
        assert all(store.get(keys, on_host).result())
        assert all(map(same, on_host[11], content[11]))
        assert store.stats().loans_copied == (20 if "loan" in form else 0)
        assert store.stats().in_flight == store.stats().slabs_in_use == 0

    @pytest.mark.parametrize("name", ["float16", "bfloat16", "float8_e4m3fn", "int8", "float32"])
    def test_strided_tensors_of_many_dtypes(self, harness: Harness, name: str) -> None:
        dtype = getattr(torch, name)
        page = Geometry.of({"a": (name, (6, 10)), "b": (name, (8, 3, 5))}, page_tokens=16)
        store = harness.open(page)
        key = store.keys(list(range(16)))
        first, second = bits(1, (6, 10), dtype), bits(2, (8, 3, 5), dtype)
        wide, turned = harness.upload(bits(3, (6, 20), dtype)), harness.upload(bits(4, (5, 3, 8), dtype))
        wide[:, ::2].copy_(harness.upload(first))
        turned.permute(2, 1, 0).copy_(harness.upload(second))
        assert all(store.put(key, [[wide[:, ::2], turned.permute(2, 1, 0)]]).result())
        between = wide.cpu()[:, 1::2].clone()
        wide[:, ::2].zero_()
        turned.zero_()
        assert all(store.get(key, [[wide[:, ::2], turned.permute(2, 1, 0)]]).result())
        assert same(wide[:, ::2], first)
        assert same(turned.permute(2, 1, 0), second)
        assert same(wide[:, 1::2], between)

    def test_what_the_stream_has_yet_to_compute_is_stored(self, harness: Harness) -> None:
        store = harness.open(PAGE)
        keys, content = store.keys(list(range(64))), [page_of(seed) for seed in range(4)]
        uploaded = [[harness.upload(one) for one in page] for page in content]
        source = room(harness, 4)

        def compute() -> None:
            for page, wanted in zip(source, uploaded, strict=True):
                for one, other in zip(page, wanted, strict=True):
                    one.copy_(other)

        done = harness.later(compute)
        transfer = store.put(keys, source)
        assert not done()  # the caller was not held up
        assert transfer.result() == [PAGE.size_bytes] * 4
        got = [[torch.empty(SHAPE, dtype=torch.float16) for _ in range(TENSORS)] for _ in keys]
        assert all(store.get(keys, got).result())
        assert all(map(same_page, got, content))

    def test_memory_that_the_stream_still_reads_is_not_overwritten(self, harness: Harness) -> None:
        store = harness.open(PAGE)
        keys, content = stored(store, harness, 2)
        got, kept = room(harness, 2), room(harness, 1)[0]
        for one in kept:
            one.zero_()

        def read() -> None:
            for one, other in zip(kept, got[1], strict=True):
                one.copy_(other)

        done = harness.later(read)
        transfer = store.get(keys, got)
        assert not done()
        assert transfer.result() == [PAGE.size_bytes] * 2
        assert done()
        assert is_untouched(kept)
        assert all(map(same, got[1], content[1]))

    def test_misses_leave_the_memory_of_the_device_untouched(self, harness: Harness) -> None:
        store = harness.open(PAGE)
        keys, _ = stored(store, harness, 3)
        store.delete(keys[1:2])
        got = room(harness, 3)
        assert [bool(result) for result in store.get(keys, got).result()] == [True, False, True]
        assert is_untouched(got[1])

    def test_a_page_half_in_host_memory(self, harness: Harness) -> None:
        store = harness.open(PAGE)
        key, content = store.keys(list(range(16))), page_of(1)
        mixed = [harness.upload(one) if number % 2 else one.clone() for number, one in enumerate(content)]
        assert all(store.put(key, [mixed]).result())
        for one in mixed:
            one.zero_()
        assert all(store.get(key, [mixed]).result())
        assert all(map(same, mixed, content))
