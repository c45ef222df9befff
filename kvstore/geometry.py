"""What one object holds: the tensors of one page, their types and shapes, and how they split into units.

A *page* is the keys and values of a fixed number of consecutive tokens. A :class:`Geometry` lists the tensors that
this process keeps of a page, in file order. Of a sharded model it lists those of its own shard; :attr:`Geometry.layout`
describes the model as a whole, because that is what goes into the identity.

A *unit* is what is checksummed on its own: a contiguous piece that a reader may want alone, at most 1 MiB. With
head-major pages (``hnd``) it is ``unit_heads`` heads of one layer's K or V; otherwise a whole tensor.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import prod

from curvfs.errors import ConfigError
from curvfs.units import MIB

MAX_UNIT_BYTES = MIB
#: Bounds that keep a header within :data:`kvstore.header.MAX_HEADER_BYTES`, whatever is asked for.
MAX_TENSORS = 8192
MAX_DIMENSIONS = 16
MAX_PAGE_BYTES = 1 << 31


@dataclass(frozen=True, slots=True)
class Dtype:
    """A number format. ``stored`` is its name in a safetensors file; ``U8`` where that format has none."""

    name: str
    size_bytes: int
    stored: str


#: By the names that torch and ml_dtypes use. ``stored`` keeps to what every reader of safetensors since 0.4 knows.
DTYPES: dict[str, Dtype] = {
    name: Dtype(name, size_bytes, stored)
    for name, size_bytes, stored in (
        ("bool", 1, "BOOL"),
        ("uint8", 1, "U8"),
        ("int8", 1, "I8"),
        ("uint16", 2, "U16"),
        ("int16", 2, "I16"),
        ("uint32", 4, "U32"),
        ("int32", 4, "I32"),
        ("uint64", 8, "U64"),
        ("int64", 8, "I64"),
        ("float16", 2, "F16"),
        ("bfloat16", 2, "BF16"),
        ("float32", 4, "F32"),
        ("float64", 8, "F64"),
        ("float8_e4m3fn", 1, "F8_E4M3"),
        ("float8_e5m2", 1, "F8_E5M2"),
        ("float8_e4m3fnuz", 1, "U8"),
        ("float8_e5m2fnuz", 1, "U8"),
        ("float8_e8m0fnu", 1, "U8"),
    )
}


def dtype_named(name: object) -> Dtype:
    """The :class:`Dtype` of ``"bfloat16"``, ``torch.bfloat16``, ``numpy.dtype("float16")``, ... Raises ConfigError."""
    text = str(getattr(name, "name", None) or name).removeprefix("torch.")
    found = DTYPES.get({"bool_": "bool", "half": "float16", "float": "float32", "double": "float64"}.get(text, text))
    if found is None:
        raise ConfigError(f"{text!r} is not a number format that can be stored; known are {', '.join(DTYPES)}.")
    return found


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """One tensor of a page. ``group_bytes``: the contiguous piece that a reader may want alone. ``head_axis``: the
    dimension that tensor parallelism splits; -1 when every rank holds all of it."""

    name: str
    dtype: Dtype
    shape: tuple[int, ...]
    group_bytes: int
    head_axis: int = -1

    @property
    def size_bytes(self) -> int:
        return prod(self.shape) * self.dtype.size_bytes


@dataclass(frozen=True, slots=True)
class Shard:
    """Which part of a page this process keeps. Part of the object's name and header, never of its key."""

    tp_rank: int = 0
    tp_size: int = 1
    pp_rank: int = 0
    pp_size: int = 1

    def __post_init__(self) -> None:
        for what, rank, size in (("tp", self.tp_rank, self.tp_size), ("pp", self.pp_rank, self.pp_size)):
            if not 0 <= rank < size <= 65536:
                raise ConfigError(f"{what}_rank {rank} of {what}_size {size} is no shard; give 0 <= rank < size.")

    @property
    def label(self) -> str:
        """``t0of2-p1of4``; a dimension that is not split is left out, so an unsharded page has an empty label."""
        parts = []
        if self.tp_size > 1:
            parts.append(f"t{self.tp_rank}of{self.tp_size}")
        if self.pp_size > 1:
            parts.append(f"p{self.pp_rank}of{self.pp_size}")
        return "-".join(parts)

    def all(self) -> list[Shard]:
        """Every shard of the same split."""
        return [
            Shard(tp_rank, self.tp_size, pp_rank, self.pp_size)
            for pp_rank in range(self.pp_size)
            for tp_rank in range(self.tp_size)
        ]


