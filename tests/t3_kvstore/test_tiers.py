"""Tiers: pages in host memory above the pool, and pages that are stored later."""

from __future__ import annotations

import os
import threading
import time
from typing import Any

import pytest

import kvstore
from curvfs.errors import ConfigError
from curvfs.world import RealDisk, World
from kvstore import Geometry, Identity, KVStore, Miss
from tests.t3_kvstore.places import Directory, Place, empty, pages, payload, untouched
from tests.t3_kvstore.test_capacity import keys_of, put, there, used, wait_for

PAGE = Geometry.of({"layer.0.a": ("float16", (3000,)), "layer.1.b": ("uint8", (9001,))}, page_tokens=4)
FRAME_BYTES = 20480
COUNT = 6


def test_what_holds_no_page_is_refused(directory: Directory) -> None:
    for settings in ({"memory_bytes": 5000}, {"write_behind_bytes": 5000}, {"memory_bytes": -1}):
        with pytest.raises(ConfigError, match=r"memory|write-behind"):
            directory.open(PAGE, **settings)


def test_pages_that_were_stored_are_delivered_from_memory(place: Place) -> None:
    store = place.open(PAGE, memory_bytes=COUNT * FRAME_BYTES)
    assert all(put(store, *range(COUNT)))
    keys = keys_of(store, *range(COUNT))
    place.wipe()  # so nothing but memory can deliver them
    hit = store.lookup(keys)
    assert hit.pages == COUNT
    content = [page for number in range(COUNT) for page in pages(PAGE, 1, seed=number)]
    for form in ({}, {"loan": True}, {"layerwise": True}):
        room = empty(PAGE, COUNT)
        transfer = store.get(keys, room, lookup=hit, **form)
        assert transfer.result() == [PAGE.size_bytes] * COUNT
        assert transfer.wait_returned(5)
        assert room == content
    views = store.get_view(keys)
    assert all(views.result())
    for view, page in zip(views.views, content, strict=True):
        assert view is not None
        with view:
            assert b"".join(bytes(view[name]) for name in view.names()) == page
    stats = store.stats().memory
    assert (stats.hits, stats.pages, stats.used_bytes) == (4 * COUNT, COUNT, COUNT * FRAME_BYTES)
    assert store.exists(keys) == [False] * COUNT  # that asks the pool


def test_pages_that_were_loaded_are_promoted(place: Place) -> None:
    assert all(put(place.open(PAGE), *range(COUNT)))
    store = place.open(PAGE, memory_bytes=COUNT * FRAME_BYTES)
    used(store, *range(COUNT))
    assert store.stats().memory.hits == 0
    place.wipe()
    used(store, *range(COUNT))
    assert store.stats().memory.hits == COUNT


def test_memory_is_bounded_and_keeps_what_was_used_last(directory: Directory) -> None:
    store = directory.open(PAGE, memory_bytes=3 * FRAME_BYTES + 5000)
    assert all(put(store, 1))
    assert all(put(store, 2))
    assert all(put(store, 3))
    used(store, 1)
    assert all(put(store, 4))
    for number in (1, 2, 3, 4):
        directory.block_file(store, keys_of(store, number)[0]).unlink()
    results = store.get(keys_of(store, 1, 2, 3, 4), empty(PAGE, 4)).result()
    assert [bool(result) for result in results] == [True, False, True, True]
    stats = store.stats().memory
    assert (stats.size_bytes, stats.used_bytes, stats.evicted) == (3 * FRAME_BYTES, 3 * FRAME_BYTES, 1)


def test_a_damaged_page_never_gets_into_memory(directory: Directory) -> None:
    assert all(put(directory.open(PAGE), 1))
    store = directory.open(PAGE, memory_bytes=COUNT * FRAME_BYTES)
    path = directory.block_file(store, keys_of(store, 1)[0])
    with path.open("r+b") as file:
        file.seek(6000)
        byte = file.read(1)
        file.seek(6000)
        file.write(bytes([byte[0] ^ 1]))
    room = empty(PAGE, 1)
    assert store.get(keys_of(store, 1), room).result() == [Miss.DAMAGED]
    assert store.stats().memory.pages == 0
    assert untouched(room)


