"""The ``curvfs size`` command: options in, a report as text, JSON and plots out."""

from __future__ import annotations

import json
from statistics import fmean
from typing import Annotated, Any

import typer

from curvfs.errors import UsageError
from curvfs.units import GIB, KIB, format_size
from curvfs.world import World
from tools.jsonoption import Json
from tools.plots import Line, draw_png, draw_terminal
from tools.progress import ProgressLine
from tools.size import estimate
from tools.size.estimate import Hardware, Load, Pages
from tools.size.models import MODELS, Model, find_model
from tools.traces import Request, Reuse, read_trace

_GB = 10**9
#: Points of the curve of hit rate against capacity.
_CURVE_POINTS = 48

_HARDWARE, _LOAD = "Hardware", "Load"


def register(app: typer.Typer) -> None:
    """Add the command to the command line."""
    app.command()(size)


def size(
    model: Annotated[
        str | None, typer.Option(metavar="NAME|FILE", help="A built-in model, or the path of a config.json.")
    ] = None,
    kv_dtype: Annotated[
        str | None, typer.Option(metavar="TYPE", help="Number format of keys and values. Default: the model's.")
    ] = None,
    tp: Annotated[int, typer.Option(help="Tensor-parallel ranks.")] = 1,
    page_tokens: Annotated[int, typer.Option(help="Tokens of one stored page.")] = 64,
    list_models: Annotated[bool, typer.Option("--list-models", help="Print the built-in models and exit.")] = False,
    nodes: Annotated[int, typer.Option(help="Nodes with drives.", rich_help_panel=_HARDWARE)] = 1,
    nvme_gb: Annotated[
        float | None, typer.Option(help="Drive space of a node, GB (10^9 bytes).", rich_help_panel=_HARDWARE)
    ] = None,
    nvme_read_gb_s: Annotated[
        float | None, typer.Option(help="Read rate of a node's drives, GB/s.", rich_help_panel=_HARDWARE)
    ] = None,
    nvme_write_gb_s: Annotated[
        float | None, typer.Option(help="Write rate of a node's drives, GB/s.", rich_help_panel=_HARDWARE)
    ] = None,
    network_gbit_s: Annotated[
        float | None, typer.Option(help="Network of a node and of a replica, Gbit/s.", rich_help_panel=_HARDWARE)
    ] = None,
    prefill_tokens_s: Annotated[
        float | None, typer.Option(help="Tokens a replica prefills per second.", rich_help_panel=_HARDWARE)
    ] = None,
    latency_ms: Annotated[
        float, typer.Option(help="Of a lookup and the first bytes, ms.", rich_help_panel=_HARDWARE)
    ] = 5.0,
    fill: Annotated[
        float, typer.Option(help="Part of the space in use before eviction begins.", rich_help_panel=_HARDWARE)
    ] = 0.9,
    copies: Annotated[int, typer.Option(help="Replicas of each object in the pool.", rich_help_panel=_HARDWARE)] = 1,
    trace: Annotated[
        str | None, typer.Option(metavar="FILE", help="Requests as JSON lines (Mooncake).", rich_help_panel=_LOAD)
    ] = None,
    trace_block_tokens: Annotated[
        int, typer.Option(help="Tokens of a block of the trace.", rich_help_panel=_LOAD)
    ] = 512,
    at_blocks: Annotated[
        list[int] | None,
        typer.Option(help="A capacity that the curve shall have, in blocks; several times.", rich_help_panel=_LOAD),
    ] = None,
    rate: Annotated[
        float, typer.Option(help="How many times faster than in the trace requests come.", rich_help_panel=_LOAD)
    ] = 1.0,
    context_tokens: Annotated[
        int | None, typer.Option(help="Without a trace: tokens of a prompt.", rich_help_panel=_LOAD)
    ] = None,
    shared_tokens: Annotated[int, typer.Option(help="... of which the pool has so many.", rich_help_panel=_LOAD)] = 0,
    requests_per_s: Annotated[
        float | None, typer.Option(help="... and how many prompts come per second.", rich_help_panel=_LOAD)
    ] = None,
    plot: Annotated[
        str | None, typer.Option(metavar="FILE.png", help="Draw hit rate against capacity (needs --trace).")
    ] = None,
    as_json: Json = False,
) -> None:
    """What a model's KV cache needs, what a pool holds and saves, and what wears out."""
    if list_models:
        typer.echo(json.dumps([_described(known) for known in MODELS.values()]) if as_json else _models_table())
        return
    if model is None:
        raise UsageError("No model is named; give --model NAME, or the path of a config.json (see --list-models).")
    if trace and context_tokens is not None:
        raise UsageError("--trace and --context-tokens both describe the load; give one of them.")
    if plot and not trace:
        raise UsageError("--plot draws hit rate against capacity, which needs a load: give --trace too.")
    _positive(
        tp=tp,
        page_tokens=page_tokens,
        nodes=nodes,
        copies=copies,
        nvme_gb=nvme_gb,
        nvme_read_gb_s=nvme_read_gb_s,
        nvme_write_gb_s=nvme_write_gb_s,
        network_gbit_s=network_gbit_s,
        prefill_tokens_s=prefill_tokens_s,
        trace_block_tokens=trace_block_tokens,
        rate=rate,
        context_tokens=context_tokens,
        requests_per_s=requests_per_s,
        at_blocks=min(at_blocks) if at_blocks else None,
    )
    if not 0 < fill <= 1 or latency_ms < 0:
        raise UsageError("--fill is a part of the space, above 0 and at most 1, and --latency-ms is 0 or more.")
    if shared_tokens < 0 or (shared_tokens and (context_tokens is None or shared_tokens > context_tokens)):
        raise UsageError("--shared-tokens is a part of --context-tokens; give both, the first not above the second.")
    world = World.real()
    found = find_model(model, world)
    found = found.stored_as(kv_dtype) if kv_dtype else found
    pages = Pages.of(found, page_tokens, tp)
    hardware = Hardware(
        nodes=nodes,
        node_bytes=None if nvme_gb is None else int(nvme_gb * _GB),
        read_bytes_per_s=_scaled(nvme_read_gb_s, _GB),
        write_bytes_per_s=_scaled(nvme_write_gb_s, _GB),
        network_bytes_per_s=_scaled(network_gbit_s, _GB / 8),
        prefill_tokens_per_s=prefill_tokens_s,
        latency_s=latency_ms / 1000,
        fill=fill,
        copies=copies,
    )
    report = _described(found) | _page_section(pages) | _capacity_section(pages, hardware, context_tokens)
    report |= _break_even_section(pages, hardware)
    line = None
    if trace:
        requests = read_trace(trace, world)
        trace_bytes = world.disk.stat(trace).st_size
        with ProgressLine(world, wanted=not as_json) as progress:
            reuse = Reuse(requests, lambda part: progress(part, int(part * trace_bytes), "counting repeated blocks"))
        report |= _trace_section(requests, reuse, pages, hardware, trace_block_tokens, rate, at_blocks or [])
        line = _curve_line(report["trace"]["curve"])
    elif context_tokens is not None:
        report |= _load_section(Load(0.0, context_tokens, shared_tokens), requests_per_s, pages, hardware)
    if plot and line:
        draw_png(plot, line, title=f"{found.name}: {trace}")
    if as_json:
        typer.echo(json.dumps(report, indent=2))
        return
    typer.echo(_text(report))
    if line:
        typer.echo(draw_terminal(line))


