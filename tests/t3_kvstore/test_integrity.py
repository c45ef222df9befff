"""Wrong bytes, wherever they are and however they are asked for; and objects that a later version wrote."""

from __future__ import annotations

import json
import random
import struct
from collections.abc import Callable
from typing import Any

import pytest

from curvfs.errors import EnvironmentError_
from curvfs.ring import Ring, RingCall
from curvfs.world import RealDisk, World
from kvstore import Geometry, KVStore, Miss, PageKey
from kvstore.header import ObjectLayout, read_header
from tests.t3_kvstore.places import Directory, Namespace, Place, empty, pages, untouched
from tests.t3_kvstore.test_faults import BrokenRing, each_engine, needs_ring

#: Different tensors, each with padding behind it.
PAGE = Geometry.of(
    {"layer.0.a": ("float16", (3000,)), "layer.1.b": ("float16", (7000,)), "layer.1.c": ("uint8", (5,))},
    page_tokens=4,
)
#: Without padding, so that loans are read straight into the caller's memory.
WHOLE = Geometry.attention(layers=2, kv_heads=2, head_dim=64, dtype="float16", page_tokens=32)

FORMS: dict[str, dict[str, Any]] = {"copied": {}, "loan": {"loan": True}, "layerwise": {"layerwise": True}, "view": {}}


def positions(page: Geometry, seed: int) -> dict[str, int]:
    """A byte of every kind of place in an object, and some at random."""
    layout = ObjectLayout(page)
    start, end = layout.header_bytes, layout.object_bytes
    places = {f"length {number}": number for number in range(8)}
    places |= {"opening": 12, "first digit of the sum": 39, "last digit of the sum": 70, "metadata": 100, "key": 130}
    places |= {"spaces": start - 2, "last space": start - 1}
    at = start
    for number, length in enumerate(layout.unit_lengths):
        places |= {f"unit {number} begins": at, f"unit {number} ends": at + length - 1}
        at += length
    for spec, offset in layout.tensors:
        places |= {f"{spec.name}": start + offset, f"{spec.name} ends": start + offset + spec.size_bytes - 1}
    for number, (offset, length) in enumerate(layout.pads):
        places |= {f"padding {number}": start + offset, f"padding {number} ends": start + offset + length - 1}
    chance = random.Random(seed)
    places |= {f"random {number}": chance.randrange(end) for number in range(12)}
    places |= {f"random in the header {number}": chance.randrange(2000) for number in range(8)}
    return places


def flip(place: Place, store: KVStore, key: PageKey, at: int, bit: int) -> None:
    file = place.block_file(store, key)
    with file.open("r+b") as opened:
        opened.seek(at)
        byte = opened.read(1)[0]
        opened.seek(at)
        opened.write(bytes([byte ^ 1 << bit]))


def read(store: KVStore, keys: list[PageKey], form: str) -> tuple[list[Any], list[bytearray]]:
    got = empty(store.geometry, len(keys))
    if form != "view":
        transfer = store.get(keys, got, **FORMS[form])
        results = transfer.result()
        assert transfer.wait_returned(10)
        return results, got
    results = []
    for index, key in enumerate(keys):
        transfer = store.get_view([key])
        results += transfer.result()
        view = transfer.views[0]
        assert (view is None) == (not results[-1])
        if view is not None:
            got[index][:] = b"".join(view[name] for name in view.names())
            view.release()
    return results, got


