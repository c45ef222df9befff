"""The embedded default as processes that can be killed: the server of a directory, and mounts of its pool."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from dataclasses import dataclass
from types import TracebackType

from curvfs.api import EmbeddedServer
from curvfs.errors import CurvfsError, DeadlineExceeded
from curvfs.server.place import Directory
from curvfs.world import World
from mount import kernel

_MOUNT_TIMEOUT_S = 30.0
_STOP_TIMEOUT_S = 30.0
_POLL_S = 0.05


@dataclass(slots=True)
class _Mount:
    path: str
    process: subprocess.Popen[bytes]


class Stage:
    """A context manager: when it ends, nothing that it started runs, and nothing is mounted."""

    def __init__(self, world: World, directory: str) -> None:
        self._world = world
        self._directory = directory
        self._server = EmbeddedServer.attach(directory, world=world)
        self._mounts: dict[str, _Mount] = {}
        self._made: list[str] = []

    @property
    def url(self) -> str:
        return self._server.url

    def mount(self, name: str) -> str:
        """Mount the pool at a new place; its path. Raises EnvironmentError_ where there is no FUSE."""
        kernel.check_fuse(self._world.disk, allow_other=False)
        path = f"{os.path.realpath(self._directory)}.verify-{os.getpid()}-{name}"
        self._world.disk.makedirs(path)
        self._made.append(path)
        self._start(name, path)
        return path

    def _start(self, name: str, path: str) -> None:
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", "tools", "mount", "--no-kv", self.url, path],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )
        self._mounts[name] = _Mount(path, process)
        deadline_s = self._world.clock.monotonic_s() + _MOUNT_TIMEOUT_S
        while kernel.mount_at(self._world.disk, path) is None:
            if process.poll() is not None:
                assert process.stderr is not None
                said = process.stderr.read().decode(errors="replace").strip()
                raise CurvfsError(f"The pool cannot be mounted at {path}: {said.removeprefix('curvfs: ')}")
            if self._world.clock.monotonic_s() > deadline_s:
                raise DeadlineExceeded(f"The pool was not mounted at {path} within {_MOUNT_TIMEOUT_S:.0f} s.")
            self._world.clock.block(_POLL_S)

    def remount(self, name: str) -> None:
        """Unmount as a person would, and mount again at the same place."""
        self._end(self._mounts.pop(name), signal.SIGTERM)
        self._start(name, self._path(name))

    def _path(self, name: str) -> str:
        return next(path for path in self._made if path.endswith(f"-{name}"))

    def kill_daemon(self, name: str) -> None:
        """Kill a mount in the act, and mount again at the same place."""
        self._end(self._mounts.pop(name), signal.SIGKILL)
        self._start(name, self._path(name))

    def kill_server(self) -> None:
        """Kill the process that is master and worker, and start it again."""
        pid = Directory.at(self._directory).read_record(self._world).get("pid")
        if not isinstance(pid, int):
            raise CurvfsError(f"The server of {self._directory} does not say which process it is.")
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
        self._server.ensure_running()

    def _end(self, mount: _Mount, number: signal.Signals) -> None:
        mount.process.send_signal(number)
        try:
            mount.process.wait(_STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            mount.process.kill()
            mount.process.wait()
        if mount.process.stderr is not None:
            mount.process.stderr.close()
        if kernel.mount_at(self._world.disk, mount.path) is not None:
            kernel.unmount(mount.path, lazy=True)

    def __enter__(self) -> Stage:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for mount in self._mounts.values():
            self._end(mount, signal.SIGTERM)
        self._mounts.clear()
        for path in self._made:
            try:
                self._world.disk.rmdir(path)
            except OSError:
                pass
        self._server.close()
