"""The planted bugs that seeds must find; and a minute of seeds, always the same ones from the first on, which began
with the first test of this directory."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager

import pytest

from tests.sim.mutants import MUTANTS, find

#: Fewer than this in that time would be no test.
_SEEDS_MIN = 50


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.__name__)
def test_a_planted_bug_is_found(mutant: Callable[[], AbstractContextManager[object]]) -> None:
    assert find(mutant, MUTANTS[mutant]) is not None


def test_a_minute_of_seeds(
    a_minute_of_seeds: Callable[[], tuple[int, str]], capsys: pytest.CaptureFixture[str]
) -> None:
    code, said = a_minute_of_seeds()
    with capsys.disabled():
        print(f"\nsimulated world: {said.splitlines()[-2] if code == 0 else said}")
    assert code == 0
    assert int(said.splitlines()[-2].split()[0]) >= _SEEDS_MIN
