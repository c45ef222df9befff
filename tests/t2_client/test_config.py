"""Settings: URLs, environment, overrides, contradictions."""

from __future__ import annotations

from typing import Any

import pytest

from curvfs.config import ClientConfig, parse_url, resolve_config
from curvfs.errors import ConfigError
from curvfs.units import MIB


def parse(url: str, **overrides: Any) -> ClientConfig:
    return parse_url(url, environ={}, **overrides)


def test_several_masters_root_and_query() -> None:
    config = parse("curvine://m1:8995,m2,[::1]:9/l2/cache%20x?client_hostname=node7&block_size=4MB&short_circuit=off")
    assert config.masters == (("m1", 8995), ("m2", 8995), ("::1", 9))
    assert config.root == "/l2/cache x"
    assert (config.hostname, config.block_size_bytes, config.short_circuit) == ("node7", 4 * MIB, False)
    assert config.masters_text == "m1:8995,m2:8995,[::1]:9"


@pytest.mark.parametrize("url", ["curvine://h", "curvine://h/", "CURVINE://h:8995"])
def test_defaults(url: str) -> None:
    config = parse(url)
    assert config.masters == (("h", 8995),)
    assert (config.root, config.hostname, config.replicas) == ("/", "", 1)


@pytest.mark.parametrize(
    "url",
    [
        "",
        "localhost:8995",
        "http://localhost:8995/",
        "curvine:///path",
        "curvine://",
        "curvine://h:port/",
        "curvine://h:0/",
        "curvine://h:70000/",
        "curvine://h,,g/",
        "curvine://user@h/",
        "curvine://h/#x",
        "curvine://h/?nonsense=1",
        "curvine://h/?replicas",
        "curvine://h/?replicas=1&replicas=2",
        "curvine://h/?replicas=many",
        "curvine://h/?replicas=0",
        "curvine://h/?block_size=512KB",
        "curvine://h/?block_size=4GB",
        "curvine://h/?chunk_size=17MB",
        "curvine://h/?short_circuit=maybe",
        "curvine://h/?rpc_timeout=soon",
        "curvine://h/?rpc_timeout=0",
        "curvine://h/%ff",
    ],
)
def test_refused_in_one_sentence(url: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse(url)
    assert "\n" not in str(caught.value)
    assert caught.value.exit_code == 2


def test_a_wrong_url_comes_with_an_example() -> None:
    for url in ("localhost:8995", "curvine://", "curvine://h:x/"):
        with pytest.raises(ConfigError, match="curvine://localhost:8995/path"):
            parse(url)


def test_precedence_environment_url_overrides() -> None:
    environ = {"CURVINE_CLIENT_HOSTNAME": "from-environment"}
    assert parse_url("curvine://h/", environ=environ).hostname == "from-environment"
    assert parse_url("curvine://h/?client_hostname=from-url", environ=environ).hostname == "from-url"
    config = parse_url("curvine://h/?client_hostname=from-url", environ=environ, client_hostname="from-call")
    assert config.hostname == "from-call"
    assert parse_url("curvine://h/?client_hostname=u", environ=environ, client_hostname=None).hostname == "u"


def test_durations_and_overrides_by_field() -> None:
    config = parse("curvine://h/?rpc_timeout=1500ms&retry_max=2m", data_timeout_s=3, window=8)
    assert (config.rpc_timeout_s, config.retry_max_s, config.data_timeout_s, config.window) == (1.5, 120.0, 3.0, 8)
    again = resolve_config(config, root="/elsewhere", rpc_timeout="2s")
    assert (again.root, again.rpc_timeout_s, again.retry_max_s) == ("/elsewhere", 2.0, 120.0)
    with pytest.raises(ConfigError, match="no setting 'colour'"):
        resolve_config(config, colour="blue")
    with pytest.raises(ConfigError, match="absolute"):
        resolve_config(config, root="relative")
