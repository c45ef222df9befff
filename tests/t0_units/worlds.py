"""Both worlds behind one face, for the suites that hold for each."""

from __future__ import annotations

import mmap
import os
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TypeVar

import trio

from curvfs import simworld
from curvfs.world import World

T = TypeVar("T")


@dataclass(frozen=True)
class Stage:
    """A world, and an empty directory on its disk."""

    world: World
    root: str

    def path(self, name: str) -> str:
        return f"{self.root}/{name}"

    def file(self, name: str, content: bytes = b"") -> str:
        """Make a file, not through what is tested there."""
        path = self.path(name)
        fd = self.world.disk.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
        try:
            self.world.disk.pwrite_full(fd, content, 0)
        finally:
            self.world.disk.close(fd)
        return path


def on_the_real_world(root: str, function: Callable[[Stage], Awaitable[T]]) -> T:
    async def main() -> T:
        with trio.fail_after(30):
            return await function(Stage(World.real(), root))

    return trio.run(main)


def on_a_simulated_world(seed: int, function: Callable[[Stage], Awaitable[T]]) -> T:
    async def main(world: simworld.SimWorld) -> T:
        world.disk.mkdir("/data")
        return await function(Stage(world, "/data"))

    return simworld.run(main, seed=seed, limit_s=600)


def aligned(size_bytes: int) -> memoryview:
    """Memory that suits direct I/O."""
    return memoryview(mmap.mmap(-1, size_bytes))
