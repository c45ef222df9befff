"""The master's port over real sockets: replies, replays, locks, pipelining, and peers that misbehave."""

from __future__ import annotations

import os
import random
import struct
from collections.abc import AsyncIterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import trio
from raw_client import CLIENT, Raw, commit_of, connected

from curvfs.errors import NotFound, RemoteError
from curvfs.server import master as master_module
from curvfs.server.master import Master
from curvfs.server.service import Server, run_server
from curvfs.wire.codes import RequestStatus, ResponseStatus, RpcCode
from curvfs.wire.frame import HEARTBEAT, Frame
from curvfs.wire.messages import decode, encode, pb
from curvfs.world import RealClock, World


@pytest.fixture
async def raw(server: Server) -> AsyncIterator[Raw]:
    async with connected(server.host, server.master_port) as made:
        yield made


class ShiftedClock(RealClock):
    """The real clock, some time later."""

    def __init__(self) -> None:
        self.ahead_ms = 0

    def time_ms(self) -> int:
        return super().time_ms() + self.ahead_ms

    def monotonic_s(self) -> float:
        return super().monotonic_s() + self.ahead_ms / 1000


@pytest.fixture
async def shifted(tmp_path: Path) -> AsyncIterator[tuple[Server, ShiftedClock]]:
    clock = ShiftedClock()
    async with trio.open_nursery() as nursery:
        server = await nursery.start(
            partial(
                run_server, str(tmp_path / "p"), master_port=0, worker_port=0, world=replace(World.real(), clock=clock)
            )
        )
        yield server, clock
        nursery.cancel_scope.cancel()


async def refused(kind: int, call: Any, text: str = "") -> None:
    with pytest.raises(RemoteError) as caught:
        await call
    assert caught.value.kind == kind, caught.value
    assert text in caught.value.text


async def test_who_and_where(server: Server, raw: Raw) -> None:
    await raw.create("/d/f")
    info = await raw.call(RpcCode.GET_FILESYSTEM_INFO)
    assert info.active_master == f"127.0.0.1:{server.master_port}"
    assert (info.inode_dir_num, info.inode_file_num, info.block_num) == (1, 1, 0)
    (worker,) = info.live_workers
    assert (worker.address.hostname, worker.address.ip_addr) == ("worker-host", "127.0.0.1")
    assert worker.address.rpc_port == server.worker_port and worker.address.worker_id > 0
    assert 0 < info.allocatable_available <= info.allocatable_capacity == info.capacity
    assert info.compatibility.compatibility_mode == pb.COMPATIBILITY_MODE_PROTO_DIAGNOSE
    assert info.compatibility.server.protocol_version == info.compatibility.server.min_protocol_version == 1
    assert not info.compatibility.min_client_version and not info.compatibility.blocked_versions
    assert len((await raw.call(RpcCode.GET_MOUNT_TABLE)).mount_table) == 0
    assert not (await raw.call(RpcCode.GET_MOUNT_INFO, pb.GetMountInfoRequest(path="/d"))).HasField("mount_info")
    await raw.call(RpcCode.METRICS_REPORT, pb.MetricsReportRequest(instance="x"))


async def test_file_status_has_every_field(raw: Raw) -> None:
    made = await raw.create("/d/f", owner="o", group="g", x_attr={"curvfs.born": b"\x00\xff"})
    assert made == await raw.stat("/d/f")
    assert (made.name, made.path, made.is_dir, made.file_type) == ("f", "/d/f", False, pb.FILE_TYPE_PROTO_FILE)
    assert (made.replicas, made.block_size, made.nlink, made.mode) == (1, 1 << 20, 1, 0o644)
    assert dict(made.x_attr) == {"curvfs.born": b"\x00\xff"} and not made.HasField("ctime")
    policy = made.storage_policy
    assert (policy.storage_type, policy.ttl_ms, policy.ttl_action, policy.state) == (4, 0, 0, 1)
    folder = await raw.stat("/d")
    assert (folder.len, folder.children_num, folder.replicas, folder.block_size, folder.nlink) == (1, 1, 0, 0, 2)
    request = pb.SymlinkRequest(target="f", link="/d/l", mode=0o777)
    await raw.call(RpcCode.SYMLINK, request)
    link = await raw.stat("/d/l")
    assert (link.target, link.file_type, link.is_complete) == ("f", pb.FILE_TYPE_PROTO_LINK, True)
    assert (await raw.stat("/")).name == ""


