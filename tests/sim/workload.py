"""What the clients of a simulated run do, and the checks that go with every call."""

from __future__ import annotations

from collections import Counter
from collections.abc import Awaitable, Callable
from typing import TypeVar

import trio

from curvfs.api import CurvineFileSystem
from curvfs.errors import BlockNotFound, CurvfsError, LocalProtocolError, NotFound, RemoteProtocolError
from curvfs.simworld import SimWorld
from tests.sim.model import ABSENT, Move, Name

T = TypeVar("T")

#: A name that somebody may still be waiting to be told of.
_GRACE_S = 1.0
_SIZES = (0, 1, 5000, 64 * 1024, 200_000, 1024 * 1024, 1024 * 1024 + 1, 2_500_000)


class Client:
    """One client and what it knows to be true of its directory."""

    def __init__(self, world: SimWorld, filesystem: CurvineFileSystem, directory: str) -> None:
        self.world = world
        self.filesystem = filesystem
        self.directory = directory
        self.names: dict[str, Name] = {}
        self.moves: list[Move] = []
        self.outcomes: Counter[str] = Counter()
        #: Set when the faults have stopped: from then on nothing may fail.
        self.calm = False
        self._next = 0

    # ------------------------------------------------------------------------------------------------------- calls

    async def _try(
        self, what: str, bound_s: float, call: Callable[[], Awaitable[T]], *, absent: bool = False
    ) -> T | CurvfsError:
        """Make a call. It ends by its deadline; what it raises is one of our errors, and none that blames us.
        ``absent``: that there is no such file may be the answer."""
        began_s = self.world.clock.monotonic_s()
        outcome: T | CurvfsError
        try:
            outcome = await call()
        except CurvfsError as error:
            outcome = error
        took_s = self.world.clock.monotonic_s() - began_s
        assert took_s <= bound_s + _GRACE_S, f"{what} took {took_s:.1f} s, more than {bound_s:.1f} s: {outcome!r}"
        if isinstance(outcome, CurvfsError):
            assert not self.calm or (absent and isinstance(outcome, NotFound)), (
                f"{what} failed although there are no faults any more: {outcome!r}"
            )
            assert not isinstance(outcome, LocalProtocolError | RemoteProtocolError), f"{what}: {outcome!r}"
            self.outcomes[f"{what.split()[0]}: {type(outcome).__name__}"] += 1
        else:
            self.outcomes[what.split()[0]] += 1
        return outcome

    @property
    def _call_s(self) -> float:
        """What one call to the master takes at most."""
        return self.filesystem.config.retry_max_s

    def _data_s(self, size_bytes: int) -> float:
        """What moving so many bytes takes at most: every frame its time, on the first worker or the second try."""
        config = self.filesystem.config
        blocks = size_bytes // config.block_size_bytes + 1
        frames = size_bytes // config.chunk_size_bytes + 2
        return 2 * (config.connect_timeout_s + frames * config.data_timeout_s) + 3 * blocks * self._call_s

    # -------------------------------------------------------------------------------------------------- operations

    async def write(self) -> None:
        """A new file, in pieces."""
        path, content = self._new_path(), self._content()
        name = self.names[path] = Name(path, [ABSENT], [content])
        writer = await self._try(f"create {path}", 3 * self._call_s, lambda: self.filesystem.create(path))
        if isinstance(writer, CurvfsError):
            name.may_hold.append(b"")
            return
        bound_s = self._data_s(len(content))
        view = memoryview(content)
        while len(view):
            piece = view[: self.world.random.randint(1, len(view))]
            outcome = await self._try(f"write {path}", bound_s, lambda piece=piece: writer.write(piece))  # type: ignore[misc]
            if isinstance(outcome, CurvfsError):
                await self._try(f"abort {path}", bound_s, writer.abort)
                return
            view = view[len(piece) :]
        for _ in range(self.world.random.randint(1, 3)):  # a close that failed may be tried again
            outcome = await self._try(f"close {path}", bound_s, writer.close)
            if not isinstance(outcome, CurvfsError):
                name.may_hold, name.unfinished = [content], []
                return
        await self._try(f"abort {path}", bound_s, writer.abort)

    async def write_extent(self) -> None:
        """A new file of one block, through a local descriptor where there is one."""
        path, content = self._new_path(), self._content() or b"x"
        name = self.names[path] = Name(path, [ABSENT, b""], [content])
        bound_s = self._data_s(len(content))
        extent = await self._try(
            f"create_extent {path}", bound_s, lambda: self.filesystem.create_extent(path, len(content))
        )
        if isinstance(extent, CurvfsError):
            return
        local = extent.local
        if local is not None:
            await self.world.threads.run(self.world.disk.pwrite_full, local.fd, content, 0)
        else:
            outcome = await self._try(f"write_extent {path}", bound_s, lambda: extent.write(content, 0))
            if isinstance(outcome, CurvfsError):
                await self._try(f"abort_extent {path}", bound_s, extent.abort)
                return
        outcome = await self._try(f"commit {path}", bound_s, extent.commit)
        if isinstance(outcome, CurvfsError):
            name.may_hold.append(content)
            await self._try(f"abort_extent {path}", bound_s, extent.abort)
        else:
            name.may_hold, name.unfinished = [content], []

    async def read(self) -> None:
        name = self._some_name()
        if name is not None:
            await self.check(name)

    async def check(self, name: Name) -> None:
        """Read a file and compare."""
        reader = await self._try(
            f"open {name.path}", self._call_s, lambda: self.filesystem.open(name.path), absent=True
        )
        if isinstance(reader, NotFound):
            name.check(ABSENT, complete=True)
            return
        if isinstance(reader, CurvfsError):
            return
        try:
            content = await self._try(
                f"read {name.path}",
                self._data_s(reader.length_bytes),
                lambda: reader.read_at(0, reader.length_bytes + 1),
            )
        finally:
            await reader.aclose()
        if isinstance(content, bytes):
            name.check(content, complete=reader.status.is_complete)
        else:
            assert not (name.certain and isinstance(content, BlockNotFound | NotFound)), f"{name.path}: {content!r}"

    async def read_extents(self) -> None:
        """Read a file through its extents, the local ones from their descriptors."""
        name = self._some_name()
        if name is None or not name.certain or name.may_hold[0] is ABSENT:
            return
        bound_s = self._data_s(len(name.may_hold[0]))
        extents = await self._try(f"open_extents {name.path}", bound_s, lambda: self.filesystem.open_extents(name.path))
        if isinstance(extents, CurvfsError):
            assert not isinstance(extents, NotFound), f"{name.path}: {extents!r}"
            return
        content = bytearray(extents.status.length_bytes)
        async with extents:
            for extent in extents.extents:
                start = extent.file_offset_bytes
                view = memoryview(content)[start : start + extent.length_bytes]
                fd = getattr(extent, "fd", None)
                if fd is not None:
                    await self.world.threads.run(self.world.disk.pread_full, fd, view, 0)
                    continue
                outcome = await self._try(
                    f"read_extents {name.path}",
                    bound_s,
                    lambda view=view, start=start: extents.readinto(view, start),  # type: ignore[misc]
                )
                if isinstance(outcome, CurvfsError):
                    return
        name.check(bytes(content), complete=True)

    async def stat(self) -> None:
        name = self._some_name()
        if name is None or not name.certain:
            return
        status = await self._try(
            f"stat {name.path}", self._call_s, lambda: self.filesystem.stat(name.path), absent=True
        )
        held = name.may_hold[0]
        if isinstance(status, NotFound):
            assert held is ABSENT, f"{name.path} is lost"
        elif not isinstance(status, CurvfsError):
            assert held is not ABSENT, f"{name.path} is back"
            assert (status.length_bytes, status.is_complete) == (len(held), True), f"{name.path}: {status}"

    async def rename(self) -> None:
        name = self._some_name()
        if name is None or not name.certain or name.may_hold[0] is ABSENT:
            return
        target = self._new_path()
        content = name.may_hold[0]
        outcome = await self._try(
            f"rename {name.path}", 3 * self._call_s, lambda: self.filesystem.rename(name.path, target)
        )
        if isinstance(outcome, CurvfsError):
            assert not isinstance(outcome, NotFound), f"{name.path}: {outcome!r}"
            name.may_hold = [content, ABSENT]
            self.names[target] = Name(target, [content, ABSENT])
            self.moves.append(Move(name.path, target, content))
        else:
            name.may_hold = [ABSENT]
            self.names[target] = Name(target, [content])

    async def delete(self) -> None:
        name = self._some_name()
        if name is None or not name.certain or name.may_hold[0] is ABSENT:
            return
        outcome = await self._try(f"delete {name.path}", 3 * self._call_s, lambda: self.filesystem.delete(name.path))
        if isinstance(outcome, CurvfsError):
            assert not isinstance(outcome, NotFound), f"{name.path}: {outcome!r}"
            name.may_hold.append(ABSENT)
        else:
            name.may_hold = [ABSENT]

    async def list(self) -> None:
        found = await self._try(f"list {self.directory}", self._call_s, lambda: self.filesystem.list(self.directory))
        if isinstance(found, CurvfsError):
            return
        paths = {status.path for status in found}
        for name in self.names.values():
            if name.certain:
                assert (name.path in paths) == (name.may_hold[0] is not ABSENT), f"{name.path} in {sorted(paths)}"
        assert paths <= set(self.names), f"nobody made {sorted(paths - set(self.names))}"

    async def work(self, turns: int) -> None:
        """Do so many things, one after the other."""
        things = (
            self.write,
            self.write_extent,
            self.read,
            self.read_extents,
            self.stat,
            self.rename,
            self.delete,
            self.list,
        )
        weights = (5, 3, 6, 3, 2, 3, 2, 1)
        for _ in range(turns):
            (thing,) = self.world.random.choices(things, weights)
            await thing()
            await self.world.clock.sleep(self.world.random.expovariate(4))

    async def check_all(self) -> None:
        """Every name reads as it must; a renamed file is at exactly one of its two names."""
        for name in list(self.names.values()):
            await self.check(name)
        for move in self.moves:
            there = [await self.filesystem.exists(path) for path in (move.source, move.target)]
            assert there in ([True, False], [False, True]), f"{move.source} -> {move.target}: {there}"
        await self.list()

    # -------------------------------------------------------------------------------------------------------- names

    def _new_path(self) -> str:
        self._next += 1
        return f"{self.directory}/{self._next:04d}"

    def _content(self) -> bytes:
        size_bytes = self.world.random.choice(_SIZES)
        return self.world.random.randbytes(size_bytes)

    def _some_name(self) -> Name | None:
        return self.world.random.choice(list(self.names.values())) if self.names else None


async def everybody_works(clients: list[Client], turns: int) -> None:
    async with trio.open_nursery() as nursery:
        for client in clients:
            nursery.start_soon(client.work, turns)
