"""A server as a program: arguments, ready line, signals, exit code.

``curvfs serve`` and ``python -m curvfs.server`` both end up in :func:`serve`.
"""

from __future__ import annotations

import argparse
import errno
import json
import os
import resource
import signal
import sys
from collections.abc import Sequence

import trio

from curvfs.errors import CurvfsError, UsageError
from curvfs.server.behaviour import BEHAVIOURS, HEAD, behaviour_named
from curvfs.server.namespace import MIN_BLOCK_BYTES
from curvfs.server.oplog import where_from
from curvfs.server.place import ERROR_PREFIX, EXIT_BUSY
from curvfs.server.service import LOOPBACK, MASTER_PORT, WORKER_PORT, Server, run_server
from curvfs.units import format_size, parse_duration, parse_size
from curvfs.world import World

#: A server that was told to stop and hangs on a dead disk ends all the same.
_STOP_TIMEOUT_S = 15.0

TTL_CHECK_INTERVAL = "1h"

EXIT_FAILURE = 1
EXIT_INTERRUPTED = 130


def main(arguments: Sequence[str] | None = None) -> int:
    """Run ``python -m curvfs.server``; returns the exit code. Failures are one sentence on stderr."""
    parser = argparse.ArgumentParser(prog="python -m curvfs.server", description="Serve a directory over Curvine.")
    parser.add_argument("directory", metavar="DIR", help="where metadata and blocks are kept; made when missing")
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on")
    parser.add_argument("--master-port", type=int, default=MASTER_PORT, help="0 picks a free one")
    parser.add_argument("--worker-port", type=int, default=WORKER_PORT, help="0 picks a free one")
    parser.add_argument("--hostname", help="name of the worker; default: this machine's")
    parser.add_argument("--capacity", help="what blocks may take at most, such as 100GB; default: the file system")
    parser.add_argument("--ttl-check-interval", default=TTL_CHECK_INTERVAL, help="how often expired files are deleted")
    parser.add_argument("--behave-as", default=HEAD.name, help=f"Curvine version: {', '.join(BEHAVIOURS)}")
    parser.add_argument("--announce-version", help="what it says that its version is; default: its own")
    parser.add_argument("--stop-when-unused", action="store_true", help="stop when no process is attached any more")
    parser.add_argument("--any-free-port", action="store_true", help="take another port where one is taken")
    found = parser.parse_args(arguments)
    try:
        serve(
            found.directory,
            host=found.host,
            master_port=found.master_port,
            worker_port=found.worker_port,
            hostname=found.hostname,
            capacity=found.capacity,
            ttl_check_interval=found.ttl_check_interval,
            behave_as=found.behave_as,
            announce_version=found.announce_version,
            stop_when_unused=found.stop_when_unused,
            any_free_port=found.any_free_port,
        )
    except CurvfsError as error:
        _say(f"{ERROR_PREFIX}{error}")
        return EXIT_BUSY if error.errno_ == errno.EBUSY else error.exit_code
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    except Exception as error:
        _say(f"{ERROR_PREFIX}it failed and ends: {where_from(error)}.")
        return EXIT_FAILURE
    return 0


def serve(
    directory: str,
    *,
    host: str = "127.0.0.1",
    master_port: int = MASTER_PORT,
    worker_port: int = WORKER_PORT,
    hostname: str | None = None,
    capacity: str | None = None,
    ttl_check_interval: str = TTL_CHECK_INTERVAL,
    behave_as: str = HEAD.name,
    announce_version: str | None = None,
    stop_when_unused: bool = False,
    any_free_port: bool = False,
    as_json: bool = False,
    world: World | None = None,
) -> None:
    """Serve until SIGTERM, SIGINT or SIGHUP. Prints the URL as the only line on stdout once clients may come; with
    ``as_json`` an object with ``url`` and ``pid``."""
    for port, option in ((master_port, "--master-port"), (worker_port, "--worker-port")):
        if not 0 <= port <= 65535:
            raise UsageError(f"{port} is not a port; give {option} a number from 0 to 65535.")
    capacity_bytes = None if capacity is None else parse_size(capacity)
    if capacity_bytes is not None and capacity_bytes < MIN_BLOCK_BYTES:
        raise UsageError(
            f"A capacity of {format_size(capacity_bytes)} holds no block; give --capacity at least "
            f"{format_size(MIN_BLOCK_BYTES)}."
        )
    ttl_check_interval_s = parse_duration(ttl_check_interval, bare_unit="s")
    if ttl_check_interval_s <= 0:
        raise UsageError("Expired files cannot be looked for all the time; give --ttl-check-interval more than 0.")
    behaviour = behaviour_named(behave_as, announced=announce_version)
    os.umask(0o077)
    # A descriptor for every connection and open block: as many as we may have.
    resource.setrlimit(resource.RLIMIT_NOFILE, (resource.getrlimit(resource.RLIMIT_NOFILE)[1],) * 2)
    if stop_when_unused:
        # Nobody watches this process: it must not keep the directory that it was started in from being unmounted.
        directory = os.path.realpath(directory)
        os.chdir("/")
    world = world or World.real()

    async def until_stopped() -> None:
        with trio.CancelScope() as scope:
            trio.lowlevel.spawn_system_task(_cancel_on_signal, scope, world)
            await run_server(
                directory,
                host=host,
                master_port=master_port,
                worker_port=worker_port,
                hostname=hostname,
                capacity_bytes=capacity_bytes,
                ttl_check_interval_s=ttl_check_interval_s,
                behaviour=behaviour,
                stop_when_unused=stop_when_unused,
                any_free_port=any_free_port,
                enrol=True,
                log=_say,
                world=world,
                task_status=_ReadyLine(host, as_json),
            )

    trio.run(until_stopped)


class _ReadyLine(trio.TaskStatus[Server]):
    """Hears that the server is ready, and says so."""

    def __init__(self, host: str, as_json: bool) -> None:
        self._host = host
        self._as_json = as_json

    def started(self, value: Server | None = None) -> None:
        if self._host not in LOOPBACK:
            _say(
                f"Listening on {self._host}: everybody who reaches these ports can read, change and delete everything, "
                "because the Curvine protocol has no authentication."
            )
        if value is not None:
            line = json.dumps({"url": value.url, "pid": os.getpid()}) if self._as_json else value.url
            print(line, flush=True)


async def _cancel_on_signal(scope: trio.CancelScope, world: World) -> None:
    stopping = {signal.SIGTERM, signal.SIGINT}
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # nohup asks to go on when the terminal is closed
        stopping.add(signal.SIGHUP)
    with trio.open_signal_receiver(*stopping) as signals:
        async for _ in signals:
            world.threads.start(lambda: _end_anyway(world), name="curvfs-stop")
            scope.cancel()


def _end_anyway(world: World) -> None:
    world.clock.block(_STOP_TIMEOUT_S)
    _say(f"{ERROR_PREFIX}did not stop within {_STOP_TIMEOUT_S:.0f} s, so something hangs; ending now.")
    os._exit(1)


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
