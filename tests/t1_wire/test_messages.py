"""Messages: what is written though nobody set it, what is read though nobody knows it."""

from __future__ import annotations

from typing import Any

import pytest
from google.protobuf.message import Message
from hypothesis import given
from hypothesis import strategies as st
from t1_wire.strategies import MESSAGES, messages, unhurried

from curvfs.errors import RemoteProtocolError
from curvfs.wire import messages as reexported
from curvfs.wire.messages import decode, encode, map_value, pb

BY_NAME = pytest.mark.parametrize("cls", MESSAGES, ids=lambda cls: cls.DESCRIPTOR.name)
REQUIRED: Any = pb.required


def is_required(field: Any) -> bool:
    return bool(field.GetOptions().Extensions[REQUIRED])


def assert_complete(message: Message) -> None:
    """Every required field of ``message`` is set, and of every message inside it."""
    for field in message.DESCRIPTOR.fields:
        entry_value = map_value(field)
        if is_required(field):
            assert message.HasField(field.name), (message.DESCRIPTOR.name, field.name)
        if (entry_value or field).message_type is None:
            continue
        value = getattr(message, field.name)
        if entry_value is not None:
            inner = list(value.values())
        elif field.is_repeated:
            inner = list(value)
        else:
            inner = [value] if message.HasField(field.name) else []
        for each in inner:
            assert_complete(each)


@BY_NAME
def test_required_fields_are_always_written(cls: type[Message]) -> None:
    message = decode(cls, encode(cls()))
    assert_complete(message)
    for field, value in message.ListFields():
        assert is_required(field)
        if field.message_type is None:
            assert value == field.default_value


@given(st.data())
@unhurried
def test_round_trip(data: st.DataObject) -> None:
    cls = data.draw(st.sampled_from(MESSAGES))
    message = data.draw(messages(cls))
    before = cls()
    before.CopyFrom(message)
    encoded = encode(message)
    decoded = decode(cls, encoded)
    assert decoded == message
    assert_complete(decoded)
    assert encode(decoded) == encoded
    # Nothing that was set has changed.
    for field, value in before.ListFields():
        if field.message_type is None:
            assert getattr(decoded, field.name) == value
    before.MergeFrom(message)
    assert {field.name for field, _ in before.ListFields()} == {field.name for field, _ in decoded.ListFields()}


@given(st.sampled_from(MESSAGES), st.binary(max_size=100))
@unhurried
def test_random_bytes_fail_cleanly(cls: type[Message], data: bytes) -> None:
    try:
        encode(decode(cls, data))
    except RemoteProtocolError as error:
        assert cls.DESCRIPTOR.name in str(error)


@given(st.data())
@unhurried
def test_damaged_messages_fail_cleanly(data: st.DataObject) -> None:
    cls = data.draw(st.sampled_from(MESSAGES))
    encoded = bytearray(encode(data.draw(messages(cls))))
    if encoded:
        encoded[data.draw(st.integers(0, len(encoded) - 1))] ^= data.draw(st.integers(1, 255))
        del encoded[data.draw(st.integers(0, len(encoded))) :]
    try:
        decode(cls, memoryview(encoded))
    except RemoteProtocolError:
        pass


def test_nested_groups_do_not_exhaust_the_stack() -> None:
    with pytest.raises(RemoteProtocolError):
        decode(pb.FileStatusProto, b"\xfb\x3f" * 100_000)


def test_text_must_be_utf8() -> None:
    with pytest.raises(RemoteProtocolError):
        decode(pb.ExistsRequest, b"\x0a\x02\xff\xfe")


def test_unknown_enum_values_survive() -> None:
    for cls, field, value in (
        (pb.StoragePolicyProto, "storage_type", 77),
        (pb.StoragePolicyProto, "state", 9),
        (pb.StoragePolicyProto, "state", 0),
        (pb.FileStatusProto, "file_type", 10),
        (pb.MetricValueProto, "metric_type", 3),
        (pb.BlockReportInfoProto, "status", 4),
        (pb.SubmitJobRequest, "job_type", 200),
    ):
        message: Any = decode(cls, encode(cls(**{field: value})))
        assert getattr(message, field) == value
        assert getattr(decode(cls, encode(message)), field) == value


def test_missing_fields_read_as_their_declared_defaults() -> None:
    policy = decode(pb.StoragePolicyProto, b"")
    assert (policy.storage_type, policy.state) == (pb.STORAGE_TYPE_PROTO_DISK, pb.STORAGE_STATE_PROTO_CV)
    assert decode(pb.FileStatusProto, b"").file_type == pb.FILE_TYPE_PROTO_FILE
    options = decode(pb.CreateFileOptsProto, b"")
    assert (options.create_flag, options.replicas, options.block_size) == (1, 1, 128 << 20)
    assert options.client_name == "localhost"
    assert decode(pb.AddBlockRequest, b"").located is True
    reading = decode(pb.BlockReadRequest, b"")
    assert (reading.enable_read_ahead, reading.read_ahead_len, reading.drop_cache_len) == (True, 4 << 20, 1 << 20)
    assert decode(pb.MetricValueProto, b"").metric_type == pb.GAUGE
    component = decode(pb.ComponentInfoProto, b"")
    assert (component.protocol_version, component.min_protocol_version) == (1, 1)
    compatibility = decode(pb.ServerCompatibilityInfoProto, b"")
    assert compatibility.compatibility_mode == pb.COMPATIBILITY_MODE_PROTO_DIAGNOSE
    assert decode(pb.CompleteFileRequest, b"").return_file_blocks is True


def test_unknown_fields_are_ignored_but_kept() -> None:
    encoded = encode(pb.ExistsRequest(path="/a")) + bytes.fromhex("c03e07")
    message = decode(pb.ExistsRequest, encoded)
    assert message.path == "/a"
    assert encode(message) == encoded


def test_repeated_numbers_are_written_unpacked_and_read_either_way() -> None:
    encoded = encode(pb.DeleteBlockCmdProto(blocks=[1, 2]))
    assert encoded == bytes.fromhex("18011802")
    assert list(decode(pb.DeleteBlockCmdProto, encoded).blocks) == [1, 2]
    assert list(decode(pb.DeleteBlockCmdProto, bytes.fromhex("1a020102")).blocks) == [1, 2]


def test_map_entries_may_lack_key_or_value_and_are_written_sorted() -> None:
    status = decode(pb.FileStatusProto, bytes.fromhex("6a030a01616a0312017a6a00"))
    assert dict(status.x_attr) == {"a": b"", "": b""}
    one = pb.SetAttrOptsProto(add_x_attr={"b": b"2", "a": b"1"})
    other = pb.SetAttrOptsProto(add_x_attr={"a": b"1", "b": b"2"})
    assert encode(one) == encode(other)


def test_an_optional_message_is_written_only_when_set() -> None:
    without = pb.AddBlockRequest(path="/f")
    assert not decode(pb.AddBlockRequest, encode(without)).HasField("last_block")
    empty = pb.AddBlockRequest(path="/f", last_block=pb.ExtendedBlockProto())
    assert decode(pb.AddBlockRequest, encode(empty)).last_block.HasField("storage_type")


def test_every_message_can_be_imported_by_its_name() -> None:
    for cls in MESSAGES:
        assert getattr(reexported, cls.DESCRIPTOR.name) is cls
