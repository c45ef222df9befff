"""Locks that do not lapse while they are held (specification 4.15)."""

from __future__ import annotations

import dataclasses
import errno
from types import TracebackType
from typing import Self

import trio

from curvfs.client import convert
from curvfs.client.mastercalls import MasterCalls
from curvfs.client.records import FileLock, LockKind
from curvfs.client.session import Session
from curvfs.errors import CurvfsError, InProgress, InvalidRequest

#: A master forgets a lock after 5 minutes; set again this often it survives a master that is down for a while.
RENEW_S = 100.0
LAPSE_S = 300.0
_POLL_S, _POLL_MAX_S = 0.1, 1.0


class HeldLock:
    """A lock for as long as this async context manager is entered: set again long before it lapses.

    ``lost`` becomes True when that failed for so long that somebody else got it: what it guarded must stop then.
    """

    def __init__(
        self, session: Session, calls: MasterCalls, full_path: str, lock: FileLock, wait_s: float, renew_s: float
    ) -> None:
        if not 0 < renew_s < LAPSE_S:
            raise InvalidRequest(
                f"Cannot keep a lock on {full_path} by setting it every {renew_s} s; it lapses after {LAPSE_S:.0f} s."
            )
        self._session = session
        self._calls = calls
        self._full_path = full_path
        self._lock = lock
        self._wait_s = wait_s
        self._renew_s = renew_s
        self._scope = trio.CancelScope()
        self.lost = False

    async def __aenter__(self) -> Self:
        """Raises InProgress (EAGAIN) when somebody else still has it after ``wait_s``."""
        clock = self._session.world.clock
        deadline_s = clock.monotonic_s() + self._wait_s
        sleep_s = _POLL_S
        while (conflict := await self._set(self._lock)) is not None:
            left_s = deadline_s - clock.monotonic_s()
            if left_s <= 0:
                raise InProgress(
                    f"Cannot lock {self._full_path}: client {conflict.client_id}, pid {conflict.pid}, has it locked.",
                    errno_=errno.EAGAIN,
                )
            await clock.sleep(min(sleep_s, left_s))
            sleep_s = min(sleep_s + _POLL_S, _POLL_MAX_S)
        self._session.nursery.start_soon(self._renew)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Release it; where the master cannot be told, it lapses by itself."""
        self._scope.cancel()
        with trio.move_on_after(self._session.config.close_timeout_s, shield=True):
            try:
                await self._set(dataclasses.replace(self._lock, kind=LockKind.UNLOCK))
            except CurvfsError:
                self._session.stats["locks_left_to_lapse"] += 1

    async def _set(self, lock: FileLock) -> FileLock | None:
        conflict = await self._calls.set_lock(self._full_path, convert.lock_to_wire(lock, self._session.client_name))
        return None if conflict is None else convert.lock_from_wire(conflict)

    async def _renew(self) -> None:
        with self._scope:
            while not self.lost:
                await self._session.world.clock.sleep(self._renew_s)
                try:
                    self.lost = await self._set(self._lock) is not None
                except CurvfsError:
                    self._session.stats["locks_not_renewed"] += 1  # tried again, while there is time
