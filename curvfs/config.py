"""Client settings: one frozen record, made from a ``curvine://`` URL, the environment and the caller's overrides.

Precedence: defaults < environment < URL < overrides. Contradictions and unknown names are refused with the reason.
Defaults are our own where section 6.2 of the wire specification allows it: shorter deadlines and larger chunks.
"""

from __future__ import annotations

import dataclasses
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import parse_qsl, unquote_to_bytes

from curvfs.errors import ConfigError
from curvfs.units import GIB, MIB, format_size, parse_duration, parse_size

DEFAULT_MASTER_PORT = 8995
MIN_BLOCK_SIZE_BYTES = MIB
#: Block sizes and lengths are 32-bit numbers on a master: 4 GiB wraps to 0 (specification 4.4, hazard 2 of 13).
MAX_BLOCK_SIZE_BYTES = 4 * GIB - 1
MAX_CHUNK_BYTES = 16 * MIB

URL_EXAMPLE = "curvine://localhost:8995/path"

_ENV_HOSTNAME = "CURVINE_CLIENT_HOSTNAME"


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientConfig:
    """Effective settings of one client.

    ``masters``: (host, port) of every master of the cluster. ``root``: directory of the Curvine namespace that paths
    are taken below. ``hostname``: our own name, compared with a worker's to decide whether its files may be local,
    and used by the master for placement; empty means this machine's host name. ``client_name``: the writer identity
    of section 4.3; empty means a fresh random one. ``chunk_size_bytes``: data bytes per frame of a block stream, and
    ``window`` such frames are in flight. ``rpc_timeout_s`` bounds one attempt of a master call, ``retry_max_s`` all
    attempts together, ``data_timeout_s`` one exchange with a worker. ``close_timeout_s`` bounds closing.
    ``release_version`` is what servers are told (8.2); empty means ours. ``cluster_id``, when given, is what local
    block files must belong to.
    """

    masters: tuple[tuple[str, int], ...]
    root: str = "/"
    hostname: str = ""
    client_name: str = ""
    block_size_bytes: int = 128 * MIB
    replicas: int = 1
    short_circuit: bool = True
    connect_timeout_s: float = 10.0
    rpc_timeout_s: float = 30.0
    data_timeout_s: float = 30.0
    retry_max_s: float = 60.0
    retry_min_sleep_s: float = 0.1
    retry_max_sleep_s: float = 2.0
    close_timeout_s: float = 5.0
    chunk_size_bytes: int = 4 * MIB
    window: int = 4
    master_connections: int = 3
    idle_worker_connections: int = 128
    worker_idle_s: float = 60.0
    release_version: str = ""
    cluster_id: str = ""

    def __post_init__(self) -> None:
        if not self.masters:
            raise ConfigError(f"No master is given; write the address of at least one, such as {URL_EXAMPLE}.")
        for host, port in self.masters:
            if not host or not 0 < port < 65536:
                raise ConfigError(f"{host}:{port} is not a master address; write host:port with a port of 1 to 65535.")
        if not self.root.startswith("/"):
            raise ConfigError(f"The root {self.root!r} is not an absolute path; write it with a leading slash.")
        self._within("block_size_bytes", MIN_BLOCK_SIZE_BYTES, MAX_BLOCK_SIZE_BYTES, format_size)
        self._within("chunk_size_bytes", 4096, MAX_CHUNK_BYTES, format_size)
        self._within("replicas", 1, 99)
        self._within("window", 1, 64)
        self._within("master_connections", 1, 64)
        self._within("idle_worker_connections", 0, 4096)
        for name in (
            "connect_timeout_s",
            "rpc_timeout_s",
            "data_timeout_s",
            "retry_max_s",
            "retry_min_sleep_s",
            "retry_max_sleep_s",
            "close_timeout_s",
            "worker_idle_s",
        ):
            self._within(name, 0.001, 86400.0)

    def _within(self, name: str, low: float, high: float, show: Callable[[int | float], str] | None = None) -> None:
        value = getattr(self, name)
        if not low <= value <= high:
            write = show or (lambda number: f"{number:g}")
            raise ConfigError(f"{name} is {write(value)}; it must lie between {write(low)} and {write(high)}.")

    def with_overrides(self, **overrides: Any) -> ClientConfig:
        """A copy with fields replaced, by their names here or in a URL; an override of ``None`` is left out."""
        return dataclasses.replace(self, **_typed(overrides, "setting"))

    @property
    def masters_text(self) -> str:
        """``host:port,host:port`` for messages and URLs."""
        return ",".join(f"[{host}]:{port}" if ":" in host else f"{host}:{port}" for host, port in self.masters)


def _bool(value: object) -> bool:
    if isinstance(value, bool):
        return value
    text = str(value).strip().lower()
    if text in ("1", "true", "yes", "on"):
        return True
    if text in ("0", "false", "no", "off"):
        return False
    raise ConfigError(f"{value!r} is neither true nor false.")


def _int(value: object) -> int:
    try:
        return int(str(value))
    except ValueError:
        raise ConfigError(f"{value!r} is not a whole number.") from None


def _seconds(value: object) -> float:
    if isinstance(value, int | float):
        return float(value)
    return parse_duration(str(value), bare_unit="s")


