"""``curvfs serve``: the embedded single-node server as a command."""

from __future__ import annotations

from typing import Annotated

import typer

from curvfs.server import program
from curvfs.server.behaviour import BEHAVIOURS, HEAD
from curvfs.server.service import MASTER_PORT, WORKER_PORT
from tools.jsonoption import Json


def register(app: typer.Typer) -> None:
    """Add the command to the command line."""
    app.command()(serve)


def serve(
    directory: Annotated[
        str, typer.Argument(metavar="DIR", help="Where metadata and blocks are kept; made when missing.")
    ],
    host: Annotated[str, typer.Option(help="Address to listen on. The protocol has no authentication.")] = "127.0.0.1",
    master_port: Annotated[int, typer.Option(help="Port of the master; 0 picks a free one.")] = MASTER_PORT,
    worker_port: Annotated[int, typer.Option(help="Port of the worker; 0 picks a free one.")] = WORKER_PORT,
    hostname: Annotated[
        str | None,
        typer.Option(help="Name of the worker; clients of that name use its files directly. Default: this machine's."),
    ] = None,
    capacity: Annotated[
        str | None, typer.Option(help="What the blocks may take at most, such as 100GB. Default: the file system.")
    ] = None,
    ttl_check_interval: Annotated[
        str, typer.Option(help="How often files whose TTL has passed are deleted, such as 10m.")
    ] = program.TTL_CHECK_INTERVAL,
    behave_as: Annotated[str, typer.Option(help=f"Curvine version to behave as: {', '.join(BEHAVIOURS)}.")] = HEAD.name,
    announce_version: Annotated[
        str | None, typer.Option(help="What the server says that its version is. Default: its own.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Serve DIR as a one-node Curvine cluster until SIGTERM or Ctrl-C.

    Prints its curvine:// URL once clients may come, with --json in an object.
    """
    program.serve(
        directory,
        host=host,
        master_port=master_port,
        worker_port=worker_port,
        hostname=hostname,
        capacity=capacity,
        ttl_check_interval=ttl_check_interval,
        behave_as=behave_as,
        announce_version=announce_version,
        as_json=as_json,
    )
