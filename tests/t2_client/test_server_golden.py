"""What a real cluster answered, asked again: captured requests are replayed frame by frame against our server.

Ids differ between the two, so those in requests are rewritten to ours (learnt from the replies before), and those in
captured replies too, before they are compared. Times, addresses and figures of the machine are left out.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import trio
from golden_frames import HEAD, GoldenFrame, Scenario, scenarios
from google.protobuf.json_format import MessageToDict
from google.protobuf.message import Message
from raw_client import Answer, Raw, RawBlock, commit_of, connected

from curvfs.errors import RemoteProtocolError
from curvfs.server.service import Server
from curvfs.wire.codes import RequestStatus, ResponseStatus, RpcCode, message_types
from curvfs.wire.frame import encode_head
from curvfs.wire.messages import decode, pb
from curvfs.wire.records import decode_error
from curvfs.world import RealNetwork

#: Asked, but meant to be answered otherwise.
DIFFERENT = {
    "raw_create_long_name": "names that no client could reach are refused",
    "raw_create_dots": "names that no client could reach are refused",
    "raw_create_dslash": "names that no client could reach are refused",
    "raw_dots": "names that no client could reach are refused",
    "raw_setattr_same_req_id": "a repeated SetAttr is answered instead of poisoned",
    "raw_symlink_same_req_id": "a repeated Symlink is answered instead of poisoned",
    "raw_link_same_req_id": "a repeated Link is answered instead of poisoned",
    "raw_free": "there is no under store to free files to",
}
#: Not asked: they need a second worker.
LEFT_OUT = {"raw_commit_other_worker", "raw_replicas_2_one_written"}
#: Asked for what they do, but not compared: figures of the machine, and files changed outside of what was captured.
#: (raw_xattr_at_create: Curvine gives no ctime there after the rename, and everywhere else it does.)
UNCOMPARED = {
    "raw_info", "raw_reserve", "raw_stat_root", "raw_heartbeat_frame", "raw_rm_all", "raw_create_unfinished_visible",
    "raw_rm", "raw_rename_over_open_reader", "raw_xattr_at_create", "fuse_false_truncate_zero", "fuse_false_flock",
    "fuse_false_fcntl_lock", "fuse_false_statvfs", "fuse_false_rm_rf", "fuse_false_read_hole",
}  # fmt: skip
#: Where the capture waited for the next heartbeat to remove a block.
WAITED = {"raw_overwrite_old_block"}
#: What local writers put into the files that they were given.
WRITTEN_LOCALLY = {"raw_put_sc": 100_000, "raw_sc_write_open": b"hello"}

VOLATILE = {"mtime", "atime", "ipAddr", "hostname", "rpcPort", "webPort", "acquireTime"}
PATTERN = bytes(range(256)) * 65_536


class Replay:
    """One server, and how the captured cluster's inode and worker ids translate."""

    def __init__(self, server: Server) -> None:
        self.server = server
        self.inodes: dict[int, int] = {}
        self.workers: dict[int, int] = {}
        self.data_dir = str(Path(server.directory) / "data")

    async def scenario(self, scenario: Scenario) -> list[str]:
        """Replay one; what was answered differently."""
        differences: list[str] = []
        connections: dict[tuple[int, str], Raw] = {}
        unknown_data = False
        try:
            for frame in scenario.frames:
                key = (frame.conn, frame.peer)
                if key not in connections:
                    port = self.server.master_port if frame.peer == "master" else self.server.worker_port
                    connections[key] = Raw(await RealNetwork().connect(self.server.host, port))
                raw = connections[key]
                if frame.from_client:
                    if scenario.name in WAITED and frame.head.code == RpcCode.READ_BLOCK:
                        await trio.sleep(0.2)
                    unknown_data |= await self._ask(raw, frame)
                    continue
                answer = await raw.receive()
                if answer is None:
                    return [*differences, "the connection was closed"]
                if scenario.name in WRITTEN_LOCALLY:
                    self._write_locally(answer, WRITTEN_LOCALLY[scenario.name])
                differences += self._compare(frame, answer, compare_data=not unknown_data)
        finally:
            for raw in connections.values():
                await raw.stream.aclose()
        return differences

    async def _ask(self, raw: Raw, frame: GoldenFrame) -> bool:
        """Send a captured request; True when its payload was not captured and is not the usual pattern."""
        head, data = frame.head, frame.data
        unknown = False
        if data is None:
            data = PATTERN[: head.data_len]
            unknown = hashlib.sha256(data).hexdigest() != frame.data_sha256
        header = frame.header
        if (kind := message_types(head)) is not None:
            try:
                message = decode(kind, header)
            except RemoteProtocolError:
                pass  # garbage stays garbage
            else:
                _change_ids(message, self._ours)
                header = message.SerializeToString()
        prefix = encode_head(
            head.code, head.request, head.response, head.req_id, head.seq_id, len(header), head.data_len
        )
        await raw.stream.send(prefix, header, data)
        return unknown

    def _write_locally(self, answer: Answer, content: int | bytes) -> None:
        if answer.head.code == RpcCode.WRITE_BLOCK and answer.head.request is RequestStatus.OPEN:
            path = decode(pb.BlockWriteResponse, answer.header).path
            Path(path).write_bytes(PATTERN[:content] if isinstance(content, int) else content)

    def _compare(self, frame: GoldenFrame, answer: Answer, *, compare_data: bool) -> list[str]:
        theirs, ours = frame.head, answer.head
        about = f"{RpcCode.of(theirs.code).wire_name} {theirs.request.wire_name}"
        if (theirs.code, theirs.request, theirs.req_id, theirs.seq_id) != (
            ours.code,
            ours.request,
            ours.req_id,
            ours.seq_id,
        ):
            return [f"{about}: {ours} where {theirs} was answered"]
        if theirs.response is ResponseStatus.ERROR or ours.response is ResponseStatus.ERROR:
            kinds = [
                decode_error(data or b"") if head.response is ResponseStatus.ERROR else (0, "success")
                for head, data in ((theirs, frame.data), (ours, answer.data))
            ]
            return [] if kinds[0][0] == kinds[1][0] else [f"{about}: {kinds[1]} where {kinds[0]} was answered"]
        differences = []
        if (kind := message_types(theirs)) is not None:
            expected, found = decode(kind, frame.header), decode(kind, answer.header)
            self._learn(expected, found)
            _change_ids(expected, self._ours)
            differences = _differences(self._plain(expected), self._plain(found), about)
        if theirs.data_len != ours.data_len:
            differences.append(f"{about}: {ours.data_len} bytes of data where {theirs.data_len} were answered")
        elif compare_data and theirs.data_len:
            digest = frame.data_sha256 or hashlib.sha256(frame.data or b"").hexdigest()
            if hashlib.sha256(answer.data).hexdigest() != digest:
                differences.append(f"{about}: other data")
        return differences

    # ---- ids

    def _ours(self, kind: str, value: int) -> int:
        if kind == "inode":
            return self.inodes.get(value, value)
        if kind == "worker":
            return self.workers.get(value, value)
        return (self.inodes.get(value >> 24, value >> 24) << 24) | (value & 0xFFFFFF)

    def _learn(self, expected: Message, found: Message) -> None:
        pairs: list[list[tuple[str, int]]] = []
        for message in (expected, found):
            ids: list[tuple[str, int]] = []
            pairs.append(ids)

            def note(kind: str, value: int, ids: list[tuple[str, int]] = ids) -> int:
                ids.append((kind, value))
                return value

            _change_ids(message, note)
        for (kind, theirs), (our_kind, ours) in zip(*pairs, strict=False):
            if kind != our_kind:
                return
            if kind == "inode":
                self.inodes[theirs] = ours
            elif kind == "worker":
                self.workers[theirs] = ours
            else:
                self.inodes[theirs >> 24] = ours >> 24

    def _plain(self, message: Message) -> Any:
        return _without_volatile(MessageToDict(message), self.data_dir)


