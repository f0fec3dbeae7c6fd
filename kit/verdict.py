"""From readings to one word. Pure; the rules are registered in the plan before any data.

Order: unsupported, invalid, confounded, inconclusive (the variable did not act, too few
replicates, no decision), supported or not supported. Nothing later can lift something earlier.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import numpy as np
from scipy import stats

from kit.experiment import Condition, Hypothesis
from kit.guard import GuardResult
from kit.measure import Reading
from kit.value import Value

ALPHA = 0.025  # one-sided
MIN_PAIRS = 6  # 2**-5 would exceed ALPHA: five pairs can never decide
EXACT_PAIRS = 16  # 65,536 sign patterns; beyond, the t test differs by less than 0.001

Word = Literal["unsupported", "invalid", "confounded", "inconclusive", "supported", "not supported"]


class Effect(Value):
    """The primary measure's effect: candidate over baseline, pair by pair.

    `ratio` is the geometric mean of the pairs' ratios; `low` and `high` its 95 % t interval
    (null under 2 pairs). `p_beyond` is the chance of such data if the effect only equals the
    margin, `p_within` if it exceeds the margin, `p_reversed` if it is not beyond the margin the
    other way.
    """

    measure: str
    pairs: tuple[float, ...]
    ratio: float | None = None
    low: float | None = None
    high: float | None = None
    p_beyond: float | None = None
    p_within: float | None = None
    p_reversed: float | None = None


class Verdict(Value):
    """The word, its reason in one sentence, and whether the effect points the other way."""

    word: Word
    reason: str
    reversed: bool = False


def sign_flip_p(values: Sequence[float] | np.ndarray[Any, np.dtype[np.float64]]) -> float:
    """Return the one-sided p for a mean above 0: exact sign flips, a t test beyond 16 values.

    Under the null each value is as likely to be its own negative; p is the share of the sign
    patterns whose mean is at least the observed one.
    """
    x = np.asarray(values, dtype=float)
    if len(x) > EXACT_PAIRS:
        return float(stats.ttest_1samp(x, 0.0, alternative="greater").pvalue)
    patterns = np.arange(2 ** len(x))[:, None] >> np.arange(len(x)) & 1
    means = (np.abs(x) * (1 - 2 * patterns)).mean(axis=1)
    return float(np.mean(means >= x.mean() - 1e-12))


def margin_log(hypothesis: Hypothesis) -> float:
    """Return the margin as a positive log ratio in the hypothesis' direction."""
    if hypothesis.direction == "decrease":
        return -math.log1p(-hypothesis.margin)
    return math.log1p(hypothesis.margin)


def effect_of(hypothesis: Hypothesis, pairs: Sequence[float]) -> Effect:
    """Compute the effect from the pairs' log ratios (candidate over baseline)."""
    name = hypothesis.measure
    if not pairs:
        return Effect(measure=name, pairs=())
    logs = np.asarray(pairs, dtype=float)
    mean = float(logs.mean())
    low = high = None
    if len(logs) > 1:
        half = float(stats.t.ppf(0.975, len(logs) - 1) * logs.std(ddof=1) / math.sqrt(len(logs)))
        low, high = math.exp(mean - half), math.exp(mean + half)
    gain = -logs if hypothesis.direction == "decrease" else logs
    margin = margin_log(hypothesis)
    return Effect(
        measure=name,
        pairs=tuple(math.exp(v) for v in logs),
        ratio=math.exp(mean),
        low=low,
        high=high,
        p_beyond=sign_flip_p(gain - margin),
        p_within=sign_flip_p(margin - gain),
        p_reversed=sign_flip_p(-gain - margin),
    )


def judge(
    hypothesis: Hypothesis,
    *,
    effect: Effect,
    unsupported: str | None,
    guards: Sequence[GuardResult],
    confounders: Sequence[str],
    not_acted: Sequence[str],
    pairs_planned: int,
    quality: Sequence[str] = (),
) -> Verdict:
    """Return the verdict. Every argument is a finding; the first that forbids one decides."""
    if unsupported:
        return Verdict(word="unsupported", reason=unsupported)
    broken = [g for g in guards if not g.ok]
    if broken:
        more = f" (and {len(broken) - 1} more)" if len(broken) > 1 else ""
        return Verdict(word="invalid", reason=f"{broken[0].text}{more}")
    if confounders:
        listed = "; ".join(confounders[:3]) + (" …" if len(confounders) > 3 else "")
        return Verdict(
            word="confounded", reason=f"the arms differ in more than the variable: {listed}"
        )
    if not_acted:
        return Verdict(
            word="inconclusive", reason=f"the variable was not seen to act: {not_acted[0]}"
        )
    found = len(effect.pairs)
    if hypothesis.kind == "ratio" and found < MIN_PAIRS:
        return Verdict(
            word="inconclusive",
            reason=f"too few replicates: {found} pairs, at least {MIN_PAIRS} needed",
        )
    if found < pairs_planned:
        return Verdict(
            word="inconclusive", reason=f"only {found} of {pairs_planned} pairs have a value"
        )
    return _decide(hypothesis, effect, quality)


