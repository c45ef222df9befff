"""How fast a place delivers, by what it delivered lately, and by what it should have delivered by now."""

from __future__ import annotations

import math

#: What is measured at least at once, so that short waits between reads do not count.
_WINDOW_S = 0.2
#: After about so many seconds of reading, or so many pages, little is left of what was measured before.
_MEMORY_S = 1.0
_MEMORY_PAGES = 4


class Reading:
    """A read under way."""

    __slots__ = ("place", "size_bytes", "started_s")

    def __init__(self, place: str, size_bytes: int, started_s: float) -> None:
        self.place = place
        self.size_bytes = size_bytes
        self.started_s = started_s


class Meter:
    """Seconds for a byte, averaged; slow reads weigh more than fast ones, as they do for who waits for them.

    Not locked: its owner does that. Times are monotonic.
    """

    def __init__(self, page_bytes: int) -> None:
        self._page_bytes = page_bytes
        self._reads: dict[int, Reading] = {}
        self._learned: float | None = None
        self._window_s = 0.0
        self._window_bytes = 0

    def began(self, reading: Reading) -> None:
        if not self._reads:
            self._window_s, self._window_bytes = reading.started_s, 0
        self._reads[id(reading)] = reading

    def ended(self, reading: Reading, now_s: float, *, delivered: bool) -> None:
        self._reads.pop(id(reading), None)
        self._window_bytes += reading.size_bytes if delivered else 0
        took_s = now_s - self._window_s
        if self._reads and took_s < _WINDOW_S:
            return
        if self._window_bytes:
            self._learn(max(took_s, 1e-6), self._window_bytes)
            self._window_s, self._window_bytes = now_s, 0

    def _learn(self, took_s: float, size_bytes: int) -> None:
        cost = took_s / size_bytes
        if self._learned is None:
            self._learned = cost
            return
        weight = -math.expm1(-max(took_s / _MEMORY_S, size_bytes / (_MEMORY_PAGES * self._page_bytes)))
        self._learned += weight * (cost - self._learned)

    @property
    def flying_bytes(self) -> int:
        """What is being read."""
        return sum(reading.size_bytes for reading in self._reads.values())

    @property
    def flying(self) -> int:
        return len(self._reads)

    def oldest_s(self, now_s: float) -> float:
        """How long the read that began first has been under way."""
        return max((now_s - reading.started_s for reading in self._reads.values()), default=0.0)

    def seconds_per_byte(self, now_s: float) -> float | None:
        """As it was lately, or as slow as it must be by what has not come yet. None: nothing was measured."""
        waited = None
        if self._reads:
            since_s = max(self._window_s, now_s - self.oldest_s(now_s))
            waited = (now_s - since_s) / (self.flying_bytes + self._window_bytes)
        if self._learned is None:
            return waited
        return max(self._learned, waited or 0.0)
