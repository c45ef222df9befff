"""The places that one contract suite runs over: a directory, and a Curvine namespace near and far."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

import kvstore
from curvfs.api import SyncFileSystem
from kvstore import Geometry, Identity, KVStore, PageKey

WORKER_HOSTNAME = "kvstore-tests"


class Place:
    """Somewhere to open stores, and to look at what they left there."""

    def __init__(self, url: str) -> None:
        self.url = url
        self._stores: list[KVStore] = []

    def open(
        self, geometry: Geometry, *, revision: str = "r1", model: str = "m", salt: str = "", **settings: Any
    ) -> KVStore:
        """A store here; it is closed when the test ends."""
        whose = Identity.of(geometry, model=model, revision=revision, salt=salt)
        store = kvstore.open(self.url, whose, geometry=geometry, **settings)
        self._stores.append(store)
        return store

    def close(self) -> None:
        for store in self._stores:
            store.close()

    def names(self) -> list[str]:
        """Everything below the prefix, directories with a slash behind."""
        raise NotImplementedError

    def modes(self) -> dict[str, int]:
        """Permission bits of everything below the prefix and of itself."""
        raise NotImplementedError

    def block_file(self, store: KVStore, key: PageKey) -> Path:
        """The local file that holds an object's bytes, wherever that is."""
        raise NotImplementedError

    def wipe(self) -> None:
        """Remove the prefix and everything below it."""
        raise NotImplementedError

    def objects(self) -> list[str]:
        return [name for name in self.names() if name.endswith(".safetensors") and not name.startswith(".")]

    def trashed(self) -> list[str]:
        return [name for name in self.names() if name.startswith(".trash/") and not name.endswith("/")]

    def quarantined(self) -> list[str]:
        return [name for name in self.names() if name.startswith(".quarantine/") and not name.endswith("/")]

    def staged(self) -> list[str]:
        """Staged files, without signs of life."""
        inside = [name for name in self.names() if name.startswith(".staging/") and not name.endswith("/")]
        return [name for name in inside if not name.endswith("/alive")]


class Directory(Place):
    def __init__(self, root: Path) -> None:
        super().__init__(root.as_uri())
        self.root = root

    def names(self) -> list[str]:
        prefix = self.root / "kv"
        return sorted(f"{path.relative_to(prefix)}{'/' if path.is_dir() else ''}" for path in prefix.rglob("*"))

    def modes(self) -> dict[str, int]:
        prefix = self.root / "kv"
        return {str(path): path.lstat().st_mode & 0o7777 for path in (prefix, *prefix.rglob("*"))}

    def block_file(self, store: KVStore, key: PageKey) -> Path:
        return self.root / "kv" / store.object_name(key)

    def wipe(self) -> None:
        shutil.rmtree(self.root / "kv")


class Namespace(Place):
    def __init__(self, master: str, blocks: Path | None, hostname: str) -> None:
        self.path = f"/kvstore-{uuid.uuid4()}"
        super().__init__(f"curvine://{master}{self.path}?client_hostname={hostname}")
        self._blocks = blocks
        self.fs = SyncFileSystem.connect(self.url)

    def close(self) -> None:
        super().close()
        self.fs.close()

    def _walk(self, path: str) -> Iterator[Any]:
        for status in self.fs.list(path):
            yield status
            if status.is_dir:
                yield from self._walk(status.path)

    def names(self) -> list[str]:
        return sorted(f"{one.path.removeprefix('/kv/')}{'/' if one.is_dir else ''}" for one in self._walk("/kv"))

    def modes(self) -> dict[str, int]:
        return {one.path: one.mode & 0o7777 for one in (self.fs.stat("/kv"), *self._walk("/kv"))}

    def block_file(self, store: KVStore, key: PageKey) -> Path:
        if self._blocks is None:
            pytest.skip("the block files of that server are not here")
        block = self.fs.locate(f"/kv/{store.object_name(key)}").blocks[0].block_id
        return next(self._blocks.rglob(f"blk_{block}"))

    def wipe(self) -> None:
        self.fs.delete("/kv", recursive=True)


@contextmanager
def serving(directory: Path) -> Iterator[str]:
    """A server over ``directory`` in a process of its own; yields host:port of its master."""
    command = [sys.executable, "-m", "curvfs.server", str(directory), "--master-port", "0", "--worker-port", "0"]
    process = subprocess.Popen(
        [*command, "--hostname", WORKER_HOSTNAME], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    )
    try:
        assert process.stdout is not None
        url = process.stdout.readline().strip()
        yield url.removeprefix("curvine://").rstrip("/")
    finally:
        process.terminate()
        process.wait(20)
        if process.stdout is not None:
            process.stdout.close()


def pages(geometry: Geometry, count: int, seed: int = 0) -> list[bytearray]:
    """Payload of ``count`` pages, all different."""
    return [bytearray(payload(geometry.size_bytes, seed * 1_000_003 + index)) for index in range(count)]


def payload(size_bytes: int, seed: int) -> bytes:
    """Bytes that are a function of the seed."""
    return hashlib.shake_128(seed.to_bytes(8, "little")).digest(size_bytes)


def empty(geometry: Geometry, count: int) -> list[bytearray]:
    """Room for ``count`` pages, filled with what no page holds."""
    return [bytearray(b"\xee" * geometry.size_bytes) for _ in range(count)]


def untouched(buffers: Sequence[bytearray]) -> bool:
    return all(buffer == b"\xee" * len(buffer) for buffer in buffers)


def is_root() -> bool:
    return os.geteuid() == 0
