"""The record by which tools see this process's stores (:mod:`curvfs.runrecords`), written once a second."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from curvfs.runrecords import RunRecord
from curvfs.world import World

WRITE_EVERY_S = 1.0


class Watch:
    """Keeps the record until it is closed. ``describe`` tells the record's fields, from another thread."""

    def __init__(self, world: World, describe: Callable[[], Mapping[str, Any]]) -> None:
        self._describe = describe
        self._closed = world.threads.event()
        self._record: RunRecord | None = None
        if not world.threads.inline:
            self._record = RunRecord(world, "kvstore")
            world.threads.start(self._run, name="kvstore-watch")

    def _run(self) -> None:
        assert self._record is not None
        while not self._closed.is_set():
            self._record.write(self._describe())
            self._closed.wait(WRITE_EVERY_S)
        self._record.close()

    def close(self) -> None:
        """Remove the record soon. Twice is fine."""
        self._closed.set()
