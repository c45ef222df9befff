"""Rounds and a table for what moves pages: every variant once a round, one after the other, medians of the rounds."""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from places import ROOT, Server, mounted, served

from tools.bench.spread import settle, spread

#: Stores and loads fresh content below a directory of its own; seconds of the one and the other.
Measure = Callable[[], tuple[float, float]]


def run(title: str, moved_bytes: int, variants: Callable[[Path, Path, Server], dict[str, Measure]]) -> None:
    parser = argparse.ArgumentParser(description=title)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--directory", default=tempfile.gettempdir(), help="on the disk to measure")
    options = parser.parse_args()
    work = Path(tempfile.mkdtemp(prefix="engine-bench-", dir=options.directory))
    found: dict[str, list[tuple[float, float]]] = {}
    spread(work)
    try:
        with served(work / "pool") as server, mounted(work / "mount", server.url + "/") as mount:
            for _ in range(options.rounds):
                for name in variants(work, mount, server):
                    place = Path(tempfile.mkdtemp(dir=work))
                    for directory in (place / "ours", place / "theirs", mount / "plain"):
                        directory.mkdir()
                    found.setdefault(name, []).append(variants(place, mount, server)[name]())
                    print(f"{name}: stored and loaded in {found[name][-1]} s", flush=True)
                    for directory in (place, mount / "plain"):
                        shutil.rmtree(directory)
                    settle(work)
    finally:
        shutil.rmtree(work, ignore_errors=True)
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.strip()
    print(f"\n{time.strftime('%Y-%m-%d %H:%M', time.gmtime())} UTC, commit {commit}, {os.cpu_count()} cores,", end=" ")
    print(f"load {os.getloadavg()[2]:.1f}, median of {options.rounds} rounds (lowest to highest), GB/s (10^9)\n")
    print(f"| {title} | store | load |\n| --- | ---: | ---: |")
    for name, times in found.items():
        cells = []
        for seconds in zip(*times, strict=True):
            speeds = sorted(moved_bytes / one / 1e9 for one in seconds)
            cells.append(f"{statistics.median(speeds):.2f} ({speeds[0]:.2f}–{speeds[-1]:.2f})")
        print(f"| {name} | {' | '.join(cells)} |")
