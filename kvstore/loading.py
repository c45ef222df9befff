"""Objects into pages: read, verify, hand over; in I/O threads.

An object that does not hold is read again by another path. Damaged both times, it goes into quarantine.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import TypeVar

from curvfs.errors import BlockNotFound, CurvfsError, from_os_error
from curvfs.units import align_down, align_up
from curvfs.world import World
from kvstore.backends.base import Backend, ObjectReader
from kvstore.codecs import codec_named
from kvstore.engine.base import Engine, OpenFile
from kvstore.header import (
    ALIGNMENT_BYTES,
    MAX_HEADER_BYTES,
    BadObject,
    ObjectHeader,
    ObjectLayout,
    damaged_unit,
    damaged_unit_in,
    header_length,
    read_header,
    stored_tensors,
    units_of,
)
from kvstore.page import Form, Page
from kvstore.reshard import Resharded, Resharder, Source, copy_stretch
from kvstore.results import Miss, Refused, Result
from kvstore.slabs import Slab, SlabPool
from kvstore.stats import Counters
from kvstore.tiers.memory import Frame, Memory
from kvstore.views import PageView

T = TypeVar("T")

#: What one thread reads together at most. Of larger pages each keeps a thread busy.
_TOGETHER_BYTES = 2 << 20


class Loader:
    """Objects of one geometry in one backend."""

    def __init__(
        self,
        world: World,
        backend: Backend,
        engine: Engine,
        layout: ObjectLayout,
        counters: Counters,
        slabs: SlabPool,
        resharder: Resharder,
        memory: Memory,
    ) -> None:
        self.memory = memory
        self._backend = backend
        self._engine = engine
        self._layout = layout
        self._counters = counters
        self._slabs = slabs
        #: A pool of their own: views that are kept must not keep others from reading and writing.
        self._views = SlabPool(world, count=engine.depth, size_bytes=slabs.size_bytes)
        #: Where pages of other shards are put together.
        self._wholes = SlabPool(world, count=slabs.count, size_bytes=layout.data_bytes)
        self._resharder = resharder
        self._page_bytes = layout.geometry.size_bytes
        #: How many small pages one thread reads together: at most half, so that others verify some meanwhile.
        self.together = 1
        if backend.near:
            self.together = max(1, min(engine.together, slabs.count // 2, _TOGETHER_BYTES // layout.object_bytes))
        #: How many threads are enough for that.
        self.at_once = -(-slabs.count // self.together)
        self._ranges = _layer_ranges(layout)

    @property
    def views_out(self) -> int:
        return self._views.in_use

    def close(self) -> None:
        """Let go of the free buffers."""
        self._views.close()
        self._wholes.close()

    @staticmethod
    def slab(page: Page, pool: SlabPool) -> Slab:
        """A buffer, in the page's time. Raises Refused."""
        slab = pool.acquire(max(0.0, page.transfer.left_s()))
        if slab is None:
            raise Refused(Miss.DEADLINE, f"No buffer came free for {page.name} in time.")
        return slab

    # ------------------------------------------------------------------------------------------------------ together

    def fetch(self, pages: Sequence[Page]) -> int:
        """Read the objects of the first pages together, as many as there are buffers for, for :meth:`load` to go on
        with; how many pages that are (at least 1). What is not read this way is left to :meth:`load`. :meth:`let_go`
        must follow. Raises CurvfsError, OSError."""
        slabs = self._slabs.acquire_some(len(pages), max(0.0, pages[0].transfer.left_s()))
        reads: list[tuple[OpenFile, Sequence[memoryview]]] = []
        mine: list[tuple[Page, ObjectReader]] = []
        for page, slab in zip(pages, slabs, strict=False):
            page.slab = slab
            reader = page.reader
            file = None if reader is None else reader.file
            if reader is not None and file is not None and page.transfer.left_s() > 0:
                reads.append((file, self._targets(page, reader, slab)))
                mine.append((page, reader))
        for (page, reader), count in zip(mine, self._engine.read_many(reads), strict=True):
            page.arrived = count
            reader.well = isinstance(count, int)
        return max(1, len(slabs))

    def _targets(self, page: Page, reader: ObjectReader, slab: Slab) -> Sequence[memoryview]:
        """Where the whole object goes."""
        if page.form is Form.LOAN:
            straight = self._straight(page, reader, slab)
            if straight is not None:
                page.lent = page.transfer.lend(page.index)
                if page.lent:
                    return straight
        return [_room(reader, slab)]

    def let_go(self, pages: Sequence[Page]) -> None:
        """Done with what :meth:`fetch` took for these pages, also where nothing was loaded."""
        slabs = [page.slab for page in pages if page.slab is not None]
        for page in pages:
            page.slab = page.arrived = None
            if page.lent:
                page.lent = False
                page.transfer.give_back()
        if slabs:
            self._slabs.release(*slabs)

    # ------------------------------------------------------------------------------------------------ forms of a get

    def load(self, page: Page) -> Result | None:
        """One step of a page: its bytes when it is there, None when it was given up meanwhile. With layers there is
        more to do while ``page.next_layer`` is less than :attr:`layers`."""
        if page.found is not None and isinstance(page.found.located, Resharded):
            return self._load_resharded(page, page.found.located)
        if page.form is Form.LAYERS:
            return self._load_layer(page)
        if page.form is Form.VIEW:
            return self._load_view(page)
        return self._load_lent(page) if page.form is Form.LOAN else self._load_copied(page)

    @property
    def layers(self) -> int:
        return len(self._ranges)

    def _load_copied(self, page: Page) -> Result | None:
        slab = page.slab or self.slab(page, self._slabs)
        try:
            start = self._judged(page, lambda reader: self._read_whole(page, reader, slab))
            if not claimed(page):
                return None
            page.plan.unpack(slab, start)
            self._promote(page, slab, start)
        finally:
            self._done(page, slab)
        return self._page_bytes

    def _done(self, page: Page, slab: Slab) -> None:
        if slab is not page.slab:
            self._slabs.release(slab)

    def _promote(self, page: Page, slab: Slab, start: int) -> None:
        """A verified page goes to host memory."""
        frame = self.memory.fill(page.key, page.name, slab, start)
        if frame is not None:
            self.memory.admit(frame)

    def load_from_memory(self, page: Page, frame: Frame) -> Result | None:
        """A pinned page of the host's memory; None when it was given up meanwhile."""
        if page.form is Form.VIEW:
            if not page.transfer.claim(page.index):
                self.memory.unpin(frame)
                return None
            page.transfer.views[page.index] = PageView(
                self.memory.slab, frame.start, self._layout, lambda _: self.memory.unpin(frame)
            )
            return self._page_bytes
        try:
            if not claimed(page):
                return None
            page.plan.unpack(self.memory.slab, frame.start)
            page.next_layer = self.layers
        finally:
            self.memory.unpin(frame)
        return self._page_bytes

    def _load_view(self, page: Page) -> Result | None:
        slab = self._views.acquire(0.0)
        if slab is None:  # waiting would keep a thread from others' pages
            raise Refused(Miss.BUSY, f"No view is free for {page.name}; release some.")
        try:
            start = self._judged(page, lambda reader: self._read_whole(page, reader, slab))
            if not page.transfer.claim(page.index):
                self._views.release(slab)
                return None
            self._promote(page, slab, start)
        except BaseException:
            self._views.release(slab)
            raise
        page.transfer.views[page.index] = PageView(slab, start, self._layout, self._views.release)
        return self._page_bytes

    def _load_lent(self, page: Page) -> Result | None:
        slab = page.slab or self.slab(page, self._slabs)
        try:
            if not page.lent and not page.transfer.lend(page.index):
                return None
            page.lent = False
            try:
                start = self._judged(
                    page,
                    lambda reader: self._read_straight(page, reader, slab),
                    lambda reader: self._read_whole(page, reader, slab),
                )
                if start is not None:
                    if not page.plan.wait_ready(page.transfer.left_s):
                        raise Refused(Miss.DEADLINE, f"The device was not done with the memory of {page.name} in time.")
                    page.plan.unpack(slab, start)
            finally:
                page.transfer.give_back()
        finally:
            self._done(page, slab)
        return self._page_bytes

    def _load_layer(self, page: Page) -> Result | None:
        if page.reader is None:
            page.reader = self._backend.open(page.name, page.found)
        if page.reader.length_bytes <= self._layout.data_bytes:  # compressed: its layers come all at once
            result = self._load_copied(page)
            page.next_layer = len(self._ranges)
            return result
        low, high = self._ranges[page.next_layer]
        slab = self.slab(page, self._slabs)
        try:
            start = self._judged(page, lambda reader: self._read_range(page, reader, slab, low, high))
            if not claimed(page):
                return None
            page.plan.unpack_range(slab, start, low, high)
            page.next_layer += 1
            if page.next_layer < len(self._ranges):
                page.transfer.deliver(page.index)
        finally:
            self._slabs.release(slab)
        return self._page_bytes

    def _load_resharded(self, page: Page, located: Resharded) -> Result | None:
        """Put a page together from objects of other shards, in a buffer of ours: one that may become a view."""
        whole = self._views.acquire(0.0) if page.form is Form.VIEW else self.slab(page, self._wholes)
        if whole is None:
            raise Refused(Miss.BUSY, f"No view is free for {page.name}; release some.")
        release = self._views.release if page.form is Form.VIEW else self._wholes.release
        kept = False
        try:
            for source in located.sources:
                self._gather(page, source, whole)
            if not claimed(page):
                return None
            if page.form is Form.VIEW:
                page.transfer.views[page.index] = PageView(whole, 0, self._layout, release)
                kept = True
            else:
                page.plan.unpack(whole, 0)
                page.next_layer = self.layers
            self._promote(page, whole, 0)
        finally:
            if not kept:
                release(whole)
        self._counters.put_together()
        return self._page_bytes

    def _gather(self, page: Page, source: Source, whole: Slab) -> None:
        """Copy our heads of one object of another shard to their places."""
        stretches = self._resharder.stretches(source.shard)
        layout = self._resharder.layout_of(source.shard)
        part = dataclasses.replace(page, name=source.name, found=source.found, reader=None)
        slab = self.slab(page, self._slabs)

        def read(reader: ObjectReader) -> None:
            header = fetch_header(reader, slab)
            check_object(part, header, layout)
            for stretch in stretches:
                start = read_units(reader, header, slab, stretch.low, stretch.high)
                copy_stretch(stretch, slab.address + start, whole.address)

        try:
            self._judged(part, read)
        finally:
            self._slabs.release(slab)
            close_reader(part)

    def inspect(self, page: Page) -> None:
        """Judge what has a page's name, whatever it is. Raises BadObject when it was no sound object, and is gone."""
        slab = self.slab(page, self._slabs)
        try:
            self._judged(page, lambda reader: read_header(*self._fill(page, reader, slab)))
        finally:
            self._slabs.release(slab)
            close_reader(page)

    # ----------------------------------------------------------------------------------------------------- two reads

    def _judged(
        self, page: Page, read: Callable[[ObjectReader], T], otherwise: Callable[[ObjectReader], T] | None = None
    ) -> T:
        """What ``read`` makes of the page's object, or ``otherwise`` when it is read by another path."""
        if page.reader is None:
            page.reader = self._backend.open(page.name, page.found)
        identity = page.reader.identity
        try:
            return read(page.reader)
        except (BadObject, BlockNotFound) as error:
            damaged: CurvfsError = error
        with self._backend.open_otherwise(page.name) as reader:
            same = reader.identity == identity
            try:
                result = (otherwise or read)(reader)
            except (BadObject, BlockNotFound) as error:
                damaged = error
            else:
                self._counters.read_again(quarantined=False)
                return result
        if same and self._backend.quarantine(page.name, identity):
            self._counters.read_again(quarantined=True)
        raise BadObject(f"{page.name} is damaged: {damaged}.") from damaged

    # -------------------------------------------------------------------------------------------------------- reading

    @staticmethod
    def _fill(page: Page, reader: ObjectReader, slab: Slab) -> tuple[memoryview, int]:
        """As much of an object as a slab takes, and the object's length."""
        view = _room(reader, slab)
        return view[: _arrived(page, lambda: reader.read(view))], reader.length_bytes

    def _read_whole(self, page: Page, reader: ObjectReader, slab: Slab) -> int:
        """Where the data begin in a slab that an object was read into, once everything about it holds."""
        view, length = self._fill(page, reader, slab)
        header = read_header(view, length)
        check_object(page, header, self._layout, coded=True)
        if len(view) < length:
            raise BadObject(f"only {len(view)} of its {length} bytes could be read")
        _refuse_unit(damaged_unit(header, view))
        return header.header_bytes if header.metadata.get("codec") == "none" else self._decode(page, header, slab)

    def _decode(self, page: Page, header: ObjectHeader, slab: Slab) -> int:
        """Unpack a compressed object in its slab; where the data begin now."""
        try:
            codec = codec_named(header.metadata.get("codec", ""))
        except CurvfsError as error:
            raise Refused(Miss.MISMATCH, f"{page.name} is compressed. {error}") from error
        tensors = stored_tensors(header)
        if codec is None or len(tensors) != 1:
            raise BadObject("its compressed data are not one piece")
        at, start = header.header_bytes, self._layout.header_bytes
        packed = bytes(slab.view[at : at + tensors[0].size_bytes])
        slab.view[start : start + self._layout.data_bytes] = codec.decode(packed, self._layout.data_bytes)
        return start

    def _read_straight(self, page: Page, reader: ObjectReader, slab: Slab) -> int | None:
        """Read the data into the caller's memory and the header into a slab: None when all holds. Where the data begin
        in the slab when the caller's memory cannot be read into."""
        views = self._straight(page, reader, slab)
        if views is None:
            self._counters.copied_loan()
            return self._read_whole(page, reader, slab)
        count = _arrived(page, lambda: reader.readv(views, 0))
        header_bytes, pieces = len(views[0]), views[1:]
        header = read_header(slab.view[: min(count, header_bytes)], reader.length_bytes)
        check_object(page, header, self._layout)
        if header.header_bytes != header_bytes or count < reader.length_bytes:
            raise BadObject(f"only {count} of its {reader.length_bytes} bytes could be read")
        _refuse_unit(damaged_unit_in(header, pieces))
        return None

    def _straight(self, page: Page, reader: ObjectReader, slab: Slab) -> list[memoryview] | None:
        """Where the header and the data go when those are read straight into the caller's memory; None where that
        cannot be read into."""
        header_bytes = reader.length_bytes - self._layout.data_bytes
        if not ALIGNMENT_BYTES <= header_bytes <= MAX_HEADER_BYTES or header_bytes % ALIGNMENT_BYTES:
            return None
        pieces = page.plan.pieces(self._layout.data_bytes, reader.alignment_bytes)
        return None if pieces is None else [slab.view[:header_bytes], *pieces]

    def _read_range(self, page: Page, reader: ObjectReader, slab: Slab, low: int, high: int) -> int:
        """Read the data from ``low`` to ``high``; where they begin in the slab."""
        if page.header is None:
            header = fetch_header(reader, slab)
            check_object(page, header, self._layout)
            page.header = header
        return read_units(reader, page.header, slab, low, high)


