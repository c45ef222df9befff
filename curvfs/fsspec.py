"""``curvine://`` for fsspec, and so for pandas, torch, pyarrow and whatever else opens files through it.

Registered by an entry point: nothing of this is imported before somebody opens a ``curvine://`` URL with fsspec.

* URLs are those of :mod:`curvfs.config`: ``curvine://host:port,host:port/path?setting=value``; paths in them are
  percent-encoded where needed. Without a host the cluster file says which cluster.
* Files appear under their names when they are closed, whole: they are written beside, and renamed.
* Symlinks are followed, as fsspec's local file system does it.
* Errors are OSErrors of the fitting kind (FileNotFoundError, ...), and our own at the same time.
* A copy made by fork connects anew; a pickle connects where it is unpickled. An open file belongs to its process.
"""

from __future__ import annotations

import io
import os
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from typing import Any
from urllib.parse import parse_qsl, quote, unquote

from fsspec.spec import AbstractBufferedFile, AbstractFileSystem
from fsspec.utils import stringify_path

from curvfs.api import (
    FileKind,
    FileStatus,
    SyncFileReader,
    SyncFileSystem,
    SyncFileWriter,
    gather_settings,
)
from curvfs.client import paths
from curvfs.client.fileobject import as_files_raise
from curvfs.client.owners import own_names
from curvfs.client.symlinks import follow, resolve, status_or_none
from curvfs.errors import (
    ConfigError,
    CurvfsError,
    FileExists_,
    IsADirectory,
    NotADirectory,
    NotFound,
    UsageError,
    as_os_error,
)
from curvfs.units import MIB

_SCHEME = "curvine://"
_COPY_BYTES = 8 * MIB
#: What fsspec gives every file system, and this one has no use for.
_FSSPEC_OPTIONS = ("use_listings_cache", "listings_expiry_time", "max_paths", "asynchronous", "loop", "batch_size")


@contextmanager
def _as_files_raise() -> Iterator[None]:
    try:
        yield
    except CurvfsError as error:
        raise as_os_error(error) from error


