"""A client with no opinions, for tests of the server: it sends exactly the frame that it is told to.

``async with connected(host, port) as raw``, then ``raw.call(code, message)`` for unary requests and ``raw.exchange``
for anything else.
"""

from __future__ import annotations

import itertools
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

from google.protobuf.message import Message

from curvfs.errors import RemoteError, from_reply
from curvfs.net.transport import FrameStream
from curvfs.wire.codes import RESPONSE_MESSAGE, RequestStatus, ResponseStatus, RpcCode
from curvfs.wire.frame import Frame, FrameHead
from curvfs.wire.messages import decode, encode, pb
from curvfs.wire.records import decode_error
from curvfs.world import RealNetwork, Stream

CLIENT = "11111111-2222-4333-8444-555555555555"
BLOCK = 1 << 20

_IDS = itertools.count(1000)


@dataclass(frozen=True)
class Answer:
    """One reply frame."""

    head: FrameHead
    header: bytes
    data: bytes

    @property
    def error(self) -> RemoteError | None:
        if self.head.response is ResponseStatus.SUCCESS:
            return None
        return from_reply(*decode_error(self.data))


class Raw:
    def __init__(self, stream: Stream) -> None:
        self.stream = stream
        self.frames = FrameStream(stream, read_ahead_bytes=65536)

    def new_id(self) -> int:
        """Different from every other of this run: an id that comes back is taken for a replay."""
        return next(_IDS)

    async def send(
        self,
        code: int,
        status: RequestStatus,
        header: bytes = b"",
        data: bytes = b"",
        *,
        req_id: int,
        seq_id: int = -1,
    ) -> None:
        frame = Frame.make(code, status, ResponseStatus.UNDEFINED, req_id, seq_id, header, data)
        await self.stream.send(frame.encode())

    async def receive(self) -> Answer | None:
        head = await self.frames.recv_head()
        if head is None:
            return None
        header = await self.frames.recv_header(head)
        data = await self.frames.recv_data(head)
        assert isinstance(data, bytes)
        return Answer(head, header, data)

    async def exchange(
        self,
        code: int,
        status: RequestStatus,
        header: bytes = b"",
        data: bytes = b"",
        *,
        req_id: int,
        seq_id: int = -1,
    ) -> Answer:
        await self.send(code, status, header, data, req_id=req_id, seq_id=seq_id)
        answer = await self.receive()
        assert answer is not None, "the server closed the connection"
        echoed = (answer.head.code, answer.head.request, answer.head.req_id, answer.head.seq_id)
        assert echoed == (code, status, req_id, seq_id)
        return answer

    async def call(self, code: RpcCode, message: Message | None = None, *, req_id: int | None = None) -> Any:
        """A unary request; the reply message. Raises what the error reply says."""
        header = b"" if message is None else encode(message)
        req_id = self.new_id() if req_id is None else req_id
        answer = await self.exchange(code, RequestStatus.RPC, header, req_id=req_id)
        if answer.error is not None:
            raise answer.error
        reply = decode(RESPONSE_MESSAGE[code, RequestStatus.RPC], answer.header)
        assert len(encode(reply)) == len(answer.header), "the reply lacks a field that the protocol requires"
        return reply

    # ---- what most tests need of a master

    def create_options(self, **fields: Any) -> Any:
        options = {"create_parent": True, "block_size": BLOCK, "replicas": 1, "client_name": CLIENT, "mode": 0o644}
        return pb.CreateFileOptsProto(**(options | fields))

    async def create(self, path: str, flags: int = 0x241, *, req_id: int | None = None, **fields: Any) -> Any:
        request = pb.CreateFileRequest(path=path, opts=self.create_options(**fields), flags=flags)
        return (await self.call(RpcCode.CREATE_FILE, request, req_id=req_id)).file_status

    async def open_file(self, path: str, flags: int, **fields: Any) -> Any:
        request = pb.OpenFileRequest(path=path, opts=self.create_options(**fields), flags=flags)
        return (await self.call(RpcCode.OPEN_FILE, request)).file_blocks

    async def add_block(
        self, path: str, *, last: int | None = None, length: int = 0, commits: Any = (), **fields: Any
    ) -> Any:
        request = pb.AddBlockRequest(
            path=path,
            file_len=length,
            commit_blocks=commits,
            client_address=pb.ClientAddressProto(client_name=CLIENT, hostname="here"),
            last_block=None if last is None else pb.ExtendedBlockProto(id=last),
            **fields,
        )
        return await self.call(RpcCode.ADD_BLOCK, request)

    async def complete(self, path: str, length: int, commits: Any = (), **fields: Any) -> Any:
        options = {"client_name": CLIENT} | fields
        request = pb.CompleteFileRequest(path=path, len=length, commit_blocks=commits, **options)
        return await self.call(RpcCode.COMPLETE_FILE, request)

    async def locate(self, path: str) -> Any:
        return (await self.call(RpcCode.GET_BLOCK_LOCATIONS, pb.GetBlockLocationsRequest(path=path))).blocks

    async def stat(self, path: str) -> Any:
        return (await self.call(RpcCode.FILE_STATUS, pb.GetFileStatusRequest(path=path))).status

    async def mkdir(self, path: str, *, parents: bool = True, **fields: Any) -> Any:
        options = pb.MkdirOptsProto(create_parent=parents, mode=0o755, **fields)
        return (await self.call(RpcCode.MKDIR, pb.MkdirRequest(path=path, opts=options))).status

    async def rename(self, src: str, dst: str, flags: int = 0, *, req_id: int | None = None) -> bool:
        request = pb.RenameRequest(src=src, dst=dst, flags=flags)
        return bool((await self.call(RpcCode.RENAME, request, req_id=req_id)).result)

    async def delete(self, path: str, *, recursive: bool = False, req_id: int | None = None) -> Any:
        request = pb.DeleteRequest(path=path, recursive=recursive)
        return (await self.call(RpcCode.DELETE, request, req_id=req_id)).res

    async def resize(self, path: str, length: int, *, truncate: bool = True, mode: int = 0) -> Any:
        options = pb.FileAllocOptsProto(truncate=truncate, off=0, len=length, mode=mode)
        return (await self.call(RpcCode.RESIZE_FILE, pb.FileResizeRequest(path=path, opts=options))).file_blocks


