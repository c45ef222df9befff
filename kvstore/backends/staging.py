"""Where objects are written before they have their name: a directory per process, and the sweep of dead ones.

Every process stages under ``<prefix>/.staging/<uuid>/``. Before it stages there it makes sure that a file in it was
touched less than 60 s ago. Whoever sweeps touches a file of its own first and compares the store's times with that,
never its own clock: a directory in which nothing is newer than the expiry (10 minutes) belongs to a process that is
dead, or that has nothing under way. A live process whose directory went simply makes a new one.
"""

from __future__ import annotations

import itertools
from collections.abc import Hashable
from dataclasses import dataclass
from typing import Protocol

from curvfs.errors import CurvfsError
from curvfs.world import World

HEARTBEAT_NAME = "alive"
HEARTBEAT_S = 60.0


@dataclass(frozen=True, slots=True)
class Entry:
    """What a directory holds: times are the store's own."""

    name: str
    is_directory: bool
    mtime_s: float
    length_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Silence:
    """A staging directory: how long ago it gave a sign of life, and what lies in it."""

    name: str
    silent_s: float
    length_bytes: int


class StagingStore(Protocol):
    """The few calls that staging needs of a store. Errors are CurvfsErrors."""

    def make_directory(self, path: str) -> str:
        """Create a directory and its parents, private to us; its id, where the store has such."""
        ...

    def touch(self, path: str) -> float:
        """Create a file or renew its modification time by the store's clock; that time in seconds."""
        ...

    def entries(self, path: str) -> list[Entry]: ...

    def remove_file(self, path: str) -> None: ...

    def remove_directory(self, path: str) -> None: ...

    def is_there(self, path: str) -> bool: ...

    def move(self, source: str, target: str, *, replace: bool) -> None:
        """Rename a file; without ``replace`` the target's name must be free (EEXIST)."""
        ...

    def identity(self, path: str) -> Hashable:
        """What tells this file from any other; the same before and after a move."""
        ...


class Staging:
    """Our staging directory and everybody's. Callable from any thread."""

    def __init__(self, world: World, store: StagingStore, root: str, *, expiry_s: float) -> None:
        self._clock = world.clock
        self._random = world.random
        self._store = store
        self._root = root
        self._expiry_s = expiry_s
        self._beat_every_s = min(HEARTBEAT_S, expiry_s / 4)
        self._lock = world.threads.lock()
        self._numbers = itertools.count()
        self._beaten_s: float | None = None
        self._touched_s = 0.0
        self.directory = f"{root}/{world.random.uuid()}"
        self.directory_id = ""

    def open(self) -> None:
        """Make the directory, and a sign of life in it."""
        with self._lock:
            self.directory_id = self._store.make_directory(self.directory)
            self._beat_again()

    def _beat(self) -> float:
        now_s = self._clock.monotonic_s()
        self._touched_s = self._store.touch(f"{self.directory}/{HEARTBEAT_NAME}")
        self._beaten_s = now_s
        return self._touched_s

    def _beat_again(self) -> float:
        """A sign of life, in our directory made anew where somebody swept it while nothing was under way."""
        try:
            return self._beat()
        except CurvfsError:
            self.directory_id = self._store.make_directory(self.directory)
            return self._beat()

    def now_s(self) -> float:
        """The store's own time: that of the last sign of life, and what has passed since."""
        with self._lock:
            since_s = self._clock.monotonic_s() - (self._beaten_s or 0.0)
            return self._touched_s + since_s

    def new_name(self) -> str:
        """A name in our directory that was never used, after a sign of life where one is due."""
        with self._lock:
            if self._beaten_s is None or self._clock.monotonic_s() - self._beaten_s >= self._beat_every_s:
                self._beat_again()
            return str(next(self._numbers))

    def sweep(self) -> int:
        """Remove the directories of the dead; how many. What others remove meanwhile is no error."""
        with self._lock:
            now_s = self._beat_again()
        removed = 0
        for entry in self._store.entries(self._root):
            path = f"{self._root}/{entry.name}"
            if path == self.directory:
                continue
            try:
                inside = self._store.entries(path) if entry.is_directory else []
                newest_s = max([entry.mtime_s, *(one.mtime_s for one in inside)])
                if now_s - newest_s <= self._expiry_s:
                    continue
                for one in inside:
                    self._store.remove_file(f"{path}/{one.name}")
                if entry.is_directory:
                    self._store.remove_directory(path)
                else:
                    self._store.remove_file(path)
                removed += 1
            except CurvfsError:
                continue
        return removed

    def others(self) -> list[Silence]:
        """The staging directories of everybody else: how long nothing was heard of each, by the store's clock."""
        found = []
        now_s = self.now_s()
        for entry in self._store.entries(self._root):
            path = f"{self._root}/{entry.name}"
            if path == self.directory:
                continue
            try:
                inside = self._store.entries(path) if entry.is_directory else [entry]
            except CurvfsError:  # gone meanwhile
                continue
            newest_s = max([entry.mtime_s, *(one.mtime_s for one in inside)])
            found.append(Silence(entry.name, now_s - newest_s, sum(one.length_bytes for one in inside)))
        return found

    def used_bytes(self) -> int:
        """What everybody's staging directories take."""
        used = 0
        for entry in self._store.entries(self._root):
            try:
                inside = self._store.entries(f"{self._root}/{entry.name}") if entry.is_directory else [entry]
            except CurvfsError:  # gone meanwhile
                continue
            used += sum(one.length_bytes for one in inside)
        return used

    def close(self) -> None:
        """Remove our directory with all that is in it; what cannot be removed is left to a sweep."""
        try:
            for entry in self._store.entries(self.directory):
                self._store.remove_file(f"{self.directory}/{entry.name}")
            self._store.remove_directory(self.directory)
        except CurvfsError:
            pass
