"""The error tree: one table between kinds on the wire, classes and errnos, and a sentence in every message."""

from __future__ import annotations

import errno
import inspect
import os
import pickle
import re
from typing import Any

import pytest

from curvfs import errors
from curvfs.errors import KIND_COMMON, KINDS, CurvfsError, RemoteError, from_os_error, from_reply, kind_name

#: Section 1.8 of the wire specification: kind, name, errno. "Message rule" kinds without a matching text answer EIO;
#: NotLeaderMaster is retried, so that its errno is EAGAIN where it surfaces.
_SPECIFIED = {
    1: ("IO", "EIO"),
    2: ("NotLeaderMaster", "EAGAIN"),
    3: ("Raft", "EIO"),
    4: ("Timeout", "ETIMEDOUT"),
    5: ("PBDecode", "EIO"),
    6: ("PBEncode", "EIO"),
    7: ("FileAlreadyExists", "EEXIST"),
    8: ("FileNotFound", "ENOENT"),
    9: ("InvalidFileSize", "EFBIG"),
    10: ("ParentNotDir", "ENOTDIR"),
    11: ("DirNotEmpty", "ENOTEMPTY"),
    12: ("AbnormalData", "EIO"),
    13: ("BlockIsWriting", "EIO"),
    14: ("BlockInfo", "EIO"),
    15: ("Lease", "EIO"),
    16: ("InvalidPath", "EINVAL"),
    17: ("DiskOutOfSpace", "ENOSPC"),
    18: ("InProgress", "EBUSY"),
    19: ("Unsupported", "ENOSYS"),
    20: ("Ufs", "EIO"),
    21: ("Expired", "EIO"),
    22: ("UnsupportedUfsRead", "EOPNOTSUPP"),
    23: ("JobNotFound", "EIO"),
    24: ("Pipeline", "EIO"),
    25: ("MinReplicasNotMet", "EIO"),
    26: ("IsADirectory", "EISDIR"),
    27: ("NotADirectory", "ENOTDIR"),
    28: ("InvalidArgument", "EINVAL"),
    29: ("BlockNotFound", "EIO"),
    30: ("ReadOnly", "EROFS"),
    31: ("NoAvailableWorker", "EIO"),
    32: ("NoLocalPath", "EIO"),
    33: ("TransferOverloaded", "EIO"),
    34: ("TransferStoreUnavailable", "EIO"),
    35: ("TransferAlreadyRunning", "EIO"),
    36: ("TransferTargetConflict", "EIO"),
    10000: ("Common", "EIO"),
}


def _tree() -> list[type[CurvfsError]]:
    return [item for _, item in inspect.getmembers(errors, inspect.isclass) if issubclass(item, CurvfsError)]


def test_every_kind_is_in_the_table_with_its_name_and_errno() -> None:
    assert {kind: (name, number) for kind, (name, _, number) in KINDS.items()} == {
        kind: (name, getattr(errno, text)) for kind, (name, text) in _SPECIFIED.items()
    }


@pytest.mark.parametrize("kind", [*KINDS, 37, 0, -1, 9999])
def test_a_reply_becomes_the_class_of_its_kind_and_keeps_the_servers_words(kind: int) -> None:
    name, cls, number = KINDS.get(kind, KINDS[KIND_COMMON])
    error = from_reply(kind, "strange thing", doing="Open of /a")
    assert type(error) is cls
    assert (error.kind, error.text, error.errno_) == (kind, "strange thing", number)
    assert str(error) == f"Open of /a: strange thing (Curvine error {name})"
    assert kind_name(kind) == name


def test_only_what_may_be_sent_again_unchanged_is_retryable() -> None:
    assert {cls.__name__ for cls in _tree() if cls.retryable} == {
        "TransportError",
        "ConnectFailed",
        "ConnectionLost",
        "DeadlineExceeded",
        "NotLeader",
    }


