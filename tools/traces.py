"""Request traces in the format of the Mooncake release, and how often a pool of any size would have had their blocks.

A trace is JSON lines: ``timestamp`` (ms), ``input_length`` and ``output_length`` (tokens), and ``hash_ids``: one number
per block of the prompt, equal where the whole prompt up to the end of that block is equal.
"""

from __future__ import annotations

import json
import math
from bisect import bisect_right
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import accumulate

from curvfs.errors import ConfigError
from curvfs.world import World


@dataclass(frozen=True, slots=True)
class Request:
    """One request of a trace. ``blocks``: the ids of its prompt's blocks, first to last."""

    timestamp_s: float
    input_tokens: int
    output_tokens: int
    blocks: tuple[int, ...]


def read_trace(path: str, world: World) -> list[Request]:
    """All requests of a file, in the order of their times. Raises ConfigError, which names the line that is wrong."""
    try:
        text = world.disk.read_file(path).decode()
    except OSError as error:
        raise ConfigError(f"The trace {path} cannot be read: {error.strerror or error}.") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is not a trace: it is not text; give a file of JSON lines.") from error
    requests = [_request(path, number, line) for number, line in enumerate(text.splitlines(), 1) if line.strip()]
    if not requests:
        raise ConfigError(f"The trace {path} has no request in it.")
    return sorted(requests, key=lambda request: request.timestamp_s)


def _request(path: str, number: int, line: str) -> Request:
    try:
        found = json.loads(line)
        request = Request(
            float(found["timestamp"]) / 1000,
            int(found["input_length"]),
            int(found["output_length"]),
            tuple(map(int, found["hash_ids"])),
        )
    except (ValueError, KeyError, TypeError, OverflowError, RecursionError) as error:
        raise ConfigError(
            f"Line {number} of {path} is no request of a trace; it must be a JSON object with the numbers timestamp, "
            "input_length and output_length and the list hash_ids."
        ) from error
    if request.input_tokens < 0 or request.output_tokens < 0 or not 0 <= request.timestamp_s < math.inf:
        raise ConfigError(
            f"Line {number} of {path} has a number that is negative or none; lengths and times are 0 or more."
        )
    return request


class Reuse:
    """What a pool with exact least-recently-used eviction would have had, for every capacity at once.

    A hit is the longest prefix of a request's blocks that is resident when the request comes; then all its blocks are
    used in order. LRU keeps the blocks of a small pool in a larger one too, so one pass that notes for each block how
    many others were used since (a Fenwick tree over time) answers for all sizes. ``told`` hears which part is done.
    """

    def __init__(self, requests: Iterable[Request], told: Callable[[float], None] = lambda part: None) -> None:
        #: For each request the capacity, in blocks, that each block of its prefix needs; ascending.
        self.needs: list[list[int]] = []
        self.blocks = 0
        prompts = [request.blocks for request in requests]
        recency = _Recency(sum(map(len, prompts)))
        for number, prompt in enumerate(prompts):
            told(number / len(prompts))
            self.blocks += len(prompt)
            self.needs.append(list(accumulate(recency.ranks(prompt), max)))
            recency.use(prompt)
        self.distinct_blocks = recency.known
        self._all_needs = sorted(need for needs in self.needs for need in needs)

    def hits(self, capacity_blocks: int) -> int:
        """Blocks that were resident as part of a prefix, over all requests."""
        return bisect_right(self._all_needs, capacity_blocks)

    def hit_rate(self, capacity_blocks: int) -> float:
        """:meth:`hits` as a part of all blocks asked for."""
        return self.hits(capacity_blocks) / self.blocks if self.blocks else 0.0

    def request_hits(self, capacity_blocks: int) -> list[int]:
        """:meth:`hits` of each request."""
        return [bisect_right(needs, capacity_blocks) for needs in self.needs]


class _Recency:
    """Blocks in the order of their last use."""

    def __init__(self, uses: int) -> None:
        self._size = uses
        self._tree = [0] * (uses + 1)
        self._last: dict[int, int] = {}
        self._now = 0

    @property
    def known(self) -> int:
        return len(self._last)

    def ranks(self, prompt: tuple[int, ...]) -> list[int]:
        """For each block up to the first unknown one its place, 1 the last used."""
        found = []
        for block in prompt:
            last = self._last.get(block)
            if last is None:
                break
            found.append(self.known - self._before(last))
        return found

    def use(self, prompt: tuple[int, ...]) -> None:
        for block in prompt:
            last = self._last.get(block)
            if last is not None:
                self._change(last, -1)
            self._now += 1
            self._last[block] = self._now
            self._change(self._now, 1)

    def _change(self, place: int, by: int) -> None:
        while place <= self._size:
            self._tree[place] += by
            place += place & -place

    def _before(self, place: int) -> int:
        """How many blocks were last used before the one last used at ``place``."""
        place -= 1
        total = 0
        while place:
            total += self._tree[place]
            place &= place - 1
        return total
