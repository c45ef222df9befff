"""Codes, their names, and the messages that go with them."""

from __future__ import annotations

from curvfs.wire.codes import RequestStatus, ResponseStatus, RpcCode, message_types
from curvfs.wire.frame import FrameHead
from curvfs.wire.messages import pb


def head(code: int, status: RequestStatus, response: ResponseStatus, header_len: int = 1) -> FrameHead:
    return FrameHead(code, status, response, 1, -1, header_len, 0)


def test_names_are_those_of_the_specification() -> None:
    names = {int(code): code.wire_name for code in RpcCode}
    assert names[0] == "Undefined"
    assert names[4] == "CreateFile"
    assert names[14] == "GetFilesystemInfo"
    assert names[28] == "GetCvMetadataSnapshotPage"
    assert names[31] == "UnMount"
    assert names[83] == "WriteCommitsBatch"
    assert sorted(names) == [*range(55), 60, 80, 81, 82, 83]
    assert [status.wire_name for status in RequestStatus] == [
        "Undefined",
        "Heartbeat",
        "Rpc",
        "Open",
        "Running",
        "Cancel",
        "Complete",
    ]
    assert [status.wire_name for status in ResponseStatus] == ["Undefined", "Success", "Error"]


def test_unknown_codes_are_undefined() -> None:
    assert RpcCode.of(99) is RpcCode.UNDEFINED
    assert RpcCode.of(-5) is RpcCode.UNDEFINED
    assert RpcCode.of(81) is RpcCode.READ_BLOCK


def test_message_types() -> None:
    rpc, request, success = RequestStatus.RPC, ResponseStatus.UNDEFINED, ResponseStatus.SUCCESS
    assert message_types(head(2, rpc, request)) is pb.MkdirRequest
    assert message_types(head(2, rpc, success)) is pb.MkdirResponse
    assert message_types(head(2, rpc, ResponseStatus.ERROR)) is None
    assert message_types(head(11, rpc, success)) is pb.LocatedBlockProto
    assert message_types(head(99, rpc, request)) is None
    assert message_types(head(2, RequestStatus.OPEN, request)) is None
    assert message_types(head(0, RequestStatus.HEARTBEAT, request, 0)) is None
    assert message_types(head(80, RequestStatus.RUNNING, request)) is pb.DataHeaderProto
    assert message_types(head(80, RequestStatus.RUNNING, request, 0)) is None
    assert message_types(head(80, RequestStatus.RUNNING, success)) is None
    assert message_types(head(80, RequestStatus.CANCEL, request)) is pb.BlockWriteRequest
    assert message_types(head(80, RequestStatus.COMPLETE, success)) is None
    assert message_types(head(82, RequestStatus.COMPLETE, success)) is pb.BlocksBatchCommitResponse
    # An absent header of a unary call is the message with all defaults.
    assert message_types(head(2, rpc, request, 0)) is pb.MkdirRequest
