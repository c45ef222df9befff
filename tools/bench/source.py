"""Which calls a job makes, in which order, and when each is meant to begin.

A call's latency counts from when it was *meant* to begin. With a rate that is a fixed timetable, so a storage that
stalls makes the calls behind the stall late, and they are counted as late: no coordinated omission. Without a rate a
call is meant to begin when its thread is free.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from curvfs.world import Random, World
from tools.bench.jobfile import Job


@dataclass(frozen=True, slots=True)
class File:
    """One file of a job: its name in the engine's terms, and the bytes of it that are used."""

    name: str
    size_bytes: int


@dataclass(frozen=True, slots=True)
class Call:
    """One call. ``due_s``: when it is meant to begin, on the world's clock; None: now. ``pages``: page numbers of a
    request (``kind`` is ``request``)."""

    kind: str
    file: int = 0
    offset_bytes: int = 0
    length_bytes: int = 0
    due_s: float | None = None
    pages: tuple[int, ...] = ()


class Shuffle:
    """A permutation of ``range(count)`` from a seed, without a table: a Feistel network that walks its cycles."""

    def __init__(self, count: int, seed: int) -> None:
        self._count = count
        bits = max(2, (count - 1).bit_length())
        self._half = (bits + 1) // 2
        self._mask = (1 << self._half) - 1
        word = seed * 0x9E3779B97F4A7C15
        self._keys = [(word + 0x632BE59BD9B4E019 * round_) & (2**64 - 1) for round_ in range(1, 5)]

    def __getitem__(self, index: int) -> int:
        while True:
            left, right = index >> self._half, index & self._mask
            for key in self._keys:
                mixed = ((right + key) * 0xBF58476D1CE4E5B9) & (2**64 - 1)
                left, right = right, left ^ ((mixed ^ (mixed >> 29)) >> 17 & self._mask)
            index = left << self._half | right
            if index < self._count:
                return index


class Zipf:
    """Numbers below ``count``, 0 the most frequent: P(k) ~ 1 / (k + 1) ** theta."""

    def __init__(self, count: int, theta: float, random: Random) -> None:
        total = 0.0
        self._cumulative = []
        for index in range(count):
            total += (index + 1) ** -theta
            self._cumulative.append(total)
        self._random = random
        self._population = range(count)

    def __call__(self) -> int:
        return self._random.choices(self._population, cum_weights=self._cumulative)[0]


#: More items than this are drawn from as many groups.
_ZIPF_ITEMS = 1 << 16


