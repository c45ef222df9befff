"""One process of a job: ``python -m tools.bench.child``.

The first line on stdin is the job; then ``go`` begins it, ``stop`` ends it early, ``keep`` or ``remove`` ends the
process, and so does the end of stdin (with ``remove``): a parent that died leaves nothing behind. Every line on stdout
is a JSON object: ``ready``, ``progress``, and at last ``result`` or ``failed``.
"""

from __future__ import annotations

import errno
import json
import os
import resource
import signal
import sys
import traceback
from collections import defaultdict
from collections.abc import Callable
from functools import partial
from typing import Any, Protocol

from curvfs.errors import CurvfsError
from curvfs.world import World
from tools.bench.checker import content_of
from tools.bench.engines import open_target
from tools.bench.engines.base import Slot, Target
from tools.bench.jobfile import Job
from tools.bench.latency import Latency
from tools.bench.requests import PrefixSource, TraceSource
from tools.bench.source import Call, IoSource, plan_files

#: Bandwidth and calls are averaged over as long.
BUCKET_S = 0.5
_PROGRESS_S = 0.5
#: A thread that waits for its call's time looks so often whether all is over.
_NAP_S = 0.1
#: A thread whose call came back gets the interpreter as soon as this: what it waits longer would count as latency.
_SWITCH_S = 0.0002
_DEPTHS = (1, 2, 4, 8, 16, 32)


class Source(Protocol):
    stopped: bool
    total_bytes: int

    def begin(self) -> None: ...

    def stop(self) -> None: ...

    def next(self) -> Call | None: ...

    def done(self, call: Call) -> None: ...


class _Series:
    """Calls of one kind as one thread saw them."""

    def __init__(self) -> None:
        self.service = Latency()
        self.latency = Latency()
        self.bytes = 0
        self.ios = 0
        self.buckets: dict[int, list[int]] = defaultdict(lambda: [0, 0])


