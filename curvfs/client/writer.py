"""Writing files."""

from __future__ import annotations

from typing import Protocol, Self

from curvfs.client.records import FileStatus
from curvfs.world import Buffer


class FileWriter(Protocol):
    """A file open for writing; one task at a time. An async context manager: a clean exit closes, an error aborts."""

    @property
    def status(self) -> FileStatus:
        """As at open; ``length_bytes`` below is what grows."""
        ...

    @property
    def path(self) -> str: ...

    @property
    def position(self) -> int: ...

    @property
    def length_bytes(self) -> int: ...

    async def write(self, buffer: Buffer) -> int:
        """Write all of ``buffer`` at the position; returns its length."""
        ...

    async def write_at(self, buffer: Buffer, offset_bytes: int) -> int:
        """Write all of ``buffer`` at ``offset_bytes`` (the position moves behind it). Not in append mode."""
        ...

    async def flush(self) -> None:
        """Publish what was written so far (4.8): other clients see it, the writer stays open."""
        ...

    async def close(self, *, mtime_ms: int | None = None, atime_ms: int | None = None) -> None:
        """Publish and close; idempotent. The times given are set in the same call (4.5 set_attr_opts)."""
        ...

    async def abort(self) -> None:
        """Drop what was not published, keep what was, release the writer's name; never raises."""
        ...

    async def read_at(self, offset_bytes: int, length_bytes: int) -> bytes:
        """Bytes as written so far, published or not (publishes first where that is needed)."""
        ...

    async def truncate(self, length_bytes: int) -> None:
        """Cut or extend (4.10): publishes first, then resizes."""
        ...

    async def __aenter__(self) -> Self: ...

    async def __aexit__(self, *exc: object) -> None: ...
