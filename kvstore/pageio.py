"""Pages into objects: pack, seal, write, publish; in I/O threads. What the other way takes is in kvstore.loading."""

from __future__ import annotations

from collections.abc import Sequence

from curvfs.errors import ConfigError, CurvfsError
from curvfs.units import align_up, format_size
from curvfs.world import World
from kvstore.backends.base import Backend, Found, ObjectWriter
from kvstore.codecs import Zstd
from kvstore.engine.base import Engine
from kvstore.engine.threads import SPARE
from kvstore.geometry import MAX_UNIT_BYTES
from kvstore.header import ALIGNMENT_BYTES, MAX_HEADER_BYTES, BadObject, ObjectLayout
from kvstore.health.writers import Writers
from kvstore.loading import Loader, claimed
from kvstore.page import Page
from kvstore.reshard import Resharder
from kvstore.results import WORKER_FAILURES, Miss, Refused, Result, miss_of
from kvstore.slabs import Slab, SlabPool
from kvstore.stats import Counters
from kvstore.tiers.memory import Memory

#: Room in a slab for headers longer than our own: of writers that cut their units smaller.
_HEADER_SLACK_BYTES = 64 * 1024


class PageIO:
    """Objects of one geometry in one backend."""

    def __init__(
        self,
        world: World,
        backend: Backend,
        engine: Engine,
        layout: ObjectLayout,
        counters: Counters,
        resharder: Resharder,
        *,
        writer: str,
        codec: Zstd | None,
        memory: Memory,
        writers: Writers,
    ) -> None:
        self._world = world
        self._writers = writers
        self._clock = world.clock
        self._backend = backend
        self._layout = layout
        self._writer = writer
        self._codec = codec
        self._yielding = world.threads.lock()
        self._yields = 0
        self.page_bytes = layout.geometry.size_bytes
        self.object_bytes = layout.object_bytes
        # What is read of other shards' objects ends at their units' ends.
        slack_bytes = _HEADER_SLACK_BYTES + (2 * MAX_UNIT_BYTES if resharder.splits else 0)
        self.slabs = SlabPool(world, count=engine.depth, size_bytes=layout.object_bytes + slack_bytes, shared=True)
        #: Buffers for what is put, so that no read waits for a write.
        spare = SPARE if writers.choosing else 0
        self.outgoing = SlabPool(world, count=self.slabs.count + spare, size_bytes=self.slabs.size_bytes)
        writers.at_once = min(writers.at_once, self.slabs.count)
        self.loader = Loader(world, backend, engine, layout, counters, self.slabs, resharder, memory)

    @property
    def slabs_in_use(self) -> int:
        return self.slabs.in_use + self.outgoing.in_use

    def close(self) -> None:
        """Let go of the free buffers."""
        self.slabs.close()
        self.outgoing.close()
        self.loader.close()

    def slabs_for(self, size_bytes: int) -> SlabPool:
        """So many bytes of buffers for pages that are put later. Raises ConfigError when that is not one."""
        count = size_bytes // self.slabs.size_bytes
        if not count:
            raise ConfigError(
                f"{format_size(size_bytes)} of write-behind hold no page, which takes"
                f" {format_size(self.slabs.size_bytes)} there; give more, or 0."
            )
        return SlabPool(self._world, count=count, size_bytes=self.slabs.size_bytes)

    def plausible(self, found: Found | CurvfsError | None) -> bool:
        """A file of a length that an object of ours can have; the rest shows when it is read."""
        if not isinstance(found, Found):
            return False
        header_bytes = found.length_bytes - self._layout.data_bytes
        if (
            found.length_bytes % ALIGNMENT_BYTES == 0
            and found.length_bytes >= 2 * ALIGNMENT_BYTES
            and header_bytes <= 0
        ):
            return True  # a compressed one
        return ALIGNMENT_BYTES <= header_bytes <= MAX_HEADER_BYTES and header_bytes % ALIGNMENT_BYTES == 0

    def create(self, pages: Sequence[Page]) -> None:
        """Stage objects together; what fails is tried again by :meth:`write`, which tells why."""
        if self._codec is not None:  # how long they get shows later
            return
        made = self._backend.create_many([page.name for page in pages], self._layout.object_bytes)
        for page, writer in zip(pages, made, strict=True):
            if isinstance(writer, ObjectWriter):
                page.writer = writer

    def write(self, page: Page) -> Result | None:
        """Write a page's object to its staging place; its payload bytes. None: given up meanwhile.

        When there is no room, the trash yields, the oldest of it first.
        """
        if page.packed is not None:
            return self._write(page, page.packed)
        slab = self.loader.slab(page, self.outgoing)
        try:
            if not claimed(page):
                return None
            try:
                page.plan.pack(slab, self._layout.header_bytes)
                page.plan.drop()
            finally:
                page.transfer.detach(page.index)
            return self._write(page, slab)
        finally:
            self.outgoing.release(slab)

    def _write(self, page: Page, slab: Slab) -> Result:
        """The same from a buffer with the payload in its place."""
        page.frame = self.loader.memory.fill(page.key, page.name, slab, self._layout.header_bytes)
        view = slab.view[: self._seal(page, slab)]
        page.object_bytes = len(view)
        while not self._written(page, view):
            pass
        return self.page_bytes

    def _seal(self, page: Page, slab: Slab) -> int:
        """Turn a packed slab into an object, compressed where that makes it shorter than its data are; its length."""
        layout, created_ms = self._layout, self._clock.time_ms()
        view = slab.view[: layout.object_bytes]
        if self._codec is not None:
            layout.clear_pads(view)
            packed = self._codec.encode(view[layout.header_bytes :])
            if layout.coded_header_bytes + align_up(len(packed), ALIGNMENT_BYTES) <= layout.data_bytes:
                return layout.seal_coded(
                    slab.view, packed, self._codec.name, page.key, writer=self._writer, created_ms=created_ms
                )
        layout.seal(view, page.key, writer=self._writer, created_ms=created_ms)
        return layout.object_bytes

    def _written(self, page: Page, view: memoryview) -> bool:
        """Write to the page's staging place, a new one if it has none. False: try again, because room was made, or
        because it failed on workers that are left alone from now on."""
        writer, page.writer = page.writer, None
        yields = self._yields
        try:
            if writer is None:
                writer = self._backend.create(page.name, len(view))
            self._write_to(writer, view)
        except BaseException as error:
            miss = miss_of(error) if isinstance(error, CurvfsError) else None
            lost = miss in WORKER_FAILURES and self._writers.choosing and not page.retried
            if writer is not None:
                (writer.abandon if lost else writer.abort)()
            if miss is Miss.NO_SPACE and self._yielded(yields):
                return False
            if lost and page.transfer.left_s() > 0:
                page.retried = True
                return False
            raise
        page.writer = writer
        return True

    def _write_to(self, writer: ObjectWriter, view: memoryview) -> None:
        """Write, and let it be known how that went."""
        write = self._writers.began(writer.targets)
        failed = stored = False
        try:
            writer.write(view)
            stored = True
        except CurvfsError as error:
            failed = miss_of(error) in WORKER_FAILURES
            raise
        finally:
            self._writers.ended(write, failed=failed, stored=stored)

    def _yielded(self, before: int) -> bool:
        """Has the trash given room, to us now or to somebody else since it had yielded ``before`` times?"""
        with self._yielding:
            if self._yields == before:
                try:
                    self._yields += self._backend.empty_trash(early=True) > 0
                except CurvfsError:
                    pass
            return self._yields != before

    def publish(self, pages: Sequence[Page]) -> list[bool | CurvfsError]:
        """Give written objects their names; False where a name is taken."""
        return self._backend.publish_many([page.writer for page in pages if page.writer is not None])

    def taken(self, page: Page, found: Found | CurvfsError | None) -> bool:
        """Is the page's name taken by an object of its kind? What is damaged there is moved away. Raises Refused when
        something else has it."""
        if not isinstance(found, Found):
            return False
        if self.plausible(found):
            return True
        if found.length_bytes < 0:
            raise Refused(Miss.DAMAGED, f"{page.name} is taken by something that is no file; remove it.")
        if self._is_rubbish(page):
            return False
        raise Refused(Miss.MISMATCH, f"{page.name} is taken by an object of another geometry; remove it.")

    def _is_rubbish(self, page: Page) -> bool:
        """Whether what has the page's name, and not the length of an object of ours, is no sound object at all."""
        try:
            self.loader.inspect(page)
        except BadObject:
            return True
        return False
