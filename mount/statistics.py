"""What a mount counts: calls and their latencies, bytes, where reads were answered from, and the calls that were slow.

One task at a time counts, the trio thread; whoever else looks (a scrape) sees numbers that may be one call apart.
"""

from __future__ import annotations

import errno as errnos
from collections import Counter, deque
from dataclasses import asdict, dataclass
from typing import Any

from curvfs.histogram import Histogram
from curvfs.metrics import Family, Sample
from curvfs.units import format_size
from curvfs.world import Clock

#: How many slow calls are kept.
SLOW_CALLS_KEPT = 100


@dataclass(frozen=True, slots=True)
class SlowCall:
    """One call that took longer than ``-o slow_call``. ``about``: nodes and names that it was asked for."""

    operation: str
    about: str
    began_ms: int
    took_s: float
    errno: int


class Statistics:
    """The counters of one mount."""

    def __init__(self, clock: Clock, slow_call_s: float) -> None:
        self.clock = clock
        self.began_s = clock.monotonic_s()
        self.began_ms = clock.time_ms()
        self.slow_call_s = slow_call_s
        self.latencies: dict[str, Histogram] = {}
        #: (operation, errno) -> how often; also what is no fault, such as ENOENT of a lookup.
        self.errors: Counter[tuple[str, int]] = Counter()
        self.under_way = 0
        self.read_bytes = 0
        self.written_bytes = 0
        #: ``page_cache``: answered inline from this machine's page cache; ``store``: from a disk or over the network;
        #: ``writer``: from a file that is being written.
        self.reads: Counter[str] = Counter()
        #: Opens for reading: ``kept`` let the kernel go on using the pages it has, ``dropped`` did not.
        self.opens: Counter[str] = Counter()
        self.slow: deque[SlowCall] = deque(maxlen=SLOW_CALLS_KEPT)

    def finished(self, operation: str, began_s: float, errno: int, about: tuple[object, ...] = ()) -> None:
        """Count a call that ended just now; ``errno`` 0 is success. ``about``: what it was called with."""
        took_s = self.clock.monotonic_s() - began_s
        histogram = self.latencies.get(operation)
        if histogram is None:
            histogram = self.latencies[operation] = Histogram()
        histogram.record_s(took_s)
        if errno:
            self.errors[operation, errno] += 1
        if took_s >= self.slow_call_s:
            began_ms = self.clock.time_ms() - round(took_s * 1000)
            self.slow.append(SlowCall(operation, _shown(operation, about), began_ms, took_s, errno))

    @property
    def calls(self) -> Counter[str]:
        """How often each operation was called."""
        return Counter({name: histogram.count for name, histogram in list(self.latencies.items())})

    @property
    def uptime_s(self) -> float:
        return self.clock.monotonic_s() - self.began_s

    def snapshot(self) -> dict[str, Any]:
        """Everything, as JSON has it."""
        return {
            "began_ms": self.began_ms,
            "uptime_s": round(self.uptime_s, 3),
            "calls_under_way": self.under_way,
            "read_bytes": self.read_bytes,
            "written_bytes": self.written_bytes,
            "reads": dict(self.reads),
            "opens": dict(self.opens),
            "operations": {
                name: {**histogram.summary(), "errors": self._errors_of(name)}
                for name, histogram in sorted(self.latencies.items())
            },
        }

    def _errors_of(self, operation: str) -> dict[str, int]:
        found = [(errno, count) for (name, errno), count in list(self.errors.items()) if name == operation]
        return {errnos.errorcode.get(errno, str(errno)): count for errno, count in sorted(found)}

    def slow_calls(self) -> list[dict[str, Any]]:
        """The slow calls that are kept, newest first."""
        return [asdict(call) for call in reversed(self.slow)]

    def families(self) -> list[Family]:
        """The same for Prometheus."""
        latencies = sorted(self.latencies.items())
        return [
            Family(
                "curvfs_mount_call_seconds",
                "histogram",
                "How long requests of the kernel took.",
                [Sample(histogram, {"operation": name}) for name, histogram in latencies],
            ),
            Family(
                "curvfs_mount_call_errors",
                "counter",
                "Requests of the kernel that were answered with an error.",
                [
                    Sample(count, {"operation": name, "errno": errno})
                    for name, _ in latencies
                    for errno, count in self._errors_of(name).items()
                ],
            ),
            Family(
                "curvfs_mount_moved_bytes",
                "counter",
                "Bytes that programs read and wrote through the daemon; the kernel's page cache serves the rest.",
                [
                    Sample(self.read_bytes, {"direction": "read"}),
                    Sample(self.written_bytes, {"direction": "written"}),
                ],
            ),
            Family(
                "curvfs_mount_reads",
                "counter",
                "Reads by where they were answered from.",
                [Sample(count, {"source": name}) for name, count in sorted(self.reads.items())],
            ),
            Family(
                "curvfs_mount_opens",
                "counter",
                "Opens for reading by whether the kernel kept the pages that it had.",
                [Sample(count, {"pages": name}) for name, count in sorted(self.opens.items())],
            ),
            Family.of("curvfs_mount_calls_under_way", "gauge", "Requests being answered.", self.under_way),
            Family.of("curvfs_mount_uptime_seconds", "gauge", "Time since the mount began.", self.uptime_s),
        ]


def _shown(operation: str, about: tuple[object, ...]) -> str:
    """Numbers and names of a call, without the bytes that it moved."""
    shown = []
    for each in about[: 1 if operation in ("write", "setxattr") else 4]:
        if isinstance(each, bytes):
            shown.append(each.decode(errors="replace"))
        elif isinstance(each, int):
            shown.append(str(each))
    return " ".join(shown)


def table(snapshot: dict[str, Any]) -> str:
    """A snapshot for people."""
    lines = [
        f"up {snapshot['uptime_s']:.0f} s, {snapshot['calls_under_way']} calls under way",
        f"read {format_size(snapshot['read_bytes'])}, written {format_size(snapshot['written_bytes'])}",
        *(
            f"{what}: " + ", ".join(f"{name} {count}" for name, count in sorted(snapshot[what].items()))
            for what in ("reads", "opens", "objects")
            if snapshot.get(what)
        ),
        "",
        f"{'operation':<14}{'calls':>10}{'errors':>8}{'mean':>10}{'p50':>10}{'p99':>10}{'max':>10}   (ms)",
    ]
    for name, each in snapshot["operations"].items():
        times = "".join(f"{each[key] * 1000:>10.3f}" for key in ("mean_s", "p50_s", "p99_s", "max_s"))
        lines.append(f"{name:<14}{each['count']:>10.0f}{sum(each['errors'].values()):>8}{times}")
    return "\n".join(lines) + "\n"
