"""Room that is kept for the metadata of deletions, so that a file system that is full can be emptied again."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

from curvfs.units import MIB

_RESERVE_BYTES = 4 * MIB
#: The reserve is kept only where it is a small part of what is free.
_FREE_BYTES = 16 * _RESERVE_BYTES


class Reserve:
    """A file beside the database that takes room. What goes wrong with it leaves no reserve, and no error."""

    def __init__(self, database: str) -> None:
        self._path = Path(f"{database}-reserve")

    def keep(self) -> None:
        """Take the room, if there is plenty and it is not taken yet."""
        with suppress(OSError):
            if self._path.exists():
                return
            space = os.statvfs(self._path.parent)
            if space.f_bavail * space.f_frsize < _FREE_BYTES:
                return
            try:
                with self._path.open("xb") as file:
                    os.posix_fallocate(file.fileno(), 0, _RESERVE_BYTES)
            except OSError:
                self._path.unlink(missing_ok=True)

    def give_up(self) -> bool:
        """Let go of the room; False when there was none."""
        try:
            self._path.unlink()
        except OSError:
            return False
        return True
