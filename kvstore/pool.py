"""A whole pool, for whoever keeps house in it: its namespaces, what they take, eviction and removal.

No identity and no geometry is needed: objects are files here. What is removed is written down, as every writer does, so
that the stores that are open keep their books right.
"""

from __future__ import annotations

import errno
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import TracebackType

from curvfs.errors import CurvfsError
from curvfs.world import World
from kvstore.backends.base import Backend
from kvstore.capacity.ledger import Ledger
from kvstore.capacity.limited import LimitedRoom
from kvstore.capacity.room import CapacityStats
from kvstore.capacity.settings import Capacity
from kvstore.engine.base import Engine
from kvstore.engine.threads import ThreadsEngine
from kvstore.inventory import Inventory, Listing
from kvstore.opening import open_backend

_DIGITS = frozenset("0123456789abcdef")
_NAMESPACE_DIGITS = 32
#: Read at once when objects are warmed.
_WARM_BYTES = 4 << 20


@dataclass(frozen=True, slots=True)
class NamespaceUsage:
    """``used_s``: when one of its objects was last used, by the pool's clock; 0 where it has none."""

    namespace: str
    objects: int
    object_bytes: int
    trash_bytes: int
    used_s: float


class Pool:
    """Made by :func:`open_pool`; a context manager. Calls walk directories and raise CurvfsErrors."""

    def __init__(self, world: World, engine: Engine, backend: Backend, *, lease_s: float) -> None:
        self._world = world
        self._engine = engine
        self._backend = backend
        self._lease_s = lease_s

    def namespaces(self) -> list[str]:
        """The namespaces of the pool, in order: a model and tenant each."""
        entries = self._backend.records.entries(self._backend.root)
        return sorted(
            entry.name
            for entry in entries
            if entry.is_directory and len(entry.name) == _NAMESPACE_DIGITS and _DIGITS.issuperset(entry.name)
        )

    def usage(self, namespace: str) -> NamespaceUsage:
        """What a namespace takes."""
        objects, object_bytes, used_s = 0, 0, 0.0
        for entry in self._backend.walk(namespace):
            objects += 1
            object_bytes += entry.length_bytes
            used_s = max(used_s, entry.atime_s)
        return NamespaceUsage(namespace, objects, object_bytes, self._backend.trash_bytes(namespace), used_s)

    def list(self, namespace: str, cursor: str = "", limit: int = 1000) -> Listing:
        """Objects of a namespace, in order of their names; see :meth:`KVStore.list`."""
        return Inventory(self._backend, namespace).list(cursor, limit)

    def free_bytes(self) -> int:
        """What the pool has room for."""
        return self._backend.free_bytes()

    def now_s(self) -> float:
        """The pool's own time."""
        return self._backend.staging.now_s()

    def purge(self, namespace: str) -> tuple[int, int]:
        """Remove all objects of a namespace at once, its trash, too; how many objects, and their bytes."""
        ledger = Ledger(self._world, self._backend, namespace, chunk_bytes=0)
        ledger.evicts = True
        ledger.say()
        try:
            count, ledger.freed_bytes = Inventory(self._backend, namespace).clear()
            while self._backend.empty_trash(early=True, namespace=namespace):
                pass
        finally:
            ledger.say(closed=True)
        return count, ledger.freed_bytes

    def warm(
        self, namespaces: Sequence[str], most_bytes: int | None, on_object: Callable[[int], None] = lambda _: None
    ) -> tuple[int, int]:
        """Read objects into the page cache of the machines that hold them, what was used last first, until the next one
        would make it more than ``most_bytes``; how many, and their bytes. ``on_object`` hears the bytes of each. What
        goes meanwhile is passed over."""
        entries = [entry for namespace in namespaces for entry in self._backend.walk(namespace)]
        entries.sort(key=lambda entry: (-entry.atime_s, entry.name))
        buffer = memoryview(bytearray(_WARM_BYTES))
        count = size_bytes = 0
        for entry in entries:
            if most_bytes is not None and size_bytes + entry.length_bytes > most_bytes:
                break
            try:
                with self._backend.open(entry.name) as reader:
                    for offset in range(0, reader.length_bytes, _WARM_BYTES):
                        reader.read(buffer[: reader.length_bytes - offset], offset)
            except CurvfsError as error:
                if error.errno_ != errno.ENOENT:
                    raise
                continue
            count += 1
            size_bytes += entry.length_bytes
            on_object(entry.length_bytes)
        return count, size_bytes

    def evict(self, namespace: str, capacity: Capacity) -> CapacityStats:
        """Bring a namespace within limits: what was used longest ago goes to the trash, and what has lain there for
        its time is removed."""
        room = LimitedRoom(
            self._world,
            self._backend,
            capacity,
            namespace,
            object_bytes=0,
            lease_s=self._lease_s,
            on_deleted=lambda name: None,
            writes=False,
        )
        try:
            room.tidy()
        finally:
            room.close()
        self._backend.empty_trash()
        return room.stats()

    def close(self) -> None:
        """Let go of it; idempotent."""
        self._backend.close()
        self._engine.close(1.0)

    def __enter__(self) -> Pool:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def open_pool(url: str, *, prefix: str = "kv", lease_s: float = 30.0, world: World | None = None) -> Pool:
    """The pool at ``file:///directory`` or ``curvine://host:port/path``. ``lease_s`` should be what its stores have; 0
    removes at once. Raises ConfigError, EnvironmentError_, TransportError."""
    world = world or World.real()
    engine = ThreadsEngine(world, depth=1)
    try:
        backend = open_backend(
            world,
            engine,
            url,
            prefix=prefix,
            direct=False,
            keep=False,
            durable=False,
            staging_expiry_s=600.0,
            lease_s=lease_s,
        )
    except CurvfsError:
        engine.close(1.0)
        raise
    return Pool(world, engine, backend, lease_s=lease_s)
