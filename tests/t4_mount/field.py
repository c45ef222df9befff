"""Faults met in the field by users of such systems, as often as they were met: ``python -m tests.t4_mount.field``.

The tests do the same with fewer rounds.
"""

from __future__ import annotations

import argparse
import errno
import fcntl
import hashlib
import json
import os
import random
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from tests.t4_mount.mounts import COMMAND, Mount, mounted, wait_for

_LOST = {errno.ENOSPC, errno.EIO, errno.EROFS}
_SHUT_DOWN = 0x8004587D  # EXT4_IOC_SHUTDOWN: what was written is synced, every later write is answered with EIO
_MAPPED_BYTES = 64 << 20
_MAPPER = """
import hashlib, mmap, os, random, sys, time
path, sums, seed, seconds = sys.argv[1], open(sys.argv[2]).read().split(), int(sys.argv[3]), float(sys.argv[4])
chance, pages, end = random.Random(seed), 0, time.monotonic() + seconds
fd = os.open(path, os.O_RDONLY)
kind = seed % 3
if kind == 2:
    import numpy
    mapped = numpy.memmap(path, mode="r")
else:
    mapped = mmap.mmap(fd, 0, flags=(mmap.MAP_SHARED, mmap.MAP_PRIVATE)[kind], prot=mmap.PROT_READ)
while time.monotonic() < end:
    page = chance.randrange(len(sums))
    found = bytes(mapped[page * 4096 : page * 4096 + 4096])
    if hashlib.md5(found).hexdigest() != sums[page] or found != os.pread(fd, 4096, page * 4096):
        sys.exit(f"page {page} is not what was written")
    pages += 1
print(pages)
"""


def _errno(call: Callable[..., Any], *arguments: Any) -> int:
    try:
        call(*arguments)
    except OSError as error:
        return error.errno or -1
    return 0


# ----------------------------------------------------------------------------------------------------- failed writes


class SmallDisk:
    """An ext4 of its own in a file, with a server on it that can be started again at the same ports."""

    def __init__(self, directory: Path, size_mib: int) -> None:
        self.image, self.place = directory / "image", directory / "disk"
        self.place.mkdir()
        with self.image.open("wb") as file:
            file.truncate(size_mib << 20)
        subprocess.run(["mkfs.ext4", "-q", "-F", "-m", "0", str(self.image)], check=True)
        self._server: subprocess.Popen[str] | None = None
        self._ports = ("0", "0")
        self.url = ""

    def start(self) -> None:
        subprocess.run(["mount", "-o", "loop", str(self.image), str(self.place)], check=True)
        pool = self.place / "pool"
        ports = ["--master-port", self._ports[0], "--worker-port", self._ports[1]]
        self._server = subprocess.Popen([*COMMAND, "serve", str(pool), *ports], stdout=subprocess.PIPE, text=True)
        assert self._server.stdout is not None
        assert "curvine://" in self._server.stdout.readline()
        record = json.loads((pool / "server.json").read_text())
        self._ports = str(record["master_port"]), str(record["worker_port"])
        self.url = f"curvine://127.0.0.1:{self._ports[0]}/"

    def fail(self) -> None:
        """Every write to it fails from now on, until it is mounted anew."""
        fd = os.open(self.place, os.O_RDONLY)
        try:
            fcntl.ioctl(fd, _SHUT_DOWN, struct.pack("I", 0))
        finally:
            os.close(fd)

    def stop(self) -> None:
        if self._server is not None:
            self._server.kill()
            self._server.communicate()
            self._server = None
        unmount = ["umount", str(self.place)]
        wait_for(lambda: subprocess.run(unmount, capture_output=True).returncode == 0, 60, "the end of its users")


@contextmanager
def small_disk(directory: Path, size_mib: int) -> Iterator[SmallDisk]:
    disk = SmallDisk(directory, size_mib)
    disk.start()
    try:
        yield disk
    finally:
        disk.stop()


def failed_writes(directory: Path, rounds: int) -> str:
    """200 MiB to a pool of 64 MiB, and to one whose disk fails in mid-write: some call says so, later ones do not
    forget it, nothing is published, and the next object is stored once the fault is gone."""
    told = set()
    with small_disk(directory, 64) as disk, mounted(directory, "-o", "block_size=8MB", disk.url) as mount:
        for number in range(rounds):
            for way in ("full", "failing"):
                name = mount.kv / f"{way}-{number}"
                content = random.Random(number).randbytes(1 << 20)
                fd = os.open(f"{name}.tmp", os.O_WRONLY | os.O_CREAT)
                found = 0
                for written in range(200):
                    if way == "failing" and written == 10:
                        disk.fail()
                    if found := _errno(os.write, fd, content):
                        break
                answers = [found, _errno(os.fsync, fd), _errno(os.fsync, fd), _errno(os.close, fd)]
                answers.append(_errno(os.rename, f"{name}.tmp", name))
                assert set(answers) <= _LOST, f"{way}: {answers}"
                told |= set(answers)
                if way == "failing":
                    disk.stop()
                    disk.start()
                wait_for(partial(_stored_anew, mount, name, content), 60, f"an object after the disk was {way}")
    return f"{2 * rounds} rounds, answered {', '.join(sorted(errno.errorcode[number] for number in told))}"


