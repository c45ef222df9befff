"""The blocking face: plain threads, forks, the end of the thread and of the interpreter."""

from __future__ import annotations

import errno
import gc
import inspect
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest
import trio

from curvfs.api import (
    CurvineFileSystem,
    FileKind,
    FileLock,
    FileReader,
    FileWriter,
    Located,
    LockKind,
    ReadExtents,
    StoragePolicy,
    SyncFileReader,
    SyncFileSystem,
    SyncFileWriter,
    SyncReadExtents,
    SyncUnderStores,
    UnderStores,
)
from curvfs.errors import (
    ConfigError,
    ConnectFailed,
    CurvfsError,
    DeadlineExceeded,
    InvalidRequest,
    NotFound,
    UsageError,
)
from tests.t2_client.conftest import WORKER_HOSTNAME


@pytest.fixture
def process(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    """A server in a process of its own; its URL is the first line it prints."""
    command = [sys.executable, "-m", "curvfs.server", str(tmp_path / "pool"), "--hostname", WORKER_HOSTNAME]
    running = subprocess.Popen(
        [*command, "--master-port", "0", "--worker-port", "0"], stdout=subprocess.PIPE, text=True
    )
    yield running
    running.kill()
    running.communicate()


@pytest.fixture
def url(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().split()[-1]


@pytest.fixture
def sync(url: str) -> Iterator[SyncFileSystem]:
    with SyncFileSystem.connect(url, client_hostname=WORKER_HOSTNAME, block_size="1MB") as client:
        yield client


def test_everything_once(sync: SyncFileSystem) -> None:
    sync.mkdir("/d", xattrs={"k": b"v"})
    with sync.create("/d/f") as writer:
        writer.write(b"x" * 3_000_000)
        writer.write_at(b"y", 5)
        writer.flush()
        assert writer.read_at(4, 3) == b"xyx"
        writer.truncate(2_000_000)
        assert writer.length_bytes == 2_000_000
    with sync.open_for_write("/d/f", append=True) as writer:
        writer.write(b"tail")
    with sync.open("/d/f") as reader:
        buffer = bytearray(8)
        assert reader.readinto(buffer, 1_999_996) == 8
        assert buffer == b"xxxxtail"
        assert reader.read_at(0, 6) == b"xxxxxy"
    assert sync.stat("/d/f").length_bytes == 2_000_004
    assert sync.exists("/d/f")
    sync.rename("/d/f", "/d/g", replace=False)
    assert [status.name for status in sync.list("/d")] == ["g"]
    assert [len(page) for page in sync.list_iter("/", 1)] == [1]
    sync.symlink("g", "/d/s")
    sync.link("/d/g", "/d/h")
    sync.set_attr("/d/g", mode=0o600)
    sync.truncate("/d/g", 10)
    assert sync.statfs().capacity_bytes > 0
    with sync.open_extents("/d/g") as extents:
        assert extents.is_local
    with sync.create_extent("/d/x", 4096) as extent:
        assert extent.local is not None
        os.pwrite(extent.local.fd, bytes(4096), 0)
        extent.commit()
    sync.delete("/d", recursive=True)
    with pytest.raises(NotFound):
        sync.stat("/d")
    with pytest.raises(ZeroDivisionError), sync.create("/aborted") as writer:
        raise ZeroDivisionError
    assert sync.stat("/aborted").is_complete


def test_many_in_one_turn(sync: SyncFileSystem) -> None:
    for index in range(20):
        sync.create(f"/f{index}").close()
    names = [f"/f{index}" for index in range(512)]
    found = sync.locate_many(names)
    assert [isinstance(entry, Located) for entry in found] == [index < 20 for index in range(512)]
    assert isinstance(found[20], NotFound)
    statuses = sync.run_many([partial(sync.filesystem.stat, name) for name in names[:30]])
    assert [isinstance(status, NotFound) for status in statuses] == [index >= 20 for index in range(30)]
    opened = sync.open_extents_many([entry for entry in found if isinstance(entry, Located)])
    assert len(opened) == 20
    for entry in opened:
        assert not isinstance(entry, CurvfsError)
        entry.close()


def test_from_many_threads(sync: SyncFileSystem) -> None:
    failures: list[BaseException] = []

    def work(number: int) -> None:
        try:
            for step in range(10):
                content = bytes([number]) * (step * 10_000)
                with sync.create(f"/{number}-{step}") as writer:
                    writer.write(content)
                with sync.open(f"/{number}-{step}") as reader:
                    assert reader.read_at(0, 1_000_000) == content
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    assert len(sync.list("/")) == 80


def test_refused_after_fork(sync: SyncFileSystem) -> None:
    sync.mkdir("/before")
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            sync.stat("/before")
        except UsageError as error:
            code = 0 if "forked child" in str(error) and sync.close() else 2
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert sync.stat("/before").is_dir


def test_close_is_idempotent_and_final(url: str) -> None:
    sync = SyncFileSystem.connect(url)
    assert sync.close()
    assert sync.close()
    with pytest.raises(CurvfsError, match="closed"):
        sync.stat("/")


def test_close_while_others_wait(url: str) -> None:
    sync = SyncFileSystem.connect(url)
    failed: list[BaseException] = []

    def wait() -> None:
        try:
            sync.portal.run(trio.sleep, 60)
        except CurvfsError as error:
            failed.append(error)

    threads = [threading.Thread(target=wait) for _ in range(3)]
    for thread in threads:
        thread.start()
    time.sleep(0.1)
    started = time.monotonic()
    assert sync.close()
    for thread in threads:
        thread.join()
    assert time.monotonic() - started < 2
    assert len(failed) == 3


def test_calls_that_come_while_it_closes_are_told_so(url: str) -> None:
    words: set[str] = set()

    def call(sync: SyncFileSystem) -> None:
        try:
            while True:
                sync.exists("/")
        except CurvfsError as error:
            words.add(str(error))

    for _ in range(10):
        sync = SyncFileSystem.connect(url)
        threads = [threading.Thread(target=call, args=(sync,)) for _ in range(8)]
        for thread in threads:
            thread.start()
        time.sleep(0.02)
        assert sync.close()
        for thread in threads:
            thread.join()
    assert words == {"The client is closed; connect anew."}


def _open_block_files() -> list[str]:
    links = [f"/proc/self/fd/{fd}" for fd in os.listdir("/proc/self/fd")]
    return [name for name in (os.readlink(link) for link in links if os.path.islink(link)) if "/blk_" in name]


def _wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 5
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_forgotten_readers_and_writers_give_their_files_back(sync: SyncFileSystem) -> None:
    with sync.create("/f") as writer:
        writer.write(b"x" * 10_000)
    forgotten = [sync.open("/f") for _ in range(3)]
    for reader in forgotten:
        assert reader.read_at(0, 1) == b"x"
    begun = sync.create("/g")
    begun.write(b"y")
    assert len(_open_block_files()) == 4
    del forgotten, reader, begun
    gc.collect()
    _wait_until(lambda: not _open_block_files())
    _wait_until(lambda: sync.stat("/g").is_complete)
    assert sync.stat("/g").length_bytes == 0


def test_a_reader_that_outlives_its_client_closes_its_files(url: str) -> None:
    with SyncFileSystem.connect(url, client_hostname=WORKER_HOSTNAME) as sync:
        with sync.create("/f") as writer:
            writer.write(b"x" * 10_000)
        left, forgotten = sync.open("/f"), sync.open("/f")
        assert left.read_at(0, 1) == forgotten.read_at(0, 1)
    left.close()
    assert len(_open_block_files()) == 1
    del forgotten
    gc.collect()
    assert not _open_block_files()


WRONG: dict[str, Callable[[SyncFileSystem], object]] = {
    "mkdir mode": lambda fs: fs.mkdir("/d", mode=-1),
    "mkdir owner": lambda fs: fs.mkdir("/d", owner="\udcff"),
    "mkdir xattr": lambda fs: fs.mkdir("/d", xattrs={"\udcff": b""}),
    "create mode": lambda fs: fs.create("/g", mode=1 << 32),
    "create group": lambda fs: fs.create("/g", group="\udcff"),
    "create ttl": lambda fs: fs.create("/g", policy=StoragePolicy(ttl_ms=1 << 63)),
    "symlink target": lambda fs: fs.symlink("\udcff", "/s"),
    "mtime": lambda fs: fs.set_attr("/f", mtime_ms=1 << 63),
    "remove_xattrs": lambda fs: fs.set_attr("/f", remove_xattrs=["\udcff"]),
    "start_after": lambda fs: fs.list("/", start_after="\udcff"),
    "page_size": lambda fs: next(fs.list_iter("/", 0)),
    "lock owner": lambda fs: fs.set_lock("/f", FileLock(kind=LockKind.READ, owner_id=-1)),
    "lock backwards": lambda fs: fs.set_lock("/f", FileLock(kind=LockKind.READ, owner_id=1, start=5, end=2)),
    "lock renewed without a pause": lambda fs: fs.hold_lock(
        "/f", FileLock(kind=LockKind.READ, owner_id=1), renew_s=0
    ).__enter__(),
    "lock range": lambda fs: fs.get_lock("/f", FileLock(kind=LockKind.READ, owner_id=1, end=1 << 64)),
}


@pytest.mark.parametrize("call", WRONG.values(), ids=WRONG)
def test_what_fits_no_message_is_refused_in_a_sentence(
    sync: SyncFileSystem, call: Callable[[SyncFileSystem], object]
) -> None:
    sync.create("/f").close()
    with pytest.raises(InvalidRequest, match=r"^Cannot [^\n]+\.$") as caught:
        call(sync)
    assert caught.value.errno_ == errno.EINVAL
    assert [status.name for status in sync.list("/")] == ["f"]


@pytest.mark.parametrize(("kind", "number"), [(FileKind.SYMLINK, errno.ELOOP), (FileKind.FIFO, errno.ENXIO)])
def test_what_is_no_regular_file_is_not_read_as_an_empty_one(sync: SyncFileSystem, kind: FileKind, number: int) -> None:
    sync.create("/f").close()
    if kind is FileKind.SYMLINK:
        sync.symlink("/f", "/x")
    else:
        sync.mknod("/x", kind)
    for opened in (sync.open, sync.open_file):
        with pytest.raises(InvalidRequest, match="Cannot read /x: it is a s") as caught:
            opened("/x")
        assert caught.value.errno_ == number


def test_a_thread_that_died_leaves_nobody_waiting(url: str) -> None:
    sync = SyncFileSystem.connect(url)

    async def break_down() -> None:
        raise SystemError("something that is not ours")

    with pytest.raises(SystemError):
        sync.portal.run(break_down)
    assert sync.stat("/").is_dir  # an error of one call is that call's alone

    async def end() -> None:
        raise SystemExit

    with pytest.raises((SystemExit, CurvfsError)):
        sync.portal.run(end)
    time.sleep(0.2)
    with pytest.raises(CurvfsError, match="closed"):
        sync.stat("/")
    assert sync.close()


def test_deadline_of_a_call(sync: SyncFileSystem) -> None:
    started = time.monotonic()
    with pytest.raises(DeadlineExceeded):
        sync.portal.run(trio.sleep, 60, timeout_s=0.2)
    assert time.monotonic() - started < 1.5
    assert sync.stat("/").is_dir


def test_deadline_and_end_of_a_call_with_several_tasks(sync: SyncFileSystem) -> None:
    """Its cancellation is a group of exceptions; nobody outside sees that."""

    async def several() -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(trio.sleep, 60)
            nursery.start_soon(trio.sleep, 60)

    with pytest.raises(DeadlineExceeded):
        sync.portal.run(several, timeout_s=0.2)
    assert sync.stat("/").is_dir
    closing = threading.Timer(0.3, sync.close)
    closing.start()
    with pytest.raises(CurvfsError, match="closed"):
        sync.portal.run(several)
    closing.join()


def test_not_from_its_own_thread(sync: SyncFileSystem) -> None:
    async def inside() -> None:
        sync.stat("/")

    with pytest.raises(UsageError):
        sync.portal.run(inside)


def test_from_another_trio_program(sync: SyncFileSystem) -> None:
    async def main() -> bool:
        return await trio.to_thread.run_sync(sync.exists, "/")

    assert trio.run(main)


def test_connecting_in_vain() -> None:
    started = time.monotonic()
    with pytest.raises(ConnectFailed) as caught:
        SyncFileSystem.connect("curvine://127.0.0.1:1/")
    assert str(caught.value) == (
        "Cannot connect: no Curvine master answers at 127.0.0.1:1 (cannot connect to 127.0.0.1:1: Connection refused); "
        "is the server running? Start one with `curvfs serve DIR`."
    )
    assert time.monotonic() - started < 2
    with pytest.raises(ConfigError):
        SyncFileSystem.connect("nonsense")


def test_the_interpreter_ends_with_a_client_open(url: str) -> None:
    program = f"""
from curvfs.api import SyncFileSystem
client = SyncFileSystem.connect({url!r})
writer = client.create("/unfinished")
writer.write(b"x" * 100)
print("ready")
"""
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=30)
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "ready\n", "")


