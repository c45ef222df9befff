"""Who may send what when: the state machines of one connection, for both roles, without any I/O.

A *prefix* is the head and the header of a frame. What carries payload is sent as ``prefix`` followed by the payload,
which is never joined or copied here.

* :class:`UnaryCalls`: a client's calls on one connection, matched to their replies by req_id.
* :class:`BlockStream`: a client's stream of one block on one connection, replies strictly in order.
* :class:`ServerSession`: the server's side of either.

Rules (specification sections 1.3 to 1.5, 2.2 and 4.7); the numbers are named where a rule is held:

1. A reply copies code, request status, req_id and seq_id of its request; its response status is Success or Error.
2. Unary requests have seq_id -1 and an id of their own while they are outstanding.
3. A stream keeps one req_id; its Open has seq_id 0 and each further frame one more.
4. A server executes the requests of one connection one at a time, in order, and answers each exactly once, in order.
5. One connection carries one stream at a time, and no unary call beside it.
6. Running frames may be pipelined, also behind the Open: what follows a failed Open fails too.
7. After an error inside a stream the frames behind it are executed all the same, at the wrong position. Nothing but
   Complete or Cancel may be sent from then on.
8. A write is completed or cancelled only when every frame before has been answered, because a Complete pipelined
   behind a failed write would publish a damaged block. A read has nothing to damage and may be completed ahead; so may
   a new block whose bytes all go in one Running frame, because a worker refuses to complete a first write of another
   length than Complete names (:meth:`BlockStream.whole`).
9. Reads are never cancelled: workers refuse that.
10. A failed Open leaves nothing open. A failed Complete or Cancel leaves the stream as it was, to be cancelled or
    completed again; a successful one ends it, and the connection is free for the next.
11. Heartbeats are dropped and never answered. A frame with both statuses undefined closes the connection.

::

    Idle ──Open──▶ Opening ──ok──▶ Open ──Complete, Cancel──▶ Closing ──ok──▶ Closed
                      │              │                        ▲    │             ▲
                      │            error                      │  error           │
                      │              └──────────▶ Failed ─────┘    │             │
                      │                              ▲─────────────┘             │
                      └──────error───────────────────────────────────────────────┘
"""

from __future__ import annotations

import enum
from collections import deque
from dataclasses import dataclass

from curvfs.errors import LocalProtocolError, RemoteError, RemoteProtocolError, from_reply
from curvfs.wire.codes import (
    STREAM_START_SEQ_ID,
    UNARY_SEQ_ID,
    RequestStatus,
    ResponseStatus,
    RpcCode,
)
from curvfs.wire.frame import FrameHead, encode_head
from curvfs.wire.records import decode_error, encode_error

Buffer = bytes | bytearray | memoryview

#: Calls that may wait for their reply on one connection.
MAX_OUTSTANDING_CALLS = 4096
#: Frames of one stream that may wait for their reply.
MAX_OUTSTANDING_FRAMES = 1024


def _check_echo(head: FrameHead, code: int, status: RequestStatus, req_id: int, seq_id: int) -> None:
    """Rule 1."""
    if head.is_request:
        raise RemoteProtocolError(
            f"The server sent a request (code {head.code}) where a reply to {_name(code)} was due."
        )
    if (head.code, head.request, head.req_id, head.seq_id) != (code, status, req_id, seq_id):
        raise RemoteProtocolError(
            f"The server answered {_name(head.code)} {head.request.wire_name}, req_id {head.req_id}, "
            f"seq_id {head.seq_id}, where {_name(code)} {status.wire_name}, req_id {req_id}, seq_id {seq_id} was asked."
        )


def _error_of(head: FrameHead, data: Buffer) -> RemoteError | None:
    if head.response is not ResponseStatus.ERROR:
        return None
    return from_reply(*decode_error(data))


def _name(code: int) -> str:
    known = RpcCode.of(code)
    return known.wire_name if known == code else f"code {code}"


# ----------------------------------------------------------------------------------------------------- client: unary


@dataclass(frozen=True, slots=True)
class Reply:
    """The reply to a unary call: ``header`` holds the response message, or ``error`` says why there is none."""

    code: int
    header: bytes
    data: Buffer
    error: RemoteError | None


