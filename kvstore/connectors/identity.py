"""Whose pages these are: found out from what an engine knows, asked for where it cannot be found out.

An engine's own keys name tokens. Which weights, number format, layout and ranks computed the bytes is added here, and a
store does not open before all of it is known.
"""

from __future__ import annotations

import hashlib
import importlib
import inspect
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from typing import Any

from curvfs.errors import ConfigError
from curvfs.units import parse_size
from curvfs.world import Disk, World
from kvstore.capacity.settings import Capacity
from kvstore.geometry import DTYPES, Geometry, Shard, TensorSpec
from kvstore.keys import Identity
from kvstore.opening import open as open_store
from kvstore.store import KVStore

_CONFIGS = frozenset({"config.json", "params.json", "hf_quant_config.json", "quantize_config.json"})
_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".gguf")
#: Of a file of weights so many evenly spread pieces are read: training or merging an adapter changes most of them.
_SAMPLES = 64
_SAMPLE_BYTES = 4096
_WHOLE = Shard()


@dataclass(frozen=True, slots=True, kw_only=True)
class EnginePages:
    """The pages of one engine, as bytes that it alone gives a meaning.

    ``layout``: words that are equal only where equal bytes mean equal numbers. ``parameters``: what else changes the
    numbers, such as rotary parameters or overrides of the model's configuration.
    """

    model: str
    revision: str
    size_bytes: int
    page_tokens: int
    dtype: str
    layout: str
    parameters: str = ""
    shard: Shard = _WHOLE

    def geometry(self) -> Geometry:
        spec = TensorSpec("data", DTYPES["uint8"], (self.size_bytes,), self.size_bytes)
        return Geometry((spec,), self.page_tokens, self.dtype, self.layout, self.shard)


#: What a user may say about the identity. Everything else in the settings is an option of :func:`kvstore.open`.
IDENTITY_SETTINGS = ("model", "revision", "lora", "salt")
#: Parameters of :func:`kvstore.open` that nobody can write in a configuration.
_OURS = frozenset({"url", "identity", "geometry", "devices", "world"})


def open_for_engine(pages: EnginePages, settings: Mapping[str, Any], *, where: str, world: World) -> KVStore:
    """The store of an engine's pages at ``settings["url"]``. ``where``: the place of the settings, for messages.

    Raises ConfigError, EnvironmentError_, TransportError.
    """
    url = settings.get("url")
    if not url:
        raise ConfigError(f'The pool\'s URL is missing; set "url" in {where}, such as curvine://host:8995/pool.')
    options = {name: value for name, value in settings.items() if name not in ("url", *IDENTITY_SETTINGS)}
    _check_names(options, inspect.signature(open_store).parameters.keys() - _OURS, where)
    if isinstance(options.get("capacity"), Mapping):
        options["capacity"] = _capacity(options["capacity"], f'"capacity" in {where}')
    geometry = pages.geometry()
    identity = Identity.of(
        geometry,
        model=pages.model,
        revision=pages.revision,
        rope=pages.parameters,
        lora=str(settings.get("lora") or ""),
        salt=str(settings.get("salt") or ""),
    )
    return open_store(str(url), identity, geometry=geometry, world=world, **options)


def _check_names(given: Mapping[str, Any], known: Iterable[str], where: str) -> None:
    for name in given.keys() - set(known):
        raise ConfigError(f"{name!r} in {where} is not a setting; known are {', '.join(sorted(known))}.")


def _capacity(given: Mapping[str, Any], where: str) -> Capacity:
    """From JSON, where sizes may be written as ``500GiB``."""
    _check_names(given, [field.name for field in fields(Capacity)], where)
    sizes = {name: parse_size(value) for name, value in given.items() if name.endswith("_bytes") and value is not None}
    return Capacity(**{**given, **sizes})


def name_and_revision(
    model: str, settings: Mapping[str, Any], *, where: str, disk: Disk, branch: str | None = None
) -> tuple[str, str]:
    """Both as set, else found out: :func:`model_name` and :func:`weights_revision`. Raises ConfigError."""
    revision = weights_revision(model, settings, where=where, disk=disk, branch=branch)
    return str(settings.get("model") or model_name(model)), revision


