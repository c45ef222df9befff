"""Pages of a Hugging Face transformers ``DynamicCache``, in and out of a store.

::

    geometry = geometry_for(model.config, dtype=model.dtype, page_tokens=64)
    identity = identity_for(model.config, geometry, revision=weights_fingerprint(model))
    with kvstore.open(url, identity, geometry=geometry) as store:
        pages = CachePages(store)
        cache, hit_tokens = pages.load(token_ids, max_tokens=len(token_ids) - 1)
        output = model(input_ids[:, hit_tokens:], past_key_values=cache, use_cache=True)
        pages.save(token_ids, output.past_key_values, skip_pages=hit_tokens // store.page_tokens).result()

For models whose every layer attends to the whole context; one sequence at a time. Needs transformers 4.54 or later.
"""

from __future__ import annotations

import importlib
import json
from typing import Any

import xxhash

from curvfs.errors import ConfigError, UsageError
from curvfs.world import World
from kvstore.connectors.identity import model_name, weights_revision
from kvstore.geometry import Geometry, dtype_named
from kvstore.keys import Identity
from kvstore.store import KVStore
from kvstore.transfer import Transfer


def geometry_for(config: Any, dtype: object, page_tokens: int, *, unit_heads: int | None = None) -> Geometry:
    """The pages of a model with this configuration: ``layer.<i>.k`` and ``.v`` of shape (kv_heads, tokens, head_dim).

    ``dtype``: that of the cache (``model.dtype``). Raises ConfigError for models whose cache is of another kind.
    """
    text = config.get_text_config(decoder=True)
    if getattr(text, "kv_lora_rank", None):
        raise ConfigError(f"{text.model_type} compresses its keys and values; this connector stores plain ones only.")
    transformers: Any = importlib.import_module("transformers")
    kinds = {type(layer).__name__ for layer in transformers.DynamicCache(config=config).layers}
    if not kinds <= {"DynamicLayer"}:
        raise ConfigError(
            f"{text.model_type} has layers that do not attend to the whole context ({', '.join(sorted(kinds))}); their"
            " pages depend on more than a prefix of the tokens."
        )
    heads = text.num_attention_heads
    return Geometry.attention(
        layers=text.num_hidden_layers,
        kv_heads=getattr(text, "num_key_value_heads", None) or heads,
        head_dim=getattr(text, "head_dim", None) or text.hidden_size // heads,
        dtype=dtype,
        page_tokens=page_tokens,
        unit_heads=unit_heads,
    )


def identity_for(
    config: Any, geometry: Geometry, *, revision: str = "", model: str = "", lora: str = "", salt: str = ""
) -> Identity:
    """The identity of a model's pages.

    ``revision``: commit, version or :func:`weights_fingerprint`; otherwise the commit that the configuration was loaded
    from, or a fingerprint of the directory's files. ``model``: the name served; that of the configuration by default.
    Raises ConfigError when either cannot be told.
    """
    text = config.get_text_config(decoder=True)
    source = getattr(config, "_name_or_path", "")
    if not revision:
        revision = getattr(config, "_commit_hash", None) or weights_revision(
            source, {}, where="identity_for(..., revision=...)", disk=World.real().disk
        )
    rope = getattr(text, "rope_parameters", None) or {  # before transformers 5 in several places
        name: getattr(text, name, None) for name in ("rope_theta", "rope_scaling", "partial_rotary_factor")
    }
    return Identity.of(
        geometry,
        model=model or model_name(source) or config.model_type,
        revision=revision,
        rope=json.dumps(rope, sort_keys=True, default=str),
        lora=lora,
        salt=salt,
    )


def weights_fingerprint(model: Any) -> str:
    """32 hexadecimal digits over the names, shapes, dtypes and bytes of all weights (about 0.1 s per GB)."""
    torch: Any = importlib.import_module("torch")
    digest = xxhash.xxh3_128()
    for name, tensor in sorted(model.state_dict().items()):
        digest.update(f"{name}:{tensor.dtype}:{tuple(tensor.shape)};".encode())
        flat = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
        digest.update(memoryview(flat.numpy()))
    return digest.hexdigest()


