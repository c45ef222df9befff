"""What is special about objects in a Curvine namespace."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import trio
import trio.testing

import kvstore
from curvfs.errors import ConfigError, CurvfsError, EnvironmentError_, TransportError
from curvfs.world import RealDisk, World
from kvstore import Geometry, Identity, KVStore, Miss
from kvstore.backends.curvine import CurvineBackend
from tests.t3_kvstore.places import WORKER_HOSTNAME, Namespace, empty, pages, serving

PAGE = Geometry.attention(layers=2, kv_heads=2, head_dim=64, dtype="float16", page_tokens=16)
WHOSE = Identity.of(PAGE, model="m", revision="r")


@pytest.fixture
def near(master: tuple[str, Path | None]) -> Iterator[Namespace]:
    if master[1] is None:
        pytest.skip("that server's worker is not on this machine")
    place = Namespace(*master, WORKER_HOSTNAME)
    yield place
    place.close()


@pytest.fixture
def far(master: tuple[str, Path | None]) -> Iterator[Namespace]:
    place = Namespace(*master, "somewhere-else")
    yield place
    place.close()


def test_the_prefix_is_marked_and_objects_know_where_they_were_born(near: Namespace) -> None:
    store = near.open(PAGE)
    keys = store.keys(range(32))
    store.put(keys, pages(PAGE, 2)).result()
    assert near.fs.stat("/kv").xattrs["curvfs.kv"] == b"1"
    staging = next(one for one in near.fs.list("/kv/.staging"))
    born = [near.fs.stat(f"/kv/{store.object_name(key)}").xattrs["curvfs.born"] for key in keys]
    assert {place.split(b"/")[0] for place in born} == {str(staging.id).encode()}
    assert len({place.split(b"/")[1] for place in born}) == 2


def test_a_prefix_that_is_there_gets_its_mark(near: Namespace) -> None:
    near.fs.mkdir("/kv", parents=True)
    near.open(PAGE)
    assert near.fs.stat("/kv").xattrs["curvfs.kv"] == b"1"


def test_an_object_is_one_block_of_its_own_size(near: Namespace) -> None:
    page = Geometry.raw((3 << 20) + 5)
    store = near.open(page)
    key = store.foreign_key(b"k")
    assert store.put([key], pages(page, 1)).result() == [page.size_bytes]
    located = near.fs.locate(f"/kv/{store.object_name(key)}")
    assert len(located.blocks) == 1
    assert located.status.block_size_bytes == located.status.length_bytes
    assert located.status.length_bytes % 4096 == 0


def test_the_effective_mode_is_told(near: Namespace, far: Namespace) -> None:
    local, remote = near.open(PAGE).stats(), far.open(PAGE).stats()
    assert (local.backend, local.direct, local.direct_reason) == ("curvine", True, "")
    assert not remote.direct
    assert "remote" in remote.direct_reason
    near.open(PAGE, direct="required")
    with pytest.raises(EnvironmentError_, match="remote"):
        far.open(PAGE, direct="required")


def test_a_block_that_refuses_direct_io_is_counted(near: Namespace) -> None:
    class Refusing(RealDisk):
        refuse = False

        def open(self, path: str, flags: int, mode: int = 0o600) -> int:
            if self.refuse and flags & os.O_DIRECT:
                raise OSError(22, "Invalid argument", path)
            return super().open(path, flags, mode)

    disk = Refusing()
    store = near.open(PAGE, world=World(disk=disk))
    keys, content, got = store.keys(range(64)), pages(PAGE, 4), empty(PAGE, 4)
    assert all(store.put(keys[:2], content[:2]).result())
    assert store.stats().fallbacks == 0
    disk.refuse = True
    assert all(store.put(keys[2:], content[2:]).result())
    assert store.stats().fallbacks == 2
    assert all(store.get(keys, got).result())
    assert got == content
    assert store.stats().fallbacks == 6


def test_near_and_far_see_the_same_pages(master: tuple[str, Path | None], near: Namespace) -> None:
    writer = near.open(PAGE)
    keys, content = writer.keys(range(48)), pages(PAGE, 3)
    writer.put(keys, content).result()
    far_url = near.url.replace(WORKER_HOSTNAME, "elsewhere")
    with kvstore.open(far_url, Identity.of(PAGE, model="m", revision="r1"), geometry=PAGE) as reader:
        got = empty(PAGE, 3)
        assert reader.get(keys, got).result() == [PAGE.size_bytes] * 3
        assert got == content


def test_no_server_is_one_sentence() -> None:
    with pytest.raises(TransportError, match=r"127\.0\.0\.1:1"):
        kvstore.open("curvine://127.0.0.1:1/x?retry_max=1s&connect_timeout=1s", WHOSE, geometry=PAGE)
    with pytest.raises(ConfigError):
        kvstore.open("curvine:///x", WHOSE, geometry=PAGE)


def test_a_server_that_dies_gives_misses_and_its_return_gives_hits(tmp_path: Path) -> None:
    pool = tmp_path / "pool"
    with serving(pool) as address:
        place = Namespace(address, pool, WORKER_HOSTNAME)
        settings = "&retry_max=500ms&rpc_timeout=500ms&connect_timeout=500ms"
        store = kvstore.open(place.url + settings, WHOSE, geometry=PAGE)
        keys, content = store.keys(range(64)), pages(PAGE, 4)
        assert store.put(keys[:2], content[:2]).result() == [PAGE.size_bytes] * 2
        place.close()
    got = empty(PAGE, 2)
    assert store.lookup(keys).pages == 0
    assert store.get(keys[:2], got).result() == [Miss.UNREACHABLE] * 2
    assert not any(store.put(keys[2:], content[2:]).result())
    assert store.stats().failing_puts == 2
    store.close()
    with (
        serving(pool) as address,
        kvstore.open(place.url.replace(place.url.split("/")[2], address), WHOSE, geometry=PAGE) as again,
    ):
        assert again.lookup(keys).pages == 2
        assert again.get(keys[:2], got).result() == [PAGE.size_bytes] * 2
        assert got == content[:2]


def test_a_file_that_is_no_directory_is_said(near: Namespace) -> None:
    near.fs.create("/kv", parents=True).close()
    with pytest.raises(CurvfsError, match="directory"):
        near.open(PAGE)


def turns(store: KVStore, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Notes every turn of the client's thread from now on."""
    backend = store._backend
    assert isinstance(backend, CurvineBackend)
    taken: list[str] = []
    run = backend._fs.portal.run

    def counted(function: Any, *args: Any, **settings: Any) -> Any:
        name = repr(function)
        if "_many" in name:  # what a sweep does meanwhile does not count
            taken.append(name)
        return run(function, *args, **settings)

    monkeypatch.setattr(backend._fs.portal, "run", counted)
    return taken


