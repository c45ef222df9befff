"""Block streams on worker connections (specification 1.5, 4.7, 4.11, 5.2).

A worker connection carries one stream at a time, owned by one task. Idle connections are kept per worker, the
freshest used first. Running frames may be pipelined: the owner sends several before it takes the first reply.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import trio

from curvfs.config import ClientConfig
from curvfs.errors import ConnectionLost, DeadlineExceeded, RemoteError, RemoteProtocolError, TransportError
from curvfs.net.cluster import in_context
from curvfs.net.transport import FrameStream
from curvfs.network import host_port
from curvfs.units import format_duration
from curvfs.wire.codes import ResponseStatus
from curvfs.wire.session import BlockStream, StreamReply
from curvfs.world import Buffer, World

#: Streams of :meth:`WorkerPool.ask` in flight: their answers fit any receive buffer, so sending cannot get stuck.
_ASK_AT_ONCE = 128
#: What is received at once of the answers to :meth:`WorkerPool.open_many` and :meth:`WorkerPool.complete_many`.
_MANY_ANSWERS_BYTES = 8192
#: The answers to a block that is written in one exchange are shorter than this.
_ANSWERS_BYTES = 512


@dataclass(frozen=True, slots=True)
class WorkerKey:
    """Which worker, and where: connections are kept by all three."""

    worker_id: int
    host: str
    port: int

    def __str__(self) -> str:
        return f"worker {self.worker_id} at {host_port(self.host, self.port)}"


@dataclass(slots=True)
class _Idle:
    frames: FrameStream
    since_s: float


class WorkerPool:
    """Connections to workers: made here, lent to one block stream at a time, taken back when it ended well."""

    def __init__(self, config: ClientConfig, world: World, stats: Counter[str]) -> None:
        self.config = config
        self.world = world
        self.stats = stats
        self._idle: dict[WorkerKey, list[_Idle]] = {}

    async def open(
        self,
        worker: WorkerKey,
        code: int,
        header: bytes,
        *,
        doing: str,
        req_id: int | None = None,
        timeout_s: float | None = None,
    ) -> tuple[BlockChannel, bytes]:
        """Open a block stream; the channel and the header of the worker's answer. ``req_id`` is for headers that name
        the stream's own. ``timeout_s`` bounds connecting and each exchange, where that is less than the settings say.

        A pooled connection that turns out to be stale is replaced once: an Open changes nothing that a second one
        would not (5.2). Raises RemoteError when the worker refuses, TransportError when it does not answer.
        """
        idle = self._take(worker)
        if idle is not None:
            channel = BlockChannel(self, worker, idle, code, doing, req_id, timeout_s)
            try:
                return channel, await channel.open(header)
            except ConnectionLost:
                self.stats["worker_stale_connections"] += 1
                await self._close_idle(worker)  # the others are as old: the worker was restarted
        frames = await self._connect(worker, doing, timeout_s)
        channel = BlockChannel(self, worker, frames, code, doing, req_id, timeout_s)
        return channel, await channel.open(header)

    async def ask(
        self, worker: WorkerKey, code: int, streams: Sequence[tuple[bytes, bytes]], *, doing: str
    ) -> list[bytes | RemoteError]:
        """Open and Complete streams one after the other on one connection, pipelined: what each Open was answered.

        For reads that only want to know something, such as where a block's file lies. One round trip for up to
        128 streams. A refusal stands in its stream's place. Raises TransportError.
        """
        idle = self._take(worker)
        if idle is not None:
            try:
                return await self._ask(worker, idle, code, streams, doing)
            except ConnectionLost:
                self.stats["worker_stale_connections"] += 1
                await self._close_idle(worker)
        return await self._ask(worker, await self._connect(worker, doing), code, streams, doing)

    async def _ask(
        self, worker: WorkerKey, frames: FrameStream, code: int, streams: Sequence[tuple[bytes, bytes]], doing: str
    ) -> list[bytes | RemoteError]:
        answers: list[bytes | RemoteError] = []
        last: BlockChannel | None = None
        try:
            for start in range(0, len(streams), _ASK_AT_ONCE):
                batch = streams[start : start + _ASK_AT_ONCE]
                channels = [BlockChannel(self, worker, frames, code, doing) for _ in batch]
                last = channels[-1]
                prefixes = [channel.ask(*headers) for channel, headers in zip(channels, batch, strict=True)]
                await last.send(b"".join(prefixes))
                for channel in channels:
                    last = channel
                    answers.append(await channel.answer())
        finally:
            if last is not None:
                await last.release()
        return answers

    async def open_many(
        self, worker: WorkerKey, code: int, headers: Sequence[bytes], *, doing: str, timeout_s: float | None = None
    ) -> tuple[BlockChannel, list[bytes | RemoteError]]:
        """Open write streams one after the other on one connection, pipelined, each of which leaves the one before as
        it is (4.7): what each Open was answered. The channel is that of the last one: what the others opened keeps its
        space while it is there. Close it in the end; nothing else can be done with it. At most 128. A refusal stands in
        its stream's place. Raises TransportError.
        """
        return await self._many(worker, code, headers, doing, timeout_s, BlockChannel.opening)

    async def complete_many(
        self, worker: WorkerKey, code: int, headers: Sequence[bytes], *, doing: str, timeout_s: float | None = None
    ) -> list[bytes | RemoteError]:
        """Complete streams that were opened on other connections, pipelined: what each was answered. At most 128. A
        refusal stands in its stream's place. Raises TransportError.
        """
        channel, answers = await self._many(worker, code, headers, doing, timeout_s, BlockChannel.completing)
        await channel.release()
        return answers

    async def _many(
        self,
        worker: WorkerKey,
        code: int,
        headers: Sequence[bytes],
        doing: str,
        timeout_s: float | None,
        frame: Callable[[BlockChannel, bytes], bytes],
    ) -> tuple[BlockChannel, list[bytes | RemoteError]]:
        """One frame and its answer for each of several streams on one connection. A stale one is replaced once."""

        async def on(frames: FrameStream) -> tuple[BlockChannel, list[bytes | RemoteError]]:
            channels = [BlockChannel(self, worker, frames, code, doing, None, timeout_s) for _ in headers]
            prefixes = [frame(channel, header) for channel, header in zip(channels, headers, strict=True)]
            return channels[-1], await channels[-1].many(b"".join(prefixes), channels)

        idle = self._take(worker)
        if idle is not None:
            try:
                return await on(idle)
            except ConnectionLost:
                self.stats["worker_stale_connections"] += 1
                await self._close_idle(worker)
        return await on(await self._connect(worker, doing, timeout_s))

    async def put(
        self, worker: WorkerKey, code: int, open_header: bytes, payload: Buffer, complete_header: bytes, *, doing: str
    ) -> bytes:
        """Write a new block whole, in one exchange: what its Open was answered.

        Raises RemoteError when the worker refused any of it, which leaves nothing that a commit could name; and
        TransportError. A stale connection is replaced once: the same bytes written again do no harm.
        """
        idle = self._take(worker)
        if idle is not None:
            channel = BlockChannel(self, worker, idle, code, doing)
            try:
                return await channel.whole(open_header, payload, complete_header)
            except ConnectionLost:
                self.stats["worker_stale_connections"] += 1
                await self._close_idle(worker)
        channel = BlockChannel(self, worker, await self._connect(worker, doing), code, doing)
        return await channel.whole(open_header, payload, complete_header)

    def _take(self, worker: WorkerKey) -> FrameStream | None:
        found = self._idle.get(worker)
        if not found:
            return None
        return found.pop().frames

    async def _connect(self, worker: WorkerKey, doing: str, timeout_s: float | None = None) -> FrameStream:
        timeout_s = min(self.config.connect_timeout_s, math.inf if timeout_s is None else timeout_s)
        try:
            with trio.fail_after(timeout_s):
                return FrameStream(await self.world.net.connect(worker.host, worker.port))
        except trio.TooSlowError:
            raise DeadlineExceeded(
                f"Cannot {doing}: {worker} did not accept a connection within {format_duration(timeout_s)}."
            ) from None
        except TransportError as error:
            raise type(error)(f"Cannot {doing}: {worker} cannot be reached ({error})") from error

    def give_back(self, worker: WorkerKey, frames: FrameStream) -> list[FrameStream]:
        """Keep a connection whose stream ended well; which ones are too old or too many, for the caller to close."""
        now_s = self.world.clock.monotonic_s()
        self._idle.setdefault(worker, []).append(_Idle(frames, now_s))
        surplus = sum(map(len, self._idle.values())) - self.config.idle_worker_connections
        old: list[FrameStream] = []
        for key, connections in list(self._idle.items()):
            while connections and (now_s - connections[0].since_s > self.config.worker_idle_s or surplus > 0):
                surplus -= 1
                old.append(connections.pop(0).frames)
            if not connections:
                del self._idle[key]
        return old

    async def _close_idle(self, worker: WorkerKey) -> None:
        for connection in self._idle.pop(worker, []):
            await connection.frames.aclose()

    async def aclose(self) -> None:
        """Close the idle connections; streams in use are closed by their owners."""
        for worker in list(self._idle):
            await self._close_idle(worker)


class BlockChannel:
    """One block stream on one connection. One task at a time.

    After any error but a RemoteError, and after a cancellation, the connection is beyond use: every call raises
    ConnectionLost, and :meth:`release` closes it.
    """

    def __init__(
        self,
        pool: WorkerPool,
        worker: WorkerKey,
        frames: FrameStream,
        code: int,
        doing: str,
        req_id: int | None = None,
        timeout_s: float | None = None,
    ) -> None:
        self._pool = pool
        self._timeout_s = min(pool.config.data_timeout_s, math.inf if timeout_s is None else timeout_s)
        self._frames = frames
        self._stream = BlockStream(code, pool.world.random.request_id() if req_id is None else req_id)
        self._doing = doing
        self._broken = False
        self._released = False
        self._payload_left = 0
        self.worker = worker

    @property
    def timeout_s(self) -> float:
        """What bounds each exchange."""
        return self._timeout_s

    @property
    def outstanding(self) -> int:
        """Frames sent whose reply was not taken yet."""
        return self._stream.outstanding

    @property
    def payload_left(self) -> int:
        """Bytes of the last reply's payload that were not received yet."""
        return self._payload_left

    async def open(self, header: bytes) -> bytes:
        """Send Open and take its answer; closes the connection when that fails."""
        try:
            await self.send(self._stream.open(header))
            return (await self.reply()).header
        except BaseException:
            await self.release()
            raise

    async def running(self, header: bytes = b"", *payload: Buffer) -> None:
        """Send a Running frame; its reply is taken with :meth:`reply`, in order, later."""
        await self.send(self._stream.running(header, sum(map(len, payload))), *payload)

    async def finish(self, header: bytes) -> bytes:
        """Complete the stream and take the answer, whose header is returned; every other reply must have been taken.

        Raises RemoteError when the worker refuses.
        """
        await self.send(self._stream.complete(header))
        return (await self.reply()).header

    async def cancel(self, header: bytes) -> None:
        """Cancel the stream, whatever is still unanswered. Raises RemoteError when the worker refuses."""
        while self._stream.outstanding:
            try:
                await self.reply()
            except RemoteError:
                continue  # what failed is being cancelled
        await self.send(self._stream.cancel(header))
        await self.reply()

    async def whole(self, open_header: bytes, payload: Buffer, complete_header: bytes) -> bytes:
        """Open, one Running frame and Complete at once; what Open was answered. Lets go of the connection."""
        try:
            before, behind = self._stream.whole(open_header, len(payload), complete_header)
            with self._exchange():
                await self._frames.send(before, payload, behind)
                self._frames.read_ahead(_ANSWERS_BYTES)  # which come together
                replies = [await self._receive() for _ in range(self._stream.outstanding)]
                self._frames.read_ahead(0)
            opened, *_ = [self._accepted(reply) for reply in replies]
            return opened.header
        finally:
            await self.release()

    def opening(self, header: bytes) -> bytes:
        """Open, to be sent together with others (:meth:`many`)."""
        return self._stream.open(header)

    def completing(self, header: bytes) -> bytes:
        """Complete of what an earlier stream opened, to be sent together with others (:meth:`many`)."""
        self._stream.resume()
        return self._stream.complete(header)

    async def many(self, prefixes: bytes, channels: Sequence[BlockChannel]) -> list[bytes | RemoteError]:
        """Send a frame of each of these channels, which share this one's connection, and take their answers."""
        try:
            with self._exchange():
                await self._frames.send(prefixes)
                self._frames.read_ahead(_MANY_ANSWERS_BYTES)  # which come together
                replies = [await channel._receive() for channel in channels]
                self._frames.read_ahead(0)
        except BaseException:
            await self.release()
            raise
        answers: list[bytes | RemoteError] = []
        for channel, reply in zip(channels, replies, strict=True):
            try:
                answers.append(channel._accepted(reply).header)
            except RemoteError as error:
                answers.append(error)
        return answers

    async def close(self) -> None:
        """Close the connection, whatever the stream's state. Idempotent, never raises."""
        self._broken = True
        await self.release()

    def ask(self, open_header: bytes, complete_header: bytes) -> bytes:
        """Open and Complete in one go, to be sent together with others."""
        return self._stream.open(open_header) + self._stream.complete(complete_header)

    async def answer(self) -> bytes | RemoteError:
        """What the Open of :meth:`ask` was answered."""
        answer: bytes | RemoteError
        try:
            answer = (await self.reply()).header
        except RemoteError as error:
            answer = error
        try:
            await self.reply()
        except RemoteError:
            pass  # nothing was open to be completed, or it ends with the next Open
        return answer

    async def send(self, prefix: bytes, *payload: Buffer) -> None:
        with self._exchange():
            await self._frames.send(prefix, *payload)

    async def reply(self) -> StreamReply:
        """The next reply. Its payload follows and must be received before the next one. Raises RemoteError."""
        with self._exchange():
            reply = await self._receive()
        return self._accepted(reply)

    async def _receive(self) -> StreamReply:
        head = await self._frames.recv_head()
        if head is None:
            raise ConnectionLost(f"{self.worker} closed the connection.")
        self._stream.check(head)
        header = await self._frames.recv_header(head)
        data: bytes | int = b""
        if head.response is ResponseStatus.ERROR:
            data = await self._frames.recv_data(head)
        else:
            self._payload_left = head.data_len
        assert isinstance(data, bytes)
        return self._stream.receive(head, header, data)

    def _accepted(self, reply: StreamReply) -> StreamReply:
        if reply.error is not None:
            raise in_context(reply.error, f"Cannot {self._doing} on {self.worker}")
        return reply

    async def receive_payload(self, buffer: memoryview) -> int:
        """Receive as much of the payload as there is and ``buffer`` holds, straight into it."""
        count = min(len(buffer), self._payload_left)
        with self._exchange():
            await self._frames.recv_exactly(buffer[:count])
        self._payload_left -= count
        return count

    async def discard_payload(self) -> None:
        """Receive and forget the rest of the payload."""
        with self._exchange():
            await self._frames.discard(self._payload_left)
        self._payload_left = 0

    async def drain(self) -> None:
        """Receive and forget everything that was asked for."""
        await self.discard_payload()
        while self._stream.outstanding:
            await self.reply()
            await self.discard_payload()

    async def release(self) -> None:
        """Give the connection back when its stream ended, else close it. Idempotent, never raises."""
        if self._released:
            return
        self._released = True
        is_well = self._stream.is_finished and not self._broken and not self._payload_left
        old = self._pool.give_back(self.worker, self._frames) if is_well else [self._frames]
        if old:
            with trio.CancelScope(shield=True):
                for frames in old:
                    await frames.aclose()

    @contextmanager
    def _exchange(self) -> Iterator[None]:
        """Bound an exchange with the worker and tell failures with what was being done."""
        timeout_s = self._timeout_s
        if self._broken:
            raise ConnectionLost(f"Cannot {self._doing}: the stream to {self.worker} broke off before.")
        scope = trio.CancelScope(deadline=trio.current_time() + timeout_s)
        try:
            with scope:
                yield
        except TransportError as error:
            self._broken = True
            raise type(error)(f"Cannot {self._doing}: {error}") from error
        except RemoteProtocolError as error:
            self._broken = True
            raise RemoteProtocolError(f"Cannot {self._doing} on {self.worker}: {error}") from error
        except BaseException:
            self._broken = True
            raise
        if scope.cancelled_caught:
            self._broken = True
            raise DeadlineExceeded(
                f"Cannot {self._doing}: {self.worker} did not answer within {format_duration(timeout_s)}."
            )
