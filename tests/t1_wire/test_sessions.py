"""The rules of a connection, one by one (numbers as in curvfs/wire/session.py)."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from t1_wire.strategies import unhurried

from curvfs.errors import LocalProtocolError, NotFound, RemoteProtocolError
from curvfs.wire.codes import RequestStatus, ResponseStatus, RpcCode
from curvfs.wire.frame import FIXED_BYTES, HEARTBEAT, FrameHead, decode_head
from curvfs.wire.records import encode_error
from curvfs.wire.session import BlockStream, ServerSession, StreamState, UnaryCalls

OPEN, RUNNING = RequestStatus.OPEN, RequestStatus.RUNNING
COMPLETE, CANCEL = RequestStatus.COMPLETE, RequestStatus.CANCEL
FAILURE = encode_error(1, "disk on fire")


def success(head: FrameHead, header: bytes = b"", data_len: int = 0) -> FrameHead:
    return replace(head, response=ResponseStatus.SUCCESS, header_len=len(header), data_len=data_len)


def failure(head: FrameHead) -> FrameHead:
    return replace(head, response=ResponseStatus.ERROR, header_len=0, data_len=len(FAILURE))


class Worker:
    """The other end of a :class:`BlockStream`: keeps what was sent, answers in order."""

    def __init__(self, code: int = RpcCode.WRITE_BLOCK) -> None:
        self.stream = BlockStream(code, 42)
        self.sent: list[FrameHead] = []

    def send(self, kind: RequestStatus, data_len: int = 0) -> FrameHead:
        prefix = {
            OPEN: lambda: self.stream.open(b"h"),
            RUNNING: lambda: self.stream.running(b"", data_len),
            COMPLETE: lambda: self.stream.complete(b"h"),
            CANCEL: lambda: self.stream.cancel(b"h"),
        }[kind]()
        head = decode_head(prefix)
        self.sent.append(head)
        return head

    def answer(self, ok: bool = True) -> RequestStatus:
        head = self.sent.pop(0)
        reply = self.stream.receive(success(head)) if ok else self.stream.receive(failure(head), b"", FAILURE)
        assert reply.kind is head.request
        assert (reply.error is None) == ok
        return reply.kind


# ------------------------------------------------------------------------------------------------------- unary calls


def test_unary_call_and_reply() -> None:
    calls = UnaryCalls()
    prefix = calls.request(RpcCode.EXISTS, b"\x0a\x00", req_id=5)
    head = decode_head(prefix)
    assert prefix[22:] == b"\x0a\x00"
    assert (head.code, head.request, head.response) == (9, RequestStatus.RPC, ResponseStatus.UNDEFINED)
    assert (head.req_id, head.seq_id, head.header_len, head.data_len) == (5, -1, 2, 0)
    req_id, reply = calls.receive(success(head, b"\x08\x01"), b"\x08\x01")
    assert (req_id, reply.code, reply.header, reply.error) == (5, 9, b"\x08\x01", None)
    assert calls.outstanding == 0


def test_unary_replies_in_any_order() -> None:
    calls = UnaryCalls()
    heads = [decode_head(calls.request(RpcCode.EXISTS, b"", req_id=each)) for each in range(5)]
    assert [calls.receive(success(head))[0] for head in reversed(heads)] == [4, 3, 2, 1, 0]


def test_unary_error_reply() -> None:
    calls = UnaryCalls()
    head = decode_head(calls.request(RpcCode.EXISTS, b"", req_id=5))
    record = encode_error(8, "File /f not found")
    reply = calls.receive(replace(failure(head), data_len=len(record)), b"", record)[1]
    assert isinstance(reply.error, NotFound)
    assert reply.error.text == "File /f not found"


def test_rule_1_replies_must_echo() -> None:
    calls = UnaryCalls()
    head = decode_head(calls.request(RpcCode.EXISTS, b"", req_id=5))
    for wrong in (
        head,
        replace(success(head), req_id=6),
        replace(success(head), code=7),
        replace(success(head), seq_id=0),
        replace(success(head), request=OPEN),
        replace(success(head), request=RequestStatus.HEARTBEAT),
    ):
        with pytest.raises(RemoteProtocolError):
            calls.receive(wrong)
    assert calls.receive(success(head))[0] == 5
    with pytest.raises(RemoteProtocolError, match="nobody asked"):
        calls.receive(success(head))


def test_rule_2_ids_are_unique_while_outstanding() -> None:
    calls = UnaryCalls()
    head = decode_head(calls.request(RpcCode.EXISTS, b"", req_id=5))
    with pytest.raises(LocalProtocolError, match="fresh"):
        calls.request(RpcCode.EXISTS, b"", req_id=5)
    calls.receive(success(head))
    calls.request(RpcCode.EXISTS, b"", req_id=5)


def test_unary_calls_are_bounded() -> None:
    calls = UnaryCalls(max_outstanding=2)
    for req_id in range(2):
        calls.request(RpcCode.EXISTS, b"", req_id=req_id)
    with pytest.raises(LocalProtocolError, match="read replies"):
        calls.request(RpcCode.EXISTS, b"", req_id=2)


def test_a_refused_call_leaves_nothing_outstanding() -> None:
    calls = UnaryCalls()
    with pytest.raises(LocalProtocolError):
        calls.request(RpcCode.EXISTS, b"", req_id=2**63)
    with pytest.raises(LocalProtocolError, match="no unary call"):
        calls.request(RpcCode.READ_BLOCK, b"", req_id=1)
    assert calls.outstanding == 0


# ------------------------------------------------------------------------------------------------------ block streams


def test_rule_3_sequence_numbers() -> None:
    worker = Worker()
    heads = [worker.send(OPEN), worker.send(RUNNING, 5), worker.send(RUNNING)]
    for _ in range(3):
        worker.answer()
    heads.append(worker.send(COMPLETE))
    assert [(head.request, head.seq_id) for head in heads] == [(OPEN, 0), (RUNNING, 1), (RUNNING, 2), (COMPLETE, 3)]
    assert {head.req_id for head in heads} == {42}
    assert heads[1].data_len == 5
    worker.answer()
    assert worker.stream.is_finished


def test_rule_4_stream_replies_come_in_order() -> None:
    worker = Worker()
    first, second = worker.send(OPEN), worker.send(RUNNING)
    for wrong in (second, replace(first, seq_id=1), replace(first, req_id=43), replace(first, code=81)):
        with pytest.raises(RemoteProtocolError):
            worker.stream.receive(success(wrong))
    with pytest.raises(RemoteProtocolError, match="sent a request"):
        worker.stream.check(first)
    assert worker.stream.outstanding == 2
    worker.answer()
    worker.answer()
    with pytest.raises(RemoteProtocolError, match="nobody asked"):
        worker.stream.receive(success(second))


def test_rule_6_a_whole_read_may_be_pipelined() -> None:
    worker = Worker(RpcCode.READ_BLOCK)
    for kind in (OPEN, RUNNING, RUNNING, COMPLETE):
        worker.send(kind)
    assert [worker.answer() for _ in range(4)] == [OPEN, RUNNING, RUNNING, COMPLETE]
    assert worker.stream.is_finished


def test_rule_6_what_follows_a_failed_open_fails_too() -> None:
    worker = Worker(RpcCode.READ_BLOCK)
    for kind in (OPEN, RUNNING, COMPLETE):
        worker.send(kind)
    worker.answer(ok=False)
    assert (worker.stream.state, worker.stream.is_finished) == (StreamState.CLOSED, False)
    worker.answer(ok=False)
    worker.answer(ok=False)
    assert worker.stream.is_finished


def test_rule_7_after_an_error_only_the_end_may_come() -> None:
    for end in (COMPLETE, CANCEL):
        worker = Worker()
        worker.send(OPEN)
        worker.answer()
        worker.send(RUNNING)
        worker.send(RUNNING)
        worker.answer(ok=False)
        assert worker.stream.state is StreamState.FAILED
        with pytest.raises(LocalProtocolError):
            worker.send(RUNNING)
        worker.answer()
        assert worker.stream.state is StreamState.FAILED
        worker.send(end)
        worker.answer()
        assert worker.stream.is_finished


def test_rule_8_a_write_ends_only_when_all_was_answered() -> None:
    for end in (COMPLETE, CANCEL):
        worker = Worker()
        worker.send(OPEN)
        with pytest.raises(LocalProtocolError):
            worker.send(end)
        worker.answer()
        worker.send(RUNNING)
        with pytest.raises(LocalProtocolError, match="1 frames have no reply"):
            worker.send(end)
        worker.answer()
        worker.send(end)


def test_rule_8_a_new_block_may_go_whole() -> None:
    for answers, state in (
        ((True, True, True), StreamState.CLOSED),
        ((False, False, False), StreamState.CLOSED),
        ((True, False, False), StreamState.FAILED),
    ):
        worker = Worker()
        before, behind = worker.stream.whole(b"open", 5, b"done")
        opening = decode_head(before)
        worker.sent = [opening, decode_head(before[-FIXED_BYTES:]), decode_head(behind)]
        assert [head.request for head in worker.sent] == [OPEN, RUNNING, COMPLETE]
        assert worker.sent[1].data_len == 5 and worker.stream.outstanding == 3
        assert [worker.answer(ok) for ok in answers] == [OPEN, RUNNING, COMPLETE]
        assert (worker.stream.state, worker.stream.outstanding) == (state, 0)


def test_rule_9_reads_are_never_cancelled() -> None:
    worker = Worker(RpcCode.READ_BLOCK)
    worker.send(OPEN)
    worker.answer()
    with pytest.raises(LocalProtocolError):
        worker.send(CANCEL)


def test_rule_10_a_failed_end_can_be_tried_again() -> None:
    worker = Worker()
    worker.send(OPEN)
    worker.answer()
    worker.send(COMPLETE)
    worker.answer(ok=False)
    assert worker.stream.state is StreamState.FAILED
    worker.send(CANCEL)
    worker.answer()
    assert worker.stream.is_finished


def test_rule_10_a_failed_open_leaves_nothing() -> None:
    worker = Worker()
    worker.send(OPEN)
    worker.answer(ok=False)
    assert worker.stream.is_finished
    for kind in (OPEN, RUNNING, COMPLETE, CANCEL):
        with pytest.raises(LocalProtocolError):
            worker.send(kind)


def test_streams_begin_with_an_open() -> None:
    for kind in (RUNNING, COMPLETE, CANCEL):
        with pytest.raises(LocalProtocolError, match="nothing sent yet"):
            Worker().send(kind)
    with pytest.raises(LocalProtocolError, match="unary"):
        BlockStream(RpcCode.EXISTS, 1)


def test_streams_are_bounded() -> None:
    stream = BlockStream(RpcCode.READ_BLOCK, 1, max_outstanding=2)
    stream.open(b"")
    stream.running()
    with pytest.raises(LocalProtocolError, match="read replies"):
        stream.running()
    assert stream.outstanding == 2


def test_a_refused_frame_changes_nothing() -> None:
    worker = Worker()
    worker.send(OPEN)
    worker.answer()
    with pytest.raises(LocalProtocolError):
        worker.send(RUNNING, 16 * 1024 * 1024 + 1)
    assert (worker.stream.state, worker.stream.outstanding) == (StreamState.OPEN, 0)
    assert worker.send(RUNNING).seq_id == 1


def test_data_may_stay_with_the_caller() -> None:
    worker = Worker(RpcCode.READ_BLOCK)
    worker.send(OPEN)
    worker.answer()
    head = worker.send(RUNNING)
    reply = worker.stream.receive(success(head, data_len=4096))
    assert (reply.data_len, reply.error) == (4096, None)


@given(st.sampled_from([RpcCode.WRITE_BLOCK, RpcCode.READ_BLOCK]), st.lists(st.sampled_from([*range(7)])))
@unhurried
def test_any_order_of_events_keeps_the_books(code: RpcCode, events: list[int]) -> None:
    """Random sends and answers: refusals change nothing, and no finished stream is ever open on the worker."""
    worker = Worker(code)
    for event in events:
        before = (worker.stream.state, worker.stream.outstanding)
        if event < 4:
            try:
                worker.send((OPEN, RUNNING, COMPLETE, CANCEL)[event])
            except LocalProtocolError:
                assert (worker.stream.state, worker.stream.outstanding) == before
        elif worker.sent:
            worker.answer(ok=event < 6)
        assert worker.stream.outstanding == len(worker.sent)
        if worker.stream.is_finished:
            assert not worker.sent


# ------------------------------------------------------------------------------------------------------------- server


def test_server_answers_in_order() -> None:
    session = ServerSession()
    calls = UnaryCalls()
    first, second = (decode_head(calls.request(RpcCode.EXISTS, b"", req_id=each)) for each in (1, 2))
    one, two = session.receive(first), session.receive(second)
    assert one is not None
    assert two is not None
    with pytest.raises(LocalProtocolError, match="reply is due"):
        session.reply(two)
    reply = session.reply(one, b"\x08\x01", 3)
    head = decode_head(reply)
    assert (head.response, head.req_id, head.header_len, head.data_len) == (ResponseStatus.SUCCESS, 1, 2, 3)
    assert calls.receive(head, reply[22:], b"abc")[0] == 1
    error = session.error(two, 8, "gone")
    head = decode_head(error)
    assert isinstance(calls.receive(head, b"", error[22:])[1].error, NotFound)
    with pytest.raises(LocalProtocolError, match="reply is due"):
        session.reply(two)
    assert session.pending == 0


def test_server_echoes_codes_it_does_not_know() -> None:
    session = ServerSession()
    head = FrameHead(99, RequestStatus.RPC, ResponseStatus.UNDEFINED, 3, -1, 0, 0)
    request = session.receive(head)
    assert request is not None
    assert (request.code, request.rpc) == (99, RpcCode.UNDEFINED)
    assert decode_head(session.error(request, 10000, "Unsupported operation")).code == 99


def test_rule_11_server_drops_heartbeats() -> None:
    session = ServerSession()
    assert session.receive(decode_head(HEARTBEAT)) is None
    assert session.pending == 0


def test_rule_11_server_closes_on_what_is_no_request() -> None:
    session = ServerSession()
    request = FrameHead(9, RequestStatus.RPC, ResponseStatus.UNDEFINED, 3, -1, 0, 0)
    for wrong in (
        replace(request, response=ResponseStatus.SUCCESS),
        replace(request, response=ResponseStatus.ERROR),
        replace(request, request=RequestStatus.UNDEFINED),
    ):
        with pytest.raises(RemoteProtocolError):
            session.receive(wrong)


def test_server_is_bounded() -> None:
    session = ServerSession(max_pending=1)
    head = FrameHead(9, RequestStatus.RPC, ResponseStatus.UNDEFINED, 3, -1, 0, 0)
    session.receive(head)
    with pytest.raises(LocalProtocolError, match="answer before"):
        session.receive(head)


def test_a_reply_too_large_to_send_can_still_become_an_error() -> None:
    session = ServerSession()
    request = session.receive(FrameHead(9, RequestStatus.RPC, ResponseStatus.UNDEFINED, 3, -1, 0, 0))
    assert request is not None
    with pytest.raises(LocalProtocolError):
        session.reply(request, b"", 17 * 1024 * 1024)
    assert decode_head(session.error(request, 10000, "too large")).response is ResponseStatus.ERROR
