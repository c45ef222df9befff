"""The workers that a master knows: here those of its own process, in a list.

Placement follows Curvine's policy ``local``: the worker on the client's host first, then round robin over those with
more room than the block may need (specification section 4.17).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import trio

from curvfs.server.blockstore import BlockStore, Space
from curvfs.server.layout import StorageVersion
from curvfs.server.oplog import Log
from curvfs.world import World

#: Blocks removed per turn of the worker thread.
_REMOVE_BATCH = 64


@dataclass(frozen=True, slots=True)
class WorkerNode:
    """One worker: where clients reach it and what it stores. ``address`` is the name or number that they connect to;
    ``hostname`` is compared with their own to find out whether they are local."""

    version: StorageVersion
    hostname: str
    address: str
    port: int
    store: BlockStore
    started_ms: int
    session_id: str

    @property
    def worker_id(self) -> int:
        return self.version.worker_id


class Cluster:
    """The live workers, and the blocks that wait to be removed from them."""

    def __init__(self, workers: Sequence[WorkerNode]) -> None:
        self.workers = tuple(workers)
        self._by_id = {worker.worker_id: worker for worker in workers}
        self._next = 0
        self._freed: list[int] = []
        self._freed_any = trio.Event()

    def worker(self, worker_id: int) -> WorkerNode:
        return self._by_id[worker_id]

    def knows(self, worker_id: int) -> bool:
        return worker_id in self._by_id

    def place(self, size_bytes: int, hostname: str, exclude: Sequence[int], count: int) -> tuple[int, ...]:
        fit = [
            worker.worker_id
            for worker in self.workers
            if worker.worker_id not in exclude and worker.store.space().available_bytes > size_bytes
        ]
        if not fit:
            return ()
        self._next += 1
        turn = self._next % len(fit)
        order = fit[turn:] + fit[:turn]
        order.sort(key=lambda worker_id: self._by_id[worker_id].hostname != hostname)
        return tuple(order[:count])

    def available_bytes(self) -> int:
        return sum(worker.store.space().available_bytes for worker in self.workers)

    def held_bytes(self, worker_id: int, block_id: int) -> int | None:
        worker = self._by_id.get(worker_id)
        return None if worker is None else worker.store.held_bytes(block_id)

    def spaces(self) -> list[tuple[WorkerNode, Space]]:
        return [(worker, worker.store.space()) for worker in self.workers]

    def release(self, block_ids: Sequence[int]) -> None:
        """Blocks that no file owns any more: they are removed soon, from wherever they are."""
        self._freed.extend(block_ids)
        self._freed_any.set()

    async def remove_released(self, world: World, log: Log) -> None:
        """Remove released blocks for as long as the server runs."""
        while True:
            await self._freed_any.wait()
            if not self._freed:
                self._freed_any = trio.Event()
                continue
            batch, self._freed = self._freed[:_REMOVE_BATCH], self._freed[_REMOVE_BATCH:]
            gone: list[tuple[BlockStore, str]] = []
            for block_id in batch:
                for worker in self.workers:
                    try:
                        gone += [(worker.store, path) for path in worker.store.retire(block_id)]
                    except OSError as error:
                        log.error(f"block {block_id} could not be removed and is left to the next start: {error}")
            await world.threads.run(self._unlink, gone, log)

    def _unlink(self, gone: list[tuple[BlockStore, str]], log: Log) -> None:
        for store, path in gone:
            try:
                store.unlink(path)
            except OSError as error:
                log.error(f"{path} could not be removed and is left to the next start: {error}")