def _bytes(value: object) -> int:
    return parse_size(value if isinstance(value, int) else str(value))


#: Name in a URL or among overrides -> (field, parser). Fields may be named as they are, too.
_SETTINGS: dict[str, tuple[str, Callable[[object], object]]] = {
    "client_hostname": ("hostname", str),
    "client_name": ("client_name", str),
    "release_version": ("release_version", str),
    "cluster_id": ("cluster_id", str),
    "block_size": ("block_size_bytes", _bytes),
    "chunk_size": ("chunk_size_bytes", _bytes),
    "window": ("window", _int),
    "replicas": ("replicas", _int),
    "short_circuit": ("short_circuit", _bool),
    "master_connections": ("master_connections", _int),
    "idle_worker_connections": ("idle_worker_connections", _int),
    "worker_idle": ("worker_idle_s", _seconds),
    "connect_timeout": ("connect_timeout_s", _seconds),
    "rpc_timeout": ("rpc_timeout_s", _seconds),
    "data_timeout": ("data_timeout_s", _seconds),
    "retry_max": ("retry_max_s", _seconds),
    "retry_min_sleep": ("retry_min_sleep_s", _seconds),
    "retry_max_sleep": ("retry_max_sleep_s", _seconds),
    "close_timeout": ("close_timeout_s", _seconds),
}
_BY_FIELD = {field: (field, parser) for field, parser in _SETTINGS.values()}


def _typed(settings: Mapping[str, object], what: str) -> dict[str, Any]:
    typed: dict[str, Any] = {}
    for name, value in settings.items():
        if value is None:
            continue
        if name in ("masters", "root"):
            typed[name] = value
            continue
        found = _SETTINGS.get(name) or _BY_FIELD.get(name)
        if found is None:
            raise ConfigError(f"There is no {what} {name!r}; known are {', '.join(sorted(_SETTINGS))}.")
        field, parser = found
        try:
            typed[field] = parser(value)
        except ConfigError as error:
            raise ConfigError(f"The {what} {name}={value!r} cannot be used: {error}") from None
    return typed


_HOST_PORT = re.compile(r"(?:\[(?P<v6>[0-9A-Fa-f:.%]+)\]|(?P<host>[^:\[\]/?#@\s]+))(?::(?P<port>\d{1,5}))?", re.ASCII)


def parse_masters(text: str, *, url: str | None = None) -> tuple[tuple[str, int], ...]:
    """``"m1:8995,m2,[::1]:8995"`` as (host, port) pairs; the port is 8995 where none is written."""
    shown = url or text
    masters = []
    for part in text.split(","):
        found = _HOST_PORT.fullmatch(part.strip())
        port = int(found["port"] or DEFAULT_MASTER_PORT) if found else 0
        if found is None or not 0 < port < 65536:
            raise ConfigError(
                f"{shown!r} does not name a master: {part!r} is not host:port. Write it like {URL_EXAMPLE}."
            )
        masters.append((found["v6"] or found["host"], port))
    return tuple(masters)


def parse_url(url: str, *, environ: Mapping[str, str] | None = None, **overrides: Any) -> ClientConfig:
    """Settings from ``curvine://host:port,host:port/root?name=value``, the environment, and overrides.

    The path names the root directory (percent-encoded where needed); query names are those of ``ClientConfig``
    without units: ``client_hostname``, ``block_size=4MB``, ``rpc_timeout=5s``. Raises ConfigError.
    """
    scheme, separator, rest = url.partition("://")
    if not separator or scheme.lower() != "curvine":
        raise ConfigError(f"{url!r} is not a Curvine URL; write it like {URL_EXAMPLE}.")
    rest, _, fragment = rest.partition("#")
    if fragment:
        raise ConfigError(f"{url!r} has a fragment (#{fragment}); write a # inside a path as %23.")
    location, _, query = rest.partition("?")
    authority, slash, path = location.partition("/")
    if not authority:
        raise ConfigError(f"{url!r} names no master; write it like {URL_EXAMPLE}.")
    try:
        root = unquote_to_bytes(slash + path or "/").decode()
        pairs = parse_qsl(query, keep_blank_values=True, strict_parsing=bool(query), errors="strict")
    except UnicodeDecodeError:
        raise ConfigError(f"{url!r} is not UTF-8; Curvine names are.") from None
    except ValueError:
        raise ConfigError(f"The query of {url!r} is not name=value&name=value.") from None
    names = [name for name, _ in pairs]
    if len(set(names)) != len(names):
        raise ConfigError(f"{url!r} gives a setting twice.")
    settings: dict[str, Any] = {}
    from_environment = (os.environ if environ is None else environ).get(_ENV_HOSTNAME)
    if from_environment:
        settings["hostname"] = from_environment
    settings |= _typed(dict(pairs), "setting")
    settings |= _typed(overrides, "setting")
    return ClientConfig(**({"masters": parse_masters(authority, url=url), "root": root} | settings))


def resolve_config(url_or_config: str | ClientConfig, **overrides: Any) -> ClientConfig:
    """The settings that an ``open`` call means: a URL or a ready record, with the caller's overrides on top."""
    if isinstance(url_or_config, ClientConfig):
        return url_or_config.with_overrides(**overrides)
    return parse_url(url_or_config, **overrides)
