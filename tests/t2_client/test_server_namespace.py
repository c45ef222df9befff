"""The master's name tree, one suite for every metadata store."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from curvfs.errors import DirectoryNotEmpty, FileExists_, IsADirectory, NotADirectory, NotFound, RemoteError
from curvfs.server.metastore import MemoryMetaStore, MetaStore
from curvfs.server.namespace import AttrChange, Namespace, NodeOptions
from curvfs.server.records import ROOT_ID, Kind
from curvfs.server.sqlitestore import SqliteMetaStore

CREATE, EXCL, TRUNC = 0x41, 0x80, 0x200
FILE = NodeOptions(mode=0o644, create_parent=True, block_size_bytes=1 << 20, writer="me", owner="u", group="g")
DIR = NodeOptions(mode=0o755, create_parent=True)
STRICT = NodeOptions(mode=0o755, block_size_bytes=1 << 20, writer="me")


class Tree:
    """A namespace whose store can be opened again, as after a crash."""

    def __init__(self, open_store: Callable[[], MetaStore]) -> None:
        self._open_store = open_store
        self.now_ms = 1_000
        self.freed: list[int] = []
        self.store = open_store()
        self.names = Namespace(self.store, lambda: self.now_ms, self.freed.extend)

    def reopen(self) -> None:
        self.store.close()
        self.store = self._open_store()
        self.names = Namespace(self.store, lambda: self.now_ms, self.freed.extend)

    def listed(self, path: str) -> list[str]:
        return [found for found, _ in self.names.list_status(path)]


@pytest.fixture(params=["memory", "sqlite"])
def tree(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Tree]:
    if request.param == "memory":
        kept = MemoryMetaStore()
        made = Tree(lambda: kept)
    else:
        made = Tree(lambda: SqliteMetaStore(str(tmp_path / "meta.db")))
    yield made
    made.store.close()


def refused(kind: int, call: Callable[[], object], text: str = "") -> None:
    with pytest.raises(RemoteError) as caught:
        call()
    assert caught.value.kind == kind, caught.value
    assert text in caught.value.text


def test_a_fresh_root(tree: Tree) -> None:
    root = tree.names.get("/")
    assert (root.id, root.mode, root.nlink, root.children) == (ROOT_ID, 0o777, 2, 0)
    assert tree.listed("/") == []
    assert tree.names.mkdir("/a", DIR).id == ROOT_ID + 1


def test_ids_are_never_used_again(tree: Tree) -> None:
    first = tree.names.create("/f", FILE, CREATE).id
    tree.names.delete("/f", False)
    tree.reopen()
    assert tree.names.create("/f", FILE, CREATE).id == first + 1


def test_mkdir(tree: Tree) -> None:
    names = tree.names
    made = names.mkdir("/a/b", DIR)
    assert names.mkdir("/a/b", DIR).id == made.id
    refused(7, lambda: names.mkdir("/a/b", STRICT))
    refused(10000, lambda: names.mkdir("/x/y", STRICT), "Parent directory doesn't exist: /x")
    refused(10000, lambda: names.mkdir("/", DIR), "Not allowed to create existing root path")
    names.create("/a/f", FILE, CREATE)
    refused(7, lambda: names.mkdir("/a/f", DIR))
    refused(10000, lambda: names.mkdir("/a/f/x", DIR), "Parent path is not a directory")


def test_directories_count_their_entries_and_keep_time(tree: Tree) -> None:
    names = tree.names
    names.mkdir("/d", DIR)
    tree.now_ms = 2_000
    names.mkdir("/d/sub", DIR)
    names.create("/d/f", FILE, CREATE)
    found = names.get("/d")
    assert (found.children, found.nlink, found.mtime_ms, found.atime_ms) == (2, 3, 2_000, 1_000)
    tree.now_ms = 3_000
    names.delete("/d/sub", False)
    found = names.get("/d")
    assert (found.children, found.nlink, found.mtime_ms) == (1, 2, 3_000)


def test_create_and_overwrite(tree: Tree) -> None:
    names = tree.names
    made = names.create("/d/f", FILE, CREATE)
    assert (made.writers, made.is_complete, made.length_bytes, made.ctime_ms) == (("me",), False, 0, None)
    assert names.get("/d").mode == 0o644, "parents get the file's own mode"
    refused(7, lambda: names.create("/d/f", FILE, CREATE))
    refused(7, lambda: names.create("/d/f", FILE, CREATE | TRUNC | EXCL))
    refused(10000, lambda: names.create("/d", FILE, CREATE | TRUNC), "already exists as a dir")
    refused(10000, lambda: names.create("/x/f", STRICT, CREATE), "Parent directory doesn't exist")
    other = NodeOptions(
        mode=0o600, block_size_bytes=2 << 20, replicas=3, writer="you", owner="x", xattrs={"user.b": b"2"}
    )
    names.set_attr("/d/f", AttrChange(add_xattrs={"user.a": b"1"}))
    again = names.create("/d/f", other, CREATE | TRUNC)
    assert (again.id, again.mode, again.owner) == (made.id, 0o644, "u")
    assert (again.block_size_bytes, again.replicas, again.writers) == (2 << 20, 3, ("me", "you"))
    assert again.xattrs == {"user.a": b"1"}


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"replicas": 0}, "The replica number 0 needs to be between 1 and 100"),
        ({"replicas": 100}, "The replica number"),
        ({"block_size_bytes": (1 << 20) - 1}, "Block size needs to be between 1048576 and 107374182400"),
        ({"block_size_bytes": 100 << 30}, "Block size needs to be between"),
    ],
)
def test_create_checks_its_options(tree: Tree, fields: dict[str, int], text: str) -> None:
    options = NodeOptions(**({"block_size_bytes": 1 << 20} | fields))  # type: ignore[arg-type]
    refused(10000, lambda: tree.names.create("/f", options, CREATE), text)
    assert tree.names.find("/f") is None


def test_special_nodes_have_no_writer(tree: Tree) -> None:
    options = NodeOptions(kind=Kind.FIFO, block_size_bytes=1 << 20, writer="me", xattrs={"curvine.rdev": b"\0\0\0\0"})
    made = tree.names.create("/p", options, CREATE)
    assert (made.kind, made.is_complete, made.xattrs) == (Kind.FIFO, True, {"curvine.rdev": b"\0\0\0\0"})
    refused(19, lambda: tree.names.create("/q", NodeOptions(kind=Kind.DIR, block_size_bytes=1 << 20), CREATE))


def test_setgid_is_inherited(tree: Tree) -> None:
    names = tree.names
    names.mkdir("/s", NodeOptions(mode=0o2775, group="team"))
    assert names.create("/s/f", FILE, CREATE).group == "team"
    below = names.mkdir("/s/d", NodeOptions(mode=0o755, group="other"))
    assert (below.group, below.mode) == ("team", 0o2755)


@pytest.mark.parametrize(
    "path", ["/a//b", "//b", "/a/./b", "/..", "/a/../b", "/a/" + "n" * 256, "/a/x\0y", "/é" * 1 + "é" * 127]
)
def test_names_that_no_client_could_reach_are_refused(tree: Tree, path: str) -> None:
    names = tree.names
    names.create("/src", FILE, CREATE)
    for call in (
        lambda: names.create(path, FILE, CREATE),
        lambda: names.mkdir(path, DIR),
        lambda: names.symlink("t", path, False, 0o777, "", ""),
        lambda: names.link("/src", path),
        lambda: names.rename("/src", path, 0),
    ):
        refused(16, call)
    assert tree.listed("/") == ["/src"]


def test_path_limits(tree: Tree) -> None:
    names = tree.names
    refused(10000, lambda: names.create("rel/x", FILE, CREATE), "Absolute path required, but got rel/x")
    refused(10000, lambda: names.get(""), "Absolute path required")
    refused(10000, lambda: names.get("/d/"), "is invalid")
    refused(10000, lambda: names.create("/" + "a/" * 4500 + "f", FILE, CREATE), "Path too long")
    refused(10000, lambda: names.create("/a" * 1001, FILE, CREATE), "Path too long")
    deep = "/a" * 1000
    assert names.create(deep, FILE, CREATE).id == names.get(deep).id
    assert names.create("/" + "n" * 255, FILE, CREATE) and names.create("/naïve-日本", FILE, CREATE)


def test_delete(tree: Tree) -> None:
    names = tree.names
    names.create("/d/f", FILE, CREATE)
    refused(8, lambda: names.delete("/d/x", True))
    refused(8, lambda: names.delete("/d/f/x", True))
    with pytest.raises(DirectoryNotEmpty):
        names.delete("/d", False)
    refused(10000, lambda: names.delete("/", True), "root is not allowed")
    assert names.delete("/d/f", False) == (1, 0)
    assert names.delete("/d", False) == (0, 0)
    assert tree.store.totals.files == tree.store.totals.directories == 0


def test_a_deleted_tree_is_taken_apart_in_slices(tree: Tree) -> None:
    names = tree.names
    for index in range(600):
        names.create(f"/t/{index % 3}/{index}", FILE, CREATE)
    names.create("/t/f", FILE, CREATE)
    names.link("/t/f", "/kept")
    assert names.delete("/t", True) == (600, 0)
    assert names.find("/t") is None and names.find("/t/0/0") is None
    names.mkdir("/t", DIR)
    assert names.reap()
    tree.reopen()
    while tree.names.reap():
        pass
    assert tree.listed("/t") == [] and tree.listed("/") == ["/kept", "/t"]
    assert (tree.store.totals.files, tree.store.totals.directories) == (1, 1)
    assert tree.names.get("/kept").nlink == 1


def test_rename_moves_and_replaces(tree: Tree) -> None:
    names = tree.names
    first = names.create("/a/f", FILE, CREATE).id
    names.mkdir("/b", DIR)
    tree.now_ms = 5_000
    assert names.rename("/a/f", "/b/g", 0)
    moved = names.get("/b/g")
    assert (moved.id, moved.ctime_ms, moved.mtime_ms) == (first, 5_000, 1_000)
    assert names.get("/a").mtime_ms == names.get("/b").mtime_ms == 5_000
    assert (names.get("/a").children, names.get("/b").children) == (0, 1)
    second = names.create("/a/h", FILE, CREATE).id
    assert names.rename("/a/h", "/b/g", 0)
    assert names.get("/b/g").id == second and tree.store.totals.files == 1
    assert tree.store.inode(first) is None
    assert names.rename("/a", "/b/a", 0)
    assert (names.get("/").nlink, names.get("/b").nlink) == (3, 3)


def test_rename_refusals(tree: Tree) -> None:
    names = tree.names
    names.create("/f", FILE, CREATE)
    names.create("/d/g", FILE, CREATE)
    names.mkdir("/e", DIR)
    assert names.rename("/nope", "/nope", 1) is False, "the same name is looked at first"
    refused(8, lambda: names.rename("/nope", "/x", 0))
    refused(28, lambda: names.rename("/d", "/d/x/y", 0), "destination is under source")
    refused(10000, lambda: names.rename("/f", "/x/y", 0), "Parent /x does not exist")
    refused(7, lambda: names.rename("/f", "/d/g", 1))
    refused(7, lambda: names.rename("/f", "/d/g", 3))
    with pytest.raises(IsADirectory):
        names.rename("/f", "/e", 0)
    with pytest.raises(NotADirectory):
        names.rename("/e", "/f", 0)
    refused(11, lambda: names.rename("/e", "/d", 0))
    refused(28, lambda: names.rename("/", "/x", 0))
    refused(28, lambda: names.rename("/f", "/", 0))
    assert names.rename("/d", "/e", 0), "over an empty directory"
    assert tree.listed("/") == ["/e", "/f"]


def test_rename_below_a_file_keeps_the_source(tree: Tree) -> None:
    names = tree.names
    names.create("/f", FILE, CREATE)
    names.create("/tree/x", FILE, CREATE)
    refused(10, lambda: names.rename("/tree", "/f/y", 0), "Path not a dir")
    assert names.find("/tree/x") is not None


def test_rename_onto_another_name_of_the_file_does_nothing(tree: Tree) -> None:
    names = tree.names
    names.create("/f", FILE, CREATE)
    names.link("/f", "/g")
    assert names.rename("/f", "/g", 0) is False
    assert names.get("/f").nlink == names.get("/g").nlink == 2


def test_exchange(tree: Tree) -> None:
    names = tree.names
    one = names.create("/a/f", FILE, CREATE).id
    other = names.mkdir("/b/d", DIR).id
    assert names.rename("/a/f", "/b/d", 2)
    assert (names.get("/b/d").id, names.get("/a/f").id) == (one, other)
    assert (names.get("/a").nlink, names.get("/b").nlink) == (3, 2)
    refused(8, lambda: names.rename("/a/f", "/nope", 2))
    refused(28, lambda: names.rename("/a/f", "/a", 2))


def test_symlinks(tree: Tree) -> None:
    names = tree.names
    names.mkdir("/d", DIR)
    names.symlink("anything at all/../", "/d/l", False, 0o777, "o", "g")
    found = names.get("/d/l")
    assert (found.kind, found.target, found.is_complete, found.block_size_bytes) == (
        Kind.LINK,
        "anything at all/../",
        True,
        0,
    )
    with pytest.raises(FileExists_):
        names.symlink("t", "/d/l", False, 0o777, "", "")
    names.symlink("t", "/d/l", True, 0o777, "", "")
    assert names.get("/d/l").target == "anything at all/../"
    refused(10000, lambda: names.symlink("t", "/x/l", False, 0o777, "", ""), "Directory does not exist")
    names.symlink("/d", "/to-d", False, 0o777, "", "")
    assert names.find("/to-d/l") is None, "links on the way are not followed"


def test_hard_links(tree: Tree) -> None:
    names = tree.names
    names.create("/f", FILE, CREATE)
    tree.now_ms = 9_000
    names.link("/f", "/new/dir/g")
    assert (names.get("/f").nlink, names.get("/f").ctime_ms) == (2, 9_000)
    assert (names.get("/new").mode, names.get("/new").owner) == (0o777, "")
    with pytest.raises(FileExists_):
        names.link("/f", "/new/dir/g")
    refused(10000, lambda: names.link("/new", "/x"), "Cannot create link to directory")
    refused(10, lambda: names.link("/f", "/f/x"))
    with pytest.raises(NotFound):
        names.link("/nope", "/x")
    assert names.delete("/f", False) == (0, 0)
    assert names.get("/new/dir/g").nlink == 1 and tree.store.totals.files == 1


def test_set_attr(tree: Tree) -> None:
    names = tree.names
    names.create("/d/f", FILE, CREATE)
    tree.now_ms = 7_000
    change = AttrChange(
        owner="alice", mode=0o177640, atime_ms=1, mtime_ms=-2, add_xattrs={"user.a": b"\0\xff", "b": b""}
    )
    found = names.set_attr("/d/f", change)
    assert (found.owner, found.group, found.mode) == ("alice", "g", 0o7640)
    assert (found.atime_ms, found.mtime_ms, found.ctime_ms) == (1, -2, 7_000)
    tree.reopen()
    assert tree.names.get("/d/f") == found
    found = tree.names.set_attr("/d/f", AttrChange(remove_xattrs=("b", "nope"), add_xattrs={"\0curvine.ctime": b"x"}))
    assert found.xattrs == {"user.a": b"\0\xff"}
    refused(8, lambda: tree.names.set_attr("/nope", AttrChange()))
    refused(19, lambda: tree.names.set_attr("/d/f", AttrChange(ufs_mtime=1)))


def test_set_attr_below(tree: Tree) -> None:
    names = tree.names
    names.create("/d/e/f", FILE, CREATE)
    names.set_attr("/d", AttrChange(recursive=True, owner="all", mode=0o700, mtime_ms=5, add_xattrs={"a": b"1"}))
    below = names.get("/d/e/f")
    assert (below.owner, below.mode, below.mtime_ms, below.xattrs) == ("all", 0o700, 1_000, {})


def test_ttl(tree: Tree) -> None:
    names = tree.names
    names.create("/f", FILE, CREATE)
    assert names.set_attr("/f", AttrChange(ttl_ms=10, ttl_action=2)).policy.ttl_action == 2
    assert names.set_attr("/f", AttrChange(ttl_action=1)).policy.ttl_action == 2, "FREE stays"
    tree.reopen()
    assert tree.names.get("/f").policy.ttl_ms == 10


def test_listing_order_and_pages(tree: Tree) -> None:
    names = tree.names
    for name in ("b", "a", "B", "é", "*x", "[q]", "a\U0001f600", "a\uffff"):
        names.create(f"/l/{name}", FILE, CREATE)
    expected = sorted(("b", "a", "B", "é", "*x", "[q]", "a\U0001f600", "a\uffff"), key=str.encode)
    assert tree.listed("/l") == [f"/l/{name}" for name in expected]
    pages = []
    after = ""
    while page := names.list_page("/l", after, 3):
        pages += [path for path, _ in page]
        after = pages[-1].rpartition("/")[2]
    assert pages == tree.listed("/l")
    assert names.list_page("/l", "", 0) == []
    assert [path for path, _ in names.list_page("/l/a", "", None)] == ["/l/a"]
    refused(10000, lambda: names.list_page("/l", "", -1), "limit")
    refused(10000, lambda: names.list_page("/l/*", "", None), "does not support glob")
    refused(8, lambda: names.list_page("/nope", "", None))


def test_globs(tree: Tree) -> None:
    names = tree.names
    for path in ("/g/a1/x", "/g/a2/y", "/g/b", "/g/*x", "/g/{z}"):
        names.create(path, FILE, CREATE)
    assert tree.listed("/g/a?") == ["/g/a1/x", "/g/a2/y"]
    assert tree.listed("/g/[ab]*") == ["/g/a1/x", "/g/a2/y", "/g/b"]
    assert tree.listed("/g/[*]x") == ["/g/*x"]
    assert tree.listed("/*/[!a-a]") == ["/g/b"]
    assert tree.listed("/g/{z}") == ["/g/{z}"]
    assert tree.listed("/nope/*") == [], "no match is no error"
    refused(8, lambda: tree.listed("/g/[a"), "not found")


def test_everything_survives_reopening(tree: Tree) -> None:
    names = tree.names
    names.create(
        "/d/f",
        NodeOptions(
            mode=0o600, block_size_bytes=1 << 20, writer="w", create_parent=True, xattrs={"curvfs.born": b"\x80"}
        ),
        CREATE,
    )
    names.link("/d/f", "/d/g")
    names.symlink("target", "/d/l", False, 0o777, "o", "")
    before = {path: names.get(path) for path in ("/", "/d", "/d/f", "/d/g", "/d/l")}
    totals = tree.store.totals
    tree.reopen()
    assert {path: tree.names.get(path) for path in before} == before
    assert tree.store.totals == totals


def test_a_refused_request_changes_nothing(tree: Tree) -> None:
    names = tree.names
    names.create("/f", FILE, CREATE)
    totals = tree.store.totals
    refused(10000, lambda: names.create("/new/deep/f", NodeOptions(block_size_bytes=1 << 20), CREATE))
    refused(10, lambda: names.link("/f", "/f/a/b"))
    assert tree.listed("/") == ["/f"] and tree.store.totals == totals
