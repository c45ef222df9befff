"""``curvfs bench``: fio's job files, or the same as options, and the report."""

from __future__ import annotations

import importlib
import json
import os
import shutil
import tempfile
from pathlib import Path
from typing import Annotated, Any
from urllib.parse import unquote, urlsplit

import typer

from curvfs.errors import UsageError
from curvfs.world import World
from tools.bench.fio import fio_words, our_speeds, ratios, run_fio, speeds
from tools.bench.jobfile import Job, jobs_from_words, read_job_files
from tools.bench.options import options_text
from tools.bench.plot import png_plot, terminal_plot
from tools.bench.report import fio_report
from tools.bench.runner import Run, run_jobs
from tools.bench.text import text_report
from tools.outfile import write_result
from tools.plots import check_png
from tools.progress import ProgressLine

EXIT_FAILED = 1
EXIT_INTERRUPTED = 130


def register(app: typer.Typer) -> None:
    """Add the command to the command line."""
    app.command(context_settings={"ignore_unknown_options": True})(bench)


def bench(
    words: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[JOBFILE...] [--OPTION=VALUE...]",
            help="Job files in fio's format, or a job as options: --name=a --rw=randread --size=1g --directory=/mnt.",
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print fio's JSON in place of the text.")] = False,
    output: Annotated[
        str | None, typer.Option("--output", metavar="FILE", help="Write fio's JSON there as well.")
    ] = None,
    plot: Annotated[bool, typer.Option("--plot", help="Draw latencies and speed in the terminal.")] = False,
    png: Annotated[str | None, typer.Option("--png", metavar="FILE", help="Draw them into a picture.")] = None,
    compare: Annotated[
        bool, typer.Option("--compare", help="Run the real fio beside every job and print the ratio.")
    ] = False,
    compare_directory: Annotated[
        str | None,
        typer.Option("--compare-directory", metavar="DIR", help="Where fio's files are. Default: where the job's are."),
    ] = None,
    rounds: Annotated[int, typer.Option("--rounds", min=1, help="Rounds of --compare, ours and fio's by turns.")] = 1,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Show no progress.")] = False,
    options: Annotated[bool, typer.Option("--options", help="List the options of a job and exit.")] = False,
) -> int:
    """Measure a directory, a Curvine pool through the native client, or the KV store.

    Exit code 1 when a job failed or what was read was not what was written, 130 after Ctrl-C, with what was measured.
    """
    if options:
        typer.echo(options_text())
        return 0
    jobs = _jobs(words or [])
    if any(job["ioengine"] == "kvstore" for job in jobs):
        importlib.import_module("kvstore")  # says which package it lacks, before any process is started
    world = World.real()
    if png is not None:
        check_png(png, world)
    if compare:
        return _compare(jobs, compare_directory, rounds, world, as_json=as_json, output=output, quiet=quiet)
    with ProgressLine(world, wanted=not quiet) as progress:
        run = run_jobs(jobs, world, progress)
    _show(run, jobs, world, as_json=as_json, output=output)
    if plot:
        typer.echo(terminal_plot(run), err=as_json)
    if png is not None:
        png_plot(run, png)
    return _exit_code(run)


def _jobs(words: list[str]) -> list[Job]:
    files = [word for word in words if not word.startswith("--")]
    flags = [word for word in words if word.startswith("--")]
    bare = next((flag for flag in flags if "=" not in flag), None)
    if files and bare is not None:
        raise UsageError(f"Write {bare}=VALUE in one word; {bare} {files[0]} would be an option and a job file.")
    if files and flags:
        raise UsageError(f"Give job files or a job as options, not both; {flags[0]} belongs into {files[0]}.")
    if not words:
        raise UsageError("Give a job file, or a job as options such as --rw=read --size=1g --directory=DIR.")
    return read_job_files(files, World.real().disk) if files else jobs_from_words(flags)


def _show(run: Run, jobs: list[Job], world: World, *, as_json: bool, output: str | None, **more: Any) -> None:
    report = fio_report(run, jobs, world)
    report["curvfs"] |= more
    if output is not None:
        try:
            write_result(world, output, json.dumps(report, indent=2).encode())
        except OSError as error:
            raise UsageError(f"The report {output} cannot be written: {error.strerror}.") from error
    typer.echo(json.dumps(report, indent=2) if as_json else text_report(run))


def _exit_code(run: Run) -> int:
    if run.interrupted:
        return EXIT_INTERRUPTED
    return EXIT_FAILED if run.failed is not None else 0


def _compare(
    jobs: list[Job], directory: str | None, rounds: int, world: World, *, as_json: bool, output: str | None, quiet: bool
) -> int:
    """Each job beside fio, by turns, so that what else the machine does strikes both."""
    places = [_place(job, directory) for job in jobs]
    for job, place in zip(jobs, places, strict=True):
        fio_words(job, place)  # says what cannot be compared before anything runs
    run = Run()
    compared: dict[str, Any] = {}
    lines = []
    rounds_run = 0
    with ProgressLine(world, wanted=not quiet) as progress:
        for job, place in zip(jobs, places, strict=True):
            found = []
            for _ in range(rounds):
                try:
                    theirs = _with_files(job, place)
                except KeyboardInterrupt:  # in fio: what the rounds before it gave is shown
                    run.interrupted = True
                    break
                once = run_jobs([job], world, progress)
                found.append((our_speeds(once, job), theirs))
                for outcome in once.outcomes:
                    outcome.group = rounds_run
                rounds_run += 1
                run.outcomes += once.outcomes
                run.interrupted = run.interrupted or once.interrupted
                if run.interrupted or once.failed is not None:
                    break
            compared[job.name] = ratios(found)
            for side, ratio in compared[job.name].items():
                lines.append(
                    f"{job.name} {side}: {ratio['ratio']:.2f} x fio ({ratio['least']:.2f} to {ratio['most']:.2f} in "
                    f"{ratio['rounds']} rounds; {ratio['curvfs_bytes_per_s'] / 1e6:.0f} and "
                    f"{ratio['fio_bytes_per_s'] / 1e6:.0f} MB/s)"
                )
            if run.interrupted:
                break
    _show(run, jobs, world, as_json=as_json, output=output, compared=compared)
    if not as_json:
        typer.echo("\n" + "\n".join(lines))
    return _exit_code(run)


def _place(job: Job, directory: str | None) -> Path:
    if directory is not None:
        return Path(directory)
    if job["ioengine"] == "mount":
        return Path(job["directory"] or os.path.dirname(job["filename"].split(":")[0]) or ".")
    if job["url"].startswith("file://"):
        return Path(unquote(urlsplit(job["url"]).path))
    raise UsageError(f"--compare: say with --compare-directory where fio's files for job {job.name} shall be.")


def _with_files(job: Job, place: Path) -> dict[str, float]:
    """fio's speeds, in a directory that is gone afterwards."""
    if not place.is_dir():
        raise UsageError(f"--compare: {place} is not a directory; name one with --compare-directory.")
    own = Path(tempfile.mkdtemp(prefix=".curvfs-bench-fio-", dir=place))
    try:
        return speeds(run_fio(fio_words(job, own)))
    finally:
        shutil.rmtree(own, ignore_errors=True)
