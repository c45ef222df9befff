"""Pages on their way through the I/O threads: asked for, opened and published in batches, moved one by one.

::

    put:  ask for all ─> create a batch ─> write each in its own job ─> the last one publishes the batch
    get:  ask for all ─> open a batch   ─> read each in its own job

Where a back end gains nothing by batches (:attr:`Backend.batch` is 1) every page is a batch of its own, and one job
does all of it. Puts have threads and buffers of their own: from a disk that takes few writes, or none, pages are still
read. Whatever happens, every page gets a result.
"""

from __future__ import annotations

import functools
import logging
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress

from curvfs.errors import CurvfsError, TransportError
from curvfs.world import World
from kvstore.backends.base import Backend, Found, ObjectReader
from kvstore.capacity.room import Room
from kvstore.engine.base import Engine
from kvstore.health.health import Health
from kvstore.health.meter import Reading
from kvstore.health.probing import Prober
from kvstore.loading import close_reader
from kvstore.page import Form, Page
from kvstore.pageio import PageIO
from kvstore.reshard import Resharded, Resharder
from kvstore.results import Miss, Refused, Result, miss_of
from kvstore.stats import Counters
from kvstore.tiers.memory import Frame

logger = logging.getLogger("kvstore")

#: How long a page whose device is still at work lets others go first.
_COMPUTING_S = 0.5e-3
#: How long a put waits for the puts before it, whose objects could be evicted for it once they are there.
_NO_ROOM_S = 5e-3
#: The same for a put whose worker is at work on as many as it may.
_WORKER_BUSY_S = 5e-3


class _Batch:
    """Pages that are written on their own and published together."""

    def __init__(self, world: World, pages: list[Page]) -> None:
        self._lock = world.threads.lock()
        self._left = len(pages)
        self.written: list[Page] = []

    def arrived(self, page: Page, *, written: bool) -> bool:
        """One more is done with; True for the last one."""
        with self._lock:
            if written:
                self.written.append(page)
            self._left -= 1
            return self._left == 0


def _cut(pages: list[Page], size: int) -> Iterator[list[Page]]:
    for start in range(0, len(pages), size):
        yield pages[start : start + size]


