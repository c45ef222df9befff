"""The simulated world: one seed is one run; kills, partitions, clocks, faults and their counters."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
import trio

from curvfs.errors import ConnectFailed, ConnectionLost, CurvfsError
from curvfs.simcore import Livelock, ProcessKilled
from curvfs.simworld import SimWorld, run, simulated_world
from curvfs.world import DirectIo, Stream, World
from tests.t0_units.worlds import aligned

# ---------------------------------------------------------------------------------------------------- a small program


async def echo_server(world: SimWorld, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
    """Echoes what it is sent, and keeps it in a file."""
    listener = await world.net.listen("0.0.0.0", 7000)
    log = world.disk.open("/log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    assert world.disk.lock(log)

    async def serve(stream: Stream) -> None:
        piece = bytearray(4096)
        try:
            while count := await stream.recv_into(memoryview(piece)):
                await world.threads.run(world.disk.pwrite_full, log, memoryview(piece)[:count], 0)
                await stream.send(memoryview(piece)[:count])
        except ConnectionLost:
            pass
        await stream.aclose()

    async with trio.open_nursery() as nursery:
        task_status.started()
        while True:
            nursery.start_soon(serve, await listener.accept())


async def start_echo(nursery: trio.Nursery, world: SimWorld) -> SimWorld:
    server = world.host("server")
    nursery.start_soon(server.run, echo_server, server)
    await world.clock.sleep(0.01)
    return server


async def busy_run(world: SimWorld) -> tuple[str, int, float, Counter[str]]:
    """Several clients under faults; returns what identifies the run."""
    async with trio.open_nursery() as nursery:
        await start_echo(nursery, world)
        world.faults.reset = 0.02
        world.faults.stall = 0.1
        world.faults.slow_disk = 0.2

        async def client(index: int) -> None:
            for turn in range(10):
                try:
                    stream = await world.net.connect("server", 7000)
                    message = world.random.randbytes(3000)
                    await stream.send(message)
                    answer = bytearray(3000)
                    assert await stream.recv_exactly(memoryview(answer)) == 3000
                    assert answer == message
                    await stream.aclose()
                except ConnectionLost:
                    await world.clock.sleep(0.01 * (index + turn))

        async with trio.open_nursery() as clients:
            for index in range(5):
                clients.start_soon(client, index)
        nursery.cancel_scope.cancel()
    return world.trace.digest, world.trace.count, world.clock.monotonic_s(), world.faults.fired


# --------------------------------------------------------------------------------------------------------- determinism


def test_a_seed_is_a_run() -> None:
    assert run(busy_run, seed=7) == run(busy_run, seed=7)


def test_different_seeds_are_different_runs() -> None:
    assert len({run(busy_run, seed=seed)[0] for seed in range(8)}) == 8


def test_a_seed_is_the_same_run_in_another_process() -> None:
    program = (
        "import sys; sys.path.insert(0, sys.argv[1])\n"
        "from tests.t0_units.test_simworld import busy_run, run\n"
        "print(run(busy_run, seed=11)[0])"
    )
    root = str(Path(__file__).parents[2])
    digests = {
        subprocess.run(
            [sys.executable, "-c", program, root],
            env={**os.environ, "PYTHONHASHSEED": hash_seed},
            capture_output=True,
            text=True,
            check=True,
        ).stdout.strip()
        for hash_seed in ("0", "1")
    }
    assert digests == {run(busy_run, seed=11)[0]}


def test_a_simulated_world_is_a_world() -> None:
    world = World.simulated(3)
    assert isinstance(world, SimWorld)
    assert world.seed == 3
    world.disk.mkdir("/a")  # blocking calls need no run around them
    assert world.disk.listdir("/") == ["a"]
    assert world.random.random() == World.simulated(3).random.random() != World.simulated(4).random.random()


def test_each_process_draws_its_own_numbers() -> None:
    one, other = simulated_world(1), simulated_world(1)
    other.host("server").random.random()
    assert one.random.random() == other.random.random() != one.sibling().random.random()


def test_a_failure_tells_its_seed_and_what_happened_last() -> None:
    async def main(world: SimWorld) -> None:
        world.disk.mkdir("/the-last-event")
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError) as caught:
        run(main, seed=4711)
    notes = "\n".join(caught.value.__notes__)
    assert "seed 4711" in notes
    assert "mkdir /the-last-event" in notes


def test_a_run_that_waits_forever_is_an_error() -> None:
    async def main(world: SimWorld) -> None:
        await trio.sleep_forever()

    with pytest.raises(CurvfsError, match="waits forever"):
        run(main, seed=1, limit_s=1000)


def test_a_run_that_is_busy_without_end_is_an_error() -> None:
    async def main(world: SimWorld) -> None:
        while True:
            with pytest.raises(ConnectFailed):
                await world.net.connect("nowhere", 1)

    with pytest.raises(Livelock, match="nowhere"):
        run(main, seed=1)


def test_virtual_time_costs_none() -> None:
    async def main(world: SimWorld) -> float:
        await world.clock.sleep(100_000)
        return world.clock.monotonic_s()

    assert run(main, seed=1, limit_s=1e6) == pytest.approx(100_000)


# ---------------------------------------------------------------------------------------------------------------- time


def test_the_wall_clock_of_a_machine_steps_and_the_monotonic_one_does_not() -> None:
    async def main(world: SimWorld) -> None:
        server = world.host("server")
        before = world.clock.time_ms()
        assert server.clock.time_ms() == before
        await world.clock.sleep(5)
        server.clock.step(-3600)
        assert world.clock.time_ms() == before + 5000
        assert server.clock.time_ms() == before + 5000 - 3_600_000
        assert server.host("server").clock.time_ms() == server.clock.time_ms()
        assert server.clock.monotonic_s() == pytest.approx(5)
        server.disk.write_file("/f", b"")
        assert server.disk.stat("/f").st_mtime_ns // 1_000_000 == server.clock.time_ms()

    run(main, seed=1)


def test_a_slow_disk_delays_its_thread_and_nobody_else() -> None:
    async def main(world: SimWorld) -> None:
        world.faults.slow_disk, world.faults.slow_disk_s = 1.0, 100.0
        ticks = 0

        async def ticker() -> None:
            nonlocal ticks
            while True:
                await world.clock.sleep(0.1)
                ticks += 1

        async with trio.open_nursery() as nursery:
            nursery.start_soon(ticker)
            await world.threads.run(world.disk.mkdir, "/a")
            nursery.cancel_scope.cancel()
        took_s = world.clock.monotonic_s()
        assert 1 < took_s < 101
        assert ticks == pytest.approx(took_s * 10, abs=2)
        other = world.host("server")
        world.disk.mkdir("/b")  # on the event loop: the whole process stands still, and no other one
        assert world.clock.monotonic_s() > took_s
        assert other.clock.monotonic_s() == pytest.approx(took_s)
        assert world.faults.fired["slow_disk"] == 2
        stopped_s = world.clock.monotonic_s()
        with pytest.raises(ConnectFailed):
            await world.net.connect("server", 1)
        assert other.clock.monotonic_s() >= stopped_s

    run(main, seed=3)


def test_an_abandoned_thread_still_does_its_work() -> None:
    async def main(world: SimWorld) -> None:
        world.faults.slow_disk, world.faults.slow_disk_s = 1.0, 100.0
        with trio.move_on_after(0.1) as scope:
            await world.threads.run(world.disk.mkdir, "/a", abandon_on_cancel=True)
        assert scope.cancelled_caught
        assert world.clock.monotonic_s() < 1
        assert world.disk.listdir("/") == ["a"]
        with trio.CancelScope() as scope:
            scope.cancel()
            await world.threads.run(world.disk.mkdir, "/never", abandon_on_cancel=True)
        assert world.disk.listdir("/") == ["a"]

    run(main, seed=2)


# ------------------------------------------------------------------------------------------------------------ processes


def test_a_killed_process_loses_all_but_its_files() -> None:
    async def main(world: SimWorld) -> None:
        async with trio.open_nursery() as nursery:
            server = await start_echo(nursery, world)
            stream = await world.net.connect("server", 7000)
            await stream.send(b"hello")
            answer = bytearray(5)
            await stream.recv_exactly(memoryview(answer))
            assert server.disk.open_paths() == ["/log"]
            assert server.net.open_ports() == [7000]
            server.kill()
            assert not server.alive
            assert server.disk.open_paths() == []
            assert not server.net.open_streams()
            assert not server.net.open_ports()
            with pytest.raises(ConnectFailed):
                await world.net.connect("server", 7000)
            with pytest.raises(ConnectionLost):
                while await stream.recv_into(memoryview(answer)):
                    raise AssertionError("nothing more was sent")
                while True:
                    await stream.send(b"x")
            assert world.net.open_streams() == ["server:7000"]
            await stream.aclose()
            with pytest.raises(ProcessKilled):
                server.disk.read_file("/log")

            second = await start_echo(nursery, world)  # the port and the lock are free again
            assert second.disk.read_file("/log") == b"hello"
            stream = await world.net.connect("server", 7000)
            await stream.send(b"again")
            assert await stream.recv_exactly(memoryview(answer)) == 5
            assert answer == b"again"
            nursery.cancel_scope.cancel()

    for seed in range(5):
        run(main, seed=seed)


def test_a_killed_process_cleans_nothing_up() -> None:
    async def main(world: SimWorld) -> None:
        server = world.host("server")

        async def program() -> None:
            server.disk.write_file("/running", b"")
            try:
                await trio.sleep_forever()
            except Exception:  # a killed process handles no errors either
                server.disk.unlink("/running")
            finally:
                server.disk.unlink("/running")

        async with trio.open_nursery() as nursery:
            nursery.start_soon(server.run, program)
            await world.clock.sleep(1)
            server.kill()
        assert server.sibling().disk.exists("/running")

    run(main, seed=1)


def test_a_process_can_be_killed_between_any_two_calls() -> None:
    async def main(world: SimWorld, call: int) -> tuple[bool, list[str]]:
        server = world.host("server")

        async def program() -> None:
            server.disk.mkdir("/d")
            server.disk.write_file("/d/f", b"content")
            await server.threads.run(server.disk.link, "/d/f", "/d/g")

        server.kill_at(call)
        await server.run(program)
        names = world.host("server").disk.listdir("/d") if call > 1 else []
        return server.alive, sorted(names)

    outcomes = []
    for call in range(1, 100):
        alive, names = run(main, call, seed=1)
        outcomes.append(names)
        if alive:
            break
    assert outcomes[0] == []
    assert outcomes[-1] == ["f", "g"]
    assert ["f.0.tmp"] in outcomes
    assert ["f"] in outcomes
    assert len(outcomes) == 8  # mkdir, open, pwritev, close, rename, thread, link, and none


def test_an_error_in_a_living_process_is_not_hidden() -> None:
    async def main(world: SimWorld) -> None:
        async def program() -> None:
            raise ZeroDivisionError

        with pytest.raises(ZeroDivisionError):
            await world.host("server").run(program)

    run(main, seed=1)


def test_processes_of_a_machine_share_files_and_locks_but_no_descriptors() -> None:
    async def main(world: SimWorld) -> None:
        other = world.sibling()
        world.disk.write_file("/f", b"x")
        mine, theirs = world.disk.open("/f", os.O_RDONLY), other.disk.open("/f", os.O_RDONLY)
        assert world.disk.lock(mine)
        assert not other.disk.lock(theirs)
        world.disk.close(mine)
        assert other.disk.lock(theirs)
        with pytest.raises(OSError, match="Bad file descriptor"):
            world.disk.fstat(mine)
        assert other.net.hostname() == world.net.hostname() == "client"
        assert not world.host("server").disk.exists("/f")

    run(main, seed=1)


# ------------------------------------------------------------------------------------------------------------- network


def test_a_loopback_address_is_not_for_other_machines() -> None:
    async def main(world: SimWorld) -> None:
        server = world.host("server")
        await server.net.listen("127.0.0.1", 80)
        with pytest.raises(ConnectFailed):
            await world.net.connect("server", 80)
        with pytest.raises(ConnectFailed):
            await world.net.connect("localhost", 80)
        await server.sibling().net.connect("localhost", 80)

    run(main, seed=1)


def test_bytes_wait_for_a_partition_to_heal() -> None:
    async def main(world: SimWorld) -> None:
        async with trio.open_nursery() as nursery:
            await start_echo(nursery, world)
            stream = await world.net.connect("server", 7000)
            world.partition("client", "server")
            await stream.send(b"abc")
            answer = bytearray(3)
            with trio.move_on_after(100) as scope:
                await stream.recv_exactly(memoryview(answer))
            assert scope.cancelled_caught
            world.heal("client", "server")
            await stream.recv_exactly(memoryview(answer))
            assert answer == b"abc"
            assert world.faults.fired == {"partition": 1}
            nursery.cancel_scope.cancel()

    run(main, seed=1)


def test_a_connect_waits_for_a_partition_to_heal_and_gives_up_in_the_end() -> None:
    async def main(world: SimWorld) -> None:
        async with trio.open_nursery() as nursery:
            await start_echo(nursery, world)
            world.partition("client", "server")

            async def heal_later() -> None:
                await world.clock.sleep(10)
                world.heal("client", "server")

            nursery.start_soon(heal_later)
            await world.net.connect("server", 7000)
            assert 10 < world.clock.monotonic_s() < 20
            world.partition("client", "server")
            with pytest.raises(ConnectFailed, match="timed out"):
                await world.net.connect("server", 7000)
            assert world.clock.monotonic_s() > 120
            nursery.cancel_scope.cancel()

    run(main, seed=1)


def test_nobody_is_told_of_a_half_open_connection() -> None:
    async def main(world: SimWorld) -> None:
        async with trio.open_nursery() as nursery:
            await start_echo(nursery, world)
            stream = await world.net.connect("server", 7000)
            world.faults.half_open = 1
            with trio.move_on_after(1000) as scope:
                await stream.send(b"abc")
                await stream.recv_into(memoryview(bytearray(1)))
            assert scope.cancelled_caught
            with trio.move_on_after(1000) as scope:
                while True:
                    await stream.send(bytes(100_000))  # until the window is full
            assert scope.cancelled_caught
            assert world.faults.fired["half_open"] >= 1
            nursery.cancel_scope.cancel()

    run(main, seed=1)


def test_a_reset_cuts_a_send_anywhere() -> None:
    async def main(world: SimWorld) -> int:
        server = world.host("server")
        listener = await server.net.listen("0.0.0.0", 1)
        stream = await world.net.connect("server", 1)
        theirs = await listener.accept()
        world.faults.reset = 1
        got = 0
        try:
            await stream.send(bytes(10_000))
        except ConnectionLost:
            pass
        await world.clock.sleep(1)
        with pytest.raises(ConnectionLost):
            while True:
                got += await theirs.recv_into(memoryview(bytearray(1000)))
        with pytest.raises(ConnectionLost):
            await stream.send(b"x")
        with pytest.raises(ConnectionLost):
            await theirs.send(b"x")
        return got

    counts = [run(main, seed=seed) for seed in range(20)]
    assert all(0 <= count < 10_000 for count in counts)
    assert len(set(counts)) > 3


def test_connections_of_a_machine_without_power_are_silent_until_it_is_back() -> None:
    async def main(world: SimWorld) -> None:
        async with trio.open_nursery() as nursery:
            server = await start_echo(nursery, world)
            stream = await world.net.connect("server", 7000)
            server.power_cut()
            await stream.send(b"abc")
            with trio.move_on_after(50) as scope:
                await stream.recv_into(memoryview(bytearray(1)))
            assert scope.cancelled_caught
            with trio.move_on_after(50) as scope:
                await world.net.connect("server", 7000)
            assert scope.cancelled_caught
            await start_echo(nursery, world)
            with pytest.raises(ConnectionLost):
                await stream.recv_into(memoryview(bytearray(1)))
            await world.net.connect("server", 7000)
            nursery.cancel_scope.cancel()

    run(main, seed=1)


def test_refused_connects_are_counted_and_end_with_the_faults() -> None:
    async def main(world: SimWorld) -> None:
        async with trio.open_nursery() as nursery:
            await start_echo(nursery, world)
            world.faults.refuse = 1
            with pytest.raises(ConnectFailed):
                await world.net.connect("server", 7000)
            world.faults.stop()
            await (await world.net.connect("server", 7000)).aclose()
            assert world.faults.fired == {"refuse": 1}
            nursery.cancel_scope.cancel()

    run(main, seed=1)


# ---------------------------------------------------------------------------------------------------------------- disk


def _write(world: SimWorld, path: str, content: bytes, *, sync: bool = False) -> None:
    fd = world.disk.open(path, os.O_WRONLY | os.O_CREAT)
    try:
        world.disk.pwrite_full(fd, content, 0)
        if sync:
            world.disk.fdatasync(fd)
    finally:
        world.disk.close(fd)


@pytest.mark.parametrize(
    ("fault", "number", "struck"),
    [
        ("read_error", errno.EIO, {"read"}),
        ("write_error", errno.EIO, {"write"}),
        ("sync_error", errno.EIO, {"sync"}),
        ("name_error", errno.EIO, {"stat", "mkdir"}),
        ("no_space", errno.ENOSPC, {"write", "mkdir"}),
    ],
)
def test_disk_errors_strike_what_they_are_for_and_are_counted(fault: str, number: int, struck: set[str]) -> None:
    world = simulated_world(5)
    _write(world, "/f", b"content")
    fd = world.disk.open("/f", os.O_RDWR)
    setattr(world.faults, fault, 1.0)
    calls: dict[str, Callable[[], object]] = {
        "read": lambda: world.disk.preadv(fd, [bytearray(1)], 0),
        "write": lambda: world.disk.pwritev(fd, [b"x"], 0),
        "sync": lambda: world.disk.fsync(fd),
        "stat": lambda: world.disk.stat("/f"),
        "mkdir": lambda: world.disk.mkdir(f"/{world.random.random()}"),
    }
    for name, call in calls.items():
        if name in struck:
            with pytest.raises(OSError) as caught:
                call()
            assert caught.value.errno == number
        else:
            call()
    assert world.faults.fired == {fault: len(struck)}
    world.faults.machines = frozenset({"elsewhere"})
    for call in calls.values():
        call()
    world.faults.machines = frozenset()
    world.faults.stop()
    for call in calls.values():
        call()


def test_short_reads_and_writes_make_progress_and_full_ones_go_on() -> None:
    world = simulated_world(9)
    world.faults.short_read = world.faults.short_write = 0.9
    content = bytes(range(256)) * 300
    world.disk.write_file("/f", content)
    assert world.disk.read_file("/f") == content
    assert world.faults.fired["short_read"] > 2
    assert world.faults.fired["short_write"] > 2
    world.disk.set_direct_io(DirectIo(512, 512))
    fd = world.disk.open("/f", os.O_RDONLY | os.O_DIRECT)
    memory = aligned(1 << 16)
    for _ in range(50):
        assert world.disk.preadv(fd, [memory], 512) % 512 == 0


def test_planned_errors_hit_the_chosen_call() -> None:
    world = simulated_world(1)
    world.faults.plan("rename", errno.EIO, path="/d/", skip=1, times=2)
    world.disk.mkdir("/d")
    world.disk.write_file("/d/a", b"")
    for _ in range(2):
        with pytest.raises(OSError, match="Input/output"):
            world.disk.write_file("/d/a", b"new")
    world.disk.write_file("/d/a", b"newer")
    assert world.disk.read_file("/d/a") == b"newer"
    assert world.disk.listdir("/d") == ["a"]
    assert world.faults.fired == {"rename": 2}


def test_a_full_medium_takes_what_fits() -> None:
    world = simulated_world(1)
    world.disk.set_capacity(10 * 4096)
    fd = world.disk.open("/f", os.O_RDWR | os.O_CREAT)
    assert world.disk.pwritev(fd, [bytes(8 * 4096)], 0) == 8 * 4096
    assert world.disk.pwritev(fd, [bytes(8 * 4096)], 8 * 4096 - 100) == 2 * 4096 + 100
    with pytest.raises(OSError) as caught:
        world.disk.pwritev(fd, [b"x"], 10 * 4096)
    assert caught.value.errno == errno.ENOSPC
    assert world.disk.pwritev(fd, [b"x"], 4096) == 1  # overwriting needs no room
    assert world.disk.statvfs("/").f_bavail == 0
    world.disk.ftruncate(fd, 4096)
    assert world.disk.statvfs("/").f_bavail == 9
    world.disk.unlink("/f")
    assert world.disk.statvfs("/").f_bavail == 9  # still open
    world.disk.close(fd)
    assert world.disk.statvfs("/").f_bavail == 10


def test_descriptors_run_out() -> None:
    world = simulated_world(1)
    world.disk.descriptors_max = 2
    fds = [world.disk.open("/f", os.O_RDWR | os.O_CREAT) for _ in range(2)]
    with pytest.raises(OSError) as caught:
        world.disk.open("/f", os.O_RDONLY)
    assert caught.value.errno == errno.EMFILE
    world.disk.close(fds[0])
    assert world.disk.open("/f", os.O_RDONLY) == fds[0]  # numbers are used again, as in life


def test_direct_io_is_strict_about_memory_and_can_be_refused() -> None:
    world = simulated_world(1)
    world.disk.set_direct_io(DirectIo(512, 4096))
    fd = world.disk.open("/f", os.O_RDWR | os.O_CREAT | os.O_DIRECT)
    memory = aligned(1 << 16)
    world.disk.pwritev(fd, [memory[:8192].toreadonly()], 0)
    for view, offset in ((memory[256 : 256 + 4096], 0), (memory[:4096], 512), (memory[:512], 0)):
        for call in (world.disk.preadv, world.disk.pwritev):
            with pytest.raises(OSError) as caught:
                call(fd, [view], offset)
            assert caught.value.errno == errno.EINVAL
    world.disk.set_direct_io(None)
    with pytest.raises(OSError, match="Invalid argument"):
        world.disk.open("/f", os.O_RDONLY | os.O_DIRECT)
    assert world.disk.direct_io(fd) == DirectIo(0, 0)


def test_bits_rot_where_they_lie() -> None:
    world = simulated_world(1)
    content = bytes(100_000)
    _write(world, "/f", content, sync=True)
    (place,) = world.disk.rot("/f")
    rotten = world.disk.read_file("/f")
    assert [index for index in range(100_000) if rotten[index] != content[index]] == [place]
    assert bin(rotten[place]).count("1") == 1
    world.faults.bit_rot = 1
    assert sum(map(bool, world.disk.read_file("/f"))) >= 1
    world.faults.stop()
    assert sum(bin(byte).count("1") for byte in world.disk.read_file("/f")) in (0, 2)
    assert world.faults.fired == {"rot": 1, "bit_rot": 1}


def test_waiting_for_a_lock_cannot_be_simulated() -> None:
    world = simulated_world(1)
    fds = [world.disk.open("/f", os.O_RDWR | os.O_CREAT) for _ in range(2)]
    assert world.disk.lock(fds[0], wait=True)
    with pytest.raises(OSError, match="deadlock"):
        world.disk.lock(fds[1], wait=True)


def test_links_lead_on_and_loops_end() -> None:
    world = simulated_world(1)
    world.disk.makedirs("/a/b")
    world.disk.symlink("../a/b", "/a/link")
    world.disk.symlink("/a/link/f", "/f")
    _write(world, "/f", b"through both")  # creates the file that the link names
    assert world.disk.read_file("/a/b/f") == b"through both"
    world.disk.symlink("y", "/x")
    world.disk.symlink("x", "/y")
    with pytest.raises(OSError, match="symbolic"):
        world.disk.stat("/x")
    with pytest.raises(FileExistsError):
        world.disk.symlink("z", "/x")