def _change_ids(message: Message, change: Callable[[str, int], int]) -> None:
    """Pass every inode, block and worker id through ``change``, in place."""
    for field, value in message.ListFields():
        if field.message_type is not None:
            if not field.message_type.GetOptions().map_entry:
                for inner in [value] if isinstance(value, Message) else value:
                    _change_ids(inner, change)
        elif field.name == "worker_id":
            setattr(message, field.name, change("worker", value))
        elif field.name == "inode_id" or (field.name == "id" and message.DESCRIPTOR.name == "FileStatusProto"):
            setattr(message, field.name, change("inode", value))
        elif field.name in ("id", "block_id"):
            setattr(message, field.name, change("block", value))


def _without_volatile(value: Any, data_dir: str) -> Any:
    if isinstance(value, dict):
        kept = {name: _without_volatile(inner, data_dir) for name, inner in value.items() if name not in VOLATILE}
        if "ctime" in kept:
            kept["ctime"] = "some time"
        return kept
    if isinstance(value, list):
        return [_without_volatile(inner, data_dir) for inner in value]
    if isinstance(value, str) and value.startswith((data_dir, "/mnt/nvme0/cv")):
        return value.removeprefix(data_dir).removeprefix("/mnt/nvme0/cv").split("/")[1:3]
    return value


