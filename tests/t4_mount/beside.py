"""The same calls on a mount and on this machine's own file system: ``python -m tests.t4_mount.beside --number 500``.

Each seed makes a few hundred random calls on a handful of names and descriptors, first here, then there, as root or as
an ordinary user, and compares every result: bytes, attributes, names, errno. Left out is what the documentation lists
as different (device nodes, RENAME_WHITEOUT, the size of a directory).
"""

from __future__ import annotations

import argparse
import ctypes
import errno
import fcntl
import os
import random
import shutil
import stat
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.t4_mount.mounts import mounted

STEPS = 300
SOMEBODY = 54321
_LIBC = ctypes.CDLL(None, use_errno=True)
_NAMES = ["a", "b", "c", "d/a", "d/b", "e/a", "d/e/a", "-x", "l", "l2", "d", "e", "d/e"] * 6 + [
    "nodir/x",
    "a/x",
    ".",
    "d/.",
    "d/..",
    "é%@.-",
    "x" * 255,
    "y" * 256,
    "d/" + "z" * 254,
]
_MODES = (0o644, 0o755, 0o600, 0o777, 0o4755, 0o2755, 0o1777, 0o400, 0, 0o6777)
_MORE_FLAGS = (
    0, 0, 0, os.O_CREAT, os.O_CREAT, os.O_CREAT | os.O_TRUNC, os.O_TRUNC, os.O_CREAT | os.O_EXCL, os.O_APPEND,
    os.O_APPEND | os.O_CREAT, os.O_NOFOLLOW, os.O_DIRECTORY, os.O_PATH, os.O_SYNC,
)  # fmt: skip
_ATTRIBUTES = (
    "user.k", "user.j", "user." + "n" * 250, "user." + "n" * 251, "trusted.t", "security.s", "nowhere", "user.",
    "system.none",
)  # fmt: skip
_TIMES_NS = (0, 1_000_000_000, 1_700_000_000_123_000_000, -5_000_000_000)
_KINDS = (stat.S_IFREG, stat.S_IFIFO, stat.S_IFSOCK, stat.S_IFDIR)


class Side:
    """One of the two directories, with the descriptors that are open in it."""

    def __init__(self, root: Path) -> None:
        self._root = str(root)
        self._open: dict[int, int] = {}

    def close(self) -> None:
        while self._open:
            os.close(self._open.popitem()[1])

    def do(self, name: str, call: dict[str, Any]) -> Any:
        """The result of a call, or the name of its errno."""
        try:
            if name == "open":
                return self._do_open(call)
            if name == "close":
                return self._do_close(call)
            return self._plain(name, call)
        except OSError as error:
            return errno.errorcode.get(error.errno or 0, error.errno)

    def _path(self, name: str) -> str:
        return f"{self._root}/{name}"

    def _do_open(self, call: dict[str, Any]) -> Any:
        fd = os.open(self._path(call["name"]), call["flags"] | os.O_NONBLOCK, call["mode"])
        self._do_close(call)
        self._open[call["slot"]] = fd
        return "opened"

    def _do_close(self, call: dict[str, Any]) -> Any:
        fd = self._open.pop(call["slot"], None)
        return None if fd is None else os.close(fd)

    def _plain(self, name: str, call: dict[str, Any]) -> Any:
        if name in ON_DESCRIPTORS:
            fd = self._open.get(call["slot"])
            return None if fd is None else ON_DESCRIPTORS[name](fd, call)
        return ON_NAMES[name](self._path(call["name"]), call, self._path(call["other"]))


def shown(found: os.stat_result) -> tuple[int, ...]:
    seen = (found.st_mode, found.st_uid, found.st_gid)
    return seen if stat.S_ISDIR(found.st_mode) else (*seen, found.st_nlink, found.st_size)


def _end_of(fd: int) -> int | None:
    return None if stat.S_ISDIR(os.fstat(fd).st_mode) else os.lseek(fd, 0, os.SEEK_END)


def _set_times(target: int | str, call: dict[str, Any], *, follow: bool = True) -> tuple[int, int]:
    os.utime(target, ns=(call["time_ns"], call["time_ns"]), follow_symlinks=follow)
    found = os.stat(target, follow_symlinks=follow)
    return found.st_atime_ns, found.st_mtime_ns


