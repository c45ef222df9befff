"""What a simulated power cut keeps: what was synced for certain, of the rest what the seed has it."""

from __future__ import annotations

import errno
import os
import stat
from collections import Counter
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from curvfs.simcore import ProcessKilled
from curvfs.simfs import SECTOR_BYTES
from curvfs.simworld import SimWorld, simulated_world

SEEDS = range(60)


def cut(world: SimWorld) -> SimWorld:
    """Cut the power, and a process on the machine after it."""
    world.power_cut()
    return world.sibling()


def write(world: SimWorld, path: str, content: bytes, *, offset_bytes: int = 0, sync: bool = False) -> None:
    fd = world.disk.open(path, os.O_WRONLY | os.O_CREAT)
    world.disk.pwrite_full(fd, content, offset_bytes)
    if sync:
        world.disk.fdatasync(fd)
    world.disk.close(fd)


def after_each_seed(play: Callable[[SimWorld], None]) -> list[SimWorld]:
    """The world after the same doings and a power cut, once per seed."""
    worlds = []
    for seed in SEEDS:
        world = simulated_world(seed)
        play(world)
        worlds.append(cut(world))
    return worlds


def test_what_was_synced_with_its_name_is_there() -> None:
    def play(world: SimWorld) -> None:
        world.disk.mkdir("/d")
        write(world, "/d/f", b"x" * 10_000, sync=True)
        world.disk.sync_names("/d")
        world.disk.sync_names("/")

    for world in after_each_seed(play):
        assert world.disk.read_file("/d/f") == b"x" * 10_000


def test_a_name_needs_its_own_sync() -> None:
    outcomes = Counter(
        world.disk.exists("/f") for world in after_each_seed(lambda world: write(world, "/f", b"x", sync=True))
    )
    assert outcomes[True] and outcomes[False]


def test_a_file_below_a_directory_that_is_not_durable_is_gone_with_it() -> None:
    def play(world: SimWorld) -> None:
        world.disk.mkdir("/d")
        write(world, "/d/f", b"x", sync=True)
        world.disk.sync_names("/d")

    outcomes = Counter(world.disk.exists("/d/f") for world in after_each_seed(play))
    assert outcomes[True] and outcomes[False]


def test_unsynced_data_is_kept_sector_by_sector() -> None:
    def play(world: SimWorld) -> None:
        write(world, "/f", b"o" * 8 * SECTOR_BYTES, sync=True)
        world.disk.sync_names("/")
        write(world, "/f", b"n" * 8 * SECTOR_BYTES)

    kept: Counter[int] = Counter()
    for world in after_each_seed(play):
        content = world.disk.read_file("/f")
        sectors = [content[start : start + SECTOR_BYTES] for start in range(0, len(content), SECTOR_BYTES)]
        assert len(sectors) == 8
        assert all(sector in (b"o" * SECTOR_BYTES, b"n" * SECTOR_BYTES) for sector in sectors)
        kept[sum(sector[0] == ord("n") for sector in sectors)] += 1
    assert len(kept) > 3


def test_an_unsynced_length_may_come_without_its_data() -> None:
    def play(world: SimWorld) -> None:
        write(world, "/f", b"", sync=True)
        world.disk.sync_names("/")
        write(world, "/f", b"n" * 3 * SECTOR_BYTES)

    contents = [world.disk.read_file("/f") for world in after_each_seed(play)]
    assert any(content == b"" for content in contents)
    assert any(len(content) == 3 * SECTOR_BYTES and b"\0" in content and b"n" in content for content in contents)
    assert {content[0] for content in contents if content} <= {0, ord("n")}


def test_a_rename_over_a_file_that_was_not_synced_may_lose_both() -> None:
    def play(world: SimWorld) -> None:
        write(world, "/f", b"old", sync=True)
        world.disk.sync_names("/")
        write(world, "/f.tmp", b"new")
        world.disk.rename("/f.tmp", "/f")

    contents = {world.disk.read_file("/f") for world in after_each_seed(play)}
    assert {b"old", b"new", b""} <= contents


def test_a_rename_of_a_synced_file_gives_old_or_new() -> None:
    def play(world: SimWorld) -> None:
        write(world, "/f", b"old", sync=True)
        world.disk.sync_names("/")
        write(world, "/f.tmp", b"new", sync=True)
        world.disk.rename("/f.tmp", "/f")

    assert {world.disk.read_file("/f") for world in after_each_seed(play)} == {b"old", b"new"}


def test_changes_of_a_directory_are_undone_from_the_last() -> None:
    def play(world: SimWorld) -> None:
        for name in "abcdef":
            write(world, f"/{name}", b"")
        world.disk.unlink("/a")

    counts: Counter[str] = Counter()
    for world in after_each_seed(play):
        names = "".join(sorted(world.disk.listdir("/")))
        assert names in ("", "a", "ab", "abc", "abcd", "abcde", "abcdef", "bcdef")
        counts[names] += 1
    assert len(counts) > 4


def test_a_rename_across_directories_is_one_event() -> None:
    def play(world: SimWorld) -> None:
        for name in ("/a", "/b"):
            world.disk.mkdir(name)
        world.disk.sync_names("/")
        for index in range(4):
            write(world, f"/a/{index}", b"x", sync=True)
        world.disk.sync_names("/a")
        for index in range(4):
            world.disk.rename(f"/a/{index}", f"/b/{index}")

    moved: Counter[int] = Counter()
    for world in after_each_seed(play):
        left, right = world.disk.listdir("/a"), world.disk.listdir("/b")
        assert sorted(left + right) == ["0", "1", "2", "3"]
        assert sorted(right) == ["0", "1", "2", "3"][: len(right)]
        moved[len(right)] += 1
    assert len(moved) > 2


