"""Storage that is short, interrupted, slow, broken or stuck; forks, closing, deadlines."""

from __future__ import annotations

import dataclasses
import errno
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

import kvstore
from curvfs.errors import ConfigError, CurvfsError, EnvironmentError_, UsageError
from curvfs.ring import Ring, RingCall
from curvfs.world import RealDisk, World
from kvstore import Geometry, Identity, KVStore, Miss
from kvstore.engine.base import OpenFile
from kvstore.engine.threads import ThreadsEngine
from kvstore.engine.uring import probed_engine
from kvstore.keys import PageKey
from tests.t3_kvstore.places import Directory, Place, empty, pages, payload, untouched

PAGE = Geometry.raw(1 << 20, page_tokens=4)


def has_ring() -> bool:
    try:
        RealDisk().ring(2).close()
    except EnvironmentError_:
        return False
    return True


needs_ring = pytest.mark.skipif(not has_ring(), reason="no io_uring here")
each_engine = pytest.mark.parametrize("engine", ["threads", pytest.param("uring", marks=needs_ring)])


class BrokenRing(Ring):
    """A ring of the kernel between which and the caller something stands, once the self-test is over."""

    def __init__(self, ring: Ring, meet: Callable[[RingCall], RingCall | int], *, first: bool = True) -> None:
        self.entries = ring.entries
        self._ring = ring
        self._meet = meet
        self._proving = 2 if first else 0

    def run(self, calls: Sequence[RingCall]) -> list[int]:
        if self._proving:
            self._proving -= 1
            return self._ring.run(calls)
        met = [self._meet(call) for call in calls]
        made = [call for call in met if isinstance(call, RingCall) and len(call.view)]
        done = iter(self._ring.run(made))
        return [(next(done) if len(call.view) else 0) if isinstance(call, RingCall) else -call for call in met]

    def close(self) -> None:
        self._ring.close()


