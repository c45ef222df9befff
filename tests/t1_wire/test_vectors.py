"""The 22 computed vectors of the wire specification (section 9): built from messages, and decoded again."""

from __future__ import annotations

import pytest
from google.protobuf.message import Message

from curvfs.wire.codes import RequestStatus, ResponseStatus, RpcCode, message_types
from curvfs.wire.frame import HEARTBEAT, Frame, FrameDecoder
from curvfs.wire.messages import decode, encode, pb
from curvfs.wire.records import decode_error, encode_error

REQUEST, SUCCESS, ERROR = ResponseStatus.UNDEFINED, ResponseStatus.SUCCESS, ResponseStatus.ERROR
DISK = pb.STORAGE_TYPE_PROTO_DISK

REQ_ID = 0x0123456789ABCDEF
WRITE_REQ_ID = 0x1122334455667788
READ_REQ_ID = 0x0F0E0D0C0B0A0908
CLIENT_NAME = "11111111-2222-4333-8444-555555555555"
INODE = 1001
BLOCK_ID = INODE << 24
BLOCK_SIZE = 134217728
CHUNK_SIZE = 131072
NOW_MS = 1700000000000


def unary(code: RpcCode, response: ResponseStatus, message: Message) -> Frame:
    return Frame.make(code, RequestStatus.RPC, response, REQ_ID, -1, encode(message))


def error_reply(code: RpcCode, kind: int, text: str) -> Frame:
    return Frame.make(code, RequestStatus.RPC, ERROR, REQ_ID, -1, data=encode_error(kind, text))


def stream(
    code: RpcCode,
    status: RequestStatus,
    response: ResponseStatus,
    seq_id: int,
    message: Message | None,
    data: bytes = b"",
    req_id: int = WRITE_REQ_ID,
) -> Frame:
    header = b"" if message is None else encode(message)
    return Frame.make(code, status, response, req_id, seq_id, header, data)


def block(length: int) -> pb.ExtendedBlockProto:
    return pb.ExtendedBlockProto(id=BLOCK_ID, block_size=length, storage_type=DISK, file_type=pb.FILE_TYPE_PROTO_FILE)


