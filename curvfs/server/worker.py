"""The worker's port: block streams, one at a time per connection, executed strictly in order.

A write's payload is received into one buffer and written from there; a read's payload goes from the page cache to the
socket without passing through here (``sendfile``), filled up with zeros where the block is longer than its file. What
is not in the page cache is read in a thread, so that nobody else waits for the disk. Short-circuit streams carry a path
instead of payload.

Specification sections 2.2, 4.7, 4.11 and 4.12.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

from curvfs.errors import ConnectionLost, LocalProtocolError
from curvfs.net.transport import FrameStream
from curvfs.server import convert
from curvfs.server.behaviour import Behaviour, ReadLength
from curvfs.server.blockstore import BlockStore, OpenBlock, os_errors
from curvfs.server.connection import explain
from curvfs.server.oplog import Log
from curvfs.server.pagecache import cached_bytes, read_cached
from curvfs.server.records import STORAGE_DISK
from curvfs.server.refusals import INVALID_ARGUMENT, IO, common, refusal
from curvfs.server.replies import enum_number
from curvfs.units import KIB, MIB
from curvfs.wire.codes import RequestStatus, RpcCode
from curvfs.wire.frame import MAX_DATA_BYTES, MAX_REQUEST_HEADER_BYTES, FrameHead
from curvfs.wire.messages import decode, pb
from curvfs.wire.session import Request, ServerSession
from curvfs.world import Buffer, Stream, World

#: Received beyond the frame at hand: enough for many small frames, too little to copy much payload.
_READ_AHEAD_BYTES = 8 * KIB
#: Payload up to here is read from the page cache and sent, or written, right away; more goes through sendfile or a
#: worker thread.
_INLINE_BYTES = 64 * KIB
_MAX_READ_AHEAD_LEN = 16 * MIB
#: Idle buffers for write payload that the worker keeps.
_SPARE_BUFFERS = 4

#: Blocks that a connection keeps space for, whose streams were left for the next one (the client writes their files).
_LEFT_MOST = 128

#: Replies that are sent together.
_REPLIES = 16

#: What is not in the page cache is read in pieces of this size.
_PIECE_BYTES = MIB

_ZEROS = memoryview(bytes(MIB))
_NOTHING = _ZEROS[:0]


@dataclass(slots=True)
class _Write:
    """An open write stream; no descriptor when the client writes the file itself."""

    req_id: int
    block_id: int
    capacity_bytes: int
    position: int
    generation: object
    fd: int | None


@dataclass(slots=True)
class _Batch:
    """Several blocks that are written in one stream (section 4.16)."""

    req_id: int
    writes: list[_Write]


@dataclass(slots=True)
class _Read:
    """An open read stream; no descriptor when the client reads the file itself."""

    req_id: int
    block_id: int
    length_bytes: int
    chunk_bytes: int
    position: int
    fd: int | None


@dataclass(frozen=True, slots=True)
class _Answer:
    """A reply: its header, then bytes that were read already, then bytes of a file, then zeros."""

    header: bytes = b""
    content: memoryview = _NOTHING
    fd: int = -1
    offset_bytes: int = 0
    file_bytes: int = 0
    zero_bytes: int = 0


_EMPTY = _Answer()


class Worker:
    """Everything that answers requests on the worker port."""

    def __init__(self, store: BlockStore, *, behaviour: Behaviour, world: World, log: Log) -> None:
        self.store = store
        self.behaviour = behaviour
        self.world = world
        self.log = log
        self.read_bytes = self.written_bytes = 0
        self._spare: list[bytearray] = []

    async def serve(self, stream: Stream) -> None:
        """Answer the requests of one connection until it closes or sends what is no request."""
        connection = _Connection(self, stream)
        try:
            await connection.run()
        finally:
            connection.close()

    def take_buffer(self, size_bytes: int) -> bytearray:
        """A buffer of at least this size, for one stream at a time."""
        while self._spare:
            spare = self._spare.pop()
            if len(spare) >= size_bytes:
                return spare
        return bytearray(size_bytes)

    def give_buffer(self, buffer: bytearray) -> None:
        if len(self._spare) < _SPARE_BUFFERS:
            self._spare.append(buffer)


class _Connection:
    """One connection and the stream that is open on it."""

    def __init__(self, worker: Worker, stream: Stream) -> None:
        self._worker = worker
        self._store = worker.store
        self._world = worker.world
        self._raw = stream
        self._frames = FrameStream(
            stream, read_ahead_bytes=_READ_AHEAD_BYTES, max_header_bytes=MAX_REQUEST_HEADER_BYTES
        )
        self._session = ServerSession()
        self._open: _Write | _Read | _Batch | None = None
        self._left: deque[_Write] = deque()
        self._buffer: bytearray | None = None
        self._replies: list[bytes] = []

    async def run(self) -> None:
        while (head := await self._frames.recv_head()) is not None:
            header = await self._frames.recv_header(head)
            request = self._session.receive(head, header)
            if request is None:
                continue
            payload = await self._payload(head)
            try:
                answer = await self._execute(request, payload)
            except LocalProtocolError:
                raise
            except Exception as error:  # whatever it is, the client gets an answer
                doing = f"{request.rpc.wire_name} {request.status.wire_name}"
                await self._reply(self._session.error(request, *explain(error, doing, self._worker.log)))
                continue
            if answer.content or answer.file_bytes or answer.zero_bytes:
                await self._send(request, answer)
            else:
                await self._reply(self._session.reply(request, answer.header))
                if isinstance(self._open, _Read):
                    self._give_buffer()

    def close(self) -> None:
        """The connection is gone. A block that was being written stays as it is."""
        self._finish()
        while self._left:
            self._forsake()

    # ----------------------------------------------------------------------------------------------------- frames

    async def _payload(self, head: FrameHead) -> memoryview:
        """The data of a frame, in our buffer where it is going to be written."""
        if head.data_len == 0:
            return _NOTHING
        if head.code != RpcCode.WRITE_BLOCK or head.request is not RequestStatus.RUNNING:
            await self._frames.discard(head.data_len)
            return _NOTHING
        view = self._buffer_of(head.data_len)
        await self._frames.recv_exactly(view)
        self._worker.written_bytes += head.data_len
        return view

    async def _reply(self, frame: bytes) -> None:
        """Send a reply without payload; while another request has come already, its reply goes along."""
        self._replies.append(frame)
        if not self._frames.has_more or len(self._replies) >= _REPLIES:
            await self._send_replies()

    async def _send_replies(self) -> None:
        replies, self._replies = self._replies, []
        if replies:
            await self._raw.send(*replies)

    async def _send(self, request: Request, answer: _Answer) -> None:
        await self._send_replies()
        data_len = len(answer.content) + answer.file_bytes + answer.zero_bytes
        self._worker.read_bytes += data_len
        prefix = self._session.reply(request, answer.header, data_len)
        if answer.content or not answer.file_bytes:
            await self._raw.send(prefix, answer.content)
            prefix = b""
        try:
            await self._send_file(prefix, answer.fd, answer.offset_bytes, answer.offset_bytes + answer.file_bytes)
        except OSError as error:  # the reply has begun, so all that can be done is to end it
            raise ConnectionLost(f"{self._raw.peer} was left in a reply: {error.strerror or error}.") from error
        if answer.zero_bytes:
            await self._raw.send(*_zeros(answer.zero_bytes))
        if isinstance(self._open, _Read):
            self._give_buffer()  # many readers hold a stream open, few are reading

    async def _send_file(self, prefix: bytes, fd: int, offset_bytes: int, end_bytes: int) -> None:
        """Send bytes of a file behind what the reply begins with: together, so that the client wakes up once."""
        while offset_bytes < end_bytes:
            cached = cached_bytes(self._world.disk, fd, offset_bytes, end_bytes - offset_bytes)
            if cached:
                await self._raw.send_file(fd, offset_bytes, cached, prefix)
                offset_bytes += cached
            else:
                piece = await self._read_piece(fd, offset_bytes, end_bytes - offset_bytes)
                await self._raw.send(prefix, piece)
                offset_bytes += len(piece)
            prefix = b""

    async def _read_piece(self, fd: int, offset_bytes: int, count_bytes: int) -> memoryview:
        """Some bytes of a file, from wherever they are, in our buffer. A file that just became shorter leaves zeros, as
        its missing end does."""
        piece = self._buffer_of(min(count_bytes, _PIECE_BYTES))
        disk = self._world.disk
        done = read_cached(disk, fd, piece, offset_bytes) if len(piece) <= _INLINE_BYTES else 0
        if done < len(piece):
            done += await self._world.threads.run(disk.pread_full, fd, piece[done:], offset_bytes + done)
            piece[done:] = _ZEROS[: len(piece) - done]
        return piece

    def _buffer_of(self, size_bytes: int) -> memoryview:
        if self._buffer is None or len(self._buffer) < size_bytes:
            self._give_buffer()
            self._buffer = self._worker.take_buffer(size_bytes)
        return memoryview(self._buffer)[:size_bytes]

    def _give_buffer(self) -> None:
        if self._buffer is not None:
            self._worker.give_buffer(self._buffer)
            self._buffer = None

    def _drop(self) -> None:
        """Close the open stream. What was not completed or cancelled stays as it is, without space kept for it."""
        was_open, self._open = self._open, None
        if was_open is None:
            return
        for stream in was_open.writes if isinstance(was_open, _Batch) else (was_open,):
            if stream.fd is not None:
                self._world.disk.close(stream.fd)
            if isinstance(stream, _Write):
                self._store.detach(stream.block_id, stream.generation)

    def _leave(self, *, lends: bool) -> None:
        """Another write is going to be opened. Where the client writes the files of both itself, it opens many in a
        row: this one keeps its space."""
        if not lends or not isinstance(self._open, _Write) or self._open.fd is not None:
            self._drop()
            return
        self._left.append(self._open)
        self._open = None
        if len(self._left) > _LEFT_MOST:
            self._forsake()

    def _forsake(self) -> None:
        left = self._left.popleft()
        self._store.detach(left.block_id, left.generation)

    def _finish(self) -> None:
        """The open stream is completed or cancelled."""
        self._drop()
        self._give_buffer()

    # --------------------------------------------------------------------------------------------------- requests

    async def _execute(self, request: Request, payload: memoryview) -> _Answer:
        handlers = _HANDLERS.get(request.code)
        if handlers is None:
            raise common(f"Unsupported request type: {request.rpc.wire_name}")
        handler = handlers.get(request.status)
        if handler is None:
            raise common("Unsupported request type")
        return await handler(self, request, payload)

    async def _write_open(self, request: Request, _: memoryview) -> _Answer:
        message: Any = decode(pb.BlockWriteRequest, request.header)
        self._leave(lends=message.short_circuit)
        self._open, reply = await self._begin(request, message, message.block)
        return _Answer(reply.SerializeToString())

    async def _begin(self, request: Request, message: Any, block: Any) -> tuple[_Write, pb.BlockWriteResponse]:
        """Open one block (ExtendedBlockProto) for writing, as the message of an Open says."""
        block_id, capacity = block.id, message.block_size
        _check_block_id(block_id)
        if capacity <= 0 or not 0 <= message.off <= capacity:
            raise common(f"Invalid write offset {message.off} of block size {capacity}")
        alloc = convert.alloc_of(block)
        begin = partial(self._store.begin, block_id, capacity, alloc, lend=not message.short_circuit)
        try:
            opened = await self._world.threads.run(begin) if self._store.needs_copy(block_id) else begin()
        except BaseException:
            self._store.remove_if_unowned(block_id)  # its file may have been deleted meanwhile
            raise
        stream = _Write(request.req_id, block_id, capacity, message.off, opened.generation, opened.fd)
        reply = pb.BlockWriteResponse(
            id=block_id,
            path=opened.path if message.short_circuit else None,
            off=message.off,
            block_size=capacity,
            storage_type=enum_number(STORAGE_DISK),
        )
        return stream, reply

    async def _write_running(self, request: Request, payload: memoryview) -> _Answer:
        stream = self._open
        header: Any = decode(pb.DataHeaderProto, request.header)
        if isinstance(stream, _Batch) and header.flush:
            _check_req_id(stream, request)
            return _EMPTY
        if not isinstance(stream, _Write) or stream.fd is None:
            raise common("Uninitialized")
        _check_req_id(stream, request)
        if header.flush:
            return _EMPTY  # acknowledged, and nothing to do: the bytes are in the file
        if request.header:
            if not 0 <= header.offset < stream.capacity_bytes:
                raise common(f"Invalid seek offset: {header.offset}, block size: {stream.capacity_bytes}")
            stream.position = header.offset
        await self._write(stream, payload)
        return _EMPTY

    async def _write(self, stream: _Write, payload: Buffer) -> None:
        """Write at the stream's position."""
        if stream.fd is None:
            raise common("Uninitialized")
        end = stream.position + len(payload)
        if end > stream.capacity_bytes:
            raise refusal(
                self._worker.behaviour.write_range_kind,
                f"Write range [{stream.position}, {end}) exceeds block size {stream.capacity_bytes}",
            )
        with self._store.writing(stream.block_id, stream.generation):
            if len(payload) <= _INLINE_BYTES:
                self._world.disk.pwrite_full(stream.fd, payload, stream.position)
            else:
                await self._world.threads.run(self._world.disk.pwrite_full, stream.fd, payload, stream.position)
        stream.position = end
        self._store.wrote(stream.block_id, end)

    async def _write_complete(self, request: Request, _: memoryview) -> _Answer:
        message = self._final(request)
        self._store.complete(message.block.id, message.block.block_size, message.block_size)
        self._finish_write()
        return _EMPTY

    async def _write_cancel(self, request: Request, _: memoryview) -> _Answer:
        message = self._final(request)
        self._store.cancel(message.block.id)
        self._finish_write()
        return _EMPTY

    def _finish_write(self) -> None:
        if isinstance(self._open, _Write):
            self._finish()

    def _final(self, request: Request) -> Any:
        """The message of a Complete or Cancel; it works on a connection without a stream too."""
        message: Any = decode(pb.BlockWriteRequest, request.header)
        _check_block_id(message.block.id)
        if self._open is not None and (self._worker.behaviour.binds_complete or isinstance(self._open, _Write)):
            _check_req_id(self._open, request)
            if not isinstance(self._open, _Write) or self._open.block_id != message.block.id:
                raise common(f"Block id mismatch, the open stream is not of block {message.block.id}")
        return message

    # ---------------------------------------------------------------------------------------------- batches (4.16)

    async def _batch_open(self, request: Request, _: memoryview) -> _Answer:
        message: Any = decode(pb.BlocksBatchWriteRequest, request.header)
        if not message.blocks:
            raise common("A batch needs blocks")
        self._drop()
        batch = self._open = _Batch(request.req_id, [])
        responses = []
        try:
            for block in message.blocks:
                stream, response = await self._begin(request, message, block)
                batch.writes.append(stream)
                responses.append(response)
        except BaseException:
            self._drop()
            raise
        return _Answer(pb.BlocksBatchWriteResponse(responses=responses).SerializeToString())

    async def _batch_running(self, request: Request, _: memoryview) -> _Answer:
        message: Any = decode(pb.FilesBatchWriteRequest, request.header)
        batch = self._batch(request)
        if len(message.files) != len(batch.writes):
            raise common(f"{len(message.files)} files were sent for {len(batch.writes)} blocks")
        for stream, file in zip(batch.writes, message.files, strict=True):
            await self._write(stream, file.content)
        return _Answer(pb.FilesBatchWriteResponse(results=[True] * len(batch.writes)).SerializeToString())

    async def _batch_complete(self, request: Request, _: memoryview) -> _Answer:
        message: Any = decode(pb.BlocksBatchCommitRequest, request.header)
        if message.cancel:
            return self._batch_end(request, lambda block: self._store.cancel(block.id))
        return self._batch_end(
            request, lambda block: self._store.complete(block.id, block.block_size, message.block_size)
        )

    async def _batch_cancel(self, request: Request, _: memoryview) -> _Answer:
        return self._batch_end(request, lambda block: self._store.cancel(block.id))

    def _batch_end(self, request: Request, end: Callable[[Any], None]) -> _Answer:
        """Complete or cancel each block that the request names, all of which must be of the batch."""
        message: Any = decode(pb.BlocksBatchCommitRequest, request.header)
        known = {stream.block_id for stream in self._batch(request).writes}
        for block in message.blocks:
            if block.id not in known:
                raise common(f"Block id mismatch, block {block.id} is not in the open batch")
        for block in message.blocks:
            end(block)
        self._finish()
        return _Answer(pb.BlocksBatchCommitResponse(results=[True] * len(message.blocks)).SerializeToString())

    def _batch(self, request: Request) -> _Batch:
        batch = self._open
        if not isinstance(batch, _Batch):
            raise common("Uninitialized")
        _check_req_id(batch, request)
        return batch

    # ----------------------------------------------------------------------------------------------------- reading

    async def _read_open(self, request: Request, _: memoryview) -> _Answer:
        message: Any = decode(pb.BlockReadRequest, request.header)
        limit = self._worker.behaviour.max_chunk_bytes
        _check_block_id(message.id)
        if limit is not None and message.chunk_size > limit:
            raise common(f"chunk_size {message.chunk_size} exceeds maximum allowed value {limit}")
        if message.chunk_size <= 0:
            raise common(f"chunk_size {message.chunk_size} must be greater than 0")
        if message.enable_read_ahead and message.read_ahead_len > _MAX_READ_AHEAD_LEN:
            raise common(f"read_ahead_len {message.read_ahead_len} exceeds maximum allowed value {_MAX_READ_AHEAD_LEN}")
        self._drop()
        block = self._store.open_read(message.id)
        length = {
            ReadLength.ASKED: message.len,
            ReadLength.LONGER: max(message.len, block.length_bytes),
            ReadLength.PHYSICAL: block.announced_bytes,
        }[self._worker.behaviour.read_length]
        stream = _Read(
            request.req_id, message.id, length, min(message.chunk_size, MAX_DATA_BYTES), message.off, block.fd
        )
        self._open = stream
        if not 0 <= message.off <= length:
            self._drop()
            raise common(f"Invalid read offset {message.off}, block length: {length}")
        granted = message.short_circuit and block.path is not None and self._is_whole(block, message.len)
        if granted:
            self._world.disk.close(block.fd)
            stream.fd = None
        reply = pb.BlockReadResponse(
            id=message.id,
            len=length,
            path=block.path if granted else None,
            storage_type=enum_number(STORAGE_DISK),
        )
        return _Answer(reply.SerializeToString())

    def _is_whole(self, block: OpenBlock, asked_bytes: int) -> bool:
        """Whether a client that reads the file itself finds what a stream would give it."""
        return self._goes_by_files or block.length_bytes >= asked_bytes

    @property
    def _goes_by_files(self) -> bool:
        return self._worker.behaviour.read_length is ReadLength.PHYSICAL

    async def _read_running(self, request: Request, _: memoryview) -> _Answer:
        stream = self._open
        if not isinstance(stream, _Read) or stream.fd is None:
            raise common("Uninitialized")
        file_bytes = self._world.disk.fstat(stream.fd).st_size
        length = file_bytes if self._goes_by_files else stream.length_bytes
        if request.header:
            header: Any = decode(pb.DataHeaderProto, request.header)
            if not 0 <= header.offset <= length:
                raise refusal(IO, f"Invalid seek offset: {header.offset}, block length: {length}")
            stream.position = header.offset
        offset = stream.position
        if offset >= length:
            raise refusal(IO, f"offset exceeds block length, length={length}, offset={offset}")
        count = min(stream.chunk_bytes, length - offset)
        stream.position = offset + count
        in_file = min(count, max(0, file_bytes - offset))
        content = _NOTHING
        with os_errors(f"reading block {stream.block_id}"):
            if in_file and (in_file <= _INLINE_BYTES or not cached_bytes(self._world.disk, stream.fd, offset, 1)):
                # Before the reply begins, because what fails now is an error reply.
                content = await self._read_piece(stream.fd, offset, in_file)
        there = len(content)
        return _Answer(b"", content, stream.fd, offset + there, in_file - there, count - in_file)

    async def _read_complete(self, request: Request, _: memoryview) -> _Answer:
        if not self._worker.behaviour.binds_complete:
            if isinstance(self._open, _Read):
                self._finish()
            return _EMPTY
        if not isinstance(self._open, _Read):
            raise common("Uninitialized")
        _check_req_id(self._open, request)
        self._finish()
        return _EMPTY


