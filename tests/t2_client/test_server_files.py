"""Blocks on the master: allocation, commits, resizing, placing; one suite for every metadata store. And file locks."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from curvfs.errors import FileTooLarge, OutOfSpace, RemoteError
from curvfs.server import locks
from curvfs.server.behaviour import HEAD
from curvfs.server.fileblocks import Commit, FileBlocks, Resize
from curvfs.server.metastore import MemoryMetaStore, MetaStore
from curvfs.server.namespace import AttrChange, Namespace, NodeOptions
from curvfs.server.records import AllocOptions, Block, FileLock, Location
from curvfs.server.sqlitestore import SqliteMetaStore

MIB = 1 << 20
WORKER = 7
AT = (Location(WORKER),)
FILE = NodeOptions(mode=0o644, create_parent=True, block_size_bytes=MIB, writer="me")
OTHER = NodeOptions(mode=0o644, create_parent=True, block_size_bytes=MIB, writer="you")
CREATE, TRUNC, WRONLY = 0x41, 0x200, 0x1


class FakeWorkers:
    """Workers as the master sees them; what they hold is what a test says."""

    def __init__(self) -> None:
        self.ids = [WORKER]
        self.free_bytes = 1 << 40
        self.held: dict[int, int] = {}

    def place(self, size_bytes: int, hostname: str, exclude: Sequence[int], count: int) -> tuple[int, ...]:
        return tuple(one for one in self.ids if one not in exclude and self.free_bytes > size_bytes)[:count]

    def knows(self, worker_id: int) -> bool:
        return worker_id in self.ids

    def available_bytes(self) -> int:
        return self.free_bytes

    def held_bytes(self, worker_id: int, block_id: int) -> int | None:
        return self.held.get(block_id)


class Files:
    def __init__(self, store: MetaStore) -> None:
        self.now_ms = 1_000
        self.freed: list[int] = []
        self.workers = FakeWorkers()
        self.store = store
        self.names = Namespace(store, lambda: self.now_ms, self.freed.extend)
        self.blocks = FileBlocks(self.names, self.workers, HEAD)

    def add(self, path: str, last: int | None = None, length: int = 0, commits: Sequence[Commit] = ()) -> Block:
        return self.blocks.add_block(path, 0, last, length, commits, (), "host")[1].block

    def complete(self, path: str, length: int, commits: Sequence[Commit] = (), *, flush: bool = False) -> None:
        self.blocks.complete(path, 0, length, "me", commits, flush, None)

    def written(self, path: str, length: int) -> list[int]:
        """A file of ``length`` bytes, written and complete; ids of its blocks."""
        self.names.create(path, FILE, CREATE)
        ids: list[int] = []
        commits: list[Commit] = []
        for start in range(0, length, MIB):
            block = self.add(path, ids[-1] if ids else None, start, commits)
            commits = [Commit(block.id, min(MIB, length - start), AT)]
            ids.append(block.id)
        self.complete(path, length, commits)
        return ids

    def resize(self, path: str, length: int, *, truncate: bool = True, mode: int = 0) -> list[Block]:
        placed = self.blocks.resize(path, Resize(truncate, 0, length, mode))[1]
        return [one.block for one in placed]


@pytest.fixture(params=["memory", "sqlite"])
def files(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Files]:
    store = MemoryMetaStore() if request.param == "memory" else SqliteMetaStore(str(tmp_path / "meta.db"))
    yield Files(store)
    store.close()


def refused(kind: int, call: Callable[[], object], text: str = "") -> None:
    with pytest.raises(RemoteError) as caught:
        call()
    assert caught.value.kind == kind, caught.value
    assert text in caught.value.text


def test_write_and_read_back_three_blocks(files: Files) -> None:
    ids = files.written("/f", 2 * MIB + 5)
    inode, placed = files.blocks.locate("/f")
    assert [one.block.id for one in placed] == ids == [(inode.id << 24) | index for index in range(3)]
    assert [one.block.length_bytes for one in placed] == [MIB, MIB, 5]
    assert all(one.workers == (WORKER,) for one in placed)
    assert (inode.length_bytes, inode.is_complete, files.store.totals.blocks) == (2 * MIB + 5, True, 3)
    assert files.store.known_blocks([*ids, 99]) == set(ids)


def test_add_block_again_returns_the_same_block_without_locations(files: Files) -> None:
    files.names.create("/f", FILE, CREATE)
    _, first = files.blocks.add_block("/f", 0, None, 0, (), (), "host")
    _, again = files.blocks.add_block("/f", 0, None, 77, [Commit(1, 1, AT)], (), "host")
    assert (again.block.id, first.workers, again.workers) == (first.block.id, (WORKER,), ())
    assert files.names.get("/f").length_bytes == 0, "what came along was ignored"
    assert files.blocks.locate("/f")[1][0].workers == (), "the choice is not shown before the first commit"


def test_add_block_needs_a_worker(files: Files) -> None:
    files.names.create("/f", FILE, CREATE)
    refused(10000, lambda: files.blocks.add_block("/f", 0, None, 0, (), (WORKER,), "h"), "No available worker found")
    files.workers.free_bytes = MIB
    refused(10000, lambda: files.add("/f"), "No available worker found")
    refused(8, lambda: files.add("/nope"))
    files.names.mkdir("/d", FILE)
    refused(10000, lambda: files.add("/d"), "Not a file")


def test_the_length_rule(files: Files) -> None:
    files.names.create("/f", FILE, CREATE)
    block = files.add("/f")
    commit = Commit(block.id, 100, AT)
    refused(
        10000,
        lambda: files.complete("/f", 150, [commit]),
        "Complete len is not equal to file len, complete_len = 100, file_len = 150",
    )
    assert files.store.block(block.id) == block, "nothing of it was kept"
    files.complete("/f", 100, [commit])
    files.complete("/f", 100, [commit])
    files.complete("/f", 50)
    assert files.names.get("/f").length_bytes == 100


def test_a_short_block_in_the_middle_makes_the_file_unreadable(files: Files) -> None:
    files.names.create("/f", FILE, CREATE)
    first = files.add("/f")
    files.add("/f", first.id, 100, [Commit(first.id, 100, AT)])
    refused(10000, lambda: files.blocks.locate("/f"), f"block status abnormal, block id {first.id}, block len 100")
    assert files.resize("/f", 0) == []
    assert files.blocks.locate("/f")[1] == []


def test_complete_and_writers(files: Files) -> None:
    files.names.create("/f", FILE, CREATE)
    files.blocks.open_file("/f", OTHER, WRONLY)
    assert files.names.get("/f").writers == ("me", "you")
    files.now_ms = 3_000
    files.complete("/f", 0, flush=True)
    assert files.names.get("/f").writers == ("me", "you")
    files.complete("/f", 0)
    found = files.names.get("/f")
    assert (found.writers, found.is_complete, found.mtime_ms, found.ctime_ms) == (("you",), False, 3_000, None)
    files.blocks.complete("/f", 0, 0, "you", (), False, AttrChange(mtime_ms=5))
    found = files.names.get("/f")
    assert (found.is_complete, found.mtime_ms, found.ctime_ms) == (True, 5, 3_000)


def test_by_inode_id_a_rename_does_not_matter(files: Files) -> None:
    inode = files.names.create("/tmp", FILE, CREATE)
    block = files.blocks.add_block("/tmp", inode.id, None, 0, (), (), "h")[1].block
    files.names.rename("/tmp", "/final", 0)
    refused(8, lambda: files.complete("/tmp", 9, [Commit(block.id, 9, AT)]), "File /tmp not found")
    files.blocks.complete("/tmp", inode.id, 9, "me", [Commit(block.id, 9, AT)], False, None)
    assert files.blocks.locate("/final")[0].length_bytes == 9


def test_open_file(files: Files) -> None:
    ids = files.written("/f", 10)
    inode, placed = files.blocks.open_file("/f", OTHER, WRONLY)
    assert (inode.writers, [one.block.id for one in placed]) == (("you",), ids)
    assert files.blocks.open_file("/f", OTHER, 0)[1] == placed
    inode, placed = files.blocks.open_file("/f", OTHER, WRONLY | TRUNC)
    assert (inode.length_bytes, placed, files.freed) == (0, [], ids)
    assert files.add("/f").id == ids[0] + 1, "block numbers are never used again"
    inode, placed = files.blocks.open_file("/new", FILE, CREATE)
    assert (placed, inode.writers) == ([], ("me",))
    refused(8, lambda: files.blocks.open_file("/nope", FILE, WRONLY))
    refused(8, lambda: files.blocks.open_file("/nope", FILE, 0x40))
    files.names.mkdir("/d", FILE)
    refused(10000, lambda: files.blocks.open_file("/d", FILE, WRONLY), "/d is a directory")


def test_deleting_and_overwriting_free_blocks_with_the_last_name(files: Files) -> None:
    ids = files.written("/f", MIB + 1)
    files.names.link("/f", "/g")
    assert files.names.delete("/f", False) == (0, 0) and files.freed == []
    assert files.names.delete("/g", False) == (1, MIB + 1) and files.freed == ids
    assert files.store.totals.blocks == 0
    other = files.written("/d/f", 3)
    assert files.names.delete("/d", True) == (1, 3)
    while files.names.reap():
        pass
    assert files.freed == ids + other


# ------------------------------------------------------------------------------------------------------------ resizing


def test_shrink(files: Files) -> None:
    ids = files.written("/f", 3 * MIB)
    blocks = files.resize("/f", MIB + 10)
    assert [(one.id, one.length_bytes, one.alloc) for one in blocks] == [
        (ids[0], MIB, None),
        (ids[1], 10, AllocOptions(True, 10, 0)),
    ]
    assert files.freed == ids[2:] and blocks[1].locations == AT
    files.complete("/f", MIB + 10, [Commit(ids[1], 10, AT)], flush=True)
    assert files.store.blocks(blocks[1].inode_id)[1].alloc is None


def test_extend_with_holes_and_fill_one(files: Files) -> None:
    (first,) = files.written("/f", 10)
    blocks = files.resize("/f", 2 * MIB + 5)
    assert [(one.length_bytes, one.alloc, one.locations) for one in blocks] == [
        (MIB, None, AT),
        (MIB, AllocOptions(True, MIB, 0), ()),
        (5, AllocOptions(True, 5, 0), ()),
    ]
    assert blocks[0].id == first
    placed = files.blocks.assign("/f", blocks[1].id, (), "host")
    assert placed.workers == (WORKER,) and placed.block.alloc == AllocOptions(True, MIB, 0)
    files.workers.ids.append(8)
    assert files.blocks.assign("/f", blocks[1].id, (), "host").workers == (WORKER,), "the choice stays"
    assert files.blocks.assign("/f", blocks[1].id, (WORKER,), "host").workers == (8,)
    files.complete("/f", 2 * MIB + 5, [Commit(blocks[1].id, MIB, AT)])
    assert [one.workers for one in files.blocks.locate("/f")[1]] == [(WORKER,), (WORKER,), ()]
    refused(10000, lambda: files.blocks.assign("/f", 12345, (), "h"), "Not found block")
    refused(10000, lambda: files.blocks.assign("/nope", 1, (), "h"), "not exists")


def test_resize_refusals(files: Files) -> None:
    files.written("/f", 10)
    before = files.names.get("/f")
    refused(10000, lambda: files.resize("/nope", 0), "File /nope not exists")
    refused(10000, lambda: files.resize("/", 0), "Not a file")
    refused(10000, lambda: files.resize("/f", -1), "len must be >= 0")
    refused(10000, lambda: files.blocks.resize("/f", Resize(True, 5, 10, 0)), "off must be 0")
    refused(9, lambda: files.resize("/f", 1 << 51), "exceeds maximum supported size")
    refused(10000, lambda: files.resize("/f", 20, truncate=False, mode=2), "mode must be DEFAULT")
    refused(28, lambda: files.resize("/f", 20, truncate=False, mode=16), "ZERO_RANGE")
    refused(28, lambda: files.resize("/f", 5, truncate=False), "cannot shrink")
    with pytest.raises(FileTooLarge):
        files.resize("/f", 1 << 50)
    with pytest.raises(OutOfSpace):
        files.resize("/f", 1 << 41, truncate=False)
    assert files.names.get("/f") == before
    assert [one.length_bytes for one in files.resize("/f", 20, truncate=False, mode=1)] == [20], "as HEAD"


def test_growing_waits_for_a_truncation_to_reach_the_worker(files: Files) -> None:
    (block,) = files.written("/f", 100)
    files.workers.held[block] = 100
    files.resize("/f", 10)
    refused(28, lambda: files.resize("/f", 50), "truncated to 10 bytes")
    files.workers.held[block] = 10
    assert files.resize("/f", 50)[0].length_bytes == 50


# --------------------------------------------------------------------------------- what Curvine takes and should not


def test_commits_of_what_nobody_wrote_are_refused(files: Files) -> None:
    files.names.create("/f", FILE, CREATE)
    block = files.add("/f")
    refused(28, lambda: files.complete("/f", 5, [Commit(block.id, 5, ())]), "names no worker")
    refused(28, lambda: files.complete("/f", 5, [Commit(block.id, 5, (Location(99),))]), "unknown worker 99")
    refused(28, lambda: files.complete("/f", 2 * MIB, [Commit(block.id, 2 * MIB, AT)]))
    refused(28, lambda: files.complete("/f", 0, [Commit(block.id, -1, AT)]))
    refused(10000, lambda: files.complete("/f", 5, [Commit(block.id + 1, 5, AT)]), "Not found block")
    other = files.written("/g", 3)[0]
    refused(10000, lambda: files.complete("/f", 3, [Commit(other, 3, AT)]), "Not found block")
    files.complete("/f", 5, [Commit(block.id, 5, AT)])
    files.complete("/f", 5, [Commit(block.id, 5, ())])
    assert files.blocks.locate("/f")[1][0].workers == (WORKER,)
    files.names.create("/h", FILE, CREATE)
    hole = files.resize("/h", 9)[0]
    refused(28, lambda: files.complete("/h", 9, [Commit(hole.id, 9, ())]), "names no worker")


def test_symlinks_and_special_nodes_have_no_blocks(files: Files) -> None:
    files.names.symlink("t", "/l", False, 0o777, "", "")
    for call in (
        lambda: files.blocks.open_file("/l", FILE, WRONLY),
        lambda: files.names.create("/l", FILE, CREATE | TRUNC),
        lambda: files.resize("/l", 10),
        lambda: files.add("/l"),
        lambda: files.complete("/l", 0),
    ):
        refused(28, call, "/l is a link")
    assert files.names.get("/l").target == "t"


def test_block_sizes_that_do_not_fit_are_refused(files: Files) -> None:
    refused(28, lambda: files.names.create("/f", NodeOptions(block_size_bytes=4 << 30), CREATE), "32 bits")


def test_replicas_that_nobody_has_are_lost_not_empty(files: Files) -> None:
    files.written("/f", 5)
    files.workers.ids = [8]
    refused(10000, lambda: files.blocks.locate("/f"), "all replicas has been lost")


# -------------------------------------------------------------------------------------------------------------- locks

END = (1 << 64) - 1


def lock(owner: int, kind: int, start: int = 0, end: int = END, *, flags: int = 0, at: int = 0) -> FileLock:
    return FileLock("client", owner, 1, at, kind, flags, start, end)


def test_locks_conflict_by_range_owner_and_kind() -> None:
    held = locks.with_lock((), lock(1, locks.WRITE, 0, 9), 5)
    assert locks.conflict(held, lock(2, locks.READ, 9, 20)) == held[0]
    assert locks.conflict(held, lock(2, locks.WRITE, 10, 20)) is None
    assert locks.conflict(held, lock(1, locks.WRITE, 0, END)) is None
    assert locks.conflict(held, lock(2, locks.UNLOCK, 0, 9)) is None
    assert locks.conflict(held, lock(2, locks.WRITE, flags=locks.FLOCK)) is None
    assert held[0].acquired_ms == 5
    shared = locks.with_lock((), lock(1, locks.READ), 5)
    assert locks.conflict(shared, lock(2, locks.READ)) is None


def test_unlock_splits_and_a_new_lock_replaces_its_range() -> None:
    held = locks.with_lock((), lock(1, locks.WRITE, 0, 99), 1)
    held = locks.with_lock(held, lock(1, locks.UNLOCK, 10, 19), 2)
    assert [(one.start, one.end) for one in held] == [(0, 9), (20, 99)]
    held = locks.with_lock(held, lock(1, locks.READ, 5, 30), 3)
    assert [(one.start, one.end, one.lock_type) for one in held] == [(0, 4, 1), (5, 30, 0), (31, 99, 1)]
    held = locks.with_lock(held, lock(1, locks.UNLOCK, 5, END), 4)
    assert [(one.start, one.end) for one in held] == [(0, 4)]


def test_flock_is_one_per_owner() -> None:
    held = locks.with_lock((), lock(1, locks.READ, flags=locks.FLOCK), 1)
    held = locks.with_lock(held, lock(1, locks.WRITE, flags=locks.FLOCK), 2)
    assert [one.lock_type for one in held] == [locks.WRITE]
    assert locks.conflict(held, lock(2, locks.READ, flags=locks.FLOCK)) == held[0]
    assert locks.with_lock(held, lock(1, locks.UNLOCK, flags=locks.FLOCK), 3) == ()


def test_locks_expire() -> None:
    held = (lock(1, locks.WRITE, at=1_000),)
    assert locks.alive(held, 1_000 + locks.EXPIRE_MS - 1) == held
    assert locks.alive(held, 1_000 + locks.EXPIRE_MS) == ()


_RANGES = st.tuples(st.integers(0, 30), st.integers(0, 30)).map(sorted)


@given(st.lists(st.tuples(st.integers(1, 3), st.sampled_from([0, 1, 2]), _RANGES), max_size=12))
def test_locks_against_a_model_of_single_bytes(steps: list[tuple[int, int, list[int]]]) -> None:
    """Byte by byte: who holds what. Conflicts and ranges must agree with it after every step."""
    held: tuple[FileLock, ...] = ()
    model: dict[tuple[int, int], int] = {}
    for owner, kind, (start, end) in steps:
        wanted = lock(owner, kind, start, end)
        conflicting = any(
            (other, byte) in model and locks.WRITE in (model[other, byte], kind)
            for byte in range(start, end + 1)
            for other in range(1, 4)
            if other != owner
        )
        assert (locks.conflict(held, wanted) is not None) == (conflicting and kind != locks.UNLOCK)
        if conflicting and kind != locks.UNLOCK:
            continue
        held = locks.with_lock(held, wanted, 0)
        for byte in range(start, end + 1):
            if kind == locks.UNLOCK:
                model.pop((owner, byte), None)
            else:
                model[owner, byte] = kind
    covered = {(one.owner_id, byte): one.lock_type for one in held for byte in range(one.start, one.end + 1)}
    assert covered == model