def _arrived(page: Page, read: Callable[[], int]) -> int:
    """The bytes of a page's object that were read together with others', else those that ``read`` reads: another try
    does. Raises CurvfsError."""
    count, page.arrived = page.arrived, None
    if isinstance(count, OSError):
        raise from_os_error(count, doing=f"Reading {page.name}") from count
    return read() if count is None else count


def _room(reader: ObjectReader, slab: Slab) -> memoryview:
    """Where an object goes in a slab, as far as it fits in."""
    return slab.view[: align_up(min(reader.length_bytes, slab.size_bytes), ALIGNMENT_BYTES)]


def fetch_header(reader: ObjectReader, slab: Slab) -> ObjectHeader:
    """The verified header of an object, read through a slab. Raises BadObject, NewerFormat."""
    first = slab.view[:ALIGNMENT_BYTES]
    count = reader.read(first)
    length = header_length(first[:count], reader.length_bytes)
    if length > slab.size_bytes:
        raise Refused(Miss.MISMATCH, f"An object has a header of {length} bytes, too long for this store.")
    if length > ALIGNMENT_BYTES:
        count += reader.read(slab.view[ALIGNMENT_BYTES:length], ALIGNMENT_BYTES)
    return read_header(slab.view[: min(count, length)], reader.length_bytes)


