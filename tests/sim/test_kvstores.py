"""Some seconds of seeds of several stores, always the same ones; and the planted bugs that they must find."""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager

import pytest

from tests.sim.kvmutants import KV_MUTANTS, find_kv
from tests.sim.kvstores import run_kv_seed

_SECONDS = 5
_SEEDS_MIN = 6


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    """What a failing disk makes the store say is not to be read."""
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


def test_some_seconds_of_seeds() -> None:
    begun_s, seed, calls = time.monotonic(), 0, Counter[str]()
    promised = delivered = 0
    while seed < _SEEDS_MIN or time.monotonic() - begun_s < _SECONDS:
        outcome = run_kv_seed(seed)
        calls += outcome.calls
        promised += outcome.promised
        delivered += outcome.delivered
        seed += 1
    assert min(calls[what] for what in ("put", "load", "evict", "wait", "sweep")) > 0
    assert promised > 0
    assert delivered > 0


@pytest.mark.parametrize("mutant", KV_MUTANTS, ids=lambda mutant: mutant.__name__)
def test_a_planted_bug_is_found(mutant: Callable[[], AbstractContextManager[object]]) -> None:
    assert find_kv(mutant, KV_MUTANTS[mutant]) is not None
