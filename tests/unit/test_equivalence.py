"""Two one-sided tests: against scipy's own t test, at their limits, and on data without spread."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from kit.equivalence import compare_counts, compare_logs

positive = st.lists(st.floats(0.01, 100), min_size=2, max_size=12)


def test_the_p_values_are_those_of_two_welch_tests() -> None:
    draw = np.random.default_rng(7)
    a, b = np.exp(draw.normal(0, 0.1, 7)), np.exp(draw.normal(0.05, 0.3, 9))
    found = compare_logs("effect", a.tolist(), b.tolist(), 0.15)
    shifted = [
        stats.ttest_ind(np.log(b) + s, np.log(a), equal_var=False, alternative=side).pvalue
        for s, side in ((0.15, "greater"), (-0.15, "less"))
    ]
    assert found.p_same == pytest.approx(max(shifted))
    assert found.ratio == pytest.approx(math.exp(np.log(b).mean() - np.log(a).mean()))


def test_close_samples_are_the_same_and_distant_ones_different() -> None:
    first = [1.00, 1.02, 0.99, 1.01, 1.00, 0.98]
    assert compare_logs("x", first, [1.01 * v for v in first], 0.15).says == "same"
    assert compare_logs("x", first, [1.30 * v for v in first], 0.15).says == "different"
    assert compare_logs("x", first, [0.75 * v for v in first], 0.15).says == "different"


def test_wide_samples_are_undecided_and_never_the_same() -> None:
    assert compare_logs("x", [0.5, 1, 2, 0.6, 1.9, 1], [0.6, 1, 2, 0.5, 1, 1.8], 0.1).says == (
        "undecided"
    )


def test_values_without_spread_are_decided_by_their_difference() -> None:
    assert compare_logs("x", [2.0, 2.0], [2.0, 2.0], 0.02).says == "same"
    assert compare_logs("x", [2.0, 2.0], [2.1, 2.1], 0.02).says == "different"


@pytest.mark.parametrize("bad", [[1.0], [], [1.0, 0.0], [1.0, -1.0], [1.0, math.inf]])
def test_unusable_samples_are_refused(bad: list[float]) -> None:
    with pytest.raises(ValueError, match="compare_logs"):
        compare_logs("x", bad, [1.0, 2.0], 0.1)


@given(positive, positive, st.floats(0.01, 1))
def test_same_means_that_the_interval_is_inside_the_bounds(
    a: list[float], b: list[float], bound: float
) -> None:
    found = compare_logs("x", a, b, bound)
    assert found.low is not None
    assert found.high is not None
    inside = -bound <= math.log(found.low) and math.log(found.high) <= bound
    if abs(abs(math.log(found.low)) - bound) > 1e-6 < abs(abs(math.log(found.high)) - bound):
        assert (found.says == "same") == inside


@given(positive, positive, st.floats(0.01, 1))
def test_the_order_of_the_runs_does_not_matter(
    a: list[float], b: list[float], bound: float
) -> None:
    assert compare_logs("x", a, b, bound).says == compare_logs("x", b, a, bound).says
    assert compare_counts("x", a, b, bound).says == compare_counts("x", b, a, bound).says


def test_counts_are_compared_exactly() -> None:
    assert compare_counts("x", [364], [364], 0.02).says == "same"
    assert compare_counts("x", [364, 364], [1456, 1456], 0.02).says == "different"
    assert compare_counts("x", [100, 100], [100, 110], 0.02).says == "undecided"


def test_a_zero_equals_a_zero_alone() -> None:
    assert compare_counts("x", [0, 0], [0, 0], 0.3).says == "same"
    found = compare_counts("x", [0, 0], [3, 5], 0.3)
    assert (found.says, found.ratio) == ("different", None)
