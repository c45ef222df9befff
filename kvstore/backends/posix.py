"""Objects in any POSIX directory: a local file system, NFS, or a mount of ours or Curvine's."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Hashable, Iterator, Sequence
from contextlib import contextmanager

from curvfs.errors import ConfigError, CurvfsError, EnvironmentError_, from_os_error
from curvfs.world import NO_LINKS, Disk, World
from kvstore.backends.aside import Aside
from kvstore.backends.base import (
    Backend,
    Direct,
    Found,
    Mode,
    ObjectEntry,
    ObjectReader,
    ObjectWriter,
    alignment_of,
    cached_descriptor,
    settle_mode,
)
from kvstore.backends.filesystems import LOCAL_FILE_SYSTEMS, file_system_of
from kvstore.backends.staging import Entry, Staging
from kvstore.engine.base import Engine, OpenFile
from kvstore.header import ALIGNMENT_BYTES, OBJECT_SUFFIX
from kvstore.slabs import Slab

_DIRECTORY_MODE = 0o700
_FILE_MODE = 0o600
#: Where processes stage; the second where the first is reserved.
_STAGING_ROOTS = (".staging", ".staging-files")
#: Directories remembered: all that one namespace fans out over.
_DIRECTORIES_KEPT = 1 << 16
#: Never follow a link to where an object should be, never wait for the other end of a pipe put there.
_READ_FLAGS = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_LEAF_FLAGS = os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC
#: What a kernel (or the filter before it) says that does not open without links, and what it says of one.
_NOT_WITHOUT_LINKS = (errno.ENOSYS, errno.EPERM, errno.ELOOP)
_STAGE_FLAGS = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC


@contextmanager
def _mapped(doing: str, path: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise from_os_error(error, doing=f"{doing} {path}") from error


class PosixBackend(Backend):
    """The KV prefix ``<directory>/<prefix>``.

    ``directory`` must exist: making it would fill the disk below a mount that is not there. Raises ConfigError and
    EnvironmentError_ with what to do.
    """

    name = "posix"
    locates = False

    def __init__(
        self,
        world: World,
        engine: Engine,
        directory: str,
        *,
        prefix: str,
        direct: Direct,
        keep: bool,
        durable: bool,
        staging_expiry_s: float,
        lease_s: float,
    ) -> None:
        self._disk = world.disk
        self._engine = engine
        self._keep = keep
        self._durable = durable
        #: Directories whose own names are known to be durable.
        self._synced: set[str] = set()
        #: Until the kernel has refused to, or a link has led to the directory itself: one call that follows no links.
        self._without_links = True
        self._root = os.path.normpath(directory)
        self._prefix = self._root if prefix == "." else f"{self._root}/{prefix}"
        store = _PosixStaging(world.disk)
        try:
            if not stat.S_ISDIR(world.disk.stat(self._root).st_mode):
                raise ConfigError(f"{directory} is not a directory; name one that exists.")
        except OSError as error:
            raise ConfigError(
                f"The directory {directory} cannot be used: {error.strerror}. Create it, or mount what belongs there,"
                " before the store is opened."
            ) from error
        try:
            self._make_directories("")
            self._staging = self._open_staging(world, store, staging_expiry_s)
        except CurvfsError as error:
            raise EnvironmentError_(
                f"The store at {self._prefix} cannot be set up: {error}. Give this user write permission there.",
                errno_=error.errno_,
            ) from error
        self.records, self.root, self.staging = store, self._prefix, self._staging
        self._aside = Aside(world, store, self._staging, self._prefix, lease_s=lease_s)
        try:
            self.mode = self._probe(direct)
            self.near = self.mode.direct and file_system_of(world.disk, self._prefix) in LOCAL_FILE_SYSTEMS
        except BaseException:
            self._staging.close()
            raise

    def _open_staging(self, world: World, store: _PosixStaging, expiry_s: float) -> Staging:
        """Ours, among those of native stores; but a mount of the namespace keeps that directory for itself."""
        for root in _STAGING_ROOTS:
            staging = Staging(world, store, f"{self._prefix}/{root}", expiry_s=expiry_s)
            try:
                staging.open()
            except CurvfsError as error:
                if error.errno_ != errno.EPERM or root == _STAGING_ROOTS[-1]:
                    raise
            else:
                break
        return staging

    def _probe(self, wanted: Direct) -> Mode:
        """Ask the file system itself: a direct write and read of one block in our staging directory."""
        if wanted is False:
            return settle_mode(self._prefix, wanted, None, "")
        path = f"{self._staging.directory}/{self._staging.new_name()}"
        disk, alignment, reason = self._disk, None, ""
        try:
            fd = disk.open(path, _STAGE_FLAGS | os.O_DIRECT, _FILE_MODE)
            try:
                found = disk.direct_io(fd)
                alignment = alignment_of(found)
                if alignment is None:
                    reason = f"it needs an alignment of {found.offset_alignment_bytes} bytes"
                else:
                    block = Slab(ALIGNMENT_BYTES)
                    block.view[:] = b"\xa5" * ALIGNMENT_BYTES
                    self._engine.write(OpenFile(fd, path, alignment), block.view)
                    block.view[:] = bytes(ALIGNMENT_BYTES)
                    if (
                        self._engine.read(OpenFile(fd, path, alignment), block.view) != ALIGNMENT_BYTES
                        or block.view[:] != b"\xa5" * ALIGNMENT_BYTES
                    ):
                        alignment, reason = None, "a direct write did not read back"
            finally:
                disk.close(fd)
        except OSError as error:
            if error.errno in (errno.EINVAL, errno.EOPNOTSUPP, errno.ENOSYS) or alignment is None:
                alignment, reason = None, f"{errno.errorcode.get(error.errno or 0, '?')} from a direct write"
        finally:
            _remove_quietly(disk, path)
        return settle_mode(self._prefix, wanted, alignment, reason)

    def _path(self, name: str) -> str:
        return f"{self._prefix}/{name}"

    def _refuse_links(self, name: str) -> None:
        """Every directory between the prefix and the name must be one, not a link to elsewhere."""
        path = self._prefix
        for part in ("", *name.split("/")[:-1]):
            path = f"{path}/{part}" if part else path
            if not stat.S_ISDIR(self._disk.stat(path, follow_symlinks=False).st_mode):
                raise NotADirectoryError(errno.ENOTDIR, "a link or a file stands where a directory should", path)

    def _open_without_links(self, path: str, flags: int) -> int:
        """Open a path to which no link leads, in one call; -1 where that cannot be had, or where one does."""
        if self._without_links:
            try:
                return self._disk.open(path, flags | NO_LINKS)
            except OSError as error:
                if error.errno not in _NOT_WITHOUT_LINKS:
                    raise
        return -1

    def _open_object(self, name: str, flags: int) -> int:
        path = self._path(name)
        fd = self._open_without_links(path, flags)
        if fd < 0:
            self._refuse_links(name)
            fd = self._disk.open(path, flags)
            self._without_links = False
        return fd

    def _open_leaf(self, name: str) -> int:
        """The directory that an object belongs in; -1 where it is not to be had open, and no link leads to it."""
        leaf = self._open_without_links(self._path(name).rpartition("/")[0], _LEAF_FLAGS)
        if leaf < 0:
            self._refuse_links(name)
            self._without_links = False
        return leaf

    def _make_directories(self, name: str) -> None:
        with _mapped("Making the directory of", self._path(name)):
            path = self._prefix
            self._disk.makedirs(path, _DIRECTORY_MODE)
            self._disk.makedirs(f"{path}/{name}".rpartition("/")[0], _DIRECTORY_MODE)
            self._refuse_links(name)

    def confirm(self, names: Sequence[str], timeout_s: float | None = None) -> list[Found | CurvfsError | None]:
        answers: list[Found | CurvfsError | None] = []
        for name in names:
            path = self._path(name)
            try:
                status = self._disk.stat(path, follow_symlinks=False)
            except (FileNotFoundError, NotADirectoryError):
                answers.append(None)
            except OSError as error:
                answers.append(from_os_error(error, doing=f"Looking up {path}"))
            else:
                answers.append(Found(status.st_size) if stat.S_ISREG(status.st_mode) else Found(-1))
        return answers

    def open(self, name: str, found: Found | None = None) -> ObjectReader:
        try:
            return self._open_named(name, direct=self.mode.direct)
        except CurvfsError as error:
            if found is None or error.errno_ != errno.ENOENT:
                raise
            gone = error
        for path in self._aside.trashed(name):  # it was promised, and evicted since
            try:
                with _mapped("Opening", path):
                    return self._reader(
                        path, self._disk.open(path, self._read_flags(self.mode.direct)), self.mode.direct
                    )
            except CurvfsError as error:
                if error.errno_ != errno.ENOENT:
                    raise
        raise gone

    def _open_named(self, name: str, *, direct: bool, from_cache: bool = True) -> ObjectReader:
        path = self._path(name)
        with _mapped("Opening", path):
            fd = self._open_object(name, self._read_flags(direct))
            return self._reader(path, fd, direct, from_cache=from_cache)

    @staticmethod
    def _read_flags(direct: bool) -> int:
        return _READ_FLAGS | (os.O_DIRECT if direct else 0)

    def _reader(self, path: str, fd: int, direct: bool, *, from_cache: bool = True) -> ObjectReader:
        try:
            status = self._disk.fstat(fd)
            if not stat.S_ISREG(status.st_mode):
                raise IsADirectoryError(errno.EISDIR, "not a regular file", path)
            cached = cached_descriptor(self._disk, fd, status.st_size) if direct and from_cache else -1
            if cached >= 0:
                self.page_cache_reads += 1
                direct, fd, surplus = False, cached, fd
                self._disk.close(surplus)
        except BaseException:
            self._disk.close(fd)
            raise
        file = OpenFile(fd, path, self.mode.alignment_bytes if direct else 1)
        return _PosixReader(self._disk, self._engine, file, status)

    def open_otherwise(self, name: str) -> ObjectReader:
        try:
            return self._open_named(name, direct=not self.mode.direct, from_cache=False)
        except CurvfsError as error:
            if error.errno_ != errno.EINVAL or self.mode.direct:
                raise
        return self._open_named(name, direct=False)

    def quarantine(self, name: str, identity: Hashable) -> bool:
        return self._aside.quarantine(name, identity)

    def evict(self, name: str) -> bool:
        try:
            with _mapped("Opening", self._path(name)):
                self._refuse_links(name)
        except CurvfsError as error:
            if error.errno_ == errno.ENOENT:
                return False
            raise
        return self._aside.evict(name)

    def empty_trash(self, *, early: bool = False, namespace: str = "") -> int:
        return self._aside.empty(early=early, namespace=namespace)

    def trash_bytes(self, namespace: str = "") -> int:
        return self._aside.used_bytes(namespace)

    def free_bytes(self) -> int:
        with _mapped("Asking for the room at", self._prefix):
            found = self._disk.statvfs(self._prefix)
            return int(found.f_bavail * found.f_frsize)

    def mark_accessed(self, accesses: Sequence[tuple[str, float]]) -> None:
        for name, when_s in accesses:
            path = self._path(name)
            with _mapped("Marking", path):
                try:
                    self._disk.set_access_time(path, int(when_s * 1e9))
                except (FileNotFoundError, NotADirectoryError, PermissionError):  # gone, or another user's
                    pass

    def accessed_s(self, names: Sequence[str]) -> list[float | None]:
        return [self._accessed_s(name) for name in names]

    def _accessed_s(self, name: str) -> float | None:
        path = self._path(name)
        with _mapped("Looking at", path):
            try:
                status = self._disk.stat(path, follow_symlinks=False)
            except (FileNotFoundError, NotADirectoryError):
                return None
            return max(status.st_atime, status.st_mtime)

    def staged_bytes(self) -> int:
        return self._staging.used_bytes()

    def walk(self, directory: str, after: str = "") -> Iterator[ObjectEntry]:
        path = self._path(directory)
        try:
            names = sorted(self._disk.listdir(path))
        except FileNotFoundError:
            return
        except OSError as error:
            raise from_os_error(error, doing=f"Listing {path}") from error
        for entry in names:
            name = f"{directory}/{entry}"
            if name <= after and not after.startswith(f"{name}/"):
                continue
            try:
                status = self._disk.stat(f"{path}/{entry}", follow_symlinks=False)
            except FileNotFoundError:
                continue
            except OSError as error:
                raise from_os_error(error, doing=f"Looking at {path}/{entry}") from error
            if stat.S_ISDIR(status.st_mode):
                yield from self.walk(name, after)
            elif stat.S_ISREG(status.st_mode) and entry.endswith(OBJECT_SUFFIX):
                used_s = max(status.st_atime, status.st_mtime)
                yield ObjectEntry(name, status.st_size, status.st_mtime, used_s)

    def hosts(self, found: Found) -> tuple[str, ...]:
        return ()

    def create(self, name: str, size_bytes: int) -> ObjectWriter:
        direct = self.mode.direct and not self._keep
        flags = _STAGE_FLAGS | (os.O_DIRECT if direct else 0)
        staged = f"{self._staging.directory}/{self._staging.new_name()}"
        with _mapped("Staging", staged):
            try:
                fd = self._disk.open(staged, flags, _FILE_MODE)
            except FileNotFoundError:  # swept between two signs of life
                self._staging.open()
                fd = self._disk.open(staged, flags, _FILE_MODE)
        return _PosixWriter(self, OpenFile(fd, staged, self.mode.alignment_bytes if direct else 1), name)

    def publish(self, staged: str, name: str) -> bool:
        target = self._path(name)
        with _mapped("Publishing", target):
            try:
                leaf = self._open_leaf(name)
            except FileNotFoundError:
                self._make_directories(name)
                self._synced.difference_update(self._above(target))
                leaf = self._open_leaf(name)
            try:
                if leaf < 0:
                    self._disk.rename_noreplace(staged, target)
                else:
                    self._disk.rename_into(leaf, staged, target.rpartition("/")[2])
            except FileExistsError:
                return False
            finally:
                if leaf >= 0:
                    self._disk.close(leaf)
            if self._durable:
                try:
                    self._sync_names(target)
                except OSError:
                    _remove_quietly(self._disk, target)
                    raise
        return True

    def _above(self, path: str) -> list[str]:
        """The directories between a path and the root, the nearest first."""
        above = []
        while (path := path.rpartition("/")[0]) not in (self._root, ""):
            above.append(path)
        return above

    def _sync_names(self, target: str) -> None:
        """Make an object's name durable, and once those of the directories above it."""
        above = self._above(target)
        self._disk.sync_names(above[0] if above else self._root)
        for directory in above:
            if directory not in self._synced:
                self._disk.sync_names(directory.rpartition("/")[0] or "/")
        if len(self._synced) >= _DIRECTORIES_KEPT:
            self._synced.clear()
        self._synced.update(above)

    def delete(self, name: str) -> bool:
        path = self._path(name)
        with _mapped("Deleting", path):
            try:
                self._refuse_links(name)
                self._disk.unlink(path)
            except FileNotFoundError:
                return False
        return True

    def sweep(self) -> int:
        return self._staging.sweep()

    def close(self) -> None:
        self._staging.close()


