"""Sections 4.2 and 4.3: repeated requests, and who is writing a file."""

from __future__ import annotations

from collections.abc import Awaitable

from conformance.probe import (
    CLIENT_NAME,
    COMMON,
    CREAT,
    CREATE_NEW,
    EXCL,
    EXISTS,
    IN_PROGRESS,
    NOT_FOUND,
    OTHER_CLIENT,
    TRUNC,
    WRONLY,
    Probe,
    refused,
)
from conformance.rules import HEAD, rule

from curvfs.errors import InProgress
from curvfs.units import MIB
from curvfs.wire.messages import pb
from curvfs.world import World


def fresh_id() -> int:
    return World.real().random.request_id()


@rule("4.2")
async def test_create_repeated(probe: Probe) -> None:
    req_id = fresh_id()
    first = await probe.create(probe.at("f"), WRONLY | CREAT | EXCL, req_id=req_id)
    again = await probe.create(probe.at("f"), WRONLY | CREAT | EXCL, req_id=req_id)
    assert (again.id, again.path) == (first.id, first.path)
    async with refused(EXISTS):
        await probe.create(probe.at("f"), WRONLY | CREAT | EXCL)


@rule("4.2")
async def test_create_repeated_does_not_truncate_again(probe: Probe) -> None:
    req_id = fresh_id()
    await probe.create(probe.at("f"), req_id=req_id)
    located = await probe.add_block(probe.at("f"))
    await probe.complete(probe.at("f"), 3, await probe.fill(located, b"abc"))
    assert (await probe.create(probe.at("f"), req_id=req_id)).len == 3
    assert await probe.get(probe.at("f")) == b"abc"


@rule("4.2")
async def test_open_for_write_repeated(probe: Probe) -> None:
    await probe.put(probe.at("f"), b"abc")
    req_id = fresh_id()
    await probe.open(probe.at("f"), WRONLY | TRUNC, req_id=req_id)
    located = await probe.add_block(probe.at("f"))
    await probe.complete(probe.at("f"), 4, await probe.fill(located, b"abcd"))
    assert (await probe.open(probe.at("f"), WRONLY | TRUNC, req_id=req_id)).status.len == 4


@rule("4.2")
async def test_delete_repeated(probe: Probe) -> None:
    await probe.create(probe.at("f"))
    req_id = fresh_id()
    await probe.delete(probe.at("f"), req_id=req_id)
    await probe.delete(probe.at("f"), req_id=req_id)
    async with refused(NOT_FOUND):
        await probe.delete(probe.at("f"))


@rule("4.2")
async def test_rename_repeated(probe: Probe) -> None:
    await probe.create(probe.at("f"))
    req_id = fresh_id()
    assert await probe.rename(probe.at("f"), probe.at("g"), req_id=req_id)
    assert await probe.rename(probe.at("f"), probe.at("g"), req_id=req_id)
    assert await probe.exists(probe.at("g"))


@rule("4.2")
async def test_a_failed_request_runs_again(probe: Probe) -> None:
    req_id = fresh_id()
    async with refused(COMMON):
        await probe.create(probe.at("d/f"), req_id=req_id)
    await probe.mkdir(probe.at("d"))
    assert (await probe.create(probe.at("d/f"), req_id=req_id)).name == "f"


@rule("4.2")
async def test_mkdir_is_not_protected(probe: Probe) -> None:
    req_id = fresh_id()
    await probe.mkdir(probe.at("d"), req_id=req_id)
    async with refused(EXISTS):
        await probe.mkdir(probe.at("d"), req_id=req_id)


async def _poisoned(repeated: Awaitable[object], probe: Probe) -> None:
    """A repetition that Curvine refuses with InProgress; the embedded server answers as it did the first time."""
    if probe.target.embedded:
        await repeated
        return
    try:
        await repeated
    except InProgress as error:
        assert error.kind == IN_PROGRESS


@rule("4.2", "11")
async def test_set_attr_symlink_and_link_repeated(probe: Probe) -> None:
    """Clients must take InProgress for "unknown"; the embedded server does not poison these ids."""
    await probe.create(probe.at("f"))
    req_id = fresh_id()
    await probe.set_attr(probe.at("f"), mode=0o600, req_id=req_id)
    await _poisoned(probe.set_attr(probe.at("f"), mode=0o600, req_id=req_id), probe)
    req_id = fresh_id()
    await probe.symlink("x", probe.at("l"), req_id=req_id)
    await _poisoned(probe.symlink("x", probe.at("l"), req_id=req_id), probe)
    req_id = fresh_id()
    await probe.link(probe.at("f"), probe.at("h"), req_id=req_id)
    await _poisoned(probe.link(probe.at("f"), probe.at("h"), req_id=req_id), probe)
    assert (await probe.stat(probe.at("f"))).nlink == 2
    assert (await probe.stat(probe.at("f"))).mode == 0o600


@rule("4.2", "4.5")
async def test_complete_file_repeated(probe: Probe) -> None:
    await probe.create(probe.at("f"))
    made = await probe.fill(await probe.add_block(probe.at("f")), b"abc")
    for _ in range(2):
        assert (await probe.complete(probe.at("f"), 3, made)).result
    assert await probe.get(probe.at("f")) == b"abc"


