"""One server process: master and worker over one directory, on two ports::

    DIR/meta.db            metadata (with its -wal, -shm and -reserve)
    DIR/data/curvine/...   blocks, laid out as a Curvine worker's
    DIR/server.json        who serves, where: pid, host, ports, url, version; kept after the end, for its ports
    DIR/server.lock        locked exclusively while a server runs
    DIR/users.lock         locked shared by every process that is attached; see curvfs.server.embedded

Everything is made with modes 0700 and 0600. There is no authentication in the Curvine protocol: whoever reaches the
ports may do everything, which is why they are on the loopback address unless somebody says otherwise.
"""

from __future__ import annotations

import errno
import json
import os
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass

import trio

from curvfs import __version__
from curvfs.errors import CurvfsError, EnvironmentError_
from curvfs.network import host_port
from curvfs.server.behaviour import HEAD, Behaviour
from curvfs.server.blockstore import BlockStore
from curvfs.server.cluster import Cluster, WorkerNode
from curvfs.server.connection import accept
from curvfs.server.inplace import InPlaceBlockStore
from curvfs.server.layout import Layout, StorageVersion
from curvfs.server.master import Master
from curvfs.server.metastore import MetaStore
from curvfs.server.namespace import Namespace
from curvfs.server.oplog import Log
from curvfs.server.place import CLUSTER_ID, Directory
from curvfs.server.record import keep_record
from curvfs.server.sqlitestore import SqliteMetaStore
from curvfs.server.standby import serve_standby
from curvfs.server.worker import Worker
from curvfs.world import Listener, World

MASTER_PORT = 8995
WORKER_PORT = 8997

#: How long a starting server waits for another one on the same directory to go away.
_LOCK_TIMEOUT_S = 1.0
#: How often, and how long in a row, nobody must be attached before a server that may stop does.
_USERS_POLL_S = 0.5
_UNUSED_GRACE_S = 3.0
_HOUSEKEEPING_PERIOD_S = 1.0
_CHECKPOINT_PERIOD_S = 20.0
_CHECKPOINT_RECORDS = 10_000
#: How often expired files are deleted, as Curvine's master does.
TTL_CHECK_INTERVAL_S = 3600.0

#: Addresses that only this machine reaches.
LOOPBACK = frozenset({"127.0.0.1", "localhost", "::1"})
_WILDCARD = frozenset({"0.0.0.0", "::", ""})


@dataclass(frozen=True, slots=True)
class Server:
    """A server that is ready. ``host`` is what clients on this machine connect to."""

    directory: str
    host: str
    master_port: int
    worker_port: int
    hostname: str
    #: Ports of the further workers that were asked for, and of the master that never leads.
    more_worker_ports: tuple[int, ...] = ()
    standby_port: int | None = None

    @property
    def url(self) -> str:
        return f"curvine://{host_port(self.host, self.master_port)}/"


