"""What the suite runs against: an embedded server in a thread of its own, or the cluster that the environment names.

``CURVFS_TEST_MASTER=host:port`` names a cluster's leading master and ``CURVFS_TEST_STANDBY=host:port`` one that is not
leading. Nothing else of a cluster is needed, and nothing but a fresh directory of it is touched.
"""

from __future__ import annotations

import os
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Self

import trio
from conformance.probe import Address, Probe, Target, Wire
from conformance.rules import ALPHA, HEAD, V041, Version

from curvfs.server import behaviour
from curvfs.server.service import TTL_CHECK_INTERVAL_S, Server, run_server

MASTER_VARIABLE = "CURVFS_TEST_MASTER"
STANDBY_VARIABLE = "CURVFS_TEST_STANDBY"

START_TIMEOUT_S = 30.0


def named_master() -> Address | None:
    """The cluster that the environment asks for; None for the embedded server."""
    return _address(MASTER_VARIABLE)


def named_standby() -> Address | None:
    return _address(STANDBY_VARIABLE)


def _address(variable: str) -> Address | None:
    text = os.environ.get(variable, "")
    if not text:
        return None
    host, _, port = text.rpartition(":")
    if not host or not port.isdecimal():
        raise ValueError(f"{variable} must be host:port, not {text!r}")
    return host.strip("[]"), int(port)


class ThreadedServer:
    """An embedded server with two workers and a standby master, in a thread with its own event loop."""

    def __init__(
        self,
        directory: Path,
        version: Version,
        second_hostname: str = "second-host",
        ttl_check_interval_s: float = TTL_CHECK_INTERVAL_S,
    ) -> None:
        self._second_hostname = second_hostname
        self._ttl_check_interval_s = ttl_check_interval_s
        self._directory = directory
        self._version = version
        self._ready = threading.Event()
        self._failure: BaseException | None = None
        self._scope = trio.CancelScope()
        self._token: trio.lowlevel.TrioToken | None = None
        self._server: Server | None = None
        self._thread = threading.Thread(target=self._run, name=f"server-{version.label}")

    def __enter__(self) -> Self:
        self._thread.start()
        assert self._ready.wait(START_TIMEOUT_S), "the embedded server did not start"
        if self._failure is not None:
            raise self._failure
        return self

    def __exit__(self, *_: object) -> None:
        if self._token is not None:
            try:
                self._token.run_sync_soon(self._scope.cancel)
            except trio.RunFinishedError:
                pass
        self._thread.join(START_TIMEOUT_S)
        assert not self._thread.is_alive(), "the embedded server did not stop"

    @property
    def running(self) -> Server:
        assert self._server is not None
        return self._server

    @property
    def target(self) -> Target:
        server = self.running
        assert server.standby_port is not None
        return Target(
            (server.host, server.master_port), (server.host, server.standby_port), self._version, embedded=True
        )

    def _run(self) -> None:
        try:
            trio.run(self._serve)
        except BaseException as error:
            self._failure = error
        finally:
            self._ready.set()

    async def _serve(self) -> None:
        self._token = trio.lowlevel.current_trio_token()
        with self._scope:
            async with trio.open_nursery() as nursery:
                self._server = await nursery.start(
                    partial(
                        run_server,
                        str(self._directory),
                        master_port=0,
                        worker_port=0,
                        standby_port=0,
                        hostname="localhost",
                        more_workers=(self._second_hostname,),
                        ttl_check_interval_s=self._ttl_check_interval_s,
                        behaviour=behaviour.BEHAVIOURS[self._version.label],
                    )
                )
                self._ready.set()


async def make_root(target: Target, directory: str) -> None:
    """Make the directory that the suite works in."""
    async with _probe(target, directory) as probe:
        await probe.mkdir(directory)


async def detect(target: Target, directory: str) -> Version:
    """The generation of a cluster, as 8.4 item 7 says."""
    async with _probe(target, directory) as probe:
        if (await probe.info()).HasField("compatibility"):
            return HEAD
        await probe.create(probe.at("generation"))
        await probe.complete(probe.at("generation"), 0)
        changed = await probe.set_attr(probe.at("generation"), mode=0o600)
        return V041 if changed.HasField("ctime") else ALPHA


async def survey(target: Target, directory: str) -> Target:
    """The target with what it has of :data:`~conformance.rules.NEEDS`."""
    has = {"a standby"} if target.standby is not None else set()
    async with _probe(target, directory) as probe:
        if len((await probe.info()).live_workers) >= 2:
            has.add("two workers")
        await probe.create(probe.at("survey"))
        located = await probe.add_block(probe.at("survey"))
        stream = await probe.worker(located.locs[0])
        reply = await stream.open_write(located.block, short_circuit=True)
        if reply.HasField("path") and os.access(reply.path, os.R_OK | os.W_OK):
            has.add("local files")
        await stream.cancel()
    return replace(target, has=frozenset(has))


async def remove(target: Target, directory: str) -> None:
    """Remove what the suite made."""
    async with _probe(target, directory) as probe:
        if await probe.exists(directory):
            await probe.delete(directory, recursive=True)


@asynccontextmanager
async def _probe(target: Target, directory: str) -> AsyncIterator[Probe]:
    probe = Probe(target, await Wire.connect(target.master), directory)
    try:
        yield probe
    finally:
        await probe.aclose()
