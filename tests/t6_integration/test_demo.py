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
        (*COMMAND, "--prompts", "64,150", "--dir", str(tmp_path)), capture_output=True, text=True, timeout=100
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
        (*COMMAND, "--prompts", "64", "--dir", str(tmp_path / "out")),
        capture_output=True,
        text=True,
        timeout=100,
        env={**os.environ, "PYTHONPATH": str(shim)},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("FUSE cannot be had here")]
    assert "pyfuse3" in line
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("Not run: ")]
    assert "the mount" in line and "dd iflag=direct" in line and "the unmount" in line


def test_the_result_as_json(tmp_path: Path) -> None:
    done = subprocess.run(
        (*COMMAND, "--prompts", "64", "--no-mount", "--json", "--dir", str(tmp_path)),
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    result = json.loads(done.stdout)
    assert result["failed"] == []
    assert "the mount" in result["not_run"]
    (row,) = result["rows"]
    assert (row["tokens"], row["hit_tokens"]) == (64, 48)
    assert row["path"].endswith("→ TCP")
    assert row["logit_difference"] <= 1e-3 and row["margin"] >= 0.01
    assert row["loaded_bytes"] == 48 * 4 * 2 * 2 * 32 * 4  # tokens x layers x (K, V) x heads x head size x float32


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)], ids=["SIGINT", "SIGTERM"])
def test_a_demo_that_is_stopped_leaves_nothing(number: signal.Signals, code: int, tmp_path: Path) -> None:
    process = subprocess.Popen(
        (*COMMAND, "--prompts", "64,100,150,200,250,300,350,400", "--dir", str(tmp_path)),
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONUNBUFFERED": "1"},
    )
    assert process.stdout is not None
    with process.stdout:
        for line in process.stdout:
            if "TTFT cold" in line:  # everything is up by now
                break
        process.send_signal(number)
        process.stdout.read()
    assert process.wait(60) == code
    assert not mounted_below(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_prompt_without_a_whole_page_is_refused() -> None:
    done = subprocess.run((*COMMAND, "--prompts", "16"), capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1 and "page" in done.stderr
