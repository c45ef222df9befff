"""Attach to the server of a directory, starting it when none runs.

Any number of processes may attach at once. Each holds ``DIR/users.lock`` shared for as long as it is attached; a server
that was started here stops when it gets that lock exclusively and nobody came back for some seconds. It is started on
the ports of its predecessor, so a process that is attached reaches it again after a crash.

Blocking calls for plain threads (an async caller runs them through ``World.threads``).
"""

from __future__ import annotations

import os
import signal
import sys
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import trio

import curvfs
from curvfs.errors import CurvfsError, DeadlineExceeded, EnvironmentError_
from curvfs.net.transport import FrameStream
from curvfs.server.layout import Layout
from curvfs.server.place import CLUSTER_ID, ERROR_PREFIX, EXIT_BUSY, Directory
from curvfs.units import MIB
from curvfs.wire.codes import RpcCode
from curvfs.wire.messages import decode, pb
from curvfs.wire.session import UnaryCalls
from curvfs.world import World

START_TIMEOUT_S = 15.0

_POLL_S = 0.05
_PROBE_TIMEOUT_S = 2.0
#: A log beyond this is started anew by the next server.
_MAX_LOG_BYTES = MIB

#: What a server must not inherit as ignored.
_DEFAULT_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


@dataclass(slots=True)
class _Child:
    """A server process that we started, and where its log began."""

    pid: int
    log_offset: int


