"""Making and committing files of one block, one or many at a time (specification 4.5 and 4.16).

Many at a time cost three calls to the master instead of three each: CreateFilesBatch, AddBlocksBatch and
CompleteFilesBatch, whose elements are the very messages of the single calls. A batch fails as a whole when one element
does, with those before it done; then every file is asked for by itself, which repeats what was done without harm. A
master without batches is asked one by one from then on. Blocks are written through streams of their own.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, TypeVar

import trio

from curvfs.client import convert
from curvfs.client.blockwrite import BlockWriter
from curvfs.client.extents import WriteExtent
from curvfs.client.lentblocks import complete_lent, lent_worker, open_lent
from curvfs.client.mastercalls import O_CREAT, O_EXCL, O_WRONLY, MasterCalls
from curvfs.client.records import FileStatus, WorkerAddress
from curvfs.client.session import Session
from curvfs.client.writer import FileWriter
from curvfs.errors import CurvfsError, InProgress, NoAvailableWorker, TransportError, Unsupported
from curvfs.net.cluster import Progress
from curvfs.wire.messages import pb

#: A block, and whether its workers may have been lost with an answer.
Added = tuple[pb.LocatedBlockProto, Progress]

T = TypeVar("T")
R = TypeVar("R")

_FLAGS = O_WRONLY | O_CREAT | O_EXCL


@dataclass(frozen=True, slots=True)
class Plan:
    """A file to be made: its full path, the caller's, its size and what CreateFile is told."""

    full_path: str
    path: str
    size_bytes: int
    options: pb.CreateFileOptsProto


@dataclass(frozen=True, slots=True)
class Made:
    """A file that was made as planned."""

    plan: Plan
    status: FileStatus


async def create_extents(
    session: Session,
    calls: MasterCalls,
    plans: Sequence[Plan | CurvfsError],
    *,
    direct: bool,
    unique_names: bool,
    on_worker: int | None = None,
    worker_timeout_s: float | None = None,
) -> list[WriteExtent | CurvfsError]:
    """Make the files, and open the block of each. A file's own failure stands in its place; it leaves nothing behind
    that the master could be told to remove. ``on_worker``: there, or not at all. ``worker_timeout_s`` bounds each
    exchange with a worker."""
    others = None
    if on_worker is not None:
        workers = [worker.address.worker_id for worker in (await calls.info()).live_workers]
        if on_worker not in workers:
            raise NoAvailableWorker(f"Worker {on_worker} is not alive, as the master has it; try again later.")
        others = [worker for worker in workers if worker != on_worker]
    made = await create_files(session, calls, plans, unique_names)
    blocks = await add_first_blocks(session, calls, made, exclude=others)

    extents: dict[int, WriteExtent | CurvfsError] = {}

    async def finish(index: int) -> WriteExtent:
        entry, added = made[index], blocks[index]
        if isinstance(entry, CurvfsError):
            raise entry
        try:
            if isinstance(added, CurvfsError):
                raise added
            return await _open(session, calls, entry, added, direct=direct, timeout_s=worker_timeout_s)
        except CurvfsError:
            await extent_of(session, calls, entry, None, "").abort()
            raise

    try:
        await _open_together(session, calls, made, blocks, extents, direct=direct, timeout_s=worker_timeout_s)
        left = [index for index in range(len(made)) if index not in extents]
        extents.update(zip(left, await each(finish, left), strict=True))
    except BaseException:
        with trio.CancelScope(shield=True):  # each has its time
            async with trio.open_nursery() as nursery:
                for index, entry in enumerate(made):
                    if isinstance(entry, Made):
                        extent = extents.get(index) or extent_of(session, calls, entry, None, "")
                        if isinstance(extent, WriteExtent):
                            nursery.start_soon(extent.abort)
        raise
    return [extents[index] for index in range(len(made))]


