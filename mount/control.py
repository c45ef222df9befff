"""The directory in which a mount tells of itself: ``.curvfs`` at its root, which can be entered but is not listed.

Its files are made when they are opened. They are not in the pool: every mount has its own, and programs that walk the
tree or copy it do not meet them. Nothing in it can be changed. A mount whose pool has something of that name at the
mounted directory does without, and says so; ``-o control=NAME`` gives it another name.
"""

from __future__ import annotations

import errno
import json
import os
import stat as statmod
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

import pyfuse3

from curvfs.world import Clock
from mount.inodes import ROOT_ID

#: Above the ids of the store, below those of second nodes.
FIRST_ID = 1 << 44
_MOST_FILES = 62
_FIRST_HANDLE = 1 << 48

Render = Callable[[], Awaitable[bytes]]


@dataclass(frozen=True, slots=True)
class ControlFile:
    """One file. ``private``: only the user who mounted may read it, for it shows names."""

    name: str
    render: Render
    private: bool = False


def as_json(value: object) -> bytes:
    return json.dumps(value, indent=2).encode() + b"\n"


class ControlDirectory:
    """Answers the kernel for the nodes of the directory. Methods are those of the operations of the same name."""

    def __init__(self, name: str, clock: Clock, files: list[ControlFile]) -> None:
        assert len(files) <= _MOST_FILES
        self.name = name
        self._clock = clock
        self._files = {FIRST_ID + 1 + index: file for index, file in enumerate(files)}
        self._ids = {file.name.encode(): node_id for node_id, file in self._files.items()}
        self._contents: dict[int, bytes] = {}
        self._next_handle = _FIRST_HANDLE
        self._made_ns = clock.time_ms() * 1_000_000

    @staticmethod
    def owns(number: object) -> bool:
        """Is this the id of a node here?"""
        return isinstance(number, int) and FIRST_ID <= number <= FIRST_ID + _MOST_FILES

    def is_open(self, fh: int) -> bool:
        """Is this an open file here?"""
        return fh in self._contents

    def is_here(self, parent_id: int, name: bytes) -> bool:
        """Is this the name of the directory itself?"""
        return parent_id == ROOT_ID and name == self.name.encode()

    def entry(self, node_id: int) -> pyfuse3.EntryAttributes:
        entry = pyfuse3.EntryAttributes()
        file = self._files.get(node_id)
        entry.st_ino = node_id
        entry.st_mode = (
            statmod.S_IFDIR | 0o555 if file is None else statmod.S_IFREG | (0o400 if file.private else 0o444)
        )
        entry.st_nlink = 2 if file is None else 1
        entry.st_uid, entry.st_gid = os.getuid(), os.getgid()
        entry.st_size = 0
        entry.st_atime_ns = entry.st_mtime_ns = entry.st_ctime_ns = self._made_ns
        entry.entry_timeout = entry.attr_timeout = 1.0
        return entry

    async def lookup(self, parent_inode: int, name: bytes, ctx: pyfuse3.RequestContext) -> pyfuse3.EntryAttributes:
        node_id = FIRST_ID if name in (b".", b"..") else self._ids.get(name)
        if node_id is None:
            raise pyfuse3.FUSEError(errno.ENOENT)
        return self.entry(node_id)

    async def getattr(self, inode: int, ctx: pyfuse3.RequestContext) -> pyfuse3.EntryAttributes:
        return self.entry(inode)

    async def open(self, inode: int, flags: int, ctx: pyfuse3.RequestContext) -> pyfuse3.FileInfo:
        if flags & os.O_ACCMODE != os.O_RDONLY:
            raise pyfuse3.FUSEError(errno.EPERM)
        content = await self._files[inode].render()
        self._next_handle += 1
        self._contents[self._next_handle] = content
        return pyfuse3.FileInfo(fh=self._next_handle, direct_io=True, keep_cache=False)

    def read(self, fh: int, offset: int, size: int) -> bytes:
        return self._contents[fh][offset : offset + size]

    def release(self, fh: int) -> None:
        del self._contents[fh]

    async def opendir(self, inode: int, ctx: pyfuse3.RequestContext) -> int:
        return FIRST_ID

    async def readdir(self, fh: int, start_id: int, token: pyfuse3.ReaddirToken) -> None:
        for index, (node_id, file) in enumerate(self._files.items(), start=1):
            if index > start_id and not pyfuse3.readdir_reply(token, file.name.encode(), self.entry(node_id), index):
                return

    async def releasedir(self, fh: int) -> None:
        """Nothing is kept of an open directory."""

    async def getxattr(self, inode: int, name: bytes, ctx: pyfuse3.RequestContext) -> bytes:
        raise pyfuse3.FUSEError(pyfuse3.ENOATTR)

    async def listxattr(self, inode: int, ctx: pyfuse3.RequestContext) -> list[bytes]:
        return []
