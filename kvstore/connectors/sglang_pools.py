"""SGLang's host pools: where their pages lie, and whose pages they are."""

from __future__ import annotations

import importlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from curvfs.world import Disk
from kvstore.connectors.identity import EnginePages, name_and_revision
from kvstore.geometry import Shard

WHERE = "--hicache-storage-backend-extra-config"

#: What SGLang itself reads from the extra configuration.
_ENGINE_SETTINGS = frozenset({"backend_name", "module_path", "class_name", "interface_v1", "tp_lcm_size"})


def settings_of(extra_config: Mapping[str, Any]) -> dict[str, Any]:
    """What is meant for the store."""
    return {name: value for name, value in extra_config.items() if name not in _ENGINE_SETTINGS}


@dataclass(frozen=True, slots=True)
class ServerFacts:
    """What the server was started with: empty outside of a server. ``revision``: None when it is not known."""

    model: str = ""
    revision: str | None = None
    parameters: str = ""


def server_facts() -> ServerFacts:
    """Those of this process's SGLang server."""
    try:
        flags: Any = importlib.import_module("sglang.srt.runtime_context").get_server_args()
    except (ImportError, AttributeError, ValueError):
        return ServerFacts()
    names = ("json_model_override_args", "quantization", "quantization_param_path", "dtype")
    parameters = {name: getattr(flags, name, None) for name in names}
    return ServerFacts(flags.model_path, flags.revision or "", json.dumps(parameters, sort_keys=True, default=str))


def pages_of(name: str, pool: Any, config: Any, settings: Mapping[str, Any], disk: Disk) -> EnginePages:
    """The pages of one rank's host pool. ``config``: SGLang's HiCacheStorageConfig.

    Raises ConfigError where the weights cannot be told.
    """
    facts, size_bytes = server_facts(), page_bytes(pool)
    given = facts.model or config.model_name or ""
    model, revision = name_and_revision(given, settings, where=WHERE, disk=disk, branch=facts.revision)
    layout = {
        "pool": name,
        "kind": type(pool).__name__,
        "order": pool.layout,
        "format": getattr(pool, "storage_format_tag", None),
        "layers": [getattr(pool, word, 0) for word in ("start_layer", "end_layer", "layer_num")],
        "heads": [getattr(pool, word, 0) for word in ("head_num", "head_dim", "v_head_dim", "kv_cache_dim")],
        "context": [config.attn_cp_rank, config.attn_cp_size],
        "decode_context": [config.dcp_rank, config.dcp_size, config.tp_size] if config.dcp_size > 1 else [],
        "bytes": size_bytes,
    }
    # Ranks of a latent-attention model hold the same latents, and their own of whatever has heads or is a state.
    replicated = config.is_mla_model and name != "mamba" and not hasattr(pool, "head_num")
    tp_rank, tp_size = (0, 1) if replicated else (config.tp_rank, config.tp_size)
    return EnginePages(
        model=model,
        revision=revision,
        size_bytes=size_bytes,
        page_tokens=page_tokens(pool),
        dtype=str(getattr(pool, "dtype", "bytes")).removeprefix("torch."),
        layout=f"sglang-1:{json.dumps(layout, sort_keys=True, separators=(',', ':'))}",
        parameters=facts.parameters,
        shard=Shard(tp_rank, tp_size, config.pp_rank, config.pp_size),
    )


#: A page's pieces in memory.
Pieces = list[tuple[int, int]]


def piece_of(tensor: torch.Tensor) -> Pieces:
    """A contiguous tensor's memory; the caller keeps it alive."""
    return [(tensor.data_ptr(), tensor.numel() * tensor.element_size())]


def addresses(pool: Any, indices: torch.Tensor, count: int) -> list[Pieces] | None:
    """For each of ``count`` pages its pieces in the order of its flat copy, where the pool can tell them."""
    try:
        pointers, sizes = pool.get_page_buffer_meta(indices)
    except (AttributeError, NotImplementedError, ValueError):
        return None
    pieces = list(zip(map(int, pointers), map(int, sizes), strict=True))
    each = len(pieces) // count
    pages = [pieces[start : start + each] for start in range(0, each * count, each)]
    if pool.layout == "layer_first" and each == 2 * pool.layer_num:  # K and V in turn; in the copy all K come first
        pages = [page[0::2] + page[1::2] for page in pages]
    return pages


def page_tokens(pool: Any) -> int:
    return int(getattr(pool, "logical_page_size", None) or getattr(pool, "page_size", None) or 1)


def page_bytes(pool: Any) -> int:
    pieces = addresses(pool, torch.arange(page_tokens(pool)), 1)
    if pieces is not None:
        return sum(size_bytes for _, size_bytes in pieces[0])
    flat = pool.get_dummy_flat_data_page()
    return int(flat.numel() * flat.element_size())
