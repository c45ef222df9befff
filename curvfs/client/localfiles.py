"""Short circuit: block files of a worker on this very machine, believed only after a check (specification 4.12).

Host names may be equal in containers that share no file system, and two clusters on one machine may use equal block
ids. So a path that a worker names is used only when it lies in a Curvine data directory whose ``version`` file names
that worker, is called after the block, is a regular file reached without a final symlink, and is long enough; and,
once per worker, the first bytes of a block must be the same over the wire (:mod:`curvfs.client.blockread` looks).
Whatever fails is counted by its reason, and the block is read or written over the wire instead.
"""

from __future__ import annotations

import errno
import os
import posixpath
import tomllib
from collections import Counter
from dataclasses import dataclass
from typing import Any

from curvfs.client.diskcalls import LocalDisk
from curvfs.client.records import WorkerAddress
from curvfs.config import ClientConfig
from curvfs.world import World

_O_DIRECT = getattr(os, "O_DIRECT", 0)


class Refused(Exception):
    """Not to be had locally; ``reason`` is a word for counters and for RemoteExtent."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


@dataclass(frozen=True, slots=True)
class LocalFile:
    """A verified block file, open. Whoever opened it closes ``fd``."""

    fd: int
    size_bytes: int
    direct: bool


class LocalFiles:
    """Opens block files. :meth:`open` blocks: call it through ``disk``."""

    def __init__(self, config: ClientConfig, world: World, stats: Counter[str], hostname: str) -> None:
        self._config = config
        self._disk = world.disk
        self._stats = stats
        self._hostname = hostname
        self.disk = LocalDisk(world, config.data_timeout_s, stats)
        #: version file's path -> (identity of the file, what it says)
        self._versions: dict[str, tuple[tuple[int, int, int], dict[str, Any]]] = {}
        #: worker id -> whether its files are what it sends over the wire; absent while nobody looked
        self._same_bytes: dict[int, bool] = {}

    def candidate(self, worker: WorkerAddress) -> str:
        """Empty when the worker may be on this machine, else the reason why not."""
        if not self._config.short_circuit:
            return "off"
        if worker.hostname != self._hostname:
            return "other_host"
        if self.disk.hangs(worker.worker_id):
            return "stuck"
        return "" if self._same_bytes.get(worker.worker_id, True) else "other_bytes"

    def is_proven(self, worker: WorkerAddress) -> bool:
        """The worker's files were compared with what it sends, and are the same."""
        return self._same_bytes.get(worker.worker_id, False)

    def prove(self, worker: WorkerAddress, *, same: bool) -> None:
        """Note the outcome of that comparison."""
        self._same_bytes[worker.worker_id] = same
        if not same:
            self.count("other_bytes")

    def open(
        self, path: str, block_id: int, worker_id: int, *, size_bytes: int, write: bool = False, direct: bool = False
    ) -> LocalFile:
        """Open the file that worker ``worker_id`` named for a block.

        For reading it must hold at least ``size_bytes``, for writing exactly as many. ``direct`` asks for O_DIRECT; a
        file system that refuses that gives a buffered descriptor, and says so. Raises Refused, and counts it.
        """
        try:
            found = self._open(path, block_id, worker_id, write=write, direct=direct)
            if found.size_bytes < size_bytes or (write and found.size_bytes != size_bytes):
                self._disk.close(found.fd)
                raise Refused("length")
        except Refused as refused:
            self.count(refused.reason)
            raise
        self._stats["short_circuit_opens"] += 1
        return found

    def count(self, reason: str) -> None:
        """Count a refusal."""
        self._stats[f"short_circuit_refused_{reason}"] += 1

    def _open(self, path: str, block_id: int, worker_id: int, *, write: bool, direct: bool) -> LocalFile:
        says = self._version(_data_directory(path, block_id))
        if says.get("worker_id") != worker_id:
            raise Refused("other_worker")
        if self._config.cluster_id and says.get("cluster_id") != self._config.cluster_id:
            raise Refused("other_cluster")
        flags = (os.O_RDWR if write else os.O_RDONLY) | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
        try:
            try:
                fd = self._disk.open(path, flags | (_O_DIRECT if direct else 0))
            except OSError as error:
                if not direct or error.errno != errno.EINVAL:
                    raise
                self._stats["direct_io_refused"] += 1
                direct = False
                fd = self._disk.open(path, flags)
        except OSError as error:
            raise Refused(_REASONS.get(error.errno or 0, "unreadable")) from error
        status = self._disk.fstat(fd)
        if status.st_mode & 0o170000 != 0o100000:
            self._disk.close(fd)
            raise Refused("not_a_file")
        return LocalFile(fd, status.st_size, direct)

    def _version(self, directory: str) -> dict[str, Any]:
        """What the data directory's ``version`` file says; read again whenever it was replaced."""
        path = posixpath.join(directory, "version")
        try:
            status = self._disk.stat(path, follow_symlinks=False)
            identity = (status.st_dev, status.st_ino, status.st_mtime_ns)
            known = self._versions.get(path)
            if known is None or known[0] != identity:
                known = self._versions[path] = (identity, tomllib.loads(self._disk.read_file(path).decode()))
        except OSError as error:
            refused = _REASONS.get(error.errno or 0)
            raise Refused(refused if refused == "no_permission" else "no_version_file") from error
        except ValueError as error:
            raise Refused("no_version_file") from error
        return known[1]


_REASONS = {
    errno.ENOENT: "missing",
    errno.ELOOP: "symlink",
    errno.EACCES: "no_permission",
    errno.EPERM: "no_permission",
}


def _data_directory(path: str, block_id: int) -> str:
    """The directory that holds ``version``, from the layout of a block file's path. Raises Refused."""
    if posixpath.normpath(path) != path or not path.startswith("/"):
        raise Refused("odd_path")
    directory, name = posixpath.split(path)
    if name != f"blk_{block_id}":
        raise Refused("other_block")
    if posixpath.basename(directory) == "staging":
        return posixpath.dirname(directory)
    below = f"/active/b{(block_id >> 48) & 31}/b{(block_id >> 32) & 31}"
    if not directory.endswith(below):
        raise Refused("odd_path")
    return directory.removesuffix(below)
