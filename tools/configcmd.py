"""``curvfs config``: the effective client settings, and where each came from."""

from __future__ import annotations

import dataclasses
import json
from typing import Annotated, Any

import typer

from curvfs.config import ClientConfig, Settings, gather_settings
from curvfs.errors import UsageError
from tools.jsonoption import Json


def register(app: typer.Typer) -> None:
    """Add the command to the command line."""
    app.command()(config)


def config(
    url: Annotated[
        str | None, typer.Argument(metavar="[URL]", help="curvine://host:port,host:port/root?name=value")
    ] = None,
    conf: Annotated[
        str | None,
        typer.Option(metavar="FILE", help="The cluster file. Default: that of CURVINE_CONF_FILE or CURVINE_HOME."),
    ] = None,
    setting: Annotated[
        list[str] | None, typer.Option("--set", metavar="NAME=VALUE", help="Override a setting; may be given again.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Print the settings that a client would have, and where each came from."""
    settings = gather_settings(url, file=conf, **overrides_from(setting))
    typer.echo(json.dumps(_document(settings), indent=2) if as_json else _table(settings))


def overrides_from(words: list[str] | None) -> dict[str, Any]:
    """What ``--set NAME=VALUE`` was given. Raises UsageError."""
    overrides: dict[str, Any] = {}
    for word in words or ():
        name, separator, value = word.partition("=")
        if not separator:
            raise UsageError(f"{word!r} is no setting; write --set NAME=VALUE.")
        overrides[name] = value
    return overrides


def _values(config: ClientConfig) -> dict[str, Any]:
    values: dict[str, Any] = {field.name: getattr(config, field.name) for field in dataclasses.fields(ClientConfig)}
    return values | {"masters": config.masters_text}


def _document(settings: Settings) -> dict[str, Any]:
    return {
        "settings": {
            name: {"value": value, "source": settings.sources[name]} for name, value in _values(settings.config).items()
        },
        "unused": list(settings.unused),
    }


def _table(settings: Settings) -> str:
    rows = [(name, _text(value), settings.sources[name]) for name, value in _values(settings.config).items()]
    widths = [max(len(row[column]) for row in rows) for column in (0, 1)]
    lines = [f"{name:{widths[0]}}  {value:{widths[1]}}  {source}" for name, value, source in rows]
    lines += [f"{name} is not used by this client." for name in settings.unused]
    return "\n".join(lines)


def _text(value: object) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if value == "":
        return "-"
    return f"{value:g}" if isinstance(value, float) else str(value)
