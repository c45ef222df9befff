"""Random calls, the same on a mount and on this machine's own file system (:mod:`tests.t4_mount.beside`)."""

from __future__ import annotations

import tempfile
from pathlib import Path

from tests.t4_mount.beside import compare_all
from tests.t4_mount.mounts import mounted


def test_every_result_is_the_local_file_systems() -> None:
    # Other users may not enter pytest's directories.
    with tempfile.TemporaryDirectory(dir="/var/tmp", ignore_cleanup_errors=True) as name:
        scratch = Path(name)
        scratch.chmod(0o755)
        with mounted(scratch, "--allow-other", "--embedded", scratch / "pool") as mount:
            assert compare_all(range(10), scratch, mount.path) == []
