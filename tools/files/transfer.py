"""``curvfs cat``, ``put``, ``get`` and ``cp``: what goes where."""

from __future__ import annotations

import os
import stat as statmod
import sys
from contextlib import closing
from typing import Annotated, Any

import typer

from curvfs.api import FileKind, FileStatus, SyncFileSystem
from curvfs.client import paths
from curvfs.client.owners import own_names
from curvfs.client.symlinks import follow, status_or_none
from curvfs.errors import (
    FileExists_,
    InvalidRequest,
    IsADirectory,
    NotADirectory,
    RemoteProtocolError,
    UsageError,
)
from curvfs.units import format_size
from tools.files import local
from tools.files.changes import inside, sources_and_target
from tools.files.copying import Copied, Copier, Sink, Source
from tools.files.local import LocalSink, LocalSource, LocalWish
from tools.files.options import PATH_HELP, Conf, Json, Paths, Setting, Verbose, complete_path
from tools.files.remote import RemoteSink, RemoteSource, RemoteWish
from tools.files.shown import encoded
from tools.files.targets import Run, Target

STANDARD_STREAM = "-"

_Recursive = Annotated[bool, typer.Option("-r", "-R", "--recursive", help="Directories, with all that is in them.")]
_NoClobber = Annotated[bool, typer.Option("--no-clobber", "-n", help="Fail where the name is taken.")]
_Update = Annotated[bool, typer.Option("--update", "-u", help="Leave out files that are there, as long and not older.")]
_Preserve = Annotated[bool, typer.Option("--preserve", "-p", help="Keep the time of modification.")]
_Verify = Annotated[bool, typer.Option("--verify", help="Read everything back before it gets its name.")]
_NoResume = Annotated[bool, typer.Option("--no-resume", help="Begin anew, whatever an interrupted run left.")]
_Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="No progress bar.")]


def register(app: typer.Typer) -> None:
    """Add the commands to the command line."""
    for command in (cat, put, get, cp):
        app.command()(command)


def cat(path: Paths, conf: Conf = None, setting: Setting = None, as_json: Json = False) -> int:
    """Write files to standard output."""
    with Run(conf=conf, setting=setting, as_json=as_json) as run, Copier(bar=False) as copier:
        for text in path:
            with run.attempt(text):
                if text == STANDARD_STREAM:
                    copier.copy(local.standard_input(), local.standard_output())
                    continue
                target = run.target(text)
                fs = run.open(target)
                with closing(RemoteSource(fs, follow(fs, target.path), text)) as source:
                    if as_json:
                        run.document(_content(source, target.path))
                    else:
                        copier.copy(source, local.standard_output())
        return run.code


def _content(source: RemoteSource, path: str) -> dict[str, Any]:
    content = bytearray(source.size_bytes or 0)
    view = memoryview(content)
    done = 0
    while done < len(view) and (count := source.readinto(view[done:], done)):
        done += count
    return {"path": path, "size_bytes": done, "content": encoded(bytes(view[:done]))}


