"""The commands ``curvfs top``, a view that renews itself, and ``curvfs stats``, one look."""

from __future__ import annotations

import itertools
import json
from contextlib import suppress
from typing import Annotated, Literal, cast

import typer
from rich.console import Console
from rich.live import Live

from curvfs.errors import UsageError
from curvfs.runrecords import running
from curvfs.world import World
from tools.top.rates import Delta, Record, key
from tools.top.view import screen

_Kind = Literal["mount", "kvstore", "server"]
_PIPE_COLUMNS = 200
#: Columns of a terminal below which tables have one blank between their columns.
_NARROW = 110
_KINDS = ("mount", "kvstore", "server")

KindOption = Annotated[str | None, typer.Option("--kind", help="Only mount, kvstore or server.")]


def register(app: typer.Typer) -> None:
    """Add the commands to the command line."""
    app.command()(top)
    app.command()(stats)


def top(
    kind: KindOption = None,
    interval_s: Annotated[float, typer.Option("--interval", help="Seconds between two looks.")] = 1.0,
    count: Annotated[int | None, typer.Option(help="Looks to take, then end. Default: until Ctrl-C.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON list a look, on one line.")] = False,
) -> None:
    """Watch the mounts, stores and servers of this machine: rates, latencies, hits, misses, breakers, room."""
    if not 0.1 <= interval_s <= 3600:
        raise UsageError(f"--interval is {interval_s:g}; give seconds from 0.1 to 3600.")
    if count is not None and count < 1:
        raise UsageError(f"--count is {count}; give at least 1.")
    world, console = World.real(), _console()
    if as_json:
        with suppress(KeyboardInterrupt):
            for look in itertools.count(1):
                world.clock.block(interval_s)
                typer.echo(json.dumps(_records(world, kind)))
                if look == count:
                    break
        return
    before = _records(world, kind)
    with suppress(KeyboardInterrupt), Live(console=console, auto_refresh=False, screen=console.is_terminal) as live:
        for look in itertools.count(1):
            world.clock.block(interval_s)
            now = _records(world, kind)
            view = screen(_deltas(now, before), world.clock.time_ms(), narrow=console.width < _NARROW)
            live.update(view, refresh=console.is_terminal)
            if look == count:
                break
            before = now
    if not console.is_terminal:
        console.print()  # Live ends a pipe in the middle of a line


def stats(
    kind: KindOption = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON list, with everything that is known.")
    ] = False,
) -> None:
    """Print once what the mounts, stores and servers of this machine have counted."""
    world = World.real()
    records = _records(world, kind)
    if as_json:
        typer.echo(json.dumps(records, indent=2))
        return
    console = _console()
    console.print(screen(_deltas(records, []), world.clock.time_ms(), narrow=console.width < _NARROW))


def _console() -> Console:
    """The terminal; a file or a pipe gets lines as long as they need to be."""
    console = Console(highlight=False)
    return console if console.is_terminal else Console(highlight=False, width=_PIPE_COLUMNS)


def _records(world: World, kind: str | None) -> list[Record]:
    if kind is not None and kind not in _KINDS:
        raise UsageError(f"{kind!r} does not run here ever; write {', '.join(_KINDS)}.")
    return list(running(world, cast(_Kind, kind) if kind else None))


def _deltas(now: list[Record], before: list[Record]) -> list[Delta]:
    known = {key(record): record for record in before}
    return [Delta(record, known.get(key(record))) for record in now]