async def _open_together(
    session: Session,
    calls: MasterCalls,
    made: Sequence[Made | CurvfsError],
    blocks: Sequence[Added | CurvfsError | None],
    extents: dict[int, WriteExtent | CurvfsError],
    *,
    direct: bool,
    timeout_s: float | None,
) -> None:
    """Open what lies on this machine, all blocks of a worker in one exchange: those go to ``extents``."""
    wanted: dict[WorkerAddress, list[tuple[int, Made, pb.ExtendedBlockProto]]] = {}
    for index, (entry, added) in enumerate(zip(made, blocks, strict=True)):
        if isinstance(entry, Made) and isinstance(added, tuple):
            worker = lent_worker(session, added[0])
            if worker is not None:
                wanted.setdefault(worker, []).append((index, entry, added[0].block))

    async def on(worker: WorkerAddress, mine: Sequence[tuple[int, Made, pb.ExtendedBlockProto]]) -> None:
        asked = [(block, entry.plan.options.block_size) for _, entry, block in mine]
        opened = await open_lent(session, worker, asked, direct=direct, timeout_s=timeout_s)
        for (index, entry, _), writer in zip(mine, opened, strict=True):
            if writer is not None:
                extents[index] = extent_of(session, calls, entry, writer, "", (worker,))

    async with trio.open_nursery() as nursery:
        for worker, mine in wanted.items():
            if len(mine) > 1:
                nursery.start_soon(on, worker, mine)


async def commit_extents(
    session: Session, calls: MasterCalls, extents: Sequence[WriteExtent]
) -> list[FileStatus | CurvfsError]:
    """:meth:`WriteExtent.commit` of all, with one call to the master. A file's own failure stands in its place."""
    await _complete_together(session, extents)
    finished = await each(WriteExtent.complete_block, list(extents))
    ready = [extent for extent, error in zip(extents, finished, strict=True) if error is None]
    done = False
    if len(ready) > 1 and session.knows_batches:
        try:
            await calls.complete_batch([extent.completion() for extent in ready])
            done = True
        except Unsupported:
            session.knows_batches = False
        except TransportError:
            pass  # each is told what became of it
        except CurvfsError:
            session.stats["batches_split"] += 1

    async def one(extent: WriteExtent) -> FileStatus:
        return extent.completed() if done else await extent.commit()

    statuses = iter(await each(one, ready))
    return [next(statuses) if error is None else error for error in finished]


async def _complete_together(session: Session, extents: Sequence[WriteExtent]) -> None:
    """Complete the blocks that were opened together; what fails is told when each is completed by itself."""
    whole: list[tuple[WriteExtent, BlockWriter]] = []
    for extent in extents:
        with suppress(CurvfsError):
            writer = extent.whole_block()
            if writer is not None:
                whole.append((extent, writer))
    commits = await complete_lent(session, [writer for _, writer in whole])
    for (extent, _), commit in zip(whole, commits, strict=True):
        if commit is not None:
            extent.adopt(commit)


async def each(call: Callable[[T], Awaitable[R]], items: Sequence[T | CurvfsError]) -> list[R | CurvfsError]:
    """Run a call for every item, side by side; an item that is an error, or a call's own, stands in its place."""
    results: list[Any] = list(items)

    async def one(index: int, item: T) -> None:
        try:
            results[index] = await call(item)
        except CurvfsError as error:
            results[index] = error

    if len(items) == 1 and not isinstance(items[0], CurvfsError):
        await one(0, items[0])
        return results
    async with trio.open_nursery() as nursery:
        for index, item in enumerate(items):
            if not isinstance(item, CurvfsError):
                nursery.start_soon(one, index, item)
    return results


async def create_files(
    session: Session, calls: MasterCalls, plans: Sequence[Plan | CurvfsError], unique_names: bool
) -> list[Made | CurvfsError]:
    """CreateFile of all, in one call where the master knows batches."""
    wanted = [plan for plan in plans if isinstance(plan, Plan)]
    base: int | None = None
    statuses: Sequence[pb.FileStatusProto] | None = None
    failure: CurvfsError | None = None
    if len(wanted) > 1 and session.knows_batches:
        base = session.world.random.request_id()
        try:
            files = [(plan.full_path, plan.options) for plan in wanted]
            statuses = await calls.create_batch(files, _FLAGS, req_id=base)
        except Unsupported:
            session.knows_batches, base = False, None
        except TransportError as error:
            failure = error  # the masters were given all the time there was
        except CurvfsError:
            session.stats["batches_split"] += 1

    async def one(numbered: tuple[int, Plan]) -> Made:
        index, plan = numbered
        if failure is not None:
            raise failure
        if statuses is not None:
            status = statuses[index]
        else:
            replay_of = None if base is None else base + index
            status = await calls.create(
                plan.full_path, plan.options, _FLAGS, unique_name=unique_names, replay_of=replay_of
            )
        return Made(plan, convert.file_status(status, plan.path))

    made = iter(await each(one, list(enumerate(wanted))))
    return [next(made) if isinstance(plan, Plan) else plan for plan in plans]


