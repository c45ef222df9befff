"""What the real and the simulated network, clock and threads must both do."""

from __future__ import annotations

import array
import os
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import pytest
import trio

from curvfs.errors import ConnectFailed, ConnectionLost, CurvfsError, EnvironmentError_
from curvfs.world import Stream
from tests.t0_units.conftest import Play
from tests.t0_units.worlds import Stage

_HOST = "127.0.0.1"


@asynccontextmanager
async def pair(stage: Stage, host: str = _HOST) -> AsyncIterator[tuple[Stream, Stream]]:
    """The two ends of a connection."""
    listener = await stage.world.net.listen(host, 0)
    ours = await stage.world.net.connect(host, listener.port)
    theirs = await listener.accept()
    await listener.aclose()
    try:
        yield ours, theirs
    finally:
        await ours.aclose()
        await theirs.aclose()


async def read_all(stream: Stream) -> bytes:
    content, piece = bytearray(), bytearray(1 << 16)
    while count := await stream.recv_into(memoryview(piece)):
        content += piece[:count]
    return bytes(content)


async def lost(function: Callable[..., Awaitable[object]], *args: object) -> str:
    with pytest.raises(ConnectionLost) as caught:
        await function(*args)
    return str(caught.value)


def test_bytes_arrive_in_order_and_end_with_the_stream(play: Play) -> None:
    async def main(stage: Stage) -> None:
        async with pair(stage) as (ours, theirs):
            content = bytes(range(256)) * 8000
            got = []

            async def reader() -> None:
                got.append(await read_all(theirs))

            async with trio.open_nursery() as nursery:
                nursery.start_soon(reader)
                await ours.send(content[:1], b"", memoryview(content)[1:70_000], bytearray(content[70_000:]))
                await ours.aclose()
            assert got == [content]
            assert await theirs.recv_into(memoryview(bytearray(1))) == 0  # and stays at its end

    play(main)


def test_a_send_gathers_more_pieces_than_one_system_call_takes(play: Play) -> None:
    async def main(stage: Stage) -> None:
        async with pair(stage) as (ours, theirs):
            pieces = [index.to_bytes(2, "big") * 20 for index in range(3000)]
            got = bytearray(120_000)
            async with trio.open_nursery() as nursery:
                nursery.start_soon(ours.send, *pieces)
                assert await theirs.recv_exactly(memoryview(got)) == len(got)
            assert got == b"".join(pieces)

    play(main)


def test_buffers_may_have_items_of_any_size(play: Play) -> None:
    async def main(stage: Stage) -> None:
        async with pair(stage) as (ours, theirs):
            numbers, got = array.array("q", range(200_000)), array.array("q", bytes(1_600_000))
            async with trio.open_nursery() as nursery:
                nursery.start_soon(ours.send, memoryview(numbers), memoryview(numbers)[:0])
                assert await theirs.recv_exactly(memoryview(got)) == 1_600_000
            assert got == numbers

    play(main)


def test_recv_exactly_stops_at_the_end_of_the_stream(play: Play) -> None:
    async def main(stage: Stage) -> None:
        async with pair(stage) as (ours, theirs):
            await ours.send(b"abc")
            await ours.aclose()
            got = bytearray(5)
            assert await theirs.recv_exactly(memoryview(got)) == 3
            assert got == b"abc\0\0"

    play(main)


def test_a_sender_waits_for_a_reader_that_does_not_read(play: Play) -> None:
    async def main(stage: Stage) -> None:
        async with pair(stage) as (ours, theirs):
            size_bytes = 64 << 20
            done = False

            async def sender() -> None:
                nonlocal done
                for _ in range(size_bytes >> 20):
                    await ours.send(bytes(1 << 20))
                done = True
                await ours.aclose()

            async with trio.open_nursery() as nursery:
                nursery.start_soon(sender)
                await stage.world.clock.sleep(0.3)
                assert not done
                assert len(await read_all(theirs)) == size_bytes
            assert done

    play(main)


