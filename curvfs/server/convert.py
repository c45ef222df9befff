"""Between the wire's messages and our records, both ways (specification section 3).

Messages made here carry every field that the protocol requires, so encoding them has nothing to add.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from curvfs.server.behaviour import Behaviour
from curvfs.server.cluster import Cluster, WorkerNode
from curvfs.server.fileblocks import Commit, Placed
from curvfs.server.namespace import AttrChange, NodeOptions
from curvfs.server.records import (
    DEFAULT_POLICY,
    STATE_CV,
    STORAGE_DISK,
    AllocOptions,
    FileLock,
    Inode,
    Kind,
    Location,
    Policy,
    Totals,
)
from curvfs.server.refusals import UNSUPPORTED, refusal
from curvfs.wire.messages import pb

# ------------------------------------------------------------------------------------------------------ from the wire


def _policy_of(message: Any) -> Policy:
    """A StoragePolicyProto. What belongs to an under store is refused: there is none."""
    if message.ufs_mtime:
        raise refusal(UNSUPPORTED, "ufs_mtime cannot be set: this server has no under store")
    policy = Policy(message.storage_type, message.ttl_ms, message.ttl_action)
    return DEFAULT_POLICY if policy == DEFAULT_POLICY else policy


def mkdir_options_of(message: Any) -> NodeOptions:
    return NodeOptions(
        mode=message.mode & 0o7777,
        owner=message.owner,
        group=message.group,
        xattrs=dict(message.x_attr),
        policy=_policy_of(message.storage_policy),
        create_parent=message.create_parent,
    )


def create_options_of(message: Any) -> NodeOptions:
    """A CreateFileOptsProto."""
    if message.sync_ufs_meta:
        raise refusal(UNSUPPORTED, "sync_ufs_meta is not supported: this server has no under store")
    return NodeOptions(
        mode=message.mode & 0o7777,
        owner=message.owner,
        group=message.group,
        xattrs=dict(message.x_attr),
        policy=_policy_of(message.storage_policy),
        create_parent=message.create_parent,
        kind=_kind_of(message.file_type),
        block_size_bytes=message.block_size,
        replicas=message.replicas,
        writer=message.client_name,
    )


def _kind_of(file_type: int) -> Kind:
    try:
        return Kind(file_type)
    except ValueError:
        return Kind.FILE  # as the servers take values that they do not know


def attr_change_of(message: Any) -> AttrChange:
    """A SetAttrOptsProto; fields that are absent stay as they are."""

    def given(name: str) -> Any:
        return getattr(message, name) if message.HasField(name) else None

    return AttrChange(
        recursive=message.recursive,
        owner=given("owner"),
        group=given("group"),
        mode=given("mode"),
        atime_ms=given("atime"),
        mtime_ms=given("mtime"),
        ttl_ms=given("ttl_ms"),
        ttl_action=given("ttl_action"),
        add_xattrs=dict(message.add_x_attr),
        remove_xattrs=tuple(message.remove_x_attr),
        ufs_mtime=given("ufs_mtime"),
    )


def commits_of(messages: Iterable[Any]) -> list[Commit]:
    return [
        Commit(
            message.block_id,
            message.block_len,
            tuple(Location(location.worker_id, location.storage_type) for location in message.locations),
        )
        for message in messages
    ]


def alloc_of(message: Any) -> AllocOptions | None:
    """The pending allocation in an ExtendedBlockProto."""
    if not message.HasField("alloc_opts"):
        return None
    options = message.alloc_opts
    return AllocOptions(options.truncate, options.len, options.mode)


def lock_of(message: Any) -> FileLock:
    return FileLock(
        message.client_id,
        message.owner_id,
        message.pid,
        message.acquire_time,
        message.lock_type,
        message.lock_flags,
        message.start,
        message.end,
    )


# -------------------------------------------------------------------------------------------------------- to the wire


def enum_number(number: int) -> Any:
    """A number for an enum field: open enums take any, their stubs do not say so."""
    return number


def _policy(policy: Policy) -> pb.StoragePolicyProto:
    return pb.StoragePolicyProto(
        storage_type=enum_number(policy.storage_type),
        ttl_ms=policy.ttl_ms,
        ttl_action=enum_number(policy.ttl_action),
        ufs_mtime=0,
        state=enum_number(STATE_CV),
    )


_DEFAULT_POLICY_PROTO = _policy(DEFAULT_POLICY)


def status(path: str, inode: Inode) -> pb.FileStatusProto:
    """FileStatusProto of an inode, under the path that was asked for."""
    is_dir = inode.kind == Kind.DIR
    message = pb.FileStatusProto(
        id=inode.id,
        path=path,
        name=path[path.rfind("/") + 1 :],
        is_dir=is_dir,
        mtime=inode.mtime_ms,
        atime=inode.atime_ms,
        children_num=inode.children,
        is_complete=inode.is_complete,
        len=inode.children if is_dir else inode.length_bytes,
        replicas=inode.replicas,
        block_size=inode.block_size_bytes,
        file_type=enum_number(inode.kind),
        storage_policy=_DEFAULT_POLICY_PROTO if inode.policy is DEFAULT_POLICY else _policy(inode.policy),
        owner=inode.owner,
        group=inode.group,
        mode=inode.mode,
        nlink=inode.nlink,
    )
    if inode.xattrs:
        message.x_attr.update(inode.xattrs)
    if inode.kind == Kind.LINK:
        message.target = inode.target
    if inode.ctime_ms is not None:
        message.ctime = inode.ctime_ms
    return message


def worker_address(worker: WorkerNode) -> pb.WorkerAddressProto:
    return pb.WorkerAddressProto(
        worker_id=worker.worker_id, hostname=worker.hostname, ip_addr=worker.address, rpc_port=worker.port, web_port=0
    )


def located(placed: Placed, inode: Inode, addresses: dict[int, Any]) -> pb.LocatedBlockProto:
    """LocatedBlockProto; ``block_size`` is the block's length, as the protocol names it."""
    block = placed.block
    return pb.LocatedBlockProto(
        block=pb.ExtendedBlockProto(
            id=block.id,
            block_size=block.length_bytes,
            storage_type=enum_number(inode.policy.storage_type),
            file_type=enum_number(inode.kind),
            alloc_opts=None
            if block.alloc is None
            else pb.FileAllocOptsProto(
                truncate=block.alloc.truncate, off=0, len=block.alloc.length_bytes, mode=block.alloc.mode
            ),
        ),
        offset=0,
        locs=[addresses[worker_id] for worker_id in placed.workers],
        has_spdk=False,
    )


