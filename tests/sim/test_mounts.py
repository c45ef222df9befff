"""Mounts in the simulated world: some seeds, always the same ones, and planted bugs that seeds must find."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack
from unittest.mock import patch

import pytest

pytest.importorskip("pyfuse3")

from curvfs.api import Located
from curvfs.errors import NotFound
from mount import inodes
from mount.inodes import Node
from mount.opening import Opening
from mount.private import PrivateFile
from mount.publish import Publisher
from mount.readers import Readers, stale
from tests.sim.mounts import run_mount_seed
from tests.sim.mutants import find

_SECONDS = 5
_SEEDS_MIN = 2


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    """Files that are lost to faults are logged by the hundred."""
    log = logging.getLogger("curvfs.mount")
    before = log.level
    log.setLevel(logging.CRITICAL)
    yield
    log.setLevel(before)


def test_some_seeds() -> None:
    began_s = time.monotonic()
    seed = 0
    while time.monotonic() - began_s < _SECONDS or seed < _SEEDS_MIN:
        outcome = run_mount_seed(seed)
        assert outcome.calls["read"] > 0
        seed += 1
    assert run_mount_seed(1).digest == run_mount_seed(1).digest


def seal_forgotten() -> AbstractContextManager[object]:
    """A published object passes for an ordinary file."""
    return patch.object(inodes, "is_sealed", lambda *arguments: False)


def published_before_it_is_flushed() -> AbstractContextManager[object]:
    """A close and a rename leave the bytes for the release."""

    async def flush(self: Opening, handle_id: int) -> None:
        self._handles[handle_id].unflushed = False

    async def settle(self: Publisher, private: PrivateFile) -> None:
        pass

    stack = ExitStack()
    stack.enter_context(patch.object(Opening, "flush", flush))
    stack.enter_context(patch.object(Publisher, "settle", settle))
    return stack


def read_on_in_another_file() -> AbstractContextManager[object]:
    """A reader whose blocks are gone reads on in whatever has the name by now."""

    async def locate(self: Readers, node: Node) -> Located:
        try:
            return await self._fs.locate(self._table.path(node))
        except NotFound as error:
            raise stale() from error

    return patch.object(Readers, "locate", locate)


@pytest.mark.parametrize(
    ("mutant", "bound"),
    [(seal_forgotten, 20), (published_before_it_is_flushed, 20), (read_on_in_another_file, 40)],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_a_planted_bug_is_found(mutant: Callable[[], AbstractContextManager[object]], bound: int) -> None:
    assert find(mutant, bound, run_mount_seed) is not None
