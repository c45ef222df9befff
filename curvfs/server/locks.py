"""Advisory file locks (specification section 4.15): conflicts, expiry, and splitting on unlock. Pure functions.

PLOCK (fcntl) locks cover an inclusive byte range; FLOCK locks cover the file, one per owner. The two kinds do not see
each other. Conflict means: ranges overlap, owners differ, and at least one side writes.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from curvfs.server.records import FileLock

READ, WRITE, UNLOCK = 0, 1, 2
PLOCK, FLOCK = 0, 1

#: A lock is void this long after it was set; holders set it again before that.
EXPIRE_MS = 5 * 60 * 1000

_END = (1 << 64) - 1


def alive(locks: Iterable[FileLock], now_ms: int) -> tuple[FileLock, ...]:
    """Those that have not expired."""
    return tuple(lock for lock in locks if now_ms - lock.acquired_ms < EXPIRE_MS)


def conflict(locks: Iterable[FileLock], wanted: FileLock) -> FileLock | None:
    """The lock that stands in the way of ``wanted``, the one with the lowest start; unlocking never conflicts."""
    if wanted.lock_type == UNLOCK:
        return None
    against = [
        lock
        for lock in locks
        if lock.lock_flags == wanted.lock_flags
        and not _same_owner(lock, wanted)
        and WRITE in (lock.lock_type, wanted.lock_type)
        and _overlap(lock, wanted)
    ]
    return min(against, key=lambda lock: lock.start, default=None)


def with_lock(locks: Iterable[FileLock], wanted: FileLock, now_ms: int, *, splits: bool = True) -> tuple[FileLock, ...]:
    """The locks after ``wanted`` was set (or its range unlocked); its owner's older locks in that range give way,
    whole where unlocking does not split them."""
    result: list[FileLock] = []
    for lock in locks:
        if lock.lock_flags == wanted.lock_flags and _same_owner(lock, wanted) and _overlap(lock, wanted):
            if splits or wanted.lock_type != UNLOCK:
                result += _without(lock, wanted)
        else:
            result.append(lock)
    if wanted.lock_type != UNLOCK:
        result.append(replace(wanted, acquired_ms=now_ms))
    return tuple(sorted(result, key=lambda lock: lock.start))


def _same_owner(one: FileLock, other: FileLock) -> bool:
    return (one.client_id, one.owner_id) == (other.client_id, other.owner_id)


def _overlap(one: FileLock, other: FileLock) -> bool:
    return one.lock_flags == FLOCK or (one.start <= other.end and other.start <= one.end)


def _without(lock: FileLock, cut: FileLock) -> list[FileLock]:
    """What stays of a lock outside a range."""
    if lock.lock_flags == FLOCK:
        return []
    rest = []
    if lock.start < cut.start:
        rest.append(replace(lock, end=cut.start - 1))
    if cut.end < min(lock.end, _END):
        rest.append(replace(lock, start=cut.end + 1))
    return rest
