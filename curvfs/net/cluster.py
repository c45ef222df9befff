"""Calls to whichever master leads: connections, leader discovery, deadlines and retries (specification 5.1).

Exactly one master leads; the others answer every call with NotLeader and give no hint. A call goes to the leader that
answered last; when that fails it goes to all masters at once, and the first that answers leads from then on. One
request id serves all attempts, so that a master that executed an attempt whose answer was lost does not execute it
twice (4.2); for the calls whose ids a master remembers badly see :class:`Replay`.
"""

from __future__ import annotations

import enum
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import trio

from curvfs.config import DEFAULT_MASTER_PORT, ClientConfig
from curvfs.errors import (
    ConnectFailed,
    ConnectionLost,
    CurvfsError,
    DeadlineExceeded,
    InProgress,
    InvalidRequest,
    NoAvailableWorker,
    NotAMaster,
    NotLeader,
    OutOfSpace,
    RemoteError,
    RemoteProtocolError,
    TransportError,
    Unsupported,
    from_reply,
)
from curvfs.net.connection import MasterConnection, PendingCall
from curvfs.net.retry import Retry, RetryPolicy
from curvfs.network import host_port
from curvfs.units import format_duration, format_size
from curvfs.wire.frame import MAX_REQUEST_HEADER_BYTES
from curvfs.wire.session import Reply
from curvfs.world import World

#: A connection with this many calls in flight is busy: another one is opened, up to ``config.master_connections``.
_BUSY = 64
#: Connections idle for longer are not used again: a master closes them after 10 minutes (1.4), and a call that meets
#: the closing one must be repeated without knowing whether it was executed.
_MAX_IDLE_S = 300.0
#: After a leader change the new leader learns the workers from their next heartbeats and reports (5.1). A client of
#: several masters that has just come cannot know when the lead changed last, and gives them as long.
_UNSETTLED_S = 10.0
#: A master that has said nothing for so long may be gone, even when the call that noticed had less time than usual.
_SUSPECT_S = 1.0
#: How often a block that looks lost is looked for meanwhile.
_RELOOK_S = 0.5


class Replay(enum.Enum):
    """May a call be sent again when nobody knows whether its first attempt was executed?"""

    SAME_ID = "yes, with the same request id"
    NEVER = "no: the master answers a repeated id with InProgress for 10 minutes (SetAttr, Symlink, Link)"


@dataclass(slots=True)
class Progress:
    """What became of a call's attempts; the caller keeps it to judge an error that a replay was answered with."""

    attempts: int = 0
    #: An attempt was sent and never answered, so it may have been executed.
    uncertain: bool = False


class _Connecting:
    __slots__ = ("done", "error")

    def __init__(self) -> None:
        self.done = trio.Event()
        self.error: TransportError | None = None


class MasterEndpoint:
    """One master's address and its connections, opened when they are needed."""

    def __init__(self, host: str, port: int, config: ClientConfig, world: World, nursery: trio.Nursery) -> None:
        self.host, self.port = host, port
        self.address = host_port(host, port)
        self._config = config
        self._world = world
        self._nursery = nursery
        self._connections: list[MasterConnection] = []
        self._connecting: _Connecting | None = None

    async def acquire(self) -> MasterConnection:
        """The least busy connection. Raises ConnectFailed, or DeadlineExceeded after ``connect_timeout_s``."""
        while True:
            stale_s = self._world.clock.monotonic_s() - _MAX_IDLE_S
            if len(self._connections) == 1:
                only = self._connections[0]
                if only.outstanding < _BUSY and not only.closed and only.last_used_s >= stale_s:
                    return only
            for connection in self._connections:
                if connection.last_used_s < stale_s and not connection.outstanding:
                    connection.fail(ConnectionLost(f"The idle connection to {self.address} was closed."))
            self._connections = [connection for connection in self._connections if not connection.closed]
            best = min(self._connections, key=lambda connection: connection.outstanding, default=None)
            full = len(self._connections) >= self._config.master_connections
            if best is not None and (best.outstanding < _BUSY or full or self._connecting is not None):
                return best
            if self._connecting is None:
                self._connecting = _Connecting()
                self._nursery.start_soon(self._connect, self._connecting)
            if best is not None:
                return best
            connecting = self._connecting
            await connecting.done.wait()
            if connecting.error is not None:
                raise type(connecting.error)(str(connecting.error)) from connecting.error

    async def _connect(self, connecting: _Connecting) -> None:
        # What those who wait are told when this is cancelled: the client is being closed.
        connecting.error = ConnectionLost(f"The client was closed while it connected to {self.address}.")
        try:
            with trio.fail_after(self._config.connect_timeout_s):
                stream = await self._world.net.connect(self.host, self.port)
            connection = MasterConnection(stream, self._world.clock)
            self._connections.append(connection)
            self._nursery.start_soon(connection.run)
            connecting.error = None
        except trio.TooSlowError:
            connecting.error = DeadlineExceeded(
                f"{self.address} did not accept a connection within {format_duration(self._config.connect_timeout_s)}."
            )
        except TransportError as error:
            connecting.error = error
        finally:
            self._connecting = None
            connecting.done.set()

    def close(self) -> None:
        """Drop every connection."""
        for connection in self._connections:
            connection.fail(ConnectionLost(f"The client of {self.address} was closed."))
        self._connections.clear()


