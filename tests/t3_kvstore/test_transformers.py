"""Caches of a transformers model, in and out, and the same tokens after."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from curvfs.errors import ConfigError, UsageError
from tests.t3_kvstore.places import Directory

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from kvstore.connectors.transformers import CachePages, geometry_for, identity_for, weights_fingerprint  # noqa: E402


@pytest.fixture(scope="module")
def model() -> Any:
    return make_model(0)


def make_model(seed: int, **changes: Any) -> Any:
    torch.manual_seed(seed)
    settings: dict[str, Any] = {
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 300,
    }
    config = transformers.Qwen2Config(**(settings | changes))
    return transformers.Qwen2ForCausalLM(config).eval()


def cache_of(model: Any, ids: Any) -> Any:
    with torch.inference_mode():
        return model(ids, use_cache=True).past_key_values


def test_a_second_replica_goes_on_where_the_first_was(directory: Directory, model: Any) -> None:
    geometry = geometry_for(model.config, model.dtype, 16)
    revision = weights_fingerprint(model)
    assert geometry.dtype == "float32"
    ids = torch.randint(0, 300, (1, 85), generator=torch.Generator().manual_seed(1))
    first = CachePages(directory.open(geometry, revision=revision))
    assert first.load(ids) == (None, 0)
    cold = cache_of(model, ids)
    assert all(first.save(ids, cold).result())
    second = CachePages(directory.open(geometry, revision=revision))
    cache, hit_tokens = second.load(ids[0].tolist(), max_tokens=84)
    assert hit_tokens == 80
    assert cache is not None
    assert cache.get_seq_length() == 80
    for loaded, computed in zip(cache.layers, cold.layers, strict=True):
        assert torch.equal(loaded.keys, computed.keys[:, :, :80])
        assert torch.equal(loaded.values, computed.values[:, :, :80])
    with torch.inference_mode():
        whole = model(ids).logits[0, -1]
        rest = model(ids[:, hit_tokens:], cache=cache, use_cache=True).logits[0, -1]
    assert torch.allclose(whole, rest, atol=1e-4)
    assert cache.get_seq_length() == 85
    # Only what is new is handed over.
    longer = torch.cat([ids, torch.randint(0, 300, (1, 30))], dim=1)
    grown = cache_of(model, longer)
    assert len(second.save(longer, grown, skip_pages=hit_tokens // 16).result()) == 115 // 16 - 5
    assert second.load(longer, max_tokens=100)[1] == 96
    assert second.load(longer, max_tokens=0) == (None, 0)


def test_loading_ends_at_the_first_damaged_page(directory: Directory, model: Any) -> None:
    store = directory.open(geometry_for(model.config, model.dtype, 16))
    pages, ids = CachePages(store), torch.arange(80)[None]
    cold = cache_of(model, ids)
    assert all(pages.save(ids, cold).result())
    file = directory.block_file(store, store.keys(ids[0])[3])
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    cache, hit_tokens = pages.load(ids)
    assert hit_tokens == 48
    assert cache is not None
    assert all(
        torch.equal(loaded.keys, computed.keys[:, :, :48])
        for loaded, computed in zip(cache.layers, cold.layers, strict=True)
    )


def test_bfloat16_and_a_cache_that_is_a_view(directory: Directory) -> None:
    model = make_model(1).to(torch.bfloat16)
    store = directory.open(geometry_for(model.config, model.dtype, 8))
    ids = torch.arange(40)[None]
    cold = cache_of(model, ids)
    CachePages(store).save(ids, cold).result()
    cache, hit_tokens = CachePages(store).load(ids)
    assert hit_tokens == 40
    assert cache is not None
    assert cache.layers[2].values.dtype is torch.bfloat16
    assert torch.equal(cache.layers[2].values, cold.layers[2].values)


def test_an_identity_comes_from_the_model(model: Any, tmp_path: Path) -> None:
    geometry = geometry_for(model.config, model.dtype, 16)
    other = make_model(2)
    assert weights_fingerprint(model) == weights_fingerprint(make_model(0))
    assert weights_fingerprint(model) != weights_fingerprint(other)
    whose = identity_for(model.config, geometry, revision=weights_fingerprint(model))
    assert whose.model == "qwen2"
    assert "10000" in whose.rope
    stretched = make_model(0, rope_parameters={"rope_type": "linear", "factor": 2.0, "rope_theta": 10000.0})
    assert identity_for(stretched.config, geometry, revision="r").rope != whose.rope
    assert identity_for(model.config, geometry, revision="r", model="served", salt="s").model == "served"
    with pytest.raises(ConfigError, match="revision"):
        identity_for(model.config, geometry)
    model.save_pretrained(tmp_path / "tiny")
    saved = transformers.AutoConfig.from_pretrained(tmp_path / "tiny")
    found = identity_for(saved, geometry)
    assert (found.model, len(found.revision)) == ("tiny", 32)


def test_caches_of_other_kinds_are_refused(directory: Directory, model: Any) -> None:
    sliding = transformers.Qwen2Config(
        use_sliding_window=True, sliding_window=8, max_window_layers=1, num_hidden_layers=3, hidden_size=64
    )
    with pytest.raises(ConfigError, match="whole context"):
        geometry_for(sliding, "float32", 16)
    with pytest.raises(ConfigError, match="compresses"):
        geometry_for(transformers.DeepseekV3Config(), "bfloat16", 16)
    pages = CachePages(directory.open(geometry_for(model.config, model.dtype, 16)))
    ids = torch.arange(32)[None]
    with pytest.raises(UsageError, match="sequences"):
        pages.save(ids[0], cache_of(model, ids.repeat(2, 1)))
    with pytest.raises(UsageError, match="2 layers"):
        pages.save(ids, cache_of(make_model(0, num_hidden_layers=2), ids))
    with pytest.raises(UsageError, match="shape"):
        pages.save(ids, cache_of(make_model(0, num_key_value_heads=4), ids))
