"""Objects in a Curvine namespace, without FUSE in the way.

Local blocks are written and read through the descriptors that the client lends (short circuit), by our own I/O
threads; blocks on other hosts go through the client's block streams. An object is one file of one block.
"""

from __future__ import annotations

from collections.abc import Sequence

from curvfs.api import LocalExtent, Located, SyncFileSystem, SyncReadExtents, SyncWriteExtent
from curvfs.errors import CurvfsError, EnvironmentError_, FileExists_, NotFound, OutOfSpace, from_os_error
from curvfs.world import World
from kvstore.backends.base import (
    Backend,
    Direct,
    Found,
    Mode,
    ObjectReader,
    ObjectWriter,
    alignment_of,
    settle_mode,
)
from kvstore.backends.staging import Entry, Staging
from kvstore.engine.base import Engine, OpenFile
from kvstore.header import ALIGNMENT_BYTES
from kvstore.slabs import Slab

_DIRECTORY_MODE = 0o700
_FILE_MODE = 0o600
#: Directories remembered: all that one namespace fans out over.
_DIRECTORIES_KEPT = 1 << 16
#: Marks the directory below which the rules for KV objects hold.
_PREFIX_XATTR = "curvfs.kv"
#: ``<parent directory id>/<name>`` of the place a file was created at: at any other place it is sealed.
_BORN_XATTR = "curvfs.born"


class CurvineBackend(Backend):
    """The KV prefix ``<URL's path>/<prefix>``, marked as one. Raises ConfigError, TransportError, EnvironmentError_."""

    name = "curvine"
    locates = True

    def __init__(
        self, world: World, engine: Engine, url: str, *, prefix: str, direct: Direct, staging_expiry_s: float
    ) -> None:
        self._disk = world.disk
        self._engine = engine
        self._where = url.partition("?")[0]
        self._prefix = "" if prefix == "." else f"/{prefix}"
        #: Directories that we made or found; a rename into one spares asking.
        self._directories: set[str] = set()
        self._fs = SyncFileSystem.connect(url, world=world)
        try:
            self._mark_prefix()
            self._staging = Staging(
                world, _CurvineStaging(self._fs), f"{self._prefix}/.staging", expiry_s=staging_expiry_s
            )
            self._staging.open()
            try:
                self.mode = self._probe(direct)
            except BaseException:
                self._staging.close()
                raise
        except BaseException:
            self._fs.close()
            raise

    def _mark_prefix(self) -> None:
        path = self._prefix or "/"
        try:
            status = self._fs.stat(path)
        except NotFound:
            status = self._fs.mkdir(path, mode=_DIRECTORY_MODE, parents=True)
        if not status.is_dir:
            raise EnvironmentError_(f"{self._where}{self._prefix} is not a directory; name another KV prefix.")
        if _PREFIX_XATTR not in status.xattrs:
            self._fs.set_attr(path, xattrs={_PREFIX_XATTR: b"1"})

    def _probe(self, wanted: Direct) -> Mode:
        """Try a block: local or remote, direct or not. A pool without room keeps its objects readable."""
        if wanted is False:
            return settle_mode(self._where, wanted, None, "")
        path = f"{self._staging.directory}/{self._staging.new_name()}"
        try:
            extent = self._fs.create_extent(path, ALIGNMENT_BYTES, direct=True, mode=_FILE_MODE)
        except OutOfSpace as error:
            return self._indirect(wanted, f"the pool has no room to try it: {error}")
        try:
            local = extent.local
            if local is None:
                return self._indirect(wanted, f"blocks are remote: {extent.remote_reason}")
            alignment = alignment_of(self._disk.direct_io(local.fd)) if local.direct else None
            if alignment is None:
                return settle_mode(self._where, wanted, None, "the file system of the blocks refuses it")
            block = Slab(ALIGNMENT_BYTES)
            try:
                self._engine.write(OpenFile(local.fd, path, alignment), block.view)
            except OSError as error:
                return settle_mode(self._where, wanted, None, f"a direct write failed: {error.strerror}")
            return Mode(True, alignment)
        finally:
            extent.abort()

    def _indirect(self, wanted: Direct, reason: str) -> Mode:
        """No direct I/O here, which is as it should be unless it is required."""
        return settle_mode(self._where, wanted, None, reason) if wanted == "required" else Mode(False, 1, reason)

    def _path(self, name: str) -> str:
        return f"{self._prefix}/{name}"

    def confirm(self, names: Sequence[str]) -> list[Found | CurvfsError | None]:
        answers: list[Found | CurvfsError | None] = []
        for answer in self._fs.locate_many([self._path(name) for name in names]):
            if isinstance(answer, Located):
                status = answer.status
                answers.append(Found(status.length_bytes, answer) if status.is_file else Found(-1))
            else:
                answers.append(None if isinstance(answer, NotFound) else answer)
        return answers

    def open(self, name: str, found: Found | None = None) -> ObjectReader:
        located = found.located if found is not None and isinstance(found.located, Located) else None
        extents = self._fs.open_extents(self._path(name) if located is None else located, direct=self.mode.direct)
        return _CurvineReader(self, extents)

    def create(self, name: str, size_bytes: int) -> ObjectWriter:
        staged_name = self._staging.new_name()
        try:
            extent = self._create(staged_name, size_bytes)
        except NotFound:  # swept between two signs of life
            self._staging.open()
            extent = self._create(staged_name, size_bytes)
        return _CurvineWriter(self, extent, name)

    def _create(self, staged_name: str, size_bytes: int) -> SyncWriteExtent:
        return self._fs.create_extent(
            f"{self._staging.directory}/{staged_name}",
            size_bytes,
            direct=self.mode.direct,
            mode=_FILE_MODE,
            xattrs={_BORN_XATTR: f"{self._staging.directory_id}/{staged_name}".encode()},
        )

    def publish(self, staged: str, name: str) -> bool:
        target = self._path(name)
        try:
            known = self._make_directory_of(target)
            try:
                self._fs.rename(staged, target, replace=False)
            except NotFound:
                if not known:
                    raise
                self._directories.clear()  # somebody removed it
                self._make_directory_of(target)
                self._fs.rename(staged, target, replace=False)
        except FileExists_:
            self._remove_quietly(staged)
            return False
        except NotFound:
            # The staged file is gone. A rename that was repeated after its answer was lost has done its work.
            if not isinstance(self.confirm([name])[0], Found):
                raise
        return True

    def _make_directory_of(self, target: str) -> bool:
        """Make an object's directory; True when that was done before and is taken to hold."""
        directory = target.rpartition("/")[0]
        if directory in self._directories:
            return True
        self._fs.mkdir(directory, mode=_DIRECTORY_MODE, parents=True)
        if len(self._directories) >= _DIRECTORIES_KEPT:
            self._directories.clear()
        self._directories.add(directory)
        return False

    def _remove_quietly(self, path: str) -> None:
        try:
            self._fs.delete(path)
        except CurvfsError:
            pass

    def delete(self, name: str) -> bool:
        try:
            self._fs.delete(self._path(name))
        except NotFound:
            return False
        return True

    def sweep(self) -> int:
        return self._staging.sweep()

    def close(self) -> None:
        self._staging.close()
        self._fs.close()

    def local_file(self, local: LocalExtent | None, path: str) -> OpenFile | None:
        """A lent descriptor, with the alignment that its own file system asks for. Counts what belies the mode."""
        if self.mode.direct and not (local is not None and local.direct):
            self.fallbacks += 1
        if local is None:
            return None
        alignment = (alignment_of(self._disk.direct_io(local.fd)) or ALIGNMENT_BYTES) if local.direct else 1
        return OpenFile(local.fd, path, alignment)


