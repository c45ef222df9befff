"""``--json`` of the commands that print one JSON object."""

from __future__ import annotations

from typing import Annotated, TypeAlias

import typer

Json: TypeAlias = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]
