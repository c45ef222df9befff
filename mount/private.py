"""Private files: what was created or truncated below a KV prefix and has not been published yet.

Each lies at a name of its own in the mount's staging directory and is shown, on this mount only, under the name it was
asked for. Two writers of one name have two private files and never touch each other's bytes.

This is the book of them; it does no I/O. :mod:`mount.publish` acts on it.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import trio

from curvfs.api import FileStatus
from curvfs.errors import CurvfsError
from mount.inodes import Node

Place = tuple[Node, str]


@dataclass(slots=True, eq=False)
class PrivateFile:
    """One private file. ``reserved_for`` is the thread whose open made it, until it has opened it, at the latest
    ``reserved_until_s``; ``closed_s`` when the last handle went, None while one is open."""

    node: Node
    place: Place
    reserved_for: int | None = None
    reserved_until_s: float = 0.0
    closed_s: float | None = None
    #: A later open has truncated what was under the name: this file is not what the name stands for any more.
    superseded: bool = False
    #: The store's ordinary file that was under the name when this file, or one before it, took its place.
    supersedes: FileStatus | None = None
    #: The threads that opened it for writing.
    openers: set[int] = field(default_factory=set)
    #: Something that was written has been brought to the store by a close(2), or by a sync.
    was_flushed: bool = False
    was_synced: bool = False
    #: Set, and replaced, whenever a writable handle is released.
    released: trio.Event = field(default_factory=trio.Event)

    @property
    def is_open_for_write(self) -> bool:
        return self.node.writers > 0

    @property
    def failed(self) -> CurvfsError | None:
        """What a write to it ended with, if one did not succeed."""
        writer = self.node.writer
        return None if writer is None else writer.failed

    @property
    def has_failed(self) -> bool:
        return self.failed is not None


class Privates:
    """All private files of a mount, by the place they were asked for, oldest first."""

    def __init__(self) -> None:
        self._by_place: dict[Place, list[PrivateFile]] = {}
        self._by_directory: dict[Node, set[str]] = {}

    def __len__(self) -> int:
        return sum(map(len, self._by_place.values()))

    def all(self) -> list[PrivateFile]:
        return [private for privates in self._by_place.values() for private in privates]

    def add(self, private: PrivateFile) -> None:
        parent, name = private.place
        self._by_place.setdefault(private.place, []).append(private)
        self._by_directory.setdefault(parent, set()).add(name)
        private.node.private = private
        private.node.pins += 1
        parent.pins += 1
        parent.changes += 1

    def remove(self, private: PrivateFile) -> None:
        """Take a file out of the book; whoever does it drops the node when it is unused."""
        privates = self._by_place[private.place]
        privates.remove(private)
        parent, name = private.place
        if not privates:
            del self._by_place[private.place]
            names = self._by_directory[parent]
            names.discard(name)
            if not names:
                del self._by_directory[parent]
        private.node.private = None
        private.node.pins -= 1
        parent.pins -= 1
        parent.changes += 1

    def at(self, place: Place) -> list[PrivateFile]:
        """The files asked for at a place, oldest first, without those that wait for the thread they were made for."""
        return [private for private in self._by_place.get(place, ()) if private.reserved_for is None]

    def everything_at(self, place: Place) -> list[PrivateFile]:
        return list(self._by_place.get(place, ()))

    def visible(self, place: Place, thread_id: int) -> PrivateFile | None:
        """What a thread sees under a name: the file made for it, else the newest."""
        for private in self._by_place.get(place, ()):
            if private.reserved_for == thread_id:
                return private
        return self.newest(place)

    def newest(self, place: Place) -> PrivateFile | None:
        """What everybody sees under a name."""
        privates = self.at(place)
        return privates[-1] if privates else None

    def names_in(self, directory: Node) -> list[str]:
        """The names asked for in a directory, sorted."""
        return sorted(self._by_directory.get(directory, ()))

    def any_in(self, directory: Node) -> bool:
        """Does a directory show a private file?"""
        return any(self.newest((directory, name)) is not None for name in self._by_directory.get(directory, ()))
