"""Client settings: one frozen record, made from a cluster file, the environment, a ``curvine://`` URL and overrides.

Precedence: defaults < cluster file < environment < URL < overrides. Contradictions and unknown names are refused with
the reason; of a cluster file, which is not ours alone, what does not concern us is passed over. Defaults are our own
where section 6.2 of the wire specification allows it: shorter deadlines and larger chunks.
"""

from __future__ import annotations

import dataclasses
import os
import re
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import parse_qsl, unquote_to_bytes

from curvfs.errors import ConfigError
from curvfs.network import host_port
from curvfs.units import GIB, MIB, format_size, parse_duration, parse_size
from curvfs.world import Disk, World

DEFAULT_MASTER_PORT = 8995
MIN_BLOCK_SIZE_BYTES = MIB
#: Block sizes and lengths are 32-bit numbers on a master: 4 GiB wraps to 0 (specification 4.4, hazard 2 of 13).
MAX_BLOCK_SIZE_BYTES = 4 * GIB - 1
MAX_CHUNK_BYTES = 16 * MIB

URL_EXAMPLE = "curvine://localhost:8995/path"

#: Names of media and of what happens to expired files, as in a cluster file (6.2).
STORAGE_TYPES = ("disk", "mem", "ssd", "hdd", "spdk_disk")
TTL_ACTIONS = ("none", "delete", "free")

