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


class _AfterListeners:
    """Holds signals back until listeners were told.

    LMCache's wrapper of native clients signals a completion, and only then tells its listeners; its tests ask these as
    soon as they see the signal, which they may win on a busy machine. This stands in for the wrapper's stop event,
    which its thread asks once a round, after all of that.
    """

    def __init__(self, wrapper: Any) -> None:
        self._stop = wrapper._stop
        self._due: list[Any] = []
        for name in ("_store_efd", "_lookup_efd", "_load_efd"):
            setattr(wrapper, name, _Held(getattr(wrapper, name), self._due))
        wrapper._stop = self

    def set(self) -> None:
        self._stop.set()

    def is_set(self) -> bool:
        while self._due:
            self._due.pop(0).notify()
        return bool(self._stop.is_set())


class _Held:
    def __init__(self, notifier: Any, due: list[Any]) -> None:
        self._notifier = notifier
        self._due = due

    def notify(self) -> None:
        self._due.append(self._notifier)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._notifier, name)


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
        wrapper = create_l2_adapter_from_registry(NativePluginL2AdapterConfig.from_dict(spec))
        _AfterListeners(wrapper)
        return wrapper
    spec = {
        "module_path": "kvstore.connectors.lmcache_l2",
        "class_name": "KvstoreL2Adapter",
        "adapter_params": {**params, "max_capacity_gb": config.max_size_gb},
    }
    return create_l2_adapter_from_registry(PluginL2AdapterConfig.from_dict(spec))


mock.MockL2Adapter = adapter
