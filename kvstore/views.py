"""A page lent by the store: verified bytes in one of its own buffers, for readers that copy or upload them."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from curvfs.errors import UsageError
from kvstore.header import ObjectLayout
from kvstore.slabs import Slab


class PageView:
    """Tensors of one page, read-only, until :meth:`release`. A context manager.

    As many can be out as the store is deep; what more is asked for is ``Miss.BUSY``.
    """

    def __init__(self, slab: Slab, start: int, layout: ObjectLayout, release: Callable[[Slab], None]) -> None:
        self._slab: Slab | None = slab
        self._release = release
        self._places = {spec.name: (spec, start + offset) for spec, offset in layout.tensors}

    def names(self) -> list[str]:
        return list(self._places)

    def __getitem__(self, name: str) -> memoryview:
        """The bytes of one tensor, read-only. Not to be used after :meth:`release`."""
        if self._slab is None:
            raise UsageError("The view was released; copy what you need before.")
        spec, at = self._places[name]
        return self._slab.view[at : at + spec.size_bytes].toreadonly()

    def tensor(self, name: str) -> Any:
        """The same as a torch tensor of its dtype and shape. Not to be written to, nor used after :meth:`release`."""
        torch = sys.modules.get("torch")
        if torch is None:
            raise UsageError("torch is not imported here; import it, or take the bytes by view[name].")
        if self._slab is None:
            raise UsageError("The view was released; copy what you need before.")
        spec, at = self._places[name]
        if spec.size_bytes == 0:
            return torch.empty(spec.shape, dtype=getattr(torch, spec.dtype.name))
        flat = torch.frombuffer(self._slab.view, dtype=torch.uint8, count=spec.size_bytes, offset=at)
        return flat.view(getattr(torch, spec.dtype.name)).view(spec.shape)

    def release(self) -> None:
        """Give the buffer back; idempotent."""
        slab, self._slab = self._slab, None
        if slab is not None:
            self._release(slab)

    def __enter__(self) -> PageView:
        return self

    def __exit__(self, *exc: object) -> None:
        self.release()