def test_other_tokens_under_an_equal_key_are_not_served_from_memory(directory: Directory) -> None:
    store = directory.open(PAGE, memory_bytes=COUNT * FRAME_BYTES)
    key = store.keys(list(range(4)))[0]
    other = store.keys(list(range(4, 8)))[0]
    assert all(store.put([key], pages(PAGE, 1)).result())
    forged = type(key)(
        fingerprint=key.fingerprint,
        digest=key.digest,
        **{name: getattr(other, name) for name in key.__dataclass_fields__ if name not in ("fingerprint", "digest")},
    )
    assert store.get([forged], empty(PAGE, 1)).result() == [Miss.COLLISION]
    assert store.stats().memory.hits == 0


def test_what_is_deleted_is_deleted_from_memory(directory: Directory) -> None:
    store = directory.open(PAGE, memory_bytes=COUNT * FRAME_BYTES)
    assert all(put(store, 1, 2, 3))
    assert store.delete(keys_of(store, 1)) == [True]
    assert store.get(keys_of(store, 1), empty(PAGE, 1)).result() == [Miss.ABSENT]
    store.clear()
    assert store.lookup(keys_of(store, 2, 3)).pages == 0


def test_a_put_that_fails_leaves_nothing_in_memory(directory: Directory) -> None:
    class Broken(RealDisk):
        def rename_noreplace(self, source: str, target: str) -> None:
            raise OSError(5, "Input/output error")

        def rename_into(self, directory: int, source: str, name: str) -> None:
            self.rename_noreplace(source, name)

    store = directory.open(PAGE, world=World(disk=Broken()), memory_bytes=COUNT * FRAME_BYTES)
    for _ in range(3):
        assert put(store, *range(COUNT)) == [Miss.IO] * COUNT
    assert store.lookup(keys_of(store, *range(COUNT))).pages == 0
    assert store.stats().memory.pages == 0


