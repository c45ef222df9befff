"""SGLang's real HiCacheController and host pools on our backend, on a real pool; its file backend beside it."""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import hicache
import pytest
import torch
from hicache import PAGE_TOKENS, PAGES, Controller, equal, fill, mha_pool, mla_pool, read, storage_config
from places import Server, served
from sglang.srt.mem_cache.hicache_storage import HiCacheFile, PoolHitPolicy, PoolName, PoolTransfer
from sglang.srt.mem_cache.storage import StorageBackendFactory

from curvfs.errors import ConfigError
from kvstore.connectors.sglang import KvstoreHiCache

LAYOUTS = ["layer_first", "page_first", "page_first_direct"]
TOKENS = list(range(100, 100 + PAGES * PAGE_TOKENS))
KEYS = [f"{number:064x}" for number in range(PAGES)]


def settings(url: str, *, interface_v1: int = 1, **more: Any) -> dict[str, Any]:
    module = {"backend_name": "curvfs", "module_path": "kvstore.connectors.sglang", "class_name": "KvstoreHiCache"}
    return {**module, "interface_v1": interface_v1, "url": url, "revision": "1", "direct": False, **more}


@contextmanager
def controller(pool: Any, backend: str, extra: dict[str, Any], **changes: Any) -> Iterator[Controller]:
    one = Controller(pool, backend, extra, **changes)
    try:
        yield one
    finally:
        one.close()


@contextmanager
def backend(pool: Any, extra: dict[str, Any], **changes: Any) -> Iterator[KvstoreHiCache]:
    """Ours as SGLang's factory makes it."""
    one = StorageBackendFactory.create_backend("dynamic", storage_config(extra, **changes), pool)
    one.register_mem_pool_host(pool)
    try:
        yield one
    finally:
        one.close()


@pytest.fixture
def url(server: Server, request: pytest.FixtureRequest) -> str:
    """A place of each test's own in the session's pool."""
    return f"{server.url}/{request.node.name.translate(str.maketrans('[]/', '---'))}"


@pytest.mark.parametrize("loan", [False, True])
@pytest.mark.parametrize("interface_v1", [0, 1])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_pages_come_back_bit_equal(url: str, layout: str, interface_v1: int, loan: bool) -> None:
    """Out, the host memory zeroed, and in again by another controller: as after a restart, or in another process."""
    extra = settings(url, interface_v1=interface_v1, loan=loan)
    first = mha_pool(layout)
    with controller(first, "dynamic", extra) as one:
        indices, want = fill(first)
        assert one.back_up(TOKENS, indices) == len(TOKENS)
        stats = one.backend.get_stats()
        assert sum(stats.backup_pgs) == PAGES and min(stats.backup_bandwidth) > 0
        first.free(indices)
        first.kv_buffer.zero_()
        found, count, where = one.prefetch([*TOKENS, 7, 8, 9, 10])
        assert (found, count) == (len(TOKENS), len(TOKENS))
        assert equal(read(first, where), want)
    second = mha_pool(layout)
    with controller(second, "dynamic", extra) as one:
        found, count, where = one.prefetch([*TOKENS, 7, 8, 9, 10])
        assert (found, count) == (len(TOKENS), len(TOKENS))
        assert equal(read(second, where), want)
        assert sum(one.backend.get_stats().prefetch_pgs) == PAGES
        assert one.prefetch([1, 2, 3, 4])[:2] == (0, 0)


def test_large_aligned_pages_are_read_in_place(tmp_path: Path) -> None:
    """With ``loan`` and pieces that direct I/O takes, nothing is copied."""
    pool = mha_pool("page_first_direct", page_tokens=16, heads=4, head_dim=64)  # 24 KiB a piece
    if not pool.is_stride_page_aligned():
        pytest.skip("this allocator did not align the host pool to pages")
    with backend(pool, settings(f"file://{tmp_path}", loan=True)) as one:
        indices, want = fill(pool, 3, page_tokens=16)
        assert one.batch_set_v1(KEYS[:3], indices) == [True] * 3
        pool.kv_buffer.zero_()
        assert one.batch_get_v1(KEYS[:3], indices) == [True] * 3
        assert equal(read(pool, indices, page_tokens=16), want)
        assert one._stores["kv"].stats().loans_copied == 0


@pytest.mark.parametrize("layout", LAYOUTS)
def test_flat_and_in_place_are_the_same_pages(url: str, layout: str) -> None:
    """What an engine without ``interface_v1`` stored, one with it reads, and the other way round."""
    pool = mha_pool(layout)
    indices, want = fill(pool)
    with backend(pool, settings(url)) as one:
        assert one.batch_set(KEYS, [pool.get_data_page(start) for start in indices[::PAGE_TOKENS].tolist()])
        pool.kv_buffer.zero_()
        assert one.batch_get_v1(KEYS, indices) == [True] * PAGES
        assert equal(read(pool, indices), want)
        turned = KEYS[0][::-1]
        assert one.batch_set_v1([turned], indices[:PAGE_TOKENS]) == [True]
        assert torch.equal(one.get(turned, pool.get_dummy_flat_data_page()), want[0])


