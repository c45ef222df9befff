"""Symlinks, followed by the client: masters do not (specification 4.1)."""

from __future__ import annotations

import errno

from curvfs.client import paths
from curvfs.client.records import FileKind, FileStatus
from curvfs.client.sync import SyncFileSystem
from curvfs.errors import InvalidRequest, NotADirectory, NotFound

_MAX_SYMLINKS = 40


def status_or_none(fs: SyncFileSystem, path: str) -> FileStatus | None:
    """What is at ``path``, itself; None where there is nothing, or the parent is no directory."""
    try:
        return fs.stat(path)
    except (NotFound, NotADirectory):
        return None


def follow(fs: SyncFileSystem, path: str) -> str:
    """``path`` with all symlinks resolved, as a kernel does it; what does not exist stays as it is. An absolute symlink
    counts from the root that ``fs`` has. Raises InvalidRequest (ELOOP)."""
    return resolve(fs, path)[0]


def resolve(fs: SyncFileSystem, path: str) -> tuple[str, FileStatus | None]:
    """The same, and what is there: never a symlink."""
    status = status_or_none(fs, path)
    if status is not None and status.kind is not FileKind.SYMLINK:
        return path, status
    if status is None and (above := status_or_none(fs, paths.parent_of(path))) is not None and above.is_dir:
        return path, None  # no symlink stands on the way, since a master went it
    done = "/"
    left = [part for part in path.split("/") if part]
    links = 0
    while left:
        part = left.pop(0)
        if part == "..":
            done = paths.parent_of(done)
            continue
        here = paths.join(done, f"/{part}")
        status = status_or_none(fs, here)
        if status is None:
            return paths.normalize("/".join([here, *left])), None
        if status.kind is FileKind.SYMLINK and status.symlink_target is not None:
            links += 1
            if links > _MAX_SYMLINKS:
                raise InvalidRequest(f"Cannot follow {path}: too many symlinks.", errno_=errno.ELOOP)
            if status.symlink_target.startswith("/"):
                done = "/"
            left = [name for name in status.symlink_target.split("/") if name not in ("", ".")] + left
            continue
        done = here
    return done, status_or_none(fs, done)
