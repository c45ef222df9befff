"""What LMCache's native client is made of, without LMCache: sizes, models, eviction, faults."""

from __future__ import annotations

import logging
import select
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from curvfs.errors import ConfigError
from kvstore.connectors.lmcache_config import check
from kvstore.connectors.lmcache_native import LAYOUT, KvstoreClient
from kvstore.connectors.lmcache_shelf import Item, Shelf

SIZES = (4096, 100_000, 7)


@pytest.fixture
def client(tmp_path: Path) -> Iterator[KvstoreClient]:
    one = KvstoreClient(url=f"file://{tmp_path}", dtype="bfloat16", revision="1", timeout_s=20)
    yield one
    one.close()


def completed(client: KvstoreClient, number: int) -> tuple[int, bool, str, list[bool] | None]:
    """The completion of a call, once the descriptor says that there is one."""
    assert select.select([client.event_fd()], [], [], 20)[0]
    (completion,) = client.drain_completions()
    assert completion[0] == number
    assert not select.select([client.event_fd()], [], [], 0)[0]
    return completion


def keys(count: int, model: str = "org/model") -> list[str]:
    return [f"{model}@01000100@0@{number:064x}" for number in range(count)]


def payloads() -> list[bytes]:
    return [bytes([number + 1]) * size for number, size in enumerate(SIZES)]


def test_objects_of_any_length_in_one_call(client: KvstoreClient) -> None:
    names = keys(3)
    assert completed(client, client.submit_batch_set(names, payloads())) == (1, True, "", [True] * 3)
    asked = [*keys(5), names[1] + "@tenant", names[1].replace("model", "other")]
    found = completed(client, client.submit_batch_exists(asked))
    assert found == (2, True, "", [True] * 3 + [False] * 4)
    buffers = [bytearray(size) for size in (*SIZES, 5)]
    loaded = completed(client, client.submit_batch_get(keys(4), buffers))
    assert loaded == (3, True, "", [True] * 3 + [False])
    assert [bytes(buffer) for buffer in buffers] == [*payloads(), bytes(5)]
    assert completed(client, client.submit_batch_delete([names[0], keys(9)[8]])) == (4, True, "", [True, False])
    assert completed(client, client.submit_batch_exists(names))[3] == [False, True, True]


def test_a_buffer_of_another_length_stays_as_it_is(client: KvstoreClient) -> None:
    completed(client, client.submit_batch_set(keys(1), [b"x" * 4096]))
    buffer = bytearray(5000)
    assert completed(client, client.submit_batch_get(keys(1), [buffer]))[3] == [False]
    assert bytes(buffer) == bytes(5000)


def test_found_with_gaps_and_readable_after_eviction(tmp_path: Path) -> None:
    shelf = shelf_at(f"file://{tmp_path}")
    try:
        items = [Item("m", "bfloat16", key, bytearray(b"y" * 4096)) for key in keys(12)]
        stored = [item for number, item in enumerate(items) if number % 3 != 1]
        assert all(shelf.put(stored, shelf.until_s()))
        promised = shelf.look(items, shelf.until_s())
        assert [found is not None for found in promised] == [number % 3 != 1 for number in range(12)]
        assert shelf.evict(items) == [number % 3 != 1 for number in range(12)]
        assert shelf.look(items, shelf.until_s()) == [None] * 12
        empty = [item._replace(buffer=bytearray(4096)) for item in items]
        results = shelf.get(empty, shelf.until_s(), promised)
        assert [bool(result) for result in results] == [number % 3 != 1 for number in range(12)]
        assert not any(shelf.get(empty, shelf.until_s()))
    finally:
        shelf.close()
    assert not any(shelf.put(items, time.monotonic() + 5))