async def run_server(
    directory: str,
    *,
    host: str = "127.0.0.1",
    master_port: int = MASTER_PORT,
    worker_port: int = WORKER_PORT,
    hostname: str | None = None,
    capacity_bytes: int | None = None,
    ttl_check_interval_s: float = TTL_CHECK_INTERVAL_S,
    stop_when_unused: bool = False,
    any_free_port: bool = False,
    behaviour: Behaviour = HEAD,
    more_workers: Sequence[str] = (),
    standby_port: int | None = None,
    enrol: bool = False,
    open_metadata: Callable[[str], MetaStore] = SqliteMetaStore,
    log: Callable[[str], None] = lambda _: None,
    world: World | None = None,
    task_status: trio.TaskStatus[Server] = trio.TASK_STATUS_IGNORED,
) -> None:
    """Serve ``directory`` until cancelled (or, with ``stop_when_unused``, until nobody is attached for a while).

    ``hostname`` is what the worker goes by: clients of that name use its files directly. It defaults to this machine's
    own. Ports may be 0; the :class:`Server` that ``task_status`` gets says which they became. ``capacity_bytes`` bounds
    what the blocks may take. Files whose TTL has passed are deleted at start and every ``ttl_check_interval_s``.
    ``behaviour`` is the version to behave as. ``enrol``: join the list of what runs on this machine. ``open_metadata``
    opens the metadata store at a path. For tests of clients: ``more_workers`` are the host names of further workers, on
    free ports, and ``standby_port`` is the port of a second master that says of every request that it does not lead.
    Raises EnvironmentError_ and UsageError, in one sentence each, when it cannot start.
    """
    world = world or World.real()
    place = Directory.at(directory)
    place.prepare(world)
    hostnames = [hostname or world.net.hostname(), *more_workers]
    ports = [(master_port, "--master-port"), (worker_port, "--worker-port"), *((0, "") for _ in more_workers)]
    if standby_port is not None:
        ports.append((standby_port, "--standby-port"))
    async with _locked(place, world) as held:
        journal = Log(world, log)
        with _metadata(place, open_metadata, world) as store:
            started = [
                await _started(place.worker_data(number), store, world, behaviour, capacity_bytes)
                for number in range(1, len(hostnames) + 1)
            ]
            async with _listening(world, host, ports, any_free_port) as listeners:
                for_master, for_workers = listeners[0], listeners[1 : 1 + len(hostnames)]
                for_standby = listeners[1 + len(hostnames) :]
                reached = hostnames[0] if host in _WILDCARD else host
                cluster = Cluster(
                    [
                        WorkerNode(
                            version,
                            name,
                            reached,
                            listener.port,
                            blocks,
                            world.clock.time_ms(),
                            world.random.uuid(),
                        )
                        for (blocks, version), name, listener in zip(started, hostnames, for_workers, strict=True)
                    ]
                )
                master = Master(
                    Namespace(store, world.clock.time_ms, cluster.release, behaviour),
                    cluster,
                    active_master=host_port(reached, for_master.port),
                    behaviour=behaviour,
                    world=world,
                    log=journal,
                )
                server = Server(
                    place.path,
                    reached,
                    for_master.port,
                    for_workers[0].port,
                    hostnames[0],
                    tuple(listener.port for listener in for_workers[1:]),
                    for_standby[0].port if for_standby else None,
                )
                _write_record(place, server, world)
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(accept, for_master, master.serve, journal)
                    workers = [Worker(blocks, behaviour=behaviour, world=world, log=journal) for blocks, _ in started]
                    for worker, listener in zip(workers, for_workers, strict=True):
                        nursery.start_soon(accept, listener, worker.serve, journal)
                    if enrol:
                        nursery.start_soon(keep_record, world, place.path, server.url, master, workers)
                    for listener in for_standby:
                        nursery.start_soon(accept, listener, serve_standby, journal)
                    nursery.start_soon(cluster.remove_released, world, journal)
                    nursery.start_soon(master.reap_doomed)
                    nursery.start_soon(master.delete_expired, ttl_check_interval_s)
                    nursery.start_soon(_checkpoints, store, master, world, journal)
                    journal.info(f"serving {place.path} at {server.url}")
                    task_status.started(server)
                    if stop_when_unused:
                        held.append(await _last_user_gone(place, world))
                        journal.info("nobody is attached any more")
                        nursery.cancel_scope.cancel()


async def _started(
    data: str, store: MetaStore, world: World, behaviour: Behaviour, capacity_bytes: int | None
) -> tuple[BlockStore, StorageVersion]:
    """The blocks of one worker, looked through."""
    kind = InPlaceBlockStore if behaviour.rewrites_in_place else BlockStore
    blocks = kind(Layout(data, CLUSTER_ID), store.block, world, behaviour, capacity_bytes=capacity_bytes)
    try:
        return blocks, await world.threads.run(blocks.start, store)
    except OSError as error:
        raise EnvironmentError_(
            f"{error.filename or data} cannot be used: {os.strerror(error.errno or 0)}.", errno_=error.errno
        ) from error


