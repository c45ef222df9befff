"""Replays captured conversations against a server, and says where its replies have another shape.

The requests of a scenario are sent as they were captured, in the order of the capture, with the ids that the capture's
servers gave replaced by those that ours gave. Replies must echo what was sent, be errors of the same kind where the
captured ones are errors, and otherwise hold the same fields with the same values, but for what no two runs share
(times, ids, figures of disks, addresses), which is compared by presence.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import trio
from conformance.golden_preload import PRELOADS, TWINS
from conformance.probe import Address, Probe, Target, Wire, missing_required, pattern
from golden_frames import GoldenEvent, GoldenFrame, Scenario
from google.protobuf.message import Message

from curvfs.errors import ConnectionLost
from curvfs.wire.codes import RequestStatus, ResponseStatus, RpcCode, message_types
from curvfs.wire.frame import Frame
from curvfs.wire.messages import decode, encode, map_value, pb
from curvfs.wire.records import decode_error

#: Fields that differ between any two clusters: only whether they are there is compared.
BY_PRESENCE = {
    "FileStatusProto": {"mtime", "atime", "ctime"},
    "FileLockProto": {"acquire_time"},
    "WorkerAddressProto": {"ip_addr", "rpc_port", "web_port"},
    "WorkerInfoProto": {
        *("capacity", "available", "fs_used", "non_fs_used", "last_update", "reserved_bytes"),
        *("software_version", "startup_time_ms", "worker_session_id"),
        # What a worker can do for the transfer service, which is not part of this project.
        *("transfer_task_submit", "transfer_report_target", "transfer_query_task"),
        *("transfer_attempt_safe_output", "transfer_source_read_plan"),
    },
    "StorageInfoProto": {
        *("dir_id", "storage_id", "capacity", "available", "fs_used", "non_fs_used", "reserved_bytes"),
        *("block_num", "dir_path", "storage_type"),
    },
    "GetFilesystemInfoResponse": {
        # The number of blocks lags behind in a cluster.
        *("block_num", "active_master", "capacity", "available", "fs_used", "non_fs_used", "reserved_bytes"),
        *("allocatable_capacity", "allocatable_available"),
    },
    "ComponentInfoProto": {"release_version", "git_commit", "git_tag", "git_branch"},
}
#: Times below this were set by a client and are compared; others are the server's clock.
CLOCK_STARTS_MS = 1_000_000_000_000

INODE_IDS = {
    ("FileStatusProto", "id"),
    ("AddBlockRequest", "inode_id"),
    ("CompleteFileRequest", "inode_id"),
}
BLOCK_IDS = {
    ("ExtendedBlockProto", "id"),
    ("CommitBlockProto", "block_id"),
    ("BlockReadRequest", "id"),
    ("BlockReadResponse", "id"),
    ("BlockWriteResponse", "id"),
}
WORKER_IDS = {
    ("WorkerAddressProto", "worker_id"),
    ("BlockLocationProto", "worker_id"),
    ("AddBlockRequest", "exclude_workers"),
    ("AssignWorkerRequest", "exclude_workers"),
}
#: Replies whose workers were freshly chosen: how many is compared, not which.
PLACING = {RpcCode.ADD_BLOCK, RpcCode.ASSIGN_WORKER}

BLOCK_BITS = 24
#: A worker drops blocks without a file in its own time.
GARBAGE_TIMEOUT_S = 10.0
HELLO = b"hello"
#: What the captured workers go by.
FIRST_HOSTNAME, SECOND_HOSTNAME = "localhost", "127.0.0.2"


@dataclass(slots=True)
class Ids:
    """Which id of ours stands for which captured one."""

    inodes: dict[int, int] = field(default_factory=dict)
    workers: dict[int, int] = field(default_factory=dict)

    def ours(self, message: str, name: str, captured: int) -> int:
        """Translate an id in a request; ids that no reply has named stay as they are."""
        if (message, name) in INODE_IDS:
            return self.inodes.get(captured, captured)
        if (message, name) in BLOCK_IDS:
            return self.block(captured)
        return self.workers.get(captured, captured)

    def block(self, captured: int) -> int:
        inode = self.inodes.get(captured >> BLOCK_BITS)
        return captured if inode is None else (inode << BLOCK_BITS) | (captured & ((1 << BLOCK_BITS) - 1))

    def learn(self, message: str, name: str, captured: int, ours: int) -> bool:
        """Take note of an id in a reply; False when it contradicts what was learned before."""
        if (message, name) in INODE_IDS:
            return self.inodes.setdefault(captured, ours) == ours
        if (message, name) in BLOCK_IDS:
            return self.inodes.setdefault(captured >> BLOCK_BITS, ours >> BLOCK_BITS) == ours >> BLOCK_BITS and (
                self.block(captured) == ours
            )
        return self.workers.setdefault(captured, ours) == ours


def is_id(message: str, name: str) -> bool:
    return (message, name) in INODE_IDS | BLOCK_IDS | WORKER_IDS


def translate(message: Message, ids: Ids) -> None:
    """Replace the ids in a captured request by ours."""
    kind = message.DESCRIPTOR.name
    for descriptor, value in message.ListFields():
        if map_value(descriptor) is not None:
            continue
        if descriptor.message_type:
            for inner in value if descriptor.is_repeated else [value]:
                translate(inner, ids)
        elif is_id(kind, descriptor.name):
            if descriptor.is_repeated:
                value[:] = [ids.ours(kind, descriptor.name, each) for each in value]
            else:
                setattr(message, descriptor.name, ids.ours(kind, descriptor.name, value))


def rename(message: Message, old: str, new: str) -> None:
    """Replace the directory of the paths in a request."""
    for descriptor, value in message.ListFields():
        if descriptor.name in ("path", "src", "dst"):
            setattr(message, descriptor.name, new + value.removeprefix(old))


class Comparison:
    """Where our message differs from the captured one, field by field; learns ids on the way."""

    def __init__(self, ids: Ids, *, placing: bool) -> None:
        self._ids = ids
        self._placing = placing
        self.found: list[str] = []

    def message(self, path: str, captured: Message, ours: Message) -> None:
        for descriptor in captured.DESCRIPTOR.fields:
            here = f"{path}.{descriptor.name}"
            theirs, mine = getattr(captured, descriptor.name), getattr(ours, descriptor.name)
            if map_value(descriptor) is not None:
                self._map(here, dict(theirs), dict(mine))
            elif descriptor.is_repeated:
                self._repeated(here, captured, descriptor, list(theirs), list(mine))
            elif captured.HasField(descriptor.name) != ours.HasField(descriptor.name):
                self.found.append(f"{here}: {'missing' if captured.HasField(descriptor.name) else 'not expected'}")
            elif captured.HasField(descriptor.name):
                self._value(here, captured, descriptor, theirs, mine)

    def _map(self, here: str, captured: dict[Any, Any], ours: dict[Any, Any]) -> None:
        values = [*captured.values(), *ours.values()]
        if any(isinstance(value, Message) for value in values):  # keyed by ids
            if len(captured) != len(ours):
                self.found.append(f"{here}: {len(ours)} entries instead of {len(captured)}")
            for theirs, mine in zip(captured.values(), ours.values(), strict=False):
                self.message(here, theirs, mine)
        elif captured != ours:
            self.found.append(f"{here}: {ours} instead of {captured}")

    def _repeated(self, here: str, parent: Message, descriptor: Any, captured: list[Any], ours: list[Any]) -> None:
        of = descriptor.message_type.name if descriptor.message_type else ""
        if of == "WorkerInfoProto":
            captured.sort(key=lambda worker: worker.address.hostname)
            ours.sort(key=lambda worker: worker.address.hostname)
        if of == "FileStatusProto":
            captured, ours = self._by_path(here, captured, ours)
        if len(captured) != len(ours):
            self.found.append(f"{here}: {len(ours)} instead of {len(captured)}")
            return
        if descriptor.name == "journal_nodes" or (descriptor.name == "locs" and self._placing):
            return
        for index, (theirs, mine) in enumerate(zip(captured, ours, strict=True)):
            self._value(f"{here}[{index}]", parent, descriptor, theirs, mine)

    def _by_path(self, here: str, captured: list[Any], ours: list[Any]) -> tuple[list[Any], list[Any]]:
        """The entries of two listings that both have."""
        theirs, mine = [each.path for each in captured], [each.path for each in ours]
        self.found += [f"{here}: lacks {path}" for path in theirs if path not in mine]
        self.found += [f"{here}: has {path}" for path in mine if path not in theirs]
        return [each for each in captured if each.path in mine], [each for each in ours if each.path in theirs]

    def _value(self, here: str, parent: Message, descriptor: Any, captured: Any, ours: Any) -> None:
        kind, name = parent.DESCRIPTOR.name, descriptor.name
        if descriptor.message_type:
            self.message(here, captured, ours)
        elif is_id(kind, name):
            if not self._ids.learn(kind, name, captured, ours):
                self.found.append(f"{here}: {ours} is another id than before for {captured}")
        elif name in BY_PRESENCE.get(kind, ()):
            if isinstance(captured, int) and name in ("mtime", "atime") and captured < CLOCK_STARTS_MS:
                self._equal(here, captured, ours)
        elif kind in ("BlockWriteResponse", "BlockReadResponse") and name == "path":
            self._equal(here, local_path(captured, self._ids), ours.rpartition("/curvine/")[2])
        else:
            self._equal(here, captured, ours)

    def _equal(self, here: str, captured: Any, ours: Any) -> None:
        if captured != ours:
            self.found.append(f"{here}: {ours!r} instead of {captured!r}")


def local_path(captured: str, ids: Ids) -> str:
    """Where our worker keeps the block of a captured short-circuit path, below its cluster directory."""
    folder = captured.rpartition("/curvine/")[2].partition("/")[0]
    block = ids.block(int(captured.rpartition("blk_")[2]))
    if folder == "staging":
        return f"staging/blk_{block}"
    return f"active/b{(block >> 48) & 31}/b{(block >> 32) & 31}/blk_{block}"


@dataclass(slots=True)
class Stream:
    """A block stream that was opened on a connection."""

    #: Where the next Running frame writes.
    position: int
    #: The file that a short-circuit writer was given.
    path: str | None = None


class Connection:
    """Our connection for a captured one."""

    def __init__(self, wire: Wire) -> None:
        self.wire = wire
        #: By request id; the newest is the last.
        self.streams: dict[int, Stream] = {}
        #: Requests without a reply: what was captured, and the head that was sent instead.
        self.waiting: list[tuple[GoldenFrame, Frame]] = []
        #: Replies that came before it was their turn.
        self.early: list[Frame] = []
        self.client_done = False

    async def settle(self) -> None:
        """Receive every reply that is due."""
        while len(self.early) < len(self.waiting):
            self.early.append(await self.wire.receive())


class Replay:
    """Scenarios of one version, one after the other, against one server."""

    def __init__(self, target: Target, captured: dict[str, Scenario], workers: dict[str, Address], ids: Ids) -> None:
        self._target = target
        self._captured = captured
        self._addresses = {"master": target.master, **workers}
        self._ids = ids
        self._renamed = ("", "")
        self._kept: list[Connection] = []
        #: Scenario -> where it differed.
        self.differences: dict[str, list[str]] = {}
        #: Payload of requests that could not be made up again.
        self.unknown_payload: list[str] = []

    @classmethod
    async def against(cls, target: Target, captured: dict[str, Scenario]) -> Replay:
        """A replay that knows which of our workers stands for which captured one: they go by the same host names."""
        wire = await Wire.connect(target.master)
        workers = {
            worker.address.hostname: worker.address for worker in (await Probe(target, wire, "/").info()).live_workers
        }
        await wire.aclose()
        peers = {"worker": workers[FIRST_HOSTNAME], "worker2": workers[SECOND_HOSTNAME]}
        known = captured_workers(captured.values())
        ids = Ids(workers={worker_id: workers[hostname].worker_id for worker_id, hostname in known.items()})
        addresses = {peer: (each.ip_addr, each.rpc_port) for peer, each in peers.items()}
        return cls(target, captured, addresses, ids)

    async def run(self, name: str) -> None:
        """Replay one scenario, after what it presupposes."""
        if name in PRELOADS:
            probe = Probe(self._target, await Wire.connect(self._target.master), "/")
            await PRELOADS[name](probe)
            await probe.aclose()
        if name in TWINS:
            twin, *paths = TWINS[name]
            ids, self._ids = self._ids, Ids(workers=dict(self._ids.workers))
            self._renamed = (paths[0], paths[1])
            await self._run(self._captured[twin])
            self._ids, self._renamed = ids, ("", "")
        self.differences[name] = await self._run(self._captured[name])

    async def _run(self, scenario: Scenario) -> list[str]:
        found: list[str] = []
        connections: dict[int, Connection] = {}
        for number, line in enumerate(scenario.lines, 1):
            where = f"line {number}"
            try:
                if isinstance(line, GoldenEvent):
                    await self._event(line, connections)
                elif line.from_client:
                    await self._request(scenario, line, connections)
                else:
                    found += [f"{where}: {text}" for text in await self._reply(line, connections)]
            except (ConnectionLost, trio.TooSlowError) as error:
                found.append(f"{where}: {type(error).__name__} {error}")
                break
        self._kept = [each for each in [*self._kept, *connections.values()] if not each.client_done]
        return found

    async def aclose(self) -> None:
        for connection in self._kept:
            await connection.wire.aclose()

    # ------------------------------------------------------------------------------------------------------- lines

    async def _event(self, line: GoldenEvent, connections: dict[int, Connection]) -> None:
        connection = connections.get(line.conn)
        if connection is not None and line.sender == "client" and not connection.client_done:
            connection.client_done = True
            await connection.wire.aclose()

    async def _connection(self, line: GoldenFrame, connections: dict[int, Connection]) -> Connection:
        if line.conn not in connections:
            connections[line.conn] = await self._resumed_or_new(line)
        return connections[line.conn]

    async def _resumed_or_new(self, line: GoldenFrame) -> Connection:
        """A connection for the first frame of a captured one: an older scenario's, where the frame goes on with a
        stream that was opened there."""
        if line.head.request in (RequestStatus.RUNNING, RequestStatus.COMPLETE, RequestStatus.CANCEL):
            for connection in self._kept:
                if line.head.req_id in connection.streams:
                    self._kept.remove(connection)
                    return connection
        return Connection(await Wire.connect(self._addresses[line.peer]))

    async def _request(self, scenario: Scenario, line: GoldenFrame, connections: dict[int, Connection]) -> None:
        connection = await self._connection(line, connections)
        for other in connections.values():  # requests take effect in the order in which they were sent
            if other is not connection:
                await other.settle()
        head, header = line.head, line.header
        cls = message_types(head)
        message: Any = None
        if cls is not None and header and scenario.name != "raw_garbage_header":
            message = decode(cls, header)
            translate(message, self._ids)
            rename(message, *self._renamed)
            header = encode(message)
        data = self._payload(scenario, line, message, connection)
        if head.request is RequestStatus.COMPLETE and message is not None and head.code == RpcCode.WRITE_BLOCK:
            fill_local(connection.streams.get(head.req_id), message.block.block_size)
        if head.code == RpcCode.GET_FILESYSTEM_INFO:
            await self._let_deleted_trees_go()
        await connection.wire.send(head.code, head.request, head.req_id, head.seq_id, header, data)
        if not head.is_heartbeat:
            sent = Frame.make(head.code, head.request, head.response, head.req_id, head.seq_id, header, data)
            connection.waiting.append((line, sent))

    async def _let_deleted_trees_go(self) -> None:
        """Our server takes deleted trees apart in the background, a slice after each request that it answers."""
        wire = await Wire.connect(self._target.master)
        for req_id in range(1, 21):
            await wire.send(RpcCode.GET_FILESYSTEM_INFO, RequestStatus.RPC, req_id, -1)
            await wire.receive()
        await wire.aclose()

    def _payload(self, scenario: Scenario, line: GoldenFrame, message: Any, connection: Connection) -> bytes:
        """The data section of a request: as captured, or made up again as the captures' description says."""
        head = line.head
        if head.request is RequestStatus.OPEN and message is not None:
            connection.streams[head.req_id] = Stream(message.off)
        stream = connection.streams.get(head.req_id)
        if stream is not None and head.request is RequestStatus.RUNNING and message is not None and not message.flush:
            stream.position = message.offset
        position = 0 if stream is None else stream.position
        data = line.data if line.data is not None else self._made_up(scenario, line, position)
        if stream is not None:
            stream.position = position + len(data)
        return data

    def _made_up(self, scenario: Scenario, line: GoldenFrame, position: int) -> bytes:
        size_bytes = line.head.data_len
        for data in candidates(size_bytes, position):
            if hashlib.sha256(data).hexdigest() == line.data_sha256:
                return data
        self.unknown_payload.append(f"{scenario}: {size_bytes} bytes at {position}")
        return pattern(size_bytes, position)

    async def _reply(self, line: GoldenFrame, connections: dict[int, Connection]) -> list[str]:
        connection = connections[line.conn]
        request, sent = connection.waiting.pop(0)
        frame = connection.early.pop(0) if connection.early else await connection.wire.receive()
        if line.head.response is ResponseStatus.ERROR and frame.head.response is ResponseStatus.SUCCESS:
            frame = await self._without_garbage(line, sent, connection, frame)
        found = compare(line, frame, self._ids, request)
        if line.head.request is RequestStatus.OPEN and frame.head.response is ResponseStatus.SUCCESS:
            self._opened(line, frame, connection)
        return found

    async def _without_garbage(self, line: GoldenFrame, sent: Frame, connection: Connection, frame: Frame) -> Frame:
        """Where the capture waited for a block to be removed, so do we."""
        if line.head.code != RpcCode.READ_BLOCK or line.head.request is not RequestStatus.OPEN:
            return frame
        deadline = trio.current_time() + GARBAGE_TIMEOUT_S
        while frame.head.response is ResponseStatus.SUCCESS and trio.current_time() < deadline:
            await trio.sleep(0.05)
            await connection.wire.send_bytes(sent.encode())
            frame = await connection.wire.receive()
        return frame

    def _opened(self, line: GoldenFrame, frame: Frame, connection: Connection) -> None:
        if line.head.code == RpcCode.WRITE_BLOCK:
            reply = decode(pb.BlockWriteResponse, frame.header)
            if reply.HasField("path"):
                connection.streams[line.head.req_id].path = reply.path


