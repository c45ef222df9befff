"""Directory offsets on a real mount: they hold while names come and go."""

from __future__ import annotations

import ctypes
import os
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_LIBC = ctypes.CDLL(None, use_errno=True)
_GETDENTS64 = {"x86_64": 217, "aarch64": 61}[os.uname().machine]
_HEAD = struct.Struct("=QqHB")


@contextmanager
def opened(path: Path) -> Iterator[int]:
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        yield fd
    finally:
        os.close(fd)


def some(fd: int, size: int = 1024) -> list[tuple[str, int]]:
    """The next entries: names, and the offset behind each."""
    buffer = ctypes.create_string_buffer(size)
    count = _LIBC.syscall(_GETDENTS64, fd, buffer, size)
    assert count >= 0, os.strerror(ctypes.get_errno())
    found, at = [], 0
    while at < count:
        _, offset, length, _ = _HEAD.unpack_from(buffer.raw, at)
        name = buffer.raw[at + _HEAD.size : at + length].split(b"\0")[0].decode()
        found.append((name, offset))
        at += length
    return found


def everything(fd: int) -> list[tuple[str, int]]:
    found: list[tuple[str, int]] = []
    while part := some(fd):
        found += part
    return found


def test_seeking(place: Path) -> None:
    names = [f"n{index:04}" for index in range(1100)]
    for name in names:
        (place / name).mkdir()
    with opened(place) as fd:
        whole = everything(fd)
        assert [name for name, _ in whole] == [".", "..", *names]
        for index in (0, 1, 2, 500, 999, 1000, 1001, 1090):
            os.lseek(fd, whole[index][1], os.SEEK_SET)
            assert some(fd)[0][0] == whole[index + 1][0]
        os.lseek(fd, 0, os.SEEK_SET)
        assert everything(fd) == whole


def test_offsets_survive_removals(place: Path) -> None:
    for index in range(300):
        (place / f"n{index:04}").mkdir()
    with opened(place) as fd:
        first = some(fd, 4096)
        for name, _ in first[2:-1]:
            (place / name).rmdir()
        rest = everything(fd)
        assert first[-1][0] < rest[0][0]
        assert len(first) - 2 + len(rest) == 300
        os.lseek(fd, rest[50][1], os.SEEK_SET)
        (place / rest[51][0]).rmdir()
        assert some(fd)[0][0] == rest[52][0]


def test_names_that_appear_meanwhile(place: Path) -> None:
    for index in range(0, 300, 2):
        (place / f"n{index:04}").mkdir()
    with opened(place) as fd:
        seen = [name for name, _ in some(fd)]
        for index in range(1, 300, 2):
            (place / f"n{index:04}").mkdir()
        seen += [name for name, _ in everything(fd)]
    assert len(seen) == len(set(seen))
    assert {f"n{index:04}" for index in range(0, 300, 2)} <= set(seen)


def test_private_files_among_the_others(kv: Path) -> None:
    for index in range(40):
        (kv / f"t{index:02}").write_bytes(b"x")
        os.rename(kv / f"t{index:02}", kv / f"o{index:02}")
    for index in range(40):
        (kv / f"p{index:02}").write_bytes(b"x")
    with opened(kv) as fd:
        whole = everything(fd)
        names = [name for name, _ in whole]
        assert len(names) == len(set(names)) == 82
        for index in (10, 41, 50, 80):
            os.lseek(fd, whole[index][1], os.SEEK_SET)
            assert some(fd)[0][0] == names[index + 1]
