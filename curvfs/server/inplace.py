"""A worker's blocks as v0.3.2-alpha keeps them: written, and rewritten, under their final name.

There is no staging copy. Readers see a rewrite while it happens, Complete wants the exact length once, and Cancel
deletes the block whatever it held before (specification sections 8.4 and 12). For trying clients; nobody else should
want it.
"""

from __future__ import annotations

import os

from curvfs.server.blockstore import BlockStore, OpenBlock, _Writing, mismatch, os_errors
from curvfs.server.metastore import MetaStore
from curvfs.server.records import AllocOptions
from curvfs.server.refusals import common


class InPlaceBlockStore(BlockStore):
    """A :class:`BlockStore` whose writers work on the published file."""

    def _sweep(self, metadata: MetaStore) -> None:
        for path, _ in list(self.layout.staged(self._disk)):
            self.unlink(path)
        super()._sweep(metadata)
        for paths in self.layout.committed(self._disk):
            for block_id, path in paths.items():
                owner = self._owner_of(block_id)
                if owner is not None and not owner.locations:
                    self._note_writing(block_id, self._size(path) or 0)

    def writer_path(self, block_id: int) -> str:
        return self.layout.active(block_id)

    def needs_copy(self, block_id: int) -> bool:
        return False

    def _make_writer_file(self, block_id: int, path: str, alloc: AllocOptions | None, writing: _Writing) -> int | None:
        self._make_parent(block_id)
        size_bytes = self._size(path)
        if size_bytes is None:
            with os_errors(f"opening block {block_id}"):
                return self._disk.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL)
        writing.published_bytes = writing.size_bytes = size_bytes
        return None

    def complete(self, block_id: int, length_bytes: int, capacity_bytes: int) -> None:
        if self._owner_of(block_id) is None:
            self.remove(block_id)
            return
        writing = self._writing.get(block_id)
        size_bytes = self._size(self.layout.active(block_id))
        if size_bytes is None:
            raise self._not_found(block_id)
        if writing is None:
            raise common(f"block {block_id} status incorrect, expected Writing, actual: Finalized")
        with self._busy(block_id, writing):
            if not 0 <= length_bytes <= capacity_bytes:
                self.remove(block_id)
                raise common(f"Block {block_id} of {length_bytes} bytes exceeds block size {capacity_bytes}")
            if size_bytes != length_bytes:
                raise mismatch(block_id, length_bytes, size_bytes)
            self._used_bytes += length_bytes - (writing.published_bytes or 0)
            self._forget(block_id)

    def cancel(self, block_id: int) -> None:
        if self._size(self.layout.active(block_id)) is None:
            raise self._not_found(block_id)
        self.remove(block_id)

    def _unfinished_bytes(self, writing: _Writing) -> int:
        return max(0, writing.size_bytes - (writing.published_bytes or 0))

    def _counted_bytes(self, block_id: int, size_bytes: int) -> int:
        writing = self._writing.get(block_id)
        return size_bytes if writing is None else writing.published_bytes or 0

    def open_read(self, block_id: int) -> OpenBlock:
        found = super().open_read(block_id)
        writing = self._writing.get(block_id)
        announced_bytes = found.length_bytes if writing is None else writing.capacity_bytes
        return OpenBlock(found.fd, found.path, found.length_bytes, announced_bytes)
