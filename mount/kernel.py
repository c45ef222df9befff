"""What the mount asks of the machine: is FUSE there, what is mounted where, mount, unmount, tune.

Nothing here touches a path below a mount of our own from our own process: a thread that waits for its own daemon
cannot be ended by anybody. What might wait runs in a child process, with a deadline.
"""

from __future__ import annotations

import errno
import importlib
import logging
import os
import shutil
import stat as statmod
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass

from curvfs.errors import CurvfsError, DeadlineExceeded, EnvironmentError_, UsageError, from_os_error
from curvfs.world import Disk

log = logging.getLogger("curvfs.mount")

FUSE_DEVICE = "/dev/fuse"
FUSE_CONF = "/etc/fuse.conf"
SUBTYPE = "curvfs"
FILE_SYSTEM_TYPE = f"fuse.{SUBTYPE}"

_MNT_DETACH = 2
_UMOUNT_NOFOLLOW = 8
_PROBE_TIMEOUT_S = 5.0
_ENDED = ("Z", "X")
_UNMOUNT_TIMEOUT_S = 10.0

_PROBE_CODE = """
import os, sys
try:
    os.statvfs(sys.argv[1])
except OSError as error:
    sys.exit(error.errno)
"""
_UNMOUNT_CODE = """
import ctypes, os, sys
libc = ctypes.CDLL(None, use_errno=True)
if libc.umount2(os.fsencode(sys.argv[1]), int(sys.argv[2])):
    sys.exit(ctypes.get_errno())
"""


@dataclass(frozen=True, slots=True)
class MountEntry:
    """One line of /proc/self/mountinfo."""

    path: str
    device: str
    file_system_type: str
    source: str

    @property
    def is_ours(self) -> bool:
        return self.file_system_type == FILE_SYSTEM_TYPE


# -------------------------------------------------------------------------------------------------- what is mounted


def read_text(disk: Disk, path: str) -> str:
    """A small text file, also of /proc and /sys, whose files have no length."""
    fd = disk.open(path, os.O_RDONLY)
    try:
        chunks = []
        offset = 0
        buffer = bytearray(65536)
        while count := disk.preadv(fd, [buffer], offset):
            chunks.append(bytes(buffer[:count]))
            offset += count
        return b"".join(chunks).decode(errors="surrogateescape")
    finally:
        disk.close(fd)


def mounts(disk: Disk) -> list[MountEntry]:
    """All mounts of this mount name space, in the order in which they were made."""
    entries = []
    for line in read_text(disk, "/proc/self/mountinfo").splitlines():
        left, _, right = line.partition(" - ")
        fields, more = left.split(" "), right.split(" ")
        if len(fields) >= 5 and len(more) >= 2:
            entries.append(MountEntry(_unescape(fields[4]), fields[2], more[0], _unescape(more[1])))
    return entries


def _unescape(text: str) -> str:
    """Blanks, tabs, newlines and backslashes stand as octal numbers in mountinfo."""
    for code, plain in (("\\040", " "), ("\\011", "\t"), ("\\012", "\n"), ("\\134", "\\")):
        text = text.replace(code, plain)
    return text


def mount_at(disk: Disk, path: str) -> MountEntry | None:
    """What is mounted right there, the topmost."""
    found = [entry for entry in mounts(disk) if entry.path == path]
    return found[-1] if found else None


def resolve(disk: Disk, path: str) -> str:
    """An absolute path without symbolic links. The last part is left alone when something is mounted there."""
    if not path:
        raise UsageError("The name of the mountpoint is empty; name an empty directory.")
    absolute = os.path.abspath(path)
    parent, name = os.path.split(absolute)
    if not name:
        return absolute
    place = os.path.join(os.path.realpath(parent), name)
    return place if mount_at(disk, place) is not None else os.path.realpath(place)


def probe(path: str) -> int | None:
    """errno of asking the file system at ``path`` for its size, 0 when it answers, None when it does not."""
    return _run_child([sys.executable, "-I", "-S", "-c", _PROBE_CODE, path], _PROBE_TIMEOUT_S)[0]


def process_of(disk: Disk, thread_id: int) -> int | None:
    """The process that a thread belongs to; None when it has ended, or is none that we can see."""
    try:
        lines = read_text(disk, f"/proc/{thread_id}/status").splitlines()
    except OSError:
        return None
    fields = dict(line.split(":", 1) for line in lines if ":" in line)
    if fields.get("State", "Z").split()[0] in _ENDED:
        return None  # nobody has asked yet how it ended
    number = fields.get("Tgid", "").strip()
    return int(number) if number.isdigit() else None


def _run_child(command: Sequence[str], timeout_s: float) -> tuple[int | None, str]:
    """Exit code and stderr of a child; (None, "") when it does not end in time. It is then left to itself: a child
    that waits for a file system that is stuck cannot be killed, nor may anybody wait for it."""
    child = subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
    )
    try:
        _, text = child.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired:
        child.kill()
        child.returncode = -9  # not waited for: see above
        return None, ""
    return child.returncode, text


# --------------------------------------------------------------------------------------------------------- unmount


