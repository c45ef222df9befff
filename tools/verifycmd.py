"""``curvfs verify``: is what is read what was written, by every way and after every kill?"""

from __future__ import annotations

import enum
import json
import os
import stat
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import asdict
from typing import Annotated, Any
from urllib.parse import unquote, urlsplit

import typer

from curvfs.errors import CurvfsError, EnvironmentError_, UsageError
from curvfs.units import parse_size
from curvfs.world import World
from tools.interrupts import EXIT_INTERRUPTED, Interrupts
from tools.jsonoption import Json
from tools.progress import ProgressLine
from tools.verify.places import ClientPlace, DirectoryPlace, Place, StorePlace
from tools.verify.run import Outcome, Plan, Round, State, Stopped, Verifier, report_lines
from tools.verify.stage import Stage

EXIT_WRONG = 1
_PREFIX = "kv"


class Kill(enum.StrEnum):
    """What ``--kill`` kills."""

    WORKER = "worker"
    DAEMON = "daemon"
    SERVER = "server"


class Only(enum.StrEnum):
    """What ``--only`` does."""

    WRITE = "write"
    READ = "read"


def register(app: typer.Typer) -> None:
    """Add the command to the command line."""
    app.command()(verify)


def verify(
    target: Annotated[
        str | None,
        typer.Argument(metavar="[TARGET]", help="A directory, curvine://host:port/path, or file:///DIR with --objects"),
    ] = None,
    embedded: Annotated[
        str | None,
        typer.Option(metavar="DIR", help="The pool in DIR: its server is started, and it is mounted where that works."),
    ] = None,
    objects: Annotated[bool, typer.Option("--objects", help="KV objects in place of files.")] = False,
    other: Annotated[
        str | None, typer.Option(metavar="DIR", help="Read back there as well: another mount of the same pool.")
    ] = None,
    files: Annotated[int, typer.Option(min=1, help="How many.")] = 16,
    size: Annotated[str, typer.Option(help="Bytes of each.")] = "8MiB",
    seed: Annotated[int, typer.Option(min=0, help="Seed of the content.")] = 1,
    minutes: Annotated[float, typer.Option(min=0, help="Do it again and again for so long. Default: once.")] = 0.0,
    kill: Annotated[
        list[Kill] | None,
        typer.Option(help="With --embedded: kill -9 that in every round, and go on. May be given again."),
    ] = None,
    no_mount: Annotated[bool, typer.Option("--no-mount", help="With --embedded: only the native client.")] = False,
    only: Annotated[
        Only | None, typer.Option(help="write: leave it there; read: what an earlier --only write left.")
    ] = None,
    state: Annotated[
        str | None,
        typer.Option(metavar="FILE", help="Where an interrupted run is kept, and gone on with. Removed at the end."),
    ] = None,
    as_json: Json = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Show no progress.")] = False,
) -> int:
    """Write a seeded pattern, read it back by other ways, and name the first wrong byte.

    Removes what it wrote. Exit code 0: all holds; 1: something is wrong; 130 after Ctrl-C.
    """
    kills = list(kill or ())
    _check(target, embedded, other, kills, only, objects=objects, no_mount=no_mount, minutes=minutes)
    plan = Plan(seed, files, parse_size(size))
    if plan.size_bytes < 1:
        raise UsageError("Files without bytes hold nothing; give --size at least 1.")
    world = World.real()
    place = embedded if embedded is not None else target
    with ExitStack() as stack:
        interrupts = stack.enter_context(Interrupts())
        work = _Work(world, plan, stack, f"verify-{seed}", objects=objects)
        if embedded is not None:
            rounds = work.embedded(embedded, kills, mounted=not no_mount and not objects)
        else:
            assert target is not None
            rounds = work.elsewhere(target, other)
        if only is Only.READ:
            rounds.writer = None
        until_s = world.clock.monotonic_s() + 60 * minutes
        progress = stack.enter_context(ProgressLine(world, wanted=not quiet))
        keeping = State(world, state, plan, f"{place}")
        verifier = Verifier(world, plan, keeping, lambda: interrupts.heard, progress)
        work.outcome = verifier.outcome
        keep = only is not None
        try:
            if only is Only.WRITE:
                rounds.readings = rounds.readings[:1]
            while True:
                verifier.round(rounds)
                if world.clock.monotonic_s() >= until_s:
                    break
                if objects:
                    verifier.remove_all(work.writer, objects=True)
            verifier.outcome.finished = True
            keeping.remove()
        except Stopped:
            if state is not None:
                keeping.save(verifier.position, verifier.outcome, now=True)
                keep = True
        finally:
            _let_go(work.writer, None if keep else lambda: verifier.remove_all(work.writer, objects=objects))
    return _report(verifier.outcome, plan, f"{place}", state, as_json=as_json)


def _let_go(writer: Place, remove: Callable[[], None] | None) -> None:
    """Remove what was written, where that is wanted; what cannot be removed is said, and does not hide why."""
    try:
        if remove is not None:
            remove()
        writer.close(remove=remove is not None)
    except CurvfsError as error:
        typer.echo(f"curvfs: not all that was written could be removed: {error}", err=True)


