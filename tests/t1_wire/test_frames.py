"""Frame heads, whole frames and the incremental decoder, against friends and enemies."""

from __future__ import annotations

import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st
from t1_wire.strategies import I32, I64, frames, unhurried

from curvfs.errors import LocalProtocolError, RemoteProtocolError
from curvfs.units import GIB, MIB
from curvfs.wire.codes import RequestStatus, ResponseStatus, decode_status, encode_status
from curvfs.wire.frame import (
    FIXED_BYTES,
    HEARTBEAT,
    MAX_DATA_BYTES,
    Frame,
    FrameDecoder,
    decode_head,
    encode_head,
)

REQUEST = ResponseStatus.UNDEFINED


def raw_head(total_len: int, header_len: int, *, code: int = 2, status: int = 0xF1) -> bytes:
    return struct.pack(">iibBqi", total_len, header_len, code, status, 1, -1)


def drain(decoder: FrameDecoder) -> list[Frame]:
    found = []
    while (frame := decoder.next_frame()) is not None:
        found.append(frame)
    return found


def sample() -> Frame:
    return Frame.make(80, RequestStatus.RUNNING, REQUEST, 7, 1, b"\x08\x00\x10\x00\x18\x00", b"hello")


@given(st.lists(frames, max_size=5), st.data())
@unhurried
def test_round_trip_in_any_pieces(sent: list[Frame], data: st.DataObject) -> None:
    raw = b"".join(frame.encode() for frame in sent)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(raw)), max_size=8)))
    decoder = FrameDecoder()
    got: list[Frame] = []
    for start, end in zip([0, *cuts], [*cuts, len(raw)], strict=True):
        decoder.feed(memoryview(raw)[start:end])
        got += drain(decoder)
    assert got == sent
    assert decoder.pending_bytes == 0


def test_split_at_every_byte() -> None:
    raw = sample().encode() + HEARTBEAT + sample().encode()
    expected = [sample(), Frame(decode_head(HEARTBEAT)), sample()]
    for cut in range(len(raw) + 1):
        decoder = FrameDecoder()
        decoder.feed(raw[:cut])
        got = drain(decoder)
        decoder.feed(raw[cut:])
        assert got + drain(decoder) == expected, cut


def test_byte_by_byte() -> None:
    decoder = FrameDecoder()
    got = []
    for byte in sample().encode() * 2:
        decoder.feed(bytes([byte]))
        got += drain(decoder)
    assert got == [sample(), sample()]


def test_truncated_at_every_byte() -> None:
    raw = sample().encode()
    for length in range(len(raw)):
        decoder = FrameDecoder()
        decoder.feed(raw[:length])
        assert decoder.next_frame() is None
        assert decoder.pending_bytes == length
        if length < FIXED_BYTES:
            with pytest.raises(RemoteProtocolError, match=f"only {length} came"):
                decode_head(raw[:length])


@pytest.mark.parametrize(
    ("total_len", "header_len"),
    [
        (18, -1),
        (18, 1),
        (17, 0),
        (0, 0),
        (-1, 0),
        (-(2**31), 0),
        (-(2**31), -(2**31)),
        (2**31 - 1, -1),
        (2**31 - 1, -(2**31)),
        (18, 2**31 - 1),
        (2**31 - 1, 2**31 - 1),
        (18 + MAX_DATA_BYTES + 1, 0),
        (2**31 - 1, 0),
        (2**31 - 1, GIB + 1),
    ],
)
def test_impossible_lengths(total_len: int, header_len: int) -> None:
    raw = raw_head(total_len, header_len)
    with pytest.raises(RemoteProtocolError):
        decode_head(raw)
    decoder = FrameDecoder()
    decoder.feed(HEARTBEAT + raw)
    assert decoder.next_frame() is not None
    for _ in range(2):
        with pytest.raises(RemoteProtocolError):
            decoder.next_frame()


def test_lengths_are_refused_before_anything_is_collected() -> None:
    decoder = FrameDecoder(max_header_bytes=100)
    decoder.feed(raw_head(18 + 101, 101))
    with pytest.raises(RemoteProtocolError, match="at most 100"):
        decoder.next_frame()


def test_largest_lengths_that_are_accepted() -> None:
    assert decode_head(raw_head(18 + MAX_DATA_BYTES, 0)).data_len == 16 * MIB
    assert decode_head(raw_head(18 + GIB, GIB)).header_len == GIB
    frame = Frame.make(81, RequestStatus.RUNNING, ResponseStatus.SUCCESS, 1, 1, b"", bytes(MAX_DATA_BYTES))
    decoder = FrameDecoder()
    decoder.feed(frame.encode())
    assert drain(decoder) == [frame]


