"""Where the pattern is written and from where it is read back: a directory, the native client, the KV store."""

from __future__ import annotations

import abc
import contextlib
import os
from collections.abc import Callable

from curvfs.api import SyncFileSystem
from curvfs.errors import CurvfsError, NotFound, from_os_error
from curvfs.world import World
from tools.verify.pattern import PIECE_BYTES

#: Gives the content from an offset; is called with multiples of PIECE_BYTES.
Content = Callable[[int, int], bytearray]
#: Is handed what was read from an offset.
Check = Callable[[memoryview, int], None]


class Place(abc.ABC):
    """One way to the files. Errors are CurvfsErrors; a context manager."""

    #: For people: "the same mount", "another client".
    label: str

    @abc.abstractmethod
    def write(self, name: str, size_bytes: int, content: Content) -> None:
        """Make a file anew, whole and handed over when this returns."""

    @abc.abstractmethod
    def read(self, name: str, check: Check) -> int:
        """Read all of a file in pieces; its length."""

    @abc.abstractmethod
    def remove(self, name: str) -> None:
        """A file that is not there is no error."""

    @abc.abstractmethod
    def close(self, *, remove: bool) -> None:
        """``remove``: the directory that was made as well, when it is empty."""


class DirectoryPlace(Place):
    """Files of a directory that the kernel shows. What was written is synced, and read past the page cache."""

    def __init__(self, world: World, path: str, label: str, directory: str) -> None:
        self.label = label
        self._disk = world.disk
        self._directory = f"{path}/{directory}"
        self._path = path

    def _name(self, name: str) -> str:
        return f"{self._directory}/{name}"

    def write(self, name: str, size_bytes: int, content: Content) -> None:
        path = self._name(name)
        try:
            if not self._disk.exists(self._directory):
                self._disk.mkdir(self._directory)
            fd = self._disk.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
            try:
                for at in range(0, size_bytes, PIECE_BYTES):
                    self._disk.pwrite_full(fd, content(at, min(PIECE_BYTES, size_bytes - at)), at)
                self._disk.fsync(fd)
            finally:
                self._disk.close(fd)
        except OSError as error:
            raise from_os_error(error, doing=f"Writing {path}") from error

    def read(self, name: str, check: Check) -> int:
        path = self._name(name)
        try:
            fd = self._disk.open(path, os.O_RDONLY)
            try:
                os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
                size = self._disk.fstat(fd).st_size
                view = memoryview(bytearray(PIECE_BYTES))
                at = 0
                while count := self._disk.pread_full(fd, view, at):
                    check(view[:count], at)
                    at += count
                return max(size, at)
            finally:
                self._disk.close(fd)
        except OSError as error:
            raise from_os_error(error, doing=f"Reading {path}") from error

    def remove(self, name: str) -> None:
        try:
            self._disk.unlink(self._name(name))
        except FileNotFoundError:
            pass
        except OSError as error:
            raise from_os_error(error, doing=f"Removing {self._name(name)}") from error

    def close(self, *, remove: bool) -> None:
        if remove:
            with contextlib.suppress(OSError):
                self._disk.rmdir(self._directory)


class ClientPlace(Place):
    """Files of a namespace through a client of its own; ``wire``: no block file is opened directly."""

    def __init__(self, world: World, url: str, label: str, directory: str, *, wire: bool = False) -> None:
        self.label = label
        options = {"short_circuit": False} if wire else {}
        self._fs = SyncFileSystem.connect(url, world=world, **options)
        self._directory = f"/{directory}"

    def _name(self, name: str) -> str:
        return f"{self._directory}/{name}"

    def write(self, name: str, size_bytes: int, content: Content) -> None:
        with self._fs.create(self._name(name), overwrite=True, parents=True) as writer:
            for at in range(0, size_bytes, PIECE_BYTES):
                writer.write(content(at, min(PIECE_BYTES, size_bytes - at)))

    def read(self, name: str, check: Check) -> int:
        view = memoryview(bytearray(PIECE_BYTES))
        with self._fs.open(self._name(name)) as reader:
            at = 0
            while at < reader.length_bytes:
                count = reader.readinto(view[: reader.length_bytes - at], at)
                if not count:
                    break
                check(view[:count], at)
                at += count
            return reader.length_bytes

    def remove(self, name: str) -> None:
        with contextlib.suppress(NotFound):
            self._fs.delete(self._name(name))

    def close(self, *, remove: bool) -> None:
        if remove:
            with contextlib.suppress(CurvfsError):
                self._fs.delete(self._directory)
        self._fs.close()


class StorePlace(Place):
    """KV objects through a store of its own. A file is one page; its name is the page's key."""

    def __init__(self, world: World, url: str, label: str, size_bytes: int, seed: int, *, prefix: str) -> None:
        import kvstore

        self.label = label
        geometry = kvstore.Geometry.raw(size_bytes, page_tokens=16)
        identity = kvstore.Identity.of(geometry, model="curvfs-verify", revision=str(seed))
        self._store = kvstore.open(url, identity, geometry=geometry, prefix=prefix, depth=2, world=world)

    def write(self, name: str, size_bytes: int, content: Content) -> None:
        page = bytearray(size_bytes)
        for at in range(0, size_bytes, PIECE_BYTES):
            piece = content(at, min(PIECE_BYTES, size_bytes - at))
            page[at : at + len(piece)] = piece
        result = self._store.put([self._store.foreign_key(name.encode())], [page]).result()[0]
        if not result:
            raise CurvfsError(f"Object {name} was not stored: {result}.")

    def read(self, name: str, check: Check) -> int:
        page = memoryview(bytearray(self._store.geometry.size_bytes))
        key = self._store.foreign_key(name.encode())
        result = self._store.get([key], [page]).result()[0]
        if not result:
            raise CurvfsError(f"Object {name} ({self._store.object_name(key)}) is a miss: {result}.")
        for at in range(0, len(page), PIECE_BYTES):
            check(page[at : at + PIECE_BYTES], at)
        return len(page)

    def remove(self, name: str) -> None:
        self._store.delete([self._store.foreign_key(name.encode())])

    def close(self, *, remove: bool) -> None:
        self._store.close()
