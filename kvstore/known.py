"""Objects that a lookup found less than a lease ago: it need not ask for them again, because whoever evicts meanwhile
keeps them readable that long. Never trusted by a put, nor by a get that no lookup stands behind.

The other way round, a name whose object turned out not to be for this store is taken for absent for as long."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

from curvfs.world import World
from kvstore.asking import Answer, Ask
from kvstore.backends.base import Found

#: About a kilobyte each.
_KEPT = 1 << 14


class KnownPages:
    """Name -> what was found there, and when. Callable from any thread."""

    def __init__(self, world: World, *, lease_s: float) -> None:
        self._clock = world.clock
        self._lock = world.threads.lock()
        self._lease_s = lease_s
        self._found: OrderedDict[str, tuple[float, Found | None]] = OrderedDict()

    def confirm(self, names: Sequence[str], ask: Ask) -> list[Answer]:
        """What is there under each name: as found less than a lease ago, else as asked for now."""
        now_s = self._clock.monotonic_s()
        with self._lock:
            entries = [self._found.get(name) for name in names]
        fresh = now_s - self._lease_s
        answers: list[Answer] = [None if entry is None else entry[1] for entry in entries]
        unknown = [index for index, entry in enumerate(entries) if entry is None or entry[0] <= fresh]
        if not unknown:
            return answers
        asked = ask([names[index] for index in unknown])
        with self._lock:
            for index, answer in zip(unknown, asked, strict=True):
                answers[index] = answer
                if isinstance(answer, Found) and answer.length_bytes > 0:
                    self._keep(names[index], now_s, answer)
        return answers

    def _keep(self, name: str, now_s: float, found: Found | None) -> None:
        self._found[name] = (now_s, found)
        self._found.move_to_end(name)
        while len(self._found) > _KEPT:
            self._found.popitem(last=False)

    def refuse(self, name: str) -> None:
        """What is there is not for us."""
        with self._lock:
            self._keep(name, self._clock.monotonic_s(), None)

    def forget(self, name: str) -> None:
        """It turned out not to be there, or was taken away."""
        with self._lock:
            self._found.pop(name, None)

    def clear(self) -> None:
        """Everything was taken away."""
        with self._lock:
            self._found.clear()
