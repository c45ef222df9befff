"""What a user is told: who is not a master, addresses and times as a person writes them, what cannot be a path."""

from __future__ import annotations

import errno
import socket
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import trio

from curvfs.api import SyncFileSystem, open_filesystem
from curvfs.errors import (
    ConfigError,
    ConnectFailed,
    DeadlineExceeded,
    EnvironmentError_,
    InvalidPath,
    NotAMaster,
    RemoteProtocolError,
)
from curvfs.network import host_port
from curvfs.server.service import Server, run_server
from curvfs.units import format_duration
from curvfs.wire.codes import RpcCode
from curvfs.world import World
from tests.t2_client.fakes import Fake, Hang, always


async def test_a_workers_port_is_named_as_one(server: Server) -> None:
    with pytest.raises(NotAMaster, match=f"127.0.0.1:{server.worker_port} is the port of a worker.*master's port"):
        async with open_filesystem(f"curvine://127.0.0.1:{server.worker_port}/"):
            pass
    assert NotAMaster.exit_code == 4


async def test_a_workers_port_among_masters_does_no_harm(server: Server) -> None:
    async with open_filesystem(f"curvine://127.0.0.1:{server.worker_port},127.0.0.1:{server.master_port}/") as fs:
        assert (await fs.stat("/")).is_dir


async def test_what_is_no_curvine_exits_as_an_unreachable_server() -> None:
    async def speak_http(stream: trio.SocketStream) -> None:
        await stream.receive_some()
        await stream.send_all(b"HTTP/1.1 400 Bad Request\r\n\r\n")

    async with trio.open_nursery() as nursery:
        (listener,) = await nursery.start(partial(trio.serve_tcp, speak_http, 0, host="127.0.0.1"))
        port = listener.socket.getsockname()[1]
        with pytest.raises(RemoteProtocolError, match="does not speak Curvine's protocol") as caught:
            async with open_filesystem(f"curvine://127.0.0.1:{port}/"):
                pass
        assert caught.value.exit_code == 4
        nursery.cancel_scope.cancel()


@pytest.mark.parametrize(
    ("duration_s", "text"),
    [(4.99997, "5 s"), (0.25, "0.25 s"), (0.0333333, "0.0333 s"), (30.0, "30 s"), (1234.5, "1234 s")],
)
def test_durations_as_a_person_says_them(duration_s: float, text: str) -> None:
    assert format_duration(duration_s) == text


async def test_a_deadline_is_told_rounded() -> None:
    master = Fake({RpcCode.FILE_STATUS: always(Hang())})
    async with master.serving(), open_filesystem(master.url, rpc_timeout="3s", retry_max="200ms") as fs:
        with pytest.raises(DeadlineExceeded, match=r"did not answer within 0\.[12]\d{0,2} s"):
            await fs.stat("/f")


async def test_ipv6_addresses_stand_in_brackets() -> None:
    assert host_port("::1", 1) == "[::1]:1"
    with pytest.raises(ConnectFailed) as caught:
        async with open_filesystem("curvine://[::1]:1/"):
            pass
    assert "[::1]:1" in str(caught.value) and " ::1:1" not in str(caught.value)


@pytest.mark.skipif(not socket.has_ipv6, reason="there is no IPv6 here")
async def test_a_server_on_ipv6(tmp_path: Path) -> None:
    async with trio.open_nursery() as nursery:
        server = await nursery.start(partial(run_server, str(tmp_path), host="::1", master_port=0, worker_port=0))
        assert server.url == f"curvine://[::1]:{server.master_port}/"
        async with open_filesystem(server.url, client_hostname="elsewhere") as fs:
            async with await fs.create("/f") as writer:
                await writer.write(b"abc")
            async with await fs.open("/f") as reader:
                assert await reader.read_at(0, 10) == b"abc"
            assert (await fs.statfs()).active_master == f"[::1]:{server.master_port}"
        nursery.cancel_scope.cancel()


@pytest.mark.parametrize(
    ("host", "hint"), [("203.0.113.1", "choose an address of this machine"), ("127.0.0.1", "another port")]
)
async def test_what_cannot_be_listened_on_says_what_to_do(host: str, hint: str) -> None:
    with (
        socket.create_server(("127.0.0.1", 0)) as taken,
        pytest.raises(EnvironmentError_, match=f"Cannot listen on .*{hint}"),
    ):
        await World.real().net.listen(host, taken.getsockname()[1])


@pytest.mark.parametrize("path", [None, 7, b"/bytes", Path("/f")])
async def test_what_is_no_path(server: Server, path: Any) -> None:
    async with open_filesystem(server.url) as fs:
        for call in (fs.mkdir, fs.stat, fs.create, fs.open, fs.delete, fs.list, fs.locate, fs.open_extents):
            with pytest.raises(InvalidPath, match="A path is a string") as caught:
                await call(path)
            assert caught.value.errno_ == errno.EINVAL
        (failure,) = await fs.locate_many([path])
        assert isinstance(failure, InvalidPath)


@pytest.mark.parametrize("url", [None, 7, b"curvine://localhost/"])
async def test_what_is_no_url(url: Any) -> None:
    with pytest.raises(ConfigError, match="neither a URL nor settings"):
        async with open_filesystem(url):
            pass
    with pytest.raises(ConfigError, match="neither a URL nor settings"):
        await trio.to_thread.run_sync(SyncFileSystem.connect, url)
