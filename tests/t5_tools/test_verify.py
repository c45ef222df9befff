"""``curvfs verify``: what it writes and reads, what it calls wrong, kills, interruptions."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from t5_shell import run, started, wait_for

from curvfs.api import SyncFileSystem
from tools.__main__ import main
from tools.verify.pattern import BLOCK_BYTES, PIECE_BYTES, Pattern

FEW = ("--files", "4", "--size", "1.5MiB")


def verify(capfd: pytest.CaptureFixture[str], *words: object, code: int = 0) -> Any:
    """Run it in this process; the JSON."""
    capfd.readouterr()
    found = main(["verify", "--json", *map(str, words)])
    captured = capfd.readouterr()
    assert found == code, captured.err
    assert captured.err == ""
    return json.loads(captured.out)


def held(document: Any) -> dict[str, tuple[int, int]]:
    return {label: (tally["held"], tally["files"]) for label, tally in document["readings"].items()}


# ----------------------------------------------------------------------------------------------------------- pattern


@given(
    st.integers(0, 2**64 - 1),
    st.integers(0, 2**32 - 1),
    st.integers(0, 9),
    st.integers(0, 2**20),
    st.integers(1, 3 * BLOCK_BYTES),
    st.data(),
)
def test_every_changed_byte_is_the_first_wrong_one(
    seed: int, file: int, generation: int, piece: int, length: int, data: st.DataObject
) -> None:
    pattern = _pattern(seed)
    at = piece * PIECE_BYTES
    content = pattern.piece(file, generation, at, length)
    assert pattern.wrong(memoryview(content), file, generation, at) is None
    index = data.draw(st.integers(0, length - 1))
    content[index] ^= data.draw(st.integers(1, 255))
    wrong = pattern.wrong(memoryview(content), file, generation, at)
    assert wrong is not None
    assert wrong.offset_bytes == at + index
    assert wrong.got[0] == content[index] and wrong.expected[0] != content[index]


_PATTERNS: dict[int, Pattern] = {}


def _pattern(seed: int) -> Pattern:
    """Patterns of few seeds: making one takes its time."""
    return _PATTERNS.setdefault(seed % 3, Pattern(seed % 3))


def test_a_wrong_block_says_what_it_is() -> None:
    pattern = Pattern(5)

    def meaning(got: bytearray) -> str:
        wrong = pattern.wrong(memoryview(got), 3, 1, PIECE_BYTES)
        assert wrong is not None
        return wrong.sentence()

    right = pattern.piece(3, 1, PIECE_BYTES, 3 * BLOCK_BYTES)
    assert "first wrong byte at offset 1048576: expected 0x63, got 0x00 (3 of the blocks" in meaning(
        bytearray(len(right))
    )
    assert "never written, or lost" in meaning(bytearray(len(right)))
    assert "that of file 2 at offset 1048576" in meaning(pattern.piece(2, 1, PIECE_BYTES, len(right)))
    assert "that of file 3 at offset 0" in meaning(pattern.piece(3, 1, 0, len(right)))
    assert "of round 0, not of round 1" in meaning(pattern.piece(3, 0, PIECE_BYTES, len(right)))
    assert "written with seed 6" in meaning(Pattern(6).piece(3, 1, PIECE_BYTES, len(right)))
    assert "none that was ever written" in meaning(bytearray(b"x" * len(right)))
    torn = bytearray(right)
    torn[BLOCK_BYTES + 1000 : BLOCK_BYTES + 1002] = bytes(2)
    assert "offset 1053672" in meaning(torn) and "1 of the blocks" in meaning(torn)
    assert "2 bytes of the block were changed" in meaning(torn)


# ------------------------------------------------------------------------------------------------------------ places


def test_a_directory_holds(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    document = verify(capfd, tmp_path, "--other", tmp_path, *FEW)
    assert held(document) == {"the same directory": (4, 4), "the other directory": (4, 4)}
    assert (document["passed"], document["finished"], document["failures"]) == (True, True, [])
    assert list(tmp_path.iterdir()) == []


def test_rounds_go_on_for_some_time(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    document = verify(capfd, tmp_path, "--minutes", "0.005", "--files", "2", "--size", "4097")
    assert document["rounds"] >= 2 and document["passed"]
    assert held(document)["the same directory"] == (2 * document["rounds"], 2 * document["rounds"])


def test_what_is_wrong_is_named(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    verify(capfd, tmp_path, *FEW, "--only", "write")
    files = tmp_path / "verify-1"
    assert sorted(path.name for path in files.iterdir()) == [f"f00000{number}" for number in range(4)]
    with (files / "f000000").open("r+b") as file:
        file.seek(1_234_567)
        file.write(b"\x00\x00\x00")
    (files / "f000001").write_bytes((files / "f000001").read_bytes()[:1_500_000])
    (files / "f000002").unlink()
    document = verify(capfd, tmp_path, *FEW, "--only", "read", code=1)
    first, second, third = document["failures"]
    assert (first["file"], first["round"], document["failed"]) == ("f000000", 0, 3)
    assert 1_234_567 <= first["offset_bytes"] < 1_234_570
    assert first["got"].startswith("00") and not first["expected"].startswith("00")
    assert "it is 1500000 bytes long, and 1572864 were written" in second["problem"]
    assert "No such file" in third["problem"]
    assert main(["verify", str(tmp_path), *FEW, "--only", "read"]) == 1
    shown = capfd.readouterr().out
    assert "WRONG: f000000, read by the same directory in round 0: first wrong byte at offset 123456" in shown
    assert "Verdict: FAIL (seed 1, 1 rounds, 6.0 MiB read back)." in shown
    assert verify(capfd, tmp_path, *FEW, "--seed", "2")["passed"], "another seed has a place of its own"


def test_a_pool_holds_by_client_and_wire(server: Any, capfd: pytest.CaptureFixture[str]) -> None:
    document = verify(capfd, server.url, *FEW)
    assert held(document) == {"another client": (4, 4), "another client over the wire": (4, 4)}
    with SyncFileSystem.connect(server.url) as fs:
        assert not fs.exists("/verify-1")


def test_objects_hold(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    document = verify(capfd, tmp_path.as_uri(), "--objects", *FEW, "--minutes", "0.002")
    assert document["passed"] and set(held(document)) == {"the same store", "another store"}
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]


def test_objects_that_were_damaged_are_misses(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    verify(capfd, tmp_path.as_uri(), "--objects", *FEW, "--only", "write")
    path = next(tmp_path.rglob("*.safetensors"))
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    document = verify(capfd, tmp_path.as_uri(), "--objects", *FEW, "--only", "read", code=1)
    assert "is a miss" in document["failures"][0]["problem"] and document["failed"] == 2, "by both stores"


@pytest.mark.parametrize(
    ("what", "labels"),
    [
        ("--no-mount", ["another client", "another client over the wire"]),
        ("--objects", ["another store", "the same store"]),
    ],
)
def test_the_embedded_default_holds_after_kills(tmp_path: Path, what: str, labels: list[str]) -> None:
    pool = tmp_path / "pool"
    done = run("verify", "--embedded", pool, what, *FEW, "--kill", "server", "--kill", "worker", "--json")
    document = json.loads(done.out)
    assert (done.code, document["passed"], document["kills"]) == (0, True, {"worker": 1, "server": 1}), done.err
    assert held(document) == dict.fromkeys(labels, (4, 4))
    assert [path.name for path in tmp_path.iterdir()] == ["pool"]


def test_mounts_hold_after_kills(tmp_path: Path) -> None:
    from t5_shell import why_no_mount

    if (reason := why_no_mount()) is not None:
        pytest.skip(reason)
    done = run("verify", "--embedded", tmp_path / "pool", *FEW, "--kill", "daemon", "--json")
    document = json.loads(done.out)
    assert (done.code, document["passed"], document["kills"]) == (0, True, {"daemon": 1}), (done.err, document)
    assert sorted(held(document)) == [
        "another client",
        "another client over the wire",
        "another mount",
        "the mount after a remount",
        "the same mount",
    ]
    assert [path.name for path in tmp_path.iterdir()] == ["pool"]
    assert str(tmp_path) not in Path("/proc/self/mounts").read_text()


# ------------------------------------------------------------------------------------------------------ interruptions


def interrupted(tmp_path: Path, *words: object) -> tuple[int, str]:
    process = started("verify", tmp_path, "--files", "20000", "--size", "64k", *words)
    wait_for((tmp_path / "verify-1" / "f000004").exists, what="the first files")
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert err == ""
    return process.returncode, out


def test_ctrl_c_reports_and_leaves_nothing(tmp_path: Path) -> None:
    code, out = interrupted(tmp_path)
    assert code == 130
    assert "Verdict: INTERRUPTED, nothing wrong up to here (seed 1, 0 rounds, 0 B read back)." in out
    assert list(tmp_path.iterdir()) == []


def test_an_interrupted_run_is_gone_on_with(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    state = tmp_path / "state"
    numbers = ("--files", "20000", "--size", "64k", "--state", state)
    code, out = interrupted(tmp_path, "--state", state)
    assert code == 130 and f"The same command goes on with {state}." in out
    saved = json.loads(state.read_text())
    assert 4 <= saved["position"]["next_file"] == saved["outcome"]["written_files"] < 20000
    assert main(["verify", str(tmp_path), *map(str, numbers), "--seed", "3"]) == 2
    assert "keeps a verification of" in capfd.readouterr().err

    # The rest would take long: the last files, and no more than those read.
    saved["position"] = {"generation": 0, "phase": "the same directory", "next_file": 19_998}
    state.write_text(json.dumps(saved))
    document = verify(capfd, tmp_path, *numbers, code=1)
    assert held(document) == {"the same directory": (0, 2)}, "those were never written"
    assert not state.exists() and not (tmp_path / "verify-1").exists()


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        ((), 2, "Give either a target or --embedded DIR"),
        (("/no/such",), 2, "/no/such cannot be verified: No such file or directory"),
        (("/etc/hostname",), 2, "/etc/hostname is not a directory"),
        (("/tmp", "--kill", "server"), 2, "--kill needs --embedded"),
        (("/tmp", "--kill", "cat"), 2, "cat"),
        (("/tmp", "--objects"), 2, "write file:///tmp"),
        (("/tmp", "--size", "0"), 2, "give --size at least 1"),
        (("file:///tmp",), 2, "named by its path: /tmp"),
        (("http://x/",), 2, "cannot be verified"),
        (("--embedded", "/tmp/x", "--no-mount", "--kill", "daemon"), 2, "--kill daemon needs a mount"),
        (("/tmp", "--only", "read", "--minutes", "1"), 2, "--only writes or reads once"),
        (("curvine://127.0.0.1:1/",), 4, "no Curvine master answers"),
    ],
    ids=lambda value: None if isinstance(value, tuple | int) else value[:16],
)
def test_bad_input_is_one_sentence(
    words: tuple[str, ...], code: int, said: str, capfd: pytest.CaptureFixture[str]
) -> None:
    assert main(["verify", *words]) == code
    captured = capfd.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("curvfs: ") and said in captured.err and captured.err.count("\n") == 1


def test_a_full_disk_is_one_sentence(tmp_path: Path) -> None:
    """With a limit on file sizes: the write fails, what there is goes."""
    done = subprocess.run(
        [
            "sh",
            "-c",
            'ulimit -f 512; exec "$@"',
            "sh",
            sys.executable,
            "-P",
            "-m",
            "tools",
            "verify",
            str(tmp_path),
            *FEW,
        ],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 1 and "File too large" in done.stderr and "Traceback" not in done.stderr
    assert list(tmp_path.iterdir()) == []
