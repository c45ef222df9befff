"""What looks at files of a real server and changes them: ``curvfs ls``, ``stat``, ``du``, ``df``, ``report``, ``mv``,
``rm``, ``mkdir``, ``touch``, ``chmod``, ``chown``, ``ln`` and ``xattr``."""

from __future__ import annotations

import json

import pytest

from curvfs.api import FileKind
from curvfs.errors import UsageError
from tests.t5_tools.conftest import Curvfs, Place
from tools.files.modes import changed_mode

STATUS_KEYS = {
    "path", "name", "kind", "size_bytes", "mode", "owner", "group", "mtime_ms", "atime_ms", "ctime_ms", "nlink", "id",
    "children", "block_size_bytes", "replicas", "complete", "storage_type", "storage_state", "ttl_ms", "ttl_action",
    "xattrs",
}  # fmt: skip


@pytest.fixture
def tree(place: Place) -> Place:
    """/d/sub/deep (2000 bytes), /d/file (3 MiB and 5 bytes), /d/link -> file, and /empty with odd names."""
    place.fs.mkdir("/d/sub", parents=True)
    place.write("/d/sub/deep", bytes(2000))
    place.write("/d/file", b"x" * (3 * 2**20 + 5))
    place.fs.symlink("file", "/d/link")
    place.fs.mkdir("/empty")
    for name in ("a*b", "aXb", "[q]?"):
        place.write(f"/empty/{name}")
    return place


# ---------------------------------------------------------------------------------------------------------- listing


def test_ls_is_in_byte_order_and_shows_every_name(tree: Place, curvfs: Curvfs) -> None:
    assert curvfs("ls", "/d").out == "file\nlink\nsub\n"
    assert curvfs("ls").out == "d\nempty\n"
    assert curvfs("ls", "/d/file", "/d/sub").out == "/d/file\n\n/d/sub:\ndeep\n"
    assert curvfs("ls", "-d", "/d").out == "/d\n"
    assert curvfs("ls", f"{tree.url}/d/sub").out == "deep\n"


def test_ls_takes_glob_characters_as_they_are(tree: Place, curvfs: Curvfs) -> None:
    assert curvfs("ls", "/empty/a*b").out == "/empty/a*b\n"
    assert curvfs("ls", "/empty/a*").code == 5
    assert curvfs("ls", f"{tree.url}/empty/%5Bq%5D%3F").code == 0
    assert curvfs("rm", "/empty/a*b").code == 0
    assert tree.names("/empty") == ["[q]?", "aXb"]


def test_ls_long(tree: Place, curvfs: Curvfs) -> None:
    tree.fs.set_attr("/d/file", mode=0o640, owner="me", group="us", mtime_ms=1_796_070_184_000)
    lines = [line.split() for line in curvfs("ls", "-l", "/d").out.splitlines()]
    assert lines[0][:5] == ["-rw-r-----", "1", "me", "us", "3145733"]
    assert lines[0][7:] == ["file"]
    assert lines[1][-3:] == ["link", "->", "file"] and lines[1][0].startswith("l")
    assert lines[2][0] == "drwxr-xr-x"
    assert "3.0 MiB" in curvfs("ls", "-lh", "/d/file").out


def test_ls_recursive_goes_on_after_what_is_missing(tree: Place, curvfs: Curvfs) -> None:
    done = curvfs("ls", "-R", "/nope", "/d")
    assert done.code == 5
    assert done.out == "/d:\nfile\nlink\nsub\n\n/d/sub:\ndeep\n"
    assert done.err.count("\n") == 1 and "/nope" in done.err


def test_ls_json(tree: Place, curvfs: Curvfs) -> None:
    tree.fs.set_attr("/d/file", xattrs={"user.k": b"v"})
    documents = {document["path"]: document for document in curvfs("ls", "-R", "--json", "/d").documents}
    assert set(documents) == {"/d/file", "/d/link", "/d/sub", "/d/sub/deep"}
    assert set(documents["/d/file"]) == STATUS_KEYS
    assert documents["/d/file"]["xattrs"] == {"user.k": "dg=="}
    assert documents["/d/link"]["target"] == "file"
    failed = curvfs("ls", "--json", "/nope")
    assert failed.documents[0]["errno"] == "ENOENT" and failed.documents[0]["exit_code"] == failed.code == 5


def test_names_with_control_characters_are_escaped(place: Place, curvfs: Curvfs) -> None:
    place.write("/a\x1b[31m\nb")
    assert curvfs("ls", "/").out == "a\\x1b[31m\\nb\n"
    assert json.loads(curvfs("ls", "--json", "/").out)["name"] == "a\x1b[31m\nb"


