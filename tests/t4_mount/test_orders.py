"""Two writers of one staging name: every order of their calls, and what a writer that died has left there."""

from __future__ import annotations

import errno
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path

import pytest

from tests.t4_mount.interleavings import CASES, pair, run
from tests.t4_mount.mounts import Mount, mounted, refused, wait_for

#: Two orders of each case, one with a thread for each writer and one with a thread for both; ``make soak-mount`` goes
#: through all 252.
EVERY, START = 126, 41


def test_orders(tmp_path: Path) -> None:
    with pair(tmp_path, every=EVERY, start=START) as places:
        run(range(len(CASES)), places, every=EVERY, start=START)


_KILLED = """
import os, signal, sys
fd = os.open(sys.argv[1], os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
os.write(fd, b"par" * 100)
os.kill(os.getpid(), signal.SIGKILL)
"""


def killed_in_the_middle(path: Path) -> None:
    """A writer that dies before it has written all: the kernel closes its file as any other."""
    done = subprocess.run([sys.executable, "-I", "-S", "-c", _KILLED, str(path)], check=False)
    assert done.returncode == -signal.SIGKILL


@contextmanager
def given_its_name(mount: Mount) -> Iterator[None]:
    """Wait until what is written and closed in here has its own name in the store."""

    def count() -> int:
        objects = json.loads((mount.path / ".curvfs" / "stats.json").read_bytes())["objects"]
        return int(objects.get("materialised", 0))

    before = count()
    yield
    wait_for(lambda: count() > before, what="the name")


def test_a_killed_writers_part_is_not_published_by_another(kv: Path) -> None:
    """It opened later, so its file is the newest closed one when the other renames."""
    tmp = kv / "k.tmp"
    with open(tmp, "wb", buffering=0) as file:
        file.write(b"whole")
        killed_in_the_middle(tmp)
        file.write(b" content")
    os.rename(tmp, kv / "k")
    assert (kv / "k").read_bytes() == b"whole content"
    wait_for(lambda: not tmp.exists() or tmp.read_bytes() == b"par" * 100, what="the name of what was left")


def test_synced_and_renamed_before_the_close(kv: Path) -> None:
    """As it is done for durability; what a dead writer closed under the name a moment ago is not what is meant."""
    tmp = kv / "s.tmp"
    killed_in_the_middle(tmp)
    with open(tmp, "wb", buffering=0) as file:
        file.write(b"content")
        os.fsync(file.fileno())
        os.rename(tmp, kv / "s")
    assert (kv / "s").read_bytes() == b"content"
    refused(errno.ENOENT, lambda: os.rename(tmp, kv / "s"))
    assert (kv / "s").read_bytes() == b"content"


def test_synced_after_ones_own_first_try(kv: Path) -> None:
    tmp = kv / "t.tmp"
    tmp.write_bytes(b"first t")  # it failed then, and nobody removed it
    with open(tmp, "wb", buffering=0) as file:
        file.write(b"content")
        os.fsync(file.fileno())
        os.rename(tmp, kv / "t")
    assert (kv / "t").read_bytes() == b"content"


@pytest.mark.parametrize("named", [False, True])
def test_renamed_with_unflushed_writes_where_something_was_left(mount: Mount, kv: Path, named: bool) -> None:
    """EBUSY, as without it: the part of a dead writer, closed just now or long ago, is not published in its place."""
    tmp = kv / "u.tmp"
    with given_its_name(mount) if named else nullcontext():
        killed_in_the_middle(tmp)
    with open(tmp, "wb", buffering=0) as file:
        file.write(b"content")
        refused(errno.EBUSY, lambda: os.rename(tmp, kv / "u"))
    assert not (kv / "u").exists()
    os.rename(tmp, kv / "u")
    assert (kv / "u").read_bytes() == b"content"


def test_a_renamed_file_leaves_no_name(mount: Mount, kv: Path) -> None:
    """Not even where an ordinary file was left over: else a rename that is tried again would publish that."""
    tmp = kv / "r.tmp"
    with given_its_name(mount):
        tmp.write_bytes(b"left over")
    os.utime(tmp, (0, 0))  # long ago: what is younger may be somebody's who has not come to its rename yet
    with open(tmp, "rb", buffering=0) as reader:
        tmp.write_bytes(b"content")
        os.rename(tmp, kv / "r")
        refused(errno.ENOENT, tmp.stat)
        refused(errno.ENOENT, lambda: os.rename(tmp, kv / "r"))
        assert reader.read() == b"left over"
    assert os.listdir(kv) == ["r"]
    assert (kv / "r").read_bytes() == b"content"


