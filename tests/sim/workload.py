"""What the clients of a simulated run do, and the checks that go with every call."""

from __future__ import annotations

from collections import Counter
from collections.abc import Awaitable, Callable
from typing import TypeVar

import trio

from curvfs.api import CurvineFileSystem, FileWriter
from curvfs.errors import (
    BlockNotFound,
    CurvfsError,
    FileExists_,
    LocalProtocolError,
    NotFound,
    RemoteError,
    RemoteProtocolError,
)
from curvfs.simworld import SimWorld
from tests.sim.model import ABSENT, Move, Name, Published

T = TypeVar("T")

#: The directory that all clients publish in, and how many names they have there.
PUBLISHED = "/published"
_TARGETS = 6

#: What a call may take beyond its deadline: closing connections, and threads that cannot be interrupted.
_GRACE_S = 1.0
#: Sizes of files, and how often they come: within a frame, several frames, several blocks.
_SIZES = {0: 2, 1: 2, 5000: 8, 64 * 1024: 4, 200_000: 4, 1024 * 1024: 1, 1024 * 1024 + 1: 1, 2_500_000: 1}


class Client:
    """One client and what it knows to be true of its directory."""

    def __init__(self, world: SimWorld, filesystem: CurvineFileSystem, directory: str, published: Published) -> None:
        self.world = world
        self.filesystem = filesystem
        self.directory = directory
        self.published = published
        self.others: list[Client] = []
        self.names: dict[str, Name] = {}
        self.moves: list[Move] = []
        self.outcomes: Counter[str] = Counter()
        #: Set when the faults have stopped: from then on nothing may fail.
        self.calm = False
        self._next = 0

    # ------------------------------------------------------------------------------------------------------- calls

    async def _try(
        self,
        what: str,
        bound_s: float,
        call: Callable[[], Awaitable[T]],
        *,
        answers: tuple[type[CurvfsError], ...] = (),
    ) -> T | CurvfsError:
        """Make a call. It ends by its deadline; what it raises is one of our errors, and none that blames us.
        Errors that are ``answers`` (there is no such file) may come at any time."""
        began_s = self._awake_s()
        outcome: T | CurvfsError
        try:
            outcome = await call()
        except CurvfsError as error:
            outcome = error
        took_s = self._awake_s() - began_s
        assert took_s <= bound_s + _GRACE_S, f"{what} took {took_s:.1f} s, more than {bound_s:.1f} s: {outcome!r}"
        if not isinstance(outcome, CurvfsError):
            self.outcomes[what.split()[0]] += 1
            return outcome
        calm = self.calm and not isinstance(outcome, answers)
        assert not calm, f"{what} failed although there are no faults any more: {outcome!r}"
        assert not isinstance(outcome, LocalProtocolError | RemoteProtocolError), f"{what}: {outcome!r}"
        self.outcomes[f"{what.split()[0]}: {type(outcome).__name__}"] += 1
        return outcome

    def _awake_s(self) -> float:
        """The time, without that for which a slow disk held up the whole process: nothing can end by then."""
        return self.world.clock.monotonic_s() - self.world.process.stood_still_s

    async def _local(self, function: Callable[..., object], *args: object) -> object:
        """Use a local descriptor, as kvstore does. A fault of the disk is returned."""
        try:
            return await self.world.threads.run(function, *args)
        except OSError as error:
            assert not self.calm
            return error

    @property
    def _rotten_bits(self) -> int:
        """How many bits may differ in what is read: those that flipped on the server's disk. (Nothing on the way from
        there has checksums; those who need them, as kvstore does, put them into their files.)"""
        return self.world.faults.fired["rot"]

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

    # ----------------------------------------------------------------------------------------------------- writing

    async def write(self) -> None:
        """A new file, in pieces."""
        path = self._new_path()
        name = self.names[path] = Name(path, [ABSENT])
        await self._write(name, self._content())

    async def overwrite(self) -> None:
        """Another file in place of one that is there."""
        name = self._some_file()
        if name is not None:
            await self._write(name, self._content(), overwrite=True)

    async def append(self) -> None:
        """More bytes at the end of a file."""
        name = self._some_file()
        if name is None:
            return
        old, more = self._held(name), self._content()
        name.now(old, unfinished=[old + more])
        writer = await self._try(
            f"open_for_write {name.path}",
            3 * self._call_s,
            lambda: self.filesystem.open_for_write(name.path, append=True),
        )
        if not isinstance(writer, CurvfsError):
            await self._fill(name, writer, more, old + more)

    async def truncate(self) -> None:
        """Cut a file, or extend it with zeros."""
        name = self._some_file()
        if name is None:
            return
        old = self._held(name)
        length_bytes = self.world.random.choice((0, len(old) // 2, len(old), len(old) + 5000))
        new = old[:length_bytes].ljust(length_bytes, b"\0")
        name.now(old, new)
        outcome = await self._try(
            f"truncate {name.path}",
            self._data_s(max(len(old), len(new))) + 3 * self._call_s,
            lambda: self.filesystem.truncate(name.path, length_bytes),
        )
        if not isinstance(outcome, CurvfsError):
            name.now(new)

    async def _write(self, name: Name, content: bytes, *, overwrite: bool = False, doomed: bool = False) -> None:
        path = name.path
        name.now(*name.may_hold, b"", unfinished=[content])
        writer = await self._try(
            f"create {path}", 3 * self._call_s, lambda: self.filesystem.create(path, overwrite=overwrite)
        )
        if not isinstance(writer, CurvfsError):
            name.now(b"", unfinished=[content])
            await self._fill(name, writer, content, content, doomed=doomed)

    async def _fill(self, name: Name, writer: FileWriter, piece: bytes, whole: bytes, *, doomed: bool = False) -> None:
        """Write in pieces and close; from then on the file holds ``whole``. ``doomed``: it is deleted in between."""
        bound_s = self._data_s(len(whole))
        view = memoryview(piece)
        answers: tuple[type[CurvfsError], ...] = ()
        try:
            while len(view):
                some = view[: self.world.random.randint(1, len(view))]
                taken = await self._try(
                    f"write {name.path}",
                    bound_s,
                    lambda some=some: writer.write(some),  # type: ignore[misc]
                    answers=answers,
                )
                if isinstance(taken, CurvfsError):
                    break
                view = view[len(some) :]
                if doomed and not answers:
                    name.may_hold.append(ABSENT)
                    if isinstance(await self._delete(name.path), CurvfsError):
                        break
                    name.now(ABSENT)
                    answers = (RemoteError,)
            else:
                for _ in range(self.world.random.randint(1, 3)):  # a close that failed may be tried again
                    closed = await self._try(f"close {name.path}", bound_s, writer.close, answers=answers)
                    if not isinstance(closed, CurvfsError):
                        assert not doomed, f"{name.path} was deleted, and yet closed like a file"
                        name.now(whole)
                        return
        finally:
            if not writer.closed and self.world.alive:
                began_s = self._awake_s()
                await writer.abort()
                assert self._awake_s() - began_s <= bound_s + _GRACE_S, f"abort {name.path} took long"

    async def _delete(self, path: str) -> CurvfsError | None:
        return await self._try(f"delete {path}", 3 * self._call_s, lambda: self.filesystem.delete(path))

    async def write_and_delete(self) -> None:
        """A new file that is deleted while it is written."""
        path = self._new_path()
        name = self.names[path] = Name(path, [ABSENT])
        await self._write(name, self._content() or b"x", doomed=True)

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
        outcome: object
        try:
            if local is not None:
                outcome = await self._local(self.world.disk.pwrite_full, local.fd, content, 0)
            else:
                outcome = await self._try(f"write_extent {path}", bound_s, lambda: extent.write(content, 0))
            if not isinstance(outcome, CurvfsError | OSError):
                name.may_hold.append(content)
                outcome = await self._try(f"commit {path}", bound_s, extent.commit)
                if not isinstance(outcome, CurvfsError):
                    name.now(content)
        finally:
            if self.world.alive:
                await extent.abort()

    async def publish(self) -> None:
        await self.publish_as(str(self.world.random.randrange(_TARGETS)), self._content())

    async def publish_as(self, key: str, content: bytes) -> None:
        """Write a file and rename it to a name that others want, too."""
        target, path = f"{PUBLISHED}/{key}", self._new_path()
        name = self.names[path] = Name(path, [ABSENT])
        await self._write(name, content)
        if not name.certain:
            return
        name.now(content, ABSENT)
        self.published.maybe(target, content)
        outcome = await self._try(
            f"publish {target}",
            3 * self._call_s,
            lambda: self.filesystem.rename(path, target, replace=False),
            answers=(FileExists_,),
        )
        if isinstance(outcome, FileExists_):
            name.now(content)
            self.published.lost(target, content)
        elif isinstance(outcome, CurvfsError):
            assert not isinstance(outcome, NotFound), f"{path}: {outcome!r}"
        else:
            name.now(ABSENT)
            self.published.won(target, content)

    # ----------------------------------------------------------------------------------------------------- reading

    async def read(self) -> None:
        name = self._some_name()
        if name is not None:
            await self.check(name)

    async def check(self, name: Name) -> None:
        """Read a file and compare."""
        content = await self._read(name.path)
        if not isinstance(content, CurvfsError):
            name.check(content, rotten_bits=self._rotten_bits)
        else:
            assert not (name.certain and isinstance(content, BlockNotFound | NotFound)), f"{name.path}: {content!r}"

    async def _read(self, path: str, *, changing: bool = False) -> bytes | CurvfsError | None:
        """The content of a file, ABSENT when there is none, or the error. While somebody changes it, that it went away
        under the read is an answer, too."""
        reader = await self._try(f"open {path}", self._call_s, lambda: self.filesystem.open(path), answers=(NotFound,))
        if isinstance(reader, NotFound):
            return ABSENT
        if isinstance(reader, CurvfsError):
            return reader
        try:
            return await self._try(
                f"read {path}",
                self._data_s(reader.length_bytes),
                lambda: reader.read_at(0, reader.length_bytes + 1),
                answers=(BlockNotFound,) if changing else (),
            )
        finally:
            await reader.aclose()

    async def read_published(self) -> None:
        path = f"{PUBLISHED}/{self.world.random.randrange(_TARGETS)}"
        certain = path in self.published.certain
        content = await self._read(path)
        if not isinstance(content, CurvfsError) and (certain or content is not ABSENT):
            self.published.check(path, content, rotten_bits=self._rotten_bits)

    async def read_others(self) -> None:
        """Read a file of another client; it must be right if it was not changed meanwhile."""
        name = self.world.random.choice(self.others)._some_name()
        if name is None or not name.certain:
            return
        version = name.version
        content = await self._read(name.path, changing=True)
        if name.version != version:
            return
        if not isinstance(content, CurvfsError):
            name.check(content, rotten_bits=self._rotten_bits)
        else:
            assert not isinstance(content, BlockNotFound | NotFound), f"{name.path}: {content!r}"

    async def read_extents(self) -> None:
        """Read a file through its extents, the local ones from their descriptors."""
        name = self._some_file()
        if name is None:
            return
        bound_s = self._data_s(len(self._held(name)))
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
                outcome: object
                if fd is not None:
                    outcome = await self._local(self.world.disk.pread_full, fd, view, 0)
                else:
                    outcome = await self._try(
                        f"read_extents {name.path}",
                        bound_s,
                        lambda view=view, start=start: extents.readinto(view, start),  # type: ignore[misc]
                    )
                if isinstance(outcome, CurvfsError | OSError):
                    return
        name.check(bytes(content), rotten_bits=self._rotten_bits)

    async def stat(self) -> None:
        name = self._some_name()
        if name is None or not name.certain:
            return
        status = await self._try(
            f"stat {name.path}", self._call_s, lambda: self.filesystem.stat(name.path), answers=(NotFound,)
        )
        held = name.may_hold[0]
        if isinstance(status, NotFound):
            assert held is ABSENT, f"{name.path} is lost"
        elif not isinstance(status, CurvfsError):
            assert held is not ABSENT, f"{name.path} is back"
            assert (status.length_bytes, status.is_complete) == (len(held), True), f"{name.path}: {status}"

    async def list(self) -> None:
        found = await self._try(
            f"list {self.directory}", 2 * self._call_s, lambda: self.filesystem.list(self.directory)
        )
        if isinstance(found, CurvfsError):
            return
        paths = {status.path for status in found}
        for name in self.names.values():
            if name.certain:
                assert (name.path in paths) == (name.may_hold[0] is not ABSENT), f"{name.path} in {sorted(paths)}"
        assert paths <= set(self.names), f"nobody made {sorted(paths - set(self.names))}"

    # ------------------------------------------------------------------------------------------------------- names

    async def rename(self) -> None:
        name = self._some_file()
        if name is None:
            return
        target, content = self._new_path(), self._held(name)
        name.now(content, ABSENT)
        self.names[target] = Name(target, [content, ABSENT])
        outcome = await self._try(
            f"rename {name.path}", 3 * self._call_s, lambda: self.filesystem.rename(name.path, target)
        )
        if isinstance(outcome, CurvfsError):
            assert not isinstance(outcome, NotFound), f"{name.path}: {outcome!r}"
            self.moves.append(Move(name.path, target, content))
        else:
            name.now(ABSENT)
            self.names[target].now(content)

    async def link(self) -> None:
        name = self._some_file()
        if name is None:
            return
        target, content = self._new_path(), self._held(name)
        other = self.names[target] = Name(target, [content, ABSENT], linked=True)
        name.linked = True
        outcome = await self._try(
            f"link {name.path}", 4 * self._call_s, lambda: self.filesystem.link(name.path, target)
        )
        if not isinstance(outcome, CurvfsError):
            other.now(content)
        else:
            assert not isinstance(outcome, NotFound), f"{name.path}: {outcome!r}"

    async def set_attr(self) -> None:
        name = self._some_file()
        if name is None:
            return
        xattrs = {"user.sim": self.world.random.randbytes(8)}
        outcome = await self._try(
            f"set_attr {name.path}", 3 * self._call_s, lambda: self.filesystem.set_attr(name.path, xattrs=xattrs)
        )
        if not isinstance(outcome, CurvfsError):
            status = await self._try(f"stat {name.path}", self._call_s, lambda: self.filesystem.stat(name.path))
            assert isinstance(status, CurvfsError) or status.xattrs == xattrs, f"{name.path}: {status}"

    async def delete(self) -> None:
        name = self._some_file(linked=True)
        if name is None:
            return
        name.now(self._held(name), ABSENT)
        outcome = await self._delete(name.path)
        if isinstance(outcome, CurvfsError):
            assert not isinstance(outcome, NotFound), f"{name.path}: {outcome!r}"
        else:
            name.now(ABSENT)

    # --------------------------------------------------------------------------------------------------------- all

    async def work(self, turns: int) -> None:
        """Do so many things, one after the other."""
        things: dict[Callable[[], Awaitable[None]], int] = {
            self.write: 5,
            self.write_and_delete: 1,
            self.write_extent: 3,
            self.overwrite: 2,
            self.append: 2,
            self.publish: 3,
            self.read: 5,
            self.read_others: 3,
            self.read_published: 2,
            self.read_extents: 3,
            self.stat: 2,
            self.rename: 3,
            self.delete: 2,
            self.truncate: 2,
            self.link: 1,
            self.set_attr: 1,
            self.list: 1,
        }
        for _ in range(turns):
            (thing,) = self.world.random.choices(list(things), list(things.values()))
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
        for path in self.published.paths():
            content = await self._read(path)
            assert not isinstance(content, CurvfsError)
            self.published.check(path, content, rotten_bits=self._rotten_bits)

    def _new_path(self) -> str:
        self._next += 1
        return f"{self.directory}/{self._next:04d}"

    def _content(self) -> bytes:
        (size_bytes,) = self.world.random.choices(list(_SIZES), list(_SIZES.values()))
        return self.world.random.randbytes(size_bytes)

    def _some_name(self) -> Name | None:
        return self.world.random.choice(list(self.names.values())) if self.names else None

    def _some_file(self, *, linked: bool = False) -> Name | None:
        """A name that certainly holds a file; one that shares it with another name only if asked for."""
        files = [
            name
            for name in self.names.values()
            if name.certain and name.may_hold[0] is not ABSENT and (linked or not name.linked)
        ]
        return self.world.random.choice(files) if files else None

    @staticmethod
    def _held(name: Name) -> bytes:
        content = name.may_hold[0]
        assert content is not None
        return content


async def everybody_publishes(clients: list[Client], keys: int) -> None:
    """All at once, to one name after the other."""
    for key in range(keys):
        async with trio.open_nursery() as nursery:
            for client in clients:
                content = client.world.random.randbytes(client.world.random.randint(1, 5000))
                nursery.start_soon(client.publish_as, f"race-{key}", content)


async def everybody_works(clients: list[Client], turns: int) -> None:
    async with trio.open_nursery() as nursery:
        for client in clients:
            nursery.start_soon(client.work, turns)
