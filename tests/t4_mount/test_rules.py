"""The mount's rooms that need no kernel: options, seals, nodes and their counts, what is mounted where."""

from __future__ import annotations

import errno
from dataclasses import replace

import pytest

from curvfs.api import FileKind, FileStatus
from curvfs.errors import ConfigError, CurvfsError, InvalidPath, NameTooLong
from curvfs.world import World
from mount import kernel
from mount.inodes import FIRST_ALIAS_ID, ROOT_ID, NodeTable
from mount.naming import decode_name
from mount.options import MountOptions
from mount.private import PrivateFile, Privates
from mount.seal import BORN_XATTR, KV_XATTR, SEALED_XATTR, born_value, is_hidden_xattr, is_sealed, must_seal_first


def status(number: int, name: str = "", kind: FileKind = FileKind.FILE, **changes: object) -> FileStatus:
    made = FileStatus(
        id=number,
        path=f"/{name}",
        name=name,
        kind=kind,
        length_bytes=0,
        mode=0o644,
        owner="0",
        group="0",
        mtime_ms=1,
        atime_ms=1,
        ctime_ms=1,
        nlink=1,
        block_size_bytes=1 << 20,
        replicas=1,
        is_complete=True,
    )
    return replace(made, **changes)  # type: ignore[arg-type]


def directory(number: int, name: str = "", **changes: object) -> FileStatus:
    return status(number, name, FileKind.DIRECTORY, **changes)


# ------------------------------------------------------------------------------------------------------------ options


def test_words_of_fstab_are_taken() -> None:
    options = MountOptions().with_words(
        ["defaults,_netdev,noatime,x-systemd.automount", "ro,allow_other", "nodev", "op_timeout=5,attr_timeout=100ms"]
    )
    assert options.read_only and options.allow_other
    assert options.kernel_words == ("nodev",)
    assert (options.op_timeout_s, options.attr_timeout_s) == (5.0, 0.1)


def test_settings_of_the_client_are_handed_on() -> None:
    options = MountOptions().with_words(["client_hostname=a,rpc_timeout=2s", "read_ahead=2MB,max_background=64"])
    assert options.client_settings == (("client_hostname", "a"), ("rpc_timeout", "2s"))
    assert (options.read_ahead_bytes, options.max_background) == (2 << 20, 64)


@pytest.mark.parametrize(
    "word",
    ["max_read=4096", "nonempty", "writeback_cache", "nonsense", "op_timeout=0", "op_timeout=x", "max_background=0"],
)
def test_harmful_and_unknown_words_are_refused_by_name(word: str) -> None:
    with pytest.raises(ConfigError) as caught:
        MountOptions().with_words([word])
    assert word.partition("=")[0] in str(caught.value)


@pytest.mark.parametrize("path", ["", "..", "a/../b", "a//b", "/", "./a"])
def test_prefixes_that_are_none(path: str) -> None:
    with pytest.raises(ConfigError):
        MountOptions(kv_paths=(path,))


# -------------------------------------------------------------------------------------------------------------- seals


def test_sealed_by_birth_place() -> None:
    born = {BORN_XATTR: born_value(5, "a.tmp")}
    assert not is_sealed(born, 5, "a.tmp")
    assert is_sealed(born, 5, "a") and is_sealed(born, 6, "a.tmp")
    assert not is_sealed({}, 5, "a")
    assert is_sealed({SEALED_XATTR: b"1"}, 5, "a")
    assert born_value(5, "1/a") != born_value(51, "/a")


def test_a_move_that_would_not_seal_by_itself() -> None:
    born = {BORN_XATTR: born_value(5, "a.tmp")}
    assert not must_seal_first(born, 5, "a")
    assert must_seal_first(born, 5, "a.tmp")
    assert must_seal_first({}, 5, "a")
    assert not must_seal_first({SEALED_XATTR: b"1"}, 5, "a.tmp")


