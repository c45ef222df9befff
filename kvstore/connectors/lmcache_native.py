"""LMCache, multiprocess: the client of its ``native_plugin`` L2 adapter, on a shared pool.

::

    lmcache server ... --l2-adapter '{"type": "native_plugin", "module_path": "kvstore.connectors.lmcache_native",
        "class_name": "KvstoreClient", "adapter_params": {"url": "curvine://m1:8995/pool", "dtype": "bfloat16"}}'

LMCache shows this interface keys and bytes only, so the number format must be given;
:mod:`kvstore.connectors.lmcache_l2` finds it out. Both read and write the same objects.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any

from curvfs.errors import ConfigError
from kvstore.connectors.lmcache_shelf import Item, Shelf

WHERE = 'LMCache\'s "adapter_params"'
#: Equal where equal bytes of LMCache's server mean equal numbers.
LAYOUT = "lmcache-mp-1"

Completion = tuple[int, bool, str, list[bool] | None]


class KvstoreClient:
    """What LMCache expects of a native client. Everything returns at once; ``event_fd`` is readable when something is
    done, and ``drain_completions`` tells what. Other settings than these are those of :func:`kvstore.open`.

    Raises ConfigError.
    """

    def __init__(self, url: str = "", dtype: str = "", **settings: Any) -> None:
        if not dtype:
            raise ConfigError(
                'LMCache does not tell a native client the number format of its pages; set "dtype" in'
                f" {WHERE}, such as bfloat16, or use the adapter of kvstore.connectors.lmcache_l2, which finds it out."
            )
        self._shelf = Shelf({"url": url, "dtype": dtype, **settings}, where=WHERE, layout=LAYOUT)
        self._lock = self._shelf.lock
        self._fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._done: list[Completion] = []

    def event_fd(self) -> int:
        return self._fd

    def submit_batch_set(self, keys: Sequence[str], buffers: Sequence[Any]) -> int:
        items = self._items(keys, buffers)
        return self._submit(lambda until_s: [bool(result) for result in self._shelf.put(items, until_s)], all_of=True)

    def submit_batch_get(self, keys: Sequence[str], buffers: Sequence[Any]) -> int:
        items = self._items(keys, buffers)
        return self._submit(lambda until_s: [bool(result) for result in self._shelf.get(items, until_s)])

    def submit_batch_exists(self, keys: Sequence[str]) -> int:
        items = self._items(keys)
        return self._submit(lambda until_s: [found is not None for found in self._shelf.look(items, until_s)])

    def submit_batch_delete(self, keys: Sequence[str]) -> int:
        items = self._items(keys)
        return self._submit(lambda until_s: self._shelf.evict(items))

    def drain_completions(self) -> list[Completion]:
        """Per call its number, whether it worked (a batch of puts: every one of them), why not, and per key."""
        with self._lock:
            try:
                os.eventfd_read(self._fd)
            except OSError:  # nothing there, or closed
                pass
            done, self._done = self._done, []
            return done

    def close(self) -> None:
        """Within a bound; idempotent."""
        self._shelf.close()
        with self._lock:
            if self._fd >= 0:
                fd, self._fd = self._fd, -1
                os.close(fd)  # noqa: TID251

    def _items(self, keys: Sequence[str], buffers: Sequence[Any] | None = None) -> list[Item]:
        """Keys are ``model@rank@group@hash`` and perhaps ``@salt``; a model's name has no ``@``."""
        filled = buffers if buffers is not None else [None] * len(keys)
        return [
            Item(key.partition("@")[0], self._shelf.dtype, key, buffer)
            for key, buffer in zip(keys, filled, strict=True)
        ]

    def _submit(self, call: Callable[[float], list[bool]], *, all_of: bool = False) -> int:
        def deliver(number: int, per_key: list[bool] | None) -> None:
            worked = per_key is not None and (not all_of or all(per_key))
            said = "curvfs failed; its log says why." if per_key is None else self._shelf.last_error
            reason = "" if worked else said
            self._done.append((number, worked, reason, per_key))
            if self._fd >= 0:
                os.eventfd_write(self._fd, 1)

        return self._shelf.submit(call, None, deliver)
