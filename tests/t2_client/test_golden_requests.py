"""What our client sends for an operation says the same as what the real clients sent, frame by frame.

A fake master and worker answer with the captured replies (workers' addresses replaced by the fake's), so our client
lives through the captured situation. Compared are the requests of the codes that carry the operation, without what is
each client's own choice: names, versions, sizes of frames and read-ahead.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import pytest
from golden_frames import GoldenFrame, Scenario, scenarios
from google.protobuf.message import Message

from curvfs.api import CurvineFileSystem, FileLock, LockKind, open_filesystem
from curvfs.wire.codes import RequestStatus, ResponseStatus, RpcCode, message_types
from curvfs.wire.messages import decode, encode, pb
from curvfs.wire.records import decode_error
from tests.t2_client.fakes import Fake, Handler, Refuse, status

_OWN_CHOICE = frozenset(
    (
        "client_name",
        "client_id",
        "client_address",
        "component_info",
        "chunk_size",
        "read_ahead_len",
        "enable_read_ahead",
        "drop_cache_len",
        "create_flag",
    )
)

Key = tuple[RpcCode, RequestStatus]
MiB = 1 << 20


def plain(message: Message) -> dict[str, Any]:
    """Fields that are set, without what each client chooses; nested messages as dictionaries."""
    found: dict[str, Any] = {}
    for field, value in message.ListFields():
        if field.name in _OWN_CHOICE:
            continue
        if isinstance(value, Message):
            found[field.name] = plain(value)
        elif field.message_type is not None and not field.message_type.GetOptions().map_entry:
            found[field.name] = [plain(entry) for entry in value]
        elif field.is_repeated:
            found[field.name] = dict(value) if hasattr(value, "items") else list(value)
        else:
            found[field.name] = value
    return found


def key_of(frame: GoldenFrame) -> Key:
    return RpcCode.of(frame.head.code), frame.head.request


def message_of(frame: GoldenFrame) -> Any:
    kind = message_types(frame.head)
    return None if kind is None else decode(kind, frame.header)


def redirect(message: Any, worker: Fake) -> Any:
    """The message with every worker address pointing to the fake."""
    if isinstance(message, pb.WorkerAddressProto):
        message.ip_addr, message.rpc_port = "127.0.0.1", worker.port
        return message
    for field, value in message.ListFields():
        if isinstance(value, Message):
            redirect(value, worker)
        elif field.message_type is not None and not field.message_type.GetOptions().map_entry:
            for entry in value:
                redirect(entry, worker)
    return message


class Replay:
    """Answers each request with the next captured reply to that code and status; what was not captured, plausibly."""

    def __init__(self, scenario: Scenario, worker: Fake, extra: dict[RpcCode, Handler]) -> None:
        self._worker = worker
        self._extra = extra
        self._replies: dict[Key, deque[GoldenFrame]] = defaultdict(deque)
        for frame in scenario.frames:
            if not frame.from_client:
                self._replies[key_of(frame)].append(frame)

    def __call__(self, request: Any, message: Any) -> Any:
        if request.rpc in self._extra:
            return self._extra[request.rpc](request, message)
        waiting = self._replies[request.rpc, request.status]
        if not waiting:
            if request.rpc is RpcCode.WRITE_BLOCK and request.status is RequestStatus.OPEN:
                return pb.BlockWriteResponse(id=message.block.id, off=message.off, block_size=message.block_size)
            return None
        frame = waiting.popleft()
        data = frame.data if frame.data is not None else bytes(frame.head.data_len)
        if frame.head.response is ResponseStatus.ERROR:
            raise Refuse(*decode_error(data))
        reply = message_of(frame)
        return (None if reply is None else redirect(reply, self._worker)), data


def stat_anything(request: Any, message: Any) -> Any:
    """A directory where the name has no dot in the examples' sense: parents; a file of 4 MiB blocks else."""
    directory = message.path in ("/", "/g", "/raw", "/raw/l", "/raw/l/*x", "/f_false", "/f_true")
    return pb.GetFileStatusResponse(status=status(message.path, directory=directory, block_size=4 * MiB))


def nothing_at(path: str) -> Handler:
    def handler(request: Any, message: Any) -> Any:
        if message.path == path:
            raise Refuse(8)
        return stat_anything(request, message)

    return handler


