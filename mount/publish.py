"""Publishing below KV prefixes: private files come in, sealed objects come out, by rename or link.

* A new file, and every truncating open of an unsealed one, is a private file (:mod:`mount.private`).
* Rename or link to another name publishes: one rename in the store, from the staging name to the target. A reader sees
  the whole object or nothing.
* A private file that nobody renames is *materialised* under its own name some time after its last close: it replaces
  an ordinary file, never a sealed one.

Which file a rename publishes: of the private files of that name the newest without an open writable descriptor; if
there is none, one whose writable descriptors were all flushed or synced since their last write (at once when it is the
only one, else after waiting for its release); if there is none, the store's file of that name; else EBUSY. Of several
that would do, it is rather one that the renaming thread opened, or its process: what others have closed there need not
be whole, for they may have been killed. So what the renaming thread holds open goes before what was closed when that
was flushed, and makes for EBUSY when it was not and nothing else there is the thread's own, or its process's; and what
a dead writer has left is not published at all once somebody has truncated it.
"""

from __future__ import annotations

import errno
import logging
import stat as statmod
from collections import Counter
from collections.abc import Iterator
from contextlib import AbstractAsyncContextManager, contextmanager
from typing import Protocol
from weakref import WeakValueDictionary

import trio

from curvfs.api import CurvineFileSystem, FileStatus, FileWriter
from curvfs.errors import CurvfsError, FileExists_, NotFound, TransportError
from curvfs.quicklock import QuickLock
from mount.handles import Handles, NodeWriter
from mount.inodes import Node, NodeTable
from mount.private import Place, PrivateFile, Privates
from mount.readers import Readers
from mount.scratch import Scratch
from mount.seal import BORN_XATTR, SEALED_XATTR, born_value, is_sealed, must_seal_first
from mount.stock import Stock

log = logging.getLogger("curvfs.mount")

#: How long a rename waits for the release of a descriptor that was flushed already.
RELEASE_WAIT_S = 1.0
#: How long a file made by a truncating open waits for the thread that opens it.
RESERVATION_S = 1.0
#: Who opened a private file for writing, as a thread that renames its name sees it: nobody who lives, another process,
#: another thread of its own process, or itself.
_GONE, _FOREIGN, _PROCESS, _OWN = range(4)
#: How long a writer may take between its close and its rename before what it closed counts as left over.
LEFT_OVER_S = 60.0
#: How often what could not be deleted is tried again.
DELETE_AGAIN_S = 5.0


class KernelSide(Protocol):
    """What publishing asks of the kernel."""

    def write_back(self, node_id: int) -> None:
        """Have the kernel write the dirty pages of a node back and drop its page cache. Blocks; call in a thread."""
        ...

    def process_of(self, thread_id: int) -> int | None:
        """The process of a thread; None when it has ended, or is none that we can see."""
        ...


class PlaceLocks:
    """A lock per name, shared by rename, unlink, link and materialising."""

    def __init__(self) -> None:
        self._locks: WeakValueDictionary[Place, QuickLock] = WeakValueDictionary()

    def hold(self, *places: Place) -> AbstractAsyncContextManager[None]:
        locks = []
        for place in sorted(set(places), key=lambda place: (place[0].id, place[1])):
            lock = self._locks.get(place)
            if lock is None:
                lock = self._locks[place] = QuickLock()
            locks.append(lock)
        return locks[0] if len(locks) == 1 else _AllOf(locks)

    async def wait_free(self, place: Place) -> None:
        """Wait until nobody who holds this name is under way."""
        lock = self._locks.get(place)
        if lock is not None and lock.locked():
            async with lock:
                pass


class _AllOf:
    """Several locks, taken in the order given."""

    def __init__(self, locks: list[QuickLock]) -> None:
        self._locks = locks
        self._taken = 0

    async def __aenter__(self) -> None:
        try:
            for lock in self._locks:
                await lock.__aenter__()
                self._taken += 1
        except BaseException:
            await self.__aexit__()
            raise

    async def __aexit__(self, *exc: object) -> None:
        for lock in reversed(self._locks[: self._taken]):
            await lock.__aexit__()