# ------------------------------------------------------------------------------------------------------------ 4.3


@rule("4.3")
async def test_a_file_is_complete_when_no_writer_is_left(probe: Probe) -> None:
    assert not (await probe.create(probe.at("f"))).is_complete
    await probe.open(probe.at("f"), WRONLY, client_name=OTHER_CLIENT)
    await probe.complete(probe.at("f"), 0)
    assert not (await probe.stat(probe.at("f"))).is_complete
    await probe.complete(probe.at("f"), 0, client_name=OTHER_CLIENT)
    assert (await probe.stat(probe.at("f"))).is_complete


@rule("4.3")
async def test_opening_for_write_makes_a_file_incomplete(probe: Probe) -> None:
    await probe.put(probe.at("f"), b"abc")
    assert not (await probe.open(probe.at("f"), WRONLY)).status.is_complete
    assert await probe.get(probe.at("f")) == b"abc"


@rule("4.5", "4.3")
async def test_complete_by_somebody_else_publishes_and_leaves_the_writer(probe: Probe) -> None:
    await probe.create(probe.at("f"))
    made = await probe.fill(await probe.add_block(probe.at("f")), b"abc")
    assert (await probe.complete(probe.at("f"), 3, made, client_name=OTHER_CLIENT)).result
    status = await probe.stat(probe.at("f"))
    assert (status.len, status.is_complete) == (3, False)


@rule("4.5", "4.3")
async def test_complete_sets_mtime_even_when_nothing_was_written(probe: Probe) -> None:
    await probe.put(probe.at("f"), b"abc")
    await probe.set_attr(probe.at("f"), mtime=2000)
    await probe.open(probe.at("f"), WRONLY)
    assert (await probe.stat(probe.at("f"))).mtime == 2000
    await probe.complete(probe.at("f"), 3)
    assert (await probe.stat(probe.at("f"))).mtime > 2000


@rule("4.3")
async def test_two_writers_of_one_path_get_one_block(probe: Probe) -> None:
    first = await probe.create(probe.at("f"))
    second = await probe.create(probe.at("f"), client_name=OTHER_CLIENT)
    assert first.id == second.id
    one, other = await probe.add_block(probe.at("f")), await probe.add_block(probe.at("f"))
    assert other.block.id == one.block.id
    assert (len(one.locs), len(other.locs)) == (1, 0)


@rule("4.3")
async def test_a_writer_whose_file_was_truncated_by_another(probe: Probe) -> None:
    await probe.create(probe.at("f"))
    located = await probe.add_block(probe.at("f"))
    await probe.create(probe.at("f"), CREATE_NEW, client_name=OTHER_CLIENT)
    made = await probe.fill(located, b"abc")  # the worker does not know yet
    async with refused(COMMON, text="Not found block"):
        await probe.complete(probe.at("f"), 3, made)


@rule("4.3", "8.4")
async def test_a_writer_whose_file_was_deleted(probe: Probe) -> None:
    status = await probe.create(probe.at("f"))
    located = await probe.add_block(probe.at("f"))
    await probe.delete(probe.at("f"))
    made = await probe.fill(located, b"abc")
    kind = NOT_FOUND if probe.version is HEAD else COMMON
    async with refused(kind):
        await probe.complete(probe.at("f"), 3, made, inode_id=status.id)


@rule("4.3", "8.2")
async def test_the_handshake(probe: Probe) -> None:
    component = pb.ComponentInfoProto(
        component="client", release_version="0.4.1", protocol_version=1, min_protocol_version=1
    )
    info = await probe.info(component_info=component)
    assert info.HasField("compatibility") == (probe.version is HEAD)
    if probe.version is HEAD:
        server = info.compatibility.server
        assert server.component
        assert server.min_protocol_version <= 1 <= server.protocol_version


@rule("8.2", embedded="how a cluster judges versions is its configuration")
async def test_the_embedded_server_only_diagnoses(probe: Probe) -> None:
    odd = pb.ComponentInfoProto(release_version="0.0.1", protocol_version=99, min_protocol_version=99)
    info = await probe.info(component_info=odd)
    if probe.version is HEAD:
        compatibility = info.compatibility
        assert compatibility.compatibility_mode == pb.COMPATIBILITY_MODE_PROTO_DIAGNOSE
        assert (compatibility.min_client_version, compatibility.min_worker_version) == ("", "")
        assert list(compatibility.blocked_versions) == []


@rule("8.2")
async def test_block_streams_take_component_info(probe: Probe) -> None:
    component = pb.ComponentInfoProto(component="client", release_version="0.4.1")
    await probe.create(probe.at("f"))
    located = await probe.add_block(probe.at("f"))
    stream = await probe.worker(located.locs[0])
    request = pb.BlockWriteRequest(
        block=located.block, off=0, block_size=MIB, client_name=CLIENT_NAME, component_info=component
    )
    await stream.open(80, request)
    await stream.write(b"abc")
    await stream.complete(3)
