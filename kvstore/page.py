"""One page of a transfer on its way through the I/O threads."""

from __future__ import annotations

import enum
from collections.abc import Callable
from dataclasses import dataclass

from kvstore.backends.base import Found, ObjectReader, ObjectWriter
from kvstore.header import ObjectHeader
from kvstore.keys import PageKey
from kvstore.segments import PagePlan
from kvstore.slabs import Slab
from kvstore.tiers.memory import Frame
from kvstore.transfer import Transfer


class Form(enum.Enum):
    """How a page gets from or to the caller."""

    PUT = "put"
    COPY = "copy"
    """Read into a buffer of ours, verified, then copied."""
    LOAN = "loan"
    """Read straight into the caller's memory."""
    VIEW = "view"
    """Read into a buffer of ours that the caller gets."""
    LAYERS = "layers"
    """Copied layer by layer."""


@dataclass(slots=True)
class Page:
    """``index`` is its place in the transfer, ``name`` that of its object."""

    transfer: Transfer
    index: int
    key: PageKey
    name: str
    plan: PagePlan
    form: Form
    found: Found | None = None
    #: Opened or staged, perhaps together with others; closed at the end of the job.
    reader: ObjectReader | None = None
    writer: ObjectWriter | None = None
    #: The place that it waits for, until its turn to be read.
    waiting: str | None = None
    #: With ``Form.LAYERS``: the verified header, and which layer comes next.
    header: ObjectHeader | None = None
    next_layer: int = 0
    settled: bool = False
    #: What is taken of the namespace's room for it, and how long its object turned out to be.
    reserved_bytes: int = 0
    #: Whether a second try was made of it, or counts for the health of puts.
    retried: bool = False
    #: Its place in host memory: where it lies, or where it was copied to while it is being stored.
    frame: Frame | None = None
    #: Put later than asked for: a buffer with the payload in its place, and what to call once that is done with.
    packed: Slab | None = None
    on_end: Callable[[], None] | None = None
    tried: bool = False
    #: It may have got its name: nobody told.
    doubtful: bool = False
    object_bytes: int = 0
    #: Read together with others: its buffer, how many bytes have arrived, and whether the caller's memory is on loan.
    slab: Slab | None = None
    arrived: int | OSError | None = None
    lent: bool = False

    @property
    def storing(self) -> bool:
        return self.form is Form.PUT
