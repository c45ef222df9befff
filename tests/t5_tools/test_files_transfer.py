"""``curvfs cat``, ``put``, ``get`` and ``cp`` on a real server: what arrives, what is refused, what is left behind."""

from __future__ import annotations

import fcntl
import io
import os
import random
import resource
import stat
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from curvfs.api import SyncFileSystem
from tests.t5_tools.conftest import Curvfs, Place, ServerProcess
from tools.files import copying, local, remote
from tools.files.local import partial_name

BIG_BYTES = 5 * 2**20 + 17


@pytest.fixture
def small_is_big(monkeypatch: pytest.MonkeyPatch) -> None:
    """Files of 1 MiB are resumable already, and are copied in pieces of 256 KiB."""
    monkeypatch.setattr(copying, "CHUNK_BYTES", 2**18)
    for module in (local, remote):
        monkeypatch.setattr(module, "RESUMABLE_BYTES", 2**20)


def content(size_bytes: int = BIG_BYTES, seed: int = 1) -> bytes:
    return random.Random(seed).randbytes(size_bytes)


@pytest.fixture
def big(tmp_path: Path) -> Path:
    path = tmp_path / "big"
    path.write_bytes(content())
    return path


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty directory that commands run in."""
    path = tmp_path / "here"
    path.mkdir()
    monkeypatch.chdir(path)
    return path


# --------------------------------------------------------------------------------------------------------- put and get


def test_there_and_back(place: Place, curvfs: Curvfs, big: Path, here: Path) -> None:
    place.fs.mkdir("/d")
    big.chmod(0o750)
    assert curvfs("put", big, "/d").out == ""
    assert place.names("/d") == ["big"]
    status = place.fs.stat("/d/big")
    assert status.mode == 0o750 and status.owner and status.is_complete and not status.xattrs
    (document,) = curvfs("get", "--json", "/d/big").documents
    assert document["size_bytes"] == BIG_BYTES and document["resumed_bytes"] == 0
    assert (here / "big").read_bytes() == content()
    assert stat.S_IMODE((here / "big").stat().st_mode) == 0o750
    assert os.listdir(here) == ["big"]
    assert curvfs("get", "-v", f"{place.url}/d/big", "other").out.endswith("other (5.0 MiB)\n")
    assert (here / "other").read_bytes() == content()


def test_what_is_replaced_keeps_its_mode(place: Place, curvfs: Curvfs, big: Path, here: Path) -> None:
    place.write("/f", b"old")
    place.fs.set_attr("/f", mode=0o604, owner="alice", group="staff")
    assert curvfs("put", big, "/f").code == 0
    status = place.fs.stat("/f")
    assert (status.mode, status.owner, status.group, status.length_bytes) == (0o604, "alice", "staff", BIG_BYTES)
    (here / "f").write_bytes(b"old")
    (here / "f").chmod(0o606)
    assert curvfs("get", "/f").code == 0
    assert stat.S_IMODE((here / "f").stat().st_mode) == 0o606 and (here / "f").stat().st_size == BIG_BYTES


def test_no_clobber_leaves_what_is_there(place: Place, curvfs: Curvfs, big: Path, here: Path) -> None:
    place.write("/f", b"old")
    assert curvfs("put", "-n", big, "/f").code == 5
    assert (place.read("/f"), place.names()) == (b"old", ["f"])
    assert curvfs("put", "-n", big, "/g").code == 0
    (here / "f").write_bytes(b"mine")
    assert curvfs("get", "-n", "/f").code == 5
    assert (here / "f").read_bytes() == b"mine" and os.listdir(here) == ["f"]
    assert curvfs("get", "-n", "/f", "g").code == 0


def test_preserve_and_update(place: Place, curvfs: Curvfs, big: Path, here: Path) -> None:
    os.utime(big, (1_700_000_000, 1_700_000_000))
    assert curvfs("put", "-p", big, "/f").code == 0
    assert place.fs.stat("/f").mtime_ms == 1_700_000_000_000
    assert curvfs("put", "-u", "--json", big, "/f").documents == []
    os.utime(big, (1_700_000_001, 1_700_000_001))
    assert len(curvfs("put", "-u", "--json", big, "/f").documents) == 1
    assert curvfs("get", "-p", "/f").code == 0
    assert int((here / "f").stat().st_mtime * 1000) == place.fs.stat("/f").mtime_ms
    assert curvfs("get", "-u", "--json", "/f").documents == []
    (here / "f").write_bytes(b"short")
    assert len(curvfs("get", "-u", "--json", "/f").documents) == 1


def test_whole_trees(place: Place, curvfs: Curvfs, tmp_path: Path, here: Path) -> None:
    top = tmp_path / "top"
    (top / "sub" / "empty").mkdir(parents=True)
    (top / "sub" / "a*").write_bytes(b"star")
    (top / "file").write_bytes(content(3000))
    (top / "link").symlink_to("sub/a*")
    os.mkfifo(top / "pipe")
    assert curvfs("put", top, "/").code == 5
    done = curvfs("put", "-r", top, "/")
    assert done.code == 5 and "pipe: it is a special file" in done.err and done.err.count("\n") == 1
    assert place.names("/top") == ["file", "link", "sub"]
    assert place.read("/top/sub/a*") == b"star"
    assert curvfs("cp", "-r", "/top", "/copy").code == 0
    assert curvfs("get", "/copy").code == 5
    assert curvfs("get", "-r", "/copy").code == 0
    assert (here / "copy" / "link").read_bytes() == b"star"
    assert (here / "copy" / "file").read_bytes() == content(3000)
    assert (here / "copy" / "sub" / "empty").is_dir()
    # Once more, into what is there.
    assert curvfs("put", "-r", "-u", here / "copy", "/").code == 0
    assert curvfs("get", "-r", "/copy").code == 0
    assert place.names() == ["copy", "top"]


def test_a_tree_does_not_leave_its_place_through_a_symlink(place: Place, curvfs: Curvfs, here: Path) -> None:
    place.fs.mkdir("/t/d", parents=True)
    place.write("/t/d/f", b"x")
    place.write("/t/g", b"x")
    (here / "outside").mkdir()
    (here / "t").mkdir()
    (here / "t" / "d").symlink_to("../outside")
    (here / "t" / "g").symlink_to("../outside/g")
    done = curvfs("get", "-r", "/t", ".")
    assert done.code == 5 and done.err.count("\n") == 2
    assert os.listdir(here / "outside") == []


def test_standard_streams(place: Place, curvfs: Curvfs, monkeypatch: pytest.MonkeyPatch, here: Path) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"from a pipe\n")))
    assert curvfs("put", "-", "/f").code == 0
    assert place.read("/f") == b"from a pipe\n"
    assert curvfs("get", "/f", "-").out == "from a pipe\n"
    assert curvfs("cat", "/f", "/nope", "/f").out == "from a pipe\n" * 2
    assert curvfs("cat", "--json", "/f").documents[0]["content"] == "ZnJvbSBhIHBpcGUK"
    assert curvfs("put", "-", "/").code == 5
    assert curvfs("get", "--json", "/f", "-").code == 2
    assert place.names() == ["f"] and os.listdir(here) == []


def test_empty_files_and_pipes(place: Place, curvfs: Curvfs, here: Path) -> None:
    (here / "empty").touch()
    assert curvfs("put", "empty", "/").code == 0
    assert curvfs("get", "/empty", "back").code == 0
    assert (here / "back").stat().st_size == 0
    assert curvfs("get", "/empty", "/dev/null").code == 0
    assert stat.S_ISCHR(os.stat("/dev/null").st_mode)
    assert curvfs("put", "/dev/null", "/null").code == 0
    assert place.fs.stat("/null").length_bytes == 0


def test_through_symlinks(place: Place, curvfs: Curvfs, big: Path, here: Path) -> None:
    place.fs.mkdir("/real")
    place.fs.symlink("/real", "/to-real")
    place.fs.symlink("real/f", "/to-f")
    assert curvfs("put", big, "/to-real/").code == 0
    assert place.names("/real") == ["big"]
    assert curvfs("put", big, "/to-f").code == 0
    assert place.names("/real") == ["big", "f"] and place.fs.stat("/to-f").symlink_target == "real/f"
    (here / "target").write_bytes(b"")
    (here / "link").symlink_to("target")
    assert curvfs("get", "/to-f", "link").code == 0
    assert (here / "target").stat().st_size == BIG_BYTES and (here / "link").is_symlink()


def test_cp(place: Place, curvfs: Curvfs) -> None:
    place.write("/a", content())
    assert curvfs("cp", "--verify", "/a", "/b").code == 0
    assert place.read("/b") == content()
    assert curvfs("cp", "/a", "/a").code == 5
    place.fs.mkdir("/d/e", parents=True)
    assert curvfs("cp", "/a", "/b", "/d").code == 0
    assert curvfs("cp", "-r", "/d", "/d/e").code == 5
    assert curvfs("cp", "/d", "/x").code == 5
    assert curvfs("cp", "/a", "/nope", "/d/e").code == 5
    assert place.names("/d/e") == ["a"]
    assert curvfs("cp", "-n", "/a", "/b").code == 5
    assert curvfs("cp", "-p", "/a", "/c").code == 0
    assert place.fs.stat("/c").mtime_ms == place.fs.stat("/a").mtime_ms


def test_cp_between_clusters(place: Place, curvfs: Curvfs, tmp_path: Path) -> None:
    place.write("/a", content())
    other = ServerProcess(tmp_path / "other")
    try:
        assert curvfs("cp", "/a", f"{other.url}b").code == 0
        assert curvfs("cp", "-v", f"{other.url}b", "/c").code == 0
        assert curvfs("mv", "/a", f"{other.url}c").code == 5
    finally:
        other.end()
    assert place.read("/c") == content()


# ------------------------------------------------------------------------------------------------------------ refusals


def test_bad_input(place: Place, curvfs: Curvfs, big: Path, here: Path) -> None:
    place.fs.mkdir("/d/big", parents=True)
    cases = [
        (("put", "nope", "/d"), 1, "nope: No such file"),
        (("put", big, "/nodir/x"), 5, "/nodir does not exist"),
        (("put", big, "/x/"), 5, "is not a directory"),
        (("put", here, "/d"), 5, "is a directory"),
        (("put", big), 2, "curvfs put model.bin"),
        (("put", big, "/d"), 5, "it is a directory"),
        (("put", big, big, "/d/x"), 5, "not a directory"),
        (("put", big, "curvine://127.0.0.1:1/x"), 4, "no Curvine master answers"),
        (("get", "/nope"), 5, "not found"),
        (("get", "/d"), 5, "-r"),
        (("get", "/nope", "no/such/dir"), 5, "not found"),
        (("get", "/d", "/d", "x"), 5, "-r"),
        (("get", "/x", "curvine://h/y"), 2, "curvfs cp"),
        (("cp", "/nope", "/x"), 5, "not found"),
    ]
    for words, code, said in cases:
        done = curvfs(*words)
        assert (done.code, done.out) == (code, ""), words
        assert said in done.err, (words, done.err)
    place.write("/f", b"x")
    assert "Cannot write" in curvfs("get", "/f", "no/such/dir").err
    assert place.names() == ["d", "f"] and place.names("/d") == ["big"] and os.listdir(here) == []


def test_a_failure_does_not_stop_the_rest(place: Place, curvfs: Curvfs, big: Path, here: Path) -> None:
    place.fs.mkdir("/d")
    done = curvfs("put", "--json", "nope", big, "/d")
    assert done.code == 1 and place.names("/d") == ["big"]
    assert [("error" in document) for document in done.documents] == [True, False]


def test_the_pool_is_full(curvfs: Curvfs, big: Path, tmp_path: Path) -> None:
    server = ServerProcess(tmp_path / "small", "--capacity", "3MB")
    try:
        done = curvfs("put", "--set", "block_size=1MB", big, server.url + "big")
        assert done.code == 5 and done.err.count("\n") == 1
        with SyncFileSystem.connect(server.url) as fs:
            assert fs.list("/") == []
        (tmp_path / "fits").write_bytes(content(1000))
        assert curvfs("put", "--set", "block_size=1MB", tmp_path / "fits", server.url).code == 0
    finally:
        server.end()


@pytest.fixture
def files_of_a_mebibyte() -> Iterator[None]:
    """No local file may become longer than that."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2**20, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_the_local_disk_is_full(place: Place, curvfs: Curvfs, here: Path, files_of_a_mebibyte: None) -> None:
    place.write("/f", content(2**21))
    done = curvfs("get", "/f")
    assert done.code == 1 and "File too large" in done.err
    assert os.listdir(here) == []
    done = curvfs("get", "/f", "/dev/full")
    assert done.code == 1 and "No space left" in done.err


