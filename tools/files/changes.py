"""``curvfs mv``, ``rm``, ``mkdir``, ``touch``, ``chmod``, ``chown`` and ``ln``: names and attributes."""

from __future__ import annotations

import errno
from collections.abc import Callable, Iterator
from datetime import datetime
from typing import Annotated, Any

import typer

from curvfs.api import FileKind, FileStatus, SyncFileSystem
from curvfs.client import paths
from curvfs.client.owners import own_names
from curvfs.client.symlinks import follow, status_or_none
from curvfs.errors import FileExists_, InvalidRequest, IsADirectory, NotADirectory, NotFound, UsageError
from tools.files.modes import changed_mode, octal_mode
from tools.files.options import PATH_HELP, Conf, Json, Paths, Setting, Verbose, complete_path
from tools.files.targets import Run, Target

_Recursive = Annotated[bool, typer.Option("-R", "-r", "--recursive", help="Everything below, too.")]


def register(app: typer.Typer) -> None:
    """Add the commands to the command line."""
    for command in (mv, rm, mkdir, touch, chmod, chown, ln):
        app.command()(command)


def sources_and_target(words: list[str], example: str) -> tuple[list[str], str]:
    """Several sources and the last word. Raises UsageError."""
    if len(words) < 2:
        raise UsageError(f"Give what and where to, as in {example}.")
    return words[:-1], words[-1]


def inside(fs: SyncFileSystem, target: Target, name: str, *, several: bool) -> Target:
    """Where something called ``name`` goes that is sent to ``target``: into it if that is a directory.

    Raises NotADirectory when it must be one and is not, and NotFound where there is no directory for it."""
    path = follow(fs, target.path)
    status = status_or_none(fs, path)
    if status is not None and status.is_dir:
        return Target(target.config, path, target.text).child(name)
    if several or target.slash:
        raise NotADirectory(f"Cannot use {target.text}: it is not a directory; curvfs mkdir makes one.")
    if status is None and path == target.path:
        above = paths.parent_of(path)
        parent = status_or_none(fs, above)
        if parent is None:
            raise NotFound(f"Cannot use {target.text}: {above} does not exist; curvfs mkdir -p makes it.")
        if not parent.is_dir:
            raise NotADirectory(f"Cannot use {target.text}: {above} is not a directory.")
    return target


def mv(
    path: Annotated[
        list[str], typer.Argument(metavar="SOURCE... TARGET", help=PATH_HELP, autocompletion=complete_path)
    ],
    no_clobber: Annotated[bool, typer.Option("--no-clobber", "-n", help="Fail where the name is taken.")] = False,
    exchange: Annotated[bool, typer.Option("--exchange", help="Swap the two, atomically.")] = False,
    verbose: Verbose = False,
    conf: Conf = None,
    setting: Setting = None,
    as_json: Json = False,
) -> int:
    """Rename, or move into a directory; each atomically. Between clusters: curvfs cp, then rm."""
    sources, last = sources_and_target(path, "curvfs mv /a /b")
    if exchange and (no_clobber or len(sources) > 1):
        raise UsageError("--exchange swaps two names; give no more, and no --no-clobber.")
    with Run(conf=conf, setting=setting, as_json=as_json, verbose=verbose) as run:
        target = run.target(last)
        for text in sources:
            with run.attempt(text):
                source = run.target(text)
                if source.config != target.config:
                    raise InvalidRequest(
                        f"Cannot move {text} to {last}: they are in different clusters; use curvfs cp and curvfs rm.",
                        errno_=errno.EXDEV,
                    )
                fs = run.open(source)
                end = target if exchange else inside(fs, target, source.name, several=len(sources) > 1)
                fs.rename(source.path, end.path, replace=not no_clobber, exchange=exchange)
                run.did(f"{text} -> {end.text}", {"path": source.path, "moved_to": end.path})
        return run.code


