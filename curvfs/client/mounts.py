"""The mount table: directories of the namespace whose files belong to an under store (specification 4.19).

We speak to no under store. Where it is the authority (cache mode) the master knows only part of the truth, so nothing
is done there at all; where the master is (fs mode) reading what it holds and writing where that is allowed are fine.
"""

from __future__ import annotations

import errno

from curvfs.client.convert import mount_point
from curvfs.client.mastercalls import MasterCalls
from curvfs.client.paths import is_below
from curvfs.client.records import MountPoint
from curvfs.client.session import Session
from curvfs.errors import KIND_READ_ONLY, CurvfsError, InProgress, InvalidRequest, ReadOnly, Unsupported


class MountTable:
    """The master's mount table, kept fresh while calls are made."""

    def __init__(self, session: Session, calls: MasterCalls) -> None:
        self._session = session
        self._calls = calls
        self._points: tuple[MountPoint, ...] = ()
        #: How old the table may be; it is asked for again in the background.
        self._fresh_s = session.config.mount_update_ttl_s
        self._asked_s = -self._fresh_s
        self._asking = False

    async def refresh(self) -> tuple[MountPoint, ...]:
        self._asked_s = self._session.world.clock.monotonic_s()
        try:
            answer = await self._calls.mount_table()
        except Unsupported:  # a server without under stores need not know the call
            self._points = ()
        else:
            self._points = tuple(map(mount_point, answer.mount_table))
        return self._points

    def check(self, path: str, *, change: bool = False) -> None:
        """Raises Unsupported (EOPNOTSUPP) below a cache-mode mount, ReadOnly for a change below a read-only one."""
        if self._session.world.clock.monotonic_s() - self._asked_s > self._fresh_s and not self._asking:
            self._asking = True
            self._session.nursery.start_soon(self._refresh_quietly)
        point = self._point(path)
        if point is None:
            return
        if point.cache_mode:
            raise Unsupported(
                f"Cannot use {path}: {point.path} is a cache of {point.ufs_path}, which only that store can tell of; "
                "use a client that speaks to it.",
                errno_=errno.EOPNOTSUPP,
            )
        if change and point.read_only:
            raise ReadOnly(
                f"Cannot change {path}: {point.path} is mounted read-only from {point.ufs_path}.", kind=KIND_READ_ONLY
            )

    def check_rename(self, source: str, target: str) -> None:
        """Raises EXDEV across the boundary of a mount, EBUSY for a mount's own directory and those above it."""
        self.check_delete(source)
        if self._point(source) != self._point(target):
            raise InvalidRequest(
                f"Cannot rename {source} to {target}: they belong to different stores.", errno_=errno.EXDEV
            )

    def check_delete(self, path: str) -> None:
        """Raises EBUSY for a mount's own directory and those above it: it would go with them."""
        for point in self._points:
            if point.path == path or is_below(point.path, path):
                where = "there" if point.path == path else f"at {point.path}"
                raise InProgress(
                    f"Cannot move or remove {path}: {point.ufs_path} is mounted {where}; unmount it first."
                )

    def _point(self, path: str) -> MountPoint | None:
        found = [point for point in self._points if path == point.path or is_below(path, point.path)]
        return max(found, key=lambda point: len(point.path), default=None)

    async def _refresh_quietly(self) -> None:
        try:
            await self.refresh()
        except CurvfsError:
            pass  # the call that caused this tells of the same trouble
        finally:
            self._asking = False
