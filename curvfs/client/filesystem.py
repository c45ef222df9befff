"""The file system, asynchronous: paths checked, hazards kept from the wire, calls put together."""

from __future__ import annotations

import builtins
import errno
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any

import trio

from curvfs.client import convert, paths
from curvfs.client.extents import ReadExtents, WriteExtent, open_extents
from curvfs.client.listing import Pages
from curvfs.client.locks import RENEW_S, HeldLock
from curvfs.client.mastercalls import (
    O_APPEND,
    O_CREAT,
    O_EXCL,
    O_TRUNC,
    O_WRONLY,
    RENAME_EXCHANGE,
    RENAME_NO_REPLACE,
    MasterCalls,
)
from curvfs.client.mounts import MountTable
from curvfs.client.newextents import Plan, commit_extents, create_ahead, create_extents
from curvfs.client.placement import Placement
from curvfs.client.reader import FileReader
from curvfs.client.records import (
    DEFAULT_POLICY,
    SPECIAL_KINDS,
    FileKind,
    FileLock,
    FileStatus,
    FilesystemInfo,
    Freed,
    Located,
    MountPoint,
    NewExtent,
    NewFile,
    StoragePolicy,
    TtlAction,
)
from curvfs.client.session import Session
from curvfs.client.smallfiles import write_files
from curvfs.client.understores import UnderStores
from curvfs.client.writer import FileWriter, check_length
from curvfs.config import MAX_BLOCK_SIZE_BYTES, MIN_BLOCK_SIZE_BYTES, ClientConfig, resolve_config
from curvfs.errors import (
    KIND_UNSUPPORTED_UFS_READ,
    CurvfsError,
    FileExists_,
    InvalidRequest,
    IsADirectory,
    NotADirectory,
    NotFound,
    Unsupported,
)
from curvfs.units import align_up
from curvfs.wire.messages import pb
from curvfs.world import World

_PAGE = 1000
_SECTOR_BYTES = 4096