def test_what_cannot_be_told_is_asked_for(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(ConfigError, match='set "dtype" in LMCache\'s "adapter_params"'):
        KvstoreClient(url=f"file://{tmp_path}")
    with pytest.raises(ConfigError, match='set "url" in LMCache\'s "adapter_params"'):
        KvstoreClient(dtype="bfloat16")
    with pytest.raises(ConfigError, match="'deepth' in LMCache's \"adapter_params\" is not a setting"):
        KvstoreClient(url=f"file://{tmp_path}", dtype="bfloat16", deepth=3)
    client = KvstoreClient(url=f"file://{tmp_path}", dtype="bfloat16")
    try:
        for _ in range(2):
            number = client.submit_batch_set(keys(1, "/no/such/model"), [b"z"])
            _, worked, reason, per_key = completed(client, number)
            assert (worked, per_key) == (False, [False])
            assert 'set "revision" in LMCache\'s "adapter_params"' in reason
    finally:
        client.close()
    assert len([record for record in caplog.records if "revision" in record.getMessage()]) == 1


def test_a_pool_that_is_not_there_yet(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The server starts without it; everything is a miss, and the log says why."""
    shelf = shelf_at("curvine://127.0.0.1:1/pool", timeout_s=5)
    try:
        assert "cannot be used yet" in shelf.last_error
        items = [Item("m", "bfloat16", key, bytearray(10)) for key in keys(2)]
        assert shelf.look(items, shelf.until_s()) == [None, None]
        assert not any(shelf.put(items, shelf.until_s()))
        assert "neither stored nor found" in shelf.last_error
    finally:
        shelf.close()
    assert caplog.records


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"use_layerwise": True}, "set use_layerwise to false in LMCache's configuration"),
        ({"remote_serde": "cachegen"}, "set remote_serde to naive, not cachegen, in LMCache's configuration"),
    ],
    ids=str,
)
def test_what_the_engine_asks_for_and_cannot_have_is_refused(changes: dict[str, object], sentence: str) -> None:
    words = {"use_layerwise": False, "remote_serde": "naive", "pre_caching_hash_algorithm": "sha256_cbor"}
    check(SimpleNamespace(**words), logging.getLogger("kvstore"))
    with pytest.raises(ConfigError, match=sentence):
        check(SimpleNamespace(**{**words, **changes}), logging.getLogger("kvstore"))


@pytest.mark.parametrize("chain_hash", ["sha256", "xxh3_128"])
def test_what_each_salt_takes_of_the_pool_is_known_after_a_restart(tmp_path: Path, chain_hash: str) -> None:
    """Also what others stored; of a salt that was not seen here only that it takes room."""
    salts = ("", "a tenant", "an@other")

    def items(salt: str, count: int) -> list[Item]:
        return [
            Item("m", "bfloat16", f"{key}@{salt}" if salt else key, bytearray(9000 * count)) for key in keys(count, "m")
        ]

    sizes: dict[str, int] = {}
    shelf = shelf_at(f"file://{tmp_path}", chain_hash=chain_hash)
    try:
        for number, salt in enumerate(salts, 1):
            before = stored_bytes(tmp_path)
            assert all(shelf.put(items(salt, number), shelf.until_s()))
            sizes[salt] = stored_bytes(tmp_path) - before
    finally:
        shelf.close()
    assert len(set(sizes.values())) == 3

    shelf = shelf_at(f"file://{tmp_path}", chain_hash=chain_hash)
    try:
        assert "pool_bytes" not in shelf.status()
        for salt in salts[:2]:
            assert None not in shelf.look(items(salt, 1), shelf.until_s())
        begin = time.monotonic()
        while "pool_bytes" not in (status := shelf.status()):
            assert time.monotonic() - begin < 20
            time.sleep(0.01)
        assert status["pool_bytes"] == sum(sizes.values())
        known = {salt: sizes[salt] for salt in salts[:2]} if chain_hash == "sha256" else {}
        assert status["pool_bytes_by_cache_salt"] == known
        assert 0 <= status["pool_counted_s_ago"] < 20
    finally:
        shelf.close()


def stored_bytes(directory: Path) -> int:
    return sum(path.stat().st_size for path in directory.rglob("*.safetensors"))


def shelf_at(url: str, **settings: Any) -> Shelf:
    return Shelf({"url": url, "revision": "1", **settings}, where="the test", layout=LAYOUT)
