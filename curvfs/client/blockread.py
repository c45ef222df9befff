"""Reading one block: from its file on this machine, or over the wire (specification 4.11, 4.12)."""

from __future__ import annotations

import errno
from collections.abc import Sequence
from functools import partial

import trio

from curvfs.client.diskcalls import CALL_BYTES, DiskCall, SharedFile, read_into
from curvfs.client.localfiles import LocalFile, Refused
from curvfs.client.records import BlockLocation, WorkerAddress
from curvfs.client.session import Session, worker_key
from curvfs.errors import (
    BlockNotFound,
    CurvfsError,
    DeadlineExceeded,
    ProtocolError,
    RemoteError,
    TransportError,
    from_os_error,
)
from curvfs.net.workers import BlockChannel
from curvfs.units import KIB, MIB, align_up
from curvfs.wire.codes import RpcCode
from curvfs.wire.messages import decode, encode, pb

_READ_AHEAD_BYTES = 4 * MIB
_MIN_CHUNK_BYTES = 64 * KIB
#: How much of a block is compared with its local file, once per worker.
_PROOF_BYTES = 4 * KIB
_ZEROS = memoryview(bytes(MIB))


def fill_with_zeros(view: memoryview) -> None:
    """Holes read as zeros."""
    for start in range(0, len(view), len(_ZEROS)):
        piece = view[start : start + len(_ZEROS)]
        piece[:] = _ZEROS[: len(piece)]


class Span:
    """Bytes of one block that are wanted in memory, and how many of them are there already.

    A replica that fails in the middle leaves the span half done; the next one goes on from there.
    """

    __slots__ = ("_offset", "_view", "done")

    def __init__(self, view: memoryview, offset_bytes: int) -> None:
        self._view = view
        self._offset = offset_bytes
        self.done = 0

    @property
    def rest(self) -> memoryview:
        return self._view[self.done :]

    @property
    def left(self) -> int:
        return len(self._view) - self.done

    @property
    def position(self) -> int:
        """Offset in the block of the next byte wanted."""
        return self._offset + self.done

    @property
    def end(self) -> int:
        return self._offset + len(self._view)


def _read_request(session: Session, block: BlockLocation, **fields: bool | int) -> bytes:
    """BlockReadRequest; ``len`` is the length of the whole block, not of what is read."""
    request = pb.BlockReadRequest(
        id=block.block_id,
        off=0,
        len=block.length_bytes,
        enable_read_ahead=True,
        read_ahead_len=_READ_AHEAD_BYTES,
        component_info=session.component_info,
    )
    for name, value in fields.items():
        setattr(request, name, value)
    return encode(request)


class LocalBlock:
    """A block whose file is open on this machine. Several tasks may read at once; the last to let go closes it."""

    def __init__(self, session: Session, block: BlockLocation, worker_id: int, file: LocalFile) -> None:
        self._session = session
        self._block = block
        self._worker_id = worker_id
        self._file = SharedFile(session.world, file.fd)

    async def read(self, span: Span) -> None:
        """Fill the span. Raises CurvfsError when the disk fails or hangs, or when the file has become too short."""
        disk, doing = self._session.local.disk, f"Cannot read the local file of block {self._block.block_id}"
        while span.left:
            view, position = span.rest[:CALL_BYTES], span.position
            self._file.use()
            try:
                done = await disk.call(self._worker_id, partial(self._read, view, position), release=self._file.close)
            except OSError as error:
                raise from_os_error(error, doing=doing) from error
            except DeadlineExceeded as error:
                raise CurvfsError(f"{doing}: {error}", errno_=errno.ETIMEDOUT) from error
            span.done += done
            self._session.stats["bytes_read_local"] += done
            if done < len(view):
                break
        if span.left:
            if not self._block.is_resized:
                raise BlockNotFound(f"The local file of block {self._block.block_id} ends before the block does.")
            fill_with_zeros(span.rest)
            span.done += span.left

    def _read(self, view: memoryview, position: int, call: DiskCall[int]) -> int:
        return read_into(self._session.world.disk, self._file.fd, view, position, call)

    def close(self) -> None:
        """Let go; once for whoever opened it."""
        self._file.close()


