"""Sections 4.1 and 4.13: paths, and the operations on the name tree."""

from __future__ import annotations

from typing import Any

import pytest
from conformance.probe import (
    COMMON,
    CREAT,
    CREATE_NEW,
    EXCHANGE,
    EXISTS,
    INVALID,
    IS_DIR,
    NO_REPLACE,
    NOT_DIR,
    NOT_EMPTY,
    NOT_FOUND,
    TRUNC,
    WRONLY,
    Probe,
    refused,
)
from conformance.rules import ALPHA, HEAD, V041, rule

from curvfs.wire.messages import pb


def names(statuses: list[Any]) -> list[str]:
    return [status.name for status in statuses]


# ------------------------------------------------------------------------------------------------------------ 4.1


@rule("4.1")
async def test_inode_ids_ascend(probe: Probe) -> None:
    first = await probe.create(probe.at("a"))
    await probe.delete(probe.at("a"))
    second = await probe.mkdir(probe.at("b"))
    third = await probe.create(probe.at("a"))
    assert 1000 < first.id < second.id < third.id < 1 << 40


@rule("4.1")
@pytest.mark.parametrize("path", ["relative", "", "rel/x"])
async def test_paths_are_absolute(probe: Probe, path: str) -> None:
    async with refused(COMMON, text="Absolute path required"):
        await probe.stat(path)
    async with refused(COMMON, text="Absolute path required"):
        await probe.create(path)


@rule("4.1")
async def test_a_trailing_slash_is_refused(probe: Probe) -> None:
    async with refused(COMMON, text="is invalid"):
        await probe.stat(f"{probe.directory}/")


@rule("4.1")
async def test_long_paths_are_refused_on_create_only(probe: Probe) -> None:
    long = probe.at("/".join(["n" * 200] * 45))
    assert len(long) > 8000
    for make in (probe.create, probe.mkdir):
        async with refused(COMMON, text="Path too long"):
            await make(long, create_parent=True)
    async with refused(NOT_FOUND):
        await probe.stat(long)


@rule("4.1")
async def test_deep_paths_are_refused_on_create(probe: Probe) -> None:
    async with refused(COMMON, text="Path too long"):
        await probe.create(probe.at("/".join(["d"] * 1001)), create_parent=True)


@rule("4.1")
async def test_symlinks_in_the_middle_are_not_followed(probe: Probe) -> None:
    await probe.mkdir(probe.at("d"))
    await probe.create(probe.at("d/f"))
    await probe.symlink(probe.at("d"), probe.at("l"))
    async with refused(NOT_FOUND):
        await probe.stat(probe.at("l/f"))


@rule("4.1")
@pytest.mark.parametrize("name", ["naïve-日本", "with space", "new\nline", "...", ".hidden", "x" * 255])
async def test_names_are_any_utf_8(probe: Probe, name: str) -> None:
    await probe.create(probe.at(name))
    assert (await probe.stat(probe.at(name))).name == name
    assert names(await probe.list(probe.directory)) == [name]


@rule("4.1", "4.13")
async def test_below_a_file_is_nothing(probe: Probe) -> None:
    await probe.create(probe.at("f"))
    async with refused(NOT_FOUND):
        await probe.stat(probe.at("f/x"))
    assert not await probe.exists(probe.at("f/x"))


# ------------------------------------------------------------------------------------------------- 4.13: Mkdir


@rule("4.13")
async def test_mkdir(probe: Probe) -> None:
    request = pb.MkdirRequest(path=probe.at("d"), opts=pb.MkdirOptsProto(mode=0o751, owner="o", group="g"))
    reply = await probe.call(2, request)
    assert not reply.flag
    assert (reply.status.mode, reply.status.owner, reply.status.group) == (0o751, "o", "g")
    assert (await probe.stat(probe.at("d"))).id == reply.status.id


@rule("4.13")
async def test_mkdir_of_what_exists(probe: Probe) -> None:
    made = await probe.mkdir(probe.at("d"))
    await probe.create(probe.at("f"))
    assert (await probe.mkdir(probe.at("d"), create_parent=True)).id == made.id
    async with refused(EXISTS):
        await probe.mkdir(probe.at("d"))
    for create_parent in (False, True):
        async with refused(EXISTS):
            await probe.mkdir(probe.at("f"), create_parent=create_parent)
    async with refused(COMMON):
        await probe.mkdir("/", create_parent=True)


