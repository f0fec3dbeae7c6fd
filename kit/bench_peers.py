"""Others' load generators beside ours: the same loads on the same stub, one core for each client.

Every tool's own record of each request is held against the stub's log of that request: the error
of a TTFT or of a gap between tokens is the tool's reading minus the truth, as in `kit.bench`.
"""

from __future__ import annotations

import contextlib
import os
import resource
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from kit import console
from kit.bench import MODES, BenchResult, free_port, json_lines, measure, running_stub
from kit.foreign import Foreign, read_foreign
from kit.inside.clock import NS, Clock, sample_offset_ns
from kit.peers import Cell, Peer, Say, out_of, peers
from kit.value import Value

STREAMS = (16, 64, 256, 1000)
OURS = "kit"
CLAIMED_AT = (256, "staggered")
CLAIMED_TTFT, CLAIMED_ITL = 40.0, 20.0
_EVERY_S = 0.2
_TICKS = os.sysconf("SC_CLK_TCK")


class PeerResult(Value):
    """One tool under one load. Errors are absolute, in seconds; null is what it does not tell.

    `lost` requests are those of which it has no whole record. CPU is that of all its processes
    from the first request's arrival to its last reading; ours includes all of the writing.
    `other_share` is how much of its core other programs took meanwhile.
    """

    tool: str
    version: str
    streams: int
    mode: str
    requests: int
    lost: int
    tokens: int
    ttft_error_p50_s: float | None
    ttft_error_p99_s: float | None
    itl_error_p50_s: float | None
    itl_error_p99_s: float | None
    ttft_read_p50_s: float | None
    cpu_s_per_1k_tokens: float | None
    startup_s: float
    other_share: float
    per_token: bool


class Advantage(Value):
    """How many times smaller our p99 errors are than the best peer's, under one load."""

    streams: int
    mode: str
    ttft: float | None
    ttft_peer: str | None
    itl: float | None
    itl_peer: str | None

    @property
    def ok(self) -> bool:
        """Whether what is claimed holds."""
        return (self.ttft or 0) >= CLAIMED_TTFT and (self.itl or 0) >= CLAIMED_ITL


def bench_peers(
    say: Say, streams: Sequence[int] = STREAMS, *, modes: Sequence[str] = MODES, tokens: int = 100
) -> list[PeerResult]:
    """Measure every tool under each load, one after the other.

    Raises `ToolMissing` where a peer was not installed, `ClientFailed` where a tool ends with an
    error, and what the engine raises.
    """
    others = peers(say)
    results = []
    with _many_files():
        for count in streams:
            for mode in modes:
                say(f"> {count} streams, {mode}")
                for peer in (None, *others):
                    with tempfile.TemporaryDirectory(prefix="kit-peers-") as folder:
                        results.append(_measure(Path(folder), peer, count, mode, tokens))
                    say(f"  {results[-1].tool}: {', '.join(cells_of(results[-1])[3:6])}")
    return results


def advantages(results: Sequence[PeerResult]) -> list[Advantage]:
    """Return our advantage under each load that ours and a peer were measured under."""
    found = []
    for streams, mode in dict.fromkeys((r.streams, r.mode) for r in results):
        here = [r for r in results if (r.streams, r.mode) == (streams, mode)]
        ttft, ttft_peer = _times(here, "ttft_error_p99_s")
        itl, itl_peer = _times(here, "itl_error_p99_s")
        found.append(
            Advantage(
                streams=streams, mode=mode, ttft=ttft, ttft_peer=ttft_peer, itl=itl,
                itl_peer=itl_peer,
            )
        )  # fmt: skip
    return found


def _times(here: Sequence[PeerResult], key: str) -> tuple[float | None, str | None]:
    """Return how many times our value goes into the smallest of a peer, and whose that is."""
    known = {r.tool: getattr(r, key) for r in here if getattr(r, key) is not None}
    ours = known.pop(OURS, None)
    if not ours or not known:
        return None, None
    best = min(known, key=lambda tool: known[tool])
    return known[best] / ours, best


# -- what is shown -----------------------------------------------------------------------------

COLUMNS = (
    "streams",
    "start",
    "tool",
    "TTFT error p50/p99 ms",
    "ITL error p50/p99 ms",
    "CPU s/1k tokens",
    "TTFT read p50 ms",
    "start-up s",
    "lost",
    "others on its core",
)


