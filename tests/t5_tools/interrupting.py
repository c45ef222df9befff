"""Ctrl-C for a command that runs in this process."""

from __future__ import annotations

import os
import signal
import threading
import time

from tools.interrupts import Interrupts


def interrupt_when_heard() -> None:
    """Send SIGINT as soon as a command listens for it (:class:`tools.interrupts.Interrupts`)."""

    def send() -> None:
        until_s = time.monotonic() + 30
        while not isinstance(getattr(signal.getsignal(signal.SIGINT), "__self__", None), Interrupts):
            if time.monotonic() > until_s:
                return
            time.sleep(0.0005)
        os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=send, daemon=True).start()
