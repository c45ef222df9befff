"""TCP between simulated machines.

A connection is two byte streams with a bounded window each: a sender waits when its peer does not read. Bytes arrive in
order after the delay of the link between the two machines; a read may get less than what has arrived. A *cut* link
loses everything while it is cut, and TCP makes up for it once it is healed; a *half-open* connection never recovers and
nobody is told. A killed process's connections end as the kernel ends them: in order when all was read, else by a reset.
A machine that loses power tells nobody; when it is back, it answers what is sent on its old connections with a reset.
"""

from __future__ import annotations

import errno
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

import trio

from curvfs.buffers import Buffer, bytes_of
from curvfs.errors import ConnectionLost
from curvfs.network import (
    Listener,
    Network,
    Stream,
    cannot_connect,
    cannot_listen,
    cannot_resolve,
    check_connect_port,
    check_listen_port,
)
from curvfs.simcore import SimProcess, Universe
from curvfs.world import Disk, Random

_LOCAL_NAMES = ("localhost", "127.0.0.1", "::1")
_ANY_NAMES = ("0.0.0.0", "::", "")
_FIRST_FREE_PORT = 40000
_BACKLOG = 1024
_SEGMENT_BYTES = 64 * 1024
#: When a connect is tried again while nobody answers, and when it gives up (Linux: 1, 3, 7, ... 127 s).
_SYN_RETRIES_S = (1, 2, 4, 8, 16, 32, 64)


class _Link:
    """The way between two machines (or within one)."""

    def __init__(self, random: Random, *, local: bool) -> None:
        self._random = random
        self._base_s = random.uniform(5e-6, 5e-5) if local else random.uniform(5e-5, 2e-3)
        self.cut = False

    def delay_s(self) -> float:
        return self._base_s * self._random.uniform(1, 3)


class _Pipe:
    """One direction of a connection."""

    def __init__(self, capacity_bytes: int) -> None:
        self.capacity_bytes = capacity_bytes
        self.segments: deque[tuple[float, memoryview]] = deque()
        self.held_bytes = 0
        self.last_arrival_s = 0.0
        #: When the end of the stream arrives, once the sender has closed.
        self.end_s: float | None = None
        self.readers = trio.lowlevel.ParkingLot()
        self.writers = trio.lowlevel.ParkingLot()

    def put(self, data: memoryview, arrival_s: float) -> None:
        self.last_arrival_s = max(self.last_arrival_s, arrival_s)
        self.segments.append((self.last_arrival_s, data))
        self.held_bytes += len(data)
        self.readers.unpark_all()

    def drop_unarrived(self, now_s: float) -> None:
        while self.segments and self.segments[-1][0] > now_s:
            self.held_bytes -= len(self.segments.pop()[1])

    def wake(self) -> None:
        self.readers.unpark_all()
        self.writers.unpark_all()


@dataclass(slots=True)
class _Connection:
    """What both ends share."""

    link: _Link
    half_open: bool = False