def unmount(path: str, *, lazy: bool, timeout_s: float = _UNMOUNT_TIMEOUT_S) -> None:
    """Unmount what is mounted at ``path``. ``lazy`` takes it out of the tree at once, open files notwithstanding.

    Raises CurvfsError with EBUSY, EPERM, EINVAL (nothing mounted there), or DeadlineExceeded.
    """
    if os.geteuid() == 0:
        flags = _UMOUNT_NOFOLLOW | (_MNT_DETACH if lazy else 0)
        code, text = _run_child([sys.executable, "-I", "-S", "-c", _UNMOUNT_CODE, path, str(flags)], timeout_s)
    else:
        program = shutil.which("fusermount3")
        if program is None:
            raise EnvironmentError_("Unmounting as an ordinary user needs fusermount3; install the package fuse3.")
        code, text = _run_child([program, "-u", *(["-z"] if lazy else []), "--", path], timeout_s)
        if code:
            code = errno.EBUSY if "busy" in text.lower() else errno.EPERM
    if code is None:
        raise DeadlineExceeded(f"Unmounting {path} took longer than {timeout_s:g} s; try curvfs umount --lazy {path}.")
    if code:
        reason = text.strip() or os.strerror(code)
        raise CurvfsError(f"{path} could not be unmounted: {reason}.", errno_=code)


def users_of(disk: Disk, path: str) -> list[str]:
    """Who has files open below a mount, as ``name (pid)``; as far as we may know."""
    found = []
    inside = path.rstrip("/") + "/"
    for pid in sorted((name for name in disk.listdir("/proc") if name.isdigit()), key=int):
        links = [f"/proc/{pid}/cwd", f"/proc/{pid}/root"]
        try:
            links += [f"/proc/{pid}/fd/{fd}" for fd in disk.listdir(f"/proc/{pid}/fd")]
        except OSError:
            pass
        for link in links:
            try:
                target = os.readlink(link)
            except OSError:
                continue
            if target == path or target.startswith(inside):
                try:
                    name = read_text(disk, f"/proc/{pid}/comm").strip()
                except OSError:
                    name = "?"
                found.append(f"{name} ({pid})")
                break
    return found


# ------------------------------------------------------------------------------------------------------ preconditions


def check_fuse(disk: Disk, *, allow_other: bool) -> None:
    """Can this process mount with FUSE? Raises EnvironmentError_ with what to do."""
    try:
        importlib.import_module("pyfuse3")
    except ModuleNotFoundError as error:
        raise EnvironmentError_(
            f"Mounting needs the Python package {error.name}; install it with: pip install 'curvfs[fuse]'."
        ) from error
    except ImportError as error:
        raise EnvironmentError_(
            f"The Python package pyfuse3 cannot be loaded ({error}); install libfuse3 (package fuse3 or libfuse3-3)."
        ) from error
    try:
        disk.close(disk.open(FUSE_DEVICE, os.O_RDWR))
    except FileNotFoundError:
        raise EnvironmentError_(
            f"{FUSE_DEVICE} is missing: load the kernel module with modprobe fuse, or start the container with "
            f"--device {FUSE_DEVICE} --cap-add SYS_ADMIN."
        ) from None
    except OSError as error:
        raise EnvironmentError_(
            f"{FUSE_DEVICE} cannot be opened ({error.strerror}): run as root, have an administrator allow it with "
            f"chmod 666 {FUSE_DEVICE}, or start the container with --device {FUSE_DEVICE} --cap-add SYS_ADMIN.",
            errno_=error.errno,
        ) from error
    if os.geteuid() == 0:
        return
    if shutil.which("fusermount3") is None:
        raise EnvironmentError_(
            "Mounting as an ordinary user needs fusermount3; install the package fuse3, or run as root."
        )
    if allow_other and not _user_allow_other(disk):
        raise EnvironmentError_(
            f"--allow-other is refused to ordinary users here: have an administrator add the line user_allow_other to "
            f"{FUSE_CONF}, or mount without it."
        )


def _user_allow_other(disk: Disk) -> bool:
    try:
        lines = read_text(disk, FUSE_CONF).splitlines()
    except OSError:
        return False
    return any(line.strip() == "user_allow_other" for line in lines)


