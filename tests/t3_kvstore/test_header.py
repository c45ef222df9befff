"""The object format: what safetensors makes of it, and what a reader makes of bytes that somebody bent."""

from __future__ import annotations

import json
import os
import random
import struct
from pathlib import Path
from typing import Any

import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from kvstore import Geometry, Identity
from kvstore.header import (
    ALIGNMENT_BYTES,
    MAX_HEADER_BYTES,
    BadObject,
    NewerFormat,
    ObjectLayout,
    damaged_unit,
    header_length,
    read_header,
    stored_tensors,
)
from kvstore.keys import KeyChain, PageKey

PAGE = Geometry.of(
    {
        "a": ("bfloat16", (2, 3, 5)),
        "odd": ("float8_e4m3fnuz", (4097,)),
        "scalar": ("float32", ()),
        "none": ("int8", (0, 3)),
        "whole": ("float16", (2048,)),
    },
    page_tokens=4,
)


def sealed(page: Geometry = PAGE, **settings: Any) -> tuple[bytearray, ObjectLayout, PageKey]:
    """A whole object with random payload."""
    layout = ObjectLayout(page)
    key = KeyChain(Identity.of(page, model="m", revision="r")).keys(range(page.page_tokens))[0]
    content = bytearray(os.urandom(layout.object_bytes))
    layout.seal(memoryview(content), key, **({"writer": "test", "created_ms": 1234} | settings))
    return content, layout, key


def accepted(content: bytes | bytearray) -> bool:
    """Would a reader take these bytes?"""
    view = memoryview(content)
    try:
        header = read_header(view, len(content))
        stored_tensors(header)
    except (BadObject, NewerFormat):
        return False
    return damaged_unit(header, view) is None


def test_an_object_says_what_it_is() -> None:
    content, layout, key = sealed()
    header = read_header(memoryview(content), len(content))
    assert header.table == layout.table
    assert header.header_bytes == layout.header_bytes
    assert header.data_bytes == layout.data_bytes
    assert header.metadata["key"] == key.hex
    assert header.metadata["tokens"] == "0+4"
    assert header.metadata["created_ms"] == "1234"
    assert json.loads(header.metadata["dtypes"]) == {"odd": "float8_e4m3fnuz"}
    assert [(t.name, t.dtype, t.shape) for t in stored_tensors(header)] == [
        (spec.name, spec.dtype.name, spec.shape) for spec in PAGE.tensors
    ]
    assert damaged_unit(header, memoryview(content)) is None


def test_the_header_sum_lies_where_the_format_says() -> None:
    content, layout, _ = sealed()
    found = bytes(content[39:71])
    blank = bytes(content[:39]) + b"0" * 32 + bytes(content[71 : layout.header_bytes])
    assert xxhash.xxh3_128_hexdigest(blank).encode() == found


def test_padding_is_zero_whatever_was_in_the_buffer() -> None:
    content, layout, _ = sealed()
    for offset, length in layout.pads:
        start = layout.header_bytes + offset
        assert content[start : start + length] == bytes(length)


def test_the_safetensors_library_opens_it(tmp_path: Path) -> None:
    safetensors = pytest.importorskip("safetensors")
    torch = pytest.importorskip("torch")
    content, layout, _ = sealed()
    path = tmp_path / "object.safetensors"
    path.write_bytes(content)
    with safetensors.safe_open(path, "pt") as file:
        assert file.metadata()["format"] == "1"
        assert {name for name in set(file.keys()) if not name.startswith(".pad.")} == {t.name for t in PAGE.tensors}
        for spec, offset in layout.tensors:
            start = layout.header_bytes + offset
            tensor = file.get_tensor(spec.name)
            assert tuple(tensor.shape) == spec.shape
            raw = tensor.reshape(-1).view(torch.uint8).numpy().tobytes() if spec.size_bytes else b""
            assert raw == bytes(content[start : start + spec.size_bytes])


def test_no_flipped_bit_goes_unseen() -> None:
    content, layout, _ = sealed()
    assert accepted(content)
    at = random.Random(7)
    length_bytes, sum_digits = range(8), range(39, 71)
    text_end = len(bytes(content[: layout.header_bytes]).rstrip(b" "))
    places = [*length_bytes, *sum_digits, 8, 38, 71, 200, text_end, layout.header_bytes - 1]
    places += [layout.header_bytes + offset for _, offset in layout.tensors if offset < layout.data_bytes]
    places += [layout.header_bytes + offset + at.randrange(length) for offset, length in layout.pads]
    places += [len(content) - 1, *(at.randrange(len(content)) for _ in range(300))]
    for place in places:
        bit = 1 << at.randrange(8)
        content[place] ^= bit
        assert not accepted(content), place
        content[place] ^= bit
    assert accepted(content)


@pytest.mark.parametrize("cut", [0, 1, 8, 4095, 4096, -4096, -1, 4096 * 3])
def test_cut_and_grown_files(cut: int) -> None:
    content, _, _ = sealed()
    short = content[:cut] if cut <= 4096 else content + bytes(cut)
    assert not accepted(bytes(short))


