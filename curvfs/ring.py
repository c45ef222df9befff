"""io_uring, as far as files need it: some reads or writes handed over together, and waited for together."""

from __future__ import annotations

import abc
from collections.abc import Sequence
from dataclasses import dataclass

from curvfs.errors import EnvironmentError_


@dataclass(frozen=True, slots=True)
class RingCall:
    """One ``pread`` into, or ``pwrite`` out of, a piece of memory."""

    fd: int
    view: memoryview
    offset_bytes: int
    write: bool


class Ring(abc.ABC):
    """A submission and a completion queue; for one thread at a time."""

    #: How many calls it takes together.
    entries: int

    @abc.abstractmethod
    def run(self, calls: Sequence[RingCall]) -> list[int]:
        """Do all of them, and come back when the kernel is done with the last one: for each the bytes moved, or a
        negative errno. The GIL is free meanwhile."""

    @abc.abstractmethod
    def close(self) -> None:
        """Let go of it; idempotent. Nothing may be under way."""


def kernel_ring(entries: int) -> Ring:
    """A ring of this kernel. Raises EnvironmentError_ with the reason when there is none to be had."""
    try:
        import uring_api
    except ImportError as error:
        raise EnvironmentError_(
            "io_uring needs the package uring-api; install it with: pip install 'curvfs[uring]'"
        ) from error
    try:
        ring = uring_api.Ring(entries=entries)
    except OSError as error:
        raise EnvironmentError_(
            f"This kernel does not give an io_uring ({error.strerror or error}); allow it (sysctl"
            " kernel.io_uring_disabled=0, the container's seccomp profile), or use the threads engine.",
            errno_=error.errno,
        ) from error

    class KernelRing(Ring):
        def __init__(self) -> None:
            self.entries = entries

        def run(self, calls: Sequence[RingCall]) -> list[int]:
            results = [0] * len(calls)
            for number, call in enumerate(calls):
                prepare = ring.prepare_write if call.write else ring.prepare_read
                prepare(call.fd, call.view, call.offset_bytes, number)
            left = len(calls)
            while left:
                try:
                    completed = ring.wait() or []
                except InterruptedError:
                    continue
                for completion in completed:
                    results[completion.take_user_data()] = completion.res
                    left -= 1
            return results

        def close(self) -> None:
            ring.close()

    return KernelRing()
