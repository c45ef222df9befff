"""Objects in a Curvine namespace, without FUSE in the way.

Local blocks are written and read through the descriptors that the client lends (short circuit), by our own I/O
threads; blocks on other hosts go through the client's block streams. An object is one file of one block.
"""

from __future__ import annotations

import errno
from collections.abc import Hashable, Iterator, Sequence
from functools import partial

import trio

from curvfs.api import (
    CurvineFileSystem,
    FileStatus,
    LocalExtent,
    Located,
    NewExtent,
    SyncFileReader,
    SyncFileSystem,
    SyncReadExtents,
    WriteExtent,
)
from curvfs.errors import (
    CurvfsError,
    EnvironmentError_,
    FileExists_,
    NotADirectory,
    NotFound,
    OutOfSpace,
    TransportError,
    from_os_error,
)
from curvfs.world import World
from kvstore.backends.aside import Aside
from kvstore.backends.base import (
    Backend,
    Direct,
    Found,
    Mode,
    ObjectEntry,
    ObjectReader,
    ObjectWriter,
    Target,
    Targets,
    alignment_of,
    settle_mode,
)
from kvstore.backends.opened import Opened, OpenedBlocks
from kvstore.backends.staging import Entry, Staging
from kvstore.engine.base import Engine, OpenFile
from kvstore.header import ALIGNMENT_BYTES, OBJECT_SUFFIX
from kvstore.slabs import Slab

_DIRECTORY_MODE = 0o700
_FILE_MODE = 0o600
#: Directories remembered: all that one namespace fans out over.
_DIRECTORIES_KEPT = 1 << 16
#: Entries asked for at once when a directory is walked.
_LIST_PAGE = 1000
#: Blocks that stay open after they were read.
_BLOCKS_KEPT = 256
#: Marks the directory below which the rules for KV objects hold.
_PREFIX_XATTR = "curvfs.kv"
#: ``<parent directory id>/<name>`` of the place a file was created at: at any other place it is sealed.
_BORN_XATTR = "curvfs.born"
#: A worker that does not answer for so long has failed a write. (A client waits longer, who has nobody else to ask.)
_WORKER_TIMEOUT_S = 5.0


