"""vLLM's real tiering manager on our tier, on a real pool; and vLLM's own tests with our tier registered, and on the
mount."""

from __future__ import annotations

import os
import shutil
import signal
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from places import ROOT, SOURCES, Server, nothing_left, served
from suites import ran
from tiering import CHUNK_BYTES, Tiering, keys_of, offloading_config
from vllm.plugins import load_general_plugins
from vllm.v1.kv_offload.factory import OffloadingSpecFactory
from vllm.v1.kv_offload.tiering.factory import SecondaryTierFactory
from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec

from curvfs.errors import ConfigError
from curvfs.world import World
from kvstore.connectors.vllm_identity import EngineFacts, pages_of

KEYS = keys_of(range(5))
STORED = {key: os.urandom(CHUNK_BYTES) for key in KEYS}
TESTS = SOURCES / "vllm-0.33.0" / "tests"

#: What a scheduler step may lose to a call of ours, on a machine that does much else.
MOST_S = 0.5


@pytest.fixture(scope="module", autouse=True)
def plugin() -> None:
    """As vLLM does at start; it finds us by our entry point."""
    load_general_plugins()


@pytest.fixture
def url(server: Server, request: pytest.FixtureRequest) -> str:
    """A place of each test's own in the session's pool."""
    return f"{server.url}/{request.node.name.translate(str.maketrans('[]/', '---'))}"


def tier(url: str, **settings: Any) -> dict[str, Any]:
    return {"type": "curvfs", "url": url, "revision": "1", "direct": False, **settings}


@pytest.mark.parametrize(
    "settings",
    [{}, {"loan": True}, {"type": "KvstoreTier", "module_path": "kvstore.connectors.vllm"}, {"type": "fs"}],
    ids=["by entry point", "on loan", "by module path", "vLLM's fs"],
)
def test_chunks_come_back_bit_equal(url: str, tmp_path: Path, settings: dict[str, Any]) -> None:
    """Stored by one engine, found by the next; vLLM's own tier beside ours."""
    place = {"type": "fs", "root_dir": str(tmp_path)} if settings.get("type") == "fs" else tier(url, **settings)
    with Tiering(place) as one:
        one.store(STORED)
        written = one.manager.get_stats().reduce()
        label = f"('1:{place['type']}',)"
        assert written[f"vllm:kv_offload_tiering_write_bytes:{label}"] == len(KEYS) * CHUNK_BYTES
    with Tiering(place) as two:
        told = two.look_up([*KEYS, *keys_of([99])])
        assert told == [["RETRY", "HIT_PENDING", "HIT"]] * len(KEYS) + [["RETRY", "MISS"]]
        assert two.read(KEYS) == list(STORED.values())
        read = two.manager.get_stats().reduce()
        assert read[f"vllm:kv_offload_tiering_read_bytes:{label}"] == len(KEYS) * CHUNK_BYTES
        if place["type"] != "fs":
            assert two.tier._store.stats().loans_copied == 0


def test_what_is_there_is_not_written_again(url: str) -> None:
    with Tiering(tier(url)) as one:
        one.store(STORED)
    with Tiering(tier(url)) as two:
        two.store(STORED)
        assert two.manager.get_stats().reduce()["vllm:kv_offload_curvfs_stores_existing:('curvfs',)"] == len(KEYS)


def damage(one: Tiering, directory: Path, key: bytes) -> None:
    store = one.tier._store
    path = directory / "kv" / store.object_name(store.foreign_key(bytes(key)))
    content = bytearray(path.read_bytes())
    content[-8192:] = bytes(byte ^ 0xFF for byte in content[-8192:])
    path.write_bytes(content)


