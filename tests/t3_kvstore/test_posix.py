"""What is special about objects in a directory: file systems that refuse, are full, or were tampered with."""

from __future__ import annotations

import errno
import logging
import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from curvfs.errors import EnvironmentError_, UsageError
from curvfs.world import NO_LINKS, DirectIo, RealDisk, World
from kvstore import Geometry, KVStore, Miss
from kvstore.keys import PageKey
from tests.t3_kvstore.places import Directory, empty, is_root, pages, untouched

PAGE = Geometry.raw(1 << 20, page_tokens=4)
SMALL = Geometry.raw(5000, page_tokens=4)

needs_mounts = pytest.mark.skipif(not is_root(), reason="mounting a file system needs root")


@contextmanager
def mounted(where: Path, *arguments: str) -> Iterator[Directory]:
    where.mkdir(exist_ok=True)
    done = subprocess.run(["mount", *arguments, str(where)], capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"cannot mount here: {done.stderr.strip()}")
    place = Directory(where)
    try:
        yield place
    finally:
        place.close()
        subprocess.run(["umount", str(where)], check=True)


def keys_of(store: KVStore, count: int, start: int = 0) -> list[PageKey]:
    return store.keys(list(range(start, start + 4 * count)))


def round_trip(store: KVStore, count: int = 3) -> None:
    content, got = pages(store.geometry, count), empty(store.geometry, count)
    keys = keys_of(store, count)
    assert all(store.put(keys, content).result()), store.stats().last_error
    assert all(store.get(keys, got).result()), store.stats().last_error
    assert got == content


def test_a_directory_that_is_not_there_is_not_made(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="mount"):
        Directory(tmp_path / "absent").open(SMALL)
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match="not a directory"):
        Directory(tmp_path / "file").open(SMALL)
    assert not (tmp_path / "absent").exists()


