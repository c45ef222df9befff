"""Two replicas of a language model share their KV cache, shown and checked from end to end.

Everything runs as it would in production: an embedded server in a process of its own, a mount of it, and two replica
processes (:mod:`tools.demo_replica`) that meet only in the store. Replica A has the client host name of the server's
worker, so it writes the block files directly; replica B has a name of its own and reads through TCP. A computes a
prompt from nothing and stores its pages; B, which never saw the prompt, loads them, computes the rest, and must
generate the same tokens.
"""

from __future__ import annotations

import base64
import json
import os
import shutil
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import trio

from curvfs.api import EmbeddedServer
from curvfs.errors import CurvfsError, UsageError
from curvfs.units import format_size
from curvfs.world import World
from tools.demo_mount import STEPS, is_mounted, look_around, mount, unmount
from tools.demo_process import Replica
from tools.demo_report import Checks, Row, Say, plot, table_head, table_row
from tools.demo_text import Prompts, find_text, train_tokenizer

#: Two best logits closer than this may swap by rounding alone: such a prompt proves nothing.
MIN_MARGIN = 0.01
MAX_LOGIT_DIFFERENCE = 1e-3
#: From this prompt length on sharing must pay, with the full model: the small one computes too fast to judge by.
MUST_PAY_FROM_TOKENS = 1000
#: Held by a run as long as it lives, inside its directory.
_RUN_LOCK = "run.lock"
_SLICES_TRIED = 8
_ANSWER_TIMEOUT_S = 300.0
_SERVER_STOP_TIMEOUT_S = 15.0
_STOPPING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@dataclass(frozen=True, slots=True)
class Options:
    """What to run. ``lengths``: prompt lengths in tokens. ``directory`` gets the picture and, while the demo runs, the
    pool and the mountpoint."""

    lengths: tuple[int, ...]
    size: str
    directory: Path
    page_tokens: int
    new_tokens: int
    use_mount: bool


def main(options: Options, *, as_json: bool) -> int:
    """Run the demo; the exit code."""
    return trio.run(_run, options, World.real(), as_json)


async def _run(options: Options, world: World, as_json: bool) -> int:
    """Run the demo until it ends or a signal stops it; the exit code. Cleaning up is not interrupted again."""
    code = 0
    scope = trio.CancelScope()

    async def stop_on_signal(task_status: trio.TaskStatus[None]) -> None:
        nonlocal code
        with trio.open_signal_receiver(*_STOPPING) as signals:
            task_status.started()
            async for number in signals:
                code = code or 128 + number
                scope.cancel()

    async with trio.open_nursery() as nursery:
        await nursery.start(stop_on_signal)
        with scope:
            demo = Demo(options, world, _print_aside if as_json else _print)
            result = await demo.run()
            code = code or int(bool(demo.checks.failed))
            if as_json:
                _print(json.dumps(result))
        nursery.cancel_scope.cancel()
    return code


def _print(line: str) -> None:
    print(line, flush=True)


