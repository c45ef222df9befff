"""What a page holds: bytes per token, shards, units."""

from __future__ import annotations

from typing import Any

import pytest

from curvfs.errors import ConfigError
from kvstore import Geometry, Shard
from kvstore.geometry import MAX_UNIT_BYTES, dtype_named
from kvstore.header import ALIGNMENT_BYTES, ObjectLayout


def attention(**changes: Any) -> Geometry:
    fields: dict[str, Any] = {"layers": 4, "kv_heads": 8, "head_dim": 128, "dtype": "bfloat16", "page_tokens": 16}
    return Geometry.attention(**(fields | changes))


def test_bytes_per_token_of_known_models() -> None:
    assert attention(layers=32).bytes_per_token == 131_072  # Llama-3-8B bf16
    assert attention(layers=28, kv_heads=4, dtype="float16").bytes_per_token == 57_344  # Qwen2-7B fp16
    latent = Geometry.mla(layers=61, latent_dim=576, dtype="bfloat16", page_tokens=64)  # DeepSeek-V3
    assert latent.bytes_per_token == 70_272


def test_a_shard_is_in_the_name_and_not_in_the_layout() -> None:
    ranks = [attention(tp_rank=rank, tp_size=2) for rank in range(2)]
    assert {rank.layout for rank in ranks} == {attention().layout}
    assert [rank.shard.label for rank in ranks] == ["t0of2", "t1of2"]
    assert sum(rank.size_bytes for rank in ranks) == attention().size_bytes


def test_stages_name_the_layers_of_the_whole_model() -> None:
    second = attention(pp_rank=1, pp_size=2)
    assert [spec.name for spec in second.tensors] == ["layer.2.k", "layer.2.v", "layer.3.k", "layer.3.v"]
    uneven = attention(pp_rank=1, pp_size=2, stage_layers=[3, 1])
    assert [spec.name for spec in uneven.tensors] == ["layer.3.k", "layer.3.v"]
    assert second.shard.label == "p1of2"


def test_ranks_with_the_same_heads_share_an_object() -> None:
    shards = [attention(kv_heads=2, tp_rank=rank, tp_size=4).shard for rank in range(4)]
    assert shards == [Shard(0, 2), Shard(0, 2), Shard(1, 2), Shard(1, 2)]


def test_latent_pages_have_no_tensor_parallel_shard() -> None:
    page = Geometry.mla(layers=4, latent_dim=576, dtype="bfloat16", page_tokens=16, pp_rank=1, pp_size=4)
    assert page.shard.label == "p1of4"


