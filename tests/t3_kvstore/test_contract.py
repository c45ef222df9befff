"""What every back end must do, whatever it is made of."""

from __future__ import annotations

import dataclasses
import itertools
import threading
from typing import Any

import pytest

from curvfs.errors import ConfigError, UsageError
from kvstore import Geometry, KVStore, Miss, PageKey
from tests.t3_kvstore.places import Namespace, Place, empty, pages, untouched

PAGE = Geometry.attention(layers=2, kv_heads=2, head_dim=64, dtype="float16", page_tokens=16)


def prompt(count: int, start: int = 0) -> list[int]:
    return list(range(start, start + 16 * count))


def stored(store: KVStore, count: int, start: int = 0) -> tuple[list[PageKey], list[bytearray]]:
    keys, content = store.keys(prompt(count, start)), pages(store.geometry, count, start)
    assert store.put(keys, content).result() == [store.geometry.size_bytes] * count
    return keys, content


def test_what_is_put_comes_back_in_another_store(place: Place) -> None:
    keys, content = stored(place.open(PAGE), 20)
    reader = place.open(PAGE)
    assert reader.keys(prompt(20)) == keys
    hit = reader.lookup(keys)
    assert (hit.pages, hit.tokens, hit.keys) == (20, 320, tuple(keys))
    for lookup in (hit, None):
        got = empty(PAGE, 20)
        transfer = reader.get(keys, got, lookup=lookup)
        assert transfer.result() == [PAGE.size_bytes] * 20
        assert transfer.done()
        assert got == content
    stats = reader.stats()
    assert (stats.gets, stats.get_bytes, stats.get_misses) == (40, 40 * PAGE.size_bytes, {})
    assert stats.lookup_pages == 20


def test_nothing_is_there_at_first(place: Place) -> None:
    store = place.open(PAGE)
    keys, got = store.keys(prompt(3)), empty(PAGE, 3)
    assert store.lookup(keys).pages == 0
    assert store.exists(keys) == [False] * 3
    assert store.get(keys, got).result() == [Miss.ABSENT] * 3
    assert untouched(got)
    assert store.delete(keys) == [False] * 3
    assert store.stats().get_misses == {"absent": 3}
    assert store.lookup([]).pages == 0
    assert store.put([], []).result() == store.get([], []).result() == []


def test_a_key_that_exists_is_not_written_again(place: Place) -> None:
    store = place.open(PAGE)
    keys, content = stored(store, 3)
    before = place.names()
    assert store.put(keys, pages(PAGE, 3, 99)).result() == [PAGE.size_bytes] * 3
    assert store.stats().puts_existing == 3
    assert place.names() == before
    got = empty(PAGE, 3)
    store.get(keys, got).result()
    assert got == content


def test_a_lookup_ends_at_the_first_hole(place: Place) -> None:
    store = place.open(PAGE)
    keys, content = stored(store, 80)
    assert store.delete([keys[4], keys[60]]) == [True, True]
    assert store.lookup(keys).pages == 4
    assert store.lookup(keys[5:]).pages == 55
    assert store.exists(keys) == [index not in (4, 60) for index in range(80)]
    got = empty(PAGE, 80)
    results = store.get(keys, got).result()
    assert [index for index, result in enumerate(results) if not result] == [4, 60]
    assert results[4] is Miss.ABSENT
    assert untouched([got[4], got[60]])
    assert all(got[index] == content[index] for index in range(80) if index not in (4, 60))


def test_other_weights_rope_and_salt_are_misses(place: Place) -> None:
    stored(place.open(PAGE, revision="r1", salt="s1"), 4)
    for whose in ({"revision": "r2", "salt": "s1"}, {"salt": "s2"}, {}, {"model": "m2", "salt": "s1"}):
        store = place.open(PAGE, **whose)
        assert store.lookup(store.keys(prompt(4))).pages == 0
    same = place.open(PAGE, revision="r1", salt="s1")
    assert same.lookup(same.keys(prompt(4))).pages == 4


