"""Shapes of models' KV caches: a built-in list, and ``config.json`` files as transformers writes them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from curvfs.errors import ConfigError
from curvfs.world import World
from kvstore.geometry import DTYPES, Geometry, dtype_named

#: What engines and model files call number formats, beside the names of torch.
_SHORT_DTYPES = {
    "bf16": "bfloat16",
    "fp16": "float16",
    "fp32": "float32",
    "fp8": "float8_e4m3fn",
    "fp8_e4m3": "float8_e4m3fn",
    "fp8_e5m2": "float8_e5m2",
}


#: No model has more of anything that a ``config.json`` counts, and of layers.
_MOST, _MOST_LAYERS = 10_000_000, 10_000

#: How configurations mark the layers of a mixed model, of which only those with attention keep KV.
_ATTENTION_BLOCKS = ("full_attention", "attention", "hybrid")


@dataclass(frozen=True, slots=True)
class Model:
    """What decides the size of a KV cache. ``kind``: ``mha``, ``gqa`` or ``mla``; with ``mla`` ``head_dim`` counts the
    compressed vector and the rotary part and there is one "head". ``layers``: all that keep KV, which is what goes into
    a pool; ``window_layers`` of them look at the last ``window_tokens`` only."""

    name: str
    kind: str
    layers: int
    kv_heads: int
    head_dim: int
    dtype: str = "bfloat16"
    window_layers: int = 0
    window_tokens: int = 0

    def geometry(self, page_tokens: int, *, tp_size: int = 1) -> Geometry:
        """One page of one rank. Raises ConfigError."""
        if self.kind == "mla":
            return Geometry.mla(
                layers=self.layers, latent_dim=self.head_dim, dtype=self.dtype, page_tokens=page_tokens
            )
        return Geometry.attention(
            layers=self.layers,
            kv_heads=self.kv_heads,
            head_dim=self.head_dim,
            dtype=self.dtype,
            page_tokens=page_tokens,
            tp_size=tp_size,
        )

    @property
    def bytes_per_token(self) -> int:
        """Payload of the whole model."""
        return round(self.geometry(1).bytes_per_token)

    def stored_as(self, dtype: str) -> Model:
        """The same with keys and values in another number format. Raises ConfigError."""
        return replace(self, dtype=_dtype(dtype))


def _attention(name: str, layers: int, kv_heads: int, head_dim: int, heads: int, **more: Any) -> Model:
    return Model(name, "mha" if kv_heads == heads else "gqa", layers, kv_heads, head_dim, **more)


def _latent(name: str, layers: int) -> Model:
    return Model(name, "mla", layers, 1, 512 + 64)


#: From the published config.json of each. Names are lower case; further sizes of a family have the same pattern.
MODELS = {
    model.name: model
    for model in (
        _attention("llama-2-7b", 32, 32, 128, 32, dtype="float16"),
        _attention("llama-2-70b", 80, 8, 128, 64, dtype="float16"),
        _attention("llama-3-8b", 32, 8, 128, 32),
        _attention("llama-3-70b", 80, 8, 128, 64),
        _attention("llama-3.1-405b", 126, 8, 128, 128),
        _attention("llama-3.2-1b", 16, 8, 64, 32),
        _attention("llama-3.2-3b", 28, 8, 128, 24),
        _attention("mistral-7b", 32, 8, 128, 32),
        _attention("mixtral-8x7b", 32, 8, 128, 32),
        _attention("mistral-large-2", 88, 8, 128, 96),
        _attention("phi-3-mini", 32, 32, 96, 32),
        _attention("qwen2-7b", 28, 4, 128, 28, dtype="float16"),
        _attention("qwen2.5-32b", 64, 8, 128, 40),
        _attention("qwen2.5-72b", 80, 8, 128, 64),
        _attention("qwen3-8b", 36, 8, 128, 32),
        _attention("qwen3-32b", 64, 8, 128, 64),
        _attention("qwen3-30b-a3b", 48, 4, 128, 32),
        _attention("qwen3-235b-a22b", 94, 4, 128, 64),
        _attention("gpt-oss-20b", 24, 8, 64, 64, window_layers=12, window_tokens=128),
        _attention("gpt-oss-120b", 36, 8, 64, 64, window_layers=18, window_tokens=128),
        _latent("deepseek-v2-lite", 27),
        _latent("deepseek-v3", 61),
        _latent("deepseek-r1", 61),
        _latent("kimi-k2", 61),
    )
}


def find_model(name_or_path: str, world: World) -> Model:
    """A built-in model by name, or the model that a ``config.json`` (or a directory with one) describes.

    Raises ConfigError, which says what is known or what the file lacks.
    """
    known = MODELS.get(name_or_path.lower())
    if known is not None:
        return known
    path = name_or_path if name_or_path.endswith(".json") else f"{name_or_path}/config.json"
    if not world.disk.exists(path):
        raise ConfigError(
            f"{name_or_path!r} is no built-in model and no config.json; give the path of one, or a name: "
            f"{', '.join(sorted(MODELS))}."
        )
    try:
        config = json.loads(world.disk.read_file(path))
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror or error}.") from error
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path} is not JSON; give the config.json of a model.") from error
    if not isinstance(config, dict):
        raise ConfigError(f"{path} holds no JSON object; give the config.json of a model.")
    return model_of(config, path)


def model_of(config: Mapping[str, Any], path: str) -> Model:
    """The model of a parsed ``config.json``; ``path`` is for messages. Raises ConfigError."""
    fields = _text_fields(config)
    nested = fields.get("attn_config")
    heads_of = nested if isinstance(nested, dict) else {}

    def number(*names: str) -> int | None:
        for name in names:
            value = fields.get(name, heads_of.get(name))
            if isinstance(value, int) and not isinstance(value, bool) and value > 0:
                if value > _MOST:
                    raise ConfigError(f"{path} says that {name} is {value:.3g}, which no model has.")
                return value
        return None

    def needed(*names: str) -> int:
        found = number(*names)
        if found is None:
            raise ConfigError(f"{path} does not say {names[0]}; give the config.json of a transformer model.")
        return found

    name = "".join(filter(str.isprintable, str(config.get("_name_or_path") or config.get("model_type") or path)))
    all_layers = needed("num_hidden_layers", "n_layer", "num_layers", "n_layers")
    if all_layers > _MOST_LAYERS:
        raise ConfigError(f"{path} says that it has {all_layers:,} layers, which no model has.")
    if fields.get("block_configs"):
        raise ConfigError(f"The layers of {path} have different numbers of heads, which cannot be sized here.")
    layers, window_layers = _kinds_of_layers(fields, all_layers, path)
    window_tokens = (number("sliding_window") or 0) if window_layers else 0
    dtype = _dtype(str(fields.get("dtype") or fields.get("torch_dtype") or "bfloat16"))
    rank = number("kv_lora_rank")
    if rank is not None:
        latent = rank + needed("qk_rope_head_dim")
        return Model(name, "mla", layers, 1, latent, dtype, window_layers, window_tokens)
    heads = needed("num_attention_heads", "n_head", "n_heads")
    grouped = () if fields.get("multi_query_attention") is False else ("multi_query_group_num",)
    kv_heads = number("num_key_value_heads", "num_kv_heads", "n_head_kv", "kv_n_heads", *grouped) or heads
    if fields.get("multi_query") is True and not fields.get("new_decoder_architecture"):
        kv_heads = 1
    head_dim = number("head_dim", "attention_head_dim", "kv_channels")
    if head_dim is None:
        head_dim = needed("hidden_size", "n_embd", "d_model") // heads
    kind = "mha" if kv_heads == heads else "gqa"
    return Model(name, kind, layers, kv_heads, head_dim, dtype, window_layers, window_tokens)


def _text_fields(config: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of the language model, which those of models for more than text have in a part of their own."""
    fields = dict(config)
    for part in ("thinker_config", "llm_config", "language_config", "text_config"):
        inner = fields.get(part)
        if isinstance(inner, dict):
            fields |= inner
    return fields