class SimStream(Stream):
    """One end of a connection."""

    def __init__(self, process: SimProcess, disk: Disk, peer: str, connection: _Connection, incoming: _Pipe) -> None:
        self._process = process
        self._disk = disk
        self._connection = connection
        self._incoming = incoming
        self._random = process.universe.rng(f"stream/{process!r}/{process.universe.trace.count}")
        self._other: SimStream = self
        self._sending = self._receiving = False
        self.peer = peer
        #: Why this end is of no use any more, as the kernel would say it.
        self.broken: str | None = None
        #: Closed by its owner, or gone with it.
        self.gone = False
        self.on_gone: Callable[[SimStream], None] = lambda stream: None

    def join(self, other: SimStream) -> None:
        self._other, other._other = other, self

    @property
    def is_half_open(self) -> bool:
        """The other end does not hear us any more, and nobody told us: the bytes vanish, or so did its reset."""
        untold = self._other.gone and self._incoming.end_s is None and self.broken is None
        return self._connection.half_open or untold

    # --------------------------------------------------------------------------------------------------- the calls

    async def send(self, *buffers: Buffer) -> None:
        views = [bytes_of(buffer) for buffer in buffers]
        size_bytes = sum(map(len, views))
        self._process.enter("send", f"{size_bytes} to {self.peer}")
        await self._process.turn()
        self._maybe_fault(size_bytes)
        with self._one("_sending"):
            for view in views:
                await self._send_all(view)
        self._reset_if_due()

    async def send_file(self, fd: int, offset_bytes: int, count_bytes: int, prefix: Buffer = b"") -> None:
        head = bytes_of(prefix)
        self._process.enter("send_file", f"{len(head) + count_bytes} to {self.peer}")
        await self._process.turn()
        self._maybe_fault(len(head) + count_bytes)
        with self._one("_sending"):
            await self._send_all(head)
            while count_bytes:
                piece = bytearray(min(count_bytes, _SEGMENT_BYTES))
                try:
                    count = self._disk.preadv(fd, [piece], offset_bytes)
                except OSError as error:
                    raise self._lost(error.strerror or str(error)) from error
                if count == 0:
                    raise ConnectionLost(f"A file ended {count_bytes} bytes early while it was sent to {self.peer}.")
                await self._send_all(memoryview(piece)[:count])
                offset_bytes += count
                count_bytes -= count
        self._reset_if_due()

    async def recv_into(self, buffer: memoryview) -> int:
        self._process.enter("recv", f"{buffer.nbytes} from {self.peer}")
        await self._process.turn()
        with self._one("_receiving"):
            count = await self._recv(bytes_of(buffer)) if buffer.nbytes else 0
        self._process.note(f"received {count} from {self.peer}")
        return count

    async def aclose(self) -> None:
        if self._process.alive and not self.gone:
            self._process.enter("aclose", self.peer)
            self.leave()
        await trio.lowlevel.checkpoint()

    # --------------------------------------------------------------------------------------------------- machinery

    def _lost(self, reason: str) -> ConnectionLost:
        return ConnectionLost(f"The connection to {self.peer} was lost: {reason}.")

    def _one(self, what: str) -> _Busy:
        if getattr(self, what):
            raise trio.BusyResourceError(f"another task is already {what[1:]} on this stream")
        return _Busy(self, what)

    def _check(self) -> None:
        self._process.check_alive()
        if self.gone:
            raise self._lost("it was closed on this side")

    def _now_s(self) -> float:
        return trio.current_time()

    def _maybe_fault(self, count_bytes: int) -> None:
        faults, machine = self._process.universe.faults, self._process.machine
        peer_machine = self._other._process.machine
        for where in dict.fromkeys((machine, peer_machine)):
            if faults.strikes("half_open", faults.half_open, where):
                self._process.note("half-open from here")
                self._connection.half_open = True
                return
        for where in dict.fromkeys((machine, peer_machine)):
            if faults.strikes("reset", faults.reset, where):
                self._reset_after = self._random.randint(0, count_bytes)
                return

    #: Bytes until an injected reset; None: none is due.
    _reset_after: int | None = None

    async def _send_all(self, view: memoryview) -> None:
        outgoing = self._other._incoming
        while len(view):
            self._check()
            self._reset_if_due()
            if self.broken is not None:
                raise self._lost(self.broken)
            if self._other.gone and not self._blocked():
                self.broken = "Connection reset by peer"  # nobody is there to take it
                self._incoming.wake()
                if self._random.random() < 0.5:
                    return  # and we learn of that later
                raise self._lost(self.broken)
            room = outgoing.capacity_bytes - outgoing.held_bytes
            if room <= 0:
                await outgoing.writers.park()
                continue
            count = min(room, len(view), _SEGMENT_BYTES)
            if self._reset_after is not None:
                count = min(count, self._reset_after)
                self._reset_after -= count
            if count:
                outgoing.put(memoryview(bytes(view[:count])), self._now_s() + self._delay_s())
            view = view[count:]

    def _reset_if_due(self) -> None:
        if self._reset_after == 0:
            self._reset_after = None
            self.reset("Connection reset by peer", overtaking=self._random.random() < 0.5)

    def _delay_s(self) -> float:
        faults = self._process.universe.faults
        delay_s = self._connection.link.delay_s()
        if faults.strikes("stall", faults.stall, self._process.machine):
            delay_s += self._random.uniform(0, faults.stall_s)
        return delay_s

    def _blocked(self) -> bool:
        """Whether nothing gets through for now."""
        return self._connection.link.cut or self._connection.half_open

    async def _recv(self, buffer: memoryview) -> int:
        incoming = self._incoming
        while True:
            self._check()
            due_s = None
            if incoming.segments:
                due_s = incoming.segments[0][0]
            elif incoming.end_s is not None:
                due_s = incoming.end_s
            if due_s is not None and due_s <= self._now_s() and not self._blocked():
                return self._take(buffer)
            if self.broken is not None and (not incoming.segments or self._blocked()):
                raise self._lost(self.broken)
            with trio.CancelScope() as scope:
                if due_s is not None and not self._blocked():
                    scope.deadline = due_s
                await incoming.readers.park()

    def _take(self, buffer: memoryview) -> int:
        """Bytes that have arrived, maybe not all of them; 0 at the end."""
        incoming, now_s, done = self._incoming, self._now_s(), 0
        limit = len(buffer)
        if limit > 1 and self._random.random() < 0.25:
            limit = self._random.randrange(1, limit)
        while done < limit and incoming.segments and incoming.segments[0][0] <= now_s:
            arrival_s, segment = incoming.segments.popleft()
            piece = segment[: limit - done]
            buffer[done : done + len(piece)] = piece
            done += len(piece)
            incoming.held_bytes -= len(piece)
            if len(piece) < len(segment):
                incoming.segments.appendleft((arrival_s, segment[len(piece) :]))
        if done:
            incoming.writers.unpark_all()
        return done

    def reset(self, reason: str, *, overtaking: bool = True) -> None:
        """Break the connection; the other end hears of it unless nothing gets through. Bytes on their way there are
        lost when the reset overtakes them."""
        self._process.note(f"reset with {self.peer}: {reason}")
        if self.broken is None:
            self.broken = reason
        self._incoming.wake()
        self._other._incoming.wake()
        if not self._blocked() and self._other.broken is None:
            self._other.broken = "Connection reset by peer"
            if overtaking:
                self._other._incoming.drop_unarrived(self._now_s())

    def leave(self, *, silently: bool = False) -> None:
        """This end is closed: in order, or by a reset when bytes are left unread, or without a word."""
        if self.gone:
            return
        self.gone = True
        outgoing = self._other._incoming
        if silently:
            self._connection.half_open = True
        elif self._incoming.segments and self.broken is None:
            self.reset("closed with unread bytes")
        elif self.broken is None:
            outgoing.end_s = max(outgoing.last_arrival_s, self._now_s() + self._connection.link.delay_s())
        self._incoming.wake()
        outgoing.wake()
        self.on_gone(self)

    def healed(self, machine_back: bool) -> None:
        """The link works again, or the machine at the other end is back: what waited goes on."""
        if machine_back and self._other.gone:
            self._connection.half_open = False
        if self._other.gone and self._other._incoming.segments and not self._blocked():
            self.broken = self.broken or "Connection reset by peer"  # the retransmission is answered by a reset
        self._incoming.wake()
        self._other._incoming.wake()