def test_a_cancelled_send_ends_at_once(play: Play) -> None:
    async def main(stage: Stage) -> None:
        async with pair(stage) as (ours, _theirs):
            with trio.move_on_after(0.1) as scope:
                while True:
                    await ours.send(bytes(1 << 20))
            assert scope.cancelled_caught
            with trio.move_on_after(0.1) as scope:
                await ours.recv_into(memoryview(bytearray(1)))
            assert scope.cancelled_caught

    play(main)


def test_both_directions_work_at_once(play: Play) -> None:
    async def main(stage: Stage) -> None:
        async with pair(stage) as (ours, theirs):
            content = [bytes([index]) * 3_000_000 for index in range(2)]
            got = [bytearray(3_000_000) for _ in range(2)]
            async with trio.open_nursery() as nursery:
                nursery.start_soon(ours.send, content[0])
                nursery.start_soon(theirs.send, content[1])
                nursery.start_soon(theirs.recv_exactly, memoryview(got[0]))
                nursery.start_soon(ours.recv_exactly, memoryview(got[1]))
            assert got == content

    play(main)


def test_files_are_sent_whole_or_the_connection_is_lost(play: Play) -> None:
    async def main(stage: Stage) -> None:
        content = os.urandom(1 << 20) if stage.root != "/data" else bytes(range(256)) * 4096
        fd = stage.world.disk.open(stage.file("f", content), os.O_RDONLY)
        async with pair(stage) as (ours, theirs):
            got = bytearray(600_000)
            async with trio.open_nursery() as nursery:
                nursery.start_soon(ours.send_file, fd, 100_001, 600_000)
                assert await theirs.recv_exactly(memoryview(got)) == len(got)
            assert got == content[100_001:700_001]
            await ours.send_file(fd, 0, 0)
            assert "3 bytes early" in await lost(ours.send_file, fd, len(content) - 1, 4)
        stage.world.disk.close(fd)

    play(main)


def test_a_prefix_goes_before_the_bytes_of_a_file(play: Play) -> None:
    async def main(stage: Stage) -> None:
        content, prefix = bytes(range(256)) * 40_000, b"head" * 100
        fd = stage.world.disk.open(stage.file("f", content), os.O_RDONLY)
        # Between two addresses the kernel sends the file; within one it is copied.
        for host in (_HOST,) if stage.root == "/data" else (_HOST, "127.0.0.2"):
            async with pair(stage, host) as (ours, theirs):
                for offset, count in ((3, len(content) - 3), (5, 1), (0, 0)):
                    got = bytearray(len(prefix) + count)
                    async with trio.open_nursery() as nursery:
                        nursery.start_soon(ours.send_file, fd, offset, count, prefix)
                        assert await theirs.recv_exactly(memoryview(got)) == len(got)
                    assert got == prefix + content[offset : offset + count]
                assert "early" in await lost(ours.send_file, fd, len(content), 1, prefix)
        stage.world.disk.close(fd)

    play(main)


def test_nobody_listening_is_connect_failed(play: Play) -> None:
    async def main(stage: Stage) -> None:
        net = stage.world.net
        listener = await net.listen(_HOST, 0)
        assert listener.port > 0
        await listener.aclose()
        for host, port, words in (
            (_HOST, listener.port, "refused"),
            ("no-such-host.invalid", 80, "resolved"),
            ("a" * 100, 80, "resolved"),
            ("a..b", 80, "resolved"),
            (_HOST, 0, "port"),
            (_HOST, 70_000, "port"),
        ):
            with pytest.raises(ConnectFailed, match=words) as caught:
                await net.connect(host, port)
            assert host in str(caught.value)

    play(main)


