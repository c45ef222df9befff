"""One mount from beginning to end: connect, prepare the pool, mount, serve, and leave nothing behind."""

from __future__ import annotations

import errno
import logging
import os
import signal
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from types import FrameType
from typing import TYPE_CHECKING

import trio

from curvfs.api import ClientConfig, CurvineFileSystem, EmbeddedServer, FileStatus, open_filesystem, parse_url
from curvfs.errors import (
    CurvfsError,
    DeadlineExceeded,
    EnvironmentError_,
    FileExists_,
    NotADirectory,
    NotFound,
    UsageError,
)
from curvfs.world import Disk, World
from mount import kernel, loop
from mount.inodes import NodeTable
from mount.options import DEFAULT_KV_PATH, MountOptions
from mount.readers import KEPT_S
from mount.readiness import Readiness
from mount.scratch import BEAT_INTERVAL_S, DEAD_AFTER_S, Scratch
from mount.seal import KV_XATTR, is_prefix

if TYPE_CHECKING:
    from mount.operations import Operations
    from mount.report import Report

log = logging.getLogger("curvfs.mount")

_STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
#: How long the first connection may take; after that a lost server is waited for as the deadlines say.
_FIRST_ANSWER_S = 5.0
_WATCH_INTERVAL_S = 2.0
_MAX_TICK_S = 0.25
_PULSE_S = 1.0
#: How often the record of this mount is written anew, for curvfs mounts and top.
_RECORD_INTERVAL_S = 2.0


@dataclass(frozen=True, slots=True)
class MountSource:
    """What to mount: a ``curvine://`` URL, or the directory of an embedded server (exactly one of them)."""

    url: str | None = None
    embedded: str | None = None

    def __post_init__(self) -> None:
        if (self.url is None) == (self.embedded is None):
            raise UsageError("Give either a curvine:// URL or --embedded DIR, and the mountpoint after it.")
        if self.embedded == "":
            raise UsageError("The name of the directory to serve is empty; name one, or . for this one.")


async def run_mount(
    source: MountSource,
    mountpoint: str,
    options: MountOptions,
    *,
    world: World | None = None,
    on_ready: Callable[[str, str], None] = lambda url, path: None,
) -> None:
    """Mount and serve until a signal (SIGTERM, SIGINT, SIGHUP) or an unmount from outside ends it.

    ``on_ready`` is called with the URL and the mountpoint once the kernel is connected. Raises CurvfsErrors before
    that; nothing is left mounted then.
    """
    world = world or World.real()
    disk = world.disk
    path = kernel.resolve(disk, mountpoint)
    config = None if source.url is None else _configured(source.url, options)
    if source.embedded is not None:
        _refuse_overlap(source.embedded, path)
    kernel.check_fuse(disk, allow_other=options.allow_other)
    kernel.check_mountpoint(disk, path)
    readiness = Readiness(world, options.ready_file)
    readiness.prepare()
    async with AsyncExitStack() as stack:
        server: EmbeddedServer | None = None
        if source.embedded is not None:
            directory = source.embedded
            server = await world.threads.run(lambda: EmbeddedServer.attach(directory, world=world))
            stack.callback(server.close)
            config = _configured(server.url, options)
        assert config is not None
        await _first_answer(config, world)
        fs = await stack.enter_async_context(open_filesystem(config.with_overrides(root="/"), world=world))
        table = await prepare_pool(fs, config.root, options)
        url = f"curvine://{config.masters_text}{config.root}"
        await _Session(fs, table, options, path, url, server, readiness).serve(on_ready)


def _configured(url: str, options: MountOptions) -> ClientConfig:
    """The client's settings: its deadlines end before the handlers' do, so that callers get the better errno."""
    patience_s = max(0.1, options.op_timeout_s * 0.8)
    config = parse_url(url, file=options.conf).with_overrides(**dict(options.client_settings))
    return config.with_overrides(
        rpc_timeout_s=min(config.rpc_timeout_s, patience_s),
        data_timeout_s=min(config.data_timeout_s, patience_s),
        connect_timeout_s=min(config.connect_timeout_s, patience_s),
        retry_max_s=min(config.retry_max_s, patience_s),
        close_timeout_s=min(config.close_timeout_s, options.shutdown_timeout_s / 4),
    )


def _refuse_overlap(directory: str, path: str) -> None:
    directory = os.path.realpath(directory)
    if directory == path or directory.startswith(path.rstrip("/") + "/"):
        raise UsageError(
            f"The embedded server's directory {directory} lies under the mountpoint {path}, which would hide it; "
            f"give another mountpoint."
        )


