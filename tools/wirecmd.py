"""``curvfs wire``: look at what crosses a connection."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Annotated, Any, cast

import typer

from curvfs.errors import RemoteProtocolError, UsageError
from curvfs.units import KIB
from curvfs.wire.describe import describe
from curvfs.wire.frame import FIXED_BYTES, FrameDecoder, decode_head

app = typer.Typer(help="Look at the wire protocol.", no_args_is_help=True)

_READ_BYTES = 256 * KIB


@app.callback()
def _wire() -> None:
    """Look at the wire protocol."""


@app.command()
def decode(
    file: Annotated[str, typer.Argument(metavar="[FILE|-]", help="What to read; - is standard input.")] = "-",
    raw: Annotated[
        bool, typer.Option("--raw", help="The input is the bytes of one direction, not JSON lines.")
    ] = False,
) -> None:
    """Print captured frames as one JSON object a line.

    The input is JSON lines: {"frame": HEX} for a whole frame, or {"head": HEX, "data_len": N} for one without its
    data section; lines with an "event" instead are skipped. With --raw it is the bytes of one direction of a
    connection. Whole frames in front of a damaged one are still printed.
    """
    source = "standard input" if file == "-" else file
    with _input(file, source) as stream:
        for described in _raw_frames(stream, source) if raw else _json_frames(stream, source):
            typer.echo(json.dumps(described))


@contextmanager
def _input(file: str, source: str) -> Iterator[IO[bytes]]:
    if file == "-":
        yield sys.stdin.buffer
        return
    try:
        stream = Path(file).open("rb")  # noqa: SIM115 (closed below)
    except OSError as error:
        raise UsageError(f"Cannot read {source}: {error.strerror}; name a file, or - for standard input.") from error
    with stream:
        yield stream


def _json_frames(stream: IO[bytes], source: str) -> Iterator[dict[str, Any]]:
    for number, line in enumerate(stream, start=1):
        if not line.strip():
            continue
        try:
            described = _json_frame(line)
        except (ValueError, RemoteProtocolError) as error:
            raise UsageError(f"Line {number} of {source} is not a captured frame: {error}") from error
        if described is not None:
            yield described


def _json_frame(line: bytes) -> dict[str, Any] | None:
    """The frame in one JSON line, None for an event. Raises ValueError, or RemoteProtocolError for its lengths."""
    try:
        entry = json.loads(line)
    except (ValueError, RecursionError):
        raise ValueError("it is not JSON; use --raw for the bytes of a connection.") from None
    if not isinstance(entry, dict) or not {"frame", "head", "event"} & entry.keys():
        raise ValueError('it needs "frame", or "head" and "data_len", or "event".')
    key = "frame" if "frame" in entry else "head"
    if key not in entry:
        return None
    try:
        captured = bytes.fromhex(entry[key])
    except (TypeError, ValueError):
        raise ValueError(f'its "{key}" is not a string of hexadecimal digits.') from None
    head = decode_head(captured)
    data_start = FIXED_BYTES + head.header_len
    header, data = captured[FIXED_BYTES:data_start], captured[data_start:]
    announced_bytes = data_start + (head.data_len if key == "frame" else 0)
    if len(captured) != announced_bytes:
        raise ValueError(f'its "{key}" has {len(captured)} bytes where the frame announces {announced_bytes}.')
    if key == "frame":
        return describe(head, header, data)
    if entry.get("data_len", head.data_len) != head.data_len:
        raise ValueError(f'its "data_len" is {entry["data_len"]!r} where the frame announces {head.data_len}.')
    return describe(head, header, data if head.data_len == 0 else None)


def _raw_frames(stream: IO[bytes], source: str) -> Iterator[dict[str, Any]]:
    decoder = FrameDecoder()
    read_bytes = 0
    # Reads return what has come, so that frames appear while a live capture goes on.
    read_some = cast(Any, stream).read1
    while chunk := read_some(_READ_BYTES):
        read_bytes += len(chunk)
        decoder.feed(chunk)
        try:
            while (frame := decoder.next_frame()) is not None:
                yield describe(frame)
        except RemoteProtocolError as error:
            offset = read_bytes - decoder.pending_bytes
            raise UsageError(f"No frame begins at byte {offset} of {source}: {error}") from error
    if decoder.pending_bytes:
        offset = read_bytes - decoder.pending_bytes
        raise UsageError(
            f"The last frame of {source} is cut: it begins at byte {offset}, "
            f"and only {decoder.pending_bytes} bytes of it are there."
        )
