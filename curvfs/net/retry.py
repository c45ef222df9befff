"""When to try again, and for how long: pure, with clock and random source injected (specification 5.1)."""

from __future__ import annotations

from dataclasses import dataclass, field

from curvfs.world import Clock, Random


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """Sleeps of ``min_sleep_s``, doubled up to ``max_sleep_s``, until ``budget_s`` after the start are used up."""

    budget_s: float
    min_sleep_s: float = 0.1
    max_sleep_s: float = 2.0


@dataclass(slots=True)
class Retry:
    """One logical operation's retries.

    Sleeps are jittered down to half, so that clients that lost one master together do not come back together.
    """

    policy: RetryPolicy
    clock: Clock
    random: Random
    deadline_s: float = field(init=False)
    _next_s: float = field(init=False)

    def __post_init__(self) -> None:
        self.deadline_s = self.clock.monotonic_s() + self.policy.budget_s
        self._next_s = self.policy.min_sleep_s

    def remaining_s(self) -> float:
        """Seconds left, not below zero."""
        return max(0.0, self.deadline_s - self.clock.monotonic_s())

    def next_sleep_s(self) -> float | None:
        """How long to sleep before the next attempt; None when the budget does not reach that far."""
        sleep_s = self._next_s * (0.5 + self.random.random() / 2)
        self._next_s = min(self._next_s * 2, self.policy.max_sleep_s)
        return sleep_s if sleep_s < self.remaining_s() else None