@pytest.mark.parametrize("loan", [False, True])
def test_damage_is_a_miss_and_the_others_arrive(tmp_path: Path, loan: bool) -> None:
    place = tier(f"file://{tmp_path}", loan=loan, enable_kv_events=True)
    with Tiering(place, events=True) as one:
        one.store(STORED)
        events = [event for event in one.manager.take_events() if event.medium.name == "STORAGE"]
        assert [(event.keys, event.removed) for event in events] == [(KEYS, False)]
        damage(one, tmp_path, KEYS[2])
    with Tiering(place, events=True) as two:
        told = two.look_up(KEYS)
        assert [words[-1] for words in told] == ["HIT", "HIT", "MISS", "HIT", "HIT"]
        others = [key for key in KEYS if key != KEYS[2]]
        assert two.read(others) == [STORED[key] for key in others]
        events = [event for event in two.manager.take_events() if event.medium.name == "STORAGE"]
        assert [(event.keys, event.removed) for event in events] == [([KEYS[2]], True)]
        stats = two.manager.get_stats().reduce()
        assert stats["vllm:kv_offload_curvfs_load_misses:('curvfs', 'damaged')"] == 1
        assert stats["vllm:kv_offload_tiering_promotion_job_failures:('1:curvfs',)"] == 1


def test_a_pool_that_hangs_blocks_nobody(tmp_path: Path, tell: Callable[[str], None]) -> None:
    """With the server stopped in the middle of loads, stores and lookups every call of the scheduler comes back at
    once; lookups become misses, jobs end at their deadlines. A call that waited would take a second at least."""
    with served(tmp_path / "pool") as server:
        place = tier(server.url, lookup_timeout_s=1, timeout_s=2)
        with Tiering(place) as one:
            one.store(STORED)
        with Tiering(place) as two:
            assert two.look_up(KEYS[:1]) == [["RETRY", "HIT_PENDING", "HIT"]]
            request = two.found_in_tier(KEYS[1])
            two.time_calls()
            os.kill(server.process.pid, signal.SIGSTOP)
            try:
                begin = time.monotonic()
                two.submit({key: bytes(CHUNK_BYTES) for key in keys_of(range(10, 13))})
                told = two.look_up(KEYS[1:], timeout_s=30)
                assert [words[0] for words in told] == ["HIT_PENDING", *["RETRY"] * 3]
                assert {words[-1] for words in told} == {"MISS"}
                two.until(lambda: not two.manager._transfer_jobs, timeout_s=30)
                stood_s = time.monotonic() - begin
            finally:
                os.kill(server.process.pid, signal.SIGCONT)
            two.finish(request)
            longest, median = max(two.calls), statistics.median(two.calls)
            tell(
                f"while a pool stood still for {stood_s:.1f} s, vLLM's scheduler made {len(two.calls)} calls of the"
                f" tier: median {median * 1e6:.0f} us, longest {longest * 1e3:.1f} ms"
            )
            assert longest < MOST_S
            stats = two.manager.get_stats().reduce()
            assert stats["vllm:kv_offload_curvfs_store_failures:('curvfs', 'deadline')"] == 3
            begin = time.monotonic()
            while {words[-1] for words in two.look_up(KEYS[1:])} != {"HIT"}:
                assert time.monotonic() - begin < 60, "the pool is back, its chunks are not"
                time.sleep(0.1)
            assert two.read(KEYS[1:]) == [STORED[key] for key in KEYS[1:]]


def test_a_dead_pool_is_misses(tmp_path: Path) -> None:
    with served(tmp_path / "pool") as server, Tiering(tier(server.url, lookup_timeout_s=1, timeout_s=3)) as one:
        one.store(STORED)
        server.kill()
        one.time_calls()
        assert {words[-1] for words in one.look_up(keys_of(range(20, 24)))} == {"MISS"}
        one.submit({key: bytes(CHUNK_BYTES) for key in keys_of(range(10, 13))})
        one.until(lambda: not one.manager._transfer_jobs)
        assert max(one.calls) < MOST_S
        assert one.look_up(KEYS) == [["HIT"]] * len(KEYS)  # in host memory


def test_more_than_is_taken_is_dropped_not_waited_for(url: str) -> None:
    with Tiering(tier(url, max_queued=2)) as one:
        one.time_calls()
        one.store(STORED)
        dropped = one.manager.get_stats().reduce()["vllm:kv_offload_curvfs_store_failures:('curvfs', 'busy')"]
        assert dropped == 3
        assert max(one.calls) < MOST_S


def test_reset_waits_for_what_is_under_way(url: str) -> None:
    with Tiering(tier(url)) as one:
        one.submit(STORED)
        with one.manager.lock:
            one.manager.reset_cache()
        assert not one.manager._transfer_jobs
        assert one.tier._store.stats().in_flight == 0
        one.manager.on_reset_flushed()
        assert {words[-1] for words in one.look_up(KEYS)} == {"HIT"}


