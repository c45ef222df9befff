"""``curvfs mounts``: the mounts of this machine, with pool, process, uptime and counters."""

from __future__ import annotations

import errno
import json
from typing import Annotated, Any

import typer

from curvfs.runrecords import running
from curvfs.units import format_size
from curvfs.world import World
from mount import kernel

_COLUMNS = ("MOUNTPOINT", "POOL", "PID", "UP", "STATE", "CALLS", "READ", "WRITTEN", "PUBLISHED", "OPEN")


def register(app: typer.Typer) -> None:
    """Add the command to the command line."""
    app.command()(mounts)


def mounts(
    as_json: Annotated[bool, typer.Option("--json", help="As JSON, with everything that is known.")] = False,
) -> None:
    """List the curvfs mounts of this machine.

    STATE is ok, dead (its process is gone; the next curvfs mount there clears it), or silent (it does not answer).
    """
    found = list_mounts(World.real())
    if as_json:
        typer.echo(json.dumps(found, indent=2))
        return
    if not found:
        typer.echo("There is no curvfs mount on this machine.")
        return
    rows = [_COLUMNS, *(_row(each) for each in found)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(_COLUMNS))]
    for row in rows:
        typer.echo("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())


def list_mounts(world: World) -> list[dict[str, Any]]:
    """What is mounted, as the kernel tells it, with the record of the process behind each, where it can be read."""
    records = {record.get("mountpoint"): record for record in running(world, "mount")}
    now_ms = world.clock.time_ms()
    found = []
    for entry in kernel.mounts(world.disk):
        if entry.is_ours:
            record = records.get(entry.path, {})
            since_ms = record.get("since_ms")
            found.append(
                {
                    **record,
                    "mountpoint": entry.path,
                    "url": entry.source,
                    "pid": record.get("pid"),
                    "uptime_s": None if since_ms is None else round((now_ms - since_ms) / 1000, 1),
                    "state": _state(entry.path),
                }
            )
    return found


def _state(path: str) -> str:
    answer = kernel.probe(path)
    if answer == errno.ENOTCONN:
        return "dead"
    # Others than the user who mounted are refused; somebody answers, then.
    return "silent" if answer is None else "ok" if answer in (0, errno.EACCES) else f"failing ({answer})"


def _row(mount: dict[str, Any]) -> tuple[str, ...]:
    uptime_s = mount["uptime_s"]
    return (
        mount["mountpoint"],
        mount["url"],
        _shown(mount["pid"]),
        "-" if uptime_s is None else _duration(uptime_s),
        mount["state"],
        _shown(mount.get("calls")),
        *("-" if mount.get(name) is None else format_size(mount[name]) for name in ("read_bytes", "written_bytes")),
        _shown(mount.get("objects", {}).get("published")),
        _shown(mount.get("open_files")),
    )


def _shown(value: object) -> str:
    return "-" if value is None else str(value)


def _duration(seconds: float) -> str:
    """``5s``, ``12m``, ``3h05m``, ``40d2h``."""
    minutes, hours, days = int(seconds // 60), int(seconds // 3600), int(seconds // 86400)
    if days:
        return f"{days}d{hours % 24}h"
    if hours:
        return f"{hours}h{minutes % 60:02}m"
    return f"{minutes}m" if minutes else f"{seconds:.0f}s"
