"""What a store tells onlookers: its record in the run directory, and metrics for Prometheus."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy
import prometheus_client
import pytest

from curvfs.runrecords import running
from curvfs.world import World
from kvstore import Geometry, KVStore, Miss, PageKey
from kvstore.metrics import register
from kvstore.stats import Counters
from tests.t3_kvstore.places import Directory

GEOMETRY = Geometry.attention(layers=2, kv_heads=2, head_dim=8, dtype="float16", page_tokens=4)


def eventually(found: Callable[[], Any]) -> Any:
    for _ in range(500):
        if result := found():
            return result
        time.sleep(0.02)
    raise AssertionError("it did not come")


def page() -> list[Any]:
    return [numpy.ones(spec.shape, numpy.float16) for spec in GEOMETRY.tensors]


def used(store: KVStore) -> list[PageKey]:
    """Two pages put and got, one that is absent."""
    keys = store.keys(range(12))
    assert all(store.put(keys[:2], [page(), page()]).result())
    hit = store.lookup(keys)
    assert hit.pages == 2
    assert all(store.get(keys[:2], [page(), page()], lookup=hit).result())
    assert store.get(keys[2:], [page()]).result() == [Miss.ABSENT]
    return keys


def test_the_record_of_a_store_follows_it(directory: Directory, monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    monkeypatch.setenv("CURVFS_RUN_DIR", str(tmp_path / "run"))
    store = directory.open(GEOMETRY, model="some model")
    used(store)

    def seen() -> Any:
        return [record for record in running(World.real(), "kvstore") if record["stats"]["gets"] == 2]

    (record,) = eventually(seen)
    assert record["url"] == directory.url and record["model"] == "some model" and record["shard"] == ""
    assert record["stats"]["get_misses"] == {"absent": 1}
    assert record["stats"]["latencies"]["put"]["count"] == 2
    store.close()
    eventually(lambda: running(World.real()) == [])


def test_the_metrics_of_all_stores_of_a_process(directory: Directory) -> None:
    registry = prometheus_client.CollectorRegistry()
    leave = register(registry)
    one, other = directory.open(GEOMETRY, model="one"), directory.open(GEOMETRY, model="other")
    used(one)

    def value(name: str, store: KVStore, **labels: str) -> float | None:
        labels = {"store": store._namespace, "backend": "posix", "shard": "", **labels}
        return registry.get_sample_value(f"curvfs_kv_{name}", labels)

    assert value("puts_total", one) == 2 and value("puts_total", other) == 0
    assert value("get_misses_total", one, cause="absent") == 1
    assert value("lookup_pages_total", one) == 2
    assert value("latency_seconds_count", one, call="get") == 2
    assert value("latency_seconds_bucket", one, call="lookup", le="+Inf") == 1
    other.close()
    assert value("puts_total", one) == 2 and value("puts_total", other) is None
    leave()


def test_latencies_count_what_was_delivered(directory: Directory) -> None:
    store = directory.open(GEOMETRY)
    used(store)
    latencies = store.stats().latencies
    assert {call: record["count"] for call, record in latencies.items()} == {"put": 2, "get": 2, "lookup": 1}
    assert all(0 < record["p50_s"] <= record["p99_s"] <= record["max_s"] < 30 for record in latencies.values())


def test_slow_calls_are_kept_newest_first() -> None:
    counters = Counters(World.real())
    counters.looked_up(3, 0.2)
    for number in range(8):
        counters.get_done(100 + number, None, 1.5 + number)
    counters.put_done(Miss.DEADLINE, None, 5.0)
    slow = counters.slow_calls()
    assert [(call["operation"], call["about"], call["took_s"]) for call in slow] == [
        ("put", "deadline", 5.0),
        *(("get", f"{100 + number} bytes", 1.5 + number) for number in (7, 6, 5, 4)),
    ]
