"""Engine ``curvfs``: files of a Curvine namespace through the native client."""

from __future__ import annotations

from curvfs.api import SyncFileReader, SyncFileSystem, SyncFileWriter
from curvfs.errors import CurvfsError, NotFound, UsageError
from tools.bench.engines.base import Slot, Target
from tools.bench.source import Call, File


class CurvfsTarget(Target):
    """One client, with a reader or a writer for each file."""

    _fs: SyncFileSystem | None = None

    def prepare(self) -> None:
        self._readers: list[SyncFileReader] = []
        self._writers: list[SyncFileWriter] = []
        self._made: list[str] = []
        self._fs = fs = SyncFileSystem.connect(self.job["url"], world=self.world)
        if not self.job.writes:
            for file in self.files:
                self._lay_out(file)
                if self.stopped:
                    return
            self._readers = [fs.open(self.path(file)) for file in self.files]
            return
        for file in self.files:
            path = self.path(file)
            if self.job.reads:
                self._lay_out(file)
                if self.stopped:
                    return
                self._writers.append(fs.open_for_write(path))
                continue
            if not fs.exists(path):
                self._made.append(path)
            self._writers.append(fs.create(path, overwrite=True, parents=True))

    def path(self, file: File) -> str:
        directory = self.job["directory"].strip("/")
        return f"/{directory}/{file.name}" if directory else f"/{file.name}"

    def _lay_out(self, file: File) -> None:
        assert self._fs is not None
        path = self.path(file)
        try:
            there = self._fs.stat(path).length_bytes
        except NotFound:
            there = 0
        if there >= file.size_bytes:
            return
        if there:
            raise UsageError(
                f"{path} has {there} bytes and job {self.job.name} needs {file.size_bytes}; remove it, or give another"
                " size or filename."
            )
        self._made.append(path)
        step = self.layout_step()
        view = memoryview(bytearray(step))
        with self._fs.create(path, overwrite=True, parents=True) as writer:
            for at in range(0, file.size_bytes, step):
                if self.stopped:
                    return
                piece = view[: file.size_bytes - at]
                self.content.fill(piece, file.name, at)
                writer.write(piece)

    def perform(self, call: Call, slot: Slot) -> int:
        view = slot.view[: call.length_bytes]
        if call.kind == "write":
            return self._writers[call.file].write_at(view, call.offset_bytes)
        if self._readers:
            moved = self._readers[call.file].readinto(view, call.offset_bytes)
        else:  # a writer sees what it wrote itself
            data = self._writers[call.file].read_at(call.offset_bytes, call.length_bytes)
            view[: len(data)], moved = data, len(data)
        if moved < call.length_bytes:
            raise CurvfsError(f"{self.path(self.files[call.file])} ended at {call.offset_bytes + moved}.")
        return moved

    def finish(self) -> None:
        writers, self._writers = self._writers, []
        assert self._fs is not None
        for writer in writers:
            writer.close()
        if writers and self.job["verify"]:
            self._readers = [self._fs.open(self.path(file)) for file in self.files]

    def close(self, *, remove: bool) -> None:
        fs, self._fs = self._fs, None
        if fs is None:
            return
        try:
            for writer in self._writers:
                writer.abort() if remove else writer.close()
            for reader in self._readers:
                reader.close()
            for path in self._made if remove else ():
                try:
                    fs.delete(path)
                except NotFound:
                    pass
        finally:
            fs.close()
