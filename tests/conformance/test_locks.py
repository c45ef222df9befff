"""Section 4.15: advisory locks."""

from __future__ import annotations

import pytest
from conformance.probe import CLIENT_NAME, NOT_FOUND, OTHER_CLIENT, Probe, refused
from conformance.rules import ALPHA, HEAD, V041, rule

from curvfs.wire.codes import RpcCode
from curvfs.wire.messages import pb

READ, WRITE, UNLOCK = 0, 1, 2
PLOCK, FLOCK = 0, 1
TO_EOF = (1 << 64) - 1


class Locks:
    """Lock calls on one file; each answers (owner, start, end) of the conflict, or None."""

    def __init__(self, probe: Probe, path: str) -> None:
        self._probe = probe
        self._path = path

    async def set(
        self, owner: int, kind: int, start: int = 0, end: int = TO_EOF, *, flags: int = PLOCK, client: str = CLIENT_NAME
    ) -> tuple[int, int, int] | None:
        return await self._call(RpcCode.SET_LOCK, pb.SetLockRequest, owner, kind, start, end, flags, client)

    async def get(
        self, owner: int, kind: int, start: int = 0, end: int = TO_EOF, *, flags: int = PLOCK, client: str = CLIENT_NAME
    ) -> tuple[int, int, int] | None:
        return await self._call(RpcCode.GET_LOCK, pb.GetLockRequest, owner, kind, start, end, flags, client)

    async def _call(
        self, code: int, cls: type, owner: int, kind: int, start: int, end: int, flags: int, client: str
    ) -> tuple[int, int, int] | None:
        lock = pb.FileLockProto(
            client_id=client,
            owner_id=owner,
            pid=4711,
            acquire_time=1,
            lock_type=kind,
            lock_flags=flags,
            start=start,
            end=end,
        )
        reply = await self._probe.call(code, cls(path=self._path, lock=lock))
        if not reply.HasField("conflict"):
            return None
        found = reply.conflict
        assert found.acquire_time > 1_000_000  # the server's, not ours
        return (found.owner_id, found.start, found.end)


@pytest.fixture
async def locks(probe: Probe) -> Locks:
    await probe.create(probe.at("f"))
    return Locks(probe, probe.at("f"))


@rule("4.15")
async def test_a_conflict_comes_inside_a_success(locks: Locks) -> None:
    assert await locks.set(1, WRITE, 0, 9) is None
    assert await locks.set(2, WRITE, 5, 20) == (1, 0, 9)
    assert await locks.get(2, READ, 9, 9) == (1, 0, 9)
    assert await locks.get(2, WRITE, 10, 20) is None  # and nothing was stored for owner 2
    assert await locks.set(3, WRITE, 10, 20) is None


@rule("4.15")
async def test_ranges_are_inclusive(locks: Locks) -> None:
    await locks.set(1, WRITE, 10, 19)
    assert await locks.get(2, WRITE, 0, 9) is None
    assert await locks.get(2, WRITE, 20, 30) is None
    assert await locks.get(2, WRITE, 19, 19) == (1, 10, 19)
    assert await locks.get(2, WRITE, 0, TO_EOF) == (1, 10, 19)


@rule("4.15")
async def test_readers_share(locks: Locks) -> None:
    assert await locks.set(1, READ, 0, 9) is None
    assert await locks.set(2, READ, 0, 9) is None
    assert await locks.set(3, WRITE, 0, 9) is not None


@rule("4.15")
async def test_an_owner_is_client_and_owner_id(locks: Locks) -> None:
    await locks.set(1, WRITE)
    assert await locks.get(1, WRITE) is None
    assert await locks.get(1, WRITE, client=OTHER_CLIENT) is not None


@rule("4.15")
async def test_an_owners_own_ranges_are_replaced(locks: Locks) -> None:
    await locks.set(1, WRITE, 0, 99)
    assert await locks.set(1, READ, 0, 99) is None
    assert await locks.get(2, READ) is None
    assert await locks.get(2, WRITE) == (1, 0, 99)


@rule("4.15")
async def test_the_lowest_conflict_is_reported(locks: Locks) -> None:
    await locks.set(1, WRITE, 50, 59)
    await locks.set(2, WRITE, 10, 19)
    await locks.set(3, WRITE, 30, 39)
    assert await locks.get(9, WRITE) == (2, 10, 19)


@rule("4.15", "8.4", only=[V041, HEAD])
async def test_unlocking_the_middle_splits(locks: Locks) -> None:
    await locks.set(1, WRITE, 0, 99)
    assert await locks.set(1, UNLOCK, 40, 59) is None
    assert await locks.get(2, WRITE, 40, 59) is None
    assert await locks.get(2, WRITE, 0, 50) == (1, 0, 39)
    assert await locks.get(2, WRITE, 50, 99) == (1, 60, 99)


@rule("8.4", "12", only=[ALPHA])
async def test_unlocking_the_middle_drops_the_whole_lock_on_an_old_master(locks: Locks) -> None:
    await locks.set(1, WRITE, 0, 99)
    await locks.set(1, WRITE, 200, 299)
    await locks.set(1, UNLOCK, 40, 59)
    assert await locks.get(2, WRITE, 0, 99) is None
    assert await locks.get(2, WRITE) == (1, 200, 299)


@rule("4.15")
async def test_unlock_never_conflicts(locks: Locks) -> None:
    await locks.set(1, WRITE)
    assert await locks.set(2, UNLOCK) is None
    assert await locks.get(2, WRITE) == (1, 0, TO_EOF)
    assert await locks.set(1, UNLOCK) is None
    assert await locks.get(2, WRITE) is None


@rule("4.15", "12")
async def test_flock_covers_the_file_and_is_renewed_by_its_owner(locks: Locks) -> None:
    assert await locks.set(1, WRITE, 5, 6, flags=FLOCK) is None
    assert await locks.set(2, WRITE, 100, 200, flags=FLOCK) is not None
    assert await locks.set(1, WRITE, flags=FLOCK) is None
    assert await locks.set(1, UNLOCK, flags=FLOCK) is None
    assert await locks.set(2, WRITE, flags=FLOCK) is None


@rule("4.15")
async def test_locks_belong_to_the_inode(locks: Locks, probe: Probe) -> None:
    await locks.set(1, WRITE)
    await probe.link(probe.at("f"), probe.at("g"))
    assert await Locks(probe, probe.at("g")).get(2, WRITE) == (1, 0, TO_EOF)
    await probe.rename(probe.at("f"), probe.at("h"))
    assert await Locks(probe, probe.at("h")).get(2, WRITE) == (1, 0, TO_EOF)


@rule("4.15")
async def test_locks_on_what_is_missing(probe: Probe) -> None:
    missing = Locks(probe, probe.at("missing"))
    async with refused(NOT_FOUND):
        await missing.set(1, WRITE)
    async with refused(NOT_FOUND):
        await missing.get(1, WRITE)