class CurvineBackend(Backend):
    """The KV prefix ``<URL's path>/<prefix>``, marked as one. Raises ConfigError, TransportError, EnvironmentError_."""

    name = "curvine"
    locates = True
    ends_in_time = True
    #: Workers are told to delete by the answers to their heartbeats.
    frees_after_s = 15.0
    #: Each is a block stream and a descriptor while it is under way.
    batch = 32

    def __init__(
        self,
        world: World,
        engine: Engine,
        url: str,
        *,
        prefix: str,
        direct: Direct,
        keep: bool,
        durable: bool,
        staging_expiry_s: float,
        lease_s: float,
    ) -> None:
        self._world = world
        self._url = url
        self._keep = keep
        self._durable = durable
        self._disk = world.disk
        self._engine = engine
        self._where = url.partition("?")[0]
        self._prefix = "" if prefix == "." else f"/{prefix}"
        #: Directories that we made or found; a rename into one spares asking.
        self._directories: set[str] = set()
        self._opened = OpenedBlocks(world, count=_BLOCKS_KEPT, keep_s=lease_s)
        self._fs = SyncFileSystem.connect(url, world=world)
        self.targets = _CurvineTargets(self, self._fs)
        try:
            self._mark_prefix()
            store = _CurvineStaging(self._fs)
            self._staging = Staging(world, store, f"{self._prefix}/.staging", expiry_s=staging_expiry_s)
            self.records, self.root, self.staging = store, self._prefix, self._staging
            self._aside = Aside(world, store, self._staging, self._prefix, lease_s=lease_s)
            self._staging.open()
            try:
                self.mode = self._probe(direct)
                self.near = self.mode.direct  # blocks are local, and everything else goes in batches
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
        if wanted is False and not self._durable:
            return settle_mode(self._where, wanted, None, "")
        path = f"{self._staging.directory}/{self._staging.new_name()}"
        try:
            extent = self._fs.create_extent(path, ALIGNMENT_BYTES, direct=wanted is not False, mode=_FILE_MODE)
        except OutOfSpace as error:
            return self._indirect(wanted, f"the pool has no room to try it: {error}")
        try:
            local = extent.local
            if local is None and self._durable:
                raise _not_durable(self._where, extent.remote_reason)
            if wanted is False:
                return settle_mode(self._where, wanted, None, "")
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

    def confirm(self, names: Sequence[str], timeout_s: float | None = None) -> list[Found | CurvfsError | None]:
        """One turn of the client's thread."""
        answers: list[Found | CurvfsError | None] = []
        paths = [self._path(name) for name in names]
        for answer in self._fs.portal.run(self._fs.filesystem.locate_many, paths, timeout_s=timeout_s):
            if isinstance(answer, Located):
                status = answer.status
                answers.append(Found(status.length_bytes, answer) if status.is_file else Found(-1))
            else:
                answers.append(None if isinstance(answer, NotFound) else answer)
        return answers

    def open(self, name: str, found: Found | None = None) -> ObjectReader:
        reader = self.open_many([(name, found)])[0]
        if isinstance(reader, CurvfsError):
            raise reader
        return reader

    def open_many(self, wanted: Sequence[tuple[str, Found | None]]) -> list[ObjectReader | CurvfsError]:
        """One turn of the client's thread, and one round trip to each worker, for those not open already."""
        readers: list[ObjectReader | CurvfsError | None] = []
        asked: list[str | Located] = []
        for name, found in wanted:
            located = found.located if found is not None and isinstance(found.located, Located) else None
            entry = self._opened.take(_key(located)) if located is not None else None
            readers.append(None if entry is None else _CurvineReader(self, entry))
            if entry is None:
                asked.append(self._path(name) if located is None else located)
        if asked:
            try:
                opened = iter(self._fs.open_extents_many(asked, direct=self.mode.direct))
            except BaseException:
                for reader in readers:
                    if isinstance(reader, ObjectReader):
                        reader.close()
                raise
            for index, known in enumerate(readers):
                if known is None:
                    extents = next(opened)
                    readers[index] = (
                        extents if isinstance(extents, CurvfsError) else _CurvineReader(self, _entry(extents))
                    )
        return [reader for reader in readers if reader is not None]

    def open_otherwise(self, name: str) -> ObjectReader:
        fs = SyncFileSystem.connect(self._url, world=self._world, short_circuit=False)
        try:
            return _WireReader(fs, fs.open(self._path(name)))
        except BaseException:
            fs.close()
            raise

    def create(self, name: str, size_bytes: int) -> ObjectWriter:
        writer = self.create_many([name], size_bytes)[0]
        if isinstance(writer, CurvfsError):
            raise writer
        return writer

    def create_many(self, names: Sequence[str], size_bytes: int) -> list[ObjectWriter | CurvfsError]:
        """One turn of the client's thread: two calls to the master for all of them, their streams side by side."""
        staged = [self._staging.new_name() for _ in names]
        made = self._create(staged, size_bytes)
        if any(isinstance(extent, NotFound) for extent in made):  # swept between two signs of life
            self._staging.open()
            again = [index for index, extent in enumerate(made) if isinstance(extent, NotFound)]
            for index, extent in zip(again, self._create([staged[index] for index in again], size_bytes), strict=True):
                made[index] = extent
        return [
            extent if isinstance(extent, CurvfsError) else _CurvineWriter(self, extent, name)
            for name, extent in zip(names, made, strict=True)
        ]

    def _create(
        self, staged: Sequence[str], size_bytes: int, *, on_worker: int | None = None
    ) -> list[WriteExtent | CurvfsError]:
        parent, parent_id = self._staging.directory, self._staging.directory_id
        files = [
            NewExtent(f"{parent}/{name}", size_bytes, {_BORN_XATTR: f"{parent_id}/{name}".encode()}) for name in staged
        ]
        direct = self.mode.direct and not self._keep
        create = partial(
            self._fs.filesystem.create_extents_many,
            files,
            direct=direct,
            mode=_FILE_MODE,
            on_worker=on_worker,
            worker_timeout_s=_WORKER_TIMEOUT_S,
        )
        return self._fs.portal.run(create)

    def create_on(self, worker_id: int, size_bytes: int) -> _CurvineWriter:
        """Stage an object of no name on one worker."""
        extent = self._create([self._staging.new_name()], size_bytes, on_worker=worker_id)[0]
        if isinstance(extent, CurvfsError):
            raise extent
        return _CurvineWriter(self, extent, "")

    def publish_many(self, writers: Sequence[ObjectWriter]) -> list[bool | CurvfsError]:
        """One turn of the client's thread: one call to the master that commits all of them, then directory and name of
        each side by side."""
        mine = [writer for writer in writers if isinstance(writer, _CurvineWriter)]
        return self._fs.portal.run(self._publish, self._fs.filesystem, mine)

    async def _publish(self, fs: CurvineFileSystem, writers: Sequence[_CurvineWriter]) -> list[bool | CurvfsError]:
        committed = await fs.commit_extents_many([writer.extent for writer in writers])
        results: list[bool | CurvfsError] = [False] * len(writers)

        async def name(index: int, writer: _CurvineWriter) -> None:
            try:
                results[index] = await self._name_object(fs, writer.extent, writer.name)
            except CurvfsError as error:
                results[index] = error

        async with trio.open_nursery() as nursery:
            for index, (writer, status) in enumerate(zip(writers, committed, strict=True)):
                if isinstance(status, CurvfsError):
                    results[index] = status
                else:
                    writer.committed = True
                    nursery.start_soon(name, index, writer)
        return results

    async def _name_object(self, fs: CurvineFileSystem, extent: WriteExtent, name: str) -> bool:
        """Rename what was committed to its name; False, with the staged file gone, when that is taken."""
        target = self._path(name)
        directory = target.rpartition("/")[0]
        try:
            if directory not in self._directories:
                await fs.mkdir(directory, mode=_DIRECTORY_MODE, parents=True)
                self._remember(directory)
            try:
                await fs.publish(extent.status, target)
            except (FileExists_, TransportError):
                raise
            except CurvfsError:
                # Somebody removed the directory, or something stands in its place: look, make it, and say what is.
                self._directories.clear()
                await fs.mkdir(directory, mode=_DIRECTORY_MODE, parents=True)
                await fs.rename(extent.path, target, replace=False)
        except FileExists_:
            await self._delete_quietly(fs, extent.path)
            return False
        except NotFound:
            # The staged file is gone. A rename that was repeated after its answer was lost has done its work.
            if not await fs.exists(target):
                raise
        return True

    def _remember(self, directory: str) -> None:
        if len(self._directories) >= _DIRECTORIES_KEPT:
            self._directories.clear()
        self._directories.add(directory)

    @staticmethod
    async def _delete_quietly(fs: CurvineFileSystem, path: str) -> None:
        try:
            await fs.delete(path)
        except CurvfsError:
            pass

    def quarantine(self, name: str, identity: Hashable) -> bool:
        return self._aside.quarantine(name, identity)

    def evict(self, name: str) -> bool:
        return self._aside.evict(name)

    def empty_trash(self, *, early: bool = False, namespace: str = "") -> int:
        return self._aside.empty(early=early, namespace=namespace)

    def trash_bytes(self, namespace: str = "") -> int:
        return self._aside.used_bytes(namespace)

    def free_bytes(self) -> int:
        return self._fs.statfs().available_bytes

    def mark_accessed(self, accesses: Sequence[tuple[str, float]]) -> None:
        answers = self._fs.run_many(
            [
                partial(self._fs.filesystem.set_attr, self._path(name), atime_ms=int(when_s * 1000))
                for name, when_s in accesses
            ]
        )
        for answer in answers:
            if isinstance(answer, CurvfsError) and not isinstance(answer, NotFound):
                raise answer

    def accessed_s(self, names: Sequence[str]) -> list[float | None]:
        when_s: list[float | None] = []
        for answer in self._fs.locate_many([self._path(name) for name in names]):
            if isinstance(answer, Located):
                when_s.append(max(answer.status.atime_ms, answer.status.mtime_ms) / 1000)
            elif isinstance(answer, NotFound):
                when_s.append(None)
            else:
                raise answer
        return when_s

    def staged_bytes(self) -> int:
        return self._staging.used_bytes()

    def walk(self, directory: str, after: str = "") -> Iterator[ObjectEntry]:
        first = ""
        if after.startswith(f"{directory}/"):
            first = after.removeprefix(f"{directory}/").partition("/")[0]
            if f"{directory}/{first}" != after:
                yield from self.walk(f"{directory}/{first}", after)
        yield from self._walk(directory, self._listed([directory], first)[0])

    def _listed(self, directories: Sequence[str], start_after: str = "") -> list[list[FileStatus]]:
        """The first entries of several directories, side by side; none of one that is gone."""
        answers = self._fs.run_many(
            [
                partial(self._fs.filesystem.list, self._path(name), start_after=start_after, limit=_LIST_PAGE)
                for name in directories
            ]
        )
        pages: list[list[FileStatus]] = []
        for answer in answers:
            if isinstance(answer, NotFound | NotADirectory):
                pages.append([])
            elif isinstance(answer, CurvfsError):
                raise answer
            else:
                pages.append(answer)
        return pages

    def _walk(self, directory: str, page: list[FileStatus]) -> Iterator[ObjectEntry]:
        """A directory and all below it, from the first entries on."""
        while True:
            below: dict[str, list[FileStatus]] = {}
            names = [status.name for status in page if status.is_dir]
            for status in page:
                name = f"{directory}/{status.name}"
                if status.is_dir:
                    if status.name not in below:
                        batch = names[: self.batch]
                        del names[: self.batch]
                        listed = self._listed([f"{directory}/{one}" for one in batch])
                        below = dict(zip(batch, listed, strict=True))
                    yield from self._walk(name, below.pop(status.name))
                elif status.is_file and status.name.endswith(OBJECT_SUFFIX):
                    used_ms = max(status.atime_ms, status.mtime_ms)
                    yield ObjectEntry(name, status.length_bytes, status.mtime_ms / 1000, used_ms / 1000)
            if len(page) < _LIST_PAGE:
                return
            page = self._listed([directory], page[-1].name)[0]

    def place(self, found: Found) -> str:
        blocks = found.located.blocks if isinstance(found.located, Located) else ()
        return blocks[0].workers[0].hostname if blocks and blocks[0].workers else ""

    def hosts(self, found: Found) -> tuple[str, ...]:
        blocks = found.located.blocks if isinstance(found.located, Located) else ()
        return tuple(sorted({worker.hostname for block in blocks for worker in block.workers}))

    def _remove_quietly(self, path: str) -> None:
        try:
            self._fs.delete(path)
        except CurvfsError:
            pass

    def delete(self, name: str) -> bool | None:
        try:
            return self._fs.delete(self._path(name)) or None
        except NotFound:
            return False

    def sweep(self) -> int:
        return self._staging.sweep()

    def close(self) -> None:
        self._opened.close()
        self._staging.close()
        self._fs.close()

    def local_file(self, local: LocalExtent | None, path: str, *, keep: bool = False) -> OpenFile | None:
        """A lent descriptor, with the alignment that its own file system asks for. Counts what belies the mode."""
        if self.mode.direct and not (local is not None and (local.direct or keep)):
            self.fallbacks += 1
        if local is None:
            return None
        alignment = (alignment_of(self._disk.direct_io(local.fd)) or ALIGNMENT_BYTES) if local.direct else 1
        return OpenFile(local.fd, path, alignment)


