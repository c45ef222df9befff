"""What a platform team does with a mount: fstab, units, Curvine's flags, logs, and a look at what it does."""

from __future__ import annotations

import errno
import json
import os
import signal
import socket
import stat
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from curvfs.errors import ConfigError, UsageError
from mount import curvine
from mount.curvine import read_command_line
from mount.options import MountOptions
from tests.t4_mount.mounts import (
    Mount,
    curvfs,
    mounted,
    mounted_at,
    refused,
    server_pid,
    skip_without_fuse,
    wait_for,
)


def control(mount: Mount, name: str) -> str:
    return (mount.path / ".curvfs" / name).read_text()


def numbers(mount: Mount) -> dict[str, object]:
    found = json.loads(control(mount, "stats.json"))
    assert isinstance(found, dict)
    return found


def calls(mount: Mount, operation: str) -> int:
    operations = numbers(mount)["operations"]
    assert isinstance(operations, dict)
    return int(operations.get(operation, {"count": 0})["count"])


# ------------------------------------------------------------------------------------------------- Curvine's own flags


def test_flags_of_curvines_own_mount() -> None:
    arguments = (
        "--master-addrs m1:8995,m2 --fs-path /l2/cache --mnt-path /mnt/kv --io-threads 32 --clone-fd=true -d "
        "--conf c.toml --entry-timeout-ms 500 --max-readahead-kb 512 --direct-io false --readonly --web-port 9003 "
        "--client.rpc-timeout-ms 5000 --client.block-size 64MB --client.hostname me"
    )
    asked = read_command_line(arguments.split())
    assert asked.targets == ("curvine://m1:8995,m2/l2/cache", "/mnt/kv")
    assert asked.left_alone == ("--io-threads", "--clone-fd")
    options = MountOptions().with_words(asked.words)
    assert options.debug and options.read_only
    assert options.conf == "c.toml"
    assert options.sealed_entry_timeout_s == 0.5
    assert options.read_ahead_bytes == 512 * 1024
    assert options.metrics == ("127.0.0.1", 9003)
    assert dict(options.client_settings) == {
        "rpc_timeout": "5000ms",
        "block_size": "64MB",
        "client_hostname": "me",
    }


def _cluster_file(directory: Path, fuse: str, port: int = 8995) -> Path:
    path = directory / "curvine-cluster.toml"
    path.write_text(f'[client]\nmaster_addrs = [{{hostname = "127.0.0.1", port = {port}}}]\n[fuse]\n{fuse}\n')
    return path


def test_the_fuse_table_of_a_cluster_file(tmp_path: Path) -> None:
    places = 'mnt_path = "/mnt/kv"\nfs_path = "/l2 cache"'
    fuse = f"{places}\nentry_timeout_ms = 700\ndirect_io = false\nio_threads = 3\nnew = 1"
    found = curvine.read_cluster_file(str(_cluster_file(tmp_path, fuse)))
    assert found.targets == ("curvine:///l2%20cache", "/mnt/kv")
    assert found.words == ("sealed_entry_timeout=700ms",)
    assert found.left_alone == ("[fuse] io_threads", "[fuse] new")
    assert curvine.complete((), found.targets) == found.targets
    assert curvine.complete(("/elsewhere",), found.targets) == ("curvine:///l2%20cache", "/elsewhere")
    assert curvine.complete(("curvine://m:1/",), found.targets) == ("curvine://m:1/", "/mnt/kv")
    assert curvine.complete(("curvine://m:1/", "/elsewhere"), found.targets) == ("curvine://m:1/", "/elsewhere")
    assert curvine.complete(("/elsewhere",), ()) == ("/elsewhere",)
    assert curvine.conf_of(["ro,conf=a", "conf=b,rw"]) == "b"
    assert curvine.read_cluster_file(str(_cluster_file(tmp_path, ""))).targets == ("curvine:///",)
    refused = curvfs("mount", "-c", _cluster_file(tmp_path, "direct_io = true"), "/mnt/kv")
    assert refused.returncode == 2
    assert "[fuse] direct_io=true is refused" in refused.stderr