def _kinds_of_layers(fields: Mapping[str, Any], layers: int, path: str) -> tuple[int, int]:
    """Layers that keep KV, and how many of them only that of a window."""
    kinds = fields.get("layer_types") or fields.get("layers_block_type")
    shared = fields.get("num_kv_shared_layers")  # Gemma 3n: the last ones read what layers before them keep
    if isinstance(kinds, list) and isinstance(shared, int) and 0 < shared < len(kinds):
        kinds = kinds[:-shared]
    if isinstance(kinds, list) and kinds:
        windows = sum("sliding" in str(kind) or "chunked" in str(kind) for kind in kinds)
        keeping = windows + sum(kind in _ATTENTION_BLOCKS for kind in kinds)
    else:
        windows, keeping = 0, _attention_layers(fields, layers)
    if keeping == 0:
        raise ConfigError(f"No layer of {path} keeps keys and values, so there is nothing to share by prefix.")
    return keeping, windows


def _attention_layers(fields: Mapping[str, Any], layers: int) -> int:
    """Layers with attention of a model that says in its family's own way which these are; all, where none is said."""
    pattern, listed = fields.get("hybrid_override_pattern"), fields.get("attn_layer_indices")
    kinds, linear = fields.get("attn_type_list"), fields.get("linear_attn_config")
    if isinstance(pattern, str) and pattern:  # Nemotron-H
        return pattern.count("*")
    if isinstance(linear, dict) and isinstance(linear.get("full_attn_layers"), list):  # Kimi Linear
        return len(linear["full_attn_layers"])
    if isinstance(listed, list):  # Bamba
        return len(listed)
    if isinstance(kinds, list) and kinds:  # MiniMax
        return kinds.count(1)
    for period, offset in (("attn_layer_period", fields.get("attn_layer_offset")), ("full_attention_interval", None)):
        step = fields.get(period)  # Jamba, Qwen3-Next
        if isinstance(step, int) and 0 < step <= layers:
            first = offset if isinstance(offset, int) and 0 <= offset < step else step - 1
            return len(range(first, layers, step))
    if fields.get("model_type") in ("mamba", "mamba2", "falcon_mamba", "rwkv"):
        return 0
    return layers


def _dtype(name: str) -> str:
    if name in _SHORT_DTYPES:
        return _SHORT_DTYPES[name]
    try:
        return dtype_named(name).name
    except ConfigError:
        names = [*_SHORT_DTYPES, *(known for known in DTYPES if "float" in known or known == "int8")]
        raise ConfigError(f"{name!r} is no number format of a KV cache; write one of {', '.join(names)}.") from None
