"""What of a file can be read without waiting for its disk.

``sendfile`` of bytes that are not in the page cache stops the whole event loop until the disk has brought them, so the
worker asks first and reads those in a thread.
"""

from __future__ import annotations

import errno
import os

from curvfs.units import KIB
from curvfs.world import Disk

#: The kernel reads ahead, and mostly forgets, at least this much together: one byte of it stands for all.
WINDOW_BYTES = 128 * KIB


def read_cached(disk: Disk, fd: int, buffer: memoryview, offset_bytes: int) -> int:
    """Fill ``buffer`` from the page cache as far as it holds the file; returns how many bytes that were."""
    try:
        return disk.preadv(fd, [buffer], offset_bytes, os.RWF_NOWAIT)
    except BlockingIOError:
        return 0
    except OSError as error:
        if error.errno != errno.EOPNOTSUPP:
            raise
    # tmpfs and others have no such reads, but may tell what they hold.
    if disk.resident_bytes(fd, offset_bytes, len(buffer)) < len(buffer):
        return 0
    return disk.preadv(fd, [buffer], offset_bytes)


def cached_bytes(disk: Disk, fd: int, offset_bytes: int, count_bytes: int) -> int:
    """How many of these bytes of a file, from the first on, are in the page cache, in windows."""
    if count_bytes > WINDOW_BYTES and disk.resident_bytes(fd, offset_bytes, count_bytes) >= count_bytes:
        return count_bytes  # all of them, and one call told
    probe = memoryview(bytearray(1))
    end_bytes = offset_bytes + count_bytes
    position = offset_bytes
    while position < end_bytes and read_cached(disk, fd, probe, position):
        position += WINDOW_BYTES
    return min(position, end_bytes) - offset_bytes
