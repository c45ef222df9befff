"""Mounts in the simulated world: the real operations on the real client, driven as a kernel would drive them.

Two mounts of one pool serve programs that publish, replace, read and try to write, while servers and mounts are killed
and everything else goes wrong that :mod:`tests.sim.scenario` knows. What must hold:

* a published object never changes: whoever reads it, through whichever mount and descriptor, gets the bytes of one
  publication, all of them, and the same ones again;
* no reader sees a part: under a published name there is a whole object or nothing;
* a name that is published without replacing is had by one, and keeps what it was given;
* nobody opens a published object for writing;
* what is written in place appears elsewhere whole, or not at all;
* every request ends by its deadline, and once the faults have stopped all of them work.
"""

from __future__ import annotations

import errno
import os
from collections import Counter
from collections.abc import Awaitable, Callable
from types import SimpleNamespace
from typing import Any, TypeVar

import pyfuse3
import trio

from curvfs.errors import CurvfsError
from curvfs.simworld import SimWorld, run
from curvfs.world import Random
from mount.inodes import ROOT_ID
from mount.operations import Operations
from mount.options import MountOptions
from mount.session import prepare_pool
from tests.sim.model import Published
from tests.sim.scenario import Outcome, Plan, calm, trouble
from tests.sim.stage import SERVER, SimServer, client_config, connected

T = TypeVar("T")

OP_TIMEOUT_S = 12.0
#: What a request may take beyond its deadline: work that is finished shielded.
_GRACE_S = 6.0
_SIZES = (1, 4096, 5000, 64 * 1024, 200_000, 1024 * 1024 + 1)
#: Few, so that writers meet.
_ONCE_NAMES, _OVER_NAMES = 12, 2


class Gone(Exception):
    """The mount's process is dead: ENOTCONN for whoever waits for it."""


class _NoCache:
    """No kernel, no page cache: nothing is dirty there."""

    def write_back(self, node_id: int) -> None:
        pass

    def process_of(self, thread_id: int) -> int | None:
        return thread_id


class SimMount:
    """One mount: a process that serves until it is killed or told to end, and the kernel in front of it."""

    def __init__(
        self, world: SimWorld, machine: str, masters: tuple[tuple[str, int], ...], short_circuit: bool
    ) -> None:
        self._world = world
        self._machine = machine
        self.is_local = machine == SERVER and short_circuit
        self._config = client_config(masters=masters, short_circuit=short_circuit)
        self._ready = trio.Event()
        self._stop = trio.Event()
        self.process = world.host(machine)
        self.operations: Operations | None = None

    async def run(self) -> None:
        """Serve; whenever the process is killed, another one takes its place."""
        while not self._stop.is_set():
            self.process = self._world.host(self._machine)
            await self.process.run(self._serve, self.process)
            self.operations = None
            if self._ready.is_set():
                self._ready = trio.Event()
            if not self._stop.is_set():
                self._world.faults.fired["mount_kill"] += 1
                await self._world.clock.sleep(self._world.random.uniform(0.1, 2))

    async def _serve(self, process: SimWorld) -> None:
        options = MountOptions(kv_paths=(".",), op_timeout_s=OP_TIMEOUT_S, grace_s=0.5, control_name=None)
        async with connected(process, self._config) as fs:
            while True:
                try:
                    table = await prepare_pool(fs, "/pool", options)
                    break
                except CurvfsError:
                    await process.clock.sleep(0.5)
            operations = self.operations = Operations(fs, table, _NoCache(), options)
            self._ready.set()
            publisher = operations.publisher
            while not self._stop.is_set():
                try:
                    await publisher.tick()
                except CurvfsError:
                    pass
                await process.clock.sleep(0.1)
            await publisher.materialise_all()
            await operations.readers.close()
            for scratch in publisher.scratches():
                await scratch.remove()

    def stop(self) -> None:
        self._stop.set()

    async def wait_ready(self) -> None:
        while not self._ready.is_set():
            await self._ready.wait()

    async def call(self, name: str, *arguments: Any) -> Any:
        """One request of the kernel. Raises OSError with what it was answered, or Gone."""
        operations, process, clock = self.operations, self.process, self._world.clock
        if operations is None or not process.alive:
            raise Gone
        results: list[Any] = []

        async def request() -> None:
            answer = await getattr(operations, name)(*arguments)
            # The bytes of a read are good until the next one.
            results.append(bytes(answer) if name == "read" else answer)

        began_s = clock.monotonic_s() - self._world.process.stood_still_s
        error: OSError | None = None
        try:
            await process.run(request)
        except pyfuse3.FUSEError as raised:
            error = OSError(raised.errno, f"{name}: {os.strerror(raised.errno)}")
        took_s = clock.monotonic_s() - self._world.process.stood_still_s - began_s
        assert took_s <= OP_TIMEOUT_S + _GRACE_S, f"{name} took {took_s:.1f} s"
        if error is not None:
            raise error
        if not results:
            raise Gone
        return results[0]


