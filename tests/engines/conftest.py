"""What holds for all engines: where pools are, what is left to the longer run, and that nothing is left behind."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from places import Server, mounted, served

_left_out: list[str] = []
_told: list[str] = []


def pytest_deselected(items: list[pytest.Item]) -> None:
    _left_out.extend(item.nodeid for item in items if item.get_closest_marker("full"))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if _left_out:
        terminalreporter.section("left to make test-engines-full")
        for name in _left_out:
            terminalreporter.line(name)
    if _told:
        terminalreporter.section("of the engines' own tests")
        for sentence in dict.fromkeys(_told):
            terminalreporter.line(sentence)


@pytest.fixture
def tell() -> Callable[[str], None]:
    """Says a sentence at the end of the run, however the test ends."""
    return _told.append


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A one-node pool for the whole session."""
    with served(tmp_path_factory.mktemp("server") / "pool") as one:
        yield one


@pytest.fixture(scope="session")
def mount(server: Server, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A mount of that pool; its KV prefix is ``kv``."""
    with mounted(tmp_path_factory.mktemp("mount") / "a", server.url + "/") as where:
        yield where


@pytest.fixture(scope="session")
def other_mount(server: Server, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Another mount of it, as on another machine."""
    with mounted(tmp_path_factory.mktemp("mount") / "b", server.url + "/") as where:
        yield where
