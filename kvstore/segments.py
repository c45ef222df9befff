"""Callers' memory: torch tensors, numpy arrays, buffers and ``(address, nbytes)``, checked first and copied later.

Tensors of a page lie in host memory or on one device; those on a device are copied as kvstore.devices says.

A *segment list* is one page's pieces in memory. Either every piece is a tensor or array, one for each tensor of the
geometry, of its dtype and shape (strides are free); or every piece is plain bytes (a buffer, a flat ``uint8`` array,
or an address), and their concatenation is the page's payload. Nothing is copied before everything was checked.

torch and numpy are never imported here: whoever passes a tensor has done so.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable, Sequence
from typing import Any

from curvfs.errors import UsageError
from curvfs.world import Clock
from kvstore.devices import Device, DevicePieces, Devices, Event, wait_until
from kvstore.geometry import TensorSpec
from kvstore.header import ObjectLayout
from kvstore.slabs import Slab

_memmove = ctypes.memmove  # releases the GIL while it copies


class _PyBuffer(ctypes.Structure):
    # struct Py_buffer of the stable ABI.
    _fields_ = (
        ("buf", ctypes.c_void_p),
        ("obj", ctypes.py_object),
        ("len", ctypes.c_ssize_t),
        ("itemsize", ctypes.c_ssize_t),
        ("readonly", ctypes.c_int),
        ("ndim", ctypes.c_int),
        ("format", ctypes.c_char_p),
        ("shape", ctypes.c_void_p),
        ("strides", ctypes.c_void_p),
        ("suboffsets", ctypes.c_void_p),
        ("internal", ctypes.c_void_p),
    )


# Functions of our own: the types set on an attribute of ctypes.pythonapi would be everybody's.
_get_buffer = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.py_object, ctypes.POINTER(_PyBuffer), ctypes.c_int)(
    ("PyObject_GetBuffer", ctypes.pythonapi)
)
_release_buffer = ctypes.PYFUNCTYPE(None, ctypes.POINTER(_PyBuffer))(("PyBuffer_Release", ctypes.pythonapi))


def _address(view: memoryview) -> int:
    """Where a C-contiguous view's bytes lie; good for as long as the view is held."""
    buffer = _PyBuffer()
    _get_buffer(view, ctypes.byref(buffer), 0)
    address = buffer.buf or 0
    _release_buffer(ctypes.byref(buffer))
    return int(address)