class Kernel:
    """System calls of one thread on one mount, as the kernel makes requests of them. It keeps no names."""

    def __init__(self, mount: SimMount, thread_id: int) -> None:
        self.mount = mount
        self._context = SimpleNamespace(pid=thread_id, uid=0, gid=0, umask=0o022)

    async def _lookup(self, name: str) -> int:
        return int((await self.mount.call("lookup", ROOT_ID, name.encode(), self._context)).st_ino)

    async def _forget(self, node_id: int) -> None:
        try:
            await self.mount.call("forget", [(node_id, 1)])
        except Gone:
            pass

    async def open(self, name: str, flags: int) -> int:
        """A handle. An OPEN that is answered ESTALE is tried once more with a fresh lookup."""
        for last in (False, True):
            try:
                node_id = await self._lookup(name)
            except OSError as error:
                if error.errno != errno.ENOENT or not flags & os.O_CREAT:
                    raise
                info, entry = await self.mount.call("create", ROOT_ID, name.encode(), 0o100644, flags, self._context)
                await self._forget(entry.st_ino)
                return int(info.fh)
            try:
                info = await self.mount.call("open", node_id, flags & ~os.O_CREAT, self._context)
                return int(info.fh)
            except OSError as error:
                if error.errno != errno.ESTALE or last:
                    raise
            finally:
                await self._forget(node_id)
        raise AssertionError("unreachable")

    async def close(self, handle: int) -> None:
        """What a close asks for first; the release comes whatever is said to that."""
        try:
            await self.mount.call("flush", handle)
        finally:
            await self.release(handle)

    async def release(self, handle: int) -> None:
        try:
            await self.mount.call("release", handle)
        except Gone:
            pass

    async def rename(self, old: str, new: str, flags: int = 0) -> None:
        for name in (old, new):
            try:
                await self._forget(await self._lookup(name))
            except OSError as error:
                if error.errno != errno.ENOENT or name == old:
                    raise
        await self.mount.call("rename", ROOT_ID, old.encode(), ROOT_ID, new.encode(), flags, self._context)

    async def unlink(self, name: str) -> None:
        await self.mount.call("unlink", ROOT_ID, name.encode(), self._context)


class Book:
    """What names may hold. ``once`` names are published without replacing; ``over`` and ``plain`` ones again and
    again, the latter in place."""

    def __init__(self) -> None:
        self.once = Published()
        self.attempts: dict[str, list[bytes]] = {}

    def check(self, name: str, content: bytes, *, own_mount: bool) -> None:
        """What was read. A file that is written in place may be seen unfinished on the mount of its writer."""
        if name.startswith("once"):
            self.once.check(name, content)
        elif name.startswith("over") or not own_mount:
            assert content in self.attempts.get(name, []), f"{name} reads as {len(content)} bytes that nobody wrote"


