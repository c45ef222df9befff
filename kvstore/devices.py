"""Tensors on an accelerator: copied to and from page-locked slabs on a stream of our own, beside the caller's.

::

    put:  note where the caller's stream is ─> (I/O thread) look until it got there ─> copy ─> look until that is done
    get:  note where the caller's stream is ─> (I/O thread) read, verify, look until it got there ─> copy ─> look ...

A caller never waits for its device, and its stream never waits for us: it only gets an event to pass. The memory of a
slab, or the caller's, is let go when the last copy is known to be over; a slab whose copy failed is not used again.

Devices are behind a small seam, :class:`Device` and :class:`Event`, so that the staging itself runs without one.
"""

from __future__ import annotations

import abc
import sys
import weakref
from collections.abc import Callable, Sequence
from typing import Any

from curvfs.errors import CurvfsError, DeadlineExceeded, UsageError
from curvfs.world import Clock, World
from kvstore.slabs import Slab

#: How often an I/O thread looks at an event: soon at first, then less and less often.
_FIRST_LOOK_S = 50e-6
_LAST_LOOK_S = 2e-3
#: A copy between a slab and a device that is not over by then never will be.
_COPY_LIMIT_S = 60.0


class Event(abc.ABC):
    """A point in a stream of work."""

    @abc.abstractmethod
    def reached(self) -> bool:
        """Is everything before it done? Never waits. Raises CurvfsError when some of it failed."""


class Device(abc.ABC):
    """One accelerator. Callable from any thread."""

    name: str

    @abc.abstractmethod
    def mark(self) -> Event:
        """Where the calling thread's current stream is now: everything it was given so far."""

    @abc.abstractmethod
    def pin(self, slab: Slab) -> None:
        """Lock a slab's memory for fast copies, once; where that cannot be, copies are slower."""

    @abc.abstractmethod
    def copy(self, pairs: Sequence[tuple[Any, Any]], *, to_host: bool) -> Event:
        """Begin ``target.copy_(source)`` for each pair (target, source) on a stream of our own; the event behind the
        last. Raises CurvfsError when nothing is under way any more."""


class Devices(abc.ABC):
    """Which tensors lie on which device."""

    @abc.abstractmethod
    def of(self, tensor: Any) -> Device | None:
        """The device of a tensor; None for one in host memory. Raises UsageError for a device that is not known."""


def wait_until(clock: Clock, true: Callable[[], bool], left_s: Callable[[], float]) -> bool:
    """Look until it is true; False when the time was up first."""
    pause_s = _FIRST_LOOK_S
    while not true():
        if left_s() <= 0:
            return False
        clock.block(pause_s)
        pause_s = min(2 * pause_s, _LAST_LOOK_S)
    return True


class DevicePieces:
    """The tensors of one page that lie on one device: (tensor, offset in the data, bytes)."""

    def __init__(self, device: Device) -> None:
        self.device = device
        self.pieces: list[tuple[Any, int, int]] = []
        #: Where the caller's stream was when the page was handed over.
        self.mark: Event | None = None

    def ready(self) -> bool:
        """Is the caller's stream done with the memory? Raises CurvfsError."""
        if self.mark is not None and self.mark.reached():
            self.mark = None
        return self.mark is None

    def begin(self, slab: Slab, start: int, *, low: int, high: int, to_host: bool) -> Event | None:
        """Begin to copy the pieces from ``low`` to ``high`` between the device and a slab where data 0 lies at
        ``start``; None without any."""
        chosen = [piece for piece in self.pieces if low <= piece[1] < high]
        if not chosen:
            return None
        self.device.pin(slab)
        torch = sys.modules["torch"]
        pairs = []
        for tensor, offset, size_bytes in chosen:
            flat = torch.frombuffer(slab.view, dtype=torch.uint8, count=size_bytes, offset=start + offset)
            host = flat.view(tensor.dtype).view(tensor.shape)
            pairs.append((host, tensor) if to_host else (tensor, host))
        return self.device.copy(pairs, to_host=to_host)

    def finish(self, clock: Clock, event: Event | None, slab: Slab) -> None:
        """Wait until the copies are over. Raises CurvfsError; the slab is lost then."""
        if event is None:
            return
        until_s = clock.monotonic_s() + _COPY_LIMIT_S
        try:
            if not wait_until(clock, event.reached, lambda: until_s - clock.monotonic_s()):
                raise DeadlineExceeded(
                    f"{self.device.name} did not end a copy within {_COPY_LIMIT_S:g} s; its memory is in doubt. Restart"
                    " this process."
                )
        except BaseException:
            slab.lost = True
            raise


class _CudaEvent(Event):
    def __init__(self, name: str, event: Any) -> None:
        self._name = name
        self._event = event

    def reached(self) -> bool:
        try:
            return bool(self._event.query())
        except Exception as error:
            raise _failed(self._name, error) from error


def _failed(name: str, error: Exception) -> CurvfsError:
    first_line = (str(error).splitlines() or [""])[0]
    return CurvfsError(f"{name} failed: {first_line}. Restart this process if it keeps failing.")


class CudaDevice(Device):
    """A GPU as torch knows it; two streams of our own, one for each direction."""

    def __init__(self, torch: Any, index: int) -> None:
        self.name = f"cuda:{index}"
        self._torch = torch
        self._index = index
        self._streams = {to_host: torch.cuda.Stream(device=index) for to_host in (True, False)}

    def mark(self) -> Event:
        try:
            event = self._torch.cuda.Event()
            event.record(self._torch.cuda.current_stream(self._index))
        except Exception as error:
            raise _failed(self.name, error) from error
        return _CudaEvent(self.name, event)

    def pin(self, slab: Slab) -> None:
        if slab.pinned is not None:
            return
        runtime = self._torch.cuda.cudart()
        answer = runtime.cudaHostRegister(slab.address, slab.size_bytes, _PORTABLE)
        slab.pinned = bool(answer == runtime.cudaError.success)
        if slab.pinned:
            unpin = weakref.finalize(slab, runtime.cudaHostUnregister, slab.address)
            unpin.atexit = False  # the process ends, and the driver with it

    def copy(self, pairs: Sequence[tuple[Any, Any]], *, to_host: bool) -> Event:
        torch, stream = self._torch, self._streams[to_host]
        try:
            with torch.inference_mode(), torch.cuda.device(self._index), torch.cuda.stream(stream):
                for target, source in pairs:
                    target.copy_(source, non_blocking=True)
                event = torch.cuda.Event()
                event.record(stream)
        except Exception as error:
            try:
                stream.synchronize()  # what was begun before the failure
            except Exception:  # the device itself is gone, and copies nothing any more
                pass
            raise _failed(self.name, error) from error
        return _CudaEvent(self.name, event)


#: cudaHostRegisterPortable: locked for every device of this process.
_PORTABLE = 1


class CudaDevices(Devices):
    """The GPUs of this process, each taken up when the first tensor on it comes along."""

    def __init__(self, world: World) -> None:
        self._lock = world.threads.lock()
        self._devices: dict[int, CudaDevice] = {}

    def of(self, tensor: Any) -> Device | None:
        kind, index = tensor.device.type, tensor.device.index
        if kind == "cpu":
            return None
        if kind != "cuda":
            raise UsageError(f"A tensor lies on {tensor.device}; pass tensors in host memory or on a CUDA device.")
        with self._lock:
            if index not in self._devices:
                try:
                    self._devices[index] = CudaDevice(sys.modules["torch"], index)
                except Exception as error:
                    raise _failed(str(tensor.device), error) from error
            return self._devices[index]
