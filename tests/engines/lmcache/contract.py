"""A pytest plug-in: LMCache's own contract tests of L2 adapters on one of ours, ``CONTRACT``, in ``CONTRACT_POOL``."""

from __future__ import annotations

import itertools
import os
from typing import Any

import lmcache.v1.distributed.l2_adapters.mock_l2_adapter as mock
from lmcache.v1.distributed.l2_adapters.factory import create_l2_adapter_from_registry
from lmcache.v1.distributed.l2_adapters.native_plugin_l2_adapter import NativePluginL2AdapterConfig
from lmcache.v1.distributed.l2_adapters.plugin_l2_adapter import PluginL2AdapterConfig

_numbers = itertools.count()


def adapter(config: Any) -> Any:
    """In place of LMCache's mock: ours, each in a place of its own."""
    params = {"url": os.environ["CONTRACT_POOL"], "prefix": f"kv-{next(_numbers)}", "revision": "1"}
    if os.environ["CONTRACT"] == "native":
        spec = {
            "module_path": "kvstore.connectors.lmcache_native",
            "class_name": "KvstoreClient",
            "adapter_params": {**params, "dtype": "float32"},
            "max_capacity_gb": config.max_size_gb,
        }
        return create_l2_adapter_from_registry(NativePluginL2AdapterConfig.from_dict(spec))
    spec = {
        "module_path": "kvstore.connectors.lmcache_l2",
        "class_name": "KvstoreL2Adapter",
        "adapter_params": {**params, "max_capacity_gb": config.max_size_gb},
    }
    return create_l2_adapter_from_registry(PluginL2AdapterConfig.from_dict(spec))


mock.MockL2Adapter = adapter
