"""Write-behind: a put is over when its pages are copied, and they are stored later.

The copies lie in a bounded number of buffers. When the storage is slower than whoever puts, the buffers are full, and
what comes then is dropped and counted: never is anybody held up. The buffers are filled by a thread that does nothing
else, and written from where they lie.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from functools import partial

from curvfs.errors import CurvfsError
from curvfs.world import ThreadPool, World
from kvstore.jobs import Jobs
from kvstore.loading import claimed
from kvstore.page import Form, Page
from kvstore.results import Miss, Result
from kvstore.segments import PagePlan
from kvstore.slabs import Slab, SlabPool
from kvstore.tiers.stats import BehindStats
from kvstore.transfer import Transfer

logger = logging.getLogger("kvstore")


class WriteBehind:
    """Callable from any thread; only :meth:`flush` waits."""

    def __init__(
        self,
        world: World,
        jobs: Jobs,
        slabs: SlabPool,
        *,
        header_bytes: int,
        page_bytes: int,
        timeout_s: float,
        on_result: Callable[[Result, CurvfsError | None, float], None],
    ) -> None:
        self._world = world
        self._jobs = jobs
        self._slabs = slabs
        self._header_bytes = header_bytes
        self._page_bytes = page_bytes
        self._timeout_s = timeout_s
        self._on_result = on_result
        self._changed = world.threads.condition()
        self._pool: ThreadPool | None = None
        self.queued = self.accepted = self.written = self.failed = self.dropped = 0

    def put(self, pages: Sequence[Page]) -> None:
        """Accept pages that were booked in, as many as there are buffers for."""
        for page in pages:
            slab = self._slabs.acquire(0.0)
            if slab is None:
                with self._changed:
                    self.dropped += 1
                self._jobs.settle(page, Miss.BUSY)
                continue
            with self._changed:
                self.queued += 1
                if self._pool is None:
                    self._pool = self._world.threads.pool(1, name="kvstore-behind")
            try:
                self._pool.submit(partial(self._accept, page, slab))
            except CurvfsError:  # closed meanwhile
                self._jobs.settle(page, Miss.CANCELLED)
                self._over(slab)

    def _accept(self, page: Page, slab: Slab) -> None:
        """Copy a page, let go of the caller's memory, and hand the copy on."""
        try:
            packed = claimed(page)
            if packed:
                try:
                    page.plan.pack(slab, self._header_bytes)
                finally:
                    page.transfer.detach(page.index)
        except CurvfsError as error:
            self._jobs.settle(page, Miss.IO, error)
            packed = False
        except Exception as error:
            logger.exception("kvstore failed to copy %s.", page.name)
            self._jobs.settle(page, Miss.IO, CurvfsError(f"Copying {page.name} failed: {error!r}"))
            packed = False
        if not packed:
            self._jobs.settle(page, None)
            self._over(slab)
            return
        self._jobs.settle(page, self._page_bytes)
        with self._changed:
            self.accepted += 1
        if not self._jobs.admit(1):
            self._ended(slab, 0.0, Miss.BUSY, None)
            return
        started_s = self._world.clock.monotonic_s()
        transfer = Transfer(
            self._world,
            1,
            timeout_s=self._timeout_s,
            on_result=lambda result, error: self._count(started_s, result, error),
        )
        self._jobs.put(
            [
                Page(
                    transfer,
                    0,
                    page.key,
                    page.name,
                    PagePlan(self._world.clock),
                    Form.PUT,
                    packed=slab,
                    on_end=partial(self._over, slab),
                )
            ]
        )

    def _ended(self, slab: Slab, started_s: float, result: Result, error: CurvfsError | None) -> None:
        self._count(started_s or self._world.clock.monotonic_s(), result, error)
        self._over(slab)

    def _count(self, started_s: float, result: Result, error: CurvfsError | None) -> None:
        with self._changed:
            if isinstance(result, Miss):
                self.failed += 1
            else:
                self.written += 1
        self._on_result(result, error, self._world.clock.monotonic_s() - started_s)

    def _over(self, slab: Slab) -> None:
        """Nobody writes from this buffer any more."""
        self._slabs.release(slab)
        with self._changed:
            self.queued -= 1
            self._changed.notify_all()

    def flush(self, timeout_s: float) -> bool:
        """Wait until everything that was accepted is stored or has failed; False when it was not in time."""
        until_s = self._world.clock.monotonic_s() + timeout_s
        with self._changed:
            while self.queued:
                left_s = until_s - self._world.clock.monotonic_s()
                if left_s <= 0 or not self._changed.wait(left_s):
                    return not self.queued
        return True

    def close(self) -> None:
        """Accept no more."""
        with self._changed:
            if self._pool is not None:
                self._pool.close(0.0)
        self._slabs.close()

    def stats(self) -> BehindStats:
        with self._changed:
            return BehindStats(
                size_bytes=self._slabs.count * self._slabs.size_bytes,
                queued=self.queued,
                accepted=self.accepted,
                written=self.written,
                failed=self.failed,
                dropped=self.dropped,
            )
