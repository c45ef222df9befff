"""``curvfs inspect``: objects, prompts and pools as real stores left them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy
import pytest
import xxhash

import kvstore
from curvfs.api import SyncFileSystem
from curvfs.runrecords import running
from curvfs.world import World
from kvstore import Geometry, Identity, KVStore, PageKey
from tests.t3_kvstore.places import WORKER_HOSTNAME, serving
from tests.t5_tools.interrupting import interrupt_when_heard
from tools.__main__ import main

GEOMETRY = Geometry.attention(layers=2, kv_heads=2, head_dim=16, dtype="float16", page_tokens=4)
IDENTITY = Identity.of(GEOMETRY, model="some-model", revision="r1", salt="secret")


@pytest.fixture(params=["directory", "curvine"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    if request.param == "directory":
        yield f"file://{tmp_path}/pool"
        return
    with serving(tmp_path / "server") as address:
        yield f"curvine://{address}/pool"


@pytest.fixture
def stored(url: str) -> Iterator[tuple[KVStore, list[PageKey], str]]:
    """A store with four of the five pages of a prompt: 0, 1, 2 and 4."""
    if url.startswith("file"):
        Path(url.removeprefix("file://")).mkdir()
    else:
        with SyncFileSystem.connect(url.removesuffix("/pool")) as client:
            client.mkdir("/pool")
    with kvstore.open(url, IDENTITY, geometry=GEOMETRY) as store:
        keys = store.keys(range(20))
        pages = [[numpy.full(spec.shape, page, numpy.float16) for spec in GEOMETRY.tensors] for page in range(5)]
        assert all(store.put([*keys[:3], keys[4]], [*pages[:3], pages[4]]).result())
        yield store, keys, url


def inspected(capsys: pytest.CaptureFixture[str], *arguments: str, code: int = 0) -> dict[str, Any]:
    capsys.readouterr()
    assert main(["inspect", *arguments, "--json"]) == code, capsys.readouterr().err
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def place_of(store: KVStore, key: PageKey, url: str) -> str:
    return f"{url.removeprefix('file://')}/kv/{store.object_name(key)}"


def test_an_object(stored: tuple[KVStore, list[PageKey], str], capsys: pytest.CaptureFixture[str]) -> None:
    store, keys, url = stored
    found = inspected(capsys, "object", place_of(store, keys[1], url))
    assert found["verdict"] == "sound" and found["key"] == keys[1].hex and found["shard"] == ""
    assert found["identity"] == IDENTITY.fingerprint().hex() and found["tokens"] == "4+4"
    assert [tensor["name"] for tensor in found["tensors"]] == [spec.name for spec in GEOMETRY.tensors]
    assert {tuple(tensor["shape"]) for tensor in found["tensors"]} == {(2, 4, 16)}
    assert found["header_bytes"] + found["data_bytes"] == found["length_bytes"]
    assert str(os.getpid()) in found["writer"]
    if url.startswith("curvine"):
        (block,) = found["blocks"]
        assert block["hosts"] == [WORKER_HOSTNAME] and block["length_bytes"] == found["length_bytes"]
        assert "curvfs.born" in found["attributes"]
    assert main(["inspect", "object", place_of(store, keys[1], url)]) == 0
    shown = capsys.readouterr().out
    for word in (keys[1].hex, "4 to 7", "layer.1.v", "Verdict    sound"):
        assert word in shown, word


def test_a_damaged_object(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with kvstore.open(f"file://{tmp_path}", IDENTITY, geometry=GEOMETRY) as store:
        (key,) = store.keys(range(4))
        store.put([key], [[numpy.ones(spec.shape, numpy.float16) for spec in GEOMETRY.tensors]]).result()
        path = tmp_path / "kv" / store.object_name(key)
    sound = inspected(capsys, "object", str(path))
    whole = path.read_bytes()
    for tensor in sound["tensors"]:
        content = bytearray(whole)
        content[tensor["offset_bytes"] + 3] ^= 1
        path.write_bytes(content)
        found = inspected(capsys, "object", str(path), code=6)
        assert found["verdict"] == "damaged" and f"tensor {tensor['name']}" in found["reason"]
        assert inspected(capsys, "object", str(path), "--no-verify")["verdict"] == "unverified"
    for at in (3, 50, sound["header_bytes"] - 1):
        content = bytearray(whole)
        content[at] ^= 1
        path.write_bytes(content)
        assert inspected(capsys, "object", str(path), code=6)["verdict"] == "damaged"
    for size in (0, 100, 4096, len(whole) - 1, len(whole) - 4096):
        path.write_bytes(whole[:size])
        assert inspected(capsys, "object", str(path), code=6)["verdict"] == "damaged"
    path.write_bytes(whole)
    assert inspected(capsys, "object", str(path)) == sound


def test_the_pages_of_a_prompt_by_process(
    stored: tuple[KVStore, list[PageKey], str],
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    _, keys, url = stored
    world = World.real()
    while not any(record["url"] == url for record in running(world, "kvstore")):
        world.clock.block(0.05)
    (tmp_path / "tokens").write_text(json.dumps(list(range(22))))
    (tmp_path / "salt").write_text("secret\n")
    arguments = ("chain", str(tmp_path / "tokens"), "--pid", str(os.getpid()))
    found = inspected(capsys, *arguments, "--salt-file", str(tmp_path / "salt"))
    assert [page["key"] for page in found["pages"]] == [key.hex for key in keys]
    assert [len(page["objects"]) for page in found["pages"]] == [1, 1, 1, 0, 1]
    assert (found["stored_pages"], found["stored_tokens"], found["tokens"]) == (3, 12, 22)
    if url.startswith("curvine"):
        assert found["pages"][0]["objects"][0]["hosts"] == [WORKER_HOSTNAME]
    assert main(["inspect", *arguments]) == 2  # the salt is told nobody
    assert "--salt-file" in capsys.readouterr().err


def test_the_pages_of_a_prompt_by_identity(
    stored: tuple[KVStore, list[PageKey], str], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    _, keys, url = stored
    fields = {name: getattr(IDENTITY, name) for name in ("model", "revision", "dtype", "page_tokens", "layout")}
    (tmp_path / "identity.json").write_text(json.dumps(fields))
    (tmp_path / "tokens").write_text(" ".join(map(str, range(20))))
    (tmp_path / "salt").write_text("secret")
    arguments = ("chain", str(tmp_path / "tokens"), "--identity", str(tmp_path / "identity.json"), "--url", url)
    assert inspected(capsys, *arguments)["stored_pages"] == 0
    assert inspected(capsys, *arguments, "--salt-file", str(tmp_path / "salt"))["stored_pages"] == 3
    assert main(["inspect", *arguments, "--salt-file", str(tmp_path / "salt")]) == 0
    shown = capsys.readouterr().out
    assert "the pool has the first 3 (12 tokens)" in shown and keys[3].hex in shown and "absent" in shown


def test_a_pool(stored: tuple[KVStore, list[PageKey], str], capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    _, _, url = stored
    other = Identity.of(GEOMETRY, model="other", revision="r1")
    with kvstore.open(url, other, geometry=GEOMETRY) as store:
        store.put(store.keys(range(4)), [[numpy.ones(spec.shape, numpy.float16) for spec in GEOMETRY.tensors]]).result()
    found = inspected(capsys, "pool", url, "--plot", str(tmp_path / "pool.png"))
    assert found["objects"] == 5 and sum(found["written_ago"].values()) == 5
    assert {name: each["objects"] for name, each in found["namespaces"].items()} == {
        IDENTITY.namespace(): 4,
        other.namespace(): 1,
    }
    assert found["size_bytes"] == sum(each["size_bytes"] for each in found["namespaces"].values())
    assert (tmp_path / "pool.png").read_bytes().startswith(b"\x89PNG")
    assert main(["inspect", "pool", url]) == 0
    shown = capsys.readouterr().out
    assert "5 objects" in shown and "1 min" in shown and "\u2588" in shown


def test_a_pool_that_is_not_there_is_not_made(url: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    if url.startswith("file"):
        (tmp_path / "pool").mkdir()
    else:
        with SyncFileSystem.connect(url.removesuffix("/pool")) as client:
            client.mkdir("/pool")
    (tmp_path / "tokens").write_text("1 2 3 4")
    said = {"model": "m", "revision": "r", "dtype": "float16", "page_tokens": 4, "layout": GEOMETRY.layout}
    (tmp_path / "identity").write_text(json.dumps(said))
    chain = ["chain", str(tmp_path / "tokens"), "--url", url, "--identity", str(tmp_path / "identity")]
    for arguments in (["pool", url], chain):
        assert main(["inspect", *arguments]) == 2
        assert "There is no KV prefix" in capsys.readouterr().err
    if url.startswith("file"):
        assert list((tmp_path / "pool").iterdir()) == []
    else:
        with SyncFileSystem.connect(url) as client:
            assert client.list("/") == []


def test_an_empty_pool(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "kv").mkdir()
    assert inspected(capsys, "pool", f"file://{tmp_path}")["objects"] == 0
    assert main(["inspect", "pool", f"file://{tmp_path}"]) == 0


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        (["object", "/nonexistent"], 1),
        (["object", "/"], 2),
        (["object", "curvine://127.0.0.1:9/x?retry_max_s=1"], 4),
        (["pool", "nonsense"], 2),
        (["chain", "/nonexistent"], 2),
        (["chain", "/nonexistent", "--identity", "/nonexistent"], 1),
        (["chain", "/nonexistent", "--pid", "1"], 2),
    ],
)
def test_bad_input(arguments: list[str], code: int) -> None:
    done = subprocess.run(
        [sys.executable, "-P", "-m", "tools", "inspect", *arguments], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == code and done.stderr.count("\n") == 1 and done.stdout == "", done.stderr


def test_tokens_that_are_none(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "tokens").write_text("one two")
    (tmp_path / "identity").write_text(json.dumps({"model": "m", "colour": "red"}))
    assert main(["inspect", "chain", str(tmp_path / "tokens"), "--identity", str(tmp_path / "identity")]) == 2
    assert "colour" in capsys.readouterr().err
    (tmp_path / "identity").write_text(json.dumps({"model": "m"}))
    assert main(["inspect", "chain", str(tmp_path / "tokens"), "--identity", str(tmp_path / "identity")]) == 2
    assert "not complete" in capsys.readouterr().err


def test_one_namespace_of_a_pool(
    stored: tuple[KVStore, list[PageKey], str], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    store, keys, url = stored
    namespace = store.object_name(keys[0]).partition("/")[0]
    picture = tmp_path / "one.png"
    assert main(["inspect", "pool", url, "--namespace", namespace[:6], "--plot", str(picture)]) == 0
    shown = capsys.readouterr().out
    assert f"Of {namespace[:6]}:" in shown and "not used since they were written: " in shown
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert main(["inspect", "pool", url, "--namespace", "zz"]) == 2
    assert namespace in capsys.readouterr().err


def test_what_an_object_says_cannot_write_to_the_terminal(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A header whose checksum holds, and whose texts are hostile."""
    with kvstore.open(f"file://{tmp_path}", IDENTITY, geometry=GEOMETRY) as store:
        (key,) = store.keys(range(4))
        page = [numpy.zeros(spec.shape, numpy.float16) for spec in GEOMETRY.tensors]
        assert all(store.put([key], [page]).result())
        path = tmp_path / "kv" / store.object_name(key)
    content = path.read_bytes()
    length = int.from_bytes(content[:8], "little")
    for said in ({"writer": "x\x1b[2J\n"}, {"created_ms": "9" * 19}, {"created_ms": "9" * 900}):
        header = json.loads(content[8 : 8 + length])
        header["__metadata__"] |= {"header_sum": "0" * 32, **said}
        text = json.dumps(header, separators=(",", ":")).encode().ljust(length)
        assert len(text) == length
        summed = content[:8] + text
        digits = xxhash.xxh3_128_hexdigest(summed).encode()
        path.write_bytes(summed[:39] + digits + summed[71:] + content[8 + length :])
        assert main(["inspect", "object", str(path)]) == 0
        shown = capsys.readouterr().out
        assert "sound" in shown and "\x1b" not in shown
        assert ("time" in shown) == ("created_ms" in said)


def test_ctrl_c_tells_what_was_counted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with kvstore.open(f"file://{tmp_path}", IDENTITY, geometry=GEOMETRY) as store:
        keys = store.keys(range(4 * 1000))
        for key in keys:
            path = tmp_path / "kv" / store.object_name(key)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(b"")
    interrupt_when_heard()
    found = inspected(capsys, "pool", f"file://{tmp_path}", code=130)
    assert found["interrupted"] and found["objects"] < len(keys)
    assert not inspected(capsys, "pool", f"file://{tmp_path}")["interrupted"]
