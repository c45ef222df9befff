"""Whose chunks vLLM's are: from what its offloading tells tiers, and from what only its whole configuration says."""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from curvfs.world import Disk
from kvstore.connectors.identity import EnginePages, name_and_revision

logger = logging.getLogger("vllm.curvfs")

WHERE = "the tier's entry of secondary_tiers in --kv-transfer-config"


@dataclass(frozen=True, slots=True)
class EngineFacts:
    """What an engine knows of its model and does not tell to tiers. ``revision``: as asked for, empty for the default
    one. ``parameters``: what else changes the numbers, as text."""

    revision: str
    parameters: str

    @classmethod
    def of(cls, vllm_config: Any) -> EngineFacts:
        model = vllm_config.model_config
        text, overrides = model.hf_text_config, getattr(model, "hf_overrides", None)
        parameters = {
            "rope": getattr(text, "rope_parameters", None) or getattr(text, "rope_scaling", None),
            "theta": getattr(text, "rope_theta", None),
            "overrides": getattr(overrides, "__qualname__", "?") if callable(overrides) else overrides or None,
            "quantization": getattr(model, "quantization", None),
            "compute": str(model.dtype).removeprefix("torch."),
        }
        return cls(model.revision or "", json.dumps(parameters, sort_keys=True, default=str))


_facts: dict[str, EngineFacts] = {}


def leave_facts(engine_id: str, facts: EngineFacts) -> None:
    """Let the tiers that this process makes for an engine find them."""
    _facts[engine_id] = facts


def facts_of(engine_id: str) -> EngineFacts | None:
    return _facts.get(engine_id)


def pages_of(
    config: Any, size_bytes: int, facts: EngineFacts | None, settings: Mapping[str, Any], disk: Disk
) -> EnginePages:
    """The chunks of an engine: the bytes of all its ranks, one after the other, as it lays them out.

    ``config``: vLLM's OffloadingConfig. Raises ConfigError where the weights cannot be told.
    """
    if facts is None and not settings.get("revision"):
        logger.warning(
            "curvfs tier: overrides of the model's configuration are not visible to a tier; where there are any, use"
            ' "kv_connector": "CurvfsConnector", or name them in "revision" in %s.',
            WHERE,
        )
    parallel, cache = config.parallel, config.cache
    replicated = bool(getattr(config, "replicated_layout", False))
    alike = replicated or parallel.is_parallelism_agnostic
    layers = json.dumps([list(group.layer_names) for group in config.groups]).encode()
    layout = {
        "block_tokens": [group.tokens_per_block for group in config.groups],
        "layers": hashlib.sha256(layers).hexdigest()[:32],
        "hash_tokens": cache.tokens_per_hash,
        "chunk_blocks": cache.blocks_per_chunk,
        "ranks": [] if alike else [parallel.tp_size, parallel.pp_size, parallel.pcp_size, parallel.dcp_size],
        "replicated": replicated,
        "canonical": bool(getattr(config, "canonical_layout", False)),
        "cache": getattr(config, "kv_cache_layout", None),
        "bytes": size_bytes,
    }
    branch = None if facts is None else facts.revision
    model, revision = name_and_revision(config.model.name, settings, where=WHERE, disk=disk, branch=branch)
    return EnginePages(
        model=model,
        revision=revision,
        size_bytes=size_bytes,
        page_tokens=max(group.tokens_per_block for group in config.groups) * cache.blocks_per_chunk,
        dtype=config.model.dtype,
        layout=f"vllm-1:{json.dumps(layout, sort_keys=True, separators=(',', ':'))}",
        parameters="" if facts is None else facts.parameters,
    )