class Jobs:
    """What a store has under way. Callable from any thread."""

    def __init__(
        self,
        world: World,
        backend: Backend,
        engine: Engine,
        pages: PageIO,
        resharder: Resharder,
        counters: Counters,
        room: Room,
        health: Health,
        prober: Prober,
        *,
        max_queued: int,
    ) -> None:
        self._world = world
        self._room = room
        self._health = health
        self._prober = prober
        self._backend = backend
        self._engine = engine
        self._pages = pages
        self._resharder = resharder
        self._counters = counters
        self._max_queued = max_queued
        self._lock = world.threads.lock()
        self.in_flight = 0
        self.closed = False

    def admit(self, count: int) -> int:
        """Book in as many of ``count`` pages as there is room for; each is settled once."""
        with self._lock:
            admitted = min(max(0, self._max_queued - self.in_flight), count)
            self.in_flight += admitted
            return admitted

    def put(self, pages: list[Page]) -> None:
        """Store pages that were booked in."""
        self._start(self._plan_puts, pages)

    def get(self, pages: list[Page]) -> None:
        """Load pages that were booked in; those that are known are not asked for, those in host memory not read."""
        memory = self._pages.loader.memory
        for page in pages:
            page.frame = memory.pin(page.key, page.name)
        hot = [page for page in pages if page.frame is not None]
        if hot:
            each = -(-len(hot) // self._engine.depth)
            for start in range(0, len(hot), each):
                self._start(self._copy_hot, hot[start : start + each])
            pages = [page for page in pages if page.frame is None]
        ask = self._backend.locates or bool(self._resharder.splits)
        self._read_all([page for page in pages if page.found is not None or not ask])
        self._start(self._plan_gets, [page for page in pages if page.found is None and ask])

    def _copy_hot(self, pages: list[Page]) -> None:
        for page in pages:
            frame, page.frame = page.frame, None
            if frame is not None:
                self._settle(page, self._guarded(page, functools.partial(self._copied, frame)))

    def _copied(self, frame: Frame, page: Page) -> Result | None:
        return self._pages.loader.load_from_memory(page, frame)

    def confirm(self, names: Sequence[str], timeout_s: float | None = None) -> list[Found | CurvfsError | None]:
        """What the backend says about all names; a failure stands in every place."""
        try:
            return self._backend.confirm(names, timeout_s)
        except CurvfsError as error:
            return [error] * len(names)
        except Exception as error:
            logger.exception("kvstore failed to ask for %d objects.", len(names))
            return [CurvfsError(f"Asking for objects failed: {error!r}")] * len(names)

    # ------------------------------------------------------------------------------------------------------ common

    def _batches(self, pages: list[Page]) -> Iterator[list[Page]]:
        yield from _cut(pages, self._backend.batch)

    def _start(self, function: Callable[[list[Page]], None], pages: list[Page]) -> None:
        """Let an I/O thread do it."""
        if not pages:
            return
        try:
            self._engine.submit(functools.partial(self._run, function, pages), writing=pages[0].storing)
        except CurvfsError:  # closed meanwhile
            self._settle_all(pages, Miss.CANCELLED)

    def _run(self, function: Callable[[list[Page]], None], pages: list[Page]) -> None:
        if self.closed:
            self._settle_all(pages, Miss.CANCELLED)
            return
        try:
            function(pages)
        except Exception as error:
            logger.exception("kvstore failed on %d pages.", len(pages))
            self._settle_all(pages, Miss.IO, CurvfsError(f"Moving {len(pages)} pages failed: {error!r}"))

    def _settle_all(self, pages: Sequence[Page], result: Miss, error: CurvfsError | None = None) -> None:
        for page in pages:
            self._settle(page, result, error)

    def _settle(self, page: Page, result: Result | None, error: CurvfsError | None = None) -> None:
        """Book a page out, once. ``None``: its transfer was given up and has settled it."""
        with self._lock:
            if page.settled:
                return
            page.settled = True
            self.in_flight -= 1
        page.plan.drop()
        frame, page.frame = page.frame, None
        if frame is not None:
            memory = self._pages.loader.memory
            (memory.admit if page.storing and isinstance(result, int) else memory.unpin)(frame)
        if page.storing:
            if not isinstance(result, int):
                self._abort(page)
            (self._room.doubt if page.doubtful else self._room.withdraw)(page)
            if page.tried:
                self._health.put_ended(result)
        else:
            self._waits_no_more(page)
            if result is Miss.ABSENT:
                self._room.gone(page.name)
        if result is not None:
            page.transfer.settle(page.index, result, error)
        if page.on_end is not None:
            page.on_end()

    def settle(self, page: Page, result: Result | None, error: CurvfsError | None = None) -> None:
        """Book a page out that was booked in and not handed to :meth:`put` or :meth:`get`."""
        self._settle(page, result, error)

    def _guarded(self, page: Page, function: Callable[[Page], Result | None]) -> Result | None:
        """A page's result; settles it and answers None when there is nothing to go on with."""
        result, error = self._tried(page, function)
        if isinstance(result, int):
            return result
        self._settle(page, result, error)
        return None

    def _tried(self, page: Page, function: Callable[[Page], Result | None]) -> tuple[Result | None, CurvfsError | None]:
        """A page's result, and what went wrong in words. ``None``: it was given up meanwhile."""
        try:
            if self.closed:
                return Miss.CANCELLED, None
            if page.transfer.left_s() <= 0:
                return Miss.DEADLINE, None
            return function(page), None
        except CurvfsError as error:
            return miss_of(error, storing=page.storing), error
        except Exception as error:
            logger.exception("kvstore failed on %s.", page.name)
            return Miss.IO, CurvfsError(f"{page.name}: {error!r}")

    # -------------------------------------------------------------------------------------------------------- puts

    def _plan_puts(self, pages: list[Page]) -> None:
        """Ask for all of them in one round, store those that are not there."""
        self._review_writers()
        moment = self._room.moment()
        self._admit_puts(pages, self.confirm([page.name for page in pages]), moment)

    def _admit_puts(self, pages: list[Page], answers: list[Found | CurvfsError | None], moment: int) -> None:
        """Take room for as many as there is some for; the rest comes when these are stored."""
        new: list[Page] = []
        waiting: list[Page] = []
        for place, (page, answer) in enumerate(zip(pages, answers, strict=True)):
            try:
                if self._pages.taken(page, answer) and self._room.still_there(page.name, moment):
                    self._counters.existed()
                    self._settle(page, self._pages.page_bytes)
                    continue
                if not page.tried:
                    page.tried = self._health.may_put()
                if not page.tried:
                    raise Refused(Miss.UNREACHABLE, f"{page.name} was not stored: the last ones could not be.")
                if not self._room.admit(page, self._pages.object_bytes):
                    waiting, answers = pages[place:], answers[place:]
                    break
                new.append(page)
            except CurvfsError as error:
                self._settle(page, miss_of(error), error)
        batches = list(self._batches(new))
        if len(batches) == 1 and not waiting:
            self._run(self._create, batches[0])
        else:
            for batch in batches:
                self._start(self._create, batch)
        if waiting:
            if not new:  # others' pages are under way
                self._world.clock.block(_NO_ROOM_S)
            self._start(functools.partial(self._admit_puts, answers=answers, moment=moment), waiting)

    def _create(self, pages: list[Page]) -> None:
        """Stage a batch, and write each page in a job of its own."""
        batch = _Batch(self._world, pages)
        if len(pages) > 1 or self._health.writers.choosing:
            self._pages.create(pages)
        for page in pages[1:]:
            try:
                self._engine.submit(functools.partial(self._write, batch, page), writing=True)
            except CurvfsError:  # closed meanwhile
                self._write(batch, page)
        self._write(batch, pages[0])

    def _write(self, batch: _Batch, page: Page) -> None:
        if self._computing(page):
            try:
                self._world.clock.block(_COMPUTING_S)
                self._engine.submit(functools.partial(self._write, batch, page), writing=True)  # others go first
                return
            except CurvfsError:  # closed meanwhile
                pass
        writers, writer = self._health.writers, page.writer
        if writer is not None and not page.retried and writers.left_alone(writer.targets):
            page.retried, page.writer = True, None  # it is made anew, elsewhere
            writer.abandon()
            writer = None
        targets = () if writer is None or page.transfer.left_s() <= 0 else writer.targets
        if not writers.takes(targets):
            self._review_writers()  # perhaps nobody else is left to do it
            try:
                self._world.clock.block(_WORKER_BUSY_S)
                self._engine.submit(functools.partial(self._write, batch, page), writing=True)
                return
            except CurvfsError:  # closed meanwhile
                targets = ()
        try:
            written = self._guarded(page, self._pages.write) is not None
        finally:
            writers.let_go(targets)
        if not written:
            self._abort(page)
        if batch.arrived(page, written=written) and batch.written:
            self._publish(batch.written)

    def _review_writers(self) -> None:
        """Leave workers alone that take no writes, and try them again in the background."""
        for target in self._health.writers.review():
            self._prober.attempt(target)

    def _computing(self, page: Page) -> bool:
        """Is the caller's device still at work on what is to be stored? A failure shows when it is stored."""
        try:
            return page.transfer.left_s() > 0 and not self.closed and not page.plan.ready()
        except CurvfsError:
            return False

    def _publish(self, pages: list[Page]) -> None:
        answers = self._pages.publish(pages)
        for page, answer in zip(pages, answers, strict=True):
            if isinstance(answer, CurvfsError):
                page.doubtful = isinstance(answer, TransportError)
                self._abort(page)
                self._settle(page, miss_of(answer, storing=True), answer)
                continue
            try:
                if answer:
                    self._room.published(page, page.object_bytes)
                else:  # somebody else was first: with the same bytes, if it is an object of this kind
                    self._pages.taken(page, self.confirm([page.name])[0])
                self._settle(page, self._pages.page_bytes)
            except CurvfsError as error:
                self._settle(page, miss_of(error, storing=True), error)

    @staticmethod
    def _abort(page: Page) -> None:
        writer, page.writer = page.writer, None
        if writer is not None:
            writer.abort()

    # -------------------------------------------------------------------------------------------------------- gets

    def _plan_gets(self, pages: list[Page]) -> None:
        """Ask where all of them are in one round, load those that are there."""
        answers = self.confirm([page.name for page in pages])
        there = []
        if self._resharder.splits:
            absent = [index for index, answer in enumerate(answers) if answer is None]
            others = self._resharder.resolve([pages[index].key for index in absent], self.confirm)
            for index, other in zip(absent, others, strict=True):
                answers[index] = other
        for page, answer in zip(pages, answers, strict=True):
            if answer is None:
                self._settle(page, Miss.ABSENT)
            elif isinstance(answer, CurvfsError):
                self._settle(page, miss_of(answer), answer)
            else:
                page.found = answer
                there.append(page)
        self._read_all(there)

    def _read_all(self, pages: list[Page]) -> None:
        """Read pages whose places are known: others' lookups count them as under way from now on."""
        for page in pages:
            page.waiting = self._place(page)
        for place, number in Counter(page.waiting for page in pages if page.waiting is not None).items():
            self._health.waits(place, number)
        loader = self._pages.loader
        if self._backend.batch >= loader.together:
            for batch in self._batches(pages):
                self._start(self._open, batch)
            return
        # More threads than have buffers to read into would only take the interpreter from each other.
        batches = deque(_cut(pages, loader.together))
        for _ in range(min(len(batches), loader.at_once)):
            try:
                self._engine.submit(functools.partial(self._open_all, batches))
            except CurvfsError:  # closed meanwhile
                self._open_all(batches)

    def _open_all(self, batches: deque[list[Page]]) -> None:
        """Go through batches that others go through as well."""
        with suppress(IndexError):
            while True:
                self._run(self._open, batches.popleft())

    def _waits_no_more(self, page: Page) -> None:
        place, page.waiting = page.waiting, None
        if place is not None:
            self._health.waits(place, -1)

    def _open(self, pages: list[Page]) -> None:
        """Open a batch, and read each page in a job of its own. What would not be delivered is not asked for."""
        pages = [page for page in pages if self._is_admitted(page)]
        if not pages:
            return
        plain = [page for page in pages if page.found is None or not isinstance(page.found.located, Resharded)]
        if len(plain) > 1:
            opened = self._backend.open_many([(page.name, page.found) for page in plain])
            for page, reader in zip(plain, opened, strict=True):
                if isinstance(reader, ObjectReader):  # what failed is tried again by itself, which tells why
                    page.reader = reader
        whole = pages[0].form in (Form.COPY, Form.LOAN)
        first, *others = _cut(pages, self._pages.loader.together if whole else 1)
        for some in others:
            self._submit_reads(some)
        self._read_some(first)

    def _read_some(self, pages: list[Page]) -> None:
        """Read small pages together."""
        if len(pages) == 1:
            self._read(pages[0])
            return
        readings = [self._began(page) for page in pages]
        at = 0
        while at < len(pages):
            count = 1
            try:
                count = self._pages.loader.fetch(pages[at:])
            except (CurvfsError, OSError):  # each is told why
                pass
            some = pages[at : at + count]
            try:
                outcomes = [self._go_on(page, reading) for page, reading in zip(some, readings[at:], strict=False)]
            finally:
                self._pages.loader.let_go(some)  # before anybody hears of it
            for page, (result, error) in zip(some, outcomes, strict=True):
                self._settle(page, result, error)
            at += count

    def _place(self, page: Page) -> str:
        return "" if page.found is None else self._backend.place(page.found)

    def _is_admitted(self, page: Page) -> bool:
        """Does the page's place answer these days? Else it is settled, and the place tried in the background."""
        place = self._place(page)
        if self._health.admits(place):
            return True
        found = Found(0) if page.found is None else page.found  # a directory tells when it is opened
        if not isinstance(found.located, Resharded):
            self._prober.measure(place, [(page.name, found)])
        where = f"worker {place}" if place else "store"
        self._settle(page, Miss.UNREACHABLE, Refused(Miss.UNREACHABLE, f"The {where} does not deliver these days."))
        return False

    def _submit_reads(self, pages: list[Page]) -> None:
        try:
            self._engine.submit(functools.partial(self._read_some, pages))
        except CurvfsError:  # closed meanwhile
            self._read_some(pages)

    def _load(self, page: Page) -> Result | None:
        """One step of a page, tried once more where the store failed and the budget has it."""
        loader = self._pages.loader
        try:
            return loader.load(page)
        except CurvfsError as error:
            lost = miss_of(error) in (Miss.IO, Miss.UNREACHABLE) and page.transfer.is_pending(page.index)
            if not lost or page.retried or page.next_layer or not self._health.may_retry():
                raise
            failed = error
        close_reader(page)
        page.retried, page.header = True, None
        if page.found is None or not isinstance(page.found.located, Resharded):
            found = self.confirm([page.name])[0]
            if not isinstance(found, Found):
                raise failed
            page.found = found
        return loader.load(page)

    def _read(self, page: Page) -> None:
        result, error = self._go_on(page, self._began(page))
        if isinstance(result, int) and self._has_more(page):
            self._submit_reads([page])  # behind the same layer of the other pages
        else:
            self._settle(page, result, error)

    def _has_more(self, page: Page) -> bool:
        return page.form is Form.LAYERS and page.next_layer < self._pages.loader.layers

    def _began(self, page: Page) -> Reading | None:
        """A page's turn to be read has come; None when it is too late for it."""
        parts = max(1, self._pages.loader.layers) if page.form is Form.LAYERS else 1
        self._waits_no_more(page)
        late = self.closed or page.transfer.left_s() <= 0
        return None if late else self._health.began(self._place(page), parts=parts)

    def _go_on(self, page: Page, reading: Reading | None) -> tuple[Result | None, CurvfsError | None]:
        """Read a page, or its next layer: see :meth:`_tried`."""
        came = page.arrived is not None
        result, error = self._tried(page, self._load)
        if reading is not None:
            self._health.ended(reading, None if came and result is Miss.DEADLINE else result)
        if not (isinstance(result, int) and self._has_more(page)):
            close_reader(page)
        return result, error