def _positive(**numbers: float | None) -> None:
    for name, number in numbers.items():
        if number is not None and not 0 < number < 1e18:
            raise UsageError(f"--{name.replace('_', '-')} is {number:g}; give a number above 0.")


def _scaled(value: float | None, unit: float) -> float | None:
    return None if value is None else value * unit


# ------------------------------------------------------------------------------------------------------- sections


def _described(model: Model) -> dict[str, Any]:
    return {
        "model": model.name,
        "kind": model.kind,
        "layers": model.layers,
        "window_layers": model.window_layers,
        "kv_heads": model.kv_heads,
        "head_dim": model.head_dim,
        "dtype": model.dtype,
        "bytes_per_token": model.bytes_per_token,
    }


def _page_section(pages: Pages) -> dict[str, Any]:
    return {
        "bytes_per_token_per_rank": pages.rank_bytes_per_token,
        "stored_bytes_per_token": pages.stored_bytes_per_token,
        "page_tokens": pages.page_tokens,
        "page_bytes": pages.page_bytes,
        "object_bytes": pages.object_bytes,
        "objects_per_page": pages.objects_per_page,
    }


def _capacity_section(pages: Pages, hardware: Hardware, context_tokens: int | None) -> dict[str, Any]:
    if hardware.capacity_bytes is None:
        return {"capacity_bytes": None, "tokens_that_fit": None, "users_that_fit": None}
    stored = hardware.capacity_bytes // (pages.object_bytes * pages.objects_per_page)
    tokens = stored * pages.page_tokens
    return {
        "capacity_bytes": hardware.capacity_bytes,
        "tokens_that_fit": tokens,
        "users_that_fit": None if context_tokens is None else tokens // context_tokens,
    }


