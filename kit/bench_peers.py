"""Others' load generators beside ours: the same loads on the same stub, one core for each client.

Every tool's own record of each request is held against the stub's log of that request: the error
of a TTFT or of a gap between tokens is the tool's reading minus the truth, as in `kit.bench`.
"""

from __future__ import annotations

import contextlib
import os
import resource
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from kit import console
from kit.bench import MODES, BenchResult, free_port, json_lines, measure, running_stub
from kit.cpu_usage import Usage
from kit.errors import BadFile, ClientFailed, KitError, NotFound
from kit.foreign import Foreign, read_foreign
from kit.inside.clock import NS, Clock, sample_offset_ns
from kit.peers import Cell, Peer, Say, out_of, peers
from kit.value import Value, one_line

STREAMS = (16, 64, 256, 1000)
OURS = "kit"
CLAIMED_AT = (256, "staggered")
CLAIMED_TTFT, CLAIMED_ITL = 40.0, 20.0


class PeerResult(Value):
    """One tool under one load. Errors are absolute, in seconds; null is what it does not tell.

    `lost` requests are those of which it has no whole record; `failed` says why it has none at
    all. CPU is that of all its processes from the first request's arrival to its last reading;
    ours includes all of the writing. `other_share` is how much of its core other programs took
    meanwhile.
    """

    tool: str
    version: str
    streams: int
    mode: str
    lost: int
    requests: int = 0
    tokens: int = 0
    ttft_error_p50_s: float | None = None
    ttft_error_p99_s: float | None = None
    itl_error_p50_s: float | None = None
    itl_error_p99_s: float | None = None
    ttft_read_p50_s: float | None = None
    cpu_s_per_1k_tokens: float | None = None
    startup_s: float | None = None
    other_share: float | None = None
    per_token: bool = True
    failed: str | None = None


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

    A peer that a load was too much for has lost all of its requests. Raises `ToolMissing` where a
    peer was not installed, `ClientFailed` where ours ends with an error, and what the engine
    raises.
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
                    say(f"  {_line(results[-1])}")
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
    return [
        str(result.streams),
        result.mode,
        result.tool,
        _ms(result.ttft_error_p50_s, result.ttft_error_p99_s),
        itl if result.per_token else "means only",
        _told(result.cpu_s_per_1k_tokens, ".3f"),
        _ms(result.ttft_read_p50_s),
        _told(result.startup_s, ".1f"),
        "all" if result.failed else str(result.lost),
        _told(result.other_share, ".0%"),
    ]


def _line(result: PeerResult) -> str:
    cells = cells_of(result)[3:6]
    return f"{result.tool}: {result.failed or ', '.join(cells)}"


def _ms(*seconds: float | None) -> str:
    return " / ".join(_told(None if s is None else s * 1e3, ".3f") for s in seconds)


def _told(value: float | None, form: str) -> str:
    return "none" if value is None else format(value, form)


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


def failures(results: Sequence[PeerResult]) -> list[str]:
    """Return a sentence for each tool and load of which nothing came back."""
    return [f"{r.streams} streams, {r.mode}: {r.failed}" for r in results if r.failed]


def show_peers(results: Sequence[PeerResult]) -> None:
    """Print the results as a table, why a tool failed, and the advantage under each load."""
    console.table("load generators on one stub", list(COLUMNS), [cells_of(r) for r in results])
    for failure in failures(results):
        console.say(failure)
    for advantage in advantages(results):
        console.say(told(advantage))


# -- one tool under one load -------------------------------------------------------------------


def _measure(folder: Path, peer: Peer | None, streams: int, mode: str, tokens: int) -> PeerResult:
    cores = sorted(os.sched_getaffinity(0))
    usage = Usage(cores[0])
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
        try:
            peer.start(words, out, cores[0], usage.follow)
            found = read_foreign(out / peer.records)
            if not any(sample["chunk_s"] for sample in found.samples):
                raise ClientFailed(f"{peer.name} has no answered request in its records")
        except (ClientFailed, BadFile, NotFound) as error:
            return _failed(peer, cell, error)
    truth = {t["id"]: t for t in json_lines(folder / "stub_times.jsonl")}
    return _compare(found, truth, cell, usage, peer=peer, began_s=began_s)


def _failed(peer: Peer, cell: Cell, error: KitError) -> PeerResult:
    return PeerResult(
        tool=peer.name,
        version=peer.version,
        streams=cell.streams,
        mode=cell.mode,
        lost=cell.streams,
        failed=one_line(error.message),
    )


def _ours(result: BenchResult, folder: Path, usage: Usage) -> PeerResult:
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
    usage: Usage,
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
