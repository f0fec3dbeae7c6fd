"""Faults to plant in a virtual run: what goes wrong in measuring, one function each.

Each takes the run, a source of chance, and `real`: with False it goes the same way and leaves
nothing wrong. Such a twin shows that the verdict is lost because of the fault and of nothing else.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

from kit.fact import Fact
from kit.inside.clock import NS, Arrivals, Clock
from kit.measure import Scrape
from kit.virtual import TTFT_S, VirtualRun

Plant = Callable[[VirtualRun, np.random.Generator, bool], None]

HITS = ("vllm:prefix_cache_hits_total", frozenset[tuple[str, str]]())
SERVED = ("vllm:prompt_tokens_total", frozenset[tuple[str, str]]())
BORN = ("vllm:prompt_tokens_created", frozenset[tuple[str, str]]())


def _any(run: VirtualRun, draw: np.random.Generator) -> int:
    return int(draw.integers(len(run.replicates)))


def _samples(run: VirtualRun, replicate: int, phase: str = "measure") -> list[dict[str, Any]]:
    return [dict(s) for s in run.raws[replicate].windows[phase].samples]


def _set(run: VirtualRun, replicate: int, phase: str = "measure", **fields: Any) -> None:
    """Replace fields of one window."""
    raw = run.raws[replicate]
    window = replace(raw.windows[phase], **fields)
    run.raws[replicate] = replace(raw, windows={**raw.windows, phase: window})


def _fail(sample: dict[str, Any]) -> dict[str, Any]:
    lost: dict[str, Any] = {"chunk_s": [], "completion_tokens": None, "prompt_tokens": None}
    return {**sample, **lost, "status": 500, "error": "HTTP 500"}


def half_fail(run: VirtualRun, draw: np.random.Generator, real: bool) -> None:
    """Half of all requests fail, in every replicate."""
    for replicate in run.raws:
        samples = _samples(run, replicate)
        failing = set(draw.permutation(len(samples))[: len(samples) // 2].tolist()) if real else ()
        _set(
            run,
            replicate,
            samples=tuple(_fail(s) if i in failing else s for i, s in enumerate(samples)),
        )


def one_fails(run: VirtualRun, draw: np.random.Generator, real: bool) -> None:
    """One request of one replicate fails."""
    replicate = _any(run, draw)
    samples = _samples(run, replicate)
    if real:
        chosen = int(draw.integers(len(samples)))
        samples[chosen] = _fail(samples[chosen])
    _set(run, replicate, samples=tuple(samples))


def short_answers(run: VirtualRun, draw: np.random.Generator, real: bool) -> None:
    """The candidate serves one output token fewer than asked."""
    for replicate in run.of("candidate"):
        samples = _samples(run, replicate)
        less = [{**s, "completion_tokens": s["completion_tokens"] - real} for s in samples]
        _set(run, replicate, samples=tuple(less))


def long_prompts(run: VirtualRun, draw: np.random.Generator, real: bool) -> None:
    """The candidate's prompts have 3 % more tokens (the twin's: 0 %)."""
    for replicate in run.of("candidate"):
        samples = _samples(run, replicate)
        more = [{**s, "prompt_tokens": s["prompt_tokens"] + 2 * real} for s in samples]
        _set(run, replicate, samples=tuple(more))


def lost_sample(run: VirtualRun, draw: np.random.Generator, real: bool) -> None:
    """One sample of one replicate was never written."""
    replicate = _any(run, draw)
    samples = _samples(run, replicate)
    if real:
        del samples[int(draw.integers(len(samples)))]
    _set(run, replicate, samples=tuple(samples))


def late_sends(run: VirtualRun, draw: np.random.Generator, real: bool) -> None:
    """The client sends 5 % of a TTFT after its schedule in one arm (the twin: 0.5 %)."""
    late_s = TTFT_S * (0.05 if real else 0.005)
    for replicate in run.of("candidate"):
        samples = _samples(run, replicate)
        _set(
            run,
            replicate,
            samples=tuple({**s, "lane": None, "intended_s": s["sent_s"] - late_s} for s in samples),
        )


class SteppedClock(Clock):
    """A clock under the bench's hand: the wall clock steps by `step_ns` at `step_at_ns`."""

    def __init__(self, step_at_ns: int, step_ns: int) -> None:
        self.now_ns = 0
        self.arrived_ns = 0
        self._step_at_ns = step_at_ns
        self._step_ns = step_ns
        self.monotonic_ns = lambda: self.now_ns
        self.realtime_ns = lambda: self.wall_ns(self.now_ns)

    def wall_ns(self, at_ns: int) -> int:
        """Return CLOCK_REALTIME at a moment of CLOCK_MONOTONIC."""
        return at_ns + 1_700_000_000 * NS + self._step_ns * (at_ns >= self._step_at_ns)

    def receive(self, sock: Any) -> tuple[bytes, int | None]:
        """Return the wall clock's stamp of what arrived."""
        return b"", self.wall_ns(self.arrived_ns)


