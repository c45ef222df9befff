"""A run in the shape of fio's JSON, so that what reads fio's output reads ours. What fio does not have is under the key
``curvfs`` of each job."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

import curvfs
from curvfs.world import World
from tools.bench.child import BUCKET_S
from tools.bench.jobfile import Job
from tools.bench.latency import Latency, fio_bins
from tools.bench.runner import Kind, Outcome, Run

_SIDES = ("read", "write", "trim")
_DEPTHS = ("0", "4", "8", "16", "32", "64", ">=64")


def fio_report(run: Run, jobs: Sequence[Job], world: World) -> dict[str, Any]:
    """The whole report as fio's JSON has it."""
    now_ms = world.clock.time_ms()
    return {
        "fio version": f"curvfs-{curvfs.__version__}",
        "timestamp": now_ms // 1000,
        "timestamp_ms": now_ms,
        "time": _time_text(now_ms),
        "global options": dict(jobs[0].global_given) if jobs else {},
        "jobs": [_job(outcome) for outcome in run.outcomes],
        "disk_util": [],
        "curvfs": {"version": curvfs.__version__, "interrupted": run.interrupted},
    }


def _time_text(now_ms: int) -> str:
    return datetime.fromtimestamp(now_ms / 1000, UTC).strftime("%a %b %d %H:%M:%S %Y")


def _job(outcome: Outcome) -> dict[str, Any]:
    percentiles = outcome.job["percentile_list"]
    record: dict[str, Any] = {
        "jobname": outcome.job.name,
        "groupid": outcome.group,
        "error": outcome.error,
        "eta": 0,
        "elapsed": max(1, round(outcome.runtime_ms / 1000)),
        "job options": _options(outcome.job),
    }
    for side in _SIDES:
        record[side] = _side(outcome.kinds.get(side, Kind()), outcome.runtime_ms, percentiles)
    measured = [kind.service for name, kind in outcome.kinds.items() if name in _SIDES]
    record |= {
        "sync": {"total_ios": 0, "lat_ns": Latency().fio()},
        "job_runtime": outcome.runtime_ms * max(1, len(outcome.pids)),
        "usr_cpu": round(outcome.usr_cpu, 6),
        "sys_cpu": round(outcome.sys_cpu, 6),
        "ctx": outcome.ctx,
        "majf": outcome.majf,
        "minf": outcome.minf,
        "iodepth_level": outcome.iodepth_level,
        "iodepth_submit": _single_calls(),
        "iodepth_complete": _single_calls(),
        **fio_bins(measured),
        "latency_depth": outcome.job["iodepth"],
        "latency_target": 0,
        "latency_percentile": 100.0,
        "latency_window": 0,
        "curvfs": {
            "engine": outcome.job["ioengine"],
            "rw": outcome.job["rw"],
            "direct": outcome.proofs,
            "verified_blocks": outcome.verified_blocks,
            "message": outcome.message,
            **{
                name: _side(kind, outcome.runtime_ms, percentiles)
                for name, kind in outcome.kinds.items()
                if name not in _SIDES
            },
            "pages_hit": outcome.kinds["lookup"].bytes if outcome.job.requests and "lookup" in outcome.kinds else None,
        },
    }
    return record


def _options(job: Job) -> dict[str, str]:
    """The options of a job as they were written; those that readers of fio's JSON look for are always there."""
    shown = dict(job.given)
    for name in ("rw", "bs", "iodepth", "numjobs"):
        if name not in shown:
            shown[name] = job.global_given.get(name) or _text(job, name)
    return shown


def _text(job: Job, name: str) -> str:
    value = job[name]
    return str(value[0]) if isinstance(value, tuple) else str(value)


def _single_calls() -> dict[str, float]:
    """Every call is handed over alone, and comes back alone."""
    return {depth: 100.0 if depth == "4" else 0.0 for depth in _DEPTHS}


def _side(kind: Kind, runtime_ms: int, percentiles: Sequence[float]) -> dict[str, Any]:
    seconds = runtime_ms / 1000
    speeds = per_second(kind, 0, seconds)
    calls = per_second(kind, 1, seconds)
    kib = [speed / 1024 for speed in speeds]
    idle = not kind.ios
    return {
        "io_bytes": kind.bytes,
        "io_kbytes": kind.bytes // 1024,
        "bw_bytes": 0 if idle else round(kind.bytes / seconds),
        "bw": 0 if idle else round(kind.bytes / seconds / 1024),
        "iops": 0.0 if idle else round(kind.ios / seconds, 6),
        "runtime": 0 if idle else runtime_ms,
        "total_ios": kind.ios,
        "short_ios": 0,
        "drop_ios": 0,
        "slat_ns": Latency().fio(),
        "clat_ns": kind.service.fio(percentiles),
        "lat_ns": kind.latency.fio(percentiles),
        "bw_min": round(min(kib, default=0)),
        "bw_max": round(max(kib, default=0)),
        "bw_agg": 100.0 if kib else 0.0,
        "bw_mean": round(statistics.fmean(kib), 6) if kib else 0.0,
        "bw_dev": round(statistics.pstdev(kib), 6) if kib else 0.0,
        "bw_samples": len(kib),
        "iops_min": round(min(calls, default=0)),
        "iops_max": round(max(calls, default=0)),
        "iops_mean": round(statistics.fmean(calls), 6) if calls else 0.0,
        "iops_stddev": round(statistics.pstdev(calls), 6) if calls else 0.0,
        "iops_samples": len(calls),
    }


def per_second(kind: Kind, which: int, seconds: float) -> list[float]:
    """Bytes (``which`` 0) or calls (1) per second in every whole half-second of the run."""
    whole = int(seconds / BUCKET_S)
    return [kind.buckets.get(number, (0, 0))[which] / BUCKET_S for number in range(whole)] if kind.ios else []
