"""Engine ``mount``: files of any directory, buffered or with O_DIRECT."""

from __future__ import annotations

import errno
import fcntl
import os
import resource
import stat
from typing import Any

from curvfs.errors import CurvfsError, EnvironmentError_, UsageError
from tools.bench.engines.base import Slot, Target
from tools.bench.source import Call, File


class MountTarget(Target):
    """Reads and writes by ``preadv`` and ``pwritev``, which leave the interpreter to other threads meanwhile."""

    _fds: list[int]
    _made: list[str]

    def prepare(self) -> None:
        self._fds, self._made = [], []
        self._disk = self.world.disk
        directory = self.job["directory"]
        if directory and not self._is_directory(directory):
            raise UsageError(f"The directory {directory} of job {self.job.name} is not there; make it, or mount it.")
        resource.setrlimit(resource.RLIMIT_NOFILE, (resource.getrlimit(resource.RLIMIT_NOFILE)[1],) * 2)
        if self.job.reads or self.job["verify"]:
            self._lay_out()
        access = os.O_RDWR if self.job.writes else os.O_RDONLY
        direct = os.O_DIRECT if self.job["direct"] else 0
        for file in self.files:
            path = self.path(file)
            if self.job.writes and not self._disk.exists(path):
                self._made.append(path)
            try:
                fd = self._disk.open(path, access | direct | (os.O_CREAT if self.job.writes else 0), 0o644)
            except OSError as error:
                if error.errno == errno.EINVAL and direct:
                    raise EnvironmentError_(
                        f"{path} cannot be opened with O_DIRECT: its file system does not take it. Measure with"
                        " direct=0, or on another file system."
                    ) from error
                raise
            self._fds.append(fd)
        self._refuse_misaligned()
        self._unsynced = 0
        self._cached_before = self._cached()
        self._io_before = self._device()

    def path(self, file: File) -> str:
        directory = self.job["directory"]
        return os.path.join(directory, file.name) if directory else file.name

    def _is_directory(self, path: str) -> bool:
        try:
            return stat.S_ISDIR(self._disk.stat(path).st_mode)
        except OSError:
            return False

    def _lay_out(self) -> None:
        """Write what is to be read and is not there."""
        for file in self.files:
            if self.stopped:
                return
            path = self.path(file)
            if not self.job.reads:  # written by the job itself, and read back
                continue
            try:
                there = self._disk.stat(path).st_size
            except FileNotFoundError:
                there = -1
            if there >= file.size_bytes:
                self._drop(path)
            elif there > 0:
                raise UsageError(
                    f"{path} has {there} bytes and job {self.job.name} needs {file.size_bytes}; remove it, or give"
                    " another size or filename."
                )
            else:
                self._made.append(path)
                self._write(path, file)

    def _write(self, path: str, file: File) -> None:
        fd = self._disk.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        step = self.layout_step()
        view = memoryview(bytearray(step))
        try:
            for at in range(0, file.size_bytes, step):
                if self.stopped:
                    return
                piece = view[: file.size_bytes - at]
                self.content.fill(piece, file.name, at)
                self._disk.pwrite_full(fd, piece, at)
            self._disk.fdatasync(fd)
        finally:
            self._disk.close(fd)
        self._drop(path)

    def _drop(self, path: str) -> None:
        if self.job["invalidate"]:
            fd = self._disk.open(path, os.O_RDONLY)
            try:
                os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            finally:
                self._disk.close(fd)

    def _refuse_misaligned(self) -> None:
        if not self.job["direct"] or not self._fds:
            return
        need = self._disk.direct_io(self._fds[0]).offset_alignment_bytes
        for split in self.job.sizes:
            for size, _ in split:
                if need and size % need:
                    raise UsageError(
                        f"Blocks of {size} bytes cannot be moved with direct=1: the file system asks for multiples of"
                        f" {need}."
                    )

    def perform(self, call: Call, slot: Slot) -> int:
        view, fd = slot.view[: call.length_bytes], self._fds[call.file]
        if call.kind == "read":
            moved = self._disk.pread_full(fd, view, call.offset_bytes)
            if moved < call.length_bytes:
                raise CurvfsError(
                    f"{self.path(self.files[call.file])} ended at {call.offset_bytes + moved}, before its"
                    f" {self.files[call.file].size_bytes} bytes."
                )
            return moved
        self._disk.pwrite_full(fd, view, call.offset_bytes)
        if self.job["fsync"]:
            self._unsynced += 1
            if self._unsynced >= self.job["fsync"]:
                self._unsynced = 0
                self._disk.fdatasync(fd)
        return call.length_bytes

    def finish(self) -> None:
        if self.job["end_fsync"]:
            for fd in self._fds:
                self._disk.fsync(fd)

    def _cached(self) -> int:
        """Bytes of the files that lie in the page cache."""
        return sum(
            min(file.size_bytes, self._disk.resident_bytes(fd, 0, file.size_bytes))
            for fd, file in zip(self._fds, self.files, strict=True)
        )

    def _device(self) -> dict[str, int]:
        """Bytes that this process moved from and to devices, by the kernel's own count."""
        found = {}
        try:
            for line in self._disk_text("/proc/self/io").splitlines():
                name, _, number = line.partition(":")
                found[name] = int(number)
        except (OSError, ValueError):
            return {}
        return found

    @staticmethod
    def _disk_text(path: str) -> str:
        with open(path, encoding="ascii") as file:  # has no length, so it is read to its end
            return file.read()

    def proof(self) -> dict[str, Any]:
        if not self._fds:
            return {}
        cached, io = self._cached(), self._device()
        whole = sum(file.size_bytes for file in self.files)
        asked = self._disk.direct_io(self._fds[0])
        flagged = all(fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_DIRECT for fd in self._fds)
        direct: bool | None
        if not self.job["direct"]:
            direct, verdict = False, "buffered, as asked"
        elif not flagged:
            direct, verdict = False, "a descriptor is not open with O_DIRECT"
        elif cached > self._cached_before:
            direct, verdict = False, "the files got into the page cache all the same"
        elif cached >= whole:
            direct, verdict = None, "the files lie in the page cache as a whole, and did before"
        else:
            direct, verdict = True, "nothing got into the page cache"
        return {
            "direct": direct,
            "verdict": verdict,
            "o_direct_flag": flagged,
            "page_cache_before_bytes": self._cached_before,
            "page_cache_after_bytes": cached,
            "files_bytes": whole,
            "device_read_bytes": io.get("read_bytes", 0) - self._io_before.get("read_bytes", 0),
            "device_write_bytes": io.get("write_bytes", 0) - self._io_before.get("write_bytes", 0),
            "offset_alignment_bytes": asked.offset_alignment_bytes,
            "memory_alignment_bytes": asked.memory_alignment_bytes,
        }

    def close(self, *, remove: bool) -> None:
        fds, self._fds = self._fds, []
        for fd in fds:
            self._disk.close(fd)
        if remove:
            for path in self._made:
                try:
                    self._disk.unlink(path)
                except FileNotFoundError:
                    pass
            self._made.clear()
