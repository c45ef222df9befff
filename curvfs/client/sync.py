"""The same for plain threads: every method of CurvineFileSystem, blocking, run by a trio thread of its own."""

from __future__ import annotations

import builtins
import weakref
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, Self, TypeVar, TypeVarTuple

import trio

from curvfs.client.extents import ReadExtents, WriteExtent
from curvfs.client.fileobject import FileObject, as_files_raise
from curvfs.client.filesystem import CurvineFileSystem, open_filesystem
from curvfs.client.locks import RENEW_S, HeldLock
from curvfs.client.placement import Placement
from curvfs.client.portal import Portal as _Portal
from curvfs.client.reader import FileReader
from curvfs.client.records import (
    DEFAULT_POLICY,
    Extent,
    FileKind,
    FileLock,
    FileStatus,
    FilesystemInfo,
    Freed,
    LocalExtent,
    Located,
    MountPoint,
    NewExtent,
    NewFile,
    StoragePolicy,
    TtlAction,
    WorkerAddress,
)
from curvfs.client.syncstores import SyncUnderStores
from curvfs.client.writer import FileWriter
from curvfs.config import ClientConfig, resolve_config
from curvfs.errors import CurvfsError, InvalidRequest, NotFound, UsageError
from curvfs.world import Buffer, World

T = TypeVar("T")
Ts = TypeVarTuple("Ts")

#: The way into the trio thread of a SyncFileSystem: ``portal.run(async_function, *args)``.
Portal = _Portal[CurvineFileSystem]


class SyncFileReader:
    """:class:`~curvfs.client.reader.FileReader`, blocking. A context manager; forgotten, it closes itself."""

    def __init__(self, client: SyncFileSystem, reader: FileReader) -> None:
        self._client = client  # keeps it open
        self._reader = reader

    @property
    def status(self) -> FileStatus:
        return self._reader.status

    @property
    def length_bytes(self) -> int:
        return self._reader.length_bytes

    def readinto(self, buffer: bytearray | memoryview, offset_bytes: int) -> int:
        return self._client.portal.run(self._reader.readinto, buffer, offset_bytes)

    def read_at(self, offset_bytes: int, length_bytes: int) -> bytes:
        return self._client.portal.run(self._reader.read_at, offset_bytes, length_bytes)

    def close(self) -> None:
        """Idempotent; raises UsageError in a forked child, and nothing else."""
        try:
            self._client.portal.run(self._reader.aclose)
        except UsageError:
            raise
        except CurvfsError:
            self._reader.close_local()  # the client is closed, and its streams with it

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def __del__(self) -> None:
        if not self._reader.idle and not self._client.portal.post(self._reader.aclose):
            self._reader.close_local()


class SyncFileWriter:
    """:class:`~curvfs.client.writer.FileWriter`, blocking. A context manager: a clean exit closes, an error aborts.
    Forgotten, it is aborted, too."""

    def __init__(self, client: SyncFileSystem, writer: FileWriter) -> None:
        self._client = client  # keeps it open
        self._writer = writer

    @property
    def status(self) -> FileStatus:
        return self._writer.status

    @property
    def path(self) -> str:
        return self._writer.path

    @property
    def position(self) -> int:
        return self._writer.position

    @property
    def length_bytes(self) -> int:
        return self._writer.length_bytes

    def write(self, buffer: Buffer) -> int:
        return self._client.portal.run(self._writer.write, buffer)

    def write_at(self, buffer: Buffer, offset_bytes: int) -> int:
        return self._client.portal.run(self._writer.write_at, buffer, offset_bytes)

    def read_at(self, offset_bytes: int, length_bytes: int) -> bytes:
        return self._client.portal.run(self._writer.read_at, offset_bytes, length_bytes)

    def allocate(self, end_bytes: int) -> None:
        self._client.portal.run(self._writer.allocate, end_bytes)

    def truncate(self, length_bytes: int) -> None:
        self._client.portal.run(self._writer.truncate, length_bytes)

    def flush(self) -> None:
        self._client.portal.run(self._writer.flush)

    def close(self, *, mtime_ms: int | None = None, atime_ms: int | None = None) -> None:
        self._client.portal.run(partial(self._writer.close, mtime_ms=mtime_ms, atime_ms=atime_ms))

    def abort(self) -> None:
        self._client.portal.run(self._writer.abort)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: object, traceback: object) -> None:
        self._client.portal.run(self._writer.__aexit__, kind, error, traceback)

    def __del__(self) -> None:
        if not self._writer.closed:
            self._client.portal.post(self._writer.abort)