def _print_aside(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


class Demo:
    """One run."""

    def __init__(self, options: Options, world: World, say: Say) -> None:
        self._options = options
        self._world = world
        self._say = say
        self.checks = Checks(say)

    async def run(self) -> dict[str, Any]:
        """Everything from the empty directory to the verdict. Leaves nothing running and nothing mounted."""
        started_s = self._world.clock.monotonic_s()
        origin, text = find_text()
        tokenizer = train_tokenizer(text)
        prompts = Prompts(text, tokenizer)
        self._say(f"Text: {origin}, {len(text):,} characters; BPE tokenizer trained on it: "
                  f"{tokenizer.get_vocab_size():,} tokens.")  # fmt: skip
        async with self._directory() as home:
            pool, mountpoint = home / "pool", home / "mnt"
            async with self._server(pool) as url, self._mount(pool, mountpoint) as mounted:
                rows, digests = await self._replicas(url, prompts)
                if mounted:
                    await look_around(mountpoint, digests, self._world, self._say, self.checks)
        picture = self._options.directory / "ttft.png"
        await self._world.threads.run(plot, rows, picture)
        self._say(f"Picture: {picture}")
        self._verdict(self._world.clock.monotonic_s() - started_s)
        return {
            "rows": [row.as_dict() for row in rows],
            "checks_held": self.checks.held,
            "failed": self.checks.failed,
            "not_run": self.checks.not_run,
            "picture": str(picture),
        }

    def _verdict(self, took_s: float) -> None:
        self._say("")
        if self.checks.not_run:
            self._say(f"Not run: {', '.join(self.checks.not_run)}.")
        if self.checks.failed:
            self._say(f"{len(self.checks.failed)} checks FAILED, {self.checks.held} held ({took_s:.0f} s):")
            for what in self.checks.failed:
                self._say(f"  - {what}")
        else:
            self._say(f"All {self.checks.held} checks held ({took_s:.0f} s).")

    # ---- what must be there while the replicas run, and gone afterwards

    @asynccontextmanager
    async def _directory(self) -> AsyncIterator[Path]:
        """A fresh directory for this run, removed at the end unless something is still mounted in it."""
        disk = self._world.disk
        home = self._options.directory / f"run-{self._world.random.uuid()[:8]}"
        try:
            (home / "mnt").mkdir(parents=True)
        except OSError as error:
            raise UsageError(f"{home} cannot be made: {error.strerror}; choose another place with --dir.") from error
        lock = disk.open(str(home / _RUN_LOCK), os.O_RDWR | os.O_CREAT)
        disk.lock(lock)
        try:
            await self._clear_after_killed_runs()
            yield home
        finally:
            if not is_mounted(home / "mnt"):
                shutil.rmtree(home, ignore_errors=True)
            disk.close(lock)

    async def _clear_after_killed_runs(self) -> None:
        """Unmount and remove what runs that were killed left behind; their servers stop once nothing is mounted."""
        disk = self._world.disk
        for home in self._options.directory.glob("run-*"):
            try:
                lock = disk.open(str(home / _RUN_LOCK), os.O_RDWR)
            except OSError:
                continue  # no run of ours
            try:
                if disk.lock(lock) and (not is_mounted(home / "mnt") or await unmount(home / "mnt")):
                    await self._stop_server(home / "pool")
                    shutil.rmtree(home, ignore_errors=True)
            finally:
                disk.close(lock)

    @asynccontextmanager
    async def _server(self, pool: Path) -> AsyncIterator[str]:
        """An embedded server for the pool, in a process of its own; its URL."""
        threads = self._world.threads
        server = await threads.run(_attach, pool, self._world)
        try:
            self._say(f"Embedded server of {pool}: {server.url}")
            yield server.url
        finally:
            with trio.CancelScope(shield=True):
                await threads.run(server.close)
                await self._stop_server(pool)

    async def _stop_server(self, pool: Path) -> None:
        """The server would stop by itself a few seconds after its last user; this one is asked to, and waited for."""
        disk, clock = self._world.disk, self._world.clock
        try:
            lock = disk.open(str(pool / "server.lock"), os.O_RDWR)
        except OSError:
            return  # it never began
        try:
            if disk.lock(lock):
                return  # it has ended
            os.kill(json.loads(disk.read_file(str(pool / "server.json")))["pid"], signal.SIGTERM)
            with trio.move_on_after(_SERVER_STOP_TIMEOUT_S):
                while not disk.lock(lock):
                    await clock.sleep(0.05)
        except (OSError, ValueError, KeyError):
            return  # it is just starting, or ending by itself
        finally:
            disk.close(lock)

    @asynccontextmanager
    async def _mount(self, pool: Path, mountpoint: Path) -> AsyncIterator[bool]:
        """The pool mounted; false where FUSE cannot be had or was not asked for."""
        mounted = False
        unmounted = True
        try:
            if self._options.use_mount:
                mounted = await mount(pool, mountpoint, self._say, self.checks)
            else:
                self.checks.skip(*STEPS)
            yield mounted
            if mounted:
                self._say(f"$ curvfs umount {mountpoint}")
        finally:
            if mounted or is_mounted(mountpoint):
                with trio.CancelScope(shield=True):
                    unmounted = await unmount(mountpoint)
        self.checks.check(unmounted, f"{mountpoint} is unmounted")

    # ---- the replicas

    async def _replicas(self, url: str, prompts: Prompts) -> tuple[list[Row], list[str]]:
        """Run every prompt through both replicas: the rows, and the digests of all pages that were stored."""
        options = self._options
        hostname = self._world.net.hostname()
        common = ["--model", options.size, "--page-tokens", str(options.page_tokens)]
        first = await Replica.start("A", ["--url", f"{url}?client_hostname={hostname}", *common])
        try:
            second = await Replica.start("B", ["--url", f"{url}?client_hostname=replica-b", *common])
            try:
                ready = await first.ask({"do": "ready"}, timeout_s=_ANSWER_TIMEOUT_S)
                self.checks.check(
                    ready == await second.ask({"do": "ready"}, timeout_s=_ANSWER_TIMEOUT_S),
                    "both replicas have the same model",
                )
                self._say(
                    f"Model: {ready['model']}; {format_size(ready['bytes_per_token'])} of KV per token, "
                    f"{options.page_tokens} tokens a page."
                )
                self._say(f"Replica A is client host {hostname}, as the worker; replica B is client host replica-b.")
                self._say("")
                self._say(table_head())
                rows = []
                digests: list[str] = []
                for length in options.lengths:
                    row, stored = await self._row(first, second, prompts, length)
                    self._say(table_row(row))
                    rows.append(row)
                    digests += stored
                self._say("")
                return rows, digests
            finally:
                await second.aclose()
        finally:
            await first.aclose()

    async def _row(self, first: Replica, second: Replica, prompts: Prompts, length: int) -> tuple[Row, list[str]]:
        """One prompt through both replicas: what was measured, and the digests of the pages that were stored."""
        steps = self._options.new_tokens
        for _ in range(_SLICES_TRIED):
            tokens = prompts.cut(length)
            cold = await first.ask({"do": "cold", "tokens": tokens, "steps": steps}, timeout_s=_ANSWER_TIMEOUT_S)
            if cold["margin"] >= MIN_MARGIN:
                break
            self._say(f"  (another slice of text: two best logits were only {cold['margin']:.4f} apart)")
        else:
            raise CurvfsError(f"No prompt of {length} tokens has clearly best tokens; run the demo with other lengths.")
        stored = await first.ask({"do": "store"}, timeout_s=_ANSWER_TIMEOUT_S)
        shared = await second.ask({"do": "shared", "tokens": tokens, "steps": steps}, timeout_s=_ANSWER_TIMEOUT_S)
        cold_logits, shared_logits = (
            np.frombuffer(base64.b64decode(answer["logits"]), np.float32) for answer in (cold, shared)
        )
        row = Row(
            tokens=length,
            hit_tokens=shared["hit_tokens"],
            loaded_bytes=shared["loaded_bytes"],
            load_s=shared["load_s"],
            cold_s=cold["first_token_s"],
            shared_s=shared["first_token_s"],
            margin=cold["margin"],
            logit_difference=float(np.abs(cold_logits - shared_logits).max()),
            path=f"{stored['path']} → {shared['path']}",
        )
        whole_pages = (length - 1) // self._options.page_tokens * self._options.page_tokens
        what = f"{length} tokens: "
        check = self.checks.check
        check(cold["known_tokens"] == 0, what + "nothing of the prompt was stored before")
        check(row.hit_tokens == whole_pages, what + f"B finds {whole_pages} stored tokens (it found {row.hit_tokens})")
        loaded = shared["digests"]
        same_kv = len(loaded) > 0 and loaded == stored["digests"][: len(loaded)]
        check(same_kv, what + "the loaded KV is bit-equal to what A stored")
        check(shared["new_tokens"] == cold["new_tokens"], what + f"both generate the same {steps} tokens")
        check(
            row.logit_difference <= MAX_LOGIT_DIFFERENCE,
            what + f"logits agree within {MAX_LOGIT_DIFFERENCE} (they differ by {row.logit_difference:.1e})",
        )
        if length >= MUST_PAY_FROM_TOKENS and self._options.size == "full":
            check(row.speedup > 1, what + f"sharing is faster than computing ({row.speedup:.2f}×)")
        return row, stored["digests"]


def _attach(pool: Path, world: World) -> EmbeddedServer:
    return EmbeddedServer.attach(str(pool), world=world)
