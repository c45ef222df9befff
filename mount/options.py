"""What a mount can be told: one frozen record, made from flags and ``-o`` words.

``-o`` takes the words that ``mount(8)`` and ``fstab`` hand to every file system, the mount's own, and the settings of
the client (``client_hostname``, ``rpc_timeout``, ...). A word that would do harm is refused by name, with the reason.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, TypeVar

from curvfs.errors import ConfigError
from curvfs.units import MIB, parse_duration, parse_size
from mount import curvine

T = TypeVar("T")

#: The KV prefix made in the mounted directory when nobody says otherwise.
DEFAULT_KV_PATH = "kv"
#: The directory at the root of a mount in which it tells of itself.
DEFAULT_CONTROL_NAME = ".curvfs"
LOG_TEXT, LOG_JSON = "text", "json"

#: Words of mount(8) and fstab that concern others (or that are always so here); taken and left alone.
# fmt: off
_IGNORED = frozenset({
    "defaults", "auto", "noauto", "user", "nouser", "users", "owner", "group", "_netdev", "nofail", "async",
    "atime", "noatime", "diratime", "nodiratime", "relatime", "norelatime", "lazytime", "nolazytime",
    "default_permissions", "big_writes", "rw", "exec", "suid", "dev",
})
# fmt: on
#: Words that the kernel understands for any file system; handed on.
_PASSED_ON = frozenset({"nosuid", "nodev", "noexec", "sync", "dirsync"})
#: Words of libfuse that would break the mount, and why.
_REFUSED = {
    "max_read": "it makes the kernel end the mount at its first request",
    "nonempty": "an ordinary directory with files in it must not disappear under a mount",
    "auto_unmount": "curvfs unmounts by itself, and clears what a killed mount left at the next start",
    "writeback_cache": "a file could be published before the kernel had written its pages back",
    "kernel_cache": "stale pages of files that other hosts change would be served for ever",
    "auto_cache": "curvfs decides for every file by itself what the kernel may keep",
    "direct_io": "it would forbid mapping files into memory; open files with O_DIRECT instead",
    "hard_remove": "files that are open when they are removed must stay readable",
    "allow_root": "allow_other is what there is",
    "fd": "curvfs opens /dev/fuse by itself",
    "rootmode": "curvfs sets it by itself",
    "user_id": "curvfs sets it by itself",
    "group_id": "curvfs sets it by itself",
    "blksize": "it exists for block devices only",
}
_DURATIONS = {
    "op_timeout": "op_timeout_s",
    "grace": "grace_s",
    "sealed_entry_timeout": "sealed_entry_timeout_s",
    "sealed_attr_timeout": "sealed_attr_timeout_s",
    "attr_timeout": "attr_timeout_s",
    "directory_timeout": "directory_timeout_s",
    "shutdown_timeout": "shutdown_timeout_s",
    "slow_call": "slow_call_s",
}
_SIZES = {"read_ahead": "read_ahead_bytes", "log_size": "log_size_bytes"}
_NUMBERS = {"max_background": "max_background", "log_keep": "log_keep"}
_TEXTS = {"log_file": "log_file", "log_format": "log_format", "ready_file": "ready_file", "conf": "conf"}
_SWITCHES = {"allow_other": "allow_other", "ro": "read_only", "debug": "debug"}


@dataclass(frozen=True, slots=True, kw_only=True)
class MountOptions:
    """Effective settings of one mount.

    ``kv_paths``: directories below the mounted one that are made KV prefixes (``.`` is the mounted one itself).
    ``op_timeout_s`` bounds every request of the kernel. ``grace_s``: how long a private file of a KV prefix stays
    closed before it appears under its own name for everybody. The four cache times say how long the kernel may trust
    a name or attributes: of sealed objects, of ordinary files (their names never), and of directories.
    ``shutdown_timeout_s`` bounds a clean end. ``conf``: a cluster file to read settings from.

    ``control_name``: the directory in which the mount tells of itself, None for none. ``metrics``: where Prometheus may
    ask, as (host, port), None for nowhere. Calls that take longer than ``slow_call_s`` are kept for a look.
    ``ready_file`` exists while the mount answers. ``log_file`` is turned over at ``log_size_bytes``, and ``log_keep``
    old ones are kept; without it warnings go to stderr. ``log_format``: text, or json, one object a line.
    """

    kv_paths: tuple[str, ...] = (DEFAULT_KV_PATH,)
    allow_other: bool = False
    read_only: bool = False
    op_timeout_s: float = 30.0
    grace_s: float = 1.0
    sealed_entry_timeout_s: float = 1.0
    sealed_attr_timeout_s: float = 60.0
    attr_timeout_s: float = 1.0
    directory_timeout_s: float = 1.0
    shutdown_timeout_s: float = 8.0
    max_background: int = 256
    read_ahead_bytes: int = 2 * MIB
    conf: str | None = None
    control_name: str | None = DEFAULT_CONTROL_NAME
    metrics: tuple[str, int] | None = None
    slow_call_s: float = 1.0
    ready_file: str | None = None
    log_file: str | None = None
    log_format: str = LOG_TEXT
    log_size_bytes: int = 10 * MIB
    log_keep: int = 3
    debug: bool = False
    kernel_words: tuple[str, ...] = ()
    client_settings: tuple[tuple[str, str], ...] = ()

    def __post_init__(self) -> None:
        for name in (*_DURATIONS.values(),):
            value = getattr(self, name)
            if not 0 <= value <= 86400:
                raise ConfigError(f"{name} is {value:g}; it must lie between 0 and 86400 seconds.")
        for name in ("op_timeout_s", "shutdown_timeout_s"):
            if getattr(self, name) <= 0:
                raise ConfigError(f"{name} must be above 0, or a lost server would hold callers for ever.")
        if self.log_format not in (LOG_TEXT, LOG_JSON):
            raise ConfigError(f"The log format {self.log_format!r} is not known; it is {LOG_TEXT} or {LOG_JSON}.")
        if self.control_name is not None and (self.control_name in ("", ".", "..") or "/" in self.control_name):
            raise ConfigError(f"control={self.control_name} is no name of a directory; name one, or off for none.")
        for path in self.kv_paths:
            parts = path.strip("/").split("/")
            if path != "." and any(part in ("", ".", "..") for part in parts):
                raise ConfigError(
                    f"{path!r} is not a KV prefix; name a directory below the mounted one, such as kv, or . for itself."
                )

    def with_words(self, words: Iterable[str]) -> MountOptions:
        """A copy with ``-o`` words applied; each item may hold several, separated by commas. Raises ConfigError."""
        taken = _Taken(self)
        for word in (word.strip() for item in words for word in item.split(",")):
            if word:
                taken.take(word)
        return taken.options()


class _Taken:
    """Words as they are read one after the other."""

    def __init__(self, options: MountOptions) -> None:
        self._options = options
        self._changes: dict[str, Any] = {}
        self._kernel = list(options.kernel_words)
        self._client = list(options.client_settings)
        self._kv_paths: list[str] = []

    def options(self) -> MountOptions:
        if self._kv_paths:
            self._changes["kv_paths"] = tuple(self._kv_paths)
        return dataclasses.replace(
            self._options,
            kernel_words=tuple(self._kernel),
            client_settings=tuple(self._client),
            **self._changes,
        )

    def take(self, word: str) -> None:
        name, equals, value = word.partition("=")
        if name in _IGNORED or name.startswith(("x-", "comment")):
            return
        if name in _REFUSED and value != "false":
            raise ConfigError(f"-o {name} is refused: {_REFUSED[name]}.")
        if name in _PASSED_ON:
            self._kernel.append(name)
        elif name in _SWITCHES and not equals:
            self._changes[_SWITCHES[name]] = True
        elif name == "no_kv" and not equals:
            self._changes["kv_paths"] = ()
        elif self._ours(name, value) if equals else False:
            pass
        elif (theirs := curvine.word_for(name, value if equals else None)) is not None:
            for each in theirs:
                self.take(each)
        elif not equals:
            raise ConfigError(f"-o {name} is not an option of a curvfs mount; docs/mount.md lists them.")
        else:
            self._client.append((name, value))

    def _ours(self, name: str, value: str) -> bool:
        """Take a word with a value; False when it is not one of the mount's own."""
        if name in _DURATIONS:
            self._changes[_DURATIONS[name]] = _parsed(name, value, lambda text: parse_duration(text, bare_unit="s"))
        elif name in _SIZES:
            self._changes[_SIZES[name]] = _parsed(name, value, parse_size)
        elif name in _NUMBERS:
            self._changes[_NUMBERS[name]] = _whole(name, value)
        elif name in _TEXTS:
            self._changes[_TEXTS[name]] = value
        elif name == "kv":
            self._kv_paths.append(value)
        elif name == "control":
            self._changes["control_name"] = None if value == "off" else value
        elif name == "metrics":
            self._changes["metrics"] = _address(value)
        else:
            return False
        return True


def _parsed(name: str, value: str, parse: Callable[[str], T]) -> T:
    try:
        return parse(value)
    except ConfigError as error:
        raise ConfigError(f"-o {name}={value} cannot be used: {error}") from None


def _whole(name: str, value: str) -> int:
    if not value.isascii() or not value.isdigit() or not 1 <= int(value) <= 65535:
        raise ConfigError(f"-o {name}={value} is not a whole number from 1 to 65535.")
    return int(value)


def _address(value: str) -> tuple[str, int]:
    """``host:port``, ``:port`` or ``port`` of this machine; without a host the loopback address."""
    host, _, port = value.rpartition(":")
    if not port.isascii() or not port.isdigit() or int(port) > 65535:
        raise ConfigError(f"-o metrics={value} is not host:port; write it like 127.0.0.1:9003.")
    return (host.strip("[]") or "127.0.0.1"), int(port)