def clock_step(run: VirtualRun, draw: np.random.Generator, real: bool) -> None:
    """The wall clock steps by 50 ms in one window, read through the kit's own clock."""
    replicate = _any(run, draw)
    samples = _samples(run, replicate)
    end_s = max(s["done_s"] for s in samples)
    at_s = float(draw.uniform(0.1, 0.9)) * end_s
    sign = 1 if draw.random() < 0.5 else -1
    clock = SteppedClock(round((at_s + 1) * NS), sign * round(0.05 * NS) * real)
    clock.now_ns = NS // 2
    arrivals = Arrivals(clock)
    due = [(t, i, j) for i, s in enumerate(samples) for j, t in enumerate(s["chunk_s"])]
    heapq.heapify(due)
    while due:
        t, i, j = heapq.heappop(due)
        clock.arrived_ns = round((t + 1) * NS)
        clock.now_ns = clock.arrived_ns + 20_000
        at_ns = arrivals.receive(None)[1]  # type: ignore[arg-type]
        samples[i]["chunk_s"] = [
            round(at_ns / NS - 1, 6) if k == j else one
            for k, one in enumerate(samples[i]["chunk_s"])
        ]
    ended = [{**s, "done_s": s["chunk_s"][-1]} for s in samples]
    load = {**run.raws[replicate].measured.load, "clock_step_s": arrivals.report().clock_step_s}
    _set(run, replicate, samples=tuple(ended), load=load)


def backwards(run: VirtualRun, draw: np.random.Generator, real: bool) -> None:
    """The clock steps back by two TTFTs in one window and nobody notices."""
    replicate = _any(run, draw)
    samples = _samples(run, replicate)
    chosen = samples[int(draw.integers(len(samples)))]
    step_s = 2 * TTFT_S * real
    chosen["chunk_s"] = [chosen["chunk_s"][0], chosen["chunk_s"][1] - step_s]
    chosen["done_s"] -= step_s
    _set(run, replicate, samples=tuple(samples))


def throttling(run: VirtualRun, draw: np.random.Generator, real: bool) -> None:
    """The device is throttled in one of the 20 telemetry samples of one replicate."""
    replicate = _any(run, draw)
    if real:
        place = int(draw.integers(len(run.telemetry[replicate])))
        run.telemetry[replicate][place]["throttled"] = "hardware thermal slowdown"


def foreign_load(run: VirtualRun, draw: np.random.Generator, real: bool) -> None:
    """Other programs use 15 % of the server's CPUs in one replicate (the twin: 8 %)."""
    replicate = _any(run, draw)
    share = 0.15 if real else 0.08
    for i, line in enumerate(run.telemetry[replicate]):
        line["busy_s"] = line["ours_s"] + 4.0 * i * share


def _replace_last(run: VirtualRun, replicate: int, change: Callable[[Scrape], Scrape]) -> None:
    scrapes = run.raws[replicate].measured.scrapes
    _set(run, replicate, scrapes=(*scrapes[:-1], change(scrapes[-1])))


def counter_falls(run: VirtualRun, draw: np.random.Generator, real: bool) -> None:
    """One counter of one replicate starts again from 0 inside the window."""
    if real:
        _replace_last(run, _any(run, draw), lambda s: replace(s, values={**s.values, SERVED: 10.0}))


def counter_restarts(run: VirtualRun, draw: np.random.Generator, real: bool) -> None:
    """A counter starts again and passes its old value: only its time of creation tells."""
    if real:
        _replace_last(
            run,
            _any(run, draw),
            lambda s: replace(s, values={**s.values, BORN: s.values[BORN] + 5.0}),
        )