@rule("4.13")
async def test_mkdir_with_missing_parents(probe: Probe) -> None:
    async with refused(COMMON, text="Parent directory doesn't exist"):
        await probe.mkdir(probe.at("a/b/c"))
    await probe.mkdir(probe.at("a/b/c"), create_parent=True, mode=0o711, owner="o", group="g")
    for path in ("a", "a/b", "a/b/c"):
        status = await probe.stat(probe.at(path))
        assert (status.mode, status.owner, status.group) == (0o711, "o", "g")


@rule("4.13")
async def test_mkdir_below_a_file(probe: Probe) -> None:
    await probe.create(probe.at("f"))
    for create_parent in (False, True):
        async with refused(COMMON, text="not a dir"):
            await probe.mkdir(probe.at("f/d"), create_parent=create_parent)


@rule("4.13", "4.5", "8.4")
async def test_setgid_is_inherited(probe: Probe) -> None:
    """Not on v0.3.2-alpha."""
    await probe.mkdir(probe.at("d"), mode=0o2775, group="team")
    made = await probe.mkdir(probe.at("d/sub"), mode=0o755, group="mine")
    file = await probe.create(probe.at("d/file"), group="mine")
    if probe.version is ALPHA:
        assert (made.group, made.mode, file.group) == ("mine", 0o755, "mine")
    else:
        assert (made.group, made.mode, file.group, file.mode) == ("team", 0o2755, "team", 0o644)


# ------------------------------------------------------------------------------------------------- 4.13: Delete


@rule("4.13")
async def test_delete(probe: Probe) -> None:
    await probe.put(probe.at("f"), b"abc")
    await probe.delete(probe.at("f"))
    assert not await probe.exists(probe.at("f"))
    async with refused(NOT_FOUND):
        await probe.delete(probe.at("f"))
    async with refused(COMMON, text="root"):
        await probe.delete("/", recursive=True)


@rule("4.13")
async def test_delete_of_directories(probe: Probe) -> None:
    await probe.mkdir(probe.at("a/b"), create_parent=True)
    await probe.put(probe.at("a/b/f"), b"abc")
    async with refused(NOT_EMPTY):
        await probe.delete(probe.at("a"))
    await probe.delete(probe.at("a"), recursive=True)
    assert not await probe.exists(probe.at("a/b/f"))
    assert not await probe.exists(probe.at("a"))
    await probe.mkdir(probe.at("e"))
    await probe.delete(probe.at("e"))
    assert names(await probe.list(probe.directory)) == []


@rule("4.13")
async def test_delete_of_one_of_two_links(probe: Probe) -> None:
    await probe.put(probe.at("f"), b"abc")
    await probe.link(probe.at("f"), probe.at("g"))
    await probe.delete(probe.at("f"))
    assert (await probe.stat(probe.at("g"))).nlink == 1
    assert await probe.get(probe.at("g")) == b"abc"


# ------------------------------------------------------------------------------------------------- 4.13: Rename


@rule("4.13")
async def test_rename(probe: Probe) -> None:
    await probe.put(probe.at("f"), b"abc", x_attr={"user.k": b"v"})
    before = await probe.stat(probe.at("f"))
    await probe.mkdir(probe.at("d"))
    assert await probe.rename(probe.at("f"), probe.at("d/g"))
    after = await probe.stat(probe.at("d/g"))
    assert (after.id, after.name, dict(after.x_attr)) == (before.id, "g", {"user.k": b"v"})
    assert not await probe.exists(probe.at("f"))
    assert await probe.get(probe.at("d/g")) == b"abc"


@rule("4.13")
async def test_rename_of_a_tree(probe: Probe) -> None:
    await probe.mkdir(probe.at("a/b"), create_parent=True)
    await probe.put(probe.at("a/b/f"), b"abc")
    assert await probe.rename(probe.at("a"), probe.at("z"))
    assert await probe.get(probe.at("z/b/f")) == b"abc"


@rule("4.13")
async def test_rename_over_existing(probe: Probe) -> None:
    await probe.put(probe.at("a"), b"new")
    await probe.put(probe.at("b"), b"old")
    assert await probe.rename(probe.at("a"), probe.at("b"))
    assert await probe.get(probe.at("b")) == b"new"
    await probe.mkdir(probe.at("d"))
    await probe.mkdir(probe.at("empty"))
    assert await probe.rename(probe.at("d"), probe.at("empty"))
    assert names(await probe.list(probe.directory)) == ["b", "empty"]


