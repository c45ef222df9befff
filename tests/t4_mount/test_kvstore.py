"""kvstore on a mount, as on any directory; and beside kvstore on the namespace itself."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import kvstore
from kvstore import Geometry, Identity, KVStore, Miss
from tests.t3_kvstore.places import empty, pages, untouched
from tests.t4_mount.mounts import Mount, mounted, wait_for

PAGE = Geometry.attention(layers=2, kv_heads=2, head_dim=64, dtype="float16", page_tokens=16)


@pytest.fixture
def store(mount: Mount, request: pytest.FixtureRequest) -> Iterator[KVStore]:
    """A store on the mount as a directory, with names of its own."""
    with on_mount(mount, request.node.name) as one:
        yield one


def on_mount(mount: Mount, model: str, **settings: Any) -> KVStore:
    whose = Identity.of(PAGE, model=model, revision="r")
    return kvstore.open(mount.path.as_uri(), whose, geometry=PAGE, **settings)


def test_a_mount_is_a_directory_like_any_other(store: KVStore) -> None:
    keys, content, got = store.keys(list(range(16 * 40))), pages(PAGE, 40), empty(PAGE, 40)
    assert store.put(keys, content).result() == [PAGE.size_bytes] * 40
    hit = store.lookup(keys)
    assert hit.pages == 40
    assert all(store.get(keys, got, lookup=hit).result())
    assert got == content
    assert all(store.put(keys, content).result())
    assert store.stats().puts_existing == 40
    assert len(store.list().pages) == store.usage().objects == 40
    # What was promised and evicted is still to be had; what was deleted is not.
    assert store.evict(keys[:5]) == [True] * 5
    got = empty(PAGE, 40)
    assert all(store.get(keys, got, lookup=hit).result())
    assert got == content
    assert store.delete(keys[5:7]) == [True] * 2
    assert store.get(keys[:8], empty(PAGE, 8)).result() == [Miss.ABSENT] * 7 + [PAGE.size_bytes]
    assert store.stats().failing_puts == 0


def test_objects_on_a_mount_are_the_namespaces_objects(store: KVStore, pool: Path, mount: Mount) -> None:
    address = json.loads((pool / "server.json").read_text())
    url = f"curvine://127.0.0.1:{address['master_port']}/"
    keys, content = store.keys(list(range(16 * 20))), pages(PAGE, 20)
    assert all(store.put(keys[:10], content[:10]).result())
    with kvstore.open(url, store._chain.identity, geometry=PAGE) as native:
        assert native.lookup(keys).pages == 10
        assert all(native.put(keys, content).result())
        assert native.stats().puts_existing == 10
        got = empty(PAGE, 20)
        assert all(native.get(keys, got).result())
        assert got == content
        wait_for(lambda: store.exists(keys) == [True] * 20)
        got = empty(PAGE, 20)
        assert all(store.get(keys, got).result())
        assert got == content
        # Published, so sealed, whoever did it.
        for key in (keys[0], keys[19]):
            path = mount.kv / store.object_name(key)
            with pytest.raises(PermissionError):
                os.close(os.open(path, os.O_WRONLY))
        assert native.delete(keys[:1]) == [True]
        wait_for(lambda: store.exists(keys[:1]) == [False])


def test_a_mount_whose_process_is_stopped_is_a_deadline(tmp_path: Path) -> None:
    with mounted(tmp_path, "--embedded", tmp_path / "pool") as mount:
        store = on_mount(mount, "m", depth=4, lease_s=1e-6, lookup_timeout_s=0.5)
        keys, content = store.keys(list(range(16 * 20))), pages(PAGE, 20)
        assert all(store.put(keys, content).result())
        outcomes: list[tuple[list[Any], list[bytearray]]] = []

        def call() -> None:
            got = empty(PAGE, 20)
            outcomes.append((store.get(keys, got, timeout_s=0.5).result(), got))

        mount.process.send_signal(signal.SIGSTOP)
        begun = time.monotonic()
        try:
            callers = [threading.Thread(target=call) for _ in range(32)]
            for caller in callers:
                caller.start()
            for caller in callers:
                caller.join(30)
            assert store.lookup(keys).pages == 0
            storing = store.put(store.keys(list(range(1000, 1064))), pages(PAGE, 4), timeout_s=0.5)
            assert storing.result() == [Miss.DEADLINE] * 4
            assert time.monotonic() - begun < 15
            assert store.stats().in_flight > 0
        finally:
            mount.process.send_signal(signal.SIGCONT)
        assert [results for results, _ in outcomes] == [[Miss.DEADLINE] * 20] * 32
        wait_for(lambda: store.stats().in_flight == 0, 30, "the end of what was under way")
        assert all(untouched(got) for _, got in outcomes)
        got = empty(PAGE, 20)
        # It may be left alone for a moment, once so many calls had failed.
        wait_for(lambda: all(store.get(keys, got).result()), 30, "the mount's return")
        assert got == content
        wait_for(lambda: store.lookup(keys).pages == 20, 30)
        assert store.close()
