"""The demo, small: real processes, a real model, the embedded server, and a mount where FUSE can be had."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="the demo needs curvfs[demo]")
pytest.importorskip("transformers", reason="the demo needs curvfs[demo]")

COMMAND = (sys.executable, "-P", "-m", "tools", "demo", "--model", "small", "--page-tokens", "16")


def mounted_below(directory: Path) -> list[str]:
    lines = Path("/proc/self/mounts").read_text(encoding="utf-8").splitlines()
    return [line for line in lines if line.split(" ")[1].startswith(str(directory))]


def test_two_replicas_share_their_cache_and_agree(tmp_path: Path) -> None:
    done = subprocess.run(
        (*COMMAND, "--prompts", "64,150", "--dir", str(tmp_path)), capture_output=True, text=True, timeout=110
    )
    assert done.returncode == 0, done.stdout + done.stderr
    rows = re.findall(r"^ +(64|150) +(48|144) .* +\d+\.\d×", done.stdout, re.MULTILINE)
    assert rows == [("64", "48"), ("150", "144")], done.stdout
    assert re.search(r"^All \d+ checks held", done.stdout, re.MULTILINE)
    if "FUSE cannot be had here" in done.stdout:
        assert "Not run: the mount" in done.stdout
    else:
        assert "13 objects" in done.stdout  # 4 whole pages of one prompt and 9 of the other
        assert "Operation not permitted" in done.stdout
        assert "Not run" not in done.stdout
    assert (tmp_path / "ttft.png").read_bytes().startswith(b"\x89PNG")
    assert [path.name for path in tmp_path.iterdir()] == ["ttft.png"]
    assert not mounted_below(tmp_path)


def test_without_fuse_everything_else_runs_and_what_did_not_is_named(tmp_path: Path) -> None:
    shim = tmp_path / "shim"
    shim.mkdir()
    (shim / "pyfuse3.py").write_text("raise ModuleNotFoundError(\"No module named 'pyfuse3'\", name='pyfuse3')\n")
    done = subprocess.run(
        (*COMMAND, "--prompts", "64", "--json", "--dir", str(tmp_path / "out")),
        capture_output=True,
        text=True,
        timeout=110,
        env={**os.environ, "PYTHONPATH": str(shim)},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    (line,) = [line for line in done.stderr.splitlines() if line.startswith("FUSE cannot be had here")]
    assert "pyfuse3" in line
    (line,) = [line for line in done.stderr.splitlines() if line.startswith("Not run: ")]
    assert "the mount" in line and "dd iflag=direct" in line and "the unmount" in line
    result = json.loads(done.stdout)
    assert result["failed"] == [] and result["not_run"][0] == "the mount"
    (row,) = result["rows"]
    assert (row["tokens"], row["hit_tokens"]) == (64, 48)
    assert row["path"].endswith("→ TCP")
    assert row["logit_difference"] <= 1e-3 and row["margin"] >= 0.01
    assert row["loaded_bytes"] == 48 * 4 * 2 * 2 * 32 * 4  # tokens x layers x (K, V) x heads x head size x float32


def start(directory: Path) -> subprocess.Popen[str]:
    """A demo that has got to its table."""
    process = subprocess.Popen(
        (*COMMAND, "--prompts", "64,100,150,200,250,300,350,400", "--dir", str(directory)),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    for line in process.stdout:
        if "TTFT cold" in line:
            break
    return process


def test_a_demo_that_is_stopped_leaves_nothing(tmp_path: Path) -> None:
    process = start(tmp_path)
    process.send_signal(signal.SIGINT)
    process.send_signal(signal.SIGTERM)  # impatience does not interrupt the cleaning up
    _, said = process.communicate(timeout=60)
    assert (process.returncode, said) == (130, "")
    assert not mounted_below(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_demo_whose_reader_goes_away_leaves_nothing(tmp_path: Path) -> None:
    process = start(tmp_path)
    assert process.stdout is not None and process.stderr is not None
    process.stdout.close()
    with process.stderr:
        said = process.stderr.read()
    assert (process.wait(60), said) == (141, "")
    assert not mounted_below(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_prompt_without_a_whole_page_is_refused() -> None:
    done = subprocess.run((*COMMAND, "--prompts", "16"), capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1 and "page" in done.stderr


def test_what_a_killed_run_left_is_cleared_by_the_next(tmp_path: Path) -> None:
    killed = subprocess.Popen(
        (*COMMAND, "--prompts", "64", "--dir", str(tmp_path)), stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    assert killed.stdout is not None
    for line in killed.stdout:
        if line.startswith("Model:"):
            break
    os.killpg(killed.pid, signal.SIGKILL)
    killed.wait()
    killed.stdout.close()
    assert list(tmp_path.glob("run-*"))
    done = subprocess.run(
        (*COMMAND, "--prompts", "64", "--dir", str(tmp_path)), capture_output=True, text=True, timeout=110
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["ttft.png"]
    assert not mounted_below(tmp_path)