async def sent_by_us(
    scenario: Scenario,
    act: Callable[[CurvineFileSystem], Awaitable[None]],
    extra: dict[RpcCode, Handler],
    hostname: str,
) -> list[tuple[Key, Any]]:
    worker, master = Fake(), Fake()
    async with worker.serving(), master.serving():
        replay = Replay(scenario, worker, {RpcCode.FILE_STATUS: stat_anything} | extra)
        codes = [code for code in RpcCode if code not in (RpcCode.GET_FILESYSTEM_INFO, RpcCode.GET_MOUNT_TABLE)]
        master.handle = dict.fromkeys(codes, replay)
        worker.handle = dict.fromkeys(codes, replay)
        seen: list[tuple[Key, Any]] = []
        for fake in (master, worker):
            fake.seen = _Log(seen)  # type: ignore[assignment]
        async with open_filesystem(
            master.url, client_hostname=hostname, block_size="4MB", chunk_size="128KB", retry_max_s=2.0
        ) as fs:
            await act(fs)
    return seen


class _Log:
    """Keeps master's and worker's requests in one order."""

    def __init__(self, seen: list[tuple[Key, Any]]) -> None:
        self._seen = seen

    def append(self, entry: tuple[RpcCode, Any, Any]) -> None:
        self._seen.append(((entry[0], entry[1].status), entry[2]))


