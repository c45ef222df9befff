"""A run for people, laid out as fio lays it out."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from curvfs.units import GIB, KIB, MIB
from tools.bench.latency import Latency, fio_bins
from tools.bench.report import per_second
from tools.bench.runner import Kind, Outcome, Run

_NAMES = {"read": "read", "write": "write", "lookup": "lookup", "request": "request"}


def text_report(run: Run) -> str:
    """All of a run."""
    lines: list[str] = []
    if run.interrupted:
        lines.append("Interrupted: what follows is what was measured up to then.\n")
    for outcome in run.outcomes:
        lines += [*_outcome(outcome), ""]
    for group in sorted({outcome.group for outcome in run.outcomes}):
        lines += _group(group, [outcome for outcome in run.outcomes if outcome.group == group])
    return "\n".join(lines).rstrip()


def _outcome(outcome: Outcome) -> Iterable[str]:
    job = outcome.job
    pids = ",".join(map(str, outcome.pids))
    yield (
        f"{job.name}: (groupid={outcome.group}, jobs={len(outcome.pids)}): err= {outcome.error}: pid={pids}: "
        f"engine={job['ioengine']}, rw={job['rw']}, iodepth={job['iodepth']}"
    )
    if outcome.message:
        yield f"  error: {outcome.message}"
    for name in _NAMES:
        kind = outcome.kinds.get(name)
        if kind is not None and kind.ios:
            yield from _kind(name, kind, outcome)
    bins = fio_bins([kind.service for name, kind in outcome.kinds.items() if name in ("read", "write")])
    for unit, name in (("nsec", "latency_ns"), ("usec", "latency_us"), ("msec", "latency_ms")):
        shown = ", ".join(f"{bound}={share:.2f}%" for bound, share in bins[name].items() if share > 0)
        if shown:
            yield f"  lat ({unit})   : {shown}"
    yield (
        f"  cpu          : usr={outcome.usr_cpu:.2f}%, sys={outcome.sys_cpu:.2f}%, ctx={outcome.ctx}, "
        f"majf={outcome.majf}, minf={outcome.minf}{_cpu_per_gib(outcome)}"
    )
    depths = ", ".join(f"{depth}={share:.1f}%" for depth, share in outcome.iodepth_level.items())
    yield f"  IO depths    : {depths}"
    counts = ",".join(str(outcome.kinds[name].ios) if name in outcome.kinds else "0" for name in ("read", "write"))
    yield f"     issued rwts: total={counts},0,0 short=0,0,0,0 dropped=0,0,0,0"
    if job["verify"]:
        checked = outcome.kinds["read"].ios if "read" in outcome.kinds else 0
        yield f"  verify       : {job['verify']}: {checked} blocks checked, {outcome.verified_blocks} read back too"
    for proof in outcome.proofs:
        yield f"  direct I/O   : {_proof(proof)}"


def _proof(proof: dict[str, Any]) -> str:
    sign = {True: "yes", False: "no", None: "not proven"}[proof["direct"]]
    parts = [f"{sign}: {proof['verdict']}"]
    if "page_cache_after_bytes" in proof:
        parts.append(
            f"page cache {_size(proof['page_cache_before_bytes'])} before, {_size(proof['page_cache_after_bytes'])}"
            f" after, of {_size(proof['files_bytes'])}"
        )
        parts.append(f"devices read {_size(proof['device_read_bytes'])}, written {_size(proof['device_write_bytes'])}")
    if proof.get("offset_alignment_bytes"):
        parts.append(f"alignment {proof['offset_alignment_bytes']} B")
    if "engine" in proof:
        parts.append(f"store engine {proof['engine']}")
    return "; ".join(parts)


def _kind(name: str, kind: Kind, outcome: Outcome) -> Iterable[str]:
    seconds = outcome.runtime_ms / 1000
    speed = kind.bytes / seconds
    rate = f"IOPS={_count(kind.ios / seconds)}"
    if name == "lookup":
        pages = f", {kind.bytes} of {_asked_pages(outcome)} pages found" if outcome.job.requests else ""
        yield f"  {name}: {rate} ({kind.ios} in {outcome.runtime_ms}msec){pages}"
    else:
        yield f"  {name}: {rate}, BW={_speed(speed)} ({_size(kind.bytes)}/{outcome.runtime_ms}msec)"
    given = any(outcome.job["rate"]) or any(outcome.job["rate_iops"]) or outcome.job["rw"] == "trace"
    timed = given and name != "lookup" and (name == "request" or not outcome.job.requests)
    yield from _latency("clat", kind.service, "")
    if timed:
        yield from _latency(" lat", kind.latency, ", from when it was due")
    shown = kind.latency if timed else kind.service
    unit, divisor = _unit(shown.percentile_ns(50))
    yield f"    {'lat' if timed else 'clat'} percentiles ({unit}):"
    found = [(percent, shown.percentile_ns(percent) / divisor) for percent in outcome.job["percentile_list"]]
    cells = [f"{percent:5.2f}th=[{value:5.0f}]" for percent, value in found]
    for first in range(0, len(cells), 4):
        yield f"     | {', '.join(cells[first : first + 4])}{',' if first + 4 < len(cells) else ''}"
    if name != "lookup" and (speeds := per_second(kind, 0, seconds)):
        calls = per_second(kind, 1, seconds)
        mean = sum(speeds) / len(speeds)
        yield (
            f"   bw (  KiB/s): min={min(speeds) / KIB:5.0f}, max={max(speeds) / KIB:5.0f}, avg={mean / KIB:.2f}, "
            f"samples={len(speeds)}"
        )
        yield (
            f"   iops        : min={min(calls):5.0f}, max={max(calls):5.0f}, avg={sum(calls) / len(calls):.2f}, "
            f"samples={len(calls)}"
        )


def _cpu_per_gib(outcome: Outcome) -> str:
    """Seconds of all CPUs for each GiB moved, by this end alone: a mount or a server has its own."""
    moved = sum(outcome.kinds[name].bytes for name in ("read", "write") if name in outcome.kinds)
    if moved < MIB:
        return ""
    seconds = (outcome.usr_cpu + outcome.sys_cpu) / 100 * outcome.runtime_ms / 1000 * len(outcome.pids)
    return f", {seconds / (moved / GIB):.2f} s/GiB"


def _asked_pages(outcome: Outcome) -> int:
    """Pages of all requests: what was not found was put."""
    moved = sum(outcome.kinds[name].bytes for name in ("read", "write") if name in outcome.kinds)
    return int(moved // outcome.job["bs"][0])


def _latency(name: str, latency: Latency, meaning: str) -> Iterable[str]:
    unit, divisor = _unit(round(latency.mean_ns))
    yield (
        f"    {name} ({unit}): min={latency.min_ns / divisor:.0f}, max={latency.max_ns / divisor:.0f}, "
        f"avg={latency.mean_ns / divisor:.2f}, stdev={latency.stddev_ns / divisor:.2f}{meaning}"
    )


def _unit(value_ns: int) -> tuple[str, float]:
    if value_ns < 10_000:
        return "nsec", 1.0
    return ("usec", 1e3) if value_ns < 10_000_000 else ("msec", 1e6)


def _count(value: float) -> str:
    return f"{value / 1000:.1f}k" if value >= 10_000 else f"{value:.0f}" if value >= 10 else f"{value:.2f}"


def _size(value: float) -> str:
    for unit, size in (("GiB", GIB), ("MiB", MIB), ("KiB", KIB)):
        if value >= size:
            return f"{value / size:.{1 if value < 100 * size else 0}f}{unit}"
    return f"{value:.0f}B"


def _speed(value: float) -> str:
    return f"{_size(value)}/s ({value / 1e6:.{1 if value < 1e8 else 0}f}MB/s)"


def _group(group: int, outcomes: Sequence[Outcome]) -> Iterable[str]:
    yield f"Run status group {group} (all jobs):"
    for name, shown in (("read", "READ"), ("write", "WRITE")):
        kinds = [(one.kinds[name], one.runtime_ms) for one in outcomes if name in one.kinds and one.kinds[name].ios]
        if not kinds:
            continue
        longest = max(runtime for _, runtime in kinds)
        shortest = min(runtime for _, runtime in kinds)
        total = sum(kind.bytes for kind, _ in kinds)
        each = [kind.bytes / runtime * 1000 for kind, runtime in kinds]
        yield (
            f"{shown:>8}: bw={_speed(total / longest * 1000)}, {_size(min(each))}/s-{_size(max(each))}/s, "
            f"io={_size(total)}, run={shortest}-{longest}msec"
        )
    yield ""
