"""Where a mount keeps what is not published: ``<prefix>/.staging/<uuid>/``.

Every process that writes below a KV prefix has such a directory of its own and refreshes the modification time of a
file in it every minute. Whoever sweeps first touches a file of its own and compares the store's times, never its own
clock, process or host: a directory in which nothing moved for ten minutes belongs to nobody any more and is removed.
The mounted directory has one too, for ordinary files that are removed while they are open.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

import trio

from curvfs.api import CurvineFileSystem, FileStatus
from curvfs.errors import CurvfsError, FileExists_, NotADirectory, NotFound
from mount.seal import STAGING_NAME

log = logging.getLogger("curvfs.mount")

BEAT_NAME = "alive"
BEAT_INTERVAL_S = 60.0
DEAD_AFTER_S = 600.0
_PAGE = 500


class Scratch:
    """The staging directory of one mount below one KV prefix, or below the mounted directory."""

    def __init__(self, fs: CurvineFileSystem, base_path: Callable[[], str]) -> None:
        """``base_path`` answers the store path of the directory that ``.staging`` is in; it may be renamed."""
        self._fs = fs
        self._base_path = base_path
        self._uuid = fs.world.random.uuid()
        self._made = False
        self._making = trio.Lock()
        self._count = 0

    @property
    def staging_path(self) -> str:
        base = self._base_path()
        return f"/{STAGING_NAME}" if base == "/" else f"{base}/{STAGING_NAME}"

    @property
    def path(self) -> str:
        return f"{self.staging_path}/{self._uuid}"

    @property
    def is_made(self) -> bool:
        return self._made

    def next_name(self) -> str:
        """A name that nothing here has had."""
        self._count += 1
        return f"{self._count:x}"

    async def ensure(self, *, again: bool = False) -> None:
        """Make the directory if it is not there. ``again``: it was seen to be gone."""
        async with self._making:
            if self._made and not again:
                return
            try:
                await self._fs.mkdir(self.staging_path, mode=0o1777)
            except FileExists_:
                pass
            await self._fs.mkdir(self.path, mode=0o700, parents=True)
            self._made = True
            await self.beat()

    async def beat(self) -> int:
        """Refresh the modification time of our file; the store's time of doing so, in ms."""
        path = f"{self.path}/{BEAT_NAME}"
        writer = await self._fs.create(path, overwrite=True, mode=0o600)
        await writer.close()
        return (await self._fs.stat(path)).mtime_ms

    async def sweep(self) -> int:
        """Remove what dead processes left; the number of directories removed. Raises what the store raises."""
        try:
            found = await self._fs.list(self.staging_path)
        except (NotFound, NotADirectory):
            return 0
        others = [status for status in found if status.name != self._uuid]
        if not others:
            return 0
        await self.ensure()
        now_ms = await self.beat()
        removed = 0
        for status in others:
            if await self._is_dead(status, now_ms):
                try:
                    await self._fs.delete(f"{self.staging_path}/{status.name}", recursive=True)
                except NotFound:
                    continue
                removed += 1
                log.info("Swept %s/%s, which a dead process left.", self.staging_path, status.name)
        return removed

    async def _is_dead(self, status: FileStatus, now_ms: int) -> bool:
        oldest_alive_ms = now_ms - DEAD_AFTER_S * 1000
        if status.mtime_ms >= oldest_alive_ms:
            return False
        if not status.is_dir:
            return True
        start_after = ""
        while True:
            page = await self._fs.list(f"{self.staging_path}/{status.name}", start_after=start_after, limit=_PAGE)
            if any(entry.mtime_ms >= oldest_alive_ms for entry in page):
                return False
            if len(page) < _PAGE:
                return True
            start_after = page[-1].name

    async def remove(self) -> None:
        """Remove our directory, and ``.staging`` when it is empty then. Never raises a CurvfsError."""
        if not self._made:
            return
        self._made = False
        try:
            await self._fs.delete(self.path, recursive=True)
            await self._fs.delete(self.staging_path)
        except CurvfsError as error:
            log.debug("%s stays: %s", self.staging_path, error)