async def test_listings(raw: Raw) -> None:
    for name in ("b", "a", "c"):
        await raw.create(f"/d/{name}")
    listed = (await raw.call(RpcCode.LIST_STATUS, pb.ListStatusRequest(path="/d"))).statuses
    assert [found.path for found in listed] == ["/d/a", "/d/b", "/d/c"]
    options = pb.ListOptionsProto(limit=1, start_after="a")
    page = await raw.call(RpcCode.LIST_OPTIONS, pb.ListOptionsRequest(path="/d", options=options))
    assert [found.name for found in page.statuses] == ["b"]
    assert (await raw.call(RpcCode.EXISTS, pb.ExistsRequest(path="/d/a"))).exists
    assert not (await raw.call(RpcCode.EXISTS, pb.ExistsRequest(path="/d/x"))).exists


async def test_every_protected_request_is_executed_once(raw: Raw) -> None:
    made = await raw.create("/f", 0xC1, req_id=1)
    assert await raw.create("/f", 0xC1, req_id=1) == made
    await refused(7, raw.create("/f", 0xC1, req_id=2))
    assert await raw.rename("/f", "/g", req_id=3) and await raw.rename("/f", "/g", req_id=3)
    await refused(8, raw.rename("/f", "/g", req_id=4))
    assert (await raw.delete("/g", req_id=5)).inodes == 1
    assert (await raw.delete("/g", req_id=5)).inodes == 0
    await refused(8, raw.delete("/g", req_id=6))
    await raw.create("/f")
    for code, request in (
        (RpcCode.SET_ATTR, pb.SetAttrRequest(path="/f", opts=pb.SetAttrOptsProto(mode=0o600))),
        (RpcCode.SYMLINK, pb.SymlinkRequest(target="t", link="/l", mode=0o777)),
        (RpcCode.LINK, pb.LinkRequest(src_path="/f", dst_path="/h")),
    ):
        await raw.call(code, request, req_id=100 + code)
        await raw.call(code, request, req_id=100 + code)
    assert (await raw.stat("/f")).nlink == 2


async def test_a_request_id_does_not_cover_another_request(raw: Raw) -> None:
    await raw.create("/a", req_id=9)
    await raw.create("/b", req_id=9)
    assert (await raw.delete("/a", req_id=9)).inodes == 1
    await refused(8, raw.delete("/nope", req_id=10))
    await raw.create("/nope")
    assert (await raw.delete("/nope", req_id=10)).inodes == 1, "what failed runs again"


async def test_replays_are_forgotten_after_ten_minutes(shifted: tuple[Server, ShiftedClock]) -> None:
    server, clock = shifted
    async with connected(server.host, server.master_port) as raw:
        await raw.create("/f", 0xC1, req_id=1)
        clock.ahead_ms = 599_000
        await raw.create("/f", 0xC1, req_id=1)
    clock.ahead_ms = 601_000
    async with connected(server.host, server.master_port) as raw:
        await refused(7, raw.create("/f", 0xC1, req_id=1))


async def test_locks_over_the_wire(shifted: tuple[Server, ShiftedClock]) -> None:
    server, clock = shifted

    def request(kind: type, owner: int, lock_type: int, start: int = 0, end: int = 9) -> Any:
        lock = pb.FileLockProto(
            client_id="c", owner_id=owner, pid=1, lock_flags=pb.LOCK_FLAGS_PROTO_PLOCK, start=start, end=end
        )
        lock.lock_type = lock_type  # type: ignore[assignment]
        return kind(path="/f", lock=lock)

    async with connected(server.host, server.master_port) as raw:
        await raw.create("/f")

        async def set_lock(*fields: int) -> Any:
            return await raw.call(RpcCode.SET_LOCK, request(pb.SetLockRequest, *fields))

        assert not (await set_lock(1, 1)).HasField("conflict")
        against = await set_lock(2**64 - 1, 1, 9, 2**64 - 1)
        assert against.conflict.owner_id == 1 and (against.conflict.start, against.conflict.end) == (0, 9)
        got = await raw.call(RpcCode.GET_LOCK, request(pb.GetLockRequest, 2, 0))
        assert got.conflict == against.conflict
        clock.ahead_ms = 299_000
        assert (await set_lock(2, 1)).HasField("conflict")
    clock.ahead_ms = 301_000
    async with connected(server.host, server.master_port) as raw:
        reply = await raw.call(RpcCode.SET_LOCK, request(pb.SetLockRequest, 2, 1))
        assert not reply.HasField("conflict"), "five minutes have passed"


