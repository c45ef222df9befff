"""Job files and job options: fio's meaning, and refusals that say where and what."""

from __future__ import annotations

import itertools
import os
import shutil
import subprocess
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from curvfs.errors import UsageError
from curvfs.world import Random, World
from tools.bench.jobfile import Job, jobs_from_words, parse_job_file, read_job_files
from tools.bench.options import OPTIONS
from tools.bench.requests import PrefixSource, TraceSource, generated_trace
from tools.bench.source import Call, File, IoSource, Shuffle, Zipf, plan_files

JOBS = Path(__file__).parents[2] / "tools" / "jobs"


def one(*words: str) -> Job:
    (job,) = jobs_from_words(["--directory=/d", "--size=1m", *words])
    return job


def calls(job: Job, files: list[File] | None = None, number: int = 0) -> list[Call]:
    source = IoSource(World.real(), job, files or plan_files(job, number, lambda name: None), number)
    source.begin()
    found = []
    while (call := source.next()) is not None and len(found) < 100_000:
        found.append(call)
    return found


def test_global_sections_hold_for_the_jobs_behind_them() -> None:
    text = """
    ; a comment
    [global]
    directory=/d
    bs=64k
    direct=1
    [first]
    rw=write
    size=1m
    [global]
    bs=4k
    [second]
    size=2m
    direct=0
    stonewall
    """
    first, second = parse_job_file(text, "x.fio")
    assert (first.name, first["rw"], first["bs"], first["direct"], first["stonewall"]) == (
        "first",
        "write",
        (65536, 65536),
        True,
        False,
    )
    assert (second["rw"], second["bs"], second["direct"], second["stonewall"]) == ("read", (4096, 4096), False, True)
    assert first.global_given == {"directory": "/d", "bs": "64k", "direct": "1"}
    assert second.given == {"name": "second", "size": "2m", "direct": "0", "stonewall": ""}


def test_variables_of_the_environment_are_expanded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WHERE", "/somewhere")
    (job,) = parse_job_file("[a]\ndirectory=${WHERE}/x\nsize=1m\n", "x.fio")
    assert job["directory"] == "/somewhere/x"
    with pytest.raises(UsageError, match=r"x.fio:2: the environment has no variable NOWHERE"):
        parse_job_file("[a]\ndirectory=${NOWHERE}\nsize=1m\n", "x.fio")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[a]\nbs=4k\niodeth=4\n", r"x.fio:3: curvfs bench has no option 'iodeth'; did you mean iodepth\?"),
        ("[a]\nzonemode=zbd\n", "x.fio:2: curvfs bench has no option 'zonemode'; curvfs bench --options lists"),
        ("[a]\nrw=trim\n", "x.fio:2: rw=trim: 'trim' is none of read"),
        ("[a]\nbs=0\n", "x.fio:2: bs=0: '0' is not a size"),
        ("[a]\nbs=4x\n", "x.fio:2: bs=4x: '4x' is not a size"),
        ("[a]\niodepth=0\n", "x.fio:2: iodepth=0: 0 is out of range"),
        ("[a]\nruntime=soon\n", "x.fio:2: runtime=soon: 'soon' is not a time"),
        ("[a]\nbssplit=4k/60:64k/60\n", "x.fio:2: bssplit=.* do not add up to 100"),
        ("[a]\ndirect=yes\n", "x.fio:2: direct=yes: 'yes' is neither 0 nor 1"),
        ("[a]\nverify=crc7\n", "x.fio:2: verify=crc7"),
        ("[a]\nverify_pattern=0xzz\n", "x.fio:2: verify_pattern=0xzz"),
        ("[a]\nfilesize=2m-1m\n", "ends before it begins"),
        ("[a]\nrandom_distribution=pareto:1\n", "neither random nor zipf"),
        ("[a]\npercentile_list=101\n", "no list of up to 20 percentiles"),
        ("rw=read\n", r"x.fio:1: 'rw=read' stands before the first \[section\]"),
        ("[global]\nrw=read\n", "x.fio: there is no job in it"),
        ("", "x.fio: there is no job in it"),
        ("[a]\nsize=1m\n", "x.fio:1: job a: engine mount needs directory="),
        ("[a]\ndirectory=/d\n", "job a: it needs size= or filesize="),
        ("[a]\ndirectory=/d\nsize=1m\ntime_based\n", "time_based needs runtime"),
        ("[a]\ndirectory=/d\nsize=1k\n", "size=1024 holds no block of 4096 bytes"),
        ("[a]\ndirectory=/d\nsize=1m\nrw=kvget\n", "rw=kvget needs ioengine=kvstore"),
        ("[a]\ndirectory=/d\nsize=1m\ndirect=1\nbs=1000\n", "direct=1 needs block sizes"),
        ("[a]\nioengine=curvfs\nsize=1m\n", "engine curvfs needs url=curvine://"),
        ("[a]\nioengine=curvfs\nurl=curvine://h:1/\nsize=1m\ndirect=1\n", "the native client has no direct=1"),
        ("[a]\nioengine=kvstore\nurl=/d\nsize=1m\n", "engine kvstore needs url="),
        ("[a]\nioengine=kvstore\nurl=file:///d\nsize=1m\nbssplit=4k/100\n", "objects of one store have one size"),
        (
            "[a]\nioengine=kvstore\nurl=file:///d\nsize=1m\nrw=kvget\nkv_form=view\nverify=md5\n",
            "does not copy what it reads",
        ),
        ("[a]\nioengine=kvstore\nurl=file:///d\nfilesize=1m\nrw=kvget\n", "objects are as long as bs"),
        ("[a]\nioengine=kvstore\nurl=file:///d\nrw=trace\n", "rw=trace needs trace=FILE"),
        ("[a]\ndirectory=/d\nsize=1m\nbssplit=4k/50:8k/50\nverify=md5\n", "verify by checksum needs one block size"),
    ],
)
def test_what_cannot_be_is_named_with_its_line(text: str, said: str) -> None:
    with pytest.raises(UsageError, match=said):
        parse_job_file(text, "x.fio")


