"""The error tree of curvfs, drawn once; every layer raises from it and no foreign error leaves us unmapped.

::

    CurvfsError
    ├── UsageError                 the caller asked for something that cannot be: exit code 2
    │   ├── ConfigError            settings contradict each other or cannot be read
    │   └── InvalidPath            a path that Curvine must not see        EINVAL
    │       └── NameTooLong        a component over 255 bytes              ENAMETOOLONG
    ├── EnvironmentError_          this machine lacks something            exit code 3
    ├── ProtocolError              somebody broke the wire protocol        EPROTO
    │   ├── LocalProtocolError     ... we did: a bug here
    │   └── RemoteProtocolError    ... the peer did, or is no such server: exit code 4
    │       └── NotAMaster         a worker's port stands where a master's must
    ├── TransportError             no answer came; retryable               exit code 4
    │   ├── ConnectFailed          nobody listens there                    ECONNREFUSED
    │   ├── ConnectionLost         closed or reset in mid-call             ECONNRESET
    │   └── DeadlineExceeded       the deadline passed                     ETIMEDOUT
    └── RemoteError                an error reply: kind, text, errno       exit code 5
        ├── NotLeader              (2) ask another master; retryable       EAGAIN
        ├── FileExists_ (7) · NotFound (8) · FileTooLarge (9) · NotADirectory (10, 27) · DirectoryNotEmpty (11)
        ├── InvalidRequest (16, 28) · OutOfSpace (17) · InProgress (18) · Unsupported (19, 22)
        ├── IsADirectory (26) · ReadOnly (30) · BlockNotFound (29) · NoAvailableWorker (31)
        └── ... every other kind is a plain RemoteError with EIO

File objects raise these same classes as OSErrors, too: see :func:`as_os_error`.

What a class stands for is one remedy, so the class answers three questions: ``errno_`` (what a mount returns),
``exit_code`` (what a command exits with) and ``retryable`` (may the same call be sent again, unchanged).

Source of kinds and errnos: sections 1.7 to 1.9 of the Curvine wire specification.
"""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Callable
from typing import Any, ClassVar


class CurvfsError(Exception):
    """Base of everything curvfs raises. ``str(error)`` is one sentence that says what happened, to what, and
    what to do; ``errno_`` is the errno a mount answers with; ``exit_code`` what a command exits with."""

    errno_: int = errno.EIO
    exit_code: ClassVar[int] = 1
    retryable: ClassVar[bool] = False

    def __init__(self, message: str, *, errno_: int | None = None) -> None:
        super().__init__(message)
        if errno_ is not None:
            self.errno_ = errno_

    @property
    def errno_name(self) -> str:
        return errno.errorcode.get(self.errno_, str(self.errno_))


class UsageError(CurvfsError):
    """The caller asked for something that cannot be."""

    errno_ = errno.EINVAL
    exit_code = 2


class ConfigError(UsageError):
    """Settings contradict each other or cannot be read."""


class InvalidPath(UsageError):
    """A path that must not reach a Curvine master (relative, NUL bytes, not UTF-8)."""


class NameTooLong(InvalidPath):
    """A path component over 255 bytes, or a path over the server's limits."""

    errno_ = errno.ENAMETOOLONG


class EnvironmentError_(CurvfsError):
    """This machine lacks something we need: a device, a permission, a program, a package."""

    errno_ = errno.ENODEV
    exit_code = 3


class ProtocolError(CurvfsError):
    """Somebody broke the wire protocol."""

    errno_ = errno.EPROTO


class LocalProtocolError(ProtocolError):
    """We tried to send what the protocol does not allow: a bug on our side."""


class RemoteProtocolError(ProtocolError):
    """The peer sent what the protocol does not allow; the connection cannot be used any further."""

    exit_code = 4


class NotAMaster(RemoteProtocolError):
    """What answers speaks Curvine's protocol, but is a worker."""


class TransportError(CurvfsError):
    """No answer came. Whether the request was executed is unknown."""

    exit_code = 4
    retryable = True


class ConnectFailed(TransportError):
    """Nobody listens there, or the host cannot be reached or resolved."""

    errno_ = errno.ECONNREFUSED


class ConnectionLost(TransportError):
    """The connection was closed or reset in mid-call."""

    errno_ = errno.ECONNRESET


class DeadlineExceeded(TransportError):
    """The deadline of the call passed."""

    errno_ = errno.ETIMEDOUT


class RemoteError(CurvfsError):
    """An error reply of a Curvine master or worker.

    ``kind`` is the number on the wire, ``text`` the server's own words.
    """

    exit_code = 5

    def __init__(self, message: str, *, kind: int = 10000, text: str | None = None, errno_: int | None = None):
        super().__init__(message, errno_=errno_)
        self.kind = kind
        self.text = message if text is None else text


class NotLeader(RemoteError):
    """This master is not the leader."""

    errno_ = errno.EAGAIN
    retryable = True


class FileExists_(RemoteError):
    """The name is taken."""

    errno_ = errno.EEXIST


class NotFound(RemoteError):
    """No such file or directory."""

    errno_ = errno.ENOENT


