"""Small pages of a directory, several of which one thread reads together."""

from __future__ import annotations

import errno
import mmap
from collections.abc import Sequence
from typing import Any

import pytest

from curvfs.ring import Ring, RingCall
from curvfs.world import RealDisk, World
from kvstore import Geometry, KVStore, Miss
from kvstore.backends.filesystems import file_system_of
from tests.t3_kvstore.places import Directory, empty, pages, untouched
from tests.t3_kvstore.test_faults import StuckDisk, has_ring

PAGE = Geometry.raw(64 << 10, page_tokens=4)
COUNT = 24
DEPTH = 8

pytestmark = pytest.mark.skipif(not has_ring(), reason="no io_uring here")


class Counting(RealDisk):
    """Notes how many reads each call to a ring had, and lets ``meet`` have them fail."""

    def __init__(self) -> None:
        super().__init__()
        self.reads: list[int] = []
        self.failing = 0

    def ring(self, entries: int) -> Ring:
        return _Counted(self, super().ring(entries))


class _Counted(Ring):
    def __init__(self, disk: Counting, ring: Ring) -> None:
        self._disk, self._ring, self.entries = disk, ring, ring.entries

    def run(self, calls: Sequence[RingCall]) -> list[int]:
        results = self._ring.run(calls)
        if not calls[0].write:
            self._disk.reads.append(len(calls))
            if self._disk.failing and len(calls) > 1:
                self._disk.failing -= 1
                results[1] = -errno.EIO
        return results

    def close(self) -> None:
        self._ring.close()


def filled(directory: Directory, disk: RealDisk, **settings: Any) -> tuple[KVStore, list[Any], list[bytearray]]:
    """A store with pages in it, their keys and contents."""
    store = directory.open(PAGE, world=World(disk=disk), depth=DEPTH, engine="uring", **settings)
    if not store.stats().direct or file_system_of(disk, str(directory.root)) not in ("ext4", "xfs", "btrfs"):
        pytest.skip("the temporary directory does not take direct I/O, or is not on a disk")
    keys, content = store.keys(list(range(4 * COUNT))), pages(PAGE, COUNT)
    assert all(store.put(keys, content).result())
    return store, keys, content


def room(loan: bool) -> list[Any]:
    """Memory to read into; what is lent is read into straight."""
    return [mmap.mmap(-1, PAGE.size_bytes) for _ in range(COUNT)] if loan else empty(PAGE, COUNT)


def same(got: list[Any], content: list[bytearray], indices: Sequence[int] = range(COUNT)) -> bool:
    return all(bytes(memoryview(got[index])) == content[index] for index in indices)


@pytest.mark.parametrize("loan", [False, True])
def test_small_pages_are_read_together(directory: Directory, loan: bool) -> None:
    disk = Counting()
    store, keys, content = filled(directory, disk)
    disk.reads.clear()
    got = room(loan)
    transfer = store.get(keys, got, loan=loan)
    assert transfer.result() == [PAGE.size_bytes] * COUNT
    assert store.stats().slabs_in_use == 0
    assert same(got, content)
    assert (transfer.lent, store.stats().loans_copied) == (0, 0)
    assert sum(disk.reads) >= COUNT
    assert max(disk.reads) > 1
    assert len(disk.reads) < COUNT


def test_one_of_them_is_damaged_one_is_missing(directory: Directory) -> None:
    store, keys, content = filled(directory, Counting())
    for index in (3, 17):
        file = directory.block_file(store, keys[index])
        file.write_bytes(b"x" * file.stat().st_size)
    directory.block_file(store, keys[9]).unlink()
    got = empty(PAGE, COUNT)
    results = store.get(keys, got).result()
    assert store.stats().slabs_in_use == 0
    misses = {index: result for index, result in enumerate(results) if not result}
    assert misses == {3: Miss.DAMAGED, 9: Miss.ABSENT, 17: Miss.DAMAGED}
    assert untouched([got[index] for index in misses])
    assert all(got[index] == content[index] for index in range(COUNT) if index not in misses)
    assert len(directory.quarantined()) == 2


@pytest.mark.parametrize("loan", [False, True])
def test_a_read_that_fails_is_tried_again_within_the_budget(directory: Directory, loan: bool) -> None:
    disk = Counting()
    store, keys, content = filled(directory, disk)
    disk.failing = 2
    got = room(loan)
    results = store.get(keys, got, loan=loan).result()
    health = store.stats().health
    failed = [index for index, result in enumerate(results) if not result]
    assert [results[index] for index in failed] == [Miss.IO] * len(failed)
    assert health.retries + len(failed) == 2  # what was lent cannot be tried again
    assert disk.failing == 0
    assert same(got, content, [index for index in range(COUNT) if index not in failed])
    assert store.get(keys, got, loan=loan).result() == [PAGE.size_bytes] * COUNT
    assert same(got, content)


def test_a_file_system_that_is_far_gets_a_thread_for_each(directory: Directory) -> None:
    class Unknown(Counting):
        def open(self, path: str, flags: int, mode: int = 0o600) -> int:
            if path == "/proc/self/mountinfo":
                raise PermissionError(errno.EACCES, "Permission denied", path)
            return super().open(path, flags, mode)

    filled(directory, Counting())
    disk = Unknown()
    store = directory.open(PAGE, world=World(disk=disk), depth=DEPTH, engine="uring")
    keys = store.keys(list(range(4 * COUNT)))
    disk.reads.clear()
    got = empty(PAGE, COUNT)
    assert all(store.get(keys, got).result())
    assert got == pages(PAGE, COUNT)
    assert max(disk.reads) == 1


@pytest.mark.parametrize("loan", [False, True])
def test_a_deadline_while_some_are_being_read(directory: Directory, loan: bool) -> None:
    disk = StuckDisk("read", "uring")
    store, keys, content = filled(directory, disk)
    disk.stuck = True
    got = room(loan)
    transfer = store.get(keys, got, loan=loan, timeout_s=0.2)
    assert disk.waiting.acquire(timeout=10)
    assert transfer.result() == [Miss.DEADLINE] * COUNT
    assert loan or untouched(got)
    assert (transfer.lent > 0) is loan
    disk.stuck = False
    disk.go.set()
    assert transfer.wait_returned(10)
    assert loan or untouched(got)
    again = room(loan)
    assert all(store.get(keys, again, loan=loan).result())
    assert same(again, content)
    assert store.stats().slabs_in_use == 0


def test_what_file_system_a_path_is_on() -> None:
    disk = RealDisk()
    assert file_system_of(disk, "/proc") == "proc"
    assert file_system_of(disk, "/nowhere/at/all") == ""
