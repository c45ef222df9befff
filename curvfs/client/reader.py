"""Reading files: any range, whichever replicas serve it (specification 4.11 and 5.3)."""

from __future__ import annotations

import errno
from bisect import bisect_right
from typing import Self

import trio

from curvfs.client.blockread import LocalBlock, RemoteBlock, Span, fill_with_zeros, open_local
from curvfs.client.convert import located as located_from_wire
from curvfs.client.localfiles import Refused
from curvfs.client.mastercalls import MasterCalls
from curvfs.client.records import BlockLocation, FileStatus, Located, StorageState
from curvfs.client.session import Session
from curvfs.errors import (
    KIND_UNSUPPORTED_UFS_READ,
    BlockNotFound,
    CurvfsError,
    InvalidRequest,
    NoAvailableWorker,
    NotFound,
    ProtocolError,
    RemoteError,
    TransportError,
    Unsupported,
)
from curvfs.units import MIB

#: Blocks that one call reads at once.
_PARALLEL_BLOCKS = 4
#: Open blocks kept for the next call, per reader.
_KEPT_LOCAL = 64
_KEPT_REMOTE = 8
#: A stream with more than this under way is not rewound: another one is opened.
_REWIND_BYTES = MIB


class FileReader:
    """A file open for reading. Several tasks may read at once. An async context manager.

    What it reads is the file as it was located; bytes appended later are not seen. When every replica of a block has
    failed it asks the master once more, and goes on if the block is still the file's.
    """

    def __init__(self, session: Session, calls: MasterCalls, full_path: str, located: Located) -> None:
        status = located.status
        if status.storage_state is StorageState.UFS and status.length_bytes:
            raise Unsupported(
                f"Cannot open {full_path}: its bytes are in the under store only; load the file into Curvine first.",
                kind=KIND_UNSUPPORTED_UFS_READ,
                errno_=errno.EOPNOTSUPP,
            )
        self._session = session
        self._calls = calls
        self._full_path = full_path
        self._located = located
        self._starts = [block.file_offset_bytes for block in located.blocks]
        self._local: dict[int, LocalBlock] = {}
        self._remote: list[tuple[int, RemoteBlock]] = []
        self._not_local: set[int] = set()
        self._failed: dict[int, set[int]] = {}
        self._kept_local = _KEPT_LOCAL
        self._parallel = trio.CapacityLimiter(_PARALLEL_BLOCKS)
        self._closed = False

    @property
    def status(self) -> FileStatus:
        """As it was when the file was located."""
        return self._located.status

    @property
    def length_bytes(self) -> int:
        """Length of what is read: bytes appended later are not seen."""
        return self._located.status.length_bytes

    @property
    def located(self) -> Located:
        """Status and blocks, good for another open without a call."""
        return self._located

    @property
    def idle(self) -> bool:
        """No file and no stream is open (a reader opens blocks when they are read)."""
        return not self._local and not self._remote

    async def readinto(self, buffer: bytearray | memoryview, offset_bytes: int) -> int:
        """Fill ``buffer`` from ``offset_bytes`` on; returns the bytes read, less than asked only at end of file.

        Raises BlockNotFound when the file was deleted or rewritten meanwhile, NoAvailableWorker when no replica of a
        block can serve, TransportError when nobody answers. ``buffer`` is undefined then.
        """
        if offset_bytes < 0:
            raise InvalidRequest(f"Cannot read {self._full_path} at offset {offset_bytes}: it is negative.")
        if self._closed:
            raise CurvfsError(f"Cannot read {self._full_path}: the reader is closed.", errno_=errno.EBADF)
        view = memoryview(buffer).cast("B")
        view = view[: max(0, self.length_bytes - offset_bytes)]
        if not len(view):
            return 0
        pieces = list(self._pieces(view, offset_bytes))
        if len(pieces) == 1:
            await self._read_block(*pieces[0])
        else:
            await self._read_at_once(pieces)
        return len(view)

    async def read_at(self, offset_bytes: int, length_bytes: int) -> bytes:
        """Like :meth:`readinto`, into fresh memory."""
        buffer = bytearray(max(0, min(length_bytes, self.length_bytes - offset_bytes)))
        await self.readinto(buffer, offset_bytes)
        return bytes(buffer)

    async def open_blocks(self) -> None:
        """Open every block now, so that the file can be read to its end even if it is deleted or replaced.

        A local block's file and a worker's open stream outlive that (specification section 12).
        """
        self._kept_local = max(self._kept_local, len(self._located.blocks))
        for block in self._located.blocks:
            if block.length_bytes and block.workers and block.block_id not in self._local:
                source = await self._open_any(block, 0)
                if isinstance(source, RemoteBlock):
                    self._remote.append((block.block_id, source))

    def close_local(self) -> None:
        """The part of :meth:`aclose` that needs no trio thread, for when there is none any more."""
        self._closed = True
        local, self._local = self._local, {}
        for block in local.values():
            block.close()

    async def aclose(self) -> None:
        """Close what is open; idempotent, never raises."""
        self.close_local()
        remote, self._remote = self._remote, []
        async with trio.open_nursery() as nursery:
            for _, stream in remote:
                nursery.start_soon(stream.close)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.aclose()

    def _pieces(self, view: memoryview, offset_bytes: int) -> list[tuple[BlockLocation, Span]]:
        """The blocks that hold the range, by accumulated block lengths (blocks of length 0 hold nothing)."""
        pieces: list[tuple[BlockLocation, Span]] = []
        index = max(0, bisect_right(self._starts, offset_bytes) - 1)
        while len(view):
            if index >= len(self._located.blocks):
                raise NoAvailableWorker(
                    f"Cannot read {self._full_path} at offset {offset_bytes}: no block holds these bytes."
                )
            block = self._located.blocks[index]
            inside = offset_bytes - block.file_offset_bytes
            count = min(len(view), block.length_bytes - inside)
            if count > 0:
                pieces.append((block, Span(view[:count], inside)))
                view = view[count:]
                offset_bytes += count
            index += 1
        return pieces

    async def _read_at_once(self, pieces: list[tuple[BlockLocation, Span]]) -> None:
        failure: CurvfsError | None = None

        async def one(block: BlockLocation, span: Span) -> None:
            nonlocal failure
            async with self._parallel:
                try:
                    await self._read_block(block, span)
                except CurvfsError as error:
                    failure = failure or error
                    nursery.cancel_scope.cancel()

        async with trio.open_nursery() as nursery:
            for block, span in pieces:
                nursery.start_soon(one, block, span)
        if failure is not None:
            raise failure

    async def _read_block(self, block: BlockLocation, span: Span) -> None:
        if block.is_hole:
            fill_with_zeros(span.rest)
            span.done += span.left
            return
        located_again = False
        last: CurvfsError | None = None
        while True:
            source: LocalBlock | RemoteBlock | None = None
            try:
                source = self._take(block, span) or await self._open_any(block, span.left)
                await source.read(span)
            except (RemoteError, TransportError, ProtocolError) as error:
                if source is None:  # no replica is left
                    if located_again:
                        if last is not None and isinstance(error, NoAvailableWorker):
                            raise last from error
                        raise
                    located_again = True
                    block = await self._locate_again(block, error)
                else:
                    assert isinstance(source, RemoteBlock)
                    last = error
                    self._failed.setdefault(block.block_id, set()).add(source.worker_id)
                    self._session.stats["replica_failures"] += 1
                    await source.drop()
                    await self._drop_streams(source.worker_id)
            except CurvfsError:
                if not isinstance(source, LocalBlock):
                    raise
                # The local file failed us: over the wire, then.
                self._session.local.count("read_failed")
                self._not_local.add(block.block_id)
                found = self._local.pop(block.block_id, None)
                if found is not None:
                    found.close()
            except BaseException:
                if isinstance(source, RemoteBlock):
                    await source.drop()
                raise
            else:
                if isinstance(source, RemoteBlock):
                    await self._keep(block, source)
                return

    def _take(self, block: BlockLocation, span: Span) -> LocalBlock | RemoteBlock | None:
        """An open block that suits: a local file, the stream that stands where we go on, or one cheap to move."""
        local = self._local.get(block.block_id)
        if local is not None:
            self._local[block.block_id] = self._local.pop(block.block_id)  # the freshest is the last
            return local
        movable: int | None = None
        for index, (block_id, stream) in enumerate(self._remote):
            if block_id != block.block_id:
                continue
            if stream.position == span.position:
                return self._remote.pop(index)[1]
            if stream.in_flight_bytes <= _REWIND_BYTES and span.left >= stream.chunk_bytes // 4:
                movable = index
        return None if movable is None else self._remote.pop(movable)[1]

    async def _keep(self, block: BlockLocation, stream: RemoteBlock) -> None:
        self._remote.append((block.block_id, stream))
        if self._closed or len(self._remote) > _KEPT_REMOTE:
            await self._remote.pop(0)[1].close()

    async def _drop_streams(self, worker_id: int) -> None:
        """A worker failed: what else is open on it is not worth a try."""
        dropped = [stream for _, stream in self._remote if stream.worker_id == worker_id]
        self._remote = [entry for entry in self._remote if entry[1].worker_id != worker_id]
        for stream in dropped:
            await stream.drop()

    async def _open_any(self, block: BlockLocation, wanted_bytes: int) -> LocalBlock | RemoteBlock:
        """Open the block on the first replica that serves it: on this machine, else over the wire in random order."""
        failed = self._failed.get(block.block_id, set())
        workers = [worker for worker in block.workers if worker.worker_id not in failed]
        self._session.world.random.shuffle(workers)
        last: CurvfsError | None = None
        for worker in workers:
            if block.block_id in self._not_local or self._session.local.candidate(worker):
                continue
            file = (await open_local(self._session, worker, [block]))[0]
            if isinstance(file, Refused):
                self._not_local.add(block.block_id)
                continue
            return await self._keep_local(block, LocalBlock(self._session, block, worker.worker_id, file))
        # The nearest first.
        for worker in sorted(workers, key=lambda worker: self._session.local.candidate(worker) != ""):
            try:
                return await RemoteBlock.open(self._session, worker, block, wanted_bytes)
            except (RemoteError, TransportError, ProtocolError) as error:
                last = error
                self._failed.setdefault(block.block_id, set()).add(worker.worker_id)
                self._session.stats["replica_failures"] += 1
        raise last or self._nobody(block)

    async def _keep_local(self, block: BlockLocation, local: LocalBlock) -> LocalBlock:
        other = self._local.pop(block.block_id, None)
        if other is not None:
            other.close()
        self._local[block.block_id] = local
        while len(self._local) > self._kept_local:
            oldest = next(iter(self._local))
            self._local.pop(oldest).close()
        return local

    def _nobody(self, block: BlockLocation) -> NoAvailableWorker:
        return NoAvailableWorker(
            f"Cannot read {self._full_path}: no worker holds its block {block.block_id} "
            f"({block.length_bytes} bytes from offset {block.file_offset_bytes}); its replicas are lost or not up."
        )

    async def _locate_again(self, block: BlockLocation, cause: CurvfsError) -> BlockLocation:
        """The block as the master knows it now. Raises BlockNotFound when it is not this file's any more."""
        gone = BlockNotFound(
            f"Cannot read {self._full_path}: it was deleted or rewritten while it was being read.", errno_=errno.ESTALE
        )
        while True:
            try:
                answer = await self._calls.block_locations(self._full_path)
            except NotFound:
                raise gone from cause
            now = located_from_wire(answer, self.status.path)
            found = next((found for found in now.blocks if found.block_id == block.block_id), None)
            if found is None or now.status.id != self.status.id or found.length_bytes < block.length_bytes:
                raise gone from cause
            if found.workers:
                self._failed.pop(block.block_id, None)
                return found
            if not await self._session.masters.wait_unsettled():
                raise self._nobody(block) from cause