class Publisher:
    """Makes, publishes, materialises and drops private files; keeps the staging directories."""

    def __init__(
        self,
        fs: CurvineFileSystem,
        table: NodeTable,
        handles: Handles,
        readers: Readers,
        kernel: KernelSide,
        *,
        grace_s: float,
    ) -> None:
        self._fs = fs
        self._world = fs.world
        self._table = table
        self._handles = handles
        self._readers = readers
        self._kernel = kernel
        self._grace_s = grace_s
        self._scratches: dict[Node | str, Scratch] = {}
        self._stocks: dict[Scratch, Stock] = {}
        self.privates = Privates()
        self.locks = PlaceLocks()
        #: Names that a link left behind on this mount: the file is published elsewhere.
        self.aliases: dict[Place, Node] = {}
        self.counters: Counter[str] = Counter()
        #: What was published a moment ago, from which name, and when; oldest first.
        self._left_place: dict[Node, tuple[Place, float]] = {}
        #: Directories in which the kernel waits for a rename of ours, and for how many.
        self._renaming: Counter[Node] = Counter()
        #: Files of ours in staging that should be gone, but the store did not answer; and when to try again.
        self._left: list[str] = []
        self._again_s = 0.0

    # ---------------------------------------------------------------------------------------------------- staging

    def scratch(self, base: Node | str) -> Scratch:
        """The staging directory below a KV prefix, or below the mounted directory."""
        scratch = self._scratches.get(base)
        if scratch is None:
            if isinstance(base, Node):
                base.pins += 1
                node = base
                scratch = Scratch(self._fs, lambda: self._table.path(node))
            else:
                path = base
                scratch = Scratch(self._fs, lambda: path)
            self._scratches[base] = scratch
        return scratch

    def scratches(self) -> list[Scratch]:
        return list(self._scratches.values())

    def orphanage(self, parent: Node) -> Scratch:
        """Where a file of this directory lies while it is open and has no name."""
        return self.scratch(self._table.prefix_of(parent) or self._table.root)

    # ------------------------------------------------------------------------------------------------------- make

    def make_now(
        self, parent: Node, name: str, *, mode: int, owner: str, group: str, reserved_for: int | None = None
    ) -> PrivateFile | None:
        """:meth:`make`, if a file was made ahead."""
        scratch = self._scratch_for(parent)
        stock = self._stocks.get(scratch)
        if stock is None:
            stock = self._stocks[scratch] = Stock(self._fs, scratch)
        stream = stock.take()
        if stream is None:
            return None
        stream.give_attributes(
            mode=mode,
            owner=owner,
            group=_group_in(parent, group),
            xattrs={BORN_XATTR: born_value(parent.file_id, name)},
            now_ms=self._world.clock.time_ms(),
        )
        return self._adopt(stream, scratch, (parent, name), reserved_for)

    async def make(
        self, parent: Node, name: str, *, mode: int, owner: str, group: str, reserved_for: int | None = None
    ) -> PrivateFile:
        """A new private file for a name. With ``reserved_for`` only that thread sees it until it has opened it."""
        scratch = self._scratch_for(parent)
        born = {BORN_XATTR: born_value(parent.file_id, name)}
        stream = await self._create(scratch, born, mode, owner, _group_in(parent, group))
        return self._adopt(stream, scratch, (parent, name), reserved_for)

    def _scratch_for(self, parent: Node) -> Scratch:
        base = self._table.prefix_of(parent)
        assert base is not None
        return self.scratch(base)

    def _adopt(self, stream: FileWriter, scratch: Scratch, place: Place, reserved_for: int | None) -> PrivateFile:
        node = self._table.add(stream.status)
        node.away = (scratch, stream.status.name)
        node.writer = NodeWriter(self._fs, self._table, self._readers, node)
        node.writer.adopt(stream)
        now_s = self._world.clock.monotonic_s()
        private = PrivateFile(node, place, reserved_for, now_s + RESERVATION_S, None if reserved_for is None else now_s)
        self.privates.add(private)
        if reserved_for is None:
            self.supersede(private)
        return private

    def supersede(self, private: PrivateFile) -> None:
        """A truncating open has got its file: what was under the name before is no longer what it stands for. It can
        still be published by whoever wrote it, but does not get the name by itself."""
        for other in self.privates.everything_at(private.place):
            if other is not private and other.reserved_for is None:
                other.superseded = True
                private.supersedes = other.supersedes if private.supersedes is None else private.supersedes

    def renew_reservation(self, private: PrivateFile) -> None:
        """The thread that a file was made for has looked it up: it is about to open it."""
        private.reserved_until_s = self._world.clock.monotonic_s() + RESERVATION_S

    async def _create(self, scratch: Scratch, born: dict[str, bytes], mode: int, owner: str, group: str) -> FileWriter:
        await scratch.ensure()
        for attempt in range(2):
            path = f"{scratch.path}/{scratch.next_name()}"
            try:
                return await self._fs.create(path, mode=mode, owner=owner, group=group, xattrs=born, unique_name=True)
            except NotFound:
                if attempt:
                    raise
                await scratch.ensure(again=True)  # somebody removed the directory
        raise AssertionError

    # ---------------------------------------------------------------------------------------------------- publish

    async def choose(self, place: Place, thread_id: int) -> PrivateFile | None:
        """The private file that a thread's rename of this name publishes; None when it is the store's file of that
        name.

        Raises EBUSY when what would be published is not what the thread, or its process, is writing there. Call with
        the name locked.
        """
        deadline_s = self._world.clock.monotonic_s() + RELEASE_WAIT_S
        while True:
            privates = self.privates.at(place)
            if len(privates) == 1 and self._is_plain(privates[0]):
                return privates[0]
            near = self._nearness(privates, thread_id)
            # What a killed writer has left is not published once somebody has begun anew.
            candidates = [one for one in privates if not one.has_failed and not (one.superseded and near[one] == _GONE)]
            closed = [private for private in candidates if not private.is_open_for_write]
            flushed = [private for private in candidates if not self.has_unflushed(private.node)]
            own = [
                private
                for private in flushed
                if near[private] == _OWN and (private in closed or private.was_flushed or private.was_synced)
            ]
            # What a thread has written and holds open goes before what was closed there, by whomever, before.
            held = own[-1] if own and own[-1] not in closed else None
            best = max(reversed(closed or flushed), key=lambda private: near[private], default=None)
            chosen = held or best
            if any(near[one] > _FOREIGN and self.has_unflushed(one.node) for one in candidates):
                is_own = any(near[one] == _OWN and self.has_unflushed(one.node) for one in candidates)
                if chosen is None and await self._is_left(candidates[-1], age_s=0 if is_own else LEFT_OVER_S):
                    raise self.busy()
                if chosen is not None and near[chosen] <= _FOREIGN:
                    raise self.busy()
            if chosen is None or chosen in closed:
                return chosen
            patience_s = deadline_s - self._world.clock.monotonic_s()
            if len(candidates) == 1 or patience_s <= 0 or (held is not None and held.was_synced):
                return chosen
            with trio.move_on_after(patience_s):
                await chosen.released.wait()

    def _is_plain(self, private: PrivateFile) -> bool:
        """Is this a file that a rename publishes whoever asks for it, when it is the only one?"""
        return not (private.has_failed or private.superseded or self.has_unflushed(private.node))

    def _nearness(self, privates: list[PrivateFile], thread_id: int) -> dict[PrivateFile, int]:
        """How near each of the private files of a name is to the thread that renames it."""
        process_of = self._kernel.process_of
        process_id = process_of(thread_id)

        def nearness(private: PrivateFile) -> int:
            if thread_id in private.openers and thread_id != 0:
                return _OWN
            if 0 in private.openers or process_id is None:
                return _FOREIGN  # threads that we cannot see, in another name space of processes
            found = {process_of(opener) for opener in private.openers}
            return _GONE if found == {None} else _PROCESS if process_id in found else _FOREIGN

        return {private: nearness(private) for private in privates}

    def has_unflushed(self, node: Node) -> bool:
        """Has something been written through a descriptor that was neither flushed nor synced since?"""
        return any(handle.unflushed for handle in self._handles.of(node))

    def busy(self) -> CurvfsError:
        return CurvfsError(
            "A descriptor with unflushed writes is open on this file; close or sync it before it gets another name.",
            errno_=errno.EBUSY,
        )

    def refuse_unpublishable(self, place: Place) -> None:
        """Neither a private file nor the store's can be renamed: say why. Raises NotFound when there is nothing."""
        privates = self.privates.at(place)
        for private in privates:
            if (reason := private.failed) is not None:
                raise CurvfsError(
                    f"A write to this file failed ({reason}), so it cannot be published.", errno_=reason.errno_
                )
        if any(self.has_unflushed(private.node) for private in privates):
            raise self.busy()
        raise NotFound("No such file.", kind=8)

    async def publish(self, private: PrivateFile, target: Place, *, replace: bool) -> Node:
        """Rename a private file to a name; the node that stands there now. Call with both names locked."""
        node = private.node
        if node.writers:
            # Pages that a mapping made dirty belong to what is published; afterwards nothing reaches it any more.
            await self._world.threads.run(self._kernel.write_back, node.id, abandon_on_cancel=True)
        await self.settle(private)
        await self.replace(self._table.path(node), target, replace=replace, fresh=node.status)
        self._published(private, target)
        self.counters["published"] += 1
        self._remember(node, private.place)
        if node.writers:
            node.detached = True
            if node.reader is None and any(handle.readable for handle in self._handles.of(node)):
                await self._readers.get(node)
            self._table.part_from(node)
        for other in self.privates.everything_at(target):
            await self.discard(other)
        self.forget_alias(target)
        await self._leave(private)
        return node

    def _remember(self, node: Node, place: Place) -> None:
        now_s = self._world.clock.monotonic_s()
        self._left_place[node] = place, now_s
        while now_s - next(iter(self._left_place.values()))[1] > RESERVATION_S:
            del self._left_place[next(iter(self._left_place))]

    def place_before(self, node: Node) -> Place | None:
        """The name that a file had as a private one, if it was published just now and nothing has that name since:
        whoever opens the file may have looked up that name."""
        place, when_s = self._left_place.get(node, (None, 0.0))
        if place is None or self._world.clock.monotonic_s() - when_s > RESERVATION_S:
            return None
        return None if place in self.aliases or self._table.child(*place) is not None else place

    async def _leave(self, private: PrivateFile) -> None:
        """A renamed file leaves no name behind: remove the ordinary file whose place it had taken, unless another
        private file stands there, or somebody has written to that one since. Never raises a CurvfsError."""
        parent, name = private.place
        node = self._table.child(parent, name)
        if private.supersedes is None or self.privates.at(private.place) or (node is not None and node.writers):
            return
        try:
            if await self._is_left(private, age_s=LEFT_OVER_S):
                await self.remove(parent, name)
        except NotFound:
            pass
        except CurvfsError as error:
            log.warning("What %r had replaced was not removed: %s", name, error)

    async def _is_left(self, private: PrivateFile, *, age_s: float) -> bool:
        """Does the store have, under the name of a private file, nothing, or still the ordinary file whose place that
        took, so much older by the store's times, and has nobody written to it since?"""
        old = private.supersedes
        try:
            there = await self._fs.stat(self._table.path_of(*private.place))
        except NotFound:
            return True
        if old is None or private.node.status.mtime_ms - old.mtime_ms < age_s * 1000:
            return False
        return (there.id, there.mtime_ms, there.length_bytes) == (old.id, old.mtime_ms, old.length_bytes)

    async def replace(self, source: str, target: Place, *, replace: bool, fresh: FileStatus | None = None) -> None:
        """Rename in the store onto a name; handles that are open on what stood there go on working. ``fresh``: what
        the store said of the source, when it is a private file: nobody else moves it."""
        there = self._table.child(*target)
        kept = await self.keep_open(there) if there is not None and replace else None
        try:
            if there is not None and replace:
                await self.stamp_others(there, self._table.path_of(*target))
            await self._rename(source, target, replace=replace, fresh=fresh if there is None else None)
        except BaseException:
            if kept is not None:
                with trio.move_on_after(1.0, shield=True):
                    await self.drop_link(kept)
            raise
        if there is not None:
            self._table.removed(there, *target)
            there.away = kept
            await self._readers.forgotten(there)

    async def _rename(self, source: str, target: Place, *, replace: bool, fresh: FileStatus | None) -> None:
        """One call for a private file that goes to a name where nothing is known to be; else as the client does it,
        which looks at both names first."""
        path = self._table.path_of(*target)
        if fresh is not None and fresh.path == source:
            try:
                await self._fs.publish(fresh, path)
                return
            except FileExists_:
                if not replace:
                    raise
        await self._fs.rename(source, path, replace=replace)

    async def settle(self, private: PrivateFile) -> None:
        """Publish the bytes of a private file under its staging name. Raises what a write to it raised."""
        writer = private.node.writer
        if writer is not None:
            await writer.publish(close=True)
            for handle in self._handles.of(private.node):
                handle.unflushed = False

    def _published(self, private: PrivateFile, target: Place) -> None:
        node = private.node
        node.away = None
        self.privates.remove(private)
        self._table.name(node, *target)
        self._table.judge(node)
        target[0].changes += 1

    async def seal_before_move(self, node: Node, target: Place) -> bool:
        """A file is about to be moved into a KV prefix: set its seal when the new place alone would not seal it under
        all of its names. True when it was set here."""
        parent, name = target
        if not node.status.is_file or self._table.prefix_of(parent) is None:
            return False
        if node.status.nlink <= 1 and not must_seal_first(node.status.xattrs, parent.file_id, name):
            return False
        return await self._seal(node)

    async def seal_before_link(self, node: Node, target: Place) -> bool:
        """A file is about to get a second name, and one of the two is in a KV prefix: set its seal, which holds under
        both. True when it was set here."""
        directories = [target[0]] if node.place is None else [target[0], node.place[0]]
        if not node.status.is_file or all(self._table.prefix_of(directory) is None for directory in directories):
            return False
        return await self._seal(node)

    async def _seal(self, node: Node) -> bool:
        if SEALED_XATTR in node.status.xattrs:
            return False
        node.status = await self._fs.set_attr(self._table.path(node), xattrs={SEALED_XATTR: b"1"})
        return True

    async def unseal_after_failure(self, node: Node) -> None:
        """The move for which a seal was set failed: take it back. Never raises a CurvfsError."""
        try:
            node.status = await self._fs.set_attr(self._table.path(node), remove_xattrs=[SEALED_XATTR])
        except CurvfsError as error:
            log.warning("%r stays sealed after a rename that failed: %s", node, error)

    @contextmanager
    def renaming(self, *directories: Node) -> Iterator[None]:
        """The kernel keeps everybody from looking up names in these directories: whoever a file is reserved for cannot
        come for it until this ends."""
        began_s = self._world.clock.monotonic_s()
        self._renaming.update(directories)
        try:
            yield
        finally:
            self._renaming.subtract(directories)
            for directory in directories:
                if not self._renaming[directory]:
                    del self._renaming[directory]
            if self._world.clock.monotonic_s() - began_s > RESERVATION_S / 4:
                for private in self.privates.all():
                    if private.reserved_for is not None and private.place[0] in directories:
                        self.renew_reservation(private)

    # ------------------------------------------------------------------------------------------------ materialise

    async def materialise(self, private: PrivateFile) -> None:
        """Give a private file its own name. Raises TransportError when the store does not answer: try again later."""
        place = private.place
        async with self.locks.hold(place):
            if private.node.private is not private or private.is_open_for_write or private.reserved_for is not None:
                return
            if private.has_failed:
                await self._drop(private, "a write to it failed")
                return
            if private.superseded:
                await self.discard(private)
                return
            parent, name = place
            try:
                await self.settle(private)
                source, target = self._table.path(private.node), self._table.path_of(parent, name)
                try:
                    await self._rename(source, place, replace=False, fresh=private.node.status)
                except FileExists_:
                    there = await self._fs.stat(target)
                    if not there.is_file or is_sealed(there.xattrs, parent.file_id, name):
                        await self._drop(private, "the name belongs to a published object, or is no file")
                        return
                    await self.replace(source, place, replace=True)
            except TransportError:
                raise
            except CurvfsError as error:
                await self._drop(private, str(error))
                return
            self._published(private, place)
            self.counters["materialised"] += 1
            self._table.drop_unused(private.node)

    async def _drop(self, private: PrivateFile, reason: str) -> None:
        self.counters["dropped"] += 1
        log.warning("A file written as %r was dropped: %s.", private.place[1], reason)
        await self.discard(private)

    async def tick(self) -> None:
        """Materialise what has been closed for the grace time, and drop reservations that nobody claimed."""
        for stock in self._stocks.values():
            await stock.tidy()
        now_s = self._world.clock.monotonic_s()
        if self._left and now_s >= self._again_s:
            number = len(self._left)
            while number and self._left and await self._delete(self._left.pop(0)):
                number -= 1
        for private in self.privates.all():
            if private.node.private is not private:
                continue
            if private.reserved_for is not None:
                if private.place[0] in self._renaming:
                    self.renew_reservation(private)
                elif now_s >= private.reserved_until_s and not private.node.handles:
                    await self.discard(private)
            elif private.superseded and not private.has_failed and self.privates.newest(private.place) is not private:
                private.closed_s = None if private.closed_s is None else now_s
            elif private.closed_s is not None and now_s - private.closed_s >= self._grace_s:
                try:
                    await self.materialise(private)
                except TransportError as error:
                    log.warning("A file written as %r is not under its name yet: %s", private.place[1], error)

    async def materialise_all(self) -> None:
        """At unmount: every closed private file gets its name at once; what is still open for writing is dropped."""
        for private in self.privates.all():
            if private.node.private is not private:
                continue
            if private.is_open_for_write or private.reserved_for is not None:
                await self._drop(private, "it was still open for writing at unmount")
            else:
                await self.materialise(private)

    # ----------------------------------------------------------------------------------------------------- remove

    async def discard(self, private: PrivateFile) -> None:
        """Take a private file away; handles that are open on it go on working until they are closed."""
        node = private.node
        self.privates.remove(private)
        if node.handles == 0:
            await self.delete_away(node)
        self._table.drop_unused(node)

    async def delete_away(self, node: Node) -> None:
        """Delete a file without a name, now that nobody has it open. Never raises a CurvfsError."""
        path = self._table.path(node)
        node.away = None
        await self.close_files(node)
        await self._delete(path)

    async def _delete(self, path: str) -> bool:
        """Delete a file in staging; when that fails, later. Never raises a CurvfsError."""
        try:
            await self._fs.delete(path)
        except NotFound:
            pass
        except BaseException as error:
            self._left.append(path)
            self._again_s = self._world.clock.monotonic_s() + DELETE_AGAIN_S
            if not isinstance(error, CurvfsError):
                raise
            log.warning("%s could not be deleted yet: %s", path, error)
            return False
        return True

    async def close_files(self, node: Node) -> None:
        """Let go of a node's reader and of its writer, whatever that has not published."""
        writer, node.writer = node.writer, None
        if writer is not None:
            await writer.discard()
        await self._readers.drop(node)

    async def remove(self, parent: Node, name: str) -> None:
        """Delete what the store has under a name; handles that are open on it go on working. Raises NotFound."""
        node = self._table.child(parent, name)
        kept = await self.keep_open(node) if node is not None else None
        path = self._table.path_of(parent, name)
        try:
            if node is not None:
                await self.stamp_others(node, path)
            await self._fs.delete(path)
        except CurvfsError as error:
            if kept is not None and not isinstance(error, TransportError):
                await self.drop_link(kept)
            if node is not None and isinstance(error, NotFound):
                self._table.unname(node, parent, name)
            raise
        if node is not None:
            node.away = kept if kept is not None else node.away
            self._table.removed(node, parent, name)
            await self._readers.forgotten(node)

    async def keep_open(self, node: Node) -> tuple[Scratch, str] | None:
        """The name of a file is about to go, or to go to another: see to it that its open handles go on working.

        What is open for reading only, and local, needs nothing. Else the file gets a second name in staging; the
        caller makes it ``node.away`` once the first one is gone, or deletes it when it is not.
        """
        if node.handles == 0 or node.away is not None or node.status.is_dir:
            return None
        if len(node.links) > 1:
            if node.writer is not None:
                await node.writer.publish(close=True)  # it knows one of the names, perhaps this one
            return None
        if node.writers == 0 and node.reader is not None and node.reader.is_local:
            return None
        if node.writer is not None:
            await node.writer.publish(close=True)
        place = node.place
        assert place is not None
        scratch = self.orphanage(place[0])
        await scratch.ensure()
        name = scratch.next_name()
        await self._fs.link(self._table.path(node), f"{scratch.path}/{name}")
        return scratch, name

    async def stamp_others(self, node: Node, path: str) -> None:
        """One of several names of a file is about to go. Curvine then leaves the change time of the file as it was,
        POSIX does not: a change of no attribute sets it."""
        if not node.status.is_dir and node.status.nlink > 1:
            try:
                node.refresh(await self._fs.set_attr(path))
            except NotFound:
                log.debug("%s went away before it could be removed.", path)

    async def drop_link(self, kept: tuple[Scratch, str]) -> None:
        """The name did not go after all: the second one is not needed. Never raises a CurvfsError."""
        await self._delete(f"{kept[0].path}/{kept[1]}")

    def forget_alias(self, place: Place) -> Node | None:
        node = self.aliases.pop(place, None)
        if node is not None:
            node.pins -= 1
            place[0].changes += 1
            self._table.drop_unused(node)
        return node

    def add_alias(self, place: Place, node: Node) -> None:
        self.aliases[place] = node
        node.pins += 1


def _group_in(parent: Node, group: str) -> str:
    """The group of a new file in a directory."""
    return parent.status.group if parent.status.mode & statmod.S_ISGID else group
