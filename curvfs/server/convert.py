"""From the wire's messages to our records (specification section 3). The way back is :mod:`curvfs.server.replies`."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from curvfs.server.fileblocks import Commit
from curvfs.server.namespace import AttrChange, NodeOptions
from curvfs.server.records import (
    DEFAULT_POLICY,
    STORAGE_DISK,
    TTL_NONE,
    AllocOptions,
    FileLock,
    Kind,
    Location,
    Policy,
)
from curvfs.server.refusals import UNSUPPORTED, refusal
from curvfs.wire.messages import pb

_STORAGE_TYPES = frozenset(pb.StorageTypeProto.values())
_TTL_ACTIONS = frozenset(pb.TtlActionProto.values())


def _policy_of(message: Any) -> Policy:
    """A StoragePolicyProto. What belongs to an under store is refused: there is none."""
    if message.ufs_mtime:
        raise refusal(UNSUPPORTED, "ufs_mtime cannot be set: this server has no under store")
    # Values that nobody knows are taken for the default (section 3.1).
    policy = Policy(
        message.storage_type if message.storage_type in _STORAGE_TYPES else STORAGE_DISK,
        message.ttl_ms,
        message.ttl_action if message.ttl_action in _TTL_ACTIONS else TTL_NONE,
    )
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
