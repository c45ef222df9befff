"""What a call answers per key: a length, or a miss with its cause. Misses are values; they are never raised."""

from __future__ import annotations

import enum
import errno

from curvfs.errors import CurvfsError, DeadlineExceeded, TransportError
from kvstore.header import BadObject, NewerFormat


class Miss(enum.Enum):
    """Why a page was not delivered, or not stored. Always false, so ``if result:`` asks whether it worked."""

    ABSENT = "absent"
    """No such object."""
    DAMAGED = "damaged"
    """The object's own lengths or checksums do not hold."""
    FOREIGN = "foreign"
    """The object under this name says that it belongs to another identity or key."""
    NEWER = "newer"
    """A later format version wrote it."""
    COLLISION = "collision"
    """Equal key, other tokens."""
    MISMATCH = "mismatch"
    """Other tensors, dtypes, shapes, shard or codec than this store's."""
    DENIED = "denied"
    """No permission."""
    NO_SPACE = "no space"
    """No room to store it."""
    UNREACHABLE = "unreachable"
    """The store did not answer."""
    IO = "io"
    """Any other failure of the store."""
    DEADLINE = "deadline"
    """The call's time was up."""
    BUSY = "busy"
    """Too much is under way; not even tried."""
    CANCELLED = "cancelled"
    """The caller, or closing the store, gave it up."""

    def __bool__(self) -> bool:
        return False


#: Per key: bytes of payload delivered or stored, or why not.
Result = int | Miss

#: Sound objects that are not for this store, and stay where they are: a lookup need not promise them again and again.
UNFIT = frozenset({Miss.FOREIGN, Miss.NEWER, Miss.COLLISION, Miss.MISMATCH})

#: Misses that say something about a place.
WORKER_FAILURES = frozenset({Miss.IO, Miss.UNREACHABLE, Miss.DEADLINE})

#: Misses that somebody should look into; the others are how a cache works.
TROUBLE = frozenset({Miss.DAMAGED, Miss.FOREIGN, Miss.COLLISION, Miss.MISMATCH, Miss.DENIED, Miss.NO_SPACE, Miss.IO})


class Refused(CurvfsError):
    """A sound object that is not what was asked for; ``miss`` says why."""

    def __init__(self, miss: Miss, message: str) -> None:
        super().__init__(message)
        self.miss = miss


_BY_ERRNO = {
    errno.ENOENT: Miss.ABSENT,
    errno.EACCES: Miss.DENIED,
    errno.EPERM: Miss.DENIED,
    errno.EROFS: Miss.DENIED,
    errno.ENOSPC: Miss.NO_SPACE,
    errno.EDQUOT: Miss.NO_SPACE,
    errno.ETIMEDOUT: Miss.DEADLINE,
}


def miss_of(error: CurvfsError, *, storing: bool = False) -> Miss:
    """The miss that an error means; ``storing``: a name that is not there is no ordinary absence."""
    if isinstance(error, Refused):
        return error.miss
    if isinstance(error, BadObject):
        return Miss.DAMAGED
    if isinstance(error, NewerFormat):
        return Miss.NEWER
    if isinstance(error, TransportError) and not isinstance(error, DeadlineExceeded):
        return Miss.UNREACHABLE
    miss = _BY_ERRNO.get(error.errno_, Miss.IO)
    return Miss.IO if storing and miss is Miss.ABSENT else miss
