"""The stage fixture: every test of the contract runs on the real world and on simulated ones."""

from __future__ import annotations

import functools
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from tests.t0_units.worlds import Stage, on_a_simulated_world, on_the_real_world

Play = Callable[[Callable[[Stage], Awaitable[None]]], None]


@pytest.fixture(params=["real", "seed 1", "seed 2", "seed 3"])
def play(request: pytest.FixtureRequest, tmp_path: Path) -> Play:
    """Runs an async function on a :class:`Stage` of the world that the parameter names."""
    if request.param == "real":
        return functools.partial(on_the_real_world, str(tmp_path))
    return functools.partial(on_a_simulated_world, int(request.param.split()[1]))
