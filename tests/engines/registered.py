"""A pytest plug-in for vLLM's own tests: what vLLM does at start, which registers our tier beside its own."""

from vllm.plugins import load_general_plugins
from vllm.v1.kv_offload.tiering.factory import SecondaryTierFactory

load_general_plugins()
assert "curvfs" in SecondaryTierFactory._registry
