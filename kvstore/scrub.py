"""Judging objects where nobody asks for them: what a scrub of a whole pool does, object by object.

The rules are those of a get (see :mod:`kvstore.loading`): an object whose own lengths or checksums do not hold is read
again by another path, and only when it fails there too is it damaged. What a later format version wrote, what carries
another key than its name says, and what has no name of ours is left alone.
"""

from __future__ import annotations

import enum
import errno
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from curvfs.errors import BlockNotFound, CurvfsError
from curvfs.world import World
from kvstore.backends.aside import QUARANTINE, TRASH
from kvstore.backends.base import Backend, ObjectEntry, ObjectReader
from kvstore.engine.uring import probed_engine
from kvstore.geometry import MAX_UNIT_BYTES
from kvstore.header import ALIGNMENT_BYTES, MAX_HEADER_BYTES, BadObject, NewerFormat, stored_tensors
from kvstore.loading import fetch_header, read_units
from kvstore.opening import open_backend
from kvstore.slabs import Slab

#: Read at once; the rate is kept from one such piece to the next.
_STEP_BYTES = 4 << 20
_SLAB_BYTES = max(MAX_HEADER_BYTES, _STEP_BYTES + 2 * MAX_UNIT_BYTES) + ALIGNMENT_BYTES

_NAME = re.compile(
    r"[0-9a-f]{32}/(?P<first>[0-9a-f]{2})/(?P<second>[0-9a-f]{2})/(?P<key>[0-9a-f]{32,128})"
    r"(?:-(?P<shard>[^/]+))?\.safetensors"
)


class State(enum.Enum):
    """What an object is found to be."""

    SOUND = "sound"
    READ_AGAIN = "read_again"
    """It looked damaged, and was sound when it was read by another path."""
    DAMAGED = "damaged"
    NEWER = "newer"
    FOREIGN = "foreign"
    """It says that it has another key than its name, or has no name of ours."""
    UNREADABLE = "unreadable"
    """The storage did not give its bytes."""
    GONE = "gone"
    """It was deleted or replaced meanwhile."""


@dataclass(frozen=True, slots=True)
class Judged:
    """One object. ``quarantined``: it was damaged, and was moved out of the way."""

    name: str
    state: State
    length_bytes: int
    reason: str = ""
    quarantined: bool = False


@dataclass(frozen=True, slots=True)
class LeftOver:
    """A staging directory in which nothing has moved for ``silent_s``, by the store's clock."""

    name: str
    silent_s: float
    files: int
    length_bytes: int


@contextmanager
def open_pool(world: World, url: str, prefix: str, *, staging_expiry_s: float) -> Iterator[Backend]:
    """The KV prefix of a place, whatever models it holds. Raises as :func:`kvstore.open` does."""
    engine, _ = probed_engine(world, "threads", depth=1)
    try:
        backend = open_backend(
            world,
            engine,
            url,
            prefix=prefix,
            direct=True,
            keep=False,
            durable=False,
            staging_expiry_s=staging_expiry_s,
            lease_s=0.0,
        )
        try:
            yield backend
        finally:
            backend.close()
    finally:
        engine.close(1.0)


class Stopped(Exception):
    """The scrub was told to stop in the middle of an object."""