@pytest.mark.parametrize("interface_v1", [0, 1])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_latent_pages_are_shared_by_ranks(url: str, layout: str, interface_v1: int) -> None:
    extra = settings(url, interface_v1=interface_v1)
    pool = mla_pool(layout)
    indices, want = fill(pool)
    ranks, there = {"tp_size": 2, "is_mla_model": True}, mla_pool(layout)
    with (
        backend(pool, extra, tp_rank=0, **ranks) as writer,
        backend(there, extra, tp_rank=1, **ranks) as other,
    ):
        if interface_v1:
            assert writer.batch_set_v1(KEYS, indices) == [True] * PAGES
        else:
            assert writer.batch_set(KEYS, [pool.get_data_page(start) for start in indices[::PAGE_TOKENS].tolist()])
        assert other.batch_exists([*KEYS, "f" * 64]) == PAGES
        where = there.alloc(PAGES * PAGE_TOKENS)
        assert other.batch_get_v1(KEYS, where) == [True] * PAGES
        assert equal(read(there, where), want)


@pytest.mark.parametrize(
    "changes",
    [
        {"tp_rank": 1, "tp_size": 2},
        {"tp_size": 2},
        {"pp_rank": 1, "pp_size": 2},
        {"attn_cp_rank": 1, "attn_cp_size": 2},
        {"model_name": "org/other"},
        {"revision": "2"},
        {"layout": "page_first"},
        {"head_dim": 16},
    ],
    ids=str,
)
def test_pages_of_others_are_not_taken(url: str, changes: dict[str, Any]) -> None:
    """SGLang's keys are equal for all of these."""
    pool = mha_pool("layer_first")
    indices, _ = fill(pool)
    with backend(pool, settings(url)) as one:
        assert one.batch_set_v1(KEYS, indices) == [True] * PAGES
        assert one.batch_exists(KEYS) == PAGES
    changes = dict(changes)
    other = mha_pool(changes.pop("layout", "layer_first"), head_dim=changes.pop("head_dim", hicache.HEAD_DIM))
    extra = settings(url, **({"revision": changes.pop("revision")} if "revision" in changes else {}))
    with backend(other, extra, **changes) as two:
        assert two.batch_exists(KEYS) == 0
        assert two.batch_get_v1(KEYS, indices) == [False] * PAGES


@pytest.mark.parametrize("layout", ["layer_first", "page_first"])
def test_pools_beside_the_main_one_as_with_sglangs_file_backend(url: str, tmp_path: Path, layout: str) -> None:
    """The same calls to both: what they answer about every prefix, and every byte, is the same."""
    main, window, state = mha_pool(layout), mha_pool(layout), mha_pool(layout, head_dim=16)
    indices, wanted = zip(*(fill(pool) for pool in (main, window, state)), strict=True)
    names = (PoolName.KV, PoolName.SWA, PoolName.MAMBA)
    file = HiCacheFile(storage_config({"file_storage_path": str(tmp_path)}), str(tmp_path))
    file.register_mem_pool_host(main)
    with backend(main, settings(url)) as ours:
        for one in (file, ours):
            for name, pool in zip(names, (main, window, state), strict=True):
                one.register_mem_host_pool_v2(pool, name)
            holes = {PoolName.KV: (), PoolName.SWA: (1,), PoolName.MAMBA: (0, 1, 3)}
            for name, where in zip(names, indices, strict=True):
                kept = [page for page in range(PAGES) if page not in holes[name]]
                slots = torch.cat([where[page * PAGE_TOKENS :][:PAGE_TOKENS] for page in kept])
                transfer = PoolTransfer(name=name, host_indices=slots, keys=[KEYS[page] for page in kept])
                assert one.batch_set_v2([transfer]) == {name: [True] * len(kept)}
        for policy in (PoolHitPolicy.ALL_PAGES, PoolHitPolicy.TRAILING_PAGES):
            for name in names[1:]:
                for count in (1, 2):
                    asked = [PoolTransfer(name=name, keys=KEYS[:count], hit_policy=policy)]
                    assert ours.batch_exists_v2([*KEYS, "f" * 64], asked) == file.batch_exists_v2(
                        [*KEYS, "f" * 64], asked
                    )
        for one in (file, ours):
            for pool in (main, window, state):
                pool.kv_buffer.zero_()
            asked = [
                PoolTransfer(name=name, host_indices=where, keys=KEYS)
                for name, where in zip(names, indices, strict=True)
            ]
            assert one.batch_get_v2(asked) == {
                PoolName.KV: [True] * 5,
                PoolName.SWA: [True, False, True, True, True],
                PoolName.MAMBA: [False, False, True, False, True],
            }
            assert equal(read(main, indices[0]), wanted[0])
            assert equal(read(window, indices[1])[2:], wanted[1][2:])
            assert torch.equal(read(state, indices[2])[4], wanted[2][4])


