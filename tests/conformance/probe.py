"""A probe that speaks frames: it sends what a test says and checks of each reply what holds for every reply.

The tests here are about servers, so nothing of the client is used: only the codec and the transport.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import trio
from conformance.rules import Version
from google.protobuf.message import Message

from curvfs.errors import ConnectionLost, RemoteError, from_reply
from curvfs.net.transport import FrameStream
from curvfs.units import MIB
from curvfs.wire.codes import (
    REQUEST_MESSAGE,
    RESPONSE_MESSAGE,
    UNARY_SEQ_ID,
    RequestStatus,
    ResponseStatus,
    RpcCode,
)
from curvfs.wire.frame import Frame, FrameHead, encode_head
from curvfs.wire.messages import decode, encode, map_value, pb
from curvfs.wire.records import decode_error
from curvfs.world import World

#: Nothing that a healthy server does takes this long.
TIMEOUT_S = 20.0

# Open flags (3.2).
RDONLY, WRONLY, RDWR = 0x0, 0x1, 0x2
CREAT, EXCL, TRUNC, APPEND = 0x40, 0x80, 0x200, 0x400
CREATE_NEW = WRONLY | CREAT | TRUNC

# Rename flags.
NO_REPLACE, EXCHANGE = 1, 2

# Error kinds (1.8).
IO, NOT_LEADER, EXISTS, NOT_FOUND, FILE_SIZE = 1, 2, 7, 8, 9
NOT_EMPTY, IN_PROGRESS, IS_DIR, NOT_DIR, INVALID = 11, 18, 26, 27, 28
BLOCK_NOT_FOUND, COMMON = 29, 10000

CLIENT_NAME = "c0ffee00-2222-4333-8444-555555555555"
OTHER_CLIENT = "0ddba11c-2222-4333-8444-555555555555"

Address = tuple[str, int]


def pattern(size_bytes: int, start: int = 0) -> bytes:
    """Bytes 0 to 255 over and over, from position ``start``."""
    first = bytes(range(256))
    turns = (size_bytes + 255) // 256 + 1
    shift = start % 256
    return (first * turns)[shift : shift + size_bytes]


@dataclass(frozen=True, slots=True)
class Target:
    """The cluster under test. ``standby`` is a second master that is not the leader, where one is known."""

    master: Address
    standby: Address | None
    version: Version
    embedded: bool
    #: Of :data:`~conformance.rules.NEEDS`, what is there.
    has: frozenset[str] = frozenset()


class Wire:
    """One connection, on which a test may send anything. Replies are checked only for being frames."""

    def __init__(self, stream: Any) -> None:
        self.stream = stream
        self.frames = FrameStream(stream)

    @classmethod
    async def connect(cls, address: Address) -> Wire:
        with trio.fail_after(TIMEOUT_S):
            return cls(await World.real().net.connect(*address))

    async def aclose(self) -> None:
        await self.frames.aclose()

    async def send_bytes(self, *raw: bytes) -> None:
        with trio.fail_after(TIMEOUT_S):
            await self.stream.send(*raw)

    async def send(
        self,
        code: int,
        status: RequestStatus,
        req_id: int,
        seq_id: int,
        header: bytes = b"",
        data: bytes = b"",
        response: ResponseStatus = ResponseStatus.UNDEFINED,
    ) -> None:
        head = encode_head(code, status, response, req_id, seq_id, len(header), len(data))
        with trio.fail_after(TIMEOUT_S):
            await self.frames.send(head + header, data)

    async def receive(self) -> Frame:
        """The next frame; ConnectionLost where the server closed instead."""
        with trio.fail_after(TIMEOUT_S):
            head = await self.frames.recv_head()
            if head is None:
                raise ConnectionLost("The server closed the connection.")
            header = await self.frames.recv_header(head)
            data = await self.frames.recv_data(head)
        assert isinstance(data, bytes)
        return Frame(head, header, data)

    async def closed_by_server(self) -> bool:
        """Whether the server closes (or resets) the connection without a reply."""
        try:
            await self.receive()
        except ConnectionLost:
            return True
        return False

    async def silent(self, for_s: float = 0.2) -> bool:
        """Whether nothing comes for a while."""
        with trio.move_on_after(for_s) as scope:
            await self.frames.recv_head()
        return scope.cancelled_caught


def missing_required(message: Message) -> list[str]:
    """Names of fields that the protocol requires and this message, or one inside it, lacks (3.1)."""
    missing = []
    for descriptor in message.DESCRIPTOR.fields:
        entry = map_value(descriptor)
        if entry is not None:
            if entry.message_type:
                for value in getattr(message, descriptor.name).values():
                    missing += missing_required(value)
        elif descriptor.is_repeated:
            if descriptor.message_type:
                for value in getattr(message, descriptor.name):
                    missing += missing_required(value)
        elif message.HasField(descriptor.name):
            if descriptor.message_type:
                missing += missing_required(getattr(message, descriptor.name))
        elif descriptor.GetOptions().Extensions[pb.required]:
            missing.append(f"{message.DESCRIPTOR.name}.{descriptor.name}")
    return missing


def parse_reply(sent: FrameHead, frame: Frame) -> Any:
    """The message in the reply to ``sent``; raises the RemoteError that it carries.

    Held of every reply: it echoes code, request status, req_id and seq_id (1.3); an error has no header and a whole
    record (1.7); a success has every required field (3.1).
    """
    head = frame.head
    assert (head.code, head.request, head.req_id, head.seq_id) == (sent.code, sent.request, sent.req_id, sent.seq_id)
    if head.response is ResponseStatus.ERROR:
        assert head.header_len == 0
        kind, text = decode_error(frame.data)
        assert len(frame.data) == 12 + len(text.encode()), "an error record is kind, length, text, length 0"
        raise from_reply(kind, text)
    assert head.response is ResponseStatus.SUCCESS
    cls = RESPONSE_MESSAGE.get((head.code, head.request))
    if cls is None:
        assert frame.header == b""
        return None
    message = decode(cls, frame.header)
    assert missing_required(message) == []
    return message


@dataclass(slots=True)
class BlockStream:
    """One block stream on a worker connection of its own; every method is one frame and its reply."""

    wire: Wire
    version: Version
    code: int = RpcCode.WRITE_BLOCK
    req_id: int = 0
    seq_id: int = -1
    #: The Open request, from which Complete and Cancel follow.
    opened: Any = None

    async def send(
        self, status: RequestStatus, message: Message | None = None, data: bytes = b"", req_id: int | None = None
    ) -> FrameHead:
        self.seq_id += 1
        header = b"" if message is None else encode(message)
        used = self.req_id if req_id is None else req_id
        await self.wire.send(self.code, status, used, self.seq_id, header, data)
        return Frame.make(self.code, status, ResponseStatus.UNDEFINED, used, self.seq_id, header, data).head

    async def frame(
        self, status: RequestStatus, message: Message | None = None, data: bytes = b"", req_id: int | None = None
    ) -> tuple[Any, bytes]:
        """Send one frame; returns the message and the data of its reply."""
        sent = await self.send(status, message, data, req_id)
        reply = await self.wire.receive()
        return parse_reply(sent, reply), reply.data

    async def open(self, code: int, message: Message) -> Any:
        self.code, self.opened, self.seq_id = code, message, -1
        self.req_id = World.real().random.request_id()
        return (await self.frame(RequestStatus.OPEN, message))[0]

    async def open_write(
        self,
        block: Any,
        *,
        block_size: int = MIB,
        off: int = 0,
        short_circuit: bool = False,
        client_name: str = CLIENT_NAME,
    ) -> Any:
        """WriteBlock Open of an ExtendedBlockProto."""
        request = pb.BlockWriteRequest(
            block=block,
            off=off,
            block_size=block_size,
            short_circuit=short_circuit,
            client_name=client_name,
            chunk_size=131072,
        )
        return await self.open(RpcCode.WRITE_BLOCK, request)

    async def write(self, data: bytes, *, seek: int | None = None) -> None:
        await self.frame(RequestStatus.RUNNING, seek_header(seek), data)

    async def flush(self, offset: int) -> None:
        await self.frame(RequestStatus.RUNNING, pb.DataHeaderProto(offset=offset, flush=True, is_last=False))

    def final(self, length: int) -> Any:
        """The header of Complete and Cancel: as Open, with the final length."""
        message = pb.BlockWriteRequest()
        message.CopyFrom(self.opened)
        message.block.block_size = length
        message.off = length
        message.short_circuit = False
        message.chunk_size = 0
        return message

    async def complete(self, length: int) -> None:
        await self.frame(RequestStatus.COMPLETE, self.final(length))

    async def cancel(self, length: int = 0) -> None:
        await self.frame(RequestStatus.CANCEL, self.final(length))

    async def open_read(
        self,
        block_id: int,
        length: int,
        *,
        off: int = 0,
        chunk_size: int = 131072,
        short_circuit: bool = False,
        read_ahead_len: int = 4 * MIB,
        enable_read_ahead: bool = True,
    ) -> Any:
        request = pb.BlockReadRequest(
            id=block_id,
            off=off,
            len=length,
            chunk_size=chunk_size,
            short_circuit=short_circuit,
            enable_read_ahead=enable_read_ahead,
            read_ahead_len=read_ahead_len,
            drop_cache_len=MIB,
        )
        return await self.open(RpcCode.READ_BLOCK, request)

    async def read(self, *, seek: int | None = None) -> bytes:
        return (await self.frame(RequestStatus.RUNNING, seek_header(seek)))[1]

    async def complete_read(self) -> None:
        await self.frame(RequestStatus.COMPLETE, self.opened)

    async def aclose(self) -> None:
        await self.wire.aclose()


def seek_header(seek: int | None) -> Any:
    return None if seek is None else pb.DataHeaderProto(offset=seek, flush=False, is_last=False)


def policy(**fields: Any) -> Any:
    return pb.StoragePolicyProto(
        **{"storage_type": pb.STORAGE_TYPE_PROTO_DISK, "state": pb.STORAGE_STATE_PROTO_CV, **fields}
    )


def file_options(**fields: Any) -> Any:
    """CreateFileOptsProto with blocks of 1 MiB; x_attr as a dict."""
    xattrs = fields.pop("x_attr", {})
    options = pb.CreateFileOptsProto(
        **{
            "create_flag": 0,
            "create_parent": False,
            "file_type": pb.FILE_TYPE_PROTO_FILE,
            "replicas": 1,
            "block_size": MIB,
            "storage_policy": policy(),
            "client_name": CLIENT_NAME,
            "mode": 0o644,
            "owner": "alice",
            "group": "staff",
            **fields,
        }
    )
    options.x_attr.update(xattrs)
    return options


def directory_options(**fields: Any) -> Any:
    xattrs = fields.pop("x_attr", {})
    options = pb.MkdirOptsProto(
        **{
            "create_parent": False,
            "mode": 0o755,
            "storage_policy": policy(),
            "owner": "alice",
            "group": "staff",
            **fields,
        }
    )
    options.x_attr.update(xattrs)
    return options


def commit(located: Any, length: int, workers: Iterable[int] | None = None) -> Any:
    """A CommitBlockProto for a LocatedBlockProto, on its own workers or on others."""
    ids = [worker.worker_id for worker in located.locs] if workers is None else list(workers)
    return pb.CommitBlockProto(
        block_id=located.block.id,
        block_len=length,
        locations=[
            pb.BlockLocationProto(worker_id=worker_id, storage_type=pb.STORAGE_TYPE_PROTO_DISK) for worker_id in ids
        ],
    )


@dataclass(slots=True)
class Probe:
    """A test's master connection and its fresh directory."""

    target: Target
    wire: Wire
    #: Absolute path of the directory that belongs to this test.
    directory: str
    _streams: list[BlockStream] = field(default_factory=list)

    @property
    def version(self) -> Version:
        return self.target.version

    def at(self, name: str) -> str:
        """The path of ``name`` in the test's directory."""
        return f"{self.directory}/{name}"

    async def aclose(self) -> None:
        for stream in self._streams:
            await stream.aclose()
        await self.wire.aclose()

    # ------------------------------------------------------------------------------------------------------ frames

    @asynccontextmanager
    async def connected(self) -> AsyncIterator[Wire]:
        """Another connection to the master."""
        wire = await Wire.connect(self.target.master)
        try:
            yield wire
        finally:
            await wire.aclose()

    async def worker(self, address: Any) -> BlockStream:
        """A connection to a worker (WorkerAddressProto), closed with the test."""
        stream = BlockStream(await Wire.connect((address.ip_addr, address.rpc_port)), self.version)
        self._streams.append(stream)
        return stream

    async def call(self, code: int, message: Message | None = None, *, req_id: int | None = None) -> Any:
        """One unary call; returns the message of the reply or raises its RemoteError."""
        req_id = World.real().random.request_id() if req_id is None else req_id
        header = b"" if message is None else encode(message)
        await self.wire.send(code, RequestStatus.RPC, req_id, UNARY_SEQ_ID, header)
        sent = Frame.make(code, RequestStatus.RPC, ResponseStatus.UNDEFINED, req_id, UNARY_SEQ_ID, header).head
        return parse_reply(sent, await self.wire.receive())

    # -------------------------------------------------------------------------------------------------- operations

    async def mkdir(self, path: str, *, req_id: int | None = None, **options: Any) -> Any:
        request = pb.MkdirRequest(path=path, opts=directory_options(**options))
        return (await self.call(RpcCode.MKDIR, request, req_id=req_id)).status

    async def create(self, path: str, flags: int = CREATE_NEW, *, req_id: int | None = None, **options: Any) -> Any:
        request = pb.CreateFileRequest(path=path, opts=file_options(**options), flags=flags)
        return (await self.call(RpcCode.CREATE_FILE, request, req_id=req_id)).file_status

    async def open(self, path: str, flags: int, *, req_id: int | None = None, **options: Any) -> Any:
        """OpenFile; returns FileBlocksProto."""
        request = pb.OpenFileRequest(path=path, opts=file_options(**options), flags=flags)
        return (await self.call(RpcCode.OPEN_FILE, request, req_id=req_id)).file_blocks

    async def stat(self, path: str) -> Any:
        return (await self.call(RpcCode.FILE_STATUS, pb.GetFileStatusRequest(path=path))).status

    async def exists(self, path: str) -> bool:
        return bool((await self.call(RpcCode.EXISTS, pb.ExistsRequest(path=path))).exists)

    async def delete(self, path: str, *, recursive: bool = False, req_id: int | None = None) -> Any:
        return await self.call(RpcCode.DELETE, pb.DeleteRequest(path=path, recursive=recursive), req_id=req_id)

    async def rename(self, src: str, dst: str, flags: int = 0, *, req_id: int | None = None) -> bool:
        request = pb.RenameRequest(src=src, dst=dst, flags=flags)
        return bool((await self.call(RpcCode.RENAME, request, req_id=req_id)).result)

    async def list(self, path: str) -> list[Any]:
        request = pb.ListStatusRequest(path=path, need_location=False)
        return list((await self.call(RpcCode.LIST_STATUS, request)).statuses)

    async def page(self, path: str, **options: Any) -> list[Any]:
        """ListOptions with ``limit`` and ``start_after``."""
        request = pb.ListOptionsRequest(path=path, options=pb.ListOptionsProto(**options))
        return list((await self.call(RpcCode.LIST_OPTIONS, request)).statuses)

    async def symlink(self, target: str, link: str, *, force: bool = False, req_id: int | None = None) -> None:
        request = pb.SymlinkRequest(target=target, link=link, force=force, mode=0o777, owner="alice", group="staff")
        await self.call(RpcCode.SYMLINK, request, req_id=req_id)

    async def link(self, src: str, dst: str, *, req_id: int | None = None) -> None:
        await self.call(RpcCode.LINK, pb.LinkRequest(src_path=src, dst_path=dst), req_id=req_id)

    async def set_attr(self, path: str, *, req_id: int | None = None, **options: Any) -> Any:
        added = options.pop("add_x_attr", {})
        opts = pb.SetAttrOptsProto(**{"recursive": False, **options})
        opts.add_x_attr.update(added)
        return (await self.call(RpcCode.SET_ATTR, pb.SetAttrRequest(path=path, opts=opts), req_id=req_id)).status

    async def info(self, **fields: Any) -> Any:
        return await self.call(RpcCode.GET_FILESYSTEM_INFO, pb.GetFilesystemInfoRequest(**fields))

    # ------------------------------------------------------------------------------------------------------ blocks

    async def locate(self, path: str) -> Any:
        """GetBlockLocations; returns FileBlocksProto."""
        return (await self.call(RpcCode.GET_BLOCK_LOCATIONS, pb.GetBlockLocationsRequest(path=path))).blocks

    async def add_block(
        self,
        path: str,
        *,
        inode_id: int | None = None,
        last: Any = None,
        file_len: int = 0,
        commits: Sequence[Any] = (),
        exclude: Sequence[int] = (),
        hostname: str = "nowhere",
    ) -> Any:
        """AddBlock; ``last`` is a LocatedBlockProto. Returns LocatedBlockProto, bare as it comes (2.1)."""
        request = pb.AddBlockRequest(
            path=path,
            commit_blocks=commits,
            exclude_workers=exclude,
            located=True,
            client_address=client_address(hostname),
            file_len=file_len,
            last_block=None if last is None else last.block,
            inode_id=inode_id,
        )
        return await self.call(RpcCode.ADD_BLOCK, request)

    async def complete(
        self,
        path: str,
        length: int,
        *commits: Any,
        only_flush: bool = False,
        client_name: str = CLIENT_NAME,
        inode_id: int | None = None,
        set_attr_opts: Any = None,
        return_file_blocks: bool | None = None,
    ) -> Any:
        """CompleteFile; returns its response."""
        request = pb.CompleteFileRequest(
            path=path,
            len=length,
            client_name=client_name,
            commit_blocks=commits,
            only_flush=only_flush,
            inode_id=inode_id,
            set_attr_opts=set_attr_opts,
            return_file_blocks=return_file_blocks,
        )
        return await self.call(RpcCode.COMPLETE_FILE, request)

    async def resize(self, path: str, length: int, *, truncate: bool = True, mode: int = 0, off: int = 0) -> Any:
        """ResizeFile; returns FileBlocksProto."""
        options = pb.FileAllocOptsProto(truncate=truncate, off=off, len=length, mode=mode)
        return (await self.call(RpcCode.RESIZE_FILE, pb.FileResizeRequest(path=path, opts=options))).file_blocks

    async def assign(self, path: str, block: Any, *, exclude: Sequence[int] = ()) -> Any:
        """AssignWorker for an ExtendedBlockProto; returns LocatedBlockProto."""
        request = pb.AssignWorkerRequest(
            path=path, block=block, exclude_workers=exclude, client_address=client_address("nowhere")
        )
        return (await self.call(RpcCode.ASSIGN_WORKER, request)).block

    # --------------------------------------------------------------------------------------------- whole sequences

    async def writer(self, located: Any, *, block_size: int = MIB, off: int = 0, short_circuit: bool = False) -> Any:
        """A write stream open on the first worker of a LocatedBlockProto."""
        stream = await self.worker(located.locs[0])
        await stream.open_write(located.block, block_size=block_size, off=off, short_circuit=short_circuit)
        return stream

    async def reader(self, located: Any, **options: Any) -> BlockStream:
        """A read stream open on the first worker of a LocatedBlockProto, for the block's whole length."""
        stream = await self.worker(located.locs[0])
        await stream.open_read(located.block.id, located.block.block_size, **options)
        return stream

    async def fill(self, located: Any, data: bytes, *, block_size: int = MIB) -> Any:
        """Write a new block on its first worker; returns the commit."""
        stream = await self.writer(located, block_size=block_size)
        if data:
            await stream.write(data)
        await stream.complete(len(data))
        return commit(located, len(data), [located.locs[0].worker_id])

    async def put(
        self,
        path: str,
        data: bytes,
        *,
        block_size: int = MIB,
        worker: Any = None,
        hostname: str = "nowhere",
        **options: Any,
    ) -> Any:
        """Write a whole file as 4.6 says, on ``worker`` where one is given; returns its FileBlocksProto."""
        await self.create(path, block_size=block_size, **options)
        commits: list[Any] = []
        last = None
        for start in range(0, len(data), block_size):
            last = await self.add_block(path, last=last, file_len=start, commits=commits, hostname=hostname)
            if worker is not None:
                del last.locs[:]
                last.locs.append(worker)
            commits = [await self.fill(last, data[start : start + block_size], block_size=block_size)]
        await self.complete(path, len(data), *commits)
        return await self.locate(path)

    async def get(self, path: str) -> bytes:
        """Read a whole file as 4.11 says, holes as zeros."""
        content = b""
        for located in (await self.locate(path)).block_locs:
            content += await self.get_block(located)
        return content

    async def get_block(self, located: Any) -> bytes:
        length = located.block.block_size
        if not located.locs:
            return bytes(length)
        stream = await self.reader(located)
        content = b""
        while len(content) < length:
            content += (await stream.read())[: length - len(content)]
        await stream.complete_read()
        return content


def client_address(hostname: str) -> Any:
    return pb.ClientAddressProto(client_name=CLIENT_NAME, hostname=hostname, ip_addr="127.0.0.1", port=0)


@asynccontextmanager
async def refused(*kinds: int, text: str = "") -> AsyncIterator[list[RemoteError]]:
    """The block gets an error reply of one of ``kinds``, with ``text`` in it whatever the case."""
    caught: list[RemoteError] = []
    try:
        yield caught
    except RemoteError as error:
        caught.append(error)
        assert error.kind in kinds, f"refused with kind {error.kind}: {error.text}"
        assert text.lower() in error.text.lower()
    assert caught, f"the server should have refused with one of {kinds}"


def request_class(code: int) -> type[Message]:
    return REQUEST_MESSAGE[(code, RequestStatus.RPC)]