class Program:
    """One thread that does all sorts of things on one mount."""

    def __init__(self, world: SimWorld, mount: SimMount, number: int, book: Book) -> None:
        self._world = world
        self._random = world.random
        self._number = number
        self._book = book
        self._next = 0
        self.kernel = Kernel(mount, 1000 + number)
        self.calm = False
        self.outcomes: Counter[str] = Counter()

    async def work(self, turns: int) -> None:
        for _ in range(turns):
            await self._one(
                self._random.choices(
                    (self.publish_once, self.publish_over, self.read, self.write_published, self.write_plain),
                    (3, 4, 6, 1, 1),
                )[0]
            )

    async def _one(self, action: Callable[[], Awaitable[None]]) -> None:
        name = action.__name__
        try:
            await action()
            self.outcomes[name] += 1
        except Gone:
            assert not self.calm, f"{name}: the mount is gone although nobody kills it any more"
            self.outcomes[f"{name}: gone"] += 1
            await self.kernel.mount.wait_ready()
        except OSError as error:
            assert not self.calm, f"{name} failed although there are no faults any more: {error}"
            self.outcomes[f"{name}: {errno.errorcode.get(error.errno or 0)}"] += 1

    def _content(self) -> bytes:
        self._next += 1
        size = self._random.choice(_SIZES)
        mark = b"%d/%d/" % (self._number, self._next)
        return (mark + Random(f"{self._number}/{self._next}").randbytes(size))[:size] if size > 64 else mark

    async def _write(self, name: str, content: bytes) -> None:
        handle = await self._written(name, content)
        await self.kernel.close(handle)

    async def _written(self, name: str, content: bytes) -> int:
        """A handle through which all was written; it is closed when that fails."""
        handle = await self.kernel.open(name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        try:
            for start in range(0, len(content), 128 * 1024):
                piece = content[start : start + 128 * 1024]
                assert await self.kernel.mount.call("write", handle, start, piece) == len(piece)
            if self._random.random() < 0.2:
                await self.kernel.mount.call("fsync", handle, False)
            if self._random.random() < 0.2:
                await self.kernel.mount.call("flush", handle)  # of a dup that is closed
        except BaseException:
            await self.kernel.release(handle)
            raise
        return handle

    async def publish_once(self) -> None:
        name = f"once-{self._random.randrange(_ONCE_NAMES)}"
        staging, content = f"{name}.{self._number}.tmp", self._content()
        await self._write(staging, content)
        self._book.once.maybe(name, content)
        try:
            await self.kernel.rename(staging, name, pyfuse3.RENAME_NOREPLACE)
        except OSError as error:
            if error.errno != errno.EEXIST:
                raise
            self._book.once.lost(name, content)
            await self.kernel.unlink(staging)
        else:
            self._book.once.won(name, content)

    async def publish_over(self) -> None:
        """Several writers use one staging name, as the worst of them do."""
        name = f"over-{self._random.randrange(_OVER_NAMES)}"
        staging = f"{name}.tmp" if self._random.random() < 0.5 else f"{name}.{self._number}.tmp"
        content = self._content()
        self._book.attempts.setdefault(name, []).append(content)
        handle = await self._written(staging, content)
        try:
            await self.kernel.mount.call("flush", handle)
            if self._random.random() < 0.4:  # the release comes late, or the descriptor is held across the rename
                await self.kernel.rename(staging, name)
                return
        finally:
            await self.kernel.release(handle)
        await self._world.clock.sleep(self._random.choice((0, 0, 0.1)))
        await self.kernel.rename(staging, name)

    async def write_plain(self) -> None:
        name = f"plain-{self._number}"
        content = self._content()
        self._book.attempts.setdefault(name, []).append(content)
        await self._write(name, content)

    async def write_published(self) -> None:
        """A published object is not opened for writing, by nobody."""
        name = self._random.choice([*self._book.once.certain, ""])
        if not name:
            return
        flags = self._random.choice((os.O_WRONLY, os.O_RDWR, os.O_WRONLY | os.O_TRUNC))
        try:
            handle = await self.kernel.open(name, flags)
        except OSError as error:
            if self.calm:
                assert error.errno == errno.EPERM, error
            return
        await self.kernel.close(handle)
        raise AssertionError(f"{name} was published, and could be opened for writing")

    async def read(self) -> None:
        names = [*self._book.once.paths(), *self._book.attempts]
        if not names:
            return
        await self.check(self._random.choice(names))

    async def check(self, name: str) -> None:
        """Read a name twice through one descriptor, with a pause; the bytes are those of one publication. Where blocks
        are not local, a reader may be told that its file was replaced by another mount, but never gets other bytes."""
        try:
            await self._check(name)
        except OSError as error:
            if error.errno != errno.ESTALE or name.startswith("once") or self.kernel.mount.is_local:
                raise
            self.outcomes["read: replaced elsewhere"] += 1

    async def _check(self, name: str) -> None:
        try:
            handle = await self.kernel.open(name, os.O_RDONLY)
        except OSError as error:
            if error.errno == errno.ENOENT and name not in self._book.once.certain:
                return
            raise
        try:
            content = await self._read_all(handle)
            await self._world.clock.sleep(self._random.choice((0, 0, 0.5)))
            again = await self._read_all(handle)
        finally:
            await self.kernel.close(handle)
        self._book.check(name, content, own_mount=not self._reads_elsewhere(name))
        if not name.startswith("plain"):
            assert again == content, f"{name} changed under its reader"

    def _reads_elsewhere(self, name: str) -> bool:
        """Is what a program of the other mount writes in place read here? (Odd and even numbers.)"""
        return name.startswith("plain") and int(name.rpartition("-")[2]) % 2 != self._number % 2

    async def _read_all(self, handle: int) -> bytes:
        pieces = []
        offset = 0
        while piece := await self.kernel.mount.call("read", handle, offset, 128 * 1024):
            pieces.append(piece)
            offset += len(piece)
        return b"".join(pieces)


def run_mount_seed(seed: int) -> Outcome:
    """Run one seed. An exception says what went wrong, and carries notes with the seed and the last events."""
    random = Random(f"{seed}/mounts")
    plan = Plan(
        kind="mounts",
        turns=random.choice((3, 6, 12)),
        places=(("one", True), (SERVER, True)),
        masters=random.choice((1, 1, 2)),
        victim=random.random() < 0.5,
        rots=False,
        pause_s=random.choice((0.5, 1.0, 3.0)),
    )
    return run(one_run, plan, seed=seed)


async def one_run(world: SimWorld, plan: Plan) -> Outcome:
    server = SimServer(world, masters=plan.masters)
    calls: Counter[str] = Counter()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(server.run)
        await server.wait_up()
        mounts = [SimMount(world, machine, server.masters, local) for machine, local in plan.places]
        for mount in mounts:
            nursery.start_soon(mount.run)
            await mount.wait_ready()
        book = Book()
        programs = [Program(world, mounts[number % 2], number, book) for number in range(4)]
        async with trio.open_nursery() as troubles:
            troubles.start_soon(trouble, world, server, plan)
            if plan.victim:
                troubles.start_soon(_kill_mounts, world, mounts)
            await _work(programs, plan.turns)
            troubles.cancel_scope.cancel()
        calm(world, server)
        for mount in mounts:
            mount.process.process.kill_at_call = None
        await server.wait_up()
        await world.clock.sleep(40)
        for mount in mounts:
            await mount.wait_ready()
        for program in programs:
            program.calm = True
        await _check_all(programs, book)
        await _work(programs, 3)
        await world.clock.sleep(2)  # what was written in place has its name by now
        await _check_all(programs, book)
        for program in programs:
            calls.update(program.outcomes)
        for mount in mounts:
            mount.stop()
        await world.clock.sleep(20)
        for mount in mounts:
            assert not mount.process.net.open_streams(), mount.process.net.open_streams()
            assert not mount.process.disk.open_paths(), mount.process.disk.open_paths()
        nursery.cancel_scope.cancel()
    return Outcome(world.trace.digest, world.faults.fired, calls, world.clock.monotonic_s())


async def _work(programs: list[Program], turns: int) -> None:
    async with trio.open_nursery() as nursery:
        for program in programs:
            nursery.start_soon(program.work, turns)


async def _check_all(programs: list[Program], book: Book) -> None:
    for name in [*book.once.paths(), *book.attempts]:
        for program in programs[:2]:
            await program.check(name)


async def _kill_mounts(world: SimWorld, mounts: list[SimMount]) -> None:
    while True:
        await world.clock.sleep(world.random.expovariate(1 / 3))
        mount = world.random.choice(mounts)
        if mount.operations is not None:
            mount.process.kill_at(world.random.randint(1, 200))