class PagePlan:
    """One page's checked pieces: where each lies, and where it goes in an object's data.

    Holds the pieces alive until it is dropped. :meth:`pack` and :meth:`unpack` run in an I/O thread.
    """

    __slots__ = ("_arrays", "_clock", "_device", "_held", "_moves", "_tensors")

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        #: (address, offset in the data, bytes); neighbours merged.
        self._moves: list[tuple[int, int, int]] = []
        #: Strided numpy arrays and torch tensors with their place.
        self._arrays: list[tuple[Any, int, int]] = []
        self._tensors: list[tuple[Any, int, int]] = []
        self._held: list[Any] = []
        self._device: DevicePieces | None = None

    @property
    def device(self) -> Device | None:
        """Where pieces lie that are not in host memory."""
        return None if self._device is None else self._device.device

    def marked(self, mark: Event) -> None:
        """Where the caller's stream on :attr:`device` was when the page was handed over."""
        if self._device is not None:
            self._device.mark = mark

    def ready(self) -> bool:
        """Is the caller's device done with the memory? Raises CurvfsError when it failed."""
        return self._device is None or self._device.ready()

    def wait_ready(self, left_s: Callable[[], float]) -> bool:
        """Wait for that as long as there is time left."""
        return wait_until(self._clock, self.ready, left_s)

    def add_memory(self, held: Any, address: int, offset: int, size_bytes: int) -> None:
        self._held.append(held)
        if size_bytes == 0:
            return
        if self._moves:
            last_address, last_offset, last_bytes = self._moves[-1]
            if last_address + last_bytes == address and last_offset + last_bytes == offset:
                self._moves[-1] = (last_address, last_offset, last_bytes + size_bytes)
                return
        self._moves.append((address, offset, size_bytes))

    def add_array(self, array: Any, offset: int, size_bytes: int) -> None:
        if size_bytes:
            self._arrays.append((array, offset, size_bytes))

    def add_tensor(self, tensor: Any, offset: int, size_bytes: int) -> None:
        if size_bytes:
            self._tensors.append((tensor, offset, size_bytes))

    def add_device_tensor(self, device: Device, tensor: Any, offset: int, size_bytes: int) -> None:
        """Raises UsageError for a second device."""
        if self._device is None:
            self._device = DevicePieces(device)
        if self._device.device is not device:
            raise UsageError(
                f"A page's tensors lie on {self._device.device.name} and on {device.name}; pass those of one device."
            )
        if size_bytes:
            self._device.pieces.append((tensor, offset, size_bytes))

    def drop(self) -> None:
        """Let go of the caller's memory."""
        self._device = None
        for pieces in (self._moves, self._arrays, self._tensors, self._held):
            pieces.clear()

    def pack(self, slab: Slab, start: int) -> None:
        """Copy the page into a slab whose data begin at ``start``."""
        device, event = self._device, None
        if device is not None:
            event = device.begin(slab, start, low=0, high=sys.maxsize, to_host=True)
        try:
            self._pack_host(slab, start)
        finally:
            if device is not None:
                device.finish(self._clock, event, slab)

    def _pack_host(self, slab: Slab, start: int) -> None:
        base = slab.address + start
        for address, offset, size_bytes in self._moves:
            _memmove(base + offset, address, size_bytes)
        for array, offset, size_bytes in self._arrays:
            sys.modules["numpy"].copyto(_array_in(slab, array, start + offset, size_bytes), array)
        if self._tensors:
            with sys.modules["torch"].inference_mode():
                for tensor, offset, size_bytes in self._tensors:
                    _tensor_in(slab, tensor, start + offset, size_bytes).copy_(tensor)

    def unpack(self, slab: Slab, start: int) -> None:
        """Copy the page out of a slab whose data begin at ``start``."""
        self.unpack_range(slab, start, 0, sys.maxsize)

    def unpack_range(self, slab: Slab, start: int, low: int, high: int) -> None:
        """Copy out the data from ``low`` to ``high``, whole tensors; those at ``low`` lie at ``start`` in the slab."""
        device, event = self._device, None
        if device is not None:
            event = device.begin(slab, start - low, low=low, high=high, to_host=False)
        try:
            self._unpack_host(slab, start, low, high)
        finally:
            if device is not None:
                device.finish(self._clock, event, slab)

    def _unpack_host(self, slab: Slab, start: int, low: int, high: int) -> None:
        base = slab.address + start - low
        for address, offset, size_bytes in self._moves:
            begin, end = max(offset, low), min(offset + size_bytes, high)
            if begin < end:
                _memmove(address + begin - offset, base + begin, end - begin)
        at = start - low
        for array, offset, size_bytes in self._arrays:
            if low <= offset < high:
                sys.modules["numpy"].copyto(array, _array_in(slab, array, at + offset, size_bytes))
        tensors = [entry for entry in self._tensors if low <= entry[1] < high]
        if tensors:
            with sys.modules["torch"].inference_mode():
                for tensor, offset, size_bytes in tensors:
                    tensor.copy_(_tensor_in(slab, tensor, at + offset, size_bytes))

    def pieces(self, data_bytes: int, alignment_bytes: int) -> list[memoryview] | None:
        """The caller's memory as views that cover all data of the object in order, for reading straight into them;
        None where that cannot be: strided pieces, padding between tensors, or addresses that direct I/O refuses."""
        if self._arrays or self._tensors or self._device is not None:
            return None
        views, at = [], 0
        for address, offset, size_bytes in sorted(self._moves, key=lambda move: move[1]):
            if offset != at or address % alignment_bytes or size_bytes % alignment_bytes:
                return None
            views.append(memoryview((ctypes.c_char * size_bytes).from_address(address)).cast("B"))
            at += size_bytes
        return views if at == data_bytes else None


def _array_in(slab: Slab, like: Any, at: int, size_bytes: int) -> Any:
    flat = sys.modules["numpy"].frombuffer(slab.view, dtype="u1", count=size_bytes, offset=at)
    return flat.view(like.dtype).reshape(like.shape)


def _tensor_in(slab: Slab, like: Any, at: int, size_bytes: int) -> Any:
    torch = sys.modules["torch"]
    return torch.frombuffer(slab.view, dtype=torch.uint8, count=size_bytes, offset=at).view(like.dtype).view(like.shape)


def plan_page(pieces: Any, layout: ObjectLayout, *, writable: bool, clock: Clock, devices: Devices) -> PagePlan:
    """Check one page's segment list (a sequence of pieces, or one piece alone). Raises UsageError, copies nothing."""
    torch, numpy = sys.modules.get("torch"), sys.modules.get("numpy")
    if not isinstance(pieces, list | tuple) or _is_address(pieces):
        pieces = [pieces]
    typed = [piece for piece in pieces if _is_typed(piece, torch, numpy)]
    plan = PagePlan(clock)
    if not typed:
        _plan_bytes(plan, pieces, layout, writable)
        return plan
    if len(pieces) != len(layout.tensors):
        raise UsageError(f"A page has {len(layout.tensors)} tensors, not {len(pieces)}; pass one piece for each.")
    for piece, (spec, offset) in zip(pieces, layout.tensors, strict=True):
        if torch is not None and isinstance(piece, torch.Tensor):
            _plan_tensor(plan, piece, spec, offset, writable, torch, devices)
        elif numpy is not None and isinstance(piece, numpy.ndarray):
            _plan_array(plan, piece, spec, offset, writable)
        else:
            held, address, size_bytes = _plain(piece, writable)
            if size_bytes != spec.size_bytes:
                raise UsageError(f"Tensor {spec.name} takes {spec.size_bytes} bytes; the piece given has {size_bytes}.")
            plan.add_memory(held, address, offset, size_bytes)
    return plan


