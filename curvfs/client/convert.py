"""Between wire messages and the records we hand out. Numbers that nobody knows read as the servers read them."""

from __future__ import annotations

import enum
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from typing import Any, TypeVar, cast

from curvfs.client.paths import name_of
from curvfs.client.records import (
    BlockLocation,
    FileKind,
    FileLock,
    FileStatus,
    FilesystemInfo,
    JobState,
    JobStatus,
    LoadJob,
    Located,
    LockKind,
    MountOptions,
    MountPoint,
    StorageState,
    StorageType,
    TtlAction,
    WorkerAddress,
    WorkerInfo,
)
from curvfs.errors import InvalidRequest, RemoteProtocolError
from curvfs.wire.messages import decode, pb

E = TypeVar("E", bound=enum.IntEnum)

#: Names that servers and the Rust mount keep for themselves (specification 4.14).
_RDEV_XATTR = "curvine.rdev"
_INTERNAL_XATTRS = frozenset((_RDEV_XATTR, "curvine.i_flags"))
_U32 = struct.Struct("<I")
#: Answers up to this length are recognised when they come again, so many of them.
_KNOWN_BYTES = 2048
_KNOWN_COUNT = 1024


@contextmanager
def sendable(doing: str) -> Iterator[None]:
    """Around the making of a message from what a caller gave: a number that does not fit its field, or text that is
    not Unicode, is an InvalidRequest."""
    try:
        yield
    except (ValueError, OverflowError) as error:
        reason = str(error)
        raise InvalidRequest(f"Cannot {doing}: {reason[:1].lower()}{reason[1:].rstrip('.')}.") from error


def device_xattr(number: int) -> dict[str, bytes]:
    """What a special file is made with (4.5)."""
    return {_RDEV_XATTR: _U32.pack(number)}


def _enum(cls: type[E], number: int, unknown: E) -> E:
    # Four for every entry of a listing: a dictionary, because a call of the class takes a fifth of the whole.
    return cast("E", cls._value2member_map_.get(number, unknown))


def storage_type(number: int) -> StorageType:
    return _enum(StorageType, number, StorageType.DISK)


def file_status(status: pb.FileStatusProto, path: str) -> FileStatus:
    """``path`` is the caller's name for the inode; the server's is below the URL's root."""
    kind = FileKind.DIRECTORY if status.is_dir else _enum(FileKind, status.file_type, FileKind.FILE)
    xattrs = dict(status.x_attr) if status.x_attr else {}
    rdev = xattrs.get(_RDEV_XATTR, b"")
    policy = status.storage_policy
    return FileStatus(
        id=status.id,
        path=path,
        name=name_of(path),
        kind=kind,
        length_bytes=0 if status.is_dir else status.len,
        mode=status.mode & 0o7777,
        owner=status.owner,
        group=status.group,
        mtime_ms=status.mtime,
        atime_ms=status.atime,
        ctime_ms=status.ctime if status.HasField("ctime") else status.mtime,
        nlink=status.nlink,
        block_size_bytes=status.block_size,
        replicas=status.replicas,
        is_complete=status.is_complete,
        xattrs={
            name: value for name, value in xattrs.items() if not name.startswith("\0") and name not in _INTERNAL_XATTRS
        },
        symlink_target=status.target if status.HasField("target") else None,
        children=status.children_num,
        storage_type=storage_type(policy.storage_type),
        storage_state=_enum(StorageState, policy.state, StorageState.CURVINE),
        ttl_ms=policy.ttl_ms,
        ttl_action=_enum(TtlAction, policy.ttl_action, TtlAction.NONE),
        device=_U32.unpack(rdev)[0] if len(rdev) == _U32.size else 0,
    )


def worker_address(address: pb.WorkerAddressProto) -> WorkerAddress:
    return WorkerAddress(address.worker_id, address.hostname, address.ip_addr or address.hostname, address.rpc_port)


def located(answer: pb.FileBlocksProto, path: str) -> Located:
    """Blocks with their offsets: block lengths accumulated (4.11). Raises RemoteProtocolError on a negative one."""
    blocks = []
    offset = 0
    for entry in answer.block_locs:
        block = entry.block
        if block.block_size < 0:
            raise RemoteProtocolError(f"The master gives block {block.id} of {path} a length of {block.block_size}.")
        pending = block.HasField("alloc_opts")
        blocks.append(
            BlockLocation(
                block_id=block.id,
                file_offset_bytes=offset,
                length_bytes=block.block_size,
                workers=tuple(map(worker_address, entry.locs)),
                storage_type=storage_type(block.storage_type),
                is_hole=pending and not entry.locs,
                is_resized=pending and bool(entry.locs),
            )
        )
        offset += block.block_size
    return Located(file_status(answer.status, path), tuple(blocks))


def _located_in(answer: bytes, path: str) -> Located:
    return located(decode(pb.GetBlockLocationsResponse, answer).blocks, path)


_known_located = lru_cache(_KNOWN_COUNT)(_located_in)


def located_in(answer: bytes, path: str) -> Located:
    """The same from the encoded answer. Who opens small files again and again gets the same answers, and to read one
    costs more than to ask for it: what came before is known. Raises RemoteProtocolError."""
    return (_known_located if len(answer) <= _KNOWN_BYTES else _located_in)(answer, path)


