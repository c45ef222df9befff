"""Section 2: which codes a master and a worker handle, and the shapes of the rarer replies."""

from __future__ import annotations

import pytest
from conformance.probe import COMMON, NOT_FOUND, Probe, refused
from conformance.rules import ALPHA, HEAD, rule

from curvfs.wire.codes import RequestStatus, RpcCode
from curvfs.wire.messages import pb

UNSUPPORTED, JOB_NOT_FOUND = 19, 23


@rule("2.1")
@pytest.mark.parametrize("code", [1, 6, 22, 32, 44, 45])
async def test_codes_without_a_handler(probe: Probe, code: int) -> None:
    async with refused(COMMON, text="Unsupported operation"):
        await probe.call(code)


@rule("2.1", "8.3", only=[ALPHA])
@pytest.mark.parametrize("code", [28, 29, 46, 54])
async def test_codes_that_old_masters_do_not_have(probe: Probe, code: int) -> None:
    async with refused(COMMON, text="Unsupported operation"):
        await probe.call(code)


@rule("2.1")
async def test_a_master_takes_no_block_streams(probe: Probe) -> None:
    for code in (RpcCode.WRITE_BLOCK, RpcCode.READ_BLOCK, RpcCode.WRITE_COMMITS_BATCH):
        async with refused(COMMON, text="Unsupported operation"):
            await probe.call(code)


@rule("2.2")
async def test_a_worker_takes_no_master_calls(probe: Probe) -> None:
    stream = await probe.worker((await probe.info()).live_workers[0].address)
    stream.code = RpcCode.MKDIR
    async with refused(COMMON, text="Unsupported request type"):
        await stream.frame(RequestStatus.RPC, pb.MkdirRequest(path=probe.at("d")))
    assert not await probe.exists(probe.at("d"))


@rule("2.2")
async def test_read_streams_have_no_cancel(probe: Probe) -> None:
    stream = await probe.reader((await probe.put(probe.at("f"), b"abc")).block_locs[0])
    async with refused(COMMON, text="Unsupported request type"):
        await stream.frame(RequestStatus.CANCEL, stream.opened)


@rule("2.1", "4.19")
async def test_the_mount_table(probe: Probe) -> None:
    table = (await probe.call(RpcCode.GET_MOUNT_TABLE, pb.GetMountTableRequest())).mount_table
    if probe.target.embedded:
        assert list(table) == []


@rule("2.1", "4.19")
async def test_a_path_under_no_mount_has_no_mount_info(probe: Probe) -> None:
    reply = await probe.call(RpcCode.GET_MOUNT_INFO, pb.GetMountInfoRequest(path=probe.directory))
    assert not reply.HasField("mount_info")


@rule("2.1", "4.21")
async def test_metrics_reports_are_acknowledged(probe: Probe) -> None:
    value = pb.MetricValueProto(metric_type=pb.GAUGE, name="n", value=1.5)
    value.tags["k"] = "v"
    request = pb.MetricsReportRequest(instance="probe", source="", metrics=[value])
    assert (await probe.call(RpcCode.METRICS_REPORT, request)).ListFields() == []


@rule("2.1", "4.13")
async def test_free_of_a_curvine_file_frees_nothing(probe: Probe) -> None:
    await probe.put(probe.at("f"), b"abc")
    reply = await probe.call(RpcCode.FREE, pb.FreeRequest(path=probe.at("f"), recursive=False))
    assert (reply.res.inodes, reply.res.bytes) == (0, 0)
    assert await probe.get(probe.at("f")) == b"abc"


@rule("2.1", "4.13")
async def test_free_of_a_missing_file(probe: Probe) -> None:
    async with refused(NOT_FOUND, COMMON):
        await probe.call(RpcCode.FREE, pb.FreeRequest(path=probe.at("nope"), recursive=False))


@rule("2.1", "4.19", embedded="it would change the mounts of the cluster")
async def test_under_stores_are_refused(probe: Probe) -> None:
    """The embedded server has none."""
    request = pb.MountRequest(cv_path=probe.directory, ufs_path="s3://bucket/x", mount_options=pb.MountOptionsProto())
    async with refused(COMMON, UNSUPPORTED):
        await probe.call(RpcCode.MOUNT, request)
    async with refused(COMMON, UNSUPPORTED):
        await probe.call(RpcCode.UNMOUNT, pb.UnMountRequest(cv_path=probe.directory))


@rule("2.1", "3.8", embedded="a cluster may have under stores")
async def test_there_is_nothing_to_load_from(probe: Probe) -> None:
    request = pb.SubmitJobRequest(job_type=pb.LOAD, job_command=bytes(8 + 7))
    async with refused(COMMON, UNSUPPORTED):
        await probe.call(RpcCode.SUBMIT_JOB, request)


@rule("1.8", "2.1", "3.8")
async def test_a_job_that_nobody_submitted(probe: Probe) -> None:
    async with refused(JOB_NOT_FOUND, COMMON):
        await probe.call(RpcCode.GET_JOB_STATUS, pb.GetJobStatusRequest(job_id="job_" + "0" * 32, verbose=False))
    async with refused(JOB_NOT_FOUND, COMMON):
        await probe.call(RpcCode.CANCEL_JOB, pb.CancelJobRequest(job_id="job_" + "0" * 32))


@rule("2.1")
async def test_add_block_answers_with_a_bare_located_block(probe: Probe) -> None:
    made = await probe.create(probe.at("f"))
    located = await probe.add_block(probe.at("f"))
    assert located.block.id >> 24 == made.id
    assert located.block.block_size == 0
    assert len(located.locs) == 1


@rule("2.1", "8.3")
async def test_delete_says_what_it_freed_since_head(probe: Probe) -> None:
    await probe.put(probe.at("f"), b"abc")
    reply = await probe.delete(probe.at("f"))
    assert reply.HasField("res") == (probe.version is HEAD)
    if probe.version is HEAD:
        assert (reply.res.inodes, reply.res.bytes) == (1, 3)
