"""Two writers of one name in every order: ``python -m tests.t4_mount.interleavings``.

Each writer opens the same staging name, writes twice, closes and renames to the same target; there are 252 orders of
these steps. They are gone through for every :class:`Case`: with ``O_TRUNC`` and without, with something left over at
the name, with descriptors that are duplicated, inherited, or held open across the rename, on one mount and on two.
After every step the target is read on both mounts. A model of who shares a file with whom says what may be there.

* What a rename published is a file whose writers had all flushed it, whole, never what was left over, and nothing
  changes it afterwards. Where both writers are threads of their own, it is what the renaming one has written.
* Two mounts that write one ordinary file in place know nothing of each other: whoever comes too late is told so, by
  EPERM, ENOENT, or EIO where the worker had the other's block by then, and not a byte of it reaches what was published.
* Who shares a file with nobody sees no error. Who does shares its fate, as POSIX has it: it is published once
  (ENOENT for the other's rename), not while the other's writes are unflushed (EBUSY), and sealed then (EPERM).
"""

from __future__ import annotations

import argparse
import errno
import itertools
import os
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from tests.t4_mount.mounts import mounted

_TRUNCATE, _SHARE = "truncate", "share"
_NOTHING, _CLOSED, _ORDINARY = "nothing", "closed", "ordinary"
_PLAIN, _TWICE, _CHILD, _HELD = "plain", "dup", "child", "held"
#: By turns: what is held back until the close, and what goes to the store before.
_SIZES = (100, 120_000)
_LEFT = b"L" * 30
_STAGING, _TARGET = "object.tmp", "object"
_WRITES, _CLOSE, _RENAME, _STEPS = (1, 2), 3, 4, 5
#: So many at a time: a rename may wait a second for the release of a descriptor.
_AT_ONCE = 12


def orders(first: int = _STEPS, second: int = _STEPS) -> list[str]:
    """All ways to mix so many steps of one with so many of the other."""
    if first == 0 or second == 0:
        return ["a" * first + "b" * second]
    return ["a" + rest for rest in orders(first - 1, second)] + ["b" + rest for rest in orders(first, second - 1)]


_ORDERS = orders()


@dataclass(frozen=True, slots=True)
class Case:
    """How both writers open, what lies under the name before, what they do with the descriptor, and where."""

    opens: tuple[str, str]
    left: str
    how: str
    mounts: int

    def __str__(self) -> str:
        return f"{'+'.join(self.opens)}, left over: {self.left}, {self.how}, mounts: {self.mounts}"


CASES = [
    Case(opens, left, how, mounts)
    for opens, left, how, mounts in itertools.product(
        ((_TRUNCATE, _TRUNCATE), (_TRUNCATE, _SHARE), (_SHARE, _SHARE)),
        (_NOTHING, _CLOSED, _ORDINARY),
        (_PLAIN, _TWICE, _CHILD, _HELD),
        (1, 2),
    )
]


@dataclass(slots=True, eq=False)
class _File:
    """What the model knows of one file: its bytes, and the writers that have not flushed what they wrote."""

    content: bytearray = field(default_factory=bytearray)
    #: Another writer has truncated it: who goes on writing to it through the other mount may find it gone.
    superseded: bool = False
    #: The one mount on which it is seen, or None.
    only_on: Path | None = None
    writers: set[str] = field(default_factory=set)
    unflushed: set[str] = field(default_factory=set)
    published: bool = False


