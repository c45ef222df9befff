"""Rules that a suite cannot test from outside in the time it has, by name and with the reason."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from conformance.probe import Target
from conformance.rules import HEAD, rule

NOT_TESTED_HERE = [
    ("1.4", "idle master connections are closed after 10 minutes, heartbeats or not", "takes 10 minutes"),
    ("1.4", "idle worker connections stay open", "takes more than 10 minutes"),
    ("4.2", "the retry cache forgets after 10 minutes and 100,000 entries", "takes 10 minutes"),
    ("4.7", "staging files of a worker that restarts are not writable", "needs to restart a worker"),
    ("4.15", "locks expire 5 minutes after they were set", "takes 5 minutes"),
    ("4.15", "locks survive a restart of the master", "needs to restart a master"),
    ("4.19", "mounts of under stores", "needs an under store"),
    ("4.20", "eviction under space pressure", "is off by default and needs a full cluster"),
    ("5.1", "another master takes over", "needs to kill a master"),
    (
        "5.5",
        "workers that are silent are blacklisted, then lost",
        "takes 30 seconds to 10 minutes and needs a dead worker",
    ),
    ("8.2", "versions rejected by an enforcing server", "is configuration of the server"),
]


@rule("12", only=[HEAD])
@pytest.mark.parametrize(
    ("section", "what", "why"), NOT_TESTED_HERE, ids=[f"{row[0]} {row[1]}" for row in NOT_TESTED_HERE]
)
def test_not_tested_here(target: Target, section: str, what: str, why: str) -> None:
    pytest.skip(f"{section} {what}: {why}")


def test_the_documentation_names_the_sections_that_are_held() -> None:
    """docs/conformance.md has one row for every section that a test here names, and no other."""
    here = Path(__file__).parent
    named = set()
    for file in here.glob("test_*.py"):
        for mark in re.findall(r"^@rule\((.*?)\)$", file.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL):
            named.update(re.findall(r'"(\d+(?:\.\d+)?)"', mark))
    documentation = (here.parent.parent / "docs" / "conformance.md").read_text(encoding="utf-8")
    documented = set(re.findall(r"^\| (\d+(?:\.\d+)?) \|", documentation, re.MULTILINE))
    assert documented == named