def test_dtypes_do_not_meet(place: Place) -> None:
    numbers = ("bfloat16", "float16", "float8_e4m3fn", "float8_e5m2", "uint8")
    shapes = [Geometry.attention(layers=1, kv_heads=1, head_dim=64, dtype=number, page_tokens=16) for number in numbers]
    contents = []
    for seed, shape in enumerate(shapes):
        store = place.open(shape)
        contents.append(stored_as(store, seed))
    assert len(place.objects()) == len(numbers)
    for shape, content in zip(shapes, contents, strict=True):
        store, got = place.open(shape), empty(shape, 1)
        assert store.get(store.keys(prompt(1)), got).result() == [shape.size_bytes]
        assert got == content


def stored_as(store: KVStore, seed: int) -> list[bytearray]:
    content = pages(store.geometry, 1, seed)
    store.put(store.keys(prompt(1)), content).result()
    return content


def test_keys_of_another_identity_are_refused_before_a_byte_moves(place: Place) -> None:
    store, other = place.open(PAGE), place.open(PAGE, revision="r2")
    keys = other.keys(prompt(2))
    for call in (
        lambda: store.put(keys, pages(PAGE, 2)),
        lambda: store.get(keys, empty(PAGE, 2)),
        lambda: store.lookup(keys),
        lambda: store.exists(keys),
        lambda: store.delete(keys),
    ):
        with pytest.raises(UsageError, match="identity"):
            call()
    assert place.objects() == []


def test_other_shards_never_get_equal_sized_wrong_bytes(place: Place) -> None:
    def shard(**changes: Any) -> Geometry:
        fields: dict[str, Any] = {"layers": 4, "kv_heads": 32, "head_dim": 8, "dtype": "float16", "page_tokens": 64}
        return Geometry.attention(**(fields | changes))

    whole = place.open(shard())
    tokens = list(range(64))
    content = pages(shard(), 1)
    whole.put(whole.keys(tokens), content).result()
    others = [shard(tp_rank=rank, tp_size=2) for rank in range(2)]
    others += [shard(order="nhd"), shard(pp_rank=0, pp_size=2), shard(pp_rank=1, pp_size=2)]
    for geometry in others:
        store, got = place.open(geometry), empty(geometry, 1)
        keys = store.keys(tokens)
        assert store.lookup(keys).pages == 0
        assert store.get(keys, got).result() == [Miss.ABSENT]
        assert untouched(got)


def test_a_page_counts_when_every_stage_is_there(place: Place) -> None:
    stages = [
        Geometry.attention(layers=4, kv_heads=2, head_dim=8, dtype="float16", page_tokens=16, pp_rank=rank, pp_size=2)
        for rank in range(2)
    ]
    first, second = (place.open(stage) for stage in stages)
    keys = first.keys(prompt(3))
    assert keys == second.keys(prompt(3))
    first.put(keys, pages(stages[0], 3)).result()
    assert first.lookup(keys).pages == 3
    assert second.lookup(keys).pages == first.lookup(keys, every_shard=True).pages == 0
    second.put(keys[:2], pages(stages[1], 2)).result()
    assert first.lookup(keys, every_shard=True).pages == second.lookup(keys, every_shard=True).pages == 2


def test_latent_pages_have_one_copy_for_all_ranks(place: Place) -> None:
    latent = Geometry.mla(layers=2, latent_dim=72, dtype="bfloat16", page_tokens=16)
    rank_0, rank_3 = place.open(latent), place.open(latent)
    _, content = stored(rank_0, 2)
    got = empty(latent, 2)
    assert rank_3.get(rank_3.keys(prompt(2)), got).result() == [latent.size_bytes] * 2
    assert got == content
    assert len(place.objects()) == 2


@pytest.mark.parametrize("size", [0, 1, 511, 512, 4095, 4096, 4097, (1 << 20) - 1, (1 << 20) + 3])
def test_odd_sizes(place: Place, size: int) -> None:
    raw = Geometry.raw(size)
    store = place.open(raw)
    key = store.foreign_key(b"an engine's own key")
    content = pages(raw, 1)
    assert store.put([key], content).result() == [size]
    got = empty(raw, 1)
    assert store.get([key], got).result() == [size]
    assert got == content