# -------------------------------------------------------------------------------------------------- going on with parts


def interrupted(monkeypatch: pytest.MonkeyPatch, sink: type, after_bytes: int) -> None:
    """Ctrl-C arrives while a sink writes its byte ``after_bytes``."""
    write = sink.write

    def hit(self: object, view: memoryview, offset_bytes: int) -> None:
        write(self, view, offset_bytes)
        if offset_bytes <= after_bytes < offset_bytes + len(view):
            monkeypatch.setattr(sink, "write", write)
            os.kill(os.getpid(), 2)

    monkeypatch.setattr(sink, "write", hit)


def resumed(done: object) -> int:
    (document,) = done.documents  # type: ignore[attr-defined]
    return int(document["resumed_bytes"])


@pytest.mark.usefixtures("small_is_big")
class TestParts:
    def put_in_part(self, place: Place, curvfs: Curvfs, big: Path, monkeypatch: pytest.MonkeyPatch) -> str:
        """Where the part is."""
        interrupted(monkeypatch, remote.RemoteSink, 2 * 2**20 + 5)
        done = curvfs("put", big, "/f")
        assert done.code == 130 and "the same command goes on from there" in done.err
        (name,) = place.names()
        assert name.startswith(".f.") and name.endswith(".part")
        assert place.fs.stat(f"/{name}").length_bytes == 2 * 2**20 + 2**18
        return f"/{name}"

    def get_in_part(self, place: Place, curvfs: Curvfs, here: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
        place.write("/f", content())
        interrupted(monkeypatch, local.LocalSink, 2 * 2**20 + 5)
        done = curvfs("get", "/f")
        assert done.code == 130 and "the same command goes on from there" in done.err
        (part,) = here.iterdir()
        assert part.name.startswith(".f.") and part.stat().st_size == 2 * 2**20 + 2**18
        return part

    def test_put_goes_on(self, place: Place, curvfs: Curvfs, big: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.put_in_part(place, curvfs, big, monkeypatch)
        assert resumed(curvfs("put", "--json", "--verify", big, "/f")) == 2 * 2**20 + 2**18
        assert place.names() == ["f"] and place.read("/f") == content()
        assert not place.fs.stat("/f").xattrs and place.fs.stat("/f").is_complete

    def test_put_begins_anew_when_the_file_has_changed(
        self, place: Place, curvfs: Curvfs, big: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        self.put_in_part(place, curvfs, big, monkeypatch)
        before = big.stat()
        big.write_bytes(content(seed=2))
        os.utime(big, ns=(before.st_atime_ns, before.st_mtime_ns))  # as if nothing had happened
        assert resumed(curvfs("put", "--json", big, "/f")) == 0
        assert place.names() == ["f"] and place.read("/f") == content(seed=2)

    def test_put_begins_anew_when_the_part_is_not_what_it_was(
        self, place: Place, curvfs: Curvfs, big: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        part = self.put_in_part(place, curvfs, big, monkeypatch)
        with place.fs.open_for_write(part) as writer:
            writer.write_at(b"damaged", 2 * 2**20)
        assert resumed(curvfs("put", "--json", big, "/f")) == 0
        assert place.read("/f") == content()

    def test_put_begins_anew_when_told_so(
        self, place: Place, curvfs: Curvfs, big: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        self.put_in_part(place, curvfs, big, monkeypatch)
        assert resumed(curvfs("put", "--json", "--no-resume", big, "/f")) == 0
        assert place.names() == ["f"] and place.read("/f") == content()

    def test_verify_finds_what_the_tail_does_not_show(
        self, place: Place, curvfs: Curvfs, big: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        part = self.put_in_part(place, curvfs, big, monkeypatch)
        with place.fs.open_for_write(part) as writer:
            writer.write_at(b"damaged", 10)
        done = curvfs("put", "--verify", big, "/f")
        assert done.code == 1 and "reads back differently" in done.err
        assert place.names() == []

    def test_get_goes_on(self, place: Place, curvfs: Curvfs, here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.get_in_part(place, curvfs, here, monkeypatch)
        assert resumed(curvfs("get", "--json", "--verify", "--sync", "/f")) == 2 * 2**20 + 2**18
        assert (here / "f").read_bytes() == content() and os.listdir(here) == ["f"]

    def test_get_begins_anew_when_the_file_has_changed(
        self, place: Place, curvfs: Curvfs, here: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        self.get_in_part(place, curvfs, here, monkeypatch)
        place.write("/f", content(seed=2))
        assert resumed(curvfs("get", "--json", "/f")) == 0
        assert (here / "f").read_bytes() == content(seed=2) and os.listdir(here) == ["f"]

    def test_get_begins_anew_when_the_part_is_not_what_it_was(
        self, place: Place, curvfs: Curvfs, here: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        part = self.get_in_part(place, curvfs, here, monkeypatch)
        with part.open("r+b") as file:
            file.seek(2 * 2**20)
            file.write(b"damaged")
        assert resumed(curvfs("get", "--json", "/f")) == 0
        assert (here / "f").read_bytes() == content()

    def test_a_part_that_another_process_writes_is_left_alone(
        self, place: Place, curvfs: Curvfs, here: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        part = self.get_in_part(place, curvfs, here, monkeypatch)
        with part.open("rb") as held:
            fcntl.flock(held, fcntl.LOCK_EX)
            done = curvfs("get", "/f")
            assert done.code == 5 and "another curvfs" in done.err and part.exists()

    def test_put_of_a_file_that_another_put_has_uses_a_part_of_its_own(
        self, place: Place, curvfs: Curvfs, big: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        part = self.put_in_part(place, curvfs, big, monkeypatch)
        with big.open("rb") as held:
            fcntl.flock(held, fcntl.LOCK_EX)
            assert resumed(curvfs("put", "--json", big, "/f")) == 0
        assert place.fs.exists(part) and place.read("/f") == content()

    def test_a_file_that_changes_under_the_copy_is_not_published(
        self, place: Place, curvfs: Curvfs, big: Path, here: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        write = remote.RemoteSink.write

        def change(self: remote.RemoteSink, view: memoryview, offset_bytes: int) -> None:
            write(self, view, offset_bytes)
            if offset_bytes == 0:
                with big.open("r+b") as file:
                    file.write(b"changed")

        monkeypatch.setattr(remote.RemoteSink, "write", change)
        done = curvfs("put", big, "/f")
        assert done.code == 1 and "changed while it was being copied" in done.err
        assert place.names() == []


def test_names_of_parts() -> None:
    assert partial_name("a", "k") != partial_name("a", "l") != partial_name("b", "l")
    assert len(partial_name("é" * 127, "k").encode()) < 200