class CurvineFsspec(AbstractFileSystem):  # type: ignore[misc] # fsspec has no types
    """The files of one cluster."""

    protocol = "curvine"
    root_marker = "/"

    @as_files_raise
    def __init__(
        self, masters: str | None = None, *, conf: str | None = None, auto_mkdir: bool = True, **settings: Any
    ) -> None:
        """``masters``: ``host:port,host:port``; without them, and for all else, the cluster file ``conf``, or that of
        the environment. ``auto_mkdir``: make missing directories of files that are written. ``settings``: those of a
        client, by their names in a URL. Connects when it is first used. Raises ConfigError."""
        super().__init__(**{name: settings.pop(name) for name in _FSSPEC_OPTIONS if name in settings})
        url = f"{_SCHEME}{masters}/" if masters else None
        root = settings.pop("root", "/")
        self._config = gather_settings(url, file=conf, **settings).config.with_overrides(root=root)
        self._auto_mkdir = auto_mkdir
        self._connected: SyncFileSystem | None = None
        self._pid = os.getpid()

    @property
    def client(self) -> SyncFileSystem:
        """The client beneath. Raises TransportError when no master answers."""
        if self._connected is None or self._pid != os.getpid():
            self._connected = SyncFileSystem.connect(self._config)
            self._pid = os.getpid()
        return self._connected

    @property
    def fsid(self) -> str:
        return f"curvine_{self._config.masters_text}{self._config.root}"

    # -------------------------------------------------------------------------------------------------------- paths

    @classmethod
    def _strip_protocol(cls, path: Any) -> Any:
        if isinstance(path, list):
            return [cls._strip_protocol(each) for each in path]
        path = stringify_path(path)
        if path.startswith(_SCHEME):
            location = path.removeprefix(_SCHEME).partition("?")[0]
            _, slash, below = location.partition("/")
            try:
                path = unquote(slash + below, errors="strict")
            except UnicodeDecodeError:
                raise as_os_error(ConfigError(f"{path!r} is not UTF-8; Curvine names are.")) from None
        return path.rstrip("/") or cls.root_marker

    def unstrip_protocol(self, name: str) -> str:
        if name.startswith(_SCHEME):
            return name
        return f"{_SCHEME}{self._config.masters_text}{quote(self._path(name))}"

    @staticmethod
    def _get_kwargs_from_urls(path: Any) -> dict[str, str]:
        path = stringify_path(path)
        if not path.startswith(_SCHEME):
            return {}
        location, _, query = path.removeprefix(_SCHEME).partition("?")
        masters = location.partition("/")[0]
        return ({"masters": masters} if masters else {}) | dict(parse_qsl(query, keep_blank_values=True))

    def _path(self, path: Any) -> str:
        """Absolute and normalised. What has no leading slash counts from the root."""
        stripped = self._strip_protocol(path)
        return paths.normalize(stripped if stripped.startswith("/") else f"/{stripped}")

    # ------------------------------------------------------------------------------------------------------ looking

    @as_files_raise
    def info(self, path: str, **kwargs: Any) -> dict[str, Any]:
        path = self._path(path)
        return self._info(self.client.stat(path), path)

    @as_files_raise
    def ls(self, path: str, detail: bool = True, **kwargs: Any) -> list[Any]:
        path = self._path(path)
        end, status = resolve(self.client, path)
        if status is None:
            raise NotFound(f"Cannot list {path}: there is no such file or directory.")
        if status.is_dir:
            entries = [self._info(entry, paths.join(path, f"/{entry.name}")) for entry in self.client.list(end)]
        else:
            entries = [self._info(status, path)]
        return entries if detail else [entry["name"] for entry in entries]

    def _info(self, status: FileStatus, path: str) -> dict[str, Any]:
        """Of a symlink: of what it leads to, and of itself where that is nothing."""
        link = status.symlink_target
        if link is not None:
            status = resolve(self.client, path)[1] or status
        kinds = {FileKind.DIRECTORY: "directory", FileKind.FILE: "file", FileKind.SYMLINK: "link"}
        found = {
            "name": path,
            "size": status.length_bytes,
            "type": kinds.get(status.kind, "other"),
            "mtime": status.mtime_ms / 1000,
            "mode": status.mode,
            "owner": status.owner,
            "group": status.group,
            "nlink": status.nlink,
            "ino": status.id,
            "islink": link is not None,
        }
        return found if link is None else found | {"destination": link}

    def _stat(self, path: str) -> FileStatus | None:
        return resolve(self.client, self._path(path))[1]

    @as_files_raise
    def exists(self, path: str, **kwargs: Any) -> bool:
        return self._stat(path) is not None

    @as_files_raise
    def lexists(self, path: str, **kwargs: Any) -> bool:
        return status_or_none(self.client, self._path(path)) is not None

    @as_files_raise
    def isdir(self, path: str) -> bool:
        status = self._stat(path)
        return status is not None and status.is_dir

    @as_files_raise
    def isfile(self, path: str) -> bool:
        status = self._stat(path)
        return status is not None and status.is_file

    def modified(self, path: str) -> datetime:
        return datetime.fromtimestamp(self.info(path)["mtime"], tz=UTC)

    # ----------------------------------------------------------------------------------------------------- changing

    @as_files_raise
    def mkdir(self, path: str, create_parents: bool = True, **kwargs: Any) -> None:
        """Raises FileExistsError."""
        path = self._path(path)
        if create_parents:
            self._make_parents(path)
        owner, group = own_names()
        self.client.mkdir(path, owner=owner, group=group)

    @as_files_raise
    def makedirs(self, path: str, exist_ok: bool = False) -> None:
        path = self._path(path)
        status = self._stat(path)
        if status is not None and not (exist_ok and status.is_dir):
            raise FileExists_(f"Cannot make {path}: it is there.")
        if status is None:
            owner, group = own_names()
            self.client.mkdir(path, parents=True, owner=owner, group=group)

    def _make_parents(self, path: str) -> None:
        parent = paths.parent_of(path)
        if resolve(self.client, parent)[1] is None:
            owner, group = own_names()
            self.client.mkdir(parent, parents=True, owner=owner, group=group)

    @as_files_raise
    def rmdir(self, path: str) -> None:
        path = self._path(path)
        if not self.client.stat(path).is_dir:
            raise NotADirectory(f"Cannot remove {path} as a directory: it is none.")
        self.client.delete(path)

    @as_files_raise
    def rm_file(self, path: str) -> None:
        path = self._path(path)
        if self.client.stat(path).is_dir:
            raise IsADirectory(f"Cannot remove {path} as a file: it is a directory.")
        self.client.delete(path)

    _rm = rm_file

    def rm(self, path: Any, recursive: bool = False, maxdepth: int | None = None) -> None:
        """Names with ``*``, ``?`` and ``[`` are patterns, as everywhere in fsspec. A tree goes with one call."""
        for found in reversed(self.expand_path(path, recursive=recursive and maxdepth is not None, maxdepth=maxdepth)):
            if recursive and self.isdir(found) and maxdepth is None:
                with _as_files_raise():
                    self.client.delete(self._path(found), recursive=True)
            elif recursive and maxdepth is not None and self.isdir(found):
                self.rmdir(found)
            else:
                self.rm_file(found)

    def mv(self, path1: str, path2: str, recursive: bool = False, maxdepth: int | None = None, **kwargs: Any) -> None:
        """A rename, and so atomic, where one thing is moved; else copied and removed, as fsspec does it."""
        if not isinstance(path1, str) or maxdepth is not None or not self.lexists(path1):
            super().mv(path1, path2, recursive=recursive, maxdepth=maxdepth, **kwargs)
            return
        with _as_files_raise():
            source, target = self._path(path1), self._path(path2)
            if path2.endswith("/") or self.isdir(path2):
                target = paths.join(target, f"/{paths.name_of(source)}")
            if source != target:
                if self._auto_mkdir:
                    self._make_parents(target)
                self.client.rename(source, target)

    @as_files_raise
    def cp_file(self, path1: str, path2: str, **kwargs: Any) -> None:
        source, target = self._path(path1), self._path(path2)
        if self.isdir(source):
            self.makedirs(target, exist_ok=True)
            return
        if follow(self.client, source) == follow(self.client, target):
            return
        with self.open(source) as read, self.open(target, "wb") as written:
            while piece := read.read(_COPY_BYTES):
                written.write(piece)

    @as_files_raise
    def touch(self, path: str, truncate: bool = True, **kwargs: Any) -> None:
        if truncate or not self.exists(path):
            with self.open(path, "wb"):
                return
        now_ms = self.client.world.clock.time_ms()
        self.client.set_attr(follow(self.client, self._path(path)), mtime_ms=now_ms, atime_ms=now_ms)

    # ------------------------------------------------------------------------------------------------------ content

    @as_files_raise
    def cat_file(self, path: str, start: int | None = None, end: int | None = None, **kwargs: Any) -> bytes:
        with self.client.open(follow(self.client, self._path(path))) as reader:
            first, last, _ = slice(start, end).indices(reader.length_bytes)
            return reader.read_at(first, max(0, last - first))

    @as_files_raise
    def pipe_file(self, path: str, value: Any, mode: str = "overwrite", **kwargs: Any) -> None:
        with self.open(path, "xb" if mode == "create" else "wb") as file:
            file.write(value)

    @as_files_raise
    def _open(
        self,
        path: str,
        mode: str = "rb",
        block_size: int | str | None = None,
        autocommit: bool = True,
        cache_options: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> CurvineFsspecFile:
        end, there = resolve(self.client, self._path(path))
        return CurvineFsspecFile(
            self,
            end,
            mode,
            there=there,
            block_size="default" if block_size is None else block_size,
            autocommit=autocommit,
            cache_options=cache_options,
            **kwargs,
        )


class CurvineFsspecFile(AbstractBufferedFile):  # type: ignore[misc] # fsspec has no types
    """An open file. ``rb``, ``wb``, ``xb`` (the name must be free, now and when it is closed) and ``ab``, which writes
    to the file itself and shows others every piece that is sent.

    What is written under ``with`` and ends with an error is dropped. (``with fsspec.open(...)`` hides the error from
    the file: what was written until then is published.)"""

    loc: int
    blocksize: int

    def __init__(
        self, fs: CurvineFsspec, path: str, mode: str = "rb", *, there: FileStatus | None = None, **kwargs: Any
    ) -> None:
        """``path`` without symlinks, and what is ``there``."""
        self._client = fs.client
        self._reader: SyncFileReader | None = None
        self._writer: SyncFileWriter | None = None
        self._staging = ""
        if mode == "rb":
            self._reader = self._client.open(path)
            kwargs["size"] = self._reader.length_bytes
        elif mode in ("wb", "xb", "ab"):
            self._replaced = there
            self._check_target(fs, path, mode, bool(kwargs.get("autocommit", True)))
        else:
            self.closed = True
            raise UsageError(f"Cannot open {path} with mode {mode!r}; modes are rb, wb, xb and ab.")
        super().__init__(fs, path, mode, **kwargs)
        if mode == "ab" and self._replaced is not None:
            self.loc = self._replaced.length_bytes

    def _check_target(self, fs: CurvineFsspec, path: str, mode: str, autocommit: bool) -> None:
        """Raises CurvfsError where it cannot be written to."""
        there = self._replaced
        try:
            if there is not None and there.is_dir:
                raise IsADirectory(f"Cannot write {path}: it is a directory.")
            if there is not None and mode == "xb":
                raise FileExists_(f"Cannot make {path}: the name is taken.")
            if mode == "ab" and not autocommit:
                raise UsageError(f"Cannot append to {path} in a transaction: bytes are appended at once.")
            if there is None and fs._auto_mkdir:
                fs._make_parents(path)
            elif there is None and status_or_none(self._client, paths.parent_of(path)) is None:
                raise NotFound(f"Cannot make {path}: its directory does not exist.")
        except BaseException:
            self.closed = True  # so that nobody closes what was never open
            raise

    # ------------------------------------------------------------------------------------------------------ reading

    def _fetch_range(self, start: int, end: int) -> bytes:
        if self._reader is None:
            raise io.UnsupportedOperation("not readable")
        with _as_files_raise():
            return self._reader.read_at(start, end - start)

    def readinto(self, buffer: Any) -> int:
        """Much at a time goes past the cache, straight into ``buffer``."""
        view = memoryview(buffer).cast("B")
        if self._reader is None or self.closed or len(view) < self.blocksize:
            return int(super().readinto(view))
        with _as_files_raise():
            count = self._reader.readinto(view, self.loc)
        self.loc += count
        return count

    # ------------------------------------------------------------------------------------------------------ writing

    @as_files_raise
    def _initiate_upload(self) -> None:
        owner, group = own_names()
        if self.mode == "ab" and self._replaced is not None:
            self._writer = self._client.open_for_write(self.path, append=True)
        elif self.mode == "ab":
            self._writer = self._client.create(self.path, owner=owner, group=group)
        else:
            name = f"/.{self._client.world.random.uuid()}.part"
            self._staging = paths.join(paths.parent_of(self.path), name)
            self._writer = self._client.create(self._staging, owner=owner, group=group, unique_name=True)

    @as_files_raise
    def _upload_chunk(self, final: bool = False) -> bool:
        if self._writer is None:
            raise ValueError("I/O operation on closed file")
        try:
            with self.buffer.getbuffer() as view:
                self._writer.write(view)
            if final:
                self._writer.close()
                self._writer = None
                if self.autocommit and self._staging:
                    self._publish()
        except BaseException:
            self.discard()
            raise
        return True

    def _publish(self) -> None:
        replaced = self._replaced
        if replaced is not None:
            self._client.set_attr(self._staging, mode=replaced.mode, owner=replaced.owner, group=replaced.group)
        self._client.rename(self._staging, self.path, replace=self.mode != "xb")
        self._staging = ""

    @as_files_raise
    def commit(self) -> None:
        """Give the file its name: at the end of a transaction."""
        if self._staging:
            self._publish()

    def discard(self) -> None:
        """Drop what was written. Never raises."""
        self.closed = True
        try:
            if self._writer is not None:
                self._writer.abort()
                self._writer = None
            if self._staging:
                self._client.delete(self._staging)
                self._staging = ""
        except CurvfsError:
            pass  # what is left is a staging file that nobody reads

    @as_files_raise
    def close(self) -> None:
        try:
            super().close()
        finally:
            if self._reader is not None:
                reader, self._reader = self._reader, None
                reader.close()

    def __exit__(self, kind: type[BaseException] | None, error: object, trace: object) -> None:
        if kind is not None and self.mode != "rb" and not self.closed:
            self.discard()
        self.close()