def _is_address(piece: Any) -> bool:
    return isinstance(piece, tuple) and len(piece) == 2 and all(type(number) is int for number in piece)


def _is_typed(piece: Any, torch: Any, numpy: Any) -> bool:
    """A tensor or array whose dtype and shape mean something; flat bytes are plain."""
    if torch is not None and isinstance(piece, torch.Tensor):
        flat = piece.dtype is torch.uint8 and piece.dim() == 1 and piece.device.type == "cpu"
        return not (flat and piece.is_contiguous())
    if numpy is not None and isinstance(piece, numpy.ndarray):
        return not (piece.dtype == numpy.uint8 and piece.ndim == 1 and piece.flags.c_contiguous)
    return False


def _plain(piece: Any, writable: bool) -> tuple[Any, int, int]:
    """(object to hold, address, bytes) of a piece of plain bytes."""
    if _is_address(piece):
        address, size_bytes = piece
        if size_bytes < 0 or (address <= 0 and size_bytes):
            raise UsageError(f"({address:#x}, {size_bytes}) is no memory; pass an address and a number of bytes.")
        return None, address, size_bytes
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(piece, torch.Tensor):
        return piece, piece.data_ptr(), piece.numel()
    try:
        view = memoryview(piece)
    except TypeError:
        raise UsageError(
            f"A {type(piece).__name__} is no piece of a page; pass tensors, arrays, buffers or (address, nbytes)."
        ) from None
    if not view.c_contiguous:
        raise UsageError("A buffer must be contiguous; copy it, or pass it as an array, whose strides are known.")
    if writable and view.readonly:
        raise UsageError("A buffer to read into is read-only; pass a bytearray or another writable one.")
    return view, _address(view), view.nbytes


def _plan_bytes(plan: PagePlan, pieces: Sequence[Any], layout: ObjectLayout, writable: bool) -> None:
    """Concatenate plain pieces and cut them at the tensors' bounds."""
    plain = [_plain(piece, writable) for piece in pieces]
    given, wanted = sum(size_bytes for _, _, size_bytes in plain), layout.geometry.size_bytes
    if given != wanted:
        raise UsageError(f"A page takes {wanted} bytes; the pieces given have {given}.")
    places = iter(layout.tensors)
    offset = room = 0
    for held, address, size_bytes in plain:
        plan.add_memory(held, address, 0, 0)
        while size_bytes:
            while room == 0:
                spec, offset = next(places)
                room = spec.size_bytes
            step = min(room, size_bytes)
            plan.add_memory(None, address, offset, step)
            address, offset, room, size_bytes = address + step, offset + step, room - step, size_bytes - step


def _wrong(spec: TensorSpec, dtype: str, shape: tuple[int, ...]) -> UsageError:
    return UsageError(
        f"Tensor {spec.name} is {spec.dtype.name} of shape {spec.shape}; the piece given is {dtype} of shape {shape}."
    )


def _plan_tensor(
    plan: PagePlan, tensor: Any, spec: TensorSpec, offset: int, writable: bool, torch: Any, devices: Devices
) -> None:
    dtype, shape = str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape)
    if dtype != spec.dtype.name or shape != spec.shape:
        raise _wrong(spec, dtype, shape)
    if tensor.layout is not torch.strided or tensor.device.type == "meta":
        raise UsageError(f"The piece given for {spec.name} is {tensor.layout} on {tensor.device}; pass a strided one.")
    tensor = tensor.detach()
    device = devices.of(tensor)
    if device is None and tensor.is_contiguous() and not tensor.is_neg():
        plan.add_memory(tensor, tensor.data_ptr(), offset, spec.size_bytes)
        return
    if writable and any(size > 1 and stride == 0 for size, stride in zip(shape, tensor.stride(), strict=True)):
        raise UsageError(f"The tensor to read {spec.name} into repeats its memory (expand); pass one that has its own.")
    if device is None:
        plan.add_tensor(tensor, offset, spec.size_bytes)
    else:
        plan.add_device_tensor(device, tensor, offset, spec.size_bytes)


def _plan_array(plan: PagePlan, array: Any, spec: TensorSpec, offset: int, writable: bool) -> None:
    dtype, shape = str(array.dtype.name), tuple(array.shape)
    bits = array.dtype.kind == "u" and array.dtype.itemsize == spec.dtype.size_bytes and "float" in spec.dtype.name
    if not (dtype == spec.dtype.name or bits) or not array.dtype.isnative or shape != spec.shape:
        raise _wrong(spec, str(array.dtype), shape)
    if writable and not array.flags.writeable:
        raise UsageError(f"The array to read {spec.name} into is read-only; pass a writable one.")
    if array.flags.c_contiguous:
        plan.add_memory(array, array.__array_interface__["data"][0], offset, spec.size_bytes)
    else:
        plan.add_array(array, offset, spec.size_bytes)