def rm(
    path: Paths,
    recursive: _Recursive = False,
    force: Annotated[bool, typer.Option("--force", "-f", help="What does not exist is no failure.")] = False,
    directory: Annotated[bool, typer.Option("--dir", "-d", help="Empty directories, too.")] = False,
    verbose: Verbose = False,
    conf: Conf = None,
    setting: Setting = None,
    as_json: Json = False,
) -> int:
    """Remove files, and with -r whole trees. Symlinks are removed, not followed."""
    with Run(conf=conf, setting=setting, as_json=as_json, verbose=verbose) as run:
        for text in path:
            with run.attempt(text):
                target = run.target(text)
                fs = run.open(target)
                try:
                    status = fs.stat(target.path)
                    if status.is_dir and not (recursive or directory):
                        raise IsADirectory(f"Cannot remove {text}: it is a directory; -r removes it with all in it.")
                    if target.slash and not status.is_dir:
                        raise NotADirectory(f"Cannot remove {text}: it is not a directory.")
                    fs.delete(target.path, recursive=recursive and status.is_dir)
                except NotFound:
                    if force:
                        continue
                    raise
                run.did(f"removed {text}", {"path": target.path, "removed": True})
        return run.code


def mkdir(
    path: Paths,
    parents: Annotated[
        bool, typer.Option("--parents", "-p", help="Missing parents, too; one that is there is no failure.")
    ] = False,
    mode: Annotated[str, typer.Option("--mode", "-m", help="As for chmod.")] = "0755",
    verbose: Verbose = False,
    conf: Conf = None,
    setting: Setting = None,
    as_json: Json = False,
) -> int:
    """Make directories."""
    bits = changed_mode(mode, 0o777, is_dir=True)
    owner, group = own_names()
    with Run(conf=conf, setting=setting, as_json=as_json, verbose=verbose) as run:
        for text in path:
            with run.attempt(text):
                target = run.target(text)
                fs = run.open(target)
                if parents:
                    there = status_or_none(fs, follow(fs, target.path))
                    if there is not None and not there.is_dir:
                        raise FileExists_(f"Cannot make {text}: it is there, and not a directory.")
                    if there is not None:
                        continue
                fs.mkdir(target.path, mode=bits, parents=parents, owner=owner, group=group)
                run.did(f"made {text}", {"path": target.path, "made": True})
        return run.code


def touch(
    path: Paths,
    no_create: Annotated[bool, typer.Option("--no-create", "-c", help="Make no files.")] = False,
    date: Annotated[
        str | None, typer.Option("--date", "-d", metavar="TIME", help="Such as 2026-11-30T20:15. Default: now.")
    ] = None,
    verbose: Verbose = False,
    conf: Conf = None,
    setting: Setting = None,
    as_json: Json = False,
) -> int:
    """Set the times of files; what is missing is made, empty."""
    stamp_ms = _stamp_ms(date)
    owner, group = own_names()
    with Run(conf=conf, setting=setting, as_json=as_json, verbose=verbose) as run:
        for text in path:
            with run.attempt(text):
                target = run.target(text)
                fs = run.open(target)
                end = follow(fs, target.path)
                now_ms = run.world.clock.time_ms() if stamp_ms is None else stamp_ms
                made = status_or_none(fs, end) is None
                if made and no_create:
                    continue
                if made:
                    if target.slash:
                        raise NotADirectory(f"Cannot make {text}: a name with a slash behind it is a directory's.")
                    try:
                        fs.create(end, owner=owner, group=group).close(mtime_ms=now_ms, atime_ms=now_ms)
                    except FileExists_:  # somebody was faster
                        made = False
                if not made:
                    fs.set_attr(end, mtime_ms=now_ms, atime_ms=now_ms)
                run.did(f"{'made' if made else 'touched'} {text}", {"path": end, "made": made, "mtime_ms": now_ms})
        return run.code


def _stamp_ms(date: str | None) -> int | None:
    if date is None:
        return None
    try:
        return round(datetime.fromisoformat(date).timestamp() * 1000)
    except (ValueError, OverflowError, OSError):
        raise UsageError(f"{date!r} is no time; write it like 2026-11-30T20:15, of this machine's zone.") from None


def chmod(
    mode: Annotated[str, typer.Argument(metavar="MODE", help="0644, or u+rwX,go-w.")],
    path: Paths,
    recursive: _Recursive = False,
    verbose: Verbose = False,
    conf: Conf = None,
    setting: Setting = None,
    as_json: Json = False,
) -> int:
    """Change modes. Symlinks that are named are followed."""
    changed_mode(mode, 0, is_dir=False)

    def change(fs: SyncFileSystem, status: FileStatus, whole_tree: bool) -> dict[str, Any] | None:
        if status.kind is FileKind.SYMLINK:
            return None
        bits = changed_mode(mode, status.mode, is_dir=status.is_dir)
        fs.set_attr(status.path, mode=bits, recursive=whole_tree)
        return {"mode": f"{bits:04o}"}

    with Run(conf=conf, setting=setting, as_json=as_json, verbose=verbose) as run:
        _change_each(run, path, recursive, change, alike=octal_mode(mode) is not None)
        return run.code


