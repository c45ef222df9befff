"""What a mount says of itself: the files of its control directory, its metrics, and its record among the processes."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Awaitable, Callable
from typing import Any

import trio

import curvfs
from curvfs.api import CurvineFileSystem
from curvfs.errors import CurvfsError, EnvironmentError_
from curvfs.metrics import Exporter, Family, Sample
from curvfs.runrecords import RunRecord
from mount.control import ControlDirectory, ControlFile, as_json
from mount.operations import Operations
from mount.options import MountOptions
from mount.statistics import table

log = logging.getLogger("curvfs.mount")

_HEALTH_TIMEOUT_S = 5.0
#: Slow calls that the list of processes shows.
_SLOW_CALLS_TOLD = 5
_EVENTS = ("published", "materialised", "dropped")


class Report:
    """Everything that onlookers of one mount can ask for."""

    def __init__(
        self, fs: CurvineFileSystem, operations: Operations, options: MountOptions, url: str, path: str
    ) -> None:
        self._fs = fs
        self._operations = operations
        self._options = options
        self._url = url
        self._path = path
        self._record: RunRecord | None = None

    async def begin(self) -> None:
        """Show the control directory, and answer scrapes where they are wanted. Raises EnvironmentError_."""
        name = self._options.control_name
        root = self._operations.table.path(self._operations.table.root)
        if name is not None and await self._fs.exists(f"{root.rstrip('/')}/{name}"):
            log.warning(
                "The pool has a %r of its own here, so this mount tells nothing of itself; give its directory another "
                "name with -o control=NAME.",
                name,
            )
        elif name is not None:
            self._operations.show_control(ControlDirectory(name, self._fs.world.clock, self._files()))
        if self._options.metrics is not None:
            Exporter(self.families).serve(*self._options.metrics)

    def enrol(self) -> None:
        """Join the list of mounts of this machine."""
        self._record = RunRecord(self._fs.world, "mount")
        self.write_record()

    def write_record(self) -> None:
        if self._record is not None:
            statistics = self._operations.statistics
            control = self._operations.control
            self._record.write(
                {
                    "url": self._url,
                    "mountpoint": self._path,
                    "version": curvfs.__version__,
                    "read_only": self._options.read_only,
                    "kv": list(self._options.kv_paths),
                    "control": None if control is None else control.name,
                    "calls": statistics.calls.total(),
                    "read_bytes": statistics.read_bytes,
                    "written_bytes": statistics.written_bytes,
                    "open_files": len(self._operations.handles),
                    "objects": self._objects(),
                    "operations": {name: told.summary() for name, told in sorted(statistics.latencies.items())},
                    "slow_calls": statistics.slow_calls()[:_SLOW_CALLS_TOLD],
                }
            )

    def leave(self) -> None:
        """Leave the list of mounts."""
        if self._record is not None:
            self._record.close()

    # -------------------------------------------------------------------------------------------------------- files

    def _files(self) -> list[ControlFile]:
        statistics = self._operations.statistics
        files = [
            ControlFile("live", _soon(lambda: b"ok\n")),
            ControlFile("health", self._health),
            ControlFile("stats", _soon(lambda: table(self.snapshot()).encode())),
            ControlFile("stats.json", _soon(lambda: as_json(self.snapshot()))),
            ControlFile("options.json", _soon(lambda: as_json(self._told_options()))),
            ControlFile("open-files", _soon(self._open_files_text), private=True),
            ControlFile("open-files.json", _soon(lambda: as_json(self._open_files())), private=True),
            ControlFile("slow-calls.json", _soon(lambda: as_json(statistics.slow_calls())), private=True),
        ]
        try:
            exporter = Exporter(self.families)
        except EnvironmentError_:
            return files  # without the package there is nobody to write the format
        return [*files, ControlFile("metrics", _soon(lambda: exporter.text().encode()))]

    def snapshot(self) -> dict[str, Any]:
        """All numbers, as JSON has them."""
        return {
            "url": self._url,
            "mountpoint": self._path,
            "version": curvfs.__version__,
            "pid": self._fs.world.process_id(),
            "open_files": len(self._operations.handles),
            "nodes": len(self._operations.table),
            "private_files": len(self._operations.publisher.privates),
            "readers_kept": self._operations.readers.kept,
            "objects": self._objects(),
            **self._operations.statistics.snapshot(),
        }

    def families(self) -> list[Family]:
        """The same for Prometheus. Callable from any thread."""
        operations = self._operations
        return [
            *operations.statistics.families(),
            Family(
                "curvfs_mount_objects",
                "counter",
                "Private files by what became of them: published by rename or link, given their own name, dropped.",
                [Sample(count, {"event": event}) for event, count in self._objects().items()],
            ),
            Family.of("curvfs_mount_open_files", "gauge", "Open files.", len(operations.handles)),
            Family.of("curvfs_mount_nodes", "gauge", "Files that the kernel knows.", len(operations.table)),
            Family.of("curvfs_mount_private_files", "gauge", "Unpublished.", len(operations.publisher.privates)),
        ]

    def _objects(self) -> dict[str, int]:
        counters = self._operations.publisher.counters
        return {event: counters[event] for event in _EVENTS}

    async def _health(self) -> bytes:
        """Does the store answer?"""
        try:
            with trio.fail_after(min(_HEALTH_TIMEOUT_S, self._options.op_timeout_s / 2)):
                await self._fs.statfs()
        except trio.TooSlowError:
            return b"failing: the store does not answer\n"
        except CurvfsError as error:
            return f"failing: {error}\n".encode()
        return b"ok\n"

    def _open_files(self) -> list[dict[str, Any]]:
        found = []
        for handle in self._operations.handles.all():
            try:
                path = self._operations.table.path(handle.node)
            except CurvfsError:
                path = ""
            private = handle.node.private
            found.append(
                {
                    "path": path,
                    "asked_for": None if private is None else private.place[1],
                    "file_id": handle.node.file_id,
                    "length_bytes": handle.node.length_bytes,
                    "readable": handle.readable,
                    "writable": handle.writable,
                    "sealed": handle.node.sealed,
                }
            )
        return found

    def _open_files_text(self) -> bytes:
        lines = [
            f"{'r' if each['readable'] else '-'}{'w' if each['writable'] else '-'} {each['length_bytes']:>12} "
            f"{each['asked_for'] or each['path']}\n"
            for each in self._open_files()
        ]
        return "".join(lines).encode(errors="replace")

    def _told_options(self) -> dict[str, Any]:
        return dataclasses.asdict(self._options)


def _soon(render: Callable[[], bytes]) -> Callable[[], Awaitable[bytes]]:
    """For what can be rendered at once."""

    async def rendered() -> bytes:
        return render()

    return rendered
