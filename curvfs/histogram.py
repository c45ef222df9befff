"""Latencies in buckets that widen with the value: every quantile within 1.6 %, 9 KiB, merged by adding."""

from __future__ import annotations

from collections.abc import Iterator

#: Values below this have a bucket each; above, every power of two is cut into half as many.
_EXACT = 64
_HALF = _EXACT // 2
_EXACT_BITS = _EXACT.bit_length() - 1
#: About 18 minutes; what is longer counts as this long.
_LONGEST_NS = (1 << 40) - 1
_BUCKETS = _EXACT + _HALF * (_LONGEST_NS.bit_length() - _EXACT_BITS)


def _bucket(value_ns: int) -> int:
    if value_ns < _EXACT:
        return max(value_ns, 0)
    shift = value_ns.bit_length() - _EXACT_BITS
    return _HALF * shift + (value_ns >> shift)


def _bounds_ns(bucket: int) -> tuple[int, int]:
    """The smallest value of a bucket, and that of the next."""
    if bucket < _EXACT:
        return bucket, bucket + 1
    shift, place = divmod(bucket - _HALF, _HALF)
    return (_HALF + place) << shift, (_HALF + place + 1) << shift


class Histogram:
    """Durations in nanoseconds. Not locked: one thread records, or whoever records holds a lock."""

    __slots__ = ("_counts", "_largest_ns", "count", "total_ns")

    def __init__(self) -> None:
        self._counts = [0] * _BUCKETS
        self._largest_ns = 0
        self.count = 0
        self.total_ns = 0

    def record_ns(self, value_ns: int, times: int = 1) -> None:
        """Count a duration; a negative one counts as 0."""
        value_ns = min(max(value_ns, 0), _LONGEST_NS)
        self._counts[_bucket(value_ns)] += times
        self.count += times
        self.total_ns += value_ns * times
        if value_ns > self._largest_ns:
            self._largest_ns = value_ns

    def record_s(self, value_s: float) -> None:
        self.record_ns(round(value_s * 1e9))

    def add(self, other: Histogram) -> None:
        """Count all that another one counted."""
        for bucket, count in enumerate(other._counts):
            if count:
                self._counts[bucket] += count
        self.count += other.count
        self.total_ns += other.total_ns
        self._largest_ns = max(self._largest_ns, other._largest_ns)

    @property
    def max_s(self) -> float:
        return self._largest_ns / 1e9

    @property
    def mean_s(self) -> float:
        return self.total_ns / self.count / 1e9 if self.count else 0.0

    def quantile_s(self, fraction: float) -> float:
        """The duration that ``fraction`` (0 to 1) of all did not exceed, in seconds; 0 when nothing was counted."""
        rank = fraction * self.count
        seen = 0
        for _, upper_ns, count in self.buckets():
            seen += count
            if seen >= rank:
                return min(upper_ns - 1, self._largest_ns) / 1e9
        return self.max_s

    def count_up_to(self, limit_s: float) -> int:
        """How many were at most ``limit_s`` long, to the precision of a bucket."""
        limit_ns = round(limit_s * 1e9)
        return sum(count for lower_ns, _, count in self.buckets() if lower_ns <= limit_ns)

    def buckets(self) -> Iterator[tuple[int, int, int]]:
        """The buckets in use, ascending: smallest value, smallest value of the next bucket (ns), and count."""
        for bucket, count in enumerate(self._counts):
            if count:
                yield *_bounds_ns(bucket), count

    def summary(self) -> dict[str, float]:
        """``count``, and in seconds ``mean_s``, ``p50_s``, ``p90_s``, ``p99_s``, ``p999_s`` and ``max_s``."""
        return {
            "count": self.count,
            "mean_s": self.mean_s,
            "p50_s": self.quantile_s(0.50),
            "p90_s": self.quantile_s(0.90),
            "p99_s": self.quantile_s(0.99),
            "p999_s": self.quantile_s(0.999),
            "max_s": self.max_s,
        }