def _check_req_id(stream: _Write | _Read | _Batch, request: Request) -> None:
    if request.req_id != stream.req_id:
        raise common(f"Request id mismatch, expected {stream.req_id}, actual {request.req_id}")


def _check_block_id(block_id: int) -> None:
    if block_id < 0:
        raise refusal(INVALID_ARGUMENT, f"{block_id} is no block id")


def _zeros(count: int) -> Iterator[Buffer]:
    """``count`` zero bytes, not copied."""
    for offset in range(0, count, len(_ZEROS)):
        yield _ZEROS[: count - offset]


_Handler = Callable[[_Connection, Request, memoryview], Awaitable[_Answer]]

_HANDLERS: dict[int, dict[RequestStatus, _Handler]] = {
    RpcCode.WRITE_BLOCK: {
        RequestStatus.OPEN: _Connection._write_open,
        RequestStatus.RUNNING: _Connection._write_running,
        RequestStatus.COMPLETE: _Connection._write_complete,
        RequestStatus.CANCEL: _Connection._write_cancel,
    },
    RpcCode.READ_BLOCK: {
        RequestStatus.OPEN: _Connection._read_open,
        RequestStatus.RUNNING: _Connection._read_running,
        RequestStatus.COMPLETE: _Connection._read_complete,
    },
    RpcCode.WRITE_BLOCKS_BATCH: {
        RequestStatus.OPEN: _Connection._batch_open,
        RequestStatus.RUNNING: _Connection._batch_running,
        RequestStatus.COMPLETE: _Connection._batch_complete,
        RequestStatus.CANCEL: _Connection._batch_cancel,
    },
}