class UnaryCalls:
    """A client's unary calls on one connection; any number may wait for their reply, up to a bound.

    An abandoned call (its deadline passed) stays outstanding until its reply comes, which the caller then drops.
    """

    def __init__(self, *, max_outstanding: int = MAX_OUTSTANDING_CALLS) -> None:
        self._outstanding: dict[int, int] = {}
        self._max_outstanding = max_outstanding

    @property
    def outstanding(self) -> int:
        """How many calls wait for their reply."""
        return len(self._outstanding)

    def request(self, code: int, header: bytes, *, req_id: int, data_len: int = 0) -> bytes:
        """The prefix of a call. ``req_id`` must not belong to a call that still waits (rule 2).

        Raises :class:`LocalProtocolError`.
        """
        if RpcCode.of(code).is_stream:
            raise LocalProtocolError(f"{_name(code)} is no unary call; open a block stream.")
        if req_id in self._outstanding:
            raise LocalProtocolError(f"req_id {req_id} belongs to a call that has no reply yet; take a fresh one.")
        if len(self._outstanding) >= self._max_outstanding:
            raise LocalProtocolError(
                f"{len(self._outstanding)} calls wait on this connection; read replies before sending more."
            )
        head = encode_head(
            code, RequestStatus.RPC, ResponseStatus.UNDEFINED, req_id, UNARY_SEQ_ID, len(header), data_len
        )
        self._outstanding[req_id] = code
        return head + header

    def check(self, head: FrameHead) -> None:
        """Whether ``head`` begins a reply to one of the calls, before its header is read.

        Raises :class:`RemoteProtocolError`.
        """
        code = self._outstanding.get(head.req_id)
        if code is None:
            raise RemoteProtocolError(
                f"The server answered {_name(head.code)}, req_id {head.req_id}, which nobody asked."
            )
        _check_echo(head, code, RequestStatus.RPC, head.req_id, UNARY_SEQ_ID)

    def receive(self, head: FrameHead, header: bytes = b"", data: Buffer = b"") -> tuple[int, Reply]:
        """The req_id that ``head`` answers, and the reply. Raises :class:`RemoteProtocolError`."""
        self.check(head)
        del self._outstanding[head.req_id]
        return head.req_id, Reply(head.code, header, data, _error_of(head, data))


# ---------------------------------------------------------------------------------------------------- client: streams


class StreamState(enum.Enum):
    IDLE = "nothing sent yet"
    OPENING = "Open sent, not answered"
    OPEN = "open"
    FAILED = "failed: complete it, cancel it, or drop the connection"
    CLOSING = "Complete or Cancel sent, not answered"
    CLOSED = "closed"


_S, _R = StreamState, RequestStatus

#: (state, frame that we send) -> next state. What is missing is a bug of ours. Rules 6 and 7.
_ON_SEND: dict[tuple[StreamState, RequestStatus], StreamState] = {
    (_S.IDLE, _R.OPEN): _S.OPENING,
    (_S.OPENING, _R.RUNNING): _S.OPENING,
    (_S.OPENING, _R.COMPLETE): _S.CLOSING,
    (_S.OPEN, _R.RUNNING): _S.OPEN,
    (_S.OPEN, _R.COMPLETE): _S.CLOSING,
    (_S.OPEN, _R.CANCEL): _S.CLOSING,
    (_S.FAILED, _R.COMPLETE): _S.CLOSING,
    (_S.FAILED, _R.CANCEL): _S.CLOSING,
}

#: (state, frame that succeeded) -> next state; the state stays where nothing is said. Rule 10.
_ON_SUCCESS: dict[tuple[StreamState, RequestStatus], StreamState] = {
    (_S.OPENING, _R.OPEN): _S.OPEN,
    (_S.CLOSING, _R.COMPLETE): _S.CLOSED,
    (_S.CLOSING, _R.CANCEL): _S.CLOSED,
}

