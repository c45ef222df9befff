"""Where an object's bytes come from: a file of this machine (any mount among them), or a Curvine cluster."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol

from curvfs.api import SyncFileReader, gather_settings
from curvfs.api import SyncFileSystem as Client
from curvfs.errors import UsageError, from_os_error
from curvfs.world import World

#: Inode attributes in which the pool keeps what it knows of an object.
_SEALS = ("curvfs.born", "curvfs.sealed")


class Source(Protocol):
    """A file that is open."""

    length_bytes: int

    def read(self, offset_bytes: int, length_bytes: int) -> bytes:
        """Exactly these bytes, less only at the end. Raises CurvfsError."""
        ...

    def told(self) -> dict[str, Any]:
        """What its place says of it besides the bytes."""
        ...


class _Local:
    def __init__(self, world: World, path: str, fd: int, length_bytes: int) -> None:
        self._disk = world.disk
        self._path = path
        self._fd = fd
        self.length_bytes = length_bytes

    def read(self, offset_bytes: int, length_bytes: int) -> bytes:
        buffer = bytearray(min(length_bytes, max(0, self.length_bytes - offset_bytes)))
        try:
            count = self._disk.pread_full(self._fd, memoryview(buffer), offset_bytes)
        except OSError as error:
            raise from_os_error(error, doing=f"reading {self._path}") from error
        return bytes(buffer[:count])

    def told(self) -> dict[str, Any]:
        return {"place": self._path, "blocks": [], "attributes": {}}


class _Remote:
    def __init__(self, client: Client, path: str, reader: SyncFileReader) -> None:
        self._client = client
        self._path = path
        self._reader = reader
        self.length_bytes = reader.length_bytes

    def read(self, offset_bytes: int, length_bytes: int) -> bytes:
        return self._reader.read_at(offset_bytes, min(length_bytes, max(0, self.length_bytes - offset_bytes)))

    def told(self) -> dict[str, Any]:
        (located,) = self._client.locate_many([self._path])
        if isinstance(located, Exception):
            raise located
        return {
            "place": f"curvine://{self._client.config.masters_text}{self._path}",
            "blocks": [
                {
                    "id": block.block_id,
                    "length_bytes": block.length_bytes,
                    "hosts": [worker.hostname for worker in block.workers],
                }
                for block in located.blocks
            ],
            "attributes": {
                name: value.decode(errors="backslashreplace")
                for name, value in located.status.xattrs.items()
                if name in _SEALS
            },
        }


@contextmanager
def opened(world: World, place: str) -> Iterator[Source]:
    """The file at a path of this machine or a ``curvine://`` URL. Raises CurvfsError."""
    if "://" in place:
        config = gather_settings(place).config
        with (
            Client.connect(config.with_overrides(root="/"), world=world) as client,
            client.open(config.root) as reader,
        ):
            yield _Remote(client, config.root, reader)
        return
    try:
        fd = world.disk.open(place, os.O_RDONLY | os.O_NONBLOCK)
    except OSError as error:
        raise from_os_error(error, doing=f"opening {place}") from error
    try:
        status = world.disk.fstat(fd)
        if not stat.S_ISREG(status.st_mode):
            raise UsageError(f"{place} is no file; name an object, such as one that curvfs inspect pool lists.")
        yield _Local(world, place, fd, status.st_size)
    finally:
        world.disk.close(fd)