def _rename_with_flags(path: str, other: str, flags: int) -> None:
    if _LIBC.renameat2(-100, os.fsencode(path), -100, os.fsencode(other), flags):
        raise OSError(ctypes.get_errno(), "renameat2")


def _is_special(path: str) -> bool:
    """Opening it might wait for somebody at the other end."""
    try:
        mode = os.stat(path).st_mode
    except OSError:
        return False
    return not (stat.S_ISREG(mode) or stat.S_ISDIR(mode))


def _read(path: str) -> bytes | None:
    if _is_special(path):
        return None
    with open(path, "rb") as file:
        return file.read()


def _write(path: str, data: bytes) -> int | None:
    if _is_special(path):
        return None
    with open(path, "wb") as file:
        return file.write(data)


ON_DESCRIPTORS: dict[str, Callable[[int, dict[str, Any]], Any]] = {
    "pread": lambda fd, call: os.pread(fd, call["length"], call["offset"]),
    "read_all": lambda fd, call: os.pread(fd, 1 << 22, 0),
    "pwrite": lambda fd, call: os.pwrite(fd, call["data"], call["offset"]),
    "write": lambda fd, call: os.write(fd, call["data"]),
    "ftruncate": lambda fd, call: os.ftruncate(fd, call["offset"]),
    "fstat": lambda fd, call: shown(os.fstat(fd)),
    "fsync": lambda fd, call: os.fsync(fd),
    "fchmod": lambda fd, call: os.fchmod(fd, call["mode"]),
    "seek_end": lambda fd, call: _end_of(fd),
    "fsetxattr": lambda fd, call: os.setxattr(fd, "user.k", call["data"][:200]),
    "futimens": _set_times,
    "flock": lambda fd, call: fcntl.flock(fd, call["lock"]),
}
ON_NAMES: dict[str, Callable[[str, dict[str, Any], str], Any]] = {
    "stat": lambda path, call, other: shown(os.stat(path)),
    "lstat": lambda path, call, other: shown(os.lstat(path)),
    "mkdir": lambda path, call, other: os.mkdir(path, call["mode"]),
    "rmdir": lambda path, call, other: os.rmdir(path),
    "unlink": lambda path, call, other: os.unlink(path),
    "rename": lambda path, call, other: os.rename(path, other),
    "renameat2": lambda path, call, other: _rename_with_flags(path, other, call["rename_flags"]),
    "link": lambda path, call, other: os.link(path, other, follow_symlinks=False),
    "symlink": lambda path, call, other: os.symlink(call["other"], path),
    "readlink": lambda path, call, other: os.readlink(path),
    "listdir": lambda path, call, other: sorted(os.listdir(path)),
    "truncate": lambda path, call, other: os.truncate(path, call["offset"]),
    "chmod": lambda path, call, other: os.chmod(path, call["mode"]),
    "lchown": lambda path, call, other: os.lchown(path, call["uid"], call["uid"]),
    "utimens": lambda path, call, other: _set_times(path, call, follow=call["follow"]),
    "setxattr": lambda path, call, other: os.setxattr(
        path, call["attribute"], call["data"][:300], call["xattr_flags"], follow_symlinks=call["follow"]
    ),
    "getxattr": lambda path, call, other: os.getxattr(path, call["attribute"], follow_symlinks=call["follow"]),
    "listxattr": lambda path, call, other: sorted(os.listxattr(path, follow_symlinks=call["follow"])),
    "removexattr": lambda path, call, other: os.removexattr(path, call["attribute"], follow_symlinks=call["follow"]),
    "mkfifo": lambda path, call, other: os.mkfifo(path, call["mode"]),
    "mknod": lambda path, call, other: os.mknod(path, call["kind"] | call["mode"]),
    "access": lambda path, call, other: os.access(path, call["access"]),
    "read_file": lambda path, call, other: _read(path),
    "write_file": lambda path, call, other: _write(path, call["data"]),
}
#: The ones that make most trouble, more often.
_OFTEN = ("open", "open", "open", "pwrite", "pwrite", "rename", "rename", "write_file", "link")
_CALLS = (*ON_NAMES, *ON_DESCRIPTORS, "open", "close", *_OFTEN)


