"""The command line of ``curvfs inspect``."""

from __future__ import annotations

import json
from itertools import takewhile
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn

from curvfs.errors import CurvfsError, UsageError, from_os_error
from curvfs.units import format_size
from curvfs.world import World
from kvstore.keys import KeyChain
from kvstore.scrub import Scrubber
from tools.files.shown import printable
from tools.inspect.chain import describe_chain, identity_from_file, identity_of_process, read_tokens
from tools.inspect.object import describe_object
from tools.inspect.pool import AGES, describe_pool
from tools.inspect.sources import opened
from tools.interrupts import EXIT_INTERRUPTED, Interrupts
from tools.jsonoption import Json
from tools.plots import Bars, draw_bars_png, draw_bars_terminal
from tools.pools import looked_at

app = typer.Typer(help="Look at one object, at the pages of a prompt, or at a whole pool.", no_args_is_help=True)

#: Exit code when an object is damaged, so that scripts can tell.
EXIT_DAMAGED = 6

Prefix = Annotated[str, typer.Option(help="The KV prefix below the URL's directory.")]


@app.command("object")
def inspect_object(
    place: Annotated[
        str, typer.Argument(metavar="PATH|URL", help="A file, on any mount, or curvine://host:port/path.")
    ],
    verify: Annotated[bool, typer.Option(help="Read its data and check every sum.")] = True,
    as_json: Json = False,
) -> int:
    """What an object is: key, identity, tensors, checksums, blocks and hosts. Exit code 6 when it is damaged."""
    with opened(World.real(), place) as source:
        report = describe_object(source, verify=verify)
    typer.echo(json.dumps(report, indent=2) if as_json else _object_text(report))
    return EXIT_DAMAGED if report["verdict"] == "damaged" else 0


@app.command("pool")
def inspect_pool(
    url: Annotated[str, typer.Argument(metavar="URL", help="curvine://host:port/path or file:///directory.")],
    prefix: Prefix = "kv",
    namespace: Annotated[
        str | None, typer.Option(metavar="NAME", help="Draw this one only; the beginning of its name is enough.")
    ] = None,
    plot: Annotated[str | None, typer.Option(metavar="FILE.png", help="Draw ages and uses as PNG.")] = None,
    as_json: Json = False,
) -> int:
    """Objects, bytes, ages and uses of a pool, by namespace. Ctrl-C ends it early with what was counted."""
    world = World.real()
    console = Console(stderr=True)
    with (
        Interrupts() as interrupts,
        looked_at(world, url, prefix) as backend,
        Progress(
            SpinnerColumn(),
            TextColumn("{task.completed:,.0f} objects"),
            console=console,
            transient=True,
            disable=not console.is_terminal,
        ) as progress,
    ):
        walker = Scrubber(world, backend, lambda _: None)
        entries = takewhile(lambda _: not interrupts.heard, walker.walk())
        report = describe_pool(backend, walker, progress.track(entries, total=None))
    report["interrupted"] = interrupts.heard
    code = EXIT_INTERRUPTED if interrupts.heard else 0
    drawn = _of_namespace(report, namespace) if namespace else report
    bars = _bars(drawn)
    if plot:
        draw_bars_png(plot, bars, title=f"{url} {namespace or ''}")
    if as_json:
        typer.echo(json.dumps(report, indent=2))
        return code
    if interrupts.heard:
        typer.echo("Interrupted; this is what was counted until then.")
    typer.echo(_pool_text(report))
    if namespace:
        typer.echo(f"Of {printable(namespace)}:")
    typer.echo(draw_bars_terminal(bars))
    typer.echo(f"not used since they were written: {drawn['never_used']:,}")
    return code


def _of_namespace(report: dict[str, Any], name: str) -> dict[str, Any]:
    """The part of one namespace, named by the beginning of its name."""
    found = [part for known, part in report["namespaces"].items() if known.startswith(name)]
    if len(found) != 1:
        raise UsageError(
            f"{len(found) or 'No'} namespaces of the pool begin with {name!r}; name one of "
            f"{', '.join(report['namespaces']) or 'none'}."
        )
    chosen: dict[str, Any] = found[0]
    return chosen


@app.command("chain")
def inspect_chain(
    tokens: Annotated[str, typer.Argument(metavar="FILE", help="Token numbers as text or JSON; - for standard input.")],
    url: Annotated[str | None, typer.Option(help="The pool. Default: that of --pid.")] = None,
    identity: Annotated[
        str | None, typer.Option(metavar="FILE", help="JSON with model, revision, dtype, page_tokens, layout, ...")
    ] = None,
    pid: Annotated[
        int | None, typer.Option(help="Take identity and pool of the store that this process has open.")
    ] = None,
    salt_file: Annotated[str | None, typer.Option(metavar="FILE", help="The tenant's salt.")] = None,
    prefix: Prefix = "kv",
    as_json: Json = False,
) -> None:
    """The pages of a prompt: their keys, and which of them are stored where."""
    if (identity is None) == (pid is None):
        raise UsageError(
            "Keys need an identity; give either --identity FILE or --pid of a process that has a store open."
        )
    world = World.real()
    salt = _salt(world, salt_file)
    if identity is not None:
        whose, chain_hash = identity_from_file(world, identity, salt)
    else:
        assert pid is not None
        whose, chain_hash, its_url = identity_of_process(world, pid, salt)
        url = url or its_url
    if url is None:
        raise UsageError("No pool is named; give --url.")
    numbers = read_tokens(world, tokens)
    with looked_at(world, url, prefix) as backend:
        report = describe_chain(backend, KeyChain(whose, chain_hash=chain_hash), numbers)
    typer.echo(json.dumps(report, indent=2) if as_json else _chain_text(report))