def test_ls_of_a_symlink_follows_it_unless_asked_about_it(tree: Place, curvfs: Curvfs) -> None:
    tree.fs.symlink("/d/sub", "/to-sub")
    assert curvfs("ls", "/to-sub").out == "deep\n"
    assert curvfs("ls", "-l", "/to-sub").out.rstrip().endswith("/to-sub -> /d/sub")
    assert curvfs("ls", "-l", "/to-sub/").out.rstrip().endswith("deep")
    tree.fs.symlink("loop", "/loop")
    assert "too many symlinks" in curvfs("ls", "/loop").err


def test_stat(tree: Place, curvfs: Curvfs) -> None:
    shown = curvfs("stat", "-h", "-b", "/d/file", "/d").out
    assert "3.0 MiB" in shown and "0644 (-rw-r--r--)" in shown and "entries: 3" in shown
    assert len([line for line in shown.splitlines() if "block: " in line]) == 4
    (document,) = curvfs("stat", "--json", "-b", "/d/file").documents
    assert set(document) == STATUS_KEYS | {"blocks"}
    assert [block["size_bytes"] for block in document["blocks"]] == [2**20] * 3 + [5]
    assert curvfs("stat", "/d/link").out.splitlines()[0].strip() == "path: /d/link -> file"


def test_du(tree: Place, curvfs: Curvfs) -> None:
    tree.fs.link("/d/sub/deep", "/d/sub/again")
    lines = [line.split() for line in curvfs("du", "/d").out.splitlines()]
    assert lines == [["2000", "/d/sub"], [str(3 * 2**20 + 2005), "/d"]]
    assert curvfs("du", "-sh", "/d").out.split("  ")[0] == "3.0 MiB"
    assert curvfs("du", "-s", "--json", "/d").documents == [{"path": "/d", "size_bytes": 3 * 2**20 + 2005, "files": 4}]
    assert curvfs("du", "/d/file").out.split() == [str(3 * 2**20 + 5), "/d/file"]
    assert curvfs("du", "/nope").code == 5


def test_df_and_report(tree: Place, curvfs: Curvfs) -> None:
    (space,) = curvfs("df", "--json").documents
    assert space["size_bytes"] > space["used_bytes"] > 3_000_000
    assert set(space) == {"cluster", "size_bytes", "used_bytes", "available_bytes", "files", "directories"}
    assert curvfs("df", "-h", tree.url).out.splitlines()[1].startswith("curvine://127.0.0.1:")
    (found,) = curvfs("report", "--json").documents
    assert found["workers"][0]["state"] == "live" and found["files"] >= 5
    shown = curvfs("report").out
    assert "active master: 127.0.0.1:" in shown and "1 live, 0 not" in shown


# ---------------------------------------------------------------------------------------------------------- changes


def test_mv(tree: Place, curvfs: Curvfs) -> None:
    assert curvfs("mv", "/d/file", "/moved").code == 0
    assert curvfs("mv", "/moved", "/d/sub/deep", "/empty").code == 0
    assert {"moved", "deep"} <= set(tree.names("/empty"))
    assert curvfs("mv", "-n", "/empty/moved", "/empty/deep").code == 5
    assert curvfs("mv", "-v", "/empty/moved", "/empty/deep").out == "/empty/moved -> /empty/deep\n"
    assert len(tree.read("/empty/deep")) == 3 * 2**20 + 5
    assert curvfs("mv", "--json", "/empty", "/d").documents == [{"path": "/empty", "moved_to": "/d/empty"}]
    done = curvfs("mv", "/nope", "/d/empty/deep", "/d/sub")
    assert done.code == 5 and tree.names("/d/sub") == ["deep"]
    assert curvfs("mv", "/d", "/d/sub").code == 5
    assert curvfs("mv", "/d").code == 2
    assert curvfs("mv", "/d", "curvine://127.0.0.1:1/d").code == 5
    assert "curvfs mkdir" in curvfs("mv", "/d", "/no/where").err


def test_mv_exchange(place: Place, curvfs: Curvfs) -> None:
    place.write("/a", b"a")
    place.write("/b", b"b")
    assert curvfs("mv", "--exchange", "/a", "/b").code == 0
    assert (place.read("/a"), place.read("/b")) == (b"b", b"a")
    assert curvfs("mv", "--exchange", "-n", "/a", "/b").code == 2


