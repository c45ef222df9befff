"""``curvfs config``: effective settings and where each came from."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from curvfs.config import Settings, gather_settings
from curvfs.errors import ConfigError
from curvfs.units import MIB
from tools.__main__ import main

NEW = """
cluster_id = "prod"

[master]
rpc_port = 8888

[journal]
journal_addrs = [{ id = 1, hostname = "j1", port = 8996 }, { id = 2, hostname = "j2", port = 8996 }]

[client]
hostname = "node7"
replicas = 2
block_size = "64MB"
short_circuit = false
storage_type = "SSD"
ttl_ms = "7d"
ttl_action = "delete"
conn_timeout_ms = 1500
rpc_timeout_ms = 2500
data_timeout_ms = 3500
rpc_retry_max_duration_ms = 40000
rpc_retry_min_sleep_ms = 50
rpc_retry_max_sleep_ms = 4000
close_timeout_secs = 7
master_conn_pool_size = 5
block_conn_idle_size = 9
block_conn_idle_time = 11000
failed_worker_ttl = 12000
mount_update_ttl = 13000
metric_report_enable = true
clean_task_interval = 14000
read_chunk_size = "128KB"
umask = 18

[curvfs]
chunk_size = "8MB"
window = 8
"""

#: The same settings as older files write them.
OLD = (
    NEW.replace("conn_timeout_ms = 1500", 'conn_timeout_ms = "1500ms"')
    .replace("rpc_timeout_ms = 2500", 'rpc_timeout = "2500"')
    .replace("data_timeout_ms = 3500", 'data_timeout_ms = "3500ms"')
    .replace("rpc_retry_max_duration_ms = 40000", 'rpc_retry_max_duration_ms = "40s"')
    .replace("block_conn_idle_time = 11000", 'block_conn_idle_time_ms = "11s"')
    .replace("failed_worker_ttl = 12000", 'failed_worker_ttl_ms = "12s"')
    .replace("clean_task_interval = 14000", 'clean_task_interval = "14s"')
    .replace('ttl_ms = "7d"', "ttl_ms = 604800000")
)


def gather(path: Path, content: str, url: str | None = None, **more: Any) -> Settings:
    path.write_text(content)
    return gather_settings(url, file=str(path), environ=more.pop("environ", {}), **more)


@pytest.mark.parametrize("content", [NEW, OLD], ids=["integers", "strings"])
def test_every_key_of_a_cluster_file(tmp_path: Path, content: str) -> None:
    found = gather(tmp_path / "c.toml", content)
    config = found.config
    assert config.masters == (("j1", 8888), ("j2", 8888))
    assert (config.cluster_id, config.hostname, config.replicas) == ("prod", "node7", 2)
    assert (config.block_size_bytes, config.short_circuit) == (64 * MIB, False)
    assert (config.storage_type, config.ttl_ms, config.ttl_action) == ("ssd", 604_800_000, "delete")
    assert (config.connect_timeout_s, config.rpc_timeout_s, config.data_timeout_s) == (1.5, 2.5, 3.5)
    assert (config.retry_max_s, config.retry_min_sleep_s, config.retry_max_sleep_s) == (40.0, 0.05, 4.0)
    assert (config.close_timeout_s, config.master_connections) == (7.0, 5)
    assert (config.idle_worker_connections, config.worker_idle_s) == (9, 11.0)
    assert (config.failed_worker_ttl_s, config.mount_update_ttl_s) == (12.0, 13.0)
    assert (config.metrics_report, config.metrics_interval_s) == (True, 14.0)
    assert (config.chunk_size_bytes, config.window) == (8 * MIB, 8)
    assert found.unused == ("[client] read_chunk_size", "[client] umask")
    assert found.sources["masters"].endswith("c.toml: [journal] journal_addrs")
    assert found.sources["block_size_bytes"].endswith("c.toml: [client] block_size")
    assert found.sources["chunk_size_bytes"].endswith("c.toml: [curvfs] chunk_size_bytes")
    assert found.sources["root"] == "default"


def test_where_the_masters_stand(tmp_path: Path) -> None:
    file = tmp_path / "c.toml"
    named = '[client]\nmaster_addrs = [{ hostname = "m1", port = 1 }, { hostname = "m2" }]\n'
    assert gather(file, named + "[master]\nrpc_port = 7\n").config.masters == (("m1", 1), ("m2", 7))
    assert gather(file, '[master]\nhostname = "m"\n').config.masters == (("m", 8995),)
    environ = {"CURVINE_MASTER_HOSTNAME": "from-environment"}
    assert gather(file, '[master]\nhostname = "m"\n', environ=environ).config.masters == (("from-environment", 8995),)
    with pytest.raises(ConfigError, match="names no master"):
        gather(file, "", "curvine:///root")
    with pytest.raises(ConfigError, match="No master"):
        gather_settings(environ={})


def test_precedence(tmp_path: Path) -> None:
    file = tmp_path / "c.toml"
    environ = {"CURVINE_CLIENT_HOSTNAME": "environment", "CURVINE_CONF_FILE": str(file)}
    file.write_text(NEW)
    found = gather_settings(environ=environ)
    assert (found.config.hostname, found.sources["hostname"]) == (
        "environment",
        "environment CURVINE_CLIENT_HOSTNAME",
    )
    found = gather_settings("curvine:///l2?replicas=3&client_hostname=url", environ=environ, replicas=4)
    assert found.config.masters_text == "j1:8888,j2:8888"
    assert (found.config.root, found.sources["root"]) == ("/l2", "URL")
    assert (found.config.hostname, found.sources["hostname"]) == ("url", "URL")
    assert (found.config.replicas, found.sources["replicas"]) == (4, "override")
    assert found.config.cluster_id == "prod"


def test_another_cluster_than_the_files_has_another_id(tmp_path: Path) -> None:
    found = gather(tmp_path / "c.toml", NEW, "curvine://elsewhere:8995/")
    assert (found.config.cluster_id, found.config.replicas) == ("", 2)
    same = gather(tmp_path / "c.toml", NEW, "curvine://j1:8888,j2:8888/")
    assert same.config.cluster_id == "prod"


def test_which_file(tmp_path: Path) -> None:
    home = tmp_path / "home"
    (home / "conf").mkdir(parents=True)
    (home / "conf" / "curvine-cluster.toml").write_text(NEW)
    assert gather_settings(environ={"CURVINE_HOME": str(home)}).config.hostname == "node7"
    assert gather_settings("curvine://h/", environ={"CURVINE_HOME": str(tmp_path)}).config.hostname == ""
    with pytest.raises(ConfigError, match="does not exist"):
        gather_settings("curvine://h/", environ={"CURVINE_CONF_FILE": str(tmp_path / "none")})


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("[client", "is not TOML"),
        ("client = 3", "is not a table"),
        ("[client]\nrpc_timeout_ms = 'soon'", r"\[client\] rpc_timeout_ms = 'soon' cannot be used"),
        ("[client]\nreplicas = true", r"\[client\] replicas"),
        ("[client]\nblock_size = '1KB'", "block_size_bytes"),
        ("[client]\nstorage_type = 'tape'", "known are disk"),
        ("[client]\nmaster_addrs = 'm1:8995'", "master_addrs is not a list"),
        ("[curvfs]\ncolour = 'blue'", "no setting in .curvfs. of"),
        ("[client]\nenable_block_conn_pool = 'maybe'", "enable_block_conn_pool"),
    ],
)
def test_what_cannot_be_used_is_named(tmp_path: Path, content: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said) as caught:
        gather(tmp_path / "c.toml", content, "curvine://h/")
    assert "\n" not in str(caught.value)


def test_a_pool_that_is_off(tmp_path: Path) -> None:
    found = gather(tmp_path / "c.toml", "[client]\nenable_block_conn_pool = false\n", "curvine://h/")
    assert found.config.idle_worker_connections == 0


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "c.toml"
    file.write_text(NEW)
    assert main(["config", "--conf", str(file), "--set", "window=2", "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown["settings"]["window"] == {"value": 2, "source": "override"}
    assert shown["settings"]["masters"]["value"] == "j1:8888,j2:8888"
    assert shown["unused"] == ["[client] read_chunk_size", "[client] umask"]
    assert main(["config", "curvine://h:1/x", "--conf", str(file)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert any(line.split() == ["root", "/x", "URL"] for line in lines)
    assert "[client] umask is not used by this client." in lines
    assert main(["config", "curvine://h/", "--set", "window"]) == 2
    assert "--set NAME=VALUE" in capsys.readouterr().err
    assert main(["config", "curvine://h/", "--set", "colour=blue"]) == 2
    assert "no setting 'colour'" in capsys.readouterr().err
