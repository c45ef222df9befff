"""A circuit breaker: who fails again and again is left alone for a while, then tried with one call.

::

    closed ──(FAILURES in a row)──> open ──(its time is over)──> half-open: one call is let through
      ▲                              ▲                             │           │
      │                              └──(it fails: twice as long)──┘           │
      └────────────────────────────────(it succeeds)───────────────────────────┘
"""

from __future__ import annotations

import enum

from curvfs.world import Random

#: Failures in a row that open it.
FAILURES = 5
_FIRST_S = 0.5
_LONGEST_S = 4.0


class State(enum.Enum):
    CLOSED = "closed"
    OPEN = "open"
    HALF_OPEN = "half-open"


class Breaker:
    """Not locked: its owner does that. Times are monotonic."""

    def __init__(self, random: Random) -> None:
        self._random = random
        self._in_a_row = 0.0
        self._until_s = 0.0
        self._wait_s = _FIRST_S
        self._trying = False
        self._closed = True
        self.opened = 0

    def state(self, now_s: float) -> State:
        if self._closed:
            return State.CLOSED
        return State.HALF_OPEN if now_s >= self._until_s else State.OPEN

    def allows(self, now_s: float) -> bool:
        """May a call be made? In the half-open state that is the one call, whose outcome must be told."""
        if self._closed:
            return True
        if now_s < self._until_s or self._trying:
            return False
        self._trying = True
        return True

    def succeeded(self) -> None:
        """A call was answered."""
        self._in_a_row = 0.0
        self._trying = False
        self._closed = True
        self._wait_s = _FIRST_S

    def failed(self, now_s: float, weight: float = 1.0) -> None:
        """A call failed, or took too long; ``weight``: how many of them it counts for."""
        self._in_a_row += weight
        if not self._closed:
            if self._trying:
                self._trying = False
                self._wait_s = min(2 * self._wait_s, _LONGEST_S)
                self._until_s = now_s + self._wait_s * self._random.uniform(0.8, 1.2)
        elif self._in_a_row >= FAILURES:
            self._closed = False
            self.opened += 1
            self._until_s = now_s + self._wait_s * self._random.uniform(0.8, 1.2)

    def gave_up(self) -> None:
        """The one call that was let through said nothing about the place."""
        self._trying = False