def used_server(run: VirtualRun, draw: np.random.Generator, real: bool) -> None:
    """The second replicate of each pair ran on the server of the first: warm, 30 % faster."""
    if not real:
        return
    for replicate in [r.replicate for r in run.replicates][1::2]:
        for phase, window in run.raws[replicate].windows.items():
            warm = [
                {**s, "chunk_s": [t - 0.3 * TTFT_S for t in s["chunk_s"]]} for s in window.samples
            ]
            moved = [
                replace(s, values={**s.values, SERVED: s.values[SERVED] + 832.0})
                for s in window.scrapes
            ]
            _set(run, replicate, phase, samples=tuple(warm), scrapes=tuple(moved))


def leaked_cache(run: VirtualRun, draw: np.random.Generator, real: bool) -> None:
    """A cache outside the server keeps the prefix between replicates: the first request hits."""
    if not real:
        return
    for replicate in run.of("candidate"):
        for phase, window in run.raws[replicate].windows.items():
            hit = [
                replace(s, values={**s.values, HITS: s.values[HITS] + 48.0 * (s.t_s > 0)})
                if phase == "cold"
                else replace(s, values={**s.values, HITS: s.values[HITS] + 48.0})
                for s in window.scrapes
            ]
            _set(run, replicate, phase, scrapes=tuple(hit))


def _change_setting(run: VirtualRun, replicate: int, real: bool) -> None:
    raw = run.raws[replicate]
    config = dict(raw.server_info["vllm_config"])
    config["scheduler_config"] = {"max_num_seqs": 8 if real else 16}
    info = {**raw.server_info, "vllm_config": config}
    run.raws[replicate] = replace(raw, server_info=info)


def second_setting(run: VirtualRun, draw: np.random.Generator, real: bool) -> None:
    """The candidate's engine resolved another batch size than the baseline's."""
    for replicate in run.of("candidate"):
        _change_setting(run, replicate, real)


def setting_once(run: VirtualRun, draw: np.random.Generator, real: bool) -> None:
    """One replicate alone resolved another batch size."""
    _change_setting(run, _any(run, draw), real)


def other_library(run: VirtualRun, draw: np.random.Generator, real: bool) -> None:
    """One replicate ran with another version of a library."""
    replicate = _any(run, draw)

    def changed(fact: Fact) -> Fact:
        return fact.model_copy(update={"value": "2.9.1"}) if real else fact

    one = run.replicates[replicate]
    facts = tuple(changed(f) for f in one.facts)
    run.replicates[replicate] = one.model_copy(update={"facts": facts})


def no_action(run: VirtualRun, draw: np.random.Generator, real: bool) -> None:
    """The variable was set but nothing was ever hit in one replicate of the candidate."""
    if not real:
        return
    replicate = int(draw.choice(run.of("candidate")))
    still = [
        replace(s, values={**s.values, HITS: 0.0}) for s in run.raws[replicate].measured.scrapes
    ]
    _set(run, replicate, scrapes=tuple(still))


def lost_replicate(run: VirtualRun, draw: np.random.Generator, real: bool) -> None:
    """One replicate failed and was never repeated."""
    replicate = _any(run, draw)
    if real:
        del run.raws[replicate]
        one = run.replicates[replicate]
        run.replicates[replicate] = one.model_copy(update={"status": "failed"})


FAULTS: dict[str, tuple[Plant, str]] = {
    "half of the requests fail": (half_fail, "invalid"),
    "one request fails": (one_fails, "invalid"),
    "answers one token short": (short_answers, "invalid"),
    "prompts 3 % longer in one arm": (long_prompts, "invalid"),
    "one sample lost": (lost_sample, "invalid"),
    "client sends late": (late_sends, "invalid"),
    "wall clock steps": (clock_step, "invalid"),
    "stamps run backwards": (backwards, "invalid"),
    "device throttled": (throttling, "invalid"),
    "foreign load": (foreign_load, "invalid"),
    "counter falls": (counter_falls, "invalid"),
    "counter made anew": (counter_restarts, "invalid"),
    "warm server used again": (used_server, "invalid"),
    "cache leaks between arms": (leaked_cache, "inconclusive"),
    "second setting changed": (second_setting, "confounded"),
    "setting changed once": (setting_once, "confounded"),
    "other library once": (other_library, "confounded"),
    "variable did not act": (no_action, "inconclusive"),
    "one replicate lost": (lost_replicate, "inconclusive"),
}
"""Every fault by its name in the table, with the word it must lead to."""
