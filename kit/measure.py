"""From raw files to numbers. Pure: a replicate's folder in, readings out, nothing cached.

A reading is null with a reason rather than a guess: a quantile that the sample cannot carry, a
counter that is absent or went backwards, a stream without token times.
"""

from __future__ import annotations

import itertools
import math
import statistics
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from kit.errors import BadFile, NotFound
from kit.raw_lines import LOAD, SAMPLE, SCRAPE, check, read_lines
from kit.scores import Scores, read_scores
from kit.stacks import Stacks, read_phase
from kit.trace import Trace, read_trace
from kit.value import Value, load_json

Sample = Mapping[str, Any]
"""One line of samples.jsonl: what one request did. Times are seconds from the window's start."""


class Reading(Value):
    """One number of one replicate: its value or the reason why there is none.

    `n` is how many raw values it was computed from; `sources` are raw files, relative to the run.
    """

    name: str
    unit: str
    value: float | None
    n: int
    reason: str | None = None
    sources: tuple[str, ...] = ()


@dataclass(frozen=True)
class Scrape:
    """One answer of /metrics: `t_s` from the window's start, `values` by (name, labels)."""

    t_s: float
    values: Mapping[tuple[str, frozenset[tuple[str, str]]], float]

    def total(self, name: str, **labels: str) -> float | None:
        """Sum all series of that name that carry these labels; None when there is none."""
        wanted = set(labels.items())
        found = [v for (n, ls), v in self.values.items() if n == name and wanted <= ls]
        return math.fsum(found) if found else None

    def label(self, name: str, label: str) -> str | None:
        """Return a label's value of the first series of that name (info-style metrics)."""
        for series, labels in self.values:
            if series == name:
                return dict(labels).get(label)
        return None


@dataclass(frozen=True)
class Window:
    """One phase of one replicate, as its files tell it.

    `scrapes` are those of the service that the client asked, `legs` those of the engines behind it
    by their names, where there are such. `traces` are a profiled phase's, by file name,
    and `stacks` what was sampled in a sampled one.
    """

    folder: str
    samples: tuple[Sample, ...]
    scrapes: tuple[Scrape, ...]
    load: Mapping[str, Any]
    legs: Mapping[str, tuple[Scrape, ...]] = field(default_factory=dict)
    traces: Mapping[str, Trace] = field(default_factory=dict)
    stacks: Stacks = field(default_factory=Stacks)

    @property
    def samples_file(self) -> str:
        return f"{self.folder}/samples.jsonl"

    @property
    def metrics_file(self) -> str:
        return f"{self.folder}/metrics.jsonl.gz"

    @property
    def engines(self) -> dict[str, tuple[Scrape, ...]]:
        """The scrapes of every engine, by the file that they are in."""
        if not self.legs:
            return {self.metrics_file: self.scrapes}
        return {self.leg_file(leg): scrapes for leg, scrapes in self.legs.items()}

    def leg_file(self, leg: str) -> str:
        return f"{self.folder}/metrics-{leg}.jsonl.gz"

    def of(self, leg: str | None) -> tuple[str, tuple[Scrape, ...]]:
        """Return a leg's metrics file and scrapes; None is the service that the client asked."""
        if leg is None:
            return self.metrics_file, self.scrapes
        return self.leg_file(leg), self.legs.get(leg, ())


@dataclass(frozen=True)
class Raw:
    """All raw data of one replicate; `windows` by phase name.

    `server_info` is the resolved configuration of the one engine; where there are several, `legs`
    holds each one's. `devices` is what was on the accelerators before its stack and after it; empty
    without any. `start_logs` are the services' logs up to the moment when they served, and `model`
    the served model's configuration and file sizes (`model.json` of the run). `scores` are those of
    lm-eval, where it was run.
    """

    windows: Mapping[str, Window]
    server_info: Mapping[str, Any] = field(default_factory=dict)
    legs: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    devices: Mapping[str, Any] = field(default_factory=dict)
    start_logs: Mapping[str, str] = field(default_factory=dict)
    model: Mapping[str, Any] = field(default_factory=dict)
    scores: Scores = field(default_factory=Scores)

    @property
    def measured(self) -> Window:
        return self.windows["measure"]

    @property
    def folder(self) -> str:
        """The replicate's folder, relative to the run."""
        return self.measured.folder.rsplit("/", 1)[0]


