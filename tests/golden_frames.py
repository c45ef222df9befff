"""The golden frames of ``tests/golden/``, for any test: ``from golden_frames import scenarios``.

(pytest's ``pythonpath`` setting in pyproject.toml makes this module importable under that name.)
"""

from __future__ import annotations

import functools
import json
import tarfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from curvfs.wire.frame import FIXED_BYTES, FrameHead, decode_head

GOLDEN = Path(__file__).parent / "golden"

HEAD = "head"
ALPHA = "v0.3.2-alpha"
VERSIONS = (HEAD, ALPHA)


@dataclass(frozen=True, slots=True)
class GoldenFrame:
    """One captured frame. ``data`` is None where only its length (in ``head``) and ``data_sha256`` were kept."""

    conn: int
    peer: str
    sender: str
    head: FrameHead
    header: bytes
    data: bytes | None
    data_sha256: str | None
    #: The captured bytes: the whole frame, or its fixed part and header where ``data`` is None.
    captured: bytes

    @property
    def from_client(self) -> bool:
        return self.sender == "client"


@dataclass(frozen=True, slots=True)
class GoldenEvent:
    """The end of one direction of a connection (``fin``), or of both (``rst``)."""

    conn: int
    peer: str
    sender: str
    event: str


@dataclass(frozen=True, slots=True)
class Scenario:
    """What ``client`` did, what it saw, and what crossed the wire, in order."""

    version: str
    name: str
    client: str
    did: str
    result: str
    lines: tuple[GoldenFrame | GoldenEvent, ...]
    #: The capture as it lies in the archive: JSON lines.
    text: str

    @property
    def frames(self) -> list[GoldenFrame]:
        return [line for line in self.lines if isinstance(line, GoldenFrame)]

    def __str__(self) -> str:
        return f"{self.version}/{self.name}"


@functools.cache
def scenarios(version: str) -> dict[str, Scenario]:
    """Every scenario of ``version`` (``head`` or ``v0.3.2-alpha``), by name."""
    with tarfile.open(GOLDEN / f"{version}.tar.xz") as archive:
        files = {
            member.name.removeprefix(f"{version}/"): archive.extractfile(member).read().decode()  # type: ignore[union-attr]
            for member in archive.getmembers()
            if member.isfile()
        }
    index: list[dict[str, Any]] = json.loads(files.pop("index.json"))
    return {entry["name"]: _scenario(version, entry, files[f"{entry['name']}.jsonl"]) for entry in index}


def all_scenarios() -> list[Scenario]:
    """The scenarios of both versions."""
    return [scenario for version in VERSIONS for scenario in scenarios(version).values()]


def _scenario(version: str, entry: dict[str, Any], text: str) -> Scenario:
    lines = tuple(_line(json.loads(line)) for line in text.splitlines())
    return Scenario(version, entry["name"], entry["client"], entry["did"], entry["result"], lines, text)


def _line(entry: dict[str, Any]) -> GoldenFrame | GoldenEvent:
    place = (entry["conn"], entry["peer"], entry["sender"])
    if "event" in entry:
        return GoldenEvent(*place, entry["event"])
    captured = bytes.fromhex(entry.get("frame") or entry["head"])
    head = decode_head(captured)
    data_start = FIXED_BYTES + head.header_len
    data = captured[data_start:] if "frame" in entry else None
    return GoldenFrame(*place, head, captured[FIXED_BYTES:data_start], data, entry.get("data_sha256"), captured)