def test_rm(tree: Place, curvfs: Curvfs) -> None:
    assert curvfs("rm", "/d").code == 5
    assert curvfs("rm", "/d/file/").code == 5
    assert curvfs("rm", "-d", "/d").code == 5
    done = curvfs("rm", "-v", "/nope", "/d/link")
    assert done.code == 5 and done.out == "removed /d/link\n"
    assert "file" in tree.names("/d")
    assert curvfs("rm", "-f", "/nope").code == 0
    assert curvfs("rm", "-r", "--json", "/d").documents == [{"path": "/d", "removed": True}]
    assert tree.names() == ["empty"]
    assert curvfs("rm", "-r", "/").code == 5


def test_mkdir(place: Place, curvfs: Curvfs) -> None:
    assert curvfs("mkdir", "-m", "u=rwx,go=", "/a").code == 0
    assert place.fs.stat("/a").mode == 0o700
    assert place.fs.stat("/a").owner
    assert curvfs("mkdir", "/a").code == 5
    assert curvfs("mkdir", "/x/y").code == 5
    assert curvfs("mkdir", "-p", "/x/y", "/a").code == 0
    place.write("/file")
    assert curvfs("mkdir", "-p", "/file").code == 5
    assert curvfs("mkdir", "-p", "/file/x").code == 5
    assert curvfs("mkdir", "/" + "n" * 256).code == 2


def test_touch(place: Place, curvfs: Curvfs) -> None:
    assert curvfs("touch", "-d", "2026-01-02T03:04:05+00:00", "/t").code == 0
    assert place.fs.stat("/t").mtime_ms == 1_767_323_045_000
    assert curvfs("touch", "/t").code == 0
    assert place.fs.stat("/t").mtime_ms > 1_767_323_045_000
    assert curvfs("touch", "-c", "/u").code == 0
    assert place.names() == ["t"]
    assert curvfs("touch", "/t/u").code == 5
    assert curvfs("touch", "/v/").code == 5
    assert curvfs("touch", "-d", "soon", "/t").code == 2


def test_chmod_and_chown(tree: Place, curvfs: Curvfs) -> None:
    assert curvfs("chmod", "u=rw,go=r", "/d/link").code == 0
    assert tree.fs.stat("/d/file").mode == 0o644
    assert curvfs("chmod", "-R", "go-rwx,u+X", "/d").code == 0
    assert (tree.fs.stat("/d/file").mode, tree.fs.stat("/d/sub").mode) == (0o600, 0o700)
    assert curvfs("chmod", "-R", "0755", "/d").code == 0
    assert tree.fs.stat("/d/sub/deep").mode == 0o755
    documents = curvfs("chmod", "-R", "--json", "0750", "/d").documents
    assert {"path": "/d/sub/deep", "mode": "0750"} in documents
    assert curvfs("chmod", "u+q", "/d").code == 2
    done = curvfs("chown", "-v", "alice:", "/d")
    assert done.code == 2
    assert curvfs("chown", "-R", "alice:staff", "/nope", "/d").code == 5
    status = tree.fs.stat("/d/sub/deep")
    assert (status.owner, status.group) == ("alice", "staff")
    assert curvfs("chown", ":wheel", "/d").code == 0
    assert (tree.fs.stat("/d").owner, tree.fs.stat("/d").group) == ("alice", "wheel")


@pytest.mark.parametrize(
    ("text", "before", "is_dir", "after"),
    [
        ("755", 0o600, False, 0o755),
        ("u+x", 0o644, False, 0o744),
        ("a-w", 0o666, False, 0o444),
        ("+x", 0o644, False, 0o755),
        ("=r", 0o777, False, 0o444),
        ("go=", 0o777, False, 0o700),
        ("u+rwX,g=u", 0o400, False, None),
        ("+X", 0o644, False, 0o644),
        ("+X", 0o644, True, 0o755),
        ("u+s,g+s,+t", 0o755, False, 0o7755),
        ("u=rw+x", 0o000, False, 0o700),
        ("9", 0, False, None),
        ("", 0, False, None),
    ],
)
def test_modes(text: str, before: int, is_dir: bool, after: int | None) -> None:
    if after is None:
        with pytest.raises(UsageError, match="is no mode"):
            changed_mode(text, before, is_dir=is_dir)
    else:
        assert changed_mode(text, before, is_dir=is_dir) == after