@needs_mounts
def test_a_file_system_without_direct_io(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with mounted(tmp_path / "ramfs", "-t", "ramfs", "none") as place:
        with pytest.raises(EnvironmentError_, match="EINVAL"):
            place.open(PAGE, direct="required")
        with caplog.at_level(logging.WARNING, "kvstore"):
            store = place.open(PAGE)
            round_trip(store)
        assert len([record for record in caplog.records if "direct I/O" in record.message]) == 1
        stats = store.stats()
        assert not stats.direct
        assert "EINVAL" in stats.direct_reason
        store.close()


def test_required_is_granted_where_it_can_be(directory: Directory) -> None:
    store = directory.open(PAGE)
    if not store.stats().direct:
        pytest.skip("the temporary directory does not take direct I/O")
    required = directory.open(PAGE, direct="required")
    round_trip(required)
    assert required.stats().alignment_bytes >= 1


@pytest.mark.parametrize(("alignment", "direct"), [(512, True), (4096, True), (0, True), (65536, False), (1536, False)])
def test_the_alignment_is_what_the_kernel_says(directory: Directory, alignment: int, direct: bool) -> None:
    class Told(RealDisk):
        def direct_io(self, fd: int) -> DirectIo:
            return DirectIo(4, alignment)

    store = directory.open(SMALL, world=World(disk=Told()))
    assert store.stats().direct is direct
    round_trip(store)


def test_direct_writes_leave_nothing_in_the_page_cache(directory: Directory) -> None:
    store = directory.open(PAGE)
    if not store.stats().direct:
        pytest.skip("the temporary directory does not take direct I/O")
    round_trip(store, 16)
    files = [str(directory.block_file(store, key)) for key in keys_of(store, 16)]
    shown = subprocess.run(["fincore", "-b", "-n", "-o", "RES", *files], check=True, capture_output=True, text=True)
    assert sum(map(int, shown.stdout.split())) <= PAGE.size_bytes // 4


@needs_mounts
@pytest.mark.parametrize("kind", ["tmpfs", "ext4"])
def test_a_full_disk(tmp_path: Path, kind: str) -> None:
    arguments = ["-t", "tmpfs", "-o", "size=24m", "none"]
    if kind == "ext4":
        image = tmp_path / "image"
        with image.open("wb") as file:
            file.truncate(32 << 20)
        subprocess.run(["mkfs.ext4", "-q", str(image)], check=True)
        arguments = ["-o", "loop", str(image)]
    with mounted(tmp_path / kind, *arguments) as place:
        store = place.open(PAGE)
        count = 40
        keys, content = keys_of(store, count), pages(PAGE, count)
        results = store.put(keys, content).result()
        full = [index for index, result in enumerate(results) if result is Miss.NO_SPACE]
        assert 10 <= len(full) < 35
        assert {result for result in results if not result} == {Miss.NO_SPACE}
        assert store.exists(keys) == [index not in full for index in range(count)]
        assert place.staged() == []
        fresh = place.open(PAGE)
        got = empty(PAGE, count)
        assert [bool(result) for result in fresh.get(keys, got).result()] == [bool(result) for result in results]
        assert all(got[index] == content[index] for index in range(count) if index not in full)
        assert untouched([got[index] for index in full])
        room = [key for index, key in enumerate(keys) if index not in full][: len(full) // 2]
        assert all(store.delete(room))
        again = full[: len(room)]
        assert all(store.put([keys[index] for index in again], [content[index] for index in again]).result())
        # Full again: what lies in the trash takes room until somebody needs it.
        assert all(store.evict([keys[index] for index in again]))
        assert len(place.trashed()) == len(again)
        more = store.keys(list(range(10_000, 10_000 + 4 * len(again))))
        assert all(store.put(more, pages(PAGE, len(again), 7)).result())
        assert len(place.trashed()) < len(again)
        store.close()


@needs_mounts
def test_a_read_only_file_system_is_said_at_once(tmp_path: Path) -> None:
    with (
        mounted(tmp_path / "ro", "-t", "tmpfs", "-o", "ro", "none") as place,
        pytest.raises(EnvironmentError_, match="Read-only"),
    ):
        place.open(SMALL)


@pytest.mark.parametrize("umask", [0o000, 0o022, 0o077])
def test_modes_whatever_the_umask(directory: Directory, umask: int) -> None:
    before = os.umask(umask)
    try:
        store = directory.open(SMALL)
        round_trip(store)
    finally:
        os.umask(before)
    for name, mode in directory.modes().items():
        assert mode == (0o700 if Path(name).is_dir() else 0o600), name


def spoil_directory(file: Path) -> None:
    file.mkdir()


def spoil_dangling(file: Path) -> None:
    file.symlink_to(file.parent / "nowhere")


def spoil_link(file: Path) -> None:
    copy = file.parent / "copy"
    file.symlink_to(copy)


def spoil_pipe(file: Path) -> None:
    os.mkfifo(file)


@pytest.mark.parametrize("spoil", [spoil_directory, spoil_dangling, spoil_link, spoil_pipe])
def test_something_else_in_the_place_of_an_object(directory: Directory, spoil: Any) -> None:
    store = directory.open(SMALL, timeout_s=5)
    content, keys = pages(SMALL, 10), keys_of(store, 10)
    assert all(store.put(keys, content).result())
    file = directory.block_file(store, keys[5])
    file.rename(file.parent / "copy")
    spoil(file)
    got = empty(SMALL, 10)
    results = store.get(keys, got).result()
    assert [bool(result) for result in results] == [index != 5 for index in range(10)]
    assert results[5] in (Miss.IO, Miss.ABSENT, Miss.DAMAGED)
    assert untouched([got[5]])
    assert store.lookup(keys).pages == 5
    # It is not ours to remove, so it cannot be stored again, and that is told.
    assert store.put(keys[5:6], content[5:6]).result() == [Miss.DAMAGED]
    assert directory.staged() == []
    assert file.is_symlink() or file.exists()
    round_trip(directory.open(SMALL, revision="healthy"), 10)


def test_no_permission_is_a_miss_and_no_reason_to_delete(directory: Directory) -> None:
    store = directory.open(SMALL)
    round_trip(store)
    key = keys_of(store, 1)[0]
    refused = str(directory.block_file(store, key))

    class Guarded(RealDisk):
        def open(self, path: str, flags: int, mode: int = 0o600) -> int:
            if path == refused:
                raise PermissionError(13, "Permission denied", path)
            return super().open(path, flags, mode)

    guarded, got = directory.open(SMALL, world=World(disk=Guarded())), empty(SMALL, 1)
    assert guarded.get([key], got).result() == [Miss.DENIED]
    assert untouched(got)
    assert Path(refused).exists()
    assert refused in guarded.stats().last_error


class Older(RealDisk):
    """A disk of a kernel that cannot open without links."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self._number = number

    def open(self, path: str, flags: int, mode: int = 0o600) -> int:
        if flags & NO_LINKS:
            raise OSError(self._number, os.strerror(self._number), path)
        return super().open(path, flags, mode)


@pytest.mark.parametrize("disk", [RealDisk(), Older(errno.ENOSYS), Older(errno.EPERM)])
def test_links_do_not_lead_out_of_the_pool(directory: Directory, tmp_path: Path, disk: RealDisk) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    store = directory.open(SMALL, world=World(disk=disk))
    keys, content = keys_of(store, 1), pages(SMALL, 1)
    fan = directory.block_file(store, keys[0]).parent
    for link in (fan.parent.parent, fan.parent, fan):
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(outside)
        assert store.put(keys, content).result() == [Miss.IO]
        assert not any(outside.iterdir())
        assert store.delete(keys) == [Miss.IO]
        link.unlink()
    assert store.put(keys, content).result() == [SMALL.size_bytes]
    fan.rename(outside / "moved")
    fan.symlink_to(outside / "moved")
    got = empty(SMALL, 1)
    assert store.get(keys, got).result() == [Miss.IO]
    assert untouched(got)
    assert directory.staged() == []


def test_a_directory_may_be_reached_by_a_link(directory: Directory, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(directory.root)
    linked = Directory(tmp_path / "link")
    store = linked.open(SMALL)
    round_trip(store, 4)
    fan = directory.block_file(store, keys_of(store, 5)[4]).parent
    fan.mkdir(parents=True, exist_ok=True)
    fan.rmdir()
    fan.symlink_to(tmp_path)
    assert store.put(keys_of(store, 5), pages(SMALL, 5)).result() == [SMALL.size_bytes] * 4 + [Miss.IO]
    linked.close()
    round_trip(directory.open(SMALL), 4)


def test_a_prefix_that_is_a_link_is_refused(directory: Directory, tmp_path: Path) -> None:
    (tmp_path / "outside").mkdir()
    (directory.root / "kv").symlink_to(tmp_path / "outside")
    with pytest.raises(EnvironmentError_):
        directory.open(SMALL)
    assert not any((tmp_path / "outside").iterdir())


def test_neither_tokens_nor_salts_are_logged(directory: Directory, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG):
        store = directory.open(SMALL, salt="very-secret-salt")
        tokens = [987654321, 987654322, 987654323, 987654324]
        keys = store.keys(tokens)
        assert all(store.put(keys, pages(SMALL, 1)).result())
        file = directory.block_file(store, keys[0])
        file.write_bytes(b"x" * file.stat().st_size)
        assert store.get(keys, empty(SMALL, 1)).result() == [Miss.DAMAGED]
        store.close()
    shown = caplog.text + repr(store.stats()) + repr(keys) + "".join(directory.names())
    assert "damaged" in caplog.text
    assert "secret" not in shown
    assert "98765432" not in shown


def test_a_file_system_without_noreplace_renames_by_links(directory: Directory) -> None:
    class Old(RealDisk):
        def __init__(self) -> None:
            super().__init__()
            self._renameat2 = None

    store = directory.open(SMALL, world=World(disk=Old()))
    round_trip(store)
    assert store.put(keys_of(store, 3), pages(SMALL, 3)).result() == [SMALL.size_bytes] * 3
    other = directory.open(SMALL, world=World(disk=Old()))
    writer = other._backend.create(store.object_name(keys_of(store, 1)[0]), 4096)
    assert writer.publish() is False
    assert directory.staged() == []
