"""What the client hands out: plain immutable records, free of wire types.

Units are in the names: ``_bytes``, ``_ms`` (milliseconds since the Unix epoch), ``_s``.
Paths in records are the caller's: absolute below the URL's root, normalised.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field

from curvfs.buffers import Buffer


class FileKind(enum.IntEnum):
    """What stands at a path (FileTypeProto, specification section 3.2; numbers as on the wire)."""

    DIRECTORY = 0
    FILE = 1
    SYMLINK = 2
    STREAM = 3
    AGGREGATE = 4
    OBJECT = 5
    FIFO = 6
    CHARACTER_DEVICE = 7
    BLOCK_DEVICE = 8
    SOCKET = 9


#: Kinds that CreateFile makes beside regular files (4.5).
SPECIAL_KINDS = frozenset((FileKind.FIFO, FileKind.CHARACTER_DEVICE, FileKind.BLOCK_DEVICE, FileKind.SOCKET))


class StorageType(enum.IntEnum):
    """Medium of a block (StorageTypeProto, 3.2)."""

    MEM = 0
    SSD = 1
    HDD = 2
    UFS = 3
    DISK = 4
    SPDK_DISK = 5


class StorageState(enum.IntEnum):
    """Where a file's bytes are (StorageStateProto, 3.2): in Curvine, only in the under store, or in both."""

    CURVINE = 1
    UFS = 2
    BOTH = 3


class TtlAction(enum.IntEnum):
    """What happens when a file's time to live has passed (4.20)."""

    NONE = 0
    DELETE = 1
    FREE = 2


@dataclass(frozen=True, slots=True)
class StoragePolicy:
    """What a new file asks for (StoragePolicyProto, 3.3 and 4.20): a medium, and what happens ``ttl_ms`` after its
    last change (0: nothing ever; a master looks once an hour by default)."""

    storage_type: StorageType = StorageType.DISK
    ttl_ms: int = 0
    ttl_action: TtlAction = TtlAction.NONE


DEFAULT_POLICY = StoragePolicy()


@dataclass(frozen=True, slots=True)
class Freed:
    """What a Free dropped (FreeResultProto, 3.3)."""

    inodes: int
    size_bytes: int


@dataclass(frozen=True, slots=True)
class NewExtent:
    """One file of :meth:`CurvineFileSystem.create_extents_many`: as the arguments of ``create_extent``."""

    path: str
    size_bytes: int
    xattrs: dict[str, bytes] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class NewFile:
    """One file of :meth:`CurvineFileSystem.write_files`: its name and all of its content."""

    path: str
    content: Buffer = field(repr=False)
    xattrs: dict[str, bytes] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class FileStatus:
    """One inode as the master sees it (FileStatusProto, 3.3).

    ``length_bytes`` of a directory is 0 here; its number of entries is ``children``. ``ctime_ms`` falls back to
    ``mtime_ms`` where the server does not tell it. ``is_complete`` is False while any writer is registered, for good
    after a writer died: it says nothing about whether the file can be read (4.3). ``xattrs`` are without the internal
    names of section 4.14, and not to be changed: those who ask for the same file may be given the same record.
    """

    id: int
    path: str
    name: str
    kind: FileKind
    length_bytes: int
    mode: int
    owner: str
    group: str
    mtime_ms: int
    atime_ms: int
    ctime_ms: int
    nlink: int
    block_size_bytes: int
    replicas: int
    is_complete: bool
    xattrs: dict[str, bytes] = field(default_factory=dict)
    symlink_target: str | None = None
    children: int = 0
    storage_type: StorageType = StorageType.DISK
    storage_state: StorageState = StorageState.CURVINE
    ttl_ms: int = 0
    ttl_action: TtlAction = TtlAction.NONE
    device: int = 0

    @property
    def is_dir(self) -> bool:
        return self.kind is FileKind.DIRECTORY

    @property
    def is_file(self) -> bool:
        """A regular file: the one kind that has blocks."""
        return self.kind is FileKind.FILE


@dataclass(frozen=True, slots=True)
class WorkerAddress:
    """Where a worker listens. ``address`` may be a DNS name; identity is ``worker_id`` (3.3)."""

    worker_id: int
    hostname: str
    address: str
    port: int


@dataclass(frozen=True, slots=True)
class BlockLocation:
    """One block of a file: which bytes it holds and who serves them (LocatedBlockProto, 3.3 and the table of 4.4).

    A block without workers is a hole (``is_hole``: zeros, no call needed), not written yet (length 0), or lost. An
    ``is_resized`` block was cut or extended and its workers may not know yet: what they lack reads as zeros.
    """

    block_id: int
    file_offset_bytes: int
    length_bytes: int
    workers: tuple[WorkerAddress, ...]
    storage_type: StorageType = StorageType.DISK
    is_hole: bool = False
    is_resized: bool = False


@dataclass(frozen=True, slots=True)
class Located:
    """Answer of GetBlockLocations: the file and its blocks in file order."""

    status: FileStatus
    blocks: tuple[BlockLocation, ...]