def test_a_forgotten_client_ends_its_thread(url: str) -> None:
    before = threading.active_count()
    sync = SyncFileSystem.connect(url)
    sync.create("/f").close()
    reader = SyncFileSystem.connect(url).open("/f")
    gc.collect()
    assert reader.read_at(0, 1) == b""  # what it opened keeps a client open
    reader.close()
    del reader
    assert sync.exists("/")
    assert any(thread.name == "curvfs-client" for thread in threading.enumerate())
    del sync
    gc.collect()
    deadline = time.monotonic() + 5
    while threading.active_count() > before and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not any(thread.name == "curvfs-client" for thread in threading.enumerate())


PAIRS = [
    (CurvineFileSystem, SyncFileSystem, {"connect"}),
    (FileReader, SyncFileReader, set()),
    (FileWriter, SyncFileWriter, set()),
    (ReadExtents, SyncReadExtents, set()),
    (UnderStores, SyncUnderStores, set()),
]


@pytest.mark.parametrize(("asynchronous", "blocking", "apart"), PAIRS, ids=lambda value: getattr(value, "__name__", ""))
def test_both_faces_offer_the_same(asynchronous: type, blocking: type, apart: set[str]) -> None:
    """Every call, with the same parameters, but what belongs to trio or to whoever keeps open files."""
    kept = {"aclose", "idle", "located", "open_blocks", "closed", "moved_to", "close_descriptors", "close_local"}
    kept |= {"makes_ahead", "create_ahead", "give_attributes", "settle_attributes", "has_attributes"}
    kept |= {"takes_whole", "write_whole"}
    for name, member in inspect.getmembers(asynchronous):
        if name.startswith("_") or name in kept | apart:
            continue
        other = getattr(blocking, name)
        if callable(member):
            assert list(inspect.signature(member).parameters) == list(inspect.signature(other).parameters), name
        assert inspect.getdoc(member), f"{asynchronous.__name__}.{name} is not documented"
