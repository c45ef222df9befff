"""Identity and page keys: who computed these bytes, and for which tokens.

::

    field(tag, value) = u8 len(tag) | tag | u64 len(value) | value                 (little-endian)
    identity          = SHA-256 of the identity's fields                            the fingerprint, 32 bytes
    h[-1]             = H(field("curvfs.chain.1", hash name) | field("identity", fingerprint))
    h[i]              = H(field("prev", h[i-1]) | field("tokens", tokens of page i as u32)
                          | field("extras", extras of page i), left out when there are none)

``H`` is ``xxh3_128`` (canonical, big-endian digest) or ``sha256``. No environment variable, locale, word size or
Python hash takes part. ``docs/formats.md`` holds the same for other languages, ``tests/golden/keys.json`` the vectors.
"""

from __future__ import annotations

import hashlib
import struct
import sys
from array import array
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

from curvfs.errors import ConfigError, EnvironmentError_, UsageError
from kvstore.geometry import Geometry

try:
    import xxhash
except ImportError as missing:
    raise EnvironmentError_("kvstore needs the package xxhash; install it with: pip install 'curvfs[kv]'") from missing


def tagged(tag: str, value: bytes) -> bytes:
    """One length-prefixed, tagged field."""
    name = tag.encode()
    return struct.pack("<B", len(name)) + name + struct.pack("<Q", len(value)) + value


def _sha256_digest(data: bytes) -> bytes:
    return hashlib.sha256(data).digest()


