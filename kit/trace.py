"""Where one rank's time goes, from the trace that torch's profiler wrote of it.

The traced window, from the first op or kernel to the end of the last one, is split into parts that
sum to it: GEMM, attention, communication, other work, and gaps in which nothing ran. On a GPU what
counts are its kernels and copies, of all streams. On a CPU each moment belongs to the innermost op
of the worker's thread, as an op such as `aten::addmm` works between the small ones that it calls;
and to gloo's own threads, which communicate while the worker only waits. Where several run at once
the first of `PARTS` counts, so communication is what it costs: that under which nothing else ran.

Where vLLM marked what it did (`VLLM_CUSTOM_SCOPES_FOR_PROFILING`), scheduling is told apart too: a
step's is from the first scope of `schedule: …` to the end of its last, all on one thread; a forward
pass is from the first to the last kernel that was launched inside `execute_…`.

The text is read piece by piece, and of each event only its times, thread and part are kept.
"""

from __future__ import annotations

import contextlib
import gzip
import io
import itertools
import json
import re
import sys
import zlib
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal, NamedTuple, TextIO

from kit.errors import BadFile
from kit.overlap import Overlap, overlap_of
from kit.value import Value

FOLDER = "/tmp/traces"  # noqa: S108 - inside an engine's container
PROFILER_CONFIG = json.dumps(
    {
        "profiler": "torch",
        "torch_profiler_dir": FOLDER,
        "torch_profiler_with_stack": False,  # Python's frames, which are most of a trace
        "ignore_frontend": True,  # the API server, which is no rank
    },
    separators=(",", ":"),
)
"""The value of vLLM's --profiler-config by which each rank leaves a trace in `FOLDER`."""

Part = Literal["gemm", "attention", "other", "communication"]
PARTS: tuple[Part, ...] = ("gemm", "attention", "other", "communication")
Mark = Literal["schedule", "scheduled", "forward"]
"""Of a scope: part of a step's scheduling, the last part of it, or a forward pass on a device."""

NAMES: tuple[tuple[Part, re.Pattern[str]], ...] = (
    (
        "communication",  # NCCL, gloo and torch.distributed, vLLM's and flashinfer's own all-reduce
        re.compile(
            r"nccl|^gloo:|^_?c10d|symm_mem|multimem_|_C::shm_|cross_device_reduce"
            r"|all_?(reduce|gather|to_?all)|reduce_?scatter",
            re.IGNORECASE,
        ),
    ),
    (
        "attention",  # the kernels of every backend, and what writes their cache
        re.compile(
            r"attention|attn|flash(_|::|mla)|fmha|(^|[_:])mla_|reshape_and_cache"
            r"|kv_cache_update|Batch(Decode|Prefill)",
            re.IGNORECASE,
        ),
    ),
    (
        "gemm",  # cuBLAS, CUTLASS, Marlin and Machete, Triton templates; aten and oneDNN on CPU
        re.compile(
            r"gemm|gemv|nvjet|xmma|cutlass|cublas|marlin|machete|fused_moe|matmul|mkldnn"
            r"|(:|_)linear|(:|_)(add|b|baddb)?m[mv](?![a-z0-9])",
            re.IGNORECASE,
        ),
    ),
)
"""What a name says of an op or kernel; the first that fits counts, and none means other work."""

ON_DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")
COUNTED = (*ON_DEVICE, "cpu_op", "user_annotation")
SCOPES: dict[str, tuple[tuple[str, Mark], ...]] = {
    "user_annotation": (("schedule: update_after", "scheduled"), ("schedule: ", "schedule")),
    "gpu_user_annotation": (("execute_", "forward"),),
}
"""How names begin that vLLM gives to scopes, by category; the first that fits counts."""
EVENTS = 2_000_000  # some 300 MB where all of them count
TEXT_CHARS = 2**32
VALUE_CHARS = 2**24  # of one event or header field
_PIECE_CHARS = 2**20
_LONGEST_US = 1e16  # a time of day in microseconds has sixteen digits


class Split(Value):
    """One rank's traced window and its parts, in seconds; the parts sum to the window."""

    on: Literal["cuda", "cpu"]
    window_s: float
    gemm_s: float
    attention_s: float
    communication_s: float
    other_s: float
    gaps_s: float


class Trace(Value):
    """What one rank's trace tells; None for what is not in it."""

    split: Split | None
    overlap: Overlap | None


class Event(NamedTuple):
    """One op, kernel or scope: its category in the trace, thread, part, begin and end in ns."""

    category: str
    thread: str
    part: Part
    begin: int
    end: int
    mark: Mark | None = None


