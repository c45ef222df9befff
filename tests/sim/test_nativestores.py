"""Some seconds of seeds of several stores on a server, always the same ones; and a planted bug that they must find."""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Iterator

import pytest

from tests.sim.kvmutants import find_kv, published_over_what_is_there
from tests.sim.nativestores import run_native_seed

_SECONDS = 3
_SEEDS_MIN = 4


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    """What a failing disk makes the store say is not to be read."""
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


def test_some_seconds_of_seeds() -> None:
    begun_s, seed, calls, fired = time.monotonic(), 0, Counter[str](), Counter[str]()
    promised = delivered = 0
    while seed < _SEEDS_MIN or time.monotonic() - begun_s < _SECONDS:
        outcome = run_native_seed(seed)
        calls += outcome.calls
        fired += outcome.fired
        promised += outcome.promised
        delivered += outcome.delivered
        seed += 1
    assert min(calls[what] for what in ("put", "load", "wait")) > 0
    assert fired["server_down"] > 0
    assert promised > 0
    assert delivered > 0


def test_a_planted_bug_is_found() -> None:
    assert find_kv(published_over_what_is_there, 20, run_native_seed) is not None
