"""Records of running processes: seen while their process lives, gone with it however it ended."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
from pathlib import Path

import pytest

from curvfs.runrecords import RunRecord, run_directory, running
from curvfs.world import World

WORLD = World.real()

OTHER = """
import sys
from curvfs.runrecords import RunRecord
from curvfs.world import World
record = RunRecord(World.real(), "kvstore", directory=sys.argv[1])
record.write({"url": "curvine://there"})
print("written", flush=True)
sys.stdin.read()
"""


def test_a_record_is_seen_until_it_is_closed(tmp_path: Path) -> None:
    record = RunRecord(WORLD, "mount", directory=str(tmp_path))
    assert running(WORLD, directory=str(tmp_path)) == []
    record.write({"mountpoint": "/a"})
    record.write({"mountpoint": "/b"})
    (seen,) = running(WORLD, directory=str(tmp_path))
    assert (seen["kind"], seen["pid"], seen["mountpoint"]) == ("mount", os.getpid(), "/b")
    assert seen["since_ms"] <= seen["written_ms"]
    assert running(WORLD, "server", directory=str(tmp_path)) == []
    record.close()
    record.close()
    record.write({"mountpoint": "/c"})
    assert list(tmp_path.iterdir()) == []


def test_the_record_of_a_killed_process_goes(tmp_path: Path) -> None:
    child = subprocess.Popen(
        [sys.executable, "-c", OTHER, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert child.stdin and child.stdout
    with child:
        assert child.stdout.readline() == "written\n"
        (seen,) = running(WORLD, "kvstore", directory=str(tmp_path))
        assert seen["pid"] == child.pid and seen["url"] == "curvine://there"
        child.kill()
        child.wait()
        assert running(WORLD, directory=str(tmp_path)) == []
    assert list(tmp_path.iterdir()) == []


def test_a_torn_record_is_left_out(tmp_path: Path) -> None:
    record = RunRecord(WORLD, "server", directory=str(tmp_path))
    record.write({})
    (file,) = tmp_path.glob("*.json")
    whole = file.read_text()
    file.write_text(whole[:10])
    assert running(WORLD, directory=str(tmp_path)) == []
    file.write_text(whole)
    assert running(WORLD, directory=str(tmp_path)) == [json.loads(whole)]
    record.close()


def test_a_directory_that_cannot_be_had_is_said_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").write_text("")
    with caplog.at_level(logging.WARNING, "curvfs"):
        record = RunRecord(WORLD, "mount", directory=str(tmp_path / "file"))
        record.write({})
        record.close()
    assert len(caplog.records) == 1 and "will lack it" in caplog.text
    assert running(WORLD, directory=str(tmp_path / "none")) == []


def test_the_directory_is_the_user_s(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CURVFS_RUN_DIR", raising=False)
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    assert run_directory() == "/run/curvfs"
    monkeypatch.setattr(os, "geteuid", lambda: 1234)
    monkeypatch.setenv("XDG_RUNTIME_DIR", "/run/user/1234")
    assert run_directory() == "/run/user/1234/curvfs"
    monkeypatch.delenv("XDG_RUNTIME_DIR")
    assert run_directory() == "/tmp/curvfs-1234"
    monkeypatch.setenv("CURVFS_RUN_DIR", "/elsewhere")
    assert run_directory() == "/elsewhere"
