"""Rounds of writing and reading back, and what came of them."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from typing import Any

from curvfs.errors import CurvfsError, EnvironmentError_, UsageError
from curvfs.units import format_size
from curvfs.world import ThreadHandle, World
from tools.verify.pattern import PIECE_BYTES, Pattern
from tools.verify.places import Content, Place

#: A file whose writing was cut off by a kill is written again so often.
_WRITE_TRIES = 8
_RETRY_S = 0.5
#: Failures that are kept to be shown.
_SHOWN = 100


@dataclass(frozen=True, slots=True)
class Plan:
    """What is written. The same numbers mean the same bytes, whenever and wherever they are read."""

    seed: int
    files: int
    size_bytes: int

    def name(self, file: int, generation: int, *, objects: bool) -> str:
        """Objects are write-once, so each round has its own; files are written over."""
        return f"f{file:06d}.r{generation}" if objects else f"f{file:06d}"


@dataclass(slots=True)
class Failure:
    """One file that did not hold."""

    file: str
    reading: str
    round: int
    problem: str
    offset_bytes: int | None = None
    expected: str = ""
    got: str = ""


@dataclass(slots=True)
class Tally:
    """How often each way of reading back was gone, and how many files held."""

    files: int = 0
    held: int = 0
    bytes: int = 0
    seconds: float = 0.0


@dataclass(slots=True)
class Outcome:
    """All of a verification up to now; what :class:`Progressing` keeps in the state file."""

    rounds: int = 0
    written_files: int = 0
    written_bytes: int = 0
    write_seconds: float = 0.0
    rewritten_files: int = 0
    kills: dict[str, int] = field(default_factory=dict)
    readings: dict[str, Tally] = field(default_factory=dict)
    failures: list[Failure] = field(default_factory=list)
    failed: int = 0
    finished: bool = False

    @property
    def passed(self) -> bool:
        return self.failed == 0

    @classmethod
    def from_saved(cls, saved: dict[str, Any]) -> Outcome:
        readings = {label: Tally(**tally) for label, tally in saved["readings"].items()}
        failures = [Failure(**failure) for failure in saved["failures"]]
        return cls(**(saved | {"readings": readings, "failures": failures}))


@dataclass(slots=True)
class Position:
    """How far a round is: generation, what is being done (``write`` or the label of a reading), next file."""

    generation: int = 0
    phase: str = "write"
    next_file: int = 0


class State:
    """The file that an interrupted verification is gone on from; without a path nothing is kept."""

    _EVERY_S = 2.0

    def __init__(self, world: World, path: str | None, plan: Plan, target: str) -> None:
        self._world = world
        self._path = path
        self._wanted = {"target": target, **asdict(plan)}
        self._saved_s = world.clock.monotonic_s()

    def load(self) -> tuple[Position, Outcome] | None:
        """Where an earlier run was. Raises UsageError when it was another one."""
        if self._path is None or not self._world.disk.exists(self._path):
            return None
        try:
            saved = json.loads(self._world.disk.read_file(self._path))
            position, outcome = Position(**saved["position"]), Outcome.from_saved(saved["outcome"])
            wanted = saved["plan"]
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise UsageError(f"{self._path} keeps no verification; remove it, or name another file.") from error
        if wanted != self._wanted:
            raise UsageError(
                f"{self._path} keeps a verification of {wanted.get('target')} with other numbers; give the same ones, "
                "or name another file."
            )
        return position, outcome

    def save(self, position: Position, outcome: Outcome, *, now: bool = False) -> None:
        """Keep it, from time to time or ``now``."""
        now_s = self._world.clock.monotonic_s()
        if self._path is None or not (now or now_s - self._saved_s > self._EVERY_S):
            return
        self._saved_s = now_s
        record = {"plan": self._wanted, "position": asdict(position), "outcome": asdict(outcome)}
        try:
            self._world.disk.write_file(self._path, json.dumps(record).encode())
        except OSError as error:
            raise EnvironmentError_(f"The state {self._path} cannot be kept: {error.strerror}.") from error

    def remove(self) -> None:
        if self._path is not None and self._world.disk.exists(self._path):
            self._world.disk.unlink(self._path)


class Stopped(Exception):
    """Interrupted, or the time is over."""


@dataclass
class Round:
    """What one round does. ``writer`` None: only reads. ``half_way`` and ``between``: what is killed, and when.
    ``readings``: opens each way of reading back, when its turn comes."""

    writer: Place | None
    readings: list[tuple[str, Callable[[], Place]]]
    objects: bool = False
    half_way: Callable[[], None] | None = None
    between: Callable[[], None] | None = None


class Verifier:
    """Runs rounds. ``stop`` is asked between pieces: True ends it as interrupted."""

    def __init__(
        self,
        world: World,
        plan: Plan,
        state: State,
        stop: Callable[[], bool],
        progress: Callable[[float | None, int, str], None],
    ) -> None:
        self._clock = world.clock
        self._threads = world.threads
        self._plan = plan
        self._pattern = Pattern(plan.seed)
        self._state = state
        self._stop = stop
        self._progress = progress
        resumed = state.load()
        self.position, self.outcome = resumed or (Position(), Outcome())
        self.resumed = resumed is not None

    def round(self, round_: Round) -> None:
        """One round, or the rest of one. Raises Stopped."""
        position = self.position
        if position.phase == "write":
            if round_.writer is not None:
                self._write_all(round_.writer, round_)
            if round_.between is not None:
                round_.between()
            position.phase, position.next_file = round_.readings[0][0], 0
        labels = [label for label, _ in round_.readings]
        begin = labels.index(position.phase) if position.phase in labels else 0
        for index in range(begin, len(labels)):
            label, open_ = round_.readings[index]
            if position.phase != label:
                position.phase, position.next_file = label, 0
            place = open_()
            try:
                self._read_all(place, label, round_)
            finally:
                if place is not round_.writer:
                    place.close(remove=False)
        self.outcome.rounds += 1
        position.generation, position.phase, position.next_file = position.generation + 1, "write", 0
        self._state.save(position, self.outcome, now=True)

    def _checked(self) -> None:
        if self._stop():
            raise Stopped

    # ------------------------------------------------------------------------------------------------------ writing

    def _write_all(self, writer: Place, round_: Round) -> None:
        position, plan, outcome = self.position, self._plan, self.outcome
        half = plan.files // 2
        while position.next_file < plan.files:
            file = position.next_file
            kill = round_.half_way if file == half else None
            begun_s = self._clock.monotonic_s()
            self._write(writer, file, round_, kill)
            outcome.write_seconds += self._clock.monotonic_s() - begun_s
            outcome.written_files += 1
            outcome.written_bytes += plan.size_bytes
            position.next_file += 1
            self._state.save(position, outcome)
            self._progress(
                position.next_file / plan.files, outcome.written_bytes, f"writing round {position.generation}"
            )

    def _write(self, writer: Place, file: int, round_: Round, kill: Callable[[], None] | None) -> None:
        """Write a file. With a kill in the middle of it, and after one, again until it is there."""
        generation, plan = self.position.generation, self._plan
        pieces = -(-plan.size_bytes // PIECE_BYTES)

        def content(offset_bytes: int, length_bytes: int) -> bytearray:
            nonlocal kill
            self._checked()
            if kill is not None and offset_bytes // PIECE_BYTES == pieces // 2:
                at_once, kill = kill, None
                at_once()
            return self._pattern.piece(file, generation, offset_bytes, length_bytes)

        may_fail = kill is not None
        killing: ThreadHandle | None = None
        if kill is not None and round_.objects:  # an object is handed over whole: what is killed is so beside that
            killing, kill = self._threads.start(kill, name="verify-kill"), None
        try:
            self._try_to_write(writer, plan.name(file, generation, objects=round_.objects), content, may_fail=may_fail)
        finally:
            if killing is not None:
                killing.join()

    def _try_to_write(self, writer: Place, name: str, content: Content, *, may_fail: bool) -> None:
        for attempt in range(_WRITE_TRIES):
            try:
                writer.write(name, self._plan.size_bytes, content)
                return
            except CurvfsError:
                if not may_fail or attempt == _WRITE_TRIES - 1:
                    raise
            self.outcome.rewritten_files += 1
            self._clock.block(_RETRY_S)

    # ------------------------------------------------------------------------------------------------------ reading

    def _read_all(self, place: Place, label: str, round_: Round) -> None:
        position, plan, outcome = self.position, self._plan, self.outcome
        tally = outcome.readings.setdefault(label, Tally())
        while position.next_file < plan.files:
            file = position.next_file
            name = plan.name(file, position.generation, objects=round_.objects)
            begun_s = self._clock.monotonic_s()
            failure = self._read(place, name, file, label)
            tally.seconds += self._clock.monotonic_s() - begun_s
            tally.files += 1
            tally.bytes += plan.size_bytes
            if failure is None:
                tally.held += 1
            else:
                outcome.failed += 1
                if len(outcome.failures) < _SHOWN:
                    outcome.failures.append(failure)
            position.next_file += 1
            self._state.save(position, outcome)
            self._progress(position.next_file / plan.files, tally.bytes, f"reading by {label}, {outcome.failed} bad")

    def _read(self, place: Place, name: str, file: int, label: str) -> Failure | None:
        """Read a file; its first wrong byte, or what else is wrong with it."""
        generation, size = self.position.generation, self._plan.size_bytes
        found: list[Failure] = []

        def check(got: memoryview, offset_bytes: int) -> None:
            self._checked()
            if found or offset_bytes >= size:
                return
            wrong = self._pattern.wrong(got[: size - offset_bytes], file, generation, offset_bytes)
            if wrong is not None:
                found.append(
                    Failure(
                        name,
                        label,
                        generation,
                        wrong.sentence(),
                        wrong.offset_bytes,
                        wrong.expected.hex(),
                        wrong.got.hex(),
                    )
                )

        try:
            length = place.read(name, check)
        except CurvfsError as error:
            return Failure(name, label, generation, str(error))
        if found:
            return found[0]
        if length != size:
            return Failure(name, label, generation, f"it is {length} bytes long, and {size} were written", length)
        return None

    def remove_all(self, place: Place, *, objects: bool) -> None:
        """Remove what was written, of this round and of the last one."""
        last = self.position.generation
        for generation in range(max(0, last - 1), last + 1) if objects else (last,):
            for file in range(self._plan.files):
                place.remove(self._plan.name(file, generation, objects=objects))


def report_lines(outcome: Outcome, plan: Plan) -> Iterator[str]:
    """For people."""
    if outcome.written_files:
        speed = outcome.written_bytes / outcome.write_seconds if outcome.write_seconds else 0.0
        again = f", {outcome.rewritten_files} times again after a kill" if outcome.rewritten_files else ""
        yield (
            f"Written: {outcome.written_files:,} files of {format_size(plan.size_bytes)} "
            f"({format_size(speed)}/s){again}."
        )
    for what, count in outcome.kills.items():
        yield f"Killed: the {what}, {count} times."
    for label, tally in outcome.readings.items():
        speed = tally.bytes / tally.seconds if tally.seconds else 0.0
        yield f"Read by {label}: {tally.held:,} of {tally.files:,} hold ({format_size(speed)}/s)."
    for failure in outcome.failures:
        yield f"WRONG: {failure.file}, read by {failure.reading} in round {failure.round}: {failure.problem}."
    if outcome.failed > len(outcome.failures):
        yield f"... and {outcome.failed - len(outcome.failures):,} more."
    read = sum(tally.bytes for tally in outcome.readings.values())
    verdict = "PASS" if outcome.passed else "FAIL"
    if not outcome.finished:
        verdict = f"INTERRUPTED, {'nothing wrong up to here' if outcome.passed else 'and wrong already'}"
    yield f"Verdict: {verdict} (seed {plan.seed}, {outcome.rounds} rounds, {format_size(read)} read back)."
