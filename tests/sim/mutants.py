"""Bugs to be found: each one is planted into the running product, around one function, and the seeds must find it.

Nothing of this is in the product: a mutant replaces a function for as long as it is planted. ``make sim-mutants`` tries
seeds until one fails, for every mutant; the bound says how many seeds it may take.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

from curvfs.buffers import bytes_of
from curvfs.client.blockwrite import LocalReplica, Replica
from curvfs.client.mastercalls import MasterCalls
from curvfs.errors import TransportError
from curvfs.net.cluster import MasterCluster, Replay
from curvfs.net.workers import BlockChannel
from curvfs.server.blockstore import BlockStore
from curvfs.wire.codes import RpcCode
from curvfs.wire.messages import encode, pb
from curvfs.wire.session import UnaryCalls
from curvfs.world import Disk
from tests.sim.scenario import run_seed


def reply_matched_to_the_newest_call() -> AbstractContextManager[object]:
    """A reply goes to the call that was sent last, whatever request id it carries."""
    receive = UnaryCalls.receive

    def mutant(self: UnaryCalls, head: Any, header: bytes = b"", data: Any = b"") -> Any:
        newest = next(reversed(self._outstanding), None)
        req_id, reply = receive(self, head, header, data)
        return (req_id if newest is None else newest), reply

    return patch.object(UnaryCalls, "receive", mutant)


def commit_dropped_on_retry() -> AbstractContextManager[object]:
    """When the answer to a commit is lost, it passes for done instead of being sent again."""
    call = MasterCluster.call

    async def mutant(self: MasterCluster, code: int, header: bytes, **kwargs: Any) -> bytes:
        if code != RpcCode.COMPLETE_FILE:
            return await call(self, code, header, **kwargs)
        try:
            return await call(self, code, header, **{**kwargs, "replay": Replay.NEVER})
        except TransportError:
            return encode(pb.CompleteFileResponse(result=True))

    return patch.object(MasterCluster, "call", mutant)


def short_write_ignored() -> AbstractContextManager[object]:
    """What the disk did not take of a write is not written."""

    def mutant(self: Disk, fd: int, buffer: Any, offset_bytes: int) -> None:
        self.pwritev(fd, [bytes_of(buffer)], offset_bytes)

    return patch.object(Disk, "pwrite_full", mutant)


def rename_replaces() -> AbstractContextManager[object]:
    """A rename that must not replace its target does."""
    rename = MasterCalls.rename

    async def mutant(self: MasterCalls, src: str, dst: str, flags: int, **kwargs: Any) -> None:
        await rename(self, src, dst, 0, **kwargs)

    return patch.object(MasterCalls, "rename", mutant)


def broken_connection_reused() -> AbstractContextManager[object]:
    """A connection whose stream broke off serves the next one, which meets the old one's replies."""

    async def mutant(self: BlockChannel) -> None:
        if not self._released:
            self._released = True
            await self._pool.give_back(self.worker, self._frames)

    return patch.object(BlockChannel, "release", mutant)


def truncation_kept_from_the_worker() -> AbstractContextManager[object]:
    """The worker is told that a block was cut and does nothing, so the bytes that were cut off come back."""
    begin = BlockStore.begin

    def mutant(self: BlockStore, block_id: int, capacity_bytes: int, alloc: object) -> Any:
        return begin(self, block_id, capacity_bytes, None)

    return patch.object(BlockStore, "begin", mutant)


def descriptor_kept() -> AbstractContextManager[object]:
    """The local file of a block that was written is never closed."""
    drop: Callable[[Replica], Any] = Replica.drop

    async def mutant(self: LocalReplica) -> None:
        await drop(self)

    return patch.object(LocalReplica, "drop", mutant)


def rewrite_starts_empty() -> AbstractContextManager[object]:
    """A block that is rewritten starts empty instead of as a copy."""

    def mutant(self: BlockStore, source: int, target_path: str, length_bytes: int) -> None:
        self._disk.close(self._disk.open(target_path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC))

    return patch.object(BlockStore, "_copy", mutant)


#: Every mutant, and how many seeds it may take to find it.
MUTANTS: dict[Callable[[], AbstractContextManager[object]], int] = {
    reply_matched_to_the_newest_call: 200,
    commit_dropped_on_retry: 200,
    short_write_ignored: 20,
    rename_replaces: 100,
    broken_connection_reused: 200,
    truncation_kept_from_the_worker: 200,
    descriptor_kept: 20,
    rewrite_starts_empty: 100,
}


@dataclass(frozen=True, slots=True)
class Found:
    """The seed that failed with a mutant, and how."""

    seed: int
    error: str


def find(
    mutant: Callable[[], AbstractContextManager[object]], bound: int, one: Callable[[int], object] = run_seed
) -> Found | None:
    """Try seeds from 0 until one fails with the mutant planted; None when none of ``bound`` seeds does. ``one`` runs a
    seed."""
    for seed in range(bound):
        try:
            with mutant():
                one(seed)
        except KeyboardInterrupt:
            raise
        except BaseException as error:
            while isinstance(error, BaseExceptionGroup):
                error = error.exceptions[0]
            return Found(seed, f"{type(error).__name__}: {str(error)[:200]}")
    return None
