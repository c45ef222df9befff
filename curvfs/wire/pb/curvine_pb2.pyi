from google.protobuf import descriptor_pb2 as _descriptor_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class StorageTypeProto(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    STORAGE_TYPE_PROTO_MEM: _ClassVar[StorageTypeProto]
    STORAGE_TYPE_PROTO_SSD: _ClassVar[StorageTypeProto]
    STORAGE_TYPE_PROTO_HDD: _ClassVar[StorageTypeProto]
    STORAGE_TYPE_PROTO_UFS: _ClassVar[StorageTypeProto]
    STORAGE_TYPE_PROTO_DISK: _ClassVar[StorageTypeProto]
    STORAGE_TYPE_PROTO_SPDK_DISK: _ClassVar[StorageTypeProto]

class TtlActionProto(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    TTL_ACTION_PROTO_NONE: _ClassVar[TtlActionProto]
    TTL_ACTION_PROTO_DELETE: _ClassVar[TtlActionProto]
    TTL_ACTION_PROTO_FREE: _ClassVar[TtlActionProto]

class WriteTypeProto(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    WRITE_TYPE_PROTO_CACHE_MODE: _ClassVar[WriteTypeProto]
    WRITE_TYPE_PROTO_FS_MODE: _ClassVar[WriteTypeProto]

class FileTypeProto(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    FILE_TYPE_PROTO_DIR: _ClassVar[FileTypeProto]
    FILE_TYPE_PROTO_FILE: _ClassVar[FileTypeProto]
    FILE_TYPE_PROTO_LINK: _ClassVar[FileTypeProto]
    FILE_TYPE_PROTO_STREAM: _ClassVar[FileTypeProto]
    FILE_TYPE_PROTO_AGG: _ClassVar[FileTypeProto]
    FILE_TYPE_PROTO_OBJECT: _ClassVar[FileTypeProto]
    FILE_TYPE_PROTO_FIFO: _ClassVar[FileTypeProto]
    FILE_TYPE_PROTO_CHAR: _ClassVar[FileTypeProto]
    FILE_TYPE_PROTO_BLOCK: _ClassVar[FileTypeProto]
    FILE_TYPE_PROTO_SOCKET: _ClassVar[FileTypeProto]

class StorageStateProto(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    STORAGE_STATE_PROTO_UNSPECIFIED: _ClassVar[StorageStateProto]
    STORAGE_STATE_PROTO_CV: _ClassVar[StorageStateProto]
    STORAGE_STATE_PROTO_UFS: _ClassVar[StorageStateProto]
    STORAGE_STATE_PROTO_BOTH: _ClassVar[StorageStateProto]

class HeartbeatStatusProto(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    HEARTBEAT_STATUS_PROTO_START: _ClassVar[HeartbeatStatusProto]
    HEARTBEAT_STATUS_PROTO_RUNNING: _ClassVar[HeartbeatStatusProto]
    HEARTBEAT_STATUS_PROTO_END: _ClassVar[HeartbeatStatusProto]

class LockTypeProto(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    LOCK_TYPE_PROTO_READ: _ClassVar[LockTypeProto]
    LOCK_TYPE_PROTO_WRITE: _ClassVar[LockTypeProto]
    LOCK_TYPE_PROTO_UNLOCK: _ClassVar[LockTypeProto]

class LockFlagsProto(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    LOCK_FLAGS_PROTO_PLOCK: _ClassVar[LockFlagsProto]
    LOCK_FLAGS_PROTO_FLOCK: _ClassVar[LockFlagsProto]

class CompatibilityModeProto(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    COMPATIBILITY_MODE_PROTO_UNKNOWN: _ClassVar[CompatibilityModeProto]
    COMPATIBILITY_MODE_PROTO_DIAGNOSE: _ClassVar[CompatibilityModeProto]
    COMPATIBILITY_MODE_PROTO_ENFORCE: _ClassVar[CompatibilityModeProto]

class MetricTypeProto(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    METRIC_TYPE_PROTO_UNSPECIFIED: _ClassVar[MetricTypeProto]
    GAUGE: _ClassVar[MetricTypeProto]
    COUNTER: _ClassVar[MetricTypeProto]

class BlockReportStatusProto(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    BLOCK_REPORT_STATUS_PROTO_UNSPECIFIED: _ClassVar[BlockReportStatusProto]
    BLOCK_REPORT_STATUS_PROTO_FINALIZED: _ClassVar[BlockReportStatusProto]
    BLOCK_REPORT_STATUS_PROTO_WRITING: _ClassVar[BlockReportStatusProto]
    BLOCK_REPORT_STATUS_PROTO_DELETED: _ClassVar[BlockReportStatusProto]

class ProviderProto(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    PROVIDER_PROTO_AUTO: _ClassVar[ProviderProto]
    PROVIDER_PROTO_OSS_HDFS: _ClassVar[ProviderProto]
    PROVIDER_PROTO_OPENDAL: _ClassVar[ProviderProto]

class AccessModeProto(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    ACCESS_MODE_PROTO_READ_ONLY: _ClassVar[AccessModeProto]
    ACCESS_MODE_PROTO_READ_WRITE: _ClassVar[AccessModeProto]

class JobTaskStateProto(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    UNKNOWN: _ClassVar[JobTaskStateProto]
    PENDING: _ClassVar[JobTaskStateProto]
    LOADING: _ClassVar[JobTaskStateProto]
    COMPLETED: _ClassVar[JobTaskStateProto]
    FAILED: _ClassVar[JobTaskStateProto]
    CANCELED: _ClassVar[JobTaskStateProto]
    PARTIAL_SUCCESS: _ClassVar[JobTaskStateProto]

class JobTaskTypeProto(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    JOB_TASK_TYPE_PROTO_UNSPECIFIED: _ClassVar[JobTaskTypeProto]
    LOAD: _ClassVar[JobTaskTypeProto]
    EXPORT: _ClassVar[JobTaskTypeProto]
STORAGE_TYPE_PROTO_MEM: StorageTypeProto
STORAGE_TYPE_PROTO_SSD: StorageTypeProto
STORAGE_TYPE_PROTO_HDD: StorageTypeProto
STORAGE_TYPE_PROTO_UFS: StorageTypeProto
STORAGE_TYPE_PROTO_DISK: StorageTypeProto
STORAGE_TYPE_PROTO_SPDK_DISK: StorageTypeProto
TTL_ACTION_PROTO_NONE: TtlActionProto
TTL_ACTION_PROTO_DELETE: TtlActionProto
TTL_ACTION_PROTO_FREE: TtlActionProto
WRITE_TYPE_PROTO_CACHE_MODE: WriteTypeProto
WRITE_TYPE_PROTO_FS_MODE: WriteTypeProto
FILE_TYPE_PROTO_DIR: FileTypeProto
FILE_TYPE_PROTO_FILE: FileTypeProto
FILE_TYPE_PROTO_LINK: FileTypeProto
FILE_TYPE_PROTO_STREAM: FileTypeProto
FILE_TYPE_PROTO_AGG: FileTypeProto
FILE_TYPE_PROTO_OBJECT: FileTypeProto
FILE_TYPE_PROTO_FIFO: FileTypeProto
FILE_TYPE_PROTO_CHAR: FileTypeProto
FILE_TYPE_PROTO_BLOCK: FileTypeProto
FILE_TYPE_PROTO_SOCKET: FileTypeProto
STORAGE_STATE_PROTO_UNSPECIFIED: StorageStateProto
STORAGE_STATE_PROTO_CV: StorageStateProto
STORAGE_STATE_PROTO_UFS: StorageStateProto
STORAGE_STATE_PROTO_BOTH: StorageStateProto
HEARTBEAT_STATUS_PROTO_START: HeartbeatStatusProto
HEARTBEAT_STATUS_PROTO_RUNNING: HeartbeatStatusProto
HEARTBEAT_STATUS_PROTO_END: HeartbeatStatusProto
LOCK_TYPE_PROTO_READ: LockTypeProto
LOCK_TYPE_PROTO_WRITE: LockTypeProto
LOCK_TYPE_PROTO_UNLOCK: LockTypeProto
LOCK_FLAGS_PROTO_PLOCK: LockFlagsProto
LOCK_FLAGS_PROTO_FLOCK: LockFlagsProto
COMPATIBILITY_MODE_PROTO_UNKNOWN: CompatibilityModeProto
COMPATIBILITY_MODE_PROTO_DIAGNOSE: CompatibilityModeProto
COMPATIBILITY_MODE_PROTO_ENFORCE: CompatibilityModeProto
METRIC_TYPE_PROTO_UNSPECIFIED: MetricTypeProto
GAUGE: MetricTypeProto
COUNTER: MetricTypeProto
BLOCK_REPORT_STATUS_PROTO_UNSPECIFIED: BlockReportStatusProto
BLOCK_REPORT_STATUS_PROTO_FINALIZED: BlockReportStatusProto
BLOCK_REPORT_STATUS_PROTO_WRITING: BlockReportStatusProto
BLOCK_REPORT_STATUS_PROTO_DELETED: BlockReportStatusProto
PROVIDER_PROTO_AUTO: ProviderProto
PROVIDER_PROTO_OSS_HDFS: ProviderProto
PROVIDER_PROTO_OPENDAL: ProviderProto
ACCESS_MODE_PROTO_READ_ONLY: AccessModeProto
ACCESS_MODE_PROTO_READ_WRITE: AccessModeProto
UNKNOWN: JobTaskStateProto
PENDING: JobTaskStateProto
LOADING: JobTaskStateProto
COMPLETED: JobTaskStateProto
FAILED: JobTaskStateProto
CANCELED: JobTaskStateProto
PARTIAL_SUCCESS: JobTaskStateProto
JOB_TASK_TYPE_PROTO_UNSPECIFIED: JobTaskTypeProto
LOAD: JobTaskTypeProto
EXPORT: JobTaskTypeProto
REQUIRED_FIELD_NUMBER: _ClassVar[int]
required: _descriptor.FieldDescriptor

class StoragePolicyProto(_message.Message):
    __slots__ = ("storage_type", "ttl_ms", "ttl_action", "ufs_mtime", "state")
    STORAGE_TYPE_FIELD_NUMBER: _ClassVar[int]
    TTL_MS_FIELD_NUMBER: _ClassVar[int]
    TTL_ACTION_FIELD_NUMBER: _ClassVar[int]
    UFS_MTIME_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    storage_type: StorageTypeProto
    ttl_ms: int
    ttl_action: TtlActionProto
    ufs_mtime: int
    state: StorageStateProto
    def __init__(self, storage_type: _Optional[_Union[StorageTypeProto, str]] = ..., ttl_ms: _Optional[int] = ..., ttl_action: _Optional[_Union[TtlActionProto, str]] = ..., ufs_mtime: _Optional[int] = ..., state: _Optional[_Union[StorageStateProto, str]] = ...) -> None: ...

class FileStatusProto(_message.Message):
    __slots__ = ("id", "path", "name", "is_dir", "mtime", "atime", "children_num", "is_complete", "len", "replicas", "block_size", "file_type", "x_attr", "storage_policy", "owner", "group", "mode", "target", "nlink", "ctime")
    class XAttrEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: bytes
        def __init__(self, key: _Optional[str] = ..., value: _Optional[bytes] = ...) -> None: ...
    ID_FIELD_NUMBER: _ClassVar[int]
    PATH_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    IS_DIR_FIELD_NUMBER: _ClassVar[int]
    MTIME_FIELD_NUMBER: _ClassVar[int]
    ATIME_FIELD_NUMBER: _ClassVar[int]
    CHILDREN_NUM_FIELD_NUMBER: _ClassVar[int]
    IS_COMPLETE_FIELD_NUMBER: _ClassVar[int]
    LEN_FIELD_NUMBER: _ClassVar[int]
    REPLICAS_FIELD_NUMBER: _ClassVar[int]
    BLOCK_SIZE_FIELD_NUMBER: _ClassVar[int]
    FILE_TYPE_FIELD_NUMBER: _ClassVar[int]
    X_ATTR_FIELD_NUMBER: _ClassVar[int]
    STORAGE_POLICY_FIELD_NUMBER: _ClassVar[int]
    OWNER_FIELD_NUMBER: _ClassVar[int]
    GROUP_FIELD_NUMBER: _ClassVar[int]
    MODE_FIELD_NUMBER: _ClassVar[int]
    TARGET_FIELD_NUMBER: _ClassVar[int]
    NLINK_FIELD_NUMBER: _ClassVar[int]
    CTIME_FIELD_NUMBER: _ClassVar[int]
    id: int
    path: str
    name: str
    is_dir: bool
    mtime: int
    atime: int
    children_num: int
    is_complete: bool
    len: int
    replicas: int
    block_size: int
    file_type: FileTypeProto
    x_attr: _containers.ScalarMap[str, bytes]
    storage_policy: StoragePolicyProto
    owner: str
    group: str
    mode: int
    target: str
    nlink: int
    ctime: int
    def __init__(self, id: _Optional[int] = ..., path: _Optional[str] = ..., name: _Optional[str] = ..., is_dir: bool = ..., mtime: _Optional[int] = ..., atime: _Optional[int] = ..., children_num: _Optional[int] = ..., is_complete: bool = ..., len: _Optional[int] = ..., replicas: _Optional[int] = ..., block_size: _Optional[int] = ..., file_type: _Optional[_Union[FileTypeProto, str]] = ..., x_attr: _Optional[_Mapping[str, bytes]] = ..., storage_policy: _Optional[_Union[StoragePolicyProto, _Mapping]] = ..., owner: _Optional[str] = ..., group: _Optional[str] = ..., mode: _Optional[int] = ..., target: _Optional[str] = ..., nlink: _Optional[int] = ..., ctime: _Optional[int] = ...) -> None: ...

class WorkerAddressProto(_message.Message):
    __slots__ = ("worker_id", "hostname", "ip_addr", "rpc_port", "web_port")
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    HOSTNAME_FIELD_NUMBER: _ClassVar[int]
    IP_ADDR_FIELD_NUMBER: _ClassVar[int]
    RPC_PORT_FIELD_NUMBER: _ClassVar[int]
    WEB_PORT_FIELD_NUMBER: _ClassVar[int]
    worker_id: int
    hostname: str
    ip_addr: str
    rpc_port: int
    web_port: int
    def __init__(self, worker_id: _Optional[int] = ..., hostname: _Optional[str] = ..., ip_addr: _Optional[str] = ..., rpc_port: _Optional[int] = ..., web_port: _Optional[int] = ...) -> None: ...

class BlockLocationProto(_message.Message):
    __slots__ = ("worker_id", "storage_type")
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    STORAGE_TYPE_FIELD_NUMBER: _ClassVar[int]
    worker_id: int
    storage_type: StorageTypeProto
    def __init__(self, worker_id: _Optional[int] = ..., storage_type: _Optional[_Union[StorageTypeProto, str]] = ...) -> None: ...

class CommitBlockProto(_message.Message):
    __slots__ = ("block_id", "block_len", "locations")
    BLOCK_ID_FIELD_NUMBER: _ClassVar[int]
    BLOCK_LEN_FIELD_NUMBER: _ClassVar[int]
    LOCATIONS_FIELD_NUMBER: _ClassVar[int]
    block_id: int
    block_len: int
    locations: _containers.RepeatedCompositeFieldContainer[BlockLocationProto]
    def __init__(self, block_id: _Optional[int] = ..., block_len: _Optional[int] = ..., locations: _Optional[_Iterable[_Union[BlockLocationProto, _Mapping]]] = ...) -> None: ...

class FileAllocOptsProto(_message.Message):
    __slots__ = ("truncate", "off", "len", "mode")
    TRUNCATE_FIELD_NUMBER: _ClassVar[int]
    OFF_FIELD_NUMBER: _ClassVar[int]
    LEN_FIELD_NUMBER: _ClassVar[int]
    MODE_FIELD_NUMBER: _ClassVar[int]
    truncate: bool
    off: int
    len: int
    mode: int
    def __init__(self, truncate: bool = ..., off: _Optional[int] = ..., len: _Optional[int] = ..., mode: _Optional[int] = ...) -> None: ...

class ExtendedBlockProto(_message.Message):
    __slots__ = ("id", "block_size", "storage_type", "file_type", "alloc_opts")
    ID_FIELD_NUMBER: _ClassVar[int]
    BLOCK_SIZE_FIELD_NUMBER: _ClassVar[int]
    STORAGE_TYPE_FIELD_NUMBER: _ClassVar[int]
    FILE_TYPE_FIELD_NUMBER: _ClassVar[int]
    ALLOC_OPTS_FIELD_NUMBER: _ClassVar[int]
    id: int
    block_size: int
    storage_type: StorageTypeProto
    file_type: FileTypeProto
    alloc_opts: FileAllocOptsProto
    def __init__(self, id: _Optional[int] = ..., block_size: _Optional[int] = ..., storage_type: _Optional[_Union[StorageTypeProto, str]] = ..., file_type: _Optional[_Union[FileTypeProto, str]] = ..., alloc_opts: _Optional[_Union[FileAllocOptsProto, _Mapping]] = ...) -> None: ...

class LocatedBlockProto(_message.Message):
    __slots__ = ("block", "offset", "locs", "has_spdk")
    BLOCK_FIELD_NUMBER: _ClassVar[int]
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    LOCS_FIELD_NUMBER: _ClassVar[int]
    HAS_SPDK_FIELD_NUMBER: _ClassVar[int]
    block: ExtendedBlockProto
    offset: int
    locs: _containers.RepeatedCompositeFieldContainer[WorkerAddressProto]
    has_spdk: bool
    def __init__(self, block: _Optional[_Union[ExtendedBlockProto, _Mapping]] = ..., offset: _Optional[int] = ..., locs: _Optional[_Iterable[_Union[WorkerAddressProto, _Mapping]]] = ..., has_spdk: bool = ...) -> None: ...

class FileBlocksProto(_message.Message):
    __slots__ = ("status", "block_locs")
    STATUS_FIELD_NUMBER: _ClassVar[int]
    BLOCK_LOCS_FIELD_NUMBER: _ClassVar[int]
    status: FileStatusProto
    block_locs: _containers.RepeatedCompositeFieldContainer[LocatedBlockProto]
    def __init__(self, status: _Optional[_Union[FileStatusProto, _Mapping]] = ..., block_locs: _Optional[_Iterable[_Union[LocatedBlockProto, _Mapping]]] = ...) -> None: ...

class BlockInfoProto(_message.Message):
    __slots__ = ("block_id", "len", "locations")
    BLOCK_ID_FIELD_NUMBER: _ClassVar[int]
    LEN_FIELD_NUMBER: _ClassVar[int]
    LOCATIONS_FIELD_NUMBER: _ClassVar[int]
    block_id: int
    len: int
    locations: _containers.RepeatedCompositeFieldContainer[BlockLocationProto]
    def __init__(self, block_id: _Optional[int] = ..., len: _Optional[int] = ..., locations: _Optional[_Iterable[_Union[BlockLocationProto, _Mapping]]] = ...) -> None: ...

class FileBlockInfoProto(_message.Message):
    __slots__ = ("info", "off")
    INFO_FIELD_NUMBER: _ClassVar[int]
    OFF_FIELD_NUMBER: _ClassVar[int]
    info: _containers.RepeatedCompositeFieldContainer[BlockInfoProto]
    off: int
    def __init__(self, info: _Optional[_Iterable[_Union[BlockInfoProto, _Mapping]]] = ..., off: _Optional[int] = ...) -> None: ...

class ClientAddressProto(_message.Message):
    __slots__ = ("client_name", "hostname", "ip_addr", "port")
    CLIENT_NAME_FIELD_NUMBER: _ClassVar[int]
    HOSTNAME_FIELD_NUMBER: _ClassVar[int]
    IP_ADDR_FIELD_NUMBER: _ClassVar[int]
    PORT_FIELD_NUMBER: _ClassVar[int]
    client_name: str
    hostname: str
    ip_addr: str
    port: int
    def __init__(self, client_name: _Optional[str] = ..., hostname: _Optional[str] = ..., ip_addr: _Optional[str] = ..., port: _Optional[int] = ...) -> None: ...

class StorageInfoProto(_message.Message):
    __slots__ = ("dir_id", "storage_id", "failed", "capacity", "available", "fs_used", "non_fs_used", "reserved_bytes", "storage_type", "block_num", "dir_path")
    DIR_ID_FIELD_NUMBER: _ClassVar[int]
    STORAGE_ID_FIELD_NUMBER: _ClassVar[int]
    FAILED_FIELD_NUMBER: _ClassVar[int]
    CAPACITY_FIELD_NUMBER: _ClassVar[int]
    AVAILABLE_FIELD_NUMBER: _ClassVar[int]
    FS_USED_FIELD_NUMBER: _ClassVar[int]
    NON_FS_USED_FIELD_NUMBER: _ClassVar[int]
    RESERVED_BYTES_FIELD_NUMBER: _ClassVar[int]
    STORAGE_TYPE_FIELD_NUMBER: _ClassVar[int]
    BLOCK_NUM_FIELD_NUMBER: _ClassVar[int]
    DIR_PATH_FIELD_NUMBER: _ClassVar[int]
    dir_id: int
    storage_id: str
    failed: bool
    capacity: int
    available: int
    fs_used: int
    non_fs_used: int
    reserved_bytes: int
    storage_type: StorageTypeProto
    block_num: int
    dir_path: str
    def __init__(self, dir_id: _Optional[int] = ..., storage_id: _Optional[str] = ..., failed: bool = ..., capacity: _Optional[int] = ..., available: _Optional[int] = ..., fs_used: _Optional[int] = ..., non_fs_used: _Optional[int] = ..., reserved_bytes: _Optional[int] = ..., storage_type: _Optional[_Union[StorageTypeProto, str]] = ..., block_num: _Optional[int] = ..., dir_path: _Optional[str] = ...) -> None: ...

class ComponentInfoProto(_message.Message):
    __slots__ = ("component", "release_version", "git_commit", "git_tag", "git_branch", "protocol_version", "min_protocol_version", "capabilities")
    COMPONENT_FIELD_NUMBER: _ClassVar[int]
    RELEASE_VERSION_FIELD_NUMBER: _ClassVar[int]
    GIT_COMMIT_FIELD_NUMBER: _ClassVar[int]
    GIT_TAG_FIELD_NUMBER: _ClassVar[int]
    GIT_BRANCH_FIELD_NUMBER: _ClassVar[int]
    PROTOCOL_VERSION_FIELD_NUMBER: _ClassVar[int]
    MIN_PROTOCOL_VERSION_FIELD_NUMBER: _ClassVar[int]
    CAPABILITIES_FIELD_NUMBER: _ClassVar[int]
    component: str
    release_version: str
    git_commit: str
    git_tag: str
    git_branch: str
    protocol_version: int
    min_protocol_version: int
    capabilities: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, component: _Optional[str] = ..., release_version: _Optional[str] = ..., git_commit: _Optional[str] = ..., git_tag: _Optional[str] = ..., git_branch: _Optional[str] = ..., protocol_version: _Optional[int] = ..., min_protocol_version: _Optional[int] = ..., capabilities: _Optional[_Iterable[str]] = ...) -> None: ...

class ServerCompatibilityInfoProto(_message.Message):
    __slots__ = ("server", "min_worker_version", "min_client_version", "compatibility_mode", "blocked_versions")
    SERVER_FIELD_NUMBER: _ClassVar[int]
    MIN_WORKER_VERSION_FIELD_NUMBER: _ClassVar[int]
    MIN_CLIENT_VERSION_FIELD_NUMBER: _ClassVar[int]
    COMPATIBILITY_MODE_FIELD_NUMBER: _ClassVar[int]
    BLOCKED_VERSIONS_FIELD_NUMBER: _ClassVar[int]
    server: ComponentInfoProto
    min_worker_version: str
    min_client_version: str
    compatibility_mode: CompatibilityModeProto
    blocked_versions: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, server: _Optional[_Union[ComponentInfoProto, _Mapping]] = ..., min_worker_version: _Optional[str] = ..., min_client_version: _Optional[str] = ..., compatibility_mode: _Optional[_Union[CompatibilityModeProto, str]] = ..., blocked_versions: _Optional[_Iterable[str]] = ...) -> None: ...

class WorkerInfoProto(_message.Message):
    __slots__ = ("address", "capacity", "available", "fs_used", "non_fs_used", "last_update", "storage_map", "reserved_bytes", "weight", "worker_session_id", "transfer_task_submit", "transfer_report_target", "transfer_query_task", "transfer_attempt_safe_output", "transfer_source_read_plan", "software_version", "startup_time_ms", "component_info")
    class StorageMapEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: StorageInfoProto
        def __init__(self, key: _Optional[str] = ..., value: _Optional[_Union[StorageInfoProto, _Mapping]] = ...) -> None: ...
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    CAPACITY_FIELD_NUMBER: _ClassVar[int]
    AVAILABLE_FIELD_NUMBER: _ClassVar[int]
    FS_USED_FIELD_NUMBER: _ClassVar[int]
    NON_FS_USED_FIELD_NUMBER: _ClassVar[int]
    LAST_UPDATE_FIELD_NUMBER: _ClassVar[int]
    STORAGE_MAP_FIELD_NUMBER: _ClassVar[int]
    RESERVED_BYTES_FIELD_NUMBER: _ClassVar[int]
    WEIGHT_FIELD_NUMBER: _ClassVar[int]
    WORKER_SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    TRANSFER_TASK_SUBMIT_FIELD_NUMBER: _ClassVar[int]
    TRANSFER_REPORT_TARGET_FIELD_NUMBER: _ClassVar[int]
    TRANSFER_QUERY_TASK_FIELD_NUMBER: _ClassVar[int]
    TRANSFER_ATTEMPT_SAFE_OUTPUT_FIELD_NUMBER: _ClassVar[int]
    TRANSFER_SOURCE_READ_PLAN_FIELD_NUMBER: _ClassVar[int]
    SOFTWARE_VERSION_FIELD_NUMBER: _ClassVar[int]
    STARTUP_TIME_MS_FIELD_NUMBER: _ClassVar[int]
    COMPONENT_INFO_FIELD_NUMBER: _ClassVar[int]
    address: WorkerAddressProto
    capacity: int
    available: int
    fs_used: int
    non_fs_used: int
    last_update: int
    storage_map: _containers.MessageMap[str, StorageInfoProto]
    reserved_bytes: int
    weight: int
    worker_session_id: str
    transfer_task_submit: bool
    transfer_report_target: bool
    transfer_query_task: bool
    transfer_attempt_safe_output: bool
    transfer_source_read_plan: bool
    software_version: str
    startup_time_ms: int
    component_info: ComponentInfoProto
    def __init__(self, address: _Optional[_Union[WorkerAddressProto, _Mapping]] = ..., capacity: _Optional[int] = ..., available: _Optional[int] = ..., fs_used: _Optional[int] = ..., non_fs_used: _Optional[int] = ..., last_update: _Optional[int] = ..., storage_map: _Optional[_Mapping[str, StorageInfoProto]] = ..., reserved_bytes: _Optional[int] = ..., weight: _Optional[int] = ..., worker_session_id: _Optional[str] = ..., transfer_task_submit: bool = ..., transfer_report_target: bool = ..., transfer_query_task: bool = ..., transfer_attempt_safe_output: bool = ..., transfer_source_read_plan: bool = ..., software_version: _Optional[str] = ..., startup_time_ms: _Optional[int] = ..., component_info: _Optional[_Union[ComponentInfoProto, _Mapping]] = ...) -> None: ...

class FileLockProto(_message.Message):
    __slots__ = ("client_id", "owner_id", "pid", "acquire_time", "lock_type", "lock_flags", "start", "end")
    CLIENT_ID_FIELD_NUMBER: _ClassVar[int]
    OWNER_ID_FIELD_NUMBER: _ClassVar[int]
    PID_FIELD_NUMBER: _ClassVar[int]
    ACQUIRE_TIME_FIELD_NUMBER: _ClassVar[int]
    LOCK_TYPE_FIELD_NUMBER: _ClassVar[int]
    LOCK_FLAGS_FIELD_NUMBER: _ClassVar[int]
    START_FIELD_NUMBER: _ClassVar[int]
    END_FIELD_NUMBER: _ClassVar[int]
    client_id: str
    owner_id: int
    pid: int
    acquire_time: int
    lock_type: LockTypeProto
    lock_flags: LockFlagsProto
    start: int
    end: int
    def __init__(self, client_id: _Optional[str] = ..., owner_id: _Optional[int] = ..., pid: _Optional[int] = ..., acquire_time: _Optional[int] = ..., lock_type: _Optional[_Union[LockTypeProto, str]] = ..., lock_flags: _Optional[_Union[LockFlagsProto, str]] = ..., start: _Optional[int] = ..., end: _Optional[int] = ...) -> None: ...

class FreeResultProto(_message.Message):
    __slots__ = ("inodes", "bytes")
    INODES_FIELD_NUMBER: _ClassVar[int]
    BYTES_FIELD_NUMBER: _ClassVar[int]
    inodes: int
    bytes: int
    def __init__(self, inodes: _Optional[int] = ..., bytes: _Optional[int] = ...) -> None: ...

class ListOptionsProto(_message.Message):
    __slots__ = ("limit", "start_after")
    LIMIT_FIELD_NUMBER: _ClassVar[int]
    START_AFTER_FIELD_NUMBER: _ClassVar[int]
    limit: int
    start_after: str
    def __init__(self, limit: _Optional[int] = ..., start_after: _Optional[str] = ...) -> None: ...

class MkdirOptsProto(_message.Message):
    __slots__ = ("create_parent", "mode", "x_attr", "storage_policy", "owner", "group")
    class XAttrEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: bytes
        def __init__(self, key: _Optional[str] = ..., value: _Optional[bytes] = ...) -> None: ...
    CREATE_PARENT_FIELD_NUMBER: _ClassVar[int]
    MODE_FIELD_NUMBER: _ClassVar[int]
    X_ATTR_FIELD_NUMBER: _ClassVar[int]
    STORAGE_POLICY_FIELD_NUMBER: _ClassVar[int]
    OWNER_FIELD_NUMBER: _ClassVar[int]
    GROUP_FIELD_NUMBER: _ClassVar[int]
    create_parent: bool
    mode: int
    x_attr: _containers.ScalarMap[str, bytes]
    storage_policy: StoragePolicyProto
    owner: str
    group: str
    def __init__(self, create_parent: bool = ..., mode: _Optional[int] = ..., x_attr: _Optional[_Mapping[str, bytes]] = ..., storage_policy: _Optional[_Union[StoragePolicyProto, _Mapping]] = ..., owner: _Optional[str] = ..., group: _Optional[str] = ...) -> None: ...

class MkdirRequest(_message.Message):
    __slots__ = ("path", "opts")
    PATH_FIELD_NUMBER: _ClassVar[int]
    OPTS_FIELD_NUMBER: _ClassVar[int]
    path: str
    opts: MkdirOptsProto
    def __init__(self, path: _Optional[str] = ..., opts: _Optional[_Union[MkdirOptsProto, _Mapping]] = ...) -> None: ...

class MkdirResponse(_message.Message):
    __slots__ = ("flag", "status")
    FLAG_FIELD_NUMBER: _ClassVar[int]
    STATUS_FIELD_NUMBER: _ClassVar[int]
    flag: bool
    status: FileStatusProto
    def __init__(self, flag: bool = ..., status: _Optional[_Union[FileStatusProto, _Mapping]] = ...) -> None: ...

class CreateFileOptsProto(_message.Message):
    __slots__ = ("create_flag", "create_parent", "file_type", "replicas", "block_size", "x_attr", "storage_policy", "client_name", "mode", "owner", "group", "sync_ufs_meta", "ufs_len")
    class XAttrEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: bytes
        def __init__(self, key: _Optional[str] = ..., value: _Optional[bytes] = ...) -> None: ...
    CREATE_FLAG_FIELD_NUMBER: _ClassVar[int]
    CREATE_PARENT_FIELD_NUMBER: _ClassVar[int]
    FILE_TYPE_FIELD_NUMBER: _ClassVar[int]
    REPLICAS_FIELD_NUMBER: _ClassVar[int]
    BLOCK_SIZE_FIELD_NUMBER: _ClassVar[int]
    X_ATTR_FIELD_NUMBER: _ClassVar[int]
    STORAGE_POLICY_FIELD_NUMBER: _ClassVar[int]
    CLIENT_NAME_FIELD_NUMBER: _ClassVar[int]
    MODE_FIELD_NUMBER: _ClassVar[int]
    OWNER_FIELD_NUMBER: _ClassVar[int]
    GROUP_FIELD_NUMBER: _ClassVar[int]
    SYNC_UFS_META_FIELD_NUMBER: _ClassVar[int]
    UFS_LEN_FIELD_NUMBER: _ClassVar[int]
    create_flag: int
    create_parent: bool
    file_type: FileTypeProto
    replicas: int
    block_size: int
    x_attr: _containers.ScalarMap[str, bytes]
    storage_policy: StoragePolicyProto
    client_name: str
    mode: int
    owner: str
    group: str
    sync_ufs_meta: bool
    ufs_len: int
    def __init__(self, create_flag: _Optional[int] = ..., create_parent: bool = ..., file_type: _Optional[_Union[FileTypeProto, str]] = ..., replicas: _Optional[int] = ..., block_size: _Optional[int] = ..., x_attr: _Optional[_Mapping[str, bytes]] = ..., storage_policy: _Optional[_Union[StoragePolicyProto, _Mapping]] = ..., client_name: _Optional[str] = ..., mode: _Optional[int] = ..., owner: _Optional[str] = ..., group: _Optional[str] = ..., sync_ufs_meta: bool = ..., ufs_len: _Optional[int] = ...) -> None: ...

class CreateFileRequest(_message.Message):
    __slots__ = ("path", "opts", "flags")
    PATH_FIELD_NUMBER: _ClassVar[int]
    OPTS_FIELD_NUMBER: _ClassVar[int]
    FLAGS_FIELD_NUMBER: _ClassVar[int]
    path: str
    opts: CreateFileOptsProto
    flags: int
    def __init__(self, path: _Optional[str] = ..., opts: _Optional[_Union[CreateFileOptsProto, _Mapping]] = ..., flags: _Optional[int] = ...) -> None: ...

class CreateFileResponse(_message.Message):
    __slots__ = ("file_status",)
    FILE_STATUS_FIELD_NUMBER: _ClassVar[int]
    file_status: FileStatusProto
    def __init__(self, file_status: _Optional[_Union[FileStatusProto, _Mapping]] = ...) -> None: ...

class OpenFileRequest(_message.Message):
    __slots__ = ("path", "opts", "flags")
    PATH_FIELD_NUMBER: _ClassVar[int]
    OPTS_FIELD_NUMBER: _ClassVar[int]
    FLAGS_FIELD_NUMBER: _ClassVar[int]
    path: str
    opts: CreateFileOptsProto
    flags: int
    def __init__(self, path: _Optional[str] = ..., opts: _Optional[_Union[CreateFileOptsProto, _Mapping]] = ..., flags: _Optional[int] = ...) -> None: ...

class OpenFileResponse(_message.Message):
    __slots__ = ("file_blocks",)
    FILE_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    file_blocks: FileBlocksProto
    def __init__(self, file_blocks: _Optional[_Union[FileBlocksProto, _Mapping]] = ...) -> None: ...

class CreateFilesBatchRequest(_message.Message):
    __slots__ = ("requests",)
    REQUESTS_FIELD_NUMBER: _ClassVar[int]
    requests: _containers.RepeatedCompositeFieldContainer[CreateFileRequest]
    def __init__(self, requests: _Optional[_Iterable[_Union[CreateFileRequest, _Mapping]]] = ...) -> None: ...

class CreateFilesBatchResponse(_message.Message):
    __slots__ = ("file_statuses",)
    FILE_STATUSES_FIELD_NUMBER: _ClassVar[int]
    file_statuses: _containers.RepeatedCompositeFieldContainer[FileStatusProto]
    def __init__(self, file_statuses: _Optional[_Iterable[_Union[FileStatusProto, _Mapping]]] = ...) -> None: ...

class DeleteRequest(_message.Message):
    __slots__ = ("path", "recursive")
    PATH_FIELD_NUMBER: _ClassVar[int]
    RECURSIVE_FIELD_NUMBER: _ClassVar[int]
    path: str
    recursive: bool
    def __init__(self, path: _Optional[str] = ..., recursive: bool = ...) -> None: ...

class DeleteResponse(_message.Message):
    __slots__ = ("res",)
    RES_FIELD_NUMBER: _ClassVar[int]
    res: FreeResultProto
    def __init__(self, res: _Optional[_Union[FreeResultProto, _Mapping]] = ...) -> None: ...

class FreeRequest(_message.Message):
    __slots__ = ("path", "recursive")
    PATH_FIELD_NUMBER: _ClassVar[int]
    RECURSIVE_FIELD_NUMBER: _ClassVar[int]
    path: str
    recursive: bool
    def __init__(self, path: _Optional[str] = ..., recursive: bool = ...) -> None: ...

class FreeResponse(_message.Message):
    __slots__ = ("res",)
    RES_FIELD_NUMBER: _ClassVar[int]
    res: FreeResultProto
    def __init__(self, res: _Optional[_Union[FreeResultProto, _Mapping]] = ...) -> None: ...

class GetFileStatusRequest(_message.Message):
    __slots__ = ("path",)
    PATH_FIELD_NUMBER: _ClassVar[int]
    path: str
    def __init__(self, path: _Optional[str] = ...) -> None: ...

class GetFileStatusResponse(_message.Message):
    __slots__ = ("status",)
    STATUS_FIELD_NUMBER: _ClassVar[int]
    status: FileStatusProto
    def __init__(self, status: _Optional[_Union[FileStatusProto, _Mapping]] = ...) -> None: ...

class ExistsRequest(_message.Message):
    __slots__ = ("path",)
    PATH_FIELD_NUMBER: _ClassVar[int]
    path: str
    def __init__(self, path: _Optional[str] = ...) -> None: ...

class ExistsResponse(_message.Message):
    __slots__ = ("exists",)
    EXISTS_FIELD_NUMBER: _ClassVar[int]
    exists: bool
    def __init__(self, exists: bool = ...) -> None: ...

class ListStatusRequest(_message.Message):
    __slots__ = ("path", "need_location")
    PATH_FIELD_NUMBER: _ClassVar[int]
    NEED_LOCATION_FIELD_NUMBER: _ClassVar[int]
    path: str
    need_location: bool
    def __init__(self, path: _Optional[str] = ..., need_location: bool = ...) -> None: ...

class ListStatusResponse(_message.Message):
    __slots__ = ("statuses",)
    STATUSES_FIELD_NUMBER: _ClassVar[int]
    statuses: _containers.RepeatedCompositeFieldContainer[FileStatusProto]
    def __init__(self, statuses: _Optional[_Iterable[_Union[FileStatusProto, _Mapping]]] = ...) -> None: ...

class ListOptionsRequest(_message.Message):
    __slots__ = ("path", "options")
    PATH_FIELD_NUMBER: _ClassVar[int]
    OPTIONS_FIELD_NUMBER: _ClassVar[int]
    path: str
    options: ListOptionsProto
    def __init__(self, path: _Optional[str] = ..., options: _Optional[_Union[ListOptionsProto, _Mapping]] = ...) -> None: ...

class ListOptionsResponse(_message.Message):
    __slots__ = ("statuses",)
    STATUSES_FIELD_NUMBER: _ClassVar[int]
    statuses: _containers.RepeatedCompositeFieldContainer[FileStatusProto]
    def __init__(self, statuses: _Optional[_Iterable[_Union[FileStatusProto, _Mapping]]] = ...) -> None: ...

class RenameRequest(_message.Message):
    __slots__ = ("src", "dst", "flags")
    SRC_FIELD_NUMBER: _ClassVar[int]
    DST_FIELD_NUMBER: _ClassVar[int]
    FLAGS_FIELD_NUMBER: _ClassVar[int]
    src: str
    dst: str
    flags: int
    def __init__(self, src: _Optional[str] = ..., dst: _Optional[str] = ..., flags: _Optional[int] = ...) -> None: ...

class RenameResponse(_message.Message):
    __slots__ = ("result",)
    RESULT_FIELD_NUMBER: _ClassVar[int]
    result: bool
    def __init__(self, result: bool = ...) -> None: ...

class AddBlockRequest(_message.Message):
    __slots__ = ("path", "commit_blocks", "exclude_workers", "located", "client_address", "file_len", "last_block", "inode_id")
    PATH_FIELD_NUMBER: _ClassVar[int]
    COMMIT_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    EXCLUDE_WORKERS_FIELD_NUMBER: _ClassVar[int]
    LOCATED_FIELD_NUMBER: _ClassVar[int]
    CLIENT_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    FILE_LEN_FIELD_NUMBER: _ClassVar[int]
    LAST_BLOCK_FIELD_NUMBER: _ClassVar[int]
    INODE_ID_FIELD_NUMBER: _ClassVar[int]
    path: str
    commit_blocks: _containers.RepeatedCompositeFieldContainer[CommitBlockProto]
    exclude_workers: _containers.RepeatedScalarFieldContainer[int]
    located: bool
    client_address: ClientAddressProto
    file_len: int
    last_block: ExtendedBlockProto
    inode_id: int
    def __init__(self, path: _Optional[str] = ..., commit_blocks: _Optional[_Iterable[_Union[CommitBlockProto, _Mapping]]] = ..., exclude_workers: _Optional[_Iterable[int]] = ..., located: bool = ..., client_address: _Optional[_Union[ClientAddressProto, _Mapping]] = ..., file_len: _Optional[int] = ..., last_block: _Optional[_Union[ExtendedBlockProto, _Mapping]] = ..., inode_id: _Optional[int] = ...) -> None: ...

class AddBlockResponse(_message.Message):
    __slots__ = ("block",)
    BLOCK_FIELD_NUMBER: _ClassVar[int]
    block: LocatedBlockProto
    def __init__(self, block: _Optional[_Union[LocatedBlockProto, _Mapping]] = ...) -> None: ...

class AddBlocksBatchRequest(_message.Message):
    __slots__ = ("requests",)
    REQUESTS_FIELD_NUMBER: _ClassVar[int]
    requests: _containers.RepeatedCompositeFieldContainer[AddBlockRequest]
    def __init__(self, requests: _Optional[_Iterable[_Union[AddBlockRequest, _Mapping]]] = ...) -> None: ...

class AddBlocksBatchResponse(_message.Message):
    __slots__ = ("blocks",)
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    blocks: _containers.RepeatedCompositeFieldContainer[LocatedBlockProto]
    def __init__(self, blocks: _Optional[_Iterable[_Union[LocatedBlockProto, _Mapping]]] = ...) -> None: ...

class SetAttrOptsProto(_message.Message):
    __slots__ = ("recursive", "replicas", "owner", "group", "mode", "atime", "mtime", "ttl_ms", "ttl_action", "add_x_attr", "remove_x_attr", "ufs_mtime")
    class AddXAttrEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: bytes
        def __init__(self, key: _Optional[str] = ..., value: _Optional[bytes] = ...) -> None: ...
    RECURSIVE_FIELD_NUMBER: _ClassVar[int]
    REPLICAS_FIELD_NUMBER: _ClassVar[int]
    OWNER_FIELD_NUMBER: _ClassVar[int]
    GROUP_FIELD_NUMBER: _ClassVar[int]
    MODE_FIELD_NUMBER: _ClassVar[int]
    ATIME_FIELD_NUMBER: _ClassVar[int]
    MTIME_FIELD_NUMBER: _ClassVar[int]
    TTL_MS_FIELD_NUMBER: _ClassVar[int]
    TTL_ACTION_FIELD_NUMBER: _ClassVar[int]
    ADD_X_ATTR_FIELD_NUMBER: _ClassVar[int]
    REMOVE_X_ATTR_FIELD_NUMBER: _ClassVar[int]
    UFS_MTIME_FIELD_NUMBER: _ClassVar[int]
    recursive: bool
    replicas: int
    owner: str
    group: str
    mode: int
    atime: int
    mtime: int
    ttl_ms: int
    ttl_action: TtlActionProto
    add_x_attr: _containers.ScalarMap[str, bytes]
    remove_x_attr: _containers.RepeatedScalarFieldContainer[str]
    ufs_mtime: int
    def __init__(self, recursive: bool = ..., replicas: _Optional[int] = ..., owner: _Optional[str] = ..., group: _Optional[str] = ..., mode: _Optional[int] = ..., atime: _Optional[int] = ..., mtime: _Optional[int] = ..., ttl_ms: _Optional[int] = ..., ttl_action: _Optional[_Union[TtlActionProto, str]] = ..., add_x_attr: _Optional[_Mapping[str, bytes]] = ..., remove_x_attr: _Optional[_Iterable[str]] = ..., ufs_mtime: _Optional[int] = ...) -> None: ...

class CompleteFileRequest(_message.Message):
    __slots__ = ("path", "len", "client_name", "commit_blocks", "only_flush", "inode_id", "set_attr_opts", "return_file_blocks")
    PATH_FIELD_NUMBER: _ClassVar[int]
    LEN_FIELD_NUMBER: _ClassVar[int]
    CLIENT_NAME_FIELD_NUMBER: _ClassVar[int]
    COMMIT_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    ONLY_FLUSH_FIELD_NUMBER: _ClassVar[int]
    INODE_ID_FIELD_NUMBER: _ClassVar[int]
    SET_ATTR_OPTS_FIELD_NUMBER: _ClassVar[int]
    RETURN_FILE_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    path: str
    len: int
    client_name: str
    commit_blocks: _containers.RepeatedCompositeFieldContainer[CommitBlockProto]
    only_flush: bool
    inode_id: int
    set_attr_opts: SetAttrOptsProto
    return_file_blocks: bool
    def __init__(self, path: _Optional[str] = ..., len: _Optional[int] = ..., client_name: _Optional[str] = ..., commit_blocks: _Optional[_Iterable[_Union[CommitBlockProto, _Mapping]]] = ..., only_flush: bool = ..., inode_id: _Optional[int] = ..., set_attr_opts: _Optional[_Union[SetAttrOptsProto, _Mapping]] = ..., return_file_blocks: bool = ...) -> None: ...

class CompleteFileResponse(_message.Message):
    __slots__ = ("result", "file_blocks")
    RESULT_FIELD_NUMBER: _ClassVar[int]
    FILE_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    result: bool
    file_blocks: FileBlocksProto
    def __init__(self, result: bool = ..., file_blocks: _Optional[_Union[FileBlocksProto, _Mapping]] = ...) -> None: ...

class CompleteFilesBatchRequest(_message.Message):
    __slots__ = ("requests",)
    REQUESTS_FIELD_NUMBER: _ClassVar[int]
    requests: _containers.RepeatedCompositeFieldContainer[CompleteFileRequest]
    def __init__(self, requests: _Optional[_Iterable[_Union[CompleteFileRequest, _Mapping]]] = ...) -> None: ...

class CompleteFilesBatchResponse(_message.Message):
    __slots__ = ("results",)
    RESULTS_FIELD_NUMBER: _ClassVar[int]
    results: _containers.RepeatedScalarFieldContainer[bool]
    def __init__(self, results: _Optional[_Iterable[bool]] = ...) -> None: ...

class GetBlockLocationsRequest(_message.Message):
    __slots__ = ("path",)
    PATH_FIELD_NUMBER: _ClassVar[int]
    path: str
    def __init__(self, path: _Optional[str] = ...) -> None: ...

class GetBlockLocationsResponse(_message.Message):
    __slots__ = ("blocks",)
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    blocks: FileBlocksProto
    def __init__(self, blocks: _Optional[_Union[FileBlocksProto, _Mapping]] = ...) -> None: ...

class GetFilesystemInfoRequest(_message.Message):
    __slots__ = ("component_info",)
    COMPONENT_INFO_FIELD_NUMBER: _ClassVar[int]
    component_info: ComponentInfoProto
    def __init__(self, component_info: _Optional[_Union[ComponentInfoProto, _Mapping]] = ...) -> None: ...

class GetFilesystemInfoResponse(_message.Message):
    __slots__ = ("active_master", "journal_nodes", "inode_dir_num", "inode_file_num", "block_num", "capacity", "available", "fs_used", "non_fs_used", "reserved_bytes", "live_workers", "blacklist_workers", "decommission_workers", "lost_workers", "allocatable_capacity", "allocatable_available", "compatibility")
    ACTIVE_MASTER_FIELD_NUMBER: _ClassVar[int]
    JOURNAL_NODES_FIELD_NUMBER: _ClassVar[int]
    INODE_DIR_NUM_FIELD_NUMBER: _ClassVar[int]
    INODE_FILE_NUM_FIELD_NUMBER: _ClassVar[int]
    BLOCK_NUM_FIELD_NUMBER: _ClassVar[int]
    CAPACITY_FIELD_NUMBER: _ClassVar[int]
    AVAILABLE_FIELD_NUMBER: _ClassVar[int]
    FS_USED_FIELD_NUMBER: _ClassVar[int]
    NON_FS_USED_FIELD_NUMBER: _ClassVar[int]
    RESERVED_BYTES_FIELD_NUMBER: _ClassVar[int]
    LIVE_WORKERS_FIELD_NUMBER: _ClassVar[int]
    BLACKLIST_WORKERS_FIELD_NUMBER: _ClassVar[int]
    DECOMMISSION_WORKERS_FIELD_NUMBER: _ClassVar[int]
    LOST_WORKERS_FIELD_NUMBER: _ClassVar[int]
    ALLOCATABLE_CAPACITY_FIELD_NUMBER: _ClassVar[int]
    ALLOCATABLE_AVAILABLE_FIELD_NUMBER: _ClassVar[int]
    COMPATIBILITY_FIELD_NUMBER: _ClassVar[int]
    active_master: str
    journal_nodes: _containers.RepeatedScalarFieldContainer[str]
    inode_dir_num: int
    inode_file_num: int
    block_num: int
    capacity: int
    available: int
    fs_used: int
    non_fs_used: int
    reserved_bytes: int
    live_workers: _containers.RepeatedCompositeFieldContainer[WorkerInfoProto]
    blacklist_workers: _containers.RepeatedCompositeFieldContainer[WorkerInfoProto]
    decommission_workers: _containers.RepeatedCompositeFieldContainer[WorkerInfoProto]
    lost_workers: _containers.RepeatedCompositeFieldContainer[WorkerInfoProto]
    allocatable_capacity: int
    allocatable_available: int
    compatibility: ServerCompatibilityInfoProto
    def __init__(self, active_master: _Optional[str] = ..., journal_nodes: _Optional[_Iterable[str]] = ..., inode_dir_num: _Optional[int] = ..., inode_file_num: _Optional[int] = ..., block_num: _Optional[int] = ..., capacity: _Optional[int] = ..., available: _Optional[int] = ..., fs_used: _Optional[int] = ..., non_fs_used: _Optional[int] = ..., reserved_bytes: _Optional[int] = ..., live_workers: _Optional[_Iterable[_Union[WorkerInfoProto, _Mapping]]] = ..., blacklist_workers: _Optional[_Iterable[_Union[WorkerInfoProto, _Mapping]]] = ..., decommission_workers: _Optional[_Iterable[_Union[WorkerInfoProto, _Mapping]]] = ..., lost_workers: _Optional[_Iterable[_Union[WorkerInfoProto, _Mapping]]] = ..., allocatable_capacity: _Optional[int] = ..., allocatable_available: _Optional[int] = ..., compatibility: _Optional[_Union[ServerCompatibilityInfoProto, _Mapping]] = ...) -> None: ...

class SetAttrRequest(_message.Message):
    __slots__ = ("path", "opts")
    PATH_FIELD_NUMBER: _ClassVar[int]
    OPTS_FIELD_NUMBER: _ClassVar[int]
    path: str
    opts: SetAttrOptsProto
    def __init__(self, path: _Optional[str] = ..., opts: _Optional[_Union[SetAttrOptsProto, _Mapping]] = ...) -> None: ...

class SetAttrResponse(_message.Message):
    __slots__ = ("status",)
    STATUS_FIELD_NUMBER: _ClassVar[int]
    status: FileStatusProto
    def __init__(self, status: _Optional[_Union[FileStatusProto, _Mapping]] = ...) -> None: ...

class SymlinkRequest(_message.Message):
    __slots__ = ("target", "link", "force", "mode", "owner", "group")
    TARGET_FIELD_NUMBER: _ClassVar[int]
    LINK_FIELD_NUMBER: _ClassVar[int]
    FORCE_FIELD_NUMBER: _ClassVar[int]
    MODE_FIELD_NUMBER: _ClassVar[int]
    OWNER_FIELD_NUMBER: _ClassVar[int]
    GROUP_FIELD_NUMBER: _ClassVar[int]
    target: str
    link: str
    force: bool
    mode: int
    owner: str
    group: str
    def __init__(self, target: _Optional[str] = ..., link: _Optional[str] = ..., force: bool = ..., mode: _Optional[int] = ..., owner: _Optional[str] = ..., group: _Optional[str] = ...) -> None: ...

class SymlinkResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class LinkRequest(_message.Message):
    __slots__ = ("src_path", "dst_path")
    SRC_PATH_FIELD_NUMBER: _ClassVar[int]
    DST_PATH_FIELD_NUMBER: _ClassVar[int]
    src_path: str
    dst_path: str
    def __init__(self, src_path: _Optional[str] = ..., dst_path: _Optional[str] = ...) -> None: ...

class LinkResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class FileResizeRequest(_message.Message):
    __slots__ = ("path", "opts")
    PATH_FIELD_NUMBER: _ClassVar[int]
    OPTS_FIELD_NUMBER: _ClassVar[int]
    path: str
    opts: FileAllocOptsProto
    def __init__(self, path: _Optional[str] = ..., opts: _Optional[_Union[FileAllocOptsProto, _Mapping]] = ...) -> None: ...

class FileResizeResponse(_message.Message):
    __slots__ = ("file_blocks",)
    FILE_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    file_blocks: FileBlocksProto
    def __init__(self, file_blocks: _Optional[_Union[FileBlocksProto, _Mapping]] = ...) -> None: ...

class AssignWorkerRequest(_message.Message):
    __slots__ = ("path", "block", "exclude_workers", "client_address")
    PATH_FIELD_NUMBER: _ClassVar[int]
    BLOCK_FIELD_NUMBER: _ClassVar[int]
    EXCLUDE_WORKERS_FIELD_NUMBER: _ClassVar[int]
    CLIENT_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    path: str
    block: ExtendedBlockProto
    exclude_workers: _containers.RepeatedScalarFieldContainer[int]
    client_address: ClientAddressProto
    def __init__(self, path: _Optional[str] = ..., block: _Optional[_Union[ExtendedBlockProto, _Mapping]] = ..., exclude_workers: _Optional[_Iterable[int]] = ..., client_address: _Optional[_Union[ClientAddressProto, _Mapping]] = ...) -> None: ...

class AssignWorkerResponse(_message.Message):
    __slots__ = ("block",)
    BLOCK_FIELD_NUMBER: _ClassVar[int]
    block: LocatedBlockProto
    def __init__(self, block: _Optional[_Union[LocatedBlockProto, _Mapping]] = ...) -> None: ...

class GetLockRequest(_message.Message):
    __slots__ = ("path", "lock")
    PATH_FIELD_NUMBER: _ClassVar[int]
    LOCK_FIELD_NUMBER: _ClassVar[int]
    path: str
    lock: FileLockProto
    def __init__(self, path: _Optional[str] = ..., lock: _Optional[_Union[FileLockProto, _Mapping]] = ...) -> None: ...

class GetLockResponse(_message.Message):
    __slots__ = ("conflict",)
    CONFLICT_FIELD_NUMBER: _ClassVar[int]
    conflict: FileLockProto
    def __init__(self, conflict: _Optional[_Union[FileLockProto, _Mapping]] = ...) -> None: ...

class SetLockRequest(_message.Message):
    __slots__ = ("path", "lock")
    PATH_FIELD_NUMBER: _ClassVar[int]
    LOCK_FIELD_NUMBER: _ClassVar[int]
    path: str
    lock: FileLockProto
    def __init__(self, path: _Optional[str] = ..., lock: _Optional[_Union[FileLockProto, _Mapping]] = ...) -> None: ...

class SetLockResponse(_message.Message):
    __slots__ = ("conflict",)
    CONFLICT_FIELD_NUMBER: _ClassVar[int]
    conflict: FileLockProto
    def __init__(self, conflict: _Optional[_Union[FileLockProto, _Mapping]] = ...) -> None: ...

class MetricValueProto(_message.Message):
    __slots__ = ("metric_type", "name", "value", "tags")
    class TagsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    METRIC_TYPE_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    VALUE_FIELD_NUMBER: _ClassVar[int]
    TAGS_FIELD_NUMBER: _ClassVar[int]
    metric_type: MetricTypeProto
    name: str
    value: float
    tags: _containers.ScalarMap[str, str]
    def __init__(self, metric_type: _Optional[_Union[MetricTypeProto, str]] = ..., name: _Optional[str] = ..., value: _Optional[float] = ..., tags: _Optional[_Mapping[str, str]] = ...) -> None: ...

class MetricsReportRequest(_message.Message):
    __slots__ = ("instance", "source", "metrics")
    INSTANCE_FIELD_NUMBER: _ClassVar[int]
    SOURCE_FIELD_NUMBER: _ClassVar[int]
    METRICS_FIELD_NUMBER: _ClassVar[int]
    instance: str
    source: str
    metrics: _containers.RepeatedCompositeFieldContainer[MetricValueProto]
    def __init__(self, instance: _Optional[str] = ..., source: _Optional[str] = ..., metrics: _Optional[_Iterable[_Union[MetricValueProto, _Mapping]]] = ...) -> None: ...

class MetricsReportResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class RequestReplacementWorkerRequest(_message.Message):
    __slots__ = ("block_id", "exclude_workers")
    BLOCK_ID_FIELD_NUMBER: _ClassVar[int]
    EXCLUDE_WORKERS_FIELD_NUMBER: _ClassVar[int]
    block_id: int
    exclude_workers: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, block_id: _Optional[int] = ..., exclude_workers: _Optional[_Iterable[int]] = ...) -> None: ...

class RequestReplacementWorkerResponse(_message.Message):
    __slots__ = ("worker",)
    WORKER_FIELD_NUMBER: _ClassVar[int]
    worker: WorkerAddressProto
    def __init__(self, worker: _Optional[_Union[WorkerAddressProto, _Mapping]] = ...) -> None: ...

class ReportUnderReplicatedBlocksRequest(_message.Message):
    __slots__ = ("block_ids",)
    BLOCK_IDS_FIELD_NUMBER: _ClassVar[int]
    block_ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, block_ids: _Optional[_Iterable[int]] = ...) -> None: ...

class ReportUnderReplicatedBlocksResponse(_message.Message):
    __slots__ = ("success", "message")
    SUCCESS_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    success: bool
    message: str
    def __init__(self, success: bool = ..., message: _Optional[str] = ...) -> None: ...

class CvMetadataSnapshotEntryProto(_message.Message):
    __slots__ = ("status", "blocks")
    STATUS_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    status: FileStatusProto
    blocks: FileBlocksProto
    def __init__(self, status: _Optional[_Union[FileStatusProto, _Mapping]] = ..., blocks: _Optional[_Union[FileBlocksProto, _Mapping]] = ...) -> None: ...

class GetCvMetadataSnapshotPageRequest(_message.Message):
    __slots__ = ("page_token", "page_size")
    PAGE_TOKEN_FIELD_NUMBER: _ClassVar[int]
    PAGE_SIZE_FIELD_NUMBER: _ClassVar[int]
    page_token: str
    page_size: int
    def __init__(self, page_token: _Optional[str] = ..., page_size: _Optional[int] = ...) -> None: ...

class GetCvMetadataSnapshotPageResponse(_message.Message):
    __slots__ = ("entries", "next_page_token", "epoch")
    ENTRIES_FIELD_NUMBER: _ClassVar[int]
    NEXT_PAGE_TOKEN_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    entries: _containers.RepeatedCompositeFieldContainer[CvMetadataSnapshotEntryProto]
    next_page_token: str
    epoch: int
    def __init__(self, entries: _Optional[_Iterable[_Union[CvMetadataSnapshotEntryProto, _Mapping]]] = ..., next_page_token: _Optional[str] = ..., epoch: _Optional[int] = ...) -> None: ...

class CvMetadataDeltaEntryProto(_message.Message):
    __slots__ = ("path", "entry")
    PATH_FIELD_NUMBER: _ClassVar[int]
    ENTRY_FIELD_NUMBER: _ClassVar[int]
    path: str
    entry: CvMetadataSnapshotEntryProto
    def __init__(self, path: _Optional[str] = ..., entry: _Optional[_Union[CvMetadataSnapshotEntryProto, _Mapping]] = ...) -> None: ...

class GetCvMetadataDeltaPageRequest(_message.Message):
    __slots__ = ("from_epoch", "target_epoch", "page_token", "page_size")
    FROM_EPOCH_FIELD_NUMBER: _ClassVar[int]
    TARGET_EPOCH_FIELD_NUMBER: _ClassVar[int]
    PAGE_TOKEN_FIELD_NUMBER: _ClassVar[int]
    PAGE_SIZE_FIELD_NUMBER: _ClassVar[int]
    from_epoch: int
    target_epoch: int
    page_token: str
    page_size: int
    def __init__(self, from_epoch: _Optional[int] = ..., target_epoch: _Optional[int] = ..., page_token: _Optional[str] = ..., page_size: _Optional[int] = ...) -> None: ...

class GetCvMetadataDeltaPageResponse(_message.Message):
    __slots__ = ("entries", "next_page_token", "from_epoch", "to_epoch", "full_snapshot_required")
    ENTRIES_FIELD_NUMBER: _ClassVar[int]
    NEXT_PAGE_TOKEN_FIELD_NUMBER: _ClassVar[int]
    FROM_EPOCH_FIELD_NUMBER: _ClassVar[int]
    TO_EPOCH_FIELD_NUMBER: _ClassVar[int]
    FULL_SNAPSHOT_REQUIRED_FIELD_NUMBER: _ClassVar[int]
    entries: _containers.RepeatedCompositeFieldContainer[CvMetadataDeltaEntryProto]
    next_page_token: str
    from_epoch: int
    to_epoch: int
    full_snapshot_required: bool
    def __init__(self, entries: _Optional[_Iterable[_Union[CvMetadataDeltaEntryProto, _Mapping]]] = ..., next_page_token: _Optional[str] = ..., from_epoch: _Optional[int] = ..., to_epoch: _Optional[int] = ..., full_snapshot_required: bool = ...) -> None: ...

class BlockWriteRequest(_message.Message):
    __slots__ = ("block", "off", "block_size", "short_circuit", "client_name", "chunk_size", "pipeline_stream", "component_info")
    BLOCK_FIELD_NUMBER: _ClassVar[int]
    OFF_FIELD_NUMBER: _ClassVar[int]
    BLOCK_SIZE_FIELD_NUMBER: _ClassVar[int]
    SHORT_CIRCUIT_FIELD_NUMBER: _ClassVar[int]
    CLIENT_NAME_FIELD_NUMBER: _ClassVar[int]
    CHUNK_SIZE_FIELD_NUMBER: _ClassVar[int]
    PIPELINE_STREAM_FIELD_NUMBER: _ClassVar[int]
    COMPONENT_INFO_FIELD_NUMBER: _ClassVar[int]
    block: ExtendedBlockProto
    off: int
    block_size: int
    short_circuit: bool
    client_name: str
    chunk_size: int
    pipeline_stream: _containers.RepeatedCompositeFieldContainer[WorkerAddressProto]
    component_info: ComponentInfoProto
    def __init__(self, block: _Optional[_Union[ExtendedBlockProto, _Mapping]] = ..., off: _Optional[int] = ..., block_size: _Optional[int] = ..., short_circuit: bool = ..., client_name: _Optional[str] = ..., chunk_size: _Optional[int] = ..., pipeline_stream: _Optional[_Iterable[_Union[WorkerAddressProto, _Mapping]]] = ..., component_info: _Optional[_Union[ComponentInfoProto, _Mapping]] = ...) -> None: ...

class PipelineStatus(_message.Message):
    __slots__ = ("success", "established_count", "failed_worker", "error_message")
    SUCCESS_FIELD_NUMBER: _ClassVar[int]
    ESTABLISHED_COUNT_FIELD_NUMBER: _ClassVar[int]
    FAILED_WORKER_FIELD_NUMBER: _ClassVar[int]
    ERROR_MESSAGE_FIELD_NUMBER: _ClassVar[int]
    success: bool
    established_count: int
    failed_worker: WorkerAddressProto
    error_message: str
    def __init__(self, success: bool = ..., established_count: _Optional[int] = ..., failed_worker: _Optional[_Union[WorkerAddressProto, _Mapping]] = ..., error_message: _Optional[str] = ...) -> None: ...

class BlockWriteResponse(_message.Message):
    __slots__ = ("id", "path", "off", "block_size", "storage_type", "pipeline_status")
    ID_FIELD_NUMBER: _ClassVar[int]
    PATH_FIELD_NUMBER: _ClassVar[int]
    OFF_FIELD_NUMBER: _ClassVar[int]
    BLOCK_SIZE_FIELD_NUMBER: _ClassVar[int]
    STORAGE_TYPE_FIELD_NUMBER: _ClassVar[int]
    PIPELINE_STATUS_FIELD_NUMBER: _ClassVar[int]
    id: int
    path: str
    off: int
    block_size: int
    storage_type: StorageTypeProto
    pipeline_status: PipelineStatus
    def __init__(self, id: _Optional[int] = ..., path: _Optional[str] = ..., off: _Optional[int] = ..., block_size: _Optional[int] = ..., storage_type: _Optional[_Union[StorageTypeProto, str]] = ..., pipeline_status: _Optional[_Union[PipelineStatus, _Mapping]] = ...) -> None: ...

class BlockReadRequest(_message.Message):
    __slots__ = ("id", "off", "len", "chunk_size", "short_circuit", "enable_read_ahead", "read_ahead_len", "drop_cache_len", "component_info")
    ID_FIELD_NUMBER: _ClassVar[int]
    OFF_FIELD_NUMBER: _ClassVar[int]
    LEN_FIELD_NUMBER: _ClassVar[int]
    CHUNK_SIZE_FIELD_NUMBER: _ClassVar[int]
    SHORT_CIRCUIT_FIELD_NUMBER: _ClassVar[int]
    ENABLE_READ_AHEAD_FIELD_NUMBER: _ClassVar[int]
    READ_AHEAD_LEN_FIELD_NUMBER: _ClassVar[int]
    DROP_CACHE_LEN_FIELD_NUMBER: _ClassVar[int]
    COMPONENT_INFO_FIELD_NUMBER: _ClassVar[int]
    id: int
    off: int
    len: int
    chunk_size: int
    short_circuit: bool
    enable_read_ahead: bool
    read_ahead_len: int
    drop_cache_len: int
    component_info: ComponentInfoProto
    def __init__(self, id: _Optional[int] = ..., off: _Optional[int] = ..., len: _Optional[int] = ..., chunk_size: _Optional[int] = ..., short_circuit: bool = ..., enable_read_ahead: bool = ..., read_ahead_len: _Optional[int] = ..., drop_cache_len: _Optional[int] = ..., component_info: _Optional[_Union[ComponentInfoProto, _Mapping]] = ...) -> None: ...

class BlockReadResponse(_message.Message):
    __slots__ = ("id", "len", "path", "storage_type")
    ID_FIELD_NUMBER: _ClassVar[int]
    LEN_FIELD_NUMBER: _ClassVar[int]
    PATH_FIELD_NUMBER: _ClassVar[int]
    STORAGE_TYPE_FIELD_NUMBER: _ClassVar[int]
    id: int
    len: int
    path: str
    storage_type: StorageTypeProto
    def __init__(self, id: _Optional[int] = ..., len: _Optional[int] = ..., path: _Optional[str] = ..., storage_type: _Optional[_Union[StorageTypeProto, str]] = ...) -> None: ...

class DataHeaderProto(_message.Message):
    __slots__ = ("offset", "flush", "is_last")
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    FLUSH_FIELD_NUMBER: _ClassVar[int]
    IS_LAST_FIELD_NUMBER: _ClassVar[int]
    offset: int
    flush: bool
    is_last: bool
    def __init__(self, offset: _Optional[int] = ..., flush: bool = ..., is_last: bool = ...) -> None: ...

class BlocksBatchWriteRequest(_message.Message):
    __slots__ = ("blocks", "off", "block_size", "req_id", "seq_id", "chunk_size", "short_circuit", "client_name", "component_info")
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    OFF_FIELD_NUMBER: _ClassVar[int]
    BLOCK_SIZE_FIELD_NUMBER: _ClassVar[int]
    REQ_ID_FIELD_NUMBER: _ClassVar[int]
    SEQ_ID_FIELD_NUMBER: _ClassVar[int]
    CHUNK_SIZE_FIELD_NUMBER: _ClassVar[int]
    SHORT_CIRCUIT_FIELD_NUMBER: _ClassVar[int]
    CLIENT_NAME_FIELD_NUMBER: _ClassVar[int]
    COMPONENT_INFO_FIELD_NUMBER: _ClassVar[int]
    blocks: _containers.RepeatedCompositeFieldContainer[ExtendedBlockProto]
    off: int
    block_size: int
    req_id: int
    seq_id: int
    chunk_size: int
    short_circuit: bool
    client_name: str
    component_info: ComponentInfoProto
    def __init__(self, blocks: _Optional[_Iterable[_Union[ExtendedBlockProto, _Mapping]]] = ..., off: _Optional[int] = ..., block_size: _Optional[int] = ..., req_id: _Optional[int] = ..., seq_id: _Optional[int] = ..., chunk_size: _Optional[int] = ..., short_circuit: bool = ..., client_name: _Optional[str] = ..., component_info: _Optional[_Union[ComponentInfoProto, _Mapping]] = ...) -> None: ...

class BlocksBatchWriteResponse(_message.Message):
    __slots__ = ("responses",)
    RESPONSES_FIELD_NUMBER: _ClassVar[int]
    responses: _containers.RepeatedCompositeFieldContainer[BlockWriteResponse]
    def __init__(self, responses: _Optional[_Iterable[_Union[BlockWriteResponse, _Mapping]]] = ...) -> None: ...

class BlocksBatchCommitRequest(_message.Message):
    __slots__ = ("blocks", "off", "block_size", "req_id", "seq_id", "cancel", "component_info")
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    OFF_FIELD_NUMBER: _ClassVar[int]
    BLOCK_SIZE_FIELD_NUMBER: _ClassVar[int]
    REQ_ID_FIELD_NUMBER: _ClassVar[int]
    SEQ_ID_FIELD_NUMBER: _ClassVar[int]
    CANCEL_FIELD_NUMBER: _ClassVar[int]
    COMPONENT_INFO_FIELD_NUMBER: _ClassVar[int]
    blocks: _containers.RepeatedCompositeFieldContainer[ExtendedBlockProto]
    off: int
    block_size: int
    req_id: int
    seq_id: int
    cancel: bool
    component_info: ComponentInfoProto
    def __init__(self, blocks: _Optional[_Iterable[_Union[ExtendedBlockProto, _Mapping]]] = ..., off: _Optional[int] = ..., block_size: _Optional[int] = ..., req_id: _Optional[int] = ..., seq_id: _Optional[int] = ..., cancel: bool = ..., component_info: _Optional[_Union[ComponentInfoProto, _Mapping]] = ...) -> None: ...

class BlocksBatchCommitResponse(_message.Message):
    __slots__ = ("results",)
    RESULTS_FIELD_NUMBER: _ClassVar[int]
    results: _containers.RepeatedScalarFieldContainer[bool]
    def __init__(self, results: _Optional[_Iterable[bool]] = ...) -> None: ...

class FileWriteData(_message.Message):
    __slots__ = ("path", "content")
    PATH_FIELD_NUMBER: _ClassVar[int]
    CONTENT_FIELD_NUMBER: _ClassVar[int]
    path: str
    content: bytes
    def __init__(self, path: _Optional[str] = ..., content: _Optional[bytes] = ...) -> None: ...

class FilesBatchWriteRequest(_message.Message):
    __slots__ = ("files", "req_id", "seq_id", "component_info")
    FILES_FIELD_NUMBER: _ClassVar[int]
    REQ_ID_FIELD_NUMBER: _ClassVar[int]
    SEQ_ID_FIELD_NUMBER: _ClassVar[int]
    COMPONENT_INFO_FIELD_NUMBER: _ClassVar[int]
    files: _containers.RepeatedCompositeFieldContainer[FileWriteData]
    req_id: int
    seq_id: int
    component_info: ComponentInfoProto
    def __init__(self, files: _Optional[_Iterable[_Union[FileWriteData, _Mapping]]] = ..., req_id: _Optional[int] = ..., seq_id: _Optional[int] = ..., component_info: _Optional[_Union[ComponentInfoProto, _Mapping]] = ...) -> None: ...

class FilesBatchWriteResponse(_message.Message):
    __slots__ = ("results",)
    RESULTS_FIELD_NUMBER: _ClassVar[int]
    results: _containers.RepeatedScalarFieldContainer[bool]
    def __init__(self, results: _Optional[_Iterable[bool]] = ...) -> None: ...

class DeleteBlockCmdProto(_message.Message):
    __slots__ = ("blocks",)
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    blocks: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, blocks: _Optional[_Iterable[int]] = ...) -> None: ...

class WorkerCommandProto(_message.Message):
    __slots__ = ("delete_block",)
    DELETE_BLOCK_FIELD_NUMBER: _ClassVar[int]
    delete_block: DeleteBlockCmdProto
    def __init__(self, delete_block: _Optional[_Union[DeleteBlockCmdProto, _Mapping]] = ...) -> None: ...

class BlockReportInfoProto(_message.Message):
    __slots__ = ("id", "status", "block_size", "storage_type")
    ID_FIELD_NUMBER: _ClassVar[int]
    STATUS_FIELD_NUMBER: _ClassVar[int]
    BLOCK_SIZE_FIELD_NUMBER: _ClassVar[int]
    STORAGE_TYPE_FIELD_NUMBER: _ClassVar[int]
    id: int
    status: BlockReportStatusProto
    block_size: int
    storage_type: StorageTypeProto
    def __init__(self, id: _Optional[int] = ..., status: _Optional[_Union[BlockReportStatusProto, str]] = ..., block_size: _Optional[int] = ..., storage_type: _Optional[_Union[StorageTypeProto, str]] = ...) -> None: ...

class WorkerHeartbeatRequest(_message.Message):
    __slots__ = ("cluster_id", "worker_id", "fs_ctime", "address", "failed_dirs", "status", "software_version", "storages", "blocks", "weight", "worker_session_id", "transfer_task_submit", "transfer_report_target", "transfer_query_task", "transfer_attempt_safe_output", "transfer_source_read_plan", "component_info")
    CLUSTER_ID_FIELD_NUMBER: _ClassVar[int]
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    FS_CTIME_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    FAILED_DIRS_FIELD_NUMBER: _ClassVar[int]
    STATUS_FIELD_NUMBER: _ClassVar[int]
    SOFTWARE_VERSION_FIELD_NUMBER: _ClassVar[int]
    STORAGES_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    WEIGHT_FIELD_NUMBER: _ClassVar[int]
    WORKER_SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    TRANSFER_TASK_SUBMIT_FIELD_NUMBER: _ClassVar[int]
    TRANSFER_REPORT_TARGET_FIELD_NUMBER: _ClassVar[int]
    TRANSFER_QUERY_TASK_FIELD_NUMBER: _ClassVar[int]
    TRANSFER_ATTEMPT_SAFE_OUTPUT_FIELD_NUMBER: _ClassVar[int]
    TRANSFER_SOURCE_READ_PLAN_FIELD_NUMBER: _ClassVar[int]
    COMPONENT_INFO_FIELD_NUMBER: _ClassVar[int]
    cluster_id: str
    worker_id: int
    fs_ctime: int
    address: WorkerAddressProto
    failed_dirs: int
    status: HeartbeatStatusProto
    software_version: str
    storages: _containers.RepeatedCompositeFieldContainer[StorageInfoProto]
    blocks: _containers.RepeatedCompositeFieldContainer[BlockReportInfoProto]
    weight: int
    worker_session_id: str
    transfer_task_submit: bool
    transfer_report_target: bool
    transfer_query_task: bool
    transfer_attempt_safe_output: bool
    transfer_source_read_plan: bool
    component_info: ComponentInfoProto
    def __init__(self, cluster_id: _Optional[str] = ..., worker_id: _Optional[int] = ..., fs_ctime: _Optional[int] = ..., address: _Optional[_Union[WorkerAddressProto, _Mapping]] = ..., failed_dirs: _Optional[int] = ..., status: _Optional[_Union[HeartbeatStatusProto, str]] = ..., software_version: _Optional[str] = ..., storages: _Optional[_Iterable[_Union[StorageInfoProto, _Mapping]]] = ..., blocks: _Optional[_Iterable[_Union[BlockReportInfoProto, _Mapping]]] = ..., weight: _Optional[int] = ..., worker_session_id: _Optional[str] = ..., transfer_task_submit: bool = ..., transfer_report_target: bool = ..., transfer_query_task: bool = ..., transfer_attempt_safe_output: bool = ..., transfer_source_read_plan: bool = ..., component_info: _Optional[_Union[ComponentInfoProto, _Mapping]] = ...) -> None: ...

class WorkerHeartbeatResponse(_message.Message):
    __slots__ = ("cmds",)
    CMDS_FIELD_NUMBER: _ClassVar[int]
    cmds: _containers.RepeatedCompositeFieldContainer[WorkerCommandProto]
    def __init__(self, cmds: _Optional[_Iterable[_Union[WorkerCommandProto, _Mapping]]] = ...) -> None: ...

class BlockReportListRequest(_message.Message):
    __slots__ = ("cluster_id", "worker_id", "full_report", "total_len", "blocks")
    CLUSTER_ID_FIELD_NUMBER: _ClassVar[int]
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    FULL_REPORT_FIELD_NUMBER: _ClassVar[int]
    TOTAL_LEN_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    cluster_id: str
    worker_id: int
    full_report: bool
    total_len: int
    blocks: _containers.RepeatedCompositeFieldContainer[BlockReportInfoProto]
    def __init__(self, cluster_id: _Optional[str] = ..., worker_id: _Optional[int] = ..., full_report: bool = ..., total_len: _Optional[int] = ..., blocks: _Optional[_Iterable[_Union[BlockReportInfoProto, _Mapping]]] = ...) -> None: ...

class BlockReportListResponse(_message.Message):
    __slots__ = ("cmds",)
    CMDS_FIELD_NUMBER: _ClassVar[int]
    cmds: _containers.RepeatedCompositeFieldContainer[WorkerCommandProto]
    def __init__(self, cmds: _Optional[_Iterable[_Union[WorkerCommandProto, _Mapping]]] = ...) -> None: ...

class MountInfoProto(_message.Message):
    __slots__ = ("cv_path", "ufs_path", "mount_id", "properties", "ttl_ms", "ttl_action", "read_verify_ufs", "storage_type", "block_size", "replicas", "write_type", "provider", "auto_cache", "access_mode", "write_cache")
    class PropertiesEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    CV_PATH_FIELD_NUMBER: _ClassVar[int]
    UFS_PATH_FIELD_NUMBER: _ClassVar[int]
    MOUNT_ID_FIELD_NUMBER: _ClassVar[int]
    PROPERTIES_FIELD_NUMBER: _ClassVar[int]
    TTL_MS_FIELD_NUMBER: _ClassVar[int]
    TTL_ACTION_FIELD_NUMBER: _ClassVar[int]
    READ_VERIFY_UFS_FIELD_NUMBER: _ClassVar[int]
    STORAGE_TYPE_FIELD_NUMBER: _ClassVar[int]
    BLOCK_SIZE_FIELD_NUMBER: _ClassVar[int]
    REPLICAS_FIELD_NUMBER: _ClassVar[int]
    WRITE_TYPE_FIELD_NUMBER: _ClassVar[int]
    PROVIDER_FIELD_NUMBER: _ClassVar[int]
    AUTO_CACHE_FIELD_NUMBER: _ClassVar[int]
    ACCESS_MODE_FIELD_NUMBER: _ClassVar[int]
    WRITE_CACHE_FIELD_NUMBER: _ClassVar[int]
    cv_path: str
    ufs_path: str
    mount_id: int
    properties: _containers.ScalarMap[str, str]
    ttl_ms: int
    ttl_action: TtlActionProto
    read_verify_ufs: bool
    storage_type: StorageTypeProto
    block_size: int
    replicas: int
    write_type: WriteTypeProto
    provider: ProviderProto
    auto_cache: bool
    access_mode: AccessModeProto
    write_cache: bool
    def __init__(self, cv_path: _Optional[str] = ..., ufs_path: _Optional[str] = ..., mount_id: _Optional[int] = ..., properties: _Optional[_Mapping[str, str]] = ..., ttl_ms: _Optional[int] = ..., ttl_action: _Optional[_Union[TtlActionProto, str]] = ..., read_verify_ufs: bool = ..., storage_type: _Optional[_Union[StorageTypeProto, str]] = ..., block_size: _Optional[int] = ..., replicas: _Optional[int] = ..., write_type: _Optional[_Union[WriteTypeProto, str]] = ..., provider: _Optional[_Union[ProviderProto, str]] = ..., auto_cache: bool = ..., access_mode: _Optional[_Union[AccessModeProto, str]] = ..., write_cache: bool = ...) -> None: ...

class MountOptionsProto(_message.Message):
    __slots__ = ("update", "add_properties", "ttl_ms", "ttl_action", "read_verify_ufs", "storage_type", "block_size", "replicas", "remove_properties", "write_type", "provider", "auto_cache", "access_mode", "write_cache")
    class AddPropertiesEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    UPDATE_FIELD_NUMBER: _ClassVar[int]
    ADD_PROPERTIES_FIELD_NUMBER: _ClassVar[int]
    TTL_MS_FIELD_NUMBER: _ClassVar[int]
    TTL_ACTION_FIELD_NUMBER: _ClassVar[int]
    READ_VERIFY_UFS_FIELD_NUMBER: _ClassVar[int]
    STORAGE_TYPE_FIELD_NUMBER: _ClassVar[int]
    BLOCK_SIZE_FIELD_NUMBER: _ClassVar[int]
    REPLICAS_FIELD_NUMBER: _ClassVar[int]
    REMOVE_PROPERTIES_FIELD_NUMBER: _ClassVar[int]
    WRITE_TYPE_FIELD_NUMBER: _ClassVar[int]
    PROVIDER_FIELD_NUMBER: _ClassVar[int]
    AUTO_CACHE_FIELD_NUMBER: _ClassVar[int]
    ACCESS_MODE_FIELD_NUMBER: _ClassVar[int]
    WRITE_CACHE_FIELD_NUMBER: _ClassVar[int]
    update: bool
    add_properties: _containers.ScalarMap[str, str]
    ttl_ms: int
    ttl_action: TtlActionProto
    read_verify_ufs: bool
    storage_type: StorageTypeProto
    block_size: int
    replicas: int
    remove_properties: _containers.RepeatedScalarFieldContainer[str]
    write_type: WriteTypeProto
    provider: ProviderProto
    auto_cache: bool
    access_mode: AccessModeProto
    write_cache: bool
    def __init__(self, update: bool = ..., add_properties: _Optional[_Mapping[str, str]] = ..., ttl_ms: _Optional[int] = ..., ttl_action: _Optional[_Union[TtlActionProto, str]] = ..., read_verify_ufs: bool = ..., storage_type: _Optional[_Union[StorageTypeProto, str]] = ..., block_size: _Optional[int] = ..., replicas: _Optional[int] = ..., remove_properties: _Optional[_Iterable[str]] = ..., write_type: _Optional[_Union[WriteTypeProto, str]] = ..., provider: _Optional[_Union[ProviderProto, str]] = ..., auto_cache: bool = ..., access_mode: _Optional[_Union[AccessModeProto, str]] = ..., write_cache: bool = ...) -> None: ...

class MountRequest(_message.Message):
    __slots__ = ("cv_path", "ufs_path", "mount_options")
    CV_PATH_FIELD_NUMBER: _ClassVar[int]
    UFS_PATH_FIELD_NUMBER: _ClassVar[int]
    MOUNT_OPTIONS_FIELD_NUMBER: _ClassVar[int]
    cv_path: str
    ufs_path: str
    mount_options: MountOptionsProto
    def __init__(self, cv_path: _Optional[str] = ..., ufs_path: _Optional[str] = ..., mount_options: _Optional[_Union[MountOptionsProto, _Mapping]] = ...) -> None: ...

class MountResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class UnMountRequest(_message.Message):
    __slots__ = ("cv_path",)
    CV_PATH_FIELD_NUMBER: _ClassVar[int]
    cv_path: str
    def __init__(self, cv_path: _Optional[str] = ...) -> None: ...

class UnMountResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetMountTableRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetMountTableResponse(_message.Message):
    __slots__ = ("mount_table",)
    MOUNT_TABLE_FIELD_NUMBER: _ClassVar[int]
    mount_table: _containers.RepeatedCompositeFieldContainer[MountInfoProto]
    def __init__(self, mount_table: _Optional[_Iterable[_Union[MountInfoProto, _Mapping]]] = ...) -> None: ...

class GetMountInfoRequest(_message.Message):
    __slots__ = ("path",)
    PATH_FIELD_NUMBER: _ClassVar[int]
    path: str
    def __init__(self, path: _Optional[str] = ...) -> None: ...

class GetMountInfoResponse(_message.Message):
    __slots__ = ("mount_info",)
    MOUNT_INFO_FIELD_NUMBER: _ClassVar[int]
    mount_info: MountInfoProto
    def __init__(self, mount_info: _Optional[_Union[MountInfoProto, _Mapping]] = ...) -> None: ...

class SubmitBlockReplicationRequest(_message.Message):
    __slots__ = ("block_id", "target_worker_info")
    BLOCK_ID_FIELD_NUMBER: _ClassVar[int]
    TARGET_WORKER_INFO_FIELD_NUMBER: _ClassVar[int]
    block_id: int
    target_worker_info: WorkerAddressProto
    def __init__(self, block_id: _Optional[int] = ..., target_worker_info: _Optional[_Union[WorkerAddressProto, _Mapping]] = ...) -> None: ...

class SubmitBlockReplicationResponse(_message.Message):
    __slots__ = ("success", "message")
    SUCCESS_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    success: bool
    message: str
    def __init__(self, success: bool = ..., message: _Optional[str] = ...) -> None: ...

class ReportBlockReplicationRequest(_message.Message):
    __slots__ = ("block_id", "storage_type", "success", "message")
    BLOCK_ID_FIELD_NUMBER: _ClassVar[int]
    STORAGE_TYPE_FIELD_NUMBER: _ClassVar[int]
    SUCCESS_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    block_id: int
    storage_type: StorageTypeProto
    success: bool
    message: str
    def __init__(self, block_id: _Optional[int] = ..., storage_type: _Optional[_Union[StorageTypeProto, str]] = ..., success: bool = ..., message: _Optional[str] = ...) -> None: ...

class ReportBlockReplicationResponse(_message.Message):
    __slots__ = ("success", "message")
    SUCCESS_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    success: bool
    message: str
    def __init__(self, success: bool = ..., message: _Optional[str] = ...) -> None: ...

class SubmitJobRequest(_message.Message):
    __slots__ = ("job_type", "job_command")
    JOB_TYPE_FIELD_NUMBER: _ClassVar[int]
    JOB_COMMAND_FIELD_NUMBER: _ClassVar[int]
    job_type: JobTaskTypeProto
    job_command: bytes
    def __init__(self, job_type: _Optional[_Union[JobTaskTypeProto, str]] = ..., job_command: _Optional[bytes] = ...) -> None: ...

class SubmitJobResponse(_message.Message):
    __slots__ = ("job_id", "target_path", "state")
    JOB_ID_FIELD_NUMBER: _ClassVar[int]
    TARGET_PATH_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    job_id: str
    target_path: str
    state: JobTaskStateProto
    def __init__(self, job_id: _Optional[str] = ..., target_path: _Optional[str] = ..., state: _Optional[_Union[JobTaskStateProto, str]] = ...) -> None: ...

class GetJobStatusRequest(_message.Message):
    __slots__ = ("job_id", "verbose")
    JOB_ID_FIELD_NUMBER: _ClassVar[int]
    VERBOSE_FIELD_NUMBER: _ClassVar[int]
    job_id: str
    verbose: bool
    def __init__(self, job_id: _Optional[str] = ..., verbose: bool = ...) -> None: ...

class JobTaskProgressProto(_message.Message):
    __slots__ = ("loaded_size", "total_size", "update_time", "state", "message")
    LOADED_SIZE_FIELD_NUMBER: _ClassVar[int]
    TOTAL_SIZE_FIELD_NUMBER: _ClassVar[int]
    UPDATE_TIME_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    loaded_size: int
    total_size: int
    update_time: int
    state: int
    message: str
    def __init__(self, loaded_size: _Optional[int] = ..., total_size: _Optional[int] = ..., update_time: _Optional[int] = ..., state: _Optional[int] = ..., message: _Optional[str] = ...) -> None: ...

class GetJobStatusResponse(_message.Message):
    __slots__ = ("job_id", "state", "source_path", "target_path", "progress")
    JOB_ID_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    SOURCE_PATH_FIELD_NUMBER: _ClassVar[int]
    TARGET_PATH_FIELD_NUMBER: _ClassVar[int]
    PROGRESS_FIELD_NUMBER: _ClassVar[int]
    job_id: str
    state: JobTaskStateProto
    source_path: str
    target_path: str
    progress: JobTaskProgressProto
    def __init__(self, job_id: _Optional[str] = ..., state: _Optional[_Union[JobTaskStateProto, str]] = ..., source_path: _Optional[str] = ..., target_path: _Optional[str] = ..., progress: _Optional[_Union[JobTaskProgressProto, _Mapping]] = ...) -> None: ...

class CancelJobRequest(_message.Message):
    __slots__ = ("job_id",)
    JOB_ID_FIELD_NUMBER: _ClassVar[int]
    job_id: str
    def __init__(self, job_id: _Optional[str] = ...) -> None: ...

class CancelJobResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...
