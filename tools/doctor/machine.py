"""Checks of this machine: FUSE, the kernel, limits, the container around us."""

from __future__ import annotations

import errno
import importlib.metadata
import os
import platform
import resource
import shutil
import stat
from collections.abc import Iterator
from pathlib import Path

from curvfs.errors import CurvfsError
from curvfs.units import MIB, format_size
from curvfs.world import World
from tools.doctor.findings import Finding, error, note, ok, warning

_CAPABILITIES = {"CAP_SYS_ADMIN": 21, "CAP_SYS_RESOURCE": 24, "CAP_IPC_LOCK": 14}
_FEW_FILES = 4096
_SMALL_SHM_BYTES = 1024 * MIB


def check_machine(world: World) -> Iterator[Finding]:
    """Everything that needs no argument."""
    yield from _fuse_device(world)
    yield from _fuse_programs()
    yield from _capabilities()
    yield from _kernel()
    yield from _io_uring(world)
    yield from _limits()
    yield from _container()


def _text(path: str) -> str:
    """A file of /proc or /etc; empty where it cannot be read."""
    try:
        return Path(path).read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def _fuse_device(world: World) -> Iterator[Finding]:
    try:
        world.disk.close(world.disk.open("/dev/fuse", os.O_RDWR))
    except FileNotFoundError:
        yield error(
            "fuse-device",
            "There is no /dev/fuse, so nothing can be mounted here.",
            "Run modprobe fuse; in a container add --device /dev/fuse.",
        )
    except OSError as failed:
        reason = os.strerror(failed.errno or 0)
        remedy = (
            "Allow the device in the container: --device /dev/fuse (and --cap-add SYS_ADMIN for a mount as root)."
            if failed.errno == errno.EPERM
            else "Give your user access to it (mode 0666 is usual), or run as root."
        )
        yield error("fuse-device", f"/dev/fuse cannot be opened ({reason}).", remedy)
    else:
        yield ok("fuse-device", "/dev/fuse can be opened.")


def _fuse_programs() -> Iterator[Finding]:
    try:
        yield ok("libfuse", f"pyfuse3 {importlib.metadata.version('pyfuse3')} is installed.")
        import pyfuse3  # noqa: F401 (loads libfuse3)
    except importlib.metadata.PackageNotFoundError:
        yield warning(
            "libfuse",
            "The Python package pyfuse3 is not installed, so curvfs mount will not work.",
            "Install libfuse3-dev, pkg-config and a C compiler, then pip install 'curvfs[fuse]'.",
        )
    except ImportError as failed:
        yield error("libfuse", f"pyfuse3 does not load: {failed}.", "Install libfuse3 (Debian: libfuse3-3).")
    program = shutil.which("fusermount3")
    root = os.geteuid() == 0
    if program is None:
        level = note if root else error
        yield level(
            "fusermount3",
            "There is no fusermount3, without which only root can mount.",
            "Install the package fuse3.",
        )
        return
    setuid = os.stat(program).st_mode & stat.S_ISUID
    if not setuid and not root:
        yield error(
            "fusermount3",
            f"{program} is not setuid root, so it cannot mount for an ordinary user.",
            f"Run chmod u+s {program} as root, or reinstall the package fuse3.",
        )
    else:
        yield ok("fusermount3", f"{program} is there.")
    allowed = any(line.strip() == "user_allow_other" for line in _text("/etc/fuse.conf").splitlines())
    if not root and not allowed:
        yield note(
            "allow-other",
            "Ordinary users cannot mount with --allow-other: /etc/fuse.conf lacks user_allow_other.",
            "Where other users need the mount, add the line user_allow_other to /etc/fuse.conf.",
        )