class IoSource:
    """The calls of a plain job, handed out one at a time to its threads."""

    def __init__(self, world: World, job: Job, files: Sequence[File], number: int) -> None:
        self._clock = world.clock
        self._lock = world.threads.lock()
        self._job = job
        self._files = files
        self._random = Random(job["randseed"] * 1_000_003 + number)
        self._calls = self._generate()
        self._begin_s = 0.0
        self._pause_until_s = 0.0
        self._issued = 0
        self._due_s = {"read": 0.0, "write": 0.0, "lookup": 0.0}
        self.stopped = False
        self.total_bytes = self._planned_bytes()

    def _planned_bytes(self) -> int:
        job = self._job
        whole = sum(file.size_bytes for file in self._files)
        return int(job["io_size"] or whole * job["loops"])

    def begin(self) -> None:
        """The clock of runtime, rate and time starts now."""
        self._begin_s = self._clock.monotonic_s()
        self._due_s = dict.fromkeys(self._due_s, self._begin_s)

    def stop(self) -> None:
        self.stopped = True

    def next(self) -> Call | None:
        """The next call, or None at the end."""
        with self._lock:
            if self.stopped:
                return None
            job, now_s = self._job, self._clock.monotonic_s()
            if job["runtime"] is not None and now_s - self._begin_s >= job["runtime"] + job["ramp_time"]:
                return None
            if job["number_ios"] is not None and self._issued >= job["number_ios"]:
                return None
            call = next(self._calls, None)
            if call is None:
                return None
            due_s = self._timetable(call)
            if job["thinktime"] and self._issued and self._issued % job["thinktime_blocks"] == 0:
                self._pause_until_s = now_s + job["thinktime"]
            self._issued += 1
            if due_s is None and self._pause_until_s > now_s:
                due_s = self._pause_until_s
            return call if due_s is None else Call(call.kind, call.file, call.offset_bytes, call.length_bytes, due_s)

    def done(self, call: Call) -> None:
        """Calls of a plain job do not wait for each other."""

    def _timetable(self, call: Call) -> float | None:
        side = 1 if call.kind == "write" else 0
        rate, rate_iops = self._job["rate"][side], self._job["rate_iops"][side]
        if rate is None and rate_iops is None:
            return None
        due_s = self._due_s[call.kind]
        step_s = max(call.length_bytes / rate if rate else 0.0, 1 / rate_iops if rate_iops else 0.0)
        if self._job["rate_process"] == "poisson":
            step_s = self._random.expovariate(1 / step_s)
        self._due_s[call.kind] = due_s + step_s
        return due_s

    def _generate(self) -> Iterator[Call]:
        job = self._job
        left = None if job["time_based"] else self.total_bytes
        round_ = 0
        while left is None or left > 0:
            empty = True
            for call in self._one_pass(round_):
                empty = False
                if left is not None:
                    if left <= 0:
                        return
                    left -= call.length_bytes
                yield call
            round_ += 1
            if empty:
                return

    def _kind(self) -> str:
        if self._job["rw"] == "kvlookup":
            return "lookup"
        if not self._job.mixed:
            return "write" if self._job.writes else "read"
        return "read" if self._random.random() * 100 < self._job["rwmixread"] else "write"

    def _length(self, kind: str) -> int:
        split = self._job.sizes[1 if kind == "write" else 0]
        if len(split) == 1:
            return split[0][0]
        return self._random.choices([size for size, _ in split], weights=[percent for _, percent in split])[0]

    def _one_pass(self, round_: int) -> Iterator[Call]:
        if not self._job.random:
            yield from self._sequential()
        elif self._job["norandommap"] or self._job["random_distribution"][0] != "random" or self._uneven():
            yield from self._anywhere()
        else:
            yield from self._shuffled(round_)

    def _uneven(self) -> bool:
        return len({size for split in self._job.sizes for size, _ in split}) > 1

    def _sequential(self) -> Iterator[Call]:
        for index, file in enumerate(self._files):
            at = 0
            while at < file.size_bytes:
                kind = self._kind()
                length = min(self._length(kind), file.size_bytes - at)
                yield Call(kind, index, at, length)
                at += length

    def _blocks(self) -> tuple[int, list[int]]:
        """The smallest block size, and for each file the number of its blocks before it."""
        unit = min(size for split in self._job.sizes for size, _ in split)
        before, total = [], 0
        for file in self._files:
            before.append(total)
            total += file.size_bytes // unit
        return unit, [*before, total]

    def _shuffled(self, round_: int) -> Iterator[Call]:
        unit, before = self._blocks()
        order = Shuffle(before[-1], self._random.getrandbits(32) + round_) if before[-1] else ()
        for number in range(before[-1]):
            yield self._block(order[number], unit, before, unit)

    def _anywhere(self) -> Iterator[Call]:
        unit, before = self._blocks()
        total = before[-1]
        name, theta = self._job["random_distribution"]
        draw: Callable[[], int]
        if name == "zipf":
            groups = min(total, _ZIPF_ITEMS)
            zipf, spread = Zipf(groups, theta, self._random), Shuffle(groups, self._job["randseed"])
            per_group = total // groups if groups else 0

            def draw() -> int:
                return spread[zipf()] * per_group + self._random.randrange(per_group)
        else:

            def draw() -> int:
                return self._random.randrange(total)

        moved = 0
        whole = sum(file.size_bytes for file in self._files)
        while total and moved < whole:
            kind = self._kind()
            call = self._block(draw(), unit, before, self._length(kind), kind)
            moved += call.length_bytes
            yield call

    def _block(self, number: int, unit: int, before: list[int], length: int, kind: str | None = None) -> Call:
        low, high = 0, len(before) - 1
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if before[middle] <= number else (low, middle)
        offset = (number - before[low]) * unit
        length = min(length, self._files[low].size_bytes // unit * unit - offset)
        return Call(kind or self._kind(), low, offset, length)


def plan_files(job: Job, number: int, existing_bytes: Callable[[str], int | None]) -> list[File]:
    """The files of one of the job's processes. ``existing_bytes``: a file's size where it is there.

    Raises nothing; a file of 0 bytes means that nobody said how long it is."""
    names = job["filename"].split(":") if job["filename"] else []
    count = len(names) or job["nrfiles"]
    smallest = min(size for split in job.sizes for size, _ in split)
    random = Random(job["randseed"] + number)
    files = []
    left = job["size"]
    for index in range(count):
        name = names[index] if names else f"{job.name}.{number}.{index}"
        if job["filesize"] is not None:
            low, high = job["filesize"]
            size = random.randrange(low, high + 1) // smallest * smallest or smallest
            if left is not None:
                size = min(size, left)
                left -= size
        elif job["size"] is not None:
            size = job["size"] // count // smallest * smallest or smallest
        else:
            size = existing_bytes(name) or 0
        if size:
            files.append(File(name, size))
    return files
