"""Run a command and keep what it printed: ``python -m tools.record FILE.md WORD...``.

Appends a section to FILE: when, of which commit, how long, the command, and its output, which is shown as well. A
command that fails is not kept. Exits as the command does.
"""

from __future__ import annotations

import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path

from curvfs.units import format_duration
from curvfs.world import World


def commit() -> str:
    """The commit of the checkout, with a ``+`` when files differ from it."""

    def git(*words: str) -> str:
        return subprocess.run(["git", *words], capture_output=True, text=True, check=False).stdout.strip()

    changed = (
        "+" if git("status", "--porcelain", "--untracked-files=no", "--", "curvfs", "kvstore", "mount", "tools") else ""
    )
    return (git("rev-parse", "--short=12", "HEAD") or "unknown") + changed


def main(arguments: list[str]) -> int:
    """Run it; returns the exit code."""
    if len(arguments) < 2:
        print("record: name a file and a command", file=sys.stderr)
        return 2
    clock = World.real().clock
    path, words = Path(arguments[0]), arguments[1:]
    began_s, began_ms, of = clock.monotonic_s(), clock.time_ms(), commit()
    lines = []
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        for line in process.stdout:
            print(line, end="", flush=True)
            lines.append(line)
    if process.returncode == 0:
        took = format_duration(clock.monotonic_s() - began_s)
        when = datetime.fromtimestamp(began_ms / 1000, UTC).strftime("%Y-%m-%d %H:%M UTC")
        command = " ".join(
            ["python", *words[1:]] if words[0] == sys.executable or words[0].endswith("/python") else words
        )
        with path.open("a", encoding="utf-8") as file:
            file.write(f"\n## {when}, commit {of}, {took}\n\n```\n$ {command}\n{''.join(lines).rstrip()}\n```\n")
    return process.returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