class _Job:
    """One run of put, get or cp: its options, and what it does with each file."""

    def __init__(
        self,
        run: Run,
        copier: Copier,
        *,
        recursive: bool,
        replace: bool,
        update: bool,
        preserve: bool,
        resume: bool = True,
        sync: bool = False,
    ) -> None:
        self.run = run
        self.copier = copier
        self.recursive = recursive
        self.replace = replace
        self.update = update
        self.preserve = preserve
        self.resume = resume
        self.sync = sync
        self.owner, self.group = own_names()
        self.umask = os.umask(0o022)
        os.umask(self.umask)

    def copy(self, source: Source, sink: Sink) -> None:
        begun_s = self.run.world.clock.monotonic_s()
        copied = self.copier.copy(source, sink)
        self.tell(source.shown, sink.shown, copied, self.run.world.clock.monotonic_s() - begun_s)

    def tell(self, source: str, target: str, copied: Copied, seconds: float) -> None:
        resumed = f", went on at {format_size(copied.resumed_bytes)}" if copied.resumed_bytes else ""
        self.run.did(
            f"{source} -> {target} ({format_size(copied.size_bytes)}{resumed})",
            {
                "path": source,
                "target": target,
                "size_bytes": copied.size_bytes,
                "resumed_bytes": copied.resumed_bytes,
                "seconds": round(seconds, 6),
            },
        )

    def made(self, source: str, target: str, kind: str) -> None:
        """A directory or a symlink was copied."""
        self.run.did(f"{source} -> {target} ({kind})", {"path": source, "target": target, "kind": kind})

    def is_current(self, size_bytes: int, mtime_ms: int, there: tuple[int, int] | None) -> bool:
        """With ``--update``: is what is there, (length, time), as long and not older?"""
        return self.update and there is not None and there[0] == size_bytes and there[1] >= mtime_ms

    def needs_recursive(self, text: str) -> None:
        if not self.recursive:
            raise IsADirectory(f"Cannot copy {text}: it is a directory; -r copies it with all in it.")

    # ------------------------------------------------------------------------------------------------ to a cluster

    def remote_file(
        self,
        source: LocalSource | local.StreamSource | RemoteSource,
        fs: SyncFileSystem,
        end: Target,
        *,
        mode: int,
        mtime_ms: int | None,
        source_key: str = "",
    ) -> None:
        there = status_or_none(fs, end.path)
        if mtime_ms is not None and self.is_current(
            source.size_bytes or 0, mtime_ms, None if there is None else (there.length_bytes, there.mtime_ms)
        ):
            return
        wish = RemoteWish(
            path=end.path,
            mode=mode,
            owner=self.owner,
            group=self.group,
            source_key=source_key,
            identity=source.identity if source_key else "",
            size_bytes=source.size_bytes,
            replace=self.replace,
            mtime_ms=mtime_ms if self.preserve else None,
            resume=self.resume,
        )
        self.copy(source, RemoteSink(fs, wish, end.text))

    def remote_directory(self, fs: SyncFileSystem, source: str, end: Target, mode: int) -> None:
        there = status_or_none(fs, end.path)
        if there is None:
            fs.mkdir(end.path, mode=mode, owner=self.owner, group=self.group)
            self.made(source, end.text, "directory")
        elif not there.is_dir:
            raise NotADirectory(f"Cannot copy {source} to {end.text}: it is there, and not a directory.")

    def remote_symlink(self, fs: SyncFileSystem, source: str, end: Target, to: str) -> None:
        there = status_or_none(fs, end.path)
        if there is not None:
            if there.kind is FileKind.SYMLINK and there.symlink_target == to:
                return
            if there.kind is not FileKind.SYMLINK or not self.replace:
                raise FileExists_(f"Cannot make the symlink {end.text}: the name is taken.")
            fs.delete(end.path)
        fs.symlink(to, end.path, owner=self.owner, group=self.group)
        self.made(source, end.text, "symlink")


# --------------------------------------------------------------------------------------------------------------- put


def put(
    path: Annotated[
        list[str],
        typer.Argument(
            metavar="FILE... TARGET",
            help=f"Local files, or - for standard input. TARGET: {PATH_HELP}",
            autocompletion=complete_path,
        ),
    ],
    recursive: _Recursive = False,
    no_clobber: _NoClobber = False,
    update: _Update = False,
    preserve: _Preserve = False,
    verify: _Verify = False,
    no_resume: _NoResume = False,
    quiet: _Quiet = False,
    verbose: Verbose = False,
    conf: Conf = None,
    setting: Setting = None,
    as_json: Json = False,
) -> int:
    """Copy local files to a cluster.

    A file appears under its name when it is whole. What Ctrl-C or a lost connection left of a big one is gone on with
    by the same command, unless the file has changed."""
    sources, last = sources_and_target(path, "curvfs put model.bin curvine://localhost:8995/models/")
    with (
        Run(conf=conf, setting=setting, as_json=as_json, verbose=verbose) as run,
        Copier(bar=_bar(quiet, as_json), verify=verify) as copier,
    ):
        job = _Job(
            run,
            copier,
            recursive=recursive,
            replace=not no_clobber,
            update=update,
            preserve=preserve,
            resume=not no_resume,
        )
        target = run.target(last)
        for text in sources:
            with run.attempt(text):
                fs = run.open(target)
                if text == STANDARD_STREAM:
                    _put_stream(job, fs, target)
                    continue
                # What does not exist is told before anything is asked of the cluster.
                is_dir = statmod.S_ISDIR(run.world.disk.stat(text).st_mode)
                if is_dir:
                    job.needs_recursive(text)
                end = inside(
                    fs,
                    target,
                    os.path.basename(os.path.abspath(text)),
                    several=len(sources) > 1 or (target.slash and not is_dir),
                )
                if is_dir:
                    _put_tree(job, fs, text, end)
                else:
                    _put_file(job, fs, text, Target(end.config, follow(fs, end.path), end.text))
        return run.code


