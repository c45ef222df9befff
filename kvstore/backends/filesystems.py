"""What kind of file system a path lies on."""

from __future__ import annotations

import os

from curvfs.world import Disk

#: Those that answer out of this machine.
LOCAL_FILE_SYSTEMS = frozenset({"btrfs", "ext2", "ext3", "ext4", "f2fs", "overlay", "tmpfs", "xfs", "zfs"})
_PIECE_BYTES = 4096


def file_system_of(disk: Disk, path: str) -> str:
    """Its name, as the kernel has it; empty where that is not to be found out."""
    try:
        device = disk.stat(path).st_dev
        fd = disk.open("/proc/self/mountinfo", os.O_RDONLY | os.O_CLOEXEC)
        try:
            content = bytearray()
            while len(piece := _read(disk, fd, len(content))):
                content += piece
        finally:
            disk.close(fd)
    except OSError:
        return ""
    wanted = f"{os.major(device)}:{os.minor(device)}"
    for line in content.decode(errors="replace").splitlines():
        mount, _, source = line.partition(" - ")
        if mount.split(" ")[2:3] == [wanted]:
            return source.partition(" ")[0]
    return ""


def _read(disk: Disk, fd: int, offset_bytes: int) -> bytes:
    piece = memoryview(bytearray(_PIECE_BYTES))
    return bytes(piece[: disk.preadv(fd, [piece], offset_bytes)])
