"""Entry point of the ``curvfs`` command: every failure is one sentence on stderr and an exit code.

Exit codes: 0 success, 1 failure, 2 wrong usage, 3 this machine lacks something, 4 no answer from a server, 5 an
error reply of a server (see :mod:`curvfs.errors`), 130 interrupted, 141 the reader of our output went away. A
traceback is printed only with ``curvfs --debug ...``.
"""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Sequence

from curvfs.errors import CurvfsError, EnvironmentError_
from curvfs.world import World

EXIT_FAILURE = 1
EXIT_INTERRUPTED = 130
EXIT_BROKEN_PIPE = 141

#: Third-party module -> the extra that brings it.
_EXTRAS = {
    "typer": "cli",
    "rich": "cli",
    "pyfuse3": "fuse",
    "xxhash": "kv",
    "torch": "torch",
    "numpy": "torch",
    "zstandard": "zstd",
    "transformers": "demo",
    "tokenizers": "demo",
    "safetensors": "demo",
    "matplotlib": "demo",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line ``argv`` (default: ``sys.argv[1:]``) and return the exit code."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    _open_standard_streams()
    try:
        from tools.cli import run

        code = run(arguments)
        sys.stdout.flush()
    except BrokenPipeError:
        _silence_stdout()
        return EXIT_BROKEN_PIPE
    except (Exception, KeyboardInterrupt, BaseExceptionGroup) as error:
        if _debug(arguments):
            traceback.print_exc()
        cause = _leading(error)
        if isinstance(cause, BrokenPipeError):
            _silence_stdout()
            return EXIT_BROKEN_PIPE
        if isinstance(cause, KeyboardInterrupt):
            return EXIT_INTERRUPTED
        print(f"curvfs: {_sentence(cause)}", file=sys.stderr)
        return cause.exit_code if isinstance(cause, CurvfsError) else EXIT_FAILURE
    return code


def _debug(arguments: Sequence[str]) -> bool:
    """Was ``--debug`` given? Looked for here because the command line itself may be what failed."""
    for argument in arguments:
        if not argument.startswith("-"):
            return False
        if argument == "--debug":
            return True
    return False


def _leading(error: BaseException) -> BaseException:
    """The error to report: the one inside nested exception groups that has a remedy, else the first."""
    if isinstance(error, BaseExceptionGroup):
        inner = [_leading(each) for each in error.exceptions]
        for wanted in (KeyboardInterrupt, CurvfsError):
            for each in inner:
                if isinstance(each, wanted):
                    return each
        return inner[0]
    if isinstance(error, ModuleNotFoundError) and error.name is not None:
        extra = _EXTRAS.get(error.name.partition(".")[0])
        if extra is not None:
            return EnvironmentError_(
                f"This command needs the Python package {error.name.partition('.')[0]}; "
                f"install it with: pip install 'curvfs[{extra}]'."
            )
    return error


def _sentence(error: BaseException) -> str:
    if isinstance(error, CurvfsError):
        return str(error)
    if isinstance(error, OSError) and error.errno is not None:
        where = f"{error.filename}: " if error.filename is not None else ""
        return f"{where}{error.strerror}."
    return f"Unexpected {type(error).__name__}: {error}; curvfs --debug with the same command shows where."


def _open_standard_streams() -> None:
    """Whoever starts us with a standard stream closed gets one that goes nowhere, so that no other file takes its
    descriptor."""
    disk = World.real().disk
    for number, (name, mode) in enumerate((("stdin", "r"), ("stdout", "w"), ("stderr", "w"))):
        if getattr(sys, name) is None:
            nowhere = disk.open(os.devnull, os.O_RDWR)
            if nowhere != number:
                os.dup2(nowhere, number)
                disk.close(nowhere)
            setattr(sys, name, open(number, mode, closefd=False))  # noqa: SIM115 (lives as long as we do)


def _silence_stdout() -> None:
    """Send what is left in stdout's buffer nowhere, so that the interpreter exits without complaint."""
    disk = World.real().disk
    nowhere = disk.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, sys.stdout.fileno())
    disk.close(nowhere)


if __name__ == "__main__":
    sys.exit(main())
