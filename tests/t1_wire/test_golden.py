"""Every captured frame: decoded without a field left over, and encoded again."""

from __future__ import annotations

from collections import Counter

import pytest
from golden_frames import VERSIONS, GoldenFrame, Scenario, all_scenarios, scenarios
from google.protobuf.message import Message

from curvfs.errors import RemoteProtocolError
from curvfs.wire.codes import ResponseStatus, message_types
from curvfs.wire.describe import unknown_fields
from curvfs.wire.frame import Frame, FrameDecoder, encode_head
from curvfs.wire.messages import decode, encode, map_value
from curvfs.wire.records import decode_error, encode_error

#: The probe sent a header there that is no protobuf at all.
GARBAGE_HEADER = {"raw_garbage_header"}
#: The probe left the header out there, which means the message with all defaults.
EMPTY_HEADER = {"raw_empty_header", "raw_mkdir_on_worker", "raw_writeblock_on_master"}


def messages_inside(message: Message) -> list[Message]:
    """``message`` and all messages in it."""
    found = [message]
    for field, value in message.ListFields():
        if field.message_type is None:
            continue
        entry_value = map_value(field)
        if entry_value is not None:
            values = list(value.values()) if entry_value.message_type else []
        else:
            values = list(value) if field.is_repeated else [value]
        for each in values:
            found += messages_inside(each)
    return found


def has_map(message: Message) -> bool:
    return any(map_value(field) for each in messages_inside(message) for field, _ in each.ListFields())


def reencoded_header(frame: GoldenFrame, scenario: Scenario) -> bytes:
    cls = message_types(frame.head)
    if cls is None:
        # Error replies, Running frames and acknowledgements have none; unknown codes may.
        return frame.header
    message = decode(cls, frame.header)
    for each in messages_inside(message):
        assert unknown_fields(each) == [], (str(scenario), each.DESCRIPTOR.name)
    encoded = encode(message)
    if has_map(message):
        assert decode(cls, encoded) == decode(cls, frame.header)
        return frame.header
    if not frame.header and encoded:
        assert scenario.name in EMPTY_HEADER
        assert all(field.has_presence for field, _ in message.ListFields())
        assert encode(cls()) == encoded
        return b""
    return encoded


@pytest.mark.parametrize("scenario", all_scenarios(), ids=str)
def test_decode_and_encode_again(scenario: Scenario) -> None:
    garbage = 0
    for frame in scenario.frames:
        head = frame.head
        try:
            header = reencoded_header(frame, scenario)
        except RemoteProtocolError:
            assert scenario.name in GARBAGE_HEADER
            garbage += 1
            header = frame.header
        assert header == frame.header, (str(scenario), head)
        if frame.data is not None:
            frame_again = Frame.make(
                head.code, head.request, head.response, head.req_id, head.seq_id, header, frame.data
            )
            assert frame_again.head == head
            assert frame_again.encode() == frame.captured
        else:
            prefix = encode_head(
                head.code, head.request, head.response, head.req_id, head.seq_id, len(header), head.data_len
            )
            assert prefix + header == frame.captured
        if head.response is ResponseStatus.ERROR:
            assert frame.data is not None
            assert encode_error(*decode_error(frame.data)) == frame.data
    assert garbage == (scenario.name in GARBAGE_HEADER)


@pytest.mark.parametrize("version", VERSIONS)
def test_one_direction_of_a_connection_as_a_stream(version: str) -> None:
    """All whole frames of a version back to back, fed in pieces that fit nothing."""
    frames = [frame for scenario in scenarios(version).values() for frame in scenario.frames if frame.data is not None]
    raw = b"".join(frame.captured for frame in frames)
    decoder = FrameDecoder()
    decoded: list[Frame] = []
    for start in range(0, len(raw), 1009):
        decoder.feed(raw[start : start + 1009])
        while (frame := decoder.next_frame()) is not None:
            decoded.append(frame)
    assert decoder.pending_bytes == 0
    assert decoded == [Frame(frame.head, frame.header, frame.data or b"") for frame in frames]


def test_everything_is_there() -> None:
    counts = Counter[str]()
    for scenario in all_scenarios():
        counts["scenarios"] += 1
        counts["frames"] += len(scenario.frames)
    assert counts == {"scenarios": 579, "frames": 8344}
