"""RPC codes, the two statuses of a frame, and which message a frame's header holds.

Source: specification sections 1.2, 1.3 and 2.
"""

from __future__ import annotations

import enum
from typing import TYPE_CHECKING

from google.protobuf.message import Message

from curvfs.wire.messages import pb

if TYPE_CHECKING:
    from curvfs.wire.frame import FrameHead


class _WireName:
    """Mixin of the enums here: their member names are ours, the specification's are CamelCase."""

    name: str

    @property
    def wire_name(self) -> str:
        """The name in the specification, such as ``CreateFile`` for ``CREATE_FILE``."""
        return _SPECIAL_NAMES.get(self.name) or self.name.title().replace("_", "")


#: Names in the specification that are not simply the CamelCase of ours.
_SPECIAL_NAMES = {"UNMOUNT": "UnMount"}


class RpcCode(_WireName, enum.IntEnum):
    """What a frame is about. Masters answer 0 to 60, workers 80 to 83 (and 37, 39, 42, 50)."""

    UNDEFINED = 0
    HEARTBEAT = 1
    MKDIR = 2
    DELETE = 3
    CREATE_FILE = 4
    OPEN_FILE = 5
    APPEND_FILE = 6
    FILE_STATUS = 7
    LIST_STATUS = 8
    EXISTS = 9
    RENAME = 10
    ADD_BLOCK = 11
    COMPLETE_FILE = 12
    GET_BLOCK_LOCATIONS = 13
    GET_FILESYSTEM_INFO = 14
    SET_ATTR = 15
    SYMLINK = 16
    LINK = 17
    RESIZE_FILE = 18
    ASSIGN_WORKER = 19
    GET_LOCK = 20
    SET_LOCK = 21
    LIST_LOCK = 22
    CREATE_FILES_BATCH = 23
    ADD_BLOCKS_BATCH = 24
    COMPLETE_FILES_BATCH = 25
    FREE = 26
    LIST_OPTIONS = 27
    GET_CV_METADATA_SNAPSHOT_PAGE = 28
    GET_CV_METADATA_DELTA_PAGE = 29
    MOUNT = 30
    UNMOUNT = 31
    UPDATE_MOUNT = 32
    GET_MOUNT_TABLE = 33
    GET_MOUNT_INFO = 34
    SUBMIT_JOB = 35
    GET_JOB_STATUS = 36
    CANCEL_JOB = 37
    REPORT_TASK = 38
    SUBMIT_TASK = 39
    WORKER_HEARTBEAT = 40
    WORKER_BLOCK_REPORT = 41
    SUBMIT_BLOCK_REPLICATION_JOB = 42
    REPORT_BLOCK_REPLICATION_RESULT = 43
    REQUEST_REPLACEMENT_WORKER = 44
    REPORT_UNDER_REPLICATED_BLOCKS = 45
    SUBMIT_TRANSFER = 46
    GET_TRANSFER_STATUS = 47
    CANCEL_TRANSFER = 48
    REPORT_TRANSFER_TASK = 49
    QUERY_TRANSFER_TASK = 50
    WATCH_TRANSFER = 51
    LIST_TRANSFERS = 52
    LIST_TRANSFER_TENANTS = 53
    RETRY_TRANSFER = 54
    METRICS_REPORT = 60
    WRITE_BLOCK = 80
    READ_BLOCK = 81
    WRITE_BLOCKS_BATCH = 82
    WRITE_COMMITS_BATCH = 83

    @classmethod
    def of(cls, code: int) -> RpcCode:
        """The member for a number on the wire; ``UNDEFINED`` for numbers nobody knows."""
        return _CODES.get(code, cls.UNDEFINED)

    @property
    def is_stream(self) -> bool:
        """Whether the code belongs to block streams (Open, Running, Complete, Cancel) instead of unary calls."""
        return self >= RpcCode.WRITE_BLOCK


_CODES = {int(code): code for code in RpcCode}


class RequestStatus(_WireName, enum.IntEnum):
    """Low nibble of the status byte: what kind of frame this is, or which kind it answers."""

    UNDEFINED = -1
    HEARTBEAT = 0
    RPC = 1
    OPEN = 2
    RUNNING = 3
    CANCEL = 4
    COMPLETE = 5


class ResponseStatus(_WireName, enum.IntEnum):
    """High nibble of the status byte; ``UNDEFINED`` marks a request."""

    UNDEFINED = -1
    SUCCESS = 0
    ERROR = 1


#: seq_id of unary requests and heartbeats.
UNARY_SEQ_ID = -1
#: seq_id of the Open frame of a stream; every further frame of the stream adds one.
STREAM_START_SEQ_ID = 0
#: req_id of frames that belong to no request (heartbeats).
NO_REQ_ID = -1