def _put_stream(job: _Job, fs: SyncFileSystem, target: Target) -> None:
    status = status_or_none(fs, follow(fs, target.path))
    if target.slash or (status is not None and status.is_dir):
        raise IsADirectory(f"Cannot write {target.text}: it is a directory; standard input needs the name of a file.")
    end = Target(target.config, follow(fs, target.path), target.text)
    job.remote_file(local.standard_input(), fs, end, mode=0o666 & ~job.umask, mtime_ms=None)


def _put_file(job: _Job, fs: SyncFileSystem, path: str, end: Target) -> None:
    with closing(local.open_source(job.run.world.disk, path)) as source:
        if isinstance(source, LocalSource):
            mode, mtime_ms = statmod.S_IMODE(source.status.st_mode), source.status.st_mtime_ns // 1_000_000
            key = f"{fs.filesystem.hostname}:{os.path.abspath(path)}" if source.alone else ""
        else:
            mode, mtime_ms, key = 0o666, None, ""
        job.remote_file(source, fs, end, mode=mode & ~job.umask, mtime_ms=mtime_ms, source_key=key)


def _put_tree(job: _Job, fs: SyncFileSystem, top: str, end: Target) -> None:
    disk = job.run.world.disk
    waiting = [(top, end)]
    while waiting:
        path, here = waiting.pop()
        with job.run.attempt(path):
            status = disk.stat(path)
            job.remote_directory(fs, path, here, statmod.S_IMODE(status.st_mode) & ~job.umask)
            below = []
            for name in sorted(disk.listdir(path)):
                inner = os.path.join(path, name)
                with job.run.attempt(inner):
                    paths.normalize(f"/{name}")
                    mode = disk.stat(inner, follow_symlinks=False).st_mode
                    if statmod.S_ISLNK(mode):
                        job.remote_symlink(fs, inner, here.child(name), os.readlink(inner))
                    elif statmod.S_ISDIR(mode):
                        below.append((inner, here.child(name)))
                    elif statmod.S_ISREG(mode):
                        _put_file(job, fs, inner, here.child(name))
                    else:
                        raise InvalidRequest(f"Cannot copy {inner}: it is a special file.")
            waiting += reversed(below)


# --------------------------------------------------------------------------------------------------------------- get


