"""Names: lookup, create, remove, rename, link, as the kernel asks for them and as KV prefixes want them.

Works on nodes and store paths; knows nothing of pyfuse3. Errors are CurvfsErrors, whose errno the kernel gets.
"""

from __future__ import annotations

import errno
import logging
import stat as statmod
from dataclasses import dataclass

from curvfs.api import CurvineFileSystem, FileKind, FileStatus
from curvfs.errors import (
    CurvfsError,
    DirectoryNotEmpty,
    FileExists_,
    InvalidPath,
    InvalidRequest,
    NameTooLong,
    NotFound,
    TransportError,
)
from mount.handles import NodeWriter
from mount.inodes import Node, NodeTable
from mount.private import PrivateFile
from mount.publish import Publisher
from mount.readers import Readers
from mount.seal import STAGING_NAME

log = logging.getLogger("curvfs.mount")

MAX_NAME_BYTES = 255
_SPECIAL_KINDS = {
    statmod.S_IFIFO: FileKind.FIFO,
    statmod.S_IFSOCK: FileKind.SOCKET,
    statmod.S_IFCHR: FileKind.CHARACTER_DEVICE,
    statmod.S_IFBLK: FileKind.BLOCK_DEVICE,
}


@dataclass(frozen=True, slots=True)
class Caller:
    """Who asks: thread id, and the numeric user and group that new files get."""

    thread_id: int
    uid: int
    gid: int

    @property
    def owner(self) -> str:
        return str(self.uid)

    @property
    def group(self) -> str:
        return str(self.gid)


def decode_name(name: bytes) -> str:
    """A name from the kernel as Curvine wants it: UTF-8, at most 255 bytes."""
    if len(name) > MAX_NAME_BYTES:
        raise NameTooLong(f"A name of {len(name)} bytes is too long; Curvine takes {MAX_NAME_BYTES}.")
    try:
        return name.decode()
    except UnicodeDecodeError:
        raise InvalidPath(f"The name {name!r} is not UTF-8; Curvine names are.", errno_=errno.EILSEQ) from None


def permission(message: str) -> CurvfsError:
    return CurvfsError(message, errno_=errno.EPERM)


