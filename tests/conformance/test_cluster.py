"""Sections 4.17, 4.18 and 5: placement, figures of the cluster, several masters."""

from __future__ import annotations

import pytest
from conformance.probe import COMMON, NOT_LEADER, Probe, Wire, commit, parse_reply, pattern, refused
from conformance.rules import HEAD, rule

from curvfs.errors import RemoteError
from curvfs.units import MIB
from curvfs.wire.codes import RequestStatus, RpcCode
from curvfs.wire.messages import encode, pb


async def workers(probe: Probe) -> list[pb.WorkerAddressProto]:
    return [worker.address for worker in (await probe.info()).live_workers]


@rule("4.17", needs="two workers")
async def test_the_worker_on_the_clients_host_comes_first(probe: Probe) -> None:
    for address in await workers(probe):
        for name in ("a", "b", "c"):
            await probe.create(probe.at(name))
            located = await probe.add_block(probe.at(name), hostname=address.hostname)
            hostnames = {each.hostname for each in located.locs}
            assert hostnames == {address.hostname}


@rule("4.17", embedded="other policies than 'local' are a setting of a cluster", needs="two workers")
async def test_blocks_go_round_robin_otherwise(probe: Probe) -> None:
    expected = {address.worker_id for address in await workers(probe)}
    chosen = set()
    for index in range(4):
        await probe.create(probe.at(f"f{index}"))
        chosen.add((await probe.add_block(probe.at(f"f{index}"))).locs[0].worker_id)
    assert chosen == expected


@rule("4.17", "4.5", needs="two workers")
async def test_excluded_workers_are_not_chosen(probe: Probe) -> None:
    one, other = (await workers(probe))[:2]
    await probe.create(probe.at("f"))
    rest = [address.worker_id for address in await workers(probe) if address.worker_id != other.worker_id]
    located = await probe.add_block(probe.at("f"), exclude=rest, hostname=one.hostname)
    assert [each.worker_id for each in located.locs] == [other.worker_id]


@rule("4.17", "1.9")
async def test_without_a_worker_there_is_no_block(probe: Probe) -> None:
    await probe.create(probe.at("f"))
    everybody = [address.worker_id for address in await workers(probe)]
    async with refused(COMMON, text="available"):
        await probe.add_block(probe.at("f"), exclude=everybody)
    assert list((await probe.locate(probe.at("f"))).block_locs) == []


@rule("4.17", needs="two workers")
async def test_replicas_are_written_by_the_client(probe: Probe) -> None:
    data = pattern(100_000)
    await probe.create(probe.at("f"), replicas=2)
    located = await probe.add_block(probe.at("f"))
    assert len({each.worker_id for each in located.locs}) == 2
    for address in located.locs:
        stream = await probe.worker(address)
        await stream.open_write(located.block)
        await stream.write(data)
        await stream.complete(len(data))
    await probe.complete(probe.at("f"), len(data), commit(located, len(data)))
    shown = (await probe.locate(probe.at("f"))).block_locs[0]
    assert {each.worker_id for each in shown.locs} == {each.worker_id for each in located.locs}
    for address in shown.locs:
        only = pb.LocatedBlockProto(block=shown.block, locs=[address])
        assert await probe.get_block(only) == data


@rule("4.17", "12", needs="two workers")
async def test_one_of_two_replicas_is_enough_to_commit(probe: Probe) -> None:
    await probe.create(probe.at("f"), replicas=2)
    located = await probe.add_block(probe.at("f"))
    made = await probe.fill(located, b"abc")
    await probe.complete(probe.at("f"), 3, made)
    shown = (await probe.locate(probe.at("f"))).block_locs[0]
    assert shown.locs[0].worker_id == located.locs[0].worker_id
    assert await probe.get(probe.at("f")) == b"abc"


@rule("4.17")
async def test_more_replicas_than_workers(probe: Probe) -> None:
    count = len(await workers(probe))
    await probe.create(probe.at("f"), replicas=count + 1)
    assert len((await probe.add_block(probe.at("f"))).locs) == count


@rule("4.18", "3.4")
async def test_filesystem_info(probe: Probe) -> None:
    info = await probe.info()
    host, _, port = info.active_master.rpartition(":")
    assert host and port.isdecimal()
    assert 0 < info.available <= info.capacity
    assert info.inode_dir_num >= 1
    assert info.live_workers
    assert sum(worker.capacity for worker in info.live_workers) <= info.capacity
    for worker in info.live_workers:
        assert worker.address.worker_id > 0
        assert worker.last_update > 0
        assert 0 <= worker.available <= worker.capacity
        for storage_id, storage in worker.storage_map.items():
            assert storage.storage_id == storage_id
            assert not storage.failed
    if probe.version is HEAD:
        assert 0 < info.allocatable_available <= info.allocatable_capacity <= info.capacity


@rule("4.18", embedded="others change the counts of a cluster at the same time")
async def test_counts_follow_what_is_made_and_removed(probe: Probe) -> None:
    async def counts() -> tuple[int, int, int]:
        info = await probe.info()
        return info.inode_dir_num, info.inode_file_num, info.block_num

    before = await counts()
    await probe.mkdir(probe.at("d"))
    await probe.put(probe.at("d/f"), pattern(MIB + 1))
    assert await counts() == (before[0] + 1, before[1] + 1, before[2] + 2)
    await probe.delete(probe.at("d"), recursive=True)
    for _ in range(100):  # trees are taken apart in the background
        if await counts() == before:
            return
    assert await counts() == before


# ------------------------------------------------------------------------------------------------------ 5: masters


@rule("5.1", "1.8", "2.1", needs="a standby")
@pytest.mark.parametrize(
    ("code", "message"),
    [
        (RpcCode.FILE_STATUS, pb.GetFileStatusRequest(path="/")),
        (RpcCode.MKDIR, pb.MkdirRequest(path="/must-not-be-made")),
        (RpcCode.GET_FILESYSTEM_INFO, pb.GetFilesystemInfoRequest()),
        (RpcCode.GET_MOUNT_TABLE, pb.GetMountTableRequest()),
    ],
)
async def test_a_master_that_does_not_lead_says_so(probe: Probe, code: RpcCode, message: object) -> None:
    """Kind 2, to every request, and nothing happens; the connection stays."""
    assert probe.target.standby is not None
    wire = await Wire.connect(probe.target.standby)
    try:
        for req_id in (1, 2):
            await wire.send(code, RequestStatus.RPC, req_id, -1, encode(message))  # type: ignore[arg-type]
            reply = await wire.receive()
            with pytest.raises(RemoteError) as caught:
                parse_reply(reply.head, reply)
            assert caught.value.kind == NOT_LEADER
            assert caught.value.text.startswith(f"Not a leader master, code={code.wire_name}, client_ip=")
    finally:
        await wire.aclose()
    assert not await probe.exists("/must-not-be-made")