def check_mountpoint(disk: Disk, path: str) -> None:
    """Is ``path`` (see :func:`resolve`) an empty directory to mount on? What a killed mount left there is cleared.

    Raises UsageError or EnvironmentError_ with what to do."""
    there = mount_at(disk, path)
    if there is not None and there.is_ours:
        answer = probe(path)
        if answer is None:
            raise UsageError(
                f"{path} is a curvfs mount ({there.source}) that does not answer; remove it with "
                f"curvfs umount --lazy {path}.",
                errno_=errno.EBUSY,
            )
        if answer != errno.ENOTCONN:
            raise UsageError(
                f"{path} is mounted already ({there.source}); curvfs umount {path} unmounts it.", errno_=errno.EBUSY
            )
        log.info("Clearing the stale mount of %s at %s, which a killed process left.", there.source, path)
        unmount(path, lazy=True)
        return check_mountpoint(disk, path)
    try:
        status = disk.stat(path)
    except FileNotFoundError:
        raise UsageError(
            f"The mountpoint {path} does not exist; create it with mkdir -p {path}.", errno_=errno.ENOENT
        ) from None
    except OSError as error:
        raise UsageError(f"The mountpoint {path} cannot be used: {error.strerror}.", errno_=error.errno) from error
    if not statmod.S_ISDIR(status.st_mode):
        raise UsageError(f"The mountpoint {path} is not a directory; give an empty directory.", errno_=errno.ENOTDIR)
    try:
        names = disk.listdir(path)
    except OSError as error:
        raise UsageError(f"The mountpoint {path} cannot be read: {error.strerror}.", errno_=error.errno) from error
    if names:
        raise UsageError(
            f"The mountpoint {path} is not empty (it holds {sorted(names)[0]!r}); give an empty directory, so that "
            f"nothing disappears under the mount.",
            errno_=errno.ENOTEMPTY,
        )
    if os.geteuid() != 0 and not os.access(path, os.W_OK):
        raise UsageError(
            f"The mountpoint {path} is not writable for this user, which fusermount3 demands; give a directory of "
            f"your own.",
            errno_=errno.EACCES,
        )
    return None


# ------------------------------------------------------------------------------------------------------------- mount


def hold_mountpoint(disk: Disk, path: str) -> int:
    """A descriptor that keeps every other ``curvfs mount`` from this directory until it is closed.

    Raises as :func:`check_mountpoint` does, also when another process is mounting there right now."""
    check_mountpoint(disk, path)
    try:
        fd = disk.open(path, os.O_RDONLY | os.O_DIRECTORY)
    except OSError as error:
        raise UsageError(f"The mountpoint {path} cannot be used: {error.strerror}.", errno_=error.errno) from error
    try:
        if not disk.lock(fd, shared=False):
            raise UsageError(
                f"Another process is mounting on {path} right now; give another mountpoint.", errno_=errno.EBUSY
            )
        check_mountpoint(disk, path)
    except BaseException:
        disk.close(fd)
        raise
    return fd


def escape_option(text: str) -> str:
    """A value for libfuse's ``-o``: commas and backslashes are marked, what is not ASCII is percent-encoded."""
    ascii_only = "".join(c if " " < c <= "~" else "".join(f"%{b:02X}" for b in c.encode()) for c in text)
    return ascii_only.replace("\\", "\\\\").replace(",", "\\,")


def explain_refusal(text: str, path: str) -> EnvironmentError_:
    """The sentence for what libfuse or fusermount3 printed when it could not mount."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    said = lines[-1] if lines else "no reason was given"
    lowered = text.lower()
    if "user_allow_other" in lowered:
        advice = f"add the line user_allow_other to {FUSE_CONF}, or mount without --allow-other"
    elif "not permitted" in lowered or "permission denied" in lowered:
        advice = "run as root, or give the container CAP_SYS_ADMIN (--cap-add SYS_ADMIN --device /dev/fuse)"
    elif "fusermount" in lowered and ("exec" in lowered or "not found" in lowered):
        advice = "install the package fuse3"
    elif "too many" in lowered:
        advice = f"raise mount_max in {FUSE_CONF}"
    else:
        advice = "check the mount options and the kernel's log"
    return EnvironmentError_(f"{path} could not be mounted ({said}); {advice}.", errno_=errno.EPERM)


def tune(disk: Disk, path: str, *, read_ahead_bytes: int, max_background: int) -> None:
    """Where we may (as root), let the kernel read ahead further and keep more requests under way."""
    entry = mount_at(disk, path)
    if entry is None:
        return
    minor = entry.device.partition(":")[2]
    for file, value in (
        (f"/sys/class/bdi/{entry.device}/read_ahead_kb", read_ahead_bytes // 1024),
        (f"/sys/fs/fuse/connections/{minor}/max_background", max_background),
        (f"/sys/fs/fuse/connections/{minor}/congestion_threshold", max_background * 3 // 4),
    ):
        try:
            fd = disk.open(file, os.O_WRONLY)
            try:
                disk.pwritev(fd, [str(value).encode()], 0)
            finally:
                disk.close(fd)
        except OSError as error:
            log.debug("%s stays as it is: %s", file, error)


class CapturedStderr:
    """Catches what libfuse and fusermount3 print on descriptor 2 while they mount; for a few milliseconds."""

    def __init__(self, disk: Disk) -> None:
        self._disk = disk
        self.text = ""

    def __enter__(self) -> CapturedStderr:
        sys.stderr.flush()
        try:
            self._file = os.memfd_create("curvfs-stderr")
            self._saved = os.dup(2)
            os.dup2(self._file, 2)
        except OSError as error:
            raise from_os_error(error, doing="Preparing to mount") from error
        return self

    def __exit__(self, *exc: object) -> None:
        os.dup2(self._saved, 2)
        self._disk.close(self._saved)
        size = self._disk.fstat(self._file).st_size
        buffer = bytearray(size)
        self._disk.pread_full(self._file, memoryview(buffer), 0)
        self.text = buffer.decode(errors="replace")
        self._disk.close(self._file)
