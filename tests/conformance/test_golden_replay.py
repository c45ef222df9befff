"""The requests of every captured scenario, sent to the embedded server: its replies have the captured shape.

Scenario after scenario, in the order of the captures, for both captured versions; how is said in
:mod:`conformance.golden_replay`. ``ha_*`` is left out: three masters were there.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import trio
from conformance.cluster import ThreadedServer, named_master
from conformance.golden_replay import SECOND_HOSTNAME, Replay
from conformance.rules import ALPHA, HEAD
from golden_frames import VERSIONS, scenarios

if named_master() is not None:
    pytest.skip("a named cluster is not replayed to: the captures use its root directory", allow_module_level=True)

NAMES_REFUSED = "13 item 8: names that no client could reach afterwards are refused"
NOT_POISONED = "11: SetAttr, Symlink and Link are protected like other requests, their ids are not poisoned"
SAME_MILLISECOND = (
    "3.3: ctime is there from the first Rename on; in the capture it fell into the millisecond of the create"
)

#: Where the embedded server differs on purpose: scenario -> (rule of the specification, every difference).
DELIBERATE: dict[str, tuple[str, list[str]]] = {
    "raw_create_long_name": (NAMES_REFUSED, ["CreateFile Rpc is refused with kind 16"]),
    "raw_create_dots": (NAMES_REFUSED, ["CreateFile Rpc is refused with kind 16"]),
    "raw_create_dslash": (NAMES_REFUSED, ["CreateFile Rpc is refused with kind 16"]),
    # What follows from those three, and from the next: they made five entries and four directories.
    "raw_heartbeat_frame": (
        NAMES_REFUSED,
        [
            "FileStatus Rpc.status.children_num: 40 instead of 43",
            "FileStatus Rpc.status.len: 40 instead of 43",
            "FileStatus Rpc.status.nlink: 4 instead of 6",
        ],
    ),
    "raw_dots": (NAMES_REFUSED, ["Mkdir Rpc is refused with kind 16", "ListStatus Rpc.statuses: lacks /raw2/."]),
    "raw_reserve": (NAMES_REFUSED, ["GetFilesystemInfo Rpc.inode_dir_num: 2 instead of 4"] * 2),
    "raw_create_unfinished_visible": (NAMES_REFUSED, ["ListStatus Rpc.statuses: lacks /raw2/."]),
    "raw_xattr_at_create": (NAMES_REFUSED, ["ListStatus Rpc.statuses: lacks /raw2/."]),
    "raw_setattr_same_req_id": (NOT_POISONED, ["SetAttr Rpc succeeds instead of being refused: (18"]),
    "raw_symlink_same_req_id": (NOT_POISONED, ["Symlink Rpc succeeds instead of being refused: (18"]),
    "raw_link_same_req_id": (NOT_POISONED, ["Link Rpc succeeds instead of being refused: (18"]),
}
#: More of it in single captures, by version/scenario.
DELIBERATE_IN: dict[str, tuple[str, list[str]]] = {
    "head/raw_rm_all": (NAMES_REFUSED, ["Delete Rpc.res.inodes: 47 instead of 50"]),
    "head/raw_xattr_at_create": (
        SAME_MILLISECOND,
        [
            "FileStatus Rpc.status.ctime: not expected",
            "ListStatus Rpc.statuses[10].ctime: not expected",
        ],
    ),
}

NAMES = [(version, name) for version in VERSIONS for name in scenarios(version) if not name.startswith("ha_")]


@pytest.fixture(scope="module")
def replayed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Replay]]:
    """Everything replayed once, by version."""
    done: dict[str, Replay] = {}
    for version, behaviour in zip(VERSIONS, (HEAD, ALPHA), strict=True):
        with ThreadedServer(tmp_path_factory.mktemp(version), behaviour, SECOND_HOSTNAME) as server:
            done[version] = trio.run(_replay, server, version)
    yield done


async def _replay(server: ThreadedServer, version: str) -> Replay:
    names = [name for name in scenarios(version) if not name.startswith("ha_")]
    replay = await Replay.against(server.target, {name: scenarios(version)[name] for name in names})
    try:
        for name in names:
            await replay.run(name)
    finally:
        await replay.aclose()
    return replay


@pytest.mark.parametrize(("version", "name"), NAMES, ids=[f"{version}/{name}" for version, name in NAMES])
def test_replies_have_the_captured_shape(replayed: dict[str, Replay], version: str, name: str) -> None:
    found = [text.partition(": ")[2] for text in replayed[version].differences[name]]
    expected = [
        text for known in (DELIBERATE.get(name), DELIBERATE_IN.get(f"{version}/{name}")) if known for text in known[1]
    ]
    unexpected = [text for text in found if not any(text.startswith(start) for start in expected)]
    assert unexpected == []
    assert len(found) == len(expected), "a deliberate difference is gone"


def test_all_payload_is_known(replayed: dict[str, Replay]) -> None:
    """What clients wrote could be made up again, to the byte."""
    assert [text for replay in replayed.values() for text in replay.unknown_payload] == []
