"""``curvfs doctor`` from the shell, on this machine as it is and as it is made to look."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy
import pytest

import kvstore
from curvfs.api import SyncFileSystem
from curvfs.runrecords import RunRecord, running
from curvfs.world import World
from kvstore import Geometry, Identity
from tests.t3_kvstore.places import WORKER_HOSTNAME, serving
from tests.t5_tools.interrupting import interrupt_when_heard
from tools.__main__ import main
from tools.doctor.place import file_system_of
from tools.doctor.processes import check_processes

COMMAND = (sys.executable, "-P", "-m", "tools", "doctor")
#: The same as an ordinary user. The first time, as root and unheard, imports everything: the interpreter may lie where
#: others cannot go.
AS_NOBODY = (
    sys.executable,
    "-P",
    "-c",
    "import contextlib, io, os, sys\n"
    "from tools.__main__ import main\n"
    "with contextlib.redirect_stdout(io.StringIO()):\n"
    "    main(['doctor', *sys.argv[1:]])\n"
    "os.setgroups([]); os.setresgid(*[65534] * 3); os.setresuid(*[65534] * 3)\n"
    "sys.exit(main(['doctor', *sys.argv[1:]]))",
)
#: Nobody listens at the discard port.
NOBODY = "curvine://127.0.0.1:9"


def doctor(
    *arguments: str, prefix: tuple[str, ...] = (), command: tuple[str, ...] = COMMAND, **environment: str
) -> tuple[int, dict[str, dict[str, Any]]]:
    """Exit code, and the worst finding of each check by its name."""
    done = subprocess.run(
        [*prefix, *command, *arguments, "--json"],
        capture_output=True,
        text=True,
        timeout=100,
        env={**os.environ, **environment},
    )
    assert done.stderr == "", done.stderr
    document = json.loads(done.stdout)
    assert all(each["text"].endswith(".") or "\n" not in each["text"] for each in document["findings"])
    assert all(each["remedy"] for each in document["findings"] if each["level"] in ("warning", "error"))
    order = ["ok", "note", "warning", "error"]
    return done.returncode, {
        each["check"]: each for each in sorted(document["findings"], key=lambda each: order.index(each["level"]))
    }


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """host:port of a master whose worker goes by WORKER_HOSTNAME."""
    with serving(tmp_path_factory.mktemp("doctor")) as address:
        yield address


def test_a_sound_directory_and_a_near_worker(server: str, tmp_path: Path) -> None:
    code, found = doctor(f"curvine://{server}/", "--set", f"hostname={WORKER_HOSTNAME}", "--data", str(tmp_path))
    assert {found[check]["level"] for check in ("master", "workers", "short-circuit", "clock", "direct-io")} == {"ok"}
    assert (
        "local" not in found["short-circuit"]["text"] and "own file on this machine" in found["short-circuit"]["text"]
    )
    assert f"aligned to {_alignment(tmp_path)} bytes" in found["direct-io"]["text"]
    assert code in (0, 1)  # the machine around us is as it is
    assert list(tmp_path.iterdir()) == []
    with SyncFileSystem.connect(f"curvine://{server}/") as client:
        assert client.list("/") == []


def _alignment(directory: Path) -> int:
    """The smallest direct read that this file system takes, tried with dd."""
    (directory / "f").write_bytes(bytes(65536))
    try:
        for size in (512, 1024, 2048, 4096):
            command = ["dd", f"if={directory / 'f'}", "of=/dev/null", f"bs={size}", "count=1", "iflag=direct"]
            if subprocess.run(command, capture_output=True).returncode == 0:
                return size
    finally:
        (directory / "f").unlink()
    raise AssertionError("no direct I/O here")


def test_a_worker_elsewhere_is_a_note(server: str) -> None:
    _, found = doctor(f"curvine://{server}/", "--set", "hostname=elsewhere")
    assert found["locality"]["level"] == "note" and WORKER_HOSTNAME in found["locality"]["text"]
    assert found["short-circuit"]["level"] == "ok" and "over the network" in found["short-circuit"]["text"]
    _, found = doctor(f"curvine://{server}/", "--set", "short_circuit=false")
    assert "short_circuit is off" in found["short-circuit"]["text"]


@pytest.mark.skipif(os.geteuid() != 0, reason="giving up root needs root")
def test_a_near_worker_whose_files_this_user_may_not_read(server: str) -> None:
    _, found = doctor(
        f"curvine://{server}/",
        "--set",
        f"hostname={WORKER_HOSTNAME}",
        command=AS_NOBODY,
        CURVFS_RUN_DIR="/nonexistent",
    )
    assert found["short-circuit"]["level"] == "warning" and found["short-circuit"]["remedy"]


def test_more_replicas_than_workers(server: str) -> None:
    code, found = doctor(f"curvine://{server}/", "--set", "replicas=3", "--read-only")
    assert code == 3 and found["replicas"]["level"] == "error"
    assert "short-circuit" not in found


def test_nobody_answers() -> None:
    code, found = doctor(NOBODY)
    assert code == 3 and found["master"]["level"] == "error" and "127.0.0.1:9" in found["master"]["text"]
    assert "workers" not in found


def test_a_worker_s_port_is_not_a_master(server: str) -> None:
    with SyncFileSystem.connect(f"curvine://{server}/") as client:
        port = client.statfs().workers[0].address.port
    code, found = doctor(f"curvine://127.0.0.1:{port}/")
    assert code == 3 and found["master"]["level"] == "error"


def test_without_a_cluster_the_machine_is_checked() -> None:
    _, found = doctor(CURVINE_CONF_FILE="", CURVINE_HOME="")
    assert found["settings"]["level"] == "note"
    assert {"fuse-device", "fusermount3", "libfuse", "kernel", "io-uring", "open-files", "locked-memory"} <= set(found)


def test_settings_that_cannot_be() -> None:
    code, found = doctor("curvine://")
    assert code == 3 and found["settings"]["level"] == "error"


@pytest.mark.skipif(file_system_of("/dev/shm") != "tmpfs", reason="/dev/shm is no tmpfs here")
def test_data_in_memory_and_data_nowhere(tmp_path: Path) -> None:
    code, found = doctor("--data", "/dev/shm")
    assert code >= 1 and found["data-medium"]["level"] == "warning"
    code, found = doctor("--data", str(tmp_path / "none"))
    assert code == 3 and found["data"]["level"] == "error"


@pytest.mark.skipif(os.geteuid() != 0, reason="giving up root needs root")
def test_data_that_this_user_may_not_write(tmp_path: Path) -> None:
    code, found = doctor(
        "--data",
        "/",
        command=AS_NOBODY,
        CURVFS_RUN_DIR="/nonexistent",
    )
    assert code == 3 and found["data-write"]["level"] == "error"


def test_few_open_files_and_little_locked_memory() -> None:
    _, found = doctor(prefix=("prlimit", "--nofile=256:256", "--memlock=65536:65536"))
    assert found["open-files"]["level"] == "warning" and "256" in found["open-files"]["text"]
    assert found["locked-memory"]["level"] == "note" and "64.0 KiB" in found["locked-memory"]["text"]


def test_without_capabilities_and_without_a_fuse_device() -> None:
    if os.geteuid() != 0:
        pytest.skip("taking capabilities away needs root")
    _, found = doctor(prefix=("setpriv", "--bounding-set", "-all", "--inh-caps", "-all"))
    assert found["capabilities"]["level"] == "warning" and "CAP_SYS_ADMIN" in found["capabilities"]["text"]
    hide = 'mount -t tmpfs none /dev && exec "$@"'
    code, found = doctor(prefix=("unshare", "--mount", "sh", "-c", hide, "sh"))
    assert code == 3 and found["fuse-device"]["level"] == "error"


# ------------------------------------------------------------------------------------------------------- processes

GEOMETRY = Geometry.attention(layers=1, kv_heads=1, head_dim=8, dtype="float16", page_tokens=1)


def findings() -> dict[str, str]:
    return {finding.check: finding.text for finding in check_processes(World.real())}


def test_a_store_that_never_hits_and_replicas_that_differ(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CURVFS_RUN_DIR", str(tmp_path / "run"))
    assert findings().keys() == {"processes"}
    url = f"file://{tmp_path}"
    with (
        kvstore.open(url, Identity.of(GEOMETRY, model="m", revision="r1"), geometry=GEOMETRY) as one,
        kvstore.open(url, Identity.of(GEOMETRY, model="m", revision="r2"), geometry=GEOMETRY) as other,
    ):
        keys = one.keys(range(30))
        pages = [[numpy.ones(spec.shape, numpy.float16) for spec in GEOMETRY.tensors] for _ in keys]
        assert all(one.put(keys, pages).result())
        for first in range(100, 125):
            assert one.lookup(one.keys([first])).pages == 0
        while True:
            records = running(World.real(), "kvstore")
            if len(records) == 2 and max(record["stats"]["lookups"] for record in records) == 25:
                break
            World.real().clock.block(0.05)
        found = findings()
        assert "stored 30 pages and no lookup of 25 found one" in found["no-hits"]
        assert "under 2 identities" in found["identities"]
        assert other.lookup(other.keys(range(3))).pages == 0


@pytest.mark.parametrize(
    ("stats", "check"),
    [
        ({"failing_puts": 40, "last_error": "Full."}, "failing-puts"),
        ({"quarantined": 2}, "damaged"),
        ({"direct": False, "direct_reason": "tmpfs"}, "buffered"),
    ],
)
def test_a_store_in_trouble(stats: dict[str, Any], check: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CURVFS_RUN_DIR", str(tmp_path))
    record = RunRecord(World.real(), "kvstore")
    record.write({"model": "m", "stats": stats})
    assert check in findings()
    record.close()


def test_what_a_person_reads() -> None:
    done = subprocess.run([*COMMAND, NOBODY, "-v"], capture_output=True, text=True, timeout=60)
    assert done.returncode == 3
    lines = done.stdout.splitlines()
    assert any(line.startswith("FAIL master: ") for line in lines) and any(line.startswith("ok   ") for line in lines)
    assert lines[-1].endswith(" FAIL.") and "\x1b" not in done.stdout
    quiet = subprocess.run([*COMMAND, NOBODY], capture_output=True, text=True, timeout=60).stdout
    assert "ok   " not in quiet


def test_ctrl_c_tells_what_was_found(capsys: pytest.CaptureFixture[str]) -> None:
    interrupt_when_heard()
    assert main(["doctor", NOBODY, "--json"]) == 130
    document = json.loads(capsys.readouterr().out)
    assert document["interrupted"] and document["findings"]
    assert "processes" not in {each["check"] for each in document["findings"]}