@dataclass(frozen=True, slots=True)
class WorkerInfo:
    """One worker and its space (WorkerInfoProto, 3.3). ``state``: live, blacklisted, decommissioned or lost."""

    address: WorkerAddress
    state: str
    capacity_bytes: int
    available_bytes: int
    used_bytes: int
    software_version: str = ""


@dataclass(frozen=True, slots=True)
class FilesystemInfo:
    """Answer of GetFilesystemInfo (4.18)."""

    capacity_bytes: int
    available_bytes: int
    used_bytes: int
    files: int
    directories: int
    blocks: int
    active_master: str
    workers: tuple[WorkerInfo, ...]
    server_version: str = ""

    @property
    def live_workers(self) -> tuple[WorkerInfo, ...]:
        return tuple(worker for worker in self.workers if worker.state == "live")


class LockKind(enum.IntEnum):
    """Equal to Linux F_RDLCK, F_WRLCK, F_UNLCK (3.2)."""

    READ = 0
    WRITE = 1
    UNLOCK = 2


@dataclass(frozen=True, slots=True)
class FileLock:
    """A range or whole-file lock (FileLockProto, 3.3 and 4.15).

    The range is inclusive; ``end`` 2**64 - 1 means to the end of the file. A lock lapses 5 minutes after it was
    set: whoever holds one sets it again before that.
    """

    kind: LockKind
    owner_id: int
    pid: int = 0
    start: int = 0
    end: int = 2**64 - 1
    flock: bool = False
    client_id: str = ""
    acquired_ms: int = 0


@dataclass(frozen=True, slots=True)
class MountPoint:
    """A Curvine directory tied to an under store (MountInfoProto, 3.6 and 4.19). ``path`` is a full path of the
    namespace. ``properties`` may hold credentials: they are not shown, and not compared."""

    path: str
    ufs_path: str
    cache_mode: bool
    read_only: bool
    mount_id: int = 0
    properties: dict[str, str] = field(default_factory=dict, repr=False, compare=False)


@dataclass(frozen=True, slots=True)
class MountOptions:
    """How a directory is tied to an under store (MountOptionsProto, 3.6 and 4.19). What is None is left to the master.

    ``cache_mode``: the under store tells what is there, and Curvine holds copies; else the master does. ``properties``
    are the store's (endpoint, region, credentials), ``remove_properties`` are for updates.
    """

    cache_mode: bool
    read_only: bool | None = None
    properties: dict[str, str] = field(default_factory=dict, repr=False)
    remove_properties: tuple[str, ...] = ()
    read_verify: bool = False
    ttl_ms: int | None = None
    ttl_action: TtlAction | None = None
    storage_type: StorageType | None = None
    block_size_bytes: int | None = None
    replicas: int | None = None
    auto_cache: bool | None = None
    write_cache: bool | None = None


class JobState(enum.IntEnum):
    """How far a job has come (JobTaskStateProto, 3.2)."""

    UNKNOWN = 0
    PENDING = 1
    LOADING = 2
    COMPLETED = 3
    FAILED = 4
    CANCELED = 5
    PARTIAL_SUCCESS = 6


@dataclass(frozen=True, slots=True)
class LoadJob:
    """What a master is asked to load from an under store (3.8). What is None is left to the master."""

    source_path: str
    target_path: str | None = None
    replicas: int | None = None
    block_size_bytes: int | None = None
    storage_type: StorageType | None = None
    ttl_ms: int | None = None
    ttl_action: TtlAction | None = None
    overwrite: bool | None = None


@dataclass(frozen=True, slots=True)
class JobStatus:
    """A job as the master sees it (SubmitJobResponse and GetJobStatusResponse, 3.8). The paths are the master's."""

    job_id: str
    state: JobState
    source_path: str
    target_path: str
    loaded_bytes: int = 0
    total_bytes: int = 0
    updated_ms: int = 0
    message: str = ""


@dataclass(frozen=True, slots=True)
class LocalExtent:
    """Bytes of a file that lie in a verified local block file, open on ``fd``.

    File bytes ``[file_offset_bytes, file_offset_bytes + length_bytes)`` are bytes ``[0, length_bytes)`` of ``fd``; a
    block file that is physically shorter reads as zeros up to ``length_bytes``. ``direct`` says whether the descriptor
    was really opened with ``O_DIRECT``. The descriptor belongs to the extents object that lent it.
    """

    fd: int
    file_offset_bytes: int
    length_bytes: int
    direct: bool = False
    block_id: int = 0


@dataclass(frozen=True, slots=True)
class RemoteExtent:
    """Bytes of a file that must be read through :meth:`ReadExtents.readinto`. ``reason`` says why they are not
    local: ``off``, ``other_host``, ``hole``, ``lost``, or one of the counted refusals of the short-circuit check."""

    file_offset_bytes: int
    length_bytes: int
    reason: str
    block_id: int = 0


Extent = LocalExtent | RemoteExtent
