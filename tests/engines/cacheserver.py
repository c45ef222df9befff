"""LMCache's real cache server, ``lmcache server``, as a process of the environment that runs the tests."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

START_TIMEOUT_S = 120.0


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class CacheServer:
    def __init__(self, adapter: dict[str, Any], log: Path) -> None:
        port, http_port = free_port(), free_port()
        self.url, self.http_url = f"tcp://127.0.0.1:{port}", f"http://127.0.0.1:{http_port}"
        self._log = log
        options = {
            "--supported-transfer-mode": "engine_driven",
            "--chunk-size": 128,
            "--l1-size-gb": 0.25,
            "--eviction-policy": "LRU",
            "--port": port,
            "--http-port": http_port,
            "--l2-adapter": json.dumps(adapter),
        }
        words = [str(word) for option in options.items() for word in option]
        command = [Path(sys.executable).with_name("lmcache"), "server", "--no-l1-use-lazy", *words]
        with log.open("w") as output:
            self.process = subprocess.Popen(
                command, stdout=output, stderr=output, env={**os.environ, "LMCACHE_TRACK_USAGE": "false"}
            )

    def wait(self) -> None:
        deadline = time.monotonic() + START_TIMEOUT_S
        while True:
            try:
                self.get("/healthcheck")
                return
            except OSError:
                assert self.process.poll() is None and time.monotonic() < deadline, self._log.read_text()[-3000:]
                time.sleep(0.2)

    def get(self, path: str) -> str:
        with urllib.request.urlopen(self.http_url + path, timeout=10) as answer:
            return str(answer.read().decode())

    def end(self, number: int) -> None:
        self.process.send_signal(number)
        self.process.wait(60)
        # what it leaves in /dev/shm when it is killed carries its number
        for left in Path("/dev/shm").glob(f"lmcache_l1_pool_{self.process.pid}*"):
            left.unlink()


@contextmanager
def running(adapter: dict[str, Any], log: Path) -> Iterator[CacheServer]:
    server = CacheServer(adapter, log)
    try:
        server.wait()
        yield server
    finally:
        if server.process.poll() is None:
            server.end(signal.SIGKILL)
