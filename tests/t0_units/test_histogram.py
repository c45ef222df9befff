"""Latency histograms: exact enough, mergeable, ordered."""

from __future__ import annotations

import math

from hypothesis import given, settings
from hypothesis import strategies as st

from curvfs.histogram import Histogram

durations = st.lists(st.integers(0, 10**12), min_size=1, max_size=60)


def of(values: list[int]) -> Histogram:
    histogram = Histogram()
    for value in values:
        histogram.record_ns(value)
    return histogram


@settings(deadline=None)
@given(durations, st.floats(0.01, 1.0))
def test_a_quantile_is_within_a_bucket_of_the_true_one(values: list[int], fraction: float) -> None:
    true_ns = sorted(values)[max(math.ceil(fraction * len(values)) - 1, 0)]
    assert true_ns <= of(values).quantile_s(fraction) * 1e9 + 1 and of(values).quantile_s(fraction) * 1e9 <= true_ns * (
        1 + 1 / 32
    ) + 1


@settings(deadline=None)
@given(durations, durations)
def test_adding_two_is_counting_all(first: list[int], second: list[int]) -> None:
    both = of(first)
    both.add(of(second))
    assert list(both.buckets()) == list(of(first + second).buckets())
    assert both.summary() == of(first + second).summary()


@settings(deadline=None)
@given(durations)
def test_count_mean_and_extremes_are_exact(values: list[int]) -> None:
    histogram = of(values)
    assert histogram.count == len(values) == histogram.count_up_to(max(values) / 1e9)
    assert math.isclose(histogram.mean_s, sum(values) / len(values) / 1e9)
    assert histogram.max_s == max(values) / 1e9
    assert histogram.quantile_s(1.0) == histogram.max_s


def test_nothing_counted_and_what_does_not_fit() -> None:
    assert Histogram().quantile_s(0.99) == 0 == Histogram().mean_s
    odd = of([-5, 1 << 60])
    assert odd.count == 2 and 1_099 < odd.max_s < 1_100