def _capabilities() -> Iterator[Finding]:
    status = dict(line.split(":", 1) for line in _text("/proc/self/status").splitlines() if ":" in line)
    effective = int(status.get("CapEff", "0").strip() or "0", 16)
    missing = [name for name, bit in _CAPABILITIES.items() if not effective >> bit & 1]
    if os.geteuid() == 0 and "CAP_SYS_ADMIN" in missing:
        yield warning(
            "capabilities",
            "Root here has no CAP_SYS_ADMIN, so it cannot mount by itself.",
            "Start the container with --cap-add SYS_ADMIN, or mount on the host and share the mountpoint.",
        )
    elif os.geteuid() == 0 and "CAP_SYS_RESOURCE" in missing:
        yield note("capabilities", "Without CAP_SYS_RESOURCE pipes and limits stay as they are; mounts work without.")
    else:
        has = ", ".join(name for name in _CAPABILITIES if name not in missing) or "no capability that a mount uses"
        yield ok("capabilities", f"User {os.geteuid()} has {has}.")
    if status.get("Seccomp", "").strip() == "2":
        yield note(
            "seccomp",
            "A seccomp filter restricts system calls; where a check fails with Operation not permitted, this is why.",
            "In Docker, --security-opt seccomp=unconfined tells whether the filter is at fault.",
        )


def _kernel() -> Iterator[Finding]:
    release = platform.release()
    numbers = [int(word) for word in release.split("-")[0].split(".")[:2] if word.isdigit()]
    version = [*numbers, 0, 0][:2]
    lacking = [
        what
        for since, what in (
            ([5, 6], "io_uring reads and writes (5.6)"),
            ([6, 1], "the alignment of direct I/O (statx, 6.1)"),
            ([6, 5], "what lies in the page cache (cachestat, 6.5)"),
        )
        if version < since
    ]
    if lacking:
        yield note(
            "kernel", f"Linux {release} does not tell {'; '.join(lacking)}.", "A newer kernel makes reads faster."
        )
    else:
        yield ok("kernel", f"Linux {release} has all that curvfs uses.")


def _io_uring(world: World) -> Iterator[Finding]:
    disabled = _text("/proc/sys/kernel/io_uring_disabled").strip()
    try:
        world.disk.ring(4).close()
    except CurvfsError as failed:
        remedy = "The threads engine is used instead."
        if disabled not in ("", "0"):
            remedy = f"sysctl kernel.io_uring_disabled is {disabled}; 0 allows it. {remedy}"
        yield note("io-uring", f"io_uring is not to be had: {failed}", remedy)
    else:
        yield ok("io-uring", "io_uring works.")


def _limits() -> Iterator[Finding]:
    files, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    if files != resource.RLIM_INFINITY and files < _FEW_FILES:
        yield warning(
            "open-files",
            f"At most {files} files may be open (hard limit {most}); a busy store or mount needs more.",
            f"Raise it: ulimit -n {max(_FEW_FILES, min(most, 65536))}, or LimitNOFILE= in the systemd unit.",
        )
    else:
        yield ok("open-files", f"{files if files != resource.RLIM_INFINITY else 'Any number of'} files may be open.")
    locked, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if locked != resource.RLIM_INFINITY and locked < 64 * MIB:
        yield note(
            "locked-memory",
            f"Only {format_size(locked)} of memory may be locked; pinned host buffers for GPUs need more.",
            "Raise it: ulimit -l unlimited, LimitMEMLOCK=infinity, or docker run --ulimit memlock=-1.",
        )
    else:
        yield ok("locked-memory", "Memory may be locked for pinned buffers.")


def _container() -> Iterator[Finding]:
    inside = [path for path in ("/.dockerenv", "/run/.containerenv") if Path(path).exists()]
    kind = os.environ.get("container") or ("docker or podman" if inside else "")  # noqa: SIM112 (systemd's and podman's name for it)
    if kind or os.environ.get("KUBERNETES_SERVICE_HOST"):
        yield note(
            "container",
            f"This is a container ({kind or 'kubernetes'}): its host name and its mounts are its own.",
            "For short-circuit reads share the worker's data directory and set client hostname to the node's name.",
        )
    try:
        shared = os.statvfs("/dev/shm")
    except OSError:
        return
    size_bytes = shared.f_blocks * shared.f_frsize
    if size_bytes < _SMALL_SHM_BYTES:
        yield note(
            "shared-memory",
            f"/dev/shm has {format_size(size_bytes)}; inference engines keep host buffers there.",
            "Start the container with --shm-size or --ipc=host.",
        )