def _salt(world: World, path: str | None) -> str:
    if path is None:
        return ""
    try:
        return world.disk.read_file(path).decode().rstrip("\n")
    except OSError as error:
        raise from_os_error(error, doing=f"reading the salt {path}") from error
    except UnicodeDecodeError as error:
        raise CurvfsError(f"The salt in {path} is not text.") from error


# ----------------------------------------------------------------------------------------------------------- text


def _object_text(report: dict[str, Any]) -> str:
    rows = [("Place", report["place"]), ("Length", format_size(report["length_bytes"]))]
    if "key" in report:
        rows += [
            ("Key", report["key"]),
            ("Identity", report["identity"]),
            ("Shard", report["shard"] or "none"),
            ("Tokens", _tokens(report["tokens"])),
            ("Codec", report["codec"]),
            ("Written", f"{_stamp(report['created_ms'])} by {report['writer']}"),
            (
                "Layout",
                f"header {report['header_bytes']} bytes, data {report['data_bytes']} in {report['units']} units",
            ),
        ]
        rows += [
            (
                "Tensors" if number == 0 else "",
                f"{tensor['name']:16} {tensor['dtype']} {tensor['shape']} at {tensor['offset_bytes']}",
            )
            for number, tensor in enumerate(report["tensors"])
        ]
    for number, block in enumerate(report["blocks"]):
        hosts = ", ".join(block["hosts"]) or "nowhere"
        rows.append(
            ("Blocks" if number == 0 else "", f"{block['id']}, {format_size(block['length_bytes'])}, on {hosts}")
        )
    rows += [("Attribute", f"{name} = {value}") for name, value in report["attributes"].items()]
    verdict = report["verdict"]
    rows.append(("Verdict", f"{verdict}: {report['reason']}" if report["reason"] else verdict))
    return "\n".join(f"{title:10} {printable(text)}" for title, text in rows)


def _tokens(said: str) -> str:
    start, _, count = said.partition("+")
    if not (start.isdecimal() and count.isdecimal()) or count == "0":
        return "not told (the key is an engine's own)"
    return f"{start} to {int(start) + int(count) - 1}"


def _stamp(created_ms: int | None) -> str:
    if created_ms is None:
        return "at an unknown time"
    from datetime import UTC, datetime

    try:
        return datetime.fromtimestamp(created_ms / 1000, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
    except (ValueError, OverflowError, OSError):
        return f"at an impossible time ({created_ms} ms)"


def _pool_text(report: dict[str, Any]) -> str:
    lines = [f"{report['objects']:,} objects, {format_size(report['size_bytes'])}"]
    for name, namespace in report["namespaces"].items():
        shards = ", ".join(shard for shard in namespace["shards"] if shard)
        lines.append(
            f"  {printable(name)}  {namespace['objects']:>9,} objects  {format_size(namespace['size_bytes']):>10}"
            + (f"  shards {shards}" if shards else "")
        )
    aside = report["aside"]
    lines.append(
        f"Besides: {format_size(aside['staging']['size_bytes'])} in staging, "
        f"{format_size(aside['trash']['size_bytes'])} in the trash, "
        f"{aside['quarantine']['files']} damaged objects in quarantine."
    )
    return "\n".join(lines)


def _bars(report: dict[str, Any]) -> Bars:
    return Bars(
        [name for name, _ in AGES],
        {
            "written less than ... ago": list(report["written_ago"].values()),
            "last used less than ... ago": list(report["used_ago"].values()),
        },
    )


def _chain_text(report: dict[str, Any]) -> str:
    lines = [
        f"{report['tokens']} tokens are {len(report['pages'])} full pages of {report['page_tokens']}; "
        f"the pool has the first {report['stored_pages']} ({report['stored_tokens']} tokens)."
    ]
    for page in report["pages"]:
        first, end = page["tokens"]
        held = "; ".join(
            f"{format_size(each['length_bytes'])}{' on ' + ', '.join(each['hosts']) if each['hosts'] else ''}"
            for each in page["objects"]
        )
        lines.append(f"{page['page']:5} tokens {first:>6}-{end - 1:<6} {page['key']}  {held or 'absent'}")
    return "\n".join(lines)
