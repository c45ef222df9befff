"""Ctrl-C that ends long work early and in order: the work asks, reports what it has, and lets go."""

from __future__ import annotations

import signal
from types import FrameType, TracebackType
from typing import Any

EXIT_INTERRUPTED = 130


class Interrupts:
    """A context manager for the main thread. The first SIGINT or SIGTERM sets :attr:`heard`, a second one raises
    KeyboardInterrupt. What whoever started us has ignored stays ignored."""

    def __init__(self) -> None:
        self.heard = False
        self._before: dict[int, Any] = {}

    def _hear(self, number: int, frame: FrameType | None) -> None:
        if self.heard:
            raise KeyboardInterrupt
        self.heard = True

    def __enter__(self) -> Interrupts:
        for number in (signal.SIGINT, signal.SIGTERM):
            if signal.getsignal(number) is not signal.SIG_IGN:
                self._before[number] = signal.signal(number, self._hear)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