def test_threads_share_memory_while_it_is_too_small(directory: Directory) -> None:
    """Frames come and go under readers, views among them; every page has its own bytes."""
    store = directory.open(PAGE, memory_bytes=4 * FRAME_BYTES, depth=4)
    assert all(put(store, *range(12)))
    wrong: list[int] = []

    def work(first: int) -> None:
        for step in range(60):
            number = (first + step * 5) % 12
            expected = pages(PAGE, 1, seed=number)[0]
            if step % 3 == 0:
                transfer = store.get_view(keys_of(store, number))
                if transfer.result() == [PAGE.size_bytes]:
                    view = transfer.views[0]
                    assert view is not None
                    time.sleep(0.001)
                    if b"".join(bytes(view[name]) for name in view.names()) != expected:
                        wrong.append(number)
                    view.release()
                continue
            room = empty(PAGE, 1)
            if not store.get(keys_of(store, number), room).result()[0] or room[0] != expected:
                wrong.append(number)

    threads = [threading.Thread(target=work, args=(first,)) for first in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
    stats = store.stats().memory
    assert stats.hits > 0
    assert stats.evicted > 0
    assert stats.used_bytes <= 4 * FRAME_BYTES


# ------------------------------------------------------------------------------------------------------ write-behind


class StuckDisk(RealDisk):
    """Writes of objects wait until ``go`` is set."""

    def __init__(self) -> None:
        super().__init__()
        self.go = threading.Event()
        self.go.set()

    def pwritev(self, fd: int, buffers: Any, offset_bytes: int, flags: int = 0) -> int:
        if sum(map(len, buffers)) > 8192:
            self.go.wait(30)
        return super().pwritev(fd, buffers, offset_bytes, flags)


def behind(directory: Directory, disk: RealDisk, pages_: int, **settings: Any) -> KVStore:
    slab_bytes = directory.open(PAGE).stats().slab_bytes
    return directory.open(
        PAGE, world=World(disk=disk), engine="threads", depth=2, write_behind_bytes=pages_ * slab_bytes, **settings
    )


def test_a_put_is_over_when_its_pages_are_copied(directory: Directory) -> None:
    disk = StuckDisk()
    store = behind(directory, disk, 8)
    disk.go.clear()
    source = pages(PAGE, 6)
    begun_s = time.monotonic()
    assert store.put(keys_of(store, *range(6)), source).result() == [PAGE.size_bytes] * 6
    assert time.monotonic() - begun_s < 5
    expected = [bytes(page) for page in source]
    for page in source:
        page[:] = bytes(len(page))  # it is the caller's again
    assert store.stats().behind.queued == 6
    assert store.lookup(keys_of(store, *range(6))).pages == 0  # nobody published them
    assert not store.flush(0.05)
    disk.go.set()
    assert store.flush()
    room = empty(PAGE, 6)
    assert all(store.get(keys_of(store, *range(6)), room).result())
    assert [bytes(page) for page in room] == expected
    stats = store.stats()
    assert (stats.behind.accepted, stats.behind.written, stats.behind.queued, stats.puts) == (6, 6, 0, 6)


def test_what_finds_no_buffer_is_dropped_and_counted(directory: Directory) -> None:
    disk = StuckDisk()
    store = behind(directory, disk, 4)
    disk.go.clear()
    begun_s = time.monotonic()
    results = [result for number in range(50) for result in put(store, number)]
    assert time.monotonic() - begun_s < 5  # a stuck disk holds nobody up
    assert results == [PAGE.size_bytes] * 4 + [Miss.BUSY] * 46
    assert store.stats().behind.dropped == 46
    assert store.stats().put_failures["busy"] == 46
    disk.go.set()
    assert store.flush()
    assert there(store, *range(50)) == [0, 1, 2, 3]
    assert all(put(store, 10, 11))
    assert store.flush()
    assert there(store, 10, 11) == [10, 11]
    assert store.stats().in_flight == 0


def test_a_copy_that_cannot_be_stored_is_counted(directory: Directory) -> None:
    class Broken(RealDisk):
        def rename_noreplace(self, source: str, target: str) -> None:
            raise OSError(28, "No space left on device")

        def rename_into(self, directory: int, source: str, name: str) -> None:
            self.rename_noreplace(source, name)

    store = behind(directory, Broken(), 4)
    assert put(store, 1, 2) == [PAGE.size_bytes] * 2
    assert store.flush()
    stats = store.stats()
    assert (stats.behind.failed, stats.put_failures["no space"], stats.failing_puts) == (2, 2, 2)


def test_closing_writes_what_was_accepted_within_its_time(directory: Directory) -> None:
    store = behind(directory, RealDisk(), 20)
    assert all(put(store, *range(20)))
    assert store.close()
    assert len(directory.objects()) == 20
    disk = StuckDisk()
    stuck = behind(directory, disk, 4)
    disk.go.clear()
    put(stuck, 100, 101)
    begun_s = time.monotonic()
    assert not stuck.close(timeout_s=1.0)
    assert time.monotonic() - begun_s < 5
    disk.go.set()
    wait_for(lambda: stuck.stats().behind.queued == 0)


def test_both_tiers_over_a_compressed_pool(directory: Directory) -> None:
    pytest.importorskip("zstandard")
    page = Geometry.raw(50000, page_tokens=4)
    whose = Identity.of(page, model="m", revision="r1")
    with kvstore.open(
        directory.url,
        whose,
        geometry=page,
        codec="zstd",
        memory_bytes=1 << 20,
        write_behind_bytes=1 << 20,
        capacity=kvstore.Capacity(quota_bytes=1 << 20),
    ) as store:
        contents = [bytearray(payload(100, number) * 500) for number in range(5)]
        keys = keys_of(store, *range(5))
        assert all(store.put(keys, contents).result())
        assert store.flush()
        for path in sorted((directory.root / "kv").rglob("*.safetensors")):
            assert path.stat().st_size <= 8192
        for wipe in (False, True):
            if wipe:
                for path in sorted((directory.root / "kv").rglob("*.safetensors")):
                    os.unlink(path)
            room = [bytearray(50000) for _ in keys]
            assert all(store.get(keys, room).result())
            assert room == contents
        assert store.stats().capacity.used_bytes == 5 * 8192
