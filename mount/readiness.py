"""Telling others that the mount answers, and that it ends: systemd through its socket, anybody through a file."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Mapping

from curvfs.errors import CurvfsError, UsageError
from curvfs.world import World

log = logging.getLogger("curvfs.mount")

ENV_SOCKET = "NOTIFY_SOCKET"
ENV_WATCHDOG = "WATCHDOG_USEC"


class Readiness:
    """What a mount tells while it lives.

    The file holds ``{"pid", "url", "mountpoint"}`` as JSON from the moment at which the mount answers until it ends;
    one that a killed mount left says a pid that is gone, and is removed at the next start.
    """

    def __init__(self, world: World, ready_file: str | None, environ: Mapping[str, str] = os.environ) -> None:
        self._world = world
        self._file = None if ready_file is None else os.path.abspath(ready_file)
        self._socket = environ.get(ENV_SOCKET)
        watchdog = environ.get(ENV_WATCHDOG, "")
        #: How often systemd wants to hear from us; 0 when it does not.
        self.watchdog_s = int(watchdog) / 2_000_000 if self._socket and watchdog.isdigit() else 0.0

    def prepare(self) -> None:
        """Before anything is mounted: no file of an earlier mount may speak for this one. Raises UsageError."""
        if self._file is None:
            return
        self._remove()
        if not self._world.disk.exists(os.path.dirname(self._file)):
            raise UsageError(f"The directory of the file {self._file}, which says that the mount is ready, is missing.")

    def ready(self, url: str, path: str) -> None:
        """The mount answers. Never raises a CurvfsError."""
        if self._file is not None:
            content = json.dumps({"pid": self._world.process_id(), "url": url, "mountpoint": path}).encode()
            try:
                self._world.disk.write_file(self._file, content + b"\n", 0o644)
            except OSError as error:
                log.warning("%s, which says that the mount is ready, cannot be written: %s", self._file, error.strerror)
        self._tell(f"READY=1\nMAINPID={self._world.process_id()}\nSTATUS=Mounted {url} on {path}")

    def alive(self) -> None:
        """The event loop turns."""
        self._tell("WATCHDOG=1")

    def stopping(self) -> None:
        self._tell("STOPPING=1")
        self._remove()

    def _tell(self, message: str) -> None:
        if self._socket:
            try:
                self._world.net.send_datagram(self._socket, message.encode())
            except CurvfsError as error:
                log.warning("systemd could not be told: %s", error)

    def _remove(self) -> None:
        if self._file is not None:
            try:
                self._world.disk.unlink(self._file)
            except OSError:
                pass
