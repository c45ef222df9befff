"""A line on stderr that tells how far long work is; nothing where stderr is no terminal, or nobody wants it."""

from __future__ import annotations

import sys
from types import TracebackType

from curvfs.units import format_size
from curvfs.world import World

#: A line that changes more often is not read.
_EVERY_S = 0.2
_BAR = 24


class ProgressLine:
    """A context manager; the line is gone when it ends."""

    def __init__(self, world: World, *, wanted: bool = True) -> None:
        self._clock = world.clock
        self._shown = wanted and sys.stderr is not None and sys.stderr.isatty()
        self._begun_s = world.clock.monotonic_s()
        self._last_s = -_EVERY_S

    def __call__(self, done: float | None, moved_bytes: int, doing: str) -> None:
        """``done``: 0 to 1, None when it is not known."""
        now_s = self._clock.monotonic_s()
        if not self._shown or now_s - self._last_s < _EVERY_S:
            return
        self._last_s = now_s
        bar = ""
        if done is not None:
            filled = round(min(1.0, done) * _BAR)
            bar = f"[{'#' * filled}{'.' * (_BAR - filled)}] {min(1.0, done) * 100:3.0f} % "
        line = f"{bar}{now_s - self._begun_s:.0f} s, {format_size(moved_bytes)}, {doing}"
        print(f"\r\x1b[K{line[:110]}", end="", file=sys.stderr, flush=True)

    def __enter__(self) -> ProgressLine:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._shown:
            print("\r\x1b[K", end="", file=sys.stderr, flush=True)
