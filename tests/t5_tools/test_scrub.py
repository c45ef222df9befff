"""``curvfs scrub``: what it finds in real pools, what it leaves alone, what it moves, how it goes on."""

from __future__ import annotations

import json
import os
import shutil
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import xxhash
from t5_shell import run, started, wait_for

import kvstore
from curvfs.api import EmbeddedServer, SyncFileSystem
from tools.__main__ import main

PAGE = 2 << 20


def put(url: str, count: int, *, model: str = "m", size: int = PAGE) -> list[str]:
    """Names of so many new objects."""
    geometry = kvstore.Geometry.raw(size, page_tokens=16)
    identity = kvstore.Identity.of(geometry, model=model, revision="r")
    with kvstore.open(url, identity, geometry=geometry) as store:
        keys = store.keys(range(16 * count))
        assert all(store.put(keys, [bytearray([index]) * size for index in range(count)]).result())
        return [store.object_name(key) for key in keys]


def scrub(capfd: pytest.CaptureFixture[str], *words: object, code: int = 0) -> Any:
    capfd.readouterr()
    found = main(["scrub", "--json", *map(str, words)])
    captured = capfd.readouterr()
    assert found == code, captured.err
    return json.loads(captured.out)


def states(document: Any) -> dict[str, int]:
    return {name: count for name, count in document["states"].items() if count}


def flip(path: Path, at: int) -> None:
    content = bytearray(path.read_bytes())
    content[at] ^= 0x10
    path.write_bytes(content)


def with_format(path: Path, version: str) -> None:
    """Give an object another format version, and the header sum that belongs to it."""
    content = bytearray(path.read_bytes())
    start = 8 + int.from_bytes(content[:8], "little")
    at = content.index(b'"format":"1"')
    content[at + 10 : at + 11] = version.encode()
    content[39:71] = b"0" * 32
    content[39:71] = xxhash.xxh3_128_hexdigest(content[:start]).encode()
    path.write_bytes(content)


