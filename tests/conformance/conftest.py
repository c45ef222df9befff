"""Fixtures of the conformance suite: the cluster under test, and a probe with a fresh directory for every test."""

from __future__ import annotations

import re
import uuid
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack
from dataclasses import replace

import pytest
import trio
from conformance.cluster import ThreadedServer, detect, make_root, named_master, named_standby, remove, survey
from conformance.probe import Probe, Target, Wire
from conformance.rules import EVERY, HEAD, NEEDS, Version

NAMED_CLUSTER = "cluster"


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "rule(sections, only, embedded, needs): the rule that a test holds")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """One run per version on the embedded server, one run on a named cluster."""
    if "target" not in metafunc.fixturenames:
        return
    mark = metafunc.definition.get_closest_marker("rule")
    assert mark is not None, f"{metafunc.definition.nodeid} names no rule"
    if named_master() is not None:
        metafunc.parametrize("target", [None], ids=[NAMED_CLUSTER], indirect=True, scope="session")
        return
    versions = [version for version in reversed(EVERY) if version in mark.kwargs["only"]]
    metafunc.parametrize(
        "target", versions, ids=[version.label for version in versions], indirect=True, scope="session"
    )


@pytest.fixture(scope="session")
def root_name() -> str:
    """The directory that the whole run works in."""
    return f"/curvfs-conformance-{uuid.uuid4()}"


@pytest.fixture(scope="session")
def embedded(tmp_path_factory: pytest.TempPathFactory, root_name: str) -> Iterator[dict[Version, Target]]:
    """The embedded servers that were needed so far, one per version."""
    with ExitStack() as stack:
        yield _Servers(tmp_path_factory, stack, root_name)


class _Servers(dict[Version, Target]):
    def __init__(self, paths: pytest.TempPathFactory, stack: ExitStack, root_name: str) -> None:
        super().__init__()
        self._paths = paths
        self._stack = stack
        self._root_name = root_name

    def __missing__(self, version: Version) -> Target:
        threaded = ThreadedServer(self._paths.mktemp(version.label), version, ttl_check_interval_s=0.5)
        server = self._stack.enter_context(threaded)
        trio.run(make_root, server.target, self._root_name)
        self[version] = trio.run(survey, server.target, self._root_name)
        return self[version]


@pytest.fixture(scope="session")
def cluster(root_name: str) -> Iterator[Target | None]:
    """The cluster that the environment names. What the suite makes there is removed at the end."""
    master = named_master()
    if master is None:
        yield None
        return
    unknown = Target(master, named_standby(), HEAD, embedded=False)
    try:
        trio.run(make_root, unknown, root_name)
        version = trio.run(detect, unknown, root_name)
        yield trio.run(survey, replace(unknown, version=version), root_name)
    finally:
        trio.run(remove, unknown, root_name)


@pytest.fixture(scope="session")
def target(request: pytest.FixtureRequest) -> Target:
    """The cluster under test."""
    version: Version | None = request.param
    if version is None:
        found: Target = request.getfixturevalue("cluster")
        return found
    servers: dict[Version, Target] = request.getfixturevalue("embedded")
    return servers[version]


@pytest.fixture(autouse=True)
def rule_applies(request: pytest.FixtureRequest) -> None:
    """Skip, by name and with the reason, what cannot be tested on a named cluster."""
    if "target" not in request.fixturenames:
        return
    found: Target = request.getfixturevalue("target")
    mark = request.node.get_closest_marker("rule")
    wanted = mark.kwargs
    where = f"section {', '.join(wanted['sections'])}, {request.node.originalname}"
    if not found.embedded and wanted["embedded"] is not None:
        pytest.skip(f"{where}: not on a named cluster, {wanted['embedded']}")
    if found.version not in wanted["only"]:
        only = ", ".join(version.label for version in wanted["only"])
        pytest.skip(f"{where}: the cluster behaves as {found.version.label}; this is a rule of {only}")
    if wanted["needs"] is not None and wanted["needs"] not in found.has:
        pytest.skip(f"{where}: {NEEDS[wanted['needs']]}")


@pytest.fixture
async def probe(request: pytest.FixtureRequest, target: Target, root_name: str) -> AsyncIterator[Probe]:
    """A connection to the master and a fresh directory, removed after the test."""
    name = re.sub(r"\W+", "-", request.node.name.partition("[")[0])
    wire = await Wire.connect(target.master)
    found = Probe(target, wire, f"{root_name}/{name}-{uuid.uuid4().hex[:8]}")
    await found.mkdir(found.directory)
    try:
        yield found
    finally:
        await found.aclose()
        await remove(target, found.directory)
