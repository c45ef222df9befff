"""Which mutations were done already, so that a request sent twice is executed once (specification section 4.2).

Requests run one at a time to their end, so nobody ever sees one in progress, and a failed one simply runs again: only
successes are kept. Unlike HEAD, SetAttr, Symlink and Link are protected like the rest instead of being poisoned, and an
id that comes back with another request does not pass for a replay.
"""

from __future__ import annotations

TTL_MS = 10 * 60 * 1000
MAX_ENTRIES = 100_000


class RetryCache:
    """req_id -> what was done under it, for ten minutes, in memory."""

    def __init__(self) -> None:
        #: In order of time: req_id -> (when, fingerprint of the request).
        self._done: dict[int, tuple[int, int]] = {}

    def knows(self, req_id: int, code: int, header: bytes, now_ms: int) -> bool:
        """Whether this very request succeeded before."""
        found = self._done.get(req_id)
        return found is not None and now_ms - found[0] < TTL_MS and found[1] == hash((code, header))

    def remember(self, req_id: int, code: int, header: bytes, now_ms: int) -> None:
        self._done.pop(req_id, None)
        self._done[req_id] = (now_ms, hash((code, header)))
        oldest = next(iter(self._done))
        if len(self._done) > MAX_ENTRIES or now_ms - self._done[oldest][0] >= TTL_MS:
            del self._done[oldest]
