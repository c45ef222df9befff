"""Modes as people write them: octal, or symbolic as chmod takes them."""

from __future__ import annotations

import re

from curvfs.errors import UsageError

_OCTAL = re.compile(r"[0-7]{1,4}", re.ASCII)
_CLAUSE = re.compile(r"([ugoa]*)((?:[-+=][rwxXst]*)+)", re.ASCII)
_ACTION = re.compile(r"([-+=])([rwxXst]*)", re.ASCII)
_SHIFT = {"u": 6, "g": 3, "o": 0}
_BIT = {"r": 4, "w": 2, "x": 1}


def octal_mode(text: str) -> int | None:
    """The mode that ``text`` is in octal, or None."""
    return int(text, 8) if _OCTAL.fullmatch(text) else None


def changed_mode(text: str, mode: int, *, is_dir: bool) -> int:
    """``mode`` as chmod would make it: ``text`` is ``0644`` or clauses such as ``u+rwX,go-w,a=r``. No clause without
    letters is subject to a umask. Raises UsageError."""
    octal = octal_mode(text)
    if octal is not None:
        return octal
    for clause in text.split(","):
        found = _CLAUSE.fullmatch(clause)
        if found is None:
            raise UsageError(f"{text!r} is no mode; write it like 0644 or u+rwX,go-w.")
        who = set(found[1]) - {"a"} if found[1] and "a" not in found[1] else {"u", "g", "o"}
        for sign, letters in _ACTION.findall(found[2]):
            mode = _apply(mode, who, sign, letters, is_dir)
    return mode


def _apply(mode: int, who: set[str], sign: str, letters: str, is_dir: bool) -> int:
    bits = mask = 0
    for letter in who:
        mask |= 0o7 << _SHIFT[letter]
        for permission in letters:
            if permission == "X" and not (is_dir or mode & 0o111):
                continue
            bits |= _BIT.get("x" if permission == "X" else permission, 0) << _SHIFT[letter]
    if "s" in letters:
        bits |= (0o4000 if "u" in who else 0) | (0o2000 if "g" in who else 0)
    if "t" in letters:
        bits |= 0o1000
    if sign == "+":
        return mode | bits
    if sign == "-":
        return mode & ~bits
    return mode & ~mask | bits