class CachePages:
    """Saves and loads the caches of one model through a store. ``device``: where loaded caches live."""

    def __init__(self, store: KVStore, *, device: object = "cpu") -> None:
        self.store = store
        self._device = device
        self._specs = store.geometry.tensors
        if any(len(spec.shape) != 3 or spec.name.split(".")[-1] not in ("k", "v") for spec in self._specs):
            raise UsageError("The store's geometry is not one of geometry_for(); open it with that.")

    def save(self, token_ids: Any, cache: Any, *, skip_pages: int = 0, timeout_s: float | None = None) -> Transfer:
        """Store the full pages of ``token_ids`` that ``cache`` holds, from page ``skip_pages`` on.

        Returns at once; nothing is copied before, so the cache's tensors must not be written to until the handle is
        done (growing a DynamicCache does not). Raises UsageError for a cache of another model.
        """
        page_tokens = self.store.page_tokens
        tokens = _row(token_ids)
        held = cache.get_seq_length()
        keys = self.store.keys(tokens[:held])[skip_pages:]
        layers = cache.layers
        if 2 * len(layers) != len(self._specs):
            raise UsageError(f"The cache has {len(layers)} layers, the store's pages have {len(self._specs) // 2}.")
        tensors = [tensor for layer in layers for tensor in (layer.keys, layer.values)]
        if any(tensor is None or tensor.shape[0] != 1 for tensor in tensors):
            raise UsageError("The cache is empty or holds several sequences; save them one at a time.")
        segments = [
            [tensor[0, :, key.token_start : key.token_start + page_tokens] for tensor in tensors] for key in keys
        ]
        return self.store.put(keys, segments, timeout_s=timeout_s)

    def load(
        self, token_ids: Any, *, max_tokens: int | None = None, timeout_s: float | None = None
    ) -> tuple[Any | None, int]:
        """A DynamicCache of the longest stored prefix of ``token_ids``, and its tokens; ``(None, 0)`` if there is none.

        ``max_tokens``: load no more than that; a model needs at least one token left to compute. Every page is
        verified; loading ends before the first that is a miss.
        """
        torch: Any = importlib.import_module("torch")
        transformers: Any = importlib.import_module("transformers")
        tokens = _row(token_ids)
        hit = self.store.lookup(self.store.keys(tokens if max_tokens is None else tokens[: max(0, max_tokens)]))
        if hit.pages == 0:
            return None, 0
        page_tokens = self.store.page_tokens
        tensors = []
        for spec in self._specs:
            heads, _, dim = spec.shape
            dtype = getattr(torch, dtype_named(spec.dtype.name).name)
            tensors.append(torch.empty((1, heads, hit.tokens, dim), dtype=dtype, device=self._device))
        segments = [
            [tensor[0, :, key.token_start : key.token_start + page_tokens] for tensor in tensors] for key in hit.keys
        ]
        results = self.store.get(hit.keys, segments, lookup=hit, timeout_s=timeout_s).result()
        pages = next((index for index, result in enumerate(results) if not result), len(results))
        if pages == 0:
            return None, 0
        if pages < hit.pages:
            tensors = [tensor[:, :, : pages * page_tokens].contiguous() for tensor in tensors]
        cache = transformers.DynamicCache()
        for index in range(len(tensors) // 2):
            keys, values = tensors[2 * index], tensors[2 * index + 1]
            cache.update(keys[:, :, :0], values[:, :, :0], index)
            cache.layers[index].keys, cache.layers[index].values = keys, values
        return cache, pages * page_tokens


def _row(token_ids: Any) -> Any:
    """The one sequence of token ids in something of shape (tokens,) or (1, tokens)."""
    return token_ids[0] if getattr(token_ids, "ndim", 1) == 2 and len(token_ids) == 1 else token_ids
