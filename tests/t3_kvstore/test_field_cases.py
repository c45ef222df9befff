"""Faults that users of comparable systems met, each as a test of its whole kind.

What is proven elsewhere, by the name of the fault:

* keys that differ between processes: test_keys (fresh processes), and here
* names too long, or leading out of the pool: test_contract (names are bounded), test_posix (links), and here
* writers of one key, killed or not: test_processes
* stores that fail half-way: test_posix (a full disk), test_processes (killed at any moment), and here
* other weights, other number formats: test_contract (dtypes do not meet), and here
* damaged, cut, unreadable, replaced objects: test_contract (cut objects), test_posix (something else in the place of an
  object; no permission), test_integrity
* other shards and layouts: test_contract (other shards, every stage, latent pages), test_reshard
* storage that hangs: test_faults (stuck disks, lookups), test_curvine (a stopped server), and here
* tenants that guess: test_keys (salts share nothing), test_contract (salts share no name part), and here
* other pictures behind equal tokens: test_keys (another picture), and here
* short reads, late completions: test_faults, and here
* padding that shows: test_contract (odd sizes), test_header (padding is zero), and here
* file systems without direct I/O: test_posix (without direct I/O, nothing in the page cache), and here
* number formats that libraries lack: test_segments (every bit pattern)
* modes, links, logs: test_posix (modes, links, logs)
"""

from __future__ import annotations

import errno
import itertools
import json
import logging
import os
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from curvfs.world import RealDisk, World
from kvstore import Extra, Geometry, Miss
from tests.t3_kvstore.places import Directory, Place, empty, pages, payload, untouched
from tests.t3_kvstore.test_faults import FaultyDisk, StuckDisk, until
from tests.t3_kvstore.test_posix import mounted, needs_mounts

PAGE = Geometry.attention(layers=2, kv_heads=2, head_dim=64, dtype="float16", page_tokens=16)

ACROSS = """
import json, sys
import kvstore
url, what = sys.argv[1:]
page = kvstore.Geometry.raw(5000, page_tokens=100)
whose = kvstore.Identity.of(page, model="m", revision="r")
with kvstore.open(url, whose, geometry=page) as store:
    tokens = list(range(1, 601))
    keys = store.keys(tokens)
    assert keys == store.keys(tokens, extras=[]) == store.keys(tokens, extras=None)
    content = [bytearray([number]) * 5000 for number in range(6)]
    if what == "put":
        assert all(store.put(keys, content).result())
    got = [bytearray(5000) for _ in keys]
    there = store.exists(keys)
    assert all(store.get(keys, got).result()) == all(there)
    print(json.dumps([[key.hex for key in keys], store.lookup(keys).pages, got == content]))
"""


def test_another_process_hits_whatever_its_hash_seed(place: Place) -> None:
    shown = []
    for what, seed in (("put", None), ("get", "0"), ("get", "random")):
        environment = {name: value for name, value in os.environ.items() if name != "PYTHONHASHSEED"}
        environment |= {} if seed is None else {"PYTHONHASHSEED": seed}
        command = [sys.executable, "-c", ACROSS, place.url, what]
        done = subprocess.run(command, check=True, capture_output=True, text=True, env=environment, timeout=60)
        shown.append(json.loads(done.stdout))
    assert shown[0] == shown[1] == shown[2]
    assert shown[0][1:] == [6, True]


def test_identities_as_long_as_they_come(place: Place) -> None:
    long = "/".join(["a" * 14] * 12) + "/" + "b" * 20
    wide = "é" * 90
    for number, (model, salt) in enumerate(((long, "s" * 128), (wide, "ü" * 64), (long, ""), ("../" * 60, "\n" * 90))):
        store = place.open(PAGE, model=model, salt=salt)
        keys = store.keys(list(range(number, number + 64)), extras=[Extra(0, 64, os.urandom(32).hex().encode())])
        content, got = pages(PAGE, 4), empty(PAGE, 4)
        assert store.put(keys, content).result() == store.get(keys, got).result() == [PAGE.size_bytes] * 4
        assert got == content
        assert {page.key for page in store.list().pages} == {key.hex for key in keys}
        assert store.delete(keys[:1]) == [True]
        assert store.lookup(keys[1:]).pages == 3
    assert max(len(part) for name in place.names() for part in name.split("/")) < 100
    assert all(name.split("/")[0].isalnum() or name.startswith(".") for name in place.names())


