"""Section 1: frames, statuses, ids, heartbeats, order and error replies."""

from __future__ import annotations

import struct

import pytest
import trio
from conformance.probe import (
    COMMON,
    CREAT,
    NOT_FOUND,
    WRONLY,
    BlockStream,
    Probe,
    Wire,
    file_options,
    parse_reply,
    pattern,
    refused,
)
from conformance.rules import rule

from curvfs.errors import RemoteError
from curvfs.units import MIB
from curvfs.wire.codes import RequestStatus, ResponseStatus, RpcCode
from curvfs.wire.frame import HEARTBEAT, Frame
from curvfs.wire.messages import encode, pb

RPC = RequestStatus.RPC


def exists_request(path: str) -> bytes:
    return encode(pb.ExistsRequest(path=path))


async def ask(wire: Wire, req_id: int, path: str = "/", seq_id: int = -1) -> Frame:
    """One Exists call on a connection; returns its reply."""
    await wire.send(RpcCode.EXISTS, RPC, req_id, seq_id, exists_request(path))
    return await wire.receive()


# ------------------------------------------------------------------------------------------------------------ 1.1


@rule("1.1")
async def test_a_reply_has_the_layout_of_a_frame(probe: Probe) -> None:
    async with probe.connected() as wire:
        header = exists_request("/")
        await wire.send_bytes(struct.pack(">iibBqi", 18 + len(header), len(header), 9, 0xF1, 77, -1) + header)
        raw = memoryview(bytearray(22))
        await wire.stream.recv_exactly(raw)
        total_len, header_len, code, status, req_id, seq_id = struct.unpack(">iibBqi", raw)
        assert (total_len, code, status, req_id, seq_id) == (18 + header_len, 9, 0x01, 77, -1)


@rule("1.1")
@pytest.mark.parametrize("cut", [1, 4, 21, 22, 30])
async def test_a_connection_closed_inside_a_frame_harms_nobody(probe: Probe, cut: int) -> None:
    async with probe.connected() as wire:
        whole = Frame.make(9, RPC, ResponseStatus.UNDEFINED, 5, -1, exists_request("/some/where")).encode()
        await wire.send_bytes(whole[:cut])
    assert await probe.exists("/")


@rule("1.1")
async def test_a_frame_may_come_in_pieces(probe: Probe) -> None:
    async with probe.connected() as wire:
        whole = Frame.make(9, RPC, ResponseStatus.UNDEFINED, 5, -1, exists_request("/")).encode()
        for start in range(len(whole)):
            await wire.send_bytes(whole[start : start + 1])
        assert (await wire.receive()).head.req_id == 5


@rule("1.1")
@pytest.mark.parametrize(
    ("total_len", "header_len"), [(17, 0), (18 + 16 * MIB + 1, 0), (18 + 16 * MIB + 11, 10), (-1, 0)]
)
async def test_impossible_lengths_close_the_connection_without_a_reply(
    probe: Probe, total_len: int, header_len: int
) -> None:
    async with probe.connected() as wire:
        await wire.send_bytes(struct.pack(">iibBqi", total_len, header_len, 9, 0xF1, 1, -1))
        assert await wire.closed_by_server()


@rule("1.1", "4.7")
async def test_16_mib_of_data_are_accepted(probe: Probe) -> None:
    data = pattern(16 * MIB)
    await probe.create(probe.at("f"), block_size=32 * MIB)
    located = await probe.add_block(probe.at("f"))
    made = await probe.fill(located, data, block_size=32 * MIB)
    await probe.complete(probe.at("f"), len(data), made)
    reader = await probe.reader((await probe.locate(probe.at("f"))).block_locs[0], chunk_size=16 * MIB)
    assert await reader.read() == data


@rule("1.1", "3.1")
async def test_a_header_may_exceed_16_mib(probe: Probe) -> None:
    """... and a field that nobody knows is ignored, however long."""
    unknown = b"\xc2\x3e" + _varint(17 * MIB) + bytes(17 * MIB)  # field 1000, length-delimited
    async with probe.connected() as wire:
        await wire.send(RpcCode.EXISTS, RPC, 9, -1, exists_request("/") + unknown)
        assert (await wire.receive()).head.response is ResponseStatus.SUCCESS


def _varint(number: int) -> bytes:
    out = bytearray()
    while number > 0x7F:
        out.append(number & 0x7F | 0x80)
        number >>= 7
    out.append(number)
    return bytes(out)


# ------------------------------------------------------------------------------------------------------- 1.2 and 1.3


@rule("1.2")
@pytest.mark.parametrize("status", [0xFF, 0x6F])
async def test_the_empty_message_closes_the_connection(probe: Probe, status: int) -> None:
    async with probe.connected() as wire:
        await wire.send_bytes(struct.pack(">iibBqi", 18, 0, 0, status, -1, -1))
        assert await wire.closed_by_server()