def test_a_file_written_in_place_is_not_sealed_in_mid_write(mount: Mount, kv: Path, place: Path) -> None:
    path = kv / "i"
    with given_its_name(mount):
        path.write_bytes(b"ordinary")
    with open(path, "r+b", buffering=0) as file:
        file.write(b"half")
        refused(errno.EBUSY, lambda: os.rename(path, kv / "j"))
        os.rename(path, place / "out")  # nothing is sealed by this
        file.write(b" and half")
        refused(errno.EBUSY, lambda: os.rename(place / "out", kv / "j"))
        os.fsync(file.fileno())
        os.rename(place / "out", kv / "j")
        refused(errno.EPERM, lambda: file.write(b"late"))
    assert (kv / "j").read_bytes() == b"half and half"


def test_a_rename_that_waits_keeps_nobody_from_opening(kv: Path) -> None:
    """The kernel lets nobody look up names in a directory while it waits for a rename there: what was reserved for
    those who come in the meantime is there afterwards."""
    held = [os.open(kv / f"w{number}.tmp", os.O_WRONLY | os.O_CREAT) for number in range(6)]
    others = []
    for number, fd in enumerate(held):
        os.write(fd, b"content")
        os.close(os.dup(fd))
        with open(kv / f"w{number}.tmp", "wb"):
            others.append(os.open(kv / f"w{number}.tmp", os.O_WRONLY | os.O_TRUNC))
            os.write(others[-1], b"unflushed")
    problems: list[OSError] = []

    def work(action: object) -> None:
        try:
            assert callable(action)
            action()
        except OSError as error:
            problems.append(error)

    (kv / "x.tmp").write_bytes(b"left over")
    renames = [lambda n=n: os.rename(kv / f"w{n}.tmp", kv / f"w{n}") for n in range(len(held))]
    opens = [lambda: (kv / "x.tmp").write_bytes(b"mine") for _ in range(4)]
    threads = [threading.Thread(target=work, args=(action,)) for action in [*renames, *opens]]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for fd in held + others:
        os.close(fd)
    assert [error for error in problems if error.errno == errno.ESTALE] == []


def test_many_writers_of_one_name_at_full_speed(kv: Path) -> None:
    """Between a lookup of the staging name and the open that follows, others publish what was there."""
    problems: list[str] = []

    def work(number: int) -> None:
        content = b"%d" % number * 1000
        for turn in range(40):
            try:
                (kv / "c.tmp").write_bytes(content)
                os.rename(kv / "c.tmp", kv / f"c{turn % 5}")
            except OSError as error:
                problems.append(str(error))
            with suppress(OSError):  # ESTALE is for a name that changed twice meanwhile
                found = (kv / f"c{turn % 5}").read_bytes()
                if len(found) != 1000 or len(set(found)) != 1:
                    problems.append(f"torn: {found[:9]!r}")

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert problems == []


def test_what_another_mount_published_is_not_written_to_in_place(mount: Mount, pool: Path, kv: Path) -> None:
    """Its descriptor is older than the publication, and knows nothing of it."""
    with mounted(pool.parent, "--embedded", pool, "--client-hostname", "elsewhere", name="other") as other:
        there = other.kv / kv.name
        for number in range(2):
            path, target = kv / f"p{number}", kv / f"q{number}"
            path.write_bytes(b"ordinary")
            wait_for((there / path.name).exists, what="the ordinary file")
            late = os.open(there / path.name, os.O_RDWR)
            try:
                os.write(late, b"LATE")
                os.rename(path, target)
                if number:  # it has been looked up there meanwhile
                    assert (there / target.name).read_bytes() == b"ordinary"
                with pytest.raises(OSError) as caught:
                    os.write(late, b"LATE")
                    os.fsync(late)
                assert caught.value.errno in (errno.EPERM, errno.ENOENT)
                for name in (target, there / target.name):
                    assert name.read_bytes() == b"ordinary"
            finally:
                with pytest.raises(OSError):
                    os.close(late)
            for name in (target, there / target.name):
                assert name.read_bytes() == b"ordinary"
                refused(errno.EPERM, lambda name=name: os.open(name, os.O_WRONLY))  # type: ignore[misc]
