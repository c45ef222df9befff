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


#: What a test may need of a cluster, and how to say that it is not there.
NEEDS = {
    "two workers": "fewer than two workers are live",
    "a standby": "no master is named that does not lead (CURVFS_TEST_STANDBY=host:port)",
    "local files": "the workers' files cannot be opened on this machine",
}


def rule(
    *sections: str, only: Iterable[Version] = EVERY, embedded: str | None = None, needs: str | None = None
) -> pytest.MarkDecorator:
    """Mark a test with the sections that it holds.

    ``only``: versions that have the rule. ``embedded``: why the test runs against the embedded server alone.
    ``needs``: one of :data:`NEEDS`.
    """
    assert needs is None or needs in NEEDS
    return pytest.mark.rule(sections=sections, only=tuple(only), embedded=embedded, needs=needs)
