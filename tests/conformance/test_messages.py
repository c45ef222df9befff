"""Section 3: how messages are read and written, and what their fields say."""

from __future__ import annotations

from typing import Any

import pytest
from conformance.probe import (
    COMMON,
    CREAT,
    CREATE_NEW,
    WRONLY,
    Probe,
    file_options,
    parse_reply,
    refused,
)
from conformance.rules import ALPHA, EVERY, HEAD, V041, rule

from curvfs.units import MIB
from curvfs.wire.codes import RequestStatus, RpcCode
from curvfs.wire.describe import unknown_fields
from curvfs.wire.messages import encode, pb

RPC = RequestStatus.RPC


async def call_with(probe: Probe, code: int, header: bytes) -> Any:
    """A call whose header is given as bytes."""
    async with probe.connected() as wire:
        await wire.send(code, RPC, 12345, -1, header)
        reply = await wire.receive()
    return parse_reply(reply.head, reply)


@rule("3.1")
async def test_an_absent_header_is_the_message_with_all_defaults(probe: Probe) -> None:
    assert (await call_with(probe, RpcCode.GET_FILESYSTEM_INFO, b"")).capacity > 0
    async with refused(COMMON, text="Absolute path required"):
        await call_with(probe, RpcCode.FILE_STATUS, b"")


@rule("3.1")
async def test_missing_required_fields_have_their_declared_defaults(probe: Probe) -> None:
    bare = pb.CreateFileRequest(path=probe.at("f"), opts=pb.CreateFileOptsProto(), flags=CREATE_NEW)
    made = (await call_with(probe, RpcCode.CREATE_FILE, bare.SerializeToString())).file_status
    assert (made.replicas, made.block_size) == (1, 128 * MIB)
    assert made.file_type == pb.FILE_TYPE_PROTO_FILE
    assert made.storage_policy.storage_type == pb.STORAGE_TYPE_PROTO_DISK
    assert not made.is_complete


@rule("3.1")
async def test_unknown_fields_are_ignored(probe: Probe) -> None:
    header = encode(pb.GetFileStatusRequest(path=probe.directory))
    unknown = b"\xc2\x3e\x03abc" + b"\x98\x06\x01"  # field 1000 as bytes, field 99 as a number
    assert (await call_with(probe, RpcCode.FILE_STATUS, header + unknown)).status.is_dir


@rule("3.1")
@pytest.mark.parametrize("packed", [False, True])
async def test_repeated_numbers_are_read_packed_and_unpacked(probe: Probe, packed: bool) -> None:
    workers = [worker.address.worker_id for worker in (await probe.info()).live_workers]
    await probe.create(probe.at("f"))
    header = encode(pb.AddBlockRequest(path=probe.at("f"), located=True))
    numbers = [_varint(worker_id) for worker_id in workers]
    if packed:
        joined = b"".join(numbers)
        header += b"\x1a" + _varint(len(joined)) + joined
    else:
        header += b"".join(b"\x18" + number for number in numbers)
    async with refused(COMMON, text="available"):
        await call_with(probe, RpcCode.ADD_BLOCK, header)


@rule("3.1", "3.2")
async def test_unknown_enum_values_become_the_default(probe: Probe) -> None:
    options = file_options(file_type=77, storage_policy=pb.StoragePolicyProto(storage_type=77, state=1))
    request = pb.CreateFileRequest(path=probe.at("f"), opts=options, flags=CREATE_NEW)
    made = (await probe.call(RpcCode.CREATE_FILE, request)).file_status
    assert made.file_type == pb.FILE_TYPE_PROTO_FILE
    assert made.storage_policy.storage_type == pb.STORAGE_TYPE_PROTO_DISK


@rule("3.2")
async def test_open_flags_that_nobody_knows_are_dropped(probe: Probe) -> None:
    assert (await probe.create(probe.at("f"), CREATE_NEW | 0x8000 | 0x1000 | 0x80000)).len == 0


@rule("3.3")
async def test_status_of_a_file(probe: Probe) -> None:
    await probe.put(probe.at("f"), b"hello", mode=0o640, owner="alice", group="staff", replicas=1, block_size=2 * MIB)
    status = await probe.stat(probe.at("f"))
    assert (status.path, status.name, status.is_dir) == (probe.at("f"), "f", False)
    assert (status.len, status.replicas, status.block_size) == (5, 1, 2 * MIB)
    assert (status.mode, status.owner, status.group, status.nlink) == (0o640, "alice", "staff", 1)
    assert (status.file_type, status.is_complete, status.children_num) == (pb.FILE_TYPE_PROTO_FILE, True, 0)
    assert not status.HasField("target")
    assert 0 < status.atime <= status.mtime
    policy = status.storage_policy
    assert (policy.storage_type, policy.ttl_ms, policy.ttl_action) == (pb.STORAGE_TYPE_PROTO_DISK, 0, 0)
    assert (policy.ufs_mtime, policy.state) == (0, pb.STORAGE_STATE_PROTO_CV)


