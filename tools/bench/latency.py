"""Latencies of one kind of call: the histogram of :mod:`curvfs.histogram`, with what fio reports beside it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from curvfs.histogram import Histogram

#: fio's bins: upper bounds in nanoseconds, microseconds and milliseconds.
_NS_BINS = (2, 4, 10, 20, 50, 100, 250, 500, 750, 1000)
_US_BINS = _NS_BINS
_MS_BINS = (2, 4, 10, 20, 50, 100, 250, 500, 750, 1000, 2000)


class Latency:
    """Durations in nanoseconds; one thread records, others merge when it has ended."""

    __slots__ = ("histogram", "max_ns", "min_ns", "squares")

    def __init__(self) -> None:
        self.histogram = Histogram()
        self.min_ns = 0
        self.max_ns = 0
        self.squares = 0.0

    def record_ns(self, value_ns: int) -> None:
        if self.histogram.count == 0 or value_ns < self.min_ns:
            self.min_ns = value_ns
        if value_ns > self.max_ns:
            self.max_ns = value_ns
        self.squares += float(value_ns) * value_ns
        self.histogram.record_ns(value_ns)

    def add(self, other: Latency) -> None:
        if other.count:
            self.min_ns = other.min_ns if not self.count else min(self.min_ns, other.min_ns)
        self.max_ns = max(self.max_ns, other.max_ns)
        self.squares += other.squares
        self.histogram.add(other.histogram)

    @property
    def count(self) -> int:
        return self.histogram.count

    @property
    def mean_ns(self) -> float:
        return self.histogram.total_ns / self.count if self.count else 0.0

    @property
    def stddev_ns(self) -> float:
        if self.count < 2:
            return 0.0
        return math.sqrt(max(0.0, self.squares / self.count - self.mean_ns**2))

    def percentile_ns(self, percent: float) -> int:
        return round(self.histogram.quantile_s(percent / 100) * 1e9)

    def fio(self, percentiles: Sequence[float] = ()) -> dict[str, Any]:
        """The record that fio's JSON has of a latency."""
        record: dict[str, Any] = {
            "min": self.min_ns,
            "max": self.max_ns,
            "mean": round(self.mean_ns, 6),
            "stddev": round(self.stddev_ns, 6),
            "N": self.count,
        }
        if percentiles and self.count:
            record["percentile"] = {f"{percent:.6f}": self.percentile_ns(percent) for percent in percentiles}
        return record

    def message(self) -> dict[str, Any]:
        """What :meth:`from_message` makes this of again, as JSON."""
        buckets = [[lower, count] for lower, _, count in self.histogram.buckets()]
        return {
            "buckets": buckets,
            "total": self.histogram.total_ns,
            "min": self.min_ns,
            "max": self.max_ns,
            "squares": self.squares,
        }

    @classmethod
    def from_message(cls, message: dict[str, Any]) -> Latency:
        made = cls()
        buckets = message["buckets"]
        for index, (lower, count) in enumerate(buckets):
            if index == len(buckets) - 1:  # the longest one is known exactly
                made.histogram.record_ns(message["max"])
                count -= 1
            if count:
                made.histogram.record_ns(lower, count)
        made.histogram.total_ns = message["total"]
        made.min_ns, made.max_ns, made.squares = message["min"], message["max"], message["squares"]
        return made


def fio_bins(latencies: Sequence[Latency]) -> dict[str, dict[str, float]]:
    """``latency_ns``, ``latency_us`` and ``latency_ms``: the percentage of all calls in each of fio's bins."""
    ns, us, ms = [0] * len(_NS_BINS), [0] * len(_US_BINS), [0] * (len(_MS_BINS) + 1)
    total = 0
    for latency in latencies:
        for lower, upper, count in latency.histogram.buckets():
            middle = (lower + upper) // 2
            total += count
            if middle < 1000:  # every bin holds what is below its name
                ns[_bin(middle, _NS_BINS)] += count
            elif middle < 1_000_000:
                us[_bin(middle // 1000, _US_BINS)] += count
            else:
                ms[_bin(middle // 1_000_000, _MS_BINS)] += count
    share = 100 / total if total else 0.0
    ms_names = [*map(str, _MS_BINS), ">=2000"]
    return {
        "latency_ns": {str(name): ns[i] * share for i, name in enumerate(_NS_BINS)},
        "latency_us": {str(name): us[i] * share for i, name in enumerate(_US_BINS)},
        "latency_ms": {name: ms[i] * share for i, name in enumerate(ms_names)},
    }


def _bin(value: int, bounds: Sequence[int]) -> int:
    for index, bound in enumerate(bounds):
        if value < bound or (bound == bounds[-1] and value == bound):
            return index
    return len(bounds)