def _break_even_section(pages: Pages, hardware: Hardware) -> dict[str, Any]:
    gain_s = estimate.gain_s_per_token(pages, hardware)
    prefill = hardware.prefill_tokens_per_s
    return {
        "load_bytes_per_s": hardware.load_bytes_per_s,
        "recompute_bytes_per_s": None if prefill is None else prefill * pages.stored_bytes_per_token,
        "break_even_tokens": estimate.break_even_tokens(pages, hardware),
        "loading_pays": None if gain_s is None else gain_s > 0,
    }


def _trace_section(
    requests: list[Request],
    reuse: Reuse,
    pages: Pages,
    hardware: Hardware,
    block_tokens: int,
    rate: float,
    at_blocks: list[int],
) -> dict[str, Any]:
    block_bytes = block_tokens * pages.stored_bytes_per_token
    whole = hardware.capacity_bytes is None
    blocks = reuse.distinct_blocks if hardware.capacity_bytes is None else int(hardware.capacity_bytes // block_bytes)
    loads = estimate.trace_load(requests, reuse, blocks, block_tokens)
    duration_s = max(loads[-1].time_s - loads[0].time_s, 1.0)
    even = (max(1, round(reuse.distinct_blocks * 2 ** (-point / 4))) for point in range(_CURVE_POINTS))
    capacities = sorted({*even, *at_blocks})
    needs = estimate.traffic(loads, pages, duration_s, rate=rate)
    section = {
        "requests": len(requests),
        "blocks": reuse.blocks,
        "distinct_blocks": reuse.distinct_blocks,
        "duration_s": duration_s,
        "capacity_blocks": blocks,
        "capacity_is_unbounded": whole,
        "hits": reuse.hits(blocks),
        "hit_rate": reuse.hit_rate(blocks),
        "best_hit_rate": reuse.hit_rate(reuse.distinct_blocks),
        "curve": [
            {
                "capacity_blocks": capacity,
                "capacity_bytes": int(capacity * block_bytes),
                "hits": reuse.hits(capacity),
                "hit_rate": reuse.hit_rate(capacity),
            }
            for capacity in capacities
        ],
    }
    report: dict[str, Any] = {"trace": section}
    if not whole:
        mean_tokens = fmean(max(1, load.input_tokens) for load in loads)
        report["users_that_fit"] = int(blocks * block_tokens / mean_tokens)
    return report | _ttft_section(loads, pages, hardware) | _traffic_section(needs, hardware)


def _load_section(load: Load, requests_per_s: float | None, pages: Pages, hardware: Hardware) -> dict[str, Any]:
    found = _ttft_section([load], pages, hardware)
    if requests_per_s is not None:
        needs = estimate.traffic([load], pages, 1 / requests_per_s)
        found |= _traffic_section(needs, hardware)
    return found


def _ttft_section(loads: list[Load], pages: Pages, hardware: Hardware) -> dict[str, Any]:
    times = [pair for load in loads if (pair := estimate.ttft_s(load, pages, hardware)) is not None]
    if not times:
        return {"ttft": None}
    cold, shared = zip(*times, strict=True)
    return {"ttft": {"cold": estimate.quantiles(cold), "shared": estimate.quantiles(shared)}}


def _traffic_section(needs: dict[str, float], hardware: Hardware) -> dict[str, Any]:
    return {
        "traffic": needs,
        "wear": estimate.wear(needs["write_bytes_per_s"], hardware),
        "headroom": estimate.headroom(needs, hardware),
    }


# ------------------------------------------------------------------------------------------------------- text


def _models_table() -> str:
    return "\n".join(
        f"{model.name:18} {model.kind:4} {model.layers:3} layers  {model.bytes_per_token:9,} bytes/token  {model.dtype}"
        for model in MODELS.values()
    )


def _curve_line(curve: list[dict[str, Any]]) -> Line:
    return Line(
        x=[point["capacity_bytes"] / GIB for point in curve],
        y=[100 * point["hit_rate"] for point in curve],
        x_label="capacity, GiB",
        y_label="hit rate, %",
        log_x=True,
    )


def _text(report: dict[str, Any]) -> str:
    rows = [
        ("Model", f"{report['model']} ({report['kind']}, {report['layers']} layers, {report['dtype']})"),
        ("KV of one token", f"{report['bytes_per_token']:,} bytes; as stored {report['stored_bytes_per_token']:,.0f}"),
        (
            "One page",
            f"{report['page_tokens']} tokens in {report['objects_per_page']} object(s) of "
            f"{format_size(report['object_bytes'])}",
        ),
    ]
    if report["window_layers"]:
        rows.append(("", f"{report['window_layers']} layers look at a window only; they are stored like the others"))
    if report["tokens_that_fit"] is not None:
        rows.append(("That fit", f"{report['tokens_that_fit']:,} tokens in {format_size(report['capacity_bytes'])}"))
    if report["users_that_fit"] is not None:
        rows.append(("", f"{report['users_that_fit']:,} users with the context of the load"))
    rows += _break_even_rows(report)
    if "trace" in report:
        rows += _trace_rows(report["trace"])
    for name, times in (report.get("ttft") or {}).items():
        shown = ", ".join(f"{key.removesuffix('_s')} {value:.3f} s" for key, value in times.items())
        rows.append(("First token, cold" if name == "cold" else "... with the pool", shown))
    rows += _traffic_rows(report)
    return "\n".join(f"{title:18} {text}" for title, text in rows)


def _break_even_rows(report: dict[str, Any]) -> list[tuple[str, str]]:
    if report["loading_pays"] is None:
        return [("Break-even", "give --prefill-tokens-s, and --nvme-read-gb-s or --network-gbit-s, to know it")]
    if not report["loading_pays"]:
        needed = report["recompute_bytes_per_s"] / _GB
        return [("Break-even", f"never: computing is faster; a replica would have to read above {needed:.2f} GB/s")]
    return [("Break-even", f"prefixes above {report['break_even_tokens']:,} tokens are faster loaded than computed")]


def _trace_rows(trace: dict[str, Any]) -> list[tuple[str, str]]:
    room = "no bound" if trace["capacity_is_unbounded"] else f"{trace['capacity_blocks']:,} blocks"
    return [
        ("Trace", f"{trace['requests']:,} requests, {trace['blocks']:,} blocks, {trace['distinct_blocks']:,} distinct"),
        ("Hit rate", f"{trace['hit_rate']:.1%} with {room}; {trace['best_hit_rate']:.1%} if all were kept"),
    ]


def _traffic_rows(report: dict[str, Any]) -> list[tuple[str, str]]:
    if "traffic" not in report:
        return []
    needs = report["traffic"]
    rows = [
        (
            "From the pool",
            f"{_rate(needs['read_bytes_per_s'])}, busiest minute {_rate(needs['peak_read_bytes_per_s'])}",
        ),
        (
            "To the pool",
            f"{_rate(needs['write_bytes_per_s'])}, busiest minute {_rate(needs['peak_write_bytes_per_s'])}",
        ),
    ]
    if report["wear"] is not None:
        wear = report["wear"]
        written = format_size(wear["written_bytes_per_day"])
        rows.append(("Wear", f"{written} a day, {wear['dwpd']:.2f} drive writes per day"))
    for name, factor in report["headroom"].items():
        verdict = "enough" if factor >= 1 else "too little"
        rows.append((f"Room: {name.replace('_', ' ')}", f"{factor:.1f} times the busiest minute, {verdict}"))
    return rows


def _rate(bytes_per_s: float) -> str:
    return f"{bytes_per_s / KIB:.1f} KiB/s" if bytes_per_s < KIB * KIB else f"{format_size(bytes_per_s)}/s"
