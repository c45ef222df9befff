"""Sections 4.14 and 4.20: SetAttr, xattrs, storage policy."""

from __future__ import annotations

import pytest
import trio
from conformance.probe import NOT_FOUND, Probe, policy, refused
from conformance.rules import ALPHA, HEAD, V041, rule

from curvfs.wire.messages import pb


@rule("4.14")
async def test_set_attr_changes_what_is_given(probe: Probe) -> None:
    before = await probe.put(probe.at("f"), b"abc", mode=0o644)
    changed = await probe.set_attr(
        probe.at("f"), owner="bob", group="bobs", mode=0o4711, atime=1000, mtime=2000, add_x_attr={"user.a": b"1"}
    )
    assert (changed.owner, changed.group, changed.mode) == ("bob", "bobs", 0o4711)
    assert (changed.atime, changed.mtime, dict(changed.x_attr)) == (1000, 2000, {"user.a": b"1"})
    assert (changed.id, changed.len, changed.is_complete) == (before.status.id, 3, True)
    assert await probe.stat(probe.at("f")) == changed
    again = await probe.set_attr(probe.at("f"), mode=0o600)
    assert (again.owner, again.mtime, again.mode) == ("bob", 2000, 0o600)


@rule("4.14")
async def test_set_attr_of_what_is_missing(probe: Probe) -> None:
    async with refused(NOT_FOUND):
        await probe.set_attr(probe.at("missing"), mode=0o600)


@rule("4.14")
async def test_set_attr_on_directories_symlinks_and_the_root_of_the_test(probe: Probe) -> None:
    await probe.symlink("x", probe.at("l"))
    assert (await probe.set_attr(probe.at("l"), owner="bob")).owner == "bob"
    assert (await probe.set_attr(probe.directory, mode=0o700)).mode == 0o700


@rule("4.14")
async def test_recursive_changes_owner_group_and_mode_below(probe: Probe) -> None:
    await probe.mkdir(probe.at("a/b"), create_parent=True)
    await probe.create(probe.at("a/b/f"))
    await probe.set_attr(
        probe.at("a"), recursive=True, owner="bob", group="bobs", mode=0o700, mtime=5000, add_x_attr={"user.a": b"1"}
    )
    for path in ("a/b", "a/b/f"):
        status = await probe.stat(probe.at(path))
        assert (status.owner, status.group, status.mode) == ("bob", "bobs", 0o700)
        assert status.mtime > 5000
        assert dict(status.x_attr) == {}
    assert (await probe.stat(probe.at("a"))).mtime == 5000


@rule("4.14")
async def test_without_recursive_nothing_below_changes(probe: Probe) -> None:
    await probe.create(probe.at("f"), owner="alice")
    await probe.set_attr(probe.directory, owner="bob")
    assert (await probe.stat(probe.at("f"))).owner == "alice"


@rule("4.14")
async def test_replicas_are_accepted_without_effect(probe: Probe) -> None:
    await probe.put(probe.at("f"), b"abc")
    assert (await probe.set_attr(probe.at("f"), replicas=3)).replicas == 1


@rule("4.14")
async def test_xattrs(probe: Probe) -> None:
    await probe.create(probe.at("f"))
    added = {"user.a": b"1", "any name": bytes(range(256)), "user.empty": b""}
    assert dict((await probe.set_attr(probe.at("f"), add_x_attr=added)).x_attr) == added
    changed = await probe.set_attr(probe.at("f"), add_x_attr={"user.a": b"2"}, remove_x_attr=["any name", "unknown"])
    assert dict(changed.x_attr) == {"user.a": b"2", "user.empty": b""}
    assert [dict(status.x_attr) for status in await probe.list(probe.directory)] == [dict(changed.x_attr)]


@rule("4.14")
async def test_xattrs_of_directories(probe: Probe) -> None:
    made = await probe.mkdir(probe.at("d"), x_attr={"user.d": b"1"})
    assert dict(made.x_attr) == {"user.d": b"1"}
    assert dict((await probe.set_attr(probe.at("d"), add_x_attr={"user.e": b"2"})).x_attr) == {
        "user.d": b"1",
        "user.e": b"2",
    }


