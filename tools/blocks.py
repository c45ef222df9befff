"""Block files of the embedded server of a directory that no file owns."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from curvfs.api import Located, SyncFileSystem
from curvfs.errors import NotFound
from curvfs.server.layout import Layout
from curvfs.server.place import CLUSTER_ID, Directory
from curvfs.world import World

#: A block younger than this may belong to a file that is being made.
_SETTLED_S = 60.0
_PAGE = 1000


@dataclass(frozen=True, slots=True)
class Orphan:
    """A block file without an owner."""

    block_id: int
    path: str
    length_bytes: int


def orphan_blocks(directory: str, fs: SyncFileSystem, world: World) -> list[Orphan]:
    """Committed block files below ``directory`` that no file of ``fs`` (the server's whole namespace) has, looked up
    twice because files move while they are walked. Raises CurvfsError, OSError."""
    candidates = _settled(directory, world)
    for _ in range(2):
        if not candidates:
            break
        for block_id in _owned(fs, "/"):
            candidates.pop(block_id, None)
    orphans = []
    for block_id, path in sorted(candidates.items()):
        try:
            orphans.append(Orphan(block_id, path, world.disk.stat(path).st_size))
        except FileNotFoundError:  # removed meanwhile
            continue
    return orphans


def _settled(directory: str, world: World) -> dict[int, str]:
    place = Directory.at(directory)
    found: dict[int, str] = {}
    number = 1
    while world.disk.exists(place.worker_data(number)):
        layout = Layout(place.worker_data(number), CLUSTER_ID)
        number += 1
        if not world.disk.exists(layout.active_dir):
            continue
        for paths in layout.committed(world.disk):
            for block_id, path in paths.items():
                try:
                    age_s = world.clock.time_ms() / 1000 - world.disk.stat(path).st_mtime
                except FileNotFoundError:
                    continue
                if age_s > _SETTLED_S:
                    found[block_id] = path
    return found


def _owned(fs: SyncFileSystem, directory: str) -> Iterator[int]:
    """Ids of all blocks of all files below a directory."""
    for page in fs.list_iter(directory, _PAGE):
        yield from _blocks(fs, [status.path for status in page if status.is_file])
        for status in page:
            if status.is_dir:
                yield from _owned(fs, status.path)


def _blocks(fs: SyncFileSystem, paths: Iterable[str]) -> Iterator[int]:
    for found in fs.locate_many(list(paths)):
        if isinstance(found, Located):
            yield from (block.block_id for block in found.blocks)
        elif not isinstance(found, NotFound):
            raise found