class MasterCluster:
    """The masters of one cluster. Connections live in ``nursery``."""

    def __init__(self, config: ClientConfig, world: World, nursery: trio.Nursery, stats: Counter[str]) -> None:
        self._config = config
        self._world = world
        self._stats = stats
        self._endpoints = [MasterEndpoint(host, port, config, world, nursery) for host, port in config.masters]
        self._leader = self._endpoints[0] if len(self._endpoints) == 1 else None
        #: The next answer begins a time in which the leader may not know all workers yet.
        self._troubled = len(self._endpoints) > 1
        self._unsettled_until_s = -1.0

    @property
    def leader(self) -> str:
        """Address of the master that answered last, or all of them while none did."""
        return self._leader.address if self._leader else self._config.masters_text

    def close(self) -> None:
        for endpoint in self._endpoints:
            endpoint.close()

    async def wait_unsettled(self) -> bool:
        """Wait a moment, if the lead changed so lately that the leader may not have heard of every block yet; False,
        at once, when it must have."""
        left_s = self._unsettled_until_s - self._world.clock.monotonic_s()
        if left_s <= 0:
            return False
        await self._world.clock.sleep(min(left_s, _RELOOK_S))
        return True

    async def call(
        self,
        code: int,
        header: bytes,
        *,
        doing: str,
        replay: Replay = Replay.SAME_ID,
        progress: Progress | None = None,
        req_id: int | None = None,
        budget_s: float | None = None,
        give_up: Callable[[CurvfsError], bool] | None = None,
    ) -> bytes:
        """Call the leading master; the header of its successful answer.

        ``doing`` is what the call does, for messages: ``"stat /a/b"``. ``budget_s`` bounds everything, retries
        included (``config.retry_max_s``). ``give_up`` names failures that are not to be retried.

        Raises RemoteError for an error reply, TransportError when no master answered within the budget (or, under
        ``Replay.NEVER``, as soon as the outcome is unknown), RemoteProtocolError for a peer that is no master,
        InvalidRequest for what no server takes.
        """
        if len(header) > MAX_REQUEST_HEADER_BYTES:
            raise InvalidRequest(
                f"Cannot {doing}: that makes a request of {format_size(len(header))}, and servers take "
                f"{format_size(MAX_REQUEST_HEADER_BYTES)} at most; ask for less at a time."
            )
        config = self._config
        progress = Progress() if progress is None else progress
        req_id = self._world.random.request_id() if req_id is None else req_id
        policy = RetryPolicy(
            config.retry_max_s if budget_s is None else budget_s, config.retry_min_sleep_s, config.retry_max_sleep_s
        )
        retry = Retry(policy, self._world.clock, self._world.random)
        self._stats["master_calls"] += 1
        at_once = len(self._endpoints) > 1
        failure: CurvfsError | None = None
        while True:
            endpoints = [self._leader] if self._leader else self._endpoints
            try:
                return await self._round(endpoints, code, header, req_id, doing, progress, retry)
            except (TransportError, NotLeader, RemoteProtocolError) as error:
                self._troubled = True
                if len(self._endpoints) > 1:
                    self._leader = None
                if (replay is Replay.NEVER and progress.uncertain) or (give_up is not None and give_up(error)):
                    raise self._explain(error, doing) from error
                # An attempt that the end of the budget cut short says less than the one before it.
                if failure is None or not isinstance(error, DeadlineExceeded) or retry.remaining_s():
                    failure = error
            except RemoteError as error:
                if not self._passing(error, progress, replay) or (give_up is not None and give_up(error)):
                    raise
                failure = error
            self._stats["master_retries"] += 1
            if at_once and len(endpoints) == 1:
                at_once = False  # the remembered leader failed: ask everybody without sleeping first
                continue
            sleep_s = retry.next_sleep_s()
            if sleep_s is None:
                raise self._explain(failure, doing) from failure
            await self._world.clock.sleep(sleep_s)

    async def call_many(
        self, code: int, headers: Sequence[bytes], *, doing: Sequence[str]
    ) -> list[bytes | CurvfsError]:
        """The same call many times over, pipelined on one connection; for calls that change nothing.

        What the fast path cannot answer (no leader yet, a lost connection) is called again one by one, at once.
        """
        pending: list[PendingCall | None] = [None] * len(headers)
        replies: list[Reply | None] = [None] * len(headers)
        leader = self._leader
        if leader is not None:
            self._stats["master_calls"] += len(headers)
            with trio.move_on_after(self._config.rpc_timeout_s):
                try:
                    # All on one: a caller beside a busy thread pays for every turn that a connection takes.
                    connection = await leader.acquire()
                    for index, header in enumerate(headers):
                        pending[index] = await connection.post(code, header, self._world.random.request_id())
                    for index, call in enumerate(pending):
                        replies[index] = await call.wait() if call is not None else None
                except (TransportError, RemoteProtocolError):
                    self._troubled = True
        results: list[bytes | CurvfsError | None] = [None] * len(headers)
        again: list[int] = []
        for index, reply in enumerate(replies):
            if reply is None:
                call = pending[index]
                reply = call.reply if call is not None else None
            if reply is not None and leader is not None:
                try:
                    results[index] = self._accept(reply, leader, doing[index])
                except CurvfsError as error:
                    results[index] = error
            if results[index] is None or isinstance(results[index], NotLeader | NoAvailableWorker):
                again.append(index)

        async def one(index: int) -> None:
            try:
                results[index] = await self.call(code, headers[index], doing=doing[index])
            except CurvfsError as error:
                results[index] = error

        if again:
            async with trio.open_nursery() as nursery:
                for index in again:
                    nursery.start_soon(one, index)
        return [result for result in results if result is not None]

    async def _round(
        self,
        endpoints: Sequence[MasterEndpoint],
        code: int,
        header: bytes,
        req_id: int,
        doing: str,
        progress: Progress,
        retry: Retry,
    ) -> bytes:
        """One attempt: at one master, or at all at once, where the first that leads decides."""
        if len(endpoints) == 1:
            reply = await self._attempt(endpoints[0], code, header, req_id, progress, retry)
            return self._accept(reply, endpoints[0], doing)
        failures: list[CurvfsError] = []
        winner: tuple[Reply, MasterEndpoint] | None = None

        async def ask(endpoint: MasterEndpoint) -> None:
            nonlocal winner
            try:
                reply = await self._attempt(endpoint, code, header, req_id, progress, retry)
                if isinstance(reply.error, NotLeader):
                    raise reply.error
            except (TransportError, NotLeader, RemoteProtocolError) as error:
                failures.append(error)
            else:
                winner = winner or (reply, endpoint)
                nursery.cancel_scope.cancel()

        async with trio.open_nursery() as nursery:
            for endpoint in endpoints:
                nursery.start_soon(ask, endpoint)
        if winner is not None:
            return self._accept(*winner, doing)
        # What says most: that the cluster is there but has no leader, else that somebody did not answer in time.
        failures.sort(key=lambda error: (not isinstance(error, NotLeader), isinstance(error, ConnectFailed)))
        raise failures[0]

    async def _attempt(
        self, endpoint: MasterEndpoint, code: int, header: bytes, req_id: int, progress: Progress, retry: Retry
    ) -> Reply:
        timeout_s = min(self._config.rpc_timeout_s, retry.remaining_s())
        connection: MasterConnection | None = None
        pending: PendingCall | None = None
        progress.attempts += 1
        with trio.CancelScope(deadline=trio.current_time() + timeout_s):
            connection = await endpoint.acquire()
            pending = await connection.post(code, header, req_id)
            try:
                reply = await pending.wait()
                if isinstance(reply.error, Unsupported) and _WORKERS_WORDS in reply.error.text:
                    raise NotAMaster(f"{endpoint.address} is the port of a worker.")
                return reply
            except (TransportError, RemoteProtocolError):
                progress.uncertain = True
                raise
        late = DeadlineExceeded(f"The master {endpoint.address} did not answer within {format_duration(timeout_s)}.")
        if pending is not None:
            progress.uncertain = True
        whole_s = self._config.rpc_timeout_s
        if connection is not None and (timeout_s >= whole_s or connection.silent_s >= min(_SUSPECT_S, whole_s)):
            connection.fail(late)  # it may be dead, and the same id cannot be sent on it again
        raise late

    def _accept(self, reply: Reply, endpoint: MasterEndpoint, doing: str) -> bytes:
        if reply.error is not None:
            if not isinstance(reply.error, NotLeader):
                self._settle(endpoint)
            raise in_context(reply.error, f"Cannot {doing} on {endpoint.address}")
        self._settle(endpoint)
        return reply.header

    def _settle(self, endpoint: MasterEndpoint) -> None:
        if self._troubled:
            self._troubled = False
            self._unsettled_until_s = self._world.clock.monotonic_s() + _UNSETTLED_S
        self._leader = endpoint

    def _passing(self, error: RemoteError, progress: Progress, replay: Replay) -> bool:
        """Error replies that a moment's wait may turn into an answer."""
        if isinstance(error, InProgress):
            return progress.uncertain and replay is Replay.SAME_ID
        if isinstance(error, OutOfSpace | NoAvailableWorker) and error.kind != _DISK_FULL_KIND:
            return self._world.clock.monotonic_s() < self._unsettled_until_s
        return False

    def _explain(self, error: CurvfsError, doing: str) -> CurvfsError:
        if isinstance(error, NotLeader):
            return NotLeader(
                f"Cannot {doing}: none of the masters {self._config.masters_text} leads; "
                "wait until they have elected a leader, or check that a majority of them is up.",
                kind=error.kind,
                text=error.text,
            )
        if isinstance(error, NotAMaster):
            return NotAMaster(
                f"Cannot {doing}: {str(error).rstrip('.')}, not of a master; give the master's port "
                f"({DEFAULT_MASTER_PORT} unless the cluster's settings say otherwise)."
            )
        if isinstance(error, RemoteProtocolError):
            return RemoteProtocolError(
                f"Cannot {doing}: what answers at {self._config.masters_text} does not speak Curvine's protocol "
                f"({_reason(error)}); check the address."
            )
        if not isinstance(error, TransportError):
            return error
        hint = "is the server running?"
        if all(host in ("localhost", "::1") or host.startswith("127.") for host, _ in self._config.masters):
            hint += " Start one with `curvfs serve DIR`."
        return type(error)(
            f"Cannot {doing}: no Curvine master answers at {self._config.masters_text} ({_reason(error)}); {hint}"
        )


_DISK_FULL_KIND = 17
#: How a worker answers what only a master does.
_WORKERS_WORDS = "Unsupported request type"


def in_context(error: RemoteError, doing: str) -> RemoteError:
    """An error reply, told with what it answered."""
    return from_reply(error.kind, error.text, doing=doing)


def _reason(error: CurvfsError) -> str:
    text = str(error).rstrip(".")
    return text[:1].lower() + text[1:] if text[:2].istitle() else text
