"""The real fio, run beside our own loads."""

from __future__ import annotations

import json
import statistics
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from curvfs.errors import EnvironmentError_, UsageError
from tools.bench.jobfile import Job
from tools.bench.runner import Outcome, Run
from tools.interrupts import Interrupts

_TIMEOUT_S = 3600.0
_POLL_S = 0.1
#: Options that fio has under the same name and with the same meaning.
_SHARED = (
    "rwmixread", "rwmixwrite", "bssplit", "io_size", "number_ios", "iodepth", "numjobs", "direct", "runtime",
    "time_based", "ramp_time", "startdelay", "loops", "rate", "rate_iops", "rate_process", "thinktime",
    "thinktime_blocks", "randseed", "random_distribution", "norandommap", "fsync", "end_fsync", "invalidate",
)  # fmt: skip
_COMPARABLE = {
    "kvput": "write",
    "kvget": "randread",
    "kvmix": "randrw",
}


def run_fio(words: Sequence[str]) -> dict[str, Any]:
    """fio's JSON report of one command line; for the main thread. Raises EnvironmentError_, and KeyboardInterrupt after
    Ctrl-C or SIGTERM, when fio has ended."""
    with Interrupts() as interrupts:
        try:
            process = subprocess.Popen(
                ["fio", *words, "--thread", "--output-format=json"],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                start_new_session=True,
            )
        except FileNotFoundError as error:
            raise EnvironmentError_("fio is not installed; install the package fio.") from error
        with process:
            try:
                out, said = _output(process, interrupts)
            finally:
                process.kill()  # with its jobs, which are threads of it
    if process.returncode != 0:
        raise EnvironmentError_(f"fio failed: {said.strip()[-300:]}")
    report: dict[str, Any] = json.loads(out[out.index("{") :])
    return report


def _output(process: subprocess.Popen[str], interrupts: Interrupts) -> tuple[str, str]:
    """What fio says on stdout and stderr until its end."""
    for _ in range(round(_TIMEOUT_S / _POLL_S)):
        try:
            return process.communicate(timeout=_POLL_S)
        except subprocess.TimeoutExpired:
            if interrupts.heard:
                raise KeyboardInterrupt from None
    raise EnvironmentError_(f"fio did not end within {_TIMEOUT_S:.0f} s.")


def fio_words(job: Job, directory: Path) -> list[str]:
    """The same load for fio, with files of its own below ``directory``: for the store one file for each object.

    Raises UsageError for a load that fio does not have."""
    rw = _COMPARABLE.get(job["rw"], job["rw"])
    if rw in ("prefix", "trace", "kvlookup"):
        raise UsageError(f"--compare: fio has nothing like rw={rw} of job {job.name}; leave that job out.")
    given = job.global_given | job.given
    words = [f"--name={job.name}", f"--rw={rw}", "--ioengine=io_uring", f"--directory={directory}", "--fallocate=none"]
    words += [f"--{name}={given[name] or 1}" for name in _SHARED if name in given]
    if "bssplit" not in given:
        words.append(f"--bs={','.join(str(size) for size in job['bs'] if size)}")
    if job["ioengine"] == "kvstore":
        size = job["bs"][0]
        count = max(1, job["size"] // size)
        words += [f"--filesize={size}", f"--nrfiles={count}", f"--size={size * count}"]
        words += ["--file_service_type=sequential", f"--openfiles={min(count, 512)}"]
    else:
        words += [f"--{name}={given[name]}" for name in ("size", "filesize", "nrfiles") if name in given]
    return [*words, "--group_reporting"]


def speeds(report: dict[str, Any]) -> dict[str, float]:
    """Bytes per second of a fio report, reads and writes."""
    return {side: float(sum(job[side]["bw_bytes"] for job in report["jobs"])) for side in ("read", "write")}


def our_speeds(run: Run, job: Job) -> dict[str, float]:
    """The same of the outcomes of one of our jobs."""

    def of(side: str) -> float:
        return sum(_speed(outcome, side) for outcome in run.outcomes if outcome.job is job)

    return {side: of(side) for side in ("read", "write")}


def _speed(outcome: Outcome, side: str) -> float:
    kind = outcome.kinds.get(side)
    return kind.bytes / outcome.runtime_ms * 1000 if kind is not None else 0.0


def ratios(rounds: Sequence[tuple[dict[str, float], dict[str, float]]]) -> dict[str, dict[str, float]]:
    """For reads and writes the median, smallest and largest of ours divided by fio's, and the median speeds."""
    found = {}
    for side in ("read", "write"):
        pairs = [(ours[side], theirs[side]) for ours, theirs in rounds if ours[side] and theirs[side]]
        if pairs:
            each = [ours / theirs for ours, theirs in pairs]
            found[side] = {
                "ratio": statistics.median(each),
                "least": min(each),
                "most": max(each),
                "curvfs_bytes_per_s": statistics.median(ours for ours, _ in pairs),
                "fio_bytes_per_s": statistics.median(theirs for _, theirs in pairs),
                "rounds": len(pairs),
            }
    return found
