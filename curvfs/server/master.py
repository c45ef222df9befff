"""The master's port: unary requests in, replies out.

Requests that came together are executed one after the other and their replies sent together, so a client that keeps
many requests under way costs one turn of the event loop per batch, not per request.

Specification sections 1.4, 2.1, 4.2 and 11.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any, TypeVar

import trio
from google.protobuf.message import Message

from curvfs.errors import CurvfsError, ProtocolError
from curvfs.histogram import Histogram
from curvfs.server import convert, locks, replies
from curvfs.server.behaviour import Behaviour
from curvfs.server.cluster import Cluster
from curvfs.server.connection import explain
from curvfs.server.fileblocks import FileBlocks, Resize
from curvfs.server.metastore import EXPIRED_AT_ONCE
from curvfs.server.namespace import ACCESS_MODE, Namespace
from curvfs.server.oplog import Log
from curvfs.server.records import Change
from curvfs.server.refusals import JOB_NOT_FOUND, UNSUPPORTED, common, refusal
from curvfs.server.replies import Replies
from curvfs.server.retrycache import RetryCache
from curvfs.units import KIB
from curvfs.wire.codes import RequestStatus, RpcCode
from curvfs.wire.frame import MAX_REQUEST_HEADER_BYTES, FrameDecoder
from curvfs.wire.messages import decode, pb
from curvfs.wire.session import Request, ServerSession
from curvfs.world import Stream, World

#: A connection without a request for this long is closed.
IDLE_TIMEOUT_S = 600.0

_REAP_RETRY_S = 5.0

_RECEIVE_BYTES = 256 * KIB
#: Replies collected before they are sent, and other tasks get their turn, although more requests wait.
_REPLIES = 64
_REPLY_BYTES = 256 * KIB

M = TypeVar("M", bound=Message)
Handler = Callable[["Master", Any, int], Message]


class Master:
    """Everything that answers requests on the master port. ``active_master`` is the ``host:port`` it goes by."""

    def __init__(
        self,
        namespace: Namespace,
        cluster: Cluster,
        *,
        active_master: str,
        behaviour: Behaviour,
        world: World,
        log: Log,
    ) -> None:
        self.namespace = namespace
        self.files = FileBlocks(namespace, cluster, behaviour)
        self.cluster = cluster
        self._behaviour = behaviour
        self._world = world
        self._log = log
        self.answers = Histogram()
        self.refusals: Counter[str] = Counter()
        self._done = RetryCache()
        self._replies = Replies(cluster, behaviour, active_master)
        self._quiet: trio.Event | None = None
        self._doomed_any = trio.Event()
        self._doomed_any.set()  # a server that was killed may have left some

    # -------------------------------------------------------------------------------------------------- background

    @asynccontextmanager
    async def quiet(self) -> AsyncIterator[None]:
        """Nothing changes the metadata inside this; requests wait."""
        over = self._quiet = trio.Event()
        try:
            yield
        finally:
            self._quiet = None
            over.set()

    async def _while_quiet(self) -> None:
        while (quiet := self._quiet) is not None:
            await quiet.wait()

    async def reap_doomed(self) -> None:
        """Take apart the directory trees that Delete cut out, for as long as the server runs."""
        while True:
            await self._doomed_any.wait()
            await self._while_quiet()
            try:
                if not self.namespace.reap():
                    self._doomed_any = trio.Event()
            except CurvfsError as error:
                self._log.error(f"removing a deleted directory: {error}")
                await self._world.clock.sleep(_REAP_RETRY_S)
            await trio.lowlevel.checkpoint()

    async def delete_expired(self, interval_s: float) -> None:
        """Delete the files whose TTL has passed: now, and every ``interval_s`` from then on."""
        while True:
            try:
                while await self._delete_some_expired():
                    pass
            except CurvfsError as error:
                self._log.error(f"deleting expired files: {error}")
            await self._world.clock.sleep(interval_s)

    async def _delete_some_expired(self) -> bool:
        """Whether there may be more."""
        found = await self._world.threads.run(self.namespace.store.expired, self._world.clock.time_ms())
        deleted = 0
        for entry in found:
            await self._while_quiet()
            deleted += self.namespace.expire(*entry)
            await trio.lowlevel.checkpoint()
        if deleted:
            self._log.info(f"{deleted} expired files were deleted")
        return deleted > 0 and len(found) == EXPIRED_AT_ONCE

    # -------------------------------------------------------------------------------------------------- connection

    async def serve(self, stream: Stream) -> None:
        """Answer the requests of one connection until it closes, idles or sends what is no request."""
        session = ServerSession()
        decoder = FrameDecoder(max_header_bytes=MAX_REQUEST_HEADER_BYTES)
        buffer = memoryview(bytearray(_RECEIVE_BYTES))
        with trio.move_on_after(IDLE_TIMEOUT_S) as idle:
            while count := await stream.recv_into(buffer):
                idle_until_s, idle.deadline = idle.deadline, math.inf
                decoder.feed(buffer[:count])
                answered = await self._drain(stream, session, decoder)
                idle.deadline = trio.current_time() + IDLE_TIMEOUT_S if answered else idle_until_s

    async def _drain(self, stream: Stream, session: ServerSession, decoder: FrameDecoder) -> bool:
        """Answer every whole request that has come; False when there was none (heartbeats are none)."""
        answered = False
        replies: list[bytes] = []
        size_bytes = 0
        broken: ProtocolError | None = None
        while broken is None:
            try:
                frame = decoder.next_frame()
                request = None if frame is None else session.receive(frame.head, frame.header, frame.data)
            except ProtocolError as error:
                frame, request, broken = None, None, error
            if request is not None:
                await self._while_quiet()
                replies.append(self._answer(session, request))
                size_bytes += len(replies[-1])
            if replies and (frame is None or len(replies) >= _REPLIES or size_bytes >= _REPLY_BYTES):
                await stream.send(*replies)
                replies, size_bytes = [], 0
                answered = True
            if frame is None:
                break
        if broken is not None:
            raise broken
        return answered

    def _answer(self, session: ServerSession, request: Request) -> bytes:
        """The whole reply frame to one request."""
        began_s = self._world.clock.monotonic_s()
        try:
            header = self._execute(request)
        except Exception as error:  # whatever it is, the client gets an answer
            self.refusals[type(error).__name__] += 1
            kind, text = explain(error, f"{request.rpc.wire_name} ({request.code})", self._log)
            return session.error(request, kind, text)
        finally:
            self.answers.record_s(self._world.clock.monotonic_s() - began_s)
        return session.reply(request, header)

    def _execute(self, request: Request) -> bytes:
        entry = _HANDLERS.get(request.code)
        if entry is None or request.status is not RequestStatus.RPC:
            raise common("Unsupported operation")
        message_type, handler = entry
        message: Any = decode(message_type, request.header)
        again = _ONCE.get(request.code)
        if again is None or (request.code == RpcCode.OPEN_FILE and message.flags & ACCESS_MODE == 0):
            return handler(self, message, request.req_id).SerializeToString()
        now_ms = self._world.clock.time_ms()
        if self._done.knows(request.req_id, request.code, request.header, now_ms):
            return again(self, message).SerializeToString()
        reply = handler(self, message, request.req_id).SerializeToString()
        self._done.remember(request.req_id, request.code, request.header, now_ms)
        return reply

    # ---------------------------------------------------------------------------------------------------- handlers

    def _mkdir(self, message: Any, _: int) -> Message:
        inode = self.namespace.mkdir(message.path, convert.mkdir_options_of(message.opts))
        return pb.MkdirResponse(flag=False, status=self._replies.status(message.path, inode))

    def _delete(self, message: Any, _: int) -> Message:
        inodes, size_bytes = self.namespace.delete(message.path, message.recursive)
        if message.recursive:
            self._doomed_any.set()
        return self._freed(inodes, size_bytes)

    def _freed(self, inodes: int, size_bytes: int) -> Message:
        if not self._behaviour.has_head_fields:
            return pb.DeleteResponse()
        return pb.DeleteResponse(res=pb.FreeResultProto(inodes=inodes, bytes=size_bytes))

    def _create_file(self, message: Any, _: int) -> Message:
        inode = self.namespace.create(message.path, convert.create_options_of(message.opts), message.flags)
        return pb.CreateFileResponse(file_status=self._replies.status(message.path, inode))

    def _open_file(self, message: Any, _: int) -> Message:
        options = convert.create_options_of(message.opts)
        inode, blocks = self.files.open_file(message.path, options, message.flags)
        return pb.OpenFileResponse(file_blocks=self._replies.file_blocks(message.path, inode, blocks))

    def _file_status(self, message: Any, _: int) -> Message:
        return pb.GetFileStatusResponse(status=self._replies.status(message.path, self.namespace.get(message.path)))

    def _list_status(self, message: Any, _: int) -> Message:
        found = self.namespace.list_status(message.path)
        return pb.ListStatusResponse(statuses=[self._replies.status(path, inode) for path, inode in found])

    def _list_options(self, message: Any, _: int) -> Message:
        options = message.options
        limit = options.limit if options.HasField("limit") else None
        found = self.namespace.list_page(message.path, options.start_after, limit)
        return pb.ListOptionsResponse(statuses=[self._replies.status(path, inode) for path, inode in found])

    def _exists(self, message: Any, _: int) -> Message:
        return pb.ExistsResponse(exists=self.namespace.find(message.path) is not None)

    def _rename(self, message: Any, _: int) -> Message:
        return pb.RenameResponse(result=self.namespace.rename(message.src, message.dst, message.flags))

    def _add_block(self, message: Any, _: int) -> Message:
        inode, placed = self.files.add_block(
            message.path,
            self._inode_id(message),
            message.last_block.id if message.HasField("last_block") else None,
            message.file_len,
            convert.commits_of(message.commit_blocks),
            message.exclude_workers,
            message.client_address.hostname,
        )
        return self._replies.located(placed, inode)  # bare: section 2.1

    def _complete_file(self, message: Any, _: int) -> Message:
        attrs = flush_is_silent = None
        if self._behaviour.has_v04_fields:
            attrs = convert.attr_change_of(message.set_attr_opts) if message.HasField("set_attr_opts") else None
            flush_is_silent = message.HasField("return_file_blocks") and not message.return_file_blocks
        inode = self.files.complete(
            message.path,
            self._inode_id(message),
            message.len,
            message.client_name,
            convert.commits_of(message.commit_blocks),
            message.only_flush,
            attrs,
        )
        if not message.only_flush or flush_is_silent:
            return pb.CompleteFileResponse(result=True)
        blocks = self._replies.file_blocks(message.path, inode, self.files.placed(inode))
        return pb.CompleteFileResponse(result=True, file_blocks=blocks)

    def _inode_id(self, message: Any) -> int:
        """The inode that a request names beside its path; 0 for none, and for all where the version reads none."""
        return int(message.inode_id) if self._behaviour.has_v04_fields else 0

    def _locate(self, message: Any, _: int) -> Message:
        inode, blocks = self.files.locate(message.path)
        return pb.GetBlockLocationsResponse(blocks=self._replies.file_blocks(message.path, inode, blocks))

    def _filesystem_info(self, _message: Any, _: int) -> Message:
        return self._replies.filesystem_info(self.namespace.store.totals, self._world.clock.time_ms())

    def _set_attr(self, message: Any, _: int) -> Message:
        inode = self.namespace.set_attr(message.path, convert.attr_change_of(message.opts))
        return pb.SetAttrResponse(status=self._replies.status(message.path, inode))

    def _symlink(self, message: Any, _: int) -> Message:
        owner, group = (message.owner, message.group) if self._behaviour.has_v04_fields else ("", "")
        self.namespace.symlink(message.target, message.link, message.force, message.mode & 0o7777, owner, group)
        return pb.SymlinkResponse()

    def _link(self, message: Any, _: int) -> Message:
        self.namespace.link(message.src_path, message.dst_path)
        return pb.LinkResponse()

    def _resize_file(self, message: Any, _: int) -> Message:
        options = message.opts
        inode, blocks = self.files.resize(
            message.path, Resize(options.truncate, options.off, options.len, options.mode)
        )
        return pb.FileResizeResponse(file_blocks=self._replies.file_blocks(message.path, inode, blocks))

    def _assign_worker(self, message: Any, _: int) -> Message:
        placed = self.files.assign(
            message.path, message.block.id, message.exclude_workers, message.client_address.hostname
        )
        inode = self.namespace.get(message.path)
        return pb.AssignWorkerResponse(block=self._replies.located(placed, inode))

    def _get_lock(self, message: Any, _: int) -> Message:
        inode = self.namespace.get(message.path)
        held = locks.alive(self.namespace.store.locks(inode.id), self._world.clock.time_ms())
        against = locks.conflict(held, convert.lock_of(message.lock))
        return pb.GetLockResponse(conflict=None if against is None else replies.file_lock(against))

    def _set_lock(self, message: Any, _: int) -> Message:
        inode = self.namespace.get(message.path)
        now_ms = self._world.clock.time_ms()
        wanted = convert.lock_of(message.lock)
        held = locks.alive(self.namespace.store.locks(inode.id), now_ms)
        against = locks.conflict(held, wanted)
        if against is not None:
            return pb.SetLockResponse(conflict=replies.file_lock(against))
        left = locks.with_lock(held, wanted, now_ms, splits=self._behaviour.splits_locks)
        self.namespace.store.apply(Change(locks={inode.id: left}))
        return pb.SetLockResponse()

    def _create_files_batch(self, message: Any, req_id: int) -> Message:
        statuses = []
        now_ms = self._world.clock.time_ms()
        made = []
        failure: Exception | None = None
        with self.namespace.store.together():
            for index, request in enumerate(message.requests):
                # Elements before a failing one stay created; a repeated batch passes over them.
                key = (req_id + index, int(RpcCode.CREATE_FILE), request.SerializeToString(deterministic=True), now_ms)
                try:
                    if self._done.knows(*key):
                        inode = self.namespace.get(request.path)
                    else:
                        options = convert.create_options_of(request.opts)
                        inode = self.namespace.create(request.path, options, request.flags)
                        made.append(key)
                except Exception as error:
                    failure = error
                    break
                statuses.append(self._replies.status(request.path, inode))
        for key in made:
            self._done.remember(*key)
        if failure is not None:
            raise failure
        return pb.CreateFilesBatchResponse(file_statuses=statuses)

    def _add_blocks_batch(self, message: Any, req_id: int) -> Message:
        with self.namespace.store.together():
            blocks: list[Any] = [self._add_block(request, req_id) for request in message.requests]
        return pb.AddBlocksBatchResponse(blocks=blocks)

    def _complete_files_batch(self, message: Any, req_id: int) -> Message:
        with self.namespace.store.together():
            for request in message.requests:
                self._complete_file(request, req_id)
        return pb.CompleteFilesBatchResponse(results=[True] * len(message.requests))

    def _free(self, message: Any, _: int) -> Message:
        self.namespace.get(message.path)
        # What is here is nowhere else, so there is nothing to free.
        return pb.FreeResponse(res=pb.FreeResultProto(inodes=0, bytes=0))

    def _mount_table(self, _message: Any, _: int) -> Message:
        return pb.GetMountTableResponse()

    def _mount_info(self, _message: Any, _: int) -> Message:
        return pb.GetMountInfoResponse()

    def _no_under_stores(self, _message: Any, _: int) -> Message:
        raise refusal(UNSUPPORTED, "Unsupported operation: this server has no under stores")

    def _no_such_job(self, message: Any, _: int) -> Message:
        raise refusal(JOB_NOT_FOUND, f"Job {message.job_id} not found")

    def _metrics_report(self, _message: Any, _: int) -> Message:
        return pb.MetricsReportResponse()

    # ----------------------------------------------------------------------------- answers to what was done already

    def _again_create(self, message: Any) -> Message:
        return pb.CreateFileResponse(file_status=self._replies.status(message.path, self.namespace.get(message.path)))

    def _again_open(self, message: Any) -> Message:
        inode, blocks = self.files.locate(message.path)
        return pb.OpenFileResponse(file_blocks=self._replies.file_blocks(message.path, inode, blocks))

    def _again_delete(self, _message: Any) -> Message:
        return self._freed(0, 0)

    def _again_rename(self, _message: Any) -> Message:
        return pb.RenameResponse(result=True)

    def _again_set_attr(self, message: Any) -> Message:
        return pb.SetAttrResponse(status=self._replies.status(message.path, self.namespace.get(message.path)))

    def _again_symlink(self, _message: Any) -> Message:
        return pb.SymlinkResponse()

    def _again_link(self, _message: Any) -> Message:
        return pb.LinkResponse()


_HANDLERS: dict[int, tuple[type[Message], Handler]] = {
    RpcCode.MKDIR: (pb.MkdirRequest, Master._mkdir),
    RpcCode.DELETE: (pb.DeleteRequest, Master._delete),
    RpcCode.CREATE_FILE: (pb.CreateFileRequest, Master._create_file),
    RpcCode.OPEN_FILE: (pb.OpenFileRequest, Master._open_file),
    RpcCode.FILE_STATUS: (pb.GetFileStatusRequest, Master._file_status),
    RpcCode.LIST_STATUS: (pb.ListStatusRequest, Master._list_status),
    RpcCode.EXISTS: (pb.ExistsRequest, Master._exists),
    RpcCode.RENAME: (pb.RenameRequest, Master._rename),
    RpcCode.ADD_BLOCK: (pb.AddBlockRequest, Master._add_block),
    RpcCode.COMPLETE_FILE: (pb.CompleteFileRequest, Master._complete_file),
    RpcCode.GET_BLOCK_LOCATIONS: (pb.GetBlockLocationsRequest, Master._locate),
    RpcCode.GET_FILESYSTEM_INFO: (pb.GetFilesystemInfoRequest, Master._filesystem_info),
    RpcCode.SET_ATTR: (pb.SetAttrRequest, Master._set_attr),
    RpcCode.SYMLINK: (pb.SymlinkRequest, Master._symlink),
    RpcCode.LINK: (pb.LinkRequest, Master._link),
    RpcCode.RESIZE_FILE: (pb.FileResizeRequest, Master._resize_file),
    RpcCode.ASSIGN_WORKER: (pb.AssignWorkerRequest, Master._assign_worker),
    RpcCode.GET_LOCK: (pb.GetLockRequest, Master._get_lock),
    RpcCode.SET_LOCK: (pb.SetLockRequest, Master._set_lock),
    RpcCode.CREATE_FILES_BATCH: (pb.CreateFilesBatchRequest, Master._create_files_batch),
    RpcCode.ADD_BLOCKS_BATCH: (pb.AddBlocksBatchRequest, Master._add_blocks_batch),
    RpcCode.COMPLETE_FILES_BATCH: (pb.CompleteFilesBatchRequest, Master._complete_files_batch),
    RpcCode.FREE: (pb.FreeRequest, Master._free),
    RpcCode.LIST_OPTIONS: (pb.ListOptionsRequest, Master._list_options),
    RpcCode.GET_MOUNT_TABLE: (pb.GetMountTableRequest, Master._mount_table),
    RpcCode.GET_MOUNT_INFO: (pb.GetMountInfoRequest, Master._mount_info),
    RpcCode.MOUNT: (pb.MountRequest, Master._no_under_stores),
    RpcCode.UNMOUNT: (pb.UnMountRequest, Master._no_under_stores),
    RpcCode.SUBMIT_JOB: (pb.SubmitJobRequest, Master._no_under_stores),
    RpcCode.GET_JOB_STATUS: (pb.GetJobStatusRequest, Master._no_such_job),
    RpcCode.CANCEL_JOB: (pb.CancelJobRequest, Master._no_such_job),
    RpcCode.METRICS_REPORT: (pb.MetricsReportRequest, Master._metrics_report),
}

#: Requests that are executed once per req_id, and how a repetition is answered.
_ONCE: dict[int, Callable[[Master, Any], Message]] = {
    RpcCode.CREATE_FILE: Master._again_create,
    RpcCode.OPEN_FILE: Master._again_open,
    RpcCode.DELETE: Master._again_delete,
    RpcCode.RENAME: Master._again_rename,
    RpcCode.SET_ATTR: Master._again_set_attr,
    RpcCode.SYMLINK: Master._again_symlink,
    RpcCode.LINK: Master._again_link,
}
