"""The mark that names the rule a test holds: ``@rule("4.5")``, and for which versions the rule is one.

The numbers are sections of the Curvine wire specification that this project was written from.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable

import pytest


class Version(enum.IntEnum):
    """The server generations that differ on the wire, oldest first."""

    ALPHA = 0
    V041 = 1
    HEAD = 2

    @property
    def label(self) -> str:
        """The name that ``--behave-as`` takes."""
        return {Version.ALPHA: "v0.3.2-alpha", Version.V041: "v0.4.1", Version.HEAD: "head"}[self]


ALPHA, V041, HEAD = Version
EVERY = (ALPHA, V041, HEAD)


def rule(*sections: str, only: Iterable[Version] = EVERY, embedded: str | None = None) -> pytest.MarkDecorator:
    """Mark a test with the sections that it holds.

    ``only``: versions that have the rule. ``embedded``: why the test runs against the embedded server alone.
    """
    return pytest.mark.rule(sections=sections, only=tuple(only), embedded=embedded)
