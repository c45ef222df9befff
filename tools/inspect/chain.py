"""A prompt's pages: their keys, and which of them the pool has."""

from __future__ import annotations

import errno
import json
import re
import sys
from dataclasses import fields
from typing import Any

from curvfs.errors import CurvfsError, UsageError, from_os_error
from curvfs.runrecords import running
from curvfs.world import World
from kvstore.backends.base import Backend, Found
from kvstore.header import OBJECT_SUFFIX
from kvstore.keys import Identity, KeyChain

_SPECIAL = ("salt",)


def read_tokens(world: World, path: str) -> list[int]:
    """Token numbers from a file (``-``: standard input): a JSON list, or numbers between blanks or commas."""
    try:
        text = sys.stdin.read() if path == "-" else world.disk.read_file(path).decode()
    except OSError as error:
        raise from_os_error(error, doing=f"reading the tokens in {path}") from error
    except UnicodeDecodeError as error:
        raise UsageError(f"{path} holds no token numbers; give them as text.") from error
    words = re.split(r"[\s,\[\]]+", text)
    try:
        return [int(word) for word in words if word]
    except ValueError as error:
        raise UsageError(
            f"{path} holds no token numbers ({error}); give a JSON list, or numbers between blanks."
        ) from error


def identity_from_file(world: World, path: str, salt: str) -> tuple[Identity, str]:
    """Identity and chain hash from a JSON file with the fields of :class:`kvstore.Identity`."""
    try:
        document = json.loads(world.disk.read_file(path))
    except OSError as error:
        raise from_os_error(error, doing=f"reading the identity in {path}") from error
    except ValueError as error:
        raise UsageError(
            f"{path} is not JSON; give the fields of an identity, as curvfs stats --json has them."
        ) from error
    return _identity(document, path, salt)


def identity_of_process(world: World, pid: int, salt: str) -> tuple[Identity, str, str]:
    """Identity, chain hash and URL of the store that process ``pid`` of this machine has open."""
    for record in running(world, "kvstore"):
        if record.get("pid") == pid:
            if record.get("salted") and not salt:
                raise UsageError(
                    f"The store of process {pid} has a salt, which is told nobody; give it with --salt-file."
                )
            document = {**record.get("identity", {}), "chain_hash": record.get("chain_hash", "xxh3_128")}
            identity, chain_hash = _identity(document, f"the record of process {pid}", salt)
            return identity, chain_hash, str(record.get("url"))
    raise UsageError(f"No process {pid} of this user has a store open here; curvfs stats lists those that have.")


def _identity(document: Any, where: str, salt: str) -> tuple[Identity, str]:
    if not isinstance(document, dict):
        raise UsageError(f"There is no identity in {where}; it must be a JSON object with model, revision and so on.")
    known = {entry.name for entry in fields(Identity)} - set(_SPECIAL)
    chain_hash = str(document.get("chain_hash", "xxh3_128"))
    unknown = set(document) - known - {"chain_hash"}
    if unknown:
        raise UsageError(
            f"{', '.join(sorted(unknown))} in {where} is no part of an identity; known are {', '.join(sorted(known))}."
        )
    try:
        identity = Identity(**document_without(document, "chain_hash"), salt=salt)
    except TypeError as error:
        raise UsageError(f"The identity in {where} is not complete: {error}.") from error
    return identity, chain_hash


def document_without(document: dict[str, Any], name: str) -> dict[str, Any]:
    return {key: value for key, value in document.items() if key != name}


def describe_chain(backend: Backend, chain: KeyChain, tokens: list[int]) -> dict[str, Any]:
    """The pages of ``tokens``, and the objects (of every shard) that the pool has of each. Raises CurvfsError."""
    namespace = chain.identity.namespace()
    pages = []
    for key in chain.keys(tokens):
        digits = key.hex
        directory = f"{namespace}/{digits[:2]}/{digits[2:4]}"
        objects = [
            _object(backend, f"{directory}/{name}", length_bytes)
            for name, length_bytes in _names(backend, directory)
            if re.split(r"[-.]", name)[0] == digits
        ]
        first = key.token_start
        pages.append({"page": key.index, "tokens": [first, first + key.token_count], "key": digits, "objects": objects})
    stored = next((number for number, page in enumerate(pages) if not page["objects"]), len(pages))
    return {
        "namespace": namespace,
        "identity": chain.fingerprint.hex(),
        "chain_hash": chain.chain_hash,
        "page_tokens": chain.identity.page_tokens,
        "tokens": len(tokens),
        "stored_pages": stored,
        "stored_tokens": stored * chain.identity.page_tokens,
        "pages": pages,
    }


def _names(backend: Backend, directory: str) -> list[tuple[str, int]]:
    try:
        entries = backend.records.entries(f"{backend.root}/{directory}")
    except CurvfsError as error:
        if error.errno_ in (errno.ENOENT, errno.ENOTDIR):
            return []
        raise
    return [(entry.name, entry.length_bytes) for entry in entries if entry.name.endswith(OBJECT_SUFFIX)]


def _object(backend: Backend, name: str, length_bytes: int) -> dict[str, Any]:
    (found,) = backend.confirm([name])
    hosts = list(backend.hosts(found)) if isinstance(found, Found) else []
    return {"name": name, "length_bytes": length_bytes, "hosts": hosts}
