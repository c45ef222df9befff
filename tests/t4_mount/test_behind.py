"""What reading through a mount leaves in the page cache of the machine."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from curvfs.disk import RealDisk
from curvfs.units import MIB
from mount.behind import WINDOW_BYTES, Behind
from tests.t4_mount.mounts import Mount, mounted

BLOCK_BYTES = 36 * MIB  # of which a window lies in two
SIZE_BYTES = 112 * MIB
#: The first four windows are never given back; the last two when the reader goes on.
MOST_BYTES = 6 * WINDOW_BYTES
DISK = RealDisk()


class Blocks:
    """The block files of one large object, as the machine has them."""

    def __init__(self, path: Path, pool: Path) -> None:
        self.path = path
        number = path.stat().st_ino
        found = [block for block in (pool / "data").rglob("blk_*") if int(block.name[4:]) >> 24 == number]
        self.fds = [os.open(block, os.O_RDONLY) for block in sorted(found, key=lambda block: int(block.name[4:]))]
        for fd in self.fds:
            os.fsync(fd)

    def cool(self) -> None:
        """Nothing is in a page cache, neither of the mount nor of the machine."""
        with open(self.path, "rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        for fd in self.fds:
            DISK.forget(fd, 0, 0)
        if self.cached_bytes():
            pytest.skip("the page cache of this file system cannot be emptied")

    def warm(self, offset_bytes: int, size_bytes: int) -> None:
        """Somebody else has read so much of the block files."""
        for number, fd in enumerate(self.fds):
            start_bytes = max(0, offset_bytes - number * BLOCK_BYTES)
            size = offset_bytes + size_bytes - number * BLOCK_BYTES - start_bytes
            if start_bytes < BLOCK_BYTES and size > 0:
                os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_RANDOM)
                DISK.pread_full(fd, memoryview(bytearray(min(size, BLOCK_BYTES - start_bytes))), start_bytes)

    def cached_bytes(self, offset_bytes: int = 0, size_bytes: int = SIZE_BYTES) -> int:
        total = 0
        for number, fd in enumerate(self.fds):
            start_bytes = max(0, offset_bytes - number * BLOCK_BYTES)
            size = min(BLOCK_BYTES, offset_bytes + size_bytes - number * BLOCK_BYTES) - start_bytes
            if size > 0:
                total += DISK.resident_bytes(fd, start_bytes, size)
        return total


def content(offset_bytes: int) -> bytes:
    """What lies in the MiB that begins there."""
    return (offset_bytes // MIB).to_bytes(8, "little") * (MIB // 8)


@pytest.fixture(scope="module")
def mount(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Mount]:
    directory = tmp_path_factory.mktemp("behind")
    with mounted(directory, "--embedded", directory / "pool", "-o", f"block_size={BLOCK_BYTES}") as one:
        yield one


@pytest.fixture(scope="module")
def blocks(mount: Mount) -> Iterator[Blocks]:
    path = mount.path / "large"
    with open(path, "wb", buffering=0) as file:
        for offset_bytes in range(0, SIZE_BYTES, MIB):
            file.write(content(offset_bytes))
    with open("/proc/self/exe", "rb") as known:
        known.read(1)
        if DISK.resident_bytes(known.fileno(), 0, MIB) == 0:
            pytest.skip("nobody tells here what the page cache holds (cachestat, Linux 6.5)")
    found = Blocks(path, mount.path.parent / "pool")
    yield found
    for fd in found.fds:
        os.close(fd)


def read(blocks: Blocks, offsets_bytes: range | list[int], flags: int = 0) -> None:
    """Read a MiB at each place."""
    fd = os.open(blocks.path, os.O_RDONLY | flags)
    buffer = memoryview(bytearray(MIB))
    try:
        for offset_bytes in offsets_bytes:
            assert os.preadv(fd, [buffer], offset_bytes) == MIB
            assert buffer == content(offset_bytes)
    finally:
        os.close(fd)


@pytest.mark.parametrize("flags", [0, os.O_DIRECT], ids=["buffered", "direct"])
def test_a_large_file_read_in_order_leaves_its_ends_only(blocks: Blocks, flags: int) -> None:
    blocks.cool()
    read(blocks, range(0, SIZE_BYTES, MIB), flags)
    assert blocks.cached_bytes(0, 4 * WINDOW_BYTES) == 4 * WINDOW_BYTES
    assert blocks.cached_bytes(4 * WINDOW_BYTES, 8 * WINDOW_BYTES) == 0
    assert blocks.cached_bytes() <= MOST_BYTES


def test_what_was_there_before_stays(blocks: Blocks) -> None:
    blocks.cool()
    blocks.warm(8 * WINDOW_BYTES, WINDOW_BYTES)  # the end of a block, and the beginning of the next
    read(blocks, range(0, SIZE_BYTES, MIB))
    assert blocks.cached_bytes(8 * WINDOW_BYTES, WINDOW_BYTES) == WINDOW_BYTES
    assert blocks.cached_bytes(5 * WINDOW_BYTES, 3 * WINDOW_BYTES) == 0


def test_a_file_in_the_page_cache_stays_there(blocks: Blocks) -> None:
    blocks.cool()
    blocks.warm(0, SIZE_BYTES)
    read(blocks, range(0, SIZE_BYTES, MIB))
    assert blocks.cached_bytes() == SIZE_BYTES


def test_what_is_read_out_of_order_stays(blocks: Blocks) -> None:
    blocks.cool()
    places = list(range(0, SIZE_BYTES, MIB))
    random.Random(1).shuffle(places)
    read(blocks, places, os.O_DIRECT)
    assert blocks.cached_bytes() == SIZE_BYTES


def test_a_block_file_that_ends_early_still_reads_as_zeros(blocks: Blocks) -> None:
    """It lost its end while it was open: what is judged and given back lies behind that."""
    path = Path(os.readlink(f"/proc/self/fd/{blocks.fds[1]}"))
    saved = path.read_bytes()
    cut_bytes = BLOCK_BYTES + MIB + 5
    blocks.cool()
    with open(blocks.path, "rb", buffering=0) as file:
        os.truncate(path, cut_bytes - BLOCK_BYTES)
        try:
            for offset_bytes in range(0, SIZE_BYTES, MIB):
                wanted = content(offset_bytes)
                if offset_bytes + MIB > cut_bytes and offset_bytes < 2 * BLOCK_BYTES:
                    wanted = wanted[: max(0, cut_bytes - offset_bytes)].ljust(MIB, b"\0")
                assert file.read(MIB) == wanted
        finally:
            path.write_bytes(saved)


def test_nothing_is_given_back_where_nobody_tells_what_is_there(tmp_path: Path) -> None:
    """A kernel without ``cachestat`` (before Linux 6.5)."""

    class Silent(RealDisk):
        def resident_bytes(self, fd: int, offset_bytes: int, length_bytes: int) -> int:
            return 0

        def forget(self, fd: int, offset_bytes: int, length_bytes: int) -> None:
            raise AssertionError("pages were given back that somebody may need")

    with open(tmp_path / "f", "wb+") as file:
        file.truncate(SIZE_BYTES)
        behind = Behind(Silent(), lambda offset_bytes, size_bytes: [(file.fileno(), offset_bytes, size_bytes)])
        for offset_bytes in range(0, SIZE_BYTES, MIB):
            behind.read(offset_bytes, MIB)


def test_programs_that_read_one_file_at_once_are_told_apart(tmp_path: Path) -> None:
    """Requests of many readers come by turns: each one's way is followed, and only so many of them."""
    given: list[int] = []

    class Watched(RealDisk):
        def forget(self, fd: int, offset_bytes: int, length_bytes: int) -> None:
            given.append(offset_bytes // WINDOW_BYTES)

    path = tmp_path / "f"
    with open(path, "wb+") as file:
        file.truncate(3 * 8 * WINDOW_BYTES)
        file.flush()
        disk = Watched()
        behind = Behind(disk, lambda offset_bytes, size_bytes: [(file.fileno(), offset_bytes, size_bytes)])
        for step in range(0, 8 * WINDOW_BYTES, MIB):
            for number in range(3):
                offset_bytes = number * 8 * WINDOW_BYTES + step
                os.pread(file.fileno(), MIB, offset_bytes)
                behind.read(offset_bytes, MIB)
    assert {4, 5} <= set(given) and {12, 13} <= set(given) and {20, 21} <= set(given)