def test_damaged_pages_end_the_prefix(tmp_path: Path) -> None:
    pool = mha_pool("page_first")
    with controller(pool, "dynamic", settings(f"file://{tmp_path}")) as one:
        indices, want = fill(pool)
        one.back_up(TOKENS, indices)
        hashes = one.controller.get_hash_str(TOKENS, None, page_size=PAGE_TOKENS)
        store = one.backend._stores["kv"]
        path = tmp_path / "kv" / store.object_name(store.foreign_key(hashes[3].encode()))
        content = bytearray(path.read_bytes())
        content[-4096:] = bytes(byte ^ 0xFF for byte in content[-4096:])
        path.write_bytes(content)
        pool.kv_buffer.zero_()
        found, count, where = one.prefetch(TOKENS)
        assert (found, count) == (len(TOKENS), 3 * PAGE_TOKENS)
        assert equal(read(pool, where)[:3], want[:3])
        assert not read(pool, where)[3].any()  # untouched


def test_a_dead_pool_is_misses_in_bounded_time(tmp_path: Path) -> None:
    with served(tmp_path / "pool") as server:
        pool = mha_pool("page_first")
        with controller(pool, "dynamic", settings(server.url, timeout_s=5, lookup_timeout_s=1)) as one:
            indices, _ = fill(pool)
            assert one.back_up(TOKENS, indices) == len(TOKENS)
            assert one.backend.batch_exists(KEYS) == 0
            server.kill()
            begin = time.monotonic()
            assert one.back_up([token + 1 for token in TOKENS], indices) == 0
            assert one.backend.batch_get_v1(KEYS, indices) == [False] * PAGES
            found, count, _ = one.prefetch([token + 2 for token in TOKENS])
            assert (found, count) == (0, 0)
            assert time.monotonic() - begin < 60


def test_what_cannot_be_found_out_is_asked_for(tmp_path: Path) -> None:
    pool = mha_pool("page_first")
    extra = settings(f"file://{tmp_path}")
    del extra["revision"]
    with pytest.raises(ConfigError, match=r'org/model.*set "revision" in --hicache-storage-backend-extra-config'):
        Controller(pool, "dynamic", extra)
    with pytest.raises(ConfigError, match=r'set "url" in --hicache-storage-backend-extra-config'):
        Controller(pool, "dynamic", settings(""))


def test_the_url_is_enough_where_the_model_is_a_directory(url: str, tmp_path: Path) -> None:
    """Its weights tell which they are; a copy elsewhere is the same model, other weights are not."""
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text("{}")
    (model / "model.safetensors").write_bytes(b"weights")
    module = {"backend_name": "curvfs", "module_path": "kvstore.connectors.sglang", "class_name": "KvstoreHiCache"}
    extra = {**module, "url": url}
    first = mha_pool("page_first")
    with controller(first, "dynamic", extra, model=str(model)) as one:
        indices, want = fill(first)
        assert one.back_up(TOKENS, indices) == len(TOKENS)
    moved = shutil.copytree(model, tmp_path / "elsewhere" / "model")
    second = mha_pool("page_first")
    with controller(second, "dynamic", extra, model=str(moved)) as one:
        found, count, where = one.prefetch(TOKENS)
        assert (found, count) == (len(TOKENS), len(TOKENS))
        assert equal(read(second, where), want)
    (moved / "model.safetensors").write_bytes(b"WEIGHTS")
    with controller(mha_pool("page_first"), "dynamic", extra, model=str(moved)) as one:
        assert one.prefetch(TOKENS)[:2] == (0, 0)


def test_clear_and_close(url: str) -> None:
    pool = mha_pool("page_first")
    indices, _ = fill(pool)
    with backend(pool, settings(url)) as one:
        assert one.batch_set_v1(KEYS, indices) == [True] * PAGES
        assert one.exists(KEYS[0])
        assert one.clear()
        assert one.batch_exists(KEYS) == 0
        one.close()
        assert one.batch_set_v1(KEYS, indices) == [False] * PAGES
        assert one.batch_exists(KEYS) == 0


@pytest.mark.parametrize("folder", ["kv/hicache", "hicache"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_their_file_backend_on_the_mount(mount: Path, layout: str, folder: str) -> None:
    """Inside the KV prefix and outside."""
    extra = {"file_storage_path": str(mount / folder / layout)}
    first = mha_pool(layout)
    (mount / folder / layout).mkdir(parents=True)
    with controller(first, "file", dict(extra)) as one:
        indices, want = fill(first)
        assert one.back_up(TOKENS, indices) == len(TOKENS)
    second = mha_pool(layout)
    with controller(second, "file", dict(extra)) as one:
        found, count, where = one.prefetch(TOKENS)
        assert (found, count) == (len(TOKENS), len(TOKENS))
        assert equal(read(second, where), want)