@lru_cache(maxsize=4096)
def part_of(name: str) -> Part:
    """Return which part an op or kernel of that name is."""
    return next((part for part, pattern in NAMES if pattern.search(name)), "other")


def trace_file(service: str, rank: int) -> str:
    """Return the name under which a run keeps the trace of an engine's rank."""
    return f"trace-{service}-rank{rank}.json.gz"


def rank_of(file_name: str) -> int | None:
    """Return the rank that the name of a trace tells, None where it tells none."""
    found = re.search(r"rank[-_]?(\d{1,4})(?!\d)", file_name)
    return int(found[1]) if found else None


def read_trace(path: Path) -> Trace:
    """Read a trace, plain or gzip.

    Raises `BadFile` with the file's name for anything that is no trace of torch's profiler.
    """
    events = tuple(read_events(path))
    return Trace(split=split_events(events), overlap=overlap_events(events))


# -- from events to parts ----------------------------------------------------------------------


def overlap_events(events: Iterable[Event]) -> Overlap | None:
    """Compute how much of the scheduling ran during forward passes; None where either lacks."""
    ours = sorted((e for e in events if e.mark), key=lambda e: e.begin)
    schedule, forward = [], []
    begin: int | None = None
    for event in ours:
        if event.mark == "forward":
            forward.append((event.begin, event.end))
            continue
        begin = event.begin if begin is None else begin
        if event.mark == "scheduled":
            schedule.append((begin, event.end))
            begin = None
    if not schedule or not forward:
        return None
    first = ours[0].begin

    def in_s(spans: Iterable[tuple[int, int]]) -> list[tuple[float, float]]:
        return [((b - first) / 1e9, (e - first) / 1e9) for b, e in spans]

    return overlap_of(in_s(schedule), in_s(forward))


def split_events(events: Iterable[Event]) -> Split | None:
    """Split the window that the events span; None where nothing that counts took any time."""
    ours = [e for e in events if e.mark is None]
    on_device = [e for e in ours if e.category in ON_DEVICE]
    if on_device:
        spans = [(e.begin, e.end, e.part) for e in on_device]
    else:
        spans = list(_of_worker([e for e in ours if e.category == "cpu_op"]))
        if spans:
            spans += [(e.begin, e.end, e.part) for e in ours if e.category == "user_annotation"]
    window = max((e for _, e, _ in spans), default=0) - min((b for b, _, _ in spans), default=0)
    if not window:
        return None
    ran = _merged(spans)
    parts = {f"{part}_s": ran[part] / 1e9 for part in PARTS}
    gaps_s = (window - ran.total()) / 1e9
    return Split(on="cuda" if on_device else "cpu", window_s=window / 1e9, gaps_s=gaps_s, **parts)


_Span = tuple[int, int, Part]


def _of_worker(ops: Sequence[Event]) -> Iterator[_Span]:
    """Yield whose each moment of the busiest thread is: that of the op that began last."""
    if not ops:
        return
    ((worker, _),) = Counter(e.thread for e in ops).most_common(1)
    own = sorted((e for e in ops if e.thread == worker), key=lambda e: (e.begin, -e.end))
    running: list[Event] = []
    now = own[0].begin
    for event in own:
        yield from _innermost(running, now, event.begin)
        running.append(event)
        now = event.begin
    yield from _innermost(running, now, max(e.end for e in own))


def _innermost(running: list[Event], now: int, until: int) -> Iterator[_Span]:
    """Yield whose the time up to `until` is, and forget the ops that end before it."""
    while running and now < until:
        inner = running[-1]
        end = min(inner.end, until)
        if end > now:
            yield now, end, inner.part
            now = end
        if inner.end <= until:
            running.pop()


def _merged(spans: Iterable[_Span]) -> Counter[Part]:
    """Return each part's time in ns, where several run at once that of the first of `PARTS`."""
    edges = sorted(
        edge for begin, end, part in spans for edge in ((begin, 1, part), (end, -1, part))
    )
    running, taken = Counter[Part](), Counter[Part]()
    for (at, step, part), (until, _, _) in itertools.pairwise(edges):
        running[part] += step
        first = next((p for p in PARTS if running[p]), None)
        if first is not None:
            taken[first] += until - at
    return taken


# -- from the file to events -------------------------------------------------------------------