def test_names_are_bounded_and_stay_inside(place: Place) -> None:
    odd = ["..", "../../x", "/etc/x", ".", "a\0b", "~", "." * 300, "a\nb", "é" * 90, "/".join(["d" * 14] * 12)]
    for number, name in enumerate(odd):
        store = place.open(PAGE, model=name, salt=name * 2)
        keys, content = stored(store, 1, number * 1000)
        got = empty(PAGE, 1)
        assert store.get(keys, got).result() == [PAGE.size_bytes]
        assert got == content
        assert store.delete(keys[:0]) == []
    assert len(place.objects()) == len(odd)
    parts = {part for name in place.names() for part in name.split("/")}
    assert all(len(part) < 100 and part.isascii() and part.isprintable() for part in parts)


def test_salts_share_no_name_part(place: Place) -> None:
    found = []
    for salt in ("s1", "s2"):
        store = place.open(PAGE, salt=salt)
        stored(store, 1)
        found.append(
            {part for key in store.keys(prompt(64)) for part in store.object_name(key).split("/") if len(part) > 2}
        )
    assert not found[0] & found[1]


def test_modes(place: Place) -> None:
    stored(place.open(PAGE), 2)
    modes = place.modes()
    assert {mode for name, mode in modes.items() if name.endswith(".safetensors")} == {0o600}
    assert {mode for name, mode in modes.items() if "." not in name.rsplit("/", 1)[-1] and "alive" not in name} == {
        0o700
    }


def test_writers_of_one_key_both_succeed(place: Place) -> None:
    stores = [place.open(PAGE) for _ in range(3)]
    keys, content = stores[0].keys(prompt(12)), pages(PAGE, 12)
    outcomes: list[list[Any]] = []
    gate = threading.Barrier(6)

    def write(store: KVStore) -> None:
        gate.wait()
        outcomes.append(store.put(keys, content).result())

    writers = [threading.Thread(target=write, args=(store,)) for store in stores * 2]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()
    assert outcomes == [[PAGE.size_bytes] * 12] * 6
    assert len(place.objects()) == 12
    assert place.staged() == []
    got = empty(PAGE, 12)
    stores[0].get(keys, got).result()
    assert got == content


def test_one_batch_may_name_a_key_twice(place: Place) -> None:
    store = place.open(PAGE)
    key, content = store.keys(prompt(1))[0], pages(PAGE, 1)
    assert store.put([key] * 5, content * 5).result() == [PAGE.size_bytes] * 5
    got = empty(PAGE, 5)
    assert store.get([key] * 5, got).result() == [PAGE.size_bytes] * 5
    assert got == content * 5


def test_staging_of_the_dead_is_swept_and_that_of_the_living_is_not(place: Place) -> None:
    dead = place.open(PAGE)
    stored(dead, 1)
    writer = dead._backend.create("ns/aa/bb/never.safetensors", 4096)
    assert len(place.staged()) == 1
    living = place.open(PAGE)
    assert living.sweep() == 0
    assert len(place.staged()) == 1
    hasty = place.open(PAGE, staging_expiry_s=0.2)
    for _ in range(100):
        if hasty.sweep():
            break
        threading.Event().wait(0.05)
    assert place.staged() == []
    assert hasty.stats().swept >= 1
    writer.abort()
    # A live store whose directory was taken for dead makes a new one.
    stored(dead, 3, 500)
    stored(living, 3, 900)


def test_a_pool_emptied_under_a_live_store_fills_again(place: Place) -> None:
    store = place.open(PAGE)
    keys, _ = stored(store, 3)
    place.wipe()
    assert store.sweep() == 0
    place.wipe()
    assert store.lookup(keys).pages == 0
    assert store.get(keys, empty(PAGE, 3)).result() == [Miss.ABSENT] * 3
    stored(store, 3)
    assert store.lookup(keys).pages == 3
    assert store.sweep() == 0


