"""The file commands as processes of a shell: every one of them once, signals, pipes, servers that hang or die."""

from __future__ import annotations

import contextlib
import os
import random
import shlex
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from curvfs.api import SyncFileSystem
from tests.t5_tools.conftest import COMMAND, Place, ServerProcess, wait_for
from tools.files.options import complete_path

#: Of zeros on the disk, so that nothing is written to make it; in blocks of 1 MiB, so that its growth can be seen.
HUGE_BYTES = 256 * 2**20


def shell(script: str, **options: object) -> subprocess.CompletedProcess[str]:
    """Run a script in which ``curvfs`` is the command."""
    definition = f'curvfs() {{ {shlex.join(COMMAND)} "$@"; }}\n'
    return subprocess.run(
        ["sh", "-c", definition + script],
        capture_output=True, text=True, timeout=100, stdin=subprocess.DEVNULL, **options,  # type: ignore[call-overload]
    )  # fmt: skip


@pytest.fixture
def huge(tmp_path: Path) -> Path:
    """Sparse, with something at its ends."""
    path = tmp_path / "huge"
    with path.open("wb") as file:
        file.write(b"begin")
        file.truncate(HUGE_BYTES)
        file.seek(HUGE_BYTES - 3)
        file.write(b"end")
    return path


@pytest.fixture
def start() -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """Starts commands that do not outlive the test."""
    running: list[subprocess.Popen[str]] = []

    def start_one(*words: str | Path) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [*COMMAND, *map(str, words)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        running.append(process)
        return process

    yield start_one
    for process in running:
        process.kill()
        process.communicate()


def part_of(place: Place) -> str | None:
    names = [name for name in place.names() if name.endswith(".part")]
    return f"/{names[0]}" if names else None


def grows(place: Place) -> bool:
    part = part_of(place)
    return part is not None and place.fs.stat(part).length_bytes >= 2**21


def end_of(process: subprocess.Popen[str]) -> tuple[int, str]:
    _, err = process.communicate(timeout=60)
    assert "Traceback" not in err
    return process.returncode, err


def check(place: Place, path: str = "/huge") -> None:
    with place.fs.open(path) as reader:
        assert reader.length_bytes == HUGE_BYTES
        assert reader.read_at(0, 6) == b"begin\0" and reader.read_at(HUGE_BYTES - 4, 4) == b"\0end"


def test_every_command(place: Place, tmp_path: Path) -> None:
    content = random.Random(3).randbytes(3_000_000)
    (tmp_path / "file").write_bytes(content)
    done = shell(
        """set -eu
        curvfs mkdir -p /models/a
        curvfs put file /models/
        curvfs cp /models/file /models/a/copy
        curvfs mv /models/a/copy /models/a/moved
        curvfs ln -s ../file /models/a/link
        curvfs touch /models/a/empty
        curvfs chmod 0600 /models/file
        curvfs chown alice:staff /models/file
        curvfs xattr set /models/file user.k v
        curvfs xattr get /models/file user.k
        curvfs ls -l -R /models
        curvfs stat /models/file
        curvfs du -sh /models
        curvfs df -h
        curvfs report
        curvfs get /models/a/link back
        curvfs cat /models/file | cmp - file
        curvfs rm -r /models
        curvfs ls /
        """,
        cwd=tmp_path,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert (tmp_path / "back").read_bytes() == content
    for words in ("-rw-------", "alice", "moved", "link -> ../file", "kind: file", "5.7 MiB", "1 live, 0 not"):
        assert words in done.stdout


def test_exit_codes_are_for_scripts(place: Place) -> None:
    place.write("/big", bytes(2**24))
    done = shell("curvfs cat /nope || echo $?; { curvfs cat /big; echo $? >&2; } | head -c 10")
    assert (done.stdout, done.stderr.splitlines()[-1]) == ("5\n" + "\0" * 10, "141")
    assert done.stderr.count("\n") == 2


def test_ctrl_c_in_put(place: Place, huge: Path, start: Callable[..., subprocess.Popen[str]]) -> None:
    process = start("put", huge, "/huge")
    wait_for(lambda: grows(place), what="the part")
    process.send_signal(signal.SIGINT)
    code, err = end_of(process)
    assert code == 130
    part = part_of(place)
    assert part is not None and place.names() == [part[1:]]
    assert part in err and place.fs.stat(part).is_complete
    again = start("put", "-v", huge, "/huge")
    out, _ = again.communicate(timeout=60)
    assert again.returncode == 0 and "went on at" in out
    assert place.names() == ["huge"]
    check(place)


def test_kill_in_put(place: Place, huge: Path, start: Callable[..., subprocess.Popen[str]]) -> None:
    process = start("put", huge, "/huge")
    wait_for(lambda: grows(place), what="the part")
    process.kill()
    assert end_of(process)[0] == -signal.SIGKILL
    part = part_of(place)
    assert part is not None and place.names() == [part[1:]]
    assert not place.fs.stat(part).is_complete
    again = start("put", "-v", huge, "/huge")
    out, _ = again.communicate(timeout=60)
    assert again.returncode == 0 and "went on at" in out
    assert place.names() == ["huge"]
    check(place)


def test_signals_in_get(place: Place, tmp_path: Path, start: Callable[..., subprocess.Popen[str]]) -> None:
    with place.fs.create("/huge") as writer:
        for _ in range(HUGE_BYTES // 2**23):
            writer.write(bytes(2**23 - 1) + b"x")
    (tmp_path / "here").mkdir()
    target = tmp_path / "here" / "f"
    options = ("--set", "client_hostname=elsewhere", "/huge", target)

    def part_bytes() -> int:
        return sum(path.stat().st_size for path in target.parent.iterdir())

    process = start("get", *options)
    wait_for(lambda: part_bytes() > 0, what="the part")
    process.send_signal(signal.SIGINT)
    code, err = end_of(process)
    assert code == 130 and "the same command goes on from there" in err
    before = part_bytes()
    process = start("get", *options)
    wait_for(lambda: part_bytes() > before, what="more of the part")
    process.kill()
    assert end_of(process)[0] == -signal.SIGKILL
    (part,) = target.parent.iterdir()
    assert part.name.endswith(".part") and before < part.stat().st_size < HUGE_BYTES
    process = start("get", "-v", *options)
    out, _ = process.communicate(timeout=60)
    assert process.returncode == 0 and "went on at" in out
    assert os.listdir(target.parent) == ["f"]
    with target.open("rb") as file:
        assert all(file.read(2**23) == bytes(2**23 - 1) + b"x" for _ in range(HUGE_BYTES // 2**23))
        assert file.read() == b""


def test_a_second_ctrl_c_does_not_wait(huge: Path, tmp_path: Path, start: Callable[..., subprocess.Popen[str]]) -> None:
    server = ServerProcess(tmp_path / "pool")
    try:
        with SyncFileSystem.connect(server.url) as fs:
            options = ["--set", "block_size=1MB", "--set", "close_timeout=0.3s"]
            process = start("put", *options, huge, f"{server.url}huge")
            wait_for(lambda: any(entry.length_bytes for entry in fs.list("/")), what="the part")
            server.send(signal.SIGSTOP)
            process.send_signal(signal.SIGINT)
            time.sleep(0.5)  # two that arrive at once count as one, so a person who sees nothing happen comes again
            while process.poll() is None:
                process.send_signal(signal.SIGINT)
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(5)
            assert end_of(process)[0] == 130
            server.send(signal.SIGCONT)
            assert [entry.name for entry in fs.list("/") if not entry.name.endswith(".part")] == []
    finally:
        server.end()


def test_the_server_dies_in_put(huge: Path, tmp_path: Path, start: Callable[..., subprocess.Popen[str]]) -> None:
    server = ServerProcess(tmp_path / "pool")
    options = ["--set", "block_size=1MB", "--set", "retry_max=1s", "--set", "close_timeout=0.3s"]
    try:
        with SyncFileSystem.connect(server.url) as fs:
            process = start("put", *options, huge, f"{server.url}huge")
            wait_for(lambda: any(entry.length_bytes >= 2**21 for entry in fs.list("/")), what="the part")
        server.end()
        code, err = end_of(process)
        assert code == 4 and err.startswith("curvfs: ")
        server = ServerProcess(tmp_path / "pool")
        again = start("put", "-v", *options, huge, f"{server.url}huge")
        out, _ = again.communicate(timeout=60)
        assert again.returncode == 0 and "went on at" in out
        with SyncFileSystem.connect(server.url) as fs:
            assert [entry.name for entry in fs.list("/")] == ["huge"]
            with fs.open("/huge") as reader:
                assert reader.read_at(HUGE_BYTES - 4, 4) == b"\0end"
    finally:
        server.end()


def test_progress_is_shown_on_a_terminal(place: Place, huge: Path) -> None:
    """And nowhere else: the other tests here look at what stands on stderr."""
    done = subprocess.run(
        ["script", "-qec", f"{shlex.join(COMMAND)} put {huge} /huge", "/dev/null"],
        capture_output=True, text=True, timeout=60, stdin=subprocess.DEVNULL, env={**os.environ, "TERM": "xterm"},
    )  # fmt: skip
    assert done.returncode == 0
    assert "huge" in done.stdout and "of 256.0 MiB" in done.stdout and "MiB/s" in done.stdout


def test_completion(place: Place) -> None:
    place.fs.mkdir("/models")
    place.write("/model.bin")

    def complete(*words: str) -> list[str]:
        environ = {
            "_CURVFS_COMPLETE": "complete_bash",
            "COMP_WORDS": " ".join(words),
            "COMP_CWORD": str(len(words) - 1),
        }
        done = subprocess.run(COMMAND, capture_output=True, text=True, timeout=60, env={**os.environ, **environ})
        assert done.stderr == ""
        return done.stdout.split()

    assert complete("curvfs", "ls", "/mod") == ["/model.bin", "/models/"]
    assert complete("curvfs", "get", f"{place.url}/models") == [f"{place.url}/models/"]
    assert list(complete_path("curvine://127.0.0.1:1/x")) == []
