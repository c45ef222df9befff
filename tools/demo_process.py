"""Processes that the demo starts: replicas that answer JSON lines, and ``curvfs`` commands."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

import trio

from curvfs.errors import CurvfsError

#: Runs a module of ours whatever lies in the current directory (-P).
PYTHON_MODULE = (sys.executable, "-P", "-m")

_EXIT_TIMEOUT_S = 5.0


class Replica:
    """A replica process. It answers one JSON line with one JSON line and ends when its input does."""

    def __init__(self, name: str, process: trio.Process) -> None:
        self.name = name
        self._process = process
        self._received = bytearray()

    @classmethod
    async def start(cls, name: str, arguments: Sequence[str]) -> Replica:
        """Start the process with the command line ``arguments`` of :mod:`tools.demo_replica`."""
        process = await trio.lowlevel.open_process(
            [*PYTHON_MODULE, "tools.demo_replica", *arguments], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        return cls(name, process)

    async def ask(self, request: dict[str, Any], *, timeout_s: float) -> dict[str, Any]:
        """Send a request, wait for its answer. Raises CurvfsError with the replica's own sentence when it failed."""
        assert self._process.stdin is not None
        with trio.move_on_after(timeout_s):
            try:
                await self._process.stdin.send_all(json.dumps(request).encode() + b"\n")
                answer: dict[str, Any] = json.loads(await self._line())
            except (trio.BrokenResourceError, EOFError):
                raise CurvfsError(f"Replica {self.name} ended in mid-demo; see its output above.") from None
            if "error" in answer:
                raise CurvfsError(f"Replica {self.name}: {answer['error']}")
            return answer
        raise CurvfsError(f"Replica {self.name} did not answer within {timeout_s:.0f} s; is the machine overloaded?")

    async def _line(self) -> bytes:
        assert self._process.stdout is not None
        while (end := self._received.find(b"\n")) < 0:
            chunk = await self._process.stdout.receive_some()
            if not chunk:
                raise EOFError
            self._received += chunk
        line = bytes(self._received[:end])
        del self._received[: end + 1]
        return line

    async def aclose(self) -> None:
        """Close its input and wait for its end; kill it when that takes too long."""
        assert self._process.stdin is not None
        with trio.CancelScope(shield=True):
            await self._process.stdin.aclose()
            with trio.move_on_after(_EXIT_TIMEOUT_S):
                await self._process.wait()
            if self._process.returncode is None:
                self._process.kill()
                await self._process.wait()


async def run_command(command: Sequence[str], *, timeout_s: float) -> subprocess.CompletedProcess[str]:
    """Run a command to its end, with its output captured; Ctrl-C on the terminal does not reach it."""
    with trio.move_on_after(timeout_s):
        done = await trio.run_process(
            command, capture_stdout=True, capture_stderr=True, check=False, start_new_session=True
        )
        return subprocess.CompletedProcess(
            done.args, done.returncode, done.stdout.decode(errors="replace"), done.stderr.decode(errors="replace")
        )
    raise CurvfsError(f"The command {' '.join(command)} did not end within {timeout_s:.0f} s.")


async def run_curvfs(*arguments: str, timeout_s: float = 60.0) -> subprocess.CompletedProcess[str]:
    """Run ``curvfs`` with these arguments."""
    return await run_command([*PYTHON_MODULE, "tools", *arguments], timeout_s=timeout_s)