def file_blocks(path: str, inode: Inode, blocks: Iterable[Placed], addresses: dict[int, Any]) -> pb.FileBlocksProto:
    return pb.FileBlocksProto(
        status=status(path, inode), block_locs=[located(placed, inode, addresses) for placed in blocks]
    )


def file_lock(lock: FileLock) -> pb.FileLockProto:
    return pb.FileLockProto(
        client_id=lock.client_id,
        owner_id=lock.owner_id,
        pid=lock.pid,
        acquire_time=lock.acquired_ms,
        lock_type=enum_number(lock.lock_type),
        lock_flags=enum_number(lock.lock_flags),
        start=lock.start,
        end=lock.end,
    )


def _component(name: str, behaviour: Behaviour) -> pb.ComponentInfoProto:
    return pb.ComponentInfoProto(
        component=name,
        release_version=behaviour.release_version,
        git_commit="",
        git_tag="",
        git_branch="",
        protocol_version=1,
        min_protocol_version=1,
    )


def filesystem_info(
    active_master: str, totals: Totals, cluster: Cluster, behaviour: Behaviour, now_ms: int
) -> pb.GetFilesystemInfoResponse:
    """GetFilesystemInfoResponse."""
    workers = []
    capacity = available = used = other = reserved = 0
    for worker, space in cluster.spaces():
        capacity += space.capacity_bytes
        available += space.available_bytes
        used += space.used_bytes
        other += space.other_used_bytes
        reserved += space.reserved_bytes
        storage = pb.StorageInfoProto(
            dir_id=worker.version.dir_id,
            storage_id=worker.version.storage_id,
            failed=False,
            capacity=space.capacity_bytes,
            available=space.available_bytes,
            fs_used=space.used_bytes,
            non_fs_used=space.other_used_bytes,
            reserved_bytes=space.reserved_bytes,
            storage_type=enum_number(STORAGE_DISK),
            block_num=totals.blocks,
            dir_path=worker.store.layout.root,
        )
        workers.append(
            pb.WorkerInfoProto(
                address=worker_address(worker),
                capacity=space.capacity_bytes,
                available=space.available_bytes,
                fs_used=space.used_bytes,
                non_fs_used=space.other_used_bytes,
                last_update=now_ms,
                storage_map={worker.version.storage_id: storage},
                reserved_bytes=space.reserved_bytes,
                weight=1,
                software_version=behaviour.release_version,
                startup_time_ms=worker.started_ms,
                component_info=_component("worker", behaviour),
            )
        )
    return pb.GetFilesystemInfoResponse(
        active_master=active_master,
        journal_nodes=[f"1,{active_master}"],
        inode_dir_num=totals.directories,
        inode_file_num=totals.files,
        block_num=totals.blocks,
        capacity=capacity,
        available=available,
        fs_used=used,
        non_fs_used=other,
        reserved_bytes=reserved,
        live_workers=workers,
        allocatable_capacity=capacity,
        allocatable_available=available,
        compatibility=pb.ServerCompatibilityInfoProto(
            server=_component("master", behaviour),
            compatibility_mode=pb.COMPATIBILITY_MODE_PROTO_DIAGNOSE,
        ),
    )
