"""What LMCache's in-process engine says of itself: settings, whose chunks they are, and what cannot be served."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from curvfs.errors import ConfigError
from curvfs.world import Disk
from kvstore.connectors.identity import EnginePages, name_and_revision
from kvstore.geometry import dtype_named

#: What LMCache itself reads of a plug-in's settings.
_ENGINE_SETTINGS = frozenset({"module_path", "class_name"})


def settings_of(config: Any, plugin_name: str) -> tuple[dict[str, Any], str]:
    """What is meant for the store, and where it stands, for messages."""
    prefix = f"remote_storage_plugin.{plugin_name}."
    given: dict[str, Any] = config.extra_config or {}
    settings = {name.removeprefix(prefix): value for name, value in given.items() if name.startswith(prefix)}
    kept = {name: value for name, value in settings.items() if name not in _ENGINE_SETTINGS}
    return kept, f"LMCache's extra_config, as {prefix}<name>"


def pages_of(
    connector: Any, metadata: Any, size_bytes: int, settings: Mapping[str, Any], where: str, disk: Disk
) -> EnginePages:
    """The chunks of one worker. ``connector``: what LMCache's base class worked out. Raises ConfigError."""
    model, revision = name_and_revision(metadata.model_name, settings, where=where, disk=disk)
    names = {dtype_named(dtype).name for dtype in connector.meta_dtypes}
    shapes = ",".join("x".join(str(size) for size in shape) for shape in connector.meta_shapes)
    return EnginePages(
        model=model,
        revision=revision,
        size_bytes=size_bytes,
        page_tokens=metadata.chunk_size,
        dtype=names.pop() if len(names) == 1 else "mixed",
        layout=f"lmcache-1:{connector.meta_fmt.name}:{shapes}",
    )


def check(config: Any, logger: logging.Logger) -> None:
    """Raises ConfigError for what is not supported; warns where keys may differ from process to process."""
    if config.use_layerwise:
        raise ConfigError("This connector stores whole chunks; set use_layerwise to false in LMCache's configuration.")
    if config.remote_serde not in (None, "naive"):
        raise ConfigError(
            f"This connector stores chunks as they are; set remote_serde to naive, not {config.remote_serde}, in"
            " LMCache's configuration."
        )
    if config.pre_caching_hash_algorithm == "builtin":
        logger.warning(
            "LMCache's pre_caching_hash_algorithm is builtin: other processes may get other keys for the same tokens"
            " and find nothing. Set it to sha256_cbor in LMCache's configuration, everywhere."
        )