def test_mounted_by_a_cluster_file_alone(tmp_path: Path) -> None:
    skip_without_fuse()
    (tmp_path / "there").mkdir()
    with mounted(tmp_path, "--embedded", tmp_path / "pool") as one:
        port = json.loads((tmp_path / "pool" / "server.json").read_text())["master_port"]
        conf = _cluster_file(
            tmp_path, f'mnt_path = "{tmp_path / "there"}"\nfs_path = "/sub"\nattr_timeout_ms = 0', port
        )
        done = curvfs("mount", "--background", "-c", conf)
        assert done.returncode == 0, done.stderr
        try:
            (tmp_path / "there" / "file").write_bytes(b"content")
            assert (one.path / "sub" / "file").read_bytes() == b"content"
            options = json.loads((tmp_path / "there" / ".curvfs" / "options.json").read_bytes())
            assert options["attr_timeout_s"] == 0.0
        finally:
            assert curvfs("umount", tmp_path / "there").returncode == 0


def test_words_of_fstab() -> None:
    options = MountOptions().with_words(
        ["rw,relatime,_netdev,x-systemd.automount,kv=a,kv=b/c,log_file=/l,log_format=json,ready_file=/r,control=off"]
    )
    assert options.kv_paths == ("a", "b/c")
    assert (options.log_file, options.log_format, options.ready_file) == ("/l", "json", "/r")
    assert options.control_name is None
    assert MountOptions().with_words(["direct_io=false,write_back_cache=false,io_threads=4"]) == MountOptions()
    assert MountOptions().with_words(["no_kv,metrics=:9100,control=.mine"]).kv_paths == ()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("--direct-io true", ["direct_io", "O_DIRECT"]),
        ("--write-back-cache true", ["write_back_cache", "published"]),
        ("--mnt-number 3", ["mnt_number", "once for each"]),
        ("--negative-timeout-ms 100", ["negative_timeout_ms", "invisible"]),
        ("--check-permission false", ["check_permission"]),
        ("--uid 5", ["uid", "belong"]),
        ("--nonsense 5", ["No such option", "--nonsense"]),
        ("--io-threads", ["--io-threads", "needs a value"]),
        ("-c", ["-c", "needs a value"]),
    ],
)
def test_refused_by_name_with_the_reason(arguments: str, words: list[str]) -> None:
    with pytest.raises((UsageError, ConfigError)) as caught:
        read_command_line(arguments.split())
    assert all(word in str(caught.value) for word in words), caught.value


@pytest.mark.parametrize(
    "word",
    (
        *("auto_unmount", "max_read=4096", "max_write=131072", "direct_io", "allow_root", "nonempty"),
        *("log_format=xml", "metrics=here", "control=a/b", "max_background=0", "slow_call=x", "no_such_word"),
    ),
)
def test_words_that_are_refused_by_name(word: str) -> None:
    with pytest.raises(ConfigError) as caught:
        MountOptions().with_words([word])
    assert word.partition("=")[0].replace("log_format", "log format") in str(caught.value)


# ------------------------------------------------------------------------------------------------------ mount(8), logs


@pytest.fixture
def helper() -> Iterator[None]:
    """mount.curvfs where mount(8) looks for it; what is there already stays."""
    skip_without_fuse()
    there = Path("/sbin/mount.curvfs").exists()
    assert curvfs("install-helper").returncode == 0
    yield
    if not there:
        assert curvfs("install-helper", "--remove").returncode == 0
        assert not Path("/sbin/mount.fuse.curvfs").exists()


def run(*command: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*map(str, command)], capture_output=True, text=True, timeout=60, check=False)


def test_mount_and_fstab(tmp_path: Path, helper: None) -> None:
    path, pool, log = tmp_path / "mnt", tmp_path / "pool", tmp_path / "log"
    path.mkdir()
    table = tmp_path / "fstab"
    words = f"noauto,_netdev,kv=.,log_file={log},log_format=json,log_size=1KB,log_keep=2"
    table.write_text(f"{pool} {path} fuse.curvfs {words} 0 0\n")
    try:
        done = run("mount", "-T", table, path)
        assert done.returncode == 0, done.stderr
        (path / "o.tmp").write_bytes(b"object")
        os.rename(path / "o.tmp", path / "o")
        refused(errno.EPERM, lambda: os.open(path / "o", os.O_WRONLY))
        assert run("umount", path).returncode == 0
        wait_for(lambda: "Unmounted" in log.read_text(), what="the end")
        entries = [json.loads(line) for line in log.read_text().splitlines()]
        assert {"time_ms", "level", "logger", "pid", "message"} <= entries[-1].keys()
        # By the other type, from the same pool; with the helper's own words about what is wrong.
        assert run("mount", "-t", "curvfs", "-o", f"ro,kv=.,log_file={log},log_size=1KB", pool, path).returncode == 0
        assert mounted_at(path) == ["fuse.curvfs"]
        refused(errno.EROFS, lambda: os.open(path / "new", os.O_WRONLY | os.O_CREAT))
        assert run("mount", "-o", "remount,rw", "-t", "curvfs", pool, path).returncode != 0
        assert run("umount", path).returncode == 0
        failed = run("mount", "-t", "curvfs", "-o", "max_read=4096", pool, path)
        assert failed.returncode == 2 and "max_read" in failed.stderr and "refused" in failed.stderr
    finally:
        while mounted_at(path):
            run("umount", "-l", path)