def _not_durable(where: str, reason: str) -> EnvironmentError_:
    return EnvironmentError_(
        f"durability='publish' is refused: blocks of {where} are remote ({reason}), and flushing one of those does not"
        " sync it; open the store on a host that has a worker, or with durability='none'.",
        errno_=errno.EOPNOTSUPP,
    )


def _key(located: Located) -> tuple[int, ...]:
    return (located.status.id, located.status.length_bytes, *(block.block_id for block in located.blocks))


def _entry(extents: SyncReadExtents) -> Opened:
    blocks = (extent.block_id for extent in extents.extents)
    return Opened((extents.status.id, extents.status.length_bytes, *blocks), extents)


class _CurvineReader(ObjectReader):
    def __init__(self, backend: CurvineBackend, entry: Opened) -> None:
        self._backend = backend
        self._entry: Opened | None = entry
        self._extents = entry.extents
        self.length_bytes = self._extents.status.length_bytes
        self.identity = self._extents.status.id
        extents = self._extents.extents
        local = extents[0] if len(extents) == 1 and isinstance(extents[0], LocalExtent) else None
        self._file = backend.local_file(local, self._extents.status.path)
        if self._file is not None and local is not None and local.direct:
            cached = backend._opened.through_cache(entry, local)
            if cached >= 0:
                backend.page_cache_reads += 1
                self._file = OpenFile(cached, self._file.path)
        self.alignment_bytes = self._file.alignment_bytes if self._file is not None else 1

    @property
    def file(self) -> OpenFile | None:
        return self._file

    def read(self, view: memoryview, offset_bytes: int = 0) -> int:
        return self.readv([view], offset_bytes)

    def readv(self, views: Sequence[memoryview], offset_bytes: int) -> int:
        self.well = False
        if self._file is None:
            return self._read_stream(views, offset_bytes)
        try:
            count = self._backend._engine.readv(self._file, views, offset_bytes)
        except OSError as error:
            raise from_os_error(error, doing=f"Reading {self._file.path}") from error
        self.well = True
        return count

    def _read_stream(self, views: Sequence[memoryview], offset_bytes: int) -> int:
        done = 0
        for view in views:
            wanted = view[: max(0, self.length_bytes - offset_bytes - done)]
            count = self._extents.readinto(wanted, offset_bytes + done) if len(wanted) else 0
            done += count
            if count < len(view):
                break
        return done

    def close(self) -> None:
        """Local files that were read well stay open for a while."""
        entry, self._entry = self._entry, None
        if entry is not None:
            self._backend._opened.give_back(entry, keep=self.well)


