"""Several processes on one pool, some of which are killed in the middle of what they do."""

from __future__ import annotations

import random
import signal
import subprocess
import sys
import time
from typing import Any

from kvstore import Geometry, Miss
from tests.t3_kvstore.places import Directory, empty, payload

PAGE = Geometry.raw(1 << 18, page_tokens=4)

#: What every process runs: argument 1 is the URL, 2 what to do.
PROGRAM = """
import sys, threading, hashlib
import kvstore

def payload(seed):
    return hashlib.shake_128(seed.to_bytes(8, "little")).digest(1 << 18)

page = kvstore.Geometry.raw(1 << 18, page_tokens=4)
whose = kvstore.Identity.of(page, model="m", revision="r1")
store = kvstore.open(sys.argv[1], whose, geometry=page, depth=4)
wrong = []

def contend(rounds):
    contents = [payload(index) for index in range(20)]
    for _ in range(rounds):
        keys = store.keys(list(range(80)))
        results = store.put(keys, contents).result()
        if results != [1 << 18] * 20:
            wrong.append(results)
        if _ % 3 == 0:
            store.delete(keys[_ % 20 :: 7])

def watch(rounds):
    contents = [payload(index) for index in range(20)]
    for _ in range(rounds):
        keys = store.keys(list(range(80)))
        got = [bytearray(1 << 18) for _ in range(20)]
        for index, result in enumerate(store.get(keys, got).result()):
            if result and got[index] != contents[index]:
                wrong.append(index)
            if not result and result is not kvstore.Miss.ABSENT:
                wrong.append(result)

def stream():
    index = int(sys.argv[3])
    while True:
        keys = store.keys(list(range(4 * index, 4 * index + 16)))
        store.put(keys, [payload(index + place) for place in range(4)]).result()
        index += 4

print("ready", flush=True)
what = sys.argv[2]
if what == "stream":
    stream()
work = [threading.Thread(target={"contend": contend, "watch": watch}[what], args=(int(sys.argv[3]),)) for _ in range(3)]
for one in work: one.start()
for one in work: one.join()
store.close()
if wrong:
    sys.exit(repr(wrong[:3]))
"""


def start(directory: Directory, what: str, argument: int) -> subprocess.Popen[str]:
    process = subprocess.Popen(
        [sys.executable, "-c", PROGRAM, directory.url, what, str(argument)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    return process


def test_writers_of_the_same_keys_some_of_them_killed(directory: Directory) -> None:
    chance = random.Random(1)
    survivors = [start(directory, "contend", 12), start(directory, "watch", 12), start(directory, "contend", 12)]
    for _ in range(5):
        victim = start(directory, "contend", 10_000)
        time.sleep(chance.uniform(0, 0.3))
        victim.send_signal(signal.SIGKILL)
        victim.communicate()
    for process in survivors:
        _, errors = process.communicate(timeout=90)
        assert process.returncode == 0, errors
    store = directory.open(PAGE, staging_expiry_s=0.2)
    keys = store.keys(list(range(80)))
    contents: list[Any] = [payload(PAGE.size_bytes, index) for index in range(20)]
    assert all(store.put(keys, contents).result())
    got = empty(PAGE, 20)
    assert all(store.get(keys, got).result())
    assert got == contents
    assert len(directory.objects()) == 20
    time.sleep(0.4)
    store.sweep()
    assert directory.staged() == []


def test_a_writer_killed_at_any_moment_leaves_whole_objects_or_none(directory: Directory) -> None:
    chance = random.Random(2)
    for round_ in range(8):
        first = 1000 * (round_ + 1)
        writer = start(directory, "stream", first)
        time.sleep(chance.uniform(0, 0.1))
        writer.send_signal(signal.SIGKILL)
        writer.communicate()
        store = directory.open(PAGE)
        index, there = first, True
        while there:
            keys = store.keys(list(range(4 * index, 4 * index + 16)))
            there = any(store.exists(keys))
            got = empty(PAGE, 4)
            for place, result in enumerate(store.get(keys, got).result()):
                assert result == PAGE.size_bytes or result is Miss.ABSENT
                assert store.exists([keys[place]]) == [bool(result)]
                if result:
                    assert got[place] == payload(PAGE.size_bytes, index + place)
            index += 4
        store.close()
    store = directory.open(PAGE, staging_expiry_s=0.2)
    time.sleep(0.4)
    store.sweep()
    assert directory.staged() == []
