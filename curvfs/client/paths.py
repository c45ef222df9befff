"""Paths as Curvine must see them (specification 4.1).

A master splits paths at ``/`` and does nothing else: ``..``, ``//`` and names of 300 bytes would become entries of
those very names (hazard 8 of section 13). So every path is normalised and checked here before it is sent.
"""

from __future__ import annotations

import posixpath

from curvfs.errors import InvalidPath, NameTooLong

MAX_NAME_BYTES = 255
#: The server's limits, checked there on create only.
MAX_PATH_BYTES = 8000
MAX_COMPONENTS = 1000

#: Characters that make a listing treat a path as a glob pattern (4.13).
_GLOB = frozenset("*?[{\\")
_QUOTED = {"*": "[*]", "?": "[?]", "[": "[[]"}


def normalize(path: str) -> str:
    """``path`` with ``.``, ``..`` and repeated or trailing slashes resolved; the root is ``/``.

    ``..`` is resolved by name: whoever follows symlinks does so before (a mount's kernel does). Above the root is the
    root. Raises InvalidPath (no string, relative, NUL, not UTF-8) and NameTooLong.
    """
    if not isinstance(path, str):
        raise InvalidPath(f"A path is a string such as '/a/b', not {path!r}.")
    if not path.startswith("/"):
        raise InvalidPath(f"The path {path!r} is not absolute; write it with a leading slash.")
    if "\0" in path:
        raise InvalidPath(f"The path {path!r} holds a NUL byte; no name may.")
    parts: list[str] = []
    for part in path.split("/"):
        if part in ("", "."):
            continue
        if part == "..":
            if parts:
                parts.pop()
            continue
        try:
            size_bytes = len(part.encode())
        except UnicodeEncodeError:
            raise InvalidPath(f"The name {part!r} is not UTF-8; Curvine keeps UTF-8 names only.") from None
        if size_bytes > MAX_NAME_BYTES:
            raise NameTooLong(
                f"The name {part[:40]!r}... has {size_bytes} bytes; at most {MAX_NAME_BYTES} are allowed."
            )
        parts.append(part)
    found = "/" + "/".join(parts)
    if len(parts) > MAX_COMPONENTS or len(found.encode()) > MAX_PATH_BYTES:
        raise NameTooLong(
            f"The path {found[:40]!r}... is too long; Curvine takes {MAX_PATH_BYTES} bytes and "
            f"{MAX_COMPONENTS} components."
        )
    return found


def join(root: str, path: str) -> str:
    """``path`` (normalised) below ``root`` (normalised)."""
    if root == "/":
        return path
    return root if path == "/" else root + path


def parent_of(path: str) -> str:
    """The directory that holds ``path``; the root is its own."""
    return posixpath.dirname(path)


def name_of(path: str) -> str:
    """The last component; empty for the root."""
    return posixpath.basename(path)


def is_below(path: str, directory: str) -> bool:
    """Whether ``path`` lies in the tree under ``directory``, which itself does not count."""
    return path != directory and (directory == "/" or path.startswith(directory + "/"))


def looks_like_glob(path: str) -> bool:
    """Whether a master's listing calls would take ``path`` for a pattern."""
    return not _GLOB.isdisjoint(path)


def quote_glob(path: str) -> str:
    """A pattern that matches ``path`` and nothing else, for ListStatus."""
    return "".join(_QUOTED.get(character, character) for character in path)
