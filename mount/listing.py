"""Open directories: listings in pages, in bounded memory, with offsets that hold while names come and go.

An offset counts the entries given so far. The kernel goes on where it stopped, which costs nothing, or steps back
within the last answers, whose names are remembered. A page is fetched anew, from the last name given, when this mount
has changed the directory since, or when it is old: a stale page would bring removed names back.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from curvfs.api import CurvineFileSystem, FileStatus
from mount.inodes import Node, NodeTable
from mount.naming import Naming
from mount.publish import Publisher

PAGE_ENTRIES = 1000
#: After a change within a listing the next pages are small: whoever lists and removes by turns fetches little twice.
_SMALL_PAGE_ENTRIES = 128
_PAGE_LIFE_S = 1.0
#: Offsets that can be returned to exactly; the kernel never steps back further than one answer.
_REMEMBERED = 4096
_CHECKPOINT_EVERY = 1000


@dataclass(frozen=True, slots=True)
class Listed:
    """One entry: its name, the node, and the offset behind it."""

    name: str
    node: Node
    next_offset: int


@dataclass(frozen=True, slots=True)
class _Mark:
    """Where a listing was: the offset, the last name given, and whether the store's names were all given."""

    offset: int
    name: str
    store_done: bool


class DirectoryHandle:
    """One open directory."""

    def __init__(
        self, fs: CurvineFileSystem, table: NodeTable, naming: Naming, publisher: Publisher, directory: Node
    ) -> None:
        self._fs = fs
        self._clock = fs.world.clock
        self._table = table
        self._naming = naming
        self._publisher = publisher
        self.directory = directory
        self._rewind()

    def _rewind(self) -> None:
        self._position = 0
        self._after = ""
        self._forget_page()
        self._page_entries = PAGE_ENTRIES
        self._store_done = False
        #: Name of a private file -> the offset it was given at: the store may list the same name.
        self._private_given: dict[str, int] = {}
        self._remembered: deque[_Mark] = deque(maxlen=_REMEMBERED)
        self._checkpoints: list[_Mark] = [_Mark(0, "", False)]

    async def seek(self, offset: int) -> None:
        """Go to an offset given before; 0 begins anew."""
        if offset == 0:
            self._rewind()
        elif offset < self._position:
            self._step_back(offset)
        while self._position < offset and (entry := await self.peek()) is not None:
            self.take(entry)

    def _step_back(self, offset: int) -> None:
        """Return to a remembered offset, or to the last checkpoint before it."""
        mark = next((mark for mark in self._remembered if mark.offset == offset), None)
        if mark is None:
            mark = self._checkpoints[offset // _CHECKPOINT_EVERY]
        while self._remembered and self._remembered[-1].offset > mark.offset:
            self._remembered.pop()
        del self._checkpoints[mark.offset // _CHECKPOINT_EVERY + 1 :]
        self._private_given = {name: at for name, at in self._private_given.items() if at <= mark.offset}
        self._position, self._after, self._store_done = mark.offset, mark.name, mark.store_done
        self._forget_page()

    async def peek(self) -> Listed | None:
        """The next entry, None at the end. It stays the next one until it is taken."""
        if not self._store_done:
            status = await self._next_of_store()
            if status is not None:
                private = self._publisher.privates.newest((self.directory, status.name))
                node = self._naming.seen(status, self.directory, status.name) if private is None else private.node
                return Listed(status.name, node, self._position + 1)
            self._store_done = True
            self._after = ""
        # Names that only this mount shows come last.
        for name in self._publisher.privates.names_in(self.directory):
            if name > self._after and name not in self._private_given:
                private = self._publisher.privates.newest((self.directory, name))
                if private is not None:
                    return Listed(name, private.node, self._position + 1)
        return None

    def take(self, entry: Listed) -> None:
        """The entry was given to the kernel."""
        self._position = entry.next_offset
        self._after = entry.name
        mark = _Mark(entry.next_offset, entry.name, self._store_done)
        self._remembered.append(mark)
        if entry.next_offset % _CHECKPOINT_EVERY == 0:
            self._checkpoints.append(mark)
        if self._page and self._page[0].name == entry.name:
            self._page.popleft()
        if entry.node.private is not None:
            self._private_given[entry.name] = entry.next_offset

    async def _next_of_store(self) -> FileStatus | None:
        while True:
            await self._freshen()
            while self._page and not self._naming.is_listed(self.directory, self._page[0].name):
                self._after = self._page.popleft().name
            if self._page:
                return self._page[0]
            if self._page_is_last:
                return None

    def _forget_page(self) -> None:
        self._page: deque[FileStatus] = deque()
        self._page_is_last = False
        self._page_changes = -1
        self._page_time_s = 0.0

    async def _freshen(self) -> None:
        """Have a page that starts behind the last name given and that nothing has made stale."""
        now_s = self._clock.monotonic_s()
        changes = self.directory.changes
        fetched = self._page_changes >= 0
        stale = changes != self._page_changes or now_s - self._page_time_s > _PAGE_LIFE_S
        if fetched and not stale and (self._page or self._page_is_last):
            return
        if fetched and self._page:
            self._page_entries = _SMALL_PAGE_ENTRIES
        elif fetched:
            self._page_entries = min(PAGE_ENTRIES, self._page_entries * 2)
        path = self._table.path(self.directory)
        page = await self._fs.list(path, start_after=self._after, limit=self._page_entries)
        self._page = deque(page)
        self._page_is_last = len(page) < self._page_entries
        self._page_changes = changes
        self._page_time_s = now_s