def test_a_killed_writers_left_overs_count_until_they_are_swept(place: Place) -> None:
    program = """if True:
        import os, sys, kvstore
        page = kvstore.Geometry.raw(1 << 20)
        store = kvstore.open(sys.argv[1], kvstore.Identity.of(page, model="m", revision="r1"), geometry=page)
        writer = store._backend.create("never/aa/bb/x.safetensors", 1 << 20)
        slab = store._pages.slabs.acquire(1)
        writer.write(slab.view[:1 << 20])
        os.kill(os.getpid(), 9)
    """
    done = subprocess.run([sys.executable, "-c", program, place.url], timeout=60, capture_output=True)
    assert done.returncode == -9
    page = Geometry.raw(1 << 20)
    store = place.open(page)
    key = store.keys([1])
    assert store.exists(key) == [False]
    assert store.get(key, [bytearray(1 << 20)]).result() == [Miss.ABSENT]
    assert len(place.staged()) == 1
    if isinstance(place, Directory):  # the length of a Curvine file that nobody completed is not known
        assert store.usage().used_bytes >= 1 << 20
    store.sweep()
    assert len(place.staged()) == 1  # not expired
    hasty = place.open(page, staging_expiry_s=0.2)
    until(lambda: hasty.sweep() > 0 or not place.staged())
    assert place.staged() == []
    assert hasty.usage().used_bytes == 0


SOURCES = ("bytes", "bytearray", "numpy slice", "torch", "memoryview + 64")


@pytest.mark.parametrize("size", [1, 511, 512, 4095, 4096, 4097, (1 << 20) + 3])
def test_memory_at_any_address_is_stored_directly(directory: Directory, size: int) -> None:
    numpy, torch = pytest.importorskip("numpy"), pytest.importorskip("torch")
    store = directory.open(Geometry.raw(size))
    wanted = payload(size, size)
    shifted = bytearray(b"\0" * 64 + wanted)
    sources: dict[str, Any] = {
        "bytes": wanted,
        "bytearray": bytearray(wanted),
        "numpy slice": numpy.frombuffer(b"\0" + wanted, "u1")[1:],
        "torch": torch.frombuffer(bytearray(wanted), dtype=torch.uint8),
        "memoryview + 64": memoryview(shifted)[64:],
    }
    keys = [store.foreign_key(name.encode()) for name in sources]
    assert store.put(keys, list(sources.values())).result() == [size] * len(sources)
    room = [bytearray(size + 1) for _ in keys]
    assert store.get(keys, [memoryview(one)[1:] for one in room]).result() == [size] * len(sources)
    assert all(one[1:] == wanted for one in room)
    assert store.stats().fallbacks == 0
    assert min(page.length_bytes for page in store.list().pages) > size


def test_other_rope_weights_and_missing_ones(place: Place) -> None:
    import kvstore
    from curvfs.errors import UsageError

    def opened(revision: str, rope: str) -> kvstore.KVStore:
        whose = kvstore.Identity.of(PAGE, model="X", revision=revision, rope=rope)
        return kvstore.open(place.url, whose, geometry=PAGE)

    tokens, got = list(range(160)), empty(PAGE, 10)
    with opened("r1", "factor=1") as store:
        assert all(store.put(store.keys(tokens), pages(PAGE, 10)).result())
    for revision, rope, hits in (("r2", "factor=1", 0), ("r1", "factor=2", 0), ("r3", "", 0), ("r1", "factor=1", 10)):
        with opened(revision, rope) as store:
            keys = store.keys(tokens)
            assert store.lookup(keys).pages == hits
            assert sum(map(bool, store.get(keys, got).result())) == hits
    with pytest.raises(UsageError, match="revision"):
        opened("", "factor=1")


def test_an_object_asked_for_as_another_number_format_says_both(place: Place) -> None:
    wide = Geometry.of({"x": ("bfloat16", (64, 32))}, page_tokens=4)
    as_bytes = Geometry.of({"x": ("float16", (64, 32))}, page_tokens=4)
    writer, reader = place.open(wide), place.open(as_bytes)
    key = writer.keys(list(range(4)))
    assert all(writer.put(key, pages(wide, 1)).result())
    theirs = reader.keys(list(range(4)))
    assert reader.get(theirs, empty(as_bytes, 1)).result() == [Miss.ABSENT]
    # By hand, under the other's name: first as it is, then with the other's own key and identity in it.
    assert all(reader.put(theirs, pages(as_bytes, 1)).result())
    file = place.block_file(reader, theirs[0])
    whole = place.block_file(writer, key[0]).read_bytes()
    file.write_bytes(whole)
    got = empty(as_bytes, 1)
    assert reader.get(theirs, got).result() == [Miss.FOREIGN]
    file.write_bytes(forged(whole, theirs[0]))
    transfer = reader.get(theirs, got)
    assert transfer.result() == [Miss.MISMATCH]
    assert "bfloat16" in str(transfer.error(0))
    assert "float16 of shape" in str(transfer.error(0)).replace("bfloat16", "")
    assert untouched(got)


