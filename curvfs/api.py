"""The public face of curvfs. kvstore, mount and tools import this, ``errors``, ``units``, ``config`` and ``world``."""

from __future__ import annotations

from curvfs.client.extents import ReadExtents, WriteExtent
from curvfs.client.fileobject import FileObject
from curvfs.client.filesystem import CurvineFileSystem, open_filesystem
from curvfs.client.locks import HeldLock
from curvfs.client.placement import Placement
from curvfs.client.reader import FileReader
from curvfs.client.records import (
    BlockLocation,
    Extent,
    FileKind,
    FileLock,
    FileStatus,
    FilesystemInfo,
    Freed,
    JobState,
    JobStatus,
    LoadJob,
    LocalExtent,
    Located,
    LockKind,
    MountOptions,
    MountPoint,
    NewExtent,
    NewFile,
    RemoteExtent,
    StoragePolicy,
    StorageState,
    StorageType,
    TtlAction,
    WorkerAddress,
    WorkerInfo,
)
from curvfs.client.sync import (
    Portal,
    SyncFileReader,
    SyncFileSystem,
    SyncFileWriter,
    SyncReadExtents,
    SyncWriteExtent,
)
from curvfs.client.syncstores import SyncUnderStores
from curvfs.client.understores import UnderStores
from curvfs.client.writer import FileWriter
from curvfs.config import ClientConfig, Settings, cluster_table, gather_settings, parse_url
from curvfs.server.embedded import EmbeddedServer

__all__ = [
    "BlockLocation",
    "ClientConfig",
    "CurvineFileSystem",
    "EmbeddedServer",
    "Extent",
    "FileKind",
    "FileLock",
    "FileObject",
    "FileReader",
    "FileStatus",
    "FileWriter",
    "FilesystemInfo",
    "Freed",
    "HeldLock",
    "JobState",
    "JobStatus",
    "LoadJob",
    "LocalExtent",
    "Located",
    "LockKind",
    "MountOptions",
    "MountPoint",
    "NewExtent",
    "NewFile",
    "Placement",
    "Portal",
    "ReadExtents",
    "RemoteExtent",
    "Settings",
    "StoragePolicy",
    "StorageState",
    "StorageType",
    "SyncFileReader",
    "SyncFileSystem",
    "SyncFileWriter",
    "SyncReadExtents",
    "SyncUnderStores",
    "SyncWriteExtent",
    "TtlAction",
    "UnderStores",
    "WorkerAddress",
    "WorkerInfo",
    "WriteExtent",
    "cluster_table",
    "gather_settings",
    "open_filesystem",
    "parse_url",
]