#: (state, frame that failed) -> next state; the state stays where nothing is said. Rules 7 and 10.
_ON_ERROR: dict[tuple[StreamState, RequestStatus], StreamState] = {
    (_S.OPENING, _R.OPEN): _S.CLOSED,
    (_S.CLOSING, _R.OPEN): _S.CLOSED,
    (_S.OPEN, _R.RUNNING): _S.FAILED,
    (_S.CLOSING, _R.COMPLETE): _S.FAILED,
    (_S.CLOSING, _R.CANCEL): _S.FAILED,
}


@dataclass(frozen=True, slots=True)
class StreamReply:
    """The reply to one frame of a stream: ``kind`` says which; the ``data_len`` bytes of data are with the caller."""

    kind: RequestStatus
    header: bytes
    data_len: int
    error: RemoteError | None


class BlockStream:
    """A client's stream of one block: the only thing on its connection until it is finished (rule 5)."""

    def __init__(self, code: int, req_id: int, *, max_outstanding: int = MAX_OUTSTANDING_FRAMES) -> None:
        if not RpcCode.of(code).is_stream:
            raise LocalProtocolError(f"{_name(code)} is a unary call; no stream can be opened for it.")
        self.code = code
        self.req_id = req_id
        self._state = StreamState.IDLE
        self._next_seq_id = STREAM_START_SEQ_ID
        self._outstanding: deque[tuple[RequestStatus, int]] = deque()
        self._max_outstanding = max_outstanding

    @property
    def state(self) -> StreamState:
        return self._state

    @property
    def outstanding(self) -> int:
        """How many frames wait for their reply."""
        return len(self._outstanding)

    @property
    def is_finished(self) -> bool:
        """Whether the connection is free for another stream."""
        return self._state is StreamState.CLOSED and not self._outstanding

    def open(self, header: bytes) -> bytes:
        """The prefix of the Open frame."""
        return self._send(RequestStatus.OPEN, header, 0)

    def running(self, header: bytes = b"", data_len: int = 0) -> bytes:
        """The prefix of a Running frame; ``data_len`` bytes of payload follow it (writes only)."""
        return self._send(RequestStatus.RUNNING, header, data_len)

    def complete(self, header: bytes) -> bytes:
        """The prefix of the Complete frame."""
        return self._send(RequestStatus.COMPLETE, header, 0)

    def whole(self, open_header: bytes, data_len: int, complete_header: bytes) -> tuple[bytes, bytes]:
        """Open, Running and Complete of a new block, to be sent at once (rule 8): what goes before the ``data_len``
        bytes of payload, and what goes behind them."""
        before = self.open(open_header) + self.running(data_len=data_len)
        return before, self._send(RequestStatus.COMPLETE, complete_header, 0, ahead=True)

    def resume(self) -> None:
        """The block was opened by another stream, which was left (4.7): Complete follows."""
        if self._state is not StreamState.IDLE:
            raise LocalProtocolError(f"{_name(self.code)} cannot be gone on with: the stream is {self._state.value}.")
        self._state = StreamState.OPEN
        self._next_seq_id += 1

    def cancel(self, header: bytes) -> bytes:
        """The prefix of the Cancel frame. (Never cancel a block that was committed: section 4.7.)"""
        return self._send(RequestStatus.CANCEL, header, 0)

    def check(self, head: FrameHead) -> None:
        """Whether ``head`` begins the reply that is due, before its data goes anywhere.

        Raises :class:`RemoteProtocolError`; the stream is as it was, the connection cannot be used any further.
        """
        if not self._outstanding:
            raise RemoteProtocolError(
                f"The worker answered {_name(head.code)}, req_id {head.req_id}, which nobody asked."
            )
        _check_echo(head, self.code, self._outstanding[0][0], self.req_id, self._outstanding[0][1])

    def receive(self, head: FrameHead, header: bytes = b"", data: Buffer = b"") -> StreamReply:
        """Take the reply that is due. ``data`` is needed for errors only; block data may stay where it was read to.

        Raises :class:`RemoteProtocolError` as :meth:`check` does.
        """
        self.check(head)
        kind, _ = self._outstanding.popleft()
        error = _error_of(head, data)
        table = _ON_SUCCESS if error is None else _ON_ERROR
        self._state = table.get((self._state, kind), self._state)
        return StreamReply(kind, header, head.data_len, error)

    def _send(self, kind: RequestStatus, header: bytes, data_len: int, *, ahead: bool = False) -> bytes:
        following = _ON_SEND.get((self._state, kind))
        is_read = self.code == RpcCode.READ_BLOCK
        if following is None or (is_read and kind is RequestStatus.CANCEL):  # rule 9
            raise LocalProtocolError(
                f"{_name(self.code)} {kind.wire_name} cannot be sent: the stream is {self._state.value}."
            )
        if following is StreamState.CLOSING and self._outstanding and not (is_read or ahead):  # rule 8
            raise LocalProtocolError(
                f"{_name(self.code)} {kind.wire_name} cannot be sent: {len(self._outstanding)} frames have no reply."
            )
        if len(self._outstanding) >= self._max_outstanding:
            raise LocalProtocolError(
                f"{len(self._outstanding)} frames wait on this stream; read replies before sending more."
            )
        seq_id = self._next_seq_id  # rule 3
        head = encode_head(self.code, kind, ResponseStatus.UNDEFINED, self.req_id, seq_id, len(header), data_len)
        self._next_seq_id += 1
        self._outstanding.append((kind, seq_id))
        self._state = following
        return head + header


