"""The master's name tree: what each request means, without frames, protobuf or sockets.

Every method is one request: it looks, refuses with an error of :mod:`curvfs.server.refusals` or makes one
:class:`~curvfs.server.draft.Draft`, and commits it. Semantics are those of Curvine HEAD (specification sections 4.1,
4.5, 4.13 and 4.14) except for what section 13 lists as harmful, which is refused. Files' blocks are the business of
:mod:`curvfs.server.fileblocks`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

from curvfs.server.behaviour import HEAD, Behaviour
from curvfs.server.draft import Draft
from curvfs.server.metastore import MetaStore
from curvfs.server.paths import glob_components, is_below, join, parent_of, split, split_new
from curvfs.server.records import DEFAULT_POLICY, ROOT_ID, SPECIAL_KINDS, TTL_FREE, Inode, Kind, Policy
from curvfs.server.refusals import (
    DIR_NOT_EMPTY,
    INVALID_ARGUMENT,
    IS_A_DIRECTORY,
    NOT_A_DIRECTORY,
    PARENT_NOT_DIR,
    UNSUPPORTED,
    already_exists,
    common,
    not_found,
    refusal,
)
from curvfs.units import GIB, MIB

# Open flags (section 3.2).
ACCESS_MODE = 0x3
CREATE = 0x40
EXCLUSIVE = 0x80
TRUNCATE = 0x200
APPEND = 0x400

# Rename flags.
NO_REPLACE = 1
EXCHANGE = 2

SETGID = 0o2000
MODE_BITS = 0o7777

#: Where HEAD keeps ctime among the xattrs; never taken from a client.
_CTIME_XATTR = "\0curvine.ctime"

MIN_BLOCK_BYTES = MIB
MAX_BLOCK_BYTES = 100 * GIB
#: Block sizes are stored in 32 bits; HEAD wraps around, we refuse.
STORED_BLOCK_LIMIT_BYTES = 4 * GIB
MAX_REPLICAS = 100

#: Mode of directories that Link makes on the way.
_LINK_PARENT_MODE = 0o777

#: Entries removed at a time when a directory tree is taken apart in the background.
_REAP_ENTRIES = 64


@dataclass(frozen=True, slots=True)
class NodeOptions:
    """How to make a directory, file or special node."""

    mode: int = 0
    owner: str = ""
    group: str = ""
    xattrs: Mapping[str, bytes] = field(default_factory=dict)
    policy: Policy = DEFAULT_POLICY
    create_parent: bool = False
    # Files only.
    kind: Kind = Kind.FILE
    block_size_bytes: int = 0
    replicas: int = 1
    writer: str = ""


@dataclass(frozen=True, slots=True)
class AttrChange:
    """SetAttrOptsProto; None leaves a value as it is."""

    recursive: bool = False
    owner: str | None = None
    group: str | None = None
    mode: int | None = None
    atime_ms: int | None = None
    mtime_ms: int | None = None
    ttl_ms: int | None = None
    ttl_action: int | None = None
    add_xattrs: Mapping[str, bytes] = field(default_factory=dict)
    remove_xattrs: tuple[str, ...] = ()
    ufs_mtime: int | None = None


class Namespace:
    """The tree over a store. ``now_ms`` is the server's clock; ``on_freed`` hears, after the commit, which blocks no
    file owns any more."""

    def __init__(
        self,
        store: MetaStore,
        now_ms: Callable[[], int],
        on_freed: Callable[[list[int]], None] = lambda _: None,
        behaviour: Behaviour = HEAD,
    ) -> None:
        self.store = store
        self._behaviour = behaviour
        self.now_ms = now_ms
        self._on_freed = on_freed

    def draft(self) -> Draft:
        return Draft(self.store, self.now_ms())

    def commit(self, draft: Draft) -> None:
        draft.commit()
        if draft.freed:
            self._on_freed(draft.freed)

    # ----------------------------------------------------------------------------------------------------- looking

    def find(self, path: str) -> Inode | None:
        """The inode at a path; symlinks are not followed."""
        inode_id = ROOT_ID
        child = self.store.child
        for name in split(path):
            found = child(inode_id, name)
            if found is None:
                return None
            inode_id = found
        return self.store.inode(inode_id)

    def get(self, path: str) -> Inode:
        inode = self.find(path)
        if inode is None:
            raise not_found(path)
        return inode

    def parent_for(self, draft: Draft, path: str, names: list[str], missing: Callable[[str], Exception]) -> Inode:
        """The directory that is to hold a new entry at ``path``, or the error for one that cannot."""
        directory = draft.known(ROOT_ID)
        for name in names[:-1]:
            found = draft.child(directory.id, name)
            if found is None:
                raise missing(parent_of(path))
            if not found.is_dir:
                raise refusal(PARENT_NOT_DIR, f"Path not a dir: {parent_of(path)}")
            directory = found
        return directory

    def list_status(self, path: str) -> list[tuple[str, Inode]]:
        """ListStatus: (path, inode) of the entries of a directory, of a file itself, or of everything that a glob
        matches (files themselves, directories' entries)."""
        pattern = glob_components(path)
        if pattern is None:
            return self._list_one(path, self.get(path))
        found: list[tuple[str, Inode]] = []
        level: list[tuple[str, Inode]] = [("/", self.get("/"))]
        for component in pattern:
            matched: list[tuple[str, Inode]] = []
            for directory_path, directory in level:
                if isinstance(component, str):
                    child = self.store.child(directory.id, component)
                    names = [] if child is None else [(component, child)]
                else:
                    names = [entry for entry in self.store.children(directory.id) if component.fullmatch(entry[0])]
                matched += [(join(directory_path, name), self._record(child)) for name, child in names]
            level = matched
        for matched_path, inode in level:
            found += self._list_one(matched_path, inode)
        return found

    def list_page(self, path: str, start_after: str, limit: int | None) -> list[tuple[str, Inode]]:
        """ListOptions: one page of a directory, names after ``start_after``."""
        if glob_components(path) is not None:
            raise common(f"list_options does not support glob pattern, path {path}")
        if limit is not None and limit < 0:
            raise common("list options limit must be greater than 0")
        return self._list_one(path, self.get(path), start_after, limit)

    def _list_one(
        self, path: str, inode: Inode, start_after: str = "", limit: int | None = None
    ) -> list[tuple[str, Inode]]:
        if not inode.is_dir:
            return [(path, inode)]
        return [
            (join(path, name), self._record(child)) for name, child in self.store.children(inode.id, start_after, limit)
        ]

    def _record(self, inode_id: int) -> Inode:
        inode = self.store.inode(inode_id)
        if inode is None:
            raise LookupError(f"inode {inode_id} has an entry but no record")
        return inode

    # ------------------------------------------------------------------------------------------------------ making

    def mkdir(self, path: str, options: NodeOptions) -> Inode:
        names = split_new(path, "mkdir")
        if not names:
            raise common(f"Not allowed to create existing root path: {path}")
        existing = self.find(path)
        if existing is not None:
            if existing.is_dir and options.create_parent:
                return existing
            raise already_exists(path)
        draft = self.draft()
        inode = self._add(draft, path, names, replace(options, kind=Kind.DIR))
        self.commit(draft)
        return inode

    def create(self, path: str, options: NodeOptions, flags: int) -> Inode:
        """CreateFile: a new file with its writer, an existing one overwritten (TRUNC), or a special node."""
        if not flags & CREATE:
            raise refusal(INVALID_ARGUMENT, f"create: {path} needs the flag CREAT")
        names = split_new(path, "create")
        if options.kind in SPECIAL_KINDS and not self._behaviour.has_v04_fields:
            options = replace(options, kind=Kind.FILE)  # a number that the version does not know
        self._check_file(options)
        existing = self.find(path)
        draft = self.draft()
        if existing is not None:
            if existing.is_dir:
                raise common(f"{path} already exists as a dir")
            if flags & EXCLUSIVE or not flags & TRUNCATE:
                raise already_exists(path)
            inode = self.overwrite(draft, path, existing, options)
        else:
            inode = self._add(draft, path, names, options)
        self.commit(draft)
        return inode

    def overwrite(self, draft: Draft, path: str, inode: Inode, options: NodeOptions) -> Inode:
        """Empty an existing file for a new writer; owner, group, mode, id, xattrs and other writers stay."""
        self.need_regular(path, inode)
        draft.drop_blocks(inode.id)
        fresh = draft.touch(inode)._replace(
            length_bytes=0,
            blocks_bytes=0,
            replicas=options.replicas,
            block_size_bytes=options.block_size_bytes,
            policy=options.policy,
            writers=with_writer(inode.writers, options.writer),
        )
        draft.put(fresh)
        return fresh

    def need_regular(self, path: str, inode: Inode) -> None:
        """Refuse what has no blocks: on symlinks and special nodes HEAD does harm (section 13, item 2)."""
        if inode.kind != Kind.FILE:
            raise refusal(INVALID_ARGUMENT, f"{path} is a {inode.kind.name.lower()}, not a regular file")

    def _check_file(self, options: NodeOptions) -> None:
        if not 1 <= options.replicas < MAX_REPLICAS:
            raise common(f"The replica number {options.replicas} needs to be between 1 and {MAX_REPLICAS}")
        if not MIN_BLOCK_BYTES <= options.block_size_bytes < MAX_BLOCK_BYTES:
            raise common(f"Block size needs to be between {MIN_BLOCK_BYTES} and {MAX_BLOCK_BYTES}")
        if options.block_size_bytes >= STORED_BLOCK_LIMIT_BYTES:
            raise refusal(INVALID_ARGUMENT, f"A block size of {options.block_size_bytes} bytes does not fit 32 bits")
        if options.kind != Kind.FILE and options.kind not in SPECIAL_KINDS:
            raise refusal(UNSUPPORTED, f"A {options.kind.name.lower()} cannot be made by CreateFile")

    def _add(self, draft: Draft, path: str, names: list[str], options: NodeOptions) -> Inode:
        """Make the inode at ``path``, and its parents if asked; nothing is there yet."""
        directory = draft.known(ROOT_ID)
        for depth, name in enumerate(names[:-1], 1):
            found = draft.child(directory.id, name)
            if found is None:
                if not options.create_parent:
                    raise common(f"Parent directory doesn't exist: {parent_of(path)}")
                found = self._new_dir(draft, directory, name, options)
            elif not found.is_dir:
                raise common(f"Parent path is not a directory: /{'/'.join(names[:depth])}")
            directory = found
        if options.kind == Kind.DIR:
            return self._new_dir(draft, directory, names[-1], options, options.xattrs, options.policy)
        inode = Inode(
            id=draft.new_inode_id(),
            kind=options.kind,
            mode=options.mode,
            owner=options.owner,
            group=directory.group if self._passes_on(directory) else options.group,
            mtime_ms=draft.now_ms,
            atime_ms=draft.now_ms,
            block_size_bytes=options.block_size_bytes,
            replicas=options.replicas,
            writers=(options.writer,) if options.kind == Kind.FILE else (),
            policy=options.policy,
            xattrs=_public(options.xattrs),
        )
        draft.add(directory.id, names[-1], inode)
        return inode

    def _new_dir(
        self,
        draft: Draft,
        directory: Inode,
        name: str,
        options: NodeOptions,
        xattrs: Mapping[str, bytes] | None = None,
        policy: Policy = DEFAULT_POLICY,
    ) -> Inode:
        inode = Inode(
            id=draft.new_inode_id(),
            kind=Kind.DIR,
            mode=options.mode | (SETGID if self._passes_on(directory) else 0),
            owner=options.owner,
            group=directory.group if self._passes_on(directory) else options.group,
            mtime_ms=draft.now_ms,
            atime_ms=draft.now_ms,
            nlink=2,
            policy=policy,
            xattrs=_public(xattrs or {}),
        )
        draft.add(directory.id, name, inode)
        return inode

    def _passes_on(self, directory: Inode) -> bool:
        """Whether what is made in a directory gets its group."""
        return bool(directory.mode & SETGID) and self._behaviour.inherits_setgid

    def symlink(self, target: str, path: str, force: bool, mode: int, owner: str, group: str) -> None:
        names = split_new(path, "symlink")
        existing = self.find(path)
        if existing is not None:
            if force and existing.kind == Kind.LINK:
                return  # as HEAD: success, and the old link stays
            raise already_exists(path)
        draft = self.draft()
        directory = self.parent_for(draft, path, names, lambda parent: common(f"Directory does not exist: {parent}"))
        inode = Inode(
            id=draft.new_inode_id(),
            kind=Kind.LINK,
            mode=mode,
            owner=owner,
            group=group,
            mtime_ms=draft.now_ms,
            atime_ms=draft.now_ms,
            target=target,
        )
        draft.add(directory.id, names[-1], inode)
        self.commit(draft)

    def link(self, source: str, path: str) -> None:
        names = split_new(path, "link")
        inode = self.get(source)
        if inode.is_dir:
            raise common("Cannot create link to directory")
        if inode.kind == Kind.LINK and not self._behaviour.links_symlinks:
            raise common("Cannot create link to symlink")
        if self.find(path) is not None:
            raise already_exists(path)
        draft = self.draft()
        directory = draft.known(ROOT_ID)
        for name in names[:-1]:
            found = draft.child(directory.id, name)
            if found is None:
                found = self._new_dir(draft, directory, name, NodeOptions(mode=_LINK_PARENT_MODE))
            elif not found.is_dir:
                raise refusal(PARENT_NOT_DIR, f"Path not a dir: {parent_of(path)}")
            directory = found
        draft.link(directory.id, names[-1], inode)
        self.commit(draft)

    # ------------------------------------------------------------------------------------------ removing and moving

    def delete(self, path: str, recursive: bool) -> tuple[int, int]:
        """Returns what is freed: (inodes, bytes)."""
        names = split(path)
        if not names:
            raise common("The root is not allowed to be deleted")
        inode = self.get(path)
        if inode.is_dir and inode.children and not recursive:
            raise refusal(DIR_NOT_EMPTY, f"{path} is not empty")
        draft = self.draft()
        directory = self.parent_for(draft, path, names, not_found)
        freed = draft.unlink(directory.id, names[-1], inode)
        self.commit(draft)
        return freed

    def reap(self) -> bool:
        """Take apart a slice of a directory that Delete cut out of the tree; False when none is left."""
        directory_id = self.store.doomed()
        if directory_id is None:
            return False
        draft = self.draft()
        entries = self.store.children(directory_id, limit=_REAP_ENTRIES)
        for name, child_id in entries:
            child = draft.known(child_id)
            if child.is_dir and child.children:
                draft.doom(child_id)
                draft.leave(directory_id, name, child)
            else:
                draft.unlink(directory_id, name, child)
        if len(entries) < _REAP_ENTRIES:
            draft.undoom(directory_id)
            draft.drop(draft.known(directory_id))
        self.commit(draft)
        return True

    def expire(self, directory_id: int, name: str, inode_id: int) -> bool:
        """Delete an entry that :meth:`MetaStore.expired` found; False when it no longer is what it was then."""
        inode = self.store.inode(inode_id)
        if inode is None or self.store.child(directory_id, name) != inode_id or not inode.has_expired(self.now_ms()):
            return False
        draft = self.draft()
        draft.unlink(directory_id, name, inode)
        self.commit(draft)
        return True

    def rename(self, source: str, target: str, flags: int) -> bool:
        """Returns False when nothing had to be done."""
        if source == target:
            return False
        source_names, target_names = split(source), split_new(target, "rename")
        if not source_names or not target_names:
            raise refusal(INVALID_ARGUMENT, f"cannot rename {source} to {target}: the root stays where it is")
        inode = self.get(source)
        if is_below(target, source):
            raise refusal(INVALID_ARGUMENT, f"cannot rename {source} to {target}: destination is under source")
        draft = self.draft()
        source_dir = self.parent_for(draft, source, source_names, not_found)
        # Also where the parent is a regular file: HEAD loses the source then (section 13, item 1).
        target_dir = self.parent_for(
            draft, target, target_names, lambda parent: common(f"Parent {parent} does not exist")
        )
        existing = draft.child(target_dir.id, target_names[-1])
        if flags == EXCHANGE:
            if not self._behaviour.exchanges:
                raise common("exchange mode is not supported")
            self._exchange(draft, (source, source_dir, source_names[-1], inode),
                           (target, target_dir, target_names[-1], existing))  # fmt: skip
            return True
        if existing is not None:
            if flags & NO_REPLACE:
                raise already_exists(target)
            if existing.id == inode.id:
                return False  # two names of one file: nothing to do (section 13, item 6)
            self._check_replace(target, inode, existing)
        moved = inode._replace(ctime_ms=draft.now_ms)
        draft.leave(source_dir.id, source_names[-1], inode)
        if existing is not None:
            draft.unlink(target_dir.id, target_names[-1], existing)
        draft.put(moved)
        draft.enter(target_dir.id, target_names[-1], moved)
        self.commit(draft)
        return True

    def _check_replace(self, target: str, inode: Inode, existing: Inode) -> None:
        if existing.is_dir and not inode.is_dir:
            raise refusal(IS_A_DIRECTORY, f"{target} is a directory")
        if inode.is_dir and not existing.is_dir:
            raise refusal(NOT_A_DIRECTORY, f"{target} is not a directory")
        if existing.is_dir and existing.children:
            raise refusal(DIR_NOT_EMPTY, f"{target} is not empty")

    def _exchange(
        self, draft: Draft, one: tuple[str, Inode, str, Inode], other: tuple[str, Inode, str, Inode | None]
    ) -> None:
        one_path, one_dir, one_name, one_inode = one
        other_path, other_dir, other_name, other_inode = other
        if other_inode is None:
            raise not_found(other_path)
        if is_below(one_path, other_path):
            raise refusal(INVALID_ARGUMENT, f"cannot exchange {one_path} and {other_path}: one is under the other")
        moved = {inode.id: inode._replace(ctime_ms=draft.now_ms) for inode in (one_inode, other_inode)}
        draft.leave(one_dir.id, one_name, one_inode)
        draft.leave(other_dir.id, other_name, other_inode)
        for inode in moved.values():
            draft.put(inode)
        draft.enter(one_dir.id, one_name, moved[other_inode.id])
        draft.enter(other_dir.id, other_name, moved[one_inode.id])
        self.commit(draft)

    # -------------------------------------------------------------------------------------------------- attributes

    def set_attr(self, path: str, change: AttrChange) -> Inode:
        inode = self.get(path)
        draft = self.draft()
        changed = self.with_attrs(draft, inode, change)
        if change.recursive and inode.is_dir:
            self._set_below(draft, inode, AttrChange(owner=change.owner, group=change.group, mode=change.mode))
        self.commit(draft)
        return changed

    def with_attrs(self, draft: Draft, inode: Inode, change: AttrChange) -> Inode:
        """Put the inode with an attribute change; ctime becomes now."""
        if change.ufs_mtime:
            # HEAD would take the file for one that lives in an under store (section 13, item 9).
            raise refusal(UNSUPPORTED, "ufs_mtime cannot be set: this server has no under store")
        xattrs = inode.xattrs
        if change.add_xattrs or change.remove_xattrs:
            removed = set(change.remove_xattrs)
            merged = {**xattrs, **_public(change.add_xattrs)}
            xattrs = {name: value for name, value in merged.items() if name not in removed}
        changed = inode._replace(
            owner=inode.owner if change.owner is None else change.owner,
            group=inode.group if change.group is None else change.group,
            mode=inode.mode if change.mode is None else change.mode & MODE_BITS,
            atime_ms=inode.atime_ms if change.atime_ms is None else change.atime_ms,
            mtime_ms=inode.mtime_ms if change.mtime_ms is None else change.mtime_ms,
            ctime_ms=draft.now_ms,
            policy=_with_ttl(inode.policy, change),
            xattrs=xattrs,
        )
        draft.put(changed)
        return changed

    def _set_below(self, draft: Draft, directory: Inode, change: AttrChange) -> None:
        pending = [directory.id]
        while pending:
            for _, child_id in self.store.children(pending.pop()):
                child = draft.known(child_id)
                self.with_attrs(draft, child, change)
                if child.is_dir:
                    pending.append(child_id)


def with_writer(writers: tuple[str, ...], name: str) -> tuple[str, ...]:
    """The writer set with one more name."""
    return writers if name in writers else (*writers, name)


def _public(xattrs: Mapping[str, bytes]) -> dict[str, bytes]:
    return {name: value for name, value in xattrs.items() if name != _CTIME_XATTR}


def _with_ttl(policy: Policy, change: AttrChange) -> Policy:
    ttl_ms = policy.ttl_ms if change.ttl_ms is None else change.ttl_ms
    action = policy.ttl_action
    if change.ttl_action is not None and action != TTL_FREE:
        action = change.ttl_action
    if (ttl_ms, action) == (policy.ttl_ms, policy.ttl_action):
        return policy
    return policy._replace(ttl_ms=ttl_ms, ttl_action=action)