def test_many_pages_take_few_turns_and_calls(near: Namespace, monkeypatch: pytest.MonkeyPatch) -> None:
    store = near.open(PAGE)
    backend = store._backend
    assert isinstance(backend, CurvineBackend)
    keys, content, got = store.keys(range(16 * 64)), pages(PAGE, 64), empty(PAGE, 64)
    taken = turns(store, monkeypatch)
    before = backend._fs.stats()["master_calls"]
    assert all(store.put(keys, content).result())
    assert len(taken) <= 5  # asked once; two batches created and published
    # Each is asked for, gets a directory and its name; making and committing are three calls for each batch.
    assert backend._fs.stats()["master_calls"] - before <= 64 * 3 + 2 * 3 + 8
    taken.clear()
    before = backend._fs.stats()["master_calls"]
    hit = store.lookup(keys)
    assert all(store.get(keys, got, lookup=hit).result())
    assert got == content
    assert backend._fs.stats()["master_calls"] - before <= 64 + 16
    assert len(taken) <= 1 + 2  # one round of asking, two batches opened
    taken.clear()
    assert store.lookup(keys).pages == 64
    assert all(store.get(keys, got, lookup=hit).result())
    assert taken == []  # known, and still open


def backend_of(store: KVStore) -> CurvineBackend:
    assert isinstance(store._backend, CurvineBackend)
    return store._backend


class Rounds:
    """Lets calls to the master go in rounds: what is asked while none is under way goes together. So the number of
    rounds is that of round trips in sequence."""

    def __init__(self, masters: Any) -> None:
        self.count = 0
        self._under_way = 0
        self._next: trio.Event | None = None
        masters.call, masters.call_many = self._gated(masters.call), self._gated(masters.call_many)

    def _gated(self, call: Any) -> Any:
        async def gated(*args: Any, **settings: Any) -> Any:
            if self._next is None:
                self._next = trio.Event()
                trio.lowlevel.spawn_system_task(self._turn, self._next)
            await self._next.wait()
            try:
                return await call(*args, **settings)
            finally:
                self._under_way -= 1

        return gated

    async def _turn(self, gate: trio.Event) -> None:
        while True:
            await trio.testing.wait_all_tasks_blocked(0.02)
            if self._under_way == 0:
                break
            await trio.sleep(0.001)
        self.count += 1
        self._next = None
        self._under_way = gate.statistics().tasks_waiting
        gate.set()


def test_64_pages_cost_few_round_trips_in_sequence(near: Namespace, monkeypatch: pytest.MonkeyPatch) -> None:
    store, reader = near.open(PAGE, lease_s=60), near.open(PAGE, lease_s=60)
    for one in (store, reader):  # each sweeps once it is open
        calls = -1
        while calls != (calls := backend_of(one)._fs.stats()["master_calls"]):
            time.sleep(0.2)
    rounds, reads = (Rounds(backend_of(one)._fs.filesystem._session.masters) for one in (store, reader))
    keys, content, got = store.keys(range(16 * 64)), pages(PAGE, 64), empty(PAGE, 64)
    assert all(store.put(keys, content).result())
    # Asked once; then for each of two batches files, blocks, completion, directories and names.
    assert rounds.count <= 1 + 2 * 5
    hit = reader.lookup(keys)
    assert hit.pages == 64
    assert reads.count == 1
    assert all(reader.get(keys, got, lookup=hit).result())
    assert got == content
    assert reads.count == 1  # by the locations that the lookup got
    assert all(reader.get(keys, got).result())
    assert reads.count == 2


