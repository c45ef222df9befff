"""``curvfs kv``: what people and cron jobs do with a pool."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

import kvstore
from curvfs.world import World
from kvstore import Capacity, Geometry, Identity
from tools.__main__ import main

PAGE = Geometry.raw(5000, page_tokens=4)
OBJECT_BYTES = 12288


def opened(root: Path, model: str = "m", **settings: object) -> kvstore.KVStore:
    whose = Identity.of(PAGE, model=model, revision="r")
    return kvstore.open(root.as_uri(), whose, geometry=PAGE, **settings)  # type: ignore[arg-type]


def filled(root: Path, count: int, model: str = "m") -> list[kvstore.PageKey]:
    with opened(root, model) as store:
        keys = [store.foreign_key(number.to_bytes(8, "little")) for number in range(count)]
        for number, key in enumerate(keys):
            assert all(store.put([key], [bytes([number]) * 5000]).result())
            path = root / "kv" / store.object_name(key)
            os.utime(path, (time.time() - 1000 + number, time.time() - 1000))
        return keys


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    code = main(["kv", *arguments])
    out, err = capsys.readouterr()
    return code, out, err


def test_du_and_ls_tell_what_is_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    keys = filled(tmp_path, 3)
    filled(tmp_path, 2, model="other")
    code, out, _ = run(capsys, "du", tmp_path.as_uri())
    assert code == 0
    assert len(re.findall(r"^[0-9a-f]{32} +\d+\.\d KiB  [23] objects, used \d+ [ms]", out, re.M)) == 2, out
    assert "free." in out
    code, out, _ = run(capsys, "du", tmp_path.as_uri(), "--json", "--model", "m")
    record = json.loads(out)
    assert [one["object_bytes"] for one in record["namespaces"]] == [3 * OBJECT_BYTES]
    code, out, _ = run(capsys, "ls", tmp_path.as_uri(), "--model", "m")
    assert sorted(line.split()[1] for line in out.splitlines()) == sorted(key.hex for key in keys)
    code, out, _ = run(capsys, "ls", tmp_path.as_uri(), "--json")
    assert len([json.loads(line) for line in out.splitlines()]) == 5


def test_warm_reads_what_was_used_last_into_the_page_cache(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    keys = filled(tmp_path, 4)
    disk = World.real().disk
    with opened(tmp_path) as store:
        paths = [tmp_path / "kv" / store.object_name(key) for key in keys]

    def resident() -> list[bool]:
        found = []
        for path in paths:
            fd = os.open(path, os.O_RDONLY)
            found.append(disk.resident_bytes(fd, 0, OBJECT_BYTES) >= OBJECT_BYTES)
            os.close(fd)
        return found

    for path in paths:
        fd = os.open(path, os.O_RDONLY)
        os.fsync(fd)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(fd)
    assert resident() == [False] * 4
    code, out, _ = run(capsys, "warm", tmp_path.as_uri(), "--most", str(2 * OBJECT_BYTES + 1), "--model", "m")
    assert (code, out) == (0, "2 objects read, 24.0 KiB.\n")
    assert resident() == [False, False, True, True]
    code, out, _ = run(capsys, "warm", tmp_path.as_uri(), "--json")
    assert (code, json.loads(out)) == (0, {"objects": 4, "object_bytes": 4 * OBJECT_BYTES})
    assert resident() == [True] * 4
    assert run(capsys, "warm", tmp_path.as_uri(), "--model", "nobody")[0] == 2


def test_evict_brings_every_namespace_within_its_quota(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    keys = filled(tmp_path, 10)
    filled(tmp_path, 4, model="other")
    quota = str(8 * OBJECT_BYTES)
    code, out, _ = run(capsys, "evict", tmp_path.as_uri(), "--quota", quota, "--high", "0.9", "--low", "0.5")
    assert code == 0
    assert "6 objects evicted" in out
    assert "0 objects evicted" in out
    with opened(tmp_path) as store:
        assert store.exists(keys) == [False] * 6 + [True] * 4
    assert len(list((tmp_path / "kv" / ".trash").glob("*/*"))) == 6
    code, out, _ = run(
        capsys, "evict", tmp_path.as_uri(), "--ttl", "500s", "--lease", "0s", "--model", "other", "--json"
    )
    (told,) = map(json.loads, out.splitlines())
    assert (code, told["evicted"], told["evicted_bytes"]) == (0, 4, 4 * OBJECT_BYTES)


def test_an_open_store_learns_what_the_command_freed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    capacity = Capacity(quota_bytes=5 * OBJECT_BYTES, high=1.0, low=1.0, evictor="off", flush_s=0.05)
    with opened(tmp_path, capacity=capacity) as store:
        keys = [store.foreign_key(number.to_bytes(8, "little")) for number in range(9)]
        for key in keys[:5]:
            assert all(store.put([key], [bytes(5000)]).result())
        assert store.put(keys[5:6], [bytes(5000)]).result() == [kvstore.Miss.NO_SPACE]
        quota = str(5 * OBJECT_BYTES)
        run(capsys, "evict", tmp_path.as_uri(), "--quota", quota, "--high", "0.5", "--low", "0.4", "--lease", "0s")
        until_s = time.monotonic() + 20
        while not store.put(keys[5:6], [bytes(5000)]).result()[0]:
            assert time.monotonic() < until_s
            time.sleep(0.1)
        assert run(capsys, "purge", tmp_path.as_uri(), "--model", "m", "--yes")[0] == 0
        until_s = time.monotonic() + 20
        while not all(store.put(keys[5:9], [bytes(5000)] * 4).result()):
            assert time.monotonic() < until_s
            time.sleep(0.1)


def test_purge_removes_one_model_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    filled(tmp_path, 3)
    others = filled(tmp_path, 2, model="other")
    assert run(capsys, "purge", tmp_path.as_uri(), "--model", "m", "--yes")[1].startswith("3 objects removed")
    with opened(tmp_path, "other") as store:
        assert store.exists(others) == [True, True]
    code, out, _ = run(capsys, "purge", tmp_path.as_uri(), "--model", "other", "--yes", "--json")
    told = json.loads(out)
    assert (code, told["objects"], told["object_bytes"]) == (0, 2, 2 * OBJECT_BYTES)


def test_purge_asks_first(tmp_path: Path) -> None:
    filled(tmp_path, 3)
    command = [sys.executable, "-m", "tools", "kv", "purge", tmp_path.as_uri(), "--model", "m"]
    done = subprocess.run(command, input="n\n", capture_output=True, text=True)
    assert done.returncode != 0
    assert "Remove 3 objects of m" in done.stdout
    assert len(list((tmp_path / "kv").rglob("*.safetensors"))) == 3


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["evict", "URL"], "give --quota, --ttl or --min-free"),
        (["evict", "URL", "--quota", "much"], "'much' is not a size"),
        (["evict", "URL", "--quota", "1GB", "--high", "0.2", "--low", "0.4"], "high=0.2 and low=0.4"),
        (["du", "URL", "--model", "nobody"], "Nothing of the model 'nobody'"),
        (["du", "URL", "--salt", "s"], "give --model, too"),
        (["du", "file:///nowhere/at/all"], "cannot be used"),
        (["purge", "URL", "--model", "nobody", "--yes"], "Nothing of the model 'nobody'"),
    ],
)
def test_what_cannot_be_done_is_one_sentence(
    arguments: list[str], sentence: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    filled(tmp_path, 1)
    code, _, err = run(capsys, *(tmp_path.as_uri() if word == "URL" else word for word in arguments))
    assert code == 2
    assert sentence in err
    assert err.count("\n") == 1
