"""The ``curvfs doctor`` command."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Annotated

import typer
from rich.console import Console
from rich.text import Text

from curvfs.config import gather_settings
from curvfs.errors import ConfigError
from curvfs.world import World
from tools.configcmd import overrides_from
from tools.doctor.cluster import check_cluster
from tools.doctor.findings import Finding, Level, error, note, worst
from tools.doctor.machine import check_machine
from tools.doctor.place import check_place
from tools.doctor.processes import check_processes
from tools.interrupts import EXIT_INTERRUPTED, Interrupts
from tools.jsonoption import Json

_MARKS = {
    Level.OK: ("ok", "green"),
    Level.NOTE: ("note", "cyan"),
    Level.WARNING: ("warn", "yellow"),
    Level.ERROR: ("FAIL", "red"),
}


def register(app: typer.Typer) -> None:
    """Add the command to the command line."""
    app.command()(doctor)


def doctor(
    url: Annotated[str | None, typer.Argument(metavar="[URL]", help="The cluster. Default: as configured.")] = None,
    data: Annotated[
        list[str] | None, typer.Option("--data", metavar="DIR", help="A directory to keep data in; several times.")
    ] = None,
    conf: Annotated[str | None, typer.Option(metavar="FILE", help="The cluster file.")] = None,
    setting: Annotated[
        list[str] | None, typer.Option("--set", metavar="NAME=VALUE", help="Override a setting; several times.")
    ] = None,
    read_only: Annotated[bool, typer.Option("--read-only", help="Write nothing to the cluster.")] = False,
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="Show what is all right, too.")] = False,
    as_json: Json = False,
) -> int:
    """Find out what stands in the way here, and what to do about it.

    Exit code 0: nothing to do. 1: something works, but not as it could. 3: something will not work. 130: Ctrl-C.
    """
    found: list[Finding] = []
    console = Console(highlight=False, soft_wrap=True)
    with Interrupts() as interrupts:
        for finding in _findings(World.real(), url, data or [], conf, setting, write=not read_only):
            found.append(finding)
            if not as_json and (verbose or finding.level > Level.OK):
                _show(console, finding)
            if interrupts.heard:
                break
    level = worst(found)
    if as_json:
        typer.echo(json.dumps(_document(found, level) | {"interrupted": interrupts.heard}, indent=2))
    else:
        counts = [sum(finding.level == each for finding in found) for each in Level]
        words = ", ".join(f"{count} {word}" for count, (word, _) in zip(counts, _MARKS.values(), strict=True))
        console.print(f"{'Interrupted after ' if interrupts.heard else ''}{len(found)} checks: {words}.")
    return EXIT_INTERRUPTED if interrupts.heard else level.exit_code


def _findings(
    world: World, url: str | None, data: list[str], conf: str | None, setting: list[str] | None, *, write: bool
) -> Iterator[Finding]:
    yield from check_machine(world)
    for directory in data:
        yield from check_place(world, directory)
    overrides = overrides_from(setting)
    try:
        settings = gather_settings(url, file=conf, **overrides)
    except ConfigError as failed:
        if url or conf or overrides:
            yield error("settings", str(failed), "See curvfs config.")
        else:
            yield note("settings", "No cluster is configured, so none was checked.", "Name one: curvfs doctor URL.")
    else:
        yield from check_cluster(world, settings, write=write)
    yield from check_processes(world)


def _show(console: Console, finding: Finding) -> None:
    word, colour = _MARKS[finding.level]
    line = Text(f"{word:5}", style=colour)
    line.append(f"{finding.check}: ", style="bold")
    line.append(finding.text, style="default")
    console.print(line)
    if finding.remedy:
        console.print(Text(f"      {finding.remedy}"))


def _document(findings: list[Finding], level: Level) -> dict[str, object]:
    return {
        "level": level.name.lower(),
        "findings": [
            {"check": each.check, "level": each.level.name.lower(), "text": each.text, "remedy": each.remedy}
            for each in findings
        ],
    }
