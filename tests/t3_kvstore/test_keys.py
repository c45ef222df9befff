"""Identity and page keys: the same everywhere, and different wherever the numbers could be."""

from __future__ import annotations

import hashlib
import json
import os
import struct
import subprocess
import sys
import time
from array import array
from pathlib import Path
from typing import Any

import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from curvfs.errors import ConfigError, UsageError
from kvstore import Extra, Geometry, Identity
from kvstore.keys import KeyChain

GOLDEN = Path(__file__).parent.parent / "golden" / "keys.json"
CASES = json.loads(GOLDEN.read_text())["cases"]


def identity(**changes: Any) -> Identity:
    fields: dict[str, Any] = {"model": "m", "revision": "r1", "dtype": "bfloat16", "page_tokens": 16, "layout": "l"}
    return Identity(**(fields | changes))


def hexes(tokens: Any, *, extras: Any = None, chain_hash: str = "xxh3_128", **changes: Any) -> list[str]:
    return [key.hex for key in KeyChain(identity(**changes), chain_hash=chain_hash).keys(tokens, extras=extras)]


# Written from docs/formats.md alone, as another language would.


def documented_field(tag: str, value: bytes) -> bytes:
    return bytes([len(tag)]) + tag.encode() + struct.pack("<Q", len(value)) + value


def documented_keys(case: dict[str, Any]) -> dict[str, Any]:
    h = {"xxh3_128": lambda b: xxhash.xxh3_128(b).digest(), "sha256": lambda b: hashlib.sha256(b).digest()}[
        case["hash"]
    ]
    fields, f = case["identity"], documented_field
    parts = [f("curvfs.identity", b"1")]
    for tag in ("model", "revision", "dtype", "page_tokens", "layout", "rope", "lora", "salt"):
        value = fields.get(tag, "")
        parts.append(f(tag, struct.pack("<I", value) if isinstance(value, int) else value.encode()))
    fingerprint = hashlib.sha256(b"".join(parts)).digest()
    tokens = case["tokens"]
    if isinstance(tokens, dict):
        tokens = range(tokens["start"], tokens["start"] + tokens["count"])
    size = fields["page_tokens"]
    previous = seed = h(f("curvfs.chain.1", case["hash"].encode()) + f("identity", fingerprint))
    pages = []
    for start in range(0, len(tokens) - size + 1, size):
        page = struct.pack(f"<{size}I", *tokens[start : start + size])
        touching = sorted(
            (e["start_token"], e["tag"], bytes.fromhex(e["value"]), e["token_count"])
            for e in case["extras"]
            if e["start_token"] < start + size and e["start_token"] + e["token_count"] > start
        )
        extra = b"".join(
            f("tag", tag.encode()) + f("span", struct.pack("<qQ", begin - start, count)) + f("value", value)
            for begin, tag, value, count in touching
        )
        previous = h(f("prev", previous) + f("tokens", page) + (f("extras", extra) if extra else b""))
        pages.append(
            {
                "key": previous.hex(),
                "tokens": f"{start}+{size}",
                "token_digest": hashlib.sha256(page).hexdigest(),
                "extra_digest": hashlib.sha256(extra).hexdigest() if extra else "",
            }
        )
    answer = {"fingerprint": fingerprint.hex(), "pages": pages}
    if "foreign" in case:
        answer["foreign"] = h(f("prev", seed) + f("foreign", bytes.fromhex(case["foreign"]["bytes"]))).hex()
    return answer


@pytest.mark.parametrize("case", CASES, ids=[case["name"] for case in CASES])
def test_published_vectors(case: dict[str, Any]) -> None:
    whose = Identity(**case["identity"])
    chain = KeyChain(whose, chain_hash=case["hash"])
    tokens = case["tokens"]
    if isinstance(tokens, dict):
        tokens = range(tokens["start"], tokens["start"] + tokens["count"])
    extras = [Extra(e["start_token"], e["token_count"], bytes.fromhex(e["value"]), e["tag"]) for e in case["extras"]]
    assert whose.fingerprint().hex() == case["fingerprint"]
    assert whose.namespace() == case["namespace"]
    assert [
        {
            "key": key.hex,
            "tokens": f"{key.token_start}+{key.token_count}",
            "token_digest": key.token_digest.hex(),
            "extra_digest": key.extra_digest.hex(),
        }
        for key in chain.keys(tokens, extras=extras)
    ] == case["pages"]
    documented = documented_keys(case)
    assert documented["fingerprint"] == case["fingerprint"]
    assert documented["pages"] == case["pages"]
    if "foreign" in case:
        assert chain.foreign(bytes.fromhex(case["foreign"]["bytes"])).hex == case["foreign"]["key"]
        assert documented["foreign"] == case["foreign"]["key"]


