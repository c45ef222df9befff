"""The caller's memory: everything that may be handed over, every bit pattern, and everything that may not."""

from __future__ import annotations

import ctypes
import subprocess
import sys
from array import array
from typing import Any

import pytest

from curvfs.errors import UsageError
from kvstore import Geometry, KVStore
from kvstore.geometry import DTYPES
from tests.t3_kvstore.places import Directory, empty, payload, untouched

PAGE = Geometry.attention(layers=2, kv_heads=2, head_dim=8, dtype="float32", page_tokens=4)
ONE = 2 * 4 * 8 * 4  # bytes of one tensor
ROUND = PAGE.size_bytes


def put_and_get(store: KVStore, source: Any, target: Any) -> None:
    keys = store.keys(list(range(store.page_tokens)))
    assert store.put(keys, [source]).result() == [store.geometry.size_bytes], store.stats().last_error
    assert store.get(keys, [target]).result() == [store.geometry.size_bytes], store.stats().last_error


def test_plain_bytes_however_they_are_cut(directory: Directory) -> None:
    content = payload(ROUND, 1)
    offset = bytearray(64) + content
    owned = ctypes.create_string_buffer(content, ROUND)
    sources: list[Any] = [
        content,
        bytearray(content),
        [content],
        memoryview(offset)[64:],
        memoryview(content).cast("I"),
        memoryview(content).cast("B", (2, ROUND // 2)),
        array("f", content),
        owned,
        (ctypes.addressof(owned), ROUND),
        [content[:1], content[1:7], b"", content[7 : ONE + 3], content[ONE + 3 :]],
        [content[index : index + ONE] for index in range(0, ROUND, ONE)],
        [(ctypes.addressof(owned), 100), memoryview(content)[100:]],
    ]
    for number, source in enumerate(sources):
        got = bytearray(ROUND)
        put_and_get(directory.open(PAGE, revision=f"r{number}"), source, got)
        assert got == content, number
    store = directory.open(PAGE, revision="targets")
    room = ctypes.create_string_buffer(ROUND)
    targets: list[Any] = [
        bytearray(ROUND),
        [bytearray(3), bytearray(ROUND - 3)],
        memoryview(bytearray(ROUND + 1))[1:],
        array("f", bytes(ROUND)),
        (ctypes.addressof(room), ROUND),
    ]
    for target in targets:
        put_and_get(store, content, target)
        pieces = target if isinstance(target, list) else [target]
        got = room.raw if isinstance(target, tuple) else b"".join(memoryview(piece).cast("B") for piece in pieces)
        assert got == content


def test_tensors_of_any_stride(directory: Directory) -> None:
    torch = pytest.importorskip("torch")
    wide = torch.arange(4 * 3 * 20 * 8, dtype=torch.float32).reshape(4, 3, 20, 8)
    sources = [
        [tensor[:2, 5:9].requires_grad_() for tensor in wide],
        [tensor.transpose(1, 2).contiguous().transpose(1, 2)[:2, 5:9] for tensor in wide],
        [tensor[:1, 3:7].expand(2, 4, 8) for tensor in wide],
        [torch.flip(tensor, (1,))[:2, ::5] for tensor in wide],
    ]
    for number, source in enumerate(sources):
        target = [torch.zeros(3, 20, 8)[:2, 5:9] for _ in range(4)]
        put_and_get(directory.open(PAGE, revision=f"r{number}"), source, target)
        assert all(torch.equal(one, other) for one, other in zip(source, target, strict=True))
    around = torch.zeros(4, 3, 20, 8)
    put_and_get(directory.open(PAGE, revision="r0"), sources[0], [one[:2, 5:9] for one in around])
    around[:, :2, 5:9] = 0
    assert not around.any()


def test_arrays_of_any_stride(directory: Directory) -> None:
    numpy = pytest.importorskip("numpy")
    wide = numpy.arange(4 * 3 * 20 * 8, dtype="f4").reshape(4, 3, 20, 8)
    for number, source in enumerate(([one[1:, 3:7] for one in wide], [one[:2, ::5][:, ::-1] for one in wide])):
        target = [numpy.zeros((3, 20, 8), "f4")[:2, 5:9] for _ in range(4)]
        put_and_get(directory.open(PAGE, revision=f"r{number}"), source, target)
        assert all((one == other).all() for one, other in zip(source, target, strict=True))


@pytest.mark.parametrize("name", sorted(DTYPES))
def test_every_bit_pattern_of_every_dtype(directory: Directory, name: str) -> None:
    torch = pytest.importorskip("torch")
    dtype = getattr(torch, name)
    if name == "bool":
        bits = torch.arange(256) % 2 == 0
    else:
        patterns = torch.arange(65536, dtype=torch.int32).to(torch.uint16).view(torch.uint8)
        bits = patterns.repeat(4).view(dtype)
    shape = (2, len(bits) // 2)
    page = Geometry.of(
        {"x": (dtype, shape), "scalar": (dtype, ()), "five": (dtype, (1, 1, 2, 1, 1)), "no": (dtype, (0,))}
    )
    source = [bits.reshape(shape), bits[3], bits[:2].reshape(1, 1, 2, 1, 1), bits[:0]]
    target = [torch.zeros(one.shape, dtype=torch.uint8).to(dtype) for one in source]
    store = directory.open(page)
    put_and_get(store, source, target)
    for one, other in zip(source, target, strict=True):
        raw = [bytes(t.reshape(-1).view(torch.uint8).numpy()) if t.numel() else b"" for t in (one, other)]
        assert raw[0] == raw[1]
    elements = bits.numel() + 1 + 2
    assert page.size_bytes == elements * DTYPES[name].size_bytes
    safetensors = pytest.importorskip("safetensors")
    with safetensors.safe_open(directory.block_file(store, store.keys([0])[0]), "pt") as file:
        assert bytes(file.get_tensor("x").reshape(-1).view(torch.uint8).numpy()) == bytes(
            source[0].reshape(-1).view(torch.uint8).numpy()
        )


def test_number_formats_that_numpy_lacks_travel_as_bits(directory: Directory) -> None:
    numpy = pytest.importorskip("numpy")
    for number, (name, kind) in enumerate((("bfloat16", "u2"), ("float8_e4m3fn", "u1"), ("float16", "f2"))):
        page = Geometry.of({"x": (name, (4, 4096))})
        source = numpy.arange(16384).astype("u2" if kind == "u2" else "u1").astype(kind).reshape(4, 4096)
        target = numpy.zeros_like(source)
        put_and_get(directory.open(page, revision=f"r{number}"), [source], [target])
        assert (source == target).all()


def refused(directory: Directory, source: Any, *, target: Any = None) -> str:
    """The sentence with which a segment list is refused, in both directions unless only one is given."""
    store = directory.open(PAGE)
    keys = store.keys(list(range(4)))
    with pytest.raises(UsageError) as caught:
        store.get(keys, [target]) if target is not None else store.put(keys, [source])
    assert directory.objects() == []
    assert store.stats().in_flight == 0
    return str(caught.value)


def test_wrong_pieces_are_refused_before_a_byte_moves(directory: Directory) -> None:
    torch = pytest.importorskip("torch")
    numpy = pytest.importorskip("numpy")
    good = [torch.zeros(2, 4, 8) for _ in range(4)]
    for source in (b"", bytes(ROUND + 1), [bytes(ROUND), b"x"], bytearray(ROUND - 1)):
        assert str(ROUND) in refused(directory, source)
    assert "4 tensors, not 3" in refused(directory, good[:3])
    assert "float16" in refused(directory, [*good[:3], torch.zeros(2, 4, 8, dtype=torch.float16)])
    assert "bfloat16" in refused(directory, [*good[:3], torch.zeros(2, 4, 8, dtype=torch.bfloat16)])
    assert "(4, 2, 8)" in refused(directory, [*good[:3], torch.zeros(4, 2, 8)])
    assert "meta" in refused(directory, [*good[:3], torch.zeros(2, 4, 8, device="meta")])
    assert "sparse" in refused(directory, [*good[:3], torch.zeros(2, 4, 8).to_sparse()])
    assert "int32" in refused(directory, [*good[:3], numpy.zeros((2, 4, 8), "i4")])
    assert ">f4" in refused(directory, [*good[:3], numpy.zeros((2, 4, 8), ">f4")])
    assert "contiguous" in refused(directory, memoryview(bytes(2 * ROUND))[::2])
    for source in (None, 7, "text", object(), (1, 2, 3), [None], (0, ROUND), (4096, -1)):
        refused(directory, source)
    # Targets that cannot be written to.
    assert "read-only" in refused(directory, None, target=bytes(ROUND))
    frozen = numpy.zeros((2, 4, 8), "f4")
    frozen.flags.writeable = False
    assert "read-only" in refused(directory, None, target=[*good[:3], frozen])
    assert "repeats" in refused(directory, None, target=[*good[:3], torch.zeros(1, 4, 8).expand(2, 4, 8)])
    store = directory.open(PAGE)
    with pytest.raises(UsageError, match="1 keys came with 2"):
        store.put(store.keys(list(range(4))), [bytes(ROUND)] * 2)


def test_nothing_holds_the_callers_memory_afterwards(directory: Directory) -> None:
    store = directory.open(PAGE)
    keys = store.keys(list(range(4)))
    source, target = bytearray(payload(ROUND, 1)), bytearray(ROUND)
    store.put(keys, [source]).result()
    store.get(keys, [target]).result()
    absent = bytearray(ROUND)
    store.get([store.foreign_key(b"none")], [absent]).result()
    for buffer in (source, target, absent):
        buffer.clear()  # a buffer that somebody still looks at cannot change its size


def test_misses_leave_memory_untouched(directory: Directory) -> None:
    store, got = directory.open(PAGE), empty(PAGE, 3)
    assert not any(store.get(store.keys(list(range(12))), got).result())
    assert untouched(got)


def test_without_torch_and_numpy_the_library_imports_and_works(directory: Directory) -> None:
    program = f"""if True:
        import sys
        import kvstore
        page = kvstore.Geometry.of({{"x": ("bfloat16", (8, 16))}}, page_tokens=4)
        whose = kvstore.Identity.of(page, model="m", revision="r")
        with kvstore.open({directory.url!r}, whose, geometry=page) as store:
            keys = store.keys([1, 2, 3, 4])
            content, got = bytes(range(256)), bytearray(256)
            assert store.put(keys, [content]).result() == [256]
            assert store.get(keys, [got]).result() == [256] and got == content
        assert not {{"torch", "numpy", "trio"}} & set(sys.modules)
    """
    subprocess.run([sys.executable, "-c", program], check=True)


def test_the_import_is_quick() -> None:
    def cpu_s(module: str) -> float:
        program = f"import time; begun = time.process_time(); import {module}; print(time.process_time() - begun)"
        runs = [subprocess.run([sys.executable, "-c", program], check=True, capture_output=True) for _ in range(3)]
        return min(float(run.stdout) for run in runs)

    taken_s = cpu_s("kvstore")
    if taken_s > 0.150:  # a busy machine? then trio, which it does without, is as slow
        assert taken_s <= 2 * cpu_s("trio")
