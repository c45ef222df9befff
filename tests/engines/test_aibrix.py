"""AIBrix's real cache manager with its SHFS back end, whose shared file system is our mount."""

from __future__ import annotations

from pathlib import Path

import pytest
from drivers import read, stored_and_killed

DRIVER = Path(__file__).with_name("shfs.py")
TOKENS = 64


@pytest.mark.full
@pytest.mark.parametrize("place", ["kv", "plain"])
def test_shfs_on_the_mount(place: str, mount: Path, other_mount: Path, tmp_path: Path) -> None:
    """Put through one mount, acquired through another; inside the KV prefix and outside."""
    (mount / place).mkdir(exist_ok=True)
    there = {"root": str(other_mount / place / "shfs")}
    assert read(DRIVER, "load", there, tmp_path).answer == {"found": 0, "equal": False}
    put = stored_and_killed(DRIVER, {"root": str(mount / place / "shfs")}, tmp_path)
    assert put.answer == {"found": TOKENS}
    assert len([path for path in (mount / place / "shfs").rglob("*") if path.is_file()]) == 4
    assert read(DRIVER, "load", there, tmp_path).answer == {"found": TOKENS, "equal": True}