class Scrubber:
    """Judges objects of one prefix, one at a time. For one thread.

    ``pace`` is called with the bytes of every piece that was read: to wait where that was too fast, and to raise
    :class:`Stopped` where no more is wanted.
    """

    def __init__(self, world: World, backend: Backend, pace: Callable[[int], None]) -> None:
        self._clock = world.clock
        self._backend = backend
        self._pace = pace
        self._slab = Slab(_SLAB_BYTES)

    def walk(self, after: str = "") -> Iterator[ObjectEntry]:
        """All objects of all namespaces in order of their names, behind ``after``. Raises CurvfsError."""
        root = self._backend.root
        names = sorted(entry.name for entry in self._backend.records.entries(root or "/") if entry.is_directory)
        for name in names:
            if name.startswith(".") or (after and name < after.partition("/")[0]):
                continue
            yield from self._backend.walk(name, after if after.startswith(f"{name}/") else "")

    def judge(self, entry: ObjectEntry, *, repair: bool) -> Judged:
        """Read all of an object. ``repair``: what is damaged goes into quarantine. Raises Stopped."""
        name, length = entry.name, entry.length_bytes
        found = _NAME.fullmatch(name)
        if found is None or (found["first"], found["second"]) != (found["key"][:2], found["key"][2:4]):
            return Judged(name, State.FOREIGN, length, "it has no name of an object of ours")
        try:
            return self._judge(name, length, repair)
        except NewerFormat as error:
            return Judged(name, State.NEWER, length, str(error))
        except _Foreign as error:
            return Judged(name, State.FOREIGN, length, str(error))
        except CurvfsError as error:
            gone = error.errno_ == errno.ENOENT
            return Judged(name, State.GONE if gone else State.UNREADABLE, length, str(error))

    def _judge(self, name: str, length: int, repair: bool) -> Judged:
        with self._backend.open(name) as reader:
            identity = reader.identity
            try:
                self._read(name, reader)
            except (BadObject, BlockNotFound) as error:
                first: CurvfsError = error
            else:
                return Judged(name, State.SOUND, reader.length_bytes)
        with self._backend.open_otherwise(name) as reader:
            same = reader.identity == identity
            try:
                self._read(name, reader)
            except (BadObject, BlockNotFound):
                pass
            else:
                return Judged(name, State.READ_AGAIN, reader.length_bytes, str(first))
        if not same:
            return Judged(name, State.GONE, length, "another object has its name by now")
        moved = repair and self._backend.quarantine(name, identity)
        return Judged(name, State.DAMAGED, length, str(first), quarantined=moved)

    def _read(self, name: str, reader: ObjectReader) -> None:
        """Everything of an object that can be held against something. Raises BadObject, NewerFormat, _Foreign."""
        header = fetch_header(reader, self._slab)
        self._pace(header.header_bytes)
        found = _NAME.fullmatch(name)
        key, shard = header.metadata.get("key", ""), header.metadata.get("shard", "")
        if found is None or (key, shard) != (found["key"], found["shard"] or ""):
            raise _Foreign(f"it says that it is key {key[:40]!r}, shard {shard[:40]!r}")
        stored_tensors(header)
        for low in range(0, header.data_bytes, _STEP_BYTES):
            high = min(low + _STEP_BYTES, header.data_bytes)
            read_units(reader, header, self._slab, low, high)
            self._pace(high - low)

    def left_overs(self, expiry_s: float) -> list[LeftOver]:
        """Staging directories of the dead: nothing in them is newer than ``expiry_s``. Raises CurvfsError."""
        records, staging = self._backend.records, self._backend.staging
        root = f"{self._backend.root}/.staging"
        records.touch(f"{staging.directory}/alive")
        now_s = max(entry.mtime_s for entry in records.entries(staging.directory))
        found = []
        for entry in records.entries(root):
            path = f"{root}/{entry.name}"
            if path == staging.directory:
                continue
            try:
                inside = records.entries(path) if entry.is_directory else [entry]
            except CurvfsError:  # gone meanwhile
                continue
            silent_s = now_s - max([entry.mtime_s, *(one.mtime_s for one in inside)])
            if silent_s > expiry_s:
                found.append(LeftOver(entry.name, silent_s, len(inside), sum(one.length_bytes for one in inside)))
        return found

    def aside_bytes(self) -> dict[str, tuple[int, int]]:
        """Files and bytes in quarantine and in the trash. Raises CurvfsError."""
        return {name.lstrip("."): self._below(f"{self._backend.root}/{name}") for name in (QUARANTINE, TRASH)}

    def _below(self, path: str) -> tuple[int, int]:
        files = size = 0
        try:
            entries = self._backend.records.entries(path)
        except CurvfsError as error:
            if error.errno_ == errno.ENOENT:
                return 0, 0
            raise
        for entry in entries:
            if entry.is_directory:
                more = self._below(f"{path}/{entry.name}")
                files, size = files + more[0], size + more[1]
            else:
                files, size = files + 1, size + entry.length_bytes
        return files, size


class _Foreign(CurvfsError):
    """An object of another key than its name says."""