@pytest.mark.parametrize(
    ("place", "engine"),
    [("directory", "threads"), ("curvine local", "threads"), ("curvine remote", "threads")]
    + [pytest.param(where, "uring", marks=needs_ring) for where in ("directory", "curvine local")],
    indirect=["place"],
)
@pytest.mark.parametrize(("form", "page"), [("copied", PAGE), ("loan", WHOLE), ("layerwise", PAGE), ("view", WHOLE)])
def test_a_flipped_bit_anywhere_is_a_counted_miss(place: Place, engine: str, form: str, page: Geometry) -> None:
    store = place.open(page, engine=engine)
    places = positions(page, seed=len(form) + len(engine))
    tokens = list(range(page.page_tokens * (len(places) + 2)))
    keys, content = store.keys(tokens), pages(page, 2)
    assert all(store.put(keys, [content[index % 2] for index in range(len(keys))]).result())
    for number, (key, at) in enumerate(zip(keys, places.values(), strict=False)):
        flip(place, store, key, at, number % 7)
    results, got = read(store, keys, form)
    stats = store.stats()
    assert [bool(result) for result in results] == [False] * len(places) + [True] * 2
    assert got[-2:] == [content[index % 2] for index in range(len(places), len(keys))]
    if form == "copied":
        assert untouched(got[:-2])
    assert sum(stats.get_misses.values()) == len(places)
    # Almost every one is damage; a flipped digit of the format or key can also look like somebody else's object.
    damaged = results.count(Miss.DAMAGED)
    assert damaged >= len(places) - 2
    assert set(results[: len(places)]) <= {Miss.DAMAGED, Miss.NEWER}
    assert stats.quarantined == len(place.quarantined()) == damaged
    assert store.exists(keys) == [result is not Miss.DAMAGED for result in results]
    assert (stats.read_again, stats.in_flight, stats.slabs_in_use, stats.views_out) == (0, 0, 0, 0)
    # A put repairs what was damaged.
    again = [index for index, result in enumerate(results) if result is Miss.DAMAGED]
    assert all(store.put([keys[index] for index in again], [content[index % 2] for index in again]).result())
    healed, got = read(store, [keys[index] for index in again], form)
    assert all(healed)
    assert got == [content[index % 2] for index in again]


class FlippingDisk(RealDisk):
    """A real disk that hands out one wrong byte, once, of whatever is read next after it was armed."""

    def __init__(self, engine: str) -> None:
        super().__init__()
        self.engine = engine
        self.at: int | None = None

    def ring(self, entries: int) -> Ring:
        if self.engine != "uring":
            raise EnvironmentError_("not wanted")
        return FlippingRing(super().ring(entries), self)

    def spoil(self, views: list[memoryview], offset_bytes: int) -> None:
        for view in views:
            if self.at is not None and offset_bytes <= self.at < offset_bytes + len(view):
                view[self.at - offset_bytes] ^= 0x10
                self.at = None
            offset_bytes += len(view)

    def preadv(self, fd: int, buffers: Any, offset_bytes: int, flags: int = 0) -> int:
        count = super().preadv(fd, buffers, offset_bytes, flags)
        if count >= 4096:
            self.spoil([memoryview(buffer) for buffer in buffers], offset_bytes)
        return count


class FlippingRing(BrokenRing):
    def __init__(self, ring: Ring, disk: FlippingDisk) -> None:
        super().__init__(ring, lambda call: call)
        self._disk = disk

    def run(self, calls: Any) -> list[int]:
        results = super().run(calls)
        for call in calls:
            if isinstance(call, RingCall) and not call.write:
                self._disk.spoil([call.view], call.offset_bytes)
        return results


@each_engine
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("where", ["header", "data"])
def test_what_is_sound_the_second_time_is_delivered_and_stays(
    directory: Directory, engine: str, form: str, where: str
) -> None:
    writer = directory.open(WHOLE)
    key, content = writer.keys(list(range(32))), pages(WHOLE, 1)
    assert all(writer.put(key, content).result())
    disk = FlippingDisk(engine)
    store = directory.open(WHOLE, world=World(disk=disk), engine=engine)
    disk.at = 100 if where == "header" else ObjectLayout(WHOLE).header_bytes + 5000
    results, got = read(store, key, form)
    assert disk.at is None
    assert results == [WHOLE.size_bytes]
    assert got == content
    assert (store.stats().read_again, store.stats().quarantined) == (1, 0)
    assert directory.objects() == [store.object_name(key[0])]


# ---------------------------------------------------------------------------------------------- later format versions


def of_another_hash(whole: bytes) -> bytes:
    """Its sums are made by other rules than ours."""
    return with_metadata(whole, lambda metadata: metadata | {"header_sum": "f" * 32, "unit_sums": "sha9:zzz"})