VECTORS: list[tuple[str, str, Frame]] = [
    (
        "V1 heartbeat",
        "000000120000000000f0ffffffffffffffffffffffff",
        Frame.make(0, RequestStatus.HEARTBEAT, REQUEST, -1, -1),
    ),
    (
        "V2 mkdir request",
        "0000002d0000001b02f10123456789abcdefffffffff0a022f611215080010ed03220a080410001800200028012a003200",
        unary(RpcCode.MKDIR, REQUEST, pb.MkdirRequest(path="/a", opts=pb.MkdirOptsProto(mode=0o755))),
    ),
    (
        "V3 mkdir response",
        "0000005c0000004a02010123456789abcdefffffffff0800124608ea0712022f611a016120012880d095ffbc313080d0"
        "95ffbc31380040004800500058006000720a080410001800200028017a008201008801ed03980102a00180d095ffbc31",
        unary(
            RpcCode.MKDIR,
            SUCCESS,
            pb.MkdirResponse(
                status=pb.FileStatusProto(
                    id=INODE + 1,
                    path="/a",
                    name="a",
                    is_dir=True,
                    mtime=NOW_MS,
                    atime=NOW_MS,
                    file_type=pb.FILE_TYPE_PROTO_DIR,
                    mode=0o755,
                    nlink=2,
                    ctime=NOW_MS,
                )
            ),
        ),
    ),
    (
        "V4 file status response",
        "000000650000005307010123456789abcdefffffffff0a5108e90712022f661a016620002880d095ffbc313080d095ff"
        "bc31380040014805500158808080406001720a080410001800200028017a04726f6f74820104726f6f748801a4039801"
        "01a00180d095ffbc31",
        unary(
            RpcCode.FILE_STATUS,
            SUCCESS,
            pb.GetFileStatusResponse(
                status=pb.FileStatusProto(
                    id=INODE,
                    path="/f",
                    name="f",
                    mtime=NOW_MS,
                    atime=NOW_MS,
                    is_complete=True,
                    len=5,
                    replicas=1,
                    block_size=BLOCK_SIZE,
                    owner="root",
                    group="root",
                    mode=0o644,
                    nlink=1,
                    ctime=NOW_MS,
                )
            ),
        ),
    ),
    (
        "V5 error reply, not the leader",
        "000000560000000007110123456789abcdefffffffff00000002000000384e6f742061206c6561646572206d61737465"
        "722c20636f64653d46696c655374617475732c20636c69656e745f69703d31302e302e302e3900000000",
        error_reply(RpcCode.FILE_STATUS, 2, "Not a leader master, code=FileStatus, client_ip=10.0.0.9"),
    ),
    (
        "V6 error reply, file not found",
        "0000002f0000000007110123456789abcdefffffffff000000080000001146696c65202f66206e6f7420666f756e6400000000",
        error_reply(RpcCode.FILE_STATUS, 8, "File /f not found"),
    ),
    (
        "V7 create request",
        "0000006d0000005b04f10123456789abcdefffffffff0a022f661252080010011801200128808080403a0a0804100018"
        "0020002801422431313131313131312d323232322d343333332d383434342d35353535353535353535353548a4035204"
        "726f6f745a04726f6f746000680018c104",
        unary(
            RpcCode.CREATE_FILE,
            REQUEST,
            pb.CreateFileRequest(
                path="/f",
                flags=0x241,
                opts=pb.CreateFileOptsProto(
                    create_flag=0, create_parent=True, client_name=CLIENT_NAME, mode=0o644, owner="root", group="root"
                ),
            ),
        ),
    ),
    (
        "V8 add block request",
        "00000058000000460bf10123456789abcdefffffffff0a022f6620012a390a2431313131313131312d323232322d3433"
        "33332d383434342d35353535353535353535353512056e6f6465311a0831302e302e302e392000300040e907",
        unary(
            RpcCode.ADD_BLOCK,
            REQUEST,
            pb.AddBlockRequest(
                path="/f",
                client_address=pb.ClientAddressProto(client_name=CLIENT_NAME, hostname="node1", ip_addr="10.0.0.9"),
                inode_id=INODE,
            ),
        ),
    ),
    (
        "V9 add block response, bare",
        "0000003c0000002a0b010123456789abcdefffffffff0a0c08808080c83e10001804200110001a16080712056e6f6465"
        "311a056e6f64653120a54628aa462000",
        unary(
            RpcCode.ADD_BLOCK,
            SUCCESS,
            pb.LocatedBlockProto(
                block=block(0),
                locs=[
                    pb.WorkerAddressProto(worker_id=7, hostname="node1", ip_addr="node1", rpc_port=8997, web_port=9002)
                ],
                has_spdk=False,
            ),
        ),
    ),
    (
        "V10 write open request",
        "000000530000004150f21122334455667788000000000a0c08808080c83e1000180420011000188080804020002a2431"
        "313131313131312d323232322d343333332d383434342d35353535353535353535353530808008",
        stream(
            RpcCode.WRITE_BLOCK,
            RequestStatus.OPEN,
            REQUEST,
            0,
            pb.BlockWriteRequest(block=block(0), block_size=BLOCK_SIZE, client_name=CLIENT_NAME, chunk_size=CHUNK_SIZE),
        ),
    ),
    (
        "V11 write open response",
        "000000210000000f500211223344556677880000000008808080c83e180020808080402804",
        stream(
            RpcCode.WRITE_BLOCK,
            RequestStatus.OPEN,
            SUCCESS,
            0,
            pb.BlockWriteResponse(id=BLOCK_ID, block_size=BLOCK_SIZE, storage_type=DISK),
        ),
    ),
    (
        "V12 write running request",
        "000000170000000050f311223344556677880000000168656c6c6f",
        stream(RpcCode.WRITE_BLOCK, RequestStatus.RUNNING, REQUEST, 1, None, b"hello"),
    ),
    (
        "V13 write running response",
        "00000012000000005003112233445566778800000001",
        stream(RpcCode.WRITE_BLOCK, RequestStatus.RUNNING, SUCCESS, 1, None),
    ),
    (
        "V14 write running with a seek",
        "000000190000000650f31122334455667788000000020800100018004a",
        stream(RpcCode.WRITE_BLOCK, RequestStatus.RUNNING, REQUEST, 2, pb.DataHeaderProto(offset=0), b"J"),
    ),
    (
        "V15 write complete request",
        "000000510000003f50f51122334455667788000000030a0c08808080c83e1005180420011005188080804020002a2431"
        "313131313131312d323232322d343333332d383434342d3535353535353535353535353000",
        stream(
            RpcCode.WRITE_BLOCK,
            RequestStatus.COMPLETE,
            REQUEST,
            3,
            pb.BlockWriteRequest(block=block(5), off=5, block_size=BLOCK_SIZE, client_name=CLIENT_NAME),
        ),
    ),
    (
        "V16 complete file request",
        "00000055000000430cf10123456789abcdefffffffff0a022f6610051a2431313131313131312d323232322d34333333"
        "2d383434342d353535353535353535353535220e08808080c83e10051a0408071004280030e9074001",
        unary(
            RpcCode.COMPLETE_FILE,
            REQUEST,
            pb.CompleteFileRequest(
                path="/f",
                len=5,
                client_name=CLIENT_NAME,
                commit_blocks=[
                    pb.CommitBlockProto(
                        block_id=BLOCK_ID,
                        block_len=5,
                        locations=[pb.BlockLocationProto(worker_id=7, storage_type=DISK)],
                    )
                ],
                inode_id=INODE,
                return_file_blocks=True,
            ),
        ),
    ),
    (
        "V17 complete file response",
        "00000014000000020c010123456789abcdefffffffff0801",
        unary(RpcCode.COMPLETE_FILE, SUCCESS, pb.CompleteFileResponse(result=True)),
    ),
    (
        "V18 read open request",
        "0000002c0000001a51f20f0e0d0c0b0a09080000000008808080c83e1000180520808008280040014880804050808040",
        stream(
            RpcCode.READ_BLOCK,
            RequestStatus.OPEN,
            REQUEST,
            0,
            pb.BlockReadRequest(id=BLOCK_ID, len=5, chunk_size=CHUNK_SIZE, read_ahead_len=1048576),
            req_id=READ_REQ_ID,
        ),
    ),
    (
        "V19 read running request",
        "000000120000000051f30f0e0d0c0b0a090800000001",
        stream(RpcCode.READ_BLOCK, RequestStatus.RUNNING, REQUEST, 1, None, req_id=READ_REQ_ID),
    ),
    (
        "V20 read running response",
        "000000170000000051030f0e0d0c0b0a0908000000014a656c6c6f",
        stream(RpcCode.READ_BLOCK, RequestStatus.RUNNING, SUCCESS, 1, None, b"Jello", req_id=READ_REQ_ID),
    ),
    (
        "V21 list options request",
        "0000001e0000000c1bf10123456789abcdefffffffff0a022f61120608e80712016d",
        unary(
            RpcCode.LIST_OPTIONS,
            REQUEST,
            pb.ListOptionsRequest(path="/a", options=pb.ListOptionsProto(limit=1000, start_after="m")),
        ),
    ),
    (
        "V22 handshake request",
        "00000028000000160ef10123456789abcdefffffffffc23e130a06636c69656e741205302e342e3130013801",
        unary(
            RpcCode.GET_FILESYSTEM_INFO,
            REQUEST,
            pb.GetFilesystemInfoRequest(
                component_info=pb.ComponentInfoProto(
                    component="client", release_version="0.4.1", protocol_version=1, min_protocol_version=1
                )
            ),
        ),
    ),
]