class RemoteBlock:
    """An open read stream of one block. One task at a time.

    Running frames are requested ahead of the bytes wanted: at most ``window`` in flight, beyond the span at hand only
    while the reader goes on where it left off. A frame may be consumed in pieces, each straight into its buffer.
    """

    def __init__(self, session: Session, block: BlockLocation, channel: BlockChannel, physical_bytes: int, chunk: int):
        self._session = session
        self._block = block
        self._channel = channel
        #: Where the bytes end that the worker has; what lies between here and the block's end reads as zeros.
        self._end = min(physical_bytes, block.length_bytes)
        self._window = session.config.window
        self.chunk_bytes = chunk
        #: Offset of the next payload byte to be received, and of the next one to be asked for.
        self.position = 0
        self._asked = 0
        self._frame_left = 0
        self._used = self._in_sequence = False

    @property
    def worker_id(self) -> int:
        return self._channel.worker.worker_id

    @property
    def in_flight_bytes(self) -> int:
        """Bytes asked for and not received: what a seek throws away."""
        return self._asked - self.position

    @classmethod
    async def open(
        cls, session: Session, worker: WorkerAddress, block: BlockLocation, wanted_bytes: int
    ) -> RemoteBlock:
        """Open a stream whose frames suit reads of ``wanted_bytes``. Raises RemoteError and TransportError."""
        chunk = min(max(align_up(wanted_bytes, 4 * KIB), _MIN_CHUNK_BYTES), session.config.chunk_size_bytes)
        doing = f"read block {block.block_id}"
        request = _read_request(session, block, chunk_size=chunk, short_circuit=False)
        channel, header = await session.workers.open(worker_key(worker), RpcCode.READ_BLOCK, request, doing=doing)
        physical_bytes = decode(pb.BlockReadResponse, header).len
        if physical_bytes < block.length_bytes and not block.is_resized:
            # Only v0.3.2-alpha tells the physical length, and it sends nothing in place of what is missing (8.4).
            await channel.release()
            raise BlockNotFound(
                f"Cannot {doing} on {channel.worker}: it has {physical_bytes} of {block.length_bytes} bytes."
            )
        return cls(session, block, channel, physical_bytes, chunk)

    async def read(self, span: Span) -> None:
        """Fill the span. Raises RemoteError, TransportError, ProtocolError: the stream is beyond use then."""
        self._in_sequence = self._used and span.position == self.position
        self._used = True
        if span.position != self.position:
            await self._seek(span.position)
        while span.left and span.position < self._end:
            await self._ask_ahead(span.end)
            if not self._frame_left:
                await self._next_frame()
            received = await self._channel.receive_payload(span.rest[: self._frame_left])
            self._frame_left -= received
            self.position += received
            span.done += received
            self._session.stats["bytes_read_remote"] += received
        if span.left:
            fill_with_zeros(span.rest)
            span.done += span.left

    async def close(self) -> None:
        """End the stream; the connection is kept when nothing is under way on it. Never raises, and takes
        ``close_timeout_s`` at most."""
        with trio.move_on_after(self._session.config.close_timeout_s, shield=True):
            try:
                if not self._channel.outstanding and not self._channel.payload_left:
                    await self._channel.finish(_read_request(self._session, self._block))
            except CurvfsError:
                pass  # a courtesy to the worker; the connection is dropped instead
        await self._channel.release()

    async def drop(self) -> None:
        """Let go of the connection, which is closed. Never raises."""
        await self._channel.release()

    async def _seek(self, position: int) -> None:
        await self._channel.drain()
        self._frame_left = 0
        self.position = self._asked = position
        if position < self._end:
            await self._ask(encode(pb.DataHeaderProto(offset=position, flush=False, is_last=False)))

    async def _ask_ahead(self, wanted_end: int) -> None:
        until = wanted_end + (self._window * self.chunk_bytes if self._in_sequence else 0)
        while self._asked < min(until, self._end) and self._channel.outstanding < self._window:
            await self._ask(b"")

    async def _ask(self, header: bytes) -> None:
        await self._channel.running(header)
        self._asked = min(self._asked + self.chunk_bytes, self._end)

    async def _next_frame(self) -> None:
        if self._channel.payload_left:  # what a worker sent beyond the end (v0.3.2-alpha does)
            await self._channel.discard_payload()
        expected = min(self.chunk_bytes, self._end - self.position)
        reply = await self._channel.reply()
        if reply.data_len < expected:
            raise RemoteError(
                f"Cannot read block {self._block.block_id} on {self._channel.worker}: {reply.data_len} bytes came at "
                f"offset {self.position} where {expected} were due."
            )
        self._frame_left = expected