@dataclass(frozen=True, slots=True)
class Geometry:
    """The tensors of one page as this process keeps them; build one with the class methods.

    ``layout`` describes the page of the whole model in words that never change for equal bytes; ``dtype`` is the
    number format of its keys and values (``mixed`` when they differ).
    """

    tensors: tuple[TensorSpec, ...]
    page_tokens: int
    dtype: str
    layout: str
    shard: Shard = Shard()

    def __post_init__(self) -> None:
        names = {tensor.name for tensor in self.tensors}
        if not self.tensors or len(self.tensors) > MAX_TENSORS:
            raise ConfigError(f"A page of {len(self.tensors)} tensors cannot be stored; give 1 to {MAX_TENSORS}.")
        if len(names) != len(self.tensors):
            raise ConfigError("Two tensors of a page have the same name; give each its own.")
        for tensor in self.tensors:
            if not 0 < len(tensor.name) <= 200 or tensor.name.startswith((".", "__")) or not tensor.name.isprintable():
                raise ConfigError(
                    f"{tensor.name!r} cannot name a tensor; use 1 to 200 printable characters, no dot or __ in front."
                )
            if len(tensor.shape) > MAX_DIMENSIONS or any(size < 0 for size in tensor.shape):
                raise ConfigError(f"Tensor {tensor.name} cannot have the shape {tensor.shape}.")
        if self.page_tokens < 1:
            raise ConfigError(f"A page of {self.page_tokens} tokens cannot be; give at least 1.")
        if self.size_bytes > MAX_PAGE_BYTES:
            raise ConfigError(f"A page of {self.size_bytes} bytes is too large; lower page_tokens (limit 2 GiB).")

    @property
    def size_bytes(self) -> int:
        """Payload bytes of this shard's page, without header and padding."""
        return sum(tensor.size_bytes for tensor in self.tensors)

    @property
    def bytes_per_token(self) -> float:
        """Payload bytes that this shard keeps per token."""
        return self.size_bytes / self.page_tokens

    @property
    def layers(self) -> tuple[tuple[int, int], ...]:
        """Which tensors each layer of this shard consists of, as ranges of their numbers, in file order. What belongs
        to no layer goes with the first or the last one; a geometry without layers is one."""
        starts: list[int] = []
        last = ""
        for number, tensor in enumerate(self.tensors):
            kind, _, rest = tensor.name.partition(".")
            name = rest.partition(".")[0] if kind == "layer" else last
            if name != last:
                starts.append(number)
                last = name
        starts = [0, *starts[1:]]
        return tuple(zip(starts, [*starts[1:], len(self.tensors)], strict=True))

    @classmethod
    def attention(
        cls,
        *,
        layers: int,
        kv_heads: int,
        head_dim: int,
        dtype: object,
        page_tokens: int,
        value_dim: int | None = None,
        order: str = "hnd",
        tp_rank: int = 0,
        tp_size: int = 1,
        pp_rank: int = 0,
        pp_size: int = 1,
        stage_layers: Sequence[int] | None = None,
        unit_heads: int | None = None,
        scales: str = "",
        scale_dtype: object = "float32",
    ) -> Geometry:
        """Multi-head or grouped-query attention: tensors ``layer.<i>.k`` and ``layer.<i>.v`` for every layer.

        ``layers`` and ``kv_heads`` are the model's; this rank's part follows from the split. Shapes are
        ``(heads, page_tokens, dim)`` with order ``hnd``, ``(page_tokens, heads, dim)`` with ``nhd``. With more ranks
        than heads, ranks that hold the same heads share one object. ``stage_layers``: layers of each pipeline stage
        where they are not equal. ``unit_heads``: heads of the smallest shard that will ever read these pages; default
        the heads of this rank. ``scales``: quantized pages carry the factors of their numbers in one tensor ``scales``:
        ``head`` of shape ``(layers, 2, heads)``, ``token`` of ``(layers, 2, heads, page_tokens)``, heads and tokens
        swapped with ``nhd``. Raises ConfigError.
        """
        if order not in ("hnd", "nhd"):
            raise ConfigError(f"{order!r} is not an order of a page's dimensions; write hnd or nhd.")
        _positive(layers=layers, kv_heads=kv_heads, head_dim=head_dim, page_tokens=page_tokens)
        value_dim = head_dim if value_dim is None else value_dim
        _positive(value_dim=value_dim)
        number = dtype_named(dtype)
        shard, heads = _shard_of_heads(kv_heads, tp_rank, tp_size, pp_rank, pp_size)
        unit_heads = heads if unit_heads is None else unit_heads
        if unit_heads < 1 or heads % unit_heads:
            raise ConfigError(f"unit_heads {unit_heads} does not divide the {heads} KV heads of this rank.")
        stage = _stage(layers, shard, stage_layers)
        tensors = []
        layout = f"attention-1:{order}:layers={layers}:heads={kv_heads}:k={head_dim}:v={value_dim}"
        if scales:
            factor = dtype_named(scale_dtype)
            if scales not in ("head", "token"):
                raise ConfigError(f"{scales!r} is no kind of scales; write head or token.")
            sizes = {"head": (heads,), "token": (heads, page_tokens) if order == "hnd" else (page_tokens, heads)}
            shape = (len(stage), 2, *sizes[scales])
            axis = 3 if scales == "token" and order == "nhd" else 2
            tensors.append(TensorSpec("scales", factor, shape, prod(shape) * factor.size_bytes, axis))
            layout += f":scales={scales}-{factor.name}"
        for layer in stage:
            for name, dim in (("k", head_dim), ("v", value_dim)):
                shape = (heads, page_tokens, dim) if order == "hnd" else (page_tokens, heads, dim)
                group_heads = unit_heads if order == "hnd" else heads
                group_bytes = group_heads * page_tokens * dim * number.size_bytes
                axis = 0 if order == "hnd" else 1
                tensors.append(TensorSpec(f"layer.{layer}.{name}", number, shape, group_bytes, axis))
        return cls(tuple(tensors), page_tokens, number.name, layout, shard)

    @classmethod
    def packed(
        cls,
        pack: str,
        *,
        layers: int,
        kv_heads: int,
        head_dim: int,
        dtype: object,
        page_tokens: int,
        tp_rank: int = 0,
        tp_size: int = 1,
        pp_rank: int = 0,
        pp_size: int = 1,
        stage_layers: Sequence[int] | None = None,
    ) -> Geometry:
        """Pages as an engine has them in one piece. ``pack`` names the dimensions in order: ``k`` K or V (2), ``l``
        layer, ``t`` token, ``h`` head, ``d`` head_dim.

        ``klthd``: one tensor ``kv``, as LMCache's ``[2, layers, tokens, heads * dim]`` and SGLang's page_first_direct.
        ``ktlhd``: one tensor ``kv``, as SGLang's page_first. ``lkthd`` and ``lkhtd``: a tensor ``layer.<i>.kv`` for
        each layer, as a block of vLLM's paged cache. Raises ConfigError.
        """
        if pack not in ("klthd", "ktlhd", "lkthd", "lkhtd"):
            raise ConfigError(f"{pack!r} is not a way to pack pages; write klthd, ktlhd, lkthd or lkhtd.")
        _positive(layers=layers, kv_heads=kv_heads, head_dim=head_dim, page_tokens=page_tokens)
        number = dtype_named(dtype)
        shard, heads = _shard_of_heads(kv_heads, tp_rank, tp_size, pp_rank, pp_size)
        stage = _stage(layers, shard, stage_layers)
        sizes = {"k": 2, "l": len(stage), "t": page_tokens, "h": heads, "d": head_dim}
        words = pack.removeprefix("l")
        shape = tuple(sizes[word] for word in words)
        names = [f"layer.{layer}.kv" for layer in stage] if pack[0] == "l" else ["kv"]
        group = {"klthd": "thd", "ktlhd": "tlhd", "lkthd": "thd", "lkhtd": "htd"}[pack]
        group_bytes = prod(sizes[word] for word in group) * number.size_bytes
        tensors = tuple(TensorSpec(name, number, shape, group_bytes, words.index("h")) for name in names)
        layout = f"packed-1:{pack}:layers={layers}:heads={kv_heads}:dim={head_dim}"
        return cls(tensors, page_tokens, number.name, layout, shard)

    def resplit(self, tp_rank: int, tp_size: int) -> Geometry:
        """The same pages as another tensor-parallel rank keeps them, ``tp_size`` as objects are split. Every tensor is
        one group here: how a writer cut its units is told by its objects alone. Raises ConfigError."""
        shard = Shard(tp_rank, tp_size, self.shard.pp_rank, self.shard.pp_size)
        tensors = []
        for spec in self.tensors:
            axis = spec.head_axis
            if axis >= 0:
                heads = spec.shape[axis] * self.shard.tp_size
                if heads % tp_size:
                    raise ConfigError(f"{heads} heads do not split over {tp_size} ranks; give a size that divides.")
                shape = (*spec.shape[:axis], heads // tp_size, *spec.shape[axis + 1 :])
                size_bytes = prod(shape) * spec.dtype.size_bytes
                spec = TensorSpec(spec.name, spec.dtype, shape, size_bytes, axis)
            tensors.append(spec)
        return Geometry(tuple(tensors), self.page_tokens, self.dtype, self.layout, shard)

    @classmethod
    def mla(
        cls,
        *,
        layers: int,
        latent_dim: int,
        dtype: object,
        page_tokens: int,
        pp_rank: int = 0,
        pp_size: int = 1,
        stage_layers: Sequence[int] | None = None,
    ) -> Geometry:
        """Multi-head latent attention: one tensor ``layer.<i>.kv`` of shape ``(page_tokens, latent_dim)`` per layer.

        ``latent_dim`` counts the compressed vector and the rotary part (512 + 64 in DeepSeek-V3). Every tensor-parallel
        rank holds the same, so there is no tensor-parallel shard. Raises ConfigError.
        """
        _positive(layers=layers, latent_dim=latent_dim, page_tokens=page_tokens)
        number = dtype_named(dtype)
        shard = Shard(0, 1, pp_rank, pp_size)
        group_bytes = page_tokens * latent_dim * number.size_bytes
        tensors = tuple(
            TensorSpec(f"layer.{layer}.kv", number, (page_tokens, latent_dim), group_bytes)
            for layer in _stage(layers, shard, stage_layers)
        )
        return cls(tensors, page_tokens, number.name, f"mla-1:layers={layers}:latent={latent_dim}", shard)

    @classmethod
    def of(
        cls,
        tensors: Mapping[str, tuple[object, Iterable[int]]],
        *,
        page_tokens: int = 1,
        shard: Shard | None = None,
    ) -> Geometry:
        """Any named tensors, ``{name: (dtype, shape)}``, in the order given. Raises ConfigError."""
        specs = []
        for name, (dtype, dimensions) in tensors.items():
            number, shape = dtype_named(dtype), tuple(dimensions)
            specs.append(TensorSpec(name, number, shape, prod(shape) * number.size_bytes))
        numbers = {spec.dtype.name for spec in specs}
        words = ",".join(f"{spec.name}={spec.dtype.name}{list(spec.shape)}" for spec in specs)
        dtype_name = numbers.pop() if len(numbers) == 1 else "mixed"
        return cls(tuple(specs), page_tokens, dtype_name, f"tensors-1:{words}", shard or Shard())

    @classmethod
    def raw(cls, size_bytes: int, *, page_tokens: int = 1) -> Geometry:
        """``size_bytes`` of bytes that somebody else gives a meaning: one ``uint8`` tensor ``data``."""
        return cls.of({"data": ("uint8", (size_bytes,))}, page_tokens=page_tokens)


def _positive(**numbers: int) -> None:
    for name, number in numbers.items():
        if number < 1:
            raise ConfigError(f"{name} is {number}; give at least 1.")


def _shard_of_heads(kv_heads: int, tp_rank: int, tp_size: int, pp_rank: int, pp_size: int) -> tuple[Shard, int]:
    """The shard, and how many heads are in it. With more ranks than heads, several ranks have the same shard."""
    shard = Shard(tp_rank, tp_size, pp_rank, pp_size)
    if tp_size > kv_heads and tp_size % kv_heads == 0:
        shard = Shard(tp_rank * kv_heads // tp_size, kv_heads, pp_rank, pp_size)
    if kv_heads % shard.tp_size:
        raise ConfigError(f"{kv_heads} KV heads do not split over {tp_size} ranks; give a tp_size that divides.")
    return shard, kv_heads // shard.tp_size


def _stage(layers: int, shard: Shard, stage_layers: Sequence[int] | None) -> range:
    """The layers of one pipeline stage."""
    if stage_layers is None:
        if layers % shard.pp_size:
            raise ConfigError(f"{layers} layers do not split evenly over {shard.pp_size} stages; give stage_layers.")
        stage_layers = [layers // shard.pp_size] * shard.pp_size
    if len(stage_layers) != shard.pp_size or sum(stage_layers) != layers or min(stage_layers) < 1:
        raise ConfigError(f"stage_layers {list(stage_layers)} do not make {layers} layers in {shard.pp_size} stages.")
    first = sum(stage_layers[: shard.pp_rank])
    return range(first, first + stage_layers[shard.pp_rank])
