"""A network that notes every frame that a client sends: real sockets, nothing changed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from curvfs.sockets import SocketStream
from curvfs.wire.codes import REQUEST_MESSAGE, RequestStatus, RpcCode
from curvfs.wire.frame import FIXED_BYTES, decode_head
from curvfs.wire.messages import decode
from curvfs.world import RealNetwork, Stream


@dataclass(frozen=True)
class Sent:
    """One frame; ``message`` is its header, None where it has none."""

    code: RpcCode
    status: RequestStatus
    message: Any


class Tap(RealNetwork):
    """:attr:`sent` is everything that was sent, in order."""

    def __init__(self) -> None:
        self.sent: list[Sent] = []

    @property
    def codes(self) -> set[RpcCode]:
        return {frame.code for frame in self.sent}

    def messages(self, code: RpcCode, status: RequestStatus | None = None) -> list[Any]:
        return [frame.message for frame in self.sent if frame.code is code and status in (None, frame.status)]

    def _note(self, left: memoryview) -> None:
        while len(left) >= FIXED_BYTES:  # whole frames, or one frame whose payload comes in buffers of its own
            head = decode_head(left)
            kind = REQUEST_MESSAGE.get((head.code, head.request))
            header = bytes(left[FIXED_BYTES : FIXED_BYTES + head.header_len])
            self.sent.append(
                Sent(RpcCode.of(head.code), head.request, decode(kind, header) if kind and header else None)
            )
            left = left[FIXED_BYTES + head.header_len + head.data_len :]

    async def connect(self, host: str, port: int) -> Stream:
        stream = await super().connect(host, port)
        assert isinstance(stream, SocketStream)
        send = stream.send

        async def noting(*buffers: Any) -> None:
            for prefix in (buffers[0], *buffers[2:3]):  # the last one is what goes behind the payload
                self._note(memoryview(prefix))
            await send(*buffers)

        stream.send = noting  # type: ignore[method-assign]
        stream.send_now = lambda data: 0  # type: ignore[method-assign]
        return stream
