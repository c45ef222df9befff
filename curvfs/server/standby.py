"""A master that never leads: it answers every request with kind 2, as the followers of a Curvine cluster do.

Clients that find their leader among several masters can be tried on it (specification section 5.1).
"""

from __future__ import annotations

from curvfs.net.transport import FrameStream
from curvfs.server.refusals import NOT_LEADER
from curvfs.wire.frame import MAX_REQUEST_HEADER_BYTES
from curvfs.wire.session import ServerSession
from curvfs.world import Stream


async def serve_standby(stream: Stream) -> None:
    """Answer the requests of one connection until it closes."""
    frames = FrameStream(stream, max_header_bytes=MAX_REQUEST_HEADER_BYTES)
    session = ServerSession()
    client_ip = stream.peer.rpartition(":")[0].strip("[]")
    while (head := await frames.recv_head()) is not None:
        await frames.discard(head.header_len + head.data_len)
        request = session.receive(head)
        if request is not None:
            text = f"Not a leader master, code={request.rpc.wire_name}, client_ip={client_ip}"
            await stream.send(session.error(request, NOT_LEADER, text))
