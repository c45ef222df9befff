"""What a check found, and what to do about it."""

from __future__ import annotations

import enum
from collections.abc import Iterable
from dataclasses import dataclass


class Level(enum.IntEnum):
    """How bad it is; the exit code of the whole run is that of its worst finding."""

    OK = 0
    NOTE = 1
    WARNING = 2
    ERROR = 3

    @property
    def exit_code(self) -> int:
        """0: nothing to do; 1: works, but not as it could; 3: something will not work."""
        return {Level.OK: 0, Level.NOTE: 0, Level.WARNING: 1, Level.ERROR: 3}[self]


@dataclass(frozen=True, slots=True)
class Finding:
    """``check``: a stable word for scripts. ``text``: one sentence on what is. ``remedy``: one on what to do, where
    there is something to do."""

    check: str
    level: Level
    text: str
    remedy: str = ""


def ok(check: str, text: str) -> Finding:
    return Finding(check, Level.OK, text)


def note(check: str, text: str, remedy: str = "") -> Finding:
    return Finding(check, Level.NOTE, text, remedy)


def warning(check: str, text: str, remedy: str) -> Finding:
    return Finding(check, Level.WARNING, text, remedy)


def error(check: str, text: str, remedy: str) -> Finding:
    return Finding(check, Level.ERROR, text, remedy)


def worst(findings: Iterable[Finding]) -> Level:
    return max((finding.level for finding in findings), default=Level.OK)
