"""Traces of requests: a store in one process evicts exactly what was used longest ago."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.soak.replay import made_up, through_lru, through_store


@pytest.mark.parametrize(("seed", "capacity_blocks"), [(1, 170), (1, 500), (2, 250), (3, 5000)])
def test_a_store_hits_what_an_exact_lru_hits(seed: int, capacity_blocks: int, tmp_path: Path) -> None:
    expected = through_lru(made_up(seed, 150), capacity_blocks)
    found = through_store(made_up(seed, 150), capacity_blocks, tmp_path)
    assert (found.requests, found.blocks, found.hits) == (expected.requests, expected.blocks, expected.hits)
    assert expected.hits


def test_the_generator_distinguishes_policies() -> None:
    """It would not help if every capacity hit the same."""
    hits = [through_lru(made_up(1, 150), capacity).hits for capacity in (50, 170, 500, 5000)]
    assert sorted(set(hits)) == hits