class _Busy:
    """Marks one direction of a stream as in use."""

    def __init__(self, stream: SimStream, what: str) -> None:
        self._stream, self._what = stream, what

    def __enter__(self) -> None:
        setattr(self._stream, self._what, True)

    def __exit__(self, *exc: object) -> None:
        setattr(self._stream, self._what, False)


class SimListener(Listener):
    """A listening port of a simulated machine."""

    def __init__(self, process: SimProcess, network: SimNetwork, host: str, port: int) -> None:
        self._process = process
        self.network = network
        self.host = host
        self.port = port
        self.backlog: deque[SimStream] = deque()
        self.accepters = trio.lowlevel.ParkingLot()
        self.closed = False

    async def accept(self) -> Stream:
        self._process.enter("accept", str(self.port))
        await self._process.turn()
        while True:
            self._process.check_alive()
            if self.closed:
                raise ConnectionLost(f"The listener on {self.host}:{self.port} failed: it was closed.")
            if self.backlog:
                stream = self.backlog.popleft()
                self._process.note(f"accepted {stream.peer}")
                return stream
            await self.accepters.park()

    async def aclose(self) -> None:
        if self._process.alive and not self.closed:
            self._process.enter("aclose", f"listener {self.port}")
            self.leave()
        await trio.lowlevel.checkpoint()

    def leave(self, *, silently: bool = False) -> None:
        self.closed = True
        self.network.machine.listeners.pop(self.port, None)
        while self.backlog:
            stream = self.backlog.popleft()
            if not silently:
                stream.reset("nobody accepted it")
            stream.leave(silently=silently)
        self.accepters.unpark_all()


@dataclass(slots=True, eq=False)
class SimMachineNet:
    """What the processes of one machine share: its name, its ports, whether it has power."""

    name: str
    listeners: dict[int, SimListener] = field(default_factory=dict)
    last_port: int = _FIRST_FREE_PORT
    powered: bool = True

    def free_port(self) -> int:
        self.last_port += 1
        while self.last_port in self.listeners:
            self.last_port += 1
        return self.last_port


class SimInternet:
    """All machines and the links between them."""

    def __init__(self, universe: Universe) -> None:
        self._universe = universe
        self.machines: dict[str, SimMachineNet] = {}
        self._links: dict[tuple[str, str], _Link] = {}
        self.streams: dict[SimStream, None] = {}

    def link(self, one: str, other: str) -> _Link:
        key = (min(one, other), max(one, other))
        if key not in self._links:
            self._links[key] = _Link(self._universe.rng(f"link/{key[0]}/{key[1]}"), local=one == other)
        return self._links[key]

    def set_cut(self, one: str, other: str, cut: bool) -> None:
        """Cut the link between two machines, or heal it."""
        link = self.link(one, other)
        link.cut = cut
        self._universe.note(f"{one}-{other} {'cut' if cut else 'healed'}")
        if cut:
            self._universe.faults.fired["partition"] += 1
        for stream in list(self.streams):
            if stream._connection.link is link and not cut:
                stream.healed(machine_back=False)

    def power(self, name: str, on: bool) -> None:
        """Say that a machine is without power, or has it again."""
        self.machines[name].powered = on
        for stream in list(self.streams):
            if on and stream._other._process.machine == name:
                stream.healed(machine_back=True)


