# ruff: noqa: TID251  (what the client is measured against is bare system calls)
"""``python -m tools.clientbench``: what the client costs beside bare system calls.

Ratios are taken round by round, the two sides one right after the other and each first in every other round, so that
what else the machine does strikes both. The server, and the bare copy's other end, are processes of their own.
"""

from __future__ import annotations

import argparse
import contextlib
import mmap
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import trio

from curvfs.api import CurvineFileSystem, LocalExtent, SyncFileSystem, open_filesystem
from curvfs.units import GIB, MIB, parse_size

ROUNDS = 7
HOSTNAME = "bench-host"
#: What one call of either side reads or writes.
_CALL_BYTES = 4 * MIB
_UNARY_CALLS = 4000


# ------------------------------------------------------------------------------------------------------ the bare copy


def serve_bare(path: str) -> None:
    """The other end of the bare copy: prints its port; each connection names what it wants in 16 bytes."""
    listener = socket.create_server(("127.0.0.1", 0))
    print(listener.getsockname()[1], flush=True)
    buffer = memoryview(bytearray(_CALL_BYTES))
    while True:
        connection, _ = listener.accept()
        with connection:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            what, size = connection.recv(16, socket.MSG_WAITALL).split()
            if what == b"read":
                _send_file(connection, path, int(size), buffer)
            else:
                _receive_file(connection, f"{path}.written", int(size), buffer)
                connection.sendall(b"!")


def _send_file(connection: socket.socket, path: str, size: int, buffer: memoryview) -> None:
    fd = os.open(path, os.O_RDONLY)
    try:
        done = 0
        while done < size:
            count = os.preadv(fd, [buffer], done)
            connection.sendall(buffer[:count])
            done += count
    finally:
        os.close(fd)


def _receive_file(connection: socket.socket, path: str, size: int, buffer: memoryview) -> None:
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    try:
        done = 0
        while done < size:
            count = connection.recv_into(buffer)
            os.pwritev(fd, [buffer[:count]], done)
            done += count
    finally:
        os.close(fd)


def bare_read(port: int, size: int) -> None:
    buffer = memoryview(bytearray(_CALL_BYTES))
    with socket.create_connection(("127.0.0.1", port)) as connection:
        connection.sendall(b"read %11d" % size)
        for start in range(0, size, _CALL_BYTES):
            rest = buffer[: size - start]
            while rest:  # every call of a reader fills its buffer
                count = connection.recv_into(rest)
                if not count:
                    raise OSError("the bare server went away")
                rest = rest[count:]


def bare_write(port: int, size: int) -> None:
    buffer = memoryview(bytearray(_CALL_BYTES))
    with socket.create_connection(("127.0.0.1", port)) as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.sendall(b"writ %11d" % size)
        for start in range(0, size, _CALL_BYTES):
            connection.sendall(buffer[: size - start])
        connection.recv(1)


# ---------------------------------------------------------------------------------------------------------- the client


async def client_read(fs: CurvineFileSystem, path: str, size: int) -> None:
    buffer = bytearray(_CALL_BYTES)
    async with await fs.open(path) as reader:
        for start in range(0, size, _CALL_BYTES):
            await reader.readinto(buffer, start)


async def client_write(fs: CurvineFileSystem, path: str, size: int) -> None:
    buffer = memoryview(bytearray(_CALL_BYTES))
    async with await fs.create(path, overwrite=True) as writer:
        for start in range(0, size, _CALL_BYTES):
            await writer.write(buffer[: size - start])