def test_job_files_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"nowhere\.fio cannot be read: No such file"):
        read_job_files([str(tmp_path / "nowhere.fio")], World.real().disk)
    (tmp_path / "x.fio").write_bytes(b"[\xff]\n")
    with pytest.raises(UsageError, match="is no text"):
        read_job_files([str(tmp_path / "x.fio")], World.real().disk)


def test_options_on_the_command_line_are_the_same() -> None:
    first, second = jobs_from_words(
        ["--directory=/d", "--size=1m", "--name=a", "--rw=randread", "--name=b", "--bs=8k,16k", "--time-based",
         "--runtime=2m", "--thinktime=500", "--rate=1m,2m"]
    )  # fmt: skip
    assert (first.name, first["rw"], first["bs"], first["directory"]) == ("a", "randread", (4096, 4096), "/d")
    assert (second["bs"], second["runtime"], second["thinktime"], second["rate"]) == (
        (8192, 16384),
        120.0,
        0.0005,
        (1 << 20, 2 << 20),
    )
    assert second["time_based"] is True
    with pytest.raises(UsageError, match="command line: curvfs bench has no option 'iodeth'"):
        jobs_from_words(["--iodeth=3"])


def test_engines_of_fio_for_files_mean_mount() -> None:
    assert one("--ioengine=libaio")["ioengine"] == "mount"
    with pytest.raises(UsageError, match="ioengine=rados"):
        one("--ioengine=rados")


def test_a_job_reaches_its_processes_unchanged() -> None:
    job = one("--rw=randrw", "--bssplit=4k/10:64k/:8k/", "--verify_pattern=0xabcd", "--rate=,1m", "--stonewall")
    again = Job.from_message(job.message())
    assert again.values == job.values


