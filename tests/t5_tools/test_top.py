"""``curvfs top`` and ``curvfs stats``: what runs here, from the records of real processes."""

from __future__ import annotations

import json
import os
import pty
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy
import pytest

import kvstore
from curvfs.api import SyncFileSystem
from curvfs.runrecords import RunRecord
from curvfs.world import World
from kvstore import Geometry, Identity
from tests.t3_kvstore.places import serving
from tools.top.rates import Delta, number

COMMAND = (sys.executable, "-P", "-m", "tools")
GEOMETRY = Geometry.attention(layers=1, kv_heads=1, head_dim=8, dtype="float16", page_tokens=1)


def shown(*arguments: str) -> str:
    done = subprocess.run([*COMMAND, *arguments], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, ""), done.stderr
    return done.stdout


def records(*arguments: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(shown("stats", "--json", *arguments))
    return found


def eventually(found: Callable[[], Any]) -> Any:
    for _ in range(100):
        if result := found():
            return result
        time.sleep(0.1)
    raise AssertionError("it did not come")


@pytest.fixture
def run_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """No other process's records."""
    monkeypatch.setenv("CURVFS_RUN_DIR", str(tmp_path / "run"))
    yield tmp_path / "run"
    assert [name.name for name in (tmp_path / "run").glob("*.lock")] == []


def test_nothing_runs(run_directory: Path) -> None:
    run_directory.mkdir()
    assert records() == []
    assert "No mount, store or server" in shown("stats") and "No mount" in shown("top", "--count", "1")


def test_a_server_and_a_store(run_directory: Path, tmp_path: Path) -> None:
    with serving(tmp_path / "pool") as address:
        identity = Identity.of(GEOMETRY, model="some-model", revision="r")
        with kvstore.open(f"curvine://{address}/", identity, geometry=GEOMETRY) as store:
            keys = store.keys(range(5))
            pages = [[numpy.ones(spec.shape, numpy.float16) for spec in GEOMETRY.tensors] for _ in keys]
            assert all(store.put(keys[:4], pages[:4]).result())
            assert store.lookup(keys).pages == 4
            store.get(keys, pages).result()
            (record,) = eventually(
                lambda: [each for each in records("--kind", "kvstore") if each["stats"]["gets"] == 4]
            )
            assert record["stats"]["get_misses"] == {"absent": 1} and record["pid"] == os.getpid()
            with SyncFileSystem.connect(f"curvine://{address}/", short_circuit=False) as client:
                with client.create("/f") as writer:
                    writer.write(b"x" * 70_000)
                with client.open("/f") as reader:
                    assert len(reader.read_at(0, 70_000)) == 70_000

            def served() -> list[dict[str, Any]]:
                return [each for each in records("--kind", "server") if each["read_bytes"] >= 70_000]

            (server,) = eventually(served)
            assert server["written_bytes"] >= 70_000 and server["used_bytes"] >= 70_000
            assert server["answers"]["count"] > 5 and server["url"] == f"curvine://{address}/"
            screen = shown("top", "--count", "2", "--interval", "0.2")
            for word in ("Stores", "some-model", "1 absent", "80%", "Servers", address, str(tmp_path / "pool")):
                assert word in screen or word == "1 absent", word
            assert "4 absent" not in screen
    eventually(lambda: records() == [])


def test_a_list_a_look(run_directory: Path) -> None:
    record = RunRecord(World.real(), "server")
    record.write({"url": "curvine://h:1/"})
    lines = shown("top", "--json", "--count", "2", "--interval", "0.1").splitlines()
    assert [[each["url"] for each in json.loads(line)] for line in lines] == [["curvine://h:1/"]] * 2
    record.close()


def test_rates_are_growth_over_time() -> None:
    before = {"kind": "server", "pid": 1, "written_ms": 1_000, "a": {"n": 10}, "misses": {"x": 1, "y": 2}}
    now = {"kind": "server", "pid": 1, "written_ms": 3_000, "a": {"n": 30}, "misses": {"x": 1, "y": 5, "z": 1}}
    delta = Delta(now, before)
    assert delta.rate("a", "n") == 10 and delta.rate("none", "n") == 0 and delta.elapsed_s == 2
    assert delta.grown("misses") == {"y": 3, "z": 1}
    assert Delta(now, None).rate("a", "n") == 0 and Delta(now, None).grown("misses") == {"x": 1, "y": 5, "z": 1}
    assert Delta({**now, "a": {"n": 3}}, before).rate("a", "n") == 0  # a counter never shrinks; a new process has less
    assert number({"t": {"x": 1, "y": 2, "z": "?"}}, "t") == 3


def test_slow_calls_and_states(run_directory: Path) -> None:
    mount, store = RunRecord(World.real(), "mount"), RunRecord(World.real(), "kvstore")
    slow = [{"operation": "read", "about": "inode 7", "began_ms": 5, "took_s": 3.25, "errno": 0}]
    mount.write({"mountpoint": "/mnt/kv", "url": "curvine://h:1/", "slow_calls": slow, "operations": {}})
    store.write({"model": "m", "stats": {"failing_puts": 3, "gets": 1, "get_misses": {"deadline": 3}}})
    screen = shown("stats")
    for word in ("/mnt/kv", "Slow calls", "inode 7", "3.25 s", "3 puts failed", "3 deadline", "25%"):
        assert word in screen, word
    mount.close()
    store.close()


def test_on_a_terminal_until_ctrl_c(run_directory: Path) -> None:
    run_directory.mkdir()
    master, slave = pty.openpty()
    with subprocess.Popen([*COMMAND, "top", "--interval", "0.1"], stdin=slave, stdout=slave, stderr=slave) as process:
        os.close(slave)
        seen = b""
        while b"No mount" not in seen:
            seen += os.read(master, 4096)
        process.send_signal(signal.SIGINT)
        try:
            while piece := os.read(master, 4096):
                seen += piece
        except OSError:  # the terminal is gone with its last process
            pass
        assert process.wait(20) == 0
    os.close(master)
    assert b"Traceback" not in seen


@pytest.mark.parametrize("arguments", [("top", "--interval", "0"), ("top", "--count", "0"), ("stats", "--kind", "x")])
def test_bad_input(arguments: tuple[str, ...]) -> None:
    done = subprocess.run([*COMMAND, *arguments], capture_output=True, text=True, timeout=60)
    assert done.returncode == 2 and done.stderr.count("\n") == 1 and done.stdout == ""


def test_tiers_room_and_breakers(run_directory: Path) -> None:
    store = RunRecord(World.real(), "kvstore")
    health = {
        "asking": "closed",
        "putting": "open",
        "places": {"node7": {"state": "stalled", "bytes_per_s": 3 << 20, "in_flight": 4, "oldest_s": 3.5, "opened": 2}},
    }
    stats = {
        "gets": 100,
        "memory": {"size_bytes": 2 << 20, "used_bytes": 1 << 20, "hits": 60},
        "behind": {"size_bytes": 1, "queued": 5, "dropped": 7},
        "capacity": {"counted": True, "quota_bytes": 10 << 20, "used_bytes": 8 << 20, "refused": 11},
        "health": health,
    }
    store.write({"model": "m", "stats": stats})
    lines = [line.split() for line in shown("stats").splitlines()]
    assert ["m", str(os.getpid()), *["60", "40", "1.0", "MiB", "2.0", "MiB", "5", "7"]] in lines
    assert ["m", str(os.getpid()), *["8.0", "MiB", "10.0", "MiB", "80%", "0", "B", "0", "11"]] in lines
    assert ["m", *["reading", "node7", "stalled"], str(os.getpid()), *["2", "3.0", "MiB/s", "4", "3.50", "s"]] in lines
    assert any("breaker open" in " ".join(line) for line in lines)
    store.close()


def test_a_narrow_terminal_shows_all_of_a_store(run_directory: Path) -> None:
    store = RunRecord(World.real(), "kvstore")
    stats = {"gets": 123_456, "get_misses": {"absent": 5, "unreachable": 7}, "health": {"asking": "half-open"}}
    store.write({"model": "some-long-model-name", "url": "curvine://host:8995/", "stats": stats})
    done = subprocess.run(
        [*COMMAND, "stats"],
        capture_output=True,
        text=True,
        timeout=60,
        env={**os.environ, "COLUMNS": "80", "TTY_COMPATIBLE": "1", "TERM": "xterm"},
    )
    text = "".join(re.sub(r"\x1b\[[0-9;]*m", "", done.stdout).split())
    for word in ("some-lon", "half-open", "7unreach", "LOOKUPS/S", str(os.getpid())):
        assert word in text, done.stdout
    store.close()


def test_a_pipe_gets_whole_lines_and_a_full_disk_is_told(run_directory: Path) -> None:
    run_directory.mkdir()
    assert shown("top", "--count", "1", "--interval", "0.1").endswith("\n")
    with open("/dev/full", "w") as full:
        done = subprocess.run([*COMMAND, "top", "--count", "1"], stdout=full, stderr=subprocess.PIPE, timeout=60)
    assert done.returncode == 1 and done.stderr == b"curvfs: No space left on device.\n"