@rule("1.2", "1.7")
async def test_the_status_byte_of_an_error_reply(probe: Probe) -> None:
    async with probe.connected() as wire:
        await wire.send(RpcCode.FILE_STATUS, RPC, 3, -1, encode(pb.GetFileStatusRequest(path=probe.at("nope"))))
        raw = memoryview(bytearray(22))
        await wire.stream.recv_exactly(raw)
        assert raw[9] == 0x11


@rule("1.3")
@pytest.mark.parametrize("req_id", [1, -1, 0, (1 << 63) - 1, -(1 << 63), 0x0123456789ABCDEF])
async def test_any_request_id_is_echoed(probe: Probe, req_id: int) -> None:
    async with probe.connected() as wire:
        reply = await ask(wire, req_id)
    assert (reply.head.req_id, reply.head.response) == (req_id, ResponseStatus.SUCCESS)


@rule("1.3")
@pytest.mark.parametrize("seq_id", [-1, 0, 77, -(1 << 31)])
async def test_seq_id_is_echoed_and_not_validated(probe: Probe, seq_id: int) -> None:
    async with probe.connected() as wire:
        reply = await ask(wire, 1, seq_id=seq_id)
    assert (reply.head.seq_id, reply.head.response) == (seq_id, ResponseStatus.SUCCESS)


@rule("1.3", "2.1")
@pytest.mark.parametrize("code", [0, 99, -5])
async def test_an_unknown_code_is_echoed_with_an_error(probe: Probe, code: int) -> None:
    async with probe.connected() as wire:
        await wire.send(code, RPC, 4, -1)
        reply = await wire.receive()
    assert (reply.head.code, reply.head.req_id) == (code, 4)
    with pytest.raises(RemoteError, match="Unsupported operation"):
        parse_reply(reply.head, reply)


@rule("1.3")
async def test_seq_ids_of_a_stream_are_echoed_and_not_validated(probe: Probe) -> None:
    located = (await probe.put(probe.at("f"), b"abc")).block_locs[0]
    stream = await probe.reader(located)
    for seq_id in (1, 9, 9, -2, 3):
        stream.seq_id = seq_id - 1
        assert await stream.read(seek=0) == b"abc"


# ------------------------------------------------------------------------------------------------------------ 1.4


@rule("1.4")
async def test_heartbeats_are_dropped_and_not_answered(probe: Probe) -> None:
    odd = Frame.make(7, RequestStatus.HEARTBEAT, ResponseStatus.SUCCESS, 6, 2, b"header", b"data").encode()
    async with probe.connected() as wire:
        await wire.send_bytes(HEARTBEAT, odd, HEARTBEAT)
        assert (await ask(wire, 5)).head.req_id == 5
        await wire.send_bytes(HEARTBEAT)
        assert await wire.silent()


@rule("1.4")
async def test_workers_drop_heartbeats_too(probe: Probe) -> None:
    stream = await probe.reader((await probe.put(probe.at("f"), b"abc")).block_locs[0])
    await stream.wire.send_bytes(HEARTBEAT)
    assert await stream.read() == b"abc"


# ------------------------------------------------------------------------------------------------------------ 1.5


@rule("1.5")
async def test_pipelined_requests_are_answered_in_order(probe: Probe) -> None:
    count = 300
    async with probe.connected() as wire, trio.open_nursery() as nursery:

        async def send() -> None:
            for req_id in range(count):
                await wire.send(RpcCode.EXISTS, RPC, req_id, -1, exists_request("/"))

        nursery.start_soon(send)
        assert [(await wire.receive()).head.req_id for _ in range(count)] == list(range(count))


@rule("1.5")
async def test_requests_of_one_connection_are_executed_one_after_the_other(probe: Probe) -> None:
    """Each of these needs the one before it; all are sent before any reply is read."""
    made, moved = probe.at("made"), probe.at("moved")
    steps = [
        (RpcCode.CREATE_FILE, pb.CreateFileRequest(path=made, opts=file_options(), flags=WRONLY | CREAT)),
        (RpcCode.RENAME, pb.RenameRequest(src=made, dst=moved, flags=0)),
        (RpcCode.FILE_STATUS, pb.GetFileStatusRequest(path=moved)),
        (RpcCode.DELETE, pb.DeleteRequest(path=moved, recursive=False)),
        (RpcCode.EXISTS, pb.ExistsRequest(path=moved)),
    ]
    async with probe.connected() as wire:
        for req_id, (code, message) in enumerate(steps, 1000):
            await wire.send(code, RPC, req_id, -1, encode(message))
        replies = [await wire.receive() for _ in steps]
    assert [reply.head.req_id for reply in replies] == list(range(1000, 1005))
    assert [reply.head.response for reply in replies] == [ResponseStatus.SUCCESS] * len(steps)
    assert not parse_reply(replies[-1].head, replies[-1]).exists


