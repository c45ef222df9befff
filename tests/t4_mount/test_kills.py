"""kill -9 of writers, of the server and of a mount in the middle of their work, with readers running on two mounts.

Never a torn object, never a stuck name, and everything works again afterwards without anybody's help.
"""

from __future__ import annotations

import hashlib
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.t4_mount.mounts import Mount, mounted, server_pid, start_mount, wait_for

NAMES = 4
#: Each object is the digest of what follows; writers use one staging name per object, all of them the same.
WRITER = """
import hashlib, os, random, sys
while True:
    name = f"{sys.argv[1]}/o{random.randrange(NAMES)}"
    body = random.randbytes(random.choice((1, 5000, 300_000, 1_500_000)))
    try:
        with open(name + ".tmp", "wb") as file:
            file.write(hashlib.sha256(body).digest())
            for start in range(0, len(body), 65536):
                file.write(body[start:start + 65536])
        os.rename(name + ".tmp", name)
        print("+", end="", flush=True)
    except OSError:
        pass
""".replace("NAMES", str(NAMES))
READER = """
import hashlib, os, random, sys
while True:
    name = f"{random.choice(sys.argv[1:])}/o{random.randrange(NAMES)}"
    try:
        with open(name, "rb") as file:
            content = file.read()
    except OSError:
        continue
    if hashlib.sha256(content[32:]).digest() != content[:32]:
        sys.exit(f"{name} is torn: {len(content)} bytes")
    print("+", end="", flush=True)
""".replace("NAMES", str(NAMES))


def whole(path: Path) -> bool:
    content = path.read_bytes()
    return hashlib.sha256(content[32:]).digest() == content[:32]


@contextmanager
def program(text: str, output: Path, *places: Path) -> Iterator[subprocess.Popen[bytes]]:
    with output.open("ab") as file:
        process = subprocess.Popen([sys.executable, "-c", text, *map(str, places)], stdout=file, stderr=file)
    try:
        yield process
    finally:
        process.kill()
        process.wait(30)


def publish(mount: Mount, name: str) -> bool:
    """By the staging name that all writers used."""
    body = os.urandom(100_000)
    try:
        (mount.kv / f"{name}.tmp").write_bytes(hashlib.sha256(body).digest() + body)
        os.rename(mount.kv / f"{name}.tmp", mount.kv / name)
        return (mount.kv / name).read_bytes()[32:] == body
    except OSError:
        return False


def test_killed_in_the_middle_of_everything(tmp_path: Path) -> None:
    pool = tmp_path / "pool"
    chance = random.Random(5)
    read, written = tmp_path / "read", tmp_path / "written"
    options = ("--embedded", pool, "-o", "op_timeout=10")
    with mounted(tmp_path, *options, name="b") as other:
        mount = start_mount(tmp_path, *options, name="a")
        try:
            with program(READER, read, mount.kv, other.kv) as one, program(READER, read, other.kv) as two:
                for turn in range(3):
                    done = written.stat().st_size if written.exists() else 0
                    with (
                        program(WRITER, written, mount.kv),
                        program(WRITER, written, mount.kv),
                        program(WRITER, written, other.kv),
                    ):
                        wait_for(lambda done=done: written.stat().st_size > done, 60, "a writer")  # type: ignore[misc]
                        time.sleep(chance.uniform(0, 0.3))
                        if turn % 3 == 1:
                            os.kill(server_pid(pool), signal.SIGKILL)
                            wait_for(lambda: publish(other, "after"), 60, "the server")
                        elif turn % 3 == 2:
                            mount.process.kill()
                            mount.process.communicate()
                            mount = start_mount(tmp_path, *options, name="a")
                    # Here the writers were killed.
                    assert (one.poll(), two.poll()) == (None, None), read.read_text()[-200:]
            assert read.stat().st_size > 0
            for index in range(NAMES):
                for each in (mount, other):
                    wait_for(lambda each=each, index=index: publish(each, f"o{index}"), 30, "a name")  # type: ignore[misc]
                    assert whole(mount.kv / f"o{index}") and whole(other.kv / f"o{index}")
            assert mount.stop() == 0
        finally:
            mount.remove()
