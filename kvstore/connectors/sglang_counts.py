"""What SGLang's metrics of storage say of a back end."""

from __future__ import annotations

import importlib
from typing import Any


class Speeds:
    """Of what was moved since they were asked for last."""

    def __init__(self) -> None:
        self._read: list[tuple[int, float]] = []  # pages, GB/s
        self._written: list[tuple[int, float]] = []

    def add(self, pages: int, size_bytes: int, took_s: float, *, put: bool) -> None:
        (self._written if put else self._read).append((pages, size_bytes / max(took_s, 1e-9) / 1e9))

    def taken(self) -> Any:
        """As SGLang's StorageMetrics."""
        stats: Any = importlib.import_module("sglang.srt.observability.metrics_collector").StorageMetrics()
        for moved, pages, speeds in (
            (self._read, stats.prefetch_pgs, stats.prefetch_bandwidth),
            (self._written, stats.backup_pgs, stats.backup_bandwidth),
        ):
            for _ in range(len(moved)):
                count, speed = moved.pop(0)
                pages.append(count)
                speeds.append(speed)
        return stats