def compare(captured: GoldenFrame, frame: Frame, ids: Ids, request: GoldenFrame) -> list[str]:
    """Where our reply differs from the captured one."""
    theirs, ours = captured.head, frame.head
    echo = (request.head.code, request.head.request, request.head.req_id, request.head.seq_id)
    if (ours.code, ours.request, ours.req_id, ours.seq_id) != echo:
        return [f"echoes {ours}"]
    name = f"{RpcCode.of(theirs.code).wire_name} {theirs.request.wire_name}"
    if ours.response is ResponseStatus.ERROR:
        kind, text = decode_error(frame.data)
        if theirs.response is not ResponseStatus.ERROR:
            return [f"{name} is refused with kind {kind} ({text})"]
        expected, expected_text = decode_error(captured.data or b"")
        return [] if kind == expected else [f"{name}: kind {kind} ({text}) instead of {expected} ({expected_text})"]
    if theirs.response is ResponseStatus.ERROR:
        return [f"{name} succeeds instead of being refused: {decode_error(captured.data or b'')}"]
    found = _compare_data(name, captured, frame)
    cls = message_types(theirs)
    if cls is None:
        return found + ([f"{name}: a header of {ours.header_len} bytes"] if ours.header_len else [])
    comparison = Comparison(ids, placing=theirs.code in PLACING)
    mine = decode(cls, frame.header)
    comparison.message(name, decode(cls, captured.header), mine)
    return found + comparison.found + [f"{name}: lacks the required {each}" for each in missing_required(mine)]