async def test_batches(server: Server, raw: Raw) -> None:
    creates = [pb.CreateFileRequest(path=f"/b/{i}", opts=raw.create_options(), flags=0x241) for i in range(3)]
    batch = pb.CreateFilesBatchRequest(requests=creates)
    made = await raw.call(RpcCode.CREATE_FILES_BATCH, batch, req_id=50)
    assert [found.name for found in made.file_statuses] == ["0", "1", "2"]
    again = await raw.call(RpcCode.CREATE_FILES_BATCH, batch, req_id=50)
    assert again == made
    adds = [pb.AddBlockRequest(path=f"/b/{i}") for i in range(3)]
    blocks = (await raw.call(RpcCode.ADD_BLOCKS_BATCH, pb.AddBlocksBatchRequest(requests=adds))).blocks
    completes = [
        pb.CompleteFileRequest(path=f"/b/{i}", len=5, client_name=CLIENT, commit_blocks=[commit_of(blocks[i], 5)])
        for i in range(3)
    ]
    done = await raw.call(RpcCode.COMPLETE_FILES_BATCH, pb.CompleteFilesBatchRequest(requests=completes))
    assert list(done.results) == [True] * 3
    assert (await raw.stat("/b/2")).is_complete
    creates[1].path = "/b/1/x"
    creates[0].path = "/b/new"
    await refused(10000, raw.call(RpcCode.CREATE_FILES_BATCH, pb.CreateFilesBatchRequest(requests=creates)))
    assert (await raw.stat("/b/new")).len == 0, "what came before the failing one stays"


@pytest.mark.parametrize("code", [0, 1, 6, 22, 28, 32, 38, 40, 44, 61, 80, 81, 99, -128, 127])
async def test_other_codes_are_refused_and_echoed(raw: Raw, code: int) -> None:
    answer = await raw.exchange(code, RequestStatus.RPC, b"", req_id=7)
    assert answer.error is not None
    assert (answer.error.kind, answer.error.text) == (10000, "Unsupported operation")


@pytest.mark.parametrize(("code", "kind"), [(30, 19), (31, 19), (35, 19), (36, 23), (37, 23)])
async def test_what_needs_an_under_store_is_refused_typed(raw: Raw, code: int, kind: int) -> None:
    answer = await raw.exchange(code, RequestStatus.RPC, b"", req_id=7)
    assert answer.error is not None and answer.error.kind == kind


async def test_headers_that_are_no_messages(raw: Raw) -> None:
    garbage = await raw.exchange(RpcCode.FILE_STATUS, RequestStatus.RPC, b"\xff\xff\xff\xff", req_id=1)
    assert garbage.error is not None and garbage.error.kind == 10000
    empty = await raw.exchange(RpcCode.FILE_STATUS, RequestStatus.RPC, b"", req_id=2)
    assert empty.error is not None and "Absolute path required" in empty.error.text
    assert (await raw.stat("/")).id == 1000, "the connection is fine"


