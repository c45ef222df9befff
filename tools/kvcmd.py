"""``curvfs kv ls|du|evict|purge|warm``: keep house in a pool of KV objects."""

from __future__ import annotations

import dataclasses
import json
from typing import TYPE_CHECKING, Annotated

import typer

from curvfs.errors import UsageError
from curvfs.units import format_size, parse_duration, parse_size
from curvfs.world import World
from tools.jsonoption import Json

if TYPE_CHECKING:
    from kvstore.pool import Pool

app = typer.Typer(no_args_is_help=True, help="Keep house in a pool of KV objects.")

_LIST_PAGE = 1000

_Url = Annotated[str, typer.Argument(metavar="URL", help="curvine://host:port/path or file:///directory.")]
_Prefix = Annotated[str, typer.Option(help="The KV prefix below it; . for itself.")]
_Model = Annotated[str | None, typer.Option(help="This model only, by the name that its stores were opened with.")]
_Salt = Annotated[str, typer.Option(help="The tenant's salt, with --model.")]
_JsonLines = Annotated[bool, typer.Option("--json", help="Print JSON, one object a line.")]


def _open(url: str, prefix: str, *, lease_s: float = 30.0) -> Pool:
    from kvstore.pool import open_pool

    return open_pool(url, prefix=prefix, lease_s=lease_s)


def _chosen(pool: Pool, model: str | None, salt: str) -> list[str]:
    """The namespaces that are meant. Raises UsageError when the one that is named is not there."""
    from kvstore.keys import namespace_of

    found = pool.namespaces()
    if model is None:
        if salt:
            raise UsageError("A salt belongs to a model; give --model, too.")
        return found
    wanted = namespace_of(model, salt)
    if wanted not in found:
        raise UsageError(f"Nothing of the model {model!r} with this salt is in the pool.")
    return [wanted]


def _age(pool: Pool, used_s: float) -> str:
    seconds = max(0.0, pool.now_s() - used_s)
    for unit, length in (("d", 86400), ("h", 3600), ("m", 60)):
        if seconds >= length:
            return f"{seconds / length:.0f} {unit}"
    return f"{seconds:.0f} s"


@app.command()
def du(url: _Url, prefix: _Prefix = "kv", model: _Model = None, salt: _Salt = "", as_json: Json = False) -> None:
    """What every namespace (a model and tenant) takes, and when it was last used."""
    with _open(url, prefix) as pool:
        usages = [pool.usage(namespace) for namespace in _chosen(pool, model, salt)]
        if as_json:
            records = [dataclasses.asdict(usage) for usage in usages]
            typer.echo(json.dumps({"namespaces": records, "free_bytes": pool.free_bytes()}))
            return
        for usage in usages:
            trash = f", {format_size(usage.trash_bytes)} in the trash" if usage.trash_bytes else ""
            used = f", used {_age(pool, usage.used_s)} ago" if usage.objects else ""
            typer.echo(
                f"{usage.namespace}  {format_size(usage.object_bytes):>10}  {usage.objects} objects{trash}{used}"
            )
        typer.echo(f"{format_size(pool.free_bytes())} are free.")


@app.command()
def ls(url: _Url, prefix: _Prefix = "kv", model: _Model = None, salt: _Salt = "", as_json: _JsonLines = False) -> None:
    """Every object: its key, shard and length."""
    with _open(url, prefix) as pool:
        for namespace in _chosen(pool, model, salt):
            cursor = ""
            while True:
                listing = pool.list(namespace, cursor, _LIST_PAGE)
                for page in listing.pages:
                    if as_json:
                        typer.echo(json.dumps({"namespace": namespace, **dataclasses.asdict(page)}))
                    else:
                        shard = f"  {page.shard}" if page.shard else ""
                        typer.echo(f"{namespace}  {page.key}  {page.length_bytes}{shard}")
                cursor = listing.cursor
                if not cursor:
                    break


