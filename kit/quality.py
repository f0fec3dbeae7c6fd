"""Whether the answers are still worth anything: perplexity, and agreement between the arms.

A capacity that doubles while the text breaks is no gain. A quality limit is registered in the
plan; when it does not hold, `supported` becomes `not supported`, with the reason.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

from kit.experiment import QualityLimit
from kit.measure import Comparison, Raw, Reading, null_reading, reading_of
from kit.value import Value


def perplexity(phase: str) -> Callable[[Raw], Reading]:
    """Measure exp of the mean negative log probability of the prompts' tokens, first ones aside.

    Read from answers to requests with `"prompt_logprobs": 0`.
    """

    def compute(raw: Raw) -> Reading:
        window = raw.windows.get(phase)
        if window is None:  # of random weights nothing is asked for the answer's sake
            return null_reading(f"no phase `{phase}` was run", 0)
        logs = [v for s in window.samples for v in s.get("prompt_logprobs") or []]
        if not logs:
            return null_reading("no answer has prompt log probabilities", 0, window.samples_file)
        mean = -math.fsum(logs) / len(logs)
        if mean > 700:  # exp would overflow
            return null_reading(f"mean log probability {-mean:g}", len(logs), window.samples_file)
        return reading_of(math.exp(mean), len(logs), window.samples_file)

    return compute


def agreement(phase: str, *, task: str = "") -> Callable[[Raw, Raw], Reading]:
    """Compare greedy answers: the mean share of an answer that is equal up to the first difference.

    1 is word for word the same. Answers to prompts scored for perplexity are left out; with `task`
    also those of other tasks, by their ids.
    """

    def compute(baseline: Raw, candidate: Raw) -> Reading:
        a, b = baseline.windows[phase], candidate.windows[phase]
        files = (a.samples_file, b.samples_file)
        theirs = {s.get("id"): s for s in b.samples}
        shares = [
            _common_share(str(s["text"]), str(other["text"]))
            for s in a.samples
            if not s.get("prompt_logprobs")
            and str(s.get("id")).startswith(task)
            and (other := theirs.get(s.get("id"))) is not None
        ]
        if not shares:
            return null_reading("no prompt was answered in both arms", 0, *files)
        return reading_of(math.fsum(shares) / len(shares), len(shares), *files)

    return compute


def _common_share(a: str, b: str) -> float:
    longest = max(len(a), len(b))
    if not longest:
        return 1.0
    same = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), None)
    return (min(len(a), len(b)) if same is None else same) / longest


class Divergence(Value):
    """Where two greedy answers to one prompt part: the token's place, counted from 0, and how near.

    `gap` is how much likelier the first answer's server found its own token there than the
    other's, in natural logarithms: its top-2 gap where the other is the runner-up. Null where that
    server did not tell the other's token, or one answer just ended.
    """

    at: int
    gap: float | None

    def is_near_tie(self, limit: float) -> bool:
        """Tell whether rounding may have made the difference: the gap is below `limit`."""
        return self.gap is not None and self.gap < limit


def first_divergence(
    tokens: Sequence[str], others: Sequence[str], told: Sequence[Mapping[str, float]]
) -> Divergence | None:
    """Compare two answers token by token; None when they are equal.

    `told` are log probabilities by token at each place of the first answer, its own among them.
    Up to the place where they part both servers had the same text before them.
    """
    pairs = zip(tokens, others, strict=False)
    at = next((i for i, (a, b) in enumerate(pairs) if a != b), None)
    if at is not None:
        here = told[at] if at < len(told) else {}
        own, other = here.get(tokens[at]), here.get(others[at])
        return Divergence(at=at, gap=None if own is None or other is None else own - other)
    shorter = min(len(tokens), len(others))
    return None if len(tokens) == len(others) else Divergence(at=shorter, gap=None)


def ratio_between(measure: Callable[[Raw], Reading]) -> Callable[[Raw, Raw], Reading]:
    """Compare one measure of both arms: candidate over baseline."""

    def compute(baseline: Raw, candidate: Raw) -> Reading:
        a, b = measure(baseline), measure(candidate)
        files = tuple(dict.fromkeys(a.sources + b.sources))
        if a.value is None or b.value is None:
            return null_reading(a.reason or b.reason or "a part is missing", 0, *files)
        if a.value == 0:
            return null_reading("the baseline's value is zero", a.n, *files)
        return reading_of(b.value / a.value, min(a.n, b.n), *files)

    return compute


class Compared(Value):
    """The comparisons of one pair."""

    pair: int
    readings: tuple[Reading, ...]


def compare_pairs(
    comparisons: Sequence[Comparison], pairs: Mapping[int, tuple[Raw, Raw]]
) -> tuple[Compared, ...]:
    """Return every comparison of every pair; `pairs` hold (baseline, candidate)."""
    if not comparisons:
        return ()
    return tuple(
        Compared(pair=pair, readings=tuple(c.read(*pairs[pair]) for c in comparisons))
        for pair in sorted(pairs)
    )


def check_quality(limits: Sequence[QualityLimit], compared: Sequence[Compared]) -> list[str]:
    """Return which registered limits do not hold, pair by pair; empty when the quality is there.

    What is unknown, or was never compared, does not hold.
    """
    broken = [f"{limit} was never read" for limit in limits if not compared]
    for limit in limits:
        for one in compared:
            reading = next((r for r in one.readings if r.name == limit.comparison), None)
            if reading is None:
                broken.append(f"{limit} was not read in pair {one.pair}")
            elif reading.value is None:
                broken.append(f"{limit} is unknown in pair {one.pair}: {reading.reason}")
            elif not limit.holds(reading.value):
                broken.append(f"{limit} fails in pair {one.pair}: {reading.value:.3g}")
    return broken
