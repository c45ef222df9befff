"""Room for a store's objects: the face that the store sees, and the one of a store without limits."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from curvfs.world import World
from kvstore.backends.base import Backend
from kvstore.capacity.accesses import Accesses, StoreClock
from kvstore.capacity.settings import Capacity
from kvstore.page import Page


@dataclass(frozen=True, eq=False)
class CapacityStats:
    """One moment of a store's room. ``counted``: what is in the pool is known; before that the bytes are 0.

    ``used_bytes`` holds everything that counts against the quota: objects, ``trash_bytes``, ``others_bytes`` (what
    other writers added since the pool was counted; negative where they took away), ``staged_bytes`` (left by the
    dead). ``objects``: those that this process knows in the order of their use. ``processes``: others that have a store
    here; ``writers``: those of them that write to the namespace within limits, or did a moment ago.
    ``evicted``, ``evicted_bytes``: by this process, ``expired`` of them because of their age. ``refused``: puts that
    found no room. ``accesses_flushed``, ``accesses_dropped``: uses that the pool was told of, and was not.
    """

    counted: bool = False
    quota_bytes: int | None = None
    used_bytes: int = 0
    trash_bytes: int = 0
    staged_bytes: int = 0
    others_bytes: int = 0
    objects: int = 0
    chunk_bytes: int = 0
    processes: int = 0
    writers: int = 0
    free_bytes: int = 0
    min_free_bytes: int = 0
    evicted: int = 0
    evicted_bytes: int = 0
    expired: int = 0
    refused: int = 0
    counts: int = 0
    accesses_flushed: int = 0
    accesses_dropped: int = 0


class Room:
    """No limits: objects are only marked as used. Callable from any thread; ``touch`` and ``gone`` never wait."""

    def __init__(self, world: World, backend: Backend, *, flush_s: float) -> None:
        #: Called when there is something to do in the background.
        self.on_due: Callable[[], None] = lambda: None
        self._now = StoreClock(world, backend)
        self._accesses = Accesses(world, backend, every_s=flush_s)

    def touch(self, names: Sequence[str]) -> None:
        """A caller uses these objects, in this order."""
        self._accesses.note(names, self._now.now_s())

    def gone(self, name: str) -> None:
        """An object was not there when it was wanted."""

    def moment(self) -> int:
        """Before it is asked what is there; for :meth:`still_there`."""
        return 0

    def still_there(self, name: str, moment: int) -> bool:
        """An object that was there when it was asked for, after :meth:`moment`: is it not evicted by us since? Then it
        counts as used."""
        self.touch([name])
        return True

    def admit(self, page: Page, size_bytes: int) -> bool:
        """Take room for an object to be put. False: there is none until puts under way have ended; try again. Raises
        Refused, CurvfsError."""
        return True

    def published(self, page: Page, size_bytes: int) -> None:
        """It is there, with so many bytes."""

    def withdraw(self, page: Page) -> None:
        """It is not going to be there by our doing: give its room back, if it has some."""

    def doubt(self, page: Page) -> None:
        """It may be there: nobody told. It counts as that until the pool is counted again."""

    def removing(self) -> None:
        """Before anything is taken away. Raises CurvfsError."""

    def removed(self, name: str, *, to_trash: bool) -> None:
        """The caller deleted an object, or moved it to the trash."""

    def cleared(self, size_bytes: int) -> None:
        """The caller removed everything: so many bytes."""

    @property
    def due(self) -> bool:
        """Is there something for :meth:`tidy` to do?"""
        return self._accesses.due

    def tidy(self) -> None:
        """Do what is due, in a thread that may wait for the store. Raises CurvfsError."""
        self._now.look()
        self._accesses.flush()

    def stop(self) -> None:
        """Let a :meth:`tidy` that is under way end soon."""

    def close(self) -> None:
        """The last words to the store. Raises CurvfsError."""

    def stats(self) -> CapacityStats:
        return CapacityStats(
            accesses_flushed=self._accesses.flushed,
            accesses_dropped=self._accesses.dropped,
        )


def room_for(
    world: World,
    backend: Backend,
    settings: Capacity,
    namespace: str,
    *,
    object_bytes: int,
    lease_s: float,
    on_deleted: Callable[[str], None],
) -> Room:
    """Room as the settings have it."""
    if not settings.limits:
        return Room(world, backend, flush_s=settings.flush_s)
    from kvstore.capacity.limited import LimitedRoom  # a tenth of what importing kvstore takes

    return LimitedRoom(
        world, backend, settings, namespace, object_bytes=object_bytes, lease_s=lease_s, on_deleted=on_deleted
    )