@pytest.mark.parametrize(
    "changes",
    [
        {"layers": 0},
        {"kv_heads": 0},
        {"page_tokens": 0},
        {"dtype": "int3"},
        {"order": "dnh"},
        {"tp_size": 3},
        {"tp_rank": 2, "tp_size": 2},
        {"pp_size": 3},
        {"pp_size": 2, "stage_layers": [1, 1]},
        {"unit_heads": 3},
        {"page_tokens": 1 << 24},
    ],
    ids=repr,
)
def test_what_cannot_be(changes: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        attention(**changes)


@pytest.mark.parametrize(
    "tensors",
    [{}, {"": ("uint8", (1,))}, {".pad.0": ("uint8", (1,))}, {"a\n": ("uint8", (1,))}, {"a": ("uint8", (-1,))}],
)
def test_tensors_that_cannot_be(tensors: Any) -> None:
    with pytest.raises(ConfigError):
        Geometry.of(tensors)


@pytest.mark.parametrize(
    "page",
    [
        attention(),
        attention(unit_heads=1),
        attention(order="nhd"),
        attention(page_tokens=17, head_dim=80),
        attention(page_tokens=1),
        attention(page_tokens=4096, layers=1),
        attention(page_tokens=4097, layers=1, unit_heads=1),
        Geometry.mla(layers=3, latent_dim=576, dtype="float8_e4m3fn", page_tokens=7),
        Geometry.raw(0),
        Geometry.raw(1),
        Geometry.raw((1 << 20) - 1),
        Geometry.raw((1 << 20) + 3),
        Geometry.of({"scalar": ("float32", ()), "empty": ("int8", (0, 3)), "five": ("bool", (1, 2, 3, 1, 2))}),
    ],
    ids=lambda page: page.layout[:60] + f":{page.page_tokens}",
)
def test_layouts_are_aligned_and_their_units_cover_the_data(page: Geometry) -> None:
    layout = ObjectLayout(page)
    assert layout.header_bytes % ALIGNMENT_BYTES == layout.data_bytes % ALIGNMENT_BYTES == 0
    assert all(offset % ALIGNMENT_BYTES == 0 for _, offset in layout.tensors)
    assert sum(layout.unit_lengths) == layout.data_bytes
    assert all(0 < length <= MAX_UNIT_BYTES for length in layout.unit_lengths)
    assert sum(length for _, length in layout.pads) == layout.data_bytes - page.size_bytes


def test_units_are_the_heads_of_the_smallest_shard() -> None:
    page = attention(layers=1, page_tokens=64)
    head_bytes = 64 * 128 * 2
    assert ObjectLayout(page).unit_lengths == (8 * head_bytes,) * 2
    finer = attention(layers=1, page_tokens=64, unit_heads=2)
    assert ObjectLayout(finer).unit_lengths == (2 * head_bytes,) * 8
    assert finer.layout == page.layout


def test_dtypes_by_any_name() -> None:
    torch = pytest.importorskip("torch")
    numpy = pytest.importorskip("numpy")
    assert dtype_named(torch.bfloat16).name == dtype_named("bfloat16").name == "bfloat16"
    assert dtype_named(numpy.dtype("float16")) == dtype_named(torch.half) == dtype_named("half")
    assert dtype_named(torch.float8_e4m3fnuz).stored == "U8"


@pytest.mark.parametrize(
    ("pack", "shape", "tensors"),
    [
        ("klthd", (2, 4, 16, 8, 128), 1),
        ("ktlhd", (2, 16, 4, 8, 128), 1),
        ("lkthd", (2, 16, 8, 128), 4),
        ("lkhtd", (2, 8, 16, 128), 4),
    ],
)
def test_pages_as_engines_pack_them(pack: str, shape: tuple[int, ...], tensors: int) -> None:
    model: dict[str, Any] = {"layers": 4, "kv_heads": 8, "head_dim": 128, "dtype": "bfloat16", "page_tokens": 16}
    packed = Geometry.packed(pack, **model)
    assert {spec.shape for spec in packed.tensors} == {shape}
    assert len(packed.tensors) == len(packed.layers) == tensors
    assert packed.bytes_per_token == attention().bytes_per_token
    assert packed.layout != attention().layout
    half = Geometry.packed(pack, **model, tp_rank=1, tp_size=2)
    assert (half.layout, half.size_bytes) == (packed.layout, packed.size_bytes // 2)
    assert [spec.shape for spec in half.resplit(0, 1).tensors] == [spec.shape for spec in packed.tensors]
    assert packed.resplit(1, 2).shard == half.shard
    with pytest.raises(ConfigError):
        packed.resplit(0, 3)
    with pytest.raises(ConfigError):
        Geometry.packed("dkthl", **model)


@pytest.mark.parametrize("order", ["hnd", "nhd"])
@pytest.mark.parametrize(("scales", "per_token"), [("head", 4 * 2 * 8 * 4 / 16), ("token", 4 * 2 * 8 * 4)])
def test_quantized_pages_carry_their_scales(order: str, scales: str, per_token: float) -> None:
    page = attention(dtype="int8", scales=scales, order=order)
    assert page.bytes_per_token == 4 * 2 * 8 * 128 + per_token
    assert page.layout != attention(dtype="int8", order=order).layout
    assert len(page.layers) == 4
    assert page.layers[0] == (0, 3)  # the scales come with the first layer
    shard = attention(dtype="int8", scales=scales, order=order, tp_rank=1, tp_size=2)
    assert 2 * shard.size_bytes == page.size_bytes
    assert shard.layout == page.layout
    for wrong in ({"scales": "block"}, {"scales": scales, "scale_dtype": "int3"}):
        with pytest.raises(ConfigError):
            attention(dtype="int8", **wrong)


def test_layers_are_ranges_of_tensors() -> None:
    assert attention().layers == ((0, 2), (2, 4), (4, 6), (6, 8))
    assert attention(pp_rank=1, pp_size=2).layers == ((0, 2), (2, 4))
    assert Geometry.mla(layers=3, latent_dim=64, dtype="float16", page_tokens=1).layers == ((0, 1), (1, 2), (2, 3))
    assert Geometry.raw(100).layers == ((0, 1),)
    mixed = {"a": 1, "layer.0.k": 1, "layer.0.v": 1, "layer.1.k": 1, "z": 1}
    assert Geometry.of({name: ("uint8", (size,)) for name, size in mixed.items()}).layers == ((0, 3), (3, 5))