# ------------------------------------------------------------------------------------------------------------- server


@dataclass(frozen=True, slots=True, eq=False)
class Request:
    """A request that a server received. ``code`` is the number on the wire, also where nobody knows it."""

    code: int
    status: RequestStatus
    req_id: int
    seq_id: int
    header: bytes
    data: Buffer

    @property
    def rpc(self) -> RpcCode:
        """The code by name; ``UNDEFINED`` where nobody knows it."""
        return RpcCode.of(self.code)


class ServerSession:
    """The server's side of one connection, master or worker: requests in, replies out, in order (rule 4).

    Which frames make sense in a stream is for the handler to say, in an error reply.
    """

    def __init__(self, *, max_pending: int = MAX_OUTSTANDING_FRAMES) -> None:
        self._pending: deque[Request] = deque()
        self._max_pending = max_pending

    @property
    def pending(self) -> int:
        """How many requests have no reply yet."""
        return len(self._pending)

    def receive(self, head: FrameHead, header: bytes = b"", data: Buffer = b"") -> Request | None:
        """The request in a frame; None for a heartbeat (rule 11).

        Raises :class:`RemoteProtocolError` when the client sends a reply or an empty message: close the connection.
        """
        if head.is_heartbeat:
            return None
        if head.is_empty:
            raise RemoteProtocolError("The client sent a frame that is neither request nor reply; closing.")
        if not head.is_request:
            raise RemoteProtocolError(f"The client sent a reply ({_name(head.code)}) to a server; closing.")
        if len(self._pending) >= self._max_pending:
            raise LocalProtocolError(f"{len(self._pending)} requests have no reply yet; answer before reading more.")
        request = Request(head.code, head.request, head.req_id, head.seq_id, header, data)
        self._pending.append(request)
        return request

    def reply(self, request: Request, header: bytes = b"", data_len: int = 0) -> bytes:
        """The prefix of a successful reply; ``data_len`` bytes of payload follow it.

        Raises :class:`LocalProtocolError` unless ``request`` is the oldest one without a reply.
        """
        return self._answer(request, ResponseStatus.SUCCESS, len(header), data_len) + header

    def error(self, request: Request, kind: int, text: str) -> bytes:
        """The whole frame of an error reply. Raises as :meth:`reply` does."""
        record = encode_error(kind, text)
        return self._answer(request, ResponseStatus.ERROR, 0, len(record)) + record

    def _answer(self, request: Request, response: ResponseStatus, header_len: int, data_len: int) -> bytes:
        if not self._pending or self._pending[0] is not request:
            raise LocalProtocolError(
                f"{_name(request.code)}, req_id {request.req_id}, is not the request whose reply is due."
            )
        head = encode_head(request.code, request.status, response, request.req_id, request.seq_id, header_len, data_len)
        self._pending.popleft()
        return head
