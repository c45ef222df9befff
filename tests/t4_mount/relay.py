"""A relay before a server whose worker can be cut off, or fall silent, while its master lives on.

The embedded server is one process. Here clients reach its master and its worker through two ports of this process; the
master's answers name the second one, because the port in them is exchanged on the way.
"""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

#: Of the field ``rpc_port`` of a worker's address, as protobuf marks it.
_PORT_MARK = b"\x20"
_SMALLEST_PORT = 1 << 14  # three bytes each, so that exchanging them changes no length
_PIECE_BYTES = 1 << 18


class Gate:
    """Connections to one port of a server. ``cut``: they end, and new ones end at once. ``hold``: nothing comes
    through. ``slow_s``: how long each 256 KiB, or what comes at once, is kept back."""

    def __init__(self, target: int, exchange: Sequence[tuple[bytes, bytes]] = ()) -> None:
        self._target = ("127.0.0.1", target)
        self._exchange = exchange
        self._cut = False
        self.slow_s = 0.0
        self._flows = threading.Event()
        self._flows.set()
        self._sockets: set[socket.socket] = set()
        self._listener = _listener()
        self.port = int(self._listener.getsockname()[1])
        threading.Thread(target=self._accept, daemon=True).start()

    def cut(self) -> None:
        self._cut = True
        for each in list(self._sockets):
            _end(each)

    def hold(self) -> None:
        self._flows.clear()

    def mend(self) -> None:
        self._cut = False
        self.slow_s = 0.0
        self._flows.set()

    def close(self) -> None:
        _end(self._listener)
        self._listener.close()
        self.cut()
        self._flows.set()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                if self._cut:
                    client.close()
                    continue
                threading.Thread(target=self._serve, args=(client,), daemon=True).start()

    def _serve(self, client: socket.socket) -> None:
        with client, socket.create_connection(self._target) as server:
            both = {client, server}
            self._sockets |= both
            back = threading.Thread(target=self._pump, args=(client, server, ()), daemon=True)
            back.start()
            self._pump(server, client, self._exchange)
            back.join()
            self._sockets -= both

    def _pump(self, source: socket.socket, sink: socket.socket, exchange: Sequence[tuple[bytes, bytes]]) -> None:
        with suppress(OSError):
            while data := source.recv(_PIECE_BYTES):
                self._flows.wait()
                time.sleep(self.slow_s)
                for pair in exchange:
                    data = data.replace(*pair)
                sink.sendall(data)
        _end(source)
        _end(sink)


def _listener() -> socket.socket:
    while True:
        listener = socket.create_server(("127.0.0.1", 0))
        if listener.getsockname()[1] >= _SMALLEST_PORT:
            return listener
        listener.close()


def _end(each: socket.socket) -> None:
    with suppress(OSError):
        each.shutdown(socket.SHUT_RDWR)


def marked(port: int) -> bytes:
    """A worker's port as protobuf writes it."""
    return _PORT_MARK + bytes([port & 127 | 128, port >> 7 & 127 | 128, port >> 14])


@contextmanager
def relayed(pool: Path) -> Iterator[tuple[str, Gate, subprocess.Popen[str]]]:
    """A server of ``pool`` behind two gates: its URL, the gate of its worker, and its process."""
    command = [sys.executable, "-m", "tools", "serve", str(pool), "--master-port", "0", "--worker-port", "0"]
    gates: list[Gate] = []
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            assert "curvine://" in process.stdout.readline()
            record = json.loads((pool / "server.json").read_text())
            gates.append(worker := Gate(record["worker_port"]))
            gates.append(Gate(record["master_port"], [(marked(record["worker_port"]), marked(worker.port))]))
            yield f"curvine://127.0.0.1:{gates[-1].port}/", worker, process
        finally:
            for gate in gates:
                gate.close()
            process.terminate()
