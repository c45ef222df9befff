"""Servers that misbehave on purpose: real sockets, real frames, answers made up by each test."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import trio
from google.protobuf.message import Message

from curvfs.errors import CurvfsError
from curvfs.net.transport import FrameStream
from curvfs.wire.codes import REQUEST_MESSAGE, RequestStatus, RpcCode
from curvfs.wire.messages import decode, encode, pb
from curvfs.wire.session import Request, ServerSession
from curvfs.world import Stream, World


class Hang(Exception):
    """Do not answer; keep the connection."""


class Close(Exception):
    """Close the connection instead of answering; ``first`` is sent before that."""

    def __init__(self, first: bytes = b"") -> None:
        super().__init__()
        self.first = first


class Refuse(Exception):
    """An error reply."""

    def __init__(self, kind: int, text: str = "made up") -> None:
        super().__init__(text)
        self.kind = kind
        self.text = text


class Raw(Exception):
    """These bytes instead of a reply."""

    def __init__(self, content: bytes) -> None:
        super().__init__()
        self.content = content


#: Answers one request: a message for the header, or (message or None, data).
Answer = Message | tuple[Message | None, bytes] | None
Handler = Callable[[Request, Message | None], Answer | Awaitable[Answer]]


@dataclass
class Fake:
    """A server on a free loopback port. ``handle`` maps a code to what answers it; ``seen`` is every request."""

    handle: dict[RpcCode, Handler] = field(default_factory=dict)
    seen: list[tuple[RpcCode, Request, Message | None]] = field(default_factory=list)
    port: int = 0
    connections: int = 0
    #: Close the connection after so many replies.
    replies_per_connection: int | None = None

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    @property
    def url(self) -> str:
        return f"curvine://{self.address}/"

    def requests(self, code: RpcCode) -> list[Request]:
        return [request for seen, request, _ in self.seen if seen is code]

    def messages(self, code: RpcCode) -> list[Message]:
        return [message for seen, _, message in self.seen if seen is code and message is not None]

    @asynccontextmanager
    async def serving(self) -> AsyncIterator[Fake]:
        listener = await World.real().net.listen("127.0.0.1", self.port)
        self.port = listener.port
        async with trio.open_nursery() as nursery:

            async def accept() -> None:
                while True:
                    stream = await listener.accept()
                    self.connections += 1
                    nursery.start_soon(self._serve, stream)

            nursery.start_soon(accept)
            try:
                yield self
            finally:
                nursery.cancel_scope.cancel()
                with trio.CancelScope(shield=True):
                    await listener.aclose()

    async def _serve(self, stream: Stream) -> None:
        frames, session = FrameStream(stream), ServerSession()
        replies = 0
        try:
            while (head := await frames.recv_head()) is not None:
                header = await frames.recv_header(head)
                data = await frames.recv_data(head)
                assert isinstance(data, bytes)
                request = session.receive(head, header, data)
                assert request is not None
                try:
                    prefix, payload = await self._answer(session, request)
                except Hang:
                    await trio.sleep_forever()
                except Close as close:
                    await frames.send(close.first)
                    return
                except Raw as raw:
                    await frames.send(raw.content)
                    continue
                await frames.send(prefix, payload)
                replies += 1
                if replies == self.replies_per_connection:
                    return
        except CurvfsError:
            pass  # the client went away
        finally:
            with trio.CancelScope(shield=True):
                await stream.aclose()

    async def _answer(self, session: ServerSession, request: Request) -> tuple[bytes, bytes]:
        code = request.rpc
        kind = REQUEST_MESSAGE.get((request.code, request.status))
        bare = kind is None or (request.status is RequestStatus.RUNNING and not request.header)
        message = None if kind is None or bare else decode(kind, request.header)
        self.seen.append((code, request, message))
        handler = self.handle.get(code) or _DEFAULTS.get(code)
        try:
            if handler is None:
                raise Refuse(10000, f"Unsupported operation {code.name}")
            found = handler(request, message)
            answer = await found if isinstance(found, Awaitable) else found
        except Refuse as refuse:
            return session.error(request, refuse.kind, refuse.text), b""
        header, data = answer if isinstance(answer, tuple) else (answer, b"")
        return session.reply(request, b"" if header is None else encode(header), len(data)), data


def once(*answers: Answer | Exception, then: Answer | Exception | None = None) -> Handler:
    """Answers one after the other (exceptions are raised), then ``then`` for ever."""
    left = list(answers)

    def handler(request: Request, message: Message | None) -> Answer:
        answer = left.pop(0) if left else then
        if isinstance(answer, Exception):
            raise answer
        return answer

    return handler


def always(answer: Answer | Exception) -> Handler:
    return once(then=answer)


def status(
    path: str = "/f", *, inode_id: int = 1001, length: int = 0, directory: bool = False, block_size: int = 1 << 20
) -> pb.FileStatusProto:
    """A plausible FileStatusProto."""
    return pb.FileStatusProto(
        id=inode_id,
        path=path,
        name=path.rpartition("/")[2],
        is_dir=directory,
        len=length,
        is_complete=True,
        replicas=1,
        block_size=block_size,
        file_type=pb.FILE_TYPE_PROTO_DIR if directory else pb.FILE_TYPE_PROTO_FILE,
        mode=0o644,
        nlink=1,
        mtime=1,
    )


def located(
    length: int, *workers: Fake, block_id: int = 1001 << 24, inode_id: int = 1001
) -> pb.GetBlockLocationsResponse:
    """A file of one block on the given workers (ids 1, 2, ...)."""
    return pb.GetBlockLocationsResponse(
        blocks=pb.FileBlocksProto(
            status=status(length=length, inode_id=inode_id),
            block_locs=[
                pb.LocatedBlockProto(
                    block=pb.ExtendedBlockProto(id=block_id, block_size=length), locs=addresses(*workers)
                )
            ],
        )
    )


def addresses(*workers: Fake) -> list[pb.WorkerAddressProto]:
    return [
        pb.WorkerAddressProto(worker_id=index + 1, hostname="elsewhere", ip_addr="127.0.0.1", rpc_port=worker.port)
        for index, worker in enumerate(workers)
    ]


_DEFAULTS: dict[RpcCode, Handler] = {
    RpcCode.GET_FILESYSTEM_INFO: lambda request, message: pb.GetFilesystemInfoResponse(active_master="fake"),
    RpcCode.GET_MOUNT_TABLE: lambda request, message: pb.GetMountTableResponse(),
}
