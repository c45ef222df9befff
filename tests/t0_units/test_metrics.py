"""Families as prometheus-client shows them, and over HTTP."""

from __future__ import annotations

import socket
import urllib.request

import prometheus_client
import pytest

from curvfs.errors import EnvironmentError_
from curvfs.histogram import Histogram
from curvfs.metrics import Exporter, Family, Sample


def families() -> list[Family]:
    waits = Histogram()
    for value_s in (0.0002, 0.002, 0.2):
        waits.record_s(value_s)
    return [
        Family("curvfs_reads", "counter", "Reads.", [Sample(3, {"tier": "l1"}), Sample(4, {"tier": "pool"})]),
        Family.of("curvfs_open_files", "gauge", "Open files.", 7),
        Family.of("curvfs_wait_seconds", "histogram", "Waits.", waits, operation="read"),
    ]


def test_the_text_names_every_series() -> None:
    lines = Exporter(families).text().splitlines()
    assert 'curvfs_reads_total{tier="l1"} 3.0' in lines and 'curvfs_reads_total{tier="pool"} 4.0' in lines
    assert "curvfs_open_files 7.0" in lines
    assert 'curvfs_wait_seconds_bucket{le="0.00025",operation="read"} 1.0' in lines
    assert 'curvfs_wait_seconds_bucket{le="+Inf",operation="read"} 3.0' in lines
    assert 'curvfs_wait_seconds_count{operation="read"} 3.0' in lines
    total = next(line for line in lines if line.startswith('curvfs_wait_seconds_sum{operation="read"}'))
    assert float(total.split()[1]) == pytest.approx(0.2022)


def test_an_engine_s_registry_shows_ours_until_we_leave() -> None:
    registry = prometheus_client.CollectorRegistry()
    leave = Exporter(families).register(registry)
    assert b"curvfs_open_files 7.0" in prometheus_client.generate_latest(registry)
    leave()
    assert b"curvfs_open_files" not in prometheus_client.generate_latest(registry)


def test_a_scrape_over_http_and_an_address_that_is_taken() -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    Exporter(families).serve("127.0.0.1", port)
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
        assert b"curvfs_open_files 7.0" in answer.read()
    with pytest.raises(EnvironmentError_, match="choose another address or port"):
        Exporter(families).serve("127.0.0.1", port)
