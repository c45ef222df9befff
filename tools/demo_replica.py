"""One model replica of the demo, in a process of its own: ``python -m tools.demo_replica --url ... --model ...``.

It reads one JSON request a line and answers each with one JSON line, until its input ends:

``ready``   the model is built and warm: what it is.
``cold``    compute ``tokens`` from nothing and generate ``steps`` tokens more.
``store``   put the whole pages of the last prompt into the store: the digest of each page.
``shared``  find the longest stored prefix of ``tokens``, load it, compute the rest, generate ``steps`` tokens.

Two replicas meet in the store only: nothing that one answers tells the other more than the prompt.
"""

from __future__ import annotations

import argparse
import base64
import json
import signal
import sys
from collections.abc import Sequence
from typing import Any

import torch
import transformers
import xxhash

import kvstore
from curvfs.errors import CurvfsError
from curvfs.world import World
from kvstore.connectors.transformers import CachePages, geometry_for, identity_for, weights_fingerprint
from tools.demo_model import build_model, forward

_STORE_TIMEOUT_S = 60.0
_WARM_UP_TOKENS = 96


def page_digests(cache: Any, page_tokens: int, pages: int) -> list[str]:
    """xxh3_128 of the K and V of each of the first ``pages`` pages, over all layers, in order."""
    digests = []
    for start in range(0, pages * page_tokens, page_tokens):
        digest = xxhash.xxh3_128()
        for layer in cache.layers:
            for tensor in (layer.keys, layer.values):
                digest.update(tensor[0, :, start : start + page_tokens].numpy().tobytes())
        digests.append(digest.hexdigest())
    return digests


class Replica:
    """The model, and the store it shares."""

    def __init__(self, url: str, size: str, page_tokens: int, world: World) -> None:
        self._clock = world.clock
        self._page_tokens = page_tokens
        self._model = build_model(size)
        config = self._model.config
        geometry = geometry_for(config, torch.float32, page_tokens)
        self._identity = identity_for(
            config, geometry, model=f"demo-qwen2-{size}", revision=weights_fingerprint(self._model)
        )
        self._store = kvstore.open(url, self._identity, geometry=geometry, world=world)
        self._pages = CachePages(self._store)
        self._bytes_per_token = geometry.bytes_per_token
        self._tokens: list[int] = []
        self._cache: Any = None
        self._warm_up()

    def _warm_up(self) -> None:
        """The first pass through a model is slow in ways that have nothing to do with the prompt."""
        self._generate(list(range(_WARM_UP_TOKENS)), transformers.DynamicCache(), 2, self._clock.monotonic_s())

    def _generate(self, tokens: Sequence[int], cache: Any, steps: int, started_s: float) -> dict[str, Any]:
        """Run ``tokens`` after what is cached, then generate greedily; times count from ``started_s``."""
        logits = forward(self._model, tokens, cache)
        new_tokens = [int(logits.argmax())]
        first_token_s = self._clock.monotonic_s() - started_s
        all_logits = [logits]
        while len(new_tokens) < steps:
            logits = forward(self._model, new_tokens[-1:], cache)
            new_tokens.append(int(logits.argmax()))
            all_logits.append(logits)
        table = torch.stack(all_logits)
        best = table.topk(2, dim=-1).values
        return {
            "new_tokens": new_tokens,
            "first_token_s": first_token_s,
            "margin": float((best[:, 0] - best[:, 1]).min()),
            "logits": base64.b64encode(table.numpy().tobytes()).decode(),
        }

    # ---- requests

    def ready(self) -> dict[str, Any]:
        parameters = sum(each.numel() for each in self._model.parameters())
        config = self._model.config
        return {
            "model": f"Qwen2, {parameters / 1e6:.0f} M parameters, {config.num_hidden_layers} layers, float32",
            "fingerprint": self._identity.fingerprint().hex(),
            "bytes_per_token": self._bytes_per_token,
        }

    def cold(self, tokens: list[int], steps: int) -> dict[str, Any]:
        known = self._store.lookup(self._store.keys(tokens))
        self._tokens, self._cache = tokens, transformers.DynamicCache()
        answer = self._generate(tokens, self._cache, steps, self._clock.monotonic_s())
        return {**answer, "known_tokens": known.tokens}

    def store(self) -> dict[str, Any]:
        results = self._pages.save(self._tokens, self._cache).result(_STORE_TIMEOUT_S)
        if not all(results):
            raise CurvfsError(f"A page could not be stored: {self._store.stats().last_error}")
        return {"digests": page_digests(self._cache, self._page_tokens, len(results)), "path": self._path()}

    def shared(self, tokens: list[int], steps: int) -> dict[str, Any]:
        loaded_before_bytes = self._store.stats().get_bytes
        started_s = self._clock.monotonic_s()
        # The last token is always computed: the next one is chosen by its logits.
        found, hit_tokens = self._pages.load(tokens, max_tokens=len(tokens) - 1)
        load_s = self._clock.monotonic_s() - started_s
        cache = transformers.DynamicCache() if found is None else found
        answer = self._generate(tokens[hit_tokens:], cache, steps, started_s)
        return {
            **answer,
            "hit_tokens": hit_tokens,
            "loaded_bytes": self._store.stats().get_bytes - loaded_before_bytes,
            "load_s": load_s,
            "digests": page_digests(cache, self._page_tokens, hit_tokens // self._page_tokens),
            "path": self._path(),
        }

    def _path(self) -> str:
        """How bytes move between this process and the store."""
        stats = self._store.stats()
        if stats.direct:
            return "block files, O_DIRECT"
        return "TCP" if stats.direct_reason.startswith("blocks are remote") else "block files, buffered"

    def close(self) -> None:
        self._store.close()


def main() -> int:
    """Answer requests until the input ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # whoever started us closes our input
    parser = argparse.ArgumentParser()
    parser.add_argument("--url", required=True)
    parser.add_argument("--model", required=True)
    parser.add_argument("--page-tokens", type=int, required=True)
    arguments = parser.parse_args()
    try:
        replica = Replica(arguments.url, arguments.model, arguments.page_tokens, World.real())
    except CurvfsError as error:
        _answer({"error": str(error)})
        return error.exit_code
    try:
        for line in sys.stdin:
            request = json.loads(line)
            try:
                _answer(getattr(replica, request.pop("do"))(**request))
            except CurvfsError as error:
                _answer({"error": str(error)})
    finally:
        replica.close()
    return 0


def _answer(answer: dict[str, Any]) -> None:
    print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    sys.exit(main())
