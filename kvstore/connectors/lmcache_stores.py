"""The stores of an engine that serves any model and says how long an object is only with each call.

A store has one identity and one page size. So they are opened as they are needed: one for each model, number format and
length, and one for each model and format that only asks, whatever the length.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Mapping
from typing import Any, NamedTuple

from curvfs.errors import ConfigError, CurvfsError
from curvfs.world import World
from kvstore.connectors.identity import EnginePages, name_and_revision, open_for_engine
from kvstore.store import KVStore

logger = logging.getLogger("kvstore")

#: Stores kept open; the one that was not used for longest goes.
_MOST_STORES = 32
#: How long a store that could not be opened is not tried again, and a sentence not said again.
_RETRY_S = 10.0


class Place(NamedTuple):
    model: str
    dtype: str
    size_bytes: int


class Trouble:
    """The last thing that went wrong."""

    def __init__(self, world: World) -> None:
        self._clock = world.clock
        self.last = ""
        self._logged_s = 0.0

    def say(self, message: str, what: object) -> None:
        """Remember it, and log it, but not over and over."""
        text, now_s = message % what, self._clock.monotonic_s()
        if text != self.last or now_s >= self._logged_s + _RETRY_S:
            self.last, self._logged_s = text, now_s
            logger.error("%s", text)


class _Room:
    def __init__(self, world: World) -> None:
        self.lock = world.threads.lock()
        self.store: KVStore | None = None
        self.retry_s = 0.0


class Stores:
    """Callable from any thread. ``settings``: as of :func:`~kvstore.connectors.identity.open_for_engine`."""

    def __init__(self, settings: Mapping[str, Any], *, where: str, layout: str, world: World, trouble: Trouble) -> None:
        self._settings = settings
        self._where = where
        self._layout = layout
        self._world = world
        self._trouble = trouble
        self._lock = world.threads.lock()
        self._rooms: OrderedDict[Place, _Room] = OrderedDict()
        #: What the engine calls a model -> name and revision.
        self._models: dict[str, tuple[str, str]] = {}
        self._closed = False

    def try_settings(self) -> None:
        """Say what is wrong with the settings now, not when the first request comes. Raises ConfigError."""
        try:
            self._open(Place("settings", "uint8", 1), ("settings", "none")).close()
        except ConfigError:
            raise
        except CurvfsError as error:
            self._trouble.say("The pool cannot be used yet: %s", error)

    def at(self, place: Place) -> KVStore | None:
        """The store of one place, opened if need be; None while that does not work."""
        dropped: list[_Room] = []
        with self._lock:
            if self._closed:
                return None
            room = self._rooms.get(place)
            if room is None:
                room = self._rooms[place] = _Room(self._world)
            self._rooms.move_to_end(place)
            while len(self._rooms) > _MOST_STORES:
                dropped.append(self._rooms.popitem(last=False)[1])
        for old in dropped:
            if old.store is not None:
                old.store.close()
        with room.lock:
            if room.store is None and self._world.clock.monotonic_s() >= room.retry_s:
                try:
                    room.store = self._open(place, self._named(place.model))
                except CurvfsError as error:
                    self._trouble.say(f"KV pages of {place.model} are neither stored nor found: %s", error)
                    room.retry_s = self._world.clock.monotonic_s() + _RETRY_S
            return room.store

    def open_now(self) -> list[KVStore]:
        with self._lock:
            return [room.store for room in self._rooms.values() if room.store is not None]

    def of_models(self) -> dict[str, KVStore]:
        """Of each model, by its name in the pool, one of the stores that are open now."""
        with self._lock:
            open_now = [(place.model, room.store) for place, room in self._rooms.items() if room.store is not None]
            return {self._models[model][0]: store for model, store in open_now}

    def close(self) -> None:
        """Within a bound; idempotent."""
        with self._lock:
            self._closed = True
            rooms, self._rooms = list(self._rooms.values()), OrderedDict()
        for room in rooms:
            if room.store is not None:
                room.store.close()

    def _open(self, place: Place, named: tuple[str, str]) -> KVStore:
        model, revision = named
        pages = EnginePages(
            model=model,
            revision=revision,
            size_bytes=place.size_bytes,
            page_tokens=1,
            dtype=place.dtype,
            layout=self._layout,
        )
        return open_for_engine(pages, self._settings, where=self._where, world=self._world)

    def _named(self, model: str) -> tuple[str, str]:
        with self._lock:
            known = self._models.get(model)
        if known is None:
            known = name_and_revision(model, self._settings, where=self._where, disk=self._world.disk)
            with self._lock:
                self._models[model] = known
        return known
