"""The server's log cannot be made to fill the disk."""

from __future__ import annotations

from dataclasses import replace

from curvfs.server.oplog import LINES_PER_MINUTE, Log
from curvfs.world import RealClock, World


class Clock(RealClock):
    now_ms = 60_000

    def time_ms(self) -> int:
        return self.now_ms


def test_lines_are_bounded_and_what_is_left_out_is_counted() -> None:
    lines: list[str] = []
    clock = Clock()
    log = Log(replace(World.real(), clock=clock), lines.append)
    for index in range(LINES_PER_MINUTE + 7):
        log.info(f"line {index}")
    assert len(lines) == LINES_PER_MINUTE and lines[0] == "60000 info line 0"
    clock.now_ms = 120_000
    log.error("next")
    assert lines[-2:] == ["120000 error 7 lines were left out", "120000 error next"]


def test_a_bug_is_one_line_with_its_places() -> None:
    lines: list[str] = []
    log = Log(World.real(), lines.append)
    try:
        raise ExceptionGroup("outer", [KeyError("inner")])
    except ExceptionGroup as error:
        log.bug("doing it", error)
    (line,) = lines
    assert "error doing it failed: KeyError: 'inner'" in line and "\n" not in line