@dataclass(frozen=True)
class Measure:
    """A named number and how it is computed from one replicate's raw data."""

    name: str
    unit: str
    what: str
    compute: Callable[[Raw], Reading]

    def read(self, raw: Raw) -> Reading:
        """Compute the reading and give it this measure's name and unit."""
        found = self.compute(raw)
        return Reading(
            name=self.name,
            unit=self.unit,
            value=found.value,
            n=found.n,
            reason=found.reason,
            sources=found.sources,
        )


@dataclass(frozen=True)
class Comparison:
    """A named number computed from the two replicates of a pair, baseline first."""

    name: str
    unit: str
    what: str
    compute: Callable[[Raw, Raw], Reading]

    def read(self, baseline: Raw, candidate: Raw) -> Reading:
        """Compute the reading and give it this comparison's name and unit."""
        reading = self.compute(baseline, candidate)
        return reading.model_copy(update={"name": self.name, "unit": self.unit})


MODEL_FILE = "model.json"
"""What a run keeps of its model: `config`, and `files` with their sizes in bytes."""
SERVING = "Application startup complete"

# -- raw files ---------------------------------------------------------------------------------


def load_raw(run: Path, replicate: str, phases: list[str]) -> Raw:
    """Read one replicate's folder. Raises `BadFile` naming the file that cannot be read."""
    windows = {phase: load_window(run, f"{replicate}/{phase}") for phase in phases}
    info, devices = (run / replicate / name for name in ("server_info.json", "devices.json"))
    model = run / MODEL_FILE
    return Raw(
        windows=windows,
        server_info=_json(info) if info.exists() else {},
        legs={
            _leg(path, "server_info-"): _json(path)
            for path in sorted((run / replicate).glob("server_info-*.json"))
        },
        devices=_json(devices) if devices.exists() else {},
        start_logs={
            path.stem: _start_of(path) for path in sorted((run / replicate).glob("logs/*.log"))
        },
        model=_json(model) if model.exists() else {},
        scores=read_scores(run / replicate, replicate),
    )


def _start_of(log: Path) -> str:
    """Return a server's log up to the line by which its web server says that it serves."""
    with log.open(encoding="utf-8", errors="replace") as lines:
        return "".join(itertools.takewhile(lambda line: SERVING not in line, lines))


def load_window(run: Path, folder: str, only: Sequence[str] = ()) -> Window:
    """Read one window's folder; with `only`, just the series whose names begin so, which is fast.

    Raises `BadFile` naming the file that cannot be read.
    """
    return Window(
        folder=folder,
        samples=tuple(map(_packed, read_lines(run / folder / "samples.jsonl", SAMPLE))),
        scrapes=tuple(_scrapes(run / folder / "metrics.jsonl.gz", only)),
        load=check(_json(run / folder / "load.json"), LOAD, f"load.json in {folder}"),
        legs={
            _leg(path, "metrics-"): tuple(_scrapes(path, only))
            for path in sorted((run / folder).glob("metrics-*.jsonl.gz"))
        },
        traces={
            path.name: read_trace(path) for path in sorted((run / folder).glob("trace-*.json.gz"))
        },
        stacks=read_phase(run / folder),
    )


def _packed(sample: dict[str, Any]) -> dict[str, Any]:
    """Return a sample whose chunks take little memory: there are far more of them than requests."""
    sample["chunk_s"] = array("d", sample["chunk_s"])
    if chars := sample.get("chunk_chars"):
        sample["chunk_chars"] = array("q", chars)
    return sample


def _leg(path: Path, prefix: str) -> str:
    """Return the leg's name that a file's name holds."""
    return path.name.removeprefix(prefix).partition(".")[0]


def _json(path: Path) -> dict[str, Any]:
    try:
        return load_json(path)
    except NotFound as error:
        raise BadFile(error.message) from None


def _scrapes(path: Path, only: Sequence[str] = ()) -> Iterator[Scrape]:
    if not path.exists():
        return
    chosen = tuple(only)
    for one in read_lines(path, SCRAPE):
        if one.get("status") != 200:
            continue
        text = one.get("text") or ""
        if chosen:
            text = "".join(x for x in text.splitlines(True) if x.startswith(chosen))
        try:
            yield Scrape(t_s=one["t_s"], values=parse_metrics(text))
        except ValueError as error:
            raise BadFile(f"{path.name} in {path.parent}, at {one['t_s']} s: {error}") from None


