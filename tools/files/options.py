"""What the file commands take in common, and the completion of paths in a shell."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, TypeAlias
from urllib.parse import quote

import typer

from curvfs.errors import CurvfsError

#: How long a shell waits for names, and how many it gets at most.
_COMPLETION_TIMEOUT_S = 1.0
_MAX_COMPLETIONS = 200


def complete_path(incomplete: str) -> Iterator[str]:
    """Entries of the directory that the word at the cursor names, directories with a slash behind them."""
    from tools.files.targets import Run

    directory, slash, begun = incomplete.rpartition("/")
    if not slash or directory in ("curvine:", "curvine:/"):
        return
    is_url = "://" in directory
    try:
        with Run(setting=[f"connect_timeout={_COMPLETION_TIMEOUT_S}", f"retry_max={_COMPLETION_TIMEOUT_S}"]) as run:
            target = run.target(directory + slash)
            entries = run.open(target).list(target.path)
    except CurvfsError:
        return
    found = 0
    for entry in entries:
        name = quote(entry.name) if is_url else entry.name
        if name.startswith(begun) and found < _MAX_COMPLETIONS:
            found += 1
            yield f"{directory}/{name}{'/' if entry.is_dir else ''}"


PATH_HELP = "curvine://host:port/path, or /path in the configured cluster."

Paths: TypeAlias = Annotated[list[str], typer.Argument(metavar="PATH...", help=PATH_HELP, autocompletion=complete_path)]
Conf: TypeAlias = Annotated[
    str | None,
    typer.Option("--conf", metavar="FILE", help="The cluster file. Default: CURVINE_CONF_FILE or CURVINE_HOME."),
]
Setting: TypeAlias = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="NAME=VALUE", help="Override a client setting; may be given again."),
]
Json: TypeAlias = Annotated[bool, typer.Option("--json", help="Print JSON, one object a line.")]
Human: TypeAlias = Annotated[bool, typer.Option("--human", "-h", help="Sizes as 1.5 MiB instead of bytes.")]
Verbose: TypeAlias = Annotated[bool, typer.Option("--verbose", "-v", help="Say what is done.")]
