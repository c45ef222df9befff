"""Sizes, durations and alignment."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from curvfs.errors import ConfigError
from curvfs.units import GIB, KIB, MIB, PIB, TIB, align_down, align_up, format_size, parse_duration, parse_size


@pytest.mark.parametrize(
    ("text", "size_bytes"),
    [
        ("0", 0),
        ("4096", 4096),
        (4096, 4096),
        ("1b", 1),
        ("4k", 4 * KIB),
        ("128MB", 128 * MIB),
        ("128 MiB", 128 * MIB),
        ("1.5GiB", 3 * GIB // 2),
        (" 2 tb ", 2 * TIB),
        ("3P", 3 * PIB),
        ("9007199254740993", 2**53 + 1),
    ],
)
def test_sizes_count_in_powers_of_1024(text: str | int, size_bytes: int) -> None:
    assert parse_size(text) == size_bytes


@pytest.mark.parametrize("text", ["", "k", "-1", -1, "1e3", "1 x", "1kk", "1,5k", "0x10", "١", "1.k"])
def test_what_is_no_size_is_refused_by_name(text: str | int) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_size(text)
    assert str(text) in str(caught.value)


@pytest.mark.parametrize(
    ("text", "duration_s"),
    [
        ("100ms", 0.1),
        ("30s", 30),
        ("10m", 600),
        ("1h", 3600),
        ("2d", 172_800),
        ("1.5 s", 1.5),
        ("250", 0.25),
        (250, 0.25),
    ],
)
def test_durations_are_seconds_and_a_bare_number_milliseconds(text: str | int, duration_s: float) -> None:
    assert parse_duration(text) == pytest.approx(duration_s)


def test_a_bare_number_counts_in_the_unit_asked_for() -> None:
    assert parse_duration("5", bare_unit="s") == 5
    assert parse_duration(0.00001, bare_unit="s") == 0.00001


@pytest.mark.parametrize("text", ["", "s", "-1s", "1 year", "1ns", -1, math.inf, math.nan, "inf"])
def test_what_is_no_duration_is_refused_by_name(text: str | float) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_duration(text)
    assert str(text) in str(caught.value)


@pytest.mark.parametrize(
    ("size_bytes", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1536, "1.5 KiB"),
        (MIB - 1, "1.0 MiB"),
        (3 * GIB, "3.0 GiB"),
        (5000 * PIB, "5000.0 PiB"),
        (-1536, "-1.5 KiB"),
    ],
)
def test_sizes_are_shown_in_the_largest_fitting_unit(size_bytes: int, text: str) -> None:
    assert format_size(size_bytes) == text


@given(st.integers(0, 2**59))
def test_a_shown_size_is_within_its_last_digit(size_bytes: int) -> None:
    shown = format_size(size_bytes)
    assert parse_size(shown) == pytest.approx(size_bytes, rel=0.051, abs=0.5)
    assert not shown.startswith("1024")


@given(st.integers(0, 2**60), st.integers(1, 2**30))
def test_alignment_is_the_nearest_multiple(value: int, alignment: int) -> None:
    up, down = align_up(value, alignment), align_down(value, alignment)
    assert up % alignment == down % alignment == 0
    assert down <= value <= up
    assert up - down == (0 if value % alignment == 0 else alignment)
