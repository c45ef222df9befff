"""Pictures of a run: PNG by matplotlib, and bars for a terminal."""

from __future__ import annotations

from collections.abc import Iterator

from curvfs.errors import UsageError
from curvfs.units import MIB
from tools.bench.latency import Latency
from tools.bench.report import per_second
from tools.bench.runner import Kind, Run

_BARS = " ▁▂▃▄▅▆▇█"
_WIDTH = 60
_PERCENTILES = (50.0, 75.0, 90.0, 95.0, 99.0, 99.5, 99.9, 99.95, 99.99, 99.999)


def _kinds(run: Run) -> Iterator[tuple[str, Kind, float]]:
    for outcome in run.outcomes:
        for name, kind in outcome.kinds.items():
            if kind.ios:
                yield f"{outcome.job.name} {name}", kind, outcome.runtime_ms / 1000


def terminal_plot(run: Run) -> str:
    """For every kind of call how many took how long, and the speed over time."""
    lines = []
    for name, kind, seconds in _kinds(run):
        lines.append(f"{name}: latency")
        lines += _histogram(kind.latency)
        speeds = per_second(kind, 0, seconds)
        if len(speeds) > 1 and max(speeds) > 0:
            lines.append(f"{name}: speed over {seconds:.1f} s, up to {max(speeds) / MIB:.0f} MiB/s")
            lines.append(f"  {_sparkline(speeds)}")
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


def _sparkline(values: list[float]) -> str:
    if len(values) > _WIDTH:
        step = len(values) / _WIDTH
        values = [max(values[int(at * step) : max(int(at * step) + 1, int((at + 1) * step))]) for at in range(_WIDTH)]
    return "".join(_BARS[round(value / max(values) * (len(_BARS) - 1))] for value in values)


def png_plot(run: Run, path: str) -> None:
    """Latency by percentile, and speed over time. Raises UsageError when the file cannot be written."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(11, 4.2), layout="constrained")
    for name, kind, seconds in _kinds(run):
        percentiles = [percent for percent in _PERCENTILES if kind.ios * (100 - percent) >= 100 or percent == 50]
        left.plot(
            [1 / (1 - percent / 100) for percent in percentiles],
            [kind.latency.percentile_ns(percent) / 1e6 for percent in percentiles],
            "o-",
            label=name,
        )
        speeds = per_second(kind, 0, seconds)
        if len(speeds) > 1:
            right.plot([index / 2 for index in range(len(speeds))], [speed / MIB for speed in speeds], label=name)
    left.set(xscale="log", yscale="log", xlabel="percentile", ylabel="latency (ms)", title="latency")
    ticks = (50.0, 90.0, 99.0, 99.9, 99.99)
    left.set_xticks([1 / (1 - percent / 100) for percent in ticks], [f"{percent:g}" for percent in ticks])
    left.minorticks_off()
    right.set(xlabel="time (s)", ylabel="MiB/s", title="speed")
    right.set_ylim(bottom=0)
    for axes in (left, right):
        axes.grid(alpha=0.3)
        if axes.lines:
            axes.legend()
    try:
        figure.savefig(path, dpi=120)
    except (OSError, ValueError) as error:
        raise UsageError(f"The picture {path} cannot be written: {error}.") from error
    finally:
        pyplot.close(figure)