ENV_HOSTNAME = "CURVINE_CLIENT_HOSTNAME"
ENV_MASTER_HOSTNAME = "CURVINE_MASTER_HOSTNAME"
ENV_FILE = "CURVINE_CONF_FILE"
ENV_HOME = "CURVINE_HOME"


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientConfig:
    """Effective settings of one client.

    ``masters``: (host, port) of every master of the cluster. ``root``: directory of the Curvine namespace that paths
    are taken below. ``hostname``: our own name, compared with a worker's to decide whether its files may be local,
    and used by the master for placement; empty means this machine's host name. ``client_name``: the writer identity
    of section 4.3; empty means a fresh random one. ``chunk_size_bytes``: data bytes per frame of a block stream, and
    ``window`` such frames are in flight. ``rpc_timeout_s`` bounds one attempt of a master call, ``retry_max_s`` all
    attempts together, ``data_timeout_s`` one exchange with a worker or one call to a local disk. ``close_timeout_s``
    bounds closing.
    ``release_version`` is what servers are told (8.2); empty means ours. ``cluster_id``, when given, is what local
    block files must belong to. ``storage_type``, ``ttl_ms`` and ``ttl_action`` are what new files get (4.20).
    ``failed_worker_ttl_s``: how long a worker that failed a write gets no new blocks. ``metrics_report``: whether the
    master is told our counters, every ``metrics_interval_s``.
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
    storage_type: str = "disk"
    ttl_ms: int = 0
    ttl_action: str = "none"
    failed_worker_ttl_s: float = 600.0
    mount_update_ttl_s: float = 10.0
    metrics_report: bool = False
    metrics_interval_s: float = 60.0

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
            "failed_worker_ttl_s",
            "mount_update_ttl_s",
            "metrics_interval_s",
        ):
            self._within(name, 0.001, 86400.0)
        self._one_of("storage_type", STORAGE_TYPES)
        self._one_of("ttl_action", TTL_ACTIONS)
        if self.ttl_ms < 0:
            raise ConfigError(f"ttl_ms is {self.ttl_ms}; a time to live is 0, for none, or more.")

    def _within(self, name: str, low: float, high: float, show: Callable[[int | float], str] | None = None) -> None:
        value = getattr(self, name)
        if not low <= value <= high:
            write = show or (lambda number: f"{number:g}")
            raise ConfigError(f"{name} is {write(value)}; it must lie between {write(low)} and {write(high)}.")

    def _one_of(self, name: str, known: tuple[str, ...]) -> None:
        if getattr(self, name) not in known:
            raise ConfigError(f"{name} is {getattr(self, name)!r}; known are {', '.join(known)}.")

    def with_overrides(self, **overrides: Any) -> ClientConfig:
        """A copy with fields replaced, by their names here or in a URL; an override of ``None`` is left out."""
        return dataclasses.replace(self, **_typed(overrides, "setting"))

    @property
    def masters_text(self) -> str:
        """``host:port,host:port`` for messages and URLs."""
        return ",".join(host_port(host, port) for host, port in self.masters)


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


def _milliseconds(value: object) -> float:
    """Seconds, from a number of milliseconds or a duration such as ``"2m"``: cluster files hold either (6.2)."""
    if isinstance(value, bool):
        raise ConfigError(f"{value!r} is not a duration.")
    return value / 1000 if isinstance(value, int | float) else parse_duration(str(value), bare_unit="ms")


def _ttl_ms(value: object) -> int:
    return round(_milliseconds(value) * 1000)


def _name(value: object) -> str:
    return str(value).strip().lower()


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
    "storage_type": ("storage_type", _name),
    "ttl": ("ttl_ms", _ttl_ms),
    "ttl_action": ("ttl_action", _name),
    "failed_worker_ttl": ("failed_worker_ttl_s", _seconds),
    "mount_update_ttl": ("mount_update_ttl_s", _seconds),
    "metrics_report": ("metrics_report", _bool),
    "metrics_interval": ("metrics_interval_s", _seconds),
}
_BY_FIELD = {field: (field, parser) for field, parser in _SETTINGS.values()}


def _typed(settings: Mapping[str, object], what: str) -> dict[str, Any]:
    typed: dict[str, Any] = {}
    for name, value in settings.items():
        if value is None:
            continue
        if name in ("masters", "root"):
            typed[name] = parse_masters(value) if name == "masters" and isinstance(value, str) else value
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


@dataclass(frozen=True, slots=True)
class Settings:
    """Effective settings, and for each field where it came from: ``default``, ``file PATH: [section] key``,
    ``environment NAME``, ``URL``, ``override``. ``unused`` are keys of the cluster file that are not for us."""

    config: ClientConfig
    sources: Mapping[str, str]
    unused: tuple[str, ...] = ()


@dataclass(slots=True)
class _Gathered:
    """Field -> value and source; what comes later wins."""

    values: dict[str, Any] = dataclasses.field(default_factory=dict)
    sources: dict[str, str] = dataclasses.field(default_factory=dict)

    def take(self, values: Mapping[str, Any], source: Callable[[str], str]) -> None:
        for name, value in values.items():
            self.values[name] = value
            self.sources[name] = source(name)


def gather_settings(
    url: str | None = None,
    *,
    file: str | None = None,
    environ: Mapping[str, str] | None = None,
    disk: Disk | None = None,
    **overrides: Any,
) -> Settings:
    """All settings together, with where each came from.

    ``url`` may leave the masters out (``curvine:///root``, or None) when a cluster file names them. ``file`` is the
    cluster file; without it that of ``CURVINE_CONF_FILE``, which must be readable, or of ``CURVINE_HOME``, which need
    not be there. Raises ConfigError.
    """
    environ = os.environ if environ is None else environ
    gathered = _Gathered()
    unused: list[str] = []
    path, optional = _cluster_file(file, environ)
    if path is not None:
        document = _read_toml(path, World.real().disk if disk is None else disk, optional)
        if document is not None:
            _take_file(gathered, unused, document, path, environ)
    hostname = environ.get(ENV_HOSTNAME)
    if hostname:
        gathered.take({"hostname": hostname}, lambda _: f"environment {ENV_HOSTNAME}")
    if url is not None:
        from_url = _split_url(url)
        # The file's cluster id says nothing about another cluster.
        if from_url.get("masters", gathered.values.get("masters")) != gathered.values.get("masters"):
            gathered.values.pop("cluster_id", None)
            gathered.sources.pop("cluster_id", None)
        gathered.take(from_url, lambda _: "URL")
    gathered.take(_typed(overrides, "setting"), lambda _: "override")
    if "masters" not in gathered.values:
        where = f"{path} does not either" if path is not None else f"there is no cluster file (set {ENV_FILE})"
        raise ConfigError(
            f"{url!r} names no master, and {where}; write it like {URL_EXAMPLE}."
            if url is not None
            else f"No master is given, and {where}; give a URL such as {URL_EXAMPLE}."
        )
    config = ClientConfig(**gathered.values)
    sources = {field.name: gathered.sources.get(field.name, "default") for field in dataclasses.fields(ClientConfig)}
    return Settings(config, sources, tuple(unused))


def parse_url(url: str, *, environ: Mapping[str, str] | None = None, **overrides: Any) -> ClientConfig:
    """Settings from ``curvine://host:port,host:port/root?name=value``, overrides, the environment and the cluster file
    that it names, see :func:`gather_settings`.

    The path names the root directory (percent-encoded where needed); query names are those of ``ClientConfig``
    without units: ``client_hostname``, ``block_size=4MB``, ``rpc_timeout=5s``. Raises ConfigError.
    """
    return gather_settings(url, environ=environ, **overrides).config


def _split_url(url: str) -> dict[str, Any]:
    """Fields that a URL sets."""
    scheme, separator, rest = url.partition("://")
    if not separator or scheme.lower() != "curvine":
        raise ConfigError(f"{url!r} is not a Curvine URL; write it like {URL_EXAMPLE}.")
    rest, _, fragment = rest.partition("#")
    if fragment:
        raise ConfigError(f"{url!r} has a fragment (#{fragment}); write a # inside a path as %23.")
    location, _, query = rest.partition("?")
    authority, slash, path = location.partition("/")
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
    masters = {"masters": parse_masters(authority, url=url)} if authority else {}
    return {"root": root} | masters | _typed(dict(pairs), "setting")


# ------------------------------------------------------------------------------------------------- the cluster file

#: Key of [client] -> (field, parser); keys with ``_ms`` may leave that out, as older files do, and hold a number of
#: milliseconds or a duration either way.
_CLIENT_KEYS: dict[str, tuple[str, Callable[[object], object]]] = {
    "hostname": ("hostname", str),
    "replicas": ("replicas", _int),
    "block_size": ("block_size_bytes", _bytes),
    "short_circuit": ("short_circuit", _bool),
    "storage_type": ("storage_type", _name),
    "ttl_ms": ("ttl_ms", _ttl_ms),
    "ttl_action": ("ttl_action", _name),
    "conn_timeout_ms": ("connect_timeout_s", _milliseconds),
    "rpc_timeout_ms": ("rpc_timeout_s", _milliseconds),
    "data_timeout_ms": ("data_timeout_s", _milliseconds),
    "rpc_retry_max_duration_ms": ("retry_max_s", _milliseconds),
    "rpc_retry_min_sleep_ms": ("retry_min_sleep_s", _milliseconds),
    "rpc_retry_max_sleep_ms": ("retry_max_sleep_s", _milliseconds),
    "close_timeout_secs": ("close_timeout_s", _seconds),
    "master_conn_pool_size": ("master_connections", _int),
    "block_conn_idle_size": ("idle_worker_connections", _int),
    "block_conn_idle_time_ms": ("worker_idle_s", _milliseconds),
    "failed_worker_ttl_ms": ("failed_worker_ttl_s", _milliseconds),
    "mount_update_ttl_ms": ("mount_update_ttl_s", _milliseconds),
    "metric_report_enable": ("metrics_report", _bool),
    "clean_task_interval_ms": ("metrics_interval_s", _milliseconds),
}
_CLIENT_KEYS |= {name.removesuffix("_ms"): entry for name, entry in _CLIENT_KEYS.items()}
#: Read elsewhere.
_CLIENT_KEYS_ELSEWHERE = ("master_addrs", "enable_block_conn_pool")


def _cluster_file(file: str | None, environ: Mapping[str, str]) -> tuple[str | None, bool]:
    """Which file, and whether it may be missing."""
    if file is not None:
        return file, False
    if environ.get(ENV_FILE):
        return environ[ENV_FILE], False
    if environ.get(ENV_HOME):
        return os.path.join(environ[ENV_HOME], "conf", "curvine-cluster.toml"), True
    return None, False


def _read_toml(path: str, disk: Disk, optional: bool) -> dict[str, Any] | None:
    try:
        return tomllib.loads(disk.read_file(path).decode())
    except FileNotFoundError:
        if optional:
            return None
        raise ConfigError(f"The cluster file {path} does not exist.") from None
    except OSError as error:
        raise ConfigError(f"The cluster file {path} cannot be read: {os.strerror(error.errno or 0)}.") from error
    except ValueError as error:
        raise ConfigError(f"The cluster file {path} is not TOML: {error}.") from error


def _take_file(
    gathered: _Gathered, unused: list[str], document: Mapping[str, Any], path: str, environ: Mapping[str, str]
) -> None:
    """Top-level ``cluster_id``, ``[client]`` with Curvine's names, and ``[curvfs]``, which Curvine passes over, with
    ours; the masters also from ``[journal]`` and ``[master]`` (6.2)."""
    client, ours = _table(document, "client", path), _table(document, "curvfs", path)
    where: dict[str, str] = {}
    values: dict[str, Any] = {}

    def put(field: str, value: Any, key: str) -> None:
        values[field], where[field] = value, f"file {path}: {key}"

    if "cluster_id" in document:
        put("cluster_id", str(document["cluster_id"]), "cluster_id")
    masters, key = _masters_of(document, client, path, environ)
    if masters:
        put("masters", masters, key)
    if not _typed_key(_bool, client.get("enable_block_conn_pool", True), f"{path}: [client] enable_block_conn_pool"):
        put("idle_worker_connections", 0, "[client] enable_block_conn_pool")
    for name, value in client.items():
        known = _CLIENT_KEYS.get(name)
        if known is not None:
            put(known[0], _typed_key(known[1], value, f"{path}: [client] {name}"), f"[client] {name}")
        elif name not in _CLIENT_KEYS_ELSEWHERE:
            unused.append(f"[client] {name}")
    for field, value in _typed(ours, f"setting in [curvfs] of {path}").items():
        put(field, value, f"[curvfs] {field}")
    gathered.take(values, where.__getitem__)


def cluster_table(name: str, file: str, *, disk: Disk | None = None) -> Mapping[str, Any]:
    """A table of a cluster file, empty when it has none of that name. Raises ConfigError."""
    document = _read_toml(file, World.real().disk if disk is None else disk, optional=False)
    return _table(document or {}, name, file)


def _table(document: Mapping[str, Any], name: str, path: str) -> Mapping[str, Any]:
    table = document.get(name, {})
    if not isinstance(table, Mapping):
        raise ConfigError(f"{path}: {name} is not a table; write [{name}].")
    return table


def _typed_key(parser: Callable[[object], Any], value: object, key: str) -> Any:
    try:
        return parser(value)
    except ConfigError as error:
        raise ConfigError(f"{key} = {value!r} cannot be used: {error}") from None


def _masters_of(
    document: Mapping[str, Any], client: Mapping[str, Any], path: str, environ: Mapping[str, str]
) -> tuple[tuple[tuple[str, int], ...], str]:
    """The masters and where they stand: [client] master_addrs, else the hosts of [journal] with the port of [master],
    else [master] itself."""
    master = _table(document, "master", path)
    port = _typed_key(_int, master.get("rpc_port", DEFAULT_MASTER_PORT), f"{path}: [master] rpc_port")

    def addresses(entries: object, key: str, own_port: bool) -> tuple[tuple[str, int], ...]:
        if not isinstance(entries, list) or not all(isinstance(entry, Mapping) for entry in entries):
            raise ConfigError(f'{path}: {key} is not a list of {{ hostname = "...", port = ... }}.')
        return tuple(
            (str(entry.get("hostname", "localhost")), _typed_key(_int, entry.get("port", port), f"{path}: {key}"))
            if own_port
            else (str(entry.get("hostname", "localhost")), port)
            for entry in entries
        )

    found = addresses(client.get("master_addrs", []), "[client] master_addrs", True)
    if found:
        return found, "[client] master_addrs"
    found = addresses(_table(document, "journal", path).get("journal_addrs", []), "[journal] journal_addrs", False)
    if found:
        return found, "[journal] journal_addrs"
    if environ.get(ENV_MASTER_HOSTNAME):
        return ((environ[ENV_MASTER_HOSTNAME], port),), f"[master] (environment {ENV_MASTER_HOSTNAME})"
    if "hostname" in master:
        return ((str(master["hostname"]), port),), "[master] hostname"
    return (), ""


def resolve_config(url_or_config: str | ClientConfig, **overrides: Any) -> ClientConfig:
    """The settings that an ``open`` call means: a URL or a ready record, with the caller's overrides on top. Raises
    ConfigError."""
    if isinstance(url_or_config, ClientConfig):
        return url_or_config.with_overrides(**overrides)
    if not isinstance(url_or_config, str):
        raise ConfigError(
            f"{url_or_config!r} is neither a URL nor settings; write a URL like {URL_EXAMPLE}, or pass a ClientConfig."
        )
    return parse_url(url_or_config, **overrides)
