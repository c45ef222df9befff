"""Files of this machine, as sources and as sinks."""

from __future__ import annotations

import hashlib
import os
import stat as statmod
import sys
from dataclasses import dataclass
from typing import BinaryIO

from curvfs.errors import CurvfsError, FileExists_, InProgress, IsADirectory, from_os_error
from curvfs.world import Disk
from tools.files.copying import RESUMABLE_BYTES

#: The longest name that gets a longer one for its partial file.
_MAX_PLAIN_NAME_BYTES = 180


def partial_name(name: str, key: str) -> str:
    """The name of the partial file of ``name``, a different one for each ``key``."""
    digest = hashlib.blake2b(key.encode(errors="surrogateescape"), digest_size=8).hexdigest()
    if len(os.fsencode(name)) > _MAX_PLAIN_NAME_BYTES:
        return f".{hashlib.blake2b(os.fsencode(name), digest_size=8).hexdigest()}.{digest}.part"
    return f".{name}.{digest}.part"


class LocalSource:
    """A regular file. Holds a lock on it while it is open, where nobody else does: :attr:`alone`."""

    def __init__(self, disk: Disk, path: str) -> None:
        self.shown = path
        self._disk = disk
        self._fd = disk.open(path, os.O_RDONLY | os.O_NONBLOCK)
        self.status = disk.fstat(self._fd)
        self.size_bytes: int | None = self.status.st_size
        self.identity = _identity(self.status)
        try:
            self.alone = disk.lock(self._fd)
        except OSError:  # a file system without locks
            self.alone = False

    def readinto(self, buffer: memoryview, offset_bytes: int) -> int:
        return self._disk.preadv(self._fd, [buffer], offset_bytes)

    def unchanged(self) -> bool:
        return _identity(self._disk.fstat(self._fd)) == self.identity

    def close(self) -> None:
        self._disk.close(self._fd)


def _identity(status: os.stat_result) -> str:
    return f"{status.st_dev}:{status.st_ino}:{status.st_size}:{status.st_mtime_ns}:{status.st_ctime_ns}"


class StreamSource:
    """What can be read once, from its beginning to its end: standard input, a pipe, a device."""

    size_bytes: int | None = None
    identity = ""

    def __init__(self, file: BinaryIO, shown: str, *, ours: bool) -> None:
        self.shown = shown
        self._file = file
        self._ours = ours

    def readinto(self, buffer: memoryview, offset_bytes: int) -> int:
        return self._file.readinto(buffer)  # type: ignore[attr-defined,no-any-return]

    def unchanged(self) -> bool:
        return True

    def close(self) -> None:
        if self._ours:
            self._file.close()


class StreamSink:
    """What can only be written from its beginning to its end. It shows all bytes at once, so nothing is published."""

    partial = ""

    def __init__(self, file: BinaryIO, shown: str, *, ours: bool) -> None:
        self.shown = shown
        self._file = file
        self._ours = ours

    def begin(self) -> int:
        return 0

    def restart(self) -> None:
        raise AssertionError("a stream has no partial file")

    def write(self, view: memoryview, offset_bytes: int) -> None:
        while len(view):
            view = view[self._file.write(view) :]

    def finish(self) -> None:
        self._file.flush()

    def readinto(self, buffer: memoryview, offset_bytes: int) -> int:
        raise CurvfsError(f"{self.shown} cannot be read back; leave --verify out.")

    def publish(self) -> None:
        self.discard()

    def keep(self, *, whole: bool) -> int:
        self.discard()
        return 0

    def discard(self) -> None:
        if self._ours:
            self._file.close()


def standard_input() -> StreamSource:
    return StreamSource(sys.stdin.buffer, "standard input", ours=False)


def standard_output() -> StreamSink:
    return StreamSink(sys.stdout.buffer, "standard output", ours=False)


@dataclass(frozen=True, slots=True)
class LocalWish:
    """How a local file is wanted. ``mode``: where none is replaced, whose mode stays. ``source_key`` names the source,
    ``identity`` its present content; empty where there is nothing to go on from."""

    path: str
    mode: int
    source_key: str
    identity: str
    size_bytes: int | None
    replace: bool = True
    mtime_ms: int | None = None
    sync: bool = False
    resume: bool = True