def test_syncing_one_side_of_a_rename_syncs_the_other() -> None:
    def play(world: SimWorld) -> None:
        for name in ("/a", "/b"):
            world.disk.mkdir(name)
        write(world, "/a/f", b"x", sync=True)
        world.disk.rename("/a/f", "/b/f")
        world.disk.sync_names("/b")
        world.disk.sync_names("/")

    for world in after_each_seed(play):
        assert (world.disk.listdir("/a"), world.disk.listdir("/b")) == ([], ["f"])


def test_a_failed_sync_loses_the_data_and_the_next_one_says_nothing() -> None:
    def play(world: SimWorld) -> None:
        write(world, "/f", b"old", sync=True)
        world.disk.sync_names("/")
        fd = world.disk.open("/f", os.O_WRONLY)
        world.disk.pwritev(fd, [b"new"], 0)
        world.faults.plan("fdatasync", errno.EIO)
        with pytest.raises(OSError, match="Input/output"):
            world.disk.fdatasync(fd)
        world.faults.sync_error = 1
        with pytest.raises(OSError, match="Input/output"):
            world.disk.fdatasync(fd)
        world.faults.stop()
        world.disk.fdatasync(fd)
        assert world.disk.read_file("/f") == b"new"

    assert {world.disk.read_file("/f") for world in after_each_seed(play)} == {b"old"}


def test_a_durable_write_file_is_old_or_new_at_any_moment() -> None:
    def play(world: SimWorld) -> None:
        world.disk.write_file("/f", b"old", durable=True)
        world.disk.write_file("/f", b"new", durable=True)

    assert {world.disk.read_file("/f") for world in after_each_seed(play)} == {b"new"}
    found = set()
    for seed in SEEDS:
        for call in range(1, 20):
            world = simulated_world(seed)
            world.disk.write_file("/f", b"old", durable=True)
            world.kill_at(call)
            try:
                world.disk.write_file("/f", b"new", durable=True)
            except ProcessKilled:
                found.add(cut(world).disk.read_file("/f"))
    assert found == {b"old", b"new"}


def test_a_version_that_was_overwritten_may_be_what_survives() -> None:
    def play(world: SimWorld) -> None:
        write(world, "/f", b"1", sync=True)
        world.disk.sync_names("/")
        write(world, "/f", b"2")
        write(world, "/f", b"3")

    assert {world.disk.read_file("/f") for world in after_each_seed(play)} == {b"1", b"2", b"3"}


def test_a_truncation_may_be_undone() -> None:
    def play(world: SimWorld) -> None:
        write(world, "/f", b"x" * 10_000, sync=True)
        world.disk.sync_names("/")
        fd = world.disk.open("/f", os.O_WRONLY)
        world.disk.ftruncate(fd, 5000)

    lengths = {len(world.disk.read_file("/f").rstrip(b"\0")) for world in after_each_seed(play)}
    assert {5000, 10_000} <= lengths


def test_locks_descriptors_and_unlinked_files_do_not_survive() -> None:
    world = simulated_world(1)
    write(world, "/f", b"x" * 10_000, sync=True)
    world.disk.link("/f", "/g")
    world.disk.sync_names("/")
    fd = world.disk.open("/f", os.O_RDONLY)
    assert world.disk.lock(fd)
    after = cut(world)
    assert after.disk.lock(after.disk.open("/f", os.O_RDONLY))
    assert after.disk.stat("/g").st_nlink == 2
    after.disk.unlink("/f")
    after.disk.unlink("/g")
    after.disk.sync_names("/")
    last = cut(after)
    assert last.disk.listdir("/") == []
    assert last.disk.tree.used_bytes() == 0
    assert last.disk.stat("/").st_nlink == 2


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 2**32), steps=st.integers(1, 60))
def test_the_tree_is_whole_after_any_doings_and_cut(seed: int, steps: int) -> None:
    """Whatever was done: all that is left can be walked, links are counted right, and a second cut changes nothing."""
    world = simulated_world(seed)
    random = world.random
    paths = [f"/{a}{b}" for a in ("", "d/", "e/", "d/d/") for b in "def"]

    def something() -> None:
        one, other = random.choice(paths), random.choice(paths)
        choice = random.randrange(8)
        if choice == 0:
            world.disk.mkdir(one)
        elif choice == 1:
            world.disk.rmdir(one)
        elif choice == 2:
            world.disk.unlink(one)
        elif choice == 3:
            world.disk.rename(one, other)
        elif choice == 4:
            world.disk.link(one, other)
        elif choice == 5:
            world.disk.sync_names(one)
        else:
            write(world, one, random.randbytes(random.randrange(20_000)), sync=random.random() < 0.5)

    for _ in range(steps):
        try:
            something()
        except OSError:
            pass
    after = cut(world)
    first = _everything(after)
    assert _everything(cut(after)) == first


def _everything(world: SimWorld, path: str = "/") -> list[tuple[str, object]]:
    """All names with what they hold; checks link counts on the way."""
    found: list[tuple[str, object]] = []
    links: Counter[int] = Counter()
    counted: dict[int, int] = {}

    def walk(path: str) -> None:
        names = sorted(world.disk.listdir(path))
        directories = 0
        for name in names:
            child = f"{path.rstrip('/')}/{name}"
            status = world.disk.stat(child)
            if stat.S_ISDIR(status.st_mode):
                directories += 1
                found.append((child, "directory"))
                walk(child)
            else:
                links[status.st_ino] += 1
                counted[status.st_ino] = status.st_nlink
                found.append((child, world.disk.read_file(child)))
        assert world.disk.stat(path).st_nlink == 2 + directories

    walk(path)
    assert dict(links) == counted
    return found