def test_fresh_processes_agree_whatever_their_hash_seed() -> None:
    program = """if True:
        import kvstore
        from kvstore.keys import KeyChain
        whose = kvstore.Identity(model="m", revision="r1", dtype="bfloat16", page_tokens=16, layout="l")
        chain, tokens = KeyChain(whose), list(range(1, 601))
        keys = chain.keys(tokens)
        assert keys == chain.keys(tokens, extras=[]) == chain.keys(tokens, extras=None)
        print(whose.namespace(), *(key.hex for key in keys))
    """
    answers = set()
    for seed in (None, "0", "random"):
        environment = {name: value for name, value in os.environ.items() if name != "PYTHONHASHSEED"}
        if seed is not None:
            environment["PYTHONHASHSEED"] = seed
        answers.add(
            subprocess.run(
                [sys.executable, "-c", program], env=environment, check=True, capture_output=True, text=True
            ).stdout
        )
    assert len(answers) == 1
    assert answers.pop().split()[1:] == hexes(list(range(1, 601)))


def test_every_way_to_hand_over_tokens_gives_the_same_keys() -> None:
    numpy = pytest.importorskip("numpy")
    torch = pytest.importorskip("torch")
    tokens = list(range(3, 100))
    wanted = hexes(tokens)
    assert len(wanted) == 6
    ways: list[Any] = [tuple(tokens), range(3, 100), memoryview(array("I", tokens)), memoryview(array("q", tokens))]
    ways += [array("H", tokens), torch.tensor(tokens), torch.tensor(tokens, dtype=torch.int32)]
    ways += [numpy.array(tokens, dtype=kind) for kind in ("<u4", ">u4", "<i8", "u2", "i4", "u8")]
    ways += [numpy.repeat(numpy.array(tokens), 2)[::2], memoryview(numpy.repeat(numpy.array(tokens), 2))[::2]]
    for way in ways:
        assert hexes(way) == wanted, type(way)


@pytest.mark.parametrize(
    "tokens",
    [[1.0], [-1], [2**32], ["1"], b"\0" * 64, "abc", None, 7, memoryview(b"\0" * 64), array("f", [1.0]), {1: 2}],
    ids=repr,
)
def test_what_are_no_tokens(tokens: Any) -> None:
    with pytest.raises(UsageError):
        hexes(tokens)


def test_what_are_no_tokens_in_arrays() -> None:
    numpy = pytest.importorskip("numpy")
    torch = pytest.importorskip("torch")
    for tokens in (
        numpy.array([1.0] * 16),
        numpy.array([-1] * 16),
        numpy.array([2**32] * 16),
        numpy.array([[1] * 16]),
        numpy.array([True] * 16),
        torch.zeros(16),
        torch.zeros(16, dtype=torch.bool),
        torch.tensor([-1] * 16),
        torch.zeros((2, 16), dtype=torch.int64),
    ):
        with pytest.raises(UsageError):
            hexes(tokens)


def test_every_identity_field_changes_every_key() -> None:
    tokens = list(range(64))
    variants = [
        {},
        {"model": "m2"},
        {"revision": "r2"},
        {"dtype": "float16"},
        {"layout": "l2"},
        {"rope": "2"},
        {"lora": "2"},
        {"salt": "2"},
        {"model": "m", "revision": "r1", "lora": "r"},
        {"page_tokens": 32},
    ]
    seen: set[str] = set()
    for changes in variants:
        keys = hexes(tokens, **changes)
        assert seen.isdisjoint(keys), changes
        seen.update(keys)
    assert seen.isdisjoint(hexes(tokens, chain_hash="sha256"))


