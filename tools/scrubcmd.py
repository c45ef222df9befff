"""``curvfs scrub``: reads every KV object of a pool and says which are not what they should be."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Any

import typer

from curvfs.api import EmbeddedServer, SyncFileSystem
from curvfs.errors import CurvfsError, EnvironmentError_, UsageError
from curvfs.metrics import Exporter, Family, Sample
from curvfs.units import MIB, format_size, parse_duration, parse_size
from curvfs.world import World
from mount.seal import is_sealed
from tools.blocks import Orphan, orphan_blocks
from tools.interrupts import EXIT_INTERRUPTED, Interrupts
from tools.jsonoption import Json
from tools.outfile import write_result
from tools.pools import refuse_missing
from tools.progress import ProgressLine

if TYPE_CHECKING:
    from kvstore.backends.base import Backend
    from kvstore.scrub import Judged, LeftOver, Scrubber

EXIT_DAMAGED = 1
_SAVE_EVERY_S = 2.0
#: Findings that are kept to be shown; the rest is only counted.
_SHOWN = 1000

_STATES = {
    "sound": "sound",
    "read_again": "sound when read by another path",
    "damaged": "damaged",
    "newer": "of a newer format, left alone",
    "foreign": "of another key or name, left alone",
    "unreadable": "not readable",
    "gone": "gone meanwhile",
}


def register(app: typer.Typer) -> None:
    """Add the command to the command line."""
    app.command()(scrub)


@dataclass
class _Found:
    """What a scrub has found up to now; what goes on after an interruption."""

    after: str = ""
    states: Counter[str] = field(default_factory=Counter)
    bytes: int = 0
    quarantined: int = 0
    unsealed: int = 0
    seconds: float = 0.0
    findings: list[dict[str, Any]] = field(default_factory=list)
    left_overs: list[LeftOver] = field(default_factory=list)
    swept: int = 0
    aside: dict[str, tuple[int, int]] = field(default_factory=dict)
    orphans: list[Orphan] | None = None
    finished: bool = False

    @property
    def objects(self) -> int:
        return sum(self.states.values())

    def take(self, judged: Judged, sealed: bool | None) -> None:
        self.states[judged.state.value] += 1
        self.bytes += judged.length_bytes
        self.quarantined += judged.quarantined
        self.after = judged.name
        if sealed is False:
            self.unsealed += 1
        if judged.state.value not in ("sound", "gone") or sealed is False:
            self._note(judged, sealed)

    def _note(self, judged: Judged, sealed: bool | None) -> None:
        if len(self.findings) < _SHOWN:
            self.findings.append(
                {
                    "name": judged.name,
                    "state": judged.state.value,
                    "reason": judged.reason,
                    "length_bytes": judged.length_bytes,
                    "quarantined": judged.quarantined,
                    "sealed": sealed,
                }
            )

    def saved(self) -> dict[str, Any]:
        return {
            "after": self.after,
            "states": dict(self.states),
            "bytes": self.bytes,
            "quarantined": self.quarantined,
            "unsealed": self.unsealed,
            "seconds": self.seconds,
            "findings": self.findings,
        }

    @classmethod
    def from_saved(cls, saved: dict[str, Any]) -> _Found:
        return cls(
            saved["after"],
            Counter(saved["states"]),
            saved["bytes"],
            saved["quarantined"],
            saved["unsealed"],
            saved["seconds"],
            saved["findings"],
        )


def scrub(
    url: Annotated[
        str | None, typer.Argument(metavar="[URL]", help="curvine://host:port/path, or file:///directory.")
    ] = None,
    embedded: Annotated[
        str | None,
        typer.Option(metavar="DIR", help="Scrub the pool in DIR, orphan blocks among it; its server is started."),
    ] = None,
    prefix: Annotated[str, typer.Option(help="The KV prefix below the URL; . is the URL itself.")] = "kv",
    repair: Annotated[
        bool, typer.Option("--repair", help="Move damaged objects to .quarantine; remove what dead writers staged.")
    ] = False,
    rate: Annotated[str | None, typer.Option(help="Bytes read per second at most, such as 100MB.")] = None,
    state: Annotated[
        str | None,
        typer.Option(metavar="FILE", help="Where an interrupted scrub is kept, and gone on with. Removed at the end."),
    ] = None,
    after: Annotated[str, typer.Option(metavar="NAME", help="Begin behind this object.")] = "",
    staging_expiry: Annotated[
        str, typer.Option(help="A staging directory silent for this long is a dead writer's.")
    ] = "10m",
    metrics: Annotated[
        str | None, typer.Option(metavar="FILE", help="Write the result there in the format of Prometheus.")
    ] = None,
    as_json: Json = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Show no progress.")] = False,
) -> int:
    """Read every KV object of a pool: header, checksums, seal; and look for what dead writers left.

    Nothing is changed without --repair. Exit code 1 when an object is damaged or cannot be read, 130 after Ctrl-C.
    """
    if (url is None) == (embedded is None):
        raise UsageError("Give either a URL or --embedded DIR to scrub.")
    expiry_s = parse_duration(staging_expiry, bare_unit="s")
    rate_bytes = None if rate is None else parse_size(rate)
    if expiry_s <= 0 or rate_bytes == 0:
        raise UsageError("Give --rate and --staging-expiry more than 0.")
    world = World.real()
    with ExitStack() as stack:
        if embedded is not None:
            url = stack.enter_context(EmbeddedServer.attach(embedded, world=world)).url
        assert url is not None
        found = _resumed(world, state, url, prefix) or _Found(after=after)
        interrupts = stack.enter_context(Interrupts())
        fs = stack.enter_context(SyncFileSystem.connect(url, world=world)) if url.startswith("curvine://") else None
        refuse_missing(world, url, prefix, fs)
        work = _Work(world, interrupts, found, rate_bytes, state, url, prefix, quiet=quiet)
        work.run(fs, repair=repair, expiry_s=expiry_s)
        if embedded is not None and not interrupts.heard and fs is not None:
            with SyncFileSystem.connect(url.partition("?")[0], world=world) as whole:
                found.orphans = orphan_blocks(embedded, whole, world)
    _write_metrics(found, metrics, world)
    typer.echo(json.dumps(_document(found, url, prefix), indent=2) if as_json else _text(found, url, prefix, repair))
    if not found.finished:
        return EXIT_INTERRUPTED
    return EXIT_DAMAGED if found.states["damaged"] or found.states["unreadable"] else 0


class _Work:
    """The walk over the objects."""

    def __init__(
        self,
        world: World,
        interrupts: Interrupts,
        found: _Found,
        rate_bytes: int | None,
        state: str | None,
        url: str,
        prefix: str,
        *,
        quiet: bool,
    ) -> None:
        self._world = world
        self._interrupts = interrupts
        self._found = found
        self._rate_bytes = rate_bytes
        self._state = state
        self._place = {"url": url, "prefix": prefix}
        self._quiet = quiet
        self._begun_s = world.clock.monotonic_s()
        self._before_s = found.seconds
        self._read_bytes = 0
        self._saved_s = self._begun_s

    def run(self, fs: SyncFileSystem | None, *, repair: bool, expiry_s: float) -> None:
        """All of it, or until it is interrupted."""
        from kvstore.scrub import Scrubber, Stopped, open_pool

        found = self._found
        self._save()  # a state that cannot be kept is told before the work, not after it
        with open_pool(self._world, self._place["url"], self._place["prefix"], staging_expiry_s=expiry_s) as backend:
            scrubber = Scrubber(self._world, backend, self._pace)
            seals = _Seals(fs, backend)
            with ProgressLine(self._world, wanted=not self._quiet) as progress:
                try:
                    self._objects(scrubber, seals, progress, repair=repair)
                    found.left_overs = scrubber.left_overs(expiry_s)
                    if repair and found.left_overs:
                        found.swept = backend.sweep()
                    found.finished = True
                except Stopped:
                    pass
                finally:
                    self._save()
                found.aside = scrubber.aside_bytes()

    def _objects(self, scrubber: Scrubber, seals: _Seals, progress: ProgressLine, *, repair: bool) -> None:
        from kvstore.scrub import Stopped

        found = self._found
        for entry in scrubber.walk(found.after):
            if self._interrupts.heard:
                raise Stopped
            judged = scrubber.judge(entry, repair=repair)
            sealed = seals.sealed(judged.name) if judged.state.value in ("sound", "read_again") else None
            found.take(judged, sealed)
            bad = found.states["damaged"] + found.states["unreadable"]
            progress(None, found.bytes, f"{found.objects:,} objects, {bad} bad")
            if self._world.clock.monotonic_s() - self._saved_s > _SAVE_EVERY_S:
                self._save()

    def _pace(self, size_bytes: int) -> None:
        """Wait until so much may have been read."""
        from kvstore.scrub import Stopped

        self._read_bytes += size_bytes
        clock = self._world.clock
        while self._rate_bytes is not None:
            left_s = self._begun_s + self._read_bytes / self._rate_bytes - clock.monotonic_s()
            if left_s <= 0 or self._interrupts.heard:
                break
            clock.block(min(left_s, 0.1))
        if self._interrupts.heard:
            raise Stopped

    def _save(self) -> None:
        """Keep how far it is, or remove that where it is done."""
        self._saved_s = self._world.clock.monotonic_s()
        self._found.seconds = self._before_s + self._saved_s - self._begun_s
        if self._state is None:
            return
        try:
            if self._found.finished:
                if self._world.disk.exists(self._state):
                    self._world.disk.unlink(self._state)
            else:
                text = json.dumps(self._place | {"found": self._found.saved()})
                self._world.disk.write_file(self._state, text.encode())
        except OSError as error:
            raise EnvironmentError_(f"The state {self._state} cannot be kept: {error.strerror}.") from error


class _Seals:
    """Whether objects of a Curvine namespace are sealed; a directory does not tell."""

    def __init__(self, fs: SyncFileSystem | None, backend: Backend) -> None:
        self._fs = fs
        self._root = backend.root
        self._ids: dict[str, int] = {}

    def sealed(self, name: str) -> bool | None:
        """None where that is not told."""
        if self._fs is None:
            return None
        path = f"{self._root}/{name}"
        directory = path.rpartition("/")[0]
        try:
            if directory not in self._ids:
                self._ids[directory] = self._fs.stat(directory).id
            status = self._fs.stat(path)
        except CurvfsError:
            return None
        return is_sealed(status.xattrs, self._ids[directory], status.name)


def _resumed(world: World, state: str | None, url: str, prefix: str) -> _Found | None:
    if state is None or not world.disk.exists(state):
        return None
    try:
        saved = json.loads(world.disk.read_file(state))
        place = (saved["url"].partition("?")[0], saved["prefix"])
        found = _Found.from_saved(saved["found"])
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        raise UsageError(f"{state} keeps no scrub; remove it, or name another file.") from None
    if not _same_place(place[0], url) or place[1] != prefix:
        raise UsageError(f"{state} keeps a scrub of {place[0]}, prefix {place[1]}; name another file.")
    return found


def _same_place(one: str, other: str) -> bool:
    return one == other.partition("?")[0]


# ------------------------------------------------------------------------------------------------------------- report


def _document(found: _Found, url: str, prefix: str) -> dict[str, Any]:
    return {
        "url": url,
        "prefix": prefix,
        "finished": found.finished,
        "after": "" if found.finished else found.after,
        "objects": found.objects,
        "bytes": found.bytes,
        "seconds": round(found.seconds, 3),
        "states": {name: found.states[name] for name in _STATES},
        "quarantined": found.quarantined,
        "unsealed": found.unsealed,
        "findings": found.findings,
        "dead_staging": [
            {"name": one.name, "silent_s": round(one.silent_s), "files": one.files, "bytes": one.length_bytes}
            for one in found.left_overs
        ],
        "swept": found.swept,
        "quarantine": _pair(found.aside.get("quarantine")),
        "trash": _pair(found.aside.get("trash")),
        "orphan_blocks": None
        if found.orphans is None
        else [{"block_id": one.block_id, "path": one.path, "bytes": one.length_bytes} for one in found.orphans],
    }


def _pair(files_bytes: tuple[int, int] | None) -> dict[str, int]:
    files, size = files_bytes or (0, 0)
    return {"files": files, "bytes": size}


def _text(found: _Found, url: str, prefix: str, repair: bool) -> str:
    speed = found.bytes / found.seconds / MIB if found.seconds else 0.0
    begun = "Scrubbed" if found.finished else "Interrupted after"
    lines = [
        f"{begun} {found.objects:,} objects ({format_size(found.bytes)}) of {url}, prefix {prefix}, "
        f"in {found.seconds:.1f} s ({speed:.0f} MiB/s)."
    ]
    for name, meaning in _STATES.items():
        if found.states[name] or name in ("sound", "damaged", "unreadable"):
            note = f", {found.quarantined} moved to .quarantine" if name == "damaged" and found.quarantined else ""
            lines.append(f"  {found.states[name]:>9,}  {meaning}{note}")
    if found.unsealed:
        lines.append(f"  {found.unsealed:>9,}  not sealed: anybody who may write can still change them")
    lines += [
        f"{one['state'].replace('_', ' ')}: {one['name']}: {one['reason'] or 'not sealed'}" for one in found.findings
    ]
    if found.left_overs:
        files = sum(one.files for one in found.left_overs)
        size = sum(one.length_bytes for one in found.left_overs)
        what = "removed" if repair else "--repair removes them"
        lines.append(
            f"Staging directories of dead writers: {len(found.left_overs)}, {files} files, {format_size(size)}; {what}."
        )
    for name, (files, size) in found.aside.items():
        if files:
            lines.append(f"In .{name}: {files:,} files, {format_size(size)}.")
    if found.orphans:
        size = sum(one.length_bytes for one in found.orphans)
        lines.append(
            f"Block files that belong to no file: {len(found.orphans)}, {format_size(size)}; the server removes them "
            "when it is started anew."
        )
        lines += [f"  {one.path}" for one in found.orphans[:20]]
    if found.finished:
        bad = found.states["damaged"] + found.states["unreadable"]
        lines.append(f"{bad} of {found.objects:,} objects are bad." if bad else "All objects that are ours hold.")
    else:
        lines.append(f"Go on with --after {found.after!r}, or with the same --state.")
    return "\n".join(lines)


def _write_metrics(found: _Found, path: str | None, world: World) -> None:
    if path is None:
        return
    text = Exporter(_families(found)).text()
    try:
        write_result(world, path, text.encode())
    except OSError as error:
        raise UsageError(f"The metrics {path} cannot be written: {error.strerror}.") from error


def _families(found: _Found) -> Callable[[], Iterable[Family]]:
    def collect() -> Iterable[Family]:
        yield Family(
            "curvfs_scrub_objects",
            "gauge",
            "Objects by what the last scrub found them to be.",
            [Sample(float(found.states[name]), {"state": name}) for name in _STATES],
        )
        for name, help_, value in (
            ("curvfs_scrub_read_bytes", "Bytes of objects that the last scrub judged.", found.bytes),
            ("curvfs_scrub_seconds", "How long the last scrub took.", found.seconds),
            ("curvfs_scrub_quarantined", "Objects that the last scrub moved to quarantine.", found.quarantined),
            ("curvfs_scrub_unsealed", "Objects that are not sealed.", found.unsealed),
            ("curvfs_scrub_dead_staging", "Staging directories of dead writers.", len(found.left_overs)),
            ("curvfs_scrub_orphan_blocks", "Block files that no file owns.", len(found.orphans or ())),
            ("curvfs_scrub_finished", "1 when the last scrub came to its end.", found.finished),
        ):
            yield Family.of(name, "gauge", help_, float(value))

    return collect