@pytest.mark.parametrize("path", sorted(JOBS.glob("*.fio")), ids=lambda path: path.stem)
def test_sample_job_files_are_understood(path: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("DIR", "/d")
    monkeypatch.setenv("URL", "curvine://h:1/")
    monkeypatch.setenv("TRACE", "/d/t.jsonl")
    jobs = read_job_files([str(path)], World.real().disk)
    assert jobs
    own = any(job["ioengine"] != "mount" for job in jobs)
    if shutil.which("fio") and not own:
        text = path.read_text()
        environ = {**os.environ, "DIR": str(tmp_path)}
        done = subprocess.run(
            ["fio", "--parse-only", str(path)], env=environ, capture_output=True, text=True, timeout=20, check=False
        )
        assert done.returncode == 0, (text, done.stderr)


def test_every_option_explains_itself() -> None:
    assert all(option.help for option in OPTIONS.values())


# ------------------------------------------------------------------------------------------------------------- calls


def test_sequential_calls_cover_every_file_in_order() -> None:
    job = one("--nrfiles=2", "--bs=256k")
    assert [(call.file, call.offset_bytes, call.length_bytes) for call in calls(job)] == [
        (0, 0, 262144), (0, 262144, 262144), (1, 0, 262144), (1, 262144, 262144),
    ]  # fmt: skip


def test_random_calls_touch_every_block_once() -> None:
    job = one("--rw=randwrite", "--nrfiles=3", "--size=3m")
    found = calls(job)
    assert len({(call.file, call.offset_bytes) for call in found}) == len(found) == 768
    assert [call.offset_bytes for call in found] != sorted(call.offset_bytes for call in found)
    assert calls(job) == found, "the same seed, the same calls"
    assert calls(one("--rw=randwrite", "--nrfiles=3", "--size=3m", "--randseed=2")) != found


@given(st.integers(1, 3000), st.integers(0, 1 << 40))
def test_a_shuffle_is_a_permutation(count: int, seed: int) -> None:
    shuffle = Shuffle(count, seed)
    assert sorted(shuffle[index] for index in range(count)) == list(range(count))


def test_mixed_loads_keep_their_share() -> None:
    found = calls(one("--rw=randrw", "--rwmixread=75", "--size=16m"))
    reads = sum(call.kind == "read" for call in found)
    assert 0.7 < reads / len(found) < 0.8
    assert {call.kind for call in found} == {"read", "write"}


def test_block_sizes_keep_their_shares() -> None:
    found = calls(one("--rw=randread", "--bssplit=4k/75:16k/25", "--size=16m"))
    small = sum(call.length_bytes == 4096 for call in found)
    assert 0.68 < small / len(found) < 0.82
    assert all(call.offset_bytes + call.length_bytes <= 16 << 20 for call in found)


def test_zipf_prefers_few_blocks() -> None:
    found = calls(one("--rw=randread", "--random_distribution=zipf:1.2", "--size=8m"))
    counts: dict[int, int] = {}
    for call in found:
        counts[call.offset_bytes] = counts.get(call.offset_bytes, 0) + 1
    hottest = sum(sorted(counts.values(), reverse=True)[:20])
    assert hottest > len(found) / 2
    zipf = Zipf(100, 1.2, Random(1))
    assert all(0 <= zipf() < 100 for _ in range(1000))


def test_limits_end_a_job() -> None:
    assert len(calls(one("--io_size=64k"))) == 16
    assert len(calls(one("--number_ios=5"))) == 5
    assert len(calls(one("--loops=2"))) == 512


def test_a_rate_is_a_timetable() -> None:
    job = one("--bs=64k", "--rate=1m")
    due = [call.due_s for call in calls(job)]
    gaps = [later - earlier for earlier, later in itertools.pairwise(due) if earlier and later]
    assert all(abs(gap - 1 / 16) < 1e-6 for gap in gaps) and len(gaps) == 15
    poisson = [call.due_s for call in calls(one("--bs=64k", "--rate_iops=16", "--rate_process=poisson"))]
    assert len({round((b or 0) - (a or 0), 6) for a, b in itertools.pairwise(poisson)}) > 10


def test_files_of_a_range_of_sizes_fit_into_the_size() -> None:
    job = one("--nrfiles=50", "--filesize=8k-64k", "--size=1m")
    files = plan_files(job, 0, lambda name: None)
    assert sum(file.size_bytes for file in files) <= 1 << 20
    assert len({file.size_bytes for file in files}) > 5
    assert files[1].name == "bench.0.1"
    named = plan_files(one("--filename=a:b"), 3, lambda name: None)
    assert [file.name for file in named] == ["a", "b"]


# ---------------------------------------------------------------------------------------------------------- requests


def requests(job: Job, number: int = 0) -> list[Call]:
    kind = PrefixSource if job["rw"] == "prefix" else TraceSource
    source = kind(World.real(), job, number)
    source.begin()
    found = []
    while (call := source.next()) is not None:
        found.append(call)
        source.done(call)
    return found


def kv(*words: str) -> Job:
    (job,) = jobs_from_words(["--ioengine=kvstore", "--url=file:///d", "--bs=64k", *words])
    return job


def test_conversations_grow_over_shared_prefixes() -> None:
    found = requests(kv("--rw=prefix", "--conversations=30", "--turns=4", "--prefixes=3", "--iodepth=4"))
    assert len(found) == 30 * 4
    by_talk: dict[int, list[Call]] = {}
    for call in found:
        by_talk.setdefault(call.file, []).append(call)
    for turns in by_talk.values():
        for before, after in itertools.pairwise(turns):
            assert after.pages[: len(before.pages)] == before.pages
            assert len(after.pages) == len(before.pages) + 2
    prefixes = [call.pages[:8] for call in found]
    assert len(set(prefixes)) <= 3


def test_a_trace_is_replayed_by_its_times(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text("\n".join(generated_trace(1, requests=40)))
    found = requests(kv("--rw=trace", f"--trace={path}", "--trace_speed=4"))
    assert len(found) == 40 and all(call.due_s is not None for call in found)
    gaps = [(b.due_s or 0) - (a.due_s or 0) for a, b in itertools.pairwise(found)]
    assert all(gap >= 0 for gap in gaps) and 0.1 < sum(gaps) < 2.0
    assert all(call.due_s is None for call in requests(kv("--rw=trace", f"--trace={path}", "--trace_speed=0")))
    shared = [requests(kv("--rw=trace", f"--trace={path}", "--numjobs=2", "--trace_limit=11"), n) for n in (0, 1)]
    assert [len(one_) for one_ in shared] == [6, 5]
    assert list(generated_trace(7, requests=5)) == list(generated_trace(7, requests=5))


def test_a_trace_that_is_none_is_named_with_its_line(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text('{"timestamp": 1, "input_length": 5, "output_length": 1, "hash_ids": [1]}\n{"timestamp": 1}\n')
    with pytest.raises(UsageError, match="Line 2 of"):
        requests(kv("--rw=trace", f"--trace={path}"))
