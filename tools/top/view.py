"""The tables of ``curvfs top``."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from curvfs.units import format_duration, format_size
from tools.top.rates import Delta, number

_CAUSES_SHOWN = 3
_SLOW_SHOWN = 5
#: On a narrow terminal texts are folded to this, and numbers stay whole. So no table has more than a dozen columns.
_NARROWEST_TEXT = 8
_NOTHING_RUNS = "No mount, store or server of this user runs here."


def screen(deltas: Sequence[Delta], now_ms: int, *, narrow: bool = False) -> RenderableType:
    """Everything that runs here, by kind. ``narrow``: for a terminal on which no blank is to spare."""
    parts: list[RenderableType] = []
    for kind, build in (("mount", _mounts), ("kvstore", _stores), ("server", _servers)):
        chosen = [delta for delta in deltas if delta.now.get("kind") == kind]
        if chosen:
            parts.append(build(chosen, now_ms))
        if kind == "kvstore":
            parts += _details(chosen)
    slow = [call for delta in deltas for call in _slow_calls(delta)]
    if slow:
        parts.append(_slow(slow))
    for part in parts:
        if isinstance(part, Table):
            part.collapse_padding = narrow
    return Group(*parts) if parts else Text(_NOTHING_RUNS)


def _details(deltas: Sequence[Delta]) -> list[Table]:
    """What stores do; about tiers, room and breakers only those that have them."""

    def having(*paths: tuple[str, str]) -> list[Delta]:
        return [delta for delta in deltas if any(number(delta.now, "stats", *path) for path in paths)]

    chosen = (
        (_rates, list(deltas)),
        (_tiers, having(("memory", "size_bytes"), ("behind", "size_bytes"))),
        (_rooms, having(("capacity", "counted"))),
        (_breakers, [delta for delta in deltas if (delta.now.get("stats") or {}).get("health")]),
    )
    return [build(those) for build, those in chosen if those]


def _table(title: str, columns: Iterable[str], texts: int) -> Table:
    table = Table(title=title, title_justify="left", box=None, pad_edge=False, header_style="bold")
    for place, column in enumerate(columns):
        if place < texts:
            table.add_column(column, justify="left", overflow="fold", min_width=min(_NARROWEST_TEXT, len(column)))
        else:
            table.add_column(column, justify="right", no_wrap=True)
    return table


def _mounts(deltas: Sequence[Delta], now_ms: int) -> Table:
    columns = ("MOUNTPOINT", "POOL", "PID", "UP", "CALLS/S", "P99", "READ/S", "WRITTEN/S", "OPEN", "PUBLISHED")
    table = _table("Mounts", columns, 2)
    for delta in deltas:
        record = delta.now
        operations = record.get("operations") or {}
        p99_s = max((number(each, "p99_s") for each in operations.values()), default=0.0)
        table.add_row(
            str(record.get("mountpoint")),
            str(record.get("url")),
            *_process(record, now_ms),
            f"{delta.rate('calls'):.0f}",
            _latency(p99_s),
            format_size(delta.rate("read_bytes")),
            format_size(delta.rate("written_bytes")),
            f"{number(record, 'open_files'):.0f}",
            f"{number(record, 'objects', 'published'):.0f}",
        )
    return table


def _stores(deltas: Sequence[Delta], now_ms: int) -> Table:
    table = _table("Stores", ("MODEL", "POOL", "STATE", "MISSES", "PID", "UP", "HIT"), 4)
    for delta in deltas:
        record = delta.now
        stats = record.get("stats") or {}
        table.add_row(
            _model(record),
            str(record.get("url")),
            _state(stats),
            _causes(delta.grown("stats", "get_misses")),
            *_process(record, now_ms),
            _hits(stats),
        )
    return table


def _rates(deltas: Sequence[Delta]) -> Table:
    columns = ("MODEL", "PID", "GET/S", "LOADED/S", "P99", "PUT/S", "STORED/S", "P99", "LOOKUPS/S", "P99")
    table = _table("Rates", columns, 1)
    for delta in deltas:
        latencies = (delta.now.get("stats") or {}).get("latencies") or {}
        table.add_row(
            *_whose(delta.now),
            f"{delta.rate('stats', 'gets'):.0f}",
            format_size(delta.rate("stats", "get_bytes")),
            _latency(number(latencies, "get", "p99_s")),
            f"{delta.rate('stats', 'puts'):.0f}",
            format_size(delta.rate("stats", "put_bytes")),
            _latency(number(latencies, "put", "p99_s")),
            f"{delta.rate('stats', 'lookups'):.0f}",
            _latency(number(latencies, "lookup", "p99_s")),
        )
    return table


def _tiers(deltas: Sequence[Delta]) -> Table:
    """Where the pages lay that were delivered, and those that are on their way into the pool."""
    columns = ("MODEL", "PID", "FROM MEMORY", "FROM POOL", "MEMORY", "OF", "QUEUED", "DROPPED")
    table = _table("Hits by tier", columns, 1)
    for delta in deltas:
        stats = delta.now.get("stats") or {}
        hits, gets = number(stats, "memory", "hits"), number(stats, "gets")
        table.add_row(
            *_whose(delta.now),
            f"{hits:.0f}",
            f"{max(0.0, gets - hits):.0f}",
            format_size(number(stats, "memory", "used_bytes")),
            format_size(number(stats, "memory", "size_bytes")),
            f"{number(stats, 'behind', 'queued'):.0f}",
            f"{number(stats, 'behind', 'dropped'):.0f}",
        )
    return table


def _rooms(deltas: Sequence[Delta]) -> Table:
    """What the pools take that are kept within limits."""
    table = _table("Room", ("MODEL", "PID", "USED", "QUOTA", "FULL", "TRASH", "EVICTED/S", "NO ROOM"), 1)
    for delta in deltas:
        capacity = (delta.now.get("stats") or {}).get("capacity") or {}
        used, quota = number(capacity, "used_bytes"), number(capacity, "quota_bytes")
        table.add_row(
            *_whose(delta.now),
            format_size(used),
            format_size(quota) if quota else "none",
            f"{used / quota:.0%}" if quota else "-",
            format_size(number(capacity, "trash_bytes")),
            f"{delta.rate('stats', 'evicted'):.0f}",
            f"{number(capacity, 'refused'):.0f}",
        )
    return table


def _breakers(deltas: Sequence[Delta]) -> Table:
    """Whom stores leave alone: their breakers for what they ask, what they put, and each place that they read from or
    write to."""
    columns = ("MODEL", "CALLS", "BREAKER", "PID", "OPENED", "SPEED", "UNDER WAY", "OLDEST")
    table = _table("Breakers", columns, 3)
    for delta in deltas:
        health = (delta.now.get("stats") or {}).get("health") or {}
        model, pid = _whose(delta.now)
        for call in ("asking", "putting"):
            table.add_row(model, call, str(health.get(call, "-")), pid, "", "", "", "")
        rows = [("reading", *item) for item in sorted((health.get("places") or {}).items())]
        rows += [("writing", *item) for item in sorted((health.get("writers") or {}).items())]
        for call, name, place in rows:
            speed = number(place, "bytes_per_s")
            table.add_row(
                model,
                f"{call} {name}".rstrip(),
                str(place.get("state")),
                pid,
                f"{number(place, 'opened'):.0f}",
                f"{format_size(speed)}/s" if speed else "-",
                f"{number(place, 'in_flight'):.0f}",
                _latency(number(place, "oldest_s")),
            )
    return table


def _servers(deltas: Sequence[Delta], now_ms: int) -> Table:
    columns = ("SERVER", "DIRECTORY", "PID", "UP", "CALLS/S", "P99", "READ/S", "WRITTEN/S", "USED", "FREE")
    table = _table("Servers", columns, 2)
    for delta in deltas:
        record = delta.now
        table.add_row(
            str(record.get("url")),
            str(record.get("directory")),
            *_process(record, now_ms),
            f"{delta.rate('answers', 'count'):.0f}",
            _latency(number(record, "answers", "p99_s")),
            format_size(delta.rate("read_bytes")),
            format_size(delta.rate("written_bytes")),
            format_size(number(record, "used_bytes")),
            format_size(number(record, "available_bytes")),
        )
    return table


def _slow_calls(delta: Delta) -> list[tuple[str, dict[str, Any]]]:
    found = delta.now.get("slow_calls")
    where = str(delta.now.get("mountpoint") or delta.now.get("model"))
    return [(where, call) for call in found] if isinstance(found, list) else []


def _slow(calls: Sequence[tuple[str, dict[str, Any]]]) -> Table:
    table = _table("Slow calls", ("WHERE", "CALL", "OF", "TOOK"), 3)
    newest = sorted(calls, key=lambda each: -number(each[1], "began_ms"))[:_SLOW_SHOWN]
    for where, call in newest:
        took = format_duration(number(call, "took_s"))
        table.add_row(where, str(call.get("operation")), str(call.get("about")), took)
    return table


def _process(record: Any, now_ms: int) -> tuple[str, str]:
    up_s = max(0, now_ms - int(number(record, "since_ms"))) // 1000
    shown = f"{up_s} s" if up_s < 120 else f"{up_s // 60} min" if up_s < 7200 else f"{up_s // 3600} h"
    return str(record.get("pid")), shown


def _whose(record: Any) -> tuple[str, str]:
    return _model(record), str(record.get("pid"))


def _model(record: Any) -> str:
    shard = record.get("shard")
    return f"{record.get('model')} {shard}" if shard else str(record.get("model"))


def _state(stats: Any) -> str:
    """One word or a few on what stands in this store's way."""
    if number(stats, "failing_puts"):
        return f"{number(stats, 'failing_puts'):.0f} puts failed"
    health = stats.get("health") or {}
    places = [*(health.get("places") or {}).values(), *(health.get("writers") or {}).values()]
    states = {str(health.get(call, "closed")) for call in ("asking", "putting")}
    states |= {str(place.get("state")) for place in places}
    for state in ("open", "stalled", "half-open"):
        if state in states:
            return "a place stalls" if state == "stalled" else f"breaker {state}"
    if number(stats, "quarantined"):
        return f"{number(stats, 'quarantined'):.0f} damaged"
    return "ok" if stats.get("direct", True) else "ok, buffered"


def _causes(misses: dict[str, int]) -> str:
    worst = sorted(misses.items(), key=lambda item: -item[1])[:_CAUSES_SHOWN]
    return ", ".join(f"{count} {cause}" for cause, count in worst)


def _hits(stats: Any) -> str:
    """Pages that gets delivered, of all that were asked for."""
    delivered, missed = number(stats, "gets"), number(stats, "get_misses")
    return f"{delivered / (delivered + missed):.0%}" if delivered + missed else "-"


def _latency(value_s: float) -> str:
    if value_s == 0:
        return "-"
    return (
        f"{value_s * 1e6:.0f} us"
        if value_s < 1e-3
        else f"{value_s * 1e3:.1f} ms"
        if value_s < 1
        else f"{value_s:.2f} s"
    )
