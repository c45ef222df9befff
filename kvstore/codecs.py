"""Compression of whole objects: zstd, with the content's checksum in the frame."""

from __future__ import annotations

from typing import Any

from curvfs.errors import ConfigError, EnvironmentError_
from kvstore.header import BadObject

#: Fast enough to keep up with a disk; keys and values do not get much smaller on higher ones.
_LEVEL = 1


class Zstd:
    """Callable from any thread. Raises EnvironmentError_ where the package is missing."""

    name = "zstd"

    def __init__(self) -> None:
        try:
            import zstandard
        except ImportError as error:
            raise EnvironmentError_(
                "The codec zstd needs the package zstandard; install it with: pip install 'curvfs[zstd]'"
            ) from error
        self._zstandard: Any = zstandard

    def encode(self, view: memoryview) -> bytes:
        """One frame."""
        packer = self._zstandard.ZstdCompressor(level=_LEVEL, write_checksum=True, write_content_size=True)
        packed: bytes = packer.compress(view)
        return packed

    def decode(self, packed: bytes, size_bytes: int) -> bytes:
        """The content of one frame, which must have exactly ``size_bytes``. Raises BadObject."""
        try:
            claimed = self._zstandard.frame_content_size(packed)
            if claimed != size_bytes:
                raise BadObject(f"its frame claims {claimed} bytes of content, not {size_bytes}")
            content: bytes = self._zstandard.ZstdDecompressor().decompress(packed, max_output_size=size_bytes)
        except self._zstandard.ZstdError as error:
            raise BadObject(f"its frame cannot be unpacked: {error}") from error
        if len(content) != size_bytes:
            raise BadObject(f"its frame has {len(content)} bytes of content, not {size_bytes}")
        return content


def codec_named(name: str) -> Zstd | None:
    """``none`` or ``zstd``. Raises ConfigError, EnvironmentError_."""
    if name == "none":
        return None
    if name != "zstd":
        raise ConfigError(f"{name!r} is not a codec; write none or zstd.")
    return Zstd()
