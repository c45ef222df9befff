"""All file commands, for the command line."""

from __future__ import annotations

import typer

from tools.files import changes, listing, transfer, xattrs


def register(app: typer.Typer) -> None:
    """Add the commands to the command line."""
    for module in (listing, transfer, changes):
        module.register(app)
    app.add_typer(xattrs.app, name="xattr")