class _PosixReader(ObjectReader):
    def __init__(self, disk: Disk, engine: Engine, file: OpenFile, status: os.stat_result) -> None:
        self._disk, self._engine, self._file = disk, engine, file
        self.length_bytes = status.st_size
        self.identity = _identity(status)
        self.alignment_bytes = file.alignment_bytes

    @property
    def file(self) -> OpenFile:
        return self._file

    def read(self, view: memoryview, offset_bytes: int = 0) -> int:
        return self.readv([view], offset_bytes)

    def readv(self, views: Sequence[memoryview], offset_bytes: int) -> int:
        with _mapped("Reading", self._file.path):
            return self._engine.readv(self._file, views, offset_bytes)

    def close(self) -> None:
        self._disk.close(self._file.fd)


class _PosixWriter(ObjectWriter):
    def __init__(self, backend: PosixBackend, file: OpenFile, name: str) -> None:
        self._backend, self._file, self._name = backend, file, name
        self._disk = backend._disk
        self._open = self._staged = True

    def write(self, view: memoryview) -> None:
        with _mapped("Writing", self._file.path):
            self._backend._engine.write(self._file, view)
            if self._backend._durable:
                self._disk.fdatasync(self._file.fd)

    def _close(self) -> None:
        if self._open:
            self._open = False
            self._disk.close(self._file.fd)

    def publish(self) -> bool:
        with _mapped("Closing", self._file.path):
            self._close()
        published = self._backend.publish(self._file.path, self._name)
        self._staged = not published
        if not published:
            self.abort()
        return published

    def abort(self) -> None:
        try:
            self._close()
        except OSError:
            pass
        if self._staged:
            self._staged = False
            _remove_quietly(self._disk, self._file.path)


