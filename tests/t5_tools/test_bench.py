"""``curvfs bench`` from the shell, against real directories, a real server and real KV objects."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, cast

import pytest
from t5_shell import Done, run, started, wait_for

from curvfs.world import World
from tools.__main__ import main
from tools.bench.requests import generated_trace
from tools.outfile import write_result

needs_fio = pytest.mark.skipif(shutil.which("fio") is None, reason="fio is not installed")


def bench(capsys: pytest.CaptureFixture[str], *words: str | Path, code: int = 0) -> Any:
    """Run it in this process; fio's JSON."""
    capsys.readouterr()
    found = main(["bench", "--json", *map(str, words)])
    captured = capsys.readouterr()
    assert found == code, captured.err
    return json.loads(captured.out)


def shell(*words: str | Path) -> Done:
    return run("bench", *words)


def left_in(directory: Path) -> list[str]:
    """Files, the empty directories of a KV prefix left out."""
    return sorted(str(path.relative_to(directory)) for path in directory.rglob("*") if path.is_file())


def test_a_job_file_becomes_a_report_for_people(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = tmp_path / "data"
    data.mkdir()
    job = tmp_path / "job.fio"
    job.write_text(
        "[global]\ndirectory=${DIR}\nsize=1m\nbs=16k\niodepth=2\n"
        "[write]\nrw=randwrite\nverify=md5\nfilename=both\n"
        "[read]\nstonewall\nrw=read\nfilename=both\nverify=md5\nnumjobs=2\ngroup_reporting\n"
    )
    png = tmp_path / "plot.png"
    report = tmp_path / "report.json"
    monkeypatch.setenv("DIR", str(data))
    done = shell(job, "--plot", "--png", png, "--output", report)
    assert (done.code, done.err) == (0, "")
    assert "write: (groupid=0, jobs=1): err= 0" in done.out and "read: (groupid=1, jobs=2): err= 0" in done.out
    assert "verify       : md5: 0 blocks checked, 64 read back too" in done.out
    assert "verify       : md5: 128 blocks checked, 0 read back too" in done.out
    assert "clat percentiles (" in done.out and "99.99th=[" in done.out
    assert "READ: bw=" in done.out and "WRITE: bw=" in done.out
    assert "direct I/O   : no: buffered, as asked; page cache" in done.out
    assert "read read: latency" in done.out and "█" in done.out
    assert png.read_bytes().startswith(b"\x89PNG")
    assert [one["jobname"] for one in json.loads(report.read_text())["jobs"]] == ["write", "read"]
    assert left_in(data) == ["both"], "as fio does, files are kept"


@needs_fio
def test_the_json_has_the_shape_of_fio(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--name=a", f"--directory={tmp_path}", "--rw=randrw", "--bs=4k", "--size=256k", "--iodepth=2"]
    ours = bench(capsys, *words, "--unlink=1")
    done = subprocess.run(
        ["fio", *words, "--ioengine=psync", "--output-format=json", "--unlink=1"],
        capture_output=True,
        text=True,
        check=True,
    )
    theirs = json.loads(done.stdout[done.stdout.index("{") :])

    def missing(mine: Any, other: Any, where: str) -> list[str]:
        if isinstance(other, dict) and isinstance(mine, dict):
            return [
                lack
                for name, value in other.items()
                for lack in (missing(mine[name], value, f"{where}/{name}") if name in mine else [f"{where}/{name}"])
            ]
        same = isinstance(mine, int | float) if isinstance(other, int | float) else type(mine) is type(other)
        return [] if same else [f"{where} is {mine!r}, and {other!r} there"]

    assert missing(ours | {"jobs": []}, theirs | {"jobs": []}, "") == []
    lacks = missing(ours["jobs"][0], theirs["jobs"][0], "job")
    assert [lack for lack in lacks if not lack.startswith("job/job options/")] == []
    job = ours["jobs"][0]
    assert job["read"]["total_ios"] + job["write"]["total_ios"] == 64
    assert job["read"]["io_bytes"] == 4096 * job["read"]["total_ios"]
    assert job["read"]["clat_ns"]["N"] == job["read"]["total_ios"]
    assert sum(job["iodepth_level"].values()) == pytest.approx(100)


def test_fio_plot_draws_our_reports(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("fio_plot")
    reports = tmp_path / "reports"
    reports.mkdir()
    for depth in (1, 2):
        report = bench(
            capsys, "--name=a", f"--directory={tmp_path}", "--rw=randread", "--bs=4k", "--size=256k",
            f"--iodepth={depth}", "--numjobs=1", "--unlink=1",
        )  # fmt: skip
        (reports / f"randread-{depth}-1.json").write_text(json.dumps(report))
    picture = tmp_path / "depths.png"
    done = subprocess.run(
        [
            Path(sys.executable).with_name("fio-plot"), "-i", reports, "-T", "curvfs", "-l", "-d", "1", "2", "-n", "1",
            "-r", "randread", "-o", picture,
        ],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        cwd=tmp_path,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_direct_io_is_proven(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--name=a", f"--directory={tmp_path}", "--rw=read", "--bs=64k", "--size=1m", "--unlink=1"]
    done = shell(*words, "--direct=1", "--json")
    if done.code == 3:
        pytest.skip(done.err)
    (proof,) = json.loads(done.out)["jobs"][0]["curvfs"]["direct"]
    assert (proof["direct"], proof["verdict"]) == (True, "nothing got into the page cache")
    assert proof["o_direct_flag"] and proof["page_cache_after_bytes"] == 0
    assert proof["device_read_bytes"] >= 1 << 20
    (proof,) = bench(capsys, *words)["jobs"][0]["curvfs"]["direct"]
    assert (proof["direct"], proof["o_direct_flag"]) == (False, False)
    assert proof["page_cache_after_bytes"] > 0


def test_direct_io_that_has_no_effect_is_not_claimed(capsys: pytest.CaptureFixture[str]) -> None:
    memory = Path("/dev/shm")
    if not memory.is_dir() or not os.access(memory, os.W_OK):
        pytest.skip("no tmpfs here")
    name = f"curvfs-bench-{os.getpid()}"
    words = [
        "--rw=read",
        "--bs=64k",
        "--size=256k",
        "--direct=1",
        "--unlink=1",
        f"--name={name}",
        "--directory=/dev/shm",
    ]
    done = shell(*words, "--json")
    if done.code == 3:
        assert "its file system does not take it" in done.err
    else:
        (proof,) = json.loads(done.out)["jobs"][0]["curvfs"]["direct"]
        assert proof["direct"] is None and "in the page cache as a whole" in proof["verdict"]
    assert not list(memory.glob(f"{name}*"))


def test_latency_counts_from_when_a_call_was_due(tmp_path: Path) -> None:
    """What was due while all stood still for a moment is late, though it was quick once it began."""
    process = started("bench", "--json", "--name=b", f"--directory={tmp_path}", "--rw=write", "--bs=4k", "--size=2000k",
                      "--rate_iops=250", "--unlink=1")  # fmt: skip
    written = tmp_path / "b.0.0"
    wait_for(lambda: written.exists() and written.stat().st_size > 40_000, what="the first writes")
    (child,) = children(process.pid)
    os.kill(child, signal.SIGSTOP)
    time.sleep(0.6)
    os.kill(child, signal.SIGCONT)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 0, err
    write = json.loads(out)["jobs"][0]["write"]
    late, service = write["lat_ns"]["percentile"], write["clat_ns"]["percentile"]
    assert late["90.000000"] > 100e6 > service["90.000000"], "150 of 500 calls were due while it stood still"


def test_delays_and_pauses_are_kept(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    job = tmp_path / "job.fio"
    job.write_text(
        f"[global]\ndirectory={tmp_path}\nsize=64k\nfilename=f\nunlink=1\n"
        "[ramp]\nrw=randread\ntime_based\nruntime=300ms\nramp_time=400ms\nstartdelay=300ms\n"
        "[think]\nrw=write\nnumber_ios=4\nthinktime=100ms\nstonewall\n"
    )
    begun_s = time.monotonic()
    ramp, think = bench(capsys, job)["jobs"]
    assert time.monotonic() - begun_s > 0.3 + 0.4 + 0.3 + 0.3
    assert 300 <= ramp["read"]["runtime"] < 650 and ramp["read"]["total_ios"] > 10
    assert think["write"]["total_ios"] == 4 and think["write"]["runtime"] >= 300
    assert think["write"]["lat_ns"]["mean"] < 50e6, "a pause is no latency"


def children(pid: int) -> list[int]:
    """Processes that this one started."""
    found = []
    for task in Path(f"/proc/{pid}/task").iterdir():
        found += [int(word) for word in (task / "children").read_text().split()]
    return found


def test_what_was_changed_on_disk_fails_the_job(tmp_path: Path) -> None:
    words = ["--name=a", f"--directory={tmp_path}", "--bs=4k", "--size=64k", "--verify=sha256"]
    assert shell(*words, "--rw=write").code == 0
    with (tmp_path / "a.0.0").open("r+b") as file:
        file.seek(20_000)
        file.write(b"!")
    done = shell(*words, "--rw=read")
    assert done.code == 1
    assert "error: a.0.0: the block at 16384 does not match its sha256 checksum." in done.out


def test_the_native_client(server: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    job = tmp_path / "job.fio"
    job.write_text(
        f"[global]\nioengine=curvfs\nurl={server.url}\ndirectory=bench\nsize=1m\nbs=64k\nverify=crc32\nunlink=1\n"
        "iodepth=2\n[w]\nrw=write\n[r]\nstonewall\nrw=randread\n[m]\nstonewall\nrw=randrw\n"
    )
    report = bench(capsys, job)
    write, read, mixed = report["jobs"]
    assert write["write"]["io_bytes"] == 1 << 20 and write["curvfs"]["verified_blocks"] == 16
    assert read["read"]["total_ios"] == 16 == mixed["read"]["total_ios"] + mixed["write"]["total_ios"]
    from curvfs.api import SyncFileSystem

    with SyncFileSystem.connect(server.url) as fs:
        assert fs.list("/bench") == []


def test_kv_objects(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    job = tmp_path / "job.fio"
    data = tmp_path / "data"
    data.mkdir()
    job.write_text(
        f"[global]\nioengine=kvstore\nurl={data.as_uri()}\nbs=64k\nsize=1m\niodepth=2\nverify=md5\n"
        "[put]\nrw=kvput\nkv_pages=2\nloops=2\n[get]\nstonewall\nrw=kvget\nkv_pages=4\n"
        "[views]\nstonewall\nrw=randread\nkv_form=view\nverify=0\n[mix]\nstonewall\nrw=kvmix\nkv_pages=2\n"
        "[look]\nstonewall\nrw=kvlookup\nkv_pages=16\n"
    )
    report = bench(capsys, job)
    put, get, views, mix, look = report["jobs"]
    assert put["write"]["total_ios"] == 16 and put["write"]["io_bytes"] == 2 << 20
    assert put["curvfs"]["verified_blocks"] == 8
    assert get["read"]["total_ios"] == get["curvfs"]["lookup"]["total_ios"] == 4
    assert views["read"]["total_ios"] == 16
    assert mix["read"]["io_bytes"] + mix["write"]["io_bytes"] == 1 << 20
    assert look["curvfs"]["lookup"]["total_ios"] == 1 and look["read"]["total_ios"] == 0
    assert all(one["error"] == 0 for one in report["jobs"])
    assert put["curvfs"]["direct"][0]["objects_put"] == 32
    assert left_in(data) == []


def test_requests_of_an_engine(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = tmp_path / "data"
    data.mkdir()
    trace = tmp_path / "trace.jsonl"
    trace.write_text("\n".join(generated_trace(2, requests=30)))
    job = tmp_path / "job.fio"
    job.write_text(
        f"[global]\nioengine=kvstore\nurl={data.as_uri()}\nbs=16k\niodepth=2\n"
        "[prefix]\nrw=prefix\nconversations=6\nturns=3\nprefix_pages=4\nprefixes=2\n"
        f"[trace]\nstonewall\nrw=trace\ntrace={trace}\ntrace_speed=20\nrandseed=3\n"
    )
    prefix, traced = bench(capsys, job)["jobs"]
    assert prefix["curvfs"]["request"]["total_ios"] == 18
    pages = 6 * sum(4 + 2 * turn for turn in (1, 2, 3))
    assert prefix["read"]["io_bytes"] + prefix["write"]["io_bytes"] == pages * 16384
    assert prefix["curvfs"]["pages_hit"] >= 6 * (6 + 8)
    lines = [json.loads(line)["hash_ids"] for line in trace.read_text().splitlines()]
    assert traced["curvfs"]["request"]["total_ios"] == 30
    assert traced["read"]["io_bytes"] + traced["write"]["io_bytes"] == sum(map(len, lines)) * 16384
    assert traced["curvfs"]["request"]["runtime"] > 15
    assert left_in(data) == []


@needs_fio
def test_fio_beside_it(tmp_path: Path) -> None:
    words = ["--rw=randread", "--bs=64k", "--size=1m", "--unlink=1", "--compare", "--rounds=2"]
    done = shell("--name=a", f"--directory={tmp_path}", *words)
    assert done.code == 0, done.err
    assert "a read: " in done.out and " x fio (" in done.out and "in 2 rounds" in done.out
    done = shell("--name=k", "--ioengine=kvstore", f"--url={tmp_path.as_uri()}", *words[1:], "--rw=kvget", "--json")
    ratio = json.loads(done.out)["curvfs"]["compared"]["k"]["read"]
    assert 0 < ratio["least"] <= ratio["ratio"] <= ratio["most"] and ratio["rounds"] == 2
    done = shell("--name=k", "--ioengine=kvstore", f"--url={tmp_path.as_uri()}", "--rw=prefix", "--compare")
    assert done.code == 2 and "fio has nothing like rw=prefix" in done.err
    assert left_in(tmp_path) == []


@pytest.mark.parametrize(
    "words", [("--size=2m", "--time_based", "--runtime=60"), ("--size=40g",)], ids=["runs", "lays out"]
)
def test_ctrl_c_reports_what_there_is_and_leaves_nothing(tmp_path: Path, words: tuple[str, ...]) -> None:
    process = started(
        "bench", "--name=a", f"--directory={tmp_path}", "--rw=randread", "--bs=64k", "--numjobs=2", *words
    )
    wait_for(lambda: len(list(tmp_path.iterdir())) == 2, what="the files")
    time.sleep(0.5)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 130 and err == ""
    assert out.startswith("Interrupted: what follows is what was measured up to then.")
    assert "a: (groupid=0, jobs=1)" in out
    assert list(tmp_path.iterdir()) == []


@needs_fio
def test_an_end_beside_fio_ends_fio_too(tmp_path: Path) -> None:
    process = started(
        "bench",
        "--name=a",
        f"--directory={tmp_path}",
        "--rw=read",
        "--size=1m",
        "--time_based",
        "--runtime=60",
        "--compare",
    )
    wait_for(lambda: bool(list(tmp_path.glob(".curvfs-bench-fio-*/*"))), what="fio's file")
    process.send_signal(signal.SIGTERM)
    out, err = process.communicate(timeout=60)
    assert (process.returncode, err) == (130, "") and out.startswith("Interrupted")
    assert list(tmp_path.iterdir()) == []
    still = subprocess.run(["pgrep", "-f", f"fio.*{tmp_path}"], capture_output=True, text=True, check=False)
    assert still.stdout == ""


def test_a_bench_that_is_killed_leaves_nothing(tmp_path: Path) -> None:
    process = started(
        "bench", "--name=a", "--ioengine=kvstore", f"--url={tmp_path.as_uri()}", "--rw=kvmix", "--bs=64k", "--size=1m",
        "--time_based", "--runtime=60",
    )  # fmt: skip
    wait_for(lambda: bool(list(tmp_path.rglob("*.safetensors"))), what="the objects")
    process.kill()
    process.communicate()
    wait_for(lambda: left_in(tmp_path) == [], what="the children's end")


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        ((), 2, "Give a job file, or a job as options"),
        (("--rw", "read"), 2, "Write --rw=VALUE in one word"),
        (("a.fio", "--rw=read"), 2, "Give job files or a job as options, not both"),
        (("--rw=read", "--size=1m", "--directory=/no/such"), 2, "The directory /no/such of job bench is not there"),
        (("--iodeth=4",), 2, "curvfs bench has no option 'iodeth'; did you mean iodepth?"),
        (("--ioengine=curvfs", "--url=curvine://127.0.0.1:1/", "--size=1m"), 4, "no Curvine master answers"),
        (("--rw=read", "--directory=/tmp", "--filename=no-such-file-here"), 1, "have no length; give size="),
    ],
    ids=lambda value: None if isinstance(value, tuple | int) else value[:20],
)
def test_bad_input_is_one_sentence(
    words: tuple[str, ...], code: int, said: str, capfd: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", *words]) == code
    captured = capfd.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("curvfs: ") and said in captured.err and captured.err.count("\n") == 1


def test_files_that_are_too_short_are_not_touched(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "mine").write_bytes(b"important")
    assert main(["bench", "--rw=randread", "--size=1m", f"--directory={tmp_path}", "--filename=mine"]) == 2
    assert "mine has 9 bytes and job bench needs 1048576" in capfd.readouterr().err
    assert (tmp_path / "mine").read_bytes() == b"important"


def test_a_full_disk_fails_the_job_and_gets_its_room_back(tmp_path: Path) -> None:
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", str(tmp_path)], check=False).returncode:
        pytest.skip("no file system can be mounted here")
    try:
        (tmp_path / "mine").write_bytes(b"important")
        done = shell("--name=a", f"--directory={tmp_path}", "--rw=write", "--bs=1m", "--size=16m")
        assert done.code == 1 and "No space left" in done.out
        assert [path.name for path in tmp_path.iterdir()] == ["mine"]
    finally:
        subprocess.run(["umount", str(tmp_path)], check=True)


def test_a_package_that_is_missing_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "xxhash.py").write_text("raise ModuleNotFoundError(\"No module named 'xxhash'\", name='xxhash')\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    done = shell("--ioengine=kvstore", f"--url={tmp_path.as_uri()}", "--size=1m")
    assert (done.code, done.out) == (3, "")
    assert (
        done.err == "curvfs: This command needs the Python package xxhash; install it with: pip install 'curvfs[kv]'.\n"
    )


def test_options_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "--options"]) == 0
    listed = capsys.readouterr().out
    assert "rwmixread" in listed and "percent of reads" in listed


@pytest.mark.parametrize("path", ["/dev/null", "/dev/stdout"])
def test_a_device_gets_the_report_and_is_not_replaced(path: str) -> None:
    """A ``/dev/null`` that became a file would break the whole machine: this is not tried with the command itself."""

    class Watched:
        def __getattr__(self, name: str) -> Any:
            assert name != "write_file", "a device would be replaced"
            return getattr(World.real().disk, name)

    world = dataclasses.replace(World.real(), disk=cast(Any, Watched()))
    write_result(world, path, b"")


def test_a_report_goes_where_a_link_leads_to(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to("report")
    write_result(World.real(), str(tmp_path / "link"), b"one")
    write_result(World.real(), str(tmp_path / "link"), b"two")
    assert (tmp_path / "link").is_symlink() and (tmp_path / "report").read_bytes() == b"two"


def test_a_picture_that_cannot_be_is_told_before_the_run(tmp_path: Path) -> None:
    done = shell("--name=a", "--rw=write", "--size=1m", f"--directory={tmp_path}", "--png", f"{tmp_path}/no/x.png")
    assert done.code == 3 and "there is no directory" in done.err and os.listdir(tmp_path) == []
