"""What must be true of a file system that is used under faults, kept beside it as it is used.

Every client works below a directory of its own and gives every file a name that was never used before. So after a call
that succeeded we know what a name holds, and after one that failed we know the few things it may hold: the call may
have been executed or not, or be executed later still. Such a name is *uncertain* and is not changed any more.
"""

from __future__ import annotations

from dataclasses import dataclass, field

#: Stands for "no such file" among the things that a name may hold.
ABSENT = None

#: Compared at once.
_CHUNK_BYTES = 4096


@dataclass(slots=True)
class Name:
    """What one name may hold: complete contents, or ABSENT. One entry: it is certain."""

    path: str
    may_hold: list[bytes | None]
    #: A write was cut off: an unfinished file may stand here, with any beginning of the content.
    unfinished: list[bytes] = field(default_factory=list)
    #: It shares its file with another name: what is written to one shows in the other.
    linked: bool = False
    #: Counts the changes, so that somebody else's read can tell whether one came in between.
    version: int = 0

    def now(self, *may_hold: bytes | None, unfinished: list[bytes] | None = None) -> None:
        """The name holds one of these from now on."""
        self.may_hold = list(may_hold)
        self.unfinished = unfinished or []
        self.version += 1

    @property
    def certain(self) -> bool:
        return len(self.may_hold) == 1 and not self.unfinished

    def check(self, content: bytes | None, *, rotten_bits: int = 0) -> None:
        """Compare with what was read (None: there is no such file), of which so many bits may have flipped."""
        if any(_is_same(content, held, rotten_bits) for held in self.may_hold):
            return
        if content is not None and any(_is_beginning(content, whole, rotten_bits) for whole in self.unfinished):
            return
        held = ", ".join(map(describe, self.may_hold))
        raise AssertionError(
            f"{self.path} reads as {describe(content)}, but it must be one of: {held}"
            + (f", or a beginning of: {', '.join(map(describe, self.unfinished))}" if self.unfinished else "")
        )


class Published:
    """Names that several clients publish to, each by renaming a file of its own without replacing: write-once."""

    def __init__(self) -> None:
        self.certain: dict[str, bytes] = {}
        #: What calls that have not returned, or failed, may have published.
        self.possible: dict[str, list[bytes]] = {}

    def paths(self) -> list[str]:
        return list({**self.certain, **self.possible})

    def maybe(self, path: str, content: bytes) -> None:
        """A call to publish begins."""
        self.possible.setdefault(path, []).append(content)

    def won(self, path: str, content: bytes) -> None:
        """It succeeded."""
        assert path not in self.certain, f"{path} was published twice"
        self.certain[path] = content

    def lost(self, path: str, content: bytes) -> None:
        """It was told that the name is taken, so somebody else's call took it."""
        self.possible[path].remove(content)
        assert path in self.certain or self.possible[path], f"{path} was said to be taken, but nobody published there"

    def check(self, path: str, content: bytes | None, *, rotten_bits: int = 0) -> None:
        """Compare with what was read, of which so many bits may have flipped."""
        if path in self.certain:
            assert _is_same(content, self.certain[path], rotten_bits), (
                f"{path} reads as {describe(content)}, but {describe(self.certain[path])} was published there"
            )
        elif content is not None:
            possible = self.possible.get(path, [])
            assert any(_is_same(content, one, rotten_bits) for one in possible), (
                f"{path} reads as {describe(content)}, which nobody published there"
            )


@dataclass(slots=True)
class Move:
    """A rename whose outcome is not known: the content is at exactly one of the two names."""

    source: str
    target: str
    content: bytes


def _is_same(content: bytes | None, held: bytes | None, rotten_bits: int) -> bool:
    if content == held or content is None or held is None or not rotten_bits or len(content) != len(held):
        return content == held
    differing = int.from_bytes(content, "big") ^ int.from_bytes(held, "big")
    return differing.bit_count() <= rotten_bits


def _is_beginning(content: bytes, whole: bytes, rotten_bits: int) -> bool:
    """Whether an unfinished write of ``whole`` may read like this: a beginning, zeros where bytes did not arrive."""
    if len(content) > len(whole):
        return False
    wrong = 0
    for start in range(0, len(content), _CHUNK_BYTES):
        have = content[start : start + _CHUNK_BYTES]
        want = whole[start : start + len(have)]
        if have != want and have.strip(b"\0"):
            wrong += sum(one not in (other, 0) for one, other in zip(have, want, strict=True))
    return wrong <= rotten_bits


def describe(content: bytes | None) -> str:
    if content is None:
        return "no file"
    return f"{len(content)} bytes {content[:4].hex()}..{content[-4:].hex()}"
