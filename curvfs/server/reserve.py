"""Room that is kept for the metadata of deletions, so that a file system that is full can be emptied again."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

from curvfs.units import KIB, MIB

_RESERVE_BYTES = 4 * MIB
#: Where less is free, the reserve is this part of it, down to what a deletion needs at least.
_PART = 16
_LEAST_BYTES = 64 * KIB


class Reserve:
    """A file beside the database that takes room. What goes wrong with it leaves no reserve, and no error."""

    def __init__(self, database: str) -> None:
        self._path = Path(f"{database}-reserve")
        #: It was given up and not taken again: what is left of it is for deletions.
        self.spent = False

    def keep(self) -> None:
        """Take the room, if there is any and it is not taken yet."""
        with suppress(OSError):
            if self._path.exists():
                return
            space = os.statvfs(self._path.parent)
            size_bytes = min(_RESERVE_BYTES, space.f_bavail * space.f_frsize // _PART)
            if size_bytes < _LEAST_BYTES:
                return
            try:
                with self._path.open("xb") as file:
                    os.posix_fallocate(file.fileno(), 0, size_bytes)
                self.spent = False
            except OSError:
                self._path.unlink(missing_ok=True)

    def give_up(self) -> bool:
        """Let go of the room; False when there was none."""
        try:
            self._path.unlink()
        except OSError:
            return False
        self.spent = True
        return True
