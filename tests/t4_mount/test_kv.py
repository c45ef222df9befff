"""Objects of a KV prefix on one real mount: private until published, sealed afterwards."""

from __future__ import annotations

import errno
import mmap
import os
import subprocess
import threading
import time
from pathlib import Path

from tests.t4_mount.interleavings import orders
from tests.t4_mount.mounts import Mount, mounted, refused, wait_for

GRACE_S = 1.0


def publish(directory: Path, name: str, content: bytes) -> Path:
    """As LMCache's fs connector does it."""
    staging = directory / f"{name}.tmp"
    staging.write_bytes(content)
    os.replace(staging, directory / name)
    return directory / name


def assert_sealed(path: Path, content: bytes) -> None:
    for flags in (
        os.O_WRONLY,
        os.O_RDWR,
        os.O_WRONLY | os.O_TRUNC,
        os.O_WRONLY | os.O_APPEND,
        os.O_RDONLY | os.O_TRUNC,
    ):
        refused(errno.EPERM, lambda flags=flags: os.open(path, flags))  # type: ignore[misc]
    refused(errno.EPERM, lambda: os.truncate(path, 0))
    assert path.read_bytes() == content


def test_published_by_rename_is_sealed(kv: Path) -> None:
    path = publish(kv, "a", b"content")
    assert_sealed(path, b"content")
    assert os.listdir(kv) == ["a"]
    os.rename(path, kv / "b")
    assert_sealed(kv / "b", b"content")
    os.unlink(kv / "b")
    assert os.listdir(kv) == []


def test_metadata_of_a_sealed_object_can_be_changed(kv: Path) -> None:
    path = publish(kv, "a", b"content")
    os.utime(path, ns=(5_000_000_000, 6_000_000_000))
    os.chmod(path, 0o600)
    os.setxattr(path, "user.tag", b"x")
    assert path.stat().st_mtime_ns == 6_000_000_000
    assert_sealed(path, b"content")


def test_rename_over_a_published_object(kv: Path) -> None:
    path = publish(kv, "a", b"old")
    with open(path, "rb", buffering=0) as reader:
        publish(kv, "a", b"newer")
        assert reader.read() == b"old"
    assert_sealed(path, b"newer")


def test_replacing_again_and_again_is_never_torn(mount: Mount, kv: Path) -> None:
    rounds = 60
    publish(kv, "v", b"0" * 1000)
    problems: list[str] = []
    done = threading.Event()

    def read() -> None:
        last = 0
        while not done.is_set():
            try:
                content = (kv / "v").read_bytes()
            except OSError as error:
                # ESTALE is for a name that changed twice between the kernel's LOOKUP and its OPEN, as it may on a busy
                # machine; asked again it must be there.
                if error.errno != errno.ESTALE:
                    problems.append(f"{error}")
                continue
            if len(set(content)) != 1 or len(content) != 1000:
                problems.append(f"torn: {content[:20]!r} ({len(content)})")
            elif content[0] < last:
                problems.append("went back")
            else:
                last = content[0]
        reached.append(last)

    reached: list[int] = []
    readers = [threading.Thread(target=read) for _ in range(2)]
    for thread in readers:
        thread.start()
    try:
        for number in range(1, rounds):
            publish(kv, "v", bytes([48 + number]) * 1000)
    finally:
        done.set()
        for thread in readers:
            thread.join()
    assert problems == []
    assert len(reached) == 2 and min(reached) > 0


def test_files_that_nobody_renames_stay_ordinary(mount: Mount, kv: Path) -> None:
    path = kv / "in-place"
    path.write_bytes(b"one")
    assert path.read_bytes() == b"one"
    time.sleep(GRACE_S + 0.6)
    assert path.read_bytes() == b"one"
    with open(path, "r+b", buffering=0) as file:  # as LMCache's local_disk rewrites, without O_TRUNC
        file.write(b"two")
    assert path.read_bytes() == b"two"
    path.write_bytes(b"three")
    assert path.read_bytes() == b"three"
    time.sleep(GRACE_S + 0.6)
    assert path.read_bytes() == b"three"
    with open(path, "ab") as file:
        file.write(b"!")
    os.rename(path, kv / "published")
    assert_sealed(kv / "published", b"three!")


