"""Lines and bars, drawn in the terminal, and as PNG (package matplotlib, extra ``report``)."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from curvfs.errors import EnvironmentError_
from curvfs.world import World

#: Bits of a braille character by column and row of its dots.
_DOTS = ((0x01, 0x02, 0x04, 0x40), (0x08, 0x10, 0x20, 0x80))
_BRAILLE = 0x2800


@dataclass(frozen=True, slots=True)
class Line:
    """Points to draw; with ``log_x`` on a logarithmic axis."""

    x: Sequence[float]
    y: Sequence[float]
    x_label: str
    y_label: str
    log_x: bool = False


def draw_png(path: str, line: Line, *, title: str) -> None:
    """Write a PNG. Raises EnvironmentError_ when matplotlib is missing or the file cannot be written."""
    figure = _figure()
    axes = figure.subplots()
    axes.plot(line.x, line.y, marker=".")
    axes.set(title=title, xlabel=line.x_label, ylabel=line.y_label, ylim=(0, None))
    if line.log_x:
        axes.set_xscale("log")
    axes.grid(alpha=0.3)
    _write(figure, path)


def check_png(path: str, world: World) -> None:
    """Before long work that ends with a PNG: matplotlib is there, and so is the directory. Raises EnvironmentError_."""
    _figure()
    directory = os.path.dirname(path) or "."
    if not world.disk.exists(directory):
        raise EnvironmentError_(f"The plot {path} cannot be written: there is no directory {directory}.")


def _figure() -> Any:
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise EnvironmentError_(
            "A plot as PNG needs the package matplotlib, which is not installed: pip install 'curvfs[report]'."
        ) from error
    return Figure(figsize=(8, 4.5), layout="constrained")


def _write(figure: Any, path: str) -> None:
    try:
        figure.savefig(path, format="png")
    except OSError as error:
        raise EnvironmentError_(f"The plot {path} cannot be written: {error.strerror or error}.") from error


def draw_terminal(line: Line, *, width: int = 64, height: int = 12) -> str:
    """The line in braille dots, ``width`` by ``height`` characters without axes. The y axis begins at 0."""
    x = [math.log10(value) for value in line.x] if line.log_x else list(line.x)
    left, right, top = min(x), max(x), max(*line.y, 0.0) or 1.0
    columns, rows = 2 * width - 1, 4 * height - 1
    cells = [[0] * width for _ in range(height)]
    step_x, step_y = columns / ((right - left) or 1), rows / top
    scaled = [((at - left) * step_x, value * step_y) for at, value in zip(x, line.y, strict=True)]
    for (x0, y0), (x1, y1) in pairwise([scaled[0], *scaled]):
        steps = max(1, math.ceil(max(abs(x1 - x0), abs(y1 - y0))))
        for step in range(steps + 1):
            column = round(x0 + (x1 - x0) * step / steps)
            row = rows - round(y0 + (y1 - y0) * step / steps)
            cells[row // 4][column // 2] |= _DOTS[column % 2][row % 4]
    labels = {0: f"{top:.3g}", height - 1: "0"}
    margin = max(map(len, labels.values()))
    drawn = [
        f"{labels.get(number, ''):>{margin}} \u2524{''.join(chr(_BRAILLE + cell) for cell in cells_of_row)}"
        for number, cells_of_row in enumerate(cells)
    ]
    ends = f"{min(line.x):.3g}", f"{max(line.x):.3g}"
    middle = f"{line.x_label}{' (log)' if line.log_x else ''}".center(width - len(ends[0]) - len(ends[1]))
    axis = " " * margin + " \u2514" + "\u2500" * width
    return "\n".join([line.y_label, *drawn, axis, f"{'':{margin}}  {ends[0]}{middle}{ends[1]}"])


@dataclass(frozen=True, slots=True)
class Bars:
    """Counts by bin; several series over the same bins."""

    bins: Sequence[str]
    series: Mapping[str, Sequence[int]]


def draw_bars_png(path: str, bars: Bars, *, title: str) -> None:
    """Write a PNG with one row of bars per series. Raises EnvironmentError_."""
    figure = _figure()
    grid = figure.subplots(len(bars.series), 1, squeeze=False)
    for axes, (name, counts) in zip(grid[:, 0], bars.series.items(), strict=True):
        axes.bar(list(bars.bins), list(counts))
        axes.set(ylabel="objects", title=name)
    figure.suptitle(title)
    _write(figure, path)


def draw_bars_terminal(bars: Bars, *, width: int = 40) -> str:
    """The series one below the other, as lines of blocks."""
    margin = max(map(len, bars.bins))
    lines: list[str] = []
    for name, counts in bars.series.items():
        most = max(*counts, 1)
        lines.append(name)
        lines += [
            f"  {bin_:>{margin}} " + "\u2588" * round(width * count / most) + f"{' ' if count else ''}{count:,}"
            for bin_, count in zip(bars.bins, counts, strict=True)
        ]
    return "\n".join(lines)