def _compare_data(name: str, captured: GoldenFrame, frame: Frame) -> list[str]:
    if len(frame.data) != captured.head.data_len:
        return [f"{name}: {len(frame.data)} bytes of data instead of {captured.head.data_len}"]
    if captured.data is not None:
        return [] if captured.data == frame.data else [f"{name}: other data"]
    if hashlib.sha256(frame.data).hexdigest() != captured.data_sha256:
        return [f"{name}: other data, by its SHA-256"]
    return []


def captured_workers(captured: Iterable[Scenario]) -> dict[int, str]:
    """Worker id -> host name, from the replies of GetFilesystemInfo."""
    found: dict[int, str] = {}
    for scenario in captured:
        for frame in scenario.frames:
            if frame.head.code == RpcCode.GET_FILESYSTEM_INFO and frame.head.response is ResponseStatus.SUCCESS:
                info = decode(pb.GetFilesystemInfoResponse, frame.header)
                found.update({worker.address.worker_id: worker.address.hostname for worker in info.live_workers})
    return found


def candidates(size_bytes: int, position: int) -> Iterator[bytes]:
    """What the captures' clients may have written."""
    yield pattern(size_bytes, position)
    yield pattern(size_bytes)
    yield bytes(size_bytes)
    for letter in range(256):
        yield bytes([letter]) * size_bytes


def fill_local(stream: Stream | None, length: int) -> None:
    """Write what a short-circuit client wrote into the file that it was given: it does not show in a capture."""
    if stream is None or stream.path is None:
        return
    fd = os.open(stream.path, os.O_RDWR)
    try:
        size_bytes = os.fstat(fd).st_size
        if size_bytes < length:
            data = HELLO if (size_bytes, length) == (0, len(HELLO)) else pattern(length - size_bytes, size_bytes)
            os.pwrite(fd, data, size_bytes)
    finally:
        os.close(fd)
