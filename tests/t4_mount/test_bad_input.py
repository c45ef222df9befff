"""Whatever is wrong: one sentence that says what to do, an exit code, nothing mounted."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.t4_mount.mounts import COMMAND, curvfs, mounted, mounted_at, skip_without_fuse


@pytest.fixture(autouse=True)
def _with_fuse() -> None:
    skip_without_fuse()


def fails(
    code: int, words: list[str], *arguments: str | Path, path: Path | None = None, background: bool = False
) -> None:
    for flags in ((), ("--background",)) if background else ((),):
        done = curvfs("mount", *flags, *arguments, *([path] if path is not None else []))
        lines = done.stderr.strip().splitlines()
        assert done.returncode == code, done.stderr
        assert len(lines) == 1 and lines[0].startswith("curvfs: ") and lines[0].endswith((".", "?")), done.stderr
        for word in words:
            assert word in lines[0], lines[0]
        assert done.stdout == ""
        if path is not None:
            assert mounted_at(path) == []


def test_urls(tmp_path: Path) -> None:
    for url, words in {
        "http://host/": ["not a Curvine URL", "curvine://localhost:8995/path"],
        "curvine://": ["names no master"],
        "curvine://host:99999/": ["not host:port"],
        "curvine://host/?nonsense=1": ["no setting 'nonsense'"],
    }.items():
        fails(2, words, url, path=tmp_path)


def test_no_server(tmp_path: Path) -> None:
    quickly = ("-o", "retry_max=1")
    fails(4, ["127.0.0.1:1"], *quickly, "curvine://127.0.0.1:1/", path=tmp_path, background=True)
    fails(4, ["nosuchhost.invalid"], *quickly, "curvine://nosuchhost.invalid/", path=tmp_path)


def test_mountpoints(tmp_path: Path) -> None:
    pool = tmp_path / "pool"
    fails(2, ["does not exist", "mkdir -p"], "--embedded", pool, path=tmp_path / "none", background=True)
    (tmp_path / "file").touch()
    fails(2, ["not a directory"], "--embedded", pool, path=tmp_path / "file")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "a").touch()
    fails(2, ["not empty", "'a'"], "--embedded", pool, path=tmp_path / "full")
    assert not pool.exists()


def test_mounted_already(tmp_path: Path) -> None:
    with mounted(tmp_path, "--embedded", tmp_path / "pool") as mount:
        fails_twice = curvfs("mount", "--embedded", tmp_path / "pool", mount.path)
        assert fails_twice.returncode == 2
        assert "is mounted already" in fails_twice.stderr and "curvfs umount" in fails_twice.stderr
        assert mounted_at(mount.path) == ["fuse.curvfs"]


def test_dots_in_the_path_of_a_url(tmp_path: Path) -> None:
    with mounted(tmp_path, "--embedded", tmp_path / "pool", "--no-kv") as mount:
        url = json.loads((tmp_path / "pool" / "server.json").read_text())["url"]
        with mounted(tmp_path, f"{url}none/../b/./c", "--no-kv", name="other") as other:
            (other.path / "a").write_bytes(b"content")
        assert (mount.path / "b" / "c" / "a").read_bytes() == b"content"
        assert os.listdir(mount.path) == ["b"]


def test_two_mounts_at_once_on_one_directory(tmp_path: Path) -> None:
    path = tmp_path / "mnt"
    path.mkdir()
    arguments = [*COMMAND, "mount", "--background", "--embedded", str(tmp_path / "pool"), str(path)]
    started = [subprocess.Popen(arguments, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) for _ in range(3)]
    said = [process.communicate(timeout=60)[1] for process in started]
    try:
        assert mounted_at(path) == ["fuse.curvfs"]
        assert sorted(process.returncode for process in started) == [0, 2, 2], said
        assert all(str(path) in line for line in said if line)
    finally:
        while mounted_at(path):
            assert curvfs("umount", path).returncode == 0


def test_arguments(tmp_path: Path) -> None:
    fails(2, ["Give a URL and a mountpoint"], tmp_path)
    fails(2, ["Give a URL and a mountpoint"], "--embedded", tmp_path / "pool", "curvine://host/", path=tmp_path)
    fails(2, ["--no-kv"], "--kv", "a", "--no-kv", "curvine://host/", path=tmp_path)
    fails(2, ["directory to serve is empty"], "--embedded", "", path=tmp_path, background=True)
    fails(2, ["mountpoint is empty"], "curvine://host/", "", background=True)
    fails(2, ["not a KV prefix"], "--kv", "../a", "curvine://host/", path=tmp_path)
    fails(2, ["max_read", "refused"], "-o", "max_read=4096", "curvine://host/", path=tmp_path)
    fails(2, ["nonsense"], "-o", "nonsense", "curvine://host/", path=tmp_path)
    fails(2, ["No such option"], "--nonsense", "curvine://host/", path=tmp_path)


def test_the_pool_under_the_mountpoint(tmp_path: Path) -> None:
    (tmp_path / "mnt").mkdir()
    fails(2, ["lies under the mountpoint"], "--embedded", tmp_path / "mnt" / "pool", path=tmp_path / "mnt")
    assert os.listdir(tmp_path / "mnt") == []


def test_a_kv_prefix_that_is_a_file(tmp_path: Path) -> None:
    with mounted(tmp_path, "--embedded", tmp_path / "pool", "--no-kv") as mount:
        (mount.path / "kv").touch()
        other = tmp_path / "other"
        other.mkdir()
        fails(5, ["is not a directory", "--no-kv"], "--embedded", tmp_path / "pool", path=other)


def test_a_log_file_that_cannot_be(tmp_path: Path) -> None:
    fails(
        2, ["log file"], "--log-file", tmp_path / "none" / "log", "--embedded", tmp_path / "pool", path=_made(tmp_path)
    )


def _made(tmp_path: Path) -> Path:
    path = tmp_path / "mnt"
    path.mkdir(exist_ok=True)
    return path


def _without(tmp_path: Path, setup: str, *arguments: str | Path) -> subprocess.CompletedProcess[str]:
    """Run ``curvfs mount`` in a mount name space of its own, after a few shell commands."""
    command = " ".join(
        [sys.executable, "-m", "tools", "mount", "--embedded", str(tmp_path / "pool"), *map(str, arguments)]
    )
    return subprocess.run(
        ["unshare", "--mount", "sh", "-c", f"{setup}\n{command}"],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        cwd=Path(__file__).parents[2],
    )


def test_no_fuse_device(tmp_path: Path) -> None:
    done = _without(tmp_path, "mount -t tmpfs none /dev", _made(tmp_path))
    assert done.returncode == 3, done.stderr
    assert "/dev/fuse is missing" in done.stderr and "--device /dev/fuse" in done.stderr


def test_no_pyfuse3(tmp_path: Path) -> None:
    blocker = tmp_path / "without"
    blocker.mkdir()
    (blocker / "sitecustomize.py").write_text("import sys\nsys.modules['pyfuse3'] = None\n")
    environ = {"PYTHONPATH": f"{blocker}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"}
    done = curvfs("mount", "--embedded", tmp_path / "pool", _made(tmp_path), environ=environ)
    assert done.returncode == 3, done.stderr
    assert "pip install 'curvfs[fuse]'" in done.stderr


_NOBODY = "setpriv --reuid=65534 --regid=65534 --clear-groups"


def _as_nobody(tmp_path: Path, script: str) -> subprocess.CompletedProcess[str]:
    """Run a script in a mount name space where everybody may open /dev/fuse and run this Python; $NOBODY before a
    command drops root's rights, $CURVFS is the command line, so run."""
    for directory in (tmp_path, *tmp_path.parents):
        if directory.stat().st_mode & 0o001 == 0:
            directory.chmod(0o711)
    tmp_path.chmod(0o777)
    checkout = Path(__file__).parents[2]
    setup = [
        "set -e",
        f"cd {tmp_path}",
        "[ -e fuse ] || mknod fuse c 10 229",
        "chmod 666 fuse",
        "mount --bind fuse /dev/fuse",
        *_opened(tmp_path, Path(sys.base_prefix), checkout),
        f"NOBODY='{_NOBODY}'",
        f"CURVFS='{_NOBODY} {sys.executable} -m tools'",
    ]
    return subprocess.run(
        ["unshare", "--mount", "sh", "-c", "\n".join([*setup, script])],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        env={**os.environ, "PYTHONPATH": str(checkout), "HOME": str(tmp_path), "PYTHONDONTWRITEBYTECODE": "1"},
    )