def test_the_helper_leaves_foreign_files_alone(tmp_path: Path) -> None:
    (tmp_path / "mount.curvfs").write_text("#!/bin/sh\n")
    for more in ((), ("--remove",)):
        done = curvfs("install-helper", "--directory", tmp_path, *more)
        assert done.returncode == 2 and "left alone" in done.stderr
    assert (tmp_path / "mount.curvfs").read_text() == "#!/bin/sh\n"


def test_a_log_is_turned_over(tmp_path: Path) -> None:
    words = ("-o", "log_size=2KB,log_keep=2", "--debug")
    with mounted(tmp_path, "--embedded", tmp_path / "pool", *words) as mount:
        for index in range(100):
            refused(errno.EEXIST, (mount.path / "kv").mkdir) if index % 2 else refused(
                errno.EPERM, lambda: os.mknod(mount.kv / "n", stat.S_IFIFO | 0o600)
            )
        logs = sorted(path.name for path in tmp_path.glob("mnt.log*"))
        assert logs == ["mnt.log", "mnt.log.1", "mnt.log.2"]
        assert all((tmp_path / name).stat().st_size <= 2048 for name in logs)


# --------------------------------------------------------------------------------------------------------- readiness


def test_systemd_and_a_file_are_told(tmp_path: Path) -> None:
    skip_without_fuse()
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as systemd:
        systemd.bind(str(tmp_path / "notify"))
        systemd.settimeout(10)
        environ = {"NOTIFY_SOCKET": str(tmp_path / "notify"), "WATCHDOG_USEC": "200000"}
        ready = tmp_path / "ready"
        ready.write_text("of an earlier mount")
        arguments = ("--embedded", tmp_path / "pool", "--ready-file", ready)
        with mounted(tmp_path, *arguments, environ=environ) as mount:
            said = systemd.recv(4096).decode().splitlines()
            assert said[0] == "READY=1" and f"MAINPID={mount.process.pid}" in said
            assert json.loads(ready.read_text()) == {
                "pid": mount.process.pid,
                "url": json.loads(control(mount, "stats.json"))["url"],
                "mountpoint": str(mount.path),
            }
            assert {systemd.recv(4096), systemd.recv(4096)} == {b"WATCHDOG=1"}
            mount.process.send_signal(signal.SIGTERM)
            while (message := systemd.recv(4096)) == b"WATCHDOG=1":
                pass
            assert message == b"STOPPING=1"
            assert mount.process.wait(20) == 0
            assert not ready.exists()


# -------------------------------------------------------------------------------------------------- the mount of itself


def test_the_control_directory(tmp_path: Path) -> None:
    with mounted(tmp_path, "--embedded", tmp_path / "pool", "-o", "slow_call=0.2s") as mount:
        (mount.kv / "o.tmp").write_bytes(b"object" * 1000)
        os.rename(mount.kv / "o.tmp", mount.kv / "o")
        assert (mount.kv / "o").read_bytes() == b"object" * 1000
        # Hidden from whoever walks the tree, there for whoever knows.
        assert os.listdir(mount.path) == ["kv"]
        names = {"live", "health", "stats", "stats.json", "options.json", "open-files", "open-files.json"}
        assert names | {"slow-calls.json"} <= set(os.listdir(mount.path / ".curvfs"))
        assert (control(mount, "live"), control(mount, "health")) == ("ok\n", "ok\n")
        found = numbers(mount)
        assert found["objects"] == {"published": 1, "materialised": 0, "dropped": 0}
        assert (found["read_bytes"], found["written_bytes"]) == (6000, 6000)
        operations = found["operations"]
        assert isinstance(operations, dict)
        assert operations["rename"]["count"] == 1
        assert 0 < operations["rename"]["p50_s"] <= operations["rename"]["p99_s"] <= operations["rename"]["max_s"]
        assert operations["lookup"]["errors"]["ENOENT"] >= 1
        assert "rename" in control(mount, "stats")
        with open(mount.kv / "o"):
            (opened,) = json.loads(control(mount, "open-files.json"))
            assert opened["path"] == "/kv/o" and opened["sealed"] and not opened["writable"]
        assert json.loads(control(mount, "open-files.json")) == []
        # A call that took long is kept.
        pid = server_pid(tmp_path / "pool")
        os.kill(pid, signal.SIGSTOP)
        stopped = subprocess.Popen(["stat", str(mount.kv / "nothing")], stderr=subprocess.DEVNULL)
        time.sleep(0.4)
        assert control(mount, "live") == "ok\n"
        os.kill(pid, signal.SIGCONT)
        stopped.wait(20)
        slow = json.loads(control(mount, "slow-calls.json"))
        assert any(
            call["operation"] == "lookup" and "nothing" in call["about"] and call["took_s"] > 0.2 for call in slow
        )
        assert (mount.path / ".curvfs" / "slow-calls.json").stat().st_mode & 0o777 == 0o400