def test_an_address_that_cannot_be_had_is_an_environment_error(play: Play) -> None:
    async def main(stage: Stage) -> None:
        net = stage.world.net
        listener = await net.listen(_HOST, 0)
        for host, port, number in (
            (_HOST, listener.port, "EADDRINUSE"),
            ("192.0.2.1", 0, "EADDRNOTAVAIL"),
            ("a..b", 0, "EADDRNOTAVAIL"),
            (_HOST, 70_000, "EINVAL"),
        ):
            with pytest.raises(EnvironmentError_, match="Cannot listen") as caught:
                await net.listen(host, port)
            assert caught.value.errno_name == number
        await listener.aclose()
        again = await net.listen(_HOST, listener.port)
        assert again.port == listener.port
        await again.aclose()

    play(main)


def test_a_peer_that_leaves_with_bytes_unread_resets(play: Play) -> None:
    async def main(stage: Stage) -> None:
        async with pair(stage) as (ours, theirs):
            await ours.send(b"never read")
            await stage.world.clock.sleep(0.05)
            await theirs.aclose()
            await stage.world.clock.sleep(0.05)
            await lost(ours.recv_into, memoryview(bytearray(1)))

            async def send_on() -> None:
                while True:
                    await ours.send(b"more")
                    await stage.world.clock.sleep(0.01)

            await lost(send_on)

    play(main)


def test_what_arrived_before_the_end_can_still_be_read(play: Play) -> None:
    async def main(stage: Stage) -> None:
        async with pair(stage) as (ours, theirs):
            await theirs.send(b"last words")
            await theirs.aclose()
            await stage.world.clock.sleep(0.05)
            assert await read_all(ours) == b"last words"

    play(main)


def test_a_closed_stream_is_lost_for_calls_before_and_after(play: Play) -> None:
    async def main(stage: Stage) -> None:
        fd = stage.world.disk.open(stage.file("f", bytes(1 << 20)), os.O_RDONLY)
        async with pair(stage) as (ours, _theirs):
            async with trio.open_nursery() as nursery:

                async def reader() -> None:
                    assert "this side" in await lost(ours.recv_into, memoryview(bytearray(1)))

                async def sender() -> None:
                    assert "this side" in await lost(ours.send, bytes(64 << 20))

                nursery.start_soon(reader)
                nursery.start_soon(sender)
                await stage.world.clock.sleep(0.1)
                await ours.aclose()
            assert "this side" in await lost(ours.recv_into, memoryview(bytearray(1)))
            assert "this side" in await lost(ours.send, b"x")
            assert "this side" in await lost(ours.send_file, fd, 0, 10)
            await ours.aclose()
        stage.world.disk.close(fd)

    play(main)


def test_a_file_sender_notices_that_its_stream_was_closed(play: Play) -> None:
    async def main(stage: Stage) -> None:
        fd = stage.world.disk.open(stage.file("f", bytes(16 << 20)), os.O_RDONLY)
        async with pair(stage) as (ours, _theirs), trio.open_nursery() as nursery:

            async def sender() -> None:
                assert "this side" in await lost(ours.send_file, fd, 0, 16 << 20)

            nursery.start_soon(sender)
            await stage.world.clock.sleep(0.1)
            await ours.aclose()
        stage.world.disk.close(fd)

    play(main)


def test_a_closed_listener_is_lost_for_who_accepts(play: Play) -> None:
    async def main(stage: Stage) -> None:
        listener = await stage.world.net.listen(_HOST, 0)
        async with trio.open_nursery() as nursery:

            async def accepter() -> None:
                assert "closed" in await lost(listener.accept)

            nursery.start_soon(accepter)
            await stage.world.clock.sleep(0.05)
            await listener.aclose()
        assert "closed" in await lost(listener.accept)

    play(main)


