"""One page between the caller's memory and its object: pack, seal, publish; read, verify, unpack; in I/O threads."""

from __future__ import annotations

from dataclasses import dataclass

from curvfs.errors import CurvfsError
from curvfs.world import World
from kvstore.backends.base import Backend, Found
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
from kvstore.results import Miss, Refused, Result
from kvstore.segments import PagePlan
from kvstore.slabs import Slab, SlabPool
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


class PageIO:
    """Objects of one geometry in one backend."""

    def __init__(self, world: World, backend: Backend, layout: ObjectLayout, *, depth: int, writer: str) -> None:
        self._clock = world.clock
        self._backend = backend
        self._layout = layout
        self._writer = writer
        self._page_bytes = layout.geometry.size_bytes
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

    def store(self, page: Page) -> Result | None:
        """Write a page's object; its payload bytes, also when somebody else was first. None: given up meanwhile."""
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
            writer = self._backend.create(page.name, layout.object_bytes)
            try:
                writer.write(view)
                published = writer.publish()
            except BaseException:
                writer.abort()
                raise
        finally:
            self.slabs.release(slab)
        if not published:
            self.taken(page, self._backend.confirm([page.name])[0])
        return self._page_bytes

    def taken(self, page: Page, found: Found | CurvfsError | None) -> bool:
        """Is the page's name taken by an object of its kind? Raises Refused when something else has it."""
        if isinstance(found, Found) and not self.plausible(found):
            raise Refused(Miss.DAMAGED, f"{page.name} is taken by something that is no such object; remove it.")
        return isinstance(found, Found)

    def load(self, page: Page) -> Result | None:
        """Read, verify and copy out a page. None: given up meanwhile, and nothing was copied."""
        slab = self._slab(page)
        try:
            with self._backend.open(page.name, page.found) as reader:
                length = reader.length_bytes
                view = slab.view[: min(length, self.slabs.size_bytes)]
                count = reader.read(view)
            header = self._verified(page, view[:count], length)
            if not page.transfer.claim(page.index):
                return None
            page.plan.unpack(slab, header.header_bytes)
        finally:
            self.slabs.release(slab)
        return self._page_bytes

    def _verified(self, page: Page, view: memoryview, length: int) -> ObjectHeader:
        """The header of the object in ``view``, once everything about it holds."""
        try:
            header = read_header(view, length)
            self._check(page, header)
            if len(view) < length:
                raise BadObject(f"only {len(view)} of its {length} bytes could be read")
            damaged = damaged_unit(header, view)
            if damaged is not None:
                raise BadObject(f"the checksum of unit {damaged} does not match")
        except BadObject as error:
            raise BadObject(f"{page.name} is damaged: {error}.") from error
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
