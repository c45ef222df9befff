"""Latencies as they are merged and reported, and content that is checked."""

from __future__ import annotations

import json
import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tools.bench.checker import Mismatch, content_of, first_difference
from tools.bench.jobfile import Job, jobs_from_words
from tools.bench.latency import Latency, fio_bins


def of(values: list[int]) -> Latency:
    latency = Latency()
    for value in values:
        latency.record_ns(value)
    return latency


@given(st.lists(st.integers(0, 10**10), min_size=1, max_size=200), st.lists(st.integers(0, 10**10), max_size=50))
def test_latencies_survive_the_way_between_processes_and_merge(values: list[int], others: list[int]) -> None:
    merged = Latency()
    for latency in (of(values), of(others)):
        merged.add(Latency.from_message(json.loads(json.dumps(latency.message()))))
    everything = values + others
    assert (merged.count, merged.min_ns, merged.max_ns) == (len(everything), min(everything), max(everything))
    assert merged.mean_ns == pytest.approx(statistics.fmean(everything))
    assert merged.stddev_ns == pytest.approx(statistics.pstdev(everything), rel=1e-3, abs=100)
    ordered = sorted(everything)
    for percent in (1, 50, 90, 99, 100):
        exact = ordered[max(0, -(-len(ordered) * percent // 100) - 1)]
        assert exact <= merged.percentile_ns(percent) * 1.0001 + 1
        assert merged.percentile_ns(percent) <= exact * 1.04 + 2


def test_bins_are_percentages_of_all() -> None:
    bins = fio_bins([of([1, 30, 600, 3_000, 70_000, 2_500_000, 3_000_000_000, 900])])
    flat = [share for bin_ in bins.values() for share in bin_.values()]
    assert sum(flat) == pytest.approx(100)
    assert bins["latency_ms"][">=2000"] == bins["latency_ms"]["4"] == 12.5
    assert bins["latency_us"]["4"] == bins["latency_us"]["100"] == 12.5
    assert bins["latency_ns"]["1000"] == 12.5
    assert sum(sum(bin_.values()) for bin_ in fio_bins([]).values()) == 0


def job(*words: str) -> Job:
    return jobs_from_words(["--directory=/d", "--size=1m", *words])[0]


@pytest.mark.parametrize("name", ["crc32", "md5", "sha1", "sha256", "sha512"])
def test_checksummed_blocks_tell_what_is_wrong(name: str) -> None:
    content = content_of(job(f"--verify={name}"))
    block = memoryview(bytearray(8192))
    content.fill(block, "f", 16384)
    content.check(block, "f", 16384)
    with pytest.raises(Mismatch, match="f: the block at 8192 is that of offset 16384"):
        content.check(block, "f", 8192)
    with pytest.raises(Mismatch, match="seed 1"):
        content_of(job(f"--verify={name}", "--randseed=2")).check(block, "f", 16384)
    block[8000] ^= 1
    with pytest.raises(Mismatch, match=f"does not match its {name} checksum"):
        content.check(block, "f", 16384)
    block[:] = bytes(8192)
    with pytest.raises(Mismatch, match="does not begin as a written block does"):
        content.check(block, "f", 16384)


def test_a_pattern_repeats_from_the_start_of_the_file() -> None:
    content = content_of(job("--verify=pattern", "--verify_pattern=0x010203"))
    block = memoryview(bytearray(10))
    content.fill(block, "f", 4)
    assert bytes(block) == bytes([2, 3, 1, 2, 3, 1, 2, 3, 1, 2])
    content.check(block, "f", 7)
    with pytest.raises(Mismatch, match="f: byte 5 is 0x02, and 0x03 was written"):
        content.check(block, "f", 5)


def test_without_verify_content_differs_from_call_to_call() -> None:
    content = content_of(job())
    block = memoryview(bytearray(200_000))
    content.fill(block, "f", 0)
    before = bytes(block)
    content.fill(block, "f", 0)
    assert bytes(block[:8]) != before[:8] and bytes(block[8:]) == before[8:] and len(set(before)) > 200
    content.fill(memoryview(bytearray(3)), "f", 0)


@given(st.binary(min_size=1, max_size=300), st.integers(0, 299))
def test_the_first_difference_is_found(data: bytes, index: int) -> None:
    index %= len(data)
    other = bytearray(data)
    for at in range(index, len(other)):
        other[at] ^= 255
    assert first_difference(memoryview(bytes(other)), memoryview(data)) == index