def test_closing_removes_our_staging_directory(place: Place) -> None:
    store = place.open(PAGE)
    stored(store, 2)
    assert store.close()
    assert store.close()
    assert [name for name in place.names() if name.startswith(".staging/")] == [".staging/"]
    for call in (lambda: store.lookup([]), lambda: store.put([], []), lambda: store.get([], []), store.sweep):
        with pytest.raises(UsageError, match="closed"):
            call()
    assert store.stats().puts == 2


def test_callbacks_and_batches(place: Place) -> None:
    store = place.open(PAGE)
    keys, content = store.keys(prompt(6)), pages(PAGE, 6)
    called = threading.Event()
    transfer = store.put(keys, content)
    transfer.add_callback(lambda done: called.set() if done is transfer and done.done() else None)
    assert called.wait(10)
    late: list[Any] = []
    transfer.add_callback(late.append)
    assert late == [transfer]


def test_damage_of_every_kind_is_a_counted_miss(place: Place) -> None:
    page = Geometry.of({"a": ("float16", (100,)), "b": ("float16", (3000,))}, page_tokens=16)
    store = place.open(page)
    keys, content = stored(store, 1)
    file = place.block_file(store, keys[0])
    whole = file.read_bytes()
    header = int.from_bytes(whole[:8], "little") + 8
    kinds = {"length": 3, "sum": 45, "metadata": 120, "table": len(whole[:header].rstrip()) - 5, "spaces": header - 1}
    kinds |= {"tensor": header, "padding": header + 300, "second": header + 4096, "tail": len(whole) - 1}
    for count, place_in_file in enumerate(kinds.values(), 1):
        file = place.block_file(store, keys[0])
        whole = file.read_bytes()
        file.write_bytes(whole[:place_in_file] + bytes([whole[place_in_file] ^ 1]) + whole[place_in_file + 1 :])
        got = empty(page, 1)
        assert not store.get(keys, got).result()[0]
        assert untouched(got)
        assert sum(store.stats().get_misses.values()) == count
        if store.stats().get_misses == {"damaged": count}:
            assert store.stats().quarantined == count
            assert len(place.quarantined()) == count
            assert store.exists(keys) == [False]
        store.delete(keys)
        assert store.put(keys, content).result() == [page.size_bytes]
    assert store.stats().get_misses["damaged"] > 6
    got = empty(page, 1)
    assert store.get(keys, got).result() == [page.size_bytes]
    assert got == content


def test_an_object_that_a_put_finds_damaged_makes_room(place: Place) -> None:
    store = place.open(PAGE)
    keys, content = stored(store, 1)
    if isinstance(place, Namespace):
        target = f"/kv/{store.object_name(keys[0])}"
        place.fs.delete(target)
        with place.fs.create(target) as writer:
            writer.write(b"no object")
    else:
        place.block_file(store, keys[0]).write_bytes(b"no object")
    assert store.lookup(keys).pages == 0
    assert store.put(keys, content).result() == [PAGE.size_bytes]
    assert store.stats().quarantined == 1
    got = empty(PAGE, 1)
    assert store.get(keys, got).result() == [PAGE.size_bytes]
    assert got == content


def test_quarantine_puts_back_what_was_not_read(place: Place) -> None:
    store = place.open(PAGE)
    keys, content = stored(store, 1)
    name = store.object_name(keys[0])
    assert not store._backend.quarantine(name, "another")
    assert not store._backend.quarantine("no/such/object.safetensors", "another")
    assert place.objects() == [name]
    assert place.quarantined() == []
    got = empty(PAGE, 1)
    assert store.get(keys, got).result() == [PAGE.size_bytes]
    assert got == content


