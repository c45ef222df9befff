"""Block descriptors lent to callers that move the bytes themselves."""

from __future__ import annotations

from typing import Protocol, Self

from curvfs.client.records import Extent, FileStatus, LocalExtent
from curvfs.world import Buffer


class ReadExtents(Protocol):
    """A file open for reading by extents: local ones as descriptors, the rest through :meth:`readinto`."""

    @property
    def status(self) -> FileStatus: ...

    @property
    def extents(self) -> tuple[Extent, ...]:
        """In file order, without gaps, covering [0, length)."""
        ...

    @property
    def is_local(self) -> bool:
        """Every extent is a :class:`LocalExtent`."""
        ...

    async def readinto(self, buffer: bytearray | memoryview, offset_bytes: int) -> int:
        """Read any range of the file, local or not; the bytes read, less than asked only at end of file."""
        ...

    async def aclose(self) -> None:
        """Close the descriptors; idempotent, never raises."""
        ...

    async def __aenter__(self) -> Self: ...

    async def __aexit__(self, *exc: object) -> None: ...


class WriteExtent(Protocol):
    """A new file of exactly one block, written by the caller through a descriptor, or here when it is remote."""

    @property
    def status(self) -> FileStatus: ...

    @property
    def path(self) -> str: ...

    @property
    def size_bytes(self) -> int: ...

    @property
    def local(self) -> LocalExtent | None:
        """The verified block file, open for reading and writing, or None: then use :meth:`write`. After commit the
        name of the block file is gone, the descriptor stays valid until commit or abort closes it."""
        ...

    @property
    def remote_reason(self) -> str:
        """Why ``local`` is None; empty when it is not."""
        ...

    async def write(self, buffer: Buffer, offset_bytes: int) -> None:
        """The remote case: send all of ``buffer``. The whole of [0, size) must be written before commit."""
        ...

    async def commit(self) -> FileStatus:
        """Complete the block and the file; the descriptor is closed. Raises when not every byte is there."""
        ...

    async def abort(self) -> None:
        """Cancel the block and delete the file; idempotent, never raises."""
        ...

    async def __aenter__(self) -> Self: ...

    async def __aexit__(self, *exc: object) -> None:
        """Aborts unless committed."""
        ...