def test_the_control_directory_cannot_be_changed(tmp_path: Path) -> None:
    with mounted(tmp_path, "--embedded", tmp_path / "pool") as mount:
        directory = mount.path / ".curvfs"
        (mount.path / "f").touch()
        (mount.path / "d").mkdir()
        refused(errno.EEXIST, directory.mkdir)
        for action in (
            (directory / "new").touch,
            (directory / "new").mkdir,
            (directory / "live").unlink,
            lambda: os.truncate(directory / "live", 0),
            lambda: os.open(directory / "live", os.O_WRONLY),
            lambda: os.rename(directory / "live", mount.path / "live"),
            lambda: os.rename(mount.path / "f", directory / "live"),
            lambda: os.rename(mount.path / "d", directory),
            lambda: os.rename(directory, mount.path / "x"),
            lambda: os.link(mount.path / "f", directory / "f"),
            lambda: os.symlink("f", directory / "f"),
            lambda: os.setxattr(directory / "live", "user.x", b"x"),
            directory.rmdir,
        ):
            refused(errno.EPERM, action)
        assert control(mount, "live") == "ok\n"
        assert sorted(os.listdir(mount.path)) == ["d", "f", "kv"]


def test_a_pool_with_such_a_name_of_its_own(tmp_path: Path) -> None:
    pool = tmp_path / "pool"
    with mounted(tmp_path, "--embedded", pool, "--control", ".status", "--no-kv") as mount:
        (mount.path / ".curvfs").write_bytes(b"a user's")
        assert (mount.path / ".status" / "live").read_text() == "ok\n"
        with mounted(tmp_path, "--embedded", pool, "--no-kv", name="other") as other:
            assert (other.path / ".curvfs").read_bytes() == b"a user's"
            assert "tells nothing of itself" in other.log_text()
        with mounted(tmp_path, "--embedded", pool, "--control", "off", "--no-kv", name="other") as other:
            assert os.listdir(other.path) == [".curvfs"]


def test_health_of_a_mount_without_its_server(tmp_path: Path) -> None:
    with mounted(tmp_path, "--embedded", tmp_path / "pool", "-o", "op_timeout=2") as mount:
        pid = server_pid(tmp_path / "pool")
        os.kill(pid, signal.SIGSTOP)
        try:
            assert control(mount, "live") == "ok\n"
            assert control(mount, "health").startswith("failing: ")
        finally:
            os.kill(pid, signal.SIGCONT)
        wait_for(lambda: control(mount, "health") == "ok\n", what="health")


def test_prometheus(tmp_path: Path) -> None:
    pytest.importorskip("prometheus_client")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with mounted(tmp_path, "--embedded", tmp_path / "pool", "--metrics", f":{port}") as mount:
        (mount.kv / "o").write_bytes(b"object")
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
            text = answer.read().decode()
        assert 'curvfs_mount_call_seconds_count{operation="create"} 1.0' in text
        assert 'curvfs_mount_moved_bytes_total{direction="written"} 6.0' in text
        assert control(mount, "metrics").startswith("# HELP curvfs_mount_call_seconds")