class SyncReadExtents:
    """:class:`~curvfs.client.extents.ReadExtents`, blocking where it calls. A context manager."""

    def __init__(self, client: SyncFileSystem, extents: ReadExtents) -> None:
        self._client = client  # keeps it open
        self._extents = extents

    @property
    def status(self) -> FileStatus:
        return self._extents.status

    @property
    def length_bytes(self) -> int:
        return self._extents.length_bytes

    @property
    def extents(self) -> tuple[Extent, ...]:
        return self._extents.extents

    @property
    def is_local(self) -> bool:
        return self._extents.is_local

    def readinto(self, buffer: bytearray | memoryview, offset_bytes: int) -> int:
        return self._client.portal.run(self._extents.readinto, buffer, offset_bytes)

    def close(self) -> None:
        """Close the descriptors; idempotent, never raises. No turn of the trio thread where all was local."""
        self._extents.close_descriptors()
        if not self._extents.closed:
            try:
                self._client.portal.run(self._extents.aclose)
            except CurvfsError:
                pass  # the client is closed, and its streams with it

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


class SyncWriteExtent:
    """:class:`~curvfs.client.extents.WriteExtent`, blocking where it calls. A context manager: leaving it aborts what
    was not committed."""

    def __init__(self, client: SyncFileSystem, extent: WriteExtent) -> None:
        self._client = client  # keeps it open
        self._extent = extent

    @property
    def status(self) -> FileStatus:
        return self._extent.status

    @property
    def path(self) -> str:
        return self._extent.path

    @property
    def size_bytes(self) -> int:
        return self._extent.size_bytes

    @property
    def workers(self) -> tuple[WorkerAddress, ...]:
        return self._extent.workers

    @property
    def local(self) -> LocalExtent | None:
        return self._extent.local

    @property
    def remote_reason(self) -> str:
        return self._extent.remote_reason

    @property
    def asynchronous(self) -> WriteExtent:
        """What this wraps, to be used through ``portal.run``."""
        return self._extent

    def write(self, buffer: Buffer, offset_bytes: int) -> None:
        self._client.portal.run(self._extent.write, buffer, offset_bytes)

    def commit(self) -> FileStatus:
        return self._client.portal.run(self._extent.commit)

    def abort(self) -> None:
        """Cancel the block and delete the file; idempotent, never raises. Nobody may be writing any more."""
        try:
            self._client.portal.run(self._extent.abort)
        except CurvfsError:
            self._extent.close_descriptor()  # the client is closed; what was begun stays behind unfinished

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.abort()


