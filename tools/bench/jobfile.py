"""fio's job files, and the same as words of a command line, into :class:`Job` records."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from curvfs.errors import ConfigError, UsageError
from curvfs.world import Disk
from tools.bench.options import FIO_FILE_ENGINES, OPTIONS, OWN, option_named

_SECTION = re.compile(r"\[(.+)\]")
_VARIABLE = re.compile(r"\$\{(\w+)\}")


@dataclass(frozen=True)
class Job:
    """One job: parsed ``values`` for every option, and ``given``, the texts as they were written."""

    name: str
    values: dict[str, Any]
    given: dict[str, str] = field(default_factory=dict)
    global_given: dict[str, str] = field(default_factory=dict)

    def __getitem__(self, name: str) -> Any:
        return self.values[name]

    def message(self) -> dict[str, Any]:
        """What :meth:`from_message` makes this job of again, as JSON."""
        return {"name": self.name, "options": self.global_given | {n: t for n, t in self.given.items() if n != "name"}}

    @classmethod
    def from_message(cls, message: dict[str, Any]) -> Job:
        draft = _Draft(message["name"], "job", {}, {})
        for name, text in message["options"].items():
            draft.take(name, text, "job")
        return draft.job()

    @property
    def reads(self) -> bool:
        return self.values["rw"] in ("read", "randread", "rw", "readwrite", "randrw", "kvget", "kvmix")

    @property
    def writes(self) -> bool:
        return self.values["rw"] in ("write", "randwrite", "rw", "readwrite", "randrw", "kvput", "kvmix")

    @property
    def mixed(self) -> bool:
        return self.reads and self.writes

    @property
    def random(self) -> bool:
        return self.values["rw"].startswith("rand") or self.values["rw"] in ("kvget", "kvmix", "kvlookup")

    @property
    def requests(self) -> bool:
        """Requests of an inference engine in place of single calls."""
        return self.values["rw"] in ("prefix", "trace")

    @property
    def sizes(self) -> tuple[tuple[tuple[int, int], ...], tuple[tuple[int, int], ...]]:
        """Block sizes of reads and of writes with their percentages."""
        split, plain = self.values["bssplit"], self.values["bs"]
        pages = self.values["kv_pages"] if self.values["rw"].startswith("kv") else 1
        read = split[0] or (((plain[0] or 4096) * pages, 100),)
        write = split[1] or (((plain[1] or 4096) * pages, 100),)
        return read, write


class _Draft:
    def __init__(self, name: str, where: str, inherited: dict[str, Any], given: dict[str, str]) -> None:
        self.name = name
        self.where = where
        self.values = dict(inherited)
        self.global_given = dict(given)
        self.given: dict[str, str] = {}

    def take(self, name: str, text: str, where: str) -> None:
        try:
            real, option = option_named(name)
            value = option.parse(text)
        except ConfigError as error:
            message = str(error)
            if "has no option" in message:
                raise UsageError(f"{where}: {message}") from None
            raise UsageError(f"{where}: {name}={text}: {message}.") from None
        self.values[real] = value
        self.given[real] = text

    def job(self) -> Job:
        defaults = {name: option.default for name, option in OPTIONS.items()}
        values = defaults | self.values
        if values["ioengine"] in FIO_FILE_ENGINES:
            values["ioengine"] = "mount"
        if values["rwmixwrite"] is not None:
            values["rwmixread"] = 100 - values["rwmixwrite"]
        if values["unlink"] is None:
            values["unlink"] = values["ioengine"] == "kvstore"
        job = Job(self.name, values, {"name": self.name} | self.given, self.global_given)
        try:
            _check(job)
        except ConfigError as error:
            raise UsageError(f"{self.where}: job {self.name}: {error}") from None
        return job


def read_job_files(paths: Sequence[str], disk: Disk) -> list[Job]:
    """The jobs of job files, in order. Raises UsageError with file and line."""
    jobs = []
    for path in paths:
        try:
            text = disk.read_file(path).decode()
        except OSError as error:
            raise UsageError(f"The job file {path} cannot be read: {error.strerror}.") from error
        except UnicodeDecodeError:
            raise UsageError(f"The job file {path} is no text; give one in fio's format.") from None
        jobs += parse_job_file(text, path)
    return jobs


def parse_job_file(text: str, path: str) -> list[Job]:
    """The jobs of one job file's text. Raises UsageError with file and line."""
    inherited: dict[str, Any] = {}
    given: dict[str, str] = {}
    drafts: list[_Draft] = []
    current: _Draft | None = None
    is_global = False

    def leave() -> None:
        if current is not None and is_global:
            inherited.update(current.values)
            given.update(current.given)

    for number, line in _lines(text):
        where = f"{path}:{number}"
        section = _SECTION.fullmatch(line)
        if section is not None:
            leave()
            is_global = section[1] == "global"
            current = _Draft(section[1], where, inherited, given)
            if not is_global:
                drafts.append(current)
            continue
        if current is None:
            raise UsageError(f"{where}: {line!r} stands before the first [section]; begin with [global] or a job.")
        name, _, value = line.partition("=")
        current.take(name.strip(), _expanded(value.strip(), where), where)
    leave()
    if not drafts:
        raise UsageError(f"{path}: there is no job in it; write a section such as [job] with rw=read and size=1g.")
    return [draft.job() for draft in drafts]


