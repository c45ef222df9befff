"""``lmcache bench l2`` on our adapters and on LMCache's own, on one disk in one run: ``make bench-engines``.

Every variant is run once in each round, one after the other, so that a busy moment of the machine hits all alike; the
median of the rounds counts. Appends a table to docs/results/lmcache-l2.md.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from places import ROOT, Server, mounted, served

from tools.bench.spread import settle, spread

RESULTS = ROOT / "docs" / "results" / "lmcache-l2.md"
#: KiB of an object -> objects of a submit, submits measured.
SIZES = {14336: (8, 10), 256: (8, 40)}


def ours(kind: str, url: str) -> dict[str, Any]:
    module, name, more = {
        "native": ("lmcache_native", "KvstoreClient", {"dtype": "bfloat16"}),
        "plugin": ("lmcache_l2", "KvstoreL2Adapter", {"dtype": "bfloat16"}),
    }[kind]
    return {
        "type": "native_plugin" if kind == "native" else "plugin",
        "module_path": f"kvstore.connectors.{module}",
        "class_name": name,
        "adapter_params": {"url": url, "revision": "1", **more},
    }


def variants(work: Path, mount: Path, server: Server) -> dict[str, dict[str, Any]]:
    def files(kind: str, base: Path, **more: Any) -> dict[str, Any]:
        return {"type": kind, "base_path": str(base), **more}

    return {
        "curvfs native client, file:// on the disk": ours("native", f"file://{work}/ours"),
        "curvfs adapter, file:// on the disk": ours("plugin", f"file://{work}/ours"),
        "curvfs native client, curvine://": ours("native", f"{server.url}/"),
        "LMCache fs on the disk": files("fs", work / "theirs"),
        "LMCache fs_native on the disk": files("fs_native", work / "theirs"),
        "LMCache fs_native O_DIRECT on the disk": files("fs_native", work / "theirs", use_odirect=True),
        "LMCache fs on the mount": files("fs", mount / "plain"),
        "LMCache fs_native on the mount": files("fs_native", mount / "plain"),
        "LMCache fs_native O_DIRECT on the mount": files("fs_native", mount / "plain", use_odirect=True),
    }


def measured(adapter: dict[str, Any], size_kib: int) -> dict[str, float]:
    """GB/s of stores and loads of one run."""
    keys, submits = SIZES[size_kib]
    command = [Path(sys.executable).with_name("lmcache"), "bench", "l2", "--l2-adapter", json.dumps(adapter)]
    options = ["--num-keys", keys, "--data-size-kb", size_kib, "--rounds", submits, "--l1-align-bytes", 4096]
    environ = {**os.environ, "LMCACHE_TRACK_USAGE": "false", "LMCACHE_DISABLE_BANNER": "1"}
    run = subprocess.run(
        [*command, *map(str, options), "--no-skip-verify", "--format", "json"],
        env=environ,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    start = run.stdout.find('{\n  "title"')
    if start < 0 or "data verified OK" not in run.stdout:
        raise SystemExit(f"{adapter}: {run.stdout[-1500:]} {run.stderr[-1500:]}")
    metrics, _ = json.JSONDecoder().raw_decode(run.stdout, start)
    found: dict[str, float] = {}
    for entry in metrics["metrics"].values():
        if entry.get("operation") in ("Store", "Load"):
            assert entry["total_success"] == entry["total_keys"], entry
            moved = keys * size_kib * 1024
            found[entry["operation"]] = moved / entry["duration_p50_ms"] / 1e6
    return found


def emptied(*places: Path) -> None:
    for place in places:
        for entry in place.iterdir():
            shutil.rmtree(entry) if entry.is_dir() else entry.unlink()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", default="", help="variants whose names this expression matches")
    parser.add_argument("--sizes", type=int, nargs="*", default=list(SIZES), help="KiB of an object")
    parser.add_argument("--directory", default=tempfile.gettempdir(), help="on the disk to measure")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # whatever ends it, nothing stays mounted
    work = Path(tempfile.mkdtemp(prefix="lmcache-bench-", dir=options.directory))
    spread(work)
    try:
        with served(work / "pool") as server, mounted(work / "mount", server.url + "/") as mount:
            (mount / "plain").mkdir()
            found: dict[tuple[int, str], list[dict[str, float]]] = {}
            for size_kib in options.sizes:
                for _ in range(options.rounds):
                    for name in variants(work, mount, server):
                        if not re.search(options.only, name):
                            continue
                        place = Path(tempfile.mkdtemp(dir=work))
                        (place / "ours").mkdir()
                        (place / "theirs").mkdir()
                        result = measured(variants(place, mount, server)[name], size_kib)
                        found.setdefault((size_kib, name), []).append(result)
                        print(f"{size_kib} KiB {name}: {result}", flush=True)
                        shutil.rmtree(place)
                        emptied(mount / "plain", mount / "kv")
                        settle(work)
                        time.sleep(1.0)
    finally:
        shutil.rmtree(work, ignore_errors=True)
    report(found, options.sizes, options.rounds)


def report(found: dict[tuple[int, str], list[dict[str, float]]], sizes: list[int], rounds: int) -> None:
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.strip()
    load = os.getloadavg()[2]
    used = f" (`BENCH_OPTIONS={' '.join(sys.argv[1:])!r}`)" if sys.argv[1:] else ""
    lines = [
        "",
        f"## {time.strftime('%Y-%m-%d %H:%M', time.gmtime())} UTC, commit {commit}",
        "",
        f"`make bench-engines`{used}, median of {rounds} rounds; {os.cpu_count()} cores, load {load:.1f}, Linux"
        f" {platform.release()}, GB/s (10^9), every load verified by LMCache.",
        "",
        "| adapter | " + " | ".join(f"store {size} KiB | load {size} KiB" for size in sizes) + " |",
        "| --- |" + " ---: |" * (2 * len(sizes)),
    ]
    for name in dict.fromkeys(name for _, name in found):
        cells = [
            f"{statistics.median(run[operation] for run in found[size, name]):.2f}"
            for size in sizes
            for operation in ("Store", "Load")
        ]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    with RESULTS.open("a") as file:
        file.write("\n".join(lines) + "\n")
    print("\n".join(lines))


if __name__ == "__main__":
    main()
