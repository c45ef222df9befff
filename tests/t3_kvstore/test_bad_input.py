"""What callers do wrong, and ends that come in the middle: a typed error before any byte moves, nothing lost, nothing
hung. Pieces of memory that cannot be are in test_segments, devices in test_devices."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import kvstore
from curvfs.errors import UsageError
from kvstore import Geometry, KVStore
from tests.t3_kvstore.places import Place, empty, pages, serving, untouched
from tests.t3_kvstore.test_faults import until

PAGE = Geometry.attention(layers=2, kv_heads=2, head_dim=64, dtype="float16", page_tokens=16)
SIZE = PAGE.size_bytes


def refusals(store: KVStore) -> dict[str, Callable[[], Any]]:
    """Calls that must be refused."""
    keys, one = store.keys(list(range(32))), pages(PAGE, 1)
    fewer = Geometry.attention(layers=1, kv_heads=2, head_dim=64, dtype="float16", page_tokens=16)
    return {
        "fewer segment lists than keys": lambda: store.put(keys, one),
        "more segment lists than keys": lambda: store.get(keys[:1], empty(PAGE, 2)),
        "a buffer too short": lambda: store.put(keys[:1], [bytes(SIZE - 1)]),
        "a buffer too long": lambda: store.get(keys[:1], [bytearray(SIZE + 1)]),
        "the second page too short": lambda: store.put(keys, [bytes(SIZE), bytes(SIZE - 2)]),
        "pages of another geometry": lambda: store.get(keys[:1], empty(fewer, 1)),
        "a buffer to read into that is read-only": lambda: store.get(keys[:1], [bytes(SIZE)]),
        "no segments": lambda: store.put(keys[:1], [[]]),
        "no address": lambda: store.get(keys[:1], [[(0, SIZE)]]),
        "layers of a loan": lambda: store.get(keys[:1], empty(PAGE, 1), loan=True, layerwise=True),
    }


def test_wrong_segments_are_refused_before_a_byte_moves(place: Place) -> None:
    store = place.open(PAGE)
    for what, call in refusals(store).items():
        with pytest.raises(UsageError) as caught:
            call()
        assert "\n" not in str(caught.value), what
    assert place.objects() == place.staged() == []
    stats = store.stats()
    assert (stats.puts, stats.gets, stats.put_failures, stats.get_misses, stats.in_flight) == (0, 0, {}, {}, 0)


def test_tensors_of_a_wrong_dtype_or_shape_are_named(place: Place) -> None:
    torch = pytest.importorskip("torch")
    store = place.open(PAGE)
    key, shape = store.keys(list(range(16))), (2, 16, 64)
    good = [torch.zeros(shape, dtype=torch.float16) for _ in range(4)]
    for wrong, said in (
        (torch.zeros(shape, dtype=torch.bfloat16), "bfloat16"),
        (torch.zeros(shape, dtype=torch.int16), "int16"),
        (torch.zeros(16, 2, 64, dtype=torch.float16), r"\(16, 2, 64\)"),
        (torch.zeros(shape, dtype=torch.float16, device="meta"), "meta"),
    ):
        for call in (store.put, store.get):
            with pytest.raises(UsageError, match=rf"layer\.1\.v.*{said}"):
                call(key, [[*good[:3], wrong]])
    assert place.objects() == []


def every_call(store: KVStore) -> dict[str, Callable[[], Any]]:
    keys, content = store.keys(list(range(16))), pages(PAGE, 1)
    return {
        "put": lambda: store.put(keys, content),
        "get": lambda: store.get(keys, content),
        "get_view": lambda: store.get_view(keys),
        "lookup": lambda: store.lookup(keys),
        "exists": lambda: store.exists(keys),
        "delete": lambda: store.delete(keys),
        "evict": lambda: store.evict(keys),
        "locate": lambda: store.locate(keys),
        "list": store.list,
        "usage": store.usage,
        "clear": store.clear,
        "sweep": store.sweep,
    }


def test_keys_of_another_identity_are_refused_by_every_call_with_keys(place: Place) -> None:
    store, other = place.open(PAGE), place.open(PAGE, revision="r2")
    keys, got = other.keys(list(range(16))), empty(PAGE, 1)
    calls = (store.lookup, store.exists, store.delete, store.evict, store.locate, store.get_view)
    for call in (*calls, lambda keys: store.put(keys, got), lambda keys: store.get(keys, got)):
        with pytest.raises(UsageError, match="identity"):
            call(keys)
    assert untouched(got)
    assert place.objects() == []


@pytest.mark.parametrize("url", [None, 7, b"file:///x", "", "ftp://x/", "/just/a/path"])
def test_what_is_no_place_for_a_store(url: Any) -> None:
    whose = kvstore.Identity.of(PAGE, model="m", revision="r")
    with pytest.raises(UsageError, match="is no place for a store; write"):
        kvstore.open(url, whose, geometry=PAGE)


def test_a_closed_store_says_so_to_every_call(place: Place) -> None:
    store = place.open(PAGE)
    pending = store.put(store.keys(list(range(640))), pages(PAGE, 40))
    assert store.close()
    assert pending.done()
    for what, call in every_call(store).items():
        with pytest.raises(UsageError, match="closed"):
            call()
        assert what
    reader = place.open(PAGE)
    keys, got = reader.keys(list(range(640))), empty(PAGE, 40)
    assert list(map(bool, reader.get(keys, got).result())) == list(map(bool, pending.result())) == reader.exists(keys)


FORKED = """if True:
    import os, sys, kvstore
    from curvfs.errors import UsageError
    from tests.t3_kvstore.test_bad_input import PAGE, every_call
    from tests.t3_kvstore.places import empty, pages
    url = sys.argv[1]
    whose = kvstore.Identity.of(PAGE, model="m", revision="r1")
    store = kvstore.open(url, whose, geometry=PAGE)
    keys = store.keys(list(range(16 * 200)))
    transfer = store.put(keys, pages(PAGE, 200))
    calls = every_call(store) | {
        "result": transfer.result,
        "cancel": transfer.cancel,
        "callback": lambda: transfer.add_callback(print),
        "layer": lambda: transfer.layer(0).result(),
        "returned": lambda: transfer.wait_returned(1),
    }
    pid = os.fork()
    if pid == 0:
        refused = 0
        for what, call in calls.items():
            try:
                call()
            except UsageError as error:
                refused += "fork" in str(error)
        os._exit(0 if refused == len(calls) and store.close() else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert all(transfer.result())
    got = empty(PAGE, 200)
    assert all(store.get(keys, got).result()) and got == pages(PAGE, 200)
    store.close()
"""


def run(program: str, *arguments: str, timeout_s: float = 60) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-W", "ignore", "-c", program, *arguments]
    root = Path(__file__).parents[2]
    return subprocess.run(command, capture_output=True, text=True, timeout=timeout_s, cwd=root)


def test_a_child_that_was_forked_in_the_middle_is_refused(place: Place) -> None:
    done = run(FORKED, place.url)
    assert (done.returncode, done.stderr) == (0, "")
    assert len(place.objects()) == 200


ENDING = """if True:
    import sys, kvstore
    page = kvstore.Geometry.raw(1 << 18)
    whose = kvstore.Identity.of(page, model="m", revision="r1")
    store = kvstore.open(sys.argv[1], whose, geometry=page)
    keys = store.keys(list(range(64)))
    content = [bytearray([number + 1]) * (1 << 18) for number in range(64)]
    if sys.argv[2] == "put":
        store.put(keys, content)
    else:
        assert all(store.put(keys, content).result())
        print("stored", flush=True)
        if sys.argv[2] == "hang":
            sys.stdin.readline()
        store.get(keys, content, **({"layerwise": True} if sys.argv[2] == "layers" else {}))
        if sys.argv[2] == "raise":
            raise SystemExit(7)
"""


@pytest.mark.parametrize("what", ["put", "get", "layers", "raise"])
def test_the_interpreter_ends_in_the_middle(place: Place, what: str) -> None:
    done = run(ENDING, place.url, what)
    assert (done.returncode, done.stderr) == (7 if what == "raise" else 0, "")
    page = Geometry.raw(1 << 18)
    reader = place.open(page)
    keys, got = reader.keys(list(range(64))), empty(page, 64)
    results = reader.get(keys, got).result()
    for number, result in enumerate(results):
        assert got[number] == bytes([number + 1 if result else 0xEE]) * (1 << 18)
    assert what == "put" or all(results)
    assert reader.stats().quarantined == 0


def test_the_interpreter_ends_while_the_server_hangs(tmp_path: Path) -> None:
    with serving(tmp_path) as master:
        server = json.loads((tmp_path / "server.json").read_text())["pid"]
        command = [sys.executable, "-c", ENDING, f"curvine://{master}/?client_hostname=elsewhere", "hang"]
        process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        assert process.stdout is not None
        assert process.stdout.readline() == "stored\n"
        os.kill(server, signal.SIGSTOP)
        try:
            begun = time.monotonic()
            _, errors = process.communicate("go\n", timeout=60)
            assert (process.returncode, errors) == (0, "")
            assert time.monotonic() - begun < 30
        finally:
            os.kill(server, signal.SIGCONT)


def test_closing_ends_the_stores_threads(place: Place) -> None:
    def ours() -> set[threading.Thread]:
        # trio keeps threads for a while, for whoever needs one next.
        return {thread for thread in threading.enumerate() if not thread.name.startswith("Trio thread")}

    before = ours()
    store = place.open(PAGE)
    assert all(store.put(store.keys(list(range(32))), pages(PAGE, 2)).result())
    assert len(ours() - before) > 2
    assert store.close()
    until(lambda: not ours() - before)
