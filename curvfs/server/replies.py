"""From our records to the messages of replies (specification section 3), as the version that is behaved as writes them.

Messages made here carry every field that the protocol requires, so encoding them has nothing to add.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from curvfs.server.behaviour import Behaviour
from curvfs.server.blockstore import Space
from curvfs.server.cluster import Cluster, WorkerNode
from curvfs.server.fileblocks import Placed
from curvfs.server.records import DEFAULT_POLICY, STATE_CV, STORAGE_DISK, FileLock, Inode, Kind, Policy, Totals
from curvfs.wire.messages import pb


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


def _address(worker: WorkerNode) -> pb.WorkerAddressProto:
    return pb.WorkerAddressProto(
        worker_id=worker.worker_id, hostname=worker.hostname, ip_addr=worker.address, rpc_port=worker.port, web_port=0
    )


class Replies:
    """Makes the messages of a master. ``active_master`` is the ``host:port`` that it goes by."""

    def __init__(self, cluster: Cluster, behaviour: Behaviour, active_master: str) -> None:
        self._cluster = cluster
        self._behaviour = behaviour
        self._active_master = active_master
        self._addresses = {worker.worker_id: _address(worker) for worker in cluster.workers}

    def status(self, path: str, inode: Inode) -> pb.FileStatusProto:
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
        if inode.ctime_ms is not None and self._behaviour.has_v04_fields:
            message.ctime = inode.ctime_ms
        return message

    def located(self, placed: Placed, inode: Inode) -> pb.LocatedBlockProto:
        """LocatedBlockProto; ``block_size`` is the block's length, as the protocol names it."""
        block = placed.block
        message = pb.LocatedBlockProto(
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
            locs=[self._addresses[worker_id] for worker_id in placed.workers],
        )
        if self._behaviour.has_v04_fields:
            message.has_spdk = False
        return message

    def file_blocks(self, path: str, inode: Inode, blocks: Iterable[Placed]) -> pb.FileBlocksProto:
        return pb.FileBlocksProto(
            status=self.status(path, inode), block_locs=[self.located(placed, inode) for placed in blocks]
        )

    def filesystem_info(self, totals: Totals, now_ms: int) -> pb.GetFilesystemInfoResponse:
        """GetFilesystemInfoResponse."""
        message = pb.GetFilesystemInfoResponse(
            active_master=self._active_master,
            journal_nodes=[f"1,{self._active_master}"],
            inode_dir_num=totals.directories,
            inode_file_num=totals.files,
            block_num=totals.blocks,
            capacity=0,
            available=0,
            fs_used=0,
            non_fs_used=0,
            reserved_bytes=0,
        )
        for worker, space in self._cluster.spaces():
            message.capacity += space.capacity_bytes
            message.available += space.available_bytes
            message.fs_used += space.used_bytes
            message.non_fs_used += space.other_used_bytes
            message.reserved_bytes += space.reserved_bytes
            message.live_workers.append(self._worker_info(worker, space, totals, now_ms))
        if self._behaviour.has_head_fields:
            message.allocatable_capacity = message.capacity
            message.allocatable_available = message.available
            message.compatibility.server.CopyFrom(self._component("master"))
            message.compatibility.compatibility_mode = pb.COMPATIBILITY_MODE_PROTO_DIAGNOSE
        return message

    def _worker_info(self, worker: WorkerNode, space: Space, totals: Totals, now_ms: int) -> pb.WorkerInfoProto:
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
        message = pb.WorkerInfoProto(
            address=self._addresses[worker.worker_id],
            capacity=space.capacity_bytes,
            available=space.available_bytes,
            fs_used=space.used_bytes,
            non_fs_used=space.other_used_bytes,
            last_update=now_ms,
            storage_map={worker.version.storage_id: storage},
            reserved_bytes=space.reserved_bytes,
        )
        if self._behaviour.has_v04_fields:
            message.weight = 1
            message.worker_session_id = worker.session_id
            # This server has no transfer service.
            message.transfer_task_submit = False
            message.transfer_report_target = False
            message.transfer_query_task = False
            message.transfer_attempt_safe_output = False
            message.transfer_source_read_plan = False
            message.software_version = self._behaviour.release_version
            message.startup_time_ms = worker.started_ms
        if self._behaviour.has_head_fields:
            message.component_info.CopyFrom(self._component("worker"))
        return message

    def _component(self, name: str) -> pb.ComponentInfoProto:
        return pb.ComponentInfoProto(
            component=name,
            release_version=self._behaviour.release_version,
            git_commit="",
            git_tag="",
            git_branch="",
            protocol_version=1,
            min_protocol_version=1,
        )