def _identity(status: os.stat_result) -> Hashable:
    return (status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns)


def _remove_quietly(disk: Disk, path: str) -> None:
    try:
        disk.unlink(path)
    except OSError:
        pass


class _PosixStaging:
    """Staging on a POSIX file system."""

    def __init__(self, disk: Disk) -> None:
        self._disk = disk

    def make_directory(self, path: str) -> str:
        with _mapped("Making", path):
            self._disk.makedirs(path, _DIRECTORY_MODE)
            for directory in (os.path.dirname(path), path):
                if not stat.S_ISDIR(self._disk.stat(directory, follow_symlinks=False).st_mode):
                    raise NotADirectoryError(errno.ENOTDIR, "a link stands where a directory should", directory)
        return ""

    def touch(self, path: str) -> float:
        with _mapped("Touching", path):
            fd = self._disk.open(path, os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, _FILE_MODE)
            self._disk.close(fd)
            self._disk.utime_now(path)
            return float(self._disk.stat(path, follow_symlinks=False).st_mtime)

    def entries(self, path: str) -> list[Entry]:
        found = []
        with _mapped("Listing", path):
            for name in self._disk.listdir(path):
                try:
                    status = self._disk.stat(f"{path}/{name}", follow_symlinks=False)
                except FileNotFoundError:
                    continue
                found.append(Entry(name, stat.S_ISDIR(status.st_mode), float(status.st_mtime), int(status.st_size)))
        return found

    def is_there(self, path: str) -> bool:
        with _mapped("Looking for", path):
            return self._disk.exists(path)

    def move(self, source: str, target: str, *, replace: bool) -> None:
        with _mapped("Moving", source):
            if replace:
                self._disk.rename(source, target)
            else:
                self._disk.rename_noreplace(source, target)

    def identity(self, path: str) -> Hashable:
        with _mapped("Looking at", path):
            return _identity(self._disk.stat(path, follow_symlinks=False))

    def remove_file(self, path: str) -> None:
        with _mapped("Removing", path):
            try:
                self._disk.unlink(path)
            except FileNotFoundError:
                pass

    def remove_directory(self, path: str) -> None:
        with _mapped("Removing", path):
            try:
                self._disk.rmdir(path)
            except FileNotFoundError:
                pass