def _differences(expected: Any, found: Any, where: str) -> list[str]:
    if isinstance(expected, dict) and isinstance(found, dict):
        return [
            difference
            for name in sorted(expected.keys() | found.keys())
            for difference in _differences(expected.get(name), found.get(name), f"{where}.{name}")
        ]
    if isinstance(expected, list) and isinstance(found, list) and len(expected) == len(found):
        return [
            difference
            for index, (one, other) in enumerate(zip(expected, found, strict=True))
            for difference in _differences(one, other, f"{where}[{index}]")
        ]
    return [] if expected == found else [f"{where}: {found!r} where {expected!r} was answered"]


async def _make_what_was_not_captured(server: Server, name: str, replay: Replay) -> None:
    async with (
        connected(server.host, server.master_port) as master,
        connected(server.host, server.worker_port) as worker,
    ):
        owned = {"owner": "root", "group": "root"}
        if name == "raw_list_order":
            for entry in ("b", "a", "B", "é", "*x", "[q]"):
                await master.create(f"/raw/l/{entry}", block_size=4 << 20, **owned)
        elif name == "raw_link":
            await master.mkdir("/raw2", **owned)
            replay.inodes[1097] = (await master.create("/raw2/m", **owned)).id
            located = await master.add_block("/raw2/m")
            stream = RawBlock(worker, located.block)
            await stream.open_write()
            await stream.write(PATTERN[:5000])
            await stream.complete(5000)
            await master.complete("/raw2/m", 5000, [commit_of(located, 5000)])
        elif name == "fuse_false_mkdir":
            await master.mkdir("/g", **owned)


@pytest.mark.parametrize("prefix", ["raw_", "fuse_false_"])
async def test_captured_requests_are_answered_as_the_cluster_did(server: Server, prefix: str) -> None:
    replay = Replay(server)
    differences: dict[str, list[str]] = {}
    asked = 0
    for name, scenario in scenarios(HEAD).items():
        if not name.startswith(prefix) or name in LEFT_OUT:
            continue
        await _make_what_was_not_captured(server, name, replay)
        asked += 1
        with trio.fail_after(20):
            found = await replay.scenario(scenario)
        if name in DIFFERENT:
            assert found, f"{name} is answered as Curvine does: {DIFFERENT[name]}?"
        elif found and name not in UNCOMPARED:
            differences[name] = found
    assert not differences
    assert asked > {"raw_": 130, "fuse_false_": 35}[prefix]
