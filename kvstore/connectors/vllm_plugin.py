"""What vLLM loads at start (entry point group ``vllm.general_plugins``): short names for our tier and connector.

vLLM runs :func:`register` in every process; it opens nothing and imports neither of the two.
"""

from __future__ import annotations

import importlib
from typing import Any

_NAMES = (
    (
        ("vllm.v1.kv_offload.tiering.factory", "SecondaryTierFactory", "register_tier"),
        ("curvfs", "kvstore.connectors.vllm", "KvstoreTier"),
    ),
    (
        ("vllm.distributed.kv_transfer.kv_connector.factory", "KVConnectorFactory", "register_connector"),
        ("CurvfsConnector", "kvstore.connectors.vllm_connector", "CurvfsConnector"),
    ),
)


def register() -> None:
    """Make ``"type": "curvfs"`` and ``"kv_connector": "CurvfsConnector"`` known; idempotent."""
    for (module, name, method), entry in _NAMES:
        try:
            factory: Any = getattr(importlib.import_module(module), name)
        except (ImportError, AttributeError):  # a vLLM without tiers
            continue
        if entry[0] not in factory._registry:
            getattr(factory, method)(*entry)
