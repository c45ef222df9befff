"""``curvfs mount`` and ``curvfs umount``: a pool as a directory."""

from __future__ import annotations

import json
import os
from typing import Annotated, Any

import typer

from curvfs.errors import UsageError
from curvfs.world import World
from mount import curvine
from mount.background import mount_in_background, mount_in_foreground
from mount.options import DEFAULT_KV_PATH, LOG_JSON, LOG_TEXT, MountOptions
from mount.session import MountSource, unmount_command
from tools.jsonoption import Json


def register(app: typer.Typer) -> None:
    """Add the commands to the command line."""
    # Flags that nobody declared here may be those of Curvine's own mount: mount.curvine reads them.
    app.command(context_settings={"ignore_unknown_options": True})(mount)
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
    log_format: Annotated[
        str | None, typer.Option(metavar=f"{LOG_TEXT}|{LOG_JSON}", help="Lines for people, or one JSON object a line.")
    ] = None,
    ready_file: Annotated[
        str | None, typer.Option(metavar="FILE", help="A file that is there for as long as the mount answers.")
    ] = None,
    metrics: Annotated[
        str | None,
        typer.Option(metavar="HOST:PORT", help="Let Prometheus ask there; without a host on the loopback address."),
    ] = None,
    control: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="Where the mount tells of itself; off for nowhere. Default: .curvfs."),
    ] = None,
    option: Annotated[
        list[str] | None,
        typer.Option(
            "-o", "--options", metavar="NAME=VALUE,...", help="More options, as in fstab; docs/mount.md lists them."
        ),
    ] = None,
    debug: Annotated[bool, typer.Option("--debug", help="Log every error that a request ran into.")] = False,
    as_json: Json = False,
) -> None:
    """Mount a pool. Ctrl-C, SIGTERM or curvfs umount ends it."""
    asked = curvine.read_command_line(targets)
    if kv and no_kv:
        raise UsageError("--kv names KV prefixes and --no-kv wants none; give one of them.")
    flags = [*asked.words, *(option or ())]
    conf = curvine.conf_of(flags)
    filed = curvine.CommandLine((), (), ()) if conf is None else curvine.read_cluster_file(conf)
    places = asked.targets if embedded is not None else curvine.complete(asked.targets, filed.targets)
    if len(places) != (1 if embedded is not None else 2):
        raise UsageError(
            "Give a URL and a mountpoint, as in curvfs mount curvine://host:8995/ /mnt/pool, or a mountpoint with "
            "--embedded DIR."
        )
    source = MountSource(url=places[0] if embedded is None else None, embedded=embedded)
    options = MountOptions(
        kv_paths=() if no_kv else tuple(kv) if kv else (DEFAULT_KV_PATH,),
        allow_other=allow_other,
        read_only=read_only,
        ready_file=ready_file,
        log_file=log_file,
        log_format=log_format or LOG_TEXT,
        debug=debug,
    ).with_words(
        [
            *filed.words,
            *flags,
            *(
                f"{name}={value}"
                for name, value in (
                    ("client_hostname", client_hostname),
                    ("metrics", metrics),
                    ("control", control),
                )
                if value is not None
            ),
        ]
    )
    if left_alone := (*filed.left_alone, *asked.left_alone):
        typer.echo(f"Left alone, for they mean nothing here: {', '.join(left_alone)}.", err=True)
    if background:
        url, path, pid = mount_in_background(source, places[-1], options)
        _tell(as_json, {"url": url, "mountpoint": path, "pid": pid}, f"Mounted {url} on {path} (pid {pid}).")
        return

    def announce(url: str, path: str) -> None:
        _tell(
            as_json,
            {"url": url, "mountpoint": path, "pid": os.getpid()},
            f"Mounted {url} on {path}; Ctrl-C unmounts it.",
        )

    mount_in_foreground(source, places[-1], options, announce=announce)


def umount(
    mountpoint: Annotated[str, typer.Argument(metavar="MOUNTPOINT", help="Where it is mounted.")],
    lazy: Annotated[
        bool, typer.Option("--lazy", "-z", help="Take it away at once, even where files are open on it.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Unmount a pool."""
    place = unmount_command(mountpoint, lazy=lazy, disk=World.real().disk)
    if as_json:
        _tell(as_json, {"mountpoint": place, "unmounted": True}, "")


def _tell(as_json: bool, document: dict[str, Any], line: str) -> None:
    """Whoever waits for the line gets it at once."""
    print(json.dumps(document) if as_json else line, flush=True)