def test_two_writers_of_one_staging_name(kv: Path) -> None:
    """B opens with O_TRUNC while A writes; each publishes what it wrote."""
    tmp = kv / "x.tmp"
    first = os.open(tmp, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.write(first, b"A" * 1000)
    second = os.open(tmp, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.write(second, b"B" * 10)
    os.write(first, b"A" * 1000)
    os.close(first)
    os.rename(tmp, kv / "x")
    assert_sealed(kv / "x", b"A" * 2000)
    os.write(second, b"B" * 10)
    os.close(second)
    os.rename(tmp, kv / "x")
    assert_sealed(kv / "x", b"B" * 20)
    assert os.listdir(kv) == ["x"]
    refused(errno.ENOENT, lambda: os.rename(tmp, kv / "x"))


def test_all_interleavings_of_two_writers(kv: Path) -> None:
    """open, write, write, close, rename: 252 orders; no reader ever sees a mixture, no writer sees an error."""
    for number, order in enumerate(orders()):
        tmp, target = kv / "i.tmp", kv / f"i{number}"
        steps: dict[str, int] = {"a": 0, "b": 0}
        fds: dict[str, int] = {}
        wrote = {"a": b"a" * 100, "b": b"b" * 50}
        for who in order:
            step = steps[who]
            steps[who] += 1
            if step == 0:
                fds[who] = os.open(tmp, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
            elif step in (1, 2):
                half = len(wrote[who]) // 2
                os.write(fds[who], wrote[who][:half])
            elif step == 3:
                os.close(fds[who])
            else:
                os.rename(tmp, target)
                assert target.read_bytes() in wrote.values(), order
        assert target.read_bytes() in wrote.values(), order


def test_numpy_like_writers_duplicate_the_descriptor(kv: Path) -> None:
    """Two FLUSHes for one open: nothing is sealed by the first."""
    tmp = kv / "n.tmp"
    fd = os.open(tmp, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.write(fd, b"head")
    copy = os.dup(fd)
    os.lseek(copy, 0, os.SEEK_CUR)
    os.write(copy, b"-body")
    os.close(copy)
    os.write(fd, b"-tail")
    os.close(fd)
    os.rename(tmp, kv / "n")
    assert_sealed(kv / "n", b"head-body-tail")


def test_rename_with_a_descriptor_open(kv: Path) -> None:
    """Flushed or synced: it is published, and late writes are refused. Unflushed: EBUSY, and nothing is torn."""
    tmp = kv / "o.tmp"
    fd = os.open(tmp, os.O_RDWR | os.O_CREAT | os.O_TRUNC)
    try:
        os.write(fd, b"content")
        refused(errno.EBUSY, lambda: os.rename(tmp, kv / "o"))
        os.fsync(fd)
        os.rename(tmp, kv / "o")
        refused(errno.EPERM, lambda: os.write(fd, b"late"))
        refused(errno.EPERM, lambda: os.ftruncate(fd, 0))
        assert os.pread(fd, 100, 0) == b"content"
        assert_sealed(kv / "o", b"content")
    finally:
        os.close(fd)
    assert_sealed(kv / "o", b"content")


def test_a_forked_child_holds_the_descriptor(kv: Path) -> None:
    tmp = kv / "f.tmp"
    fd = os.open(tmp, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.write(fd, b"content")
    os.set_inheritable(fd, True)
    child = subprocess.Popen(["sleep", "30"], close_fds=False)
    try:
        os.close(fd)
        os.rename(tmp, kv / "f")
        assert_sealed(kv / "f", b"content")
    finally:
        child.kill()
        child.wait()


def test_a_live_mapping_never_reaches_a_published_object(kv: Path) -> None:
    tmp = kv / "m.tmp"
    fd = os.open(tmp, os.O_RDWR | os.O_CREAT | os.O_TRUNC)
    os.ftruncate(fd, 8192)
    with mmap.mmap(fd, 8192) as mapping:
        mapping[:7] = b"content"
        os.close(fd)
        os.rename(tmp, kv / "m")
        assert (kv / "m").read_bytes() == b"content".ljust(8192, b"\0")
        mapping[:7] = b"TOOLATE"
        assert (kv / "m").read_bytes() == b"content".ljust(8192, b"\0")
    assert_sealed(kv / "m", b"content".ljust(8192, b"\0"))


def test_vllm_like_writers(kv: Path) -> None:
    """O_EXCL, O_TRUNC and O_DIRECT together, one write of the whole object, one read of it."""
    size = 2 << 20
    buffer = mmap.mmap(-1, size)
    buffer[:] = os.urandom(size)
    flags = os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_TRUNC | os.O_DIRECT
    fd = os.open(kv / "v.tmp", flags, 0o644)
    refused(errno.EEXIST, lambda: os.open(kv / "v.tmp", flags))
    assert os.write(fd, buffer) == size
    os.close(fd)
    os.rename(kv / "v.tmp", kv / "v")
    back = mmap.mmap(-1, size)
    fd = os.open(kv / "v", os.O_RDONLY | os.O_DIRECT)
    assert os.readv(fd, [back]) == size
    os.close(fd)
    assert back[:] == buffer[:]


def test_publish_by_link(kv: Path) -> None:
    (kv / "l.tmp").write_bytes(b"content")
    os.link(kv / "l.tmp", kv / "l")
    assert_sealed(kv / "l", b"content")
    assert (kv / "l.tmp").read_bytes() == b"content"
    os.unlink(kv / "l.tmp")
    refused(errno.ENOENT, (kv / "l.tmp").stat)
    assert_sealed(kv / "l", b"content")
    (kv / "l2.tmp").write_bytes(b"other")
    refused(errno.EEXIST, lambda: os.link(kv / "l2.tmp", kv / "l"))
    assert_sealed(kv / "l", b"content")


def test_the_link_of_an_ordinary_file_seals_both_names(kv: Path) -> None:
    (kv / "a").write_bytes(b"content")
    time.sleep(GRACE_S + 0.6)
    os.link(kv / "a", kv / "b")
    assert_sealed(kv / "b", b"content")
    assert_sealed(kv / "a", b"content")


def test_a_name_outside_is_no_way_around_the_seal(mount: Mount, kv: Path, place: Path) -> None:
    publish(kv, "a", b"content")
    os.link(kv / "a", place / "out")
    assert_sealed(place / "out", b"content")
    publish(kv, "b", b"content")
    os.link(kv / "b", kv / "b2")
    os.rename(kv / "b2", place / "b2")
    assert_sealed(place / "b2", b"content")
    (place / "c").write_bytes(b"content")
    os.link(place / "c", place / "c2")
    os.rename(place / "c", kv / "c")
    assert_sealed(place / "c2", b"content")
    for path in (kv / "a", kv / "b", kv / "c"):
        assert_sealed(path, b"content")
    os.unlink(kv / "a")
    (place / "out").write_bytes(b"nobody else's")
    assert (place / "out").read_bytes() == b"nobody else's"


def test_linked_in_while_open_for_writing(kv: Path, place: Path) -> None:
    (place / "a").write_bytes(b"content")
    fd = os.open(place / "a", os.O_WRONLY)
    try:
        os.link(place / "a", kv / "a")
        refused(errno.EPERM, lambda: os.pwrite(fd, b"changed", 0))
    finally:
        os.close(fd)
    assert_sealed(kv / "a", b"content")
    assert_sealed(place / "a", b"content")


def test_back_to_the_birth_place(kv: Path) -> None:
    publish(kv, "a", b"content")
    os.rename(kv / "a", kv / "a.tmp")
    assert_sealed(kv / "a.tmp", b"content")
    os.rename(kv / "a.tmp", kv / "b")
    assert_sealed(kv / "b", b"content")


def test_moved_in_and_out(mount: Mount, kv: Path, place: Path) -> None:
    (place / "a").write_bytes(b"content")
    os.rename(place / "a", kv / "a")
    assert_sealed(kv / "a", b"content")
    os.rename(kv / "a", place / "a")
    (place / "a").write_bytes(b"ordinary again")
    assert (place / "a").read_bytes() == b"ordinary again"


def test_moved_out_while_private(kv: Path, place: Path) -> None:
    (kv / "a.tmp").write_bytes(b"content")
    os.rename(kv / "a.tmp", place / "a")
    assert (place / "a").read_bytes() == b"content"
    (place / "a").write_bytes(b"ordinary")
    assert (place / "a").read_bytes() == b"ordinary"


def test_unlink_of_a_private_file(kv: Path) -> None:
    with open(kv / "a", "w+b", buffering=0) as file:
        file.write(b"content")
        os.unlink(kv / "a")
        refused(errno.ENOENT, (kv / "a").stat)
        assert os.pread(file.fileno(), 100, 0) == b"content"
        file.write(b"more")
        refused(errno.ENOENT, lambda: os.rename(kv / "a", kv / "b"))
    time.sleep(GRACE_S + 0.6)
    assert os.listdir(kv) == []


def test_unlink_of_an_open_object(kv: Path) -> None:
    content = os.urandom(1 << 20)
    path = publish(kv, "a", content)
    with open(path, "rb", buffering=0) as file:
        os.unlink(path)
        assert file.read() == content
    assert os.listdir(kv) == []


def test_private_names_in_listings(kv: Path) -> None:
    (kv / "a").write_bytes(b"a")
    (kv / "c").write_bytes(b"c")
    publish(kv, "b", b"b")
    assert sorted(os.listdir(kv)) == ["a", "b", "c"]
    assert {entry.name: entry.stat().st_size for entry in os.scandir(kv)} == {"a": 1, "b": 1, "c": 1}
    refused(errno.ENOTEMPTY, kv.rmdir)
    for name in "abc":
        (kv / name).unlink()
    kv.rmdir()


def test_rename_without_replacing(kv: Path) -> None:
    publish(kv, "a", b"first")
    (kv / "b.tmp").write_bytes(b"second")
    subprocess.run(["mv", "-n", kv / "b.tmp", kv / "a"], check=False)
    assert_sealed(kv / "a", b"first")
    assert (kv / "b.tmp").read_bytes() == b"second"


def test_large_objects_survive_a_remount(tmp_path: Path) -> None:
    content = os.urandom(9 << 20)
    pool = tmp_path / "pool"
    with mounted(tmp_path, "--embedded", pool) as mount:
        publish(mount.kv, "big", content)
        (mount.kv / "left").write_bytes(b"closed just before the end")
        unfinished = os.open(mount.kv / "unfinished", os.O_WRONLY | os.O_CREAT)
        os.write(unfinished, b"x" * 1000)
        assert mount.stop() == 0
        refused(errno.ENOTCONN, lambda: os.close(unfinished))
    with mounted(tmp_path, "--embedded", pool) as mount:
        assert_sealed(mount.kv / "big", content)
        assert sorted(os.listdir(mount.kv)) == ["big", "left"]
        assert (mount.kv / "left").read_bytes() == b"closed just before the end"
        (mount.kv / "left").write_bytes(b"still ordinary")
        assert not (mount.kv / ".staging").exists() or len(os.listdir(mount.kv / ".staging")) <= 1


def test_other_prefixes(tmp_path: Path) -> None:
    pool = tmp_path / "pool"
    with mounted(tmp_path, "--embedded", pool, "--kv", "one/two", "--kv", "three") as mount:
        assert sorted(os.listdir(mount.path)) == ["one", "three"]
        for prefix in ("one/two", "three"):
            assert_sealed(publish(mount.path / prefix, "a", b"content"), b"content")
        publish(mount.path / "one", "ordinary", b"content").write_bytes(b"rewritten")
    with mounted(tmp_path, "--embedded", pool, "--kv", ".") as mount:
        assert_sealed(publish(mount.path, "a", b"content"), b"content")
        assert "kv" not in os.listdir(mount.path)


def test_no_prefix(tmp_path: Path) -> None:
    with mounted(tmp_path, "--embedded", tmp_path / "pool", "--no-kv") as mount:
        assert os.listdir(mount.path) == []
        publish(mount.path, "a", b"content").write_bytes(b"rewritten")


def test_repeated_reads_do_not_reach_the_daemon(kv: Path, mount: Mount) -> None:
    """A sealed object is read from the kernel's pages: the daemon's CPU time tells."""
    content = os.urandom(8 << 20)
    path = publish(kv, "a", content)
    with open(path, "rb", buffering=0) as file:
        assert file.read() == content
        before = _cpu_ticks(mount.process.pid)
        for _ in range(60):
            file.seek(0)
            assert len(file.read()) == len(content)
        assert _cpu_ticks(mount.process.pid) - before <= 12


def _cpu_ticks(pid: int) -> int:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return int(fields[11]) + int(fields[12])


def test_nothing_is_left_in_staging(mount: Mount, kv: Path) -> None:
    publish(kv, "a", b"content")
    (kv / "b").write_bytes(b"b")
    staging = mount.kv / ".staging"

    def empty() -> bool:
        return all(os.listdir(staging / own) == ["alive"] for own in os.listdir(staging))

    wait_for(empty, 5.0, "an empty staging directory")
    assert ".staging" not in os.listdir(mount.kv)
    refused(errno.EPERM, lambda: os.rename(staging, mount.kv / "staging"))
