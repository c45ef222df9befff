"""Programs that people run on file systems, run on a mount: ``python -m tests.t4_mount.proofs``.

Each proof works in an empty directory of a mount, is given a directory of this machine's own for what does not belong
there, and raises when anything is not as it is on a local file system. ``size`` says how large it is: 1 is for every
test run (:mod:`tests.t4_mount.test_proofs`), the command line runs more.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import random
import shutil
import sqlite3
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import trio

from curvfs.api import NewFile, open_filesystem
from curvfs.errors import CurvfsError
from tests.t4_mount.mounts import mounted

Proof = Callable[[Path, Path, int], None]

_TIMEOUT_S = 600.0


def run(command: Sequence[str | Path], cwd: Path) -> str:
    """The output of a command that must succeed."""
    done = subprocess.run(
        [str(word) for word in command],
        cwd=cwd,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=_TIMEOUT_S,
        check=False,
        # MAKEFLAGS: whoever runs us under make has its own.
        env={**os.environ, "HOME": str(cwd), "GIT_CONFIG_GLOBAL": os.devnull, "LC_ALL": "C", "MAKEFLAGS": ""},
    )
    if done.returncode:
        raise AssertionError(f"{' '.join(map(str, command))} ended with {done.returncode}:\n{done.stdout[-3000:]}")
    return done.stdout


# ------------------------------------------------------------------------------------------------------------- fio


def fio(directory: Path, scratch: Path, *words: str) -> None:
    """One job with verification, in its own directory; fio leaves state files where it runs."""
    common = ["--do_verify=1", "--verify_fatal=1", "--group_reporting", f"--directory={directory}"]
    run(["fio", "--name=j", *common, *words], scratch)


def fio_sequential(directory: Path, scratch: Path, size: int) -> None:
    for verify, direct, engine in (
        ("crc32c", 0, "psync"),
        ("xxhash", 1, "libaio"),
    ):
        words = [f"--verify={verify}", f"--direct={direct}", f"--ioengine={engine}", "--rw=write"]
        fio(directory, scratch, *words, f"--size={4 * size}m", "--bs=1m", "--iodepth=8")


def fio_random(directory: Path, scratch: Path, size: int) -> None:
    for verify, direct, engine in (("xxhash", 0, "psync"), ("crc32c", 1, "libaio")):
        words = [f"--verify={verify}", f"--direct={direct}", f"--ioengine={engine}", "--rw=randwrite"]
        fio(directory, scratch, *words, f"--size={2 * size}m", "--bs=32k", "--iodepth=16")


def fio_mapped(directory: Path, scratch: Path, size: int) -> None:
    for verify, rw in (("crc32c", "write"), ("xxhash", "randwrite")):
        fio(directory, scratch, f"--verify={verify}", "--ioengine=mmap", f"--rw={rw}", f"--size={size}m", "--bs=64k")


def fio_several_jobs(directory: Path, scratch: Path, size: int) -> None:
    for verify, direct, rw in (("crc32c", 0, "write"), ("xxhash", 1, "randwrite")):
        words = [f"--verify={verify}", f"--direct={direct}", f"--rw={rw}", "--numjobs=4"]
        fio(directory, scratch, *words, f"--size={size}m", "--bs=128k", "--ioengine=psync")


def fio_every_way(directory: Path, scratch: Path, size: int) -> None:
    """All sizes of requests, direct or not, by system call and by libaio; with fio's fallocate and without."""
    for direct, engine, bs, rw in itertools.product(
        (0, 1), ("psync", "libaio"), ("4k", "128k", "1m", "4m"), ("write", "randwrite")
    ):
        words = [f"--direct={direct}", f"--ioengine={engine}", "--iodepth=16", f"--bs={bs}", f"--rw={rw}"]
        for more in (["--fallocate=none"], []):
            fio(directory, scratch, "--verify=crc32c", f"--size={max(4, 2 * size)}m", *words, *more)


# -------------------------------------------------------------------------------------------------------- programs


def git(directory: Path, scratch: Path, size: int) -> None:
    """A repository, commits, a clone, a repack, and what fsck says of both."""
    chance = random.Random(size)
    origin, clone = directory / "origin", directory / "clone"
    run(["git", "init", "-q", origin], directory)
    settings = ["-c", "user.name=n", "-c", "user.email=e@x", "-c", "gc.auto=0"]
    for commit in range(2 * size):
        for index in range(6 * size):
            path = origin / f"d{index % 3}" / f"f{index}"
            path.parent.mkdir(exist_ok=True)
            path.write_bytes(chance.randbytes(chance.randrange(20_000)))
        run(["git", *settings, "add", "."], origin)
        run(["git", *settings, "commit", "-q", "-m", f"commit {commit}"], origin)
    run(["git", "clone", "-q", "--no-hardlinks", origin, clone], directory)
    run(["git", *settings, "repack", "-adq"], clone)
    for place in (origin, clone):
        run(["git", "fsck", "--strict", "--no-progress"], place)
        assert run(["git", "status", "--porcelain"], place) == ""
    run(["diff", "-r", "--exclude=.git", origin, clone], directory)


