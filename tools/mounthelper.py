"""``mount -t curvfs`` and ``/etc/fstab``: the program that mount(8) looks for, and what installs it.

mount(8) runs ``/sbin/mount.TYPE SOURCE DIR [-sfnv] [-N NAMESPACE] [-o OPTIONS] [-t TYPE]`` and waits until it ends.
"""

from __future__ import annotations

import json
import os
import shlex
import sys
from typing import Annotated

import typer

from curvfs.errors import EnvironmentError_, UsageError
from curvfs.world import World
from mount.background import mount_in_background
from mount.options import MountOptions
from mount.session import MountSource
from tools.jsonoption import Json

#: ``mount -t curvfs`` looks for the first, ``mount -t fuse.curvfs`` for the second.
HELPERS = ("mount.curvfs", "mount.fuse.curvfs")
_MARK = "# made by: curvfs install-helper"
_FLAGS = "fnsvw"
_WITH_VALUE = ("-o", "-t", "-N")


def register(app: typer.Typer) -> None:
    """Add the commands to the command line."""
    app.command(name="mount-helper", hidden=True, context_settings={"ignore_unknown_options": True})(mount_helper)
    app.command(name="install-helper")(install_helper)


def mount_helper(
    arguments: Annotated[list[str], typer.Argument(metavar="SOURCE DIR [-sfnv] [-o OPTIONS] [-t TYPE]")],
) -> None:
    """Mount as mount(8) asks for it. SOURCE is a curvine:// URL, or the directory of an embedded server."""
    places, words, fake, verbose = _read(arguments)
    if len(places) != 2:
        raise UsageError("mount.curvfs needs SOURCE and DIR, as mount(8) gives them.")
    if any(word == "remount" for word in words):
        raise UsageError("A curvfs mount cannot be changed in place; unmount it and mount it again.")
    where, mountpoint = places
    is_url = "://" in where
    source = MountSource(url=where if is_url else None, embedded=None if is_url else where)
    options = MountOptions().with_words(words)
    if fake:
        return
    url, path, pid = mount_in_background(source, mountpoint, options)
    if verbose:
        typer.echo(f"Mounted {url} on {path} (pid {pid}).")


def _read(arguments: list[str]) -> tuple[list[str], list[str], bool, bool]:
    """Places, ``-o`` words, and whether to pretend, and to speak."""
    places: list[str] = []
    words: list[str] = []
    flags = ""
    rest = list(arguments)
    while rest:
        argument = rest.pop(0)
        if argument in _WITH_VALUE:
            if not rest:
                raise UsageError(f"mount.curvfs: {argument} needs a value.")
            value = rest.pop(0)
            if argument == "-N":
                raise UsageError("mount.curvfs cannot mount in another name space; enter it with nsenter first.")
            if argument == "-o":
                words += value.split(",")
        elif argument.startswith("-") and len(argument) > 1 and set(argument[1:]) <= set(_FLAGS):
            flags += argument[1:]
        elif argument == "-r":
            words.append("ro")
        elif argument.startswith("-"):
            raise UsageError(f"mount.curvfs does not know {argument}; mount(8) would not give it.")
        else:
            places.append(argument)
    return places, words, "f" in flags, "v" in flags


def install_helper(
    directory: Annotated[str, typer.Option(metavar="DIR", help="Where mount(8) looks.")] = "/sbin",
    remove: Annotated[bool, typer.Option("--remove", help="Take them away again.")] = False,
    as_json: Json = False,
) -> None:
    """Let mount -t curvfs and /etc/fstab work: write mount.curvfs and mount.fuse.curvfs to /sbin."""
    disk = World.real().disk
    python = shlex.quote(sys.executable)
    script = f'#!/bin/sh\n{_MARK}\nexec {python} -P -m tools mount-helper "$@"\n'
    changed = []
    for name in HELPERS:
        path = os.path.join(directory, name)
        try:
            there = disk.read_file(path) if disk.exists(path) else None
            if there is not None and _MARK.encode() not in there:
                raise UsageError(f"{path} was not made by curvfs install-helper and is left alone; move it away first.")
            if remove:
                if there is not None:
                    disk.unlink(path)
                    changed.append(path)
            else:
                disk.write_file(path, script.encode(), 0o755)
                os.chmod(path, 0o755)
                changed.append(path)
        except OSError as error:
            raise EnvironmentError_(
                f"{path} cannot be changed ({error.strerror}); run as root, or give another --directory.",
                errno_=error.errno,
            ) from error
    did = "removed" if remove else "wrote"
    if as_json:
        typer.echo(json.dumps({did: changed}))
    else:
        typer.echo("\n".join(f"{did.capitalize()} {path}." for path in changed) or "Nothing was there to be removed.")