def test_what_was_promised_is_delivered_although_it_is_evicted_twice(place: Place) -> None:
    store, other = place.open(PAGE), place.open(PAGE)
    keys, content = stored(other, 2)
    hit = store.lookup(keys)
    assert hit.pages == 2
    for _ in range(2):  # the second time within the same minute, most probably: the first must stay
        assert other.evict(keys) == [True] * 2
        assert all(other.put(keys, content).result())
    assert other.delete(keys) == [True] * 2
    got = empty(PAGE, 2)
    assert all(store.get(hit.keys, got, lookup=hit).result())
    assert got == content


def test_what_was_promised_is_delivered_although_somebody_evicts_it(place: Place) -> None:
    store, evictor = place.open(PAGE), place.open(PAGE)
    keys, content = stored(store, 12)
    hit = store.lookup(keys)
    assert hit.pages == 12
    assert evictor.evict(keys) == [True] * 12
    assert evictor.evict(keys) == [False] * 12
    assert place.objects() == []
    assert evictor.lookup(keys).pages == 0
    assert store.lookup(keys).pages == 12  # less than a lease ago
    got = empty(PAGE, 12)
    assert store.get(keys, got, lookup=hit).result() == [PAGE.size_bytes] * 12
    assert got == content
    assert evictor.sweep() == 0
    assert store.get(keys, empty(PAGE, 12), lookup=hit).result() == [PAGE.size_bytes] * 12
    assert store.get(keys, empty(PAGE, 12)).result() == [Miss.ABSENT] * 12
    assert store.lookup(keys).pages == 0
    assert store.put(keys, content).result() == [PAGE.size_bytes] * 12
    assert evictor.evict(keys[:1]) == [True]
    assert len(place.trashed()) == 13


def test_a_page_that_goes_after_the_lookup_is_a_miss_once(place: Place) -> None:
    store, other = place.open(PAGE), place.open(PAGE)
    keys, content = stored(store, 10)
    hit = store.lookup(keys)
    assert other.delete([keys[4]]) == [True]
    results = store.get(keys, empty(PAGE, 10), lookup=hit).result()
    missed = [index for index, result in enumerate(results) if not result]
    if not missed:  # a worker keeps a block until the master's word reaches it
        assert store.get(keys, empty(PAGE, 10)).result()[4] is Miss.ABSENT
    assert missed in ([4], [])
    assert store.lookup(keys).pages == 4
    assert store.put([keys[4]], [content[4]]).result() == [PAGE.size_bytes]
    assert store.lookup(keys).pages == 10


def test_pages_of_other_tokens_under_an_equal_key_are_a_miss(place: Place) -> None:
    store = place.open(PAGE)
    keys, _ = stored(store, 2)
    collisions = [dataclasses.replace(keys[0], token_digest=bytes(32)), dataclasses.replace(keys[1], extra_digest=b"x")]
    got = empty(PAGE, 2)
    assert store.get(collisions, got).result() == [Miss.COLLISION] * 2
    assert untouched(got)


def test_an_object_under_a_wrong_name_is_a_miss(place: Place) -> None:
    store = place.open(PAGE)
    keys, _ = stored(store, 2)
    first, second = (place.block_file(store, key) for key in keys)
    second.write_bytes(first.read_bytes())
    got = empty(PAGE, 1)
    assert store.get(keys[1:], got).result() == [Miss.FOREIGN]
    assert untouched(got)


def test_cut_objects_are_misses_and_their_neighbours_are_not(place: Place) -> None:
    store = place.open(PAGE)
    keys, content = stored(store, 10)
    for length in (0, 1 << 13, -1, 4096):
        file = place.block_file(store, keys[5])
        whole = file.read_bytes()
        with file.open("r+b") as opened:
            opened.truncate(length % len(whole))
        got = empty(PAGE, 10)
        results = store.get(keys, got).result()
        assert [bool(result) for result in results] == [index != 5 for index in range(10)]
        assert untouched([got[5]])
        assert got[:5] + got[6:] == content[:5] + content[6:]
        store.delete([keys[5]])
        assert store.put([keys[5]], [content[5]]).result() == [PAGE.size_bytes]


