"""LMCache's storage manager of its multiprocess mode: stored by a process that is killed, loaded by another one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from drivers import read, stored_and_killed
from places import Server

DRIVER = Path(__file__).with_name("storage.py")


def plugin(url: str, **more: Any) -> dict[str, Any]:
    return {
        "type": "plugin",
        "module_path": "kvstore.connectors.lmcache_l2",
        "class_name": "KvstoreL2Adapter",
        "adapter_params": {"url": url, "revision": "1", **more},
    }


def native(url: str, **more: Any) -> dict[str, Any]:
    return {
        "type": "native_plugin",
        "module_path": "kvstore.connectors.lmcache_native",
        "class_name": "KvstoreClient",
        "adapter_params": {"url": url, "revision": "1", "dtype": "bfloat16", **more},
    }


def test_the_plug_in_stores_and_the_native_client_loads(server: Server, tmp_path: Path) -> None:
    """Both share objects; another revision of the weights finds none of them."""
    url = f"{server.url}/storage"
    assert stored_and_killed(DRIVER, {"adapter": plugin(url)}, tmp_path).answer["found"] == 5
    answer = read(DRIVER, "load", {"adapter": native(url)}, tmp_path).answer
    assert (answer["found"], answer["equal"]) == (5, True)
    assert read(DRIVER, "load", {"adapter": plugin(url, revision="2")}, tmp_path).answer["found"] == 0


def test_what_is_damaged_is_not_there(tmp_path: Path) -> None:
    """A flipped bit in the third object: two are loaded, and it is put aside."""
    adapter = plugin(f"file://{tmp_path}")
    assert stored_and_killed(DRIVER, {"adapter": adapter}, tmp_path).answer["found"] == 5
    whole = read(DRIVER, "load", {"adapter": adapter}, tmp_path).answer
    assert (whole["found"], whole["equal"], whole["status"]["is_healthy"]) == (5, True, True)
    for path in tmp_path.glob("kv/*/*/*/*.safetensors"):
        data = bytearray(path.read_bytes())
        data[-5000] ^= 1
        path.write_bytes(data)
    answer = read(DRIVER, "load", {"adapter": adapter}, tmp_path).answer
    assert answer["found"] == 0
    assert answer["status"]["quarantined"] == 5


def test_weights_that_cannot_be_told_are_asked_for(tmp_path: Path) -> None:
    adapter = plugin(f"file://{tmp_path}")
    del adapter["adapter_params"]["revision"]
    run = read(DRIVER, "load", {"adapter": adapter}, tmp_path)
    assert run.answer["found"] == 0
    assert 'set "revision" in LMCache\'s "adapter_params" to their commit or version' in run.log
    assert "Which weights 'org/model' are cannot be told" in run.answer["status"]["last_error"]


@pytest.mark.full
@pytest.mark.parametrize("place", ["kv", "plain"])
@pytest.mark.parametrize("kind", ["fs", "fs_native", "fs_native O_DIRECT"])
def test_lmcaches_own_files_on_the_mount(kind: str, place: str, mount: Path, other_mount: Path, tmp_path: Path) -> None:
    """Stored through one mount, loaded through another."""
    name = f"{place}/storage-{kind.replace(' ', '-')}"
    (mount / name).mkdir(parents=True)

    def adapter(where: Path) -> dict[str, Any]:
        options = {"use_odirect": True} if kind.endswith("O_DIRECT") else {}
        return {"type": kind.partition(" ")[0], "base_path": str(where / name), **options}

    assert stored_and_killed(DRIVER, {"adapter": adapter(mount)}, tmp_path).answer["found"] == 5
    answer = read(DRIVER, "load", {"adapter": adapter(other_mount)}, tmp_path).answer
    assert (answer["found"], answer["equal"]) == (5, True)
