"""What write-behind counts."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, eq=False)
class BehindStats:
    """One moment of the pages on their way. ``queued``: accepted and not stored yet; ``written``, ``failed``: what
    became of those before them; ``dropped``: not accepted, because all buffers were full."""

    size_bytes: int = 0
    queued: int = 0
    accepted: int = 0
    written: int = 0
    failed: int = 0
    dropped: int = 0