@asynccontextmanager
async def _locked(place: Directory, world: World) -> AsyncIterator[list[int]]:
    """The right to serve this directory, and a list of descriptors to close after giving it up.

    Somebody may hold the lock for a moment while looking whether a server runs."""
    held = [_open_lock(place.server_lock, world)]
    try:
        deadline_s = world.clock.monotonic_s() + _LOCK_TIMEOUT_S
        while not world.disk.lock(held[0]):
            if world.clock.monotonic_s() > deadline_s:
                url = place.read_record(world).get("url", "its URL is not known yet")
                raise EnvironmentError_(
                    f"Another server serves {place.path} already ({url}); use that one, or stop it first.",
                    errno_=errno.EBUSY,
                )
            await world.clock.sleep(0.02)
        yield held
    finally:
        for fd in held:
            world.disk.close(fd)


def _open_lock(path: str, world: World) -> int:
    try:
        return world.disk.open(path, os.O_RDWR | os.O_CREAT)
    except OSError as error:
        raise EnvironmentError_(
            f"{path} cannot be written: {os.strerror(error.errno or 0)}; check the permissions of its directory.",
            errno_=error.errno,
        ) from error


@contextmanager
def _metadata(place: Directory, open_metadata: Callable[[str], MetaStore], world: World) -> Iterator[MetaStore]:
    # Made here with its mode; SQLite gives the files beside it the same.
    world.disk.close(_open_lock(place.database, world))
    store = open_metadata(place.database)
    try:
        yield store
    finally:
        store.close()


@asynccontextmanager
async def _listening(
    world: World, host: str, ports: Sequence[tuple[int, str]], any_free_port: bool
) -> AsyncIterator[list[Listener]]:
    """Listeners for (port, the option that named it)."""
    listeners: list[Listener] = []
    try:
        for port, option in ports:
            try:
                listeners.append(await world.net.listen(host, port))
            except EnvironmentError_ as error:
                if error.errno_ != errno.EADDRINUSE:
                    raise
                if any_free_port:
                    listeners.append(await world.net.listen(host, 0))
                    continue
                raise EnvironmentError_(
                    f"Port {port} on {host} is taken by another program; choose another with {option}.",
                    errno_=error.errno_,
                ) from error
        yield listeners
    finally:
        with trio.CancelScope(shield=True):
            for listener in listeners:
                await listener.aclose()


def _write_record(place: Directory, server: Server, world: World) -> None:
    record = {
        "pid": world.process_id(),
        "host": server.host,
        "master_port": server.master_port,
        "worker_port": server.worker_port,
        "hostname": server.hostname,
        "url": server.url,
        "version": __version__,
    }
    try:
        world.disk.write_file(place.record, json.dumps(record, indent=1).encode() + b"\n")
    except OSError as error:
        raise EnvironmentError_(
            f"{place.record} cannot be written: {os.strerror(error.errno or 0)}; make room, or check its permissions.",
            errno_=error.errno,
        ) from error


async def _last_user_gone(place: Directory, world: World) -> int:
    """Wait until nobody has been attached for a while. The descriptor returned keeps newcomers out until it is closed,
    so that they find either a server that stays or none."""
    unused_since_s: float | None = None
    while True:
        now_s = world.clock.monotonic_s()
        fd = _open_lock(place.users_lock, world)
        if not world.disk.lock(fd):
            unused_since_s = None
        elif unused_since_s is None:
            unused_since_s = now_s
        elif now_s - unused_since_s >= _UNUSED_GRACE_S:
            return fd
        world.disk.close(fd)
        await world.clock.sleep(_USERS_POLL_S)


async def _checkpoints(store: MetaStore, master: Master, world: World, journal: Log) -> None:
    """Empty the metadata log now and then; let mutations wait only when it would grow without end."""
    last_s = world.clock.monotonic_s()
    while True:
        await world.clock.sleep(_HOUSEKEEPING_PERIOD_S)
        now_s = world.clock.monotonic_s()
        due = now_s - last_s >= _CHECKPOINT_PERIOD_S or store.pending_records >= _CHECKPOINT_RECORDS
        if not due or store.pending_records == 0:
            continue
        last_s = now_s
        try:
            if not await world.threads.run(store.checkpoint):
                async with master.quiet():
                    await world.threads.run(store.checkpoint)
        except CurvfsError as error:
            journal.error(str(error))
