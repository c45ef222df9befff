"""Requests as an inference engine makes them: shared prefixes and growing conversations, or a recorded trace."""

from __future__ import annotations

import json
from collections.abc import Iterator

from curvfs.world import Random, World
from tools.bench.jobfile import Job
from tools.bench.source import Call, Zipf
from tools.traces import read_trace

#: Page numbers of conversations begin behind those of prefixes.
_OWN_PAGES = 1 << 40


class _Talk:
    """One conversation: its pages up to now."""

    def __init__(self, number: int, prefix: int, job: Job) -> None:
        self.number = number
        self.pages = [prefix * job["prefix_pages"] + page for page in range(job["prefix_pages"])]
        self.turn = 0


class PrefixSource:
    """Conversations of several turns over a few shared prefixes. Every turn asks for all pages up to now and some new
    ones; a conversation's next turn comes after the last one was answered."""

    def __init__(self, world: World, job: Job, number: int) -> None:
        self._clock = world.clock
        self._lock = world.threads.lock()
        self._job = job
        self._number = number
        self._random = Random(job["randseed"] * 1_000_003 + number)
        self._prefix = Zipf(job["prefixes"], job["zipf"], self._random)
        self._begun = 0
        self._idle: list[_Talk] = []
        self._busy: dict[int, _Talk] = {}
        self._begin_s = self._due_s = 0.0
        self.stopped = False
        pages = sum(job["prefix_pages"] + (turn + 1) * job["turn_pages"] for turn in range(job["turns"]))
        self.total_bytes = pages * job["conversations"] * job["bs"][0]

    def begin(self) -> None:
        self._begin_s = self._due_s = self._clock.monotonic_s()

    def stop(self) -> None:
        self.stopped = True

    def next(self) -> Call | None:
        """The next turn of some conversation."""
        job = self._job
        with self._lock:
            now_s = self._clock.monotonic_s()
            over = job["runtime"] is not None and now_s - self._begin_s >= job["runtime"] + job["ramp_time"]
            if self.stopped or over:
                return None
            fresh = job["time_based"] or self._begun < job["conversations"]
            if fresh and len(self._idle) + len(self._busy) < 2 * job["iodepth"]:
                self._idle.append(_Talk(self._begun, self._prefix(), job))
                self._begun += 1
            if not self._idle:
                return None
            talk = self._idle.pop(self._random.randrange(len(self._idle)))
            first = _OWN_PAGES + (talk.number * job["turns"] + talk.turn) * job["turn_pages"]
            talk.pages += range(first, first + job["turn_pages"])
            talk.turn += 1
            self._busy[talk.number] = talk
            due_s = None
            if job["rate_iops"][0]:
                step_s = 1 / job["rate_iops"][0]
                due_s, self._due_s = (
                    self._due_s,
                    self._due_s
                    + (self._random.expovariate(1 / step_s) if job["rate_process"] == "poisson" else step_s),
                )
            length = len(talk.pages) * job["bs"][0]
            return Call("request", talk.number, 0, length, due_s, tuple(talk.pages))

    def done(self, call: Call) -> None:
        """A turn was answered."""
        with self._lock:
            talk = self._busy.pop(call.file)
            if talk.turn < self._job["turns"]:
                self._idle.append(talk)


class TraceSource:
    """Requests of a trace, at the times it says or as fast as possible. Processes of one job share them out."""

    def __init__(self, world: World, job: Job, number: int) -> None:
        self._clock = world.clock
        self._lock = world.threads.lock()
        self._job = job
        self._speed: float = job["trace_speed"]
        requests = sorted(read_trace(job["trace"], world)[: job["trace_limit"]], key=lambda one: one.timestamp_s)
        self._requests = requests[number :: job["numjobs"]]
        self._first_s = requests[0].timestamp_s
        self._calls = iter(self._requests)
        self._begin_s = 0.0
        self.stopped = False
        self.total_bytes = sum(len(request.blocks) for request in self._requests) * job["bs"][0]

    def begin(self) -> None:
        self._begin_s = self._clock.monotonic_s()

    def stop(self) -> None:
        self.stopped = True

    def next(self) -> Call | None:
        """The next request of the trace."""
        with self._lock:
            runtime = self._job["runtime"]
            over = runtime is not None and self._clock.monotonic_s() - self._begin_s >= runtime + self._job["ramp_time"]
            request = None if self.stopped or over else next(self._calls, None)
            if request is None:
                return None
            since_s = request.timestamp_s - self._first_s
            due_s = self._begin_s + since_s / self._speed if self._speed else None
            return Call("request", 0, 0, len(request.blocks) * self._job["bs"][0], due_s, request.blocks)

    def done(self, call: Call) -> None:
        """Requests of a trace do not wait for each other."""


def generated_trace(seed: int, *, requests: int, mean_gap_ms: float = 50.0) -> Iterator[str]:
    """Lines of a made-up trace of the same format: conversations over shared prefixes, arriving at random."""
    random = Random(seed)
    prefix = Zipf(8, 1.2, random)
    talks: list[list[int]] = []
    fresh, now_ms = 1000, 0.0
    for _ in range(requests):
        now_ms += random.expovariate(1 / mean_gap_ms)
        if talks and random.random() < 0.6:
            pages = talks[random.randrange(len(talks))]
        else:
            first = prefix()
            pages = [0, *range(1 + 4 * first, 5 + 4 * first)]
            talks.append(pages)
        grown = random.randrange(1, 4)
        pages += range(fresh, fresh + grown)
        fresh += grown
        yield json.dumps(
            {
                "timestamp": int(now_ms),
                "input_length": 512 * len(pages) - random.randrange(512),
                "output_length": random.randrange(1, 500),
                "hash_ids": pages,
            }
        )
