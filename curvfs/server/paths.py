"""Paths as a master sees them, and the glob patterns of ListStatus (specification sections 4.1 and 4.13)."""

from __future__ import annotations

import re

from curvfs.server.refusals import INVALID_PATH, common, refusal

MAX_PATH_BYTES = 8000
MAX_DEPTH = 1000
MAX_NAME_BYTES = 255

#: A path with one of these is a glob pattern if it is a valid one.
_GLOB_CHARACTERS = frozenset("*?[{\\")


def split(path: str) -> list[str]:
    """The components of an absolute path; none for the root. ``.`` and ``..`` are names like others here."""
    if not path.startswith("/"):
        raise common(f"Absolute path required, but got {path}")
    if path == "/":
        return []
    if path.endswith("/"):
        raise common(f"Path {path} is invalid")
    return path[1:].split("/")


def split_new(path: str, doing: str) -> list[str]:
    """The components of a path that is about to get an entry. Names that no POSIX client could reach afterwards are
    refused: empty ones, ``.`` and ``..``, those with NUL and those over 255 bytes (section 13, item 8)."""
    if len(path) * 4 > MAX_PATH_BYTES and len(path.encode()) > MAX_PATH_BYTES:
        raise common(f"{doing}: Path too long, limit {MAX_PATH_BYTES} characters")
    names = split(path)
    if len(names) > MAX_DEPTH:
        raise common(f"{doing}: Path too long, limit {MAX_DEPTH} components")
    for name in names:
        if name in ("", ".", "..") or "\0" in name:
            raise refusal(INVALID_PATH, f"{doing}: {path!r} has a component that cannot be a name")
        if len(name) * 4 > MAX_NAME_BYTES and len(name.encode()) > MAX_NAME_BYTES:
            raise refusal(INVALID_PATH, f"{doing}: Path too long, a component has more than {MAX_NAME_BYTES} bytes")
    return names


def parent_of(path: str) -> str:
    """The path of the directory that holds ``path``."""
    return path.rpartition("/")[0] or "/"


def join(directory: str, name: str) -> str:
    return f"/{name}" if directory == "/" else f"{directory}/{name}"


def is_below(path: str, directory: str) -> bool:
    """Whether ``path`` lies under ``directory`` (not: is it)."""
    return path.startswith("/" if directory == "/" else f"{directory}/") and path != directory


def glob_components(path: str) -> list[re.Pattern[str] | str] | None:
    """The components of a glob, literal ones as text; None for a path that is no (valid) pattern.

    ``*``, ``?`` and ``[...]`` are special, ``{`` and ``\\`` are literal; there are no escapes: ``[*]`` quotes.
    """
    if not _GLOB_CHARACTERS.intersection(path):
        return None
    components: list[re.Pattern[str] | str] = []
    for name in split(path):
        expression = _expression(name)
        if expression is None:
            return None
        components.append(name if expression == re.escape(name) else re.compile(expression, re.DOTALL))
    return components


def _expression(name: str) -> str | None:
    """One component as a regular expression; None when it is not a valid pattern."""
    if "**" in name and name != "**":
        return None
    expression = ""
    index = 0
    while index < len(name):
        character = name[index]
        index += 1
        if character == "*":
            expression += ".*"
        elif character == "?":
            expression += "."
        elif character == "[":
            negated = name[index : index + 1] == "!"
            start = index + negated
            end = name.find("]", start + 1)
            if end < 0:
                return None
            expression += _character_class(name[start:end], negated)
            index = end + 1
        else:
            expression += re.escape(character)
    return expression.replace(".*.*", ".*")


def _character_class(content: str, negated: bool) -> str:
    """``[...]`` with its ranges; an empty range (``z-a``) matches nothing."""
    parts = ""
    index = 0
    while index < len(content):
        first = content[index]
        if index + 2 < len(content) and content[index + 1] == "-":
            last = content[index + 2]
            if first <= last:
                parts += f"{re.escape(first)}-{re.escape(last)}"
            index += 3
        else:
            parts += re.escape(first)
            index += 1
    if not parts:
        return "." if negated else "(?!)"
    return f"[{'^' if negated else ''}{parts}]"
