"""``curvfs demo``: the command line of the demo; :mod:`tools.demo_run` is what runs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from curvfs.errors import UsageError


def register(app: typer.Typer) -> None:
    """Add the command ``demo``."""
    app.command()(demo)


def demo(
    prompts: Annotated[str, typer.Option(help="Prompt lengths in tokens, separated by commas.")] = (
        "256,500,1000,2000,3000"
    ),
    model: Annotated[str, typer.Option(help="Size of the model: full, or small, too quick to be timed.")] = "full",
    directory: Annotated[
        Path, typer.Option("--dir", help="Where the picture goes, and the pool while the demo runs.")
    ] = Path("out/demo"),
    page_tokens: Annotated[int, typer.Option(help="Tokens per KV page.", min=1)] = 64,
    new_tokens: Annotated[int, typer.Option(help="Tokens that each replica generates.", min=1)] = 8,
    mount: Annotated[bool, typer.Option("--mount/--no-mount", help="Mount the pool and look at it.")] = True,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object; all else goes to stderr.")] = False,
) -> None:
    """Show two model replicas that share their KV cache, and check that they agree."""
    try:
        lengths = tuple(int(each) for each in prompts.split(","))
    except ValueError:
        raise UsageError(f"--prompts {prompts!r} is not a list of numbers; write it like 256,1000.") from None
    if min(lengths) <= page_tokens:
        raise UsageError(
            f"A prompt of {min(lengths)} tokens has no whole page of {page_tokens} before its last token; "
            "ask for longer prompts or smaller pages."
        )
    if model not in ("full", "small"):
        raise UsageError(f"--model {model!r} is unknown; say full or small.")
    from tools import demo_run  # brings a tokenizer, numpy and safetensors with it: only for this command

    code = demo_run.main(demo_run.Options(lengths, model, directory, page_tokens, new_tokens, mount), as_json=as_json)
    if code:
        raise typer.Exit(code)
