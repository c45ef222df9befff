"""The options of a job: fio's names, units and defaults where fio has the option, and a few of our own.

An option that is not in :data:`OPTIONS` is refused by name. ``parse`` turns the text behind ``=`` into a value and
raises ConfigError; units are fio's: sizes in powers of 1024, times in seconds unless said otherwise.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any

from curvfs.errors import ConfigError
from curvfs.units import parse_size

#: Every kind of load; the second half are our own and need the engine ``kvstore``.
PLAIN = ("read", "write", "randread", "randwrite", "rw", "readwrite", "randrw")
OWN = ("kvput", "kvget", "kvmix", "kvlookup", "prefix", "trace")

ENGINES = ("mount", "curvfs", "kvstore")
#: Engines of fio that do plain file I/O: such job files run unchanged, with our engine ``mount``.
FIO_FILE_ENGINES = ("sync", "psync", "vsync", "pvsync", "pvsync2", "libaio", "posixaio", "io_uring", "mmap")

#: Those that fio reports unless told otherwise.
PERCENTILES = (1, 5, 10, 20, 30, 40, 50, 60, 70, 80, 90, 95, 99, 99.5, 99.9, 99.95, 99.99)

HASHES = ("crc32", "md5", "sha1", "sha256", "sha512")

_TIME = re.compile(r"(\d+(?:\.\d+)?)(us|ms|s|m|h|d)?", re.IGNORECASE)
_TIME_UNITS_S = {"us": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}


@dataclass(frozen=True, slots=True)
class Option:
    """One option: how its text is read, what it is when nobody gives it, what it does."""

    parse: Callable[[str], Any]
    default: Any
    help: str


def _size(text: str) -> int:
    try:
        return parse_size(text)
    except ConfigError:
        raise ConfigError(f"{text!r} is not a size; write a number with k, m, g or t, such as 64k") from None


def _positive_size(text: str) -> int:
    size = _size(text)
    if size < 1:
        raise ConfigError(f"{text!r} is not a size; give at least one byte")
    return size


def _time(unit: str) -> Callable[[str], float]:
    def parse(text: str) -> float:
        found = _TIME.fullmatch(text)
        if found is None:
            raise ConfigError(f"{text!r} is not a time; write a number with us, ms, s, m or h, such as 30s")
        return float(found[1]) * _TIME_UNITS_S[(found[2] or unit).lower()]

    return parse


def _integer(least: int, most: int | None = None) -> Callable[[str], int]:
    def parse(text: str) -> int:
        try:
            number = int(text, 0)
        except ValueError:
            raise ConfigError(f"{text!r} is not a whole number") from None
        if number < least or (most is not None and number > most):
            raise ConfigError(
                f"{text} is out of range; give {least}{'' if most is None else f' to {most}'}"
                f"{' or more' if most is None else ''}"
            )
        return number

    return parse


def _number(least: float) -> Callable[[str], float]:
    def parse(text: str) -> float:
        try:
            number = float(text)
        except ValueError:
            raise ConfigError(f"{text!r} is not a number") from None
        if not least <= number < 1e12:
            raise ConfigError(f"{text} is out of range; give {least:g} or more")
        return number

    return parse


def _flag(text: str) -> bool:
    if text in ("", "1", "true"):
        return True
    if text in ("0", "false"):
        return False
    raise ConfigError(f"{text!r} is neither 0 nor 1")


def _word(*words: str) -> Callable[[str], str]:
    def parse(text: str) -> str:
        if text not in words:
            raise ConfigError(f"{text!r} is none of {', '.join(words)}")
        return text

    return parse


def _text(text: str) -> str:
    if not text:
        raise ConfigError("it is empty")
    return text


def _pair(parse: Callable[[str], Any]) -> Callable[[str], tuple[Any, Any]]:
    """``read[,write]``; the one given alone is meant for both."""

    def both(text: str) -> tuple[Any, Any]:
        first, comma, rest = text.partition(",")
        second = rest.partition(",")[0]  # trims, which fio has third, are not done here
        left = parse(first) if first else None
        return (left, parse(second) if second else None) if comma else (left, left)

    return both


def _split(text: str) -> tuple[tuple[int, int], ...]:
    """``4k/50:64k/`` as ((size, percent), ...); empty percentages share what is left."""
    pieces: list[tuple[int, int | None]] = []
    for piece in text.split(":"):
        size, _, percent = piece.partition("/")
        pieces.append((_positive_size(size), _integer(0, 100)(percent) if percent else None))
    open_ = [size for size, percent in pieces if percent is None]
    left = 100 - sum(percent for _, percent in pieces if percent is not None)
    if left < 0 or (left and not open_):
        raise ConfigError(f"the percentages of {text!r} do not add up to 100")
    shares = iter(left // len(open_) + (index < left % len(open_)) for index in range(len(open_)))
    return tuple((size, next(shares) if percent is None else percent) for size, percent in pieces)


def _range(text: str) -> tuple[int, int]:
    low, _, high = text.partition("-")
    first = _positive_size(low)
    last = _positive_size(high) if high else first
    if last < first:
        raise ConfigError(f"the range {text!r} ends before it begins")
    return first, last


def _distribution(text: str) -> tuple[str, float]:
    """``random`` or ``zipf:theta``."""
    name, _, rest = text.partition(":")
    if name == "random" and not rest:
        return ("random", 0.0)
    if name == "zipf":
        return ("zipf", _number(0.01)(rest or "1.2"))
    raise ConfigError(f"{text!r} is neither random nor zipf:THETA")


def _pattern(text: str) -> bytes:
    """``0xdeadbeef``, ``"text"`` or a decimal number."""
    if len(text) > 2 and text[0] == text[-1] == '"':
        return text[1:-1].encode()
    try:
        if text.lower().startswith("0x"):
            digits = text[2:]
            return bytes.fromhex(digits if len(digits) % 2 == 0 else "0" + digits)
        number = int(text)
        return number.to_bytes(max(1, (number.bit_length() + 7) // 8), "big")
    except (ValueError, OverflowError):
        raise ConfigError(f'{text!r} is no pattern; write 0xdeadbeef, a number or "text"') from None


def _percentiles(text: str) -> tuple[float, ...]:
    found = tuple(_number(0)(part) for part in text.split(":"))
    if not 0 < len(found) <= 20 or max(found) > 100:
        raise ConfigError(f"{text!r} is no list of up to 20 percentiles, such as 50:99:99.9")
    return found


def _verify(text: str) -> str:
    return "" if text == "0" else _word("pattern", *HASHES)(text)


OPTIONS: dict[str, Option] = {
    "description": Option(str, "", "shown in the report"),
    "ioengine": Option(
        _word(*ENGINES, *FIO_FILE_ENGINES),
        "mount",
        "mount (files in a directory), curvfs (native client) or kvstore (KV objects); fio's file engines mean mount",
    ),
    "url": Option(_text, "", "curvine://host:port/path for curvfs; that or file:///directory for kvstore"),
    "rw": Option(_word(*PLAIN, *OWN), "read", "kind of load: " + ", ".join((*PLAIN, *OWN))),
    "rwmixread": Option(_integer(0, 100), 50, "percent of reads in a mixed load"),
    "rwmixwrite": Option(_integer(0, 100), None, "percent of writes in a mixed load"),
    "bs": Option(_pair(_positive_size), (4096, 4096), "block size, read[,write]; for kvstore the payload of an object"),
    "bssplit": Option(_pair(_split), (None, None), "block sizes and their percentages: 4k/60:64k/40"),
    "size": Option(_positive_size, None, "bytes of a job's files together, and what it moves unless time_based"),
    "io_size": Option(_positive_size, None, "bytes that a job moves, where that is not its size"),
    "number_ios": Option(_integer(1), None, "calls after which a job ends"),
    "filesize": Option(_range, None, "bytes of each file, or a range to choose from"),
    "nrfiles": Option(_integer(1, 100_000), 1, "files of a job"),
    "directory": Option(_text, "", "where the files are (engine mount), or a directory below the URL (engine curvfs)"),
    "filename": Option(_text, "", "files by name, separated by colons, in place of jobname.number.file"),
    "iodepth": Option(_integer(1, 1024), 1, "calls under way at once in each job"),
    "numjobs": Option(_integer(1, 256), 1, "processes that do the same, each with its own files"),
    "direct": Option(_flag, False, "past the page cache; refused where the file system does not take it"),
    "runtime": Option(_time("s"), None, "longest time of a job (bare: seconds)"),
    "time_based": Option(_flag, False, "begin anew until runtime is over"),
    "ramp_time": Option(_time("s"), 0.0, "time before anything is counted (bare: seconds)"),
    "startdelay": Option(_time("s"), 0.0, "time before a job begins (bare: seconds)"),
    "loops": Option(_integer(1), 1, "how many times the whole"),
    "rate": Option(_pair(_positive_size), (None, None), "bytes per second of each job, read[,write]"),
    "rate_iops": Option(_pair(_integer(1)), (None, None), "calls per second of each job, read[,write]"),
    "rate_process": Option(_word("linear", "poisson"), "linear", "how calls of a given rate follow each other"),
    "thinktime": Option(_time("us"), 0.0, "pause after every thinktime_blocks calls (bare: microseconds)"),
    "thinktime_blocks": Option(_integer(1), 1, "calls between two pauses"),
    "randseed": Option(_integer(0), 1, "seed of offsets, sizes and content"),
    "random_distribution": Option(_distribution, ("random", 0.0), "random, or zipf:THETA for few hot blocks"),
    "norandommap": Option(_flag, False, "random offsets may repeat before all were used"),
    "verify": Option(_verify, "", "pattern, " + ", ".join(HASHES) + ": what is read must be what was written"),
    "verify_pattern": Option(_pattern, b"\xde\xad\xbe\xef", "content of every block with verify=pattern"),
    "verify_fatal": Option(_word("1"), "1", "1: the first block that does not hold ends the job, as it always does"),
    "do_verify": Option(_flag, True, "read back what was written at the end of a write job with verify"),
    "fsync": Option(_integer(0), 0, "fdatasync after so many writes"),
    "end_fsync": Option(_flag, False, "fsync at the end of a job"),
    "fallocate": Option(_word("none", "0"), "none", "none: nothing is allocated before it is written"),
    "file_service_type": Option(_word("sequential"), "sequential", "sequential: one file after the other"),
    "invalidate": Option(_flag, True, "drop the files from the page cache before a job"),
    "unlink": Option(_flag, None, "remove the files that the run made; default: 1 for kvstore, else 0"),
    "stonewall": Option(_flag, False, "begin when the jobs before it have ended"),
    "group_reporting": Option(_flag, False, "one report for all jobs of a group"),
    "percentile_list": Option(_percentiles, PERCENTILES, "percentiles to report, separated by colons"),
    "kv_pages": Option(_integer(1, 4096), 8, "pages of one request of kvput, kvget, kvmix and kvlookup"),
    "kv_prefix": Option(_text, "kv", "the KV prefix below the URL"),
    "kv_form": Option(_word("copy", "loan", "view"), "copy", "form of a get"),
    "kv_engine": Option(_word("auto", "threads", "uring"), "auto", "the store's I/O engine"),
    "page_cache": Option(_word("drop", "keep"), "drop", "keep: the store writes through the page cache"),
    "prefixes": Option(_integer(1), 20, "prefix: shared prefixes (system prompts)"),
    "prefix_pages": Option(_integer(1), 8, "prefix: pages of each of them"),
    "turn_pages": Option(_integer(1), 2, "prefix: pages that every turn of a conversation adds"),
    "turns": Option(_integer(1), 6, "prefix: turns of a conversation"),
    "zipf": Option(_number(0.01), 1.2, "prefix: theta; the larger, the more often the same few prefixes"),
    "conversations": Option(_integer(1), 64, "prefix: conversations of a job, of which some are always open"),
    "trace": Option(_text, "", "trace: JSON lines with timestamp (ms), hash_ids"),
    "trace_speed": Option(_number(0), 1.0, "trace: times faster than recorded; 0 as fast as possible"),
    "trace_limit": Option(_integer(1), None, "trace: requests to replay"),
}

_ALIASES = {"readwrite": "rw", "blocksize": "bs", "engine": "ioengine", "timeout": "runtime"}


def option_named(name: str) -> tuple[str, Option]:
    """The option of this name or alias. Raises ConfigError that names it, and one that is spelled much like it."""
    real = _ALIASES.get(name, name)
    option = OPTIONS.get(real)
    if option is None:
        near = get_close_matches(name, OPTIONS, 1)
        hint = f"; did you mean {near[0]}?" if near else "; curvfs bench --options lists those it has."
        raise ConfigError(f"curvfs bench has no option {name!r}{hint}")
    return real, option


def options_text() -> str:
    """Every option with its default, for people."""
    lines = []
    for name, option in OPTIONS.items():
        lines.append(f"{name:<20} {option.help}")
    return "\n".join(lines)