@pytest.mark.parametrize(("name", "hexadecimal", "built"), VECTORS, ids=[name for name, _, _ in VECTORS])
def test_vector(name: str, hexadecimal: str, built: Frame) -> None:
    raw = bytes.fromhex(hexadecimal)
    assert built.encode() == raw

    decoder = FrameDecoder()
    decoder.feed(raw)
    frame = decoder.next_frame()
    assert frame == built
    assert decoder.pending_bytes == 0
    cls = message_types(frame.head)
    if cls is not None:
        assert encode(decode(cls, frame.header)) == frame.header
    else:
        assert frame.header == b""


def test_there_are_22_vectors() -> None:
    assert len(VECTORS) == 22


def test_heartbeat_constant_is_v1() -> None:
    assert bytes.fromhex(VECTORS[0][1]) == HEARTBEAT


@pytest.mark.parametrize(
    ("number", "kind", "text"),
    [(5, 2, "Not a leader master, code=FileStatus, client_ip=10.0.0.9"), (6, 8, "File /f not found")],
)
def test_error_vectors_decode(number: int, kind: int, text: str) -> None:
    assert decode_error(VECTORS[number - 1][2].data) == (kind, text)


def test_meaning_of_decoded_fields() -> None:
    """Spot checks that the bytes mean what the specification says they mean."""
    status = decode(pb.GetFileStatusResponse, VECTORS[3][2].header).status
    assert (status.id, status.path, status.len, status.mode, status.ctime) == (INODE, "/f", 5, 0o644, NOW_MS)
    commit = decode(pb.CompleteFileRequest, VECTORS[15][2].header).commit_blocks[0]
    assert (commit.block_id, commit.block_len, commit.locations[0].worker_id) == (BLOCK_ID, 5, 7)
    opening = decode(pb.BlockReadRequest, VECTORS[17][2].header)
    assert (opening.id, opening.len, opening.enable_read_ahead) == (BLOCK_ID, 5, True)
    assert (opening.chunk_size, opening.read_ahead_len, opening.drop_cache_len) == (CHUNK_SIZE, 1048576, 1048576)
