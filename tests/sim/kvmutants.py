"""Bugs of a store to be found: as tests/sim/mutants.py, with the seeds of tests/sim/kvstores.py."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any
from unittest.mock import patch

from curvfs.client.mastercalls import MasterCalls
from curvfs.simdisk import SimDisk
from kvstore.backends.aside import Aside
from kvstore.backends.posix import PosixBackend
from kvstore.capacity.ledger import Ledger
from kvstore.engine.threads import ThreadsEngine
from kvstore.pageio import PageIO
from tests.sim.kvstores import run_kv_seed
from tests.sim.mutants import Found


def published_before_its_checksums() -> AbstractContextManager[object]:
    """An object gets its name before its bytes and checksums are written."""
    written = PageIO._written

    def mutant(self: PageIO, page: Any, view: memoryview) -> bool:
        if not isinstance(self._backend, PosixBackend):
            return written(self, page, view)
        writer: Any = self._backend.create(page.name, len(view))
        try:
            writer._staged = not self._backend.publish(writer._file.path, writer._name)
            writer.write(view)
        except BaseException:
            writer.abort()
            raise
        page.writer = writer
        return True

    def publish(self: PosixBackend, staged: str, name: str) -> bool:
        try:
            return original(self, staged, name)
        except Exception:
            return True  # it has its name already

    original = PosixBackend.publish
    return _Both(patch.object(PageIO, "_written", mutant), patch.object(PosixBackend, "publish", publish))


def no_replace_dropped() -> AbstractContextManager[object]:
    """Publishing replaces an object that is there."""
    return patch.object(SimDisk, "rename_noreplace", SimDisk.rename)


def late_completion_into_a_reused_buffer() -> AbstractContextManager[object]:
    """A read was made twice, because the first one took long; its buffer is let go, and then the first one's bytes come
    after all."""
    readv, write = ThreadsEngine.readv, ThreadsEngine.write
    late: list[tuple[memoryview, bytes]] = []
    count = [0]

    def complete() -> None:
        for view, data in late:
            view[: len(data)] = data
        late.clear()

    def mutant_readv(self: ThreadsEngine, file: Any, views: Any, offset_bytes: int) -> int:
        done = readv(self, file, views, offset_bytes)
        complete()
        count[0] += 1
        if count[0] % 7 == 0 and len(views) == 1:
            late.append((views[0], bytes(views[0][:done])))
        return done

    def mutant_write(self: ThreadsEngine, file: Any, view: memoryview) -> None:
        complete()
        write(self, file, view)

    return _Both(patch.object(ThreadsEngine, "readv", mutant_readv), patch.object(ThreadsEngine, "write", mutant_write))


def trash_deleted_too_early() -> AbstractContextManager[object]:
    """What is in the trash goes with the next sweep, whatever readers were promised."""
    empty = Aside.empty

    def mutant(self: Aside, *, early: bool, namespace: str = "") -> int:
        return empty(self, early=True, namespace=namespace)

    return patch.object(Aside, "empty", mutant)


def quota_reservation_lost() -> AbstractContextManager[object]:
    """A writer's reservation never gets to the pool, so others do not see it."""

    def mutant(self: Ledger, record: Any) -> float:
        return self._staging.now_s()

    return patch.object(Ledger, "_touch", mutant)


def published_over_what_is_there() -> AbstractContextManager[object]:
    """The same on a server: the name is taken from whoever has it."""
    rename = MasterCalls.rename

    async def mutant(self: MasterCalls, src: str, dst: str, flags: int, *, inode_id: int) -> None:
        await rename(self, src, dst, 0, inode_id=inode_id)

    return patch.object(MasterCalls, "rename", mutant)


class _Both:
    def __init__(self, *patches: Any) -> None:
        self._patches = patches

    def __enter__(self) -> None:
        for one in self._patches:
            one.start()

    def __exit__(self, *exc: object) -> None:
        for one in self._patches:
            one.stop()


#: Every mutant, and how many seeds it may take to find it.
KV_MUTANTS: dict[Callable[[], AbstractContextManager[object]], int] = {
    published_before_its_checksums: 20,
    no_replace_dropped: 40,
    late_completion_into_a_reused_buffer: 20,
    trash_deleted_too_early: 40,
    quota_reservation_lost: 20,
}


#: Those that the seeds of tests/sim/nativestores.py are quick to find, too, and one of theirs.
NATIVE_MUTANTS: dict[Callable[[], AbstractContextManager[object]], int] = {
    published_over_what_is_there: 20,
    quota_reservation_lost: 20,
}


def find_kv(
    mutant: Callable[[], AbstractContextManager[object]],
    bound: int,
    run_seed: Callable[[int], object] = run_kv_seed,
) -> Found | None:
    """The first of ``bound`` seeds that fails with the mutant planted; None when none does."""
    for seed in range(bound):
        try:
            with mutant():
                run_seed(seed)
        except KeyboardInterrupt:
            raise
        except BaseException as error:
            while isinstance(error, BaseExceptionGroup):
                error = error.exceptions[0]
            return Found(seed, f"{type(error).__name__}: {str(error)[:200]}")
    return None
