"""The ``curvfs`` command line: one typer application, one module per command."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Annotated, Any

import typer

import curvfs
from curvfs.errors import UsageError
from tools import benchcmd, configcmd, demo, mountcmd, mounthelper, mountscmd, scrubcmd, serve, verifycmd, wirecmd
from tools.doctor import command as doctorcmd
from tools.files import commands as filecommands
from tools.inspect import command as inspectcmd
from tools.size import command as sizecmd
from tools.top import command as topcmd

app = typer.Typer(name="curvfs", no_args_is_help=True, pretty_exceptions_enable=False)
serve.register(app)
mountcmd.register(app)
mounthelper.register(app)
mountscmd.register(app)
demo.register(app)
configcmd.register(app)
benchcmd.register(app)
scrubcmd.register(app)
verifycmd.register(app)
sizecmd.register(app)
doctorcmd.register(app)
topcmd.register(app)
filecommands.register(app)
app.add_typer(wirecmd.app, name="wire")
app.add_typer(inspectcmd.app, name="inspect")

#: Base of typer's own usage errors; typer moved it between modules, its place above BadParameter stayed.
_CommandLineError: type[Exception] = next(
    cls for cls in typer.BadParameter.__mro__ if issubclass(cls, Exception) and cls.__name__ == "ClickException"
)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"curvfs {curvfs.__version__}")
        raise typer.Exit


@app.callback()
def _curvfs(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit."),
    ] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Print a traceback when a command fails.")] = False,
) -> None:
    """A Curvine client, POSIX mount and KV-cache store for LLM inference."""


@cache
def _command() -> Any:
    return typer.main.get_command(app)


def run(arguments: Sequence[str]) -> int:
    """Run one command line and return its exit code.

    Raises UsageError for a wrong command line, BrokenPipeError when nobody reads our output any more, and whatever the
    command raises."""
    try:
        result = _command()(list(arguments), prog_name="curvfs", standalone_mode=False)
    except typer.Abort:
        raise KeyboardInterrupt from None
    except _CommandLineError as error:
        sentence = _usage_sentence(error)
        if sentence is None:
            return UsageError.exit_code
        raise UsageError(sentence) from error
    except SystemExit as end:
        # Click itself ends a program whose reader went away, with another exit code than ours.
        if isinstance(end.__context__, BrokenPipeError):
            raise end.__context__ from None
        raise
    return result if isinstance(result, int) else 0


def _usage_sentence(error: Exception) -> str | None:
    """What is wrong with the command line; None when a group of commands was named alone and its help was shown."""
    message = str(getattr(error, "format_message", error.__str__)()).strip()
    if type(error).__name__ == "NoArgsIsHelpError":
        if message:
            typer.echo(message)
        return None
    context = getattr(error, "ctx", None)
    command = context.command_path if context is not None else "curvfs"
    return f"{message.rstrip('.')}; see {command} --help."
