"""Memory that holds bytes."""

from __future__ import annotations

#: Anything that holds contiguous bytes.
Buffer = bytes | bytearray | memoryview


def bytes_of(buffer: Buffer) -> memoryview:
    """The same memory seen as single bytes, whatever the buffer's items are; no copy."""
    view = memoryview(buffer)
    return view.cast("B") if view.nbytes else memoryview(bytearray())
