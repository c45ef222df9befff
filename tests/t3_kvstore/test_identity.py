"""What tells one engine's pages from another's: found out, or asked for with a sentence that says where."""

from __future__ import annotations

import shutil
from pathlib import Path

import huggingface_hub.constants
import pytest

from curvfs.errors import ConfigError
from curvfs.world import World
from kvstore.connectors.identity import EnginePages, model_name, open_for_engine, weights_revision

DISK = World.real().disk
WHERE = "engine.toml"


def model_directory(path: Path, *, weights: bytes = bytes(range(256)) * 4000) -> Path:
    path.mkdir()
    (path / "config.json").write_text('{"model_type": "llama"}')
    (path / "model.safetensors.index.json").write_text("{}")
    (path / "model-1-of-2.safetensors").write_bytes(weights)
    (path / "model-2-of-2.safetensors").write_bytes(b"small")
    (path / "tokenizer.json").write_text("{}")
    return path


def revision(model: Path | str, branch: str | None = None, **settings: str) -> str:
    return weights_revision(str(model), settings, where=WHERE, disk=DISK, branch=branch)


def test_a_copy_of_a_model_has_the_same_fingerprint(tmp_path: Path) -> None:
    first = model_directory(tmp_path / "a")
    (tmp_path / "elsewhere").mkdir()
    copy = shutil.copytree(first, tmp_path / "elsewhere" / "a")
    (copy / "tokenizer.json").write_text("{ }")
    assert revision(first) == revision(copy)
    assert model_name(str(first)) == model_name(str(copy)) == "a"


@pytest.mark.parametrize("changed", ["config.json", "model.safetensors.index.json", "model-2-of-2.safetensors"])
def test_any_other_file_is_another_revision(tmp_path: Path, changed: str) -> None:
    first, second = model_directory(tmp_path / "a"), model_directory(tmp_path / "b")
    assert revision(first) == revision(second)
    content = bytearray((second / changed).read_bytes())
    content[-1] ^= 1
    (second / changed).write_bytes(content)
    assert revision(first) != revision(second)


def test_trained_weights_of_equal_size_are_another_revision(tmp_path: Path) -> None:
    """Every number changed a little, as by training; sizes and configuration are the same."""
    first = model_directory(tmp_path / "a")
    trained = bytes(byte ^ 1 for byte in bytes(range(256)) * 4000)
    assert revision(first) != revision(model_directory(tmp_path / "b", weights=trained))


def test_what_is_set_is_taken(tmp_path: Path) -> None:
    assert revision(model_directory(tmp_path / "a"), revision="v7") == "v7"
    assert revision("org/model", revision="v7") == "v7"


def test_a_directory_without_weights_is_refused(tmp_path: Path) -> None:
    empty = tmp_path / "empty"
    empty.mkdir()
    with pytest.raises(ConfigError, match=r'holds no files of weights; set "revision" in engine\.toml'):
        revision(empty)


def test_commits_of_the_hub_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    folder = tmp_path / "models--org--model"
    with pytest.raises(
        ConfigError, match=r"Which weights 'org/model' are cannot be told.*set \"revision\" in engine\."
    ):
        revision("org/model")
    first, second = folder / "snapshots" / "c0ffee", folder / "snapshots" / "decade"
    first.mkdir(parents=True)
    assert revision("org/model") == "c0ffee"
    assert (model_name(str(first)), revision(first)) == ("org/model", "c0ffee")
    second.mkdir()
    with pytest.raises(ConfigError, match="exactly one snapshot"):
        revision("org/model")
    (folder / "refs").mkdir()
    (folder / "refs" / "main").write_text("decade")
    assert revision("org/model", branch="") == "decade"
    assert revision("org/model", branch="c0ffee") == "c0ffee"
    with pytest.raises(ConfigError, match="cannot be told"):
        revision("org/model", branch="v2")


def pages(**changes: object) -> EnginePages:
    words = {"model": "m", "revision": "1", "size_bytes": 8192, "page_tokens": 16, "dtype": "bfloat16", "layout": "one"}
    return EnginePages(**{**words, **changes})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "changes",
    [
        {"model": "n"},
        {"revision": "2"},
        {"dtype": "float16"},
        {"layout": "two"},
        {"parameters": "p"},
        {"page_tokens": 8},
    ],
)
def test_pages_of_others_are_not_found(tmp_path: Path, changes: dict[str, object]) -> None:
    settings = {"url": f"file://{tmp_path}", "direct": False}
    content = bytes(8192)
    with open_for_engine(pages(), settings, where=WHERE, world=World.real()) as store:
        assert store.put([store.foreign_key(b"k")], [content]).result() == [8192]
    with open_for_engine(pages(), settings, where=WHERE, world=World.real()) as store:
        assert store.exists([store.foreign_key(b"k")]) == [True]
    with open_for_engine(pages(**changes), settings, where=WHERE, world=World.real()) as store:
        assert store.exists([store.foreign_key(b"k")]) == [False]


def test_salts_share_nothing(tmp_path: Path) -> None:
    settings = {"url": f"file://{tmp_path}", "direct": False}
    with open_for_engine(pages(), {**settings, "salt": "a"}, where=WHERE, world=World.real()) as store:
        store.put([store.foreign_key(b"k")], [bytes(8192)]).result()
        assert store.usage().objects == 1
    with open_for_engine(pages(), {**settings, "salt": "b"}, where=WHERE, world=World.real()) as store:
        assert store.usage().objects == 0


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({}, r'The pool\'s URL is missing; set "url" in engine\.toml'),
        ({"url": "file:///x", "timeout": 3}, r"'timeout' in engine\.toml is not a setting; known are .*timeout_s"),
        ({"url": "file:///x", "capacity": {"quota": 1}}, r"'quota' in \"capacity\" in engine\.toml is not a setting"),
        ({"url": "file:///x", "capacity": {"quota_bytes": "much"}}, "'much' is not a size"),
    ],
)
def test_settings_that_cannot_be(settings: dict[str, object], sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        open_for_engine(pages(), settings, where=WHERE, world=World.real())


def test_a_quota_in_json(tmp_path: Path) -> None:
    settings = {"url": f"file://{tmp_path}", "direct": False, "capacity": {"quota_bytes": "4KiB", "evictor": "off"}}
    with open_for_engine(pages(), settings, where=WHERE, world=World.real()) as store:
        assert [bool(result) for result in store.put([store.foreign_key(b"k")], [bytes(8192)]).result()] == [False]