def _decide(hypothesis: Hypothesis, effect: Effect, quality: Sequence[str]) -> Verdict:
    if hypothesis.kind == "exact":
        beyond, within, is_reversed = _exact(hypothesis, effect)
    else:
        beyond = (effect.p_beyond or 0.0) <= ALPHA
        within = (effect.p_within or 0.0) <= ALPHA
        is_reversed = (effect.p_reversed or 0.0) <= ALPHA
    claim = f"a {hypothesis.direction} of {hypothesis.measure} by more than {hypothesis.margin:.0%}"
    if beyond and quality:
        return Verdict(word="not supported", reason=f"quality: {quality[0]}")
    if beyond:
        return Verdict(word="supported", reason=f"the data show {claim}")
    if within:
        return Verdict(
            word="not supported",
            reason=f"the data rule out {claim}",
            reversed=is_reversed,
        )
    return Verdict(word="inconclusive", reason=f"the data neither show nor rule out {claim}")


def _exact(hypothesis: Hypothesis, effect: Effect) -> tuple[bool, bool, bool]:
    """Compare counts exactly: every pair beyond the margin, or every pair within it."""
    sign = -1.0 if hypothesis.direction == "decrease" else 1.0
    gains = [sign * math.log(r) for r in effect.pairs]
    margin = margin_log(hypothesis)
    return (
        all(g > margin for g in gains),
        all(g <= margin for g in gains),
        all(g < -margin for g in gains),
    )


def pair_logs(
    readings: Mapping[tuple[int, str], Reading], pairs: int
) -> tuple[list[float], list[str]]:
    """Return the log ratios of the complete pairs, and why the others are incomplete.

    `readings` holds the primary measure by (pair, "baseline" or "candidate").
    """
    logs, missing = [], []
    for pair in range(pairs):
        a, b = readings.get((pair, "baseline")), readings.get((pair, "candidate"))
        if a is None or b is None:
            missing.append(f"pair {pair}: a replicate is missing")
        elif not a.value or not b.value or a.value < 0 or b.value < 0:
            reasons = [r.reason or f"value {r.value}" for r in (a, b) if not r.value or r.value < 0]
            missing.append(f"pair {pair}: {reasons[0]}")
        else:
            logs.append(math.log(b.value / a.value))
    return logs, missing


def check_acted(
    conditions: Sequence[Condition], readings: Mapping[tuple[str, str, int], Reading]
) -> list[str]:
    """Return what contradicts "the variable acted", over all replicates; empty when it did.

    `readings` is keyed by (arm role, measure, replicate).
    """
    broken = []
    for condition in conditions:
        for (role, measure, replicate), reading in readings.items():
            if role != condition.arm or measure != condition.measure:
                continue
            if reading.value is None:
                broken.append(f"{condition} is unknown in replicate {replicate}: {reading.reason}")
            elif not condition.holds(reading.value):
                broken.append(f"{condition} fails in replicate {replicate}: {reading.value:g}")
    return broken


def flatten(value: Any, path: str = "") -> dict[str, Any]:
    """Return nested JSON as `a.b.c` -> leaf; lists are leaves."""
    if not isinstance(value, Mapping):
        return {path: value}
    flat: dict[str, Any] = {}
    for key, inner in value.items():
        flat.update(flatten(inner, f"{path}.{key}" if path else str(key)))
    return flat


def find_confounders(
    resolved: Mapping[str, Sequence[Mapping[str, Any]]], consequences: Sequence[str]
) -> list[str]:
    """Return `path: a / b` where resolved configurations differ beyond the declared paths.

    `resolved` maps an arm's role to the configuration of each of its replicates. Replicates of
    one arm must agree too, else the arm is not one thing. A declared path covers what is under it.
    """
    flat = {role: [flatten(one) for one in each] for role, each in resolved.items()}
    found = []
    paths = sorted({p for each in flat.values() for one in each for p in one})
    for path in paths:
        values = {role: [repr(one.get(path)) for one in each] for role, each in flat.items()}
        for role, each in values.items():
            if len(set(each)) > 1:
                found.append(f"{path} changed within {role}: {' / '.join(sorted(set(each)))}")
        declared = any(path == c or path.startswith(f"{c}.") for c in consequences)
        firsts = {each[0] for each in values.values() if each}
        if len(firsts) > 1 and not declared:
            found.append(f"{path}: {' / '.join(each[0] for each in values.values() if each)}")
    return found