class FileTooLarge(RemoteError):
    """A length above 1 PiB."""

    errno_ = errno.EFBIG


class NotADirectory(RemoteError):
    """A file stands where a directory is needed."""

    errno_ = errno.ENOTDIR


class DirectoryNotEmpty(RemoteError):
    """The directory has entries."""

    errno_ = errno.ENOTEMPTY


class InvalidRequest(RemoteError):
    """The server refuses the arguments."""

    errno_ = errno.EINVAL


class OutOfSpace(RemoteError):
    """No room for the data."""

    errno_ = errno.ENOSPC


class InProgress(RemoteError):
    """The same request id is still running, or its outcome is unknown."""

    errno_ = errno.EBUSY


class Unsupported(RemoteError):
    """The server, or we, do not do this."""

    errno_ = errno.ENOSYS


class IsADirectory(RemoteError):
    """A directory stands where a file is needed."""

    errno_ = errno.EISDIR


class BlockNotFound(RemoteError):
    """The worker does not have the block (any more), or not all of it: the file was deleted, truncated or rewritten,
    or its bytes were lost."""


class ReadOnly(RemoteError):
    """The mount below the path is read-only."""

    errno_ = errno.EROFS


class NoAvailableWorker(RemoteError):
    """No replica could serve."""


#: Kinds that clients give themselves, too.
KIND_UNSUPPORTED_UFS_READ = 22
KIND_READ_ONLY = 30
KIND_COMMON = 10000

#: kind -> (name on the wire, class, errno). The one table between Curvine kinds, our classes and errnos.
KINDS: dict[int, tuple[str, type[RemoteError], int]] = {
    1: ("IO", RemoteError, errno.EIO),
    2: ("NotLeaderMaster", NotLeader, errno.EAGAIN),
    3: ("Raft", RemoteError, errno.EIO),
    4: ("Timeout", RemoteError, errno.ETIMEDOUT),
    5: ("PBDecode", RemoteError, errno.EIO),
    6: ("PBEncode", RemoteError, errno.EIO),
    7: ("FileAlreadyExists", FileExists_, errno.EEXIST),
    8: ("FileNotFound", NotFound, errno.ENOENT),
    9: ("InvalidFileSize", FileTooLarge, errno.EFBIG),
    10: ("ParentNotDir", NotADirectory, errno.ENOTDIR),
    11: ("DirNotEmpty", DirectoryNotEmpty, errno.ENOTEMPTY),
    12: ("AbnormalData", RemoteError, errno.EIO),
    13: ("BlockIsWriting", RemoteError, errno.EIO),
    14: ("BlockInfo", RemoteError, errno.EIO),
    15: ("Lease", RemoteError, errno.EIO),
    16: ("InvalidPath", InvalidRequest, errno.EINVAL),
    17: ("DiskOutOfSpace", OutOfSpace, errno.ENOSPC),
    18: ("InProgress", InProgress, errno.EBUSY),
    19: ("Unsupported", Unsupported, errno.ENOSYS),
    20: ("Ufs", RemoteError, errno.EIO),
    21: ("Expired", RemoteError, errno.EIO),
    22: ("UnsupportedUfsRead", Unsupported, errno.EOPNOTSUPP),
    23: ("JobNotFound", RemoteError, errno.EIO),
    24: ("Pipeline", RemoteError, errno.EIO),
    25: ("MinReplicasNotMet", RemoteError, errno.EIO),
    26: ("IsADirectory", IsADirectory, errno.EISDIR),
    27: ("NotADirectory", NotADirectory, errno.ENOTDIR),
    28: ("InvalidArgument", InvalidRequest, errno.EINVAL),
    29: ("BlockNotFound", BlockNotFound, errno.EIO),
    30: ("ReadOnly", ReadOnly, errno.EROFS),
    31: ("NoAvailableWorker", NoAvailableWorker, errno.EIO),
    32: ("NoLocalPath", RemoteError, errno.EIO),
    33: ("TransferOverloaded", RemoteError, errno.EIO),
    34: ("TransferStoreUnavailable", RemoteError, errno.EIO),
    35: ("TransferAlreadyRunning", RemoteError, errno.EIO),
    36: ("TransferTargetConflict", RemoteError, errno.EIO),
    KIND_COMMON: ("Common", RemoteError, errno.EIO),
}

