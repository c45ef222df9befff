"""The ``curvfs`` command line: one typer application, one module per command."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from importlib import import_module
from typing import Annotated, Any

import typer

import curvfs
from curvfs.errors import UsageError

#: The modules of commands, in the order of the help. A command line that names one of them imports its module alone:
#: that starts in half the time, and what an extra brings is missed by the commands that need it and no others.
MODULES: dict[str, tuple[str, ...]] = {
    "tools.serve": ("serve",),
    "tools.mountcmd": ("mount", "umount"),
    "tools.mounthelper": ("mount-helper", "install-helper"),
    "tools.mountscmd": ("mounts",),
    "tools.demo": ("demo",),
    "tools.configcmd": ("config",),
    "tools.benchcmd": ("bench",),
    "tools.scrubcmd": ("scrub",),
    "tools.verifycmd": ("verify",),
    "tools.kvcmd": ("kv",),
    "tools.size.command": ("size",),
    "tools.doctor.command": ("doctor",),
    "tools.top.command": ("top", "stats"),
    "tools.files.commands": (
        *("ls", "stat", "du", "df", "report", "cat", "put", "get", "cp"),
        *("mv", "rm", "mkdir", "touch", "chmod", "chown", "ln", "xattr"),
    ),
    "tools.wirecmd": ("wire",),
    "tools.inspect.command": ("inspect",),
}

#: Base of typer's own usage errors; typer moved it between modules, its place above BadParameter stayed.
_CommandLineError: type[Exception] = next(
    cls for cls in typer.BadParameter.__mro__ if issubclass(cls, Exception) and cls.__name__ == "ClickException"
)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"curvfs {curvfs.__version__}")
        raise typer.Exit


def _curvfs(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit."),
    ] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Print a traceback when a command fails.")] = False,
) -> None:
    """A Curvine client, POSIX mount and KV-cache store for LLM inference."""


def _modules_for(arguments: Sequence[str]) -> tuple[str, ...]:
    """Which modules a command line needs: that of its command, else all, which help and completion show."""
    word = next((argument for argument in arguments if not argument.startswith("-")), None)
    if word is None and "--version" in arguments:
        return ("tools.configcmd",)  # there must be one
    return next(((module,) for module, names in MODULES.items() if word in names), tuple(MODULES))


@cache
def application(modules: tuple[str, ...]) -> Any:
    """The command line with the commands of these modules. Of several, those that lack a package are left out."""
    app = typer.Typer(name="curvfs", no_args_is_help=True, pretty_exceptions_enable=False)
    app.callback()(_curvfs)
    for name in modules:
        try:
            module = import_module(name)
        except ModuleNotFoundError as error:
            if len(modules) == 1 or (error.name or "").partition(".")[0] == name.partition(".")[0]:
                raise
            continue
        if hasattr(module, "register"):
            module.register(app)
        else:
            app.add_typer(module.app, name=MODULES[name][0])
    return typer.main.get_command(app)


def run(arguments: Sequence[str]) -> int:
    """Run one command line and return its exit code.

    Raises UsageError for a wrong command line, BrokenPipeError when nobody reads our output any more, and whatever the
    command raises."""
    try:
        command = application(_modules_for(arguments))
        result = command(list(arguments), prog_name="curvfs", standalone_mode=False)
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
