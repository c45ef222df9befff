"""Records as people and as programs read them."""

from __future__ import annotations

import base64
import stat as statmod
from collections.abc import Sequence
from datetime import datetime
from typing import Any

from curvfs.api import BlockLocation, FileKind, FileStatus, FilesystemInfo
from curvfs.units import format_size

_KIND_LETTER = {
    FileKind.DIRECTORY: "d",
    FileKind.SYMLINK: "l",
    FileKind.FIFO: "p",
    FileKind.CHARACTER_DEVICE: "c",
    FileKind.BLOCK_DEVICE: "b",
    FileKind.SOCKET: "s",
}


def printable(text: str) -> str:
    """``text`` with control characters, and bytes that are no text, escaped: names may hold anything."""
    if text.isprintable():
        return text
    return "".join(character if character.isprintable() else repr(character)[1:-1] for character in text)


def size_text(size_bytes: int, human: bool) -> str:
    return format_size(size_bytes) if human else str(size_bytes)


def percent_text(part: int, whole: int) -> str:
    return f"{100 * part / whole:.1f}%" if whole else "-"


def kind_text(kind: FileKind) -> str:
    """``directory``, ``file``, ``symlink``, ``fifo``, ``character-device`` ..."""
    return kind.name.lower().replace("_", "-")


def mode_text(status: FileStatus) -> str:
    """``drwxr-xr-x``"""
    return _KIND_LETTER.get(status.kind, "-") + statmod.filemode(status.mode)[1:]


def time_text(stamp_ms: int) -> str:
    """``2026-11-30 20:15:07``, in the time zone of this machine."""
    try:
        return datetime.fromtimestamp(stamp_ms / 1000).strftime("%Y-%m-%d %H:%M:%S")
    except (OverflowError, OSError, ValueError):
        return f"@{stamp_ms / 1000:g}"  # no year that a calendar has


def name_text(status: FileStatus, name: str) -> str:
    if status.symlink_target is None:
        return printable(name)
    return f"{printable(name)} -> {printable(status.symlink_target)}"