async def add_first_blocks(
    session: Session,
    calls: MasterCalls,
    made: Sequence[Made | CurvfsError],
    *,
    exclude: Sequence[int] | None = None,
) -> list[Added | CurvfsError | None]:
    """The first block of each file; None for one without bytes. ``exclude``: workers that get none of them, instead of
    those that failed before."""
    wanted = [entry for entry in made if isinstance(entry, Made) and entry.plan.size_bytes]
    blocks: Sequence[pb.LocatedBlockProto] | None = None
    asked = False
    if len(wanted) > 1 and session.knows_batches and exclude is None:
        try:
            blocks = await calls.add_first_blocks_batch([(entry.plan.full_path, entry.status.id) for entry in wanted])
        except Unsupported:
            session.knows_batches = False
        except CurvfsError:
            asked = True  # some may have theirs
            session.stats["batches_split"] += 1

    async def one(numbered: tuple[int, Made]) -> Added:
        index, entry = numbered
        progress = Progress(uncertain=asked)
        if blocks is not None:
            return blocks[index], progress
        located = await calls.add_block(
            entry.plan.full_path,
            entry.status.id,
            file_length_bytes=0,
            last_block=None,
            commits=(),
            progress=progress,
            exclude=exclude,
        )
        return located, progress

    added = iter(await each(one, list(enumerate(wanted))))
    return [next(added) if isinstance(entry, Made) and entry.plan.size_bytes else None for entry in made]


async def create_ahead(
    session: Session, calls: MasterCalls, plans: Sequence[Plan | CurvfsError]
) -> list[FileWriter | CurvfsError]:
    """Make files that are to be written later, each with its first block placed. A file's own failure stands in its
    place."""
    made = await create_files(session, calls, plans, True)
    blocks = await add_first_blocks(session, calls, made)

    async def finish(pair: tuple[Made, Added | CurvfsError | None]) -> FileWriter:
        entry, added = pair
        try:
            if isinstance(added, CurvfsError):
                raise added
            located = [await placed(calls, entry, added)] if added is not None else []
        except BaseException:
            await extent_of(session, calls, entry, None, "").abort()
            raise
        path = entry.plan.full_path
        return FileWriter(session, calls, path, entry.status, located, created=True, alone=True, ahead=True)

    pairs = [
        entry if isinstance(entry, CurvfsError) else (entry, added) for entry, added in zip(made, blocks, strict=True)
    ]
    return await each(finish, pairs)


async def placed(calls: MasterCalls, made: Made, added: Added) -> pb.LocatedBlockProto:
    """The first block of a file, with its workers. Raises InProgress when another writer has it."""
    located, progress = added
    path = made.plan.full_path
    if not located.locs:
        if not progress.uncertain:
            raise InProgress(f"Cannot write {path}: another client is writing it; use unique names.")
        located.locs.extend((await calls.assign_worker(path, located.block)).locs)
    return located


async def _open(
    session: Session, calls: MasterCalls, made: Made, added: Added | None, *, direct: bool, timeout_s: float | None
) -> WriteExtent:
    if added is None:
        return extent_of(session, calls, made, None, "empty")
    located = await placed(calls, made, added)
    reason = session.local.candidate(convert.worker_address(located.locs[0])) if located.locs else "lost"
    writer = await BlockWriter.open(
        session,
        located,
        offset_bytes=0,
        capacity_bytes=made.plan.options.block_size,
        new=True,
        direct=direct,
        timeout_s=timeout_s,
    )
    reason = "replicas" if len(located.locs) > 1 else reason or "refused"
    opened = [worker for worker in map(convert.worker_address, located.locs) if worker.worker_id in writer.worker_ids]
    return extent_of(session, calls, made, writer, reason, tuple(opened))


def extent_of(
    session: Session,
    calls: MasterCalls,
    made: Made,
    writer: BlockWriter | None,
    reason: str,
    workers: tuple[WorkerAddress, ...] = (),
) -> WriteExtent:
    """The handle of a file that was made; ``writer`` is its block's, if it has one that is open, on ``workers``."""
    plan = made.plan
    return WriteExtent(session, calls, plan.full_path, made.status, plan.size_bytes, writer, reason, workers)
