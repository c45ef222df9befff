"""Large files that are read once leave little behind in the page cache of the machine.

The kernel reads a block file ahead into its page cache, and keeps the bytes a second time for the mount. Finding memory
for both costs more than a fast disk does where memory is scarce, or has to be got from a host first. So while a program
reads a large file of the disk from front to back, the pages of the block files behind it are given back, and what comes
next is read into the same memory. What was in the page cache before the program came stays there, and so do the first
32 MiB and the last ones of a file.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from curvfs.units import MIB
from curvfs.world import Disk

#: The pages that are judged, and given back, together.
WINDOW_BYTES = 8 * MIB
#: A window is judged so many windows before it is entered, ahead of what the kernel has read ahead by then.
_JUDGED = 3
#: A window is given back so many windows after it was entered.
_GIVEN_BACK = 2
#: Nothing is given back of a file that is no longer than this.
LEAST_BYTES = (1 + _JUDGED + _GIVEN_BACK) * WINDOW_BYTES
#: So far from where a program is may its next request be: they come a little out of order.
_SLACK_BYTES = 4 * MIB
#: So much of a window must have been read for it to be given back.
_READ_BYTES = WINDOW_BYTES - MIB
#: How many programs that go their own ways through one file are followed.
_RUNS = 8


@dataclass(slots=True)
class _Run:
    """One program's way through a file. ``empty``: windows that held nothing, and how much of each was read since."""

    position_bytes: int
    empty: dict[int, int] = field(default_factory=dict)


class Behind:
    """Follows the reads of one file. ``places``: descriptors, offsets in them and lengths, for a range of the file."""

    def __init__(self, disk: Disk, places: Callable[[int, int], Iterable[tuple[int, int, int]]]) -> None:
        self._disk = disk
        self._places = places
        #: The one that was heard of last comes last.
        self._runs: list[_Run] = []

    def read(self, offset_bytes: int, size_bytes: int) -> None:
        """So much of the file has been read."""
        run = self._run_at(offset_bytes)
        window = offset_bytes // WINDOW_BYTES
        if window in run.empty:
            run.empty[window] += size_bytes
        before, run.position_bytes = run.position_bytes, max(run.position_bytes, offset_bytes + size_bytes)
        for entered in range(before // WINDOW_BYTES + 1, run.position_bytes // WINDOW_BYTES + 1):
            if self._cached_bytes(entered + _JUDGED) == 0:
                run.empty[entered + _JUDGED] = 0
            passed = entered - _GIVEN_BACK
            # Where nothing is cached there is nothing to give back, or nobody who tells what is cached.
            if run.empty.pop(passed, 0) >= _READ_BYTES and self._cached_bytes(passed):
                for fd, start_bytes, length_bytes in self._places(passed * WINDOW_BYTES, WINDOW_BYTES):
                    self._disk.forget(fd, start_bytes, length_bytes)

    def _run_at(self, offset_bytes: int) -> _Run:
        for index, run in enumerate(reversed(self._runs), start=1):
            if abs(offset_bytes - run.position_bytes) <= _SLACK_BYTES:
                if index > 1:
                    self._runs.append(self._runs.pop(-index))
                return run
        run = _Run(offset_bytes)
        self._runs.append(run)
        del self._runs[:-_RUNS]
        return run

    def _cached_bytes(self, window: int) -> int:
        return sum(self._disk.resident_bytes(*place) for place in self._places(window * WINDOW_BYTES, WINDOW_BYTES))
