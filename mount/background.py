"""Mounting in the foreground and in the background.

In the background a forked process mounts and serves; the one that was called returns when the mount answers, or raises
the error that the other one met.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import os
import signal
import sys
from collections.abc import Callable
from typing import NoReturn

import trio

from curvfs.errors import CurvfsError, EnvironmentError_, RemoteError, TransportError, UsageError
from curvfs.world import World
from mount import kernel
from mount.logs import configure_logging
from mount.options import MountOptions
from mount.session import MountSource, run_mount

log = logging.getLogger("curvfs.mount")

_BY_EXIT_CODE: dict[int, type[CurvfsError]] = {
    cls.exit_code: cls for cls in (CurvfsError, UsageError, EnvironmentError_, TransportError, RemoteError)
}


def mount_in_foreground(
    source: MountSource,
    mountpoint: str,
    options: MountOptions,
    *,
    announce: Callable[[str, str], None] = lambda url, path: None,
) -> None:
    """Mount and serve until the mount ends. ``announce`` gets URL and mountpoint when it answers."""
    configure_logging(options)
    _run(source, mountpoint, options, announce)


def _run(source: MountSource, mountpoint: str, options: MountOptions, on_ready: Callable[[str, str], None]) -> None:
    async def main() -> None:
        await run_mount(source, mountpoint, options, world=World.real(), on_ready=on_ready)

    try:
        trio.run(main, strict_exception_groups=True)
    except BaseExceptionGroup as group:
        raise _leading(group) from group


def _leading(error: BaseException) -> BaseException:
    """The error to report of a group: one with a remedy, else the first."""
    if not isinstance(error, BaseExceptionGroup):
        return error
    inner = [_leading(each) for each in error.exceptions]
    return next((each for each in inner if isinstance(each, CurvfsError)), inner[0])


def mount_in_background(source: MountSource, mountpoint: str, options: MountOptions) -> tuple[str, str, int]:
    """Start a process that mounts and serves; URL, mountpoint and process id once the mount answers.

    Raises what kept the other process from mounting."""
    mountpoint = kernel.resolve(World.real().disk, mountpoint)
    read_fd, write_fd = os.pipe()
    sys.stdout.flush()
    sys.stderr.flush()
    pid = os.fork()
    if pid == 0:
        _serve_forked(source, mountpoint, options, read_fd, write_fd)
    World.real().disk.close(write_fd)
    with open(read_fd, "rb") as pipe:
        said = pipe.read()
    if not said:
        where = f"; {options.log_file} may say why" if options.log_file else "; with --log-file FILE it leaves a log"
        raise EnvironmentError_(f"The mount of {mountpoint} ended before it was ready{where}.")
    message = json.loads(said)
    if "error" in message:
        os.waitpid(pid, 0)
        raise _BY_EXIT_CODE.get(message["exit_code"], CurvfsError)(message["error"])
    if kernel.probe(message["path"]) != 0:
        raise EnvironmentError_(f"{message['path']} was mounted but does not answer; see curvfs umount --lazy.")
    return message["url"], message["path"], pid


def _serve_forked(
    source: MountSource,
    mountpoint: str,
    options: MountOptions,
    read_fd: int,
    write_fd: int,
) -> NoReturn:
    """The forked process: a session of its own, away from the terminal; never returns."""
    code = 1
    disk = World.real().disk
    told = False

    def tell(**message: object) -> None:
        nonlocal told
        if not told:
            told = True
            with open(write_fd, "wb") as pipe:
                pipe.write(json.dumps(message).encode())

    def ready(url: str, path: str) -> None:
        tell(url=url, path=path)

    try:
        try:
            disk.close(read_fd)
            os.setsid()
            source, options = _absolute(source), _with_absolute_files(options)
            mountpoint = os.path.abspath(mountpoint)
            os.chdir("/")
            nowhere = disk.open(os.devnull, os.O_RDWR)
            for fd in (0, 1, 2):
                os.dup2(nowhere, fd)
            signal.signal(signal.SIGINT, signal.default_int_handler)
            configure_logging(options, quiet=True)
            _run(source, mountpoint, options, ready)
            code = 0
        except CurvfsError as error:
            code = error.exit_code
            log.error("%s", error)
            tell(error=str(error), exit_code=code)
        except BaseException as error:
            log.exception("The mount ended in a way that nobody expected.")
            tell(error=f"The mount failed unexpectedly ({type(error).__name__}: {error}).", exit_code=1)
        logging.shutdown()
    finally:
        os._exit(code)


def _absolute(source: MountSource) -> MountSource:
    return source if source.embedded is None else MountSource(embedded=os.path.abspath(source.embedded))


def _with_absolute_files(options: MountOptions) -> MountOptions:
    """The same files, wherever the working directory is going to be."""
    names = ("log_file", "ready_file", "conf")
    found = {name: os.path.abspath(getattr(options, name)) for name in names if getattr(options, name) is not None}
    return dataclasses.replace(options, **found)
