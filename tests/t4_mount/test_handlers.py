"""Handlers of the kernel's requests on a store that breaks or never answers: an errno each, within the deadline."""

from __future__ import annotations

import errno
import inspect
import logging
import os
from collections.abc import AsyncIterator, Awaitable, Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import trio

from curvfs.api import CurvineFileSystem, open_filesystem
from curvfs.errors import ConnectFailed, CurvfsError
from curvfs.server.service import run_server
from curvfs.world import World
from mount.inodes import ROOT_ID
from mount.operations import Operations
from mount.options import MountOptions
from mount.session import prepare_pool

pyfuse3 = pytest.importorskip("pyfuse3")

DEADLINE_S = 0.3
#: Handlers that never ask the store, and those that promise to end without an error.
_ANSWERED_HERE = {"readlink", "opendir", "releasedir", "fsyncdir", "forget", "release"}


class Faulty:
    """A file system whose calls all end in the same way, once it is told so."""

    def __init__(self, fs: Any) -> None:
        self._fs = fs
        self.world: World = fs.world
        self.instead: Callable[[], Awaitable[Any]] | None = None

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._fs, name)
        if not inspect.iscoroutinefunction(found):
            return found

        async def call(*arguments: Any, **named: Any) -> Any:
            return await (found(*arguments, **named) if self.instead is None else self.instead())

        return call


class Never:
    """Instead of a stream that is opened for writing: one whose writes never come back."""

    length_bytes = 0
    takes_whole = has_attributes = False

    def __init__(self) -> None:
        self.asked = trio.Event()

    async def __call__(self) -> Never:
        return self

    async def write_at(self, data: bytes, offset_bytes: int) -> None:
        self.asked.set()
        await trio.sleep_forever()

    async def abort(self) -> None:
        pass


class _NoCache:
    def write_back(self, node_id: int) -> None:
        pass

    def process_of(self, thread_id: int) -> int | None:
        return thread_id


def _context() -> Any:
    return SimpleNamespace(pid=1, uid=0, gid=0, umask=0)


class Kernel:
    """Operations on a real pool whose file system can be made to fail, with a file, a directory and open handles."""

    def __init__(self, operations: Operations, fs: Faulty) -> None:
        self.operations = operations
        self.fs = fs

    async def prepare(self) -> dict[str, tuple[Any, ...]]:
        """Arguments for one call of every handler; those of a handler that needs a dirty file make it so."""
        ops, ctx = self.operations, _context()
        info, entry = await ops.create(ROOT_ID, b"file", 0o644, os.O_RDWR, ctx)
        await ops.write(info.fh, 0, b"x" * 100)
        await ops.flush(info.fh)
        written, _ = await ops.create(ROOT_ID, b"dirty", 0o644, os.O_RDWR, ctx)
        await ops.write(written.fh, 0, b"x" * 100)
        link = await ops.symlink(ROOT_ID, b"link", b"file", ctx)
        await ops.mkdir(ROOT_ID, b"empty", 0o755, ctx)
        directory = await ops.opendir(ROOT_ID, ctx)
        attributes = pyfuse3.EntryAttributes()
        attributes.st_mode = 0o600
        fields = SimpleNamespace(
            update_size=False, update_mode=True, update_uid=False, update_gid=False, update_atime=False,
            update_mtime=False,
        )  # fmt: skip
        file = entry.st_ino
        return {
            "lookup": (ROOT_ID, b"file", ctx),
            "create": (ROOT_ID, b"new", 0o644, os.O_RDWR, ctx),
            "mknod": (ROOT_ID, b"node", 0o100644, 0, ctx),
            "mkdir": (ROOT_ID, b"made", 0o755, ctx),
            "symlink": (ROOT_ID, b"another", b"file", ctx),
            "readlink": (link.st_ino, ctx),
            "unlink": (ROOT_ID, b"link", ctx),
            "rmdir": (ROOT_ID, b"empty", ctx),
            "rename": (ROOT_ID, b"file", ROOT_ID, b"moved", 0, ctx),
            "link": (file, ROOT_ID, b"second", ctx),
            "getattr": (file, ctx),
            "setattr": (file, attributes, fields, None, ctx),
            "statfs": (ctx,),
            "getxattr": (file, b"user.a", ctx),
            "setxattr": (file, b"user.a", b"1", ctx),
            "listxattr": (file, ctx),
            "removexattr": (file, b"user.a", ctx),
            "open": (file, os.O_RDONLY, ctx),
            "read": (info.fh, 0, 10),
            "write": (info.fh, 0, b"y"),
            "flush": (written.fh,),
            "fsync": (written.fh, False),
            "release": (written.fh,),
            "opendir": (ROOT_ID, ctx),
            "readdir": (directory, 2, cast("Any", SimpleNamespace())),
            "releasedir": (directory,),
            "fsyncdir": (directory, False),
            "forget": ([(file, 1)],),
        }