def draw(chance: random.Random) -> tuple[str, dict[str, Any]]:
    """One call with all that any of them may want."""
    pick = chance.choice
    return pick(_CALLS), {
        "name": pick(_NAMES),
        "other": pick(_NAMES),
        "slot": chance.randrange(5),
        "flags": pick((os.O_RDONLY, os.O_WRONLY, os.O_RDWR)) | pick(_MORE_FLAGS),
        "mode": pick(_MODES),
        "offset": pick((0, 1, 5, 100, 4095, 4096, 4097, 70_000, 1 << 20, (1 << 20) + 5)),
        "length": pick((1, 100, 4096, 70_000, 1 << 20)),
        "data": chance.randbytes(pick((0, 1, 10, 4096, 5000, 70_000, 300_000))),
        "rename_flags": pick((1, 2, 3, 8)),
        "time_ns": pick(_TIMES_NS),
        "follow": chance.random() < 0.7,
        "attribute": pick(_ATTRIBUTES),
        "xattr_flags": pick((0, 0, 1, 2)),
        "uid": pick((0, SOMEBODY, 65534)),
        "kind": pick(_KINDS),
        "access": pick((0, 1, 2, 4, 6, 7)),
        "lock": pick((fcntl.LOCK_SH | fcntl.LOCK_NB, fcntl.LOCK_UN)),
    }


def compare(seed: int, here: Path, there: Path) -> str | None:
    """Make the calls of a seed in two empty directories; the first that differs, if any does."""
    chance = random.Random(seed)
    sides = Side(here), Side(there)
    try:
        for step in range(STEPS):
            name, call = draw(chance)
            ours, theirs = (side.do(name, call) for side in reversed(sides))
            if ours != theirs:
                call["data"] = f"<{len(call['data'])} bytes>"
                return f"seed {seed}, call {step}, {name} {call}: {_short(ours)} instead of {_short(theirs)}"
        return None
    finally:
        for side in sides:
            side.close()


def _short(result: Any) -> str:
    return f"<{len(result)} bytes>" if isinstance(result, bytes) else repr(result)


def compare_all(seeds: range, scratch: Path, mount: Path) -> list[str]:
    """Every second seed as an ordinary user, in a child process. ``mount`` is shown to other users."""
    found = []
    for seed in seeds:
        here, there = scratch / f"beside-{seed}", mount / f"beside-{seed}"
        for directory in (here, there):
            directory.mkdir()
            directory.chmod(0o777)
        child = os.fork()
        if child == 0:
            _in_child(seed, here, there, scratch / f"found-{seed}")
        os.waitpid(child, 0)
        said = (scratch / f"found-{seed}").read_text()
        if said:
            found.append(said)
        shutil.rmtree(here)
        shutil.rmtree(there)
    return found


def _in_child(seed: int, here: Path, there: Path, report: Path) -> None:
    """Does not return: nothing of the parent's may run here."""
    with report.open("w") as file:
        file.write("it did not come to an end")
        file.flush()
        try:
            os.umask(0o022)
            if seed % 2:
                os.setgroups([])
                os.setgid(SOMEBODY)
                os.setuid(SOMEBODY)
            said = compare(seed, here, there) or ""
        except BaseException as error:
            said = f"seed {seed}: {error!r}"
        file.seek(0)
        file.truncate()
        file.write(said)
        file.flush()
    os._exit(0)


def main() -> int:
    parser = argparse.ArgumentParser(description="Random calls on a mount and on this machine's own file system.")
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--number", type=int, default=500)
    options = parser.parse_args()
    seeds = range(options.first, options.first + options.number)
    # Not below a directory that other users may not enter.
    with tempfile.TemporaryDirectory(dir="/var/tmp", ignore_cleanup_errors=True) as name:
        scratch = Path(name)
        scratch.chmod(0o755)
        with mounted(scratch, "--allow-other", "--embedded", scratch / "pool") as mount:
            found = compare_all(seeds, scratch, mount.path)
    print(*found, f"{len(seeds)} seeds of {STEPS} calls, {len(found)} differ", sep="\n")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