class FaultyDisk(RealDisk):
    """A real disk on which ``preadv`` and ``pwritev`` meet what ``fault(call number, bytes asked)`` says: an OSError to
    raise, or how many bytes the call may move at most."""

    def __init__(self, fault: Callable[[int, int], OSError | int | None], engine: str = "threads") -> None:
        super().__init__()
        self.engine = engine
        self.rings = 0
        self.fault = fault
        self.calls = 0
        self._lock = threading.Lock()

    def _met(self, size_bytes: int) -> int:
        with self._lock:
            self.calls += 1
            number = self.calls
        met = self.fault(number, size_bytes)
        if isinstance(met, OSError):
            raise met
        return size_bytes if met is None else met

    def ring(self, entries: int) -> Ring:
        if self.engine != "uring":
            raise EnvironmentError_("not wanted")
        first, self.rings = self.rings == 0, self.rings + 1
        return BrokenRing(super().ring(entries), self._ring_call, first=first)

    def _ring_call(self, call: RingCall) -> RingCall | int:
        """The call to make instead, or the errno it fails with."""
        try:
            at_most = self._met(len(call.view))
        except OSError as error:
            return error.errno or 0
        return dataclasses.replace(call, view=call.view[: at_most // 512 * 512])

    def preadv(self, fd: int, buffers: Sequence[Any], offset_bytes: int, flags: int = 0) -> int:
        view = memoryview(buffers[0])
        at_most = self._met(len(view))
        count = super().preadv(fd, [view], offset_bytes, flags)
        if count <= at_most:
            return count
        view[at_most:count] = b"\xdd" * (count - at_most)  # what was not read is not there either
        return at_most

    def pwritev(self, fd: int, buffers: Sequence[Any], offset_bytes: int, flags: int = 0) -> int:
        view = memoryview(buffers[0])
        at_most = self._met(len(view))
        return super().pwritev(
            fd, [view[: at_most // 512 * 512]] if at_most < len(view) else [view], offset_bytes, flags
        )


class StuckDisk(RealDisk):
    """A real disk whose reads or writes wait, while ``stuck`` is set, until they are let go."""

    def __init__(self, call: str, engine: str = "threads") -> None:
        super().__init__()
        self.engine = engine
        self.rings = 0
        self._call = call
        self.stuck = False
        self.go = threading.Event()
        self.waiting = threading.Semaphore(0)

    def ring(self, entries: int) -> Ring:
        if self.engine != "uring":
            raise EnvironmentError_("not wanted")
        first, self.rings = self.rings == 0, self.rings + 1
        return BrokenRing(super().ring(entries), self._ring_call, first=first)

    def _ring_call(self, call: RingCall) -> RingCall | int:
        self._wait("write" if call.write else "read")
        return call

    def _wait(self, call: str) -> None:
        if self.stuck and call == self._call:
            self.waiting.release()
            assert self.go.wait(30)

    def preadv(self, fd: int, buffers: Sequence[Any], offset_bytes: int, flags: int = 0) -> int:
        self._wait("read")
        return super().preadv(fd, buffers, offset_bytes, flags)

    def pwritev(self, fd: int, buffers: Sequence[Any], offset_bytes: int, flags: int = 0) -> int:
        self._wait("write")
        return super().pwritev(fd, buffers, offset_bytes, flags)


def keys_of(store: KVStore, count: int) -> list[PageKey]:
    return store.keys(list(range(4 * count)))


def filled(directory: Directory, count: int) -> list[bytearray]:
    content = pages(PAGE, count)
    store = directory.open(PAGE)
    assert all(store.put(keys_of(store, count), content).result())
    return content


@each_engine
@pytest.mark.parametrize("direct", [True, False])
def test_short_and_interrupted_calls_are_gone_on_with(directory: Directory, engine: str, direct: bool) -> None:
    def fault(number: int, size: int) -> OSError | int | None:
        if number % 10 == 0:
            return OSError(errno.EINTR if number % 20 else errno.EAGAIN, "again")
        return size // 2 + (7 if number % 2 else 0) if number % 3 == 0 and size > 4096 else None

    disk = FaultyDisk(fault, engine)
    store = directory.open(PAGE, world=World(disk=disk), direct=direct, depth=16)
    count = 60
    content = pages(PAGE, count)
    assert store.put(keys_of(store, count), content).result() == [PAGE.size_bytes] * count
    got = empty(PAGE, count)
    assert store.get(keys_of(store, count), got).result() == [PAGE.size_bytes] * count
    assert got == content
    assert disk.calls > 2 * count + 20
    assert store.stats().direct is direct


def test_a_read_that_ends_early_is_done_again_by_another_path(directory: Directory) -> None:
    filled(directory, 3)
    reads: list[int] = []

    def fault(number: int, size: int) -> int | None:
        if size > PAGE.size_bytes:  # neither the probe nor a record
            reads.append(number)
        return 0 if size > PAGE.size_bytes and len(reads) == 2 else None

    store = directory.open(PAGE, world=World(disk=FaultyDisk(fault)), depth=1)
    got = empty(PAGE, 3)
    results = store.get(keys_of(store, 3), got).result()
    assert results == [PAGE.size_bytes] * 3
    assert (store.stats().read_again, store.stats().quarantined) == (1, 0)


@each_engine
@pytest.mark.parametrize(
    ("number", "miss"),
    [(errno.EIO, Miss.IO), (errno.ENOSPC, Miss.NO_SPACE), (errno.EDQUOT, Miss.NO_SPACE), (errno.EACCES, Miss.DENIED)],
)
def test_failed_writes_are_told_and_leave_nothing(directory: Directory, engine: str, number: int, miss: Miss) -> None:
    broken = [False]
    disk = FaultyDisk(lambda call, size: OSError(number, os.strerror(number)) if broken[0] else None, engine)
    store = directory.open(PAGE, world=World(disk=disk))
    broken[0] = True
    transfer = store.put(keys_of(store, 3), pages(PAGE, 3))
    assert transfer.result() == [miss] * 3
    error = transfer.error(0)
    assert isinstance(error, CurvfsError)
    assert error.errno_ == number
    assert str(directory.root) in str(error)
    stats = store.stats()
    assert (stats.failing_puts, stats.put_failures) == (3, {miss.value: 3})
    assert directory.objects() == directory.staged() == []
    broken[0] = False
    assert all(store.put(keys_of(store, 3), pages(PAGE, 3)).result())
    assert store.stats().failing_puts == 0


def test_a_lookup_ends_in_time_on_a_file_system_that_hangs(directory: Directory) -> None:
    class HungDisk(RealDisk):
        hangs = False
        go = threading.Event()

        def stat(self, path: str, *, follow_symlinks: bool = True) -> os.stat_result:
            if self.hangs:
                assert self.go.wait(30)
            return super().stat(path, follow_symlinks=follow_symlinks)

    filled(directory, 4)
    disk = HungDisk()
    store = directory.open(PAGE, world=World(disk=disk), lookup_timeout_s=0.3, lease_s=1e-6)
    keys = keys_of(store, 4)
    assert store.lookup(keys).pages == 4
    disk.hangs = True
    begun = time.monotonic()
    for _ in range(3):  # more than there are threads that can hang
        assert store.lookup(keys).pages == 0
        assert store.exists(keys, timeout_s=0.1) == [False] * 4
    assert time.monotonic() - begun < 5
    disk.hangs = False
    disk.go.set()
    until(lambda: store.lookup(keys).pages == 4)


@each_engine
def test_one_failed_read_does_not_touch_its_neighbours_nor_the_file(directory: Directory, engine: str) -> None:
    content = filled(directory, 8)
    failed = [True]

    def fault(number: int, size: int) -> OSError | None:
        if number > 2 and size > 4096 and failed:
            failed.pop()
            return OSError(errno.EIO, "broken")
        return None

    store = directory.open(PAGE, world=World(disk=FaultyDisk(fault, engine)))
    got = empty(PAGE, 8)
    assert store.get(keys_of(store, 8), got).result() == [PAGE.size_bytes] * 8
    assert got == content
    assert (len(failed), store.stats().health.retries) == (0, 1)
    for _ in range(60):  # until the budget for second tries, which every success adds to, is used up
        failed[:] = [True] * 6
        store.get(keys_of(store, 8), empty(PAGE, 8)).result()
        failed[:] = [True]
        got = empty(PAGE, 8)
        results = store.get(keys_of(store, 8), got).result()
        if Miss.IO in results:
            break
    assert store.stats().health.retries_refused
    assert results.count(Miss.IO) == 1
    broken = results.index(Miss.IO)
    assert untouched([got[broken]])
    assert [one for index, one in enumerate(got) if index != broken] == content[:broken] + content[broken + 1 :]
    assert store.get(keys_of(store, 8), got).result() == [PAGE.size_bytes] * 8
    assert got == content


@each_engine
def test_a_late_completion_touches_nothing_that_was_given_back(directory: Directory, engine: str) -> None:
    content = filled(directory, 4)
    disk = StuckDisk("read", engine)
    store = directory.open(PAGE, world=World(disk=disk), depth=4)
    got = empty(PAGE, 2)
    disk.stuck = True
    begun = time.monotonic()
    assert store.get(keys_of(store, 2), got, timeout_s=0.2).result() == [Miss.DEADLINE] * 2
    assert time.monotonic() - begun < 2
    assert store.stats().slabs_in_use == 2
    disk.stuck = False
    # The same memory is used again while the old reads still hold their slabs.
    assert store.get(keys_of(store, 4)[2:], got).result() == [PAGE.size_bytes] * 2
    assert got == content[2:]
    disk.go.set()
    until(lambda: store.stats().slabs_in_use == 0)
    assert got == content[2:]
    assert store.stats().get_misses == {"deadline": 2}
    assert store.get(keys_of(store, 2), got).result() == [PAGE.size_bytes] * 2
    assert got == content[:2]


@each_engine
def test_every_worker_stuck_is_a_deadline_for_all_and_no_end(directory: Directory, engine: str) -> None:
    content = filled(directory, 4)
    disk = StuckDisk("read", engine)
    store = directory.open(PAGE, world=World(disk=disk), depth=2)
    disk.stuck = True
    outcomes: list[list[Any]] = []

    def call() -> None:
        outcomes.append(store.get(keys_of(store, 4), empty(PAGE, 4), timeout_s=0.3).result())

    begun = time.monotonic()
    callers = [threading.Thread(target=call) for _ in range(8)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join(5)
    assert time.monotonic() - begun < 3
    assert outcomes == [[Miss.DEADLINE] * 4] * 8
    disk.stuck = False
    disk.go.set()
    got = empty(PAGE, 4)
    assert store.get(keys_of(store, 4), got).result() == [PAGE.size_bytes] * 4
    assert got == content
    until(lambda: store.stats().in_flight == 0)


@each_engine
def test_a_put_given_up_lets_go_of_the_callers_memory(directory: Directory, engine: str) -> None:
    disk = StuckDisk("write", engine)
    store = directory.open(PAGE, world=World(disk=disk))
    disk.stuck = True
    source = pages(PAGE, 1)
    wanted = bytes(source[0])
    transfer = store.put(keys_of(store, 1), source)
    assert disk.waiting.acquire(timeout=10)
    assert transfer.result(timeout_s=0.1) == [Miss.DEADLINE]
    source[0].clear()  # not looked at any more
    disk.go.set()
    until(lambda: store.stats().in_flight == 0)
    got = empty(PAGE, 1)
    assert store.get(keys_of(store, 1), got).result() == [PAGE.size_bytes]
    assert got[0] == wanted


@each_engine
def test_cancel(directory: Directory, engine: str) -> None:
    filled(directory, 4)
    disk = StuckDisk("read", engine)
    store = directory.open(PAGE, world=World(disk=disk), depth=1)
    disk.stuck = True
    got = empty(PAGE, 4)
    transfer = store.get(keys_of(store, 4), got)
    assert disk.waiting.acquire(timeout=10)
    transfer.cancel()
    assert transfer.result() == [Miss.CANCELLED] * 4
    disk.go.set()
    until(lambda: store.stats().in_flight == 0)
    assert untouched(got)


@each_engine
def test_closing_with_requests_under_way_is_bounded(directory: Directory, engine: str) -> None:
    filled(directory, 4)
    disk = StuckDisk("read", engine)
    store = directory.open(PAGE, world=World(disk=disk), depth=1)
    disk.stuck = True
    got = empty(PAGE, 4)
    transfer = store.get(keys_of(store, 4), got)
    assert disk.waiting.acquire(timeout=10)
    begun = time.monotonic()
    assert store.close(timeout_s=0.3) is False
    assert time.monotonic() - begun < 3
    assert transfer.result() == [Miss.CANCELLED] * 4
    disk.go.set()
    time.sleep(0.1)
    assert untouched(got)


def test_closing_ends_what_has_begun(directory: Directory) -> None:
    store = directory.open(PAGE, depth=2)
    transfer = store.put(keys_of(store, 30), pages(PAGE, 30))
    assert store.close(timeout_s=20)
    results = transfer.result()
    stored = [bool(result) for result in results]
    assert {result for result in results if not result} <= {Miss.CANCELLED}
    again = directory.open(PAGE)
    assert again.exists(keys_of(again, 30)) == stored


def test_a_forked_child_is_refused_and_the_parent_goes_on(directory: Directory) -> None:
    program = f"""if True:
        import os, kvstore
        page = kvstore.Geometry.raw(4096)
        whose = kvstore.Identity.of(page, model="m", revision="r")
        store = kvstore.open({directory.url!r}, whose, geometry=page)
        keys = store.keys(list(range(8)))
        store.put(keys[:4], [bytes(4096)] * 4).result()
        pid = os.fork()
        if pid == 0:
            refused = 0
            for call in (lambda: store.put(keys, [bytes(4096)] * 8), lambda: store.lookup(keys), store.sweep):
                try:
                    call()
                except kvstore.store.UsageError as error:
                    refused += "fork" in str(error)
            closed = store.close()
            with kvstore.open({directory.url!r}, whose, geometry=page) as own:
                os._exit(0 if refused == 3 and closed and own.lookup(keys).pages == 4 else 1)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
        assert all(store.put(keys, [bytes(4096)] * 8).result())
        store.close()
    """
    subprocess.run([sys.executable, "-W", "ignore", "-c", program], check=True, timeout=60)
    assert len(directory.objects()) == 8
    assert directory.staged() == []


def test_an_unforeseen_failure_is_a_miss_and_the_worker_lives(directory: Directory) -> None:
    filled(directory, 2)

    class Odd(Exception):
        pass

    met: list[int] = []

    def fault(number: int, size: int) -> None:
        if size > PAGE.size_bytes and not met:
            met.append(number)
            raise Odd("nobody thought of this")

    store = directory.open(PAGE, world=World(disk=FaultyDisk(fault)), depth=1)
    got = empty(PAGE, 2)
    assert store.get(keys_of(store, 2), got).result() == [Miss.IO, PAGE.size_bytes]
    assert untouched(got[:1])


class TestEngine:
    """The engines by themselves: what is asked of one is asked of all."""

    def engine(self, name: str, fault: Callable[[int, int], OSError | int | None]) -> ThreadsEngine:
        disk = FaultyDisk(lambda number, size: None, name)
        found, _ = probed_engine(World(disk=disk), name, depth=1)
        assert found.name == name
        disk.fault, disk.calls = fault, 0  # after the self-test
        return found

    def open(self, path: Path, size: int) -> OpenFile:
        path.write_bytes(bytes(range(256)) * (size // 256) + bytes(size % 256))
        return OpenFile(os.open(path, os.O_RDWR), str(path), 512)

    @each_engine
    def test_the_end_of_a_file_is_not_an_error(self, tmp_path: Path, engine: str) -> None:
        moving, file = self.engine(engine, lambda number, size: None), self.open(tmp_path / "f", 5000)
        view = memoryview(bytearray(8192))
        assert moving.read(file, view) == 5000
        assert view[:5000] == (tmp_path / "f").read_bytes()
        assert moving.read(file, view, 4096) == 904
        assert moving.read(file, view, 8192) == 0
        os.close(file.fd)
        assert moving.close(1)

    @each_engine
    def test_many_pieces_of_memory(self, tmp_path: Path, engine: str) -> None:
        size = 40 << 20  # more pieces than a ring takes at once
        moving, file = (
            self.engine(engine, lambda number, size: size // 2 if number % 7 == 3 else None),
            self.open(tmp_path / "f", 0),
        )
        content = memoryview(payload(size, 1))
        moving.write(file, content)
        assert (tmp_path / "f").read_bytes() == content
        views = [memoryview(bytearray(length)) for length in (4096, 512, (5 << 20), 0, 1 << 20, size)]
        at, total = 8192, sum(map(len, views))
        assert moving.readv(file, views, at) == size - at
        assert b"".join(views)[: size - at] == content[at:]
        assert total > size - at
        os.close(file.fd)
        moving.close(1)

    @each_engine
    def test_calls_that_never_move_a_byte_end_in_an_error(self, tmp_path: Path, engine: str) -> None:
        file = self.open(tmp_path / "f", 8192)
        for fault in (lambda number, size: OSError(errno.EINTR, "again"), lambda number, size: min(size, 100)):
            moving = self.engine(engine, fault)
            with pytest.raises(OSError):
                moving.write(file, memoryview(bytearray(8192)))
            moving.close(1)
        moving = self.engine(engine, lambda number, size: OSError(errno.EINTR, "again"))
        with pytest.raises(OSError):
            moving.read(file, memoryview(bytearray(8192)))
        os.close(file.fd)
        moving.close(1)

    @each_engine
    def test_an_error_at_any_call_is_told(self, tmp_path: Path, engine: str) -> None:
        file = self.open(tmp_path / "f", 4 << 20)
        for at in range(1, 5):
            moving = self.engine(
                engine, lambda number, size, at=at: OSError(errno.EIO, "x") if number == at else 1 << 20
            )
            for move in (moving.read, moving.write):
                disk = moving._disk
                assert isinstance(disk, FaultyDisk)
                disk.calls = 0
                with pytest.raises(OSError) as caught:
                    move(file, memoryview(bytearray(4 << 20)))
                assert caught.value.errno == errno.EIO
            moving.close(1)
        os.close(file.fd)

    @each_engine
    def test_a_closed_engine_takes_no_jobs(self, engine: str) -> None:
        moving = self.engine(engine, lambda number, size: None)
        assert moving.close(1)
        with pytest.raises(CurvfsError):
            moving.submit(lambda: None)

    def test_the_choice_is_told(self, directory: Directory) -> None:
        without = World(disk=FaultyDisk(lambda number, size: None))
        stats = directory.open(PAGE, world=without).stats()
        assert (stats.engine, stats.engine_reason) == ("threads", "not wanted")
        with pytest.raises(EnvironmentError_, match="not wanted"):
            directory.open(PAGE, world=without, engine="uring")
        assert directory.open(PAGE, engine="threads").stats().engine_reason == "asked for"
        with pytest.raises(ConfigError, match="engine"):
            directory.open(PAGE, engine="aio")
        if has_ring():
            stats = directory.open(PAGE).stats()
            assert (stats.engine, stats.engine_reason) == ("uring", "proven by its self-test")

    @needs_ring
    def test_a_ring_that_lies_is_not_used(self, directory: Directory) -> None:
        class Lying(Ring):
            entries = 4

            def run(self, calls: Sequence[RingCall]) -> list[int]:
                return [len(call.view) for call in calls]

            def close(self) -> None:
                pass

        class LyingDisk(RealDisk):
            def ring(self, entries: int) -> Ring:
                return Lying()

        stats = directory.open(PAGE, world=World(disk=LyingDisk())).stats()
        assert stats.engine == "threads"
        assert "self-test" in stats.engine_reason


def test_what_lies_in_the_page_cache_is_read_from_there(place: Place) -> None:
    keeping, dropping = place.open(PAGE, page_cache="keep"), place.open(PAGE)
    if not keeping.stats().direct:
        pytest.skip("no direct I/O here")
    content, got = pages(PAGE, 8), empty(PAGE, 8)
    assert all(keeping.put(keys_of(keeping, 4), content[:4]).result())
    assert all(dropping.put(keys_of(dropping, 8)[4:], content[4:]).result())
    assert all(dropping.get(keys_of(dropping, 8), got).result())
    assert got == content
    assert dropping.stats().page_cache_reads == 4
    assert dropping.stats().fallbacks == keeping.stats().fallbacks == 0
    assert all(dropping.get(keys_of(dropping, 8)[:4], got[:4]).result())
    assert dropping.stats().page_cache_reads == 8
    # What was read directly did not come into the page cache.
    assert all(dropping.get(keys_of(dropping, 8)[4:], got[4:]).result())
    assert dropping.stats().page_cache_reads == 8


def until(true: Callable[[], bool], timeout_s: float = 10.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_opening_again_after_a_failed_open_works(directory: Directory) -> None:
    with pytest.raises(UsageError):
        kvstore.open("file:///no/such/dir", Identity.of(PAGE, model="m", revision="r"), geometry=PAGE)
    before = threading.active_count()
    for url in ("file:///no/such/dir", "http://x", "file://host/dir", "file:relative", "", "/tmp"):
        with pytest.raises(UsageError):
            kvstore.open(url, Identity.of(PAGE, model="m", revision="r"), geometry=PAGE)
    assert threading.active_count() <= before
    filled(directory, 1)
