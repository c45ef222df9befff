"""The server's log: one line per event, to stderr or wherever the service sends it."""

from __future__ import annotations

import traceback
from collections.abc import Callable

from curvfs.world import World

#: More than this in one minute is counted instead of written: a peer must not fill the disk with complaints.
LINES_PER_MINUTE = 300


class Log:
    """Lines with a time stamp (milliseconds since the Unix epoch)."""

    def __init__(self, world: World, write: Callable[[str], None]) -> None:
        self._world = world
        self._write = write
        self._minute = 0
        self._lines = 0

    def info(self, text: str) -> None:
        self._line("info", text)

    def error(self, text: str) -> None:
        self._line("error", text)

    def _line(self, level: str, text: str) -> None:
        now_ms = self._world.clock.time_ms()
        if now_ms // 60_000 != self._minute:
            if self._lines > LINES_PER_MINUTE:
                self._write(f"{now_ms} error {self._lines - LINES_PER_MINUTE} lines were left out")
            self._minute, self._lines = now_ms // 60_000, 0
        self._lines += 1
        if self._lines <= LINES_PER_MINUTE:
            self._write(f"{now_ms} {level} {text}".replace("\n", " "))

    def bug(self, doing: str, error: BaseException) -> None:
        """An exception that nobody foresaw: with where it came from."""
        self.error(f"{doing} failed: {where_from(error)}")


def where_from(error: BaseException) -> str:
    """An exception and the innermost places that it passed, in one line; of a group, its first."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    frames = traceback.extract_tb(error.__traceback__)[-6:]
    places = " < ".join(f"{frame.name}:{frame.lineno}" for frame in reversed(frames))
    return f"{type(error).__name__}: {error} ({places})"