def get(
    path: Annotated[
        list[str],
        typer.Argument(
            metavar="PATH... [LOCAL]",
            help=f"{PATH_HELP} LOCAL: a local file or directory, or - for standard output; . with one PATH by default.",
            autocompletion=complete_path,
        ),
    ],
    recursive: _Recursive = False,
    no_clobber: _NoClobber = False,
    update: _Update = False,
    preserve: _Preserve = False,
    verify: _Verify = False,
    no_resume: _NoResume = False,
    sync: Annotated[bool, typer.Option("--sync", help="Have files on disk before they get their names.")] = False,
    quiet: _Quiet = False,
    verbose: Verbose = False,
    conf: Conf = None,
    setting: Setting = None,
    as_json: Json = False,
) -> int:
    """Copy files of a cluster here.

    A file appears under its name when it is whole. What Ctrl-C or a lost connection left of a big one is gone on with
    by the same command, unless the file has changed."""
    sources, last = (path, ".") if len(path) == 1 else (path[:-1], path[-1])
    if last == STANDARD_STREAM and (as_json or recursive):
        raise UsageError("Standard output takes the bytes of files; leave --json and -r out.")
    if "://" in last:
        raise UsageError(f"{last} is no local file; curvfs cp copies within and between clusters.")
    with (
        Run(conf=conf, setting=setting, as_json=as_json, verbose=verbose) as run,
        Copier(bar=_bar(quiet, as_json), verify=verify) as copier,
    ):
        job = _Job(
            run,
            copier,
            recursive=recursive,
            replace=not no_clobber,
            update=update,
            preserve=preserve,
            resume=not no_resume,
            sync=sync,
        )
        for text in sources:
            with run.attempt(text):
                target = run.target(text)
                fs = run.open(target)
                status = fs.stat(follow(fs, target.path))
                if last == STANDARD_STREAM:
                    with closing(RemoteSource(fs, status.path, text)) as source:
                        copier.copy(source, local.standard_output())
                    continue
                if status.is_dir:
                    job.needs_recursive(text)
                end = _local_end(last, target.name, several=len(sources) > 1)
                if status.is_dir:
                    _get_tree(job, fs, Target(target.config, status.path, text), status, end)
                else:
                    _get_file(job, fs, status, text, end)
        return run.code


def _local_end(last: str, name: str, *, several: bool) -> str:
    if os.path.isdir(last):
        return os.path.join(last, name)
    if several or last.endswith("/"):
        raise NotADirectory(f"Cannot use {last}: it is not a directory.")
    return last


