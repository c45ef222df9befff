"""From a model, hardware and a load to what fits, what it saves and what wears out. Plain arithmetic, no I/O.

Rates are bytes per second, capacities bytes; vendors' GB (10^9) are turned into bytes before they come here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil
from statistics import fmean

from kvstore.header import ObjectLayout
from tools.size.models import Model
from tools.traces import Request, Reuse

_DAY_S = 86_400.0
_MINUTE_S = 60.0


@dataclass(frozen=True, slots=True)
class Hardware:
    """The pool and what computes. None: not given. ``fill``: part of the space that is used before eviction."""

    nodes: int = 1
    node_bytes: int | None = None
    read_bytes_per_s: float | None = None
    write_bytes_per_s: float | None = None
    network_bytes_per_s: float | None = None
    prefill_tokens_per_s: float | None = None
    latency_s: float = 0.005
    fill: float = 0.9
    copies: int = 1

    @property
    def load_bytes_per_s(self) -> float | None:
        """How fast one replica can read from the pool: its own network, or one node's drives."""
        given = [rate for rate in (self.read_bytes_per_s, self.network_bytes_per_s) if rate is not None]
        return min(given) if given else None

    @property
    def capacity_bytes(self) -> int | None:
        """Bytes of objects that the pool keeps."""
        if self.node_bytes is None:
            return None
        return int(self.node_bytes * self.nodes * self.fill / self.copies)


@dataclass(frozen=True, slots=True)
class Pages:
    """A model's KV as it is stored. ``stored_bytes_per_token`` counts headers and alignment too."""

    page_tokens: int
    page_bytes: int
    object_bytes: int
    objects_per_page: int
    bytes_per_token: int
    rank_bytes_per_token: float

    @classmethod
    def of(cls, model: Model, page_tokens: int, tp_size: int) -> Pages:
        """Raises ConfigError where the split or the page cannot be."""
        geometry = model.geometry(page_tokens, tp_size=tp_size)
        objects = geometry.shard.tp_size
        return cls(
            page_tokens=page_tokens,
            page_bytes=geometry.size_bytes * objects,
            object_bytes=ObjectLayout(geometry).object_bytes,
            objects_per_page=objects,
            bytes_per_token=model.bytes_per_token,
            rank_bytes_per_token=geometry.bytes_per_token,
        )

    @property
    def stored_bytes_per_token(self) -> float:
        return self.object_bytes * self.objects_per_page / self.page_tokens


@dataclass(frozen=True, slots=True)
class Load:
    """One point of a load: every figure is of one request, ``hit_tokens`` those of its prefix that the pool has."""

    time_s: float
    input_tokens: int
    hit_tokens: int

    @property
    def miss_tokens(self) -> int:
        return self.input_tokens - self.hit_tokens


def trace_load(requests: Sequence[Request], reuse: Reuse, capacity_blocks: int, block_tokens: int) -> list[Load]:
    """What each request of a trace would find in a pool of that capacity."""
    hits = reuse.request_hits(capacity_blocks)
    return [
        Load(request.timestamp_s, request.input_tokens, min(blocks * block_tokens, request.input_tokens))
        for request, blocks in zip(requests, hits, strict=True)
    ]


def break_even_tokens(pages: Pages, hardware: Hardware) -> int | None:
    """The shortest prefix that is loaded faster than it is computed; None when none is, or when not all is given."""
    gain_s = gain_s_per_token(pages, hardware)
    if gain_s is None or gain_s <= 0:
        return None
    return ceil(hardware.latency_s / gain_s)


def gain_s_per_token(pages: Pages, hardware: Hardware) -> float | None:
    """Seconds that loading a token saves over computing it, latency aside."""
    rate, prefill = hardware.load_bytes_per_s, hardware.prefill_tokens_per_s
    if rate is None or prefill is None:
        return None
    return 1 / prefill - pages.stored_bytes_per_token / rate


def ttft_s(load: Load, pages: Pages, hardware: Hardware) -> tuple[float, float] | None:
    """Time to the first token of an idle replica without a pool, and with it: hits are loaded where that is faster."""
    rate, prefill = hardware.load_bytes_per_s, hardware.prefill_tokens_per_s
    if rate is None or prefill is None:
        return None
    cold_s = load.input_tokens / prefill
    if not load.hit_tokens:
        return cold_s, cold_s
    loaded_s = hardware.latency_s + load.hit_tokens * pages.stored_bytes_per_token / rate
    return cold_s, min(cold_s, loaded_s + load.miss_tokens / prefill)


def quantiles(values: Sequence[float]) -> dict[str, float]:
    """``mean_s``, ``p50_s`` and ``p99_s`` of durations."""
    ordered = sorted(values)
    return {
        "mean_s": fmean(ordered),
        "p50_s": ordered[(len(ordered) - 1) // 2],
        "p99_s": ordered[ceil(0.99 * len(ordered)) - 1],
    }


def traffic(loads: Sequence[Load], pages: Pages, duration_s: float, *, rate: float = 1.0) -> dict[str, float]:
    """Bytes per second to and from the pool: over all, and in the busiest minute. ``rate``: how much faster than the
    loads' own times they come."""
    per_token = pages.stored_bytes_per_token * rate
    minutes: dict[int, list[int]] = {}
    for load in loads:
        minute = minutes.setdefault(int(load.time_s / _MINUTE_S), [0, 0])
        minute[0] += load.hit_tokens
        minute[1] += load.miss_tokens
    minute_s = min(duration_s, _MINUTE_S)
    return {
        "read_bytes_per_s": sum(load.hit_tokens for load in loads) * per_token / duration_s,
        "write_bytes_per_s": sum(load.miss_tokens for load in loads) * per_token / duration_s,
        "peak_read_bytes_per_s": max(read for read, _ in minutes.values()) * per_token / minute_s,
        "peak_write_bytes_per_s": max(written for _, written in minutes.values()) * per_token / minute_s,
    }


def wear(written_bytes_per_s: float, hardware: Hardware) -> dict[str, float] | None:
    """Bytes written a day in the pool, and how often that fills its drives; None when their size is not given."""
    if hardware.node_bytes is None:
        return None
    written_bytes = written_bytes_per_s * _DAY_S * hardware.copies
    return {"written_bytes_per_day": written_bytes, "dwpd": written_bytes / (hardware.node_bytes * hardware.nodes)}


def headroom(needs: dict[str, float], hardware: Hardware) -> dict[str, float]:
    """How many times the busiest minute fits into what disks and network of all nodes can do; below 1 it does not."""
    limits = (
        ("disk_read", hardware.read_bytes_per_s, needs["peak_read_bytes_per_s"]),
        ("disk_write", hardware.write_bytes_per_s, needs["peak_write_bytes_per_s"] * hardware.copies),
        (
            "network",
            hardware.network_bytes_per_s,
            max(needs["peak_read_bytes_per_s"], needs["peak_write_bytes_per_s"] * hardware.copies),
        ),
    )
    return {
        name: limit * hardware.nodes / need for name, limit, need in limits if limit is not None and need > 0
    }