@rule("4.13")
async def test_rename_refusals(probe: Probe) -> None:
    await probe.create(probe.at("file"))
    await probe.mkdir(probe.at("dir/sub"), create_parent=True)
    await probe.mkdir(probe.at("full/sub"), create_parent=True)
    cases = [
        ("nope", "x", 0, (NOT_FOUND,)),
        ("dir", "dir/x", 0, (INVALID,)),
        ("file", "dir", NO_REPLACE, (EXISTS,)),
        ("file", "full", 0, (IS_DIR,)),
        ("dir", "file", 0, (NOT_DIR,)),
        ("dir", "full", 0, (NOT_EMPTY,)),
        ("file", "missing/x", 0, (COMMON,)),
    ]
    for src, dst, flags, kinds in cases:
        async with refused(*kinds):
            await probe.rename(probe.at(src), probe.at(dst), flags)
    assert names(await probe.list(probe.directory)) == ["dir", "file", "full"]


@rule("4.13")
async def test_rename_onto_itself_does_nothing_first_of_all(probe: Probe) -> None:
    await probe.create(probe.at("f"))
    assert not await probe.rename(probe.at("f"), probe.at("f"))
    assert not await probe.rename(probe.at("f"), probe.at("f"), NO_REPLACE)
    assert not await probe.rename(probe.at("missing"), probe.at("missing"))
    assert await probe.exists(probe.at("f"))


@rule("4.13")
async def test_rename_without_replacing(probe: Probe) -> None:
    await probe.put(probe.at("f"), b"abc")
    assert await probe.rename(probe.at("f"), probe.at("g"), NO_REPLACE)
    await probe.put(probe.at("f"), b"other")
    async with refused(EXISTS):
        await probe.rename(probe.at("f"), probe.at("g"), NO_REPLACE)
    assert await probe.get(probe.at("g")) == b"abc"


@rule("4.13")
async def test_unknown_rename_flags_are_ignored(probe: Probe) -> None:
    await probe.create(probe.at("f"))
    assert await probe.rename(probe.at("f"), probe.at("g"), 4)
    await probe.create(probe.at("f"))
    async with refused(EXISTS):
        await probe.rename(probe.at("f"), probe.at("g"), 4 | NO_REPLACE)


@rule("4.13", "8.4", only=[V041, HEAD])
async def test_rename_exchange(probe: Probe) -> None:
    await probe.put(probe.at("a"), b"one")
    await probe.mkdir(probe.at("d"))
    await probe.put(probe.at("d/b"), b"two")
    assert await probe.rename(probe.at("a"), probe.at("d/b"), EXCHANGE)
    assert (await probe.get(probe.at("a")), await probe.get(probe.at("d/b"))) == (b"two", b"one")
    async with refused(NOT_FOUND):
        await probe.rename(probe.at("a"), probe.at("missing"), EXCHANGE)
    async with refused(NOT_FOUND):
        await probe.rename(probe.at("missing"), probe.at("a"), EXCHANGE)


@rule("8.4", only=[ALPHA])
async def test_rename_exchange_on_an_old_master(probe: Probe) -> None:
    await probe.put(probe.at("a"), b"one")
    await probe.put(probe.at("b"), b"two")
    async with refused(COMMON, text="exchange mode is not supported"):
        await probe.rename(probe.at("a"), probe.at("b"), EXCHANGE)
    assert await probe.get(probe.at("a")) == b"one"


@rule("4.13")
async def test_entries_change_the_times_of_their_directories(probe: Probe) -> None:
    await probe.mkdir(probe.at("a"))
    await probe.mkdir(probe.at("b"))
    await probe.create(probe.at("a/f"))

    async def old() -> None:
        for directory in ("a", "b"):
            await probe.set_attr(probe.at(directory), mtime=1000)

    async def mtimes() -> list[bool]:
        return [(await probe.stat(probe.at(directory))).mtime > 1000 for directory in ("a", "b")]

    await old()
    await probe.rename(probe.at("a/f"), probe.at("b/f"))
    assert await mtimes() == [True, True]
    await old()
    await probe.delete(probe.at("b/f"))
    assert await mtimes() == [False, True]
    await old()
    await probe.symlink("x", probe.at("a/l"))
    assert await mtimes() == [True, False]


# --------------------------------------------------------------------------------------- 4.13: links and lists


@rule("4.13")
async def test_symlinks(probe: Probe) -> None:
    await probe.symlink("../any thing", probe.at("l"))
    assert (await probe.stat(probe.at("l"))).target == "../any thing"
    async with refused(EXISTS):
        await probe.symlink("x", probe.at("l"))
    await probe.symlink("x", probe.at("l"), force=True)  # answers success and changes nothing
    assert (await probe.stat(probe.at("l"))).target == "../any thing"
    await probe.create(probe.at("f"))
    async with refused(EXISTS):
        await probe.symlink("x", probe.at("f"), force=True)
    async with refused(COMMON, text="not exist"):
        await probe.symlink("x", probe.at("missing/l"))