class LocalSink:
    """A regular file. The partial one lies beside it, locked while it is written."""

    def __init__(self, disk: Disk, wish: LocalWish, shown: str) -> None:
        self.shown = shown
        self._disk = disk
        self._wish = wish
        self._resumable = bool(wish.resume and wish.identity and (wish.size_bytes or 0) >= RESUMABLE_BYTES)
        self._directory, self._name = os.path.split(wish.path)
        self._begun = partial_name(self._name, wish.source_key).removesuffix("part")
        content = hashlib.blake2b(wish.identity.encode(), digest_size=8).hexdigest()
        self.partial = os.path.join(self._directory, f"{self._begun}{content}.part")
        self._fd: int | None = None
        self._end = 0

    def begin(self) -> int:
        try:
            found = self._disk.stat(self._wish.path)
        except FileNotFoundError:
            pass
        else:
            if statmod.S_ISDIR(found.st_mode):
                raise IsADirectory(f"Cannot write {self._wish.path}: it is a directory.")
            self._may_replace()
        self._open()
        if self._resumable:
            self._remove_outdated()
        fd = self._descriptor
        self._end = self._disk.fstat(fd).st_size
        if self._end > (self._wish.size_bytes or 0) or not self._resumable:
            self.restart()
        return self._end

    def _may_replace(self) -> None:
        if not self._wish.replace:
            raise FileExists_(f"Cannot write {self._wish.path}: the name is taken.")

    def _open(self) -> None:
        """Ours alone, and still under its name: whoever had it before may just have published it."""
        while True:
            try:
                fd = self._disk.open(self.partial, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
            except OSError as error:
                raise from_os_error(error, doing=f"Cannot write {self._wish.path}") from error
            try:
                if not self._disk.lock(fd):
                    raise InProgress(f"Cannot write {self._wish.path}: another curvfs is doing it now.")
                here, there = self._disk.fstat(fd), self._disk.stat(self.partial)
                if (here.st_dev, here.st_ino) == (there.st_dev, there.st_ino):
                    self._fd, fd = fd, -1
                    return
            except FileNotFoundError:
                pass
            finally:
                if fd >= 0:
                    self._disk.close(fd)

    @property
    def _descriptor(self) -> int:
        if self._fd is None:
            raise AssertionError("not begun")
        return self._fd

    def _remove_outdated(self) -> None:
        """Partial files of the same source as it was before it changed."""
        for name in self._disk.listdir(self._directory or "."):
            path = os.path.join(self._directory, name)
            if name.startswith(self._begun) and name.endswith(".part") and path != self.partial:
                try:
                    fd = self._disk.open(path, os.O_RDWR | os.O_NOFOLLOW)
                except OSError:
                    continue
                try:
                    if self._disk.lock(fd):
                        self._disk.unlink(path)
                except OSError:
                    pass
                finally:
                    self._disk.close(fd)

    def restart(self) -> None:
        self._disk.ftruncate(self._descriptor, 0)
        self._end = 0

    def write(self, view: memoryview, offset_bytes: int) -> None:
        self._disk.pwrite_full(self._descriptor, view, offset_bytes)
        self._end = offset_bytes + len(view)

    def finish(self) -> None:
        if self._wish.sync:
            self._disk.fdatasync(self._descriptor)

    def readinto(self, buffer: memoryview, offset_bytes: int) -> int:
        return self._disk.preadv(self._descriptor, [buffer], offset_bytes)

    def publish(self) -> None:
        fd = self._descriptor
        try:
            mode = statmod.S_IMODE(self._disk.stat(self._wish.path).st_mode)
        except FileNotFoundError:
            mode = self._wish.mode
        os.fchmod(fd, mode)
        if self._wish.mtime_ms is not None:
            stamp_ns = self._wish.mtime_ms * 1_000_000
            os.utime(fd, ns=(stamp_ns, stamp_ns))
        if self._wish.replace:
            self._disk.rename(self.partial, self._wish.path)
        else:
            try:
                self._disk.rename_noreplace(self.partial, self._wish.path)
            except FileExistsError:
                raise FileExists_(f"Cannot write {self._wish.path}: the name is taken.") from None
        if self._wish.sync:
            self._disk.sync_names(self._directory or ".")
        self._close()

    def keep(self, *, whole: bool) -> int:
        if not self._resumable or self._end == 0:
            self.discard()
            return 0
        self._close()
        return self._end

    def discard(self) -> None:
        if self._fd is None:
            return
        try:
            self._disk.unlink(self.partial)
        except OSError:
            pass
        self._close()

    def _close(self) -> None:
        if self._fd is not None:
            self._disk.close(self._fd)
            self._fd = None


def open_source(disk: Disk, path: str) -> LocalSource | StreamSource:
    """A file of this machine, whatever kind it is. Raises IsADirectory, OSError."""
    mode = disk.stat(path).st_mode
    if statmod.S_ISDIR(mode):
        raise IsADirectory(f"Cannot read {path}: it is a directory; -r copies it with all in it.")
    if statmod.S_ISREG(mode):
        return LocalSource(disk, path)
    return StreamSource(open(path, "rb", buffering=0), path, ours=True)


def open_special(disk: Disk, path: str) -> StreamSink | None:
    """A sink for what is there and no regular file: a device or a pipe is written to, not replaced. Else None."""
    try:
        mode = disk.stat(path).st_mode
    except FileNotFoundError:
        return None
    except OSError as error:
        raise from_os_error(error, doing=f"Cannot write {path}") from error
    if statmod.S_ISREG(mode) or statmod.S_ISDIR(mode):
        return None
    return StreamSink(open(path, "wb", buffering=0), path, ours=True)