@pytest.fixture
async def kernel(tmp_path: Path) -> AsyncIterator[Kernel]:
    options = MountOptions(kv_paths=(), op_timeout_s=DEADLINE_S, control_name=None)
    async with trio.open_nursery() as nursery:
        server = await nursery.start(partial(run_server, str(tmp_path / "pool"), master_port=0, worker_port=0))
        async with open_filesystem(server.url) as fs:
            table = await prepare_pool(fs, "/", options)
            faulty = Faulty(fs)
            operations = Operations(cast("CurvineFileSystem", faulty), table, _NoCache(), options)
            yield Kernel(operations, faulty)
            for node in table.nodes():
                await operations.publisher.close_files(node)
            await operations.readers.close()
        nursery.cancel_scope.cancel()


def _names() -> list[str]:
    """The coroutines of pyfuse3's Operations that ours answers."""
    return sorted(
        name
        for name, found in vars(Operations).items()
        if inspect.iscoroutinefunction(found) and hasattr(pyfuse3.Operations, name)
    )


async def _errno(call: Awaitable[Any]) -> int:
    try:
        await call
    except pyfuse3.FUSEError as error:
        return int(error.errno)
    return 0


async def test_there_is_a_call_of_every_handler(kernel: Kernel) -> None:
    assert sorted(await kernel.prepare()) == _names()


@pytest.mark.parametrize(
    ("raised", "answered"),
    [
        (RuntimeError("nobody has thought of this"), errno.EIO),
        (KeyError("a bug"), errno.EIO),
        (ExceptionGroup("several", [ValueError("one"), CurvfsError("known", errno_=errno.ENOSPC)]), errno.ENOSPC),
        (CurvfsError("not here", errno_=errno.ENOSYS), errno.EOPNOTSUPP),
        (CurvfsError("no room", errno_=errno.ENOSPC), errno.ENOSPC),
    ],
    ids=lambda found: found if isinstance(found, int) else type(found).__name__,
)
async def test_whatever_is_raised_becomes_an_errno(
    kernel: Kernel, raised: Exception, answered: int, caplog: pytest.LogCaptureFixture
) -> None:
    calls = await kernel.prepare()

    async def fail() -> None:
        raise raised

    kernel.fs.instead = fail
    with caplog.at_level(logging.CRITICAL, logger="curvfs.mount"):
        for name in (
            "lookup",
            "create",
            "mkdir",
            "unlink",
            "rename",
            "getattr",
            "setattr",
            "statfs",
            "open",
            "readdir",
        ):
            assert await _errno(getattr(kernel.operations, name)(*calls[name])) == answered, name
    kernel.fs.instead = None
    assert await _errno(kernel.operations.lookup(*calls["lookup"])) == 0


@pytest.mark.parametrize("name", sorted(set(_names()) - _ANSWERED_HERE - {"flush", "fsync", "write", "read"}))
async def test_a_store_that_never_answers(kernel: Kernel, name: str) -> None:
    calls = await kernel.prepare()
    kernel.fs.instead = trio.sleep_forever
    with trio.fail_after(20 * DEADLINE_S):
        assert await _errno(getattr(kernel.operations, name)(*calls[name])) == errno.ETIMEDOUT
    kernel.fs.instead = None
    assert await _errno(kernel.operations.lookup(*calls["lookup"])) == 0