def test_connections_wait_in_the_backlog(play: Play) -> None:
    async def main(stage: Stage) -> None:
        net = stage.world.net
        listener = await net.listen(_HOST, 0)
        ours = [await net.connect(_HOST, listener.port) for _ in range(20)]
        for index, stream in enumerate(ours):
            await stream.send(bytes([index]))
        seen = []
        for _ in ours:
            theirs = await listener.accept()
            piece = bytearray(1)
            await theirs.recv_exactly(memoryview(piece))
            seen.append(piece[0])
            await theirs.aclose()
        assert sorted(seen) == list(range(20))
        for stream in ours:
            await stream.aclose()
        await listener.aclose()

    play(main)


def test_peers_and_hosts_have_names(play: Play) -> None:
    async def main(stage: Stage) -> None:
        assert stage.world.net.hostname()
        listener = await stage.world.net.listen(_HOST, 0)
        ours = await stage.world.net.connect(_HOST, listener.port)
        theirs = await listener.accept()
        assert listener.host == _HOST
        assert ours.peer == f"{_HOST}:{listener.port}"
        assert theirs.peer.rpartition(":")[2].isdigit()
        for closing in (ours, theirs, listener):
            await closing.aclose()

    play(main)


# ------------------------------------------------------------------------------------------- clock, random, threads


def test_time_passes_for_tasks_and_for_threads(play: Play) -> None:
    async def main(stage: Stage) -> None:
        clock = stage.world.clock
        start_s, start_ms = clock.monotonic_s(), clock.time_ms()
        assert start_ms > 1_700_000_000_000
        await clock.sleep(0.05)
        assert clock.monotonic_s() - start_s >= 0.05
        within_s = await stage.world.threads.run(_block_for, stage)
        assert within_s >= 0.05
        assert clock.monotonic_s() - start_s >= 0.1
        assert clock.time_ms() - start_ms >= 99

    play(main)


def _block_for(stage: Stage) -> float:
    start_s = stage.world.clock.monotonic_s()
    stage.world.clock.block(0.05)
    return stage.world.clock.monotonic_s() - start_s


def test_random_numbers_take_the_shapes_we_need(play: Play) -> None:
    async def main(stage: Stage) -> None:
        random = stage.world.random
        names = {random.uuid() for _ in range(100)}
        assert len(names) == 100
        assert all(len(name) == 36 and name[14] == "4" for name in names)
        assert all(0 < random.request_id() <= 1 << 62 for _ in range(100))

    play(main)


def test_worker_threads_return_and_raise(play: Play) -> None:
    async def main(stage: Stage) -> None:
        threads = stage.world.threads
        assert await threads.run(divmod, 7, 2) == (3, 1)
        with pytest.raises(ZeroDivisionError):
            await threads.run(divmod, 1, 0)
        with trio.move_on_after(0.02) as scope:  # cannot be abandoned: runs to its end, result and all
            assert await threads.run(_block_for, stage) >= 0.05
        assert not scope.cancelled_caught
        with trio.move_on_after(0.02) as scope:
            await threads.run(_block_for, stage, abandon_on_cancel=True)
        assert scope.cancelled_caught
        with trio.CancelScope() as scope:
            scope.cancel()
            await threads.run(divmod, 1, 0)
        assert scope.cancelled_caught

    play(main)


def test_pools_run_every_job_and_then_refuse(play: Play) -> None:
    async def main(stage: Stage) -> None:
        threads = stage.world.threads
        pool, done = threads.pool(3, name="workers"), []
        for index in range(50):
            pool.submit(lambda index=index: done.append(index))  # type: ignore[misc]
        assert pool.close(timeout_s=10)
        assert sorted(done) == list(range(50))
        with pytest.raises(CurvfsError):
            pool.submit(lambda: None)
        assert pool.close()

    play(main)


def test_started_threads_can_be_joined_and_meet_at_primitives(play: Play) -> None:
    async def main(stage: Stage) -> None:
        threads, event = stage.world.threads, stage.world.threads.event()
        handle = threads.start(event.set, name="setter")
        handle.join(10)
        assert event.is_set()
        assert not handle.is_alive()
        with threads.lock(), threads.condition() as condition:
            assert condition

    play(main)