def of_other_fields(whole: bytes) -> bytes:
    """Nothing is described as we describe it."""
    keep = ("header_sum", "format", "key")
    return with_metadata(
        whole, lambda metadata: {name: metadata[name] for name in keep} | {"pieces": "a,b", "key": "another kind"}
    )


def of_other_tensors(whole: bytes) -> bytes:
    """Number formats that nobody here has heard of."""
    size = len(whole) - read_header(memoryview(whole), len(whole)).header_bytes
    table = {"planes": {"dtype": "F4_E9", "shape": [2, size], "data_offsets": [0, size]}}
    return with_metadata(whole, dict, table)


def with_metadata(whole: bytes, change: Callable[[dict[str, str]], dict[str, str]], table: Any = None) -> bytes:
    header_bytes = 8 + struct.unpack("<Q", whole[:8])[0]
    described = json.loads(whole[8:header_bytes])
    metadata = change(described.pop("__metadata__")) | {"format": "2"}
    text = json.dumps({"__metadata__": metadata} | (table or described), separators=(",", ":")).encode()
    return whole[:8] + text.ljust(header_bytes - 8) + whole[header_bytes:]


@pytest.mark.parametrize(
    ("make", "form"),
    [
        (of_another_hash, "copied"),
        (of_another_hash, "view"),
        (of_other_fields, "loan"),
        (of_other_tensors, "layerwise"),
    ],
)
def test_objects_of_a_later_version_are_left_alone(
    place: Place, make: Callable[[bytes], bytes], form: str
) -> None:
    store, fresh = place.open(WHOLE), place.open(WHOLE)
    keys, content = store.keys(list(range(32 * 4))), pages(WHOLE, 4)
    assert all(store.put(keys, content).result())
    file = place.block_file(store, keys[1])
    later = make(file.read_bytes())
    file.write_bytes(later)
    results, got = read(fresh, keys, form)
    assert results[1] is Miss.NEWER
    assert results[:1] + results[2:] == [WHOLE.size_bytes] * 3
    assert [got[index] for index in (0, 2, 3)] == [content[index] for index in (0, 2, 3)]
    assert form not in ("copied", "view") or untouched(got[1:2])
    assert fresh.stats().get_misses == {"newer": 1}
    # Once it is known, a lookup does not promise it again, and nobody loads in vain.
    assert fresh.lookup(keys).pages == 1
    # It keeps its name, its bytes and its place, whatever this version does with it.
    assert all(fresh.put(keys, content).result())
    assert fresh.stats().puts_existing == 4
    fresh.sweep()
    assert file.read_bytes() == later
    assert fresh.stats().quarantined == 0
    assert place.quarantined() == []
    assert fresh.exists(keys) == [True] * 4
    assert len(fresh.list().pages) == fresh.usage().objects == 4
    # Taken away, it makes room for one of ours.
    assert fresh.delete(keys[1:2]) == [True]
    assert all(fresh.put(keys[1:2], content[1:2]).result())
    assert fresh.lookup(keys).pages == 4
    results, got = read(fresh, keys, form)
    assert all(results)
    assert got == content


def test_an_object_of_a_later_version_and_another_length_keeps_its_name(place: Place) -> None:
    store = place.open(WHOLE)
    key, content = store.keys(list(range(32))), pages(WHOLE, 1)
    assert all(store.put(key, content).result())
    later = of_other_fields(place.block_file(store, key[0]).read_bytes()) + bytes(8192)
    if isinstance(place, Namespace):
        target = f"/kv/{store.object_name(key[0])}"
        place.fs.delete(target)
        with place.fs.create(target) as writer:
            writer.write(later)
    else:
        place.block_file(store, key[0]).write_bytes(later)
    fresh, got = place.open(WHOLE), empty(WHOLE, 1)
    assert fresh.put(key, content).result() == [WHOLE.size_bytes]  # it exists
    assert fresh.stats().puts_existing == 1
    assert fresh.get(key, got).result() == [Miss.NEWER]
    assert untouched(got)
    assert fresh.lookup(key).pages == 0
    assert fresh.exists(key) == [True]
    assert fresh.stats().quarantined == 0
    assert place.quarantined() == []
    assert len(place.objects()) == 1