def read_units(reader: ObjectReader, header: ObjectHeader, slab: Slab, low: int, high: int) -> int:
    """Read and verify the units that cover the data from ``low`` to ``high``; where ``low`` lies in the slab."""
    first, count, begin, end = units_of(header, low, high)
    at = align_down(header.header_bytes + begin, ALIGNMENT_BYTES)
    skipped = header.header_bytes + begin - at
    wanted = skipped + end - begin
    if wanted > slab.size_bytes:
        raise Refused(Miss.MISMATCH, "An object has units too large for this store.")
    got = reader.read(slab.view[: align_up(wanted, ALIGNMENT_BYTES)], at)
    if got < wanted:
        raise BadObject(f"only {got} of {wanted} bytes at {at} could be read")
    _refuse_unit(damaged_unit_in(header, [slab.view[skipped:wanted]], first, count))
    return skipped + low - begin


def check_key(page: Page, header: ObjectHeader) -> None:
    """Is it an object of the page's identity, key and tokens? Raises Refused."""
    key, found = page.key, header.metadata
    if found.get("identity") != key.fingerprint.hex() or found.get("key") != key.hex:
        raise Refused(Miss.FOREIGN, f"{page.name} says that it is of another identity or key.")
    digests = (key.token_digest.hex(), key.extra_digest.hex())
    if key.token_digest and digests != (found.get("token_digest"), found.get("extra_digest")):
        raise Refused(Miss.COLLISION, f"{page.name} was made from other tokens.")


