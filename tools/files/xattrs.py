"""``curvfs xattr``: extended attributes."""

from __future__ import annotations

import base64
import binascii
import errno
from typing import Annotated

import typer

from curvfs.client.symlinks import follow
from curvfs.errors import NotFound, UsageError
from tools.files.options import PATH_HELP, Conf, Json, Paths, Setting, Verbose, complete_path
from tools.files.shown import encoded, printable
from tools.files.targets import Run

app = typer.Typer(help="List, read and change extended attributes.", no_args_is_help=True)

_Path = Annotated[str, typer.Argument(metavar="PATH", help=PATH_HELP, autocompletion=complete_path)]
_Name = Annotated[str, typer.Argument(metavar="NAME", help="Such as user.comment.")]


@app.command("list")
def list_(path: Paths, conf: Conf = None, setting: Setting = None, as_json: Json = False) -> int:
    """Names and values of all attributes; values that are no text in base64, with 0s before them."""
    with Run(conf=conf, setting=setting, as_json=as_json) as run:
        for text in path:
            with run.attempt(text):
                target = run.target(text)
                fs = run.open(target)
                status = fs.stat(follow(fs, target.path))
                values = sorted(status.xattrs.items())
                lines = [f"# {printable(text)}"] if len(path) > 1 else []
                lines += [f"{printable(name)}={_shown(value)}" for name, value in values]
                if lines or as_json:
                    run.say(
                        "\n".join(lines),
                        {"path": status.path, "xattrs": {name: encoded(value) for name, value in values}},
                    )
        return run.code


@app.command()
def get(path: _Path, name: _Name, conf: Conf = None, setting: Setting = None, as_json: Json = False) -> int:
    """Print one value: text as it is, other bytes in base64 with 0s before them."""
    with Run(conf=conf, setting=setting, as_json=as_json) as run:
        with run.attempt(path):
            target = run.target(path)
            fs = run.open(target)
            status = fs.stat(follow(fs, target.path))
            if name not in status.xattrs:
                raise NotFound(f"{path} has no attribute {name}.", errno_=errno.ENODATA)
            value = status.xattrs[name]
            run.say(_shown(value), {"path": status.path, "name": name, "value": encoded(value)})
        return run.code


@app.command("set")
def set_(
    path: _Path,
    name: _Name,
    value: Annotated[str, typer.Argument(metavar="VALUE", help="Text, 0x and hex digits, or 0s and base64.")],
    verbose: Verbose = False,
    conf: Conf = None,
    setting: Setting = None,
    as_json: Json = False,
) -> int:
    """Set one attribute."""
    content = _parsed(value)
    _check_name(name)
    with Run(conf=conf, setting=setting, as_json=as_json, verbose=verbose) as run:
        with run.attempt(path):
            target = run.target(path)
            fs = run.open(target)
            end = follow(fs, target.path)
            fs.set_attr(end, xattrs={name: content})
            run.did(f"{path}: {name}={_shown(content)}", {"path": end, "name": name, "value": encoded(content)})
        return run.code


@app.command()
def rm(
    path: _Path,
    name: _Name,
    verbose: Verbose = False,
    conf: Conf = None,
    setting: Setting = None,
    as_json: Json = False,
) -> int:
    """Remove one attribute."""
    with Run(conf=conf, setting=setting, as_json=as_json, verbose=verbose) as run:
        with run.attempt(path):
            target = run.target(path)
            fs = run.open(target)
            status = fs.stat(follow(fs, target.path))
            if name not in status.xattrs:
                raise NotFound(f"{path} has no attribute {name}.", errno_=errno.ENODATA)
            fs.set_attr(status.path, remove_xattrs=[name])
            run.did(f"{path}: removed {name}", {"path": status.path, "name": name, "removed": True})
        return run.code


def _check_name(name: str) -> None:
    if not name or "\0" in name or len(name.encode(errors="replace")) > 255 or not name.isprintable():
        raise UsageError(f"{name!r} is no name of an attribute; 1 to 255 bytes of text are.")


def _parsed(value: str) -> bytes:
    """As setfattr reads values. Raises UsageError."""
    try:
        if value[:2] in ("0x", "0X"):
            return bytes.fromhex(value[2:])
        if value[:2] in ("0s", "0S"):
            return base64.b64decode(value[2:], validate=True)
        return value.encode()
    except (ValueError, binascii.Error):
        raise UsageError(f"{value!r} is neither text, nor hex digits behind 0x, nor base64 behind 0s.") from None


def _shown(value: bytes) -> str:
    try:
        text = value.decode()
    except UnicodeDecodeError:
        return "0s" + encoded(value)
    return text if text.isprintable() and text[:2].lower() not in ("0s", "0x") else "0s" + encoded(value)