@rule("1.5")
async def test_a_connection_serves_on_after_an_error_reply(probe: Probe) -> None:
    async with refused(NOT_FOUND):
        await probe.stat(probe.at("nope"))
    assert (await probe.stat(probe.directory)).is_dir


@rule("1.5", "4.7")
async def test_running_frames_of_a_write_may_be_pipelined(probe: Probe) -> None:
    data = pattern(MIB)
    await probe.create(probe.at("f"))
    located = await probe.add_block(probe.at("f"))
    stream = await probe.writer(located)
    pieces = [data[start : start + 65536] for start in range(0, MIB, 65536)]
    sent = [await stream.send(RequestStatus.RUNNING, None, piece) for piece in pieces]
    for head in sent:
        parse_reply(head, await stream.wire.receive())
    await stream.complete(MIB)
    assert await probe.get_block(_with_length(located, MIB)) == data


@rule("1.5", "4.11")
async def test_running_frames_of_a_read_may_be_pipelined(probe: Probe) -> None:
    data = pattern(MIB)
    located = (await probe.put(probe.at("f"), data)).block_locs[0]
    stream = await probe.reader(located, chunk_size=65536)
    sent = [await stream.send(RequestStatus.RUNNING) for _ in range(16)]
    received = b""
    for head in sent:
        reply = await stream.wire.receive()
        parse_reply(head, reply)
        received += reply.data
    assert received == data


@rule("1.5", "4.7")
async def test_frames_behind_a_failed_write_still_execute_at_the_current_position(probe: Probe) -> None:
    await probe.create(probe.at("f"))
    located = await probe.add_block(probe.at("f"))
    stream = await probe.writer(located, off=MIB - 2)
    heads = [await stream.send(RequestStatus.RUNNING, None, data) for data in (b"too long for the block", b"ab")]
    with pytest.raises(RemoteError):
        parse_reply(heads[0], await stream.wire.receive())
    parse_reply(heads[1], await stream.wire.receive())
    await stream.complete(MIB)
    assert (await probe.get_block(_with_length(located, MIB)))[-3:] == b"\0ab"


@rule("1.5", "4.11")
async def test_an_open_on_the_same_connection_replaces_the_stream(probe: Probe) -> None:
    one = (await probe.put(probe.at("one"), b"first")).block_locs[0]
    two = (await probe.put(probe.at("two"), b"second", worker=one.locs[0])).block_locs[0]
    stream = await probe.worker(one.locs[0])
    await stream.open_read(one.block.id, 5)
    assert await stream.read() == b"first"
    await stream.open_read(two.block.id, 6)
    assert await stream.read() == b"second"
    await stream.complete_read()
    await stream.open_read(one.block.id, 5)
    assert await stream.read() == b"first"


@rule("1.5")
async def test_a_worker_connection_serves_on_after_an_error_reply(probe: Probe) -> None:
    located = (await probe.put(probe.at("f"), b"abc")).block_locs[0]
    stream: BlockStream = await probe.worker(located.locs[0])
    with pytest.raises(RemoteError):
        await stream.open_read(1, 10)
    await stream.open_read(located.block.id, 3)
    assert await stream.read() == b"abc"


# ------------------------------------------------------------------------------------------------------- 1.7 to 1.9


@rule("1.7")
async def test_an_error_record_lies_in_the_data_section(probe: Probe) -> None:
    async with probe.connected() as wire:
        await wire.send(RpcCode.FILE_STATUS, RPC, 3, -1, encode(pb.GetFileStatusRequest(path=probe.at("nope"))))
        reply = await wire.receive()
    assert (reply.head.header_len, reply.header) == (0, b"")
    kind, length = struct.unpack_from(">iI", reply.data)
    assert kind == NOT_FOUND
    assert probe.at("nope") in reply.data[8 : 8 + length].decode()
    assert reply.data[8 + length :] == b"\0\0\0\0"


@rule("1.7", "12")
async def test_an_undecodable_header_gets_an_error_reply(probe: Probe) -> None:
    async with probe.connected() as wire:
        await wire.send(RpcCode.FILE_STATUS, RPC, 5, -1, b"\xff" * 7)
        reply = await wire.receive()
        async with refused(COMMON):
            parse_reply(reply.head, reply)
        assert (await ask(wire, 6)).head.response is ResponseStatus.SUCCESS


def _with_length(located: pb.LocatedBlockProto, length: int) -> pb.LocatedBlockProto:
    changed = pb.LocatedBlockProto()
    changed.CopyFrom(located)
    changed.block.block_size = length
    return changed
