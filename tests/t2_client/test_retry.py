"""Back-off: pure, with the clock and the random numbers given."""

from __future__ import annotations

import pytest

from curvfs.net.retry import Retry, RetryPolicy
from curvfs.world import Clock, Random


class HandClock(Clock):
    def __init__(self) -> None:
        self.now_s = 1000.0

    def monotonic_s(self) -> float:
        return self.now_s

    def time_ms(self) -> int:
        return int(self.now_s * 1000)

    async def sleep(self, duration_s: float) -> None:
        self.now_s += duration_s

    def block(self, duration_s: float) -> None:
        self.now_s += duration_s


def sleeps(policy: RetryPolicy, *, seed: int = 1, attempt_s: float = 0.0) -> list[float]:
    clock = HandClock()
    retry = Retry(policy, clock, Random(seed))
    found = []
    while (sleep_s := retry.next_sleep_s()) is not None:
        found.append(sleep_s)
        clock.block(sleep_s + attempt_s)
    assert clock.now_s <= 1000.0 + policy.budget_s + attempt_s
    return found


def test_doubles_up_to_the_maximum_with_jitter_down_to_half() -> None:
    found = sleeps(RetryPolicy(60.0, 0.1, 2.0))
    bounds = [0.1, 0.2, 0.4, 0.8, 1.6, 2.0, 2.0]
    for sleep_s, bound in zip(found, bounds, strict=False):
        assert bound / 2 <= sleep_s <= bound
    assert all(sleep_s <= 2.0 for sleep_s in found)


def test_never_beyond_the_budget() -> None:
    assert 27 <= len(sleeps(RetryPolicy(60.0, 0.1, 2.0))) <= 70
    assert sleeps(RetryPolicy(0.01)) == []
    assert len(sleeps(RetryPolicy(10.0, 0.1, 2.0), attempt_s=4.0)) == 3


def test_the_same_seed_sleeps_the_same() -> None:
    policy = RetryPolicy(10.0)
    assert sleeps(policy, seed=7) == sleeps(policy, seed=7)
    assert sleeps(policy, seed=7) != sleeps(policy, seed=8)


def test_remaining() -> None:
    clock = HandClock()
    retry = Retry(RetryPolicy(5.0), clock, Random(1))
    clock.block(4.0)
    assert retry.remaining_s() == pytest.approx(1.0)
    clock.block(4.0)
    assert retry.remaining_s() == 0.0
