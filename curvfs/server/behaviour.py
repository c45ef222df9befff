"""What one Curvine version does differently from another, as values that the handlers read.

The server speaks as HEAD. A version that differs is another instance of :class:`Behaviour`, not a branch somewhere.
"""

from __future__ import annotations

from dataclasses import dataclass

from curvfs import __version__
from curvfs.server.refusals import BLOCK_NOT_FOUND, IO, NOT_FOUND


@dataclass(frozen=True, slots=True)
class Behaviour:
    """Differences that a client can see (specification sections 8.3 and 8.4)."""

    name: str
    #: What GetFilesystemInfo says of the software.
    release_version: str
    #: Error kind for AddBlock and CompleteFile on a missing file.
    missing_writer_file_kind: int
    #: Error kind for a block that the worker does not have.
    block_not_found_kind: int
    #: Error kind for a write beyond the block and for reads outside of it.
    block_range_kind: int
    #: Largest chunk that ReadBlock accepts.
    max_chunk_bytes: int


HEAD = Behaviour(
    name="head",
    release_version=__version__,
    missing_writer_file_kind=NOT_FOUND,
    block_not_found_kind=BLOCK_NOT_FOUND,
    block_range_kind=IO,
    max_chunk_bytes=16 * 1024 * 1024,
)
