"""What the kernel is told of a node, and for how long it may believe it.

=================  ==============  =================  ============
node               name            attributes         page cache
=================  ==============  =================  ============
sealed object      1 s             60 s               kept for ever
ordinary file      0               1 s                kept while times and length stay
private file       0               1 s                kept
directory, link    1 s             1 s
=================  ==============  =================  ============

A name with timeout 0 is looked up at every open, so that an open sees what another mount closed before. A sealed
name may be believed for longer, because an open compares the store's file id. Negative answers are never kept.
"""

from __future__ import annotations

import grp
import os
import pwd
import stat as statmod

import pyfuse3

from curvfs.api import FileKind
from curvfs.units import align_up
from mount.inodes import Node
from mount.options import MountOptions

_TYPE_BITS = {
    FileKind.DIRECTORY: statmod.S_IFDIR,
    FileKind.SYMLINK: statmod.S_IFLNK,
    FileKind.FIFO: statmod.S_IFIFO,
    FileKind.CHARACTER_DEVICE: statmod.S_IFCHR,
    FileKind.BLOCK_DEVICE: statmod.S_IFBLK,
    FileKind.SOCKET: statmod.S_IFSOCK,
}
_DIRECTORY_BYTES = 4096
_NS_PER_MS = 1_000_000
_BLOCK_BYTES = 4096


class Owners:
    """Owner and group names of the store as numbers of this machine. Names nobody knows belong to the mount's user."""

    def __init__(self) -> None:
        self._users: dict[str, int] = {}
        self._groups: dict[str, int] = {}

    def uid(self, owner: str) -> int:
        found = self._users.get(owner)
        if found is None:
            found = _number(owner)
            if found is None:
                try:
                    found = pwd.getpwnam(owner).pw_uid if owner else os.getuid()
                except (KeyError, ValueError):
                    found = os.getuid()
            self._users[owner] = found
        return found

    def gid(self, group: str) -> int:
        found = self._groups.get(group)
        if found is None:
            found = _number(group)
            if found is None:
                try:
                    found = grp.getgrnam(group).gr_gid if group else os.getgid()
                except (KeyError, ValueError):
                    found = os.getgid()
            self._groups[group] = found
        return found


def _number(text: str) -> int | None:
    return int(text) if text.isascii() and text.isdigit() and int(text) < 2**32 else None


class Attributes:
    """Makes pyfuse3's records."""

    def __init__(self, options: MountOptions) -> None:
        self._options = options
        self._owners = Owners()

    def entry(self, node: Node, *, trust: bool = True) -> pyfuse3.EntryAttributes:
        """The attributes of a node. ``trust`` False: nothing of it may be kept, not even for a moment."""
        status = node.status
        options = self._options
        entry = pyfuse3.EntryAttributes()
        entry.st_ino = node.id
        kind = status.kind
        entry.st_mode = _TYPE_BITS.get(kind, statmod.S_IFREG) | status.mode & 0o7777
        if kind is FileKind.DIRECTORY:
            size = _DIRECTORY_BYTES
            name_s = attributes_s = options.directory_timeout_s
        else:
            if kind is FileKind.SYMLINK:
                size = len((status.symlink_target or "").encode())
                name_s = attributes_s = options.directory_timeout_s
            else:
                size = node.length_bytes
                if node.sealed:
                    name_s, attributes_s = options.sealed_entry_timeout_s, options.sealed_attr_timeout_s
                else:
                    name_s, attributes_s = 0.0, options.attr_timeout_s
                node.known_size = size
        entry.st_nlink = node.nlink
        entry.st_size = size
        entry.st_blksize = _BLOCK_BYTES
        entry.st_blocks = align_up(size, _BLOCK_BYTES) // 512
        entry.st_uid = self._owners.uid(status.owner)
        entry.st_gid = self._owners.gid(status.group)
        entry.st_rdev = status.device
        entry.st_atime_ns = status.atime_ms * _NS_PER_MS
        written_ms = 0 if node.written is None else node.written[1]
        entry.st_mtime_ns = (written_ms or status.mtime_ms) * _NS_PER_MS
        entry.st_ctime_ns = max(written_ms, status.ctime_ms) * _NS_PER_MS
        entry.entry_timeout = name_s if trust else 0.0
        entry.attr_timeout = attributes_s if trust else 0.0
        return entry