def test_fields_do_not_run_into_each_other() -> None:
    assert identity(model="ab", revision="c").fingerprint() != identity(model="a", revision="bc").fingerprint()
    assert identity(rope="x", lora="").fingerprint() != identity(rope="", lora="x").fingerprint()


def test_dtypes_are_identities() -> None:
    numbers = ("bfloat16", "float16", "float8_e4m3fn", "float8_e5m2", "uint8")
    geometries = [
        Geometry.attention(layers=1, kv_heads=1, head_dim=8, dtype=number, page_tokens=16) for number in numbers
    ]
    assert len({Identity.of(one, model="m", revision="r").fingerprint() for one in geometries}) == len(numbers)


def test_salts_share_nothing_and_an_empty_salt_is_none() -> None:
    tokens = list(range(16 * 64))
    first, second, none = (hexes(tokens, salt=salt) for salt in ("s1", "s2", ""))
    assert hexes(tokens) == none
    assert len(set(first) | set(second) | set(none)) == 3 * 64
    spaces = {identity(salt=salt).namespace() for salt in ("s1", "s2", "")}
    assert len(spaces) == 3
    assert identity(salt="s1").namespace() == identity(salt="s1", revision="r2").namespace()
    assert "s1" not in repr(identity(salt="s1"))


def test_another_picture_shares_only_what_lies_before_it() -> None:
    tokens = list(range(600))
    tokens[50:250] = [151655] * 200
    digest = "ab" * 32

    def keys(value: str, start: int = 50) -> list[str]:
        return hexes(tokens, extras=[Extra(start, 200, bytes.fromhex(value))])

    stored = keys(digest)
    assert keys(digest) == stored
    for other in (keys("b" + digest[1:]), keys(digest[:-1] + "c"), keys(digest, 66)):
        shared = next(page for page in range(len(stored)) if other[page] != stored[page])
        assert shared == 50 // 16
        assert not set(stored[shared:]) & set(other[shared:])
    assert hexes(tokens)[: 50 // 16] == stored[: 50 // 16]


def test_the_order_of_extras_does_not_matter() -> None:
    extras = [Extra(5, 3, b"a"), Extra(20, 3, b"b"), Extra(5, 3, b"c", "audio")]
    assert hexes(range(64), extras=extras) == hexes(range(64), extras=extras[::-1])


@pytest.mark.parametrize("make", [lambda: Extra(-1, 1, b"a"), lambda: Extra(0, 0, b"a"), lambda: Extra(0, 1, b"")])
def test_extras_that_mean_nothing_are_refused(make: Any) -> None:
    with pytest.raises(UsageError):
        make()


@pytest.mark.parametrize("changes", [{"model": ""}, {"revision": ""}, {"page_tokens": 0}, {"model": "\ud800"}])
def test_an_identity_that_says_too_little_is_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        identity(**changes)


def test_an_unknown_hash_is_refused() -> None:
    with pytest.raises(ConfigError, match="sha256"):
        KeyChain(identity(), chain_hash="md5")


@given(st.lists(st.integers(0, 2**32 - 1), max_size=70), st.integers(1, 9))
def test_keys_are_a_function_of_the_prefix(tokens: list[int], page_tokens: int) -> None:
    chain = KeyChain(identity(page_tokens=page_tokens))
    keys = chain.keys(tokens)
    assert len(keys) == len(tokens) // page_tokens
    assert chain.keys(tokens[: len(tokens) // 2]) == keys[: len(tokens) // 2 // page_tokens]
    assert [key.index for key in keys] == list(range(len(keys)))
    changed = [*tokens[:-1], tokens[-1] ^ 1] if tokens else [0]
    if keys and len(tokens) % page_tokens == 0:
        assert chain.keys(changed)[-1].digest != keys[-1].digest


def test_ten_thousand_pages_a_second() -> None:
    numpy = pytest.importorskip("numpy")
    chain = KeyChain(identity(page_tokens=64))
    tokens = numpy.arange(64 * 5000)
    best = min(_seconds(lambda: chain.keys(tokens)) for _ in range(3))
    assert 5000 / best >= 10_000


def _seconds(work: Any) -> float:
    begun = time.perf_counter()
    work()
    return time.perf_counter() - begun