def filesystem_info(answer: pb.GetFilesystemInfoResponse) -> FilesystemInfo:
    """Live capacity where the server tells it (4.18)."""
    workers = tuple(
        WorkerInfo(
            worker_address(worker.address),
            state,
            worker.capacity,
            worker.available,
            worker.fs_used,
            worker.software_version,
        )
        for state, group in (
            ("live", answer.live_workers),
            ("blacklisted", answer.blacklist_workers),
            ("decommissioned", answer.decommission_workers),
            ("lost", answer.lost_workers),
        )
        for worker in group
    )
    has = answer.HasField
    return FilesystemInfo(
        capacity_bytes=answer.allocatable_capacity if has("allocatable_capacity") else answer.capacity,
        available_bytes=answer.allocatable_available if has("allocatable_available") else answer.available,
        used_bytes=answer.fs_used,
        files=answer.inode_file_num,
        directories=answer.inode_dir_num,
        blocks=answer.block_num,
        active_master=answer.active_master,
        workers=workers,
        server_version=answer.compatibility.server.release_version if has("compatibility") else "",
    )


def lock_to_wire(lock: FileLock, client_id: str) -> pb.FileLockProto:
    if lock.start > lock.end:
        raise InvalidRequest(f"Cannot lock {lock.start} to {lock.end}: the range ends before it starts.")
    with sendable(f"lock {lock.start} to {lock.end} for {lock.owner_id}"):
        return pb.FileLockProto(
            client_id=client_id,
            owner_id=lock.owner_id,
            pid=lock.pid,
            acquire_time=0,
            lock_type=int(lock.kind),  # type: ignore[arg-type]
            lock_flags=int(lock.flock),  # type: ignore[arg-type]
            start=lock.start,
            end=lock.end,
        )


def lock_from_wire(lock: pb.FileLockProto) -> FileLock:
    return FileLock(
        kind=_enum(LockKind, lock.lock_type, LockKind.READ),
        owner_id=lock.owner_id,
        pid=lock.pid,
        start=lock.start,
        end=lock.end,
        flock=bool(lock.lock_flags),
        client_id=lock.client_id,
        acquired_ms=lock.acquire_time,
    )


def mount_point(info: pb.MountInfoProto) -> MountPoint:
    """``path`` is a full path of the Curvine namespace. Read-only is the declared default (3.6)."""
    return MountPoint(
        path=info.cv_path,
        ufs_path=info.ufs_path,
        cache_mode=info.write_type == pb.WRITE_TYPE_PROTO_CACHE_MODE,
        read_only=info.access_mode == pb.ACCESS_MODE_PROTO_READ_ONLY,
        mount_id=info.mount_id,
        properties=dict(info.properties),
    )


def mount_options(options: MountOptions, *, update: bool) -> pb.MountOptionsProto:
    access = pb.ACCESS_MODE_PROTO_READ_ONLY if options.read_only else pb.ACCESS_MODE_PROTO_READ_WRITE
    return pb.MountOptionsProto(
        update=update,
        add_properties=options.properties,
        remove_properties=options.remove_properties,
        ttl_ms=options.ttl_ms,
        ttl_action=_number(options.ttl_action),
        read_verify_ufs=options.read_verify,
        storage_type=_number(options.storage_type),
        block_size=options.block_size_bytes,
        replicas=options.replicas,
        write_type=pb.WRITE_TYPE_PROTO_CACHE_MODE if options.cache_mode else pb.WRITE_TYPE_PROTO_FS_MODE,
        auto_cache=_number(options.auto_cache),
        access_mode=None if options.read_only is None else access,
        write_cache=_number(options.write_cache),
    )


def load_command(job: LoadJob) -> bytes:
    """The ``job_command`` of a load job (3.8): bincode 1, that is little-endian numbers of fixed width, strings behind
    their length (u64), options behind a tag (u8), enums as their number (u32)."""

    def text(value: str) -> bytes:
        encoded = value.encode()
        return struct.pack("<Q", len(encoded)) + encoded

    def option(form: str, value: int | None) -> bytes:
        return b"\0" if value is None else b"\1" + struct.pack(f"<{form}", value)

    return b"".join(
        (
            text(job.source_path),
            b"\0" if job.target_path is None else b"\1" + text(job.target_path),
            option("i", job.replicas),
            option("q", job.block_size_bytes),
            option("I", job.storage_type),
            option("q", job.ttl_ms),
            option("I", job.ttl_action),
            option("B", job.overwrite),
        )
    )


def job_status(answer: pb.GetJobStatusResponse) -> JobStatus:
    progress = answer.progress
    return JobStatus(
        answer.job_id,
        _enum(JobState, answer.state, JobState.UNKNOWN),
        answer.source_path,
        answer.target_path,
        progress.loaded_size,
        progress.total_size,
        progress.update_time,
        progress.message,
    )


def job_submitted(answer: pb.SubmitJobResponse, source_path: str) -> JobStatus:
    return JobStatus(answer.job_id, _enum(JobState, answer.state, JobState.UNKNOWN), source_path, answer.target_path)


def _number(value: int | None) -> Any:
    """A number for a field of any type; None leaves the field out, which the stubs do not say everywhere."""
    return value if value is None or isinstance(value, bool) else int(value)
