"""The nodes that the kernel knows, the names under which it knows them, and exact lookup counts.

The kernel speaks of files by node id, a Curvine master by path only: this table turns one into the other. Node ids are
the store's file ids (never reused), the mounted directory is 1. A file that is published while somebody may still
write to it gets a second node, with an id from :data:`FIRST_ALIAS_ID` on, so that late stores into the old node never
reach the page cache of readers.

A node lives while the kernel counts lookups of it, a handle is open on it, a node below it lives, or it is pinned.
"""

from __future__ import annotations

import dataclasses
import errno
from typing import TYPE_CHECKING

from curvfs.api import FileKind, FileStatus
from curvfs.errors import CurvfsError, NotFound
from mount.seal import is_prefix, is_sealed, is_sealed_outside

if TYPE_CHECKING:
    from mount.handles import NodeWriter
    from mount.private import PrivateFile
    from mount.readers import NodeReader
    from mount.scratch import Scratch

ROOT_ID = 1
#: Store ids fit 40 bits (wire specification 4.1).
FIRST_ALIAS_ID = 1 << 48


class Node:
    """One file, directory or link that the kernel knows.

    ``links`` holds the names under which the store has it, newest last: (directory, name). ``away`` says where a file
    without such a name lies: one that is private, or was removed while open. ``detached``: published while open for
    writing; late writes are refused. ``changes`` counts our own changes in a directory, ``changes_told`` says how many
    of them its modification time shows. ``known_size`` is the size that the kernel was told last, ``known_stamp`` what
    its cached pages belong to (:func:`mount.readers.stamp`), ``checked_s`` when the store last confirmed the name.
    ``written`` holds length and modification time (ms) as our own writes made them, until the store has told us.
    """

    __slots__ = (
        "away",
        "changes",
        "changes_told",
        "checked_s",
        "children",
        "detached",
        "file_id",
        "handles",
        "id",
        "known_size",
        "known_stamp",
        "links",
        "lookups",
        "pins",
        "private",
        "reader",
        "sealed",
        "status",
        "writer",
        "writers",
        "written",
    )

    def __init__(self, node_id: int, status: FileStatus) -> None:
        self.id = node_id
        self.file_id = status.id
        self.status = status
        self.links: dict[tuple[Node, str], None] = {}
        self.lookups = 0
        self.pins = 0
        self.children = 0
        self.handles = 0
        self.writers = 0
        self.known_size = status.length_bytes
        self.checked_s = 0.0
        self.known_stamp: tuple[int, int, int] | None = None
        self.written: tuple[int, int] | None = None
        self.sealed = False
        self.detached = False
        self.changes = 0
        self.changes_told = 0
        self.away: tuple[Scratch, str] | None = None
        self.private: PrivateFile | None = None
        self.reader: NodeReader | None = None
        self.writer: NodeWriter | None = None

    @property
    def kind(self) -> FileKind:
        return self.status.kind

    @property
    def length_bytes(self) -> int:
        return self.status.length_bytes if self.written is None else self.written[0]

    @property
    def nlink(self) -> int:
        """How many names it has, not counting one in staging that keeps a file readable while it is open."""
        names = max(2 if self.status.is_dir else 1, self.status.nlink)
        if self.links or self.private is not None or self.detached or self.id == ROOT_ID:
            return names
        return 0 if self.status.is_dir else names - 1

    @property
    def is_nameless(self) -> bool:
        """Was its last name removed? Then only descriptors lead to it: what was known of it is all there is."""
        return not self.links and self.away is None and self.private is None and self.id != ROOT_ID

    def refresh(self, status: FileStatus) -> None:
        """Take in what the store says; what was written and not published yet wins over it."""
        self.status = status
        if self.writer is None or not self.writer.is_dirty:
            self.written = None

    @property
    def place(self) -> tuple[Node, str] | None:
        """The newest name, or None for a file without one."""
        return next(reversed(self.links), None)

    def __repr__(self) -> str:
        place = self.place
        return f"<node {self.id} {place[1] if place else self.away[1] if self.away else '/'!r}>"


