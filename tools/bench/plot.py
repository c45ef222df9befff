"""Pictures of a run: PNG by matplotlib, and the same for a terminal."""

from __future__ import annotations

from collections.abc import Iterator

from curvfs.errors import EnvironmentError_
from curvfs.units import MIB
from tools.bench.child import BUCKET_S
from tools.bench.latency import Latency
from tools.bench.report import per_second
from tools.bench.runner import Kind, Run
from tools.plots import Line, draw_terminal

_WIDTH = 60
_PERCENTILES = (50.0, 75.0, 90.0, 95.0, 99.0, 99.5, 99.9, 99.95, 99.99, 99.999)
_TICKS = (50.0, 90.0, 99.0, 99.9, 99.99)


def _kinds(run: Run) -> Iterator[tuple[str, Kind, float]]:
    for outcome in run.outcomes:
        for name, kind in outcome.kinds.items():
            if kind.ios:
                yield f"{outcome.job.name} {name}", kind, outcome.runtime_ms / 1000


def _speeds(kind: Kind, seconds: float) -> tuple[list[float], list[float]]:
    """Times in seconds, and MiB/s."""
    speeds = [speed / MIB for speed in per_second(kind, 0, seconds)]
    return [number * BUCKET_S for number in range(len(speeds))], speeds


def terminal_plot(run: Run) -> str:
    """For every kind of call how many took how long, and the speed over time."""
    lines = []
    for name, kind, seconds in _kinds(run):
        lines += [f"{name}: latency and calls", *_histogram(kind.latency)]
        times_s, speeds = _speeds(kind, seconds)
        if len(speeds) > 1 and max(speeds) > 0:
            lines.append(draw_terminal(Line(times_s, speeds, "s", f"{name}: MiB/s"), width=_WIDTH, height=6))
    return "\n".join(lines)


def _histogram(latency: Latency) -> Iterator[str]:
    """One bar for each factor of two."""
    bins: dict[int, int] = {}
    for lower, _, count in latency.histogram.buckets():
        power = max(0, lower.bit_length() - 1)
        bins[power] = bins.get(power, 0) + count
    most = max(bins.values())
    for power in range(min(bins), max(bins) + 1):
        count = bins.get(power, 0)
        bar = "█" * round(count / most * _WIDTH) or ("▏" if count else "")
        yield f"  {_duration(1 << power):>8} {bar} {count or ''}"


def _duration(value_ns: int) -> str:
    for unit, size in (("s", 1_000_000_000), ("ms", 1_000_000), ("us", 1000)):
        if value_ns >= size:
            return f"{value_ns / size:.3g} {unit}"
    return f"{value_ns} ns"


def png_plot(run: Run, path: str) -> None:
    """Latency by percentile, and speed over time. Raises EnvironmentError_ when matplotlib is missing or the file
    cannot be written."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise EnvironmentError_(
            "A plot as PNG needs the package matplotlib, which is not installed: pip install 'curvfs[report]'."
        ) from error
    figure = Figure(figsize=(11, 4.2), layout="constrained")
    left, right = figure.subplots(1, 2)
    for name, kind, seconds in _kinds(run):
        percentiles = [percent for percent in _PERCENTILES if percent == 50 or kind.ios * (100 - percent) >= 100]
        left.plot(
            [1 / (1 - percent / 100) for percent in percentiles],
            [kind.latency.percentile_ns(percent) / 1e6 for percent in percentiles],
            "o-",
            label=name,
        )
        times_s, speeds = _speeds(kind, seconds)
        if len(speeds) > 1:
            right.plot(times_s, speeds, label=name)
    left.set(xscale="log", yscale="log", xlabel="percentile", ylabel="latency (ms)", title="latency")
    left.set_xticks([1 / (1 - percent / 100) for percent in _TICKS], [f"{percent:g}" for percent in _TICKS])
    left.minorticks_off()
    right.set(xlabel="time (s)", ylabel="MiB/s", title="speed", ylim=(0, None))
    for axes in (left, right):
        axes.grid(alpha=0.3)
        if axes.lines:
            axes.legend()
    try:
        figure.savefig(path, format="png", dpi=120)
    except OSError as error:
        raise EnvironmentError_(f"The plot {path} cannot be written: {error.strerror or error}.") from error