class _Run:
    """One order of one case."""

    def __init__(
        self, case: Case, order: str, places: Sequence[Path], size: int, holder: Holder, own_threads: bool
    ) -> None:
        self._case = case
        self._order = order
        self._places = places
        self._parts = {"a": b"a" * size, "b": b"b" * (size // 2)}
        self._files: list[_File] = []
        self._of: dict[str, _File] = {}
        self._fds: dict[str, int] = {}
        self._holder = holder
        self._own_threads = own_threads
        self._shown: bytes | None = None
        self.refusals = 0

    def _place(self, who: str) -> Path:
        return self._places[1 if who == "b" and self._case.mounts == 2 else 0]

    def go(self, left: bytes | None) -> None:
        if left is not None:
            self._files.append(_File(bytearray(left), self._places[0] if self._case.left == _CLOSED else None))
        taken = {"a": 0, "b": 0}
        threads = {who: ThreadPoolExecutor(1) for who in "ab"} if self._own_threads else {}
        try:
            for at, who in enumerate(self._order):
                step = taken[who]
                taken[who] += 1
                try:
                    if threads:
                        threads[who].submit(self._step, who, step).result()
                    else:
                        self._step(who, step)
                    self._look()
                except AssertionError as error:
                    raise AssertionError(f"{self._case}: {self._order}, step {at}: {error}") from None
        finally:
            for thread in threads.values():
                thread.shutdown()
            for fd in self._fds.values():
                os.close(fd)
        self._look()

    def _step(self, who: str, step: int) -> None:
        if step == 0:
            self._open(who)
        elif step in _WRITES:
            self._write(who, step)
        elif (step == _CLOSE) != (self._case.how == _HELD):
            # A descriptor that is held is synced with the last write, and closed after the rename.
            self._close(who)
        else:
            self._rename(who)

    def _open(self, who: str) -> None:
        flags = os.O_WRONLY | os.O_CREAT
        truncate = self._case.opens["ab".index(who)] == _TRUNCATE
        self._fds[who] = os.open(self._place(who) / _STAGING, flags | (os.O_TRUNC if truncate else 0), 0o600)
        file = None if truncate else self._newest(who)
        if file is None:
            for other in self._files:
                other.superseded = True
            file = _File(only_on=self._place(who))
            self._files.append(file)
        file.writers.add(who)
        self._of[who] = file

    def _newest(self, who: str) -> _File | None:
        """The file that an open without O_TRUNC finds: the newest of this mount, else what was left over."""
        for file in reversed(self._files):
            if not file.published and file.only_on in (None, self._place(who)):
                return file
        return None

    def _write(self, who: str, step: int) -> None:
        file, part = self._of[who], self._parts[who]
        fd = self._fds[who]
        if self._case.how == _TWICE and step == _WRITES[-1]:
            self._fds[who] = os.dup(fd)
            if not self._try(who, self._late(file), lambda: os.close(fd) is None):
                return
            fd = self._fds[who]
        at = os.lseek(fd, 0, os.SEEK_CUR)
        told = self._late(file) | ({errno.EPERM} if file.published else set())
        if not self._try(who, told, lambda: os.write(fd, part) == len(part)):
            return
        assert not file.published or self._late(file), "a write to a published file succeeded"
        file.content[at : at + len(part)] = part
        file.unflushed.add(who)
        if self._case.how == _HELD and step == _WRITES[-1]:
            self._try(who, self._late(file), lambda: os.fsync(fd) is None)
            file.unflushed.discard(who)

    def _close(self, who: str) -> None:
        fd, file = self._fds.pop(who), self._of[who]
        if self._case.how == _CHILD:
            self._holder.take(fd)
        self._try(who, self._late(file), lambda: os.close(fd) is None)
        file.unflushed.discard(who)

    def _late(self, file: _File) -> set[int]:
        """What a writer may be told that shares an ordinary file with one on another mount, in place."""
        is_apart = self._case.mounts == 2 and (len(file.writers) > 1 or (file.superseded and file.only_on is None))
        return {errno.EPERM, errno.ENOENT, errno.EIO, errno.EBUSY} if is_apart else set()

    def _rename(self, who: str) -> None:
        place, file = self._place(who), self._of[who]
        is_shared = len(file.writers) > 1
        allowed: set[int] = set()
        if file.published and is_shared:
            allowed.add(errno.ENOENT)
        if file.unflushed:
            allowed.add(errno.EBUSY)
        if self._case.left == _ORDINARY and not self._own_threads and any(one.unflushed for one in self._files):
            allowed.add(errno.EBUSY)  # one thread with writes unflushed renames what was there before them
        allowed |= self._late(file)
        ready = [one for one in self._files if one.writers and not one.published and not one.unflushed]
        if self._own_threads and not is_shared and not file.published and file.only_on is not None:
            ready = [file]  # who writes an ordinary file in place may meet the private one of the other first
        if not self._try(who, allowed, lambda: os.rename(place / _STAGING, place / _TARGET) is None):
            return
        found = (place / _TARGET).read_bytes()
        if self._late(file):
            ready = [_File(bytearray(found))]  # how the bytes of the two mix is nobody's promise
        if is_shared and self._case.left == _CLOSED:
            ready += self._files[:1]  # its own is gone or busy; the same process has closed another one there just now
        same = [one for one in ready if bytes(one.content) == found]
        assert same, f"published {_short(found)}, which is none of {[_short(bytes(one.content)) for one in ready]}"
        # One of several equal ones: it does not matter which.
        (file if file in same else same[-1]).published = True
        self._shown = found

    def _try(self, who: str, allowed: set[int], action: object) -> bool:
        try:
            assert callable(action) and action()
        except OSError as error:
            assert error.errno in allowed, f"{who} was told {error}"
            self.refusals += 1
            return False
        return True

    def _look(self) -> None:
        """What was published is there, unchanged, on every mount."""
        for place in self._places:
            try:
                found = (place / _TARGET).read_bytes()
            except FileNotFoundError:
                found = None
            assert found == self._shown, f"{place} shows {_short(found)} instead of {_short(self._shown)}"


class Holder:
    """Another process that is given descriptors, and holds them as a forked child does."""

    _CODE = """
import socket
ours, kept = socket.socket(fileno=0), []
while (got := socket.recv_fds(ours, 1, 1))[0]:
    kept += got[1]
    ours.send(got[0])
"""

    def __init__(self) -> None:
        self._socket, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen([sys.executable, "-I", "-S", "-c", self._CODE], stdin=theirs)
        self._lock = threading.Lock()

    def take(self, fd: int) -> None:
        with self._lock:
            socket.send_fds(self._socket, [b"."], [fd])
            assert self._socket.recv(1) == b"."

    def end(self) -> None:
        self._socket.close()
        self._process.wait()


def _short(content: bytes | None) -> str:
    if content is None:
        return "nothing"
    return " ".join(f"{len(list(run))}{letter!r}" for letter, run in itertools.groupby(content.decode())) or "no bytes"


def leave_over(directory: Path, every: int, start: int) -> None:
    """A directory for every order of every case (a rename that waits keeps others from its directory), and ordinary
    files where they are wanted, which are under their own names when this mount ends."""
    for number, case in enumerate(CASES):
        for at in range(start % every, len(_ORDERS), every):
            place = directory / f"case{number}" / f"{at}"
            place.mkdir(parents=True)
            if case.left == _ORDINARY:
                (place / _STAGING).write_bytes(_LEFT)
                os.utime(place / _STAGING, (0, 0))  # long ago


def run(cases: Sequence[int], places: Sequence[Path], *, every: int = 1, start: int = 0) -> str:
    """Every so many-th order of some cases, below ``places``, one for each mount, where :func:`leave_over` has been."""
    chosen = [(number, at) for number in cases for at in range(start % every, len(_ORDERS), every)]
    holder = Holder()

    def one(number: int, at: int) -> int:
        case = CASES[number]
        below = [place / f"case{number}" / f"{at}" for place in places]
        if case.left == _CLOSED:
            (below[0] / _STAGING).write_bytes(_LEFT)
        run = _Run(case, _ORDERS[at], below, _SIZES[at % 2], holder, own_threads=at % 4 < 2)
        run.go(None if case.left == _NOTHING else _LEFT)
        return run.refusals

    try:
        with ThreadPoolExecutor(_AT_ONCE) as pool:
            refusals = sum(pool.map(lambda each: one(*each), chosen))
    finally:
        holder.end()
    return f"{len(chosen)} orders, {refusals} refusals"


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.t4_mount.interleavings", description=__doc__)
    parser.add_argument("--every", type=int, default=1, help="only every so many-th order (default: all 252)")
    parser.add_argument("--only", default="", help="cases whose description has this in it")
    asked = parser.parse_args(arguments)
    failed = 0
    with (
        tempfile.TemporaryDirectory(prefix="curvfs-orders-", ignore_cleanup_errors=True) as name,
        pair(Path(name), every=asked.every) as places,
    ):
        for number, case in enumerate(CASES):
            if asked.only not in str(case):
                continue
            began_s = time.monotonic()
            try:
                said = run([number], places, every=asked.every)
            except (AssertionError, OSError) as error:
                failed += 1
                said = f"FAILED: {error}"
            print(f"{case}: {said}, in {time.monotonic() - began_s:.1f} s", flush=True)
    return 1 if failed else 0


@contextmanager
def pair(directory: Path, *, every: int = 1, start: int = 0) -> Iterator[list[Path]]:
    """The KV prefixes of two mounts of one pool; the second has another host name and reads through the worker. What
    is closed there stays private for as long as this takes."""
    pool = directory / "pool"
    with mounted(directory, "--embedded", pool, name="a") as first:
        leave_over(first.kv, every, start)
        assert first.stop() == 0
    long = ("--embedded", pool, "-o", "grace=600")
    with (
        mounted(directory, *long, name="a") as first,
        mounted(directory, *long, "--client-hostname", "elsewhere", name="b") as second,
    ):
        yield [first.kv, second.kv]


if __name__ == "__main__":
    sys.exit(main())
