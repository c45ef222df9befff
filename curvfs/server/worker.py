"""The worker's port: block streams, one at a time per connection, executed strictly in order.

A write's payload is received into one buffer and written from there; a read's payload goes from the file to the socket
without passing through here (``sendfile``), filled up with zeros where the block is longer than its file. Short-circuit
streams carry a path instead of payload.

Specification sections 2.2, 4.7, 4.11 and 4.12.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass
from typing import Any

from curvfs.errors import LocalProtocolError
from curvfs.net.transport import FrameStream
from curvfs.server import convert
from curvfs.server.behaviour import Behaviour
from curvfs.server.blockstore import BlockStore
from curvfs.server.connection import MAX_REQUEST_HEADER_BYTES, explain
from curvfs.server.oplog import Log
from curvfs.server.records import STORAGE_DISK
from curvfs.server.refusals import INVALID_ARGUMENT, common, refusal
from curvfs.units import KIB, MIB
from curvfs.wire.codes import RequestStatus, RpcCode
from curvfs.wire.frame import FrameHead
from curvfs.wire.messages import decode, pb
from curvfs.wire.session import Request, ServerSession
from curvfs.world import Buffer, Stream, World

#: Received beyond the frame at hand: enough for many small frames, too little to copy much payload.
_READ_AHEAD_BYTES = 4 * KIB
#: Payload up to here is read and sent, or written, right away; more goes through sendfile or a worker thread.
_INLINE_BYTES = 64 * KIB
_MAX_READ_AHEAD_LEN = 16 * MIB
#: Idle buffers for write payload that the worker keeps.
_SPARE_BUFFERS = 4

_ZEROS = memoryview(bytes(MIB))


@dataclass(slots=True)
class _Write:
    """An open write stream; no descriptor when the client writes the file itself."""

    req_id: int
    block_id: int
    capacity_bytes: int
    position: int
    fd: int | None


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
    """A reply: its header, then bytes of a file, then zeros."""

    header: bytes = b""
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
        self._open: _Write | _Read | None = None
        self._buffer: bytearray | None = None

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
                await self._raw.send(self._session.error(request, *explain(error, doing, self._worker.log)))
                continue
            await self._send(request, answer)

    def close(self) -> None:
        """Drop the open stream. A block that was being written stays as it is."""
        self._drop()
        self._give_buffer()

    # ----------------------------------------------------------------------------------------------------- frames

    async def _payload(self, head: FrameHead) -> memoryview:
        """The data of a frame, in our buffer where it is going to be written."""
        if head.data_len == 0:
            return _ZEROS[:0]
        if head.code != RpcCode.WRITE_BLOCK or head.request is not RequestStatus.RUNNING:
            await self._frames.discard(head.data_len)
            return _ZEROS[:0]
        if self._buffer is None or len(self._buffer) < head.data_len:
            self._give_buffer()
            self._buffer = self._worker.take_buffer(head.data_len)
        view = memoryview(self._buffer)[: head.data_len]
        await self._frames.recv_exactly(view)
        return view

    async def _send(self, request: Request, answer: _Answer) -> None:
        prefix = self._session.reply(request, answer.header, answer.file_bytes + answer.zero_bytes)
        if answer.file_bytes > _INLINE_BYTES:
            await self._raw.send(prefix)
            await self._raw.send_file(answer.fd, answer.offset_bytes, answer.file_bytes)
            if answer.zero_bytes:
                await self._raw.send(*_zeros(answer.zero_bytes))
            return
        payload: list[Buffer] = []
        if answer.file_bytes:
            content = memoryview(bytearray(answer.file_bytes))
            # A file that just became shorter leaves zeros, as its missing end does.
            self._world.disk.pread_full(answer.fd, content, answer.offset_bytes)
            payload.append(content)
        await self._raw.send(prefix, *payload, *_zeros(answer.zero_bytes))

    def _give_buffer(self) -> None:
        if self._buffer is not None:
            self._worker.give_buffer(self._buffer)
            self._buffer = None

    def _drop(self) -> None:
        """Forget the open stream without finishing it."""
        dropped, self._open = self._open, None
        if dropped is None:
            return
        if dropped.fd is not None:
            self._world.disk.close(dropped.fd)
        if isinstance(dropped, _Write):
            self._store.detach(dropped.block_id)

    def _finish(self) -> None:
        """The open stream is completed or cancelled."""
        finished, self._open = self._open, None
        if finished is not None and finished.fd is not None:
            self._world.disk.close(finished.fd)
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
        block_id, capacity = message.block.id, message.block_size
        _check_block_id(block_id)
        if capacity <= 0 or not 0 <= message.off <= capacity:
            raise common(f"Invalid write offset {message.off} of block size {capacity}")
        self._drop()
        alloc = convert.alloc_of(message.block)
        if self._store.needs_copy(block_id):
            path = await self._world.threads.run(self._store.begin, block_id, capacity, alloc)
        else:
            path = self._store.begin(block_id, capacity, alloc)
        stream = _Write(request.req_id, block_id, capacity, message.off, None)
        self._open = stream
        if not message.short_circuit:
            try:
                stream.fd = self._store.open_staging(block_id)
            except Exception:
                self._drop()
                raise
        reply = pb.BlockWriteResponse(
            id=block_id,
            path=path if message.short_circuit else None,
            off=message.off,
            block_size=capacity,
            storage_type=convert.enum_number(STORAGE_DISK),
        )
        return _Answer(reply.SerializeToString())

    async def _write_running(self, request: Request, payload: memoryview) -> _Answer:
        stream = self._open
        if not isinstance(stream, _Write) or stream.fd is None:
            raise common("Uninitialized")
        _check_req_id(stream, request)
        if request.header:
            header: Any = decode(pb.DataHeaderProto, request.header)
            if header.flush:
                return _EMPTY  # acknowledged, and nothing to do: the bytes are in the file
            if not 0 <= header.offset < stream.capacity_bytes:
                raise common(f"Invalid seek offset: {header.offset}, block size: {stream.capacity_bytes}")
            stream.position = header.offset
        end = stream.position + len(payload)
        if end > stream.capacity_bytes:
            raise refusal(
                self._worker.behaviour.block_range_kind,
                f"Write range [{stream.position}, {end}) exceeds block size {stream.capacity_bytes}",
            )
        with self._store.writing(stream.block_id):
            if len(payload) <= _INLINE_BYTES:
                self._world.disk.pwrite_full(stream.fd, payload, stream.position)
            else:
                await self._world.threads.run(self._world.disk.pwrite_full, stream.fd, payload, stream.position)
        stream.position = end
        self._store.wrote(stream.block_id, end, stream.capacity_bytes)
        return _EMPTY

    async def _write_complete(self, request: Request, _: memoryview) -> _Answer:
        message = self._final(request)
        self._store.complete(message.block.id, message.block.block_size, message.block_size)
        self._finish()
        return _EMPTY

    async def _write_cancel(self, request: Request, _: memoryview) -> _Answer:
        message = self._final(request)
        self._store.cancel(message.block.id)
        self._finish()
        return _EMPTY

    def _final(self, request: Request) -> Any:
        """The message of a Complete or Cancel; it works on a connection without a stream too."""
        message: Any = decode(pb.BlockWriteRequest, request.header)
        _check_block_id(message.block.id)
        if self._open is not None:
            _check_req_id(self._open, request)
            if not isinstance(self._open, _Write) or self._open.block_id != message.block.id:
                raise common(f"Block id mismatch, the open stream is of block {self._open.block_id}")
        return message

    async def _read_open(self, request: Request, _: memoryview) -> _Answer:
        message: Any = decode(pb.BlockReadRequest, request.header)
        limit = self._worker.behaviour.max_chunk_bytes
        _check_block_id(message.id)
        if message.chunk_size > limit:
            raise common(f"chunk_size {message.chunk_size} exceeds maximum allowed value {limit}")
        if message.chunk_size <= 0:
            raise common(f"chunk_size {message.chunk_size} must be greater than 0")
        if message.enable_read_ahead and message.read_ahead_len > _MAX_READ_AHEAD_LEN:
            raise common(f"read_ahead_len {message.read_ahead_len} exceeds maximum allowed value {_MAX_READ_AHEAD_LEN}")
        if not 0 <= message.off <= message.len:
            raise common(f"Invalid read offset {message.off}, block length: {message.len}")
        self._drop()
        block = self._store.open_read(message.id)
        stream = _Read(request.req_id, message.id, message.len, message.chunk_size, message.off, block.fd)
        self._open = stream
        granted = message.short_circuit and block.path is not None and block.length_bytes >= message.len
        if granted:
            self._world.disk.close(block.fd)
            stream.fd = None
        reply = pb.BlockReadResponse(
            id=message.id,
            len=message.len,
            path=block.path if granted else None,
            storage_type=convert.enum_number(STORAGE_DISK),
        )
        return _Answer(reply.SerializeToString())

    async def _read_running(self, request: Request, _: memoryview) -> _Answer:
        stream = self._open
        if not isinstance(stream, _Read) or stream.fd is None:
            raise common("Uninitialized")
        kind = self._worker.behaviour.block_range_kind
        if request.header:
            header: Any = decode(pb.DataHeaderProto, request.header)
            if not 0 <= header.offset <= stream.length_bytes:
                raise refusal(kind, f"Invalid seek offset: {header.offset}, block length: {stream.length_bytes}")
            stream.position = header.offset
        offset = stream.position
        if offset >= stream.length_bytes:
            raise refusal(kind, f"offset exceeds block length, length={stream.length_bytes}, offset={offset}")
        count = min(stream.chunk_bytes, stream.length_bytes - offset)
        stream.position = offset + count
        in_file = min(count, max(0, self._world.disk.fstat(stream.fd).st_size - offset))
        return _Answer(b"", stream.fd, offset, in_file, count - in_file)

    async def _read_complete(self, request: Request, _: memoryview) -> _Answer:
        if not isinstance(self._open, _Read):
            raise common("Uninitialized")
        _check_req_id(self._open, request)
        self._finish()
        return _EMPTY


def _check_req_id(stream: _Write | _Read, request: Request) -> None:
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
}
