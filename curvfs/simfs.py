"""The file tree of a simulated machine, as it is now and as it would be after a power cut.

**What is durable.** Data: the sectors (4096 bytes) of a file become durable, with its length, at ``fdatasync`` or
``fsync`` of it. Names: what was done to a directory becomes durable at ``fsync`` of that directory. A rename across
directories is one event: it is durable in both or in neither.

**What a power cut leaves.** Everything durable. Of each file's changed sectors a random subset, each old or new as a
whole; of its changed length either; sectors never written read as zeros. Of each directory the first so many of its
changes, in their order, the rest undone (together with what the rename across directories needs in the other one). A
file whose last durable name is gone is gone, synced or not: the name needs its own sync. While changes wait, the
system may write some back by itself, so an intermediate version may be what survives.

This is weaker than what one file system (ext4, ordered) promises and about what POSIX leaves to the careful, so what
passes here owes nothing to luck.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterator
from dataclasses import dataclass

from curvfs.world import Random

SECTOR_BYTES = 4096
_ZEROS = bytes(SECTOR_BYTES)
_NAME_MAX_BYTES = 255
_SYMLINKS_MAX = 40


def fail(number: int, path: str | None = None, other: str | None = None) -> OSError:
    """The ``OSError`` that ``os`` raises for this errno."""
    if other is not None:
        return OSError(number, os.strerror(number), path, None, other)
    if path is not None:
        return OSError(number, os.strerror(number), path)
    return OSError(number, os.strerror(number))


@dataclass(eq=False, slots=True)
class NameChange:
    """One change of names, in one directory or, for a rename, in up to two: (directory, name, inode or None)."""

    sides: tuple[tuple[Inode, str, Inode | None], ...]
    durable: bool = False


class Inode:
    """A file, a directory or a symbolic link."""

    def __init__(self, number: int, mode: int, now_ns: int) -> None:
        self.number = number
        self.mode = mode
        self.atime_ns = self.mtime_ns = self.ctime_ns = now_ns
        self.links = 0
        self.open_count = 0
        self.target = ""
        # A file: sectors now and on the medium; absent ones are zeros.
        self.length_bytes = 0
        self.sectors: dict[int, bytes] = {}
        self.durable_length_bytes = 0
        self.durable_sectors: dict[int, bytes] = {}
        self.dirty: dict[int, None] = {}
        # A directory.
        self.entries: dict[str, Inode] = {}
        self.durable_entries: dict[str, Inode] = {}
        self.changes: list[NameChange] = []
        self.parent: Inode = self
        #: flock holders: open file -> whether shared.
        self.locks: dict[object, bool] = {}

    @property
    def is_directory(self) -> bool:
        return stat.S_ISDIR(self.mode)

    @property
    def is_symlink(self) -> bool:
        return stat.S_ISLNK(self.mode)

    # ------------------------------------------------------------------------------------------------------- data

    def read(self, offset_bytes: int, count_bytes: int) -> bytes:
        """Bytes of the file, fewer at its end."""
        end = min(offset_bytes + count_bytes, self.length_bytes)
        pieces = []
        while offset_bytes < end:
            index, start = divmod(offset_bytes, SECTOR_BYTES)
            stop = min(SECTOR_BYTES, start + end - offset_bytes)
            pieces.append(self.sectors.get(index, _ZEROS)[start:stop])
            offset_bytes += stop - start
        return b"".join(pieces)

    def write(self, data: memoryview, offset_bytes: int, random: Random) -> None:
        """Put bytes in; they are not durable. Room is the caller's business."""
        while len(data):
            index, start = divmod(offset_bytes, SECTOR_BYTES)
            count = min(SECTOR_BYTES - start, len(data))
            old = self.sectors.get(index, _ZEROS)
            if index in self.dirty and random.random() < 0.25:
                self.durable_sectors[index] = old  # the system wrote the version before this one back
            self.sectors[index] = b"".join((old[:start], data[:count], old[start + count :]))
            self.dirty[index] = None
            data = data[count:]
            offset_bytes += count
        self.length_bytes = max(self.length_bytes, offset_bytes)

    def truncate(self, length_bytes: int) -> None:
        keep, rest = divmod(length_bytes, SECTOR_BYTES)
        if length_bytes < self.length_bytes:
            for index in [index for index in self.sectors if index >= keep]:
                if index == keep and rest:
                    self.sectors[index] = self.sectors[index][:rest].ljust(SECTOR_BYTES, b"\0")
                else:
                    del self.sectors[index]
                self.dirty[index] = None
        self.length_bytes = length_bytes

    def sync(self) -> None:
        """Make data and length durable."""
        for index in self.dirty:
            if index in self.sectors:
                self.durable_sectors[index] = self.sectors[index]
            else:
                self.durable_sectors.pop(index, None)
        self.dirty.clear()
        self.durable_length_bytes = self.length_bytes

    def lose_dirty(self) -> None:
        """A sync failed: what was dirty counts as clean and never reaches the medium."""
        self.dirty.clear()

    def flip(self, bit: int) -> None:
        """Flip one bit, on the medium and in what is read."""
        index, within = divmod(bit // 8, SECTOR_BYTES)
        for sectors in (self.sectors, self.durable_sectors):
            if index in sectors or sectors is self.sectors:
                sector = bytearray(sectors.get(index, _ZEROS))
                sector[within] ^= 1 << bit % 8
                sectors[index] = bytes(sector)

    def cut_power(self, random: Random) -> None:
        """The file as a power cut leaves it."""
        for index in self.dirty:
            if random.random() < 0.5:
                if index in self.sectors:
                    self.durable_sectors[index] = self.sectors[index]
                else:
                    self.durable_sectors.pop(index, None)
        if self.length_bytes != self.durable_length_bytes and random.random() < 0.5:
            self.durable_length_bytes = self.length_bytes
        self.dirty.clear()
        self.length_bytes = self.durable_length_bytes
        self.sectors = dict(self.durable_sectors)
        self.truncate_tail()
        self.durable_sectors = dict(self.sectors)

    def truncate_tail(self) -> None:
        """Drop what lies behind the end of the file."""
        length_bytes, self.length_bytes = self.length_bytes, 1 << 62
        self.truncate(length_bytes)
        self.dirty.clear()


class FileTree:
    """All inodes of a machine, from the root down."""

    def __init__(self, random: Random, capacity_bytes: int) -> None:
        self.random = random
        self.capacity_bytes = capacity_bytes
        self._next_number = 2
        self.inodes: dict[int, Inode] = {}
        self.root = self.new_inode(stat.S_IFDIR | 0o755, 0)
        self.root.links = 2

    def new_inode(self, mode: int, now_ns: int) -> Inode:
        inode = Inode(self._next_number, mode, now_ns)
        self._next_number += 1
        self.inodes[inode.number] = inode
        return inode

    def used_bytes(self) -> int:
        return sum(len(inode.sectors) for inode in self.inodes.values()) * SECTOR_BYTES

    def free_bytes(self) -> int:
        return max(0, self.capacity_bytes - self.used_bytes())

    # ------------------------------------------------------------------------------------------------------ names

    def walk(self, path: str, *, follow: bool = True) -> Inode:
        """The inode of a path. Raises OSError as the kernel does."""
        inode = self.find(path, follow=follow)[2]
        if inode is None:
            raise fail(errno.ENOENT, path)
        return inode

    def find(self, path: str, *, follow: bool = True) -> tuple[Inode, str, Inode | None]:
        """(directory, last name, inode or None) of a path; only the last name may be missing. The name is empty when
        the path ends in the root, ``.`` or ``..``."""
        if not path:
            raise fail(errno.ENOENT, path)
        if "\0" in path:
            raise ValueError("embedded null byte")
        wants_directory = path.endswith("/")
        parts = [part for part in path.split("/") if part not in ("", ".")]
        current, name, hops = self.root, "", 0
        parent = self.root
        while parts:
            part = parts.pop(0)
            if not current.is_directory:
                raise fail(errno.ENOTDIR, path)
            if part == "..":
                current = current.parent
                parent, name = current.parent, ""
                continue
            if len(os.fsencode(part)) > _NAME_MAX_BYTES:
                raise fail(errno.ENAMETOOLONG, path)
            found = current.entries.get(part)
            if found is None:
                if parts:
                    raise fail(errno.ENOENT, path)
                return current, part, None
            if found.is_symlink and (parts or follow or wants_directory):
                hops += 1
                if hops > _SYMLINKS_MAX:
                    raise fail(errno.ELOOP, path)
                if found.target.startswith("/"):
                    current = self.root
                parts = [piece for piece in found.target.split("/") if piece not in ("", ".")] + parts
                continue
            parent, name, current = current, part, found
        if wants_directory and not current.is_directory:
            raise fail(errno.ENOTDIR, path)
        return parent, name, current

    def change(self, *sides: tuple[Inode, str, Inode | None], now_ns: int) -> None:
        """Change names in up to two directories, as one event, and count links."""
        event = NameChange(sides)
        for directory in {directory.number: directory for directory, _, _ in sides}.values():
            directory.changes.append(event)
        for directory, name, inode in sides:
            old = directory.entries.pop(name, None)
            if old is not None:
                self._unlinked(old, directory, now_ns)
            if inode is not None:
                directory.entries[name] = inode
                inode.links += 1
                inode.ctime_ns = now_ns
                if inode.is_directory:
                    inode.parent = directory
                    inode.links += 1
                    directory.links += 1
            directory.mtime_ns = directory.ctime_ns = now_ns
        for _, _, inode in sides:
            if inode is not None:
                self.inodes.setdefault(inode.number, inode)

    def _unlinked(self, inode: Inode, directory: Inode, now_ns: int) -> None:
        inode.links -= 1
        inode.ctime_ns = now_ns
        if inode.is_directory:
            inode.links -= 1
            directory.links -= 1
        self.drop_if_unused(inode)

    def drop_if_unused(self, inode: Inode) -> None:
        if inode.links <= 0 and inode.open_count == 0:
            self.inodes.pop(inode.number, None)

    def sync_names(self, directory: Inode) -> None:
        """Make all changes of a directory durable."""
        for event in list(directory.changes):
            self._make_durable(event)

    def _make_durable(self, event: NameChange) -> None:
        if event.durable:
            return
        event.durable = True
        for directory, _, _ in event.sides:
            while directory.changes and directory.changes[0] is not event:
                self._make_durable(directory.changes[0])
        for directory, name, inode in event.sides:
            if event in directory.changes:
                directory.changes.remove(event)
            if inode is None:
                directory.durable_entries.pop(name, None)
            else:
                directory.durable_entries[name] = inode

    def cut_power(self) -> None:
        """Fall back to what a power cut leaves; see the head of this module. Open files are the caller's to close."""
        directories = list(self._all_directories())
        for directory in directories:
            for event in directory.changes[: self.random.randint(0, len(directory.changes))]:
                self._make_durable(event)
        self.inodes = {}
        self._restore(self.root, self.root)
        self.root.links = 2 + sum(inode.is_directory for inode in self.root.entries.values())

    def _all_directories(self) -> Iterator[Inode]:
        """Every directory that has a name now or on the medium, in the order of their numbers."""
        seen: dict[int, Inode] = {}
        waiting = [self.root]
        while waiting:
            inode = waiting.pop()
            if inode.number not in seen:
                seen[inode.number] = inode
                for entries in (inode.entries, inode.durable_entries):
                    waiting += [child for child in entries.values() if child.is_directory]
        return iter([seen[number] for number in sorted(seen)])

    def _restore(self, inode: Inode, parent: Inode) -> None:
        first = inode.number not in self.inodes
        if first:
            self.inodes[inode.number] = inode
            inode.links = inode.open_count = 0
            inode.locks.clear()
        inode.links += 1
        if not first:
            return
        if inode.is_directory:
            inode.changes.clear()
            inode.parent = parent
            inode.entries = dict(inode.durable_entries)
            inode.links = 2 + sum(child.is_directory for child in inode.entries.values())
            for name in inode.entries:
                self._restore(inode.entries[name], inode)
        else:
            inode.cut_power(self.random)

    def flush(self) -> None:
        """Make everything durable, as ``sync(8)`` does."""
        for directory in self._all_directories():
            self.sync_names(directory)
        for inode in self.inodes.values():
            inode.sync()