def test_every_kind_of_object_is_told_apart(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    url, kv = tmp_path.as_uri(), tmp_path / "kv"
    names = put(url, 8) + put(url, 2, model="other")
    paths = [kv / name for name in names]
    flip(paths[0], PAGE)  # content
    flip(paths[1], 300)  # header
    os.truncate(paths[2], 8192)
    with_format(paths[3], "2")
    shutil.copy(paths[5], paths[4])
    weights = paths[6].parent / "weights.safetensors"
    weights.write_bytes(b"not one of ours")
    before = {path: path.read_bytes() for path in kv.rglob("*.safetensors")}

    document = scrub(capfd, url, code=1)
    assert states(document) == {"sound": 5, "damaged": 3, "newer": 1, "foreign": 2}
    assert (document["objects"], document["quarantined"], document["finished"]) == (11, 0, True)
    found = {finding["name"]: finding for finding in document["findings"]}
    assert "checksum of unit" in found[names[0]]["reason"]
    assert "header's checksum" in found[names[1]]["reason"]
    assert "format version 2" in found[names[3]]["reason"]
    assert "says that it is key" in found[names[4]]["reason"]
    assert {path: path.read_bytes() for path in kv.rglob("*.safetensors")} == before, "nothing was changed"

    repaired = scrub(capfd, url, "--repair", code=1)
    assert (states(repaired), repaired["quarantined"]) == (states(document), 3)
    assert repaired["quarantine"]["files"] == 3
    assert not any(path.exists() for path in paths[:3])
    assert all(path.read_bytes() == before[path] for path in (*paths[3:], weights))

    after = scrub(capfd, url)
    assert states(after) == {"sound": 5, "newer": 1, "foreign": 2} and after["quarantine"]["files"] == 3


def test_what_reads_well_by_another_path_stays(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """A first read that was spoilt on its way, as by a bad page cache: the file is mended before the second."""
    from curvfs.world import World
    from kvstore.backends.base import ObjectEntry
    from kvstore.scrub import Scrubber, State, open_pool

    url = tmp_path.as_uri()
    (name,) = put(url, 1)
    path = tmp_path / "kv" / name
    sound = path.read_bytes()
    flip(path, PAGE)
    with open_pool(World.real(), url, "kv", staging_expiry_s=600) as backend:
        opened = backend.open_otherwise

        def mended(name: str) -> Any:
            with path.open("r+b") as file:
                file.write(sound)
            return opened(name)

        backend.open_otherwise = mended  # type: ignore[method-assign]
        scrubber = Scrubber(World.real(), backend, lambda size_bytes: None)
        judged = scrubber.judge(ObjectEntry(name, len(sound), 0.0), repair=True)
    assert (judged.state, judged.quarantined) == (State.READ_AGAIN, False)
    assert path.read_bytes() == sound
    assert states(scrub(capfd, url)) == {"sound": 1}


def test_left_overs_of_dead_writers(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    url = tmp_path.as_uri()
    put(url, 1)
    staging = tmp_path / "kv" / ".staging"
    for name, age_s in (("dead", 3600), ("alive", 5)):
        (staging / name).mkdir()
        (staging / name / "0").write_bytes(b"x" * 1000)
        for path in (staging / name / "0", staging / name):
            os.utime(path, (time.time() - age_s, time.time() - age_s))
    document = scrub(capfd, url)
    (dead,) = document["dead_staging"]
    assert (dead["name"], dead["files"], dead["bytes"], document["swept"]) == ("dead", 1, 1000, 0)
    assert 3500 < dead["silent_s"] < 3700
    assert (staging / "dead" / "0").exists()
    assert scrub(capfd, url, "--repair")["swept"] == 1
    assert [path.name for path in staging.iterdir()] == ["alive"]
    assert len(scrub(capfd, url, "--staging-expiry", "2s")["dead_staging"]) == 1


def test_a_pool_of_an_embedded_server(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    pool = tmp_path / "pool"
    with EmbeddedServer.attach(str(pool)) as server:
        names = put(server.url, 4)
        with SyncFileSystem.connect(server.url) as fs:
            blocks = {name: fs.locate(f"/kv/{name}").blocks[0].block_id for name in names}
            unsealed = f"/kv/{names[3]}"
            status = fs.stat(unsealed)
            home = fs.stat(unsealed.rpartition("/")[0])
            fs.set_attr(unsealed, xattrs={"curvfs.born": f"{home.id}/{status.name}".encode()})
        files = {name: next(pool.rglob(f"blk_{block}")) for name, block in blocks.items()}
        flip(files[names[0]], PAGE)
        files[names[1]].unlink()
        orphan = files[names[2]].with_name("blk_123456789")
        shutil.copy(files[names[2]], orphan)
        os.utime(orphan, (time.time() - 600, time.time() - 600))
        young = files[names[2]].with_name("blk_123456790")
        shutil.copy(files[names[2]], young)

        document = scrub(capfd, "--embedded", pool, code=1)
        assert states(document) == {"sound": 2, "damaged": 2}
        assert document["unsealed"] == 1
        (lost,) = document["orphan_blocks"]
        assert lost == {"block_id": 123456789, "path": str(orphan), "bytes": orphan.stat().st_size}
        found = {finding["name"]: finding for finding in document["findings"]}
        assert found[names[1]]["state"] == "damaged" and "not found" in found[names[1]]["reason"]
        assert (found[names[3]]["state"], found[names[3]]["sealed"]) == ("sound", False)

        assert main(["scrub", server.url, "--repair"]) == 1
        shown = capfd.readouterr().out
        assert "2  damaged, 2 moved to .quarantine" in shown and "0  not readable" in shown
        assert "1  not sealed: anybody who may write can still change them" in shown
        assert "2 of 4 objects are bad." in shown
        with SyncFileSystem.connect(server.url) as fs:
            assert not fs.exists(f"/kv/{names[0]}") and not fs.exists(f"/kv/{names[1]}")
            assert len(fs.list("/kv/.quarantine")) == 2


def test_metrics_are_written(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("prometheus_client")
    url = tmp_path.as_uri()
    names = put(url, 2)
    flip(tmp_path / "kv" / names[0], PAGE)
    metrics = tmp_path / "scrub.prom"
    scrub(capfd, url, "--metrics", metrics, code=1)
    lines = metrics.read_text().splitlines()
    assert 'curvfs_scrub_objects{state="damaged"} 1.0' in lines
    assert 'curvfs_scrub_objects{state="sound"} 1.0' in lines
    assert "curvfs_scrub_finished 1.0" in lines


def test_the_rate_is_kept_and_an_interrupted_scrub_goes_on(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    url, state = tmp_path.as_uri(), tmp_path / "state"
    put(url, 12)
    process = started("scrub", url, "--rate", "4MB", "--state", state, "--json")
    wait_for(lambda: state.exists() and 0 < json.loads(state.read_text())["found"]["states"].get("sound", 0) < 12)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert (process.returncode, err) == (130, "")
    first = json.loads(out)
    assert not first["finished"] and 1 <= first["objects"] < 12 and first["after"]
    assert first["bytes"] / first["seconds"] < 7 << 20, "at most its 4 MiB, and one object"
    assert main(["scrub", url, "--state", str(state), "--prefix", "."]) == 2
    assert "keeps a scrub of" in capfd.readouterr().err
    rest = scrub(capfd, url, "--after", first["after"])
    assert rest["objects"] == 12 - first["objects"]
    whole = scrub(capfd, url, "--state", state)
    assert (whole["objects"], states(whole)) == (12, {"sound": 12})
    assert not state.exists()
    assert [path.name for path in (tmp_path / "kv" / ".staging").iterdir()] == []


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        ((), 2, "Give either a URL or --embedded DIR"),
        (("ftp://x/",), 2, "is no place of a pool"),
        (("file:///no/such",), 2, "There is no KV prefix at /no/such/kv"),
        (("file:///tmp", "--rate", "fast"), 2, "is not a size"),
        (("file:///tmp", "--rate", "0"), 2, "more than 0"),
        (("file:///tmp", "--staging-expiry", "0"), 2, "more than 0"),
        (("curvine://127.0.0.1:1/",), 4, "no Curvine master answers"),
    ],
    ids=lambda value: None if isinstance(value, tuple | int) else value[:16],
)
def test_bad_input_is_one_sentence(
    words: tuple[str, ...], code: int, said: str, capfd: pytest.CaptureFixture[str]
) -> None:
    assert main(["scrub", *words]) == code
    captured = capfd.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("curvfs: ") and said in captured.err and captured.err.count("\n") == 1


def test_a_pool_without_a_prefix_gets_none(server: Any, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["scrub", server.url]) == 2
    assert "There is no KV prefix 'kv' at" in capfd.readouterr().err
    with SyncFileSystem.connect(server.url) as fs:
        assert not fs.exists("/kv")
    state = tmp_path / "state"
    state.write_text("{}")
    (tmp_path / "kv").mkdir()
    done = run("scrub", tmp_path.as_uri(), "--state", state)
    assert done.code == 2 and "keeps no scrub" in done.err


def test_a_state_that_cannot_be_kept_is_told_before_the_work(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    put(tmp_path.as_uri(), 1)
    (name,) = (tmp_path / "kv").rglob("*.safetensors")
    flip(name, PAGE)
    assert main(["scrub", tmp_path.as_uri(), "--repair", "--state", str(tmp_path / "none" / "state")]) == 3
    captured = capfd.readouterr()
    assert captured.err.startswith("curvfs: The state ") and captured.err.count("\n") == 1
    assert name.exists(), "nothing was done"
