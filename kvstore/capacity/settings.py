"""How much room a store may take, and what happens when it wants more."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from curvfs.errors import ConfigError
from curvfs.units import format_size

#: A writer reserves at most so much of its quota at once, and at most this part of it.
CHUNK_BYTES = 64 << 20
_CHUNKS = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Capacity:
    """Limits of one namespace (a model and tenant), whoever writes to it. Every process should be given the same ones.

    * ``quota_bytes``: what objects, trash and staged files may take together; None for no limit. Writers on several
      hosts keep to it within one chunk (:meth:`chunk_bytes`) each. 0: nothing is stored, and what is there stays.
    * ``high``, ``low``: parts of the quota: above the one, the least recently used go until the other is reached.
    * ``ttl_s``: objects written longer ago than this go, used or not.
    * ``min_free_bytes``: room of the whole pool that stays free, whoever takes it.
    * ``evictor``: ``inside`` this process, where a put needs the room and in the background; or ``off``: puts that do
      not fit are ``Miss.NO_SPACE`` until another process evicts, such as ``curvfs kv evict``.
    * ``flush_s``: how often this process tells the pool what it used, and looks what others did.
    * ``rescan_s``: how often everything is counted anew, while others write to the namespace.
    """

    quota_bytes: int | None = None
    high: float = 0.95
    low: float = 0.85
    ttl_s: float | None = None
    min_free_bytes: int = 0
    evictor: Literal["inside", "off"] = "inside"
    flush_s: float = 30.0
    rescan_s: float = 600.0

    def __post_init__(self) -> None:
        """Raises ConfigError for what contradicts itself."""
        if self.quota_bytes is not None and self.quota_bytes < 0:
            raise ConfigError(f"The quota is {self.quota_bytes} bytes; give 0 or more, or None for no limit.")
        if not 0 < self.low <= self.high <= 1:
            raise ConfigError(
                f"The watermarks are high={self.high} and low={self.low}; give parts of the quota with"
                " 0 < low <= high <= 1."
            )
        if self.min_free_bytes < 0:
            raise ConfigError(f"min_free_bytes is {self.min_free_bytes}; give 0 or more.")
        for name, seconds in (("ttl_s", self.ttl_s), ("flush_s", self.flush_s), ("rescan_s", self.rescan_s)):
            if seconds is not None and not (seconds > 0 and math.isfinite(seconds)):
                raise ConfigError(f"{name} is {seconds}; give a positive number of seconds.")
        if self.evictor not in ("inside", "off"):
            raise ConfigError(f"evictor is {self.evictor!r}; write inside or off.")

    @property
    def limits(self) -> bool:
        """Is anything limited at all?"""
        return self.quota_bytes is not None or self.ttl_s is not None or self.min_free_bytes > 0

    def chunk_bytes(self, object_bytes: int) -> int:
        """What a writer reserves at once: one object at least, else 64 MiB or a 64th of the quota."""
        share = CHUNK_BYTES if self.quota_bytes is None else min(CHUNK_BYTES, self.quota_bytes // _CHUNKS)
        return max(object_bytes, share)

    def describe(self) -> str:
        """The quota in words."""
        return "no quota" if self.quota_bytes is None else f"a quota of {format_size(self.quota_bytes)}"