class Child:
    """Runs one job with ``iodepth`` threads."""

    def __init__(self, world: World, job: Job, number: int, say: Callable[[dict[str, Any]], None]) -> None:
        self._world = world
        self._clock = world.clock
        self._job = job
        self._say = say
        content = content_of(job)
        self._content = content
        self.files = [] if job.requests else plan_files(job, number, lambda name: _length(world, job, name))
        if not self.files and not job.requests:
            raise CurvfsError(f"The files of job {job.name} have no length; give size= or filesize=.")
        self._source: Source
        if job["rw"] == "prefix":
            self._source = PrefixSource(world, job, number)
        elif job["rw"] == "trace":
            self._source = TraceSource(world, job, number)
        else:
            self._source = IoSource(world, job, self.files, number)
        self.target: Target = open_target(world, job, number, self.files, content)
        self._lock = world.threads.lock()
        self._under_way = 0
        self._depths = dict.fromkeys(_DEPTHS, 0)
        self._deep = 0
        self._error: tuple[int, str] | None = None
        self._written: dict[tuple[int, int], int] = {}
        self._threads_series: list[dict[str, _Series]] = []
        self._moved = [0]
        self._begin_s = 0.0
        self._counted_from_s = 0.0
        self.stopped = False

    def stop(self) -> None:
        self.stopped = True
        self.target.stopped = True
        self._source.stop()

    @property
    def total_bytes(self) -> int:
        return self._source.total_bytes

    def run(self) -> dict[str, Any]:
        """All of it; the result message."""
        job, clock = self._job, self._clock
        delay_until_s = clock.monotonic_s() + job["startdelay"]
        while (left_s := delay_until_s - clock.monotonic_s()) > 0 and not self.stopped:
            clock.block(min(left_s, _NAP_S))
        before = resource.getrusage(resource.RUSAGE_SELF)
        self._begin_s = clock.monotonic_s()
        self._counted_from_s = self._begin_s + job["ramp_time"]
        self._moved = [0] * job["iodepth"]
        self._threads_series = [defaultdict(_Series) for _ in range(job["iodepth"])]
        slots = [Slot(self.target.buffer_bytes(), partial(self._note, index)) for index in range(job["iodepth"])]
        self._source.begin()
        threads = [
            self._world.threads.start(partial(self._work, index, slot), name=f"bench-{index}")
            for index, slot in enumerate(slots)
        ]
        while any(thread.is_alive() for thread in threads):
            for thread in threads:
                thread.join(_PROGRESS_S)
                if thread.is_alive():
                    break
            self._say({"type": "progress", "bytes": sum(self._moved), "seconds": clock.monotonic_s() - self._begin_s})
        if self._error is None:
            self._guarded(self.target.finish)
        ended_s = clock.monotonic_s()
        after = resource.getrusage(resource.RUSAGE_SELF)
        proof: dict[str, Any] = {}
        if self._error is None:
            proof = self.target.proof()
        verified = 0
        if self._error is None and job["verify"] and job["do_verify"] and self._written:
            verified = self._read_back()
        return self._result(max(1e-6, ended_s - self._counted_from_s), ended_s, before, after, proof, verified)

    # ------------------------------------------------------------------------------------------------------ threads

    def _work(self, index: int, slot: Slot) -> None:
        self._guarded(partial(self._calls, index, slot))

    def _note(self, index: int, kind: str, seconds: float, size: int) -> None:
        """Something that was part of a call."""
        self._record(index, kind, self._clock.monotonic_s() - seconds, seconds, seconds, size)

    def _guarded(self, function: Callable[[], object]) -> None:
        """Run it; its first failure is the job's, and ends it."""
        try:
            function()
        except CurvfsError as error:
            self._fail(error.errno_, str(error))
        except OSError as error:
            where = f"{error.filename}: " if error.filename else ""
            self._fail(error.errno or errno.EIO, f"{where}{error.strerror or error}.")
        except Exception as error:  # a thread that ended without a word would pass for one that had no more to do
            self._fail(errno.EIO, _unexpected(error))

    def _fail(self, number: int, message: str) -> None:
        with self._lock:
            if self._error is None:
                self._error = (number, message)
        self._source.stop()

    def _calls(self, index: int, slot: Slot) -> None:
        clock, target, verify = self._clock, self.target, bool(self._job["verify"])
        while (call := self._source.next()) is not None:
            if call.due_s is not None and not self._wait(call.due_s):
                return
            view = slot.view[: call.length_bytes]
            if call.kind == "write":
                name = self.files[call.file].name if self._job["ioengine"] != "kvstore" else "objects"
                self._content.fill(view, name, call.offset_bytes)
            self._depth(1)
            begun_s = clock.monotonic_s()
            try:
                moved = target.perform(call, slot)
            finally:
                ended_s = clock.monotonic_s()
                self._depth(-1)
            since_s = ended_s - (begun_s if call.due_s is None else call.due_s)
            self._record(index, call.kind, begun_s, ended_s - begun_s, since_s, moved)
            self._moved[index] += moved
            if verify:
                self._verify(call, view)
            target.after(call)
            self._source.done(call)

    def _verify(self, call: Call, view: memoryview) -> None:
        if call.kind == "read":
            name = self.files[call.file].name if self._job["ioengine"] != "kvstore" else "objects"
            self._content.check(view, name, call.offset_bytes)
        elif not self._job.mixed:
            self._written[call.file, call.offset_bytes] = call.length_bytes

    def _wait(self, due_s: float) -> bool:
        while (left_s := due_s - self._clock.monotonic_s()) > 0:
            if self.stopped or self._error is not None:
                return False
            self._clock.block(min(left_s, _NAP_S))
        return True

    def _depth(self, change: int) -> None:
        with self._lock:
            self._under_way += change
            if change > 0:
                depth = self._under_way
                if depth >= 64:
                    self._deep += 1
                else:
                    self._depths[1 << (depth.bit_length() - 1)] += 1

    def _record(self, index: int, kind: str, begun_s: float, service_s: float, since_s: float, size: int) -> None:
        if begun_s < self._counted_from_s:
            return
        series = self._threads_series[index][kind]
        series.service.record_ns(round(service_s * 1e9))
        series.latency.record_ns(round(since_s * 1e9))
        series.ios += 1
        series.bytes += size
        bucket = series.buckets[int((begun_s + service_s - self._counted_from_s) / BUCKET_S)]
        bucket[0] += size
        bucket[1] += 1

    def _read_back(self) -> int:
        """Read what was written and check it; the blocks that hold."""
        held = 0
        slot = Slot(self.target.buffer_bytes(), lambda kind, seconds, size: None)

        def check() -> None:
            nonlocal held
            for (file, offset), length in self._written.items():
                if self.stopped:
                    return
                call = Call("read", file, offset, length)
                self.target.perform(call, slot)
                name = self.files[file].name if self._job["ioengine"] != "kvstore" else "objects"
                self._content.check(slot.view[:length], name, offset)
                held += 1

        self._guarded(check)
        return held

    # ------------------------------------------------------------------------------------------------------- result

    def _result(
        self,
        runtime_s: float,
        ended_s: float,
        before: resource.struct_rusage,
        after: resource.struct_rusage,
        proof: dict[str, Any],
        verified: int,
    ) -> dict[str, Any]:
        kinds: dict[str, Any] = {}
        for kind in sorted({kind for series in self._threads_series for kind in series}):
            service, latency = Latency(), Latency()
            total_bytes = ios = 0
            buckets: dict[int, list[int]] = defaultdict(lambda: [0, 0])
            for by_kind in self._threads_series:
                if kind not in by_kind:
                    continue
                series = by_kind[kind]
                service.add(series.service)
                latency.add(series.latency)
                total_bytes += series.bytes
                ios += series.ios
                for number, (size, calls) in series.buckets.items():
                    buckets[number][0] += size
                    buckets[number][1] += calls
            kinds[kind] = {
                "service": service.message(),
                "latency": latency.message(),
                "bytes": total_bytes,
                "ios": ios,
                "buckets": sorted([number, *values] for number, values in buckets.items()),
            }
        issued = sum(self._depths.values()) + self._deep
        share = 100 / issued if issued else 0.0
        whole_s = max(1e-6, ended_s - self._begin_s)
        number, message = self._error or (0, "")
        return {
            "type": "result",
            "kinds": kinds,
            "runtime_ms": max(1, round(runtime_s * 1000)),
            "usr_cpu": (after.ru_utime - before.ru_utime) / whole_s * 100,
            "sys_cpu": (after.ru_stime - before.ru_stime) / whole_s * 100,
            "ctx": after.ru_nvcsw - before.ru_nvcsw,
            "majf": after.ru_majflt - before.ru_majflt,
            "minf": after.ru_minflt - before.ru_minflt,
            "iodepth_level": {
                **{str(depth): count * share for depth, count in self._depths.items()},
                ">=64": self._deep * share,
            },
            "proof": proof,
            "verified_blocks": verified,
            "error": number,
            "message": message,
            "interrupted": self.stopped,
        }