_MAKEFILE = """\
OBJECTS = $(patsubst %.c,%.o,$(wildcard *.c))
program: $(OBJECTS)
\t$(CC) -o $@ $^
%.o: %.c common.h
\t$(CC) -c -O1 -o $@ $<
clean:
\trm -f program *.o
"""


def build(directory: Path, scratch: Path, size: int) -> None:
    """A C program of several files under make: built, run, found up to date, and built again in part."""
    number = 4 * size
    (directory / "Makefile").write_text(_MAKEFILE)
    declared = "".join(f"int f{index}(void);\n" for index in range(number))
    (directory / "common.h").write_text(f"#include <stdio.h>\n{declared}")
    for index in range(number):
        (directory / f"f{index}.c").write_text(f'#include "common.h"\nint f{index}(void) {{ return {index}; }}\n')
    total = " + ".join(f"f{index}()" for index in range(number))
    (directory / "main.c").write_text(
        f'#include "common.h"\nint main(void) {{ printf("%d\\n", {total}); return 0; }}\n'
    )
    run(["make", "-j2"], directory)
    assert run(["./program"], directory).strip() == str(sum(range(number)))
    assert "up to date" in run(["make"], directory)
    time.sleep(0.02)
    (directory / "f1.c").write_text('#include "common.h"\nint f1(void) { return 1001; }\n')
    again = run(["make"], directory)
    assert "f1.c" in again and "f2.c" not in again
    assert run(["./program"], directory).strip() == str(sum(range(number)) + 1000)
    run(["make", "clean"], directory)
    assert not list(directory.glob("*.o"))


def sqlite(directory: Path, scratch: Path, size: int) -> None:
    """Transactions, a rollback and two connections, with a rollback journal and with a write-ahead log."""
    for mode in ("delete", "truncate", "wal"):
        path = directory / f"{mode}.db"
        first = sqlite3.connect(path, isolation_level=None, timeout=30)
        assert first.execute(f"pragma journal_mode={mode}").fetchone()[0] == mode
        first.execute("create table t (k integer primary key, v blob)")
        for number in range(5 * size):
            first.execute("begin")
            rows = [(None, bytes([number % 256]) * 700) for _ in range(20)]
            first.executemany("insert into t values (?, ?)", rows)
            first.execute("rollback" if number % 5 == 4 else "commit")
        second = sqlite3.connect(path, isolation_level=None, timeout=30)
        kept = sum(20 for number in range(5 * size) if number % 5 != 4)
        assert second.execute("select count(*) from t").fetchone()[0] == kept
        second.execute("update t set v = zeroblob(3000) where k % 3 = 0")
        second.execute("delete from t where k % 7 = 0")
        second.execute("vacuum")
        assert first.execute("pragma integrity_check").fetchone()[0] == "ok"
        assert first.execute("select count(*) from t").fetchone() == second.execute("select count(*) from t").fetchone()
        second.close()
        first.close()
        local = shutil.copy(path, scratch / path.name)
        copied = sqlite3.connect(local)
        assert copied.execute("pragma integrity_check").fetchone()[0] == "ok"
        copied.close()


def tree(directory: Path, files: int) -> Path:
    """A tree with files of many sizes, a sparse one, links of both kinds, modes and times."""
    chance = random.Random(files)
    top = directory / "tree"
    for index in range(files):
        path = top / f"d{index % 5}" / f"e{index % 3}" / f"f{index}"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(chance.randbytes(chance.choice((0, 1, 4095, 4096, 5000, 100_000, 1_500_000))))
        path.chmod(chance.choice((0o600, 0o644, 0o755)))
        os.utime(path, ns=(10**18, 10**18 + index * 10**9))
    with open(top / "sparse", "wb") as file:
        file.truncate(3 << 20)
        file.seek(1 << 20)
        file.write(b"in the middle")
    os.utime(top / "sparse", ns=(10**18, 10**18))
    (top / "link").symlink_to("d0")
    (top / "dangling").symlink_to("nowhere")
    os.link(top / "d0" / "e0" / "f0", top / "second")
    return top


def _same_trees(one: Path, other: Path) -> None:
    run(["diff", "-r", "--no-dereference", one, other], one.parent)
    for path in one.rglob("*"):
        theirs = (other / path.relative_to(one)).lstat()
        ours = path.lstat()
        assert (ours.st_mode, ours.st_uid, ours.st_gid) == (theirs.st_mode, theirs.st_uid, theirs.st_gid), path
        if not path.is_symlink() and not path.is_dir():
            assert (ours.st_mtime_ns, ours.st_nlink) == (theirs.st_mtime_ns, theirs.st_nlink), path


def tar(directory: Path, scratch: Path, size: int) -> None:
    """Out of a mount and into it, with holes kept."""
    source = tree(directory, 12 * size)
    run(["tar", "-cSf", scratch / "a.tar", "tree"], directory)
    for target in (directory / "out", scratch / "out"):
        target.mkdir()
        run(["tar", "-xpf", scratch / "a.tar"], target)
        _same_trees(source, target / "tree")
    run(["tar", "-df", scratch / "a.tar"], directory)