def _stored_anew(mount: Mount, name: Path, content: bytes) -> bool:
    """The name was not published, and another object can be, and goes again."""
    after = mount.kv / "after"
    try:
        assert name.name not in os.listdir(mount.kv)
        Path(f"{after}.tmp").write_bytes(content)
        os.rename(f"{after}.tmp", after)
        assert after.read_bytes() == content
        after.unlink()
    except OSError:
        return False
    return True


# ------------------------------------------------------------------------------------------------- close, then open


def close_to_open(directory: Path, rounds: int) -> str:
    """Looked at and read on one mount, appended to or made anew on the other: whoever opens it after the close gets the
    new size and every byte, by both ways of reading."""
    pool = directory / "pool"
    with (
        mounted(directory, "--embedded", pool, name="a") as one,
        mounted(directory, "--embedded", pool, "--client-hostname", "elsewhere", name="b") as other,
    ):
        for number in range(rounds):
            writer, reader = (one, other) if number % 4 < 2 else (other, one)
            chance = random.Random(number)
            content = chance.randbytes(4096)
            here, there = reader.path / "f", writer.path / "f"
            there.unlink(missing_ok=True)
            there.write_bytes(content)
            assert here.stat().st_size == 4096
            assert here.read_bytes() == content
            more = chance.randbytes(1 << 20)
            if number % 2:
                there.unlink()
                content = b""
            with open(there, "ab") as file:
                file.write(more)
                file.flush()
                os.fsync(file.fileno())
            content += more
            with open(here, "rb") as file:
                size = os.fstat(file.fileno()).st_size
                found = file.read()
            assert (size, len(found)) == (len(content), len(content)), f"round {number}: {size}, {len(found)}"
            assert hashlib.sha256(found).digest() == hashlib.sha256(content).digest(), f"round {number}"
            assert here.stat().st_size == len(content)
    return f"{rounds} rounds"


# -------------------------------------------------------------------------------------------------------- mappings


def mapped(directory: Path, seconds: float) -> str:
    """16 processes fault random pages of one object, shared, private and by numpy, then again beside a direct reader;
    the daemon answers others within a second meanwhile."""
    content = random.Random(1).randbytes(_MAPPED_BYTES)
    sums = directory / "sums"
    sums.write_text("\n".join(hashlib.md5(content[at : at + 4096]).hexdigest() for at in range(0, len(content), 4096)))
    slowest_s, pages = 0.0, 0
    pool = directory / "pool"
    with (
        mounted(directory, "--embedded", pool, name="a") as one,
        mounted(directory, "--embedded", pool, "--client-hostname", "elsewhere", name="b") as other,
    ):
        (one.kv / "o.tmp").write_bytes(content)
        os.rename(one.kv / "o.tmp", one.kv / "o")
        for mount in (one, other):
            for direct in (False, True):
                programs = [_start_mapper(mount.kv / "o", sums, seed, seconds / 4) for seed in range(16)]
                fd = os.open(mount.kv / "o", os.O_RDONLY | os.O_DIRECT)
                number = 0
                while any(program.poll() is None for program in programs):
                    began_s = time.monotonic()
                    (mount.path / f"absent{number}").exists()
                    slowest_s = max(slowest_s, time.monotonic() - began_s)
                    if direct:
                        at = number % 64 << 20
                        assert os.pread(fd, 1 << 20, at) == content[at : at + (1 << 20)]
                    number += 1
                    time.sleep(0.02)
                os.close(fd)
                for program in programs:
                    out, said = program.communicate()
                    assert program.returncode == 0, said
                    pages += int(out)
    assert slowest_s < 1.0, f"a stat took {slowest_s:.2f} s"
    return f"{pages} pages compared, the slowest stat took {slowest_s * 1000:.0f} ms"


def _start_mapper(path: Path, sums: Path, seed: int, seconds: float) -> subprocess.Popen[str]:
    words = [sys.executable, "-c", _MAPPER, str(path), str(sums), str(seed), f"{seconds}"]
    return subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


CASES: dict[str, Callable[[Path], str]] = {
    "failed writes": lambda directory: failed_writes(directory, 5),
    "close, then open": lambda directory: close_to_open(directory, 200),
    "mappings": lambda directory: mapped(directory, 120.0),
}


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.t4_mount.field", description=__doc__)
    parser.add_argument("cases", nargs="*", help=f"of {', '.join(CASES)}; all of them when none is given")
    failed = 0
    for name in parser.parse_args(arguments).cases or CASES:
        with tempfile.TemporaryDirectory(prefix="curvfs-field-") as directory:
            began_s = time.monotonic()
            try:
                said = CASES[name](Path(directory))
            except (AssertionError, OSError) as error:
                failed += 1
                said = f"FAILED: {error}"
            print(f"{name}: {said}, in {time.monotonic() - began_s:.0f} s", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