def _length(world: World, job: Job, name: str) -> int | None:
    """Bytes of a file that is there, for jobs that name files and no size."""
    if job["ioengine"] != "mount":
        return None
    try:
        return world.disk.stat(os.path.join(job["directory"], name)).st_size
    except OSError:
        return None


def _unexpected(error: Exception) -> str:
    last = traceback.extract_tb(error.__traceback__)[-1]
    return f"Unexpected {type(error).__name__} at {last.filename}:{last.lineno}: {error}."


def main() -> int:
    """Talk to the parent; see above."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent hears it, and says so
    sys.setswitchinterval(_SWITCH_S)
    world = World.real()
    lock = world.threads.lock()

    def say(message: dict[str, Any]) -> None:
        with lock:
            try:
                print(json.dumps(message), flush=True)
            except BrokenPipeError:
                pass

    request = json.loads(sys.stdin.readline())
    heard = {name: world.threads.event() for name in ("go", "end")}
    remove = True
    child: Child | None = None

    def listen() -> None:
        nonlocal remove
        for line in sys.stdin:
            word = line.strip()
            if word == "go":
                heard["go"].set()
            elif word == "stop" and child is not None:
                child.stop()
                heard["go"].set()
            elif word in ("keep", "remove"):
                remove = word == "remove"
                break
        if child is not None:
            child.stop()
        heard["go"].set()
        heard["end"].set()

    code = 0
    try:
        child = Child(world, Job.from_message(request["job"]), request["number"], say)
        world.threads.start(listen, name="bench-listen")
        child.target.prepare()
        say({"type": "ready", "bytes": child.total_bytes})
        heard["go"].wait()
        say(child.run())
    except CurvfsError as error:
        say({"type": "failed", "message": str(error), "exit_code": error.exit_code})
        code = 1
    except OSError as error:
        where = f"{error.filename}: " if error.filename else ""
        say({"type": "failed", "message": f"{where}{error.strerror or error}.", "exit_code": 1})
        code = 1
    except Exception as error:
        say({"type": "failed", "message": _unexpected(error), "exit_code": 1})
        code = 1
    if child is not None:
        heard["end"].wait()
        try:
            child.target.close(remove=remove)
        except (CurvfsError, OSError) as error:
            print(f"curvfs bench: what the job made could not be removed: {error}", file=sys.stderr)
    return code


if __name__ == "__main__":
    sys.exit(main())
