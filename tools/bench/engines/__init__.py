"""What a job's calls go to."""

from __future__ import annotations

from collections.abc import Sequence

from curvfs.world import World
from tools.bench.checker import Content
from tools.bench.engines.base import Target
from tools.bench.jobfile import Job
from tools.bench.source import File


def open_target(world: World, job: Job, number: int, files: Sequence[File], content: Content) -> Target:
    """The target of one process of a job; nothing is made or opened yet."""
    if job["ioengine"] == "mount":
        from tools.bench.engines.mount import MountTarget

        return MountTarget(world, job, number, files, content)
    if job["ioengine"] == "curvfs":
        from tools.bench.engines.curvfs import CurvfsTarget

        return CurvfsTarget(world, job, number, files, content)
    from tools.bench.engines.kvstore import KvTarget

    return KvTarget(world, job, number, files, content)
