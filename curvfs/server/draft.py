"""A mutation under way: the records it has changed so far, seen through by its own reads.

Nothing reaches the store before :meth:`Draft.commit`, so any check may refuse at any point. Totals, link counts and
the times of directories follow from the operations here.
"""

from __future__ import annotations

from curvfs.server.metastore import MetaStore, located_bytes
from curvfs.server.records import Block, Change, Inode, Kind, Totals


class Draft:
    """One mutation at the time ``now_ms``."""

    def __init__(self, store: MetaStore, now_ms: int) -> None:
        self.now_ms = now_ms
        #: Ids of the blocks that no file owns any more once this is committed.
        self.freed: list[int] = []
        self._store = store
        self._change = Change()
        self._totals = store.totals

    def commit(self) -> None:
        if self._totals is not self._store.totals:
            self._change.totals = self._totals
        self._store.apply(self._change)

    # ----------------------------------------------------------------------------------------------------- reading

    def inode(self, inode_id: int) -> Inode | None:
        if inode_id in self._change.inodes:
            return self._change.inodes[inode_id]
        return self._store.inode(inode_id)

    def known(self, inode_id: int) -> Inode:
        """An inode that an entry names."""
        inode = self.inode(inode_id)
        if inode is None:
            raise LookupError(f"inode {inode_id} has an entry but no record")
        return inode

    def child(self, directory_id: int, name: str) -> Inode | None:
        key = (directory_id, name)
        found = self._change.entries[key] if key in self._change.entries else self._store.child(directory_id, name)
        return None if found is None else self.known(found)

    # ----------------------------------------------------------------------------------------------------- writing

    def put(self, inode: Inode) -> None:
        self._change.inodes[inode.id] = inode

    def put_block(self, block: Block) -> None:
        self._change.blocks[block.id] = block

    def new_inode_id(self) -> int:
        inode_id = self._totals.next_inode
        self._totals = self._totals._replace(next_inode=inode_id + 1)
        return inode_id

    def add(self, directory_id: int, name: str, inode: Inode) -> None:
        """Add a new inode under a name."""
        self.put(inode)
        self._count(inode, 1)
        self.enter(directory_id, name, inode)

    def enter(self, directory_id: int, name: str, inode: Inode) -> None:
        """Add an entry for an inode that exists."""
        self._change.entries[(directory_id, name)] = inode.id
        self._adjust(directory_id, 1, inode)

    def link(self, directory_id: int, name: str, inode: Inode) -> None:
        """Add one more name for a file."""
        self.put(inode._replace(nlink=inode.nlink + 1, ctime_ms=self.now_ms))
        self._count(inode, 1)
        self.enter(directory_id, name, inode)

    def leave(self, directory_id: int, name: str, inode: Inode) -> None:
        """Remove the entry of an inode, not the inode."""
        self._change.entries[(directory_id, name)] = None
        self._adjust(directory_id, -1, inode)

    def unlink(self, directory_id: int, name: str, inode: Inode) -> tuple[int, int]:
        """Remove a name and, with the last one, the inode and its blocks. A directory that has entries is cut out of
        the tree and emptied later. Returns what goes with it: (inodes, bytes), directories not counted."""
        self.leave(directory_id, name, inode)
        if inode.is_dir and inode.children:
            self._change.doomed[inode.id] = True
            return self._store.weigh(inode.id)
        if not inode.is_dir and inode.nlink > 1:
            self.put(inode._replace(nlink=inode.nlink - 1))
            self._count(inode, -1)
            return 0, 0
        self.drop(inode)
        return (0, 0) if inode.is_dir else (1, located_bytes(self._store.blocks(inode.id)))

    def drop(self, inode: Inode) -> None:
        """Remove an inode that has no name any more, with its blocks and locks."""
        self._change.inodes[inode.id] = None
        if not inode.is_dir:
            self.drop_blocks(inode.id)
            if self._store.locks(inode.id):
                self._change.locks[inode.id] = ()
        self._count(inode, -1)

    def drop_blocks(self, inode_id: int, *, first: int = 0) -> None:
        """Remove the blocks of a file from the ``first``-th on."""
        for block in self._store.blocks(inode_id)[first:]:
            self._change.blocks[block.id] = None
            self.freed.append(block.id)
            self._totals = self._totals._replace(blocks=self._totals.blocks - 1)

    def append_block(self, inode: Inode, block: Block) -> Inode:
        """Add a block at the end of a file; returns (and puts) the inode that owns it."""
        self.put_block(block)
        self._totals = self._totals._replace(blocks=self._totals.blocks + 1)
        changed = inode._replace(next_block=inode.next_block + 1, blocks_bytes=inode.blocks_bytes + block.length_bytes)
        self.put(changed)
        return changed

    def undoom(self, directory_id: int) -> None:
        """A directory that was cut out of the tree is empty and gone."""
        self._change.doomed[directory_id] = False

    def doom(self, directory_id: int) -> None:
        self._change.doomed[directory_id] = True

    def touch(self, inode: Inode) -> Inode:
        """The inode with mtime now; ctime follows only where the inode has one (section 4.5)."""
        ctime_ms = None if inode.ctime_ms is None else self.now_ms
        return inode._replace(mtime_ms=self.now_ms, ctime_ms=ctime_ms)

    def _adjust(self, directory_id: int, difference: int, inode: Inode) -> None:
        directory = self.known(directory_id)
        self.put(self.touch(directory)._replace(
            children=directory.children + difference,
            nlink=directory.nlink + (difference if inode.kind == Kind.DIR else 0),
        ))  # fmt: skip

    def _count(self, inode: Inode, difference: int) -> None:
        totals = self._totals
        self._totals = Totals(
            totals.next_inode,
            totals.directories + (difference if inode.is_dir else 0),
            totals.files + (0 if inode.is_dir else difference),
            totals.blocks,
        )
