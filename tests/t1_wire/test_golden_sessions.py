"""Captured conversations, replayed through the session state machines of both roles."""

from __future__ import annotations

from collections import defaultdict

import pytest
from golden_frames import ALPHA, GoldenFrame, Scenario, all_scenarios

from curvfs.errors import KIND_COMMON, LocalProtocolError, ProtocolError
from curvfs.wire.codes import RequestStatus, ResponseStatus
from curvfs.wire.records import decode_error
from curvfs.wire.session import BlockStream, Request, ServerSession, StreamState, UnaryCalls

#: The probe breaks the rules of a stream there, to see what a worker does.
BROKEN_BY_THE_PROBE = {
    "raw_read_cancel",
    "raw_read_no_open",
    "raw_read_reopen",
    "raw_read_wrong_req_id",
    "raw_write_complete_twice",
    "raw_write_no_open",
    "raw_write_wrong_req_id",
}
#: The old Rust client opens further short-circuit streams on a connection whose stream it has not finished.
INTERLEAVED_BY_THE_OLD_CLIENT = {
    "cli_get_9m",
    "fuse_true_read_9m",
    "fuse_true_read_hole",
    "fuse_true_unlink_open",
    "fuse_true_write_in_hole",
}


def is_healthy(scenario: Scenario) -> bool:
    if scenario.version == ALPHA and scenario.name in INTERLEAVED_BY_THE_OLD_CLIENT:
        return False
    return scenario.name not in BROKEN_BY_THE_PROBE


class ClientConnection:
    """The client's side of one captured connection, driven through our state machines."""

    def __init__(self) -> None:
        self.calls = UnaryCalls()
        self.stream: BlockStream | None = None

    def send(self, frame: GoldenFrame) -> bytes:
        head = frame.head
        if head.request is RequestStatus.RPC:
            return self.calls.request(head.code, frame.header, req_id=head.req_id, data_len=head.data_len)
        if head.request is RequestStatus.OPEN:
            if self.stream is not None and not self.stream.is_finished:
                raise LocalProtocolError("one stream at a time")
            self.stream = BlockStream(head.code, head.req_id)
            return self.stream.open(frame.header)
        if self.stream is None:
            raise LocalProtocolError("no stream")
        if head.request is RequestStatus.RUNNING:
            return self.stream.running(frame.header, head.data_len)
        if head.request is RequestStatus.COMPLETE:
            return self.stream.complete(frame.header)
        return self.stream.cancel(frame.header)

    def receive(self, frame: GoldenFrame) -> None:
        head = frame.head
        if head.request is RequestStatus.RPC:
            req_id, reply = self.calls.receive(head, frame.header, frame.data or b"")
            assert req_id == head.req_id
            error = reply.error
        else:
            assert self.stream is not None
            stream_reply = self.stream.receive(head, frame.header, frame.data or b"")
            assert (stream_reply.kind, stream_reply.data_len) == (head.request, head.data_len)
            error = stream_reply.error
        assert (error is not None) == (head.response is ResponseStatus.ERROR)
        if error is not None:
            assert error.kind == decode_error(frame.data or b"")[0]


def replay_client(scenario: Scenario) -> dict[int, ClientConnection]:
    connections: dict[int, ClientConnection] = defaultdict(ClientConnection)
    for frame in scenario.frames:
        if frame.head.is_heartbeat:
            continue
        connection = connections[frame.conn]
        if frame.from_client:
            if connection.send(frame) != frame.captured[: 22 + frame.head.header_len]:
                raise LocalProtocolError("we would have sent something else")
        else:
            connection.receive(frame)
    return connections


@pytest.mark.parametrize("scenario", [each for each in all_scenarios() if is_healthy(each)], ids=str)
def test_client_role(scenario: Scenario) -> None:
    for connection in replay_client(scenario).values():
        if connection.stream is not None:
            assert connection.stream.outstanding == 0 or scenario.name.startswith("ha_")
            assert connection.stream.state in (StreamState.CLOSED, StreamState.OPEN, StreamState.FAILED)


@pytest.mark.parametrize("scenario", [each for each in all_scenarios() if not is_healthy(each)], ids=str)
def test_client_role_refuses(scenario: Scenario) -> None:
    with pytest.raises(ProtocolError):
        replay_client(scenario)


@pytest.mark.parametrize("scenario", all_scenarios(), ids=str)
def test_server_role(scenario: Scenario) -> None:
    """Our server session, given the captured requests, frames the captured answers byte for byte."""
    sessions: dict[int, ServerSession] = defaultdict(ServerSession)
    waiting: dict[int, list[Request]] = defaultdict(list)
    for frame in scenario.frames:
        head, session = frame.head, sessions[frame.conn]
        if frame.from_client:
            request = session.receive(head, frame.header, frame.data or b"")
            assert (request is None) == head.is_heartbeat
            if request is not None:
                waiting[frame.conn].append(request)
            continue
        request = waiting[frame.conn].pop(0)
        if head.response is ResponseStatus.ERROR:
            kind, text = decode_error(frame.data or b"")
            assert kind <= KIND_COMMON
            assert session.error(request, kind, text) == frame.captured
        else:
            prefix = session.reply(request, frame.header, head.data_len)
            assert prefix == frame.captured[: 22 + head.header_len]
    assert {conn: session.pending for conn, session in sessions.items()} == {
        conn: len(waiting[conn]) for conn in sessions
    }