@pytest.mark.parametrize(
    ("changes", "settings"),
    [
        ({"model": "org/other"}, {}),
        ({"dtype": "fp8_e4m3"}, {}),
        ({"tp_size": 2}, {}),
        ({"layers": ("layer0", "layer2")}, {}),
        ({}, {"revision": "2"}),
        ({}, {"salt": "tenant"}),
        ({}, {"lora": "adapter"}),
    ],
    ids=str,
)
def test_chunks_of_others_are_not_taken(url: str, changes: dict[str, Any], settings: dict[str, Any]) -> None:
    """vLLM's keys are equal for all of these."""
    with Tiering(tier(url)) as one:
        one.store(STORED)
    with Tiering(tier(url, **settings), **changes) as two:
        assert two.look_up(KEYS) == [["RETRY", "MISS"]] * len(KEYS)


def test_ranks_that_do_not_matter_do_not_divide() -> None:
    """Where vLLM says that the bytes are the same for every split, so is the identity."""

    def layout(**changes: Any) -> str:
        config = offloading_config(tier("file:///x"), "engine", **changes)
        disk = World.real().disk
        return pages_of(config, CHUNK_BYTES, None, {"revision": "1"}, disk).layout

    assert layout(tp_size=2, is_parallelism_agnostic=True) == layout(is_parallelism_agnostic=True)
    assert layout(tp_size=2) != layout()


def test_overrides_of_the_model_divide() -> None:
    def facts(**overrides: Any) -> EngineFacts:
        text = SimpleNamespace(rope_parameters={"rope_theta": 1e6})
        words = {"hf_text_config": text, "quantization": None, "dtype": "torch.bfloat16", "revision": None}
        return EngineFacts.of(SimpleNamespace(model_config=SimpleNamespace(hf_overrides=overrides, **words)))

    assert facts() == facts()
    assert facts() != facts(rope_parameters={"rope_type": "yarn", "factor": 4.0})


def test_what_cannot_be_found_out_is_asked_for(tmp_path: Path) -> None:
    place = tier(f"file://{tmp_path}")
    del place["revision"]
    with pytest.raises(ConfigError, match=r"'org/model'.*set \"revision\" in the tier's entry of secondary_tiers"):
        Tiering(place)
    with pytest.raises(ConfigError, match=r'set "url" in the tier\'s entry of secondary_tiers in --kv-transfer-config'):
        Tiering(tier(""))
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text("{}")
    (model / "model.safetensors").write_bytes(b"weights")
    with Tiering(place, model=str(model)) as one:
        one.store(STORED)
    moved = shutil.copytree(model, tmp_path / "elsewhere" / "model")
    with Tiering(place, model=str(moved)) as two:
        assert {words[-1] for words in two.look_up(KEYS)} == {"HIT"}
    (moved / "model.safetensors").write_bytes(b"WEIGHTS")
    with Tiering(place, model=str(moved)) as three:
        assert {words[-1] for words in three.look_up(KEYS)} == {"MISS"}


def test_vllm_takes_our_metrics_and_back_pressure(url: str) -> None:
    place = tier(url, backpressure={"backpressure_cls": "EMABackpressureDetector", "policy_cls": "DropStorePolicy"})
    config = offloading_config(place, "engine")
    names = TieringOffloadingSpec.build_metric_definitions(dict(config.extra_config)).keys()
    assert "vllm:kv_offload_curvfs_load_misses" in names
    assert OffloadingSpecFactory.get_spec_cls(dict(config.extra_config)) is TieringOffloadingSpec
    assert SecondaryTierFactory.get_tier_class(place).__name__ == "KvstoreTier"
    with Tiering(place) as one:
        one.store(STORED)
        assert one.tier.bp_detector is not None


# ---------------------------------------------------------------------------------------------------- vLLM's own tests


