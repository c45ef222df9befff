"""How many buffers there are, and who gets them."""

from __future__ import annotations

import pytest

from curvfs.units import KIB, MIB
from curvfs.world import World
from kvstore import Geometry
from kvstore.slabs import SlabPool
from tests.t3_kvstore.places import Directory, empty, pages

WORLD = World.real()


@pytest.mark.parametrize(
    ("size_bytes", "count", "wanted"),
    [(16 * MIB, 32, 8), (4 * MIB, 32, 8), (2 * MIB, 32, 16), (MIB, 32, 32), (16 * MIB, 4, 4), (256 * KIB, 100, 100)],
)
def test_large_shared_slabs_are_fewer(size_bytes: int, count: int, wanted: int) -> None:
    assert SlabPool(WORLD, count=count, size_bytes=size_bytes, shared=True).count == wanted
    assert SlabPool(WORLD, count=count, size_bytes=size_bytes).count == count


def test_more_pages_than_slabs(directory: Directory) -> None:
    """Every page moves, and as many views are out as the depth says."""
    page = Geometry.raw(4 * MIB, page_tokens=4)
    store = directory.open(page, depth=12)
    keys, content = store.keys(list(range(48))), pages(page, 12)
    assert all(store.put(keys, content).result())
    got = empty(page, 12)
    assert all(store.get(keys, got).result())
    assert got == content
    transfer = store.get_view(keys)
    assert all(transfer.result())
    assert store.stats().views_out == 12
    for view in transfer.views:
        assert view is not None
        view.release()