@pytest.mark.parametrize("direct", [True, False])
def test_durable_objects_are_synced_before_they_are_complete(near: Namespace, far: Namespace, direct: bool) -> None:
    events: list[str] = []

    class Watched(RealDisk):
        def pwritev(self, fd: int, buffers: Any, offset_bytes: int, flags: int = 0) -> int:
            events.append(f"write {os.readlink(f'/proc/self/fd/{fd}')}")
            return super().pwritev(fd, buffers, offset_bytes, flags)

        def fdatasync(self, fd: int) -> None:
            events.append(f"sync {os.readlink(f'/proc/self/fd/{fd}')}")
            super().fdatasync(fd)

    settings: dict[str, Any] = {"durability": "publish", "direct": direct, "engine": "threads"}
    store = near.open(PAGE, world=World(disk=Watched()), **settings)
    backend = store._backend
    assert isinstance(backend, CurvineBackend)
    commit = backend._fs.filesystem.commit_extents_many

    async def watched(extents: Sequence[Any]) -> Any:
        events.extend(f"complete {os.readlink(f'/proc/self/fd/{extent.local.fd}')}" for extent in extents)
        return await commit(extents)

    backend._fs.filesystem.commit_extents_many = watched  # type: ignore[method-assign]
    events.clear()
    keys, content, got = store.keys(range(16 * 5)), pages(PAGE, 5), empty(PAGE, 5)
    assert all(store.put(keys, content).result())
    completed = [event.removeprefix("complete ") for event in events if event.startswith("complete ")]
    assert len(completed) == 5
    for file in completed:
        mine = [event.partition(" ")[0] for event in events if event.endswith(file)]
        assert mine[-2:] == ["sync", "complete"]
    assert all(store.get(keys, got).result())
    assert got == content
    with pytest.raises(EnvironmentError_, match=r"durability='publish' is refused: .* remote"):
        far.open(PAGE, **settings)
    plain = near.open(PAGE, world=World(disk=Watched()), direct=direct)
    events.clear()
    assert all(plain.put(plain.keys(range(1000, 1016)), content[:1]).result())
    assert not [event for event in events if event.startswith("sync")]


def test_an_object_that_turns_out_to_be_remote_is_not_called_durable(near: Namespace) -> None:
    store = near.open(PAGE, durability="publish")
    backend = store._backend
    assert isinstance(backend, CurvineBackend)
    backend.local_file = lambda *_, **__: None  # type: ignore[method-assign]
    transfer = store.put(store.keys(range(16)), pages(PAGE, 1))
    assert transfer.result() == [Miss.IO]
    assert "does not sync" in str(transfer.error(0))
    assert near.objects() == near.staged() == []


def test_blocks_stay_open_only_so_long(near: Namespace) -> None:
    store = near.open(PAGE, lease_s=0.2)
    keys, content, got = store.keys(range(16 * 300)), pages(PAGE, 300), empty(PAGE, 300)
    assert all(store.put(keys, content).result())
    before = len(os.listdir("/proc/self/fd"))
    assert all(store.get(keys, got).result())
    assert 200 <= len(os.listdir("/proc/self/fd")) - before <= 300
    time.sleep(0.3)
    assert all(store.get(keys[:2], got[:2]).result())
    assert len(os.listdir("/proc/self/fd")) - before <= 60
    assert got == content


def test_page_4_of_512_is_gone(near: Namespace) -> None:
    page = Geometry.raw(4096, page_tokens=4)
    store, evictor = near.open(page), near.open(page)
    keys = store.keys(range(4 * 512))
    assert all(store.put(keys, [bytes(4096)] * 512).result())
    hit = store.lookup(keys)
    assert hit.pages == 512
    for gone in (4, 3, 0):
        assert evictor.evict(keys[gone : gone + 1]) == [True]
        assert near.open(page).lookup(keys).pages == gone
    # What was promised before is still to be had.
    got = [bytearray(4096) for _ in keys]
    assert store.get(keys, got, lookup=hit).result() == [4096] * 512
    assert evictor.evict(keys).count(True) == 509
    assert store.get(keys, got, lookup=hit).result() == [4096] * 512


def test_a_lookup_ends_in_time_when_the_server_does_not_answer(tmp_path: Path) -> None:
    with serving(tmp_path) as master:
        server = json.loads((tmp_path / "server.json").read_text())["pid"]
        with kvstore.open(f"curvine://{master}/", WHOSE, geometry=PAGE, lookup_timeout_s=0.5, lease_s=1e-6) as store:
            keys = store.keys(range(64))
            assert all(store.put(keys, pages(PAGE, 4)).result())
            assert store.lookup(keys).pages == 4
            os.kill(server, signal.SIGSTOP)
            try:
                begun = time.monotonic()
                assert store.lookup(keys).pages == 0
                assert time.monotonic() - begun < 4
            finally:
                os.kill(server, signal.SIGCONT)
            deadline = time.monotonic() + 20
            while store.lookup(keys).pages < 4:
                assert time.monotonic() < deadline
                time.sleep(0.05)