#: Texts as HEAD and v0.3.2-alpha send them (most of them captured), and what they mean.
_TEXTS = [
    (
        "[curvine-master] ERROR: Parent directory doesn't exist: /raw/q(curvine-master/src/x.rs:212)",
        "NotFound",
        "ENOENT",
    ),
    (
        "[curvine-master] ERROR: Parent path is not a directory: /a(curvine-master/src/x.rs:1)",
        "NotADirectory",
        "ENOTDIR",
    ),
    ("Path not a dir: /a/b", "NotADirectory", "ENOTDIR"),
    ("[curvine-master] ERROR: Parent /raw/zz does not exist(curvine-server/src/fs_dir.rs:355)", "NotFound", "ENOENT"),
    ("Directory does not exist: /a", "NotFound", "ENOENT"),
    ("[curvine-master] ERROR: File does not exist: /raw/nope(curvine-server/src/x.rs:508)", "NotFound", "ENOENT"),
    ("Cannot create link to directory", "InvalidRequest", "EPERM"),
    ("Cannot create link to symlink", "InvalidRequest", "EPERM"),
    ("[curvine-master] ERROR: /raw  already exists as a dir(curvine-master/src/x.rs:397)", "IsADirectory", "EISDIR"),
    ("[curvine-master] ERROR: /raw is a directory(curvine-master/src/x.rs:459)", "IsADirectory", "EISDIR"),
    ("[curvine-master] ERROR: Not a file(curvine-master/src/inode_view.rs:340)", "IsADirectory", "EISDIR"),
    ("exchange mode is not supported", "InvalidRequest", "EINVAL"),
    ("[curvine-master] ERROR: File /raw/nope not exists(curvine-master/src/x.rs:1676)", "NotFound", "ENOENT"),
    (
        "[curvine-master] ERROR: create: Path too long, limit 8000 characters(a/b.rs:1)",
        "InvalidRequest",
        "ENAMETOOLONG",
    ),
    ("[curvine-master] ERROR: Absolute path required, but got rel/x(a/b.rs:160)", "InvalidRequest", "EINVAL"),
    ("[curvine-master] ERROR: Path /raw/l/ is invalid(a/b.rs:46)", "InvalidRequest", "EINVAL"),
    ("[curvine-master] ERROR: No available worker found(a/worker_manager.rs:121)", "OutOfSpace", "ENOSPC"),
    ("No workers available", "OutOfSpace", "ENOSPC"),
    ("block 3 exceeds the storage capacity", "OutOfSpace", "ENOSPC"),
    ("Not enough space in storage dir /d", "OutOfSpace", "ENOSPC"),
    ("cannot delete mount point root /m", "InProgress", "EBUSY"),
    ("all replicas has been lost", "NoAvailableWorker", "EIO"),
    ("Lost (no worker can read)", "NoAvailableWorker", "EIO"),
    ("block status abnormal, block id 17230200832, block len 100", "RemoteError", "EIO"),
    (
        "[curvine-master] ERROR: Unsupported operation(curvine-master/src/master_handler.rs:1110)",
        "Unsupported",
        "ENOSYS",
    ),
    ("client rejected by compatibility policy: unsupported version", "RemoteError", "EPROTO"),
    ("Permission denied (os error 13)", "RemoteError", "EACCES"),
    ("open failed: os error 13", "RemoteError", "EACCES"),
    ("this is not implemented", "Unsupported", "ENOSYS"),
    ("[curvine-worker] ERROR: block 12345678901 not exists(curvine-server/src/dataset.rs:60)", "BlockNotFound", "EIO"),
]


@pytest.mark.parametrize(("text", "cls", "number"), _TEXTS)
@pytest.mark.parametrize("kind", [1, KIND_COMMON, 12345])
def test_untyped_errors_are_recognised_by_their_text(text: str, cls: str, number: str, kind: int) -> None:
    error = from_reply(kind, text)
    assert (type(error).__name__, error.errno_name) == (cls, number)
    assert error.text == text


@pytest.mark.parametrize(
    ("text", "cls"),
    [
        ("File /kv/block 7/unsupported not exists", "NotFound"),
        ("File /blocks/a not exists(worker/block_handler.rs:9)", "NotFound"),
        ("File does not exist: /permission denied/is a directory", "NotFound"),
        ("Parent /a is a directory/b does not exist", "NotFound"),
    ],
)
def test_words_in_a_path_do_not_decide(text: str, cls: str) -> None:
    assert type(from_reply(KIND_COMMON, text)).__name__ == cls


