"""``curvine://`` through fsspec: pandas and torch on it, atomic writes, errors, pickles, forks."""

from __future__ import annotations

import errno
import os
import pickle
import subprocess
import sys
import traceback
from collections.abc import Callable, Iterator

import fsspec
import pytest

from curvfs.errors import ConfigError, ConnectFailed, NotFound, UsageError
from curvfs.fsspec import CurvineFsspec
from tests.t5_tools.conftest import Place


@pytest.fixture
def fs(place: Place) -> Iterator[CurvineFsspec]:
    """Its root is the place's."""
    masters = place.server.url.removeprefix("curvine://").rstrip("/")
    root = "/" + place.url.rpartition("/")[2]
    found = CurvineFsspec(masters, root=root, block_size="1MB", skip_instance_cache=True)
    yield found
    found.client.close()


# ------------------------------------------------------------------------------------------------------ who opens files


def test_it_is_registered_by_an_entry_point(place: Place) -> None:
    """In a fresh interpreter, which imports nothing of ours by itself."""
    program = (
        "import fsspec, sys\n"
        f"with fsspec.open({place.url + '/a%20b.txt'!r}, 'w') as file:\n"
        "    file.write('text')\n"
        f"fs, path = fsspec.url_to_fs({place.url + '/a%20b.txt?client_hostname=elsewhere'!r})\n"
        "assert path.endswith('/a b.txt'), path\n"
        "assert fs.client.config.hostname == 'elsewhere'\n"
        "print(fs.cat(path).decode(), fsspec.url_to_fs(fs.unstrip_protocol(path))[1] == path)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (0, "text True\n", "")
    assert place.read("/a b.txt") == b"text"


def test_pandas(place: Place) -> None:
    pandas = pytest.importorskip("pandas")
    frame = pandas.DataFrame({"name": ["a", "b"], "value": [1.5, 2.5]})
    frame.to_csv(f"{place.url}/dir/frame.csv", index=False)
    frame.to_json(f"{place.url}/frame.json")
    frame.to_pickle(f"{place.url}/frame.pickle.gz")
    assert pandas.read_csv(f"{place.url}/dir/frame.csv").equals(frame)
    assert pandas.read_json(f"{place.url}/frame.json").equals(frame)
    assert pandas.read_pickle(f"{place.url}/frame.pickle.gz").equals(frame)
    assert place.read("/dir/frame.csv") == b"name,value\na,1.5\nb,2.5\n"
    with pytest.raises(FileNotFoundError):
        pandas.read_csv(f"{place.url}/nope.csv")


def test_torch(place: Place) -> None:
    torch = pytest.importorskip("torch")
    state = {"weight": torch.arange(2_000_000, dtype=torch.float32), "step": 7}
    with fsspec.open(f"{place.url}/model.pt", "wb") as file:
        torch.save(state, file)
    with fsspec.open(f"{place.url}/model.pt", "rb") as file:
        loaded = torch.load(file, weights_only=True)
    assert loaded["step"] == 7 and torch.equal(loaded["weight"], state["weight"])


def test_caches_and_compression_on_top(place: Place, tmp_path: object) -> None:
    with fsspec.open(f"{place.url}/log.gz", "wt", compression="infer") as file:
        file.write("line\n" * 1000)
    assert place.read("/log.gz")[:2] == b"\x1f\x8b"
    with fsspec.open(f"{place.url}/log.gz", "rt", compression="infer") as file:
        assert file.read() == "line\n" * 1000
    with fsspec.open(f"simplecache::{place.url}/log.gz", "rb", simplecache={"cache_storage": str(tmp_path)}) as file:
        assert file.read(2) == b"\x1f\x8b"


def test_without_a_host_the_cluster_file_says_which(place: Place) -> None:
    root = "/" + place.url.rpartition("/")[2]
    with fsspec.open(f"curvine://{root}/f", "wb") as file:
        file.write(b"x")
    assert place.read("/f") == b"x"


# ------------------------------------------------------------------------------------------------------------- reading


def test_reading(fs: CurvineFsspec, place: Place) -> None:
    content = bytes(range(256)) * 20_000
    place.write("/f", content)
    with fs.open("/f") as file:
        assert (file.size, file.read(3), file.seek(-2, 2), file.read()) == (
            len(content),
            b"\0\1\2",
            len(content) - 2,
            b"\xfe\xff",
        )
        buffer = bytearray(len(content))
        file.seek(0)
        assert file.readinto(buffer) == len(content) and buffer == content
        assert file.readinto(buffer) == 0
    assert fs.cat_file("/f", 1, 4) == b"\1\2\3"
    assert fs.cat_file("/f", -2) == b"\xfe\xff"
    assert fs.cat_file("/f", 5, 5) == b""
    assert fs.cat_ranges(["/f", "/f"], [0, 10], [2, 12]) == [b"\0\1", b"\n\v"]
    assert fs.head("/f", 2) == b"\0\1" and fs.tail("/f", 1) == b"\xff"
    place.write("/lines", b"a\nb\n")
    with fs.open("/lines", "rt") as file:
        assert list(file) == ["a\n", "b\n"]


def test_names(fs: CurvineFsspec, place: Place) -> None:
    fs.makedirs("/d/sub")
    place.write("/d/a#b?c d", b"x")
    place.write("/d/sub/f.csv", b"xy")
    place.fs.symlink("sub/f.csv", "/d/link")
    place.fs.symlink("nowhere", "/d/broken")
    assert fs.ls("/d", detail=False) == ["/d/a#b?c d", "/d/broken", "/d/link", "/d/sub"]
    assert {entry["name"]: (entry["type"], entry["size"]) for entry in fs.ls("d/")} == {
        "/d/a#b?c d": ("file", 1), "/d/broken": ("link", 0), "/d/link": ("file", 2), "/d/sub": ("directory", 0),
    }  # fmt: skip
    assert fs.info("/d/link")["destination"] == "sub/f.csv" and fs.info("/d/link")["islink"]
    assert fs.ls("/d/link")[0]["name"] == "/d/link"
    assert fs.cat("/d/link") == b"xy"
    assert fs.exists("/d/link") and not fs.exists("/d/broken") and fs.lexists("/d/broken")
    assert fs.isfile("/d/link") and fs.isdir("/d") and not fs.isdir("/nope")
    assert fs.glob("/d/**/*.csv") == ["/d/sub/f.csv"]
    assert set(fs.find("/d")) == {"/d/a#b?c d", "/d/broken", "/d/link", "/d/sub/f.csv"}
    assert fs.du("/d/sub") == 2
    assert fsspec.core.url_to_fs(fs.unstrip_protocol("/d/a#b?c d"))[1] == "/d/a#b?c d"
    assert fs.modified("/d/sub/f.csv").timestamp() == pytest.approx(place.fs.stat("/d/sub/f.csv").mtime_ms / 1000)


# ------------------------------------------------------------------------------------------------------------- writing


def test_a_file_appears_whole(fs: CurvineFsspec, place: Place) -> None:
    place.write("/f", b"old")
    place.fs.set_attr("/f", mode=0o600, owner="alice")
    with fs.open("/f", "wb", block_size=2**20) as file:
        for _ in range(5):
            file.write(bytes(2**20))
        assert place.read("/f") == b"old"
    status = place.fs.stat("/f")
    assert (status.length_bytes, status.mode, status.owner) == (5 * 2**20, 0o600, "alice")
    assert place.names() == ["f"]


def test_what_fails_leaves_nothing(fs: CurvineFsspec, place: Place) -> None:
    with pytest.raises(ZeroDivisionError), fs.open("/new", "wb", block_size=2**20) as file:
        file.write(bytes(3 * 2**20))
        raise ZeroDivisionError
    assert place.names() == []


def test_exclusive(fs: CurvineFsspec, place: Place) -> None:
    with pytest.raises(FileExistsError), fs.open("/f", "xb") as file:
        file.write(b"mine")
        place.write("/f", b"theirs")
    assert place.read("/f") == b"theirs" and place.names() == ["f"]


def test_append(fs: CurvineFsspec, place: Place) -> None:
    with fs.open("/f", "ab") as file:
        file.write(b"one")
    with fs.open("/f", "ab") as file:
        assert file.tell() == 3
        file.write(b"two")
    assert place.read("/f") == b"onetwo"


def test_transactions(fs: CurvineFsspec, place: Place) -> None:
    with fs.transaction:
        fs.pipe({"/a": b"a", "/b": b"b"})
        assert not fs.exists("/a")
    assert fs.cat(["/a", "/b"]) == {"/a": b"a", "/b": b"b"}
    with pytest.raises(ZeroDivisionError), fs.transaction:
        fs.pipe("/c", b"c")
        raise ZeroDivisionError
    with pytest.raises(UsageError, match="in a transaction"), fs.transaction, fs.open("/a", "ab"):
        pass
    assert place.names() == ["a", "b"]


def test_names_are_changed(fs: CurvineFsspec, place: Place) -> None:
    fs.pipe("/deep/er/f", b"x")
    inode = place.fs.stat("/deep/er/f").id
    fs.mv("/deep/er/f", "/deep/g")
    fs.mv("/deep", "/moved", recursive=True)
    assert place.fs.stat("/moved/g").id == inode
    fs.mkdir("/into")
    fs.mv("/moved/g", "/into")
    fs.cp("/into/g", "/copy")
    fs.cp_file("/copy", "/copy")
    assert fs.cat("/copy") == fs.cat("/into/g") == b"x"
    fs.touch("/copy", truncate=False)
    assert fs.cat("/copy") == b"x"
    fs.touch("/copy")
    assert fs.cat("/copy") == b""
    with pytest.raises(FileExistsError):
        fs.mkdir("/into")
    with pytest.raises(FileExistsError):
        fs.makedirs("/into")
    fs.makedirs("/into", exist_ok=True)
    with pytest.raises(OSError, match="not empty") as caught:
        fs.rmdir("/into")
    assert caught.value.errno == errno.ENOTEMPTY
    with pytest.raises(NotADirectoryError):
        fs.rmdir("/copy")
    with pytest.raises(IsADirectoryError):
        fs.rm("/into")
    fs.rm("/into", recursive=True)
    fs.rm("/mo*", recursive=True, maxdepth=3)
    assert place.names() == ["copy"]


def test_no_directory_is_made_where_nobody_wants_it(place: Place) -> None:
    strict = CurvineFsspec(place.server.url[10:-1], root="/" + place.url.rpartition("/")[2], auto_mkdir=False)
    with pytest.raises(FileNotFoundError, match="its directory does not exist"):
        strict.open("/no/f", "wb")
    with pytest.raises(FileNotFoundError):
        place.write("/x")
        strict.mv("/x", "/no/x")
    strict.client.close()


# ----------------------------------------------------------------------------------------------------- what goes wrong


def test_errors_are_what_python_expects_and_ours(fs: CurvineFsspec, place: Place) -> None:
    with pytest.raises(FileNotFoundError) as caught:
        fs.open("/nope")
    assert isinstance(caught.value, NotFound) and caught.value.errno == errno.ENOENT
    for call in (fs.info, fs.ls, fs.rm, fs.cat_file, fs.rmdir, fs.modified):
        with pytest.raises(FileNotFoundError):
            call("/nope")
    place.fs.mkdir("/d")
    with pytest.raises(IsADirectoryError):
        fs.open("/d", "wb")
    with pytest.raises(UsageError, match="modes are"):
        fs.open("/f", "r+b")
    with pytest.raises(OSError, match="255"):
        fs.open("/" + "n" * 256, "wb")


def test_a_cluster_that_is_not_there() -> None:
    away = CurvineFsspec("127.0.0.1:1", connect_timeout="0.2s")
    for call in (away.exists, away.isdir, away.ls):
        with pytest.raises(ConnectionRefusedError) as caught:
            call("/")
        assert isinstance(caught.value, ConnectFailed)
    with pytest.raises(ConfigError):
        fsspec.open("curvine://h/?colour=blue", "rb").open()
    with pytest.raises(ConfigError, match="UTF-8"):
        fsspec.open("curvine://h/%ff", "rb").open()


# ------------------------------------------------------------------------------------------------------ other processes


def test_pickles(fs: CurvineFsspec, place: Place) -> None:
    place.write("/f", b"content")
    again = pickle.loads(pickle.dumps(fs))
    assert again.cat("/f") == b"content" and again.client.config == fs.client.config
    with fs.open("/f") as file:
        file.seek(3)
        other = pickle.loads(pickle.dumps(file))
        assert other.read() == b"tent"
        other.close()
    again.client.close()


def in_child(function: Callable[[], None]) -> None:
    """Run in a forked process; a failure there is one here."""
    pid = os.fork()
    if pid == 0:
        try:
            function()
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


def test_after_a_fork_it_connects_anew_and_open_files_refuse(fs: CurvineFsspec, place: Place) -> None:
    place.write("/f", b"content")
    file = fs.open("/f")

    def child() -> None:
        assert fs.cat("/f") == b"content"
        with pytest.raises(UsageError, match="forked child"):
            file.read()

    in_child(child)
    assert file.read() == b"content"
    file.close()
