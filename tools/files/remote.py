"""Files of a cluster, as sources and as sinks."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

from curvfs.api import FileStatus, Located, SyncFileReader, SyncFileSystem, SyncFileWriter
from curvfs.client import paths
from curvfs.client.symlinks import status_or_none
from curvfs.errors import CurvfsError, FileExists_, IsADirectory, TransportError
from tools.files.copying import RESUMABLE_BYTES
from tools.files.local import partial_name

#: On a partial file: what it is a part of, and which client writes it.
PARTIAL_XATTR = "curvfs.part"

T = TypeVar("T")


class RemoteSource:
    """A file of a cluster, as it is when it is opened."""

    def __init__(self, fs: SyncFileSystem, path: str, shown: str) -> None:
        self.shown = shown
        self._fs = fs
        self._path = path
        located = fs.locate(path)
        self.status = located.status
        self.identity = _identity(located)
        self._reader = fs.open(located)
        self.size_bytes: int | None = self._reader.length_bytes

    def readinto(self, buffer: memoryview, offset_bytes: int) -> int:
        return self._reader.readinto(buffer, offset_bytes)

    def unchanged(self) -> bool:
        return _identity(self._fs.locate(self._path)) == self.identity

    def close(self) -> None:
        self._reader.close()


def _identity(located: Located) -> str:
    status = located.status
    blocks = ",".join(f"{block.block_id}:{block.length_bytes}" for block in located.blocks)
    return f"{status.id}:{status.length_bytes}:{status.mtime_ms}:{blocks}"


@dataclass(frozen=True, slots=True)
class RemoteWish:
    """How a file of a cluster is wanted. ``mode``, ``owner`` and ``group``: where none is replaced, whose own stay.

    ``source_key`` names the source, for one writer at a time; empty where that cannot be promised. ``identity`` is its
    present content; empty where there is nothing to go on from."""

    path: str
    mode: int
    owner: str
    group: str
    source_key: str
    identity: str
    size_bytes: int | None
    replace: bool = True
    mtime_ms: int | None = None
    resume: bool = True


class RemoteSink:
    """A file of a cluster. The partial one lies beside it."""

    def __init__(self, fs: SyncFileSystem, wish: RemoteWish, shown: str) -> None:
        self.shown = shown
        self._fs = fs
        self._wish = wish
        self._resumable = bool(
            wish.resume and wish.identity and wish.source_key and (wish.size_bytes or 0) >= RESUMABLE_BYTES
        )
        name = partial_name(paths.name_of(wish.path), wish.source_key or fs.world.random.uuid())
        self.partial = paths.join(paths.parent_of(wish.path), f"/{name}")
        self._writer: SyncFileWriter | None = None
        self._reader: SyncFileReader | None = None
        self._replaced: FileStatus | None = None
        self._made = False

    def begin(self) -> int:
        self._replaced = status_or_none(self._fs, self._wish.path)
        if self._replaced is not None and self._replaced.is_dir:
            raise IsADirectory(f"Cannot write {self.shown}: it is a directory.")
        if self._replaced is not None and not self._wish.replace:
            raise FileExists_(f"Cannot write {self.shown}: the name is taken.")
        if self._resumable:
            self._writer = self._resumed()
        if self._writer is None:
            self.restart()
        return 0 if self._writer is None else self._writer.length_bytes

    def _resumed(self) -> SyncFileWriter | None:
        """A writer behind what an earlier run left, or None: of another content, or not to be gone on with."""
        status = status_or_none(self._fs, self.partial)
        if status is None:
            return None
        try:
            left = json.loads(status.xattrs[PARTIAL_XATTR])
            client_name = str(left["client"])
            if left["source"] != self._wish.identity or status.length_bytes > (self._wish.size_bytes or 0):
                return None
        except (KeyError, TypeError, ValueError):
            return None
        try:
            if not status.is_complete:
                # Its writer died. Only who goes by the writer's name can take that off the file.
                with SyncFileSystem.connect(self._fs.config, client_name=client_name) as heir:
                    heir.open_for_write(self.partial).close()
            writer = self._fs.open_for_write(self.partial)
        except TransportError:
            raise
        except CurvfsError:
            return None
        self._made = True
        self._fs.set_attr(self.partial, xattrs={PARTIAL_XATTR: self._mark()})
        return writer

    def _mark(self) -> bytes:
        return json.dumps({"source": self._wish.identity, "client": self._fs.filesystem.client_name}).encode()

    def restart(self) -> None:
        if self._writer is not None:
            self._writer.abort()
            self._writer = None
        if self._made or (self._wish.source_key and status_or_none(self._fs, self.partial) is not None):
            self._fs.delete(self.partial)
        self._writer = self._fs.create(
            self.partial,
            mode=0o600,
            owner=self._wish.owner,
            group=self._wish.group,
            xattrs={PARTIAL_XATTR: self._mark()} if self._resumable else None,
            unique_name=True,
        )
        self._made = True

    def write(self, view: memoryview, offset_bytes: int) -> None:
        if self._writer is not None:
            self._writer.write_at(view, offset_bytes)

    def finish(self) -> None:
        if self._writer is not None:
            self._writer.close(mtime_ms=self._wish.mtime_ms, atime_ms=self._wish.mtime_ms)
            self._writer = None

    def readinto(self, buffer: memoryview, offset_bytes: int) -> int:
        if self._writer is not None:
            content = self._writer.read_at(offset_bytes, len(buffer))
            buffer[: len(content)] = content
            return len(content)
        if self._reader is None:
            self._reader = self._fs.open(self.partial)
        return self._reader.readinto(buffer, offset_bytes)

    def publish(self) -> None:
        if self._reader is not None:
            self._reader.close()
        wish, replaced = self._wish, self._replaced
        self._fs.set_attr(
            self.partial,
            mode=wish.mode if replaced is None else replaced.mode,
            owner=wish.owner if replaced is None else replaced.owner,
            group=wish.group if replaced is None else replaced.group,
            remove_xattrs=[PARTIAL_XATTR] if self._resumable else (),
        )
        self._fs.rename(self.partial, wish.path, replace=wish.replace)
        self._made = False

    def keep(self, *, whole: bool) -> int:
        if not self._resumable or not self._made:
            self.discard()
            return 0
        try:
            if self._writer is not None and whole:
                self._writer.close()
            elif self._writer is not None:
                self._writer.abort()
            kept = self._briefly(partial(self._fs.filesystem.stat, self.partial)).length_bytes
        except CurvfsError:
            return 0  # nobody answers; what is there is found by the next run
        if kept == 0:
            self.discard()
        return kept

    def discard(self) -> None:
        try:
            if self._writer is not None:
                self._writer.abort()
                self._writer = None
            if self._made:
                self._briefly(partial(self._fs.filesystem.delete, self.partial))
                self._made = False
        except CurvfsError:
            pass  # the next run of the same command removes it

    def _briefly(self, call: Callable[[], Awaitable[T]]) -> T:
        """For when something has failed already: no longer than closing may take. Raises CurvfsError."""
        return self._fs.portal.run(call, timeout_s=self._fs.config.close_timeout_s)
