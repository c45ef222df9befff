"""One page between the caller's memory and its object: pack, seal, publish; read, verify, unpack; in I/O threads."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from curvfs.errors import CurvfsError
from curvfs.units import align_up
from curvfs.world import World
from kvstore.backends.base import Backend, Found, ObjectReader, ObjectWriter
from kvstore.header import (
    ALIGNMENT_BYTES,
    MAX_HEADER_BYTES,
    BadObject,
    ObjectHeader,
    ObjectLayout,
    damaged_unit,
    read_header,
    stored_tensors,
)
from kvstore.keys import PageKey
from kvstore.results import Miss, Refused, Result, miss_of
from kvstore.segments import PagePlan
from kvstore.slabs import Slab, SlabPool
from kvstore.stats import Counters
from kvstore.transfer import Transfer

#: Room in a slab for headers longer than our own: of writers that cut their units smaller.
_HEADER_SLACK_BYTES = 64 * 1024


@dataclass(slots=True)
class Page:
    """One page of a transfer on its way: ``index`` is its place there, ``name`` that of its object."""

    transfer: Transfer
    index: int
    key: PageKey
    name: str
    plan: PagePlan
    storing: bool
    found: Found | None = None
    #: Opened or staged together with others; closed by whoever takes it.
    reader: ObjectReader | None = None
    writer: ObjectWriter | None = None
    settled: bool = False


class PageIO:
    """Objects of one geometry in one backend."""

    def __init__(
        self, world: World, backend: Backend, layout: ObjectLayout, counters: Counters, *, depth: int, writer: str
    ) -> None:
        self._clock = world.clock
        self._backend = backend
        self._layout = layout
        self._counters = counters
        self._writer = writer
        self._yielding = world.threads.lock()
        self._yields = 0
        self.page_bytes = layout.geometry.size_bytes
        self.slabs = SlabPool(world, count=depth, size_bytes=layout.object_bytes + _HEADER_SLACK_BYTES)

    def plausible(self, found: Found | CurvfsError | None) -> bool:
        """A file of a length that an object of ours can have; the rest shows when it is read."""
        if not isinstance(found, Found):
            return False
        header_bytes = found.length_bytes - self._layout.data_bytes
        return ALIGNMENT_BYTES <= header_bytes <= MAX_HEADER_BYTES and header_bytes % ALIGNMENT_BYTES == 0

    def _slab(self, page: Page) -> Slab:
        slab = self.slabs.acquire(max(0.0, page.transfer.left_s()))
        if slab is None:
            raise Refused(Miss.DEADLINE, f"No buffer came free for {page.name} in time.")
        return slab

    # ------------------------------------------------------------------------------------------------------ storing

    def create(self, pages: Sequence[Page]) -> None:
        """Stage objects together; what fails is tried again by :meth:`write`, which tells why."""
        made = self._backend.create_many([page.name for page in pages], self._layout.object_bytes)
        for page, writer in zip(pages, made, strict=True):
            if isinstance(writer, ObjectWriter):
                page.writer = writer

    def write(self, page: Page) -> Result | None:
        """Write a page's object to its staging place; its payload bytes. None: given up meanwhile.

        When there is no room, the trash yields, the oldest of it first.
        """
        layout = self._layout
        slab = self._slab(page)
        try:
            if not page.transfer.claim(page.index):
                return None
            try:
                page.plan.pack(slab, layout.header_bytes)
                page.plan.drop()
            finally:
                page.transfer.detach(page.index)
            view = slab.view[: layout.object_bytes]
            layout.seal(view, page.key, writer=self._writer, created_ms=self._clock.time_ms())
            while not self._written(page, view):
                pass
            return self.page_bytes
        finally:
            self.slabs.release(slab)

    def _written(self, page: Page, view: memoryview) -> bool:
        """Write to the page's staging place, a new one if it has none. False: try again, room was made."""
        writer, page.writer = page.writer, None
        yields = self._yields
        try:
            if writer is None:
                writer = self._backend.create(page.name, self._layout.object_bytes)
            writer.write(view)
        except BaseException as error:
            if writer is not None:
                writer.abort()
            if isinstance(error, CurvfsError) and miss_of(error) is Miss.NO_SPACE and self._yielded(yields):
                return False
            raise
        page.writer = writer
        return True

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
        slab = self._slab(page)
        try:
            self._judged(page, slab, read_header)
        except BadObject:
            return True
        finally:
            self.slabs.release(slab)
        return False

    # ------------------------------------------------------------------------------------------------------ loading

    def open(self, pages: Sequence[Page]) -> None:
        """Open objects together; what fails is tried again by :meth:`load`, which tells why."""
        opened = self._backend.open_many([(page.name, page.found) for page in pages])
        for page, reader in zip(pages, opened, strict=True):
            if isinstance(reader, ObjectReader):
                page.reader = reader

    def load(self, page: Page) -> Result | None:
        """Read, verify and copy out a page. None: given up meanwhile, and nothing was copied."""
        slab = self._slab(page)
        try:
            header = self._judged(page, slab, lambda view, length: self._verified(page, view, length))
            if not page.transfer.claim(page.index):
                return None
            page.plan.unpack(slab, header.header_bytes)
        finally:
            self.slabs.release(slab)
        return self.page_bytes

    def _judged(self, page: Page, slab: Slab, verify: Callable[[memoryview, int], ObjectHeader]) -> ObjectHeader:
        """The header of the page's object, read into a slab and verified.

        An object that does not hold is read again by another path. Damaged both times, it goes into quarantine.
        """
        reader, page.reader = page.reader, None
        if reader is None:
            reader = self._backend.open(page.name, page.found)
        with reader:
            identity = reader.identity
            try:
                return self._read(reader, slab, verify)
            except BadObject as error:
                damaged = error
        with self._backend.open_otherwise(page.name) as reader:
            same = reader.identity == identity
            try:
                header = self._read(reader, slab, verify)
            except BadObject as error:
                damaged = error
            else:
                self._counters.read_again(quarantined=False)
                return header
        if same and self._backend.quarantine(page.name, identity):
            self._counters.read_again(quarantined=True)
        raise BadObject(f"{page.name} is damaged: {damaged}.") from damaged

    def _read(
        self, reader: ObjectReader, slab: Slab, verify: Callable[[memoryview, int], ObjectHeader]
    ) -> ObjectHeader:
        length = reader.length_bytes
        view = slab.view[: align_up(min(length, self.slabs.size_bytes), ALIGNMENT_BYTES)]
        return verify(view[: reader.read(view)], length)

    def _verified(self, page: Page, view: memoryview, length: int) -> ObjectHeader:
        """The header of the object in ``view``, once everything about it holds."""
        header = read_header(view, length)
        self._check(page, header)
        if len(view) < length:
            raise BadObject(f"only {len(view)} of its {length} bytes could be read")
        damaged = damaged_unit(header, view)
        if damaged is not None:
            raise BadObject(f"the checksum of unit {damaged} does not match")
        return header

    def _check(self, page: Page, header: ObjectHeader) -> None:
        """Is it the object that was asked for?"""
        key, found, shard = page.key, header.metadata, self._layout.geometry.shard.label
        if found.get("identity") != key.fingerprint.hex() or found.get("key") != key.hex:
            raise Refused(Miss.FOREIGN, f"{page.name} says that it is of another identity or key.")
        if found.get("shard") != shard or found.get("codec") != "none":
            raise Refused(
                Miss.MISMATCH,
                f"{page.name} is shard {found.get('shard')!r} with codec {found.get('codec')!r}; this store reads shard"
                f" {shard!r} without a codec.",
            )
        digests = (key.token_digest.hex(), key.extra_digest.hex())
        if key.token_digest and digests != (found.get("token_digest"), found.get("extra_digest")):
            raise Refused(Miss.COLLISION, f"{page.name} was made from other tokens.")
        if header.table != self._layout.table:
            raise Refused(Miss.MISMATCH, f"{page.name} {self._difference(header)}.")

    def _difference(self, header: ObjectHeader) -> str:
        there = {tensor.name: tensor for tensor in stored_tensors(header)}
        for spec in self._layout.geometry.tensors:
            tensor = there.get(spec.name)
            if tensor is None:
                return f"has no tensor {spec.name}"
            if (tensor.dtype, tensor.shape) != (spec.dtype.name, spec.shape):
                return (
                    f"holds {spec.name} as {tensor.dtype} of shape {tensor.shape}, not {spec.dtype.name} of shape"
                    f" {spec.shape}"
                )
        return "has other tensors, or the same in another order"