def jobs_from_words(words: Sequence[str]) -> list[Job]:
    """Jobs from ``--name=x --rw=read ...``; every further ``--name`` begins another job, what stands before the first
    one is global. Raises UsageError."""
    inherited: dict[str, Any] = {}
    given: dict[str, str] = {}
    common = _Draft("global", "command line", {}, {})
    drafts: list[_Draft] = []
    for word in words:
        name, _, value = word.removeprefix("--").partition("=")
        if name == "name":
            if not value:
                raise UsageError("command line: --name is empty; write --name=JOB.")
            inherited, given = common.values, common.given
            drafts.append(_Draft(value, "command line", inherited, given))
            continue
        (drafts[-1] if drafts else common).take(name.replace("-", "_"), value, "command line")
    if not drafts:
        drafts = [_Draft("bench", "command line", {}, {})]
        drafts[0].values, drafts[0].given = common.values, common.given
    return [draft.job() for draft in drafts]


def _lines(text: str) -> Iterator[tuple[int, str]]:
    for number, line in enumerate(text.splitlines(), 1):
        line = line.strip()
        if line and line[0] not in "#;":
            yield number, line


def _expanded(value: str, where: str) -> str:
    def variable(found: re.Match[str]) -> str:
        try:
            return os.environ[found[1]]
        except KeyError:
            raise UsageError(f"{where}: the environment has no variable {found[1]}; set it.") from None

    return _VARIABLE.sub(variable, value)


def _check(job: Job) -> None:
    """What options mean together. Raises ConfigError."""
    engine, rw = job["ioengine"], job["rw"]
    if rw in OWN and engine != "kvstore":
        raise ConfigError(f"rw={rw} needs ioengine=kvstore.")
    if engine == "mount" and not (job["directory"] or job["filename"]):
        raise ConfigError("engine mount needs directory=, where the files are.")
    if engine == "curvfs" and not job["url"].startswith("curvine://"):
        raise ConfigError("engine curvfs needs url=curvine://host:port/path.")
    if engine == "kvstore" and not job["url"].startswith(("curvine://", "file://")):
        raise ConfigError("engine kvstore needs url=curvine://host:port/path or url=file:///directory.")
    if engine == "curvfs" and job["direct"]:
        raise ConfigError("the native client has no direct=1; engine kvstore reads and writes local blocks directly.")
    if engine == "kvstore" and job["bssplit"] != (None, None):
        raise ConfigError("objects of one store have one size; leave bssplit out.")
    if engine == "kvstore" and job["bs"][0] != job["bs"][1]:
        raise ConfigError("objects of one store have one size; give bs one value.")
    if engine == "kvstore" and (job["nrfiles"] > 1 or job["filesize"] is not None or job["filename"]):
        raise ConfigError("objects are as long as bs and as many as size holds; leave nrfiles, filesize, filename out.")
    if engine != "mount" and (job["fsync"] or job["end_fsync"]):
        raise ConfigError(f"engine {engine} has no fsync; leave fsync and end_fsync out.")
    if job["time_based"] and job["runtime"] is None:
        raise ConfigError("time_based needs runtime.")
    if rw == "trace" and not job["trace"]:
        raise ConfigError("rw=trace needs trace=FILE.")
    if not job.requests and job["size"] is None and job["filesize"] is None and not job["filename"]:
        raise ConfigError("it needs size= or filesize=.")
    smallest = min(size for split in job.sizes for size, _ in split)
    if job["direct"] and any(size % 512 for split in job.sizes for size, _ in split):
        raise ConfigError("direct=1 needs block sizes that are multiples of what the disk asks for, mostly 4096.")
    if job["size"] is not None and not job.requests and job["size"] < smallest:
        raise ConfigError(f"size={job['size']} holds no block of {smallest} bytes.")
    if job["verify"] in ("crc32", "md5", "sha1", "sha256", "sha512") and smallest < 512:
        raise ConfigError("verify by checksum needs blocks of at least 512 bytes.")
    if job["verify"] and job["bssplit"] != (None, None) and job["verify"] != "pattern":
        raise ConfigError("verify by checksum needs one block size; leave bssplit out or give verify=pattern.")
    if job["verify"] and job["bs"][0] != job["bs"][1] and job["verify"] != "pattern":
        raise ConfigError("verify by checksum needs one block size; give bs one value.")
    if job["verify"] and job["kv_form"] == "view":
        raise ConfigError("kv_form=view does not copy what it reads; leave verify out, the store verifies it.")
    if job["verify"] and job.requests:
        raise ConfigError(f"rw={rw} verifies by the store's own checksums; leave verify out.")
