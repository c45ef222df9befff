"""vLLM's OffloadingConnector, which also tells our tiers what only an engine's whole configuration says.

``"kv_connector": "CurvfsConnector"`` where one would write ``"OffloadingConnector"``; everything else is the same.
"""

from __future__ import annotations

import logging
import os
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector import OffloadingConnector

from kvstore.connectors.vllm_identity import EngineFacts, leave_facts

logger = logging.getLogger("vllm.curvfs")


class CurvfsConnector(OffloadingConnector):  # type: ignore[misc]
    """An OffloadingConnector whose curvfs tiers know the revision asked for and what overrides the configuration."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        algorithm = str(getattr(vllm_config.cache_config, "prefix_caching_hash_algo", ""))
        if algorithm.startswith("xxhash") and not os.environ.get("PYTHONHASHSEED"):
            logger.warning(
                "curvfs: with --prefix-caching-hash-algo %s every process names its blocks differently, so nothing will"
                " be found again; use sha256_cbor.",
                algorithm,
            )
        leave_facts(vllm_config.kv_transfer_config.engine_id, EngineFacts.of(vllm_config))
        super().__init__(vllm_config, role, kv_cache_config)