def test_ln(tree: Place, curvfs: Curvfs) -> None:
    assert curvfs("ln", "/d/file", "/hard").code == 0
    assert tree.fs.stat("/hard").id == tree.fs.stat("/d/file").id
    assert curvfs("ln", "/d/file", "/hard").code == 5
    assert curvfs("ln", "-f", "/d/file", "/hard").code == 0
    assert curvfs("ln", "/d", "/hard2").code == 5
    assert curvfs("ln", "-s", "anything/at/all", "/soft").code == 0
    assert tree.fs.stat("/soft").symlink_target == "anything/at/all"
    assert curvfs("ln", "-s", "other", "/soft").code == 5
    assert curvfs("ln", "-sf", "other", "/soft").code == 0
    assert tree.fs.stat("/soft").symlink_target == "other"
    assert curvfs("ln", "-s", "/d/file", "/d/sub/deep", "/empty").code == 0
    assert tree.fs.stat("/empty/deep").kind is FileKind.SYMLINK
    assert curvfs("ln", "/nope", "/x").code == 5


def test_xattr(tree: Place, curvfs: Curvfs) -> None:
    assert curvfs("xattr", "set", "/d/link", "user.text", "some text").code == 0
    assert curvfs("xattr", "set", "/d/file", "user.hex", "0x00ff").code == 0
    assert curvfs("xattr", "set", "/d/file", "user.b64", "0sAAE=").code == 0
    assert tree.fs.stat("/d/file").xattrs == {"user.text": b"some text", "user.hex": b"\0\xff", "user.b64": b"\0\1"}
    assert curvfs("xattr", "list", "/d/file").out == "user.b64=0sAAE=\nuser.hex=0sAP8=\nuser.text=some text\n"
    assert curvfs("xattr", "get", "/d/file", "user.text").out == "some text\n"
    assert curvfs("xattr", "get", "/d/file", "user.hex", "--json").documents[0]["value"] == "AP8="
    assert curvfs("xattr", "rm", "/d/file", "user.hex").code == 0
    assert curvfs("xattr", "rm", "/d/file", "user.hex").code == 5
    assert curvfs("xattr", "get", "/d/file", "user.hex").code == 5
    assert curvfs("xattr", "set", "/d/file", "user.x", "0xZZ").code == 2
    assert curvfs("xattr", "set", "/d/file", "", "x").code == 2
    assert curvfs("xattr", "list", "/nope", "/d/file", "--json").code == 5


# -------------------------------------------------------------------------------------------------------- bad input


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (("ls", "curvine://127.0.0.1:1/"), 4, "no Curvine master answers"),
        (("ls", "http://h/x"), 2, "is not a Curvine URL"),
        (("ls", "curvine://h:99999/"), 2, "does not name a master"),
        (("ls", "curvine://h/?colour=blue"), 2, "no setting 'colour'"),
        (("ls", "relative"), 2, "begins with a slash"),
        (("ls", "/a\udc80b"), 2, "is not UTF-8"),
        (("ls", "--set", "window", "/"), 2, "--set NAME=VALUE"),
        (("ls", "--conf", "/nowhere.toml", "/"), 2, "does not exist"),
        (("stat",), 2, "Missing argument"),
        (("cat", "/d"), 5, "Not a file"),
        (("cat", "/d/file/x"), 5, "not found"),
        (("rm", "/d/nope"), 5, "not found"),
    ],
    ids=lambda value: " ".join(value).encode("ascii", "replace").decode() if isinstance(value, tuple) else None,
)
def test_bad_input_is_one_sentence_and_an_exit_code(
    tree: Place, curvfs: Curvfs, words: tuple[str, ...], code: int, said: str
) -> None:
    done = curvfs(*words)
    assert done.code == code
    assert done.out == ""
    assert said in done.err and done.err.count("\n") == 1


def test_a_cluster_that_does_not_answer_is_asked_once(curvfs: Curvfs) -> None:
    done = curvfs("ls", "curvine://127.0.0.1:1/a", "curvine://127.0.0.1:1/b")
    assert (done.code, done.err.count("\n")) == (4, 2)


def test_without_a_configured_cluster_a_path_names_nothing(curvfs: Curvfs, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CURVINE_CONF_FILE", raising=False)
    monkeypatch.delenv("CURVINE_HOME", raising=False)
    done = curvfs("ls", "/")
    assert done.code == 2 and "CURVINE_CONF_FILE" in done.err


def test_the_exit_code_is_that_of_the_first_failure(tree: Place, curvfs: Curvfs) -> None:
    assert curvfs("ls", "relative", "/nope", "/d").code == 2
    assert curvfs("ls", "/nope", "relative", "/d").code == 5