#: Name -> (function, bytes of a digest).
CHAIN_HASHES: dict[str, tuple[Callable[[bytes], bytes], int]] = {
    "xxh3_128": (xxhash.xxh3_128_digest, 16),
    "sha256": (_sha256_digest, 32),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Identity:
    """Everything that decides what the numbers of a page mean, besides the tokens.

    ``model``: the name served. ``revision``: what tells these weights from others of that name (a commit, a version, a
    digest of the weights); it has no default, because weights that changed under an equal name give wrong answers.
    ``dtype``, ``page_tokens``, ``layout``: those of the geometry, see :meth:`of`. ``rope``: the position encoding's
    parameters as text. ``lora``: the adapter and its revision. ``salt``: a tenant's secret; pages of different salts
    share nothing, not even a directory name. An empty field and an absent one are the same.
    Raises ConfigError for an empty model or revision and for text that is not Unicode.
    """

    model: str
    revision: str
    dtype: str
    page_tokens: int
    layout: str
    rope: str = ""
    lora: str = ""
    salt: str = field(default="", repr=False)

    def __post_init__(self) -> None:
        if not self.model:
            raise ConfigError("The identity has no model name; give the name under which the model is served.")
        if not self.revision:
            raise ConfigError(
                "The identity has no weights revision; give a commit, version or digest of the weights, because pages"
                " of other weights under the same name must not be taken for these."
            )
        for entry in fields(self):
            value = getattr(self, entry.name)
            if isinstance(value, str):
                try:
                    value.encode()
                except UnicodeEncodeError:
                    raise ConfigError(f"The identity's {entry.name} is not Unicode text.") from None
        if not 0 < self.page_tokens < 1 << 32:
            raise ConfigError(f"A page of {self.page_tokens} tokens cannot be; give 1 or more.")

    @classmethod
    def of(
        cls, geometry: Geometry, *, model: str, revision: str, rope: str = "", lora: str = "", salt: str = ""
    ) -> Identity:
        """The identity of pages of this geometry."""
        return cls(
            model=model,
            revision=revision,
            dtype=geometry.dtype,
            page_tokens=geometry.page_tokens,
            layout=geometry.layout,
            rope=rope,
            lora=lora,
            salt=salt,
        )

    def fingerprint(self) -> bytes:
        """32 bytes that stand for all fields."""
        parts = [tagged("curvfs.identity", b"1")]
        for entry in fields(self):
            value = getattr(self, entry.name)
            parts.append(tagged(entry.name, struct.pack("<I", value) if isinstance(value, int) else value.encode()))
        return _sha256_digest(b"".join(parts))

    def namespace(self) -> str:
        """32 hexadecimal digits: the directory of this tenant and model."""
        return namespace_of(self.model, self.salt)


def namespace_of(model: str, salt: str = "") -> str:
    """32 hexadecimal digits: the directory of a tenant and model."""
    parts = (tagged("curvfs.namespace", b"1"), tagged("model", model.encode()))
    return _sha256_digest(b"".join((*parts, tagged("salt", salt.encode())))).hex()[:32]


@dataclass(frozen=True, slots=True)
class Extra:
    """What else decides the meaning of some tokens, such as the image behind a run of placeholder tokens.

    ``value``: a full digest of the thing, not a piece of one. ``start_token`` counts from the start of the prompt.
    It changes the keys of every page that the span touches, and through the chain of all later ones.
    """

    start_token: int
    token_count: int
    value: bytes
    tag: str = "image"

    def __post_init__(self) -> None:
        if not 0 <= self.start_token < 1 << 62 or not 0 < self.token_count < 1 << 62:
            raise UsageError(f"An extra over {self.token_count} tokens from {self.start_token} covers no token.")
        if not self.value or not self.tag:
            raise UsageError("An extra needs a tag and a value; leave it out when there is nothing to tell apart.")


@dataclass(frozen=True, slots=True)
class PageKey:
    """Key of one page. Opaque to callers but for ``index`` (which page of the prompt) and :attr:`hex`.

    ``token_digest`` is the SHA-256 of the page's tokens, ``extra_digest`` that of its extras: an object found under
    an equal key with other digests is a hash collision, and a miss. Both are empty where the key was made elsewhere.
    """

    digest: bytes
    fingerprint: bytes = field(repr=False)
    index: int = 0
    token_start: int = 0
    token_count: int = 0
    token_digest: bytes = field(default=b"", repr=False)
    extra_digest: bytes = field(default=b"", repr=False)

    @property
    def hex(self) -> str:
        return self.digest.hex()


class KeyChain:
    """Makes the keys of one identity. Callable from any thread."""

    def __init__(self, identity: Identity, *, chain_hash: str = "xxh3_128") -> None:
        found = CHAIN_HASHES.get(chain_hash)
        if found is None:
            raise ConfigError(f"{chain_hash!r} is not a chain hash; write {' or '.join(CHAIN_HASHES)}.")
        self.chain_hash = chain_hash
        self._hash, self.digest_bytes = found
        self.identity = identity
        self.fingerprint = identity.fingerprint()
        self._seed = self._hash(tagged("curvfs.chain.1", chain_hash.encode()) + tagged("identity", self.fingerprint))
        self._before_prev = tagged("prev", bytes(self.digest_bytes))[: -self.digest_bytes]
        tokens_bytes = 4 * identity.page_tokens
        self._before_tokens = struct.pack("<B6sQ", 6, b"tokens", tokens_bytes)

    def keys(self, tokens: Any, *, extras: Iterable[Extra] | None = None) -> list[PageKey]:
        """Keys of all full pages of a prompt, in order; tokens after the last full page have none.

        ``tokens``: numbers of 0 to 2**32 - 1 as a list, tuple, range, array, numpy array, torch tensor, or a memoryview
        of an integer format. No Python code runs per token. Raises UsageError.
        """
        raw = encode_tokens(tokens)
        page_tokens = self.identity.page_tokens
        page_bytes = 4 * page_tokens
        pages = len(raw) // page_bytes
        spans = _page_extras(extras, page_tokens, pages)
        view = memoryview(raw)
        digest, hashed, sha256 = self._seed, self._hash, hashlib.sha256
        before_prev, before_tokens, fingerprint = self._before_prev, self._before_tokens, self.fingerprint
        keys = []
        for index in range(pages):
            page = view[index * page_bytes : (index + 1) * page_bytes]
            extra = spans.get(index, b"") if spans else b""
            if extra:
                message = b"".join((before_prev, digest, before_tokens, page, tagged("extras", extra)))
                extra_digest = sha256(extra).digest()
            else:
                message = b"".join((before_prev, digest, before_tokens, page))
                extra_digest = b""
            digest = hashed(message)
            start = index * page_tokens
            keys.append(PageKey(digest, fingerprint, index, start, page_tokens, sha256(page).digest(), extra_digest))
        return keys

    def foreign(self, key: bytes) -> PageKey:
        """A key that an engine computed itself, taken as opaque bytes. Identity and salt still tell pages apart."""
        if not key:
            raise UsageError("An empty key names nothing; give the engine's own key as bytes.")
        return PageKey(self._hash(tagged("prev", self._seed) + tagged("foreign", key)), self.fingerprint)


def _page_extras(extras: Iterable[Extra] | None, page_tokens: int, pages: int) -> dict[int, bytes]:
    """Page -> its extras as bytes: for each, in order of start, tag and value, where it begins relative to the page."""
    found: dict[int, list[bytes]] = {}
    for extra in sorted(extras or (), key=lambda extra: (extra.start_token, extra.tag, extra.value)):
        first = extra.start_token // page_tokens
        last = (extra.start_token + extra.token_count - 1) // page_tokens
        for page in range(first, min(last + 1, pages)):
            begin = extra.start_token - page * page_tokens
            where = struct.pack("<qQ", begin, extra.token_count)
            found.setdefault(page, []).append(
                tagged("tag", extra.tag.encode()) + tagged("span", where) + tagged("value", extra.value)
            )
    return {page: b"".join(parts) for page, parts in found.items()}


# ---------------------------------------------------------------------------------------------------------- tokens

#: memoryview formats of integers wide enough for tokens; bytes are refused because they may be raw u32 as well.
_INTEGER_FORMATS = frozenset("hHiIlLqQnN")
_REFUSED = "Tokens must be whole numbers of 0 to 4294967295"


def encode_tokens(tokens: Any) -> bytes | bytearray | memoryview:
    """Tokens as u32 little-endian; see :meth:`KeyChain.keys` for what is taken."""
    if isinstance(tokens, bytes | bytearray):
        raise UsageError(f"{_REFUSED}, not bytes; pass memoryview(data).cast('I') when they are native u32 numbers.")
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(tokens, torch.Tensor):
        return _from_torch(tokens)
    numpy = sys.modules.get("numpy")
    if numpy is not None and isinstance(tokens, numpy.ndarray):
        return _from_numpy(numpy, tokens)
    if isinstance(tokens, memoryview | array):
        view = memoryview(tokens)
        if view.ndim != 1 or view.format.lstrip("@=<") not in _INTEGER_FORMATS:
            raise UsageError(f"{_REFUSED} in one dimension, not a buffer of format {view.format!r}.")
        if numpy is not None:
            return _from_numpy(numpy, numpy.asarray(view))
        return _from_sequence(view.tolist())
    if isinstance(tokens, Sequence) and not isinstance(tokens, str):
        return _from_sequence(tokens)
    raise UsageError(
        f"{_REFUSED}, in a list, array, numpy array, torch tensor or memoryview, not a {type(tokens).__name__}."
    )


def _from_sequence(tokens: Sequence[int]) -> bytes | memoryview:
    try:
        numbers = array("I", tokens)
    except (TypeError, OverflowError, ValueError) as error:
        raise UsageError(f"{_REFUSED}: {error}.") from None
    if sys.byteorder == "big":
        numbers.byteswap()
    return memoryview(numbers).cast("B")


def _from_numpy(numpy: Any, tokens: Any) -> bytes | memoryview:
    if tokens.ndim != 1 or tokens.dtype.kind not in "iu":
        raise UsageError(f"{_REFUSED} in one dimension, not {tokens.dtype} of shape {tuple(tokens.shape)}.")
    if tokens.size == 0:
        return b""
    if tokens.dtype != numpy.dtype("<u4"):
        if tokens.dtype.kind == "i" and int(tokens.min()) < 0:
            raise UsageError(f"{_REFUSED}: {int(tokens.min())} is among them.")
        if tokens.dtype.itemsize > 4 and int(tokens.max()) > 0xFFFFFFFF:
            raise UsageError(f"{_REFUSED}: {int(tokens.max())} is among them.")
    raw: memoryview = memoryview(numpy.ascontiguousarray(tokens, dtype="<u4")).cast("B")
    return raw


def _from_torch(tokens: Any) -> bytes | memoryview:
    if tokens.is_floating_point() or tokens.is_complex() or str(tokens.dtype) == "torch.bool":
        raise UsageError(f"{_REFUSED}, not a tensor of {tokens.dtype}.")
    host = tokens.detach().cpu()
    try:
        converted = host.numpy()
    except (RuntimeError, ImportError):  # a torch built without numpy
        return _from_sequence(host.tolist())
    return _from_numpy(sys.modules["numpy"], converted)