def rsync(directory: Path, scratch: Path, size: int) -> None:
    """There and back, again with nothing to do, in place, and with what --checksum says afterwards."""
    source = tree(scratch, 12 * size)
    target, back = directory / "copy", scratch / "back"
    run(["rsync", "-aHS", f"{source}/", target], scratch)
    _same_trees(source, target)
    assert run(["rsync", "-aHi", f"{source}/", target], scratch) == ""
    changed = source / "d1" / "e1" / "f1"
    with open(changed, "r+b") as file:
        file.write(b"changed in place")
        file.truncate(4_000_000)
    os.utime(changed, ns=(10**18, 10**18))
    run(["rsync", "-aH", "--inplace", "--no-whole-file", f"{source}/", target], scratch)
    _same_trees(source, target)
    assert run(["rsync", "-aHic", f"{source}/", target], scratch) == ""
    run(["rsync", "-aH", "--delete", f"{target}/", back], scratch)
    _same_trees(source, back)


def _mount_of(directory: Path) -> dict[str, Any]:
    """What the mount that a directory is on tells of itself."""
    found: dict[str, Any] = json.loads((directory.parent / ".curvfs" / "stats.json").read_bytes())
    return found


def _memory_bytes(pid: int) -> int:
    status = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in status if line.startswith("VmRSS"))


def large_directory(directory: Path, scratch: Path, size: int) -> None:
    """15,000 names for each size: listed whole and in order, also while names come and go; the daemon keeps what the
    kernel knows of, and no more than a kilobyte and a half of it for each name."""
    count = 15_000 * size
    told = _mount_of(directory)

    async def fill() -> None:
        async with open_filesystem(told["url"]) as fs:
            for start in range(0, count, 500):
                files = [NewFile(f"/{directory.name}/n{index:06}", b"") for index in range(start, start + 500)]
                assert not [done for done in await fs.write_files(files) if isinstance(done, CurvfsError)]

    trio.run(fill)
    names = [f"n{index:06}" for index in range(count)]
    before = _memory_bytes(told["pid"])
    assert os.listdir(directory) == names
    grown = _memory_bytes(told["pid"]) - before
    known = _mount_of(directory)["nodes"]
    assert grown < 1536 * count + (16 << 20), f"{grown} bytes for {count} names, {known} of them known to the kernel"
    seen = []
    with os.scandir(directory) as entries:
        for number, entry in enumerate(entries):
            seen.append(entry.name)
            if number % 500 == 250 and number < count // 2:
                (directory / names[number]).unlink()  # already seen
                (directory / names[-1 - number // 500]).unlink()  # not seen yet
                (directory / f"a{number:06}").touch()  # before all of them
    gone = len(range(250, count // 2, 500))
    assert seen == names[: count - gone]
    assert len(os.listdir(directory)) == count - 2 * gone + gone
    print(f"  {count} names: {grown / count:.0f} bytes of memory each, {known} known to the kernel")


PROOFS: dict[str, Proof] = {
    "fio sequential": fio_sequential,
    "fio random": fio_random,
    "fio mmap": fio_mapped,
    "fio several jobs": fio_several_jobs,
    "git": git,
    "make": build,
    "sqlite": sqlite,
    "tar": tar,
    "rsync": rsync,
}
#: Too long for every test run.
LONG_PROOFS: dict[str, Proof] = {"fio every way": fio_every_way, "large directory": large_directory}
_PROGRAMS = {"make": "gcc", "sqlite": None}


def program_of(name: str) -> str | None:
    """The program that a proof needs, if any."""
    word = name.split()[0]
    return _PROGRAMS.get(word, word)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.t4_mount.proofs", description=__doc__)
    parser.add_argument("--size", type=int, default=8, help="how large each proof is; 1 is that of every test run")
    parser.add_argument("proofs", nargs="*", help="names of proofs; all of them when none is given")
    found = parser.parse_args()
    proofs = {**PROOFS, **LONG_PROOFS}
    chosen = found.proofs or list(proofs)
    failed = 0
    base = Path(tempfile.mkdtemp(prefix="curvfs-proofs-"))
    try:
        with mounted(base, "--embedded", base / "pool") as mount:
            for name in chosen:
                directory, scratch = mount.path / name.replace(" ", "-"), base / name.replace(" ", "-")
                directory.mkdir()
                scratch.mkdir()
                began_s = time.monotonic()
                try:
                    proofs[name](directory, scratch, found.size)
                except (AssertionError, OSError, sqlite3.Error, subprocess.TimeoutExpired) as error:
                    failed += 1
                    print(f"{name}: FAILED\n{''.join(traceback.format_exception(error))}", flush=True)
                else:
                    print(f"{name}: passed in {time.monotonic() - began_s:.0f} s", flush=True)
                shutil.rmtree(scratch)
    finally:
        shutil.rmtree(base, ignore_errors=True)
    print(f"{len(chosen) - failed} of {len(chosen)} proofs of size {found.size} passed.")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
