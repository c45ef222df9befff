"""Our tier beside vLLM's fs tier, under its tiering manager: ``.engines/vllm/bin/python tests/engines/bench_vllm.py``.

A store ends when every job has ended, a load when the lookups of a new engine have become hits in its host memory.
"""

from __future__ import annotations

import itertools
import os
import time
from pathlib import Path
from typing import Any

from benching import Measure, run
from places import Server
from tiering import Tiering, keys_of
from vllm.plugins import load_general_plugins

CHUNK_BYTES, CHUNKS = 2 << 20, 64
_numbers = itertools.count()


def measured(tier: dict[str, Any]) -> Measure:
    def measure() -> tuple[float, float]:
        first = next(_numbers) * CHUNKS
        content = {key: os.urandom(CHUNK_BYTES) for key in keys_of(range(first, first + CHUNKS))}
        size = {"chunk_bytes": CHUNK_BYTES, "chunks": CHUNKS + 8}
        with Tiering(tier, **size) as one:
            begin = time.monotonic()
            one.store(content)
            stored_s = time.monotonic() - begin
        with Tiering(tier, **size) as two:
            begin = time.monotonic()
            told = two.look_up(list(content))
            loaded_s = time.monotonic() - begin
            assert {words[-1] for words in told} == {"HIT"}
            assert two.read(list(content)) == list(content.values())
        return stored_s, loaded_s

    return measure


def variants(work: Path, mount: Path, server: Server) -> dict[str, Measure]:
    ours = {"type": "curvfs", "revision": "1"}
    return {
        "curvfs tier, curvine://": measured({**ours, "url": server.url}),
        "curvfs tier, curvine://, on loan": measured({**ours, "url": server.url, "loan": True}),
        "curvfs tier, file:// on the disk": measured({**ours, "url": f"file://{work}/ours"}),
        "vLLM fs tier on the disk": measured({"type": "fs", "root_dir": str(work / "theirs")}),
        "vLLM fs tier on the mount": measured({"type": "fs", "root_dir": str(mount / "plain")}),
        "vLLM fs tier on the mount, in the KV prefix": measured({"type": "fs", "root_dir": str(mount / "kv" / "fs")}),
    }


if __name__ == "__main__":
    load_general_plugins()
    run(f"vLLM 0.33, {CHUNKS} chunks of 2 MiB", CHUNK_BYTES * CHUNKS, variants)
