"""What a command works on: URLs and paths, the connections behind them, and the failures it goes on after."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Self
from urllib.parse import quote

import typer

from curvfs.api import ClientConfig, SyncFileSystem, gather_settings
from curvfs.client import paths
from curvfs.config import URL_EXAMPLE
from curvfs.errors import CurvfsError, UsageError, from_os_error
from curvfs.world import World
from tools.configcmd import overrides_from
from tools.files.shown import printable


@dataclass(frozen=True, slots=True)
class Target:
    """A path of one cluster. ``text`` is what was typed; ``slash`` whether that ended in one, as directories do."""

    config: ClientConfig
    path: str
    text: str
    slash: bool = False

    def child(self, name: str) -> Target:
        """The entry ``name`` of this directory."""
        text, question, query = self.text.partition("?") if "://" in self.text else (self.text, "", "")
        shown = quote(name) if "://" in text else name
        return Target(self.config, paths.join(self.path, f"/{name}"), f"{text.rstrip('/')}/{shown}{question}{query}")

    @property
    def name(self) -> str:
        return paths.name_of(self.path)


class Run:
    """One run of a command: the clients it has opened, and what failed so far. A context manager.

    A failure of one argument is told on stderr at once and remembered: :attr:`code`, what the command exits with, is
    that of the first one.
    """

    def __init__(
        self, *, conf: str | None = None, setting: list[str] | None = None, as_json: bool = False, verbose: bool = False
    ) -> None:
        self.as_json = as_json
        self.verbose = verbose
        self.world = World.real()
        self.code = 0
        self._conf = conf
        self._overrides = overrides_from(setting)
        self._clients: dict[ClientConfig, SyncFileSystem] = {}
        self._unreachable: dict[ClientConfig, CurvfsError] = {}
        self._default: ClientConfig | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        for client in self._clients.values():
            client.close()

    # ------------------------------------------------------------------------------------------------------ targets

    def target(self, text: str) -> Target:
        """What ``text`` names. A URL's path is decoded; a plain path is taken as it is, in the configured cluster.

        Raises UsageError (ConfigError, InvalidPath)."""
        if "://" in text:
            config = gather_settings(text, file=self._conf, **self._overrides).config
            path, config = config.root, config.with_overrides(root="/")
            slash = text.partition("?")[0].endswith("/")
        elif text.startswith("/"):
            if self._default is None:
                self._default = gather_settings(file=self._conf, **self._overrides).config
            path, config, slash = text, self._default, text.endswith("/")
        else:
            raise UsageError(f"{text!r} is neither a URL such as {URL_EXAMPLE} nor a path that begins with a slash.")
        return Target(config, paths.normalize(path), text, slash)

    def open(self, target: Target) -> SyncFileSystem:
        """The client of a target's cluster. A cluster that did not answer once is not asked again."""
        client = self._clients.get(target.config)
        if client is None:
            if target.config in self._unreachable:
                raise self._unreachable[target.config]
            try:
                client = self._clients[target.config] = SyncFileSystem.connect(target.config)
            except CurvfsError as error:
                self._unreachable[target.config] = error
                raise
        return client

    # ----------------------------------------------------------------------------------------------------- failures

    @contextmanager
    def attempt(self, text: str) -> Iterator[None]:
        """What fails in here is told and remembered, and the command goes on. ``text`` is what was being worked on."""
        try:
            yield
        except BrokenPipeError:
            raise
        except CurvfsError as error:
            self.fail(text, error)
        except OSError as error:
            self.fail(text, from_os_error(error, doing=f"Cannot use {printable(str(error.filename or text))}"))

    def fail(self, text: str, error: CurvfsError) -> None:
        self.code = self.code or error.exit_code
        sys.stdout.flush()
        print(f"curvfs: {printable(str(error))}", file=sys.stderr)
        if self.as_json:
            self.document({"path": text, "error": str(error), "errno": error.errno_name, "exit_code": error.exit_code})

    # ------------------------------------------------------------------------------------------------------- output

    def document(self, document: dict[str, Any]) -> None:
        """One object of JSON on a line of its own."""
        typer.echo(json.dumps(document))

    def say(self, text: str, document: dict[str, Any]) -> None:
        """The one or the other, as ``--json`` has it."""
        if self.as_json:
            self.document(document)
        else:
            typer.echo(text)

    def did(self, text: str, document: dict[str, Any]) -> None:
        """What a command that is silent by itself has done: told with ``--verbose``, and always with ``--json``."""
        if self.verbose or self.as_json:
            self.say(printable(text), document)
