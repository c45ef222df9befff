"""``curvfs size``: byte counts of known models, and hits against an independent exact LRU."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from collections import OrderedDict
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from curvfs.errors import ConfigError, UsageError
from curvfs.world import World
from tools.cli import run
from tools.size.models import MODELS, find_model
from tools.traces import Request, Reuse, read_trace

WORLD = World.real()


def report(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    capsys.readouterr()
    assert run(["size", *arguments, "--json"]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


# --------------------------------------------------------------------------------------------------------- models


@pytest.mark.parametrize(
    ("model", "expected_bytes"),
    [
        ("llama-3-8b", 131_072),
        ("qwen2-7b", 57_344),
        ("deepseek-v3", 70_272),
        ("Llama-3-70B", 327_680),
        ("llama-2-7b", 524_288),
        ("mixtral-8x7b", 131_072),
    ],
)
def test_bytes_per_token_of_known_models(capsys: pytest.CaptureFixture[str], model: str, expected_bytes: int) -> None:
    assert report(capsys, "--model", model)["bytes_per_token"] == expected_bytes


def test_there_are_twenty_models_of_every_kind() -> None:
    assert len(MODELS) >= 20 and {model.kind for model in MODELS.values()} == {"mha", "gqa", "mla"}


def test_number_format_and_ranks(capsys: pytest.CaptureFixture[str]) -> None:
    assert report(capsys, "--model", "llama-3-8b", "--kv-dtype", "fp8")["bytes_per_token"] == 65_536
    split = report(capsys, "--model", "llama-3-8b", "--tp", "4")
    assert (split["bytes_per_token"], split["bytes_per_token_per_rank"]) == (131_072, 32_768)
    assert split["objects_per_page"] == 4
    latent = report(capsys, "--model", "deepseek-v3", "--tp", "8")
    assert (latent["bytes_per_token_per_rank"], latent["objects_per_page"]) == (70_272, 1)


GPT2 = {"model_type": "gpt2", "n_layer": 12, "n_head": 12, "n_embd": 768}
FALCON = {
    "num_hidden_layers": 32,
    "num_attention_heads": 71,
    "hidden_size": 4544,
    "multi_query": True,
    "torch_dtype": "float16",
}
GEMMA3 = {
    "text_config": {
        "num_hidden_layers": 6,
        "num_attention_heads": 32,
        "num_key_value_heads": 16,
        "head_dim": 128,
        "sliding_window": 1024,
        "layer_types": ["sliding_attention"] * 5 + ["full_attention"],
    }
}
HYBRID = {
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "hidden_size": 1024,
    "dtype": "bfloat16",
    "layer_types": ["linear_attention"] * 3 + ["full_attention"],
}
DEEPSEEK = {"num_hidden_layers": 61, "kv_lora_rank": 512, "qk_rope_head_dim": 64, "torch_dtype": "bfloat16"}


@pytest.mark.parametrize(
    ("config", "kind", "expected_bytes"),
    [
        (GPT2, "mha", 12 * 2 * 768 * 2),
        (FALCON, "gqa", 32 * 2 * 64 * 2),
        (GEMMA3, "gqa", 6 * 2 * 16 * 128 * 2),
        (HYBRID, "gqa", 1 * 2 * 2 * 128 * 2),
        (DEEPSEEK, "mla", 70_272),
    ],
    ids=["gpt2", "falcon", "gemma3", "hybrid", "deepseek"],
)
def test_a_config_json(tmp_path: Path, config: dict[str, Any], kind: str, expected_bytes: int) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    for path in (tmp_path, tmp_path / "config.json"):
        model = find_model(str(path), WORLD)
        assert (model.kind, model.bytes_per_token) == (kind, expected_bytes)


def test_a_config_of_transformers_gives_what_its_cache_takes(tmp_path: Path) -> None:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=64,
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=3,
        num_attention_heads=8,
        num_key_value_heads=2,
        dtype="float32",
    )
    config.save_pretrained(tmp_path)
    cache = LlamaForCausalLM(config)(torch.arange(10)[None]).past_key_values
    taken_bytes = sum(tensor.nbytes for layer in cache.layers for tensor in (layer.keys, layer.values))
    assert find_model(str(tmp_path), WORLD).bytes_per_token * 10 == taken_bytes


@pytest.mark.parametrize(
    ("content", "text"),
    [
        ("{", "is not JSON"),
        ("[]", "no JSON object"),
        ("{}", "does not say num_hidden_layers"),
        ('{"num_hidden_layers": 2}', "does not say num_attention_heads"),
        ('{"num_hidden_layers": 2, "layer_types": ["mamba", "mamba"]}', "nothing to share by prefix"),
        ('{"num_hidden_layers": 2, "num_attention_heads": 2, "head_dim": 2, "dtype": "int3"}', "no number format"),
    ],
)
def test_a_config_that_is_none(tmp_path: Path, content: str, text: str) -> None:
    (tmp_path / "config.json").write_text(content)
    with pytest.raises(ConfigError, match=text):
        find_model(str(tmp_path), WORLD)


def test_a_model_that_is_not_known() -> None:
    with pytest.raises(ConfigError, match=r"no built-in model .* llama-3-8b"):
        find_model("llama-9", WORLD)


# --------------------------------------------------------------------------------------------------------- traces


def exact_lru(requests: Iterable[Request], capacity: int) -> int:
    """Hits of the longest resident prefix, the plain way."""
    resident: OrderedDict[int, None] = OrderedDict()
    hits = 0
    for request in requests:
        for block in request.blocks:
            if block not in resident:
                break
            hits += 1
        for block in request.blocks:
            resident[block] = None
            resident.move_to_end(block)
            if len(resident) > capacity:
                resident.popitem(last=False)
    return hits


def trace(seed: int, count: int) -> list[Request]:
    """Conversations that grow, on a few system prompts."""
    chance = random.Random(seed)
    conversations: list[list[int]] = []
    fresh = iter(range(10**9))
    systems = [[next(fresh) for _ in range(chance.randrange(1, 5))] for _ in range(4)]
    requests = []
    for second in range(count):
        if not conversations or chance.random() < 0.3:
            conversations.append(list(chance.choice(systems)))
        talk = chance.choice(conversations)
        talk += [next(fresh) for _ in range(chance.randrange(3))]
        requests.append(Request(float(second), len(talk) * 512, 10, tuple(talk)))
    return requests


@pytest.mark.parametrize("seed", range(3))
def test_hits_of_every_capacity_are_those_of_an_exact_lru(seed: int) -> None:
    requests = trace(seed, 120)
    reuse = Reuse(requests)
    for capacity in (1, 2, 3, 5, 8, 13, 30, 60, 100, reuse.distinct_blocks - 1, reuse.distinct_blocks, 10**6):
        assert reuse.hits(capacity) == exact_lru(requests, capacity) == sum(reuse.request_hits(capacity))


def written(path: Path, requests: Iterable[Request]) -> str:
    lines = (
        json.dumps(
            {
                "timestamp": request.timestamp_s * 1000,
                "input_length": request.input_tokens,
                "output_length": request.output_tokens,
                "hash_ids": request.blocks,
            }
        )
        for request in requests
    )
    path.write_text("".join(f"{line}\n" for line in lines))
    return str(path)


def test_the_curve_of_a_trace_file(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    requests = trace(7, 200)
    path = written(tmp_path / "t.jsonl", requests)
    assert read_trace(path, WORLD) == requests
    found = report(capsys, "--model", "llama-3-8b", "--trace", path, "--at-blocks", "10", "--at-blocks", "50")["trace"]
    hits = {point["capacity_blocks"]: point["hits"] for point in found["curve"]}
    assert {10, 50, found["distinct_blocks"]} <= set(hits)
    assert all(count == exact_lru(requests, capacity) for capacity, count in hits.items())
    assert found["hits"] == hits[found["distinct_blocks"]] and found["capacity_is_unbounded"]


@pytest.mark.parametrize(
    ("content", "text"),
    [("", "has no request"), ('{"timestamp": 0}\n', "Line 1 of"), ("\n\nhello\n", "Line 3 of"), ("[1]\n", "Line 1 of")],
)
def test_a_trace_that_is_none(tmp_path: Path, content: str, text: str) -> None:
    (tmp_path / "t").write_text(content)
    with pytest.raises(ConfigError, match=text):
        read_trace(str(tmp_path / "t"), WORLD)


# ------------------------------------------------------------------------------------------------------- estimates


def test_what_fits_and_what_pays(capsys: pytest.CaptureFixture[str]) -> None:
    found = report(
        capsys, "--model", "llama-3-8b", "--nvme-gb", "1000", "--fill", "1", "--context-tokens", "8192",
        "--shared-tokens", "4096", "--requests-per-s", "2", "--nvme-read-gb-s", "4", "--network-gbit-s", "16",
        "--nvme-write-gb-s", "1", "--prefill-tokens-s", "5000", "--latency-ms", "10",
    )  # fmt: skip
    stored = found["stored_bytes_per_token"]
    assert found["tokens_that_fit"] == 10**12 // found["object_bytes"] * 64
    assert found["users_that_fit"] == found["tokens_that_fit"] // 8192
    assert found["load_bytes_per_s"] == 2e9
    gain_s = 1 / 5000 - stored / 2e9
    assert found["break_even_tokens"] == pytest.approx(0.010 / gain_s, abs=1)
    assert found["ttft"]["cold"]["mean_s"] == pytest.approx(8192 / 5000)
    assert found["ttft"]["shared"]["mean_s"] == pytest.approx(0.010 + 4096 * stored / 2e9 + 4096 / 5000)
    assert found["traffic"]["write_bytes_per_s"] == pytest.approx(2 * 4096 * stored)
    assert found["wear"]["dwpd"] == pytest.approx(2 * 4096 * stored * 86_400 / 1e12)
    assert found["headroom"]["disk_write"] == pytest.approx(1e9 / (2 * 4096 * stored))


def test_a_pool_that_is_too_slow_never_pays(capsys: pytest.CaptureFixture[str]) -> None:
    slow = ("--model", "llama-3-8b", "--nvme-read-gb-s", "0.1", "--prefill-tokens-s", "9000")
    found = report(capsys, *slow, "--context-tokens", "1000", "--shared-tokens", "900")
    assert found["break_even_tokens"] is None and found["loading_pays"] is False
    assert found["ttft"]["shared"] == found["ttft"]["cold"]
    assert run(["size", *slow]) == 0
    assert "never: computing is faster" in capsys.readouterr().out


def test_text_and_plots(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = written(tmp_path / "t.jsonl", trace(1, 100))
    arguments = ["size", "--model", "qwen2-7b", "--trace", path, "--nvme-gb", "1", "--nvme-read-gb-s", "1"]
    assert run([*arguments, "--prefill-tokens-s", "3000", "--plot", str(tmp_path / "p.png")]) == 0
    shown = capsys.readouterr().out
    for word in ("57,344 bytes", "Break-even", "Hit rate", "drive writes per day", "First token, cold", "⠤"):
        assert word in shown, word
    assert (tmp_path / "p.png").read_bytes().startswith(b"\x89PNG")
    assert run(["size", "--list-models"]) == 0
    assert "deepseek-v3" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ([], "No model is named"),
        (["--model", "qwen2-7b", "--tp", "3"], "do not split"),
        (["--model", "qwen2-7b", "--nvme-gb", "-1"], "--nvme-gb is -1"),
        (["--model", "qwen2-7b", "--fill", "2"], "--fill"),
        (["--model", "qwen2-7b", "--plot", "x.png"], "give --trace"),
        (["--model", "qwen2-7b", "--shared-tokens", "3"], "--context-tokens"),
        (["--model", "qwen2-7b", "--trace", "/none", "--context-tokens", "3"], "give one of them"),
        (["--model", "qwen2-7b", "--trace", "/none"], "cannot be read"),
        (["--model", "qwen2-7b", "--kv-dtype", "int3"], "no number format"),
    ],
)
def test_bad_input(arguments: list[str], text: str) -> None:
    with pytest.raises(UsageError, match=text):
        run(["size", *arguments])


def test_from_the_shell() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tools", "size", "--model", "llama-3-8b", "--json"], capture_output=True, text=True
    )
    assert done.returncode == 0 and json.loads(done.stdout)["bytes_per_token"] == 131_072
    failed = subprocess.run([sys.executable, "-m", "tools", "size", "--model", "none"], capture_output=True, text=True)
    assert failed.returncode == 2 and failed.stderr.count("\n") == 1 and failed.stdout == ""


_MIXED = {"num_hidden_layers": 8, "num_attention_heads": 8, "num_key_value_heads": 2, "hidden_size": 512}


@pytest.mark.parametrize(
    ("more", "layers", "kv_heads"),
    [
        ({"attn_layer_period": 4, "attn_layer_offset": 2}, 2, 2),
        ({"attn_layer_indices": [1, 5, 7]}, 3, 2),
        ({"hybrid_override_pattern": "M-M*M-M*"}, 2, 2),
        ({"full_attention_interval": 4}, 2, 2),
        ({"attn_type_list": [0, 0, 0, 1, 0, 0, 0, 1]}, 2, 2),
        ({"layers_block_type": ["mamba", "hybrid", "attention", "mamba"]}, 2, 2),
        ({"linear_attn_config": {"full_attn_layers": [4, 8]}}, 2, 2),
        ({"layer_types": ["sliding_attention", "full_attention"] * 4, "num_kv_shared_layers": 4}, 4, 2),
        ({"num_key_value_heads": None, "attn_config": {"kv_n_heads": 4}}, 8, 4),
        ({"num_key_value_heads": None, "multi_query_group_num": 1, "multi_query_attention": False}, 8, 8),
        ({"llm_config": {"num_hidden_layers": 3}}, 3, 2),
    ],
)
def test_layers_that_keep_nothing_are_not_counted(
    tmp_path: Path, more: dict[str, Any], layers: int, kv_heads: int
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(_MIXED | more))
    model = find_model(str(tmp_path), WORLD)
    assert (model.layers, model.kv_heads) == (layers, kv_heads)


@pytest.mark.parametrize(
    "content",
    [
        "[" * 100_000,
        json.dumps(_MIXED | {"num_hidden_layers": 10**9}),
        json.dumps(_MIXED | {"num_key_value_heads": 10**30}),
        json.dumps(_MIXED | {"block_configs": [{"attention": {"no_op": True}}]}),
        json.dumps(_MIXED | {"model_type": "mamba"}),
    ],
)
def test_a_hostile_config_is_refused_at_once(tmp_path: Path, content: str) -> None:
    (tmp_path / "config.json").write_text(content)
    with pytest.raises(ConfigError, match=r"config\.json"):
        find_model(str(tmp_path), WORLD)


@pytest.mark.parametrize("number", ["NaN", "1e999", "-1"])
@pytest.mark.parametrize("field", ["timestamp", "input_length"])
def test_a_trace_with_numbers_that_are_none(tmp_path: Path, field: str, number: str) -> None:
    fields = {"timestamp": "0", "input_length": "5", "output_length": "1", "hash_ids": "[1]"} | {field: number}
    text = ", ".join(f'"{name}": {value}' for name, value in fields.items())
    (tmp_path / "trace").write_text("{" + text + "}\n")
    with pytest.raises(ConfigError, match="Line 1"):
        read_trace(str(tmp_path / "trace"), WORLD)


def test_a_trace_is_read_in_the_order_of_its_times(tmp_path: Path) -> None:
    lines = [json.dumps({"timestamp": at, "input_length": 1, "output_length": 1, "hash_ids": []}) for at in (2, 1)]
    (tmp_path / "trace").write_text("\n".join(lines))
    assert [request.timestamp_s for request in read_trace(str(tmp_path / "trace"), WORLD)] == [0.001, 0.002]
