"""The command line as a person meets it: real processes, their output and exit codes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import curvfs
from curvfs import errors
from tools.__main__ import main
from tools.cli import MODULES, application

COMMAND = (sys.executable, "-P", "-m", "tools")


def run(*arguments: str, **options: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run((*COMMAND, *arguments), capture_output=True, text=True, timeout=60, **options)  # type: ignore[call-overload,no-any-return]


def test_version_comes_from_the_package() -> None:
    done = run("--version")
    assert (done.returncode, done.stdout, done.stderr) == (0, f"curvfs {curvfs.__version__}\n", "")


def test_without_a_command_help_is_shown() -> None:
    done = run()
    assert (done.returncode, done.stderr) == (2, "")
    assert "serve" in done.stdout and "mount" in done.stdout


@pytest.mark.parametrize(
    "command",
    [
        (),
        ("serve",),
        ("mount",),
        ("umount",),
        ("mounts",),
        ("install-helper",),
        ("demo",),
        ("wire",),
        ("wire", "decode"),
    ],
    ids=" ".join,
)
def test_every_command_explains_itself(command: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*command, "--help"]) == 0
    shown = capsys.readouterr().out
    assert " ".join(("curvfs", *command)) in shown
    assert "--help" in shown


@pytest.mark.parametrize(
    "arguments", [("nonsense",), ("--nonsense",), ("serve",), ("mount",), ("demo", "--prompts", "many")], ids=" ".join
)
def test_a_wrong_command_line_is_one_sentence_and_exit_code_2(
    arguments: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("curvfs: ") and captured.err.count("\n") == 1


@pytest.mark.parametrize(
    ("raised", "code", "said"),
    [
        (errors.UsageError("No."), 2, "curvfs: No.\n"),
        (errors.EnvironmentError_("No device."), 3, "curvfs: No device.\n"),
        (errors.ConnectFailed("Nobody."), 4, "curvfs: Nobody.\n"),
        (errors.NotFound("Nothing."), 5, "curvfs: Nothing.\n"),
        (FileNotFoundError(2, "No such file or directory", "/x"), 1, "curvfs: /x: No such file or directory.\n"),
        (KeyError("x"), 1, "curvfs: Unexpected KeyError: 'x'; curvfs --debug with the same command shows where.\n"),
        (KeyboardInterrupt(), 130, ""),
        (ModuleNotFoundError("No module named 'pyfuse3'", name="pyfuse3"), 3, None),
        (BaseExceptionGroup("g", [ValueError("a"), ExceptionGroup("h", [errors.NotFound("b")])]), 5, "curvfs: b\n"),
        (BaseExceptionGroup("g", [KeyboardInterrupt(), errors.NotFound("b")]), 130, ""),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, BaseException) else None,
)
def test_every_failure_has_one_sentence_and_its_exit_code(
    raised: BaseException,
    code: int,
    said: str | None,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def fail(arguments: object) -> int:
        raise raised

    monkeypatch.setattr("tools.cli.run", fail)
    assert main([]) == code
    shown = capsys.readouterr().err
    assert "Traceback" not in shown
    if said is None:
        assert "pip install 'curvfs[fuse]'" in shown
    else:
        assert shown == said


def test_a_group_alone_shows_its_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["wire"]) == 2
    captured = capsys.readouterr()
    assert "decode" in captured.out and captured.err == ""


def test_debug_adds_the_traceback(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--debug", "nonsense"]) == 2
    shown = capsys.readouterr().err
    assert "Traceback" in shown
    assert shown.splitlines()[-1].startswith("curvfs: No such command")


def test_a_reader_that_goes_away_is_no_error() -> None:
    reading, writing = os.pipe()
    os.close(reading)
    with open(writing, "w") as output:
        done = subprocess.run(
            (*COMMAND, "--help"), stdout=output, stderr=subprocess.PIPE, text=True, timeout=60, stdin=subprocess.DEVNULL
        )
    assert (done.returncode, done.stderr) == (141, "")


def test_closed_standard_streams_are_no_error() -> None:
    done = subprocess.run(
        ["sh", "-c", 'exec "$@" <&- >&- 2>&-', "sh", *COMMAND, "--version"], capture_output=True, timeout=60
    )
    assert done.returncode == 0


def test_missing_command_line_packages_are_named(tmp_path: Path) -> None:
    """Without typer, the sentence names the extra that brings it."""
    (tmp_path / "typer.py").write_text("raise ModuleNotFoundError(\"No module named 'typer'\", name='typer')\n")
    done = run("--version", env={**os.environ, "PYTHONPATH": str(tmp_path)})
    assert done.returncode == 3
    assert done.stderr == (
        "curvfs: This command needs the Python package typer; install it with: pip install 'curvfs[cli]'.\n"
    )


@pytest.mark.parametrize("module", MODULES)
def test_every_module_brings_the_commands_that_it_is_imported_for(module: str) -> None:
    assert tuple(sorted(application((module,)).commands)) == tuple(sorted(MODULES[module]))


#: What they print is always JSON, a file's bytes, or for mount(8).
WITHOUT_JSON = {"wire decode", "mount-helper"}


def every_command(group: Any, *words: str) -> Iterator[tuple[str, set[str]]]:
    """The words of each, and its options."""
    for name, command in group.commands.items():
        if hasattr(command, "commands"):
            yield from every_command(command, *words, name)
        else:
            yield " ".join((*words, name)), {option for each in command.params for option in each.opts}


def test_every_command_has_json() -> None:
    found = dict(every_command(application(tuple(MODULES))))
    assert {name for name, options in found.items() if "--json" not in options} == WITHOUT_JSON
    assert len(found) > 40


def test_a_server_tells_json_where_it_is(tmp_path: Path) -> None:
    command = [*COMMAND, "serve", str(tmp_path), "--master-port", "0", "--worker-port", "0", "--json"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        ready = json.loads(server.stdout.readline())
        assert ready["url"].startswith("curvine://127.0.0.1:") and ready["pid"] == server.pid
        server.send_signal(signal.SIGTERM)
        assert server.wait(30) == 0 and server.stdout.read() == ""


def test_helpers_are_told_in_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    paths = [str(tmp_path / "mount.curvfs"), str(tmp_path / "mount.fuse.curvfs")]
    for more, document in (
        ((), {"wrote": paths}),
        (("--remove",), {"removed": paths}),
        (("--remove",), {"removed": []}),
    ):
        assert main(["install-helper", "--directory", str(tmp_path), "--json", *more]) == 0
        assert json.loads(capsys.readouterr().out) == document
    assert main(["install-helper", "--directory", str(tmp_path), "--remove"]) == 0
    assert "Nothing was there" in capsys.readouterr().out