def read_events(path: Path) -> Iterator[Event]:
    """Yield what a trace tells of ops, kernels and communication. Raises `BadFile`."""
    try:
        with _open(path) as text:
            for number, raw in enumerate(_trace_events(_Json(text))):
                if number == EVENTS:
                    raise ValueError(f"it has more than {EVENTS:,} events")
                event = _event(raw, f"traceEvents[{number}]")
                if event is not None:
                    yield event
    except (OSError, EOFError, zlib.error, ValueError, RecursionError) as error:
        raise BadFile(f"{path.name}: no trace of torch's profiler: {error}") from None


@contextlib.contextmanager
def _open(path: Path) -> Iterator[TextIO]:
    """Open a text that may be gzip."""
    with path.open("rb") as file:
        zipped = file.peek(2)[:2] == b"\x1f\x8b"
        unpacked = gzip.GzipFile(fileobj=file) if zipped else file
        with io.TextIOWrapper(unpacked, encoding="utf-8") as text:
            yield text


class _Json:
    """A JSON text of which one value at a time is in memory."""

    def __init__(self, text: TextIO) -> None:
        self._text = text
        self._known = ""
        self._at = 0
        self._left = TEXT_CHARS
        self._ended = False
        self._decoder = json.JSONDecoder(parse_constant=_refuse)

    def _read(self) -> None:
        piece = self._text.read(_PIECE_CHARS)
        self._ended = not piece
        self._left -= len(piece)
        if self._left < 0:
            raise ValueError(f"its text is longer than {TEXT_CHARS:,} characters")
        self._known = self._known[self._at :] + piece
        self._at = 0

    def peek(self) -> str:
        """Return the next character that is no space; nothing at the end."""
        while True:
            while self._at < len(self._known) and self._known[self._at] in " \t\r\n":
                self._at += 1
            if self._at < len(self._known) or self._ended:
                return self._known[self._at : self._at + 1]
            self._read()

    def expect(self, wanted: str) -> str:
        """Take the next character, which must be one of these."""
        found = self.peek()
        if not found or found not in wanted:
            raise ValueError(f"{wanted!r} is needed, not {found or 'the end'!r}")
        self._at += 1
        return found

    def value(self) -> Any:
        """Take the next value, whole."""
        self.peek()
        while True:
            try:
                value, end = self._decoder.raw_decode(self._known, self._at)
                if end < len(self._known) or self._ended:  # else a number may go on
                    self._at = end
                    return value
            except ValueError:
                if self._ended or len(self._known) - self._at > VALUE_CHARS:
                    raise
            self._read()


def _refuse(constant: str) -> float:
    raise ValueError(f"{constant} is no number")


def _trace_events(json_: _Json) -> Iterator[Any]:
    """Yield the events of a trace's one array of them."""
    found = False
    json_.expect("{")
    while json_.peek() != "}":
        key = json_.value()
        json_.expect(":")
        if key == "traceEvents" and not found:
            found = True
            yield from _items(json_)
        else:
            json_.value()
        if json_.peek() != "}":
            json_.expect(",")
    json_.expect("}")
    if json_.peek() or not found:
        raise ValueError("text after its end" if found else "it has no traceEvents")


def _items(json_: _Json) -> Iterator[Any]:
    json_.expect("[")
    if json_.peek() == "]":
        json_.expect("]")
        return
    while True:
        yield json_.value()
        if json_.expect(",]") == "]":
            return


def _event(raw: Any, where: str) -> Event | None:
    """Return an event that counts; None for any other. Raises `ValueError` naming its place."""
    if not isinstance(raw, dict):
        raise ValueError(f"{where}: an object is needed")
    category, name = str(raw.get("cat")), raw.get("name")
    scopes = SCOPES.get(category)
    if raw.get("ph") != "X" or (scopes is None and category not in COUNTED):
        return None
    if not isinstance(name, str):
        raise ValueError(f"{where}.name: a text is needed")
    part = part_of(name)
    mark = next((mark for words, mark in scopes or () if name.startswith(words)), None)
    if scopes and not mark and (category != "user_annotation" or part != "communication"):
        return None
    begin, length = (_ns(raw.get(key), f"{where}.{key}") for key in ("ts", "dur"))
    thread = sys.intern(f"{raw.get('pid')}/{raw.get('tid')}")  # few, and each of thousands of ops
    return Event(sys.intern(category), thread, part, begin, begin + length, mark)


def _ns(value: Any, where: str) -> int:
    """Return a time in microseconds as whole nanoseconds."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError(f"{where}: a number is needed, not {value!r:.40}")
    if not 0 <= value <= _LONGEST_US:
        raise ValueError(f"{where}: {value!r:.40} is no time")
    return round(value * 1000)
