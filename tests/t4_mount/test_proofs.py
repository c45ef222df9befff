"""Programs that people run on file systems, in their smallest form (:mod:`tests.t4_mount.proofs`)."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.t4_mount.mounts import Mount, mounted
from tests.t4_mount.proofs import PROOFS, fio, program_of


@pytest.mark.parametrize("name", PROOFS)
def test_program(name: str, place: Path, tmp_path: Path) -> None:
    program = program_of(name)
    if program is not None and shutil.which(program) is None:
        pytest.skip(f"{program} is not installed")
    PROOFS[name](place, tmp_path, 1)


@pytest.mark.skipif(shutil.which("fio") is None, reason="fio is not installed")
def test_verified_after_a_new_mount_and_after_a_flipped_byte(tmp_path: Path) -> None:
    """What fio wrote it finds again on the next mount; a byte that changed in the pool makes its verification fail."""
    pool = tmp_path / "pool"
    words = ("--verify=crc32c", "--rw=write", "--size=2m", "--bs=64k", "--filename=f")

    def verified(mount: Mount) -> bool:
        again = ["fio", "--name=j", f"--directory={mount.path}", "--verify_only", "--verify_fatal=1", *words]
        return subprocess.run(again, cwd=tmp_path, capture_output=True, check=False, timeout=60).returncode == 0

    with mounted(tmp_path, "--embedded", pool) as mount:
        fio(mount.path, tmp_path, *words)
        number = (mount.path / "f").stat().st_ino
    with mounted(tmp_path, "--embedded", pool) as mount:
        assert verified(mount)
        (block,) = (path for path in (pool / "data").rglob("blk_*") if int(path.name[4:]) >> 24 == number)
        with open(block, "r+b") as file:
            flipped = bytes([os.pread(file.fileno(), 1, 1_000_000)[0] ^ 1])
            os.pwrite(file.fileno(), flipped, 1_000_000)
        with open(mount.path / "f", "rb") as read:
            os.posix_fadvise(read.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        assert not verified(mount)