def test_internal_attributes() -> None:
    for name in (BORN_XATTR, SEALED_XATTR, KV_XATTR, "curvine.rdev", "a\0b", "security.capability"):
        assert is_hidden_xattr(name)
    for name in ("user.curvfs", "user.x", "trusted.x", "security.other"):
        assert not is_hidden_xattr(name)


def test_names() -> None:
    assert decode_name("ü".encode()) == "ü"
    assert decode_name(b"x" * 255) == "x" * 255
    with pytest.raises(NameTooLong):
        decode_name(b"x" * 256)
    with pytest.raises(InvalidPath) as caught:
        decode_name(b"\xff")
    assert caught.value.errno_ == errno.EILSEQ


# -------------------------------------------------------------------------------------------------------------- nodes


def table(**options: object) -> NodeTable:
    return NodeTable("/pool", directory(1000), **options)  # type: ignore[arg-type]


def test_paths_follow_renamed_directories() -> None:
    nodes = table()
    a = nodes.bind(directory(1001, "a"), nodes.root, "a")
    f = nodes.bind(status(1002, "f"), a, "f")
    assert nodes.path(f) == "/pool/a/f"
    nodes.name(a, nodes.root, "b")
    assert nodes.path(f) == "/pool/b/f"
    whole = NodeTable("/", directory(1000))
    assert (whole.path(whole.root), whole.path_of(whole.root, "x")) == ("/", "/x")
    assert nodes.path(nodes.root) == "/pool"


def test_a_node_lives_as_long_as_somebody_needs_it() -> None:
    nodes = table()
    a = nodes.bind(directory(1001, "a"), nodes.root, "a")
    nodes.looked_up(a)
    f = nodes.bind(status(1002, "f"), a, "f")
    nodes.looked_up(f)
    nodes.looked_up(f)
    assert len(nodes) == 3
    nodes.forget(a.id, 1)
    assert nodes[a.id] is a, "the file below needs its directory"
    nodes.forget(f.id, 1)
    assert nodes[f.id] is f
    nodes.forget(f.id, 1)
    assert len(nodes) == 1, "the directory went with its last file"
    with pytest.raises(CurvfsError) as caught:
        nodes[f.id]
    assert caught.value.errno_ == errno.ESTALE
    nodes.forget(f.id, 1)
    nodes.forget(ROOT_ID, 100)
    assert nodes[ROOT_ID] is nodes.root


def test_an_open_file_keeps_its_node() -> None:
    nodes = table()
    f = nodes.bind(status(1002, "f"), nodes.root, "f")
    nodes.looked_up(f)
    f.handles += 1
    nodes.forget(f.id, 1)
    nodes.unname(f, nodes.root, "f")
    assert nodes[f.id] is f
    f.handles -= 1
    nodes.drop_unused(f)
    assert len(nodes) == 1


def test_a_name_that_went_to_another_file() -> None:
    nodes = table()
    old = nodes.bind(status(1001, "f"), nodes.root, "f")
    nodes.looked_up(old)
    new = nodes.bind(status(1002, "f"), nodes.root, "f")
    nodes.looked_up(new)
    assert nodes.child(nodes.root, "f") is new
    with pytest.raises(CurvfsError) as caught:
        nodes.path(old)
    assert caught.value.errno_ == errno.ESTALE


def test_hard_links_share_a_node_and_a_renamed_file_leaves_its_name() -> None:
    nodes = table()
    one = nodes.bind(status(1001, "a", nlink=2), nodes.root, "a")
    nodes.looked_up(one)
    assert nodes.bind(status(1001, "b", nlink=2), nodes.root, "b") is one
    assert len(one.links) == 2
    nodes.unname(one, nodes.root, "b")
    assert nodes.path(one) == "/pool/a"
    # Another mount renamed it: its only name is the one that was seen last.
    assert nodes.bind(status(1001, "c", nlink=1), nodes.root, "c") is one
    assert list(one.links) == [(nodes.root, "c")]
    assert nodes.child(nodes.root, "a") is None


