"""The file system, asynchronous."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Any, Protocol

from curvfs.client.extents import ReadExtents, WriteExtent
from curvfs.client.reader import FileReader
from curvfs.client.records import FileStatus, FilesystemInfo, Located, TtlAction
from curvfs.client.writer import FileWriter
from curvfs.config import ClientConfig
from curvfs.world import World


class CurvineFileSystem(Protocol):
    """One connected client. Every path is absolute below the URL's root directory."""

    @property
    def config(self) -> ClientConfig: ...

    @property
    def world(self) -> World: ...

    @property
    def hostname(self) -> str: ...

    @property
    def client_name(self) -> str: ...

    def stats(self) -> dict[str, int]:
        """Counters: calls, retries, bytes read and written locally and remotely, short-circuit refusals by reason."""
        ...

    async def mkdir(
        self,
        path: str,
        *,
        mode: int = 0o755,
        parents: bool = False,
        xattrs: Mapping[str, bytes] | None = None,
        owner: str = "",
        group: str = "",
    ) -> FileStatus:
        """``parents=True`` makes missing parents and accepts a directory that is there."""
        ...

    async def create(
        self,
        path: str,
        *,
        block_size_bytes: int | None = None,
        replicas: int | None = None,
        overwrite: bool = False,
        mode: int = 0o644,
        parents: bool = False,
        xattrs: Mapping[str, bytes] | None = None,
        owner: str = "",
        group: str = "",
    ) -> FileWriter: ...

    async def open(self, path: str | Located) -> FileReader: ...

    async def open_for_write(self, path: str, *, append: bool = False, truncate: bool = False) -> FileWriter: ...

    async def stat(self, path: str) -> FileStatus:
        """Does not follow a final symlink."""
        ...

    async def exists(self, path: str) -> bool: ...

    async def list(self, path: str, *, start_after: str = "", limit: int | None = None) -> list[FileStatus]:
        """Entries of a directory in byte order of their names. NotADirectory for anything else."""
        ...

    def list_iter(self, path: str, page_size: int = 1000) -> AsyncIterator[list[FileStatus]]: ...

    async def rename(self, src: str, dst: str, *, replace: bool = True, exchange: bool = False) -> None: ...

    async def delete(self, path: str, *, recursive: bool = False) -> None: ...

    async def set_attr(
        self,
        path: str,
        *,
        mode: int | None = None,
        owner: str | None = None,
        group: str | None = None,
        atime_ms: int | None = None,
        mtime_ms: int | None = None,
        ttl_ms: int | None = None,
        ttl_action: TtlAction | None = None,
        xattrs: Mapping[str, bytes] | None = None,
        remove_xattrs: Sequence[str] = (),
        recursive: bool = False,
    ) -> FileStatus: ...

    async def symlink(self, target: str, path: str, *, owner: str = "", group: str = "") -> FileStatus: ...

    async def link(self, src: str, dst: str) -> FileStatus: ...

    async def truncate(self, path: str, length_bytes: int) -> FileStatus: ...

    async def statfs(self) -> FilesystemInfo: ...

    async def locate(self, path: str) -> Located: ...

    async def locate_many(self, paths: Sequence[str]) -> list[Located | Exception]:
        """All at once, pipelined; a path's own failure (a CurvfsError) stands in its place."""
        ...

    async def open_extents(self, path: str | Located, *, direct: bool = False) -> ReadExtents: ...

    async def create_extent(
        self,
        path: str,
        size_bytes: int,
        *,
        direct: bool = False,
        mode: int = 0o600,
        parents: bool = False,
        xattrs: Mapping[str, bytes] | None = None,
        owner: str = "",
        group: str = "",
    ) -> WriteExtent:
        """A new file of one block of max(1 MiB, size rounded up to 4096). FileExists_ when the name is taken."""
        ...


def open_filesystem(
    url_or_config: str | ClientConfig, *, world: World | None = None, **overrides: Any
) -> AbstractAsyncContextManager[CurvineFileSystem]:
    """Connect, and answer the file system; leaving the block closes it."""
    raise NotImplementedError