def weights_revision(
    model: str, settings: Mapping[str, Any], *, where: str, disk: Disk, branch: str | None = None
) -> str:
    """What tells these weights from others of that name: as set, a commit, or a digest of a directory's files.

    ``model``: a directory, or a name in the Hugging Face cache of this machine. ``branch``: the revision that the
    engine was told to load, ``""`` for the default one, None when it does not say. Raises ConfigError when it cannot be
    told.
    """
    if settings.get("revision"):
        return str(settings["revision"])
    snapshot = _snapshot(model)
    if snapshot is not None:
        return snapshot[1]
    if os.path.isdir(model):
        return directory_fingerprint(model, disk, where=where)
    commit = _cached_commit(model, branch, disk)
    if commit is None:
        raise ConfigError(
            f"Which weights {model!r} are cannot be told: it is no directory, and this machine's Hugging Face cache"
            f' does not hold exactly one snapshot of it; set "revision" in {where} to their commit or version.'
        )
    return commit


def model_name(model: str) -> str:
    """A name that is the same on every machine for what an engine was given: a directory's own name, not its path."""
    snapshot = _snapshot(model)
    if snapshot is not None:
        return snapshot[0]
    return os.path.basename(os.path.abspath(model)) if model and os.path.isdir(model) else model


def _snapshot(model: str) -> tuple[str, str] | None:
    """Name and commit of a directory in a Hugging Face cache."""
    folders = os.path.abspath(model).split(os.sep)[-3:]
    if len(folders) == 3 and folders[0].startswith("models--") and folders[1] == "snapshots" and os.path.isdir(model):
        return folders[0].removeprefix("models--").replace("--", "/"), folders[2]
    return None


def _cached_commit(model: str, branch: str | None, disk: Disk) -> str | None:
    try:
        constants: Any = importlib.import_module("huggingface_hub.constants")
    except ImportError:
        return None
    folder = os.path.join(constants.HF_HUB_CACHE, f"models--{model.replace('/', '--')}")
    try:
        snapshots = disk.listdir(os.path.join(folder, "snapshots"))
        if branch is None:
            return snapshots[0] if len(snapshots) == 1 else None
        if branch in snapshots:
            return branch
        return disk.read_file(os.path.join(folder, "refs", branch or "main")).decode().strip() or None
    except (OSError, UnicodeDecodeError):
        return None


def directory_fingerprint(path: str, disk: Disk, *, where: str) -> str:
    """32 hexadecimal digits over a model directory: configuration and index files as a whole; of every file of weights
    its name, its size and 64 evenly spread pieces of 4 KiB. Raises ConfigError."""
    digest = hashlib.sha256()
    weights = 0
    try:
        for name in sorted(disk.listdir(path)):
            file = os.path.join(path, name)
            if name in _CONFIGS or name.endswith(".index.json"):
                digest.update(f"{name}:".encode() + hashlib.sha256(disk.read_file(file)).digest())
            elif name.endswith(_WEIGHTS):
                weights += 1
                _add_samples(digest, name, file, disk)
    except OSError as error:
        raise ConfigError(
            f"The model directory {path} cannot be read ({error.strerror}); make it readable, or set"
            f' "revision" in {where}.'
        ) from error
    if weights == 0:
        raise ConfigError(f'The model directory {path} holds no files of weights; set "revision" in {where}.')
    return digest.hexdigest()[:32]


def _add_samples(digest: Any, name: str, file: str, disk: Disk) -> None:
    fd = disk.open(file, os.O_RDONLY | os.O_CLOEXEC)
    try:
        size_bytes = disk.fstat(fd).st_size
        digest.update(f"{name}:{size_bytes}:".encode())
        last = max(0, size_bytes - _SAMPLE_BYTES)
        buffer = memoryview(bytearray(_SAMPLE_BYTES))
        for offset in sorted({last * index // (_SAMPLES - 1) for index in range(_SAMPLES)}):
            digest.update(buffer[: disk.pread_full(fd, buffer, offset)])
    finally:
        disk.close(fd)