def forged(whole: bytes, key: Any) -> bytes:
    """An object with another key and identity, and a good header sum."""
    import xxhash

    end = 8 + int.from_bytes(whole[:8], "little")
    text = json.loads(whole[8:end])
    text["__metadata__"] |= {"key": key.hex, "identity": key.fingerprint.hex(), "header_sum": "0" * 32}
    text["__metadata__"] |= {"token_digest": key.token_digest.hex()}
    head = bytearray(whole[:8] + json.dumps(text, separators=(",", ":")).encode().ljust(end - 8))
    head[39:71] = xxhash.xxh3_128_hexdigest(bytes(head)).encode()
    return bytes(head) + whole[end:]


def test_existence_is_asked_of_names_not_of_directories(directory: Directory) -> None:
    class Watched(RealDisk):
        listed = 0
        asked = 0

        def listdir(self, path: str) -> list[str]:
            self.listed += 1
            return super().listdir(path)

        def stat(self, path: str, *, follow_symlinks: bool = True) -> os.stat_result:
            self.asked += 1
            return super().stat(path, follow_symlinks=follow_symlinks)

    disk = Watched()
    store = directory.open(PAGE, world=World(disk=disk))
    keys = store.keys(list(range(16 * 200)))
    assert all(store.put(keys[:100], pages(PAGE, 100)).result())
    until(lambda: disk.listed >= 2)  # the sweep of the start: staging and trash
    time.sleep(0.2)
    disk.listed = disk.asked = 0
    assert store.exists(keys) == [True] * 100 + [False] * 100
    assert disk.listed == 0
    assert disk.asked == 200
    # 200,000 names spread so that no directory gets large.
    names = [store.object_name(store.foreign_key(number.to_bytes(4, "little"))) for number in range(20_000)]
    leaves, middles = Counter(name.rsplit("/", 1)[0] for name in names), {name[:36].rsplit("/", 1)[0] for name in names}
    assert max(leaves.values()) <= 8
    assert len(leaves) > 15_000
    assert len(middles) <= 257


