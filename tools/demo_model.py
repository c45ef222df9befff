"""What the demo computes with: a Qwen2 model with random weights.

The architecture is real, the weights are drawn from a fixed seed: prefill costs what it would cost with trained
weights of that size, and every process that builds the model gets the same weights, as replicas of one model do.
"""

from __future__ import annotations

import inspect
import math
import os
from collections.abc import Sequence
from typing import Any

import torch
import transformers

from tools.demo_text import VOCABULARY

#: Size name -> (hidden, layers, attention heads, KV heads, MLP width). ``small`` is for quick checks.
SIZES = {
    "small": (128, 4, 4, 2, 256),
    "full": (1024, 16, 16, 4, 2816),
}
SEED = 9
#: Standard deviation of the logits, which follows from that of the weights: the best token should stand out.
LOGIT_DEVIATION = 1.6


def build_model(size: str) -> Any:
    """A Qwen2 causal LM in float32 with weights from :data:`SEED`, ready to run on the CPUs this process may use."""
    hidden, layers, heads, kv_heads, mlp = SIZES[size]
    log: Any = transformers.logging
    log.set_verbosity_error()
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    torch.manual_seed(SEED)
    config = transformers.Qwen2Config(
        vocab_size=VOCABULARY,
        hidden_size=hidden,
        intermediate_size=mlp,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        max_position_embeddings=32_768,
        initializer_range=LOGIT_DEVIATION / math.sqrt(hidden),
        tie_word_embeddings=False,
    )
    model: Any = transformers.Qwen2ForCausalLM(config)
    return model.to(torch.float32).eval()


def forward(model: Any, tokens: Sequence[int], cache: Any) -> torch.Tensor:
    """Run ``tokens`` after those that ``cache`` holds, grow the cache, return the last token's logits."""
    # transformers renamed the argument in 5.x and warns about the old name.
    name = "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"
    with torch.inference_mode():
        output = model(torch.tensor([tokens]), use_cache=True, logits_to_keep=1, **{name: cache})
    logits: torch.Tensor = output.logits[0, -1].clone()
    return logits
