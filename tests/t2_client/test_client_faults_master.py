"""Masters that die, hang, lie or lose the lead: right outcomes, within the deadline (specification 4.2 and 5.1)."""

from __future__ import annotations

import time
from contextlib import AsyncExitStack
from typing import Any

import pytest
import trio

from curvfs.api import CurvineFileSystem, Located, open_filesystem
from curvfs.errors import (
    ConnectFailed,
    ConnectionLost,
    CurvfsError,
    DeadlineExceeded,
    InProgress,
    NotFound,
    NotLeader,
    OutOfSpace,
    RemoteProtocolError,
    TransportError,
)
from curvfs.wire.codes import RequestStatus, ResponseStatus, RpcCode
from curvfs.wire.frame import HEARTBEAT, Frame
from curvfs.wire.messages import pb
from tests.t2_client.fakes import Close, Fake, Handler, Hang, Raw, Refuse, always, located, once, status

NOT_LEADER, NOT_FOUND, EXISTS, IN_PROGRESS, COMMON = 2, 8, 7, 18, 10000

FOUND = pb.GetFileStatusResponse(status=status(length=5))


async def connect(stack: AsyncExitStack, *masters: Fake, **settings: Any) -> CurvineFileSystem:
    """A client of running fakes, with short deadlines."""
    for master in masters:
        await stack.enter_async_context(master.serving())
    url = "curvine://" + ",".join(master.address for master in masters)
    chosen = {"retry_max_s": 3.0, "rpc_timeout_s": 0.3, "retry_min_sleep_s": 0.01, "client_hostname": "here"}
    return await stack.enter_async_context(open_filesystem(url, **(chosen | settings)))


@pytest.mark.parametrize(
    "answer",
    [
        Close(),
        Close(b"\0\0\0"),
        Close(Frame.make(7, RequestStatus.RPC, ResponseStatus.SUCCESS, 1, -1, b"x" * 50).encode()[:40]),
        Raw(Frame.make(7, RequestStatus.RPC, ResponseStatus.SUCCESS, 4711, -1, b"").encode()),
        Raw(b"HTTP/1.1 400 Bad Request\r\n\r\n"),
        Raw(b"\xff" * 22),
        Hang(),
        Refuse(NOT_LEADER),
    ],
    ids=["closes", "in-head", "in-header", "other-req-id", "http", "empty-message", "hangs", "not-leader"],
)
async def test_one_bad_answer_is_repeated_with_the_same_id(answer: Exception) -> None:
    master = Fake({RpcCode.FILE_STATUS: once(answer, then=FOUND)})
    async with AsyncExitStack() as stack:
        fs = await connect(stack, master)
        assert (await fs.stat("/f")).length_bytes == 5
        ids = {request.req_id for request in master.requests(RpcCode.FILE_STATUS)}
        assert len(ids) == 1
        assert fs.stats()["master_retries"] == 1


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        (Close(), ConnectionLost),
        (Hang(), DeadlineExceeded),
        (Refuse(NOT_LEADER), NotLeader),
        (Raw(b"HTTP/1.1 400 Bad Request\r\n\r\n"), RemoteProtocolError),
    ],
)
async def test_a_bad_master_for_good_is_a_typed_error_in_time(answer: Exception, expected: type[CurvfsError]) -> None:
    async with AsyncExitStack() as stack:
        fs = await connect(stack, Fake({RpcCode.FILE_STATUS: always(answer)}), retry_max_s=1.0)
        started = time.monotonic()
        with pytest.raises(expected, match=r"Cannot stat /f: .*127\.0\.0\.1") as caught:
            await fs.stat("/f")
        assert time.monotonic() - started < 1.6
        assert "\n" not in str(caught.value)


async def test_a_server_that_is_no_master_is_told_at_once() -> None:
    fake = Fake({RpcCode.GET_FILESYSTEM_INFO: always(Raw(b"SSH-2.0-OpenSSH_9.6 and some more bytes\r\n"))})
    async with fake.serving():
        started = time.monotonic()
        with pytest.raises(RemoteProtocolError, match="does not speak Curvine's protocol"):
            async with open_filesystem(fake.url):
                pass
        assert time.monotonic() - started < 1