def encode_status(request: RequestStatus, response: ResponseStatus) -> int:
    """The status byte, 0 to 255: two signed nibbles; an undefined request status makes it 0xFF."""
    return (request & 0xFF) | ((response << 4) & 0xFF)


def _decode_status(byte: int) -> tuple[RequestStatus, ResponseStatus]:
    low, high = byte & 0x0F, byte >> 4
    request = RequestStatus(low) if low <= RequestStatus.COMPLETE else RequestStatus.UNDEFINED
    response = ResponseStatus(high) if high <= ResponseStatus.ERROR else ResponseStatus.UNDEFINED
    return request, response


_STATUSES = tuple(_decode_status(byte) for byte in range(256))


def decode_status(byte: int) -> tuple[RequestStatus, ResponseStatus]:
    """Request and response status in a status byte, 0 to 255. Nibbles without a meaning are undefined."""
    return _STATUSES[byte]


_Pair = tuple[type[Message], type[Message] | None]

#: code -> header of the request, header of the successful response. Codes that nobody handles, and those of the
#: task and transfer services (whose messages are not part of a client), are absent.
_UNARY: dict[RpcCode, _Pair] = {
    RpcCode.MKDIR: (pb.MkdirRequest, pb.MkdirResponse),
    RpcCode.DELETE: (pb.DeleteRequest, pb.DeleteResponse),
    RpcCode.CREATE_FILE: (pb.CreateFileRequest, pb.CreateFileResponse),
    RpcCode.OPEN_FILE: (pb.OpenFileRequest, pb.OpenFileResponse),
    RpcCode.FILE_STATUS: (pb.GetFileStatusRequest, pb.GetFileStatusResponse),
    RpcCode.LIST_STATUS: (pb.ListStatusRequest, pb.ListStatusResponse),
    RpcCode.EXISTS: (pb.ExistsRequest, pb.ExistsResponse),
    RpcCode.RENAME: (pb.RenameRequest, pb.RenameResponse),
    # The declared AddBlockResponse is not what travels.
    RpcCode.ADD_BLOCK: (pb.AddBlockRequest, pb.LocatedBlockProto),
    RpcCode.COMPLETE_FILE: (pb.CompleteFileRequest, pb.CompleteFileResponse),
    RpcCode.GET_BLOCK_LOCATIONS: (pb.GetBlockLocationsRequest, pb.GetBlockLocationsResponse),
    RpcCode.GET_FILESYSTEM_INFO: (pb.GetFilesystemInfoRequest, pb.GetFilesystemInfoResponse),
    RpcCode.SET_ATTR: (pb.SetAttrRequest, pb.SetAttrResponse),
    RpcCode.SYMLINK: (pb.SymlinkRequest, pb.SymlinkResponse),
    RpcCode.LINK: (pb.LinkRequest, pb.LinkResponse),
    RpcCode.RESIZE_FILE: (pb.FileResizeRequest, pb.FileResizeResponse),
    RpcCode.ASSIGN_WORKER: (pb.AssignWorkerRequest, pb.AssignWorkerResponse),
    RpcCode.GET_LOCK: (pb.GetLockRequest, pb.GetLockResponse),
    RpcCode.SET_LOCK: (pb.SetLockRequest, pb.SetLockResponse),
    RpcCode.CREATE_FILES_BATCH: (pb.CreateFilesBatchRequest, pb.CreateFilesBatchResponse),
    RpcCode.ADD_BLOCKS_BATCH: (pb.AddBlocksBatchRequest, pb.AddBlocksBatchResponse),
    RpcCode.COMPLETE_FILES_BATCH: (pb.CompleteFilesBatchRequest, pb.CompleteFilesBatchResponse),
    RpcCode.FREE: (pb.FreeRequest, pb.FreeResponse),
    RpcCode.LIST_OPTIONS: (pb.ListOptionsRequest, pb.ListOptionsResponse),
    RpcCode.GET_CV_METADATA_SNAPSHOT_PAGE: (
        pb.GetCvMetadataSnapshotPageRequest,
        pb.GetCvMetadataSnapshotPageResponse,
    ),
    RpcCode.GET_CV_METADATA_DELTA_PAGE: (pb.GetCvMetadataDeltaPageRequest, pb.GetCvMetadataDeltaPageResponse),
    RpcCode.MOUNT: (pb.MountRequest, pb.MountResponse),
    RpcCode.UNMOUNT: (pb.UnMountRequest, pb.UnMountResponse),
    RpcCode.GET_MOUNT_TABLE: (pb.GetMountTableRequest, pb.GetMountTableResponse),
    RpcCode.GET_MOUNT_INFO: (pb.GetMountInfoRequest, pb.GetMountInfoResponse),
    RpcCode.SUBMIT_JOB: (pb.SubmitJobRequest, pb.SubmitJobResponse),
    RpcCode.GET_JOB_STATUS: (pb.GetJobStatusRequest, pb.GetJobStatusResponse),
    RpcCode.CANCEL_JOB: (pb.CancelJobRequest, pb.CancelJobResponse),
    RpcCode.WORKER_HEARTBEAT: (pb.WorkerHeartbeatRequest, pb.WorkerHeartbeatResponse),
    RpcCode.WORKER_BLOCK_REPORT: (pb.BlockReportListRequest, pb.BlockReportListResponse),
    RpcCode.SUBMIT_BLOCK_REPLICATION_JOB: (pb.SubmitBlockReplicationRequest, pb.SubmitBlockReplicationResponse),
    RpcCode.REPORT_BLOCK_REPLICATION_RESULT: (
        pb.ReportBlockReplicationRequest,
        pb.ReportBlockReplicationResponse,
    ),
    RpcCode.REQUEST_REPLACEMENT_WORKER: (
        pb.RequestReplacementWorkerRequest,
        pb.RequestReplacementWorkerResponse,
    ),
    RpcCode.REPORT_UNDER_REPLICATED_BLOCKS: (
        pb.ReportUnderReplicatedBlocksRequest,
        pb.ReportUnderReplicatedBlocksResponse,
    ),
    RpcCode.METRICS_REPORT: (pb.MetricsReportRequest, pb.MetricsReportResponse),
}

