"""A minute of seeds, always the same ones from the first on; and the planted bugs that seeds must find."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

import pytest

from tests.sim.mutants import MUTANTS, find

_SECONDS = 60
#: Fewer than this in that time would be no test.
_SEEDS_MIN = 50


def test_a_minute_of_seeds(capsys: pytest.CaptureFixture[str]) -> None:
    command = [sys.executable, "-m", "tests.sim", "seeds", "--limit-s", str(_SECONDS)]
    done = subprocess.run(command, cwd=Path(__file__).parents[2], capture_output=True, text=True)
    with capsys.disabled():
        print(f"\nsimulated world: {done.stdout.splitlines()[-2] if done.returncode == 0 else done.stdout}")
    assert done.returncode == 0, done.stderr
    assert int(done.stdout.splitlines()[-2].split()[0]) >= _SEEDS_MIN


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.__name__)
def test_a_planted_bug_is_found(mutant: Callable[[], AbstractContextManager[object]]) -> None:
    assert find(mutant, MUTANTS[mutant]) is not None