def parse_metrics(text: str) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
    """Parse Prometheus text into (series name, labels) -> value."""
    return {
        (sample.name, frozenset(sample.labels.items())): float(sample.value)
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


# -- what one request took ---------------------------------------------------------------------


def start_s(sample: Sample) -> float | None:
    """Return when latency starts: the intended send time in open loop, else the send itself.

    Open loop counts from the schedule, so that a late client cannot hide a stall.
    """
    key = "sent_s" if sample.get("lane") is not None else "intended_s"
    value = sample.get(key)
    return None if value is None else float(value)


def median_span_s(samples: Iterable[Sample]) -> float | None:
    """Return the median time from the send to the last byte, over the requests that ended."""
    spans = [
        s["done_s"] - s["sent_s"]
        for s in samples
        if s.get("done_s") is not None and s.get("sent_s") is not None
    ]
    return statistics.median(spans) if spans else None


def ttft_s(sample: Sample) -> float | None:
    """Time to first token: start to first content chunk; None when the answer was no stream."""
    begin, chunks = start_s(sample), sample.get("chunk_s") or []
    return float(chunks[0]) - begin if chunks and begin is not None else None


def tpot_s(sample: Sample) -> float | None:
    """Time per output token after the first, by the token count that the server reports."""
    chunks, tokens = sample.get("chunk_s") or [], sample.get("completion_tokens") or 0
    if len(chunks) < 2 or tokens < 2:
        return None
    return float(chunks[-1] - chunks[0]) / (tokens - 1)


def max_itl_s(sample: Sample) -> float | None:
    """The longest gap between two content chunks of one answer: the stall a reader sees."""
    chunks = sample.get("chunk_s") or []
    return max(b - a for a, b in itertools.pairwise(chunks)) if len(chunks) > 1 else None


# -- measures ----------------------------------------------------------------------------------


def quantile(ordered: Sequence[float], q: float) -> float:
    """Return the q-quantile of sorted values, interpolated linearly (Hyndman and Fan's type 7)."""
    place = (len(ordered) - 1) * q
    low = math.floor(place)
    high = min(low + 1, len(ordered) - 1)
    return float(ordered[low] + (ordered[high] - ordered[low]) * (place - low))


Of = Callable[[Sample], float | None]
Where = Callable[[Sample], bool]


def _every(_: Sample) -> bool:
    return True


def quantile_of(
    of: Of, q: float, *, phase: str = "measure", where: Where = _every
) -> Callable[[Raw], Reading]:
    """Measure the q-quantile of a per-request value; null when fewer than 5 lie beyond it.

    Between two values it is interpolated linearly.
    """

    def compute(raw: Raw) -> Reading:
        window = raw.windows[phase]
        chosen = [s for s in window.samples if where(s) and not s.get("error")]
        values = sorted(v for v in map(of, chosen) if v is not None)
        beyond = round(len(values) * min(q, 1 - q), 9)
        if beyond < 5:
            reason = f"{len(values)} values leave {beyond:g} beyond the {q:g} quantile, 5 needed"
            return null_reading(reason, len(values), window.samples_file)
        return reading_of(quantile(values, q), len(values), window.samples_file)

    return compute


def pooled_gap_quantile(
    q: float, *, phase: str = "measure", where: Where = _every
) -> Callable[[Raw], Reading]:
    """Measure the q-quantile of all gaps between content chunks, of all answers together.

    It hides stalls that are rarer than 1 - q, however long they are.
    """

    def compute(raw: Raw) -> Reading:
        window = raw.windows[phase]
        chosen = [s for s in window.samples if where(s) and not s.get("error")]
        gaps = sorted(b - a for s in chosen for a, b in itertools.pairwise(s.get("chunk_s") or []))
        if len(gaps) * (1 - q) < 5:
            reason = f"{len(gaps)} gaps leave fewer than 5 beyond the {q:g} quantile"
            return null_reading(reason, len(gaps), window.samples_file)
        return reading_of(quantile(gaps, q), len(gaps), window.samples_file)

    return compute


def mean_of(of: Of, *, phase: str = "measure", where: Where = _every) -> Callable[[Raw], Reading]:
    """Measure the mean of a per-request value over the answers that have one."""

    def compute(raw: Raw) -> Reading:
        window = raw.windows[phase]
        chosen = [s for s in window.samples if where(s) and not s.get("error")]
        values = [v for v in map(of, chosen) if v is not None]
        if not values:
            return null_reading("no request has this value", 0, window.samples_file)
        return reading_of(math.fsum(values) / len(values), len(values), window.samples_file)

    return compute


def request_count(*, phase: str = "measure") -> Callable[[Raw], Reading]:
    """Measure how many requests were answered without an error."""

    def compute(raw: Raw) -> Reading:
        window = raw.windows[phase]
        done = sum(not s.get("error") for s in window.samples)
        return reading_of(done, len(window.samples), window.samples_file)

    return compute


def output_throughput(*, phase: str = "measure") -> Callable[[Raw], Reading]:
    """Measure output tokens per second from the first send to the last byte."""

    def compute(raw: Raw) -> Reading:
        window = raw.windows[phase]
        done = [s for s in window.samples if not s.get("error")]
        sent = [s["sent_s"] for s in done if s.get("sent_s") is not None]
        if not sent:
            return null_reading("no request was answered", 0, window.samples_file)
        if any(s.get("completion_tokens") is None or s.get("done_s") is None for s in done):
            return null_reading(
                "an answer has no token count or end", len(done), window.samples_file
            )
        span = max(s["done_s"] for s in done) - min(sent)
        if span <= 0:
            return null_reading("the answers took no time", len(done), window.samples_file)
        tokens = sum(s["completion_tokens"] for s in done)
        return reading_of(tokens / span, len(done), window.samples_file)

    return compute


def counter_delta(
    name: str, *, phase: str = "measure", leg: str | None = None, **labels: str
) -> Callable[[Raw], Reading]:
    """Measure how far a counter rose between the window's first and last scrape.

    Of one engine behind the service that the client asked: `leg` names it.
    """

    def compute(raw: Raw) -> Reading:
        file, scrapes = raw.windows[phase].of(leg)
        seen = [v for v in (s.total(name, **labels) for s in scrapes) if v is not None]
        if len(seen) < 2:
            return null_reading(f"{name} was not in two scrapes", len(seen), file)
        if any(b < a for a, b in itertools.pairwise(seen)):
            return null_reading(f"{name} went backwards: it was reset", len(seen), file)
        return reading_of(seen[-1] - seen[0], len(seen), file)

    return compute


def ratio_of(
    top: Callable[[Raw], Reading], bottom: Callable[[Raw], Reading]
) -> Callable[[Raw], Reading]:
    """Measure one reading divided by another; null when the divisor is zero or null."""

    def compute(raw: Raw) -> Reading:
        a, b = top(raw), bottom(raw)
        sources = tuple(dict.fromkeys(a.sources + b.sources))
        if a.value is None or b.value is None:
            return null_reading(a.reason or b.reason or "a part is missing", 0, *sources)
        if b.value == 0:
            return null_reading("the divisor is zero", b.n, *sources)
        return reading_of(a.value / b.value, b.n, *sources)

    return compute


def extreme_of(key: str, pick: Callable[[list[float]], float]) -> Callable[[Raw], Reading]:
    """Measure the smallest or largest (`pick`) of a field of the measured samples."""

    def compute(raw: Raw) -> Reading:
        window = raw.measured
        values = [float(s[key]) for s in window.samples if s.get(key) is not None]
        if not values:
            return null_reading(f"no sample has {key}", 0, window.samples_file)
        return reading_of(pick(values), len(values), window.samples_file)

    return compute


def _length(name: str, what: str, key: str, pick: Callable[[list[float]], float]) -> Measure:
    return Measure(name, "tokens", what, extreme_of(key, pick))


SERVED = (
    _length("input_tokens_min", "input length, shortest", "prompt_tokens", min),
    _length("input_tokens_max", "input length, longest", "prompt_tokens", max),
    _length("output_tokens_min", "output length, shortest", "completion_tokens", min),
    _length("output_tokens_max", "output length, longest", "completion_tokens", max),
)
"""What every experiment reports: the lengths that the server counted."""


def reading_of(value: float, n: int, *sources: str) -> Reading:
    """Return an unnamed reading of a value computed from `n` raw values; null if not finite."""
    if not math.isfinite(value):
        return null_reading(f"the result is no number: {value}", n, *sources)
    return Reading(name="", unit="", value=value, n=n, sources=sources)


def null_reading(reason: str, n: int, *sources: str) -> Reading:
    """Return an unnamed reading without a value, and why there is none."""
    return Reading(name="", unit="", value=None, n=n, reason=reason, sources=sources)
