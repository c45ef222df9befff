"""``curvfs top`` and ``curvfs stats``: what runs here, from the records of real processes."""

from __future__ import annotations

import json
import os
import pty
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