class _CurvineReader(ObjectReader):
    def __init__(self, backend: CurvineBackend, extents: SyncReadExtents) -> None:
        self._backend = backend
        self._extents = extents
        self.length_bytes = extents.status.length_bytes

    def read(self, view: memoryview) -> int:
        extents = self._extents.extents
        local = extents[0] if len(extents) == 1 and isinstance(extents[0], LocalExtent) else None
        file = self._backend.local_file(local, self._extents.status.path)
        if file is None:
            return self._extents.readinto(view, 0)
        try:
            return self._backend._engine.read(file, view)
        except OSError as error:
            raise from_os_error(error, doing=f"Reading {file.path}") from error

    def close(self) -> None:
        self._extents.close()


class _CurvineWriter(ObjectWriter):
    def __init__(self, backend: CurvineBackend, extent: SyncWriteExtent, name: str) -> None:
        self._backend = backend
        self._extent = extent
        self._name = name
        self._committed = False

    def write(self, view: memoryview) -> None:
        file = self._backend.local_file(self._extent.local, self._extent.path)
        if file is None:
            self._extent.write(view, 0)
            return
        try:
            self._backend._engine.write(file, view)
        except OSError as error:
            raise from_os_error(error, doing=f"Writing {file.path}") from error

    def publish(self) -> bool:
        self._extent.commit()
        self._committed = True
        return self._backend.publish(self._extent.path, self._name)

    def abort(self) -> None:
        if self._committed:
            self._backend._remove_quietly(self._extent.path)
        else:
            self._extent.abort()


class _CurvineStaging:
    """Staging in a Curvine namespace. Times are the master's: a file gets one when it is created anew."""

    def __init__(self, fs: SyncFileSystem) -> None:
        self._fs = fs

    def make_directory(self, path: str) -> str:
        return str(self._fs.mkdir(path, mode=_DIRECTORY_MODE, parents=True).id)

    def touch(self, path: str) -> float:
        self._fs.create(path, overwrite=True, mode=_FILE_MODE).close()
        return self._fs.stat(path).mtime_ms / 1000

    def entries(self, path: str) -> list[Entry]:
        return [Entry(status.name, status.is_dir, status.mtime_ms / 1000) for status in self._fs.list(path)]

    def remove_file(self, path: str) -> None:
        try:
            self._fs.delete(path)
        except NotFound:
            pass

    def remove_directory(self, path: str) -> None:
        try:
            self._fs.delete(path)
        except NotFound:
            pass
