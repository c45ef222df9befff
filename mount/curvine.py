"""The flags of Curvine's own mount, ``curvine-fuse``: what each means here, or why it is refused.

``--kebab-case`` flags, the keys of a cluster file's ``[fuse]`` table and ``--client.NAME`` all come through one table.
A flag that tunes how the Rust daemon works inside is taken and left alone, with a note; one that would change what
users see and has no counterpart is refused by name. Nothing is passed over in silence.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from urllib.parse import quote

from curvfs.api import cluster_table
from curvfs.errors import ConfigError, UsageError

#: Flag -> our ``-o`` word, with the value in place of ``{}``.
_SAME = {
    "entry_timeout_ms": "sealed_entry_timeout={}ms",
    "attr_timeout_ms": "attr_timeout={}ms",
    "entry_timeout": "sealed_entry_timeout={}s",
    "attr_timeout": "attr_timeout={}s",
    "max_background": "max_background={}",
    "max_readahead_kb": "read_ahead={}KB",
    "web_port": "metrics=127.0.0.1:{}",
    "conf": "conf={}",
}
#: Flag -> the values that change nothing here, and why there is no other.
_ONLY: dict[str, tuple[tuple[str, ...], str]] = {
    "direct_io": (("false",), "it would forbid mapping files into memory; open files with O_DIRECT instead"),
    "write_back_cache": (("false",), "a file could be published before the kernel had written its pages back"),
    "non_seekable": (("false",), "files here can be read from any place"),
    "check_permission": (("true",), "modes and owners are always checked"),
    "negative_timeout_ms": (("0",), "what another host has just published would stay invisible"),
    "negative_timeout": (("0", "0.0"), "what another host has just published would stay invisible"),
    "mnt_number": (("1",), "start curvfs mount once for each mountpoint"),
    "metrics_enabled": (("true", "false"), "it is true or false"),
    "umask": (("022", "18"), "files have the modes that programs give them"),
}
_REFUSED = {
    "uid": "files belong to whoever made them; what nobody here knows belongs to the user who mounts",
    "gid": "files belong to whoever made them; what nobody here knows belongs to the user who mounts",
    "max_write": "requests of 1 MiB are what there is",
}
# fmt: off
#: Flags that tune the Rust daemon, or a cache of its own that is not needed here.
_LEFT_ALONE = frozenset({
    "io_threads", "worker_threads", "mnt_per_task", "tasks_per_mnt", "clone_fd", "fuse_channel_size",
    "stream_channel_size", "cache_readdir", "congestion_threshold", "node_cache_timeout", "node_cache_size",
    "read_dir_fill_ino", "enable_splice", "path_lock_stripes", "remember", "state_dir", "list_limit",
    "enable_meta_cache", "meta_cache_ttl", "meta_cache_timeout", "meta_cache_capacity", "audit_logging_enabled",
    "open_direct_on_stale", "ac_attr_timeout", "ac_attr_timeout_ms", "big_write",
})
# fmt: on
#: Keys of Curvine's [client] table whose settings have another name here.
_CLIENT_NAMES = {
    "hostname": "client_hostname",
    "conn_timeout": "connect_timeout",
    "rpc_retry_max_duration": "retry_max",
    "rpc_retry_min_sleep": "retry_min_sleep",
    "rpc_retry_max_sleep": "retry_max_sleep",
    "close_timeout_secs": "close_timeout",
    "master_conn_pool_size": "master_connections",
    "block_conn_idle_size": "idle_worker_connections",
    "block_conn_idle_time": "worker_idle",
    "metric_report_enable": "metrics_report",
    "clean_task_interval": "metrics_interval",
}
_PLACES = frozenset({"mnt_path", "fs_path", "master_addrs"})
#: Flags that stand alone on the command line.
_SWITCHES = {"readonly": "ro", "debug": "debug", "d": "debug"}
_SHORT = {"c": "conf", "d": "debug"}


def word_for(name: str, value: str | None) -> list[str] | None:
    """Our ``-o`` words for an option of Curvine's mount; an empty list when it is left alone, None when it is no
    option of Curvine's. Raises ConfigError for one that is refused."""
    name = name.replace("-", "_")
    if name in _SWITCHES:
        return [_SWITCHES[name]] if value in (None, "true") else []
    if name in _LEFT_ALONE:
        return []
    if name in _REFUSED:
        raise ConfigError(f"{name} is refused: {_REFUSED[name]}.")
    if name in _ONLY:
        allowed, reason = _ONLY[name]
        if (value or "true") not in allowed:
            raise ConfigError(f"{name}={value or 'true'} is refused: {reason}.")
        return []
    if name in _SAME and value is not None:
        return [_SAME[name].format(value)]
    return None