def _check(
    target: str | None,
    embedded: str | None,
    other: str | None,
    kills: list[Kill],
    only: Only | None,
    *,
    objects: bool,
    no_mount: bool,
    minutes: float,
) -> None:
    if (target is None) == (embedded is None):
        raise UsageError("Give either a target or --embedded DIR to verify.")
    if kills and embedded is None:
        raise UsageError("--kill needs --embedded: only a server and a mount started here are killed.")
    if Kill.DAEMON in kills and (no_mount or objects):
        raise UsageError("--kill daemon needs a mount; leave --no-mount and --objects out.")
    if only is not None and (minutes or kills):
        raise UsageError("--only writes or reads once; leave --minutes and --kill out.")
    is_url = target is not None and "://" in target
    if target is not None and not is_url and objects:
        raise UsageError(f"--objects needs a URL; write file://{target if target.startswith('/') else '/' + target}.")
    if target is not None and target.startswith("file://") and not objects:
        raise UsageError(f"Files of a directory are named by its path: {unquote(urlsplit(target).path)}.")
    if is_url and target is not None and not target.startswith(("curvine://", "file://")):
        raise UsageError(f"{target!r} cannot be verified; write a directory or curvine://host:port/path.")
    if other is not None and (embedded is not None or is_url):
        raise UsageError("--other needs a directory as target.")


class _Work:
    """Opens what a round needs."""

    writer: Place

    def __init__(self, world: World, plan: Plan, stack: ExitStack, directory: str, *, objects: bool) -> None:
        self._world = world
        self._plan = plan
        self._stack = stack
        self._directory = directory
        self._objects = objects
        self.outcome = Outcome()

    def _is_directory(self, path: str) -> str:
        try:
            if stat.S_ISDIR(self._world.disk.stat(path).st_mode):
                return os.path.realpath(path)
        except OSError as error:
            raise UsageError(f"{path} cannot be verified: {error.strerror}.") from error
        raise UsageError(f"{path} is not a directory; name one.")

    def elsewhere(self, target: str, other: str | None) -> Round:
        """A directory or a URL that somebody else serves."""
        world = self._world
        if self._objects:
            return self._of_objects(target)
        if "://" in target:
            return self._of_client(target)
        path = self._is_directory(target)
        self.writer = DirectoryPlace(world, path, "the same directory", self._directory)
        readings: list[tuple[str, Callable[[], Place]]] = [("the same directory", lambda: self.writer)]
        if other is not None:
            there = self._is_directory(other)
            label = "the other directory"
            readings.append((label, lambda: DirectoryPlace(world, there, label, self._directory)))
        return Round(self.writer, readings)

    def _of_objects(self, url: str) -> Round:
        world, plan = self._world, self._plan

        def opened(label: str) -> Place:
            return StorePlace(world, url, label, plan.size_bytes, plan.seed, prefix=_PREFIX)

        self.writer = opened("the same store")
        readings: list[tuple[str, Callable[[], Place]]] = [
            ("the same store", lambda: self.writer),
            ("another store", lambda: opened("another store")),
        ]
        return Round(self.writer, readings, objects=True)

    def _of_client(self, url: str) -> Round:
        world = self._world
        self.writer = ClientPlace(world, url, "the client", self._directory)
        return Round(self.writer, self._other_clients(url))

    def _other_clients(self, url: str) -> list[tuple[str, Callable[[], Place]]]:
        def client(label: str, wire: bool) -> Callable[[], Place]:
            return lambda: ClientPlace(self._world, url, label, self._directory, wire=wire)

        return [
            ("another client", client("another client", False)),
            ("another client over the wire", client("another client over the wire", True)),
        ]

    def embedded(self, directory: str, kills: list[Kill], *, mounted: bool) -> Round:
        """A pool of our own, with what can be killed."""
        stage = self._stack.enter_context(Stage(self._world, directory))
        if mounted:
            round_ = self._of_mounts(stage, needed=Kill.DAEMON in kills)
        elif self._objects:
            round_ = self._of_objects(stage.url)
        else:
            round_ = self._of_client(stage.url)
        if Kill.WORKER in kills:
            round_.half_way = lambda: self._kill(Kill.WORKER, stage.kill_server)
        after: list[Callable[[], None]] = []
        if Kill.SERVER in kills:
            after.append(lambda: self._kill(Kill.SERVER, stage.kill_server))
        if Kill.DAEMON in kills:
            after.append(lambda: self._kill(Kill.DAEMON, lambda: stage.kill_daemon("a")))

        def between() -> None:
            for one in after:
                one()

        round_.between = between if after else None
        return round_

    def _kill(self, what: Kill, kill: Callable[[], None]) -> None:
        self.outcome.kills[what.value] = self.outcome.kills.get(what.value, 0) + 1
        kill()

    def _of_mounts(self, stage: Stage, *, needed: bool) -> Round:
        world = self._world
        try:
            first = stage.mount("a")
        except EnvironmentError_:
            if needed:
                raise
            return self._of_client(stage.url)
        second = stage.mount("b")
        self.writer = DirectoryPlace(world, first, "the same mount", self._directory)

        def remounted() -> Place:
            stage.remount("a")
            return DirectoryPlace(world, first, "the mount after a remount", self._directory)

        readings: list[tuple[str, Callable[[], Place]]] = [
            ("the same mount", lambda: self.writer),
            ("another mount", lambda: DirectoryPlace(world, second, "another mount", self._directory)),
            *self._other_clients(stage.url),
            ("the mount after a remount", remounted),
        ]
        return Round(self.writer, readings)


def _report(outcome: Outcome, plan: Plan, target: str, state: str | None, *, as_json: bool) -> int:
    if as_json:
        document: dict[str, Any] = {"target": target, **asdict(plan), **asdict(outcome), "passed": outcome.passed}
        typer.echo(json.dumps(document, indent=2))
    else:
        typer.echo("\n".join(report_lines(outcome, plan)))
        if not outcome.finished and state is not None:
            typer.echo(f"The same command goes on with {state}.")
    if not outcome.passed:
        return EXIT_WRONG
    return 0 if outcome.finished else EXIT_INTERRUPTED
