"""Reading files."""

from __future__ import annotations

from typing import Protocol, Self

from curvfs.client.records import FileStatus


class FileReader(Protocol):
    """A file open for reading; several tasks may read at once. An async context manager."""

    @property
    def status(self) -> FileStatus: ...

    @property
    def length_bytes(self) -> int: ...

    async def readinto(self, buffer: bytearray | memoryview, offset_bytes: int) -> int:
        """Fill ``buffer`` from ``offset_bytes`` on; returns the bytes read, less than asked only at end of file."""
        ...

    async def read_at(self, offset_bytes: int, length_bytes: int) -> bytes: ...

    async def aclose(self) -> None: ...

    async def __aenter__(self) -> Self: ...

    async def __aexit__(self, *exc: object) -> None: ...