class EmbeddedServer:
    """A directory's server, kept running for as long as this is open. ``url`` is how clients reach it."""

    def __init__(self, place: Directory, users_fd: int, world: World) -> None:
        self.url = ""
        self._place = place
        self._users_fd: int | None = users_fd
        self._world = world
        self._child: _Child | None = None

    @classmethod
    def attach(
        cls, directory: str, *, world: World | None = None, timeout_s: float = START_TIMEOUT_S
    ) -> EmbeddedServer:
        """Attach to ``directory`` (made when missing) and see to it that its server answers.

        Raises UsageError or EnvironmentError_, with the server's own words where it could not start, and
        DeadlineExceeded when it did not answer in time.
        """
        world = world or World.real()
        place = Directory.at(directory)
        place.prepare(world)
        server = cls(place, _users_lock(place, world, timeout_s), world)
        try:
            server.ensure_running(timeout_s=timeout_s)
        except BaseException:
            server.close()
            raise
        return server

    def ensure_running(self, *, timeout_s: float = START_TIMEOUT_S) -> str:
        """Start the server again if it died; returns the URL. Raises as :meth:`attach` does."""
        world = self._world
        deadline_s = world.clock.monotonic_s() + timeout_s
        while (url := self._answering()) is None:
            reason = self._start_if_needed()
            if world.clock.monotonic_s() > deadline_s:
                raise DeadlineExceeded(
                    f"The server of {self._place.path} does not answer after {timeout_s:.0f} s"
                    f"{f' ({reason})' if reason else ''}; {self._place.log} may say why."
                )
            world.clock.block(_POLL_S)
        self.url = url
        return url

    def close(self) -> None:
        """Detach. The server stops by itself some seconds after the last user has gone."""
        if self._users_fd is not None:
            self._world.disk.close(self._users_fd)
            self._users_fd = None
        self._reap()

    def __enter__(self) -> EmbeddedServer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # ---------------------------------------------------------------------------------------------------- starting

    def _start_if_needed(self) -> str:
        """Start a server unless ours is on its way. Returns why the last one ended, when that may pass."""
        reason = ""
        if self._child is not None:
            code = self._reap()
            if code is None:
                return ""
            if code == EXIT_BUSY:
                # Another process was faster, or a server is on its way out.
                reason = "another server has the directory"
        self._child = self._spawn()
        return reason

    def _reap(self) -> int | None:
        """Exit code of the server that we started; None while it runs. Raises EnvironmentError_ when it failed."""
        child = self._child
        if child is None:
            return 0
        try:
            pid, status = os.waitpid(child.pid, os.WNOHANG)
        except ChildProcessError:
            pid, status = child.pid, 0  # somebody else has collected it
        if pid == 0:
            return None
        self._child = None
        code = os.waitstatus_to_exitcode(status)
        if code in (0, EXIT_BUSY) or code < 0:
            return code
        raise EnvironmentError_(f"The server of {self._place.path} cannot start: {self._last_words(child)}")

    def _last_words(self, child: _Child) -> str:
        try:
            log = self._world.disk.read_file(self._place.log)[child.log_offset :].decode(errors="replace")
        except OSError as error:
            return f"and its log {self._place.log} cannot be read ({os.strerror(error.errno or 0)})."
        lines = [line for line in log.splitlines() if line.strip()]
        said = [line for line in lines if line.startswith(ERROR_PREFIX)]
        if said:
            return said[-1].removeprefix(ERROR_PREFIX)
        return (
            f"{lines[-1]}; see {self._place.log}."
            if lines
            else (
                f"it could say nothing in {self._place.log}, as when the file system is full; "
                f"'curvfs serve {self._place.path}' shows why."
            )
        )

    def _spawn(self) -> _Child:
        if not sys.executable:
            raise EnvironmentError_(
                "This program does not say which Python runs it, so no server can be started; run "
                f"'curvfs serve {self._place.path}' and use its URL."
            )
        record = self._place.read_record(self._world)
        command = [
            sys.executable, "-P", "-m", "curvfs.server", self._place.path, "--stop-when-unused", "--any-free-port",
            "--master-port", str(_port(record, "master_port")), "--worker-port", str(_port(record, "worker_port")),
        ]  # fmt: skip
        environment = dict(os.environ)
        package_parent = os.path.dirname(os.path.dirname(os.path.abspath(curvfs.__file__)))
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, [package_parent, environment.get("PYTHONPATH")]))
        log_offset = self._log_size()
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND
        if log_offset > _MAX_LOG_BYTES:
            log_offset, flags = 0, flags | os.O_TRUNC
        pid = os.posix_spawn(
            sys.executable,
            command,
            environment,
            file_actions=[
                (os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0),
                (os.POSIX_SPAWN_OPEN, 1, os.devnull, os.O_WRONLY, 0),
                (os.POSIX_SPAWN_OPEN, 2, self._place.log, flags, 0o600),
            ],
            setsid=True,
            setsigmask=(),
            setsigdef=_DEFAULT_SIGNALS,
        )
        return _Child(pid, log_offset)

    def _log_size(self) -> int:
        try:
            return self._world.disk.stat(self._place.log).st_size
        except OSError:
            return 0

    # ----------------------------------------------------------------------------------------------------- probing

    def _answering(self) -> str | None:
        """URL of the server that serves this very directory and answers; None when there is none."""
        record = self._place.read_record(self._world)
        port, host, url = _port(record, "master_port"), record.get("host"), record.get("url")
        if not port or not isinstance(host, str) or not isinstance(url, str):
            return None
        found: list[bool] = []
        # A thread of its own, because the caller's may be running trio already.
        thread = self._world.threads.start(lambda: found.append(trio.run(self._probe, host, port)), name="curvfs-probe")
        thread.join()
        return url if found == [True] else None

    async def _probe(self, host: str, port: int) -> bool:
        with trio.move_on_after(_PROBE_TIMEOUT_S):
            try:
                stream = await self._world.net.connect(host, port)
            except CurvfsError:
                return False
            try:
                calls = UnaryCalls()
                await stream.send(calls.request(RpcCode.GET_FILESYSTEM_INFO, b"", req_id=1))
                frames = FrameStream(stream)
                head = await frames.recv_head()
                if head is None:
                    return False
                header = await frames.recv_header(head)
                await frames.discard(head.data_len)
                info: Any = decode(pb.GetFilesystemInfoResponse, header)
                served = {storage.dir_path for worker in info.live_workers for storage in worker.storage_map.values()}
                return Layout(self._place.data, CLUSTER_ID).root in served
            except CurvfsError:
                return False
            finally:
                await stream.aclose()
        return False


def _port(record: dict[str, Any], name: str) -> int:
    port = record.get(name)
    return port if isinstance(port, int) and 0 < port < 65536 else 0


def _users_lock(place: Directory, world: World, timeout_s: float) -> int:
    """Hold ``users.lock`` shared. A server that is stopping holds it exclusively until it is gone."""
    try:
        fd = world.disk.open(place.users_lock, os.O_RDWR | os.O_CREAT)
    except OSError as error:
        raise EnvironmentError_(
            f"{place.users_lock} cannot be written: {os.strerror(error.errno or 0)}; check the permissions of "
            f"{place.path}.",
            errno_=error.errno,
        ) from error
    deadline_s = world.clock.monotonic_s() + timeout_s
    while not world.disk.lock(fd, shared=True):
        if world.clock.monotonic_s() > deadline_s:
            world.disk.close(fd)
            raise DeadlineExceeded(f"The last server of {place.path} is stopping and does not end; try again later.")
        world.clock.block(_POLL_S)
    return fd