def columns(rows: Sequence[tuple[str, ...]], right: frozenset[int]) -> list[str]:
    """Rows with their columns aligned, those of ``right`` to the right; the last one is left as it is."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(
            cell if index == len(row) - 1 and index not in right else f"{cell:{'>' if index in right else '<'}{width}}"
            for index, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        for row in rows
    ]


def encoded(value: bytes) -> str:
    return base64.b64encode(value).decode("ascii")


def status_document(status: FileStatus, path: str) -> dict[str, Any]:
    """What ls and stat print with ``--json``."""
    document: dict[str, Any] = {
        "path": path,
        "name": status.name,
        "kind": kind_text(status.kind),
        "size_bytes": status.length_bytes,
        "mode": f"{status.mode:04o}",
        "owner": status.owner,
        "group": status.group,
        "mtime_ms": status.mtime_ms,
        "atime_ms": status.atime_ms,
        "ctime_ms": status.ctime_ms,
        "nlink": status.nlink,
        "id": status.id,
        "children": status.children,
        "block_size_bytes": status.block_size_bytes,
        "replicas": status.replicas,
        "complete": status.is_complete,
        "storage_type": status.storage_type.name.lower(),
        "storage_state": status.storage_state.name.lower(),
        "ttl_ms": status.ttl_ms,
        "ttl_action": status.ttl_action.name.lower(),
        "xattrs": {name: encoded(value) for name, value in sorted(status.xattrs.items())},
    }
    if status.symlink_target is not None:
        document["target"] = status.symlink_target
    return document


def status_text(status: FileStatus, path: str, human: bool) -> str:
    """Lines of names and values, as stat prints them."""
    lines = [
        ("path", name_text(status, path)),
        ("kind", kind_text(status.kind)),
        ("size", size_text(status.length_bytes, human)),
        ("mode", f"{status.mode:04o} ({mode_text(status)})"),
        ("owner", f"{printable(status.owner) or '-'}:{printable(status.group) or '-'}"),
        ("modified", time_text(status.mtime_ms)),
        ("accessed", time_text(status.atime_ms)),
        ("changed", time_text(status.ctime_ms)),
        ("links", str(status.nlink)),
        ("id", str(status.id)),
    ]
    if status.is_dir:
        lines.append(("entries", str(status.children)))
    if status.is_file:
        lines += [
            ("block size", size_text(status.block_size_bytes, human)),
            ("replicas", str(status.replicas)),
            ("writers", "none" if status.is_complete else "open for writing, or its writer died"),
            ("storage", f"{status.storage_type.name.lower()}, {status.storage_state.name.lower()}"),
        ]
    if status.ttl_ms:
        lines.append(("expires", f"{status.ttl_action.name.lower()} {status.ttl_ms / 1000:g} s after its last change"))
    if status.xattrs:
        lines.append(("xattrs", printable(" ".join(sorted(status.xattrs)))))
    return "\n".join(f"{name:>10}: {value}" for name, value in lines)


def block_document(block: BlockLocation) -> dict[str, Any]:
    return {
        "id": block.block_id,
        "offset_bytes": block.file_offset_bytes,
        "size_bytes": block.length_bytes,
        "hole": block.is_hole,
        "workers": [f"{worker.hostname}:{worker.port}" for worker in block.workers],
    }


def block_text(block: BlockLocation, human: bool) -> str:
    workers = ", ".join(f"{worker.hostname}:{worker.port}" for worker in block.workers)
    where = printable(workers) or ("hole" if block.is_hole else "no worker has it")
    return (
        f"{'block':>10}: {block.block_id} at {size_text(block.file_offset_bytes, human)}, "
        f"{size_text(block.length_bytes, human)}: {where}"
    )


def report_document(info: FilesystemInfo) -> dict[str, Any]:
    return {
        "active_master": info.active_master,
        "server_version": info.server_version,
        "capacity_bytes": info.capacity_bytes,
        "available_bytes": info.available_bytes,
        "used_bytes": info.used_bytes,
        "files": info.files,
        "directories": info.directories,
        "blocks": info.blocks,
        "workers": [
            {
                "id": worker.address.worker_id,
                "hostname": worker.address.hostname,
                "address": worker.address.address,
                "port": worker.address.port,
                "state": worker.state,
                "capacity_bytes": worker.capacity_bytes,
                "available_bytes": worker.available_bytes,
                "used_bytes": worker.used_bytes,
                "version": worker.software_version,
            }
            for worker in info.workers
        ],
    }


def report_text(info: FilesystemInfo) -> str:
    """The state of a cluster, for people: sizes are human."""
    capacity = info.capacity_bytes
    live = len(info.live_workers)
    lines = [
        ("active master", printable(info.active_master) or "-"),
        ("version", printable(info.server_version) or "-"),
        ("capacity", format_size(capacity)),
        ("available", f"{format_size(info.available_bytes)} ({percent_text(info.available_bytes, capacity)})"),
        ("used", f"{format_size(info.used_bytes)} ({percent_text(info.used_bytes, capacity)})"),
        ("files", f"{info.files:,}"),
        ("directories", f"{info.directories:,}"),
        ("blocks", f"{info.blocks:,}"),
        ("workers", f"{live} live, {len(info.workers) - live} not"),
    ]
    text = [f"{name:>14}: {value}" for name, value in lines]
    if info.workers:
        rows = [("worker", "state", "capacity", "available", "used", "free")]
        rows += [
            (
                printable(f"{worker.address.hostname}:{worker.address.port}"),
                worker.state,
                format_size(worker.capacity_bytes),
                format_size(worker.available_bytes),
                format_size(worker.used_bytes),
                percent_text(worker.available_bytes, worker.capacity_bytes),
            )
            for worker in info.workers
        ]
        text += ["", *columns(rows, frozenset((2, 3, 4, 5)))]
    return "\n".join(text)
