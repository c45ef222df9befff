"""The same for plain threads: every method of CurvineFileSystem, blocking, run by a trio thread of its own."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol, Self, TypeVar, TypeVarTuple

from curvfs.client.filesystem import CurvineFileSystem
from curvfs.client.records import Extent, FileStatus, FilesystemInfo, LocalExtent, Located, TtlAction
from curvfs.config import ClientConfig
from curvfs.errors import CurvfsError
from curvfs.world import Buffer, World

T = TypeVar("T")
Ts = TypeVarTuple("Ts")


class Portal(Protocol):
    """The way into the trio thread, from any plain thread."""

    def run(self, function: Callable[[*Ts], Awaitable[T]], *args: *Ts, timeout_s: float | None = None) -> T:
        """Run an async function there and wait for its result. Raises CurvfsError after fork, after close, when the
        thread died, and DeadlineExceeded after ``timeout_s``."""
        ...


class SyncFileReader(Protocol):
    @property
    def status(self) -> FileStatus: ...

    @property
    def length_bytes(self) -> int: ...

    def readinto(self, buffer: bytearray | memoryview, offset_bytes: int) -> int: ...

    def read_at(self, offset_bytes: int, length_bytes: int) -> bytes: ...

    def close(self) -> None: ...

    def __enter__(self) -> Self: ...

    def __exit__(self, *exc: object) -> None: ...


class SyncFileWriter(Protocol):
    @property
    def status(self) -> FileStatus: ...

    @property
    def position(self) -> int: ...

    @property
    def length_bytes(self) -> int: ...

    def write(self, buffer: Buffer) -> int: ...

    def write_at(self, buffer: Buffer, offset_bytes: int) -> int: ...

    def flush(self) -> None: ...

    def close(self) -> None: ...

    def abort(self) -> None: ...

    def __enter__(self) -> Self: ...

    def __exit__(self, *exc: object) -> None: ...


class SyncReadExtents(Protocol):
    @property
    def status(self) -> FileStatus: ...

    @property
    def extents(self) -> tuple[Extent, ...]: ...

    @property
    def is_local(self) -> bool: ...

    def readinto(self, buffer: bytearray | memoryview, offset_bytes: int) -> int: ...

    def close(self) -> None: ...

    def __enter__(self) -> Self: ...

    def __exit__(self, *exc: object) -> None: ...


class SyncWriteExtent(Protocol):
    @property
    def status(self) -> FileStatus: ...

    @property
    def path(self) -> str: ...

    @property
    def size_bytes(self) -> int: ...

    @property
    def local(self) -> LocalExtent | None: ...

    @property
    def remote_reason(self) -> str: ...

    def write(self, buffer: Buffer, offset_bytes: int) -> None: ...

    def commit(self) -> FileStatus: ...

    def abort(self) -> None: ...

    def __enter__(self) -> Self: ...

    def __exit__(self, *exc: object) -> None: ...


class SyncFileSystem(Protocol):
    """Blocking face of :class:`CurvineFileSystem`; callable from any number of plain threads. A context manager."""

    @property
    def portal(self) -> Portal: ...

    @property
    def filesystem(self) -> CurvineFileSystem:
        """The asynchronous one, to be used through ``portal.run``."""
        ...

    @property
    def config(self) -> ClientConfig: ...

    @property
    def world(self) -> World: ...

    @classmethod
    def connect(cls, url_or_config: str | ClientConfig, *, world: World | None = None, **overrides: Any) -> Self: ...

    def close(self) -> bool:
        """Idempotent and bounded by ``config.close_timeout_s``; False when the thread was still busy then."""
        ...

    def stats(self) -> dict[str, int]: ...

    def locate_many(self, paths: Sequence[str]) -> list[Located | CurvfsError]:
        """GetBlockLocations of all paths in one turn of the trio thread, pipelined; a path's own failure stands in its
        place."""
        ...

    def run_many(self, calls: Iterable[Callable[[], Awaitable[T]]]) -> list[T | CurvfsError]:
        """Run many async calls at once in the trio thread, in one turn; a call's own failure stands in its place."""
        ...

    def mkdir(
        self,
        path: str,
        *,
        mode: int = 0o755,
        parents: bool = False,
        xattrs: Mapping[str, bytes] | None = None,
        owner: str = "",
        group: str = "",
    ) -> FileStatus: ...

    def create(
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
    ) -> SyncFileWriter: ...

    def open(self, path: str | Located) -> SyncFileReader: ...

    def open_for_write(self, path: str, *, append: bool = False, truncate: bool = False) -> SyncFileWriter: ...

    def stat(self, path: str) -> FileStatus: ...

    def exists(self, path: str) -> bool: ...

    def list(self, path: str, *, start_after: str = "", limit: int | None = None) -> list[FileStatus]: ...

    def rename(self, src: str, dst: str, *, replace: bool = True, exchange: bool = False) -> None: ...

    def delete(self, path: str, *, recursive: bool = False) -> None: ...

    def set_attr(
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

    def symlink(self, target: str, path: str, *, owner: str = "", group: str = "") -> FileStatus: ...

    def link(self, src: str, dst: str) -> FileStatus: ...

    def truncate(self, path: str, length_bytes: int) -> FileStatus: ...

    def statfs(self) -> FilesystemInfo: ...

    def locate(self, path: str) -> Located: ...

    def open_extents(self, path: str | Located, *, direct: bool = False) -> SyncReadExtents: ...

    def create_extent(
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
    ) -> SyncWriteExtent: ...