def test_a_second_node_for_a_file_that_is_still_written() -> None:
    nodes = table()
    first = nodes.bind(status(1001, "a"), nodes.root, "a")
    nodes.looked_up(first)
    nodes.part_from(first)
    second = nodes.bind(status(1001, "a"), nodes.root, "a")
    assert second is not first
    assert second.id >= FIRST_ALIAS_ID
    assert nodes[first.id] is first


def test_files_without_an_id_go_by_their_name() -> None:
    nodes = table()
    one = nodes.bind(status(0, "a"), nodes.root, "a")
    nodes.looked_up(one)
    assert nodes.bind(status(0, "a"), nodes.root, "a") is one
    assert nodes.bind(status(0, "b"), nodes.root, "b") is not one


def test_prefixes_and_seals_of_nodes() -> None:
    nodes = table()
    kv = nodes.bind(directory(1001, "kv", xattrs={KV_XATTR: b"1"}), nodes.root, "kv")
    deep = nodes.bind(directory(1002, "deep"), kv, "deep")
    assert nodes.prefix_of(deep) is kv
    assert nodes.prefix_of(nodes.root) is None
    born = {BORN_XATTR: born_value(1002, "a.tmp")}
    assert nodes.bind(status(1003, "a", xattrs=born), deep, "a").sealed
    assert not nodes.bind(status(1004, "a.tmp", xattrs=born), deep, "a.tmp").sealed
    assert not nodes.bind(status(1005, "a", xattrs=born), nodes.root, "a").sealed, "outside of the prefix"
    inside = table(outer_prefix="/outer")
    assert inside.prefix_of(inside.root) == "/outer"


def test_what_threads_see_of_private_files() -> None:
    nodes = table()
    book = Privates()
    place = (nodes.root, "x.tmp")
    assert book.visible(place, 7) is None
    older, newer = (PrivateFile(nodes.add(status(number)), place) for number in (1001, 1002))
    book.add(older)
    book.add(newer)
    made = PrivateFile(nodes.add(status(1003)), place, reserved_for=7)
    book.add(made)
    assert book.visible(place, 7) is made
    assert book.visible(place, 8) is newer
    assert book.at(place) == [older, newer]
    assert book.names_in(nodes.root) == ["x.tmp"] and book.any_in(nodes.root)
    book.remove(newer)
    assert book.visible(place, 8) is older
    book.remove(older)
    assert book.visible(place, 8) is None and not book.any_in(nodes.root)
    made.reserved_for = None
    assert book.visible(place, 8) is made
    book.remove(made)
    assert len(book) == 0 and book.names_in(nodes.root) == []


# ------------------------------------------------------------------------------------------------------------- kernel


def test_the_table_of_mounts_is_read() -> None:
    disk = World.real().disk
    root = kernel.mount_at(disk, "/")
    assert root is not None and ":" in root.device
    assert kernel.mount_at(disk, "/no/such/mount") is None
    assert kernel.resolve(disk, "/usr/../usr/bin/../bin/") == kernel.resolve(disk, "/usr/bin")


def test_values_for_libfuse_are_escaped() -> None:
    assert kernel.escape_option("curvine://a:1,b:2/x\\y ü") == "curvine://a:1\\,b:2/x\\\\y%20%C3%BC"


@pytest.mark.parametrize(
    ("said", "advice"),
    [
        ("fusermount3: option allow_other only allowed if 'user_allow_other' is set", "user_allow_other"),
        ("fuse: mount failed: Operation not permitted", "CAP_SYS_ADMIN"),
        ("fuse: failed to exec fusermount3: No such file or directory", "install the package fuse3"),
        ("fusermount3: too many FUSE filesystems mounted", "mount_max"),
        ("", "kernel's log"),
    ],
)
def test_refusals_of_libfuse_are_explained(said: str, advice: str) -> None:
    error = kernel.explain_refusal(said, "/mnt")
    assert advice in str(error)
    assert "/mnt could not be mounted" in str(error)
    assert error.exit_code == 3