class NodeTable:
    """All nodes of one mount. ``root_path`` is the store path of the mounted directory."""

    def __init__(self, root_path: str, root_status: FileStatus, *, outer_prefix: str | None = None) -> None:
        self.root_path = "" if root_path == "/" else root_path
        #: Store path of a KV prefix above the mounted directory, which is then inside it.
        self.outer_prefix = outer_prefix
        self.root = Node(ROOT_ID, root_status)
        self.root.pins = 1
        self._by_id: dict[int, Node] = {ROOT_ID: self.root}
        self._by_file: dict[int, Node] = {root_status.id: self.root}
        self._by_name: dict[tuple[Node, str], Node] = {}
        self._next_alias = FIRST_ALIAS_ID
        #: Bytes that the writers of all nodes hold back.
        self.held_bytes = 0

    def __len__(self) -> int:
        return len(self._by_id)

    def __getitem__(self, node_id: int) -> Node:
        node = self._by_id.get(node_id)
        if node is None:
            raise CurvfsError(f"The kernel asks for node {node_id}, which it has forgotten.", errno_=errno.ESTALE)
        return node

    def nodes(self) -> list[Node]:
        return list(self._by_id.values())

    # ------------------------------------------------------------------------------------------------- names

    def child(self, parent: Node, name: str) -> Node | None:
        """The node last seen under this name, if any."""
        return self._by_name.get((parent, name))

    def path(self, node: Node) -> str:
        """The store path of a node. Raises NotFound when nothing here names it any more."""
        parts: list[str] = []
        while node is not self.root:
            if node.away is not None:
                scratch, name = node.away
                return f"{scratch.path}/{name}"
            place = node.place
            if place is None:
                raise NotFound("The file has been removed.", kind=8, errno_=errno.ESTALE)
            node, name = place
            parts.append("/" + name)
        return (self.root_path + "".join(reversed(parts))) or "/"

    def path_of(self, parent: Node, name: str) -> str:
        """The store path of a name in a directory."""
        base = self.path(parent)
        return f"/{name}" if base == "/" else f"{base}/{name}"

    def prefix_of(self, directory: Node) -> Node | str | None:
        """The KV prefix that a directory is in: its node, the path of one above the mount, or None."""
        node = directory
        while True:
            if is_prefix(node.status):
                return node
            place = node.place
            if place is None:
                return self.outer_prefix
            node = place[0]

    def is_below(self, node: Node, ancestor: Node) -> bool:
        """Is ``node`` the directory ``ancestor``, or anywhere below it?"""
        while True:
            if node is ancestor:
                return True
            place = node.place
            if place is None:
                return False
            node = place[0]

    # --------------------------------------------------------------------------------------------- bookkeeping

    def bind(self, status: FileStatus, parent: Node, name: str) -> Node:
        """The node of what the store has just shown under a name."""
        key = (parent, name)
        node = self._by_file.get(status.id) if status.id > ROOT_ID else None
        if node is None and status.id <= ROOT_ID:
            # An under store's file without an id: its name is all there is.
            known = self._by_name.get(key)
            node = known if known is not None and known.file_id == status.id else None
        if node is None:
            node = self._new(status)
        node.refresh(status)
        self.name(node, parent, name, alone=status.is_dir or status.nlink <= 1)
        self.judge(node)
        return node

    def add(self, status: FileStatus) -> Node:
        """A node for a new file that has no name of its own yet."""
        return self._new(status)

    def part_from(self, node: Node) -> None:
        """Let the next lookup of this file make a second node; this one serves its open handles only."""
        if self._by_file.get(node.file_id) is node:
            del self._by_file[node.file_id]

    def name(self, node: Node, parent: Node, name: str, *, alone: bool = True) -> None:
        """Record that a node stands under a name, and, ``alone``, under no other."""
        key = (parent, name)
        other = self._by_name.get(key)
        if other is not None and other is not node:
            self.unname(other, parent, name)
        if alone and (len(node.links) > 1 or (node.links and key not in node.links)):
            for old_parent, old_name in list(node.links):
                self.unname(node, old_parent, old_name)
        if key in node.links:
            node.links[key] = node.links.pop(key)  # newest last
        else:
            node.links[key] = None
            parent.children += 1
        self._by_name[key] = node

    def unname(self, node: Node, parent: Node, name: str) -> None:
        """Record that a node no longer stands under a name."""
        key = (parent, name)
        if key in node.links:
            del node.links[key]
            parent.children -= 1
            self.drop_unused(parent)
        if self._by_name.get(key) is node:
            del self._by_name[key]
        self.drop_unused(node)

    def removed(self, node: Node, parent: Node, name: str) -> None:
        """Record that a name of a node was removed, or given to another file."""
        self.unname(node, parent, name)
        if node.links and node.status.nlink > 1:
            node.status = dataclasses.replace(node.status, nlink=node.status.nlink - 1)

    def judge(self, node: Node) -> None:
        """Decide anew whether a node is sealed: by its birth place, if it is a file of a KV prefix, and by what
        it shares with one elsewhere."""
        place = node.place
        if node.private is not None or place is None or not node.status.is_file:
            node.sealed = False
            return
        parent, name = place
        xattrs = node.status.xattrs
        if self.prefix_of(parent) is not None:
            node.sealed = is_sealed(xattrs, parent.file_id, name)
        else:
            node.sealed = is_sealed_outside(xattrs, node.status.nlink)

    def looked_up(self, node: Node) -> None:
        """The kernel is about to be told of a node: it counts one lookup, and so do we."""
        node.lookups += 1

    def forget(self, node_id: int, count: int) -> Node | None:
        """Take back ``count`` lookups. The node, if it is still known."""
        node = self._by_id.get(node_id)
        if node is None:
            return None
        node.lookups = max(0, node.lookups - count)
        self.drop_unused(node)
        return node

    def drop_unused(self, node: Node) -> None:
        """Let a node go when neither the kernel nor anybody here needs it."""
        if node.lookups or node.handles or node.pins or node.children or node is self.root:
            return
        if self._by_id.get(node.id) is not node:
            return
        del self._by_id[node.id]
        if self._by_file.get(node.file_id) is node:
            del self._by_file[node.file_id]
        for parent, name in list(node.links):
            self.unname(node, parent, name)

    def _new(self, status: FileStatus) -> Node:
        plain = ROOT_ID < status.id < FIRST_ALIAS_ID and status.id not in self._by_id
        node = Node(status.id if plain else self._alias(), status)
        self._by_id[node.id] = node
        if status.id > ROOT_ID:
            self._by_file[status.id] = node
        return node

    def _alias(self) -> int:
        self._next_alias += 1
        return self._next_alias