def test_the_same_settings_are_checked_everywhere(place: Place) -> None:
    for settings in (
        {"depth": 0},
        {"max_queued": 0},
        {"timeout_s": 0},
        {"staging_expiry_s": -1},
        {"lease_s": -1},
        {"direct": "maybe"},
        {"prefix": "../x"},
        {"prefix": ""},
        {"prefix": "/x"},
        {"chain_hash": "md5"},
    ):
        with pytest.raises(ConfigError):
            place.open(PAGE, **settings)


@pytest.mark.parametrize("prefix", [".", "a/b"])
def test_other_prefixes(place: Place, prefix: str) -> None:
    store = place.open(PAGE, prefix=prefix)
    keys, content = stored(store, 2)
    got = empty(PAGE, 2)
    store.get(keys, got).result()
    assert got == content
    assert place.open(PAGE).lookup(keys).pages == 0


@pytest.mark.parametrize("direct", [True, False])
def test_direct_and_buffered_stores_share_their_pages(place: Place, direct: bool) -> None:
    writer, reader = place.open(PAGE, direct=direct), place.open(PAGE, direct=not direct)
    keys, content = stored(writer, 3)
    got = empty(PAGE, 3)
    assert reader.get(keys, got).result() == [PAGE.size_bytes] * 3
    assert got == content
    assert False in (writer.stats().direct, reader.stats().direct)


def test_queue_bound_is_answered_at_once(place: Place) -> None:
    store = place.open(PAGE, max_queued=4)
    keys = store.keys(prompt(20))
    results = store.put(keys, pages(PAGE, 20)).result()
    assert results[:4] == [PAGE.size_bytes] * 4
    assert set(results[4:]) == {Miss.BUSY}
    assert store.stats().in_flight == 0


def test_sha256_keys(place: Place) -> None:
    store = place.open(PAGE, chain_hash="sha256")
    keys, content = stored(store, 2)
    assert all(len(key.digest) == 32 for key in keys)
    got = empty(PAGE, 2)
    store.get(keys, got).result()
    assert got == content
    with pytest.raises(UsageError):
        place.open(PAGE).get(keys, got)


