"""What is taken out of the way instead of being removed: evicted objects, and damaged ones.

::

    .trash/<minute>/<name, its slashes as _>         evicted in that minute of the store's own clock; once more: -<uuid>
    .quarantine/<uuid>-<name, its slashes as _>      damaged, for somebody to look at

Leases cost no write: whoever was promised an object less than ``lease_s`` ago still gets it, by its block locations or
from here. A promise may be repeated for ``lease_s`` without asking, so a minute's trash is removed twice ``lease_s``
after that minute ended; earlier, the oldest first, when a put needs the room.
"""

from __future__ import annotations

import errno
from collections.abc import Hashable

from curvfs.errors import CurvfsError
from curvfs.world import World
from kvstore.backends.staging import Entry, Staging, StagingStore

TRASH = ".trash"
QUARANTINE = ".quarantine"
_MOVE_TRIES = 4


class Aside:
    """The trash and the quarantine of one prefix. Callable from any thread."""

    def __init__(self, world: World, store: StagingStore, staging: Staging, prefix: str, *, lease_s: float) -> None:
        self._random = world.random
        self._store = store
        self._staging = staging
        self._prefix = prefix
        self._trash = f"{prefix}/{TRASH}"
        self._quarantine = f"{prefix}/{QUARANTINE}"
        self._lease_s = lease_s

    def evict(self, name: str) -> bool:
        """Move an object to the trash; False when it was not there."""
        directory = f"{self._trash}/{int(self._staging.now_s() // 60):010d}"
        return self._move(f"{self._prefix}/{name}", directory, _flat(name))

    def _move(self, path: str, directory: str, name: str) -> bool:
        target = f"{directory}/{name}"
        for left in reversed(range(_MOVE_TRIES)):
            try:
                self._store.move(path, target, replace=False)
            except CurvfsError as error:
                if error.errno_ == errno.EEXIST:  # twice within a minute: who was promised the first one still gets it
                    target = f"{directory}/{name}-{self._random.uuid()}"
                    continue
                if not self._store.is_there(path):
                    return False
                if not left:
                    raise error
                self._store.make_directory(directory)  # others may remove it while it is empty
            else:
                return True
        return False

    def trashed(self, name: str) -> list[str]:
        """Paths at which an evicted object may be, the newest first."""
        try:
            minutes = sorted((entry.name for entry in self._store.entries(self._trash)), reverse=True)
        except CurvfsError:
            return []
        return [f"{self._trash}/{minute}/{_flat(name)}" for minute in minutes]

    def empty(self, *, early: bool, namespace: str = "") -> int:
        """Remove the trash that nobody was promised any more; ``early``: the oldest minute's in any case. With a
        ``namespace`` only its own."""
        minutes = sorted(entry.name for entry in self._entries(self._trash) if entry.is_directory)
        removed = 0
        for minute in minutes:
            over_s = 60.0 * (int(minute) + 1) + 2 * self._lease_s if minute.isdigit() else 0.0
            if not early and self._staging.now_s() < over_s:
                break
            path = f"{self._trash}/{minute}"
            found = self._entries(path)
            ours = [entry for entry in found if _is_of(entry, namespace)]
            for entry in ours:
                self._store.remove_file(f"{path}/{entry.name}")
                removed += 1
            if len(ours) == len(found):
                self._remove_minute(path)
            early = early and removed == 0
        return removed

    def _remove_minute(self, path: str) -> None:
        try:
            self._store.remove_directory(path)
        except CurvfsError as error:  # this very minute, somebody put something in
            if error.errno_ != errno.ENOTEMPTY:
                raise

    def used_bytes(self, namespace: str = "") -> int:
        """What the trash takes, or what one ``namespace`` has in it: it counts as used."""
        used = 0
        for minute in self._entries(self._trash):
            found = self._entries(f"{self._trash}/{minute.name}")
            used += sum(entry.length_bytes for entry in found if _is_of(entry, namespace))
        return used

    def _entries(self, path: str) -> list[Entry]:
        """What a directory holds; nothing when it is not there, or somebody removed it just now."""
        try:
            return self._store.entries(path)
        except CurvfsError as error:
            if error.errno_ == errno.ENOENT:
                return []
            raise

    def quarantine(self, name: str, identity: Hashable) -> bool:
        """Move a damaged object away, unless it turns out to be another one than was read: that one is put back."""
        path, flat = f"{self._prefix}/{name}", f"{self._random.uuid()}-{_flat(name)}"
        if not self._move(path, self._quarantine, flat):
            return False
        moved = f"{self._quarantine}/{flat}"
        if self._store.identity(moved) == identity:
            return True
        try:
            self._store.move(moved, path, replace=False)
        except CurvfsError as error:
            if error.errno_ != errno.EEXIST:
                raise
            self._store.remove_file(moved)  # a third one is there by now
        return False


def _is_of(entry: Entry, namespace: str) -> bool:
    return not namespace or entry.name.startswith(f"{namespace}_")


def _flat(name: str) -> str:
    return name.replace("/", "_")
