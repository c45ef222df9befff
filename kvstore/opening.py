"""From a URL and settings to a store: everything is checked together before anything is opened."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal
from urllib.parse import unquote, urlsplit

from curvfs.errors import ConfigError
from curvfs.world import World
from kvstore.backends.base import Backend, Direct
from kvstore.capacity.settings import Capacity
from kvstore.codecs import codec_named
from kvstore.devices import CudaDevices, Devices
from kvstore.engine.base import Engine
from kvstore.engine.uring import probed_engine
from kvstore.geometry import Geometry
from kvstore.keys import Identity, KeyChain
from kvstore.store import KVStore


def open(
    url: str,
    identity: Identity,
    *,
    geometry: Geometry,
    direct: Direct = True,
    prefix: str = "kv",
    chain_hash: str = "xxh3_128",
    depth: int = 8,
    engine: Literal["auto", "threads", "uring"] = "auto",
    page_cache: Literal["drop", "keep"] = "drop",
    durability: Literal["none", "publish"] = "none",
    timeout_s: float = 30.0,
    lookup_timeout_s: float = 5.0,
    max_queued: int = 4096,
    reshard_from: Sequence[int] = (),
    codec: Literal["none", "zstd"] = "none",
    staging_expiry_s: float = 600.0,
    lease_s: float = 30.0,
    devices: Devices | None = None,
    capacity: Capacity | None = None,
    prefill_tokens_per_s: float | None = None,
    memory_bytes: int = 0,
    write_behind_bytes: int = 0,
    world: World | None = None,
) -> KVStore:
    """Open the store at ``file:///directory`` or ``curvine://host:port/path``.

    * ``prefix``: the KV prefix, a directory below the URL's (``.``: that directory itself).
    * ``direct``: ``True`` direct where the file system takes it (else buffered, with one warning and in ``stats()``),
      ``False`` buffered, ``"required"`` refused here otherwise.
    * ``chain_hash``: ``xxh3_128``, or ``sha256`` where tenants do not trust each other.
    * ``depth``: objects moved at once.
    * ``engine``: what moves them; ``auto`` is io_uring where it proves itself, else threads.
    * ``page_cache``: ``keep`` writes through the page cache, for hosts with memory to spare; what lies there is read
      from there in any case.
    * ``durability``: ``publish`` syncs every object before it gets its name, and the name; refused where blocks are
      remote. Objects that others stored stay as they are.
    * ``timeout_s``: deadline of a put or get that names none.
    * ``lookup_timeout_s``: the same for a lookup or exists, which a request waits for.
    * ``max_queued``: pages under way before more are answered ``Miss.BUSY``.
    * ``reshard_from``: other tensor-parallel sizes whose pages are put together where this rank's own are not there.
    * ``codec``: ``zstd`` compresses what is put, where that makes it shorter; any store reads it, as a whole.
    * ``staging_expiry_s``: age at which another process's silent staging directory is taken for dead.
    * ``lease_s``: how long a ``lookup`` keeps what it promised from those who evict, and may be repeated unasked.
    * ``capacity``: quota, time to live and free room to leave; see :class:`kvstore.Capacity`.
    * ``prefill_tokens_per_s``: how fast the model computes a prompt: lookups leave out what would take longer to load.
      May be observed instead, with :meth:`KVStore.observe_prefill`.
    * ``memory_bytes``: host memory for pages that were stored or loaded lately; they are delivered from there.
    * ``write_behind_bytes``: buffers for pages to be stored later: a put is over when they are copied, and what finds
      no buffer is ``Miss.BUSY``.
    * ``devices``: where tensors may lie that are not in host memory; the GPUs that torch knows unless said otherwise.

    Raises ConfigError, EnvironmentError_, TransportError.
    """
    _check(
        identity,
        geometry,
        direct=direct,
        prefix=prefix,
        engine=engine,
        page_cache=page_cache,
        durability=durability,
        counts={"depth": depth, "max_queued": max_queued},
        sizes={"memory_bytes": memory_bytes, "write_behind_bytes": write_behind_bytes},
        durations_s={
            "timeout_s": timeout_s,
            "lookup_timeout_s": lookup_timeout_s,
            "staging_expiry_s": staging_expiry_s,
        },
        lease_s=lease_s,
        prefill_tokens_per_s=prefill_tokens_per_s,
        reshard_from=reshard_from,
    )
    packer = codec_named(codec)
    world = world or World.real()
    chain = KeyChain(identity, chain_hash=chain_hash)
    moving, engine_reason = probed_engine(world, engine, depth=depth)
    backend: Backend | None = None
    try:
        backend = open_backend(
            world,
            moving,
            url,
            prefix=prefix,
            direct=direct,
            keep=page_cache == "keep",
            durable=durability == "publish",
            staging_expiry_s=staging_expiry_s,
            lease_s=lease_s,
        )
        return KVStore(
            world,
            backend,
            moving,
            chain,
            geometry,
            url=url,
            timeout_s=timeout_s,
            lookup_timeout_s=lookup_timeout_s,
            max_queued=max_queued,
            staging_expiry_s=staging_expiry_s,
            lease_s=lease_s,
            engine_reason=engine_reason,
            reshard_from=reshard_from,
            codec=packer,
            devices=devices or CudaDevices(world),
            capacity=capacity or Capacity(),
            prefill_tokens_per_s=prefill_tokens_per_s,
            memory_bytes=memory_bytes,
            write_behind_bytes=write_behind_bytes,
        )
    except BaseException:
        moving.close(1.0)
        if backend is not None:
            backend.close()
        raise


def _check(
    identity: Identity,
    geometry: Geometry,
    *,
    direct: Direct,
    prefix: str,
    engine: str,
    page_cache: str,
    durability: str,
    counts: dict[str, int],
    sizes: dict[str, int],
    durations_s: dict[str, float],
    lease_s: float,
    prefill_tokens_per_s: float | None,
    reshard_from: Sequence[int],
) -> None:
    for name, wanted, given in (
        ("dtype", geometry.dtype, identity.dtype),
        ("page_tokens", geometry.page_tokens, identity.page_tokens),
        ("layout", geometry.layout, identity.layout),
    ):
        if wanted != given:
            raise ConfigError(
                f"The identity's {name} is {given!r}, the geometry's is {wanted!r}; make the identity with Identity.of."
            )
    for name, size_bytes in sizes.items():
        if size_bytes < 0:
            raise ConfigError(f"{name} is {size_bytes}; give a number of bytes, 0 for none.")
    for name, number in counts.items():
        if number < 1:
            raise ConfigError(f"{name} is {number}; give at least 1.")
    if prefill_tokens_per_s is not None and not 0 < prefill_tokens_per_s < 1e12:
        raise ConfigError(f"prefill_tokens_per_s is {prefill_tokens_per_s}; give a positive number, or None.")
    if not 0 <= lease_s < 1e9:
        raise ConfigError(f"lease_s is {lease_s}; give a number of seconds, 0 for none.")
    for name, seconds in durations_s.items():
        if not 0 < seconds < 1e9:
            raise ConfigError(f"{name} is {seconds}; give a positive number of seconds.")
    if any(size < 1 for size in reshard_from):
        raise ConfigError(f"reshard_from is {list(reshard_from)}; give tensor-parallel sizes of at least 1.")
    if direct not in (True, False, "required"):
        raise ConfigError(f"direct is {direct!r}; write True, False or 'required'.")
    for name, word, words in (
        ("engine", engine, ("auto", "threads", "uring")),
        ("page_cache", page_cache, ("drop", "keep")),
        ("durability", durability, ("none", "publish")),
    ):
        if word not in words:
            raise ConfigError(f"{name} is {word!r}; write {' or '.join(words)}.")
    parts = prefix.split("/")
    if prefix != "." and (not all(parts) or any(part in (".", "..") or "\0" in part for part in parts)):
        raise ConfigError(f"{prefix!r} is not a KV prefix; name a directory below the URL's, such as kv.")


def open_backend(world: World, engine: Engine, url: str, **settings: Any) -> Backend:
    """The back end that a URL names; ``settings`` are those of its class. Raises as :func:`open` does."""
    scheme = url.partition("://")[0].lower() if isinstance(url, str) else ""  # anything else is refused below
    if scheme == "file":
        from kvstore.backends.posix import PosixBackend

        found = urlsplit(url)
        directory = unquote(found.path)
        if found.netloc not in ("", "localhost") or not directory.startswith("/") or found.query or found.fragment:
            raise ConfigError(f"{url!r} does not name a directory; write file:///path/to/directory.")
        return PosixBackend(world, engine, directory, **settings)
    if scheme == "curvine":
        from kvstore.backends.curvine import CurvineBackend

        return CurvineBackend(world, engine, url, **settings)
    raise ConfigError(f"{url!r} is no place for a store; write file:///directory or curvine://host:port/path.")