def is_left_alone(name: str) -> bool:
    """Does an option of Curvine's mount mean nothing here?"""
    return name.replace("-", "_") in _LEFT_ALONE


@dataclass(frozen=True, slots=True)
class CommandLine:
    """What a command line asks for: what to mount where, ``-o`` words, and the flags that mean nothing here."""

    targets: tuple[str, ...]
    words: tuple[str, ...]
    left_alone: tuple[str, ...]


def read_command_line(arguments: Sequence[str]) -> CommandLine:
    """Take Curvine's flags out of the arguments that ``curvfs mount`` itself does not know.

    ``--mnt-path``, ``--fs-path`` and ``--master-addrs`` make the URL and the mountpoint. Raises UsageError for a flag
    that nobody knows, or that lacks its value."""
    rest = list(arguments)
    targets: list[str] = []
    words: list[str] = []
    left_alone: list[str] = []
    places: dict[str, str] = {}
    while rest:
        flag = rest.pop(0)
        if not flag.startswith("-") or flag == "-":
            targets.append(flag)
            continue
        name, equals, value = flag.lstrip("-").partition("=")
        name = _SHORT.get(name, name) if not flag.startswith("--") else name
        key = name.replace("-", "_")
        if not equals and key not in _SWITCHES:
            if not (_is_known(key) and rest):
                raise UsageError(_unknown(flag, key))
            value = rest.pop(0)
        if key in _PLACES:
            places[key] = value
        elif key.startswith("client."):
            words.append(_client_word(key.removeprefix("client."), value))
        elif (found := word_for(key, value if equals or key not in _SWITCHES else None)) is not None:
            words += found
            if is_left_alone(key):
                left_alone.append(flag.partition("=")[0])
        else:
            raise UsageError(_unknown(flag, key))
    if "master_addrs" in places or "fs_path" in places:
        targets.insert(0, f"curvine://{places.get('master_addrs', '')}{_rooted(places.get('fs_path', '/'))}")
    if "mnt_path" in places:
        targets.append(places["mnt_path"])
    return CommandLine(tuple(targets), tuple(words), tuple(left_alone))


def read_cluster_file(path: str) -> CommandLine:
    """The ``[fuse]`` table of a cluster file, read as Curvine's mount does: what it mounts where, for whoever does not
    say it on the command line, and ``-o`` words. Raises ConfigError, also for a key that is refused."""
    words: list[str] = []
    left_alone: list[str] = []
    places: dict[str, str] = {}
    for key, value in cluster_table("fuse", path).items():
        text = str(value).lower() if isinstance(value, bool) else str(value)
        if key in _PLACES:
            places[key] = text
            continue
        try:
            found = word_for(key, text)
        except ConfigError as error:
            raise ConfigError(f"{path}: [fuse] {error}") from None
        words += found or []
        if found is None or is_left_alone(key):
            left_alone.append(f"[fuse] {key}")
    url = f"curvine://{_rooted(places['fs_path'])}" if "fs_path" in places else "curvine:///"
    return CommandLine((url, places["mnt_path"]) if "mnt_path" in places else (url,), tuple(words), tuple(left_alone))


def complete(given: tuple[str, ...], filed: tuple[str, ...]) -> tuple[str, ...]:
    """URL and mountpoint: what the command line gives, and what a cluster file says of the rest."""
    if len(given) > 1:
        return given
    urls = tuple(each for each in given if "://" in each)
    mountpoints = tuple(each for each in given if "://" not in each)
    return (urls or filed[:1]) + (mountpoints or filed[1:])


def conf_of(words: Sequence[str]) -> str | None:
    """The cluster file that ``-o`` words name, the last one."""
    named = [word.partition("=")[2] for item in words for word in item.split(",") if word.strip().startswith("conf=")]
    return named[-1].strip() if named else None


def _rooted(path: str) -> str:
    return quote("/" + path.lstrip("/"))


def _is_known(key: str) -> bool:
    return key in _PLACES | _LEFT_ALONE | _ONLY.keys() | _REFUSED.keys() | _SAME.keys() or key.startswith("client.")


def _unknown(flag: str, key: str) -> str:
    if _is_known(key):
        return f"{flag} needs a value; see curvfs mount --help."
    return f"No such option: {flag.partition('=')[0]}; see curvfs mount --help."


def _client_word(key: str, value: str) -> str:
    """``--client.rpc-timeout-ms 5000`` as the client's own setting: ``rpc_timeout=5000ms``."""
    plain = key.removesuffix("_ms")
    name = _CLIENT_NAMES.get(plain, plain)
    unit = "ms" if plain != key and value.isdigit() else "s" if key.endswith("_secs") and value.isdigit() else ""
    return f"{name}={value}{unit}"
