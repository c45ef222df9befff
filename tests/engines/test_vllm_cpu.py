"""The whole vLLM engine, two processes on one pool: what the first computed the second gets, and the tokens stay right
whatever happens to the pool."""

from __future__ import annotations

import json
import random
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from cacheserver import running
from places import Server, served
from wholeengine import MODEL_TOKENS, NEW_TOKENS, Engine, make_model

PROMPT_TOKENS, CACHED_TOKENS = 300, 256  # blocks of 128 on the CPU


def prompt(number: int) -> list[int]:
    chosen = random.Random(number)
    return [chosen.randrange(5, MODEL_TOKENS - 10) for _ in range(PROMPT_TOKENS)]


def offloading(tier: dict[str, Any], connector: str = "CurvfsConnector") -> dict[str, Any]:
    """What one would write after --kv-transfer-config; but for the spec, which is vLLM's for a GPU."""
    spec = {"spec_name": "HostTieringSpec", "spec_module_path": "hostspec", "cpu_bytes_to_use": 64 << 20}
    extra = {**spec, "secondary_tiers": [tier]}
    role = {"kv_role": "kv_both", "kv_load_failure_policy": "recompute"}
    return {"kv_connector": connector, **role, "kv_connector_extra_config": extra}


def blocks_of(directory: Path) -> dict[Path, int]:
    """Files of objects below a server's directory; a chunk here has 128 KiB."""
    return {path: path.stat().st_size for path in directory.rglob("*") if path.is_file() and _is_block(path)}


def _is_block(path: Path) -> bool:
    return 128 * 1024 < path.stat().st_size < 160 * 1024


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("model") / "tiny")


@pytest.mark.full
@pytest.mark.timeout(1500)
def test_two_engines_share_a_pool(model: Path, tmp_path: Path, tell: Callable[[str], None]) -> None:
    prompts = [prompt(number) for number in range(10)]
    directory = tmp_path / "pool"
    with served(directory) as server:
        transfer = offloading({"type": "curvfs", "url": server.url, "lookup_timeout_s": 4, "timeout_s": 8})
        blocks: list[set[Path]] = [set()]
        tokens = []
        with Engine(model, transfer, log=tmp_path / "first.log") as first:
            for one in prompts[:7]:
                (output,) = first.generate(one)
                assert output["cached"] == 0
                tokens.append(output["tokens"])
                begin = time.monotonic()
                while len(found := set(blocks_of(directory)) - set().union(*blocks)) < CACHED_TOKENS // 128:
                    assert time.monotonic() - begin < 60, "what was computed was not stored"
                    time.sleep(0.1)
                blocks.append(found)
        assert len({tuple(one) for one in tokens}) > 1
        with Engine(model, transfer, log=tmp_path / "second.log") as second:
            (output,) = second.generate(prompts[0])
            assert output == {"tokens": tokens[0], "cached": CACHED_TOKENS}

            for path in blocks[2]:  # every page of the second prompt
                content = bytearray(path.read_bytes())
                for at in range(4096, len(content), 512):
                    content[at] ^= 0xFF
                path.write_bytes(content)
            (output,) = second.generate(prompts[1])
            assert output == {"tokens": tokens[1], "cached": 0}

            second.send(stream=[*prompts[2:4], prompts[7]], pause=2)
            second.receive("paused")
            server.process.send_signal(signal.SIGSTOP)
            try:
                second.send(go=True)
                steps = second.receive("steps")
                outputs = second.receive("outputs")
            finally:
                server.process.send_signal(signal.SIGCONT)
            assert [one["tokens"] for one in outputs[:2]] == tokens[2:4]
            assert len(outputs[2]["tokens"]) == NEW_TOKENS
            count, longest_s = steps
            tell(f"while a pool stood still, the whole engine made {count} steps, the longest of {longest_s:.3f} s")
            assert longest_s < 3  # one that waited for the pool would take four

            second.send(stream=[*prompts[4:7], *prompts[8:]], pause=2)
            second.receive("paused")
            server.kill()
            second.send(go=True)
            outputs = second.receive("outputs")
            assert [one["tokens"] for one in outputs[:3]] == tokens[4:7]
            assert [len(one["tokens"]) for one in outputs] == [NEW_TOKENS] * 5
        assert "damaged" in (tmp_path / "second.log").read_text()


@pytest.mark.full
@pytest.mark.timeout(900)
def test_what_an_engine_was_told_to_override_divides(model: Path, tmp_path: Path) -> None:
    """A tier without the connector that knows shares with nobody who has it."""
    with served(tmp_path / "pool") as server:
        tier = {"type": "KvstoreTier", "module_path": "kvstore.connectors.vllm", "url": server.url}
        with Engine(model, offloading(tier), log=tmp_path / "one.log") as one:
            (output,) = one.generate(prompt(0))
            assert one.generate(prompt(0)) == [{**output, "cached": CACHED_TOKENS}]
        with Engine(model, offloading(tier, "OffloadingConnector"), log=tmp_path / "two.log") as two:
            assert two.generate(prompt(0)) == [{**output, "cached": 0}]
        assert "overrides of the model's configuration are not visible" in (tmp_path / "two.log").read_text()


@pytest.mark.full
@pytest.mark.timeout(900)
def test_hashes_that_no_other_process_has_are_warned_of(
    model: Path, server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    transfer = offloading({"type": "curvfs", "url": f"{server.url}/hashes"})
    for hashes, seed, warned in (("xxhash", "", True), ("xxhash", "7", False), ("sha256_cbor", "", False)):
        if seed:
            monkeypatch.setenv("PYTHONHASHSEED", seed)
        log = tmp_path / f"{hashes}-{seed}.log"
        with Engine(model, transfer, log=log, hashes=hashes):
            pass
        assert ("every process names its blocks differently" in log.read_text()) == warned
        monkeypatch.delenv("PYTHONHASHSEED", raising=False)


@pytest.mark.full
@pytest.mark.timeout(1500)
def test_through_lmcaches_server_across_its_restart(model: Path, server: Server, tmp_path: Path) -> None:
    """vLLM, LMCache's connector in it, LMCache's server, our adapter, the pool; then another server and engine."""
    adapter = {
        "type": "plugin",
        "module_path": "kvstore.connectors.lmcache_l2",
        "class_name": "KvstoreL2Adapter",
        "adapter_params": {"url": f"{server.url}/through-lmcache"},
    }

    def transfer(port: str) -> dict[str, Any]:
        extra = {"lmcache.mp.host": "tcp://127.0.0.1", "lmcache.mp.port": int(port)}
        return {"kv_connector": "LMCacheMPConnector", "kv_role": "kv_both", "kv_connector_extra_config": extra}

    with running(adapter, tmp_path / "first-cache.log") as cache:
        with Engine(model, transfer(cache.url.rpartition(":")[2]), log=tmp_path / "first.log") as first:
            (output,) = first.generate(prompt(0))
            assert output["cached"] == 0
            begin = time.monotonic()
            while len(json.loads(cache.get("/cache/objects?page_size=10"))["entries"]) < CACHED_TOKENS // 128:
                assert time.monotonic() - begin < 60, "what was computed was not stored"
                time.sleep(0.2)
        cache.end(signal.SIGKILL)
    with running(adapter, tmp_path / "second-cache.log") as cache:
        second = Engine(model, transfer(cache.url.rpartition(":")[2]), log=tmp_path / "second.log")
        with second:
            assert second.generate(prompt(0)) == [{**output, "cached": CACHED_TOKENS}]
