"""One connection to a master: many calls in flight, matched by request id (specification 1.5).

A master runs the requests of a connection strictly in order, so a call may be sent while earlier ones are still
unanswered: 512 calls cost a few round trips. When the connection goes, every unanswered call fails with a retryable
:class:`~curvfs.errors.TransportError`. The peer closing an idle connection is normal (1.4) and no error.
"""

from __future__ import annotations

from collections import deque

import trio

# Now and not at the first connection: a process may have dropped its rights by then.
import curvfs.sockets  # noqa: F401
from curvfs.errors import ConnectionLost, CurvfsError, RemoteProtocolError, TransportError
from curvfs.net.transport import FrameStream
from curvfs.units import KIB
from curvfs.wire.session import Reply, UnaryCalls
from curvfs.world import Clock, Stream

#: Calls in flight on one connection; more wait for room.
MAX_OUTSTANDING = 2048
_READ_AHEAD_BYTES = 256 * KIB


class PendingCall:
    """A call that was posted: wait for :attr:`reply` or :attr:`error` with :meth:`wait`."""

    __slots__ = ("_event", "error", "reply")

    def __init__(self) -> None:
        self._event = trio.Event()
        self.reply: Reply | None = None
        self.error: CurvfsError | None = None

    def settle(self, reply: Reply | None, error: CurvfsError | None) -> None:
        self.reply, self.error = reply, error
        self._event.set()

    async def wait(self) -> Reply:
        """The reply, success or error record. Raises TransportError or ProtocolError when none will come."""
        if self.reply is None and self.error is None:
            await self._event.wait()
        if self.reply is None:
            assert self.error is not None
            raise type(self.error)(str(self.error)) from self.error
        return self.reply


class MasterConnection:
    """Run :meth:`run` in a task; :meth:`post` and :meth:`call` from any number of others."""

    def __init__(self, stream: Stream, clock: Clock) -> None:
        self._frames = FrameStream(stream, read_ahead_bytes=_READ_AHEAD_BYTES)
        self._clock = clock
        self._calls = UnaryCalls()
        self._pending: dict[int, PendingCall] = {}
        self._outbox: deque[bytes] = deque()
        self._to_send = trio.lowlevel.ParkingLot()
        self._room = trio.lowlevel.ParkingLot()
        self._scope = trio.CancelScope()
        self._closed = False
        #: When the connection last sent or received anything, on the injected clock.
        self.last_used_s = clock.monotonic_s()
        self.last_received_s = self.last_used_s
        self._asked_s = self.last_used_s

    @property
    def peer(self) -> str:
        return self._frames.peer

    @property
    def closed(self) -> bool:
        return self._closed

    @property
    def silent_s(self) -> float:
        """How long the master has said nothing since it was asked something; 0 when it has answered since."""
        return 0.0 if self.last_received_s >= self._asked_s else self._clock.monotonic_s() - self._asked_s

    @property
    def outstanding(self) -> int:
        """Calls without an answer, those given up by their caller included."""
        return len(self._pending)

    async def run(self) -> None:
        """Send and receive until the connection is closed by either side."""
        try:
            with self._scope:
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(self._send_all)
                    await self._receive_all()
        finally:
            self.fail(ConnectionLost(f"The connection to the master {self.peer} was closed."))
            with trio.CancelScope(shield=True):
                await self._frames.aclose()

    def fail(self, error: CurvfsError) -> None:
        """Close, failing the calls in flight with ``error``; idempotent."""
        self._closed = True
        pending, self._pending = self._pending, {}
        for call in pending.values():
            call.settle(None, error)
        self._room.unpark_all()
        self._scope.cancel()

    async def post(self, code: int, header: bytes, req_id: int) -> PendingCall:
        """Send a request without waiting for its answer; waits only for room among the calls in flight.

        A request id that is still unanswered here is not sent again: its answer is waited for once more. Raises
        ConnectionLost when the connection is closed already: the request was not sent.
        """
        while not self._closed and len(self._pending) >= MAX_OUTSTANDING:
            await self._room.park()
        if self._closed:
            raise ConnectionLost(f"The connection to the master {self.peer} is closed.")
        known = self._pending.get(req_id)
        if known is not None:
            return known  # an earlier attempt of the same call is still under way here, and comes first
        if self.last_received_s >= self._asked_s:
            self._asked_s = self._clock.monotonic_s()
        request = self._calls.request(code, header, req_id=req_id)
        if not self._pending and not self._outbox:
            # A lone call need not wait for the sender's turn; of those that come together the others go together.
            self.last_used_s = self._asked_s
            request = request[self._frames.send_now(request) :]
        call = self._pending[req_id] = PendingCall()
        if request:
            self._outbox.append(request)
            self._to_send.unpark()
        return call

    async def _send_all(self) -> None:
        try:
            while True:
                if not self._outbox:
                    await self._to_send.park()
                batch = b"".join(self._outbox)
                self._outbox.clear()
                await self._frames.send(batch)
                self.last_used_s = self._clock.monotonic_s()
        except TransportError as error:
            self.fail(error)

    async def _receive_all(self) -> None:
        try:
            while (head := await self._frames.recv_head()) is not None:
                header = await self._frames.recv_header(head)
                data = await self._frames.recv_data(head)
                assert isinstance(data, bytes)
                req_id, reply = self._calls.receive(head, header, data)
                self.last_used_s = self.last_received_s = self._clock.monotonic_s()
                call = self._pending.pop(req_id, None)
                if call is not None:
                    call.settle(reply, None)
                    self._room.unpark()
            self.fail(ConnectionLost(f"The master {self.peer} closed the connection."))
        except (TransportError, RemoteProtocolError) as error:
            self.fail(error)