def test_headers_may_pass_16_mib() -> None:
    frame = Frame.make(8, RequestStatus.RPC, ResponseStatus.SUCCESS, 1, -1, bytes(20 * MIB))
    decoder = FrameDecoder()
    decoder.feed(frame.encode())
    assert drain(decoder) == [frame]


@pytest.mark.parametrize(("header_len", "data_len"), [(-1, 0), (0, -1), (0, MAX_DATA_BYTES + 1), (2**31, 0)])
def test_encode_refuses_lengths(header_len: int, data_len: int) -> None:
    with pytest.raises(LocalProtocolError):
        encode_head(2, RequestStatus.RPC, REQUEST, 1, -1, header_len, data_len)


@pytest.mark.parametrize(("code", "req_id", "seq_id"), [(128, 1, 1), (-129, 1, 1), (2, 2**63, 1), (2, 1, 2**31)])
def test_encode_refuses_numbers(code: int, req_id: int, seq_id: int) -> None:
    with pytest.raises(LocalProtocolError):
        encode_head(code, RequestStatus.RPC, REQUEST, req_id, seq_id, 0, 0)


@given(st.integers(-128, 127), st.integers(0, 255), I64, I32, st.integers(0, 1 << 30), st.integers(0, MAX_DATA_BYTES))
@unhurried
def test_head_decodes_to_what_was_packed(
    code: int, status: int, req_id: int, seq_id: int, header_len: int, data_len: int
) -> None:
    raw = struct.pack(">iibBqi", 18 + header_len + data_len, header_len, code, status, req_id, seq_id)
    head = decode_head(bytearray(raw) + b"more")
    assert (head.code, head.req_id, head.seq_id) == (code, req_id, seq_id)
    assert (head.header_len, head.data_len) == (header_len, data_len)
    assert (head.request, head.response) == decode_status(status)


@given(st.lists(st.binary(max_size=80), max_size=6))
@unhurried
def test_random_bytes_fail_cleanly(pieces: list[bytes]) -> None:
    decoder = FrameDecoder()
    try:
        for piece in pieces:
            decoder.feed(piece)
            drain(decoder)
    except RemoteProtocolError:
        pass


@given(frames, st.data())
@unhurried
def test_one_flipped_byte_fails_cleanly(frame: Frame, data: st.DataObject) -> None:
    raw = bytearray(frame.encode())
    raw[data.draw(st.integers(0, len(raw) - 1))] ^= data.draw(st.integers(1, 255))
    decoder = FrameDecoder()
    decoder.feed(raw)
    try:
        drain(decoder)
    except RemoteProtocolError:
        pass


def test_status_bytes_of_the_specification() -> None:
    rows = {
        RequestStatus.HEARTBEAT: (0xF0, 0x00, 0x10),
        RequestStatus.RPC: (0xF1, 0x01, 0x11),
        RequestStatus.OPEN: (0xF2, 0x02, 0x12),
        RequestStatus.RUNNING: (0xF3, 0x03, 0x13),
        RequestStatus.CANCEL: (0xF4, 0x04, 0x14),
        RequestStatus.COMPLETE: (0xF5, 0x05, 0x15),
    }
    responses = (ResponseStatus.UNDEFINED, ResponseStatus.SUCCESS, ResponseStatus.ERROR)
    for request, row in rows.items():
        for response, byte in zip(responses, row, strict=True):
            assert encode_status(request, response) == byte
            assert decode_status(byte) == (request, response)
    for response in responses:
        assert encode_status(RequestStatus.UNDEFINED, response) == 0xFF


def test_status_bytes_without_a_meaning() -> None:
    for byte in (0xFF, 0x6F, 0x86, 0x7E, 0x2A):
        assert decode_status(byte) == (RequestStatus.UNDEFINED, ResponseStatus.UNDEFINED)
        assert decode_head(raw_head(18, 0, status=byte)).is_empty
    assert decode_status(0x1F) == (RequestStatus.UNDEFINED, ResponseStatus.ERROR)
    assert decode_status(0x23) == (RequestStatus.RUNNING, ResponseStatus.UNDEFINED)
    assert len({decode_status(byte) for byte in range(256)}) == 7 * 3


def test_heartbeats_whatever_their_response_status() -> None:
    assert decode_head(HEARTBEAT).is_heartbeat
    for status in (0xF0, 0x00, 0x10, 0x70):
        assert decode_head(raw_head(18, 0, status=status)).is_heartbeat
    assert not decode_head(raw_head(18, 0, code=1, status=0xF1)).is_heartbeat