class Naming:
    """The tree of names of one mount."""

    def __init__(self, fs: CurvineFileSystem, table: NodeTable, readers: Readers, publisher: Publisher) -> None:
        self._fs = fs
        self._clock = fs.world.clock
        self._table = table
        self._readers = readers
        self._publisher = publisher
        self._privates = publisher.privates
        #: A name at the root that the mount keeps for itself.
        self.hidden_name: str | None = None
        self._said_hidden = False

    # ----------------------------------------------------------------------------------------------------- lookup

    def lookup_now(self, parent: Node, name: str, caller: Caller) -> Node | None:
        """The node of the private file that a thread sees under a name; None: ask :meth:`lookup`."""
        private = self._privates.visible((parent, name), caller.thread_id)
        if private is None:
            return None
        self._publisher.renew_reservation(private)
        return private.node

    async def lookup(self, parent: Node, name: str, caller: Caller) -> Node:
        """The node under a name. Raises NotFound."""
        private = self.lookup_now(parent, name, caller)
        if private is not None:
            return private
        place = (parent, name)
        alias = self._publisher.aliases.get(place)
        if alias is not None:
            try:
                await self._readers.locate(alias)
                return alias
            except CurvfsError as error:
                if error.errno_ != errno.ESTALE:
                    raise
                self._publisher.forget_alias(place)
        path = self._table.path_of(parent, name)
        try:
            status = await self._fs.stat(path)
        except NotFound:
            gone = self._table.child(parent, name)
            if gone is not None:
                self._table.unname(gone, parent, name)
            raise
        return self.seen(status, parent, name)

    def seen(self, status: FileStatus, parent: Node, name: str) -> Node:
        """The node of what the store has just shown under a name."""
        node = self._table.bind(status, parent, name)
        if self._part_from_writers(node):  # another mount has published what is written in place here
            node = self._table.bind(status, parent, name)
        node.checked_s = self._clock.monotonic_s()
        return node

    def is_listed(self, directory: Node, name: str) -> bool:
        """Is a name shown in listings? Staging directories are not, though they can be looked up."""
        if directory is self._table.root and name == self.hidden_name:
            if not self._said_hidden:
                self._said_hidden = True
                log.warning("The pool has a %r of its own by now, which the mount's hides; see -o control.", name)
            return False
        return name != STAGING_NAME or not self._has_staging(directory)

    def _has_staging(self, directory: Node) -> bool:
        return directory is self._table.root or self._table.prefix_of(directory) is directory

    def _check_reserved(self, parent: Node, name: str) -> None:
        if name == STAGING_NAME and self._has_staging(parent):
            raise permission(f"{STAGING_NAME} holds what is being written; it can be neither moved nor replaced.")
        if name == self.hidden_name and parent is self._table.root:
            raise permission(f"In {name} the mount tells of itself; it can be neither moved nor replaced.")

    # ----------------------------------------------------------------------------------------------------- create

    def create_now(self, parent: Node, name: str, mode: int, caller: Caller) -> Node | None:
        """A private file that was made ahead, where there is none of that name; None: ask :meth:`create`."""
        self._check_reserved(parent, name)
        if self._table.prefix_of(parent) is None or self._privates.visible((parent, name), caller.thread_id):
            return None
        made = self._publisher.make_now(parent, name, mode=mode, owner=caller.owner, group=caller.group)
        return None if made is None else made.node

    async def create(
        self, parent: Node, name: str, mode: int, caller: Caller, *, exclusive: bool, truncate: bool
    ) -> Node:
        """A regular file for an open with O_CREAT, where the kernel saw no such name. A file that has appeared since
        is opened, unless ``exclusive``."""
        self._check_reserved(parent, name)
        place = (parent, name)
        if self._table.prefix_of(parent) is not None:
            there = self._privates.visible(place, caller.thread_id)
            if there is not None and exclusive:
                raise FileExists_(f"{name!r} exists.", kind=7)
            if there is not None and not truncate:
                return there.node
            made = await self._publisher.make(parent, name, mode=mode, owner=caller.owner, group=caller.group)
            return made.node
        path = self._table.path_of(parent, name)
        try:
            stream = await self._fs.create(path, mode=mode, owner=caller.owner, group=caller.group)
        except FileExists_:
            if exclusive:
                raise
            node = self.seen(await self._fs.stat(path), parent, name)
            if truncate:
                await self._fs.truncate(path, 0)
            return node
        node = self.seen(stream.status, parent, name)
        writer = NodeWriter(self._fs, self._table, self._readers, node)
        writer.adopt(stream)
        node.writer = writer
        parent.changes += 1
        return node

    async def mkdir(self, parent: Node, name: str, mode: int, caller: Caller) -> Node:
        self._check_reserved(parent, name)
        self._refuse_private(parent, name)
        path = self._table.path_of(parent, name)
        status = await self._fs.mkdir(path, mode=mode, owner=caller.owner, group=caller.group)
        parent.changes += 1
        return self.seen(status, parent, name)

    async def symlink(self, parent: Node, name: str, target: str, caller: Caller) -> Node:
        self._check_reserved(parent, name)
        self._refuse_private(parent, name)
        path = self._table.path_of(parent, name)
        status = await self._fs.symlink(target, path, owner=caller.owner, group=caller.group)
        parent.changes += 1
        return self.seen(status, parent, name)

    async def mknod(self, parent: Node, name: str, mode: int, device: int, caller: Caller) -> Node:
        """A FIFO, a socket or a device node. The kernel itself serves it; here it is a name with attributes."""
        self._check_reserved(parent, name)
        if self._table.prefix_of(parent) is not None:
            raise permission("Below a KV prefix there are files and directories only.")
        kind = _SPECIAL_KINDS.get(statmod.S_IFMT(mode))
        if kind is None:
            raise InvalidRequest(f"Files of type {statmod.S_IFMT(mode):#o} are not known here.", kind=28)
        path = self._table.path_of(parent, name)
        status = await self._fs.mknod(path, kind, mode & 0o7777, device, owner=caller.owner, group=caller.group)
        parent.changes += 1
        return self.seen(status, parent, name)

    def _refuse_private(self, parent: Node, name: str) -> None:
        place = (parent, name)
        if self._privates.at(place) or place in self._publisher.aliases:
            raise FileExists_(f"{name!r} exists.", kind=7)

    # ----------------------------------------------------------------------------------------------------- remove

    async def unlink(self, parent: Node, name: str) -> None:
        """Remove a name: all private files under it, and what the store has there."""
        self._check_reserved(parent, name)
        place = (parent, name)
        async with self._publisher.locks.hold(place):
            removed = self._publisher.forget_alias(place) is not None
            if removed:
                return
            for private in self._privates.at(place):
                removed = True
                await self._publisher.discard(private)
            try:
                await self._publisher.remove(parent, name)
            except NotFound:
                if not removed:
                    raise
            parent.changes += 1

    async def rmdir(self, parent: Node, name: str) -> None:
        self._check_reserved(parent, name)
        node = self._table.child(parent, name)
        if node is not None and self._privates.any_in(node):
            raise DirectoryNotEmpty(f"{name!r} is not empty.", kind=11)
        await self._fs.delete(self._table.path_of(parent, name))
        if node is not None:
            for place in [place for place in self._publisher.aliases if place[0] is node]:
                self._publisher.forget_alias(place)
            self._table.unname(node, parent, name)
        parent.changes += 1

    # ----------------------------------------------------------------------------------------------------- rename

    async def rename(
        self,
        old_parent: Node,
        old_name: str,
        new_parent: Node,
        new_name: str,
        *,
        thread_id: int,
        replace: bool,
        exchange: bool,
    ) -> None:
        self._check_reserved(old_parent, old_name)
        self._check_reserved(new_parent, new_name)
        source, target = (old_parent, old_name), (new_parent, new_name)
        with self._publisher.renaming(old_parent, new_parent):
            async with self._publisher.locks.hold(source, target):
                await self._rename(source, target, thread_id, replace=replace, exchange=exchange)

    async def _rename(
        self, source: tuple[Node, str], target: tuple[Node, str], thread_id: int, *, replace: bool, exchange: bool
    ) -> None:
        if exchange:
            await self._exchange(source, target)
            return
        if not replace and (self._privates.at(target) or target in self._publisher.aliases):
            raise FileExists_(f"{target[1]!r} exists.", kind=7)
        private = await self._publisher.choose(source, thread_id)
        if private is not None:
            self._refuse_directory(target)
            await self._publisher.publish(private, target, replace=replace)
        elif source in self._publisher.aliases:
            await self._move_alias(source, target, replace=replace)
        else:
            await self._move(source, target, replace=replace)
        for left in self._privates.everything_at(target):
            await self._publisher.discard(left)
        self._publisher.forget_alias(target)
        source[0].changes += 1
        target[0].changes += 1

    def _refuse_directory(self, target: tuple[Node, str]) -> None:
        node = self._table.child(*target)
        if node is not None and node.status.is_dir:
            raise CurvfsError(f"{target[1]!r} is a directory.", errno_=errno.EISDIR)

    async def _move(self, source: tuple[Node, str], target: tuple[Node, str], *, replace: bool) -> None:
        """Rename what the store has under a name."""
        node = self._table.child(*source)
        if node is None:
            try:
                node = self.seen(await self._fs.stat(self._table.path_of(*source)), *source)
            except NotFound:
                self._publisher.refuse_unpublishable(source)
                raise
        if self._table.prefix_of(target[0]) is not None and self._publisher.has_unflushed(node):
            raise self._publisher.busy()  # its writer would be told so in mid-file: it is sealed by this
        await self._publish_writers(node)
        sealed_here = await self._publisher.seal_before_move(node, target)
        try:
            await self._publisher.replace(self._table.path_of(*source), target, replace=replace)
        except CurvfsError as error:
            if sealed_here and not isinstance(error, TransportError):
                await self._publisher.unseal_after_failure(node)
            if isinstance(error, NotFound):
                self._publisher.refuse_unpublishable(source)
            raise
        self._moved(node, source, target)

    def _moved(self, node: Node, source: tuple[Node, str], target: tuple[Node, str]) -> None:
        node.pins += 1
        self._table.unname(node, *source)
        self._table.name(node, *target, alone=False)
        self._table.judge(node)
        node.pins -= 1
        self._part_from_writers(node)

    def _part_from_writers(self, node: Node) -> bool:
        """Does anybody have a file open for writing that has just been sealed? Then their node is no longer its own."""
        if not (node.sealed and node.writers):
            return False
        node.detached = True
        self._table.part_from(node)
        return True

    async def _publish_writers(self, node: Node) -> None:
        """Writers know the path that their file had: close those of a file, or below a directory, that moves."""
        if not node.status.is_dir:
            if node.writer is not None:
                await node.writer.publish(close=True)
            return
        for other in self._table.nodes():
            if other.writer is not None and other.private is None and self._table.is_below(other, node):
                await other.writer.publish(close=True)

    async def _exchange(self, source: tuple[Node, str], target: tuple[Node, str]) -> None:
        for place in (source, target):
            for private in self._privates.at(place):
                if private.is_open_for_write:
                    raise CurvfsError(f"{place[1]!r} is being written.", errno_=errno.EBUSY)
            if self._privates.at(place):
                raise CurvfsError(f"{place[1]!r} is not under its name yet.", errno_=errno.EBUSY)
        nodes = []
        for place in (source, target):
            node = self._table.child(*place)
            if node is None:
                node = self.seen(await self._fs.stat(self._table.path_of(*place)), *place)
            await self._publish_writers(node)
            nodes.append(node)
        first, second = nodes
        await self._publisher.seal_before_move(first, target)
        await self._publisher.seal_before_move(second, source)
        await self._fs.rename(self._table.path_of(*source), self._table.path_of(*target), exchange=True)
        second.pins += 1
        self._moved(first, source, target)
        self._table.name(second, *source, alone=False)
        self._table.judge(second)
        second.pins -= 1
        source[0].changes += 1
        target[0].changes += 1

    # ------------------------------------------------------------------------------------------------------- link

    async def link(self, node: Node, parent: Node, name: str) -> Node:
        """A second name for a file; what is linked below a KV prefix is published thereby."""
        self._check_reserved(parent, name)
        target = (parent, name)
        private = node.private
        places = (target,) if private is None else (target, private.place)
        async with self._publisher.locks.hold(*places):
            if self._privates.at(target) or target in self._publisher.aliases:
                raise FileExists_(f"{name!r} exists.", kind=7)
            if private is not None and node.private is private:
                return await self._link_private(private, target)
            if node.away is not None:
                raise NotFound("The file has been removed.", kind=8)
            sealed_here = await self._publisher.seal_before_link(node, target)
            if node.writer is not None:
                await node.writer.publish(close=True)
            try:
                status = await self._fs.link(self._table.path(node), self._table.path_of(parent, name))
            except CurvfsError as error:
                if sealed_here and not isinstance(error, TransportError):
                    await self._publisher.unseal_after_failure(node)
                raise
            parent.changes += 1
            if status.id != node.file_id:
                status = await self._fs.stat(self._table.path_of(parent, name))
            return self.seen(status, parent, name)

    async def _link_private(self, private: PrivateFile, target: tuple[Node, str]) -> Node:
        if private.has_failed or self._publisher.has_unflushed(private.node):
            raise self._publisher.busy()
        asked = private.place
        node = await self._publisher.publish(private, target, replace=False)
        if node.detached:
            node = self.seen(await self._fs.stat(self._table.path_of(*target)), *target)
        self._publisher.add_alias(asked, node)
        return node

    async def _move_alias(self, source: tuple[Node, str], target: tuple[Node, str], *, replace: bool) -> None:
        """Rename a name that a link left behind: the file gets that second name in the store after all."""
        node = self._publisher.aliases[source]
        await self._publisher.seal_before_link(node, target)
        path = self._table.path_of(*target)
        if replace and await self._fs.exists(path):
            scratch = self._publisher.orphanage(target[0])
            await scratch.ensure()
            staged = f"{scratch.path}/{scratch.next_name()}"
            await self._fs.link(self._table.path(node), staged)
            await self._publisher.replace(staged, target, replace=True)
        else:
            await self._fs.link(self._table.path(node), path)
        self._publisher.forget_alias(source)
