"""Names of a worker's files, as every Curvine worker lays them out (specification section 4.12)::

    <data>/<cluster_id>/version                              who this directory belongs to, TOML
    <data>/<cluster_id>/staging/blk_<block id>               being written
    <data>/<cluster_id>/active/b<d1>/b<d2>/blk_<block id>    committed by its writer

with d1 = (id >> 48) & 31 and d2 = (id >> 32) & 31, decimal. Files hold raw block bytes. Beside these,
``staging/copy_<block id>`` is a copy-on-write under way, and ``staging/gone_<block id>_<n>`` a file about to be
unlinked; those that are found at start are left over.
"""

from __future__ import annotations

import tomllib
import zlib
from collections.abc import Iterator
from dataclasses import dataclass

from curvfs.errors import EnvironmentError_
from curvfs.world import Disk, World

_BLOCK_PREFIX = "blk_"
_VERSION_FIELDS = {"cluster_id": str, "worker_id": int, "storage_id": str, "dir_id": int, "time_ms": int}


@dataclass(frozen=True, slots=True)
class StorageVersion:
    """The ``version`` file. ``worker_id`` is what locations name, so it has to outlive restarts."""

    cluster_id: str
    worker_id: int
    storage_id: str
    dir_id: int
    time_ms: int

    def toml(self) -> str:
        return (
            f'cluster_id = "{self.cluster_id}"\nworker_id = {self.worker_id}\nstorage_id = "{self.storage_id}"\n'
            f"dir_id = {self.dir_id}\ntime_ms = {self.time_ms}\n"
        )


class Layout:
    """Paths below one data directory."""

    def __init__(self, data_dir: str, cluster_id: str) -> None:
        self.data_dir = data_dir
        self.cluster_id = cluster_id
        self.root = f"{data_dir}/{cluster_id}"
        self.version_file = f"{self.root}/version"
        self.staging_dir = f"{self.root}/staging"
        self.active_dir = f"{self.root}/active"

    def staging(self, block_id: int) -> str:
        return f"{self.staging_dir}/{_BLOCK_PREFIX}{block_id}"

    def copy(self, block_id: int) -> str:
        return f"{self.staging_dir}/copy_{block_id}"

    def gone(self, block_id: int, number: int) -> str:
        return f"{self.staging_dir}/gone_{block_id}_{number}"

    def active_parent(self, block_id: int) -> str:
        return f"{self.active_dir}/b{(block_id >> 48) & 31}/b{(block_id >> 32) & 31}"

    def active(self, block_id: int) -> str:
        return f"{self.active_parent(block_id)}/{_BLOCK_PREFIX}{block_id}"

    def prepare(self, world: World) -> StorageVersion:
        """Make what is missing and read who this directory belongs to. Raises OSError and EnvironmentError_."""
        for path in (self.root, self.staging_dir, self.active_dir):
            world.disk.makedirs(path)
        if not world.disk.exists(self.version_file):
            storage_id = world.random.uuid()
            version = StorageVersion(
                self.cluster_id,
                world.random.randrange(1, 1 << 31),
                storage_id,
                zlib.crc32(storage_id.encode()),
                world.clock.time_ms(),
            )
            # Durable: the metadata refers to the worker's id.
            world.disk.write_file(self.version_file, version.toml().encode(), durable=True)
        return self._read_version(world.disk)

    def _read_version(self, disk: Disk) -> StorageVersion:
        try:
            found = tomllib.loads(disk.read_file(self.version_file).decode())
            fields = {name: found[name] for name in _VERSION_FIELDS}
            if any(type(value) is not _VERSION_FIELDS[name] for name, value in fields.items()):
                raise ValueError("a field has the wrong type")
        except (ValueError, KeyError) as error:
            raise EnvironmentError_(
                f"{self.version_file} cannot be understood ({error}); restore it from a copy: without it the blocks "
                "beside it belong to no worker."
            ) from error
        version = StorageVersion(**fields)
        if version.cluster_id != self.cluster_id:
            raise EnvironmentError_(
                f"{self.data_dir} belongs to the cluster {version.cluster_id!r}, not to {self.cluster_id!r}; "
                "serve another directory."
            )
        return version

    def staged(self, disk: Disk) -> Iterator[tuple[str, int | None]]:
        """Files in staging: (path, block id), without an id where the name is not a block's."""
        for name in disk.listdir(self.staging_dir):
            yield f"{self.staging_dir}/{name}", block_id_of(name)

    def committed(self, disk: Disk) -> Iterator[dict[int, str]]:
        """Block files in active, directory by directory: id -> path. Files that are no blocks are not ours to touch."""
        for outer in disk.listdir(self.active_dir):
            for inner in disk.listdir(f"{self.active_dir}/{outer}"):
                directory = f"{self.active_dir}/{outer}/{inner}"
                yield {
                    block_id: f"{directory}/{name}"
                    for name in disk.listdir(directory)
                    if (block_id := block_id_of(name)) is not None
                }


def block_id_of(name: str) -> int | None:
    """The block id in a file name; None for other names."""
    digits = name.removeprefix(_BLOCK_PREFIX)
    if digits == name or not digits.isascii() or not digits.isdigit():
        return None
    return int(digits)
