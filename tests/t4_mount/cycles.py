"""Mount and unmount again and again in one process, and count what is left: ``python -m tests.t4_mount.cycles``.

Descriptors, threads, memory, child processes and mounts of the process, and descriptors, threads and memory of the
server, must be after the last cycle what they were after the first few.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import signal
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import trio

from curvfs.api import EmbeddedServer
from curvfs.world import World
from mount.options import MountOptions
from mount.session import MountSource, run_mount
from tests.t4_mount.mounts import mounted_at

#: After so many cycles everything that is kept on purpose is there.
WARM = 5
#: What memory may grow by for reasons of the allocator, whatever the number of cycles.
MEMORY_SLACK_KIB = 8 * 1024


@dataclass(frozen=True, slots=True)
class Held:
    """What a process holds."""

    descriptors: int
    threads: int
    memory_kib: int
    children: int

    @classmethod
    def by(cls, pid: int) -> Held:
        process = Path(f"/proc/{pid}")
        status = dict(line.split(":", 1) for line in (process / "status").read_text().splitlines())
        children = (process / "task" / str(pid) / "children").read_text().split()
        return cls(
            len(os.listdir(process / "fd")),
            int(status["Threads"]),
            int(status["VmRSS"].split()[0]),
            len(children),
        )

    def leaked_since(self, before: Held) -> str | None:
        """What there is more of than before; trio keeps idle threads for a while, so they may come and go."""
        if self.descriptors > before.descriptors + 2:
            return f"{self.descriptors - before.descriptors} descriptors"
        if self.threads > before.threads + 8:
            return f"{self.threads - before.threads} threads"
        if self.children > before.children:
            return f"{self.children - before.children} processes"
        if self.memory_kib > before.memory_kib + MEMORY_SLACK_KIB:
            return f"{self.memory_kib - before.memory_kib} KiB"
        return None


async def _cycle(pool: str, mountpoint: Path, number: int) -> None:
    """One mount: publish an object, read it and an older one, be told to stop, and be gone."""
    ready = trio.Event()

    def use() -> None:
        kv = mountpoint / "kv"
        (kv / "o.tmp").write_bytes(b"%d" % number * 10_000)
        os.rename(kv / "o.tmp", kv / "o")
        assert (kv / "o").read_bytes() == b"%d" % number * 10_000
        assert json.loads((mountpoint / ".curvfs" / "stats.json").read_bytes())["objects"]["published"] == 1

    async def user() -> None:
        await ready.wait()
        await trio.to_thread.run_sync(use)
        os.kill(os.getpid(), signal.SIGTERM)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(user)
        await run_mount(
            MountSource(embedded=pool), str(mountpoint), MountOptions(), on_ready=lambda url, path: ready.set()
        )
    assert mounted_at(mountpoint) == []


def cycle(number: int, directory: Path, report: Callable[[str], None] = lambda line: None) -> str | None:
    """So many cycles; what leaked, or None."""
    pool, mountpoint = directory / "pool", directory / "mnt"
    mountpoint.mkdir()
    server = EmbeddedServer.attach(str(pool), world=World.real())  # one that outlives the mounts
    try:
        pid = json.loads((pool / "server.json").read_bytes())["pid"]
        before: tuple[Held, Held] | None = None
        for index in range(number):
            trio.run(_cycle, str(pool), mountpoint, index)
            gc.collect()
            if index + 1 == min(WARM, number):
                before = Held.by(os.getpid()), Held.by(pid)
            if (index + 1) % 100 == 0:
                report(f"{index + 1} cycles: {Held.by(os.getpid())}, server {Held.by(pid)}")
        assert before is not None
        mine, servers = Held.by(os.getpid()).leaked_since(before[0]), Held.by(pid).leaked_since(before[1])
        report(f"before: {before[0]}, server {before[1]}\nafter:  {Held.by(os.getpid())}, server {Held.by(pid)}")
        return mine or (None if servers is None else f"{servers} of the server")
    finally:
        server.close()


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.t4_mount.cycles", description=__doc__)
    parser.add_argument("--number", type=int, default=1000)
    number = parser.parse_args().number
    with tempfile.TemporaryDirectory(prefix="curvfs-cycles-") as directory:
        leaked = cycle(number, Path(directory), lambda line: print(line, flush=True))
    print(f"{number} cycles: {f'LEAKED {leaked}' if leaked else 'nothing is left'}")
    return 1 if leaked else 0


if __name__ == "__main__":
    sys.exit(main())
