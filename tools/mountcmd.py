"""``curvfs mount`` and ``curvfs umount``: a pool as a directory."""

from __future__ import annotations

from typing import Annotated

import typer

from curvfs.errors import UsageError
from curvfs.world import World
from mount.background import mount_in_background, mount_in_foreground
from mount.options import DEFAULT_KV_PATH, MountOptions
from mount.session import MountSource, unmount_command


def register(app: typer.Typer) -> None:
    """Add the commands to the command line."""
    app.command()(mount)
    app.command()(umount)


def mount(
    targets: Annotated[
        list[str],
        typer.Argument(
            metavar="[URL] MOUNTPOINT",
            help="curvine://host:port/path (not with --embedded), and an empty directory.",
        ),
    ],
    embedded: Annotated[
        str | None,
        typer.Option(metavar="DIR", help="Mount the pool in DIR; its server is started unless one runs there."),
    ] = None,
    background: Annotated[
        bool, typer.Option("--background", "-b", help="Return when the mount answers; it goes on by itself.")
    ] = False,
    kv: Annotated[
        list[str] | None,
        typer.Option(
            metavar="PATH",
            help="A directory below the mounted one that holds KV objects, sealed when published; may be given again; "
            f". is the mounted one itself. Default: {DEFAULT_KV_PATH}.",
        ),
    ] = None,
    no_kv: Annotated[bool, typer.Option("--no-kv", help="Make no KV prefix; those that exist stay.")] = False,
    allow_other: Annotated[bool, typer.Option("--allow-other", help="Let other users in, as modes allow.")] = False,
    read_only: Annotated[bool, typer.Option("--read-only", help="Refuse every change.")] = False,
    client_hostname: Annotated[
        str | None,
        typer.Option(
            metavar="NAME", help="Our own name; workers of that name are read directly. Default: this machine's."
        ),
    ] = None,
    log_file: Annotated[
        str | None, typer.Option(metavar="FILE", help="Log there, turned over at 10 MiB. Default: stderr, warnings.")
    ] = None,
    option: Annotated[
        list[str] | None,
        typer.Option("-o", metavar="NAME=VALUE,...", help="More options, as in fstab; docs/mount.md lists them."),
    ] = None,
    debug: Annotated[bool, typer.Option("--debug", help="Log every error that a request ran into.")] = False,
) -> None:
    """Mount a pool. Ctrl-C, SIGTERM or curvfs umount ends it."""
    if kv and no_kv:
        raise UsageError("--kv names KV prefixes and --no-kv wants none; give one of them.")
    if len(targets) != (1 if embedded is not None else 2):
        raise UsageError(
            "Give a URL and a mountpoint, as in curvfs mount curvine://host:8995/ /mnt/pool, or a mountpoint with "
            "--embedded DIR."
        )
    source = MountSource(url=targets[0] if embedded is None else None, embedded=embedded)
    words = list(option or ())
    if client_hostname is not None:
        words.append(f"client_hostname={client_hostname}")
    options = MountOptions(
        kv_paths=() if no_kv else tuple(kv) if kv else (DEFAULT_KV_PATH,),
        allow_other=allow_other,
        read_only=read_only,
    ).with_words(words)
    if background:
        url, path, pid = mount_in_background(source, targets[-1], options, log_file=log_file, debug=debug)
        typer.echo(f"Mounted {url} on {path} (pid {pid}).")
        return

    def announce(url: str, path: str) -> None:
        typer.echo(f"Mounted {url} on {path}; Ctrl-C unmounts it.")

    mount_in_foreground(source, targets[-1], options, log_file=log_file, debug=debug, announce=announce)


def umount(
    mountpoint: Annotated[str, typer.Argument(metavar="MOUNTPOINT", help="Where it is mounted.")],
    lazy: Annotated[
        bool, typer.Option("--lazy", "-z", help="Take it away at once, even where files are open on it.")
    ] = False,
) -> None:
    """Unmount a pool."""
    unmount_command(mountpoint, lazy=lazy, disk=World.real().disk)
