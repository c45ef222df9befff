"""Every call to the master that the client makes, typed: requests in the wire's words, replays judged.

Paths here are full paths of the Curvine namespace, normalised; nothing is checked beyond the wire (that is
:mod:`curvfs.client.filesystem`'s part). Answers are wire messages.

Replays (specification 4.2 and the end of 5.1): a call whose first attempt may have been executed can be answered, on a
replay, as if somebody else had done its work. Then the final state decides.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

from google.protobuf.message import Message

from curvfs.client.convert import sendable
from curvfs.client.records import DEFAULT_POLICY, FileKind, StoragePolicy
from curvfs.client.session import Session
from curvfs.errors import (
    ConnectFailed,
    CurvfsError,
    FileExists_,
    NotFound,
    OutOfSpace,
    RemoteProtocolError,
    TransportError,
)
from curvfs.net.cluster import Progress, Replay
from curvfs.net.retry import Retry, RetryPolicy
from curvfs.wire.codes import RpcCode
from curvfs.wire.messages import decode, encode, pb

M = TypeVar("M", bound=Message)
T = TypeVar("T")

O_WRONLY, O_RDWR, O_CREAT, O_EXCL, O_TRUNC, O_APPEND = 0x1, 0x2, 0x40, 0x80, 0x200, 0x400
RENAME_NO_REPLACE, RENAME_EXCHANGE = 1, 2


class MasterCalls:
    """The calls of one session."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._masters = session.masters

    async def call(
        self,
        code: RpcCode,
        request: Message,
        answer: type[M],
        doing: str,
        *,
        replay: Replay = Replay.SAME_ID,
        progress: Progress | None = None,
        give_up: Callable[[CurvfsError], bool] | None = None,
        req_id: int | None = None,
    ) -> M:
        """Any call: its arguments are those of :meth:`curvfs.net.cluster.MasterCluster.call`."""
        header = await self._masters.call(
            code, encode(request), doing=doing, replay=replay, progress=progress, give_up=give_up, req_id=req_id
        )
        return decode(answer, header)

    # ------------------------------------------------------------------------------------------- session, status

    async def handshake(self) -> pb.GetFilesystemInfoResponse:
        """The session's first call (8.2). Does not wait for a master that refuses connections or is none."""
        request = pb.GetFilesystemInfoRequest(component_info=self._session.component_info)
        header = await self._masters.call(
            RpcCode.GET_FILESYSTEM_INFO,
            encode(request),
            doing="connect",
            budget_s=min(self._session.config.retry_max_s, self._session.config.connect_timeout_s),
            give_up=lambda error: isinstance(error, ConnectFailed | RemoteProtocolError),
        )
        return decode(pb.GetFilesystemInfoResponse, header)

    async def info(self) -> pb.GetFilesystemInfoResponse:
        request = pb.GetFilesystemInfoRequest(component_info=self._session.component_info)
        return await self.call(
            RpcCode.GET_FILESYSTEM_INFO, request, pb.GetFilesystemInfoResponse, "read the file system's size"
        )

    async def report_metrics(self, instance: str, counters: Mapping[str, int]) -> None:
        request = pb.MetricsReportRequest(
            instance=instance,
            source="",
            metrics=[
                pb.MetricValueProto(metric_type=pb.COUNTER, name=name, value=value)
                for name, value in sorted(counters.items())
            ],
        )
        await self.call(RpcCode.METRICS_REPORT, request, pb.MetricsReportResponse, "report metrics")

    async def mount_table(self) -> pb.GetMountTableResponse:
        return await self.call(
            RpcCode.GET_MOUNT_TABLE, pb.GetMountTableRequest(), pb.GetMountTableResponse, "read the mount table"
        )

    async def status(self, path: str, *, doing: str = "stat") -> pb.FileStatusProto:
        request = pb.GetFileStatusRequest(path=path)
        answer = await self.call(RpcCode.FILE_STATUS, request, pb.GetFileStatusResponse, f"{doing} {path}")
        return answer.status

    async def status_or_none(self, path: str) -> pb.FileStatusProto | None:
        try:
            return await self.status(path)
        except NotFound:
            return None

    async def exists(self, path: str) -> bool:
        answer = await self.call(RpcCode.EXISTS, pb.ExistsRequest(path=path), pb.ExistsResponse, f"look for {path}")
        return answer.exists

    async def list_options(self, path: str, start_after: str, limit: int) -> Sequence[pb.FileStatusProto]:
        with sendable(f"list {path}"):
            options = pb.ListOptionsProto(limit=limit)
            if start_after:
                options.start_after = start_after
        request = pb.ListOptionsRequest(path=path, options=options)
        answer = await self.call(RpcCode.LIST_OPTIONS, request, pb.ListOptionsResponse, f"list {path}")
        return answer.statuses

    async def list_status(self, pattern: str) -> Sequence[pb.FileStatusProto]:
        request = pb.ListStatusRequest(path=pattern, need_location=False)
        answer = await self.call(RpcCode.LIST_STATUS, request, pb.ListStatusResponse, f"list {pattern}")
        return answer.statuses

    async def block_locations(self, path: str) -> pb.FileBlocksProto:
        return decode(pb.GetBlockLocationsResponse, await self.encoded_locations(path)).blocks

    async def encoded_locations(self, path: str) -> bytes:
        """The answer as it came: a GetBlockLocationsResponse."""
        request = encode(pb.GetBlockLocationsRequest(path=path))
        return await self._masters.call(RpcCode.GET_BLOCK_LOCATIONS, request, doing=f"open {path}")

    async def block_locations_many(self, paths: Sequence[str]) -> list[pb.FileBlocksProto | CurvfsError]:
        """Pipelined; a path's failure stands in its place."""
        headers = [encode(pb.GetBlockLocationsRequest(path=path)) for path in paths]
        doing = [f"open {path}" for path in paths]
        answers: list[pb.FileBlocksProto | CurvfsError] = []
        for answer in await self._masters.call_many(RpcCode.GET_BLOCK_LOCATIONS, headers, doing=doing):
            if isinstance(answer, bytes):
                try:
                    answers.append(decode(pb.GetBlockLocationsResponse, answer).blocks)
                except RemoteProtocolError as error:
                    answers.append(error)
            else:
                answers.append(answer)
        return answers

    # ------------------------------------------------------------------------------------------------- namespace

    async def mkdir(
        self,
        path: str,
        *,
        mode: int,
        parents: bool,
        xattrs: Mapping[str, bytes],
        owner: str,
        group: str,
        policy: StoragePolicy = DEFAULT_POLICY,
    ) -> pb.FileStatusProto:
        """Replayed, it is executed again and may find its own directory."""
        with sendable(f"make {path}"):
            options = pb.MkdirOptsProto(
                create_parent=parents,
                mode=mode,
                x_attr=dict(xattrs),
                storage_policy=_storage_policy(policy),
                owner=owner,
                group=group,
            )
        progress = Progress()
        request = pb.MkdirRequest(path=path, opts=options)
        try:
            answer = await self.call(RpcCode.MKDIR, request, pb.MkdirResponse, f"make {path}", progress=progress)
        except FileExists_:
            status = await self.status_or_none(path) if progress.uncertain else None
            if status is None or not status.is_dir:
                raise
            return status
        return answer.status

    async def create(
        self,
        path: str,
        options: pb.CreateFileOptsProto,
        flags: int,
        *,
        unique_name: bool,
        replay_of: int | None = None,
    ) -> pb.FileStatusProto:
        """CreateFile. A replay after a failover may find the name taken by what its own first attempt made, or by
        another client's file: nothing tells the two apart. Only where ``unique_name`` promises that nobody else makes
        this name is a file that is empty, unfinished and like the one asked for taken for ours; else FileExists_ says
        that it may be. ``replay_of`` is the id of an attempt that was made already."""
        progress = Progress(uncertain=replay_of is not None)
        request = pb.CreateFileRequest(path=path, opts=options, flags=flags)
        try:
            answer = await self.call(
                RpcCode.CREATE_FILE,
                request,
                pb.CreateFileResponse,
                f"create {path}",
                progress=progress,
                req_id=replay_of,
            )
        except FileExists_ as error:
            if not progress.uncertain:
                raise
            status = await self.status_or_none(path) if unique_name else None
            if status is None or not _is_new(status, options):
                raise FileExists_(
                    f"{str(error).rstrip('.')}; the file may be this very call's: the answer to its first attempt was "
                    "lost. Look at the file, or use a name of your own.",
                    kind=error.kind,
                    text=error.text,
                ) from error
            return status
        return answer.file_status

    async def open_for_write(self, path: str, options: pb.CreateFileOptsProto, flags: int) -> pb.FileBlocksProto:
        request = pb.OpenFileRequest(path=path, opts=options, flags=flags)
        answer = await self.call(RpcCode.OPEN_FILE, request, pb.OpenFileResponse, f"open {path} for writing")
        return answer.file_blocks

    async def delete(self, path: str, *, recursive: bool) -> bool:
        """False: an answer was lost, and asked again nothing was there: this call removed it, or somebody else."""
        progress = Progress()
        request = pb.DeleteRequest(path=path, recursive=recursive)
        try:
            await self.call(RpcCode.DELETE, request, pb.DeleteResponse, f"delete {path}", progress=progress)
        except NotFound:
            if not progress.uncertain:
                raise
            return False
        return True

    async def free(self, path: str, *, recursive: bool) -> pb.FreeResultProto:
        """A replay of one that was done answers that nothing was freed."""
        request = pb.FreeRequest(path=path, recursive=recursive)
        return (await self.call(RpcCode.FREE, request, pb.FreeResponse, f"free {path}")).res

    async def rename(self, src: str, dst: str, flags: int, *, inode_id: int) -> None:
        """``inode_id`` is the source's: found at ``dst`` after a replay that failed, the rename was done."""
        progress = Progress()
        request = pb.RenameRequest(src=src, dst=dst, flags=flags)
        try:
            await self.call(RpcCode.RENAME, request, pb.RenameResponse, f"rename {src} to {dst}", progress=progress)
        except (NotFound, FileExists_):
            status = await self.status_or_none(dst) if progress.uncertain else None
            if status is None or status.id != inode_id:
                raise

    async def set_attr(self, path: str, options: pb.SetAttrOptsProto) -> pb.FileStatusProto:
        """Setting the same values twice does no harm."""
        request = pb.SetAttrRequest(path=path, opts=options)
        doing = f"set attributes of {path}"
        answer = await self._anew(RpcCode.SET_ATTR, request, pb.SetAttrResponse, doing, Progress())
        return answer.status

    async def symlink(self, target: str, link: str, *, owner: str, group: str) -> None:
        progress = Progress()
        with sendable(f"make the symlink {link}"):
            request = pb.SymlinkRequest(target=target, link=link, force=False, mode=0o777, owner=owner, group=group)
        try:
            await self._anew(RpcCode.SYMLINK, request, pb.SymlinkResponse, f"make the symlink {link}", progress)
        except FileExists_:
            status = await self.status_or_none(link) if progress.uncertain else None
            if status is None or status.target != target:
                raise

    async def link(self, src: str, dst: str, *, inode_id: int) -> None:
        """``inode_id`` is the source's."""
        progress = Progress()
        request = pb.LinkRequest(src_path=src, dst_path=dst)
        try:
            await self._anew(RpcCode.LINK, request, pb.LinkResponse, f"link {src} to {dst}", progress)
        except FileExists_:
            status = await self.status_or_none(dst) if progress.uncertain else None
            if status is None or status.id != inode_id:
                raise

    async def _anew(self, code: RpcCode, request: Message, answer: type[M], doing: str, progress: Progress) -> M:
        """A call whose id a master answers with InProgress ever after: when its outcome is unknown it is made again
        under a fresh id."""
        config, world = self._session.config, self._session.world
        policy = RetryPolicy(config.retry_max_s, config.retry_min_sleep_s, config.retry_max_sleep_s)
        retry = Retry(policy, world.clock, world.random)
        while True:
            attempt = Progress()
            try:
                header = await self._masters.call(
                    code,
                    encode(request),
                    doing=doing,
                    replay=Replay.NEVER,
                    progress=attempt,
                    budget_s=retry.remaining_s(),
                )
                return decode(answer, header)
            except (TransportError, RemoteProtocolError):
                progress.uncertain = progress.uncertain or attempt.uncertain
                sleep_s = retry.next_sleep_s() if attempt.uncertain else None
                if sleep_s is None:
                    raise
                await world.clock.sleep(sleep_s)

    # ------------------------------------------------------------------------------------------------ blocks, sizes

    async def add_block(
        self,
        path: str,
        inode_id: int,
        *,
        file_length_bytes: int,
        last_block: pb.ExtendedBlockProto | None,
        commits: Sequence[pb.CommitBlockProto],
        progress: Progress,
        exclude: Sequence[int] | None = None,
    ) -> pb.LocatedBlockProto:
        """Repeated, it answers with the same block, but without its workers (4.5 rule 2): see ``progress``.
        ``exclude``: workers that never get it, instead of those that failed and may be asked again."""

        def request(exclude: Sequence[int]) -> pb.AddBlockRequest:
            return pb.AddBlockRequest(
                path=path,
                commit_blocks=commits,
                exclude_workers=exclude,
                located=True,
                client_address=self._session.client_address,
                file_len=file_length_bytes,
                last_block=last_block,
                inode_id=inode_id,
            )

        doing = f"add a block to {path}"
        # The answer is the bare block.
        if exclude is not None:
            return await self.call(RpcCode.ADD_BLOCK, request(exclude), pb.LocatedBlockProto, doing, progress=progress)
        return await self._excluding(RpcCode.ADD_BLOCK, request, pb.LocatedBlockProto, doing, progress)

    async def _excluding(
        self,
        code: RpcCode,
        request: Callable[[Sequence[int]], Message],
        answer: type[M],
        doing: str,
        progress: Progress | None = None,
    ) -> M:
        """A call that names workers to avoid; when no others are left, they are asked again."""
        excluded = self._session.excluded()
        if excluded:
            try:
                return await self.call(
                    code,
                    request(excluded),
                    answer,
                    doing,
                    progress=progress,
                    give_up=lambda error: isinstance(error, OutOfSpace),
                )
            except OutOfSpace:
                self._session.forgive()
        return await self.call(code, request(()), answer, doing, progress=progress)

    async def complete_file(
        self,
        path: str,
        inode_id: int,
        *,
        length_bytes: int,
        commits: Sequence[pb.CommitBlockProto],
        only_flush: bool,
        set_attr: pb.SetAttrOptsProto | None = None,
    ) -> pb.CompleteFileResponse:
        """Executed again when repeated; its content makes that harmless."""
        request = self._complete_request(path, inode_id, length_bytes, commits, only_flush=only_flush)
        if set_attr is not None:
            request.set_attr_opts.CopyFrom(set_attr)
        doing = f"{'flush' if only_flush else 'close'} {path}"
        return await self.call(RpcCode.COMPLETE_FILE, request, pb.CompleteFileResponse, doing)

    def _complete_request(
        self, path: str, inode_id: int, length_bytes: int, commits: Sequence[pb.CommitBlockProto], *, only_flush: bool
    ) -> pb.CompleteFileRequest:
        return pb.CompleteFileRequest(
            path=path,
            len=length_bytes,
            client_name=self._session.client_name,
            commit_blocks=commits,
            only_flush=only_flush,
            inode_id=inode_id,
            return_file_blocks=True,
        )

    async def resize(self, path: str, length_bytes: int, *, allocate: bool = False) -> pb.FileBlocksProto:
        """Cut or extend to ``length_bytes``: the one mode that does no harm (4.10, hazard 4). ``allocate`` is for
        extending alone: the master checks that the cluster has room for it."""
        options = pb.FileAllocOptsProto(truncate=not allocate, off=0, len=length_bytes, mode=0)
        request = pb.FileResizeRequest(path=path, opts=options)
        answer = await self.call(
            RpcCode.RESIZE_FILE, request, pb.FileResizeResponse, f"resize {path} to {length_bytes} bytes"
        )
        return answer.file_blocks

    async def assign_worker(self, path: str, block: pb.ExtendedBlockProto) -> pb.LocatedBlockProto:
        def request(exclude: Sequence[int]) -> pb.AssignWorkerRequest:
            return pb.AssignWorkerRequest(
                path=path, block=block, exclude_workers=exclude, client_address=self._session.client_address
            )

        answer = await self._excluding(
            RpcCode.ASSIGN_WORKER, request, pb.AssignWorkerResponse, f"place a block of {path}"
        )
        return answer.block

    # ---------------------------------------------------------------------------------------------- batches (4.16)

    async def create_batch(
        self, files: Sequence[tuple[str, pb.CreateFileOptsProto]], flags: int, *, req_id: int
    ) -> Sequence[pb.FileStatusProto]:
        """CreateFile of all files in one call. Element i has the id ``req_id + i``: when this fails, those before the
        element at fault were made, and a :meth:`create` that is a ``replay_of`` that id tells which."""
        request = pb.CreateFilesBatchRequest(
            requests=[pb.CreateFileRequest(path=path, opts=options, flags=flags) for path, options in files]
        )
        answer = await self.call(
            RpcCode.CREATE_FILES_BATCH,
            request,
            pb.CreateFilesBatchResponse,
            f"create {len(files)} files",
            req_id=req_id,
        )
        return _as_many(answer.file_statuses, len(files), "files created")

    async def add_first_blocks_batch(self, files: Sequence[tuple[str, int]]) -> Sequence[pb.LocatedBlockProto]:
        """AddBlock of the first block of each file (path, inode id) in one call. When it fails some may have one."""
        excluded = self._session.excluded()
        request = pb.AddBlocksBatchRequest(
            requests=[
                pb.AddBlockRequest(
                    path=path,
                    exclude_workers=excluded,
                    located=True,
                    client_address=self._session.client_address,
                    file_len=0,
                    inode_id=inode_id,
                )
                for path, inode_id in files
            ]
        )
        answer = await self.call(
            RpcCode.ADD_BLOCKS_BATCH,
            request,
            pb.AddBlocksBatchResponse,
            f"add a block to {len(files)} files",
            replay=Replay.NEVER,
        )
        return _as_many(answer.blocks, len(files), "blocks added")

    async def complete_batch(self, files: Sequence[tuple[str, int, int, Sequence[pb.CommitBlockProto]]]) -> None:
        """CompleteFile of all files (path, inode id, length, commits) in one call. When it fails some may be complete;
        completing one again is harmless."""
        request = pb.CompleteFilesBatchRequest(
            requests=[
                self._complete_request(path, inode_id, length_bytes, commits, only_flush=False)
                for path, inode_id, length_bytes, commits in files
            ]
        )
        answer = await self.call(
            RpcCode.COMPLETE_FILES_BATCH, request, pb.CompleteFilesBatchResponse, f"close {len(files)} files"
        )
        if not all(_as_many(answer.results, len(files), "files closed")):
            raise CurvfsError(f"The master did not close all of {len(files)} files.")

    # ------------------------------------------------------------------------------------------------------- locks

    async def get_lock(self, path: str, lock: pb.FileLockProto) -> pb.FileLockProto | None:
        answer = await self.call(
            RpcCode.GET_LOCK, pb.GetLockRequest(path=path, lock=lock), pb.GetLockResponse, f"look for locks of {path}"
        )
        return answer.conflict if answer.HasField("conflict") else None

    async def set_lock(self, path: str, lock: pb.FileLockProto) -> pb.FileLockProto | None:
        """The conflicting lock, in which case nothing changed; executed again when repeated, which is harmless."""
        answer = await self.call(
            RpcCode.SET_LOCK, pb.SetLockRequest(path=path, lock=lock), pb.SetLockResponse, f"lock {path}"
        )
        return answer.conflict if answer.HasField("conflict") else None

    # ---------------------------------------------------------------------------------------------- what files get

    def create_options(
        self,
        *,
        block_size_bytes: int,
        replicas: int,
        mode: int = 0o644,
        owner: str = "",
        group: str = "",
        xattrs: Mapping[str, bytes] | None = None,
        policy: StoragePolicy | None = None,
        kind: FileKind = FileKind.FILE,
    ) -> pb.CreateFileOptsProto:
        """CreateFileOptsProto for a file of ours (3.4), with the settings' storage policy unless one is given."""
        with sendable("create a file with these attributes"):
            return pb.CreateFileOptsProto(
                create_flag=0,
                create_parent=False,
                file_type=int(kind),  # type: ignore[arg-type]
                replicas=replicas,
                block_size=block_size_bytes,
                x_attr=dict(xattrs or {}),
                storage_policy=_storage_policy(self._session.policy if policy is None else policy),
                client_name=self._session.client_name,
                mode=mode,
                owner=owner,
                group=group,
            )


def _is_new(status: pb.FileStatusProto, options: pb.CreateFileOptsProto) -> bool:
    """Whether a file may be what a CreateFile with these options made a moment ago."""
    return (
        status.len == 0
        and not status.is_complete
        and status.file_type == options.file_type
        and status.mode == options.mode
        and status.block_size == options.block_size
        and dict(status.x_attr) == dict(options.x_attr)
    )


def _storage_policy(policy: StoragePolicy) -> pb.StoragePolicyProto:
    return pb.StoragePolicyProto(
        storage_type=int(policy.storage_type),  # type: ignore[arg-type]
        ttl_ms=policy.ttl_ms,
        ttl_action=int(policy.ttl_action),  # type: ignore[arg-type]
        state=pb.STORAGE_STATE_PROTO_CV,
    )


def _as_many(answers: Sequence[T], asked: int, what: str) -> Sequence[T]:
    """The answers of a batch, if there is one to each request."""
    if len(answers) != asked:
        raise RemoteProtocolError(f"The master answered for {len(answers)} of {asked} {what}.")
    return answers
