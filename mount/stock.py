"""Files made ahead: so that publishing a small object waits for fewer exchanges with the store.

While private files are made one after the other, some empty ones lie ready in staging, each with its first block
placed; making a file is then taking one. What it is called, whose it is and where it was born is told to the store by
the very call that closes it. When nobody has needed one for a moment those that are left are removed.
"""

from __future__ import annotations

import logging
from collections import deque

import trio

from curvfs.api import CurvineFileSystem, FileWriter
from curvfs.errors import CurvfsError
from mount.scratch import Scratch

log = logging.getLogger("curvfs.mount")

#: So many files, each made within so long of the one before it, are the beginning of many.
_STREAK = 4
_PAUSE_S = 0.5
#: How many are made at once, and how few may be left before that.
_BATCH = 24
_LOW = 8
#: What nobody has taken for so long is removed.
_IDLE_S = 1.5


class Stock:
    """The files made ahead in one staging directory."""

    def __init__(self, fs: CurvineFileSystem, scratch: Scratch) -> None:
        self._fs = fs
        self._clock = fs.world.clock
        self._scratch = scratch
        self._ready: deque[FileWriter] = deque()
        self._streak = 0
        self._asked_s = 0.0
        self._making = False

    def __len__(self) -> int:
        return len(self._ready)

    def take(self) -> FileWriter | None:
        """An empty file, if there is one; asking for it is what keeps them coming."""
        now_s = self._clock.monotonic_s()
        pause_s = now_s - self._asked_s
        self._asked_s = now_s
        self._streak = self._streak + 1 if pause_s < _PAUSE_S else 0
        if self._streak >= _STREAK and len(self._ready) <= _LOW and not self._making and self._fs.makes_ahead:
            self._making = True
            # Not below the request that asks: that one does not wait for it.
            trio.lowlevel.spawn_system_task(self._make)
        return self._ready.popleft() if self._ready and pause_s < _IDLE_S else None

    async def _make(self) -> None:
        try:
            names = [f"{self._scratch.path}/{self._scratch.next_name()}" for _ in range(_BATCH)]
            for made in await self._fs.create_ahead(names):
                if isinstance(made, CurvfsError):
                    raise made
                self._ready.append(made)
        except BaseException as error:
            # Whoever needs a file makes one, and is told. The client may have been closed meanwhile.
            log.debug("No files are made ahead: %s", error)
            self._streak = 0
            if isinstance(error, trio.Cancelled):
                raise
        finally:
            self._making = False

    async def tidy(self) -> None:
        """Remove what nobody has asked for lately. Never raises a CurvfsError: a sweep finds what is left."""
        while self._ready and self._clock.monotonic_s() - self._asked_s >= _IDLE_S:
            path = self._ready.pop().path
            try:
                await self._fs.delete(path)
            except CurvfsError as error:
                log.debug("%s waits for a sweep: %s", path, error)
