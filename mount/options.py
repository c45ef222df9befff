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
from curvfs.units import parse_duration, parse_size

T = TypeVar("T")

#: The KV prefix made in the mounted directory when nobody says otherwise.
DEFAULT_KV_PATH = "kv"

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
}


@dataclass(frozen=True, slots=True, kw_only=True)
class MountOptions:
    """Effective settings of one mount.

    ``kv_paths``: directories below the mounted one that are made KV prefixes (``.`` is the mounted one itself).
    ``op_timeout_s`` bounds every request of the kernel. ``grace_s``: how long a private file of a KV prefix stays
    closed before it appears under its own name for everybody. The four cache times say how long the kernel may trust
    a name or attributes: of sealed objects, of ordinary files (their names never), and of directories.
    ``shutdown_timeout_s`` bounds a clean end.
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
    read_ahead_bytes: int = 1024 * 1024
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
        for path in self.kv_paths:
            parts = path.strip("/").split("/")
            if path != "." and any(part in ("", ".", "..") for part in parts):
                raise ConfigError(
                    f"{path!r} is not a KV prefix; name a directory below the mounted one, such as kv, or . for itself."
                )

    def with_words(self, words: Iterable[str]) -> MountOptions:
        """A copy with ``-o`` words applied; each item may hold several, separated by commas. Raises ConfigError."""
        changes: dict[str, Any] = {}
        kernel: list[str] = list(self.kernel_words)
        client: list[tuple[str, str]] = list(self.client_settings)
        for word in (word.strip() for item in words for word in item.split(",")):
            name, equals, value = word.partition("=")
            if not word or name in _IGNORED or name.startswith(("x-", "comment")):
                continue
            if name in _REFUSED:
                raise ConfigError(f"-o {name} is refused: {_REFUSED[name]}.")
            if name in _PASSED_ON:
                kernel.append(name)
            elif name == "allow_other":
                changes["allow_other"] = True
            elif name == "ro":
                changes["read_only"] = True
            elif not equals:
                raise ConfigError(f"-o {name} is not an option of a curvfs mount; docs/mount.md lists them.")
            elif name in _DURATIONS:
                changes[_DURATIONS[name]] = _parsed(name, value, lambda text: parse_duration(text, bare_unit="s"))
            elif name == "max_background":
                changes["max_background"] = _whole(name, value)
            elif name == "read_ahead":
                changes["read_ahead_bytes"] = _parsed(name, value, parse_size)
            else:
                client.append((name, value))
        return dataclasses.replace(self, kernel_words=tuple(kernel), client_settings=tuple(client), **changes)


def _parsed(name: str, value: str, parse: Callable[[str], T]) -> T:
    try:
        return parse(value)
    except ConfigError as error:
        raise ConfigError(f"-o {name}={value} cannot be used: {error}") from None


def _whole(name: str, value: str) -> int:
    if not value.isascii() or not value.isdigit() or not 1 <= int(value) <= 65535:
        raise ConfigError(f"-o {name}={value} is not a whole number from 1 to 65535.")
    return int(value)