@rule("4.13")
async def test_hard_links(probe: Probe) -> None:
    await probe.put(probe.at("f"), b"abc")
    await probe.link(probe.at("f"), probe.at("g"))
    one, other = await probe.stat(probe.at("f")), await probe.stat(probe.at("g"))
    assert (one.id, one.nlink, other.nlink) == (other.id, 2, 2)
    assert await probe.get(probe.at("g")) == b"abc"
    async with refused(EXISTS):
        await probe.link(probe.at("f"), probe.at("g"))
    async with refused(NOT_FOUND):
        await probe.link(probe.at("missing"), probe.at("h"))
    async with refused(COMMON, text="Cannot create link to directory"):
        await probe.link(probe.directory, probe.at("h"))


@rule("4.13")
async def test_links_make_the_parents_that_they_miss(probe: Probe) -> None:
    await probe.put(probe.at("f"), b"abc")
    await probe.link(probe.at("f"), probe.at("new/deep/g"))
    parent = await probe.stat(probe.at("new/deep"))
    assert (parent.mode, parent.owner, parent.group) == (0o777, "", "")


@rule("4.13", "8.4")
async def test_hard_links_of_symlinks(probe: Probe) -> None:
    await probe.symlink("x", probe.at("l"))
    if probe.version is ALPHA:
        async with refused(COMMON):
            await probe.link(probe.at("l"), probe.at("m"))
        return
    await probe.link(probe.at("l"), probe.at("m"))
    assert (await probe.stat(probe.at("m"))).target == "x"


async def listing(probe: Probe) -> str:
    """A directory with names that sort and match in interesting ways."""
    await probe.mkdir(probe.at("l"))
    for name in ("b", "a", "é", "B", "*x", "[q]"):
        await probe.create(probe.at(f"l/{name}"))
    return probe.at("l")


@rule("4.13")
async def test_listings_are_sorted_by_bytes(probe: Probe) -> None:
    directory = await listing(probe)
    found = await probe.list(directory)
    assert names(found) == ["*x", "B", "[q]", "a", "b", "é"]
    assert [status.path for status in found] == [f"{directory}/{status.name}" for status in found]
    assert names(await probe.list(probe.at("l/a"))) == ["a"]
    async with refused(NOT_FOUND):
        await probe.list(probe.at("missing"))
    assert await probe.list(probe.directory) == [await probe.stat(directory)]


@rule("4.13")
async def test_lists_of_patterns(probe: Probe) -> None:
    directory = await listing(probe)
    cases = {
        "[ab]": ["a", "b"],
        "?": ["B", "a", "b", "é"],
        "[!a]": ["B", "b", "é"],
        "no*": [],
        "[*]x": ["*x"],
        "[[]q]": ["[q]"],
        "*": ["*x", "B", "[q]", "a", "b", "é"],
    }
    for glob, expected in cases.items():
        assert names(await probe.list(f"{directory}/{glob}")) == expected, glob


@rule("4.13")
async def test_a_pattern_lists_the_children_of_every_directory_it_matches(probe: Probe) -> None:
    for name in ("da/x", "db/y", "dc/z"):
        await probe.create(probe.at(name), create_parent=True, mode=0o755)
    assert names(await probe.list(probe.at("d[ab]"))) == ["x", "y"]


@rule("4.13")
async def test_braces_and_backslashes_are_ordinary_characters(probe: Probe) -> None:
    for name in ("{a}", "b\\c"):
        await probe.create(probe.at(name))
        assert names(await probe.list(probe.at(name))) == [name]


@rule("4.13")
async def test_pages(probe: Probe) -> None:
    directory = await listing(probe)
    assert names(await probe.page(directory)) == ["*x", "B", "[q]", "a", "b", "é"]
    assert names(await probe.page(directory, limit=2)) == ["*x", "B"]
    assert names(await probe.page(directory, limit=2, start_after="B")) == ["[q]", "a"]
    assert names(await probe.page(directory, start_after="aa")) == ["b", "é"]
    assert names(await probe.page(directory, limit=10, start_after="é")) == []
    assert names(await probe.page(directory, limit=0)) == []
    assert names(await probe.page(f"{directory}/a")) == ["a"]
    async with refused(NOT_FOUND):
        await probe.page(probe.at("missing"), limit=5)
    async with refused(COMMON):
        await probe.page(directory, limit=-1)