async def test_a_connection_closed_while_idle_is_no_error() -> None:
    master = Fake({RpcCode.FILE_STATUS: always(FOUND)}, replies_per_connection=1)
    async with AsyncExitStack() as stack:
        fs = await connect(stack, master)  # its calls follow each other too fast for this
        before, connections = fs.stats().get("master_retries", 0), master.connections
        for _ in range(5):
            await trio.sleep(0.05)
            await fs.stat("/f")
        assert fs.stats().get("master_retries", 0) == before
        assert master.connections == connections + 5


async def test_a_late_answer_among_others_that_come_in_time() -> None:
    """The same id cannot be sent twice on one connection: the call goes on on another one."""
    master = Fake({RpcCode.DELETE: once(Hang(), then=None), RpcCode.FILE_STATUS: always(FOUND)})
    async with AsyncExitStack() as stack:
        fs = await connect(stack, master)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(fs.delete, "/f")
            await trio.sleep(0.1)
            connection = fs._session.masters._endpoints[0]._connections[0]
            for _ in range(30):  # something else is answered on that connection all the while
                connection.last_received_s = connection._clock.monotonic_s()
                await trio.sleep(0.01)
        assert len({request.req_id for request in master.requests(RpcCode.DELETE)}) == 1
        assert len(master.requests(RpcCode.DELETE)) == 2


async def test_heartbeats_are_dropped() -> None:
    master = Fake({RpcCode.FILE_STATUS: always(FOUND)})
    original = master._answer

    async def with_heartbeats(session: Any, request: Any) -> tuple[bytes, bytes]:
        prefix, payload = await original(session, request)
        return HEARTBEAT + prefix, payload + HEARTBEAT

    master._answer = with_heartbeats  # type: ignore[method-assign]
    async with AsyncExitStack() as stack:
        fs = await connect(stack, master)
        for _ in range(3):
            await fs.stat("/f")
        assert "master_retries" not in fs.stats()


async def test_calls_are_pipelined_on_one_connection() -> None:
    """All requests are there before the first is answered."""
    arrived = trio.Event()
    master = Fake()

    async def answer(request: Any, message: Any) -> pb.GetBlockLocationsResponse:
        if len(master.requests(RpcCode.GET_BLOCK_LOCATIONS)) == 1:
            with trio.fail_after(5):
                await arrived.wait()
        return located(5)

    master.handle[RpcCode.GET_BLOCK_LOCATIONS] = answer
    async with AsyncExitStack() as stack:
        fs = await connect(stack, master, rpc_timeout_s=10.0, master_connections=1)

        async def release() -> None:
            await trio.sleep(0.3)
            arrived.set()

        async with trio.open_nursery() as nursery:
            nursery.start_soon(release)
            found = await fs.locate_many(["/f"] * 512)
        assert all(isinstance(entry, Located) for entry in found)
        assert master.connections == 1
        assert fs.stats()["master_calls"] == 514


async def test_a_lost_connection_fails_all_its_calls_and_all_are_repeated() -> None:
    answers: list[Any] = [Close(), *[located(5)] * 600]
    master = Fake({RpcCode.GET_BLOCK_LOCATIONS: once(*answers)})
    async with AsyncExitStack() as stack:
        fs = await connect(stack, master)
        found = await fs.locate_many(["/f"] * 200)
        assert all(isinstance(entry, Located) for entry in found)


# ------------------------------------------------------------------------------------------------------------ replays


async def test_a_replayed_delete_that_finds_nothing_did_its_work() -> None:
    master = Fake({RpcCode.DELETE: once(Close(), then=Refuse(NOT_FOUND))})
    async with AsyncExitStack() as stack:
        fs = await connect(stack, master)
        await fs.delete("/f")
        first, second = master.requests(RpcCode.DELETE)
        assert first.req_id == second.req_id
        with pytest.raises(NotFound):  # not a replay
            await fs.delete("/f")