def cells_of(result: PeerResult) -> list[str]:
    """Return a row of the table, times in ms."""
    itl = _ms(result.itl_error_p50_s, result.itl_error_p99_s)
    cpu = result.cpu_s_per_1k_tokens
    return [
        str(result.streams),
        result.mode,
        result.tool,
        _ms(result.ttft_error_p50_s, result.ttft_error_p99_s),
        itl if result.per_token else "means only",
        "unknown" if cpu is None else f"{cpu:.3f}",
        _ms(result.ttft_read_p50_s),
        f"{result.startup_s:.1f}",
        str(result.lost),
        f"{result.other_share:.0%}",
    ]


def _ms(*seconds: float | None) -> str:
    return " / ".join("none" if s is None else f"{s * 1e3:.3f}" for s in seconds)


def told(advantage: Advantage) -> str:
    """Return an advantage in words."""
    parts = [
        f"{what} {times:.0f} times smaller than {peer}'s"
        for what, times, peer in (
            ("TTFT", advantage.ttft, advantage.ttft_peer),
            ("ITL", advantage.itl, advantage.itl_peer),
        )
        if times is not None
    ]
    said = " and ".join(parts) or "nothing to compare"
    return f"{advantage.streams} streams, {advantage.mode}: p99 error of {said}"


def show_peers(results: Sequence[PeerResult]) -> None:
    """Print the results as a table, and the advantage under each load."""
    console.table("load generators on one stub", list(COLUMNS), [cells_of(r) for r in results])
    for advantage in advantages(results):
        console.say(told(advantage))


# -- one tool under one load -------------------------------------------------------------------