def test_repeated_reads_do_not_reach_the_daemon(tmp_path: Path) -> None:
    content = os.urandom(3 << 20)
    with mounted(tmp_path, "--embedded", tmp_path / "pool") as mount:
        (mount.kv / "o.tmp").write_bytes(content)
        os.rename(mount.kv / "o.tmp", mount.kv / "o")
        assert (mount.kv / "o").read_bytes() == content
        before = calls(mount, "read")
        for _ in range(20):
            assert (mount.kv / "o").read_bytes() == content
        # Reading the counters is a read itself, answered by the control directory and not counted.
        assert calls(mount, "read") == before
        opens = numbers(mount)["opens"]
        assert isinstance(opens, dict) and opens["kept"] >= 20


def test_the_list_of_mounts(tmp_path: Path) -> None:
    environ = {"CURVFS_RUN_DIR": str(tmp_path / "run")}
    with mounted(tmp_path, "--embedded", tmp_path / "pool", environ=environ) as mount:
        (mount.kv / "o.tmp").write_bytes(b"object")
        os.rename(mount.kv / "o.tmp", mount.kv / "o")

        def listed() -> dict[str, object]:
            done = curvfs("mounts", "--json", environ=environ)
            assert done.returncode == 0, done.stderr
            (found,) = [each for each in json.loads(done.stdout) if each["mountpoint"] == str(mount.path)]
            return dict(found)

        wait_for(lambda: listed().get("written_bytes") == 6, what="the counters")
        found = listed()
        assert (found["pid"], found["state"]) == (mount.process.pid, "ok")
        assert str(found["url"]).startswith("curvine://127.0.0.1:")
        assert found["objects"] == {"published": 1, "materialised": 0, "dropped": 0}
        assert float(str(found["uptime_s"])) > 0
        lines = curvfs("mounts", environ=environ).stdout.splitlines()
        assert lines[0].split()[:3] == ["MOUNTPOINT", "POOL", "PID"]
        assert any(str(mount.path) in line and str(mount.process.pid) in line for line in lines)
        mount.process.kill()
        mount.process.wait()
        assert (listed()["state"], listed()["pid"]) == ("dead", None)


# ------------------------------------------------------------------------------------------ rights and containers


def test_without_the_right_to_raise_limits(tmp_path: Path) -> None:
    """CAP_SYS_RESOURCE is missing in most containers."""
    skip_without_fuse()
    path = tmp_path / "mnt"
    path.mkdir()
    command = ["setpriv", "--bounding-set", "-sys_resource", "--inh-caps", "-sys_resource", sys.executable]
    mount = [*command, "-m", "tools", "mount", "--embedded", str(tmp_path / "pool"), "--background", str(path)]
    try:
        done = run(*mount)
        assert done.returncode == 0, done.stderr
        pid = int(done.stdout.rpartition("pid ")[2].rstrip(").\n"))
        status = Path(f"/proc/{pid}/status").read_text()
        effective = next(int(line.split()[1], 16) for line in status.splitlines() if line.startswith("CapEff"))
        assert not effective >> 24 & 1
        content = os.urandom(3 << 20)
        (path / "kv" / "o.tmp").write_bytes(content)
        os.rename(path / "kv" / "o.tmp", path / "kv" / "o")
        assert (path / "kv" / "o").read_bytes() == content
        assert curvfs("umount", path).returncode == 0
    finally:
        while mounted_at(path):
            run("umount", "-l", path)


def test_other_users_may_enter_where_they_are_let() -> None:
    # Not below pytest's own directory, which every other run of pytest closes again.
    with tempfile.TemporaryDirectory(prefix="curvfs-test-") as name:
        directory = Path(name)
        directory.chmod(0o711)
        nobody = ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups"]
        with mounted(directory, "--embedded", directory / "pool") as mount:
            assert run(*nobody, "ls", mount.path).returncode != 0
        with mounted(directory, "--embedded", directory / "pool", "--allow-other") as mount:
            mount.kv.chmod(0o777)
            (mount.path / "closed").mkdir(0o700)
            told = mount.path / ".curvfs"
            script = f"cd {mount.kv} && echo theirs > o.tmp && mv o.tmp o && stat -c %u o && cat {told}/live"
            done = run(*nobody, "sh", "-c", script)
            assert (done.stdout, done.returncode) == ("65534\nok\n", 0), done.stderr
            assert run(*nobody, "ls", mount.path / "closed").returncode != 0
            assert run(*nobody, "cat", told / "open-files").returncode != 0
        server = server_pid(directory / "pool")  # which would make anew what is removed before it goes
        wait_for(lambda: not Path(f"/proc/{server}").exists(), 20.0, "the end of the server")