def _get_file(job: _Job, fs: SyncFileSystem, status: FileStatus, shown: str, name: str) -> None:
    disk, end = job.run.world.disk, os.path.realpath(name)
    with closing(RemoteSource(fs, status.path, shown)) as source:
        special = local.open_special(disk, end)
        if special is not None:
            job.copy(source, special)
            return
        there = disk.stat(end) if job.update and disk.exists(end) else None
        if job.is_current(
            source.status.length_bytes,
            source.status.mtime_ms,
            None if there is None else (there.st_size, there.st_mtime_ns // 1_000_000),
        ):
            return
        wish = LocalWish(
            path=end,
            mode=source.status.mode & 0o777 & ~job.umask,
            source_key=f"{fs.config.masters_text}{paths.join(fs.config.root, status.path)}",
            identity=source.identity,
            size_bytes=source.size_bytes,
            replace=job.replace,
            mtime_ms=source.status.mtime_ms if job.preserve else None,
            sync=job.sync,
            resume=job.resume,
        )
        job.copy(source, LocalSink(disk, wish, name))


def _get_tree(job: _Job, fs: SyncFileSystem, top: Target, status: FileStatus, end: str) -> None:
    disk = job.run.world.disk
    waiting = [(top, status, end)]
    while waiting:
        here, status, path = waiting.pop()
        with job.run.attempt(here.text):
            try:
                disk.mkdir(path, status.mode & 0o777 & ~job.umask | 0o700)
                job.made(here.text, path, "directory")
            except FileExistsError:
                # A symlink might lead anywhere; the directory that was named may be one.
                if not statmod.S_ISDIR(disk.stat(path, follow_symlinks=here is top).st_mode):
                    raise NotADirectory(
                        f"Cannot copy {here.text} to {path}: it is there, and not a directory."
                    ) from None
            below = []
            for entry in fs.list(here.path):
                inner, outer = here.child(entry.name), os.path.join(path, entry.name)
                with job.run.attempt(inner.text):
                    if entry.name in ("", ".", "..") or "/" in entry.name:
                        raise RemoteProtocolError(f"The master tells of a file called {entry.name!r} in {here.text}.")
                    if entry.is_dir:
                        below.append((inner, entry, outer))
                    elif entry.kind is FileKind.SYMLINK:
                        _get_symlink(job, entry, inner.text, outer)
                    elif entry.is_file:
                        if os.path.islink(outer):
                            raise FileExists_(f"Cannot write {outer}: a symlink is there.")
                        _get_file(job, fs, entry, inner.text, outer)
                    else:
                        raise InvalidRequest(f"Cannot copy {inner.text}: it is a special file.")
            waiting += reversed(below)


def _get_symlink(job: _Job, entry: FileStatus, source: str, path: str) -> None:
    to = entry.symlink_target or ""
    disk = job.run.world.disk
    if os.path.islink(path) and os.readlink(path) == to:
        return
    if disk.exists(path):
        if not os.path.islink(path) or not job.replace:
            raise FileExists_(f"Cannot make the symlink {path}: the name is taken.")
        disk.unlink(path)
    os.symlink(to, path)
    job.made(source, path, "symlink")


# --------------------------------------------------------------------------------------------------------------- cp


def cp(
    path: Annotated[
        list[str], typer.Argument(metavar="SOURCE... TARGET", help=PATH_HELP, autocompletion=complete_path)
    ],
    recursive: _Recursive = False,
    no_clobber: _NoClobber = False,
    update: _Update = False,
    preserve: _Preserve = False,
    verify: _Verify = False,
    quiet: _Quiet = False,
    verbose: Verbose = False,
    conf: Conf = None,
    setting: Setting = None,
    as_json: Json = False,
) -> int:
    """Copy files within a cluster, or to another one. The bytes pass through here; a file appears when it is whole."""
    sources, last = sources_and_target(path, "curvfs cp /a /b")
    with (
        Run(conf=conf, setting=setting, as_json=as_json, verbose=verbose) as run,
        Copier(bar=_bar(quiet, as_json), verify=verify) as copier,
    ):
        job = _Job(run, copier, recursive=recursive, replace=not no_clobber, update=update, preserve=preserve)
        target = run.target(last)
        for text in sources:
            with run.attempt(text):
                source = run.target(text)
                fs, other = run.open(source), run.open(target)
                status = fs.stat(follow(fs, source.path))
                if status.is_dir:
                    job.needs_recursive(text)
                end = inside(other, target, source.name, several=len(sources) > 1)
                _apart(source.config == target.config, status, end.path)
                if status.is_dir:
                    _copy_tree(job, fs, Target(source.config, status.path, text), status, other, end)
                else:
                    end = Target(end.config, follow(other, end.path), end.text)
                    _apart(source.config == target.config, status, end.path)
                    _copy_file(job, fs, status, text, other, end)
        return run.code


def _apart(same_cluster: bool, status: FileStatus, end: str) -> None:
    """Raises InvalidRequest where a copy would be its own source, or lie inside it."""
    if same_cluster and (end == status.path or (status.is_dir and paths.is_below(end, status.path))):
        raise InvalidRequest(f"Cannot copy {status.path} to {end}: that is the same, or inside it.")


def _copy_file(
    job: _Job, fs: SyncFileSystem, status: FileStatus, shown: str, other: SyncFileSystem, end: Target
) -> None:
    with closing(RemoteSource(fs, status.path, shown)) as source:
        job.remote_file(source, other, end, mode=source.status.mode & ~job.umask, mtime_ms=source.status.mtime_ms)


def _copy_tree(
    job: _Job, fs: SyncFileSystem, top: Target, status: FileStatus, other: SyncFileSystem, end: Target
) -> None:
    waiting = [(top, status, end)]
    while waiting:
        here, status, there = waiting.pop()
        with job.run.attempt(here.text):
            job.remote_directory(other, here.text, there, status.mode & ~job.umask)
            below = []
            for entry in fs.list(here.path):
                inner, outer = here.child(entry.name), there.child(entry.name)
                with job.run.attempt(inner.text):
                    if entry.is_dir:
                        below.append((inner, entry, outer))
                    elif entry.kind is FileKind.SYMLINK:
                        job.remote_symlink(other, inner.text, outer, entry.symlink_target or "")
                    elif entry.is_file:
                        _copy_file(job, fs, entry, inner.text, other, outer)
                    else:
                        raise InvalidRequest(f"Cannot copy {inner.text}: it is a special file.")
            waiting += reversed(below)


def _bar(quiet: bool, as_json: bool) -> bool:
    return not quiet and not as_json and sys.stderr.isatty()