def test_damage_in_the_middle_and_a_second_prefix(place: Place) -> None:
    store = place.open(PAGE)
    keys, content = store.keys(list(range(160))), pages(PAGE, 10)
    others = store.keys(list(range(1000, 1160)))
    assert all(store.put(keys + others, content * 2).result())
    whole = place.block_file(store, keys[4]).read_bytes()
    lengths = (0, len(whole) // 2, len(whole) - 1, None)
    for number, length in enumerate(lengths if place.url.startswith("curvine") else lengths[:-1]):
        if length is None:
            place.block_file(store, keys[4]).unlink()
        else:
            os.truncate(place.block_file(store, keys[4]), length)
        got = empty(PAGE, 10)
        begun = time.monotonic()
        results = store.get(keys, got).result()
        assert time.monotonic() - begun < 10
        assert [bool(result) for result in results] == [index != 4 for index in range(10)]
        assert untouched(got[4:5])
        assert store.stats().last_error
        assert all(store.get(others, empty(PAGE, 10)).result())
        assert store.lookup(keys).pages == 4
        assert store.stats().quarantined == number + 1
        assert all(store.put(keys[4:5], content[4:5]).result())


def test_32_callers_of_storage_that_hangs(directory: Directory) -> None:
    page = Geometry.raw(4096, page_tokens=4)
    writer = directory.open(page)
    keys, content = writer.keys(list(range(200))), pages(page, 50)
    assert all(writer.put(keys, content).result())
    disk = StuckDisk("read")
    store = directory.open(page, world=World(disk=disk), depth=4)
    disk.stuck = True
    outcomes: list[tuple[float, list[Any], list[bytearray]]] = []

    def call() -> None:
        begun, got = time.monotonic(), empty(page, 50)
        results = store.get(keys, got, timeout_s=0.5).result()
        outcomes.append((time.monotonic() - begun, results, got))

    callers = [threading.Thread(target=call) for _ in range(32)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join(30)
    assert [results for _, results, _ in outcomes] == [[Miss.DEADLINE] * 50] * 32
    assert max(took_s for took_s, _, _ in outcomes) < 5  # a loaded machine's 0.5
    assert store.stats().gets == 0  # it still answers
    disk.stuck = False
    disk.go.set()
    until(lambda: store.stats().in_flight == 0)
    assert all(untouched(got) for _, _, got in outcomes)
    got = empty(page, 50)
    assert all(store.get(keys, got).result())
    assert got == content


def test_a_batch_of_200_through_two_buffers(place: Place) -> None:
    page = Geometry.raw(4096, page_tokens=4)
    store = place.open(page, depth=2)
    keys, content, got = store.keys(list(range(800))), pages(page, 200), empty(page, 200)
    assert all(store.put(keys, content).result())
    assert all(store.get(keys, got).result())
    assert got == content


@needs_mounts
def test_a_frozen_file_system_is_a_deadline(tmp_path: Path) -> None:
    image = tmp_path / "image"
    with image.open("wb") as file:
        file.truncate(32 << 20)
    subprocess.run(["mkfs.ext4", "-q", str(image)], check=True)
    with mounted(tmp_path / "frozen", "-o", "loop", str(image)) as place:
        store = place.open(PAGE)
        keys, content = store.keys(list(range(320))), pages(PAGE, 20)
        assert all(store.put(keys[:10], content[:10]).result())
        frozen = subprocess.run(["fsfreeze", "-f", str(place.root)], capture_output=True, text=True)
        if frozen.returncode:
            pytest.skip(f"cannot freeze here: {frozen.stderr.strip()}")
        thaw = subprocess.Popen(["sh", "-c", f"sleep 20; fsfreeze -u {place.root}"])
        try:
            begun = time.monotonic()
            assert store.put(keys[10:], content[10:], timeout_s=0.5).result() == [Miss.DEADLINE] * 10
            got = empty(PAGE, 10)
            results = store.get(keys[:10], got, timeout_s=0.5).result()
            assert set(results) <= {Miss.DEADLINE, PAGE.size_bytes}
            assert time.monotonic() - begun < 8
            assert store.stats().put_failures == {"deadline": 10}
        finally:
            subprocess.run(["fsfreeze", "-u", str(place.root)], check=True)
            thaw.terminate()
            thaw.wait()
        until(lambda: store.stats().in_flight == 0)
        assert all(store.put(keys, content).result())
        got = empty(PAGE, 20)
        assert all(store.get(keys, got).result())
        assert got == content


def test_only_the_same_tenant_hits(place: Place) -> None:
    tokens, content = list(range(16 * 64)), pages(PAGE, 64)
    mine = place.open(PAGE, salt="s1")
    assert all(mine.put(mine.keys(tokens), content).result())
    for salt, hits in (("s2", 0), ("", 0), ("s1", 64)):
        store = place.open(PAGE, salt=salt)
        keys = store.keys(tokens)
        assert store.lookup(keys).pages == hits
        assert store.exists(keys[-1:]) == [hits > 0]
        assert len(store.list().pages) == hits


def test_another_picture_under_equal_tokens(place: Place) -> None:
    store = place.open(PAGE)
    tokens = list(range(50)) + [7] * 200 + list(range(250, 600))

    def keys(picture: str, start: int = 50) -> list[Any]:
        return store.keys(tokens, extras=[Extra(start, 200, bytes.fromhex(picture), "image")])

    shown = "0f" * 31 + "ab"
    first = keys(shown)
    assert all(store.put(first, pages(PAGE, len(first))).result())
    before = 50 // 16
    assert store.lookup(keys("1" + shown[1:])).pages == before
    assert store.lookup(keys(shown[:-1] + "c")).pages == before
    assert store.lookup(keys(shown, 66)).pages == before
    assert store.lookup(keys(shown)).pages == len(first) == 600 // 16


def test_a_page_that_went_is_not_asked_for_again_and_again(directory: Directory) -> None:
    opens: Counter[str] = Counter()

    class Watched(RealDisk):
        broken = ""

        def open(self, path: str, flags: int, mode: int = 0o600) -> int:
            opens[path] += path.endswith(".safetensors")
            if self.broken and path.endswith(self.broken):
                self.broken = ""
                raise OSError(errno.EIO, "Input/output error", path)
            return super().open(path, flags, mode)

    disk = Watched()
    store = directory.open(PAGE, world=World(disk=disk))
    keys, content = store.keys(list(range(160))), pages(PAGE, 10)
    assert all(store.put(keys, content).result())
    hit = store.lookup(keys)
    assert hit.pages == 10
    directory.block_file(store, keys[4]).unlink()
    opens.clear()
    results = store.get(keys, empty(PAGE, 10), lookup=hit).result()
    assert [index for index, result in enumerate(results) if not result] == [4]
    assert store.lookup(keys).pages == 4
    time.sleep(0.5)
    assert opens.total() <= 10 + 2
    assert all(store.put(keys[4:5], content[4:5]).result())
    # One failure that does not come again costs a second try, and no file.
    disk.broken = store.object_name(keys[4])
    got = empty(PAGE, 10)
    assert all(store.get(keys, got).result())
    assert disk.broken == ""
    assert got == content
    assert directory.block_file(store, keys[4]).exists()
    assert store.stats().quarantined == 0


def test_a_failed_batch_does_not_reach_into_the_next(directory: Directory) -> None:
    page = Geometry.raw(256 << 10, page_tokens=4)
    writer = directory.open(page)
    keys, content = writer.keys(list(range(4 * 32))), pages(page, 32)
    assert all(writer.put(keys, content).result())
    slow, number = [True], itertools.count()

    def fault(call: int, size: int) -> OSError | None:
        if size > 4096 and slow[0]:
            if next(number) == 3:
                return OSError(errno.EIO, "broken")
            time.sleep(0.2)
        return None

    store = directory.open(page, world=World(disk=FaultyDisk(fault)), depth=8)
    got = empty(page, 16)
    failed = store.get(keys[:16], got, timeout_s=0.1)
    assert set(failed.result()) <= {Miss.DEADLINE, Miss.IO}
    slow[0] = False
    assert all(store.get(keys[16:], got).result())  # into the same memory, at once
    assert got == content[16:]
    until(lambda: store.stats().in_flight == 0)
    assert got == content[16:]


def test_killed_right_after_a_put_it_is_whole_and_its_padding_zero(place: Place) -> None:
    program = """if True:
        import os, sys, kvstore
        for size in map(int, sys.argv[2:]):
            page = kvstore.Geometry.raw(size)
            store = kvstore.open(sys.argv[1], kvstore.Identity.of(page, model="m", revision="r1"), geometry=page)
            assert all(store.put(store.keys(list(range(4))), [b"x" * size] * 4).result())
        os.kill(os.getpid(), 9)
    """
    sizes = [1, 4095, 4096, 4097, (1 << 20) - 1]
    command = [sys.executable, "-c", program, place.url, *map(str, sizes)]
    done = subprocess.run(command, timeout=60, capture_output=True)
    assert done.returncode == -9, done.stderr
    for size in sizes:
        store = place.open(Geometry.raw(size))
        keys, got = store.keys(list(range(4))), [bytearray(size) for _ in range(4)]
        assert store.get(keys, got).result() == [size] * 4
        assert got == [b"x" * size] * 4
        whole = place.block_file(store, keys[0]).read_bytes()
        data = whole[8 + int.from_bytes(whole[:8], "little") :]
        assert data == b"x" * size + bytes(-size % 4096)


def test_descriptors_are_direct_where_it_is_said(directory: Directory) -> None:
    open_flags: list[int] = []  # of every descriptor that a page's bytes moved through, as the kernel tells them

    def flags_of(fd: int) -> int:
        for line in Path(f"/proc/self/fdinfo/{fd}").read_text().splitlines():
            if line.startswith("flags:"):
                return int(line.split()[1], 8)
        raise AssertionError

    class Watched(RealDisk):
        def pwritev(self, fd: int, buffers: Sequence[Any], offset_bytes: int, flags: int = 0) -> int:
            if sum(map(len, buffers)) > 4096:
                open_flags.append(flags_of(fd))
            return super().pwritev(fd, buffers, offset_bytes, flags)

    for direct in (True, False):
        open_flags.clear()
        store = directory.open(PAGE, world=World(disk=Watched()), engine="threads", direct=direct, revision=str(direct))
        assert all(store.put(store.keys(list(range(128))), pages(PAGE, 8)).result())
        assert len(open_flags) >= 8
        assert all(bool(flags & os.O_DIRECT) is store.stats().direct for flags in open_flags)
        assert store.stats().direct in (direct, False)


@needs_mounts
def test_a_file_system_that_refuses_direct_io_warns_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with mounted(tmp_path / "ramfs", "-t", "ramfs", "none") as place, caplog.at_level(logging.WARNING, "kvstore"):
        store = place.open(PAGE)
        keys, content, got = store.keys(list(range(160))), pages(PAGE, 10), empty(PAGE, 10)
        assert all(store.put(keys, content).result())
        assert all(store.get(keys, got).result())
        assert got == content
        assert not store.stats().direct
        assert len([one for one in caplog.records if one.name == "kvstore"]) == 1