async def _first_answer(config: ClientConfig, world: World) -> None:
    """Say soon when nobody answers, instead of trying as long as a running mount would."""
    patient = config.with_overrides(root="/", retry_max_s=min(config.retry_max_s, _FIRST_ANSWER_S))
    try:
        with trio.fail_after(2 * _FIRST_ANSWER_S):
            async with open_filesystem(patient, world=world) as fs:
                await fs.statfs()
    except trio.TooSlowError:
        raise DeadlineExceeded(
            f"No answer from {config.masters_text} within {2 * _FIRST_ANSWER_S:g} s; is a Curvine master running there?"
        ) from None


# ------------------------------------------------------------------------------------------------- preparing the pool


async def prepare_pool(fs: CurvineFileSystem, root_path: str, options: MountOptions) -> NodeTable:
    """The mounted directory, its KV prefixes (made where the options want them), and the table of nodes that begins
    with it."""
    root_path = _normal(root_path)
    root = await _directory(fs, root_path, options, "The directory to mount")
    outer = await _outer_prefix(fs, root_path)
    if outer is None and not is_prefix(root) and not options.read_only:
        for kv_path in options.kv_paths:
            await _make_prefix(fs, root_path, kv_path)
        root = await fs.stat(root_path)
    return NodeTable(root_path, root, outer_prefix=outer)


def _normal(path: str) -> str:
    """A path as the client reads it: ``..`` goes up by name."""
    return os.path.normpath("/" + path.lstrip("/"))


async def _directory(fs: CurvineFileSystem, path: str, options: MountOptions, what: str) -> FileStatus:
    try:
        status = await fs.stat(path)
    except NotFound:
        if options.read_only:
            raise UsageError(f"{what}, {path}, does not exist in the pool; create it first.") from None
        status = await fs.mkdir(path, parents=True)
    if not status.is_dir:
        raise NotADirectory(f"{what}, {path}, is not a directory of the pool; name a directory.", kind=27)
    return status


async def _outer_prefix(fs: CurvineFileSystem, root_path: str) -> str | None:
    """The nearest KV prefix above the mounted directory."""
    path = os.path.dirname(root_path)
    while True:
        if root_path != "/" and is_prefix(await fs.stat(path)):
            return path
        if path == "/":
            return None
        path = os.path.dirname(path)


async def _make_prefix(fs: CurvineFileSystem, root_path: str, kv_path: str) -> None:
    path = root_path if kv_path == "." else f"{root_path.rstrip('/')}/{kv_path.strip('/')}"
    mark = {KV_XATTR: b"1"}
    if kv_path != ".":
        try:
            await fs.mkdir(path, xattrs=mark)
            return
        except NotFound:
            await fs.mkdir(path, parents=True)
        except FileExists_:
            pass
    status = await fs.stat(path)
    if not status.is_dir:
        hint = " or mount with --no-kv" if kv_path == DEFAULT_KV_PATH else ""
        raise NotADirectory(
            f"The KV prefix {path} is not a directory of the pool; name another with --kv{hint}.", kind=27
        )
    if not is_prefix(status):
        log.info("Marking %s as a KV prefix.", path)
        await fs.set_attr(path, xattrs=mark)


# ------------------------------------------------------------------------------------------------------------ serving


class _Kernel:
    """What publishing asks of the kernel, through pyfuse3 and /proc."""

    def __init__(self, disk: Disk) -> None:
        self._disk = disk

    def write_back(self, node_id: int) -> None:
        import pyfuse3

        try:
            pyfuse3.invalidate_inode(node_id)
        except FileNotFoundError:
            pass  # the kernel has forgotten the node

    def process_of(self, thread_id: int) -> int | None:
        return kernel.process_of(self._disk, thread_id)


