"""The copying itself: one loop between any source and any sink, with progress, verification and a civil Ctrl-C."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, Protocol

from rich.console import Console
from rich.progress import BarColumn, Progress, ProgressColumn, Task, TextColumn, TimeRemainingColumn
from rich.text import Text

from curvfs.errors import CurvfsError, TransportError
from curvfs.units import MIB, format_size
from tools.files.shown import printable
from tools.interrupts import Interrupts

#: What is read and written at a time.
CHUNK_BYTES = 8 * MIB
#: Partial files of at least this size are kept when a copy is interrupted.
RESUMABLE_BYTES = 16 * MIB
#: How much of a partial file is compared with the source before it is gone on with.
_TAIL_BYTES = MIB
#: How much of a name the progress bar shows.
_SHOWN_CHARACTERS = 24


class Source(Protocol):
    """Where bytes come from."""

    #: What messages call it.
    shown: str
    #: None where nobody knows, as with a pipe.
    size_bytes: int | None
    #: Changes whenever the content may have; empty where that cannot be told, and then no partial file is kept.
    identity: str

    def readinto(self, buffer: memoryview, offset_bytes: int) -> int:
        """Bytes from ``offset_bytes`` on; 0 at the end."""

    def unchanged(self) -> bool:
        """Whether it still has the identity that it had when it was opened."""

    def close(self) -> None: ...


class Sink(Protocol):
    """Where bytes go: to a name nobody looks at, and at the end, all at once, to the one that is wanted."""

    shown: str
    #: Where the partial file is, or empty.
    partial: str

    def begin(self) -> int:
        """Open the partial file; how many bytes of it are there already."""

    def restart(self) -> None:
        """Drop what is there, and begin at 0."""

    def write(self, view: memoryview, offset_bytes: int) -> None: ...

    def finish(self) -> None:
        """All is written; nothing is published."""

    def readinto(self, buffer: memoryview, offset_bytes: int) -> int:
        """Bytes of the partial file, as they would be published."""

    def publish(self) -> None:
        """Give it the name that is wanted."""

    def keep(self, *, whole: bool) -> int:
        """Leave the partial file to a later run; how many bytes of it are sure. Not ``whole``: the last write was cut
        off. Never raises CurvfsError. What cannot be gone on with is removed: 0."""

    def discard(self) -> None:
        """Remove the partial file. Never raises CurvfsError."""


class Interrupted(KeyboardInterrupt):
    """Ctrl-C, noticed where nothing was half done."""


@dataclass(slots=True)
class Copied:
    """What one copy did."""

    size_bytes: int
    resumed_bytes: int


class _Sizes(ProgressColumn):
    """``1.0 GiB of 1.9 GiB``, and how fast that goes."""

    def render(self, task: Task) -> Text:
        of = f" of {format_size(task.total)}" if task.total is not None else ""
        speed = f"  {format_size(task.speed)}/s" if task.speed else ""
        return Text(f"{format_size(task.completed)}{of}{speed}", no_wrap=True)


class Copier:
    """Copies one file after the other, with a progress bar where a person looks. A context manager."""

    def __init__(self, *, bar: bool, verify: bool = False) -> None:
        self._verify = verify
        self._buffer = memoryview(bytearray(CHUNK_BYTES))
        self._progress: Progress | None = None
        if bar:
            self._progress = Progress(
                TextColumn("{task.description}", markup=False),
                BarColumn(bar_width=20),
                _Sizes(),
                TimeRemainingColumn(),
                console=Console(file=sys.stderr),
                transient=True,
            )

    def __enter__(self) -> Copier:
        if self._progress is not None:
            self._progress.start()
        return self

    def __exit__(self, *exc: object) -> None:
        if self._progress is not None:
            self._progress.stop()

    def copy(self, source: Source, sink: Sink) -> Copied:
        """Copy all of ``source`` and publish it. Raises CurvfsError, OSError, KeyboardInterrupt; then nothing has been
        published, and what is kept for a later run is told on stderr."""
        resumable = bool(source.identity and sink.partial)
        done = 0
        try:
            with Interrupts() if resumable else nullcontext() as interrupts:
                done = start = self._begin(source, sink)
                with self._task(source, start) as advance:
                    while True:
                        _check(interrupts)
                        count = source.readinto(self._buffer, done)
                        if count == 0:
                            break
                        sink.write(self._buffer[:count], done)
                        done += count
                        advance(count)
                _check(interrupts)
                sink.finish()
                if not source.unchanged() or source.size_bytes not in (None, done):
                    raise CurvfsError(f"{source.shown} changed while it was being copied; copy it again.")
                if self._verify:
                    self._compare(source, sink, 0, done)
                sink.publish()
        except (KeyboardInterrupt, TransportError) as error:
            self._keep(source, sink, whole=isinstance(error, Interrupted))
            raise
        except BaseException:
            sink.discard()
            raise
        return Copied(done, start)

    def _begin(self, source: Source, sink: Sink) -> int:
        done = sink.begin()
        if done and not self._same(source, sink, max(0, done - _TAIL_BYTES), done):
            sink.restart()
            return 0
        return done

    def _keep(self, source: Source, sink: Sink, *, whole: bool) -> None:
        kept = sink.keep(whole=whole)
        if kept:
            of = f" of {source.size_bytes:,}" if source.size_bytes is not None else ""
            print(
                f"curvfs: {kept:,}{of} bytes of {printable(source.shown)} are kept in {printable(sink.partial)}; the "
                "same command goes on from there.",
                file=sys.stderr,
            )

    def _compare(self, source: Source, sink: Sink, start: int, end: int) -> None:
        if not self._same(source, sink, start, end):
            raise CurvfsError(f"What was written to {sink.shown} reads back differently; nothing was published.")

    def _same(self, source: Source, sink: Sink, start: int, end: int) -> bool:
        """Whether bytes [start, end) of both are the same."""
        half = CHUNK_BYTES // 2
        while start < end:
            wanted = min(half, end - start)
            ours, theirs = self._buffer[:wanted], self._buffer[half : half + wanted]
            if _fill(source.readinto, ours, start) != wanted or _fill(sink.readinto, theirs, start) != wanted:
                return False
            if ours != theirs:
                return False
            start += wanted
        return True

    @contextmanager
    def _task(self, source: Source, start: int) -> Iterator[Any]:
        progress = self._progress
        if progress is None:
            yield lambda count: None
            return
        name = printable(source.shown.rstrip("/").rpartition("/")[2])
        shown = name if len(name) <= _SHOWN_CHARACTERS else f"{name[: _SHOWN_CHARACTERS - 1]}…"
        task = progress.add_task(shown, total=source.size_bytes, completed=start)
        try:
            yield lambda count: progress.advance(task, count)
        finally:
            progress.remove_task(task)


def _check(interrupts: Interrupts | None) -> None:
    if interrupts is not None and interrupts.heard:
        raise Interrupted


def _fill(readinto: Any, buffer: memoryview, offset: int) -> int:
    done = 0
    while done < len(buffer):
        count = readinto(buffer[done:], offset + done)
        if count == 0:
            break
        done += count
    return done