class SyncFileSystem:
    """Blocking face of :class:`CurvineFileSystem`, for any number of plain threads. A context manager.

    Made by :meth:`connect`. It has a daemon trio thread; :attr:`portal` runs other async code there. After ``fork`` it
    refuses to work in the child (UsageError). It closes itself when it is forgotten or the interpreter ends.
    """

    def __init__(self, portal: Portal, config: ClientConfig, world: World) -> None:
        self._portal = portal
        self._config = config
        self._world = world
        # Forgotten, or open when the interpreter ends: closed all the same.
        self._finalizer = weakref.finalize(self, portal.close, 2 * config.close_timeout_s)

    @classmethod
    def connect(cls, url_or_config: str | ClientConfig, *, world: World | None = None, **overrides: Any) -> Self:
        """Connect as :func:`open_filesystem` does, which see for what it takes and raises."""
        config = resolve_config(url_or_config, **overrides)
        world = World.real() if world is None else world
        portal = Portal(partial(open_filesystem, config, world=world), world, name="curvfs-client")
        return cls(portal, config, world)

    @property
    def portal(self) -> Portal:
        return self._portal

    @property
    def filesystem(self) -> CurvineFileSystem:
        """The asynchronous file system, to be used through ``portal.run``."""
        return self._portal.resource

    @property
    def config(self) -> ClientConfig:
        return self._config

    @property
    def world(self) -> World:
        return self._world

    @property
    def hostname(self) -> str:
        return self.filesystem.hostname

    @property
    def placement(self) -> Placement:
        return self.filesystem.placement

    @property
    def client_name(self) -> str:
        return self.filesystem.client_name

    def close(self) -> bool:
        """Cancel what runs, close the connections and end the thread; idempotent, bounded by twice
        ``config.close_timeout_s``. False when the thread was still busy then. Does nothing in a forked child."""
        self._finalizer.detach()
        return self._portal.close(2 * self._config.close_timeout_s)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def stats(self) -> dict[str, int]:
        return self.filesystem.stats()

    @property
    def under_stores(self) -> SyncUnderStores:
        return SyncUnderStores(self)

    # --------------------------------------------------------------------------------------------------- many at once

    def locate_many(self, names: Sequence[str]) -> builtins.list[Located | CurvfsError]:
        """GetBlockLocations of all paths in one turn of the trio thread, pipelined: a few round trips. A path's own
        failure stands in its place."""
        return self._portal.run(self.filesystem.locate_many, names)

    def open_extents_many(
        self, files: Sequence[str | Located], *, direct: bool = False
    ) -> builtins.list[SyncReadExtents | CurvfsError]:
        """:meth:`open_extents` of many files in one turn of the trio thread, one round trip to each worker."""
        opened = self._portal.run(partial(self.filesystem.open_extents_many, files, direct=direct))
        return [extents if isinstance(extents, CurvfsError) else SyncReadExtents(self, extents) for extents in opened]

    def create_extents_many(
        self,
        files: Sequence[NewExtent],
        *,
        direct: bool = False,
        mode: int = 0o600,
        owner: str = "",
        group: str = "",
        policy: StoragePolicy | None = None,
        unique_names: bool = True,
        on_worker: int | None = None,
        worker_timeout_s: float | None = None,
    ) -> builtins.list[SyncWriteExtent | CurvfsError]:
        """:meth:`create_extent` of many files in one turn of the trio thread, two calls to the master for all."""
        made = self._portal.run(
            partial(
                self.filesystem.create_extents_many,
                files,
                direct=direct,
                mode=mode,
                owner=owner,
                group=group,
                policy=policy,
                unique_names=unique_names,
                on_worker=on_worker,
                worker_timeout_s=worker_timeout_s,
            )
        )
        return [extent if isinstance(extent, CurvfsError) else SyncWriteExtent(self, extent) for extent in made]

    def commit_extents_many(self, extents: Sequence[SyncWriteExtent]) -> builtins.list[FileStatus | CurvfsError]:
        """:meth:`SyncWriteExtent.commit` of many in one turn of the trio thread, with one call to the master."""
        return self._portal.run(self.filesystem.commit_extents_many, [extent.asynchronous for extent in extents])

    def write_files(
        self,
        files: Sequence[NewFile],
        *,
        mode: int = 0o644,
        owner: str = "",
        group: str = "",
        policy: StoragePolicy | None = None,
        unique_names: bool = False,
    ) -> builtins.list[FileStatus | CurvfsError]:
        """Many small files whole: a few calls for all of them."""
        return self._portal.run(
            partial(
                self.filesystem.write_files,
                files,
                mode=mode,
                owner=owner,
                group=group,
                policy=policy,
                unique_names=unique_names,
            )
        )

    def run_many(self, calls: Iterable[Callable[[], Awaitable[T]]]) -> builtins.list[T | CurvfsError]:
        """Run many async calls at once in the trio thread, in one turn; a call's own failure stands in its place."""
        return self._portal.run(_run_many, list(calls))

    # ------------------------------------------------------------------------------------------------------ one by one

    def mkdir(
        self,
        path: str,
        *,
        mode: int = 0o755,
        parents: bool = False,
        xattrs: Mapping[str, bytes] | None = None,
        owner: str = "",
        group: str = "",
        policy: StoragePolicy = DEFAULT_POLICY,
    ) -> FileStatus:
        return self._portal.run(
            partial(
                self.filesystem.mkdir,
                path,
                mode=mode,
                parents=parents,
                xattrs=xattrs,
                owner=owner,
                group=group,
                policy=policy,
            )
        )

    def mknod(
        self, path: str, kind: FileKind, mode: int = 0o644, rdev: int = 0, *, owner: str = "", group: str = ""
    ) -> FileStatus:
        return self._portal.run(partial(self.filesystem.mknod, path, kind, mode, rdev, owner=owner, group=group))

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
        policy: StoragePolicy | None = None,
        unique_name: bool = False,
    ) -> SyncFileWriter:
        writer = self._portal.run(
            partial(
                self.filesystem.create,
                path,
                block_size_bytes=block_size_bytes,
                replicas=replicas,
                overwrite=overwrite,
                mode=mode,
                parents=parents,
                xattrs=xattrs,
                owner=owner,
                group=group,
                policy=policy,
                unique_name=unique_name,
            )
        )
        return SyncFileWriter(self, writer)

    def open(self, path: str | Located) -> SyncFileReader:
        return SyncFileReader(self, self._portal.run(self.filesystem.open, path))

    @as_files_raise
    def open_file(self, path: str, mode: str = "rb") -> FileObject:
        """A Python file object, raw and binary, with the modes of Python's ``open``: ``rb`` reads, ``r+b`` changes what
        is there, ``wb`` makes or empties, ``xb`` makes, ``ab`` makes and appends, and with a ``+`` these read, too.
        Wrap it in ``io.BufferedReader`` or ``io.TextIOWrapper`` where small pieces are read. What it raises, and what
        this raises, are OSErrors besides: a missing file is a NotFound and a FileNotFoundError."""
        letters = "".join(sorted(mode))
        if letters == "br":
            return FileObject(self.open(path), None, path, "rb")
        kinds = {"+br": "r", "bw": "w", "+bw": "w", "bx": "x", "+bx": "x", "ab": "a", "+ab": "a"}
        kind = kinds.get(letters)
        if kind is None:
            raise UsageError(
                f"Cannot open {path} with mode {mode!r}; modes are rb, wb, xb and ab, and with a + behind them what "
                "reads and writes."
            )
        shown = f"{kind}b{'+' if '+' in mode else ''}"
        if kind == "r":
            return FileObject(None, self.open_for_write(path), path, shown)
        if kind == "a":
            try:
                return FileObject(None, self.open_for_write(path, append=True), path, shown)
            except NotFound:
                pass
        return FileObject(None, self.create(path, overwrite=kind == "w"), path, shown)

    def open_for_write(self, path: str, *, append: bool = False, truncate: bool = False) -> SyncFileWriter:
        writer = self._portal.run(partial(self.filesystem.open_for_write, path, append=append, truncate=truncate))
        return SyncFileWriter(self, writer)

    def stat(self, path: str) -> FileStatus:
        return self._portal.run(self.filesystem.stat, path)

    def exists(self, path: str) -> bool:
        return self._portal.run(self.filesystem.exists, path)

    def list(self, path: str, *, start_after: str = "", limit: int | None = None) -> builtins.list[FileStatus]:
        return self._portal.run(partial(self.filesystem.list, path, start_after=start_after, limit=limit))

    def list_iter(
        self, path: str, page_size: int = 1000, *, start_after: str = ""
    ) -> Iterator[builtins.list[FileStatus]]:
        """Pages of a listing, each fetched when it is asked for."""
        if page_size <= 0:
            raise InvalidRequest(f"Cannot list {path} in pages of {page_size} entries.")
        while True:
            page = self.list(path, start_after=start_after, limit=page_size)
            if page:
                yield page
            if len(page) < page_size:
                return
            start_after = page[-1].name

    def rename(self, src: str, dst: str, *, replace: bool = True, exchange: bool = False) -> None:
        self._portal.run(partial(self.filesystem.rename, src, dst, replace=replace, exchange=exchange))

    def publish(self, status: FileStatus, dst: str) -> None:
        self._portal.run(self.filesystem.publish, status, dst)

    def delete(self, path: str, *, recursive: bool = False) -> bool:
        return self._portal.run(partial(self.filesystem.delete, path, recursive=recursive))

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
    ) -> FileStatus:
        return self._portal.run(
            partial(
                self.filesystem.set_attr,
                path,
                mode=mode,
                owner=owner,
                group=group,
                atime_ms=atime_ms,
                mtime_ms=mtime_ms,
                ttl_ms=ttl_ms,
                ttl_action=ttl_action,
                xattrs=xattrs,
                remove_xattrs=remove_xattrs,
                recursive=recursive,
            )
        )

    def symlink(self, target: str, path: str, *, owner: str = "", group: str = "") -> FileStatus:
        return self._portal.run(partial(self.filesystem.symlink, target, path, owner=owner, group=group))

    def link(self, src: str, dst: str) -> FileStatus:
        return self._portal.run(self.filesystem.link, src, dst)

    def truncate(self, path: str, length_bytes: int) -> FileStatus:
        return self._portal.run(self.filesystem.truncate, path, length_bytes)

    def fallocate(self, path: str, offset_bytes: int, length_bytes: int) -> FileStatus:
        return self._portal.run(self.filesystem.fallocate, path, offset_bytes, length_bytes)

    def free(self, path: str, *, recursive: bool = False) -> Freed:
        return self._portal.run(partial(self.filesystem.free, path, recursive=recursive))

    def get_lock(self, path: str, lock: FileLock) -> FileLock | None:
        return self._portal.run(self.filesystem.get_lock, path, lock)

    def set_lock(self, path: str, lock: FileLock) -> FileLock | None:
        return self._portal.run(self.filesystem.set_lock, path, lock)

    @contextmanager
    def hold_lock(
        self, path: str, lock: FileLock, *, wait_s: float = 0.0, renew_s: float = RENEW_S
    ) -> Iterator[HeldLock]:
        async def take() -> HeldLock:
            return await self.filesystem.hold_lock(path, lock, wait_s=wait_s, renew_s=renew_s).__aenter__()

        held = self._portal.run(take)
        try:
            yield held
        finally:
            self._portal.run(held.__aexit__, None, None, None)

    def statfs(self) -> FilesystemInfo:
        return self._portal.run(self.filesystem.statfs)

    def mount_table(self) -> tuple[MountPoint, ...]:
        return self._portal.run(self.filesystem.mount_table)

    def locate(self, path: str) -> Located:
        return self._portal.run(self.filesystem.locate, path)

    def open_extents(self, path: str | Located, *, direct: bool = False) -> SyncReadExtents:
        extents = self._portal.run(partial(self.filesystem.open_extents, path, direct=direct))
        return SyncReadExtents(self, extents)

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
        policy: StoragePolicy | None = None,
        unique_name: bool = True,
    ) -> SyncWriteExtent:
        extent = self._portal.run(
            partial(
                self.filesystem.create_extent,
                path,
                size_bytes,
                direct=direct,
                mode=mode,
                parents=parents,
                xattrs=xattrs,
                owner=owner,
                group=group,
                policy=policy,
                unique_name=unique_name,
            )
        )
        return SyncWriteExtent(self, extent)


async def _run_many(calls: Sequence[Callable[[], Awaitable[T]]]) -> builtins.list[T | CurvfsError]:
    results: builtins.list[Any] = [None] * len(calls)

    async def one(index: int, call: Callable[[], Awaitable[T]]) -> None:
        try:
            results[index] = await call()
        except CurvfsError as error:
            results[index] = error

    async with trio.open_nursery() as nursery:
        for index, call in enumerate(calls):
            nursery.start_soon(one, index, call)
    return results