@app.command()
def evict(
    url: _Url,
    quota: Annotated[str | None, typer.Option(help="What each namespace may take, such as 500GB.")] = None,
    high: Annotated[float, typer.Option(help="Evict where more than this part of the quota is used ...")] = 0.95,
    low: Annotated[float, typer.Option(help="... until this part of it is.")] = 0.85,
    ttl: Annotated[str | None, typer.Option(help="Evict what was written longer ago, such as 7d.")] = None,
    min_free: Annotated[str | None, typer.Option(help="Free room that the pool keeps, such as 50GB.")] = None,
    every: Annotated[str | None, typer.Option(help="Go on, once in this time, such as 30s, until Ctrl-C.")] = None,
    lease: Annotated[str, typer.Option(help="How long the trash is kept for those who were promised it.")] = "30s",
    prefix: _Prefix = "kv",
    model: _Model = None,
    salt: _Salt = "",
    as_json: _JsonLines = False,
) -> None:
    """Bring a pool within limits: what was used longest ago goes first."""
    from kvstore.capacity.settings import Capacity

    capacity = Capacity(
        quota_bytes=None if quota is None else parse_size(quota),
        high=high,
        low=low,
        ttl_s=None if ttl is None else parse_duration(ttl),
        min_free_bytes=0 if min_free is None else parse_size(min_free),
    )
    if not capacity.limits:
        raise UsageError("Nothing says what is too much; give --quota, --ttl or --min-free.")
    pause_s = None if every is None else parse_duration(every)
    with _open(url, prefix, lease_s=parse_duration(lease)) as pool:
        while True:
            for namespace in _chosen(pool, model, salt):
                stats = pool.evict(namespace, capacity)
                if not stats.evicted and pause_s is not None:
                    continue
                if as_json:
                    typer.echo(json.dumps({"namespace": namespace, **dataclasses.asdict(stats)}))
                else:
                    trash = f", {format_size(stats.trash_bytes)} of it in the trash" if stats.trash_bytes else ""
                    typer.echo(
                        f"{namespace}  {stats.evicted} objects evicted, {format_size(stats.evicted_bytes)};"
                        f" {format_size(max(0, stats.used_bytes))} in use{trash}"
                    )
            if pause_s is None:
                return
            World.real().clock.block(pause_s)


@app.command()
def warm(
    url: _Url,
    most: Annotated[str | None, typer.Option(help="Read at most so much, such as 20GB. Default: everything.")] = None,
    prefix: _Prefix = "kv",
    model: _Model = None,
    salt: _Salt = "",
    as_json: Json = False,
) -> None:
    """Read objects into the page cache of the machines that hold them: what was used last comes first."""
    from tools.progress import ProgressLine

    world = World.real()
    most_bytes = None if most is None else parse_size(most)
    with _open(url, prefix) as pool, ProgressLine(world, wanted=not as_json) as progress:
        namespaces = _chosen(pool, model, salt)
        whole_bytes = sum(pool.usage(namespace).object_bytes for namespace in namespaces)
        wanted_bytes = whole_bytes if most_bytes is None else min(most_bytes, whole_bytes)
        read_bytes = 0

        def moved(size_bytes: int) -> None:
            nonlocal read_bytes
            read_bytes += size_bytes
            progress(read_bytes / max(1, wanted_bytes), read_bytes, "reading objects")

        count, size_bytes = pool.warm(namespaces, most_bytes, moved)
    if as_json:
        typer.echo(json.dumps({"objects": count, "object_bytes": size_bytes}))
    else:
        typer.echo(f"{count} objects read, {format_size(size_bytes)}.")


@app.command()
def purge(
    url: _Url,
    model: Annotated[str, typer.Option(help="The model, by the name that its stores were opened with.")],
    salt: _Salt = "",
    prefix: _Prefix = "kv",
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask.")] = False,
    as_json: Json = False,
) -> None:
    """Remove everything of one model and tenant, at once."""
    with _open(url, prefix) as pool:
        namespace = _chosen(pool, model, salt)[0]
        usage = pool.usage(namespace)
        if not yes:
            what = f"{usage.objects} objects of {model}, {format_size(usage.object_bytes)}"
            if not typer.confirm(f"Remove {what}?", err=as_json):
                raise typer.Abort
        count, size_bytes = pool.purge(namespace)
        if as_json:
            typer.echo(json.dumps({"namespace": namespace, "objects": count, "object_bytes": size_bytes}))
        else:
            typer.echo(f"{count} objects removed, {format_size(size_bytes)}.")