def test_a_kind_with_an_errno_of_its_own_is_not_searched() -> None:
    error = from_reply(8, "File /unsupported is a directory not found")
    assert type(error) is errors.NotFound
    assert error.errno_ == errno.ENOENT


def test_the_sentence_leaves_out_the_servers_thread_and_source_line() -> None:
    error = from_reply(
        KIND_COMMON, "[curvine-master] ERROR: Not a file(curvine-master/src/inode_view.rs:340)", doing="Read"
    )
    assert str(error) == "Read: Not a file (Curvine error Common)"
    assert str(from_reply(8, "  ")) == "FileNotFound (Curvine error FileNotFound)"


@pytest.mark.parametrize("cls", _tree(), ids=lambda cls: cls.__name__)
def test_every_class_answers_for_a_mount_and_a_command(cls: type[CurvfsError]) -> None:
    assert cls.__doc__
    assert cls.__name__.removesuffix("_") in (errors.__doc__ or "")
    assert cls.exit_code in (1, 2, 3, 4, 5)
    error = cls("What happened, to what.")
    assert error.errno_ in errno.errorcode
    assert re.fullmatch("E[A-Z0-9]+", error.errno_name)
    again = pickle.loads(pickle.dumps(cls("Elsewhere.", errno_=errno.EXDEV)))
    assert (type(again), str(again), again.errno_) == (cls, "Elsewhere.", errno.EXDEV)


def test_a_remote_error_survives_pickling_whole() -> None:
    error = pickle.loads(pickle.dumps(from_reply(8, "File /a not found", doing="Stat of /a")))
    assert (type(error), error.kind, error.text) == (errors.NotFound, 8, "File /a not found")
    assert isinstance(error, RemoteError)


def test_errors_of_this_machine_keep_their_errno() -> None:
    error = from_os_error(OSError(errno.ENOSPC, "whatever", "/f"), doing="Write to /f")
    assert (error.errno_, str(error)) == (errno.ENOSPC, "Write to /f: No space left on device")
    assert from_os_error(OSError("odd"), doing="Write").errno_ == errno.EIO


@pytest.mark.parametrize(
    ("error", "system"),
    [
        (errors.NotFound("no", kind=8, text="raw"), FileNotFoundError),
        (errors.FileExists_("taken"), FileExistsError),
        (errors.IsADirectory("dir"), IsADirectoryError),
        (errors.DeadlineExceeded("late"), TimeoutError),
        (errors.ConnectionLost("gone"), ConnectionResetError),
        (errors.ConnectFailed("none"), ConnectionRefusedError),
        (errors.InvalidRequest("not yours", errno_=errno.EPERM), PermissionError),
        (errors.OutOfSpace("full"), OSError),
        (errors.BlockNotFound("stale", errno_=errno.ESTALE), OSError),
        (errors.NotLeader("nobody leads"), OSError),
    ],
    ids=lambda value: getattr(value, "__name__", "") or type(value).__name__,
)
def test_the_os_error_that_files_raise(error: CurvfsError, system: type[OSError]) -> None:
    made: Any = errors.as_os_error(error)
    assert isinstance(made, type(error)) and isinstance(made, system) and isinstance(made, OSError)
    assert not isinstance(made, BlockingIOError)  # an io.BufferedWriter would take that for "later"
    assert (made.errno, made.errno_, str(made)) == (error.errno_, error.errno_, str(error))
    assert made.strerror == os.strerror(error.errno_)
    assert (made.exit_code, made.retryable, made.__cause__) == (error.exit_code, error.retryable, error)
    assert errors.as_os_error(made) is made
    again: Any = pickle.loads(pickle.dumps(made))
    assert type(again) is type(made) and (str(again), again.errno) == (str(made), made.errno)
    if isinstance(error, errors.RemoteError):
        assert (made.kind, made.text) == (error.kind, error.text)