def _opened(tmp_path: Path, *needed: Path) -> list[str]:
    """Commands that put directories which others may enter over the closed ones on the way to what is ``needed``."""
    binds, covers = [], {}
    for directory in needed:
        closed = (each for each in reversed(directory.parents) if each.stat().st_mode & 0o001 == 0)
        if (ancestor := next(closed, None)) is not None:
            stand_in = tmp_path / f"stand-in{ancestor}".replace("/", "-")
            inside = stand_in / directory.relative_to(ancestor)
            binds += [f"mkdir -p {inside}", f"mount --bind {directory} {inside}"]
            covers[ancestor] = f"mount --rbind {stand_in} {ancestor}"
    return [*binds, *covers.values()]


def test_an_ordinary_user_mounts(tmp_path: Path) -> None:
    done = _as_nobody(
        tmp_path,
        """
        $NOBODY mkdir mnt
        $CURVFS mount --embedded $PWD/pool --background $PWD/mnt
        $NOBODY sh -c 'echo content > mnt/a && cat mnt/a && echo object > mnt/kv/o.tmp && mv mnt/kv/o.tmp mnt/kv/o'
        $NOBODY sh -c 'echo more > mnt/kv/o' || echo refused
        $CURVFS umount $PWD/mnt
        grep -c $PWD/mnt /proc/mounts || echo unmounted
        """,
    )
    assert done.returncode == 0, done.stderr
    assert [line for line in done.stdout.splitlines() if not line.startswith("Mounted")] == [
        "content",
        "refused",
        "0",
        "unmounted",
    ]


_NOT_SETUID = "cp $(command -v fusermount3) plain && chmod 755 plain && mount --bind plain $(command -v fusermount3) &&"


def test_an_ordinary_user_is_told(tmp_path: Path) -> None:
    for arguments, hide, words in (
        ("--allow-other", "", ["user_allow_other", "/etc/fuse.conf"]),
        ("", "mount --bind /dev/null $(command -v fusermount3) &&", ["needs fusermount3"]),
        ("", _NOT_SETUID, ["could not be mounted", "not permitted", "run as root"]),
    ):
        done = _as_nobody(
            tmp_path,
            f"""
            {hide} $NOBODY mkdir -p mnt
            $CURVFS mount {arguments} --embedded $PWD/pool $PWD/mnt
            """,
        )
        assert done.returncode == 3, done.stderr
        for word in words:
            assert word in done.stderr, done.stderr
    done = _as_nobody(tmp_path, "mkdir -p closed && chmod 700 closed\n$CURVFS mount --embedded $PWD/pool $PWD/closed")
    assert done.returncode == 2
    assert "closed" in done.stderr
