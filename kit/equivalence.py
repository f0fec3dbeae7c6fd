"""Did a result come back? Pure statistics on two runs of one plan.

Two one-sided tests (TOST) against bounds that were registered with the first run: a difference
inside the bounds is "same", one outside them is "different", and everything else is undecided.
"No significant difference" is never taken for "same".
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

import numpy as np
from scipy import stats

from kit.value import Value

ALPHA_SAME = 0.05  # each of the two one-sided tests, as is usual for TOST
ALPHA_DIFFERENT = 0.025  # one-sided, as for every other verdict

Says = Literal["same", "different", "undecided"]


class Closeness(Value):
    """How close one quantity of two runs is.

    `ratio` is the second run over the first, `low` and `high` its 90 % interval: the quantity is
    "same" when all of it lies between 1/exp(bound) and exp(bound). `p_same` and `p_different` are
    the chances of such data if the true difference is exactly the bound. Null: a ratio to 0, and
    a chance where nothing varies.
    """

    what: str
    first: tuple[float, ...]
    second: tuple[float, ...]
    ratio: float | None
    low: float | None
    high: float | None
    bound: float
    p_same: float | None
    p_different: float | None
    says: Says


def compare_logs(
    what: str, first: Sequence[float], second: Sequence[float], bound: float
) -> Closeness:
    """Test whether two samples of positive values have the same geometric mean, within `bound`.

    `bound` is a log ratio above 0. The two samples may vary differently (Welch's t). Where
    neither varies the difference itself decides. Raises `ValueError` for fewer than two values
    in a sample or one that is not positive and finite.
    """
    values = [*first, *second]
    if min(len(first), len(second)) < 2 or not all(math.isfinite(v) and v > 0 for v in values):
        raise ValueError("compare_logs needs two or more positive values on each side")
    a, b = np.log(first), np.log(second)
    difference = float(b.mean() - a.mean())
    parts = [float(x.var(ddof=1)) / len(x) for x in (a, b)]
    error = math.sqrt(sum(parts))
    says: Says
    if error < 1e-12:
        says = "same" if abs(difference) <= bound + 1e-12 else "different"
        p_same = p_different = None
        half = 0.0
    else:
        freedom = sum(parts) ** 2 / sum(
            p**2 / (len(x) - 1) for p, x in zip(parts, (a, b), strict=True)
        )
        spread = stats.t(freedom)
        p_same = float(
            max(spread.sf((difference + bound) / error), spread.cdf((difference - bound) / error))
        )
        p_different = float(spread.sf((abs(difference) - bound) / error))
        half = float(spread.ppf(1 - ALPHA_SAME)) * error
        says = (
            "same"
            if p_same <= ALPHA_SAME
            else "different"
            if p_different <= ALPHA_DIFFERENT
            else "undecided"
        )
    return Closeness(
        what=what,
        first=tuple(first),
        second=tuple(second),
        ratio=math.exp(difference),
        low=math.exp(difference - half),
        high=math.exp(difference + half),
        bound=bound,
        p_same=p_same,
        p_different=p_different,
        says=says,
    )


def compare_counts(
    what: str, first: Sequence[float], second: Sequence[float], bound: float
) -> Closeness:
    """Compare counts exactly: by every pair of a value of one run and a value of the other.

    Same: even the furthest two differ by at most `bound`. Different: even the nearest two differ
    by more. A zero equals a zero alone. Raises `ValueError` for an empty side.
    """
    if not first or not second:
        raise ValueError("compare_counts needs values on both sides")
    gaps = [_gap(x, y) for x in first for y in second]
    if max(gaps) <= bound + 1e-12:
        says: Says = "same"
    else:
        says = "different" if min(gaps) > bound + 1e-12 else "undecided"
    return Closeness(
        what=what,
        first=tuple(first),
        second=tuple(second),
        ratio=_ratio(float(np.median(first)), float(np.median(second))),
        low=_ratio(max(first), min(second)),
        high=_ratio(min(first), max(second)),
        bound=bound,
        p_same=None,
        p_different=None,
        says=says,
    )


def _gap(x: float, y: float) -> float:
    """Return how far two counts are apart, as a log ratio."""
    if x == y:
        return 0.0
    return math.inf if x <= 0 or y <= 0 else abs(math.log(y / x))


def _ratio(x: float, y: float) -> float | None:
    if x == y:
        return 1.0
    return y / x if x else None