class CurvineFileSystem:
    """One connected client. Every path is absolute below the URL's root directory, and normalised here.

    Made by :func:`open_filesystem`. Methods raise :class:`~curvfs.errors.CurvfsError`: InvalidPath and NameTooLong
    before anything is sent, RemoteError for what the master refuses, TransportError when none answers in time.
    """

    def __init__(self, session: Session) -> None:
        self._session = session
        self._calls = MasterCalls(session)
        self._root = paths.normalize(session.config.root)
        self._mounts = MountTable(session, self._calls)
        self._under_stores = UnderStores(self._calls, self._mounts, self._root)

    @property
    def config(self) -> ClientConfig:
        """The settings in force."""
        return self._session.config

    @property
    def world(self) -> World:
        """Clock, network, disk and threads that this client uses."""
        return self._session.world

    @property
    def hostname(self) -> str:
        """Our own name, as compared with a worker's."""
        return self._session.hostname

    @property
    def client_name(self) -> str:
        """The writer identity of this client (4.3)."""
        return self._session.client_name

    @property
    def placement(self) -> Placement:
        """Which workers get no new blocks of this client for now."""
        return Placement(self._session)

    @property
    def makes_ahead(self) -> bool:
        """Whether :meth:`create_ahead` is worth it: the server makes many files in one call, and takes attributes along
        with the call that closes one."""
        return self._session.knows_batches and self._session.knows_set_attr_on_close

    def stats(self) -> dict[str, int]:
        """Counters: calls, retries, bytes read and written locally and remotely, short-circuit refusals by reason."""
        return dict(self._session.stats)

    async def connect(self) -> None:
        """The session's first calls (4.3). Raises TransportError when no master answers."""
        answer = await self._calls.handshake()
        self._session.knows_set_attr_on_close = self._session.rewrites_aside = answer.HasField("compatibility")
        await self._mounts.refresh()
        if self.config.metrics_report:
            self._session.nursery.start_soon(self._report_metrics)

    async def _report_metrics(self) -> None:
        """MetricsReport, for as long as the client is open (4.21)."""
        while True:
            await self.world.clock.sleep(self.config.metrics_interval_s)
            counters = {f"client_{name}": value for name, value in self.stats().items()}
            try:
                await self._calls.report_metrics(f"{self.hostname}/{self.client_name}", counters)
            except CurvfsError:
                self._session.stats["metrics_unreported"] += 1

    def _full(self, path: str) -> str:
        return paths.join(self._root, paths.normalize(path))

    def _for_reading(self, path: str) -> str:
        full = self._full(path)
        self._mounts.check(full)
        return full

    def _for_change(self, path: str) -> str:
        full = self._full(path)
        self._mounts.check(full, change=True)
        return full

    # ------------------------------------------------------------------------------------------------ directories

    async def mkdir(
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
        """Make a directory. ``parents`` makes missing parents (with the same mode) and accepts one that is there.

        Raises FileExists_, NotFound (no parent), NotADirectory.
        """
        full = self._for_change(path)
        if full == "/":
            if not parents:
                raise FileExists_("Cannot make /: it is the root directory.")
            return await self.stat(path)
        status = await self._calls.mkdir(
            full, mode=mode, parents=parents, xattrs=xattrs or {}, owner=owner, group=group, policy=policy
        )
        return convert.file_status(status, paths.normalize(path))

    async def stat(self, path: str) -> FileStatus:
        """Does not follow a final symlink. Raises NotFound."""
        return convert.file_status(await self._calls.status(self._for_reading(path)), paths.normalize(path))

    async def exists(self, path: str) -> bool:
        """Whether anything stands at ``path``; a symlink counts itself, not what it points to."""
        return await self._calls.exists(self._for_reading(path))

    async def list(self, path: str, *, start_after: str = "", limit: int | None = None) -> builtins.list[FileStatus]:
        """Entries of a directory in byte order of their names, from the first behind ``start_after`` on, at most
        ``limit``. Raises NotFound, NotADirectory."""
        found: builtins.list[FileStatus] = []
        if limit is not None and limit <= 0:
            return found
        async for page in self.list_iter(path, min(_PAGE, limit or _PAGE), start_after=start_after):
            found += page
            if limit is not None and len(found) >= limit:
                return found[:limit]
        return found

    def list_iter(
        self, path: str, page_size: int = _PAGE, *, start_after: str = ""
    ) -> AsyncIterator[builtins.list[FileStatus]]:
        """The same in pages of up to ``page_size`` entries, each fetched when it is asked for."""
        if page_size <= 0:
            raise InvalidRequest(f"Cannot list {path} in pages of {page_size} entries.")
        return Pages(self._calls, self._for_reading(path), paths.normalize(path), page_size, start_after)

    async def rename(self, src: str, dst: str, *, replace: bool = True, exchange: bool = False) -> None:
        """Rename atomically; as rename(2) does, onto an existing file or empty directory unless ``replace`` is False.

        ``exchange`` swaps the two. What would make a server lose data is decided here (hazards 1 and 6): the
        destination's parent must be a directory, and two names of one inode are left as they are.
        """
        source, target = self._for_change(src), self._for_change(dst)
        if self._root in (source, target):
            raise InvalidRequest(f"Cannot rename {source} to {target}: the root stays.", errno_=errno.EBUSY)
        self._mounts.check_rename(source, target)
        found: dict[str, pb.FileStatusProto | None] = {}

        async def look(full: str) -> None:
            found[full] = await self._calls.status_or_none(full)

        parent = paths.parent_of(target)
        await self._at_once([(look, full) for full in dict.fromkeys((source, target, parent))])
        status, there, above = found[source], found[target], found[parent]
        if status is None:
            raise NotFound(f"Cannot rename {source}: there is no such file.")
        if above is None:
            raise NotFound(f"Cannot rename {source} to {target}: {parent} does not exist.")
        if not above.is_dir:
            raise NotADirectory(f"Cannot rename {source} to {target}: {parent} is not a directory.")
        if paths.is_below(target, source) or (exchange and paths.is_below(source, target)):
            raise InvalidRequest(f"Cannot rename {source} to {target}: one lies inside the other.")
        if there is not None and not replace:
            raise FileExists_(f"Cannot rename {source} to {target}: the name is taken.")
        if there is None and exchange:
            raise NotFound(f"Cannot exchange {source} and {target}: the latter does not exist.")
        if there is not None and there.id == status.id:
            return
        flags = RENAME_EXCHANGE if exchange else 0 if replace else RENAME_NO_REPLACE
        await self._calls.rename(source, target, flags, inode_id=status.id)

    async def publish(self, status: FileStatus, dst: str) -> None:
        """Rename a file that was just made, as ``status`` told of it, to a name that must be free: one call, nothing is
        looked at first.

        Only for files that can be made again: where the directory of ``dst`` has become a file, a server may lose the
        source (hazard 1). Raises FileExists_; NotFound, or another RemoteError, without a source or a directory.
        """
        source, target = self._for_change(status.path), self._for_change(dst)
        self._mounts.check_rename(source, target)
        await self._calls.rename(source, target, RENAME_NO_REPLACE, inode_id=status.id)

    async def delete(self, path: str, *, recursive: bool = False) -> bool:
        """Delete a file, an empty directory, or with ``recursive`` a tree. False: it is gone, but an answer was lost,
        and nobody knows whether it was this call. Raises NotFound, DirectoryNotEmpty."""
        full = self._for_change(path)
        if full == self._root:
            raise InvalidRequest(f"Cannot delete {full}: the root stays.", errno_=errno.EBUSY)
        self._mounts.check_delete(full)
        return await self._calls.delete(full, recursive=recursive)

    async def free(self, path: str, *, recursive: bool = False) -> Freed:
        """Drop Curvine's copies of files that an under store holds, too (4.13); files that are in Curvine alone stay
        as they are. Their bytes can be read by a client of the under store only, then. Raises NotFound."""
        answer = await self._calls.free(self._for_change(path), recursive=recursive)
        return Freed(answer.inodes, answer.bytes)

    async def symlink(self, target: str, path: str, *, owner: str = "", group: str = "") -> FileStatus:
        """Make a symlink at ``path``; ``target`` is stored as it is. Raises FileExists_, NotFound (no parent)."""
        full = self._for_change(path)
        await self._parent_must_be_directory(full)
        await self._calls.symlink(target, full, owner=owner, group=group)
        return await self.stat(path)

    async def link(self, src: str, dst: str) -> FileStatus:
        """Give a file a second name. Raises FileExists_, NotFound, NotADirectory; EPERM for a directory.

        A server would make missing parents of ``dst`` (open to everybody); we do not.
        """
        source, target = self._for_change(src), self._for_change(dst)
        self._mounts.check_rename(source, target)
        status = await self._calls.status(source)
        if status.is_dir:
            raise InvalidRequest(f"Cannot link {source}: it is a directory.", errno_=errno.EPERM)
        await self._parent_must_be_directory(target)
        await self._calls.link(source, target, inode_id=status.id)
        return await self.stat(dst)

    async def _parent_must_be_directory(self, full: str) -> None:
        parent = paths.parent_of(full)
        if not (await self._calls.status(parent)).is_dir:
            raise NotADirectory(f"Cannot make {full}: {parent} is not a directory.")

    # ------------------------------------------------------------------------------------------------- attributes

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
    ) -> FileStatus:
        """Set what is given and nothing else; ``recursive`` applies owner, group and mode to a whole tree.

        Raises NotFound. Does not follow a final symlink.
        """
        full = self._for_change(path)
        with convert.sendable(f"set attributes of {full}"):
            options = pb.SetAttrOptsProto(
                recursive=recursive, remove_x_attr=remove_xattrs, add_x_attr=dict(xattrs or {})
            )
            if mode is not None:
                options.mode = mode & 0o7777
            if owner is not None:
                options.owner = owner
            if group is not None:
                options.group = group
            if atime_ms is not None:
                options.atime = atime_ms
            if mtime_ms is not None:
                options.mtime = mtime_ms
            if ttl_ms is not None:
                options.ttl_ms = ttl_ms
            if ttl_action is not None:
                options.ttl_action = int(ttl_action)  # type: ignore[assignment]
        return convert.file_status(await self._calls.set_attr(full, options), paths.normalize(path))

    async def get_lock(self, path: str, lock: FileLock) -> FileLock | None:
        """The first lock that stands in the way of ``lock``, or None (4.15)."""
        full = self._for_reading(path)
        conflict = await self._calls.get_lock(full, convert.lock_to_wire(lock, self.client_name))
        return None if conflict is None else convert.lock_from_wire(conflict)

    async def set_lock(self, path: str, lock: FileLock) -> FileLock | None:
        """Set (or with ``LockKind.UNLOCK`` release) a lock; the conflicting one where it cannot be had. It lapses
        after 5 minutes unless it is set again (4.15)."""
        full = self._for_reading(path)
        conflict = await self._calls.set_lock(full, convert.lock_to_wire(lock, self.client_name))
        return None if conflict is None else convert.lock_from_wire(conflict)

    def hold_lock(self, path: str, lock: FileLock, *, wait_s: float = 0.0, renew_s: float = RENEW_S) -> HeldLock:
        """An async context manager that has ``lock`` while it is entered, and sets it again before it lapses. Waits up
        to ``wait_s`` for others; raises InProgress (EAGAIN) when they still have it."""
        return HeldLock(self._session, self._calls, self._for_reading(path), lock, wait_s, renew_s)

    async def statfs(self) -> FilesystemInfo:
        """Space and workers of the whole cluster (4.18)."""
        return convert.filesystem_info(await self._calls.info())

    @property
    def under_stores(self) -> UnderStores:
        """Mounts of under stores and the jobs that load from them: the master's part of them, that is."""
        return self._under_stores

    async def mount_table(self) -> tuple[MountPoint, ...]:
        """Directories that are tied to an under store, as full paths (4.19)."""
        return await self._mounts.refresh()

    # ------------------------------------------------------------------------------------------------------ files

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
        policy: StoragePolicy | None = None,
        unique_name: bool = False,
    ) -> FileWriter:
        """Make a file and open it for writing. ``overwrite`` empties one that is there, which keeps its owner, group,
        mode, inode id and xattrs. ``parents`` makes missing directories (mode 0755). ``policy`` is the medium and the
        time to live, the settings' own by default.

        Two writers of one name share one block, so use unique names where that can happen (hazard 7). ``unique_name``
        promises that nobody else makes this name: then a file that an earlier attempt of this call made, whose answer
        was lost, is taken for what it is, where else FileExists_ says that it may be. Raises FileExists_,
        IsADirectory, NotFound (no parent), NotADirectory.
        """
        block_size_bytes = self.config.block_size_bytes if block_size_bytes is None else block_size_bytes
        replicas = self.config.replicas if replicas is None else replicas
        full = self._for_new(path, block_size_bytes, replicas)
        options = self._calls.create_options(
            block_size_bytes=block_size_bytes,
            replicas=replicas,
            mode=mode,
            owner=owner,
            group=group,
            xattrs=xattrs,
            policy=policy,
        )
        before = None
        if overwrite:
            before = await self._calls.status_or_none(full)
            if before is not None:
                self._must_be_file(before, full)
        if parents:
            await self._make_parents(full, owner, group)
        flags = O_WRONLY | O_CREAT | (O_TRUNC if overwrite else O_EXCL)
        answer = await self._calls.create(full, options, flags, unique_name=unique_name)
        status = convert.file_status(answer, paths.normalize(path))
        alone = before is None or before.is_complete
        return FileWriter(self._session, self._calls, full, status, (), created=before is None, alone=alone)

    async def create_ahead(self, names: Sequence[str]) -> builtins.list[FileWriter | CurvfsError]:
        """Make empty files with unique names and the settings' block size, to be written later by whoever needs one:
        two calls to the master for all of them (4.16). What each is to be, :meth:`FileWriter.give_attributes` says. A
        file's own failure stands in its place."""
        options = self._calls.create_options(
            block_size_bytes=self.config.block_size_bytes, replicas=self.config.replicas, mode=0o600
        )
        plans: builtins.list[Plan | CurvfsError] = []
        for name in names:
            try:
                full = self._for_new(name, self.config.block_size_bytes, self.config.replicas)
                plans.append(Plan(full, paths.normalize(name), self.config.block_size_bytes, options))
            except CurvfsError as error:
                plans.append(error)
        return await create_ahead(self._session, self._calls, plans)

    async def mknod(
        self, path: str, kind: FileKind, mode: int = 0o644, rdev: int = 0, *, owner: str = "", group: str = ""
    ) -> FileStatus:
        """Make a special file: a FIFO, a socket, or a device with number ``rdev`` (32 bits), or an empty regular file.

        v0.3.2-alpha knows no special files, and says so by making a regular one: that is removed, and Unsupported
        raised. Raises FileExists_, NotFound (no parent), NotADirectory, InvalidRequest for other kinds.
        """
        if kind is FileKind.FILE:
            await (await self.create(path, mode=mode, owner=owner, group=group)).close()
            return await self.stat(path)
        if kind not in SPECIAL_KINDS or not 0 <= rdev < 1 << 32:
            raise InvalidRequest(f"Cannot make {path}: {kind.name} with device number {rdev} is no special file.")
        full = self._for_new(path, self.config.block_size_bytes, 1)
        options = self._calls.create_options(
            block_size_bytes=self.config.block_size_bytes,
            replicas=1,
            mode=mode & 0o7777,
            owner=owner,
            group=group,
            xattrs=convert.device_xattr(rdev),
            kind=kind,
        )
        await self._parent_must_be_directory(full)
        made = await self._calls.create(full, options, O_WRONLY | O_CREAT | O_EXCL, unique_name=False)
        if int(made.file_type) != int(kind):
            await self._calls.delete(full, recursive=False)
            raise Unsupported(f"Cannot make {path}: this Curvine version knows no special files.", errno_=errno.EPERM)
        return convert.file_status(made, paths.normalize(path))

    def _for_new(self, path: str, block_size_bytes: int, replicas: int) -> str:
        full = self._for_change(path)
        if full == self._root:
            raise IsADirectory(f"Cannot create {full}: it is the root directory.")
        if not MIN_BLOCK_SIZE_BYTES <= block_size_bytes <= MAX_BLOCK_SIZE_BYTES or not 1 <= replicas <= 99:
            raise InvalidRequest(
                f"Cannot create {full} with blocks of {block_size_bytes} bytes and {replicas} replicas; blocks must "
                f"have {MIN_BLOCK_SIZE_BYTES} to {MAX_BLOCK_SIZE_BYTES} bytes, and there must be 1 to 99 replicas."
            )
        return full

    async def _make_parents(self, full: str, owner: str, group: str) -> None:
        parent = paths.parent_of(full)
        if parent != "/":
            await self._calls.mkdir(parent, mode=0o755, parents=True, xattrs={}, owner=owner, group=group)

    @staticmethod
    def _must_be_file(status: pb.FileStatusProto, full: str) -> None:
        """Only regular files are opened for writing or resized: a server does it to others, too, and may hang for
        good (hazard 2)."""
        if status.is_dir:
            raise IsADirectory(f"Cannot write {full}: it is a directory.")
        kind = int(status.file_type)
        if kind != FileKind.FILE:
            link = kind == FileKind.SYMLINK
            raise InvalidRequest(
                f"Cannot write {full}: it is {'a symlink; write to what it points to' if link else 'a special file'}.",
                errno_=errno.ELOOP if link else errno.ENXIO,
            )
        if status.block_size <= 0:
            raise InvalidRequest(f"Cannot write {full}: its block size is {status.block_size}; make it anew.")

    async def open(self, path: str | Located) -> FileReader:
        """Open for reading; a location got earlier costs no call. Raises NotFound, IsADirectory, InvalidRequest for a
        symlink (ELOOP) and for a special file (ENXIO), which would read as empty."""
        full, located = await self._locate(path)
        if located.status.kind is not FileKind.FILE:
            link = located.status.kind is FileKind.SYMLINK
            raise InvalidRequest(
                f"Cannot read {full}: it is {'a symlink; read what it points to' if link else 'a special file'}.",
                errno_=errno.ELOOP if link else errno.ENXIO,
            )
        return FileReader(self._session, self._calls, full, located)

    async def open_for_write(self, path: str, *, append: bool = False, truncate: bool = False) -> FileWriter:
        """Open an existing file for writing. ``append`` starts at its end and stays there, ``truncate`` empties it.

        Raises NotFound, IsADirectory, InvalidRequest for what is no regular file, and Unsupported for a file whose
        bytes are in an under store alone, unless all of them are replaced.
        """
        full = self._for_change(path)
        before = await self._calls.status(full)
        self._must_be_file(before, full)
        if before.storage_policy.state == pb.STORAGE_STATE_PROTO_UFS and before.len and not truncate:
            # Opened for writing it would not be the under store's any more, and its bytes nowhere (4.5, 4.19).
            raise Unsupported(
                f"Cannot write {full}: its bytes are in the under store only; load the file into Curvine first, or "
                "replace all of it.",
                kind=KIND_UNSUPPORTED_UFS_READ,
                errno_=errno.EOPNOTSUPP,
            )
        self._session.rewrites_aside |= before.HasField("ctime")  # v0.4 or later (8.4)
        options = self._calls.create_options(
            block_size_bytes=before.block_size, replicas=max(1, before.replicas), mode=before.mode
        )
        flags = O_WRONLY | (O_APPEND if append else 0) | (O_TRUNC if truncate else 0)
        answer = await self._calls.open_for_write(full, options, flags)
        status = convert.file_status(answer.status, paths.normalize(path))
        if status.id != before.id:
            self._must_be_file(answer.status, full)
        writer = FileWriter(
            self._session,
            self._calls,
            full,
            status,
            answer.block_locs,
            created=truncate,
            alone=before.is_complete and before.id == status.id,
            append=append,
        )
        if any(located.block.block_size != status.block_size_bytes for located in answer.block_locs[:-1]):
            await writer.abort()
            raise InvalidRequest(f"Cannot write {full}: a block before its last is not full; copy it to a new file.")
        return writer

    async def truncate(self, path: str, length_bytes: int) -> FileStatus:
        """Cut or extend a file to ``length_bytes`` (4.10); what is new reads as zeros and takes no room."""
        if length_bytes < 0:
            raise InvalidRequest(f"Cannot resize {path} to {length_bytes} bytes: that is negative.")
        check_length(length_bytes, path)
        async with await self.open_for_write(path) as writer:
            await writer.truncate(length_bytes)
        return await self.stat(path)

    async def fallocate(self, path: str, offset_bytes: int, length_bytes: int) -> FileStatus:
        """What fallocate(2) does with mode 0 (4.10): a file that ends before ``offset_bytes + length_bytes`` is
        extended to that, if the cluster has room for it now (OutOfSpace if not); a longer one stays as it is. What is
        new reads as zeros. No other mode exists: Curvine cannot make holes, and refuses or spoils the rest."""
        end_bytes = offset_bytes + length_bytes
        if offset_bytes < 0 or length_bytes <= 0:
            raise InvalidRequest(f"Cannot allocate {length_bytes} bytes at {offset_bytes} of {path}.")
        check_length(end_bytes, path)
        async with await self.open_for_write(path) as writer:
            await writer.allocate(end_bytes)
        return await self.stat(path)

    async def locate(self, path: str) -> Located:
        """Status and blocks (GetBlockLocations). Raises NotFound, IsADirectory."""
        full = self._for_reading(path)
        return convert.located_in(await self._calls.encoded_locations(full), paths.normalize(path))

    async def locate_many(self, names: Sequence[str]) -> builtins.list[Located | CurvfsError]:
        """:meth:`locate` of all paths, pipelined: a few round trips. A path's own failure stands in its place."""
        results: builtins.list[Located | CurvfsError] = []
        checked: builtins.list[str | CurvfsError] = []
        for name in names:
            try:
                checked.append(self._for_reading(name))
            except CurvfsError as error:
                checked.append(error)
        asked = [full for full in checked if isinstance(full, str)]
        answers = iter(await self._calls.block_locations_many(asked))
        for name, full in zip(names, checked, strict=True):
            answer = next(answers) if isinstance(full, str) else full
            if isinstance(answer, CurvfsError):
                results.append(answer)
                continue
            try:
                results.append(convert.located(answer, paths.normalize(name)))
            except CurvfsError as error:
                results.append(error)
        return results

    async def _locate(self, path: str | Located) -> tuple[str, Located]:
        if isinstance(path, Located):
            return self._full(path.status.path), path
        return self._full(path), await self.locate(path)

    # ---------------------------------------------------------------------------------------------------- extents

    async def open_extents(self, path: str | Located, *, direct: bool = False) -> ReadExtents:
        """Open a file by extents: verified descriptors of the blocks that lie on this machine. ``direct`` asks for
        O_DIRECT descriptors; a file system that refuses it gives buffered ones, marked so and counted."""
        result = (await self.open_extents_many([path], direct=direct))[0]
        if isinstance(result, CurvfsError):
            raise result
        return result

    async def open_extents_many(
        self, files: Sequence[str | Located], *, direct: bool = False
    ) -> builtins.list[ReadExtents | CurvfsError]:
        """:meth:`open_extents` of many files, pipelined: one round trip for the locations that are not given and one
        to each worker. A file's own failure stands in its place."""
        names = [file for file in files if not isinstance(file, Located)]
        located = iter(await self.locate_many(names) if names else ())
        found = [file if isinstance(file, Located) else next(located) for file in files]
        to_open = [(self._full(file.status.path), file) for file in found if isinstance(file, Located)]
        opened = iter(await open_extents(self._session, self._calls, to_open, direct=direct))
        return [file if isinstance(file, CurvfsError) else next(opened) for file in found]

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
        policy: StoragePolicy | None = None,
        unique_name: bool = True,
    ) -> WriteExtent:
        """Make a file of one block of ``size_bytes``, to be written once: through a verified local descriptor where
        there is one. The block size is ``size_bytes`` rounded up to 4096, at least 1 MiB.

        ``path`` must be a name that nobody else makes (a staging name), unless ``unique_name`` is False: see
        :meth:`create`. Raises FileExists_.
        """
        if parents:
            await self._make_parents(self._for_change(path), owner, group)
        extent = (
            await self.create_extents_many(
                [NewExtent(path, size_bytes, dict(xattrs or {}))],
                direct=direct,
                mode=mode,
                owner=owner,
                group=group,
                policy=policy,
                unique_names=unique_name,
            )
        )[0]
        if isinstance(extent, CurvfsError):
            raise extent
        return extent

    async def create_extents_many(
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
    ) -> builtins.list[WriteExtent | CurvfsError]:
        """:meth:`create_extent` of many files with two calls to the master for all of them (4.16). A file's own
        failure stands in its place; :meth:`commit_extents_many` commits them with one call. ``on_worker``: on that
        worker or not at all, whatever :attr:`placement` says of it. ``worker_timeout_s`` bounds each exchange with a
        worker where that is less than ``data_timeout_s``."""
        plans = self._plans(files, mode=mode, owner=owner, group=group, policy=policy)
        return await create_extents(
            self._session,
            self._calls,
            plans,
            direct=direct,
            unique_names=unique_names,
            on_worker=on_worker,
            worker_timeout_s=worker_timeout_s,
        )

    async def write_files(
        self,
        files: Sequence[NewFile],
        *,
        mode: int = 0o644,
        owner: str = "",
        group: str = "",
        policy: StoragePolicy | None = None,
        unique_names: bool = False,
    ) -> builtins.list[FileStatus | CurvfsError]:
        """Make many files whole: three calls to the master for all of them, and one stream to each worker for those of
        up to 1 MiB (4.16). Exclusive, as :meth:`create` is; ``unique_names`` as there. A file's own failure stands in
        its place, and leaves no file behind; nothing of it is published before all of it is."""
        contents = [memoryview(file.content).cast("B") for file in files]
        extents = [
            NewExtent(file.path, len(content), file.xattrs) for file, content in zip(files, contents, strict=True)
        ]
        plans = self._plans(extents, mode=mode, owner=owner, group=group, policy=policy)
        return await write_files(self._session, self._calls, plans, contents, unique_names=unique_names)

    def _plans(
        self, files: Sequence[NewExtent], *, mode: int, owner: str, group: str, policy: StoragePolicy | None
    ) -> builtins.list[Plan | CurvfsError]:
        """Files of one block as they are asked for; one that cannot be stands as its error."""

        def plan(file: NewExtent) -> Plan:
            size_bytes, path = file.size_bytes, file.path
            block_size_bytes = max(MIN_BLOCK_SIZE_BYTES, align_up(size_bytes, _SECTOR_BYTES))
            if size_bytes < 0 or block_size_bytes > MAX_BLOCK_SIZE_BYTES:
                raise InvalidRequest(f"Cannot create {path} with one block of {size_bytes} bytes; use create().")
            full = self._for_new(path, block_size_bytes, self.config.replicas)
            options = self._calls.create_options(
                block_size_bytes=block_size_bytes,
                replicas=self.config.replicas,
                mode=mode,
                owner=owner,
                group=group,
                xattrs=file.xattrs,
                policy=policy,
            )
            return Plan(full, paths.normalize(path), size_bytes, options)

        plans: builtins.list[Plan | CurvfsError] = []
        for file in files:
            try:
                plans.append(plan(file))
            except CurvfsError as error:
                plans.append(error)
        return plans

    async def commit_extents_many(self, extents: Sequence[WriteExtent]) -> builtins.list[FileStatus | CurvfsError]:
        """:meth:`WriteExtent.commit` of many, with one call to the master. A file's own failure stands in its place."""
        return await commit_extents(self._session, self._calls, extents)

    @staticmethod
    async def _at_once(calls: Sequence[tuple[Any, str]]) -> None:
        """Run calls together; the first failure is raised when all are done."""
        failures: builtins.list[CurvfsError] = []

        async def one(function: Any, argument: str) -> None:
            try:
                await function(argument)
            except CurvfsError as error:
                failures.append(error)

        async with trio.open_nursery() as nursery:
            for function, argument in calls:
                nursery.start_soon(one, function, argument)
        if failures:
            raise failures[0]


@asynccontextmanager
async def open_filesystem(
    url_or_config: str | ClientConfig, *, world: World | None = None, **overrides: Any
) -> AsyncIterator[CurvineFileSystem]:
    """Connect, and answer the file system; leaving the block closes every connection.

    ``url_or_config``: ``curvine://host:port,host:port/root?name=value``, or settings that are ready. ``overrides`` are
    settings by their names in :class:`ClientConfig` or in a URL. Raises ConfigError for what cannot be meant, and
    TransportError, within ``connect_timeout_s``, when no master answers.
    """
    config = resolve_config(url_or_config, **overrides)
    failure: BaseException | None = None
    async with trio.open_nursery() as nursery:
        session = Session(config, World.real() if world is None else world, nursery)
        # What the body raises is carried around the nursery, which would wrap it in an exception group.
        try:
            filesystem = CurvineFileSystem(session)
            await filesystem.connect()
            yield filesystem
        except BaseException as error:
            failure = error
        finally:
            with trio.move_on_after(config.close_timeout_s, shield=True):
                await session.aclose()
            nursery.cancel_scope.cancel()
    if failure is not None:
        raise failure
