"""The record by which tools see a server (:mod:`curvfs.runrecords`), written once a second."""

from __future__ import annotations

from collections.abc import Sequence

import curvfs
from curvfs.runrecords import RunRecord
from curvfs.server.master import Master
from curvfs.server.worker import Worker
from curvfs.world import World

_WRITE_EVERY_S = 1.0


async def keep_record(world: World, directory: str, url: str, master: Master, workers: Sequence[Worker]) -> None:
    """Keep it until cancelled."""
    record = RunRecord(world, "server")
    try:
        while True:
            spaces = [space for _, space in master.cluster.spaces()]
            await world.threads.run(
                record.write,
                {
                    "url": url,
                    "directory": directory,
                    "version": curvfs.__version__,
                    "workers": len(workers),
                    "capacity_bytes": sum(space.capacity_bytes for space in spaces),
                    "available_bytes": sum(space.available_bytes for space in spaces),
                    "used_bytes": sum(space.used_bytes for space in spaces),
                    "read_bytes": sum(worker.read_bytes for worker in workers),
                    "written_bytes": sum(worker.written_bytes for worker in workers),
                    "answers": master.answers.summary(),
                    "refusals": dict(master.refusals),
                },
            )
            await world.clock.sleep(_WRITE_EVERY_S)
    finally:
        record.close()
