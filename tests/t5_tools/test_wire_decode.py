"""``curvfs wire decode`` as a user runs it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from golden_frames import HEAD, VERSIONS, GoldenFrame, scenarios

from curvfs.wire.frame import HEARTBEAT


def run(*arguments: str, given: bytes | str = b"") -> subprocess.CompletedProcess[str]:
    raw = given.encode() if isinstance(given, str) else given
    done = subprocess.run(
        [sys.executable, "-m", "tools", "wire", "decode", *arguments], input=raw, capture_output=True, timeout=60
    )
    return subprocess.CompletedProcess(done.args, done.returncode, done.stdout.decode(), done.stderr.decode())


def lines(output: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in output.splitlines()]


def assert_sentence(done: subprocess.CompletedProcess[str], *parts: str) -> None:
    """Exit code 2 and one sentence on stderr, with all ``parts`` in it."""
    assert done.returncode == 2
    assert done.stderr.startswith("curvfs: ")
    assert done.stderr.count("\n") == 1
    for part in parts:
        assert part in done.stderr


def summary(frame: GoldenFrame) -> tuple[int, int, int, int]:
    return frame.head.code, frame.head.req_id, frame.head.seq_id, frame.head.data_len


@pytest.mark.parametrize("version", VERSIONS)
def test_every_captured_conversation(version: str) -> None:
    """All scenarios in one go: frames with and without their data, and events, which are skipped."""
    captured = scenarios(version).values()
    done = run(given="".join(scenario.text for scenario in captured))
    assert (done.returncode, done.stderr) == (0, "")
    printed = [(each["code"], each["req_id"], each["seq_id"], each["data_len"]) for each in lines(done.stdout)]
    assert printed == [summary(frame) for scenario in captured for frame in scenario.frames]


def test_a_file(tmp_path: Path) -> None:
    scenario = scenarios(HEAD)["raw_put_pipelined"]
    file = tmp_path / "frames.jsonl"
    file.write_text(scenario.text)
    done = run(str(file))
    assert done.returncode == 0
    printed = lines(done.stdout)
    assert printed[0]["name"] == "CreateFile"
    assert printed[0]["message"] == "CreateFileRequest"
    assert printed[0]["fields"]["path"] == "/raw/pipe"
    assert printed[0]["fields"]["opts"]["file_type"] == "FILE_TYPE_PROTO_FILE"
    large = [each for each in printed if each["data_len"] == 131072]
    assert {(each["name"], each["request_status"], each["response_status"]) for each in large} == {
        ("WriteBlock", "Running", "Undefined")
    }
    assert run("-", given=scenario.text).stdout == done.stdout


def test_error_replies() -> None:
    done = run(given=scenarios(HEAD)["raw_delete_missing"].text)
    errors = [each for each in lines(done.stdout) if each["response_status"] == "Error"]
    assert [each["error_kind"] for each in errors] == [8]
    assert "not" in errors[0]["error_text"]


def test_raw_bytes(tmp_path: Path) -> None:
    frames = [frame for frame in scenarios(HEAD)["raw_mkdir"].frames if frame.from_client]
    file = tmp_path / "client.bin"
    file.write_bytes(b"".join(frame.captured for frame in frames) + HEARTBEAT)
    done = run("--raw", str(file))
    assert (done.returncode, done.stderr) == (0, "")
    printed = lines(done.stdout)
    assert [each["req_id"] for each in printed] == [frame.head.req_id for frame in frames] + [-1]
    assert run(str(file), "--raw").stdout == done.stdout


def test_raw_bytes_with_large_data() -> None:
    payload = bytes(4 << 20)
    frame = next(frame for frame in scenarios(HEAD)["raw_put_chunk_4m"].frames if frame.head.data_len == len(payload))
    done = run("--raw", given=(frame.captured + payload) * 2)
    assert [each["data_len"] for each in lines(done.stdout)] == [len(payload)] * 2


def test_raw_frames_appear_while_the_capture_goes_on() -> None:
    with subprocess.Popen(
        [sys.executable, "-m", "tools", "wire", "decode", "--raw"], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(HEARTBEAT)
        process.stdin.flush()
        assert json.loads(process.stdout.readline())["request_status"] == "Heartbeat"
        process.stdin.close()
        assert process.wait(30) == 0


def test_nothing_in_nothing_out() -> None:
    for arguments in ((), ("--raw",)):
        done = run(*arguments)
        assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


HEARTBEAT_LINE = json.dumps({"frame": HEARTBEAT.hex()})


@pytest.mark.parametrize(
    ("bad", "says"),
    [
        ("not json", "--raw"),
        ("[1]", '"frame"'),
        ("{}", '"frame"'),
        ("null", '"frame"'),
        ('{"frame": "zz"}', "hexadecimal"),
        ('{"frame": 7}', "hexadecimal"),
        ('{"head": null}', "hexadecimal"),
        ('{"frame": ""}', "22 bytes"),
        ('{"frame": "00"}', "22 bytes"),
        (json.dumps({"frame": HEARTBEAT.hex() + "00"}), "23 bytes where the frame announces 22"),
        (json.dumps({"frame": "00000014" + HEARTBEAT.hex()[8:]}), "22 bytes where the frame announces 24"),
        (json.dumps({"frame": "ffffffff" + HEARTBEAT.hex()[8:]}), "impossible lengths"),
        (json.dumps({"head": HEARTBEAT.hex(), "data_len": 9}), '"data_len" is 9'),
        ("[" * 100_000, "not JSON"),
        ("\x00\xff", "not JSON"),
    ],
)
def test_bad_lines(bad: str, says: str) -> None:
    done = run(given="\n".join([HEARTBEAT_LINE, "", bad, HEARTBEAT_LINE]).encode("latin-1"))
    assert_sentence(done, "Line 3 of standard input", says)
    assert len(lines(done.stdout)) == 1


def test_raw_bytes_that_end_too_early() -> None:
    done = run("--raw", given=HEARTBEAT * 2 + HEARTBEAT[:7])
    assert_sentence(done, "standard input is cut", "at byte 44", "7 bytes")
    assert len(lines(done.stdout)) == 2


def test_raw_bytes_that_are_something_else(tmp_path: Path) -> None:
    file = tmp_path / "page.html"
    file.write_bytes(HEARTBEAT + b"HTTP/1.1 400 Bad Request\r\n\r\n")
    done = run("--raw", str(file))
    assert_sentence(done, f"byte 22 of {file}")
    assert len(lines(done.stdout)) == 1


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    assert_sentence(run(str(tmp_path / "absent")), "absent", "No such file")
    assert_sentence(run("--raw", str(tmp_path)), str(tmp_path), "directory")
