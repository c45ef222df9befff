"""The forms of a get, and the faces of its handle."""

from __future__ import annotations

import asyncio
import ctypes
import mmap
import select
import time
from typing import Any

import pytest
import trio

from curvfs.errors import UsageError
from curvfs.world import World
from kvstore import Geometry, KVStore, Miss, PageKey
from tests.t3_kvstore.places import Directory, Place, empty, pages, untouched
from tests.t3_kvstore.test_faults import StuckDisk, until

#: 4 layers of 2 x 8 KiB: nothing needs padding.
PAGE = Geometry.attention(layers=4, kv_heads=4, head_dim=64, dtype="float16", page_tokens=16)
LAYER_BYTES = PAGE.size_bytes // 4


def stored(store: KVStore, count: int) -> tuple[list[PageKey], list[bytearray]]:
    keys, content = store.keys(list(range(16 * count))), pages(store.geometry, count)
    assert all(store.put(keys, content).result())
    return keys, content


def aligned(count: int) -> list[mmap.mmap]:
    """Page-aligned room for pages."""
    return [mmap.mmap(-1, PAGE.size_bytes) for _ in range(count)]


class TestLoan:
    def test_pages_come_straight_into_aligned_memory(self, place: Place) -> None:
        store = place.open(PAGE)
        keys, content = stored(store, 5)
        room = aligned(5)
        transfer = store.get(keys, room, loan=True)
        assert transfer.result() == [PAGE.size_bytes] * 5
        assert transfer.wait_returned(5)
        assert transfer.lent == 0
        assert [room[index][:] for index in range(5)] == content
        assert store.stats().loans_copied == 0

    def test_pieces_of_memory_are_filled_in_one_go(self, place: Place) -> None:
        store = place.open(PAGE)
        keys, content = stored(store, 2)
        room = [[mmap.mmap(-1, LAYER_BYTES // 2) for _ in range(8)] for _ in range(2)]
        assert all(store.get(keys, room, loan=True).result())
        assert [b"".join(piece[:] for piece in page) for page in room] == content
        assert store.stats().loans_copied == 0

    def test_other_memory_is_copied_to_and_that_is_counted(self, directory: Directory) -> None:
        store = directory.open(PAGE)
        keys, content = stored(store, 3)
        room = aligned(1)[0]
        buffer = (ctypes.c_char * (2 * PAGE.size_bytes))()
        odd = memoryview(buffer).cast("B")[1 : 1 + PAGE.size_bytes]
        assert all(store.get(keys[:2], [room, odd], loan=True).result())
        assert [room[:], bytes(odd)] == content[:2]
        assert store.stats().loans_copied == 1

    def test_padded_pages_are_copied(self, place: Place) -> None:
        page = Geometry.of({"a": ("float16", (100,)), "b": ("float16", (3000,))}, page_tokens=16)
        store = place.open(page)
        keys, content = stored(store, 2)
        got = empty(page, 2)
        assert all(store.get(keys, got, loan=True).result())
        assert got == content
        assert store.stats().loans_copied == 2

    def test_damage_is_a_miss(self, place: Place) -> None:
        store = place.open(PAGE)
        keys, _ = stored(store, 2)
        file = place.block_file(store, keys[1])
        whole = file.read_bytes()
        file.write_bytes(whole[:-5] + bytes([whole[-5] ^ 4]) + whole[-4:])
        transfer = store.get(keys, aligned(2), loan=True)
        assert transfer.result() == [PAGE.size_bytes, Miss.DAMAGED]
        assert transfer.wait_returned(1)
        assert store.stats().quarantined == 1

    def test_memory_stays_on_loan_after_a_deadline(self, directory: Directory) -> None:
        stored(directory.open(PAGE), 1)
        disk = StuckDisk("read")
        store = directory.open(PAGE, world=World(disk=disk))
        disk.stuck = True
        room = aligned(1)
        transfer = store.get(store.keys(list(range(16))), room, loan=True)
        assert disk.waiting.acquire(timeout=10)
        assert transfer.result(timeout_s=0.05) == [Miss.DEADLINE]
        assert transfer.done()
        assert transfer.lent == 1
        assert not transfer.wait_returned(0.05)
        disk.go.set()
        assert transfer.wait_returned(10)
        until(lambda: store.stats().in_flight == 0)


class TestView:
    def test_a_view_holds_the_page_until_it_is_released(self, place: Place) -> None:
        store = place.open(PAGE)
        keys, content = stored(store, 3)
        transfer = store.get_view([*keys, store.foreign_key(b"none")])
        assert transfer.result() == [PAGE.size_bytes] * 3 + [Miss.ABSENT]
        assert store.stats().views_out == 3
        assert transfer.views[3] is None
        for view, page in zip(transfer.views[:3], content, strict=True):
            assert view is not None
            with view:
                assert b"".join(view[name] for name in view.names()) == page
                assert view["layer.0.k"].readonly
            with pytest.raises(UsageError, match="released"):
                view["layer.0.k"]
        assert store.stats().views_out == 0

    def test_views_that_are_kept_do_not_keep_others_from_reading(self, directory: Directory) -> None:
        store = directory.open(PAGE, depth=2)
        keys, content = stored(store, 6)
        held = store.get_view(keys[:2])
        assert all(held.result())
        assert store.get_view(keys[2:3]).result() == [Miss.BUSY]
        got = empty(PAGE, 6)
        assert all(store.get(keys, got).result())
        assert got == content
        for view in held.views:
            assert view is not None
            view.release()
            view.release()
        assert all(store.get_view(keys[2:3]).result())

    def test_tensors(self, directory: Directory) -> None:
        torch = pytest.importorskip("torch")
        store = directory.open(PAGE)
        keys, content = stored(store, 1)
        transfer = store.get_view(keys)
        transfer.result()
        view = transfer.views[0]
        assert view is not None
        with view:
            wanted = torch.frombuffer(content[0], dtype=torch.float16).view(8, 4, 16, 64)
            for number, name in enumerate(view.names()):
                assert torch.equal(view.tensor(name).view(torch.int16), wanted[number].view(torch.int16))


class TestLayers:
    def test_layers_come_in_order(self, place: Place) -> None:
        store = place.open(PAGE)
        keys, content = stored(store, 20)
        got = empty(PAGE, 20)
        transfer = store.get(keys, got, layerwise=True)
        for layer in range(4):
            assert transfer.layer(layer).result() == [True] * 20
            for index in range(20):
                end = (layer + 1) * LAYER_BYTES
                assert got[index][:end] == content[index][:end]
        assert transfer.result() == [PAGE.size_bytes] * 20
        assert got == content
        assert store.stats().in_flight == store.stats().slabs_in_use == 0

    def test_a_page_that_is_damaged_later_on_has_its_first_layers(self, place: Place) -> None:
        store = place.open(PAGE)
        keys, content = stored(store, 3)
        file = place.block_file(store, keys[1])
        whole = file.read_bytes()
        at = len(whole) - LAYER_BYTES - 1  # in the last but one
        file.write_bytes(whole[:at] + bytes([whole[at] ^ 4]) + whole[at + 1 :])
        got = empty(PAGE, 3)
        transfer = store.get(keys, got, layerwise=True)
        assert transfer.result() == [PAGE.size_bytes, Miss.DAMAGED, PAGE.size_bytes]
        assert [transfer.layer(layer).result() for layer in range(4)] == [
            [True] * 3,
            [True] * 3,
            [True, False, True],
            [True, False, True],
        ]
        assert got[1][: 2 * LAYER_BYTES] == content[1][: 2 * LAYER_BYTES]
        assert untouched([got[1][2 * LAYER_BYTES :]])
        assert store.stats().quarantined == 1

    def test_misses_have_no_layers(self, place: Place) -> None:
        store = place.open(PAGE)
        got = empty(PAGE, 2)
        transfer = store.get(store.keys(list(range(32))), got, layerwise=True)
        assert transfer.layer(0).result() == [False, False]
        assert transfer.result() == [Miss.ABSENT] * 2
        assert untouched(got)

    def test_a_deadline_ends_the_waiting(self, directory: Directory) -> None:
        stored(directory.open(PAGE), 2)
        disk = StuckDisk("read")
        store = directory.open(PAGE, world=World(disk=disk))
        disk.stuck = True
        got = empty(PAGE, 2)
        transfer = store.get(store.keys(list(range(32))), got, layerwise=True, timeout_s=0.3)
        assert transfer.layer(0).result(0.05) == [False, False]
        assert not transfer.done()
        assert transfer.result() == [Miss.DEADLINE] * 2
        assert transfer.layer(3).result() == [False, False]
        disk.go.set()
        until(lambda: store.stats().in_flight == 0)
        assert untouched(got)

    def test_both_at_once_are_refused(self, directory: Directory) -> None:
        with pytest.raises(UsageError):
            directory.open(PAGE).get([], [], loan=True, layerwise=True)


class TestFaces:
    def test_asyncio(self, place: Place) -> None:
        store = place.open(PAGE)

        async def use() -> None:
            keys, content = store.keys(list(range(16 * 4))), pages(PAGE, 4)
            assert await store.put(keys, content) == [PAGE.size_bytes] * 4
            got = empty(PAGE, 4)
            both = await asyncio.gather(store.get(keys[:2], got[:2]), store.get(keys[2:], got[2:]))
            assert both == [[PAGE.size_bytes] * 2] * 2
            assert got == content
            transfer = store.get(keys, empty(PAGE, 4), layerwise=True)
            assert [await transfer.layer(layer) for layer in range(4)] == [[True] * 4] * 4
            assert await transfer == await transfer == [PAGE.size_bytes] * 4

        asyncio.run(use())

    async def test_trio(self, directory: Directory) -> None:
        store = directory.open(PAGE)
        keys, content = store.keys(list(range(16 * 4))), pages(PAGE, 4)
        assert await store.put(keys, content) == [PAGE.size_bytes] * 4
        got = empty(PAGE, 4)
        transfer = store.get(keys, got, layerwise=True)
        assert await transfer.layer(3) == [True] * 4
        assert await transfer == [PAGE.size_bytes] * 4
        assert got == content

    @pytest.mark.parametrize("library", ["asyncio", "trio"])
    def test_deadline_and_cancellation(self, directory: Directory, library: str) -> None:
        stored(directory.open(PAGE), 2)
        disk = StuckDisk("read")
        store = directory.open(PAGE, world=World(disk=disk), depth=4)
        disk.stuck = True
        keys, got = store.keys(list(range(32))), empty(PAGE, 4)

        async def in_time() -> None:
            assert await store.get(keys, got[:2], timeout_s=0.05) == [Miss.DEADLINE] * 2

        transfers: list[Any] = []

        async def cancelled() -> None:
            transfers.append(store.get(keys, got[2:]))
            if library == "trio":
                with trio.move_on_after(0.05) as scope:
                    await transfers[0]
                assert scope.cancelled_caught
            else:
                with pytest.raises(TimeoutError):
                    await asyncio.wait_for(transfers[0], 0.05)

        begun = time.monotonic()
        for function in (in_time, cancelled):
            if library == "trio":
                trio.run(function)
            else:
                asyncio.run(function())
        assert time.monotonic() - begun < 3
        assert transfers[0].result() == [Miss.CANCELLED] * 2
        disk.go.set()
        until(lambda: store.stats().in_flight == 0)
        assert untouched(got)

    def test_a_descriptor_tells_of_completions(self, place: Place) -> None:
        store = place.open(PAGE)
        keys, content = store.keys(list(range(16 * 6))), pages(PAGE, 6)
        with store.completions() as queue:
            assert queue.drain() == []
            assert queue.next_deadline_s() is None
            transfers = {store.put(keys[index : index + 2], content[index : index + 2]) for index in (0, 2, 4)}
            for transfer in transfers:
                queue.watch(transfer)
            done = set()
            while len(done) < 3:
                assert select.select([queue], [], [], 10)[0]
                done.update(queue.drain())
            assert done == transfers
            assert not select.select([queue], [], [], 0)[0]
            assert all(all(transfer.result()) for transfer in done)

    def test_a_descriptor_and_deadlines(self, directory: Directory) -> None:
        stored(directory.open(PAGE), 1)
        disk = StuckDisk("read")
        store = directory.open(PAGE, world=World(disk=disk))
        disk.stuck = True
        with store.completions() as queue:
            queue.watch(store.get(store.keys(list(range(16))), empty(PAGE, 1), timeout_s=0.1))
            left_s = queue.next_deadline_s()
            assert left_s is not None
            assert left_s <= 0.1
            assert not select.select([queue], [], [], left_s + 0.01)[0]
            assert [transfer.result() for transfer in queue.drain()] == [[Miss.DEADLINE]]
        disk.go.set()
        until(lambda: store.stats().in_flight == 0)