@pytest.mark.parametrize("there", [1001, 1002])
async def test_a_replayed_rename_is_judged_by_the_destination(there: int) -> None:
    moved = False

    def stat(request: Any, message: Any) -> pb.GetFileStatusResponse:
        if message.path == "/":
            return pb.GetFileStatusResponse(status=status("/", directory=True, inode_id=1000))
        if message.path == "/b" and moved:
            return pb.GetFileStatusResponse(status=status("/b", inode_id=there))
        if message.path == "/a" and not moved:
            return pb.GetFileStatusResponse(status=status("/a"))
        raise Refuse(NOT_FOUND)

    def rename(request: Any, message: Any) -> None:
        nonlocal moved
        if moved:
            raise Refuse(NOT_FOUND)
        moved = True
        raise Close()

    master = Fake({RpcCode.FILE_STATUS: stat, RpcCode.RENAME: rename})
    async with AsyncExitStack() as stack:
        fs = await connect(stack, master)
        if there == 1001:
            await fs.rename("/a", "/b")
        else:
            with pytest.raises(NotFound):
                await fs.rename("/a", "/b")
        assert len(master.requests(RpcCode.RENAME)) == 2


@pytest.mark.parametrize(
    ("code", "answer", "call"),
    [
        (RpcCode.SET_ATTR, pb.SetAttrResponse(status=status()), "set_attr"),
        (RpcCode.SYMLINK, pb.SymlinkResponse(), "symlink"),
        (RpcCode.LINK, pb.LinkResponse(), "link"),
    ],
)
async def test_calls_that_poison_their_id_get_a_new_one(code: RpcCode, answer: Any, call: str) -> None:
    """A master answers a repeated id with InProgress for 10 minutes, whatever became of the first (4.2)."""
    poisoned: set[int] = set()

    def change(request: Any, message: Any) -> Any:
        if request.req_id in poisoned:
            raise Refuse(IN_PROGRESS)
        poisoned.add(request.req_id)
        if len(poisoned) == 1:
            raise Close()
        return answer

    def stat(request: Any, message: Any) -> pb.GetFileStatusResponse:
        return pb.GetFileStatusResponse(status=status(message.path, directory=message.path == "/"))

    master = Fake({code: change, RpcCode.FILE_STATUS: stat})
    async with AsyncExitStack() as stack:
        fs = await connect(stack, master)
        calls: dict[str, Any] = {
            "set_attr": lambda: fs.set_attr("/f", mode=0o600),
            "symlink": lambda: fs.symlink("target", "/f"),
            "link": lambda: fs.link("/f", "/g"),
        }
        await calls[call]()
        assert len(poisoned) == 2
        with pytest.raises(InProgress):  # no replay of ours: told as it is
            master.handle[code] = always(Refuse(IN_PROGRESS))
            await calls[call]()


async def test_a_first_attempt_that_still_runs_is_waited_for() -> None:
    answer = pb.CreateFileResponse(file_status=status())
    master = Fake({RpcCode.CREATE_FILE: once(Hang(), Refuse(IN_PROGRESS), Refuse(IN_PROGRESS), then=answer)})
    master.handle[RpcCode.COMPLETE_FILE] = always(pb.CompleteFileResponse(result=True))
    async with AsyncExitStack() as stack:
        fs = await connect(stack, master)
        await (await fs.create("/f")).close()
        assert len({request.req_id for request in master.requests(RpcCode.CREATE_FILE)}) == 1
        assert len(master.requests(RpcCode.CREATE_FILE)) == 4


async def test_a_replayed_mkdir_that_finds_its_directory_made_it() -> None:
    master = Fake({RpcCode.MKDIR: once(Close(), then=Refuse(EXISTS))})
    master.handle[RpcCode.FILE_STATUS] = always(pb.GetFileStatusResponse(status=status("/d", directory=True)))
    async with AsyncExitStack() as stack:
        fs = await connect(stack, master)
        assert (await fs.mkdir("/d")).is_dir
        with pytest.raises(CurvfsError):
            await fs.mkdir("/d")


# ---------------------------------------------------------------------------------------------------- several masters


def follower() -> dict[RpcCode, Handler]:
    return dict.fromkeys(RpcCode, always(Refuse(NOT_LEADER, "Not a leader master, code=FileStatus, client_ip=::1")))


async def test_the_leader_is_found_and_remembered() -> None:
    masters = [Fake(follower()), Fake({RpcCode.FILE_STATUS: always(FOUND)}), Fake(follower())]
    async with AsyncExitStack() as stack:
        fs = await connect(stack, *masters)
        for _ in range(10):
            await fs.stat("/f")
        assert [len(master.requests(RpcCode.FILE_STATUS)) for master in masters] == [0, 10, 0]


