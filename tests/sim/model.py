"""What must be true of a file system that is used under faults, kept beside it as it is used.

Every client works below a directory of its own and gives every file a name that was never used before. So after a call
that succeeded we know what a name holds, and after one that failed we know the few things it may hold: the call may
have been executed or not, or be executed later still. Such a name is *uncertain* and is not changed any more.
"""

from __future__ import annotations

from dataclasses import dataclass, field

#: Stands for "no such file" among the things that a name may hold.
ABSENT = None


@dataclass(slots=True)
class Name:
    """What one name may hold: complete contents, or ABSENT. One entry: it is certain."""

    path: str
    may_hold: list[bytes | None]
    #: A write was cut off: an unfinished file may stand here, with any beginning of the content.
    unfinished: list[bytes] = field(default_factory=list)

    @property
    def certain(self) -> bool:
        return len(self.may_hold) == 1 and not self.unfinished

    def check(self, content: bytes | None, *, complete: bool) -> None:
        """Compare with what was read (None: there is no such file)."""
        if any(content == held for held in self.may_hold):
            return
        if content is not None and any(_is_beginning(content, whole) for whole in self.unfinished):
            return
        raise AssertionError(
            f"{self.path} reads as {describe(content)} ({'complete' if complete else 'incomplete'}), "
            f"but it must be one of: {', '.join(describe(held) for held in self.may_hold)}"
            + (f", or a beginning of: {', '.join(map(describe, self.unfinished))}" if self.unfinished else "")
        )


@dataclass(slots=True)
class Move:
    """A rename whose outcome is not known: the content is at exactly one of the two names."""

    source: str
    target: str
    content: bytes


def _is_beginning(content: bytes, whole: bytes) -> bool:
    """Whether an unfinished write of ``whole`` may read like this: a beginning, zeros where bytes did not arrive."""
    return len(content) <= len(whole) and all(have in (want, 0) for have, want in zip(content, whole, strict=False))


def describe(content: bytes | None) -> str:
    if content is None:
        return "no file"
    return f"{len(content)} bytes {content[:4].hex()}..{content[-4:].hex()}"
