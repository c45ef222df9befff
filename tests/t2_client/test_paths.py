"""Paths are normalised and checked before a master sees them (specification 4.1, hazard 8 of 13)."""

from __future__ import annotations

import posixpath

import pytest
from hypothesis import given
from hypothesis import strategies as st

from curvfs.client import paths
from curvfs.errors import InvalidPath, NameTooLong


@pytest.mark.parametrize(
    ("given_path", "expected"),
    [
        ("/", "/"),
        ("//", "/"),
        ("/a", "/a"),
        ("/a/", "/a"),
        ("//a///b//", "/a/b"),
        ("/a/./b/.", "/a/b"),
        ("/a/../b", "/b"),
        ("/a/b/../../c/..", "/"),
        ("/../../x", "/x"),
        ("/a/..b/c.", "/a/..b/c."),
        ("/ä/日本", "/ä/日本"),
        ("/" + "x" * 255, "/" + "x" * 255),
    ],
)
def test_normalize(given_path: str, expected: str) -> None:
    assert paths.normalize(given_path) == expected


@pytest.mark.parametrize("bad", ["", "a", "a/b", ".", "/a\0b", "/\udcff", "/a/\ud800"])
def test_refused(bad: str) -> None:
    with pytest.raises(InvalidPath):
        paths.normalize(bad)


@pytest.mark.parametrize("bad", ["/" + "x" * 256, "/" + "ä" * 128, "/a" * 1001, "/" + "/".join(["x" * 200] * 41)])
def test_too_long(bad: str) -> None:
    with pytest.raises(NameTooLong):
        paths.normalize(bad)


def test_limits_hold_after_normalising() -> None:
    assert paths.normalize("/a/" + "./" * 5000 + "b") == "/a/b"


@given(st.lists(st.sampled_from(["a", "b", ".", "..", "", "c*", "x y"]), max_size=12))
def test_normalize_is_what_posixpath_does(parts: list[str]) -> None:
    path = "/" + "/".join(parts)
    assert paths.normalize(path) == "/" + posixpath.normpath("/" + path).lstrip("/")
    assert paths.normalize(paths.normalize(path)) == paths.normalize(path)


def test_root_join_parent_name() -> None:
    assert paths.join("/", "/a") == "/a"
    assert paths.join("/r", "/") == "/r"
    assert paths.join("/r", "/a/b") == "/r/a/b"
    assert paths.parent_of("/a/b") == "/a"
    assert paths.parent_of("/a") == "/"
    assert paths.name_of("/a/b") == "b"
    assert paths.name_of("/") == ""


def test_is_below() -> None:
    assert paths.is_below("/a/b", "/a")
    assert paths.is_below("/a", "/")
    assert not paths.is_below("/ab", "/a")
    assert not paths.is_below("/a", "/a")


def test_globs() -> None:
    for path in ("/a*", "/a?", "/[a", "/{a}", "/a\\b"):
        assert paths.looks_like_glob(path)
    assert not paths.looks_like_glob("/a]b}")
    assert paths.quote_glob("/a*b?c[d]{e}\\") == "/a[*]b[?]c[[]d]{e}\\"
