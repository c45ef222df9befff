"""What the demo shows: rows of measurements, the table, the picture, and the list of checks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from curvfs.units import GIB, MIB

Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Row:
    """One prompt. ``load_s`` is the part of ``shared_s`` (time to first token) spent on lookup and get. ``path`` says
    how the bytes went from replica A to the store, and from there to replica B."""

    tokens: int
    hit_tokens: int
    loaded_bytes: int
    load_s: float
    cold_s: float
    shared_s: float
    margin: float
    logit_difference: float
    path: str

    @property
    def speedup(self) -> float:
        return self.cold_s / self.shared_s

    @property
    def gib_per_s(self) -> float:
        return self.loaded_bytes / GIB / self.load_s

    def as_dict(self) -> dict[str, Any]:
        return {**asdict(self), "speedup": self.speedup, "gib_per_s": self.gib_per_s}


_COLUMNS: tuple[tuple[str, int, Callable[[Row], str]], ...] = (
    ("prompt", 7, lambda row: f"{row.tokens:,}"),
    ("hit tokens", 11, lambda row: f"{row.hit_tokens:,}"),
    ("MiB", 8, lambda row: f"{row.loaded_bytes / MIB:.1f}"),
    ("GiB/s", 7, lambda row: f"{row.gib_per_s:.2f}"),
    ("TTFT cold", 11, lambda row: f"{row.cold_s:.3f} s"),
    ("TTFT shared", 13, lambda row: f"{row.shared_s:.3f} s"),
    ("speed-up", 10, lambda row: f"{row.speedup:.1f}×"),
    ("logits differ by", 18, lambda row: f"{row.logit_difference:.1g}"),
)


def table_head() -> str:
    return "".join(name.rjust(width) for name, width, _ in _COLUMNS) + "  path: A → B"


def table_row(row: Row) -> str:
    return "".join(cell(row).rjust(width) for _, width, cell in _COLUMNS) + f"  {row.path}"


@dataclass(slots=True)
class Checks:
    """Everything that must hold. A check that failed is said at once and again at the end."""

    say: Say
    held: int = 0
    failed: list[str] = field(default_factory=list)
    not_run: list[str] = field(default_factory=list)

    def check(self, holds: bool, what: str) -> None:
        if holds:
            self.held += 1
        else:
            self.failed.append(what)
            self.say(f"  FAILED: {what}")

    def skip(self, *what: str) -> None:
        self.not_run.extend(what)


def plot(rows: Sequence[Row], path: Path) -> None:
    """A PNG of cold and shared time to first token against prompt length."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    lengths = [row.tokens for row in rows]
    figure, axes = pyplot.subplots(figsize=(7, 4.2), layout="constrained")
    axes.plot(lengths, [row.cold_s for row in rows], "o-", color="#b04a3a", label="cold: prefill everything")
    axes.plot(lengths, [row.shared_s for row in rows], "s-", color="#2f6f9f", label="shared: load, prefill the rest")
    for row in rows:
        axes.annotate(
            f"{row.speedup:.1f}×", (row.tokens, row.shared_s), xytext=(0, 8), textcoords="offset points", ha="center"
        )
    axes.set(xlabel="prompt length (tokens)", ylabel="time to first token (s)", title="KV shared between replicas")
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