def bent(change: Any) -> bytes:
    """An object whose header was changed by somebody who computes checksums, too."""
    content, layout, _ = sealed()
    header = json.loads(bytes(content[8 : layout.header_bytes]))
    header = change(header) or header
    text = json.dumps(header, separators=(",", ":")).encode()
    size = -(-(8 + len(text)) // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
    raw = bytearray(struct.pack("<Q", size - 8) + text + b" " * (size - 8 - len(text)))
    if raw[8:39] == b'{"__metadata__":{"header_sum":"':
        raw[39:71] = b"0" * 32
        raw[39:71] = xxhash.xxh3_128_hexdigest(raw).encode()
    return bytes(raw + content[layout.header_bytes :])


def _metadata(**changes: Any) -> Any:
    return lambda header: header["__metadata__"].update(changes)


def _tensor(**changes: Any) -> Any:
    return lambda header: header["a"].update(changes)


def _drop(name: str) -> Any:
    def change(header: dict[str, Any]) -> None:
        del header[name]

    return change


def test_bending_nothing_keeps_it_whole() -> None:
    assert accepted(bent(lambda header: None))


HOSTILE = {
    "metadata not an object": lambda header: {"__metadata__": 7, "a": header["a"]},
    "no metadata": lambda header: {"a": header["a"]},
    "metadata not texts": _metadata(key=7),
    "version zero": _metadata(format="0"),
    "version no number": _metadata(format="x"),
    "version of other digits": _metadata(format="\u0661"),
    "version missing": lambda header: header["__metadata__"].pop("format") and None,
    "units missing": lambda header: header["__metadata__"].pop("units") and None,
    "units negative": _metadata(units="-4096*1"),
    "units zero": _metadata(units="0*5"),
    "units countless": _metadata(units="4096*99999999999999999999"),
    "units huge": _metadata(units="99999999*5"),
    "units no list": _metadata(units="4096x5,"),
    "sums not hex": _metadata(unit_sums="zz" * 16),
    "sums too few": _metadata(unit_sums="00" * 16),
    "dtypes no JSON": _metadata(dtypes="{"),
    "dtypes unknown": _metadata(dtypes='{"odd":"float3"}'),
    "dtypes of other size": _metadata(dtypes='{"odd":"float32"}'),
    "dtypes unhashable": _metadata(dtypes='{"odd":["x"]}'),
    "shape negative": _tensor(shape=[-1, -30]),
    "shape huge": _tensor(shape=[1 << 62, 1 << 62]),
    "shape no numbers": _tensor(shape=["2"]),
    "shape true": _tensor(shape=[True, 30]),
    "shape a number": _tensor(shape=30),
    "shape of too many dimensions": _tensor(shape=[1] * 5000),
    "offsets negative": _tensor(data_offsets=[-60, 0]),
    "offsets past the end": _tensor(data_offsets=[1 << 40, (1 << 40) + 60]),
    "offsets backwards": _tensor(data_offsets=[60, 0]),
    "offsets one": _tensor(data_offsets=[0]),
    "dtype unknown": _tensor(dtype="F3"),
    "dtype no text": _tensor(dtype=["BF16"]),
    "dtype of other size": _tensor(dtype="F64"),
    "extra field": _tensor(more=1),
    "tensor missing": _drop("a"),
    "padding missing": _drop(".pad.0"),
    "overlap": lambda header: header.update(b=header["a"]),
    "tensor no object": lambda header: header.update(a=1),
    "too many tensors": lambda header: header.update(
        {f"t{i}": {"dtype": "U8", "shape": [0], "data_offsets": [0, 0]} for i in range(20_000)}
    ),
}


@pytest.mark.parametrize("change", HOSTILE.values(), ids=HOSTILE)
def test_hostile_headers_with_good_checksums(change: Any) -> None:
    assert not accepted(bent(change))


@pytest.mark.parametrize(
    "length", [0, 1, 4088 - 1, 4088 + 1, (1 << 63) - 1, (1 << 64) - 1, MAX_HEADER_BYTES + 4088, 1 << 33]
)
def test_the_header_length_is_bounded_before_it_is_used(length: int) -> None:
    with pytest.raises(BadObject):
        header_length(struct.pack("<Q", length), 1 << 30)


@pytest.mark.parametrize(
    "text",
    [
        b"{" * 4088,
        b'{"__metadata__":{"header_sum":"' + b"[" * 4000,
        b'{"__metadata__":{"header_sum":"' + b"0" * 32 + b'","x":' + b"[" * 4000,
        b'{"__metadata__":{"header_sum":"' + b"0" * 32 + b'","x":' + b"9" * 4000,
        b'{"__metadata__":{"header_sum":"' + b"\xff" * 4000,
        b'{"__metadata__":{"header_sum":"",}',
    ],
    ids=lambda text: str(text[:50]),
)
def test_headers_that_are_no_json(text: bytes) -> None:
    raw = struct.pack("<Q", 4088) + text[:4088].ljust(4088)
    assert not accepted(raw + bytes(4096))


@given(st.binary(max_size=300), st.integers(0, 4095))
def test_noise_is_refused_and_nothing_else(noise: bytes, at: int) -> None:
    content, _, _ = sealed(Geometry.raw(100))
    content[at : at + len(noise)] = noise
    content = content[: len(content) // ALIGNMENT_BYTES * ALIGNMENT_BYTES]
    accepted(content)  # raises nothing but what it catches


def test_a_newer_format_is_told_apart() -> None:
    content = bent(_metadata(format="2"))
    with pytest.raises(NewerFormat):
        read_header(memoryview(content), len(content))


def test_a_writer_of_any_name_fits() -> None:
    content, layout, _ = sealed(writer='\u00e9"\\\n' * 500, created_ms=(1 << 63) - 1)
    assert accepted(content)
    assert len(content) == layout.object_bytes


def test_large_pages_have_room_for_their_sums() -> None:
    page = Geometry.attention(layers=64, kv_heads=8, head_dim=64, dtype="float16", page_tokens=3, unit_heads=1)
    content, layout, _ = sealed(page)
    assert len(layout.unit_lengths) == 64 * 2 * 8
    assert accepted(content)
