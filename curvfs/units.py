"""Sizes, durations and alignment. Sizes count bytes in powers of 1024; durations are seconds as floats."""

from __future__ import annotations

import math
import re

from curvfs.errors import ConfigError

KIB = 1024
MIB = 1024 * KIB
GIB = 1024 * MIB
TIB = 1024 * GIB
PIB = 1024 * TIB

_SIZE_UNITS = {"": 1, "b": 1, "k": KIB, "m": MIB, "g": GIB, "t": TIB, "p": PIB}
_DURATION_UNITS_S = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}

_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([kmgtp]?)(?:i?b)?\s*", re.IGNORECASE | re.ASCII)
_DURATION = re.compile(r"\s*(\d+(?:\.\d+)?)\s*(ms|s|m|h|d)?\s*", re.IGNORECASE | re.ASCII)


def parse_size(text: str | int) -> int:
    """Bytes in ``"128MB"``, ``"4k"``, ``"1.5GiB"`` or ``"4096"``; an ``int`` is taken as bytes."""
    if isinstance(text, int):
        if text < 0:
            raise ConfigError(f"{text} is not a size: it must not be negative.")
        return text
    found = _SIZE.fullmatch(text)
    if found is None:
        raise ConfigError(f"{text!r} is not a size; write a number with B, KB, MB, GB, TB or PB, such as 128MB.")
    unit_bytes = _SIZE_UNITS[found[2].lower()]
    return int(float(found[1]) * unit_bytes) if "." in found[1] else int(found[1]) * unit_bytes


def parse_duration(text: str | int | float, *, bare_unit: str = "ms") -> float:
    """Seconds in ``"30s"``, ``"100ms"``, ``"10m"``, ``"1h"``; a bare number counts in ``bare_unit``."""
    if isinstance(text, int | float):
        if not 0 <= text < math.inf:
            raise ConfigError(f"{text} is not a duration: it must be finite and not negative.")
        return text * _DURATION_UNITS_S[bare_unit]
    found = _DURATION.fullmatch(text)
    if found is None:
        raise ConfigError(f"{text!r} is not a duration; write a number with ms, s, m, h or d, such as 30s.")
    return float(found[1]) * _DURATION_UNITS_S[(found[2] or bare_unit).lower()]


def format_size(size_bytes: int | float) -> str:
    """``"0 B"``, ``"512 B"``, ``"1.5 KiB"``, ``"3.0 GiB"``."""
    value = float(size_bytes)
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        shown = f"{value:.0f}" if unit == "B" else f"{value:.1f}"
        if abs(float(shown)) < 1024:
            return f"{shown} {unit}"
        value /= 1024
    return f"{value:.1f} PiB"


def format_duration(duration_s: float) -> str:
    """``"30 s"``, ``"0.25 s"``, ``"5 s"`` for 4.99997: seconds as a person would say them."""
    return f"{duration_s:.3g} s" if duration_s < 100 else f"{duration_s:.0f} s"


def align_up(value: int, alignment: int) -> int:
    """The smallest multiple of ``alignment`` that is not below ``value``."""
    return -(-value // alignment) * alignment


def align_down(value: int, alignment: int) -> int:
    """The largest multiple of ``alignment`` that is not above ``value``."""
    return value // alignment * alignment
