"""Directory listings in pages (specification 4.13)."""

from __future__ import annotations

from collections import deque
from typing import Self

from curvfs.client import convert, paths
from curvfs.client.mastercalls import MasterCalls
from curvfs.client.records import FileStatus
from curvfs.errors import NotADirectory
from curvfs.wire.messages import pb


class Pages:
    """An async iterator over the pages of a listing. It holds nothing that must be closed: just stop iterating."""

    def __init__(self, calls: MasterCalls, full_path: str, shown_path: str, page_size: int, start_after: str) -> None:
        self._calls = calls
        self._full_path = full_path
        self._shown_path = shown_path
        self._page_size = page_size
        self._after = start_after
        self._begun = False
        self._ended = False
        #: Entries got at once, because the call that lists a directory like this one has no pages.
        self._waiting: deque[FileStatus] | None = None

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> list[FileStatus]:
        if not self._begun:
            self._begun = True
            await self._begin()
        page = [] if self._ended else await self._next()
        if not page:
            raise StopAsyncIteration
        return page

    async def _begin(self) -> None:
        """A listing of a file would be the file itself; of a path that could be a pattern, whatever matches."""
        if not (await self._calls.status(self._full_path, doing="list")).is_dir:
            raise NotADirectory(f"Cannot list {self._full_path}: it is not a directory.")
        if paths.looks_like_glob(self._full_path):
            after = self._after.encode()
            entries = await self._calls.list_status(paths.quote_glob(self._full_path))
            named = {entry.name.encode(): entry for entry in entries if entry.name.encode() > after}
            self._waiting = deque(self._record(named[name].name, named[name]) for name in sorted(named))

    async def _next(self) -> list[FileStatus]:
        if self._waiting is not None:
            return [self._waiting.popleft() for _ in range(min(self._page_size, len(self._waiting)))]
        entries = await self._calls.list_options(self._full_path, self._after, self._page_size)
        self._ended = len(entries) < self._page_size
        if entries:
            self._after = entries[-1].name
        return [self._record(entry.name, entry) for entry in entries]

    def _record(self, name: str, status: pb.FileStatusProto) -> FileStatus:
        return convert.file_status(status, paths.join(self._shown_path, f"/{name}"))