@asynccontextmanager
async def connected(host: str, port: int) -> AsyncIterator[Raw]:
    stream = await RealNetwork().connect(host, port)
    try:
        yield Raw(stream)
    finally:
        await stream.aclose()


class RawBlock:
    """One block stream on a worker connection, frame by frame."""

    def __init__(self, raw: Raw, block: Any, *, capacity: int = BLOCK) -> None:
        self.raw = raw
        self.block = block
        self.capacity = capacity
        self.req_id = raw.new_id()
        self.seq_id = 0

    async def frame(self, code: RpcCode, status: RequestStatus, header: bytes = b"", data: bytes = b"") -> Answer:
        answer = await self.raw.exchange(code, status, header, data, req_id=self.req_id, seq_id=self.seq_id)
        self.seq_id += 1
        if answer.error is not None:
            raise answer.error
        return answer

    def _write_request(self, length: int | None, offset: int, short_circuit: bool) -> bytes:
        block = pb.ExtendedBlockProto()
        block.CopyFrom(self.block)
        if length is not None:
            block.block_size = length
        return encode(
            pb.BlockWriteRequest(
                block=block,
                off=offset,
                block_size=self.capacity,
                short_circuit=short_circuit,
                client_name=CLIENT,
                chunk_size=131072,
            )
        )

    async def open_write(self, offset: int = 0, *, short_circuit: bool = False) -> Any:
        header = self._write_request(None, offset, short_circuit)
        answer = await self.frame(RpcCode.WRITE_BLOCK, RequestStatus.OPEN, header)
        return decode(pb.BlockWriteResponse, answer.header)

    async def write(self, data: bytes, offset: int | None = None, *, flush: bool = False) -> None:
        header = b"" if offset is None else encode(pb.DataHeaderProto(offset=offset, flush=flush))
        await self.frame(RpcCode.WRITE_BLOCK, RequestStatus.RUNNING, header, data)

    async def complete(self, length: int) -> None:
        header = self._write_request(length, length, False)
        await self.frame(RpcCode.WRITE_BLOCK, RequestStatus.COMPLETE, header)

    async def cancel(self) -> None:
        header = self._write_request(None, 0, False)
        await self.frame(RpcCode.WRITE_BLOCK, RequestStatus.CANCEL, header)

    async def open_read(
        self, length: int, offset: int = 0, *, chunk: int = 65536, short_circuit: bool = False, **fields: Any
    ) -> Any:
        request = pb.BlockReadRequest(
            id=self.block.id, off=offset, len=length, chunk_size=chunk, short_circuit=short_circuit, **fields
        )
        answer = await self.frame(RpcCode.READ_BLOCK, RequestStatus.OPEN, encode(request))
        return decode(pb.BlockReadResponse, answer.header)

    async def read(self, offset: int | None = None) -> bytes:
        header = b"" if offset is None else encode(pb.DataHeaderProto(offset=offset))
        return (await self.frame(RpcCode.READ_BLOCK, RequestStatus.RUNNING, header)).data

    async def complete_read(self) -> None:
        header = encode(pb.BlockReadRequest(id=self.block.id))
        await self.frame(RpcCode.READ_BLOCK, RequestStatus.COMPLETE, header)


def commit_of(block: Any, length: int, *workers: int) -> Any:
    """A CommitBlockProto for a LocatedBlockProto."""
    ids = workers or tuple(address.worker_id for address in block.locs)
    return pb.CommitBlockProto(
        block_id=block.block.id,
        block_len=length,
        locations=[
            pb.BlockLocationProto(worker_id=worker_id, storage_type=pb.STORAGE_TYPE_PROTO_DISK) for worker_id in ids
        ],
    )
