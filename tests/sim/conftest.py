"""A minute of seeds in a process of its own, beside the other tests of this directory."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

_SECONDS = 60


@pytest.fixture(scope="session", autouse=True)
def a_minute_of_seeds(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[], tuple[int, str]]]:
    """Begins with the first test of this directory. Called, it waits for the end: exit code, and all that was said.
    Ended with the session when nobody has waited."""
    command = [sys.executable, "-m", "tests.sim", "seeds", "--limit-s", str(_SECONDS)]
    said = tmp_path_factory.mktemp("seeds") / "said"
    with (
        said.open("w") as file,
        subprocess.Popen(command, cwd=Path(__file__).parents[2], stdout=file, stderr=file) as process,
    ):

        def outcome() -> tuple[int, str]:
            return process.wait(), said.read_text()

        yield outcome
        process.kill()
