"""Checks of a directory that holds objects or blocks: what direct I/O needs there, and how much room there is."""

from __future__ import annotations

import errno
import mmap
import os
from collections.abc import Iterator
from pathlib import Path

from curvfs.units import GIB, MIB, format_size
from curvfs.world import World
from tools.doctor.findings import Finding, error, note, ok, warning

_IN_MEMORY = frozenset({"tmpfs", "ramfs"})
_LITTLE_ROOM_BYTES = GIB
_PROBE_BYTES = MIB


def check_place(world: World, directory: str) -> Iterator[Finding]:
    """Write, read back and remove a file of 1 MiB there."""
    try:
        space = world.disk.statvfs(directory)
    except OSError as failed:
        yield error(
            "data", f"{directory} cannot be used ({os.strerror(failed.errno or 0)}).", "Create it, or name another."
        )
        return
    kind = file_system_of(directory)
    if kind in _IN_MEMORY:
        yield warning(
            "data-medium",
            f"{directory} is on {kind}: what is stored there takes memory and is gone after a restart.",
            "Name a directory on NVMe.",
        )
    elif kind == "overlay":
        yield warning(
            "data-medium",
            f"{directory} is on the container's own layer (overlay), which is slow and goes with the container.",
            "Mount a volume of the host there.",
        )
    else:
        yield ok("data-medium", f"{directory} is on {kind or 'an unknown file system'}.")
    yield from _room(directory, space)
    yield from _direct_io(world, directory)


def file_system_of(path: str) -> str:
    """Type of the file system that a path is on, as /proc/mounts names it; empty when it is not there."""
    path = os.path.realpath(path)
    best, kind = "", ""
    try:
        lines = Path("/proc/self/mounts").read_text(encoding="utf-8").splitlines()
    except OSError:
        return ""
    for line in lines:
        point, type_ = line.split(" ")[1:3]
        point = point.encode().decode("unicode_escape")
        if (path == point or path.startswith(point.rstrip("/") + "/")) and len(point) >= len(best):
            best, kind = point, type_
    return kind


def _room(directory: str, space: os.statvfs_result) -> Iterator[Finding]:
    free_bytes, size_bytes = space.f_bavail * space.f_frsize, space.f_blocks * space.f_frsize
    shown = f"{directory} has {format_size(free_bytes)} of {format_size(size_bytes)} free."
    if free_bytes < _LITTLE_ROOM_BYTES:
        yield warning("data-room", shown, "Free some space, or name a larger file system.")
    elif space.f_files and space.f_favail < 10_000:
        yield warning(
            "data-room", f"{directory} has only {space.f_favail} inodes left.", "Remove files, or use another."
        )
    else:
        yield ok("data-room", shown)


def _direct_io(world: World, directory: str) -> Iterator[Finding]:
    path = f"{directory}/.curvfs-doctor-{world.random.uuid()}"
    flags = os.O_RDWR | os.O_CREAT | os.O_EXCL
    try:
        fd = world.disk.open(path, flags | os.O_DIRECT)
    except OSError as failed:
        if failed.errno != errno.EINVAL:
            yield error(
                "data-write",
                f"No file can be made in {directory} ({os.strerror(failed.errno or 0)}).",
                "Give this user write permission there, or name another directory.",
            )
            return
        yield warning(
            "direct-io",
            f"The file system of {directory} refuses O_DIRECT; every byte goes through the page cache.",
            "Use ext4 or xfs on NVMe; kvstore and the worker fall back by themselves and count it.",
        )
        _remove(world, path)
        return
    try:
        told = world.disk.direct_io(fd)
        yield _written_directly(world, fd, directory, told.offset_alignment_bytes)
    finally:
        world.disk.close(fd)
        _remove(world, path)


def _written_directly(world: World, fd: int, directory: str, told_bytes: int) -> Finding:
    memory = mmap.mmap(-1, _PROBE_BYTES)
    try:
        view = memoryview(memory)
        view[:] = world.random.randbytes(_PROBE_BYTES)
        content = bytes(view)
        try:
            world.disk.pwrite_full(fd, view, 0)
            view[:] = bytes(_PROBE_BYTES)
            world.disk.pread_full(fd, view, 0)
            whole = bytes(view) == content
            smallest = _smallest_offset(world, fd, view)
        except OSError as failed:
            return error(
                "direct-io",
                f"Direct I/O in {directory} failed ({os.strerror(failed.errno or 0)}).",
                "Check the disk and the kernel log (dmesg).",
            )
        finally:
            view.release()
    finally:
        memory.close()
    if not whole:
        return error("direct-io", f"{directory} gave back other bytes than were written.", "Do not use this disk.")
    said = f"statx says {told_bytes}" if told_bytes else "statx does not tell"
    if smallest > 4096:
        return warning(
            "direct-io",
            f"Direct I/O in {directory} needs offsets that are multiples of {smallest} bytes ({said}).",
            "Objects are aligned to 4096 bytes, so reads will fall back to the page cache there; use another disk.",
        )
    if told_bytes and told_bytes < smallest:
        return note("direct-io", f"Direct I/O in {directory} works from {smallest} bytes on, though {said}.")
    return ok("direct-io", f"Direct I/O in {directory} works, aligned to {smallest} bytes ({said}).")


def _smallest_offset(world: World, fd: int, view: memoryview) -> int:
    """The smallest power of two, from 512 bytes, at which the disk really reads directly."""
    for alignment in (512, 1024, 2048, 4096, 8192, 16384, 32768, 65536):
        try:
            world.disk.preadv(fd, [view[:alignment]], alignment)
        except OSError as failed:
            if failed.errno != errno.EINVAL:
                raise
        else:
            return alignment
    return _PROBE_BYTES


def _remove(world: World, path: str) -> None:
    try:
        world.disk.unlink(path)
    except FileNotFoundError:
        pass