class _WireReader(ObjectReader):
    """Over the wire, through a client of its own."""

    def __init__(self, fs: SyncFileSystem, reader: SyncFileReader) -> None:
        self._fs = fs
        self._reader = reader
        self.length_bytes = reader.length_bytes
        self.identity = reader.status.id

    def read(self, view: memoryview, offset_bytes: int = 0) -> int:
        return self._reader.readinto(view[: max(0, self.length_bytes - offset_bytes)], offset_bytes)

    def close(self) -> None:
        try:
            self._reader.close()
        finally:
            self._fs.close()


class _CurvineWriter(ObjectWriter):
    def __init__(self, backend: CurvineBackend, extent: WriteExtent, name: str) -> None:
        self._backend = backend
        self.extent = extent
        self.name = name
        self.committed = False
        self.targets = tuple(Target(worker.worker_id, worker.hostname) for worker in extent.workers)

    def write(self, view: memoryview) -> None:
        backend = self._backend
        file = backend.local_file(self.extent.local, self.extent.path, keep=backend._keep)
        if file is None:
            if backend._durable:
                raise _not_durable(self.extent.path, self.extent.remote_reason)
            backend._fs.portal.run(self._send, view)
            return
        try:
            backend._engine.write(file, view)
            if backend._durable:
                backend._disk.fdatasync(file.fd)
        except OSError as error:
            raise from_os_error(error, doing=f"Writing {file.path}") from error

    async def _send(self, view: memoryview) -> None:
        """Until the worker has it all: what fails here can be written elsewhere."""
        await self.extent.write(view, 0)
        await self.extent.complete_block()

    def publish(self) -> bool:
        published = self._backend.publish_many([self])[0]
        if isinstance(published, CurvfsError):
            raise published
        return published

    def abort(self) -> None:
        if self.committed:
            self._backend._remove_quietly(self.extent.path)
            return
        try:
            self._backend._fs.portal.run(self.extent.abort)
        except CurvfsError:
            self.extent.close_descriptor()  # the client is closed; what was begun is left to a sweep

    def abandon(self) -> None:
        if not self._backend._fs.portal.post(self.extent.abort):
            self.extent.close_descriptor()


class _CurvineTargets(Targets):
    def __init__(self, backend: CurvineBackend, fs: SyncFileSystem) -> None:
        self._backend = backend
        self._fs = fs
        self._placement = fs.placement

    def avoided(self) -> tuple[int, ...]:
        return self._placement.avoided()

    def avoid(self, worker_id: int) -> None:
        self._placement.avoid(worker_id)

    def readmit(self, worker_id: int) -> None:
        self._placement.readmit(worker_id)

    def attempt(self, worker_id: int, view: memoryview) -> None:
        writer = self._backend.create_on(worker_id, len(view))
        try:
            writer.write(view)
            self._fs.portal.run(writer.extent.complete_block)
        finally:
            writer.abort()


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
        return [
            Entry(status.name, status.is_dir, status.mtime_ms / 1000, status.length_bytes)
            for status in self._fs.list(path)
        ]

    def is_there(self, path: str) -> bool:
        return self._fs.exists(path)

    def move(self, source: str, target: str, *, replace: bool) -> None:
        self._fs.rename(source, target, replace=replace)

    def identity(self, path: str) -> Hashable:
        return self._fs.stat(path).id

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
