"""From readings to one word. Pure; the rules are registered in the plan before any data.

Order: unsupported, invalid, confounded, inconclusive (the variable did not act, too few
replicates, no decision), supported or not supported. Nothing later can lift something earlier.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, Literal

import numpy as np
from scipy import stats

from kit.experiment import ANYTHING, Condition, Hypothesis
from kit.guard import GuardResult
from kit.measure import Reading
from kit.sequential import Stopping, signed_sums, stops_at
from kit.value import Value

ALPHA = 0.025  # one-sided
MIN_PAIRS = 6  # 2**-5 would exceed ALPHA: five pairs can never decide
EXACT_PAIRS = 32  # two halves of 65,536 sign patterns; beyond, a t test

Word = Literal["unsupported", "invalid", "confounded", "inconclusive", "supported", "not supported"]
Pair = tuple[float, float]
"""The primary measure of a pair's two replicates: baseline, candidate."""


class Effect(Value):
    """The primary measure's effect: candidate over baseline, pair by pair.

    `values` are the pairs' readings (baseline, candidate), `pairs` their ratios (null over 0).
    `ratio` is the geometric mean of the ratios; `low` and `high` its 95 % t interval (null under
    2 pairs, and all three null when a count is 0). `p_beyond` is the chance of such data if the
    effect only equals the margin, `p_within` if it exceeds the margin, `p_reversed` if it is not
    beyond the margin the other way; all null for counts, which are compared exactly.
    """

    measure: str
    values: tuple[Pair, ...] = ()
    pairs: tuple[float | None, ...] = ()
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
    """Return the one-sided p for a mean above 0: exact sign flips, a t test beyond 32 values.

    Under the null each value is as likely to be its own negative; p is the share of the sign
    patterns whose sum is at least the observed one. The patterns of two halves are combined by
    searching, so that all 2**n are counted without being listed.
    Raises `ValueError` for no values or one that is not finite.
    """
    x = np.asarray(values, dtype=float)
    if not len(x) or not np.isfinite(x).all():
        raise ValueError(f"sign_flip_p needs finite values, not {values!r}")
    if len(x) > EXACT_PAIRS:
        return float(stats.ttest_1samp(x, 0.0, alternative="greater").pvalue)
    absolute = np.abs(x)
    some = signed_sums(absolute[: len(x) // 2])
    others = np.sort(signed_sums(absolute[len(x) // 2 :]))
    least = float(x.sum()) - 1e-12 * float(absolute.sum())
    below = np.searchsorted(others, least - some, side="left")
    return float((len(others) - below).sum() / 2 ** len(x))


def margin_log(hypothesis: Hypothesis) -> float:
    """Return the margin as a positive log ratio in the hypothesis' direction."""
    if hypothesis.direction == "decrease":
        return -math.log1p(-hypothesis.margin)
    return math.log1p(hypothesis.margin)


@dataclass(frozen=True)
class Sides:
    """Each pair's log ratio past a limit: above 0 speaks for what the field is named after.

    Rounded to 1e-12, so that an effect of exactly the margin is on neither side of it.
    """

    beyond: tuple[float, ...]
    within: tuple[float, ...]
    reversed: tuple[float, ...]


def sides_of(hypothesis: Hypothesis, pairs: Sequence[Pair]) -> Sides:
    """Return where the pairs lie: beyond the margin, within it, beyond it the other way."""
    sign = -1.0 if hypothesis.direction == "decrease" else 1.0
    gains = [sign * math.log(b / a) for a, b in pairs]
    margin = margin_log(hypothesis)
    return Sides(
        beyond=tuple(round(g - margin, 12) for g in gains),
        within=tuple(round(margin - g, 12) for g in gains),
        reversed=tuple(round(-g - margin, 12) for g in gains),
    )


def effect_of(hypothesis: Hypothesis, pairs: Sequence[Pair]) -> Effect:
    """Compute the effect from the complete pairs."""
    effect = Effect(
        measure=hypothesis.measure,
        values=tuple(pairs),
        pairs=tuple(b / a if a else None for a, b in pairs),
    )
    if not pairs or any(a <= 0 or b <= 0 for a, b in pairs):
        return effect
    logs = np.log([b / a for a, b in pairs])
    mean = float(logs.mean())
    found: dict[str, float] = {"ratio": math.exp(mean)}
    if len(logs) > 1:
        half = float(stats.t.ppf(0.975, len(logs) - 1) * logs.std(ddof=1) / math.sqrt(len(logs)))
        found |= {"low": math.exp(mean - half), "high": math.exp(mean + half)}
    if hypothesis.kind == "ratio":
        sides = sides_of(hypothesis, pairs)
        found |= {
            "p_beyond": sign_flip_p(sides.beyond),
            "p_within": sign_flip_p(sides.within),
            "p_reversed": sign_flip_p(sides.reversed),
        }
    return effect.model_copy(update=found)


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
    stopping: Stopping | None = None,
) -> Verdict:
    """Return the verdict. Every argument is a finding; the first that forbids one decides.

    With `stopping` the run may have ended at any of its looks; `pairs_planned` is then the
    number of pairs that were run.
    """
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
    found = len(effect.values)
    if found < MIN_PAIRS:
        return Verdict(
            word="inconclusive",
            reason=f"too few replicates: {found} pairs, at least {MIN_PAIRS} needed",
        )
    if found < pairs_planned:
        return Verdict(
            word="inconclusive", reason=f"only {found} of {pairs_planned} pairs have a value"
        )
    return _decide(hypothesis, effect, quality, stopping)


def _decide(
    hypothesis: Hypothesis, effect: Effect, quality: Sequence[str], stopping: Stopping | None
) -> Verdict:
    if hypothesis.kind == "exact":
        beyond, within, is_reversed = _exact(hypothesis, effect.values)
    elif stopping is not None:
        beyond, within, is_reversed = _sequential(hypothesis, effect.values, stopping)
    else:
        beyond, within, is_reversed = (
            p is not None and p <= ALPHA
            for p in (effect.p_beyond, effect.p_within, effect.p_reversed)
        )
    article = "an" if hypothesis.direction == "increase" else "a"
    change = f"{article} {hypothesis.direction} of {hypothesis.measure}"
    claim = f"{change} by more than {hypothesis.margin:.0%}"
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


def _exact(hypothesis: Hypothesis, pairs: Sequence[Pair]) -> tuple[bool, bool, bool]:
    """Compare counts exactly: every pair beyond the margin, within it, beyond it the other way.

    In fractions, since 100 * (1 - 0.1) is not 90 in floating point. By chance alone all pairs
    would agree with probability 2**-n, which six pairs make smaller than ALPHA.
    """
    margin = Fraction(str(hypothesis.margin))
    factor = 1 - margin if hypothesis.direction == "decrease" else 1 + margin
    opposite = 1 + margin if hypothesis.direction == "decrease" else 1 - margin

    def is_past(pair: Pair, limit: Fraction) -> bool:
        before, after = Fraction(pair[0]) * limit, Fraction(pair[1])
        return after < before if limit < 1 else after > before

    past = [is_past(pair, factor) for pair in pairs]
    return all(past), not any(past), all(is_past(pair, opposite) for pair in pairs)


def _sequential(
    hypothesis: Hypothesis, pairs: Sequence[Pair], stopping: Stopping
) -> tuple[bool, bool, bool]:
    """Decide by the registered looks; nothing is decided when the run ended between two."""
    if len(pairs) not in stopping.looks:
        return False, False, False
    sides = sides_of(hypothesis, pairs)
    beyond, within, is_reversed = (
        stops_at(stopping, side) is not None
        for side in (sides.beyond, sides.within, sides.reversed)
    )
    return beyond and not within, within and not beyond, is_reversed


def may_stop(hypothesis: Hypothesis, pairs: Sequence[Pair], stopping: Stopping) -> bool:
    """Tell whether a run with `--replicates auto` has its answer after these pairs.

    True at a look at which the rule decides, and after the last look. `pairs` are all complete
    pairs so far, in the order in which they ran.
    """
    if len(pairs) >= stopping.pairs:
        return True
    beyond, within, _ = _sequential(hypothesis, pairs, stopping)
    return beyond or within


def find_pairs(
    readings: Mapping[tuple[int, str], Reading],
    pairs: Iterable[int],
    kind: Literal["ratio", "exact"] = "ratio",
) -> tuple[list[Pair], list[str]]:
    """Return the complete ones of these pairs in order, and why the others are incomplete.

    `readings` holds the primary measure by (pair, "baseline" or "candidate"). A ratio needs
    values above 0; counts may be 0.
    """
    found, missing = [], []
    for pair in pairs:
        a, b = readings.get((pair, "baseline")), readings.get((pair, "candidate"))
        if a is None or b is None:
            missing.append(f"pair {pair}: a replicate is missing")
            continue
        reasons = [reason for r in (a, b) if (reason := _unusable(r, kind))]
        if reasons or a.value is None or b.value is None:
            missing.append(f"pair {pair}: {reasons[0]}")
        else:
            found.append((a.value, b.value))
    return found, missing


def _unusable(reading: Reading, kind: Literal["ratio", "exact"]) -> str | None:
    value = reading.value
    if value is None:
        return reading.reason or "no value"
    least_is_zero = kind == "exact"
    if not math.isfinite(value) or value < 0 or (value == 0 and not least_is_zero):
        return f"value {value:g}"
    return None


def check_acted(
    conditions: Sequence[Condition], readings: Mapping[tuple[str, str, int], Reading]
) -> list[str]:
    """Return what contradicts "the variable acted", over all replicates; empty when it did.

    `readings` is keyed by (arm role, measure, replicate). A condition whose measure was never
    read is contradicted too.
    """
    broken = []
    for condition in conditions:
        read = False
        text = f"{condition.otherwise}: {condition}" if condition.otherwise else str(condition)
        for (role, measure, replicate), reading in readings.items():
            if role != condition.arm or measure != condition.measure:
                continue
            read = True
            if reading.value is None:  # which says nothing of what it means
                broken.append(f"{condition} is unknown in replicate {replicate}: {reading.reason}")
            elif not condition.holds(reading.value):
                broken.append(f"{text} fails in replicate {replicate}: {reading.value:g}")
        if not read:
            broken.append(f"{text} was never read")
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
        declared = any(c in (path, ANYTHING) or path.startswith(f"{c}.") for c in consequences)
        firsts = {each[0] for each in values.values() if each}
        if len(firsts) > 1 and not declared:
            found.append(f"{path}: {' / '.join(each[0] for each in values.values() if each)}")
    return found
