"""The rules for names and attributes of KV prefixes: pure functions, no I/O.

A file is *sealed* when it came to its name by rename or link. The seal lives in the store, not in a daemon, so that
every mount sees it, after every restart:

* ``curvfs.kv`` on a directory makes it a KV prefix: everything below follows these rules.
* ``curvfs.born`` on a file, given at create, names the place it was asked for: ``<id of the directory>/<name>``. A
  file that is not at its birth place is sealed. A file without it was made by another client and is ordinary.
* ``curvfs.sealed`` on a file seals it wherever it is in a KV prefix. Every file with several names of which one is in a
  prefix carries it, and it seals the names outside too: they share the object's bytes.
"""

from __future__ import annotations

from collections.abc import Mapping

from curvfs.api import FileStatus

KV_XATTR = "curvfs.kv"
BORN_XATTR = "curvfs.born"
SEALED_XATTR = "curvfs.sealed"

#: Directory of a prefix (and of the mounted directory) that holds what is not published; not listed.
STAGING_NAME = ".staging"

#: What the names of attributes that users set begin with, as on any Linux file system.
NAMESPACES = ("user.", "trusted.", "security.")

#: Internal attributes: users neither see nor set them.
_HIDDEN_PREFIXES = ("curvfs.", "curvine.")
#: Attributes that the kernel asks for all the time and that nothing here carries.
_ABSENT = frozenset({"security.capability", "security.selinux", "security.ima", "security.evm"})


def born_value(directory_id: int, name: str) -> bytes:
    """The birth place of a file asked for as ``name`` in the directory with this id of the store."""
    return f"{directory_id}/{name}".encode()


def is_sealed(xattrs: Mapping[str, bytes], directory_id: int, name: str) -> bool:
    """Is the file with these attributes, found as ``name`` in that directory of a KV prefix, sealed?"""
    if SEALED_XATTR in xattrs:
        return True
    born = xattrs.get(BORN_XATTR)
    return born is not None and born != born_value(directory_id, name)


def must_seal_first(xattrs: Mapping[str, bytes], directory_id: int, name: str) -> bool:
    """Would a file with these attributes, moved to that place of a KV prefix, *not* be sealed there by its birth
    place alone? Then ``curvfs.sealed`` must be set before the move."""
    return not is_sealed(xattrs, directory_id, name)


def is_sealed_outside(xattrs: Mapping[str, bytes], names: int) -> bool:
    """Is a file with these attributes and so many names sealed under those that are in no KV prefix?"""
    return SEALED_XATTR in xattrs and names > 1


def is_prefix(status: FileStatus) -> bool:
    """Does this directory carry the mark of a KV prefix?"""
    return KV_XATTR in status.xattrs


def is_hidden_xattr(name: str) -> bool:
    """Is this attribute ours, Curvine's or one that nothing here carries?"""
    return name in _ABSENT or name.startswith(_HIDDEN_PREFIXES) or "\0" in name


def is_system_xattr(name: str) -> bool:
    """An attribute of the kernel's own name space (access control lists): not supported."""
    return name.startswith("system.")
