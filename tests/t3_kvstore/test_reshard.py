"""Pages written under one tensor-parallel split, read under another."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import pytest

from curvfs.errors import ConfigError, EnvironmentError_
from curvfs.ring import Ring
from curvfs.world import RealDisk, World
from kvstore import Geometry, KVStore, Miss, PageKey
from tests.t3_kvstore.places import Directory, Place, empty, pages, untouched

TOKENS = 16


def geometry(kind: str, **split: Any) -> Geometry:
    model: dict[str, Any] = {"layers": 3, "kv_heads": 8, "head_dim": 64, "dtype": "float16", "page_tokens": TOKENS}
    if kind in ("hnd", "nhd"):
        return Geometry.attention(**model, order=kind, **split)
    if kind.startswith("scales"):
        return Geometry.attention(**(model | {"dtype": "int8"}), order=kind[-3:], scales="token", **split)
    return Geometry.packed(kind, **model, **split)


def part(whole: Geometry, page: bytearray, rank: Geometry) -> bytes:
    """What a rank's page must be, cut out of the whole model's by the definition of its layout."""
    cut, at = [], 0
    for theirs, ours in zip(whole.tensors, rank.tensors, strict=True):
        size = theirs.dtype.size_bytes
        heads, first = ours.shape[ours.head_axis], rank.shard.tp_rank * ours.shape[ours.head_axis]
        strides = [size]
        for length in reversed(theirs.shape[1:]):
            strides.insert(0, strides[0] * length)
        for place in itertools.product(*(range(length) for length in ours.shape)):
            there = [index + (first if axis == ours.head_axis else 0) for axis, index in enumerate(place)]
            start = at + sum(index * stride for index, stride in zip(there, strides, strict=True))
            cut.append(page[start : start + size])
        assert heads * rank.shard.tp_size == theirs.shape[theirs.head_axis] * whole.shard.tp_size
        at += theirs.size_bytes
    return b"".join(cut)


KINDS = ["hnd", "nhd", "klthd", "ktlhd", "lkthd", "lkhtd", "scales-hnd", "scales-nhd"]


def stored(store: KVStore, content: Sequence[Any]) -> list[PageKey]:
    keys = store.keys(list(range(TOKENS * len(content))))
    assert all(store.put(keys, content).result())
    return keys


@pytest.mark.parametrize("kind", KINDS)
def test_one_rank_to_two_and_back(directory: Directory, kind: str) -> None:
    whole = geometry(kind)
    content = pages(whole, 3)
    keys = stored(directory.open(whole), content)
    parts: list[list[bytearray]] = []
    for number in range(2):
        rank = geometry(kind, tp_rank=number, tp_size=2)
        wanted = [part(whole, page, rank) for page in content]
        store = directory.open(rank, reshard_from=[1, 4])
        hit = store.lookup(keys)
        assert hit.pages == 3
        for lookup in (hit, None):
            got = empty(rank, 3)
            assert store.get(keys, got, lookup=lookup).result() == [rank.size_bytes] * 3
            assert got == wanted
        assert store.stats().resharded == 6
        assert directory.open(rank).lookup(keys).pages == 0
        parts.append([bytearray(page) for page in wanted])
        other = directory.open(rank, revision="r2")
        other_keys = stored(other, parts[number])
    back = directory.open(whole, revision="r2", reshard_from=[2])
    assert back.lookup(other_keys).pages == 3
    got = empty(whole, 3)
    assert back.get(other_keys, got).result() == [whole.size_bytes] * 3
    assert got == content


def test_splits_that_do_not_nest(place: Place) -> None:
    whole = geometry("hnd", tp_size=1)
    content = pages(whole, 2)
    for number in range(4):
        rank = geometry("hnd", tp_rank=number, tp_size=4)
        keys = stored(place.open(rank), [bytearray(part(whole, page, rank)) for page in content])
    for number in range(2):
        rank = geometry("hnd", tp_rank=number, tp_size=2)
        store, got = place.open(rank, reshard_from=[8, 4]), empty(rank, 2)
        assert store.lookup(keys, every_shard=True).pages == 2
        assert store.get(keys, got, lookup=store.lookup(keys)).result() == [rank.size_bytes] * 2
        assert got == [part(whole, page, rank) for page in content]


def test_a_missing_part_is_a_missing_page(place: Place) -> None:
    halves = [geometry("hnd", tp_rank=number, tp_size=2) for number in range(2)]
    stores = [place.open(half) for half in halves]
    for store in stores:
        keys = stored(store, pages(store.geometry, 4))
    assert stores[1].delete(keys[2:3]) == [True]
    whole = place.open(geometry("hnd"), reshard_from=[2])
    assert whole.lookup(keys).pages == 2
    got = empty(whole.geometry, 4)
    results = whole.get(keys, got).result()
    assert results == [whole.geometry.size_bytes] * 2 + [Miss.ABSENT, whole.geometry.size_bytes]
    assert untouched([got[2]])
    # For those who keep one half only, the other's hole does not matter unless they ask for every shard.
    quarter = place.open(geometry("hnd", tp_rank=0, tp_size=4), reshard_from=[2])
    assert quarter.lookup(keys).pages == 4
    assert quarter.lookup(keys, every_shard=True).pages == 2


def test_damage_of_another_shards_object_is_a_miss_and_quarantined(place: Place) -> None:
    whole = place.open(geometry("hnd"))
    keys = stored(whole, pages(whole.geometry, 2))
    file = place.block_file(whole, keys[1])
    data = file.read_bytes()
    at = len(data) - 5
    file.write_bytes(data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :])
    second = place.open(geometry("hnd", tp_rank=1, tp_size=2), reshard_from=[1])
    hit = second.lookup(keys)
    got = empty(second.geometry, 2)
    assert second.get(keys, got, lookup=hit).result() == [second.geometry.size_bytes, Miss.DAMAGED]
    assert untouched([got[1]])
    assert second.stats().quarantined == 1
    assert second.lookup(keys).pages == 1
    assert whole.exists(keys) == [True, False]


class CountingDisk(RealDisk):
    bytes_read = 0

    def preadv(self, fd: int, buffers: Sequence[Any], offset_bytes: int, flags: int = 0) -> int:
        count = super().preadv(fd, buffers, offset_bytes, flags)
        self.bytes_read += count
        return count

    def ring(self, entries: int) -> Ring:
        raise EnvironmentError_("counted by plain calls")


def test_a_rank_reads_its_own_units_only(directory: Directory) -> None:
    model: dict[str, Any] = {"layers": 2, "kv_heads": 8, "head_dim": 128, "dtype": "float16", "page_tokens": 512}
    whole = directory.open(Geometry.attention(**model, unit_heads=1))
    keys = stored_long(whole, 512)
    disk = CountingDisk()
    quarter = Geometry.attention(**model, tp_rank=2, tp_size=4)
    store = directory.open(quarter, reshard_from=[1], world=World(disk=disk))
    before = disk.bytes_read
    assert store.get(keys, empty(quarter, 1)).result() == [quarter.size_bytes]
    assert quarter.size_bytes <= disk.bytes_read - before <= quarter.size_bytes + 16384


def stored_long(store: KVStore, tokens: int) -> list[PageKey]:
    keys = store.keys(list(range(tokens)))
    assert all(store.put(keys, pages(store.geometry, 1)).result())
    return keys


def test_views_layers_and_loans_of_resharded_pages(directory: Directory) -> None:
    whole = geometry("hnd")
    content = pages(whole, 2)
    keys = stored(directory.open(whole), content)
    rank = geometry("hnd", tp_rank=1, tp_size=2)
    wanted = [part(whole, page, rank) for page in content]
    store = directory.open(rank, reshard_from=[1])
    transfer = store.get_view(keys)
    assert all(transfer.result())
    for view, page in zip(transfer.views, wanted, strict=True):
        assert view is not None
        with view:
            assert b"".join(view[name] for name in view.names()) == page
    for form in ({"layerwise": True}, {"loan": True}):
        got = empty(rank, 2)
        transfer = store.get(keys, got, **form)
        assert all(transfer.result())
        assert got == wanted
    assert store.stats().in_flight == store.stats().slabs_in_use == store.stats().views_out == 0


def test_sizes_that_cannot_be_are_said(directory: Directory) -> None:
    for sizes in ([3], [0]):
        with pytest.raises(ConfigError):
            directory.open(geometry("hnd"), reshard_from=sizes)
    latent = Geometry.mla(layers=2, latent_dim=64, dtype="bfloat16", page_tokens=16)
    store = directory.open(latent, reshard_from=[1, 2])
    keys = stored(store, pages(latent, 1))
    assert store.lookup(keys).pages == 1
