"""Python file objects over blocking readers and writers, for code that wants ``read``, ``seek`` and ``with``."""

from __future__ import annotations

import io
import operator
import os
from collections.abc import Callable
from functools import wraps
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

from curvfs.errors import CurvfsError, UsageError, as_os_error

if TYPE_CHECKING:
    from curvfs.client.sync import SyncFileReader, SyncFileWriter


P = ParamSpec("P")
T = TypeVar("T")


def as_files_raise(function: Callable[P, T]) -> Callable[P, T]:
    """The same function, raising of each CurvfsError the kind that is an OSError, too."""

    @wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        try:
            return function(*args, **kwargs)
        except CurvfsError as error:
            raise as_os_error(error) from error

    return call


class FileObject(io.RawIOBase):
    """A raw binary file with a position. ``io.BufferedReader`` and friends take it, ``io.BufferedRandom`` one that is
    both readable and writable; reading from such a file publishes what was written before.

    What goes wrong in the file system is a CurvfsError and an OSError at once (:func:`~curvfs.errors.as_os_error`): a
    deadline is a DeadlineExceeded and a TimeoutError. A closed file raises ValueError, what it was not opened for
    io.UnsupportedOperation, as Python's do.
    """

    def __init__(self, reader: SyncFileReader | None, writer: SyncFileWriter | None, name: str, mode: str) -> None:
        super().__init__()
        self._reader = reader
        self._writer = writer
        self._position = writer.position if writer is not None else 0
        self.name = name
        self.mode = mode

    def readable(self) -> bool:
        return self._reader is not None or "+" in self.mode

    def writable(self) -> bool:
        return self._writer is not None

    def seekable(self) -> bool:
        return True

    @property
    def _length(self) -> int:
        self._check_open()
        if self._writer is not None:
            return self._writer.length_bytes
        return self._reader.length_bytes if self._reader is not None else 0

    @as_files_raise
    def readinto(self, buffer: Any) -> int:
        """As many bytes as there are from the position on, up to the size of ``buffer``."""
        self._check_readable()
        view = memoryview(buffer).cast("B")
        if self._reader is not None:
            count = self._reader.readinto(view, self._position)
        else:
            found = self._read_back(len(view))
            count = len(found)
            view[:count] = found
        self._position += count
        return count

    @as_files_raise
    def readall(self) -> bytes:
        self._check_readable()
        left = max(0, self._length - self._position)
        found = self._reader.read_at(self._position, left) if self._reader is not None else self._read_back(left)
        self._position += len(found)
        return found

    def _read_back(self, count_bytes: int) -> bytes:
        """From the position on, as written so far."""
        return self._writer.read_at(self._position, count_bytes) if self._writer is not None else b""

    @as_files_raise
    def write(self, buffer: Any) -> int:
        """All of ``buffer``, at the position, or at the end of a file opened to append."""
        self._check_open()
        if self._writer is None:
            raise io.UnsupportedOperation("not writable")
        count = self._writer.write_at(buffer, self._position)
        self._position = self._writer.position
        return count

    @as_files_raise
    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        offset = operator.index(offset)
        start = {os.SEEK_SET: 0, os.SEEK_CUR: self._position, os.SEEK_END: self._length}.get(whence)
        if start is None or start + offset < 0:
            raise UsageError(f"Cannot seek in {self.name} to {offset} from {whence}: there is no such place.")
        self._position = start + offset
        return self._position

    def tell(self) -> int:
        self._check_open()
        return self._position

    @as_files_raise
    def truncate(self, size: int | None = None) -> int:
        self._check_open()
        if self._writer is None:
            raise io.UnsupportedOperation("not writable")
        size = self._position if size is None else size
        self._writer.truncate(size)
        return size

    @as_files_raise
    def flush(self) -> None:
        """Publish what was written."""
        if self._writer is not None and not self.closed:
            self._writer.flush()

    @as_files_raise
    def close(self) -> None:
        """Publish and close. When that fails the file stays as it was published last."""
        if self.closed:
            return
        writer, reader = self._writer, self._reader
        self._writer = None  # what the base class does now is ours
        try:
            if writer is not None:
                try:
                    writer.close()
                except BaseException:
                    writer.abort()
                    raise
            if reader is not None:
                reader.close()
        finally:
            super().close()

    def _check_readable(self) -> None:
        self._check_open()
        if not self.readable():
            raise io.UnsupportedOperation("not readable")

    def _check_open(self) -> None:
        if self.closed:
            raise ValueError("I/O operation on closed file")