async def test_the_lead_changes() -> None:
    first, second = Fake({RpcCode.FILE_STATUS: always(FOUND)}), Fake(follower())
    async with AsyncExitStack() as stack:
        fs = await connect(stack, first, second)
        await fs.stat("/f")
        first.handle = follower()
        second.handle = {RpcCode.FILE_STATUS: always(FOUND), RpcCode.DELETE: once(OutOfSpaceLater(), then=None)}
        started = time.monotonic()
        await fs.stat("/f")
        assert time.monotonic() - started < 1
        # A new leader knows no workers for some seconds: such answers are waited out.
        await fs.delete("/f")
        assert len(second.requests(RpcCode.DELETE)) == 2


class OutOfSpaceLater(Refuse):
    def __init__(self) -> None:
        super().__init__(COMMON, "No available worker found")


async def test_no_available_worker_is_final_when_the_lead_is_settled() -> None:
    async with AsyncExitStack() as stack:
        fs = await connect(stack, Fake({RpcCode.DELETE: always(OutOfSpaceLater())}))
        with pytest.raises(OutOfSpace):
            await fs.delete("/f")


async def test_nobody_leads_for_a_while() -> None:
    first, second = Fake(follower()), Fake(follower())

    async with AsyncExitStack() as stack:
        await stack.enter_async_context(first.serving())
        await stack.enter_async_context(second.serving())
        async with trio.open_nursery() as nursery:

            async def elect() -> None:
                await trio.sleep(0.5)
                second.handle = {RpcCode.FILE_STATUS: always(FOUND)}

            nursery.start_soon(elect)
            async with open_filesystem(f"curvine://{first.address},{second.address}/") as fs:
                assert (await fs.stat("/f")).length_bytes == 5


async def test_a_dead_master_among_three_costs_little() -> None:
    masters = [Fake({RpcCode.FILE_STATUS: always(FOUND)}), Fake(follower())]
    async with AsyncExitStack() as stack:
        for master in masters:
            await stack.enter_async_context(master.serving())
        url = f"curvine://127.0.0.1:1,{masters[0].address},{masters[1].address}/"
        fs = await stack.enter_async_context(open_filesystem(url))
        started = time.monotonic()
        await fs.stat("/f")
        assert time.monotonic() - started < 0.5


async def test_a_follower_that_hangs_does_not_make_an_error_reply_look_like_a_replay() -> None:
    """The leader said NotFound to the first attempt; that the other master was still silent means nothing."""
    masters = [Fake({RpcCode.DELETE: always(Refuse(NOT_FOUND))}), Fake(dict.fromkeys(RpcCode, always(Hang())))]
    async with AsyncExitStack() as stack:
        fs = await connect(stack, *masters)
        fs._session.masters._leader = None
        with pytest.raises(NotFound):
            await fs.delete("/f")


async def test_no_master_at_all() -> None:
    with pytest.raises(ConnectFailed, match="is the server running"):
        async with open_filesystem("curvine://127.0.0.1:1,127.0.0.1:2/"):
            pass


async def test_a_master_that_accepts_and_never_answers() -> None:
    async with Fake(dict.fromkeys(RpcCode, always(Hang()))).serving() as fake:
        started = time.monotonic()
        with pytest.raises(TransportError):
            async with open_filesystem(fake.url, connect_timeout_s=0.5, rpc_timeout_s=0.2):
                pass
        assert time.monotonic() - started < 1.5


async def test_a_call_that_had_little_time_takes_no_other_along() -> None:
    """A connection is given up when its master has been silent for a while, not when one call's time was short."""
    gave_up = trio.Event()

    async def answer(*_: Any) -> Any:
        await gave_up.wait()
        return FOUND

    master = Fake({RpcCode.FILE_STATUS: answer})
    async with AsyncExitStack() as stack:
        fs = await connect(stack, master, rpc_timeout_s=30.0, retry_max_s=0.7)
        connections = master.connections

        async def slow() -> None:
            with pytest.raises(DeadlineExceeded):
                await fs.stat("/slow")
            gave_up.set()

        async with trio.open_nursery() as nursery:
            nursery.start_soon(slow)
            await trio.sleep(0.3)
            assert (await fs.stat("/f")).length_bytes == 5
        assert master.connections == connections
