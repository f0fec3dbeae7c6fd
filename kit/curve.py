"""A load curve: stairs of rising request rates, and the knee where the server stops keeping up.

Requests come evenly spaced whatever the server does (open loop). What a stair served is counted
by when its tokens arrived, not by which requests they belong to: those that still queue when a
stair ends are served in a later one, or after the last, and bias none.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from kit.measure import Raw, Reading, Sample, Where, null_reading, reading_of

SETTLING = 0.25
"""The part of each stair that is left out: requests of the stair before are still under way."""
SATURATED = 0.9
"""A stair that serves less than this share of what it offers is above the knee."""


@dataclass(frozen=True)
class Arrival:
    """When one request of a staircase is sent, in seconds, and the tags that tell its stair."""

    at_s: float
    tags: dict[str, float]


def staircase(rates: Sequence[float], stair_s: float) -> Iterator[Arrival]:
    """Yield a stair of `stair_s` seconds for each of the rates, in requests/s, from 1 on."""
    for number, rate in enumerate(rates, 1):
        begin_s = (number - 1) * stair_s
        for i in range(round(rate * stair_s)):
            yield Arrival(round(begin_s + i / rate, 6), {"stair": number, "req_per_s": rate})


@dataclass(frozen=True)
class Stair:
    """One rate and what was served of it: output tokens, by when they arrived."""

    number: int
    offered_req_per_s: float
    tokens_per_request: float
    served_tok_per_s: float

    @property
    def served_req_per_s(self) -> float:
        return self.served_tok_per_s / self.tokens_per_request

    @property
    def is_saturated(self) -> bool:
        return self.served_req_per_s < SATURATED * self.offered_req_per_s


def stairs_of(samples: Sequence[Sample]) -> tuple[Stair, ...]:
    """Return the stairs of a staircase's samples, lowest first; those that nothing served too.

    A stair lasts as long as its requests take to come at its rate.
    """
    tagged = [s for s in samples if "stair" in s["tags"] and s.get("intended_s") is not None]
    tagged.sort(key=lambda s: (s["tags"]["stair"], s["intended_s"]))
    found = []
    for number, group in itertools.groupby(tagged, lambda s: int(s["tags"]["stair"])):
        own = list(group)
        rate = float(own[0]["tags"]["req_per_s"])
        begin_s = own[0]["intended_s"]
        end_s = begin_s + len(own) / rate
        begin_s += SETTLING * (end_s - begin_s)
        served = math.fsum(tokens_between(s, begin_s, end_s) for s in samples)
        lengths = [s["completion_tokens"] for s in own if s.get("completion_tokens")]
        found.append(
            Stair(
                number=number,
                offered_req_per_s=rate,
                tokens_per_request=math.fsum(lengths) / len(lengths) if lengths else 1.0,
                served_tok_per_s=served / (end_s - begin_s),
            )
        )
    return tuple(found)


def tokens_between(sample: Sample, begin_s: float, end_s: float) -> float:
    """Return how many of an answer's output tokens came in a span; its chunks hold equally many.

    A chunk comes evenly from the one before it on. Where many requests share slow steps, all of
    them get a chunk at one moment, and counting those would make a step more or less a jump.
    """
    chunks, tokens = sample.get("chunk_s") or [], sample.get("completion_tokens") or 0
    if not chunks or chunks[-1] < begin_s or chunks[0] >= end_s:
        return 0.0
    count = len(chunks)
    before, after = np.interp((begin_s, end_s), chunks, range(1, count + 1), left=0, right=count)
    return float(tokens * (after - before) / count)


def find_knee(stairs: Sequence[Stair]) -> Stair | str:
    """Return the stair that served most, or why the load does not show where the knee is.

    The knee is where the line served = offered meets the plateau; both must have been seen.
    """
    if not stairs:
        return "no request belongs to a stair"
    lowest, highest = stairs[0], stairs[-1]
    if lowest.is_saturated:
        return (
            f"even the lowest rate was too much: {lowest.served_req_per_s:.3g} of "
            f"{lowest.offered_req_per_s:g} requests/s were served"
        )
    if not any(stair.is_saturated for stair in stairs):
        return (
            f"every rate was still served, up to {highest.offered_req_per_s:g} requests/s: "
            "the knee is beyond it"
        )
    return max(stairs, key=lambda stair: stair.served_tok_per_s)


# -- measures ----------------------------------------------------------------------------------


def at_knee(of: Callable[[Stair], float]) -> Callable[[Raw], Reading]:
    """Measure a number of the stair at the knee; null with the reason where there is none."""

    def compute(raw: Raw) -> Reading:
        window = raw.measured
        knee = find_knee(stairs_of(window.samples))
        if isinstance(knee, str):
            return null_reading(knee, len(window.samples), window.samples_file)
        return reading_of(of(knee), len(window.samples), window.samples_file)

    return compute


def served_in(number: int) -> Callable[[Raw], Reading]:
    """Measure the output throughput inside a stair, in tok/s."""

    def compute(raw: Raw) -> Reading:
        window = raw.measured
        own = next((s for s in stairs_of(window.samples) if s.number == number), None)
        if own is None:
            return null_reading(f"the load has no stair {number}", 0, window.samples_file)
        return reading_of(own.served_tok_per_s, len(window.samples), window.samples_file)

    return compute


def is_of_stair(number: int) -> Where:
    """Return the test whether a sample belongs to that stair."""
    return lambda sample: bool(sample["tags"].get("stair") == number)