async def test_a_bug_in_a_handler_is_an_error_reply(server: Server, raw: Raw, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(self: Master, message: Any, req_id: int) -> Any:
        raise KeyError("nobody foresaw this")

    monkeypatch.setitem(master_module._HANDLERS, RpcCode.MKDIR, (pb.MkdirRequest, broken))
    await refused(10000, raw.mkdir("/d"), "failed inside the server: KeyError")
    assert (await raw.stat("/")).id == 1000


async def test_heartbeats_are_dropped(raw: Raw) -> None:
    await raw.stream.send(HEARTBEAT * 3)
    assert (await raw.stat("/")).id == 1000


async def test_pipelined_requests_are_answered_in_order(raw: Raw) -> None:
    count = 3_000
    for index in range(20):
        await raw.create(f"/d/{index}")
    frames = b"".join(
        Frame.make(
            RpcCode.GET_BLOCK_LOCATIONS,
            RequestStatus.RPC,
            ResponseStatus.UNDEFINED,
            index,
            -1,
            encode(pb.GetBlockLocationsRequest(path=f"/d/{index % 21}")),
        ).encode()
        for index in range(count)
    )
    async with trio.open_nursery() as nursery:
        nursery.start_soon(raw.stream.send, frames)
        for index in range(count):
            answer = await raw.receive()
            assert answer is not None and answer.head.req_id == index
            if index % 21 == 20:
                assert isinstance(answer.error, NotFound)
            else:
                reply = decode(pb.GetBlockLocationsResponse, answer.header)
                assert reply.blocks.status.path == f"/d/{index % 21}"


async def test_listings_beyond_sixteen_mebibytes(raw: Raw) -> None:
    options = encode(raw.create_options(x_attr={"user.big": bytes(60_000)}))
    for index in range(300):
        request = pb.CreateFileRequest(path=f"/d/{index:03}", flags=0x241)
        request.opts.MergeFromString(options)
        await raw.call(RpcCode.CREATE_FILE, request)
    listed = (await raw.call(RpcCode.LIST_STATUS, pb.ListStatusRequest(path="/d"))).statuses
    assert len(listed) == 300 and all(len(found.x_attr["user.big"]) == 60_000 for found in listed)


async def test_idle_connections_are_closed_and_heartbeats_do_not_help(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(master_module, "IDLE_TIMEOUT_S", 0.3)
    async with connected(server.host, server.master_port) as raw:
        started = trio.current_time()
        await raw.stat("/")
        await trio.sleep(0.2)
        await raw.stat("/")
        await trio.sleep(0.1)
        await raw.stream.send(HEARTBEAT)
        with trio.fail_after(5):
            assert await raw.receive() is None
        assert 0.4 < trio.current_time() - started < 2
    async with connected(server.host, server.worker_port) as worker:
        await trio.sleep(0.5)
        answer = await worker.exchange(RpcCode.MKDIR, RequestStatus.RPC, req_id=1)
        assert answer.error is not None, "worker connections stay"


# ------------------------------------------------------------------------------------------------------ hostile peers


def _head(total: int, header: int, code: int = 7, status: int = 0xF1) -> bytes:
    return struct.pack(">iibBqi", total, header, code, status, 1, -1)


HOSTILE = {
    "negative header": _head(18, -1) + bytes(100),
    "negative data": _head(17, 0),
    "data over 16 MiB": _head(18 + (16 << 20) + 1, 0) + bytes(1000),
    "huge header": _head((1 << 31) - 1, (1 << 31) - 19),
    "minimum numbers": struct.pack(">iibBqi", -(1 << 31), -(1 << 31), -128, 0xFF, -(1 << 63), -(1 << 31)),
    "empty message": _head(18, 0, status=0xFF),
    "a reply": _head(18, 0, status=0x01),
    "an error reply": _head(18, 0, status=0x11),
    "http": b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n" + bytes(100),
    "zeros": bytes(4096),
}


@pytest.mark.parametrize("port", ["master_port", "worker_port"])
@pytest.mark.parametrize("what", HOSTILE)
async def test_a_bad_frame_closes_its_connection_and_no_other(server: Server, port: str, what: str) -> None:
    async with connected(server.host, server.master_port) as other:
        async with connected(server.host, getattr(server, port)) as raw:
            await raw.stream.send(HOSTILE[what])
            with trio.fail_after(5):
                try:
                    while await raw.receive() is not None:
                        pass
                except Exception as error:
                    assert "lost" in str(error), error
        assert (await other.stat("/")).id == 1000


@pytest.mark.parametrize("port", ["master_port", "worker_port"])
async def test_requests_before_a_bad_frame_are_answered(server: Server, port: str) -> None:
    async with connected(server.host, getattr(server, port)) as raw:
        good = Frame.make(99, RequestStatus.RPC, ResponseStatus.UNDEFINED, 5, -1).encode()
        await raw.stream.send(good + HOSTILE["negative data"])
        answer = await raw.receive()
        assert answer is not None and answer.head.req_id == 5
        assert await raw.receive() is None


@pytest.mark.parametrize("port", ["master_port", "worker_port"])
async def test_frames_in_single_bytes_and_connections_cut_anywhere(server: Server, port: str) -> None:
    header = encode(pb.GetFileStatusRequest(path="/"))
    frame = Frame.make(7, RequestStatus.RPC, ResponseStatus.UNDEFINED, 5, -1, header, b"data").encode()
    async with connected(server.host, getattr(server, port)) as raw:
        for index in range(len(frame)):
            await raw.stream.send(frame[index : index + 1])
        assert await raw.receive() is not None
    for cut in range(len(frame)):
        async with connected(server.host, getattr(server, port)) as raw:
            await raw.stream.send(frame[:cut])
    async with connected(server.host, server.master_port) as raw:
        assert (await raw.stat("/")).id == 1000


async def test_random_bytes_behind_real_heads(server: Server) -> None:
    """Every code and status with headers of noise: an error reply or a closed connection, and the server lives."""
    noise = random.Random(7)
    for port in (server.master_port, server.worker_port):
        for code in (*range(2, 28), 33, 34, 60, 80, 81, 82):
            async with connected(server.host, port) as raw:
                for status in (RequestStatus.RPC, RequestStatus.OPEN, RequestStatus.RUNNING, RequestStatus.COMPLETE):
                    header = noise.randbytes(noise.randrange(40))
                    await raw.send(code, status, header, noise.randbytes(30), req_id=noise.getrandbits(62), seq_id=3)
                    answer = await raw.receive()
                    assert answer is not None and answer.head.code == code
    async with connected(server.host, server.master_port) as raw:
        assert (await raw.stat("/")).id == 1000


async def test_the_announced_address_is_reachable_when_listening_everywhere(tmp_path: Path) -> None:
    async with trio.open_nursery() as nursery:
        server = await nursery.start(
            partial(run_server, str(tmp_path / "p"), host="0.0.0.0", master_port=0, worker_port=0, hostname="localhost")
        )
        assert server.url == f"curvine://localhost:{server.master_port}/"
        async with connected("127.0.0.1", server.master_port) as raw:
            info = await raw.call(RpcCode.GET_FILESYSTEM_INFO)
            assert info.live_workers[0].address.ip_addr == "localhost"
        nursery.cancel_scope.cancel()
    assert os.path.exists(tmp_path / "p" / "server.json")
