"""``curvfs ls``, ``stat``, ``du``, ``df`` and ``report``: looking, changing nothing."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated

import typer

from curvfs.api import FileKind, FileStatus, SyncFileSystem
from curvfs.client.symlinks import follow
from curvfs.errors import CurvfsError
from tools.files import shown
from tools.files.options import PATH_HELP, Conf, Human, Json, Paths, Setting, complete_path
from tools.files.targets import Run, Target
from tools.progress import ProgressLine

_WHOLE_CLUSTERS = Annotated[
    list[str] | None,
    typer.Argument(metavar="[URL]...", help="Default: the configured cluster.", autocompletion=complete_path),
]


def register(app: typer.Typer) -> None:
    """Add the commands to the command line."""
    for command in (ls, stat, du, df, report):
        app.command()(command)


def ls(
    path: Annotated[
        list[str] | None,
        typer.Argument(metavar="[PATH]...", help=f"{PATH_HELP} Default: /.", autocompletion=complete_path),
    ] = None,
    long: Annotated[bool, typer.Option("-l", "--long", help="Mode, links, owner, group, size, time and name.")] = False,
    recursive: Annotated[bool, typer.Option("-R", "--recursive", help="Subdirectories, too.")] = False,
    directory: Annotated[bool, typer.Option("-d", "--directory", help="Directories themselves.")] = False,
    human: Human = False,
    conf: Conf = None,
    setting: Setting = None,
    as_json: Json = False,
) -> int:
    """List directories, in byte order of the names; all names, also those that begin with a dot."""
    with Run(conf=conf, setting=setting, as_json=as_json) as run:
        printer = _Printer(run, long, human)
        words = path or ["/"]
        for text in words:
            with run.attempt(text):
                target = run.target(text)
                fs = run.open(target)
                status = fs.stat(target.path)
                if status.kind is FileKind.SYMLINK and (target.slash or not (long or directory)):
                    target = Target(target.config, follow(fs, target.path), text)
                    status = fs.stat(target.path)
                if directory or not status.is_dir:
                    printer.entries([(status, target.text)])
                else:
                    _list(printer, fs, target, recursive, titled=recursive or len(words) > 1)
        return run.code


class _Printer:
    """Prints entries as ls does."""

    def __init__(self, run: Run, long: bool, human: bool) -> None:
        self.run = run
        self._long = long
        self._human = human
        self._begun = False

    def title(self, target: Target) -> None:
        if not self.run.as_json:
            typer.echo(f"{chr(10) if self._begun else ''}{shown.printable(target.text)}:")
        self._begun = True

    def entries(self, entries: list[tuple[FileStatus, str]]) -> None:
        """``entries`` are records with the names they are shown by; with JSON their last component is in the record."""
        self._begun = True
        if self.run.as_json:
            for status, _ in entries:
                self.run.document(shown.status_document(status, status.path))
        elif not self._long:
            for _, name in entries:
                typer.echo(shown.printable(name))
        elif entries:
            rows = [
                (
                    shown.mode_text(status),
                    str(status.nlink),
                    shown.printable(status.owner) or "-",
                    shown.printable(status.group) or "-",
                    shown.size_text(status.length_bytes, self._human),
                    shown.time_text(status.mtime_ms),
                    shown.name_text(status, name),
                )
                for status, name in entries
            ]
            for line in shown.columns(rows, frozenset((1, 4))):
                typer.echo(line)


def _list(printer: _Printer, fs: SyncFileSystem, top: Target, recursive: bool, *, titled: bool) -> None:
    waiting = [top]
    while waiting:
        target = waiting.pop()
        with printer.run.attempt(target.text):
            below: list[Target] = []
            if titled:
                printer.title(target)
            for page in fs.list_iter(target.path):
                printer.entries([(status, status.name) for status in page])
                below += [target.child(status.name) for status in page if status.is_dir]
            if recursive:
                waiting += reversed(below)


def stat(
    path: Paths,
    blocks: Annotated[bool, typer.Option("--blocks", "-b", help="The blocks, too, and who has them.")] = False,
    human: Human = False,
    conf: Conf = None,
    setting: Setting = None,
    as_json: Json = False,
) -> int:
    """Everything that is known of files. Symlinks are not followed."""
    with Run(conf=conf, setting=setting, as_json=as_json) as run:
        for number, text in enumerate(path):
            with run.attempt(text):
                target = run.target(text)
                fs = run.open(target)
                status = fs.stat(target.path)
                document = shown.status_document(status, target.path)
                lines = [shown.status_text(status, target.text, human)]
                if blocks and status.is_file:
                    located = fs.locate(target.path).blocks
                    document["blocks"] = [shown.block_document(block) for block in located]
                    lines += [shown.block_text(block, human) for block in located]
                run.say(("\n" if number else "") + "\n".join(lines), document)
        return run.code


class _Tree:
    """Bytes and files below one directory. A file of several names counts once."""

    def __init__(self) -> None:
        self.seen: set[int] = set()

    def walk(self, fs: SyncFileSystem, target: Target, run: Run) -> Iterator[tuple[Target, int, int]]:
        """(directory, bytes, files) of every directory below ``target``, itself last."""
        # One entry for each directory on the way down: where we are in it, and its sums so far.
        stack: list[tuple[Target, list[FileStatus], int, int]] = [(target, self._entries(fs, target, run), 0, 0)]
        while stack:
            here, entries, size_bytes, files = stack.pop()
            below: Target | None = None
            while entries and below is None:
                status = entries.pop()
                if status.is_dir:
                    below = here.child(status.name)
                else:
                    size_bytes += self.size_of(status)
                    files += 1
            if below is not None:
                stack.append((here, entries, size_bytes, files))
                stack.append((below, self._entries(fs, below, run), 0, 0))
                continue
            yield here, size_bytes, files
            if stack:
                above, rest, above_bytes, above_files = stack.pop()
                stack.append((above, rest, above_bytes + size_bytes, above_files + files))

    def size_of(self, status: FileStatus) -> int:
        if status.nlink > 1 and status.id in self.seen:
            return 0
        if status.nlink > 1:
            self.seen.add(status.id)
        return status.length_bytes if status.is_file else 0

    @staticmethod
    def _entries(fs: SyncFileSystem, target: Target, run: Run) -> list[FileStatus]:
        """In reverse, so that they can be popped in order."""
        try:
            return fs.list(target.path)[::-1]
        except CurvfsError as error:
            run.fail(target.text, error)
            return []


def du(
    path: Paths,
    summarize: Annotated[bool, typer.Option("-s", "--summarize", help="Only the sum of each argument.")] = False,
    human: Human = False,
    conf: Conf = None,
    setting: Setting = None,
    as_json: Json = False,
) -> int:
    """Sum up the lengths of files, one copy of each, for every directory."""
    with (
        Run(conf=conf, setting=setting, as_json=as_json) as run,
        ProgressLine(run.world, wanted=summarize) as progress,
    ):
        for text in path:
            with run.attempt(text):
                target = run.target(text)
                fs = run.open(target)
                status = fs.stat(target.path)
                tree = _Tree()
                found = tree.walk(fs, target, run) if status.is_dir else iter([(target, tree.size_of(status), 1)])
                for here, size_bytes, files in found:
                    progress(None, size_bytes, f"in {shown.printable(here.text)}")
                    if not summarize or here.path == target.path:
                        run.say(
                            f"{shown.size_text(size_bytes, human):<12}  {shown.printable(here.text)}",
                            {"path": here.path, "size_bytes": size_bytes, "files": files},
                        )
        return run.code


def df(
    url: _WHOLE_CLUSTERS = None,
    human: Human = False,
    conf: Conf = None,
    setting: Setting = None,
    as_json: Json = False,
) -> int:
    """The space of whole clusters."""
    with Run(conf=conf, setting=setting, as_json=as_json) as run:
        rows: list[tuple[str, ...]] = [("cluster", "size", "used", "available", "use%")]
        for text in url or ["/"]:
            with run.attempt(text):
                target = run.target(text)
                info = run.open(target).statfs()
                masters = target.config.masters_text
                sizes = (info.capacity_bytes, info.used_bytes, info.available_bytes)
                if as_json:
                    run.document(
                        dict(zip(("size_bytes", "used_bytes", "available_bytes"), sizes, strict=True))
                        | {"cluster": masters, "files": info.files, "directories": info.directories}
                    )
                else:
                    rows.append(
                        (
                            f"curvine://{masters}",
                            *(shown.size_text(size, human) for size in sizes),
                            shown.percent_text(info.used_bytes, info.used_bytes + info.available_bytes),
                        )
                    )
        if len(rows) > 1:
            typer.echo("\n".join(shown.columns(rows, frozenset((1, 2, 3, 4)))))
        return run.code


def report(
    url: _WHOLE_CLUSTERS = None,
    conf: Conf = None,
    setting: Setting = None,
    as_json: Json = False,
) -> int:
    """The state of whole clusters: master, space, files, workers."""
    with Run(conf=conf, setting=setting, as_json=as_json) as run:
        for number, text in enumerate(url or ["/"]):
            with run.attempt(text):
                info = run.open(run.target(text)).statfs()
                run.say(("\n" if number else "") + shown.report_text(info), shown.report_document(info))
        return run.code
