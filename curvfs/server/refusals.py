"""Errors that a server answers with: a kind of specification section 1.8 and a text that clients know.

Untyped refusals (kind Common) use the words that HEAD uses, because clients look for them (section 1.9). What HEAD does
wrong (section 13) is refused with a kind of its own instead.
"""

from __future__ import annotations

from curvfs.errors import KINDS, RemoteError

IO = 1
NOT_LEADER = 2
ALREADY_EXISTS = 7
NOT_FOUND = 8
INVALID_FILE_SIZE = 9
PARENT_NOT_DIR = 10
DIR_NOT_EMPTY = 11
BLOCK_IS_WRITING = 13
INVALID_PATH = 16
OUT_OF_SPACE = 17
UNSUPPORTED = 19
JOB_NOT_FOUND = 23
IS_A_DIRECTORY = 26
NOT_A_DIRECTORY = 27
INVALID_ARGUMENT = 28
BLOCK_NOT_FOUND = 29
COMMON = 10000


def refusal(kind: int, text: str) -> RemoteError:
    """The error that becomes an error reply with this kind and text."""
    return KINDS[kind][1](text, kind=kind, text=text, errno_=KINDS[kind][2])


def common(text: str) -> RemoteError:
    """An untyped error, as HEAD answers most ordinary conditions."""
    return refusal(COMMON, text)


def not_found(path: str) -> RemoteError:
    return refusal(NOT_FOUND, f"File {path} not found")


def already_exists(path: str) -> RemoteError:
    return refusal(ALREADY_EXISTS, f"{path} already exists")