class _Session:
    """The life of one mount."""

    def __init__(
        self,
        fs: CurvineFileSystem,
        table: NodeTable,
        options: MountOptions,
        path: str,
        url: str,
        server: EmbeddedServer | None,
        readiness: Readiness,
    ) -> None:
        import pyfuse3

        from mount.operations import Operations
        from mount.report import Report

        self._fs = fs
        self._world = fs.world
        self._options = options
        self._path = path
        self._url = url
        self._server = server
        self._readiness = readiness
        self._initialised = trio.Event()
        self._announced = trio.Event()
        self._stop = trio.Event()
        self._ended = trio.Event()
        self._device = ""
        side = _Kernel(self._world.disk)
        self._operations: Operations = Operations(fs, table, side, options, on_init=self._initialised.set)
        self._operations.pass_on = loop.enter(pyfuse3).pass_on
        self._report: Report = Report(fs, self._operations, options, url, path)

    async def serve(self, on_ready: Callable[[str, str], None]) -> None:
        import pyfuse3

        await self._report.begin()
        with trio.open_signal_receiver(*_stop_signals()) as signals:
            self._mount()
            try:
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(self._loop)
                    nursery.start_soon(self._wait_for_signal, signals)
                    nursery.start_soon(self._announce, on_ready)
                    for task in self._tasks():
                        nursery.start_soon(self._steadily, task)
                    async with _pulse():
                        await self._stop.wait()
                        self._readiness.stopping()
                        await self._leave()
                    nursery.cancel_scope.cancel()
            finally:
                with trio.CancelScope(shield=True):
                    await self._unmount()
                    pyfuse3.close(unmount=False)
                    await self._settle()
                    self._report.leave()

    def _mount(self) -> None:
        import pyfuse3

        words = {
            "default_permissions",
            f"fsname={kernel.escape_option(self._url)}",
            f"subtype={kernel.SUBTYPE}",
            *self._options.kernel_words,
        }
        if self._options.allow_other:
            words.add("allow_other")
        if self._options.read_only:
            words.add("ro")
        captured = kernel.CapturedStderr(self._world.disk)
        held = kernel.hold_mountpoint(self._world.disk, self._path)
        try:
            with captured:
                pyfuse3.init(self._operations, self._path, words)
        except RuntimeError as error:
            raise kernel.explain_refusal(captured.text, self._path) from error
        finally:
            self._world.disk.close(held)
        if captured.text.strip():
            log.warning("While mounting: %s", captured.text.strip())
        entry = kernel.mount_at(self._world.disk, self._path)
        self._device = entry.device if entry is not None else ""

    async def _loop(self) -> None:
        import pyfuse3

        try:
            await pyfuse3.main()
        finally:
            self._ended.set()
            self._stop.set()

    async def _wait_for_signal(self, signals: AsyncIterator[int]) -> None:
        async for number in signals:
            log.info("Unmounting %s on %s.", self._path, signal.Signals(number).name)
            self._stop.set()

    async def _announce(self, on_ready: Callable[[str, str], None]) -> None:
        await self._initialised.wait()
        kernel.tune(
            self._world.disk,
            self._path,
            read_ahead_bytes=self._options.read_ahead_bytes,
            max_background=self._options.max_background,
        )
        log.info("Mounted %s on %s.", self._url, self._path)
        self._readiness.ready(self._url, self._path)
        self._announced.set()
        self._report.enrol()
        try:
            on_ready(self._url, self._path)
        except OSError as error:
            log.warning("Nobody could be told that the mount is ready: %s", error)

    # --------------------------------------------------------------------------------------------- tasks in the back

    def _tasks(self) -> list[Callable[[], Awaitable[float]]]:
        """Things done again and again; each returns how long to wait until the next time."""
        tasks: list[Callable[[], Awaitable[float]]] = (
            []
            if self._options.read_only
            else [
                self._tick,
                self._beat,
                self._sweep,
            ]
        )
        tasks += [self._record, self._let_go]
        if self._server is not None:
            tasks.append(self._watch)
        if self._readiness.watchdog_s:
            tasks.append(self._say_alive)
        return tasks

    async def _steadily(self, task: Callable[[], Awaitable[float]]) -> None:
        while True:
            try:
                pause_s = await task()
            except CurvfsError as error:
                log.warning("%s: %s", task.__name__.strip("_"), error)
                pause_s = _WATCH_INTERVAL_S
            except Exception:
                log.exception("%s failed in a way that nobody expected.", task.__name__.strip("_"))
                pause_s = 10 * _WATCH_INTERVAL_S
            await self._world.clock.sleep(pause_s)

    async def _tick(self) -> float:
        await self._operations.publisher.tick()
        return max(0.01, min(_MAX_TICK_S, self._options.grace_s / 4))

    async def _beat(self) -> float:
        for scratch in self._operations.publisher.scratches():
            if scratch.is_made:
                await scratch.beat()
        return BEAT_INTERVAL_S

    async def _sweep(self) -> float:
        for scratch in await self._places_to_sweep():
            await scratch.sweep()
        return DEAD_AFTER_S

    async def _places_to_sweep(self) -> list[Scratch]:
        """Staging below the mounted directory, and below the KV prefixes in it or around it."""
        table, publisher = self._operations.table, self._operations.publisher
        places = [publisher.scratch(table.root)]
        if table.outer_prefix is not None:
            places.append(publisher.scratch(table.outer_prefix))
        for status in await self._fs.list(table.path(table.root), limit=1000):
            if status.is_dir and is_prefix(status):
                places.append(publisher.scratch(table.bind(status, table.root, status.name)))
        return [*places, *(one for one in publisher.scratches() if one not in places)]

    async def _record(self) -> float:
        self._report.write_record()
        return _RECORD_INTERVAL_S

    async def _let_go(self) -> float:
        await self._operations.readers.let_go()
        return KEPT_S / 3

    async def _say_alive(self) -> float:
        await self._announced.wait()
        self._readiness.alive()
        return self._readiness.watchdog_s

    async def _watch(self) -> float:
        assert self._server is not None
        await self._world.threads.run(self._server.ensure_running, abandon_on_cancel=True)
        return _WATCH_INTERVAL_S

    # ------------------------------------------------------------------------------------------------------- the end

    async def _leave(self) -> None:
        """Unmount while requests are still answered, so that dirty pages reach us; then end the loop."""
        if self._ended.is_set():
            return
        await self._unmount()
        with trio.move_on_after(1.0):
            await self._ended.wait()
        if not self._ended.is_set():
            import pyfuse3

            pyfuse3.terminate()
            with trio.move_on_after(self._options.shutdown_timeout_s / 4):
                await self._ended.wait()

    async def _unmount(self) -> None:
        """Take our mount out of the tree, if it is there: gently, else at once, open files notwithstanding."""
        timeout_s = self._options.shutdown_timeout_s / 4
        for lazy in (False, True):
            entry = kernel.mount_at(self._world.disk, self._path)
            if entry is None or entry.device != self._device:
                return  # somebody has unmounted it, and perhaps mounted something else
            try:
                await self._world.threads.run(_unmount, self._path, lazy, timeout_s)
            except CurvfsError as error:
                log.info("%s", error)

    async def _settle(self) -> None:
        """Everything written gets its place in the store; staging is emptied. Never raises a CurvfsError."""
        publisher = self._operations.publisher
        with trio.move_on_after(self._options.shutdown_timeout_s / 2) as scope:
            try:
                for node in self._operations.table.nodes():
                    if node.private is None and node.away is None and node.writer is not None:
                        await node.writer.publish(close=True)
            except CurvfsError as error:
                log.error("Not everything that was written reached the store: %s", error)
            try:
                await publisher.materialise_all()
            except CurvfsError as error:
                log.error("Not every file of a KV prefix got its name: %s", error)
            await self._operations.readers.close()
            for scratch in publisher.scratches():
                await scratch.remove()
        if scope.cancelled_caught:
            log.error("The store did not answer in time; what had not been closed is lost.")
        log.info("Unmounted %s: %s", self._path, dict(publisher.counters))