def check_object(page: Page, header: ObjectHeader, layout: ObjectLayout, *, coded: bool = False) -> None:
    """Is it the object that was asked for? ``coded``: it may be compressed. Raises Refused."""
    check_key(page, header)
    shard, found = layout.geometry.shard.label, header.metadata.get("shard")
    if found != shard:
        raise Refused(Miss.MISMATCH, f"{page.name} is shard {found!r}; shard {shard!r} was looked for.")
    plain = header.metadata.get("codec") == "none"
    if not plain and not coded:
        raise Refused(Miss.MISMATCH, f"{page.name} is compressed, and can only be read as a whole by its own shard.")
    if (header.table if plain else header.metadata.get("tensors", "").encode()) != layout.table:
        difference = _difference(layout, header) if plain else "holds other tensors"
        raise Refused(Miss.MISMATCH, f"{page.name} {difference}.")


def claimed(page: Page) -> bool:
    """May the caller's memory be touched, now that its device is done with it? Then the page must be settled."""
    page.plan.wait_ready(page.transfer.left_s)  # not in time: the claim tells
    return page.transfer.claim(page.index)


def close_reader(page: Page) -> None:
    """Done with a page's object."""
    reader, page.reader = page.reader, None
    if reader is not None:
        reader.close()


def _refuse_unit(damaged: int | None) -> None:
    if damaged is not None:
        raise BadObject(f"the checksum of unit {damaged} does not match")


def _layer_ranges(layout: ObjectLayout) -> list[tuple[int, int]]:
    """Where the data of each layer begin and end."""
    starts = [offset for _, offset in layout.tensors] + [layout.data_bytes]
    return [(starts[first], starts[end]) for first, end in layout.geometry.layers]


def _difference(layout: ObjectLayout, header: ObjectHeader) -> str:
    there = {tensor.name: tensor for tensor in stored_tensors(header)}
    for spec in layout.geometry.tensors:
        tensor = there.get(spec.name)
        if tensor is None:
            return f"has no tensor {spec.name}"
        if (tensor.dtype, tensor.shape) != (spec.dtype.name, spec.shape):
            return (
                f"holds {spec.name} as {tensor.dtype} of shape {tensor.shape}, not {spec.dtype.name} of shape"
                f" {spec.shape}"
            )
    return "has other tensors, or the same in another order"