def direct_read(fs: SyncFileSystem, path: str, huge: bool) -> None:
    """Through lent descriptors, as the KV store reads: into a huge page as it does, or into ordinary ones as dd."""
    with (
        mmap.mmap(-1, _CALL_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as memory,
        fs.open_extents(path, direct=True) as extents,
    ):
        memory.madvise(mmap.MADV_HUGEPAGE if huge else mmap.MADV_NOHUGEPAGE)
        for extent in extents.extents:
            if not isinstance(extent, LocalExtent) or not extent.direct:
                raise SystemExit(f"{path} cannot be read directly here: {extent}")
            for start in range(0, extent.length_bytes, _CALL_BYTES):
                os.preadv(extent.fd, [memory], start)


def dd(path: str) -> None:
    arguments = ["dd", f"if={path}", "of=/dev/null", f"bs={_CALL_BYTES}", "iflag=direct"]
    subprocess.run(arguments, check=True, capture_output=True)


# ----------------------------------------------------------------------------------------------------------- measuring


def seconds(action: Callable[[], object]) -> float:
    started = time.perf_counter()
    action()
    return time.perf_counter() - started


def compare(name: str, ours: Callable[[], object], bare: Callable[[], object], size: int, target: float) -> str:
    """Seven interleaved rounds, as a row of the report."""
    ours()
    bare()  # everything is warm
    ratios, mine, theirs = [], [], []
    for number in range(ROUNDS):
        if number % 2:
            other, own = seconds(bare), seconds(ours)
        else:
            own, other = seconds(ours), seconds(bare)
        ratios.append(other / own)
        mine.append(size / own / GIB)
        theirs.append(size / other / GIB)
    median = statistics.median(ratios)
    verdict = "met" if median >= target else "missed"
    return (
        f"| {name} | {median:.2f} | {min(ratios):.2f} to {max(ratios):.2f} | {statistics.median(mine):.2f} | "
        f"{statistics.median(theirs):.2f} | {target:.2f} | {verdict} |"
    )


@contextlib.contextmanager
def process(*arguments: str) -> Iterator[str]:
    """A process that says one line when it is ready; the last word of it."""
    with subprocess.Popen([sys.executable, *arguments], stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        try:
            yield child.stdout.readline().split()[-1]
        finally:
            child.terminate()
            child.wait(20)


def unary_rates(url: str) -> str:
    async def alone(fs: CurvineFileSystem) -> float:
        await fs.stat("/")
        started = time.perf_counter()
        for _ in range(_UNARY_CALLS):
            await fs.stat("/small")
        return _UNARY_CALLS / (time.perf_counter() - started)

    async def pipelined(fs: CurvineFileSystem) -> float:
        names = ["/small"] * 512
        started = time.perf_counter()
        for _ in range(0, 4 * _UNARY_CALLS, len(names)):
            await fs.locate_many(names)
        return 4 * _UNARY_CALLS / (time.perf_counter() - started)

    async def measure() -> tuple[list[float], list[float]]:
        async with open_filesystem(url, master_connections=1, client_hostname="elsewhere") as fs:
            await client_write(fs, "/small", 4096)
            rounds = [(await alone(fs), await pipelined(fs)) for _ in range(ROUNDS)]
        return [first for first, _ in rounds], [second for _, second in rounds]

    single, many = trio.run(measure)
    return "\n".join(
        f"| unary calls per second on one connection, {name} | {statistics.median(rates):,.0f} | "
        f"{min(rates):,.0f} to {max(rates):,.0f} |"
        for name, rates in (("one at a time", single), ("pipelined, 512 in flight", many))
    )


def memory(url: str, size: int) -> None:
    """Print the peak of resident memory above idle while ``size`` bytes are written and read, in MiB."""

    def high_water() -> int:
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith("VmHWM"):
                return int(line.split()[1])
        raise SystemExit("this kernel does not tell VmHWM")

    async def transfer() -> int:
        async with open_filesystem(url, client_hostname="elsewhere") as fs:
            await client_write(fs, "/memory", MIB)
            idle = high_water()
            await client_write(fs, "/memory", size)
            await client_read(fs, "/memory", size)
            peak = high_water() - idle
            await fs.delete("/memory")
            return peak

    print(f"{trio.run(transfer) / 1024:.1f}")


def measure(directory: str, size: int) -> Iterator[str]:
    """The rows of the report, as they come."""
    base = Path(directory)
    bare_file = base / "bare"
    with bare_file.open("wb") as file:
        for _ in range(0, size, _CALL_BYTES):
            file.write(os.urandom(_CALL_BYTES))
    options = ("--master-port", "0", "--worker-port", "0", "--hostname", HOSTNAME)
    with (
        process("-m", "curvfs.server", str(base / "pool"), *options) as url,
        process("-m", "tools.clientbench", "--serve-bare", str(bare_file)) as port,
    ):
        with SyncFileSystem.connect(url, client_hostname="elsewhere") as fs:
            run = fs.portal.run
            run(client_write, fs.filesystem, "/big", size)
            yield compare(
                "remote sequential read",
                partial(run, client_read, fs.filesystem, "/big", size),
                partial(bare_read, int(port), size),
                size,
                1.0,
            )
            yield compare(
                "remote sequential write",
                partial(run, client_write, fs.filesystem, "/written", size),
                partial(bare_write, int(port), size),
                size,
                0.8,
            )
            fs.delete("/written")
        with SyncFileSystem.connect(url, client_hostname=HOSTNAME) as fs:
            block_size = min(size, GIB)
            with fs.create("/direct", block_size_bytes=block_size) as writer:
                for _ in range(0, block_size, _CALL_BYTES):
                    writer.write(memoryview(os.urandom(_CALL_BYTES)))
            block_id = fs.locate("/direct").blocks[0].block_id
            (path,) = (base / "pool").glob(f"data/*/active/*/*/blk_{block_id}")
            os.sync()
            for huge, pages in ((False, "ordinary pages"), (True, "a huge page")):
                yield compare(
                    f"local read, lent descriptors, {pages}",
                    partial(direct_read, fs, "/direct", huge),
                    partial(dd, str(path)),
                    block_size,
                    0.95,
                )

            def uncached() -> None:
                fd = os.open(path, os.O_RDONLY)
                os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
                os.close(fd)
                fs.portal.run(client_read, fs.filesystem, "/direct", block_size)

            yield compare("local read, readinto, nothing cached", uncached, partial(dd, str(path)), block_size, 0.95)
        yield unary_rates(url)
        command = [sys.executable, "-m", "tools.clientbench", "--memory", url, "--size", str(4 * size)]
        peaks = [float(subprocess.run(command, check=True, capture_output=True, text=True).stdout) for _ in range(2)]
        yield (
            f"| peak memory above idle, {4 * size // GIB} GiB written and read | {max(peaks):.1f} MiB | "
            f"{'met' if max(peaks) <= 64 else 'missed'} (64 MiB) |"
        )


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tools.clientbench", description="Measure the client.")
    parser.add_argument("--size", default="1GB", help="bytes per transfer")
    parser.add_argument("--directory", help="where the data lies; default: a temporary one")
    parser.add_argument("--serve-bare", metavar="FILE", help=argparse.SUPPRESS)
    parser.add_argument("--memory", metavar="URL", help=argparse.SUPPRESS)
    found = parser.parse_args()
    size = parse_size(found.size)
    if found.serve_bare:
        serve_bare(found.serve_bare)
        return
    if found.memory:
        memory(found.memory, size)
        return
    load, cores = os.getloadavg()[0], os.cpu_count()
    print(
        f"{size // MIB} MiB per transfer, {ROUNDS} interleaved rounds; {cores} cores, load {load:.1f} at the start.\n"
    )
    print("| what | median ratio | spread | client GiB/s | bare GiB/s | target | |\n|---|---|---|---|---|---|---|")
    with tempfile.TemporaryDirectory(dir=found.directory, prefix="curvfs-bench-") as directory:
        for row in measure(directory, size):
            print(row, flush=True)


if __name__ == "__main__":
    main()
