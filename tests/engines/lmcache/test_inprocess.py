"""LMCache's in-process engine: stored by a process that is killed, retrieved by another one, bit for bit."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from drivers import read, stored_and_killed
from places import Server, served

DRIVER = Path(__file__).with_name("inprocess.py")
WHOLE, ALL = 320, 327


def ours(url: str, **more: Any) -> dict[str, Any]:
    """The settings that a user writes."""
    name = "remote_storage_plugin.curvfs."
    extra = {f"{name}module_path": "kvstore.connectors.lmcache", f"{name}class_name": "KvstoreConnectorAdapter"}
    extra |= {f"{name}url": url} | {f"{name}{key}": value for key, value in more.items()}
    return {
        "remote_storage_plugins": ["curvfs"],
        "pre_caching_hash_algorithm": "sha256_cbor",
        "extra_config": extra,
    }


def model_directory(tmp_path: Path) -> str:
    """A model whose weights tell which they are."""
    path = tmp_path / "tiny"
    path.mkdir()
    (path / "config.json").write_text("{}")
    (path / "model.safetensors").write_bytes(bytes(range(256)) * 64)
    return str(path)


def test_a_curvine_pool(server: Server, tmp_path: Path) -> None:
    """With nothing but the URL: which weights they are is found out."""
    given = {"settings": ours(f"{server.url}/inprocess"), "model": model_directory(tmp_path)}
    run = stored_and_killed(DRIVER, given, tmp_path)
    assert run.answer == {"found": WHOLE}
    assert "pre_caching_hash_algorithm is builtin" not in run.log
    assert read(DRIVER, "retrieve", given, tmp_path).answer == {"found": WHOLE, "retrieved": WHOLE, "equal": True}


def test_a_directory_and_chunks_that_are_not_whole(tmp_path: Path) -> None:
    given = {"settings": ours(f"file://{tmp_path}", revision="1") | {"save_unfull_chunk": True}}
    assert stored_and_killed(DRIVER, given, tmp_path).answer == {"found": ALL}
    assert read(DRIVER, "retrieve", given, tmp_path).answer == {"found": ALL, "retrieved": ALL, "equal": True}


def test_other_weights_find_nothing_and_unstable_keys_are_warned_of(tmp_path: Path) -> None:
    given = {"settings": ours(f"file://{tmp_path}", revision="1")}
    assert stored_and_killed(DRIVER, given, tmp_path).answer == {"found": WHOLE}
    other = {"settings": ours(f"file://{tmp_path}", revision="2") | {"pre_caching_hash_algorithm": "builtin"}}
    run = read(DRIVER, "retrieve", other, tmp_path)
    assert run.answer["found"] == run.answer["retrieved"] == 0
    assert "Set it to sha256_cbor in LMCache's configuration, everywhere." in run.log


def test_weights_that_cannot_be_told_are_asked_for(tmp_path: Path) -> None:
    run = read(DRIVER, "retrieve", {"settings": ours(f"file://{tmp_path}")}, tmp_path)
    assert run.answer["found"] == 0
    assert "Which weights 'org/model-1.0' are cannot be told" in run.log
    assert 'set "revision" in LMCache\'s extra_config, as remote_storage_plugin.curvfs.<name>' in run.log


def test_a_pool_that_stands_still_is_a_miss_in_time(tmp_path: Path) -> None:
    """LMCache gives up and frees its memory; nothing came into it, and what comes later is right."""
    with served(tmp_path / "pool") as server:
        patience = {"blocking_timeout_secs": 2}
        given = {"settings": ours(server.url, revision="1", timeout_s=4, lookup_timeout_s=2) | patience}
        assert stored_and_killed(DRIVER, given, tmp_path).answer == {"found": WHOLE}
        run = read(DRIVER, "retrieve", {**given, "stop": server.process.pid}, tmp_path)
    assert run.answer == {"found": WHOLE, "retrieved": WHOLE, "equal": True}
    (first,) = [json.loads(line) for line in run.log.splitlines() if line.startswith('{"retrieved"')]
    assert (first["retrieved"], first["untouched"]) == (0, True)
    assert first["took_s"] < 30


@pytest.mark.full
@pytest.mark.parametrize("place", ["kv", "plain"])
@pytest.mark.parametrize("backend", ["fs", "fs O_DIRECT", "local_disk"])
def test_lmcaches_own_files_on_the_mount(
    backend: str, place: str, mount: Path, other_mount: Path, tmp_path: Path
) -> None:
    """Stored through one mount, retrieved through another. ``local_disk`` forgets by design what it had."""
    name = f"{place}/inprocess-{backend.replace(' ', '-')}"
    (mount / name).mkdir(parents=True)

    def settings(where: Path) -> dict[str, Any]:
        if backend == "local_disk":
            return {"local_disk": str(where / name), "max_local_disk_size": 1.0}
        extra: dict[str, Any] = {"remote_storage_plugin.fs.base_path": str(where / name)}
        if backend == "fs O_DIRECT":
            extra |= {"save_chunk_meta": False, "fs_connector_use_odirect": True}
        return {"remote_storage_plugins": ["fs"], "extra_config": extra}

    assert stored_and_killed(DRIVER, {"settings": settings(mount)}, tmp_path).answer == {"found": WHOLE}
    found = 0 if backend == "local_disk" else WHOLE
    answer = read(DRIVER, "retrieve", {"settings": settings(other_mount)}, tmp_path).answer
    assert answer == {"found": found, "retrieved": found, "equal": True}