_OPEN, _RUNNING = RequestStatus.OPEN, RequestStatus.RUNNING
_COMPLETE, _CANCEL = RequestStatus.COMPLETE, RequestStatus.CANCEL

_STREAM: dict[tuple[RpcCode, RequestStatus], _Pair] = {
    (RpcCode.WRITE_BLOCK, _OPEN): (pb.BlockWriteRequest, pb.BlockWriteResponse),
    (RpcCode.WRITE_BLOCK, _RUNNING): (pb.DataHeaderProto, None),
    (RpcCode.WRITE_BLOCK, _COMPLETE): (pb.BlockWriteRequest, None),
    (RpcCode.WRITE_BLOCK, _CANCEL): (pb.BlockWriteRequest, None),
    (RpcCode.READ_BLOCK, _OPEN): (pb.BlockReadRequest, pb.BlockReadResponse),
    (RpcCode.READ_BLOCK, _RUNNING): (pb.DataHeaderProto, None),
    (RpcCode.READ_BLOCK, _COMPLETE): (pb.BlockReadRequest, None),
    # Workers refuse to cancel a read; the frame is a legal one all the same.
    (RpcCode.READ_BLOCK, _CANCEL): (pb.BlockReadRequest, None),
    (RpcCode.WRITE_BLOCKS_BATCH, _OPEN): (pb.BlocksBatchWriteRequest, pb.BlocksBatchWriteResponse),
    (RpcCode.WRITE_BLOCKS_BATCH, _RUNNING): (pb.FilesBatchWriteRequest, pb.FilesBatchWriteResponse),
    (RpcCode.WRITE_BLOCKS_BATCH, _COMPLETE): (pb.BlocksBatchCommitRequest, pb.BlocksBatchCommitResponse),
    (RpcCode.WRITE_BLOCKS_BATCH, _CANCEL): (pb.BlocksBatchCommitRequest, pb.BlocksBatchCommitResponse),
}

_PAIRS: dict[tuple[int, RequestStatus], _Pair] = {
    **{(int(code), RequestStatus.RPC): pair for code, pair in _UNARY.items()},
    **{(int(code), status): pair for (code, status), pair in _STREAM.items()},
}

#: (code, request status) -> message in the header of the request.
REQUEST_MESSAGE: dict[tuple[int, RequestStatus], type[Message]] = {key: request for key, (request, _) in _PAIRS.items()}
#: (code, request status) -> message in the header of a successful response; absent where the header is empty.
RESPONSE_MESSAGE: dict[tuple[int, RequestStatus], type[Message]] = {
    key: response for key, (_, response) in _PAIRS.items() if response is not None
}


def message_types(head: FrameHead) -> type[Message] | None:
    """The message that the header of this frame holds; None where the header is empty or the code is unknown.

    A Running request of a block stream may leave its header out (``header_len`` 0): None then too. Error replies
    have no header; their record is in the data section.
    """
    key = (head.code, head.request)
    if head.response is ResponseStatus.SUCCESS:
        return RESPONSE_MESSAGE.get(key)
    if head.response is ResponseStatus.ERROR or (head.request is RequestStatus.RUNNING and head.header_len == 0):
        return None
    return REQUEST_MESSAGE.get(key)