class SimNetwork(Network):
    """See :class:`~curvfs.world.Network`: one process's view of the :class:`SimInternet`."""

    def __init__(self, process: SimProcess, disk: Disk, internet: SimInternet, machine: SimMachineNet) -> None:
        self._process = process
        self._disk = disk
        self._internet = internet
        self.machine = machine
        self._random = process.universe.rng(f"net/{process!r}")
        self._listeners: dict[SimListener, None] = {}
        self._streams: dict[SimStream, None] = {}
        process.on_death.append(self._die)

    def hostname(self) -> str:
        return self.machine.name

    def open_streams(self, *, half_open: bool | None = None) -> list[str]:
        """The peers of the connections that this process has not closed: a leak check. ``half_open``: only those of
        which nobody here can know that they are dead, or only the others."""
        return [stream.peer for stream in self._streams if half_open in (None, stream.is_half_open)]

    def open_ports(self) -> list[int]:
        """The ports that this process listens on."""
        return [listener.port for listener in self._listeners if not listener.closed]

    async def connect(self, host: str, port: int) -> Stream:
        self._process.enter("connect", f"{host}:{port}")
        await self._process.turn()
        check_connect_port(host, port)
        target = self._internet.machines.get(self.machine.name if host in _LOCAL_NAMES else host)
        if target is None:
            raise cannot_resolve(host, "Name or service not known")
        link = self._internet.link(self.machine.name, target.name)
        for wait_s in _SYN_RETRIES_S:
            await trio.sleep_until(trio.current_time() + link.delay_s())
            self._process.check_alive()
            listener = target.listeners.get(port)
            full = listener is not None and len(listener.backlog) >= _BACKLOG
            if not link.cut and target.powered and not full:
                break
            await trio.sleep_until(trio.current_time() + wait_s)
        else:
            raise cannot_connect(host, port, "Connection timed out")
        faults = self._process.universe.faults
        if listener is not None and listener.host in _LOCAL_NAMES and target is not self.machine:
            listener = None  # bound to the loopback address of another machine
        if listener is None or faults.strikes("refuse", faults.refuse, target.name):
            raise cannot_connect(host, port, "Connection refused")
        stream = self._join(listener, f"{host}:{port}", link)
        try:
            await trio.sleep_until(trio.current_time() + link.delay_s())
            self._process.check_alive()
        except BaseException:
            stream.leave()
            raise
        return stream

    def _join(self, listener: SimListener, peer: str, link: _Link) -> SimStream:
        theirs = listener.network
        capacities = [self._random.choice((1 << 14, 1 << 16, 1 << 18, 1 << 20)) for _ in range(2)]
        connection = _Connection(link)
        ours_end = SimStream(self._process, self._disk, peer, connection, _Pipe(capacities[0]))
        their_name = f"{self.machine.name}:{self.machine.free_port()}"
        their_end = SimStream(theirs._process, theirs._disk, their_name, connection, _Pipe(capacities[1]))
        ours_end.join(their_end)
        for network, end in ((self, ours_end), (theirs, their_end)):
            network._streams[end] = None
            self._internet.streams[end] = None
            end.on_gone = network._forget
        listener.backlog.append(their_end)
        listener.accepters.unpark()
        return ours_end

    def _forget(self, stream: SimStream) -> None:
        self._streams.pop(stream, None)
        if stream._other.gone:
            self._internet.streams.pop(stream, None)
            self._internet.streams.pop(stream._other, None)

    async def listen(self, host: str, port: int) -> Listener:
        self._process.enter("listen", f"{host}:{port}")
        await self._process.turn()
        check_listen_port(host, port)
        if host not in (*_LOCAL_NAMES, *_ANY_NAMES, self.machine.name):
            raise cannot_listen(host, port, "Cannot assign requested address", errno.EADDRNOTAVAIL)
        if port == 0:
            port = self.machine.free_port()
        if port in self.machine.listeners:
            raise cannot_listen(host, port, "Address already in use", errno.EADDRINUSE)
        listener = SimListener(self._process, self, host, port)
        self.machine.listeners[port] = listener
        self._listeners[listener] = None
        return listener

    def _die(self, silently: bool) -> None:
        for listener in list(self._listeners):
            if not listener.closed:
                listener.leave(silently=silently)
        for stream in list(self._streams):
            stream.leave(silently=silently)
