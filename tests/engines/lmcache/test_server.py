"""A real ``lmcache server`` with our adapter: pages stored by a client, the server killed, fetched from another one."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
import urllib.parse
from pathlib import Path
from typing import Any

from cacheserver import CacheServer, running
from places import Server

CHUNKS = 4


def client(kind: str, server: CacheServer) -> dict[str, Any]:
    driver = Path(__file__).with_name("server_client.py")
    run = subprocess.run(
        [sys.executable, driver, kind, server.url, server.http_url],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert run.returncode == 0, run.stderr[-3000:]
    answer: dict[str, Any] = json.loads(run.stdout.splitlines()[-1])
    return answer


def pages(server: CacheServer) -> set[str]:
    """Hashes of what the server says that it stored, listed three at a time."""
    found: list[str] = []
    token = ""
    while True:
        page = json.loads(server.get(f"/cache/objects?page_size=3{token}"))
        assert len(page["entries"]) <= 3
        found += [entry["key"]["chunk_hash_hex"] for entry in page["entries"]]
        if page["next_page_token"] is None:
            break
        token = f"&page_token={urllib.parse.quote(page['next_page_token'])}"
    assert len(set(found)) == len(found)
    return set(found)


def in_pool(server: CacheServer) -> dict[str, int]:
    """Bytes of the pool by salt, as the server's status tells once they are counted."""
    deadline = time.monotonic() + 60
    while "pool_bytes_by_cache_salt" not in (text := server.get("/status")):
        assert time.monotonic() < deadline, text
        time.sleep(0.2)
    found: list[dict[str, int]] = []
    json.loads(text, object_hook=lambda one: found.append(one.get("pool_bytes_by_cache_salt")) or one)
    (told,) = [one for one in found if one is not None]
    return told


def test_pages_outlive_a_killed_server(server: Server, tmp_path: Path) -> None:
    adapter = {
        "type": "plugin",
        "module_path": "kvstore.connectors.lmcache_l2",
        "class_name": "KvstoreL2Adapter",
        "adapter_params": {"url": f"{server.url}/mp-server", "revision": "1"},
    }
    with running(adapter, tmp_path / "first.log") as first:
        cold = client("cold", first)
        assert cold["found"] == 0 and len(cold["checksums"]) == CHUNKS
        deadline = time.monotonic() + 30
        while len(stored := pages(first)) < CHUNKS:
            assert time.monotonic() < deadline, stored
            time.sleep(0.2)
        first.end(signal.SIGKILL)
    with running(adapter, tmp_path / "second.log") as second:
        warm = client("warm", second)
        assert warm == {"found": CHUNKS, "checksums": cold["checksums"]}
        assert in_pool(second).keys() == {""}
        second.end(signal.SIGTERM)
    assert second.process.returncode in (0, -signal.SIGTERM)
