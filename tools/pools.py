"""Pools that are looked at: one that is not there is named, not made."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING
from urllib.parse import unquote, urlsplit

from curvfs.api import SyncFileSystem
from curvfs.errors import NotFound, UsageError
from curvfs.world import World

if TYPE_CHECKING:
    from kvstore.backends.base import Backend

_STAGING_EXPIRY_S = 600.0


def refuse_missing(world: World, url: str, prefix: str, fs: SyncFileSystem | None) -> None:
    """Raise UsageError where no KV prefix is. ``fs``: a client of the cluster, None for a directory."""
    if fs is None:
        found = urlsplit(url)
        if found.scheme != "file" or not found.path.startswith("/"):
            raise UsageError(f"{url!r} is no place of a pool; write curvine://host:port/path or file:///directory.")
        path = unquote(found.path) if prefix == "." else f"{unquote(found.path)}/{prefix}"
        if not world.disk.exists(path):
            raise UsageError(f"There is no KV prefix at {path}; name another URL or --prefix.")
        return
    try:
        fs.stat("/" if prefix == "." else f"/{prefix}")
    except NotFound:
        raise UsageError(f"There is no KV prefix {prefix!r} at {url}; name another URL or --prefix.") from None


@contextmanager
def looked_at(world: World, url: str, prefix: str) -> Iterator[Backend]:
    """The KV prefix of a place that has one. Raises CurvfsError."""
    from kvstore.scrub import open_pool

    if url.startswith("curvine://"):
        with SyncFileSystem.connect(url, world=world) as fs:
            refuse_missing(world, url, prefix, fs)
    else:
        refuse_missing(world, url, prefix, None)
    with open_pool(world, url, prefix, staging_expiry_s=_STAGING_EXPIRY_S) as backend:
        yield backend
