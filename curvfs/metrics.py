"""What a process counts, in the form that Prometheus reads. The package ``prometheus-client`` is needed only where
metrics are asked for (``pip install 'curvfs[metrics]'``)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from curvfs.errors import EnvironmentError_
from curvfs.histogram import Histogram

#: Upper bounds of the buckets that a scrape sees, in seconds.
LATENCY_BUCKETS_S = (
    *(0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025),
    *(0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0),
)


@dataclass(frozen=True, slots=True)
class Sample:
    """One series: its labels, and its value at this moment."""

    value: float | Histogram
    labels: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Family:
    """A metric by name. A counter's name comes without ``_total``; units stand last (``_seconds``, ``_bytes``)."""

    name: str
    kind: Literal["counter", "gauge", "histogram"]
    help: str
    samples: Sequence[Sample]

    @classmethod
    def of(
        cls,
        name: str,
        kind: Literal["counter", "gauge", "histogram"],
        help_: str,
        value: float | Histogram,
        **labels: str,
    ) -> Family:
        """A family of one series."""
        return cls(name, kind, help_, (Sample(value, labels),))


class Exporter:
    """Families for a registry of prometheus-client. ``collect`` is called at every scrape, from any thread."""

    def __init__(self, collect: Callable[[], Iterable[Family]]) -> None:
        self._core = _library().core
        self._collect = collect

    def collect(self) -> Iterator[Any]:
        """The collector protocol of prometheus-client."""
        for family in self._collect():
            yield self._converted(family)

    def describe(self) -> list[Any]:
        """Tells a registry that names are not known before the first scrape."""
        return []

    def _converted(self, family: Family) -> Any:
        makers = {
            "counter": self._core.CounterMetricFamily,
            "gauge": self._core.GaugeMetricFamily,
            "histogram": self._core.HistogramMetricFamily,
        }
        names = sorted({name for sample in family.samples for name in sample.labels})
        made = makers[family.kind](family.name, family.help, labels=names)
        for sample in family.samples:
            labels = [sample.labels.get(name, "") for name in names]
            if isinstance(sample.value, Histogram):
                made.add_metric(labels, _cumulative(sample.value), sample.value.total_ns / 1e9)
            else:
                made.add_metric(labels, sample.value)
        return made

    def register(self, registry: Any = None) -> Callable[[], None]:
        """Join a registry (None: the process-wide one, which an engine's own endpoint shows); the result leaves it."""
        chosen = registry if registry is not None else _library().REGISTRY
        chosen.register(self)
        return lambda: chosen.unregister(self)

    def text(self) -> str:
        """All families in the text format of Prometheus."""
        registry = _library().CollectorRegistry()
        registry.register(self)
        return str(_library().generate_latest(registry).decode())

    def serve(self, host: str, port: int) -> None:
        """Answer scrapes at ``http://host:port/metrics`` from a daemon thread until the process ends.

        Raises EnvironmentError_ when the address cannot be had.
        """
        registry = _library().CollectorRegistry()
        registry.register(self)
        try:
            _library().start_http_server(port, addr=host, registry=registry)
        except OSError as error:
            raise EnvironmentError_(
                f"Metrics cannot be offered at {host}:{port}: {error.strerror or error}; choose another address or "
                "port, or leave the option out.",
                errno_=error.errno,
            ) from error


def _cumulative(histogram: Histogram) -> list[tuple[str, float]]:
    bounds = [(str(bound_s), float(histogram.count_up_to(bound_s))) for bound_s in LATENCY_BUCKETS_S]
    return [*bounds, ("+Inf", float(histogram.count))]


def _library() -> Any:
    try:
        import prometheus_client
        import prometheus_client.core
    except ImportError as error:
        raise EnvironmentError_(
            "Metrics need the package prometheus-client, which is not installed: pip install 'curvfs[metrics]'."
        ) from error
    return prometheus_client