def chown(
    owner: Annotated[str, typer.Argument(metavar="OWNER[:GROUP]", help="Names, or :GROUP alone; kept as they are.")],
    path: Paths,
    recursive: _Recursive = False,
    verbose: Verbose = False,
    conf: Conf = None,
    setting: Setting = None,
    as_json: Json = False,
) -> int:
    """Change owners and groups. Symlinks that are named are followed."""
    user, colon, group = owner.partition(":")
    if not (user or group) or (colon and not group):
        raise UsageError(f"{owner!r} is no owner; write OWNER, OWNER:GROUP or :GROUP.")

    def change(fs: SyncFileSystem, status: FileStatus, whole_tree: bool) -> dict[str, Any] | None:
        changed = fs.set_attr(status.path, owner=user or None, group=group or None, recursive=whole_tree)
        return {"owner": changed.owner, "group": changed.group}

    with Run(conf=conf, setting=setting, as_json=as_json, verbose=verbose) as run:
        _change_each(run, path, recursive, change, alike=True)
        return run.code


def _change_each(
    run: Run,
    words: list[str],
    recursive: bool,
    change: Callable[[SyncFileSystem, FileStatus, bool], dict[str, Any] | None],
    *,
    alike: bool,
) -> None:
    """``change`` every file; with ``alike`` a tree takes the same change everywhere, which is one call to the master
    where nobody wants to be told of every file."""
    for text in words:
        with run.attempt(text):
            target = run.target(text)
            fs = run.open(target)
            top = fs.stat(follow(fs, target.path))
            at_once = recursive and alike and not (run.verbose or run.as_json)
            for status in _walk(run, fs, top) if recursive and not at_once else (top,):
                with run.attempt(status.path):
                    done = change(fs, status, at_once)
                    if done is None:
                        continue
                    shown = " ".join(f"{name} {value}" for name, value in done.items())
                    run.did(f"{status.path}: {shown}", {"path": status.path} | done)


def _walk(run: Run, fs: SyncFileSystem, top: FileStatus) -> Iterator[FileStatus]:
    """``top`` and all that is below it; symlinks are not followed."""
    waiting = [top]
    while waiting:
        status = waiting.pop()
        yield status
        if status.is_dir:
            with run.attempt(status.path):
                for page in fs.list_iter(status.path):
                    waiting += page


def ln(
    path: Annotated[
        list[str],
        typer.Argument(
            metavar="TARGET... LINK", help=f"What exists, and the new name. {PATH_HELP}", autocompletion=complete_path
        ),
    ],
    symbolic: Annotated[
        bool, typer.Option("--symbolic", "-s", help="Symlinks; a target need not exist, nor begin with a slash.")
    ] = False,
    force: Annotated[bool, typer.Option("--force", "-f", help="Remove a file that has the new name.")] = False,
    verbose: Verbose = False,
    conf: Conf = None,
    setting: Setting = None,
    as_json: Json = False,
) -> int:
    """Give files further names, or make symlinks."""
    targets, last = sources_and_target(path, "curvfs ln -s /a /b")
    owner, group = own_names()
    with Run(conf=conf, setting=setting, as_json=as_json, verbose=verbose) as run:
        link = run.target(last)
        for text in targets:
            with run.attempt(text):
                fs = run.open(link)
                # A symlink keeps what was typed, unless that was a URL: a pool knows no URLs.
                as_text = symbolic and "://" not in text
                source = link if as_text else run.target(text)
                if source.config != link.config:
                    raise InvalidRequest(f"Cannot link {text}: it is in another cluster.", errno_=errno.EXDEV)
                wanted = text if as_text else source.path
                end = inside(fs, link, wanted.rstrip("/").rpartition("/")[2], several=len(targets) > 1)
                there = status_or_none(fs, end.path) if force else None
                if there is not None and (symbolic or fs.stat(source.path).id != there.id):
                    fs.delete(end.path)
                elif there is not None:
                    continue
                if symbolic:
                    fs.symlink(wanted, end.path, owner=owner, group=group)
                else:
                    fs.link(source.path, end.path)
                run.did(f"{end.text} -> {wanted}", {"path": end.path, "target": wanted})
        return run.code