@rule("4.13")
async def test_pages_refuse_patterns(probe: Probe) -> None:
    directory = await listing(probe)
    async with refused(COMMON, text="glob"):
        await probe.page(f"{directory}/*")


@rule("4.13")
async def test_exists(probe: Probe) -> None:
    assert await probe.exists("/")
    assert await probe.exists(probe.directory)
    assert not await probe.exists(probe.at("nope"))


# -------------------------------------------------------------------------------------------- 4.5: CreateFile


@rule("4.5")
async def test_create_of_what_exists(probe: Probe) -> None:
    await probe.put(probe.at("f"), b"abc")
    for flags in (WRONLY | CREAT, WRONLY | CREAT | 0x80, CREATE_NEW | 0x80):
        async with refused(EXISTS):
            await probe.create(probe.at("f"), flags)
    async with refused(COMMON, text="already exists as a dir"):
        await probe.create(probe.directory)
    assert await probe.get(probe.at("f")) == b"abc"


@rule("4.5")
async def test_create_with_trunc_overwrites(probe: Probe) -> None:
    """Owner, group, mode, id, xattrs and other writers stay; blocks, length, replicas and block size are new."""
    await probe.put(probe.at("f"), b"abc", mode=0o600, owner="alice", x_attr={"user.k": b"v"})
    before = await probe.stat(probe.at("f"))
    await probe.set_attr(probe.at("f"), mtime=1000)
    made = await probe.create(
        probe.at("f"), mode=0o777, owner="bob", group="bobs", x_attr={"user.new": b"n"}, block_size=4 << 20, replicas=2
    )
    assert (made.id, made.mode, made.owner, made.group) == (before.id, 0o600, "alice", "staff")
    assert (made.len, made.block_size, made.replicas, made.is_complete) == (0, 4 << 20, 2, False)
    assert dict(made.x_attr) == {"user.k": b"v"}
    assert made.mtime > 1000
    assert list((await probe.locate(probe.at("f"))).block_locs) == []


@rule("4.5")
async def test_create_with_missing_parents(probe: Probe) -> None:
    """They get the file's own mode, owner and group."""
    async with refused(COMMON, text="Parent directory doesn't exist"):
        await probe.create(probe.at("a/b/f"))
    await probe.create(probe.at("a/b/f"), create_parent=True, mode=0o640, owner="o", group="g")
    for path in ("a", "a/b"):
        status = await probe.stat(probe.at(path))
        assert (status.is_dir, status.mode, status.owner, status.group) == (True, 0o640, "o", "g")
    async with refused(COMMON, text="not a dir"):
        await probe.create(probe.at("a/b/f/g"), create_parent=True)


@rule("4.5")
@pytest.mark.parametrize(
    "options", [{"replicas": 0}, {"replicas": 100}, {"block_size": (1 << 20) - 1}, {"block_size": 100 << 30}]
)
async def test_limits_of_replicas_and_block_size(probe: Probe, options: dict[str, int]) -> None:
    async with refused(COMMON, text="needs to be between"):
        await probe.create(probe.at("f"), **options)
    assert not await probe.exists(probe.at("f"))


@rule("4.5")
@pytest.mark.parametrize("options", [{"replicas": 99}, {"block_size": 1 << 20}, {"block_size": 2 << 30}])
async def test_extremes_of_replicas_and_block_size(probe: Probe, options: dict[str, int]) -> None:
    made = await probe.create(probe.at("f"), **options)
    assert {name: getattr(made, name) for name in options} == options


@rule("4.5", "12")
async def test_a_created_file_is_visible_at_once(probe: Probe) -> None:
    await probe.create(probe.at("f"), TRUNC | CREAT | WRONLY)
    status = await probe.stat(probe.at("f"))
    assert (status.is_complete, status.len) == (False, 0)
    assert names(await probe.list(probe.directory)) == ["f"]


@rule("4.5", "4.14")
async def test_xattrs_given_at_create(probe: Probe) -> None:
    made = await probe.create(probe.at("f"), x_attr={"user.born": b"\0\xff"})
    assert dict(made.x_attr) == {"user.born": b"\0\xff"}
    await probe.complete(probe.at("f"), 0)
    await probe.rename(probe.at("f"), probe.at("g"))
    assert [dict(status.x_attr) for status in await probe.list(probe.directory)] == [{"user.born": b"\0\xff"}]