#: Untyped errors worth recognising, in order: the first pattern found in the server's text (without the thread and
#: source line it puts around it) decides. Anchored where a path, which may hold any words, stands beside the fragment.
#: Advisory: the texts may change between versions.
_TEXT_RULES: tuple[tuple[re.Pattern[str], type[RemoteError], int], ...] = tuple(
    (re.compile(pattern, re.IGNORECASE | re.DOTALL), cls, number)
    for pattern, cls, number in (
        (r"^block \d+ not exists", BlockNotFound, errno.EIO),
        (r"^(File|Path) .* not exists", NotFound, errno.ENOENT),
        (r"^(File|Directory) does not exist", NotFound, errno.ENOENT),
        (r"^Parent directory doesn't exist", NotFound, errno.ENOENT),
        (r"^Parent .* does not exist", NotFound, errno.ENOENT),
        (r"Parent path is not a directory", NotADirectory, errno.ENOTDIR),
        (r"Path not a dir", NotADirectory, errno.ENOTDIR),
        (r"already exists as a dir", IsADirectory, errno.EISDIR),
        (r" is a directory", IsADirectory, errno.EISDIR),
        (r"^Not a file", IsADirectory, errno.EISDIR),
        (r"^Cannot create link to (?:directory|symlink)", InvalidRequest, errno.EPERM),
        (r"exchange mode is not supported", InvalidRequest, errno.EINVAL),
        (r"Path too long", InvalidRequest, errno.ENAMETOOLONG),
        (r"Absolute path required", InvalidRequest, errno.EINVAL),
        (r"^Path .* is invalid", InvalidRequest, errno.EINVAL),
        (r"No available worker", OutOfSpace, errno.ENOSPC),
        (r"No workers available", OutOfSpace, errno.ENOSPC),
        (r"storage capacity", OutOfSpace, errno.ENOSPC),
        (r"Not enough space", OutOfSpace, errno.ENOSPC),
        (r"cannot delete mount point root", InProgress, errno.EBUSY),
        (r"all replicas has been lost", NoAvailableWorker, errno.EIO),
        (r"Lost \(no worker can read\)", NoAvailableWorker, errno.EIO),
        (r"rejected by compatibility policy", RemoteError, errno.EPROTO),
        (r"permission denied|os error 13\b", RemoteError, errno.EACCES),
        (r"Unsupported operation|not implemented|unsupported", Unsupported, errno.ENOSYS),
    )
)

#: What the generic constructor puts around a text: ``[<thread>] ERROR: <text>(<file>:<line>)``.
_WRAPPED = re.compile(r"(?:\[[^]]*\] ERROR: )?(.*?)(?:\([^()\s]+\.rs:\d+\))?", re.DOTALL)


def kind_name(kind: int) -> str:
    """The wire name of an error kind, ``Common`` for kinds nobody knows."""
    return KINDS.get(kind, KINDS[KIND_COMMON])[0]


def from_reply(kind: int, text: str, *, doing: str = "") -> RemoteError:
    """The exception for an error reply. ``doing`` names the call and its object, for the sentence.

    Kinds without an errno of their own are searched for the texts of specification section 1.9.
    """
    name, cls, number = KINDS.get(kind, KINDS[KIND_COMMON])
    found = _WRAPPED.fullmatch(text.strip())
    plain = found[1] if found else text
    if cls is RemoteError and number == errno.EIO:
        for pattern, rule_cls, rule_errno in _TEXT_RULES:
            if pattern.search(plain):
                cls, number = rule_cls, rule_errno
                break
    prefix = f"{doing}: " if doing else ""
    return cls(f"{prefix}{plain or name} (Curvine error {name})", kind=kind, text=text, errno_=number)


def from_os_error(error: OSError, *, doing: str) -> CurvfsError:
    """Map an ``OSError`` of the local system at the edge where it happened."""
    reason = os.strerror(error.errno) if error.errno else str(error)
    return CurvfsError(f"{doing}: {reason}", errno_=error.errno or errno.EIO)


def as_os_error(error: CurvfsError) -> CurvfsError:
    """The same error for those who expect of a file what Python's files do: of its own class, and an OSError of the
    class that fits its errno besides (FileNotFoundError, PermissionError, TimeoutError, ...), with ``errno`` and
    ``strerror`` set. The error itself is its ``__cause__``. For file objects; elsewhere nothing raised by us is an
    OSError, so that ``except OSError`` means the local system."""
    if isinstance(error, OSError):
        return error
    system_cls = type(OSError(error.errno_, ""))
    if system_cls is BlockingIOError:  # io's buffers take that for a descriptor that is not ready, and write again
        system_cls = OSError
    made = _file_error_class(type(error), system_cls)(str(error))
    vars(made).update(vars(error))
    made.errno_ = made.errno = error.errno_  # type: ignore[attr-defined]
    made.strerror = os.strerror(error.errno_)  # type: ignore[attr-defined]
    made.__cause__ = error
    return made


_file_error_classes: dict[tuple[type[CurvfsError], type[OSError]], type[CurvfsError]] = {}


def _file_error_class(cls: type[CurvfsError], system_cls: type[OSError]) -> type[CurvfsError]:
    key = cls, system_cls
    if key not in _file_error_classes:
        namespace = {
            "__module__": cls.__module__,
            "__doc__": cls.__doc__,
            "__str__": Exception.__str__,  # our sentence, not "[Errno 2] ..."
            "__reduce__": _reduce_file_error,  # a class made here cannot be found by its name
        }
        _file_error_classes[key] = type(cls.__name__, key, namespace)
    return _file_error_classes[key]


def _reduce_file_error(error: BaseException) -> tuple[Callable[[CurvfsError], CurvfsError], tuple[Any]]:
    return as_os_error, (error.__cause__,)