def repeated(size: int) -> bytes:
    return (bytes(range(256)) * (size // 256 + 1))[:size]


async def put(fs: CurvineFileSystem, path: str, size: int) -> None:
    async with await fs.create(path, overwrite=True, mode=0o755, owner="root", group="root") as writer:
        await writer.write(repeated(size))


async def get(fs: CurvineFileSystem, path: str) -> None:
    async with await fs.open(path) as reader:
        await reader.read_at(0, reader.length_bytes)


async def write_in_hole(fs: CurvineFileSystem) -> None:
    writer = await fs.open_for_write("/f_true/big")
    await writer.write_at(b"x" * 100, 13 * MiB)
    await writer.flush()
    await writer.close()


async def append(fs: CurvineFileSystem) -> None:
    async with await fs.open_for_write("/f_true/s", append=True) as writer:
        await writer.write(b"append")


def created_by_open(scenario: str) -> dict[RpcCode, Handler]:
    """The real clients create with OpenFile, we with CreateFile: the same answer."""
    frames = scenarios("head")[scenario].frames
    answer = next(
        message_of(frame) for frame in frames if key_of(frame)[0] is RpcCode.OPEN_FILE and not frame.from_client
    )
    return {RpcCode.CREATE_FILE: lambda request, message: pb.CreateFileResponse(file_status=answer.file_blocks.status)}


OPEN, COMPLETE, RPC = RequestStatus.OPEN, RequestStatus.COMPLETE, RequestStatus.RPC
WRITE = [(RpcCode.WRITE_BLOCK, OPEN), (RpcCode.WRITE_BLOCK, COMPLETE)]
PUT: list[Key] = [(RpcCode.ADD_BLOCK, RPC), *WRITE, (RpcCode.COMPLETE_FILE, RPC)]
READ: list[Key] = [(RpcCode.GET_BLOCK_LOCATIONS, RPC), (RpcCode.READ_BLOCK, OPEN)]

Case = tuple[str, Callable[[CurvineFileSystem], Awaitable[Any]], Sequence[Key], dict[RpcCode, Handler]]


def unary(name: str, code: RpcCode, act: Callable[[CurvineFileSystem], Awaitable[Any]], **extra: Handler) -> Case:
    return name, act, [(code, RPC)], {RpcCode[key.upper()]: value for key, value in extra.items()}


CASES: list[Case] = [
    ("cli_remote_put_300k", lambda fs: put(fs, "/g/r300k", 307_200), PUT, created_by_open("cli_remote_put_300k")),
    ("cli_remote_put_9m", lambda fs: put(fs, "/g/r9m", 9 * MiB), PUT, created_by_open("cli_remote_put_9m")),
    ("cli_remote_get_300k", lambda fs: get(fs, "/g/r300k"), READ, {}),
    ("fuse_true_write_in_hole", write_in_hole, [(RpcCode.ASSIGN_WORKER, RPC)], {}),
    ("fuse_true_append", append, WRITE, {}),
    (
        "fuse_false_truncate_shrink",
        lambda fs: fs.truncate("/f_false/big", 5_242_890),
        [(RpcCode.RESIZE_FILE, RPC), *WRITE],
        {},
    ),
    (
        "fuse_false_truncate_extend",
        lambda fs: fs.truncate("/f_false/big", 20 * MiB),
        [(RpcCode.RESIZE_FILE, RPC), *WRITE],
        {},
    ),
    unary("cli_mkdir", RpcCode.MKDIR, lambda fs: fs.mkdir("/g", owner="root", group="root")),
    unary(
        "cli_mkdir_parents", RpcCode.MKDIR, lambda fs: fs.mkdir("/g/a/b/c", parents=True, owner="root", group="root")
    ),
    unary("cli_mv", RpcCode.RENAME, lambda fs: fs.rename("/g/300k", "/g/moved"), file_status=nothing_at("/g/moved")),
    unary("cli_rm", RpcCode.DELETE, lambda fs: fs.delete("/g/moved")),
    unary("cli_rm_r", RpcCode.DELETE, lambda fs: fs.delete("/g/a", recursive=True)),
    unary("fuse_false_symlink", RpcCode.SYMLINK, lambda fs: fs.symlink("s", "/f_false/sl", owner="root", group="root")),
    unary("fuse_false_link", RpcCode.LINK, lambda fs: fs.link("/f_false/s", "/f_false/l")),
    unary("fuse_false_chmod", RpcCode.SET_ATTR, lambda fs: fs.set_attr("/f_false/s", mode=0o600)),
    unary(
        "fuse_false_chown",
        RpcCode.SET_ATTR,
        lambda fs: fs.set_attr("/f_false/s", owner="daemon", group="daemon", mode=0o600),
    ),
    unary(
        "fuse_false_utime",
        RpcCode.SET_ATTR,
        lambda fs: fs.set_attr("/f_false/s", atime_ms=10**12, mtime_ms=11 * 10**11),
    ),
    unary("fuse_false_setxattr", RpcCode.SET_ATTR, lambda fs: fs.set_attr("/f_false/s", xattrs={"user.k": b"v1"})),
    unary("fuse_false_rmxattr", RpcCode.SET_ATTR, lambda fs: fs.set_attr("/f_false/s", remove_xattrs=["user.k"])),
    unary("fuse_false_readdir", RpcCode.LIST_OPTIONS, lambda fs: fs.list("/f_false")),
    unary("raw_list_quoted", RpcCode.LIST_STATUS, lambda fs: fs.list("/raw/l/*x")),
]


@pytest.mark.parametrize("case", CASES, ids=[case[0] for case in CASES])
async def test_our_requests_say_what_the_real_ones_say(case: Case) -> None:
    name, act, keys, extra = case
    scenario = scenarios("head")[name]
    theirs = [
        (key_of(frame), plain(message_of(frame)))
        for frame in scenario.frames
        if frame.from_client and key_of(frame) in keys
    ]
    assert theirs
    sent = await sent_by_us(scenario, act, extra, "elsewhere")
    ours = [(key, plain(message)) for key, message in sent if key in keys]
    for _, message in [*theirs, *ours]:
        message.pop("short_circuit", None)
    if name == "fuse_false_truncate_extend":
        # Their file had a cut that the worker was told and the master was not: we apply it before anything else.
        assert [key for key, _ in ours[:2]] == WRITE
        del ours[:2]
    assert ours == theirs


async def test_exchange_of_two_names() -> None:
    def different(request: Any, message: Any) -> Any:
        found = stat_anything(request, message)
        found.status.id = 2000 if message.path.endswith("big") else 2001
        return found

    scenario = scenarios("head")["fuse_false_rename_exchange"]
    act = lambda fs: fs.rename("/f_false/s", "/f_false/big", exchange=True)  # noqa: E731
    (theirs,) = [message_of(f) for f in scenario.frames if f.from_client and key_of(f)[0] is RpcCode.RENAME]
    sent = await sent_by_us(scenario, act, {RpcCode.FILE_STATUS: different}, "elsewhere")
    (ours,) = [message for key, message in sent if key[0] is RpcCode.RENAME]
    assert encode(ours) == encode(theirs)


@pytest.mark.parametrize(("name", "flock"), [("fuse_false_flock", True), ("fuse_false_fcntl_lock", False)])
async def test_locks(name: str, flock: bool) -> None:
    scenario = scenarios("head")[name]
    theirs = [message_of(f) for f in scenario.frames if f.from_client and key_of(f)[0] is RpcCode.SET_LOCK]

    async def act(fs: CurvineFileSystem) -> None:
        for message in theirs:
            lock = message.lock
            await fs.set_lock(
                message.path,
                FileLock(
                    LockKind(lock.lock_type), lock.owner_id, pid=lock.pid, start=lock.start, end=lock.end, flock=flock
                ),
            )

    ours = [m for key, m in await sent_by_us(scenario, act, {}, "elsewhere") if key[0] is RpcCode.SET_LOCK]
    assert [plain(message) for message in ours] == [plain(message) for message in theirs]