@rule("3.3", "4.13")
async def test_status_of_a_directory(probe: Probe) -> None:
    made = await probe.mkdir(probe.at("d"), mode=0o750)
    await probe.create(probe.at("d/file"))
    await probe.mkdir(probe.at("d/sub"))
    status = await probe.stat(probe.at("d"))
    assert (status.id, status.is_dir, status.file_type) == (made.id, True, pb.FILE_TYPE_PROTO_DIR)
    assert (status.len, status.children_num, status.is_complete) == (2, 2, False)
    assert (status.replicas, status.block_size, status.mode) == (0, 0, 0o750)
    assert (made.nlink, status.nlink) == (2, 3)


@rule("3.3")
async def test_status_of_a_symlink(probe: Probe) -> None:
    await probe.symlink("some/where", probe.at("l"))
    status = await probe.stat(probe.at("l"))
    assert (status.file_type, status.target, status.mode) == (pb.FILE_TYPE_PROTO_LINK, "some/where", 0o777)
    assert (status.len, status.replicas, status.block_size, status.is_complete) == (0, 0, 0, True)
    given = ("", "") if probe.version is ALPHA else ("alice", "staff")
    assert (status.owner, status.group) == given


@rule("3.3", "4.1")
async def test_status_of_the_root(probe: Probe) -> None:
    status = await probe.stat("/")
    assert (status.id, status.name, status.path, status.is_dir) == (1000, "", "/", True)


@rule("3.3", "8.3")
async def test_ctime_is_there_from_the_first_set_attr_or_rename_on(probe: Probe) -> None:
    """Never on v0.3.2-alpha; and mtime changes take it along afterwards."""
    await probe.put(probe.at("f"), b"abc")
    assert not (await probe.stat(probe.at("f"))).HasField("ctime")
    changed = await probe.set_attr(probe.at("f"), mode=0o600)
    assert changed.HasField("ctime") == (probe.version > ALPHA)
    await probe.create(probe.at("g"))
    await probe.rename(probe.at("g"), probe.at("h"))
    assert (await probe.stat(probe.at("h"))).HasField("ctime") == (probe.version > ALPHA)


@rule("3.3", "4.14")
async def test_ctime_never_shows_among_the_xattrs(probe: Probe) -> None:
    await probe.create(probe.at("f"), x_attr={"user.k": b"v"})
    changed = await probe.set_attr(probe.at("f"), mode=0o600)
    assert dict(changed.x_attr) == {"user.k": b"v"}


@rule("3.3")
async def test_a_located_block(probe: Probe) -> None:
    blocks = await probe.put(probe.at("f"), b"x" * (MIB + 5))
    assert [located.block.block_size for located in blocks.block_locs] == [MIB, 5]  # lengths, not capacities
    for located in blocks.block_locs:
        assert located.offset == 0
        assert located.block.storage_type == pb.STORAGE_TYPE_PROTO_DISK
        assert located.block.file_type == pb.FILE_TYPE_PROTO_FILE
        assert not located.block.HasField("alloc_opts")
        assert located.HasField("has_spdk") == (probe.version > ALPHA)
        assert not located.has_spdk
        assert located.locs[0].worker_id > 0
        assert 0 < located.locs[0].rpc_port < 65536
    assert blocks.status == await probe.stat(probe.at("f"))


@rule("3.3", "4.13")
async def test_status_of_special_nodes(probe: Probe) -> None:
    """v0.3.2-alpha does not know them and makes a regular file."""
    kinds = {
        "fifo": pb.FILE_TYPE_PROTO_FIFO,
        "char": pb.FILE_TYPE_PROTO_CHAR,
        "block": pb.FILE_TYPE_PROTO_BLOCK,
        "socket": pb.FILE_TYPE_PROTO_SOCKET,
    }
    for name, kind in kinds.items():
        rdev = (259).to_bytes(4, "little")
        await probe.create(probe.at(name), WRONLY | CREAT, file_type=kind, x_attr={"curvine.rdev": rdev})
        status = await probe.stat(probe.at(name))
        assert status.file_type == (pb.FILE_TYPE_PROTO_FILE if probe.version is ALPHA else kind)
        assert status.is_complete == (probe.version > ALPHA)  # no writer is registered
        assert status.x_attr["curvine.rdev"] == rdev


@rule("3.3", "8.3", only=EVERY)
async def test_no_reply_has_fields_that_its_version_does_not_know(probe: Probe) -> None:
    await probe.put(probe.at("f"), b"abc")
    info = await probe.info()
    assert unknown_fields(info) == []
    since_head = ("allocatable_capacity", "allocatable_available", "compatibility")
    assert [info.HasField(name) for name in since_head] == [probe.version is HEAD] * 3
    for worker in info.live_workers:
        assert worker.HasField("weight") == (probe.version >= V041)
        assert worker.HasField("software_version") == (probe.version >= V041)
        assert worker.HasField("component_info") == (probe.version is HEAD)


def _varint(number: int) -> bytes:
    out = bytearray()
    while number > 0x7F:
        out.append(number & 0x7F | 0x80)
        number >>= 7
    out.append(number)
    return bytes(out)
