"""A file system that others have filled to the last byte: what is there can still be deleted."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path

import pytest
import trio

from curvfs.api import open_filesystem
from curvfs.errors import OutOfSpace
from curvfs.server.namespace import Namespace, NodeOptions
from curvfs.server.records import ROOT_ID
from curvfs.server.reserve import Reserve
from curvfs.server.service import Server, run_server
from curvfs.server.sqlitestore import SqliteMetaStore


@pytest.fixture(params=[128])
def small(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Path]:
    """A file system of 128 MiB, or as many as are asked for."""
    image, place = tmp_path / "image", tmp_path / "small"
    with image.open("wb") as file:
        file.truncate(request.param << 20)
    subprocess.run(["mkfs.ext4", "-q", "-m", "0", str(image)], check=True)
    place.mkdir()
    done = subprocess.run(["mount", "-o", "loop", str(image), str(place)], capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"cannot mount here: {done.stderr.strip()}")
    try:
        yield place
    finally:
        subprocess.run(["umount", str(place)], check=True)


def fill(path: Path) -> None:
    """Write until nothing goes in any more, down to single blocks."""
    for size in (1 << 20, 4096):
        with path.open("ab", buffering=0) as file:
            try:
                while True:
                    file.write(bytes(size))
            except OSError:
                pass


@pytest.mark.parametrize("small", [32, 128], indirect=True)
async def test_what_is_there_can_be_deleted_on_a_full_file_system(small: Path) -> None:
    async with trio.open_nursery() as nursery:
        run = partial(run_server, str(small / "pool"), master_port=0, worker_port=0, hostname="here")
        server: Server = await nursery.start(run)
        async with open_filesystem(server.url, client_hostname="here", block_size="1MB", retry_max="2s") as fs:
            for number in range(20):
                async with await fs.create(f"/{number}") as writer:
                    await writer.write(b"x" * 100_000)
            await trio.to_thread.run_sync(fill, small / "others")
            with pytest.raises(OutOfSpace):
                for number in range(1000):  # the log of the metadata may still have some room
                    await fs.mkdir(f"/directory-{number}-{'n' * 200}")
            for number in range(20):
                await fs.delete(f"/{number}")
                with suppress(OutOfSpace):  # what others make takes nothing of the room that deletions need
                    for other in range(200):
                        await fs.mkdir(f"/other-{number}-{other}-{'n' * 200}")
            assert [status.name for status in await fs.list("/") if status.name.isdigit()] == []
            (small / "others").unlink()
            await fs.mkdir("/room again")
        nursery.cancel_scope.cancel()


def test_the_reserve_is_taken_where_there_is_plenty(tmp_path: Path, small: Path) -> None:
    reserve = Reserve(str(small / "meta.db"))
    reserve.keep()
    reserve.keep()
    assert (small / "meta.db-reserve").stat().st_blocks * 512 >= 4 << 20
    assert reserve.give_up() and not reserve.give_up()
    fill(small / "others")
    reserve.keep()
    assert not (small / "meta.db-reserve").exists()


def test_changes_that_are_kept_together_are_kept_or_gone_together(small: Path) -> None:
    """What does not fit is undone, and the store knows it; what was made before, and after there is room, stays."""
    store = SqliteMetaStore(str(small / "meta.db"))
    try:
        tree = Namespace(store, lambda: 1)
        with store.together():
            for number in range(50):
                tree.mkdir(f"/before-{number}", NodeOptions())
        fill(small / "others")
        names = 0
        with pytest.raises(OutOfSpace):
            for _ in range(100):  # the log of the metadata may still have some room
                with store.together():
                    for _ in range(200):
                        tree.mkdir(f"/{names}-{'n' * 200}", NodeOptions())
                        names += 1
        assert tree.find("/before-49") is not None
        kept = [number for number in range(names) if tree.find(f"/{number}-{'n' * 200}") is not None]
        assert store.totals.directories == 50 + len(kept) and kept == list(range(len(kept)))
        (small / "others").unlink()
        assert tree.mkdir("/after", NodeOptions()).id > max(tree.get(f"/before-{number}").id for number in range(50))
        directories = store.totals.directories
    finally:
        store.close()
    again = SqliteMetaStore(str(small / "meta.db"))
    try:
        assert again.totals.directories == directories
        assert len(again.children(ROOT_ID)) == directories
    finally:
        again.close()