async def test_what_is_kept_open_is_let_go(kernel: Kernel, monkeypatch: pytest.MonkeyPatch) -> None:
    ops, ctx = kernel.operations, _context()
    info, entry = await ops.create(ROOT_ID, b"file", 0o644, os.O_RDWR, ctx)
    await ops.write(info.fh, 0, b"x" * 100)
    await ops.flush(info.fh)
    await ops.release(info.fh)
    info = await ops.open(entry.st_ino, os.O_RDONLY, ctx)
    assert bytes(await ops.read(info.fh, 0, 10)) == b"x" * 10
    await ops.release(info.fh)
    await ops.readers.let_go()
    assert ops.readers.kept == 1
    monkeypatch.setattr("mount.readers.KEPT_S", 0.0)
    await ops.readers.let_go()
    assert ops.readers.kept == 0
    info = await ops.open(entry.st_ino, os.O_RDONLY, ctx)
    assert bytes(await ops.read(info.fh, 0, 10)) == b"x" * 10
    await ops.release(info.fh)


async def test_what_is_given_up_is_not_waited_for(kernel: Kernel) -> None:
    """A file whose writes do not come back is dropped at once, also where nothing can be cancelled any more."""
    ops = kernel.operations
    calls = await kernel.prepare()
    node = ops.handles[calls["flush"][0]].node
    assert node.writer is not None
    await node.writer.publish(close=True)
    kernel.fs.instead = never = Never()
    assert await ops.write(calls["flush"][0], 0, b"y") == 1
    await never.asked.wait()
    with trio.fail_after(20 * DEADLINE_S):
        assert await _errno(ops.flush(calls["flush"][0])) == errno.ETIMEDOUT
        assert await _errno(ops.write(calls["flush"][0], 0, b"y")) == errno.ETIMEDOUT
        assert await _errno(ops.release(calls["flush"][0])) == errno.ETIMEDOUT
    assert node.writer is None


async def test_a_file_opened_anew_while_others_let_go_of_it(kernel: Kernel, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a read has opened is not closed under it while it still waits for its predecessor to be closed."""
    ops, ctx = kernel.operations, _context()
    await kernel.prepare()
    node = ops.table[(await ops.lookup(ROOT_ID, b"file", ctx)).st_ino]
    old = await ops.readers.fresh(node)
    retire = old.retire

    async def while_others_write() -> None:
        await retire()
        await ops.readers.drop(node)

    monkeypatch.setattr(old, "retire", while_others_write)
    monkeypatch.setattr(old, "same_as", lambda located: False)
    reader = await ops.readers.fresh(node)
    assert reader is not old
    assert bytes(await reader.read(0, 100)) == b"x" * 100


async def test_what_could_not_be_deleted_is_deleted_later(kernel: Kernel, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file that was removed while it was open lies in staging; the store is away when it is closed."""
    monkeypatch.setattr("mount.publish.DELETE_AGAIN_S", 0.0)
    ops, ctx = kernel.operations, _context()
    info, _ = await ops.create(ROOT_ID, b"file", 0o644, os.O_RDWR, ctx)
    await ops.write(info.fh, 0, b"x" * 100)
    await ops.flush(info.fh)
    await ops.unlink(ROOT_ID, b"file", ctx)
    staging = ops.publisher.scratch(ops.table.root).path
    assert len(await kernel.fs.list(staging)) == 2  # and the file that says that somebody lives

    async def fail() -> None:
        raise ConnectFailed("gone")

    kernel.fs.instead = fail
    await ops.release(info.fh)
    await ops.publisher.tick()
    kernel.fs.instead = None
    assert len(await kernel.fs.list(staging)) == 2
    await ops.publisher.tick()
    assert len(await kernel.fs.list(staging)) == 1