def _measure(folder: Path, peer: Peer | None, streams: int, mode: str, tokens: int) -> PeerResult:
    cores = sorted(os.sched_getaffinity(0))
    usage = _Usage(cores[0])
    if peer is None:
        with usage.followed(cores[len(cores) // 2]):
            ours = measure(folder, streams, mode, tokens, "auto")
        return _ours(ours, folder, usage)
    cell = Cell(streams=streams, mode=mode, tokens=tokens, port=free_port())
    out = folder / "out"
    out.mkdir()
    with running_stub(folder, cell.port, cores[-1]), usage.followed(cores[len(cores) // 2]):
        began_s = time.monotonic()
        words = peer.words(cell, peer.tokenizer, out_of(peer, out))
        peer.start(words, out, cores[0], usage.follow)
    found = read_foreign(out / peer.records)
    truth = {t["id"]: t for t in json_lines(folder / "stub_times.jsonl")}
    return _compare(found, truth, cell, usage, peer=peer, began_s=began_s)


def _ours(result: BenchResult, folder: Path, usage: _Usage) -> PeerResult:
    truth = list(json_lines(folder / "stub_times.jsonl"))
    span = min(t["arrived_s"] for t in truth), max(t["chunk_s"][-1] for t in truth)
    samples = list(json_lines(folder / "out" / "samples.jsonl"))
    return PeerResult(
        tool=OURS,
        version="",
        streams=result.streams,
        mode=result.mode,
        requests=len(samples),
        lost=0,
        tokens=result.tokens,
        ttft_error_p50_s=result.ttft_error_p50_s,
        ttft_error_p99_s=result.ttft_error_p99_s,
        itl_error_p50_s=result.itl_error_p50_s,
        itl_error_p99_s=result.itl_error_p99_s,
        ttft_read_p50_s=float(np.median([s["chunk_s"][0] - s["sent_s"] for s in samples])),
        cpu_s_per_1k_tokens=result.cpu_s_per_1k_tokens,
        startup_s=result.startup_s,
        other_share=usage.other_share(*span),
        per_token=True,
    )


def _compare(
    found: Foreign,
    truth: Mapping[str, Mapping[str, Any]],
    cell: Cell,
    usage: _Usage,
    *,
    peer: Peer,
    began_s: float,
) -> PeerResult:
    ttft, itl, read, tokens = [], [], [], 0
    for sample, true in matched(found, truth):
        heard, sent = np.array(sample["chunk_s"]), np.array(true["chunk_s"])
        read.append(heard[0] - sample["sent_s"])
        ttft.append(abs(read[-1] - (sent[0] - true["arrived_s"])))
        tokens += len(sent)
        if found.per_token:
            itl.append(np.abs(np.diff(heard) - np.diff(sent)))
    gaps = np.concatenate(itl) if itl else np.array([])
    first_s = min(t["arrived_s"] for t in truth.values())
    last_s = _monotonic_s(found) + max(s["chunk_s"][-1] for s in found.samples if s["chunk_s"])
    cpu_s = usage.tree_s(first_s, last_s)
    return PeerResult(
        tool=peer.name,
        version=peer.version,
        streams=cell.streams,
        mode=cell.mode,
        requests=len(ttft),
        lost=cell.streams - len(ttft),
        tokens=tokens,
        ttft_error_p50_s=_quantile(ttft, 0.5),
        ttft_error_p99_s=_quantile(ttft, 0.99),
        itl_error_p50_s=_quantile(gaps, 0.5),
        itl_error_p99_s=_quantile(gaps, 0.99),
        ttft_read_p50_s=_quantile(read, 0.5),
        cpu_s_per_1k_tokens=cpu_s / tokens * 1000 if tokens else None,
        startup_s=first_s - began_s,
        other_share=usage.other_share(first_s, last_s),
        per_token=found.per_token,
    )


def matched(
    found: Foreign, truth: Mapping[str, Mapping[str, Any]]
) -> Iterator[tuple[Mapping[str, Any], Mapping[str, Any]]]:
    """Yield each whole record of a tool with the stub's of the same request.

    They meet in the id that the tool sent with the request, or that the stub gave to the answer.
    """
    for sample in found.samples:
        told = str(sample["tags"].get("response_id", "")).removeprefix("cmpl-")
        true = truth.get(told or sample["id"])
        if true is None or sample["error"] or not sample["chunk_s"]:
            continue
        if not found.per_token or len(true["chunk_s"]) == len(sample["chunk_s"]):
            yield sample, true


def _quantile(values: Sequence[float] | np.ndarray[Any, Any], q: float) -> float | None:
    return float(np.quantile(values, q)) if len(values) else None


def _monotonic_s(found: Foreign) -> float:
    """Return a tool's first send on CLOCK_MONOTONIC, in seconds."""
    if found.clock == "monotonic":
        return found.t0_s
    return found.t0_s - sample_offset_ns(Clock()) / NS


@contextlib.contextmanager
def _many_files() -> Iterator[None]:
    """Let every tool open as many connections as the machine allows."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (before[1], before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


# -- CPU time ----------------------------------------------------------------------------------


@dataclass
class _Usage:
    """CPU seconds of a tool's processes, and of its whole core, over time."""

    core: int
    times: list[float] = field(default_factory=list)
    tree: list[float] = field(default_factory=list)
    busy: list[float] = field(default_factory=list)
    roots: Sequence[int] | None = None

    def follow(self, roots: Sequence[int] | None) -> None:
        """Count these processes and all below them; None: all that this one starts."""
        self.roots = roots

    @contextlib.contextmanager
    def followed(self, core: int) -> Iterator[None]:
        """Look at them a few times a second, from another core, until the block ends."""
        before = set(_children(os.getpid()))
        ended = threading.Event()

        def look() -> None:
            os.sched_setaffinity(0, {core})  # of this thread alone
            while not ended.wait(_EVERY_S):
                ours = [pid for pid in _children(os.getpid()) if pid not in before]
                self.times.append(time.monotonic())
                self.tree.append(sum(map(_tree_cpu_s, self.roots or ours)))
                self.busy.append(_core_cpu_s(self.core))

        thread = threading.Thread(target=look, daemon=True)
        thread.start()
        try:
            yield
        finally:
            ended.set()
            thread.join()

    def tree_s(self, begin_s: float, end_s: float) -> float:
        """Return the CPU seconds of the tool between two times."""
        begin, end = np.interp([begin_s, end_s], self.times, self.tree)
        return float(end - begin)

    def other_share(self, begin_s: float, end_s: float) -> float:
        """Return the share of the core that other programs took between two times."""
        begin, end = np.interp([begin_s, end_s], self.times, self.busy)
        other = (end - begin - self.tree_s(begin_s, end_s)) / (end_s - begin_s)
        return float(max(0.0, other))


def _children(pid: int) -> list[int]:
    found = []
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        with contextlib.suppress(OSError):
            found += [int(word) for word in task.read_text("ascii").split()]
    return found


def _tree_cpu_s(pid: int) -> float:
    """Return the CPU seconds of a process, of all below it, and of those that it has outlived."""
    total = sum(map(_tree_cpu_s, _children(pid)))
    with contextlib.suppress(OSError):
        told = Path(f"/proc/{pid}/stat").read_text("utf-8", errors="replace")
        total += sum(map(int, told.rpartition(")")[2].split()[11:15])) / _TICKS
    return total


def _core_cpu_s(core: int) -> float:
    """Return the CPU seconds of a core but for idling and interrupts."""
    for line in Path("/proc/stat").read_text("ascii").splitlines():
        name, *ticks = line.split()
        if name == f"cpu{core}":
            user, nice, system, *_, steal = map(int, ticks[:8])
            return (user + nice + system + steal) / _TICKS
    return 0.0
