"""What connectors of all engines do alike with an open store."""

from __future__ import annotations

import logging
from collections.abc import Iterable

from kvstore.connectors.identity import EnginePages
from kvstore.keys import PageKey
from kvstore.store import KVStore
from kvstore.transfer import Transfer

_WARN_S = 10.0


def keys_of(store: KVStore, keys: Iterable[str | bytes]) -> list[PageKey]:
    """The store's keys for an engine's own, which mean nothing here."""
    return [store.foreign_key(key.encode() if isinstance(key, str) else bytes(key)) for key in keys]


def wait_returned(transfer: Transfer, logger: logging.Logger) -> None:
    """Return when the storage writes to an engine's memory no more: the engine is about to use it otherwise."""
    while not transfer.wait_returned(_WARN_S):
        logger.warning("curvfs: the storage still writes to the engine's memory; waiting for it.")


def log_opened(logger: logging.Logger, what: str, unit: str, pages: EnginePages, store: KVStore) -> None:
    """One line about a store that was opened for an engine. ``unit``: what the engine calls a page."""
    stats = store.stats()
    logger.info(
        "curvfs %s: model %s, weights %s, %d bytes a %s, %s (%s).",
        *(what, pages.model, pages.revision, pages.size_bytes, unit),
        *(stats.backend, stats.direct_reason or "direct I/O"),
    )