def test_many_threads_use_one_store(place: Place) -> None:
    store = place.open(PAGE)
    wrong: list[Any] = []

    def work(number: int) -> None:
        for round_ in itertools.count():
            if round_ == 4:
                return
            keys, content = store.keys(prompt(5, number * 10_000)), pages(PAGE, 5, number)
            store.put(keys, content).result()
            got = empty(PAGE, 5)
            if store.get(keys, got, lookup=store.lookup(keys)).result() != [PAGE.size_bytes] * 5 or got != content:
                wrong.append(number)

    workers = [threading.Thread(target=work, args=(number,)) for number in range(6)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert wrong == []
    assert store.stats().in_flight == store.stats().slabs_in_use == 0


def test_what_is_there_can_be_listed_counted_and_cleared(place: Place) -> None:
    store = place.open(PAGE)
    assert (store.list().pages, store.list().cursor, store.usage().objects) == ((), "", 0)
    keys, _ = stored(store, 25)
    other = place.open(PAGE, salt="another tenant")
    stored(other, 2)
    half = Geometry.attention(layers=2, kv_heads=2, head_dim=64, dtype="float16", page_tokens=16, tp_rank=1, tp_size=2)
    stored(place.open(half), 1)
    for limit in (1, 7, 26, 1000):
        names, cursor = [], ""
        for _ in range(100):
            listing = store.list(cursor, limit)
            assert len(listing.pages) <= limit
            names += [page.name for page in listing.pages]
            cursor = listing.cursor
            if not cursor:
                break
        assert names == sorted(names)
        assert set(names) == {name for name in place.objects() if name.startswith(names[0][:32])}
        assert len(names) == 26
    listed = store.list().pages
    assert {page.key for page in listed} == {key.hex for key in keys}
    assert sorted(page.shard for page in listed) == [""] * 25 + ["t1of2"]
    assert {store.object_name(key) for key in keys} == {page.name for page in listed if not page.shard}
    usage = store.usage()
    assert (usage.objects, usage.trash_bytes) == (26, 0)
    assert usage.object_bytes == sum(page.length_bytes for page in listed) > 26 * 8192
    store.evict(keys[:5])
    after = store.usage()
    assert after.objects == 21
    assert after.used_bytes == usage.used_bytes
    gone = {store.object_name(key) for key in keys[:5]}
    assert after.trash_bytes == sum(page.length_bytes for page in listed if page.name in gone)
    assert store.lookup(keys[5:]).pages == 20
    assert store.clear() == 21
    assert store.lookup(keys[5:]).pages == 0
    assert (store.list().pages, store.usage().objects) == ((), 0)
    assert other.usage().objects == 2
    with pytest.raises(UsageError):
        store.list("", 0)


def test_where_pages_lie_is_told_where_it_is_known(place: Place) -> None:
    store = place.open(PAGE)
    keys, _ = stored(store, 6)
    store.delete(keys[4:5])
    held = store.locate(keys)
    if isinstance(place, Namespace):
        assert list(held.values()) == [4]
    else:
        assert held == {}
    assert store.locate([]) == {}


def test_objects_of_a_later_format_are_left_alone(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    store = place.open(PAGE)
    monkeypatch.setattr("kvstore.header.FORMAT_VERSION", 2)
    later = place.open(PAGE)
    keys, content = later.keys(prompt(2)), pages(PAGE, 2)
    assert all(later.put(keys[:1], content[:1]).result())
    monkeypatch.undo()
    got = empty(PAGE, 2)
    assert store.get(keys, got).result() == [Miss.NEWER, Miss.ABSENT]
    assert untouched(got)
    assert store.put(keys, content).result() == [PAGE.size_bytes] * 2  # the first one exists
    assert store.stats().puts_existing == 1
    assert store.get(keys, got).result() == [Miss.NEWER, PAGE.size_bytes]
    assert store.stats().quarantined == 0
    monkeypatch.setattr("kvstore.header.FORMAT_VERSION", 2)
    assert later.get(keys, got).result() == [PAGE.size_bytes] * 2
    assert got == content


def test_compressed_objects(place: Place) -> None:
    pytest.importorskip("zstandard")
    page = Geometry.attention(layers=2, kv_heads=2, head_dim=100, dtype="float16", page_tokens=32)
    store, plain = place.open(page, codec="zstd"), place.open(page)
    content = [bytearray(bytes([number]) * page.size_bytes) for number in range(20)]
    content[7][:] = pages(page, 1)[0]  # what does not get shorter is stored as it is
    keys = store.keys(list(range(32 * 20)))
    assert all(store.put(keys, content).result())
    lengths = sorted({entry.length_bytes for entry in store.list().pages})
    assert len(lengths) == 2
    assert lengths[0] <= page.size_bytes // 2 < page.size_bytes < lengths[1]
    for reader in (store, plain):
        for form in ({}, {"layerwise": True}, {"loan": True}):
            got = empty(page, 20)
            assert reader.get(keys, got, lookup=reader.lookup(keys), **form).result() == [page.size_bytes] * 20
            assert got == content
    transfer = plain.get_view(keys[:1])
    assert all(transfer.result())
    view = transfer.views[0]
    assert view is not None
    assert view["layer.1.v"] == bytes(len(view["layer.1.v"]))
    view.release()
    file = place.block_file(store, keys[3])
    whole = file.read_bytes()
    file.write_bytes(whole[:-4090] + bytes([whole[-4090] ^ 1]) + whole[-4089:])
    got = empty(page, 4)
    assert store.get(keys[:4], got).result()[3] is Miss.DAMAGED
    assert untouched(got[3:])
    assert store.stats().quarantined == 1
    assert plain.stats().in_flight == plain.stats().slabs_in_use == plain.stats().views_out == 0
    with pytest.raises(ConfigError, match="codec"):
        place.open(page, codec="gzip")