def _unmount(path: str, lazy: bool, timeout_s: float) -> None:
    kernel.unmount(path, lazy=lazy, timeout_s=timeout_s)


def _stop_signals() -> list[signal.Signals]:
    """Without SIGHUP where it is ignored: whoever starts us with nohup wants the mount to outlive the terminal."""
    return [
        number for number in _STOP_SIGNALS if number != signal.SIGHUP or signal.getsignal(number) is not signal.SIG_IGN
    ]


@asynccontextmanager
async def _pulse() -> AsyncIterator[None]:
    """Interrupt a read of /dev/fuse that blocks.

    A request that its caller gave up between our being told of it and our reading it leaves the read waiting for the
    next one, and with it the whole event loop. A signal every second ends that wait.
    """

    def nothing(number: int, frame: FrameType | None) -> None:
        pass

    before = signal.signal(signal.SIGALRM, nothing)
    signal.setitimer(signal.ITIMER_REAL, _PULSE_S, _PULSE_S)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def unmount_command(path: str, *, lazy: bool, disk: Disk) -> str:
    """``curvfs umount``: where it was mounted. Raises UsageError when no curvfs is mounted there, and says who keeps it
    busy."""
    place = kernel.resolve(disk, path)
    entry = kernel.mount_at(disk, place)
    if entry is None or not entry.is_ours:
        raise UsageError(f"{place} is not a curvfs mount; nothing was unmounted.")
    try:
        kernel.unmount(place, lazy=lazy)
    except CurvfsError as error:
        if error.errno_ != errno.EBUSY:
            raise
        users = kernel.users_of(disk, place)
        who = f" by {', '.join(users[:3])}" if users else ""
        raise EnvironmentError_(
            f"{place} is in use{who}; end that, or take it away at once with curvfs umount --lazy {place}.",
            errno_=error.errno_,
        ) from error
    return place
