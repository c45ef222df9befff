"""Checks of a cluster: its masters and workers, our settings against it, and whether its blocks are near."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from contextlib import suppress

from curvfs.api import ClientConfig, FilesystemInfo, LocalExtent, Settings, SyncFileSystem, WorkerInfo
from curvfs.errors import CurvfsError, NotLeader
from curvfs.units import MIB, format_size
from curvfs.world import World
from tools.doctor.findings import Finding, error, note, ok, warning

_PATIENCE_S = 5.0
_SKEW_S = 5.0
_PROBE_BYTES = MIB
_LITTLE_ROOM = 0.05
_REASONS = {
    "off": "short_circuit is off in the settings",
    "other_host": "no worker of it goes by this client's host name",
    "missing": "the path that the worker names is not on this machine",
    "no_permission": "this user may not open the worker's block files",
    "no_version_file": "the path that the worker names is not in a data directory of its own",
    "other_worker": "the data directory here is that of another worker",
    "other_cluster": "the data directory here is that of another cluster",
    "other_bytes": "the files here hold other bytes than the worker sends",
    "stuck": "the disk here does not answer",
}


def check_cluster(world: World, settings: Settings, *, write: bool) -> Iterator[Finding]:
    """``write``: also write a file of 1 MiB, read it back and remove it."""
    config = dataclasses.replace(
        settings.config,
        connect_timeout_s=min(_PATIENCE_S, settings.config.connect_timeout_s),
        rpc_timeout_s=min(_PATIENCE_S, settings.config.rpc_timeout_s),
        retry_max_s=min(_PATIENCE_S, settings.config.retry_max_s),
    )
    yield from _settings(world, settings)
    reachable = 0
    for host, port in config.masters:
        finding = _master(world, config, host, port)
        reachable += finding.level == 0
        yield finding
    if not reachable:
        return
    try:
        with SyncFileSystem.connect(config, world=world) as client:
            info = client.statfs()
            yield from _workers(world, config, info)
            yield from _room(info)
            if write:
                yield from _near(world, client, info)
    except CurvfsError as failed:
        yield error("cluster", f"The cluster does not serve: {failed}", "Look at the masters' logs.")


def _settings(world: World, settings: Settings) -> Iterator[Finding]:
    config = settings.config
    for name in settings.unused:
        yield note("settings", f"The setting {name} is not used by this client.", "Check how it is spelt.")
    near = {"localhost", "127.0.0.1", "::1", world.net.hostname()}
    if config.hostname in ("localhost", "127.0.0.1") and any(host not in near for host, _ in config.masters):
        yield warning(
            "hostname",
            f"This client calls itself {config.hostname}, but the masters are elsewhere, so no block is ever near.",
            "Set the client hostname to the name by which the worker of this machine goes.",
        )
    if config.retry_max_s < config.rpc_timeout_s:
        yield note(
            "settings",
            f"retry_max_s ({config.retry_max_s:g}) is below rpc_timeout_s ({config.rpc_timeout_s:g}): a call that "
            "hangs is never tried again.",
            "Raise the first, or lower the second.",
        )


def _master(world: World, config: ClientConfig, host: str, port: int) -> Finding:
    shown = f"{host}:{port}"
    alone = dataclasses.replace(config, masters=((host, port),))
    started_s = world.clock.monotonic_s()
    try:
        with SyncFileSystem.connect(alone, world=world) as client:
            connected_s = world.clock.monotonic_s() - started_s
            started_s = world.clock.monotonic_s()
            version = client.statfs().server_version
            call_s = world.clock.monotonic_s() - started_s
    except NotLeader:
        return ok("master", f"Master {shown} answers and is not the leader.")
    except CurvfsError as failed:
        return error("master", f"Master {shown} is of no use: {failed}", "Check address, port and firewall.")
    release = f" (version {version})" if version else ""
    times = f"connected in {connected_s * 1e3:.1f} ms, a call takes {call_s * 1e3:.1f} ms"
    return ok("master", f"Master {shown}{release} leads; {times}.")


def _workers(world: World, config: ClientConfig, info: FilesystemInfo) -> Iterator[Finding]:
    live = info.live_workers
    if not live:
        yield error("workers", "No worker is alive, so nothing can be read or written.", "Start the workers.")
        return
    for worker in info.workers:
        yield _worker(worker)
    if config.replicas > len(live):
        yield error(
            "replicas",
            f"Files are to have {config.replicas} replicas, but {len(live)} worker(s) live.",
            "Start more workers, or lower the replicas.",
        )
    ours = config.hostname or world.net.hostname()
    named = sorted({worker.address.hostname for worker in live})
    if config.short_circuit and ours not in named:
        yield note(
            "locality",
            f"This client calls itself {ours}, the workers {', '.join(named)}: every read goes over the network.",
            "If a worker runs on this machine, set the client hostname to its name.",
        )


def _worker(worker: WorkerInfo) -> Finding:
    where = f"Worker {worker.address.hostname} ({worker.address.address}:{worker.address.port})"
    if worker.state != "live":
        return warning("workers", f"{where} is {worker.state}.", "Start it again, or take it out of the cluster.")
    release = f", version {worker.software_version}" if worker.software_version else ""
    return ok("workers", f"{where} is alive{release}, {format_size(worker.available_bytes)} free.")


def _room(info: FilesystemInfo) -> Iterator[Finding]:
    shown = f"The pool has {format_size(info.available_bytes)} of {format_size(info.capacity_bytes)} free."
    if info.available_bytes < _LITTLE_ROOM * info.capacity_bytes:
        yield warning("pool-room", shown, "Remove files, lower quotas, or add workers: writes will soon be refused.")
    else:
        yield ok("pool-room", shown)


def _near(world: World, client: SyncFileSystem, info: FilesystemInfo) -> Iterator[Finding]:
    """Write a file, and see where its bytes can be read from."""
    path = f"/.curvfs-doctor-{world.random.uuid()}"
    content = world.random.randbytes(_PROBE_BYTES)
    try:
        with client.create(path) as writer:
            writer.write(content)
        yield _clock(world, client.stat(path).mtime_ms)
        with client.open_extents(path) as extents:
            back = bytearray(_PROBE_BYTES)
            extents.readinto(back, 0)
            if bytes(back) != content:
                yield error("read-back", "The pool gave other bytes than were written.", "Check the worker's disk.")
                return
            first = extents.extents[0]
            if isinstance(first, LocalExtent):
                yield ok("short-circuit", "A block was read from the worker's own file on this machine, and is right.")
                return
        reason = _REASONS.get(first.reason, first.reason.replace("_", " "))
        hostnames = {worker.address.hostname for worker in info.live_workers}
        expected = (client.config.hostname or world.net.hostname()) in hostnames and client.config.short_circuit
        found = f"A block was read over the network, and is right; not from the local file, because {reason}."
        if expected:
            yield warning("short-circuit", found, "Run where, and as whom, the worker's files can be read.")
        else:
            yield ok("short-circuit", found)
    except CurvfsError as failed:
        yield error("read-back", f"A file of 1 MiB could not be written and read: {failed}", "See the findings above.")
    finally:
        with suppress(CurvfsError):
            client.delete(path)


def _clock(world: World, mtime_ms: int) -> Finding:
    skew_s = (world.clock.time_ms() - mtime_ms) / 1000
    if abs(skew_s) > _SKEW_S:
        ahead = "ahead of" if skew_s > 0 else "behind"
        return warning(
            "clock",
            f"This machine's clock is {abs(skew_s):.0f} s {ahead} the master's.",
            "Run an NTP client on both: modification times and expiry are the master's.",
        )
    return ok("clock", "This machine's clock agrees with the master's.")