#: Parts of names of vLLM's tests that are left out, and why.
TIMED = {
    "test_lookup_expiry_allows_zmq_reconnect": "gives vLLM's own peer-to-peer tier 5 s to connect anew, which it does"
    " not always do, even alone",
}
STARTING = {
    "mp_barrier": "starts four processes and waits for ever when they take longer than 30 s",
    "multiprocess": "starts processes and waits for ever when they take longer than 30 s",
}
DAMAGING = dict.fromkeys(
    ("verdict_and_removes_corrupt_file", "partial_load_failure_keeps", "first_block_fails_marks"),
    "damages a published file in place, which the KV prefix does not let happen",
)


WHOLE = "vLLM's tests/v1/kv_offload, our tier registered"
TIERS = "vLLM's tests of tiers, ours registered"
FILES = "vLLM's tests of its fs tier, on the mount, {} its KV prefix"


def own_tests(
    what: str,
    copy: Path,
    *names: str,
    tmp: Path,
    timeout_s: float,
    without: dict[str, str],
    tell: Callable[[str], None],
) -> dict[str, int]:
    """Run some of vLLM's tests with our tier registered; how many passed, failed and so on."""
    for name, why in without.items():
        tell(f"{name} is left out: it {why}")
    for name in ("__init__.py", "utils.py", "v1/__init__.py"):
        (copy / "tests" / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(TESTS / name, copy / "tests" / name)
    shutil.copytree(TESTS / "v1" / "kv_offload", copy / "tests" / "v1" / "kv_offload", dirs_exist_ok=True)
    (copy / "pytest.ini").write_text("[pytest]\n")
    paths = [f"tests/v1/kv_offload/{name}" for name in names]
    choose = " and ".join(f"not {name}" for name in without)
    options = ["-p", "registered", "--timeout", "150", "-k", choose, *paths]
    environment = {"TMPDIR": str(tmp), "PYTHONPATH": str(ROOT / "tests" / "engines")}
    with nothing_left("vllm_offload_*"):
        return ran(what, options, where=copy, environment=environment, timeout_s=timeout_s, tell=tell)


@pytest.mark.full
@pytest.mark.timeout(2400)
def test_vllms_own_tests_with_our_tier_registered(tmp_path: Path, tell: Callable[[str], None]) -> None:
    counts = own_tests(WHOLE, tmp_path, "", tmp=tmp_path, timeout_s=1700, without=TIMED | STARTING, tell=tell)
    assert counts["passed"] + counts.get("failed", 0) >= 800
    assert counts.get("error", 0) <= 36  # their fixtures that want a GPU


@pytest.mark.timeout(1500)
def test_vllms_own_tests_of_tiers_with_ours_registered(tmp_path: Path, tell: Callable[[str], None]) -> None:
    counts = own_tests(TIERS, tmp_path, "tiering", tmp=tmp_path, timeout_s=800, without=TIMED, tell=tell)
    assert counts["passed"] >= 550


@pytest.mark.timeout(1500)
@pytest.mark.parametrize(("folder", "number", "without"), [("kv/vllm", 59, DAMAGING), ("vllm", 62, {})])
def test_vllms_own_file_tier_tests_on_the_mount(
    mount: Path, tmp_path: Path, folder: str, number: int, without: dict[str, str], tell: Callable[[str], None]
) -> None:
    """With their temporary files inside the KV prefix and outside. Inside, published files are sealed: three tests that
    damage one in place cannot do that there."""
    (mount / folder).mkdir(parents=True, exist_ok=True)
    names = ("tiering/test_fs_tier.py", "tiering/test_factory.py", "test_file_mapper.py")
    what = FILES.format("outside" if folder == "vllm" else "inside")
    copy, there = tmp_path, mount / folder
    counts = own_tests(what, copy, *names, tmp=there, timeout_s=800, without=without, tell=tell)
    assert counts["passed"] >= number


@pytest.mark.parametrize("folder", ["kv/vllm-fs", "vllm-fs"])
def test_vllms_file_tier_on_the_mount(mount: Path, folder: str) -> None:
    place = {"type": "fs", "root_dir": str(mount / folder), "n_read_threads": 2, "n_write_threads": 2}
    with Tiering(place) as one:
        one.store(STORED)
    with Tiering(place) as two:
        begin = time.monotonic()
        assert {words[-1] for words in two.look_up(KEYS)} == {"HIT"}
        assert time.monotonic() - begin < 60
        assert two.read(KEYS) == list(STORED.values())