@rule("4.14", "8.4", only=[V041, HEAD])
async def test_ctime_moves_with_every_set_attr(probe: Probe) -> None:
    await probe.create(probe.at("f"))
    first = (await probe.set_attr(probe.at("f"), mtime=1000)).ctime
    assert first > 1000
    assert (await probe.set_attr(probe.at("f"), atime=1000)).ctime >= first


@rule("8.3", "8.4", only=[ALPHA])
async def test_old_masters_have_no_ctime(probe: Probe) -> None:
    await probe.create(probe.at("f"))
    assert not (await probe.set_attr(probe.at("f"), mtime=1000)).HasField("ctime")


@rule("4.14", "4.20")
async def test_ttl(probe: Probe) -> None:
    given = policy(ttl_ms=3_600_000, ttl_action=pb.TTL_ACTION_PROTO_DELETE)
    made = await probe.create(probe.at("f"), storage_policy=given)
    assert (made.storage_policy.ttl_ms, made.storage_policy.ttl_action) == (3_600_000, pb.TTL_ACTION_PROTO_DELETE)
    changed = await probe.set_attr(probe.at("f"), ttl_ms=7_200_000, ttl_action=pb.TTL_ACTION_PROTO_NONE)
    assert (changed.storage_policy.ttl_ms, changed.storage_policy.ttl_action) == (7_200_000, pb.TTL_ACTION_PROTO_NONE)


@rule("4.14", "4.20")
async def test_a_ttl_action_of_free_stays(probe: Probe) -> None:
    given = policy(ttl_ms=3_600_000, ttl_action=pb.TTL_ACTION_PROTO_FREE)
    await probe.create(probe.at("f"), storage_policy=given)
    changed = await probe.set_attr(probe.at("f"), ttl_action=pb.TTL_ACTION_PROTO_DELETE)
    assert changed.storage_policy.ttl_action == pb.TTL_ACTION_PROTO_FREE


@rule("4.20", embedded="masters look for expired files once an hour")
async def test_files_expire_at_mtime_plus_ttl(probe: Probe) -> None:
    """FREE frees what an under store has too, which is nothing here."""
    kept = {
        "no action": policy(ttl_ms=1, ttl_action=pb.TTL_ACTION_PROTO_NONE),
        "freed": policy(ttl_ms=1, ttl_action=pb.TTL_ACTION_PROTO_FREE),
        "no ttl": policy(ttl_ms=0, ttl_action=pb.TTL_ACTION_PROTO_DELETE),
        "tomorrow": policy(ttl_ms=86_400_000, ttl_action=pb.TTL_ACTION_PROTO_DELETE),
    }
    for name, given in kept.items():
        await probe.put(probe.at(name), b"abc", storage_policy=given)
    await probe.put(probe.at("created"), b"abc", storage_policy=policy(ttl_ms=1, ttl_action=pb.TTL_ACTION_PROTO_DELETE))
    await probe.put(probe.at("told"), b"abc")
    await probe.set_attr(probe.at("told"), ttl_ms=1, ttl_action=pb.TTL_ACTION_PROTO_DELETE)
    await probe.put(probe.at("old"), b"abc", storage_policy=kept["tomorrow"])
    await probe.set_attr(probe.at("old"), mtime=1000)
    with trio.fail_after(20):
        while {status.name for status in await probe.list(probe.directory)} != set(kept):
            await trio.sleep(0.05)


@rule("4.20")
@pytest.mark.parametrize("kind", [pb.STORAGE_TYPE_PROTO_SSD, pb.STORAGE_TYPE_PROTO_MEM])
async def test_storage_types_that_a_worker_lacks_fall_back(probe: Probe, kind: int) -> None:
    """The policy is kept, the data goes where there is room."""
    blocks = await probe.put(probe.at("f"), b"abc", storage_policy=policy(storage_type=kind))
    assert blocks.status.storage_policy.storage_type == kind
    assert blocks.block_locs[0].block.storage_type == kind
    assert await probe.get(probe.at("f")) == b"abc"


@rule("4.14", "7.2")
async def test_reads_do_not_change_times(probe: Probe) -> None:
    await probe.put(probe.at("f"), b"abc")
    before = await probe.stat(probe.at("f"))
    await probe.get(probe.at("f"))
    await probe.list(probe.directory)
    assert await probe.stat(probe.at("f")) == before
