"""Files that expire (specification section 4.20): on both stores, on a clock that is moved, and once for real."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import trio
from raw_client import CLIENT, Raw, connected
from t2_client.test_server_process import block_files, fails, master_of, put, serving, worker_of

from curvfs.errors import CurvfsError
from curvfs.server.metastore import EXPIRED_AT_ONCE, MemoryMetaStore, MetaStore
from curvfs.server.namespace import AttrChange, Namespace, NodeOptions
from curvfs.server.records import TTL_DELETE, TTL_FREE, TTL_NONE, Policy
from curvfs.server.service import run_server
from curvfs.server.sqlitestore import SqliteMetaStore
from curvfs.wire.codes import RpcCode
from curvfs.wire.messages import pb
from curvfs.world import RealClock, World

CREATE = 0x41
FILE = NodeOptions(mode=0o644, create_parent=True, block_size_bytes=1 << 20, writer=CLIENT)


@contextmanager
def names_in(store: MetaStore, now: Callable[[], int]) -> Iterator[Namespace]:
    yield Namespace(store, now)
    store.close()


@pytest.mark.parametrize("kind", ["memory", "sqlite"])
def test_what_expires_and_when(kind: str, tmp_path: Path) -> None:
    now_ms = 1_000
    store = MemoryMetaStore() if kind == "memory" else SqliteMetaStore(str(tmp_path / "meta.db"))
    with names_in(store, lambda: now_ms) as names:

        def expired() -> set[str]:
            return {name for _, name, _ in store.expired(now_ms)}

        def make(path: str, ttl_ms: int, action: int = TTL_DELETE) -> None:
            names.create(path, replace(FILE, policy=Policy(ttl_ms=ttl_ms, ttl_action=action)), CREATE)

        make("/d/soon", 10)
        make("/d/later", 1 << 40)
        make("/never", 0)
        make("/negative", -5)
        make("/kept", 10, TTL_NONE)
        make("/freed", 10, TTL_FREE)
        names.create("/told", FILE, CREATE)
        names.set_attr("/told", AttrChange(ttl_ms=10, ttl_action=TTL_DELETE))
        names.link("/d/soon", "/second name")
        names.symlink("/d/soon", "/link", False, 0o777, "", "")
        names.mkdir("/directory", NodeOptions(policy=Policy(ttl_ms=10, ttl_action=TTL_DELETE)))
        now_ms = 1_009
        assert expired() == set()
        now_ms = 1_010
        assert expired() == {"soon", "second name", "told"}
        found = store.expired(now_ms)
        # What happened since decides: one has been touched, the other has been replaced.
        names.set_attr("/told", AttrChange(mtime_ms=2_000))
        names.delete("/d/soon", False)
        make("/d/soon", 1_000)
        assert [entry[1] for entry in found if names.expire(*entry)] == ["second name"]
        assert names.find("/second name") is None
        assert {path for path, _ in names.list_status("/d")} == {"/d/soon", "/d/later"}
        now_ms = 2_010
        assert expired() == {"soon", "told"}
        now_ms += 1 << 40
        assert expired() == {"soon", "told", "later"}


@pytest.mark.parametrize("kind", ["memory", "sqlite"])
def test_a_store_tells_a_bounded_number_at_a_time(kind: str, tmp_path: Path) -> None:
    store = MemoryMetaStore() if kind == "memory" else SqliteMetaStore(str(tmp_path / "meta.db"))
    with names_in(store, lambda: 0) as names:
        first = names.create("/first", replace(FILE, policy=Policy(ttl_ms=1, ttl_action=TTL_DELETE)), CREATE)
        draft = names.draft()
        for index in range(EXPIRED_AT_ONCE + 5):
            draft.add(1000, f"f{index}", first._replace(id=draft.new_inode_id()))
        names.commit(draft)
        assert len(store.expired(1)) == EXPIRED_AT_ONCE


class MovedClock(RealClock):
    """The real clock, some time later; sleepers of a minute and more wake when it is moved."""

    def __init__(self) -> None:
        self._ahead_ms = 0
        self._moved = trio.Event()

    def time_ms(self) -> int:
        return super().time_ms() + self._ahead_ms

    async def sleep(self, duration_s: float) -> None:
        wakes_ms = self.time_ms() + duration_s * 1000
        if duration_s < 60:
            await super().sleep(duration_s)
            return
        while self.time_ms() < wakes_ms:
            await self._moved.wait()

    def move(self, by_s: float) -> None:
        self._ahead_ms += int(by_s * 1000)
        moved, self._moved = self._moved, trio.Event()
        moved.set()


async def exists(raw: Raw, path: str) -> bool:
    return bool((await raw.call(RpcCode.EXISTS, pb.ExistsRequest(path=path))).exists)


async def gone(raw: Raw, path: str) -> None:
    with trio.fail_after(10):
        while await exists(raw, path):
            await trio.sleep(0.01)


def policy(ttl_s: float, action: int = TTL_DELETE) -> pb.StoragePolicyProto:
    return pb.StoragePolicyProto(ttl_ms=int(ttl_s * 1000), ttl_action=pb.TtlActionProto.ValueType(action))


async def test_expired_files_go_once_an_hour(tmp_path: Path) -> None:
    clock = MovedClock()
    async with trio.open_nursery() as nursery:
        start = partial(run_server, str(tmp_path), master_port=0, worker_port=0)
        server = await nursery.start(partial(start, world=replace(World.real(), clock=clock)))
        async with connected(server.host, server.master_port) as raw:
            for path, ttl_s in (("/minutes", 600), ("/hours", 7500), ("/freed", 600)):
                action = TTL_FREE if path == "/freed" else TTL_DELETE
                await raw.create(path, storage_policy=policy(ttl_s, action))
                await raw.complete(path, 0)
            await raw.mkdir("/dir", storage_policy=policy(600))
            await trio.sleep(0.1)  # the check at start
            clock.move(3000)
            await trio.sleep(0.1)
            assert await exists(raw, "/minutes"), "expired, and nobody has looked yet"
            clock.move(601)
            await gone(raw, "/minutes")
            assert await exists(raw, "/hours")
            clock.move(3601)  # not expired: 7202 s have passed
            await trio.sleep(0.1)
            assert await exists(raw, "/hours")
            clock.move(3601)
            await gone(raw, "/hours")
            assert await exists(raw, "/freed") and await exists(raw, "/dir")
        nursery.cancel_scope.cancel()


async def test_a_store_that_fails_is_asked_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lines: list[str] = []
    failures = 2
    original = SqliteMetaStore.expired

    def failing(self: SqliteMetaStore, now_ms: int) -> list[tuple[int, str, int]]:
        nonlocal failures
        if failures:
            failures -= 1
            raise CurvfsError("The disk is gone.")
        return original(self, now_ms)

    monkeypatch.setattr(SqliteMetaStore, "expired", failing)
    async with trio.open_nursery() as nursery:
        server = await nursery.start(
            partial(
                run_server,
                str(tmp_path),
                master_port=0,
                worker_port=0,
                ttl_check_interval_s=0.05,
                log=lines.append,
            )
        )
        async with connected(server.host, server.master_port) as raw:
            await raw.create("/f", storage_policy=policy(0.001))
            await gone(raw, "/f")
            with trio.fail_after(5):
                while not any("1 expired files were deleted" in line for line in lines):
                    await trio.sleep(0.01)
        nursery.cancel_scope.cancel()
    assert failures == 0 and any("The disk is gone." in line for line in lines)


async def test_for_real_in_a_process_with_its_blocks_and_across_a_restart(tmp_path: Path) -> None:
    def expiring(path: str, ttl_s: float) -> pb.SetAttrRequest:
        action = pb.TtlActionProto.ValueType(TTL_DELETE)
        return pb.SetAttrRequest(path=path, opts=pb.SetAttrOptsProto(ttl_ms=int(ttl_s * 1000), ttl_action=action))

    with serving(tmp_path, "--ttl-check-interval", "100ms") as process:
        async with master_of(process) as master, worker_of(process) as worker:
            for path, ttl_s in (("/soon", 0.5), ("/later", 2.5), ("/kept", 3600)):
                await put(master, worker, path, b"x" * 1000)
                await master.call(RpcCode.SET_ATTR, expiring(path, ttl_s))
            await gone(master, "/soon")
            with trio.fail_after(10):
                while len(block_files(tmp_path)) != 2:
                    await trio.sleep(0.02)
            assert await exists(master, "/later")
        process.end()
    await trio.sleep(2.5)
    with serving(tmp_path) as process:  # with the interval of an hour, but the first look is at start
        async with master_of(process) as master:
            await gone(master, "/later")
            assert await exists(master, "/kept")


@pytest.mark.parametrize("interval", ["0", "often", "-1s"])
def test_intervals_that_mean_nothing(tmp_path: Path, interval: str) -> None:
    code, said = fails(tmp_path / "p", f"--ttl-check-interval={interval}")
    assert code == 2 and interval.removesuffix("s") in said
    assert not (tmp_path / "p").exists()
