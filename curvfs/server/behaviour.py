"""What one Curvine version does differently from another, as values that the handlers read.

The server speaks as HEAD. A version that differs is another instance of :class:`Behaviour`, not a branch somewhere.
Hazards (specification section 13) are refused whatever the version; what an old version merely lacks or does in another
way is reproduced, so that clients can be tried on it.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, replace

from curvfs import __version__
from curvfs.errors import UsageError
from curvfs.server.refusals import BLOCK_NOT_FOUND, COMMON, IO, NOT_FOUND
from curvfs.units import MIB


class ReadLength(enum.Enum):
    """How long a block is to a read stream, and what its Open answers."""

    #: As long as the request says; zeros beyond the file.
    ASKED = "asked"
    #: The longer of what the request says and of the file; zeros beyond the file.
    LONGER = "longer"
    #: As long as the file, whatever the request says; nothing beyond.
    PHYSICAL = "physical"


@dataclass(frozen=True, slots=True)
class Behaviour:
    """Differences that a client can see (specification sections 8.3, 8.4 and 12)."""

    name: str
    #: What GetFilesystemInfo says of the software.
    release_version: str
    #: Fields and file types that came with v0.4: ctime, has_spdk, what workers can do; in requests inode_id,
    #: set_attr_opts, return_file_blocks, a symlink's owner, and special nodes.
    has_v04_fields: bool
    #: Fields that came after v0.4.1: compatibility, component_info, allocatable_*, what Delete freed.
    has_head_fields: bool
    #: Error kind for AddBlock and CompleteFile on a missing file.
    missing_writer_file_kind: int
    #: Rename can exchange two names.
    exchanges: bool
    #: Symlinks can have hard links.
    links_symlinks: bool
    #: The setgid bit of a directory and its group pass on to what is made in it.
    inherits_setgid: bool
    #: Unlocking a part of a lock leaves the rest.
    splits_locks: bool
    #: A block that ResizeFile makes longer always waits for its worker to hear of it.
    grown_tail_waits: bool
    #: Error kind for a block that the worker does not have.
    block_not_found_kind: int
    #: Error kind for a write beyond the block.
    write_range_kind: int
    #: Largest chunk_size that ReadBlock accepts; None accepts any.
    max_chunk_bytes: int | None
    read_length: ReadLength
    #: Complete must belong to the stream that is open on its connection. (The old Rust client opens further
    #: short-circuit streams before it completes the first.)
    binds_complete: bool
    #: Committed blocks are rewritten where they lie, and Cancel deletes them.
    rewrites_in_place: bool


HEAD = Behaviour(
    name="head",
    release_version=__version__,
    has_v04_fields=True,
    has_head_fields=True,
    missing_writer_file_kind=NOT_FOUND,
    exchanges=True,
    links_symlinks=True,
    inherits_setgid=True,
    splits_locks=True,
    grown_tail_waits=False,
    block_not_found_kind=BLOCK_NOT_FOUND,
    write_range_kind=IO,
    max_chunk_bytes=16 * MIB,
    read_length=ReadLength.ASKED,
    binds_complete=True,
    rewrites_in_place=False,
)

V0_4_1 = Behaviour(
    name="v0.4.1",
    release_version="0.4.1",
    has_v04_fields=True,
    has_head_fields=False,
    missing_writer_file_kind=COMMON,
    exchanges=True,
    links_symlinks=True,
    inherits_setgid=True,
    splits_locks=True,
    grown_tail_waits=False,
    block_not_found_kind=BLOCK_NOT_FOUND,
    write_range_kind=IO,
    max_chunk_bytes=16 * MIB,
    read_length=ReadLength.LONGER,
    binds_complete=True,
    rewrites_in_place=False,
)

V0_3_2_ALPHA = Behaviour(
    name="v0.3.2-alpha",
    release_version="0.3.2-alpha",
    has_v04_fields=False,
    has_head_fields=False,
    missing_writer_file_kind=COMMON,
    exchanges=False,
    links_symlinks=False,
    inherits_setgid=False,
    splits_locks=False,
    grown_tail_waits=True,
    block_not_found_kind=COMMON,
    write_range_kind=COMMON,
    max_chunk_bytes=None,
    read_length=ReadLength.PHYSICAL,
    binds_complete=False,
    rewrites_in_place=True,
)

#: What ``--behave-as`` takes.
BEHAVIOURS = {behaviour.name: behaviour for behaviour in (V0_3_2_ALPHA, V0_4_1, HEAD)}


def behaviour_named(name: str, *, announced: str | None = None) -> Behaviour:
    """The behaviour of a version; ``announced`` is what it says that it is instead. Raises UsageError."""
    found = BEHAVIOURS.get(name)
    if found is None:
        raise UsageError(f"{name!r} is no version that this server can behave as; choose {', '.join(BEHAVIOURS)}.")
    return found if announced is None else replace(found, release_version=announced)