async def open_local(
    session: Session, worker: WorkerAddress, blocks: Sequence[BlockLocation], *, direct: bool = False
) -> list[LocalFile | Refused]:
    """The verified files of blocks that ``worker`` holds, or why there is none: one round trip for all of them (and
    another the first time)."""
    reason = session.local.candidate(worker)
    if reason:
        return [Refused(reason) for _ in blocks]
    streams = [
        (
            _read_request(session, block, chunk_size=_MIN_CHUNK_BYTES, short_circuit=True),
            _read_request(session, block),
        )
        for block in blocks
    ]
    doing = f"find the file of block {blocks[0].block_id}"
    try:
        answers = await session.workers.ask(worker_key(worker), RpcCode.READ_BLOCK, streams, doing=doing)
    except (TransportError, ProtocolError):
        session.local.count("worker_unreachable")
        return [Refused("worker_unreachable") for _ in blocks]

    def open_all(direct: bool, _: DiskCall[list[LocalFile | Refused]]) -> list[LocalFile | Refused]:
        return [
            _open_granted(session, worker, block, answer, direct) for block, answer in zip(blocks, answers, strict=True)
        ]

    def close_all(files: list[LocalFile | Refused]) -> None:
        for file in files:
            if isinstance(file, LocalFile):
                session.world.disk.close(file.fd)

    async def on_disk(direct: bool) -> list[LocalFile | Refused]:
        try:
            return await session.local.disk.call(worker.worker_id, partial(open_all, direct), undo=close_all)
        except DeadlineExceeded:
            session.local.count("stuck")
            return [Refused("stuck") for _ in blocks]

    proven = session.local.is_proven(worker)
    files = await on_disk(direct and proven)
    if proven:
        return files
    found = [index for index, file in enumerate(files) if isinstance(file, LocalFile)]
    if not found:
        return files
    sample = files.pop(found[0])
    assert isinstance(sample, LocalFile)
    close_all(files)
    refused = await _prove(session, worker, blocks[found[0]], sample)
    return [refused for _ in blocks] if refused is not None else await on_disk(direct)


async def _prove(session: Session, worker: WorkerAddress, block: BlockLocation, file: LocalFile) -> Refused | None:
    """Compare the first bytes of a block's file, open without O_DIRECT, with what the worker sends, and close it. None
    when they are the same."""
    count = min(block.length_bytes, _PROOF_BYTES)
    there, here = bytearray(count), bytearray(count)
    world, fd = session.world, file.fd
    try:
        await session.local.disk.call(
            worker.worker_id,
            partial(read_into, world.disk, fd, memoryview(here), 0),
            release=partial(world.disk.close, fd),
        )
        stream = await RemoteBlock.open(session, worker, block, count)
        try:
            await stream.read(Span(memoryview(there), 0))
        finally:
            await stream.close()
    except (CurvfsError, OSError):
        session.local.count("unproven")
        return Refused("unproven")
    session.local.prove(worker, same=here == there)
    return None if here == there else Refused("other_bytes")


def _open_granted(
    session: Session, worker: WorkerAddress, block: BlockLocation, answer: bytes | RemoteError, direct: bool
) -> LocalFile | Refused:
    try:
        path = "" if isinstance(answer, RemoteError) else decode(pb.BlockReadResponse, answer).path
        if not path:
            reason = "not_granted" if isinstance(answer, bytes) else "worker_refused"
            session.local.count(reason)
            raise Refused(reason)
        needed_bytes = 0 if block.is_resized else block.length_bytes
        return session.local.open(path, block.block_id, worker.worker_id, size_bytes=needed_bytes, direct=direct)
    except Refused as refused:
        return refused
