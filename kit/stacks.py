"""What the sampled stacks of an engine say: which share of them is inside scheduling. Pure.

A run keeps one file a process, `stacks-<service>-<role>-<pid>.txt.gz`, folded: a line is frames
from the outermost to the innermost, joined by `;`, then a blank and how often it was seen. Beside
them `stacks-<service>.json` says how long each process was sampled and what the sampler said.

Lines are read in pieces, so that one of any length costs no more memory than the longest that is
taken; what is no folded line is counted and left out, never guessed.
"""

from __future__ import annotations

import gzip
import re
import zlib
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import BinaryIO

from pydantic import Field

from kit.errors import BadFile
from kit.value import Value, load_json, parse_value

LINE_BYTES = 2**16
"""The longest line that is taken; a stack of a hundred frames has some 8 kB."""
FILE_BYTES = 2**30
STACKS = 200_000
SCHEDULER = re.compile(
    r"^(?:\w+\.)*(schedule|update_from_output) \(.*v1/core/sched/\w+\.py(:\d+)?\)$"
)
"""A frame of one of the two methods; from Python 3.11 on the sampler tells its class as well."""
_LINE = re.compile(r"^(.+) ([0-9]{1,12})$")
_COUNTS = re.compile(r"Samples: (\d{1,12}) Errors: (\d{1,12})")
_BEHIND = re.compile(r"([\d.]+)s behind in sampling")


class SampledProcess(Value):
    """What the sampler told of one process; `window_s` is None where it never sampled it."""

    pid: int
    role: str
    title: str
    file: str | None
    window_s: float | None = Field(default=None, ge=0, le=1e6, allow_inf_nan=False)
    status: int
    said: tuple[str, ...] = ()

    @property
    def ticks(self) -> int | None:
        """How often the process was looked at, whether anything of it ran or not."""
        found = self._counts()
        return found[0] if found else None

    @property
    def errors(self) -> int | None:
        """How many stacks could not be read."""
        found = self._counts()
        return found[1] if found else None

    def _counts(self) -> tuple[int, int] | None:
        for line in reversed(self.said):
            if found := _COUNTS.search(line):
                return int(found[1]), int(found[2])
        return None

    @property
    def behind_s(self) -> float:
        """By how many seconds the sampler said to be behind, at most; 0 where it kept up."""
        found = [_number(m[1]) for line in self.said for m in _BEHIND.finditer(line)]
        return max(found, default=0.0)

    @property
    def refusal(self) -> str:
        """The sampler's last words, for where it took no sample."""
        said = [line.strip() for line in self.said if line.strip()]
        return said[-1][:200] if said else f"it ended with status {self.status} and no word"


class SampledEngine(Value):
    """`stacks-<service>.json`: of one engine, every process that was to be sampled."""

    version: int = Field(ge=1, le=1)
    rate_hz: int = Field(ge=1, le=10_000)
    processes: tuple[SampledProcess, ...]
    problem: str | None = None

    @property
    def core(self) -> SampledProcess | None:
        return next((p for p in self.processes if p.role == "engine-core"), None)


class Folded(Value):
    """Counts of one process's stacks.

    `skipped` are lines that are no folded stack; `scheduling` are samples inside each of the
    scheduler's two methods, by name.
    """

    samples: int
    skipped: int
    scheduling: dict[str, int]

    @property
    def schedule_share(self) -> float | None:
        """The share of the samples inside `schedule`; None where there is none."""
        return self.scheduling.get("schedule", 0) / self.samples if self.samples else None


def stacks_file(service: str, name: str) -> str:
    """Return the name under which a run keeps a file of the sampler of an engine."""
    return name.replace("stacks-", f"stacks-{service}-", 1) + ".gz"


def index_file(service: str) -> str:
    """Return the name of what the sampler of an engine told."""
    return f"stacks-{service}.json"


def read_engine(path: Path) -> SampledEngine:
    """Read what the sampler told. Raises `BadFile`."""
    return parse_value(SampledEngine, load_json(path), path.name)


def read_folded(path: Path) -> Folded:
    """Count a file's stacks. Raises `BadFile` where it is no gzip, or too long."""
    counts, skipped = read_stacks(path)
    scheduling = Counter[str]()
    for frames, seen in counts.items():
        for method in {m[1] for frame in frames if (m := SCHEDULER.match(frame))}:
            scheduling[method] += seen
    return Folded(samples=counts.total(), skipped=skipped, scheduling=dict(scheduling))


def read_stacks(path: Path) -> tuple[Counter[tuple[str, ...]], int]:
    """Return how often each stack was seen, and how many lines were no stack. Raises `BadFile`."""
    counts, skipped = Counter[tuple[str, ...]](), 0
    try:
        with gzip.open(path, "rb") as file:
            for line in _lines(file):
                found = None if line is None else _LINE.match(line)
                if found is None:
                    skipped += 1
                    continue
                counts[tuple(found[1].split(";"))] += int(found[2])
                if len(counts) > STACKS:
                    raise ValueError(f"it has more than {STACKS:,} different stacks")
    except (OSError, EOFError, zlib.error, ValueError) as error:
        raise BadFile(f"{path.name}: no folded stacks: {error}") from None
    return counts, skipped


def _lines(file: BinaryIO | gzip.GzipFile) -> Iterator[str | None]:
    """Yield lines without their end, None for one that is too long; empty ones are left out."""
    left, cut = FILE_BYTES, False
    while piece := file.readline(LINE_BYTES):
        left -= len(piece)
        if left < 0:
            raise ValueError(f"it is longer than {FILE_BYTES:,} bytes")
        if not piece.endswith(b"\n") and len(piece) == LINE_BYTES:
            cut = True
        elif cut:
            cut = False
            yield None
        elif piece.strip():
            yield piece.decode("utf-8", "replace").rstrip("\r\n")
    if cut:
        yield None


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return 0.0


class Stacks(Value):
    """All that was sampled in a phase: what was told of each engine, and each file's counts."""

    engines: Mapping[str, SampledEngine] = Field(default_factory=dict)
    files: Mapping[str, Folded] = Field(default_factory=dict)

    @property
    def behind_s(self) -> float:
        """By how many seconds a sampler said to be behind, at most."""
        each = (p.behind_s for engine in self.engines.values() for p in engine.processes)
        return max(each, default=0.0)

    @property
    def problem(self) -> str | None:
        """Why nothing at all was sampled; None where something was."""
        if any(each.samples for each in self.files.values()):
            return None
        said = [
            engine.problem or next((p.refusal for p in engine.processes), "no process was found")
            for engine in self.engines.values()
        ]
        return "; ".join(dict.fromkeys(said)) or None


def read_phase(folder: Path) -> Stacks:
    """Read a phase's sampled stacks, none where it was not sampled. Raises `BadFile`."""
    engines = {
        path.stem.removeprefix("stacks-"): read_engine(path)
        for path in sorted(folder.glob("stacks-*.json"))
    }
    files = {path.name: read_folded(path) for path in sorted(folder.glob("stacks-*.txt.gz"))}
    return Stacks(engines=engines, files=files)
