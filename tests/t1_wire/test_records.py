"""Error records, well formed and not."""

from __future__ import annotations

import struct

from hypothesis import given
from hypothesis import strategies as st
from t1_wire.strategies import unhurried

from curvfs.errors import KIND_COMMON, KINDS, NotFound, from_reply
from curvfs.wire.frame import MAX_DATA_BYTES
from curvfs.wire.records import MAX_TEXT_BYTES, decode_error, encode_error

FOLDED = {4, 5, 6}


@given(st.sampled_from(sorted(set(KINDS) - FOLDED)), st.text(st.characters(exclude_categories=["Cs"])))
@unhurried
def test_round_trip(kind: int, text: str) -> None:
    assert decode_error(encode_error(kind, text)) == (kind, text)


def test_layout() -> None:
    assert encode_error(8, "né") == bytes.fromhex("00000008 00000003 6ec3a9 00000000")


@given(st.binary(max_size=64))
@unhurried
def test_any_bytes_decode(data: bytes) -> None:
    kind, text = decode_error(data)
    assert kind in KINDS
    assert isinstance(text, str)


def test_timeout_and_protobuf_kinds_fold_into_io() -> None:
    for kind in FOLDED:
        assert decode_error(encode_error(kind, "x")) == (1, "x")


def test_unknown_kinds_are_common() -> None:
    for kind in (0, 37, 9999, -1, -(2**31), 2**31 - 1):
        assert decode_error(encode_error(kind, "x")) == (KIND_COMMON, "x")


def test_short_records_are_text() -> None:
    assert decode_error(b"") == (KIND_COMMON, "")
    assert decode_error(b"oops \xff") == (KIND_COMMON, "oops \N{REPLACEMENT CHARACTER}")


def test_missing_or_wrong_lengths() -> None:
    assert decode_error(struct.pack(">iI", 8, 4) + b"gone") == (8, "gone")
    assert decode_error(struct.pack(">iI", 8, 2**32 - 1) + b"gone") == (8, "gone")
    assert decode_error(struct.pack(">iI", 8, 4) + b"gone" + struct.pack(">I", 3) + b"xyz") == (8, "gone")
    assert decode_error(struct.pack(">iI", 8, 0)) == (8, "")


def test_long_texts_are_cut_between_characters() -> None:
    kind, text = decode_error(encode_error(8, "é" * MAX_DATA_BYTES))
    assert (kind, len(text.encode())) == (8, MAX_TEXT_BYTES)
    assert decode_error(encode_error(8, "x" + "é" * MAX_TEXT_BYTES))[1].endswith("é")


def test_texts_without_utf8() -> None:
    assert decode_error(encode_error(8, "a\udcffb")) == (8, "a?b")


def test_a_record_becomes_the_right_exception() -> None:
    error = from_reply(*decode_error(encode_error(8, "File /f not found")))
    assert isinstance(error, NotFound)
    assert (error.kind, error.text) == (8, "File /f not found")
