"""Frames as dictionaries for JSON."""

from __future__ import annotations

import json
from typing import Any

from golden_frames import all_scenarios
from hypothesis import given
from hypothesis import strategies as st
from t1_wire.strategies import frames, messages, unhurried

from curvfs.wire.codes import REQUEST_MESSAGE, RESPONSE_MESSAGE, RequestStatus, ResponseStatus, RpcCode
from curvfs.wire.describe import describe
from curvfs.wire.frame import HEARTBEAT, Frame, decode_head
from curvfs.wire.messages import encode, pb
from curvfs.wire.records import encode_error

KEYS = {
    "code",
    "name",
    "request_status",
    "response_status",
    "req_id",
    "seq_id",
    "message",
    "fields",
    "data_len",
}


def request(code: RpcCode, message: Any, data: bytes = b"") -> Frame:
    header = message if isinstance(message, bytes) else encode(message)
    return Frame.make(code, RequestStatus.RPC, ResponseStatus.UNDEFINED, 2**62, -1, header, data)


def to_json(described: dict[str, Any]) -> dict[str, Any]:
    again: dict[str, Any] = json.loads(json.dumps(described, allow_nan=False))
    assert again == described
    return again


def test_a_request() -> None:
    message = pb.MkdirRequest(path="/a", opts=pb.MkdirOptsProto(mode=0o755, x_attr={"k": b"\x00\xff"}))
    assert to_json(describe(request(RpcCode.MKDIR, message))) == {
        "code": 2,
        "name": "Mkdir",
        "request_status": "Rpc",
        "response_status": "Undefined",
        "req_id": 2**62,
        "seq_id": -1,
        "message": "MkdirRequest",
        "fields": {
            "path": "/a",
            "opts": {
                "create_parent": False,
                "mode": 493,
                "x_attr": {"k": "AP8="},
                "storage_policy": {
                    "storage_type": "STORAGE_TYPE_PROTO_DISK",
                    "ttl_ms": 0,
                    "ttl_action": "TTL_ACTION_PROTO_NONE",
                    "ufs_mtime": 0,
                    "state": "STORAGE_STATE_PROTO_CV",
                },
                "owner": "",
                "group": "",
            },
        },
        "data_len": 0,
    }


def test_only_fields_on_the_wire() -> None:
    assert describe(request(RpcCode.EXISTS, b""))["fields"] == {}
    assert describe(request(RpcCode.LIST_OPTIONS, b"\x12\x02\x08\x00"))["fields"] == {"options": {"limit": 0}}


def test_heartbeat_and_empty_frames() -> None:
    described = to_json(describe(decode_head(HEARTBEAT)))
    assert (described["name"], described["request_status"]) == ("Undefined", "Heartbeat")
    assert (described["message"], described["fields"]) == (None, {})


def test_error_reply() -> None:
    record = encode_error(8, "File /f not found")
    frame = Frame.make(7, RequestStatus.RPC, ResponseStatus.ERROR, 1, -1, b"", record)
    described = to_json(describe(frame))
    assert set(described) == KEYS | {"error_kind", "error_text"}
    assert (described["error_kind"], described["error_text"]) == (8, "File /f not found")
    assert (described["message"], described["data_len"]) == (None, len(record))


def test_error_reply_whose_data_was_not_kept() -> None:
    frame = Frame.make(7, RequestStatus.RPC, ResponseStatus.ERROR, 1, -1, b"", encode_error(8, "x"))
    described = describe(frame.head, b"", None, 5000)
    assert (described["error_kind"], described["error_text"], described["data_len"]) == (None, None, 5000)


def test_enum_numbers_without_a_name() -> None:
    policy = pb.StoragePolicyProto(storage_type=77, state=0)  # type: ignore[arg-type]
    message = pb.MkdirRequest(opts=pb.MkdirOptsProto(storage_policy=policy))
    described = describe(request(RpcCode.MKDIR, message))["fields"]["opts"]["storage_policy"]
    assert (described["storage_type"], described["state"]) == (77, 0)


def test_doubles_that_json_does_not_have() -> None:
    report = pb.MetricsReportRequest(
        metrics=[
            pb.MetricValueProto(metric_type=pb.GAUGE, name="n", value=value, tags={"a": "b"})
            for value in (float("nan"), float("inf"), float("-inf"), 0.5)
        ]
    )
    metrics = to_json(describe(request(RpcCode.METRICS_REPORT, report)))["fields"]["metrics"]
    assert [metric["value"] for metric in metrics] == ["NaN", "Infinity", "-Infinity", 0.5]
    assert metrics[0]["metric_type"] == "GAUGE"
    assert metrics[0]["tags"] == {"a": "b"}


def test_64_bit_numbers_are_numbers() -> None:
    lock = pb.FileLockProto(end=2**64 - 1, owner_id=2**64 - 1)
    described = to_json(describe(request(RpcCode.SET_LOCK, pb.SetLockRequest(path="/f", lock=lock))))
    assert described["fields"]["lock"]["end"] == 2**64 - 1


def test_a_header_that_is_something_else() -> None:
    described = to_json(describe(request(RpcCode.MKDIR, b"\xff\xff\xff\xff")))
    assert (described["message"], described["fields"]) == ("MkdirRequest", None)
    assert "MkdirRequest" in described["header_error"]


def test_fields_nobody_knows() -> None:
    header = encode(pb.ExistsRequest(path="/a")) + bytes.fromhex("f80a01c03e07")
    described = to_json(describe(request(RpcCode.EXISTS, header)))
    assert described["fields"] == {"path": "/a"}
    assert described["unknown_fields"] == [175, 1000]


@given(frames)
@unhurried
def test_any_frame(frame: Frame) -> None:
    assert set(to_json(describe(frame))) >= KEYS


@given(st.data())
@unhurried
def test_any_message(data: st.DataObject) -> None:
    requested = data.draw(st.booleans())
    table = REQUEST_MESSAGE if requested else RESPONSE_MESSAGE
    (code, status), cls = data.draw(st.sampled_from(sorted(table.items(), key=lambda item: item[0])))
    response = ResponseStatus.UNDEFINED if requested else ResponseStatus.SUCCESS
    frame = Frame.make(code, status, response, 1, 1, encode(data.draw(messages(cls))))
    described = to_json(describe(frame))
    assert isinstance(described["fields"], dict)
    assert "header_error" not in described


def test_all_captured_frames() -> None:
    for scenario in all_scenarios():
        for frame in scenario.frames:
            described = describe(frame.head, frame.header, frame.data)
            json.dumps(described, allow_nan=False)
            assert "unknown_fields" not in described
            assert ("header_error" in described) <= (scenario.name == "raw_garbage_header")
            assert ("error_kind" in described) == (frame.head.response is ResponseStatus.ERROR)
