"""Behaving as a version: what the conformance suite cannot see from outside one running server."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path

import pytest
import trio
from conformance.probe import COMMON, Probe, Target, Wire, commit, pattern, refused
from conformance.rules import ALPHA, HEAD, Version

from curvfs.errors import UsageError
from curvfs.server.behaviour import BEHAVIOURS, behaviour_named
from curvfs.server.program import main
from curvfs.server.service import run_server


@asynccontextmanager
async def served(directory: Path, version: Version, announced: str | None = None) -> AsyncIterator[Probe]:
    """A probe of a server over ``directory``."""
    behaviour = behaviour_named(version.label, announced=announced)
    async with trio.open_nursery() as nursery:
        server = await nursery.start(
            partial(run_server, str(directory), master_port=0, worker_port=0, hostname="h", behaviour=behaviour)
        )
        target = Target((server.host, server.master_port), None, version, embedded=True)
        probe = Probe(target, await Wire.connect(target.master), "")
        try:
            yield probe
        finally:
            await probe.aclose()
            nursery.cancel_scope.cancel()


async def test_a_version_announces_itself_or_what_it_is_told_to(tmp_path: Path) -> None:
    async with served(tmp_path / "own", Version.V041) as probe:
        assert (await probe.info()).live_workers[0].software_version == "0.4.1"
    async with served(tmp_path / "told", HEAD, "7.8.9-rc1") as probe:
        info = await probe.info()
        assert info.compatibility.server.release_version == "7.8.9-rc1"
        assert info.live_workers[0].component_info.release_version == "7.8.9-rc1"


def test_versions_that_nobody_knows(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(UsageError, match=r"v0\.3\.2-alpha, v0\.4\.1, head"):
        behaviour_named("v9")
    assert main([str(tmp_path / "p"), "--behave-as", "v9"]) == UsageError.exit_code
    assert "'v9' is no version" in capsys.readouterr().err
    assert not (tmp_path / "p").exists()
    assert set(BEHAVIOURS) == {version.label for version in Version}


async def test_blocks_in_place_survive_a_restart(tmp_path: Path) -> None:
    """Finished ones are finished; an unfinished one goes on where it was, and its space is counted once."""
    async with served(tmp_path, ALPHA) as probe:
        await probe.put("/done", pattern(5000))
        await probe.create("/f")
        located = await probe.add_block("/f")
        stream = await probe.writer(located)
        await stream.write(b"abc")
    async with served(tmp_path, ALPHA) as probe:
        assert (await probe.info()).fs_used == 5003
        located.locs[0].rpc_port = (await probe.info()).live_workers[0].address.rpc_port
        stream = await probe.writer(located, off=3)
        await stream.write(b"def")
        await stream.complete(6)
        await probe.complete("/f", 6, commit(located, 6))
        assert await probe.get("/f") == b"abcdef"
        assert (await probe.info()).fs_used == 5006
        done = (await probe.locate("/done")).block_locs[0]
        other = await probe.worker(done.locs[0])
        other.opened = stream.opened
        async with refused(COMMON, text="status incorrect"):
            await other.complete(6)


@pytest.mark.parametrize("versions", [(ALPHA, HEAD), (HEAD, ALPHA)])
async def test_a_directory_can_change_its_version(tmp_path: Path, versions: tuple[Version, Version]) -> None:
    async with served(tmp_path, versions[0]) as probe:
        await probe.put("/f", pattern(300_000), x_attr={"user.k": b"v"})
        await probe.set_attr("/f", mode=0o600)
    async with served(tmp_path, versions[1]) as probe:
        assert await probe.get("/f") == pattern(300_000)
        status = await probe.stat("/f")
        assert (status.mode, dict(status.x_attr)) == (0o600, {"user.k": b"v"})
        assert status.HasField("ctime") == (versions[1] is HEAD)
        await probe.put("/f", b"new")
        assert await probe.get("/f") == b"new"


async def test_several_workers_keep_their_blocks_apart(tmp_path: Path) -> None:
    async def start(nursery: trio.Nursery) -> Probe:
        server = await nursery.start(
            partial(run_server, str(tmp_path), master_port=0, worker_port=0, hostname="a", more_workers=("b",))
        )
        target = Target((server.host, server.master_port), None, HEAD, embedded=True)
        return Probe(target, await Wire.connect(target.master), "")

    for written in (False, True):
        async with trio.open_nursery() as nursery:
            probe = await start(nursery)
            if not written:
                await probe.put("/one", pattern(1000), hostname="a")
                await probe.put("/two", pattern(2000), hostname="b")
            used = {worker.address.hostname: worker.fs_used for worker in (await probe.info()).live_workers}
            assert used == {"a": 1000, "b": 2000}
            assert await probe.get("/one") + await probe.get("/two") == pattern(1000) + pattern(2000)
            await probe.aclose()
            nursery.cancel_scope.cancel()
    assert (tmp_path / "data").is_dir() and (tmp_path / "data-2").is_dir()
